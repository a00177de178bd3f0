//! Sessions: what they hold, what they leave, and what they cost others.

use std::{num::NonZeroU32, pin::pin, task::Poll, time::Duration};

use futures_util::future::join_all;
use lockkit_conformance::stall::{Stopwatch, timeout};
use lockkit_core::{
    AcquireOptions, Error, FencingToken, LockClient, LossReason,
    spi::{self, Backend as _, Renewal, chain},
};
use lockkit_postgres::{PostgresBackend, PostgresConfig};
use lockkit_testbed::{Mode, Proxy, eventually, postgres::PgServer};
use tokio::time::{Instant, sleep, sleep_until};

use crate::servers::{
    Waiter, brief, client, config, connect, cycle, key, listed, name, private, relay, request, session,
    shared, tests, waits,
};

tests! {
    a_lock_by_hand_excludes_and_is_excluded
    a_permit_is_one_lock_of_one_session
    an_idle_holder_costs_vacuum_nothing
    one_grant_in_33_is_written_to_disk
    a_thousand_locks_of_others_hide_no_holder
    a_waiter_stops_vacuum_in_its_own_database_alone
    the_lease_is_kept_in_milliseconds
    a_ttl_that_changes_is_kept_from_the_next_renewal
    a_grant_after_a_long_wait_has_its_whole_lease
    a_wait_that_meets_its_grant_is_withdrawn
    an_attempt_dropped_after_each_poll_leaves_nothing
    a_late_cancel_hits_no_later_claim
    a_wait_that_an_operator_cancels_goes_on
    who_waits_again_asks_only_once
    a_statement_that_does_not_wait_is_not_taken
    a_withdrawn_waiter_keeps_its_session
    an_unlock_that_finds_nothing_is_a_loss
    a_row_that_stays_hides_no_loss
    a_loss_that_a_dropped_release_found_is_told
    a_size_that_was_made_meanwhile_is_no_taken_permit
    a_renewal_in_another_session_is_a_loss
    a_newcomer_reads_behind_a_waiting_writer
    a_hold_that_was_passed_on_keeps_the_last_of_its_tokens
    a_holder_that_is_terminated_is_told_at_once
    a_hold_is_ended_by_its_token_and_no_other
    a_revocation_without_a_reply_is_not_denied
    a_label_is_shown_whole
    a_label_that_no_text_can_have_is_refused
    a_label_beyond_the_databases_encoding_is_shown_escaped
    a_hold_that_is_shown_late_is_listed
    a_list_goes_on_over_holds_that_end
    a_size_that_changes_meanwhile_hides_no_permit
    a_size_is_changed_by_one_at_a_time
    a_locked_table_of_holders_stops_nobody
    who_waits_has_no_time_limit_of_the_servers
    a_hold_by_hand_is_shown_without_a_token
    a_hold_that_cannot_be_shown_is_as_good_as_any
    sessions_are_kept_and_closed
    a_first_burst_makes_the_tables_over_one_connection
    who_stops_while_it_makes_the_tables_is_in_nobodys_way
    who_makes_the_tables_at_a_silent_server_gives_up
    an_inspection_over_a_dead_connection_stops_no_other
    idle_sessions_that_are_closed_are_in_nobodys_way
    another_runtime_that_ends_takes_no_connection_along
    a_backend_that_outlives_its_runtime_says_so
}

/// The advisory locks at this server: granted and waiting.
fn locks(server: &PgServer) -> (usize, usize) {
    let counted = "SELECT count(*) FILTER (WHERE granted), count(*) FILTER (WHERE NOT granted) FROM pg_locks \
                   WHERE locktype='advisory'";
    let counted = server.sql(counted).unwrap();
    let (granted, waiting) = counted.split_once('|').unwrap();
    (granted.parse().unwrap(), waiting.parse().unwrap())
}

async fn a_lock_by_hand_excludes_and_is_excluded() {
    let server = shared();
    let client = client(server.addr()).await;
    let name = name("by hand");
    let (lock, key) = (client.lock(&name).unwrap(), key(&name));
    let mut by_hand = session(server);
    let taken = format!("SELECT pg_try_advisory_lock({key})");
    let guard = lock.acquire().await.unwrap();
    assert_eq!(by_hand.sql(&taken).unwrap(), "f");
    guard.release().await.unwrap();
    assert_eq!(by_hand.sql(&taken).unwrap(), "t");
    assert!(lock.try_acquire().await.unwrap().is_none());
    let waiter = Waiter::of(lock);
    waits(&client, &name).await;
    by_hand.sql(&format!("SELECT pg_advisory_unlock({key})")).unwrap();
    waiter.granted().await.0.release().await.unwrap();
}

/// A look that sorts the permits first would lock them all.
async fn a_permit_is_one_lock_of_one_session() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    let semaphore = client.semaphore("s", 5).unwrap();
    let mut permits = Vec::new();
    for held in 1..=5 {
        permits.push(semaphore.acquire().await.unwrap());
        assert_eq!(locks(&server), (held, 0));
    }
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert_eq!(locks(&server), (5, 0));
    let waiter = Waiter::of(semaphore.clone());
    eventually("it looks", async || {
        client.inspect_semaphore("s").await.unwrap().waiters == Some(1)
    })
    .await;
    permits.pop().unwrap().release().await.unwrap();
    let granted = waiter.granted().await.0;
    eventually("the queue is left", async || locks(&server) == (5, 0)).await;
    drop((permits, granted));
    eventually("all come back", async || locks(&server) == (0, 0)).await;
}

async fn an_idle_holder_costs_vacuum_nothing() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    let permit = client.semaphore("s", 2).unwrap().acquire().await.unwrap();
    assert_eq!(client.inspect("a").await.unwrap().holders.len(), 1);
    let pinned = "SELECT count(*) FROM pg_stat_activity WHERE application_name='lockkit' AND \
                  (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL OR state <> 'idle')";
    assert_eq!(server.sql(pinned).unwrap(), "0");
    guard.check().unwrap();
    permit.check().unwrap();
}

/// What the server has on disk of the sequence reaches for 32 draws more.
async fn one_grant_in_33_is_written_to_disk() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    cycle(&client, "a").await;
    let mut written = 0;
    for _ in 0..99 {
        cycle(&client, "a").await;
        let left = server.sql("SELECT log_cnt FROM lockkit.token").unwrap();
        written += u32::from(left == "32");
    }
    // After a checkpoint, one more is.
    assert!((3..=4).contains(&written), "{written} of 99 were");
}

