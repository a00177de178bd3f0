//! The queue of one lock, in one mode, of one client: its waiters, the slot that lets one of them go to the server, and its holds.

use std::{
    future::Future,
    num::NonZeroU64,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use crate::{
    Error, FencingToken, LockId, LockName, LossReason, Result,
    driver::{
        cell::Phase,
        contender::Contender,
        core::{Core, GoesOn},
        hold::Hold,
        moment::Moment,
        register::Register,
        request::AcquireRequest,
        slot_queue::{Offer, SlotQueue, Ticket, Turn},
    },
    spi::{Mode, OwnerId},
    sync::Mutex,
};

#[derive(Debug)]
pub(crate) struct LockQueue {
    pub(crate) core: Arc<Core>,
    pub(crate) id: LockId,
    pub(crate) mode: Mode,
    state: Mutex<QueueState>,
    /// The slot's owner holds the lock or is releasing it: until its lease is over, those behind it need no server to know that the lock
    /// is taken.
    is_holding: AtomicBool,
    /// Since the last claim was opened, a waiter has joined, or was still queued when another got the slot. A hint only: the
    /// next claim reserves tokens for hand-offs then.
    was_waited_in: AtomicBool,
    /// One of those behind the slot's owner asks the server for all of them.
    is_asking: AtomicBool,
    /// Somebody may be waiting. Written under the state's lock, read without it at the end of a hold. A waiter that this read
    /// misses gets no hand-off, but gets the slot.
    has_waiters: AtomicBool,
}

#[derive(Debug, Default)]
struct QueueState {
    slot: SlotQueue<Arc<AcquireRequest>, Hold>,
    generation: SlotGeneration,
    last_reply: LastReply,
    /// The number of contenders that hold nothing yet. Closing the client waits for them.
    contending: usize,
    register: Register,
    /// Ids for the next claims.
    owners: Vec<u128>,
}

impl QueueState {
    /// Takes the slot if it is free, and counts a contender.
    fn enter(&mut self) -> Option<SlotGeneration> {
        let entered = self.slot.enter().then_some(self.generation);
        self.contending += usize::from(entered.is_some());
        entered
    }
}

/// The number of times that the slot has been given up. To give it up, name the generation in which you got it: a second time
/// then does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotGeneration(NonZeroU64);

impl SlotGeneration {
    /// The first is number one, so that an `Option` of it is no larger: each hold keeps three of them.
    const FIRST: Self = Self(NonZeroU64::MIN);

    fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl Default for SlotGeneration {
    fn default() -> Self {
        Self::FIRST
    }
}

/// The backend's last word on this lock. It decides which error a waiter gets when its time is over.
#[derive(Clone, Debug, Default)]
pub(crate) enum LastReply {
    #[default]
    Unknown,
    /// It was so at that moment.
    Taken(Instant),
    Failed(Arc<str>),
}

/// Says that the lease has just been renewed for the next holder, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewed {
    No,
    Yes,
}

/// The result of passing a hold on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassOn {
    Done,
    /// No waiter is here that it fits.
    NoHeir,
    /// A waiter is here, but too little is left of the lease, or the hold may be gone.
    Stale,
}

impl LockQueue {
    pub(crate) fn new(core: Arc<Core>, id: LockId, mode: Mode) -> Self {
        Self {
            core,
            id,
            mode,
            state: Mutex::default(),
            is_holding: AtomicBool::new(false),
            was_waited_in: AtomicBool::new(false),
            is_asking: AtomicBool::new(false),
            has_waiters: AtomicBool::new(false),
        }
    }

    pub(crate) fn name(&self) -> &LockName {
        self.id.name()
    }

