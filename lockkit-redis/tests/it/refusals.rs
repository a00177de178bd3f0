//! Refusals of the server, and servers that cannot be used: errors are clear, and without secrets.

use lockkit_core::{AcquireOptions, Error, LossReason};
use lockkit_redis::RedisConfig;
use lockkit_testbed::{
    Port, Proxy, eventually,
    redis::{RedisCluster, RedisSentinels, RedisServer},
};

use crate::common::{
    AT_ONCE, LONG, MS, RECOVERED, SECOND, client, connect, granted, heartbeats, keys, lock, no_server,
    nothing_is_left, renewed, shown, take, until, url_of, waiter, waiters, within,
};

const PASSWORD: &str = "open-sesame";

/// The error of connecting to `url`, in words, which have no secret in them.
async fn refused(url: &str) -> (Error, String) {
    let config = RedisConfig::new(url);
    let described = format!("{config:?}");
    let connecting = within(LONG, "an answer", connect(config)).await;
    let error = connecting
        .err()
        .unwrap_or_else(|| panic!("{described} was taken"));
    let text = format!("{} {described}", shown(&error));
    assert!(!text.contains("sesame"), "{text}");
    (error, text)
}

#[tokio::test]
async fn scripts_that_the_server_forgot_are_sent_again() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    let forget = || server.cli(&["SCRIPT", "FLUSH"]).unwrap();
    let semaphore = one.semaphore("s", 2).unwrap();
    for _ in 0..2 {
        forget();
        let held = lock(&one, "a", LONG).acquire().await.unwrap();
        forget();
        held.renew().await.unwrap();
        forget();
        assert!(lock(&two, "a", LONG).try_acquire().await.unwrap().is_none());
        forget();
        assert_eq!(two.inspect("a").await.unwrap().holders.len(), 1);
        forget();
        let waiting = waiter(&lock(&two, "a", LONG));
        waiters(&server, "a", 1).await;
        forget();
        held.release().await.unwrap();
        let next = granted(AT_ONCE, "the waiter", waiting).await;
        forget();
        assert!(one.revoke_by_force("a", next.token()).await.unwrap());
        within(AT_ONCE, "told", next.lost()).await;
        forget();
        take(&semaphore).await;
        assert!(next.release().await.unwrap_err().is_lost());
    }
    nothing_is_left(&server, "after SCRIPT FLUSH").await;
}

#[tokio::test]
async fn a_flush_tells_holders_and_grants_waiters() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (holder, second, third) = (
        client(server.url()).await,
        client(server.url()).await,
        client(server.url()).await,
    );
    let held = lock(&holder, "a", 2 * SECOND).acquire().await.unwrap();
    let second = waiter(&lock(&second, "a", 2 * SECOND));
    waiters(&server, "a", 1).await;
    let third = waiter(&lock(&third, "a", 2 * SECOND));
    waiters(&server, "a", 2).await;
    server.cli(&["FLUSHALL"]).unwrap();
    assert_eq!(within(2 * SECOND, "told", held.lost()).await, LossReason::Revoked);
    let second = granted(4 * SECOND, "the first that asks", second).await;
    assert!(second.token() > held.token());
    assert!(!third.is_finished(), "an overlap");
    let token = second.token();
    second.release().await.unwrap();
    let third = granted(10 * SECOND, "the other", third).await;
    assert!(third.token() > token);
    third.release().await.unwrap();
    nothing_is_left(&server, "after FLUSHALL").await;
}

/// A lost hold of any mode stays lost, however it was lost.
#[tokio::test]
async fn a_renewal_never_brings_back_a_hold_that_was_lost() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let options = AcquireOptions::new().ttl(LONG).renew(false);
    let locks = [
        client.lock("a").unwrap(),
        client.lock("a").unwrap().shared(),
        client.semaphore("a", 2).unwrap(),
    ];
    for lock in locks {
        let lock = lock.with_options(options.clone());
        for flush in [true, false] {
            let held = lock.acquire().await.unwrap();
            if flush {
                server.cli(&["FLUSHALL"]).unwrap();
            } else {
                for key in keys(&server) {
                    server.cli(&["DEL", &key]).unwrap();
                }
            }
            assert!(held.is_held(), "it does not know yet");
            assert!(held.renew().await.unwrap_err().is_lost());
            assert!(keys(&server).is_empty(), "{:?}", keys(&server));
            assert!(held.release().await.unwrap_err().is_lost());
        }
    }
}

