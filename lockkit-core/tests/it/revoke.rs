//! Asking a holder to give up its hold, on paused time and the memory backend.

use std::{pin::pin, time::Duration};

use futures_util::{FutureExt, future::join};
use lockkit_core::{
    AcquireOptions, Error, Instant, LockClient, LockGuard, LossReason, MemoryBackend, Revocation,
    memory::FaultPoint,
};

const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(30);

/// A client that holds the lock `a`, and another of the same server.
async fn held() -> (MemoryBackend, LockClient, LockClient, LockGuard) {
    let backend = MemoryBackend::new();
    let (holder, operator) = (LockClient::new(backend.clone()), LockClient::new(backend.clone()));
    let options = AcquireOptions::new().ttl(TTL);
    let guard = holder.lock("a").unwrap().acquire_with(&options).await.unwrap();
    (backend, holder, operator, guard)
}

/// Releases the hold to a waiter of its own client, after `meanwhile`. Returns the waiter's.
async fn passed_on(holder: &LockClient, guard: LockGuard, meanwhile: impl Future) -> LockGuard {
    let token = guard.token().get();
    let lock = holder.lock("a").unwrap();
    let heir = tokio::spawn(async move { lock.acquire().await.unwrap() });
    tokio::task::yield_now().await;
    meanwhile.await;
    guard.release().await.unwrap();
    let heir = heir.await.unwrap();
    assert_eq!(heir.token().get(), token + 1, "it was passed on");
    heir
}

