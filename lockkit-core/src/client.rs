//! A connection to one server, from which locks are made.

use std::{
    collections::HashMap,
    fmt,
    num::NonZeroU32,
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

use crate::{
    AcquireOptions, Capabilities, Error, FencingToken, Lock, LockId, LockKind, LockName, LockState,
    LossReason, Result,
    driver::{line::Line, moment::Clock, timing, worker::Worker},
    spi::{Backend, BackendInfo, Mode},
    sync::Mutex,
};

/// A client of one lock server. Clone it freely: clones share the connection, the local queues and the worker.
///
/// Make one per process and server, and keep it for as long as its locks are used. It lives on the Tokio runtime that
/// it was made in, which must have its timers enabled, as `#[tokio::main]` does. Once that runtime has ended, all that is
/// asked of it is answered with an error that says so, [`Error::Backend`] and not transient, and its holds are lost.
///
/// ```
/// use lockkit_core::{LockClient, MemoryBackend};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let client = LockClient::new(MemoryBackend::new());
/// let guard = client.lock("orders/42")?.acquire().await?;
/// assert!(client.lock("orders/42")?.try_acquire().await?.is_none());
/// guard.release().await?;
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct LockClient {
    core: Arc<Core>,
    defaults: Arc<AcquireOptions>,
}

/// What all handles of a client share.
pub(crate) struct Core {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) info: BackendInfo,
    pub(crate) worker: Arc<Worker>,
    pub(crate) clock: Clock,
    pub(crate) owners: Owners,
    /// Releases that were given up without a confirmation.
    pub(crate) unconfirmed: AtomicUsize,
    /// How many of them had been given up when the client was closed: their leases are over, and nobody's concern.
    unconfirmed_before: AtomicUsize,
    lines: Mutex<HashMap<(LockName, Mode), Weak<Line>>>,
    closed: AtomicBool,
    /// Told when the client is closed, and when its runtime has ended.
    over: Notify,
}

impl LockClient {
    /// A client of `backend`: the entrance for backends of your own. No I/O.
    pub fn new(backend: impl Backend) -> Self {
        let mut info = backend.info();
        // Far beyond any use, and near enough for the clock to count to.
        info.max_patience = info.max_patience.min(AcquireOptions::MAX_DURATION);
        info.fallback_poll = info.fallback_poll.min(AcquireOptions::MAX_DURATION);
        Self {
            core: Arc::new_cyclic(|core| Core {
                worker: Arc::new(Worker::new(core.clone(), info.name)),
                clock: Clock::new(info.leases_stand_still || !info.capabilities.lease),
                info,
                backend: Box::new(backend),
                owners: Owners::default(),
                unconfirmed: AtomicUsize::new(0),
                unconfirmed_before: AtomicUsize::new(0),
                lines: Mutex::default(),
                closed: AtomicBool::new(false),
                over: Notify::new(),
            }),
            defaults: Arc::new(AcquireOptions::new()),
        }
    }

    /// The same client whose locks start from `defaults`.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] if one of them cannot be kept.
    #[expect(clippy::needless_pass_by_value, reason = "options are built in place")]
    pub fn with_defaults(self, defaults: AcquireOptions) -> Result<Self> {
        defaults.validate()?;
        Ok(Self {
            defaults: Arc::new(defaults.or(&self.defaults)),
            ..self
        })
    }

