//! The cost of the driver itself, on a backend that costs nothing.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use criterion::{Criterion, SamplingMode, criterion_group, criterion_main};
use lockkit::{AcquireOptions, Lock, LockClient};
use lockkit_benches::{Noop, duel, time_cycles};
use tokio::runtime::{Builder, Runtime};

fn current_thread() -> Runtime {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

async fn cycle(lock: &Lock) {
    let guard = lock.acquire().await.expect("granted");
    guard.release().await.expect("released");
}

/// Holds across an await, so that the others come to wait: without one, a task on a single thread is never interrupted
/// between its acquisition and its release, and nothing is ever contended.
async fn cycle_with_await(lock: &Lock) {
    let guard = lock.acquire().await.expect("granted");
    tokio::task::yield_now().await;
    guard.release().await.expect("released");
}

/// An uncontended acquisition and release, against spawning and joining an empty task.
fn uncontended(c: &mut Criterion) {
    let runtime = current_thread();
    let lock = runtime
        .block_on(async { LockClient::new(Noop::default()) })
        .lock("name")
        .expect("a name");
    let mut group = c.benchmark_group("uncontended");
    duel(
        &mut group,
        ("lockkit", |n| time_cycles(&runtime, n, || cycle(&lock))),
        ("empty spawn and join", |n| {
            time_cycles(&runtime, n, || async {
                tokio::spawn(async {}).await.expect("joined");
            })
        }),
    );
    group.finish();
}

/// 16 tasks on one name, against `tokio::sync::Mutex`.
fn one_name(c: &mut Criterion) {
    const TASKS: u64 = 16;
    for (kind, runtime) in [
        ("current thread", current_thread()),
        (
            "two threads",
            Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .expect("a runtime"),
        ),
    ] {
        let mut group = c.benchmark_group(format!("16 tasks on one name, {kind}"));
        let lock = runtime
            .block_on(async { LockClient::new(Noop::default()) })
            .lock("name")
            .expect("a name");
        let lock = lock.with_options(AcquireOptions::new().local_handoffs(1_000));
        let mutex = Arc::new(tokio::sync::Mutex::new(0_u64));
        let locks = || {
            let lock = lock.clone();
            move || {
                let lock = lock.clone();
                async move { cycle_with_await(&lock).await }
            }
        };
        let mutexes = || {
            let mutex = mutex.clone();
            move || {
                let mutex = mutex.clone();
                async move {
                    let mut value = mutex.lock().await;
                    tokio::task::yield_now().await;
                    *value += 1;
                }
            }
        };
        duel(
            &mut group,
            ("lockkit", |n| contended(&runtime, TASKS, n, locks)),
            ("tokio::sync::Mutex", |n| contended(&runtime, TASKS, n, mutexes)),
        );
        group.finish();
    }
}

/// `n` cycles in all, by `tasks` tasks.
fn contended<C, F>(runtime: &Runtime, tasks: u64, n: u64, cycles: impl Fn() -> C) -> Duration
where
    C: Fn() -> F + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let run = |n: u64| {
        let cycle = cycles();
        async move {
            for _ in 0..n {
                cycle().await;
            }
        }
    };
    runtime.block_on(async {
        let started = Instant::now();
        let tasks: Vec<_> = (0..tasks).map(|_| tokio::spawn(run(n.div_ceil(tasks)))).collect();
        for task in tasks {
            task.await.expect("joined");
        }
        started.elapsed()
    })
}

/// A hand-off to the next waiter with 1,000 waiters, against 10.
fn hand_off(c: &mut Criterion) {
    let runtime = current_thread();
    let mut group = c.benchmark_group("hand-off");
    let queue = |waiters: u64| {
        let lock = runtime
            .block_on(async { LockClient::new(Noop::default()) })
            .lock("name")
            .expect("a name");
        let runtime = &runtime;
        move |n: u64| handed_round(runtime, &lock, waiters, n)
    };
    duel(
        &mut group,
        ("1,000 waiters", queue(1_000)),
        ("10 waiters", queue(10)),
    );
    group.finish();
}

/// `n` grants in a queue that always has `waiters` in it.
fn handed_round(runtime: &Runtime, lock: &Lock, waiters: u64, n: u64) -> Duration {
    runtime.block_on(async {
        let left = Arc::new(std::sync::atomic::AtomicU64::new(n));
        let gate = lock.acquire().await.expect("granted");
        let arrived = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let tasks: Vec<_> = (0..waiters)
            .map(|_| {
                let (lock, left, arrived) = (lock.clone(), left.clone(), arrived.clone());
                tokio::spawn(async move {
                    arrived.fetch_add(1, Ordering::Relaxed);
                    loop {
                        let guard = lock.acquire().await.expect("granted");
                        let turn =
                            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                        guard.release().await.expect("released");
                        if turn.is_err() {
                            return;
                        }
                    }
                })
            })
            .collect();
        while arrived.load(Ordering::Relaxed) < waiters {
            tokio::task::yield_now().await;
        }
        let started = Instant::now();
        gate.release().await.expect("released");
        while left.load(Ordering::Relaxed) > 0 {
            tokio::task::yield_now().await;
        }
        let took = started.elapsed();
        for task in tasks {
            task.await.expect("joined");
        }
        took
    })
}

/// Closing a client that holds 10,000 locks, against one that has as many names and holds none of them.
fn close(c: &mut Criterion) {
    let runtime = current_thread();
    let mut group = c.benchmark_group("close");
    // Most of the time goes into what is to be closed.
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    duel(
        &mut group,
        ("10,000 holds", |n| closed(&runtime, true, n)),
        ("10,000 idle names", |n| closed(&runtime, false, n)),
    );
    group.finish();
}

/// Closes `n` clients.
fn closed(runtime: &Runtime, holds: bool, n: u64) -> Duration {
    runtime.block_on(async {
        let mut took = Duration::ZERO;
        for _ in 0..n {
            let client = LockClient::new(Noop::default());
            let (mut locks, mut guards) = (Vec::new(), Vec::new());
            for name in 0..10_000 {
                let lock = client.lock(format!("name-{name}")).expect("a name");
                let guard = lock.acquire().await.expect("granted");
                if holds {
                    guards.push(guard);
                } else {
                    guard.release().await.expect("released");
                }
                locks.push(lock);
            }
            let started = Instant::now();
            client.close(Duration::from_secs(60)).await.expect("closed");
            took += started.elapsed();
        }
        took
    })
}

criterion_group!(benches, uncontended, one_name, hand_off, close);
criterion_main!(benches);
