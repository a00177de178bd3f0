//! One task per client: it renews leases, notices losses, and releases what was dropped.
//!
//! A grant does not wake it. New holds are entered in the register of their queue, and the worker looks there a few
//! milliseconds later: a hold that is released before then never costs more than two entries there. The worker *adopts* those
//! that stay: a small future each. This one task polls all of them, so renewals that are due together go out together.

use std::{
    pin::{Pin, pin},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll, ready},
};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Notify, oneshot},
    time::{Instant, Sleep},
};

use crate::{
    Error, LockName, LossReason, Result,
    driver::{
        cell::{Loan, Phase},
        contender::Contender,
        core::Core,
        finish_release::{clean_up, finish_release},
        hold::Hold,
        lock_queue::LockQueue,
        moment::Moment,
        observe,
        timing::{self, HintBudget},
    },
    spi::SessionProof,
    sync::Mutex,
};

#[derive(Debug)]
pub(crate) struct Worker {
    core: Weak<Core>,
    backend: &'static str,
    state: Mutex<State>,
    /// `life` of the state, to be read without its lock.
    life: AtomicU8,
    work: Notify,
    idle: Notify,
    runtime: OnceLock<Handle>,
}

#[derive(Debug, Default)]
struct State {
    life: Life,
    /// The queues that have holds to adopt, and from when on. They may be gone by then.
    unadopted: Vec<(Instant, Weak<LockQueue>)>,
    adopt_at: Option<Instant>,
    jobs: Vec<Job>,
    /// The number of jobs taken up and not done yet.
    running: usize,
    /// No handle is left: end when there is nothing to do.
    orphaned: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
enum Life {
    #[default]
    Unborn = 0,
    Running = 1,
    /// Its runtime has ended.
    Dead = 2,
}

#[derive(Debug)]
enum Job {
    Release(Hold, Option<Contender>),
    Lost(Hold),
    CleanUp(Contender),
    /// Drops the sender when it is done.
    Announce(Arc<Core>, LockName, oneshot::Sender<()>),
}

impl Worker {
    /// The worker of `core`. It takes the runtime that it is made in, if any, as the one that the client lives on.
    pub(crate) fn new(core: Weak<Core>, backend: &'static str) -> Self {
        Self {
            core,
            backend,
            state: Mutex::default(),
            life: AtomicU8::new(Life::Unborn as u8),
            work: Notify::new(),
            idle: Notify::new(),
            runtime: Handle::try_current().map_or_else(|_| OnceLock::new(), OnceLock::from),
        }
    }

    /// Succeeds while the runtime that the client lives on goes on. The first call starts the task, whose end tells.
    ///
    /// # Errors
    /// [`Error::Backend`], the same for every backend, once that runtime has ended.
    pub(crate) fn lives(self: &Arc<Self>, operation: &'static str) -> Result<()> {
        // Where there is no runtime at all, none can have ended.
        let _ = self.begin(operation);
        if self.has_died() {
            return Err(self.has_ended(operation));
        }
        Ok(())
    }

    /// Starts the task, unless it has been started.
    ///
    /// # Errors
    /// [`Error::Backend`] if there is no runtime to start it on.
    pub(crate) fn begin(self: &Arc<Self>, operation: &'static str) -> Result<()> {
        if self.life.load(Ordering::Acquire) == Life::Unborn as u8 {
            let mut state = self.state.lock();
            let unborn = self.runtime_to_start_on(&mut state, operation)?;
            drop(state);
            self.start(unborn);
        }
        Ok(())
    }

    pub(crate) fn has_died(&self) -> bool {
        self.life.load(Ordering::Acquire) == Life::Dead as u8
    }

    fn has_ended(&self, operation: &'static str) -> Error {
        let cause = "the runtime that this client lives on has ended";
        Error::permanent(self.backend, operation, cause)
    }

    /// Looks into the register of `queue` at this time.
    pub(crate) fn adopt_from(&self, queue: &Arc<LockQueue>, at: Instant) {
        let mut state = self.state.lock();
        state.unadopted.push((at, Arc::downgrade(queue)));
        let sooner = state.adopt_at.is_none_or(|known| at < known);
        if sooner {
            state.adopt_at = Some(at);
        }
        drop(state);
        // Else it wakes in time by itself.
        if sooner {
            self.look_elsewhere();
        }
    }