async fn a_thousand_locks_of_others_hide_no_holder() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    let mut others = session(&server);
    others
        .sql("SELECT count(*) FROM generate_series(1, 1000) g WHERE pg_advisory_lock(1, g) IS NOT NULL")
        .unwrap();
    let shown = async || {
        let holders = client.inspect("a").await.unwrap().holders;
        holders.into_iter().map(|holder| holder.token).collect::<Vec<_>>()
    };
    eventually("the hold is shown", async || shown().await == [guard.token()]).await;
    let mut took = Vec::new();
    for _ in 0..100 {
        let began = Stopwatch::start();
        let tokens = shown().await;
        took.push(began.elapsed());
        assert_eq!(tokens, [guard.token()]);
    }
    took.sort_unstable();
    eprintln!("beside 1,000 locks, an inspection takes {:?}", took[50]);
}

/// A waiter has a snapshot. In a database of its own for locks, it stops nobody.
async fn a_waiter_stops_vacuum_in_its_own_database_alone() {
    let server = private(&[]);
    server.sql("CREATE DATABASE work").unwrap();
    let client = client(server.addr()).await;
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    let other = crate::servers::client(server.addr()).await;
    let waiter = Waiter::of(other.lock("a").unwrap());
    waits(&client, "a").await;
    for (database, kept) in [(PgServer::DATABASE, "2000"), ("work", "0")] {
        let mut worker = server.session_in(database).unwrap();
        worker
            .sql("CREATE TABLE t AS SELECT g FROM generate_series(1, 2000) g")
            .unwrap();
        worker.sql("DELETE FROM t").unwrap();
        worker.sql("VACUUM t").unwrap();
        let left = "SELECT n_dead_tup FROM pg_stat_all_tables WHERE relname='t'";
        let pages = worker.sql("SELECT pg_relation_size('t')").unwrap();
        let is_empty = pages == "0";
        assert_eq!(
            is_empty,
            kept == "0",
            "{database}: {pages} bytes, {:?}",
            worker.sql(left)
        );
        let began = Stopwatch::start();
        worker.sql("CREATE TABLE u (i int)").unwrap();
        worker.begin("CREATE INDEX CONCURRENTLY ON u (i)").unwrap();
        if database == "work" {
            worker.answer().unwrap();
            assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        } else {
            eventually("it waits for the waiter", async || {
                server
                    .sql("SELECT count(*) FROM pg_locks WHERE locktype='virtualxid' AND NOT granted")
                    .unwrap()
                    == "1"
            })
            .await;
            server
                .sql(&format!("SELECT pg_terminate_backend({})", worker.pid()))
                .unwrap();
        }
    }
    guard.release().await.unwrap();
    waiter.granted().await.0.release().await.unwrap();
}

/// A claim that nobody renews: the server ends its session, and says so to it.
async fn the_lease_is_kept_in_milliseconds() {
    let server = shared();
    let backend = PostgresBackend::connect(config(server.addr())).await.unwrap();
    for ms in [300, 1_500] {
        let name = name("lease");
        let mut asked = request(&name, spi::Mode::Exclusive);
        asked.ttl = Duration::from_millis(ms);
        let mut claim = backend.claim(&asked).await.unwrap();
        let other = client(server.addr()).await;
        let running = Stopwatch::start();
        let grant = claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
        let length = grant.lease.length.unwrap();
        assert!(length < asked.ttl && length > asked.ttl / 2, "{length:?}");
        let waiter = Waiter::of(other.lock(&name).unwrap());
        let (granted, at) = waiter.granted().await;
        let (took, ran) = (at - grant.lease.since, running.elapsed());
        assert!(took > grant.lease.length.unwrap(), "{took:?}");
        eprintln!("a lease of {ms} ms is followed after {took:?}");
        assert!(ran < asked.ttl + Duration::from_millis(700), "{took:?}, {ran:?}");
        let told = timeout(Duration::from_secs(1), claim.notified()).await;
        told.expect("the server says so");
        assert_eq!(claim.renew().await.unwrap(), Renewal::Lost(LossReason::Expired));
        granted.check().unwrap();
    }
}

async fn a_ttl_that_changes_is_kept_from_the_next_renewal() {
    let server = shared();
    let backend = PostgresBackend::connect(config(server.addr())).await.unwrap();
    let name = name("changes");
    let mut claim = backend
        .claim(&request(&name, spi::Mode::Exclusive))
        .await
        .unwrap();
    claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    let length = claim.set_ttl(Duration::from_millis(700)).unwrap().unwrap();
    assert!(length < Duration::from_millis(700));
    let Renewal::Held(lease) = claim.renew().await.unwrap() else {
        panic!("it is held");
    };
    assert_eq!(lease.length, Some(length));
    let other = client(server.addr()).await;
    let (granted, at) = Waiter::of(other.lock(&name).unwrap()).granted().await;
    let took = at - lease.since;
    assert!(took > length && took < Duration::from_secs(20), "{took:?}");
    granted.release().await.unwrap();
}

/// The server began to count with the grant. What proves it here is a later request than that of the wait.
async fn a_grant_after_a_long_wait_has_its_whole_lease() {
    let server = shared();
    let backend = PostgresBackend::connect(config(server.addr())).await.unwrap();
    let holder = client(server.addr()).await;
    let name = name("long");
    let held = holder.lock(&name).unwrap().acquire().await.unwrap();
    let mut asked = request(&name, spi::Mode::Exclusive);
    asked.ttl = Duration::from_secs(2);
    let mut claim = backend.claim(&asked).await.unwrap();
    assert!(claim.attempt(Duration::from_secs(1)).await.unwrap().is_none());
    sleep(asked.ttl * 2).await;
    let released = tokio::time::Instant::now();
    held.release().await.unwrap();
    claim.notified().await;
    let grant = claim
        .attempt(Duration::from_secs(1))
        .await
        .unwrap()
        .expect("its turn has come");
    assert!(
        grant.lease.since >= released,
        "it is proven by the request of the wait"
    );
    claim.release().await.unwrap();
}

