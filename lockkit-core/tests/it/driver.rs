//! The driver's promises, on paused time and the memory backend.

use std::{sync::Arc, task::Poll, time::Duration};

use lockkit_core::{
    AcquireOptions, DistributedLock, DistributedLockExt, Error, Instant, LockClient, LossReason,
    MemoryBackend, ReentrantLock, ReentrantOwner, RunError, acquire_all, memory::FaultPoint,
};

use crate::probe::Probe;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn client() -> (MemoryBackend, LockClient) {
    let backend = MemoryBackend::new();
    let client = LockClient::new(backend.clone());
    (backend, client)
}

#[tokio::test(start_paused = true)]
async fn a_lock_is_held_by_one_and_its_tokens_rise() {
    let (_, client) = client();
    let lock = client.lock("a").unwrap();
    let mut last = 0;
    for _ in 0..100 {
        let guard = lock.acquire().await.unwrap();
        assert!(guard.is_held());
        assert!(guard.token().get() > last);
        last = guard.token().get();
        assert!(lock.try_acquire().await.unwrap().is_none(), "not re-entrant");
        let other = client
            .lock("b")
            .unwrap()
            .try_acquire()
            .await
            .unwrap()
            .expect("other names are independent");
        other.release().await.unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_for_as_long_as_the_guard_lives() {
    let (_, client) = client();
    let other = client.lock("a").unwrap();
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    let first_end = guard.valid_until().unwrap();
    tokio::time::sleep(300 * SECOND).await;
    assert!(guard.is_held());
    assert!(guard.valid_until().unwrap() > first_end + 200 * SECOND);
    assert!(other.try_acquire().await.unwrap().is_none());
    drop(guard);
    other
        .acquire_timeout(SECOND)
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_renewal_the_lease_ends_by_the_clock_and_is_told() {
    let (_, client) = client();
    let lock = client
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(SECOND).renew(false));
    let guard = lock.acquire().await.unwrap();
    let started = Instant::now();
    assert_eq!(guard.lost().await, LossReason::Expired);
    let took = started.elapsed();
    assert!(took <= SECOND && took > 900 * MS, "{took:?}");
    assert!(!guard.is_held());
    assert!(guard.check().unwrap_err().is_lost());
    assert_eq!(
        guard.lost().await,
        LossReason::Expired,
        "late subscribers get it at once"
    );
    assert!(guard.release().await.unwrap_err().is_lost());
    lock.acquire_timeout(SECOND)
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_hand_made_renewal_extends_the_lease() {
    let (_, client) = client();
    let lock = client
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(SECOND).renew(false));
    let guard = lock.acquire().await.unwrap();
    for _ in 0..10 {
        tokio::time::sleep(700 * MS).await;
        guard.renew().await.unwrap();
    }
    assert!(guard.is_held());
    tokio::time::sleep(1_100 * MS).await;
    assert!(guard.renew().await.unwrap_err().is_lost());
}

#[tokio::test(start_paused = true)]
async fn late_renewal_reply_revives_nothing() {
    let (backend, client) = client();
    let lock = client
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(SECOND));
    let guard = lock.acquire().await.unwrap();
    backend.delay(FaultPoint::Renew, 3 * SECOND);
    let started = Instant::now();
    assert_eq!(guard.lost().await, LossReason::Expired);
    assert!(started.elapsed() <= SECOND, "{:?}", started.elapsed());
    tokio::time::sleep(10 * SECOND).await;
    assert!(!guard.is_held(), "lost never becomes held again");
}

#[tokio::test(start_paused = true)]
async fn failing_renewals_warn_first_and_recover() {
    let (backend, client) = client();
    let lock = client
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(3 * SECOND));
    let guard = lock.acquire().await.unwrap();
    backend.fail_next(FaultPoint::Renew, 3);
    let left = guard.renewal_failing().await;
    assert!(left > SECOND && left < 2 * SECOND + 10 * MS, "{left:?}");
    tokio::time::sleep(60 * SECOND).await;
    assert!(guard.is_held(), "it recovered");
    assert!(
        poll_once(guard.renewal_failing()).is_pending(),
        "the warning was taken back"
    );
    backend.fail_next(FaultPoint::Renew, u32::MAX);
    assert_eq!(guard.lost().await, LossReason::Expired);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_without_an_answer_warns_before_the_end() {
    let (backend, client) = client();
    let lock = client
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(SECOND));
    let guard = lock.acquire().await.unwrap();
    assert_eq!(guard.lease_length(), Some(SECOND));
    // Its op_timeout is longer than the lease.
    backend.delay(FaultPoint::Renew, 800 * MS);
    let granted_until = guard.valid_until().unwrap();
    let left = guard.renewal_failing().await;
    assert!(left > 110 * MS && left <= SECOND / 8, "{left:?}");
    assert_eq!(
        guard.valid_until(),
        Some(granted_until),
        "the lease is the first one"
    );
    backend.delay(FaultPoint::Renew, 400 * MS);
    assert_eq!(guard.lost().await, LossReason::Expired);

    let guard = lock.acquire().await.unwrap();
    let granted_until = guard.valid_until();
    tokio::time::sleep(900 * MS).await;
    assert!(guard.valid_until() > granted_until, "an answer in time renews it");
    let length = guard.lease_length().unwrap();
    assert!(length > 500 * MS && length <= SECOND, "{length:?}");
    assert!(
        poll_once(guard.renewal_failing()).is_pending(),
        "and warns of nothing"
    );
}

