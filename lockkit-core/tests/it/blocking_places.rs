//! The blocking API where threads may be held up and where not, and its sets and nested holds.

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireOptions, Error, LossReason, MemoryBackend, ReentrantOwner, Result,
    blocking::{Lock, LockClient, ReentrantLock, acquire_all, try_acquire_all},
    memory::FaultPoint,
};
use tokio::runtime::{Builder, Runtime};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn client() -> (MemoryBackend, LockClient) {
    let backend = MemoryBackend::new();
    let client = LockClient::new(backend.clone()).unwrap();
    (backend, client)
}

fn runtimes() -> [Runtime; 2] {
    let several = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    [
        Builder::new_current_thread().enable_all().build().unwrap(),
        several.unwrap(),
    ]
}

/// Blocks in every way there is, for a reply, for a holder and for a time.
fn session() -> Result<()> {
    let (backend, client) = client();
    // So that replies take a timer of the client's own runtime.
    backend.delay(FaultPoint::Attempt, MS);
    let (a, b) = (client.lock("a")?, client.lock("b")?);
    let guard = a.acquire()?;
    assert!(a.acquire_timeout(20 * MS).unwrap_err().is_timeout());
    let waiter = {
        let a = a.clone();
        thread::spawn(move || a.acquire()?.release())
    };
    assert_eq!(guard.wait_lost(5 * MS)?, None);
    guard.renew()?;
    guard.release()?;
    waiter.join().unwrap()?;
    acquire_all(&[&b, &a], &AcquireOptions::new())?.release()?;
    let nested = ReentrantLock::new(a);
    let owner = ReentrantOwner::new();
    let outer = nested.acquire(&owner)?;
    nested.acquire(&owner)?.release()?;
    outer.release()?;
    let election = client.election("jobs")?;
    let mut observer = election.observe();
    assert_eq!(observer.next().transpose()?, Some(None));
    let leadership = election.candidate("me")?.campaign()?;
    assert!(
        election
            .candidate("you")?
            .campaign_timeout(20 * MS)
            .unwrap_err()
            .is_timeout()
    );
    let seen = observer.next_timeout(60 * SECOND).transpose()?.flatten();
    assert_eq!(seen.map(|leader| leader.token), Some(leadership.token()));
    leadership.resign()?;
    assert!(client.inspect("a")?.is_free());
    client.close(60 * SECOND)
}

#[test]
fn it_works_wherever_a_thread_may_be_held_up() {
    session().unwrap();
    for runtime in runtimes() {
        // In the context of a runtime, and not in a task of it.
        let entered = runtime.enter();
        session().unwrap();
        drop(entered);
        runtime.block_on(async {
            tokio::task::spawn_blocking(session).await.unwrap().unwrap();
        });
    }
    let [_, several] = runtimes();
    several.block_on(async {
        tokio::task::block_in_place(session).unwrap();
        let in_a_task = tokio::spawn(async { tokio::task::block_in_place(session) });
        in_a_task.await.unwrap().unwrap();
    });
}

fn is_refused<T: std::fmt::Debug>(outcome: Result<T>) {
    let err = outcome.unwrap_err();
    assert!(
        matches!(err, Error::Backend { .. }) && !err.is_transient(),
        "{err}"
    );
    let source = std::error::Error::source(&err).unwrap().to_string();
    assert!(source.contains("spawn_blocking"), "it says what to do: {source}");
}

#[test]
fn it_is_refused_in_every_kind_of_async_task() {
    let (_, client) = client();
    let lock = client.lock("a").unwrap();
    for runtime in runtimes() {
        runtime.block_on(async {
            is_refused(lock.acquire());
            let spawned = lock.clone();
            tokio::spawn(async move {
                is_refused(spawned.acquire());
                // Also after what it has done so far has used up its budget, in part or all.
                for _ in 0..200 {
                    tokio::task::consume_budget().await;
                    is_refused(spawned.try_acquire());
                }
            })
            .await
            .unwrap();
            let local = tokio::task::LocalSet::new();
            let in_local = lock.clone();
            local
                .run_until(async move {
                    let task = tokio::task::spawn_local(async move { is_refused(in_local.acquire()) });
                    task.await.unwrap();
                })
                .await;
            tokio::join!(async { is_refused(lock.inspect()) }, tokio::task::yield_now());
        });
    }
    assert!(client.inspect("a").unwrap().is_free(), "nothing was asked for");
}

