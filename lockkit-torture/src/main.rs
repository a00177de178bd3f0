//! `cargo run --release -p lockkit-torture -- redis zk --for 15m --seed 4711 --faults cut,reset`

mod commands;
mod fleet;

use std::{
    env,
    error::Error,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use clap::{Parser, Subcommand};
use fleet::Fleet;
use lockkit_conformance::{
    helper::{self, Launch},
    torture::{Campaign, Effort, Failure, Schedule, Torture, Verdict},
};
use lockkit_testbed::skipped;
use lockkit_torture::command::witness;

/// Tortures lockkit's backends on private servers: random schedules, faults, and a judge.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    instead: Option<Instead>,
    /// The targets to torture [default: everything that there is a server for]
    targets: Vec<String>,
    /// For how long, each [default: 1m, or until there are so many `--grants` and `--least-faults`]
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    time: Option<Duration>,
    /// Until there are so many grants of each target; it fails if there is no time for them
    #[arg(long, value_name = "N", default_value_t = 0)]
    grants: usize,
    /// Until there are so many faults of each target that has any; it fails if there is no time for them
    #[arg(long, value_name = "N", default_value_t = 0)]
    least_faults: usize,
    /// The number of deployments at one time
    #[arg(long, value_name = "N", default_value_t = fleet::jobs())]
    jobs: usize,
    /// The seed of the first schedule of each target [default: a random one]; those that follow have the seeds after it
    #[arg(long)]
    seed: Option<u64>,
    /// No other faults than these, separated by commas; `none` for none
    #[arg(long, value_delimiter = ',')]
    faults: Option<Vec<String>>,
    /// Have no client lose the runtime that it was connected in
    #[arg(long)]
    keep_runtimes: bool,
    /// Run this schedule instead, which a run before has printed
    #[arg(long, value_name = "FILE")]
    schedule: Option<PathBuf>,
    /// For how long a schedule that fails is shortened
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = humantime::parse_duration)]
    shorten: Duration,
    /// Go on until so many schedules of a target have failed
    #[arg(long, value_name = "N", default_value_t = 1)]
    failures: usize,
    /// Also say who did what when in an epoch that failed
    #[arg(long)]
    log: bool,
    /// Write what happened to this file, as lines of JSON for other judges; docs/torture.md documents them
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
}

/// What is tortured in the place of the backends.
#[derive(Debug, Subcommand)]
enum Instead {
    Command(commands::Arguments),
}

/// The bytes of room for the servers of some dozens of deployments.
const ROOM: u64 = 8 << 30;

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> ExitCode {
    if helper::is_helper() {
        let served = helper::main(|route| async move { lockkit::connect(&route).await });
        return ExitCode::from(u8::from(served.is_err()));
    }
    if witness::is_witness() {
        return witness::main().map_or(ExitCode::FAILURE, ExitCode::from);
    }
    let arguments = Arguments::parse();
    in_memory();
    let done = match &arguments.instead {
        Some(Instead::Command(arguments)) => commands::torture(arguments),
        None => torture(&arguments),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("lockkit-torture: {error}");
            ExitCode::from(2)
        }
    }
}

/// Has servers write to memory, unless `TMPDIR` says where. They are killed, but nobody cuts their power, and those
/// that wait for a disk grant a tenth of the locks.
fn in_memory() {
    let memory = Path::new("/dev/shm");
    let free = rustix::fs::statvfs(memory).map_or(0, |room| room.f_bavail.saturating_mul(room.f_frsize));
    if env::var_os("TMPDIR").is_none() && free >= ROOM {
        // Refused only if it was done before.
        let _ = tempfile::env::override_temp_dir(memory);
    }
}

/// Returns whether nothing was found, and as much was done as was asked for.
fn torture(arguments: &Arguments) -> Fallible<bool> {
    let targets = targets(arguments)?;
    let history = arguments.history.as_deref().map(Chronicle::create).transpose()?;
    if let Some(path) = &arguments.schedule {
        let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let schedule = text
            .parse::<Schedule>()
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let mut good = true;
        for name in &targets {
            let verdict = replay(name, &mut deploy(name, arguments)?, &schedule, arguments)?;
            good &= verdict.findings.is_empty();
            if let Some(history) = &history {
                history.write(&verdict)?;
            }
        }
        return Ok(good);
    }
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..1_000_000_000));
    println!("seed {seed}");
    let (time, goal) = match (arguments.time, (arguments.grants, arguments.least_faults)) {
        (Some(time), goal) => (time, goal),
        (None, (0, 0)) => (Duration::from_mins(1), (0, 0)),
        (None, goal) => (Duration::MAX, goal),
    };
    let mut effort = Effort::new(time);
    (effort.grants, effort.faults) = goal;
    effort.shortening = arguments.shorten;
    effort.failures = arguments.failures;
    let campaigns = targets
        .iter()
        .map(|name| (name.clone(), Campaign::new(seed, effort)));
    let fleet = Fleet::new(campaigns, time < Duration::MAX);
    let outcomes = fleet.run(
        arguments.jobs,
        |name| deploy(name, arguments),
        |name, schedule, verdict| {
            let findings = verdict.findings.iter().map(|finding| format!("\n  {finding}"));
            println!(
                "{}{}",
                line(name, schedule, verdict),
                findings.collect::<String>()
            );
            if let Some(history) = &history
                && let Err(error) = history.write(verdict)
            {
                eprintln!("lockkit-torture: {error}");
            }
        },
    );
    for outcome in &outcomes {
        for failure in &outcome.report.failures {
            print_failure(&outcome.name, failure, arguments)?;
        }
    }
    println!();
    for outcome in &outcomes {
        println!("{outcome}");
    }
    println!("\n{}", fleet::table(&outcomes));
    Ok(outcomes.iter().all(fleet::Outcome::is_good))
}

