//! Corners in which a deadline, an outage or a missing runtime meets something else.

use std::{
    future::{Future, poll_fn},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireOptions, DistributedLock, Error, Lock, LockClient, LockGuard, LockId, LockKind, LockName,
    LockState, LossReason, MemoryBackend, ReentrantLock, ReentrantOwner, Result, Revocation, acquire_all,
    memory::FaultPoint,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Mode, OwnerId, Renewal, SessionProof, chain},
};
use tokio::{sync::watch, time::Instant};

use crate::probe::Probe;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn client(backend: &MemoryBackend) -> LockClient {
    LockClient::new(backend.clone())
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_was_lost_is_no_answer_to_a_try() {
    let backend = MemoryBackend::new();
    let options = AcquireOptions::new().ttl(100 * MS).renew(false);
    let lock = client(&backend).lock("a").unwrap().with_options(options);
    let lost = lock.acquire().await.unwrap();
    backend.delay(FaultPoint::Release, 60 * SECOND);
    lost.lost().await;
    // Longer than the lease, and much shorter than the release is given.
    tokio::time::sleep(200 * MS).await;
    let taken = lock.try_acquire().await.unwrap();
    assert!(taken.is_some(), "nobody holds it, and the server was not asked");
}

#[tokio::test(start_paused = true)]
async fn a_hand_off_does_not_wait_for_a_renewal_beyond_the_lease() {
    let backend = MemoryBackend::new();
    let options = AcquireOptions::new().ttl(90 * MS).renew(false);
    let lock = client(&backend).lock("a").unwrap().with_options(options);
    let first = lock.acquire().await.unwrap();
    let next = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await }
    });
    tokio::time::sleep(60 * MS).await;
    backend.delay(FaultPoint::Renew, 60 * SECOND);
    let started = Instant::now();
    drop(first);
    let _next = next.await.unwrap().unwrap();
    assert!(started.elapsed() < SECOND, "after {:?}", started.elapsed());
}

