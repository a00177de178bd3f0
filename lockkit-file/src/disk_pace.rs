//! The choice between the caller's thread and a worker thread.

use std::time::Duration;

use lockkit_core::spi::Mutex;
use tokio::time::Instant;

/// The recent speed of the disk. A busy disk delays even a step that does not wait for it.
#[derive(Debug, Default)]
pub(crate) struct DiskPace {
    /// Until then, all work goes to worker threads.
    offload_until: Mutex<Option<Instant>>,
}

impl DiskPace {
    /// A slower step would delay others on its thread.
    const SLOW: Duration = Duration::from_millis(1);
    /// The ratio of the time after a slow step in which its thread is spared, to that step: others have nine tenths
    /// of it.
    const OFFLOAD_FACTOR: u32 = 10;
    const MAX_OFFLOAD: Duration = Duration::from_millis(100);

    /// Runs a step on this thread; `None` if one was slow recently.
    pub(crate) fn run_inline<T>(&self, step: impl FnOnce() -> T) -> Option<T> {
        let began = Instant::now();
        if self.offloads(began) {
            return None;
        }
        let done = step();
        self.record(began, Instant::now());
        Some(done)
    }

    /// Returns whether work goes to worker threads now.
    fn offloads(&self, now: Instant) -> bool {
        self.offload_until.lock().is_some_and(|until| now < until)
    }

    fn record(&self, began: Instant, ended: Instant) {
        let took = ended - began;
        if took > Self::SLOW {
            *self.offload_until.lock() = Some(ended + (took * Self::OFFLOAD_FACTOR).min(Self::MAX_OFFLOAD));
        }
    }

    #[cfg(test)]
    pub(crate) fn offload_all(&self) {
        *self.offload_until.lock() = Some(Instant::now() + Duration::from_secs(3_600));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_have_most_of_a_thread_on_a_slow_disk() {
        let pace = DiskPace::default();
        let (mut now, mut kept) = (Instant::now(), Duration::ZERO);
        let began = now;
        for tenths in [1, 9, 11, 20, 100, 70, 5, 40] {
            while pace.offloads(now) {
                now += Duration::from_micros(100);
            }
            let took = Duration::from_micros(100 * tenths);
            if tenths >= 10 {
                kept += took;
            }
            pace.record(now, now + took);
            now += took;
            assert_eq!(pace.offloads(now), tenths > 10, "{took:?}");
        }
        while pace.offloads(now) {
            now += Duration::from_micros(100);
        }
        assert!(kept * 10 <= now - began, "{kept:?} of {:?}", now - began);
        pace.record(now, now + Duration::from_secs(10));
        assert!(
            !pace.offloads(now + Duration::from_millis(10_101)),
            "for a while only"
        );
    }
}
