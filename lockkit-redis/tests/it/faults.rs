//! The server crashes, stops and comes back; replies are lost, connections break, hang and are cut. After each of
//! these there was no overlap, waiters are granted within a bound, tokens rise, and the holder has been told.

use std::time::{Duration, Instant};

use lockkit_conformance::{Traces, stall::Stopwatch};
use lockkit_core::{AcquireOptions, LockGuard, LossReason};
use lockkit_testbed::{
    Mode, Proxy, eventually,
    redis::{Fsync, RedisServer},
};

use crate::common::{
    Alone, LONG, MS, RECOVERED, SECOND, client, client_behind_proxy, granted, heartbeats, lock, no_server,
    nothing_is_left, renewed, requests_executed, subscribers, until, url_of, waiter, waiters, within,
};

#[tokio::test]
async fn a_server_killed_with_its_data_keeps_holds_and_queue() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder().append_only(Fsync::Always).start().unwrap();
    let idle = client(server.url()).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(client(server.url()).await);
    }
    let mut tokens = Vec::new();
    let mut held = lock(&clients[0], "a", LONG).acquire().await.unwrap();
    for round in 1..=3 {
        // The one after the holder, and the one after that.
        let next = waiter(&lock(&clients[round % 3], "a", LONG));
        waiters(&server, "a", 1).await;
        let last = waiter(&lock(&clients[(round + 1) % 3], "a", LONG));
        waiters(&server, "a", 2).await;
        // A client whose waiter has just come has sent no heartbeat yet.
        if round > 1 {
            heartbeats(&server, 2).await;
        }

        server.kill().unwrap();
        server.start().unwrap();

        until(RECOVERED, "held after the crash", async || {
            assert!(held.is_held());
            held.renew().await.is_ok()
        })
        .await;
        waiters(&server, "a", 2).await;
        assert!(
            !next.is_finished() && !last.is_finished(),
            "PROMISE BROKEN: an overlap"
        );
        let other = granted(RECOVERED, "another lock", waiter(&lock(&idle, "b", SECOND))).await;
        assert!(other.token() > held.token());
        other.release().await.unwrap();
        tokens.push(held.token());
        release(held).await;
        let next = granted(RECOVERED, "the first in the queue", next).await;
        assert!(!last.is_finished(), "PROMISE BROKEN: an overlap");
        tokens.push(next.token());
        release(next).await;
        let last = granted(RECOVERED, "the second in the queue", last).await;
        tokens.push(last.token());
        release(last).await;
        held = lock(&clients[round % 3], "a", LONG).acquire().await.unwrap();
    }
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    release(held).await;
    nothing_is_left(&server, "after crashes").await;
}

#[tokio::test]
async fn a_crash_during_attempts_grants_each_lock_once() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder().append_only(Fsync::Always).start().unwrap();
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(client(server.url()).await);
    }
    let inside = Alone::default();
    let mut tasks = Vec::new();
    for client in &clients {
        let (lock, inside) = (lock(client, "a", LONG), inside.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..150 {
                let guard = lock.acquire().await.unwrap();
                inside.enter(&guard).await;
                // Unconfirmed is not lost; it is tried again.
                if let Err(error) = guard.release().await {
                    assert!(error.is_transient() || error.is_lost(), "{error}");
                }
            }
        }));
    }
    for n in 1..=3 {
        eventually("some grants", async || inside.entered() > n * 100).await;
        server.kill().unwrap();
        server.start().unwrap();
    }
    for task in tasks {
        within(LONG, "they go on", task).await.unwrap();
    }
    nothing_is_left(&server, "after crashes").await;
}

#[tokio::test]
async fn a_server_restarted_empty_tells_holder_and_grants_waiter() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&other, "a", LONG));
    waiters(&server, "a", 1).await;
    server.restart_empty().unwrap();
    // Long before its lease is over: it asks as soon as it is connected again.
    let reason = within(RECOVERED, "told", held.lost()).await;
    assert_eq!(reason, LossReason::Revoked);
    let next = granted(RECOVERED, "the waiter", waiting).await;
    assert!(next.token() > held.token());
    assert!(held.release().await.unwrap_err().is_lost());
    next.release().await.unwrap();
    nothing_is_left(&server, "after the loss of all data").await;
}

