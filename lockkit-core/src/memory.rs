//! Locks within one process: for tests, and for programs that are one process today.
//!
//! All modes, first come first served. A hold ends with its guard, at once, and with the runtime that its client lives on.
//!
//! Its leases are on Tokio's clock, so tests can run on paused time. The space that a process shares, that of the URL `memory:`, is on the
//! machine's clock: a runtime whose time is paused has [one of its own](MemoryBackend::shared) in its place.
//!
//! To test your own code against faults, use [`revoke`](MemoryBackend::revoke), [`fail_next`](MemoryBackend::fail_next),
//! [`lose_replies`](MemoryBackend::lose_replies) and [`delay`](MemoryBackend::delay).

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    future::pending,
    hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState},
    num::NonZeroU32,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use futures_util::FutureExt;
use tokio::{
    runtime::{self, Handle},
    sync::{Notify, watch},
    time::Instant,
};

use crate::{
    Capabilities, Error, FencingToken, Holder, ListedLock, LockClient, LockGuard, LockKind, LockName,
    LockState, LossReason, Result,
    spi::{
        Backend, BackendInfo, Claim, ClaimRequest, Grant, HolderWatch, Lease, Lister, Mode, OwnerId, Renewal,
        fence, require_runtime,
    },
    sync::Mutex,
};

const NAME: &str = "memory";

/// The time in which a waiter has to ask again once it is its turn.
const FOLLOWS_WITHIN: Duration = Duration::from_secs(1);

/// A lock server in this process.
///
/// Clones share one space of locks. A lock that nobody uses leaves nothing behind. Fencing tokens rise per name, with gaps, and two
/// names may have the same one: each counter of tokens is for many names. The counters of a new space begin at the wall clock, in
/// microseconds since 1970, so that its tokens go on above those of a process before.
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
    namespace: Namespace,
}

/// An exchange with the server at which [`MemoryBackend::fail_next`] and its like set a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultPoint {
    /// [`Claim::attempt`].
    Attempt,
    /// [`Claim::renew`].
    Renew,
    /// [`Claim::downgrade`].
    Downgrade,
    /// [`Claim::release`].
    Release,
    /// [`Backend::revoke`].
    Revoke,
    /// [`Claim::adopt`].
    Adopt,
}

struct Space {
    server: Arc<str>,
    clock: SpaceClock,
    namespaces: Mutex<Vec<Arc<str>>>,
    hashes: RandomState,
    shards: Box<[Arc<Shard>]>,
    fault_plan: Arc<FaultPlan>,
}

/// The clock that the leases of a space are on.
#[derive(Clone, Copy)]
enum SpaceClock {
    /// The one that all its users have in common. They see to that.
    Any,
    /// The machine's.
    Machine,
    /// Tokio's in this runtime, where it was paused.
    Paused(runtime::Id),
}

/// The spaces in place of the shared one, of runtimes whose time was paused. One is there until its runtime ends.
static PAUSED: LazyLock<Mutex<HashMap<runtime::Id, Arc<Space>>>> = LazyLock::new(Mutex::default);

/// The locks of some of the names, so that the others do not have to wait for its mutex. A claim keeps nothing else of the space.
/// It begins a line of the processor's cache.
#[repr(align(128))]
struct Shard {
    state: Mutex<State>,
    clock: SpaceClock,
    fault_plan: Arc<FaultPlan>,
}

/// The faults that are set.
#[derive(Default)]
struct FaultPlan {
    /// A fault has been set at some time.
    is_set: AtomicBool,
    faults: Mutex<HashMap<FaultPoint, Faults>>,
}

#[derive(Default)]
struct State {
    locks: HashMap<Key, Entry, BuildHasherDefault<AsHashed>>,
    last_token: u64,
    /// Those who watch a lock. Usually nobody does.
    watched: HashMap<Key, watch::Sender<()>, BuildHasherDefault<AsHashed>>,
}

/// A namespace by its number in its space. A reference count of its text would be contended by all names.
#[derive(Clone)]
struct Namespace {
    number: usize,
    text: Arc<str>,
}

