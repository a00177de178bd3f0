//! Grants, wake-ups and the ends of holds, as the driver sees them.

use std::{
    fs,
    future::Future,
    num::NonZeroU32,
    pin::pin,
    process::Command,
    task::{Context, Poll, Waker},
    time::Duration,
};

use lockkit_core::{
    AcquireOptions, LockClient, LockKind, LossReason,
    spi::{Backend, Mode, Renewal},
};
use lockkit_file::{FileBackend, FileConfig};
use lockkit_testbed::{eventually, poll_at_most};
use rustix::process::Pid;
use tempfile::TempDir;

use crate::fixture::{
    Killed, LIMIT, Orphan, PATIENCE, TRY, claim, files, granted, held_and_waited_for, looks, name, open,
    other, permits, request,
};

/// Polls on a thread that has no runtime, as another executor would.
fn outside<F: Future + Send>(future: F) -> F::Output
where
    F::Output: Send,
{
    std::thread::scope(|scope| {
        let polling = scope.spawn(|| {
            let mut future = pin!(future);
            let mut cx = Context::from_waker(Waker::noop());
            loop {
                if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
                    return output;
                }
                std::thread::yield_now();
            }
        });
        polling.join().expect("no panic outside of a runtime")
    })
}

#[test]
fn outside_of_a_runtime_everything_is_an_error() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let dir = TempDir::new().unwrap();
    let backend = runtime.block_on(open(dir.path()));
    let client = runtime.block_on(async { LockClient::new(backend) });
    let lock = client.lock("a").unwrap();
    assert!(outside(lock.acquire()).is_err());
    assert!(outside(lock.try_acquire()).is_err());
    assert!(outside(lock.shared().acquire()).is_err());
    assert!(outside(client.semaphore("a", 1).unwrap().acquire()).is_err());
    assert!(outside(client.inspect("a")).is_err());
}

#[tokio::test]
async fn one_holds_and_the_tokens_rise() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let (mut first, mut second) = (
        claim(&a, "n", Mode::Exclusive).await,
        claim(&b, "n", Mode::Exclusive).await,
    );
    let mut last = 0;
    for _ in 0..10 {
        let grant = first.attempt(TRY).await.unwrap().unwrap();
        assert!(*grant.tokens.start() > last, "{grant:?} after {last}");
        last = *grant.tokens.end();
        assert_eq!(second.attempt(TRY).await.unwrap(), None);
        assert!(matches!(first.renew().await.unwrap(), Renewal::Held(lease) if lease.length.is_none()));
        first.release().await.unwrap();
        first.release().await.unwrap();
        std::mem::swap(&mut first, &mut second);
    }
}

#[tokio::test]
async fn as_many_tokens_are_reserved_as_are_asked_for() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut request = request("n", Mode::Exclusive);
    request.tokens = NonZeroU32::new(33).unwrap();
    let mut claim = backend.claim(&request).await.unwrap();
    let first = claim.attempt(TRY).await.unwrap().unwrap().tokens;
    assert_eq!(first.clone().count(), 33);
    claim.release().await.unwrap();
    let second = claim.attempt(TRY).await.unwrap().unwrap().tokens;
    assert_eq!(*second.start(), *first.end() + 1);
}

