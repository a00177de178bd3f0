//! The blocking API, for programs without an async runtime: every call blocks its thread until it is done.
//!
//! A [`LockClient`] brings its own runtime: one background thread, which renews leases and releases what was dropped.
//! All locks and guards of one client share it. Once the last client, lock and guard is gone, the runtime finishes the
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
//! Within an async runtime, also on its threads for blocking work, these calls return an error, since they would hold
//! up other tasks. Use [`crate::LockClient`] there. Guards may be dropped anywhere.
//!
//! A process that ends does not wait for background threads. Release guards, or [`close`](LockClient::close) the
//! client, before `main` returns. Otherwise a lock whose guard was just dropped may stay held until its lease ends.

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

/// The time for which the runtime outlives its last handle, to finish the releases that are under way.
const DRAIN: Duration = AcquireOptions::DEFAULT_TTL;

/// A blocking client of one lock server. Clone it freely: clones share the connection, the local queues and the
/// background thread.
#[derive(Clone)]
pub struct LockClient {
    client: crate::LockClient,
    host: Arc<Host>,
}

impl LockClient {
    /// Makes a client of `backend`, which may be one of your own. Does no I/O.
    ///
    /// # Errors
    /// [`Error::Backend`] if the background thread cannot be started, or within an async runtime.
    pub fn new(backend: impl Backend) -> Result<Self> {
        Self::connect_with(async move || Ok(crate::LockClient::new(backend)))
    }

    /// Makes a blocking client of the client that `connect` returns. `connect` runs within the new runtime, on which that client
    /// then lives.
    ///
    /// That client belongs to the blocking one from then on, and is closed with the blocking one's last handle.
    ///
    /// ```
    /// use lockkit_core::{LockClient, MemoryBackend, blocking};
    ///
    /// let client = blocking::LockClient::connect_with(|| async {
    ///     // Await here what it takes to reach the server.
    ///     Ok(LockClient::new(MemoryBackend::new()))
    /// })?;
    /// assert!(client.inspect("job")?.is_free());
    /// # Ok::<(), lockkit_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// The error of `connect`; [`Error::Backend`] if the background thread cannot be started, or within an async runtime.
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

    /// Returns this client with other default options for its locks. What `defaults` leaves unset stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] if one of them is out of bounds.
    pub fn with_defaults(self, defaults: AcquireOptions) -> Result<Self> {
        let Self { client, host } = self;
        let client = client.with_defaults(defaults)?;
        Ok(Self { client, host })
    }

    /// Returns the lock of this name, in exclusive mode. Does no I/O and holds nothing.
    ///
    /// # Errors
    /// [`Error::InvalidName`].
    pub fn lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(Lock::new(self.client.lock(name)?, &self.host))
    }

    /// Returns the semaphore of this name, which up to `permits` holders have at once. Does no I/O and holds nothing.
    ///
    /// # Errors
    /// [`Error::InvalidName`]; [`Error::InvalidOptions`] for zero permits.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Result<Lock> {
        Ok(Lock::new(self.client.semaphore(name, permits)?, &self.host))
    }

    /// Returns the holders and waiters of the lock of this name. Refuses and delays nobody.
    ///
    /// # Errors
    /// [`Error::InvalidName`]; [`Error::Backend`] if the server cannot tell, or within an async runtime;
    /// [`Error::Closed`].
    pub fn inspect(&self, name: impl AsRef<str>) -> Result<LockState> {
        self.host.block_on("inspect", self.client.inspect(name))
    }

    /// Returns the holders and waiters of the semaphore of this name.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    pub fn inspect_semaphore(&self, name: impl AsRef<str>) -> Result<LockState> {
        self.host.block_on("inspect", self.client.inspect_semaphore(name))
    }

    /// Ends the hold of this name that has `token` by force, also another client's: for operators. Returns `false` if there is
    /// none.
    /// Its holder loses it as [`Revoked`](LossReason::Revoked).
    ///
    /// # Errors
    /// [`Error::Unsupported`] where holds cannot be ended from outside; otherwise as [`inspect`](Self::inspect).
    pub fn revoke(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.host.block_on("revoke", self.client.revoke(name, token))
    }

    /// Ends a permit of the semaphore of this name by force, as [`revoke`](Self::revoke).
    ///
    /// # Errors
    /// As [`revoke`](Self::revoke).
    pub fn revoke_permit(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.host
            .block_on("revoke", self.client.revoke_permit(name, token))
    }

    /// Describes this client's backend.
    pub fn info(&self) -> &BackendInfo {
        self.client.info()
    }

    /// Returns the capabilities of this client's backend.
    pub fn capabilities(&self) -> Capabilities {
        self.client.capabilities()
    }

    /// Closes this client and all its clones. From now on every call returns [`Error::Closed`], and so do pending
    /// acquisitions. Live guards are marked lost ([`LossReason::Disconnected`]), then released. Waits up to `timeout` for every
    /// release to be confirmed, also those of dropped guards.
    ///
    /// # Errors
    /// [`Error::Backend`] if a release was not confirmed; its lease or connection then ends the hold. Also within
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

