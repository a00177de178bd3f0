//! Clients that hear of a new master from its sentinels while the former one still answers them.

use std::time::Instant;

use lockkit_core::LockGuard;
use lockkit_testbed::{
    Proxy, eventually,
    redis::{RedisSentinels, RedisServer},
};
use tokio::time::sleep;

use crate::{
    common::{LONG, MS, SECOND, connect, granted, lock, no_server, shown, until, waiter, within},
    deployments::{master_is, sentinel_config},
};

/// Starts a group whose sentinels leave a former master alone for 8 s, as they do outside of tests.
fn patient_group() -> RedisSentinels {
    let group = RedisSentinels::start().unwrap();
    for sentinel in group.sentinels() {
        let _ = sentinel.cli(&["SENTINEL", "DEBUG", "PUBLISH-PERIOD", "2000"]);
    }
    group
}

/// Returns the end of the lease of `name` at this server, whose reply takes no time.
fn lease_end(server: &RedisServer, name: &str) -> Option<Instant> {
    let left = server.cli(&["PTTL", &format!("lockkit:{name}")]).ok()?;
    let left = left.parse().ok()?;
    Some(Instant::now() + std::time::Duration::from_millis(left))
}

/// Waits until the replica has the hold `name`.
async fn replicated(server: &RedisServer, name: &str) {
    eventually("the replica has it", async || lease_end(server, name).is_some()).await;
}

/// Waits until the present lease of `name` at this server has been renewed.
async fn renewed_at(server: &RedisServer, name: &str, before: Instant) {
    until(SECOND, "renewed at the new master", async || {
        lease_end(server, name).is_some_and(|end| end > before + SECOND / 2)
    })
    .await;
}

/// Takes away from the replica what the master has granted, as if it had not been there in time.
async fn forgotten_by(replica: &RedisServer, name: &str) {
    replicated(replica, name).await;
    replica
        .cli(&["CONFIG", "SET", "replica-read-only", "no"])
        .unwrap();
    replica.cli(&["DEL", &format!("lockkit:{name}")]).unwrap();
    replica
        .cli(&["CONFIG", "SET", "replica-read-only", "yes"])
        .unwrap();
}

async fn told(guard: &LockGuard) {
    within(SECOND, "told", guard.lost()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planned_failover_tells_a_holder_within_a_second() {
    if no_server() {
        return;
    }
    let group = patient_group();
    let [_, second] = group.servers();
    let client = connect(sentinel_config(&group)).await.unwrap();
    let kept = lock(&client, "kept", LONG).acquire().await.unwrap();
    let forgotten = lock(&client, "forgotten", LONG).acquire().await.unwrap();
    replicated(second, "kept").await;
    forgotten_by(second, "forgotten").await;
    let before = lease_end(second, "kept").unwrap();

    group.fail_over().unwrap();
    told(&forgotten).await;
    renewed_at(second, "kept", before).await;
    kept.check().unwrap();
    kept.release().await.unwrap();
}

/// The first sentinel to be asked does not answer from before the fail-over on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_sentinel_hides_no_failover() {
    if no_server() {
        return;
    }
    let group = patient_group();
    let [_, second] = group.servers();
    let client = connect(sentinel_config(&group)).await.unwrap();
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    let asked_first = &group.sentinels()[2];
    eventually("subscribed", async || subscribers(asked_first) == 1).await;
    asked_first.pause().unwrap();
    eventually("at another sentinel", async || {
        group.sentinels()[..2].iter().map(subscribers).sum::<usize>() == 1
    })
    .await;
    forgotten_by(second, "a").await;
    group.fail_over().unwrap();
    told(&held).await;
    asked_first.resume().unwrap();
}

/// Counts the clients that hear of the sentinel's events.
fn subscribers(sentinel: &RedisServer) -> usize {
    let clients = sentinel.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]).unwrap();
    clients.lines().count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planned_failover_costs_waiters_a_second() {
    if no_server() {
        return;
    }
    let group = patient_group();
    let [first, second] = group.servers();
    // It follows whichever is the master, and is none itself.
    let _follower = RedisServer::builder()
        .replica_of(first.addr())
        .directive("replica-priority", &["0"])
        .start()
        .unwrap();
    for sentinel in group.sentinels() {
        eventually("both replicas are known", async || {
            let known = sentinel.cli(&["SENTINEL", "MASTER", RedisSentinels::MASTER_NAME]);
            known.is_ok_and(|known| known.contains("num-slaves\n2"))
        })
        .await;
    }
    let mut config = sentinel_config(&group);
    config.replicas = 1;
    let client = connect(config).await.unwrap();
    let lock = lock(&client, "a", LONG);
    lock.acquire().await.unwrap().release().await.unwrap();

    group.fail_over().unwrap();
    eventually("the follower follows it", async || {
        let replicas = second.cli(&["INFO", "replication"]);
        replicas.is_ok_and(|replicas| replicas.contains("state=online"))
    })
    .await;
    until(SECOND, "granted at the new master", async || {
        match lock.acquire_timeout(SECOND).await {
            Ok(guard) => {
                // The former one may have granted in the last moment.
                let is_there = lease_end(second, "a").is_some();
                let released = guard.release().await;
                is_there && released.is_ok()
            }
            Err(error) => {
                assert!(error.is_transient(), "{}", shown(&error));
                false
            }
        }
    })
    .await;
}

