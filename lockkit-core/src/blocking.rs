//! The same locks for programs without an async runtime: every call blocks its thread until it is done.
//!
//! A [`LockClient`] brings its own runtime, one background thread that renews leases and releases what was dropped.
//! All that was made from one client shares it. Once the last client, lock and guard is gone, the runtime finishes the
//! releases that are under way and ends.
//!
//! ```
//! use lockkit_core::{MemoryBackend, blocking::LockClient};
//!
//! let client = LockClient::new(MemoryBackend::new())?;
//! let guard = client.lock("orders/42")?.acquire()?;
//! assert!(client.lock("orders/42")?.try_acquire()?.is_none());
//! guard.release()?;
//! # Ok::<(), lockkit_core::Error>(())
//! ```
//!
//! Within an async runtime, its threads for blocking work included, these calls answer an error, since they would hold
//! up other tasks: use [`crate::LockClient`] there. Guards may be dropped anywhere.
//!
//! A process that ends does not wait for background threads: release guards, or [`close`](LockClient::close) the
//! client, before `main` returns, or what was just dropped may stay held until its lease ends.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use tokio::{
    runtime::{Builder, Handle, Runtime},
    time::Instant,
};

use crate::{
    AcquireOptions, Capabilities, Error, FencingToken, HoldView, LockId, LockName, LockState, LossReason,
    Result,
    spi::{Backend, BackendInfo, Mode},
};

/// How long the runtime outlives its last handle to finish the releases that are under way.
const DRAIN: Duration = AcquireOptions::DEFAULT_TTL;

/// A blocking client of one lock server. Clone it freely: clones share the connection, the local queues and the
/// background thread.
#[derive(Clone)]
pub struct LockClient {
    client: crate::LockClient,
    host: Arc<Host>,
}

impl LockClient {
    /// A client of `backend`: the entrance for backends of your own. No I/O.
    ///
    /// # Errors
    /// [`Error::Backend`] if the background thread cannot be started, or within an async runtime.
    pub fn new(backend: impl Backend) -> Result<Self> {
        Self::connect_with(async move || Ok(crate::LockClient::new(backend)))
    }

    /// The client that `connect` makes. It runs within the client's own runtime, and so lives on it.
    ///
    /// The client belongs to the blocking one from then on: it is closed when the last handle of that is gone.
    ///
    /// ```
    /// use lockkit_core::{LockClient, MemoryBackend, blocking};
    ///
    /// let client = blocking::LockClient::connect_with(|| async {
    ///     // Anything that has to be awaited in order to reach the server.
    ///     Ok(LockClient::new(MemoryBackend::new()))
    /// })?;
    /// assert!(client.inspect("job")?.is_free());
    /// # Ok::<(), lockkit_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// What `connect` answers; [`Error::Backend`] if the background thread cannot be started, or within an async
    /// runtime.
    pub fn connect_with<F, Fut>(connect: F) -> Result<Self>
    where
        F: FnOnce() -> Fut,
        Fut: Future<Output = Result<crate::LockClient>>,
    {
        refuse_in_async("connect")?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("lockkit")
            .enable_all()
            .build()
            .map_err(|err| Error::permanent("lockkit", "connect", err))?;
        let runtime = OwnRuntime(Some(runtime));
        let client = runtime.block_on("connect", async { connect().await })?;
        let host = Arc::new(Host {
            runtime,
            client: client.clone(),
        });
        Ok(Self { client, host })
    }

    /// The same client whose locks start from `defaults`.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] if one of them cannot be kept.
    pub fn with_defaults(self, defaults: AcquireOptions) -> Result<Self> {
        let Self { client, host } = self;
        let client = client.with_defaults(defaults)?;
        Ok(Self { client, host })
    }

    /// The lock of this name, in exclusive mode. No I/O; nothing is held.
    ///
    /// # Errors
    /// [`Error::InvalidName`].
    pub fn lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(self.client.lock(name)?, &self.host))
    }

    /// The semaphore of this name, which up to `permits` holders have at once. No I/O; nothing is held.
    ///
    /// # Errors
    /// [`Error::InvalidName`]; [`Error::InvalidOptions`] for zero permits.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Result<Lock> {
        Ok(Lock::new(self.client.semaphore(name, permits)?, &self.host))
    }

    /// Who holds the lock of this name. Nobody is refused or delayed by it.
    ///
    /// # Errors
    /// [`Error::InvalidName`]; [`Error::Backend`] if the server cannot tell, or within an async runtime;
    /// [`Error::Closed`].
    pub fn inspect(&self, name: impl AsRef<str>) -> Result<LockState> {
        self.host.block_on("inspect", self.client.inspect(name))
    }

    /// Who holds permits of the semaphore of this name.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    pub fn inspect_semaphore(&self, name: impl AsRef<str>) -> Result<LockState> {
        self.host.block_on("inspect", self.client.inspect_semaphore(name))
    }

    /// Ends by force the hold of this name that has `token`, whoever has it: for operators. `false` if there is none.
    /// Its holder is told that it was revoked.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where holds cannot be ended from outside; otherwise as [`inspect`](Self::inspect).
    pub fn revoke(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.host.block_on("revoke", self.client.revoke(name, token))
    }

    /// As [`revoke`](Self::revoke), for a permit of the semaphore of this name.
    ///
    /// # Errors
    /// As [`revoke`](Self::revoke).
    pub fn revoke_permit(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.host
            .block_on("revoke", self.client.revoke_permit(name, token))
    }

    /// What this client's backend is.
    pub fn info(&self) -> &BackendInfo {
        self.client.info()
    }

    /// What this client's backend can do.
    pub fn capabilities(&self) -> Capabilities {
        self.client.capabilities()
    }

    /// Closes this client and all its clones: from now on they answer [`Error::Closed`], and so do those who wait.
    /// What is held is told [`LossReason::Disconnected`] and released. Waits up to `timeout` for every release to be
    /// confirmed, those of dropped guards included.
    ///
    /// # Errors
    /// [`Error::Backend`] if a release was not confirmed: its lease or connection is what ends it then. Also within
    /// an async runtime, where nothing is closed.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.host.block_on("close", self.client.close(timeout))
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("blocking::LockClient").field(&self.client).finish()
    }
}

