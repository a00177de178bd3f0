//! Holds that are not renewed for ever, on paused time.

use std::{
    future::pending,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireOptions, Error, FencingToken, Instant, Lock, LockClient, LockKind, LockName, LockState,
    LossReason, MemoryBackend, Result, Revocation,
    memory::FaultPoint,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Lease, Renewal},
};

use crate::probe::Probe;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(9);
const MAX_HOLD: Duration = Duration::from_secs(60);

fn options() -> AcquireOptions {
    AcquireOptions::new().ttl(TTL).max_hold(MAX_HOLD)
}

fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn lock(probe: &Probe) -> Lock {
    let lock = LockClient::new(probe.clone()).lock("a").unwrap();
    lock.with_options(options())
}

/// A lease that begins with a reply, as that of a session does, may prove more than a ttl.
#[tokio::test(start_paused = true)]
async fn a_longer_lease_ends_a_ttl_after_then() {
    let probe = Probe {
        renewed_for: Some(TTL * 2),
        ..Probe::default()
    };
    let guard = lock(&probe).acquire().await.unwrap();
    let granted = Instant::now();
    assert_eq!(guard.lost().await, LossReason::MaxHold);
    let held = granted.elapsed();
    assert!(held > MAX_HOLD && held <= MAX_HOLD + TTL + 10 * MS, "{held:?}");
}

#[tokio::test(start_paused = true)]
async fn it_is_renewed_until_then_and_ends_with_its_lease() {
    let probe = Probe::default();
    let guard = lock(&probe).acquire().await.unwrap();
    let granted = Instant::now();
    let left = guard.renewal_failing().await;
    let warned = granted.elapsed();
    assert!(warned >= MAX_HOLD && warned < MAX_HOLD + 10 * MS, "{warned:?}");
    assert!(left > TTL / 2 && left <= TTL, "{left:?} of {TTL:?} are left");
    assert!(guard.is_held());
    let (renewals, until) = (probe.counts.calls().1, guard.valid_until().unwrap());
    assert_eq!(guard.lost().await, LossReason::MaxHold);
    assert!(Instant::now() >= until, "not before the end of its lease");
    assert!(granted.elapsed() <= MAX_HOLD + TTL);
    assert_eq!(probe.counts.calls().1, renewals, "no renewal after its max_hold");
    assert!(!guard.is_held());
    // The guard is kept, as a task that hangs keeps it.
    let other = lock(&probe);
    drop(other.acquire_timeout(SECOND).await.unwrap());
    let err = guard.release().await.unwrap_err();
    assert!(err.to_string().contains("max_hold"), "{err}");
}

/// The server hints that the hold may be gone.
#[tokio::test(start_paused = true)]
async fn a_question_beyond_then_asks_for_what_is_left() {
    let probe = Probe::default();
    let lock = lock(&probe);
    let guard = lock.acquire().await.unwrap();
    guard.renewal_failing().await;
    let (renewals, until) = (probe.counts.calls().1, guard.valid_until().unwrap());
    for _ in 0..3 {
        tokio::time::sleep(TTL / 8).await;
        probe.hint.notify_one();
        tokio::time::sleep(MS).await;
        let left = lock.inspect().await.unwrap().holders[0].left.unwrap();
        let here = until - Instant::now();
        assert!(left >= here && left < here + TTL / 40, "{left:?} for {here:?}");
        assert_eq!(guard.valid_until(), Some(until));
    }
    assert_eq!(probe.counts.calls().1, renewals + 3, "asked each time");
    assert_eq!(guard.lost().await, LossReason::MaxHold);
    assert!(Instant::now() < until + 10 * MS);
}

