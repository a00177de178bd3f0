//! One round of one contestant in each scenario.

use std::{
    io,
    num::NonZeroU32,
    time::{Duration, Instant},
};

use futures_util::future::{ready, try_join_all};
use lockkit_core::{BoxError, spi::Mode};
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::{
    Client as _, Contender as _, Counter, Effort, Figure, Processes, Scenario, Subject,
    contest::Sample,
    crowd::{Crowd, Hold, PATIENCE, Share, Task, Times},
    process::{Keeper, Rivals, Rushed},
};

/// The time for which a waiter has slept when the lock is handed to it, or when it withdraws.
const ASLEEP: Duration = Duration::from_millis(35);
/// The connections that share the waiters in a long line, and the time that each of them takes to come there.
const CONNECTIONS: u32 = 10;
const TO_COME: Duration = Duration::from_millis(2);
/// The cycles in a round whose round trips are counted.
const COUNTED: u32 = 4;
/// The size of the semaphore.
const PERMITS: NonZeroU32 = NonZeroU32::new(4).unwrap();

/// A reason for there being nothing to measure.
pub(super) enum Unfit {
    /// It takes no part.
    Declines(String),
    /// It should, and cannot.
    Fails(BoxError),
}

impl Unfit {
    pub(super) fn into_error(self) -> BoxError {
        match self {
            Self::Declines(why) => why.into(),
            Self::Fails(error) => error,
        }
    }
}

impl<E: Into<BoxError>> From<E> for Unfit {
    fn from(error: E) -> Self {
        Self::Fails(error.into())
    }
}

/// Checks that a subject takes part in a scenario, and returns the processes that it needs there.
pub(super) async fn fit(subject: &impl Subject, scenario: Scenario) -> Result<Option<Processes>, Unfit> {
    if let Some(why) = subject.declines(scenario).await? {
        return Err(Unfit::Declines(why));
    }
    Ok(match scenario {
        Scenario::Clients(_)
        | Scenario::Processes(_)
        | Scenario::Holding(_)
        | Scenario::Held(_)
        | Scenario::Recovery
        | Scenario::Silence => Some(subject.processes().map_err(Unfit::Declines)?),
        _ => None,
    })
}

/// The resources of a scenario, from its first round to its last.
pub(super) struct Stage<S: Subject> {
    scenario: Scenario,
    name: String,
    crowd: Crowd<S::Client>,
    /// The processes, if they are started in each round.
    processes: Option<Processes>,
    /// The processes, if they contend in all rounds.
    rivals: Option<Rivals>,
    round_trips: Option<Counter>,
}

