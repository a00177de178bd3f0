//! The server that most tests share, and helpers.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{AcquireOptions, Lock, LockClient, LockGuard, LossReason, Result};
pub(crate) use lockkit_testbed::soon;
use lockkit_testbed::{
    Shared, eventually,
    zookeeper::{self, ZkServer},
};
use lockkit_zk::{ZkBackend, ZkConfig};
use tokio::task::JoinHandle;
use zookeeper_client::{Acls, Client, CreateMode, Error as ZkError};

/// The session timeout of tests in which a session expires, or could.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);

/// The session timeout of the other tests. It is long enough for a machine that stands still now and then.
const LASTING: Duration = Duration::from_secs(10);

/// The tick that goes with [`LASTING`], ten times the servers'. A silent server may have granted five ticks, and a server that
/// is just coming up on a busy machine is silent for half a second.
pub(crate) const LEISURE: Duration = Duration::from_secs(1);

/// The least time for which the machine has to stand still to excuse an attempt that saw nothing.
const STILL: Duration = Duration::from_millis(300);

static SERVER: Shared<ZkServer> = Shared::new(|| ZkServer::plain().expect("a ZooKeeper server"));

/// Returns the server that is never killed, paused or cut off.
pub(crate) fn shared() -> &'static ZkServer {
    &SERVER
}

/// There is no server for the test, which is skipped.
pub(crate) fn no_zookeeper() -> bool {
    lockkit_testbed::skipped("zk", zookeeper::missing())
}

/// Configures a client of the servers at `addrs`, with sessions that last on a machine that stands still now and then.
pub(crate) fn config(addrs: impl Display) -> ZkConfig {
    let mut config = ZkConfig::new(format!("{addrs}"));
    (config.session_timeout, config.tick_time) = (LASTING, LEISURE);
    config
}

/// Configures a client whose sessions expire after [`TIMEOUT`], with the servers' own tick.
pub(crate) fn brief(addrs: impl Display) -> ZkConfig {
    let mut config = config(addrs);
    (config.session_timeout, config.tick_time) = (TIMEOUT, ZkServer::TICK);
    config
}

/// Makes an attempt to see something. An attempt that says why there was nothing to see is made again, a few times, as long
/// as the machine stood still meanwhile.
pub(crate) async fn unless_still<T>(mut attempt: impl AsyncFnMut() -> std::result::Result<T, String>) -> T {
    let mut left = 5;
    loop {
        let watch = Stopwatch::start();
        let why = match attempt().await {
            Ok(seen) => return seen,
            Err(why) => why,
        };
        let still = watch.stood_still();
        left -= 1;
        assert!(
            still >= STILL && left > 0,
            "{why}; the machine stood still for {still:?}"
        );
        eprintln!("once more, since the machine stood still for {still:?}: {why}");
    }
}

pub(crate) async fn client(config: ZkConfig) -> Result<LockClient> {
    Ok(LockClient::new(ZkBackend::connect(config).await?))
}

/// Connects to the server at `addrs`, which may be just coming up.
pub(crate) async fn connect(addrs: impl Display) -> LockClient {
    patiently(config(addrs)).await
}

/// Connects as [`only_connected`], and has had a lock by then. Its first acquisition makes more than later ones.
pub(crate) async fn patiently(config: ZkConfig) -> LockClient {
    let client = only_connected(config).await;
    let first = lock(&client, &unique("first"));
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        match first.acquire().await {
            Err(error) if error.is_transient() && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            outcome => {
                // If the reply is lost, its client asks again.
                let _ = outcome.expect("a lock").release().await;
                return client;
            }
        }
    }
}

/// Connects to servers that may be just coming up.
pub(crate) async fn only_connected(config: ZkConfig) -> LockClient {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        match client(config.clone()).await {
            Err(error) if error.is_transient() && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            outcome => return outcome.expect("a session"),
        }
    }
}

/// Connects with a session that expires after [`TIMEOUT`] when it is cut off.
pub(crate) async fn brief_client(addrs: impl Display) -> LockClient {
    patiently(brief(addrs)).await
}

/// Returns the lock `name`, with a ttl that is longer than any session. A test that has nothing to wait for fails, and hangs not for ever.
pub(crate) fn lock(client: &LockClient, name: &str) -> Lock {
    let minute = Duration::from_secs(60);
    let options = AcquireOptions::new().ttl(minute).wait(minute);
    client.lock(name).expect("a good name").with_options(options)
}

/// Returns a lock name that no other test uses.
pub(crate) fn unique(test: &str) -> String {
    format!("{test}-{:016x}", fastrand::u64(..))
}

