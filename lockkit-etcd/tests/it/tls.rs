//! Encrypted connections: who is trusted, and what a refusal says.

use std::{path::PathBuf, sync::Arc};

use lockkit_core::spi::chain;
use lockkit_etcd::{EtcdConfig, Tls};
use lockkit_testbed::{Certificates, etcd::EtcdServer};

use crate::server::{block, client, lock, no_etcd, patiently, soon, unique};

fn certificates() -> Arc<Certificates> {
    Arc::new(Certificates::generate().unwrap())
}

/// Configures a client of this server that trusts this authority alone.
fn trusting(server: &EtcdServer, certificates: &Certificates) -> EtcdConfig {
    let mut config = EtcdConfig::new(server.addr().to_string());
    config.tls = Tls::Verify;
    config.ca = Some(certificates.authority());
    config
}

fn with_identity(mut config: EtcdConfig, cert: PathBuf, key: PathBuf) -> EtcdConfig {
    (config.cert, config.key) = (Some(cert), Some(key));
    config
}

/// Acquires and releases.
async fn works(config: EtcdConfig) {
    let client = patiently(config).await;
    let guard = lock(&client, &unique("tls")).acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// Checks that a client is refused for good, for these reasons.
async fn is_refused(config: EtcdConfig, reasons: &[&str]) {
    let error = soon("an answer", client(config)).await.unwrap_err();
    let text = chain(&error);
    assert!(!error.is_transient(), "{text}");
    for reason in reasons {
        assert!(text.contains(reason), "{reason} in {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_trusted_is_told_apart() {
    if no_etcd() {
        return;
    }
    let (certificates, strangers) = (certificates(), certificates());
    let server = block(|| EtcdServer::builder().tls(&certificates).start()).unwrap();
    works(trusting(&server, &certificates)).await;
    is_refused(
        trusting(&server, &strangers),
        &["no authority that is trusted", "`ca`"],
    )
    .await;
    let mut unverified = trusting(&server, &certificates);
    (unverified.tls, unverified.ca) = (Tls::Unverified, None);
    works(unverified).await;
    // The certificate is for `localhost` and 127.0.0.1.
    let mut elsewhere = trusting(&server, &certificates);
    elsewhere.servers = format!("127.0.0.2:{}", server.addr().port()).into();
    if std::net::TcpStream::connect(&*elsewhere.servers).is_ok() {
        is_refused(elsewhere, &["not valid for name"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_asks_for_a_certificate_says_so() {
    if no_etcd() {
        return;
    }
    let (certificates, strangers) = (certificates(), certificates());
    let builder = EtcdServer::builder().tls(&certificates).client_certificates();
    let server = block(|| builder.start()).unwrap();
    let config = trusting(&server, &certificates);
    works(with_identity(
        config.clone(),
        certificates.client(),
        certificates.client_key(),
    ))
    .await;
    is_refused(config.clone(), &["asks for a client certificate", "`cert`"]).await;
    is_refused(
        with_identity(config.clone(), strangers.client(), strangers.client_key()),
        &["does not accept the certificate"],
    )
    .await;
    is_refused(
        with_identity(
            config,
            certificates.expired_client(),
            certificates.expired_client_key(),
        ),
        &["does not accept the certificate"],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_tls_is_told_apart() {
    if no_etcd() {
        return;
    }
    let certificates = certificates();
    let error = soon(
        "an answer",
        client(trusting(crate::server::shared(), &certificates)),
    )
    .await
    .unwrap_err();
    let text = chain(&error);
    assert!(text.contains("listen-client-urls"), "{text}");
    let server = block(|| EtcdServer::builder().tls(&certificates).start()).unwrap();
    let mut plain = trusting(&server, &certificates);
    (plain.tls, plain.ca) = (Tls::Off, None);
    soon("an answer", client(plain)).await.unwrap_err();
}
