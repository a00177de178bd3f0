//! Servers with a compare-and-delete of their own, which release short holds. A script does what they cannot.

use lockkit_core::LossReason;
use lockkit_testbed::{
    eventually,
    redis::{self, RedisBuilder, RedisServer},
};

use crate::{
    common::{
        AT_ONCE, LONG, client, client_behind_proxy, granted, keys, lock, no_valkey, nothing_is_left, shown,
        take, waiter, waiters, within,
    },
    cost::requests,
};

const PASSWORD: &str = "open-sesame";
const KEY: &str = "lockkit:a";

fn valkey() -> RedisBuilder {
    RedisServer::builder().program(redis::valkey())
}

/// Returns the requests of a short hold's release: the server's own command, or the digest of a script.
async fn release(server: &RedisServer, url: &str) -> Vec<String> {
    let lock = lock(&client(url).await, "a", LONG);
    // On a busy machine a hold may last for longer than a short one. The server's own command has the shorter name.
    let mut seen = Vec::new();
    for _ in 0..5 {
        let monitor = server.monitor().unwrap();
        // A look at the monitor in between would make the hold a long one.
        let held = lock.acquire().await.unwrap();
        held.release().await.unwrap();
        seen.push(requests(&monitor).split_off(1));
    }
    seen.into_iter()
        .min_by_key(|requests| requests.concat().len())
        .unwrap()
}

#[tokio::test]
async fn a_short_hold_is_released_by_the_servers_own_command() {
    if no_valkey() {
        return;
    }
    let server = valkey().start().unwrap();
    assert_eq!(release(&server, server.url()).await, ["DELIFEQ"]);
    let (client, proxy) = client_behind_proxy(&server).await;
    let lock = lock(&client, "a", LONG);
    let mut least = u64::MAX;
    for _ in 0..5 {
        let before = proxy.counts().requests.chunks;
        take(&lock).await;
        least = least.min(proxy.counts().requests.chunks - before);
    }
    assert_eq!(least, 2, "to acquire and to release");
    nothing_is_left(&server, "released").await;
}

#[tokio::test]
async fn a_value_set_by_somebody_else_is_not_deleted() {
    if no_valkey() {
        return;
    }
    let server = valkey().start().unwrap();
    let client = client(server.url()).await;
    let lock = lock(&client, "a", LONG);
    // Another client's value, and one like our own.
    let like_ours = format!("lockkit:{:032x} 33 5 x ", 7);
    for theirs in ["theirs", &like_ours] {
        let held = lock.acquire().await.unwrap();
        server.cli(&["SET", KEY, theirs, "PX", "60000"]).unwrap();
        let error = held.release().await.unwrap_err();
        assert!(error.is_lost(), "{error:?}");
        assert_eq!(server.cli(&["GET", KEY]).unwrap(), theirs);
        server.cli(&["DEL", KEY]).unwrap();
    }
    let held = lock.acquire().await.unwrap();
    server.cli(&["DEL", KEY]).unwrap();
    let error = held.release().await.unwrap_err();
    assert!(error.is_lost(), "{error:?}");
    nothing_is_left(&server, "lost").await;
}

#[tokio::test]
async fn a_waiter_who_has_come_meanwhile_is_handed_the_lock() {
    if no_valkey() {
        return;
    }
    let server = valkey().start().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    for renewed in [false, true] {
        let held = lock(&one, "a", LONG).acquire().await.unwrap();
        let token = held.token();
        if renewed {
            held.renew().await.unwrap();
        }
        let waiting = waiter(&lock(&two, "a", LONG));
        waiters(&server, "a", 1).await;
        held.release().await.unwrap();
        let next = granted(AT_ONCE, "handed over", waiting).await;
        assert!(next.token() > token);
        next.release().await.unwrap();
    }
    nothing_is_left(&server, "handed over").await;
}

/// The right may be missing from the start, or be taken away.
#[tokio::test]
async fn without_the_right_a_script_releases() {
    if no_valkey() {
        return;
    }
    let server = valkey()
        .user("never", PASSWORD, "~* &* +@all -delifeq")
        .start()
        .unwrap();
    let by_script = release(&server, server.url()).await;
    assert_eq!(by_script.len(), 1, "{by_script:?}");
    assert_eq!(by_script[0].len(), 40, "a digest: {by_script:?}");

    let free = format!("redis://{}", server.addr());
    let client = client(&free).await;
    let lock = lock(&client, "a", LONG);
    let held = lock.acquire().await.unwrap();
    server.cli(&["ACL", "SETUSER", "default", "-delifeq"]).unwrap();
    held.release().await.unwrap();
    let held = lock.acquire().await.unwrap();
    held.release().await.unwrap();
    nothing_is_left(&server, "released without the right").await;
}

/// The reply to the server's command is lost, so the release is asked for again, and finds nothing.
#[tokio::test]
async fn a_release_whose_reply_was_lost_deletes_nobody_elses_hold() {
    if no_valkey() {
        return;
    }
    let server = valkey().start().unwrap();
    let (one, proxy) = client_behind_proxy(&server).await;
    let two = client(server.url()).await;
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    proxy.set(lockkit_testbed::Mode::DropReplies);
    drop(held);
    eventually("released all the same", async || {
        !keys(&server).contains(&KEY.to_owned())
    })
    .await;
    let next = granted(AT_ONCE, "it is free", waiter(&lock(&two, "a", LONG))).await;
    proxy.set(lockkit_testbed::Mode::Pass);
    one.close(LONG).await.unwrap();
    next.check().unwrap();
    next.renew().await.unwrap();
    next.release().await.unwrap();
    nothing_is_left(&server, "asked for twice").await;
}

#[tokio::test]
async fn a_server_that_forgot_all_keys_or_scripts_is_no_different() {
    if no_valkey() {
        return;
    }
    let server = valkey().start().unwrap();
    let client = client(server.url()).await;
    let lock = lock(&client, "a", LONG);
    let held = lock.acquire().await.unwrap();
    server.cli(&["SCRIPT", "FLUSH"]).unwrap();
    held.release().await.unwrap();
    let held = lock.acquire().await.unwrap();
    server.cli(&["SCRIPT", "FLUSH"]).unwrap();
    server.cli(&["FLUSHALL"]).unwrap();
    let error = held.release().await.unwrap_err();
    assert!(error.is_lost(), "{}", shown(&error));
    let held = lock.acquire().await.unwrap();
    server.cli(&["FLUSHALL"]).unwrap();
    assert!(held.renew().await.unwrap_err().is_lost());
    assert_eq!(within(AT_ONCE, "told", held.lost()).await, LossReason::Revoked);
    assert!(keys(&server).is_empty(), "{:?}", keys(&server));
}