#[tokio::test]
async fn a_server_stopped_for_less_than_a_lease_costs_nobody_a_hold() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&holder, "a", 10 * SECOND).acquire().await.unwrap();
    let waiting = waiter(&lock(&other, "a", 10 * SECOND));
    waiters(&server, "a", 1).await;
    server.pause().unwrap();
    tokio::time::sleep(5 * SECOND).await;
    assert!(held.is_held());
    server.resume().unwrap();
    renewed(&held).await;
    assert!(!waiting.is_finished(), "PROMISE BROKEN: an overlap");
    let token = held.token();
    release(held).await;
    let next = granted(RECOVERED, "the waiter", waiting).await;
    assert!(next.token() > token);
    release(next).await;
    nothing_is_left(&server, "after a stop").await;
}

#[tokio::test]
async fn a_server_stopped_past_a_lease_has_its_holder_told_first() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, other) = (client(server.url()).await, client(server.url()).await);
    let held = lock(&holder, "a", 2 * SECOND).acquire().await.unwrap();
    let waiting = waiter(&lock(&other, "a", 2 * SECOND));
    waiters(&server, "a", 1).await;
    server.pause().unwrap();
    let reason = within(3 * SECOND, "told by its own clock", held.lost()).await;
    assert_eq!(reason, LossReason::Expired);
    assert!(!waiting.is_finished(), "nobody grants");
    server.resume().unwrap();
    let next = granted(RECOVERED, "the waiter", waiting).await;
    assert!(next.token() > held.token());
    assert!(held.release().await.unwrap_err().is_lost());
    assert!(next.is_held());
    next.release().await.unwrap();
    nothing_is_left(&server, "after a stop").await;
}

/// The client may just be connecting. A request without a reply is repeated.
async fn release(guard: LockGuard) {
    if let Err(error) = guard.release().await {
        assert!(error.is_transient() && !error.is_lost(), "{error}");
    }
}

/// Its first renewal says its token, a few milliseconds after the grant. If that fails, it has time.
#[tokio::test]
async fn a_young_hold_that_is_cut_off_is_not_renewed_in_a_burst() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let traces = Traces::default();
    let _recording = tracing::subscriber::set_default(traces.clone());
    let held = lock(&client, "a", 10 * SECOND).acquire().await.unwrap();
    proxy.set(Mode::Refuse);
    proxy.reset();
    let cut_off = Instant::now();
    until(LONG, "tried again", async || {
        traces.text().matches("renewal failed").count() >= 3
    })
    .await;
    let tried = cut_off.elapsed();
    assert!(tried > SECOND, "three renewals have failed within {tried:?}");
    proxy.set(Mode::Pass);
    until(LONG, "connected again", async || held.renew().await.is_ok()).await;
    held.release().await.unwrap();
    nothing_is_left(&server, "after a cut").await;
}

/// A request that the server executed and whose reply was lost is the same request when it comes again.
#[tokio::test]
async fn a_lost_reply_to_an_acquisition_grants_once() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    for handoffs in [0, 9] {
        proxy.set(Mode::DropReplies);
        let options = AcquireOptions::new().local_handoffs(handoffs);
        let waiting = waiter(&client.lock("a").unwrap().with_options(options));
        eventually("executed", async || {
            server.cli(&["EXISTS", "lockkit:a"]).unwrap() == "1"
        })
        .await;
        let owner = || {
            server
                .cli(&["GET", "lockkit:a"])
                .unwrap()
                .split(' ')
                .next()
                .map(str::to_owned)
        };
        let (owned_by, counter) = (owner(), counter(&server));
        assert!(!waiting.is_finished());
        proxy.set(Mode::Pass);
        let guard = granted(RECOVERED, "the grant of before", waiting).await;
        assert_eq!(owner(), owned_by);
        assert!(guard.token().get() > counter - u64::from(handoffs) - 1);
        assert!(guard.token().get() <= counter);
        assert_eq!(self::counter(&server), counter, "asked again, it drew others");
        guard.release().await.unwrap();
        nothing_is_left(&server, "after a lost reply").await;
    }
}

fn counter(server: &RedisServer) -> u64 {
    server
        .cli(&["GET", "lockkit:lockkit#fence"])
        .unwrap()
        .parse()
        .unwrap()
}