/// The worker has no claim to renew it with.
#[tokio::test(start_paused = true)]
async fn a_forgotten_renewal_warns_before_the_end() {
    for sets_ttl in [false, true] {
        let (backend, client) = client();
        let lock = client
            .lock("a")
            .unwrap()
            .with_options(AcquireOptions::new().ttl(SECOND));
        let guard = lock.acquire().await.unwrap();
        backend.delay(FaultPoint::Renew, 10 * MS);
        let mut forgotten = Box::pin(async {
            if sets_ttl {
                guard.set_ttl(2 * SECOND).await
            } else {
                guard.renew().await
            }
        });
        assert!(poll_once(&mut forgotten).is_pending());
        let left = guard.renewal_failing().await;
        assert!(left > 110 * MS && left <= SECOND / 8, "{left:?}");
        forgotten.await.unwrap();
        guard.check().unwrap();
    }
}

/// Polls a future once.
fn poll_once<F: Future + Unpin>(mut future: F) -> Poll<F::Output> {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    std::pin::Pin::new(&mut future).poll(&mut cx)
}

#[tokio::test(start_paused = true)]
async fn an_adopted_hold_is_released_without_asking_the_worker() {
    let (_, client) = client();
    let guard = client.lock("n").unwrap().acquire().await.unwrap();
    // By now the worker has its claim, and waits for hints.
    tokio::time::sleep(SECOND).await;
    let released = poll_once(Box::pin(guard.release()));
    assert!(matches!(released, Poll::Ready(Ok(()))), "{released:?}");
}

#[tokio::test(start_paused = true)]
async fn revocation_is_told_at_once() {
    let (backend, client) = client();
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    let lost = guard.lost();
    tokio::time::sleep(SECOND).await;
    let started = Instant::now();
    assert!(backend.revoke("a"));
    assert_eq!(lost.await, LossReason::Revoked);
    assert!(started.elapsed() < 10 * MS);
    let again = client.lock("a").unwrap().acquire_timeout(SECOND).await.unwrap();
    assert!(guard.release().await.unwrap_err().is_lost());
    assert!(again.is_held(), "a stale guard harms nobody");
}

