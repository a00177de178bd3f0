//! `LockConfig` as a config file has it.

use std::time::Duration;

use lockkit::{AcquireOptions, LockConfig};

#[tokio::test]
async fn a_key_of_the_config_wins_over_the_parameter_of_the_url() {
    let config = LockConfig::new("memory:?ttl=10s&wait=3s&namespace=of-url").ttl(Duration::from_secs(20));
    let client = config.connect().await.unwrap();
    assert_eq!(&*client.info().namespace, "of-url");
    let lock = client.lock("x").unwrap();
    assert_eq!(lock.options().ttl, Some(Duration::from_secs(20)));
    assert_eq!(lock.options().wait, Some(Duration::from_secs(3)));
}

#[tokio::test]
async fn the_lock_and_the_call_win_over_the_config() {
    let config = LockConfig::new("memory:?namespace=precedence")
        .label("config")
        .wait(Duration::from_secs(60));
    let client = config.connect().await.unwrap();
    let label = async || {
        client.inspect("x").await.unwrap().holders[0]
            .label
            .clone()
            .unwrap()
    };
    let lock = client.lock("x").unwrap();
    let guard = lock.acquire().await.unwrap();
    assert_eq!(label().await, "config");
    guard.release().await.unwrap();
    let lock = lock.with_options(AcquireOptions::new().label("lock"));
    let guard = lock.acquire().await.unwrap();
    assert_eq!(label().await, "lock");
    guard.release().await.unwrap();
    let guard = lock
        .acquire_with(&AcquireOptions::new().label("call"))
        .await
        .unwrap();
    assert_eq!(label().await, "call");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn options_out_of_range_are_refused_before_anything_is_opened() {
    for (config, option) in [
        (LockConfig::new("memory:").ttl(Duration::ZERO), "ttl"),
        (LockConfig::new("memory:").wait(Duration::MAX), "wait"),
        (
            LockConfig::new("memory:").op_timeout(Duration::ZERO),
            "op_timeout",
        ),
        (
            LockConfig::new("memory:").connect_timeout(Duration::ZERO),
            "connect_timeout",
        ),
        (LockConfig::new("memory:").namespace("a b"), "namespace"),
        (LockConfig::new("memory:").label("x".repeat(257)), "label"),
        (
            LockConfig::new("memory:").local_handoffs(65_536),
            "local_handoffs",
        ),
    ] {
        match config.connect().await {
            Err(lockkit::Error::InvalidOptions { option: named, .. }) => assert_eq!(named, option),
            other => panic!("{option}: {other:?}"),
        }
    }
}

/// Options that are good only together may be some here, some there, and none of them alone is asked about.
#[cfg(all(
    feature = "redis",
    feature = "zk",
    feature = "mysql",
    feature = "etcd",
    feature = "postgres",
    feature = "tls"
))]
mod together {
    use std::path::PathBuf;

    use lockkit::{Error, LockConfig};

    use super::*;

    fn with(url: &str, set: impl FnOnce(&mut LockConfig)) -> LockConfig {
        let mut config = LockConfig::new(url);
        set(&mut config);
        config
    }

