//! One name and mode of one client: the queue of its waiters, and the slot that lets one of them go to the server.

use std::{
    fmt,
    future::{Future, poll_fn},
    ops::RangeInclusive,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    Error, FencingToken, LockId, LockName, LossReason, Result,
    client::Core,
    driver::{
        cell::Phase,
        hold::Hold,
        moment::{Moment, Proof},
        queue::{Offer, Queue, Ticket, Turn},
        register::Register,
    },
    spi::{Claim, Mode, OwnerId},
    sync::Mutex,
};

/// What an acquisition asks for: which lock, and how, with every default filled in.
pub(crate) struct Terms {
    pub(crate) line: Arc<Line>,
    pub(crate) ttl: Duration,
    pub(crate) wait: Option<Duration>,
    pub(crate) renew: bool,
    pub(crate) op_timeout: Duration,
    pub(crate) label: Option<Arc<str>>,
    pub(crate) local_handoffs: u32,
    /// How long a hold may live before the worker watches over it.
    pub(crate) adopt_after: Duration,
}

impl fmt::Debug for Terms {
    /// Without the line, whose waiters have terms themselves.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Terms")
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}

impl Terms {
    /// One attempt and no waiting.
    pub(crate) fn once(&self) -> bool {
        self.wait == Some(Duration::ZERO)
    }

    /// Whether a hold that was claimed on these terms may be passed to a waiter with those: the server knows the
    /// ttl and the label.
    pub(crate) fn fits(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || (self.ttl == other.ttl && self.label == other.label)
    }
}

#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) core: Arc<Core>,
    pub(crate) id: LockId,
    pub(crate) mode: Mode,
    state: Mutex<LineState>,
    slot: AtomicU8,
    /// Somebody has come to wait, or was left behind by whoever got the slot, since a claim was last opened.
    waited_in: AtomicBool,
    /// Somebody may be in the queue. Only changed under the state's lock, and read without it by whoever ends a hold: one who
    /// comes later than that look waits for the slot.
    is_queued_in: AtomicBool,
}

#[derive(Debug, Default)]
struct LineState {
    queue: Queue<Arc<Terms>, Hold>,
    answer: Answer,
    turn: SlotTurn,
    /// The number of those who are past the queue and hold nothing yet, which closing the client waits for.
    contending: usize,
    register: Register,
    /// Ids for the next claims.
    owners: Vec<u128>,
}

/// Counts how often the slot has been given up: whoever gives it up says in which turn it had it, so that to do so twice is
/// to do it once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotTurn(u64);

/// The backend's last word to this line, which decides what a waiter is told when its time runs out.
#[derive(Clone, Debug, Default)]
pub(crate) enum Answer {
    #[default]
    Unknown,
    Taken,
    Failed(Arc<str>),
}

/// What the slot is used for: while this client has a hold, or releases one, those behind it need no server to know that the
/// lock is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum SlotUse {
    Other = 0,
    Holding = 1,
    /// For a hold that nobody here waited for, and that is being released.
    Releasing = 2,
}

/// Says that a lease has been renewed for the next holder, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewed {
    No,
    Yes,
}

/// What came of passing a hold on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassOn {
    Done,
    /// Nobody waits here whom it fits.
    NoHeir,
    /// Somebody does, but too little is left of the lease, or it may be gone.
    Stale,
}

