//! Cancellation is dropping the future: after its first, second, … last poll, while replies are lost, nothing stays
//! behind on the server.

use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use lockkit_core::LockClient;
use lockkit_testbed::{Mode, Proxy, redis::RedisServer};

use crate::common::{
    LONG, MS, SECOND, client, client_behind_proxy, keys, lock, no_server, nothing_is_left, waiter, within,
};

/// Runs `future`, and drops it when it is still not done after `polls` polls. How many it took, if it was done.
async fn cancel_after<F: Future>(polls: u32, future: F) -> Option<(u32, F::Output)> {
    let mut future = pin!(future);
    let mut polled = 0;
    poll_fn(|cx| {
        polled += 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some((polled, output))),
            Poll::Pending if polled == polls => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

struct World {
    server: RedisServer,
    /// Behind the proxy.
    ours: LockClient,
    proxy: Proxy,
    theirs: LockClient,
}

impl World {
    async fn new() -> Self {
        let server = RedisServer::plain().unwrap();
        let (ours, proxy) = client_behind_proxy(&server).await;
        let theirs = client(server.url()).await;
        Self {
            server,
            ours,
            proxy,
            theirs,
        }
    }

    /// Has replies be lost for a moment, again and again, while `path` goes on with a budget of 1, 2, … polls, until
    /// that is enough. `path` answers whether it was.
    async fn at_every_poll(&self, name: &str, path: impl AsyncFn(u32) -> bool) {
        for polls in 1..100 {
            let disturbed = async {
                loop {
                    self.proxy.set(Mode::DropReplies);
                    tokio::time::sleep(15 * MS).await;
                    self.proxy.set(Mode::Pass);
                    tokio::time::sleep(60 * MS).await;
                }
            };
            let done = tokio::select! {
                biased;
                () = disturbed => false,
                done = within(LONG, name, path(polls)) => done,
            };
            self.proxy.set(Mode::Pass);
            let case = format!("{name}, dropped after poll {polls}");
            nothing_is_left(&self.server, &case).await;
            if done {
                assert!(polls > 1, "{name} never waited: it shows nothing");
                return;
            }
        }
        panic!("{name} never came to an end");
    }
}

#[tokio::test]
async fn acquisitions_with_lost_replies_are_dropped_at_every_poll() {
    if no_server() {
        return;
    }
    let world = World::new().await;
    let ours = lock(&world.ours, "a", LONG);
    for lock in [ours.clone(), ours.shared(), world.ours.semaphore("a", 2).unwrap()] {
        world
            .at_every_poll("acquire", async |polls| {
                cancel_after(polls, lock.acquire()).await.is_some()
            })
            .await;
    }
    world
        .at_every_poll("try_acquire", async |polls| {
            cancel_after(polls, ours.try_acquire()).await.is_some()
        })
        .await;
}

#[tokio::test]
async fn waiters_with_lost_replies_are_dropped_at_every_poll() {
    if no_server() {
        return;
    }
    let world = World::new().await;
    let (ours, theirs) = (lock(&world.ours, "a", LONG), lock(&world.theirs, "a", LONG));
    world
        .at_every_poll("waiting", async |polls| {
            let held = theirs.acquire().await.unwrap();
            let released = tokio::spawn(async move {
                tokio::time::sleep(100 * MS).await;
                held.release().await.unwrap();
            });
            let done = cancel_after(polls, ours.acquire()).await.is_some();
            released.await.unwrap();
            done
        })
        .await;
}

#[tokio::test]
async fn releases_with_lost_replies_are_dropped_at_every_poll() {
    if no_server() {
        return;
    }
    let world = World::new().await;
    let ours = lock(&world.ours, "a", LONG);
    world
        .at_every_poll("release", async |polls| {
            let guard = ours.acquire().await.unwrap();
            cancel_after(polls, guard.release()).await.is_some()
        })
        .await;
}

#[tokio::test]
async fn downgrades_with_lost_replies_are_dropped_at_every_poll() {
    if no_server() {
        return;
    }
    let world = World::new().await;
    let ours = lock(&world.ours, "a", LONG);
    world
        .at_every_poll("downgrade", async |polls| {
            let guard = ours.acquire().await.unwrap();
            cancel_after(polls, guard.downgrade()).await.is_some()
        })
        .await;
}

#[tokio::test]
async fn a_thousand_tries_time_outs_and_cancelled_waits_leave_one_key() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (ours, theirs) = (client(server.url()).await, client(server.url()).await);
    let lock = lock(&ours, "a", LONG);
    let held = self::lock(&theirs, "a", LONG).acquire().await.unwrap();
    let mut rng = fastrand::Rng::with_seed(7);
    for n in 0..1_000 {
        let lock = if n % 5 == 0 { lock.shared() } else { lock.clone() };
        let patience = Duration::from_micros(rng.u64(1..3_000));
        match n % 4 {
            0 => assert!(lock.try_acquire().await.unwrap().is_none()),
            1 => drop(lock.acquire_timeout(patience).await.unwrap_err()),
            2 => drop(tokio::time::timeout(patience, lock.acquire()).await.unwrap_err()),
            _ => {
                let polled = cancel_after(rng.u32(1..4), lock.acquire());
                let granted = tokio::time::timeout(patience, polled).await.ok().flatten();
                assert!(granted.is_none());
            }
        }
    }
    let waiting = waiter(&lock);
    held.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    nothing_is_left(&server, "after a thousand").await;
    ours.close(SECOND).await.unwrap();
    theirs.close(SECOND).await.unwrap();
    assert_eq!(keys(&server), ["lockkit:lockkit#fence"]);
    assert_eq!(server.cli(&["DBSIZE"]).unwrap(), "1");
}
