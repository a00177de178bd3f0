//! Lists by URL: each backend keeps its namespaces apart.

use lockkit::{LockClient, LockKind};
use lockkit_testbed::{
    mysql::{Flavour, MySql},
    postgres::{self, PgServer},
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

/// Holds one name of its own and one that all have in each of four namespaces of a server. Of two, one name is the beginning of the
/// other's, and one has no name.
async fn namespaces_are_apart(url: &str) {
    const OF_ALL: &str = "of all";
    let clients = [
        client(url, "a").await,
        client(url, "a.b").await,
        client(url, "ab").await,
        client(url, "").await,
    ];
    let names = ["one", "two", "three", "four"];
    let mut guards = Vec::new();
    for (client, own) in clients.iter().zip(names) {
        for name in [own, OF_ALL] {
            let lock = client.lock(name).unwrap();
            let granted = lock.try_acquire().await.unwrap();
            guards.push(granted.unwrap_or_else(|| panic!("{url}: another namespace has {name}")));
            assert!(lock.try_acquire().await.unwrap().is_none(), "{url}: {name} twice");
            if client.capabilities().permits {
                guards.push(client.semaphore(name, 2).unwrap().acquire().await.unwrap());
            }
        }
    }
    for (client, own) in clients.iter().zip(names) {
        let kinds = [LockKind::Lock, LockKind::Semaphore];
        let kinds = &kinds[..if client.capabilities().permits { 2 } else { 1 }];
        let mut expected: Vec<_> = [own, OF_ALL]
            .iter()
            .flat_map(|name| kinds.iter().map(|kind| ((*name).to_owned(), *kind)))
            .collect();
        expected.sort();
        assert_eq!(listed(client, "").await, expected, "{url}: {own}");
        for other in names.iter().filter(|other| **other != own) {
            assert_eq!(listed(client, other).await, [], "{url}: {other} of {own}");
        }
    }
    // Nobody releases another namespace's.
    let mut held = guards.len();
    for guard in guards {
        guard.release().await.unwrap();
        held -= 1;
        let mut shown = 0;
        for client in &clients {
            for (name, kind) in listed(client, "").await {
                let state = match kind {
                    LockKind::Semaphore => client.inspect_semaphore(&name).await.unwrap(),
                    LockKind::Lock => client.inspect(&name).await.unwrap(),
                };
                shown += state.holders.len();
            }
        }
        assert_eq!(shown, held, "{url}");
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

#[tokio::test]
async fn namespaces_on_postgresql_are_apart() {
    if skipped("postgres", postgres::missing()) {
        return;
    }
    let server = PgServer::plain().unwrap();
    namespaces_are_apart(&server.url()).await;
}
