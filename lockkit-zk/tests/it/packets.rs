//! The cost of a contended lock, by the server's own count.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_testbed::{Mode, Proxy, eventually, zookeeper::ZkServer};
use tokio::{task::JoinSet, time::timeout};
use zookeeper_client::{Acls, CreateMode};

use crate::server::{
    self, contend, in_order, lock, no_zookeeper, queue_up, raw, shared, soon, takes_its_turn, unique, waiter,
};

/// The number of locks that are counted.
const LOCKS: u32 = 1_500;
/// The time from one heartbeat of a session of a minute to the next.
const HEARTBEAT: Duration = Duration::from_millis(2_500);
/// The time after which a waiter looks without being told.
const POLL: Duration = Duration::from_secs(5);
/// A hold that lasts for 5 ms is looked after. Its client has noticed the beginning a little late.
const SHORT: Duration = Duration::from_millis(4);

/// The counts of a contest so far.
#[derive(Default)]
struct Contest {
    granted: AtomicU32,
    /// Those that may be looked after: each by a watch of its own node, which tells of the release.
    long_holds: AtomicU32,
    /// The looks of waiters that nobody told. Each asks for three nodes at most.
    polls: AtomicU32,
}

/// Returns the packets that the server got and sent per lock, between so many clients that come back at once. Leaves out what is sent by
/// time: on a slow machine, there is more of it for a lock.
async fn per_lock(clients: u32) -> (f64, f64) {
    let server = ZkServer::plain().unwrap();
    let name = unique("packets");
    let contest = Arc::<Contest>::default();
    let mut contenders = JoinSet::new();
    for _ in 0..clients {
        let mut config = server::config(server.addr());
        config.session_timeout = Duration::from_secs(60);
        let lock = lock(&server::patiently(config).await, &name);
        let contest = contest.clone();
        contenders.spawn(async move {
            loop {
                let asked = Instant::now();
                let guard = lock.acquire().await.unwrap();
                let granted = Instant::now();
                let polls = (granted - asked).as_secs() / POLL.as_secs();
                contest
                    .polls
                    .fetch_add(u32::try_from(polls).unwrap(), Ordering::Relaxed);
                contest.granted.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                let is_long = granted.elapsed() >= SHORT;
                contest.long_holds.fetch_add(is_long.into(), Ordering::Relaxed);
                guard.release().await.unwrap();
            }
        });
    }
    let began = Instant::now();
    let counted = async |locks: u32| {
        eventually(&format!("{locks} locks"), async || {
            contest.granted.load(Ordering::Relaxed) >= locks
        })
        .await;
        let figures = server.figures().unwrap();
        let figure = |name: &str| figures[name].parse::<f64>().unwrap();
        let [locks, long_holds, polls] = [&contest.granted, &contest.long_holds, &contest.polls]
            .map(|count| f64::from(count.load(Ordering::Relaxed)));
        let heartbeats = f64::from(clients) * began.elapsed().as_secs_f64() / HEARTBEAT.as_secs_f64();
        let by_time = heartbeats + long_holds + 3.0 * polls;
        let got = figure("zk_packets_received") - by_time;
        (locks, got, figure("zk_packets_sent") - by_time - long_holds)
    };
    // By then all have seen each other.
    let before = counted(20 * clients).await;
    let after = counted(20 * clients + LOCKS).await;
    contenders.shutdown().await;
    let locks = after.0 - before.0;
    ((after.1 - before.1) / locks, (after.2 - before.2) / locks)
}

/// Measures up to five times. What else a machine does costs requests, since a queue changes between a look and a watch, and never saves any.
///
/// A request too many is a whole one, so half of one is the bound.
async fn at_best(clients: u32, got: f64, sent: f64) -> (f64, f64) {
    let mut seen = Vec::new();
    while seen.len() < 5 {
        let per_lock = per_lock(clients).await;
        if per_lock.0 <= got && per_lock.1 <= sent {
            return per_lock;
        }
        seen.push(per_lock);
    }
    panic!("{seen:.2?} packets got and sent per lock");
}

