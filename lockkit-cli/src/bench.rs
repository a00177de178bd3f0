//! `lockkit bench`: lock servers side by side.
//!
//! The servers take turns, round by round, so that whatever else the machine does meets them all alike.

use std::{
    process,
    time::{Duration, Instant},
};

use lockkit::{AcquireOptions, Lock, LockClient};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::timeout};

use crate::{
    args::Bench,
    failure::{FAILED, Failure},
    inspect::print,
    server,
};

const TASKS: usize = 16;
/// Longer than any healthy server takes for anything that is measured here.
const PATIENCE: Duration = Duration::from_secs(30);
/// A waiter that has waited for this long is in the queue.
const QUEUED_AFTER: Duration = Duration::from_millis(5);

pub(crate) fn bench(args: &Bench) -> Result<u8, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::because("cannot start", &error))?
        .block_on(compare(args))
}

async fn compare(args: &Bench) -> Result<u8, Failure> {
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL };
    let urls = if args.urls.is_empty() {
        vec![server::url(None)?]
    } else {
        args.urls.clone()
    };
    let mut servers = Vec::new();
    for url in &urls {
        servers.push(Measured::connect(url).await?);
    }
    for round in 0..effort.rounds {
        for server in &mut servers {
            server.round(round, &effort).await?;
        }
    }
    print(&if args.json {
        as_json(&servers)
    } else {
        as_table(&servers)
    });
    for server in servers {
        server.near.close(PATIENCE).await?;
        server.far.close(PATIENCE).await?;
    }
    Ok(0)
}

/// How much is measured.
struct Effort {
    rounds: u32,
    /// How long each measurement of a round takes.
    stretch: Duration,
    handoffs: u32,
}

impl Effort {
    const QUICK: Self = Self {
        rounds: 2,
        stretch: Duration::from_millis(50),
        handoffs: 5,
    };
    const FULL: Self = Self {
        rounds: 10,
        stretch: Duration::from_millis(300),
        handoffs: 20,
    };
}

/// A server, and what has been measured of it.
struct Measured {
    near: LockClient,
    /// A second client, as another process would have.
    far: LockClient,
    /// One acquire and release each, of a lock that nobody else wants.
    uncontended: Vec<Duration>,
    /// Locks per second of [`TASKS`] tasks on one name, per round.
    contended: Vec<f64>,
    /// From the release by one client to the grant to another that waits.
    handoffs: Vec<Duration>,
}

impl Measured {
    async fn connect(url: &str) -> Result<Self, Failure> {
        Ok(Self {
            near: lockkit::connect(url).await?,
            far: lockkit::connect(url).await?,
            uncontended: Vec::new(),
            contended: Vec::new(),
            handoffs: Vec::new(),
        })
    }

    async fn round(&mut self, round: u32, effort: &Effort) -> Result<(), Failure> {
        let (near, far) = (named(&self.near, round)?, named(&self.far, round)?);
        let began = Instant::now();
        while began.elapsed() < effort.stretch {
            let cycle = Instant::now();
            near.acquire().await?.release().await?;
            self.uncontended.push(cycle.elapsed());
        }
        self.contended.push(contended(&near, effort.stretch).await?);
        for _ in 0..effort.handoffs {
            self.handoffs.push(handoff(&near, &far).await?);
        }
        Ok(())
    }

    fn server(&self) -> String {
        let info = self.near.info();
        format!("{} {}", info.name, info.server)
    }
}

/// A lock of this run alone, on the same name for each of its clients.
fn named(client: &LockClient, round: u32) -> Result<Lock, Failure> {
    let lock = client.lock(format!("lockkit-bench/{}/{round}", process::id()))?;
    Ok(lock.with_options(AcquireOptions::new().wait(PATIENCE)))
}

async fn contended(lock: &Lock, stretch: Duration) -> Result<f64, Failure> {
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let lock = lock.clone();
        tasks.spawn(async move {
            let mut granted = 0_u32;
            while began.elapsed() < stretch {
                lock.acquire().await?.release().await?;
                granted += 1;
            }
            Ok::<_, lockkit::Error>(granted)
        });
    }
    let mut granted = 0;
    while let Some(task) = tasks.join_next().await {
        granted += task.map_err(|error| Failure::because("a measurement failed", &error))??;
    }
    Ok(f64::from(granted) / began.elapsed().as_secs_f64())
}

async fn handoff(near: &Lock, far: &Lock) -> Result<Duration, Failure> {
    let held = near.acquire().await?;
    let mut waiting = std::pin::pin!(far.acquire());
    match timeout(QUEUED_AFTER, waiting.as_mut()).await {
        Err(_) => {}
        Ok(Err(error)) => return Err(error.into()),
        Ok(Ok(_)) => {
            let server = near.id().server();
            return Err(Failure::new(
                FAILED,
                format!("two clients of {server} held one lock at once"),
            ));
        }
    }
    let released_at = Instant::now();
    let granted = async { waiting.await.map(|guard| (guard, released_at.elapsed())) };
    let (released, granted) = tokio::join!(held.release(), granted);
    released?;
    let (guard, took) = granted?;
    guard.release().await?;
    Ok(took)
}

fn as_table(servers: &[Measured]) -> String {
    let header = [
        "server",
        "uncontended p50",
        "p99",
        "16 tasks",
        "hand-off p50",
        "p99",
    ]
    .map(str::to_owned);
    let rows = servers.iter().map(|server| {
        [
            server.server(),
            short(quantile(&server.uncontended, 50)),
            short(quantile(&server.uncontended, 99)),
            format!("{:.0} locks/s", median(&server.contended)),
            short(quantile(&server.handoffs, 50)),
            short(quantile(&server.handoffs, 99)),
        ]
    });
    let table: Vec<[String; 6]> = std::iter::once(header).chain(rows).collect();
    let width = |column: usize| {
        table
            .iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: [usize; 6] = std::array::from_fn(width);
    let line = |row: &[String; 6]| {
        let [server, figures @ ..] = row;
        let figures = figures
            .iter()
            .zip(&widths[1..])
            .map(|(figure, width)| format!("  {figure:>width$}"));
        std::iter::once(format!("{server:<width$}", width = widths[0]))
            .chain(figures)
            .collect::<String>()
    };
    table.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn as_json(servers: &[Measured]) -> String {
    let micros = |samples: &[Duration], percent| quantile(samples, percent).as_secs_f64() * 1e6;
    let rows = servers.iter().map(|server| {
        json!({
            "backend": server.near.info().name,
            "server": server.near.info().server.as_ref(),
            "uncontended_p50_us": micros(&server.uncontended, 50),
            "uncontended_p99_us": micros(&server.uncontended, 99),
            "contended_locks_per_s": median(&server.contended),
            "handoff_p50_us": micros(&server.handoffs, 50),
            "handoff_p99_us": micros(&server.handoffs, 99),
        })
    });
    Value::Array(rows.collect()).to_string()
}

/// Nearest rank.
fn quantile(samples: &[Duration], percent: usize) -> Duration {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

fn short(duration: Duration) -> String {
    let micros = duration.as_secs_f64() * 1e6;
    if micros < 1e3 {
        format!("{micros:.1} µs")
    } else {
        format!("{:.2} ms", micros / 1e3)
    }
}
