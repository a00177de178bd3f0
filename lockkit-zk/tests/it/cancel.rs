//! Futures dropped or forgotten at every await, with and without the reply to their request.

use std::{future::poll_fn, pin::Pin, task::Poll, time::Duration};

use lockkit_core::{AcquireOptions, Lock, Result};
use lockkit_testbed::{Mode, Proxy, eventually, poll_at_most, zookeeper::ZkServer};
use lockkit_zk::Nodes;
use tokio::time::timeout;
use zookeeper_client::Client;

use crate::server::{
    self, config, connect, contend, dir, lock, no_zookeeper, queue_up, raw, rounds, shared, soon, unique,
    waiter,
};

/// Waits until only the nodes in `but` are left.
async fn left_are(raw: &Client, name: &str, but: usize) {
    contend(raw, name, but).await;
}

async fn no_watches(server: &ZkServer) {
    eventually("no watch is left", async || server::watches(server) == 0).await;
}

/// Acquisitions of a lock that is free, taken, or about to come free, dropped at each of their polls in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_at_every_await_a_thousand_times() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let (name, raw) = (unique("cancel"), raw(server.addr()).await);
    let (client, other) = (connect(server.addr()).await, connect(server.addr()).await);
    let modes = |lock: Lock| [lock.shared(), lock];
    let semaphore = client.semaphore(&name, 1).unwrap();
    let rounds = rounds(1_000);
    let (mut round, mut granted, mut dropped) = (0, 0, 0);
    // On a busy machine few are granted in time.
    while round < rounds || granted * 20 <= rounds || dropped * 2 <= rounds {
        assert!(round < 10 * rounds, "{granted} granted, {dropped} dropped");
        let polls = 1 + round % 9;
        let [shared, exclusive] = modes(lock(&client, &name));
        let ours = match round % 4 {
            0 => shared,
            1 => semaphore.clone(),
            _ => exclusive,
        };
        // A third of the locks are free, a third are taken, and the others come free meanwhile.
        let theirs = match round % 4 {
            1 => other.semaphore(&name, 1).unwrap(),
            _ => lock(&other, &name),
        };
        let held = match round % 3 {
            0 => None,
            _ => Some(theirs.acquire().await.unwrap()),
        };
        // Others queue behind the holder, or nobody does.
        let more = if held.is_some() { round / 12 % 2 * 2 } else { 0 };
        let several = queue_up(&raw, &name, more).await;
        let options = AcquireOptions::new().ttl(Duration::from_secs(60));
        let acquire = async { ours.acquire_with(&options).await.map(drop) };
        let (done, held) = if round % 3 == 2 {
            let held = held.unwrap();
            let release = async {
                tokio::time::sleep(Duration::from_micros(round as u64 * 37 % 3_000)).await;
                held.release().await.unwrap();
                for path in &several {
                    raw.delete(path, None).await.unwrap();
                }
            };
            let limit = Duration::from_millis(20);
            let bounded = timeout(limit, poll_at_most(polls, acquire));
            let (done, ()) = tokio::join!(bounded, release);
            (done.ok().flatten(), None)
        } else {
            let limit = Duration::from_millis(5);
            let bounded = timeout(limit, poll_at_most(polls, acquire));
            (bounded.await.ok().flatten(), held)
        };
        match done {
            Some(outcome) => {
                outcome.unwrap();
                granted += 1;
            }
            None => dropped += 1,
        }
        if let Some(held) = held
            && let Err(error) = held.release().await
        {
            // The server was kept from replying for two seconds. It is tried again.
            assert!(error.is_transient(), "{error:?}");
        }
        for path in &several {
            // They may be gone already.
            let _ = raw.delete(path, None).await;
        }
        round += 1;
    }
    left_are(&raw, &name, 0).await;
    let state = client.inspect_semaphore(&name).await.unwrap();
    assert!(state.is_free() && state.waiters == Some(0), "{state:?}");
    no_watches(&server).await;
}

