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