async fn is_taken(client: &LockClient) -> bool {
    client.lock("a").unwrap().try_acquire().await.unwrap().is_none()
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_was_asked_for_keeps_others_out() {
    let (_, holder, operator, guard) = held().await;
    // With the worker's renewals under way.
    tokio::time::sleep(TTL * 2).await;
    let token = guard.token();
    let asked = operator.revoke("a", token, Duration::ZERO).await.unwrap();
    assert!(matches!(asked, Revocation::StillHeld { left: Some(left) } if left > TTL / 2));
    assert_eq!(guard.lost().await, LossReason::Asked);
    assert!(!guard.is_held());
    assert!(matches!(
        guard.check().unwrap_err(),
        Error::Lost {
            reason: LossReason::Asked,
            ..
        }
    ));
    assert!(is_taken(&holder).await && is_taken(&operator).await);
    let waiting = operator.revoke("a", token, 60 * SECOND);
    let release = async {
        tokio::time::sleep(5 * SECOND).await;
        assert!(is_taken(&operator).await);
        let released = guard.release().await;
        assert!(released.unwrap_err().is_lost());
    };
    let began = Instant::now();
    let (said, ()) = join(waiting, release).await;
    assert_eq!(said.unwrap(), Revocation::Confirmed);
    assert!(began.elapsed() < 6 * SECOND, "{:?}", began.elapsed());
    assert!(!is_taken(&operator).await);
    let gone = operator.revoke("a", token, SECOND).await.unwrap();
    assert_eq!(gone, Revocation::NotHeld);
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_stays_ends_with_the_lease_it_has() {
    let (_, holder, operator, guard) = held().await;
    let asked_at = Instant::now();
    let said = operator.revoke("a", guard.token(), 2 * TTL).await.unwrap();
    assert_eq!(said, Revocation::Expired);
    let took = asked_at.elapsed();
    assert!(took >= TTL && took < TTL + SECOND, "{took:?}");
    assert!(!is_taken(&operator).await);
    // The waiters of the client itself go on, too.
    let again = holder.lock("a").unwrap().acquire_timeout(SECOND).await.unwrap();
    assert!(guard.release().await.unwrap_err().is_lost());
    again.renew().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn whoever_asks_waits_no_longer_than_it_wants_to() {
    let (_, _holder, operator, guard) = held().await;
    let began = Instant::now();
    let said = operator.revoke("a", guard.token(), 7 * SECOND).await.unwrap();
    assert_eq!(began.elapsed(), 7 * SECOND);
    let Revocation::StillHeld { left: Some(left) } = said else {
        panic!("{said:?}");
    };
    assert!(left <= 23 * SECOND && left > 22 * SECOND, "{left:?}");
}

#[tokio::test(start_paused = true)]
async fn who_stops_asking_leaves_the_request() {
    let (_, _holder, operator, guard) = held().await;
    let mut asking = pin!(operator.revoke("a", guard.token(), TTL));
    assert!(asking.as_mut().now_or_never().is_none());
    assert_eq!(guard.lost().await, LossReason::Asked);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_by_hand_finds_the_request() {
    let backend = MemoryBackend::new();
    let client = LockClient::new(backend.clone());
    let options = AcquireOptions::new().ttl(TTL).renew(false);
    let guard = client.lock("a").unwrap().acquire_with(&options).await.unwrap();
    let end = guard.valid_until();
    let _ = client.revoke("a", guard.token(), Duration::ZERO).await.unwrap();
    assert!(guard.renew().await.unwrap_err().is_lost());
    assert_eq!(guard.lost().await, LossReason::Asked);
    assert_eq!(guard.valid_until(), end, "it was not prolonged");
    assert!(is_taken(&client).await);
    drop(guard);
    let next = client.lock("a").unwrap().acquire_timeout(SECOND).await.unwrap();
    next.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_request_is_repeated_until_the_hold_has_ended() {
    let (backend, _holder, operator, guard) = held().await;
    let token = guard.token();
    // Without a reply to the first request, nobody can tell.
    backend.fail_next(FaultPoint::Revoke, 1);
    let failed = operator.revoke("a", token, TTL).await;
    assert!(failed.unwrap_err().is_transient());
    assert!(guard.is_held());
    let release = async {
        assert_eq!(guard.lost().await, LossReason::Asked);
        backend.fail_next(FaultPoint::Revoke, 3);
        backend.lose_replies(FaultPoint::Revoke, 3);
        drop(guard);
    };
    let (said, ()) = join(operator.revoke("a", token, TTL), release).await;
    assert_eq!(said.unwrap(), Revocation::Confirmed);
}

#[tokio::test(start_paused = true)]
async fn cannot_tell_is_not_still_held() {
    let (backend, _holder, operator, guard) = held().await;
    let break_down = async {
        tokio::time::sleep(SECOND).await;
        backend.fail_next(FaultPoint::Revoke, u32::MAX);
    };
    let (said, ()) = join(operator.revoke("a", guard.token(), 5 * SECOND), break_down).await;
    assert!(said.unwrap_err().is_transient());
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_was_passed_on_is_not_hit() {
    let (_, holder, operator, guard) = held().await;
    let token = guard.token();
    let asked = async { operator.revoke("a", token, Duration::ZERO).await.unwrap() };
    let heir = passed_on(&holder, guard, asked).await;
    heir.renew().await.unwrap();
    let gone = operator.revoke("a", token, SECOND).await.unwrap();
    assert_eq!(gone, Revocation::NotHeld);
    tokio::time::sleep(2 * TTL).await;
    assert!(heir.is_held());
}

#[tokio::test(start_paused = true)]
async fn force_by_the_token_before_ends_no_heirs_hold() {
    let (_, holder, operator, guard) = held().await;
    let token = guard.token();
    let heir = passed_on(&holder, guard, async {}).await;
    assert!(!operator.revoke_by_force("a", token).await.unwrap(), "it is over");
    heir.renew().await.unwrap();
    assert!(operator.revoke_by_force("a", heir.token()).await.unwrap());
    assert_eq!(heir.lost().await, LossReason::Revoked);
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_was_asked_for_is_not_passed_on() {
    let (_, holder, operator, guard) = held().await;
    let token = guard.token();
    let heir = tokio::spawn({
        let lock = holder.lock("a").unwrap();
        async move { lock.acquire().await.unwrap() }
    });
    let _ = operator.revoke("a", token, Duration::ZERO).await.unwrap();
    assert_eq!(guard.lost().await, LossReason::Asked);
    let rival = operator.lock("a").unwrap();
    let mut waits = pin!(rival.acquire());
    assert!(waits.as_mut().now_or_never().is_none());
    drop(guard);
    // The other client has waited at the server, and the heir only behind the guard.
    let next = tokio::time::timeout(SECOND, waits).await;
    let next = next.expect("the heir was served first").unwrap();
    assert!(!heir.is_finished());
    next.release().await.unwrap();
    assert!(heir.await.unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn closing_the_holder_releases_what_was_asked_for() {
    let (_, holder, operator, guard) = held().await;
    let asking = operator.revoke("a", guard.token(), TTL);
    let close = async {
        assert_eq!(guard.lost().await, LossReason::Asked);
        let began = Instant::now();
        holder.close(10 * SECOND).await.unwrap();
        assert!(began.elapsed() < SECOND, "{:?}", began.elapsed());
    };
    let (said, ()) = join(asking, close).await;
    assert_eq!(said.unwrap(), Revocation::Confirmed);
}

/// Its user may go by the end that it had.
#[tokio::test(start_paused = true)]
async fn what_was_asked_for_has_its_end_with_its_client() {
    let (_, holder, operator, guard) = held().await;
    let _ = operator.revoke("a", guard.token(), Duration::ZERO).await.unwrap();
    assert_eq!(guard.lost().await, LossReason::Asked);
    assert!(guard.valid_until().unwrap() > Instant::now() + TTL / 2);
    holder.close(SECOND).await.unwrap();
    assert!(!is_taken(&operator).await);
    assert!(guard.valid_until().unwrap() <= Instant::now(), "others have it");
}

#[tokio::test(start_paused = true)]
async fn by_force_nobody_is_waited_for() {
    let (_, _holder, operator, guard) = held().await;
    let _ = operator.revoke("a", guard.token(), Duration::ZERO).await.unwrap();
    assert_eq!(guard.lost().await, LossReason::Asked);
    assert!(operator.revoke_by_force("a", guard.token()).await.unwrap());
    assert!(!is_taken(&operator).await);
}

/// It may have brought its work to an end in the time that it had.
#[tokio::test(start_paused = true)]
async fn who_was_asked_hears_that_no_time_is_left() {
    let (_, _holder, operator, guard) = held().await;
    let left = || guard.valid_until().unwrap() - Instant::now();
    let _ = operator.revoke("a", guard.token(), Duration::ZERO).await.unwrap();
    assert_eq!(guard.lost().await, LossReason::Asked);
    tokio::time::sleep(5 * SECOND).await;
    assert!(left() > TTL / 4, "nobody has ended it: {:?}", left());
    assert!(operator.revoke_by_force("a", guard.token()).await.unwrap());
    tokio::time::sleep(2 * SECOND).await;
    assert_eq!(left(), Duration::ZERO);
    assert_eq!(guard.lost().await, LossReason::Asked);
}

/// Nobody can tell.
#[tokio::test(start_paused = true)]
async fn who_was_asked_keeps_its_time_without_an_answer() {
    let (backend, _holder, operator, guard) = held().await;
    let _ = operator.revoke("a", guard.token(), Duration::ZERO).await.unwrap();
    assert_eq!(guard.lost().await, LossReason::Asked);
    let end = guard.valid_until();
    backend.fail_next(FaultPoint::Renew, u32::MAX);
    tokio::time::sleep(TTL / 2).await;
    assert_eq!(guard.valid_until(), end);
    let released = operator.revoke("a", guard.token(), SECOND);
    let (said, ()) = join(released, async { drop(guard) }).await;
    assert_eq!(said.unwrap(), Revocation::Confirmed);
}