/// Servers do not remove a directory that never had a child.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_acquisition_leaves_no_unused_directory() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::builder().reaps_seldom().start().unwrap();
    let (client, raw) = (connect(server.addr()).await, raw(server.addr()).await);
    let (rounds, mut used) = (rounds(400), 0);
    for round in 0..rounds {
        let name = format!("unused-{round}");
        let ours = match round % 2 {
            0 => lock(&client, &name),
            _ => client.semaphore(&name, 2).unwrap(),
        };
        let polled = poll_at_most(1 + round / 2 % 6, ours.acquire());
        let _ = timeout(Duration::from_secs(5), polled).await;
    }
    for dir in ["/lockkit", "/lockkit/%semaphores"] {
        for name in raw.list_children(dir).await.unwrap() {
            let path = format!("{dir}/{name}");
            let stat = raw.check_stat(&path).await.unwrap().expect("it is not reaped");
            assert!(stat.cversion > 0, "{path} never had a child");
            used += 1;
        }
    }
    assert!(used > rounds / 4, "{used} directories of {rounds}");
}

/// Drops acquisitions whose replies are lost from some moment on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_when_replies_are_lost_a_thousand_times() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let (name, raw) = (unique("lost"), raw(server.addr()).await);
    let proxy = Proxy::start(server.addr()).unwrap();
    let mut lasting = config(server.addr());
    lasting.session_timeout = Duration::from_secs(30);
    let (client, other) = (connect(proxy.addr()).await, server::patiently(lasting).await);
    let ours = lock(&client, &name);
    // The directory stays, so that the server's work is one request.
    let held = lock(&other, &name).acquire().await.unwrap();
    let (mut awaited, mut made) = (0, 0);
    let rounds = rounds(1_000);
    let mut several = Vec::new();
    for round in 0..rounds {
        if round == rounds / 2 {
            several = queue_up(&raw, &name, 2).await;
            let waited = timeout(Duration::from_millis(100), ours.acquire()).await;
            assert!(waited.is_err(), "it expects several from now on");
            left_are(&raw, &name, 3).await;
        }
        proxy.set(Mode::DropReplies);
        let before = raw.check_stat(&dir(&name)).await.unwrap().unwrap().cversion;
        let mut acquire = Box::pin(ours.acquire());
        let polled = poll_fn(|context| Poll::Ready(acquire.as_mut().poll(context).is_ready())).await;
        assert!(!polled);
        // It is dropped before the server has the request, as soon as it has it, or somewhat later.
        if round % 3 > 0 {
            awaited += 1;
            let applied = async || {
                raw.sync("/").await.unwrap();
                raw.check_stat(&dir(&name)).await.unwrap().unwrap().cversion > before
            };
            // The node is not even asked for if the lost reply was to the deletion after the round before, which it waits
            // for.
            let applied = timeout(
                Duration::from_secs(1),
                eventually("the server has made the node", applied),
            );
            tokio::select! {
                in_time = applied => made += usize::from(in_time.is_ok()),
                outcome = acquire.as_mut() => panic!("it is taken: {outcome:?}, {held:?}"),
            }
        }
        drop(acquire);
        proxy.set(Mode::Pass);
        left_are(&raw, &name, 1 + several.len()).await;
        eventually("it is connected again", async || {
            client.inspect(&name).await.is_ok()
        })
        .await;
    }
    assert!(made > awaited * 3 / 4, "{made} of {awaited}");
    held.release().await.unwrap();
    for path in several {
        raw.delete(&path, None).await.unwrap();
    }
    let guard = soon("the lock is free", ours.acquire()).await.unwrap();
    guard.release().await.unwrap();
    left_are(&raw, &name, 0).await;
    no_watches(&server).await;
}

