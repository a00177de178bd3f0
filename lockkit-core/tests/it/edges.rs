//! Two events at once: a close during an acquisition or a release, a loss during a renewal, late replies.

use std::{
    sync::{Arc, Barrier, atomic::Ordering},
    time::Duration,
};

use futures_util::FutureExt;
use lockkit_core::{
    AcquireOptions, Error, Instant, LockClient, LossReason, MemoryBackend, ReentrantLock, ReentrantOwner,
    RunError, acquire_all, memory::FaultPoint,
};

use crate::{cancel::cancel_after, probe::Probe};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_try_whose_grant_comes_after_its_lease_is_an_error() {
    let probe = Probe::default();
    let lock = LockClient::new(probe.clone())
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(100 * MS));
    probe.memory.delay(FaultPoint::Attempt, 200 * MS);
    let outcome = tokio::time::timeout(SECOND, lock.try_acquire())
        .await
        .expect("it comes to an end");
    assert!(outcome.unwrap_err().is_transient());
    assert_eq!(probe.counts.attempts.load(Ordering::SeqCst), 1);
    let state = lock.inspect().await.unwrap();
    assert!(state.is_free() && state.waiters == Some(0), "{state:?}");
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_told_while_a_renewal_by_hand_is_left_unpolled() {
    for polled_at_all in [true, false] {
        let backend = MemoryBackend::new();
        let lock = LockClient::new(backend.clone()).lock("a").unwrap();
        let guard = lock
            .acquire_with(&AcquireOptions::new().ttl(SECOND))
            .await
            .unwrap();
        tokio::time::sleep(100 * MS).await;
        backend.delay(FaultPoint::Renew, 30 * SECOND);
        let mut renewal = Box::pin(guard.renew());
        if polled_at_all {
            assert!(cancel_after(1, renewal.as_mut()).await.is_none());
        }
        let started = Instant::now();
        let reason = tokio::time::timeout(10 * SECOND, guard.lost()).await;
        assert_eq!(reason, Ok(LossReason::Expired));
        assert!(started.elapsed() <= SECOND, "{:?}", started.elapsed());
        assert!(renewal.await.unwrap_err().is_lost());
    }
}