    /// Wakes the task, on another thread than this one where there are several. A thread of the runtime keeps the task that it
    /// woke last to itself until its present task has to wait; and the task that has just been granted a lock may work for
    /// seconds before. A task that was woken earlier is open to all threads, and another thread is roused for it.
    fn look_elsewhere(&self) {
        self.work.notify_one();
        if let Ok(handle) = Handle::try_current()
            && handle.runtime_flavor() == RuntimeFlavor::MultiThread
        {
            drop(handle.spawn(std::future::ready(())));
        }
    }

    /// Releases a hold whose guard was dropped.
    pub(crate) fn release(self: &Arc<Self>, hold: Hold, contender: Option<Contender>) {
        self.submit(Job::Release(hold, contender));
    }

    /// Releases a claim that nobody waits for.
    pub(crate) fn clean_up(self: &Arc<Self>, contender: Contender) {
        self.submit(Job::CleanUp(contender));
    }

    /// Wakes the observers of the election that is held with the lock of this name. The receiver resolves after that; without it, it
    /// is done all the same.
    pub(crate) fn announce(self: &Arc<Self>, core: Arc<Core>, name: LockName) -> oneshot::Receiver<()> {
        let (done, told) = oneshot::channel();
        self.submit(Job::Announce(core, name, done));
        told
    }

    fn submit(self: &Arc<Self>, job: Job) {
        let mut state = self.state.lock();
        match self.runtime_to_start_on(&mut state, "release") {
            Ok(unborn) => {
                state.jobs.push(job);
                drop(state);
                self.start(unborn);
                self.work.notify_one();
            }
            Err(_) => {
                drop(state);
                job.give_up();
            }
        }
    }

    /// Returns a runtime if the task has not been started. The caller must start it once the lock is let go.
    fn runtime_to_start_on(&self, state: &mut State, operation: &'static str) -> Result<Option<Handle>> {
        match state.life {
            Life::Running => return Ok(None),
            Life::Dead => return Err(self.has_ended(operation)),
            Life::Unborn => {}
        }
        let handle = match self.runtime.get() {
            Some(handle) => handle.clone(),
            None => Handle::try_current().map_err(|err| Error::permanent(self.backend, operation, err))?,
        };
        self.live(state, Life::Running);
        Ok(Some(handle))
    }

    fn live(&self, state: &mut State, life: Life) {
        state.life = life;
        self.life.store(life as u8, Ordering::Release);
    }

    /// Starts the task. A runtime that has been shut down drops it at once, which takes the lock on the state.
    fn start(self: &Arc<Self>, unborn: Option<Handle>) {
        if let Some(handle) = unborn {
            let task = run(self.clone(), DiesWith(self.clone()));
            // Every hold has a timer and they may all be due at once: a budget per poll would only spin.
            handle.spawn(tokio::task::unconstrained(task));
        }
    }

    /// Adopts all holds at once.
    pub(crate) fn adopt_now(&self) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.unadopted.iter_mut().for_each(|(at, _)| *at = now);
        state.adopt_at = Some(now);
        drop(state);
        self.work.notify_one();
    }

    /// Resolves when `condition` is true. Every change that makes it true is followed by [`notify_idle`](Self::notify_idle).
    pub(crate) async fn when(&self, condition: impl Fn() -> bool) {
        loop {
            let mut notified = pin!(self.idle.notified());
            notified.as_mut().enable();
            if condition() {
                return;
            }
            notified.await;
        }
    }

