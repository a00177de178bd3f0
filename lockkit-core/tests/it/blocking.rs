//! The blocking API, on real time and the memory backend.

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireOptions, Error, LossReason, MemoryBackend,
    blocking::{Lock, LockClient},
    memory::FaultPoint,
};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn client() -> (MemoryBackend, LockClient) {
    let backend = MemoryBackend::new();
    let client = LockClient::new(backend.clone()).unwrap();
    (backend, client)
}

/// Waits for a condition that a background thread brings about.
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let give_up = Instant::now() + 60 * SECOND;
    while !condition() {
        assert!(Instant::now() < give_up, "never: {what}");
        thread::sleep(MS);
    }
}

fn is_free(observer: &LockClient, name: &str) -> bool {
    let state = observer.inspect(name).unwrap();
    state.is_free() && state.waiters == Some(0)
}

#[test]
fn an_exclusive_hold_becomes_a_shared_one() {
    let (_, client) = client();
    let lock = client.lock("a").unwrap();
    let reading = lock.acquire().unwrap().downgrade().unwrap();
    let beside = lock.shared().try_acquire().unwrap().unwrap();
    assert!(lock.try_acquire().unwrap().is_none());
    let refused = beside.downgrade().unwrap_err();
    assert!(matches!(refused.error, Error::Unsupported { .. }), "{refused}");
    assert!(refused.guard.unwrap().is_held() && reading.is_held());
    let guard = client.lock("b").unwrap().acquire().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let refused = runtime.block_on(async { guard.downgrade() }).unwrap_err();
    assert!(matches!(refused.error, Error::Backend { .. }), "{refused}");
    let guard = refused.guard.unwrap();
    assert!(guard.is_held());
    guard.downgrade().unwrap().release().unwrap();
}

#[test]
fn calls_do_what_their_async_likes_do() {
    let (_, client) = client();
    let client = client.with_defaults(AcquireOptions::new().label("me")).unwrap();
    let lock = client.lock("a").unwrap();
    let guard = lock.acquire().unwrap();
    assert!(guard.is_held() && guard.view().is_held());
    guard.check().unwrap();
    assert_eq!(guard.name().as_str(), "a");
    assert_eq!(lock.inspect().unwrap().holders[0].label.as_deref(), Some("me"));
    let until = guard.valid_until().unwrap();
    guard.renew().unwrap();
    assert!(guard.valid_until().unwrap() > until);
    assert!(lock.try_acquire().unwrap().is_none());
    assert!(lock.acquire_timeout(20 * MS).unwrap_err().is_timeout());
    let refused = lock.acquire_with(&AcquireOptions::new().ttl(Duration::ZERO));
    assert!(matches!(refused, Err(Error::InvalidOptions { .. })));
    assert_eq!(guard.lost_reason(), None);
    assert_eq!(guard.wait_lost(10 * MS).unwrap(), None);
    assert!(client.revoke_by_force("a", guard.token()).unwrap());
    assert_eq!(guard.wait_lost(60 * SECOND).unwrap(), Some(LossReason::Revoked));
    assert_eq!(guard.lost_reason(), Some(LossReason::Revoked));
    assert!(guard.check().unwrap_err().is_lost());
    assert!(guard.release().unwrap_err().is_lost());

    let (one, two) = (lock.shared().acquire().unwrap(), lock.shared().acquire().unwrap());
    assert!(lock.try_acquire().unwrap().is_none());
    one.release().unwrap();
    two.release().unwrap();
    let gpu = client.semaphore("gpu", 1).unwrap();
    let permit = gpu.acquire().unwrap();
    assert_eq!(client.inspect_semaphore("gpu").unwrap().holders.len(), 1);
    assert!(client.revoke_permit_by_force("gpu", permit.token()).unwrap());
    assert!(client.capabilities().shared && client.info().name == "memory");
}

#[test]
fn threads_take_turns_and_their_tokens_rise() {
    let (_, client) = client();
    let lock = client.lock("a").unwrap();
    let inside = AtomicU64::new(0);
    let last = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..25 {
                    lock.with_lock(|held| {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        assert!(last.swap(held.token().get(), Ordering::SeqCst) < held.token().get());
                        thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                    })
                    .unwrap();
                }
            });
        }
    });
    eventually("all is released", || is_free(&client, "a"));
}

#[test]
fn a_panic_in_the_body_releases_the_lock() {
    let (_, client) = client();
    let lock = client.lock("a").unwrap();
    let body = std::panic::AssertUnwindSafe(|| {
        lock.with_lock(|_| -> () { std::panic::resume_unwind(Box::new(())) })
    });
    assert!(std::panic::catch_unwind(body).is_err());
    lock.acquire_timeout(60 * SECOND).unwrap().release().unwrap();
}