#[tokio::test]
async fn a_key_that_holds_something_else_is_a_clear_error() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    server.cli(&["RPUSH", "lockkit:a", "x"]).unwrap();
    let lock = lock(&client, "a", LONG);
    let errors = [
        within(LONG, "an answer", lock.acquire()).await.unwrap_err(),
        lock.try_acquire().await.unwrap_err(),
        lock.shared().acquire().await.unwrap_err(),
        client.inspect("a").await.unwrap_err(),
    ];
    for error in errors {
        let text = shown(&error);
        assert!(!error.is_transient() && !error.is_timeout(), "{text}");
        assert!(
            text.contains("WRONGTYPE") && text.contains("something else"),
            "{text}"
        );
        assert!(text.contains("lock `a`") || text.contains("inspect"), "{text}");
    }
    assert_eq!(server.cli(&["LLEN", "lockkit:a"]).unwrap(), "1", "left alone");
    server.cli(&["DEL", "lockkit:a"]).unwrap();
    take(&lock).await;
    nothing_is_left(&server, "after a list").await;
}

#[tokio::test]
async fn a_wrong_password_is_a_clear_error_without_it() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .password(PASSWORD)
        .user("locker", PASSWORD, "~* &* +@all")
        .start()
        .unwrap();
    let at = server.addr();
    for login in [
        "",
        ":not-sesame@",
        "locker:not-sesame@",
        "nobody:open-sesame@",
        "locker@",
    ] {
        let (error, text) = refused(&format!("redis://{login}{at}")).await;
        assert!(!error.is_transient(), "{text}");
        assert!(text.contains("user and password"), "{text}");
    }
    // As the one and as the other user.
    for login in ["locker:open-sesame@", ":open-sesame@", "default:open-sesame@"] {
        let client = client(&format!("redis://{login}{at}")).await;
        let guard = lock(&client, "a", LONG).acquire().await.unwrap();
        guard.release().await.unwrap();
    }
}

/// The list in `docs/redis.md` is enough: locks used in every way need nothing else.
#[tokio::test]
async fn the_documented_rights_are_enough_for_every_mode() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .user("locker", PASSWORD, MINIMAL_RIGHTS)
        .start()
        .unwrap();
    let (one, two) = (client(server.url()).await, client(server.url()).await);
    // Renewed soon, and over only after a push has come.
    let ttl = 6 * SECOND;
    let held = lock(&one, "a", ttl).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", ttl));
    waiters(&server, "a", 1).await;
    heartbeats(&server, 1).await;
    renewed(&held).await;
    held.release().await.unwrap();
    let next = granted(AT_ONCE, "a push", waiting).await;
    assert!(one.revoke_by_force("a", next.token()).await.unwrap());
    within(AT_ONCE, "told by a push", next.lost()).await;
    let readers = [
        lock(&one, "a", ttl).shared().acquire().await.unwrap(),
        lock(&two, "a", ttl).shared().acquire().await.unwrap(),
    ];
    let writer = waiter(&lock(&one, "a", ttl));
    waiters(&server, "a", 1).await;
    for reader in &readers {
        renewed(reader).await;
    }
    assert_eq!(one.inspect("a").await.unwrap().holders.len(), 2);
    for reader in readers {
        reader.release().await.unwrap();
    }
    granted(AT_ONCE, "a push", writer).await.release().await.unwrap();
    let permit = one.semaphore("a", 2).unwrap().acquire().await.unwrap();
    permit.renew().await.unwrap();
    permit.release().await.unwrap();
    // A connection that breaks is replaced.
    server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
    granted(LONG, "connected again", waiter(&lock(&one, "a", SECOND)))
        .await
        .release()
        .await
        .unwrap();
    let denied = server.cli(&["ACL", "LOG"]).unwrap();
    assert_eq!(denied, "", "something was asked for and denied");
    one.close(SECOND).await.unwrap();
    two.close(SECOND).await.unwrap();
    assert_eq!(keys(&server), ["lockkit:lockkit#fence"]);
}