#[tokio::test(start_paused = true)]
async fn waiters_go_on_while_a_renewal_by_hand_is_left_unpolled() {
    let probe = Probe::default();
    let client = LockClient::new(probe.clone());
    let lock = client.lock("a").unwrap();
    let guard = lock
        .acquire_with(&AcquireOptions::new().ttl(SECOND))
        .await
        .unwrap();
    tokio::time::sleep(100 * MS).await;
    probe.memory.delay(FaultPoint::Renew, 30 * SECOND);
    let mut renewal = Box::pin(guard.renew());
    assert!(tokio::time::timeout(10 * MS, renewal.as_mut()).await.is_err());
    assert_eq!(probe.counts.renewals.load(Ordering::SeqCst), 1);
    assert_eq!(guard.lost().await, LossReason::Expired);
    let next = tokio::time::timeout(10 * SECOND, lock.acquire()).await;
    let next = next.expect("nobody else has it").unwrap();
    probe.memory.delay(FaultPoint::Renew, Duration::ZERO);
    // The claim of the lost hold comes back late, and takes nothing from later holders.
    let third = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await }
    });
    tokio::time::sleep(AcquireOptions::DEFAULT_OP_TIMEOUT * 2).await;
    drop(renewal);
    tokio::time::sleep(SECOND).await;
    assert!(next.is_held() && !third.is_finished());
    let before = probe.counts.attempts.load(Ordering::SeqCst);
    assert!(lock.try_acquire().await.unwrap().is_none());
    assert_eq!(probe.counts.attempts.load(Ordering::SeqCst), before + 1);
    next.release().await.unwrap();
    third.await.unwrap().unwrap().release().await.unwrap();
    client.close(SECOND).await.unwrap();
    assert_eq!(probe.counts.claims_at_close.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_by_hand_ends_with_the_hold_and_delays_no_close() {
    let backend = MemoryBackend::new();
    let client = LockClient::new(backend.clone());
    let guard = Arc::new(client.lock("a").unwrap().acquire().await.unwrap());
    backend.delay(FaultPoint::Renew, 3 * SECOND);
    let renewal = tokio::spawn({
        let guard = guard.clone();
        async move { guard.renew().await }
    });
    tokio::time::sleep(10 * MS).await;
    let started = Instant::now();
    client.close(SECOND).await.unwrap();
    assert!(renewal.await.unwrap().unwrap_err().is_lost());
    assert!(started.elapsed() < 100 * MS, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn close_withdraws_those_who_wait_before_it_closes_the_backend() {
    let probe = Probe::default();
    let others = LockClient::new(probe.memory.clone());
    let in_the_way = others.lock("a").unwrap().acquire().await.unwrap();
    let client = LockClient::new(probe.clone());
    let waiter = tokio::spawn({
        let lock = client.lock("a").unwrap();
        async move { lock.acquire().await }
    });
    tokio::time::sleep(SECOND).await;
    assert_eq!(others.inspect("a").await.unwrap().waiters, Some(1));
    probe.memory.delay(FaultPoint::Release, 50 * MS);
    client.close(SECOND).await.unwrap();
    assert_eq!(others.inspect("a").await.unwrap().waiters, Some(0));
    assert_eq!(probe.counts.claims_at_close.load(Ordering::SeqCst), 0);
    assert!(matches!(waiter.await.unwrap(), Err(Error::Closed)));
    drop(in_the_way);
}

#[tokio::test(start_paused = true)]
async fn close_waits_for_a_release_that_is_under_way() {
    let probe = Probe::default();
    let client = LockClient::new(probe.clone());
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    probe.memory.delay(FaultPoint::Release, 500 * MS);
    let release = tokio::spawn(guard.release());
    tokio::time::sleep(10 * MS).await;
    client.close(SECOND).await.unwrap();
    assert_eq!(probe.counts.claims_at_close.load(Ordering::SeqCst), 0);
    release.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn close_ends_the_connection_also_when_a_release_was_given_up() {
    let probe = Probe::default();
    let client = LockClient::new(probe.clone());
    let options = AcquireOptions::new().ttl(SECOND).op_timeout(SECOND);
    let lock = client.lock("a").unwrap().with_options(options);
    let _guard = lock.acquire().await.unwrap();
    probe.memory.fail_next(FaultPoint::Release, u32::MAX);
    let err = client.close(10 * SECOND).await.unwrap_err();
    assert!(err.is_transient(), "{err}");
    assert_eq!(probe.counts.closes.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_view_that_outlives_the_release_is_nothing_to_go_on_with() {
    let client = LockClient::new(MemoryBackend::new());
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    let view = guard.view();
    view.check().unwrap();
    guard.release().await.unwrap();
    assert!(!view.is_held());
    let is_released = |err: &Error| {
        assert!(!err.is_lost(), "a release is no loss: {err}");
        matches!(err, Error::Released { .. })
    };
    assert!(is_released(&view.check().unwrap_err()));
    let unbegun: Result<(), RunError<()>> = view.run(async { panic!("there is no hold") }).await;
    let unbegun = unbegun.unwrap_err();
    assert!(is_released(&unbegun.error) && unbegun.output.is_none());
    assert_eq!(view.lost().reason(), None, "it was not lost");
}

/// The reply to an attempt and the close come in the same instant.
#[tokio::test(start_paused = true)]
async fn nothing_is_granted_by_a_client_that_is_closed() {
    for close_after in [99 * MS, 100 * MS, 101 * MS] {
        let probe = Probe::default();
        let client = LockClient::new(probe.clone());
        probe.memory.delay(FaultPoint::Attempt, 100 * MS);
        let acquisition = tokio::spawn({
            let lock = client.lock("a").unwrap();
            async move { lock.acquire().await }
        });
        tokio::time::sleep(close_after).await;
        client.close(SECOND).await.unwrap();
        assert_eq!(probe.counts.claims_at_close.load(Ordering::SeqCst), 0);
        if let Ok(guard) = acquisition.await.unwrap() {
            assert!(!guard.is_held(), "closed after {close_after:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_worker_and_every_claim_end_with_the_last_handle() {
    let probe = Probe::default();
    let client = LockClient::new(probe.clone());
    let lock = client.lock("a").unwrap();
    let guard = lock.acquire().await.unwrap();
    let waiter = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await.unwrap() }
    });
    tokio::time::sleep(SECOND).await;
    drop((client, lock));
    drop(guard);
    let last = waiter.await.unwrap();
    tokio::time::sleep(SECOND).await;
    drop(last);
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let give_up = Instant::now() + SECOND;
    while tasks() > 0 || Arc::strong_count(&probe.counts) > 1 {
        assert!(Instant::now() < give_up, "{} tasks are left", tasks());
        tokio::time::sleep(MS).await;
    }
}

/// The release finds the worker at work on the claim, and is dropped while it waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_release_still_hands_off() {
    let probe = Probe::default();
    let barrier = Arc::new(Barrier::new(2));
    *probe.barrier.lock().unwrap() = Some(barrier.clone());
    let lock = LockClient::new(probe.clone())
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(6 * SECOND));
    let guard = lock.acquire().await.unwrap();
    let heir = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await.unwrap() }
    });
    barrier.wait();
    assert!(cancel_after(1, guard.release()).await.is_none());
    barrier.wait();
    let heir = tokio::time::timeout(60 * SECOND, heir)
        .await
        .expect("granted")
        .unwrap();
    let (attempts, before, releases) = probe.counts.calls();
    assert_eq!((attempts, releases), (1, 0), "it did not go by the server");
    let renewals = async {
        while probe.counts.calls().1 < before + 2 {
            tokio::time::sleep(MS).await;
        }
    };
    tokio::time::timeout(60 * SECOND, renewals)
        .await
        .expect("it is watched over");
    assert!(heir.is_held());
}

/// The release finds the worker at work on the claim, and is polled again when the lease is over. That is not passed on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_nobody_polled_costs_no_heir_its_turn() {
    let ttl = 2 * SECOND;
    let probe = Probe::default();
    let lock = LockClient::new(probe.clone()).lock("a").unwrap();
    let lock = lock.with_options(AcquireOptions::new().ttl(ttl));
    let guard = lock.acquire().await.unwrap();
    let [mut first, mut second] = [(); 2].map(|()| Box::pin(lock.acquire()));
    for heir in [&mut first, &mut second] {
        assert!(heir.as_mut().now_or_never().is_none());
    }
    let barrier = Arc::new(Barrier::new(2));
    *probe.barrier.lock().unwrap() = Some(barrier.clone());
    probe.hint.notify_one();
    barrier.wait();
    let mut release = Box::pin(guard.release());
    assert!(release.as_mut().now_or_never().is_none());
    barrier.wait();
    tokio::time::sleep(ttl + 100 * MS).await;
    let _ = release.await;
    // The second is not polled: behind it, the first would wait.
    let first = tokio::time::timeout(10 * SECOND, first).await;
    drop(first.expect("it has lost its turn").unwrap());
    drop(second.await.unwrap());
}

