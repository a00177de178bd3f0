//! Corners of the protocol and of the connection, each of which was wrong once.

use std::time::Duration;

use lockkit_core::{AcquireOptions, Error, LockClient, LockGuard, Result};
use lockkit_redis::{RedisBackend, RedisConfig};
use lockkit_testbed::{
    Mode, Proxy,
    redis::{self, RedisSentinels, RedisServer},
    skipped,
};
use tokio::{task::JoinHandle, time::Instant};

const PATIENCE: Duration = Duration::from_secs(20);

fn no_redis() -> bool {
    skipped("redis", redis::missing())
}

async fn client(config: RedisConfig) -> LockClient {
    LockClient::new(RedisBackend::connect(config).await.unwrap())
}

async fn client_of(server: &RedisServer) -> LockClient {
    client(RedisConfig::new(server.url())).await
}

async fn client_through(proxy: &Proxy) -> LockClient {
    client(RedisConfig::new(format!("redis://{}", proxy.addr()))).await
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn waiting(client: &LockClient) -> JoinHandle<Result<LockGuard>> {
    let lock = client.lock("n").unwrap();
    tokio::spawn(async move { lock.acquire().await })
}

async fn until_queued(server: &RedisServer, waiters: &str) {
    until("it is queued", || {
        server.cli(&["ZCARD", "lockkit#queue:{lockkit:n}"]).unwrap() == waiters
    })
    .await;
}

#[tokio::test]
async fn whoever_is_next_is_told_when_the_head_goes_away_under_a_foreign_hold() {
    if no_redis() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    server
        .cli(&["SET", "lockkit:n", "foreign", "PX", "600000"])
        .unwrap();
    let (a, b) = (client_of(&server).await, client_of(&server).await);
    let first = waiting(&a);
    until_queued(&server, "1").await;
    let second = waiting(&b);
    until_queued(&server, "2").await;
    first.abort();
    until_queued(&server, "1").await;
    // Nobody says a word about this.
    server.cli(&["DEL", "lockkit:n"]).unwrap();
    let asked = Instant::now();
    let _guard = second.await.unwrap().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
}

#[tokio::test]
async fn a_try_takes_a_free_lock_although_somebody_in_the_queue_is_cut_off() {
    if no_redis() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let holder = client_of(&server).await;
    let guard = holder.lock("n").unwrap().acquire().await.unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let cut_off = client_through(&proxy).await;
    let waiter = waiting(&cut_off);
    until("it is said to be alive", || {
        !server.cli(&["KEYS", "lockkit#client:*"]).unwrap().is_empty()
    })
    .await;
    proxy.set(Mode::Refuse);
    proxy.reset();
    until("the server has noticed", || {
        server
            .cli(&["PUBSUB", "CHANNELS", "lockkit#client:*"])
            .unwrap()
            .lines()
            .count()
            == 1
    })
    .await;
    guard.release().await.unwrap();
    let taken = client_of(&server)
        .await
        .lock("n")
        .unwrap()
        .try_acquire()
        .await
        .unwrap();
    let guard = taken.expect("nobody has it");
    // Its place is kept.
    proxy.set(Mode::Pass);
    until("it is back", || {
        server
            .cli(&["PUBSUB", "CHANNELS", "lockkit#client:*"])
            .unwrap()
            .lines()
            .count()
            == 3
    })
    .await;
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_long_way_to_the_server_is_no_reason_not_to_connect() {
    if no_redis() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let way = Duration::from_millis(100);
    proxy.set(Mode::Delay {
        requests: way,
        replies: way,
    });
    let client = client_through(&proxy).await;
    client
        .lock("n")
        .unwrap()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test]
async fn sentinels_need_not_know_the_user_of_the_master() {
    if no_redis() {
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
    let client = client(config).await;
    client
        .lock("n")
        .unwrap()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let users = group.master().unwrap().cli(&["CLIENT", "LIST"]).unwrap();
    assert!(users.contains("user=locker"), "{users}");
}

async fn refused_for_want_of_replicas(ttl: Duration, within: Duration) -> Error {
    let server = RedisServer::plain().unwrap();
    let mut config = RedisConfig::new(server.url());
    config.replicas = 1;
    config.replicas_timeout = within;
    let client = client(config).await;
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
    if no_redis() {
        return;
    }
    let error = refused_for_want_of_replicas(Duration::from_secs(30), Duration::from_secs(4)).await;
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("0 of 1 replicas"), "{error}: {cause}");
}

#[tokio::test]
async fn a_lease_that_runs_out_while_replicas_are_waited_for_is_a_failure_and_no_loss() {
    if no_redis() {
        return;
    }
    let error = refused_for_want_of_replicas(Duration::from_millis(200), Duration::from_millis(500)).await;
    assert!(error.is_transient() && !error.is_lost(), "{error:?}");
}

#[tokio::test]
async fn requests_on_a_silent_connection_are_not_waited_for_once_there_is_another() {
    if no_redis() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let proxy = Proxy::start(server.addr()).unwrap();
    let client = client_through(&proxy).await;
    let options = AcquireOptions::new()
        .op_timeout(Duration::from_secs(600))
        .ttl(Duration::from_secs(600));
    let guard = client.lock("n").unwrap().acquire_with(&options).await.unwrap();
    proxy.set(Mode::HalfOpen);
    proxy.set(Mode::Pass);
    let released = tokio::time::timeout(PATIENCE, guard.release())
        .await
        .expect("an answer");
    assert!(released.unwrap_err().is_transient());
    until("it is released all the same", || {
        server.cli(&["EXISTS", "lockkit:n"]).unwrap() == "0"
    })
    .await;
}

#[tokio::test]
async fn holds_are_renewed_and_released_also_when_memory_is_full() {
    if no_redis() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client_of(&server).await;
    let shared = client.lock("n").unwrap().shared().acquire().await.unwrap();
    let permit = client.semaphore("n", 2).unwrap().acquire().await.unwrap();
    let exclusive = client.lock("waited for").unwrap().acquire().await.unwrap();
    let other = client_of(&server).await;
    let waiter = tokio::spawn({
        let lock = other.lock("waited for").unwrap();
        async move { lock.acquire().await }
    });
    until("it is queued", || {
        server
            .cli(&["ZCARD", "lockkit#queue:{lockkit:waited for}"])
            .unwrap()
            == "1"
    })
    .await;
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]).unwrap();
    let error = client.lock("other").unwrap().try_acquire().await.unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("maxmemory"), "{cause}");
    shared.renew().await.unwrap();
    permit.renew().await.unwrap();
    exclusive.renew().await.unwrap();
    shared.release().await.unwrap();
    permit.release().await.unwrap();
    exclusive.release().await.unwrap();
    let passed_on = tokio::time::timeout(PATIENCE, waiter).await.expect("the lock");
    passed_on.unwrap().unwrap().release().await.unwrap();
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
    if no_redis() {
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
    let with_replicas = client(config.clone()).await;
    let refused = with_replicas.lock("n").unwrap().try_acquire().await.unwrap_err();
    let cause = std::error::Error::source(&refused).unwrap().to_string();
    assert!(cause.contains("0 of 1 replicas"), "{cause}");

    config.replicas = 0;
    let (a, b) = (client(config.clone()).await, client(config).await);
    let lock = a.lock("n").unwrap();
    for (mine, others) in [
        (lock.clone(), b.lock("n").unwrap()),
        (lock.shared(), b.lock("n").unwrap()),
        (lock.clone(), b.lock("n").unwrap().shared()),
        (a.semaphore("n", 1).unwrap(), b.semaphore("n", 1).unwrap()),
    ] {
        let guard = mine.acquire().await.unwrap();
        assert!(others.try_acquire().await.unwrap().is_none());
        let waiter = tokio::spawn(async move { others.acquire().await });
        let deadline = Instant::now() + PATIENCE;
        while mine.inspect().await.unwrap().waiters != Some(1) {
            assert!(Instant::now() < deadline, "it waits");
        }
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
        waiter.await.unwrap().unwrap().release().await.unwrap();
    }

    let guard = lock.acquire().await.unwrap();
    assert_eq!(b.inspect("n").await.unwrap().holders.len(), 1);
    assert!(b.revoke("n", guard.token()).await.unwrap());
    guard.lost().await;

    // The new connection ends the one before it.
    proxy.set(Mode::HalfOpen);
    proxy.set(Mode::Pass);
    let guard = lock.acquire().await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(server.cli(&["ACL", "LOG"]).unwrap(), "", "nothing was refused");
}
