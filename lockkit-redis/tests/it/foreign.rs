//! Clients in other languages, which set the lock's key with `NX PX` and delete it after a comparison: they exclude us
//! and we exclude them, shared holders included.

use std::time::{Duration, Instant};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::LossReason;
use lockkit_testbed::{eventually, redis::RedisServer};
use redis::aio::MultiplexedConnection;

use crate::common::{
    AT_ONCE, LONG, MS, Peer, SECOND, client, granted, keys, lock, no_server, nothing_is_left,
    requests_executed, take, waiter, waiters, within,
};

const KEY: &str = "lockkit:a";

/// Does what redis-py's `Lock` and its like do.
struct Foreign(MultiplexedConnection);

impl Foreign {
    async fn new(server: &RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        Self(client.get_multiplexed_async_connection().await.unwrap())
    }

    async fn acquire(&mut self, value: &str) -> bool {
        let mut set = redis::cmd("SET");
        set.arg(KEY).arg(value).arg("NX").arg("PX").arg(60_000);
        let answer: Option<String> = set.query_async(&mut self.0).await.unwrap();
        answer.is_some()
    }

    async fn release(&mut self, value: &str) -> bool {
        const COMPARE_AND_DELETE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end";
        let mut eval = redis::cmd("EVAL");
        eval.arg(COMPARE_AND_DELETE).arg(1).arg(KEY).arg(value);
        eval.query_async(&mut self.0).await.unwrap()
    }
}

#[tokio::test]
async fn a_foreign_client_and_an_exclusive_holder_exclude_each_other() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let mut foreign = Foreign::new(&server).await;
    let lock = lock(&client, "a", LONG);
    for _ in 0..3 {
        let held = lock.acquire().await.unwrap();
        assert!(!foreign.acquire("theirs").await);
        assert!(!foreign.release("theirs").await, "it was not theirs");
        held.renew().await.unwrap();
        held.release().await.unwrap();

        assert!(foreign.acquire("theirs").await);
        assert!(lock.try_acquire().await.unwrap().is_none());
        assert!(lock.shared().try_acquire().await.unwrap().is_none());
        let state = client.inspect("a").await.unwrap();
        assert_eq!(state.holders.len(), 1);
        assert_eq!(state.holders[0].token.get(), 0, "they have no tokens");
        let waiting = waiter(&lock);
        waiters(&server, "a", 1).await;
        assert!(foreign.release("theirs").await);
        granted(AT_ONCE, "after the foreign release", waiting)
            .await
            .release()
            .await
            .unwrap();
    }
    nothing_is_left(&server, "beside foreign clients").await;
}

/// A foreign release wakes nobody: the first in the queue looks, and only the first.
#[tokio::test]
async fn the_head_polls_a_foreign_hold_every_50_to_100_ms() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (first, second) = (client(server.url()).await, client(server.url()).await);
    let mut foreign = Foreign::new(&server).await;
    assert!(foreign.acquire("theirs").await);
    let first = waiter(&lock(&first, "a", LONG));
    waiters(&server, "a", 1).await;
    let second = waiter(&lock(&second, "a", LONG));
    waiters(&server, "a", 2).await;
    let monitor = server.monitor().unwrap();
    let polls = || -> Vec<f64> {
        let lines = monitor.lines().unwrap();
        let polls = lines.iter().filter(|line| line.contains("\"EVALSHA\""));
        polls
            .map(|line| line.split(' ').next().unwrap().parse().unwrap())
            .collect()
    };
    // Sleeps as the head does, for as many times, beside it: that is late by as much.
    let watch = Stopwatch::start();
    let beside = tokio::spawn(async {
        let pause = 75 * MS;
        let mut late = Duration::ZERO;
        for _ in 0..12 {
            let began = Instant::now();
            tokio::time::sleep(pause).await;
            late += began.elapsed().saturating_sub(pause);
        }
        late
    });
    eventually("it polls", async || polls().len() > 12).await;
    let late = beside.await.unwrap() + watch.stood_still();
    let polls = polls();
    // One that is late is nearer to the next: the sum has neither.
    let mean = (polls[12] - polls[0]) / 12.0;
    let bound = 0.120 + 3.0 * late.as_secs_f64() / 12.0;
    assert!(
        mean > 0.045 && mean < bound,
        "{mean} s, at most {bound}: {polls:?}"
    );

    // The second takes over from the first.
    first.abort();
    waiters(&server, "a", 1).await;
    assert!(foreign.release("theirs").await);
    granted(AT_ONCE, "the second", second)
        .await
        .release()
        .await
        .unwrap();
    nothing_is_left(&server, "beside foreign clients").await;
}

#[tokio::test]
async fn a_foreign_value_without_an_end_holds_until_it_is_deleted() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    for value in ["", "1", "lockkit", "lockkit:", "lockkit:not-one-of-ours"] {
        server.cli(&["SET", KEY, value]).unwrap();
        let lock = lock(&client, "a", LONG);
        assert!(lock.try_acquire().await.unwrap().is_none());
        let state = client.inspect("a").await.unwrap();
        assert_eq!(state.holders.len(), 1, "{value:?}");
        assert_eq!(state.holders[0].left, None, "{value:?}");
        let waiting = waiter(&lock);
        waiters(&server, "a", 1).await;
        let before = requests_executed(&server);
        eventually("it has looked again and again", async || {
            requests_executed(&server) >= before + 3
        })
        .await;
        assert!(!waiting.is_finished());
        assert_eq!(server.cli(&["GET", KEY]).unwrap(), value);
        server.cli(&["DEL", KEY]).unwrap();
        granted(AT_ONCE, value, waiting).await.release().await.unwrap();
    }
    nothing_is_left(&server, "beside foreign clients").await;
}