#[tokio::test]
async fn names_kinds_and_namespaces_are_apart() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let mut config = FileConfig::new(dir.path());
    config.namespace = String::new();
    let elsewhere = FileBackend::open(config).await.unwrap();
    let names = [
        "n", "N", "/", "\0", "..", ".", "%2e", "n.lock", "é", "e\u{301}", "🔒",
    ];
    let long = ["a".repeat(1_024), "b".repeat(1_024), "A".repeat(1_024)];
    let mut held = Vec::new();
    for name in names.into_iter().chain(long.iter().map(String::as_str)) {
        for backend in [&backend, &elsewhere] {
            for mode in [Mode::Exclusive, permits(1)] {
                let mut claim = claim(backend, name, mode).await;
                assert!(claim.attempt(TRY).await.unwrap().is_some(), "{name:?} {mode:?}");
                held.push(claim);
            }
        }
    }
    let mut again = claim(&backend, &long[0], Mode::Exclusive).await;
    assert_eq!(
        again.attempt(TRY).await.unwrap(),
        None,
        "a long name still excludes itself"
    );
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_release_wakes_a_waiter() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    assert!(b.info().capabilities.notified);
    for mode in [Mode::Exclusive, Mode::Shared, permits(1)] {
        let holds = if mode == Mode::Shared {
            Mode::Exclusive
        } else {
            mode
        };
        let mut holder = claim(&a, "n", holds).await;
        granted(&mut holder).await;
        let mut waiter = claim(&b, "n", mode).await;
        // There is nothing left but to be told.
        looks(&mut waiter).await;
        let ((), woken) = tokio::join!(
            async {
                holder.release().await.unwrap();
            },
            granted(&mut waiter)
        );
        assert!(*woken.tokens.start() > 0);
    }
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn an_event_is_remembered_until_the_next_attempt() {
    let dir = TempDir::new().unwrap();
    let (_backend, [mut holder, mut waiter]) = held_and_waited_for(dir.path(), Mode::Exclusive).await;
    holder.release().await.unwrap();
    for _ in 0..10 {
        tokio::time::timeout(LIMIT, waiter.notified()).await.unwrap();
    }
    assert!(waiter.attempt(PATIENCE).await.unwrap().is_some());
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_waiter_retries_soon_after_an_event_and_then_no_more() {
    let dir = TempDir::new().unwrap();
    let (_backend, [_holder, mut waiter]) = held_and_waited_for(dir.path(), Mode::Exclusive).await;
    let lock = dir.path().join("lockkit/n.lock");
    for _ in 0..2 {
        let looks = looks(&mut waiter).await;
        assert!((10..16).contains(&looks), "{looks}");
        // Other wake-ups, for minutes.
        for _ in 0..100 {
            assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
        }
        // As when a killed holder's descriptor is closed before its lock is gone.
        drop(fs::File::options().write(true).open(&lock).unwrap());
    }
}

#[tokio::test]
async fn a_killed_holder_lets_the_waiter_in_and_is_not_shown() {
    for (role, mode, kind) in [
        ("hold", Mode::Exclusive, LockKind::Lock),
        ("share", Mode::Exclusive, LockKind::Lock),
        ("permit", permits(1), LockKind::Semaphore),
    ] {
        let dir = TempDir::new().unwrap();
        let (mut process, _) = other(role, dir.path());
        let backend = open(dir.path()).await;
        let mut waiter = claim(&backend, "n", mode).await;
        assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None, "{role}");
        assert_eq!(
            backend.inspect(&name("n"), kind).await.unwrap().holders.len(),
            1,
            "{role}"
        );
        let ((), grant) = tokio::join!(async { process.kill() }, granted(&mut waiter));
        let holders = backend.inspect(&name("n"), kind).await.unwrap().holders;
        assert_eq!(holders.len(), 1, "{role}: only the new one");
        assert_eq!(holders[0].token.get(), *grant.tokens.start());
        waiter.release().await.unwrap();
        assert!(
            backend.inspect(&name("n"), kind).await.unwrap().is_free(),
            "{role}"
        );
        let left: Vec<_> = files(dir.path())
            .into_iter()
            .filter(|path| {
                path.parent()
                    .unwrap()
                    .extension()
                    .is_some_and(|kind| kind == "readers")
            })
            .collect();
        assert!(left.is_empty(), "a killed reader's file is removed: {left:?}");
    }
}

