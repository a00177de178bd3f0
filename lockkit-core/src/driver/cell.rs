//! The life of one hold. Sans-IO: time comes in as an argument, tasks are woken through their wakers.
//!
//! ```text
//! Offered ──accept──▶ Held ──begin_release──▶ Releasing
//!    │                  │
//!    └──────lose────────┴──▶ Lost (latched for good)
//! ```
//!
//! The cell also keeps what the hold is made of, a `C` with the backend's claim in it. It is parked here, lent to one
//! user at a time, and comes back when the loan is dropped, at whatever await that may be. The *attendant* (the
//! client's worker) borrows it for as long as nobody else wants it; everyone else [reclaims](HoldCell::reclaim) it.

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

/// Where a hold is in its life.
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
    /// The session that it ends with besides, whatever lease was told last.
    session: Option<SessionProof>,
    /// The length of the lease when a renewal last proved it.
    renewed_for: Option<Duration>,
    renewal_failing: bool,
    parked: Option<C>,
    /// Nobody releases the claim any more.
    discards: bool,
    /// How many wait for the claim; the attendant makes way for them.
    wanting: u32,
    wanting_wakers: Vec<Waker>,
    attendant: Option<Waker>,
    /// Grows when the attendant should look again.
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

/// Wakers are called when the lock on the state has been let go.
#[derive(Default)]
struct Wakes {
    attendant: Option<Waker>,
    others: Vec<Waker>,
    /// Wait for what will never happen any more.
    forgotten: Vec<Watcher>,
}

impl Wakes {
    fn wake(self) {
        if let Some(waker) = self.attendant {
            waker.wake();
        }
        self.others.into_iter().for_each(Waker::wake);
        drop(self.forgotten);
    }
}

impl<C> State<C> {
    fn alive(&self) -> bool {
        matches!(self.phase, Phase::Offered | Phase::Held)
    }

    /// The one way into `Lost`.
    fn latch(&mut self, reason: LossReason) -> Wakes {
        self.phase = Phase::Lost(reason);
        Wakes {
            attendant: self.rouse(),
            others: self.watchers.drain(..).map(|watcher| watcher.waker).collect(),
            forgotten: Vec::new(),
        }
    }

    /// The end that is no loss.
    fn begin_release(&mut self) -> Wakes {
        self.phase = Phase::Releasing;
        let ended = self.watchers.extract_if(.., |watcher| watcher.of == Event::End);
        Wakes {
            attendant: None,
            others: ended.map(|watcher| watcher.waker).collect(),
            forgotten: std::mem::take(&mut self.watchers),
        }
    }