/// A tenth of such waits hold the lock although they have failed.
async fn a_wait_that_meets_its_grant_is_withdrawn() {
    let server = private(&[]);
    let backend = PostgresBackend::connect(config(server.addr())).await.unwrap();
    let holder = PostgresBackend::connect(config(server.addr())).await.unwrap();
    for round in 0..150 {
        let mut held = holder.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
        held.attempt(Duration::ZERO)
            .await
            .unwrap()
            .expect("nobody has it");
        let mut claim = backend.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
        assert!(claim.attempt(Duration::from_secs(1)).await.unwrap().is_none());
        let spread = Duration::from_micros(fastrand::u64(..400));
        let (withdrawn, released) = tokio::join!(claim.release(), async {
            let until = std::time::Instant::now() + spread;
            while std::time::Instant::now() < until {
                tokio::task::yield_now().await;
            }
            held.release().await
        });
        withdrawn.unwrap();
        released.unwrap();
        assert_eq!(
            locks(&server),
            (0, 0),
            "round {round}: a wait that was withdrawn holds the lock"
        );
    }
    let sessions = server.sql("SELECT count(*) FROM pg_stat_activity WHERE application_name='lockkit'");
    assert_eq!(sessions.unwrap(), "4", "each withdrawal cost a session");
}

/// Polls an attempt so often, drops it, and withdraws the claim.
async fn an_attempt_dropped_after_each_poll_leaves_nothing() {
    let server = private(&[]);
    let backend = PostgresBackend::connect(config(server.addr())).await.unwrap();
    let by_hand = client(server.addr()).await;
    // It makes the tables, and leaves its session among the idle ones.
    let mut first = backend
        .claim(&request("first", spi::Mode::Exclusive))
        .await
        .unwrap();
    first.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    first.release().await.unwrap();
    let size = NonZeroU32::new(2).unwrap();
    for mode in [spi::Mode::Exclusive, spi::Mode::Shared, spi::Mode::Permits(size)] {
        for is_taken in [false, true] {
            let name = format!("{mode:?}");
            let guards = if is_taken {
                match mode {
                    spi::Mode::Permits(_) => {
                        let semaphore = by_hand.semaphore(&name, 2).unwrap();
                        vec![
                            semaphore.acquire().await.unwrap(),
                            semaphore.acquire().await.unwrap(),
                        ]
                    }
                    _ => vec![by_hand.lock(&name).unwrap().acquire().await.unwrap()],
                }
            } else {
                Vec::new()
            };
            let before = locks(&server);
            for polls in 1..12 {
                let mut claim = backend.claim(&request(&name, mode)).await.unwrap();
                {
                    let mut attempt = pin!(claim.attempt(Duration::from_secs(1)));
                    for _ in 0..polls {
                        let is_over =
                            std::future::poll_fn(|cx| Poll::Ready(attempt.as_mut().poll(cx).is_ready()))
                                .await;
                        if is_over {
                            break;
                        }
                        sleep(Duration::from_micros(fastrand::u64(..600))).await;
                    }
                }
                if polls % 2 == 0 {
                    // Nor does a release that is dropped.
                    let _ =
                        tokio::time::timeout(Duration::from_micros(fastrand::u64(..300)), claim.release())
                            .await;
                }
                claim.release().await.unwrap();
                assert_eq!(
                    locks(&server),
                    before,
                    "{mode:?}, taken: {is_taken}, dropped after {polls} polls"
                );
            }
            for guard in guards {
                guard.release().await.unwrap();
            }
        }
    }
}

async fn a_late_cancel_hits_no_later_claim() {
    let server = private(&[]);
    let backend = PostgresBackend::connect(config(server.addr())).await.unwrap();
    let holder = client(server.addr()).await;
    let held = holder.lock("held").unwrap().acquire().await.unwrap();
    for _ in 0..200 {
        let mut waits = backend
            .claim(&request("held", spi::Mode::Exclusive))
            .await
            .unwrap();
        assert!(waits.attempt(Duration::from_secs(1)).await.unwrap().is_none());
        waits.release().await.unwrap();
        // In the session that was withdrawn.
        let mut next = backend
            .claim(&request("free", spi::Mode::Exclusive))
            .await
            .unwrap();
        next.attempt(Duration::ZERO).await.unwrap().expect("it is free");
        next.release().await.unwrap();
    }
    held.release().await.unwrap();
    let failed = "SELECT count(*) FROM pg_stat_activity WHERE application_name='lockkit'";
    assert_eq!(server.sql(failed).unwrap(), "4", "each withdrawal cost a session");
}

async fn a_wait_that_an_operator_cancels_goes_on() {
    let server = private(&[]);
    let (client, other) = (client(server.addr()).await, client(server.addr()).await);
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(other.lock("a").unwrap());
    waits(&client, "a").await;
    let cancel = "SELECT pg_cancel_backend(pid) FROM pg_locks WHERE locktype='advisory' AND NOT granted";
    for _ in 0..5 {
        // Between two waits, there is nothing to cancel.
        eventually("a wait is cancelled", async || server.sql(cancel).unwrap() == "t").await;
        waits(&client, "a").await;
    }
    guard.release().await.unwrap();
    waiter.granted().await.0.release().await.unwrap();
    assert_eq!(locks(&server), (0, 0));
}

/// Waits for a lock once, and leaves the session that has waited among the idle ones.
async fn wait_once(backend: &PostgresBackend, holder: &LockClient, name: &str) {
    let held = holder.lock(name).unwrap().acquire().await.unwrap();
    let mut claim = backend.claim(&request(name, spi::Mode::Exclusive)).await.unwrap();
    assert!(claim.attempt(Duration::from_secs(1)).await.unwrap().is_none());
    held.release().await.unwrap();
    claim.notified().await;
    claim
        .attempt(Duration::from_secs(1))
        .await
        .unwrap()
        .expect("its turn has come");
    claim.release().await.unwrap();
}