impl Line {
    pub(crate) fn new(core: Arc<Core>, id: LockId, mode: Mode) -> Self {
        Self {
            core,
            id,
            mode,
            state: Mutex::default(),
            slot: AtomicU8::new(SlotUse::Other as u8),
            waited_in: AtomicBool::new(false),
            is_queued_in: AtomicBool::new(false),
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

    pub(crate) fn set_slot_use(&self, to: SlotUse) {
        self.slot.store(to as u8, Ordering::Release);
    }

    /// Takes the slot if nobody has it.
    pub(crate) fn enter(terms: &Arc<Terms>) -> Option<Grip> {
        let mut state = terms.line.state.lock();
        let turn = state.queue.enter().then_some(state.turn)?;
        state.contending += 1;
        drop(state);
        Some(Grip::contending(terms, Some(turn)))
    }

    /// Contends beside whoever has the slot.
    pub(crate) fn bypass(terms: &Arc<Terms>) -> Grip {
        terms.line.state.lock().contending += 1;
        Grip::contending(terms, None)
    }

    /// Takes the slot if nobody has it, else queues up for it: in one step, since a slot that is given up in between
    /// would wake nobody.
    pub(crate) fn enter_or_join(terms: &Arc<Terms>) -> Result<Grip, InLine<'_>> {
        let mut state = terms.line.state.lock();
        if state.queue.enter() {
            let turn = state.turn;
            state.contending += 1;
            drop(state);
            return Ok(Grip::contending(terms, Some(turn)));
        }
        let ticket = state.queue.join(terms.clone());
        terms.line.is_queued_in.store(true, Ordering::Relaxed);
        drop(state);
        terms.line.waited_in.store(true, Ordering::Relaxed);
        Err(InLine {
            terms,
            ticket: Some(ticket),
        })
    }

    /// Says that a claim which is opened now is likely to have heirs. Only a guess: it decides what is reserved for them.
    pub(crate) fn was_waited_in(&self) -> bool {
        self.waited_in.load(Ordering::Relaxed) && self.waited_in.swap(false, Ordering::Relaxed)
    }

    /// An id for a new claim. A line that is used again takes several at once from the client's stock, which all share.
    pub(crate) fn owner(&self) -> Result<OwnerId> {
        const AT_ONCE: usize = 8;

        let mut state = self.state.lock();
        if state.owners.is_empty() {
            let first = state.turn == SlotTurn::default();
            let many = if first { 1 } else { AT_ONCE };
            self.core.owners.draw(self.backend(), many, &mut state.owners)?;
        }
        let owner = state.owners.pop().map(OwnerId::new);
        owner.ok_or_else(|| Error::permanent(self.backend(), "acquire", "no random numbers"))
    }

    /// What the backend last said.
    pub(crate) fn answer(&self) -> Answer {
        if self.slot.load(Ordering::Acquire) != SlotUse::Other as u8 {
            return Answer::Taken;
        }
        self.state.lock().answer.clone()
    }

    pub(crate) fn set_answer(&self, answer: Answer) {
        self.state.lock().answer = answer;
    }

    /// Passes what `ended` was made of to the first waiter, as a hold of its own with the next token, on the lease as
    /// it is, and leaves `grip` empty. If there is no waiter that it fits, the slot counts as being given up.
    ///
    /// A lease that has `just` been renewed does for anyone. Otherwise a waiter that will not renew it gets it fresh, and nobody
    /// gets one that is in doubt.
    pub(crate) fn pass_on(&self, ended: &Hold, grip: &mut Grip, now: Moment, just: Renewed) -> PassOn {
        if !self.is_queued_in.load(Ordering::Relaxed) {
            self.set_slot_use(SlotUse::Releasing);
            return PassOn::NoHeir;
        }
        let mut state = self.state.lock();
        let heir = state.queue.first().filter(|heir| grip.may_be_passed_to(heir));
        let (Some(heir), Some(lease), Some(token)) = (heir.cloned(), grip.lease, grip.spare.clone().next())
        else {
            self.set_slot_use(SlotUse::Releasing);
            return PassOn::NoHeir;
        };
        let lasts = heir.renew || lease.length.is_none() || just == Renewed::Yes;
        if !lasts || grip.is_doubted || !lease.is_fresh(now) {
            return PassOn::Stale;
        }
        let mut passed = grip.take();
        passed.terms = heir.clone();
        passed.spare.next();
        passed.handoffs += 1;
        passed.most_handoffs = passed.most_handoffs.min(heir.local_handoffs);
        if let Some(claim) = &mut passed.claim {
            claim.passed_on(FencingToken::new(token));
        }
        let passed = Hold::new(Phase::Offered, heir, token, passed, &lease);
        let (before, adopt_at) = state.register.replace(ended, &passed, now.at);
        let waker = state.queue.hand_off(passed.clone());
        drop(state);
        drop(before);
        passed.terms.line.is_entered(&passed, adopt_at);
        if let Some(waker) = waker {
            waker.wake();
        }
        PassOn::Done
    }

    /// Has the worker watch over a contender's new hold from its time of adoption on.
    pub(crate) fn register(self: &Arc<Self>, hold: &Hold, now: Instant) {
        let mut state = self.state.lock();
        state.contending -= 1;
        let adopt_at = state.register.enter(hold, now);
        drop(state);
        self.is_entered(hold, adopt_at);
    }

    /// A contender gives up.
    fn retreat(&self) {
        self.state.lock().contending -= 1;
        self.look_if_closed();
    }

    /// Whoever closes the client waits for there to be nothing here.
    fn look_if_closed(&self) {
        if self.core.is_closed() {
            self.core.worker.look_whether_idle();
        }
    }

    fn is_entered(self: &Arc<Self>, hold: &Hold, adopt_at: Option<Instant>) {
        if let Some(at) = adopt_at {
            self.core.worker.adopt_from(self, at);
        }
        // Whoever ends the worker looks into the registers after it has said so, and what was entered later sees that.
        if self.core.worker.has_died() {
            hold.cell.lose(LossReason::Disconnected);
            self.unregister(hold);
        }
    }

    /// Forgets a hold that has ended. Twice is once.
    pub(crate) fn unregister(&self, hold: &Hold) {
        self.end(hold, None);
    }

    /// The same, and the slot is given up that the hold had in this `turn`.
    pub(crate) fn end(&self, hold: &Hold, turn: Option<SlotTurn>) {
        let mut state = self.state.lock();
        let left = state.register.leave(hold);
        let waker = turn.and_then(|turn| self.pass_in(&mut state, turn));
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        if !matches!(left, Some((_, true))) {
            // Whoever looks after it has nothing left to look after.
            hold.cell.dismiss();
        }
        drop(left);
        self.look_if_closed();
    }

    /// The holds that the worker has not seen yet and that have lasted long enough by `now`, or all if the client is closed. It
    /// looks at the others in time.
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

    /// Takes back a hold that lapsed before its waiter took it.
    pub(crate) fn withdraw(&self, hold: &Hold) {
        let withdrawn = self
            .state
            .lock()
            .queue
            .withdraw(|offered| Arc::ptr_eq(&offered.record, &hold.record));
        drop(withdrawn);
    }

    /// The slot is given up by whoever had it in this `turn`, unless it has been already.
    pub(crate) fn pass(&self, turn: SlotTurn) {
        let waker = self.pass_in(&mut self.state.lock(), turn);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    #[must_use]
    fn pass_in(&self, state: &mut LineState, turn: SlotTurn) -> Option<Waker> {
        if state.turn != turn {
            return None;
        }
        state.turn.0 += 1;
        let released = self.slot.load(Ordering::Relaxed) == SlotUse::Releasing as u8;
        let waker = state.queue.pass();
        if state.queue.is_idle() {
            state.answer = Answer::Unknown;
            self.is_queued_in.store(false, Ordering::Relaxed);
        } else if released {
            // For those behind it, "taken" is the last that was heard.
            state.answer = Answer::Taken;
        }
        self.set_slot_use(SlotUse::Other);
        waker
    }

    /// Turns all waiters away.
    pub(crate) fn close(&self) {
        let wakers = self.state.lock().queue.close();
        wakers.into_iter().for_each(std::task::Waker::wake);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.core.forget_line(&self.id, self.mode);
    }
}

/// A place in a line. Dropping it leaves the line, and passes on what had been offered.
#[derive(Debug)]
#[must_use]
pub(crate) struct InLine<'a> {
    terms: &'a Arc<Terms>,
    ticket: Option<Ticket>,
}

/// What waiting in line came to.
#[derive(Debug)]
pub(crate) enum Served {
    /// Go and contend.
    Slot(Grip),
    /// A hold that was passed on. It still has to be accepted.
    Hold(Hold),
    /// An offer lapsed before it was looked at: join again.
    Lapsed,
    /// The client is closed, or its runtime has ended.
    Closed,
}

impl Future for InLine<'_> {
    type Output = Served;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Served> {
        let Some(ticket) = self.ticket else {
            return Poll::Ready(Served::Lapsed);
        };
        let mut state = self.terms.line.state.lock();
        let turn = state.queue.poll(ticket, cx.waker());
        let has_heir = state.queue.first().is_some();
        let slot = state.turn;
        state.contending += usize::from(matches!(turn, Turn::Offered(Offer::Slot)));
        drop(state);
        let served = match turn {
            Turn::Wait => return Poll::Pending,
            Turn::Offered(Offer::Slot) => {
                if has_heir {
                    self.terms.line.waited_in.store(true, Ordering::Relaxed);
                }
                Served::Slot(Grip::contending(self.terms, Some(slot)))
            }
            Turn::Offered(Offer::Hold(hold)) => Served::Hold(hold),
            Turn::Lapsed => Served::Lapsed,
            Turn::Closed => Served::Closed,
        };
        self.ticket = None;
        Poll::Ready(served)
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        let mut state = self.terms.line.state.lock();
        let (offer, slot) = (state.queue.leave(ticket), state.turn);
        drop(state);
        match offer {
            None => {}
            Some(Offer::Slot) => self.terms.line.pass(slot),
            Some(Offer::Hold(hold)) => hold.abandon(),
        }
    }
}

