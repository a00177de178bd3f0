//! One task per client: it renews leases, watches for loss, and releases what was dropped.
//!
//! A grant does not wake it. New holds are put into the register of their line, and the worker looks there a few
//! milliseconds later: a hold that is released before then never costs more than two entries there. Those that stay are
//! *adopted*: a small future each, all of them polled by this one task, so that renewals that are due together go
//! out together.

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
    sync::Notify,
    time::{Instant, Sleep},
};

use crate::{
    Error, LossReason, Result,
    client::Core,
    driver::{
        cell::{Loan, Phase},
        hold::Hold,
        line::{Grip, Line, hinted},
        settle,
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
    /// The lines in whose registers are holds to adopt, and from when on. They may be gone by then.
    unadopted: Vec<(Instant, Weak<Line>)>,
    adopt_at: Option<Instant>,
    jobs: Vec<Job>,
    /// Jobs taken up and not done yet.
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
    Settle(Hold, Option<Grip>),
    Lost(Hold),
    CleanUp(Grip),
}

impl Worker {
    /// The worker of `core`, for the runtime that the client lives on, if it is made within one.
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

    /// Succeeds while the runtime that the client lives on goes on. The first to ask starts the task, whose end tells.
    ///
    /// # Errors
    /// One that is the same for every backend, which has to say nothing of its own.
    pub(crate) fn lives(self: &Arc<Self>, operation: &'static str) -> Result<()> {
        // Where there is no runtime at all, none can have ended.
        let _ = self.begin(operation);
        if self.has_died() {
            return Err(self.has_ended(operation));
        }
        Ok(())
    }

    /// Has the task started, unless it has been.
    ///
    /// # Errors
    /// If there is no runtime to start it on.
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

    /// Looks into the register of `line` at this time.
    pub(crate) fn adopt_from(&self, line: &Arc<Line>, at: Instant) {
        let mut state = self.state.lock();
        state.unadopted.push((at, Arc::downgrade(line)));
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

    /// Has it look, on another thread than this where there are several. What a thread of the runtime wakes last, it keeps to
    /// itself until the task that it runs has to wait; and whoever has just been granted a lock may work for seconds before.
    /// What it wakes before that is anyone's, and another thread is roused for it.
    fn look_elsewhere(&self) {
        self.work.notify_one();
        if let Ok(handle) = Handle::try_current()
            && handle.runtime_flavor() == RuntimeFlavor::MultiThread
        {
            drop(handle.spawn(std::future::ready(())));
        }
    }

    /// Settles a hold whose guard was dropped.
    pub(crate) fn settle(self: &Arc<Self>, hold: Hold, grip: Option<Grip>) {
        self.submit(Job::Settle(hold, grip));
    }

    /// Releases a claim that nobody waits for.
    pub(crate) fn clean_up(self: &Arc<Self>, grip: Grip) {
        self.submit(Job::CleanUp(grip));
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

    /// `Some` for whoever finds that the task has not been started, and must do so once the lock is let go.
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

    /// A runtime that has been shut down drops the task at once, which takes the lock on the state.
    fn start(self: &Arc<Self>, unborn: Option<Handle>) {
        if let Some(handle) = unborn {
            let task = run(self.clone(), DiesWith(self.clone()));
            // Every hold has a timer and they may all be due at once: a budget per poll would only spin.
            handle.spawn(tokio::task::unconstrained(task));
        }
    }

    /// Adopts what there is at once.
    pub(crate) fn adopt_now(&self) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.unadopted.iter_mut().for_each(|(at, _)| *at = now);
        state.adopt_at = Some(now);
        drop(state);
        self.work.notify_one();
    }

    /// Resolves when `good`, of which whoever makes it so has it [looked](Self::look_whether_idle) at.
    pub(crate) async fn when(&self, good: impl Fn() -> bool) {
        loop {
            let mut notified = pin!(self.idle.notified());
            notified.as_mut().enable();
            if good() {
                return;
            }
            notified.await;
        }
    }

    /// Says that it has nothing to do, and never will if it is not asked to.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.life == Life::Dead || (state.jobs.is_empty() && state.running == 0)
    }

    /// Whoever waits for there to be nothing to do is to look again.
    pub(crate) fn look_whether_idle(&self) {
        self.idle.notify_waiters();
    }

    /// The last handle is gone.
    pub(crate) fn orphan(&self) {
        self.state.lock().orphaned = true;
        self.work.notify_one();
    }

    fn take_work(&self, now: Instant) -> Work {
        let mut state = self.state.lock();
        let jobs = std::mem::take(&mut state.jobs);
        state.running += jobs.len();
        let mut lines = Vec::new();
        if state.adopt_at.is_some_and(|at| at <= now) {
            let due = state.unadopted.extract_if(.., |(at, _)| *at <= now);
            lines = due.map(|(_, line)| line).collect();
            state.adopt_at = state.unadopted.iter().map(|(at, _)| *at).min();
        }
        Work {
            jobs,
            lines,
            adopt_at: state.adopt_at,
            orphaned: state.orphaned,
        }
    }

    fn job_done(&self) {
        self.state.lock().running -= 1;
        self.look_whether_idle();
    }
}

struct Work {
    jobs: Vec<Job>,
    lines: Vec<Weak<Line>>,
    adopt_at: Option<Instant>,
    orphaned: bool,
}

impl Job {
    async fn run(self) {
        match self {
            Self::Settle(hold, grip) => {
                let terms = hold.terms.clone();
                if let Err(err) = settle::settle(&hold, grip, hold.now()).await
                    && !err.is_lost()
                {
                    crate::observe::release_failed(&terms.line, &err);
                }
            }
            Self::Lost(hold) => {
                if let Phase::Lost(reason) = hold.cell.last_phase() {
                    crate::observe::lost(hold.line(), reason);
                }
                hold.line().unregister(&hold);
                // If it was on offer, its waiter goes on without it.
                hold.line().withdraw(&hold);
                // Nobody holds it here any more: whoever asks has to ask the server.
                hold.pass_slot();
                // A renewal that the user neither polls nor drops keeps the claim for as long as it likes.
                if let Some(grip) = hold.cell.reclaim().await.keep() {
                    settle::clean_up(grip).await;
                }
            }
            Self::CleanUp(grip) => settle::clean_up(grip).await,
        }
    }

    /// There is no worker any more: drop the claim where it is. Its lease or connection is the backstop.
    fn give_up(self) {
        let (grip, hold) = match self {
            Self::Settle(hold, grip) => (grip, Some(hold)),
            Self::Lost(hold) => (None, Some(hold)),
            Self::CleanUp(grip) => (Some(grip), None),
        };
        if let Some(mut grip) = grip {
            grip.settled();
        }
        if let Some(hold) = hold {
            hold.line().unregister(&hold);
        }
    }
}

/// Whatever ends the task, a shutdown of the runtime included: holds are lost, since nothing renews them any more, and
/// waiters are told.
struct DiesWith(Arc<Worker>);

impl Drop for DiesWith {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        self.0.live(&mut state, Life::Dead);
        let jobs = std::mem::take(&mut state.jobs);
        state.unadopted.clear();
        drop(state);
        let core = self.0.core.upgrade();
        let lines = core.iter().flat_map(|core| core.lines());
        for hold in lines.flat_map(|line| line.holds()) {
            hold.line().unregister(&hold);
            hold.cell.lose(LossReason::Disconnected);
            // Its guard may be kept, and a hold without a lease ends with its claim alone. One that is being released
            // is waited for by whoever does that.
            if matches!(hold.cell.last_phase(), Phase::Lost(_)) {
                drop(hold.cell.discard());
            }
        }
        jobs.into_iter().for_each(Job::give_up);
        self.0.idle.notify_waiters();
        if let Some(core) = core {
            core.turn_away();
        }
    }
}

