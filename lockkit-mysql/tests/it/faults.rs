//! Faults, and what follows from them.

use std::time::Duration;

use futures_util::future::join_all;
use lockkit_conformance::stall::{Stopwatch, timeout};
use lockkit_core::{
    AcquireOptions, Error, Lock, LockClient, LockName, LossReason,
    spi::{self, Backend as _, ClaimRequest, OwnerId, Renewal, chain},
};
use lockkit_mysql::{Mode, MySqlBackend};
use lockkit_testbed::{
    Clock, Proxy, eventually,
    mysql::{Flavour, MySql},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    child::Child,
    servers::{
        ASLEEP, Admin, MODES, Waiter, client, config, cycle, for_each_flavour, hold_back, name, private,
        request, session_at, shared, waits,
    },
};

for_each_flavour! {
    the_tools_break_an_unprotected_hold
    a_killed_holder_is_followed_within_100_ms
    a_stopped_holder_is_followed_at_the_end_of_its_lease
    a_blackholed_holder_is_told_before_it_is_followed
    a_killed_writer_keeps_readers_out_for_half_a_minute
    a_writer_that_gives_up_keeps_no_readers_out
    a_waiter_granted_in_the_dark_reports_no_success
    a_waiter_that_is_cut_off_waits_anew
    a_dead_head_of_the_queue_keeps_a_lease_for_seconds_at_most
    a_server_that_crashes_while_the_lock_is_held
    a_waiter_whose_server_goes_has_released_nothing
    a_server_that_stands_still_grants_nothing
    replies_that_are_lost
    nobody_waits_for_a_dead_connection_to_acquire
    a_lease_does_not_wait_for_a_dead_connection
    a_try_without_a_reply_is_withdrawn_over_another_connection
    a_release_whose_reply_is_lost_is_no_loss
    a_release_that_is_asked_again_wakes_the_next_in_line
    a_release_that_comes_late_frees_no_later_hold
    a_renewal_that_comes_late_is_no_shorter_than_is_believed
    a_ttl_from_before_the_grant_counts_for_no_lease
    a_renewal_that_was_cut_off_is_no_shorter_than_is_believed
    a_release_that_is_cut_off_confirms_nothing
    a_release_that_ends_no_session_is_an_error
    a_release_that_was_refused_is_no_release_later
    an_attempt_that_comes_late_takes_nothing
    an_attempt_that_was_cut_off_takes_nothing
    an_attempt_of_the_dead_keeps_a_lease_for_a_ttl
    a_release_wakes_the_next_also_where_many_sleep
    connections_that_are_reset_again_and_again
    a_hold_whose_connections_break_is_told_at_once
    a_break_while_the_watch_is_begun_is_told_at_once
    another_runtime_that_ends_takes_no_connection_along
    a_backend_that_outlives_its_runtime_says_so
    a_runtime_that_ends_frees_no_row_that_is_believed
    the_servers_clock_does_not_move_a_row_lock
    the_servers_clock_moves_a_lease
    tokens_go_back_with_a_deleted_counter_and_the_clock
    two_primaries_grant_one_lock
    a_server_that_lost_its_data
    a_disconnect_watch_that_ended_is_restarted
    a_disconnect_watch_that_fell_silent_is_restarted
    a_dead_holder_is_followed_within_its_bound
    a_lease_whose_row_is_deleted_is_anothers
    a_wait_that_the_server_never_heard_of_is_not_taken
}

/// A client through a proxy of its own.
async fn behind_a_proxy(server: &MySql, mode: Mode) -> (Proxy, LockClient) {
    let proxy = Proxy::start(server.addr()).unwrap();
    let client = client(proxy.addr(), mode).await;
    (proxy, client)
}

fn brief(client: &LockClient, name: &str, ttl: Duration) -> Lock {
    let options = AcquireOptions::new().ttl(ttl).op_timeout(Duration::from_secs(1));
    client.lock(name).unwrap().with_options(options)
}

/// The faults break a plain row lock: without a lease, nothing ends a silent holder.
async fn the_tools_break_an_unprotected_hold(flavour: Flavour) {
    let server = private(flavour, &[]);
    let proxy = Proxy::start(server.addr()).unwrap();
    let mut admin = Admin::of(&server).await;
    admin
        .run("CREATE TABLE t (id INT PRIMARY KEY) ENGINE=InnoDB; INSERT INTO t VALUES (1)")
        .await;
    let lock = "START TRANSACTION; SELECT 1 FROM t WHERE id=1 FOR UPDATE";
    let free = "SELECT 1 FROM t WHERE id=1 FOR UPDATE SKIP LOCKED";
    let mut holder = Admin::login(proxy.addr(), "root", "").await.unwrap();
    holder.run(lock).await;
    proxy.set(lockkit_testbed::Mode::Blackhole);
    sleep(Duration::from_millis(1_500)).await;
    assert!(admin.run(free).await.is_empty(), "nobody tells the server");
    proxy.reset();
    eventually("a reset does", async || !admin.run(free).await.is_empty()).await;
    proxy.set(lockkit_testbed::Mode::Pass);
    let mut holder = Admin::login(proxy.addr(), "root", "").await.unwrap();
    holder.run(lock).await;
    proxy.set(lockkit_testbed::Mode::HalfOpen);
    eventually("so does a connection that is cut", async || {
        !admin.run(free).await.is_empty()
    })
    .await;
}

async fn a_killed_holder_is_followed_within_100_ms(flavour: Flavour) {
    let server = shared(flavour);
    let (client, other) = (
        client(server.addr(), Mode::ForUpdate).await,
        client(server.addr(), Mode::ForUpdate).await,
    );
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
    eprintln!("{flavour:?}: after kill -9 the next is granted in {took:?}, after a release in {released:?}");
    let bound = |of: usize| Duration::from_millis(100) + 3 * released[of];
    assert!(took[5] < bound(5) && took[9] < bound(9), "{took:?}, {released:?}");
}

