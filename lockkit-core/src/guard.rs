//! The guard of a lock that is held, the views of that hold, and the signals of its end.

use std::{
    future::{Future, pending},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    DetachError, DetachedHold, DowngradeError, Error, FencingToken, HoldEnd, LockName, LossReason, Result,
    RunError,
    driver::{
        cell::{Event, Phase},
        detach::detach,
        downgrade, finish_release,
        hold::{Hold, Record},
    },
};

/// A lock that is held.
///
/// While the guard lives, its lease is renewed in the background (unless it was acquired with `renew(false)`). Dropping the
/// guard stops renewal at once and leaves the release to the client's worker. Call [`release`](Self::release) to learn the
/// outcome. Dropping never blocks, does no I/O, and works outside of a runtime.
///
/// A lock can be lost while its guard lives: the process was paused past its lease, the server cannot be reached,
/// or an operator broke the lock. Watch [`lost`](Self::lost), call [`check`](Self::check), or let [`run`](Self::run) do it.
/// Send the [`token`](Self::token) along with every write, so that a resource can refuse one that comes too late.
///
/// ```
/// use lockkit_core::{LockClient, MemoryBackend};
///
/// # async fn write(_token: u64) -> std::io::Result<()> { Ok(()) }
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let guard = LockClient::new(MemoryBackend::new()).lock("invoice/7")?.acquire().await?;
/// // Runs only while the lock is held, and carries the token, as in `UPDATE … WHERE last_token <= $token`.
/// let written = guard.run(write(guard.token().get())).await?;
/// assert!(written.is_ok());
/// guard.release().await?;
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[must_use = "dropping the guard releases the lock"]
#[derive(Debug)]
pub struct LockGuard {
    hold: Hold,
    /// Unset once the release has begun, so that dropping does nothing more.
    armed: bool,
}

impl LockGuard {
    pub(crate) fn new(hold: Hold) -> Self {
        Self { hold, armed: true }
    }

    /// Returns the lock's name.
    pub fn name(&self) -> &LockName {
        &self.hold.name
    }

    /// Returns the fencing token of this hold.
    pub fn token(&self) -> FencingToken {
        self.hold.token
    }

    /// Resolves when the hold is lost, with the reason. Never resolves after a normal release.
    ///
    /// Use it in a `select!` with the work that the lock protects. A task of its own that awaits it stays for ever once the lock
    /// was released: let such a task await [`ended`](Self::ended).
    ///
    /// # Cancel safety
    /// Loss is latched: a late call resolves at once, and dropping the future loses nothing.
    pub fn lost(&self) -> LostSignal {
        LostSignal::new(&self.hold.record)
    }

    /// Resolves when the hold is over: with [`HoldEnd::Lost`] when it is lost, with [`HoldEnd::Detached`] when it is
    /// [detached](Self::detach), and with [`HoldEnd::Released`] as soon as its guard is released, dropped, or made a
    /// [shared](Self::downgrade) one.
    ///
    /// # Cancel safety
    /// The end is latched: a late call resolves at once, and dropping the future loses nothing.
    pub fn ended(&self) -> EndedSignal {
        EndedSignal(Watch::new(&self.hold.record))
    }

    /// Resolves as an early warning when a renewal has failed, or has no reply although no more than an eighth of the lease is
    /// left. Returns what is left of the lease, which may yet be renewed. Returns zero when the hold is lost.
    ///
    /// Also resolves when the hold is not renewed any more, since its [`max_hold`](crate::AcquireOptions#structfield.max_hold) is
    /// over.
    ///
    /// # Cancel safety
    /// The state is remembered until a renewal succeeds; dropping the future loses nothing.
    pub fn renewal_failing(&self) -> RenewalFailing {
        RenewalFailing(Watch::new(&self.hold.record))
    }

    /// Returns `true` while the lock is held. Looks at the clock too: `false` as soon as the lease is over, even if nothing
    /// has noticed yet.
    pub fn is_held(&self) -> bool {
        self.hold.is_held()
    }

    /// Checks that the lock is held, as [`is_held`](Self::is_held), for use with `?`.
    ///
    /// # Errors
    /// [`Error::Lost`] once the hold is lost.
    pub fn check(&self) -> Result<()> {
        self.hold.check()
    }

