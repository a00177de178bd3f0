//! One process's part in an epoch.

use std::{
    collections::{HashMap, HashSet},
    future::poll_fn,
    path::PathBuf,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use lockkit_core::{
    AcquireOptions, Error, HoldView, Lock, LockClient, LockGuard, LockKind, LossReason, ReentrantLock,
    ReentrantOwner, Result, spi::chain,
};
use tokio::{
    runtime::{self, Handle, Runtime},
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

mod asking;
mod election;
mod listing;
mod passing;
mod together;

use election::{Contest, Held};

use super::{
    Ask, ClientPlan, End, Fate, HoldAs, Schedule, Step, TaskPlan,
    record::{Asked, Fared, Finding, Law, Loss, Note, Over, Record},
};
use crate::{
    case_run::poll_at_most,
    history::{Acquisition, Nanos, now},
    stall::{Stopwatch, timeout},
};

/// The `op_timeout` of every operation.
pub(super) const OP_TIMEOUT: Duration = Duration::from_secs(2);
/// The time that an operation may take beyond what it was given, on a machine that has other work.
const SLACK: Duration = Duration::from_secs(4);
/// The longest time that closing a client takes.
const CLOSING: Duration = Duration::from_secs(5);

/// The part of one process.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(super) schedule: Schedule,
    pub(super) process: u32,
    /// The moment 0 of the schedule.
    pub(super) origin: Nanos,
    /// The time, counted from there, until which a waiter without a time limit has to be granted.
    pub(super) patience: Duration,
    /// The prefix of names.
    pub(super) prefix: String,
    pub(super) routes: Vec<String>,
    /// The directory in which holds that are detached wait for those who adopt them, in whatever process.
    pub(super) messages: PathBuf,
}

impl Part {
    /// The name of a lock or semaphore of the schedule.
    pub(super) fn name(&self, hold_as: HoldAs, number: u32) -> String {
        name(&self.prefix, hold_as, number)
    }
}

pub(super) fn name(prefix: &str, hold_as: HoldAs, number: u32) -> String {
    match hold_as {
        HoldAs::Exclusive | HoldAs::Shared => format!("{prefix}/l{number}"),
        HoldAs::Permit => format!("{prefix}/s{number}"),
        HoldAs::Leader => format!("{ELECTION}{prefix}/e{number}"),
    }
}

/// The beginning of the names of the locks that elections are held with.
pub(super) const ELECTION: &str = "lockkit#election:";

/// Returns the name of the election that is held with this lock, if it is one.
pub(super) fn election_of(lock: &str) -> Option<&str> {
    lock.strip_prefix(ELECTION)
}

/// The number of locks that an [`Ask::All`] takes.
const ALL: u32 = 3;

/// The numbers of the locks that a step is about.
pub(super) fn locks_of(step: &Step) -> std::ops::Range<u32> {
    match step.ask {
        Ask::All(_) | Ask::AllNow => step.name..step.name + ALL,
        _ => step.name..step.name + 1,
    }
}

/// A request for a client: by which way, within which runtime, and where to.
pub(super) type Wanted = (String, Handle, oneshot::Sender<Result<LockClient>>);

/// Makes the clients that are wanted, side by side, until nobody can want any more.
pub(super) async fn connect_all<F, Fut>(mut wanted: mpsc::Receiver<Wanted>, connect: F)
where
    F: Fn(String) -> Fut,
    Fut: Future<Output = Result<LockClient>>,
{
    let mut connecting = FuturesUnordered::new();
    loop {
        tokio::select! {
            next = wanted.recv() => match next {
                Some((route, runtime, to)) => {
                    let connected = within(runtime, connect(route));
                    connecting.push(async move {
                        // The one who wanted it may be gone.
                        let _ = to.send(connected.await);
                    });
                }
                None => return,
            },
            Some(()) = connecting.next() => {}
        }
    }
}

/// Has what `work` spawns and opens belong to `runtime`.
async fn within<F: Future>(runtime: Handle, work: F) -> F::Output {
    let mut work = pin!(work);
    poll_fn(|context| {
        let _inside = runtime.enter();
        work.as_mut().poll(context)
    })
    .await
}

/// The receiver of notes.
pub(super) type Notes = Arc<dyn Fn(Note) + Send + Sync>;

/// Plays a part, to its end. Clients come from `wanted`.
pub(super) async fn play(part: Part, wanted: mpsc::Sender<Wanted>, notes: Notes) {
    let begins = Instant::now() + Duration::from_nanos(part.origin.saturating_sub(now()));
    let stage = Arc::new(Stage {
        watch: Stopwatch::start(),
        begins,
        ends: begins + Duration::from_millis(part.schedule.span),
        part,
        wanted,
        notes,
    });
    let mine = |client: &&ClientPlan| client.process == stage.part.process;
    let seats = stage.part.schedule.clients.iter().filter(mine).map(|plan| {
        let (stage, plan) = (stage.clone(), *plan);
        async move {
            Seat::take(&stage, plan)
                .await
                .map(|seat| (plan.id, Arc::new(seat)))
        }
    });
    let seats: HashMap<_, _> = seats
        .collect::<FuturesUnordered<_>>()
        .filter_map(|seat| async move { seat })
        .collect()
        .await;
    let mut tasks = JoinSet::new();
    for task in &stage.part.schedule.tasks {
        if let Some(seat) = seats.get(&task.client) {
            tasks.spawn(perform(stage.clone(), seat.clone(), task.clone()));
        }
    }
    let mut fates = JoinSet::new();
    for seat in seats.values() {
        fates.spawn(meet_fate(stage.clone(), seat.clone()));
        fates.spawn(close_at_the_end(stage.clone(), seat.clone()));
    }
    drop(seats);
    for done in [&mut tasks, &mut fates] {
        while let Some(ended) = done.join_next().await {
            if let Err(error) = ended {
                stage.find(Law::Failure, format!("a task of the torture ended: {error}"));
            }
        }
    }
}

struct Stage {
    watch: Stopwatch,
    part: Part,
    begins: Instant,
    ends: Instant,
    wanted: mpsc::Sender<Wanted>,
    notes: Notes,
}

impl Stage {
    fn note(&self, note: Note) {
        (self.notes)(note);
    }

    fn find(&self, law: Law, detail: impl Into<String>) {
        self.note(Note::Finding(Finding::new(law, detail)));
    }

    fn at(&self, millis: u64) -> Instant {
        self.begins + Duration::from_millis(millis)
    }

    /// Returns how long a waiter without a time limit may still have to wait.
    fn patience(&self) -> Duration {
        (self.begins + self.part.patience).saturating_duration_since(Instant::now())
    }

    async fn connect(&self, plan: ClientPlan, runtime: Handle) -> Result<LockClient> {
        let routes = &self.part.routes;
        let route = routes[plan.id as usize % routes.len().max(1)].clone();
        let (to, client) = oneshot::channel();
        let gone = || Error::transient("torture", "connect", "nobody makes clients any more");
        if self.wanted.send((route, runtime, to)).await.is_err() {
            return Err(gone());
        }
        client.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Awaits `work`, which has to end within `limit`.
    async fn bounded<F: Future>(&self, limit: Duration, what: &str, work: F) -> Option<F::Output> {
        match timeout(limit, work).await {
            Ok(output) => Some(output),
            Err(_) => {
                self.find(Law::Hang, format!("{what} did not return within {limit:?}"));
                None
            }
        }
    }
}

/// A client, and what its tasks have to know of it.
struct Seat {
    plan: ClientPlan,
    client: Mutex<LockClient>,
    /// A runtime of its own, if it is to lose it.
    runtime: Mutex<Option<Runtime>>,
    /// A guard was forgotten: what it held ends with the client.
    forgot: AtomicBool,
    /// It is closed or without a runtime, or may be at any moment.
    gone: AtomicBool,
    /// The number of clients that have gone that way.
    generation: AtomicUsize,
    /// The detached holds that one of its tasks has had.
    messages: Mutex<HashSet<String>>,
    done: tokio::sync::Notify,
    tasks: AtomicUsize,
}

impl Seat {
    async fn take(stage: &Stage, plan: ClientPlan) -> Option<Self> {
        let mut own = None;
        let mut handle = Handle::current();
        if let Some((_, Fate::Runtime)) = plan.fate {
            let built = runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build();
            match built {
                Ok(built) => {
                    handle = built.handle().clone();
                    own = Some(built);
                }
                Err(error) => {
                    stage.find(
                        Law::Failure,
                        format!("no runtime for client {}: {error}", plan.id),
                    );
                    return None;
                }
            }
        }
        let limit = Duration::from_secs(30);
        let what = format!("connecting client {}", plan.id);
        let connected = stage.bounded(limit, &what, stage.connect(plan, handle)).await;
        let tasks = stage
            .part
            .schedule
            .tasks
            .iter()
            .filter(|task| task.client == plan.id);
        match connected? {
            Ok(client) => Some(Self {
                plan,
                client: Mutex::new(client),
                runtime: Mutex::new(own),
                forgot: AtomicBool::new(false),
                gone: AtomicBool::new(false),
                generation: AtomicUsize::new(0),
                messages: Mutex::default(),
                done: tokio::sync::Notify::new(),
                tasks: AtomicUsize::new(tasks.count()),
            }),
            Err(error) => {
                if let Some(own) = own {
                    own.shutdown_background();
                }
                if stage.part.schedule.strikes.is_empty() {
                    stage.find(Law::Failure, format!("{what}: {}", chain(&error)));
                }
                None
            }
        }
    }

    fn client(&self) -> LockClient {
        self.client.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn messages(&self) -> MutexGuard<'_, HashSet<String>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn close(&self, stage: &Stage, client: &LockClient) {
        self.goes();
        // A request from now on goes to the next client, if there is one.
        let at = now();
        let what = format!("closing client {} within {CLOSING:?}", self.plan.id);
        // Its answer is judged by what is left.
        let _ = stage.bounded(CLOSING + SLACK, &what, client.close(CLOSING)).await;
        let client = self.plan.id;
        stage.note(Note::Gone { client, at });
    }

    fn goes(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.gone.store(true, Ordering::SeqCst);
    }

    /// Returns whether it has met a fate after which its tasks cannot expect anything.
    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }
}

async fn meet_fate(stage: Arc<Stage>, seat: Arc<Seat>) {
    let Some((at, fate)) = seat.plan.fate else {
        return;
    };
    sleep_until(stage.at(at)).await;
    let client = seat.client();
    match fate {
        Fate::Close => seat.close(&stage, &client).await,
        Fate::Runtime => {
            seat.goes();
            let own = seat.runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(own) = own {
                own.shutdown_background();
            }
            let (client, at) = (seat.plan.id, now());
            stage.note(Note::Gone { client, at });
        }
        Fate::Anew => {
            let connected = timeout(
                Duration::from_secs(30),
                stage.connect(seat.plan, Handle::current()),
            )
            .await;
            let mut has_none = true;
            if let Ok(Ok(new)) = connected {
                *seat.client.lock().unwrap_or_else(PoisonError::into_inner) = new;
                has_none = false;
            }
            seat.close(&stage, &client).await;
            // Where none can be had, it goes on with one that is closed.
            seat.gone.store(has_none, Ordering::SeqCst);
        }
    }
}

/// Closes a client when its tasks have ended; before, if what it has forgotten is in the way of others.
async fn close_at_the_end(stage: Arc<Stage>, seat: Arc<Seat>) {
    sleep_until(stage.ends).await;
    if seat.forgot.load(Ordering::SeqCst) {
        seat.close(&stage, &seat.client()).await;
    }
    loop {
        let done = seat.done.notified();
        if seat.tasks.load(Ordering::SeqCst) == 0 {
            break;
        }
        done.await;
    }
    seat.close(&stage, &seat.client()).await;
    let own = seat.runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(own) = own {
        own.shutdown_background();
    }
}

async fn perform(stage: Arc<Stage>, seat: Arc<Seat>, task: TaskPlan) {
    let mut who = u64::from(task.id) * 1_000_000;
    'steps: for step in &task.steps {
        sleep_until(stage.at(step.at)).await;
        for _ in 0..step.times {
            if Instant::now() >= stage.ends {
                break 'steps;
            }
            who += 1;
            let scene = Scene {
                stage: &stage,
                generation: seat.generation.load(Ordering::SeqCst),
                seat: &seat,
                who,
                step,
            };
            if !scene.play().await {
                // A try that is refused at once must not take the machine for itself.
                sleep(Duration::from_micros(500)).await;
                break;
            }
            // Nor what is granted at once.
            tokio::task::yield_now().await;
        }
    }
    seat.tasks.fetch_sub(1, Ordering::SeqCst);
    seat.done.notify_one();
}