/// A contender, and later what a hold is made of: the claim, the slot if it has it, and what was reserved.
///
/// Dropping it at any point is safe: a claim that the server may know of goes to the client's worker, which releases
/// it; the slot goes to the next waiter.
#[derive(Debug)]
#[must_use]
pub(crate) struct Grip {
    pub(crate) claim: Option<Box<dyn Claim>>,
    pub(crate) terms: Arc<Terms>,
    /// Tokens that the grant reserved for hand-offs.
    pub(crate) spare: RangeInclusive<u64>,
    /// The number of times that it has been passed on.
    pub(crate) handoffs: u32,
    /// The number of times that it may be, as the least generous of its holders has it.
    pub(crate) most_handoffs: u32,
    /// The last proof; `None` before the grant.
    pub(crate) lease: Option<Proof>,
    /// The server has hinted since then that the hold may be gone, and no renewal has been answered.
    pub(crate) is_doubted: bool,
    /// Whether the server may know of this claim, so that it has to be released.
    pub(crate) known: bool,
    slot: Option<SlotTurn>,
    /// It is counted among those who contend.
    contends: bool,
}

const NO_TOKENS: RangeInclusive<u64> = RangeInclusive::new(1, 0);

impl Grip {
    fn contending(terms: &Arc<Terms>, slot: Option<SlotTurn>) -> Self {
        let mut grip = Self::new(terms.clone(), slot);
        grip.contends = true;
        grip
    }

