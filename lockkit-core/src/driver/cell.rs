//! The life of one hold. Sans-IO: time comes in as an argument, tasks are woken through their wakers.
//!
//! ```text
//! Offered ──accept──▶ Held ──begin_release──▶ Releasing
//!    │                  ├──────detach───────▶ Detached
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

use crate::{
    LossReason,
    driver::{max_hold::HoldLimit, moment::Moment, observe::ObservedHold},
    spi::SessionProof,
    sync::Mutex,
};

/// The phase of a hold's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Passed on to a waiter that has not taken it yet.
    Offered,
    /// Its guard is with the user.
    Held,
    /// Its guard has been released or dropped.
    Releasing,
    /// It goes on at the server, and not here.
    Detached,
    /// It was lost. This never changes again.
    Lost(LossReason),
}

pub(crate) struct HoldCell<C> {
    state: Mutex<State<C>>,
}

#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an event of its own, and any of them may come with any other"
)]
struct State<C> {
    phase: Phase,
    valid_until: Option<Moment>,
    /// The session that the hold ends with as well, whatever its last lease says.
    session: Option<SessionProof>,
    /// The length of the lease when a renewal last proved it.
    renewed_for: Option<Duration>,
    renewal_failing: bool,
    /// The time from which on it is not renewed. In a box, since few holds have one.
    limit: Option<Box<HoldLimit>>,
    /// The watchers have been told that this time is over.
    limit_told: bool,
    /// It was asked back, and its user has not let go of the guard yet.
    lingers: bool,
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
    /// Unset before the user has it, and after its end.
    observed: Option<ObservedHold>,
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

/// An end to report, wakers to call, and watchers to drop, once the lock on the state has been let go.
#[derive(Default)]
struct Wakes {
    wakers: Vec<Waker>,
    /// A hold that has ended, and the reason if it was lost.
    ended: Option<(ObservedHold, Option<LossReason>)>,
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
        self.end_observed(Some(reason), wakes);
        self.rouse_worker(wakes);
        self.wake_watchers(wakes);
    }

    /// The end that is no loss.
    fn begin_release(&mut self, wakes: &mut Wakes) {
        self.end_in(Phase::Releasing, wakes);
    }

    fn end_in(&mut self, phase: Phase, wakes: &mut Wakes) {
        self.phase = phase;
        self.end_observed(None, wakes);
        let ended = self.watchers.extract_if(.., |watcher| watcher.of == Event::End);
        wakes.wakers.extend(ended.map(|watcher| watcher.waker));
        wakes.forgotten = std::mem::take(&mut self.watchers);
    }

    fn end_observed(&mut self, lost: Option<LossReason>, wakes: &mut Wakes) {
        if let Some(observed) = self.observed.take() {
            wakes.ended = Some((observed, lost));
        }
    }

    fn expire(&mut self, now: Moment, wakes: &mut Wakes) {
        if !self.alive() {
            return;
        }
        if let Some(Err(reason)) = self.session_proof() {
            self.latch(reason, wakes);
        } else if let Some(end) = self.end(now).filter(|end| now.has_reached(*end)) {
            let end = end.seen_from(now);
            let ran_out = self.limit.as_ref().is_some_and(|limit| end >= limit.over);
            let reason = if ran_out {
                LossReason::MaxHold
            } else {
                LossReason::Expired
            };
            self.latch(reason, wakes);
        }
    }

    fn limit_is_over(&self, now: Moment) -> bool {
        self.limit.as_ref().is_some_and(|limit| now.at >= limit.over)
    }

    /// The end of its lease, or of what its session still proves. From its limit on, a hold has an end, also without a lease, and where a
    /// lease is longer: one that begins with a reply, as a session's, may be.
    fn end(&self, now: Moment) -> Option<Moment> {
        let limit = self.limit.as_ref().filter(|_| self.limit_is_over(now));
        let limit = limit.map(|limit| now.at_instant(limit.end));
        let proven = match self.session_proof() {
            Some(Ok(proven)) => Some(now.end_of_hold(proven)),
            _ => None,
        };
        let ends = [self.valid_until, limit, proven];
        ends.into_iter().flatten().min_by_key(|end| end.seen_from(now))
    }

