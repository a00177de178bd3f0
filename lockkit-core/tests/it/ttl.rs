//! Another ttl for a live hold, on paused time.

use std::{
    pin::pin,
    sync::atomic::Ordering,
    task::{Context, Waker},
    time::Duration,
};

use lockkit_core::{
    AcquireOptions, Error, Instant, LockClient, LockGuard, LossReason, MemoryBackend, memory::FaultPoint,
};

use crate::probe::Probe;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const SHORT: Duration = Duration::from_secs(6);
const LONG: Duration = Duration::from_secs(60);

async fn held(probe: &Probe, options: &AcquireOptions) -> LockGuard {
    let client = LockClient::new(probe.clone());
    client.lock("a").unwrap().acquire_with(options).await.unwrap()
}

fn left(guard: &LockGuard) -> Duration {
    guard.valid_until().unwrap() - Instant::now()
}

/// What the server says.
async fn left_there(probe: &Probe) -> Duration {
    let state = LockClient::new(probe.memory.clone()).inspect("a").await.unwrap();
    state.holders[0].left.unwrap()
}

#[tokio::test(start_paused = true)]
async fn renewals_follow_the_new_ttl() {
    let probe = Probe::default();
    let guard = held(&probe, &AcquireOptions::new().ttl(LONG)).await;
    for (ttl, renewals) in [(SHORT, 30), (LONG, 3)] {
        guard.set_ttl(ttl).await.unwrap();
        assert!(left(&guard) + 10 * MS > ttl && guard.lease_length() <= Some(ttl));
        assert_eq!(left_there(&probe).await, ttl);
        let before = probe.counts.calls().1;
        tokio::time::sleep(LONG + SECOND).await;
        let many = probe.counts.calls().1 - before;
        assert!(
            (renewals - 1..=renewals + 1).contains(&many),
            "{many} with a ttl of {ttl:?}"
        );
        assert!(guard.is_held());
    }
    guard.release().await.unwrap();
}

/// A renewal of the long lease, in vain or not, lets the next one rest for longer than the short lease lasts.
#[tokio::test(start_paused = true)]
async fn a_shorter_ttl_right_after_a_renewal_is_renewed_in_time() {
    for in_vain in [false, true] {
        let probe = Probe::default();
        let guard = held(&probe, &AcquireOptions::new().ttl(LONG)).await;
        if in_vain {
            probe.memory.lose_replies(FaultPoint::Renew, 1);
        }
        tokio::time::sleep(LONG / 3 + SECOND / 10).await;
        assert_eq!(probe.counts.calls().1, 1, "no renewal came before");
        guard.set_ttl(SECOND).await.unwrap();
        tokio::time::sleep(SHORT).await;
        assert!(guard.is_held(), "{:?}, in vain: {in_vain}", guard.check());
        guard.release().await.unwrap();
    }
}

