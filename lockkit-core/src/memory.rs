//! Locks within one process: for tests, and for programs that are one process today.
//!
//! All modes, first come first served, with leases on Tokio's clock, so that tests can run on paused time. It carries
//! the tools to test your own code against trouble: [`revoke`](MemoryBackend::revoke),
//! [`fail_next`](MemoryBackend::fail_next), [`lose_replies`](MemoryBackend::lose_replies) and
//! [`delay`](MemoryBackend::delay).

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    num::NonZeroU32,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use tokio::{sync::Notify, time::Instant};

use crate::{
    Capabilities, Error, FencingToken, Holder, Kind, LockName, LockState, LossReason, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Lease, Mode, OwnerId, Renewal},
    sync::Mutex,
};

const NAME: &str = "memory";

/// How long a waiter may take to ask again once it is its turn.
const FOLLOWS_WITHIN: Duration = Duration::from_secs(1);

/// A lock server in this process.
///
/// Clones share one space of locks. Of a lock that was never released, nothing stays behind but the counter of fencing
/// tokens, which all names share.
///
/// ```
/// use lockkit_core::{LockClient, MemoryBackend};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let backend = MemoryBackend::new();
/// let guard = LockClient::new(backend.clone()).lock("job")?.acquire().await?;
/// assert!(backend.revoke("job"));
/// assert_eq!(guard.lost().await, lockkit_core::LossReason::Revoked);
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct MemoryBackend {
    space: Arc<Space>,
    namespace: Arc<str>,
}

/// An exchange with the server, for [`MemoryBackend::fail_next`] and its like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// [`Claim::attempt`].
    Attempt,
    /// [`Claim::renew`].
    Renew,
    /// [`Claim::release`].
    Release,
}

struct Space {
    server: Arc<str>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    locks: HashMap<Key, Entry>,
    last_token: u64,
    faults: HashMap<Operation, Faults>,
}

type Key = (Arc<str>, Kind, LockName);

#[derive(Default)]
struct Faults {
    fail: u32,
    lose: u32,
    delay: Duration,
}

#[derive(Default)]
struct Entry {
    permits: Option<NonZeroU32>,
    holders: Vec<Holding>,
    queue: VecDeque<Waiter>,
}

struct Holding {
    owner: OwnerId,
    shared: bool,
    tokens: (u64, u64),
    until: Instant,
    label: Option<Arc<str>>,
    notify: Arc<Notify>,
}

struct Waiter {
    owner: OwnerId,
    mode: Mode,
    notify: Arc<Notify>,
    /// Since when it could have been granted.
    turn: Option<Instant>,
}

impl MemoryBackend {
    /// A space of its own, apart from every other.
    pub fn new() -> Self {
        static SPACES: AtomicU64 = AtomicU64::new(1);
        let server = format!("memory:#{}", SPACES.fetch_add(1, Ordering::Relaxed));
        Self {
            space: Arc::new(Space::new(server)),
            namespace: BackendInfo::DEFAULT_NAMESPACE.into(),
        }
    }

    /// The one space that the whole process shares, which the URL `memory:` means.
    pub fn shared(namespace: &str) -> Self {
        static SHARED: LazyLock<Arc<Space>> = LazyLock::new(|| Arc::new(Space::new("memory:".to_owned())));
        Self {
            space: SHARED.clone(),
            namespace: namespace.into(),
        }
    }

    /// Ends every hold of the lock of this name, as an operator would. Whether there was one.
    pub fn revoke(&self, name: &str) -> bool {
        let Ok(name) = LockName::new(name) else {
            return false;
        };
        self.evict(&name, Kind::Lock, None)
    }

    /// The next `times` exchanges of this kind fail before they reach the server.
    pub fn fail_next(&self, operation: Operation, times: u32) {
        self.space.state.lock().faults.entry(operation).or_default().fail = times;
    }

    /// The next `times` exchanges of this kind take effect at the server, but the reply is lost.
    pub fn lose_replies(&self, operation: Operation, times: u32) {
        self.space.state.lock().faults.entry(operation).or_default().lose = times;
    }

    /// From now on, exchanges of this kind take effect at once, but their reply takes this long.
    pub fn delay(&self, operation: Operation, reply_takes: Duration) {
        self.space.state.lock().faults.entry(operation).or_default().delay = reply_takes;
    }

    /// How many locks and semaphores it has something of: those that somebody holds or waits for, and those whose holder's
    /// lease has ended since somebody last looked.
    pub fn names(&self) -> usize {
        self.space.state.lock().locks.len()
    }

