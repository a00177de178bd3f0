//! Faults, and what follows from them.

use std::time::Duration;

use lockkit_conformance::stall::{Stopwatch, timeout};
use lockkit_core::{
    Error, LockClient, LossReason,
    spi::{self, Backend as _},
};
use lockkit_postgres::PostgresBackend;
use lockkit_testbed::{Clock, Mode, Proxy, eventually, postgres::PgServer};
use tokio::time::{Instant, sleep};

use crate::{
    child::Child,
    servers::{
        Waiter, brief, client, config, cycle, key, name, private, request, session, shared, tests, waits,
    },
};

tests! {
    a_saboteur_holds_without_a_lease
    a_killed_holder_is_followed_within_100_ms
    a_stopped_holder_is_followed_at_the_end_of_its_lease
    a_blackholed_holder_is_told_before_it_is_followed
    a_request_without_its_end_is_what_no_lease_ends
    a_silent_server_is_asked_whether_it_knows_its_client
    a_waiter_granted_in_the_dark_reports_no_success
    a_waiter_that_is_cut_off_waits_anew
    a_waiter_that_died_is_not_granted
    a_server_that_crashes_while_the_lock_is_held
    a_waiter_whose_server_goes_has_released_nothing
    a_server_that_is_shut_down_tells_its_holders
    a_server_that_stands_still_grants_nothing
    a_release_that_is_slow_is_no_loss
    replies_that_are_lost
    a_release_whose_reply_is_lost_frees_the_lock
    nobody_waits_for_a_dead_connection_to_acquire
    nothing_goes_on_connecting_to_a_silent_server
    connections_that_are_reset_again_and_again
    a_hold_whose_connection_breaks_is_told_at_once
    a_release_at_a_broken_connection_confirms_nothing
    two_primaries_grant_one_lock
    the_servers_clock_set_back_keeps_the_lease
    the_servers_clock_set_back_stops_no_waiter_for_a_permit
    the_servers_clock_set_back_keeps_a_dead_holders_lease
    the_servers_clock_set_forward_ends_no_lease
    the_servers_clock_set_forward_may_end_a_lease_early
    a_server_that_lets_nobody_in_is_no_taken_lock
}

/// A client through a proxy of its own.
async fn behind_a_proxy(server: &PgServer) -> (Proxy, LockClient) {
    let proxy = Proxy::start(server.addr()).unwrap();
    let client = client(proxy.addr()).await;
    (proxy, client)
}

/// The faults break a plain advisory lock: without a lease, nothing ends a silent holder.
async fn a_saboteur_holds_without_a_lease() {
    let server = private(&[]);
    let (proxy, dark) = behind_a_proxy(&server).await;
    let guard = brief(&dark, "a", Duration::from_millis(500))
        .acquire()
        .await
        .unwrap();
    // By hand, beside it.
    let mut plain = session(&server);
    plain
        .sql(&format!("SELECT pg_advisory_lock({})", key("b")))
        .unwrap();
    proxy.set(Mode::Blackhole);
    let other = client(server.addr()).await;
    Waiter::of(other.lock("a").unwrap())
        .granted()
        .await
        .0
        .release()
        .await
        .unwrap();
    assert!(
        other.lock("b").unwrap().try_acquire().await.unwrap().is_none(),
        "nobody tells the server"
    );
    assert!(!guard.is_held());
}

async fn a_killed_holder_is_followed_within_100_ms() {
    let server = shared();
    let (client, other) = (client(server.addr()).await, client(server.addr()).await);
    let name = name("killed");
    let (mut took, mut released) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        // The time of a grant on a busy machine.
        let guard = client.lock(&name).unwrap().acquire().await.unwrap();
        let waiter = Waiter::of(other.lock(&name).unwrap());
        waits(&client, &name).await;
        let release = Stopwatch::start();
        guard.release().await.unwrap();
        let (guard, _) = waiter.granted().await;
        released.push(release.elapsed());
        guard.release().await.unwrap();

        let mut child = Child::hold(server.addr(), &name, Duration::from_secs(30));
        let waiter = Waiter::of(client.lock(&name).unwrap());
        waits(&client, &name).await;
        let killed = Stopwatch::start();
        child.process.kill().unwrap();
        let (guard, _) = waiter.granted().await;
        took.push(killed.elapsed());
        assert!(guard.token().get() > child.token);
        guard.release().await.unwrap();
    }
    took.sort_unstable();
    released.sort_unstable();
    eprintln!("after kill -9 the next is granted in {took:?}, after a release in {released:?}");
    let bound = |of: usize| Duration::from_millis(100) + 3 * released[of];
    assert!(took[5] < bound(5) && took[9] < bound(9), "{took:?}, {released:?}");
}