#[tokio::test(start_paused = true)]
async fn it_is_not_renewed_by_hand_either() {
    let guard = lock(&Probe::default()).acquire().await.unwrap();
    guard.renew().await.unwrap();
    guard.renewal_failing().await;
    let until = guard.valid_until();
    let err = guard.renew().await.unwrap_err();
    assert!(matches!(err, Error::Backend { transient: false, .. }), "{err}");
    let shown = lockkit_core::spi::chain(&err);
    assert!(shown.contains("`max_hold` of 60s"), "{shown}");
    assert_eq!(guard.valid_until(), until);
    assert!(guard.is_held(), "it is held to the end of its lease");
    guard.release().await.unwrap();
}

/// A change that is neither polled nor dropped keeps the claim for a while, beyond that time.
#[tokio::test(start_paused = true)]
async fn who_waits_for_the_claim_beyond_then_renews_nothing() {
    for changes_ttl in [false, true] {
        let probe = Probe::default();
        let guard = lock(&probe).acquire().await.unwrap();
        let granted = Instant::now();
        tokio::time::sleep(MAX_HOLD.saturating_sub(SECOND)).await;
        let (polled, mut waiting) = {
            probe.memory.delay(FaultPoint::Renew, 2 * TTL);
            let mut forgotten = Box::pin(guard.renew());
            let mut waiting: Pin<Box<dyn Future<Output = Result<()>>>> = if changes_ttl {
                Box::pin(guard.set_ttl(MAX_HOLD))
            } else {
                Box::pin(guard.renew())
            };
            let renewals = probe.counts.calls().1;
            while probe.counts.calls().1 == renewals {
                assert!(poll_once(&mut forgotten).is_pending());
                // The worker has the claim at first.
                tokio::task::yield_now().await;
            }
            assert!(poll_once(&mut waiting).is_pending());
            (forgotten, waiting)
        };
        tokio::time::sleep(2 * SECOND).await;
        probe.memory.delay(FaultPoint::Renew, Duration::ZERO);
        drop(polled);
        let err = waiting.as_mut().await.unwrap_err();
        drop(waiting);
        assert!(
            matches!(err, Error::Backend { transient: false, .. }),
            "changes_ttl={changes_ttl}: {err}"
        );
        assert_eq!(guard.lost().await, LossReason::MaxHold);
        let lasted = granted.elapsed();
        assert!(lasted <= MAX_HOLD + TTL, "changes_ttl={changes_ttl}: {lasted:?}");
    }
}

/// The worker has the claim at first. It gives way at once, but who asks for it is not polled for a while.
#[tokio::test(start_paused = true)]
async fn who_waits_for_the_claim_beyond_then_detaches_nothing() {
    let guard = lock(&Probe::default()).acquire().await.unwrap();
    let granted = Instant::now();
    tokio::time::sleep(MAX_HOLD.saturating_sub(SECOND)).await;
    let mut detach = Box::pin(guard.detach());
    assert!(poll_once(&mut detach).is_pending());
    tokio::time::sleep(2 * SECOND).await;
    let err = detach.await.unwrap_err();
    assert!(
        matches!(err.error, Error::Backend { transient: false, .. }),
        "{err}"
    );
    assert_eq!(err.guard.lost().await, LossReason::MaxHold);
    let lasted = granted.elapsed();
    assert!(lasted <= MAX_HOLD + TTL, "{lasted:?}");
}

