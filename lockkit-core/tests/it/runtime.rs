//! A client whose runtime has ended returns an error that says so, from every call.

use std::{
    future::Future,
    sync::{Arc, Barrier, atomic::Ordering},
    thread,
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireOptions, Error, FencingToken, LockClient, LockKind, LockName, LockState, LossReason,
    MemoryBackend, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Renewal, chain},
};
use tokio::{runtime::Runtime, time::timeout};

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
    timeout(10 * SECOND, work)
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
    let revoked = client.revoke("a", FencingToken::new(1));
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
                client.revoke("a", FencingToken::new(1)),
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
}

#[async_trait]
impl Backend for Hanging {
    fn info(&self) -> BackendInfo {
        self.memory.info()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let claim = self.memory.claim(request).await?;
        Ok(Box::new(HangingClaim(claim, self.grants)))
    }

    async fn inspect(&self, _: &LockName, _: LockKind) -> Result<LockState> {
        std::future::pending().await
    }

    async fn revoke(&self, _: &LockName, _: LockKind, _: FencingToken) -> Result<bool> {
        std::future::pending().await
    }

    async fn close(&self) -> Result<()> {
        std::future::pending().await
    }
}

#[derive(Debug)]
struct HangingClaim(Box<dyn Claim>, bool);

#[async_trait]
impl Claim for HangingClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        if self.1 {
            return self.0.attempt(patience).await;
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