async fn a_stopped_holder_is_followed_at_the_end_of_its_lease(flavour: Flavour) {
    let server = shared(flavour);
    let client = client(server.addr(), Mode::ForUpdate).await;
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

/// The server does not notice that a client is gone while its statement waits for a row.
async fn a_killed_writer_keeps_readers_out_for_half_a_minute(flavour: Flavour) {
    let server = shared(flavour);
    let client = client(server.addr(), Mode::ForUpdate).await;
    let name = name("writer");
    let lock = client.lock(&name).unwrap().shared();
    let reads = lock.acquire().await.unwrap();
    let (mut writer, _output) = Child::start(server.addr(), Mode::ForUpdate, &name, Duration::from_secs(1));
    waits(&client, &name).await;
    let killed = Stopwatch::start();
    writer.kill().unwrap();
    let refused = lock.try_acquire().await.unwrap().is_none();
    let also_reads = timeout(Duration::from_mins(1), lock.acquire()).await.unwrap();
    let took = killed.elapsed();
    eprintln!("{flavour:?}: behind a killed writer a reader is let in after {took:?}");
    assert!(took < Duration::from_secs(32), "{took:?}");
    assert!(refused, "a writer that waits is passed over");
    reads.check().unwrap();
    also_reads.unwrap().release().await.unwrap();
}

/// The control connection may have ended since that session began.
async fn a_writer_that_gives_up_keeps_no_readers_out(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let reader = client(server.addr(), Mode::ForUpdate).await;
    let lock = reader.lock("a").unwrap().shared();
    let reads = lock.acquire().await.unwrap();
    // The control connection, the holder's, and the disconnect watch.
    eventually("all are there", async || admin.sessions().await.len() == 3).await;
    let others = admin.sessions().await;
    let impatient = client(server.addr(), Mode::ForUpdate).await;
    let sessions = admin.sessions().await;
    let control = sessions.iter().find(|id| !others.contains(id)).unwrap();
    let writer = Waiter::of(impatient.lock("a").unwrap());
    waits(&reader, "a").await;
    admin.run(&format!("KILL {control}")).await;
    writer.abort();
    impatient.close(Duration::from_secs(20)).await.unwrap();
    let given_up = Stopwatch::start();
    lock.acquire().await.unwrap().release().await.unwrap();
    let took = given_up.elapsed();
    assert!(
        took < Duration::from_secs(10),
        "{took:?} behind a writer that has given up"
    );
    reads.release().await.unwrap();
}

async fn a_blackholed_holder_is_told_before_it_is_followed(flavour: Flavour) {
    for mode in MODES {
        let server = shared(flavour);
        let (proxy, dark) = behind_a_proxy(server, mode).await;
        let other = client(server.addr(), mode).await;
        let (name, ttl) = (name("blackholed"), Duration::from_secs(2));
        let guard = brief(&dark, &name, ttl).acquire().await.unwrap();
        let lost = guard.lost();
        let told = tokio::spawn(async move { (lost.await, Instant::now()) });
        let waiter = Waiter::of(other.lock(&name).unwrap());
        waits(&other, &name).await;
        let (began, running) = (Instant::now(), Stopwatch::start());
        proxy.set(lockkit_testbed::Mode::Blackhole);
        let (granted, at) = waiter.granted().await;
        let ran = running.elapsed();
        let (reason, told) = told.await.unwrap();
        assert_eq!(reason, LossReason::Expired);
        assert!(told < at, "told {:?} after the next was granted", told - at);
        let took = at - began;
        assert!(
            took > ttl / 2 && ran < ttl + Duration::from_millis(700),
            "{mode:?}: {took:?}, {ran:?}"
        );
        assert!(granted.token() > guard.token());
        proxy.set(lockkit_testbed::Mode::Pass);
        assert!(guard.release().await.unwrap_err().is_lost());
        sleep(Duration::from_millis(200)).await;
        granted.check().unwrap();
        granted.release().await.unwrap();
        cycle(&dark, &name).await;
    }
}

/// The server grants to a session whose client does not get the reply.
async fn a_waiter_granted_in_the_dark_reports_no_success(flavour: Flavour) {
    for mode in MODES {
        let server = shared(flavour);
        let (proxy, dark) = behind_a_proxy(server, mode).await;
        let other = client(server.addr(), mode).await;
        let (name, ttl) = (name("dark"), Duration::from_secs(1));
        let holder = other.lock(&name).unwrap().acquire().await.unwrap();
        let waiter = Waiter::of(brief(&dark, &name, ttl));
        waits(&other, &name).await;
        proxy.set(lockkit_testbed::Mode::Blackhole);
        holder.release().await.unwrap();
        // The dark session has the lock now, until its `wait_timeout`.
        let began = Instant::now();
        let third = timeout(Duration::from_secs(5), other.lock(&name).unwrap().acquire())
            .await
            .unwrap()
            .unwrap();
        let took = began.elapsed();
        if mode == Mode::ForUpdate {
            assert!(took > ttl / 2, "it was never granted in the dark: {took:?}");
        }
        proxy.set(lockkit_testbed::Mode::Pass);
        for _ in 0..20 {
            sleep(Duration::from_millis(50)).await;
            assert!(!waiter.is_finished(), "{mode:?}: granted while another holds");
            third.check().unwrap();
        }
        let token = third.token();
        third.release().await.unwrap();
        let (late, _) = waiter.granted().await;
        assert!(late.token() > token && late.is_held());
        late.release().await.unwrap();
    }
}

async fn a_waiter_that_is_cut_off_waits_anew(flavour: Flavour) {
    for mode in MODES {
        let server = shared(flavour);
        let (proxy, cut) = behind_a_proxy(server, mode).await;
        let other = client(server.addr(), mode).await;
        let name = name("cut");
        let holder = other.lock(&name).unwrap().acquire().await.unwrap();
        let waiter = Waiter::of(brief(&cut, &name, Duration::from_secs(30)));
        waits(&other, &name).await;
        // Its connections go silent for good; new ones pass. The server does not notice before it grants.
        proxy.set(lockkit_testbed::Mode::HalfOpen);
        proxy.set(lockkit_testbed::Mode::Pass);
        let began = Instant::now();
        holder.release().await.unwrap();
        let (granted, _) = waiter.granted().await;
        eprintln!(
            "{flavour:?}, {mode:?}: cut off while waiting, granted after {:?}",
            began.elapsed()
        );
        granted.check().unwrap();
        granted.release().await.unwrap();
        // Nor does its request in the queue keep anybody out.
        let next = timeout(Duration::from_secs(5), other.lock(&name).unwrap().acquire())
            .await
            .unwrap();
        next.unwrap().release().await.unwrap();
    }
}

/// A release leaves the lock to the head of the queue, which may have died or gone dark.
async fn a_dead_head_of_the_queue_keeps_a_lease_for_seconds_at_most(flavour: Flavour) {
    let server = shared(flavour);
    let holder = client(server.addr(), Mode::Lease).await;
    let third = client(server.addr(), Mode::Lease).await;
    let name = name("gone");
    let guard = holder.lock(&name).unwrap().acquire().await.unwrap();
    let (mut child, _output) = Child::start(server.addr(), Mode::Lease, &name, Duration::from_secs(30));
    waits(&holder, &name).await;
    child.kill().unwrap();
    guard.release().await.unwrap();
    let began = Stopwatch::start();
    cycle(&third, &name).await;
    let died = began.elapsed();

    let (proxy, dark) = behind_a_proxy(server, Mode::Lease).await;
    let guard = holder.lock(&name).unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(dark.lock(&name).unwrap());
    waits(&holder, &name).await;
    proxy.set(lockkit_testbed::Mode::Blackhole);
    guard.release().await.unwrap();
    let began = Stopwatch::start();
    cycle(&third, &name).await;
    let went_dark = began.elapsed();
    eprintln!("{flavour:?}: the next in line was passed over after {died:?}, {went_dark:?}");
    assert!(
        died < Duration::from_secs(1) && went_dark < Duration::from_secs(5),
        "{died:?}, {went_dark:?}"
    );
    proxy.set(lockkit_testbed::Mode::Pass);
    waiter.granted().await.0.release().await.unwrap();
}

async fn a_server_that_crashes_while_the_lock_is_held(flavour: Flavour) {
    for mode in MODES {
        let server = private(flavour, &[]);
        let [holding, waiting, idle] = [
            client(server.addr(), mode).await,
            client(server.addr(), mode).await,
            client(server.addr(), mode).await,
        ];
        // Longer than a server takes to come up again.
        let ttl = Duration::from_secs(40);
        cycle(&idle, "b").await;
        let mut last = 0;
        for round in 0..3 {
            let guard = brief(&holding, "a", ttl).acquire().await.unwrap();
            let waiter = Waiter::of(waiting.lock("a").unwrap());
            waits(&holding, "a").await;
            assert!(guard.token().get() > last);
            server.process().kill().unwrap();
            let began = Stopwatch::start();
            server.start_again().unwrap();
            if mode == Mode::ForUpdate {
                let reason = timeout(ttl, guard.lost()).await.unwrap();
                assert_eq!(reason, LossReason::Disconnected);
                assert!(began.elapsed() < ttl, "round {round}: {:?}", began.elapsed());
                assert!(guard.release().await.unwrap_err().is_lost());
                last = waiter.granted().await.0.token().get();
            } else {
                // The row is still there, and its owner's.
                guard.renew().await.unwrap();
                guard.check().unwrap();
                let token = guard.token().get();
                guard.release().await.unwrap();
                last = waiter.granted().await.0.token().get();
                assert!(last > token);
            }
            let guard = idle.lock("b").unwrap().try_acquire().await.unwrap();
            guard
                .expect("an idle client has its connections replaced")
                .release()
                .await
                .unwrap();
        }
    }
}

/// The rest of its wait is ended by its next attempt, which fails.
async fn a_waiter_whose_server_goes_has_released_nothing(flavour: Flavour) {
    for mode in MODES {
        let server = private(flavour, &[]);
        let (holding, waiting) = (
            client(server.addr(), mode).await,
            client(server.addr(), mode).await,
        );
        let guard = brief(&holding, "a", Duration::from_secs(40))
            .acquire()
            .await
            .unwrap();
        let lock = waiting.lock("a").unwrap();
        let waiter = tokio::spawn(async move { lock.acquire_timeout(Duration::from_secs(4)).await });
        waits(&holding, "a").await;
        server.process().kill().unwrap();
        let error = waiter.await.unwrap().unwrap_err();
        let text = chain(&error);
        assert!(!text.contains("release"), "{mode:?}: {text}");
        drop(guard);
    }
}

async fn a_server_that_stands_still_grants_nothing(flavour: Flavour) {
    let server = private(flavour, &[]);
    let client = client(server.addr(), Mode::ForUpdate).await;
    let guard = brief(&client, "a", Duration::from_secs(1))
        .acquire()
        .await
        .unwrap();
    server.process().pause().unwrap();
    let lock = brief(&client, "b", Duration::from_secs(1));
    let (tried, waited, reason) = tokio::join!(
        lock.try_acquire(),
        lock.acquire_timeout(Duration::from_millis(300)),
        timeout(Duration::from_secs(2), guard.lost())
    );
    assert!(tried.as_ref().is_err_and(Error::is_transient), "{tried:?}");
    assert!(waited.as_ref().is_err_and(Error::is_transient), "{waited:?}");
    assert_eq!(reason.unwrap(), LossReason::Expired);
    server.process().resume().unwrap();
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

async fn replies_that_are_lost(flavour: Flavour) {
    for mode in MODES {
        let server = shared(flavour);
        let (proxy, unlucky) = behind_a_proxy(server, mode).await;
        let other = client(server.addr(), mode).await;
        let ttl = Duration::from_secs(2);
        // To an attempt: its outcome is unknown, and the lock is free within the lease.
        let (attempted, renewed, released) = (name("attempt"), name("renew"), name("release"));
        proxy.set(lockkit_testbed::Mode::DropReplies);
        let lock = brief(&unlucky, &attempted, ttl);
        let error = lock.try_acquire().await.unwrap_err();
        assert!(error.is_transient(), "{error:?}");
        proxy.set(lockkit_testbed::Mode::Pass);
        let bound = ttl * 2 + Duration::from_secs(2);
        let guard = timeout(bound, other.lock(&attempted).unwrap().acquire())
            .await
            .unwrap()
            .unwrap();
        guard.release().await.unwrap();
        // To a renewal: the hold goes on to the end of its lease, and the holder is told by then.
        let guard = brief(&unlucky, &renewed, ttl).acquire().await.unwrap();
        proxy.set(lockkit_testbed::Mode::DropReplies);
        timeout(ttl + Duration::from_millis(500), guard.lost())
            .await
            .unwrap();
        proxy.set(lockkit_testbed::Mode::Pass);
        let next = timeout(bound, other.lock(&renewed).unwrap().acquire())
            .await
            .unwrap();
        next.unwrap().release().await.unwrap();
        // To a release: an error, and the lock is free all the same.
        let guard = brief(&unlucky, &released, ttl).acquire().await.unwrap();
        proxy.set(lockkit_testbed::Mode::DropReplies);
        let error = guard.release().await.unwrap_err();
        assert!(!error.is_timeout(), "{error:?}");
        let next = timeout(bound, other.lock(&released).unwrap().acquire())
            .await
            .unwrap();
        next.unwrap().release().await.unwrap();
        proxy.set(lockkit_testbed::Mode::Pass);
    }
}

/// All idle sessions may be dead while the server is well.
async fn nobody_waits_for_a_dead_connection_to_acquire(flavour: Flavour) {
    for mode in MODES {
        let (proxy, unlucky) = behind_a_proxy(shared(flavour), mode).await;
        let options = AcquireOptions::new().op_timeout(Duration::from_millis(100));
        let lock = unlucky.lock(name("dead")).unwrap().with_options(options);
        let (first, second) = (
            lock.acquire().await.unwrap(),
            unlucky.lock(name("other")).unwrap(),
        );
        second.acquire().await.unwrap().release().await.unwrap();
        first.release().await.unwrap();
        proxy.set(lockkit_testbed::Mode::HalfOpen);
        proxy.set(lockkit_testbed::Mode::Pass);
        let guard = timeout(Duration::from_secs(20), lock.acquire())
            .await
            .expect("in time");
        guard.unwrap().release().await.unwrap();
    }
}

async fn a_lease_does_not_wait_for_a_dead_connection(flavour: Flavour) {
    let (proxy, unlucky) = behind_a_proxy(shared(flavour), Mode::Lease).await;
    let options = AcquireOptions::new().op_timeout(Duration::from_millis(100));
    let lock = unlucky.lock(name("dead")).unwrap().with_options(options);
    let guard = lock.acquire().await.unwrap();
    // The existing connections are dead for good.
    proxy.set(lockkit_testbed::Mode::HalfOpen);
    assert!(guard.renew().await.unwrap_err().is_transient());
    proxy.set(lockkit_testbed::Mode::Pass);
    eventually("it is renewed over another", async || guard.renew().await.is_ok()).await;
    guard.release().await.unwrap();
}

/// The server has locked the row for the try, and would keep it locked for the ttl.
async fn a_try_without_a_reply_is_withdrawn_over_another_connection(flavour: Flavour) {
    let (proxy, unlucky) = behind_a_proxy(shared(flavour), Mode::ForUpdate).await;
    let name = name("unanswered");
    let options = AcquireOptions::new()
        .ttl(Duration::from_mins(1))
        .op_timeout(Duration::from_millis(100));
    let lock = unlucky.lock(&name).unwrap().with_options(options);
    // The server prepares the statement at the second.
    for _ in 0..3 {
        lock.acquire().await.unwrap().release().await.unwrap();
    }
    let observer = client(shared(flavour).addr(), Mode::ForUpdate).await;
    let theirs = observer.lock(&name).unwrap();
    proxy.set(lockkit_testbed::Mode::DropReplies);
    assert!(lock.try_acquire().await.unwrap_err().is_transient());
    assert!(theirs.try_acquire().await.unwrap().is_none(), "it was locked");
    let guard = timeout(Duration::from_secs(20), theirs.acquire())
        .await
        .expect("long before the ttl is over");
    guard.unwrap().release().await.unwrap();
}

/// The repeated release finds nothing left to do.
async fn a_release_whose_reply_is_lost_is_no_loss(flavour: Flavour) {
    let (proxy, unlucky) = behind_a_proxy(shared(flavour), Mode::Lease).await;
    let name = name("repeated");
    let observer = client(shared(flavour).addr(), Mode::Lease).await;
    let guard = unlucky.lock(&name).unwrap().acquire().await.unwrap();
    proxy.set(lockkit_testbed::Mode::DropReplies);
    let releasing = tokio::spawn(guard.release());
    eventually("it is released", async || {
        observer.inspect(&name).await.unwrap().holders.is_empty()
    })
    .await;
    // Ends the connection whose reply was lost.
    proxy.set(lockkit_testbed::Mode::Pass);
    releasing.await.unwrap().unwrap();
}

/// The first request may have freed the lock, and has woken nobody.
async fn a_release_that_is_asked_again_wakes_the_next_in_line(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let (proxy, unlucky) = behind_a_proxy(&server, Mode::Lease).await;
    let options = AcquireOptions::new().op_timeout(Duration::from_millis(100));
    let lock = unlucky.lock("a").unwrap().with_options(options);
    let next = client(server.addr(), Mode::Lease).await;
    let dropped_after = (0..6).map(|millis| Some(Duration::from_millis(millis)));
    for dropped_after in dropped_after.chain([None]) {
        let guard = lock.acquire().await.unwrap();
        let waiter = Waiter::of(next.lock("a").unwrap());
        // For a second from here on.
        session_at(&mut admin, ASLEEP).await;
        let asked = Stopwatch::start();
        if let Some(after) = dropped_after {
            let _ = timeout(after, guard.release()).await;
        } else {
            proxy.set(lockkit_testbed::Mode::DropReplies);
            assert!(guard.release().await.unwrap_err().is_transient());
            proxy.set(lockkit_testbed::Mode::Pass);
        }
        let (guard, _) = waiter.granted().await;
        let took = asked.elapsed();
        assert!(
            took < Duration::from_millis(500),
            "{took:?} after a release that was dropped after {dropped_after:?}"
        );
        guard.release().await.unwrap();
    }
}

/// The server may have noticed the end before, and have granted the lock to the next: that the session is still there means
/// nothing.
async fn a_release_that_is_cut_off_confirms_nothing(flavour: Flavour) {
    let server = shared(flavour);
    // A request with nothing else in it.
    let release = "\t\0\0\0\u{3}ROLLBACK";
    let (addr, mut release) = hold_back(server.addr(), release).await.unwrap();
    let (holder, other) = (
        client(addr, Mode::ForUpdate).await,
        client(server.addr(), Mode::ForUpdate).await,
    );
    let name = name("cut-off");
    let guard = holder.lock(&name).unwrap().acquire().await.unwrap();
    eventually("the hold is shown", async || {
        !other.inspect(&name).await.unwrap().holders.is_empty()
    })
    .await;
    let releasing = tokio::spawn(guard.release());
    release.came().await;
    release.cut_off();
    let error = releasing.await.unwrap().expect_err("nobody knows");
    assert_eq!(
        error.to_string(),
        format!("mysql: lock `{name}` was lost: {}", LossReason::Disconnected)
    );
    cycle(&other, &name).await;
}

/// It has no reply, and nobody is there to end its session. The server goes on with the hold, so it is no loss that could be forgotten.
async fn a_release_that_ends_no_session_is_an_error(flavour: Flavour) {
    let server = shared(flavour);
    let proxy = Proxy::start(server.addr()).unwrap();
    let backend = MySqlBackend::connect(config(proxy.addr())).await.unwrap();
    let other = client(server.addr(), Mode::ForUpdate).await;
    let name = name("unended");
    let request = request(&name, spi::Mode::Exclusive);
    let mut claim = backend.claim(&request).await.unwrap();
    claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    proxy.set(lockkit_testbed::Mode::Blackhole);
    // The connection that would end the session is given up after five seconds. Then others are tried.
    let went_dark = Instant::now();
    while went_dark.elapsed() < Duration::from_secs(10) {
        if let Ok(released) = timeout(Duration::from_millis(1_500), claim.release()).await {
            let error = released.expect_err("nobody knows");
            assert!(error.is_transient(), "{error:?}");
        }
        assert!(other.lock(&name).unwrap().try_acquire().await.unwrap().is_none());
    }
    proxy.set(lockkit_testbed::Mode::Pass);
    eventually("it is ended", async || match claim.release().await {
        Ok(()) => true,
        Err(error) => error.is_lost(),
    })
    .await;
    cycle(&other, &name).await;
}

/// The server was read-only for a moment. By the time that it frees what it is asked to, the lock is gone, or somebody else's.
async fn a_release_that_was_refused_is_no_release_later(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let mut config = config(server.addr());
    config.mode = Mode::Lease;
    let backend = MySqlBackend::connect(config).await.unwrap();
    let other = client(server.addr(), Mode::Lease).await.lock("a").unwrap();
    for change in [
        "DELETE FROM lockkit_lease WHERE name='lockkit:a'",
        "UPDATE lockkit_lease SET expires=0 WHERE name='lockkit:a'",
        "DROP TABLE lockkit_lease",
    ] {
        let request = request("a", spi::Mode::Exclusive);
        let mut claim = backend.claim(&request).await.unwrap();
        let grant = claim.attempt(Duration::ZERO).await.unwrap();
        assert!(grant.is_some(), "{change}");
        admin.run("SET GLOBAL read_only=1").await;
        let refused = claim.release().await.unwrap_err();
        assert!(refused.is_transient(), "{change}: {refused:?}");
        admin.run(&format!("{change}; SET GLOBAL read_only=0")).await;
        let next = if change.starts_with("UPDATE") {
            Some(other.try_acquire().await.unwrap().expect("it is free"))
        } else {
            None
        };
        let error = claim.release().await.unwrap_err();
        assert!(error.is_lost(), "{change}: {error:?}");
        if let Some(next) = next {
            next.renew().await.unwrap();
            next.release().await.unwrap();
        }
    }
}

/// The release was abandoned on its way, and its claim has been granted the lock again.
async fn a_release_that_comes_late_frees_no_later_hold(flavour: Flavour) {
    let server = shared(flavour);
    let (addr, mut release) = hold_back(server.addr(), "SET token=0*").await.unwrap();
    let mut config = config(addr);
    config.mode = Mode::Lease;
    let backend = MySqlBackend::connect(config).await.unwrap();
    let name = name("late");
    let request = request(&name, spi::Mode::Exclusive);
    let mut claim = backend.claim(&request).await.unwrap();
    let try_it = Duration::ZERO;
    let first = claim.attempt(try_it).await.unwrap().expect("it is free");
    tokio::select! {
        released = claim.release() => panic!("it was not held back: {released:?}"),
        () = release.came() => {}
    }
    // Its connection is given up a second later.
    let again = timeout(Duration::from_secs(20), claim.attempt(try_it))
        .await
        .unwrap();
    let again = again.unwrap().expect("it is its own, or free");
    assert!(again.tokens.start() > first.tokens.end());
    release.deliver().await.unwrap();
    let other = client(server.addr(), Mode::Lease).await;
    let second = other.lock(&name).unwrap().try_acquire().await.unwrap();
    assert!(second.is_none(), "granted beside its holder: {second:?}");
    claim.release().await.unwrap();
    cycle(&other, &name).await;
}

/// The renewal was abandoned on its way, and the hold has been given a longer ttl since.
async fn a_renewal_that_comes_late_is_no_shorter_than_is_believed(flavour: Flavour) {
    renewed_late(flavour, false).await;
}

/// The client has noticed the end of its connection, the server has not.
async fn a_renewal_that_was_cut_off_is_no_shorter_than_is_believed(flavour: Flavour) {
    renewed_late(flavour, true).await;
}

/// No request was sent with it, so that none can come late.
async fn a_ttl_from_before_the_grant_counts_for_no_lease(flavour: Flavour) {
    let server = shared(flavour);
    let (addr, mut renewal) = hold_back(server.addr(), "SET expires=").await.unwrap();
    let mut config = config(addr);
    config.mode = Mode::Lease;
    let backend = MySqlBackend::connect(config).await.unwrap();
    let (name, owner) = (name("no-late-renewal"), OwnerId::new(fastrand::u128(..)));
    let ttl = Duration::from_secs(60);
    let request = ClaimRequest::new(LockName::new(&name).unwrap(), spi::Mode::Exclusive, ttl, owner);
    let mut claim = backend.claim(&request).await.unwrap();
    for asked in [Duration::from_secs(1), ttl] {
        claim.set_ttl(asked).unwrap();
    }
    claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    tokio::select! {
        renewed = claim.renew() => panic!("it was not held back: {renewed:?}"),
        () = renewal.came() => {}
    }
    // Its connection is given up a second later.
    let renewed = timeout(Duration::from_secs(8), claim.renew()).await.unwrap();
    let Renewal::Held(lease) = renewed.unwrap() else {
        panic!("it is held");
    };
    renewal.deliver().await.unwrap();
    assert!(lease.length.unwrap() > ttl / 2, "{lease:?}");
    claim.release().await.unwrap();
}

async fn renewed_late(flavour: Flavour, is_cut_off: bool) {
    let server = shared(flavour);
    let (addr, mut renewal) = hold_back(server.addr(), "SET expires=").await.unwrap();
    let proxy = Proxy::start(addr).unwrap();
    let mut config = config(proxy.addr());
    config.mode = Mode::Lease;
    let backend = MySqlBackend::connect(config).await.unwrap();
    let (name, owner) = (name("late-renewal"), OwnerId::new(fastrand::u128(..)));
    let lock = LockName::new(&name).unwrap();
    let short = Duration::from_secs(10);
    let request = ClaimRequest::new(lock, spi::Mode::Exclusive, short, owner);
    let mut claim = backend.claim(&request).await.unwrap();
    claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    tokio::select! {
        renewed = claim.renew() => panic!("it was not held back: {renewed:?}"),
        () = renewal.came() => {}
    }
    claim.set_ttl(Duration::from_secs(60)).unwrap();
    if is_cut_off {
        proxy.reset();
    }
    // Otherwise its connection is given up a second later.
    let renewed = timeout(Duration::from_secs(8), claim.renew()).await.unwrap();
    let Renewal::Held(lease) = renewed.unwrap() else {
        panic!("it is held");
    };
    renewal.deliver().await.unwrap();
    let other = client(server.addr(), Mode::Lease).await;
    let left = other.inspect(&name).await.unwrap().holders[0].left.unwrap();
    let now = Instant::now();
    assert!(left <= short, "it took no effect: {left:?}");
    let end = lease.end().unwrap();
    assert!(end <= now + left, "{:?} beyond the server's {left:?}", end - now);
    claim.release().await.unwrap();
    cycle(&other, &name).await;
}

/// The attempt was abandoned on its way, and the control connection has ended since.
async fn an_attempt_that_comes_late_takes_nothing(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let other = client(server.addr(), Mode::Lease).await;
    cycle(&other, "a").await;
    let others = admin.sessions().await;
    let (addr, mut attempt) = hold_back(server.addr(), "LAST_INSERT_ID(latest+1)")
        .await
        .unwrap();
    let unlucky = client(addr, Mode::Lease).await;
    let sessions = admin.sessions().await;
    let control = sessions.iter().find(|id| !others.contains(id)).unwrap();
    let options = AcquireOptions::new().op_timeout(Duration::from_millis(200));
    let lock = unlucky.lock("a").unwrap().with_options(options);
    let trying = tokio::spawn(async move { lock.try_acquire().await });
    attempt.came().await;
    admin.run(&format!("KILL {control}")).await;
    assert!(trying.await.unwrap().unwrap_err().is_transient());
    unlucky.close(Duration::from_secs(20)).await.unwrap();
    attempt.deliver().await.unwrap();
    let state = other.inspect("a").await.unwrap();
    assert!(state.holders.is_empty(), "nobody holds: {state:?}");
    cycle(&other, "a").await;
}

/// The client has noticed the end of its connection, the server has not.
async fn an_attempt_that_was_cut_off_takes_nothing(flavour: Flavour) {
    let server = shared(flavour);
    let name = name("cut off");
    let other = client(server.addr(), Mode::Lease).await;
    cycle(&other, &name).await;
    let (addr, mut attempt) = hold_back(server.addr(), "LAST_INSERT_ID(latest+1)")
        .await
        .unwrap();
    let proxy = Proxy::start(addr).unwrap();
    let unlucky = client(proxy.addr(), Mode::Lease).await;
    let lock = unlucky.lock(&name).unwrap();
    let trying = tokio::spawn(async move { lock.try_acquire().await });
    attempt.came().await;
    proxy.reset();
    let tried = trying.await.unwrap();
    // An idle connection may have ended as well, so it may have been tried over another.
    match tried {
        Ok(granted) => granted.expect("it is free").release().await.unwrap(),
        Err(error) => assert!(error.is_transient(), "{error:?}"),
    }
    unlucky.close(Duration::from_secs(20)).await.unwrap();
    attempt.deliver().await.unwrap();
    let state = other.inspect(&name).await.unwrap();
    assert!(state.holders.is_empty(), "nobody holds: {state:?}");
    cycle(&other, &name).await;
}

/// Nobody is left to take it back.
async fn an_attempt_of_the_dead_keeps_a_lease_for_a_ttl(flavour: Flavour) {
    const TTL: Duration = Duration::from_secs(10);
    let server = shared(flavour);
    let name = name("dead");
    let (addr, mut attempt) = hold_back(server.addr(), "LAST_INSERT_ID(latest+1)")
        .await
        .unwrap();
    let (mut child, _output) = Child::start(addr, Mode::Lease, &name, TTL);
    attempt.came().await;
    child.kill().unwrap();
    let other = client(server.addr(), Mode::Lease).await;
    // Makes the row as well.
    cycle(&other, &name).await;
    attempt.deliver().await.unwrap();
    let taken = other.inspect(&name).await.unwrap();
    assert_eq!(taken.holders.len(), 1, "{taken:?}");
    let next = timeout(TTL * 3, other.lock(&name).unwrap().acquire()).await;
    next.expect("its lease is over").unwrap().release().await.unwrap();
}

/// On MariaDB, a session that is woken from a `SLEEP` while another sleeper comes or goes stands still for two seconds.
async fn a_release_wakes_the_next_also_where_many_sleep(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let [holder, next] = [
        client(server.addr(), Mode::Lease).await,
        client(server.addr(), Mode::Lease).await,
    ];
    let mut sleepers = JoinSet::new();
    for _ in 0..6 {
        let mut sleeper = Admin::of(&server).await;
        sleepers.spawn(async move {
            let naps = vec!["SLEEP(0.00002)"; 100].join(", ");
            while sleeper.try_run(&format!("SELECT {naps}")).await.is_ok() {}
        });
    }
    let mut longest = Duration::ZERO;
    for _ in 0..200 {
        let guard = holder.lock("a").unwrap().acquire().await.unwrap();
        let waiter = Waiter::of(next.lock("a").unwrap());
        session_at(&mut admin, ASLEEP).await;
        let released = Stopwatch::start();
        guard.release().await.unwrap();
        let (guard, _) = waiter.granted().await;
        longest = longest.max(released.elapsed());
        guard.release().await.unwrap();
    }
    eprintln!("{flavour:?}: among many sleepers the next was granted within {longest:?}");
    assert!(longest < Duration::from_millis(1_500), "{longest:?}");
}

async fn connections_that_are_reset_again_and_again(flavour: Flavour) {
    for mode in MODES {
        let server = shared(flavour);
        let (proxy, unlucky) = behind_a_proxy(server, mode).await;
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
            assert!(
                began.elapsed() < Duration::from_mins(1),
                "{mode:?}: it gets nowhere"
            );
            sleep(pause).await;
            proxy.reset();
            pause += pause / 50;
        }
        worker.await.unwrap();
    }
}

/// A reset frees the lock at the server at once, so another client may hold it before its holder knows.
async fn a_hold_whose_connections_break_is_told_at_once(flavour: Flavour) {
    let server = shared(flavour);
    let (proxy, unlucky) = behind_a_proxy(server, Mode::ForUpdate).await;
    let mut took = Vec::new();
    for _ in 0..10 {
        let guard = unlucky.lock(name("broken")).unwrap().acquire().await.unwrap();
        // Until the worker has it, and the disconnect watch runs.
        sleep(Duration::from_millis(50)).await;
        let began = Stopwatch::start();
        proxy.reset();
        let reason = timeout(Duration::from_secs(5), guard.lost()).await.unwrap();
        took.push(began.elapsed());
        assert_eq!(reason, LossReason::Disconnected);
    }
    took.sort_unstable();
    eprintln!("{flavour:?}: told of broken connections after {took:?}");
    assert!(took[5] < Duration::from_millis(100), "{took:?}");
}

/// The disconnect watch may be connecting when the connections break.
async fn a_break_while_the_watch_is_begun_is_told_at_once(flavour: Flavour) {
    let server = shared(flavour);
    let (proxy, unlucky) = behind_a_proxy(server, Mode::ForUpdate).await;
    let lock = unlucky.lock(name("broken")).unwrap();
    let before = proxy.counts().connections;
    proxy.set(lockkit_testbed::Mode::Delay {
        requests: Duration::ZERO,
        replies: Duration::from_millis(200),
    });
    let guard = lock.acquire().await.unwrap();
    eventually("the watch is begun", async || proxy.counts().connections > before).await;
    // To show the hold takes one reply. The watch takes some more.
    sleep(Duration::from_millis(300)).await;
    let broken = Stopwatch::start();
    proxy.reset();
    proxy.set(lockkit_testbed::Mode::Pass);
    let reason = timeout(Duration::from_secs(20), guard.lost()).await.unwrap();
    assert_eq!(reason, LossReason::Disconnected);
    let took = broken.elapsed();
    assert!(took < Duration::from_secs(2), "told after {took:?}");
}

/// A client was used on a second runtime, where sessions and the disconnect watch were opened.
async fn another_runtime_that_ends_takes_no_connection_along(flavour: Flavour) {
    let server = shared(flavour);
    for resets in [true, false] {
        let (proxy, client) = behind_a_proxy(server, Mode::ForUpdate).await;
        let elsewhere = client.clone();
        let runtime = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let guards = [name("b"), name("c")].map(|name| {
                    let lock = elsewhere.lock(name).unwrap();
                    async move { lock.acquire().await.unwrap() }
                });
                let guards = join_all(guards).await;
                sleep(Duration::from_millis(100)).await;
                for guard in guards {
                    guard.release().await.unwrap();
                }
            });
            runtime
        });
        let runtime = runtime.join().unwrap();
        let mut guards = Vec::new();
        for held in ["d", "e"] {
            guards.push(client.lock(name(held)).unwrap().acquire().await.unwrap());
        }
        runtime.shutdown_background();
        sleep(Duration::from_millis(100)).await;
        if resets {
            let began = Stopwatch::start();
            proxy.reset();
            for guard in &guards {
                let told = timeout(Duration::from_secs(5), guard.lost()).await;
                assert_eq!(told.ok(), Some(LossReason::Disconnected), "with its next renewal");
            }
            eprintln!("{flavour:?}: told after {:?}", began.elapsed());
        } else {
            for guard in &guards {
                guard.renew().await.unwrap();
            }
        }
    }
}