async fn a_stopped_holder_is_followed_at_the_end_of_its_lease() {
    let server = shared();
    let client = client(server.addr()).await;
    let name = name("stopped");
    let ttl = Duration::from_secs(6);
    let mut child = Child::hold(server.addr(), &name, ttl);
    let lock = client.lock(&name).unwrap();
    child.process.stop().unwrap();
    let (stopped, running) = (Instant::now(), Stopwatch::start());
    let guard = lock.acquire().await.unwrap();
    let (took, ran) = (stopped.elapsed(), running.elapsed());
    // The latest renewal was a third of the lease before, and late on a busy machine.
    assert!(
        took > ttl / 3 && ran < ttl + Duration::from_secs(1),
        "{took:?}, {ran:?}"
    );
    assert!(guard.token().get() > child.token);
    child.process.resume().unwrap();
    sleep(Duration::from_millis(100)).await;
    guard.check().unwrap();
}

async fn a_blackholed_holder_is_told_before_it_is_followed() {
    let server = shared();
    let (proxy, dark) = behind_a_proxy(server).await;
    let other = client(server.addr()).await;
    let (name, ttl) = (name("blackholed"), Duration::from_secs(2));
    let guard = brief(&dark, &name, ttl).acquire().await.unwrap();
    let lost = guard.lost();
    let told = tokio::spawn(async move { (lost.await, Instant::now()) });
    let waiter = Waiter::of(other.lock(&name).unwrap());
    waits(&other, &name).await;
    let (began, running) = (Instant::now(), Stopwatch::start());
    proxy.set(Mode::Blackhole);
    let (granted, at) = waiter.granted().await;
    let ran = running.elapsed();
    let (reason, told) = told.await.unwrap();
    assert_eq!(reason, LossReason::Expired);
    assert!(told < at, "told {:?} after the next was granted", told - at);
    let took = at - began;
    assert!(
        took > ttl / 2 && ran < ttl + Duration::from_millis(700),
        "{took:?}, {ran:?}"
    );
    assert!(granted.token() > guard.token());
    proxy.set(Mode::Pass);
    assert!(guard.release().await.unwrap_err().is_lost());
    sleep(Duration::from_millis(200)).await;
    granted.check().unwrap();
    granted.release().await.unwrap();
    cycle(&dark, &name).await;
}

/// A session that has half a request is not idle. So each request is written with its end, in one piece.
async fn a_request_without_its_end_is_what_no_lease_ends() {
    let server = private(&[]);
    let proxy = Proxy::start(server.addr()).unwrap();
    let mut config = config(proxy.addr());
    config.sslmode = lockkit_postgres::SslMode::Disable;
    let backend = PostgresBackend::connect(config).await.unwrap();
    // It opens its session.
    let mut claim = backend.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
    claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    claim.release().await.unwrap();
    proxy.record();
    let before = proxy.counts().requests.chunks;
    let mut rounds = 0;
    for mode in [spi::Mode::Exclusive, spi::Mode::Shared] {
        let mut claim = backend.claim(&request("a", mode)).await.unwrap();
        claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
        claim.renew().await.unwrap();
        claim.renew().await.unwrap();
        claim.release().await.unwrap();
        rounds += 1;
    }
    let pieces = proxy.counts().requests.chunks - before;
    let sent = proxy.recording();
    // Letter, length, and nothing else. Each piece that the client wrote ends with one.
    let ends = sent.windows(5).filter(|part| part == b"S\0\0\0\x04").count();
    assert!(ends as u64 >= pieces, "{ends} ends in {pieces} pieces");
    assert!(rounds == 2 && pieces >= 8, "{pieces}");
}

