//! Lists of what a majority has.

use lockkit_core::{LockClient, Result, spi::chain};

use super::world::World;
use crate::common::{LONG, lock, no_server};

async fn listed(client: &LockClient) -> Result<Vec<(String, u64)>> {
    let mut list = client.list("")?;
    let mut found = Vec::new();
    while let Some(lock) = list.next().await {
        let lock = lock?;
        let [holder] = &lock.state.holders[..] else {
            panic!("{lock:?}");
        };
        found.push((lock.name.as_str().to_owned(), holder.token.get()));
    }
    found.sort();
    Ok(found)
}

#[tokio::test]
async fn what_a_majority_has_is_listed_and_nothing_else() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let guard = lock(&client, "ours", LONG).acquire().await.unwrap();
    let ours = ("ours".to_owned(), guard.token().get());
    let theirs = ("theirs".to_owned(), 0);
    for count in 0..=5 {
        // Taken from the first master on, and given from the last one on.
        if count > 0 {
            world.masters[count - 1].cli(&["DEL", "lockkit:ours"]).unwrap();
            let key = ["SET", "lockkit:theirs", "value", "PX", "60000"];
            world.masters[5 - count].cli(&key).unwrap();
        }
        let mut expected = Vec::new();
        expected.extend((count <= 2).then(|| ours.clone()));
        expected.extend((count >= 3).then(|| theirs.clone()));
        assert_eq!(listed(&client).await.unwrap(), expected, "{count} masters");
    }
}

#[tokio::test]
async fn a_list_needs_a_majority_and_no_more() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let mut expected = Vec::new();
    let mut guards = Vec::new();
    for number in 0..100 {
        let name = format!("{number:03}");
        let guard = lock(&client, &name, LONG).acquire().await.unwrap();
        expected.push((name, guard.token().get()));
        guards.push(guard);
    }
    assert_eq!(listed(&client).await.unwrap(), expected);
    for down in [0, 1] {
        world.masters[down].kill().unwrap();
        assert_eq!(listed(&client).await.unwrap(), expected, "{down} is down");
    }
    world.masters[2].kill().unwrap();
    let error = listed(&client).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    assert!(
        chain(&error).contains("3 of 5 masters did not take part"),
        "{}",
        chain(&error)
    );
}

#[tokio::test]
async fn what_silent_masters_may_have_is_an_error() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let guard = lock(&client, "ours", LONG).acquire().await.unwrap();
    let ours = vec![("ours".to_owned(), guard.token().get())];
    for lost in [3, 4] {
        world.masters[lost].cli(&["DEL", "lockkit:ours"]).unwrap();
    }
    assert_eq!(listed(&client).await.unwrap(), ours, "a bare majority has it");
    world.masters[0].kill().unwrap();
    let errors = [
        listed(&client).await.unwrap_err(),
        client.inspect("ours").await.unwrap_err(),
    ];
    for error in errors {
        assert!(error.is_transient(), "{error:?}");
        let said = chain(&error);
        assert!(said.contains("1 of 5 masters did not take part"), "{said}");
    }
    assert!(guard.is_held());
    // It may have one master and another, which are no majority.
    world.masters[1].cli(&["DEL", "lockkit:ours"]).unwrap();
    assert_eq!(listed(&client).await.unwrap(), []);
    assert!(client.inspect("ours").await.unwrap().is_free());
}