const HOUR: Duration = Duration::from_hours(1);

/// It was connected on one runtime, which has ended, and its client lives on another.
async fn a_backend_that_outlives_its_runtime_says_so(flavour: Flavour) {
    let addr = shared(flavour).addr();
    for mode in MODES {
        let mut config = config(addr);
        config.mode = mode;
        let backend = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(MySqlBackend::connect(config)).unwrap()
        });
        let client = LockClient::new(backend.join().unwrap());
        let (name, limit) = (name("outlived"), Duration::from_secs(5));
        let lock = client.lock(&name).unwrap();
        let permanent = |error: &Error| matches!(error, Error::Backend { transient: false, .. });
        // The idle connection ended with that runtime, which a try may find out first.
        eventually("a try says so", async || {
            lock.try_acquire().await.is_err_and(|error| permanent(&error))
        })
        .await;
        let waited = timeout(limit, lock.acquire()).await.expect("an answer");
        let seen = timeout(limit, client.inspect(&name)).await.expect("an answer");
        for answer in [waited.map(drop), seen.map(drop)] {
            let error = answer.unwrap_err();
            assert!(
                permanent(&error) && chain(&error).contains("runtime"),
                "{mode:?}: {}",
                chain(&error)
            );
        }
    }
}

/// Takes its time to be dropped, as another task of a program may.
struct Slow;