#[tokio::test(start_paused = true)]
async fn a_downgrade_is_not_asked_for_again_after_then() {
    let server = MemoryBackend::new();
    let lock = LockClient::new(server.clone()).lock("a").unwrap();
    let guard = lock.acquire_with(&options()).await.unwrap();
    let granted = Instant::now();
    tokio::time::sleep(MAX_HOLD.saturating_sub(SECOND)).await;
    server.fail_next(FaultPoint::Downgrade, u32::MAX);
    let downgrade = tokio::spawn(guard.downgrade());
    tokio::time::sleep(2 * SECOND).await;
    server.fail_next(FaultPoint::Downgrade, 0);
    let outcome = downgrade.await.unwrap();
    let over = outcome.map(|reading| (reading.is_held(), reading.valid_until()));
    let err = over.unwrap_err();
    assert!(err.guard.is_none(), "{err}");
    assert!(
        matches!(
            err.error,
            Error::Lost {
                reason: LossReason::MaxHold,
                ..
            }
        ),
        "{err}"
    );
    // It is released at once.
    drop(lock.acquire_timeout(SECOND).await.unwrap());
    assert!(
        granted.elapsed() < MAX_HOLD + 2 * SECOND,
        "{:?}",
        granted.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn an_outage_before_then_is_no_max_hold() {
    let probe = Probe::default();
    let guard = lock(&probe).acquire().await.unwrap();
    tokio::time::sleep(MAX_HOLD.saturating_sub(3 * TTL)).await;
    probe.memory.fail_next(FaultPoint::Renew, u32::MAX);
    assert_eq!(guard.lost().await, LossReason::Expired);
}

/// Nobody looks for an hour: the lease was over long before the time was.
#[tokio::test(start_paused = true)]
async fn what_ended_before_then_is_told_as_it_was() {
    let guard = lock(&Probe::default())
        .acquire_with(&options().renew(false))
        .await
        .unwrap();
    tokio::time::advance(3_600 * SECOND).await;
    assert_eq!(guard.lost().await, LossReason::Expired);
}

#[tokio::test(start_paused = true)]
async fn a_failed_renewal_is_not_repeated_after_then() {
    let probe = Probe::default();
    let guard = lock(&probe).acquire().await.unwrap();
    // One renewal falls into this time, and what repeats it.
    tokio::time::sleep(MAX_HOLD.saturating_sub(5 * SECOND)).await;
    let before = probe.counts.calls().1;
    probe.memory.fail_next(FaultPoint::Renew, u32::MAX);
    tokio::time::sleep(5 * SECOND + 5 * MS).await;
    let renewals = probe.counts.calls().1;
    assert!(renewals > before + 1, "{renewals} after {before}");
    assert_eq!(guard.lost().await, LossReason::MaxHold);
    assert_eq!(probe.counts.calls().1, renewals);
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_is_passed_on_begins_its_own_time() {
    let probe = Probe::default();
    let lock = lock(&probe);
    let first = lock.acquire().await.unwrap();
    let heir = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await.unwrap() }
    });
    // It is past its max_hold when it is released: what is renewed then is its heir's.
    first.renewal_failing().await;
    tokio::time::sleep(4 * SECOND).await;
    first.release().await.unwrap();
    let (heir, passed_on) = (heir.await.unwrap(), Instant::now());
    assert_eq!(
        probe.counts.attempts.load(Ordering::SeqCst),
        1,
        "it was passed on"
    );
    assert_eq!(heir.lost().await, LossReason::MaxHold);
    let lasted = passed_on.elapsed();
    assert!(lasted > MAX_HOLD && lasted <= MAX_HOLD + TTL, "{lasted:?}");
}