#[tokio::test]
async fn a_cancelled_wait_for_a_permit_leaves_nothing() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("permit"), raw(shared().addr()).await);
    let (client, other) = (connect(shared().addr()).await, connect(shared().addr()).await);
    let options = AcquireOptions::new().ttl(Duration::from_secs(60));
    let ours = client.semaphore(&name, 2).unwrap().with_options(options.clone());
    let theirs = other.semaphore(&name, 2).unwrap().with_options(options);
    let (a, b) = (theirs.acquire().await.unwrap(), theirs.acquire().await.unwrap());
    let queue = format!("/lockkit/%semaphores/{name}");
    for _ in 0..100 {
        let waited = timeout(Duration::from_millis(4), ours.acquire()).await;
        assert!(waited.is_err(), "there are two permits");
    }
    let nodes = async || raw.list_children(&queue).await.unwrap().len();
    eventually("the waiters have left", async || nodes().await == 2).await;
    a.release().await.unwrap();
    let c = ours.acquire().await.unwrap();
    assert_eq!(nodes().await, 2);
    b.release().await.unwrap();
    c.release().await.unwrap();
    eventually("the permits are back", async || {
        client.inspect_semaphore(&name).await.unwrap().is_free()
    })
    .await;
}

/// A future that is neither polled nor dropped, at any await, keeps nobody else waiting for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_at_every_await() {
    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    let forget = async |polls: usize| {
        let name = unique("forgotten");
        let (client, other) = (connect(shared().addr()).await, connect(shared().addr()).await);
        let options = AcquireOptions::new().ttl(Duration::from_secs(1));
        let (ours, theirs) = (lock(&client, &name).with_options(options), lock(&other, &name));
        let held = theirs.acquire().await.unwrap();
        let mut acquire = Box::pin(ours.acquire());
        let polled = poll_at_most(polls, acquire.as_mut());
        // Once it waits, further polls change nothing.
        let polled = timeout(Duration::from_millis(100), polled).await;
        assert!(polled.ok().flatten().is_none(), "it is taken");
        contend(&raw, &name, 2).await;
        held.release().await.unwrap();
        let guard = soon("the one before was forgotten", theirs.acquire())
            .await
            .unwrap();
        // It goes on as a newcomer.
        let waited = timeout(Duration::from_millis(100), acquire.as_mut()).await;
        assert!(waited.is_err(), "it is taken");
        guard.release().await.unwrap();
        soon("it goes on", acquire)
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    };
    futures_util::future::join_all((1..8).map(forget)).await;
}

/// A renewal by hand or a release that is neither polled nor dropped keeps the lock until long after its lease, and not for
/// as long as the session lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_at_its_renewal_or_release() {
    if no_zookeeper() {
        return;
    }
    let forget = async |renews: bool| {
        let (name, proxy) = (unique("forgotten"), Proxy::start(shared().addr()).unwrap());
        let (client, other) = (connect(proxy.addr()).await, connect(shared().addr()).await);
        let options = AcquireOptions::new().ttl(Duration::from_secs(10));
        let ours = lock(&client, &name).with_options(options);
        let guard = ours.acquire().await.unwrap();
        let (next, own) = (waiter(&lock(&other, &name)), waiter(&ours));
        let held = guard.view();
        // Its request reaches nobody, and nobody polls it to hear of that.
        proxy.set(Mode::Blackhole);
        let mut work: Pin<Box<dyn Future<Output = Result<()>>>> = if renews {
            Box::pin(async move { guard.renew().await })
        } else {
            Box::pin(guard.release())
        };
        let polled = poll_at_most(1, work.as_mut()).await;
        assert!(polled.is_none(), "it has an answer: {polled:?}");
        proxy.reset();
        proxy.set(Mode::Pass);
        eventually("it is connected again", async || {
            client.inspect(&name).await.is_ok()
        })
        .await;
        // Its lease ends within ten seconds. For ten more, on one connection, it may go on.
        let next = timeout(Duration::from_secs(60), next).await;
        drop(next.expect("the one before was forgotten").unwrap());
        assert!(!held.is_held());
        if renews {
            drop(soon("ours again", own).await.unwrap());
            assert!(work.await.unwrap_err().is_lost());
        } else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(!own.is_finished(), "the release has its client's turn");
            let _ = work.await;
            drop(soon("ours again", own).await.unwrap());
        }
    };
    futures_util::future::join(forget(true), forget(false)).await;
}

