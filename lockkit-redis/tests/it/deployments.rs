//! Masters under Sentinel, masters with replicas to wait for, and the ways to log in.

use std::time::Duration;

use lockkit_core::{AcquireOptions, FencingToken, LockClient, LossReason};
use lockkit_redis::RedisConfig;
use lockkit_testbed::{
    Proxy, eventually,
    redis::{RedisSentinels, RedisServer},
};

use crate::common::{
    AT_ONCE, LONG, MS, RECOVERED, SECOND, client, connect, granted, lock, no_server, nothing_is_left,
    renewed, requests_executed, shown, take, until, url_of, waiter, waiters, within,
};

/// The last sentinel is asked first.
pub(crate) fn sentinel_config(group: &RedisSentinels) -> RedisConfig {
    let sentinels = group.sentinels().iter().rev();
    let addrs: Vec<_> = sentinels.map(|sentinel| sentinel.addr().to_string()).collect();
    let mut config = RedisConfig::new(format!("redis://{}", addrs.join(",")));
    config.sentinel = Some(RedisSentinels::MASTER_NAME.to_owned());
    config
}

async fn sentinel_client(group: &RedisSentinels) -> LockClient {
    connect(sentinel_config(group)).await.unwrap()
}

/// All sentinels that answer call it the master, and so does it.
pub(crate) async fn master_is(group: &RedisSentinels, sentinels: &[RedisServer], server: &RedisServer) {
    let addr = server.addr().to_string();
    let ask = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", RedisSentinels::MASTER_NAME];
    let agreed = || {
        sentinels.iter().all(|sentinel| {
            sentinel
                .cli(&ask)
                .is_ok_and(|answer| answer.replace('\n', ":") == addr)
        }) && role(server) == "master"
            && group
                .servers()
                .iter()
                .filter(|server| role(server) == "master")
                .count()
                == 1
    };
    // Sentinels that missed each other's word repeat it, and take their time for that.
    until(4 * LONG, "all agree on the master", async || agreed()).await;
}

fn role(server: &RedisServer) -> String {
    let role = server.cli(&["ROLE"]).unwrap_or_default();
    role.lines().next().unwrap_or_default().to_owned()
}

/// In order, then by a crash while one of the sentinels is out of order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_follow_the_master_that_the_sentinels_name() {
    if no_server() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let (one, two) = (sentinel_client(&group).await, sentinel_client(&group).await);
    assert_eq!(lock(&one, "a", LONG).id(), lock(&two, "a", LONG).id());
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", LONG));
    let [first, second] = group.servers();
    waiters(second, "a", 1).await;

    group.fail_over().unwrap();
    master_is(&group, group.sentinels(), second).await;
    // The hold was replicated in time, and is checked at the new master.
    let before = requests_executed(second);
    until(LONG, "renewed at the new master", async || {
        held.check().unwrap();
        held.renew().await.is_ok() && requests_executed(second) > before
    })
    .await;
    assert!(!waiting.is_finished(), "PROMISE BROKEN: an overlap");
    let token = held.token();
    held.release().await.unwrap();
    let next = granted(LONG, "the waiter, at the new master", waiting).await;
    assert!(next.token() > token);

    // The new one crashes, and the sentinel that is asked first does not answer. It crashes when its replica has the
    // grant; what happens otherwise is a test of the guarantees.
    // A hold that was passed on has a short lease until it is renewed.
    next.renew().await.unwrap();
    let holder = second.cli(&["GET", "lockkit:a"]).unwrap();
    eventually("its replica knows who holds, and for how long", async || {
        let left = first.cli(&["PTTL", "lockkit:a"]).unwrap_or_default();
        left.parse().is_ok_and(|left: u64| left > 20_000)
            && first
                .cli(&["GET", "lockkit:a"])
                .is_ok_and(|known| known == holder)
    })
    .await;
    let token = next.token();
    group.sentinels()[2].pause().unwrap();
    second.kill().unwrap();
    master_is(&group, &group.sentinels()[..2], first).await;
    let before = requests_executed(first);
    until(LONG, "renewed at the new master", async || {
        next.check().unwrap();
        next.renew().await.is_ok() && requests_executed(first) > before
    })
    .await;
    // The other client may still be on its way to the new master.
    let other = lock(&one, "a", LONG);
    until(LONG, "an answer for the other client", async || {
        match other.try_acquire().await {
            Err(error) if error.is_transient() => false,
            answer => {
                assert!(answer.unwrap().is_none(), "PROMISE BROKEN: an overlap");
                true
            }
        }
    })
    .await;
    drop(next);
    let last = granted(LONG, "at the master that is left", waiter(&lock(&one, "a", LONG))).await;
    assert!(last.token() > token);
    last.release().await.unwrap();
    group.sentinels()[2].resume().unwrap();
}

