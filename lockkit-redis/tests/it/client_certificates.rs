//! Client certificates, for servers that ask for them, and the servers' own.

use std::sync::Arc;

use lockkit_core::Error;
use lockkit_redis::{RedisConfig, RedlockConfig};
use lockkit_testbed::{Certificates, ServerPair, redis::RedisServer};

use crate::common::{SECOND, connect, lock, no_server, shown};

#[tokio::test]
async fn a_server_that_asks_for_a_certificate_gets_it() {
    if no_server() {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let strangers = Certificates::generate().unwrap();
    let server = RedisServer::builder()
        .tls(&certificates)
        .directive("tls-auth-clients", &["yes"])
        .password("open-sesame")
        .start()
        .unwrap();
    let with = |identity| {
        let mut config = RedisConfig::new(server.url());
        config.ca = Some(certificates.authority());
        (config.cert, config.key) = match identity {
            Some((cert, key)) => (Some(cert), Some(key)),
            None => (None, None),
        };
        config
    };
    let known = (certificates.client(), certificates.client_key());
    let client = connect(with(Some(known.clone()))).await.unwrap();
    let held = lock(&client, "a", 6 * SECOND).acquire().await.unwrap();
    held.renew().await.unwrap();
    held.release().await.unwrap();
    let unknown = "does not accept the certificate of `cert`";
    for (identity, reason) in [
        (None, "asks for a client certificate"),
        (Some((strangers.client(), strangers.client_key())), unknown),
        (
            Some((certificates.expired_client(), certificates.expired_client_key())),
            "(alert CertificateExpired)",
        ),
    ] {
        let error = connect(with(identity)).await.unwrap_err();
        let text = shown(&error);
        assert!(!error.is_transient() && text.contains(reason), "{text}");
        assert!(!text.contains("sesame"), "{text}");
    }
    // The system's authorities know nothing of this server, whoever the client is.
    let mut of_system = with(Some(known));
    of_system.ca = None;
    let text = shown(&connect(of_system).await.unwrap_err());
    assert!(text.contains("invalid peer certificate"), "{text}");
}

/// The authority is the right one.
#[tokio::test]
async fn a_certificate_for_another_host_or_time_is_refused() {
    if no_server() {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    for (which, reason) in [
        (ServerPair::Valid, None),
        (ServerPair::Elsewhere, Some("elsewhere.example")),
        (ServerPair::Expired, Some("expired")),
    ] {
        let pair = certificates.server_pair(which);
        let pair = pair.to_str().unwrap();
        let server = RedisServer::builder()
            .tls(&certificates)
            .directive("tls-cert-file", &[pair])
            .directive("tls-key-file", &[pair])
            .start()
            .unwrap();
        let mut config = RedisConfig::new(server.url());
        config.ca = Some(certificates.authority());
        let connected = connect(config).await;
        match reason {
            None => drop(connected.unwrap()),
            Some(reason) => {
                let text = shown(&connected.expect_err("it is not this host's"));
                assert!(text.contains(reason), "{text}");
            }
        }
    }
}

#[tokio::test]
async fn files_that_cannot_be_used_are_named() {
    let certificates = Certificates::generate().unwrap();
    let strangers = Certificates::generate().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let none = directory.path().join("none.pem");
    let empty = directory.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let body = "TUlHSEFnRUFNQk1HQnlxR1NNNDlBZ0VHQ0NxR1NNNDlBd0VI";
    let broken = |label: &str| {
        let path = directory.path().join(format!("broken {label}.pem"));
        let block = format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n");
        std::fs::write(&path, block).unwrap();
        path
    };
    let (broken_certificate, broken_key) = (broken("CERTIFICATE"), broken("PRIVATE KEY"));
    let (cert, key) = (certificates.client(), certificates.client_key());
    for (ca, identity, option, reason) in [
        (Some(&empty), None, "ca", "empty.pem has no certificate"),
        (Some(&none), None, "ca", "none.pem cannot be read"),
        (Some(&broken_certificate), None, "ca", "that is no authority's"),
        (None, Some((&none, &key)), "cert", "none.pem cannot be read"),
        (None, Some((&empty, &key)), "cert", "empty.pem has no certificate"),
        (None, Some((&broken_certificate, &key)), "cert", "is damaged"),
        (None, Some((&cert, &none)), "key", "none.pem cannot be read"),
        (None, Some((&cert, &cert)), "key", "has no private key"),
        (None, Some((&cert, &broken_key)), "key", "KEY.pem cannot be used"),
        (
            None,
            Some((&cert, &strangers.client_key())),
            "key",
            "is not the private key of",
        ),
    ] {
        // Nobody listens there: the files come first.
        let mut config = RedisConfig::new("rediss://:open-sesame@127.0.0.1:1");
        config.ca = ca.cloned();
        if let Some((cert, key)) = identity {
            (config.cert, config.key) = (Some(cert.clone()), Some(key.clone()));
        }
        let shown = format!("{config:?}");
        assert!(!shown.contains("sesame") && !shown.contains(body), "{shown}");
        match connect(config).await.unwrap_err() {
            Error::InvalidOptions {
                option: named,
                reason: said,
                ..
            } => {
                assert_eq!(named, option, "{said}");
                assert!(said.contains(reason) && !said.contains(body), "{said}");
            }
            other => panic!("{other:?} for {reason}"),
        }
    }
    // All masters of Redlock have the same.
    let mut config = RedlockConfig::new("redlock://a,b,c");
    config.tls = true;
    (config.cert, config.key) = (Some(cert), Some(none));
    let error = lockkit_redis::RedlockBackend::connect(config).await.unwrap_err();
    assert!(
        matches!(error, Error::InvalidOptions { option: "key", .. }),
        "{error:?}"
    );
}
