//! The client of one server, from which locks are made.

use std::{fmt, num::NonZeroU32, sync::Arc, time::Duration};

use crate::{
    AcquireOptions, Capabilities, DetachedHold, Election, Error, FencingToken, Lock, LockGuard, LockKind,
    LockList, LockName, LockState, Result, Revocation,
    driver::{core::Core, detach::adopt, request::AcquireRequest, revoke::revoke},
    election,
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

    /// Returns the backend itself, past the driver: for `lockkit-conformance`, which loses replies and repeats requests as the driver does.
    #[doc(hidden)]
    pub fn __backend(&self) -> &dyn Backend {
        &*self.core.backend
    }

    /// Returns this client with other default options for its locks. What `defaults` leaves unset stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] or [`Error::Unsupported`] if one of them is out of bounds, two contradict each other, or the backend lacks
    /// what one asks for.
    #[expect(clippy::needless_pass_by_value, reason = "options are built in place")]
    pub fn with_defaults(self, defaults: AcquireOptions) -> Result<Self> {
        let defaults = defaults.or(&self.defaults);
        self.core.check(&defaults)?;
        Ok(Self {
            defaults: Arc::new(defaults),
            ..self
        })
    }

    /// Returns the lock of this name, in exclusive mode. Does no I/O and holds nothing.
    ///
    /// # Errors
    /// [`Error::InvalidName`], also for a name that begins with `lockkit#election:` or `lockkit#permits:`:
    /// [elections](Self::election) and [`Lock::acquire_many`] have those.
    pub fn lock(&self, name: impl AsRef<str>) -> Result<Lock> {
        let name = election::check_not_reserved(LockName::new(name)?)?;
        Ok(self.make(name, Mode::Exclusive))
    }

    /// Returns the election of this name: candidates of which one leads, and observers. Does no I/O.
    ///
    /// It has nothing to do with the lock of the same name. Of the client's default options, `ttl` and `op_timeout` count.
    ///
    /// # Errors
    /// [`Error::InvalidName`] for a name that is empty, longer than 1,007 bytes, or the name of an election's lock.
    pub fn election(&self, name: impl AsRef<str>) -> Result<Election> {
        Election::new(&self.core, name.as_ref(), &self.defaults)
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

    /// Goes on with a hold that was [detached](LockGuard::detach), by this client or by another one of the same server and namespace,
    /// in any process. From then on it is a hold of this client, with the same token: the client renews it for the same ttl, and
    /// releases it with the guard.
    ///
    /// In one step, the server finds the hold, renews it and makes this client its owner. So one adopts it, and nobody else does. The
    /// other options that apply are this client's [defaults](Self::with_defaults), its label among them. A `max_hold` counts from
    /// the adoption. What was left of a `hold_at_least` when the hold was detached counts on from the adoption.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use lockkit_core::{DetachedHold, Error, LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// # let server = MemoryBackend::new();
    /// # let client = LockClient::new(server);
    /// # let message = client.lock("job")?.acquire().await?.detach().await?.encode();
    /// let mut detached = DetachedHold::decode(&message)?;
    /// let guard = loop {
    ///     match client.adopt(&mut detached).await {
    ///         Ok(guard) => break guard,
    ///         Err(Error::Lost { .. }) => return Ok(()), // too late, or another has it: the work is not ours
    ///         Err(err) if err.is_transient() => tokio::time::sleep(Duration::from_millis(100)).await, // no answer: ask again
    ///         Err(err) => return Err(err),
    ///     }
    /// };
    /// guard.release().await?;
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Lost`] if the server says that the hold is over ([`Gone`](crate::LossReason::Gone)), or that its holder was asked to
    /// give it up ([`Asked`](crate::LossReason::Asked)): it ends with its lease at the latest. Also if this very value was adopted
    /// before.
    ///
    /// [`Error::Backend`] if no answer came: the hold may be this client's by now. Call it again with the same value, also on another
    /// client. A second value of the same hold, decoded once more, competes with the first instead. If nobody asks again, the
    /// hold ends a ttl after the last request.
    ///
    /// [`Error::Unsupported`] where holds cannot be detached; [`Error::InvalidName`]; [`Error::InvalidOptions`] if a default option
    /// does not go with the ttl, or if no lease is as long as what is left of its `hold_at_least`; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// As if no answer came, if the future is dropped half-way: call it again with the same value.
    pub async fn adopt(&self, detached: &mut DetachedHold) -> Result<LockGuard> {
        let mut name = detached.name().clone();
        if detached.mode().kind() == LockKind::Lock {
            name = election::check_not_reserved(name)?;
        }
        let mut options = AcquireOptions::new().ttl(detached.ttl()).or(&self.defaults);
        options.hold_at_least = None;
        let queue = self.core.queue(name, detached.mode());
        let mut request = AcquireRequest::new(&queue, &options)?;
        // That time began with the grant. It is kept whatever the other options of this client are.
        request.hold_at_least = detached.least.map(Box::new);
        Ok(LockGuard::new(adopt(&Arc::new(request), detached).await?))
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

    /// Asks the holder of this name that has `token` to give up its hold, also another client's: for operators. Then waits until the
    /// hold has ended, for up to `within`; with [`Duration::ZERO`] it only asks. A request that is under way by then goes on for up
    /// to [`op_timeout`](AcquireOptions::DEFAULT_OP_TIMEOUT).
    ///
    /// Exclusion holds: nobody is granted what the holder has before its guard is released or dropped, or its lease is over. The
    /// holder's guard is lost as [`Asked`](crate::LossReason::Asked), at once where the server can tell its client, with the next
    /// renewal otherwise. The hold is not renewed any more: a holder that is cut off, stands still, or does not let go ends with the
    /// lease that it has. A hold without a lease (file) ends only by its holder.
    ///
    /// A hold that is passed on to another user within its client ends with that. The next one has a token of its own and is not
    /// asked; on Redlock and on files, where all of them have a block of tokens in common, it is.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use lockkit_core::{LockClient, LossReason, MemoryBackend, Revocation};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let client = LockClient::new(MemoryBackend::new());
    /// let guard = client.lock("job")?.acquire().await?;
    /// let token = guard.token();
    /// let holder = tokio::spawn(async move {
    ///     assert_eq!(guard.lost().await, LossReason::Asked);
    ///     // Nobody else holds the lock yet. It ends with the guard.
    ///     drop(guard);
    /// });
    /// let outcome = client.revoke("job", token, Duration::from_secs(10)).await?;
    /// assert_eq!(outcome, Revocation::Confirmed);
    /// # holder.await.unwrap();
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] where a holder cannot be asked; otherwise as [`inspect`](Self::inspect). Then it is not known whether
    /// the holder was asked, or still holds: ask again.
    ///
    /// # Cancel safety
    /// If the future is dropped, the holder may or may not have been asked. If it was, it stays asked: its hold is not renewed any
    /// more.
    pub async fn revoke(
        &self,
        name: impl AsRef<str>,
        token: FencingToken,
        within: Duration,
    ) -> Result<Revocation> {
        revoke(&self.core, &LockName::new(name)?, LockKind::Lock, token, within).await
    }

    /// Asks the holder of a permit of the semaphore of this name to give it up, as [`revoke`](Self::revoke).
    ///
    /// # Errors
    /// Those of [`revoke`](Self::revoke).
    ///
    /// # Cancel safety
    /// That of [`revoke`](Self::revoke).
    pub async fn revoke_permit(
        &self,
        name: impl AsRef<str>,
        token: FencingToken,
        within: Duration,
    ) -> Result<Revocation> {
        let name = LockName::new(name)?;
        revoke(&self.core, &name, LockKind::Semaphore, token, within).await
    }

    /// Lists the locks and semaphores of this client's namespace that somebody holds and whose names begin with `prefix`: a
    /// [stream](LockList), which asks the server for one page after the other. Refuses and delays nobody. Sends nothing yet.
    ///
    /// The prefix is literal: no character of it is a wildcard. An empty one stands for all names. A name that nobody holds is not
    /// listed, also if somebody waits for it.
    ///
    /// ```
    /// use lockkit_core::{LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let client = LockClient::new(MemoryBackend::new());
    /// let guard = client.lock("orders/42")?.acquire().await?;
    /// let mut held = client.list("orders/")?;
    /// while let Some(lock) = held.next().await {
    ///     let lock = lock?;
    ///     println!("{}: {} holders, {:?} waiters", lock.name, lock.state.holders.len(), lock.state.waiters);
    /// }
    /// guard.release().await?;
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidName`] for a prefix that is longer than a name can be; [`Error::Unsupported`] where names cannot be listed;
    /// [`Error::Backend`] if the runtime that the client lives on has ended; [`Error::Closed`]. The stream has errors of its own.
    pub fn list(&self, prefix: impl AsRef<str>) -> Result<LockList> {
        self.core.is_open("list")?;
        let prefix = prefix.as_ref();
        LockName::check_prefix(prefix)?;
        let lister = self.core.backend.list(prefix)?;
        Ok(LockList::new(self.core.clone(), lister))
    }

    /// Ends the hold of this name that has `token` by force, also another client's: for operators. Returns `false` if there is
    /// none. Its holder loses it as [`Revoked`](crate::LossReason::Revoked).
    ///
    /// Exclusion does not hold: the next is granted at once, while the holder may not have been told yet.
    /// [`revoke`](Self::revoke) asks instead.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where holds cannot be ended from outside; otherwise as [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, the hold may or may not be ended.
    pub async fn revoke_by_force(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.core
            .revoke_by_force(&LockName::new(name)?, LockKind::Lock, token)
            .await
    }

    /// Ends a permit of the semaphore of this name by force, as [`revoke_by_force`](Self::revoke_by_force).
    ///
    /// # Errors
    /// As [`revoke_by_force`](Self::revoke_by_force).
    ///
    /// # Cancel safety
    /// As [`revoke_by_force`](Self::revoke_by_force).
    pub async fn revoke_permit_by_force(&self, name: impl AsRef<str>, token: FencingToken) -> Result<bool> {
        self.core
            .revoke_by_force(&LockName::new(name)?, LockKind::Semaphore, token)
            .await
    }

    /// Returns the highest token that a hold of this namespace may have had so far: what to raise another backend's tokens
    /// [above](Self::raise_fence), before that one takes the place of this one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where tokens cannot be raised; [`Error::Backend`] if the server cannot tell, or if the runtime that the
    /// client lives on has ended; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn fence(&self) -> Result<FencingToken> {
        self.core.fence().await
    }

    /// Raises the tokens of this namespace: every hold that anybody asks for after this has returned has a token above `above`. For
    /// operators who have another backend take the place of one whose tokens were higher: what checks tokens would refuse the lower
    /// ones for good.
    ///
    /// Returns the [fence](Self::fence) from then on: `above`, or more if higher tokens were in use, which stay. Of several that raise at
    /// once, the highest wins.
    ///
    /// Holds and places in the queue from before keep their tokens. A hold that is passed on within its client goes on with the tokens that
    /// were reserved for it, also for those who ask there afterwards. So stop what locks before.
    ///
    /// ```
    /// use lockkit_core::{FencingToken, LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let client = LockClient::new(MemoryBackend::new());
    /// let before = FencingToken::new(4_000_000_000_000_000); // that of the backend before
    /// assert_eq!(client.raise_fence(before).await?, before);
    /// assert!(client.lock("job")?.acquire().await?.token() > before);
    /// assert!(client.raise_fence(FencingToken::new(7)).await? > before, "what is there is higher");
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a token above which too few would be left; otherwise as [`fence`](Self::fence). After an
    /// [`Error::Backend`] it is not known whether they were raised: ask again.
    ///
    /// # Cancel safety
    /// If the future is dropped, they may or may not be raised. Call it again.
    pub async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        self.core.raise_fence(above).await
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
    /// acquisition that waits at the server and is neither polled nor dropped keeps it waiting. A release that the server refuses for
    /// good, as without the right to it, is not waited for: where holds end with a session or a connection, that is ended.
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

    /// Closes this client for good, as [`close`](Self::close). Every release gets the time that it needs.
    #[cfg(feature = "blocking")]
    pub(crate) async fn close_after_all(&self) -> Result<()> {
        self.core.close_after_all().await
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
