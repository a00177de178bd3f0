//! The queue at the server: its order, and waiters that die, stop, leave or lose their connection.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lockkit_conformance::{Traces, stall::Stopwatch};
use lockkit_core::{
    AcquireOptions, LockClient, LockName,
    spi::{Backend, ClaimRequest, Mode as LockMode, OwnerId},
};
use lockkit_redis::{RedisBackend, RedisConfig};
use lockkit_testbed::{Clock, Mode, Proxy, eventually, redis::RedisServer};

use crate::common::{
    AT_ONCE, LONG, MS, Peer, RECOVERED, SECOND, client, client_behind_proxy, granted, heartbeats, is_residue,
    keys, lock, no_server, nothing_is_left, subscribers, until, waiter, waiters, within,
};

#[tokio::test]
async fn grants_follow_the_order_of_arrival_across_clients() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let clients = join_all((0..4).map(|_| client(server.url()))).await;
    let locks: Vec<_> = clients.iter().map(|client| lock(client, "a", LONG)).collect();
    for round in 0..8 {
        let held = locks[3].acquire().await.unwrap();
        let order: Vec<_> = [[0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]][round % 4].into();
        let (grant, mut grants) = tokio::sync::mpsc::unbounded_channel();
        for (place, &index) in order.iter().enumerate() {
            let (lock, grant) = (locks[index].clone(), grant.clone());
            tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap();
                grant.send((index, guard.token())).unwrap();
                guard.release().await.unwrap();
            });
            waiters(&server, "a", place + 1).await;
        }
        let mut tokens = vec![held.token()];
        held.release().await.unwrap();
        for expected in order {
            let (index, token) = within(AT_ONCE, "a grant", grants.recv()).await.unwrap();
            assert_eq!(index, expected, "round {round}");
            tokens.push(token);
        }
        assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    }
    nothing_is_left(&server, "after all were served").await;
}

#[tokio::test]
async fn a_waiter_whose_process_was_killed_is_skipped_at_once() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other, third) = (
        client(server.url()).await,
        client(server.url()).await,
        client(server.url()).await,
    );
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let mut peer = Peer::start(server.url()).await;
    peer.send("acquire slot exclusive 30000 a");
    waiters(&server, "a", 1).await;
    heartbeats(&server, 1).await;
    let waiting = waiter(&lock(&other, "a", LONG));
    waiters(&server, "a", 2).await;
    peer.process.kill().unwrap();
    held.release().await.unwrap();
    let next = granted(AT_ONCE, "the one after the dead", waiting).await;
    next.release().await.unwrap();
    // The dead waiter keeps its place, since it may be reconnecting. That keeps nobody out.
    let tried = lock(&third, "a", LONG).try_acquire().await.unwrap();
    let tried = tried.expect("nobody holds it, and nobody who waits can take it");
    tried.release().await.unwrap();
    let after = granted(AT_ONCE, "nobody holds it", waiter(&lock(&third, "a", LONG))).await;
    after.release().await.unwrap();
}

/// Nobody comes after it who would find it dead. Taking a free lock needs no look at the queue.
#[tokio::test]
async fn a_dead_waiter_of_a_free_lock_is_not_shown_for_long() {
    const BELIEVED: Duration = Duration::from_secs(10);

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let mut peer = Peer::start(server.url()).await;
    peer.send("acquire slot exclusive 30000 a");
    waiters(&server, "a", 1).await;
    heartbeats(&server, 1).await;
    let shown = async || other.inspect("a").await.unwrap().waiters;
    assert_eq!(shown().await, Some(1));
    peer.process.kill().unwrap();
    let died = Stopwatch::start();
    eventually("the server has noticed", async || subscribers(&server) == 2).await;
    held.release().await.unwrap();
    // It was put back, and goes by itself if nobody ever comes.
    let queue = "lockkit:lockkit#queue:{lockkit:a}";
    let left: i64 = server.cli(&["PTTL", queue]).unwrap().parse().unwrap();
    assert!(left > 0, "{left}");
    // It may be reconnecting.
    let mut last = died.elapsed();
    until(LONG, "a dead waiter is shown no more", async || {
        let gone = shown().await == Some(0);
        if !gone {
            last = died.elapsed();
        }
        gone
    })
    .await;
    assert!(last < BELIEVED + SECOND, "it was shown {last:?} after its death");
}