impl Drop for Slow {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// The tasks of that runtime are dropped in any order, those that pass on bytes among them.
async fn a_runtime_that_ends_frees_no_row_that_is_believed(flavour: Flavour) {
    let addr = shared(flavour).addr();
    let name = name("ended");
    let other = client(addr, Mode::ForUpdate).await;
    let other = other.lock(&name).unwrap();
    let slow = || {
        tokio::spawn(async {
            let _slow = Slow;
            std::future::pending::<()>().await;
        });
    };
    for _ in 0..3 {
        let held = name.clone();
        let holder = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            let guard = runtime.block_on(async {
                slow();
                let client = client(addr, Mode::ForUpdate).await;
                slow();
                let guard = client.lock(held).unwrap().acquire().await.unwrap();
                slow();
                tokio::task::yield_now().await;
                guard
            });
            runtime.shutdown_background();
            guard
        });
        let guard = holder.join().unwrap();
        let asked = Stopwatch::start();
        while asked.elapsed() < Duration::from_secs(2) {
            let granted = other.try_acquire().await.unwrap();
            assert!(
                granted.is_none() || !guard.is_held(),
                "PROMISE BROKEN: two hold, {:?} after the end",
                asked.elapsed()
            );
        }
    }
}

async fn the_servers_clock_does_not_move_a_row_lock(flavour: Flavour) {
    let clock = Clock::new().unwrap();
    let server = MySql::start_by(Some(&clock), flavour, &[]).unwrap();
    let (holder, other) = (
        client(server.addr(), Mode::ForUpdate).await,
        client(server.addr(), Mode::ForUpdate).await,
    );
    let guard = brief(&holder, "a", Duration::from_secs(2))
        .acquire()
        .await
        .unwrap();
    for step in [Clock::forward, Clock::back, Clock::back] {
        step(&clock, HOUR).unwrap();
        sleep(Duration::from_millis(700)).await;
        guard.check().unwrap();
        assert!(other.lock("a").unwrap().try_acquire().await.unwrap().is_none());
    }
    let token = guard.token();
    guard.release().await.unwrap();
    assert!(other.lock("a").unwrap().acquire().await.unwrap().token() > token);
}