    fn key(&self, name: &LockName, kind: Kind) -> Key {
        (self.namespace.clone(), kind, name.clone())
    }

    fn evict(&self, name: &LockName, kind: Kind, token: Option<u64>) -> bool {
        let key = self.key(name, kind);
        let mut state = self.space.state.lock();
        let Some(entry) = state.locks.get_mut(&key) else {
            return false;
        };
        entry.drop_ended(Instant::now());
        let mut found = false;
        entry.holders.retain(|holder| {
            let hit = token.is_none_or(|t| holder.tokens.0 <= t && t <= holder.tokens.1);
            if hit {
                holder.notify.notify_one();
            }
            found |= hit;
            !hit
        });
        entry.look_whose_turn(Instant::now());
        if entry.is_unused() {
            state.locks.remove(&key);
        }
        found
    }
}

impl Default for MemoryBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBackend")
            .field("server", &self.space.server)
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

impl Space {
    fn new(server: String) -> Self {
        Self {
            server: server.into(),
            state: Mutex::default(),
        }
    }

    /// Runs one exchange with the faults that are set for it.
    async fn exchange<T>(
        &self,
        operation: Operation,
        effect: impl FnOnce(&mut State) -> Result<T>,
    ) -> Result<T> {
        let (outcome, delay) = {
            let mut state = self.state.lock();
            let faults = state.faults.entry(operation).or_default();
            let delay = faults.delay;
            let lost = if faults.fail > 0 {
                faults.fail -= 1;
                return Err(Error::transient(
                    NAME,
                    operation.verb(),
                    "the connection failed, as was asked for",
                ));
            } else if faults.lose > 0 {
                faults.lose -= 1;
                true
            } else {
                false
            };
            let outcome = effect(&mut state);
            if lost {
                return Err(Error::transient(
                    NAME,
                    operation.verb(),
                    "the reply was lost, as was asked for",
                ));
            }
            (outcome, delay)
        };
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        outcome
    }
}

impl Operation {
    fn verb(self) -> &'static str {
        match self {
            Self::Attempt => "acquire",
            Self::Renew => "renew",
            Self::Release => "release",
        }
    }
}

impl Entry {
    fn drop_ended(&mut self, now: Instant) {
        self.holders.retain(|holder| holder.until > now);
    }

    /// Whether one more holder fits in.
    fn admits(&self, mode: Mode) -> bool {
        admits(&self.holders, mode)
    }

    /// Wakes the first waiter if it can be granted from now on. To be called after any change.
    fn look_whose_turn(&mut self, now: Instant) {
        let Self { holders, queue, .. } = self;
        let Some(first) = queue.front_mut() else { return };
        if !admits(holders, first.mode) {
            first.turn = None;
        } else if first.turn.is_none() {
            first.turn = Some(now);
            first.notify.notify_one();
        }
    }

    /// Whoever does not follow when it is its turn goes to the end: a future that nobody polls must not block the
    /// queue.
    fn pass_over_sleepers(&mut self, asking: OwnerId, now: Instant) {
        for _ in 0..self.queue.len() {
            // A lease that has just ended changed something, too.
            self.look_whose_turn(now);
            let is_asleep = |first: &Waiter| {
                let waited = first.turn.map(|turn| now.saturating_duration_since(turn));
                first.owner != asking && waited > Some(FOLLOWS_WITHIN)
            };
            if !self.queue.front().is_some_and(is_asleep) {
                return;
            }
            self.queue.rotate_left(1);
            if let Some(sleeper) = self.queue.back_mut() {
                sleeper.turn = None;
            }
        }
    }

    fn leave(&mut self, owner: OwnerId, now: Instant) {
        self.holders.retain(|holder| holder.owner != owner);
        self.queue.retain(|waiter| waiter.owner != owner);
        self.look_whose_turn(now);
    }

    fn is_unused(&self) -> bool {
        self.holders.is_empty() && self.queue.is_empty()
    }
}

/// Says that one more holder fits in beside `holders`.
fn admits(holders: &[Holding], mode: Mode) -> bool {
    match mode {
        Mode::Exclusive => holders.is_empty(),
        Mode::Shared => holders.iter().all(|holder| holder.shared),
        Mode::Permits(most) => holders.len() < most.get() as usize,
    }
}

