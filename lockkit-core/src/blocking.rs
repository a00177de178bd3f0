//! The blocking API, for programs without an async runtime: every call blocks its thread until it is done.
//!
//! A [`LockClient`] brings its own runtime: one background thread, which renews leases and releases what was dropped.
//! All that is made of one client shares it, and keeps it: locks and guards, elections, candidates and observers. Once the last of all
//! these is gone, the runtime finishes in this order:
//!
//! 1. It waits for the releases that are under way. One that the server does not confirm is tried again, until the lease must be over:
//!    for the longest [`ttl`](AcquireOptions::ttl) that the hold has asked for and one [`op_timeout`](AcquireOptions::op_timeout). The
//!    last try may take another `op_timeout`.
//! 2. It closes the connections, for which a server has five seconds, and ends.
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
//! # Beside an async runtime
//!
//! These calls work on every thread that may be held up: threads of your own, [`spawn_blocking`](tokio::task::spawn_blocking), and
//! [`block_in_place`](tokio::task::block_in_place) on a runtime of several threads. In an async task of Tokio they return an error,
//! since they would hold up the other tasks, the one that holds the lock perhaps among them. Use [`crate::LockClient`] there, or
//! `spawn_blocking`. Guards may be dropped anywhere.
//!
//! An async task of another runtime, or one within [`unconstrained`](tokio::task::unconstrained), cannot be told from a thread that
//! may be held up. It is held up.
//!
//! ```
//! use lockkit_core::{Error, MemoryBackend, blocking::LockClient};
//!
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let in_a_task = LockClient::new(MemoryBackend::new());
//! assert!(matches!(in_a_task, Err(Error::Backend { .. })));
//! let work = tokio::task::spawn_blocking(|| {
//!     let client = LockClient::new(MemoryBackend::new())?;
//!     client.lock("orders/42")?.acquire()?.release()
//! });
//! work.await.unwrap()?;
//! # Ok::<(), lockkit_core::Error>(())
//! # }).unwrap();
//! ```
//!
//! # What differs from the async API
//!
//! - `guard.lost()` is [`wait_lost`](LockGuard::wait_lost), which takes a time-out, and [`lost_reason`](LockGuard::lost_reason).
//! - There is no `run`, since nothing can stop a thread: call [`check`](LockGuard::check) between the steps of the work. Nor does a loss
//!   stop the work of [`lead`](Candidate::lead).
//! - What is a stream there is an iterator here: [`LockList`] and [`Observer`].
//! - A wait is not cancelled from outside: give it a [`wait`](AcquireOptions::wait), call
//!   [`campaign_timeout`](Candidate::campaign_timeout) or [`next_timeout`](Observer::next_timeout), or [`close`](LockClient::close) the
//!   client.
//!
//! # Before the process ends
//!
//! A process that ends does not wait for background threads. Release guards, or [`close`](LockClient::close) the
//! client, before `main` returns. Otherwise a lock whose guard was just dropped may stay held until its lease ends.

mod election;
mod multi;
mod reentrant;
mod thread;