/// One step of a task.
struct Scene<'a> {
    stage: &'a Stage,
    seat: &'a Seat,
    /// That of its client, when it began.
    generation: usize,
    who: u64,
    step: &'a Step,
}

type Outcome = Option<Result<Held>>;

impl Scene<'_> {
    /// Plays the step. Returns whether it held, by a guard of its own.
    async fn play(&self) -> bool {
        let (stage, step) = (self.stage, self.step);
        let client = self.seat.client();
        let names: Vec<_> = locks_of(step)
            .map(|number| stage.part.name(step.hold_as, number))
            .collect();
        match step.ask {
            Ask::Inspect => self.inspect(&client, &names[0]).await,
            Ask::Revoke => self.revoke(&client, &names[0]).await,
            Ask::AskBack(within) => {
                let within = Duration::from_millis(within);
                self.ask_back(&client, &names[0], within).await;
            }
            Ask::Observe => self.observe(&client, &names[0]).await,
            Ask::List => self.list(&client).await,
            Ask::All(_) | Ask::AllNow | Ask::Many(..) | Ask::ManyNow(_) => {
                self.together(&client, &names).await;
            }
            Ask::Adopt(within, polls) => {
                let within = Duration::from_millis(within);
                return self.adopt(&client, &names[0], within, polls).await;
            }
            _ => return self.one(&client, &names[0]).await,
        }
        false
    }

    fn options(&self) -> AcquireOptions {
        let step = self.step;
        let mut options = AcquireOptions::new()
            .ttl(Duration::from_millis(step.ttl))
            .op_timeout(OP_TIMEOUT);
        options.local_handoffs = step.handoffs;
        if !step.renew {
            options = options.renew(false);
        }
        if step.label {
            options = options.label(format!("torture {}", self.who));
        }
        options.max_hold = step.max_hold.map(Duration::from_millis);
        options
    }

    fn lock(&self, client: &LockClient, name: &str) -> Result<Lock> {
        let lock = match self.step.hold_as {
            HoldAs::Exclusive => client.lock(name)?,
            HoldAs::Shared => client.lock(name)?.shared(),
            HoldAs::Leader => return Err(Error::invalid_option("torture", "no lock is an election")),
            HoldAs::Permit => {
                let size = self.stage.part.schedule.sizes.get(self.step.name as usize);
                let size = self.step.size.or(size.copied());
                client.semaphore(name, size.unwrap_or(1))?
            }
        };
        Ok(lock.with_options(self.options()))
    }

    fn record(&self, name: &str, asked: Asked) -> Option<Record> {
        let mode = self.stage.part.schedule.mode(self.step)?;
        let lenient = match self.step.ask {
            Ask::All(_) => true,
            Ask::Within(time) | Ask::Many(_, Some(time)) => time < 500,
            _ => false,
        };
        Some(Record {
            process: self.stage.part.process,
            client: self.seat.plan.id,
            ttl: self.step.ttl,
            ttl_now: self.step.ttl,
            renew: self.step.renew,
            max_hold: self.step.max_hold,
            handoffs: self.step.handoffs,
            asked,
            fared: Fared::Pending,
            over: Over::Not,
            lenient,
            loss: Loss::Not,
            kept: None,
            downgraded: None,
            shared: None,
            detached: None,
            adopts: None,
            place: (0, 1),
            acquisition: Acquisition::asked(name, mode, self.who, now()),
            error: String::new(),
        })
    }

    fn note(&self, record: &Record) {
        self.stage.note(Note::Record(Box::new(record.clone())));
    }

    async fn one(&self, client: &LockClient, name: &str) -> bool {
        let step = self.step;
        let asked = match step.ask {
            Ask::Try => Asked::Tried,
            Ask::CancelAfter(_) | Ask::CancelPolls(_) => Asked::Cancelled,
            Ask::Unpolled(_) => Asked::Unpolled,
            _ => Asked::Waited,
        };
        let (Ok(contest), Some(mut record)) = (self.contest(client, name), self.record(name, asked)) else {
            self.stage
                .find(Law::Failure, format!("no lock {name:?} as {:?}", step.hold_as));
            return false;
        };
        self.note(&record);
        if let (Ask::Twice, Contest::Lock(lock)) = (step.ask, &contest) {
            self.twice(lock.clone(), record).await;
            return false;
        }
        let outcome = self.ask(&contest, &mut record).await;
        let guard = self.settle(outcome, &mut record);
        let held = guard.is_some();
        match guard {
            Some(guard) => self.hold_and_end(guard, record).await,
            None => self.note(&record),
        }
        held
    }

    async fn ask(&self, lock: &Contest, record: &mut Record) -> Outcome {
        let what = format!(
            "{:?} of {} on {}",
            self.step.ask, self.who, record.acquisition.lock
        );
        let bounded = |limit| (limit, what.as_str());
        match self.step.ask {
            Ask::Within(time) => {
                let wait = Duration::from_millis(time);
                let (limit, what) = bounded(wait + OP_TIMEOUT + SLACK);
                let asking = queued(lock.acquire_timeout(wait), &mut record.acquisition.queued);
                self.stage.bounded(limit, what, asking).await
            }
            Ask::Try => {
                let (limit, what) = bounded(OP_TIMEOUT + SLACK);
                let tried = self.stage.bounded(limit, what, lock.try_acquire()).await?;
                match tried {
                    Ok(Some(guard)) => Some(Ok(guard)),
                    Ok(None) => {
                        record.fared = Fared::Taken;
                        None
                    }
                    Err(error) => Some(Err(error)),
                }
            }
            Ask::CancelAfter(time) => {
                let time = Duration::from_millis(time);
                tokio::time::timeout(time, lock.acquire()).await.ok()
            }
            Ask::CancelPolls(polls) => {
                let limited = tokio::time::timeout(SLACK, lock.acquire());
                poll_at_most(polls as usize, limited)
                    .await
                    .and_then(std::result::Result::ok)
            }
            Ask::Unpolled(polls) => {
                let mut asking = Box::pin(lock.acquire());
                let limited = tokio::time::timeout(SLACK, asking.as_mut());
                match poll_at_most(polls as usize, limited).await {
                    Some(Ok(outcome)) => Some(outcome),
                    _ => {
                        self.rest().await;
                        None
                    }
                }
            }
            _ => {
                let limit = self.stage.patience();
                let asking = queued(lock.acquire(), &mut record.acquisition.queued);
                self.stage.bounded(limit, &what, asking).await
            }
        }
    }

    /// Rests for as long as the hold would take.
    async fn rest(&self) {
        sleep_until(self.rests_until()).await;
    }

    fn rests_until(&self) -> Instant {
        (Instant::now() + Duration::from_millis(self.step.hold)).min(self.stage.ends)
    }

    /// Notes what came of a request, and returns what there is to hold.
    fn settle<T: AsGuard>(&self, outcome: Option<Result<T>>, record: &mut Record) -> Option<T> {
        let at = now();
        match outcome {
            Some(Ok(guard)) => {
                record.acquisition.granted = Some((at, guard.token()));
                record.fared = Fared::Granted;
                return Some(guard);
            }
            Some(Err(error)) if error.is_timeout() => record.fared = Fared::Taken,
            Some(Err(error)) => self.failed(record, &error),
            None if record.fared == Fared::Taken => {}
            None => record.fared = Fared::Dropped,
        }
        record.acquisition.gave_up = Some(at);
        None
    }

    fn failed(&self, record: &mut Record, error: &Error) {
        record.fared = Fared::Failed;
        if self.step.hold_as == HoldAs::Permit {
            if let Error::InvalidOptions { .. } = error {
                record.fared = Fared::OtherSize;
            }
            // While several change the size, to the same one too, some backends cannot tell whether one is in use.
            record.lenient |= chain(error).contains(" permits, not ");
        }
        if !self.seat.is_gone() {
            record.error = chain(error);
        }
    }

    async fn hold_and_end(&self, mut guard: Held, mut record: Record) {
        look(&guard.view(), &mut record);
        self.note(&record);
        let until = self.rests_until();
        let mut holds = true;
        if let Some((after, polls)) = self.step.downgrade {
            let then = until.min(Instant::now() + Duration::from_millis(after));
            holds = self.hold(&guard, &mut record, then).await;
            if holds {
                match self.downgrade(guard, &mut record, polls).await {
                    Some(left) => guard = left,
                    None => return self.note(&record),
                }
            }
        }
        if holds {
            self.hold(&guard, &mut record, until).await;
        }
        self.end(guard, &mut record).await;
        self.note(&record);
    }

    /// Returns whether it held until then.
    async fn hold(&self, guard: &LockGuard, record: &mut Record, until: Instant) -> bool {
        let view = &guard.view();
        let mut retimed = Instant::now();
        while look(view, record) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let mut pause = left.min(Duration::from_millis(5));
            if let Some((every, other)) = self.step.retime {
                let due = (retimed + Duration::from_millis(every)).saturating_duration_since(Instant::now());
                if due.is_zero() {
                    self.retime(guard, record, other).await;
                    retimed = Instant::now();
                    continue;
                }
                pause = pause.min(due);
            }
            let _ = tokio::time::timeout(pause, view.lost()).await;
        }
        if tokio::time::timeout(SLACK, view.lost()).await.is_err() {
            let what = format!("{} no longer holds, and lost() does not say so", self.who);
            self.stage.find(Law::Hang, what);
        }
        self.stay(view, record).await;
        false
    }

    async fn end(&self, guard: Held, record: &mut Record) {
        match self.step.end {
            End::Release => {
                let what = format!("release of {} on {}", self.who, record.acquisition.lock);
                let released = self
                    .stage
                    .bounded(OP_TIMEOUT + SLACK, &what, guard.release())
                    .await;
                self.released(released, record);
            }
            End::Drop => {
                drop(guard);
                record.over = Over::Dropped;
            }
            End::HalfRelease => {
                let _ = poll_at_most(1, guard.release()).await;
                record.over = Over::Dropped;
            }
            End::Detach => self.detach(guard, record).await,
            End::HalfDetach => {
                record.over = Over::Dropped;
                let begun = now();
                if let Held::Guard(guard) = guard
                    && let Some(Ok(detached)) = poll_at_most(1, guard.detach()).await
                {
                    self.detached(&detached, begun, record);
                }
            }
            // Nobody would close its client for it before all are done.
            End::Forget if Instant::now() >= self.stage.ends => {
                drop(guard);
                record.over = Over::Dropped;
            }
            End::Forget => {
                self.seat.forgot.store(true, Ordering::SeqCst);
                std::mem::forget(guard);
                return;
            }
        }
        record.acquisition.released = Some(now());
        if record.acquisition.lost.is_some() {
            record.over = Over::Lost;
        }
    }

    fn released(&self, released: Option<Result<()>>, record: &mut Record) {
        match released {
            Some(Ok(())) => record.over = Over::Released,
            Some(Err(error)) => {
                record.over = Over::Lost;
                if let Error::Lost {
                    reason: LossReason::Asked,
                    ..
                } = error
                {
                    // While it was being released, which is all that was asked for.
                    record.acquisition.lost.get_or_insert_with(now);
                    record.loss = Loss::Asked;
                }
                if !self.seat.is_gone() {
                    record.error = chain(&error);
                }
            }
            None => record.over = Over::Lost,
        }
    }

    /// Two guards of one owner are one hold.
    async fn twice(&self, lock: Lock, mut record: Record) {
        let lock = ReentrantLock::new(lock);
        let owner = ReentrantOwner::new();
        let what = format!("the first of two by {} on {}", self.who, record.acquisition.lock);
        let first = self
            .stage
            .bounded(self.stage.patience(), &what, lock.acquire(&owner))
            .await;
        let Some(first) = self.settle(first, &mut record) else {
            return self.note(&record);
        };
        let view = first.view();
        look(&view, &mut record);
        self.note(&record);
        let what = format!("the second of two by {} on {}", self.who, record.acquisition.lock);
        let second = self
            .stage
            .bounded(OP_TIMEOUT + SLACK, &what, lock.acquire(&owner))
            .await;
        if let Some(Ok(second)) = &second
            && second.token() != first.token()
            && look(&view, &mut record)
        {
            self.stage.find(
                Law::Exclusion,
                format!(
                    "{} has two holds, {} and {}",
                    self.who,
                    first.token(),
                    second.token()
                ),
            );
        }
        self.hold(&first, &mut record, self.rests_until()).await;
        drop(second);
        let what = format!("release of both by {} on {}", self.who, record.acquisition.lock);
        let released = self
            .stage
            .bounded(OP_TIMEOUT + SLACK, &what, first.release())
            .await;
        self.released(released, &mut record);
        record.acquisition.released = Some(now());
        self.note(&record);
    }

    async fn look_at(&self, client: &LockClient, name: &str) -> Option<Result<lockkit_core::LockState>> {
        let what = format!("inspecting {name}");
        let limit = AcquireOptions::DEFAULT_OP_TIMEOUT + SLACK;
        match self.step.hold_as {
            HoldAs::Permit => {
                self.stage
                    .bounded(limit, &what, client.inspect_semaphore(name))
                    .await
            }
            _ => self.stage.bounded(limit, &what, client.inspect(name)).await,
        }
    }

    async fn inspect(&self, client: &LockClient, name: &str) {
        if let Some(Err(error)) = self.look_at(client, name).await
            && !self.seat.is_gone()
            && self.stage.part.schedule.strikes.is_empty()
            && self.stage.watch.stood_still() < Duration::from_millis(100)
        {
            self.stage
                .find(Law::Failure, format!("inspecting {name}: {}", chain(&error)));
        }
    }

    async fn revoke(&self, client: &LockClient, name: &str) {
        let Some(Ok(state)) = self.look_at(client, name).await else {
            return;
        };
        for holder in state.holders {
            let (from, token) = (now(), holder.token);
            let (lock, to) = (name.to_owned(), Nanos::MAX);
            self.stage.note(Note::Break { lock, from, to });
            let what = format!("revoking {token} of {name}");
            let limit = AcquireOptions::DEFAULT_OP_TIMEOUT + SLACK;
            let kind = match self.step.hold_as {
                HoldAs::Permit => LockKind::Semaphore,
                _ => LockKind::Lock,
            };
            let _ = match kind {
                LockKind::Semaphore => {
                    let revoking = client.revoke_permit_by_force(name, token);
                    self.stage.bounded(limit, &what, revoking).await
                }
                LockKind::Lock => {
                    self.stage
                        .bounded(limit, &what, client.revoke_by_force(name, token))
                        .await
                }
            };
            let (lock, to) = (name.to_owned(), now());
            self.stage.note(Note::Break { lock, from, to });
        }
    }
}