#[async_trait]
impl Backend for MemoryBackend {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new(NAME, self.space.server.clone());
        info.namespace = self.namespace.clone();
        info.fallback_poll = Duration::from_millis(50);
        info.leases_stand_still = true;
        info.capabilities = Capabilities {
            fifo: true,
            shared: true,
            permits: true,
            notified: true,
            lease: true,
            local_handoffs: true,
            revoke: true,
            ..Capabilities::default()
        };
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Ok(Box::new(MemoryClaim {
            key: self.key(&request.name, request.mode.kind()),
            space: self.space.clone(),
            request: request.clone(),
            notify: Arc::default(),
            until: None,
            queued: false,
        }))
    }

    async fn inspect(&self, name: &LockName, kind: Kind) -> Result<LockState> {
        let now = Instant::now();
        let key = self.key(name, kind);
        let mut state = self.space.state.lock();
        let Some(entry) = state.locks.get_mut(&key) else {
            return Ok(LockState::new(Vec::new(), Some(0)));
        };
        entry.drop_ended(now);
        let holders = entry.holders.iter().map(|holder| {
            let label = holder.label.as_deref().map(str::to_owned);
            Holder::new(
                FencingToken::new(holder.tokens.0),
                label,
                Some(holder.until - now),
            )
        });
        let shown = LockState::new(holders.collect(), Some(entry.queue.len()));
        if entry.is_unused() {
            state.locks.remove(&key);
        }
        Ok(shown)
    }

    async fn revoke(&self, name: &LockName, kind: Kind, token: u64) -> Result<bool> {
        Ok(self.evict(name, kind, Some(token)))
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct MemoryClaim {
    space: Arc<Space>,
    key: Key,
    request: ClaimRequest,
    notify: Arc<Notify>,
    /// Until when it was last known to hold.
    until: Option<Instant>,
    /// It waits, or a grant that it does not know of has come of that.
    queued: bool,
}

impl MemoryClaim {
    /// The server's side of an attempt.
    fn serve(
        state: &mut State,
        key: &Key,
        request: &ClaimRequest,
        notify: &Arc<Notify>,
        patience: Duration,
    ) -> Result<Option<Grant>> {
        let now = Instant::now();
        let State {
            locks, last_token, ..
        } = state;
        let entry = locks.entry(key.clone()).or_default();
        entry.drop_ended(now);
        check_permits(entry, request)?;
        let lease = Lease {
            since: now,
            length: Some(request.ttl),
        };
        if let Some(mine) = entry
            .holders
            .iter_mut()
            .find(|holder| holder.owner == request.owner)
        {
            // The reply to an earlier attempt was lost.
            mine.until = now + request.ttl;
            return Ok(Some(Grant {
                tokens: mine.tokens.0..=mine.tokens.1,
                lease,
            }));
        }
        entry.pass_over_sleepers(request.owner, now);
        let next = entry
            .queue
            .front()
            .is_none_or(|first| first.owner == request.owner);
        if next && entry.admits(request.mode) {
            let tokens = (*last_token + 1, *last_token + u64::from(request.tokens.get()));
            *last_token = tokens.1;
            entry.holders.push(Holding {
                owner: request.owner,
                shared: request.mode == Mode::Shared,
                tokens,
                until: now + request.ttl,
                label: request.label.clone(),
                notify: notify.clone(),
            });
            entry.queue.retain(|waiter| waiter.owner != request.owner);
            entry.look_whose_turn(now);
            return Ok(Some(Grant {
                tokens: tokens.0..=tokens.1,
                lease,
            }));
        }
        if !patience.is_zero() && !entry.queue.iter().any(|waiter| waiter.owner == request.owner) {
            entry.queue.push_back(Waiter {
                owner: request.owner,
                mode: request.mode,
                notify: notify.clone(),
                turn: None,
            });
        }
        Ok(None)
    }
}

fn check_permits(entry: &mut Entry, request: &ClaimRequest) -> Result<()> {
    let Mode::Permits(permits) = request.mode else {
        return Ok(());
    };
    if entry.is_unused() {
        entry.permits = Some(permits);
    }
    match entry.permits {
        Some(others) if others != permits => Err(Error::invalid_option(
            "permits",
            format!(
                "semaphore `{}` is in use with {others} permits, not {permits}",
                request.name
            ),
        )),
        _ => Ok(()),
    }
}

#[async_trait]
impl Claim for MemoryClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        let Self {
            space,
            key,
            request,
            notify,
            ..
        } = self;
        self.queued |= !patience.is_zero();
        let serve = |state: &mut State| Self::serve(state, key, request, notify, patience);
        let granted = space.exchange(Operation::Attempt, serve).await?;
        if let Some(grant) = &granted {
            self.until = grant.lease.end();
            self.queued = false;
        }
        Ok(granted)
    }

    async fn renew(&mut self) -> Result<Renewal> {
        let Self {
            space,
            key,
            request,
            until,
            ..
        } = self;
        let reply = space.exchange(Operation::Renew, |state| {
            let now = Instant::now();
            let holder = state.locks.get_mut(key).and_then(|entry| {
                entry
                    .holders
                    .iter_mut()
                    .find(|holder| holder.owner == request.owner)
            });
            Ok(match holder {
                Some(holder) if holder.until > now => {
                    holder.until = now + request.ttl;
                    Renewal::Held(Lease {
                        since: now,
                        length: Some(request.ttl),
                    })
                }
                _ if until.is_some_and(|until| until > now) => Renewal::Lost(LossReason::Revoked),
                _ => Renewal::Lost(LossReason::Expired),
            })
        });
        let reply = reply.await?;
        if let Renewal::Held(lease) = &reply {
            self.until = lease.end();
        }
        Ok(reply)
    }

    async fn release(&mut self) -> Result<()> {
        let Self {
            space,
            key,
            request,
            until,
            ..
        } = self;
        let reply = space.exchange(Operation::Release, |state| {
            let held = until.take();
            let found = leave(state, key, request.owner);
            match held {
                Some(until) if !found => {
                    let reason = if until > Instant::now() {
                        LossReason::Revoked
                    } else {
                        LossReason::Expired
                    };
                    Err(Error::lost(NAME, request.name.clone(), reason))
                }
                _ => Ok(()),
            }
        });
        reply.await?;
        self.queued = false;
        Ok(())
    }

    async fn notified(&mut self) {
        self.notify.notified().await;
    }
}

