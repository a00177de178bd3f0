//! One round of one contestant in each scenario.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::try_join_all;
use lockkit_core::{BoxError, spi::Mode};
use tokio::{
    task::{JoinHandle, consume_budget, yield_now},
    time::{sleep, timeout},
};

use super::{
    Client, Contender, Effort, Figure, Processes, Scenario, Subject, contest::Sample, process::Keeper,
};

/// A waiter that is not served for so long is given up, and its contestant with it.
const PATIENCE: Duration = Duration::from_secs(60);
/// For how long a waiter has slept when the lock is handed to it.
const ASLEEP: Duration = Duration::from_millis(35);
/// The size of the semaphore.
const PERMITS: NonZeroU32 = NonZeroU32::new(4).unwrap();

/// Why there is nothing to measure.
pub(super) enum Unfit {
    /// It takes no part.
    Declines(String),
    /// It should, and cannot.
    Fails(BoxError),
}

impl<E: Into<BoxError>> From<E> for Unfit {
    fn from(error: E) -> Self {
        Self::Fails(error.into())
    }
}

type ClientOf<S> = <S as Subject>::Client;
type ContenderOf<S> = <ClientOf<S> as Client>::Contender;

/// What a scenario needs, from its first round to its last.
pub(super) struct Stage<S: Subject> {
    scenario: Scenario,
    name: String,
    clients: Vec<ClientOf<S>>,
    tasks: Vec<Task<ContenderOf<S>>>,
    processes: Option<Processes>,
}

/// One task: how it asks most of the time, and how else.
struct Task<C> {
    usual: C,
    /// The other way to ask, and in how many per cent of the cases.
    other: Option<(C, u32)>,
}

impl<S: Subject> Stage<S> {
    pub(super) async fn set(
        subject: &S,
        scenario: Scenario,
        index: usize,
        effort: &Effort,
    ) -> Result<Self, Unfit> {
        if let Some(why) = subject.declines(scenario).await? {
            return Err(Unfit::Declines(why));
        }
        // The same in every run, since some servers keep something for each name for ever. A contestant has its own,
        // since two may be the same server with other options.
        let name = format!("lockkit-bench/{index}/{scenario}");
        let processes = match scenario {
            Scenario::Held(_) | Scenario::Recovery => Some(subject.processes().map_err(Unfit::Declines)?),
            _ => None,
        };
        if matches!(scenario, Scenario::Held(locks) if locks > effort.most_held) {
            return Err(Unfit::Declines("it takes too long for a quick run".to_owned()));
        }
        let (many_clients, many_tasks) = match scenario {
            Scenario::Uncontended | Scenario::Recovery => (1, 1),
            Scenario::OwnNames(tasks) | Scenario::Tasks(tasks) => (1, tasks),
            Scenario::Clients(clients) => (clients, clients),
            Scenario::Beside(tasks) => (2, tasks + 1),
            Scenario::HandOff => (2, 2),
            Scenario::Shared(_) | Scenario::Permits => (4, 16),
            Scenario::Held(_) => (0, 0),
        };
        let clients = try_join_all((0..many_clients).map(|_| subject.client())).await?;
        let mut tasks = Vec::new();
        for task in 0..many_tasks as usize {
            let client = match scenario {
                // All but the last have the first client.
                Scenario::Beside(_) => &clients[usize::from(task + 1 == many_tasks as usize)],
                _ => &clients[task % clients.len()],
            };
            let own_name;
            let name = match scenario {
                Scenario::OwnNames(_) => {
                    own_name = format!("{name}/{task}");
                    &own_name
                }
                _ => &name,
            };
            let usual = match scenario {
                Scenario::Shared(_) => Mode::Shared,
                Scenario::Permits => Mode::Permits(PERMITS),
                _ => Mode::Exclusive,
            };
            let other = match scenario {
                Scenario::Shared(percent) => Some((client.contender(name, Mode::Exclusive).await?, percent)),
                _ => None,
            };
            tasks.push(Task {
                usual: client.contender(name, usual).await?,
                other,
            });
        }
        Ok(Self {
            scenario,
            name,
            clients,
            tasks,
            processes,
        })
    }

