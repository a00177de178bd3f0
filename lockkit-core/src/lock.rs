//! One lock, and the trait that hides which backend serves it.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    AcquireOptions, Error, HoldView, LockGuard, LockId, LockName, LockState, Result,
    driver::{
        acquire,
        line::{Line, Terms},
        timing,
    },
    spi::Mode,
};

/// A lock, or one mode of it: what application code holds, as `Arc<dyn DistributedLock>`.
///
/// Locks are not re-entrant: a second acquisition by whoever holds it waits, or finds it taken. Wrap it into a
/// [`ReentrantLock`](crate::ReentrantLock) if you need that.
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
#[async_trait]
pub trait DistributedLock: fmt::Debug + Send + Sync + 'static {
    /// What makes it the same lock as another: server, namespace, kind and name.
    fn id(&self) -> &LockId;

    /// Its name.
    fn name(&self) -> &LockName;

    /// The options that it was made with.
    fn options(&self) -> &AcquireOptions;

    /// Acquires it with these options; what they leave unset is taken from the lock's own.
    ///
    /// # Errors
    /// - [`Error::Timeout`] if it was taken for as long as `wait` says. A `wait` of zero is one attempt.
    /// - [`Error::Backend`] if the server did not say. While there is time left, transient failures are tried again;
    ///   without a `wait` there always is.
    /// - [`Error::InvalidOptions`], [`Error::Unsupported`] before anything is sent; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future is the way to cancel, at any await: nothing stays held or queued, at the latest when the
    /// lease of an attempt whose reply was still out has ended. The place in the queue is lost.
    ///
    /// Keep polling it: a future that is neither polled nor dropped keeps its place, and others behind it waiting.
    async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard>;

    /// Acquires it, waiting for as long as the lock's own options say; by default, as long as it takes.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with).
    ///
    /// # Cancel safety
    /// As [`acquire_with`](Self::acquire_with).
    async fn acquire(&self) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new()).await
    }

    /// Makes one attempt. `None` means that it is taken.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with); an outage is an error, never `None`.
    ///
    /// # Cancel safety
    /// As [`acquire_with`](Self::acquire_with).
    async fn try_acquire(&self) -> Result<Option<LockGuard>> {
        none_if_taken(
            self.acquire_with(&AcquireOptions::new().wait(Duration::ZERO))
                .await,
        )
    }

    /// Acquires it, waiting for up to `wait`.
    ///
    /// # Errors
    /// As [`acquire_with`](Self::acquire_with).
    ///
    /// # Cancel safety
    /// As [`acquire_with`](Self::acquire_with).
    async fn acquire_timeout(&self, wait: Duration) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new().wait(wait)).await
    }
}

fn none_if_taken(outcome: Result<LockGuard>) -> Result<Option<LockGuard>> {
    match outcome {
        Ok(guard) => Ok(Some(guard)),
        Err(err) if err.is_timeout() => Ok(None),
        Err(err) => Err(err),
    }
}

#[async_trait]
impl<T: DistributedLock + ?Sized> DistributedLock for Arc<T> {
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
}