/// The former master confirms releases until its clients hear that it was replaced.
#[tokio::test]
async fn what_is_released_in_a_planned_failover_is_free_after_it() {
    const NAMES: usize = 40;

    if no_server() {
        return;
    }
    let group = patient_group();
    let [first, second] = group.servers();
    let client = connect(sentinel_config(&group)).await.unwrap();
    let mut held = Vec::new();
    for n in 0..NAMES {
        held.push(lock(&client, &n.to_string(), LONG).acquire().await.unwrap());
    }
    eventually("the replica has them", async || {
        (0..NAMES).all(|n| lease_end(second, &n.to_string()).is_some())
    })
    .await;
    group.fail_over().unwrap();
    let (mut at_the_former, mut released) = (0, Vec::new());
    for (n, guard) in held.into_iter().enumerate() {
        let was_there = lease_end(first, &n.to_string()).is_some();
        if guard.release().await.is_ok() {
            released.push(n);
            at_the_former += usize::from(was_there && lease_end(first, &n.to_string()).is_none());
        }
        sleep(50 * MS).await;
    }
    assert!(at_the_former > 0, "none was released at the former master");
    until(10 * SECOND, "all that was released is free", async || {
        released
            .iter()
            .all(|n| lease_end(second, &n.to_string()).is_none())
    })
    .await;
}

/// A claim whose grant too few replicas had goes on with the owner that it has released.
#[tokio::test]
async fn a_grant_after_a_refused_one_outlives_a_reconnection() {
    if no_server() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let [first, second] = group.servers();
    let mut config = sentinel_config(&group);
    config.replicas = 1;
    config.replicas_timeout = 200 * MS;
    let client = connect(config).await.unwrap();
    let lock = lock(&client, "a", LONG);
    lock.acquire().await.unwrap().release().await.unwrap();
    let waits = || first.command_counts().unwrap().get("wait").copied().unwrap_or(0);
    let before = waits();
    second.pause().unwrap();
    let waiting = waiter(&lock);
    eventually("refused", async || waits() >= before + 2).await;
    second.resume().unwrap();
    let guard = granted(LONG, "the replica is there again", waiting).await;
    first.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
    eventually("connected again", async || {
        let channels = first.cli(&["PUBSUB", "CHANNELS", "lockkit:lockkit#client:*"]);
        channels.is_ok_and(|channels| !channels.is_empty())
    })
    .await;
    for _ in 0..20 {
        assert!(
            lease_end(first, "a").is_some() && guard.is_held(),
            "PROMISE BROKEN: a hold was released that its holder has"
        );
        sleep(100 * MS).await;
    }
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_client_that_is_gone_leaves_its_sentinel() {
    if no_server() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let subscribed = || group.sentinels().iter().map(subscribers).sum::<usize>();
    for close in [false, true] {
        let client = connect(sentinel_config(&group)).await.unwrap();
        eventually("subscribed", async || subscribed() == 1).await;
        if close {
            client.close(LONG).await.unwrap();
        } else {
            drop(client);
        }
        eventually("gone", async || subscribed() == 0).await;
    }
}

/// It answers alone, since the others stand still, and names a server that it takes for the master. A client that goes there has its
/// locks granted to others, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_is_behind_leads_nobody_back() {
    if no_server() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    group.fail_over().unwrap();
    master_is(&group, group.sentinels(), &group.servers()[1]).await;
    // It answers as a former master does, and nobody tells the one that watches it of the fail-over.
    let former = RedisServer::plain().unwrap();
    let behind = RedisSentinels::on_its_own(former.addr()).unwrap();
    let asked = Proxy::start(behind.addr()).unwrap();
    let mut config = sentinel_config(&group);
    config.url = format!("{},{}", &*config.url, asked.addr()).into();
    let client = connect(config).await.unwrap();
    let held = lock(&client, "a", 6 * SECOND).acquire().await.unwrap();
    for sentinel in group.sentinels() {
        sentinel.pause().unwrap();
    }
    let before = asked.counts().connections;
    until(LONG, "it is asked, more than once", async || {
        asked.counts().connections > before + 1
    })
    .await;
    held.renew().await.unwrap();
    assert!(lease_end(&former, "a").is_none(), "it went to the former master");
    for sentinel in group.sentinels() {
        sentinel.resume().unwrap();
    }
    held.release().await.unwrap();
}