#[test]
fn a_reentrant_deadline_needs_a_runtime_only_if_the_lock_does() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let lock = runtime.block_on(async { client(&MemoryBackend::new()).lock("a").unwrap() });
    let reentrant = ReentrantLock::new(lock);
    let owner = ReentrantOwner::new();
    let tried = futures_util::FutureExt::now_or_never(reentrant.try_acquire(&owner));
    assert!(tried.unwrap().unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_reentrant_lock_waits_once_for_as_long_as_its_lock_says() {
    let backend = MemoryBackend::new();
    let _theirs = client(&backend).lock("a").unwrap().acquire().await.unwrap();
    let options = AcquireOptions::new().wait(400 * MS);
    let lock = client(&backend).lock("a").unwrap().with_options(options);
    let reentrant = ReentrantLock::new(lock);
    let owner = ReentrantOwner::new();
    let first = AcquireOptions::new().wait(300 * MS);
    let started = Instant::now();
    let (first, second) = tokio::join!(reentrant.acquire_with(&owner, &first), reentrant.acquire(&owner));
    assert!(first.unwrap_err().is_timeout());
    assert!(second.unwrap_err().is_timeout());
    assert!(started.elapsed() < 600 * MS, "after {:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nesting_never_fails_because_another_owner_tries() {
    let lock = client(&MemoryBackend::new()).lock("a").unwrap();
    let reentrant = ReentrantLock::new(lock);
    let owner = ReentrantOwner::new();
    let _outer = reentrant.acquire(&owner).await.unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let others: Vec<_> = (0..2)
        .map(|_| {
            let (reentrant, done) = (reentrant.clone(), done.clone());
            tokio::spawn(async move {
                let other = ReentrantOwner::new();
                while !done.load(Ordering::Relaxed) {
                    assert!(reentrant.try_acquire(&other).await.unwrap().is_none());
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    let mut refused = 0;
    for _ in 0..200_000 {
        refused += u32::from(reentrant.try_acquire(&owner).await.unwrap().is_none());
    }
    done.store(true, Ordering::Relaxed);
    for other in others {
        other.await.unwrap();
    }
    assert_eq!(refused, 0);
}

#[tokio::test(start_paused = true)]
async fn a_set_whose_time_is_over_takes_no_further_op_timeout() {
    let backend = MemoryBackend::new();
    let client = client(&backend);
    let (a, b) = (client.lock("a").unwrap(), client.lock("b").unwrap());
    backend.delay(FaultPoint::Attempt, 250 * MS);
    let started = Instant::now();
    let turn = async {
        tokio::time::sleep(240 * MS).await;
        // The reply to the first attempt is on its way.
        backend.delay(FaultPoint::Attempt, 60 * SECOND);
    };
    let options = AcquireOptions::new().wait(200 * MS);
    let locks = [&a, &b];
    let (outcome, ()) = tokio::join!(acquire_all(&locks, &options), turn);
    let err = outcome.unwrap_err();
    assert!(!err.is_timeout(), "the server never said that it is taken: {err}");
    assert!(started.elapsed() < SECOND, "after {:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_set_is_given_back_within_its_time() {
    const SLOW: Duration = Duration::from_secs(3);
    let backend = MemoryBackend::new();
    let client = client(&backend);
    let names = ["a", "b", "c", "d"];
    let locks: Vec<_> = names.iter().map(|name| client.lock(name).unwrap()).collect();
    let locks: Vec<_> = locks.iter().collect();
    let in_the_way = LockClient::new(backend.clone())
        .lock("d")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    backend.delay(FaultPoint::Release, SLOW);
    for (wait, most) in [
        (Duration::ZERO, 200 * MS),
        (200 * MS, 500 * MS),
        (5 * SECOND, 5_500 * MS),
    ] {
        let started = Instant::now();
        let outcome = acquire_all(&locks, &AcquireOptions::new().wait(wait)).await;
        assert!(outcome.unwrap_err().is_timeout());
        let took = started.elapsed();
        assert!(took < most, "{took:?} for a wait of {wait:?}");
        // The background goes on with it.
        tokio::time::sleep(2 * SLOW).await;
        for name in &names[..3] {
            assert!(
                client.inspect(name).await.unwrap().is_free(),
                "{name} after {wait:?}"
            );
        }
    }
    drop(in_the_way);
    tokio::time::sleep(2 * SLOW).await;
    let set = acquire_all(&locks, &AcquireOptions::new()).await.unwrap();
    let started = Instant::now();
    set.release().await.unwrap();
    assert!(
        started.elapsed() < SLOW + SECOND,
        "released after {:?}",
        started.elapsed()
    );
}

/// A backend that sets no bound to how long an attempt may block.
#[derive(Debug)]
struct Patient<B>(B);

#[async_trait]
impl<B: Backend> Backend for Patient<B> {
    fn info(&self) -> BackendInfo {
        let mut info = self.0.info();
        info.max_patience = Duration::MAX;
        info.fallback_poll = Duration::MAX;
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        self.0.claim(request).await
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.0.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_backend_without_bounds_does_not_make_the_driver_panic() {
    let backend = MemoryBackend::new();
    let lock = LockClient::new(Patient(backend.clone())).lock("a").unwrap();
    backend.delay(FaultPoint::Attempt, MS);
    let held = lock.acquire().await.unwrap();
    let lock = LockClient::new(Patient(backend.clone())).lock("a").unwrap();
    let wait = tokio::spawn(async move { lock.acquire().await });
    tokio::time::sleep(10 * MS).await;
    held.release().await.unwrap();
    assert!(wait.await.unwrap().is_ok());
}

/// The server has gone while it waited: its last word is old.
#[tokio::test(start_paused = true)]
async fn taken_is_what_the_server_says_when_the_wait_ends() {
    let backend = MemoryBackend::new();
    let _held = client(&backend).lock("a").unwrap().acquire().await.unwrap();
    let lock = LockClient::new(Patient(backend.clone())).lock("a").unwrap();
    for (faults, is_taken) in [(0, true), (u32::MAX, false), (0, true)] {
        let gone = async {
            tokio::time::sleep(2 * SECOND).await;
            backend.fail_next(FaultPoint::Attempt, faults);
        };
        let (outcome, ()) = tokio::join!(lock.acquire_timeout(4 * SECOND), gone);
        let err = outcome.unwrap_err();
        assert_eq!(
            (err.is_timeout(), err.is_transient()),
            (is_taken, !is_taken),
            "{err}"
        );
        backend.fail_next(FaultPoint::Attempt, 0);
    }
}

/// The right was taken away while it waited. Nothing is gained by another try, and so the error does not invite to one.
#[tokio::test(start_paused = true)]
async fn a_refusal_at_the_end_of_a_wait_is_told_as_it_is() {
    let probe = Probe::default();
    let _held = client(&probe.memory).lock("a").unwrap().acquire().await.unwrap();
    let lock = LockClient::new(Patient(probe.clone())).lock("a").unwrap();
    let refused = async {
        tokio::time::sleep(2 * SECOND).await;
        probe.refuses.store(true, Ordering::SeqCst);
    };
    let (outcome, ()) = tokio::join!(lock.acquire_timeout(4 * SECOND), refused);
    let err = outcome.unwrap_err();
    let is_permanent = matches!(err, Error::Backend { transient: false, .. });
    assert!(is_permanent && chain(&err).contains("no right"), "{err:?}");
}

/// Its reply takes longer than a server has that is near.
#[tokio::test(start_paused = true)]
async fn a_server_that_is_far_says_that_it_is_taken() {
    let backend = MemoryBackend::new();
    let _held = client(&backend).lock("a").unwrap().acquire().await.unwrap();
    let lock = LockClient::new(Patient(backend.clone())).lock("a").unwrap();
    backend.delay(FaultPoint::Attempt, 150 * MS);
    let err = lock.acquire_timeout(4 * SECOND).await.unwrap_err();
    assert!(err.is_timeout(), "{err:?}");
}

/// A backend whose leases have no end that a clock could count to, and whose tokens are the last ones that there are.
#[derive(Debug)]
struct Boundless(MemoryBackend);

#[async_trait]
impl Backend for Boundless {
    fn info(&self) -> BackendInfo {
        self.0.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Ok(Box::new(BoundlessClaim(self.0.claim(request).await?)))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.0.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

#[derive(Debug)]
struct BoundlessClaim(Box<dyn Claim>);

#[async_trait]
impl Claim for BoundlessClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        let mut granted = self.0.attempt(patience).await?;
        if let Some(grant) = &mut granted {
            grant.lease.length = Some(Duration::MAX);
            assert!(grant.lease.end().is_none());
            grant.tokens = u64::MAX - 1..=u64::MAX;
        }
        Ok(granted)
    }

    async fn renew(&mut self) -> Result<Renewal> {
        let mut renewal = self.0.renew().await?;
        if let Renewal::Held(lease) = &mut renewal {
            lease.length = Some(Duration::MAX);
        }
        Ok(renewal)
    }

    async fn release(&mut self) -> Result<()> {
        self.0.release().await
    }

    async fn notified(&mut self) {
        self.0.notified().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_backend_at_the_limits_does_not_make_the_driver_panic() {
    let lock = LockClient::new(Boundless(MemoryBackend::new()))
        .lock("a")
        .unwrap();
    let guard = lock.acquire().await.unwrap();
    let waiters: Vec<_> = (0..2)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap();
                let token = guard.token().get();
                guard.release().await.unwrap();
                token
            })
        })
        .collect();
    tokio::time::sleep(SECOND).await;
    guard.renew().await.unwrap();
    assert!(guard.valid_until().is_some());
    assert_eq!(guard.token().get(), u64::MAX - 1);
    guard.release().await.unwrap();
    let mut tokens = Vec::new();
    for waiter in waiters {
        tokens.push(waiter.await.unwrap());
    }
    assert_eq!(tokens, [u64::MAX, u64::MAX - 1], "handed on, then by the server");
}

/// A backend whose holds end with a session, and which replies to renewals or not.
#[derive(Clone, Debug)]
struct InSession(MemoryBackend, Arc<watch::Sender<Proven>>, bool);

type Proven = std::result::Result<Instant, LossReason>;

#[async_trait]
impl Backend for InSession {
    fn info(&self) -> BackendInfo {
        self.0.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let claim = self.0.claim(request).await?;
        Ok(Box::new(InSessionClaim(claim, self.1.clone(), self.2)))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.0.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

#[derive(Debug)]
struct InSessionClaim(Box<dyn Claim>, Arc<watch::Sender<Proven>>, bool);

#[async_trait]
impl Claim for InSessionClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        self.0.attempt(patience).await
    }

    async fn renew(&mut self) -> Result<Renewal> {
        if self.2 {
            return self.0.renew().await;
        }
        std::future::pending().await
    }

    async fn release(&mut self) -> Result<()> {
        self.0.release().await
    }

    async fn notified(&mut self) {
        self.0.notified().await;
    }

    fn session(&self) -> Option<SessionProof> {
        Some(self.1.subscribe())
    }
}

fn in_session(proven: Instant, replies: bool) -> InSession {
    let proof = watch::Sender::new(Ok(proven));
    InSession(MemoryBackend::new(), Arc::new(proof), replies)
}

/// The worker has the claim, or a renewal by hand that is neither polled nor dropped.
#[tokio::test(start_paused = true)]
async fn a_hold_ends_with_what_its_session_proves() {
    for forgotten in [false, true] {
        for ends in [LossReason::Expired, LossReason::Disconnected] {
            let (now, hour) = (Instant::now(), 3_600 * SECOND);
            let backend = in_session(now + hour, false);
            let options = AcquireOptions::new().ttl(60 * SECOND).renew(false);
            let lock = LockClient::new(backend.clone()).lock("a").unwrap();
            let guard = lock.with_options(options).acquire().await.unwrap();
            let told = tokio::spawn(guard.lost());
            // The worker keeps it alive by then.
            tokio::time::sleep(SECOND).await;
            let mut renewal = forgotten.then(|| Box::pin(guard.renew()));
            if let Some(renewal) = &mut renewal {
                let done = poll_fn(|context| Poll::Ready(renewal.as_mut().poll(context).is_ready())).await;
                assert!(!done);
            }
            if ends == LossReason::Expired {
                backend.1.send(Ok(now + 5 * SECOND)).unwrap();
                assert!(guard.valid_until().unwrap() <= now + 5 * SECOND);
                assert!(guard.is_held());
                // More is proven than was, and so to no end of its lease.
                backend.1.send(Ok(now + 9 * SECOND)).unwrap();
                tokio::time::sleep(6 * SECOND).await;
                assert!(guard.is_held());
            } else {
                backend.1.send(Err(ends)).unwrap();
                assert!(!guard.is_held());
            }
            assert_eq!(told.await.unwrap(), ends, "forgotten: {forgotten}");
            assert!(now.elapsed() < 10 * SECOND, "forgotten: {forgotten}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_warning_says_what_the_session_leaves() {
    let now = Instant::now();
    let backend = in_session(now + 3_600 * SECOND, false);
    let options = AcquireOptions::new()
        .ttl(60 * SECOND)
        .op_timeout(SECOND)
        .renew(false);
    let lock = LockClient::new(backend.clone()).lock("a").unwrap();
    let guard = lock.acquire_with(&options).await.unwrap();
    assert!(guard.renew().await.unwrap_err().is_transient());
    backend.1.send(Ok(now + 5 * SECOND)).unwrap();
    let left = guard.renewal_failing().await;
    assert!(left <= 4 * SECOND, "{left:?}");
}

/// Less was proven when it was asked back, and more is since. Its user goes by what it is shown.
#[tokio::test(start_paused = true)]
async fn an_asked_hold_is_kept_for_as_long_as_is_proven() {
    let now = Instant::now();
    let backend = in_session(now + 5 * SECOND, true);
    let options = AcquireOptions::new().ttl(60 * SECOND);
    let lock = LockClient::new(backend.clone()).lock("a").unwrap();
    let guard = lock.acquire_with(&options).await.unwrap();
    // Its claim listens by then.
    tokio::time::sleep(100 * MS).await;
    let others = client(&backend.0);
    let asked = others.revoke("a", guard.token(), Duration::ZERO).await.unwrap();
    assert_ne!(asked, Revocation::NotHeld);
    assert_eq!(guard.lost().await, LossReason::Asked);
    tokio::time::sleep(SECOND).await;
    backend.1.send(Ok(now + 9 * SECOND)).unwrap();
    let until = guard.valid_until().unwrap();
    assert!(until > now + 8 * SECOND, "{:?}", until - now);
    tokio::time::sleep_until(until - MS).await;
    let other = others.lock("a").unwrap();
    assert!(
        other.try_acquire().await.unwrap().is_none(),
        "its user may use it"
    );
    drop(other.acquire_timeout(3 * SECOND).await.unwrap());
    backend.1.send(Ok(now + 30 * SECOND)).unwrap();
    let until = guard.valid_until().unwrap();
    assert!(until <= Instant::now(), "another has had it since");
}

/// Memory that pushes what it grants: the lease begins long before, is short if the hold is renewed, and each claim hints
/// until it has been.
#[derive(Clone, Debug)]
struct Pushing(MemoryBackend, Arc<AtomicUsize>);

impl Pushing {
    const LEASE: Duration = Duration::from_secs(3);
    const AGO: Duration = Duration::from_secs(1);
}

#[async_trait]
impl Backend for Pushing {
    fn info(&self) -> BackendInfo {
        self.0.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let claim = self.0.claim(request).await?;
        let waits = AtomicBool::new(true);
        Ok(Box::new(PushingClaim(
            claim,
            request.renews,
            waits,
            self.1.clone(),
        )))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.0.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

#[derive(Debug)]
struct PushingClaim(Box<dyn Claim>, bool, AtomicBool, Arc<AtomicUsize>);

#[async_trait]
impl Claim for PushingClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        if self.2.swap(false, Ordering::Relaxed) {
            return Ok(None);
        }
        let grant = self.0.attempt(patience).await?;
        Ok(grant.map(|mut grant| {
            grant.lease.since = grant.lease.since.checked_sub(Pushing::AGO).unwrap();
            if self.1 {
                grant.lease.length = Some(Pushing::LEASE);
            }
            grant
        }))
    }

    async fn renew(&mut self) -> Result<Renewal> {
        self.1 = false;
        self.3.fetch_add(1, Ordering::Relaxed);
        self.0.renew().await
    }

    async fn release(&mut self) -> Result<()> {
        self.0.release().await
    }

    /// Hints at once while it waits, and until it has been renewed while it holds.
    async fn notified(&mut self) {
        if !self.1 {
            self.0.notified().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_pushed_hold_has_all_of_its_lease_soon() {
    let renewals = Arc::new(AtomicUsize::new(0));
    let backend = Pushing(MemoryBackend::new(), renewals.clone());
    let client = LockClient::new(backend);
    let options = AcquireOptions::new().ttl(60 * SECOND);
    let lock = |name: &str| client.lock(name).unwrap().with_options(options.clone());
    let left = |guard: &LockGuard| {
        let end = guard.valid_until().unwrap();
        end.saturating_duration_since(Instant::now())
    };
    for name in ["a", "b"] {
        let guard = lock(name).acquire().await.unwrap();
        assert!(left(&guard) <= 2 * SECOND, "{:?}", left(&guard));
        tokio::time::sleep(2 * MS).await;
        guard.release().await.unwrap();
    }
    assert_eq!(renewals.load(Ordering::Relaxed), 0, "they were short");

    let guard = lock("c").acquire().await.unwrap();
    tokio::time::sleep(20 * MS).await;
    assert!(left(&guard) > 50 * SECOND, "{:?}", left(&guard));
    assert_eq!(renewals.load(Ordering::Relaxed), 1);
    guard.release().await.unwrap();

    // One that nobody renews has it from the beginning.
    let leased = options.clone().renew(false);
    let guard = lock("d").acquire_with(&leased).await.unwrap();
    assert!(left(&guard) > 50 * SECOND, "{:?}", left(&guard));
    guard.release().await.unwrap();
    assert_eq!(renewals.load(Ordering::Relaxed), 1);
}

/// A lock of its own for each acquisition.
#[derive(Debug)]
struct Many(Lock, LockClient, AtomicUsize);

#[async_trait]
impl DistributedLock for Many {
    fn id(&self) -> &LockId {
        self.0.id()
    }

    fn options(&self) -> &AcquireOptions {
        self.0.options()
    }

    async fn inspect(&self) -> Result<LockState> {
        self.0.inspect().await
    }

    async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        let name = self.2.fetch_add(1, Ordering::Relaxed).to_string();
        self.1.lock(name)?.acquire_with(options).await
    }
}

#[tokio::test]
async fn an_owner_does_not_pay_for_the_others() {
    const OWNERS: usize = 12_000;
    let client = client(&MemoryBackend::new());
    let many = Many(client.lock("a").unwrap(), client, AtomicUsize::new(0));
    let reentrant = ReentrantLock::new(many);
    let (mut guards, mut times) = (Vec::new(), Vec::new());
    for _ in 0..OWNERS {
        let started = std::time::Instant::now();
        guards.push(reentrant.acquire(&ReentrantOwner::new()).await.unwrap());
        times.push(started.elapsed());
    }
    // The median, since the machine may pause.
    let median = |times: &[Duration]| {
        let mut times = times.to_vec();
        times.sort();
        times[times.len() / 2]
    };
    let (first, last) = (median(&times[..1_000]), median(&times[OWNERS - 1_000..]));
    assert!(last < 5 * first, "the first of them {first:?}, the last {last:?}");
}

/// A lock that treats a try in its own way.
#[derive(Debug)]
struct Refusing(Lock);

#[async_trait]
impl DistributedLock for Refusing {
    fn id(&self) -> &LockId {
        self.0.id()
    }

    fn options(&self) -> &AcquireOptions {
        self.0.options()
    }

    async fn inspect(&self) -> Result<LockState> {
        self.0.inspect().await
    }

    async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        self.0.acquire_with(options).await
    }

    async fn try_acquire(&self) -> Result<Option<LockGuard>> {
        Ok(None)
    }
}

#[tokio::test]
async fn a_lock_of_ones_own_behaves_the_same_behind_an_arc() {
    let lock = Refusing(client(&MemoryBackend::new()).lock("a").unwrap());
    let lock: Arc<dyn DistributedLock> = Arc::new(lock);
    assert!(lock.try_acquire().await.unwrap().is_none());
}

/// Memory, behind a crowd that is always faster. Each claim gets "taken" so many times, each time with a hint to ask again.
#[derive(Debug)]
struct Overtaken {
    memory: MemoryBackend,
    times: u32,
}

#[async_trait]
impl Backend for Overtaken {
    fn info(&self) -> BackendInfo {
        let mut info = self.memory.info();
        info.fallback_poll = 30 * SECOND;
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Ok(Box::new(OvertakenClaim {
            claim: self.memory.claim(request).await?,
            left: self.times,
        }))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.memory.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        self.memory.close().await
    }
}

#[derive(Debug)]
struct OvertakenClaim {
    claim: Box<dyn Claim>,
    left: u32,
}

#[async_trait]
impl Claim for OvertakenClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        if self.left == 0 {
            return self.claim.attempt(patience).await;
        }
        self.left -= 1;
        Ok(None)
    }

    async fn renew(&mut self) -> Result<Renewal> {
        self.claim.renew().await
    }

    async fn release(&mut self) -> Result<()> {
        self.claim.release().await
    }

    async fn notified(&mut self) {}
}

#[tokio::test(start_paused = true)]
async fn an_often_overtaken_waiter_neither_spins_nor_goes_deaf() {
    let backend = Overtaken {
        memory: MemoryBackend::new(),
        times: 100,
    };
    let lock = LockClient::new(backend).lock("a").unwrap();
    let started = Instant::now();
    lock.acquire().await.unwrap().release().await.unwrap();
    let took = started.elapsed();
    assert!(took < SECOND, "the fallback poll takes 30 s, this {took:?}");
    assert!(took > 40 * MS, "a hundred attempts in {took:?}");
}

/// The driver does not follow all of endless hints, and the one that counts comes after them.
#[tokio::test(start_paused = true)]
async fn a_storm_of_hints_makes_no_holder_deaf() {
    let probe = crate::probe::Probe::default();
    let lock = LockClient::new(probe.clone()).lock("a").unwrap();
    let guard = lock.acquire().await.unwrap();
    tokio::time::sleep(SECOND).await;
    for _ in 0..200 {
        probe.hint.notify_one();
        tokio::task::yield_now().await;
    }
    let (_, renewals, _) = probe.counts.calls();
    assert!((10..50).contains(&renewals), "{renewals}");
    assert!(probe.memory.revoke("a"));
    let told = tokio::time::timeout(SECOND, guard.lost()).await;
    assert_eq!(told, Ok(LossReason::Revoked), "its next renewal is seconds away");
}

/// Only the next look shows the end of a lease.
#[tokio::test(start_paused = true)]
async fn a_dead_holder_is_followed_within_the_bound_that_is_told() {
    let ttl = SECOND;
    for _ in 0..100 {
        let backend = MemoryBackend::new();
        let client = client(&backend);
        let name = LockName::new("a").unwrap();
        let request = ClaimRequest::new(name, Mode::Exclusive, ttl, OwnerId::new(1));
        let mut dead = backend.claim(&request).await.unwrap();
        assert!(dead.attempt(Duration::ZERO).await.unwrap().is_some());
        drop(dead);
        let died = Instant::now();
        let _guard = client.lock("a").unwrap().acquire().await.unwrap();
        let (took, bound) = (died.elapsed(), client.dead_holder_bound(ttl));
        // Timers have a granularity of a millisecond.
        assert!(took <= bound + 2 * MS, "{took:?}, more than {bound:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn memory_keeps_nothing_of_a_name_that_nobody_uses() {
    let backend = MemoryBackend::new();
    let options = AcquireOptions::new().ttl(100 * MS).renew(false);
    let lock = client(&backend).lock("a").unwrap().with_options(options);

    lock.acquire().await.unwrap().release().await.unwrap();
    assert_eq!(backend.names(), 0, "released");

    let revoked = lock.acquire().await.unwrap();
    assert!(backend.revoke("a"));
    assert_eq!(backend.names(), 0, "revoked");
    drop(revoked);

    // Its release does not arrive.
    let held = lock.acquire().await.unwrap();
    backend.fail_next(FaultPoint::Release, u32::MAX);
    drop(held);
    tokio::time::sleep(60 * SECOND).await;
    let shown = client(&backend).inspect("a").await.unwrap();
    assert!(shown.is_free());
    assert_eq!(backend.names(), 0, "its lease is over");
}

/// A hold that nobody renews is checked when the server hints, and again if that fails.
#[tokio::test(start_paused = true)]
async fn a_question_without_an_answer_is_asked_again() {
    let probe = Probe::default();
    let options = AcquireOptions::new().ttl(60 * SECOND).renew(false);
    let lock = LockClient::new(probe.clone())
        .lock("a")
        .unwrap()
        .with_options(options);
    let guard = lock.acquire().await.unwrap();
    tokio::time::sleep(SECOND).await;
    probe.memory.fail_next(FaultPoint::Renew, 1);
    probe.hint.notify_one();
    guard.renewal_failing().await;
    tokio::time::sleep(10 * SECOND).await;
    let warned = futures_util::FutureExt::now_or_never(guard.renewal_failing());
    assert_eq!(warned, None, "it was answered");
    assert_eq!(probe.counts.calls().1, 2);

    probe.memory.fail_next(FaultPoint::Renew, 1);
    let started = Instant::now();
    probe.memory.revoke("a");
    assert_eq!(guard.lost().await, LossReason::Revoked);
    assert!(started.elapsed() < 10 * SECOND, "{:?}", started.elapsed());
}

/// The worker looks every few milliseconds while holds begin, and mostly finds one that has just begun. A hint for that one has to
/// be followed up by the next one that lasts.
#[tokio::test(start_paused = true)]
async fn a_short_hold_is_never_looked_after() {
    let probe = Probe::default();
    let lock = LockClient::new(probe.clone()).lock("a").unwrap();
    let renewals = || probe.counts.calls().1;
    probe.hint.notify_one();
    for _ in 0..50 {
        let guard = lock.acquire().await.unwrap();
        tokio::time::sleep(3 * MS).await;
        guard.release().await.unwrap();
    }
    assert_eq!(renewals(), 0, "a hold of 3 ms was looked after");
    let guard = lock.acquire().await.unwrap();
    tokio::time::sleep(20 * MS).await;
    assert_eq!(renewals(), 1, "a hold of 20 ms was not");
    guard.release().await.unwrap();
}

/// Each of them is too short to be adopted, and nobody asks the server. The claim that they share is watched all the same.
#[tokio::test(start_paused = true)]
async fn a_hold_that_is_passed_on_and_on_is_looked_after() {
    for (ttl, soon) in [(60 * SECOND, 110 * MS), (20 * MS, 20 * MS)] {
        let backend = MemoryBackend::new();
        let options = AcquireOptions::new().ttl(ttl).local_handoffs(65_535);
        let lock = client(&backend).lock("a").unwrap().with_options(options);
        let tasks: Vec<_> = (0..2)
            .map(|_| {
                let lock = lock.clone();
                tokio::spawn(async move {
                    loop {
                        let guard = lock.acquire().await.unwrap();
                        tokio::time::sleep(MS).await;
                        if guard.release().await.is_err() {
                            return Instant::now();
                        }
                    }
                })
            })
            .collect();
        tokio::time::sleep(250 * MS).await;
        assert!(backend.revoke("a"));
        let revoked = Instant::now();
        let _theirs = client(&backend).lock("a").unwrap().acquire().await.unwrap();
        let (told, ..) = futures_util::future::select_all(tasks).await;
        let took = told.unwrap() - revoked;
        assert!(took <= soon, "told after {took:?}");
    }
}

/// Its holder had a hint that it may be gone, and asks the server, which has not replied yet.
#[tokio::test(start_paused = true)]
async fn what_is_in_doubt_is_not_passed_on() {
    for revoked in [false, true] {
        let probe = Probe::default();
        let options = AcquireOptions::new().ttl(60 * SECOND);
        let lock = LockClient::new(probe.clone()).lock("a").unwrap();
        let lock = lock.with_options(options);
        let first = lock.acquire().await.unwrap();
        let next = tokio::spawn(async move { lock.acquire().await });
        tokio::time::sleep(SECOND).await;
        probe.memory.delay(FaultPoint::Renew, 100 * MS);
        let theirs = if revoked {
            assert!(probe.memory.revoke("a"));
            Some(client(&probe.memory).lock("a").unwrap().acquire().await.unwrap())
        } else {
            probe.hint.notify_one();
            None
        };
        tokio::time::sleep(50 * MS).await;
        let token = first.token();
        let released = first.release().await;
        assert_eq!(
            released.is_err_and(|err| err.is_lost()),
            revoked,
            "what its release says"
        );
        tokio::time::sleep(SECOND).await;
        assert_eq!(next.is_finished(), !revoked, "another has it");
        drop(theirs);
        let next = next.await.unwrap().unwrap();
        let passed_on = next.token().get() == token.get() + 1;
        assert_eq!(passed_on, !revoked);
    }
}

/// The renewal has taken the hint that its backend had, as it may, and knows nothing more.
#[tokio::test(start_paused = true)]
async fn a_hint_that_a_failed_renewal_took_is_not_forgotten() {
    let probe = Probe::default();
    let ours = LockClient::new(probe.clone());
    let lock = ours.lock("a").unwrap();
    let options = AcquireOptions::new().ttl(60 * SECOND);
    let first = lock.acquire_with(&options.clone().renew(false)).await.unwrap();
    let next = tokio::spawn({
        let lock = lock.with_options(options);
        async move { lock.acquire().await.unwrap() }
    });
    tokio::time::sleep(SECOND).await;
    assert!(probe.memory.revoke("a"));
    let theirs = client(&probe.memory);
    let theirs = theirs.lock("a").unwrap().acquire().await.unwrap();
    probe.memory.fail_next(FaultPoint::Renew, 1);
    let renewed = first.renew().await;
    assert!(renewed.as_ref().is_err_and(|err| !err.is_lost()), "{renewed:?}");
    let released = first.release().await;
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert!(
        !next.is_finished(),
        "PROMISE BROKEN: two hold; theirs {:?}, and the release said {released:?}",
        theirs.check()
    );
}