    fn expire(&mut self, now: Moment) -> Wakes {
        if !self.alive() {
            return Wakes::default();
        }
        if let Some(Err(reason)) = self.session_proof() {
            return self.latch(reason);
        }
        if self.end(now).is_some_and(|end| now.has_reached(end)) {
            return self.latch(LossReason::Expired);
        }
        Wakes::default()
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

    fn rouse(&mut self) -> Option<Waker> {
        self.version = self.version.wrapping_add(1);
        self.attendant.take()
    }
}

impl<C> HoldCell<C> {
    /// A hold with a lease until then, which ends with what its session proves, too.
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
                attendant: None,
                version: 0,
                watchers: Vec::new(),
                next_watcher: 0,
            }),
        }
    }

    /// The session that it ends with besides its lease.
    pub(crate) fn session(&self) -> Option<SessionProof> {
        self.state.lock().session.clone()
    }

    /// Runs `f` on the state with everything that is due at `now` already done, then wakes whom that concerns.
    fn update<T>(&self, now: Option<Moment>, f: impl FnOnce(&mut State<C>) -> (T, Wakes)) -> T {
        let mut state = self.state.lock();
        let expiry = now.map(|now| state.expire(now));
        let (value, wakes) = f(&mut state);
        drop(state);
        if let Some(expiry) = expiry {
            expiry.wake();
        }
        wakes.wake();
        value
    }

    /// Where it is at `now`. A lease that ran out is latched as lost here, whoever asks first.
    pub(crate) fn phase(&self, now: Moment) -> Phase {
        self.update(Some(now), |state| (state.phase, Wakes::default()))
    }

    /// Where it was when something last happened to it, whatever the clock says.
    pub(crate) fn last_phase(&self) -> Phase {
        self.state.lock().phase
    }

    /// The end that it was told last.
    pub(crate) fn valid_until(&self) -> Option<Moment> {
        self.state.lock().valid_until
    }

    /// The end of it, as far as is known at `now`.
    pub(crate) fn end(&self, now: Moment) -> Option<Moment> {
        self.state.lock().end(now)
    }

    /// The length of the lease when a renewal last proved it; `None` if none has yet.
    pub(crate) fn renewed_for(&self) -> Option<Duration> {
        self.state.lock().renewed_for
    }

    /// The waiter to whom it was offered takes it. `false` if it was lost on the way.
    pub(crate) fn accept(&self, now: Moment) -> bool {
        self.update(Some(now), |state| {
            if state.phase != Phase::Offered {
                return (false, Wakes::default());
            }
            state.phase = Phase::Held;
            let attendant = state.rouse();
            let wakes = Wakes {
                attendant,
                ..Wakes::default()
            };
            (true, wakes)
        })
    }

    /// The guard is given up, which those are told who wait for its end. The claim comes along if it is at hand; otherwise
    /// it has to be reclaimed. The attendant is not told yet: to wake it would come before the request that the next
    /// holder waits for.
    pub(crate) fn begin_release(&self, now: Moment) -> Result<Option<C>, LossReason> {
        self.update(Some(now), |state| match state.phase {
            Phase::Lost(reason) => (Err(reason), Wakes::default()),
            Phase::Offered | Phase::Held | Phase::Releasing => {
                let wakes = state.begin_release();
                (Ok(state.parked.take()), wakes)
            }
        })
    }

    /// The attendant has nothing left to look after.
    pub(crate) fn dismiss(&self) {
        let attendant = self.state.lock().rouse();
        if let Some(waker) = attendant {
            waker.wake();
        }
    }

    /// The claim of a hold that is being released, for good, if it is at hand.
    pub(crate) fn take(&self) -> Option<C> {
        self.state.lock().parked.take()
    }

    /// The claim of a lost hold that nobody will release, if it is at hand. If not, it is dropped when it comes home.
    pub(crate) fn discard(&self) -> Option<C> {
        let mut state = self.state.lock();
        state.discards = true;
        state.parked.take()
    }

    /// Latches a loss, unless the hold has ended already.
    pub(crate) fn lose(&self, reason: LossReason) -> bool {
        self.update(None, |state| {
            if !state.alive() {
                return (false, Wakes::default());
            }
            (true, state.latch(reason))
        })
    }

    /// A hold that was offered has not been taken in time.
    pub(crate) fn lapse(&self) {
        self.update(None, |state| {
            let lapsed = state.phase == Phase::Offered;
            let wakes = if lapsed {
                state.latch(LossReason::Expired)
            } else {
                Wakes::default()
            };
            ((), wakes)
        });
    }

    /// A renewal was answered. If the lease ran out before the answer came, it revives nothing.
    pub(crate) fn extend(&self, valid_until: Option<Moment>, now: Moment) -> bool {
        self.update(Some(now), |state| {
            let alive = state.alive();
            if alive {
                state.valid_until = valid_until;
                state.renewed_for =
                    valid_until.map(|end| end.seen_from(now).saturating_duration_since(now.at));
                state.renewal_failing = false;
            }
            (alive, Wakes::default())
        })
    }

    /// A renewal was answered, and the lease stays what it was.
    pub(crate) fn answered(&self) {
        self.state.lock().renewal_failing = false;
    }

    /// A renewal failed; the lease goes on until it ends. Watchers are told as an early warning.
    pub(crate) fn renewal_failed(&self) {
        self.update(None, |state| {
            let first = state.alive() && !std::mem::replace(&mut state.renewal_failing, true);
            let others = if first {
                state.watchers.drain(..).map(|watcher| watcher.waker).collect()
            } else {
                Vec::new()
            };
            let wakes = Wakes {
                others,
                ..Wakes::default()
            };
            ((), wakes)
        });
    }

    /// If the last renewal failed: how long the hold lasts all the same.
    pub(crate) fn renewal_failing(&self, now: Moment) -> Option<Duration> {
        let state = self.state.lock();
        let left = || {
            state.valid_until.map_or(Duration::MAX, |end| {
                end.seen_from(now).saturating_duration_since(now.at)
            })
        };
        (state.alive() && state.renewal_failing).then(left)
    }

    /// Keeps `waker` to be called at this event, if that can still happen. `watcher` is the caller's place for it.
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

    /// Forgets the waker kept for `watcher`.
    pub(crate) fn unwatch(&self, watcher: u32) {
        self.state.lock().watchers.retain(|known| known.id != watcher);
    }

    /// Borrows the claim as soon as it is at hand, ahead of the attendant.
    pub(crate) fn reclaim(&self) -> Reclaim<'_, C> {
        Reclaim {
            cell: self,
            counted: false,
        }
    }

    /// Lends the claim to the attendant; `None` once the hold is over.
    pub(crate) async fn attend(&self) -> Option<Loan<'_, C>> {
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
                    attendant: true,
                }));
            }
            state.attendant = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// What the attendant remembers, to be told of changes since.
    pub(crate) fn version(&self) -> u32 {
        self.state.lock().version
    }

    /// Resolves for the attendant when something has changed since `version`, or somebody wants the claim.
    pub(crate) fn poll_changed(&self, version: u32, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.version != version || state.wanting > 0 {
            return Poll::Ready(());
        }
        match &mut state.attendant {
            Some(known) => known.clone_from(cx.waker()),
            unset => *unset = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    fn park(&self, claim: C, by_attendant: bool) {
        let discarded = self.update(None, |state| {
            if state.discards {
                return (Some(claim), Wakes::default());
            }
            state.parked = Some(claim);
            // The attendant looks again by itself after it has parked.
            let attendant = if by_attendant || state.wanting > 0 {
                None
            } else {
                state.attendant.take()
            };
            let others = std::mem::take(&mut state.wanting_wakers);
            let wakes = Wakes {
                attendant,
                others,
                ..Wakes::default()
            };
            (None, wakes)
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

/// Waits for the claim. Dropping it gives up the place.
#[must_use]
pub(crate) struct Reclaim<'a, C> {
    cell: &'a HoldCell<C>,
    counted: bool,
}

impl<'a, C> Future for Reclaim<'a, C> {
    type Output = Loan<'a, C>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let cell = self.cell;
        let mut state = cell.state.lock();
        if let Some(claim) = state.parked.take() {
            return Poll::Ready(Loan {
                cell,
                claim: Some(claim),
                attendant: false,
            });
        }
        if !state
            .wanting_wakers
            .iter()
            .any(|known| known.will_wake(cx.waker()))
        {
            state.wanting_wakers.push(cx.waker().clone());
        }
        let attendant = if self.counted {
            None
        } else {
            state.wanting += 1;
            self.counted = true;
            state.rouse()
        };
        drop(state);
        if let Some(waker) = attendant {
            waker.wake();
        }
        Poll::Pending
    }
}

impl<C> Drop for Reclaim<'_, C> {
    fn drop(&mut self) {
        if !self.counted {
            return;
        }
        self.cell.update(None, |state| {
            state.wanting -= 1;
            let attendant = if state.wanting == 0 { state.rouse() } else { None };
            let wakes = Wakes {
                attendant,
                ..Wakes::default()
            };
            ((), wakes)
        });
    }
}

/// The claim on loan. It goes back to its cell when dropped.
pub(crate) struct Loan<'a, C> {
    cell: &'a HoldCell<C>,
    claim: Option<C>,
    attendant: bool,
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
            self.cell.park(claim, self.attendant);
        }
    }
}