/// The server grants to a session whose client does not get the reply.
/// A machine that was started anew, or has taken another's place, says so when the system asks it about a connection.
#[cfg(target_os = "linux")]
async fn a_silent_server_is_asked_whether_it_knows_its_client() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    let _guard = brief(&client, "a", Duration::from_secs(3_600))
        .acquire()
        .await
        .unwrap();
    // The local and the remote address, and the timer: 2 is that of a keepalive, in hundredths of a second.
    let port = format!(":{:04X}", server.addr().port());
    eventually("all connections have a timer", async || {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let to_server = table.lines().skip(1).filter_map(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            // 01 is an established connection.
            (fields[2].ends_with(&port) && fields[3] == "01").then(|| fields[5].to_owned())
        });
        let timers: Vec<_> = to_server.collect();
        timers.len() >= 2
            && timers.iter().all(|timer| {
                let due = timer
                    .strip_prefix("02:")
                    .and_then(|due| u32::from_str_radix(due, 16).ok());
                due.is_some_and(|due| due <= 500)
            })
    })
    .await;
}

#[cfg(not(target_os = "linux"))]
async fn a_silent_server_is_asked_whether_it_knows_its_client() {}

async fn a_waiter_granted_in_the_dark_reports_no_success() {
    let server = shared();
    let (proxy, dark) = behind_a_proxy(server).await;
    let other = client(server.addr()).await;
    let (name, ttl) = (name("dark"), Duration::from_secs(1));
    let holder = other.lock(&name).unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(brief(&dark, &name, ttl));
    waits(&other, &name).await;
    proxy.set(Mode::Blackhole);
    holder.release().await.unwrap();
    // The dark session has the lock now, until its lease is over.
    let began = Instant::now();
    let third = timeout(Duration::from_secs(5), other.lock(&name).unwrap().acquire())
        .await
        .unwrap()
        .unwrap();
    let took = began.elapsed();
    assert!(took > ttl / 2, "it was never granted in the dark: {took:?}");
    proxy.set(Mode::Pass);
    for _ in 0..20 {
        sleep(Duration::from_millis(50)).await;
        assert!(!waiter.is_finished(), "granted while another holds");
        third.check().unwrap();
    }
    let token = third.token();
    third.release().await.unwrap();
    let (late, _) = waiter.granted().await;
    assert!(late.token() > token && late.is_held());
    late.release().await.unwrap();
}

async fn a_waiter_that_is_cut_off_waits_anew() {
    let server = shared();
    let (proxy, cut) = behind_a_proxy(server).await;
    let other = client(server.addr()).await;
    let name = name("cut");
    let holder = other.lock(&name).unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(brief(&cut, &name, Duration::from_secs(30)));
    waits(&other, &name).await;
    // Its connections go silent for good; new ones pass.
    proxy.set(Mode::HalfOpen);
    proxy.set(Mode::Pass);
    let began = Instant::now();
    holder.release().await.unwrap();
    let (granted, _) = waiter.granted().await;
    eprintln!("cut off while waiting, granted after {:?}", began.elapsed());
    granted.check().unwrap();
    granted.release().await.unwrap();
    // Nor does its request in the queue keep anybody out.
    let next = timeout(Duration::from_secs(5), other.lock(&name).unwrap().acquire())
        .await
        .unwrap();
    next.unwrap().release().await.unwrap();
}

/// The server looks for its client while a statement waits.
async fn a_waiter_that_died_is_not_granted() {
    let server = shared();
    let client = client(server.addr()).await;
    let name = name("dead");
    let reads = client.lock(&name).unwrap().shared().acquire().await.unwrap();
    let (mut writer, _output) = Child::start(server.addr(), &name, Duration::from_secs(30));
    waits(&client, &name).await;
    let killed = Stopwatch::start();
    writer.kill().unwrap();
    let also = timeout(
        Duration::from_secs(20),
        client.lock(&name).unwrap().shared().acquire(),
    )
    .await
    .unwrap();
    let took = killed.elapsed();
    eprintln!("behind a waiter that died, a reader is let in after {took:?}");
    assert!(took < Duration::from_secs(4), "{took:?}");
    reads.check().unwrap();
    also.unwrap().release().await.unwrap();
}