#[tokio::test(start_paused = true)]
async fn hand_off_is_in_order_and_goes_back_to_the_server_in_between() {
    let (_, client) = client();
    let lock = client
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().local_handoffs(3));
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let first = lock.acquire().await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..20 {
        let (lock, order) = (lock.clone(), order.clone());
        tasks.spawn(async move {
            let guard = lock.acquire().await.unwrap();
            order.lock().unwrap().push((n, guard.token()));
            tokio::task::yield_now().await;
            guard.release().await.unwrap();
        });
        tokio::task::yield_now().await;
    }
    first.release().await.unwrap();
    tasks.join_all().await;
    let order = order.lock().unwrap();
    assert!(order.iter().map(|(n, _)| *n).eq(0..20), "{order:?}");
    assert!(order.is_sorted_by(|a, b| a.1 < b.1), "{order:?}");
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_is_handed_to_a_waiter_that_never_looks_lapses() {
    let (_, client) = client();
    let lock = client
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(SECOND));
    let first = lock.acquire().await.unwrap();
    let mut asleep = Box::pin(lock.acquire());
    assert!(poll_once(&mut asleep).is_pending());
    let awake = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await.unwrap() }
    });
    tokio::task::yield_now().await;
    let token = first.token();
    first.release().await.unwrap();
    let started = Instant::now();
    let guard = awake.await.unwrap();
    assert!(started.elapsed() <= SECOND + 100 * MS, "{:?}", started.elapsed());
    assert!(guard.token() > token);
    guard.release().await.unwrap();
    asleep.await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn with_lock_runs_releases_and_stops_at_a_loss() {
    let (backend, client) = client();
    let lock: Arc<dyn DistributedLock> = Arc::new(client.lock("a").unwrap());
    assert!(
        lock.with_lock(|held| async move { held.is_held() })
            .await
            .unwrap()
    );
    let body = lock.with_lock(|_| async {
        backend.revoke("a");
        tokio::time::sleep(SECOND).await;
        panic!("the body must be dropped at its await");
    });
    let outcome: Result<(), RunError<()>> = body.await;
    let stopped = outcome.unwrap_err();
    assert!(stopped.error.is_lost() && stopped.output.is_none());
    assert!(lock.try_acquire().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn all_or_none_in_one_order_within_one_deadline() {
    let (_, client) = client();
    let (a, b, c) = (
        client.lock("a").unwrap(),
        client.lock("b").unwrap(),
        client.lock("c").unwrap(),
    );
    let set = acquire_all(&[&c, &a, &b], &AcquireOptions::new()).await.unwrap();
    let names: Vec<_> = set.guards().iter().map(|g| g.name().to_string()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    set.check().unwrap();
    set.release().await.unwrap();
    let err = acquire_all(&[&a, &b, &a], &AcquireOptions::new())
        .await
        .unwrap_err();
    assert!(matches!(err, Error::InvalidOptions { .. }), "{err}");

    let in_the_way = b.acquire().await.unwrap();
    let started = Instant::now();
    let err = acquire_all(&[&a, &b, &c], &AcquireOptions::new().wait(200 * MS))
        .await
        .unwrap_err();
    assert!(err.is_timeout(), "{err}");
    assert!(started.elapsed() < 500 * MS);
    assert!(a.try_acquire().await.unwrap().is_some(), "nothing stays held");
    drop(in_the_way);
}

#[tokio::test(start_paused = true)]
async fn one_owner_nests_and_others_wait() {
    let (_, client) = client();
    let lock = ReentrantLock::new(client.lock("a").unwrap());
    let (me, you) = (ReentrantOwner::new(), ReentrantOwner::new());
    let outer = lock.acquire(&me).await.unwrap();
    let inner = me
        .scope(async { lock.acquire(&ReentrantOwner::current().unwrap()).await.unwrap() })
        .await;
    assert_eq!(outer.hold_count(), 2);
    assert!(lock.try_acquire(&you).await.unwrap().is_none());
    outer.release().await.unwrap();
    assert!(inner.is_held());
    inner.release().await.unwrap();
    let both = tokio::join!(lock.acquire(&you), lock.acquire(&you));
    let (one, two) = (both.0.unwrap(), both.1.unwrap());
    assert_eq!(one.token(), two.token(), "two tasks of one owner share one hold");
}

#[tokio::test(start_paused = true)]
async fn a_locks_own_invalid_options_are_refused_at_every_use() {
    let (_, client) = client();
    for options in [
        AcquireOptions::new().wait(Duration::MAX),
        AcquireOptions::new().ttl(Duration::ZERO),
        AcquireOptions::new().ttl(Duration::MAX),
        AcquireOptions::new().op_timeout(Duration::ZERO),
    ] {
        let lock = client.lock("a").unwrap().with_options(options);
        let refused = |outcome: Result<(), Error>| matches!(outcome, Err(Error::InvalidOptions { .. }));
        assert!(refused(lock.acquire().await.map(drop)));
        assert!(refused(
            acquire_all(&[&lock], &AcquireOptions::new()).await.map(drop)
        ));
        assert!(refused(
            ReentrantLock::new(lock)
                .acquire(&ReentrantOwner::new())
                .await
                .map(drop)
        ));
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_an_error_and_never_none() {
    let (backend, client) = client();
    let lock = client.lock("a").unwrap();
    backend.fail_next(FaultPoint::Attempt, u32::MAX);
    assert!(lock.try_acquire().await.unwrap_err().is_transient());
    let err = lock.acquire_timeout(SECOND).await.unwrap_err();
    assert!(err.is_transient() && !err.is_timeout(), "{err}");
    backend.fail_next(FaultPoint::Attempt, 3);
    lock.acquire().await.unwrap().release().await.unwrap();
    backend.lose_replies(FaultPoint::Attempt, 1);
    let guard = lock.acquire().await.unwrap();
    assert!(
        guard.is_held(),
        "an attempt of unknown outcome is repeated on the same claim"
    );
    assert!(lock.acquire_timeout(100 * MS).await.unwrap_err().is_timeout());
}

#[tokio::test(start_paused = true)]
async fn close_releases_what_is_held_and_turns_waiters_away() {
    let (backend, client) = client();
    let lock = client.lock("a").unwrap();
    let guard = lock.acquire().await.unwrap();
    let waiter = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await }
    });
    tokio::task::yield_now().await;
    client.close(SECOND).await.unwrap();
    assert_eq!(guard.lost().await, LossReason::Disconnected);
    assert!(matches!(waiter.await.unwrap(), Err(Error::Closed)));
    assert!(matches!(lock.acquire().await, Err(Error::Closed)));
    let other = LockClient::new(backend).lock("a").unwrap();
    assert!(other.try_acquire().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn close_says_when_a_release_was_not_confirmed() {
    let (backend, client) = client();
    let _guard = client.lock("a").unwrap().acquire().await.unwrap();
    backend.fail_next(FaultPoint::Release, u32::MAX);
    let err = client.close(SECOND).await.unwrap_err();
    assert!(err.is_transient(), "{err}");
}

#[tokio::test(start_paused = true)]
async fn close_does_not_mind_what_was_given_up_long_before() {
    let (backend, client) = client();
    let lock = client
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(SECOND).op_timeout(SECOND));
    let guard = lock.acquire().await.unwrap();
    backend.fail_next(FaultPoint::Release, u32::MAX);
    assert!(guard.release().await.unwrap_err().is_transient());
    tokio::time::sleep(10 * SECOND).await;
    backend.fail_next(FaultPoint::Release, 0);
    client.close(SECOND).await.unwrap();
}

#[test]
fn a_guard_may_be_dropped_outside_of_a_runtime_and_after_it() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (backend, client) = client();
    let lock = client.lock("a").unwrap();
    let (one, two) = runtime.block_on(async {
        (
            lock.acquire().await.unwrap(),
            client.lock("b").unwrap().acquire().await.unwrap(),
        )
    });
    drop(one);
    runtime.block_on(async {
        lock.acquire_timeout(SECOND)
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    });
    drop(runtime);
    assert!(!two.is_held(), "nothing renews it any more");
    drop(two);
    assert!(format!("{backend:?}").contains("memory"));
}

/// Nobody waits when the release begins, so it does not look into the queue.
#[tokio::test(start_paused = true)]
async fn who_waits_behind_a_release_hears_taken_for_a_second() {
    let backend = MemoryBackend::new();
    let lock = LockClient::new(backend.clone()).lock("job").unwrap();
    let guard = lock.acquire().await.unwrap();
    backend.delay(FaultPoint::Release, SECOND);
    let release = tokio::spawn(guard.release());
    tokio::task::yield_now().await;
    let before_its_answer = lock.acquire_timeout(100 * MS).await.unwrap_err();
    assert!(before_its_answer.is_timeout(), "{before_its_answer}");
    // The first gets the slot when the release is over, and no reply. The others are behind it all the time.
    let waiting = |wait| {
        let lock = lock.clone();
        tokio::spawn(async move { lock.acquire_timeout(wait).await })
    };
    let first = waiting(60 * SECOND);
    tokio::task::yield_now().await;
    let second = waiting(1_500 * MS);
    let third = waiting(3 * SECOND);
    tokio::task::yield_now().await;
    backend.delay(FaultPoint::Attempt, 20 * SECOND);
    release.await.unwrap().unwrap();
    let behind = second.await.unwrap().unwrap_err();
    assert!(behind.is_timeout(), "{behind}");
    // By then it is free, for all that anybody knows.
    let behind = third.await.unwrap().unwrap_err();
    assert!(behind.is_transient() && !behind.is_timeout(), "{behind}");
    first.abort();
}

/// The server is silent, and the lease is over before the release is given up: nobody knows any more who has the lock.
#[tokio::test(start_paused = true)]
async fn who_waits_behind_a_release_beyond_its_lease_asks() {
    let backend = MemoryBackend::new();
    let options = AcquireOptions::new().ttl(SECOND).op_timeout(5 * SECOND);
    let lock = LockClient::new(backend.clone()).lock("job").unwrap();
    let lock = lock.with_options(options);
    let guard = lock.acquire().await.unwrap();
    for point in [FaultPoint::Release, FaultPoint::Attempt] {
        backend.delay(point, 60 * SECOND);
    }
    let release = tokio::spawn(guard.release());
    tokio::task::yield_now().await;
    let waiting = |wait| {
        let lock = lock.clone();
        tokio::spawn(async move { lock.acquire_timeout(wait).await })
    };
    // The first gets the slot when the release is given up. The others are behind it all the time.
    let first = waiting(60 * SECOND);
    tokio::task::yield_now().await;
    let within_it = waiting(500 * MS);
    let beyond = [waiting(2 * SECOND), waiting(5_500 * MS)];
    let error = within_it.await.unwrap().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    for waiter in beyond {
        let error = waiter.await.unwrap().unwrap_err();
        assert!(error.is_transient() && !error.is_timeout(), "{error}");
    }
    assert!(release.await.unwrap().unwrap_err().is_transient());
    first.abort();
}

/// The server has released it, and only the reply is missing. That an attempt failed before the grant is an old word.
#[tokio::test(start_paused = true)]
async fn who_waits_behind_a_release_gets_what_is_free() {
    let backend = MemoryBackend::new();
    let lock = LockClient::new(backend.clone()).lock("job").unwrap();
    let lock = lock.with_options(AcquireOptions::new().ttl(SECOND));
    backend.fail_next(FaultPoint::Attempt, 1);
    let guard = lock.acquire().await.unwrap();
    backend.delay(FaultPoint::Release, 60 * SECOND);
    let release = tokio::spawn(guard.release());
    tokio::task::yield_now().await;
    let next = lock.acquire_timeout(2 * SECOND).await.unwrap();
    assert!(next.is_held());
    assert!(release.await.unwrap().unwrap_err().is_transient());
}

/// Nor is the attempt of one who asked before the grant a new word, if it fails after that.
#[tokio::test(start_paused = true)]
async fn who_waits_behind_a_release_hears_no_late_failure() {
    let probe = Probe {
        polls_every: Some(60 * SECOND),
        ..Probe::default()
    };
    let elsewhere = LockClient::new(probe.memory.clone()).lock("job").unwrap();
    let in_the_way = elsewhere.acquire().await.unwrap();
    let lock = LockClient::new(probe.clone()).lock("job").unwrap();
    let lock = lock.with_options(AcquireOptions::new().ttl(SECOND));
    let waiting = |wait| {
        let lock = lock.clone();
        tokio::spawn(async move { lock.acquire_timeout(wait).await })
    };
    let first = waiting(600 * SECOND);
    tokio::task::yield_now().await;
    let second = waiting(3 * SECOND);
    tokio::task::yield_now().await;
    // The second asks when its time is over, and the first is granted it before that fails.
    probe.memory.delay(FaultPoint::Attempt, 60 * SECOND);
    tokio::time::sleep(3_050 * MS).await;
    probe.memory.delay(FaultPoint::Attempt, Duration::ZERO);
    in_the_way.release().await.unwrap();
    let guard = first.await.unwrap().unwrap();
    assert!(!second.is_finished(), "it was answered before the grant");
    let error = second.await.unwrap().unwrap_err();
    assert!(error.is_transient() && !error.is_timeout(), "{error}");
    tokio::time::sleep(10 * MS).await;
    probe.memory.delay(FaultPoint::Release, 60 * SECOND);
    let release = tokio::spawn(guard.release());
    tokio::task::yield_now().await;
    let next = lock.acquire_timeout(2 * SECOND).await.unwrap();
    assert!(next.is_held());
    assert!(release.await.unwrap().unwrap_err().is_transient());
}

/// Its release is told that it was gone by then. Whoever has the lock now, it is not this client.
#[tokio::test(start_paused = true)]
async fn who_waits_behind_a_hold_that_was_gone_asks() {
    let (backend, client) = client();
    let lock = client.lock("job").unwrap();
    let guard = lock.acquire().await.unwrap();
    // It is passed on to none of those, whose ttl is another one.
    let others = lock.with_options(AcquireOptions::new().ttl(7 * SECOND));
    let waiting = |wait| {
        let lock = others.clone();
        tokio::spawn(async move { lock.acquire_timeout(wait).await })
    };
    let first = waiting(60 * SECOND);
    tokio::task::yield_now().await;
    let second = waiting(500 * MS);
    tokio::task::yield_now().await;
    backend.delay(FaultPoint::Attempt, 20 * SECOND);
    assert!(backend.revoke("job"));
    assert!(guard.release().await.unwrap_err().is_lost());
    let error = second.await.unwrap().unwrap_err();
    assert!(error.is_transient() && !error.is_timeout(), "{error}");
    first.abort();
}

/// The one that waits at the server heard that it was taken when it began, and has rested since.
#[tokio::test(start_paused = true)]
async fn who_waits_behind_others_hears_no_old_word() {
    let probe = Probe {
        polls_every: Some(60 * SECOND),
        ..Probe::default()
    };
    let elsewhere = LockClient::new(probe.memory.clone()).lock("job").unwrap();
    let guard = elsewhere.acquire().await.unwrap();
    let lock = LockClient::new(probe.clone()).lock("job").unwrap();
    let waiting = |wait| {
        let lock = lock.clone();
        tokio::spawn(async move { lock.acquire_timeout(wait).await })
    };
    let first = waiting(600 * SECOND);
    tokio::task::yield_now().await;
    let many = |wait| (0..100).map(|_| waiting(wait)).collect::<Vec<_>>();
    let told = many(3 * SECOND);
    let in_an_outage = many(9 * SECOND);
    let (before, ..) = probe.counts.calls();
    // Some more of them end while one asks.
    probe.memory.delay(FaultPoint::Attempt, Duration::from_millis(50));
    for waiter in told {
        let error = waiter.await.unwrap().unwrap_err();
        assert!(error.is_timeout(), "{error}");
    }
    assert_eq!(probe.counts.calls().0, before + 1, "one asked for all");
    probe.memory.delay(FaultPoint::Attempt, 60 * SECOND);
    for waiter in in_an_outage {
        let error = waiter.await.unwrap().unwrap_err();
        assert!(error.is_transient() && !error.is_timeout(), "{error}");
    }
    probe.memory.delay(FaultPoint::Attempt, Duration::ZERO);
    first.abort();
    let next = waiting(3 * SECOND);
    tokio::task::yield_now().await;
    guard.release().await.unwrap();
    next.await.unwrap().unwrap().release().await.unwrap();
}

/// One of them asks the server, and the other waits for that answer.
#[tokio::test(start_paused = true)]
async fn closing_ends_those_who_wait_for_anothers_answer() {
    let probe = Probe {
        polls_every: Some(60 * SECOND),
        ..Probe::default()
    };
    let elsewhere = LockClient::new(probe.memory.clone()).lock("job").unwrap();
    let guard = elsewhere.acquire().await.unwrap();
    let client = LockClient::new(probe.clone());
    let lock = client.lock("job").unwrap();
    let waiting = |wait| {
        let lock = lock.clone();
        tokio::spawn(async move { lock.acquire_timeout(wait).await })
    };
    let first = waiting(600 * SECOND);
    tokio::task::yield_now().await;
    let behind = [waiting(3 * SECOND), waiting(3 * SECOND)];
    probe.memory.delay(FaultPoint::Attempt, 60 * SECOND);
    tokio::time::sleep(3_200 * MS).await;
    assert!(behind.iter().all(|waiter| !waiter.is_finished()));
    let (asked, ..) = probe.counts.calls();
    assert_eq!(asked, 2, "the first, and one for all");
    client.close(60 * SECOND).await.unwrap();
    for waiter in behind.into_iter().chain([first]) {
        let error = waiter.await.unwrap().unwrap_err();
        assert!(matches!(error, Error::Closed), "{error}");
    }
    assert_eq!(probe.counts.calls().0, asked, "a closed client has asked");
    guard.release().await.unwrap();
}

/// To withdraw would take as long as the last question, which no caller waits for.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_wait_far_away_is_told_with_the_answer() {
    const ROUND_TRIP: Duration = Duration::from_millis(250);
    let probe = Probe {
        polls_every: Some(60 * SECOND),
        ..Probe::default()
    };
    let guard = LockClient::new(probe.memory.clone()).lock("job").unwrap();
    let guard = guard.acquire().await.unwrap();
    let lock = LockClient::new(probe.clone()).lock("job").unwrap();
    for point in [FaultPoint::Attempt, FaultPoint::Release] {
        probe.memory.delay(point, ROUND_TRIP);
    }
    let started = Instant::now();
    let error = lock.acquire_timeout(3 * SECOND).await.unwrap_err();
    let took = started.elapsed();
    assert!(error.is_timeout(), "{error}");
    assert!(took < 3 * SECOND + ROUND_TRIP + 10 * MS, "{took:?}");
    tokio::time::sleep(SECOND).await;
    assert_eq!(lock.inspect().await.unwrap().waiters, Some(0), "it is withdrawn");
    probe.memory.delay(FaultPoint::Release, Duration::ZERO);
    guard.release().await.unwrap();
}
