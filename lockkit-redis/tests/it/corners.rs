//! Corners of the protocol and of the connection, each of which was wrong once.

use std::time::Duration;

use futures_util::FutureExt;
use lockkit_core::{AcquireOptions, Error, acquire_all};
use lockkit_redis::RedisConfig;
use lockkit_testbed::{
    Mode, Proxy, eventually,
    redis::{RedisSentinels, RedisServer},
};

use crate::common::{
    AT_ONCE, LONG, MS, client, client_behind_proxy, connect, granted, heartbeats, lock, no_server,
    subscribers, take, until, url_of, waiter, waiters, within,
};

#[tokio::test]
async fn the_next_is_told_when_the_head_leaves_a_foreign_hold() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    server
        .cli(&["SET", "lockkit:n", "foreign", "PX", "600000"])
        .unwrap();
    let (a, b) = (client(server.url()).await, client(server.url()).await);
    let first = waiter(&a.lock("n").unwrap());
    waiters(&server, "n", 1).await;
    let second = waiter(&b.lock("n").unwrap());
    waiters(&server, "n", 2).await;
    first.abort();
    waiters(&server, "n", 1).await;
    // Nobody says a word about this.
    server.cli(&["DEL", "lockkit:n"]).unwrap();
    let _next = granted(AT_ONCE, "the next", second).await;
}

#[tokio::test]
async fn a_try_takes_a_free_lock_past_a_waiter_that_is_cut_off() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let holder = client(server.url()).await;
    let guard = holder.lock("n").unwrap().acquire().await.unwrap();
    let (cut_off, proxy) = client_behind_proxy(&server).await;
    let waiting = waiter(&cut_off.lock("n").unwrap());
    heartbeats(&server, 1).await;
    proxy.set(Mode::Refuse);
    proxy.reset();
    eventually("the server has noticed", async || subscribers(&server) == 1).await;
    guard.release().await.unwrap();
    let other = client(server.url()).await;
    let taken = other.lock("n").unwrap().try_acquire().await.unwrap();
    let guard = taken.expect("nobody has it");
    // Its place is kept.
    proxy.set(Mode::Pass);
    eventually("it is back", async || subscribers(&server) == 3).await;
    guard.release().await.unwrap();
    let next = granted(LONG, "its turn", waiting).await;
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_long_way_to_the_server_is_no_reason_not_to_connect() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let way = Duration::from_millis(100);
    proxy.set(Mode::Delay {
        requests: way,
        replies: way,
    });
    let client = client(&url_of(&proxy)).await;
    take(&client.lock("n").unwrap()).await;
}

#[tokio::test]
async fn sentinels_need_not_know_the_user_of_the_master() {
    if no_server() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    for server in group.servers() {
        let rules = ["ACL", "SETUSER", "locker", "on", ">secret", "~*", "&*", "+@all"];
        server.cli(&rules).unwrap();
    }
    let hosts: Vec<_> = group.sentinels().iter().map(|s| s.addr().to_string()).collect();
    let mut config = RedisConfig::new(format!("redis://locker:secret@{}", hosts.join(",")));
    config.sentinel = Some(RedisSentinels::MASTER_NAME.to_owned());
    let client = connect(config).await.unwrap();
    take(&client.lock("n").unwrap()).await;
    let users = group.master().unwrap().cli(&["CLIENT", "LIST"]).unwrap();
    assert!(users.contains("user=locker"), "{users}");
}

async fn refused_for_want_of_replicas(ttl: Duration, within: Duration) -> Error {
    let server = RedisServer::plain().unwrap();
    let mut config = RedisConfig::new(server.url());
    config.replicas = 1;
    config.replicas_timeout = within;
    let client = connect(config).await.unwrap();
    let options = AcquireOptions::new().ttl(ttl).wait(Duration::ZERO);
    let error = client
        .lock("n")
        .unwrap()
        .acquire_with(&options)
        .await
        .unwrap_err();
    assert_eq!(
        server.cli(&["EXISTS", "lockkit:n"]).unwrap(),
        "0",
        "it is given up"
    );
    error
}

#[tokio::test]
async fn waiting_for_replicas_is_not_taken_for_a_broken_connection() {
    if no_server() {
        return;
    }
    let error = refused_for_want_of_replicas(Duration::from_secs(30), Duration::from_secs(4)).await;
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("0 of 1 replicas"), "{error}: {cause}");
}

#[tokio::test]
async fn a_lease_that_ends_before_replicas_reply_is_no_loss() {
    if no_server() {
        return;
    }
    let error = refused_for_want_of_replicas(Duration::from_millis(200), Duration::from_millis(500)).await;
    assert!(error.is_transient() && !error.is_lost(), "{error:?}");
}

