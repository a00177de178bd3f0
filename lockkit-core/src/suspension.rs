//! The time for which the machine was suspended, as the operating system tells it.

use std::time::Duration;

/// Says that the operating system tells it.
pub(crate) const IS_KNOWN: bool = cfg!(target_os = "linux");

/// Returns the time for which this machine has been suspended since it was booted. Zero where the operating system does not tell
/// it; Linux does.
///
/// The driver takes what is slept after [`Lease::since`](crate::spi::Lease::since) off the lease. A backend whose proof is older
/// than the request that reports it takes off what was slept in between. A difference below a millisecond means nothing: the
/// two clocks are not read in the same instant.
#[cfg(target_os = "linux")]
pub fn asleep() -> Duration {
    use rustix::time::{ClockId, clock_gettime};

    fn read(clock: ClockId) -> Duration {
        clock_gettime(clock).try_into().unwrap_or(Duration::ZERO)
    }

    /// Readings this close together were not interrupted.
    const AT_ONCE: Duration = Duration::from_micros(250);
    const TRIES: usize = 16;

    let mut best = (Duration::MAX, Duration::ZERO);
    for _ in 0..TRIES {
        let before = read(ClockId::Monotonic);
        let with_sleep = read(ClockId::Boottime);
        let after = read(ClockId::Monotonic);
        let between = after.saturating_sub(before);
        if between < best.0 {
            best = (between, with_sleep.saturating_sub(after));
        }
        if between < AT_ONCE {
            break;
        }
    }
    best.1
}

/// Returns zero: this operating system does not tell for how long the machine has been suspended.
#[cfg(not(target_os = "linux"))]
pub fn asleep() -> Duration {
    Duration::ZERO
}