    /// The lock of this name, in exclusive mode. No I/O; nothing is held.
    ///
    /// # Errors
    /// [`Error::InvalidName`].
    pub fn lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(self.make(LockName::new(name)?, Mode::Exclusive))
    }

    /// The semaphore of this name, which up to `permits` holders have at once. It is another thing than the lock of
    /// the same name. Everyone has to name the same number. No I/O; nothing is held.
    ///
    /// # Errors
    /// [`Error::InvalidName`]; [`Error::InvalidOptions`] for zero permits.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Result<Lock> {
        let permits = NonZeroU32::new(permits)
            .ok_or_else(|| Error::invalid_option("permits", "a semaphore has at least one"))?;
        Ok(self.make(LockName::new(name)?, Mode::Permits(permits)))
    }

    fn make(&self, name: LockName, mode: Mode) -> Lock {
        Lock::new(self.core.line(name, mode), self.defaults.clone())
    }

    /// Who holds the lock of this name. Nobody is refused or delayed by it.
    ///
    /// # Errors
    /// [`Error::InvalidName`]; [`Error::Backend`] if the server cannot tell, or if the runtime that the client lives on has
    /// ended; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Nothing changes if it is dropped.
    pub async fn inspect(&self, name: impl AsRef<str>) -> Result<LockState> {
        self.core.inspect(&LockName::new(name)?, LockKind::Lock).await
    }

    /// Who holds permits of the semaphore of this name.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    /// Nothing changes if it is dropped.
    pub async fn inspect_semaphore(&self, name: impl AsRef<str>) -> Result<LockState> {
        self.core
            .inspect(&LockName::new(name)?, LockKind::Semaphore)
            .await
    }

    /// Ends by force the hold of this name that has `token`, whoever has it: for operators. `false` if there is none.
    /// Its holder is told that it was revoked.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where holds cannot be ended from outside; otherwise as [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    /// Dropped half-way, it may or may not have happened.
    pub async fn revoke(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.core
            .revoke(&LockName::new(name)?, LockKind::Lock, token)
            .await
    }

    /// As [`revoke`](Self::revoke), for a permit of the semaphore of this name.
    ///
    /// # Errors
    /// As [`revoke`](Self::revoke).
    ///
    /// # Cancel safety
    /// Dropped half-way, it may or may not have happened.
    pub async fn revoke_permit(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.core
            .revoke(&LockName::new(name)?, LockKind::Semaphore, token)
            .await
    }

    /// What this client's backend is.
    pub fn info(&self) -> &BackendInfo {
        &self.core.info
    }

    /// What this client's backend can do.
    pub fn capabilities(&self) -> Capabilities {
        self.core.info.capabilities
    }

    /// The longest time for which a dead holder keeps its name, on a healthy server: from its death until a waiter can be
    /// granted. `ttl` is what the holder asked for.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use lockkit_core::{LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let client = LockClient::new(MemoryBackend::new());
    /// let ttl = Duration::from_secs(30);
    /// assert!(client.dead_holder_bound(ttl) >= ttl);
    /// # });
    /// ```
    pub fn dead_holder_bound(&self, ttl: Duration) -> Duration {
        self.core.backend.dead_holder_bound(ttl)
    }

    /// Closes this client and all its clones: from now on they answer [`Error::Closed`], and so do those who wait.
    /// What is held is told [`LossReason::Disconnected`] and released. Waits up to `timeout` for every release to be
    /// confirmed, those of dropped guards and of waiters that withdraw included. An acquisition that waits at the server
    /// and is neither polled nor dropped keeps it waiting.
    ///
    /// # Errors
    /// [`Error::Backend`] if a release was not confirmed; its lease or connection is what ends it then. Also if the runtime
    /// that the client lives on has ended.
    ///
    /// # Cancel safety
    /// The client is closed from the first poll on. Dropped half-way, releases go on in the background, and it may be
    /// called again.
    pub async fn close(&self, timeout: Duration) -> Result<()> {
        let core = &self.core;
        core.close();
        core.worker.lives("close")?;
        let backend = core.info.name;
        let limit = tokio::time::Instant::now() + timeout.min(AcquireOptions::MAX_DURATION);
        let drained = core.within("close", core.idle(), || limit).await?;
        core.worker.lives("close")?;
        let unconfirmed = || {
            let cause = "releases are not confirmed; what is left ends with its lease or connection";
            Err(Error::transient(backend, "close", cause))
        };
        if drained.is_none() {
            // They go on, and need the connection.
            return unconfirmed();
        }
        let closed = core.within("close", core.backend.close(), || limit).await?;
        let before = core.unconfirmed_before.load(Ordering::SeqCst);
        if core.unconfirmed.load(Ordering::SeqCst) > before {
            return unconfirmed();
        }
        closed.unwrap_or_else(|| {
            let cause = "no answer in time from the server";
            Err(Error::transient(backend, "close", cause))
        })
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClient")
            .field("backend", &self.core.info.name)
            .field("server", &self.core.info.server)
            .field("namespace", &self.core.info.namespace)
            .finish_non_exhaustive()
    }
}

impl Core {
    pub(crate) fn line(self: &Arc<Self>, name: LockName, mode: Mode) -> Arc<Line> {
        let mut lines = self.lines.lock();
        if let Some(line) = lines.get(&(name.clone(), mode)).and_then(Weak::upgrade) {
            return line;
        }
        let info = &self.info;
        let id = LockId::new(
            info.server.clone(),
            info.namespace.clone(),
            mode.kind(),
            name.clone(),
        );
        let line = Arc::new(Line::new(self.clone(), id, mode));
        lines.insert((name, mode), Arc::downgrade(&line));
        line
    }