/// The rules of `docs/redis.md`, for the default namespace.
const MINIMAL_RIGHTS: &str = "~lockkit:* &lockkit:* \
     +info +ping +client|id +client|kill +subscribe +publish +eval +evalsha +script|load \
     +get +set +del +exists +pexpire +pttl +time \
     +zadd +zrem +zcard +zscore +zrank +zrange +zrevrange +zrangebyscore +hget +hset +hdel";

#[tokio::test]
async fn a_right_that_is_missing_is_a_clear_error() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .user("nothing", PASSWORD, "~* &* -@all")
        .user("elsewhere", PASSWORD, "~lockkit#* ~other:* &* +@all")
        .start()
        .unwrap();
    let at = server.addr();
    let (error, text) = refused(&format!("redis://nothing:{PASSWORD}@{at}")).await;
    assert!(!error.is_transient(), "{text}");
    assert!(text.contains("docs/redis.md"), "{text}");

    let client = client(&format!("redis://elsewhere:{PASSWORD}@{at}")).await;
    let acquiring = waiter(&lock(&client, "a", LONG));
    let error = within(LONG, "an answer", acquiring).await.unwrap().unwrap_err();
    let text = shown(&error);
    assert!(!error.is_transient() && !error.is_timeout(), "{text}");
    assert!(
        text.contains("docs/redis.md") && !text.contains("sesame"),
        "{text}"
    );
}

/// A waiter is told of a hold only where all that it takes to write it is allowed.
#[tokio::test]
async fn a_hand_off_that_may_not_be_written_is_not_pushed() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .user("barred", PASSWORD, "~* &* +@all -zrem")
        .user("other", PASSWORD, "~* &* +@all")
        .start()
        .unwrap();
    let at = server.addr();
    let one = client(&format!("redis://barred:{PASSWORD}@{at}")).await;
    let two = client(&format!("redis://other:{PASSWORD}@{at}")).await;
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", LONG));
    waiters(&server, "a", 1).await;
    let pushes = || {
        let counts = server.command_counts().unwrap();
        counts.get("publish").copied().unwrap_or_default()
    };
    let before = pushes();
    let refused = held.release().await.unwrap_err();
    let text = shown(&refused);
    assert!(text.contains("ZREM") && text.contains("docs/redis.md"), "{text}");
    assert!(text.contains("may stay taken until its lease ends"), "{text}");
    assert_eq!(pushes(), before, "told of what is not written");
    waiters(&server, "a", 1).await;
    waiting.abort();
}

/// What may not be removed after the push is no reason to tell of a hold that is not there.
#[tokio::test]
async fn a_hand_off_that_was_pushed_is_written() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .user("barred", PASSWORD, "~* &* +@all -hdel")
        .user("other", PASSWORD, "~* &* +@all")
        .start()
        .unwrap();
    let at = server.addr();
    let one = client(&format!("redis://barred:{PASSWORD}@{at}")).await;
    let two = client(&format!("redis://other:{PASSWORD}@{at}")).await;
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", LONG));
    waiters(&server, "a", 1).await;
    let refused = held.release().await.unwrap_err();
    let text = shown(&refused);
    assert!(text.contains("HDEL") && text.contains("docs/redis.md"), "{text}");
    let next = granted(AT_ONCE, "told of it", waiting).await;
    next.renew().await.unwrap();
    next.release().await.unwrap();
}

/// Who breaks a hold need not be able to have one. The next asks, and has what it is told of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_by_who_may_not_write_it_is_a_hint() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .user("barred", PASSWORD, "~* &* +@all -hdel")
        .user("other", PASSWORD, "~* &* +@all")
        .start()
        .unwrap();
    let at = server.addr();
    let operator = client(&format!("redis://barred:{PASSWORD}@{at}")).await;
    let url = format!("redis://other:{PASSWORD}@{at}");
    let (one, two) = (client(&url).await, client(&url).await);
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", LONG));
    waiters(&server, "a", 1).await;
    let refused = operator.revoke_by_force("a", held.token()).await.unwrap_err();
    let text = shown(&refused);
    assert!(text.contains("HDEL") && text.contains("docs/redis.md"), "{text}");
    let next = granted(AT_ONCE, "it is free", waiting).await;
    next.renew().await.unwrap();
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_replica_is_not_taken_for_the_master() {
    if no_server() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    let replica = RedisServer::builder().replica_of(master.addr()).start().unwrap();
    let (error, text) = refused(replica.url()).await;
    // It may be the master one day.
    assert!(error.is_transient(), "{text}");
    assert!(text.contains("replica") && text.contains("master"), "{text}");
}

