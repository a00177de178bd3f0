//! The end of a hold, and what its views show afterwards.

use std::{
    sync::{Arc, atomic::Ordering},
    task::{Context, Wake, Waker},
    time::Duration,
};

use lockkit_core::{
    Error, HoldEnd, HoldView, LockClient, LossReason, LostSignal, MemoryBackend, RenewalFailing,
};

use crate::probe::Probe;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn an_end_is_told_with_its_reason() {
    let backend = MemoryBackend::new();
    let lock = LockClient::new(backend.clone()).lock("a").unwrap();
    for end in [HoldEnd::Released, HoldEnd::Lost(LossReason::Revoked)] {
        for at_once in [true, false] {
            let guard = lock.acquire().await.unwrap();
            let held = guard.view();
            let told = tokio::spawn(guard.ended());
            let told_too = tokio::spawn(held.ended());
            let by_now = tokio::time::timeout(SECOND, guard.ended()).await;
            assert!(by_now.is_err(), "it is held: {by_now:?}");
            if end.loss().is_some() {
                assert!(backend.revoke("a"));
                assert_eq!(told.await.unwrap(), end);
                assert!(guard.release().await.unwrap_err().is_lost());
            } else if at_once {
                drop(guard);
                assert_eq!(told.await.unwrap(), end);
            } else {
                guard.release().await.unwrap();
                assert_eq!(told.await.unwrap(), end);
            }
            assert_eq!(told_too.await.unwrap(), end);
            assert_eq!(held.ended().await, end, "late askers are told");
        }
    }
}

/// A hand-off ends a hold, and begins another.
#[tokio::test(start_paused = true)]
async fn a_hand_off_is_an_end() {
    let lock = LockClient::new(MemoryBackend::new()).lock("a").unwrap();
    let guard = lock.acquire().await.unwrap();
    let (first, ended) = (guard.view(), tokio::spawn(guard.ended()));
    let heir = tokio::spawn(async move { lock.acquire().await.unwrap() });
    tokio::task::yield_now().await;
    guard.release().await.unwrap();
    let heir = heir.await.unwrap();
    assert_eq!(ended.await.unwrap(), HoldEnd::Released);
    assert!(!first.is_held() && heir.is_held());
    assert!(tokio::time::timeout(SECOND, heir.ended()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn tasks_that_await_the_end_end() {
    let lock = LockClient::new(MemoryBackend::new()).lock("a").unwrap();
    for _ in 0..1_000 {
        let guard = lock.acquire().await.unwrap();
        tokio::spawn(guard.ended());
        tokio::task::yield_now().await;
        guard.release().await.unwrap();
    }
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    tokio::time::sleep(SECOND).await;
    assert_eq!(tasks(), 1, "the worker alone");
}

struct Counted;

impl Wake for Counted {
    fn wake(self: Arc<Self>) {
        panic!("nothing happens to this hold that it waits for");
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_forgets_those_who_wait_for_a_loss() {
    let lock = LockClient::new(MemoryBackend::new()).lock("a").unwrap();
    let guard = lock.acquire().await.unwrap();
    let (mut lost, mut failing) = (guard.lost(), guard.renewal_failing());
    let waits = Arc::new(Counted);
    let waker = Waker::from(waits.clone());
    let poll_all = |lost: &mut LostSignal, failing: &mut RenewalFailing| {
        let mut cx = Context::from_waker(&waker);
        assert!(std::pin::Pin::new(lost).poll(&mut cx).is_pending());
        assert!(std::pin::Pin::new(failing).poll(&mut cx).is_pending());
    };
    poll_all(&mut lost, &mut failing);
    assert_eq!(Arc::strong_count(&waits), 4);
    guard.release().await.unwrap();
    assert_eq!(Arc::strong_count(&waits), 2, "their wakers are kept");
    poll_all(&mut lost, &mut failing);
    assert_eq!(Arc::strong_count(&waits), 2, "their wakers are kept again");
}

/// The ways in which a hold ends.
type End = fn(lockkit_core::LockGuard, &Probe);

#[tokio::test(start_paused = true)]
async fn a_view_keeps_nothing_of_the_client() {
    let ends: [(End, bool); 4] = [
        (|guard, _| drop(guard), false),
        (
            |guard, probe| {
                // Nobody has noticed yet.
                assert!(probe.memory.revoke("a"));
                drop(guard);
            },
            false,
        ),
        (
            |guard, probe| {
                assert!(probe.memory.revoke("a"));
                tokio::spawn(async move {
                    guard.lost().await;
                });
            },
            true,
        ),
        (
            |guard, _| {
                tokio::spawn(async move { guard.release().await.unwrap() });
            },
            false,
        ),
    ];
    for (end, loses) in ends {
        let probe = Probe::default();
        let lock = LockClient::new(probe.clone()).lock("a").unwrap();
        let guard = lock.acquire().await.unwrap();
        let (held, lost, ended) = (guard.view(), guard.lost(), guard.ended());
        let token = guard.token();
        tokio::time::sleep(SECOND).await;
        end(guard, &probe);
        drop(lock);
        tokio::time::sleep(SECOND).await;
        assert_eq!(Arc::strong_count(&probe.counts), 1, "the backend is kept");
        is_over(&held, loses);
        assert_eq!(held.token(), token);
        drop((lost, ended));
    }
}

fn is_over(held: &HoldView, lost: bool) {
    assert!(!held.is_held());
    let err = held.check().unwrap_err();
    assert_eq!(err.is_lost(), lost, "{err}");
    assert_eq!(matches!(err, Error::Released { .. }), !lost, "{err}");
    assert_eq!(held.name().as_str(), "a");
}

/// The claim of a hold that is lost with its runtime goes with it: there is no worker left to release it.
#[test]
fn a_guard_that_outlives_its_runtime_keeps_nothing_held() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let probe = Probe::default();
    let guard = runtime.block_on(async {
        let lock = LockClient::new(probe.clone()).lock("a").unwrap();
        let guard = lock.acquire().await.unwrap();
        tokio::time::sleep(50 * MS).await;
        guard
    });
    drop(runtime);
    let held = guard.view();
    assert!(!held.is_held());
    let claims = || probe.counts.claims.load(Ordering::SeqCst);
    assert_eq!(claims(), 0);
    assert!(guard.check().unwrap_err().is_lost());
    drop(guard);
    assert_eq!(Arc::strong_count(&probe.counts), 1);
}
