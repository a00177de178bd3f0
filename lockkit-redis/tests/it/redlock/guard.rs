//! The restart guard: a master that may have lost what it granted has no vote until that is over, whoever asks.

use std::time::{Duration, Instant};

use lockkit_core::{FencingDurability, LockClient};
use lockkit_redis::RedlockConfig;
use lockkit_testbed::{
    eventually,
    redis::{Fsync, RedisServer},
};

use super::world::{World, config, connect, url, votes};
use crate::common::{LONG, MS, SECOND, lock, no_server, shown, within};

const MAX_TTL: Duration = Duration::from_secs(4);

fn guarded(world: &World) -> RedlockConfig {
    let mut config = world.config();
    config.max_ttl = MAX_TTL;
    config
}

/// What a try says, once it says the same for a while: masters are found to be back within some of these.
async fn try_says(client: &LockClient, name: &str, part: &str) {
    eventually(&format!("a try says `{part}`"), async || {
        match lock(client, name, SECOND).try_acquire().await {
            Err(error) => shown(&error).contains(part),
            Ok(_) => false,
        }
    })
    .await;
}

#[tokio::test]
async fn a_master_restarted_empty_has_no_vote_until_its_grants_are_over() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = connect(guarded(&world)).await.unwrap();
    assert_eq!(client.capabilities().fencing, FencingDurability::Process);
    let held = lock(&client, "a", MAX_TTL).acquire().await.unwrap();
    world.voting(5).await;
    // Two are gone for good, so that every vote counts.
    for master in &world.masters[3..] {
        master.kill().unwrap();
    }
    let began = Instant::now();
    world.masters[0].restart_empty().unwrap();
    // Neither for those who knew it before, nor for those who come now.
    try_says(&client, "b", "was restarted or emptied").await;
    let late = connect(guarded(&world)).await.unwrap();
    try_says(&late, "b", "was restarted or emptied").await;
    assert!(!votes(&world.masters[0]));
    // Its former grant is held by two more, which is all that is left of a majority.
    assert!(lock(&late, "a", SECOND).try_acquire().await.is_err());
    drop(held);

    within(MAX_TTL + LONG, "admitted", async {
        while !votes(&world.masters[0]) {
            tokio::time::sleep(10 * MS).await;
        }
    })
    .await;
    assert!(began.elapsed() >= MAX_TTL, "{:?}", began.elapsed());
    for client in [&client, &late] {
        let granted = within(LONG, "granted", lock(client, "b", SECOND).acquire()).await;
        granted.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn a_master_that_was_emptied_in_place_has_no_vote_either() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(guarded(&world)).await.unwrap();
    world.masters[2].kill().unwrap();
    let began = Instant::now();
    world.masters[1].cli(&["FLUSHALL"]).unwrap();
    try_says(&client, "a", "was restarted or emptied").await;
    let granted = within(MAX_TTL + LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
    assert!(began.elapsed() >= MAX_TTL, "{:?}", began.elapsed());
    granted.unwrap().release().await.unwrap();
}

/// Each of them knows only what its predecessors left at the master.
#[tokio::test]
async fn clients_that_come_and_go_admit_a_master_in_the_end() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(guarded(&world)).await.unwrap();
    client.close(SECOND).await.unwrap();
    world.masters[2].kill().unwrap();
    world.masters[1].restart_empty().unwrap();
    let began = Instant::now();
    eventually("admitted", async || {
        let client = connect(guarded(&world)).await.unwrap();
        let granted = lock(&client, "a", SECOND).try_acquire().await;
        client.close(SECOND).await.unwrap();
        matches!(granted, Ok(Some(_)))
    })
    .await;
    assert!(began.elapsed() + 500 * MS >= MAX_TTL, "{:?}", began.elapsed());
}