/// A lock that is contended for hours has a queue that is never empty. Each newcomer but the first in a minute leaves its end alone.
#[tokio::test]
async fn a_queue_that_is_never_empty_does_not_expire() {
    const MINUTES: i64 = 300_000;

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let clients = join_all((0..3).map(|_| client(server.url()))).await;
    let keys = ["queue", "about"].map(|key| format!("lockkit:lockkit#{key}:{{lockkit:a}}"));
    // As far as the queue shows, the last came long ago; or the clock has gone back by years since.
    for came in ["1000000", "9000000000000000"] {
        let held = lock(&clients[0], "a", LONG).acquire().await.unwrap();
        let waiting = waiter(&lock(&clients[1], "a", LONG));
        waiters(&server, "a", 1).await;
        let owner = server.cli(&["ZRANGE", &keys[0], "0", "0"]).unwrap();
        server.cli(&["ZADD", &keys[0], came, &owner]).unwrap();
        for key in &keys {
            server.cli(&["PEXPIRE", key, "60000"]).unwrap();
        }
        let behind = waiter(&lock(&clients[2], "a", LONG));
        waiters(&server, "a", 2).await;
        for key in &keys {
            let left: i64 = server.cli(&["PTTL", key]).unwrap().parse().unwrap();
            assert!(left > MINUTES, "{came}, {key}: {left}");
        }
        held.release().await.unwrap();
        for waiting in [waiting, behind] {
            let next = granted(AT_ONCE, "in its place", waiting).await;
            next.release().await.unwrap();
        }
        nothing_is_left(&server, "released").await;
    }
}

/// A request that came late, after the lock was deleted, may have left it there.
#[tokio::test]
async fn a_holders_own_place_in_the_queue_is_nobodys() {
    const KEY: &str = "lockkit:a";
    const QUEUE: &str = "lockkit:lockkit#queue:{lockkit:a}";
    const ENTRIES: &str = "lockkit:lockkit#about:{lockkit:a}";

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let next = format!("{:032x}", 7);
    for is_first in [true, false] {
        let held = lock(&client, "a", LONG).acquire().await.unwrap();
        let value = server.cli(&["GET", KEY]).unwrap();
        let words: Vec<_> = value[8..].split(' ').collect();
        let (owner, channel) = (words[0], words[3]);
        let waited_for = value.replacen(':', "+", 1);
        server.cli(&["SET", KEY, &waited_for, "PX", "40000"]).unwrap();
        let time = server.cli(&["TIME"]).unwrap();
        let now = time.lines().next().unwrap();
        // The next is of the same client, which is connected and knows nothing of it.
        let (places, left) = if is_first {
            (vec![owner], "(nil)".to_owned())
        } else {
            (vec![&*next, owner], format!("lockkit:{next} "))
        };
        for (place, owner) in places.iter().enumerate() {
            let arrival = format!("{now}00000{place}");
            server.cli(&["ZADD", QUEUE, &arrival, owner]).unwrap();
            let entry = format!("x 30000 {owner} 1 %d {channel} ");
            server.cli(&["HSET", ENTRIES, owner, &entry]).unwrap();
        }
        held.release().await.unwrap();
        let value = server.cli(&["GET", KEY]).unwrap();
        assert!(value.starts_with(&left), "{value}, and not {left}");
        assert_eq!(server.cli(&["EXISTS", QUEUE]).unwrap(), "0");
        server.cli(&["DEL", KEY, ENTRIES]).unwrap();
    }
}