    fn new(terms: Arc<Terms>, slot: Option<SlotTurn>) -> Self {
        Self {
            claim: None,
            terms,
            spare: NO_TOKENS,
            handoffs: 0,
            most_handoffs: 0,
            lease: None,
            is_doubted: false,
            known: false,
            slot,
            contends: false,
        }
    }

    /// It contends no more, for it is to be registered.
    pub(crate) fn becomes_hold(&mut self) {
        self.contends = false;
    }

    pub(crate) fn has_slot(&self) -> bool {
        self.slot.is_some()
    }

    pub(crate) fn slot(&self) -> Option<SlotTurn> {
        self.slot
    }

    /// The slot, for whoever gives it up together with something else.
    pub(crate) fn take_slot(&mut self) -> Option<SlotTurn> {
        self.slot.take()
    }

    /// Says that turns are left for a hand-off, by the options of both, and it is a hold that can be handed off to this
    /// waiter.
    fn may_be_passed_to(&self, heir: &Terms) -> bool {
        self.has_slot()
            && self.terms.line.is_exclusive()
            && self.handoffs < self.most_handoffs.min(heir.local_handoffs)
            && self.terms.fits(heir)
            && !self.terms.line.core.is_closed()
    }

    /// Lets the next waiter of this client go to the server.
    pub(crate) fn pass_slot(&mut self) {
        if let Some(turn) = self.slot.take() {
            self.terms.line.pass(turn);
        }
    }

    /// Nothing of this claim is left on the server.
    pub(crate) fn settled(&mut self) {
        self.claim = None;
        self.known = false;
    }

    /// The same contender with everything moved out, so that dropping the rest does nothing.
    pub(crate) fn take(&mut self) -> Self {
        let mut taken = Self::new(self.terms.clone(), self.slot.take());
        taken.claim = self.claim.take();
        taken.spare = std::mem::replace(&mut self.spare, NO_TOKENS);
        taken.handoffs = self.handoffs;
        taken.most_handoffs = self.most_handoffs;
        taken.lease = self.lease;
        taken.is_doubted = self.is_doubted;
        taken.known = std::mem::take(&mut self.known);
        taken
    }
}

impl Drop for Grip {
    fn drop(&mut self) {
        if self.claim.is_some() && self.known {
            let abandoned = self.take();
            self.terms.line.core.worker.clean_up(abandoned);
        } else {
            self.pass_slot();
        }
        if self.contends {
            // After the worker knows what it came to.
            self.terms.line.retreat();
        }
    }
}

/// Resolves when `claim` hints that something has changed.
pub(crate) async fn hinted(claim: &mut Option<Box<dyn Claim>>) {
    match claim {
        Some(claim) => claim.notified().await,
        None => poll_fn(|_| Poll::Pending).await,
    }
}
