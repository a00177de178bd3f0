//! What the user holds while the lock is held.

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
        acquire,
        cell::{Event, Phase},
        hold::{Hold, Record},
    },
};

/// A lock that is held.
///
/// While it lives, its lease is renewed in the background (unless it was acquired with `renew(false)`). Dropping it
/// stops renewal at once and hands the release to the client's worker; [`release`](Self::release) is the way to learn
/// the outcome. Dropping never blocks, does no I/O, and is fine outside of a runtime.
///
/// A lock can be lost while the guard is there: the process was paused past its lease, the server cannot be reached,
/// an operator broke it. Watch [`lost`](Self::lost), ask [`check`](Self::check), or let [`run`](Self::run) do it; and
/// send the [`token`](Self::token) along with every write, so that a resource can refuse one that comes too late.
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

    /// The lock's name.
    pub fn name(&self) -> &LockName {
        &self.hold.name
    }

    /// The fencing token of this hold.
    pub fn token(&self) -> FencingToken {
        self.hold.token
    }

    /// Resolves when the hold is lost, with the reason; never after a normal release. It is for a `select!` with the work
    /// that the lock protects: a task of its own that awaits this stays for ever once the lock was released. Let such a
    /// task await [`ended`](Self::ended).
    ///
    /// # Cancel safety
    /// Loss is latched: whoever asks late is told at once, and dropping the future loses nothing.
    pub fn lost(&self) -> LostSignal {
        LostSignal::new(&self.hold.record)
    }

    /// Resolves when the hold is over: when it is lost, with the reason, and with [`LossReason::Released`] as soon as its
    /// guard is released or dropped.
    ///
    /// # Cancel safety
    /// The end is latched: whoever asks late is told at once, and dropping the future loses nothing.
    pub fn ended(&self) -> EndedSignal {
        EndedSignal(Watch::new(&self.hold.record))
    }

    /// Resolves when a renewal has failed, or has not been answered although no more than an eighth of the lease is left:
    /// an early warning, with what is left. It also resolves, with zero, when the hold is lost. The lease may yet be
    /// renewed.
    ///
    /// # Cancel safety
    /// The state is remembered until a renewal succeeds; dropping the future loses nothing.
    pub fn renewal_failing(&self) -> RenewalFailing {
        RenewalFailing(Watch::new(&self.hold.record))
    }

    /// Whether the lock is still held, by the clock too: `false` from the moment the lease is over, even if nothing
    /// has noticed yet.
    pub fn is_held(&self) -> bool {
        self.hold.is_held()
    }

    /// Like [`is_held`](Self::is_held), for use with `?`.
    ///
    /// # Errors
    /// [`Error::Lost`] once the hold is lost.
    pub fn check(&self) -> Result<()> {
        self.hold.check()
    }

    /// Until when the lock is held if no renewal succeeds from now on, on the monotonic clock. `None` if the hold has
    /// no lease, only a process or connection that it ends with.
    pub fn valid_until(&self) -> Option<Instant> {
        self.hold.valid_until()
    }

    /// How long the lease in force was when it was proven; [`valid_until`](Self::valid_until) is its end. At most the
    /// ttl, and less where something else decides, such as a server's session. `None` if the hold has no lease.
    pub fn lease_length(&self) -> Option<Duration> {
        self.hold.lease_length()
    }

    /// A view of this hold that can be cloned and given away. It keeps nothing held.
    pub fn view(&self) -> HoldView {
        HoldView {
            record: self.hold.record.clone(),
        }
    }

    /// Extends the lease by hand, to a full ttl from now. For holds acquired with `renew(false)`, and for whoever
    /// wants certainty before a long step.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold is lost; [`Error::Backend`] if no answer came, in which case the lease goes on as
    /// it was.
    ///
    /// # Cancel safety
    /// Dropped half-way, the lease is either extended at the server or not; locally it counts as not.
    pub async fn renew(&self) -> Result<()> {
        self.check()?;
        let hold = &self.hold;
        let renewal = async {
            match hold.cell.reclaim().await.as_mut() {
                Some(grip) => hold.renew_with(grip, true).await,
                None => Err(Error::Closed),
            }
        };
        tokio::select! {
            biased;
            // Once it is lost, no answer changes that; and the claim is wanted for the release.
            reason = self.lost() => Err(hold.lost(reason)),
            renewed = renewal => renewed,
        }
    }

    /// Runs `work` for as long as the lock is held.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold is lost before `work` is done; `work` is dropped at the await where it is then.
    ///
    /// # Cancel safety
    /// Dropping it drops `work`. The lock stays held by the guard.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.view().run(work).await
    }

    /// Releases the lock and says what came of it.
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold had been lost before; [`Error::Backend`] if no confirmation came: it is tried
    /// again in the background, and the lease bounds what may be left.
    ///
    /// # Cancel safety
    /// Dropped half-way, the release goes on in the client's worker.
    pub async fn release(mut self) -> Result<()> {
        self.armed = false;
        acquire::release(&self.hold).await
    }

    /// A duplicate of the operating system's handle that keeps the hold alive, where the backend has one (file). A
    /// child process that inherits it keeps the lock until it has exited, even if this process is killed.
    ///
    /// # Cancel safety
    /// Nothing changes if it is dropped.
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

