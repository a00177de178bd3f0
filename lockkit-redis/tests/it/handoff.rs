//! Hand-offs: the push is the grant, and its lease begins with the reply before it. If in doubt, the waiter asks.

use std::time::Duration;

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{
    Lock, LockKind, LockName,
    spi::{Backend, Claim, ClaimRequest, Grant, Mode as LockMode, OwnerId, Renewal},
};
use lockkit_redis::{RedisBackend, RedisConfig};
use lockkit_testbed::{
    Mode, eventually,
    redis::{Monitor, RedisServer},
};
use tokio::time::Instant;

use crate::common::{
    AT_ONCE, LONG, MS, SECOND, client, client_behind_proxy, connect, granted, held_and_waited_for, lock,
    no_server, nothing_is_left, requests_executed, take, until, waiter, waiters, within,
};

/// The lease of a hand-off at the server.
const PASSED: Duration = Duration::from_secs(3);

/// Counts the requests for a lock so far.
fn asked(monitor: &Monitor) -> usize {
    asks(&monitor.lines().unwrap())
}

fn asks(lines: &[String]) -> usize {
    let asks = |line: &&String| line.contains("EVALSHA") && line.contains("\"wait\"");
    lines.iter().filter(asks).count()
}

/// Returns which of the requests is the first that tells a waiter, if one has.
fn told(lines: &[String]) -> Option<usize> {
    lines.iter().position(|line| line.contains("PUBLISH"))
}

/// On the only thread, nobody could renew a short lease.
#[tokio::test]
async fn a_holder_on_a_runtime_of_one_thread_may_block_it() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (held, _, waiting) = held_and_waited_for(&server).await;
    held.release().await.unwrap();
    let next = granted(AT_ONCE, "passed on", waiting).await;
    std::thread::sleep(PASSED + Duration::from_millis(500));
    assert!(next.is_held(), "it has blocked its runtime for 3.5 s of its ttl");
    next.release().await.unwrap();
}

/// Another thread renews its hold, and those of its client.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_holder_may_block_one_of_several_threads() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    for blocks in ["a", "b"] {
        let held = lock(&one, "a", LONG).acquire().await.unwrap();
        let locks = [lock(&two, "a", LONG), lock(&two, blocks, LONG)];
        let blocking = move |lock: Lock| async move {
            let held = lock.acquire().await.unwrap();
            std::thread::sleep(PASSED + 500 * MS);
            let is_held = held.is_held();
            drop(held);
            is_held
        };
        let [passed, other] = locks;
        let other = (blocks != "a").then(|| tokio::spawn(blocking(other)));
        tokio::time::sleep(100 * MS).await;
        let waiting = if other.is_some() {
            tokio::spawn(async move {
                let held = passed.acquire().await.unwrap();
                tokio::time::sleep(PASSED + 200 * MS).await;
                held.is_held()
            })
        } else {
            tokio::spawn(blocking(passed))
        };
        waiters(&server, "a", 1).await;
        held.release().await.unwrap();
        assert!(waiting.await.unwrap(), "lost, though {blocks} blocks one thread");
        if let Some(other) = other {
            assert!(other.await.unwrap(), "the one that blocks");
        }
        nothing_is_left(&server, blocks).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_is_one_request_of_the_releaser() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    let pairs: [(Lock, Lock); 3] = [
        (lock(&one, "a", LONG), lock(&two, "a", LONG)),
        (lock(&one, "a", LONG), lock(&two, "a", LONG).shared()),
        (one.semaphore("a", 1).unwrap(), two.semaphore("a", 1).unwrap()),
    ];
    for (mine, theirs) in pairs {
        let held = mine.acquire().await.unwrap();
        let monitor = server.monitor().unwrap();
        let waiting = waiter(&theirs);
        eventually("it waits", async || asked(&monitor) == 1).await;
        let token = held.token();
        held.release().await.unwrap();
        let next = granted(AT_ONCE, "passed on", waiting).await;
        // What comes after that is its first renewal.
        eventually("it is told", async || told(&monitor.lines().unwrap()).is_some()).await;
        let lines = monitor.lines().unwrap();
        let before = &lines[..told(&lines).unwrap()];
        assert_eq!(asks(before), 1, "{lines:?}");
        assert!(next.token() > token);
        // The server shows the same token.
        let shown = theirs.inspect().await.unwrap().holders;
        assert_eq!(
            shown.iter().map(|holder| holder.token).collect::<Vec<_>>(),
            [next.token()]
        );
        // And soon all that it has asked for.
        eventually("its whole lease", async || {
            next.check().unwrap();
            let end = next.valid_until().unwrap();
            end.saturating_duration_since(Instant::now()) > LONG / 2
        })
        .await;
        next.release().await.unwrap();
        nothing_is_left(&server, "passed on").await;
    }
}