/// Connects without lockkit, as any other client may.
pub(crate) async fn raw(addrs: impl Display) -> Client {
    let connector = Client::connector().with_session_timeout(Duration::from_secs(30));
    connector.connect(&addrs.to_string()).await.expect("a session")
}

/// Returns the directory of the lock `name`, which needs no escaping.
pub(crate) fn dir(name: &str) -> String {
    format!("/lockkit/{name}")
}

pub(crate) async fn children(raw: &Client, name: &str) -> Vec<String> {
    raw.sync("/").await.expect("synced");
    match raw.list_children(&dir(name)).await {
        Ok(children) => children,
        Err(ZkError::NoNode) => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

/// Makes the node of another contender, as another client would.
pub(crate) async fn contender(raw: &Client, dir: &str, prefix: &str) -> String {
    let everyone = Acls::anyone_all();
    let container = CreateMode::Container.with_acls(everyone);
    let prefix = format!("{dir}/{prefix}");
    let options = CreateMode::EphemeralSequential.with_acls(everyone);
    loop {
        raw.mkdir(dir, &container).await.expect("a directory");
        match raw.create(&prefix, b"10.0.0.7", &options).await {
            Ok((_, sequence)) => return format!("{prefix}{sequence}"),
            // The server has removed the empty container in between.
            Err(ZkError::NoNode) => {}
            Err(error) => panic!("a node: {error}"),
        }
    }
}

/// Waits until so many contend for `name`.
pub(crate) async fn contend(raw: &Client, name: &str, many: usize) {
    eventually(&format!("{many} contend for {name}"), async || {
        children(raw, name).await.len() == many
    })
    .await;
}

/// Makes so many nodes of another client in the queue for `name`.
pub(crate) async fn queue_up(raw: &Client, name: &str, many: usize) -> Vec<String> {
    let mut paths = Vec::new();
    for i in 0..many {
        let prefix = format!("_c_0b1fdd6a-8b6c-4d0e-9f43-{i:012}-lock-");
        paths.push(contender(raw, &dir(name), &prefix).await);
    }
    paths
}

/// Returns the paths of the contenders for `name`, in the order of the queue.
pub(crate) async fn in_order(raw: &Client, name: &str) -> Vec<String> {
    let mut nodes = children(raw, name).await;
    nodes.sort_unstable_by_key(|node| node[node.len() - 10..].to_owned());
    nodes.iter().map(|node| format!("{}/{node}", dir(name))).collect()
}

/// Has a client find several before it at its lock `name`, which nobody else uses. It then expects as many the next time.
pub(crate) async fn expects_several(raw: &Client, lock: &Lock, name: &str) {
    let several = queue_up(raw, name, 2).await;
    let waiting = waiter(lock);
    contend(raw, name, 3).await;
    for path in several {
        raw.delete(&path, None).await.expect("it is there");
    }
    takes_its_turn("they have gone", waiting).await;
    contend(raw, name, 0).await;
}

/// The number of watches of contenders. Each session that was ever granted something watches whether tokens are raised, besides.
pub(crate) fn watches(server: &ZkServer) -> usize {
    let watched = server.watched().unwrap().into_iter();
    let besides = watched.filter(|(path, _)| path.ends_with("/%fence"));
    let besides: usize = besides.map(|(_, sessions)| sessions).sum();
    let all = usize::try_from(server.figure("zk_watch_count").unwrap()).unwrap();
    all - besides.min(all)
}

/// Acquires in a task of its own.
pub(crate) fn waiter(lock: &Lock) -> JoinHandle<(LockGuard, Instant)> {
    let lock = lock.clone();
    tokio::spawn(async move {
        let guard = lock.acquire().await.expect("granted in the end");
        (guard, Instant::now())
    })
}

/// Waits for the grant of a waiter, and releases it.
pub(crate) async fn takes_its_turn(what: &str, waiter: JoinHandle<(LockGuard, Instant)>) {
    let (guard, _) = soon(what, waiter).await.unwrap();
    guard.release().await.unwrap();
}

/// Notes when and how a hold is lost.
pub(crate) fn watcher(guard: &LockGuard) -> JoinHandle<(LossReason, Instant)> {
    let lost = guard.lost();
    tokio::spawn(async move { (lost.await, Instant::now()) })
}

/// Returns how often a test repeats itself: `usually`, or as often as `LOCKKIT_ROUNDS` says.
pub(crate) fn rounds(usually: usize) -> usize {
    let rounds = std::env::var("LOCKKIT_ROUNDS").ok();
    rounds.and_then(|rounds| rounds.parse().ok()).unwrap_or(usually)
}
