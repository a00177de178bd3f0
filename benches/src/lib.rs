//! Shared by the benchmarks: a backend that costs nothing, duels, in which two things take turns, tables of medians,
//! and everyone who takes part in the comparison of the backends.

pub mod listing;
pub mod peers;
pub mod processor;
pub mod report;
pub mod results;
pub mod servers;

use std::{
    hint::black_box,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use criterion::{BenchmarkGroup, measurement::WallTime};
use lockkit::{
    Capabilities, LockKind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Lease, Renewal},
};

/// A server that grants everything at once and counts: what is left is the driver.
#[derive(Clone, Debug, Default)]
pub struct Noop {
    counts: Arc<Counts>,
}

/// Counts the driver's calls.
#[derive(Debug, Default)]
pub struct Counts {
    tokens: AtomicU64,
    /// Attempts.
    pub attempts: AtomicU64,
    /// Renewals.
    pub renewals: AtomicU64,
    /// Releases.
    pub releases: AtomicU64,
}

impl Noop {
    /// Returns the counts so far.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

#[async_trait]
impl Backend for Noop {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new("noop", "noop:");
        let mut capabilities = Capabilities::default();
        capabilities.lease = true;
        capabilities.local_handoffs = true;
        info.capabilities = capabilities;
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Ok(Box::new(NoopClaim {
            counts: self.counts.clone(),
            ttl: request.ttl,
            tokens: request.tokens.get(),
        }))
    }

    async fn inspect(&self, _: &LockName, _: LockKind) -> Result<LockState> {
        Ok(LockState::default())
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct NoopClaim {
    counts: Arc<Counts>,
    ttl: Duration,
    tokens: u32,
}

impl NoopClaim {
    fn lease(&self) -> Lease {
        Lease::new(lockkit::Instant::now(), Some(self.ttl))
    }

    fn tokens(&self) -> RangeInclusive<u64> {
        let first = self
            .counts
            .tokens
            .fetch_add(u64::from(self.tokens), Ordering::Relaxed)
            + 1;
        first..=first + u64::from(self.tokens) - 1
    }
}

#[async_trait]
impl Claim for NoopClaim {
    async fn attempt(&mut self, _: Duration) -> Result<Option<Grant>> {
        self.counts.attempts.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Grant::new(self.tokens(), self.lease())))
    }

    async fn renew(&mut self) -> Result<Renewal> {
        self.counts.renewals.fetch_add(1, Ordering::Relaxed);
        Ok(Renewal::Held(self.lease()))
    }

    async fn release(&mut self) -> Result<()> {
        self.counts.releases.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn notified(&mut self) {
        std::future::pending::<()>().await;
    }
}

/// Something that is measured: given a number of iterations, it returns how long they took.
pub type Contestant<'a> = (&'a str, Box<dyn FnMut(u64) -> Duration + 'a>);

/// Measures two things that take turns, so that whatever else the machine does hits both alike.
pub fn duel<'a, A, B>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    (name_a, a): (&'a str, A),
    (name_b, b): (&'a str, B),
) where
    A: FnMut(u64) -> Duration + 'a,
    B: FnMut(u64) -> Duration + 'a,
{
    contest(group, &mut [(name_a, Box::new(a)), (name_b, Box::new(b))]);
}

/// Measures several things that take turns, as [`duel`] does.
pub fn contest(group: &mut BenchmarkGroup<'_, WallTime>, contestants: &mut [Contestant<'_>]) {
    for index in 0..contestants.len() {
        let name = contestants[index].0.to_owned();
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|n| in_turns(n, contestants, index));
        });
    }
}

/// Runs `n` iterations of each, in up to 16 rounds, and returns what the one at `counted` took.
fn in_turns(n: u64, contestants: &mut [Contestant<'_>], counted: usize) -> Duration {
    let per_round = n.div_ceil(16);
    let mut left = n;
    let mut took = Duration::ZERO;
    while left > 0 {
        let round = per_round.min(left);
        for (index, (_, run)) in contestants.iter_mut().enumerate() {
            let time = black_box(run(round));
            if index == counted {
                took += time;
            }
        }
        left -= round;
    }
    took
}

/// Times `n` awaits of what `cycle` makes, on `runtime`, without the cost of entering it.
pub fn time_cycles<F: Future<Output = ()>>(
    runtime: &tokio::runtime::Runtime,
    n: u64,
    cycle: impl Fn() -> F,
) -> Duration {
    runtime.block_on(async {
        let started = Instant::now();
        for _ in 0..n {
            cycle().await;
        }
        started.elapsed()
    })
}