    pub(crate) fn backend(&self) -> &'static str {
        self.core.info.name
    }

    pub(crate) fn is_exclusive(&self) -> bool {
        self.mode == Mode::Exclusive
    }

    /// Takes the slot if it is free.
    pub(crate) fn enter(request: &Arc<AcquireRequest>) -> Option<Contender> {
        let slot = request.queue.state.lock().enter()?;
        Some(Contender::counted(request, Some(slot)))
    }

    /// Contends without the slot, beside its owner.
    pub(crate) fn bypass(request: &Arc<AcquireRequest>) -> Contender {
        request.queue.state.lock().contending += 1;
        Contender::counted(request, None)
    }

    /// Takes the slot if it is free, else queues up for it. This is one step: a slot that was given up in between would wake
    /// nobody.
    pub(crate) fn enter_or_join(request: &Arc<AcquireRequest>) -> Result<Contender, Waiter<'_>> {
        let queue = &request.queue;
        let mut state = queue.state.lock();
        if let Some(slot) = state.enter() {
            drop(state);
            return Ok(Contender::counted(request, Some(slot)));
        }
        let ticket = state.slot.join(request.clone());
        queue.has_waiters.store(true, Ordering::Relaxed);
        drop(state);
        queue.was_waited_in.store(true, Ordering::Relaxed);
        Err(Waiter {
            request,
            ticket: Some(ticket),
        })
    }

    /// Says that a claim which is opened now is likely to have heirs. This is a guess, and decides only what is reserved for
    /// them.
    pub(crate) fn take_was_waited_in(&self) -> bool {
        self.was_waited_in.load(Ordering::Relaxed) && self.was_waited_in.swap(false, Ordering::Relaxed)
    }

    /// Draws an id for a new claim. A queue that is used again takes several at once from the stock that the client's queues
    /// share.
    pub(crate) fn owner(&self) -> Result<OwnerId> {
        const AT_ONCE: usize = 8;

        let mut state = self.state.lock();
        if state.owners.is_empty() {
            let is_first = state.generation == SlotGeneration::FIRST;
            let many = if is_first { 1 } else { AT_ONCE };
            self.core.owners.draw(self.backend(), many, &mut state.owners)?;
        }
        let owner = state.owners.pop().map(OwnerId::new);
        owner.ok_or_else(|| Error::permanent(self.backend(), "acquire", "no random numbers"))
    }

    /// One exchange with the server about this lock, bounded as [`Core::within`].
    pub(crate) async fn exchange<T>(
        &self,
        operation: &'static str,
        goes_on: GoesOn,
        limit: impl FnOnce() -> Instant,
        exchange: impl Future<Output = Result<T>> + Unpin,
    ) -> Result<T> {
        let done = self.core.within(operation, goes_on, limit, exchange).await;
        done.and_then(|done| done.unwrap_or_else(|| Err(self.core.no_answer(operation))))
            .map_err(|err| err.for_lock(self.name()))
    }

    pub(crate) fn last_reply(&self) -> LastReply {
        let state = self.state.lock();
        if self.is_known_taken(&state) {
            return LastReply::Taken(Instant::now());
        }
        state.last_reply.clone()
    }

    /// Of a release without an answer, nobody knows more once the lease is over.
    fn is_known_taken(&self, state: &QueueState) -> bool {
        self.is_holding.load(Ordering::Acquire) && state.register.lasts()
    }

    /// Lets the caller ask the server for all that are behind the slot's owner, unless another does.
    pub(crate) fn begin_asking(&self) -> Option<Asking<'_>> {
        (!self.is_asking.swap(true, Ordering::AcqRel)).then(|| Asking(self))
    }

    /// Notes it for those who wait here.
    pub(crate) fn set_last_reply(&self, reply: LastReply) {
        let mut state = self.state.lock();
        // An answer that comes after a grant is to a question from before.
        if !state.slot.is_idle() && !self.is_known_taken(&state) {
            state.last_reply = reply;
        }
    }

    /// Notes that the slot's owner has been granted the lock.
    pub(crate) fn begin_holding(&self) {
        self.is_holding.store(true, Ordering::Release);
    }

    /// Passes the substance of `ended` to the first waiter, if it fits: as a hold of its own, with the next token and the same
    /// lease. That leaves `contender` empty.
    ///
    /// A lease that has `just` been renewed does for any waiter. Otherwise a waiter that will not renew needs a fresh one, and
    /// no waiter gets one that is in doubt.
    pub(crate) fn pass_on(
        &self,
        ended: &Hold,
        contender: &mut Contender,
        now: Moment,
        just: Renewed,
    ) -> PassOn {
        if !self.has_waiters.load(Ordering::Relaxed) {
            return PassOn::NoHeir;
        }
        let mut state = self.state.lock();
        let heir = state.slot.first().filter(|heir| contender.may_be_passed_to(heir));
        let (Some(heir), Some(lease), Some(token)) = (
            heir.cloned(),
            contender.lease,
            contender.spare_tokens.clone().next(),
        ) else {
            return PassOn::NoHeir;
        };
        let lasts = heir.renew || lease.length.is_none() || just == Renewed::Yes;
        // A renewal that failed may have taken a hint with it.
        let is_doubted = contender.is_doubted || contender.renewing_since.is_some();
        if !lasts || is_doubted || !lease.is_fresh(now) {
            return PassOn::Stale;
        }
        let mut passed = contender.take();
        passed.request = heir.clone();
        passed.spare_tokens.next();
        passed.handoffs += 1;
        passed.most_handoffs = passed.most_handoffs.min(heir.local_handoffs);
        if let Some(claim) = &mut passed.claim {
            claim.passed_on(FencingToken::new(token));
        }
        let passed = Hold::new(Phase::Offered, heir, token, passed, &lease);
        let (before, adopt_at) = state.register.replace(ended, &passed, now.at);
        let waker = state.slot.hand_off(passed.clone());
        drop(state);
        drop(before);
        passed.queue().is_registered(&passed, adopt_at);
        waker.into_iter().for_each(Waker::wake);
        PassOn::Done
    }

    /// Registers a contender's new hold, which the worker keeps alive from its time of adoption on.
    pub(crate) fn register(self: &Arc<Self>, hold: &Hold, now: Instant) {
        let mut state = self.state.lock();
        state.contending -= 1;
        if self.is_holding.load(Ordering::Relaxed) {
            // What was heard before the grant says nothing once the hold is over.
            state.last_reply = LastReply::Unknown;
        }
        let adopt_at = state.register.enter(hold, now);
        drop(state);
        self.is_registered(hold, adopt_at);
    }

    /// Uncounts a contender that gives up.
    pub(crate) fn retreat(&self) {
        self.state.lock().contending -= 1;
        self.notify_if_closed();
    }

    /// Wakes the one who closes the client and waits until nothing is left here.
    fn notify_if_closed(&self) {
        if self.core.is_closed() {
            self.core.worker.notify_idle();
        }
    }

    fn is_registered(self: &Arc<Self>, hold: &Hold, adopt_at: Option<Instant>) {
        if let Some(at) = adopt_at {
            self.core.worker.adopt_from(self, at);
        }
        // A worker that ends says so first and looks into the registers then. A hold that it misses there sees that it has died.
        if self.core.worker.has_died() {
            hold.cell.lose(LossReason::Disconnected);
            self.unregister(hold);
        }
    }

    /// Forgets a hold that has ended. A second time does nothing.
    pub(crate) fn unregister(&self, hold: &Hold) {
        self.end(hold, None);
    }

    /// Forgets a hold that has ended, and gives up the `slot` that it had.
    pub(crate) fn end(&self, hold: &Hold, slot: Option<SlotGeneration>) {
        let mut state = self.state.lock();
        let waker = slot.and_then(|slot| self.pass_locked(&mut state, slot));
        let left = state.register.leave(hold);
        drop(state);
        waker.into_iter().for_each(Waker::wake);
        if !matches!(left, Some((_, true))) {
            // The worker has seen it, and has nothing left to keep alive.
            hold.cell.dismiss_worker();
        }
        drop(left);
        self.notify_if_closed();
    }

    /// Returns the holds that the worker has not seen yet and that have lasted long enough by `now`; all of them if the client
    /// is closed. Has the worker look at the others in time.
    pub(crate) fn adopt(self: &Arc<Self>, now: Instant) -> Vec<Hold> {
        let by = (!self.core.is_closed()).then_some(now);
        let (adopted, next) = self.state.lock().register.adopt(by);
        if let Some(at) = next {
            self.core.worker.adopt_from(self, at);
        }
        adopted
    }

    pub(crate) fn holds(&self) -> Vec<Hold> {
        self.state.lock().register.holds()
    }

    /// Says that nobody contends and nothing is held. It stays so if the client is closed.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.contending == 0 && state.register.is_empty()
    }

    /// Takes back a hold that was lost before its waiter accepted it.
    pub(crate) fn withdraw(&self, hold: &Hold) {
        let is_it = |offered: &Hold| Arc::ptr_eq(&offered.record, &hold.record);
        let withdrawn = self.state.lock().slot.withdraw(is_it);
        drop(withdrawn);
    }

    /// Gives up the slot of this generation, unless that has been done already.
    pub(crate) fn pass(&self, slot: SlotGeneration) {
        let waker = self.pass_locked(&mut self.state.lock(), slot);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Gives up the slot of a hold that was lost: nobody here knows any more that the lock is taken.
    pub(crate) fn pass_after_loss(&self, slot: SlotGeneration) {
        let mut state = self.state.lock();
        if state.generation == slot {
            self.is_holding.store(false, Ordering::Release);
        }
        let waker = self.pass_locked(&mut state, slot);
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    #[must_use]
    fn pass_locked(&self, state: &mut QueueState, slot: SlotGeneration) -> Option<Waker> {
        if state.generation != slot {
            return None;
        }
        state.generation = state.generation.next();
        let waker = state.slot.pass();
        if state.slot.is_idle() {
            state.last_reply = LastReply::Unknown;
            self.has_waiters.store(false, Ordering::Relaxed);
        } else if self.is_known_taken(state) {
            // The last that the others know is that this client had it.
            state.last_reply = LastReply::Taken(Instant::now());
        }
        self.is_holding.store(false, Ordering::Release);
        waker
    }

    /// Turns all waiters away.
    pub(crate) fn close(&self) {
        let wakers = self.state.lock().slot.close();
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// The right to ask the server for all that are behind the slot's owner.
#[derive(Debug)]
#[must_use]
pub(crate) struct Asking<'a>(&'a LockQueue);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.is_asking.store(false, Ordering::Release);
    }
}