#[tokio::test]
async fn foreign_clients_and_shared_holders_exclude_each_other() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    let mut foreign = Foreign::new(&server).await;
    let shared = [&one, &two].map(|client| lock(client, "a", 3 * SECOND).shared());
    for _ in 0..2 {
        let readers = [
            shared[0].acquire().await.unwrap(),
            shared[1].acquire().await.unwrap(),
        ];
        // For longer than a lease: the marker is renewed with them.
        for _ in 0..17 {
            assert!(!foreign.acquire("theirs").await);
            tokio::time::sleep(200 * MS).await;
        }
        let [first, second] = readers;
        first.release().await.unwrap();
        assert!(!foreign.acquire("theirs").await, "one is still in");
        second.release().await.unwrap();
        assert!(foreign.acquire("theirs").await);
        let waiting = waiter(&shared[0]);
        waiters(&server, "a", 1).await;
        assert!(!waiting.is_finished());
        assert!(foreign.release("theirs").await);
        granted(AT_ONCE, "a reader", waiting)
            .await
            .release()
            .await
            .unwrap();
    }
    nothing_is_left(&server, "beside foreign clients").await;
}

/// A shared holder whose lease ends first does not take the others' protection with it.
#[tokio::test]
async fn the_key_of_a_group_lasts_as_long_as_its_longest_lease() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let mut foreign = Foreign::new(&server).await;
    let long = lock(&client, "a", LONG).shared().acquire().await.unwrap();
    let mut peer = Peer::start(server.url()).await;
    peer.send("acquire slot shared 500 a");
    peer.granted().await;
    peer.process.kill().unwrap();
    eventually("the shorter lease is over", async || {
        client.inspect("a").await.unwrap().holders.len() == 1
    })
    .await;
    assert!(long.is_held());
    assert!(!foreign.acquire("theirs").await, "one is still in");
    long.release().await.unwrap();
    assert!(foreign.acquire("theirs").await);
}

/// Someone writes over our value without looking. The holder is told, and does no harm to the new value.
#[tokio::test]
async fn a_foreign_value_written_over_ours_is_left_alone() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    for shared in [false, true] {
        let locks = [&one, &two].map(|client| {
            let lock = lock(client, "a", 3 * SECOND);
            if shared { lock.shared() } else { lock }
        });
        let mut held = vec![locks[0].acquire().await.unwrap()];
        if shared {
            held.push(locks[1].acquire().await.unwrap());
        }
        server.cli(&["SET", KEY, "theirs", "PX", "50000"]).unwrap();
        for guard in &held {
            // At its next renewal.
            let reason = within(3 * SECOND, "told", guard.lost()).await;
            assert_eq!(reason, LossReason::Revoked);
        }
        for guard in held {
            assert!(guard.release().await.unwrap_err().is_lost());
        }
        assert!(locks[1].try_acquire().await.unwrap().is_none());
        assert_eq!(server.cli(&["GET", KEY]).unwrap(), "theirs");
        let left: u64 = server.cli(&["PTTL", KEY]).unwrap().parse().unwrap();
        assert!((30_000..=50_000).contains(&left), "{left}");
        eventually("no trace of our own", async || {
            keys(&server).iter().all(|key| {
                key == KEY || key == "lockkit:lockkit#fence" || key.starts_with("lockkit:lockkit#client:")
            })
        })
        .await;
        server.cli(&["DEL", KEY]).unwrap();
        take(&locks[0]).await;
        nothing_is_left(&server, "after a foreign value").await;
    }
}

/// A look at such a key is an error. The holder is told all the same.
#[tokio::test]
async fn any_value_written_over_ours_is_told() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let ours = lock(&client, "a", LONG);
    for ours in [ours.clone(), ours.shared()] {
        let held = ours.acquire().await.unwrap();
        server.cli(&["DEL", KEY]).unwrap();
        server.cli(&["HSET", KEY, "field", "value"]).unwrap();
        // Not at the end of its lease.
        assert!(held.renew().await.unwrap_err().is_lost());
        let reason = within(AT_ONCE, "told", held.lost()).await;
        assert_eq!(reason, LossReason::Revoked);
        assert_eq!(server.cli(&["HGET", KEY, "field"]).unwrap(), "value");
        server.cli(&["DEL", KEY]).unwrap();
    }
}

/// Under an exclusive holder, nobody looks at shared holders that are left.
#[tokio::test]
async fn shared_holders_of_a_deleted_key_do_not_come_back() {
    if no_server() {
        return;
    }
    for renews in [true, false] {
        let server = RedisServer::plain().unwrap();
        let (reader, writer, other) = (
            client(server.url()).await,
            client(server.url()).await,
            client(server.url()).await,
        );
        let shared = lock(&reader, "a", LONG).shared().acquire().await.unwrap();
        server.cli(&["DEL", KEY]).unwrap();
        let alone = lock(&writer, "a", LONG).acquire().await.unwrap();
        let waiting = waiter(&lock(&other, "a", LONG).shared());
        waiters(&server, "a", 1).await;
        if renews {
            assert!(shared.renew().await.unwrap_err().is_lost());
            alone.check().unwrap();
        }
        alone.renew().await.unwrap();
        alone.release().await.unwrap();
        let next = granted(AT_ONCE, "the next reader", waiting).await;
        let holders = other.inspect("a").await.unwrap().holders;
        assert_eq!(holders.len(), 1, "{holders:?}");
        assert_eq!(holders[0].token, next.token());
        assert!(shared.release().await.unwrap_err().is_lost());
        next.release().await.unwrap();
        nothing_is_left(&server, "after the key was deleted").await;
    }
}
