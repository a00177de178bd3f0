//! Epochs, one after the other on each deployment.

use std::{
    collections::{BTreeSet, HashMap},
    fmt, io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lockkit_core::{Capabilities, LockClient, LockKind, spi::chain};
use tokio::{runtime, sync::mpsc, task::JoinSet};

use super::{
    Ask, Bounds, Fault, HoldAs, KILL, STOP, Schedule, Shape, Strike, Target, TaskPlan,
    judge::{Highest, Pause, Story, Struck, judge},
    play::{Notes, OP_TIMEOUT, Part, connect_all, election_of, locks_of, name, play},
    record::{AskBack, Finding, Law, Listed, Note, Over, Record, Sight},
    shrink::shorten,
};
use crate::{
    helper::{Helper, Launch},
    history::{Nanos, now},
    process::Process,
    stall::Stopwatch,
};

/// The time in which an epoch becomes quiet, beyond what the dead and the faults take.
const QUIET: Duration = Duration::from_secs(15);

/// Tortures one deployment, epoch by epoch. It blocks: call it outside of any runtime.
#[derive(Debug)]
pub struct Torture {
    target: Arc<dyn Target>,
    launch: Option<Launch>,
    only: Option<BTreeSet<String>>,
    runtimes: bool,
    histories: bool,
    capabilities: Capabilities,
    info: (Duration, bool),
    /// The prefix of names: new after a fault that may cost tokens.
    prefix: String,
    highest: Highest,
    /// The leftovers that were told of, or are a forgotten guard's.
    known: BTreeSet<String>,
}

/// The result of one epoch.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Verdict {
    /// The violations found.
    pub findings: Vec<Finding>,
    /// The number of granted acquisitions.
    pub granted: usize,
    /// The number of each fault that happened.
    pub faults: HashMap<String, usize>,
    /// A log of who did what when, for the search for the cause.
    pub log: String,
    /// What happened, as lines of JSON for other judges. Empty without [`Torture::histories`].
    pub history: String,
}

/// The result of many epochs.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// The time that they took.
    pub time: Duration,
    /// The number of epochs.
    pub epochs: usize,
    /// The number of granted acquisitions.
    pub granted: usize,
    /// The number of each fault that happened.
    pub faults: HashMap<String, usize>,
    /// The schedules that failed, the shortest that still did, and what was found.
    pub failures: Vec<Failure>,
}

/// A schedule that failed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The schedule, shortened.
    pub schedule: Schedule,
    /// The violations found.
    pub findings: Vec<Finding>,
    /// The time since the start.
    pub after: Duration,
    /// A log of who did what when, in the epoch that failed first.
    pub log: String,
}

/// One line for a report that is read by people.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let struck: usize = self.faults.values().sum();
        write!(
            f,
            "{} epochs, {} grants, {struck} faults, {} failed, {} s",
            self.epochs,
            self.granted,
            self.failures.len(),
            self.time.as_secs()
        )?;
        for (fault, times) in self.faults() {
            write!(f, ", {fault} {times}")?;
        }
        Ok(())
    }
}

impl Report {
    /// Returns the number of each fault that happened, by name.
    pub fn faults(&self) -> Vec<(&str, usize)> {
        let faults = self.faults.iter();
        let mut faults: Vec<_> = faults.map(|(fault, times)| (fault.as_str(), *times)).collect();
        faults.sort_unstable();
        faults
    }

    fn add(&mut self, verdict: &Verdict) {
        self.epochs += 1;
        self.granted += verdict.granted;
        for (fault, times) in &verdict.faults {
            *self.faults.entry(fault.clone()).or_default() += times;
        }
    }
}

/// The extent of a run.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Effort {
    /// The time for which epochs are begun.
    pub time: Duration,
    /// It ends before that after so many grants and so many `faults`. Without either it takes all the time.
    pub grants: usize,
    /// The number of faults by which it may end early, see `grants`. Nobody waits for faults of what has none.
    pub faults: usize,
    /// The time for which a schedule that failed is shortened.
    pub shortening: Duration,
    /// The number of failures after which it ends.
    pub failures: usize,
}

impl Effort {
    /// An effort for `time`, or until something is found, which is then shortened for up to two minutes.
    pub const fn new(time: Duration) -> Self {
        Self {
            time,
            grants: 0,
            faults: 0,
            shortening: Duration::from_secs(120),
            failures: 1,
        }
    }
}