/// A proof may be old when it comes: a session's last heartbeat, say.
#[tokio::test(start_paused = true)]
async fn a_backend_whose_proofs_are_old_is_not_asked_without_end() {
    let probe = Probe {
        proofs_are_old_by: SECOND,
        ..Probe::default()
    };
    let lock = LockClient::new(probe.clone()).lock("a").unwrap();
    let options = AcquireOptions::new().ttl(2 * SECOND);
    let guard = lock.acquire_with(&options).await.unwrap();
    tokio::time::sleep(60 * SECOND).await;
    assert!(guard.is_held());
    let (_, renewals, _) = probe.counts.calls();
    assert!(renewals < 60 * 10, "{renewals} renewals within a minute");
}

/// A session may turn out to be granted less time than before.
#[tokio::test(start_paused = true)]
async fn less_that_is_proven_counts_without_renewal_too() {
    for renew in [true, false] {
        let probe = Probe {
            proofs_are_old_by: 9 * SECOND,
            ..Probe::default()
        };
        let lock = LockClient::new(probe.clone()).lock("a").unwrap();
        let options = AcquireOptions::new().ttl(10 * SECOND).renew(renew);
        let guard = lock.acquire_with(&options).await.unwrap();
        tokio::time::sleep(SECOND).await;
        assert!(guard.valid_until().unwrap() > Instant::now() + 8 * SECOND);
        probe.hint.notify_one();
        tokio::time::sleep(100 * MS).await;
        let left = guard.valid_until().unwrap() - Instant::now();
        assert!(left <= SECOND, "renew={renew}: {left:?} left");
    }
}

/// The present lease decides how long it rests, and not the one before.
#[tokio::test(start_paused = true)]
async fn a_lease_that_has_become_shorter_is_renewed_in_time() {
    let probe = Probe {
        renewed_for: Some(SECOND),
        ..Probe::default()
    };
    let lock = LockClient::new(probe.clone()).lock("a").unwrap();
    let options = AcquireOptions::new().ttl(30 * SECOND);
    let guard = lock.acquire_with(&options).await.unwrap();
    tokio::time::sleep(SECOND).await;
    probe.hint.notify_one();
    tokio::time::sleep(10 * SECOND).await;
    let (_, renewals, _) = probe.counts.calls();
    assert!(guard.is_held(), "lost after {renewals} renewals");
}