async fn a_server_that_crashes_while_the_lock_is_held() {
    let server = private(&[]);
    let [holding, waiting, idle] = [
        client(server.addr()).await,
        client(server.addr()).await,
        client(server.addr()).await,
    ];
    let ttl = Duration::from_secs(40);
    cycle(&idle, "b").await;
    let mut last = 0;
    for round in 0..3 {
        let guard = brief(&holding, "a", ttl).acquire().await.unwrap();
        let waiter = Waiter::of(waiting.lock("a").unwrap());
        waits(&holding, "a").await;
        assert!(guard.token().get() > last);
        let began = Stopwatch::start();
        server.kill().unwrap();
        let reason = timeout(Duration::from_mins(1), guard.lost()).await.unwrap();
        assert_eq!(
            reason,
            LossReason::Disconnected,
            "round {round}: {:?}",
            began.elapsed()
        );
        server.start().unwrap();
        assert!(guard.release().await.unwrap_err().is_lost());
        last = waiter.granted().await.0.token().get();
        let guard = idle.lock("b").unwrap().try_acquire().await.unwrap();
        guard
            .expect("an idle client has its connections replaced")
            .release()
            .await
            .unwrap();
    }
}

/// The rest of its wait is ended by its next attempt, which fails.
async fn a_waiter_whose_server_goes_has_released_nothing() {
    let server = private(&[]);
    let (holding, waiting) = (client(server.addr()).await, client(server.addr()).await);
    let guard = brief(&holding, "a", Duration::from_secs(40))
        .acquire()
        .await
        .unwrap();
    let lock = waiting.lock("a").unwrap();
    let waiter = tokio::spawn(async move { lock.acquire_timeout(Duration::from_secs(4)).await });
    waits(&holding, "a").await;
    server.kill().unwrap();
    let error = waiter.await.unwrap().unwrap_err();
    let text = spi::chain(&error);
    assert!(!text.contains("release"), "{text}");
    drop(guard);
}

async fn a_server_that_is_shut_down_tells_its_holders() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    let guard = brief(&client, "a", Duration::from_secs(40))
        .acquire()
        .await
        .unwrap();
    let began = Stopwatch::start();
    server.stop().unwrap();
    let reason = timeout(Duration::from_mins(1), guard.lost()).await.unwrap();
    eprintln!("a shutdown is told after {:?}", began.elapsed());
    assert!(
        matches!(reason, LossReason::Disconnected | LossReason::Revoked),
        "{reason:?}"
    );
    server.start().unwrap();
    assert!(guard.release().await.unwrap_err().is_lost());
    cycle(&client, "a").await;
}

async fn a_server_that_stands_still_grants_nothing() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    let guard = brief(&client, "a", Duration::from_secs(1))
        .acquire()
        .await
        .unwrap();
    server.pause().unwrap();
    let lock = brief(&client, "b", Duration::from_secs(1));
    let (tried, waited, reason) = tokio::join!(
        lock.try_acquire(),
        lock.acquire_timeout(Duration::from_millis(300)),
        timeout(Duration::from_secs(2), guard.lost())
    );
    assert!(tried.as_ref().is_err_and(Error::is_transient), "{tried:?}");
    assert!(waited.as_ref().is_err_and(Error::is_transient), "{waited:?}");
    assert_eq!(reason.unwrap(), LossReason::Expired);
    server.resume().unwrap();
    let again = timeout(Duration::from_secs(20), lock.acquire())
        .await
        .unwrap()
        .unwrap();
    again.release().await.unwrap();
    let next = timeout(Duration::from_secs(20), client.lock("a").unwrap().acquire())
        .await
        .unwrap()
        .unwrap();
    assert!(next.token() > guard.token());
}