/// It cannot be told from a thread that may be held up.
#[test]
fn an_unconstrained_task_is_held_up_and_does_not_panic() {
    for runtime in runtimes() {
        let done = runtime.block_on(tokio::task::unconstrained(async { session() }));
        done.unwrap();
    }
}

/// A holder in a task of the same runtime, whose one thread is not the one that blocks.
#[test]
fn a_blocked_thread_holds_up_no_task() {
    let (backend, client) = client();
    let [one_thread, _] = runtimes();
    one_thread.block_on(async {
        let lock = lockkit_core::LockClient::new(backend).lock("a").unwrap();
        let guard = lock.acquire().await.unwrap();
        let waiter = tokio::task::spawn_blocking(move || client.lock("a")?.acquire()?.release());
        while lock.inspect().await.unwrap().waiters != Some(1) {
            assert!(!waiter.is_finished(), "it does not wait: {:?}", waiter.await);
            tokio::time::sleep(MS).await;
        }
        guard.release().await.unwrap();
        waiter.await.unwrap().unwrap();
    });
}

#[test]
fn a_set_spans_clients_and_is_all_or_nothing() {
    let ((backend, one), (_, two)) = (client(), client());
    let locks = [
        two.lock("a").unwrap(),
        one.lock("b").unwrap(),
        one.lock("a").unwrap(),
    ];
    let all: Vec<&Lock> = locks.iter().collect();
    let options = AcquireOptions::new();
    let set = try_acquire_all(&all, &options).unwrap().unwrap();
    let names: Vec<_> = set.guards().iter().map(|guard| guard.name().as_str()).collect();
    assert_eq!(names, ["a", "b", "a"], "in the order of their ids");
    set.check().unwrap();
    assert!(try_acquire_all(&all, &options).unwrap().is_none());
    let started = Instant::now();
    let late = acquire_all(&all, &options.clone().wait(30 * MS));
    assert!(late.unwrap_err().is_timeout() && started.elapsed() >= 30 * MS);
    assert_eq!(set.wait_lost(5 * MS).unwrap(), None);
    assert!(backend.revoke("b"));
    assert_eq!(set.wait_lost(60 * SECOND).unwrap(), Some(LossReason::Revoked));
    assert!(set.check().unwrap_err().is_lost());
    assert!(
        set.release().unwrap_err().is_lost(),
        "the others are released all the same"
    );
    for lock in &all {
        assert!(lock.inspect().unwrap().is_free(), "{lock:?}");
    }

    // The last handles of a client are in the set.
    let set = acquire_all(&all, &options).unwrap();
    drop((one, two, locks));
    assert_eq!(set.wait_lost(5 * MS).unwrap(), None);
    set.release().unwrap();

    let none = acquire_all(&[], &options).unwrap();
    assert_eq!(none.wait_lost(SECOND).unwrap(), None);
    none.release().unwrap();
    assert!(try_acquire_all(&[], &options).unwrap().is_some());
}

#[test]
fn an_outage_is_never_a_set_that_is_taken() {
    let (backend, client) = client();
    let (a, b) = (client.lock("a").unwrap(), client.lock("b").unwrap());
    backend.fail_next(FaultPoint::Attempt, 1);
    let outage = try_acquire_all(&[&a, &b], &AcquireOptions::new());
    assert!(outage.unwrap_err().is_transient());
    let twice = acquire_all(&[&a, &a.shared()], &AcquireOptions::new());
    assert!(matches!(twice, Err(Error::InvalidOptions { .. })));
}

#[test]
fn a_set_in_a_task_is_refused_and_then_released() {
    let (_, client) = client();
    let (a, b) = (client.lock("a").unwrap(), client.lock("b").unwrap());
    let set = acquire_all(&[&a, &b], &AcquireOptions::new()).unwrap();
    let owner = ReentrantOwner::new();
    let nested = ReentrantLock::new(client.lock("c").unwrap());
    let held = nested.acquire(&owner).unwrap();
    let [runtime, _] = runtimes();
    runtime.block_on(async {
        is_refused(acquire_all(&[&a, &b], &AcquireOptions::new()));
        is_refused(try_acquire_all(&[&a, &b], &AcquireOptions::new()));
        is_refused(set.wait_lost(SECOND));
        is_refused(set.release());
        is_refused(nested.acquire(&owner));
        is_refused(nested.try_acquire(&owner));
        is_refused(held.renew());
        is_refused(held.release());
    });
    for lock in [a, b, client.lock("c").unwrap()] {
        lock.acquire_timeout(60 * SECOND).unwrap().release().unwrap();
    }
}

