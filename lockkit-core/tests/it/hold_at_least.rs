//! Holds that outlast their release, on paused time.

use std::{future::poll_fn, pin::pin, sync::atomic::Ordering, task::Poll, time::Duration};

use futures_util::future::join;
use lockkit_core::{
    AcquireOptions, DetachedHold, Error, Instant, Lock, LockClient, MemoryBackend, Revocation, acquire_all,
    memory::FaultPoint,
    spi::{Lease, chain},
};
use tokio::time::{sleep, sleep_until, timeout};

use crate::{cancel::cancel_after, probe::Probe};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(9);
const LEAST: Duration = Duration::from_secs(60);

fn lock_of(client: &LockClient) -> Lock {
    let options = AcquireOptions::new().ttl(TTL).hold_at_least(LEAST);
    client.lock("a").unwrap().with_options(options)
}

/// A job's lock, the lock of another host, and the server.
fn hosts() -> (Lock, Lock, MemoryBackend) {
    let memory = MemoryBackend::new();
    let [one, other] = [(); 2].map(|()| lock_of(&LockClient::new(memory.clone())));
    (one, other, memory)
}

/// Checks that the lock comes free at this time, and not before.
async fn comes_free(other: &Lock, at: Instant) {
    while Instant::now() + 10 * MS < at {
        assert!(
            other.try_acquire().await.unwrap().is_none(),
            "{:?} too early",
            at - Instant::now()
        );
        sleep((at - Instant::now()) / 2).await;
    }
    sleep_until(at + 50 * MS).await;
    assert!(other.try_acquire().await.unwrap().is_some(), "too late");
}

#[tokio::test(start_paused = true)]
async fn who_releases_early_leaves_it_taken() {
    for after in [Duration::ZERO, SECOND, TTL * 2, LEAST.saturating_sub(MS)] {
        let (one, other, _) = hosts();
        let guard = one.acquire().await.unwrap();
        let granted = Instant::now();
        tokio::time::sleep(after).await;
        guard.release().await.unwrap();
        comes_free(&other, granted + LEAST).await;
    }
}

#[tokio::test(start_paused = true)]
async fn who_releases_late_frees_it() {
    let (one, other, _) = hosts();
    let guard = one.acquire().await.unwrap();
    tokio::time::sleep(LEAST).await;
    guard.release().await.unwrap();
    assert!(other.try_acquire().await.unwrap().is_some());
}

#[derive(Clone, Copy, Debug)]
enum Close {
    Never,
    AfterTheDrop,
    /// A service shuts down so while one of its tasks is at work.
    UnderTheGuard,
}

#[tokio::test(start_paused = true)]
async fn a_dropped_guard_and_a_closed_client_leave_it_taken() {
    for close in [Close::Never, Close::AfterTheDrop, Close::UnderTheGuard] {
        let memory = MemoryBackend::new();
        let client = LockClient::new(memory.clone());
        let guard = lock_of(&client).acquire().await.unwrap();
        let granted = Instant::now();
        if matches!(close, Close::UnderTheGuard) {
            client.close(SECOND).await.unwrap();
            assert!(guard.check().is_err());
        }
        drop(guard);
        if matches!(close, Close::AfterTheDrop) {
            client.close(SECOND).await.unwrap();
        }
        comes_free(&lock_of(&LockClient::new(memory)), granted + LEAST).await;
    }
}

/// Between the exclusive hold and the shared one it is nobody's, and may end at any moment.
#[tokio::test(start_paused = true)]
async fn a_downgrade_dropped_at_any_poll_leaves_it_taken() {
    for polls in 1.. {
        let (one, other, memory) = hosts();
        memory.delay(FaultPoint::Downgrade, SECOND);
        let guard = one.acquire().await.unwrap();
        let granted = Instant::now();
        let whole = cancel_after(polls, guard.downgrade()).await;
        let is_whole = whole.is_some();
        drop(whole);
        comes_free(&other, granted + LEAST).await;
        if is_whole {
            assert!(polls > 1, "it was never dropped half-way");
            return;
        }
    }
}

/// The server may have it in either mode, and keeps it for as long as it is asked again.
#[tokio::test(start_paused = true)]
async fn a_downgrade_that_is_lost_prolongs_nothing() {
    for takes_effect in [true, false] {
        let (one, other, memory) = hosts();
        let guard = one.acquire().await.unwrap();
        let granted = Instant::now();
        if takes_effect {
            memory.lose_replies(FaultPoint::Downgrade, u32::MAX);
        } else {
            memory.fail_next(FaultPoint::Downgrade, u32::MAX);
        }
        let over = guard.downgrade().await.unwrap_err();
        assert!(over.guard.is_none() && over.error.is_lost(), "{over:?}");
        let next = other.acquire_timeout(2 * TTL).await;
        drop(next.unwrap_or_else(|err| panic!("takes effect: {takes_effect}: {err}")));
        let took = granted.elapsed();
        assert!(
            took < 2 * TTL,
            "free after {took:?}, and it was lost after {TTL:?}"
        );
    }
}