impl<S: Subject> Stage<S> {
    pub(super) async fn set(
        subject: &S,
        scenario: Scenario,
        index: usize,
        effort: &Effort,
    ) -> Result<Self, Unfit> {
        let processes = fit(subject, scenario).await?;
        // The same in every run, since some servers keep something for each name for ever. A contestant has its own,
        // since two may be the same server with other options.
        let name = format!("lockkit-bench/{index}/{scenario}");
        if matches!(scenario, Scenario::Held(locks) if locks > effort.most_held) {
            return Err(Unfit::Declines("it takes too long for a quick run".to_owned()));
        }
        let (many_clients, many_tasks) = match scenario {
            Scenario::Uncontended | Scenario::Recovery | Scenario::Silence => (1, 1),
            Scenario::OwnNames(tasks) | Scenario::Tasks(tasks) => (1, tasks),
            Scenario::Beside(tasks) => (2, tasks + 1),
            Scenario::HandOff | Scenario::BusyTry => (2, 2),
            Scenario::Withdrawal => (2, 1),
            Scenario::Shared(_) | Scenario::Permits => (4, 16),
            // One of them holds until the others are in line.
            Scenario::Waiters(waiters) => (CONNECTIONS, waiters + 1),
            Scenario::Clients(_) | Scenario::Processes(_) | Scenario::Holding(_) | Scenario::Held(_) => {
                (0, 0)
            }
        };
        let rivals = match (scenario, &processes) {
            (Scenario::Clients(clients), Some(processes)) => {
                Some(Rivals::clients(processes, clients, &name).await?)
            }
            (Scenario::Holding(_), Some(processes)) => Some(Rivals::clients(processes, 16, &name).await?),
            (Scenario::Processes(tasks), Some(processes)) => {
                Some(Rivals::tasks(processes, tasks, &name).await?)
            }
            _ => None,
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
            crowd: Crowd { clients, tasks },
            processes,
            rivals,
            round_trips: subject.round_trips(),
        })
    }

    pub(super) async fn round(&mut self, effort: &Effort, warming_up: bool) -> Result<Sample, Unfit> {
        let mut stretch = effort.stretch;
        if self.scenario.is_crowded() {
            stretch *= 4;
        }
        if matches!(self.scenario, Scenario::Waiters(_)) {
            stretch *= 20;
        }
        if warming_up {
            stretch /= 4;
        }
        match self.scenario {
            Scenario::Uncontended => {
                let (_, mut times) = self.crowd.contend(stretch, Hold::Nothing, no_gate()).await?;
                let mut times = times.pop().unwrap_or_default().all;
                times.sort_unstable();
                let mut sample = vec![
                    (Figure::P50, quantile(&times, 50)),
                    (Figure::P99, quantile(&times, 99)),
                ];
                if let Some(count) = self.round_trips.clone() {
                    sample.extend(self.count_cycles(&count).await?);
                }
                Ok(sample)
            }
            Scenario::OwnNames(_) => {
                let (elapsed, times) = self.crowd.contend(stretch, Hold::Nothing, no_gate()).await?;
                let shares: Vec<_> = times.iter().map(Times::share).collect();
                Ok(vec![(Figure::Rate, rate(&shares, elapsed))])
            }
            Scenario::Tasks(_) => {
                let rush = self.crowd.rush(stretch, Hold::AYield).await?;
                Ok(shared_out(rate(&rush.shares, rush.elapsed), &rush.shares))
            }
            Scenario::Clients(_) | Scenario::Processes(_) | Scenario::Holding(_) => {
                let hold = match self.scenario {
                    Scenario::Holding(ms) => Hold::For(Duration::from_millis(ms.into())),
                    _ => Hold::AYield,
                };
                let rivals = self.rivals.as_mut().ok_or("no rivals")?;
                Ok(used_up(&rivals.rush(stretch, hold).await?))
            }
            Scenario::Waiters(_) => Ok(self.waiters(stretch).await?),
            Scenario::Shared(_) | Scenario::Permits => {
                let rush = self.crowd.rush(stretch, Hold::AYield).await?;
                Ok(vec![
                    (Figure::Rate, rate(&rush.shares, rush.elapsed)),
                    (Figure::Longest, longest(&rush.shares)),
                ])
            }
            Scenario::Beside(_) => {
                let (_, mut times) = self.crowd.contend(stretch, Hold::AYield, no_gate()).await?;
                let mut times = times.pop().unwrap_or_default().all;
                times.sort_unstable();
                Ok(vec![
                    (Figure::Longest, quantile(&times, 100)),
                    (Figure::P50, quantile(&times, 50)),
                ])
            }
            Scenario::HandOff => Ok(self.hand_offs(effort.hand_offs).await?),
            Scenario::BusyTry => Ok(self.busy_tries(stretch).await?),
            Scenario::Withdrawal => Ok(self.withdrawals(effort.hand_offs).await?),
            Scenario::Held(locks) => self.held(locks, effort.ttl).await,
            Scenario::Recovery => Ok(self.recovery(effort.ttl, Keeper::kill).await?),
            Scenario::Silence => Ok(self.recovery(effort.ttl, Keeper::stop).await?),
        }
    }

    pub(super) async fn clear(self) -> Result<(), BoxError> {
        if let Some(rivals) = self.rivals {
            rivals.close().await?;
        }
        self.crowd.close().await
    }

    /// Measures how fast a long line moves, from the moment when all are in it.
    async fn waiters(&mut self, stretch: Duration) -> Result<Sample, BoxError> {
        let mut gate = self.crowd.tasks.pop().ok_or("nobody to wait for")?;
        let held = gate.usual.acquire().await?;
        let waiters = u32::try_from(self.crowd.tasks.len())?;
        let opening = async {
            sleep(ASLEEP + TO_COME * waiters).await;
            gate.usual.release(held).await
        };
        let (elapsed, times) = self.crowd.contend(stretch, Hold::AYield, opening).await?;
        self.crowd.tasks.push(gate);
        let shares: Vec<_> = times.iter().map(Times::share).collect();
        Ok(vec![(Figure::Rate, rate(&shares, elapsed))])
    }

    /// The round trips of each of some cycles.
    async fn count_cycles(&mut self, count: &Counter) -> Result<Sample, BoxError> {
        let task = self.crowd.tasks.first_mut().ok_or("nobody to count")?;
        let (mut acquiring, mut releasing) = (0, 0);
        for _ in 0..COUNTED {
            let before = count();
            let held = task.usual.acquire().await?;
            let between = count();
            task.usual.release(held).await?;
            acquiring += between - before;
            releasing += count() - between;
        }
        Ok(vec![
            (Figure::AcquireTrips, float(acquiring) / f64::from(COUNTED)),
            (Figure::ReleaseTrips, float(releasing) / f64::from(COUNTED)),
        ])
    }

    async fn hand_offs(&mut self, many: u32) -> Result<Sample, BoxError> {
        let (mut times, mut releases, mut trips) = (Vec::new(), Vec::new(), 0);
        let counter = self.round_trips.clone();
        let count = || counter.as_ref().map_or(0, |count| count());
        for _ in 0..many {
            let [near, _] = &mut self.crowd.tasks[..] else {
                return Err("a hand-off is between two".into());
            };
            let held = near.usual.acquire().await?;
            let (waiting, mut near) = match (self.crowd.tasks.pop(), self.crowd.tasks.pop()) {
                (Some(far), Some(near)) => (tokio::spawn(far.wait(counter.clone())), near),
                _ => return Err("a hand-off is between two".into()),
            };
            sleep(ASLEEP).await;
            let before = count();
            // In a task, as a holder is, and not on a thread that is none of the runtime's.
            let releasing = tokio::spawn(async move {
                let released_at = Instant::now();
                near.usual.release(held).await?;
                Ok::<_, BoxError>((near, released_at, released_at.elapsed()))
            });
            let (far, granted_at, by_then) = served(waiting).await?;
            trips += by_then - before;
            let (near, released_at, took) = releasing.await??;
            releases.push(took);
            times.push(granted_at.saturating_duration_since(released_at));
            self.crowd.tasks = vec![near, far];
        }
        times.sort_unstable();
        releases.sort_unstable();
        let mut sample = vec![
            (Figure::P50, quantile(&times, 50)),
            (Figure::Longest, quantile(&times, 100)),
            (Figure::Release, quantile(&releases, 50)),
        ];
        if counter.is_some() {
            sample.push((Figure::HandOffTrips, float(trips) / f64::from(many)));
        }
        Ok(sample)
    }

    async fn busy_tries(&mut self, stretch: Duration) -> Result<Sample, BoxError> {
        let (Some(other), Some(mut holder)) = (self.crowd.tasks.pop(), self.crowd.tasks.pop()) else {
            return Err("a try is between two".into());
        };
        let held = holder.usual.acquire().await?;
        let (other, mut times) = served(tokio::spawn(other.try_in_vain(stretch))).await?;
        holder.usual.release(held).await?;
        self.crowd.tasks = vec![holder, other];
        times.sort_unstable();
        Ok(vec![
            (Figure::P50, quantile(&times, 50)),
            (Figure::P99, quantile(&times, 99)),
        ])
    }

    async fn withdrawals(&mut self, many: u32) -> Result<Sample, BoxError> {
        let (Some(client), [holder]) = (self.crowd.clients.pop(), &mut self.crowd.tasks[..]) else {
            return Err("a withdrawal is between two".into());
        };
        let held = holder.usual.acquire().await?;
        let name = self.name.clone();
        let withdrawing = tokio::spawn(async move {
            let mut times = Vec::new();
            for _ in 0..many {
                times.push(client.withdraw(&name, ASLEEP).await?);
            }
            Ok::<_, BoxError>((client, times))
        });
        let (client, mut times) = served(withdrawing).await?;
        holder.usual.release(held).await?;
        self.crowd.clients.push(client);
        times.sort_unstable();
        Ok(vec![
            (Figure::P50, quantile(&times, 50)),
            (Figure::Longest, quantile(&times, 100)),
        ])
    }

    async fn held(&mut self, locks: u32, ttl: Duration) -> Result<Sample, Unfit> {
        // Enough for 10,000 locks to be renewed in time on a slow disk.
        let ttl = ttl.max(Duration::from_micros(1_500) * locks);
        let processes = self.processes.as_ref().ok_or("no processes")?;
        let mut keeper = Keeper::start_counted(processes).await?;
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
        let closing = Instant::now();
        keeper.close().await?;
        let closing = closing.elapsed();
        let per_period = end.processor.saturating_sub(start.processor);
        let mut sample = vec![
            // A third of 30 s.
            (Figure::Processor, per_period.as_secs_f64() / 10.0 * 100.0),
            (Figure::Closing, micros(closing)),
        ];
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

    async fn recovery(
        &mut self,
        ttl: Duration,
        end: fn(&mut Keeper) -> io::Result<()>,
    ) -> Result<Sample, BoxError> {
        let processes = self.processes.as_ref().ok_or("no processes")?;
        let mut keeper = Keeper::start(processes).await?;
        keeper.acquire(ttl, &self.name).await?;
        let waiter = self.crowd.tasks.pop().ok_or("nobody to wait")?;
        let waiting = tokio::spawn(waiter.wait(None));
        sleep(ASLEEP).await;
        let ended_at = Instant::now();
        end(&mut keeper)?;
        let (waiter, granted_at, _) = served(waiting).await?;
        self.crowd.tasks.push(waiter);
        let took = granted_at.saturating_duration_since(ended_at);
        Ok(vec![(Figure::Recovery, micros(took))])
    }
}