    /// Says that it has nothing to do, and never will unless it is asked to.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.life == Life::Dead || (state.jobs.is_empty() && state.running == 0)
    }

    /// Has those who wait until nothing is left to do look again.
    pub(crate) fn notify_idle(&self) {
        self.idle.notify_waiters();
    }

    /// Ends the task once there is nothing to do, since the last handle is gone.
    pub(crate) fn orphan(&self) {
        self.state.lock().orphaned = true;
        self.work.notify_one();
    }

    fn take_work(&self, now: Instant) -> Work {
        let mut state = self.state.lock();
        let jobs = std::mem::take(&mut state.jobs);
        state.running += jobs.len();
        let mut queues = Vec::new();
        if state.adopt_at.is_some_and(|at| at <= now) {
            let due = state.unadopted.extract_if(.., |(at, _)| *at <= now);
            queues = due.map(|(_, queue)| queue).collect();
            state.adopt_at = state.unadopted.iter().map(|(at, _)| *at).min();
        }
        Work {
            jobs,
            queues,
            adopt_at: state.adopt_at,
            orphaned: state.orphaned,
        }
    }

    fn job_done(&self) {
        self.state.lock().running -= 1;
        self.notify_idle();
    }
}

struct Work {
    jobs: Vec<Job>,
    queues: Vec<Weak<LockQueue>>,
    adopt_at: Option<Instant>,
    orphaned: bool,
}

impl Job {
    async fn run(self) {
        match self {
            Self::Release(hold, contender) => {
                let request = hold.request.clone();
                if let Err(err) = finish_release(&hold, contender, hold.now()).await
                    && !err.is_lost()
                {
                    observe::release_failed(&request.queue, &err);
                }
                tell_observers(&request.queue).await;
            }
            Self::Lost(hold) => {
                let phase = hold.cell.last_phase();
                if let Phase::Lost(reason) = phase {
                    observe::lost(hold.queue(), reason);
                }
                // Until then nothing is released, so that nobody else is granted what its user may still be at work on.
                tokio::select! {
                    biased;
                    () = hold.let_go() => {}
                    () = hold.gone_after_all() => {}
                }
                // Its user may not have let go: the client is closed, say.
                hold.cell.is_over(hold.now());
                hold.queue().unregister(&hold);
                // If it was on offer, its waiter goes on without it.
                hold.queue().withdraw(&hold);
                hold.pass_slot_after_loss();
                // A renewal that the user neither polls nor drops keeps the claim for as long as it likes.
                if let Some(mut contender) = hold.cell.reclaim().await.keep() {
                    // Whoever closes its client releases the hold, which keeps the time that it was acquired for.
                    if hold.request.core().is_closed()
                        && matches!(phase, Phase::Lost(LossReason::Disconnected))
                    {
                        contender.keep_until(hold.not_before());
                    }
                    clean_up(contender).await;
                }
                tell_observers(hold.queue()).await;
            }
            Self::CleanUp(contender) => {
                let request = contender.request.clone();
                clean_up(contender).await;
                tell_observers(&request.queue).await;
            }
            Self::Announce(core, name, _done) => core.announce(&name).await,
        }
    }

    /// Drops the claim where it is, since the worker has died. Its lease or connection is the backstop.
    fn give_up(self) {
        let (contender, hold) = match self {
            Self::Release(hold, contender) => (contender, Some(hold)),
            Self::Lost(hold) => (None, Some(hold)),
            Self::CleanUp(contender) => (Some(contender), None),
            Self::Announce(..) => (None, None),
        };
        if let Some(mut contender) = contender {
            contender.forget_claim();
        }
        if let Some(hold) = hold {
            hold.queue().unregister(&hold);
        }
    }
}

/// Wakes the observers of an election whose leadership has ended without a resignation that somebody waits for.
async fn tell_observers(queue: &LockQueue) {
    if queue.name().is_of_election() {
        Box::pin(queue.core.announce(queue.name())).await;
    }
}

/// Makes the end of the task, also by a shutdown of the runtime, a loss of every hold, since nothing renews them any more.
/// Waiters get an error.
struct DiesWith(Arc<Worker>);

