//! The memory backend in tests: what one leaves to the next.

use std::time::Duration;

use futures_util::FutureExt;
use lockkit_core::{AcquireOptions, Error, Lock, LockClient, MemoryBackend, spi::chain};
use tokio::runtime::{Builder, Runtime};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

fn runtime(start_paused: bool) -> Runtime {
    Builder::new_current_thread()
        .enable_all()
        .start_paused(start_paused)
        .build()
        .unwrap()
}

/// Returns the lock of this name as a program of its own would.
fn shared(name: &str) -> Lock {
    LockClient::new(MemoryBackend::shared("memory-tests"))
        .lock(name)
        .unwrap()
}

async fn is_free(lock: &Lock) -> bool {
    lock.try_acquire().await.unwrap().is_some()
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_is_dropped_frees_its_lock_at_once() {
    let backend = MemoryBackend::new();
    let lock = || LockClient::new(backend.clone()).lock("job").unwrap();
    let (one, two) = (lock(), lock());
    for is_adopted in [false, true] {
        let guard = one.acquire().await.unwrap();
        if is_adopted {
            // The worker adopts a hold 5 ms after its grant, and has its claim from then on.
            tokio::time::sleep(SECOND).await;
        }
        assert!(!is_free(&two).await);
        drop(guard);
        let inspected = two.inspect().await.unwrap();
        assert!(inspected.is_free(), "adopted: {is_adopted}: {inspected:?}");
        assert!(is_free(&two).await, "adopted: {is_adopted}");
    }
}

#[tokio::test]
async fn a_guard_that_is_dropped_passes_its_hold_on() {
    let lock = LockClient::new(MemoryBackend::new()).lock("job").unwrap();
    let guard = lock.acquire().await.unwrap();
    let mut next = Box::pin(lock.acquire());
    assert!((&mut next).now_or_never().is_none());
    drop(guard);
    assert!(lock.try_acquire().await.unwrap().is_none(), "it goes to the next");
    next.await.unwrap().release().await.unwrap();
}

#[test]
fn a_test_that_ends_leaves_no_lock_to_the_next() {
    let first = runtime(false);
    let kept = first.block_on(async {
        drop(shared("dropped").acquire().await.unwrap());
        let in_a_task = shared("in a task").acquire().await.unwrap();
        tokio::spawn(async move {
            std::future::pending::<()>().await;
            drop(in_a_task);
        });
        let waits = shared("in a task");
        tokio::spawn(async move { waits.acquire().await });
        tokio::task::yield_now().await;
        drop(shared("dropped last").acquire().await.unwrap());
        shared("kept").acquire().await.unwrap()
    });
    drop(first);
    assert!(!kept.is_held());
    runtime(false).block_on(async {
        for name in ["dropped", "in a task", "dropped last", "kept"] {
            assert!(is_free(&shared(name)).await, "{name}");
        }
    });
}

#[test]
fn a_test_on_paused_time_leaves_no_lease_to_the_next() {
    for next_is_paused in [true, false] {
        let first = runtime(true);
        let detached = first.block_on(async {
            let lock = shared("an hour").with_options(AcquireOptions::new().ttl(HOUR));
            tokio::time::advance(HOUR).await;
            let detached = lock.acquire().await.unwrap().detach().await.unwrap();
            assert!(
                !is_free(&shared("an hour")).await,
                "one space for the clients of a runtime"
            );
            detached
        });
        drop(first);
        runtime(next_is_paused).block_on(async {
            assert!(
                is_free(&shared("an hour")).await,
                "next is paused: {next_is_paused}"
            );
        });
        drop(detached);
    }
}

#[test]
fn real_and_paused_time_never_share_a_space() {
    let (real, paused) = (runtime(false), runtime(true));
    let (of_real, of_paused) = (
        real.block_on(async { shared("clocks") }),
        paused.block_on(async { shared("clocks") }),
    );
    assert_ne!(of_real.id(), of_paused.id(), "two locks of two names");
    let held = real.block_on(of_real.acquire()).unwrap();
    assert!(paused.block_on(is_free(&of_paused)));
    assert!(!real.block_on(is_free(&of_real)));
    held.check().unwrap();
    drop(held);
    // Each stays on its clock.
    for (here, elsewhere) in [(&real, &of_paused), (&paused, &of_real)] {
        let refused = here.block_on(elsewhere.acquire_timeout(SECOND)).unwrap_err();
        let is_permanent = matches!(refused, Error::Backend { transient: false, .. });
        assert!(is_permanent && chain(&refused).contains("clock"), "{refused:?}");
        // To look would end what is over by that clock.
        here.block_on(elsewhere.inspect()).unwrap_err();
    }
}

#[tokio::test]
async fn who_pauses_time_after_connecting_is_refused() {
    let lock = shared("paused later");
    assert!(is_free(&lock).await);
    tokio::time::pause();
    let refused = lock.try_acquire().await.unwrap_err();
    assert!(
        chain(&refused).contains("pause time before you connect"),
        "{refused:?}"
    );
    assert!(
        is_free(&shared("paused later")).await,
        "a client from then on has another space"
    );
}

/// Also one whose list was begun where the clock is right.
#[test]
fn who_is_on_another_clock_may_not_list_either() {
    let (real, paused) = (runtime(false), runtime(true));
    let client = || LockClient::new(MemoryBackend::shared("listed"));
    let (of_real, of_paused) = (
        real.block_on(async { client() }),
        paused.block_on(async { client() }),
    );
    for (there, here, elsewhere) in [(&real, &paused, &of_real), (&paused, &real, &of_paused)] {
        let lock = elsewhere.lock("held").unwrap();
        let _held = there.block_on(lock.acquire()).unwrap();
        let begin = || elsewhere.list("");
        let refused = here.block_on(async { begin() }).err();
        assert!(refused.is_some_and(|err| chain(&err).contains("clock")));
        let mut listing = there.block_on(async { begin() }).unwrap();
        let refused = here.block_on(listing.next()).unwrap().unwrap_err();
        assert!(chain(&refused).contains("clock"), "{refused:?}");
        let mut whole = there.block_on(async { begin() }).unwrap();
        assert!(there.block_on(whole.next()).unwrap().is_ok());
        let token = there.block_on(lock.inspect()).unwrap().holders[0].token;
        for refused in [
            here.block_on(elsewhere.revoke_by_force("held", token)).map(drop),
            here.block_on(elsewhere.revoke("held", token, SECOND)).map(drop),
        ] {
            assert!(chain(&refused.unwrap_err()).contains("clock"));
        }
    }
}

/// Its own clock stands still, or leaps, beside those of the others.
#[tokio::test]
async fn who_pauses_time_half_way_is_neither_granted_nor_renewed() {
    let renewed = shared("renewed").acquire().await.unwrap();
    let here = shared("paused half-way");
    let mut waiting = Box::pin(here.acquire());
    let (go_on, goes_on) = std::sync::mpsc::channel();
    let (is_held, held) = std::sync::mpsc::channel();
    let elsewhere = std::thread::spawn(move || {
        runtime(false).block_on(async {
            let guard = shared("paused half-way").acquire().await.unwrap();
            is_held.send(()).unwrap();
            goes_on.recv().unwrap();
            guard.release().await.unwrap();
        });
    });
    held.recv().unwrap();
    assert!((&mut waiting).now_or_never().is_none());
    tokio::time::pause();
    let refused = renewed.renew().await;
    go_on.send(()).unwrap();
    elsewhere.join().unwrap();
    for refused in [refused, waiting.await.map(drop)] {
        let refused = refused.unwrap_err();
        let is_permanent = matches!(refused, Error::Backend { transient: false, .. });
        assert!(is_permanent && chain(&refused).contains("clock"), "{refused:?}");
    }
    drop(renewed);
    let state = here.inspect().await;
    assert!(state.is_err(), "{state:?}");
}
