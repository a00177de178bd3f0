//! The life of one hold. Sans-IO: time comes in as an argument, tasks are woken through their wakers.
//!
//! ```text
//! Offered ──accept──▶ Held ──begin_release──▶ Releasing
//!    │                  │
//!    └──────lose────────┴──▶ Lost (latched for good)
//! ```
//!
//! The cell also keeps a `C`, the contender that the hold is made of, with the backend's claim in it. It is parked here and
//! lent to one user at a time. A loan comes back when it is dropped, at whatever await. The client's worker borrows the
//! claim for as long as nobody else wants it; everyone else [reclaims](HoldCell::reclaim) it.

use std::{
    fmt,
    future::{Future, poll_fn},
    ops::{Deref, DerefMut},
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::time::Instant;

use crate::{LossReason, driver::moment::Moment, spi::SessionProof, sync::Mutex};

/// The phase of a hold's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Passed on to a waiter that has not taken it yet.
    Offered,
    /// Its guard is with the user.
    Held,
    /// Its guard has been released or dropped.
    Releasing,
    /// It was lost. This never changes again.
    Lost(LossReason),
}

pub(crate) struct HoldCell<C> {
    state: Mutex<State<C>>,
}

struct State<C> {
    phase: Phase,
    valid_until: Option<Moment>,
    /// The session that the hold ends with as well, whatever its last lease says.
    session: Option<SessionProof>,
    /// The length of the lease when a renewal last proved it.
    renewed_for: Option<Duration>,
    renewal_failing: bool,
    parked: Option<C>,
    /// Nobody will release the claim: drop it when it comes back.
    discards: bool,
    /// The number of those who wait for the claim. The worker makes way for them.
    wanting: u32,
    wanting_wakers: Vec<Waker>,
    worker: Option<Waker>,
    /// Grows when the worker should look again.
    version: u32,
    watchers: Vec<Watcher>,
    next_watcher: u32,
}

struct Watcher {
    id: u32,
    of: Event,
    waker: Waker,
}

/// An event that a watcher waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A loss, or a warning of one.
    Loss,
    /// A loss or a release.
    End,
}

/// Wakers to call, and watchers to drop, once the lock on the state has been let go.
#[derive(Default)]
struct Wakes {
    wakers: Vec<Waker>,
    /// Watchers of an event that can no longer happen.
    forgotten: Vec<Watcher>,
}

impl<C> State<C> {
    fn alive(&self) -> bool {
        matches!(self.phase, Phase::Offered | Phase::Held)
    }

    /// The one way into `Lost`.
    fn latch(&mut self, reason: LossReason, wakes: &mut Wakes) {
        self.phase = Phase::Lost(reason);
        self.rouse_worker(wakes);
        self.wake_watchers(wakes);
    }

    /// The end that is no loss.
    fn begin_release(&mut self, wakes: &mut Wakes) {
        self.phase = Phase::Releasing;
        let ended = self.watchers.extract_if(.., |watcher| watcher.of == Event::End);
        wakes.wakers.extend(ended.map(|watcher| watcher.waker));
        wakes.forgotten = std::mem::take(&mut self.watchers);
    }

    fn expire(&mut self, now: Moment, wakes: &mut Wakes) {
        if !self.alive() {
            return;
        }
        if let Some(Err(reason)) = self.session_proof() {
            self.latch(reason, wakes);
        } else if self.end(now).is_some_and(|end| now.has_reached(end)) {
            self.latch(LossReason::Expired, wakes);
        }
    }

    /// The end of its lease, or of what its session still proves.
    fn end(&self, now: Moment) -> Option<Moment> {
        let Some(Ok(proven)) = self.session_proof() else {
            return self.valid_until;
        };
        let ends = [self.valid_until, Some(now.end_of_hold(proven))];
        ends.into_iter().flatten().min_by_key(|end| end.seen_from(now))
    }

    fn session_proof(&self) -> Option<Result<Instant, LossReason>> {
        self.session.as_ref().map(|session| *session.borrow())
    }

    fn rouse_worker(&mut self, wakes: &mut Wakes) {
        self.version = self.version.wrapping_add(1);
        wakes.wakers.extend(self.worker.take());
    }

    fn wake_watchers(&mut self, wakes: &mut Wakes) {
        let watchers = self.watchers.drain(..);
        wakes.wakers.extend(watchers.map(|watcher| watcher.waker));
    }
}

impl<C> HoldCell<C> {
    /// A hold with a lease until `valid_until`, which also ends when its `session` no longer proves it.
    pub(crate) fn new(
        phase: Phase,
        claim: C,
        valid_until: Option<Moment>,
        session: Option<SessionProof>,
    ) -> Self {
        Self {
            state: Mutex::new(State {
                phase,
                valid_until,
                session,
                renewed_for: None,
                renewal_failing: false,
                parked: Some(claim),
                discards: false,
                wanting: 0,
                wanting_wakers: Vec::new(),
                worker: None,
                version: 0,
                watchers: Vec::new(),
                next_watcher: 0,
            }),
        }
    }

