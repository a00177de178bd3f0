//! One client with thousands of holds. It must not take its own queue for silent masters.
//!
//! `LOCKKIT_HOLDS` is another number of them. With 100,000, use a release build and `--test-threads=1`.

use std::{env, time::Duration};

use futures_util::{FutureExt as _, StreamExt as _, future::join_all, stream};
use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{AcquireOptions, Lock, LockClient, LockGuard, Result};
use lockkit_testbed::Mode;

use super::world::{World, connect};
use crate::common::{LONG, MS, SECOND, no_server, shown, within};

/// The holds of one client, or `LOCKKIT_HOLDS`.
const MANY: usize = 2_000;
/// The default, which is what users have.
const MASTER_TIMEOUT: Duration = Duration::from_millis(100);

fn holds() -> usize {
    env::var("LOCKKIT_HOLDS").map_or(MANY, |holds| holds.parse().unwrap())
}

async fn client(world: &World) -> LockClient {
    let mut config = world.config();
    config.master_timeout = MASTER_TIMEOUT;
    connect(config).await.unwrap()
}

/// The last of many waits for its turn as long as a busy machine takes for all of them.
fn lock(client: &LockClient, name: &str) -> Lock {
    // The longest that masters grant: renewals of 100,000 are few beside the rest.
    let options = AcquireOptions::new().ttl(2 * LONG).op_timeout(LONG);
    client.lock(name).unwrap().with_options(options)
}

/// Acquires many locks, some at a time.
async fn many(client: &LockClient) -> Vec<LockGuard> {
    let acquire = |n: usize| async move { lock(client, &n.to_string()).acquire().await.unwrap() };
    stream::iter(0..holds())
        .map(acquire)
        .buffer_unordered(16)
        .collect()
        .await
}

/// Returns what they came to, of which none may be an error.
#[track_caller]
fn all_well<T>(what: &str, outcomes: Vec<Result<T>>) -> Vec<T> {
    let all = outcomes.len();
    let (mut well, mut failed) = (Vec::new(), Vec::new());
    for outcome in outcomes {
        match outcome {
            Ok(outcome) => well.push(outcome),
            Err(error) => failed.push(shown(&error)),
        }
    }
    assert!(
        failed.is_empty(),
        "{} of {all} {what} failed, the first with: {}",
        failed.len(),
        failed[0]
    );
    well
}

#[tokio::test]
async fn many_holds_released_at_once_are_all_released() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = client(&world).await;
    let held = many(&client).await;
    let watch = Stopwatch::start();
    let released = within(
        LONG,
        "released",
        join_all(held.into_iter().map(LockGuard::release)),
    )
    .await;
    let took = watch.elapsed();
    println!("{} releases: {took:?}", all_well("releases", released).len());
    world.nothing_is_left("after many releases").await;
}

#[tokio::test]
async fn many_holds_renewed_at_once_are_all_renewed() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = client(&world).await;
    let held = many(&client).await;
    let watch = Stopwatch::start();
    let renewed = within(LONG, "renewed", join_all(held.iter().map(LockGuard::renew))).await;
    let took = watch.elapsed();
    println!("{} renewals: {took:?}", all_well("renewals", renewed).len());
}

#[tokio::test]
async fn many_locks_acquired_at_once_are_all_granted() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = client(&world).await;
    let try_one = |n: usize| {
        let lock = lock(&client, &n.to_string());
        async move { lock.try_acquire().await }
    };
    let watch = Stopwatch::start();
    let granted = within(LONG, "granted", join_all((0..holds()).map(try_one))).await;
    let took = watch.elapsed();
    let granted = all_well("acquisitions", granted);
    println!("{} acquisitions: {took:?}", granted.len());
    assert!(granted.iter().all(Option::is_some), "nobody else wants them");
}

/// Whoever does not poll its future keeps its place among the requests under way. Others must get on.
#[tokio::test]
async fn acquisitions_that_nobody_polls_hold_up_nobody() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = client(&world).await;
    let locks: Vec<_> = (0..300).map(|n| lock(&client, &n.to_string())).collect();
    let mut forgotten: Vec<_> = locks.iter().map(|lock| Box::pin(lock.acquire())).collect();
    for acquiring in &mut forgotten {
        assert!(acquiring.now_or_never().is_none());
    }
    for _ in 0..20 {
        let free = lock(&client, "free");
        let held = within(LONG, "granted", free.acquire()).await.unwrap();
        held.release().await.unwrap();
    }
    let granted = within(LONG, "granted", join_all(forgotten)).await;
    all_well("acquisitions", granted);
}

/// Nor may the others have to go one at a time, through the one place that is left.
#[tokio::test]
async fn a_place_that_nobody_polls_counts_for_a_second() {
    if no_server() {
        return;
    }
    for unpolled in [127, 200] {
        let world = World::five();
        let (mut config, proxies) = world.behind_proxies();
        config.master_timeout = SECOND;
        let client = connect(config.clone()).await.unwrap();
        let beside = connect(config).await.unwrap();
        let locks: Vec<_> = (0..unpolled)
            .map(|n| lock(&client, &format!("left {n}")))
            .collect();
        let mut forgotten: Vec<_> = locks.iter().map(|lock| Box::pin(lock.acquire())).collect();
        for acquiring in &mut forgotten {
            assert!(acquiring.now_or_never().is_none());
        }
        let way = Mode::Delay {
            requests: Duration::ZERO,
            replies: 50 * MS,
        };
        proxies.iter().for_each(|proxy| proxy.set(way));
        let try_all = async |client: &LockClient, names: &str| {
            let watch = Stopwatch::start();
            let try_one = |n: usize| {
                let lock = lock(client, &format!("{names} {n}"));
                async move { lock.try_acquire().await }
            };
            let granted = within(2 * LONG, "granted", join_all((0..400).map(try_one))).await;
            all_well("acquisitions", granted);
            watch.elapsed()
        };
        let took = try_all(&client, "ours").await;
        let control = try_all(&beside, "beside").await;
        // One after the other, they would take 20 s.
        assert!(
            took < 5 * SECOND + 3 * control,
            "{unpolled} unpolled: it took {took:?}, and {control:?} without"
        );
    }
}