/// Given up before the reply was known to be lost: what it took is given back.
#[tokio::test]
async fn a_lost_reply_to_an_abandoned_attempt_leaves_no_hold() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let lock = lock(&client, "a", LONG);
    proxy.set(Mode::DropReplies);
    let error = lock.acquire_timeout(300 * MS).await.unwrap_err();
    assert!(error.is_transient(), "no answer is not `taken`: {error}");
    let cancelled = tokio::time::timeout(100 * MS, lock.acquire()).await;
    assert!(cancelled.is_err());
    let cancelled = tokio::time::timeout(100 * MS, lock.try_acquire()).await;
    assert!(cancelled.is_err());
    proxy.set(Mode::Pass);
    within(
        RECOVERED,
        "given back",
        nothing_is_left(&server, "after lost replies"),
    )
    .await;
    release(granted(RECOVERED, "free", waiter(&lock)).await).await;
}

#[tokio::test]
async fn a_lost_reply_to_a_renewal_costs_nothing() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let held = lock(&client, "a", 6 * SECOND).acquire().await.unwrap();
    for _ in 0..2 {
        let counts = proxy.counts();
        proxy.set(Mode::DropReplies);
        eventually("a lost reply to a renewal", async || {
            proxy.counts().lost.chunks > counts.lost.chunks
        })
        .await;
        proxy.set(Mode::Pass);
        within(RECOVERED, "renewed", renewed(&held)).await;
        held.check().unwrap();
    }
    held.release().await.unwrap();
}

#[tokio::test]
async fn a_shorter_ttl_without_a_reply_counts_here_first() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let other = lock(&self::client(server.url()).await, "a", LONG);
    let unrenewed = AcquireOptions::new().ttl(LONG).op_timeout(SECOND).renew(false);
    let held = client.lock("a").unwrap().acquire_with(&unrenewed).await.unwrap();
    proxy.set(Mode::DropReplies);
    let error = held.set_ttl(2 * SECOND).await.unwrap_err();
    assert!(error.is_transient() || error.is_lost(), "{error}");
    // Nothing renews it, and the server counts two seconds.
    until(RECOVERED, "the next is granted", async || {
        let granted = other.try_acquire().await.unwrap();
        assert!(granted.is_none() || !held.is_held(), "PROMISE BROKEN: an overlap");
        granted.is_some()
    })
    .await;
    assert_eq!(held.lost().await, LossReason::Expired);
}

#[tokio::test]
async fn a_waiter_is_told_of_a_shorter_lease() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let other = self::client(server.url()).await;
    for shared in [false, true] {
        let name = if shared { "shared" } else { "exclusive" };
        let mine = client.lock(name).unwrap();
        let mine = if shared { mine.shared() } else { mine };
        let unrenewed = AcquireOptions::new().ttl(LONG).renew(false);
        let held = mine.acquire_with(&unrenewed).await.unwrap();
        let next = waiter(&lock(&other, name, LONG));
        waiters(&server, name, 1).await;
        held.set_ttl(2 * SECOND).await.unwrap();
        // Its client cannot release it.
        proxy.set(Mode::Blackhole);
        let next = granted(RECOVERED, "the lock of one who is cut off", next).await;
        assert!(!held.is_held());
        next.release().await.unwrap();
        proxy.set(Mode::Pass);
        until(RECOVERED, "connected again", async || {
            client.inspect("b").await.is_ok()
        })
        .await;
    }
}

#[tokio::test]
async fn a_release_with_a_lost_reply_is_unknown_and_frees_the_lock() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let other = self::client(server.url()).await;
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    let token = held.token();
    let waiting = waiter(&lock(&other, "a", LONG));
    waiters(&server, "a", 1).await;
    proxy.set(Mode::DropReplies);
    let releasing = tokio::spawn(held.release());
    let next = granted(RECOVERED, "the next, at once", waiting).await;
    assert!(next.token() > token);
    eventually("the reply is lost", async || proxy.counts().lost.chunks > 0).await;
    let before = requests_executed(&server);
    proxy.set(Mode::Pass);
    let error = within(RECOVERED, "an answer", releasing)
        .await
        .unwrap()
        .unwrap_err();
    assert!(error.is_transient() && !error.is_lost(), "{error}");
    // The release is repeated, and takes nothing from the present holder.
    eventually("tried again", async || requests_executed(&server) > before).await;
    next.renew().await.unwrap();
    next.release().await.unwrap();
    nothing_is_left(&server, "after a lost reply").await;
}

