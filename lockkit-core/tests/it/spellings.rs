//! Several locks at once, by clients that spell their servers differently.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireOptions, Error, Instant, Lock, LockClient, LockGuard, LockKind, LockName, LockState,
    MemoryBackend, Result, acquire_all,
    memory::FaultPoint,
    spi::{Backend, BackendInfo, Claim, ClaimRequest},
};
use tokio::time::timeout;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// A server, under one of its addresses.
#[derive(Debug)]
struct Spelled(MemoryBackend, Arc<str>);

#[async_trait]
impl Backend for Spelled {
    fn info(&self) -> BackendInfo {
        let mut info = self.0.info();
        info.server = self.1.clone();
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        self.0.claim(request).await
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.0.inspect(name, kind).await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

fn lock(server: &MemoryBackend, address: &str) -> Lock {
    let client = LockClient::new(Spelled(server.clone(), address.into()));
    client.lock("a").unwrap()
}

/// Two servers, and the locks of two callers there, who order them differently.
fn world() -> ([MemoryBackend; 2], [[Lock; 2]; 2]) {
    let servers = [MemoryBackend::new(), MemoryBackend::new()];
    let locks =
        [["1", "2"], ["4", "3"]].map(|[first, second]| [lock(&servers[0], first), lock(&servers[1], second)]);
    (servers, locks)
}

/// Waits until so many wait for each lock.
async fn wait_for(locks: &[Lock; 2], many: usize) {
    for lock in locks {
        while lock.inspect().await.unwrap().waiters < Some(many) {
            tokio::time::sleep(MS).await;
        }
    }
}

/// Returns for each lock whether the guard in its place holds it.
async fn held(guards: &[LockGuard], locks: &[Lock]) -> Vec<bool> {
    let mut all = Vec::new();
    for (guard, lock) in guards.iter().zip(locks) {
        all.push(lock.inspect().await.unwrap().holders[0].token == guard.token());
    }
    all
}

#[tokio::test(start_paused = true)]
async fn two_spellings_of_a_server_lock_nobody_up() {
    for round in 0..20 {
        let (servers, [ours, theirs]) = world();
        let in_the_way = servers.each_ref().map(|server| lock(server, "0"));
        let (first, second) = (
            in_the_way[0].acquire().await.unwrap(),
            in_the_way[1].acquire().await.unwrap(),
        );
        let callers = [ours.clone(), theirs].map(|locks| {
            tokio::spawn(async move {
                let set = acquire_all(&locks.each_ref(), &AcquireOptions::new())
                    .await
                    .unwrap();
                let mut sorted = locks;
                sorted.sort_by(|a, b| a.id().cmp(b.id()));
                assert_eq!(held(set.guards(), &sorted).await, [true, true], "in their order");
                tokio::time::sleep(100 * MS).await;
                set.release().await.unwrap();
            })
        });
        // Each of them waits for another lock first, and is granted that.
        wait_for(&in_the_way, 1).await;
        first.release().await.unwrap();
        second.release().await.unwrap();
        let began = Instant::now();
        for caller in callers {
            let done = timeout(MINUTE, caller).await;
            done.unwrap_or_else(|_| panic!("round {round}: they wait for each other"))
                .unwrap();
        }
        assert!(began.elapsed() < 10 * SECOND, "{:?}", began.elapsed());
        assert!(ours[0].inspect().await.unwrap().is_free() && ours[1].inspect().await.unwrap().is_free());
    }
}

/// Two callers who spell all their servers alike are served in the order of the queues, however long that takes.
#[tokio::test(start_paused = true)]
async fn a_caller_of_one_server_keeps_its_locks_while_it_waits() {
    let client = LockClient::new(MemoryBackend::new());
    let (a, b) = (client.lock("a").unwrap(), client.lock("b").unwrap());
    let in_the_way = b.acquire().await.unwrap();
    let caller = tokio::spawn({
        let (a, b) = (a.clone(), b.clone());
        async move { acquire_all(&[&a, &b], &AcquireOptions::new()).await }
    });
    tokio::time::sleep(60 * MINUTE).await;
    assert!(a.try_acquire().await.unwrap().is_none(), "it is kept");
    in_the_way.release().await.unwrap();
    caller.await.unwrap().unwrap().release().await.unwrap();
}

/// A lock of another server that is held for long keeps the first one free for others most of the time.
#[tokio::test(start_paused = true)]
async fn what_is_waited_for_comes_first_the_next_time() {
    let (servers, [ours, _]) = world();
    let in_the_way = lock(&servers[1], "0").acquire().await.unwrap();
    let caller = tokio::spawn({
        let ours = ours.clone();
        async move { acquire_all(&ours.each_ref(), &AcquireOptions::new()).await }
    });
    wait_for(&[ours[1].clone(), ours[1].clone()], 1).await;
    assert!(ours[0].try_acquire().await.unwrap().is_none());
    tokio::time::sleep(MINUTE).await;
    assert!(
        ours[0].try_acquire().await.unwrap().is_some(),
        "it waits for the other"
    );
    // An outage ends nobody's wait.
    servers[1].fail_next(FaultPoint::Attempt, 3);
    tokio::time::sleep(MINUTE).await;
    in_the_way.release().await.unwrap();
    let set = timeout(MINUTE, caller).await.unwrap().unwrap().unwrap();
    assert_eq!(held(set.guards(), &ours).await, [true, true], "in their order");
    set.release().await.unwrap();
}

/// One `wait` is for all rounds together. A lock that is there twice is waited for that long.
#[tokio::test(start_paused = true)]
async fn a_wait_is_for_all_rounds_together() {
    let server = MemoryBackend::new();
    let twice = [lock(&server, "1"), lock(&server, "2")];
    let began = Instant::now();
    let options = AcquireOptions::new().wait(20 * SECOND);
    let outcome = acquire_all(&twice.each_ref(), &options).await;
    assert!(matches!(outcome, Err(Error::Timeout { .. })), "{outcome:?}");
    let took = began.elapsed();
    assert!(took >= 20 * SECOND && took < 21 * SECOND, "{took:?}");
    assert!(
        twice[0].try_acquire().await.unwrap().is_some(),
        "nothing stays held"
    );
}

/// Dropped in whichever round, it leaves nothing.
#[tokio::test(start_paused = true)]
async fn a_caller_dropped_in_any_round_leaves_nothing() {
    let server = MemoryBackend::new();
    let twice = [lock(&server, "1"), lock(&server, "2")];
    for after in [1, 3, 10, 30] {
        let (locks, options) = (twice.each_ref(), AcquireOptions::new());
        assert!(
            timeout(after * SECOND, acquire_all(&locks, &options))
                .await
                .is_err()
        );
        tokio::time::sleep(SECOND).await;
        let state = twice[0].inspect().await.unwrap();
        assert!(state.is_free() && state.waiters == Some(0), "{state:?}");
    }
}
