//! Encrypted connections: who is trusted, what a refusal says, and what somebody on the network sees.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_conformance::Traces;
use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{AcquireOptions, Error, spi::chain};
use lockkit_testbed::{Certificates, Proxy, ServerPair, eventually, own_address, zookeeper::ZkServer};
use lockkit_zk::{Digest, Tls, ZkConfig};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
};

use crate::server::{brief, client, config, lock, no_zookeeper, patiently, soon, unique, watcher};

const PASSWORD: &str = "correct-horse-battery";

/// Starts a server that asks clients for a certificate or not.
fn server(certificates: &Arc<Certificates>, asks: &str) -> ZkServer {
    let builder = ZkServer::builder().tls(certificates);
    builder
        .directive(format!("ssl.clientAuth={asks}"))
        .start()
        .unwrap()
}

fn certificates() -> Arc<Certificates> {
    Arc::new(Certificates::generate().unwrap())
}

fn addr(server: &ZkServer) -> SocketAddr {
    server.secure_addr().unwrap()
}

/// Configures a client of the server at `addrs` that trusts this authority alone.
fn trusting(addrs: impl std::fmt::Display, certificates: &Certificates) -> ZkConfig {
    let mut config = config(addrs);
    config.tls = Tls::Verify;
    config.ca = Some(certificates.authority());
    config.auth = Some(Digest::new("me", PASSWORD));
    config
}

fn with_identity(mut config: ZkConfig, cert: PathBuf, key: PathBuf) -> ZkConfig {
    (config.cert, config.key) = (Some(cert), Some(key));
    config
}