impl Drop for DiesWith {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        self.0.live(&mut state, Life::Dead);
        let jobs = std::mem::take(&mut state.jobs);
        state.unadopted.clear();
        drop(state);
        let core = self.0.core.upgrade();
        let queues = core.iter().flat_map(|core| core.queues());
        for hold in queues.flat_map(|queue| queue.holds()) {
            hold.queue().unregister(&hold);
            hold.cell.lose(LossReason::Disconnected);
            // Its guard may be kept, and a hold without a lease ends with its claim alone. The claim of a hold that is being
            // released is left to that release.
            if matches!(hold.cell.last_phase(), Phase::Lost(_)) {
                hold.cell.is_over(hold.now());
                drop(hold.cell.discard());
            }
        }
        jobs.into_iter().for_each(Job::give_up);
        self.0.notify_idle();
        if let Some(core) = core {
            core.turn_away();
        }
    }
}

async fn run(worker: Arc<Worker>, _dies_with: DiesWith) {
    let mut adopted = FuturesUnordered::new();
    let mut jobs = FuturesUnordered::new();
    loop {
        let now = Instant::now();
        let work = worker.take_work(now);
        jobs.extend(work.jobs.into_iter().map(Job::run));
        // Without the lock on the state, since such a queue may be the last handle of the client.
        let queues = work.queues.iter().filter_map(Weak::upgrade);
        adopted.extend(queues.flat_map(|queue| queue.adopt(now)).map(Adopted::start));
        if work.orphaned && jobs.is_empty() && adopted.is_empty() {
            return;
        }
        let adoption = async {
            match work.adopt_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        // Not biased: a user who submits job after job must not keep renewals from being polled.
        tokio::select! {
            () = worker.work.notified() => {}
            () = adoption => {}
            Some(hold) = adopted.next(), if !adopted.is_empty() => {
                if matches!(hold.cell.last_phase(), Phase::Lost(_)) {
                    worker.state.lock().running += 1;
                    jobs.push(Job::Lost(hold).run());
                }
            }
            Some(()) = jobs.next(), if !jobs.is_empty() => worker.job_done(),
        }
    }
}

/// A hold that the worker has adopted. Resolves when it ends.
struct Adopted(Hold);

impl Adopted {
    fn start(hold: Hold) -> Self {
        hold.keep_alive.start(keep_alive(hold.clone()));
        Self(hold)
    }
}

impl Future for Adopted {
    type Output = Hold;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Hold> {
        ready!(self.0.keep_alive.poll(cx));
        Poll::Ready(self.0.clone())
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        // The future has a handle of its own hold.
        self.0.keep_alive.wait_and_stop();
    }
}

/// Keeps one hold alive until it ends. Renews it when that is due, or at once when the backend hints that it may be gone, and
/// latches its loss when the lease expires. Makes way whenever somebody else wants the claim.
async fn keep_alive(hold: Hold) {
    let mut timer = pin!(tokio::time::sleep_until(Instant::now()));
    let mut hints = HintBudget::default();
    let adopted = Instant::now();
    let mut tried = None;
    let mut session = hold.cell.session();
    loop {
        let version = hold.cell.version();
        let Some(mut loan) = borrow(&hold, timer.as_mut(), &mut session).await else {
            break;
        };
        let Some(contender) = loan.as_mut() else { break };
        let Some(plan) = Plan::new(&hold, contender, adopted, tried) else {
            break;
        };
        // What lives across an await is kept for each hold: of the plan, no more than this.
        let (offered, renews) = (plan.offered, plan.renews);
        let waiting = plan.until_due(
            &hold,
            contender,
            version,
            timer.as_mut(),
            &mut session,
            &mut hints,
        );
        if !waiting.await {
            continue;
        }
        if offered {
            hold.cell.lapse();
            continue;
        }
        if !matches!(hold.cell.phase(hold.now()), Phase::Held) {
            continue;
        }
        if !renews && hold.is_past_max_hold() {
            hold.ask_for_the_rest(contender);
        }
        // In a box, since a hold is renewed now and then, and is kept all the time.
        let mut renewing = Box::pin(hold.renew_with(contender, renews));
        let renewal = loop {
            // What ends the hold, or its renewals, does not wait for a reply.
            let ends = ends(&hold);
            if let Some(end) = ends {
                timer.as_mut().reset(end);
            }
            tokio::select! {
                biased;
                () = std::future::poll_fn(|cx| hold.cell.poll_changed(version, cx)) => break None,
                () = timer.as_mut(), if ends.is_some() => {
                    if !note_end(&hold) {
                        break None;
                    }
                }
                () = session_shortened(&hold, &mut session) => {}
                renewal = renewing.as_mut() => break Some(renewal),
            }
        };
        drop(renewing);
        let Some(renewal) = renewal else { continue };
        let failure = renewal.err().filter(|err| !err.is_lost());
        tried = Some(Tried {
            at: Instant::now(),
            failed: failure.is_some(),
        });
        if let Some(failure) = failure {
            observe::renewal_failed(hold.queue(), &failure);
        }
    }
}

/// The last renewal that was not cut short.
#[derive(Clone, Copy)]
struct Tried {
    at: Instant,
    failed: bool,
}

/// The next thing to do for a hold.
struct Plan {
    /// It is still on offer: it is left to lapse.
    offered: bool,
    /// Its lease is renewed, or its claim is checked if it has none.
    renews: bool,
    is_past_max_hold: bool,
    /// The time of that, or of the end of the hold if that is earlier.
    at: Option<Instant>,
}

impl Plan {
    /// Returns `None` for a hold that has no lease any more.
    fn new(hold: &Hold, contender: &Contender, adopted: Instant, tried: Option<Tried>) -> Option<Self> {
        let ttl = hold.request.ttl;
        let lease = contender.lease?;
        let offered = hold.cell.last_phase() == Phase::Offered;
        let is_past_max_hold = hold.is_past_max_hold();
        // A hold that has not been taken yet is left to lapse; one without renewal is left to end.
        let renewed = hold.request.renew && !is_past_max_hold;
        let renews = !offered && (renewed || lease.length.is_none());
        let lapses = (offered && lease.length.is_none()).then(|| adopted + ttl);
        let valid_until = hold.valid_until().or(lapses);
        // By the lease that counts now: since then, its user may have asked for a shorter one.
        let rested = tried.map(|tried| tried.at + timing::renewal_retry(&lease, ttl));
        let renewal = renews.then(|| {
            // A proof may be older than its renewal is due: that must not become a busy loop.
            let due = lease.renewal_due(ttl).seen_from(hold.now());
            rested.map_or(due, |rested| due.max(rested))
        });
        // A failed renewal is tried again, also where only a hint asked for it.
        let has_failed = tried.is_some_and(|tried| tried.failed);
        let again = rested.filter(|_| has_failed && (renews || contender.is_doubted));
        let again = again.or_else(|| contender.is_doubted.then(Instant::now));
        let due = again.filter(|_| !offered).or(renewal);
        Some(Self {
            offered,
            renews,
            is_past_max_hold,
            at: due.into_iter().chain(valid_until).min(),
        })
    }

    /// Resolves with `true` when its time has come, or when the backend hints that the hold may be gone. Resolves with `false` when
    /// the hold needs another plan.
    fn until_due<'a>(
        self,
        hold: &'a Hold,
        contender: &'a mut Contender,
        version: u32,
        mut timer: Pin<&'a mut Sleep>,
        session: &'a mut Option<SessionProof>,
        hints: &'a mut HintBudget,
    ) -> impl Future<Output = bool> {
        let listens = !self.offered && hints.listens();
        // The backend remembers a hint that nobody listens to for a while.
        let rest = (!self.offered && !listens).then(|| Instant::now() + HintBudget::HOLDERS_REST);
        let max_hold = hold.max_hold_to_come();
        let wakes = self.at.into_iter().chain(rest).chain(max_hold).min();
        if let Some(at) = wakes {
            timer.as_mut().reset(at);
        }
        let (ends, rests) = (wakes.is_some(), rest.is_some());
        let listening = Instant::now();
        async move {
            let is_due = tokio::select! {
                biased;
                () = std::future::poll_fn(|cx| hold.cell.poll_changed(version, cx)) => false,
                () = timer, if ends => {
                    hints.rested();
                    !rests || self.at.is_some_and(|at| Instant::now() >= at)
                }
                () = session_shortened(hold, session) => false,
                () = contender.hinted(), if listens => {
                    contender.is_doubted = true;
                    hints.hinted(listening.elapsed());
                    true
                }
            };
            // The clock of a `max_hold` goes on while the machine sleeps, and no timer does.
            let max_hold_is_over = !self.is_past_max_hold && hold.is_past_max_hold();
            is_due && !max_hold_is_over
        }
    }
}