/// Its place is before theirs, and it cannot be served before the holder goes. It counts as alive for ten seconds.
#[tokio::test]
async fn a_dead_waiter_keeps_out_nobody_whom_it_would_not_fit() {
    const BELIEVED: Duration = Duration::from_secs(10);
    const WATCHED: Duration = Duration::from_secs(11);

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let clients = join_all((0..4).map(|_| client(server.url()))).await;
    let reader = |index: usize| lock(&clients[index], "a", LONG).shared();
    let held = reader(0).acquire().await.unwrap();
    let mut writer = Peer::start(server.url()).await;
    writer.send("acquire slot exclusive 30000 a");
    waiters(&server, "a", 1).await;
    heartbeats(&server, 1).await;
    // Some want one permit of one, others of four: a deployment that changes the number is rolled out.
    let permits = |index: usize, count| {
        let semaphore = clients[index].semaphore("s", count).unwrap();
        semaphore.with_options(AcquireOptions::new().ttl(LONG))
    };
    let queue = "lockkit:lockkit#queue:{lockkit:lockkit#semaphore:{lockkit:s}}";
    let one = permits(0, 1).acquire().await.unwrap();
    let mut old = Peer::start(server.url()).await;
    old.send("acquire slot 1 30000 s");
    eventually("in the queue", async || {
        server.cli(&["ZCARD", queue]).unwrap() == "1"
    })
    .await;
    heartbeats(&server, 2).await;

    writer.process.kill().unwrap();
    old.process.kill().unwrap();
    let killed = Stopwatch::start();
    eventually("the server has noticed", async || subscribers(&server) == 4).await;
    assert!(
        reader(2).try_acquire().await.unwrap().is_none(),
        "it may be reconnecting"
    );
    one.release().await.unwrap();
    let four = permits(0, 4).acquire().await.unwrap();
    assert!(permits(1, 4).try_acquire().await.unwrap().is_none());
    let readers = [waiter(&reader(1)), waiter(&reader(2)), waiter(&reader(3))];
    let permitted = [waiter(&permits(1, 4)), waiter(&permits(2, 4))];
    let limit = BELIEVED + WATCHED + 2 * SECOND;
    for waiting in readers.into_iter().chain(permitted) {
        let next = granted(limit, "nobody alive is before it", waiting).await;
        next.release().await.unwrap();
    }
    let waited = killed.elapsed();
    assert!(waited < limit, "{waited:?}");
    held.check().unwrap();
    held.release().await.unwrap();
    four.release().await.unwrap();
    nothing_is_left(&server, "after dead waiters").await;
}

/// The waiter stood still for so long that it counted as dead.
#[tokio::test]
async fn a_waiter_that_lost_its_place_while_stopped_queues_anew() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&one, "a", 20 * LONG).shared().acquire().await.unwrap();
    let mut writer = Peer::start(server.url()).await;
    writer.send("acquire slot exclusive 600000 a");
    waiters(&server, "a", 1).await;
    heartbeats(&server, 1).await;
    writer.process.stop().unwrap();
    let other = lock(&two, "a", LONG).shared();
    until(LONG, "nobody alive is before it", async || {
        match other.try_acquire().await.unwrap() {
            None => false,
            Some(other) => other.release().await.is_ok(),
        }
    })
    .await;
    writer.process.resume().unwrap();
    // The lease before it lasts for ten minutes.
    waiters(&server, "a", 1).await;
    held.release().await.unwrap();
    writer.granted().await;
}

/// It is handed the lock, since its connection stands, and does not renew it.
#[tokio::test]
async fn a_grant_to_a_frozen_waiter_lapses_and_the_next_gets_it() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let mut peer = Peer::start(server.url()).await;
    peer.send("acquire slot exclusive 30000 a");
    waiters(&server, "a", 1).await;
    let waiting = waiter(&lock(&other, "a", LONG));
    waiters(&server, "a", 2).await;
    peer.process.stop().unwrap();
    let (released, of_all) = (Stopwatch::start(), Instant::now());
    held.release().await.unwrap();
    let next = granted(LONG, "the next, after the claim's short lease", waiting).await;
    let (waited, of_all) = (released.elapsed(), of_all.elapsed());
    assert!(of_all > 2 * SECOND, "the frozen one was not passed the lock");
    // By then it has looked, and knows when the three seconds are over.
    assert!(waited < 3 * SECOND + 500 * MS + AT_ONCE, "{waited:?}");
    peer.process.resume().unwrap();
    // It has waited all the while, and gets its turn.
    waiters(&server, "a", 1).await;
    let token = next.token().get();
    next.release().await.unwrap();
    assert!(peer.granted().await > token);
    peer.send("release slot");
    assert_eq!(peer.reply().await, "released");
    nothing_is_left(&server, "after a frozen waiter").await;
}