/// A client that shuts down at the wrong second: what is refused may be allowed again before its time is over.
#[tokio::test(start_paused = true)]
async fn a_close_while_the_server_refuses_leaves_it_taken() {
    for is_allowed_again in [true, false] {
        let probe = Probe::default();
        let client = LockClient::new(probe.clone());
        let guard = lock_of(&client).acquire().await.unwrap();
        let granted = Instant::now();
        probe.refuses.store(true, Ordering::SeqCst);
        let allow = async {
            sleep(SECOND).await;
            probe.refuses.store(!is_allowed_again, Ordering::SeqCst);
        };
        drop(guard);
        let (closed, ()) = tokio::join!(client.close(3 * SECOND), allow);
        assert_eq!(closed.is_ok(), is_allowed_again, "{closed:?}");
        let took = granted.elapsed();
        assert!(took < 4 * SECOND, "{took:?}");
        let other = lock_of(&LockClient::new(probe.memory.clone()));
        let until = if is_allowed_again { LEAST } else { TTL };
        comes_free(&other, granted + until).await;
    }
}

/// A request of before may be on its way, and then the server cuts what it has just confirmed.
#[tokio::test(start_paused = true)]
async fn a_rest_that_may_be_cut_short_is_not_confirmed() {
    let probe = Probe {
        renewed_for: Lease::of_ttl(Instant::now(), LEAST.saturating_sub(SECOND / 2)).length,
        ..Probe::default()
    };
    let guard = lock_of(&LockClient::new(probe.clone())).acquire().await.unwrap();
    let error = guard.release().await.unwrap_err();
    assert!(chain(&error).contains("has not confirmed"), "{error:?}");
    // Until the rest is no longer than that, it is asked for again.
    let before = probe.counts.calls().1;
    sleep(SECOND).await;
    let after = probe.counts.calls().1;
    assert!(after > before, "it is not asked for again");
    sleep(SECOND).await;
    assert_eq!(probe.counts.calls().1, after, "it was confirmed by then");
}

