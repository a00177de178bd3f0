//! `redlock-sim`: runs, replays and tabulates schedules.

use std::{fs, path::PathBuf, process::ExitCode, time::Instant};

use clap::{Parser, Subcommand};
use lockkit_redlock_simulator::{Config, Finding, Mutant, Summary, campaign, replaced, table, trace};

/// Redlock on simulated masters, clocks and networks.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists the configurations.
    List,
    /// Runs many schedules of one configuration, or of each, and fails if a promise is broken.
    Run {
        /// The configuration. Default: each.
        #[arg(long)]
        config: Option<String>,
        /// The number of schedules.
        #[arg(long, default_value_t = 20_000)]
        seeds: u64,
        /// The first seed.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// The algorithm with this mistake.
        #[arg(long)]
        mutant: Option<String>,
    },
    /// Runs every configuration and writes the findings into the documentation.
    Table {
        /// The number of schedules of each.
        #[arg(long, default_value_t = 20_000)]
        seeds: u64,
        /// The page with the table.
        #[arg(long, default_value = "docs/redlock.md")]
        page: PathBuf,
    },
    /// Runs one schedule and prints its trace.
    Replay {
        /// The configuration.
        #[arg(long)]
        config: String,
        /// The seed.
        #[arg(long)]
        seed: u64,
        /// The algorithm with this mistake.
        #[arg(long)]
        mutant: Option<String>,
    },
}

fn main() -> ExitCode {
    match dispatch(Cli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            eprintln!("redlock-sim: {problem}");
            ExitCode::from(2)
        }
    }
}

/// Returns whether all promises were kept.
fn dispatch(command: Command) -> Result<bool, String> {
    match command {
        Command::List => {
            for config in Config::ALL {
                println!("{:16} {}", config.name, config.about);
            }
            Ok(true)
        }
        Command::Run {
            config,
            seeds,
            from,
            mutant,
        } => {
            let mutant = mutant.as_deref().map(mutant_named).transpose()?;
            let configs = match &config {
                Some(name) => std::slice::from_ref(config_named(name)?),
                None => Config::ALL,
            };
            let mut kept = true;
            for config in configs {
                let began = Instant::now();
                let summary = campaign(config, mutant, from..from.saturating_add(seeds));
                print(config, &summary, began.elapsed().as_secs_f64());
                kept &= summary.findings.iter().all(Finding::is_as_promised);
            }
            Ok(kept)
        }
        Command::Table { seeds, page } => {
            let summaries: Vec<_> = Config::ALL
                .iter()
                .map(|config| (config, campaign(config, None, 0..seeds)))
                .collect();
            let file = |err| format!("{}: {err}", page.display());
            let text = fs::read_to_string(&page).map_err(file)?;
            let text = replaced(&text, &table(&summaries))
                .ok_or_else(|| format!("{} has no place for the table", page.display()))?;
            fs::write(&page, text).map_err(file)?;
            let mut findings = summaries.iter().flat_map(|(_, summary)| &summary.findings);
            Ok(findings.all(Finding::is_as_promised))
        }
        Command::Replay { config, seed, mutant } => {
            let mutant = mutant.as_deref().map(mutant_named).transpose()?;
            let config = config_named(&config)?;
            let (report, trace) = trace(config, mutant, seed);
            print!("{trace}");
            println!("{:#?}", report.faults);
            Ok(true)
        }
    }
}

fn print(config: &Config, summary: &Summary, seconds: f64) {
    println!(
        "{}: {} schedules in {seconds:.1} s",
        config.name, summary.schedules
    );
    for finding in &summary.findings {
        let broken = if finding.is_as_promised() { "" } else { "BROKEN: " };
        if finding.schedules > 0 || !broken.is_empty() {
            println!("    {broken}{finding} (promised: {:?})", finding.promise);
        }
    }
    println!("    {:?}", summary.tally);
}

fn config_named(name: &str) -> Result<&'static Config, String> {
    Config::named(name).ok_or_else(|| format!("no configuration is called '{name}'; see `redlock-sim list`"))
}

fn mutant_named(name: &str) -> Result<Mutant, String> {
    let found = Mutant::ALL
        .into_iter()
        .find(|mutant| format!("{mutant:?}") == name);
    found.ok_or_else(|| format!("no mutant is called '{name}'; there are {:?}", Mutant::ALL))
}