#[tokio::test]
async fn a_killed_holder_that_nobody_follows_is_not_shown() {
    let dir = TempDir::new().unwrap();
    let (mut process, _) = other("hold", dir.path());
    let backend = open(dir.path()).await;
    assert!(
        !backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
    process.kill();
    assert!(
        backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
}

#[tokio::test]
async fn a_release_frees_a_lock_whose_descriptor_a_child_has() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let mut holder = claim(&a, "n", Mode::Exclusive).await;
    granted(&mut holder).await;
    let descriptor = holder.descriptor().unwrap();
    let mut child = Killed(
        Command::new("sleep")
            .arg("600")
            .stdin(descriptor)
            .spawn()
            .unwrap(),
    );
    let mut waiter = claim(&b, "n", Mode::Exclusive).await;
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    holder.release().await.unwrap();
    assert!(holder.descriptor().is_none());
    granted(&mut waiter).await;
    assert!(child.0.try_wait().unwrap().is_none(), "the child still runs");
}

#[tokio::test]
async fn a_child_keeps_the_lock_of_its_killed_parent() {
    for (role, mode) in [
        ("hold with a child", Mode::Exclusive),
        ("share with a child", Mode::Exclusive),
        ("permit with a child", permits(1)),
    ] {
        let dir = TempDir::new().unwrap();
        let (mut process, child) = other(role, dir.path());
        let mut child = Orphan(Pid::from_raw(child.parse().unwrap()));
        process.kill();
        let backend = open(dir.path()).await;
        let mut waiter = claim(&backend, "n", mode).await;
        assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
        assert!(!backend.inspect(&name("n"), mode.kind()).await.unwrap().is_free());
        if cfg!(target_os = "linux") {
            // After this, only an event wakes it.
            looks(&mut waiter).await;
        }
        child.kill();
        let wait = tokio::time::timeout(LIMIT, granted(&mut waiter));
        assert!(wait.await.is_ok(), "{role}: woken by the child's end");
    }
}

/// It has no lease that could expire.
#[tokio::test]
async fn a_hold_ends_with_its_runtime_although_its_guard_is_kept() {
    let dir = TempDir::new().unwrap();
    let first = tokio::runtime::Runtime::new().unwrap();
    let at = dir.path().to_owned();
    let acquired = first.spawn(async move {
        let guard = LockClient::new(open(&at).await)
            .lock("n")
            .unwrap()
            .acquire()
            .await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        guard.unwrap()
    });
    let guard = acquired.await.unwrap();
    first.shutdown_background();
    assert_eq!(guard.lost().await, LossReason::Disconnected);
    let mut next = claim(&open(dir.path()).await, "n", Mode::Exclusive).await;
    granted(&mut next).await;
    drop(guard);
    assert!(matches!(next.renew().await.unwrap(), Renewal::Held(_)));
}

/// The acquisition was polled while nobody held the lock, and then no more.
#[tokio::test]
async fn a_grant_that_nobody_takes_expires() {
    let dir = TempDir::new().unwrap();
    let (one, two) = (
        LockClient::new(open(dir.path()).await),
        LockClient::new(open(dir.path()).await),
    );
    let options = AcquireOptions::new().ttl(Duration::from_millis(300));
    for wait in [LIMIT, 2 * LIMIT] {
        // The first grant of a name waits for the disk, unless that is faster than a poll.
        let mut names = 0..1_000;
        let (forgotten, two) = loop {
            let name = format!(
                "{wait:?}-{}",
                names.next().expect("a grant that waits for the disk")
            );
            let [one, two] =
                [&one, &two].map(|client| client.lock(&name).unwrap().with_options(options.clone()));
            let mut forgotten = Box::pin(async move { one.acquire_timeout(wait).await });
            match poll_at_most(1, &mut forgotten).await {
                None => break (forgotten, two),
                Some(granted) => granted.unwrap().release().await.unwrap(),
            }
        };
        // It is granted by then.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let guard = two.acquire_timeout(LIMIT).await.unwrap();
        guard.release().await.unwrap();
        let guard = forgotten.await.unwrap();
        assert!(guard.is_held());
        assert!(two.try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn an_attempt_dropped_at_any_poll_leaves_nothing_locked() {
    for mode in [Mode::Exclusive, Mode::Shared, permits(1)] {
        // An attempt may be faster than a poll.
        let mut rounds = 0..100;
        while dropped_at_each_poll(mode).await == 0 {
            rounds.next().expect("an attempt that was dropped half-way");
        }
    }
}

/// Returns how many attempts of a round were dropped half-way.
async fn dropped_at_each_poll(mode: Mode) -> usize {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let rival = if mode == Mode::Shared {
        Mode::Exclusive
    } else {
        mode
    };
    let mut dropped = 0;
    for polls in 1..10 {
        for patience in [TRY, PATIENCE] {
            let mut cancelled = claim(&a, "n", mode).await;
            let outcome = poll_at_most(polls, cancelled.attempt(patience)).await;
            dropped += usize::from(outcome.is_none());
            cancelled.release().await.unwrap();
            let mut next = claim(&b, "n", rival).await;
            assert!(
                next.attempt(TRY).await.unwrap().is_some(),
                "{mode:?} at poll {polls}"
            );
            next.release().await.unwrap();

            // A name of its own, as nothing waits for its worker.
            let own = format!("{polls}-{patience:?}");
            let mut abandoned = claim(&a, &own, mode).await;
            let mut other = claim(&b, &own, rival).await;
            poll_at_most(polls, abandoned.attempt(patience)).await;
            drop(abandoned);
            eventually("freed", async || other.attempt(TRY).await.unwrap().is_some()).await;

            let mut resumed = claim(&a, "n", mode).await;
            poll_at_most(polls, resumed.attempt(patience)).await;
            assert!(
                resumed.attempt(patience).await.unwrap().is_some(),
                "the same claim resumes"
            );
            poll_at_most(polls, resumed.renew()).await;
            poll_at_most(polls, resumed.release()).await;
            resumed.release().await.unwrap();
            assert!(
                next.attempt(TRY).await.unwrap().is_some(),
                "{mode:?} at poll {polls}"
            );
            next.release().await.unwrap();
        }
    }
    dropped
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_take_turns_on_an_unprotected_counter() {
    let dir = TempDir::new().unwrap();
    let counter = dir.path().join("counter");
    fs::write(&counter, "0").unwrap();
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let client = LockClient::new(FileBackend::open(FileConfig::new(dir.path())).await.unwrap());
        for _ in 0..2 {
            let (client, counter) = (client.clone(), counter.clone());
            tasks.push(tokio::spawn(async move {
                let lock = client.lock("n").unwrap();
                let mut tokens = Vec::new();
                for _ in 0..25 {
                    let guard = lock.acquire().await.unwrap();
                    let seen: u32 = fs::read_to_string(&counter).unwrap().parse().unwrap();
                    tokio::task::yield_now().await;
                    fs::write(&counter, (seen + 1).to_string()).unwrap();
                    tokens.push(guard.token());
                    guard.release().await.unwrap();
                }
                assert!(tokens.is_sorted_by(|a, b| a < b));
                tokens
            }));
        }
    }
    let mut tokens = Vec::new();
    for task in tasks {
        tokens.extend(tokio::time::timeout(LIMIT, task).await.unwrap().unwrap());
    }
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 200, "no token twice");
    assert_eq!(fs::read_to_string(&counter).unwrap(), "200");
}
