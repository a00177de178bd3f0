//! Hand-offs within one client: their requests to the server, and their order.

use std::{sync::atomic::Ordering, time::Duration};

use lockkit_core::{AcquireOptions, Instant, Lock, LockClient, LockGuard, MemoryBackend, memory::FaultPoint};

use crate::probe::Probe;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn lock(options: AcquireOptions) -> (Probe, Lock) {
    let probe = Probe::default();
    let lock = LockClient::new(probe.clone()).lock("a").unwrap();
    (probe, lock.with_options(options))
}

/// A task that is in the queue for `lock` by the time this returns.
async fn waiter(lock: &Lock) -> tokio::task::JoinHandle<LockGuard> {
    let lock = lock.clone();
    let task = tokio::spawn(async move { lock.acquire().await.unwrap() });
    tokio::task::yield_now().await;
    task
}

#[tokio::test(start_paused = true)]
async fn the_server_sees_one_attempt_and_release_per_block() {
    const TASKS: usize = 16;
    const ROUNDS: usize = 50;
    for handoffs in [0, 1, 7, 31] {
        let (probe, lock) = lock(AcquireOptions::new().local_handoffs(handoffs));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..TASKS {
            let lock = lock.clone();
            tasks.spawn(async move {
                for _ in 0..ROUNDS {
                    let guard = lock.acquire().await.unwrap();
                    tokio::task::yield_now().await;
                    guard.release().await.unwrap();
                }
            });
        }
        tasks.join_all().await;
        let blocks = TASKS * ROUNDS / (handoffs as usize + 1);
        assert_eq!(probe.counts.calls(), (blocks, 0, blocks), "{handoffs} hand-offs");
    }
}

