//! `cargo run -p lockkit-torture -- redis zk --for 15m --seed 4711 --faults cut,reset`

use std::{error::Error, fs, io, path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use lockkit_conformance::{
    helper::{self, Launch},
    torture::{Effort, Failure, Schedule, Torture, Verdict},
};

/// Tortures lockkit's backends on private servers: random schedules, faults, and a judge.
#[derive(Debug, Parser)]
struct Arguments {
    /// What to torture [default: everything that there is a server for]
    targets: Vec<String>,
    /// For how long, each
    #[arg(long = "for", value_name = "TIME", default_value = "1m", value_parser = humantime::parse_duration)]
    time: Duration,
    /// The seed of the first schedule [default: a random one]; those that follow have the seeds after it
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
    /// Go on until so many schedules have failed
    #[arg(long, value_name = "N", default_value_t = 1)]
    failures: usize,
    /// Also say who did what when in an epoch that failed
    #[arg(long)]
    log: bool,
}

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> ExitCode {
    if helper::is_helper() {
        let served = helper::main(|route| async move { lockkit::connect(&route).await });
        return ExitCode::from(u8::from(served.is_err()));
    }
    match torture(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("lockkit-torture: {error}");
            ExitCode::from(2)
        }
    }
}

/// Whether nothing was found.
fn torture(arguments: &Arguments) -> Fallible<bool> {
    let mut targets = arguments.targets.clone();
    if targets.is_empty() {
        let there = |target: &&str| lockkit_torture::missing(target).1.is_none();
        targets = lockkit_torture::TARGETS
            .into_iter()
            .filter(there)
            .map(str::to_owned)
            .collect();
    }
    if let Some(unknown) = targets
        .iter()
        .find(|name| !lockkit_torture::TARGETS.contains(&name.as_str()))
    {
        let known = lockkit_torture::TARGETS.join(", ");
        return Err(io::Error::other(format!("there is no target {unknown:?}; there are {known}")).into());
    }
    let schedule = arguments.schedule.as_ref().map(|path| {
        let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        text.parse::<Schedule>()
            .map_err(|error| format!("{}: {error}", path.display()))
    });
    let schedule = schedule.transpose()?;
    let mut good = true;
    for name in &targets {
        if let (_, Some(missing)) = lockkit_torture::missing(name) {
            return Err(io::Error::other(missing).into());
        }
        let mut torture =
            Torture::new(lockkit_torture::start(name)?)?.helpers(Launch::this_program([] as [&str; 0])?);
        if arguments.keep_runtimes {
            torture = torture.keep_runtimes();
        }
        if let Some(faults) = &arguments.faults {
            let faults: Vec<_> = faults.iter().filter(|fault| *fault != "none").cloned().collect();
            torture = torture.only(&faults)?;
        }
        good &= match &schedule {
            Some(schedule) => replay(name, &mut torture, schedule, arguments)?,
            None => run(name, &mut torture, arguments)?,
        };
    }
    Ok(good)
}

fn replay(name: &str, torture: &mut Torture, schedule: &Schedule, arguments: &Arguments) -> Fallible<bool> {
    let verdict = torture.epoch(schedule)?;
    println!("{}", line(name, schedule, &verdict));
    for finding in &verdict.findings {
        println!("  {finding}");
    }
    if arguments.log {
        println!("{}", verdict.log);
    }
    Ok(verdict.findings.is_empty())
}

fn run(name: &str, torture: &mut Torture, arguments: &Arguments) -> Fallible<bool> {
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..1_000_000_000));
    println!("{name}: seed {seed}");
    let mut effort = Effort::new(arguments.time);
    effort.shortening = arguments.shorten;
    effort.failures = arguments.failures;
    let report = torture.run(seed, effort, |schedule, verdict| {
        println!("{}", line(name, schedule, verdict));
        for finding in &verdict.findings {
            println!("  {finding}");
        }
    })?;
    println!("{name}: {report}");
    for failure in &report.failures {
        print_failure(name, failure, arguments)?;
    }
    Ok(report.failures.is_empty())
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