/// A try would be answered before the holder releases, and the attempt over.
async fn who_waits_again_asks_only_once() {
    let server = shared();
    let backend = PostgresBackend::connect(config(server.addr())).await.unwrap();
    let holder = client(server.addr()).await;
    let name = name("again");
    wait_once(&backend, &holder, &name).await;
    let mut at_once = 0;
    for _ in 0..20 {
        let held = holder.lock(&name).unwrap().acquire().await.unwrap();
        let mut claim = backend
            .claim(&request(&name, spi::Mode::Exclusive))
            .await
            .unwrap();
        let (attempted, released) = tokio::join!(claim.attempt(Duration::from_secs(1)), async {
            sleep(Duration::from_millis(5)).await;
            held.release().await
        });
        released.unwrap();
        at_once += u32::from(attempted.unwrap().is_some());
        claim.release().await.unwrap();
    }
    assert!(at_once > 10, "only {at_once} of 20 grants came in one attempt");
}

/// It may have the lock, and draw its token.
async fn a_statement_that_does_not_wait_is_not_taken() {
    let server = private(&[]);
    let backend = PostgresBackend::connect(config(server.addr())).await.unwrap();
    let holder = client(server.addr()).await;
    wait_once(&backend, &holder, "a").await;
    let mut admin = session(&server);
    admin
        .sql("BEGIN; ALTER SEQUENCE lockkit.token INCREMENT BY 1024")
        .unwrap();
    let mut claim = backend.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
    let attempted =
        tokio::time::timeout(Duration::from_secs(2), claim.attempt(Duration::from_millis(100))).await;
    assert!(attempted.is_err(), "nobody else has it: {attempted:?}");
    assert_eq!(locks(&server), (1, 0));
    admin.sql("COMMIT").unwrap();
    claim
        .attempt(Duration::from_secs(1))
        .await
        .unwrap()
        .expect("it is free");
    claim.release().await.unwrap();
    assert_eq!(locks(&server), (0, 0));
}

async fn a_withdrawn_waiter_keeps_its_session() {
    let server = private(&[]);
    let (client, other) = (client(server.addr()).await, client(server.addr()).await);
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    let ids = "SELECT string_agg(pid::text, ' ' ORDER BY pid) FROM pg_stat_activity WHERE application_name='lockkit'";
    let mut before = String::new();
    for _ in 0..10 {
        let waiter = Waiter::of(other.lock("a").unwrap());
        waits(&client, "a").await;
        waiter.abort();
        eventually("it is withdrawn", async || locks(&server) == (1, 0)).await;
        let now = server.sql(ids).unwrap();
        assert!(before.is_empty() || before == now, "{before} became {now}");
        before = now;
    }
    guard.release().await.unwrap();
}

/// Nobody else can unlock in a session. So if nothing was locked, it is another session that has replied.
async fn an_unlock_that_finds_nothing_is_a_loss() {
    let other = relay(
        shared().addr(),
        "SELECT pg_advisory_unlock($1)",
        "SELECT $1::bigint IS NULL    ",
    )
    .await
    .unwrap();
    let mut config = config(other);
    config.sslmode = lockkit_postgres::SslMode::Disable;
    let client = connect(config).await.unwrap();
    let guard = client.lock(name("unlocked")).unwrap().acquire().await.unwrap();
    let error = guard.release().await.unwrap_err();
    assert!(error.is_lost(), "{error}");
}

/// The statement behind the unlock, which is to remove the row, fails.
async fn a_row_that_stays_hides_no_loss() {
    let server = private(&[]);
    let other = relay(
        server.addr(),
        "SELECT pg_advisory_unlock($1)",
        "SELECT $1::bigint IS NULL    ",
    );
    let (near, far) = (client(server.addr()).await, client(other.await.unwrap()).await);
    let (name, free) = ("a", "b");
    let guard = far.lock(name).unwrap().acquire().await.unwrap();
    let bystander = near.lock(free).unwrap().acquire().await.unwrap();
    for (name, guard) in [(name, &guard), (free, &bystander)] {
        assert_eq!(near.inspect(name).await.unwrap().holders[0].token, guard.token());
    }
    server
        .sql("REVOKE DELETE ON lockkit.holder FROM lockkit")
        .unwrap();
    let error = guard.release().await.unwrap_err();
    assert!(error.is_lost(), "{error}");
    bystander.release().await.unwrap();
}

/// By the next one.
async fn a_loss_that_a_dropped_release_found_is_told() {
    let other = relay(
        shared().addr(),
        "SELECT pg_advisory_unlock($1)",
        "SELECT $1::bigint IS NULL    ",
    );
    let backend = PostgresBackend::connect(config(other.await.unwrap()))
        .await
        .unwrap();
    for polls in 1..12 {
        let asked = request(&name("told"), spi::Mode::Exclusive);
        let mut claim = backend.claim(&asked).await.unwrap();
        claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
        let mut told = None;
        {
            let mut release = pin!(claim.release());
            for _ in 0..polls {
                let polled = std::future::poll_fn(|cx| Poll::Ready(release.as_mut().poll(cx))).await;
                if let Poll::Ready(released) = polled {
                    told = Some(released);
                    break;
                }
                sleep(Duration::from_micros(500)).await;
            }
        }
        let released = match told {
            Some(released) => released,
            None => claim.release().await,
        };
        assert!(
            released.as_ref().is_err_and(Error::is_lost),
            "after {polls} polls: {released:?}"
        );
    }
}

/// Another client makes the semaphore between the look at its permits and that at its size.
async fn a_size_that_was_made_meanwhile_is_no_taken_permit() {
    let server = private(&[]);
    cycle(&client(server.addr()).await, "a").await;
    server
        .sql(
            "CREATE FUNCTION public.made(bigint) RETURNS int LANGUAGE sql AS \
             $$INSERT INTO lockkit.semaphore VALUES ($1, 2) ON CONFLICT DO NOTHING; \
             SELECT permits FROM lockkit.semaphore WHERE key = $1$$",
        )
        .unwrap();
    let other = relay(
        server.addr(),
        "SELECT permits FROM lockkit.semaphore WHERE key = $1",
        "SELECT public.made($1)                              ",
    );
    let client = client(other.await.unwrap()).await;
    let permit = client.semaphore("s", 2).unwrap().try_acquire().await.unwrap();
    permit.expect("all are free").release().await.unwrap();
}

/// Also the first one, which shows the hold.
async fn a_renewal_in_another_session_is_a_loss() {
    let server = shared();
    let other = relay(
        server.addr(),
        "SELECT pg_backend_pid()\0",
        "SELECT 1 /* not ours */\0",
    );
    let backend = PostgresBackend::connect(config(other.await.unwrap()))
        .await
        .unwrap();
    let mut claim = backend
        .claim(&request(&name("another"), spi::Mode::Exclusive))
        .await
        .unwrap();
    assert!(claim.attempt(Duration::ZERO).await.unwrap().is_some());
    let renewed = claim.renew().await.unwrap();
    assert!(matches!(renewed, Renewal::Lost(_)), "{renewed:?}");
}