#[test]
fn with_lock_tells_of_a_loss() {
    let (backend, client) = client();
    let lock = client.lock("a").unwrap();
    let outcome = lock.with_lock(|held| {
        assert!(backend.revoke("a"));
        eventually("the loss is noticed", || !held.is_held());
        "done"
    });
    let done = outcome.unwrap_err();
    assert!(done.error.is_lost());
    assert_eq!(done.output, Some("done"), "the work was done");
}

#[test]
fn the_lease_is_renewed_while_the_thread_is_busy_elsewhere() {
    let (_, client) = client();
    let lock = client
        .lock("a")
        .unwrap()
        .with_options(AcquireOptions::new().ttl(3 * SECOND));
    let guard = lock.acquire().unwrap();
    for _ in 0..2 {
        let end = guard.valid_until();
        eventually("the lease is extended", || guard.valid_until() > end);
    }
    guard.release().unwrap();
}

#[test]
fn within_an_async_runtime_every_blocking_call_is_an_error() {
    let (_, client) = client();
    let lock = client.lock("a").unwrap();
    let (one, two) = (lock.shared().acquire().unwrap(), lock.shared().acquire().unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let refused = [
            LockClient::new(MemoryBackend::new()).err(),
            lock.acquire().err(),
            lock.try_acquire().err(),
            lock.acquire_timeout(SECOND).err(),
            lock.with_lock(|_| ()).err().map(Error::from),
            lock.inspect().err(),
            client.inspect("a").err(),
            client.inspect_semaphore("a").err(),
            client.revoke_by_force("a", one.token()).err(),
            client.close(SECOND).err(),
            one.renew().err(),
            one.wait_lost(SECOND).err(),
            one.release().err(),
        ];
        for (n, err) in refused.into_iter().enumerate() {
            let err = err.unwrap_or_else(|| panic!("call {n} was let through"));
            assert!(
                matches!(err, Error::Backend { .. }) && !err.is_transient(),
                "{n}: {err}"
            );
        }
        drop(two);
    });
    eventually("both are released in the background", || is_free(&client, "a"));
    drop(runtime);
}

#[test]
fn handles_may_be_dropped_within_an_async_runtime() {
    let (backend, client) = client();
    let guard = client.lock("a").unwrap().acquire().unwrap();
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(async move {
            drop(client);
            drop(guard);
        });
    let observer = LockClient::new(backend).unwrap();
    eventually("it is released", || is_free(&observer, "a"));
}

#[test]
fn what_the_last_handle_leaves_behind_is_still_released() {
    let backend = MemoryBackend::new();
    let observer = LockClient::new(backend.clone()).unwrap();
    backend.fail_next(FaultPoint::Release, 3);
    let guard = {
        let client = LockClient::new(backend.clone()).unwrap();
        client.lock("a").unwrap().acquire().unwrap()
    };
    assert!(guard.is_held(), "a guard outlives its client");
    drop(guard);
    eventually("it is released after all", || is_free(&observer, "a"));
}

#[test]
fn the_background_thread_ends_with_the_last_handle() {
    /// Tells when the task that owns it is dropped, which is when its runtime ends.
    struct Ended(mpsc::Sender<()>);
    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    let (sender, ended) = mpsc::channel();
    let client = LockClient::connect_with(|| async {
        let ended = Ended(sender);
        tokio::spawn(async move {
            std::future::pending::<()>().await;
            drop(ended);
        });
        Ok(lockkit_core::LockClient::new(MemoryBackend::new()))
    })
    .unwrap();
    let lock: Lock = client.clone().lock("a").unwrap();
    let guard = lock.acquire().unwrap();
    let held = guard.view();
    drop((client, lock));
    assert!(ended.recv_timeout(50 * MS).is_err(), "a guard still needs it");
    drop(guard);
    ended.recv_timeout(60 * SECOND).unwrap();
    assert!(!held.is_held());
}

#[test]
fn a_failing_connect_is_answered() {
    let failed = LockClient::connect_with(|| async { Err(Error::transient("memory", "connect", "refused")) });
    assert!(failed.unwrap_err().is_transient());
}

#[test]
fn close_turns_blocked_threads_away_and_guards_know() {
    let (_, client) = client();
    let lock = client.lock("a").unwrap();
    let guard = lock.acquire().unwrap();
    let barrier = Arc::new(Barrier::new(2));
    let waiter = thread::spawn({
        let (lock, barrier) = (lock.clone(), barrier.clone());
        move || {
            barrier.wait();
            lock.acquire()
        }
    });
    barrier.wait();
    client.close(60 * SECOND).unwrap();
    assert!(matches!(waiter.join().unwrap(), Err(Error::Closed)));
    assert_eq!(guard.lost_reason(), Some(LossReason::Disconnected));
    assert!(matches!(lock.try_acquire(), Err(Error::Closed)));
    drop(client);
    drop(guard);
}