/// A run of several [`Torture`]s together, each on a deployment of its own.
#[derive(Debug)]
pub struct Campaign {
    effort: Effort,
    /// The seed of the next schedule.
    seed: AtomicU64,
    began: OnceLock<Instant>,
    faultless: AtomicBool,
    report: Mutex<Report>,
}

impl Campaign {
    /// A run of the schedules that follow from `seed` and the seeds after it.
    pub fn new(seed: u64, effort: Effort) -> Self {
        Self {
            effort,
            seed: AtomicU64::new(seed),
            began: OnceLock::new(),
            faultless: AtomicBool::new(false),
            report: Mutex::default(),
        }
    }

    /// Returns whether no more epochs are begun.
    pub fn is_over(&self) -> bool {
        let Effort {
            time,
            grants,
            faults,
            failures,
            ..
        } = self.effort;
        let failed = self.lock().failures.len();
        let has_goal = (grants, faults) != (0, 0);
        self.elapsed() >= time || failed >= failures || (has_goal && self.is_reached())
    }

    /// Returns whether there are as many grants and faults as were asked for.
    pub fn is_reached(&self) -> bool {
        let report = self.lock();
        let faults: usize = report.faults.values().sum();
        report.granted >= self.effort.grants
            && (faults >= self.effort.faults || self.faultless.load(Ordering::Relaxed))
    }

    /// Returns the result so far.
    pub fn report(&self) -> Report {
        let mut report = self.lock().clone();
        report.time = self.elapsed();
        report
    }

    /// Since the first epoch began.
    fn elapsed(&self) -> Duration {
        self.began.get().map_or(Duration::ZERO, Instant::elapsed)
    }

    fn lock(&self) -> MutexGuard<'_, Report> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Torture {
    /// A run against `target`, whose client is made once to learn what it can do.
    ///
    /// # Errors
    /// If it cannot be reached.
    pub fn new(target: Arc<dyn Target>) -> io::Result<Self> {
        let route = target.routes().first().cloned().unwrap_or_default();
        let (capabilities, info) = runtime()?.block_on(async {
            let client = target
                .connect(&route)
                .await
                .map_err(|error| io::Error::other(chain(&error)))?;
            let capabilities = client.capabilities();
            let info = (client.info().fallback_poll, capabilities.fifo);
            client
                .close(Duration::from_secs(5))
                .await
                .map_err(|error| io::Error::other(chain(&error)))?;
            Ok::<_, io::Error>((capabilities, info))
        })?;
        Ok(Self {
            target,
            launch: None,
            only: None,
            runtimes: true,
            histories: false,
            capabilities,
            info,
            prefix: new_prefix(),
            highest: Highest::default(),
            known: BTreeSet::new(),
        })
    }

    /// Has clients in other processes, which are started so.
    #[must_use]
    pub fn helpers(mut self, launch: Launch) -> Self {
        self.launch = self.target.is_shared().then_some(launch);
        self
    }

    /// Has clients that live no longer than the runtimes they were connected in.
    #[must_use]
    pub fn keep_runtimes(mut self) -> Self {
        self.runtimes = false;
        self
    }

    /// Has each [`Verdict`] come with its history.
    #[must_use]
    pub fn histories(mut self) -> Self {
        self.histories = true;
        self
    }

    /// Leaves out all faults but these.
    ///
    /// # Errors
    /// The first of them that the deployment does not have.
    pub fn only(mut self, faults: &[String]) -> Result<Self, String> {
        let known: Vec<_> = self
            .target
            .faults()
            .iter()
            .map(|fault| fault.name)
            .chain([STOP, KILL])
            .collect();
        if let Some(unknown) = faults.iter().find(|fault| !known.contains(&fault.as_str())) {
            return Err(format!(
                "there is no fault {unknown:?} here; there are {}",
                known.join(", ")
            ));
        }
        self.only = Some(faults.iter().cloned().collect());
        Ok(self)
    }

