//! Futures dropped at every await, with and without the reply to their request.

use std::time::{Duration, Instant};

use lockkit_core::{
    LockName,
    spi::{self, Backend as _, ClaimRequest, OwnerId},
};
use lockkit_etcd::EtcdBackend;
use lockkit_testbed::{Mode, Proxy, etcd::EtcdServer, eventually, poll_at_most};
use tokio::time::timeout;

use crate::server::{
    block, config, connect, contend, keys, lock, no_etcd, patiently, rounds, shared, shared_cluster, soon,
    unique, with_ttl,
};

/// Acquisitions of a lock that is free, taken, or about to come free, dropped at each of their polls in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_at_every_await() {
    if no_etcd() {
        return;
    }
    let name = unique("cancel");
    let (client, other) = (connect(&shared().url()).await, connect(&shared().url()).await);
    let rounds = rounds(300);
    let (mut granted, mut dropped) = (0, 0);
    for round in 0..10 * rounds {
        if round >= rounds && granted * 20 > rounds && dropped * 2 > rounds {
            break;
        }
        let semaphore = |client: &lockkit_core::LockClient| client.semaphore(&name, 1).unwrap();
        let ours = match round % 4 {
            0 => lock(&client, &name).shared(),
            1 => semaphore(&client),
            _ => lock(&client, &name),
        };
        let theirs = match round % 4 {
            1 => semaphore(&other),
            _ => lock(&other, &name),
        };
        let held = match round % 3 {
            0 => None,
            _ => Some(theirs.acquire().await.unwrap()),
        };
        let acquire = async { ours.acquire().await.map(drop) };
        let bounded = timeout(Duration::from_millis(20), poll_at_most(1 + round % 9, acquire));
        let done = if round % 3 == 2 {
            let release = async {
                tokio::time::sleep(Duration::from_micros(round as u64 * 37 % 3_000)).await;
                held.unwrap().release().await.unwrap();
            };
            tokio::join!(bounded, release).0
        } else {
            let done = bounded.await;
            if let Some(held) = held {
                held.release().await.unwrap();
            }
            done
        };
        match done.ok().flatten() {
            Some(outcome) => {
                outcome.unwrap();
                granted += 1;
            }
            None => dropped += 1,
        }
    }
    assert!(
        granted * 20 > rounds && dropped * 2 > rounds,
        "{granted} granted, {dropped} dropped"
    );
    contend(shared(), &name, 0).await;
    let state = client.inspect_semaphore(&name).await.unwrap();
    assert!(state.is_free() && state.waiters == Some(0), "{state:?}");
}

/// The server carries out a request whose client has given up on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_cancels_while_entering_leave_no_key() {
    if no_etcd() {
        return;
    }
    let proxy = Proxy::start(shared().addr()).unwrap();
    let client = connect(&shared().url_at(proxy.addr())).await;
    let name = unique("fifty");
    // Its lease is there.
    lock(&client, &name)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let way = Duration::from_millis(20);
    proxy.set(Mode::Delay {
        requests: way,
        replies: way,
    });
    for round in 0..50 {
        let limit = Duration::from_micros(1_000 * round);
        let entered = timeout(limit, lock(&client, &name).acquire()).await;
        assert!(entered.is_err() || limit > way, "nothing can have come back");
    }
    contend(shared(), &name, 0).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(block(|| keys(shared(), &name)), [""; 0]);
    // Their answers came, so that there was nothing to fence.
    assert_eq!(block(|| shared().keys("lockkit/%gone/")).unwrap(), [""; 0]);
}