    /// Nobody listens at these addresses, and to find that out is to have taken the options.
    #[tokio::test]
    async fn what_url_and_table_say_is_one_config() {
        let certificates = lockkit_testbed::Certificates::generate().unwrap();
        let ca = certificates.authority();
        let ca: &PathBuf = &ca;
        let (cert, key) = (certificates.client(), certificates.client_key());
        let (cert, key) = (&cert, &key);
        let identity = format!("cert={}&key={}", cert.display(), key.display());
        let authority = format!("ca={}", ca.display());
        let tls = || Some("verify".to_owned());
        for config in [
            with("redis://127.0.0.1:1,127.0.0.1:2?sentinel=main", |_| ()),
            with("redis://127.0.0.1:1,127.0.0.1:2", |config| {
                config.redis.sentinel = Some("main".into());
            }),
            with(
                &format!("redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3?{authority}&{identity}"),
                |config| config.redlock.tls = Some(true),
            ),
            with("redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3?ttl=2m", |config| {
                config.redlock.max_ttl = Some(Duration::from_secs(300));
            }),
            with(
                &format!("rediss://127.0.0.1:1?cert={}", cert.display()),
                |config| {
                    config.redis.key = Some(key.clone());
                },
            ),
            with("zk://127.0.0.1:1?session_timeout=5s", |config| {
                config.zk.tick_time = Some(Duration::from_secs(1));
            }),
            with(&format!("zk://127.0.0.1:1?{authority}&{identity}"), |config| {
                config.zk.tls = tls();
            }),
            with(&format!("etcd://127.0.0.1:1?{authority}&{identity}"), |config| {
                config.etcd.tls = tls();
            }),
            with(
                &format!("mysql://me@127.0.0.1:1/app?{authority}&{identity}"),
                |config| {
                    config.mysql.tls = tls();
                },
            ),
            with("mysql://me@127.0.0.1:1/app?max_connections=1", |config| {
                config.mysql.mode = Some("for_update".into());
            }),
            with(
                "mysql://me@127.0.0.1:1/app?mode=lease&max_connections=1",
                |config| {
                    config.mysql.max_connections = Some(2);
                },
            ),
            with(
                &format!(
                    "postgres://me@127.0.0.1:1/app?sslrootcert={}&sslcert={}",
                    ca.display(),
                    cert.display()
                ),
                |config| {
                    config.postgres.sslmode = Some("verify-full".into());
                    config.postgres.sslkey = Some(key.clone());
                },
            ),
        ] {
            let error = config.connect().await.unwrap_err();
            assert!(matches!(error, Error::Backend { .. }), "{config:?}: {error}");
        }
    }

    /// An option that another one wins over does not count, nor do those of another backend.
    #[tokio::test]
    async fn only_what_is_in_force_is_validated() {
        let poll = Some(Duration::ZERO);
        for config in [
            LockConfig::new("memory:?ttl=1ms").ttl(Duration::from_secs(1)),
            LockConfig::new("memory:?max_hold=9s").ttl(Duration::from_secs(9)),
            with("memory:", |config| config.file.poll = poll),
            with("memory:", |config| config.redis.sentinel = Some(String::new())),
        ] {
            let connected = config.connect().await;
            assert!(connected.is_ok(), "{config:?}: {connected:?}");
        }
    }

    /// What is good alone may be bad together.
    #[tokio::test]
    async fn what_url_and_table_say_may_not_go_together() {
        for (config, option) in [
            (
                LockConfig::new("memory:?max_hold=20s").ttl(Duration::from_secs(30)),
                "max_hold",
            ),
            (
                with("zk://127.0.0.1:1?session_timeout=12s", |config| {
                    config.zk.tick_time = Some(Duration::from_secs(3));
                }),
                "session_timeout",
            ),
            (
                with("mysql://127.0.0.1:1/app?tls=verify&ca=/ca.pem", |config| {
                    config.mysql.tls = Some("off".into());
                }),
                "ca",
            ),
            (
                with("etcd://127.0.0.1:1?tls=verify&ca=/ca.pem", |config| {
                    config.etcd.tls = Some("unverified".into());
                }),
                "ca",
            ),
        ] {
            match config.connect().await {
                Err(Error::InvalidOptions { option: named, .. }) => assert_eq!(named, option),
                other => panic!("{option}: {other:?}"),
            }
        }
    }
}

#[cfg(feature = "serde")]
mod files {
    use super::*;

    const CANARY: &str = "s3cr3t";