/// The new head is not told that it is one, unless it would look too late.
#[tokio::test]
async fn the_new_head_watches_over_short_and_long_leases() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    for ttl in [SECOND, 4 * SECOND] {
        let (holder, other) = (client(server.url()).await, client(server.url()).await);
        let held = lock(&holder, "a", LONG).acquire().await.unwrap();
        let mut peer = Peer::start(server.url()).await;
        peer.send(&format!("acquire slot exclusive {} a", ttl.as_millis()));
        waiters(&server, "a", 1).await;
        let waiting = waiter(&lock(&other, "a", LONG));
        waiters(&server, "a", 2).await;
        heartbeats(&server, 2).await;
        held.release().await.unwrap();
        peer.granted().await;
        peer.process.kill().unwrap();
        let died = Stopwatch::start();
        let next = granted(LONG, "when the lease is over", waiting).await;
        let waited = died.elapsed();
        assert!(waited < ttl + AT_ONCE, "{waited:?} with a lease of {ttl:?}");
        next.release().await.unwrap();
        holder.close(SECOND).await.unwrap();
        other.close(SECOND).await.unwrap();
    }
}

/// One waiter's client has sent a heartbeat, the other's has not yet.
#[tokio::test]
async fn a_waiter_that_reconnects_keeps_its_place() {
    if no_server() {
        return;
    }
    for heard_of in [true, false] {
        let server = RedisServer::plain().unwrap();
        let (holder, second, third) = (
            client(server.url()).await,
            client(server.url()).await,
            client(server.url()).await,
        );
        let (first, proxy) = client_behind_proxy(&server).await;
        let held = lock(&holder, "a", LONG).acquire().await.unwrap();
        let first = waiter(&lock(&first, "a", LONG));
        waiters(&server, "a", 1).await;
        if heard_of {
            heartbeats(&server, 1).await;
        }
        // It is cut off: the one behind it is served, and it stays where it is.
        proxy.set(Mode::Refuse);
        proxy.reset();
        eventually("the server has noticed", async || subscribers(&server) == 3).await;
        let second = waiter(&lock(&second, "a", LONG));
        waiters(&server, "a", 2).await;
        held.release().await.unwrap();
        let held = granted(AT_ONCE, "the one behind it", second).await;
        let third = waiter(&lock(&third, "a", LONG));
        waiters(&server, "a", 2).await;
        let connections = proxy.counts().connections;
        proxy.set(Mode::Pass);
        eventually("connected again", async || {
            proxy.counts().connections > connections && subscribers(&server) == 4
        })
        .await;
        held.release().await.unwrap();
        let held = granted(AT_ONCE, "the one that was away", first).await;
        assert!(!third.is_finished());
        held.release().await.unwrap();
        granted(AT_ONCE, "the last", third).await.release().await.unwrap();
        nothing_is_left(&server, "after a reconnection").await;
    }
}

