//! Lists of what is held on one master.

use lockkit_core::{Error, ListedLock, LockClient, spi::chain};
use lockkit_testbed::redis::RedisServer;

use crate::common::{LONG, SECOND, client, keys, lock, no_server, until};

async fn listed(client: &LockClient, prefix: &str) -> Vec<ListedLock> {
    let mut list = client.list(prefix).unwrap();
    let mut found = Vec::new();
    while let Some(lock) = list.next().await {
        found.push(lock.unwrap());
    }
    found
}

#[tokio::test]
async fn a_foreign_hold_is_listed_without_a_token() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    server
        .cli(&["SET", "lockkit:job", "theirs", "NX", "PX", "60000"])
        .unwrap();
    server.cli(&["HSET", "lockkit:other", "field", "value"]).unwrap();
    server.cli(&["SET", "lockkit", "value"]).unwrap();
    let [job] = &listed(&client, "").await[..] else {
        panic!("the string alone is a lock");
    };
    assert_eq!(job.name.as_str(), "job");
    let [holder] = &job.state.holders[..] else {
        panic!("{job:?}");
    };
    assert_eq!((holder.token.get(), holder.since), (0, None));
    assert!(holder.left.is_some_and(|left| left > 50 * SECOND), "{holder:?}");
}

#[tokio::test]
async fn a_list_shows_when_each_was_granted() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let began = std::time::SystemTime::now();
    let guard = lock(&client, "job", LONG).acquire().await.unwrap();
    let since = |found: &[ListedLock]| found[0].state.holders[0].since;
    let first = since(&listed(&client, "").await).unwrap();
    // The server has this machine's clock.
    assert!(
        began <= first && first <= std::time::SystemTime::now(),
        "{first:?}"
    );
    guard.renew().await.unwrap();
    assert_eq!(
        since(&listed(&client, "").await),
        Some(first),
        "a renewal is no grant"
    );
    guard.release().await.unwrap();

    // A counter that is ahead of the clock does not tell.
    let ahead = 4_000_000_000_000_000_u64;
    server
        .cli(&["SET", "lockkit:lockkit#fence", &ahead.to_string()])
        .unwrap();
    let guard = lock(&client, "job", LONG).acquire().await.unwrap();
    assert!(guard.token().get() > ahead);
    assert_eq!(since(&listed(&client, "").await), None);
}

#[tokio::test]
async fn a_list_writes_nothing() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let mut guards = Vec::new();
    for number in 0..100 {
        guards.push(lock(&client, &number.to_string(), LONG).acquire().await.unwrap());
        let semaphore = client.semaphore(number.to_string(), 2).unwrap();
        guards.push(semaphore.acquire().await.unwrap());
    }
    // A lease that has ended leaves members of a group behind, which others clear away.
    server
        .cli(&["DEL", "lockkit:lockkit#semaphore:{lockkit:0}"])
        .unwrap();
    let before = (keys(&server), written(&server));
    assert_eq!(listed(&client, "").await.len(), 199);
    assert_eq!((keys(&server), written(&server)), before);
}

/// Semaphores come last. What is on the last page was found before the server was replaced.
#[tokio::test]
async fn the_last_page_is_not_read_at_another_server() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let mut guards = Vec::new();
    for number in 0..20 {
        let semaphore = client.semaphore(number.to_string(), 2).unwrap();
        guards.push(semaphore.acquire().await.unwrap());
    }
    let mut list = client.list("").unwrap();
    assert!(list.next().await.unwrap().is_ok());
    server.restart_empty().unwrap();
    until(LONG, "connected again", async || {
        client.inspect("0").await.is_ok()
    })
    .await;
    let error = loop {
        match list.next().await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break error,
            None => panic!("the list ends as if that were all"),
        }
    };
    assert!(
        error.is_transient() && chain(&error).contains("another server has taken"),
        "{}",
        chain(&error)
    );
}

/// An eviction, or somebody who deletes what looks like a leftover.
#[tokio::test]
async fn a_hold_without_its_record_is_an_error_and_not_free() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let guard = lock(&client, "job", LONG).shared().acquire().await.unwrap();
    server
        .cli(&["DEL", "lockkit:lockkit#about:{lockkit:job}"])
        .unwrap();
    let errors = [
        client.inspect("job").await.unwrap_err(),
        client
            .list("")
            .unwrap()
            .next()
            .await
            .expect("it is held")
            .unwrap_err(),
    ];
    for error in errors {
        let said = chain(&error);
        assert!(!error.is_transient() && said.contains("job"), "{said}");
    }
    assert!(lock(&client, "job", LONG).try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    assert_eq!(listed(&client, "").await, []);
}

/// The number of calls of each command that changes something, also in a script.
fn written(server: &RedisServer) -> Vec<(String, u64)> {
    let reads = [
        "scan",
        "evalsha",
        "eval",
        "get",
        "time",
        "exists",
        "pttl",
        "zrange",
        "hget",
        "keys",
        "info",
        "ping",
        "script|load",
        "config|resetstat",
        "command|docs",
        "type",
    ];
    let counts = server.command_counts().unwrap();
    counts
        .into_iter()
        .filter(|(command, _)| !reads.contains(&command.as_str()))
        .collect()
}

#[tokio::test]
async fn a_list_does_not_go_on_at_another_server() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    for number in 0..500 {
        server
            .cli(&["SET", &format!("lockkit:{number}"), "theirs"])
            .unwrap();
    }
    let mut list = client.list("").unwrap();
    assert!(list.next().await.unwrap().is_ok());
    server.restart_empty().unwrap();
    until(LONG, "connected again", async || {
        client.inspect("0").await.is_ok()
    })
    .await;
    let error = loop {
        match list.next().await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break error,
            None => panic!("the list ends as if that were all"),
        }
    };
    assert!(
        matches!(error, Error::Backend { .. }) && error.is_transient(),
        "{error:?}"
    );
    assert!(
        chain(&error).contains("another server has taken"),
        "{}",
        chain(&error)
    );
    assert!(list.next().await.is_none());
    assert_eq!(listed(&client, "").await, []);
}