    /// The session that the hold ends with besides its lease.
    pub(crate) fn session(&self) -> Option<SessionProof> {
        self.state.lock().session.clone()
    }

    /// Runs `f` on the state after everything that is due at `now`, then wakes those whom that concerns.
    fn update<T>(&self, now: Option<Moment>, f: impl FnOnce(&mut State<C>, &mut Wakes) -> T) -> T {
        let mut wakes = Wakes::default();
        let mut state = self.state.lock();
        if let Some(now) = now {
            state.expire(now, &mut wakes);
        }
        let value = f(&mut state, &mut wakes);
        drop(state);
        wakes.wakers.into_iter().for_each(Waker::wake);
        value
    }

    /// Returns the phase at `now`. The first to look after the lease has expired latches the loss.
    pub(crate) fn phase(&self, now: Moment) -> Phase {
        self.update(Some(now), |state, _| state.phase)
    }

    /// Returns the phase as it was last set, whatever the clock says.
    pub(crate) fn last_phase(&self) -> Phase {
        self.state.lock().phase
    }

    /// The end of the lease that was proven last.
    pub(crate) fn valid_until(&self) -> Option<Moment> {
        self.state.lock().valid_until
    }

    /// The end of the hold, as far as is known at `now`.
    pub(crate) fn end(&self, now: Moment) -> Option<Moment> {
        self.state.lock().end(now)
    }

    /// The length of the lease when a renewal last proved it; `None` if none has yet.
    pub(crate) fn renewed_for(&self) -> Option<Duration> {
        self.state.lock().renewed_for
    }

    /// Gives the hold to the waiter to whom it was offered. Returns `false` if it was lost before.
    pub(crate) fn accept(&self, now: Moment) -> bool {
        self.update(Some(now), |state, wakes| {
            let offered = state.phase == Phase::Offered;
            if offered {
                state.phase = Phase::Held;
                state.rouse_worker(wakes);
            }
            offered
        })
    }

    /// Gives up the guard, and wakes those who wait for the hold's end. Returns the claim if it is parked; otherwise
    /// reclaim it. The worker is not woken yet: that would delay the request that the next holder waits for.
    pub(crate) fn begin_release(&self, now: Moment) -> Result<Option<C>, LossReason> {
        self.update(Some(now), |state, wakes| match state.phase {
            Phase::Lost(reason) => Err(reason),
            Phase::Offered | Phase::Held | Phase::Releasing => {
                state.begin_release(wakes);
                Ok(state.parked.take())
            }
        })
    }

    /// Wakes the worker, which then sees that the hold is over.
    pub(crate) fn dismiss_worker(&self) {
        self.update(None, State::rouse_worker);
    }

    /// Takes the claim of a hold that is being released for good, if it is parked.
    pub(crate) fn take(&self) -> Option<C> {
        self.state.lock().parked.take()
    }

    /// Takes the claim of a lost hold that nobody will release, if it is parked. Otherwise it is dropped when it comes back.
    pub(crate) fn discard(&self) -> Option<C> {
        let mut state = self.state.lock();
        state.discards = true;
        state.parked.take()
    }