#[tokio::test]
async fn a_waiter_that_is_cancelled_leaves_nothing() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let semaphore = |client: &LockClient| client.semaphore("a", 2).unwrap();
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let permits = [
        semaphore(&holder).acquire().await.unwrap(),
        semaphore(&holder).acquire().await.unwrap(),
    ];
    let before = keys(&server);
    for mode in 0..3 {
        let lock = match mode {
            0 => lock(&other, "a", LONG),
            1 => lock(&other, "a", LONG).shared(),
            _ => semaphore(&other),
        };
        let waiting = waiter(&lock);
        eventually("in the queue", async || {
            keys(&server)
                .iter()
                .any(|key| key.starts_with("lockkit:lockkit#queue:"))
        })
        .await;
        waiting.abort();
        eventually("out of the queue", async || {
            let mut now = keys(&server);
            now.retain(|key| !key.starts_with("lockkit:lockkit#client:"));
            now == before
        })
        .await;
        let error = lock.acquire_timeout(30 * MS).await.unwrap_err();
        assert!(error.is_timeout(), "{error}");
    }
    held.release().await.unwrap();
    for permit in permits {
        permit.release().await.unwrap();
    }
    nothing_is_left(&server, "after cancelled waiters").await;
    // A client that waited is known to be alive for some seconds more, unless it closes.
    waiter(&lock(&holder, "b", LONG))
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    other.close(SECOND).await.unwrap();
    holder.close(SECOND).await.unwrap();
    assert_eq!(keys(&server), ["lockkit:lockkit#fence"]);
}

/// The server could not be told for so long that nobody tries any more. Others of its client wait on, so that the
/// client is known to be alive, and as a writer among readers its turn does not come.
#[tokio::test]
async fn a_waiter_cancelled_while_cut_off_leaves_nothing() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let (cut_off, proxy) = client_behind_proxy(&server).await;
    let traces = Traces::default();
    let _recording = tracing::subscriber::set_default(traces.clone());
    let held = lock(&holder, "a", LONG).shared().acquire().await.unwrap();
    let held_on = lock(&holder, "b", LONG).acquire().await.unwrap();
    let brief = AcquireOptions::new().ttl(200 * MS).op_timeout(200 * MS);
    let cancelled = waiter(&cut_off.lock("a").unwrap().with_options(brief));
    let waits_on = waiter(&lock(&cut_off, "b", LONG));
    waiters(&server, "a", 1).await;
    waiters(&server, "b", 1).await;
    proxy.set(Mode::Refuse);
    proxy.reset();
    eventually("the server has noticed", async || subscribers(&server) == 2).await;
    cancelled.abort();
    eventually("nobody tries any more", async || {
        traces.text().contains("never confirmed")
    })
    .await;
    waiters(&server, "a", 1).await;
    proxy.set(Mode::Pass);
    let reading = waiter(&lock(&other, "a", LONG).shared());
    let read = granted(RECOVERED, "nobody who waits is before it", reading).await;
    held.check().unwrap();
    read.release().await.unwrap();
    held.release().await.unwrap();
    held_on.release().await.unwrap();
    let next = granted(RECOVERED, "its client's other waiter", waits_on).await;
    next.release().await.unwrap();
    nothing_is_left(&server, "after a cancelled waiter").await;
}

/// A heartbeat that nobody repeats goes by itself.
#[tokio::test]
async fn a_heartbeat_has_an_end() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&other, "a", LONG));
    heartbeats(&server, 1).await;
    waiting.abort();
    held.release().await.unwrap();
    let heartbeat = keys(&server)
        .into_iter()
        .find(|key| key.starts_with("lockkit:lockkit#client:"));
    let left: i64 = server
        .cli(&["PTTL", &heartbeat.expect("it is believed for some seconds")])
        .unwrap()
        .parse()
        .unwrap();
    assert!((1..=10_000).contains(&left), "{left} ms");
    nothing_is_left(&server, "after a cancelled waiter").await;
    for key in ["lockkit:lockkit#client:", "lockkit:lockkit#fence"] {
        assert!(!is_residue(key));
    }
}

/// A claim that is gone without a word is handed the lock. Its client releases it at once, and not when the short lease
/// ends.
#[tokio::test]
async fn a_grant_to_a_claim_that_is_gone_is_given_back() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let backend = RedisBackend::connect(RedisConfig::new(server.url()))
        .await
        .unwrap();
    for mode in [LockMode::Exclusive, LockMode::Shared] {
        let held = lock(&holder, "a", LONG).acquire().await.unwrap();
        let request = ClaimRequest::new(LockName::new("a").unwrap(), mode, LONG, OwnerId::new(7));
        let mut claim = backend.claim(&request).await.unwrap();
        assert!(claim.attempt(SECOND).await.unwrap().is_none());
        drop(claim);
        let waiting = waiter(&lock(&other, "a", LONG));
        waiters(&server, "a", 2).await;
        held.release().await.unwrap();
        granted(AT_ONCE, "the next", waiting)
            .await
            .release()
            .await
            .unwrap();
        nothing_is_left(&server, "after a stray grant").await;
    }
}