#[tokio::test]
async fn requests_on_a_replaced_silent_connection_end() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let options = AcquireOptions::new()
        .op_timeout(Duration::from_secs(600))
        .ttl(Duration::from_secs(600));
    let guard = client.lock("n").unwrap().acquire_with(&options).await.unwrap();
    proxy.set(Mode::HalfOpen);
    proxy.set(Mode::Pass);
    let released = within(LONG, "an answer", guard.release()).await;
    assert!(released.unwrap_err().is_transient());
    eventually("it is released all the same", async || {
        server.cli(&["EXISTS", "lockkit:n"]).unwrap() == "0"
    })
    .await;
}

#[tokio::test]
async fn holds_are_renewed_and_released_also_when_memory_is_full() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let shared = client.lock("n").unwrap().shared().acquire().await.unwrap();
    let permit = client.semaphore("n", 2).unwrap().acquire().await.unwrap();
    let exclusive = client.lock("waited for").unwrap().acquire().await.unwrap();
    let other = self::client(server.url()).await;
    let waiting = waiter(&other.lock("waited for").unwrap());
    waiters(&server, "waited for", 1).await;
    // The next holder within the client has a token of its own, which it tells with its first renewal.
    let passed = client.lock("passed on").unwrap();
    let first = passed.acquire().await.unwrap();
    assert!(passed.acquire().now_or_never().is_none());
    first.release().await.unwrap();
    let before = passed.acquire().await.unwrap();
    let heir = waiter(&passed);
    tokio::task::yield_now().await;
    before.release().await.unwrap();
    let unsaid = granted(LONG, "passed on", heir).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]).unwrap();
    unsaid.renew().await.unwrap();
    unsaid.release().await.unwrap();
    let error = client.lock("other").unwrap().try_acquire().await.unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("maxmemory"), "{cause}");
    shared.renew().await.unwrap();
    permit.renew().await.unwrap();
    exclusive.renew().await.unwrap();
    shared.release().await.unwrap();
    permit.release().await.unwrap();
    exclusive.release().await.unwrap();
    let next = granted(LONG, "passed on", waiting).await;
    next.release().await.unwrap();
}

/// A connection that is made anew meanwhile can do what the one before could.
#[tokio::test]
async fn memory_full_and_a_reset_end_no_hold() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, proxy) = client_behind_proxy(&server).await;
    let (other, others) = client_behind_proxy(&server).await;
    let names = ["exclusive", "waited for", "asked", "ended"];
    let mut held = Vec::new();
    for name in names {
        held.push(lock(&client, name, LONG).acquire().await.unwrap());
    }
    let shared = client.lock("shared").unwrap().shared().acquire().await.unwrap();
    let waiting = waiter(&lock(&other, "waited for", LONG));
    waiters(&server, "waited for", 1).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]).unwrap();
    for proxy in [&proxy, &others] {
        proxy.reset();
    }

    let looker = self::client(server.url()).await;
    until(LONG, "everybody looks", async || {
        let mut all = [&client, &other, &looker].into_iter();
        loop {
            let Some(client) = all.next() else { return true };
            match client.inspect("exclusive").await {
                Ok(state) => assert_eq!(state.holders.len(), 1),
                Err(_) => return false,
            }
        }
    })
    .await;
    for guard in &held {
        guard.renew().await.unwrap();
    }
    shared.renew().await.unwrap();
    shared.release().await.unwrap();
    let token = held[2].token();
    let _ = looker.revoke("asked", token, MS).await.unwrap();
    within(LONG, "it is told", held[2].lost()).await;
    let token = held[3].token();
    assert!(looker.revoke_by_force("ended", token).await.unwrap());
    within(LONG, "it is told", held[3].lost()).await;
    for guard in held.drain(..2) {
        guard.release().await.unwrap();
    }
    let next = granted(LONG, "passed on", waiting).await;
    next.release().await.unwrap();
    // A new hold needs memory.
    let refused = lock(&looker, "new", LONG).try_acquire().await.unwrap_err();
    assert!(
        lockkit_core::spi::chain(&refused).contains("maxmemory"),
        "{refused:?}"
    );
}

/// No right to write, and no need of one.
#[tokio::test]
async fn looking_needs_no_right_to_write() {
    if no_server() {
        return;
    }
    let rights = "~lockkit:* resetchannels &lockkit:* +ping +info +select \
         +subscribe +client|id +eval +evalsha +script|load +time +get +exists +pttl +zrange +hget +scan";
    let server = RedisServer::builder()
        .user("looker", "secret", rights)
        .start()
        .unwrap();
    let looker = client(&format!("redis://looker:secret@{}", server.addr())).await;
    let holder = client(&format!("redis://{}", server.addr())).await;
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    let shown = looker.inspect("a").await.unwrap();
    assert_eq!(shown.holders[0].token, held.token());
    let refused = lock(&looker, "b", LONG).try_acquire().await.unwrap_err();
    assert!(!refused.is_transient(), "{refused:?}");
    held.release().await.unwrap();
}