#[test]
fn nested_holds_are_one_hold() {
    let (backend, client) = client();
    let lock = ReentrantLock::new(client.lock("a").unwrap());
    let (me, other) = (ReentrantOwner::new(), ReentrantOwner::new());
    let outer = lock.acquire(&me).unwrap();
    let inner = lock.try_acquire(&me).unwrap().unwrap();
    assert_eq!((outer.hold_count(), outer.token()), (2, inner.token()));
    assert!(lock.try_acquire(&other).unwrap().is_none());
    let busy = lock.acquire_with(&other, &AcquireOptions::new().wait(20 * MS));
    assert!(busy.unwrap_err().is_timeout());
    inner.release().unwrap();
    assert!(outer.is_held() && lock.inner().try_acquire().unwrap().is_none());

    let (granted, is_granted) = mpsc::channel();
    let waiter = thread::spawn({
        let lock = lock.clone();
        move || {
            let guard = lock.acquire(&other).unwrap();
            granted.send(()).unwrap();
            guard
        }
    });
    assert!(is_granted.recv_timeout(50 * MS).is_err(), "it is held");
    drop(outer);
    is_granted.recv_timeout(60 * SECOND).unwrap();
    let theirs = waiter.join().unwrap();
    assert!(backend.revoke("a"));
    assert_eq!(theirs.wait_lost(60 * SECOND).unwrap(), Some(LossReason::Revoked));
    assert!(lock.acquire(&other).unwrap_err().is_lost());
    assert!(theirs.release().unwrap_err().is_lost());
    assert!(lock.acquire(&other).is_ok());
}

#[test]
fn an_early_warning_needs_no_await() {
    let (backend, client) = client();
    let options = AcquireOptions::new().ttl(3 * SECOND);
    let guard = client.lock("a").unwrap().with_options(options).acquire().unwrap();
    assert_eq!(guard.renewal_failing(), None);
    backend.fail_next(FaultPoint::Renew, u32::MAX);
    let give_up = Instant::now() + 60 * SECOND;
    while guard.renewal_failing().is_none() {
        assert!(Instant::now() < give_up, "never warned");
        thread::sleep(MS);
    }
    assert!(guard.wait_lost(60 * SECOND).unwrap().is_some());
    assert_eq!(guard.renewal_failing(), Some(Duration::ZERO));
    #[cfg(unix)]
    assert!(guard.descriptor().unwrap().is_none());
    assert!(client.dead_holder_bound(SECOND) >= SECOND);
}

#[test]
fn a_hold_changes_clients_and_is_kept_where_none_may_block() {
    let (backend, here) = client();
    let there = LockClient::new(backend).unwrap();
    let guard = here.lock("a").unwrap().acquire().unwrap();
    let token = guard.token();
    let mut refused = None;
    for runtime in runtimes() {
        let guard = refused
            .take()
            .unwrap_or_else(|| here.lock("b").unwrap().acquire().unwrap());
        let err = runtime.block_on(async { guard.detach().unwrap_err() });
        assert!(
            matches!(err.error, Error::Backend { .. }) && err.guard.is_held(),
            "{err}"
        );
        refused = Some(err.guard);
    }
    let mut detached = guard.detach().unwrap();
    assert!(here.lock("a").unwrap().try_acquire().unwrap().is_none());
    for runtime in runtimes() {
        let adopted = runtime.block_on(async { there.adopt(&mut detached) });
        assert!(matches!(adopted, Err(Error::Backend { .. })), "{adopted:?}");
    }
    let adopted = there.adopt(&mut detached).unwrap();
    assert!(adopted.is_held() && adopted.token() == token);
    assert!(there.adopt(&mut detached).unwrap_err().is_lost());
    adopted.release().unwrap();
    assert!(here.lock("a").unwrap().try_acquire().unwrap().is_some());
}