/// Waits for the claim, and watches the lease and the session meanwhile: the user may keep the claim for any time. Returns
/// `None` once the hold is over.
async fn borrow<'a>(
    hold: &'a Hold,
    mut timer: Pin<&mut Sleep>,
    session: &mut Option<SessionProof>,
) -> Option<Loan<'a, Contender>> {
    let mut lending = pin!(hold.cell.lend_to_worker());
    loop {
        if let Poll::Ready(loan) = timing::poll_once(&mut lending).await {
            return loan;
        }
        let proven = hold.cell.valid_until();
        let warns = overdue(hold).map(|(_, at)| at).filter(|at| Instant::now() < *at);
        let wakes = warns.into_iter().chain(ends(hold)).min();
        if let Some(at) = wakes {
            timer.as_mut().reset(at);
        }
        tokio::select! {
            biased;
            loan = lending.as_mut() => return loan,
            () = timer.as_mut(), if wakes.is_some() => {
                // Whoever has the claim renews the hold, and tells of that itself, unless it never goes on.
                if let Some((end, at)) = overdue(hold)
                    && Instant::now() >= at
                {
                    hold.cell.renewal_overdue(end);
                }
                // If that is the end, there is nothing to wait for.
                note_end(hold);
            }
            // Whoever has the claim may have asked for a shorter lease, and may never go on.
            () = std::future::poll_fn(|cx| hold.cell.poll_moved(proven, cx)) => {}
            () = session_shortened(hold, session) => {}
        }
    }
}

