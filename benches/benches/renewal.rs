//! What one renewal costs when many locks are held. Time is paused, so that a renewal costs what it computes; both
//! counts take turns.

use std::{
    cell::RefCell,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use criterion::{Criterion, criterion_group, criterion_main};
use lockkit::{LockClient, LockGuard};
use lockkit_benches::{Noop, duel};
use tokio::runtime::{Builder, Runtime};

/// A third of the default ttl.
const PERIOD: Duration = Duration::from_secs(10);

struct Held {
    runtime: Runtime,
    backend: Noop,
    guards: RefCell<Vec<LockGuard>>,
}

impl Held {
    /// Holds `count` locks, acquired all at once or evenly over a period.
    fn new(count: usize, spread: bool) -> Self {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        let backend = Noop::default();
        let guards = runtime.block_on(async {
            let client = LockClient::new(backend.clone());
            let mut guards = Vec::with_capacity(count);
            for n in 0..count {
                let lock = client.lock(format!("sixteen-b-{n:06}")).expect("a name");
                guards.push(lock.acquire().await.expect("granted"));
                if spread && n % (count / 1_000) == 0 {
                    tokio::time::sleep(PERIOD / 1_000).await;
                }
            }
            guards
        });
        let held = Self {
            runtime,
            backend,
            guards: RefCell::new(guards),
        };
        held.renew(count as u64);
        held
    }

    /// Lets time pass until there have been `n` renewals; returns what `n` took.
    #[expect(clippy::cast_precision_loss, reason = "a ratio of counts far below 2^52")]
    fn renew(&self, n: u64) -> Duration {
        let renewals = &self.backend.counts().renewals;
        let before = renewals.load(Ordering::Relaxed);
        let started = Instant::now();
        let done = self.runtime.block_on(async {
            loop {
                tokio::time::sleep(PERIOD).await;
                let done = renewals.load(Ordering::Relaxed) - before;
                if done >= n {
                    return done;
                }
            }
        });
        started.elapsed().mul_f64(n as f64 / done as f64)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        assert!(
            self.guards.borrow().iter().all(LockGuard::is_held),
            "a lock was lost while it was measured"
        );
    }
}

fn renewal(c: &mut Criterion) {
    for (how, spread) in [("due together", false), ("spread evenly", true)] {
        let mut group = c.benchmark_group(format!("renewal, {how}"));
        let (many, few) = (Held::new(100_000, spread), Held::new(1_000, spread));
        duel(
            &mut group,
            ("100,000 held", |n| many.renew(n)),
            ("1,000 held", |n| few.renew(n)),
        );
        group.finish();
    }
}

criterion_group!(benches, renewal);
criterion_main!(benches);