/// A lock, or one mode of it, whose acquisition blocks the thread. Cloning is cheap; it is not held by being there.
///
/// Locks are not re-entrant: a second acquisition by the thread that holds it waits, or finds it taken.
#[derive(Clone)]
pub struct Lock {
    lock: crate::Lock,
    host: Arc<Host>,
}

impl Lock {
    fn new(lock: crate::Lock, host: &Arc<Host>) -> Self {
        Self {
            lock,
            host: host.clone(),
        }
    }

    /// The same lock in shared mode. Shared holders exclude exclusive ones only. A semaphore stays what it is.
    pub fn shared(&self) -> Self {
        Self::new(self.lock.shared(), &self.host)
    }

    /// The same lock with other defaults. What `options` leaves unset stays as it is.
    pub fn with_options(&self, options: AcquireOptions) -> Self {
        Self::new(self.lock.with_options(options), &self.host)
    }

    /// What makes it the same lock as another.
    pub fn id(&self) -> &LockId {
        self.lock.id()
    }

    /// Its name.
    pub fn name(&self) -> &LockName {
        self.lock.name()
    }

    /// Whether it is held alone, shared, or by permits.
    pub fn mode(&self) -> Mode {
        self.lock.mode()
    }

    /// The options that it was made with.
    pub fn options(&self) -> &AcquireOptions {
        self.lock.options()
    }

    /// Acquires it with these options; what they leave unset is taken from the lock's own.
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`](crate::DistributedLock::acquire_with); [`Error::Backend`] within an async
    /// runtime.
    pub fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        let guard = self.host.block_on("acquire", self.lock.acquire_with(options))?;
        Ok(LockGuard::new(guard, &self.host))
    }

    /// Acquires it, waiting for as long as the lock's own options say; by default, as long as it takes.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with).
    pub fn acquire(&self) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new())
    }

    /// Makes one attempt. `None` means that it is taken.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with); an outage is an error, never `None`.
    pub fn try_acquire(&self) -> Result<Option<LockGuard>> {
        let guard = self.host.block_on("acquire", self.lock.try_acquire())?;
        Ok(guard.map(|guard| LockGuard::new(guard, &self.host)))
    }

    /// Acquires it, waiting for up to `wait`.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with).
    pub fn acquire_timeout(&self, wait: Duration) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new().wait(wait))
    }

    /// Acquires the lock, runs `work` while it is held, and releases it, also if `work` panics.
    ///
    /// Nothing can stop `work` from outside when the lock is lost: in long work, ask [`HoldView::check`] between steps.
    ///
    /// ```
    /// use lockkit_core::{MemoryBackend, blocking::LockClient};
    ///
    /// let lock = LockClient::new(MemoryBackend::new())?.lock("ledger")?;
    /// let token = lock.with_lock(|held| held.token())?;
    /// assert!(lock.with_lock(|held| held.token())? > token);
    /// # Ok::<(), lockkit_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with) while acquiring. [`Error::Lost`] if the lock was lost before `work` was
    /// done. Any other failure of the release is logged.
    pub fn with_lock<T>(&self, work: impl FnOnce(HoldView) -> T) -> Result<T> {
        let guard = self.acquire()?;
        let output = work(guard.view());
        match guard.release() {
            Err(err @ Error::Lost { .. }) => Err(err),
            Err(err) => {
                tracing::warn!(lock = %self.id(), error = crate::spi::chain(&err), "release failed");
                Ok(output)
            }
            Ok(()) => Ok(output),
        }
    }

    /// Who holds it. Nobody is refused or delayed by it.
    ///
    /// # Errors
    /// As [`LockClient::inspect`].
    pub fn inspect(&self) -> Result<LockState> {
        self.host.block_on("inspect", self.lock.inspect())
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("blocking::Lock").field(&self.lock).finish()
    }
}