/// It has the time that its caller gives it. The server is busy, and not gone.
async fn a_release_that_is_slow_is_no_loss() {
    let server = shared();
    let (proxy, slow) = behind_a_proxy(server).await;
    let name = name("slow");
    let lock = slow.lock(&name).unwrap();
    let guard = lock.acquire().await.unwrap();
    // Nothing else is under way, as the request that shows the hold, some milliseconds after the grant.
    let other = client(server.addr()).await;
    eventually("it is shown", async || {
        let shown = other.inspect(&name).await.unwrap();
        shown.holders.iter().any(|holder| holder.token == guard.token())
    })
    .await;
    proxy.set(Mode::Blackhole);
    let (released, ()) = tokio::join!(guard.release(), async {
        sleep(Duration::from_millis(1_500)).await;
        proxy.set(Mode::Pass);
    });
    released.unwrap();
    assert!(other.inspect(&name).await.unwrap().is_free());
}

async fn replies_that_are_lost() {
    let server = shared();
    let (proxy, deaf) = behind_a_proxy(server).await;
    let other = client(server.addr()).await;
    let name = name("lost");
    cycle(&deaf, &name).await;
    proxy.set(Mode::DropReplies);
    let lock = brief(&deaf, &name, Duration::from_secs(1));
    let error = lock.try_acquire().await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    proxy.set(Mode::Pass);
    // What the server granted it is given back, by its session's end or its lease.
    let granted = timeout(Duration::from_secs(10), other.lock(&name).unwrap().acquire())
        .await
        .unwrap()
        .unwrap();
    granted.release().await.unwrap();
    timeout(Duration::from_secs(10), lock.acquire())
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
}

async fn a_release_whose_reply_is_lost_frees_the_lock() {
    let server = shared();
    let (proxy, deaf) = behind_a_proxy(server).await;
    let other = client(server.addr()).await;
    let name = name("unheard");
    let guard = brief(&deaf, &name, Duration::from_secs(30))
        .acquire()
        .await
        .unwrap();
    proxy.set(Mode::DropReplies);
    let released = guard.release();
    let next = async {
        let next = other.lock(&name).unwrap().acquire().await.unwrap();
        proxy.set(Mode::Pass);
        next
    };
    let (_, next) = timeout(
        Duration::from_secs(10),
        futures_util::future::join(released, next),
    )
    .await
    .unwrap();
    next.release().await.unwrap();
    cycle(&deaf, &name).await;
}

async fn nobody_waits_for_a_dead_connection_to_acquire() {
    let server = shared();
    let (proxy, client) = behind_a_proxy(server).await;
    let name = name("idle");
    cycle(&client, &name).await;
    // The idle session and the control connection are dead, and nobody knows.
    proxy.set(Mode::HalfOpen);
    proxy.set(Mode::Pass);
    let began = Stopwatch::start();
    let lock = client.lock(&name).unwrap();
    let guard = timeout(Duration::from_secs(15), lock.acquire())
        .await
        .unwrap()
        .unwrap();
    eprintln!("over dead connections, granted after {:?}", began.elapsed());
    guard.release().await.unwrap();
}

/// A look that its caller gives up takes its task along.
async fn nothing_goes_on_connecting_to_a_silent_server() {
    let (proxy, client) = behind_a_proxy(shared()).await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    client.inspect("silent").await.unwrap();
    proxy.set(Mode::HalfOpen);
    for _ in 0..5 {
        let look = client.inspect("silent");
        let seen = tokio::time::timeout(Duration::from_millis(200), look).await;
        assert!(!matches!(seen, Ok(Ok(_))), "nobody replies");
    }
    client.close(Duration::from_secs(5)).await.unwrap();
    drop(client);
    eventually("no task is left", async || tasks() == 0).await;
}