/// The peer is gone and nothing says so: neither the holder nor the waiter loses what it has, since the connection is
/// found out and replaced in time.
#[tokio::test]
async fn a_half_open_connection_is_replaced_before_a_lease_runs_out() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, cut) = client_behind_proxy(&server).await;
    let (other, other_cut) = client_behind_proxy(&server).await;
    // One whose first renewal, which tells the token, has been answered, and one whose renewals all go into the void.
    let ttl = 12 * SECOND;
    let held = lock(&holder, "a", ttl).acquire().await.unwrap();
    renewed(&held).await;
    let waiting = waiter(&lock(&other, "a", ttl));
    waiters(&server, "a", 1).await;
    let young = lock(&holder, "b", ttl).acquire().await.unwrap();
    for proxy in [&cut, &other_cut] {
        proxy.set(Mode::HalfOpen);
        proxy.set(Mode::Pass);
    }
    // The next one goes into the void, when a third of the lease is over.
    let before = held.valid_until();
    until(
        ttl / 3 + 6 * SECOND,
        "renewed over a new connection",
        async || {
            held.check().expect("held while the server can be reached");
            held.valid_until() > before
        },
    )
    .await;
    young.renew().await.expect("held while the server can be reached");
    young.release().await.unwrap();
    assert!(!waiting.is_finished(), "PROMISE BROKEN: an overlap");
    let token = held.token();
    held.release().await.unwrap();
    let next = granted(RECOVERED, "the waiter", waiting).await;
    assert!(next.token() > token);
    next.release().await.unwrap();
    nothing_is_left(&server, "after half-open connections").await;
}

#[tokio::test]
async fn a_storm_of_resets_costs_nobody_a_hold_or_a_place() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let other = self::client(server.url()).await;
    let held = lock(&client, "a", 9 * SECOND).acquire().await.unwrap();
    let theirs = lock(&other, "b", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&client, "b", LONG));
    waiters(&server, "b", 1).await;
    let calm = self::client(server.url()).await;
    let behind = waiter(&lock(&calm, "b", LONG));
    waiters(&server, "b", 2).await;
    let before = proxy.counts().connections;
    let storm = Instant::now();
    let began = held.valid_until();
    // It is renewed in the midst of it, which is due after three seconds.
    while storm.elapsed() < 4 * SECOND || held.valid_until() == began {
        proxy.reset();
        tokio::time::sleep(40 * MS).await;
        held.check().expect("held throughout");
        assert!(!waiting.is_finished(), "PROMISE BROKEN: an overlap");
        // On a busy machine it takes longer to connect than from one reset to the next.
        let soon = tokio::time::Instant::now() + 5 * SECOND;
        if held.valid_until().is_some_and(|end| end < soon) {
            renewed(&held).await;
        }
    }
    let resets = proxy.counts().connections - before;
    assert!(resets > 10, "no storm: {resets} connections");
    eventually("connected again", async || subscribers(&server) == 3).await;
    theirs.release().await.unwrap();
    let next = granted(RECOVERED, "the waiter", waiting).await;
    assert!(!behind.is_finished(), "its place was lost");
    next.release().await.unwrap();
    let last = granted(RECOVERED, "the one behind it", behind).await;
    last.release().await.unwrap();
    held.release().await.unwrap();
    nothing_is_left(&server, "after a storm").await;
}

