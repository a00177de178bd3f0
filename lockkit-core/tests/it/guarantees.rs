//! The rows of `docs/guarantees.md` that no other test shows, also those that fail.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Waker},
    time::Duration,
};

use lockkit_core::{
    AcquireOptions, FenceGate, FencingToken, Instant, LockClient, LockName, MemoryBackend,
    spi::{Backend, Claim, ClaimRequest, Mode, OwnerId},
};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn poll_once<F: Future + Unpin>(mut future: F) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    Pin::new(&mut future).poll(&mut cx).is_ready()
}

/// A process whose clock stands still loses nothing, and lets nobody else in: all are on the same clock.
#[tokio::test(start_paused = true)]
async fn memory_leases_end_by_the_monotonic_clock_alone() {
    let client = LockClient::new(MemoryBackend::new());
    let lock = client.lock("a").unwrap();
    let options = AcquireOptions::new().ttl(10 * MS).renew(false);
    let guard = lock.acquire_with(&options).await.unwrap();
    // Other clocks go on.
    std::thread::sleep(50 * MS);
    assert!(guard.is_held());
    assert!(lock.try_acquire().await.unwrap().is_none());
    tokio::time::advance(10 * MS).await;
    assert!(!guard.is_held());
}

/// A resource that outlives the process takes the tokens of the next one.
#[tokio::test]
async fn memory_tokens_go_on_with_each_new_space() {
    let resource = FenceGate::new();
    for _ in 0..3 {
        // A new process has a new space.
        let client = LockClient::new(MemoryBackend::new());
        let lock = client.lock("a").unwrap();
        for _ in 0..2 {
            let token = lock.acquire().await.unwrap().token();
            resource.admit(token).unwrap();
        }
        // A process takes longer to start. Two grants draw some tens of tokens.
        std::thread::sleep(MS);
    }
}

/// ✘: what was above the clock is not known any more, as after a clock that was set back.
#[tokio::test]
async fn memory_tokens_above_the_clock_go_back_with_a_new_space() {
    let resource = FenceGate::new();
    let client = LockClient::new(MemoryBackend::new());
    let clock = client.fence().await.unwrap();
    let ahead = FencingToken::new(clock.get() + 3_600_000_000);
    client.raise_fence(ahead).await.unwrap();
    let token = client.lock("a").unwrap().acquire().await.unwrap().token();
    resource.admit(token).unwrap();

    let client = LockClient::new(MemoryBackend::new());
    let token = client.lock("a").unwrap().acquire().await.unwrap().token();
    resource.admit(token).unwrap_err();
}

/// ✘: a waiter that is neither polled nor dropped holds up the others of its client, until it is dropped.
#[tokio::test(start_paused = true)]
async fn an_unpolled_waiter_blocks_those_behind_it_until_dropped() {
    let client = LockClient::new(MemoryBackend::new());
    let options = AcquireOptions::new().ttl(SECOND).local_handoffs(0);
    let lock = client.lock("a").unwrap().with_options(options);
    let first = lock.acquire().await.unwrap();
    let mut forgotten = Box::pin(lock.acquire());
    assert!(!poll_once(&mut forgotten));
    let behind = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await.unwrap() }
    });
    tokio::task::yield_now().await;
    first.release().await.unwrap();
    tokio::time::sleep(60 * SECOND).await;
    assert!(!behind.is_finished());
    let started = Instant::now();
    drop(forgotten);
    behind.await.unwrap().release().await.unwrap();
    assert!(started.elapsed() < SECOND);
}

#[tokio::test]
async fn memory_grants_in_order() {
    lockkit_conformance::grants_in_order(&MemoryBackend::new())
        .await
        .unwrap();
}

/// Claims on one space of locks, each with a lease that outlasts the test.
async fn claim(backend: &MemoryBackend, owner: u128, mode: Mode) -> Box<dyn Claim> {
    let name = LockName::new("a").unwrap();
    let request = ClaimRequest::new(name, mode, 3_600 * SECOND, OwnerId::new(owner));
    backend.claim(&request).await.unwrap()
}

async fn granted(claim: &mut Box<dyn Claim>, patience: Duration) -> bool {
    claim.attempt(patience).await.unwrap().is_some()
}

#[tokio::test(start_paused = true)]
async fn memory_keeps_its_order_over_a_long_hold() {
    let backend = MemoryBackend::new();
    let mut claims = Vec::new();
    for owner in 1..=4 {
        claims.push(claim(&backend, owner, Mode::Exclusive).await);
    }
    let mut bystander = claim(&backend, 5, Mode::Exclusive).await;
    assert!(granted(&mut claims[0], MS).await);
    for waiter in &mut claims[1..] {
        assert!(!granted(waiter, MS).await);
    }
    for first in 0..3 {
        claims[first].release().await.unwrap();
        assert!(!granted(&mut bystander, Duration::ZERO).await);
        let others = first + 2..claims.len();
        for other in others {
            assert!(
                !granted(&mut claims[other], MS).await,
                "{other} overtook {}",
                first + 1
            );
        }
        assert!(granted(&mut claims[first + 1], MS).await);
        // No waiter is late: it is nobody's turn.
        tokio::time::advance(60 * SECOND).await;
    }
}

#[tokio::test(start_paused = true)]
async fn memory_keeps_a_writers_place_before_readers() {
    let backend = MemoryBackend::new();
    let mut reader = claim(&backend, 1, Mode::Shared).await;
    let mut writer = claim(&backend, 2, Mode::Exclusive).await;
    let mut late = claim(&backend, 3, Mode::Shared).await;
    assert!(granted(&mut reader, MS).await);
    assert!(!granted(&mut writer, MS).await);
    assert!(!granted(&mut late, MS).await);
    for _ in 0..5 {
        tokio::time::advance(60 * SECOND).await;
        assert!(
            !granted(&mut late, MS).await,
            "a reader passed a writer that waits"
        );
    }
    reader.release().await.unwrap();
    assert!(!granted(&mut late, MS).await);
    assert!(granted(&mut writer, MS).await);
}