use std::{fmt, future::Future, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::{
    runtime::{Builder, Runtime},
    time::Instant,
};

pub use self::{
    election::{Candidate, Election, Leadership, Observer},
    multi::{LockSet, acquire_all, try_acquire_all},
    reentrant::{ReentrantGuard, ReentrantLock},
};
use self::{reentrant::Inner, thread::refuse_in_async};

use crate::{
    AcquireOptions, Capabilities, DetachError, DetachedHold, DowngradeError, Error, FencingToken, HoldView,
    ListedLock, LockId, LockName, LockState, LossReason, Result, Revocation, RunError,
    spi::{Backend, BackendInfo, Mode},
};

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
    /// [`Error::Backend`] if the background thread cannot be started, or within an async task.
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
    /// The error of `connect`; [`Error::Backend`] if the background thread cannot be started, or within an async task.
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
    /// [`Error::InvalidOptions`] or [`Error::Unsupported`] if one of them is out of bounds, two contradict each other, or the backend lacks
    /// what one asks for.
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

    /// Returns the election of this name: candidates of which one leads, and observers. Does no I/O. As
    /// [`crate::LockClient::election`].
    ///
    /// # Errors
    /// [`Error::InvalidName`] for a name that is empty, longer than 1,007 bytes, or the name of an election's lock.
    pub fn election(&self, name: impl AsRef<str>) -> Result<Election> {
        Ok(Election::new(self.client.election(name)?, &self.host))
    }

    /// Goes on with a hold that was [detached](LockGuard::detach): as [`adopt`](crate::LockClient::adopt).
    ///
    /// # Errors
    /// As there. Also [`Error::Backend`] within an async task.
    pub fn adopt(&self, detached: &mut DetachedHold) -> Result<LockGuard> {
        let guard = self.host.block_on("adopt", self.client.adopt(detached))?;
        Ok(LockGuard::new(guard, &self.host))
    }

    /// Returns the holders and waiters of the lock of this name. Refuses and delays nobody.
    ///
    /// # Errors
    /// [`Error::InvalidName`]; [`Error::Backend`] if the server cannot tell, or within an async task;
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

    /// Asks the holder of this name that has `token` to give up its hold, also another client's, and waits until the hold has ended,
    /// for up to `within`: as [`revoke`](crate::LockClient::revoke).
    ///
    /// # Errors
    /// [`Error::Unsupported`] where a holder cannot be asked; otherwise as [`inspect`](Self::inspect).
    pub fn revoke(&self, name: impl AsRef<str>, token: FencingToken, within: Duration) -> Result<Revocation> {
        self.host
            .block_on("revoke", self.client.revoke(name, token, within))
    }

    /// Asks the holder of a permit of the semaphore of this name to give it up, as [`revoke`](Self::revoke).
    ///
    /// # Errors
    /// Those of [`revoke`](Self::revoke).
    pub fn revoke_permit(
        &self,
        name: impl AsRef<str>,
        token: FencingToken,
        within: Duration,
    ) -> Result<Revocation> {
        self.host
            .block_on("revoke", self.client.revoke_permit(name, token, within))
    }

    /// Lists the locks and semaphores of this client's namespace that somebody holds and whose names begin with `prefix`. The
    /// prefix is literal, and an empty one stands for all names. See [`crate::LockClient::list`].
    ///
    /// ```
    /// use lockkit_core::{MemoryBackend, blocking::LockClient};
    ///
    /// let client = LockClient::new(MemoryBackend::new())?;
    /// let guard = client.lock("orders/42")?.acquire()?;
    /// for lock in client.list("orders/")? {
    ///     println!("{}", lock?.name);
    /// }
    /// guard.release()?;
    /// # Ok::<(), lockkit_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`crate::LockClient::list`]. The iterator has errors of its own.
    pub fn list(&self, prefix: impl AsRef<str>) -> Result<LockList> {
        Ok(LockList {
            list: Some(self.client.list(prefix)?),
            host: self.host.clone(),
        })
    }

    /// Returns the highest token that a hold of this namespace may have had so far, as [`fence`](crate::LockClient::fence).
    ///
    /// # Errors
    /// [`Error::Unsupported`] where tokens cannot be raised; otherwise as [`inspect`](Self::inspect).
    pub fn fence(&self) -> Result<FencingToken> {
        self.host.block_on("fence", self.client.fence())
    }

    /// Raises the tokens of this namespace above this one, as [`raise_fence`](crate::LockClient::raise_fence).
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a token above which too few would be left; otherwise as [`fence`](Self::fence).
    pub fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        self.host.block_on("raise", self.client.raise_fence(above))
    }

    /// Ends the hold of this name that has `token` by force, also another client's: for operators. Returns `false` if there is
    /// none.
    /// Its holder loses it as [`Revoked`](LossReason::Revoked).
    ///
    /// # Errors
    /// [`Error::Unsupported`] where holds cannot be ended from outside; otherwise as [`inspect`](Self::inspect).
    pub fn revoke_by_force(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.host
            .block_on("revoke", self.client.revoke_by_force(name, token))
    }

    /// Ends a permit of the semaphore of this name by force, as [`revoke_by_force`](Self::revoke_by_force).
    ///
    /// # Errors
    /// As [`revoke_by_force`](Self::revoke_by_force).
    pub fn revoke_permit_by_force(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.host
            .block_on("revoke", self.client.revoke_permit_by_force(name, token))
    }

    /// Describes this client's backend.
    pub fn info(&self) -> &BackendInfo {
        self.client.info()
    }

    /// Returns the capabilities of this client's backend.
    pub fn capabilities(&self) -> Capabilities {
        self.client.capabilities()
    }

    /// Returns the longest time from a holder's death until a waiter can be granted the lock, on a healthy server. `ttl` is what
    /// the holder asked for.
    pub fn dead_holder_bound(&self, ttl: Duration) -> Duration {
        self.client.dead_holder_bound(ttl)
    }

    /// Closes this client and all its clones. From now on every call returns [`Error::Closed`], and so do pending
    /// acquisitions. Live guards are marked lost ([`LossReason::Disconnected`]), then released. Waits up to `timeout` for every
    /// release to be confirmed, also those of dropped guards.
    ///
    /// # Errors
    /// [`Error::Backend`] if a release was not confirmed; its lease or connection then ends the hold. Also within
    /// an async task, where nothing is closed.
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
/// Locks are not re-entrant: a second acquisition by the holding thread waits, or finds the lock taken. Wrap it in a
/// [`ReentrantLock`] if you need that.
#[must_use = "having a lock holds nothing: call `acquire()` and keep the guard"]
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
    /// task.
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

    /// Acquires this many permits of a semaphore, all or none, as [`crate::Lock::acquire_many`].
    ///
    /// ```
    /// use lockkit_core::{MemoryBackend, blocking::LockClient};
    ///
    /// let gpus = LockClient::new(MemoryBackend::new())?.semaphore("gpu", 4)?;
    /// let three = gpus.acquire_many(3)?;
    /// assert!(gpus.try_acquire_many(2)?.is_none());
    /// three.release()?;
    /// # Ok::<(), lockkit_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`crate::Lock::acquire_many`]; [`Error::Backend`] within an async task.
    pub fn acquire_many(&self, permits: u32) -> Result<LockSet> {
        let set = self.host.block_on("acquire", self.lock.acquire_many(permits))?;
        Ok(LockSet::of_one(set, &self.host))
    }

    /// Acquires this many permits if so many are free now, as [`crate::Lock::try_acquire_many`]. Returns `None` if they are not.
    ///
    /// # Errors
    /// As [`crate::Lock::try_acquire_many`]; [`Error::Backend`] within an async task. An outage is an error, never `None`.
    pub fn try_acquire_many(&self, permits: u32) -> Result<Option<LockSet>> {
        let set = self
            .host
            .block_on("acquire", self.lock.try_acquire_many(permits))?;
        Ok(set.map(|set| LockSet::of_one(set, &self.host)))
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
    /// done: the [`RunError`] has its output as well. `?` turns it into an [`Error`]. Any other failure of the release is logged.
    pub fn with_lock<T>(&self, work: impl FnOnce(HoldView) -> T) -> Result<T, RunError<T>> {
        let guard = self.acquire()?;
        let output = work(guard.view());
        match guard.release() {
            Err(err @ Error::Lost { .. }) => Err(RunError::done(err, output)),
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
/// it never blocks, does no I/O, and works within an async task. Call [`release`](Self::release) to learn the outcome.
#[must_use = "dropping the guard releases the lock"]
pub struct LockGuard {
    guard: Inner,
    host: Arc<Host>,
}

impl LockGuard {
    fn new(guard: impl Into<Inner>, host: &Arc<Host>) -> Self {
        Self {
            guard: guard.into(),
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
    /// [`Error::Backend`] within an async task.
    pub fn wait_lost(&self, timeout: Duration) -> Result<Option<LossReason>> {
        let timeout = timeout.min(AcquireOptions::MAX_DURATION);
        self.host.block_on("wait_lost", async {
            Ok(tokio::time::timeout(timeout, self.guard.lost()).await.ok())
        })
    }

    /// Returns what is left of the lease if a renewal has failed, or has no reply although no more than an eighth of the lease is
    /// left. It may yet be renewed. Zero if the hold is lost; `None` if all is well.
    pub fn renewal_failing(&self) -> Option<Duration> {
        self.guard.renewal_failing().now_or_never()
    }

    /// Extends the lease by hand, to a full ttl from now.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold is lost. [`Error::Backend`] if no reply came, in which case the lease goes on as
    /// it was; also within an async task.
    pub fn renew(&self) -> Result<()> {
        self.host.block_on("renew", self.guard.renew())
    }

    /// Returns a duplicate of the operating system's handle that keeps the hold alive, where the backend has one (file). A
    /// child process that inherits it keeps the lock until it has exited, even if this process is killed.
    ///
    /// # Errors
    /// [`Error::Backend`] within an async task.
    #[cfg(unix)]
    pub fn descriptor(&self) -> Result<Option<std::os::fd::OwnedFd>> {
        self.host.block_on("descriptor", self.guard.descriptor().map(Ok))
    }

    /// Changes the ttl of this hold, as [`LockGuard::set_ttl`](crate::LockGuard::set_ttl).
    ///
    /// # Errors
    /// As there. Also [`Error::Backend`] within an async task.
    pub fn set_ttl(&self, ttl: Duration) -> Result<()> {
        self.host.block_on("set_ttl", self.guard.set_ttl(ttl))
    }

    /// Turns an exclusive hold into a shared one without a gap, as [`LockGuard::downgrade`](crate::LockGuard::downgrade).
    ///
    /// ```
    /// use lockkit_core::{MemoryBackend, blocking::LockClient};
    ///
    /// let table = LockClient::new(MemoryBackend::new())?.lock("prices")?;
    /// let reading = table.acquire()?.downgrade()?;
    /// assert!(table.shared().try_acquire()?.is_some() && table.try_acquire()?.is_none());
    /// reading.release()?;
    /// # Ok::<(), lockkit_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As there. Also [`Error::Unsupported`] for a re-entrant hold, and [`Error::Backend`] within an async task: the guard is left as
    /// it was.
    pub fn downgrade(self) -> Result<Self, DowngradeError<Self>> {
        const OPERATION: &str = "downgrade";

        if let Err(error) = refuse_in_async(OPERATION) {
            return Err(DowngradeError::unchanged(error, self));
        }
        let (guard, host) = self.into_parts();
        let again = |guard: Inner| Self {
            guard,
            host: host.clone(),
        };
        let own = match guard {
            Inner::Own(guard) => guard,
            // Of a leadership, nobody has the guard itself.
            nested @ (Inner::Nested(_) | Inner::Leading(_)) => {
                let backend = host.client.info().name;
                let error = Error::unsupported(backend, "a downgrade of a re-entrant hold");
                return Err(DowngradeError::unchanged(error, again(nested)));
            }
        };
        match host.block_on(OPERATION, own.downgrade().map(Ok)) {
            Ok(Ok(shared)) => Ok(again(shared.into())),
            Ok(Err(DowngradeError { error, guard })) => Err(DowngradeError {
                error,
                guard: guard.map(|guard| again(guard.into())),
            }),
            Err(error) => Err(DowngradeError::over(error)),
        }
    }

    /// Ends this guard without releasing the lock: the hold goes on at the server, for whoever [adopts](LockClient::adopt) it, as
    /// [`LockGuard::detach`](crate::LockGuard::detach).
    ///
    /// ```
    /// use lockkit_core::{DetachedHold, MemoryBackend, blocking::LockClient};
    ///
    /// let client = LockClient::new(MemoryBackend::new())?;
    /// let message = client.lock("invoice/7")?.acquire()?.detach()?.encode();
    /// let guard = client.adopt(&mut DetachedHold::decode(&message)?)?;
    /// guard.release()?;
    /// # Ok::<(), lockkit_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As there, with the guard. Also [`Error::Backend`] within an async task.
    pub fn detach(self) -> Result<DetachedHold, DetachError<Self>> {
        let detached = self.host.block_on("detach", self.guard.detach_in_place());
        detached.map_err(|error| DetachError::new(error, self))
    }

    /// Releases the lock and returns the outcome.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold had been lost before. [`Error::Backend`] if no confirmation came: the release is tried
    /// again in the background, and the hold ends with its lease at the latest. Within an async task also
    /// [`Error::Backend`]: the release then goes on in the background, as if the guard had been dropped.
    pub fn release(self) -> Result<()> {
        let (guard, host) = self.into_parts();
        host.block_on("release", guard.release())
    }

    /// Releases the lock, also before its [`hold_at_least`](crate::AcquireOptions#structfield.hold_at_least) is over.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    pub fn release_early(self) -> Result<()> {
        let (guard, host) = self.into_parts();
        guard.keeps(false);
        host.block_on("release", guard.release())
    }

    fn into_parts(self) -> (Inner, Arc<Host>) {
        (self.guard, self.host)
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("blocking::LockGuard").field(&self.guard).finish()
    }
}

/// The locks and semaphores that somebody holds; the blocking [`LockList`](crate::LockList). It ends after an error.
#[must_use = "it asks for nothing until it is iterated over"]
pub struct LockList {
    list: Option<crate::LockList>,
    host: Arc<Host>,
}

impl Iterator for LockList {
    type Item = Result<ListedLock>;

    fn next(&mut self) -> Option<Self::Item> {
        let list = self.list.as_mut()?;
        let next = self
            .host
            .block_on("list", async { list.next().await.transpose() });
        if !matches!(next, Ok(Some(_))) {
            self.list = None;
        }
        next.transpose()
    }
}

impl fmt::Debug for LockList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("blocking::LockList").field(&self.list).finish()
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
            wind_up(client).await;
            drop(runtime);
        });
    }
}