async fn a_newcomer_reads_behind_a_waiting_writer() {
    let server = shared();
    let (client, other) = (client(server.addr()).await, client(server.addr()).await);
    let name = name("modes");
    let lock = client.lock(&name).unwrap();
    let reads = lock.clone().shared().acquire().await.unwrap();
    let also = other.lock(&name).unwrap().shared();
    also.acquire().await.unwrap().release().await.unwrap();
    let writer = Waiter::of(lock);
    waits(&client, &name).await;
    assert!(
        also.try_acquire().await.unwrap().is_none(),
        "a waiting writer is passed over"
    );
    reads.release().await.unwrap();
    let alone = writer.granted().await.0;
    let reader = Waiter::of(also);
    waits(&client, &name).await;
    alone.release().await.unwrap();
    reader.granted().await.0.release().await.unwrap();
}

async fn a_hold_that_was_passed_on_keeps_the_last_of_its_tokens() {
    let backend = PostgresBackend::connect(config(shared().addr())).await.unwrap();
    let name = name("block");
    let mut asked = request(&name, spi::Mode::Exclusive);
    asked.tokens = NonZeroU32::new(8).unwrap();
    let mut claim = backend.claim(&asked).await.unwrap();
    let grant = claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    let (first, last) = (*grant.tokens.start(), *grant.tokens.end());
    assert_eq!(last, first + 7);
    claim.passed_on(FencingToken::new(first + 3));
    let again = claim.attempt(Duration::ZERO).await.unwrap().expect("its own");
    assert_eq!(
        again.tokens,
        first + 3..=last,
        "tokens beyond its block are others'"
    );
    claim.release().await.unwrap();
    // More than a block has are not to be had, and the next block begins behind them.
    asked.tokens = NonZeroU32::new(5_000).unwrap();
    let mut claim = backend.claim(&asked).await.unwrap();
    let grant = claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    assert_eq!(grant.tokens.end() - grant.tokens.start() + 1, 1_024);
    claim.release().await.unwrap();
    let next = claim.attempt(Duration::ZERO).await.unwrap().expect("it is free");
    assert!(next.tokens.start() > grant.tokens.end());
    claim.release().await.unwrap();
}

async fn a_holder_that_is_terminated_is_told_at_once() {
    let server = shared();
    let client = client(server.addr()).await;
    let mut took = Vec::new();
    for _ in 0..10 {
        let name = name("terminated");
        let guard = brief(&client, &name, Duration::from_secs(30))
            .acquire()
            .await
            .unwrap();
        assert_eq!(client.inspect(&name).await.unwrap().holders.len(), 1);
        let end = format!(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype='advisory' AND \
             (classid::bigint << 32 | objid::bigint) = {}",
            key(&name)
        );
        let began = Stopwatch::start();
        assert_eq!(server.sql(&end).unwrap(), "t");
        let reason = timeout(Duration::from_secs(10), guard.lost()).await.unwrap();
        took.push(began.elapsed());
        assert_eq!(reason, LossReason::Revoked);
        assert!(guard.release().await.unwrap_err().is_lost());
    }
    took.sort_unstable();
    eprintln!("a terminated holder is told after {took:?}");
    assert!(took[5] < Duration::from_millis(100), "{took:?}");
}

async fn a_hold_is_ended_by_its_token_and_no_other() {
    let server = shared();
    let (client, other) = (client(server.addr()).await, client(server.addr()).await);
    let name = name("by token");
    let lock = client.lock(&name).unwrap();
    let first = lock.acquire().await.unwrap();
    let token = first.token();
    assert_eq!(other.inspect(&name).await.unwrap().holders[0].token, token);
    first.release().await.unwrap();
    // In the same session, and not shown yet.
    let second = lock.acquire().await.unwrap();
    assert!(
        !other.revoke_by_force(&name, token).await.unwrap(),
        "a token of an earlier hold"
    );
    second.check().unwrap();
    assert!(other.revoke_by_force(&name, second.token()).await.unwrap());
    assert_eq!(
        timeout(Duration::from_secs(10), second.lost()).await.unwrap(),
        LossReason::Revoked
    );
    assert!(!other.revoke_by_force(&name, second.token()).await.unwrap());
    let semaphore = client.semaphore(&name, 3).unwrap();
    let permits = [
        semaphore.acquire().await.unwrap(),
        semaphore.acquire().await.unwrap(),
    ];
    let ended = other
        .revoke_permit_by_force(&name, permits[0].token())
        .await
        .unwrap();
    assert!(ended);
    assert_eq!(
        timeout(Duration::from_secs(10), permits[0].lost()).await.unwrap(),
        LossReason::Revoked
    );
    permits[1].check().unwrap();
}

/// A request whose reply is lost may have done its work.
async fn a_revocation_without_a_reply_is_not_denied() {
    let server = shared();
    let proxy = Proxy::start(server.addr()).unwrap();
    let (holder, operator) = (client(server.addr()).await, client(proxy.addr()).await);
    let name = name("guessed");
    let guard = holder.lock(&name).unwrap().acquire().await.unwrap();
    let token = guard.token();
    eventually("it is shown", async || {
        let shown = operator.inspect(&name).await.unwrap();
        shown.holders.iter().any(|holder| holder.token == token)
    })
    .await;
    // The request waits for that row.
    let mut other = session(server);
    other.sql("BEGIN").unwrap();
    let row = format!(
        "SELECT FROM lockkit.holder WHERE token = {} FOR UPDATE",
        token.get()
    );
    other.sql(&row).unwrap();
    let ending = tokio::spawn({
        let name = name.clone();
        async move { operator.revoke_by_force(&name, token).await }
    });
    eventually("it is at the server", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity \
                       WHERE wait_event_type = 'Lock' AND query LIKE '%FOR UPDATE OF h%'";
        server.sql(waiting).unwrap() != "0"
    })
    .await;
    proxy.set(Mode::DropReplies);
    other.sql("ROLLBACK").unwrap();
    let lost = timeout(Duration::from_mins(1), guard.lost()).await;
    assert_eq!(lost.unwrap(), LossReason::Revoked);
    eventually("its reply is lost", async || proxy.counts().lost.bytes > 0).await;
    proxy.set(Mode::Pass);
    let said = ending.await.unwrap();
    assert!(
        said.as_ref().is_err_and(Error::is_transient),
        "it was ended, and {said:?} said"
    );
}