/// A claim that waits for `a`.
struct Waiter {
    backend: RedisBackend,
    claim: Box<dyn Claim>,
    /// Before its request, and after the answer.
    asked: [Instant; 2],
}

impl Waiter {
    async fn begin(server: &RedisServer, ttl: Duration, renews: bool) -> Self {
        let backend = RedisBackend::connect(RedisConfig::new(server.url()))
            .await
            .unwrap();
        let name = LockName::new("a").unwrap();
        let mut request = ClaimRequest::new(name, LockMode::Exclusive, ttl, OwnerId::new(7));
        request.renews = renews;
        let mut claim = backend.claim(&request).await.unwrap();
        let before = Instant::now();
        assert!(claim.attempt(SECOND).await.unwrap().is_none());
        let asked = [before, Instant::now()];
        Self {
            backend,
            claim,
            asked,
        }
    }

    /// Returns the grant after a push.
    async fn grant(&mut self) -> Grant {
        let grant = self.claim.attempt(SECOND).await.unwrap();
        grant.expect("it was passed the lock")
    }

    async fn end(mut self) {
        self.claim.release().await.unwrap();
        self.backend.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_lasts_from_the_reply_before_it() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let holder = client(server.url()).await;
    for (ttl, renews) in [(LONG, true), (2 * SECOND, true), (LONG, false)] {
        let held = lock(&holder, "a", LONG).acquire().await.unwrap();
        let mut waiting = Waiter::begin(&server, ttl, renews).await;
        tokio::time::sleep(200 * MS).await;
        let released = Instant::now();
        held.release().await.unwrap();
        within(AT_ONCE, "told", waiting.claim.notified()).await;
        let lease = waiting.grant().await.lease;
        let length = lease.length.unwrap();
        if renews {
            // Its own request, or the heartbeat since.
            assert!((waiting.asked[0]..released).contains(&lease.since), "{lease:?}");
            assert!(length <= ttl.min(PASSED), "{lease:?}");
            // It hints at once that there is more to be had, until that has been asked for.
            within(AT_ONCE, "a hint", waiting.claim.notified()).await;
            let Renewal::Held(lease) = waiting.claim.renew().await.unwrap() else {
                panic!("it is lost");
            };
            assert!(lease.length.unwrap() > ttl * 9 / 10, "{lease:?}");
        } else {
            assert!(lease.since >= released && length > ttl * 9 / 10, "{lease:?}");
        }
        let hint = tokio::time::timeout(20 * MS, waiting.claim.notified()).await;
        assert!(hint.is_err(), "it has all of it");
        waiting.end().await;
        nothing_is_left(&server, "passed on").await;
    }
}

/// The program stood still, or the connection was replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_is_late_or_of_an_old_connection_is_a_hint() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    for late in [true, false] {
        let held = lock(&holder, "a", LONG).acquire().await.unwrap();
        let mut waiting = Waiter::begin(&server, LONG, true).await;
        held.release().await.unwrap();
        within(AT_ONCE, "told", waiting.claim.notified()).await;
        let told = Instant::now();
        if late {
            tokio::time::sleep(2_100 * MS).await;
        } else {
            server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
            // The old connection gets no more replies.
            let name = LockName::new("a").unwrap();
            eventually("connected again", async || {
                waiting.backend.inspect(&name, LockKind::Lock).await.is_ok()
            })
            .await;
        }
        let grant = waiting.grant().await;
        assert!(grant.lease.since > told, "{late}: {grant:?}");
        assert!(grant.lease.length.unwrap() > LONG / 2, "{late}: {grant:?}");
        waiting.end().await;
        nothing_is_left(&server, "asked for").await;
    }

    // The push is so late that the next has the lock.
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let mut waiting = Waiter::begin(&server, LONG, true).await;
    let next = waiter(&lock(&other, "a", LONG));
    waiters(&server, "a", 2).await;
    held.release().await.unwrap();
    within(AT_ONCE, "told", waiting.claim.notified()).await;
    let next = granted(PASSED + 3 * SECOND, "the next", next).await;
    assert!(
        waiting.claim.attempt(SECOND).await.unwrap().is_none(),
        "PROMISE BROKEN: an overlap"
    );
    next.release().await.unwrap();
    within(AT_ONCE, "told again", waiting.claim.notified()).await;
    waiting.grant().await;
    waiting.end().await;
    nothing_is_left(&server, "late").await;
}