/// A lock of a space, with its hash, which is computed once for each claim.
#[derive(Clone, PartialEq, Eq)]
struct Key {
    hash: u64,
    namespace: usize,
    kind: LockKind,
    name: LockName,
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// A hasher that takes a key's hash as it is.
#[derive(Default)]
struct AsHashed(u64);

impl Hasher for AsHashed {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0 << 8 ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

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
    /// The token in use: a later one of its tokens after each hand-off.
    token: u64,
    /// Its holder was asked to give it up, and it is not prolonged any more.
    asked: bool,
    since: Instant,
    until: Instant,
    label: Option<Arc<str>>,
    /// Unset until somebody listens.
    notify: Option<Arc<Notify>>,
}

struct Waiter {
    owner: OwnerId,
    mode: Mode,
    notify: Arc<Notify>,
    /// The time since which it could have been granted the lock.
    turn: Option<Instant>,
}

impl MemoryBackend {
    /// Makes a space of its own, apart from every other. All who use it have to be on one clock: on the machine's, or in one runtime whose
    /// time is paused.
    pub fn new() -> Self {
        let space = Space::unnamed(SpaceClock::Any);
        Self {
            namespace: space.namespace(BackendInfo::DEFAULT_NAMESPACE),
            space: Arc::new(space),
        }
    }

    /// Returns the one space that the whole process shares, as the URL `memory:` does.
    ///
    /// In a runtime whose time is paused, or was, it is the one space of that runtime, which ends with it: leases on two clocks cannot be
    /// compared. Pause time before you call this. A client that has come to another clock than its space gets an error when it acquires.
    pub fn shared(namespace: &str) -> Self {
        static SHARED: LazyLock<Arc<Space>> =
            LazyLock::new(|| Arc::new(Space::new("memory:".to_owned(), SpaceClock::Machine)));
        let space = match Handle::try_current() {
            Ok(runtime) if !is_real_time() => Space::of_runtime(&runtime),
            _ => SHARED.clone(),
        };
        Self {
            namespace: space.namespace(namespace),
            space,
        }
    }

