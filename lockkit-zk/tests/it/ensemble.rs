//! Three servers, of which some have lost touch with the others without knowing.

use std::time::{Duration, Instant};

use lockkit_core::{AcquireOptions, FencingToken, LossReason};
use lockkit_testbed::{Shared, eventually, zookeeper::ZkEnsemble};
use tokio::sync::{Mutex, MutexGuard};
use zookeeper_client::SessionState;

use crate::server::{self, TIMEOUT, connect, lock, no_zookeeper, soon, unique, waiter, watcher};

/// Serialises the tests: each cuts connections that the others need.
static ENSEMBLE: Shared<Mutex<ZkEnsemble>> =
    Shared::new(|| Mutex::new(ZkEnsemble::start().expect("three ZooKeeper servers")));

/// Returns the ensemble, also if an earlier test has failed with a member down or cut off. Else those after it would wait for ever.
async fn ensemble() -> MutexGuard<'static, ZkEnsemble> {
    let ensemble = ENSEMBLE.lock().await;
    tokio::task::block_in_place(|| ensemble.heal()).unwrap();
    ensemble
}

/// Cuts off the member that a client with several holds is connected to, after the client was idle for so long. Returns the
/// least time between a holder's loss and the next grant.
async fn cut(ensemble: &ZkEnsemble, cut: usize, safe: usize, idle: Duration) -> Duration {
    let name = unique("cut");
    // The state of the connection would fool the client for a while.
    let trusting = server::raw(ensemble.member(cut).addr()).await;
    let theirs = connect(ensemble.member(safe).addr()).await;
    let ours = server::brief_client(ensemble.member(cut).addr()).await;
    let mut holds = Vec::new();
    for ttl in [1, 60] {
        let name = format!("{name}-{ttl}");
        let options = AcquireOptions::new().ttl(Duration::from_secs(ttl));
        let guard = lock(&ours, &name).with_options(options).acquire().await.unwrap();
        holds.push((watcher(&guard), waiter(&lock(&theirs, &name)), guard));
    }
    tokio::time::sleep(idle).await;
    ensemble.cut(cut);
    let mut told_at = Vec::new();
    for (told, next, guard) in holds {
        let (reason, told) = soon("the holder is told", told).await.unwrap();
        assert_eq!(reason, LossReason::Expired);
        told_at.push((told, next, guard));
    }
    assert_eq!(
        trusting.state(),
        SessionState::SyncConnected,
        "a vacuous pass: its server knows"
    );
    let mut margins = Vec::new();
    for (told, next, guard) in told_at {
        let (next, granted) = soon("the next is granted", next).await.unwrap();
        assert!(next.token() > guard.token());
        assert!(
            told < granted,
            "told {:?} after the next was granted, cut off after {idle:?}",
            told - granted
        );
        next.release().await.unwrap();
        margins.push(granted - told);
    }
    margins.into_iter().min().expect("there were holds")
}

/// From no time at all to several session timeouts.
fn idle(round: usize) -> Duration {
    match round % 3 {
        0 => Duration::ZERO,
        // This may be anywhere between two heartbeats.
        1 => Duration::from_millis(fastrand::u64(100..1_000)),
        _ => TIMEOUT * 3,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_on_cut_off_follower_is_told_before_next_grant() {
    if no_zookeeper() {
        return;
    }
    let ensemble = ensemble().await;
    let mut margins = Vec::new();
    for round in 0..server::rounds(3).min(20) {
        let leader = ensemble.leader().unwrap();
        let follower = (leader + 1) % 3;
        margins.push(cut(&ensemble, follower, leader, idle(round)).await);
        tokio::task::block_in_place(|| ensemble.mend()).unwrap();
    }
    margins.sort_unstable();
    eprintln!("follower cut off: told before the next grant by {margins:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_on_cut_off_leader_is_told_before_next_grant() {
    if no_zookeeper() {
        return;
    }
    let ensemble = ensemble().await;
    let mut margins = Vec::new();
    for round in 0..server::rounds(3).min(20) {
        let leader = ensemble.leader().unwrap();
        let follower = (leader + 1) % 3;
        margins.push(cut(&ensemble, leader, follower, idle(round)).await);
        tokio::task::block_in_place(|| ensemble.mend()).unwrap();
    }
    margins.sort_unstable();
    eprintln!("leader cut off: told before the next grant by {margins:?}");
}

/// It answers what is read from its own copy, which has not the raise yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_lags_behind_grants_above_a_raise() {
    if no_zookeeper() {
        return;
    }
    let ensemble = ensemble().await;
    for round in 0..server::rounds(3) {
        let lagging = (ensemble.leader().unwrap() + 1) % 3;
        let theirs = connect(ensemble.member((lagging + 1) % 3).addr()).await;
        let ours = connect(ensemble.member(lagging).addr()).await;
        let name = unique("lagging");
        let lock = lock(&ours, &name);
        let before = lock.acquire().await.unwrap();
        let token = before.token();
        before.release().await.unwrap();
        ensemble.cut(lagging);
        let above = FencingToken::new(theirs.fence().await.unwrap().get() + 1_000);
        soon("the others are a majority", theirs.raise_fence(above))
            .await
            .unwrap();
        let waiting = waiter(&lock);
        // It has asked, or asks the member that has just been told.
        if round % 2 == 0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        tokio::task::block_in_place(|| ensemble.mend()).unwrap();
        let (guard, _) = soon("it is back", waiting).await.unwrap();
        assert!(
            guard.token() > above && guard.token() > token,
            "{} was granted after tokens were raised above {above}",
            guard.token()
        );
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_outlives_its_leader() {
    if no_zookeeper() {
        return;
    }
    let ensemble = ensemble().await;
    let all: Vec<_> = ensemble.addrs().iter().map(ToString::to_string).collect();
    let name = unique("leader");
    let config = server::config(all.join(","));
    let (ours, theirs) = (
        server::patiently(config.clone()).await,
        server::patiently(config).await,
    );
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let next = waiter(&lock(&theirs, &name));
    eventually("the other waits", async || {
        ours.inspect(&name)
            .await
            .is_ok_and(|state| state.waiters == Some(1))
    })
    .await;
    let leader = ensemble.leader().unwrap();
    let until = guard.valid_until().unwrap();
    let killed = Instant::now();
    ensemble.member(leader).kill().unwrap();
    eventually("the hold is proven anew", async || {
        guard.valid_until().unwrap() > until
    })
    .await;
    eprintln!("leader killed: proven anew after {:?}", killed.elapsed());
    assert!(guard.is_held() && !next.is_finished());
    let token = guard.token();
    soon("released", guard.release()).await.unwrap();
    let (next, _) = soon("the next", next).await.unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
    tokio::task::block_in_place(|| ensemble.member(leader).start()).unwrap();
}