/// Takes an owner out of everything. Whether it was a holder.
fn leave(state: &mut State, key: &Key, owner: OwnerId) -> bool {
    let Some(entry) = state.locks.get_mut(key) else {
        return false;
    };
    entry.drop_ended(Instant::now());
    let before = entry.holders.len();
    entry.leave(owner, Instant::now());
    let found = entry.holders.len() < before;
    if entry.is_unused() {
        state.locks.remove(key);
    }
    found
}

impl Drop for MemoryClaim {
    /// A claim that is dropped without release (its runtime is gone) must not block the queue: nobody would ever ask
    /// on its behalf again. Its hold ends with its lease.
    fn drop(&mut self) {
        if self.queued {
            leave(&mut self.space.state.lock(), &self.key, self.request.owner);
        }
    }
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Space")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);
    const TTL: Duration = Duration::from_secs(30);

    async fn claim(backend: &MemoryBackend, owner: u128) -> Box<dyn Claim> {
        let name = LockName::new("job").unwrap();
        let request = ClaimRequest::new(name, Mode::Exclusive, TTL, OwnerId::new(owner));
        backend.claim(&request).await.unwrap()
    }

    #[tokio::test]
    async fn a_waiter_that_is_dropped_leaves_nothing() {
        let backend = MemoryBackend::new();
        let (mut holder, mut waiter) = (claim(&backend, 1).await, claim(&backend, 2).await);
        assert!(holder.attempt(PATIENCE).await.unwrap().is_some());
        assert!(waiter.attempt(PATIENCE).await.unwrap().is_none());
        holder.release().await.unwrap();
        drop(waiter);
        let left = backend.space.state.lock().locks.len();
        assert_eq!(left, 0, "names that nobody holds or waits for");
    }

    /// A holder whose runtime has ended may go on without looking.
    #[tokio::test(start_paused = true)]
    async fn a_hold_that_was_waited_for_ends_with_its_lease_too() {
        let backend = MemoryBackend::new();
        let (mut first, mut waiter) = (claim(&backend, 1).await, claim(&backend, 2).await);
        assert!(first.attempt(PATIENCE).await.unwrap().is_some());
        assert!(waiter.attempt(PATIENCE).await.unwrap().is_none());
        first.release().await.unwrap();
        assert!(waiter.attempt(PATIENCE).await.unwrap().is_some());
        drop(waiter);
        let mut next = claim(&backend, 3).await;
        tokio::time::advance(TTL.saturating_sub(Duration::from_millis(1))).await;
        assert!(
            next.attempt(Duration::ZERO).await.unwrap().is_none(),
            "the lease goes on"
        );
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(next.attempt(Duration::ZERO).await.unwrap().is_some());
    }
}