/// From the request on, the server may count less.
#[tokio::test(start_paused = true)]
async fn a_shorter_lease_counts_before_it_is_confirmed() {
    let probe = Probe::default();
    let guard = held(&probe, &AcquireOptions::new().ttl(LONG).renew(false)).await;
    probe.memory.lose_replies(FaultPoint::Renew, u32::MAX);
    let err = guard.set_ttl(SHORT).await.unwrap_err();
    assert!(err.is_transient(), "{err}");
    assert!(left(&guard) <= left_there(&probe).await && left(&guard) + 10 * MS > SHORT);
    let asked = Instant::now();
    assert_eq!(guard.lost().await, LossReason::Expired);
    assert!(asked.elapsed() <= SHORT, "{:?}", asked.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_longer_lease_counts_once_it_is_confirmed() {
    let probe = Probe::default();
    let guard = held(&probe, &AcquireOptions::new().ttl(SHORT)).await;
    probe.memory.lose_replies(FaultPoint::Renew, 1);
    assert!(guard.set_ttl(LONG).await.unwrap_err().is_transient());
    assert!(left(&guard) <= SHORT && left_there(&probe).await == LONG);
    // The next renewal asks for it again.
    tokio::time::sleep(SHORT).await;
    assert!(left(&guard) > LONG / 2 && guard.lease_length() > Some(LONG / 2));
    guard.release().await.unwrap();
}

/// The background renewal goes on after a change that nobody confirmed or awaited, in time for the shorter lease.
#[tokio::test(start_paused = true)]
async fn a_hold_goes_on_after_a_change_that_was_dropped() {
    let probe = Probe::default();
    let guard = held(&probe, &AcquireOptions::new().ttl(LONG)).await;
    probe.memory.delay(FaultPoint::Renew, SECOND);
    for ttl in [SHORT, LONG, SHORT] {
        let change = guard.set_ttl(ttl);
        assert!(tokio::time::timeout(SECOND / 2, change).await.is_err());
        assert!(left(&guard) <= left_there(&probe).await);
    }
    tokio::time::sleep(5 * LONG).await;
    assert!(guard.is_held() && guard.lease_length() <= Some(SHORT));
    guard.release().await.unwrap();
}

/// It keeps the claim from the worker, which tells the loss all the same.
#[tokio::test(start_paused = true)]
async fn a_change_that_is_forgotten_is_told_in_time() {
    let probe = Probe::default();
    let guard = held(&probe, &AcquireOptions::new().ttl(LONG)).await;
    tokio::time::sleep(SECOND).await;
    probe.memory.delay(FaultPoint::Renew, LONG);
    let mut forgotten = pin!(guard.set_ttl(SHORT));
    let mut context = Context::from_waker(Waker::noop());
    while left(&guard) > SHORT {
        assert!(forgotten.as_mut().poll(&mut context).is_pending());
        // The worker has the claim at first.
        tokio::task::yield_now().await;
    }
    let asked = Instant::now();
    let told = tokio::spawn(guard.lost());
    assert_eq!(told.await.unwrap(), LossReason::Expired);
    assert!(asked.elapsed() <= SHORT, "told after {:?}", asked.elapsed());
    assert!(forgotten.await.unwrap_err().is_lost());
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_kept_changes_nothing() {
    let probe = Probe::default();
    let options = AcquireOptions::new().ttl(SHORT).max_hold(LONG);
    let guard = held(&probe, &options).await;
    let renewals = probe.counts.calls().1;
    let refused = [
        (Duration::ZERO, "ttl"),
        (9 * MS, "ttl"),
        (Duration::MAX, "ttl"),
        (LONG + MS, "max_hold"),
    ];
    for (ttl, named) in refused {
        let err = guard.set_ttl(ttl).await.unwrap_err();
        assert!(
            matches!(&err, Error::InvalidOptions { option, .. } if *option == named),
            "{err}"
        );
    }
    assert_eq!(
        (probe.counts.calls().1, guard.lease_length()),
        (renewals, Some(SHORT))
    );
    guard.set_ttl(LONG).await.unwrap();
    guard.renewal_failing().await;
    let (left, err) = (left(&guard), guard.set_ttl(SHORT).await.unwrap_err());
    assert!(matches!(err, Error::Backend { transient: false, .. }), "{err}");
    assert_eq!(self::left(&guard), left);
}

/// The server knows the ttl, and the heir has asked for its own.
#[tokio::test(start_paused = true)]
async fn it_is_passed_on_only_with_the_ttl_of_its_heir() {
    for (ttl, attempts) in [(LONG, 2), (SHORT, 1)] {
        let probe = Probe::default();
        let options = AcquireOptions::new().ttl(SHORT);
        let lock = LockClient::new(probe.clone())
            .lock("a")
            .unwrap()
            .with_options(options);
        let guard = lock.acquire().await.unwrap();
        guard.set_ttl(ttl).await.unwrap();
        let heir = tokio::spawn(async move { lock.acquire().await.unwrap() });
        tokio::time::sleep(MS).await;
        guard.release().await.unwrap();
        let heir = heir.await.unwrap();
        assert_eq!(probe.counts.attempts.load(Ordering::SeqCst), attempts, "{ttl:?}");
        assert_eq!(heir.lease_length(), Some(SHORT));
    }
}

/// A longer lease may be left there, whatever was asked for since.
#[tokio::test(start_paused = true)]
async fn a_release_is_tried_for_the_longest_ttl() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(memory.clone());
    let options = AcquireOptions::new().ttl(SHORT);
    let guard = client.lock("a").unwrap().acquire_with(&options).await.unwrap();
    guard.set_ttl(LONG).await.unwrap();
    memory.fail_next(FaultPoint::Renew, 1);
    assert!(guard.set_ttl(SHORT).await.unwrap_err().is_transient());
    memory.fail_next(FaultPoint::Release, u32::MAX);
    assert!(guard.release().await.unwrap_err().is_transient());
    tokio::time::sleep(LONG.saturating_sub(10 * SECOND)).await;
    memory.fail_next(FaultPoint::Release, 0);
    tokio::time::sleep(2 * SECOND).await;
    let other = LockClient::new(memory).lock("a").unwrap();
    assert!(other.try_acquire().await.unwrap().is_some(), "it is left there");
}