/// Cut off for longer than the lease: the holder knows before anyone else is granted, and what it had sent and only
/// arrives afterwards brings nothing back.
#[tokio::test]
async fn a_client_cut_off_is_told_before_another_is_granted() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let other = self::client(server.url()).await;
    let held = lock(&client, "a", 3 * SECOND).acquire().await.unwrap();
    let waiting = waiter(&lock(&other, "a", LONG));
    waiters(&server, "a", 1).await;
    proxy.set(Mode::Blackhole);
    let lost = tokio::spawn({
        let lost = held.lost();
        async move { (lost.await, tokio::time::Instant::now()) }
    });
    let next = granted(LONG, "the waiter, when the lease is over", waiting).await;
    let at = tokio::time::Instant::now();
    let (reason, told) = within(SECOND, "told", lost).await.unwrap();
    assert_eq!(reason, LossReason::Expired);
    assert!(told < at, "told {:?} after the next was granted", told - at);
    assert!(next.token() > held.token());
    proxy.set(Mode::Pass);
    let ours = waiter(&lock(&client, "b", SECOND));
    let ours = granted(RECOVERED, "connected again", ours).await;
    ours.release().await.unwrap();
    next.renew().await.expect("the other's hold is untouched");
    assert!(held.release().await.unwrap_err().is_lost());
    next.release().await.unwrap();
    nothing_is_left(&server, "after a blackhole").await;
}

/// A request that the network holds up until its client has given up on that connection never takes effect: the new
/// connection has the server end the old one.
#[tokio::test]
async fn a_late_request_on_a_replaced_connection_has_no_effect() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    // The first connection goes a long way, those after it go straight.
    let far = Proxy::start(server.addr()).unwrap();
    let near = Proxy::start(far.addr()).unwrap();
    let client = client(&url_of(&near)).await;
    near.set_upstream(server.addr());
    far.set(Mode::Blackhole);
    let lock = lock(&client, "a", LONG);
    let error = lock.acquire_timeout(300 * MS).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    let monitor = server.monitor().unwrap();
    until(RECOVERED, "connected again", async || {
        near.counts().connections >= 2 && client.inspect("a").await.is_ok()
    })
    .await;
    far.set(Mode::Pass);
    // There is no event to wait for. If the request ever arrives, it has arrived by then.
    tokio::time::sleep(500 * MS).await;
    let mut lines = monitor.lines().unwrap();
    lines.retain(|line| !line.contains("\"LOAD\""));
    let ghost = lines.iter().any(|line| line.contains("\"SET\" \"lockkit:a\""));
    assert!(!ghost, "it took effect: {lines:#?}");
    nothing_is_left(&server, "after a late request").await;
}

/// The server refuses to end the old connection. What is late there may shorten a lease, but none that is relied on.
#[tokio::test]
async fn a_late_renewal_shortens_no_lease_that_is_relied_on() {
    const SHORT: Duration = Duration::from_secs(6);

    if no_server() {
        return;
    }
    let rules = "~* &* +@all -client|kill";
    let server = RedisServer::builder()
        .user("bound", "open-sesame", rules)
        .start()
        .unwrap();
    let observer = self::client(server.url()).await;
    // The first connection goes a long way, those after it go straight.
    let far = Proxy::start(server.addr()).unwrap();
    let near = Proxy::start(far.addr()).unwrap();
    let client = self::client(&format!("redis://bound:open-sesame@{}", near.addr())).await;
    near.set_upstream(server.addr());
    let options = AcquireOptions::new().ttl(LONG).op_timeout(300 * MS);
    let held = client.lock("a").unwrap().acquire_with(&options).await.unwrap();
    far.set(Mode::Blackhole);
    let error = held.set_ttl(SHORT).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    // What is asked for over the old connection would come behind the short one.
    until(RECOVERED, "connected again", async || {
        near.counts().connections >= 2 && client.inspect("a").await.is_ok()
    })
    .await;
    held.set_ttl(LONG).await.unwrap();
    let left_there = async || {
        let state = observer.inspect("a").await.unwrap();
        state.holders[0].left.unwrap()
    };
    assert!(left_there().await > 2 * SHORT, "the new connection has set it");
    far.set(Mode::Pass);
    until(RECOVERED, "the late one has come", async || {
        left_there().await <= SHORT
    })
    .await;
    let believed = held.valid_until().unwrap() - tokio::time::Instant::now();
    let left = left_there().await;
    assert!(
        believed <= left,
        "the holder counts on {believed:?}, and the server ends it in {left:?}"
    );
    held.release().await.unwrap();
}

