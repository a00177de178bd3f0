//! From an exclusive hold to a shared one, on five masters.

use lockkit_core::AcquireOptions;
use lockkit_testbed::Mode;

use super::world::World;
use crate::common::{LONG, SECOND, lock, no_server, until, within};

/// Returns the value of the lock at each master.
fn values(world: &World) -> Vec<String> {
    let masters = world.masters.iter();
    masters
        .map(|master| master.cli(&["GET", "lockkit:a"]).unwrap_or_default())
        .collect()
}

#[tokio::test]
async fn a_majority_makes_a_hold_a_shared_one() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (ours, theirs) = (world.client().await, world.client().await);
    let (mine, other) = (lock(&ours, "a", LONG), lock(&theirs, "a", LONG));
    let guard = mine.acquire().await.unwrap();
    let token = guard.token();
    for master in &world.masters[3..] {
        master.pause().unwrap();
    }
    let reading = within(LONG, "a majority", guard.downgrade()).await.unwrap();
    let beside = within(LONG, "a reader", other.shared().acquire()).await.unwrap();
    assert!(reading.token() == token && beside.token() > token);
    assert!(other.try_acquire().await.unwrap().is_none());
    reading.renew().await.unwrap();
    for master in &world.masters[3..] {
        master.resume().unwrap();
    }
    beside.release().await.unwrap();
    assert!(other.try_acquire().await.unwrap().is_none());
    reading.release().await.unwrap();
    world.nothing_is_left("after a downgrade by a majority").await;
}

/// Two masters do not get the request. Once they have the hold as a shared one, too, any of the others may fail.
#[tokio::test]
async fn a_renewal_makes_shared_what_missed_the_downgrade() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (ours, proxies) = world.client_behind_proxies().await;
    let theirs = world.client().await;
    let (mine, other) = (lock(&ours, "a", LONG), lock(&theirs, "a", LONG));
    let guard = mine.acquire().await.unwrap();
    lockkit_testbed::eventually("all have it", async || world.holding("a") == 5).await;
    for proxy in &proxies[3..] {
        proxy.set(Mode::HalfOpen);
    }
    let reading = within(LONG, "a majority", guard.downgrade()).await.unwrap();
    let shared = || {
        values(&world)
            .iter()
            .filter(|value| *value == "lockkit#shared")
            .count()
    };
    assert_eq!(shared(), 3, "{:?}", values(&world));
    for proxy in &proxies[3..] {
        proxy.set(Mode::Pass);
        proxy.reset();
    }
    until(LONG, "shared at all masters", async || {
        reading.renew().await.unwrap();
        shared() == 5
    })
    .await;
    for master in &world.masters[..2] {
        master.pause().unwrap();
    }
    let beside = within(LONG, "a reader", other.shared().acquire()).await.unwrap();
    assert!(reading.is_held() && beside.token() > reading.token());
    for master in &world.masters[..2] {
        master.resume().unwrap();
    }
    beside.release().await.unwrap();
    assert!(other.try_acquire().await.unwrap().is_none());
    reading.release().await.unwrap();
    world.nothing_is_left("after a downgrade that was repaired").await;
}

#[tokio::test]
async fn a_minority_leaves_it_open_and_keeps_others_out() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (ours, theirs) = (world.client().await, world.client().await);
    let other = lock(&theirs, "a", LONG);
    let options = AcquireOptions::new().ttl(LONG).op_timeout(SECOND);
    let guard = ours.lock("a").unwrap().acquire_with(&options).await.unwrap();
    // A win is complete when all masters have it.
    lockkit_testbed::eventually("all have it", async || world.holding("a") == 5).await;
    for master in &world.masters[2..] {
        master.pause().unwrap();
    }
    let downgrade = tokio::spawn(guard.downgrade());
    lockkit_testbed::eventually("shared at two", async || {
        let shared = world.masters[..2].iter().all(|master| {
            master
                .cli(&["GET", "lockkit:a"])
                .is_ok_and(|value| value == "lockkit#shared")
        });
        shared && !downgrade.is_finished()
    })
    .await;
    for master in &world.masters[2..] {
        master.resume().unwrap();
    }
    let reading = within(LONG, "the others", downgrade).await.unwrap().unwrap();
    assert!(other.try_acquire().await.unwrap().is_none());
    let values = values(&world);
    let shared = values.iter().filter(|value| *value == "lockkit#shared").count();
    assert!(shared >= 3, "{values:?}");
    reading.release().await.unwrap();
    world.nothing_is_left("after a downgrade in two steps").await;
}