/// Its master is dead, and it has heard nothing of that.
#[tokio::test]
async fn a_sentinel_that_is_behind_hides_no_other() {
    if no_server() {
        return;
    }
    let (stale, group) = (RedisSentinels::start().unwrap(), RedisSentinels::start().unwrap());
    for server in stale.servers() {
        server.kill().unwrap();
    }
    let behind = Proxy::start(stale.sentinels()[0].addr()).unwrap();
    let right = Proxy::start(group.sentinels()[0].addr()).unwrap();
    let mut config = RedisConfig::new(format!("redis://{},{}", behind.addr(), right.addr()));
    config.sentinel = Some(RedisSentinels::MASTER_NAME.to_owned());
    let client = within(LONG, "an answer", connect(config)).await.unwrap();
    take(&lock(&client, "a", LONG)).await;
    // The next time the one that was right is asked, and no other, unless a busy machine keeps it from answering.
    let asked = || (behind.counts().connections, right.counts().connections);
    let master = group.master().unwrap();
    let mut others = Vec::new();
    while others.last() != Some(&0) {
        assert!(others.len() < 10, "{others:?}");
        let before = asked();
        master.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
        eventually("connected again", async || {
            let channels = master
                .cli(&["PUBSUB", "CHANNELS", "lockkit:lockkit#client:*"])
                .unwrap();
            asked().1 > before.1 && !channels.is_empty()
        })
        .await;
        others.push(asked().0 - before.0);
    }
    let held = granted(LONG, "connected again", waiter(&lock(&client, "a", LONG))).await;
    held.release().await.unwrap();
}

/// Only the connection for the locks was replaced, and the master is another one.
#[tokio::test]
async fn both_connections_with_replicas_lead_to_one_master() {
    if no_server() {
        return;
    }
    let (old, new) = (RedisServer::plain().unwrap(), RedisServer::plain().unwrap());
    let mut replicas = Vec::new();
    for master in [&old, &new] {
        replicas.push(RedisServer::builder().replica_of(master.addr()).start().unwrap());
    }
    let proxy = Proxy::start(old.addr()).unwrap();
    let mut config = RedisConfig::new(url_of(&proxy));
    config.replicas = 1;
    config.replicas_timeout = SECOND;
    let client = connect(config).await.unwrap();
    let lock = lock(&client, "a", LONG);
    take(&lock).await;
    proxy.set_upstream(new.addr());
    // The one that has subscribed.
    old.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
    eventually("at the new master", async || {
        let channels = new
            .cli(&["PUBSUB", "CHANNELS", "lockkit:lockkit#client:*"])
            .unwrap();
        !channels.is_empty()
    })
    .await;
    let held = granted(RECOVERED, "both at the new master", waiter(&lock)).await;
    assert_eq!(new.cli(&["EXISTS", "lockkit:a"]).unwrap(), "1");
    assert_eq!(replicas[1].cli(&["EXISTS", "lockkit:a"]).unwrap(), "1");
    held.release().await.unwrap();
    nothing_is_left(&new, "released").await;
}

async fn replicated(master: &RedisServer, timeout: Duration) -> LockClient {
    let mut config = RedisConfig::new(master.url());
    config.replicas = 1;
    config.replicas_timeout = timeout;
    connect(config).await.unwrap()
}

#[tokio::test]
async fn tokens_are_raised_where_replicas_are_waited_for() {
    if no_server() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    let replica = RedisServer::builder().replica_of(master.addr()).start().unwrap();
    let client = replicated(&master, 200 * MS).await;
    // The replica is there once something was granted.
    take(&lock(&client, "a", LONG)).await;
    let above = FencingToken::new(client.fence().await.unwrap().get() + 3_600_000_000);
    let raised = client.raise_fence(above).await.unwrap();
    assert_eq!(raised, above);
    let at_the_replica = replica.cli(&["GET", "lockkit:lockkit#fence"]).unwrap();
    assert_eq!(at_the_replica, above.to_string());
    // Also where there is nothing to raise.
    client.raise_fence(FencingToken::new(1)).await.unwrap();
    let guard = lock(&client, "a", LONG).acquire().await.unwrap();
    assert!(guard.token() > above, "{} after {above}", guard.token());
    guard.release().await.unwrap();
    replica.pause().unwrap();
    let error = client.raise_fence(above).await.unwrap_err();
    assert!(shown(&error).contains("0 of 1 replicas"), "{}", shown(&error));
}