/// What a task ends with that waits for the server.
async fn served<T>(mut waiting: JoinHandle<Result<T, BoxError>>) -> Result<T, BoxError> {
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

fn longest(shares: &[Share]) -> f64 {
    let longest = shares.iter().map(|share| share.longest).max();
    longest.map_or(f64::NAN, micros)
}

pub(super) fn rate(shares: &[Share], elapsed: Duration) -> f64 {
    let grants = shares.iter().map(|share| share.in_time).sum();
    float(grants) / elapsed.as_secs_f64()
}

fn no_gate() -> impl Future<Output = Result<(), BoxError>> {
    ready(Ok(()))
}

/// All waits over all grants.
fn mean(shares: &[Share]) -> f64 {
    let waited: Duration = shares.iter().map(|share| share.waited).sum();
    micros(waited) / grants(shares)
}

fn grants(shares: &[Share]) -> f64 {
    float(shares.iter().map(|share| share.grants).sum())
}

fn fairness(shares: &[Share]) -> f64 {
    let grants = shares.iter().map(|share| float(share.grants));
    let sum: f64 = grants.clone().sum();
    let squares: f64 = grants.map(|grants| grants * grants).sum();
    sum * sum / (float(shares.len() as u64) * squares)
}

/// The figures of a lock that many want.
fn shared_out(rate: f64, shares: &[Share]) -> Sample {
    vec![
        (Figure::Rate, rate),
        (Figure::Longest, longest(shares)),
        (Figure::Mean, mean(shares)),
        (Figure::Fairness, fairness(shares)),
    ]
}

/// Returns these figures, and what each lock took of the processors.
fn used_up(rushed: &Rushed) -> Sample {
    let mut sample = shared_out(rushed.rate, &rushed.shares);
    for (figure, used) in [
        (Figure::ServerTime, rushed.server),
        (Figure::ClientTime, rushed.clients),
    ] {
        if let Some(used) = used {
            sample.push((figure, micros(used) / grants(&rushed.shares)));
        }
    }
    sample
}
