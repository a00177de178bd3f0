//! One lock, and the trait that hides which backend serves it.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    AcquireOptions, Error, HoldView, LockGuard, LockId, LockName, LockState, Result, RunError,
    driver::{acquire::acquire, lock_queue::LockQueue, request::AcquireRequest},
    spi::Mode,
};

/// A lock in one mode, of any backend. Application code keeps it as `Arc<dyn DistributedLock>`.
///
/// Locks are not re-entrant: a second acquisition by the holder waits, or finds the lock taken. Wrap it in a
/// [`ReentrantLock`](crate::ReentrantLock) if you need that.
///
/// A reference, a `Box` and an `Arc` of a lock are locks, too.
///
/// ```
/// use std::sync::Arc;
/// use lockkit_core::{DistributedLock, LockClient, MemoryBackend, Result};
///
/// async fn charge(lock: &dyn DistributedLock) -> Result<u64> {
///     let guard = lock.acquire().await?;
///     let token = guard.token().get();
///     guard.release().await?;
///     Ok(token)
/// }
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let lock: Arc<dyn DistributedLock> = Arc::new(LockClient::new(MemoryBackend::new()).lock("card/7")?);
/// assert!(charge(&lock).await? < charge(&*lock).await?);
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
///
/// # Decorators
///
/// A lock of your own wraps another and passes its guards on. All ways to acquire lead to [`acquire_with`](Self::acquire_with),
/// also those of [`acquire_all`](crate::acquire_all) and [`ReentrantLock`](crate::ReentrantLock). So that is the one place to
/// count, log or refuse:
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// use lockkit_core::{
///     AcquireOptions, DistributedLock, LockClient, LockGuard, LockId, LockState, MemoryBackend, Result, async_trait,
/// };
///
/// /// Counts how often the lock was granted and how often it was taken.
/// #[derive(Debug)]
/// struct Counted<L> {
///     lock: L,
///     granted: AtomicU64,
///     taken: AtomicU64,
/// }
///
/// #[async_trait]
/// impl<L: DistributedLock> DistributedLock for Counted<L> {
///     fn id(&self) -> &LockId {
///         self.lock.id()
///     }
///
///     fn options(&self) -> &AcquireOptions {
///         self.lock.options()
///     }
///
///     async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
///         let outcome = self.lock.acquire_with(options).await;
///         match &outcome {
///             Ok(_) => _ = self.granted.fetch_add(1, Ordering::Relaxed),
///             Err(err) if err.is_timeout() => _ = self.taken.fetch_add(1, Ordering::Relaxed),
///             Err(err) => eprintln!("{err}"), // it names the lock, on one line
///         }
///         outcome
///     }
///
///     async fn inspect(&self) -> Result<LockState> {
///         self.lock.inspect().await
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let lock = LockClient::new(MemoryBackend::new()).lock("card/7")?;
/// let counted = Counted { lock: &lock, granted: AtomicU64::new(0), taken: AtomicU64::new(0) };
/// let guard = counted.acquire().await?;
/// assert!(counted.try_acquire().await?.is_none());
/// guard.release().await?;
/// assert_eq!((counted.granted.into_inner(), counted.taken.into_inner()), (1, 1));
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
///
/// # Mocks
///
/// Rarely does a test need a mock: a [`MemoryBackend`](crate::MemoryBackend) is a whole server, which revokes, fails, delays and
/// loses replies as it is told. For code that has to see one certain outcome, a mock is a lock whose `acquire_with` says so.
/// [`MemoryBackend::guard`](crate::MemoryBackend::guard) makes its guards, at once and without an await, so that a closure of a
/// mocking library can. These are real holds: they can be renewed and lost. [`Error::timeout`], [`Error::transient`] and their
/// like make its errors.
///
/// ```
/// use std::time::Duration;
///
/// use lockkit_core::{
///     AcquireOptions, DistributedLock, Error, LockClient, LockGuard, LockId, LockKind, LockName, LockState, MemoryBackend,
///     Result, async_trait,
/// };
///
/// /// Gives what its script returns.
/// #[derive(Debug)]
/// struct Mock {
///     id: LockId,
///     options: AcquireOptions,
///     script: fn(&LockName) -> Result<LockGuard>,
/// }
///
/// #[async_trait]
/// impl DistributedLock for Mock {
///     fn id(&self) -> &LockId {
///         &self.id
///     }
///
///     fn options(&self) -> &AcquireOptions {
///         &self.options
///     }
///
///     async fn acquire_with(&self, _: &AcquireOptions) -> Result<LockGuard> {
///         (self.script)(self.name())
///     }
///
///     async fn inspect(&self) -> Result<LockState> {
///         Ok(LockState::default())
///     }
/// }
///
/// fn mock(script: fn(&LockName) -> Result<LockGuard>) -> Result<Mock> {
///     let id = LockId::new("mock:".into(), "".into(), LockKind::Lock, LockName::new("job")?);
///     Ok(Mock { id, options: AcquireOptions::new(), script })
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let taken = mock(|name| Err(Error::timeout("mock", name.clone(), Duration::ZERO)))?;
/// assert!(taken.try_acquire().await?.is_none());
/// let down = mock(|_| Err(Error::transient("mock", "acquire", "no server is there")))?;
/// assert!(down.try_acquire().await.unwrap_err().is_transient());
/// let lost = mock(|name| {
///     let server = MemoryBackend::new();
///     let guard = server.guard(name)?;
///     server.revoke(name.as_str());
///     Ok(guard)
/// })?;
/// assert!(lost.acquire().await?.release().await.unwrap_err().is_lost());
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[async_trait]
pub trait DistributedLock: fmt::Debug + Send + Sync {
    /// Returns its identity: server, namespace, kind and name.
    fn id(&self) -> &LockId;