    fn session_proof(&self) -> Option<Result<Instant, LossReason>> {
        self.session.as_ref().map(|session| *session.borrow())
    }

    fn keep_worker(&mut self, cx: &Context<'_>) {
        match &mut self.worker {
            Some(known) => known.clone_from(cx.waker()),
            unset => *unset = Some(cx.waker().clone()),
        }
    }

    fn rouse_worker(&mut self, wakes: &mut Wakes) {
        self.version = self.version.wrapping_add(1);
        wakes.wakers.extend(self.worker.take());
    }

    fn renewal_fails(&mut self, wakes: &mut Wakes) {
        if self.alive() && !std::mem::replace(&mut self.renewal_failing, true) {
            self.wake_watchers(wakes);
        }
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
                limit: None,
                limit_told: false,
                lingers: false,
                parked: Some(claim),
                discards: false,
                wanting: 0,
                wanting_wakers: Vec::new(),
                worker: None,
                version: 0,
                watchers: Vec::new(),
                next_watcher: 0,
                observed: None,
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
        if let Some((observed, lost)) = wakes.ended {
            observed.end(lost);
        }
        wakes.wakers.into_iter().for_each(Waker::wake);
        value
    }

    /// Ends `observed` with the hold, at once if that has been lost already.
    pub(crate) fn observe(&self, observed: ObservedHold) {
        self.update(None, |state, wakes| match state.phase {
            Phase::Lost(reason) => wakes.ended = Some((observed, Some(reason))),
            Phase::Offered | Phase::Held => state.observed = Some(observed),
            Phase::Releasing | Phase::Detached => wakes.ended = Some((observed, None)),
        });
    }

    /// Returns the phase at `now`. The first to look after the lease has expired latches the loss.
    pub(crate) fn phase(&self, now: Moment) -> Phase {
        self.update(Some(now), |state, _| state.phase)
    }

    /// Returns the phase as it was last set, whatever the clock says.
    pub(crate) fn last_phase(&self) -> Phase {
        self.state.lock().phase
    }

    /// Sets the time from which on it is not renewed, as far as is known.
    pub(crate) fn set_limit(&self, limit: HoldLimit) {
        match &mut self.state.lock().limit {
            Some(last) => **last = limit,
            none => *none = Some(Box::new(limit)),
        }
    }

    /// Returns the time from which on it is not renewed, unless that has come.
    pub(crate) fn limit_to_come(&self, now: Moment) -> Option<Instant> {
        let over = self.state.lock().limit.as_ref()?.over;
        (now.at < over).then_some(over)
    }

