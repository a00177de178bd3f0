//! Times in which the machine ran.
//!
//! "Within 100 ms" is said of a machine that runs. One that shares its processors with strangers, is moved to another
//! host or is suspended stands still for a second now and then, and so does a process that is stopped. What is measured
//! with a [`Stopwatch`] leaves that out, and the [suite](crate::Suite) runs a case again that failed meanwhile.

use std::{
    pin::pin,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use tokio::time::error::Elapsed;

/// How often the machine is looked at.
const BEAT: Duration = Duration::from_millis(10);

/// How late a beat has to be: a busy machine is late by less.
const LATE: Duration = Duration::from_millis(100);

/// A stopwatch that stands still while this machine, or one of its first eight processors, does so for a tenth of a second
/// or more. For upper bounds: a lease and a timer go on meanwhile.
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
    /// The sum at that moment.
    stood_still: Duration,
}

impl Stopwatch {
    /// From now on.
    pub fn start() -> Self {
        let (pulse, began) = looked_at();
        // What may turn out to be a pause has begun before this.
        let stood_still = pulse.stood_still + pulse.not_noted(began);
        Self { began, stood_still }
    }

    /// How long the machine has run since the start.
    pub fn elapsed(self) -> Duration {
        let (pulse, now) = looked_at();
        (now - self.began).saturating_sub(pulse.stood_still.saturating_sub(self.stood_still))
    }

    /// How long it has not.
    pub fn stood_still(self) -> Duration {
        looked_at().0.stood_still.saturating_sub(self.stood_still)
    }
}

/// Awaits `work` for as long as `limit` by a [`Stopwatch`], on a runtime whose clock is real, not one that is paused.
///
/// ```
/// use std::time::Duration;
///
/// use lockkit_conformance::machine::timeout;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let limit = Duration::from_millis(20);
/// assert_eq!(timeout(limit, async { 1 }).await.unwrap(), 1);
/// assert!(timeout(limit, std::future::pending::<()>()).await.is_err());
/// # }
/// ```
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

/// The state of all processors, as of now.
fn looked_at() -> (MutexGuard<'static, Pulse>, Instant) {
    let mut pulse = PULSE.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    pulse.look(now);
    (pulse, now)
}

static PULSE: LazyLock<Mutex<Pulse>> = LazyLock::new(|| {
    let mut beats = Vec::new();
    for processor in processors() {
        let index = beats.len();
        let beat = move || {
            stay_on(processor);
            loop {
                thread::sleep(BEAT);
                let (mut pulse, now) = looked_at();
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
    /// Pauses before this are in the sum.
    noted: Instant,
    stood_still: Duration,
}

impl Pulse {
    /// Adds what of a pause is not yet in the sum.
    fn look(&mut self, now: Instant) {
        let late = self.late(now);
        if late >= LATE {
            self.stood_still += self.not_noted(now);
            self.noted = now;
        }
    }

    /// For how long the processor that was seen least recently ought to have been seen.
    fn late(&self, now: Instant) -> Duration {
        let oldest = self.beats.iter().min();
        oldest.map_or(Duration::ZERO, |beat| now.saturating_duration_since(*beat + BEAT))
    }

    /// The part of it that is not in the sum.
    fn not_noted(&self, now: Instant) -> Duration {
        self.late(now).min(now.saturating_duration_since(self.noted))
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
