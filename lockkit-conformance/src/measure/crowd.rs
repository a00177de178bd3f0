//! Those who want locks at the same time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::{ready, try_join_all};
use lockkit_core::{BoxError, spi::Mode};
use tokio::{
    task::{AbortHandle, JoinHandle, consume_budget, yield_now},
    time::{sleep, timeout},
};

use super::{Client, Contender, Counter, process::processor_time};

/// A waiter that is not served for so long is given up, and its contestant with it.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Clients, and the tasks that contend through them.
pub(crate) struct Crowd<C: Client> {
    pub(super) clients: Vec<C>,
    pub(super) tasks: Vec<Task<C::Contender>>,
}

/// The time for which a granted lock is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// No time at all: acquisition and release are timed as one.
    Nothing,
    /// One yield. Without, a task would rarely be interrupted while it holds, and those of one thread would
    /// never meet.
    AYield,
    /// This long, to the next millisecond of the runtime's clock.
    For(Duration),
}

/// One task: how it asks most of the time, and how else.
pub(super) struct Task<C> {
    pub(super) usual: C,
    /// The other way to ask, and in how many per cent of the cases.
    pub(super) other: Option<(C, u32)>,
}

/// The result of one contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// The grants within the stretch.
    pub(crate) in_time: u64,
    /// All grants, with the one that was waited for when the stretch was over.
    pub(crate) grants: u64,
    /// The longest wait.
    pub(crate) longest: Duration,
    /// The time of all waits together.
    pub(crate) waited: Duration,
}

/// The results of all contenders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rush {
    /// The time for which they were asked to contend.
    pub(crate) elapsed: Duration,
    /// The processor time of the process from the first acquisition to the last release, where the system tells.
    pub(crate) processor: Option<Duration>,
    pub(crate) shares: Vec<Share>,
}

/// The times that one contender took, and the number of them that ended within the stretch: the first so many.
#[derive(Debug, Default)]
pub(super) struct Times {
    pub(super) all: Vec<Duration>,
    in_time: u64,
}

impl Times {
    pub(super) fn share(&self) -> Share {
        Share {
            in_time: self.in_time,
            grants: self.all.len() as u64,
            longest: self.all.iter().max().copied().unwrap_or_default(),
            waited: self.all.iter().sum(),
        }
    }
}

impl<C: Client> Crowd<C> {
    /// Clients who all want `name`, with so many tasks each.
    pub(crate) async fn of(clients: Vec<C>, tasks_each: u32, name: &str) -> Result<Self, BoxError> {
        let mut tasks = Vec::new();
        for client in &clients {
            for _ in 0..tasks_each {
                let usual = client.contender(name, Mode::Exclusive).await?;
                tasks.push(Task { usual, other: None });
            }
        }
        Ok(Self { clients, tasks })
    }

    /// Has all tasks contend at once, for so long. Returns how long it took to stop asking, and each task's times. It
    /// waits for those who still wait by then, but their grants do not count as done in that time: of a hundred tasks it
    /// would be a hundred more. The time begins when `gate` is done, which may keep the lock from them until they are in
    /// line.
    pub(super) async fn contend(
        &mut self,
        stretch: Duration,
        hold: Hold,
        gate: impl Future<Output = Result<(), BoxError>>,
    ) -> Result<(Duration, Vec<Times>), BoxError> {
        let stop = Arc::new(AtomicBool::new(false));
        let running: Vec<JoinHandle<_>> = (1..)
            .zip(self.tasks.drain(..))
            .map(|(seed, task)| tokio::spawn(task.contend(seed, stop.clone(), hold)))
            .collect();
        let mut elapsed = Duration::ZERO;
        let mut all_times = Vec::new();
        let aborts: Vec<_> = running.iter().map(JoinHandle::abort_handle).collect();
        let ended = timeout(PATIENCE + stretch, async {
            gate.await?;
            let began = Instant::now();
            sleep(stretch).await;
            stop.store(true, Ordering::Relaxed);
            elapsed = began.elapsed();
            for task in running {
                let (task, times) = task.await??;
                self.tasks.push(task);
                all_times.push(times);
            }
            Ok::<_, BoxError>(())
        })
        .await;
        if !matches!(ended, Ok(Ok(()))) {
            aborts.iter().for_each(AbortHandle::abort);
        }
        ended.map_err(|_| format!("a contender was not served within {PATIENCE:?}"))??;
        Ok((elapsed, all_times))
    }

    /// Contends for one lock, and sums up the results.
    pub(crate) async fn rush(&mut self, stretch: Duration, hold: Hold) -> Result<Rush, BoxError> {
        let before = processor_time();
        let (elapsed, times) = self.contend(stretch, hold, ready(Ok(()))).await?;
        let after = processor_time();
        Ok(Rush {
            elapsed,
            processor: after
                .zip(before)
                .map(|(after, before)| after.saturating_sub(before)),
            shares: times.iter().map(Times::share).collect(),
        })
    }

    pub(crate) async fn close(self) -> Result<(), BoxError> {
        drop(self.tasks);
        try_join_all(self.clients.into_iter().map(Client::close)).await?;
        Ok(())
    }
}

impl<C: Contender> Task<C> {
    async fn contend(
        mut self,
        seed: u64,
        stop: Arc<AtomicBool>,
        how_long: Hold,
    ) -> Result<(Self, Times), BoxError> {
        // The same in every run: which of them ask otherwise is no source of differences.
        let mut random = fastrand::Rng::with_seed(seed);
        let mut times = Times::default();
        // Once at least, however late it begins.
        loop {
            let contender = match &mut self.other {
                Some((other, percent)) if random.u32(..100) < *percent => other,
                _ => &mut self.usual,
            };
            let asked = Instant::now();
            let held = contender.acquire().await?;
            if how_long == Hold::Nothing {
                contender.release(held).await?;
                times.all.push(asked.elapsed());
            } else {
                // A wait is what is measured.
                times.all.push(asked.elapsed());
                match how_long {
                    Hold::For(time) => sleep(time).await,
                    _ => yield_now().await,
                }
                contender.release(held).await?;
            }
            if stop.load(Ordering::Relaxed) {
                return Ok((self, times));
            }
            times.in_time += 1;
            // One that never has to wait would keep its thread from looking at the clock, and so never be stopped.
            consume_budget().await;
        }
    }

    /// Tries for so long to take what somebody else holds. Returns the time of each try.
    pub(super) async fn try_in_vain(mut self, stretch: Duration) -> Result<(Self, Vec<Duration>), BoxError> {
        let (began, mut times) = (Instant::now(), Vec::new());
        while times.is_empty() || began.elapsed() < stretch {
            let asked = Instant::now();
            if self.usual.try_acquire().await?.is_some() {
                return Err("it was granted what somebody else holds".into());
            }
            times.push(asked.elapsed());
            consume_budget().await;
        }
        Ok((self, times))
    }

    /// Waits for one grant; answers with when it came, and with what was counted by then.
    pub(super) async fn wait(mut self, counter: Option<Counter>) -> Result<(Self, Instant, u64), BoxError> {
        let held = self.usual.acquire().await?;
        let granted_at = Instant::now();
        let by_then = counter.map_or(0, |count| count());
        self.usual.release(held).await?;
        Ok((self, granted_at, by_then))
    }
}