    /// Returns a guard of the lock of this name, held in exclusive mode in this space: for a mock of a
    /// [`DistributedLock`](crate::DistributedLock), which may have no way to wait.
    ///
    /// It is a hold like any other: it is renewed, [`revoke`](Self::revoke) ends it, faults that are set apply to it, and while
    /// it lasts the lock is taken.
    ///
    /// ```
    /// use lockkit_core::{LossReason, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let server = MemoryBackend::new();
    /// let guard = server.guard("job")?;
    /// assert!(server.guard("job").unwrap_err().is_timeout());
    /// server.revoke("job");
    /// assert_eq!(guard.lost().await, LossReason::Revoked);
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Timeout`] if it is held. [`Error::InvalidName`]. [`Error::Backend`] if replies are [delayed](Self::delay), if a
    /// fault is set, and outside of a Tokio runtime.
    pub fn guard(&self, name: impl AsRef<str>) -> Result<LockGuard> {
        require_runtime(NAME, "acquire")?;
        let lock = LockClient::new(self.clone()).lock(name)?;
        // Without a delay, an attempt awaits nothing.
        let attempt = lock.acquire_timeout(Duration::ZERO);
        attempt.now_or_never().unwrap_or_else(|| {
            let cause = "replies are delayed, and this call does not wait";
            Err(Error::transient(NAME, "acquire", cause))
        })
    }

    /// Ends every hold of the lock of this name, as an operator would. Returns `false` if there was none.
    pub fn revoke(&self, name: &str) -> bool {
        let Ok(name) = LockName::new(name) else {
            return false;
        };
        self.evict(&name, LockKind::Lock, None)
    }

    /// Makes the next `times` exchanges of this kind fail before they reach the server.
    pub fn fail_next(&self, operation: FaultPoint, times: u32) {
        self.space.fault_plan.set(operation, |faults| faults.fail = times);
    }

    /// Loses the replies to the next `times` exchanges of this kind, which take effect at the server.
    pub fn lose_replies(&self, operation: FaultPoint, times: u32) {
        self.space.fault_plan.set(operation, |faults| faults.lose = times);
    }

    /// Delays the replies to exchanges of this kind from now on. They take effect at once.
    pub fn delay(&self, operation: FaultPoint, reply_takes: Duration) {
        self.space
            .fault_plan
            .set(operation, |faults| faults.delay = reply_takes);
    }

    /// Returns the number of locks and semaphores in it: those that somebody holds or waits for, and those whose holder's
    /// lease has expired since somebody last looked.
    pub fn names(&self) -> usize {
        let shards = self.space.shards.iter();
        shards.map(|shard| shard.state.lock().locks.len()).sum()
    }

    fn key(&self, name: &LockName, kind: LockKind) -> Key {
        let namespace = self.namespace.number;
        Key {
            // Without the kind: the lock and the semaphore of a name are in one shard, and so have no token in common.
            hash: self.space.hashes.hash_one((namespace, name)),
            namespace,
            kind,
            name: name.clone(),
        }
    }

    fn state(&self, key: &Key) -> LockState {
        let (now, today) = (Instant::now(), SystemTime::now());
        let mut state = self.space.shard(key).state.lock();
        let Some(entry) = state.locks.get_mut(key) else {
            return LockState::new(Vec::new(), Some(0));
        };
        entry.drop_ended(now);
        let holders = entry.holders.iter().map(|holder| {
            let label = holder.label.as_deref().map(str::to_owned);
            let left = Some(holder.until - now);
            let since = today.checked_sub(now.saturating_duration_since(holder.since));
            Holder::new(FencingToken::new(holder.token), label, left).since(since)
        });
        let shown = LockState::new(holders.collect(), Some(entry.queue.len()));
        if entry.is_unused() {
            state.locks.remove(key);
        }
        shown
    }

    fn evict(&self, name: &LockName, kind: LockKind, token: Option<u64>) -> bool {
        let key = self.key(name, kind);
        let now = Instant::now();
        let mut state = self.space.shard(&key).state.lock();
        let Some(entry) = state.locks.get_mut(&key) else {
            return false;
        };
        entry.drop_ended(now);
        let mut found = false;
        entry.holders.retain(|holder| {
            let hit = token.is_none_or(|token| holder.token == token);
            if hit && let Some(notify) = &holder.notify {
                notify.notify_one();
            }
            found |= hit;
            !hit
        });
        entry.wake_first(now);
        if entry.is_unused() {
            state.locks.remove(&key);
        }
        if found {
            state.tell(&key);
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
            .field("namespace", &self.namespace.text)
            .finish_non_exhaustive()
    }
}

impl Space {
    /// Usually many more than there are threads, and few enough to cost nothing where there is one lock.
    const SHARDS: usize = 32;

    fn new(server: String, clock: SpaceClock) -> Self {
        let fault_plan = Arc::default();
        let last_token = before_the_first_token();
        Self {
            server: server.into(),
            clock,
            namespaces: Mutex::default(),
            hashes: RandomState::new(),
            shards: (0..Self::SHARDS)
                .map(|_| Arc::new(Shard::new(clock, last_token, &fault_plan)))
                .collect(),
            fault_plan,
        }
    }

    fn unnamed(clock: SpaceClock) -> Self {
        static SPACES: AtomicU64 = AtomicU64::new(1);
        Self::new(
            format!("memory:#{}", SPACES.fetch_add(1, Ordering::Relaxed)),
            clock,
        )
    }

    /// Returns the space of a runtime whose time was paused.
    fn of_runtime(runtime: &Handle) -> Arc<Self> {
        struct ForgottenWith(runtime::Id);
        impl Drop for ForgottenWith {
            fn drop(&mut self) {
                let space = PAUSED.lock().remove(&self.0);
                drop(space);
            }
        }
        let id = runtime.id();
        let mut spaces = PAUSED.lock();
        if let Some(space) = spaces.get(&id) {
            return space.clone();
        }
        let space = Arc::new(Self::unnamed(SpaceClock::Paused(id)));
        spaces.insert(id, space.clone());
        drop(spaces);
        let forgotten = ForgottenWith(id);
        runtime.spawn(async move {
            pending::<()>().await;
            drop(forgotten);
        });
        space
    }

    fn namespace(&self, text: &str) -> Namespace {
        let mut known = self.namespaces.lock();
        let number = known.iter().position(|known| **known == *text);
        let number = number.unwrap_or_else(|| {
            known.push(text.into());
            known.len() - 1
        });
        let text = known[number].clone();
        Namespace { number, text }
    }

    /// Returns the highest token there was, of whatever name and namespace.
    fn fence(&self) -> u64 {
        let lasts = self.shards.iter().map(|shard| shard.state.lock().last_token);
        lasts.max().unwrap_or_default()
    }

    /// Has all later tokens be above this one.
    fn raise(&self, above: u64) {
        for shard in &self.shards {
            let last = &mut shard.state.lock().last_token;
            *last = above.max(*last);
        }
    }

    fn shard(&self, key: &Key) -> &Arc<Shard> {
        // Other bits than those that a shard's map uses.
        let index = (key.hash >> 40) as usize % self.shards.len();
        &self.shards[index]
    }
}

impl SpaceClock {
    /// Checks that whoever asks is on the clock of the leases.
    fn check(self, operation: &'static str) -> Result<()> {
        let (is_on_it, cause) = match self {
            Self::Any => return Ok(()),
            Self::Machine => (
                is_real_time(),
                "Tokio's time is paused here, or was, and the leases of this space are on the machine's clock; pause time before you \
                 connect, or use `MemoryBackend::new()`",
            ),
            Self::Paused(id) => (
                Handle::try_current().is_ok_and(|here| here.id() == id),
                "the leases of this space are on the clock of another runtime, whose time is paused; connect here, or use \
                 `MemoryBackend::new()`",
            ),
        };
        if is_on_it {
            return Ok(());
        }
        Err(Error::permanent(NAME, operation, cause))
    }
}

impl FaultPlan {
    fn set(&self, operation: FaultPoint, set: impl FnOnce(&mut Faults)) {
        set(self.faults.lock().entry(operation).or_default());
        self.is_set.store(true, Ordering::Release);
    }
}

impl Shard {
    fn new(clock: SpaceClock, last_token: u64, fault_plan: &Arc<FaultPlan>) -> Self {
        let state = State {
            last_token,
            ..State::default()
        };
        Self {
            state: Mutex::new(state),
            clock,
            fault_plan: fault_plan.clone(),
        }
    }

    /// Runs one exchange, with the faults that are set for it.
    async fn exchange<T>(
        &self,
        operation: FaultPoint,
        effect: impl FnOnce(&mut State) -> Result<T>,
    ) -> Result<T> {
        let fault = |what| Err(Error::transient(NAME, operation.verb(), what));
        let (lost, delay) = if self.fault_plan.is_set.load(Ordering::Acquire) {
            let mut faults = self.fault_plan.faults.lock();
            let faults = faults.entry(operation).or_default();
            if faults.fail > 0 {
                faults.fail -= 1;
                return fault("the connection failed, as was asked for");
            }
            let lost = faults.lose > 0;
            faults.lose -= u32::from(lost);
            (lost, faults.delay)
        } else {
            (false, Duration::ZERO)
        };
        let outcome = effect(&mut self.state.lock());
        if lost {
            return fault("the reply was lost, as was asked for");
        }
        if !delay.is_zero() {
            // Whoever polls once, perhaps where there are no timers, gets no further.
            tokio::task::yield_now().await;
            tokio::time::sleep(delay).await;
        }
        outcome
    }
}

impl State {
    /// Tells those who watch this lock that its holder has changed.
    fn tell(&self, key: &Key) {
        if !self.watched.is_empty()
            && let Some(watched) = self.watched.get(key)
        {
            watched.send_replace(());
        }
    }

    fn watch(&mut self, key: Key) -> watch::Receiver<()> {
        self.watched.retain(|_, watched| watched.receiver_count() > 0);
        self.watched.entry(key).or_default().subscribe()
    }
}

impl FaultPoint {
    fn verb(self) -> &'static str {
        match self {
            Self::Attempt => "acquire",
            Self::Renew => "renew",
            Self::Downgrade => "downgrade",
            Self::Release => "release",
            Self::Revoke => "revoke",
            Self::Adopt => "adopt",
        }
    }
}

impl State {
    /// Asks the holder that has this token to give up its hold. Returns what is left of its lease.
    fn ask_back(&mut self, key: &Key, token: u64) -> Option<Lease> {
        let now = Instant::now();
        let holders = &mut self.locks.get_mut(key)?.holders;
        let holder = holders
            .iter_mut()
            .find(|holder| holder.token == token && holder.until > now)?;
        holder.asked = true;
        if let Some(notify) = &holder.notify {
            notify.notify_one();
        }
        Some(Lease {
            since: now,
            length: Some(holder.until - now),
        })
    }
}

impl Entry {
    fn drop_ended(&mut self, now: Instant) {
        self.holders.retain(|holder| holder.until > now);
    }

    fn holder(&mut self, owner: OwnerId) -> Option<&mut Holding> {
        self.holders.iter_mut().find(|holder| holder.owner == owner)
    }

    /// Returns `true` if one more holder fits in.
    fn admits(&self, mode: Mode) -> bool {
        admits(&self.holders, mode)
    }

    /// Wakes the first waiter if it can be granted the lock from now on. Call it after any change.
    fn wake_first(&mut self, now: Instant) {
        let Self { holders, queue, .. } = self;
        let Some(first) = queue.front_mut() else { return };
        if !admits(holders, first.mode) {
            first.turn = None;
        } else if first.turn.is_none() {
            first.turn = Some(now);
            first.notify.notify_one();
        }
    }

    /// Sends a waiter that does not ask when it is its turn to the end: a future that nobody polls must not block the queue.
    fn pass_over_sleepers(&mut self, asking: OwnerId, now: Instant) {
        for _ in 0..self.queue.len() {
            // A lease that has just ended changed something, too.
            self.wake_first(now);
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

    fn is_unused(&self) -> bool {
        self.holders.is_empty() && self.queue.is_empty()
    }
}

/// Returns `true` if Tokio's clock here is the machine's, which it is until it is paused.
fn is_real_time() -> bool {
    let before = std::time::Instant::now();
    let here = Instant::now().into_std();
    before <= here && here <= std::time::Instant::now()
}

/// Returns a number that all tokens of a new space are above: the microseconds since 1970.
fn before_the_first_token() -> u64 {
    let since_1970 = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    // Enough tokens are left, whatever the clock says.
    u64::try_from(since_1970.as_micros()).map_or(fence::MOST, |micros| micros.min(fence::MOST))
}

/// Returns `true` if one more holder fits in beside `holders`.
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
        info.namespace = self.namespace.text.clone();
        info.fallback_poll = Duration::from_millis(50);
        info.leases_stand_still = true;
        info.releases_at_once = true;
        info.capabilities = Capabilities {
            fifo: true,
            shared: true,
            permits: true,
            notified: true,
            lease: true,
            local_handoffs: true,
            downgrade: true,
            revoke: true,
            revoke_by_force: true,
            list: true,
            detach: true,
            raise_fence: true,
            ..Capabilities::default()
        };
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        self.space.clock.check("acquire")?;
        let key = self.key(&request.name, request.mode.kind());
        Ok(Box::new(MemoryClaim {
            shard: self.space.shard(&key).clone(),
            asking: Asking {
                key,
                mode: request.mode,
                ttl: request.ttl,
                owner: request.owner,
                label: request.label.clone(),
                tokens: request.tokens,
                notify: None,
            },
            until: None,
            is_known: false,
        }))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.space.clock.check("inspect")?;
        Ok(self.state(&self.key(name, kind)))
    }

    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        self.space.clock.check("list")?;
        Ok(Box::new(MemoryLister {
            backend: self.clone(),
            prefix: prefix.to_owned(),
            shards_seen: 0,
            keys: Vec::new(),
        }))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        self.space.clock.check("revoke")?;
        let key = self.key(name, kind);
        let ask = |state: &mut State| Ok(state.ask_back(&key, token.get()));
        self.space.shard(&key).exchange(FaultPoint::Revoke, ask).await
    }

    async fn watch(&self, name: &LockName, kind: LockKind) -> Result<Option<Box<dyn HolderWatch>>> {
        let key = self.key(name, kind);
        let changes = self.space.shard(&key).state.lock().watch(key);
        Ok(Some(Box::new(MemoryWatch { changes })))
    }

    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        self.space.clock.check("revoke")?;
        Ok(self.evict(name, kind, Some(token.get())))
    }

    async fn fence(&self) -> Result<FencingToken> {
        Ok(FencingToken::new(self.space.fence()))
    }

    async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        fence::check(above, fence::MOST)?;
        self.space.raise(above.get());
        self.fence().await
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// A listing: the names of one shard after the other, and a page of their states at a time.
struct MemoryLister {
    backend: MemoryBackend,
    prefix: String,
    shards_seen: usize,
    /// Those of a shard that are not shown yet.
    keys: Vec<Key>,
}

impl MemoryLister {
    const PAGE: usize = 64;
}

#[async_trait]
impl Lister for MemoryLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        // It may have been begun elsewhere.
        self.backend.space.clock.check("list")?;
        if self.keys.is_empty() {
            let Some(shard) = self.backend.space.shards.get(self.shards_seen) else {
                return Ok(None);
            };
            self.shards_seen += 1;
            let namespace = self.backend.namespace.number;
            let is_meant =
                |key: &&Key| key.namespace == namespace && key.name.as_str().starts_with(&self.prefix);
            let state = shard.state.lock();
            self.keys = state.locks.keys().filter(is_meant).cloned().collect();
        }
        let page = self.keys.len().saturating_sub(Self::PAGE)..;
        let shown = self.keys.drain(page).filter_map(|key| {
            let state = self.backend.state(&key);
            (!state.is_free()).then(|| ListedLock::new(key.name, key.kind, state))
        });
        Ok(Some(shown.collect()))
    }
}

#[derive(Debug)]
struct MemoryWatch {
    changes: watch::Receiver<()>,
}

#[async_trait]
impl HolderWatch for MemoryWatch {
    async fn changed(&mut self) {
        // The sender is there for as long as somebody receives.
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[derive(Debug)]
struct MemoryClaim {
    shard: Arc<Shard>,
    asking: Asking,
    /// The end of the last lease that it got.
    until: Option<Instant>,
    /// It may hold or wait, and has not been detached.
    is_known: bool,
}

/// An owner and its request.
struct Asking {
    key: Key,
    mode: Mode,
    ttl: Duration,
    owner: OwnerId,
    label: Option<Arc<str>>,
    tokens: NonZeroU32,
    /// Made when somebody listens. Most holds end before.
    notify: Option<Arc<Notify>>,
}

impl Asking {
    /// The server's side of an attempt.
    fn attempt(&mut self, state: &mut State, patience: Duration) -> Result<Option<Grant>> {
        let now = Instant::now();
        let State {
            locks, last_token, ..
        } = state;
        let entry = locks.entry(self.key.clone()).or_default();
        entry.drop_ended(now);
        self.check_permits(entry)?;
        let owner = self.owner;
        let until = now + self.ttl;
        let lease = Lease {
            since: now,
            length: Some(self.ttl),
        };
        if let Some(mine) = entry.holder(owner) {
            // The reply to an earlier attempt was lost.
            mine.until = until;
            return Ok(Some(Grant {
                tokens: mine.tokens.0..=mine.tokens.1,
                lease,
            }));
        }
        entry.pass_over_sleepers(owner, now);
        let next = entry.queue.front().is_none_or(|first| first.owner == owner);
        if next && entry.admits(self.mode) {
            let tokens = (*last_token + 1, *last_token + u64::from(self.tokens.get()));
            *last_token = tokens.1;
            entry.holders.push(Holding {
                owner,
                shared: self.mode == Mode::Shared,
                tokens,
                token: tokens.0,
                asked: false,
                since: now,
                until,
                label: self.label.clone(),
                notify: self.notify.clone(),
            });
            entry.queue.retain(|waiter| waiter.owner != owner);
            entry.wake_first(now);
            state.tell(&self.key);
            return Ok(Some(Grant {
                tokens: tokens.0..=tokens.1,
                lease,
            }));
        }
        if !patience.is_zero() && !entry.queue.iter().any(|waiter| waiter.owner == owner) {
            entry.queue.push_back(Waiter {
                owner,
                mode: self.mode,
                notify: self.notify.get_or_insert_default().clone(),
                turn: None,
            });
        }
        Ok(None)
    }

    fn check_permits(&self, entry: &mut Entry) -> Result<()> {
        let Mode::Permits(permits) = self.mode else {
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
                    self.key.name
                ),
            )),
            _ => Ok(()),
        }
    }

    /// The server's side of a downgrade, for an owner whose last known lease ends then.
    fn downgrade(&mut self, state: &mut State, known_end: Option<Instant>) -> Result<Lease> {
        let now = Instant::now();
        let lost = |reason| Error::lost(NAME, self.key.name.clone(), reason);
        let gone = || match known_end {
            Some(end) if end > now => lost(LossReason::Revoked),
            _ => lost(LossReason::Expired),
        };
        let entry = state.locks.get_mut(&self.key).ok_or_else(gone)?;
        let mine = entry.holder(self.owner).filter(|mine| mine.until > now);
        let mine = mine.ok_or_else(gone)?;
        if mine.asked {
            return Err(lost(LossReason::Asked));
        }
        mine.shared = true;
        mine.tokens = (mine.token, mine.token);
        mine.until = now + self.ttl;
        self.mode = Mode::Shared;
        entry.wake_first(now);
        state.tell(&self.key);
        Ok(Lease {
            since: now,
            length: Some(self.ttl),
        })
    }

    /// The server's side of an adoption.
    fn adopt(&self, state: &mut State, from: OwnerId, token: u64) -> Renewal {
        let now = Instant::now();
        let entry = state.locks.get_mut(&self.key);
        let mut holders = entry.into_iter().flat_map(|entry| &mut entry.holders);
        // Its own if the reply to an earlier request was lost.
        let is_it = |holder: &&mut Holding| {
            let is_theirs = holder.owner == from || holder.owner == self.owner;
            let is_shared = self.mode == Mode::Shared;
            is_theirs && holder.token == token && holder.shared == is_shared && holder.until > now
        };
        let Some(holder) = holders.find(is_it) else {
            return Renewal::Lost(LossReason::Gone);
        };
        if holder.asked {
            return Renewal::Asked;
        }
        holder.owner = self.owner;
        holder.tokens = (token, token);
        holder.until = holder.until.max(now + self.ttl);
        holder.label.clone_from(&self.label);
        holder.notify.clone_from(&self.notify);
        Renewal::Held(Lease {
            since: now,
            length: Some(self.ttl),
        })
    }

    /// Returns what is notified of the hold's end from now on; `None` if it has ended already.
    fn listen(&mut self, state: &mut State) -> Option<&Notify> {
        if self.notify.is_none() {
            let mine = state.locks.get_mut(&self.key)?.holder(self.owner)?;
            mine.notify = Some(self.notify.get_or_insert_default().clone());
        }
        self.notify.as_deref()
    }

    /// Takes its owner out of everything. Returns `true` if it was a holder. Then nobody else has been granted the lock since, even
    /// if its lease is over by now.
    fn leave(&self, state: &mut State) -> bool {
        let Some(entry) = state.locks.get_mut(&self.key) else {
            return false;
        };
        let before = entry.holders.len();
        entry.holders.retain(|holder| holder.owner != self.owner);
        let found = entry.holders.len() < before;
        if !entry.queue.is_empty() {
            let now = Instant::now();
            entry.queue.retain(|waiter| waiter.owner != self.owner);
            entry.drop_ended(now);
            entry.wake_first(now);
        }
        if entry.is_unused() {
            state.locks.remove(&self.key);
        }
        if found {
            state.tell(&self.key);
        }
        found
    }
}

impl fmt::Debug for Asking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asking")
            .field("name", &self.key.name)
            .field("mode", &self.mode)
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Claim for MemoryClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        if self.is_known {
            // Time may have been paused since its claim was made.
            self.shard.clock.check("acquire")?;
        }
        self.is_known = true;
        let Self { shard, asking, .. } = self;
        let attempt = |state: &mut State| asking.attempt(state, patience);
        let granted = shard.exchange(FaultPoint::Attempt, attempt).await?;
        if let Some(grant) = &granted {
            self.until = grant.lease.end();
        }
        Ok(granted)
    }

    async fn renew(&mut self) -> Result<Renewal> {
        self.shard.clock.check("renew")?;
        let Self {
            shard, asking, until, ..
        } = self;
        let reply = shard.exchange(FaultPoint::Renew, |state| {
            let now = Instant::now();
            let entry = state.locks.get_mut(&asking.key);
            Ok(match entry.and_then(|entry| entry.holder(asking.owner)) {
                Some(holder) if holder.asked && holder.until > now => Renewal::Asked,
                Some(holder) if holder.until > now => {
                    holder.until = now + asking.ttl;
                    Renewal::Held(Lease {
                        since: now,
                        length: Some(asking.ttl),
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

    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        self.asking.ttl = ttl;
        Ok(Some(ttl))
    }

    async fn downgrade(&mut self) -> Result<Lease> {
        self.shard.clock.check("downgrade")?;
        let Self {
            shard, asking, until, ..
        } = self;
        let downgrade = |state: &mut State| asking.downgrade(state, *until);
        let lease = shard.exchange(FaultPoint::Downgrade, downgrade).await?;
        self.until = lease.end();
        Ok(lease)
    }

    async fn release(&mut self) -> Result<()> {
        let Self {
            shard, asking, until, ..
        } = self;
        let reply = shard.exchange(FaultPoint::Release, |state| {
            let held = until.take();
            let found = asking.leave(state);
            match held {
                Some(until) if !found => {
                    let reason = if until > Instant::now() {
                        LossReason::Revoked
                    } else {
                        LossReason::Expired
                    };
                    Err(Error::lost(NAME, asking.key.name.clone(), reason))
                }
                _ => Ok(()),
            }
        });
        reply.await?;
        self.is_known = false;
        Ok(())
    }

    async fn notified(&mut self) {
        let Self { shard, asking, .. } = self;
        let listening = asking.listen(&mut shard.state.lock());
        if let Some(notify) = listening {
            notify.notified().await;
        }
    }

    fn detach(&mut self) -> Option<OwnerId> {
        self.is_known = false;
        Some(self.asking.owner)
    }

    async fn adopt(&mut self, from: OwnerId, token: FencingToken) -> Result<Option<Renewal>> {
        let Self { shard, asking, .. } = self;
        let adopt = |state: &mut State| Ok(asking.adopt(state, from, token.get()));
        let reply = shard.exchange(FaultPoint::Adopt, adopt).await?;
        if let Renewal::Held(lease) = &reply {
            // Without a reply, whoever asks again adopts it.
            self.is_known = true;
            self.until = lease.end();
        }
        Ok(Some(reply))
    }

    fn passed_on(&mut self, token: FencingToken) {
        let Self { shard, asking, .. } = self;
        let mut state = shard.state.lock();
        let entry = state.locks.get_mut(&asking.key);
        if let Some(mine) = entry.and_then(|entry| entry.holder(asking.owner)) {
            // The hold that was asked back has ended.
            mine.asked = false;
            mine.token = token.get();
        }
    }
}

impl Drop for MemoryClaim {
    /// Gives up what it holds, and leaves the queue. A claim that is dropped without release, since its runtime is gone, never asks
    /// again. Its holder has been told, and those who come later need not wait for a lease.
    fn drop(&mut self) {
        if self.is_known {
            let Self { shard, asking, .. } = self;
            asking.leave(&mut shard.state.lock());
        }
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").finish_non_exhaustive()
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
        assert_eq!(backend.names(), 0, "names that nobody holds or waits for");
    }

    #[tokio::test]
    async fn a_claim_that_is_dropped_gives_up_its_hold() {
        let backend = MemoryBackend::new();
        let (mut holder, mut waiter) = (claim(&backend, 1).await, claim(&backend, 2).await);
        assert!(holder.attempt(PATIENCE).await.unwrap().is_some());
        assert!(waiter.attempt(PATIENCE).await.unwrap().is_none());
        drop(holder);
        assert!(waiter.attempt(PATIENCE).await.unwrap().is_some());
        drop(waiter);
        assert_eq!(backend.names(), 0, "names that nobody holds or waits for");
    }

    #[tokio::test]
    async fn a_claim_that_is_dropped_keeps_what_it_has_detached() {
        let backend = MemoryBackend::new();
        let (mut holder, mut next) = (claim(&backend, 1).await, claim(&backend, 2).await);
        assert!(holder.attempt(PATIENCE).await.unwrap().is_some());
        assert!(holder.detach().is_some());
        drop(holder);
        assert!(next.attempt(Duration::ZERO).await.unwrap().is_none());
    }
}
