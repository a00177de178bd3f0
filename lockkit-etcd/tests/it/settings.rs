//! A server that comes back with other settings, behind the backs of its clients.

use std::time::Duration;

use lockkit_core::{Error, LossReason, spi::chain};
#[cfg(feature = "tls")]
use lockkit_testbed::{Certificates, Proxy};
use lockkit_testbed::{etcd::EtcdServer, eventually};

use crate::server::{
    block, client, config, connect, contend, lock, no_etcd, soon, takes_its_turn, unique, waiter, watcher,
    with_ttl,
};

/// Kills the server, and starts it again with these options.
fn restart(server: &EtcdServer, options: &[(&str, &str)]) {
    block(|| {
        server.kill().unwrap();
        for (option, value) in options {
            server.set_option(option, value);
        }
        server.start().unwrap();
    });
}

/// It is without a leader for up to twice that time, and grants longer leases alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_longer_election_timeout_ends_no_hold() {
    if no_etcd() {
        return;
    }
    let server = block(|| EtcdServer::builder().fsync().start()).unwrap();
    let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
    let (name, ttl) = (unique("elections"), Duration::from_secs(30));
    let guard = with_ttl(&ours, &name, ttl).acquire().await.unwrap();
    let waiting = waiter(&with_ttl(&theirs, &name, ttl));
    contend(&server, &name, 2).await;
    // The least lease is half as long again, 6 s.
    restart(
        &server,
        &[("election-timeout", "4000"), ("heartbeat-interval", "400")],
    );
    let until = guard.valid_until().unwrap();
    eventually("the hold is proven anew", async || {
        guard.valid_until().unwrap() > until
    })
    .await;
    assert!(guard.is_held() && !waiting.is_finished());
    let left = guard.valid_until().unwrap() - tokio::time::Instant::now();
    assert!(left <= ttl, "it counts with more than its ttl: {left:?}");
    // Whoever has no lease is told what is granted here.
    let short = with_ttl(&ours, &unique("new"), Duration::from_secs(4));
    let refused = short.acquire().await.map(drop);
    // So is whoever has one, and holds on to that.
    let four = Duration::from_secs(4);
    for refused in [refused, guard.set_ttl(four).await] {
        let error = refused.unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::InvalidOptions { option: "ttl", .. }),
            "{text}"
        );
        assert!(text.contains("6 s or more"), "{text}");
    }
    tokio::time::sleep(four).await;
    assert!(guard.is_held(), "{:?}", guard.check());
    guard.release().await.unwrap();
    takes_its_turn("the next", waiting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_that_is_exceeded_already_ends_no_hold() {
    if no_etcd() {
        return;
    }
    let server = block(|| EtcdServer::builder().fsync().start()).unwrap();
    let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
    let (name, ttl) = (unique("quota"), Duration::from_secs(20));
    let guard = with_ttl(&ours, &name, ttl).acquire().await.unwrap();
    let waiting = waiter(&with_ttl(&theirs, &name, ttl));
    contend(&server, &name, 2).await;
    let filler = "x".repeat(100_000);
    for i in 0..10 {
        block(|| server.ctl(&["put", &format!("filler-{i}"), &filler])).unwrap();
    }
    restart(&server, &[("quota-backend-bytes", "500000")]);
    let error = with_ttl(&ours, &unique("new"), ttl)
        .acquire_timeout(Duration::from_secs(3))
        .await
        .unwrap_err();
    assert!(chain(&error).contains("NOSPACE"), "{}", chain(&error));
    let until = guard.valid_until().unwrap();
    eventually("the hold is proven anew", async || {
        guard.valid_until().unwrap() > until
    })
    .await;
    guard.release().await.unwrap();
    takes_its_turn("the next", waiting).await;
    contend(&server, &name, 0).await;
}

/// It has no user, and nobody asked for one when it connected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_without_a_user_is_told_when_one_is_asked_for() {
    if no_etcd() {
        return;
    }
    let server = block(EtcdServer::plain).unwrap();
    let ours = connect(&server.url()).await;
    let (name, ttl) = (unique("nobody"), Duration::from_secs(4));
    let guard = with_ttl(&ours, &name, ttl).acquire().await.unwrap();
    let told = watcher(&guard);
    let root = format!("root:{}", EtcdServer::PASSWORD);
    block(|| {
        server.ctl(&["user", "add", &root]).unwrap();
        server.ctl(&["user", "grant-role", "root", "root"]).unwrap();
        server.ctl(&["auth", "enable"]).unwrap();
    });
    let error = soon("an answer", lock(&ours, &unique("new")).acquire())
        .await
        .unwrap_err();
    let text = chain(&error);
    assert!(!error.is_transient() && text.contains("ask for a user"), "{text}");
    let until = guard.valid_until().unwrap().into_std();
    let (reason, at) = soon("the holder is told", told).await.unwrap();
    assert_eq!(reason, LossReason::Expired);
    assert!(at < until + ttl, "its lease was renewed by nobody");
    // One with a user gets in once that lease is over at the server, too.
    let mut config = config(&server.url());
    config.auth = Some(lockkit_etcd::Credentials::new("root", EtcdServer::PASSWORD));
    let theirs = client(config).await.unwrap();
    let next = soon("free", lock(&theirs, &name).acquire()).await.unwrap();
    next.release().await.unwrap();
}

/// Its clients go on in the clear, and are not let in.
#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_asks_for_tls_is_told_apart() {
    if no_etcd() {
        return;
    }
    let certificates = std::sync::Arc::new(Certificates::generate().unwrap());
    let plain = block(EtcdServer::plain).unwrap();
    let secure = block(|| EtcdServer::builder().tls(&certificates).start()).unwrap();
    let proxy = Proxy::start(plain.addr()).unwrap();
    let ours = connect(&plain.url_at(proxy.addr())).await;
    let name = unique("secure");
    let guard = with_ttl(&ours, &name, Duration::from_secs(4))
        .acquire()
        .await
        .unwrap();
    proxy.set_upstream(secure.addr());
    proxy.reset();
    let (reason, _) = soon("the holder is told", watcher(&guard)).await.unwrap();
    assert_eq!(reason, LossReason::Expired);
    let new = lock(&ours, &unique("new"));
    let new = new.acquire_timeout(Duration::from_secs(2));
    let again = client(config(&secure.url()));
    let (new, again) = tokio::join!(new, again);
    for error in [new.unwrap_err(), again.unwrap_err()] {
        let text = chain(&error);
        assert!(error.is_transient() && text.contains("tls=verify"), "{text}");
    }
    // It is back as it was.
    proxy.set_upstream(plain.addr());
    proxy.reset();
    let back = soon("back", lock(&ours, &name).acquire()).await.unwrap();
    back.release().await.unwrap();
}
