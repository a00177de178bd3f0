//! Costs that are counted rather than timed: allocations, heap, tasks, requests.

#[cfg(target_os = "linux")]
mod listing;
mod report;
#[cfg(target_os = "linux")]
mod waiting;

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit::{
    AcquireOptions, LockClient, LockGuard, LockKind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Renewal},
};
use lockkit_benches::Noop;
use lockkit_testbed::eventually;
use tokio::runtime::{Builder, Handle, Runtime};

/// For a test that takes much of the processors, and for one that measures what little others take: what a process takes
/// grows when it finds its caches used by others.
static PROCESSORS: Mutex<()> = Mutex::new(());

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn an_uncontended_cycle_allocates_at_most_six_times() {
    let runtime = current_thread();
    let lock = runtime
        .block_on(async { LockClient::new(Noop::default()) })
        .lock("name")
        .unwrap();
    let cycle = || {
        runtime.block_on(async { lock.acquire().await.unwrap().release().await.unwrap() });
    };
    // The first ones start the worker and fill what is reused.
    (0..1_000).for_each(|_| cycle());
    let counted = allocation_counter::measure(|| (0..64).for_each(|_| cycle()));
    println!("{} allocations in 64 cycles", counted.count_total);
    assert!(
        counted.count_total <= 6 * 64,
        "{} allocations in 64 cycles",
        counted.count_total
    );
}

#[test]
fn a_held_lock_costs_at_most_two_kib_of_heap() {
    const LOCKS: usize = 100_000;
    let runtime = current_thread();
    let client = runtime.block_on(async { LockClient::new(Noop::default()) });
    let mut held: Vec<LockGuard> = Vec::with_capacity(LOCKS);
    let counted = allocation_counter::measure(|| {
        runtime.block_on(async {
            for n in 0..LOCKS {
                let lock = client.lock(format!("sixteen-b-{n:06}")).unwrap();
                held.push(lock.acquire().await.unwrap());
            }
            // Long enough for the worker to watch over all of them.
            tokio::time::sleep(Duration::from_millis(200)).await;
        });
    });
    let each = counted.bytes_current / i64::try_from(LOCKS).unwrap();
    println!("{each} bytes of heap per held lock");
    assert!(held.iter().all(LockGuard::is_held));
    assert!(each <= 2_048, "{each} bytes");
    assert!(each >= 100, "the measurement sees nothing: {each} bytes");
}

#[test]
fn a_hand_off_asks_the_server_for_nothing() {
    const HANDOFFS: u32 = 9;
    const GRANTS: u32 = 1_000;
    let runtime = current_thread();
    let backend = Noop::default();
    let client = runtime.block_on(async { LockClient::new(backend.clone()) });
    let lock = client
        .lock("name")
        .unwrap()
        .with_options(AcquireOptions::new().local_handoffs(HANDOFFS));
    runtime.block_on(async {
        let gate = lock.acquire().await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..16 {
            let lock = lock.clone();
            // With the gate's grant, this makes GRANTS in all, and 16 wait until the very end.
            let share = (GRANTS - 1) / 16 + u32::from(n < (GRANTS - 1) % 16);
            tasks.spawn(async move {
                for _ in 0..share {
                    let guard = lock.acquire().await.unwrap();
                    tokio::task::yield_now().await;
                    guard.release().await.unwrap();
                }
            });
        }
        // They run on this thread: by then all of them are in line.
        tokio::time::sleep(Duration::from_millis(20)).await;
        gate.release().await.unwrap();
        tasks.join_all().await;
    });
    let counts = backend.counts();
    let batches = u64::from(GRANTS / (HANDOFFS + 1));
    assert_eq!(counts.attempts.load(Ordering::Relaxed), batches);
    assert_eq!(counts.releases.load(Ordering::Relaxed), batches);
}

/// Notes how many tasks there are whenever it is asked for a grant.
#[derive(Debug, Default)]
struct Watching {
    inner: Noop,
}

static MOST_TASKS: AtomicU64 = AtomicU64::new(0);

#[async_trait]
impl Backend for Watching {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Ok(Box::new(WatchingClaim {
            inner: self.inner.claim(request).await?,
        }))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.inner.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct WatchingClaim {
    inner: Box<dyn Claim>,
}

#[async_trait]
impl Claim for WatchingClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        MOST_TASKS.fetch_max(
            Handle::current().metrics().num_alive_tasks() as u64,
            Ordering::Relaxed,
        );
        self.inner.attempt(patience).await
    }

    async fn renew(&mut self) -> Result<Renewal> {
        self.inner.renew().await
    }

    async fn release(&mut self) -> Result<()> {
        self.inner.release().await
    }

    async fn notified(&mut self) {
        self.inner.notified().await;
    }
}

#[test]
fn a_client_is_one_task_whatever_it_holds() {
    let runtime = current_thread();
    runtime.block_on(async {
        let client = LockClient::new(Watching::default());
        let lock = client.lock("name").unwrap();
        let first = lock.acquire().await.unwrap();
        assert_eq!(
            MOST_TASKS.load(Ordering::Relaxed),
            1,
            "one worker, which is there before anything is sent"
        );
        first.release().await.unwrap();
        let mut held = Vec::new();
        for n in 0..100 {
            held.push(client.lock(format!("{n}")).unwrap().acquire().await.unwrap());
        }
        eventually("one worker for a hundred holds", async || {
            Handle::current().metrics().num_alive_tasks() == 1
        })
        .await;
    });
}
