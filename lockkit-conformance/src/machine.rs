//! Times in which the machine ran.
//!
//! "Within 100 ms" is said of a machine that runs. One that shares its processors with strangers, is moved to another
//! host or is suspended stands still for a second now and then, and so does a process that is stopped. What is measured
//! with a [`Stopwatch`] leaves that out, and the [suite](crate::Suite) runs a case that failed meanwhile once more.

use std::{
    pin::pin,
    sync::{LazyLock, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use tokio::time::error::Elapsed;

/// How often the machine is looked at.
const BEAT: Duration = Duration::from_millis(10);

/// How late a beat has to be: a busy machine is late by less.
const LATE: Duration = Duration::from_millis(100);

/// A stopwatch that stands still while this machine, or one of its processors, does so for a tenth of a second or more.
///
/// ```
/// use std::time::Duration;
///
/// use lockkit_conformance::machine::Stopwatch;
///
/// let watch = Stopwatch::start();
/// std::thread::sleep(Duration::from_millis(20));
/// assert!(watch.elapsed() + watch.stood_still() >= Duration::from_millis(20));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    began: Instant,
    /// Up to then, since the first one was started.
    stood_still: Duration,
}

impl Stopwatch {
    /// From now on.
    pub fn start() -> Self {
        let (began, stood_still) = so_far();
        Self { began, stood_still }
    }

    /// How long the machine has run since the start.
    pub fn elapsed(self) -> Duration {
        let (now, stood_still) = so_far();
        (now - self.began).saturating_sub(stood_still.saturating_sub(self.stood_still))
    }

    /// How long it has not.
    pub fn stood_still(self) -> Duration {
        so_far().1.saturating_sub(self.stood_still)
    }
}

/// Awaits `work` for as long as `limit` by a [`Stopwatch`].
///
/// # Errors
/// If that is over first; `work` is dropped.
///
/// # Cancel safety
/// Dropping it drops `work`.
pub async fn timeout<F: Future>(limit: Duration, work: F) -> Result<F::Output, Elapsed> {
    let watch = Stopwatch::start();
    let mut work = pin!(work);
    let mut left = limit;
    loop {
        let outcome = tokio::time::timeout(left, work.as_mut()).await;
        left = limit.saturating_sub(watch.elapsed());
        if outcome.is_ok() || left.is_zero() {
            return outcome;
        }
    }
}

/// Now, and for how long the machine has stood still up to now.
fn so_far() -> (Instant, Duration) {
    let mut pulse = PULSE.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    for processor in 0..pulse.beats.len() {
        pulse.look(processor, now);
    }
    (now, pulse.stood_still)
}

static PULSE: LazyLock<Mutex<Pulse>> = LazyLock::new(|| {
    let mut beats = Vec::new();
    for processor in processors() {
        let index = beats.len();
        let beat = move || {
            stay_on(processor);
            loop {
                thread::sleep(BEAT);
                let mut pulse = PULSE.lock().unwrap_or_else(PoisonError::into_inner);
                let now = Instant::now();
                pulse.look(index, now);
                pulse.beats[index] = now;
            }
        };
        // Without its thread a processor is taken to run.
        if thread::Builder::new()
            .name("pulse".to_owned())
            .spawn(beat)
            .is_ok()
        {
            beats.push(Instant::now());
        }
    }
    Mutex::new(Pulse {
        beats,
        noted: Instant::now(),
        stood_still: Duration::ZERO,
    })
});

struct Pulse {
    /// When each processor was last seen to run.
    beats: Vec<Instant>,
    /// What was before is part of the sum.
    noted: Instant,
    stood_still: Duration,
}

impl Pulse {
    /// Adds the time for which a processor has not been seen, if that is long.
    fn look(&mut self, processor: usize, now: Instant) {
        let due = self.beats[processor] + BEAT;
        if now.saturating_duration_since(due) >= LATE {
            self.stood_still += now.saturating_duration_since(due.max(self.noted));
            self.noted = self.noted.max(now);
        }
    }
}

/// Those that this process may run on.
#[cfg(target_os = "linux")]
fn processors() -> Vec<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let allowed = sched_getaffinity(None).unwrap_or_default();
    let allowed = (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor));
    // Where there are many, one that stands still holds up little.
    allowed.take(8).collect()
}

/// Keeps this thread on `processor`, so that it is late when that one does not run.
#[cfg(target_os = "linux")]
fn stay_on(processor: usize) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut only = CpuSet::new();
    only.set(processor);
    // Should it be refused, the thread tells of the machine as a whole.
    let _ = sched_setaffinity(None, &only);
}

#[cfg(not(target_os = "linux"))]
fn processors() -> Vec<usize> {
    vec![0]
}

#[cfg(not(target_os = "linux"))]
fn stay_on(_: usize) {}