/// The outcome is not known, and nothing orders a later request of the client behind the one that was sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_comes_late_makes_no_key() {
    if no_etcd() {
        return;
    }
    let cluster = shared_cluster();
    let (slow, quick) = (
        Proxy::start(cluster.member(0).addr()).unwrap(),
        Proxy::start(cluster.member(1).addr()).unwrap(),
    );
    let client = connect(&cluster.url_at(&[slow.addr(), quick.addr()])).await;
    quick.set(Mode::Refuse);
    quick.reset();
    let name = unique("late");
    let ours = with_ttl(&client, &name, Duration::from_secs(10));
    ours.acquire().await.unwrap().release().await.unwrap();
    slow.set(Mode::Blackhole);
    let entered = timeout(Duration::from_millis(50), ours.acquire()).await;
    assert!(entered.is_err(), "nothing comes back");
    quick.set(Mode::Pass);
    eventually("the entry is fenced", async || {
        !cluster.member(1).keys("lockkit/%gone/").unwrap().is_empty()
    })
    .await;
    // Now what was held back arrives.
    slow.set(Mode::Pass);
    let watched = Instant::now();
    while watched.elapsed() < Duration::from_secs(1) {
        assert_eq!(block(|| keys(cluster.member(1), &name)), [""; 0], "it came late");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    soon("free", ours.acquire())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let closed = client.close(Duration::from_secs(20)).await;
    closed.unwrap();
    assert_eq!(
        block(|| cluster.member(1).keys("lockkit/%gone/")).unwrap(),
        [""; 0]
    );
}

/// A claim whose release was dropped goes on with another key: the deletion may yet arrive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_being_left_is_not_granted_again() {
    if no_etcd() {
        return;
    }
    let (slow, quick) = (
        Proxy::start(shared().addr()).unwrap(),
        Proxy::start(shared().addr()).unwrap(),
    );
    let servers = format!("etcd://{},{}", slow.addr(), quick.addr());
    let backend = EtcdBackend::connect(config(&servers)).await.unwrap();
    quick.set(Mode::Refuse);
    quick.reset();
    let name = LockName::new(unique("left")).unwrap();
    let (ttl, owner) = (Duration::from_secs(10), OwnerId::new(fastrand::u128(..)));
    let request = ClaimRequest::new(name, spi::Mode::Exclusive, ttl, owner);
    let mut claim = backend.claim(&request).await.unwrap();
    let first = loop {
        // It may have been connected by the other way.
        if let Ok(granted) = claim.attempt(Duration::ZERO).await {
            break granted.expect("free");
        }
    };
    slow.set(Mode::Blackhole);
    let left = timeout(Duration::from_millis(50), claim.release()).await;
    assert!(left.is_err(), "nothing comes back");
    quick.set(Mode::Pass);
    let again = async {
        loop {
            if let Ok(Some(grant)) = claim.attempt(Duration::ZERO).await {
                return grant;
            }
            // An error may come at once.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let again = soon("free again", again).await;
    assert!(again.tokens.start() > first.tokens.start(), "the same key");
    claim.release().await.unwrap();
}

/// Replies are lost, and the caller gives up: nobody may be left in the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_when_replies_are_lost() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let client = patiently(config(&server.url_at(proxy.addr()))).await;
    let name = unique("lost");
    let ours = with_ttl(&client, &name, Duration::from_secs(5));
    ours.acquire().await.unwrap().release().await.unwrap();
    for round in 0..rounds(8) {
        proxy.set(Mode::DropReplies);
        let entered = timeout(Duration::from_millis(10 + round as u64), ours.acquire()).await;
        assert!(entered.is_err());
        proxy.set(Mode::Pass);
        soon("free again", ours.acquire())
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    contend(&server, &name, 0).await;
}

/// A future that is neither polled nor dropped stands in nobody's way for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forgotten_waiter_stands_in_nobodys_way() {
    if no_etcd() {
        return;
    }
    let name = unique("forgotten");
    let (ours, theirs) = (connect(&shared().url()).await, connect(&shared().url()).await);
    let guard = lock(&theirs, &name).acquire().await.unwrap();
    let ours = lock(&ours, &name);
    let mut forgotten = Box::pin(ours.acquire());
    assert!(
        timeout(Duration::from_millis(200), forgotten.as_mut())
            .await
            .is_err()
    );
    contend(shared(), &name, 2).await;
    guard.release().await.unwrap();
    let next = soon("it is passed over", lock(&theirs, &name).acquire())
        .await
        .unwrap();
    next.release().await.unwrap();
    let guard = soon("it goes on", forgotten).await.unwrap();
    assert!(guard.is_held());
    guard.release().await.unwrap();
}