async fn the_servers_clock_moves_a_lease(flavour: Flavour) {
    let clock = Clock::new().unwrap();
    let server = MySql::start_by(Some(&clock), flavour, &[]).unwrap();
    let (holder, other) = (
        client(server.addr(), Mode::Lease).await,
        client(server.addr(), Mode::Lease).await,
    );
    let ttl = Duration::from_secs(3);
    // Forward: the lease expires before its time. The token still protects.
    let guard = brief(&holder, "a", ttl).acquire().await.unwrap();
    clock.forward(HOUR).unwrap();
    let next = other
        .lock("a")
        .unwrap()
        .try_acquire()
        .await
        .unwrap()
        .expect("granted beside its holder");
    assert!(guard.is_held() && next.token() > guard.token());
    let reason = timeout(ttl, guard.lost()).await.unwrap();
    assert_eq!(reason, LossReason::Revoked);
    next.release().await.unwrap();
    // Back: a lease that nobody renews lasts for longer.
    let (proxy, cut) = behind_a_proxy(&server, Mode::Lease).await;
    let guard = brief(&cut, "b", ttl).acquire().await.unwrap();
    proxy.set(lockkit_testbed::Mode::Blackhole);
    clock.back(HOUR).unwrap();
    guard.lost().await;
    sleep(Duration::from_millis(500)).await;
    assert!(other.lock("b").unwrap().try_acquire().await.unwrap().is_none());
}