/// The rules that `docs/redis.md` gives for a user of lockkit's own.
fn documented_rights() -> String {
    let docs = include_str!("../../../docs/redis.md");
    let (_, after) = docs
        .split_once("ACL SETUSER locker on >secret")
        .expect("the rules");
    let (rules, _) = after.split_once("```").expect("their end");
    rules
        .replace('\\', " ")
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

#[tokio::test]
async fn the_documented_rights_are_enough_for_everything() {
    if no_server() {
        return;
    }
    let rules = documented_rights();
    let server = RedisServer::builder()
        .user("locker", "secret", &rules)
        .start()
        .unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let mut config = RedisConfig::new(format!("redis://locker:secret@{}/3", proxy.addr()));
    config.replicas = 1;
    config.replicas_timeout = Duration::from_millis(10);
    let with_replicas = connect(config.clone()).await.unwrap();
    let refused = with_replicas.lock("n").unwrap().try_acquire().await.unwrap_err();
    let cause = std::error::Error::source(&refused).unwrap().to_string();
    assert!(cause.contains("0 of 1 replicas"), "{cause}");

    config.replicas = 0;
    let (a, b) = (
        connect(config.clone()).await.unwrap(),
        connect(config).await.unwrap(),
    );
    let lock = a.lock("n").unwrap();
    for (mine, others) in [
        (lock.clone(), b.lock("n").unwrap()),
        (lock.shared(), b.lock("n").unwrap()),
        (lock.clone(), b.lock("n").unwrap().shared()),
        (a.semaphore("n", 1).unwrap(), b.semaphore("n", 1).unwrap()),
    ] {
        let guard = mine.acquire().await.unwrap();
        assert!(others.try_acquire().await.unwrap().is_none());
        let waiting = waiter(&others);
        eventually("it waits", async || {
            mine.inspect().await.unwrap().waiters == Some(1)
        })
        .await;
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
        let next = granted(LONG, "passed on", waiting).await;
        next.release().await.unwrap();
    }

    let guard = lock.acquire().await.unwrap();
    assert_eq!(b.inspect("n").await.unwrap().holders.len(), 1);
    assert_eq!(
        b.list("").unwrap().next().await.unwrap().unwrap().name.as_str(),
        "n"
    );
    assert!(b.revoke_by_force("n", guard.token()).await.unwrap());
    guard.lost().await;

    // The new connection ends the one before it.
    proxy.set(Mode::HalfOpen);
    proxy.set(Mode::Pass);
    let guard = lock.acquire().await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(server.cli(&["ACL", "LOG"]).unwrap(), "", "nothing was refused");
}

/// Two callers that spell two servers differently take them in different orders.
#[tokio::test]
async fn two_spellings_of_a_server_lock_nobody_up() {
    if no_server() {
        return;
    }
    let servers = [RedisServer::plain().unwrap(), RedisServer::plain().unwrap()];
    let mut callers = Vec::new();
    for hosts in [["127.0.0.1", "localhost"], ["localhost", "127.0.0.1"]] {
        let mut locks = Vec::new();
        for (server, host) in servers.iter().zip(hosts) {
            let url = format!("redis://{host}:{}", server.addr().port());
            locks.push(client(&url).await.lock("n").unwrap());
        }
        callers.push(locks);
    }
    let firsts: Vec<_> = callers
        .iter()
        .map(|locks| locks[0].id() < locks[1].id())
        .collect();
    assert_eq!(firsts, [true, false]);
    let mut in_the_way = Vec::new();
    for server in &servers {
        let other = client(server.url()).await;
        in_the_way.push(other.lock("n").unwrap().acquire().await.unwrap());
    }
    let callers: Vec<_> = callers
        .into_iter()
        .map(|locks| {
            tokio::spawn(async move {
                let locks: Vec<_> = locks.iter().collect();
                acquire_all(&locks, &AcquireOptions::new()).await?.release().await
            })
        })
        .collect();
    // Each waits for another lock first, and is granted that.
    for server in &servers {
        waiters(server, "n", 1).await;
    }
    for guard in in_the_way {
        guard.release().await.unwrap();
    }
    for caller in callers {
        within(LONG, "both have them in turn", caller)
            .await
            .unwrap()
            .unwrap();
    }
}