    /// The last handle of a line is gone. Somebody may have made it anew in the meantime.
    pub(crate) fn forget_line(&self, id: &LockId, mode: Mode) {
        let key = (id.name().clone(), mode);
        let mut lines = self.lines.lock();
        if lines.get(&key).is_some_and(|line| line.strong_count() == 0) {
            lines.remove(&key);
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Succeeds while something may be asked of this client.
    ///
    /// # Errors
    /// [`Error::Closed`], or that its runtime has ended.
    pub(crate) fn serves(&self, operation: &'static str) -> Result<()> {
        if self.is_closed() {
            return Err(Error::Closed);
        }
        self.worker.lives(operation)
    }

    /// Resolves when nothing may be asked of this client any more.
    pub(crate) async fn over(&self, operation: &'static str) -> Error {
        self.until(|| self.serves(operation)).await
    }

    async fn until(&self, good: impl Fn() -> Result<()>) -> Error {
        loop {
            let mut over = pin!(self.over.notified());
            over.as_mut().enable();
            if let Err(err) = good() {
                return err;
            }
            over.await;
        }
    }

    /// Runs `work` until `limit()`, also if the client is closed meanwhile; `None` if it was not done by then.
    ///
    /// # Errors
    /// As [`timing::within`]; and if the runtime ends that the client lives on: no answer would ever come.
    pub(crate) async fn within<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = T>,
        limit: impl FnOnce() -> tokio::time::Instant,
    ) -> Result<Option<T>> {
        let work = async {
            tokio::select! {
                biased;
                done = work => Ok(done),
                err = self.until(|| self.worker.lives(operation)) => Err(err),
            }
        };
        timing::within(self.info.name, operation, pin!(work), limit)
            .await?
            .transpose()
    }

    /// Resolves when nobody contends, nothing is held and no release is under way. Only for a client that is closed: none
    /// of that begins again.
    async fn idle(&self) {
        // In this order: what ends there has left its traces with the worker before.
        for line in self.lines() {
            self.worker.when(|| line.is_idle()).await;
        }
        self.worker.when(|| self.worker.is_idle()).await;
    }

    /// All lines that there are.
    pub(crate) fn lines(&self) -> Vec<Arc<Line>> {
        self.lines.lock().values().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn close(&self) {
        if !self.closed.swap(true, Ordering::SeqCst) {
            self.unconfirmed_before
                .store(self.unconfirmed.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        self.turn_away();
        for hold in self.lines().iter().flat_map(|line| line.holds()) {
            hold.cell.lose(LossReason::Disconnected);
        }
        self.worker.adopt_now();
    }

    /// Whoever waits is to see that this client serves nobody any more.
    pub(crate) fn turn_away(&self) {
        self.over.notify_waiters();
        for line in self.lines() {
            line.close();
        }
    }

    pub(crate) async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.ask("inspect", name, self.backend.inspect(name, kind)).await
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        self.ask("revoke", name, self.backend.revoke(name, kind, token))
            .await
    }

    async fn ask<T>(
        &self,
        operation: &'static str,
        name: &LockName,
        question: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.serves(operation)?;
        let limit = || tokio::time::Instant::now() + AcquireOptions::DEFAULT_OP_TIMEOUT;
        let answer = self.within(operation, question, limit).await?;
        answer
            .unwrap_or_else(|| {
                Err(Error::transient(
                    self.info.name,
                    operation,
                    "no answer in time from the server",
                ))
            })
            .map_err(|err| err.for_lock(name))
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("server", &self.info.server)
            .finish_non_exhaustive()
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.worker.orphan();
    }
}

/// Owner ids: random bits from the operating system, fetched for several claims at once, since each call into the
/// kernel costs more than all else in an uncontended acquisition. A client does not survive a `fork`, so neither does
/// its stock.
#[derive(Default)]
pub(crate) struct Owners {
    stock: Mutex<Vec<u128>>,
}

impl Owners {
    const FETCHED_AT_ONCE: usize = 64;

    /// Moves so many or fewer, and one at least, into `to`.
    pub(crate) fn draw(&self, backend: &'static str, many: usize, to: &mut Vec<u128>) -> Result<()> {
        let mut stock = self.stock.lock();
        if stock.is_empty() {
            let mut bytes = [0_u8; 16 * Self::FETCHED_AT_ONCE];
            getrandom::fill(&mut bytes)
                .map_err(|err| Error::permanent(backend, "acquire", format!("no random numbers: {err}")))?;
            let (ids, _) = bytes.as_chunks::<16>();
            stock.extend(ids.iter().map(|id| u128::from_ne_bytes(*id)));
        }
        let rest = stock.len().saturating_sub(many);
        // A line that is used once keeps no room for more.
        to.reserve_exact(many);
        to.extend(stock.drain(rest..));
        Ok(())
    }
}