async fn tokens_go_back_with_a_deleted_counter_and_the_clock(flavour: Flavour) {
    let clock = Clock::new().unwrap();
    let server = MySql::start_by(Some(&clock), flavour, &[]).unwrap();
    let mut admin = Admin::of(&server).await;
    let lock = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    // From the server, not from a hand-off within the client.
    let draw = async || {
        let guard = lock.acquire().await.unwrap();
        let token = guard.token();
        guard.release().await.unwrap();
        token
    };
    let before = draw().await;
    admin
        .run("DELETE FROM lockkit_fence; DELETE FROM lockkit_map")
        .await;
    let after = draw().await;
    assert!(after > before, "a new counter begins at the clock");
    clock.back(HOUR).unwrap();
    // Each of the two stands in for the other.
    for table in ["lockkit_fence", "lockkit_map"] {
        let before = draw().await;
        admin.run(&format!("DELETE FROM {table}")).await;
        admin.run("DO BENCHMARK(100000, UUID_SHORT())").await;
        assert!(draw().await > before, "without {table}");
    }
    admin
        .run("DELETE FROM lockkit_fence; DELETE FROM lockkit_map")
        .await;
    assert!(draw().await < after);
}

/// A replica is promoted, the old primary lives on, and nobody has made it read-only or cut its connections.
async fn two_primaries_grant_one_lock(flavour: Flavour) {
    for mode in MODES {
        let (old, new) = (private(flavour, &[]), private(flavour, &[]));
        let proxy = Proxy::start(old.addr()).unwrap();
        let ttl = Duration::from_secs(5);
        let holder = client(proxy.addr(), mode).await;
        let guard = brief(&holder, "a", ttl).acquire().await.unwrap();
        sleep(Duration::from_millis(50)).await;
        proxy.set_upstream(new.addr());
        let next = client(proxy.addr(), mode).await;
        let next = next.lock("a").unwrap().try_acquire().await.unwrap().unwrap();
        // For good.
        sleep(ttl * 3 / 2).await;
        assert!(guard.is_held() && next.is_held(), "{mode:?}: two hold");
        // The end of the connections tells the holder, unless it is a lease.
        if mode == Mode::ForUpdate {
            proxy.reset();
            timeout(ttl, guard.lost()).await.unwrap();
        }
    }
}

