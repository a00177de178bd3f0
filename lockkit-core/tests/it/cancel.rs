//! Cancellation is dropping the future: after its first, second, … last poll, on every path, nothing stays behind.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use lockkit_core::{
    AcquireOptions, DistributedLockExt, Lock, LockClient, MemoryBackend, ReentrantLock, ReentrantOwner,
    acquire_all, memory::FaultPoint,
};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(10);

/// Runs `future`, and drops it when it is still not done after `polls` polls.
pub(crate) async fn cancel_after<F: Future>(polls: u32, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|cx| {
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Two clients of one server.
struct World {
    backend: MemoryBackend,
    ours: LockClient,
    theirs: LockClient,
}

impl World {
    fn new() -> Self {
        let backend = MemoryBackend::new();
        let options = AcquireOptions::new().ttl(TTL);
        let client = || {
            LockClient::new(backend.clone())
                .with_defaults(options.clone())
                .unwrap()
        };
        Self {
            ours: client(),
            theirs: client(),
            backend,
        }
    }

    fn lock(&self) -> Lock {
        self.ours.lock("a").unwrap()
    }

    fn their_lock(&self) -> Lock {
        self.theirs.lock("a").unwrap()
    }

    /// Nothing stays held or queued, and both clients acquire promptly.
    async fn nothing_is_left(&self, case: &str) {
        for operation in [FaultPoint::Attempt, FaultPoint::Renew, FaultPoint::Release] {
            self.backend.delay(operation, Duration::ZERO);
        }
        let within = tokio::time::Instant::now() + SECOND;
        loop {
            let state = self.theirs.inspect("a").await.unwrap();
            if state.is_free() && state.waiters == Some(0) {
                break;
            }
            assert!(
                tokio::time::Instant::now() < within,
                "{case}: left behind: {state:?}"
            );
            tokio::time::sleep(MS).await;
        }
        for lock in [self.lock(), self.their_lock()] {
            match lock.acquire_timeout(SECOND).await {
                Ok(guard) => guard.release().await.unwrap(),
                Err(lockkit_core::Error::Closed) => {}
                Err(err) => panic!("{case}: the next acquisition: {err}"),
            }
        }
    }
}

/// Runs `path` with a budget of 1, 2, … polls until it is enough. `path` returns `true` if it was.
async fn at_every_poll<Fut: Future<Output = bool>>(name: &str, path: impl Fn(Arc<World>, u32) -> Fut) {
    for polls in 1..200 {
        let world = Arc::new(World::new());
        let done = path(world.clone(), polls).await;
        world
            .nothing_is_left(&format!("{name}, dropped after poll {polls}"))
            .await;
        if done {
            assert!(polls > 1, "{name} never waited: it shows nothing");
            return;
        }
    }
    panic!("{name} never came to an end");
}

#[tokio::test(start_paused = true)]
async fn an_uncontended_acquisition_whose_reply_takes_its_time() {
    at_every_poll("acquire", async |world: Arc<World>, polls| {
        world.backend.delay(FaultPoint::Attempt, 100 * MS);
        cancel_after(polls, world.lock().acquire()).await.is_some()
    })
    .await;
    at_every_poll("try_acquire", async |world: Arc<World>, polls| {
        world.backend.delay(FaultPoint::Attempt, 100 * MS);
        cancel_after(polls, world.lock().try_acquire()).await.is_some()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_acquisition_whose_replies_are_lost() {
    at_every_poll("lost replies", async |world: Arc<World>, polls| {
        world.backend.lose_replies(FaultPoint::Attempt, 3);
        let done = cancel_after(polls, world.lock().acquire()).await.is_some();
        world.backend.lose_replies(FaultPoint::Attempt, 0);
        done
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_in_the_local_queue_that_is_handed_the_hold() {
    for handoffs in [0, 5] {
        at_every_poll("queued locally", async |world: Arc<World>, polls| {
            let options = AcquireOptions::new().local_handoffs(handoffs);
            let lock = world.lock().with_options(options);
            let guard = lock.acquire().await.unwrap();
            world.backend.delay(FaultPoint::Attempt, 10 * MS);
            world.backend.delay(FaultPoint::Release, 10 * MS);
            let holder = tokio::spawn(async move {
                tokio::time::sleep(50 * MS).await;
                guard.release().await.unwrap();
            });
            let done = cancel_after(polls, lock.acquire()).await.is_some();
            holder.await.unwrap();
            done
        })
        .await;
    }
}

/// The waiter goes after the offer was made and before it has looked: the next one gets it.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_with_an_offer_in_its_hands_passes_it_on() {
    for handoffs in [0, 5] {
        let world = World::new();
        let lock = world
            .lock()
            .with_options(AcquireOptions::new().local_handoffs(handoffs));
        let guard = lock.acquire().await.unwrap();
        let mut gone = Box::pin(lock.acquire());
        let mut next = Box::pin(lock.acquire());
        assert!(cancel_after(1, gone.as_mut()).await.is_none());
        assert!(cancel_after(1, next.as_mut()).await.is_none());
        guard.release().await.unwrap();
        drop(gone);
        let next = tokio::time::timeout(100 * MS, next)
            .await
            .expect("woken")
            .unwrap();
        next.release().await.unwrap();
        world.nothing_is_left("an offer passed on").await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_at_the_server() {
    at_every_poll("waiting at the server", async |world: Arc<World>, polls| {
        let guard = world.their_lock().acquire().await.unwrap();
        world.backend.delay(FaultPoint::Attempt, 5 * MS);
        let holder = tokio::spawn(async move {
            tokio::time::sleep(200 * MS).await;
            guard.release().await.unwrap();
        });
        let done = cancel_after(polls, world.lock().acquire()).await.is_some();
        holder.await.unwrap();
        done
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_at_its_deadline() {
    at_every_poll("at the deadline", async |world: Arc<World>, polls| {
        let guard = world.their_lock().acquire().await.unwrap();
        world.backend.delay(FaultPoint::Release, 20 * MS);
        let outcome = cancel_after(polls, world.lock().acquire_timeout(120 * MS)).await;
        guard.release().await.unwrap();
        outcome.is_some_and(|outcome| outcome.unwrap_err().is_timeout())
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_release() {
    at_every_poll("release", async |world: Arc<World>, polls| {
        let guard = world.lock().acquire().await.unwrap();
        // The worker keeps it alive by now.
        tokio::time::sleep(SECOND).await;
        world.backend.delay(FaultPoint::Release, 100 * MS);
        cancel_after(polls, guard.release()).await.is_some()
    })
    .await;
    let world = World::new();
    let guard = world.lock().acquire().await.unwrap();
    tokio::time::sleep(SECOND).await;
    world.backend.fail_next(FaultPoint::Release, 1);
    world.backend.delay(FaultPoint::Release, 100 * MS);
    assert!(guard.release().await.unwrap_err().is_transient());
    world.nothing_is_left("release, failed").await;
}

/// More than a third of the lease is over, so that the release renews before it hands on.
#[tokio::test(start_paused = true)]
async fn a_release_that_proves_the_hold_before_it_passes_it_on() {
    at_every_poll("release to an heir", async |world: Arc<World>, polls| {
        let lock = world.lock().with_options(AcquireOptions::new().renew(false));
        let guard = lock.acquire().await.unwrap();
        let heir = tokio::spawn(async move { lock.acquire().await.unwrap() });
        tokio::time::sleep(4 * SECOND).await;
        world.backend.delay(FaultPoint::Renew, 20 * MS);
        let done = cancel_after(polls, guard.release()).await.is_some();
        let heir = tokio::time::timeout(SECOND, heir)
            .await
            .expect("granted")
            .unwrap();
        heir.release().await.unwrap();
        done
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_renewal_by_hand() {
    at_every_poll("renew", async |world: Arc<World>, polls| {
        let guard = world.lock().acquire().await.unwrap();
        tokio::time::sleep(SECOND).await;
        world.backend.delay(FaultPoint::Renew, 100 * MS);
        let done = cancel_after(polls, guard.renew()).await.is_some();
        world.backend.delay(FaultPoint::Renew, Duration::ZERO);
        tokio::time::sleep(3 * TTL).await;
        assert!(guard.is_held(), "the worker renews it as before");
        guard.release().await.unwrap();
        done
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_close() {
    at_every_poll("close", async |world: Arc<World>, polls| {
        let guard = world.lock().acquire().await.unwrap();
        let waiter = tokio::spawn({
            let lock = world.ours.lock("a").unwrap();
            async move { lock.acquire().await }
        });
        tokio::time::sleep(SECOND).await;
        world.backend.delay(FaultPoint::Release, 100 * MS);
        let done = cancel_after(polls, world.ours.close(SECOND)).await.is_some();
        assert!(!guard.is_held(), "closed from the first poll on");
        assert!(matches!(waiter.await.unwrap(), Err(lockkit_core::Error::Closed)));
        done
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_with_lock() {
    at_every_poll("with_lock", async |world: Arc<World>, polls| {
        world.backend.delay(FaultPoint::Attempt, 10 * MS);
        world.backend.delay(FaultPoint::Release, 10 * MS);
        let lock = world.lock();
        let work = lock.with_lock(async |_| tokio::time::sleep(100 * MS).await);
        cancel_after(polls, work).await.is_some()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_set_of_locks() {
    at_every_poll("acquire_all", async |world: Arc<World>, polls| {
        world.backend.delay(FaultPoint::Attempt, 10 * MS);
        let (a, b) = (world.lock(), world.ours.lock("b").unwrap());
        let options = AcquireOptions::new();
        let set = async {
            let set = acquire_all(&[&b, &a], &options).await.unwrap();
            tokio::time::sleep(10 * MS).await;
            set.release().await.unwrap();
        };
        let done = cancel_after(polls, set).await.is_some();
        b.acquire_timeout(SECOND).await.unwrap().release().await.unwrap();
        done
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_nested_acquisition() {
    at_every_poll("reentrant", async |world: Arc<World>, polls| {
        world.backend.delay(FaultPoint::Attempt, 10 * MS);
        let lock = ReentrantLock::new(world.lock());
        let owner = ReentrantOwner::new();
        // Two tasks of one owner: the second waits for the outcome of the first.
        let second = tokio::spawn({
            let lock = lock.clone();
            async move { lock.acquire(&owner).await.unwrap().release().await.unwrap() }
        });
        let first = async {
            let outer = lock.acquire(&owner).await.unwrap();
            let inner = lock.acquire(&owner).await.unwrap();
            outer.release().await.unwrap();
            tokio::time::sleep(10 * MS).await;
            inner.release().await.unwrap();
        };
        let done = cancel_after(polls, first).await.is_some();
        tokio::time::timeout(SECOND, second)
            .await
            .expect("it goes on")
            .unwrap();
        done
    })
    .await;
}