    /// Returns its name.
    fn name(&self) -> &LockName {
        self.id().name()
    }

    /// Returns the options that it was made with.
    fn options(&self) -> &AcquireOptions;

    /// Acquires it with these options. What they leave unset is taken from the lock's own.
    ///
    /// # Errors
    /// - [`Error::Timeout`] if it was taken for as long as `wait` says. A `wait` of zero is one attempt.
    /// - [`Error::Backend`] if the server did not say. Transient failures are tried again until `wait` is over; without a
    ///   `wait`, for ever.
    /// - [`Error::InvalidOptions`], [`Error::Unsupported`] before anything is sent; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Drop the future to cancel, at any await. It leaves the queue, and nothing stays held. Exception: an attempt whose reply
    /// was still out may hold the lock until its lease has ended.
    ///
    /// Keep polling the future: one that is neither polled nor dropped stays in the queue, and keeps those behind it waiting.
    async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard>;

    /// Acquires it. Waits for as long as the lock's own options say; by default, for ever.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with).
    ///
    /// # Cancel safety
    /// As [`acquire_with`](Self::acquire_with).
    async fn acquire(&self) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new()).await
    }

    /// Makes one attempt. Returns `None` if it is taken.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with). An outage is an error, never `None`.
    ///
    /// # Cancel safety
    /// As [`acquire_with`](Self::acquire_with).
    async fn try_acquire(&self) -> Result<Option<LockGuard>> {
        none_if_taken(
            self.acquire_with(&AcquireOptions::new().wait(Duration::ZERO))
                .await,
        )
    }

    /// Acquires it. Waits for up to `wait`.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with).
    ///
    /// # Cancel safety
    /// As [`acquire_with`](Self::acquire_with).
    async fn acquire_timeout(&self, wait: Duration) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new().wait(wait)).await
    }

    /// Returns its holders and waiters. Refuses and delays nobody.
    ///
    /// # Errors
    /// As [`LockClient::inspect`](crate::LockClient::inspect).
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    async fn inspect(&self) -> Result<LockState>;
}

pub(crate) fn none_if_taken<G>(outcome: Result<G>) -> Result<Option<G>> {
    match outcome {
        Ok(guard) => Ok(Some(guard)),
        Err(err) if err.is_timeout() => Ok(None),
        Err(err) => Err(err),
    }
}

/// Implements the trait for a pointer to a lock. Every method is passed on, since a lock may have its own way of each.
macro_rules! pass_on_through {
    ($($pointer:ty),+) => {$(
        #[async_trait]
        impl<T: DistributedLock + ?Sized> DistributedLock for $pointer {
            fn id(&self) -> &LockId {
                (**self).id()
            }

            fn name(&self) -> &LockName {
                (**self).name()
            }

            fn options(&self) -> &AcquireOptions {
                (**self).options()
            }

            async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
                (**self).acquire_with(options).await
            }

            async fn acquire(&self) -> Result<LockGuard> {
                (**self).acquire().await
            }

            async fn try_acquire(&self) -> Result<Option<LockGuard>> {
                (**self).try_acquire().await
            }

            async fn acquire_timeout(&self, wait: Duration) -> Result<LockGuard> {
                (**self).acquire_timeout(wait).await
            }

            async fn inspect(&self) -> Result<LockState> {
                (**self).inspect().await
            }
        }
    )+};
}

pass_on_through!(&T, Box<T>, Arc<T>);

/// Methods of every lock that a trait object cannot have.
pub trait DistributedLockExt: DistributedLock {
    /// Acquires the lock, runs `f` while it is held, and releases it.
    ///
    /// ```
    /// use lockkit_core::{DistributedLockExt, LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let lock = LockClient::new(MemoryBackend::new()).lock("ledger")?;
    /// let token = lock.with_lock(|held| async move { held.token() }).await?;
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`acquire_with`](DistributedLock::acquire_with) while acquiring. [`Error::Lost`] if the lock is lost before
    /// `f` is done; `f` is then dropped at its await. If `f` was done by the time that the loss was noticed, the [`RunError`]
    /// has its output as well; `?` turns it into an [`Error`]. Any other failure of the release is logged.
    ///
    /// # Cancel safety
    /// If the future is dropped, so is the future of `f`, and the lock is released in the background.
    fn with_lock<T, F, Fut>(&self, f: F) -> impl Future<Output = Result<T, RunError<T>>> + Send
    where
        T: Send,
        F: FnOnce(HoldView) -> Fut + Send,
        Fut: Future<Output = T> + Send,
    {
        async move {
            let guard = self.acquire().await?;
            let output = guard.run(f(guard.view())).await?;
            match guard.release().await {
                Err(err @ Error::Lost { .. }) => Err(RunError::done(err, output)),
                Err(err) => {
                    tracing::warn!(lock = %self.id(), error = crate::spi::chain(&err), "release failed");
                    Ok(output)
                }
                Ok(()) => Ok(output),
            }
        }
    }
}