/// What was proven before counts, whether it is more or less, and confirms nothing.
#[tokio::test(start_paused = true)]
async fn what_is_not_confirmed_counts_and_is_no_renewal() {
    for (proven, renew) in [(6 * SECOND, false), (6 * SECOND, true), (60 * SECOND, false)] {
        let probe = Probe::default();
        let lock = LockClient::new(probe.clone()).lock("a").unwrap();
        let options = AcquireOptions::new()
            .ttl(20 * SECOND)
            .op_timeout(SECOND)
            .renew(renew);
        let guard = lock.acquire_with(&options).await.unwrap();
        *probe.silent.lock().unwrap() = Some(proven);
        let asked = Instant::now();
        let renewed = guard.renew().await;
        assert!(renewed.is_err_and(|error| error.is_transient()));
        assert_eq!(asked.elapsed(), SECOND, "it waits for the server's word");
        let until = guard.valid_until().unwrap() - asked;
        assert!(
            until <= proven && until + SECOND > proven,
            "{until:?} of {proven:?}"
        );
        assert!(guard.renewal_failing().now_or_never().is_some());
        *probe.silent.lock().unwrap() = None;
        guard.renew().await.unwrap();
        assert!(guard.renewal_failing().now_or_never().is_none());
        assert!(guard.valid_until().unwrap() - Instant::now() > 19 * SECOND);
        *probe.silent.lock().unwrap() = Some(SECOND);
        let lost = guard.lost();
        let renewed = tokio::time::timeout(10 * SECOND, guard.renew()).await.unwrap();
        assert!(renewed.is_err(), "less was proven");
        assert_eq!(lost.await, LossReason::Expired);
    }
}

/// Whoever renews by hand keeps the claim from the worker, which tells the loss all the same.
#[tokio::test(start_paused = true)]
async fn less_that_a_forgotten_renewal_proves_is_told_in_time() {
    let probe = Probe::default();
    let lock = LockClient::new(probe.clone()).lock("a").unwrap();
    let options = AcquireOptions::new().ttl(60 * SECOND).renew(false);
    let guard = lock.acquire_with(&options).await.unwrap();
    // The worker keeps it alive by then.
    tokio::time::sleep(SECOND).await;
    *probe.silent.lock().unwrap() = Some(6 * SECOND);
    let mut forgotten = Box::pin(guard.renew());
    while guard.valid_until().unwrap() > Instant::now() + 6 * SECOND {
        assert!(forgotten.as_mut().now_or_never().is_none());
        // The worker has the claim at first.
        tokio::task::yield_now().await;
    }
    let asked = Instant::now();
    let told = tokio::spawn(guard.lost());
    assert_eq!(told.await.unwrap(), LossReason::Expired);
    assert!(asked.elapsed() <= 6 * SECOND, "told after {:?}", asked.elapsed());
    drop(forgotten);
}

/// Polls on a thread that has no runtime, as another executor would.
fn outside<F: Future + Send>(future: F) -> F::Output
where
    F::Output: Send,
{
    std::thread::scope(|scope| {
        let polling = scope.spawn(|| {
            let mut future = std::pin::pin!(future);
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            loop {
                if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut cx) {
                    return output;
                }
                std::thread::yield_now();
            }
        });
        polling.join().expect("no panic outside of a runtime")
    })
}

#[test]
fn awaiting_outside_of_a_runtime_is_an_error_and_no_panic() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let client = runtime.block_on(async { LockClient::new(MemoryBackend::new()) });
    let lock = client.lock("a").unwrap();
    let held = outside(lock.acquire()).unwrap();
    assert!(held.is_held(), "what is ready at once needs no timer");
    let err = outside(lock.acquire()).unwrap_err();
    assert!(err.to_string().contains("acquire failed"), "{err}");
    assert!(outside(lock.acquire_timeout(SECOND)).is_err());
    let nested = ReentrantLock::new(lock.clone());
    let wait = AcquireOptions::new().wait(10 * MS);
    assert!(outside(nested.acquire_with(&ReentrantOwner::new(), &wait)).is_err());
    assert!(outside(acquire_all(&[&lock], &wait)).is_err());
    outside(held.renew()).unwrap();
    outside(held.release()).unwrap();
}