#[tokio::test(start_paused = true)]
async fn a_warning_reaches_all_who_wait_for_it() {
    let guard = lock(&Probe::default()).acquire().await.unwrap();
    let granted = Instant::now();
    let waiting: Vec<_> = (0..3).map(|_| tokio::spawn(guard.renewal_failing())).collect();
    for waiting in waiting {
        waiting.await.unwrap();
        assert!(granted.elapsed() < MAX_HOLD + 10 * MS, "{:?}", granted.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_max_hold_below_the_ttl_is_refused() {
    let client = LockClient::new(MemoryBackend::new());
    let too_short = AcquireOptions::new().max_hold(TTL);
    // The default ttl is longer.
    for options in [too_short.clone(), too_short.clone().ttl(TTL + MS)] {
        let err = client
            .lock("a")
            .unwrap()
            .acquire_with(&options)
            .await
            .unwrap_err();
        match &err {
            Error::InvalidOptions { option, reason, .. } => {
                assert_eq!(*option, "max_hold");
                assert!(reason.contains("9s") && reason.contains("ttl"), "{reason}");
            }
            other => panic!("{other}"),
        }
    }
    let just = too_short.ttl(TTL);
    drop(client.lock("a").unwrap().acquire_with(&just).await.unwrap());
    for refused in [Duration::ZERO, Duration::MAX] {
        let options = AcquireOptions::new().max_hold(refused);
        let err = options.validate().unwrap_err();
        assert!(
            matches!(
                err,
                Error::InvalidOptions {
                    option: "max_hold",
                    ..
                }
            ),
            "{err}"
        );
    }
}

/// Memory, with holds that have no lease.
#[derive(Debug, Default)]
struct Leaseless(MemoryBackend, Arc<Renewals>);

/// The way in which renewals are answered.
#[derive(Debug, Default)]
struct Renewals {
    hang: AtomicBool,
    are_asked: AtomicBool,
}

#[derive(Debug)]
struct LeaselessClaim(Box<dyn Claim>, Arc<Renewals>);

#[async_trait]
impl Backend for Leaseless {
    fn info(&self) -> BackendInfo {
        let mut info = self.0.info();
        info.capabilities.lease = false;
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let mut request = request.clone();
        request.ttl = AcquireOptions::MAX_DURATION;
        Ok(Box::new(LeaselessClaim(
            self.0.claim(&request).await?,
            self.1.clone(),
        )))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.0.inspect(name, kind).await
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        let asked = Backend::revoke(&self.0, name, kind, token).await?;
        Ok(asked.map(without_length))
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

fn without_length(lease: Lease) -> Lease {
    Lease::new(lease.since, None)
}

#[async_trait]
impl Claim for LeaselessClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        let granted = self.0.attempt(patience).await?;
        Ok(granted.map(|grant| Grant::new(grant.tokens, without_length(grant.lease))))
    }

    async fn renew(&mut self) -> Result<Renewal> {
        if self.1.hang.load(Ordering::SeqCst) {
            pending::<()>().await;
        }
        if self.1.are_asked.load(Ordering::SeqCst) {
            return Ok(Renewal::Asked);
        }
        Ok(match self.0.renew().await? {
            Renewal::Held(lease) => Renewal::Held(without_length(lease)),
            lost => lost,
        })
    }

    async fn release(&mut self) -> Result<()> {
        self.0.release().await
    }

    async fn notified(&mut self) {
        self.0.notified().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_without_a_lease_ends_a_ttl_after_then() {
    let client = LockClient::new(Leaseless::default());
    let lock = client.lock("a").unwrap().with_options(options());
    let guard = lock.acquire().await.unwrap();
    let granted = Instant::now();
    assert_eq!((guard.valid_until(), guard.lease_length()), (None, None));
    let left = guard.renewal_failing().await;
    assert!(granted.elapsed() < MAX_HOLD + 10 * MS);
    assert!(left + 10 * MS > TTL && left <= TTL, "{left:?}");
    assert_eq!(guard.lease_length(), Some(TTL));
    let until = guard.valid_until().unwrap();
    assert!(until <= granted + MAX_HOLD + TTL + MS);
    // Nobody else ends it: this client releases it, once its holder has been told.
    let next = lock.acquire().await.unwrap();
    assert!(
        !guard.is_held(),
        "another was granted while the first was not told"
    );
    assert_eq!(guard.lost().await, LossReason::MaxHold);
    let lasted = granted.elapsed();
    assert!(
        lasted >= MAX_HOLD + TTL && lasted < MAX_HOLD + TTL + 100 * MS,
        "{lasted:?}"
    );
    assert!(next.token() > guard.token());
    next.release().await.unwrap();
}

/// The task that was asked to let go hangs, which is what `max_hold` is for.
#[tokio::test(start_paused = true)]
async fn an_asked_hold_without_a_lease_ends_by_then_too() {
    let client = LockClient::new(Leaseless::default());
    let lock = client.lock("a").unwrap().with_options(options());
    for asked_after in [SECOND, MAX_HOLD + SECOND] {
        let guard = lock.acquire().await.unwrap();
        let granted = Instant::now();
        tokio::time::sleep(asked_after).await;
        let said = client.revoke("a", guard.token(), Duration::ZERO).await.unwrap();
        assert_eq!(said, Revocation::StillHeld { left: None });
        assert_eq!(guard.lost().await, LossReason::Asked);
        let next = tokio::time::timeout(2 * MAX_HOLD, lock.acquire()).await;
        let next = next.expect("the hold of a task that hangs never ends").unwrap();
        let lasted = granted.elapsed();
        assert!(
            lasted >= MAX_HOLD + TTL && lasted < MAX_HOLD + TTL + SECOND,
            "{lasted:?}"
        );
        drop(guard);
        next.release().await.unwrap();
    }
}

/// Such as on a disk that hangs. A look tells at once; who waits for the signals has to be woken.
#[tokio::test(start_paused = true)]
async fn a_renewal_without_an_answer_delays_neither_end() {
    let backend = Leaseless::default();
    let renewals = backend.1.clone();
    let lock = LockClient::new(backend).lock("a").unwrap();
    let options = options().op_timeout(10 * MAX_HOLD);
    let guard = lock.acquire_with(&options).await.unwrap();
    let granted = Instant::now();
    tokio::time::sleep(MAX_HOLD / 2).await;
    renewals.hang.store(true, Ordering::SeqCst);
    guard.renewal_failing().await;
    let warned = granted.elapsed();
    assert!(
        warned >= MAX_HOLD && warned < MAX_HOLD + 10 * MS,
        "warned after {warned:?}"
    );
    assert_eq!(guard.lost().await, LossReason::MaxHold);
    let told = granted.elapsed();
    assert!(
        told >= MAX_HOLD + TTL && told < MAX_HOLD + TTL + 10 * MS,
        "told after {told:?}"
    );
    drop(lock.acquire_timeout(SECOND).await.unwrap());
}

/// Asked to give up its hold, it would keep that for as long as it hangs.
#[tokio::test(start_paused = true)]
async fn a_task_that_hangs_is_not_waited_for_beyond_then() {
    let backend = Leaseless::default();
    let renewals = backend.1.clone();
    let lock = LockClient::new(backend)
        .lock("a")
        .unwrap()
        .with_options(options());
    let guard = lock.acquire().await.unwrap();
    let granted = Instant::now();
    renewals.are_asked.store(true, Ordering::SeqCst);
    assert_eq!(guard.lost().await, LossReason::Asked);
    renewals.are_asked.store(false, Ordering::SeqCst);
    let next = lock.acquire_timeout(10 * MAX_HOLD).await.unwrap();
    let waited = granted.elapsed();
    assert!(
        waited >= MAX_HOLD + TTL && waited < MAX_HOLD + TTL + SECOND,
        "it is let go after {waited:?}"
    );
    next.release().await.unwrap();
    drop(guard);
}

/// A longer lease that was confirmed before then is not cut short by the ttl that the hold began with.
#[tokio::test(start_paused = true)]
async fn a_ttl_that_was_set_before_then_lasts_beyond_it() {
    for ttl in [TTL * 3, TTL / 3] {
        let guard = lock(&Probe::default()).acquire().await.unwrap();
        let granted = Instant::now();
        tokio::time::sleep(MAX_HOLD.saturating_sub(SECOND)).await;
        guard.set_ttl(ttl).await.unwrap();
        let told = guard.valid_until().unwrap();
        assert_eq!(guard.lost().await, LossReason::MaxHold);
        let (told, held) = (told - granted, granted.elapsed());
        assert!(
            held + 10 * MS >= told && held > MAX_HOLD,
            "{ttl:?}: {held:?} of {told:?}"
        );
        assert!(held <= MAX_HOLD + ttl + 10 * MS, "{ttl:?}: {held:?}");
    }
}