impl<T: DistributedLock + ?Sized> DistributedLockExt for T {}

/// A lock of a [`LockClient`](crate::LockClient), in one mode. Having it holds nothing. Cloning is cheap.
///
/// Its methods are those of [`DistributedLock`], without the allocation that a trait object's futures cost.
#[must_use = "having a lock holds nothing: call `acquire()` and keep the guard"]
#[derive(Clone)]
pub struct Lock {
    queue: Arc<LockQueue>,
    options: Arc<AcquireOptions>,
    /// The request that `options` make, unless they are invalid. Made once rather than at each acquisition.
    request: Option<Arc<AcquireRequest>>,
}

impl Lock {
    pub(crate) fn new(queue: Arc<LockQueue>, options: Arc<AcquireOptions>) -> Self {
        let request = AcquireRequest::new(&queue, &options).ok().map(Arc::new);
        Self {
            queue,
            options,
            request,
        }
    }

    /// Returns the exclusive lock of another name, of the same client.
    pub(crate) fn sibling(&self, name: LockName, options: AcquireOptions) -> Self {
        Self::new(self.queue.core.queue(name, Mode::Exclusive), Arc::new(options))
    }

    /// Checks its own options, as each acquisition does before it sends anything.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`], [`Error::Unsupported`].
    pub(crate) fn check(&self) -> Result<()> {
        match self.request {
            Some(_) => Ok(()),
            None => AcquireRequest::new(&self.queue, &self.options).map(drop),
        }
    }

    #[cfg(test)]
    pub(crate) fn queue(&self) -> &Arc<LockQueue> {
        &self.queue
    }

    /// Returns the same lock in shared mode. Shared holders exclude exclusive ones only. A semaphore stays what it is.
    pub fn shared(&self) -> Self {
        let mode = match self.queue.mode {
            Mode::Exclusive | Mode::Shared => Mode::Shared,
            permits @ Mode::Permits(_) => permits,
        };
        Self::new(
            self.queue.core.queue(self.queue.name().clone(), mode),
            self.options.clone(),
        )
    }

    /// Returns the same lock with other default options. What `options` leaves unset stays as it is.
    #[expect(clippy::needless_pass_by_value, reason = "options are built in place")]
    pub fn with_options(&self, options: AcquireOptions) -> Self {
        Self::new(self.queue.clone(), Arc::new(options.or(&self.options)))
    }

    /// Returns its identity: server, namespace, kind and name.
    pub fn id(&self) -> &LockId {
        &self.queue.id
    }

    /// Returns its name.
    pub fn name(&self) -> &LockName {
        self.queue.name()
    }

    /// Returns its mode: exclusive, shared, or permits.
    pub fn mode(&self) -> Mode {
        self.queue.mode
    }

    /// Returns the options that it was made with.
    pub fn options(&self) -> &AcquireOptions {
        &self.options
    }

    /// Acquires it with these options, as [`DistributedLock::acquire_with`].
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        let request = AcquireRequest::new(&self.queue, &options.or(&self.options))?;
        acquire(&Arc::new(request)).await.map(LockGuard::new)
    }

    /// Acquires it, as [`DistributedLock::acquire`].
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn acquire(&self) -> Result<LockGuard> {
        match &self.request {
            Some(request) => acquire(request).await.map(LockGuard::new),
            None => Err(self.check().err().unwrap_or(Error::Closed)),
        }
    }

    /// Makes one attempt, as [`DistributedLock::try_acquire`].
    ///
    /// # Errors
    /// As [`DistributedLock::try_acquire`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn try_acquire(&self) -> Result<Option<LockGuard>> {
        none_if_taken(self.acquire_timeout(Duration::ZERO).await)
    }

    /// Acquires it within `wait`, as [`DistributedLock::acquire_timeout`].
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn acquire_timeout(&self, wait: Duration) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new().wait(wait)).await
    }

    /// Returns its holders and waiters. Refuses and delays nobody.
    ///
    /// # Errors
    /// As [`LockClient::inspect`](crate::LockClient::inspect).
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn inspect(&self) -> Result<LockState> {
        self.queue.core.inspect(self.name(), self.queue.mode.kind()).await
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("id", &self.queue.id)
            .field("mode", &self.queue.mode)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl DistributedLock for Lock {
    fn id(&self) -> &LockId {
        self.id()
    }

    fn options(&self) -> &AcquireOptions {
        self.options()
    }

    async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        Lock::acquire_with(self, options).await
    }

    /// Overridden for one boxed future instead of two.
    async fn acquire(&self) -> Result<LockGuard> {
        Lock::acquire(self).await
    }

    async fn inspect(&self) -> Result<LockState> {
        Lock::inspect(self).await
    }
}