#[tokio::test]
async fn restored_data_are_older_than_they_say() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(guarded(&world)).await.unwrap();
    world.masters[2].kill().unwrap();
    // With all its data, the marker among them: nobody can tell how old they are.
    world.masters[1].restart().unwrap();
    assert!(
        !world.masters[1]
            .cli(&["GET", "lockkit#redlock"])
            .unwrap()
            .is_empty()
    );
    try_says(&client, "a", "was restarted or emptied").await;
    let late = connect(guarded(&world)).await.unwrap();
    try_says(&late, "a", "was restarted or emptied").await;
    let granted = within(MAX_TTL + LONG, "granted", lock(&late, "a", SECOND).acquire()).await;
    granted.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_durable_master_votes_as_soon_as_it_is_back() {
    if no_server() {
        return;
    }
    let world = World::built(3, |builder| builder.append_only(Fsync::Always));
    let mut config = guarded(&world);
    config.durable = true;
    config.max_ttl = Duration::from_secs(3_600);
    let client = connect(config.clone()).await.unwrap();
    assert_eq!(client.capabilities().fencing, FencingDurability::Durable);
    let lock = lock(&client, "a", LONG);
    let mut last = 0;
    for round in 0..3 {
        let held = within(LONG, "granted", lock.acquire()).await.unwrap();
        assert!(held.token().get() > last, "tokens went back");
        last = held.token().get();
        held.release().await.unwrap();
        // All of them, one of them or two: the counters are there again, too.
        for master in &world.masters[round..] {
            master.kill().unwrap();
        }
        for master in &world.masters[round..] {
            master.start().unwrap();
        }
    }
    // Without its data it is as good as any other.
    world.masters[0].restart_empty().unwrap();
    world.masters[1].kill().unwrap();
    try_says(&client, "a", "was restarted or emptied").await;
}

#[tokio::test]
async fn durable_masters_have_to_be() {
    if no_server() {
        return;
    }
    for build in [None, Some(Fsync::EverySec)] {
        let world = World::built(3, |builder| match build {
            None => builder,
            Some(fsync) => builder.append_only(fsync),
        });
        let mut config = world.config();
        config.durable = true;
        let error = connect(config).await.unwrap_err();
        assert!(!error.is_transient(), "{error:?}");
        let text = shown(&error);
        let setting = if build.is_none() {
            "appendonly"
        } else {
            "appendfsync"
        };
        assert!(
            text.contains(setting) && text.contains(&world.masters[0].addr().to_string()),
            "{text}"
        );
    }
}

#[tokio::test]
async fn a_deployment_has_one_max_ttl() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = connect(guarded(&world)).await.unwrap();
    let error = connect(world.config()).await.unwrap_err().to_string();
    assert!(
        error.contains("`max_ttl`") && error.contains("60s") && error.contains("4s"),
        "{error}"
    );
    let error = lock(&client, "a", MAX_TTL + MS).try_acquire().await.unwrap_err();
    assert!(error.to_string().contains("`ttl`"), "{error}");
    assert!(error.to_string().contains("4s"), "{error}");
    assert!(lock(&client, "a", MAX_TTL).try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn a_replica_and_a_master_that_is_there_twice_are_refused() {
    if no_server() {
        return;
    }
    let world = World::of(2);
    let replica = RedisServer::builder()
        .replica_of(world.masters[0].addr())
        .start()
        .unwrap();
    let masters = || world.masters.iter().map(RedisServer::url);
    let error = connect(config(&url(masters().chain([replica.url()]))))
        .await
        .unwrap_err();
    let text = shown(&error);
    assert!(!error.is_transient() && text.contains("is a replica"), "{text}");

    // By another name.
    let again = world.masters[0].url().replace("127.0.0.1", "localhost");
    let error = connect(config(&url(masters().chain([again.as_str()]))))
        .await
        .unwrap_err();
    let text = shown(&error);
    assert!(
        !error.is_transient() && text.contains("the same server as another"),
        "{text}"
    );
}

#[tokio::test]
async fn new_masters_vote_at_once_and_only_if_all_of_them_are_here() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    world.masters[2].kill().unwrap();
    // Whether the third knows of grants cannot be told.
    let client = connect(guarded(&world)).await.unwrap();
    let error = lock(&client, "a", SECOND).try_acquire().await.unwrap_err();
    assert!(shown(&error).contains("was restarted or emptied"), "{error:?}");
    let granted = within(MAX_TTL + LONG, "granted", lock(&client, "a", SECOND).acquire()).await;
    granted.unwrap().release().await.unwrap();
}