/// A fail-over does the same, to a replica without the lock's row, or with row locks to any replica: they are not replicated.
async fn a_server_that_lost_its_data(flavour: Flavour) {
    for mode in MODES {
        let (old, new) = (private(flavour, &[]), private(flavour, &[]));
        let proxy = Proxy::start(old.addr()).unwrap();
        let (holder, other) = (client(proxy.addr(), mode).await, client(proxy.addr(), mode).await);
        let guard = brief(&holder, "a", Duration::from_secs(6))
            .acquire()
            .await
            .unwrap();
        sleep(Duration::from_millis(50)).await;
        proxy.set_upstream(new.addr());
        old.process().kill().unwrap();
        // The tables are gone, too. The next client to lock creates them.
        cycle(&client(new.addr(), mode).await, "made").await;
        let next = timeout(Duration::from_secs(5), other.lock("a").unwrap().acquire())
            .await
            .unwrap()
            .unwrap();
        assert!(next.token() > guard.token(), "the counter begins at the clock");
        if mode == Mode::Lease {
            assert!(guard.is_held(), "two hold");
        }
        timeout(Duration::from_secs(6), guard.lost()).await.unwrap();
    }
}

/// The disconnect watch may end alone.
async fn a_disconnect_watch_that_ended_is_restarted(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let (proxy, unlucky) = behind_a_proxy(&server, Mode::ForUpdate).await;
    let guard = brief(&unlucky, "a", Duration::from_secs(30))
        .acquire()
        .await
        .unwrap();
    let watching = session_at(&mut admin, "DO SLEEP").await;
    admin.run(&format!("KILL {watching}")).await;
    eventually("another watches", async || {
        session_at(&mut admin, "DO SLEEP").await != watching
    })
    .await;
    assert!(guard.is_held());
    let broken = Stopwatch::start();
    proxy.reset();
    let reason = timeout(Duration::from_secs(5), guard.lost()).await.unwrap();
    assert_eq!(reason, LossReason::Disconnected);
    assert!(
        broken.elapsed() < Duration::from_secs(1),
        "{:?}",
        broken.elapsed()
    );
}