    /// Returns the time until which the lock is held if no renewal succeeds from now on, on the monotonic clock. `None` if the
    /// hold has no lease, only a process or connection that it ends with. Such a hold has an end once its
    /// [`max_hold`](crate::AcquireOptions#structfield.max_hold) is over.
    ///
    /// A hold that was lost as [`Asked`](crate::LossReason::Asked) keeps the end that it had, until which nobody else is granted the
    /// lock. Should it be ended in that time by others, or since its client is closed, it has its end as soon as the client hears of
    /// that.
    pub fn valid_until(&self) -> Option<Instant> {
        self.hold.valid_until()
    }

    /// Returns the length of the present lease when it was proven; [`valid_until`](Self::valid_until) is its end. At most the
    /// ttl, and less where something else decides, such as a server's session. `None` if the hold has no lease.
    pub fn lease_length(&self) -> Option<Duration> {
        self.hold.lease_length()
    }

    /// Returns a view of this hold that can be cloned and given away. It keeps nothing held.
    pub fn view(&self) -> HoldView {
        HoldView {
            record: self.hold.record.clone(),
        }
    }

    /// Extends the lease by hand, to a full ttl from now: for holds acquired with `renew(false)`, and for certainty before a
    /// long step. It succeeds once the server has confirmed that. Where a session decides (ZooKeeper, etcd), that is one of its
    /// last two heartbeats, which are 2.5 s apart at most, and [`lease_length`](Self::lease_length) is the outcome.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold is lost; [`Error::Backend`] if no reply came, in which case the lease goes on as
    /// it was, or as its session was proven before. Also [`Error::Backend`], a permanent one, once its
    /// [`max_hold`](crate::AcquireOptions#structfield.max_hold) is over.
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, the lease may or may not be extended at the server. Locally it is not.
    pub async fn renew(&self) -> Result<()> {
        self.check()?;
        self.hold.may_be_renewed("renew")?;
        let hold = &self.hold;
        self.unless_lost(async {
            match hold.cell.reclaim().await.as_mut() {
                Some(contender) => {
                    // It may have waited for the claim.
                    hold.may_be_renewed("renew")?;
                    hold.renew_with(contender, true).await
                }
                None => Err(Error::Closed),
            }
        })
        .await
    }