#[tokio::test(start_paused = true)]
async fn a_release_dropped_at_any_poll_leaves_it_taken() {
    for polls in 0.. {
        let (one, other, memory) = hosts();
        memory.delay(FaultPoint::Renew, SECOND);
        let guard = one.acquire().await.unwrap();
        let granted = Instant::now();
        let mut left = polls;
        let whole = {
            let mut release = pin!(guard.release());
            poll_fn(|cx| match release.as_mut().poll(cx) {
                Poll::Ready(released) => Poll::Ready(Some(released)),
                Poll::Pending if left == 0 => Poll::Ready(None),
                Poll::Pending => {
                    left -= 1;
                    Poll::Pending
                }
            })
            .await
        };
        comes_free(&other, granted + LEAST).await;
        if let Some(released) = whole {
            released.unwrap();
            assert!(polls > 0, "it was never dropped half-way");
            return;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_fails_is_repeated_and_leaves_it_taken() {
    let (one, other, memory) = hosts();
    let guard = one.acquire().await.unwrap();
    let granted = Instant::now();
    memory.fail_next(FaultPoint::Renew, 2);
    assert!(guard.release().await.unwrap_err().is_transient());
    comes_free(&other, granted + LEAST).await;
}

/// Whoever has an earlier renewal under way cannot tell how long the server will keep the rest: the late one leaves it to the ttl.
#[tokio::test(start_paused = true)]
async fn what_a_late_renewal_may_shorten_is_asked_again_in_time() {
    for (first, ttl) in [
        (100 * MS, 100 * MS),
        (SECOND, SECOND),
        (TTL, TTL),
        (TTL, 100 * MS),
    ] {
        let probe = Probe {
            renewed_for: Some(ttl),
            ..Probe::default()
        };
        let client = LockClient::new(probe.clone());
        let options = AcquireOptions::new().ttl(first).hold_at_least(LEAST);
        let guard = client.lock("a").unwrap().acquire_with(&options).await.unwrap();
        let granted = Instant::now();
        if ttl != first {
            guard.set_ttl(ttl).await.unwrap();
        }
        assert!(guard.release().await.unwrap_err().is_transient());
        let asked = || probe.counts.calls().1;
        // By the backoff alone, the pauses would grow to a second.
        while granted.elapsed() + 2 * ttl + SECOND < LEAST {
            let before = asked();
            sleep(ttl / 2).await;
            assert!(asked() > before, "{ttl:?}: nothing was asked for half of it");
        }
        let other = lock_of(&LockClient::new(probe.memory.clone()));
        comes_free(&other, granted + LEAST).await;
    }
}

/// A request for the rest leaves no less than that, however late it comes.
#[tokio::test(start_paused = true)]
async fn a_rest_is_asked_for_no_more_often_towards_its_end() {
    let probe = Probe::default();
    let guard = lock_of(&LockClient::new(probe.clone())).acquire().await.unwrap();
    let granted = Instant::now();
    probe.memory.fail_next(FaultPoint::Renew, u32::MAX);
    assert!(guard.release().await.unwrap_err().is_transient());
    sleep_until(granted + LEAST - 4 * SECOND).await;
    let before = probe.counts.calls().1;
    sleep_until(granted + LEAST - 50 * MS).await;
    let asked = probe.counts.calls().1 - before;
    assert!((3..=7).contains(&asked), "{asked} times within four seconds");
}

/// The job goes on in another process, whose own options are others, and in a third one.
#[tokio::test(start_paused = true)]
async fn who_adopts_it_and_releases_leaves_it_taken() {
    let (one, other, memory) = hosts();
    let mut guard = one.acquire().await.unwrap();
    let granted = Instant::now();
    let defaults = AcquireOptions::new().renew(false).max_hold(2 * TTL);
    for _ in 0..2 {
        sleep(SECOND).await;
        let text = guard.detach().await.unwrap().encode();
        // It takes that long on its way.
        sleep(SECOND).await;
        let client = LockClient::new(memory.clone());
        let client = client.with_defaults(defaults.clone()).unwrap();
        let mut detached = DetachedHold::decode(&text).unwrap();
        guard = client.adopt(&mut detached).await.unwrap();
    }
    guard.release().await.unwrap();
    comes_free(&other, granted + LEAST + 2 * SECOND).await;
}

/// Its release would be told that no lease is that long, and the lock would be free too early.
#[tokio::test(start_paused = true)]
async fn who_cannot_keep_it_so_long_does_not_adopt_it() {
    let (one, other, memory) = hosts();
    let mut detached = one.acquire().await.unwrap().detach().await.unwrap();
    let probe = Probe {
        memory: memory.clone(),
        longest_ttl: Some(LEAST / 2),
        ..Probe::default()
    };
    let refused = LockClient::new(probe).adopt(&mut detached).await.unwrap_err();
    assert!(
        matches!(&refused, Error::InvalidOptions { option, .. } if *option == "hold_at_least"),
        "{refused}"
    );
    // It is left to one that can.
    let adopted = LockClient::new(memory).adopt(&mut detached).await.unwrap();
    let since = Instant::now();
    adopted.release().await.unwrap();
    comes_free(&other, since + LEAST).await;
}

/// The reply comes as the client is closed. Whoever had the hold before may have done the job; of a grant, nobody has done anything.
#[tokio::test(start_paused = true)]
async fn who_closes_leaves_taken_what_it_adopts_alone() {
    let (one, other, memory) = hosts();
    let close = async |client: &LockClient| {
        sleep(SECOND).await;
        client.close(SECOND).await.unwrap();
    };
    let client = LockClient::new(memory.clone());
    memory.delay(FaultPoint::Attempt, SECOND);
    let lock = lock_of(&client);
    let ((), refused) = join(close(&client), lock.acquire()).await;
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    memory.delay(FaultPoint::Attempt, Duration::ZERO);

    let guard = one.try_acquire().await.unwrap().expect("it is free");
    let mut detached = guard.detach().await.unwrap();
    let client = LockClient::new(memory.clone());
    memory.delay(FaultPoint::Adopt, SECOND);
    let ((), refused) = join(close(&client), client.adopt(&mut detached)).await;
    let adopted = Instant::now();
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    comes_free(&other, adopted + LEAST).await;
}

/// Its time was over by then, or it frees the lock on purpose.
#[tokio::test(start_paused = true)]
async fn who_adopts_it_may_free_it() {
    for is_over in [true, false] {
        let (one, other, memory) = hosts();
        let guard = one.acquire().await.unwrap();
        sleep(if is_over { LEAST } else { SECOND }).await;
        let mut detached = guard.detach().await.unwrap();
        assert_eq!(detached.encode().starts_with("1:"), is_over);
        let adopted = LockClient::new(memory).adopt(&mut detached).await.unwrap();
        if is_over {
            adopted.release().await.unwrap();
        } else {
            adopted.release_early().await.unwrap();
        }
        assert!(other.try_acquire().await.unwrap().is_some());
    }
}

/// The next of this client is a host's second job.
#[tokio::test(start_paused = true)]
async fn a_waiter_of_the_client_waits_for_it_too() {
    let probe = Probe::default();
    let client = LockClient::new(probe.clone());
    let guard = lock_of(&client).acquire().await.unwrap();
    let granted = Instant::now();
    let waiting = tokio::spawn({
        let lock = client.lock("a").unwrap();
        async move { lock.acquire().await.unwrap() }
    });
    tokio::time::sleep(SECOND).await;
    guard.release().await.unwrap();
    let next = timeout(LEAST * 2, waiting).await.unwrap().unwrap();
    assert!(granted.elapsed() >= LEAST, "after {:?}", granted.elapsed());
    next.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn who_asks_for_it_gets_it() {
    let (one, other, memory) = hosts();
    let guard = one.acquire().await.unwrap();
    let token = guard.token();
    let admin = LockClient::new(memory);
    let asked = tokio::spawn(async move { admin.revoke("a", token, SECOND).await });
    guard.lost().await;
    guard.release().await.unwrap_err();
    assert_eq!(asked.await.unwrap().unwrap(), Revocation::Confirmed);
    assert!(other.try_acquire().await.unwrap().is_some());
}

/// Nobody has done the job.
#[tokio::test(start_paused = true)]
async fn a_hold_that_is_lost_is_not_prolonged() {
    let probe = Probe::default();
    let guard = lock_of(&LockClient::new(probe.clone())).acquire().await.unwrap();
    probe.memory.fail_next(FaultPoint::Renew, u32::MAX);
    guard.lost().await;
    probe.memory.fail_next(FaultPoint::Renew, 0);
    drop(guard);
    let other = lock_of(&LockClient::new(probe.memory.clone()));
    drop(other.acquire_timeout(TTL).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn who_releases_early_on_purpose_frees_it() {
    let (one, other, _) = hosts();
    one.acquire().await.unwrap().release_early().await.unwrap();
    assert!(other.try_acquire().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_set_that_is_not_complete_leaves_nothing_taken() {
    let memory = MemoryBackend::new();
    let (one, other) = (LockClient::new(memory.clone()), LockClient::new(memory));
    let [a, b] = ["a", "b"].map(|name| one.lock(name).unwrap());
    let in_the_way = other.lock("b").unwrap().acquire().await.unwrap();
    let options = AcquireOptions::new().ttl(TTL).hold_at_least(LEAST);
    for wait in [Duration::ZERO, SECOND] {
        let refused = acquire_all(&[&a, &b], &options.clone().wait(wait)).await;
        assert!(refused.unwrap_err().is_timeout());
        drop(other.lock("a").unwrap().acquire_timeout(SECOND).await.unwrap());
    }
    in_the_way.release().await.unwrap();
    let began = Instant::now();
    let set = acquire_all(&[&a, &b], &options).await.unwrap();
    set.release().await.unwrap();
    for name in ["a", "b"] {
        drop(other.lock(name).unwrap().acquire().await.unwrap());
        assert!(began.elapsed() >= LEAST, "{name} was free");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_not_renewed_lasts_for_its_ttl_alone() {
    let options = AcquireOptions::new().ttl(TTL).renew(false);
    let lock = LockClient::new(MemoryBackend::new()).lock("a").unwrap();
    let refused = lock.acquire_with(&options.clone().hold_at_least(TTL + MS)).await;
    assert!(
        matches!(
            refused,
            Err(Error::InvalidOptions {
                option: "hold_at_least",
                ..
            })
        ),
        "{refused:?}"
    );
    let guard = lock.acquire_with(&options.hold_at_least(TTL)).await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn it_is_no_longer_than_max_hold() {
    let options = AcquireOptions::new()
        .ttl(TTL)
        .max_hold(LEAST)
        .hold_at_least(LEAST + MS);
    let lock = LockClient::new(MemoryBackend::new()).lock("a").unwrap();
    let refused = lock.acquire_with(&options).await.unwrap_err();
    assert!(
        matches!(
            refused,
            Error::InvalidOptions {
                option: "hold_at_least",
                ..
            }
        ),
        "{refused}"
    );
}