impl Drop for LockQueue {
    fn drop(&mut self) {
        self.core.forget_queue(&self.id, self.mode);
    }
}

/// A waiter in a lock's queue. Dropping it leaves the queue, and passes on what it had been offered.
#[derive(Debug)]
#[must_use]
pub(crate) struct Waiter<'a> {
    request: &'a Arc<AcquireRequest>,
    ticket: Option<Ticket>,
}

/// The result of waiting in the queue.
#[derive(Debug)]
pub(crate) enum WaitOutcome {
    /// The slot: go and contend.
    Slot(Contender),
    /// A hold that was passed on. It still has to be accepted.
    Hold(Hold),
    /// An offer lapsed before it was looked at: join again.
    Lapsed,
    /// The client is closed, or its runtime has ended.
    Closed,
}

impl Future for Waiter<'_> {
    type Output = WaitOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<WaitOutcome> {
        let Some(ticket) = self.ticket else {
            return Poll::Ready(WaitOutcome::Lapsed);
        };
        let queue = &self.request.queue;
        let mut state = queue.state.lock();
        let turn = state.slot.poll(ticket, cx.waker());
        let has_heir = state.slot.first().is_some();
        let slot = state.generation;
        state.contending += usize::from(matches!(turn, Turn::Offered(Offer::Slot)));
        drop(state);
        let outcome = match turn {
            Turn::Wait => return Poll::Pending,
            Turn::Offered(Offer::Slot) => {
                if has_heir {
                    queue.was_waited_in.store(true, Ordering::Relaxed);
                }
                WaitOutcome::Slot(Contender::counted(self.request, Some(slot)))
            }
            Turn::Offered(Offer::Hold(hold)) => WaitOutcome::Hold(hold),
            Turn::Lapsed => WaitOutcome::Lapsed,
            Turn::Closed => WaitOutcome::Closed,
        };
        self.ticket = None;
        Poll::Ready(outcome)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        let queue = &self.request.queue;
        let mut state = queue.state.lock();
        let (offer, slot) = (state.slot.leave(ticket), state.generation);
        drop(state);
        match offer {
            None => {}
            Some(Offer::Slot) => queue.pass(slot),
            Some(Offer::Hold(hold)) => hold.abandon(),
        }
    }
}