/// The server refuses to end the old connection, and nothing on it has asked for less than the ttl.
#[tokio::test]
async fn a_least_time_is_no_ttl_that_was_asked_for() {
    const SHORT: Duration = Duration::from_secs(1);

    if no_server() {
        return;
    }
    let rules = "~* &* +@all -client|kill";
    let server = RedisServer::builder()
        .user("bound", "open-sesame", rules)
        .start()
        .unwrap();
    let far = Proxy::start(server.addr()).unwrap();
    let near = Proxy::start(far.addr()).unwrap();
    let client = self::client(&format!("redis://bound:open-sesame@{}", near.addr())).await;
    near.set_upstream(server.addr());
    let options = AcquireOptions::new().ttl(LONG).op_timeout(300 * MS);
    for (name, options) in [("a", options.clone().hold_at_least(SHORT)), ("b", options)] {
        let held = client.lock(name).unwrap().acquire_with(&options).await.unwrap();
        if name == "a" {
            far.set(Mode::Blackhole);
            let error = held.renew().await.unwrap_err();
            assert!(error.is_transient(), "{error}");
            until(RECOVERED, "connected again", async || {
                near.counts().connections >= 2 && client.inspect("a").await.is_ok()
            })
            .await;
        }
        held.renew().await.unwrap();
        let length = held.lease_length().unwrap();
        assert!(length > LONG / 2, "{options:?}: {length:?}");
        held.release_early().await.unwrap();
    }
    far.set(Mode::Pass);
}

/// A task hangs with its guard. The client asks for its hold as the connection broke, and is cut off after that.
#[tokio::test]
async fn a_question_after_max_hold_prolongs_nothing() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder().start().unwrap();
    let (ours, proxy) = client_behind_proxy(&server).await;
    let theirs = client(server.url()).await;
    let (ttl, max_hold) = (9 * SECOND, 9 * SECOND);
    let lock_of_ours = ours.lock("a").unwrap();
    let options = AcquireOptions::new().ttl(ttl).max_hold(max_hold);
    let held = lock_of_ours.with_options(options).acquire().await.unwrap();
    let granted_at = Instant::now();
    // This one is asked for with its whole ttl, and shows when.
    let unrenewed = AcquireOptions::new().ttl(LONG).renew(false);
    let unrenewed = ours.lock("b").unwrap().with_options(unrenewed);
    let unrenewed = unrenewed.acquire().await.unwrap();
    until(LONG, "past max_hold", async || granted_at.elapsed() > max_hold).await;
    let (ends, believed) = (clocks(&server, "a").1, held.valid_until());
    for breaks_after in [ttl / 4, ttl / 2] {
        until(LONG, "later", async || {
            granted_at.elapsed() > max_hold + breaks_after
        })
        .await;
        let before = pttl(&server, "b");
        proxy.reset();
        until(LONG, "asked for", async || pttl(&server, "b") > before).await;
        unrenewed.renew().await.unwrap();
        let now_ends = clocks(&server, "a").1;
        assert!(now_ends < ends + ttl / 4, "{now_ends:?} instead of {ends:?}");
    }
    proxy.set(Mode::Blackhole);
    let (before, now) = (believed.unwrap(), held.valid_until().unwrap());
    assert!(now + 250 * MS > before, "cut short by {:?}", before - now);
    let watch = Stopwatch::start();
    let next = lock(&theirs, "a", ttl).acquire().await.unwrap();
    assert!(!held.is_held(), "granted to another before it was told");
    let after = clocks(&server, "a").0;
    assert!(
        after < ends + ttl / 4 + watch.stood_still(),
        "granted {:?} after its end",
        after.saturating_sub(ends)
    );
    drop(next);
}

/// The server's time, and when it ends this hold, read at once: that does not depend on how long it takes to ask.
fn clocks(server: &RedisServer, name: &str) -> (Duration, Duration) {
    let script = "local now = redis.call('TIME'); now = now[1] * 1000 + math.floor(now[2] / 1000); \
                  return string.format('%.0f %.0f', now, now + redis.call('PTTL', KEYS[1]))";
    let answer = server
        .cli(&["EVAL", script, "1", &format!("lockkit:{name}")])
        .unwrap();
    let (now, end) = answer.trim().split_once(' ').unwrap();
    let parsed = |millis: &str| Duration::from_millis(millis.parse().unwrap());
    (parsed(now), parsed(end))
}

fn pttl(server: &RedisServer, name: &str) -> Duration {
    let key = format!("lockkit:{name}");
    Duration::from_millis(server.cli(&["PTTL", &key]).unwrap().parse().unwrap())
}