/// Together, and not one after the other: the way to the server may be long.
#[tokio::test]
async fn grants_to_many_claims_that_are_gone_are_given_back() {
    const LOCKS: usize = 20;

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let proxy = Proxy::start(server.addr()).unwrap();
    let config = RedisConfig::new(format!("redis://{}", proxy.addr()));
    let backend = RedisBackend::connect(config).await.unwrap();
    let (mut held, mut waiting) = (Vec::new(), Vec::new());
    for n in 0..LOCKS {
        let name = n.to_string();
        held.push(lock(&holder, &name, LONG).acquire().await.unwrap());
        let request = LockName::new(name.clone()).unwrap();
        let request = ClaimRequest::new(request, LockMode::Exclusive, LONG, OwnerId::new(n as u128));
        let mut claim = backend.claim(&request).await.unwrap();
        assert!(claim.attempt(SECOND).await.unwrap().is_none());
        drop(claim);
        waiting.push(waiter(&lock(&other, &name, LONG)));
        waiters(&server, &name, 2).await;
    }
    proxy.set(Mode::Delay {
        requests: 300 * MS,
        replies: Duration::ZERO,
    });
    let released = Stopwatch::start();
    for held in held {
        held.release().await.unwrap();
    }
    for waiting in waiting {
        granted(LONG, "the next", waiting).await.release().await.unwrap();
    }
    // A hand-off that is not released expires after three seconds.
    let waited = released.elapsed();
    assert!(waited < 2 * SECOND, "the last was granted after {waited:?}");
}

#[tokio::test]
async fn readers_behind_a_writer_get_in_when_it_leaves_the_queue() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let clients = join_all((0..4).map(|_| client(server.url()))).await;
    let reader = |index: usize| lock(&clients[index], "a", LONG).shared();
    let first = reader(0).acquire().await.unwrap();
    let writer = waiter(&lock(&clients[1], "a", LONG));
    waiters(&server, "a", 1).await;
    let behind = [waiter(&reader(2)), waiter(&reader(3))];
    waiters(&server, "a", 3).await;
    assert!(
        reader(0).try_acquire().await.unwrap().is_none(),
        "the writer is before it"
    );
    writer.abort();
    for behind in behind {
        granted(AT_ONCE, "a reader", behind)
            .await
            .release()
            .await
            .unwrap();
    }
    first.release().await.unwrap();
    nothing_is_left(&server, "after readers").await;
}

/// The head of the queue watches over the lease of a holder that may have died. When it leaves, the next does.
#[tokio::test]
async fn the_new_head_watches_over_the_lease_before_it() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (first, second) = (client(server.url()).await, client(server.url()).await);
    let mut peer = Peer::start(server.url()).await;
    peer.hold(2 * SECOND, "a").await;
    let first = waiter(&lock(&first, "a", LONG));
    waiters(&server, "a", 1).await;
    let second = waiter(&lock(&second, "a", LONG));
    waiters(&server, "a", 2).await;
    first.abort();
    waiters(&server, "a", 1).await;
    peer.process.kill().unwrap();
    granted(4 * SECOND, "when the lease is over", second)
        .await
        .release()
        .await
        .unwrap();
    nothing_is_left(&server, "after a killed holder").await;
}