/// A claim's heirs: those behind it when it is opened, or that came since the claim before was opened.
#[tokio::test(start_paused = true)]
async fn a_claim_says_whether_others_wait_behind_it() {
    let (probe, lock) = lock(AcquireOptions::new().local_handoffs(0));
    let contended = || probe.counts.contended.load(Ordering::SeqCst);
    for _ in 0..3 {
        lock.acquire().await.unwrap().release().await.unwrap();
    }
    assert_eq!(contended(), 0, "it was alone");
    let held = lock.acquire().await.unwrap();
    let behind = [waiter(&lock).await, waiter(&lock).await, waiter(&lock).await];
    held.release().await.unwrap();
    for (n, next) in behind.into_iter().enumerate() {
        let next = next.await.unwrap();
        // The last of them is alone.
        assert_eq!(contended(), (n + 1).min(2));
        next.release().await.unwrap();
    }
    let held = lock.acquire().await.unwrap();
    let gone = waiter(&lock).await;
    gone.abort();
    held.release().await.unwrap();
    for _ in 0..2 {
        lock.acquire().await.unwrap().release().await.unwrap();
        assert_eq!(contended(), 3, "somebody had come");
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_told_with_which_token_it_is_passed_on() {
    let (probe, lock) = lock(AcquireOptions::new());
    let mut held = lock.acquire().await.unwrap();
    let mut tokens = Vec::new();
    for _ in 0..3 {
        let heir = waiter(&lock).await;
        held.release().await.unwrap();
        held = heir.await.unwrap();
        tokens.push(held.token().get());
    }
    assert_eq!(*probe.counts.passed_on.lock().unwrap(), tokens);
    assert_eq!(probe.counts.calls(), (1, 0, 0));
}

/// Nobody asks the server at a hand-off. Whoever has the hold next is told.
#[tokio::test(start_paused = true)]
async fn a_hold_that_was_broken_may_be_passed_on_and_is_told() {
    let server = MemoryBackend::new();
    let (ours, theirs) = (LockClient::new(server.clone()), LockClient::new(server));
    let lock = ours.lock("a").unwrap();
    let broken = lock.acquire().await.unwrap();
    let heir = waiter(&lock).await;
    assert!(theirs.revoke_by_force("a", broken.token()).await.unwrap());
    let theirs = theirs.lock("a").unwrap().try_acquire().await.unwrap().unwrap();
    broken.release().await.unwrap();
    let heir = heir.await.unwrap();
    assert!(heir.token() < theirs.token(), "a resource refuses it");
    let passed = Instant::now();
    heir.lost().await;
    assert!(passed.elapsed() <= 10 * MS, "told after {:?}", passed.elapsed());
    assert!(heir.release().await.is_err_and(|error| error.is_lost()));
    assert!(theirs.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_lease_below_two_thirds_is_renewed_before_it_is_passed_on() {
    let options = AcquireOptions::new().ttl(9 * SECOND);
    for (age, renewals) in [(2_990 * MS, 0), (3_010 * MS, 1)] {
        let (probe, lock) = lock(options.clone());
        let first = lock.acquire_with(&options.clone().renew(false)).await.unwrap();
        let end = first.valid_until().unwrap();
        let heir = waiter(&lock).await;
        tokio::time::sleep(age).await;
        first.release().await.unwrap();
        let heir = heir.await.unwrap();
        assert_eq!(probe.counts.calls(), (1, renewals, 0), "after {age:?}");
        let extended = heir.valid_until().unwrap() - end;
        let expected = if renewals == 0 { Duration::ZERO } else { age };
        assert_eq!(extended.as_millis(), expected.as_millis());
        heir.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn an_heir_that_does_not_renew_gets_a_full_lease() {
    let (probe, lock) = lock(AcquireOptions::new().ttl(9 * SECOND));
    let first = lock.acquire().await.unwrap();
    let heir = waiter(&lock.with_options(AcquireOptions::new().renew(false))).await;
    tokio::time::sleep(2 * SECOND).await;
    first.release().await.unwrap();
    let heir = heir.await.unwrap();
    let left = heir.valid_until().unwrap() - tokio::time::Instant::now();
    assert!(left > 8_990 * MS, "{left:?} of 9 s");
    assert_eq!(probe.counts.calls(), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn the_smallest_number_of_hand_offs_counts() {
    for (holder, heirs, by_the_server) in [
        // For each of the heirs: `true` if the server granted it the lock.
        (32, [0, 32, 32], [true, true, false]),
        (32, [1, 32, 32], [false, true, false]),
        (1, [32, 32, 32], [false, true, false]),
        (32, [32, 2, 32], [false, false, true]),
        (32, [32, 1, 32], [false, true, false]),
    ] {
        let (probe, lock) = lock(AcquireOptions::new());
        let options = AcquireOptions::new();
        let mut guard = lock
            .acquire_with(&options.clone().local_handoffs(holder))
            .await
            .unwrap();
        let mut waiters = Vec::new();
        for heir in heirs {
            let lock = lock.with_options(options.clone().local_handoffs(heir));
            waiters.push(waiter(&lock).await);
        }
        let mut went = Vec::new();
        for next in waiters {
            let (before, ..) = probe.counts.calls();
            guard.release().await.unwrap();
            guard = next.await.unwrap();
            went.push(probe.counts.calls().0 > before);
        }
        assert_eq!(went, by_the_server, "{holder}, then {heirs:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_cannot_be_proven_is_not_passed_on() {
    let (probe, lock) = lock(AcquireOptions::new().ttl(9 * SECOND).renew(false));
    let first = lock.acquire().await.unwrap();
    let heir = waiter(&lock).await;
    tokio::time::sleep(4 * SECOND).await;
    probe.memory.fail_next(lockkit_core::memory::FaultPoint::Renew, 1);
    first.release().await.unwrap();
    let heir = heir.await.unwrap();
    assert_eq!(probe.counts.calls(), (2, 1, 1), "it went by the server");
    assert!(heir.valid_until().unwrap() - tokio::time::Instant::now() > 8 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_with_another_ttl_or_label_goes_to_the_server_itself() {
    let base = AcquireOptions::new().ttl(9 * SECOND).label("one");
    for other in [
        AcquireOptions::new().ttl(8 * SECOND),
        AcquireOptions::new().label("two"),
    ] {
        let (probe, lock) = lock(base.clone());
        let first = lock.acquire().await.unwrap();
        let heir = waiter(&lock.with_options(other)).await;
        first.release().await.unwrap();
        let heir = heir.await.unwrap();
        assert_eq!(probe.counts.calls(), (2, 0, 1));
        let like = waiter(&lock).await;
        heir.release().await.unwrap();
        drop(like.await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn an_heir_renews_by_its_own_options() {
    let (_, lock) = lock(AcquireOptions::new().ttl(SECOND));
    let first = lock.acquire().await.unwrap();
    let heir = waiter(&lock.with_options(AcquireOptions::new().renew(false))).await;
    first.release().await.unwrap();
    let heir = heir.await.unwrap();
    let second = waiter(&lock).await;
    tokio::time::sleep(1_100 * MS).await;
    assert!(!heir.is_held(), "nobody asked for it to be renewed");
    let second = second.await.unwrap();
    tokio::time::sleep(5 * SECOND).await;
    assert!(second.is_held());
}

#[tokio::test(start_paused = true)]
async fn an_heir_is_released_by_its_own_options() {
    let (probe, lock) = lock(AcquireOptions::new());
    let first = lock.acquire().await.unwrap();
    let heir = waiter(&lock.with_options(AcquireOptions::new().op_timeout(100 * MS))).await;
    first.release().await.unwrap();
    let heir = heir.await.unwrap();
    probe.memory.delay(FaultPoint::Release, SECOND);
    let began = Instant::now();
    assert!(heir.release().await.unwrap_err().is_transient());
    assert!(began.elapsed() < 200 * MS, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_guard_is_handed_on_too() {
    let (probe, lock) = lock(AcquireOptions::new());
    let first = lock.acquire().await.unwrap();
    let heir = waiter(&lock).await;
    let token = first.token();
    drop(first);
    let heir = heir.await.unwrap();
    assert!(heir.token() > token);
    assert_eq!(probe.counts.calls(), (1, 0, 0));
}

/// A renewal may have found out that the hold is lost before its future was dropped.
#[tokio::test(start_paused = true)]
async fn a_hold_whose_renewal_was_dropped_is_renewed_first() {
    for passes_on in [false, true] {
        let (probe, lock) = lock(AcquireOptions::new());
        let guard = lock.acquire().await.unwrap();
        tokio::time::sleep(SECOND).await;
        let next = waiter(&lock).await;
        probe.memory.delay(FaultPoint::Renew, SECOND);
        let renewed = tokio::time::timeout(MS, guard.renew()).await;
        assert!(renewed.is_err(), "it was not dropped");
        probe.memory.delay(FaultPoint::Renew, Duration::ZERO);
        let renewals = || probe.counts.calls().1;
        assert_eq!(renewals(), 1);
        if passes_on {
            guard.release().await.unwrap();
            next.await.unwrap().release().await.unwrap();
        } else {
            tokio::time::sleep(10 * MS).await;
            drop(guard);
        }
        assert_eq!(renewals(), 2, "{passes_on}");
    }
}