    /// Changes the ttl of this hold, and extends or shortens its lease to a full one from now: a longer one before a step in which
    /// nothing may be renewed, a shorter one when nobody should wait for long if this process dies. From then on, the hold is
    /// renewed for this ttl. [`lease_length`](Self::lease_length) is the outcome, which is less than the ttl where something else
    /// decides.
    ///
    /// The server counts with the new ttl when this returns, at the latest, where it counts at all: a server's session has a time of
    /// its own. A hold that is passed on within the client goes only to a waiter with this ttl.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use lockkit_core::{LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let guard = LockClient::new(MemoryBackend::new()).lock("import")?.acquire().await?;
    /// let hour = Duration::from_secs(3_600);
    /// guard.set_ttl(hour).await?;
    /// assert!(guard.lease_length() > Some(hour / 2));
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a ttl out of range, above the [`max_hold`](crate::AcquireOptions#structfield.max_hold), or that
    /// the backend cannot keep; [`Error::Unsupported`] where a hold has no lease: nothing has changed then. [`Error::Lost`] if the
    /// hold is lost. [`Error::Backend`] if no reply came: either ttl may be in force at the server. The hold counts with the shorter
    /// lease of both, and its next renewal asks for the new ttl. Also [`Error::Backend`], a permanent one, once its `max_hold` is
    /// over.
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, either ttl may be in force, as if no reply had come.
    pub async fn set_ttl(&self, ttl: Duration) -> Result<()> {
        self.check()?;
        self.hold.may_have_ttl(ttl)?;
        let hold = &self.hold;
        self.unless_lost(async {
            match hold.cell.reclaim().await.as_mut() {
                Some(contender) => {
                    // It may have waited for the claim.
                    hold.may_be_renewed("set_ttl")?;
                    hold.set_ttl_with(contender, ttl).await
                }
                None => Err(Error::Closed),
            }
        })
        .await
    }

    async fn unless_lost<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            // Once it is lost, no reply changes that; and the claim is wanted for the release.
            reason = self.lost() => Err(self.hold.lost(reason)),
            done = work => done,
        }
    }

    /// Runs `work` for as long as the lock is held.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold is lost before `work` is done; `work` is then dropped at its await. If the hold is lost
    /// while the last step of `work` runs, the [`RunError`] has its output as well. `?` turns it into an [`Error`].
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`. The guard still holds the lock.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, RunError<F::Output>> {
        self.view().run(work).await
    }

    /// Turns an exclusive hold into a shared one, without a gap: nobody writes in between. Those who wait to share the lock are let in
    /// and woken, unless the order of the queue has an exclusive waiter before them. That one is let in when all
    /// shared holders before it have left.
    ///
    /// The shared hold is one of its own. The exclusive one ends when this is called: for its views, [`ended`](Self::ended)
    /// resolves with [`HoldEnd::Released`]. What was acquired goes on: the [`token`](Self::token), the ttl, renewal, `max_hold`.
    /// A reader that is let in afterwards has a higher token, as has the next writer. A write that was sent with this token
    /// and comes late is refused by a resource that has seen one of those, and not before. So first await what was sent.
    ///
    /// If no reply comes, it is asked for again until the lease or the `max_hold` is over. Until then nobody else writes.
    ///
    /// ```
    /// use lockkit_core::{LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let table = LockClient::new(MemoryBackend::new()).lock("prices")?;
    /// let writing = table.acquire().await?;
    /// let written_with = writing.token();
    /// // Others may read what was written, and nobody can change it before this one has read it, too.
    /// let reading = writing.downgrade().await?;
    /// let other = table.shared().try_acquire().await?;
    /// assert!(other.is_some() && table.try_acquire().await?.is_none());
    /// assert_eq!(reading.token(), written_with);
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The [`DowngradeError`] has the guard, as it was, if nothing was asked of the server:
    /// - [`Error::Unsupported`] where the backend cannot do this, and for a hold that is not exclusive.
    /// - [`Error::Lost`] if the hold had been lost before.
    /// - [`Error::Closed`]; [`Error::Backend`], a permanent one, once its
    ///   [`max_hold`](crate::AcquireOptions#structfield.max_hold) is over.
    ///
    /// Otherwise the hold is over, and released in the background: [`Error::Lost`] if it turned out to be gone or was asked back, or
    /// if its lease or its `max_hold` ended before a reply came; [`Error::Backend`] if the server refuses; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock is released in the background, as if the guard had been dropped.
    pub async fn downgrade(mut self) -> Result<Self, DowngradeError<Self>> {
        let hold = self.hold.clone();
        let begun = match downgrade::begin(&hold) {
            Ok(begun) => begun,
            Err(error) => return Err(DowngradeError::unchanged(error, self)),
        };
        // The hold is in `begun` from here on, which releases it if it is dropped.
        self.armed = false;
        begun.finish().await.map(Self::new).map_err(DowngradeError::over)
    }

    /// Releases the lock and returns the outcome.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold had been lost before. [`Error::Backend`] if no confirmation came: the release is tried
    /// again in the background, and the hold ends with its lease at the latest.
    ///
    /// A hold that is passed on to a waiter of this client is not asked for at the server. If it had been ended by force, and this
    /// client had not been told yet, the release succeeds, and the waiter is told instead.
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, the release goes on in the client's worker.
    pub async fn release(mut self) -> Result<()> {
        self.armed = false;
        finish_release::release(&self.hold).await
    }

    /// Releases the lock, also before its [`hold_at_least`](crate::AcquireOptions#structfield.hold_at_least) is over: for a job that was not
    /// done, and that another may do at once.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    ///
    /// # Cancel safety
    /// As [`release`](Self::release).
    pub async fn release_early(self) -> Result<()> {
        self.keeps(false);
        self.release().await
    }

    /// Has a release before its `hold_at_least` is over keep the lock taken, or not.
    pub(crate) fn keeps(&self, keeps: bool) {
        self.hold.keeps(keeps);
    }

    /// Ends this guard without releasing the lock: the hold goes on at the server, and another client
    /// [adopts](crate::LockClient::adopt) it. That may be in another process, to which the [`DetachedHold`] is passed as a text, such as
    /// a worker that goes on with the work of a request.
    ///
    /// The lease is renewed once more, for a full ttl, and not by this client after that. Nobody else is granted the lock before the
    /// lease is over or whoever adopted the hold has released it. For more time on the way, call [`set_ttl`](Self::set_ttl) before.
    ///
    /// The hold stays the same one, and so does its [token](Self::token): nobody was granted the lock in between, so there is nobody
    /// to be told apart from. Write nothing more under it here: a resource takes such a write for one of the adopter's.
    ///
    /// ```
    /// use lockkit_core::{DetachedHold, LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// # let server = MemoryBackend::new();
    /// # let (here, elsewhere) = (LockClient::new(server.clone()), LockClient::new(server));
    /// let guard = here.lock("invoice/7")?.acquire().await?;
    /// let token = guard.token();
    /// let message = guard.detach().await?.encode(); // a secret: it permits to release the lock
    ///
    /// // In the worker, which has taken the message from a queue:
    /// let mut detached = DetachedHold::decode(&message)?;
    /// let guard = elsewhere.adopt(&mut detached).await?;
    /// assert_eq!(guard.token(), token);
    /// guard.release().await?;
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// A [`DetachError`], which has the guard. [`Error::Unsupported`] where a hold ends with a session, a transaction or a process
    /// ([`capabilities().detach`](crate::Capabilities::detach) is false): nothing has changed. [`Error::Lost`] if the hold is lost.
    /// [`Error::Backend`] if no reply came: the guard holds on. Also [`Error::Backend`], a permanent one, once its
    /// [`max_hold`](crate::AcquireOptions#structfield.max_hold) is over.
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, the guard is dropped with it, which releases.
    pub async fn detach(self) -> Result<DetachedHold, DetachError> {
        match self.detach_in_place().await {
            Ok(detached) => Ok(detached),
            Err(error) => Err(DetachError::new(error, self)),
        }
    }

    /// Detaches the hold of a guard that has nothing left to do after that.
    pub(crate) async fn detach_in_place(&self) -> Result<DetachedHold> {
        self.check()?;
        self.unless_lost(detach(&self.hold)).await
    }

    /// Returns a duplicate of the operating system's handle that keeps the hold alive, where the backend has one (file). A
    /// child process that inherits it keeps the lock until it has exited, even if this process is killed.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    #[cfg(unix)]
    pub async fn descriptor(&self) -> Option<std::os::fd::OwnedFd> {
        let hold = &self.hold;
        let loan = tokio::select! {
            biased;
            _ = self.lost() => return None,
            loan = hold.cell.reclaim() => loan,
        };
        loan.as_ref()?.claim.as_ref()?.descriptor()
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if self.armed {
            self.hold.abandon();
        }
    }
}

