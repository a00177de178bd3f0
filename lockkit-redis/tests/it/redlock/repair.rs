//! Masters that lack a hold are repaired as soon as possible. Until then the hold has fewer masters to spare, or none.

use lockkit_core::{FenceGate, LossReason};
use lockkit_testbed::Mode;

use super::world::World;
use crate::common::{LONG, RECOVERED, SECOND, lock, no_server, until, within};

/// Gives the last two masters of five to another contender.
fn divide(world: &World) {
    for master in &world.masters[3..] {
        let set = ["SET", "lockkit:a", "somebody", "PX", "600000"];
        master.cli(&set).unwrap();
    }
}

/// Has the contender give its two masters back.
fn give_way(world: &World) {
    for master in &world.masters[3..] {
        master.cli(&["DEL", "lockkit:a"]).unwrap();
    }
}

/// The repair comes long before the lease has to be renewed.
async fn held_by_all(world: &World) {
    until(4 * SECOND, "held by all", async || world.holding("a") == 5).await;
}

#[tokio::test]
async fn what_was_won_from_others_is_soon_held_by_all() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (first, second) = (world.client().await, world.client().await);
    let ours = lock(&first, "a", LONG);
    for ours in [ours.clone(), ours.shared()] {
        divide(&world);
        let held = ours.try_acquire().await.unwrap().expect("three are a majority");
        give_way(&world);
        held_by_all(&world).await;
        for master in &world.masters[..2] {
            master.cli(&["DEL", "lockkit:a"]).unwrap();
        }
        let theirs = lock(&second, "a", LONG).try_acquire().await.unwrap();
        assert!(theirs.is_none(), "PROMISE BROKEN: an overlap");
        held.check().unwrap();
        held.release().await.unwrap();
        world.nothing_is_left("after a repair").await;
    }
}

/// The first three decide. The late votes show who lacks the hold.
#[tokio::test]
async fn votes_that_come_after_the_win_are_heard() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    divide(&world);
    for master in &world.masters[3..] {
        master.pause().unwrap();
    }
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    for master in &world.masters[3..] {
        master.resume().unwrap();
        // After this reply, it has handled all earlier requests.
        master.cli(&["PING"]).unwrap();
    }
    give_way(&world);
    held_by_all(&world).await;
    held.release().await.unwrap();
}

/// The master keeps the lock for a waiter that does not come, or for a contender that died.
#[tokio::test]
async fn a_master_that_keeps_it_for_a_waiter_is_repaired() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let ours = lock(&client, "a", LONG);
    for (ours, kept) in [
        (ours.clone(), "s"),
        (ours.shared(), "0123456789abcdef0123456789abcdef"),
    ] {
        for master in &world.masters[3..] {
            let set = [
                "SET",
                "lockkit:a",
                &format!("lockkit#next {kept}"),
                "PX",
                "600000",
            ];
            master.cli(&set).unwrap();
        }
        let held = ours.try_acquire().await.unwrap().expect("three are a majority");
        until(4 * SECOND, "held by all", async || {
            let found = world
                .masters
                .iter()
                .map(|master| master.cli(&["GET", "lockkit:a"]));
            found
                .filter(|found| found.as_ref().is_ok_and(|found| !found.contains("next")))
                .count()
                == 5
        })
        .await;
        held.release().await.unwrap();
        world.nothing_is_left("after a repair").await;
    }
}

/// A bare majority has no master to spare, before the others are repaired.
#[tokio::test]
async fn a_key_lost_at_a_bare_majority_lets_two_in() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (first, proxies) = world.client_behind_proxies().await;
    let second = world.client().await;
    divide(&world);
    let stale = lock(&first, "a", LONG).try_acquire().await.unwrap();
    let stale = stale.expect("three are a majority");
    // Before the first repair.
    for proxy in proxies.iter() {
        proxy.set(Mode::Blackhole);
    }
    give_way(&world);
    world.masters[0].cli(&["DEL", "lockkit:a"]).unwrap();
    let fresh = lock(&second, "a", LONG).try_acquire().await.unwrap();
    let fresh = fresh.expect("to be had at three");
    assert!(stale.is_held(), "the overlap that this reproduces");
    let gate = FenceGate::new();
    gate.admit(fresh.token()).unwrap();
    assert!(gate.admit(stale.token()).is_err(), "a stale write is refused");
    // With a bare majority it renews early, and that reports the loss.
    for proxy in proxies.iter() {
        proxy.set(Mode::Pass);
    }
    let reason = within(RECOVERED, "told", stale.lost()).await;
    assert_eq!(reason, LossReason::Revoked);
    fresh.check().unwrap();
    fresh.release().await.unwrap();
}