    /// Returns the shape of schedules.
    pub fn shape(&self) -> Shape {
        let chosen = |fault: &Fault| self.only.as_ref().is_none_or(|only| only.contains(fault.name));
        let mut shape = Shape::new(self.capabilities);
        shape.processes = if self.launch.is_some() { 3 } else { 1 };
        shape.min_ttl = u64::try_from(self.target.min_ttl().as_millis()).unwrap_or(500);
        shape.max_ttl = u64::try_from(self.target.max_ttl().as_millis()).unwrap_or(60_000);
        shape.faults = self.target.faults().into_iter().filter(chosen).collect();
        let of_processes = |name: &str| self.only.as_ref().is_none_or(|only| only.contains(name));
        shape.stops = of_processes(STOP);
        shape.kills = of_processes(KILL);
        shape.runtimes = self.runtimes;
        shape
    }

    /// Runs the schedules that follow from `seed` and the seeds after it.
    ///
    /// # Errors
    /// If the machinery fails: a process that does not start, a fault that cannot be made.
    pub fn run(
        &mut self,
        seed: u64,
        effort: Effort,
        tell: impl FnMut(&Schedule, &Verdict),
    ) -> io::Result<Report> {
        let campaign = Campaign::new(seed, effort);
        self.join(&campaign, tell)?;
        Ok(campaign.report())
    }

    /// Runs schedules of `campaign` until it is over. Others may do so at the same time.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn join(&mut self, campaign: &Campaign, mut tell: impl FnMut(&Schedule, &Verdict)) -> io::Result<()> {
        campaign.began.get_or_init(Instant::now);
        let shape = self.shape();
        let faultless = shape.faults.is_empty() && shape.processes == 1;
        campaign.faultless.store(faultless, Ordering::Relaxed);
        while !campaign.is_over() {
            let seed = campaign.seed.fetch_add(1, Ordering::Relaxed);
            let schedule = Schedule::generate(seed, &shape);
            let verdict = self.epoch(&schedule)?;
            tell(&schedule, &verdict);
            campaign.lock().add(&verdict);
            if verdict.findings.is_empty() {
                continue;
            }
            let after = campaign.elapsed();
            let shortened = self.shorten(&schedule, &verdict.findings, campaign.effort.shortening);
            let (schedule, broken) = match shortened {
                Ok(shortened) => (shortened, None),
                Err(error) => (schedule, Some(error)),
            };
            campaign.lock().failures.push(Failure {
                schedule,
                findings: verdict.findings,
                after,
                log: verdict.log,
            });
            broken.map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// The schedule with as much left out as still leads to a finding against the same law, within `limit`.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn shorten(
        &mut self,
        schedule: &Schedule,
        findings: &[Finding],
        limit: Duration,
    ) -> io::Result<Schedule> {
        let laws: BTreeSet<_> = findings.iter().map(|finding| finding.law).collect();
        let mut broken = None;
        let shortened = shorten(schedule, limit, |candidate| match self.epoch(candidate) {
            Ok(verdict) => verdict.findings.iter().any(|finding| laws.contains(&finding.law)),
            Err(error) => {
                broken = Some(error);
                false
            }
        });
        broken.map_or(Ok(shortened), Err)
    }