/// The server may not have noticed that the first in the queue is dead, which is a process that is stopped here.
#[tokio::test]
async fn a_dead_holder_is_followed_in_time_if_the_head_died_too() {
    if no_server() {
        return;
    }
    let ttl = 2 * SECOND;
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    for (name, noticed) in [("a", true), ("b", false)] {
        let mut holder = Peer::start(server.url()).await;
        holder.hold(ttl, name).await;
        let mut head = Peer::start(server.url()).await;
        head.send(&format!("acquire slot exclusive 30000 {name}"));
        waiters(&server, name, 1).await;
        let waiting = waiter(&lock(&client, name, LONG));
        waiters(&server, name, 2).await;
        if noticed {
            head.process.kill().unwrap();
            eventually("the server has noticed", async || subscribers(&server) == 2).await;
        } else {
            head.process.stop().unwrap();
        }
        holder.process.kill().unwrap();
        let (died, of_all) = (Stopwatch::start(), std::time::Instant::now());
        let next = granted(LONG, "with the holder and the head dead", waiting).await;
        let (waited, of_all) = (died.elapsed(), of_all.elapsed());
        let bound = client.dead_holder_bound(ttl);
        assert!(waited < bound + SECOND, "{waited:?}, and said were {bound:?}");
        assert!(of_all > ttl + SECOND, "{of_all:?}: the head is alive");
        head.process.kill().unwrap();
        next.release().await.unwrap();
    }
}

/// The last in the queue was told of a longer lease than that of the holder that died.
#[tokio::test]
async fn a_shorter_lease_is_followed_in_time_if_the_head_died_too() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (first, last) = (client(server.url()).await, client(server.url()).await);
    let before = lock(&first, "a", LONG).acquire().await.unwrap();
    let mut peers = [Peer::start(server.url()).await, Peer::start(server.url()).await];
    for (place, (peer, ttl)) in peers.iter_mut().zip([1_000, 30_000]).enumerate() {
        peer.send(&format!("acquire slot exclusive {ttl} a"));
        waiters(&server, "a", place + 1).await;
    }
    let waiting = waiter(&lock(&last, "a", LONG));
    waiters(&server, "a", 3).await;
    before.release().await.unwrap();
    let [holder, head] = &mut peers;
    holder.granted().await;
    head.process.kill().unwrap();
    holder.process.kill().unwrap();
    let died = Stopwatch::start();
    let next = granted(LONG, "with the holder and the head dead", waiting).await;
    let (waited, bound) = (died.elapsed(), last.dead_holder_bound(SECOND));
    assert!(waited < bound + SECOND, "{waited:?}, and said were {bound:?}");
    next.release().await.unwrap();
}

/// It queues again behind an exclusive holder, and is still in the list of shared holders.
#[tokio::test]
async fn a_reader_that_never_heard_of_its_grant_keeps_its_new_place() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (writer, other) = (client(server.url()).await, client(server.url()).await);
    for (name, tries) in [("a", true), ("b", false)] {
        let (reader, proxy) = client_behind_proxy(&server).await;
        proxy.set(Mode::DropReplies);
        let waiting = waiter(&lock(&reader, name, 3 * SECOND).shared());
        let key = format!("lockkit:{name}");
        for there in ["1", "0"] {
            let what = format!("EXISTS {there}: granted, and its lease over");
            eventually(&what, async || server.cli(&["EXISTS", &key]).unwrap() == there).await;
        }
        let ttl = if tries { LONG } else { 2 * SECOND };
        let held = lock(&writer, name, ttl).acquire().await.unwrap();
        proxy.set(Mode::Pass);
        waiters(&server, name, 1).await;
        if tries {
            assert!(lock(&other, name, LONG).try_acquire().await.unwrap().is_none());
        } else {
            // It asks again when the lease before it would be over, had it not been renewed.
            tokio::time::sleep(6 * SECOND).await;
            held.check().unwrap();
            assert!(!waiting.is_finished(), "{:?}", waiting.await);
        }
        held.release().await.unwrap();
        let next = granted(AT_ONCE, "it is the only one that waits", waiting).await;
        next.release().await.unwrap();
        nothing_is_left(&server, name).await;
    }
}