/// A connection that a firewall has dropped never reports anything, not even a crash of the server.
async fn a_disconnect_watch_that_fell_silent_is_restarted(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let (proxy, unlucky) = behind_a_proxy(&server, Mode::ForUpdate).await;
    let first = unlucky.lock("a").unwrap().acquire().await.unwrap();
    session_at(&mut admin, "DO SLEEP").await;
    proxy.set(lockkit_testbed::Mode::HalfOpen);
    proxy.set(lockkit_testbed::Mode::Pass);
    drop(first);
    let lock = brief(&unlucky, "b", Duration::from_mins(1));
    let guard = timeout(Duration::from_secs(20), lock.acquire())
        .await
        .unwrap()
        .unwrap();
    sleep(Duration::from_secs(15)).await;
    let crashed = Stopwatch::start();
    server.process().kill().unwrap();
    let told = timeout(Duration::from_secs(3), guard.lost()).await;
    assert!(told.is_ok(), "not told after {:?}", crashed.elapsed());
}

/// The head of the queue may have died with the holder.
async fn a_dead_holder_is_followed_within_its_bound(flavour: Flavour) {
    for (mode, ttl) in [
        (Mode::ForUpdate, Duration::from_millis(1_500)),
        (Mode::Lease, Duration::from_secs(2)),
    ] {
        let server = shared(flavour);
        let (proxy, dead) = behind_a_proxy(server, mode).await;
        let (next_proxy, next) = behind_a_proxy(server, mode).await;
        let other = client(server.addr(), mode).await;
        let name = name("bound");
        let guard = brief(&dead, &name, ttl).acquire().await.unwrap();
        if mode == Mode::Lease {
            let lock = next.lock(&name).unwrap();
            tokio::spawn(async move { lock.acquire().await });
            waits(&other, &name).await;
        }
        let waiter = Waiter::of(other.lock(&name).unwrap());
        eventually("all wait", async || {
            let expected = if mode == Mode::Lease { 2 } else { 1 };
            other.inspect(&name).await.unwrap().waiters == Some(expected)
        })
        .await;
        proxy.set(lockkit_testbed::Mode::Blackhole);
        next_proxy.set(lockkit_testbed::Mode::Blackhole);
        let died = Stopwatch::start();
        let (granted, _) = waiter.granted().await;
        let (took, bound) = (died.elapsed(), other.dead_holder_bound(ttl));
        eprintln!(
            "{flavour:?} {mode:?}: a dead holder with {ttl:?} was followed after {took:?}, bound {bound:?}"
        );
        assert!(
            took < bound + Duration::from_millis(300),
            "{took:?}, not within {bound:?}"
        );
        assert!(!guard.is_held() && granted.token() > guard.token());
    }
}

async fn a_lease_whose_row_is_deleted_is_anothers(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let (holder, other) = (
        client(server.addr(), Mode::Lease).await,
        client(server.addr(), Mode::Lease).await,
    );
    let guard = brief(&holder, "a", Duration::from_secs(3))
        .acquire()
        .await
        .unwrap();
    admin.run("DELETE FROM lockkit_lease").await;
    let next = other
        .lock("a")
        .unwrap()
        .try_acquire()
        .await
        .unwrap()
        .expect("there is no row");
    assert!(guard.is_held(), "two hold");
    assert!(next.token() > guard.token(), "a new row begins at the clock");
    let reason = timeout(Duration::from_secs(3), guard.lost()).await.unwrap();
    assert_eq!(reason, LossReason::Revoked);
    next.check().unwrap();
}

/// The name was taken a moment ago, so the lost request is one that waits.
async fn a_wait_that_the_server_never_heard_of_is_not_taken(flavour: Flavour) {
    let server = shared(flavour);
    let (proxy, unlucky) = behind_a_proxy(server, Mode::ForUpdate).await;
    let name = name("unheard");
    let holder = client(server.addr(), Mode::ForUpdate).await;
    let guard = holder.lock(&name).unwrap().acquire().await.unwrap();
    let lock = unlucky.lock(&name).unwrap();
    let short = Duration::from_millis(200);
    let said = lock.acquire_timeout(short).await.unwrap_err();
    assert!(said.is_timeout(), "{said}");
    proxy.set(lockkit_testbed::Mode::Blackhole);
    let said = lock.acquire_timeout(short).await.unwrap_err();
    assert!(!said.is_timeout(), "{said}");
    proxy.set(lockkit_testbed::Mode::Pass);
    guard.release().await.unwrap();
    cycle(&unlucky, &name).await;
}