async fn connections_that_are_reset_again_and_again() {
    let server = shared();
    let (proxy, unlucky) = behind_a_proxy(server).await;
    let name = name("reset");
    let lock = brief(&unlucky, &name, Duration::from_secs(2));
    let worker = tokio::spawn(async move {
        let mut last = None;
        for _ in 0..30 {
            let guard = loop {
                if let Ok(guard) = lock.acquire_timeout(Duration::from_secs(5)).await {
                    break guard;
                }
                // A runtime that ends waits for a task that never rests, for ever.
                tokio::task::yield_now().await;
            };
            assert!(Some(guard.token()) > last);
            last = Some(guard.token());
            sleep(Duration::from_millis(2)).await;
            let _ = guard.release().await;
        }
    });
    // More and more rarely, so that a busy machine gets as far as to connect in between.
    let (began, mut pause) = (Instant::now(), Duration::from_millis(30));
    while !worker.is_finished() {
        assert!(began.elapsed() < Duration::from_mins(1), "it gets nowhere");
        sleep(pause).await;
        proxy.reset();
        pause += pause / 50;
    }
    worker.await.unwrap();
}

/// A reset frees the lock at the server at once, so another client may hold it before its holder knows.
async fn a_hold_whose_connection_breaks_is_told_at_once() {
    let server = shared();
    let (proxy, unlucky) = behind_a_proxy(server).await;
    let other = client(server.addr()).await;
    let mut took = Vec::new();
    for _ in 0..10 {
        let name = name("broken");
        let guard = brief(&unlucky, &name, Duration::from_secs(30))
            .acquire()
            .await
            .unwrap();
        let waiter = Waiter::of(other.lock(&name).unwrap());
        waits(&other, &name).await;
        let began = Stopwatch::start();
        proxy.reset();
        let reason = timeout(Duration::from_mins(1), guard.lost()).await.unwrap();
        took.push(began.elapsed());
        assert_eq!(reason, LossReason::Disconnected);
        let (granted, _) = waiter.granted().await;
        assert!(granted.token() > guard.token());
        granted.release().await.unwrap();
    }
    took.sort_unstable();
    eprintln!("a holder whose connection breaks is told after {took:?}");
    assert!(took[5] < Duration::from_millis(100), "{took:?}");
}

/// A primary that is cut off and not fenced goes on, beside the one that was promoted.
/// It is a loss, and an error while nobody can say so.
async fn a_release_at_a_broken_connection_confirms_nothing() {
    let server = private(&[]);
    let proxy = Proxy::start(server.addr()).unwrap();
    let backend = PostgresBackend::connect(config(proxy.addr())).await.unwrap();
    for refuses in [false, true] {
        let mut claim = backend.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
        assert!(claim.attempt(Duration::ZERO).await.unwrap().is_some());
        if refuses {
            proxy.set(Mode::Refuse);
        }
        proxy.reset();
        if refuses {
            for _ in 0..2 {
                let released = claim.release().await;
                assert!(
                    released.as_ref().is_err_and(Error::is_transient),
                    "it cannot be reached: {released:?}"
                );
            }
            proxy.set(Mode::Pass);
        }
        let released = claim.release().await;
        assert!(
            released.as_ref().is_err_and(Error::is_lost),
            "refuses: {refuses}; {released:?}"
        );
    }
}

async fn two_primaries_grant_one_lock() {
    let old = private(&[]);
    let before = client(old.addr()).await;
    let standby = PgServer::builder().standby_of(&old).unwrap();
    standby.wait_caught_up(&old).unwrap();
    let guard = before.lock("a").unwrap().acquire().await.unwrap();
    standby.promote().unwrap();
    let after = client(standby.addr()).await;
    let second = after
        .lock("a")
        .unwrap()
        .try_acquire()
        .await
        .unwrap()
        .expect("it knows nothing of the first");
    guard.check().unwrap();
    assert!(second.token() > guard.token(), "the resource can tell them apart");
}

async fn the_servers_clock_set_back_keeps_the_lease() {
    let clock = Clock::new().unwrap();
    let server = PgServer::builder().clock(&clock).start().unwrap();
    let client = client(server.addr()).await;
    let guard = brief(&client, "a", Duration::from_secs(5))
        .acquire()
        .await
        .unwrap();
    clock.back(Duration::from_secs(3_600)).unwrap();
    sleep(Duration::from_secs(12)).await;
    guard.check().unwrap();
    guard.release().await.unwrap();
    cycle(&client, "a").await;
}