    pub(super) async fn round(&mut self, effort: &Effort, warming_up: bool) -> Result<Sample, Unfit> {
        let mut stretch = effort.stretch;
        if matches!(self.scenario, Scenario::Tasks(n) | Scenario::Clients(n) if n >= 100) {
            stretch *= 3;
        }
        if warming_up {
            stretch /= 4;
        }
        match self.scenario {
            Scenario::Uncontended => {
                let (_, mut times) = self.contend(stretch, false).await?;
                let mut times = times.pop().unwrap_or_default();
                times.sort_unstable();
                Ok(vec![
                    (Figure::P50, quantile(&times, 50)),
                    (Figure::P99, quantile(&times, 99)),
                ])
            }
            Scenario::OwnNames(_) => {
                let (elapsed, times) = self.contend(stretch, false).await?;
                Ok(vec![(Figure::Rate, rate(&times, elapsed))])
            }
            Scenario::Tasks(_) | Scenario::Clients(_) => {
                let (elapsed, times) = self.contend(stretch, true).await?;
                Ok(vec![
                    (Figure::Rate, rate(&times, elapsed)),
                    (Figure::Longest, longest(times.iter().flatten())),
                    (Figure::Fairness, fairness(&times)),
                ])
            }
            Scenario::Shared(_) | Scenario::Permits => {
                let (elapsed, times) = self.contend(stretch, true).await?;
                Ok(vec![
                    (Figure::Rate, rate(&times, elapsed)),
                    (Figure::Longest, longest(times.iter().flatten())),
                ])
            }
            Scenario::Beside(_) => {
                let (_, mut times) = self.contend(stretch, true).await?;
                let mut times = times.pop().unwrap_or_default();
                times.sort_unstable();
                Ok(vec![
                    (Figure::Longest, longest(&times)),
                    (Figure::P50, quantile(&times, 50)),
                ])
            }
            Scenario::HandOff => Ok(self.hand_offs(effort.hand_offs).await?),
            Scenario::Held(locks) => self.held(locks, effort.ttl).await,
            Scenario::Recovery => Ok(self.recovery(effort.ttl).await?),
        }
    }

    pub(super) async fn clear(self) -> Result<(), BoxError> {
        drop(self.tasks);
        try_join_all(self.clients.into_iter().map(Client::close)).await?;
        Ok(())
    }

    /// All tasks at once, for so long; answers with how long it took to stop asking, and each task's times. Where the
    /// lock is contended, it is held across one yield: without, a task would rarely be interrupted while it holds, and
    /// those of one thread would never meet.
    async fn contend(
        &mut self,
        stretch: Duration,
        across_a_yield: bool,
    ) -> Result<(Duration, Vec<Vec<Duration>>), BoxError> {
        let stop = Arc::new(AtomicBool::new(false));
        let began = Instant::now();
        let running: Vec<JoinHandle<_>> = (1..)
            .zip(self.tasks.drain(..))
            .map(|(seed, task)| tokio::spawn(task.contend(seed, stop.clone(), across_a_yield)))
            .collect();
        sleep(stretch).await;
        stop.store(true, Ordering::Relaxed);
        let elapsed = began.elapsed();
        let mut all_times = Vec::new();
        let aborts: Vec<_> = running.iter().map(JoinHandle::abort_handle).collect();
        let ended = timeout(PATIENCE, async {
            for task in running {
                let (task, times) = task.await??;
                self.tasks.push(task);
                all_times.push(times);
            }
            Ok::<_, BoxError>(())
        })
        .await;
        if !matches!(ended, Ok(Ok(()))) {
            aborts.iter().for_each(tokio::task::AbortHandle::abort);
        }
        ended.map_err(|_| format!("a contender was not served within {PATIENCE:?}"))??;
        Ok((elapsed, all_times))
    }

    async fn hand_offs(&mut self, many: u32) -> Result<Sample, BoxError> {
        let mut times = Vec::new();
        for _ in 0..many {
            let [near, _] = &mut self.tasks[..] else {
                return Err("a hand-off is between two".into());
            };
            let held = near.usual.acquire().await?;
            let (waiting, mut near) = match (self.tasks.pop(), self.tasks.pop()) {
                (Some(far), Some(near)) => (tokio::spawn(far.wait()), near),
                _ => return Err("a hand-off is between two".into()),
            };
            sleep(ASLEEP).await;
            let released_at = Instant::now();
            near.usual.release(held).await?;
            let (far, granted_at) = served(waiting).await?;
            times.push(granted_at.saturating_duration_since(released_at));
            self.tasks = vec![near, far];
        }
        times.sort_unstable();
        Ok(vec![
            (Figure::P50, quantile(&times, 50)),
            (Figure::Longest, longest(&times)),
        ])
    }