#[tokio::test]
async fn a_cluster_is_unsupported() {
    if no_server() {
        return;
    }
    let cluster = RedisCluster::start().unwrap();
    for node in cluster.nodes() {
        for db in ["", "/1"] {
            let (error, text) = refused(&format!("{}{db}", node.url())).await;
            assert!(matches!(error, Error::Unsupported { .. }), "{text}");
            assert!(text.contains("Cluster"), "{text}");
        }
    }
}

#[tokio::test]
async fn a_sentinel_given_as_a_server_is_a_clear_error() {
    if no_server() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let (error, text) = refused(group.sentinels()[0].url()).await;
    assert!(!error.is_transient(), "{text}");
    assert!(text.contains("`sentinel`"), "{text}");

    // And a server given as a sentinel, and a master that no sentinel knows.
    let mut config = RedisConfig::new(group.servers()[0].url());
    config.sentinel = Some("lockkit".to_owned());
    let error = connect(config).await.unwrap_err();
    let text = shown(&error);
    assert!(text.contains("SENTINEL") && !error.is_transient(), "{text}");
    let plain = format!("{} is no sentinel", group.servers()[0].addr());
    assert!(text.contains(&plain), "{text}");
    let mut config = RedisConfig::new(group.sentinels()[0].url());
    config.sentinel = Some("nobody".to_owned());
    let error = connect(config).await.unwrap_err();
    assert!(shown(&error).contains("`nobody`"), "{}", shown(&error));
}