/// Returns the end of the lease, and the time from which on a renewal of it without a reply counts as failing.
fn overdue(hold: &Hold) -> Option<(Moment, Instant)> {
    let end = hold.cell.valid_until()?;
    let at = timing::renewal_overdue(end.seen_from(hold.now()), hold.lease_length());
    Some((end, at))
}

/// Returns the end of the hold, or of its `max_hold` if that comes before.
fn ends(hold: &Hold) -> Option<Instant> {
    let ends = [hold.valid_until(), hold.max_hold_to_come()];
    ends.into_iter().flatten().min()
}

/// Latches the loss if it is due; then there is nothing to wait for. Tells of the end of `max_hold` otherwise. Returns whether the
/// hold goes on.
fn note_end(hold: &Hold) -> bool {
    hold.is_past_max_hold();
    matches!(hold.cell.phase(hold.now()), Phase::Offered | Phase::Held)
}

/// Resolves when the session proves less than it did. Latches the loss if it is over.
async fn session_shortened(hold: &Hold, session: &mut Option<SessionProof>) {
    let Some(session) = session else {
        return std::future::pending().await;
    };
    if session.changed().await.is_err() {
        return std::future::pending().await;
    }
    hold.cell.phase(hold.now());
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use std::{collections::VecDeque, time::Duration};

    use crate::{AcquireOptions, LockClient, MemoryBackend};

    /// There is always a hold to look at later, and now and then one to look at before.
    #[tokio::test(start_paused = true)]
    async fn a_queue_is_not_listed_again_and_again() {
        const MS: Duration = Duration::from_millis(1);
        let client = LockClient::new(MemoryBackend::new());
        let semaphore = client.semaphore("a", 9).unwrap();
        let worker = &semaphore.queue().core.worker;
        let short = AcquireOptions::new().ttl(10 * MS);
        let mut held = VecDeque::new();
        let mut most = 0;
        for _ in 0..500 {
            held.push_back(semaphore.acquire().await.unwrap());
            semaphore
                .acquire_with(&short)
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
            tokio::time::sleep(MS).await;
            if held.len() > 2 {
                held.pop_front().unwrap().release().await.unwrap();
            }
            most = most.max(worker.state.lock().unadopted.len());
        }
        assert!(most < 10, "a queue was listed {most} times");
    }
}