/// Acquires and releases.
async fn works(config: ZkConfig) {
    let client = patiently(config).await;
    let guard = lock(&client, &unique("tls")).acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// Checks that a client is refused for good and at once, for these reasons, and without secrets.
async fn is_refused(config: ZkConfig, reasons: &[&str]) {
    let begun = Stopwatch::start();
    let error = soon("an answer", client(config.clone())).await.unwrap_err();
    check_refusal(&error, &config, reasons);
    assert!(begun.elapsed() < Duration::from_secs(10), "it was tried again");
}

fn check_refusal(error: &Error, config: &ZkConfig, reasons: &[&str]) {
    let text = chain(error);
    assert!(!error.is_transient(), "{text}");
    for reason in reasons.iter().chain([&&*config.servers]) {
        assert!(text.contains(reason), "{reason} in {text}");
    }
    assert!(
        !text.contains(PASSWORD) && !format!("{error:?}").contains(PASSWORD),
        "{text}"
    );
}

/// Restarts the server with another certificate.
fn replace_certificate(server: &ZkServer, certificates: &Certificates, which: ServerPair) {
    server.kill().unwrap();
    let pair = certificates.server_pair(which);
    server
        .reconfigure(&format!("ssl.keyStore.location={}", pair.display()))
        .unwrap();
    server.start().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_trusted_is_told_apart() {
    if no_zookeeper() {
        return;
    }
    let (certificates, strangers) = (certificates(), certificates());
    let server = server(&certificates, "none");
    let trusting = |authority: &Certificates| trusting(addr(&server), authority);
    works(trusting(&certificates)).await;
    let unknown = ["no authority that is trusted", "`ca`"];
    is_refused(trusting(&strangers), &unknown).await;
    let mut of_system = trusting(&certificates);
    of_system.ca = None;
    is_refused(of_system, &unknown).await;
    let mut unverified = trusting(&certificates);
    (unverified.tls, unverified.ca) = (Tls::Unverified, None);
    for (pair, reasons) in [
        (ServerPair::Elsewhere, ["not valid for name", "elsewhere.example"]),
        (ServerPair::Expired, ["expired", "certificate"]),
    ] {
        replace_certificate(&server, &certificates, pair);
        is_refused(trusting(&certificates), &reasons).await;
        works(unverified.clone()).await;
    }
    works(unverified).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_trust_says_so() {
    if no_zookeeper() {
        return;
    }
    let (certificates, strangers) = (certificates(), certificates());
    let server = server(&certificates, "need");
    let trusting = || trusting(addr(&server), &certificates);
    works(with_identity(
        trusting(),
        certificates.client(),
        certificates.client_key(),
    ))
    .await;
    is_refused(trusting(), &["client certificate", "`cert` and `key`"]).await;
    for (cert, key) in [
        (strangers.client(), strangers.client_key()),
        (certificates.expired_client(), certificates.expired_client_key()),
    ] {
        let config = with_identity(trusting(), cert, key);
        is_refused(config, &["does not accept the certificate of `cert`"]).await;
    }
    // Without a check of the server, the client still has to prove who it is.
    let mut unverified = trusting();
    (unverified.tls, unverified.ca) = (Tls::Unverified, None);
    is_refused(unverified.clone(), &["client certificate"]).await;
    works(with_identity(
        unverified,
        certificates.client(),
        certificates.client_key(),
    ))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_expires_ends_the_session_with_a_reason() {
    if no_zookeeper() {
        return;
    }
    let certificates = certificates();
    let server = server(&certificates, "none");
    let mut config = trusting(addr(&server), &certificates);
    (config.session_timeout, config.tick_time) = {
        let brief = brief("");
        (brief.session_timeout, brief.tick_time)
    };
    let client = patiently(config.clone()).await;
    let name = unique("expires");
    let held = lock(&client, &name).acquire().await.unwrap();
    let told = watcher(&held);
    replace_certificate(&server, &certificates, ServerPair::Expired);
    soon("the holder is told", told).await.unwrap();
    // First it cannot tell, and then it can.
    let patient = AcquireOptions::new().wait(Duration::from_secs(60));
    let lock = lock(&client, &name).with_options(patient);
    let error = soon("no endless wait", lock.acquire()).await.unwrap_err();
    check_refusal(&error, &config, &["expired"]);
    replace_certificate(&server, &certificates, ServerPair::Valid);
    eventually("it goes on", async || match lock.acquire().await {
        Ok(guard) => {
            guard.release().await.unwrap();
            true
        }
        Err(_) => false,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_shows_the_password_without_tls_alone() {
    if no_zookeeper() {
        return;
    }
    let certificates = certificates();
    let server = server(&certificates, "none");
    for secured in [true, false] {
        let proxy = Proxy::start(if secured { addr(&server) } else { server.addr() }).unwrap();
        proxy.record();
        let mut config = trusting(proxy.addr(), &certificates);
        if !secured {
            (config.tls, config.ca) = (Tls::Off, None);
        }
        let client = patiently(config).await;
        let name = unique("recorded");
        let options = AcquireOptions::new().label("a-holder-with-a-label");
        let guard = client.lock(&name).unwrap().acquire_with(&options).await.unwrap();
        // Attached again, it says who it is again.
        let before = proxy.counts().connections;
        proxy.reset();
        eventually("attached again", async || {
            proxy.counts().connections > before && client.inspect(&name).await.is_ok()
        })
        .await;
        guard.release().await.unwrap();
        client.close(Duration::from_secs(10)).await.unwrap();
        let recording = proxy.recording();
        for secret in [PASSWORD, "a-holder-with-a-label", name.as_str()] {
            let shown = recording
                .windows(secret.len())
                .any(|part| part == secret.as_bytes());
            assert_eq!(shown, !secured, "{secret} in {} bytes", recording.len());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_mixed_list_it_takes_the_servers_of_its_kind() {
    if no_zookeeper() {
        return;
    }
    let certificates = certificates();
    let server = server(&certificates, "none");
    let plain = Proxy::start(server.addr()).unwrap();
    plain.record();
    let both = format!("{},{}", plain.addr(), addr(&server));
    let with = |servers: &str, tls| {
        let mut config = trusting(servers, &certificates);
        config.tls = tls;
        if tls == Tls::Off {
            config.ca = None;
        }
        config
    };
    // They come in any order.
    for _ in 0..6 {
        works(with(&both, Tls::Verify)).await;
    }
    let seen = plain.recording();
    assert!(!seen.is_empty(), "the other port was tried");
    let password = PASSWORD.as_bytes();
    assert!(
        !seen.windows(password.len()).any(|part| part == password),
        "nothing goes in the clear instead"
    );
    for _ in 0..6 {
        works(with(&both, Tls::Off)).await;
    }
    // One of the other kind alone looks like one that is just coming up.
    for (servers, tls, reason) in [
        (plain.addr(), Tls::Verify, "secureClientPort"),
        (addr(&server), Tls::Off, "no available hosts"),
    ] {
        let config = with(&servers.to_string(), tls);
        let error = soon("an answer", client(config)).await.unwrap_err();
        assert!(
            error.is_transient() && chain(&error).contains(reason),
            "{}",
            chain(&error)
        );
    }
}

#[tokio::test]
async fn files_that_cannot_be_used_are_named() {
    let (certificates, others) = (certificates(), certificates());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, contents: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, contents).unwrap();
        path
    };
    let none = directory.path().join("none.pem");
    let empty = file("empty.pem", b"");
    let body = "TUlHSEFnRUFNQk1HQnlxR1NNNDlBZ0VHQ0NxR1NNNDlBd0VI";
    let broken = |label: &str| {
        let block = format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n");
        file(&format!("broken {label}.pem"), block.as_bytes())
    };
    let (cert, key) = (certificates.client(), certificates.client_key());
    for (ca, identity, option, reason) in [
        (Some(none.clone()), None, "ca", "none.pem cannot be read"),
        (Some(empty.clone()), None, "ca", "empty.pem has no certificate"),
        (Some(key.clone()), None, "ca", "has no certificate"),
        (Some(broken("CERTIFICATE")), None, "ca", "broken CERTIFICATE.pem"),
        (None, Some((none.clone(), key.clone())), "cert", "cannot be read"),
        (
            None,
            Some((empty.clone(), key.clone())),
            "cert",
            "has no certificate",
        ),
        (
            None,
            Some((broken("CERTIFICATE"), key.clone())),
            "cert",
            "is damaged",
        ),
        (None, Some((cert.clone(), none)), "key", "cannot be read"),
        (None, Some((cert.clone(), empty)), "key", "has no private key"),
        (
            None,
            Some((cert.clone(), broken("PRIVATE KEY"))),
            "key",
            "PRIVATE KEY.pem",
        ),
        (
            None,
            Some((cert.clone(), cert.clone())),
            "key",
            "has no private key",
        ),
        (
            None,
            Some((cert, others.client_key())),
            "key",
            "is not the private key of",
        ),
    ] {
        // Nobody listens there: the files come first.
        let mut config = trusting("127.0.0.1:1", &certificates);
        if ca.is_some() {
            config.ca = ca;
        }
        if let Some((cert, key)) = identity {
            config = with_identity(config, cert, key);
        }
        match client(config).await.unwrap_err() {
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
}

#[tokio::test]
async fn a_password_in_the_clear_is_warned_about_once() {
    if no_zookeeper() {
        return;
    }
    let certificates = certificates();
    let server = server(&certificates, "none");
    let deadline = Instant::now() + Duration::from_secs(20);
    let warned = async |config: ZkConfig| {
        loop {
            let traces = Traces::default();
            let connecting = async {
                let client = client(config.clone()).await?;
                let guard = lock(&client, &unique("warned")).acquire().await?;
                guard.release().await
            };
            let recording = tracing::subscriber::set_default(traces.clone());
            let outcome = connecting.await;
            drop(recording);
            match outcome {
                // Each client warns, also one whose server was not ready.
                Err(error) if error.is_transient() && Instant::now() < deadline => continue,
                outcome => outcome.unwrap(),
            }
            let text = traces.text();
            assert!(!text.contains(PASSWORD), "{text}");
            break text
                .lines()
                .filter(|line| line.starts_with("WARN") && line.contains("is not encrypted"))
                .count();
        }
    };
    let secured = trusting(addr(&server), &certificates);
    let mut open = trusting(server.addr(), &certificates);
    (open.tls, open.ca) = (Tls::Off, None);
    let mut nobody = open.clone();
    (nobody.auth, nobody.namespace) = (None, "everyone".into());
    assert_eq!(warned(secured).await, 0);
    assert_eq!(warned(nobody).await, 0);
    // Nobody reads along within this host.
    assert_eq!(warned(open.clone()).await, 0);
    let Some(beyond) = own_address() else { return };
    open.servers = leads_to(beyond, server.addr()).await.to_string().into();
    assert_eq!(warned(open).await, 1);
}

/// A server with TLS reads by Netty at both ports, and closes a connection whose credentials come before its session has begun.
#[tokio::test]
async fn a_user_gets_each_session_of_a_server_with_tls() {
    if no_zookeeper() {
        return;
    }
    let certificates = certificates();
    let server = server(&certificates, "none");
    let mut open = trusting(server.addr(), &certificates);
    (open.tls, open.ca) = (Tls::Off, None);
    for _ in 0..60 {
        let connected = lockkit_zk::ZkBackend::connect(open.clone()).await;
        connected.unwrap_or_else(|error| panic!("{}", chain(&error)));
    }
}

/// An address of this machine from which connections are passed on.
async fn leads_to(at: IpAddr, server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((at, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(server).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut client, &mut server).await });
        }
    });
    addr
}
