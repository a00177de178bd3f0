//! A backend takes the place of another under something that checks tokens, from each to each.

use lockkit::{Error, FenceGate, FencingToken, LockClient, MemoryBackend};
use lockkit_testbed::{
    etcd::{self, EtcdServer},
    mysql::{Flavour, MySql},
    postgres::{self, PgServer},
    redis::{self, RedisServer},
    skipped,
    zookeeper::{self, ZkServer},
};

const WRITES: usize = 20;

/// A deployment of each backend.
pub(crate) struct Deployments {
    pub(crate) urls: Vec<String>,
    _servers: (
        Vec<RedisServer>,
        ZkServer,
        MySql,
        PgServer,
        EtcdServer,
        tempfile::TempDir,
    ),
}

impl Deployments {
    pub(crate) fn start() -> Option<Self> {
        if skipped("redis", redis::missing())
            || skipped("zk", zookeeper::missing())
            || skipped("mysql", MySql::missing(Flavour::MariaDb))
            || skipped("postgres", postgres::missing())
            || skipped("etcd", etcd::missing())
        {
            return None;
        }
        let redis: Vec<_> = (0..4).map(|_| RedisServer::plain().unwrap()).collect();
        let zk = ZkServer::plain().unwrap();
        let mysql = MySql::start(Flavour::MariaDb, &[]).unwrap();
        let postgres = PgServer::plain().unwrap();
        let etcd = EtcdServer::plain().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let masters: Vec<_> = redis[1..]
            .iter()
            .map(|server| server.addr().to_string())
            .collect();
        let urls = vec![
            "memory:".to_owned(),
            format!("file://{}", dir.path().display()),
            redis[0].url().to_owned(),
            format!("redlock://{}", masters.join(",")),
            format!("zk://{}", zk.addr()),
            mysql.url(),
            format!("{}?mode=lease", mysql.url()),
            postgres.url(),
            etcd.url(),
        ];
        Some(Self {
            urls,
            _servers: (redis, zk, mysql, postgres, etcd, dir),
        })
    }
}

/// Tokens of other pairs are in other namespaces, as far as a backend keeps those apart.
async fn client(url: &str, namespace: &str) -> LockClient {
    if url == "memory:" {
        return LockClient::new(MemoryBackend::new());
    }
    let between = if url.contains('?') { '&' } else { '?' };
    let url = format!("{url}{between}namespace={namespace}");
    lockkit::connect(&url).await.unwrap()
}

/// Writes under the lock, and returns the last token.
async fn write(client: &LockClient, gate: &FenceGate, what: &str) -> FencingToken {
    let lock = client.lock("account").unwrap();
    let mut last = FencingToken::new(0);
    for write in 0..WRITES {
        let guard = lock.acquire().await.unwrap();
        last = guard.token();
        gate.admit(last)
            .unwrap_or_else(|stale| panic!("{what}, write {write}: {stale}"));
        guard.release().await.unwrap();
    }
    last
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_go_on_after_a_swap_from_each_to_each() {
    let Some(deployments) = tokio::task::block_in_place(Deployments::start) else {
        return;
    };
    let urls = &deployments.urls;
    let mut begun_anew = Vec::new();
    for (i, from) in urls.iter().enumerate() {
        for (j, to) in urls.iter().enumerate().filter(|(j, _)| *j != i) {
            let what = format!("from {from} to {to}");
            let namespace = format!("from-{i}-to-{j}");
            let (old, new) = (client(from, &namespace).await, client(to, &namespace).await);
            let mut gate = FenceGate::new();
            let late = write(&old, &gate, &what).await;
            let fence = match old.fence().await {
                Ok(fence) => fence,
                Err(Error::Unsupported { .. }) => gate.highest(),
                Err(error) => panic!("{what}: {error}"),
            };
            assert!(
                fence >= late,
                "{what}: the fence is {fence}, and {late} was granted"
            );
            match new.raise_fence(fence).await {
                Ok(raised) => assert!(raised >= fence, "{what}"),
                // Then what checks tokens begins anew.
                Err(Error::Unsupported { .. } | Error::InvalidOptions { .. }) => {
                    begun_anew.push((old.info().name, new.info().name));
                    gate = FenceGate::new();
                }
                Err(error) => panic!("{what}: {error}"),
            }
            let begins_anew = gate.highest() == FencingToken::new(0);
            let last = write(&new, &gate, &what).await;
            if !begins_anew {
                assert!(last > late, "{what}");
                assert!(
                    gate.admit(late).is_err(),
                    "{what}: a late write of the old one was admitted"
                );
            }
            for client in [old, new] {
                client.close(std::time::Duration::from_secs(10)).await.unwrap();
            }
        }
    }
    let cannot =
        |(from, to): &(&str, &str)| ["redlock", "file"].contains(to) || (*from, *to) == ("postgres", "redis");
    let wrong: Vec<_> = begun_anew.iter().filter(|pair| !cannot(pair)).collect();
    assert_eq!(wrong, Vec::<&(&str, &str)>::new(), "their tokens can be raised");
    assert_eq!(begun_anew.len(), 2 * (urls.len() - 1) + 1, "{begun_anew:?}");
}

/// What happens without it.
#[tokio::test]
async fn a_swap_to_lower_tokens_is_refused_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let old = client(&format!("file://{}", dir.path().display()), "a").await;
    let new = client("memory:", "a").await;
    let gate = FenceGate::new();
    let highest = write(&old, &gate, "before").await;
    let guard = new.lock("account").unwrap().acquire().await.unwrap();
    let stale = gate.admit(guard.token()).unwrap_err().to_string();
    assert!(
        stale.contains(&format!("lockkit fence raise --above {highest}")),
        "{stale}"
    );
    guard.release().await.unwrap();
    new.raise_fence(highest).await.unwrap();
    write(&new, &gate, "after").await;
}
