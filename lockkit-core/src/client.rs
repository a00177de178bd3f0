//! The client of one server, from which locks are made.

use std::{fmt, num::NonZeroU32, sync::Arc, time::Duration};

use crate::{
    AcquireOptions, Capabilities, Error, FencingToken, Lock, LockKind, LockName, LockState, Result,
    driver::core::Core,
    spi::{Backend, BackendInfo, Mode},
};

/// A client of one lock server. Clone it freely: clones share the connection, the local queues and the worker.
///
/// Make one per process and server, and keep it for as long as its locks are used. It lives on the Tokio runtime that
/// it was made in. That runtime needs its timers enabled, as `#[tokio::main]` does. Once the runtime has ended, every call
/// returns a permanent [`Error::Backend`] that says so, and all holds are lost.
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

impl LockClient {
    /// Makes a client of `backend`, which may be one of your own. Does no I/O.
    pub fn new(backend: impl Backend) -> Self {
        Self {
            core: Core::new(backend),
            defaults: Arc::new(AcquireOptions::new()),
        }
    }

    /// Returns this client with other default options for its locks. What `defaults` leaves unset stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] if one of them is out of bounds.
    #[expect(clippy::needless_pass_by_value, reason = "options are built in place")]
    pub fn with_defaults(self, defaults: AcquireOptions) -> Result<Self> {
        defaults.validate()?;
        Ok(Self {
            defaults: Arc::new(defaults.or(&self.defaults)),
            ..self
        })
    }

    /// Returns the lock of this name, in exclusive mode. Does no I/O and holds nothing.
    ///
    /// # Errors
    /// [`Error::InvalidName`].
    pub fn lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        Ok(self.make(LockName::new(name)?, Mode::Exclusive))
    }

    /// Returns the semaphore of this name, which up to `permits` holders have at once. Does no I/O and holds nothing.
    ///
    /// All its users have to name the same number of permits. A semaphore never excludes the lock of the same name.
    ///
    /// # Errors
    /// [`Error::InvalidName`]; [`Error::InvalidOptions`] for zero permits.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Result<Lock> {
        let permits = NonZeroU32::new(permits)
            .ok_or_else(|| Error::invalid_option("permits", "a semaphore has at least one"))?;
        Ok(self.make(LockName::new(name)?, Mode::Permits(permits)))
    }

    fn make(&self, name: LockName, mode: Mode) -> Lock {
        Lock::new(self.core.queue(name, mode), self.defaults.clone())
    }

    /// Returns the holders and waiters of the lock of this name. Refuses and delays nobody.
    ///
    /// # Errors
    /// [`Error::InvalidName`]; [`Error::Backend`] if the server cannot tell, or if the runtime that the client lives on has
    /// ended; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn inspect(&self, name: impl AsRef<str>) -> Result<LockState> {
        self.core.inspect(&LockName::new(name)?, LockKind::Lock).await
    }

    /// Returns the holders and waiters of the semaphore of this name.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn inspect_semaphore(&self, name: impl AsRef<str>) -> Result<LockState> {
        self.core
            .inspect(&LockName::new(name)?, LockKind::Semaphore)
            .await
    }

    /// Ends the hold of this name that has `token` by force, also another client's: for operators. Returns `false` if there is
    /// none.
    /// Its holder loses it as [`Revoked`](crate::LossReason::Revoked).
    ///
    /// # Errors
    /// [`Error::Unsupported`] where holds cannot be ended from outside; otherwise as [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, the hold may or may not be ended.
    pub async fn revoke(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.core
            .revoke(&LockName::new(name)?, LockKind::Lock, token)
            .await
    }

    /// Ends a permit of the semaphore of this name by force, as [`revoke`](Self::revoke).
    ///
    /// # Errors
    /// As [`revoke`](Self::revoke).
    ///
    /// # Cancel safety
    /// As [`revoke`](Self::revoke).
    pub async fn revoke_permit(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.core
            .revoke(&LockName::new(name)?, LockKind::Semaphore, token)
            .await
    }

    /// Describes this client's backend.
    pub fn info(&self) -> &BackendInfo {
        &self.core.info
    }

    /// Returns the capabilities of this client's backend.
    pub fn capabilities(&self) -> Capabilities {
        self.core.info.capabilities
    }

    /// Returns the longest time from a holder's death until a waiter can be granted the lock, on a healthy server. `ttl` is what
    /// the holder asked for.
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

    /// Closes this client and all its clones. From now on every call returns [`Error::Closed`], and so do pending
    /// acquisitions. Live guards are marked lost ([`Disconnected`](crate::LossReason::Disconnected)), then released.
    ///
    /// Waits up to `timeout` for every release to be confirmed, also those of dropped guards and of waiters that withdraw. An
    /// acquisition that waits at the server and is neither polled nor dropped keeps it waiting.
    ///
    /// # Errors
    /// [`Error::Backend`] if a release was not confirmed; its lease or connection then ends the hold. Also if the runtime
    /// that the client lives on has ended.
    ///
    /// # Cancel safety
    /// The client is closed from the first poll on. If the future is dropped half-way, releases go on in the background, and
    /// it may be called again.
    pub async fn close(&self, timeout: Duration) -> Result<()> {
        self.core.close(timeout).await
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