/// A release that goes on after its node was deleted and another was made at the same path spares that one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forgotten_release_spares_the_next_simple_lock() {
    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    let forget = async |polls: usize| {
        let (name, mut config) = (unique("spared"), config(shared().addr()));
        (config.nodes, config.namespace) = (Nodes::Simple, unique("spared"));
        let path = format!("/{}/{name}", config.namespace);
        let ours = server::patiently(config.clone()).await;
        let theirs = lock(&server::patiently(config).await, &name);
        let options = AcquireOptions::new().ttl(Duration::from_secs(1));
        let ours = lock(&ours, &name).with_options(options);
        let mut release = Box::pin(ours.acquire().await.unwrap().release());
        if poll_at_most(polls, release.as_mut()).await.is_some() {
            return;
        }
        let next = timeout(Duration::from_secs(60), theirs.acquire()).await;
        let next = next.expect("the one before was forgotten").unwrap();
        let released = soon("it goes on", release).await;
        // By then the server has done what it was asked.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let node = raw.check_stat(&path).await.unwrap();
        assert!(
            node.is_some(),
            "polled {polls} times, it has deleted what another holds, and said {released:?}"
        );
        next.release().await.unwrap();
    };
    futures_util::future::join_all((1..5).map(forget)).await;
}

/// A future that was forgotten before it could ask for its node asks for none when it is polled again: nobody would delete
/// it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_before_its_node_is_asked_for() {
    if no_zookeeper() {
        return;
    }
    let forget = async |nodes: Nodes| {
        let (name, raw) = (unique("late"), raw(shared().addr()).await);
        let proxy = Proxy::start(shared().addr()).unwrap();
        let mut config = config(proxy.addr());
        (config.nodes, config.namespace) = (nodes, unique("late"));
        let dir = format!("/{}/{name}", config.namespace);
        let ours = server::patiently(config.clone()).await;
        config.servers = shared().addr().to_string().into();
        let theirs = lock(&server::patiently(config).await, &name);
        let connections = proxy.counts().connections;
        proxy.set(Mode::Blackhole);
        proxy.reset();
        eventually("it has lost its connection", async || {
            proxy.counts().connections > connections
        })
        .await;
        let options = AcquireOptions::new().ttl(Duration::from_secs(1));
        let ours_lock = lock(&ours, &name).with_options(options);
        let mut acquire = Box::pin(ours_lock.acquire());
        let polled = timeout(Duration::from_millis(100), acquire.as_mut()).await;
        assert!(polled.is_err(), "it is cut off");
        proxy.set(Mode::Pass);
        eventually("it is connected again", async || {
            ours.inspect(&name).await.is_ok()
        })
        .await;
        // An attempt may stand still for 10 s, and its session looks with each heartbeat.
        // Nobody sees that it has been given up, so this is twice as long.
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(poll_at_most(1, acquire.as_mut()).await.is_none());
        tokio::time::sleep(Duration::from_millis(300)).await;
        let contenders = match nodes {
            Nodes::Simple => usize::from(raw.check_stat(&dir).await.unwrap().is_some()),
            _ => raw.list_children(&dir).await.map_or(0, |children| children.len()),
        };
        assert_eq!(contenders, 0, "{nodes:?}: nobody removes it");
        let guard = soon("nobody is before it", theirs.acquire()).await.unwrap();
        let waited = timeout(Duration::from_millis(100), acquire.as_mut()).await;
        assert!(waited.is_err(), "it is taken");
        guard.release().await.unwrap();
        let guard = soon("it goes on", acquire).await.unwrap();
        guard.release().await.unwrap();
    };
    futures_util::future::join_all([Nodes::Mutex, Nodes::Simple].map(forget)).await;
}
