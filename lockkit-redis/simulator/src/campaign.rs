//! Many schedules, on all cores.

use std::{
    fmt,
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use crate::{
    config::{Config, Promise},
    mutant::Mutant,
    world::{self, Tally},
};

/// A kind of fault, over many schedules.
#[derive(Clone, Copy, Debug)]
pub struct Finding {
    /// Its name.
    pub what: &'static str,
    /// The algorithm's promise about it.
    pub promise: Promise,
    /// The number of schedules that showed it.
    pub schedules: u64,
    /// The lowest seed that showed it.
    pub seed: Option<u64>,
}

impl Finding {
    /// Returns whether the promise was kept, or a fault that has to be found was found.
    pub fn is_as_promised(&self) -> bool {
        match self.promise {
            Promise::Never => self.schedules == 0,
            Promise::Happens => self.schedules > 0,
            Promise::None => true,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {} schedules", self.what, self.schedules)?;
        match self.seed {
            Some(seed) => write!(f, ", first with seed {seed}"),
            None => Ok(()),
        }
    }
}

/// The outcome of many schedules.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Their number.
    pub schedules: u64,
    /// The findings, by kind of fault.
    pub findings: [Finding; 7],
    /// The sum of their counts.
    pub tally: Tally,
}

/// Runs a schedule for each seed.
pub fn campaign(config: &Config, mutant: Option<Mutant>, seeds: Range<u64>) -> Summary {
    let next = AtomicU64::new(seeds.start);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let share = || {
        let mut summary = Summary::of(config);
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return summary;
            }
            summary.add(config, mutant, seed);
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(share)).collect();
        let mut total = Summary::of(config);
        for thread in threads {
            match thread.join() {
                Ok(part) => total.merge(&part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        total
    })
}

impl Summary {
    fn of(config: &Config) -> Self {
        let columns = config.expected.columns(&crate::Faults::default());
        Self {
            schedules: 0,
            findings: columns.map(|(what, promise, _)| Finding {
                what,
                promise,
                schedules: 0,
                seed: None,
            }),
            tally: Tally::default(),
        }
    }

    fn add(&mut self, config: &Config, mutant: Option<Mutant>, seed: u64) {
        let report = world::run(config, mutant, seed);
        self.schedules += 1;
        self.tally.add(&report.tally);
        for (finding, (_, _, times)) in self
            .findings
            .iter_mut()
            .zip(config.expected.columns(&report.faults))
        {
            if times > 0 {
                finding.schedules += 1;
                finding.seed.get_or_insert(seed);
            }
        }
    }

    fn merge(&mut self, other: &Self) {
        self.schedules += other.schedules;
        self.tally.add(&other.tally);
        for (ours, theirs) in self.findings.iter_mut().zip(&other.findings) {
            ours.schedules += theirs.schedules;
            ours.seed = match (ours.seed, theirs.seed) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
        }
    }
}