    async fn held(&mut self, locks: u32, ttl: Duration) -> Result<Sample, Unfit> {
        // What 10,000 locks need to be renewed in time on a slow disk.
        let ttl = ttl.max(Duration::from_micros(1_500) * locks);
        let processes = self.processes.as_ref().ok_or("no processes")?;
        let mut keeper = Keeper::start(processes).await?;
        // What the first one brings with it, such as the connection, is not what each of them takes.
        keeper.acquire(ttl, &format!("{}/first", self.name)).await?;
        let before = keeper.usage().await?;
        if let Err(error) = keeper.hold(locks, ttl, &self.name).await {
            return Err(Unfit::Declines(format!("so many were not to be had: {error}")));
        }
        let holding = keeper.usage().await?;
        // Soon after its grant a hold may be confirmed; from then on each is renewed once in a period.
        let period = ttl / 3;
        sleep(period).await;
        let (start, sent) = (keeper.usage().await?, processes.packets());
        sleep(period).await;
        let (end, sent_then) = (keeper.usage().await?, processes.packets());
        keeper.close().await?;
        let per_period = end.processor.saturating_sub(start.processor);
        let mut sample = vec![(
            Figure::Processor,
            // A third of 30 s.
            per_period.as_secs_f64() / 10.0 * 100.0,
        )];
        // A process grows by pages, and by more than a few locks take.
        if let (Some(before), Some(holding), 1_000..) = (before.memory, holding.memory, locks) {
            let grown = holding.saturating_sub(before);
            sample.push((Figure::Memory, float(grown) / f64::from(locks)));
        }
        if let (Some(sent), Some(then)) = (sent, sent_then) {
            sample.push((Figure::Packets, float(then - sent)));
        }
        Ok(sample)
    }

    async fn recovery(&mut self, ttl: Duration) -> Result<Sample, BoxError> {
        let processes = self.processes.as_ref().ok_or("no processes")?;
        let mut keeper = Keeper::start(processes).await?;
        keeper.acquire(ttl, &self.name).await?;
        let waiter = self.tasks.pop().ok_or("nobody to wait")?;
        let waiting = tokio::spawn(waiter.wait());
        sleep(ASLEEP).await;
        let killed_at = Instant::now();
        keeper.kill()?;
        let (waiter, granted_at) = served(waiting).await?;
        self.tasks.push(waiter);
        let took = granted_at.saturating_duration_since(killed_at);
        Ok(vec![(Figure::Recovery, micros(took))])
    }
}

impl<C: Contender> Task<C> {
    async fn contend(
        mut self,
        seed: u64,
        stop: Arc<AtomicBool>,
        across_a_yield: bool,
    ) -> Result<(Self, Vec<Duration>), BoxError> {
        // The same in every run: which of them ask otherwise is no source of differences.
        let mut random = fastrand::Rng::with_seed(seed);
        let mut times = Vec::new();
        // Once at least, however late it begins.
        loop {
            let contender = match &mut self.other {
                Some((other, percent)) if random.u32(..100) < *percent => other,
                _ => &mut self.usual,
            };
            let asked = Instant::now();
            let held = contender.acquire().await?;
            if across_a_yield {
                // A wait is what is measured.
                times.push(asked.elapsed());
                yield_now().await;
                contender.release(held).await?;
            } else {
                contender.release(held).await?;
                times.push(asked.elapsed());
            }
            // One that never has to wait would keep its thread from looking at the clock, and so never be stopped.
            consume_budget().await;
            if stop.load(Ordering::Relaxed) {
                return Ok((self, times));
            }
        }
    }

    /// Waits for one grant; answers with when it came.
    async fn wait(mut self) -> Result<(Self, Instant), BoxError> {
        let held = self.usual.acquire().await?;
        let granted_at = Instant::now();
        self.usual.release(held).await?;
        Ok((self, granted_at))
    }
}

type Waiting<C> = JoinHandle<Result<(Task<C>, Instant), BoxError>>;

async fn served<C>(mut waiting: Waiting<C>) -> Result<(Task<C>, Instant), BoxError> {
    match timeout(PATIENCE, &mut waiting).await {
        Ok(done) => done?,
        Err(_) => {
            waiting.abort();
            Err(format!("a waiter was not served within {PATIENCE:?}").into())
        }
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Nearest rank.
fn quantile(sorted: &[Duration], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted
        .get(rank.saturating_sub(1))
        .map_or(f64::NAN, |time| micros(*time))
}

fn longest<'a>(times: impl IntoIterator<Item = &'a Duration>) -> f64 {
    times.into_iter().max().map_or(f64::NAN, |time| micros(*time))
}

fn rate(times: &[Vec<Duration>], elapsed: Duration) -> f64 {
    let count: usize = times.iter().map(Vec::len).sum();
    float(count as u64) / elapsed.as_secs_f64()
}

fn fairness(times: &[Vec<Duration>]) -> f64 {
    let counts = times.iter().map(|times| float(times.len() as u64));
    let sum: f64 = counts.clone().sum();
    let squares: f64 = counts.map(|count| count * count).sum();
    sum * sum / (float(times.len() as u64) * squares)
}