/// A lock that is held; the blocking [`LockGuard`](crate::LockGuard).
///
/// While it lives, the client's background thread renews its lease. Dropping it hands the release to that thread:
/// it never blocks, does no I/O, and is fine within an async runtime. [`release`](Self::release) is the way to learn
/// the outcome.
#[must_use = "dropping the guard releases the lock"]
pub struct LockGuard {
    guard: crate::LockGuard,
    host: Arc<Host>,
}

impl LockGuard {
    fn new(guard: crate::LockGuard, host: &Arc<Host>) -> Self {
        Self {
            guard,
            host: host.clone(),
        }
    }

    /// The lock's name.
    pub fn name(&self) -> &LockName {
        self.guard.name()
    }

    /// The fencing token of this hold.
    pub fn token(&self) -> FencingToken {
        self.guard.token()
    }

    /// Whether the lock is still held, by the clock too: `false` from the moment the lease is over, even if nothing
    /// has noticed yet.
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// Like [`is_held`](Self::is_held), for use with `?`.
    ///
    /// # Errors
    /// [`Error::Lost`] once the hold is lost.
    pub fn check(&self) -> Result<()> {
        self.guard.check()
    }

    /// Until when the lock is held if no renewal succeeds from now on, on the monotonic clock. `None` if the hold has
    /// no lease, only a process or connection that it ends with.
    pub fn valid_until(&self) -> Option<Instant> {
        self.guard.valid_until()
    }

    /// How long the lease in force was when it was proven; [`valid_until`](Self::valid_until) is its end. At most the
    /// ttl, and less where something else decides, such as a server's session. `None` if the hold has no lease.
    pub fn lease_length(&self) -> Option<Duration> {
        self.guard.lease_length()
    }

    /// A view of this hold that can be cloned and given away, to other threads too. It keeps nothing held.
    pub fn view(&self) -> HoldView {
        self.guard.view()
    }

    /// Why the hold was lost, if it was. It stays lost for good.
    pub fn lost_reason(&self) -> Option<LossReason> {
        self.guard.lost().reason()
    }

    /// Blocks until the hold is lost, for up to `timeout`; `None` if it is still held then. A loss in the past is
    /// answered at once.
    ///
    /// # Errors
    /// [`Error::Backend`] within an async runtime.
    pub fn wait_lost(&self, timeout: Duration) -> Result<Option<LossReason>> {
        let timeout = timeout.min(AcquireOptions::MAX_DURATION);
        self.host.block_on("wait_lost", async {
            Ok(tokio::time::timeout(timeout, self.guard.lost()).await.ok())
        })
    }

    /// Extends the lease by hand, to a full ttl from now.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold is lost; [`Error::Backend`] if no answer came, in which case the lease goes on as
    /// it was, or within an async runtime.
    pub fn renew(&self) -> Result<()> {
        self.host.block_on("renew", self.guard.renew())
    }

    /// Releases the lock and says what came of it.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold had been lost before; [`Error::Backend`] if no confirmation came: it is tried
    /// again in the background, and the lease bounds what may be left. Within an async runtime it is
    /// [`Error::Backend`] too: the release then happens in the background, as if the guard had been dropped.
    pub fn release(self) -> Result<()> {
        let Self { guard, host } = self;
        host.block_on("release", guard.release())
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("blocking::LockGuard").field(&self.guard).finish()
    }
}

/// What all handles of a client share. Dropped with the last of them.
struct Host {
    runtime: OwnRuntime,
    client: crate::LockClient,
}

impl Host {
    fn block_on<T>(&self, operation: &'static str, work: impl Future<Output = Result<T>>) -> Result<T> {
        refuse_in_async(operation)?;
        self.runtime.block_on(operation, work)
    }
}

impl Drop for Host {
    /// Blocks nobody: the runtime itself finishes what is under way, and then ends.
    fn drop(&mut self) {
        let runtime = OwnRuntime(self.runtime.0.take());
        let client = self.client.clone();
        let Some(handle) = runtime.0.as_ref().map(Runtime::handle).cloned() else {
            return;
        };
        handle.spawn(async move {
            if let Err(err) = client.close(DRAIN).await {
                tracing::warn!(
                    error = crate::spi::chain(&err),
                    "the last handle of a blocking client is gone, but not all is released"
                );
            }
            drop(client);
            drop(runtime);
        });
    }
}

/// A runtime that may be dropped anywhere, on its own threads too.
struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    fn block_on<T>(&self, operation: &'static str, work: impl Future<Output = Result<T>>) -> Result<T> {
        match &self.0 {
            Some(runtime) => runtime.block_on(work),
            None => Err(Error::permanent("lockkit", operation, "the runtime has ended")),
        }
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// To block here would hold up the tasks of the runtime that runs this thread, or panic.
fn refuse_in_async(operation: &'static str) -> Result<()> {
    if Handle::try_current().is_err() {
        return Ok(());
    }
    let cause = "a blocking call within an async runtime; use the async API there, or a thread of your own";
    Err(Error::permanent("lockkit", operation, cause))
}
