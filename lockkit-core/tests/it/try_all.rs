//! All of several locks now, or none.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use lockkit_core::{
    AcquireOptions, Error, Instant, Lock, LockClient, MemoryBackend, memory::FaultPoint, try_acquire_all,
};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn world() -> (MemoryBackend, LockClient, [Lock; 3]) {
    let backend = MemoryBackend::new();
    let client = LockClient::new(backend.clone());
    let locks = ["a", "b", "c"].map(|name| client.lock(name).unwrap());
    (backend, client, locks)
}

async fn are_free(client: &LockClient, names: &[&str]) -> bool {
    for name in names {
        let state = client.inspect(name).await.unwrap();
        if !state.is_free() || state.waiters != Some(0) {
            return false;
        }
    }
    true
}

#[tokio::test(start_paused = true)]
async fn all_of_them_now_or_none() {
    let (backend, client, [a, b, c]) = world();
    let options = AcquireOptions::new();
    let set = try_acquire_all(&[&c, &a, &b], &options).await.unwrap().unwrap();
    let names: Vec<_> = set.guards().iter().map(|g| g.name().to_string()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    set.release().await.unwrap();
    let none: [&Lock; 0] = [];
    assert!(try_acquire_all(&none, &options).await.unwrap().is_some());

    // Taken by another client, by this one, and in shared mode.
    let elsewhere = LockClient::new(backend).lock("c").unwrap();
    for in_the_way in [&elsewhere, &c, &c.shared()] {
        let guard = in_the_way.acquire().await.unwrap();
        // No `wait` counts.
        for options in [options.clone(), options.clone().wait(SECOND)] {
            let started = Instant::now();
            let set = try_acquire_all(&[&a, &b, &c], &options).await.unwrap();
            assert!(set.is_none());
            assert_eq!(started.elapsed(), Duration::ZERO, "it does not wait");
            assert!(are_free(&client, &["a", "b"]).await, "nothing stays held");
        }
        let own_wait = [&a, &b, &c].map(|lock| lock.with_options(AcquireOptions::new().wait(SECOND)));
        let started = Instant::now();
        let set = try_acquire_all(&own_wait.each_ref(), &options).await.unwrap();
        assert!(set.is_none() && started.elapsed() == Duration::ZERO);
        guard.release().await.unwrap();
    }
    assert!(try_acquire_all(&[&a, &b, &c], &options).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn cannot_tell_is_an_error_and_not_none() {
    let (backend, client, [a, b, c]) = world();
    let options = AcquireOptions::new();
    let twice = try_acquire_all(&[&a, &b, &a], &options).await.unwrap_err();
    assert!(matches!(twice, Error::InvalidOptions { .. }), "{twice}");

    let in_the_way = c.acquire().await.unwrap();
    backend.fail_next(FaultPoint::Attempt, 1);
    let outage = try_acquire_all(&[&a, &b, &c], &options).await.unwrap_err();
    assert!(outage.is_transient(), "{outage}");
    assert!(are_free(&client, &["a", "b"]).await);

    // The reply to the second attempt is lost: b may be held, and is given back.
    backend.delay(FaultPoint::Attempt, 10 * MS);
    let second = async {
        tokio::time::sleep(5 * MS).await;
        backend.lose_replies(FaultPoint::Attempt, 2);
    };
    let locks = [&a, &b, &c];
    let (outcome, ()) = tokio::join!(try_acquire_all(&locks, &options), second);
    let unknown = outcome.unwrap_err();
    assert!(unknown.is_transient(), "{unknown}");
    tokio::time::sleep(SECOND).await;
    assert!(are_free(&client, &["a", "b"]).await);
    in_the_way.release().await.unwrap();
}

/// However slow the server is to take the locks back, the caller is told, and the background goes on.
#[tokio::test(start_paused = true)]
async fn a_slow_release_holds_nobody_up() {
    let (backend, client, [a, b, c]) = world();
    let in_the_way = c.acquire().await.unwrap();
    backend.delay(FaultPoint::Release, 3 * SECOND);
    let started = Instant::now();
    let set = try_acquire_all(&[&a, &b, &c], &AcquireOptions::new()).await;
    assert!(set.unwrap().is_none());
    assert!(started.elapsed() <= 100 * MS, "{:?}", started.elapsed());
    tokio::time::sleep(4 * SECOND).await;
    assert!(are_free(&client, &["a", "b"]).await);
    drop(in_the_way);
}

/// Whoever gets the first of the names in common gets the others as well, or somebody ahead of him does.
#[tokio::test]
async fn of_several_who_try_at_once_one_succeeds() {
    let backend = MemoryBackend::new();
    for _ in 0..50 {
        let succeeded = AtomicUsize::new(0);
        let contenders = (0..8).map(|n| {
            let (client, succeeded) = (LockClient::new(backend.clone()), &succeeded);
            async move {
                let mut locks = ["a", "b", "c"].map(|name| client.lock(name).unwrap());
                locks.rotate_left(n % 3);
                let set = try_acquire_all(&locks.each_ref(), &AcquireOptions::new()).await;
                let set = set.unwrap();
                if set.is_some() {
                    succeeded.fetch_add(1, Ordering::Relaxed);
                }
                // Held until all have tried.
                set
            }
        });
        let sets = futures_util::future::join_all(contenders).await;
        assert_eq!(succeeded.load(Ordering::Relaxed), 1);
        for set in sets.into_iter().flatten() {
            set.release().await.unwrap();
        }
    }
}