#[tokio::test]
async fn a_clock_set_back_keeps_the_order_of_the_queue() {
    if no_server() {
        return;
    }
    let clock = Clock::new().unwrap();
    let server = RedisServer::builder().clock(&clock).start().unwrap();
    let clients = join_all((0..4).map(|_| client(server.url()))).await;
    let mut held = lock(&clients[0], "a", LONG).acquire().await.unwrap();
    let mut waiting = Vec::new();
    for (place, client) in clients[1..].iter().enumerate() {
        waiting.push(waiter(&lock(client, "a", LONG)));
        waiters(&server, "a", place + 1).await;
        clock.back(60 * SECOND).unwrap();
    }
    for next in waiting {
        let token = held.token();
        held.release().await.unwrap();
        held = granted(AT_ONCE, "the next in order", next).await;
        assert!(held.token() > token);
    }
    held.release().await.unwrap();
    nothing_is_left(&server, "after the clock went back").await;
}

/// By the new clock no waiter has been heard of for long. A waiter that does not fit at that moment queues again.
#[tokio::test]
async fn a_clock_set_forward_has_waiters_queue_anew() {
    const WAITERS: usize = 4;

    if no_server() {
        return;
    }
    let clock = Clock::new().unwrap();
    let server = RedisServer::builder().clock(&clock).start().unwrap();
    let clients = join_all((0..=WAITERS).map(|_| client(server.url()))).await;
    let held = lock(&clients[0], "a", LONG).acquire().await.unwrap();
    let (grant, mut grants) = tokio::sync::mpsc::unbounded_channel();
    for (place, client) in clients.iter().enumerate().skip(1) {
        let (lock, grant) = (lock(client, "a", LONG), grant.clone());
        tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            grant.send((place, guard.token())).unwrap();
            guard.release().await.unwrap();
        });
        waiters(&server, "a", place).await;
    }
    clock.forward(60 * SECOND).unwrap();
    let mut tokens = vec![held.token()];
    let mut order = Vec::new();
    drop(held);
    for _ in 0..WAITERS {
        let (place, token) = within(LONG, "a grant", grants.recv()).await.unwrap();
        order.push(place);
        tokens.push(token);
    }
    assert_eq!(order[0], 1, "{order:?}");
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    nothing_is_left(&server, "after the clock went forward").await;
}

/// Its ten seconds are over when the clock is back where it was.
#[tokio::test]
async fn a_clock_set_back_keeps_the_place_of_a_dead_waiter() {
    if no_server() {
        return;
    }
    let clock = Clock::new().unwrap();
    let server = RedisServer::builder().clock(&clock).start().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&one, "a", LONG).shared().acquire().await.unwrap();
    let mut writer = Peer::start(server.url()).await;
    writer.send("acquire slot exclusive 30000 a");
    waiters(&server, "a", 1).await;
    clock.back(600 * SECOND).unwrap();
    writer.process.kill().unwrap();
    tokio::time::sleep(12 * SECOND).await;
    let reader = lock(&two, "a", LONG).shared();
    assert!(
        reader.try_acquire().await.unwrap().is_none(),
        "there is nothing to show"
    );
    held.check().unwrap();
    // Which ends the holder's lease as well, by the clock that it was renewed by.
    clock.reset().unwrap();
    let read = granted(AT_ONCE, "nobody alive is before it", waiter(&reader)).await;
    read.release().await.unwrap();
    drop(held);
    nothing_is_left(&server, "after the clock went back").await;
}

/// No living waiter looks when the first one's hand-off expires. The next in line would, which is the second frozen one.
#[tokio::test]
async fn frozen_waiters_in_a_row_delay_the_next_by_seconds_each() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let mut frozen = Vec::new();
    for place in 1..=2 {
        let mut peer = Peer::start(server.url()).await;
        peer.send("acquire slot exclusive 30000 a");
        waiters(&server, "a", place).await;
        frozen.push(peer);
    }
    let waiting = waiter(&lock(&other, "a", LONG));
    waiters(&server, "a", 3).await;
    for peer in &mut frozen {
        peer.process.stop().unwrap();
    }
    held.release().await.unwrap();
    // It asks 22 s after it came, and then the second lapses.
    let next = granted(28 * SECOND, "behind two that are frozen", waiting).await;
    next.release().await.unwrap();
}