/// A lock in one mode, whose acquisition blocks the thread. Having it holds nothing. Cloning is cheap.
///
/// Locks are not re-entrant: a second acquisition by the holding thread waits, or finds the lock taken.
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

    /// Returns the same lock in shared mode. Shared holders exclude exclusive ones only. A semaphore stays what it is.
    pub fn shared(&self) -> Self {
        Self::new(self.lock.shared(), &self.host)
    }

    /// Returns the same lock with other default options. What `options` leaves unset stays as it is.
    pub fn with_options(&self, options: AcquireOptions) -> Self {
        Self::new(self.lock.with_options(options), &self.host)
    }

    /// Returns its identity: server, namespace, kind and name.
    pub fn id(&self) -> &LockId {
        self.lock.id()
    }

    /// Returns its name.
    pub fn name(&self) -> &LockName {
        self.lock.name()
    }

    /// Returns its mode: exclusive, shared, or permits.
    pub fn mode(&self) -> Mode {
        self.lock.mode()
    }

    /// Returns the options that it was made with.
    pub fn options(&self) -> &AcquireOptions {
        self.lock.options()
    }

    /// Acquires it with these options. What they leave unset is taken from the lock's own.
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`](crate::DistributedLock::acquire_with); [`Error::Backend`] within an async
    /// runtime.
    pub fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        let guard = self.host.block_on("acquire", self.lock.acquire_with(options))?;
        Ok(LockGuard::new(guard, &self.host))
    }

    /// Acquires it. Waits for as long as the lock's own options say; by default, for ever.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with).
    pub fn acquire(&self) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new())
    }

    /// Makes one attempt. Returns `None` if it is taken.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with). An outage is an error, never `None`.
    pub fn try_acquire(&self) -> Result<Option<LockGuard>> {
        let guard = self.host.block_on("acquire", self.lock.try_acquire())?;
        Ok(guard.map(|guard| LockGuard::new(guard, &self.host)))
    }

    /// Acquires it. Waits for up to `wait`.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with).
    pub fn acquire_timeout(&self, wait: Duration) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new().wait(wait))
    }

    /// Acquires the lock, runs `work` while it is held, and releases it, also if `work` panics.
    ///
    /// Nothing stops `work` when the lock is lost. In long work, call [`HoldView::check`] between steps.
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

    /// Returns its holders and waiters. Refuses and delays nobody.
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
/// While the guard lives, the client's background thread renews its lease. Dropping the guard leaves the release to that thread:
/// it never blocks, does no I/O, and works within an async runtime. Call [`release`](Self::release) to learn the outcome.
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

    /// Returns the lock's name.
    pub fn name(&self) -> &LockName {
        self.guard.name()
    }

    /// Returns the fencing token of this hold.
    pub fn token(&self) -> FencingToken {
        self.guard.token()
    }

    /// Returns `true` while the lock is held. Looks at the clock too: `false` as soon as the lease is over, even if nothing
    /// has noticed yet.
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// Checks that the lock is held, as [`is_held`](Self::is_held), for use with `?`.
    ///
    /// # Errors
    /// [`Error::Lost`] once the hold is lost.
    pub fn check(&self) -> Result<()> {
        self.guard.check()
    }

    /// Returns the time until which the lock is held if no renewal succeeds from now on, on the monotonic clock. `None` if the
    /// hold has no lease, only a process or connection that it ends with.
    pub fn valid_until(&self) -> Option<Instant> {
        self.guard.valid_until()
    }

    /// Returns the length of the present lease when it was proven; [`valid_until`](Self::valid_until) is its end. At most the
    /// ttl, and less where something else decides, such as a server's session. `None` if the hold has no lease.
    pub fn lease_length(&self) -> Option<Duration> {
        self.guard.lease_length()
    }

    /// Returns a view of this hold that can be cloned and given away, also to other threads. It keeps nothing held.
    pub fn view(&self) -> HoldView {
        self.guard.view()
    }

    /// Returns the reason if the hold is lost. A lost hold stays lost.
    pub fn lost_reason(&self) -> Option<LossReason> {
        self.guard.lost().reason()
    }

    /// Blocks until the hold is lost, for up to `timeout`. Returns `None` if it is still held then. Returns at once if it was lost
    /// before.
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
    /// [`Error::Lost`] if the hold is lost. [`Error::Backend`] if no reply came, in which case the lease goes on as
    /// it was; also within an async runtime.
    pub fn renew(&self) -> Result<()> {
        self.host.block_on("renew", self.guard.renew())
    }

    /// Releases the lock and returns the outcome.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold had been lost before. [`Error::Backend`] if no confirmation came: the release is tried
    /// again in the background, and the hold ends with its lease at the latest. Within an async runtime also
    /// [`Error::Backend`]: the release then goes on in the background, as if the guard had been dropped.
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

/// The runtime and the client that all handles share. Dropped with the last of them.
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
    /// Blocks nobody: the runtime itself finishes the releases that are under way, and then ends.
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

/// Refuses to block within an async runtime: it would hold up the tasks of that runtime, or panic.
fn refuse_in_async(operation: &'static str) -> Result<()> {
    if Handle::try_current().is_err() {
        return Ok(());
    }
    let cause = "a blocking call within an async runtime; use the async API there, or a thread of your own";
    Err(Error::permanent("lockkit", operation, cause))
}
