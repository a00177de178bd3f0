//! What is left of those who wait.

use std::time::Duration;

use lockkit_testbed::Mode;

use super::world::World;
use crate::common::{LONG, SECOND, granted, lock, no_server, waiter};

/// For how long a waiter is believed in that does not ask, and how often those who wait ask again.
const SILENT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_secs(2);

#[tokio::test]
async fn a_dead_writer_keeps_readers_out_for_ten_seconds() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (dead, proxies) = world.client_behind_proxies().await;
    let (holder, reader, living) = (world.client().await, world.client().await, world.client().await);
    let held = lock(&holder, "a", LONG).shared().acquire().await.unwrap();
    let _dead = waiter(&lock(&dead, "a", LONG));
    world.waiters("a", 1).await;
    // Its host is gone.
    for proxy in proxies.iter() {
        proxy.set(Mode::Blackhole);
    }
    let reading = waiter(&lock(&reader, "a", LONG).shared());
    world.waiters("a", 2).await;
    // Somebody who goes on asking, behind both of them.
    let writing = waiter(&lock(&living, "a", LONG));
    world.waiters("a", 3).await;
    let read = granted(SILENT + POLL + 3 * SECOND, "the reader", reading).await;
    held.check().unwrap();
    assert!(!writing.is_finished(), "an overlap");
    held.release().await.unwrap();
    read.release().await.unwrap();
    granted(SILENT, "the writer", writing)
        .await
        .release()
        .await
        .unwrap();
    world.nothing_is_left("after a dead writer").await;
}

/// Waiters of the version before do not say when they asked last.
#[tokio::test]
async fn a_writer_of_the_version_before_is_believed_for_as_long() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let held = lock(&client, "a", LONG).shared().acquire().await.unwrap();
    for master in &world.masters {
        let owner = "0123456789abcdef0123456789abcdef client";
        let list = "lockkit#writers:{lockkit:a}";
        master.cli(&["ZADD", list, "1", owner]).unwrap();
    }
    let other = world.client().await;
    let reader = lock(&other, "a", LONG).shared();
    assert!(reader.try_acquire().await.unwrap().is_none(), "a writer waits");
    let read = granted(SILENT + POLL + 3 * SECOND, "the reader", waiter(&reader)).await;
    read.release().await.unwrap();
    held.release().await.unwrap();
    world.nothing_is_left("after a dead writer").await;
}
