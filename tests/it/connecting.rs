//! From a URL to a lock that holds.

use lockkit::LockConfig;

#[tokio::test]
async fn memory_is_one_space_per_namespace_in_this_process() {
    let one = lockkit::connect("memory:?namespace=shared").await.unwrap();
    let two = lockkit::connect("memory:?namespace=shared").await.unwrap();
    let other = lockkit::connect("memory:?namespace=other").await.unwrap();
    let guard = one.lock("x").unwrap().acquire().await.unwrap();
    assert!(two.lock("x").unwrap().try_acquire().await.unwrap().is_none());
    let elsewhere = other.lock("x").unwrap().try_acquire().await.unwrap();
    assert!(elsewhere.is_some(), "another namespace");
    assert_eq!(one.lock("x").unwrap().id(), two.lock("x").unwrap().id());
    assert_ne!(one.lock("x").unwrap().id(), other.lock("x").unwrap().id());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn the_default_namespace_is_lockkit() {
    let client = lockkit::connect("memory:").await.unwrap();
    assert_eq!(&*client.info().namespace, "lockkit");
}

#[tokio::test]
async fn connecting_to_a_bad_url_is_the_error_of_reading_it() {
    for url in ["", "consul://h", "memory:?tll=1s", "mysql://h"] {
        let of_reading = LockConfig::from_url(url).unwrap_err().to_string();
        assert_eq!(lockkit::connect(url).await.unwrap_err().to_string(), of_reading);
        assert_eq!(
            LockConfig::new(url).connect().await.unwrap_err().to_string(),
            of_reading
        );
    }
}

/// They are read before anybody is asked, so that an error shows that the backend has been told of them.
#[cfg(all(
    feature = "tls",
    any(feature = "redis", feature = "zk", feature = "mysql", feature = "etcd")
))]
mod certificates {
    use lockkit::Error;

    /// URLs whose next parameter is `cert`, and the tables of their backends.
    const URLS: &[(&str, &str)] = &[
        #[cfg(feature = "redis")]
        ("rediss://127.0.0.1:1?", "redis"),
        #[cfg(feature = "redis")]
        (
            "redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3?tls=true&",
            "redlock",
        ),
        #[cfg(feature = "zk")]
        ("zk://127.0.0.1:1?tls=unverified&", "zk"),
        #[cfg(feature = "etcd")]
        ("etcd://127.0.0.1:1?tls=unverified&", "etcd"),
        #[cfg(feature = "mysql")]
        ("mysql://locker@127.0.0.1:1/app?tls=unverified&", "mysql"),
    ];

    /// The file that `option` names is none that the backend can use.
    fn names(error: &Error, expected: &str, file: &str) {
        match error {
            Error::InvalidOptions { option, reason, .. } => {
                assert_eq!(*option, expected, "{reason}");
                assert!(reason.contains(file), "{reason}");
            }
            other => panic!("{other:?} for {expected}"),
        }
    }

    #[tokio::test]
    async fn a_url_names_their_files() {
        let certificates = lockkit_testbed::Certificates::generate().unwrap();
        let cert = certificates.client();
        let cert = cert.display();
        for (url, _) in URLS {
            let connect = async |rest: String| lockkit::connect(&format!("{url}{rest}")).await.unwrap_err();
            let error = connect("cert=/none/me.pem&key=/none/me.key".into()).await;
            names(&error, "cert", "/none/me.pem cannot be read");
            let error = connect(format!("cert={cert}&key=/none/me.key")).await;
            names(&error, "key", "/none/me.key cannot be read");
        }
    }

    #[cfg(feature = "serde")]
    #[tokio::test]
    async fn a_config_file_names_their_files() {
        for (url, table) in URLS {
            let url = &url[..url.len() - 1];
            let text = format!("url = '{url}'\n[{table}]\ncert = '/none/me.pem'\nkey = '/none/me.key'\n");
            let config: lockkit::LockConfig = toml::from_str(&text).unwrap();
            let error = config.connect().await.unwrap_err();
            names(&error, "cert", "/none/me.pem cannot be read");
        }
    }
}

#[cfg(feature = "file")]
mod file {
    use lockkit::Error;

    #[tokio::test]
    async fn two_clients_of_one_directory_exclude_each_other() {
        let dir = tempfile::tempdir().unwrap();
        // A space and a `#`, to see that the path is decoded.
        let url = format!("file://{}/a%20%23b?namespace=t&poll=5ms", dir.path().display());
        let one = lockkit::connect(&url).await.unwrap();
        let two = lockkit::connect(&url.replacen("file://", "file:", 1))
            .await
            .unwrap();
        let guard = one.lock("x").unwrap().acquire().await.unwrap();
        assert!(two.lock("x").unwrap().try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
        let guard = two.lock("x").unwrap().try_acquire().await.unwrap();
        assert!(guard.is_some());
        assert!(dir.path().join("a #b").is_dir());
    }

    #[tokio::test]
    async fn a_directory_that_cannot_be_is_an_error_of_the_backend() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let url = format!("file://{}", file.path().display());
        let error = lockkit::connect(&url).await.unwrap_err();
        assert!(
            matches!(error, Error::Backend { backend: "file", .. }),
            "{error:?}"
        );
    }
}

/// docs/guide.md says that paused time works with memory and files.
#[cfg(all(feature = "file", unix))]
#[tokio::test(start_paused = true)]
async fn memory_and_files_work_on_paused_time() {
    use std::time::{Duration, Instant};

    const HOUR: Duration = Duration::from_secs(3_600);
    let dir = tempfile::tempdir().unwrap();
    let file = format!("file://{}", dir.path().display());
    let began = Instant::now();
    for url in ["memory:?namespace=paused", &file] {
        let (one, two) = (
            lockkit::connect(url).await.unwrap(),
            lockkit::connect(url).await.unwrap(),
        );
        let guard = one.lock("job").unwrap().acquire().await.unwrap();
        let late = two.lock("job").unwrap().acquire_timeout(HOUR).await.unwrap_err();
        assert!(late.is_timeout(), "{url}: {late}");
        assert!(guard.is_held(), "{url}");
        let next = two.lock("job").unwrap();
        let next = tokio::spawn(async move { next.acquire_timeout(HOUR).await });
        tokio::time::sleep(HOUR / 2).await;
        guard.release().await.unwrap();
        next.await.unwrap().unwrap().release().await.unwrap();
    }
    assert!(began.elapsed() < HOUR / 4, "in no time: {:?}", began.elapsed());
}