#[tokio::test]
async fn a_grant_that_too_few_replicas_acknowledge_is_refused() {
    if no_server() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    let replica = RedisServer::builder().replica_of(master.addr()).start().unwrap();
    let client = replicated(&master, 200 * MS).await;
    let other = self::client(master.url()).await;
    // It is there by the time it is granted.
    for _ in 0..20 {
        let guard = lock(&client, "a", LONG).acquire().await.unwrap();
        assert_eq!(replica.cli(&["EXISTS", "lockkit:a"]).unwrap(), "1");
        guard.release().await.unwrap();
    }
    let shared = lock(&client, "a", LONG).shared();
    take(&shared).await;
    // A hand-off does so, too.
    let held = lock(&other, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&client, "a", LONG));
    waiters(&master, "a", 1).await;
    replica.pause().unwrap();
    let waits = || {
        let counts = master.command_counts().unwrap();
        counts.get("wait").copied().unwrap_or(0)
    };
    let before = waits();
    held.release().await.unwrap();
    eventually("refused again and again", async || waits() >= before + 3).await;
    assert!(!waiting.is_finished());
    waiting.abort();
    nothing_is_left(&master, "a waiter that gave up").await;

    // The shortest lease ends before it is known that the replica does not answer.
    for ttl in [LONG, 100 * MS] {
        for lock in [lock(&client, "a", ttl), lock(&client, "a", ttl).shared()] {
            let error = lock.try_acquire().await.unwrap_err();
            let text = shown(&error);
            assert!(error.is_transient(), "{text}");
            // On a machine that is slow, the short one is over before that is known.
            let is_over = ttl < LONG && text.contains("was gone before replicas");
            assert!(text.contains("0 of 1 replicas") || is_over, "{text}");
            let error = lock.acquire_timeout(300 * MS).await.unwrap_err();
            assert!(error.is_transient(), "{}", shown(&error));
            nothing_is_left(&master, "a grant that was refused").await;
        }
    }
    // Nobody else is concerned.
    take(&lock(&other, "a", LONG)).await;
    replica.resume().unwrap();
    granted(
        LONG,
        "the replica follows again",
        waiter(&lock(&client, "a", LONG)),
    )
    .await
    .release()
    .await
    .unwrap();
    nothing_is_left(&master, "released").await;
}

/// Its master may be one that its sentinels have replaced.
#[tokio::test]
async fn a_renewal_counts_once_replicas_have_it() {
    if no_server() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    let replica = RedisServer::builder().replica_of(master.addr()).start().unwrap();
    let client = replicated(&master, 200 * MS).await;
    let ttl = 3 * SECOND;
    let held = lock(&client, "a", ttl).acquire().await.unwrap();
    renewed(&held).await;
    held.renew().await.unwrap();
    replica.pause().unwrap();
    let error = held.renew().await.unwrap_err();
    let text = shown(&error);
    assert!(error.is_transient() && text.contains("0 of 1 replicas"), "{text}");
    let reason = within(ttl + SECOND, "told", held.lost()).await;
    assert_eq!(reason, LossReason::Expired);
    replica.resume().unwrap();
    drop(held);
    let held = granted(
        LONG,
        "the replica follows again",
        waiter(&lock(&client, "a", ttl)),
    )
    .await;
    held.renew().await.unwrap();
    held.release().await.unwrap();
}