/// The push comes through, and nothing after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_off_heir_is_told_before_another_is_granted() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, third) = (client(server.url()).await, client(server.url()).await);
    let (second, proxy) = client_behind_proxy(&server).await;
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&second, "a", LONG));
    waiters(&server, "a", 1).await;
    let next = waiter(&lock(&third, "a", LONG));
    waiters(&server, "a", 2).await;
    proxy.set(Mode::Delay {
        requests: 2 * LONG,
        replies: Duration::ZERO,
    });
    held.release().await.unwrap();
    let passed = granted(AT_ONCE, "passed on", waiting).await;
    within(PASSED + AT_ONCE, "told", passed.lost()).await;
    assert!(!next.is_finished(), "an overlap");
    let next = granted(PASSED + SECOND, "the next", next).await;
    assert!(next.token() > passed.token());
    assert!(passed.release().await.unwrap_err().is_lost());
    proxy.set(Mode::Pass);
    proxy.reset();
    next.renew().await.unwrap();
    next.release().await.unwrap();
    nothing_is_left(&server, "after a cut").await;
}

/// It is repeated to its holder, to a former holder, and after the lock has gone on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_is_repeated_changes_nothing() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", LONG));
    waiters(&server, "a", 1).await;
    let monitor = server.monitor().unwrap();
    held.release().await.unwrap();
    let held = granted(AT_ONCE, "passed on", waiting).await;
    let lines = monitor.lines().unwrap();
    let push = lines.iter().find(|line| line.contains("\"PUBLISH\"")).unwrap();
    let words: Vec<_> = push.split('"').skip(1).step_by(2).collect();
    let token = held.token().to_string();
    assert!(words[2].contains(&token), "{words:?}");
    let again = || assert_eq!(server.cli(&words).unwrap(), "1");
    again();
    held.renew().await.unwrap();
    held.check().unwrap();
    held.release().await.unwrap();
    again();
    let next = lock(&one, "a", LONG).acquire().await.unwrap();
    again();
    let waiting = waiter(&lock(&two, "a", LONG));
    waiters(&server, "a", 1).await;
    again();
    next.renew().await.unwrap();
    assert!(!waiting.is_finished(), "PROMISE BROKEN: an overlap");
    next.release().await.unwrap();
    let last = granted(AT_ONCE, "passed on", waiting).await;
    assert!(last.token().to_string() > token);
    last.release().await.unwrap();
    nothing_is_left(&server, "repeated").await;
}

/// A hand-off's short lease would end while the only thread works.
#[tokio::test]
async fn a_client_on_one_thread_is_told_no_token() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let holder = client(server.url()).await;
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let waiting = Waiter::begin(&server, LONG, true).await;
    let owner = format!("{:032x}", 7);
    let about = "lockkit:lockkit#about:{lockkit:a}";
    let entry = server.cli(&["HGET", about, &owner]).unwrap();
    let id = entry.split(' ').nth(5).unwrap();
    assert!(id.contains('.') && !id.ends_with('t'), "{entry}");
    let monitor = server.monitor().unwrap();
    held.release().await.unwrap();
    let lines = monitor.lines().unwrap();
    let told = format!("\"PUBLISH\" \"{id}\" \"{owner} 0 lockkit:a\"");
    assert!(lines.iter().any(|line| line.contains(&told)), "{lines:?}");
    waiting.end().await;
    nothing_is_left(&server, "told").await;
}

/// Replies bound the age of a push.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_client_hears_of_the_server_each_second() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let holder = client(server.url()).await;
    let other = connect(RedisConfig::new(server.url())).await.unwrap();
    let held = lock(&holder, "a", 20 * LONG).acquire().await.unwrap();
    // The moments of the signs, by the server's clock.
    let heard = |monitor: &Monitor| -> Vec<f64> {
        let lines = monitor.lines().unwrap();
        let signs = |line: &&String| line.contains("\"PING\"") || line.contains("\"lockkit:lockkit#client:");
        let signs = lines.iter().filter(signs);
        signs
            .map(|line| line.split(' ').next().unwrap().parse().unwrap())
            .collect()
    };
    let waiting = waiter(&lock(&other, "a", 20 * LONG));
    waiters(&server, "a", 1).await;
    let (watch, monitor) = (Stopwatch::start(), server.monitor().unwrap());
    until(LONG, "seven signs", async || heard(&monitor).len() >= 7).await;
    let signs = heard(&monitor);
    // Each may be late, and is made up for by the next: all together are not.
    let took = signs[6] - signs[0];
    let most = 9.0 + watch.stood_still().as_secs_f64();
    assert!(took > 4.0 && took < most, "six in {took} s: {signs:?}");
    drop(monitor);
    held.release().await.unwrap();
    let held = granted(AT_ONCE, "passed on", waiting).await;
    held.renew().await.unwrap();
    held.release().await.unwrap();
    until(LONG, "two seconds without a sign, as nobody waits", async || {
        let monitor = server.monitor().unwrap();
        tokio::time::sleep(2 * SECOND).await;
        heard(&monitor).is_empty()
    })
    .await;
}

