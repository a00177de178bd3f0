//! The servers that most tests share, and helpers.

use std::time::{Duration, Instant};

use lockkit_core::{AcquireOptions, Lock, LockClient, LockGuard, LossReason, Result};
use lockkit_etcd::{Credentials, EtcdBackend, EtcdConfig};
pub(crate) use lockkit_testbed::soon;
use lockkit_testbed::{
    Shared,
    etcd::{self, EtcdCluster, EtcdServer},
    eventually,
};
use tokio::task::JoinHandle;

/// The election timeout of a server by itself, which grants leases from a second on.
pub(crate) const ELECTION: Duration = Duration::from_millis(500);

static SERVER: Shared<EtcdServer> = Shared::new(|| {
    let server = EtcdServer::builder().election_timeout(ELECTION).start();
    server.expect("an etcd server")
});

static CLUSTER: Shared<EtcdCluster> = Shared::new(|| {
    // Elections as they are by default, so that a busy machine has none.
    EtcdCluster::start().expect("an etcd cluster")
});

/// Returns the server that is never killed, paused or cut off.
pub(crate) fn shared() -> &'static EtcdServer {
    &SERVER
}

/// Returns the cluster that is never touched.
pub(crate) fn shared_cluster() -> &'static EtcdCluster {
    &CLUSTER
}

/// There is no server for the test, which is skipped.
pub(crate) fn no_etcd() -> bool {
    lockkit_testbed::skipped("etcd", etcd::missing())
}

/// Configures a client of the servers that such a URL of the test bed names: `etcd://user:password@host:port,host:port`.
pub(crate) fn config(url: &str) -> EtcdConfig {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let (user, servers) = rest
        .rsplit_once('@')
        .map_or((None, rest), |(user, servers)| (Some(user), servers));
    let mut config = EtcdConfig::new(servers);
    config.auth = user
        .and_then(|user| user.split_once(':'))
        .map(|(user, password)| Credentials::new(user, password));
    config
}

pub(crate) async fn client(config: EtcdConfig) -> Result<LockClient> {
    Ok(LockClient::new(EtcdBackend::connect(config).await?))
}

/// Connects to the servers that a URL names, which may be just coming up.
pub(crate) async fn connect(url: &str) -> LockClient {
    patiently(config(url)).await
}

pub(crate) async fn patiently(config: EtcdConfig) -> LockClient {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        match client(config.clone()).await {
            Err(error) if error.is_transient() && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            outcome => return outcome.expect("a connection"),
        }
    }
}

/// Returns the lock `name`, with a ttl that lasts on a machine that stands still now and then.
pub(crate) fn lock(client: &LockClient, name: &str) -> Lock {
    with_ttl(client, name, Duration::from_secs(20))
}

/// Returns the lock `name` with this ttl. A test that has nothing to wait for fails, and hangs not for ever.
pub(crate) fn with_ttl(client: &LockClient, name: &str, ttl: Duration) -> Lock {
    let options = AcquireOptions::new().ttl(ttl).wait(Duration::from_secs(60));
    client.lock(name).expect("a good name").with_options(options)
}

/// Returns a lock name that no other test uses.
pub(crate) fn unique(test: &str) -> String {
    format!("{test}-{:016x}", fastrand::u64(..))
}

/// Returns the prefix of the keys for the lock `name`, which needs no escaping.
pub(crate) fn queue(name: &str) -> String {
    format!("lockkit/{name}/")
}

/// Acquires in a task of its own.
pub(crate) fn waiter(lock: &Lock) -> JoinHandle<(LockGuard, Instant)> {
    let lock = lock.clone();
    tokio::spawn(async move {
        let guard = lock.acquire().await.expect("granted in the end");
        (guard, Instant::now())
    })
}

/// Notes when and how a hold is lost.
pub(crate) fn watcher(guard: &LockGuard) -> JoinHandle<(LossReason, Instant)> {
    let lost = guard.lost();
    tokio::spawn(async move { (lost.await, Instant::now()) })
}

/// Returns the keys of those who contend for `name`.
pub(crate) fn keys(server: &EtcdServer, name: &str) -> Vec<String> {
    server.keys(&queue(name)).expect("the keys")
}

/// Waits until so many contend for `name`.
pub(crate) async fn contend(server: &EtcdServer, name: &str, many: usize) {
    eventually(&format!("{many} contend for {name}"), async || {
        keys(server, name).len() == many
    })
    .await;
}

/// Waits for the grant of a waiter, and releases it.
pub(crate) async fn takes_its_turn(what: &str, waiter: JoinHandle<(LockGuard, Instant)>) {
    let (guard, _) = soon(what, waiter).await.unwrap();
    guard.release().await.unwrap();
}

/// Returns how often a test repeats itself: `usually`, or as often as `LOCKKIT_ROUNDS` says.
pub(crate) fn rounds(usually: usize) -> usize {
    let rounds = std::env::var("LOCKKIT_ROUNDS").ok();
    rounds.and_then(|rounds| rounds.parse().ok()).unwrap_or(usually)
}

/// Does what blocks, such as a command to a server, beside the other tasks.
pub(crate) fn block<T>(work: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(work)
}