async fn a_label_is_shown_whole() {
    let client = client(shared().addr()).await;
    let name = name("labelled");
    let label = format!("ö'\\\" {}", "é".repeat(80));
    let options = AcquireOptions::new().label(label.as_str());
    let guard = client
        .lock(&name)
        .unwrap()
        .with_options(options)
        .acquire()
        .await
        .unwrap();
    let state = client.inspect(&name).await.unwrap();
    assert_eq!(state.holders[0].label.as_deref(), Some(label.as_str()));
    assert!(state.holders[0].since.is_some());
    guard.release().await.unwrap();
}

/// A name is kept as bytes, and may have any.
async fn a_label_that_no_text_can_have_is_refused() {
    let client = client(shared().addr()).await;
    let name = format!("{}\0", name("nul"));
    let lock = client.lock(&name).unwrap();
    let labelled = lock.clone().with_options(AcquireOptions::new().label("a\0b"));
    for answer in [
        labelled.try_acquire().await.map(drop),
        labelled.acquire().await.map(drop),
    ] {
        let error = answer.unwrap_err();
        let refused = matches!(error, Error::InvalidOptions { option: "label", .. });
        assert!(refused && error.to_string().contains("NUL"), "{error}");
    }
    let guard = lock.acquire().await.unwrap();
    assert_eq!(
        client.inspect(&name).await.unwrap().holders[0].token,
        guard.token()
    );
    assert_eq!(listed(&client, &name).await.unwrap(), 1);
    guard.release().await.unwrap();
}