/// The head of the queue has nothing at the server that ends by that clock.
async fn the_servers_clock_set_back_stops_no_waiter_for_a_permit() {
    let clock = Clock::new().unwrap();
    let server = PgServer::builder().clock(&clock).start().unwrap();
    let (first, second) = (client(server.addr()).await, client(server.addr()).await);
    let held = first.semaphore("s", 1).unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(second.semaphore("s", 1).unwrap());
    eventually("it is the head", async || {
        let state = first.inspect_semaphore("s").await.unwrap();
        state.waiters == Some(1)
    })
    .await;
    clock.back(Duration::from_secs(3_600)).unwrap();
    held.release().await.unwrap();
    let (guard, _) = waiter.granted().await;
    guard.release().await.unwrap();
}

/// The server counts the silence of a session by its wall clock.
async fn the_servers_clock_set_back_keeps_a_dead_holders_lease() {
    const BACK: Duration = Duration::from_secs(4);

    let clock = Clock::new().unwrap();
    let server = PgServer::builder().clock(&clock).start().unwrap();
    let (proxy, dark) = behind_a_proxy(&server).await;
    let other = client(server.addr()).await;
    let guard = brief(&dark, "a", Duration::from_secs(1)).acquire().await.unwrap();
    let waiter = Waiter::of(other.lock("a").unwrap());
    waits(&other, "a").await;
    proxy.set(Mode::Blackhole);
    let since = Instant::now();
    clock.back(BACK).unwrap();
    let (next, at) = waiter.granted().await;
    assert!(at - since > BACK, "kept for {:?}", at - since);
    assert!(!guard.is_held(), "the holder's own lease goes by its own clock");
    next.release().await.unwrap();
}

/// The server's timer is set anew with each request of a new session.
async fn the_servers_clock_set_forward_ends_no_lease() {
    let clock = Clock::new().unwrap();
    let server = PgServer::builder().clock(&clock).start().unwrap();
    let client = client(server.addr()).await;
    let guard = brief(&client, "a", Duration::from_secs(5))
        .acquire()
        .await
        .unwrap();
    clock.forward(Duration::from_secs(3_600)).unwrap();
    sleep(Duration::from_secs(12)).await;
    guard.check().unwrap();
    guard.release().await.unwrap();
}

/// The server leaves the timer of an earlier idle time running. When it comes, the new clock says that the present one is over as well.
async fn the_servers_clock_set_forward_may_end_a_lease_early() {
    const TTL: Duration = Duration::from_secs(4);

    let clock = Clock::new().unwrap();
    let server = PgServer::builder().clock(&clock).start().unwrap();
    let (proxy, dark) = behind_a_proxy(&server).await;
    let other = client(server.addr()).await;
    let lock = brief(&dark, "a", TTL);
    lock.acquire().await.unwrap().release().await.unwrap();
    sleep(TTL * 3 / 4).await;
    // In the same session.
    let guard = lock.acquire().await.unwrap();
    let waiter = Waiter::of(other.lock("a").unwrap());
    waits(&other, "a").await;
    proxy.set(Mode::Blackhole);
    clock.forward(Duration::from_secs(3_600)).unwrap();
    let (next, _) = waiter.granted().await;
    guard
        .check()
        .expect("the holder hears nothing, and its lease goes on");
    assert!(next.token() > guard.token(), "the resource can tell them apart");
}

/// A server that starts, stops or recovers.
async fn a_server_that_lets_nobody_in_is_no_taken_lock() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    server.stop().unwrap();
    let error = client.lock("a").unwrap().try_acquire().await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    let lock = client.lock("a").unwrap();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    server.start().unwrap();
    let guard = timeout(Duration::from_secs(20), waiting)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    guard.release().await.unwrap();
    eventually("it is free", async || {
        client.inspect("a").await.unwrap().is_free()
    })
    .await;
}