    #[test]
    fn every_key_is_read() {
        let config: LockConfig = toml::from_str(
            r#"
            url = "file:///var/lib/app/locks"
            ttl = "10s"
            wait = "1m 30s"
            max_hold = "1h"
            op_timeout = "2s"
            connect_timeout = "500ms"
            namespace = ""
            label = "me"
            local_handoffs = 3

            [file]
            poll = "5ms"
            "#,
        )
        .unwrap();
        let mut expected = LockConfig::new("file:///var/lib/app/locks")
            .ttl(Duration::from_secs(10))
            .wait(Duration::from_secs(90))
            .max_hold(Duration::from_secs(3_600))
            .op_timeout(Duration::from_secs(2))
            .connect_timeout(Duration::from_millis(500))
            .namespace("")
            .label("me")
            .local_handoffs(3);
        expected.file.poll = Some(Duration::from_millis(5));
        assert_eq!(config, expected);
    }

    #[test]
    fn only_the_url_is_required() {
        let config: LockConfig = toml::from_str("url = 'memory:'").unwrap();
        assert_eq!(config, LockConfig::new("memory:"));
        let missing = toml::from_str::<LockConfig>("ttl = '1s'")
            .unwrap_err()
            .to_string();
        assert!(missing.contains("`url`"), "{missing}");
    }

    /// Both formats: TOML's errors show the line, JSON's do not.
    #[test]
    fn errors_name_the_key_and_keep_the_password() {
        for (line, json, parts) in [
            (
                "tll = '1s'",
                r#""tll": "1s""#,
                &["`tll`", "`ttl`", "`wait`", "`namespace`"][..],
            ),
            ("ttl = 'ten'", r#""ttl": "ten""#, &["`ttl`", "ten", "30s"]),
            ("wait = 30", r#""wait": 30"#, &["`wait`", "30"]),
            ("label = 7", r#""label": 7"#, &["`label`", "7"]),
            (
                "local_handoffs = 'x'",
                r#""local_handoffs": "x""#,
                &["`local_handoffs`", "x"],
            ),
            (
                "local_handoffs = -1",
                r#""local_handoffs": -1"#,
                &["`local_handoffs`", "-1"],
            ),
            (
                "file = { pol = '1s' }",
                r#""file": {"pol": "1s"}"#,
                &["`pol`", "`poll`"],
            ),
            (
                "file = { poll = '1x' }",
                r#""file": {"poll": "1x"}"#,
                &["`poll`", "1x"],
            ),
        ] {
            let url = format!("redis://user:{CANARY}@host");
            let of_toml = toml::from_str::<LockConfig>(&format!("url = '{url}'\n{line}\n")).unwrap_err();
            let json = format!(r#"{{"url": "{url}", {json}}}"#);
            let of_json = serde_json::from_str::<LockConfig>(&json).unwrap_err();
            for message in [of_toml.to_string(), of_json.to_string()] {
                for part in parts {
                    assert!(message.contains(part), "{part} in {message}");
                }
                assert!(!message.contains(CANARY), "{message}");
            }
        }
    }

    #[test]
    fn a_config_within_a_bigger_one() {
        #[derive(serde::Deserialize)]
        struct Application {
            lock: LockConfig,
        }
        let application: Application = toml::from_str("[lock]\nurl = 'memory:'\nttl = '1s'").unwrap();
        assert_eq!(application.lock.ttl, Some(Duration::from_secs(1)));
    }

    /// The keys of the others are not its own, and it keeps its own from them.
    #[test]
    fn a_config_flattened_into_a_bigger_one() {
        #[derive(serde::Deserialize)]
        struct Application {
            name: String,
            #[serde(flatten)]
            lock: LockConfig,
            #[serde(flatten)]
            rest: std::collections::BTreeMap<String, String>,
        }
        let text = format!("name = 'app'\nurl = 'redis://user:{CANARY}@host'\nttl = '1s'\nlevel = 'info'");
        let application: Application = toml::from_str(&text).unwrap();
        assert_eq!(application.name, "app");
        assert_eq!(application.lock.ttl, Some(Duration::from_secs(1)));
        assert_eq!(
            application.rest.into_iter().collect::<Vec<_>>(),
            [("level".to_owned(), "info".to_owned())]
        );
    }
}