    /// Latches a loss, unless the hold has ended already.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        self.update(None, |state, wakes| {
            let alive = state.alive();
            if alive {
                state.latch(reason, wakes);
            }
            alive
        })
    }

    /// Ends a hold that was offered and not accepted in time.
    pub(crate) fn lapse(&self) {
        self.update(None, |state, wakes| {
            if state.phase == Phase::Offered {
                state.latch(LossReason::Expired, wakes);
            }
        });
    }

    /// Adopts a renewed lease. Changes nothing and returns `false` if the old one expired before the reply came.
    pub(crate) fn extend(&self, valid_until: Option<Moment>, now: Moment) -> bool {
        self.update(Some(now), |state, _| {
            let alive = state.alive();
            if alive {
                state.valid_until = valid_until;
                state.renewed_for =
                    valid_until.map(|end| end.seen_from(now).saturating_duration_since(now.at));
                state.renewal_failing = false;
            }
            alive
        })
    }

    /// Notes that a renewal succeeded whose lease is not adopted.
    pub(crate) fn renewal_succeeded(&self) {
        self.state.lock().renewal_failing = false;
    }

    /// Notes that a renewal failed, and wakes the watchers as an early warning. The lease goes on until it ends.
    pub(crate) fn renewal_failed(&self) {
        self.update(None, |state, wakes| {
            if state.alive() && !std::mem::replace(&mut state.renewal_failing, true) {
                state.wake_watchers(wakes);
            }
        });
    }

    /// Returns what is left of the hold if its last renewal failed.
    pub(crate) fn renewal_failing(&self, now: Moment) -> Option<Duration> {
        let state = self.state.lock();
        let left = || {
            state.valid_until.map_or(Duration::MAX, |end| {
                end.seen_from(now).saturating_duration_since(now.at)
            })
        };
        (state.alive() && state.renewal_failing).then(left)
    }

    /// Keeps `waker` to be called at this event, if that can still happen. `watcher` is the caller's registration.
    pub(crate) fn watch(&self, watcher: &mut Option<u32>, waker: &Waker, of: Event) {
        let mut state = self.state.lock();
        if !state.alive() {
            return;
        }
        let id = *watcher.get_or_insert_with(|| {
            state.next_watcher = state.next_watcher.wrapping_add(1);
            state.next_watcher
        });
        match state.watchers.iter_mut().find(|known| known.id == id) {
            Some(known) => known.waker.clone_from(waker),
            None => state.watchers.push(Watcher {
                id,
                of,
                waker: waker.clone(),
            }),
        }
    }

    /// Drops the waker kept for `watcher`.
    pub(crate) fn unwatch(&self, watcher: u32) {
        self.state.lock().watchers.retain(|known| known.id != watcher);
    }

    /// Borrows the claim as soon as it is parked, ahead of the worker.
    pub(crate) fn reclaim(&self) -> Reclaim<'_, C> {
        Reclaim {
            cell: self,
            counted: false,
        }
    }

    /// Lends the claim to the worker; `None` once the hold is over.
    pub(crate) async fn lend_to_worker(&self) -> Option<Loan<'_, C>> {
        poll_fn(|cx| {
            let mut state = self.state.lock();
            if !state.alive() {
                return Poll::Ready(None);
            }
            if state.wanting == 0
                && let Some(claim) = state.parked.take()
            {
                return Poll::Ready(Some(Loan {
                    cell: self,
                    claim: Some(claim),
                    to_worker: true,
                }));
            }
            state.worker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Returns what the worker passes to [`poll_changed`](Self::poll_changed) later.
    pub(crate) fn version(&self) -> u32 {
        self.state.lock().version
    }

    /// Resolves for the worker when something has changed since `version`, or somebody wants the claim.
    pub(crate) fn poll_changed(&self, version: u32, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.version != version || state.wanting > 0 {
            return Poll::Ready(());
        }
        match &mut state.worker {
            Some(known) => known.clone_from(cx.waker()),
            unset => *unset = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    fn park(&self, claim: C, by_worker: bool) {
        let discarded = self.update(None, |state, wakes| {
            if state.discards {
                return Some(claim);
            }
            state.parked = Some(claim);
            // The worker looks again by itself after it has parked.
            if !by_worker && state.wanting == 0 {
                wakes.wakers.extend(state.worker.take());
            }
            wakes.wakers.append(&mut state.wanting_wakers);
            None
        });
        drop(discarded);
    }
}

impl<C> fmt::Debug for HoldCell<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("HoldCell")
            .field("phase", &state.phase)
            .field("valid_until", &state.valid_until)
            .finish_non_exhaustive()
    }
}

/// Waits for the claim. Dropping it stops waiting.
#[must_use]
pub(crate) struct Reclaim<'a, C> {
    cell: &'a HoldCell<C>,
    counted: bool,
}

impl<'a, C> Future for Reclaim<'a, C> {
    type Output = Loan<'a, C>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let cell = self.cell;
        cell.update(None, |state, wakes| {
            if let Some(claim) = state.parked.take() {
                return Poll::Ready(Loan {
                    cell,
                    claim: Some(claim),
                    to_worker: false,
                });
            }
            let wanting = &mut state.wanting_wakers;
            if !wanting.iter().any(|known| known.will_wake(cx.waker())) {
                wanting.push(cx.waker().clone());
            }
            if !self.counted {
                self.counted = true;
                state.wanting += 1;
                state.rouse_worker(wakes);
            }
            Poll::Pending
        })
    }
}

impl<C> Drop for Reclaim<'_, C> {
    fn drop(&mut self) {
        if !self.counted {
            return;
        }
        self.cell.update(None, |state, wakes| {
            state.wanting -= 1;
            if state.wanting == 0 {
                state.rouse_worker(wakes);
            }
        });
    }
}

/// The claim on loan. It goes back to its cell when dropped.
pub(crate) struct Loan<'a, C> {
    cell: &'a HoldCell<C>,
    claim: Option<C>,
    to_worker: bool,
}

impl<C> Loan<'_, C> {
    /// Keeps the claim for good.
    pub(crate) fn keep(mut self) -> Option<C> {
        self.claim.take()
    }
}

impl<C> Deref for Loan<'_, C> {
    type Target = Option<C>;

    fn deref(&self) -> &Self::Target {
        &self.claim
    }
}

impl<C> DerefMut for Loan<'_, C> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.claim
    }
}

impl<C> Drop for Loan<'_, C> {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take() {
            self.cell.park(claim, self.to_worker);
        }
    }
}
