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
    Error, FencingToken, LockName, LossReason, Result,
    driver::{
        cell::{Event, Phase},
        finish_release,
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
/// use lockkit_core::{FenceGate, LockClient, MemoryBackend};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let resource = FenceGate::new();
/// let guard = LockClient::new(MemoryBackend::new()).lock("invoice/7")?.acquire().await?;
/// // Each step runs only while the lock is held, and carries the token.
/// let written = guard.run(async { resource.admit(guard.token()) }).await?;
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

    /// Resolves when the hold is over: with the reason when it is lost, and with [`LossReason::Released`] as soon as its
    /// guard is released or dropped.
    ///
    /// # Cancel safety
    /// The end is latched: a late call resolves at once, and dropping the future loses nothing.
    pub fn ended(&self) -> EndedSignal {
        EndedSignal(Watch::new(&self.hold.record))
    }

    /// Resolves as an early warning when a renewal has failed, or has no reply although no more than an eighth of the lease is
    /// left. Returns what is left of the lease, which may yet be renewed. Returns zero when the hold is lost.
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
    /// hold has no lease, only a process or connection that it ends with.
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
    /// long step.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold is lost; [`Error::Backend`] if no reply came, in which case the lease goes on as
    /// it was.
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, the lease may or may not be extended at the server. Locally it is not.
    pub async fn renew(&self) -> Result<()> {
        self.check()?;
        let hold = &self.hold;
        let renewal = async {
            match hold.cell.reclaim().await.as_mut() {
                Some(contender) => hold.renew_with(contender, true).await,
                None => Err(Error::Closed),
            }
        };
        tokio::select! {
            biased;
            // Once it is lost, no reply changes that; and the claim is wanted for the release.
            reason = self.lost() => Err(hold.lost(reason)),
            renewed = renewal => renewed,
        }
    }

    /// Runs `work` for as long as the lock is held.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold is lost before `work` is done; `work` is then dropped at its await.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`. The guard still holds the lock.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.view().run(work).await
    }

    /// Releases the lock and returns the outcome.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold had been lost before. [`Error::Backend`] if no confirmation came: the release is tried
    /// again in the background, and the hold ends with its lease at the latest.
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, the release goes on in the client's worker.
    pub async fn release(mut self) -> Result<()> {
        self.armed = false;
        finish_release::release(&self.hold).await
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
/// use lockkit_core::{LockClient, LossReason, MemoryBackend};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let guard = LockClient::new(MemoryBackend::new()).lock("import")?.acquire().await?;
/// let view = guard.view();
/// let watching = tokio::spawn(async move { view.ended().await });
/// guard.release().await?;
/// assert_eq!(watching.await.unwrap(), LossReason::Released);
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
    /// [`Error::Lost`] once the hold is lost, and with [`LossReason::Released`] once it is released: that is no loss, but the
    /// lock is not held any more.
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
    /// # Errors
    /// [`Error::Lost`] if the hold is lost before `work` is done.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.check()?;
        tokio::select! {
            biased;
            reason = self.lost() => Err(self.record.lost(reason)),
            output = work => self.check().map(|()| output),
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

/// Resolves when a hold is over, lost or released. Made by [`LockGuard::ended`].
#[derive(Clone, Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct EndedSignal(Watch);

impl Future for EndedSignal {
    type Output = LossReason;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LossReason> {
        self.0.keep(cx, Event::End);
        match self.0.record.cell.phase(self.0.record.now()) {
            Phase::Lost(reason) => Poll::Ready(reason),
            Phase::Releasing => Poll::Ready(LossReason::Released),
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