#[tokio::test]
async fn a_downgrade_without_replicas_prolongs_nothing() {
    if no_server() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    let replica = RedisServer::builder().replica_of(master.addr()).start().unwrap();
    let client = replicated(&master, 200 * MS).await;
    let options = AcquireOptions::new().ttl(10 * SECOND).renew(false);
    let held = lock(&client, "a", LONG).acquire_with(&options).await.unwrap();
    replica.pause().unwrap();
    let until = held.valid_until().unwrap();
    // A lease from then on would end later by this.
    tokio::time::sleep(200 * MS).await;
    let shared = held.downgrade().await.unwrap();
    let now_until = shared.valid_until().unwrap();
    assert!(now_until <= until, "longer by {:?}", now_until - until);
    replica.resume().unwrap();
    let has_renewed = async || shared.renew().await.is_ok();
    eventually("the replica follows again", has_renewed).await;
    assert!(shared.valid_until().unwrap() > until);
}

#[tokio::test]
async fn a_database_is_a_space_of_its_own() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (zero, three, other) = (
        client(server.url()).await,
        client(&format!("{}/3", server.url())).await,
        client(&format!("{}/3", server.url())).await,
    );
    assert_ne!(lock(&zero, "a", LONG).id(), lock(&three, "a", LONG).id());
    let here = lock(&zero, "a", LONG).acquire().await.unwrap();
    let there = lock(&three, "a", LONG).try_acquire().await.unwrap();
    let there = there.expect("another lock");
    assert!(lock(&other, "a", LONG).try_acquire().await.unwrap().is_none());
    // Channels are the same for all of them, wake-ups are not.
    let waiting = waiter(&lock(&other, "a", LONG));
    let queued = async || other.inspect("a").await.unwrap().waiters == Some(1);
    eventually("in its queue", queued).await;
    here.release().await.unwrap();
    // Its wake-up would come before the first reply, and its attempt before the second.
    for _ in 0..2 {
        assert!(queued().await);
    }
    assert!(!waiting.is_finished());
    there.release().await.unwrap();
    granted(AT_ONCE, "a push", waiting).await.release().await.unwrap();
    nothing_is_left(&server, "released").await;
    let databases = server.cli(&["INFO", "keyspace"]).unwrap();
    assert!(databases.contains("db3:"), "{databases}");
}

#[tokio::test]
async fn user_and_odd_password_are_taken_from_the_url() {
    const PASSWORD: &str = "p@ss/w:rd?#% ü";

    if no_server() {
        return;
    }
    let server = RedisServer::builder().password(PASSWORD).start().unwrap();
    let as_user = RedisServer::builder()
        .user("lock-er", PASSWORD, "~* &* +@all")
        .start()
        .unwrap();
    for server in [server, as_user] {
        let mut config = RedisConfig::new(server.url());
        config.namespace = String::new();
        let client = connect(config).await.unwrap();
        let guard = lock(&client, "a", LONG).acquire().await.unwrap();
        assert_eq!(server.cli(&["EXISTS", "a"]).unwrap(), "1");
        guard.release().await.unwrap();
        nothing_is_left(&server, "released").await;
    }
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn tls_trusts_the_authority_that_was_given_and_no_other() {
    use std::sync::Arc;

    use lockkit_testbed::Certificates;

    if no_server() {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let server = RedisServer::builder()
        .tls(&certificates)
        .password("open-sesame")
        .start()
        .unwrap();
    let mut config = RedisConfig::new(format!("{}/2", server.url()));
    config.ca = Some(certificates.authority().clone());
    let (one, two) = (
        connect(config.clone()).await.unwrap(),
        connect(config).await.unwrap(),
    );
    let held = lock(&one, "a", 6 * SECOND).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", 6 * SECOND));
    eventually("in the queue", async || {
        one.inspect("a").await.unwrap().waiters == Some(1)
    })
    .await;
    renewed(&held).await;
    held.release().await.unwrap();
    granted(AT_ONCE, "a push", waiting).await.release().await.unwrap();

    let strangers = Certificates::generate().unwrap();
    for ca in [None, Some(strangers.authority().clone())] {
        let mut config = RedisConfig::new(server.url());
        config.ca = ca;
        let error = connect(config).await.unwrap_err();
        let text = shown(&error);
        assert!(text.contains("ertificate") && !text.contains("sesame"), "{text}");
    }
    // Without TLS to a port that speaks it, and the other way round.
    let plain = RedisServer::plain().unwrap();
    for url in [
        server.url().replace("rediss:", "redis:"),
        plain.url().replace("redis:", "rediss:"),
    ] {
        let error = within(LONG, "an answer", connect(RedisConfig::new(url)))
            .await
            .unwrap_err();
        assert!(!shown(&error).contains("sesame"), "{}", shown(&error));
    }
}
