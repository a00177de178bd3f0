//! A client whose runtime has ended returns an error that says so, from every call.

use std::{
    future::Future,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireOptions, Error, FencingToken, LockClient, LockKind, LockName, LockState, LossReason,
    MemoryBackend, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Renewal, chain},
};
use tokio::{
    runtime::Runtime,
    time::{Instant, timeout},
};

use crate::probe::Probe;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn current_thread() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

fn multi_thread() -> Runtime {
    Runtime::new().unwrap()
}

fn assert_ended<T: std::fmt::Debug>(what: &str, outcome: Result<T>) {
    match outcome {
        Err(err @ Error::Backend { transient: false, .. }) => {
            let text = chain(&err);
            let said = text.ends_with("the runtime that this client lives on has ended");
            assert!(said, "{what}: {text}");
        }
        other => panic!("{what}: {other:?}"),
    }
}

/// Awaits `work` for as long as a test can.
async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    timeout(60 * SECOND, work)
        .await
        .unwrap_or_else(|_| panic!("{what} hangs"))
}

/// Makes every call of `client`.
async fn is_refused(client: &LockClient) {
    for lock in [
        client.lock("a").unwrap(),
        client.lock("b").unwrap().shared(),
        client.semaphore("c", 2).unwrap(),
    ] {
        assert_ended("acquire", soon("acquire", lock.acquire()).await);
        assert_ended("try_acquire", soon("try_acquire", lock.try_acquire()).await);
        assert_ended("inspect", soon("inspect", lock.inspect()).await);
    }
    let revoked = client.revoke_by_force("a", FencingToken::new(1));
    assert_ended("revoke", soon("revoke", revoked).await);
    assert_ended("close", soon("close", client.close(60 * SECOND)).await);
    assert_ended("close", soon("close", client.close(60 * SECOND)).await);
}

#[test]
fn a_client_that_outlives_its_runtime_says_so() {
    for used in [false, true] {
        for first in [current_thread(), multi_thread()] {
            let client = first.block_on(async {
                let client = LockClient::new(MemoryBackend::new());
                if used {
                    drop(client.lock("a").unwrap().acquire().await.unwrap());
                }
                client
            });
            drop(first);
            current_thread().block_on(is_refused(&client));
        }
    }
}

#[test]
fn a_client_of_a_backend_that_hangs_says_so_too() {
    let (first, second) = (multi_thread(), current_thread());
    let client = first.block_on(async { LockClient::new(Hanging::default()) });
    drop(first);
    second.block_on(is_refused(&client));
}

/// Its user may go by the end that it had.
#[test]
fn what_was_asked_for_has_its_end_with_its_runtime() {
    let (first, second) = (multi_thread(), current_thread());
    let memory = MemoryBackend::new();
    let client = first.block_on(async { LockClient::new(memory.clone()) });
    let guard = second.block_on(client.lock("a").unwrap().acquire()).unwrap();
    second.block_on(async {
        let others = LockClient::new(memory);
        let asked = others.revoke("a", guard.token(), Duration::ZERO);
        let _ = soon("asking", asked).await.unwrap();
        assert_eq!(soon("the loss", guard.lost()).await, LossReason::Asked);
        assert!(guard.valid_until().unwrap() > Instant::now() + SECOND);
        first.shutdown_background();
        let lock = others.lock("a").unwrap();
        let next = soon("the next", lock.acquire()).await.unwrap();
        assert!(guard.valid_until().unwrap() <= Instant::now(), "others have it");
        drop(next);
    });
}

#[test]
fn what_is_under_way_ends_with_the_runtime() {
    let (first, second) = (multi_thread(), current_thread());
    let make = || first.block_on(async { LockClient::new(Hanging::default()) });
    let (client, closing) = (make(), make());
    let memory = MemoryBackend::new();
    let held = first.block_on(async { LockClient::new(memory.clone()) });
    // Waits at the server, and behind that in the client.
    let waiting = first.block_on(async { LockClient::new(memory) });
    let guard = second.block_on(held.lock("a").unwrap().acquire()).unwrap();
    second.block_on(async {
        let lock = client.lock("a").unwrap();
        let wanted = waiting.lock("a").unwrap();
        let all = async {
            tokio::join!(
                lock.acquire(),
                lock.try_acquire(),
                lock.inspect(),
                client.revoke_by_force("a", FencingToken::new(1)),
                closing.close(60 * SECOND),
                wanted.acquire(),
                wanted.acquire(),
                wanted.acquire_timeout(60 * SECOND),
                guard.lost(),
            )
        };
        let end = async {
            tokio::time::sleep(50 * MS).await;
            first.shutdown_background();
        };
        let (done, ()) = tokio::join!(soon("something", all), end);
        assert_ended("acquire", done.0);
        assert_ended("try_acquire", done.1);
        assert_ended("inspect", done.2);
        assert_ended("revoke", done.3);
        assert_ended("close", done.4);
        for waiter in [done.5, done.6, done.7] {
            assert_ended("a waiter", waiter);
        }
        assert_eq!(done.8, LossReason::Disconnected);
        // The hold is lost, and its guard says so.
        assert!(guard.renew().await.unwrap_err().is_lost());
        assert!(guard.release().await.unwrap_err().is_lost());
    });
}