/// Finishes all releases of a client whose last handle is gone, and closes it.
async fn wind_up(client: crate::LockClient) {
    if let Err(err) = client.close_after_all().await {
        tracing::warn!(
            error = crate::spi::chain(&err),
            "the last handle of a blocking client is gone, but not all is released or closed"
        );
    }
}

/// A runtime that may be dropped anywhere, on its own threads too.
struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    fn block_on<T>(&self, operation: &'static str, work: impl Future<Output = Result<T>>) -> Result<T> {
        match &self.0 {
            Some(runtime) => thread::block_on(runtime.handle(), work),
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

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::{
        LockKind, MemoryBackend,
        memory::FaultPoint,
        spi::{Claim, ClaimRequest},
    };

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn the_last_handle_waits_as_long_as_a_release_takes() {
        let backend = MemoryBackend::new();
        let client = crate::LockClient::new(backend.clone());
        let lasting = AcquireOptions::new().ttl(600 * SECOND);
        let lock = client.lock("a").unwrap().with_options(lasting);
        let guard = lock.acquire().await.unwrap();
        backend.fail_next(FaultPoint::Release, u32::MAX);
        drop((guard, lock));
        let winding_up = tokio::spawn(wind_up(client));
        tokio::time::sleep(400 * SECOND).await;
        assert!(!winding_up.is_finished(), "it gave up before the lease was over");
        backend.fail_next(FaultPoint::Release, 0);
        winding_up.await.unwrap();
        let observer = crate::LockClient::new(backend);
        assert!(observer.inspect("a").await.unwrap().is_free());
    }

    /// A backend whose connections do not end.
    #[derive(Debug)]
    struct Clinging(MemoryBackend);

    #[async_trait]
    impl Backend for Clinging {
        fn info(&self) -> BackendInfo {
            self.0.info()
        }

        async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
            self.0.claim(request).await
        }

        async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
            self.0.inspect(name, kind).await
        }

        async fn close(&self) -> Result<()> {
            std::future::pending().await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_close_that_never_ends_keeps_no_thread() {
        let client = crate::LockClient::new(Clinging(MemoryBackend::new()));
        drop(client.lock("a").unwrap().acquire().await.unwrap());
        let began = Instant::now();
        let wound_up = tokio::time::timeout(3_600 * SECOND, wind_up(client)).await;
        assert!(wound_up.is_ok(), "it waits for the backend for an hour and more");
        assert!(began.elapsed() <= 6 * SECOND, "{:?}", began.elapsed());
    }
}