/// A push comes only with a hold that is written. The key was deleted, and the next request is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_refuses_to_write_passes_nothing_on() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    let mine = lock(&one, "a", LONG);
    for asks in ["a try", "a renewal", "a break"] {
        let held = mine.acquire().await.unwrap();
        let waiting = waiter(&lock(&two, "a", LONG));
        waiters(&server, "a", 1).await;
        server.cli(&["DEL", "lockkit:a"]).unwrap();
        let replicas = |count| {
            server
                .cli(&["CONFIG", "SET", "min-replicas-to-write", count])
                .unwrap()
        };
        replicas("1");
        let refused = match asks {
            "a try" => mine.shared().try_acquire().await.map(drop),
            "a renewal" => held.renew().await,
            _ => one.revoke_by_force("a", held.token()).await.map(drop),
        };
        assert!(refused.unwrap_err().is_transient(), "{asks}");
        tokio::time::sleep(200 * MS).await;
        assert!(
            !waiting.is_finished(),
            "{asks}: it was told of what is not at the server"
        );
        replicas("0");
        drop(held);
        let next = granted(LONG, "the server writes again", waiting).await;
        next.release().await.unwrap();
        nothing_is_left(&server, asks).await;
    }
}

/// The connection stands, and the master follows another by now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_at_a_former_master_is_handed_nothing() {
    if no_server() {
        return;
    }
    let before = RedisServer::plain().unwrap();
    let after = RedisServer::builder().replica_of(before.addr()).start().unwrap();
    let (holder, proxy) = client_behind_proxy(&before).await;
    let stays = client(before.url()).await;
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let first = waiter(&lock(&stays, "a", LONG));
    waiters(&after, "a", 1).await;
    after.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    let (ip, port) = (after.addr().ip().to_string(), after.addr().port().to_string());
    before.cli(&["REPLICAOF", &ip, &port]).unwrap();
    proxy.set_upstream(after.addr());
    proxy.reset();
    let other = client(after.url()).await;
    let second = waiter(&lock(&other, "a", LONG));
    waiters(&after, "a", 2).await;
    until(LONG, "it follows", async || {
        let shown = before.cli(&["INFO", "replication"]);
        shown.is_ok_and(|shown| shown.contains("master_link_status:up"))
    })
    .await;
    until(LONG, "released", async || held.renew().await.is_ok()).await;
    held.release().await.unwrap();
    let next = granted(AT_ONCE, "at the new master", second).await;
    tokio::time::sleep(100 * MS).await;
    assert!(
        !first.is_finished(),
        "two are told the token {}: {:?}",
        next.token(),
        first.await
    );
    next.release().await.unwrap();
    first.abort();
}

/// Whoever may publish on the channel of a waiter is not its server.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_hand_off_grants_nothing() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    take(&lock(&two, "before", LONG)).await;
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", LONG));
    waiters(&server, "a", 1).await;
    let entry = server
        .cli(&["HVALS", "lockkit:lockkit#about:{lockkit:a}"])
        .unwrap();
    let parts: Vec<_> = entry.split(' ').collect();
    let (owner, channel) = (parts[2], parts[5]);
    for token in [
        "9000000000000000000",
        "18446744073709551615",
        "9007199254740992",
        "1",
    ] {
        let before = requests_executed(&server);
        let told = server.cli(&["PUBLISH", channel, &format!("{owner} 0:{token} lockkit:a")]);
        assert_eq!(told.unwrap(), "1");
        eventually("it asks", async || requests_executed(&server) > before).await;
        waiters(&server, "a", 1).await;
        assert!(!waiting.is_finished(), "{token}");
    }
    let next = held.token().get() + 1000;
    let told = server.cli(&["PUBLISH", channel, &format!("{owner} 0:{next} lockkit:b")]);
    assert_eq!(told.unwrap(), "1");
    held.release().await.unwrap();
    let granted = granted(AT_ONCE, "the real one", waiting).await;
    // The scripts count no further.
    assert!(granted.token().get() < 1 << 53, "{}", granted.token());
    granted.release().await.unwrap();
}