    /// Runs one schedule.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn epoch(&mut self, schedule: &Schedule) -> io::Result<Verdict> {
        let known: Vec<_> = self.target.faults();
        for strike in &schedule.strikes {
            if ![STOP, KILL].contains(&strike.fault.as_str())
                && !known.iter().any(|fault| fault.name == strike.fault)
            {
                return Err(io::Error::other(format!(
                    "there is no fault {:?} here",
                    strike.fault
                )));
            }
        }
        let other_processes = schedule.clients.iter().any(|client| client.process > 0);
        if other_processes && self.launch.is_none() {
            return Err(io::Error::other(
                "the schedule wants other processes, and there can be none",
            ));
        }
        let runtime = runtime()?;
        let played = runtime.block_on(self.play_epoch(schedule));
        // A forgotten guard keeps its hold.
        let forgot = |(story, _): &(Story, _)| story.forgot_anything();
        let left = if played.as_ref().is_ok_and(forgot) {
            None
        } else {
            drained(&runtime)
        };
        runtime.shutdown_background();
        let (story, mut findings) = played?;
        findings.extend(left);
        findings.extend(judge(&story, &mut self.highest));
        findings.extend(vacuous(&story));
        let lasts = |struck: &Struck| struck.fault.is_some_and(|fault| fault.lasting);
        if !findings.is_empty() || story.struck.iter().any(lasts) {
            self.prefix = new_prefix();
            self.highest = Highest::default();
        }
        findings.extend(self.leftovers(&story)?);
        let history = if self.histories {
            story.chronicle(&findings)
        } else {
            String::new()
        };
        let mut verdict = Verdict {
            history,
            log: if findings.is_empty() {
                String::new()
            } else {
                story.log()
            },
            findings,
            ..Verdict::default()
        };
        let granted = |record: &&Record| record.acquisition.granted.is_some();
        verdict.granted = story.records.iter().filter(granted).count();
        let struck = story.struck.iter().filter_map(|struck| Some(struck.fault?.name));
        let paused = |pause: &Pause| if pause.to.is_some() { STOP } else { KILL };
        for name in struck.chain(story.pauses.iter().map(paused)) {
            *verdict.faults.entry(name.to_owned()).or_default() += 1;
        }
        Ok(verdict)
    }

    async fn play_epoch(&self, schedule: &Schedule) -> io::Result<(Story, Vec<Finding>)> {
        let watch = Stopwatch::start();
        let routes = self.target.routes();
        let probe = self.target.connect(&routes[0]).await;
        let probe = probe.map_err(|error| io::Error::other(format!("no client: {}", chain(&error))))?;
        let bounds = self.bounds(schedule, &probe);
        // It is to look on from outside when all is over, and not to hold connections meanwhile.
        let _ = probe.close(Duration::from_secs(5)).await;
        drop(probe);

        let mut helpers = self.helper_processes(schedule).await?;
        let directory = Directory::make()?;
        let begins = Duration::from_millis(if helpers.is_empty() { 10 } else { 50 });
        let part = Part {
            schedule: schedule.clone(),
            process: 0,
            origin: now() + u64::try_from(begins.as_nanos()).unwrap_or_default(),
            patience: self.patience(schedule, &bounds),
            prefix: self.prefix.clone(),
            routes,
            messages: directory.0.clone(),
        };
        let heard: Arc<Mutex<Heard>> = Arc::default();
        let notes: Notes = {
            let heard = heard.clone();
            Arc::new(move |note| hear(&heard, note))
        };
        let script = directory.script(&part)?;
        let (mut processes, mut inputs) = (HashMap::new(), Vec::new());
        let mut playing = JoinSet::new();
        for (number, mut helper) in helpers.drain(..) {
            helper.send(&format!("torture {number} {} {}", part.origin, script.display()))?;
            let (process, commands, answers) = helper.parts();
            // A helper ends with its input.
            inputs.push(commands);
            processes.insert(number, Arc::new(Mutex::new(process)));
            playing.spawn(listen(number, answers, notes.clone(), part.patience + QUIET * 2));
        }
        let processes = Arc::new(processes);
        let over = Arc::new(AtomicBool::new(false));
        let strikers = self.strikers(&part, &processes, &over);

        let (wanted, wants) = mpsc::channel(16);
        let target = self.target.clone();
        let connecting = tokio::spawn(connect_all(wants, move |route| {
            let target = target.clone();
            async move { target.connect(&route).await }
        }));
        play(part.clone(), wanted, notes.clone()).await;
        let mut findings = Vec::new();
        while let Some(heard) = playing.join_next().await {
            findings.extend(heard.ok().flatten());
        }
        drop(inputs);
        connecting.abort();
        over.store(true, Ordering::SeqCst);
        let done = tokio::task::spawn_blocking(move || {
            strikers
                .join()
                .map_err(|_| io::Error::other("a striker panicked"))
        });
        let done = done.await.map_err(io::Error::other)??;
        let (struck, pauses) = done?;
        let healed = now();
        // Deaths explain why nothing more was heard of a process.
        findings.retain(|(number, _)| !pauses.iter().any(|pause: &Pause| pause.process == *number));
        let mut findings: Vec<_> = findings.into_iter().map(|(_, finding)| finding).collect();

        let heard = std::mem::take(&mut *heard.lock().unwrap_or_else(PoisonError::into_inner));
        findings.extend(heard.findings);
        let story = Story {
            schedule: schedule.clone(),
            records: heard.records.into_values().collect(),
            struck,
            breaks: heard.breaks.into_values().collect(),
            asks: heard.asks.into_values().collect(),
            sights: heard.sights,
            lists: heard.lists,
            pauses,
            gone: heard.gone,
            bounds,
            stood_still: watch.stood_still(),
            clock: wall_clock().saturating_sub(now() / 1_000),
        };
        findings.extend(self.residue(&story).await);
        // The next epoch may be one without faults, and is to have nothing to get over.
        let got_over = story.struck.iter().filter_map(|struck| {
            let fault = struck.fault?;
            let healed = if fault.lasting { healed } else { struck.to };
            Some(Duration::from_nanos(healed) + fault.recovery)
        });
        if let Some(got_over) = got_over.max() {
            tokio::time::sleep(got_over.saturating_sub(Duration::from_nanos(now()))).await;
        }
        Ok((story, findings))
    }

    fn bounds(&self, schedule: &Schedule, client: &LockClient) -> Bounds {
        let steps = schedule.tasks.iter().flat_map(|task| &task.steps);
        let ttls = steps.flat_map(|step| [Some(step.ttl), step.retime.map(|(_, ttl)| ttl)]);
        let ttls = ttls.flatten();
        let dead = ttls.map(|ttl| {
            let length = Duration::from_millis(ttl);
            let holder = client.dead_holder_bound(length);
            (ttl, (holder, self.target.dead_waiter_bound(client, length)))
        });
        let (fallback_poll, fifo) = self.info;
        Bounds {
            dead: dead.collect(),
            fallback_poll,
            fifo,
            lease: self.capabilities.lease,
            splits: self.target.splits(),
            shows_late: self.target.shows_late(),
        }
    }

    /// Until when all who wait have to be granted: after the faults, and what the dead may keep.
    fn patience(&self, schedule: &Schedule, bounds: &Bounds) -> Duration {
        let faults = self.target.faults();
        let over = |strike: &Strike| strike.at + strike.lasts;
        let over = schedule
            .strikes
            .iter()
            .map(over)
            .max()
            .unwrap_or_default()
            .max(schedule.span);
        let struck = |fault: &&Fault| schedule.strikes.iter().any(|strike| strike.fault == fault.name);
        let recovery = faults
            .iter()
            .filter(struck)
            .map(|fault| fault.recovery)
            .max()
            .unwrap_or_default();
        let dead = if schedule.is_harmless() && !schedule.detaches() {
            Duration::ZERO
        } else {
            let bounds = bounds.dead.values().map(|(holder, waiter)| *holder.max(waiter));
            bounds.max().unwrap_or_default()
        };
        Duration::from_millis(over) + recovery * 2 + dead + QUIET
    }

    async fn helper_processes(&self, schedule: &Schedule) -> io::Result<Vec<(u32, Helper)>> {
        let numbers: BTreeSet<_> = schedule.clients.iter().map(|client| client.process).collect();
        let mut helpers = Vec::new();
        for number in numbers.into_iter().filter(|number| *number > 0) {
            if let Some(launch) = &self.launch {
                helpers.push((number, Helper::start(launch, Some("")).await?));
            }
        }
        Ok(helpers)
    }

    /// Strikes and heals when it is time, one after the other, on a thread that may block.
    fn strikers(
        &self,
        part: &Part,
        processes: &Arc<HashMap<u32, Arc<Mutex<Process>>>>,
        over: &Arc<AtomicBool>,
    ) -> thread::JoinHandle<Done> {
        let (target, part, processes) = (self.target.clone(), part.clone(), processes.clone());
        let over = over.clone();
        thread::spawn(move || strike_all(&*target, &part, &processes, &over))
    }

    /// Finds what the deployment itself shows although all clients are closed.
    fn leftovers(&mut self, story: &Story) -> io::Result<Option<Finding>> {
        if story.forgot_anything() {
            // A forgotten guard keeps its hold.
            self.known.extend(self.target.left()?);
            return Ok(None);
        }
        let limit = lets_go_within(story);
        let watch = Stopwatch::start();
        loop {
            let asked = self.target.left();
            let over = watch.elapsed() > limit;
            match asked {
                Err(error) if over => return Err(error),
                Err(_) => {}
                Ok(mut left) => {
                    left.retain(|one| !self.known.contains(one));
                    if left.is_empty() {
                        return Ok(None);
                    }
                    if over {
                        let shown = left[..left.len().min(8)].join("; ");
                        let detail =
                            format!("{limit:?} after the end {} things are left: {shown}", left.len());
                        self.known.extend(left);
                        // In memory, a hold that was detached and that nobody adopts is there until somebody comes by its name.
                        // Inspections find out whether it still counts.
                        if !self.target.is_shared()
                            && story.records.iter().any(|record| record.over == Over::Detached)
                        {
                            return Ok(None);
                        }
                        return Ok(Some(Finding::new(Law::Residue, detail)));
                    }
                }
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Finds what is still there although all is over.
    async fn residue(&self, story: &Story) -> Option<Finding> {
        let route = self.target.routes().first().cloned().unwrap_or_default();
        let client = match self.target.connect(&route).await {
            Ok(client) => client,
            Err(error) => {
                let detail = format!("no client when all is over: {}", chain(&error));
                return Some(Finding::new(Law::Failure, detail));
            }
        };
        let harmless = story.schedule.is_harmless();
        let limit = lets_go_within(story);
        let watch = Stopwatch::start();
        let mut names = BTreeSet::new();
        for step in story.schedule.tasks.iter().flat_map(|task| &task.steps) {
            for number in locks_of(step) {
                let kind = if step.hold_as == HoldAs::Permit {
                    LockKind::Semaphore
                } else {
                    LockKind::Lock
                };
                let size = story.schedule.sizes.get(number as usize).copied();
                names.insert((kind as u8, name(&self.prefix, step.hold_as, number), kind, size));
            }
        }
        let mut left = None;
        for (_, name, kind, size) in names {
            loop {
                let looked = match kind {
                    LockKind::Semaphore => client.inspect_semaphore(&name).await,
                    LockKind::Lock => client.inspect(&name).await,
                };
                let shown = match looked {
                    Ok(state) if state.is_free() && state.waiters.unwrap_or(0) == 0 => break,
                    Ok(state) => format!("holders {:?} and waiters {:?}", state.holders, state.waiters),
                    Err(error) => chain(&error),
                };
                if watch.elapsed() > limit {
                    left = Some(Finding::new(
                        Law::Residue,
                        format!("{limit:?} after the end the server shows of {name}: {shown}"),
                    ));
                    break;
                }
                // Those who died could not leave the queue; whoever comes next finds them gone.
                if !harmless {
                    let _ = come_next(&client, &name, kind, size).await;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        let _ = client.close(Duration::from_secs(5)).await;
        left
    }
}

/// Has somebody hold what is free, and give it back.
async fn come_next(
    client: &LockClient,
    name: &str,
    kind: LockKind,
    size: Option<u32>,
) -> lockkit_core::Result<()> {
    let lock = match (election_of(name), kind) {
        (Some(election), _) => {
            let candidate = client.election(election)?.candidate("the last")?;
            return match candidate.try_campaign().await? {
                Some(leadership) => leadership.resign().await,
                None => Ok(()),
            };
        }
        (None, LockKind::Lock) => client.lock(name)?,
        (None, LockKind::Semaphore) => client.semaphore(name, size.unwrap_or(1))?,
    };
    match lock.try_acquire().await? {
        Some(guard) => guard.release().await,
        None => Ok(()),
    }
}

/// By when nothing may be left of an epoch that is over.
fn lets_go_within(story: &Story) -> Duration {
    let dead = story.bounds.dead.values();
    let dead = dead.map(|(holder, waiter)| *holder.max(waiter)).max();
    let dead = dead.filter(|_| !story.schedule.is_harmless() || story.schedule.detaches());
    dead.unwrap_or_default() + OP_TIMEOUT * 2 + Duration::from_secs(8)
}

fn runtime() -> io::Result<runtime::Runtime> {
    runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
}

fn new_prefix() -> String {
    format!("torture/{:08x}", fastrand::u32(..))
}

/// The time in ms for a first grant: on a busy machine, a client needs it to connect, and again for the first session that locks.
const CONNECTED: u64 = 1_000;

/// An epoch that grants nothing, or far less than what could not fail, proves nothing.
fn vacuous(story: &Story) -> Option<Finding> {
    let schedule = &story.schedule;
    // The time that surely comes before the first fault, or the end.
    let calm = schedule
        .strikes
        .first()
        .map_or(schedule.span / 2, |strike| strike.at.saturating_sub(CONNECTED));
    let lives = |id: u32| {
        let mut clients = schedule.clients.iter();
        clients.any(|client| client.id == id && client.fate.is_none())
    };
    let asks = |task: &&TaskPlan| {
        // Who gives another size of a semaphore may be refused.
        let first = task
            .steps
            .iter()
            .find(|step| step.ask == Ask::Wait && step.size.is_none());
        first.is_some_and(|step| step.at < calm) && lives(task.client)
    };
    let due = schedule.tasks.iter().filter(asks).count();
    let granted = story.records.iter();
    let granted = granted
        .filter(|record| record.acquisition.granted.is_some())
        .count();
    let least = if schedule.is_harmless() {
        due.div_ceil(2)
    } else {
        due.min(1)
    };
    (granted < least).then(|| {
        let detail = format!("{granted} grants, where {due} tasks wait for one before anything happens");
        Finding::new(Law::Vacuity, detail)
    })
}

/// No task may be left when all clients are closed.
fn drained(runtime: &runtime::Runtime) -> Option<Finding> {
    let limit = Instant::now() + Duration::from_secs(8);
    loop {
        let tasks = runtime.metrics().num_alive_tasks();
        if tasks == 0 {
            return None;
        }
        if Instant::now() >= limit {
            let detail = format!("{tasks} tasks are left although all clients are closed");
            return Some(Finding::new(Law::Residue, detail));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// The notes heard so far.
#[derive(Default)]
struct Heard {
    records: HashMap<(u32, u64, String, u32), Record>,
    breaks: HashMap<(Nanos, String), (String, Nanos, Nanos)>,
    asks: HashMap<(Nanos, String), AskBack>,
    sights: Vec<Sight>,
    lists: Vec<Listed>,
    gone: HashMap<u32, Vec<Nanos>>,
    findings: Vec<Finding>,
}

fn hear(heard: &Mutex<Heard>, note: Note) {
    let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
    match note {
        Note::Record(record) => {
            let a = &record.acquisition;
            let key = (record.process, a.who, a.lock.clone(), record.place.0);
            heard.records.insert(key, *record);
        }
        Note::Break { lock, from, to } => {
            heard.breaks.insert((from, lock.clone()), (lock, from, to));
        }
        Note::AskBack(asked) => {
            heard.asks.insert((asked.from, asked.lock.clone()), asked);
        }
        Note::Listed(listed) => heard.lists.push(listed),
        Note::Saw(sight) => heard.sights.push(sight),
        Note::Gone { client, at } => heard.gone.entry(client).or_default().push(at),
        Note::Finding(finding) => heard.findings.push(finding),
    }
}

/// Hears another process out.
async fn listen(
    number: u32,
    mut answers: mpsc::Receiver<String>,
    notes: Notes,
    limit: Duration,
) -> Option<(u32, Finding)> {
    let failed = |detail: String| Some((number, Finding::new(Law::Hang, detail)));
    loop {
        match tokio::time::timeout(limit, answers.recv()).await {
            Err(_) => return failed(format!("process {number} was silent for {limit:?}")),
            Ok(None) => return failed(format!("process {number} ended by itself")),
            Ok(Some(answer)) => match answer.strip_prefix("note ").map(str::parse) {
                Some(Ok(note)) => notes(note),
                _ if answer == "done" => return None,
                _ => return failed(format!("process {number} said {answer:?}")),
            },
        }
    }
}

type Done = io::Result<(Vec<Struck>, Vec<Pause>)>;

fn strike_all(
    target: &dyn Target,
    part: &Part,
    processes: &HashMap<u32, Arc<Mutex<Process>>>,
    over: &AtomicBool,
) -> Done {
    let faults = target.faults();
    let strikes = &part.schedule.strikes;
    let mut names: Vec<_> = part
        .schedule
        .tasks
        .iter()
        .flat_map(|task| &task.steps)
        .flat_map(|step| locks_of(step).map(|number| part.name(step.hold_as, number)))
        .collect();
    names.sort();
    names.dedup();
    let fault_of = |strike: &Strike| faults.iter().find(|fault| fault.name == strike.fault).copied();
    let mut moments: Vec<_> = Vec::new();
    for (index, strike) in strikes.iter().enumerate() {
        moments.push((strike.at, true, index));
        let lasting = fault_of(strike).is_some_and(|fault| fault.lasting);
        let until = if lasting {
            u64::MAX
        } else {
            strike.at + strike.lasts
        };
        moments.push((until, false, index));
    }
    moments.sort_unstable();
    let (mut struck, mut pauses) = (HashMap::new(), Vec::<Pause>::new());
    let mut stopped = HashMap::new();
    for (at, begins, index) in moments {
        let strike = &strikes[index];
        // A lasting fault is healed when all tasks have ended.
        if at == u64::MAX {
            while !over.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(5));
            }
        } else {
            let moment = part.origin + at * 1_000_000;
            thread::sleep(Duration::from_nanos(moment.saturating_sub(now())));
        }
        let before = now();
        match (strike.fault.as_str(), begins) {
            (STOP | KILL, _) => {
                let Some(process) = processes.get(&strike.place) else {
                    continue;
                };
                let mut process = process.lock().unwrap_or_else(PoisonError::into_inner);
                let number = strike.place;
                match (strike.fault.as_str(), begins) {
                    (KILL, true) => {
                        process.kill()?;
                        let (from, to) = (before, None);
                        pauses.push(Pause {
                            process: number,
                            from,
                            to,
                        });
                    }
                    // One that has been killed or is done cannot be stopped.
                    (STOP, true) if process.stop().is_ok() => {
                        stopped.insert(index, pauses.len());
                        let (from, to) = (before, Some(Nanos::MAX));
                        pauses.push(Pause {
                            process: number,
                            from,
                            to,
                        });
                    }
                    (STOP, false) => {
                        if let Some(pause) = stopped.remove(&index) {
                            let _ = process.resume();
                            pauses[pause].to = Some(now());
                        }
                    }
                    _ => {}
                }
            }
            (_, true) => {
                target.strike(strike, &names)?;
                struck.insert(index, (before, now()));
            }
            (_, false) => {
                target.heal(strike)?;
                // What lasts strikes once: who has not been told after that is not excused by its going on.
                let lasting = fault_of(strike).is_some_and(|fault| fault.lasting);
                if let Some((_, to)) = struck.get_mut(&index).filter(|_| !lasting) {
                    *to = now();
                }
            }
        }
    }
    let struck = struck.into_iter().map(|(index, (from, to))| Struck {
        fault: fault_of(&strikes[index]),
        from,
        to,
    });
    Ok((struck.collect(), pauses))
}

/// The private directory of an epoch: the part of other processes, and what passes between them. It goes with the epoch.
struct Directory(PathBuf);

impl Directory {
    fn make() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!(
            "lockkit-torture-{}-{:016x}",
            std::process::id(),
            fastrand::u64(..)
        ));
        let mut builder = std::fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&path)?;
        Ok(Self(path))
    }

    /// Writes the part as other processes read it.
    fn script(&self, part: &Part) -> io::Result<PathBuf> {
        let path = self.0.join("script");
        let mut text = format!("{}\n{}\n", part.prefix, part.patience.as_millis());
        // Which may hold a password.
        text.push_str(&part.routes.join(" "));
        text.push('\n');
        text.push_str(&part.schedule.to_string());
        std::fs::write(&path, text)?;
        Ok(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The part that is another process's, from the command that it was given.
pub(crate) fn read_part(process: &str, origin: &str, path: &str) -> Result<Part, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let mut lines = text.splitn(4, '\n');
    let mut line = || lines.next().ok_or("a script that is too short");
    let (prefix, patience, routes) = (line()?.to_owned(), line()?, line()?);
    let number = |text: &str| text.parse::<u64>().map_err(|error| error.to_string());
    Ok(Part {
        process: u32::try_from(number(process)?).map_err(|error| error.to_string())?,
        origin: number(origin)?,
        patience: Duration::from_millis(number(patience)?),
        prefix,
        routes: routes.split(' ').map(str::to_owned).collect(),
        messages: std::path::Path::new(path)
            .parent()
            .map(PathBuf::from)
            .unwrap_or_default(),
        schedule: line()?.parse()?,
    })
}

/// The wall clock in µs since 1970.
fn wall_clock() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