async fn a_label_beyond_the_databases_encoding_is_shown_escaped() {
    let server = private(&[]);
    server
        .sql("CREATE DATABASE latin OWNER lockkit ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
        .unwrap();
    let url = server.url();
    let (url, _) = url.rsplit_once('/').unwrap();
    let config = PostgresConfig::new(format!("{url}/latin"));
    let client = connect(config).await.unwrap();
    for (label, shown) in [("é", "é"), ("é 東", "\\u{e9} \\u{6771}")] {
        let options = AcquireOptions::new().label(label);
        let lock = client.lock("a").unwrap().with_options(options);
        let guard = lock.acquire().await.unwrap();
        let state = client.inspect("a").await.unwrap();
        assert_eq!(state.holders[0].label.as_deref(), Some(shown));
        assert_eq!(state.holders[0].token, guard.token());
        assert_eq!(listed(&client, "a").await.unwrap(), 1);
        assert!(client.revoke_by_force("a", guard.token()).await.unwrap());
    }
}

/// Its client is far away, so that the request that shows it takes longer than the list.
async fn a_hold_that_is_shown_late_is_listed() {
    let server = shared();
    let proxy = Proxy::start(server.addr()).unwrap();
    let (far, near) = (client(proxy.addr()).await, client(server.addr()).await);
    let name = name("far");
    cycle(&far, &name).await;
    let (requests, replies) = (Duration::from_millis(400), Duration::ZERO);
    proxy.set(Mode::Delay { requests, replies });
    let guard = far.lock(&name).unwrap().acquire().await.unwrap();
    assert_eq!(listed(&near, &name).await.unwrap(), 1);
    // What is shown, and what nobody holds, delays no list.
    proxy.set(Mode::Pass);
    let began = Stopwatch::start();
    assert_eq!(listed(&near, &name).await.unwrap(), 1);
    guard.release().await.unwrap();
    assert_eq!(listed(&near, &name).await.unwrap(), 0);
    assert!(
        began.elapsed() < Duration::from_millis(900),
        "{:?}",
        began.elapsed()
    );
}

/// A page has 16 names. The last one may be full.
async fn a_list_goes_on_over_holds_that_end() {
    let client = client(shared().addr()).await;
    let name = name("pages");
    for count in [15, 16, 17, 32] {
        let prefix = format!("{name}/{count}/");
        let mut guards = Vec::new();
        for n in 0..count {
            let lock = client.lock(format!("{prefix}{n:02}")).unwrap();
            guards.push(lock.acquire().await.unwrap());
        }
        assert_eq!(listed(&client, &prefix).await.unwrap(), count);
        let mut list = client.list(&prefix).unwrap();
        list.next().await.unwrap().unwrap();
        for guard in guards.drain(count - 2..) {
            guard.release().await.unwrap();
        }
        let mut seen = 1;
        while let Some(lock) = list.next().await {
            lock.unwrap();
            seen += 1;
        }
        assert!((count - 2..=count).contains(&seen), "{seen} of {count}");
        for guard in guards {
            guard.release().await.unwrap();
        }
    }
}

/// The first look at its size is from before it was raised.
async fn a_size_that_changes_meanwhile_hides_no_permit() {
    let server = private(&[]);
    let semaphore = client(server.addr()).await.semaphore("s", 2).unwrap();
    let _permits = [
        semaphore.acquire().await.unwrap(),
        semaphore.acquire().await.unwrap(),
    ];
    for statement in [
        "CREATE SEQUENCE public.looks",
        "GRANT USAGE ON SEQUENCE public.looks TO PUBLIC",
        "CREATE FUNCTION public.size_of(bigint) RETURNS int LANGUAGE sql \
         AS $$SELECT least(nextval('public.looks'), 2)::int$$",
    ] {
        server.sql(statement).unwrap();
    }
    let other = relay(
        server.addr(),
        "SELECT permits FROM lockkit.semaphore WHERE key = $1",
        "SELECT public.size_of($1)                           ",
    );
    let looks = client(other.await.unwrap()).await;
    let seen = looks.inspect_semaphore("s").await.unwrap();
    assert_eq!(seen.holders.len(), 2, "{seen:?}");
}

/// Another has the right to, and touches the permits.
async fn a_size_is_changed_by_one_at_a_time() {
    let server = shared();
    let client = client(server.addr()).await;
    let name = name("sizes");
    let first = client.semaphore(&name, 3).unwrap();
    first.acquire().await.unwrap().release().await.unwrap();
    let right = format!(
        "('x' || left(encode(sha256(convert_to('lockkit/size#{name}', 'UTF8')), 'hex'), 16))::bit(64)::bigint"
    );
    let mut by_hand = session(server);
    by_hand.sql(&format!("SELECT pg_advisory_lock({right})")).unwrap();
    let second = client.semaphore(&name, 2).unwrap();
    let error = second.try_acquire().await.unwrap_err();
    assert!(
        error.is_transient() && chain(&error).contains("others change that"),
        "{}",
        chain(&error)
    );
    first.acquire().await.unwrap().release().await.unwrap();
    by_hand
        .sql(&format!("SELECT pg_advisory_unlock({right})"))
        .unwrap();
    second.acquire().await.unwrap().release().await.unwrap();
}

async fn a_locked_table_of_holders_stops_nobody() {
    let server = private(&[]);
    let first = client(server.addr()).await;
    let shown = first.lock("shown").unwrap().acquire().await.unwrap();
    assert_eq!(
        first.inspect("shown").await.unwrap().holders[0].token,
        shown.token()
    );
    let mut admin = session(&server);
    admin.sql("BEGIN; LOCK TABLE lockkit.holder").unwrap();
    // A hold that cannot be shown, with a lease that is over soon.
    let guard = brief(&first, "a", Duration::from_secs(5))
        .acquire()
        .await
        .unwrap();
    sleep(Duration::from_secs(12)).await;
    guard.check().unwrap();
    let began = Stopwatch::start();
    guard.release().await.unwrap();
    shown.release().await.unwrap();
    let second = client(server.addr()).await;
    cycle(&second, "shown").await;
    let guard = brief(&second, "a", Duration::from_secs(1))
        .acquire()
        .await
        .unwrap();
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let looked = second.inspect("a").await.unwrap_err();
    assert!(looked.is_transient(), "{looked:?}");
    admin.sql("COMMIT").unwrap();
    eventually("a renewal shows it", async || {
        let state = second.inspect("a").await.unwrap();
        state.holders[0].token == guard.token()
    })
    .await;
}

/// Others wait for tables for a tenth of their lease.
async fn who_waits_has_no_time_limit_of_the_servers() {
    let server = private(&[]);
    let (holder, other) = (client(server.addr()).await, client(server.addr()).await);
    let lock = brief(&other, "a", Duration::from_millis(500));
    let semaphore = other
        .semaphore("a", 1)
        .unwrap()
        .with_options(lock.options().clone());
    let held = (
        holder.lock("a").unwrap().acquire().await.unwrap(),
        holder.semaphore("a", 1).unwrap().acquire().await.unwrap(),
    );
    let waiting =
        "SELECT pid, waitstart FROM pg_locks WHERE locktype = 'advisory' AND NOT granted ORDER BY pid";
    let looking = Waiter::of(semaphore.clone());
    eventually("it is the head", async || {
        holder.inspect_semaphore("a").await.unwrap().waiters == Some(1)
    })
    .await;
    let waiters = [
        Waiter::of(lock.clone()),
        Waiter::of(lock.shared()),
        Waiter::of(semaphore),
    ];
    let waits = || server.sql(waiting).unwrap();
    eventually("all wait", async || waits().lines().count() == 2).await;
    let before = waits();
    sleep(Duration::from_secs(2)).await;
    assert_eq!(waits(), before, "somebody has lost its place");
    held.0.release().await.unwrap();
    held.1.release().await.unwrap();
    // In the order in which they came, which is nobody's promise here.
    let cycles = [looking].into_iter().chain(waiters);
    join_all(cycles.map(async |waiter| waiter.granted().await.0.release().await.unwrap())).await;
}

async fn a_hold_by_hand_is_shown_without_a_token() {
    let server = shared();
    let client = client(server.addr()).await;
    let name = name("shown");
    let mut by_hand = session(server);
    by_hand
        .sql(&format!("SELECT pg_advisory_lock({})", key(&name)))
        .unwrap();
    let state = client.inspect(&name).await.unwrap();
    assert_eq!(state.holders.len(), 1, "{state:?}");
    assert_eq!(state.holders[0].token.get(), 0);
    assert_eq!(state.holders[0].label.as_deref(), Some("testbed"));
}

async fn a_hold_that_cannot_be_shown_is_as_good_as_any() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    let guard = brief(&client, "a", Duration::from_secs(5))
        .acquire()
        .await
        .unwrap();
    server
        .sql("REVOKE INSERT, UPDATE ON lockkit.holder FROM lockkit")
        .unwrap();
    let lock = brief(&client, "b", Duration::from_secs(5));
    let other = lock.acquire().await.unwrap();
    sleep(Duration::from_secs(12)).await;
    guard.check().unwrap();
    other.check().unwrap();
    other.release().await.unwrap();
    guard.release().await.unwrap();
    eventually("both are released", async || locks(&server) == (0, 0)).await;
}

async fn sessions_are_kept_and_closed() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    let count = || {
        server
            .sql("SELECT count(*) FROM pg_stat_activity WHERE application_name='lockkit'")
            .unwrap()
    };
    for _ in 0..50 {
        cycle(&client, "a").await;
    }
    assert_eq!(count(), "2", "one for locks, and one that holds none");
    // The server ends what nobody uses for a ttl. Nobody is given such a session.
    let lock = brief(&client, "a", Duration::from_millis(300));
    lock.acquire().await.unwrap().release().await.unwrap();
    sleep(Duration::from_millis(600)).await;
    for _ in 0..3 {
        lock.try_acquire()
            .await
            .unwrap()
            .expect("it is free")
            .release()
            .await
            .unwrap();
    }
    client.close(Duration::from_secs(5)).await.unwrap();
    eventually("all are closed", async || count() == "0").await;
}

async fn a_first_burst_makes_the_tables_over_one_connection() {
    const MANY: u64 = 20;
    let server = private(&[]);
    let proxy = Proxy::start(server.addr()).unwrap();
    let client = client(proxy.addr()).await;
    let all = join_all((0..MANY).map(|n| {
        let lock = client.lock(n.to_string()).unwrap();
        async move { lock.acquire().await.unwrap() }
    }));
    let guards = all.await;
    // One more that connected, and one for the tables.
    assert_eq!(proxy.counts().connections, MANY + 2);
    for guard in guards {
        guard.release().await.unwrap();
    }
}

