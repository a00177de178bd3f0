//! A backend of a third party: the memory backend, with every call counted.

use std::{
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Error, FencingToken, Instant, LockKind, LockName, LockState, MemoryBackend, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Lease, OwnerId, Renewal},
};
use tokio::sync::Notify;

#[derive(Clone, Debug, Default)]
pub(crate) struct Probe {
    pub(crate) memory: MemoryBackend,
    pub(crate) counts: Arc<Counts>,
    /// The age of a renewal's proof at the time of the request.
    pub(crate) proofs_are_old_by: Duration,
    /// The length that a renewal proves, if that is not the ttl.
    pub(crate) renewed_for: Option<Duration>,
    /// What was proven before, while the server is silent: a renewal is told that once.
    pub(crate) silent: Arc<Mutex<Option<Duration>>>,
    /// The barrier at which the next renewal's poll waits, with its thread: once when it is there, and once to go on.
    pub(crate) barrier: Arc<Mutex<Option<Arc<Barrier>>>>,
    /// Wakes one claim with a hint.
    pub(crate) hint: Arc<Notify>,
    /// The server refuses attempts and renewals, which does not pass by itself.
    pub(crate) refuses: Arc<AtomicBool>,
    /// The time after which whoever waits asks again, if that is not the memory backend's.
    pub(crate) polls_every: Option<Duration>,
    /// The longest ttl that a claim may change to.
    pub(crate) longest_ttl: Option<Duration>,
}

/// The memory backend, where an operator ends the first leadership of the election `jobs` while observers are told of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct BreaksFirst {
    memory: MemoryBackend,
    has_broken: Arc<AtomicBool>,
}

#[async_trait]
impl Backend for BreaksFirst {
    fn info(&self) -> BackendInfo {
        self.memory.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        self.memory.claim(request).await
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.memory.inspect(name, kind).await
    }

    async fn announce(&self, _: &LockName, _: LockKind) -> Result<()> {
        if !self.has_broken.swap(true, Ordering::SeqCst) {
            assert!(self.memory.revoke("lockkit#election:jobs"));
            // Its client has heard of it by then.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        self.memory.close().await
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) attempts: AtomicUsize,
    pub(crate) renewals: AtomicUsize,
    pub(crate) releases: AtomicUsize,
    /// The claims that exist.
    pub(crate) claims: AtomicUsize,
    /// The claims that existed when the backend was closed.
    pub(crate) claims_at_close: AtomicUsize,
    pub(crate) closes: AtomicUsize,
    /// The claims that were opened as locally contended.
    pub(crate) contended: AtomicUsize,
    /// The tokens with which holds were passed on.
    pub(crate) passed_on: Mutex<Vec<u64>>,
}

impl Counts {
    /// Attempts, renewals and releases so far.
    pub(crate) fn calls(&self) -> (usize, usize, usize) {
        (
            self.attempts.load(Ordering::SeqCst),
            self.renewals.load(Ordering::SeqCst),
            self.releases.load(Ordering::SeqCst),
        )
    }
}

#[async_trait]
impl Backend for Probe {
    fn info(&self) -> BackendInfo {
        let mut info = self.memory.info();
        info.fallback_poll = self.polls_every.unwrap_or(info.fallback_poll);
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let claim = self.memory.claim(request).await?;
        self.counts.claims.fetch_add(1, Ordering::SeqCst);
        let contended = usize::from(request.locally_contended);
        self.counts.contended.fetch_add(contended, Ordering::SeqCst);
        Ok(Box::new(Counted {
            claim,
            counts: self.counts.clone(),
            proofs_are_old_by: self.proofs_are_old_by,
            renewed_for: self.renewed_for,
            silent: self.silent.clone(),
            told: None,
            barrier: self.barrier.clone(),
            hint: self.hint.clone(),
            refuses: self.refuses.clone(),
            longest_ttl: self.longest_ttl,
        }))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.memory.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        let left = self.counts.claims.load(Ordering::SeqCst);
        self.counts.claims_at_close.store(left, Ordering::SeqCst);
        self.counts.closes.fetch_add(1, Ordering::SeqCst);
        self.memory.close().await
    }
}

#[derive(Debug)]
struct Counted {
    claim: Box<dyn Claim>,
    counts: Arc<Counts>,
    proofs_are_old_by: Duration,
    renewed_for: Option<Duration>,
    silent: Arc<Mutex<Option<Duration>>>,
    told: Option<Duration>,
    barrier: Arc<Mutex<Option<Arc<Barrier>>>>,
    hint: Arc<Notify>,
    refuses: Arc<AtomicBool>,
    longest_ttl: Option<Duration>,
}

impl Counted {
    fn check_right(&self, operation: &'static str) -> Result<()> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(Error::permanent("probe", operation, "it has no right to"));
        }
        Ok(())
    }
}

#[async_trait]
impl Claim for Counted {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        self.counts.attempts.fetch_add(1, Ordering::SeqCst);
        self.check_right("acquire")?;
        self.claim.attempt(patience).await
    }

    async fn renew(&mut self) -> Result<Renewal> {
        let before = self.counts.renewals.fetch_add(1, Ordering::SeqCst);
        assert!(before < 100_000, "this would go on for ever");
        self.check_right("renew")?;
        let barrier = self.barrier.lock().unwrap().take();
        if let Some(barrier) = barrier {
            barrier.wait();
            barrier.wait();
        }
        let silent = *self.silent.lock().unwrap();
        if silent.is_some() && silent == self.told {
            return std::future::pending().await;
        }
        self.told = silent;
        if silent.is_some() {
            return Ok(Renewal::Unconfirmed(Lease::new(Instant::now(), silent)));
        }
        let mut renewal = self.claim.renew().await;
        if let Ok(Renewal::Held(lease)) = &mut renewal {
            lease.since -= self.proofs_are_old_by;
            lease.length = self.renewed_for.or(lease.length);
        }
        renewal
    }

    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        if self.longest_ttl.is_some_and(|longest| ttl > longest) {
            return Err(Error::permanent(
                "probe",
                "set_ttl",
                "it has no lease of that length",
            ));
        }
        self.claim.set_ttl(ttl)
    }

    async fn release(&mut self) -> Result<()> {
        self.counts.releases.fetch_add(1, Ordering::SeqCst);
        self.claim.release().await
    }

    async fn notified(&mut self) {
        tokio::select! {
            () = self.claim.notified() => {}
            () = self.hint.notified() => {}
        }
    }

    fn detach(&mut self) -> Option<OwnerId> {
        self.claim.detach()
    }

    async fn adopt(&mut self, from: OwnerId, token: FencingToken) -> Result<Option<Renewal>> {
        self.claim.adopt(from, token).await
    }

    fn passed_on(&mut self, token: FencingToken) {
        self.counts.passed_on.lock().unwrap().push(token.get());
        self.claim.passed_on(token);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.counts.claims.fetch_sub(1, Ordering::SeqCst);
    }
}