/// The requests are a node, a list, a watch, a list and a deletion. Each has a reply, and one deletion is notified.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_contended_lock_costs_five_requests_and_six_packets_back() {
    if no_zookeeper() {
        return;
    }
    let (got, sent) = at_best(16, 5.5, 6.5).await;
    println!("{got:.2} packets got and {sent:.2} sent per lock");
}

/// The requests are the name of the last newcomer, a node, a watch, whether the predecessor held, and a deletion.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_in_a_crowd_costs_as_much() {
    if no_zookeeper() {
        return;
    }
    let (got, sent) = at_best(100, 5.9, 6.9).await;
    println!("{got:.2} packets got and {sent:.2} sent per lock in a crowd");
}

/// A waiter's predecessor leaves, which had another before it, with a round trip of 2 ms.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn far_away_a_waiter_is_granted_without_asking() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    proxy.set(Mode::Delay {
        requests: Duration::from_millis(1),
        replies: Duration::from_millis(1),
    });
    let (raw, name) = (raw(server.addr()).await, unique("turn"));
    let mut config = server::config(proxy.addr());
    // Heartbeats are 2.5 s apart.
    config.session_timeout = Duration::from_secs(60);
    let lock = lock(&server::patiently(config).await, &name);
    let watched = async |by: usize| {
        let watched = async || server::watches(&server) == by;
        eventually(&format!("{by} watches"), watched).await;
    };
    let mut asked = u64::MAX;
    // The server removes an empty container.
    let lasting = CreateMode::Persistent.with_acls(Acls::anyone_all());
    raw.mkdir(&server::dir(&name), &lasting).await.unwrap();
    // It learns how far the server is, from some replies each time.
    for round in 0..75 {
        let before = queue_up(&raw, &name, 2).await;
        let waiting = waiter(&lock);
        contend(&raw, &name, 3).await;
        let asked_first = proxy.counts().requests.chunks;
        if round < 70 {
            raw.delete(&before[0], None).await.unwrap();
        } else {
            // First it watches both predecessors and its own node, then what is left of them.
            watched(3).await;
            raw.delete(&before[0], None).await.unwrap();
            watched(2).await;
            let looks = async || proxy.counts().requests.chunks > asked_first;
            eventually("it looks", looks).await;
        }
        let asked_before = proxy.counts().requests.chunks;
        raw.delete(&before[1], None).await.unwrap();
        let (guard, _) = waiting.await.unwrap();
        if round >= 70 {
            asked = asked.min(proxy.counts().requests.chunks - asked_before);
        }
        guard.release().await.unwrap();
    }
    assert_eq!(asked, 0);
}

/// The waiter is told that the second before it has gone, and is busy with something else at that time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn far_away_an_unpolled_waiter_keeps_its_place() {
    if no_zookeeper() {
        return;
    }
    let proxy = Proxy::start(shared().addr()).unwrap();
    proxy.set(Mode::Delay {
        requests: Duration::from_millis(1),
        replies: Duration::from_millis(1),
    });
    let (raw, name) = (raw(shared().addr()).await, unique("busy"));
    let lock = lock(&server::connect(proxy.addr()).await, &name);
    let lasting = CreateMode::Persistent.with_acls(Acls::anyone_all());
    raw.mkdir(&server::dir(&name), &lasting).await.unwrap();
    // It learns how far the server is.
    for _ in 0..70 {
        let before = queue_up(&raw, &name, 2).await;
        let waiting = waiter(&lock);
        contend(&raw, &name, 3).await;
        for path in before {
            raw.delete(&path, None).await.unwrap();
        }
        takes_its_turn("both have gone", waiting).await;
    }
    let before = queue_up(&raw, &name, 2).await;
    let mut acquiring = pin!(lock.acquire());
    let polled = timeout(Duration::from_millis(500), &mut acquiring).await;
    assert!(polled.is_err(), "others are before it");
    let own = in_order(&raw, &name).await.remove(2);
    raw.delete(&before[0], None).await.unwrap();
    // A waiter whose turn it was, and that did not come in a second, would lose its node with the next heartbeat, within a second.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(in_order(&raw, &name).await, [before[1].clone(), own]);
    raw.delete(&before[1], None).await.unwrap();
    let guard = soon("it is its turn", acquiring).await.unwrap();
    guard.release().await.unwrap();
}
