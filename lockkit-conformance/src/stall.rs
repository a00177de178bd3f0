//! Stalls of the machine, and time measured without them.
//!
//! "Within 100 ms" holds for a machine that runs. A machine that shares its processors with strangers, is moved to another
//! host or is suspended stalls for a second now and then, and so does a stopped process. A [`Stopwatch`] leaves stalls out,
//! and the [suite](crate::Suite) repeats a case that failed during one.

use std::{
    pin::pin,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use tokio::time::error::Elapsed;

/// The interval at which each processor is checked.
const BEAT: Duration = Duration::from_millis(10);

/// The delay of a check that counts as a stall. A busy machine delays it by less.
const LATE: Duration = Duration::from_millis(100);

/// A stopwatch that leaves out stalls: times of a tenth of a second or more in which this machine, or one of its first
/// eight processors, did not run. Use it for upper bounds only, as leases and timers continue during a stall.
///
/// ```
/// use std::time::Duration;
///
/// use lockkit_conformance::stall::Stopwatch;
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
    /// Starts it.
    pub fn start() -> Self {
        let (pulse, began) = looked_at();
        // A stall may have begun before this.
        let stood_still = pulse.stood_still + pulse.not_noted(began);
        Self { began, stood_still }
    }

    /// Returns how long the machine has run since the start.
    pub fn elapsed(self) -> Duration {
        let (pulse, now) = looked_at();
        (now - self.began).saturating_sub(pulse.stood_still.saturating_sub(self.stood_still))
    }

    /// Returns how long it has not.
    pub fn stood_still(self) -> Duration {
        looked_at().0.stood_still.saturating_sub(self.stood_still)
    }
}

/// Awaits `work` for up to `limit` of a [`Stopwatch`]. The runtime's clock must not be paused.
///
/// ```
/// use std::time::Duration;
///
/// use lockkit_conformance::stall::timeout;
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
/// If `limit` is over first. `work` is then dropped.
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

/// Returns the state of all processors, as of now.
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
        // A processor without a thread counts as running.
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
    /// The last time at which each processor was seen to run.
    beats: Vec<Instant>,
    /// Stalls before this are in the sum.
    noted: Instant,
    stood_still: Duration,
}

impl Pulse {
    /// Adds the part of a stall that is not yet in the sum.
    fn look(&mut self, now: Instant) {
        let late = self.late(now);
        if late >= LATE {
            self.stood_still += self.not_noted(now);
            self.noted = now;
        }
    }

    /// Returns by how much the latest processor is late.
    fn late(&self, now: Instant) -> Duration {
        let oldest = self.beats.iter().min();
        oldest.map_or(Duration::ZERO, |beat| now.saturating_duration_since(*beat + BEAT))
    }

    /// Returns the part of that delay that is not in the sum.
    fn not_noted(&self, now: Instant) -> Duration {
        self.late(now).min(now.saturating_duration_since(self.noted))
    }
}

/// Returns the processors that this process may run on.
#[cfg(target_os = "linux")]
fn processors() -> Vec<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let allowed = sched_getaffinity(None).unwrap_or_default();
    let allowed = (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor));
    // Where there are many, one that stalls delays little.
    allowed.take(8).collect()
}

/// Keeps this thread on `processor`, so that it is late when that one does not run.
#[cfg(target_os = "linux")]
fn stay_on(processor: usize) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut only = CpuSet::new();
    only.set(processor);
    // If this is refused, the thread checks the machine as a whole.
    let _ = sched_setaffinity(None, &only);
}

#[cfg(not(target_os = "linux"))]
fn processors() -> Vec<usize> {
    vec![0]
}

#[cfg(not(target_os = "linux"))]
fn stay_on(_: usize) {}