/// What every lock can do besides.
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
    /// `f` is done: it is dropped at the await where it is then. Any other failure of the release is logged.
    ///
    /// # Cancel safety
    /// Dropping it drops what `f` returned and releases the lock in the background.
    fn with_lock<T, F, Fut>(&self, f: F) -> impl Future<Output = Result<T>> + Send
    where
        T: Send,
        F: FnOnce(HoldView) -> Fut + Send,
        Fut: Future<Output = T> + Send,
    {
        async move {
            let guard = self.acquire().await?;
            let output = guard.run(f(guard.view())).await?;
            match guard.release().await {
                Err(err @ Error::Lost { .. }) => Err(err),
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

/// A lock of a [`LockClient`](crate::LockClient), in one mode. Cloning is cheap; it is not held by being there.
///
/// Its methods are those of [`DistributedLock`], without the allocation that a trait object's futures cost.
#[derive(Clone)]
pub struct Lock {
    line: Arc<Line>,
    options: Arc<AcquireOptions>,
    /// What `options` come to, unless they are invalid: worked out once rather than at each acquisition.
    terms: Option<Arc<Terms>>,
}

impl Lock {
    pub(crate) fn new(line: Arc<Line>, options: Arc<AcquireOptions>) -> Self {
        let terms = terms(&line, &options).ok().map(Arc::new);
        Self { line, options, terms }
    }

    #[cfg(test)]
    pub(crate) fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// The same lock in shared mode. Shared holders exclude exclusive ones only. A semaphore stays what it is.
    pub fn shared(&self) -> Self {
        let mode = match self.line.mode {
            Mode::Exclusive | Mode::Shared => Mode::Shared,
            permits @ Mode::Permits(_) => permits,
        };
        Self::new(
            self.line.core.line(self.line.name().clone(), mode),
            self.options.clone(),
        )
    }

    /// The same lock with other defaults. What `options` leaves unset stays as it is.
    #[expect(clippy::needless_pass_by_value, reason = "options are built in place")]
    pub fn with_options(&self, options: AcquireOptions) -> Self {
        Self::new(self.line.clone(), Arc::new(options.or(&self.options)))
    }

    /// What makes it the same lock as another.
    pub fn id(&self) -> &LockId {
        &self.line.id
    }

    /// Its name.
    pub fn name(&self) -> &LockName {
        self.line.name()
    }

    /// Whether it is held alone, shared, or by permits.
    pub fn mode(&self) -> Mode {
        self.line.mode
    }

    /// The options that it was made with.
    pub fn options(&self) -> &AcquireOptions {
        &self.options
    }

    /// As [`DistributedLock::acquire_with`].
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        acquire::acquire(&Arc::new(terms(&self.line, &options.or(&self.options))?)).await
    }

    /// As [`DistributedLock::acquire`].
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn acquire(&self) -> Result<LockGuard> {
        match &self.terms {
            Some(terms) => acquire::acquire(terms).await,
            None => Err(terms(&self.line, &self.options).err().unwrap_or(Error::Closed)),
        }
    }

    /// As [`DistributedLock::try_acquire`].
    ///
    /// # Errors
    /// As [`DistributedLock::try_acquire`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn try_acquire(&self) -> Result<Option<LockGuard>> {
        none_if_taken(self.acquire_timeout(Duration::ZERO).await)
    }

    /// As [`DistributedLock::acquire_timeout`].
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn acquire_timeout(&self, wait: Duration) -> Result<LockGuard> {
        self.acquire_with(&AcquireOptions::new().wait(wait)).await
    }

    /// Who holds it. Nobody is refused or delayed by it.
    ///
    /// # Errors
    /// As [`LockClient::inspect`](crate::LockClient::inspect).
    ///
    /// # Cancel safety
    /// Nothing changes if it is dropped.
    pub async fn inspect(&self) -> Result<LockState> {
        self.line.core.inspect(self.name(), self.line.mode.kind()).await
    }
}

/// Fills in the defaults. Checked before anything is sent.
fn terms(line: &Arc<Line>, options: &AcquireOptions) -> Result<Terms> {
    options.validate()?;
    let info = &line.core.info;
    let missing = match line.mode {
        Mode::Shared if !info.capabilities.shared => Some("shared mode"),
        Mode::Permits(_) if !info.capabilities.permits => Some("semaphores"),
        _ => None,
    };
    if let Some(missing) = missing {
        let instead = info.instead.unwrap_or("use another backend");
        return Err(Error::unsupported(info.name, format!("{missing}; {instead}")));
    }
    let default_handoffs = if info.capabilities.local_handoffs {
        AcquireOptions::DEFAULT_LOCAL_HANDOFFS
    } else {
        0
    };
    let local_handoffs = options.local_handoffs.unwrap_or(default_handoffs);
    if local_handoffs > 0 && !info.capabilities.local_handoffs {
        let reason = format!(
            "must be 0 on {}, whose order across processes is strict",
            info.name
        );
        return Err(Error::invalid_option("local_handoffs", reason));
    }
    let ttl = options.ttl.unwrap_or(AcquireOptions::DEFAULT_TTL);
    Ok(Terms {
        line: line.clone(),
        ttl,
        adopt_after: timing::adopt_after(ttl),
        wait: options.wait,
        renew: options.renew.unwrap_or(true),
        op_timeout: options.op_timeout.unwrap_or(AcquireOptions::DEFAULT_OP_TIMEOUT),
        label: options.label.clone(),
        local_handoffs,
    })
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("id", &self.line.id)
            .field("mode", &self.line.mode)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl DistributedLock for Lock {
    fn id(&self) -> &LockId {
        self.id()
    }

    fn name(&self) -> &LockName {
        self.name()
    }

    fn options(&self) -> &AcquireOptions {
        self.options()
    }

    async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        Lock::acquire_with(self, options).await
    }

    /// One boxed future rather than two.
    async fn acquire(&self) -> Result<LockGuard> {
        Lock::acquire(self).await
    }
}