/// The one that makes the tables is dropped meanwhile, or nobody polls it any more.
async fn who_stops_while_it_makes_the_tables_is_in_nobodys_way() {
    for is_dropped in [true, false] {
        let server = private(&[]);
        let backend = PostgresBackend::connect(config(server.addr())).await.unwrap();
        let mut by_hand = session(&server);
        by_hand.sql("SELECT pg_advisory_lock(1819242347, 1)").unwrap();
        let mut claim = backend.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
        let mut first = claim.attempt(Duration::ZERO);
        let waiting = "SELECT count(*) FROM pg_locks WHERE locktype='advisory' AND NOT granted";
        tokio::select! {
            outcome = &mut first => panic!("it was to wait: {outcome:?}"),
            () = eventually("it waits", async || server.sql(waiting).unwrap() == "1") => {}
        }
        let first = (!is_dropped).then_some(first);
        by_hand.sql("SELECT pg_advisory_unlock(1819242347, 1)").unwrap();
        let mut other = backend.claim(&request("b", spi::Mode::Exclusive)).await.unwrap();
        let granted = timeout(Duration::from_secs(10), other.attempt(Duration::ZERO)).await;
        let granted = granted.expect("the tables are made").unwrap();
        assert!(granted.is_some(), "dropped: {is_dropped}");
        other.release().await.unwrap();
        drop(first);
    }
}

/// Nobody polls the one that makes the tables any more, and its connection is silent for ever.
async fn who_makes_the_tables_at_a_silent_server_gives_up() {
    let server = private(&[]);
    let proxy = Proxy::start(server.addr()).unwrap();
    let backend = PostgresBackend::connect(config(proxy.addr())).await.unwrap();
    proxy.set(Mode::HalfOpen);
    proxy.set(Mode::Pass);
    let mut claim = backend.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
    let mut first = claim.attempt(Duration::ZERO);
    tokio::select! {
        outcome = &mut first => panic!("nobody replies: {outcome:?}"),
        () = eventually("it asks", async || proxy.counts().lost.bytes > 0) => {}
    }
    let mut other = backend.claim(&request("b", spi::Mode::Exclusive)).await.unwrap();
    let granted = timeout(Duration::from_secs(40), other.attempt(Duration::ZERO)).await;
    let granted = granted.expect("it takes another connection").unwrap();
    assert!(granted.is_some());
    other.release().await.unwrap();
    drop(first);
}

/// Nobody polls it any more, and its connection is silent for ever.
async fn an_inspection_over_a_dead_connection_stops_no_other() {
    let server = private(&[]);
    let proxy = Proxy::start(server.addr()).unwrap();
    let client = client(proxy.addr()).await;
    assert!(client.inspect("a").await.unwrap().is_free());
    proxy.set(Mode::HalfOpen);
    proxy.set(Mode::Pass);
    let mut forgotten = pin!(client.inspect("a"));
    tokio::select! {
        seen = &mut forgotten => panic!("nobody replies: {seen:?}"),
        () = eventually("it asks", async || proxy.counts().lost.bytes > 0) => {}
    }
    let others = async {
        loop {
            match client.inspect("a").await {
                Ok(seen) => return seen,
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    };
    let seen = timeout(Duration::from_mins(1), others).await;
    assert!(seen.expect("they take another connection").is_free());
}

/// A client has as many connections as it may have, and all of them are idle. They are about to expire.
async fn idle_sessions_that_are_closed_are_in_nobodys_way() {
    const MANY: usize = 32;
    let server = private(&[]);
    let mut config = config(server.addr());
    config.max_connections = u32::try_from(MANY).unwrap();
    let client = connect(config).await.unwrap();
    let began = Instant::now();
    let ttl = Duration::from_secs(9);
    let options = AcquireOptions::new().ttl(ttl).renew(false);
    let lock = |n: usize| client.lock(n.to_string()).unwrap().with_options(options.clone());
    let interval = Duration::from_secs(5);
    for round in 1..=4_u32 {
        // A second before the idle sessions are looked at, and again when they are looked at next.
        let due = began + interval * (2 * round - 1);
        sleep_until(due - Duration::from_secs(1)).await;
        let all = join_all((0..MANY).map(|n| {
            let lock = lock(n);
            async move { lock.acquire().await.unwrap() }
        }));
        for guard in all.await {
            guard.release().await.unwrap();
        }
        sleep_until(due + interval - Duration::from_millis(4)).await;
        let mut held = Vec::new();
        for n in 0..MANY {
            match lock(n).try_acquire().await {
                Ok(guard) => held.push(guard.unwrap()),
                Err(error) => panic!("round {round}: {n} are held: {}", chain(&error)),
            }
        }
    }
}

/// All connections are the client's, wherever its locks are used.
async fn another_runtime_that_ends_takes_no_connection_along() {
    let client = client(shared().addr()).await;
    let name = name("runtimes");
    let (lock, other) = (
        client.lock(&name).unwrap(),
        client.lock(format!("{name}/b")).unwrap(),
    );
    let guard = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            other.acquire().await.unwrap().release().await.unwrap();
            lock.acquire().await.unwrap()
        })
    })
    .await
    .unwrap();
    guard.renew().await.unwrap();
    guard.release().await.unwrap();
    cycle(&client, &format!("{name}/b")).await;
}

/// It was connected on one runtime, which has ended, and its client lives on another.
async fn a_backend_that_outlives_its_runtime_says_so() {
    let addr = shared().addr();
    let backend = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(PostgresBackend::connect(config(addr))).unwrap()
    });
    let client = LockClient::new(backend.join().unwrap());
    let (name, limit) = (name("outlived"), Duration::from_secs(5));
    let lock = client.lock(&name).unwrap();
    let tried = lock.try_acquire().await;
    let waited = timeout(limit, lock.acquire()).await.expect("an answer");
    let seen = timeout(limit, client.inspect(&name)).await.expect("an answer");
    for answer in [tried.map(drop), waited.map(drop), seen.map(drop)] {
        let error = answer.unwrap_err();
        assert!(
            matches!(error, Error::Backend { transient: false, .. }) && chain(&error).contains("runtime"),
            "{}",
            chain(&error)
        );
    }
}