/// A hold without a lease would stay for as long as its guard is kept.
#[test]
fn a_claim_that_is_in_use_elsewhere_ends_with_the_runtime() {
    let probe = Probe::default();
    let (own, other) = (current_thread(), current_thread());
    let guard = own.block_on(async {
        let lock = LockClient::new(probe.clone()).lock("a").unwrap();
        lock.acquire().await.unwrap()
    });
    let barrier = Arc::new(Barrier::new(2));
    *probe.barrier.lock().unwrap() = Some(barrier.clone());
    thread::scope(|scope| {
        let renewal = scope.spawn(|| other.block_on(guard.renew()));
        barrier.wait();
        drop(own);
        assert!(!guard.is_held());
        barrier.wait();
        assert!(renewal.join().unwrap().unwrap_err().is_lost());
    });
    let left = probe.counts.claims.load(Ordering::SeqCst);
    assert_eq!(left, 0, "claims that a lost hold keeps");
    drop(guard);
}

/// Its worker ends the holds one after the other. A renewal may begin in between.
#[test]
fn a_renewal_before_its_hold_is_told_of_the_end_is_a_loss() {
    let (own, other) = (current_thread(), current_thread());
    let backend = Hanging {
        grants: true,
        ..Hanging::default()
    };
    let dropping = backend.dropping.clone();
    let guards = own.block_on(async {
        let client = LockClient::new(backend);
        let hold = async |name| client.lock(name).unwrap().acquire().await.unwrap();
        [hold("a").await, hold("b").await]
    });
    let barrier = Arc::new(Barrier::new(2));
    *dropping.lock().unwrap() = Some(barrier.clone());
    thread::scope(|scope| {
        let ending = scope.spawn(|| drop(own));
        // The claim of the first is being dropped.
        barrier.wait();
        let untold: Vec<_> = guards.iter().filter(|guard| guard.is_held()).collect();
        assert_eq!(untold.len(), 1, "one of two has been told");
        let renewed = other.block_on(soon("renew", untold[0].renew()));
        barrier.wait();
        ending.join().unwrap();
        let error = renewed.unwrap_err();
        let lost = Error::lost("memory", untold[0].name().clone(), LossReason::Disconnected);
        assert_eq!(error.to_string(), lost.to_string());
        assert!(error.is_lost() && !untold[0].is_held());
    });
}

#[test]
fn a_release_under_way_ends_with_the_runtime() {
    let (first, second) = (multi_thread(), current_thread());
    let client = first.block_on(async {
        LockClient::new(Hanging {
            grants: true,
            ..Hanging::default()
        })
    });
    second.block_on(async {
        let lock = client
            .lock("a")
            .unwrap()
            .with_options(AcquireOptions::new().op_timeout(60 * SECOND));
        let guard = lock.acquire().await.unwrap();
        let end = async {
            tokio::time::sleep(50 * MS).await;
            first.shutdown_background();
        };
        let (released, ()) = tokio::join!(soon("release", guard.release()), end);
        assert_ended("release", released);
    });
}

/// A server that never replies, except with the grants that it may give.
#[derive(Clone, Debug, Default)]
struct Hanging {
    memory: MemoryBackend,
    grants: bool,
    /// The barrier at which the next claim that is dropped waits, with its thread: once when it is there, and once to go on.
    dropping: Arc<Mutex<Option<Arc<Barrier>>>>,
}

#[async_trait]
impl Backend for Hanging {
    fn info(&self) -> BackendInfo {
        self.memory.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let claim = self.memory.claim(request).await?;
        Ok(Box::new(HangingClaim {
            claim,
            backend: self.clone(),
        }))
    }

    async fn inspect(&self, _: &LockName, _: LockKind) -> Result<LockState> {
        std::future::pending().await
    }

    async fn revoke_by_force(&self, _: &LockName, _: LockKind, _: FencingToken) -> Result<bool> {
        std::future::pending().await
    }

    async fn close(&self) -> Result<()> {
        std::future::pending().await
    }
}

#[derive(Debug)]
struct HangingClaim {
    claim: Box<dyn Claim>,
    backend: Hanging,
}

impl Drop for HangingClaim {
    fn drop(&mut self) {
        let barrier = self.backend.dropping.lock().unwrap().take();
        if let Some(barrier) = barrier {
            barrier.wait();
            barrier.wait();
        }
    }
}

#[async_trait]
impl Claim for HangingClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        if self.backend.grants {
            return self.claim.attempt(patience).await;
        }
        std::future::pending().await
    }

    async fn renew(&mut self) -> Result<Renewal> {
        std::future::pending().await
    }

    async fn release(&mut self) -> Result<()> {
        std::future::pending().await
    }

    async fn notified(&mut self) {
        std::future::pending::<()>().await;
    }
}

/// Whoever asks again and again after an error has to stop when its runtime does, which ends a task only where it waits for something.
#[test]
fn a_runtime_ends_beside_tasks_that_ask_again_at_once() {
    for round in 0..20 {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let client = LockClient::new(MemoryBackend::new());
        let holds = Arc::new(AtomicUsize::new(0));
        for _ in 0..8 {
            let (lock, holds) = (client.lock("a").unwrap(), holds.clone());
            runtime.spawn(async move {
                loop {
                    if let Ok(guard) = lock.acquire().await {
                        holds.fetch_add(1, Ordering::Relaxed);
                        let _ = guard.release().await;
                    }
                }
            });
        }
        while holds.load(Ordering::Relaxed) < 100 {
            thread::sleep(MS);
        }
        let (ended, end) = std::sync::mpsc::channel();
        thread::spawn(move || {
            drop(runtime);
            let _ = ended.send(());
        });
        end.recv_timeout(60 * SECOND)
            .unwrap_or_else(|_| panic!("the runtime does not end, in round {round}"));
    }
}
