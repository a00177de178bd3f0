//! Lists by URL: each backend keeps its namespaces apart.

use lockkit::{LockClient, LockKind};
use lockkit_testbed::{
    mysql::{Flavour, MySql},
    redis::{self, RedisServer},
    skipped,
    zookeeper::{self, ZkServer},
};

async fn client(url: &str, namespace: &str) -> LockClient {
    let between = if url.contains('?') { '&' } else { '?' };
    lockkit::connect(&format!("{url}{between}namespace={namespace}"))
        .await
        .unwrap()
}

async fn listed(client: &LockClient, prefix: &str) -> Vec<(String, LockKind)> {
    let mut list = client.list(prefix).unwrap();
    let mut found = Vec::new();
    while let Some(lock) = list.next().await {
        let lock = lock.unwrap();
        found.push((lock.name.as_str().to_owned(), lock.kind));
    }
    found.sort();
    found
}

/// Holds one name in three namespaces of a server of its own, one of which has no name.
async fn namespaces_are_apart(url: &str) {
    let clients = [
        client(url, "a").await,
        client(url, "a.b").await,
        client(url, "").await,
    ];
    let names = ["one", "two", "three"];
    let mut guards = Vec::new();
    for (client, name) in clients.iter().zip(names) {
        guards.push(client.lock(name).unwrap().acquire().await.unwrap());
        if client.capabilities().permits {
            guards.push(client.semaphore(name, 2).unwrap().acquire().await.unwrap());
        }
    }
    for (client, name) in clients.iter().zip(names) {
        let mut expected = vec![(name.to_owned(), LockKind::Lock)];
        if client.capabilities().permits {
            expected.push((name.to_owned(), LockKind::Semaphore));
        }
        assert_eq!(listed(client, "").await, expected, "{url}: {name}");
        for other in names.iter().filter(|other| **other != name) {
            assert_eq!(listed(client, other).await, [], "{url}: {other} of {name}");
        }
    }
    for guard in guards {
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn namespaces_in_memory_and_in_files_are_apart() {
    namespaces_are_apart("memory:").await;
    let dir = tempfile::tempdir().unwrap();
    namespaces_are_apart(&format!("file://{}", dir.path().display())).await;
}

#[tokio::test]
async fn namespaces_on_redis_are_apart() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let servers: Vec<_> = (0..3).map(|_| RedisServer::plain().unwrap()).collect();
    let client = client(servers[0].url(), "").await;
    // No lock of anybody, as far as one can see.
    servers[0].cli(&["SET", "three and more", "a value"]).unwrap();
    servers[0].cli(&["SET", "lockkit:lockkit#fence", "1"]).unwrap();
    assert_eq!(listed(&client, "").await, []);
    namespaces_are_apart(servers[0].url()).await;

    let masters = servers.iter().map(|server| server.addr().to_string());
    let url = format!("redlock://{}", masters.collect::<Vec<_>>().join(","));
    servers[0].cli(&["FLUSHALL"]).unwrap();
    namespaces_are_apart(&url).await;
}

#[tokio::test]
async fn namespaces_on_zookeeper_are_apart() {
    if skipped("zk", zookeeper::missing()) {
        return;
    }
    for nodes in ["mutex", "readwrite", "simple"] {
        let server = ZkServer::plain().unwrap();
        namespaces_are_apart(&format!("zk://{}?nodes={nodes}", server.addr())).await;
        let chroot = format!("zk://{}/chroot?nodes={nodes}", server.addr());
        namespaces_are_apart(&chroot).await;
    }
}

#[tokio::test]
async fn namespaces_in_a_database_are_apart() {
    if skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        return;
    }
    let server = MySql::start(Flavour::MariaDb, &[]).unwrap();
    for mode in ["for_update", "lease"] {
        namespaces_are_apart(&format!("{}?mode={mode}", server.url())).await;
    }
}