#[tokio::test]
async fn an_error_of_a_master_names_it_and_its_sentinel() {
    if no_server() {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let sentinel = &group.sentinels()[0];
    let [master, _] = group.servers();
    let mut config = RedisConfig::new(sentinel.url());
    config.sentinel = Some(RedisSentinels::MASTER_NAME.to_owned());
    let names = [master, sentinel].map(|server| server.addr().to_string());
    let refused = async |case: &str| {
        let error = within(LONG, "an answer", connect(config.clone()))
            .await
            .unwrap_err();
        let text = shown(&error);
        assert!(names.iter().all(|name| text.contains(name)), "{case}: {text}");
    };
    master.cli(&["CONFIG", "SET", "requirepass", "secret"]).unwrap();
    refused("no password").await;
    master.kill().unwrap();
    refused("dead").await;

    sentinel.kill().unwrap();
    let error = connect(config.clone()).await.unwrap_err();
    let text = shown(&error);
    assert!(
        text.contains(&format!("the sentinel {}", sentinel.addr())),
        "{text}"
    );
}

/// Redis before 6 does not know `HELLO`, and says so by repeating it, with the password in it.
#[tokio::test]
async fn a_server_that_is_too_old_is_a_clear_error() {
    if no_server() {
        return;
    }
    let server = RedisServer::builder()
        .directive("rename-command", &["HELLO", ""])
        .start()
        .unwrap();
    for login in ["", "locker:open-sesame@"] {
        let (error, text) = refused(&format!("redis://{login}{}", server.addr())).await;
        assert!(!error.is_transient(), "{text}");
        assert!(text.contains("take Redis 6 or newer"), "{text}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_or_does_not_answer_is_an_outage() {
    if no_server() {
        return;
    }
    let port = Port::reserve().unwrap();
    let (error, text) = refused(&format!("redis://:{PASSWORD}@{}", port.addr())).await;
    assert!(error.is_transient(), "{text}");
    let server = RedisServer::plain().unwrap();
    server.pause().unwrap();
    let (error, text) = refused(server.url()).await;
    assert!(error.is_transient(), "{text}");
    assert!(text.contains("does not answer"), "{text}");
}

/// Scripts count as far as a float does exactly, which the clock in microseconds reaches in the year 2255.
#[tokio::test]
async fn a_counter_at_its_end_grants_no_token_twice() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let client = client(server.url()).await;
    let lock = lock(&client, "a", LONG);
    let last = (1_u64 << 53) - 1;
    let before = (last - 2).to_string();
    server.cli(&["SET", "lockkit:lockkit#fence", &before]).unwrap();
    let mut tokens = Vec::new();
    let error = loop {
        match lock.try_acquire().await {
            Ok(held) => {
                let held = held.unwrap();
                assert!(
                    !tokens.contains(&held.token().get()),
                    "{tokens:?} and {}",
                    held.token()
                );
                tokens.push(held.token().get());
                held.release().await.unwrap();
            }
            Err(error) => break error,
        }
    };
    assert_eq!(tokens, [last - 1, last]);
    let says_so = |error: &Error| {
        assert!(!error.is_transient(), "{error:?}");
        assert!(shown(error).contains("no fencing tokens are left"), "{error:?}");
    };
    says_so(&error);
    nothing_is_left(&server, "refused").await;

    // And passes none on twice.
    server.cli(&["SET", "lockkit:lockkit#fence", &before]).unwrap();
    let held = lock.acquire().await.unwrap();
    let others = [self::client(server.url()).await, self::client(server.url()).await];
    let mut waiting = Vec::new();
    for other in &others {
        waiting.push(waiter(&self::lock(other, "a", LONG)));
        waiters(&server, "a", waiting.len()).await;
    }
    held.release().await.unwrap();
    let mut waiting = waiting.into_iter();
    let held = granted(AT_ONCE, "the last", waiting.next().unwrap()).await;
    assert_eq!(held.token().get(), last);
    held.release().await.unwrap();
    let refused = within(AT_ONCE, "told", waiting.next().unwrap()).await;
    says_so(&refused.unwrap().expect_err("a token is there twice"));
    nothing_is_left(&server, "refused").await;
}

/// Somebody else's key, or a slip of the hand.
#[tokio::test]
async fn a_counter_that_is_no_number_says_so() {
    const COUNTER: &str = "lockkit:lockkit#fence";

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (client, other) = (client(server.url()).await, self::client(server.url()).await);
    let says_so = |error: &Error| {
        assert!(!error.is_transient(), "{error:?}");
        let text = shown(error);
        assert!(text.contains(COUNTER) && text.contains("is no number"), "{text}");
    };
    // Lua takes some of these for numbers.
    let texts = ["many", "1.5", "0x10", " 5", "1e3", "nan"];
    let mut writes = texts.map(|text| ["SET", COUNTER, text]).to_vec();
    writes.push(["LPUSH", COUNTER, "1"]);
    for write in writes {
        let held = lock(&client, "a", LONG).acquire().await.unwrap();
        let waiting = waiter(&lock(&other, "a", LONG));
        waiters(&server, "a", 1).await;
        server.cli(&["DEL", COUNTER]).unwrap();
        server.cli(&write).unwrap();
        says_so(&lock(&client, "b", LONG).try_acquire().await.unwrap_err());
        held.release().await.unwrap();
        says_so(&within(LONG, "told", waiting).await.unwrap().unwrap_err());
        if write[0] == "SET" {
            assert_eq!(
                server.cli(&["GET", COUNTER]).unwrap(),
                write[2],
                "it is as it was"
            );
        }
        server.cli(&["DEL", COUNTER]).unwrap();
    }
    take(&lock(&client, "b", LONG)).await;
}

/// Nobody waits there, holds or releases. What it was told before is not the last word on who holds.
#[tokio::test]
async fn a_try_is_not_answered_by_a_master_that_was_demoted() {
    if no_server() {
        return;
    }
    let (before, after) = (RedisServer::plain().unwrap(), RedisServer::plain().unwrap());
    let proxy = Proxy::start(before.addr()).unwrap();
    let (client, other) = (client(&url_of(&proxy)).await, client(before.url()).await);
    let lock = lock(&client, "a", LONG);
    let tries = [lock.clone(), lock.shared()];
    let held = other.lock("a").unwrap().acquire().await.unwrap();
    for lock in &tries {
        assert!(lock.try_acquire().await.unwrap().is_none());
    }
    let nowhere = Port::reserve().unwrap().addr();
    let (ip, port) = (nowhere.ip().to_string(), nowhere.port().to_string());
    before.cli(&["REPLICAOF", &ip, &port]).unwrap();
    for lock in &tries {
        let error = lock.try_acquire().await.unwrap_err();
        assert!(error.is_transient(), "{error:?}");
    }
    proxy.set_upstream(after.addr());
    until(RECOVERED, "at the new master", async || {
        matches!(lock.try_acquire().await, Ok(Some(_)))
    })
    .await;
    drop(held);
}

/// It refuses to write, and whoever only looks has no right to.
#[tokio::test]
async fn a_look_is_not_answered_by_a_master_that_was_demoted() {
    if no_server() {
        return;
    }
    let rights = "~lockkit:* resetchannels &lockkit:* +ping +info +select +subscribe +client|id +eval +evalsha +script|load \
                  +time +get +exists +pttl +zrange +hget +scan";
    let before = RedisServer::builder()
        .user("looker", PASSWORD, rights)
        .start()
        .unwrap();
    let after = RedisServer::plain().unwrap();
    let proxy = Proxy::start(before.addr()).unwrap();
    let other = client(&format!("redis://{}", before.addr())).await;
    let held = other.lock("a").unwrap().acquire().await.unwrap();
    let looker = || {
        connect(RedisConfig::new(format!(
            "redis://looker:{PASSWORD}@{}",
            before.addr()
        )))
    };
    // The first look at a replica ends the connection.
    let (looks, lists, shows) = (
        looker().await.unwrap(),
        looker().await.unwrap(),
        looker().await.unwrap(),
    );
    let client = client(&url_of(&proxy)).await;
    assert_eq!(looks.inspect("a").await.unwrap().holders.len(), 1);
    assert!(lists.list("").unwrap().next().await.unwrap().is_ok());
    assert!(shows.fence().await.unwrap() >= held.token());
    let nowhere = Port::reserve().unwrap().addr();
    let (ip, port) = (nowhere.ip().to_string(), nowhere.port().to_string());
    before.cli(&["REPLICAOF", &ip, &port]).unwrap();
    let said = [
        looks.inspect("a").await.map(drop),
        lists.list("").unwrap().next().await.unwrap().map(drop),
        shows.fence().await.map(drop),
        client.inspect("a").await.map(drop),
    ];
    for said in said {
        let error = said.expect_err("it is a replica");
        assert!(error.is_transient(), "{error:?}");
        assert!(shown(&error).contains("is a replica now"), "{}", shown(&error));
    }
    proxy.set_upstream(after.addr());
    until(RECOVERED, "at the new master", async || {
        client.inspect("a").await.is_ok_and(|state| state.is_free())
    })
    .await;
    drop(held);
}

/// The connection stands and its server is a replica now.
#[tokio::test]
async fn a_master_that_was_demoted_is_left_for_the_new_one() {
    if no_server() {
        return;
    }
    let before = RedisServer::plain().unwrap();
    let after = RedisServer::builder().replica_of(before.addr()).start().unwrap();
    let proxy = Proxy::start(before.addr()).unwrap();
    let client = client(&url_of(&proxy)).await;
    let lock = lock(&client, "a", LONG);
    let token = lock.acquire().await.unwrap().token();
    nothing_is_left(&before, "released").await;
    eventually("replicated", async || keys(&after) == ["lockkit:lockkit#fence"]).await;
    after.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    let (ip, port) = (after.addr().ip().to_string(), after.addr().port().to_string());
    before.cli(&["REPLICAOF", &ip, &port]).unwrap();
    let connections = proxy.counts().connections;
    // At first it is only known that the connection broke.
    until(LONG, "it says why", async || {
        let error = lock.acquire_timeout(100 * MS).await.unwrap_err();
        assert!(error.is_transient(), "{error:?}");
        shown(&error).contains("replica")
    })
    .await;
    proxy.set_upstream(after.addr());
    let guard = granted(RECOVERED, "at the new master", waiter(&lock)).await;
    assert!(guard.token() > token);
    assert!(proxy.counts().connections > connections);
    assert_eq!(after.cli(&["EXISTS", "lockkit:a"]).unwrap(), "1");
    guard.release().await.unwrap();
    nothing_is_left(&after, "released").await;
}