/// Those that were asked for, if they are known and there.
fn checked(targets: &[String]) -> Fallible<Vec<String>> {
    let known = lockkit_torture::TARGETS;
    if let Some(unknown) = targets.iter().find(|name| !known.contains(&name.as_str())) {
        let known = known.join(", ");
        return Err(io::Error::other(format!("there is no target {unknown:?}; there are {known}")).into());
    }
    for name in targets {
        if let (_, Some(missing)) = lockkit_torture::missing(name) {
            return Err(io::Error::other(missing).into());
        }
    }
    Ok(targets.to_vec())
}

/// Those that are asked for, or that there are servers for.
fn targets(arguments: &Arguments) -> Fallible<Vec<String>> {
    let asked = checked(&arguments.targets)?;
    if !asked.is_empty() {
        return Ok(asked);
    }
    let known = lockkit_torture::TARGETS;
    let there = |target: &&str| {
        let (needs, missing) = lockkit_torture::missing(target);
        !skipped(needs, missing)
    };
    Ok(known.into_iter().filter(there).map(str::to_owned).collect())
}

/// The torture of a new deployment.
fn deploy(name: &str, arguments: &Arguments) -> Fallible<Torture> {
    let launch = Launch::this_program([] as [&str; 0])?;
    let mut torture = Torture::new(lockkit_torture::start(name)?)?.helpers(launch);
    if arguments.keep_runtimes {
        torture = torture.keep_runtimes();
    }
    if arguments.history.is_some() {
        torture = torture.histories();
    }
    if let Some(faults) = &arguments.faults {
        let faults: Vec<_> = faults.iter().filter(|fault| *fault != "none").cloned().collect();
        torture = torture.only(&faults)?;
    }
    Ok(torture)
}

fn replay(
    name: &str,
    torture: &mut Torture,
    schedule: &Schedule,
    arguments: &Arguments,
) -> Fallible<Verdict> {
    let verdict = torture.epoch(schedule)?;
    println!("{}", line(name, schedule, &verdict));
    for finding in &verdict.findings {
        println!("  {finding}");
    }
    if arguments.log {
        println!("{}", verdict.log);
    }
    Ok(verdict)
}

/// The file that histories go to, of all deployments: an epoch at a time.
struct Chronicle {
    path: PathBuf,
    file: Mutex<fs::File>,
}

impl Chronicle {
    fn create(path: &Path) -> io::Result<Self> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        Ok(Self {
            path: path.to_owned(),
            file: Mutex::new(fs::File::create(path).map_err(named)?),
        })
    }

    fn write(&self, verdict: &Verdict) -> io::Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(verdict.history.as_bytes())
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", self.path.display())))
    }
}

fn line(name: &str, schedule: &Schedule, verdict: &Verdict) -> String {
    let faults: Vec<_> = schedule
        .strikes
        .iter()
        .map(|strike| strike.fault.as_str())
        .collect();
    format!(
        "{name}: {} seed {}: {} ms, {} clients, {} tasks, {} grants, faults [{}]",
        if verdict.findings.is_empty() {
            "ok    "
        } else {
            "FAILED"
        },
        schedule.seed,
        schedule.span,
        schedule.clients.len(),
        schedule.tasks.len(),
        verdict.granted,
        faults.join(" ")
    )
}

fn print_failure(name: &str, failure: &Failure, arguments: &Arguments) -> io::Result<()> {
    println!(
        "{name}: FAILED after {:.0?}, seed {}",
        failure.after, failure.schedule.seed
    );
    for finding in &failure.findings {
        println!("  {finding}");
    }
    let path = std::env::temp_dir().join(format!(
        "lockkit-torture-{name}-{}.schedule",
        failure.schedule.seed
    ));
    fs::write(&path, failure.schedule.to_string())?;
    println!(
        "{name}: shortened, in {}, for --schedule:\n{}",
        path.display(),
        failure.schedule
    );
    if arguments.log {
        println!("{}", failure.log);
    }
    Ok(())
}