    /// Returns whether it is not renewed any more. The first to find out wakes the watchers, as an early warning.
    pub(crate) fn limit_is_over(&self, now: Moment) -> bool {
        self.update(Some(now), |state, wakes| {
            let over = state.limit_is_over(now);
            if over && state.alive() && !std::mem::replace(&mut state.limit_told, true) {
                state.wake_watchers(wakes);
            }
            over
        })
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
            Phase::Lost(reason) => {
                if std::mem::take(&mut state.lingers) {
                    state.rouse_worker(wakes);
                }
                Err(reason)
            }
            Phase::Offered | Phase::Held | Phase::Releasing => {
                state.begin_release(wakes);
                Ok(state.parked.take())
            }
            // The guard is gone, and nothing of the hold is left here.
            Phase::Detached => Err(LossReason::Gone),
        })
    }

    /// Ends the hold here, since it goes on at the server for another client, and wakes those who wait for its end.
    ///
    /// # Errors
    /// The reason, if it was lost before.
    pub(crate) fn detach(&self, now: Moment) -> Result<(), LossReason> {
        self.update(Some(now), |state, wakes| match state.phase {
            Phase::Lost(reason) => Err(reason),
            _ => {
                state.end_in(Phase::Detached, wakes);
                Ok(())
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

    /// Latches the loss of a hold that was asked back, unless it has ended already. The server still has it, and its user may
    /// still rely on it, until the guard is gone.
    pub(crate) fn lose_asked(&self) {
        self.update(None, |state, wakes| {
            if state.alive() {
                state.lingers = state.phase == Phase::Held;
                state.latch(LossReason::Asked, wakes);
            }
        });
    }

    /// Resolves for the worker when no user has the guard of a lost hold that was asked back.
    pub(crate) fn poll_let_go(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if !state.lingers {
            return Poll::Ready(());
        }
        state.worker = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Notes that nothing is left of a lost hold that was asked back, or will be in a moment. Its user may go by the end that it has,
    /// which its session must not move from now on.
    pub(crate) fn is_over(&self, now: Moment) {
        let mut state = self.state.lock();
        if state.phase == Phase::Lost(LossReason::Asked) {
            let end = state.end(now).filter(|end| now.has_reached(*end));
            state.valid_until = Some(end.unwrap_or(now));
        }
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
        let extended = self.count_with(valid_until, now);
        if extended {
            self.renewal_succeeded();
        }
        extended
    }

    /// Adopts a lease as [`extend`](Self::extend) does, which no renewal has confirmed: a renewal that fails goes on failing.
    pub(crate) fn count_with(&self, valid_until: Option<Moment>, now: Moment) -> bool {
        self.update(Some(now), |state, wakes| {
            let alive = state.alive();
            if alive {
                let known = state.valid_until.map(|known| known.seen_from(now));
                let is_sooner = |end: Moment| known.is_none_or(|known| end.seen_from(now) < known);
                if valid_until.is_some_and(is_sooner) {
                    // It may be waiting for the end that was known, while whoever has the claim never goes on. If it renews by itself,
                    // that goes on.
                    wakes.wakers.extend(state.worker.take());
                }
                state.valid_until = valid_until;
                state.renewed_for =
                    valid_until.map(|end| end.seen_from(now).saturating_duration_since(now.at));
            }
            alive
        })
    }

    /// Brings the end of its lease forward, since a request is about to be sent that may do so at the server. Changes nothing and
    /// returns `false` if the lease ends before anyway. The worker may be waiting for its present end.
    pub(crate) fn shorten(&self, valid_until: Moment, now: Moment) -> bool {
        self.update(Some(now), |state, wakes| {
            let end = valid_until.seen_from(now);
            let known = state.valid_until.map(|known| known.seen_from(now));
            let shortens = state.alive() && known.is_some_and(|known| end < known);
            if shortens {
                state.valid_until = Some(valid_until);
                state.renewed_for = Some(end.saturating_duration_since(now.at));
                state.rouse_worker(wakes);
            }
            shortens
        })
    }

    /// Resolves for the worker when the lease that was proven last does not end at `known`.
    pub(crate) fn poll_moved(&self, known: Option<Moment>, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.valid_until != known {
            return Poll::Ready(());
        }
        state.keep_worker(cx);
        Poll::Pending
    }

    /// Notes that a renewal succeeded whose lease is not adopted.
    pub(crate) fn renewal_succeeded(&self) {
        self.state.lock().renewal_failing = false;
    }

    /// Notes that a renewal failed, and wakes the watchers as an early warning. The lease goes on until it ends.
    pub(crate) fn renewal_failed(&self) {
        self.update(None, State::renewal_fails);
    }

    /// Notes the same of one that is overdue for the lease that ends then, unless another lease has been proven meanwhile.
    pub(crate) fn renewal_overdue(&self, end: Moment) {
        self.update(None, |state, wakes| {
            if state.valid_until == Some(end) {
                state.renewal_fails(wakes);
            }
        });
    }

    /// Returns what is left of the hold if its last renewal failed, or it is not renewed any more.
    pub(crate) fn renewal_failing(&self, now: Moment) -> Option<Duration> {
        let state = self.state.lock();
        let ends = (state.renewal_failing || state.limit_is_over(now)).then(|| state.end(now));
        let left = |end: Option<Moment>| {
            end.map_or(Duration::MAX, |end| {
                end.seen_from(now).saturating_duration_since(now.at)
            })
        };
        ends.filter(|_| state.alive()).map(left)
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
        state.keep_worker(cx);
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