/// A read-only view of a hold. Cloning is cheap; it neither keeps the lock nor releases it, and once the hold is over it
/// keeps nothing of the client.
#[derive(Clone, Debug)]
pub struct HoldView {
    record: Arc<Record>,
}

impl HoldView {
    /// The lock's name.
    pub fn name(&self) -> &LockName {
        &self.record.name
    }

    /// The fencing token of this hold.
    pub fn token(&self) -> FencingToken {
        self.record.token
    }

    /// As [`LockGuard::lost`].
    ///
    /// # Cancel safety
    /// As [`LockGuard::lost`].
    pub fn lost(&self) -> LostSignal {
        LostSignal::new(&self.record)
    }

    /// As [`LockGuard::ended`].
    ///
    /// # Cancel safety
    /// As [`LockGuard::ended`].
    pub fn ended(&self) -> EndedSignal {
        EndedSignal(Watch::new(&self.record))
    }

    /// As [`LockGuard::renewal_failing`].
    ///
    /// # Cancel safety
    /// As [`LockGuard::renewal_failing`].
    pub fn renewal_failing(&self) -> RenewalFailing {
        RenewalFailing(Watch::new(&self.record))
    }

    /// Whether the lock is still held: neither lost, nor past its lease, nor released.
    pub fn is_held(&self) -> bool {
        self.record.is_held()
    }

    /// # Errors
    /// [`Error::Lost`] once the hold is lost; with [`LossReason::Released`] once it was released, which is no loss but
    /// nothing to go on with either.
    pub fn check(&self) -> Result<()> {
        self.record.check()
    }

    pub(crate) fn not_lost(&self) -> Result<()> {
        self.record.not_lost()
    }

    /// As [`LockGuard::valid_until`].
    pub fn valid_until(&self) -> Option<Instant> {
        self.record.valid_until()
    }

    /// As [`LockGuard::lease_length`].
    pub fn lease_length(&self) -> Option<Duration> {
        self.record.lease_length()
    }

    /// As [`LockGuard::run`].
    ///
    /// # Errors
    /// [`Error::Lost`] if the hold is lost before `work` is done.
    ///
    /// # Cancel safety
    /// Dropping it drops `work`.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.check()?;
        tokio::select! {
            biased;
            reason = self.lost() => Err(self.record.lost(reason)),
            output = work => self.check().map(|()| output),
        }
    }
}

/// Resolves to the reason when a hold is lost; pending for ever after a normal release, which [`EndedSignal`] is not.
/// Made by [`LockGuard::lost`].
#[derive(Clone, Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct LostSignal(Watch);

impl LostSignal {
    fn new(record: &Arc<Record>) -> Self {
        Self(Watch::new(record))
    }

    /// The reason, if the hold is lost already.
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

/// Resolves when a renewal has failed or is overdue, to what is left of the lease. Made by [`LockGuard::renewal_failing`].
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

/// A place among those who are woken when something happens to a hold.
#[derive(Debug)]
struct Watch {
    record: Arc<Record>,
    place: Option<u32>,
}

impl Watch {
    fn new(record: &Arc<Record>) -> Self {
        Self {
            record: record.clone(),
            place: None,
        }
    }

    /// Registers before the state is read, so that no change falls between.
    fn keep(&mut self, cx: &Context<'_>, of: Event) {
        self.record.cell.watch(&mut self.place, cx.waker(), of);
    }
}

impl Clone for Watch {
    fn clone(&self) -> Self {
        Self::new(&self.record)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.record.cell.unwatch(place);
        }
    }
}

/// Resolves with the reason and the index when the first of `holds` is lost.
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
