use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const PAUSE: Duration = Duration::from_millis(20);

/// A control of a test's bound: a thread that sleeps again and again beside the test, and knows by how much it was late at most. So late is
/// whoever sleeps on this machine at this time, though nothing is wrong with it.
#[derive(Debug)]
pub struct Lateness {
    nanos: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
}

impl Lateness {
    /// Starts it.
    pub fn watch() -> Self {
        let (nanos, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let watch = Self {
            nanos: nanos.clone(),
            is_over: is_over.clone(),
        };
        thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let began = Instant::now();
                thread::sleep(PAUSE);
                let late = began.elapsed().saturating_sub(PAUSE).as_nanos();
                nanos.fetch_max(u64::try_from(late).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
        });
        watch
    }

    /// Returns by how much it was late at most since the start.
    pub fn most(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }
}

impl Drop for Lateness {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}
