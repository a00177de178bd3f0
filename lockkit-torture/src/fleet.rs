//! Deployments side by side.

use std::{
    error::Error,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::SystemTime,
};

use lockkit_conformance::torture::{Campaign, Report, Schedule, Torture, Verdict};

/// The campaigns against all targets, by workers that have a deployment each.
pub(crate) struct Fleet {
    works: Vec<Work>,
    /// A target has one deployment, since its time is measured.
    timed: bool,
}

struct Work {
    name: String,
    campaign: Campaign,
    state: Mutex<State>,
}

#[derive(Clone, Default)]
struct State {
    /// The number of deployments at present.
    now: usize,
    /// The number of deployments so far.
    ever: usize,
    /// The reasons for which they ended, if not since all was done.
    errors: Vec<String>,
}

/// The result of one target.
pub(crate) struct Outcome {
    pub(crate) name: String,
    pub(crate) report: Report,
    deployments: usize,
    /// The reasons for which it is no success, beside what was found.
    errors: Vec<String>,
}

/// The number of deployments of one target at one time.
const MOST_OF_ONE: usize = 4;
/// The most times that a deployment that breaks is set up again.
const MOST_ERRORS: usize = 5;

/// Returns the number of deployments that this machine bears, which wait for most of the time.
pub(crate) fn jobs() -> usize {
    thread::available_parallelism().map_or(4, |processors| processors.get() * 4)
}

impl Work {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outcome(&self) -> Outcome {
        let State { ever, mut errors, .. } = self.lock().clone();
        let report = self.campaign.report();
        if report.granted == 0 {
            errors.push("nothing was granted".to_owned());
        } else if report.failures.is_empty() && !self.campaign.is_reached() {
            errors.push("there was no time for all the grants and faults".to_owned());
        }
        Outcome {
            name: self.name.clone(),
            report,
            deployments: ever,
            errors,
        }
    }
}

impl Fleet {
    pub(crate) fn new(campaigns: impl Iterator<Item = (String, Campaign)>, timed: bool) -> Self {
        let works = campaigns.map(|(name, campaign)| Work {
            name,
            campaign,
            state: Mutex::default(),
        });
        let works = works.collect();
        Self { works, timed }
    }

    /// Runs all campaigns, on `jobs` deployments at a time. Blocks.
    pub(crate) fn run(
        &self,
        jobs: usize,
        deploy: impl Fn(&str) -> Result<Torture, Box<dyn Error + Send + Sync>> + Sync,
        tell: impl Fn(&str, &Schedule, &Verdict) + Sync,
    ) -> Vec<Outcome> {
        let next = Mutex::new(());
        thread::scope(|scope| {
            for _ in 0..jobs.max(1) {
                scope.spawn(|| {
                    while let Some(work) = self.next(&next) {
                        let tell = |schedule: &_, verdict: &_| tell(&work.name, schedule, verdict);
                        let torture = deploy(&work.name);
                        let done = torture.and_then(|mut torture| Ok(torture.join(&work.campaign, tell)?));
                        let mut state = work.lock();
                        state.now -= 1;
                        if let Err(error) = done {
                            eprintln!("{}: {error}", work.name);
                            state.errors.push(error.to_string());
                        }
                    }
                });
            }
        });
        self.works.iter().map(Work::outcome).collect()
    }

    /// The target that has the fewest deployments, of those that need one more.
    fn next(&self, one_by_one: &Mutex<()>) -> Option<&Work> {
        let _one = one_by_one.lock().unwrap_or_else(PoisonError::into_inner);
        let most = if self.timed { 1 } else { MOST_OF_ONE };
        let needs = |work: &&Work| {
            let state = work.lock();
            let again = !self.timed || state.ever == state.errors.len();
            state.now < most && state.errors.len() < MOST_ERRORS && again && !work.campaign.is_over()
        };
        let work = self
            .works
            .iter()
            .filter(needs)
            .min_by_key(|work| work.lock().now)?;
        let mut state = work.lock();
        state.now += 1;
        state.ever += 1;
        Some(work)
    }
}

impl Outcome {
    /// Returns whether nothing was found, and as much was done as was asked for.
    pub(crate) fn is_good(&self) -> bool {
        self.report.failures.is_empty() && self.errors.is_empty()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.report)?;
        self.errors
            .iter()
            .try_for_each(|error| write!(f, "\n  ERROR: {error}"))
    }
}

/// Rows for docs/torture.md: date, version, target, time and deployments, epochs, grants, faults, failed epochs.
pub(crate) fn table(outcomes: &[Outcome]) -> String {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let date = now.split('T').next().unwrap_or_default();
    let row = |outcome: &Outcome| {
        let Outcome { name, report, .. } = outcome;
        let faults = report.faults();
        let all: usize = faults.iter().map(|(_, times)| times).sum();
        let kinds: Vec<_> = faults
            .iter()
            .map(|(fault, times)| format!("{times} {fault}"))
            .collect();
        let none_or = |number: usize, text: String| if number == 0 { "–".to_owned() } else { text };
        format!(
            "| {date} | {} | {name} | {} min × {} | {} | {} | {} | {} |\n",
            env!("CARGO_PKG_VERSION"),
            report.time.as_secs().div_ceil(60),
            outcome.deployments,
            thousands(report.epochs),
            thousands(report.granted),
            none_or(all, format!("{}: {}", thousands(all), kinds.join(", "))),
            none_or(report.failures.len(), report.failures.len().to_string()),
        )
    };
    outcomes.iter().map(row).collect()
}

/// Writes a number with commas.
fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