/// A read-only view of a hold, for code that may look at the lock and not release it. Cloning is cheap. Once the hold is over,
/// a view keeps nothing of the client.
///
/// ```
/// use lockkit_core::{HoldEnd, LockClient, MemoryBackend};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let guard = LockClient::new(MemoryBackend::new()).lock("import")?.acquire().await?;
/// let view = guard.view();
/// let watching = tokio::spawn(async move { view.ended().await });
/// guard.release().await?;
/// assert_eq!(watching.await.unwrap(), HoldEnd::Released);
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct HoldView {
    record: Arc<Record>,
}

impl HoldView {
    /// Returns the lock's name.
    pub fn name(&self) -> &LockName {
        &self.record.name
    }

    /// Returns the fencing token of this hold.
    pub fn token(&self) -> FencingToken {
        self.record.token
    }

    /// Resolves when the hold is lost, as [`LockGuard::lost`].
    ///
    /// # Cancel safety
    /// As [`LockGuard::lost`].
    pub fn lost(&self) -> LostSignal {
        LostSignal::new(&self.record)
    }

    /// Resolves when the hold is over, as [`LockGuard::ended`].
    ///
    /// # Cancel safety
    /// As [`LockGuard::ended`].
    pub fn ended(&self) -> EndedSignal {
        EndedSignal(Watch::new(&self.record))
    }

    /// Resolves as an early warning, as [`LockGuard::renewal_failing`].
    ///
    /// # Cancel safety
    /// As [`LockGuard::renewal_failing`].
    pub fn renewal_failing(&self) -> RenewalFailing {
        RenewalFailing(Watch::new(&self.record))
    }

    /// Returns `true` while the lock is held: neither lost, nor past its lease, nor released.
    pub fn is_held(&self) -> bool {
        self.record.is_held()
    }

    /// Checks that the lock is held, as [`is_held`](Self::is_held), for use with `?`.
    ///
    /// # Errors
    /// [`Error::Lost`] once the hold is lost; [`Error::Released`] once it is released or detached, which is no loss.
    pub fn check(&self) -> Result<()> {
        self.record.check()
    }