async fn run(worker: Arc<Worker>, _dies_with: DiesWith) {
    let mut attending = FuturesUnordered::new();
    let mut jobs = FuturesUnordered::new();
    loop {
        let now = Instant::now();
        let work = worker.take_work(now);
        jobs.extend(work.jobs.into_iter().map(Job::run));
        // Without the lock on the state, since such a line may be the last handle of the client.
        let lines = work.lines.iter().filter_map(Weak::upgrade);
        attending.extend(lines.flat_map(|line| line.adopt(now)).map(Attending::begin));
        if work.orphaned && jobs.is_empty() && attending.is_empty() {
            return;
        }
        let adoption = async {
            match work.adopt_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        // Not biased: whoever submits job after job must not keep renewals from being polled.
        tokio::select! {
            () = worker.work.notified() => {}
            () = adoption => {}
            Some(hold) = attending.next(), if !attending.is_empty() => {
                if matches!(hold.cell.last_phase(), Phase::Lost(_)) {
                    worker.state.lock().running += 1;
                    jobs.push(Job::Lost(hold).run());
                }
            }
            Some(()) = jobs.next(), if !jobs.is_empty() => worker.job_done(),
        }
    }
}

/// A hold that the worker looks after, until it ends.
struct Attending(Hold);

impl Attending {
    fn begin(hold: Hold) -> Self {
        hold.attendance.begin(attend(hold.clone()));
        Self(hold)
    }
}

impl Future for Attending {
    type Output = Hold;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Hold> {
        ready!(self.0.attendance.poll(cx));
        Poll::Ready(self.0.clone())
    }
}

impl Drop for Attending {
    fn drop(&mut self) {
        // It keeps its own hold alive.
        self.0.attendance.end_at_last();
    }
}

/// Keeps one hold alive until it ends: renews it when that is due, looks after it when the backend hints, and latches
/// its loss when the lease runs out. Makes way whenever somebody else wants the claim.
async fn attend(hold: Hold) {
    let mut timer = pin!(tokio::time::sleep_until(Instant::now()));
    let mut hints = HintBudget::default();
    let mut retry_at = None;
    let adopted = Instant::now();
    let mut rests_until = None;
    let mut session = hold.cell.session();
    loop {
        let version = hold.cell.version();
        let Some(mut loan) = borrow(&hold, timer.as_mut(), &mut session).await else {
            break;
        };
        let Some(grip) = loan.as_mut() else { break };
        let offered = hold.cell.last_phase() == Phase::Offered;
        let Some(lease) = grip.lease else { break };
        // A hold that has not been taken yet is left to lapse; one without renewal is left to end.
        let renews = !offered && (hold.terms.renew || lease.length.is_none());
        let lapses = (offered && lease.length.is_none()).then(|| adopted + hold.terms.ttl);
        let valid_until = hold.valid_until().or(lapses);
        let renewal = renews.then(|| {
            // A proof may be older than its renewal is due: that must not become a busy loop.
            let due = lease.renewal_due(hold.terms.ttl).seen_from(hold.now());
            rests_until.map_or(due, |rested| due.max(rested))
        });
        // A question that was not answered is asked again, also where only a hint made it one.
        let again = retry_at.or_else(|| grip.is_doubted.then(Instant::now));
        let due = again.filter(|_| !offered).or(renewal);
        let end = due.into_iter().chain(valid_until).min();
        // Hints that are not listened to for a while are not forgotten.
        let rest = (!offered && !hints.listens()).then(|| Instant::now() + HintBudget::HOLDERS_REST);
        let wakes = end.into_iter().chain(rest).min();
        if let Some(at) = wakes {
            timer.as_mut().reset(at);
        }
        let listening = Instant::now();
        let event = tokio::select! {
            biased;
            () = std::future::poll_fn(|cx| hold.cell.poll_changed(version, cx)) => Event::Changed,
            () = timer.as_mut(), if wakes.is_some() => Event::Time,
            () = less_is_proven(&hold, &mut session) => Event::Changed,
            () = hinted(&mut grip.claim), if !offered && hints.listens() => Event::Hint,
        };
        match event {
            Event::Changed => continue,
            Event::Time => {
                hints.rested();
                if rest.is_some() && end.is_none_or(|end| Instant::now() < end) {
                    continue;
                }
            }
            Event::Hint => {
                grip.is_doubted = true;
                hints.hinted(listening.elapsed());
            }
        }
        if offered {
            hold.cell.lapse();
            continue;
        }
        if !matches!(hold.cell.phase(hold.now()), Phase::Held) {
            continue;
        }
        let renewal = tokio::select! {
            biased;
            () = std::future::poll_fn(|cx| hold.cell.poll_changed(version, cx)) => continue,
            renewal = hold.renew_with(grip, renews) => renewal,
        };
        // The lease may have turned out to be shorter.
        let lease = grip.lease.unwrap_or(lease);
        let rested = Instant::now() + timing::renewal_retry(&lease, hold.terms.ttl);
        rests_until = Some(rested);
        retry_at = renewal.err().filter(|err| !err.is_lost()).map(|err| {
            crate::observe::renewal_failed(hold.line(), &err);
            rested
        });
    }
}

/// Waits for the claim, with an eye on the lease and what else it ends with: whoever has the claim may sit on it. `None` once
/// the hold is over.
async fn borrow<'a>(
    hold: &'a Hold,
    mut timer: Pin<&mut Sleep>,
    session: &mut Option<SessionProof>,
) -> Option<Loan<'a, Grip>> {
    let mut attend = pin!(hold.cell.attend());
    loop {
        if let Poll::Ready(loan) = timing::poll_once(&mut attend).await {
            return loan;
        }
        let valid_until = hold.valid_until();
        if let Some(end) = valid_until {
            timer.as_mut().reset(end);
        }
        tokio::select! {
            biased;
            loan = attend.as_mut() => return loan,
            () = timer.as_mut(), if valid_until.is_some() => {
                // Latches the loss if it is due; then there is nothing to wait for.
                hold.cell.phase(hold.now());
            }
            () = less_is_proven(hold, session) => {}
        }
    }
}

/// Resolves when the session proves less than it did; if it is over, the loss is latched.
async fn less_is_proven(hold: &Hold, session: &mut Option<SessionProof>) {
    let Some(session) = session else {
        return std::future::pending().await;
    };
    if session.changed().await.is_err() {
        return std::future::pending().await;
    }
    hold.cell.phase(hold.now());
}

enum Event {
    Changed,
    Time,
    Hint,
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use std::{collections::VecDeque, time::Duration};

    use crate::{AcquireOptions, LockClient, MemoryBackend};

    /// There is always a hold that it has to look at later, and now and then one that it has to look at before.
    #[tokio::test(start_paused = true)]
    async fn a_line_is_not_listed_again_and_again() {
        const MS: Duration = Duration::from_millis(1);
        let client = LockClient::new(MemoryBackend::new());
        let semaphore = client.semaphore("a", 9).unwrap();
        let worker = &semaphore.line().core.worker;
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
        assert!(most < 10, "a line was listed {most} times");
    }
}