/// Returns whether it holds, by itself.
fn look(view: &HoldView, record: &mut Record) -> bool {
    let before = now();
    if view.is_held() {
        record.acquisition.until = Some(before);
        return true;
    }
    record.acquisition.lost.get_or_insert(before);
    if let Some(reason) = view.lost().reason() {
        record.loss = reason.into();
    }
    false
}

/// Notes when `asking` had been polled for the first time, and had not been granted.
async fn queued<F: Future>(asking: F, queued: &mut Option<Nanos>) -> F::Output {
    let mut asking = Box::pin(asking);
    let mut first = true;
    poll_fn(|context| {
        let polled = Pin::new(&mut asking).poll(context);
        if polled.is_pending() && std::mem::take(&mut first) {
            *queued = Some(now());
        }
        match polled {
            Poll::Ready(output) => Poll::Ready(output),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Something that has a token.
trait AsGuard {
    fn token(&self) -> u64;
}

impl AsGuard for Held {
    fn token(&self) -> u64 {
        LockGuard::token(self).get()
    }
}

impl AsGuard for lockkit_core::ReentrantGuard {
    fn token(&self) -> u64 {
        LockGuard::token(self).get()
    }
}

/// The part of another process, whose clients `connect` makes; `answer` takes what it tells.
pub(crate) async fn help<F, Fut>(part: Part, connect: F, answer: fn(&str))
where
    F: Fn(String) -> Fut,
    Fut: Future<Output = Result<LockClient>>,
{
    let (wanted, wants) = mpsc::channel(16);
    let notes: Notes = Arc::new(move |note| answer(&format!("note {note}")));
    let playing = tokio::spawn(play(part, wanted, notes));
    // Ends when nobody can want a client any more.
    connect_all(wants, connect).await;
    let _ = playing.await;
}