    pub(crate) fn not_lost(&self) -> Result<()> {
        self.record.not_lost()
    }

    /// Returns the end of the present lease, as [`LockGuard::valid_until`].
    pub fn valid_until(&self) -> Option<Instant> {
        self.record.valid_until()
    }

    /// Returns the length of the present lease, as [`LockGuard::lease_length`].
    pub fn lease_length(&self) -> Option<Duration> {
        self.record.lease_length()
    }

    /// Runs `work` for as long as the lock is held, as [`LockGuard::run`].
    ///
    /// Unlike a loss, a release does not stop `work` on its way.
    ///
    /// # Errors
    /// As [`LockGuard::run`]. [`Error::Released`] if the hold has been released before `work` began, or before it was done.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output, RunError<F::Output>> {
        self.check()?;
        tokio::select! {
            biased;
            // A loss comes first: no step of the work runs after it.
            reason = self.lost() => Err(self.record.lost(reason).into()),
            output = work => match self.check() {
                Ok(()) => Ok(output),
                Err(err) => Err(RunError::done(err, output)),
            },
        }
    }
}

/// Resolves with the reason when a hold is lost. Stays pending for ever after a normal release; [`EndedSignal`] does not.
/// Made by [`LockGuard::lost`].
#[derive(Clone, Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct LostSignal(Watch);

impl LostSignal {
    fn new(record: &Arc<Record>) -> Self {
        Self(Watch::new(record))
    }

    /// Returns the reason if the hold is lost already.
    pub fn reason(&self) -> Option<LossReason> {
        match self.0.record.cell.phase(self.0.record.now()) {
            Phase::Lost(reason) => Some(reason),
            _ => None,
        }
    }
}

impl Future for LostSignal {
    type Output = LossReason;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LossReason> {
        self.0.keep(cx, Event::Loss);
        self.reason().map_or(Poll::Pending, Poll::Ready)
    }
}

/// Resolves when a hold is over: lost, released or detached. Made by [`LockGuard::ended`].
#[derive(Clone, Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct EndedSignal(Watch);

impl Future for EndedSignal {
    type Output = HoldEnd;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<HoldEnd> {
        self.0.keep(cx, Event::End);
        match self.0.record.cell.phase(self.0.record.now()) {
            Phase::Lost(reason) => Poll::Ready(HoldEnd::Lost(reason)),
            Phase::Releasing => Poll::Ready(HoldEnd::Released),
            Phase::Detached => Poll::Ready(HoldEnd::Detached),
            Phase::Offered | Phase::Held => Poll::Pending,
        }
    }
}

/// Resolves with what is left of the lease when a renewal has failed or is overdue. Made by [`LockGuard::renewal_failing`].
#[derive(Clone, Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct RenewalFailing(Watch);

impl Future for RenewalFailing {
    type Output = Duration;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Duration> {
        self.0.keep(cx, Event::Loss);
        let now = self.0.record.now();
        let cell = &self.0.record.cell;
        if let Phase::Lost(_) = cell.phase(now) {
            return Poll::Ready(Duration::ZERO);
        }
        cell.renewal_failing(now).map_or(Poll::Pending, Poll::Ready)
    }
}

/// A registration to be woken when something happens to a hold.
#[derive(Debug)]
struct Watch {
    record: Arc<Record>,
    watcher: Option<u32>,
}

impl Watch {
    fn new(record: &Arc<Record>) -> Self {
        Self {
            record: record.clone(),
            watcher: None,
        }
    }

    /// Registers before the state is read, so that no change falls between.
    fn keep(&mut self, cx: &Context<'_>, of: Event) {
        self.record.cell.watch(&mut self.watcher, cx.waker(), of);
    }
}

impl Clone for Watch {
    fn clone(&self) -> Self {
        Self::new(&self.record)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher {
            self.record.cell.unwatch(watcher);
        }
    }
}

/// Resolves with the index and the reason when the first of `signals` does. Stays pending for ever if there is none.
pub(crate) async fn first_lost(mut signals: Vec<LostSignal>) -> (usize, LossReason) {
    if signals.is_empty() {
        return pending().await;
    }
    std::future::poll_fn(|cx| {
        for (index, signal) in signals.iter_mut().enumerate() {
            if let Poll::Ready(reason) = Pin::new(signal).poll(cx) {
                return Poll::Ready((index, reason));
            }
        }
        Poll::Pending
    })
    .await
}
