//! `lockkit-torture command`: many schedules of `lockkit run`, side by side.

use std::{
    env,
    path::PathBuf,
    process::Command,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use lockkit_torture::command::{Programs, Schedule, Verdict, play};

use crate::{Fallible, checked, fleet};

/// Tortures the command `lockkit run` instead: odd surroundings, bursts of signals, commands that do not behave, and servers that fail.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The targets [default: redis and file, as far as they are there]
    targets: Vec<String>,
    /// The number of schedules of each target
    #[arg(long, value_name = "N", default_value_t = 100)]
    schedules: u64,
    /// For how long, each, if all its schedules are not played by then
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    time: Option<Duration>,
    /// The seed of the first schedule of each target [default: a random one]; those that follow have the seeds after it
    #[arg(long)]
    seed: Option<u64>,
    /// The number of deployments of a target at one time
    #[arg(long, value_name = "N", default_value_t = fleet::jobs())]
    jobs: usize,
    /// Go on until so many schedules of a target have failed
    #[arg(long, value_name = "N", default_value_t = 1)]
    failures: usize,
    /// The `lockkit` program [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    lockkit: Option<PathBuf>,
    /// Run the commands without any lock: the judge has to notice
    #[arg(long, conflicts_with = "lockkit")]
    unprotected: bool,
    /// Also say what happened when in schedules that passed
    #[arg(long)]
    log: bool,
}

/// Returns whether nothing was found.
pub(crate) fn torture(arguments: &Arguments) -> Fallible<bool> {
    let mut targets = arguments.targets.clone();
    if targets.is_empty() {
        targets = ["redis", "file"].map(str::to_owned).into();
    }
    let targets = checked(&targets)?;
    let program = env::current_exe()?;
    let lockkit = match &arguments.lockkit {
        _ if arguments.unprotected => None,
        Some(lockkit) => Some(lockkit.clone()),
        None => Some(program.with_file_name("lockkit")),
    };
    if let Some(lockkit) = &lockkit {
        let version = Command::new(lockkit).arg("--version").output();
        if !version.is_ok_and(|version| version.status.success()) {
            return Err(format!("{} does not run; cargo build -p lockkit-cli", lockkit.display()).into());
        }
    }
    let programs = Programs {
        lockkit,
        witness: vec![program.into()],
    };
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..1_000_000_000));
    println!("seed {seed}");
    let mut is_good = true;
    for target in &targets {
        let campaign = Campaign {
            target,
            programs: &programs,
            arguments,
            end: seed.saturating_add(arguments.schedules),
            began: Instant::now(),
            state: Mutex::new(State {
                next: seed,
                ..State::default()
            }),
        };
        is_good &= campaign.run();
    }
    Ok(is_good)
}

/// The schedules of one target.
struct Campaign<'a> {
    target: &'a str,
    programs: &'a Programs,
    arguments: &'a Arguments,
    /// The seed behind the last one.
    end: u64,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    played: usize,
    begun: usize,
    lost: usize,
    failed: usize,
    errors: Vec<String>,
}

impl Campaign<'_> {
    /// Returns whether nothing was found, and something was tried.
    fn run(&self) -> bool {
        thread::scope(|scope| {
            for _ in 0..self.arguments.jobs.max(1) {
                scope.spawn(|| {
                    if let Err(error) = self.work() {
                        self.with(|state| state.errors.push(error.to_string()));
                    }
                });
            }
        });
        self.with(|state| {
            for error in &state.errors {
                println!("{}: ERROR: {error}", self.target);
            }
            println!(
                "{}: {} schedules, {} commands, {} lost, {} schedules with findings, in {:.0?}",
                self.target,
                state.played,
                state.begun,
                state.lost,
                state.failed,
                self.began.elapsed()
            );
            state.failed == 0 && state.errors.is_empty() && state.begun > 0
        })
    }

    fn with<T>(&self, what: impl FnOnce(&mut State) -> T) -> T {
        what(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Plays one schedule after the other on a deployment of its own.
    fn work(&self) -> Fallible<()> {
        let target = lockkit_torture::start(self.target)?;
        while let Some(seed) = self.take() {
            let schedule = Schedule::generate(seed, &*target);
            let verdict = play(&*target, self.programs, &schedule)?;
            self.with(|state| {
                state.played += 1;
                state.begun += verdict.begun;
                state.lost += verdict.lost;
                state.failed += usize::from(!verdict.findings.is_empty());
                self.tell(seed, &verdict, state.played);
            });
        }
        Ok(())
    }

    /// The next seed, as long as there is to be another schedule.
    fn take(&self) -> Option<u64> {
        let is_over = self
            .arguments
            .time
            .is_some_and(|time| self.began.elapsed() >= time);
        self.with(|state| {
            let goes_on = !is_over && state.next < self.end && state.failed < self.arguments.failures;
            state.next += u64::from(goes_on);
            goes_on.then_some(state.next - 1)
        })
    }

    fn tell(&self, seed: u64, verdict: &Verdict, played: usize) {
        let target = self.target;
        if verdict.findings.is_empty() {
            if self.arguments.log {
                println!("{target}: ok     seed {seed}\n{}", verdict.log);
            }
            return;
        }
        println!("{target}: FAILED seed {seed}, after {played} schedules");
        for finding in &verdict.findings {
            println!("  {finding}");
        }
        println!(
            "{target}: again: lockkit-torture command {target} --seed {seed} --schedules 1\n{}",
            verdict.log
        );
    }
}
