//! From an exclusive hold to a shared one: replies that do not come, futures that are dropped, and what goes on.

use std::time::Duration;

use futures_util::FutureExt;
use lockkit_core::{
    AcquireOptions, DowngradeError, Error, HoldEnd, Instant, Lock, LockClient, LockGuard, LossReason,
    MemoryBackend, memory::FaultPoint,
};

use crate::cancel::cancel_after;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(9);

fn lock(server: &MemoryBackend) -> Lock {
    let lock = LockClient::new(server.clone()).lock("a").unwrap();
    lock.with_options(AcquireOptions::new().ttl(TTL))
}

fn over(outcome: Result<LockGuard, DowngradeError<LockGuard>>) -> Error {
    match outcome {
        Err(DowngradeError {
            error, guard: None, ..
        }) => error,
        other => panic!("expected a hold that is over, got {other:?}"),
    }
}

fn unchanged(outcome: Result<LockGuard, DowngradeError<LockGuard>>) -> (Error, LockGuard) {
    match outcome {
        Err(DowngradeError {
            error,
            guard: Some(guard),
            ..
        }) => (error, guard),
        other => panic!("expected a guard that is as it was, got {other:?}"),
    }
}

async fn becomes_free(server: &MemoryBackend) {
    let freed = async {
        while server.names() > 0 {
            tokio::time::sleep(MS).await;
        }
    };
    tokio::time::timeout(SECOND, freed)
        .await
        .expect("something is still held or queued");
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_is_asked_for_again() {
    let server = MemoryBackend::new();
    let (lock, other) = (lock(&server), lock(&server));
    let guard = lock.acquire().await.unwrap();
    let token = guard.token();
    server.lose_replies(FaultPoint::Downgrade, 3);
    let reading = guard.downgrade().await.unwrap();
    assert!(reading.is_held() && reading.token() == token);
    let beside = other.shared().try_acquire().await.unwrap().unwrap();
    assert!(other.try_acquire().await.unwrap().is_none());
    // It is renewed as any hold.
    tokio::time::sleep(3 * TTL).await;
    assert!(reading.is_held());
    beside.release().await.unwrap();
    reading.release().await.unwrap();
    assert_eq!(server.names(), 0);
}

#[tokio::test(start_paused = true)]
async fn without_any_reply_it_ends_with_the_lease() {
    for takes_effect in [true, false] {
        let server = MemoryBackend::new();
        let (lock, other) = (lock(&server), lock(&server));
        let granted = Instant::now();
        let guard = lock
            .acquire_with(&AcquireOptions::new().renew(false))
            .await
            .unwrap();
        let next = tokio::spawn(async move { other.acquire().await });
        if takes_effect {
            server.lose_replies(FaultPoint::Downgrade, u32::MAX);
        } else {
            server.fail_next(FaultPoint::Downgrade, u32::MAX);
        }
        let error = over(guard.downgrade().await);
        assert!(
            matches!(
                error,
                Error::Lost {
                    reason: LossReason::Expired,
                    ..
                }
            ),
            "{error}"
        );
        let took = granted.elapsed();
        assert!(took + 10 * MS > TTL && took <= TTL, "{took:?}");
        // What is left is released at once, and not when the server's lease ends.
        let next = next.await.unwrap().unwrap();
        assert!(granted.elapsed() < TTL + SECOND, "{:?}", granted.elapsed());
        next.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_exclusive_hold_ends_before_the_server_is_asked() {
    let server = MemoryBackend::new();
    let lock = lock(&server);
    let guard = lock.acquire().await.unwrap();
    let view = guard.view();
    // The request takes effect at once, and the reply is late.
    server.delay(FaultPoint::Downgrade, SECOND);
    let downgrade = tokio::spawn(guard.downgrade());
    let other = self::lock(&server).shared();
    loop {
        if let Some(beside) = other.try_acquire().await.unwrap() {
            assert!(!view.is_held(), "a reader is in, and a view says that it writes");
            assert_eq!(view.ended().now_or_never(), Some(HoldEnd::Released));
            drop(beside);
            break;
        }
        tokio::time::sleep(MS).await;
    }
    assert!(downgrade.await.unwrap().unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn a_downgrade_dropped_at_any_poll_leaves_nothing() {
    for (lost, delay) in [(0, 0), (0, 5), (2, 0), (2, 5)] {
        let mut polls = 1;
        loop {
            let server = MemoryBackend::new();
            let lock = lock(&server);
            let guard = lock.acquire().await.unwrap();
            // The worker has the claim by now.
            tokio::time::sleep(20 * MS).await;
            let next = lock.clone();
            let next = tokio::spawn(async move { next.acquire().await });
            tokio::time::sleep(MS).await;
            server.lose_replies(FaultPoint::Downgrade, lost);
            server.delay(FaultPoint::Downgrade, delay * MS);
            let done = cancel_after(polls, guard.downgrade()).await;
            let is_done = done.is_some();
            drop(done);
            let next = tokio::time::timeout(SECOND, next).await;
            next.expect("a waiter of the same client")
                .unwrap()
                .unwrap()
                .release()
                .await
                .unwrap();
            becomes_free(&server).await;
            if is_done {
                break;
            }
            polls += 1;
        }
        assert!(polls > 1 || (lost, delay) == (0, 0), "it never waited");
    }
}

#[tokio::test(start_paused = true)]
async fn writers_of_its_own_client_wait_behind_it() {
    let server = MemoryBackend::new();
    let lock = lock(&server);
    let guard = lock.acquire().await.unwrap();
    let token = guard.token();
    let queued = lock.clone();
    let next = tokio::spawn(async move { queued.acquire().await });
    tokio::time::sleep(MS).await;
    let reading = guard.downgrade().await.unwrap();
    // No hand-off within the client, and no grant by the server.
    tokio::time::sleep(2 * TTL).await;
    assert!(!next.is_finished() && reading.is_held());
    assert!(
        lock.shared().try_acquire().await.unwrap().is_none(),
        "a writer waits"
    );
    reading.release().await.unwrap();
    let next = next.await.unwrap().unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
    assert_eq!(server.names(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_was_acquired_goes_on() {
    let server = MemoryBackend::new();
    let lock = lock(&server);
    let options = AcquireOptions::new().max_hold(60 * SECOND).label("me");
    let granted = Instant::now();
    let guard = lock.acquire_with(&options).await.unwrap();
    guard.set_ttl(6 * SECOND).await.unwrap();
    tokio::time::sleep(40 * SECOND).await;
    let reading = guard.downgrade().await.unwrap();
    assert_eq!(
        lock.inspect().await.unwrap().holders[0].label.as_deref(),
        Some("me")
    );
    assert_eq!(reading.lease_length(), Some(6 * SECOND));
    assert_eq!(reading.lost().await, LossReason::MaxHold);
    let held = granted.elapsed();
    assert!(held > 60 * SECOND && held <= 66 * SECOND, "{held:?}");
    drop(reading);
    let guard = lock.acquire_with(&options).await.unwrap();
    guard.renewal_failing().await;
    let (error, guard) = unchanged(guard.downgrade().await);
    assert!(
        matches!(error, Error::Backend { transient: false, .. }),
        "{error}"
    );
    assert!(guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_shared_is_left_as_it_was() {
    let server = MemoryBackend::new();
    let client = LockClient::new(server.clone());
    let shared = client.lock("s").unwrap().shared().acquire().await.unwrap();
    let permit = client.semaphore("p", 2).unwrap().acquire().await.unwrap();
    for guard in [shared, permit] {
        let (error, guard) = unchanged(guard.downgrade().await);
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(guard.is_held());
        guard.release().await.unwrap();
    }
    let lost = client.lock("a").unwrap().acquire().await.unwrap();
    server.revoke("a");
    lost.lost().await;
    let (error, lost) = unchanged(lost.downgrade().await);
    assert!(error.is_lost() && !lost.is_held(), "{error}");
    // Nobody had looked by then.
    let revoked = client.lock("b").unwrap().acquire().await.unwrap();
    server.revoke("b");
    assert!(over(revoked.downgrade().await).is_lost());
}

#[tokio::test(start_paused = true)]
async fn closing_the_client_ends_a_downgrade() {
    let server = MemoryBackend::new();
    let client = LockClient::new(server.clone());
    let lock = client.lock("a").unwrap();
    let guard = lock.acquire().await.unwrap();
    server.fail_next(FaultPoint::Downgrade, u32::MAX);
    let downgrade = tokio::spawn(guard.downgrade());
    tokio::time::sleep(MS).await;
    client.close(SECOND).await.unwrap();
    let error = over(downgrade.await.unwrap());
    assert!(matches!(error, Error::Closed), "{error}");
    assert_eq!(server.names(), 0);

    let server = MemoryBackend::new();
    let client = LockClient::new(server.clone());
    let reading = client.lock("a").unwrap().acquire().await.unwrap();
    let reading = reading.downgrade().await.unwrap();
    let closing = tokio::spawn(async move { client.close(SECOND).await });
    assert_eq!(reading.lost().await, LossReason::Disconnected);
    drop(reading);
    closing.await.unwrap().unwrap();
    assert_eq!(server.names(), 0);
}
