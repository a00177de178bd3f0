//! URLs that are taken, and what is said about those that are not.

use std::time::Duration;

use lockkit::{Error, LockConfig};
use proptest::prelude::*;

fn refused(url: &str) -> Error {
    match LockConfig::from_url(url) {
        Ok(config) => panic!("{url} was taken as {config:?}"),
        Err(error) => error,
    }
}

/// Each of these is, and no config shows its password.
#[cfg(any(
    feature = "redis",
    feature = "zk",
    feature = "mysql",
    feature = "etcd",
    feature = "postgres"
))]
fn taken(urls: &[&str]) {
    for url in urls {
        let config = LockConfig::from_url(url).unwrap_or_else(|error| panic!("{url}: {error}"));
        assert!(!format!("{config:?}").contains("canary"), "{config:?}");
    }
}

/// Each of these is, and what is said names what is wrong and shows no password.
#[cfg(any(
    feature = "redis",
    feature = "zk",
    feature = "mysql",
    feature = "etcd",
    feature = "postgres"
))]
fn refused_for(urls: &[(&str, &str)]) {
    for (url, part) in urls {
        let text = refused(url).to_string();
        assert!(text.contains(part), "{url}: {text}");
        assert!(!text.contains("canary"), "{url}: {text}");
    }
}

/// The server does not let it in, and what is said does not show its password, `wrong-one`.
#[cfg(any(
    feature = "redis",
    feature = "zk",
    feature = "mysql",
    feature = "etcd",
    feature = "postgres"
))]
async fn wrong_password(url: &str) {
    is_refused(&lockkit::connect(url).await.unwrap_err());
}

#[cfg(any(
    feature = "redis",
    feature = "zk",
    feature = "mysql",
    feature = "etcd",
    feature = "postgres"
))]
fn is_refused(error: &lockkit::Error) {
    assert!(!error.is_transient(), "{error:?}");
    assert!(!format!("{error:?}").contains("wrong-one"), "{error:?}");
}

/// The lock `orders/42` of the namespace `billing` is held in its database 3, by `me`.
#[cfg(feature = "redis")]
fn is_held_at(server: &lockkit_testbed::redis::RedisServer) {
    let value = server.cli(&[
        "EVAL",
        "redis.call('SELECT', 3) return redis.call('GET', 'billing:orders/42')",
        "0",
    ]);
    let value = value.unwrap();
    assert!(value.starts_with("lockkit:") && value.ends_with(" me"), "{value}");
}

/// The reason of an `InvalidUrl`.
fn reason(url: &str) -> String {
    match refused(url) {
        Error::InvalidUrl { reason, .. } => reason,
        other => panic!("{url}: {other}"),
    }
}

#[test]
fn parameters_go_to_the_fields_of_their_names() {
    let url = "memory:?ttl=10s&wait=1m%2030s&max_hold=1h&op_timeout=2s&connect_timeout=500ms&namespace=a.b_c-1&label=h%C3%A9%26&local_handoffs=7";
    let config: LockConfig = url.parse().unwrap();
    let expected = LockConfig::new("memory:")
        .ttl(Duration::from_secs(10))
        .wait(Duration::from_secs(90))
        .max_hold(Duration::from_secs(3_600))
        .op_timeout(Duration::from_secs(2))
        .connect_timeout(Duration::from_millis(500))
        .namespace("a.b_c-1")
        .label("hé&")
        .local_handoffs(7);
    assert_eq!(config, expected);
}

#[test]
fn an_empty_namespace_is_one() {
    let config = LockConfig::from_url("memory:?namespace=").unwrap();
    assert_eq!(config.namespace.as_deref(), Some(""));
}

#[test]
fn unknown_parameters_are_named_and_the_known_listed() {
    let reason = reason("memory:?tll=10s");
    for part in [
        "`tll`",
        "ttl",
        "wait",
        "max_hold",
        "op_timeout",
        "connect_timeout",
        "namespace",
        "label",
        "local_handoffs",
    ] {
        assert!(reason.contains(part), "{part} in {reason}");
    }
    assert!(!reason.contains("poll"), "memory has no poll: {reason}");
}

#[test]
fn bad_parameters_are_named() {
    for (url, parts) in [
        ("memory:?ttl=10s&ttl=11s", &["`ttl`", "twice"][..]),
        ("memory:?ttl", &["`ttl`", "no value"]),
        ("memory:?ttl=ten", &["`ttl`", "\"ten\"", "30s"]),
        ("memory:?ttl=10", &["`ttl`", "\"10\"", "30s"]),
        ("memory:?ttl=", &["`ttl`", "30s"]),
        ("memory:?label=%ff", &["`label`", "UTF-8"]),
        ("memory:?local_handoffs=-1", &["`local_handoffs`", "\"-1\""]),
        ("memory:#here", &["%23"]),
        ("memory://user:pass?word=x@host", &["%3F", "%40"]),
        ("memory:space", &["`memory:`", "namespace"]),
        ("memory://host", &["`memory:`"]),
        ("", &["scheme"]),
        ("/var/lib/app/locks", &["scheme", "file:///var/lib/app/locks"]),
        (":", &["scheme"]),
        ("1x:y", &["scheme"]),
    ] {
        let reason = reason(url);
        for part in parts {
            assert!(reason.contains(part), "{url}: {part} in {reason}");
        }
    }
}

#[test]
fn values_out_of_range_name_the_option() {
    for (url, option) in [
        ("memory:?ttl=1ms", "ttl"),
        ("memory:?ttl=2y", "ttl"),
        ("memory:?wait=2y", "wait"),
        ("memory:?max_hold=2y", "max_hold"),
        ("memory:?max_hold=0s", "max_hold"),
        ("memory:?ttl=10s&max_hold=9s", "max_hold"),
        ("memory:?op_timeout=0s", "op_timeout"),
        ("memory:?connect_timeout=0s", "connect_timeout"),
        ("memory:?namespace=a/b", "namespace"),
        ("memory:?namespace=%C3%A9", "namespace"),
        ("memory:?local_handoffs=65536", "local_handoffs"),
    ] {
        match refused(url) {
            Error::InvalidOptions { option: named, .. } => assert_eq!(named, option, "{url}"),
            other => panic!("{url}: {other}"),
        }
    }
}

#[test]
fn schemes_without_a_backend_here_name_the_feature() {
    let missing: &[(&str, &str)] = &[
        #[cfg(not(feature = "redis"))]
        ("redis", "redis"),
        #[cfg(all(not(feature = "redis"), feature = "tls"))]
        ("rediss", "redis"),
        #[cfg(not(any(feature = "redis", feature = "tls")))]
        ("rediss", "redis,tls"),
        #[cfg(all(feature = "redis", not(feature = "tls")))]
        ("rediss", "tls"),
        #[cfg(not(feature = "redis"))]
        ("redlock", "redis"),
        #[cfg(not(feature = "zk"))]
        ("zk", "zk"),
        #[cfg(not(feature = "mysql"))]
        ("mysql", "mysql"),
        #[cfg(not(feature = "etcd"))]
        ("etcd", "etcd"),
        #[cfg(not(feature = "postgres"))]
        ("postgres", "postgres"),
        #[cfg(not(feature = "postgres"))]
        ("postgresql", "postgres"),
    ];
    for (scheme, feature) in missing {
        let error = refused(&format!("{scheme}://user:canary@host/1"));
        match &error {
            Error::FeatureDisabled {
                scheme: s,
                feature: f,
                ..
            } => assert_eq!((s.as_str(), *f), (*scheme, *feature)),
            other => panic!("{scheme}: {other}"),
        }
        let text = error.to_string();
        for feature in feature.split(',') {
            assert!(
                text.contains("cargo feature") && text.contains(&format!("`{feature}`")),
                "{text}"
            );
        }
    }
}

#[test]
fn unknown_schemes_list_the_known() {
    let text = refused("consul://host").to_string();
    for known in [
        "consul",
        "etcd",
        "memory",
        "file",
        "redis",
        "rediss",
        "redlock",
        "zk",
        "mysql",
        "postgres",
        "postgresql",
    ] {
        assert!(text.contains(known), "{known} in {text}");
    }
}

#[test]
fn schemes_are_read_in_any_case() {
    assert!(LockConfig::from_url("MEMORY:").is_ok());
}

#[cfg(feature = "redis")]
#[test]
fn redis_urls_name_a_server() {
    taken(&[
        "redis://127.0.0.1",
        "redis://user:p%40ss@host:7000/3?replicas=1&replicas_timeout=50ms",
        "redis://:canary@[::1]:7000?ttl=5s",
        "redis://a,b:5000,c/1?sentinel=main",
        "redis+unix:///run/redis/redis.sock",
        "redis+unix://user:canary@/run/redis.sock?db=3&ttl=5s",
    ]);
    refused_for(&[
        ("redis://", "host"),
        ("redis:host", "redis://"),
        ("redis://user:canary@a,b", "sentinel"),
        ("redis://user:canary@host/x", "database"),
        ("redis+unix://user:canary@host/run/redis.sock", "three slashes"),
        (
            "redis+unix://user:canary@/run/redis.sock?sentinel=main",
            "sentinels",
        ),
        ("redis://user:canary@host/1?db=3", "`db`"),
        ("redis://user:canary@host:x", "port"),
        ("redis://user:canary@host?sentinel=", "sentinel"),
        ("redis://user:canary@host?poll=1s", "`poll`"),
        ("redis://user:canary@host?replicas=-1", "`replicas`"),
        ("redis://user:canary@host?replicas_timeout=0s", "replicas_timeout"),
        ("redis://user:canary@host?ca=/ca.pem", "rediss"),
        ("redis://user:canary@host?cert=/me.pem&key=/me.key", "rediss"),
        #[cfg(feature = "tls")]
        ("rediss://user:canary@host?cert=/me.pem", "`key`"),
        #[cfg(feature = "tls")]
        ("rediss://user:canary@host?key=/me.key", "`cert`"),
    ]);
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_redis_url_connects_with_its_options() {
    use lockkit_testbed::redis::{self, RedisServer};

    if lockkit_testbed::skipped("redis", redis::missing()) {
        return;
    }
    let server = RedisServer::builder().password("canary").start().unwrap();
    let url = format!("{}/3?namespace=billing&ttl=7s&label=me", server.url());
    let client = lockkit::connect(&url).await.unwrap();
    let lock = client.lock("orders/42").unwrap();
    let guard = lock.acquire().await.unwrap();
    let id = lock.id().to_string();
    assert!(id.contains("/3") && !id.contains("canary"), "{id}");
    is_held_at(&server);
    guard.release().await.unwrap();

    wrong_password(&server.url().replace("canary", "wrong-one")).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_url_of_two_sentinels_connects_to_their_master() {
    use lockkit_testbed::redis::{self, RedisSentinels};

    if lockkit_testbed::skipped("redis", redis::missing()) {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let addrs = group.sentinels()[..2]
        .iter()
        .map(|sentinel| sentinel.addr().to_string());
    let url = format!("redis://{}", addrs.collect::<Vec<_>>().join(","));
    let name = RedisSentinels::MASTER_NAME;
    let connected = [
        lockkit::connect(&format!("{url}/3?sentinel={name}&namespace=billing&label=me")).await,
        {
            let mut config = LockConfig::new(format!("{url}/3"))
                .namespace("billing")
                .label("me");
            config.redis.sentinel = Some(name.to_owned());
            config.connect().await
        },
        {
            let url = format!("{url}/3?sentinel={name}");
            let config = LockConfig::from_url(&url).unwrap();
            config.namespace("billing").label("me").connect().await
        },
    ];
    for client in connected {
        let client = client.unwrap();
        let guard = client.lock("orders/42").unwrap().acquire().await.unwrap();
        is_held_at(group.master().unwrap());
        guard.release().await.unwrap();
    }
}

#[cfg(feature = "redis")]
#[test]
fn redlock_urls_name_an_odd_number_of_masters() {
    taken(&[
        "redlock://a,b,c",
        "redlock://u:canary@a:7000/1,:canary@b,[::1]:7001,d,e?max_ttl=30s&master_timeout=50ms&durable=true",
    ]);
    refused_for(&[
        ("redlock://", "host"),
        ("redlock://u:canary@a", "use redis://"),
        ("redlock://u:canary@a,b", "2 masters"),
        ("redlock://a,u:canary@b,c,d", "4 masters"),
        ("redlock://a,u:canary@b,b:6379", "masters 2 and 3"),
        ("redlock://a,u:canary@b:x,c", "master 2"),
        ("redlock://a,u:canary@b,c?max_ttl=0s", "max_ttl"),
        ("redlock://a,u:canary@b,c?master_timeout=2m", "master_timeout"),
        ("redlock://a,u:canary@b,c?durable=yes", "`true`"),
        ("redlock://a,u:canary@b,c?ca=/ca.pem", "tls"),
        ("redlock://a,u:canary@b,c?cert=/me.pem&key=/me.key", "tls"),
        #[cfg(feature = "tls")]
        ("redlock://a,u:canary@b,c?tls=true&cert=/me.pem", "`key`"),
        ("redlock://a,u:canary@b,c?sentinel=main", "`sentinel`"),
    ]);
    let text = refused("redlock://a,b,c?tls=true&ca=/ca.pem&ttl=0s").to_string();
    assert!(text.contains("ttl"), "{text}");
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_redlock_url_connects_with_its_options() {
    use lockkit_testbed::redis::{self, RedisServer};

    if lockkit_testbed::skipped("redis", redis::missing()) {
        return;
    }
    let masters: Vec<_> = (0..3)
        .map(|_| RedisServer::builder().password("canary").start().unwrap())
        .collect();
    let addresses: Vec<_> = masters
        .iter()
        .map(|master| format!("{}/3", master.url().trim_start_matches("redis://")))
        .collect();
    let url = format!(
        "redlock://{}?namespace=billing&ttl=7s&label=me&max_ttl=10s",
        addresses.join(",")
    );
    let client = lockkit::connect(&url).await.unwrap();
    let lock = client.lock("orders/42").unwrap();
    let guard = lock.acquire().await.unwrap();
    let id = lock.id().to_string();
    assert!(id.contains("/3") && !id.contains("canary"), "{id}");
    masters.iter().for_each(is_held_at);
    guard.release().await.unwrap();
    let long = lockkit::AcquireOptions::new().ttl(std::time::Duration::from_secs(11));
    let error = lock.acquire_with(&long).await.unwrap_err();
    assert!(error.to_string().contains("`ttl`"), "{error}");

    let error = lockkit::connect(&url.replace("max_ttl=10s", "max_ttl=11s"))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("`max_ttl`") && error.to_string().contains("10s"),
        "{error}"
    );
    wrong_password(&url.replace("canary", "wrong-one")).await;
}

/// Each backend that has a list of servers reads it alike. The grammar itself is the core's, with a table of its own.
#[cfg(all(feature = "redis", feature = "zk", feature = "etcd"))]
#[test]
fn lists_of_servers_have_one_grammar() {
    for (before, after) in [
        ("redis://user:canary@", "/1?sentinel=main"),
        ("redlock://", ""),
        ("zk://user:canary@", "/path"),
        ("etcd://user:canary@", "/path"),
    ] {
        for good in ["a,b,c", "a, b,c", " a:1 ,%20b:2, [::1]:3 ", "A:1,a:2,a:3"] {
            taken(&[&format!("{before}{good}{after}")]);
        }
        for bad in [
            "",
            "a,b,",
            ",a,b",
            "a,,b",
            "a, ,b",
            "a,b c,d",
            "a:1,b,A:1",
            "a,b:x,c",
            "a,b:0,c",
            "::1,b,c",
        ] {
            let url = format!("{before}{bad}{after}");
            let text = refused(&url).to_string();
            assert!(!text.contains("canary"), "{url}: {text}");
        }
    }
}

/// Where there is one, a list is not taken for its name.
#[cfg(all(feature = "mysql", feature = "postgres"))]
#[test]
fn one_server_is_no_list() {
    for scheme in ["mysql", "postgres"] {
        taken(&[&format!("{scheme}://user:canary@%20Host:1/app")]);
        refused_for(&[
            (&format!("{scheme}://user:canary@a,b/app"), "several servers"),
            (&format!("{scheme}://user:canary@a,/app"), "server 2"),
            (&format!("{scheme}://user:canary@a%20b/app"), "server 1"),
        ]);
    }
}

#[cfg(feature = "zk")]
#[test]
fn zk_urls_name_an_ensemble() {
    taken(&[
        "zk://127.0.0.1",
        "zk://user:p%40ss:canary@zk1:2181,zk2:2181,zk3:2181/services/locks",
        "zk://[::1]:2182?nodes=readwrite&session_timeout=12s&tick_time=1s&parents=persistent",
        "zk://me:canary@h?access=everyone&ttl=1s",
    ]);
    refused_for(&[
        ("zk://", "no server"),
        ("zk:host", "no server"),
        ("zk://user@host", "password"),
        ("zk://user:canary@host:x", "servers"),
        ("zk://user:canary@host:1,/x", "servers"),
        ("zk://user:canary@host//x", "servers"),
        ("zk://user:canary/canary@host", "%2F"),
        ("zk://:canary@host", "user"),
        ("zk://user:canary@host?poll=1s", "`poll`"),
        ("zk://user:canary@host?nodes=other", "nodes"),
        ("zk://user:canary@host?session_timeout=9s", "session_timeout"),
        ("zk://user:canary@host?tick_time=0s", "tick_time"),
        ("zk://host?access=creator", "access"),
        ("zk://user:canary@host?tls=maybe", "verify"),
        ("zk://user:canary@host?ca=/ca.pem", "tls"),
        ("zk://user:canary@host?cert=/me.pem&key=/me.key", "tls"),
        #[cfg(not(feature = "tls"))]
        ("zk://user:canary@host?tls=verify", "cargo feature `tls`"),
        #[cfg(feature = "tls")]
        ("zk://user:canary@host?tls=unverified&ca=/ca.pem", "tls=verify"),
        #[cfg(feature = "tls")]
        ("zk://user:canary@host?tls=verify&cert=/me.pem", "`key`"),
        #[cfg(feature = "tls")]
        ("zk://user:canary@host?tls=verify&key=/me.key", "`cert`"),
        #[cfg(feature = "tls")]
        ("zk://user:canary@a..b?tls=verify", "a..b"),
    ]);
}

#[cfg(feature = "zk")]
#[tokio::test]
async fn a_zk_url_connects_with_its_options() {
    use lockkit_testbed::zookeeper::{self, ZkServer};

    if lockkit_testbed::skipped("zk", zookeeper::missing()) {
        return;
    }
    let server = ZkServer::plain().unwrap();
    let parameters = "namespace=billing&ttl=7s&label=me&tick_time=100ms";
    let url = |password: &str| format!("zk://user:{password}@{}/services?{parameters}", server.addr());
    let client = lockkit::connect(&url("canary")).await.unwrap();
    let lock = client.lock("orders/42").unwrap();
    let guard = lock.acquire().await.unwrap();
    let id = lock.id().to_string();
    assert!(id.contains("/services") && !id.contains("canary"), "{id}");
    let dump = server.word("dump").unwrap();
    assert!(dump.contains("/services/billing/orders%2F42/_c_"), "{dump}");
    // The session timeout is the ttl, unless asked for otherwise.
    let holder = &client.inspect("orders/42").await.unwrap().holders[0];
    assert!(
        holder.left > Some(std::time::Duration::from_secs(2)),
        "{holder:?}"
    );

    // The directories are their creator's alone.
    // A login gives rights to nodes, and none to connect.
    let stranger = lockkit::connect(&url("wrong-one")).await.unwrap();
    is_refused(&stranger.lock("orders/43").unwrap().acquire().await.unwrap_err());
    guard.release().await.unwrap();
}

#[cfg(feature = "mysql")]
#[test]
fn mysql_urls_name_a_database() {
    taken(&[
        "mysql://db.example/app",
        "mysql://user:p%40ss@host:3307/app?mode=lease&schema=manual&max_connections=5",
        "mysql://user:canary@[::1]/app?ttl=5s&mode=for_update&socket=/run/mysqld.sock&tls=off&public_key=never",
    ]);
    refused_for(&[
        ("mysql://user:canary@host", "/database"),
        ("mysql:host/app", "/database"),
        ("mysql://user:canary@host:x/app", "port"),
        ("mysql://:canary@host/app", "user"),
        ("mysql://user:canary@host/app?mode=table", "for_update, lease"),
        ("mysql://user:canary@host/app?schema=none", "auto, manual"),
        ("mysql://user:canary@host/app?tls=maybe", "verify"),
        (
            "mysql://user:canary@host/app?public_key=yes",
            "local, always, never",
        ),
        ("mysql://user:canary@host/app?ca=/ca.pem", "tls=verify"),
        ("mysql://user:canary@host/app?cert=/me.pem&key=/me.key", "`tls`"),
        #[cfg(feature = "tls")]
        ("mysql://user:canary@host/app?tls=verify&cert=/me.pem", "`key`"),
        #[cfg(feature = "tls")]
        (
            "mysql://user:canary@host/app?tls=unverified&key=/me.key",
            "`cert`",
        ),
        (
            "mysql://user:canary@host/app?max_connections=0",
            "max_connections",
        ),
        ("mysql://user:canary@host/app?poll=1s", "`poll`"),
        ("mysql://user:canary@host/app?token_block=1", "`token_block`"),
        #[cfg(not(feature = "tls"))]
        ("mysql://user:canary@host/app?tls=verify", "cargo feature `tls`"),
    ]);
}

#[cfg(feature = "mysql")]
#[tokio::test]
async fn a_mysql_url_connects_with_its_options() {
    use lockkit_testbed::mysql::{Flavour, MySql};

    if lockkit_testbed::skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        return;
    }
    let server = MySql::start(Flavour::MariaDb, &[]).unwrap();
    for mode in ["for_update", "lease"] {
        let url = format!("{}?namespace=billing&ttl=7s&label=me&mode={mode}", server.url());
        let client = lockkit::connect(&url).await.unwrap();
        let lock = client.lock("orders/42").unwrap();
        let guard = lock.acquire().await.unwrap();
        let id = lock.id().to_string();
        assert!(id.contains("/lockkit") && !id.contains(MySql::PASSWORD), "{id}");
        let state = lock.inspect().await.unwrap();
        assert_eq!(state.holders[0].label.as_deref(), Some("me"), "{mode}");
        assert!(state.holders[0].left.unwrap().as_secs() <= 7, "{mode}");
        guard.release().await.unwrap();
    }
    wrong_password(&server.url().replace(MySql::PASSWORD, "wrong-one")).await;
}

#[test]
fn a_short_name_for_postgresql_says_how_it_is_written() {
    let text = refused("pg://user:canary@host/app").to_string();
    assert!(text.contains("postgres://") && !text.contains("canary"), "{text}");
}

#[cfg(feature = "etcd")]
#[test]
fn etcd_urls_name_a_cluster() {
    taken(&[
        "etcd://127.0.0.1",
        "etcd://user:p%40ss:canary@etcd1:2379,etcd2:2379,etcd3:2379/services/locks",
        "etcd://[::1]:2380?ttl=1s&namespace=billing",
    ]);
    refused_for(&[
        ("etcd://", "no server"),
        ("etcd:host", "no server"),
        ("etcd://user@host", "password"),
        ("etcd://user:canary@host:x", "servers"),
        ("etcd://user:canary@host:1,/x", "servers"),
        ("etcd://user:canary/canary@host", "%2F"),
        ("etcd://:canary@host", "user"),
        ("etcd://user:canary@host?poll=1s", "`poll`"),
        ("etcd://user:canary@host?tls=maybe", "verify"),
        ("etcd://user:canary@host?ca=/ca.pem", "tls"),
        ("etcd://user:canary@host?cert=/me.pem&key=/me.key", "tls"),
        #[cfg(not(feature = "tls"))]
        ("etcd://user:canary@host?tls=verify", "cargo feature `tls`"),
        #[cfg(feature = "tls")]
        ("etcd://user:canary@host?tls=unverified&ca=/ca.pem", "tls=verify"),
        #[cfg(feature = "tls")]
        ("etcd://user:canary@host?tls=verify&cert=/me.pem", "`key`"),
        #[cfg(feature = "tls")]
        ("etcd://user:canary@host?tls=verify&key=/me.key", "`cert`"),
        #[cfg(feature = "tls")]
        ("etcd://user:canary@a..b?tls=verify", "a..b"),
    ]);
}

#[cfg(feature = "etcd")]
#[tokio::test]
async fn an_etcd_url_connects_with_its_options() {
    use lockkit_testbed::etcd::{self, EtcdServer};

    if lockkit_testbed::skipped("etcd", etcd::missing()) {
        return;
    }
    let server = EtcdServer::builder()
        .authorise("services/billing/")
        .start()
        .unwrap();
    let url = format!("{}/services?namespace=billing&ttl=7s&label=me", server.url());
    let client = lockkit::connect(&url).await.unwrap();
    let lock = client.lock("orders/42").unwrap();
    let guard = lock.acquire().await.unwrap();
    let id = lock.id().to_string();
    assert!(
        id.contains("/services") && !id.contains(EtcdServer::PASSWORD),
        "{id}"
    );
    let keys = server.keys("services/billing/orders%2F42/").unwrap();
    assert_eq!(keys.len(), 1, "{keys:?}");
    let holder = &lock.inspect().await.unwrap().holders[0];
    assert_eq!(holder.label.as_deref(), Some("me"));
    assert!(holder.left.unwrap().as_secs() <= 7);
    guard.release().await.unwrap();
    wrong_password(&url.replace(EtcdServer::PASSWORD, "wrong-one")).await;
}

#[cfg(feature = "postgres")]
#[test]
fn postgres_urls_name_a_database() {
    taken(&[
        "postgres://db.example/app",
        "postgresql://user:p%40ss@host:5433/app?schema=manual&max_connections=5",
        "postgres://user:canary@[::1]/app?ttl=5s&sslmode=disable",
        "postgres://user:canary@%2Frun%2Fpostgresql/app",
        "postgres://user:canary@localhost/app?socket=/run/postgresql",
    ]);
    refused_for(&[
        ("postgres://user:canary@host", "/database"),
        ("postgres:host/app", "/database"),
        ("postgres://user:canary@host:x/app", "port"),
        ("postgres://:canary@host/app", "user"),
        ("postgres://user:canary@host/app?schema=none", "auto, manual"),
        ("postgres://user:canary@host/app?sslmode=allow", "verify-full"),
        ("postgres://user:canary@host/app?sslrootcert=/ca.pem", "sslmode"),
        (
            "postgres://user:canary@host/app?sslcert=/me.pem&sslkey=/me.key",
            "sslmode=disable",
        ),
        #[cfg(feature = "tls")]
        (
            "postgres://user:canary@host/app?sslmode=require&sslcert=/me.pem",
            "`sslkey`",
        ),
        #[cfg(feature = "tls")]
        (
            "postgres://user:canary@host/app?sslmode=require&sslkey=/me.key",
            "`sslcert`",
        ),
        (
            "postgres://user:canary@host/app?max_connections=0",
            "max_connections",
        ),
        ("postgres://user:canary@host/app?mode=lease", "`mode`"),
        #[cfg(not(feature = "tls"))]
        (
            "postgres://user:canary@host/app?sslmode=verify-full",
            "cargo feature `tls`",
        ),
    ]);
}

#[cfg(feature = "postgres")]
#[tokio::test]
async fn a_postgres_url_connects_with_its_options() {
    use lockkit_testbed::postgres::{self, PgServer};

    if lockkit_testbed::skipped("postgres", postgres::missing()) {
        return;
    }
    let server = PgServer::plain().unwrap();
    for scheme in ["postgres:", "postgresql:"] {
        let url = server.url().replace("postgres:", scheme);
        let client = lockkit::connect(&format!("{url}?namespace=billing&ttl=7s&label=me"))
            .await
            .unwrap();
        let lock = client.lock("orders/42").unwrap();
        let guard = lock.acquire().await.unwrap();
        let id = lock.id().to_string();
        assert!(
            id.contains("/lockkit") && !id.contains(PgServer::PASSWORD),
            "{id}"
        );
        let state = lock.inspect().await.unwrap();
        assert_eq!(state.holders[0].label.as_deref(), Some("me"));
        assert!(state.holders[0].left.unwrap().as_secs() <= 7);
        guard.release().await.unwrap();
    }
    wrong_password(&server.url().replace(PgServer::PASSWORD, "wrong-one")).await;
}

#[cfg(feature = "file")]
#[test]
fn file_urls_name_an_absolute_directory() {
    for good in [
        "file:///var/lib/app/locks",
        "file:/var/lib/app/locks",
        "file:///a%20b/c@d?label=me@host",
        "file:///x?poll=5ms",
    ] {
        assert!(LockConfig::from_url(good).is_ok(), "{good}");
    }
    for (bad, advice) in [
        ("file:var/lock", "file:///var/lib/app/locks"),
        ("file:", "file:///var/lib/app/locks"),
        ("file://", "file:///var/lib/app/locks"),
        ("file://var/lock", "three slashes"),
        ("file://localhost/var/lock", "three slashes"),
        ("file:///a%00b", "NUL"),
    ] {
        let reason = reason(bad);
        assert!(reason.contains(advice), "{bad}: {advice} in {reason}");
    }
    let text = refused("file:///var/lib/app/locks?tll=1s").to_string();
    assert!(
        text.contains("file:///var/lib/app/locks"),
        "it says which URL: {text}"
    );
    assert!(text.contains("poll"), "{text}");
}

#[cfg(not(feature = "file"))]
#[test]
fn the_file_scheme_needs_its_feature() {
    match refused("file:///var/lib/app/locks?poll=5ms") {
        Error::FeatureDisabled { scheme, feature, .. } => {
            assert_eq!((scheme.as_str(), feature), ("file", "file"));
        }
        other => panic!("{other}"),
    }
}

/// Whatever a config or its errors say, in every form.
fn everything_said(url: &str) -> String {
    let config = LockConfig::new(url);
    let mut said = vec![format!("{config:?} {config:#?}")];
    match LockConfig::from_url(url) {
        Ok(config) => said.push(format!("{config:?} {config:#?}")),
        Err(error) => {
            said.push(format!("{error} {error:?} {error:#?}"));
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                said.push(format!("{cause} {cause:?}"));
                source = cause.source();
            }
        }
    }
    said.join("\n")
}

/// As a parameter it would be quoted.
#[test]
fn what_follows_a_question_mark_may_be_a_password() {
    for url in [
        "redis://user:x?canary@host/1",
        "redis:/user:x?canary@host/1",
        "postgres:/user:x?canary@host/db",
        "mysql:/user:x?canary=y@host/db",
    ] {
        let text = refused(url).to_string();
        assert!(text.contains("%3F") && !text.contains("canary"), "{url}: {text}");
    }
    if cfg!(all(feature = "file", unix)) {
        assert!(LockConfig::from_url("file:/locks?label=ops@host").is_ok());
    }
}

#[test]
fn a_debugged_config_still_says_where() {
    let said = format!(
        "{:?}",
        LockConfig::new("redis://user:canary@db.internal:6379/2?password=canary")
    );
    assert!(said.contains("redis://***@db.internal:6379/2"), "{said}");
    assert!(!said.contains("canary"), "{said}");
}

proptest! {
    #[test]
    fn no_url_makes_it_panic(url in ".*") {
        let _ = everything_said(&url);
    }

    #[test]
    fn nothing_like_a_url_makes_it_panic(url in "(memory|file|redis)?:?/{0,3}[a-z@:%?&=#/ .0-9é-]{0,40}") {
        let _ = everything_said(&url);
    }

    /// The password may hold characters that should have been percent-encoded.
    #[test]
    fn passwords_stay_secret(
        scheme in "memory|file|FILE|redis|rediss|redlock|zk|mysql|postgres|postgresql|pg|etcd|[a-z]{1,6}|",
        slashes in "//|",
        user in "[a-z]{0,5}",
        before in "[A-Za-z0-9/?#@:&=%+ .]{0,8}",
        after in "[A-Za-z0-9/?#@:&=%+ .]{0,8}",
        rest in "host(:[0-9]{1,5})?(/[a-z0-9]{0,5})?(\\?(ttl|wait|tll|namespace|label)=[a-z0-9]{0,5})?",
    ) {
        // Without a scheme there is nothing before the user.
        let scheme = if scheme.is_empty() { String::new() } else { format!("{scheme}:{slashes}") };
        let url = format!("{scheme}{user}:{before}CANARY{after}@{rest}");
        let said = everything_said(&url);
        prop_assert!(!said.to_uppercase().contains("CANARY"), "{url}: {said}");
    }

    /// Every option that can be written comes out as it was meant.
    #[test]
    fn written_options_are_read_back(
        ttl_ms in 10_u64..1_000_000,
        label in "\\PC{0,40}",
        namespace in "[A-Za-z0-9._-]{0,20}",
    ) {
        let encoded = percent_encoding::utf8_percent_encode(&label, percent_encoding::NON_ALPHANUMERIC);
        let url = format!("memory:?label={encoded}&namespace={namespace}&ttl={ttl_ms}ms");
        let expected = LockConfig::new("memory:")
            .label(label)
            .namespace(namespace)
            .ttl(Duration::from_millis(ttl_ms));
        prop_assert_eq!(LockConfig::from_url(&url).unwrap(), expected);
    }
}

/// Each parameter of a URL has a row in the reference of options: in the section of its backend, or in that for all of them.
#[test]
fn every_option_is_in_the_reference() {
    let page = include_str!("../../docs/options.md");
    let section = |title: &str| {
        page.split("\n## ")
            .find(|section| section.starts_with(title))
            .unwrap_or_else(|| panic!("no section {title}"))
    };
    let common = section("Every backend");
    for (url, title) in [
        ("memory:", "Every backend"),
        ("file:///x", "File"),
        ("redis://x", "Redis"),
        ("redlock://x,y,z", "Redlock"),
        ("zk://x", "ZooKeeper"),
        ("mysql://x/y", "MySQL"),
    ] {
        let known = match refused(&format!("{url}?unknown=1")) {
            Error::InvalidUrl { reason, .. } => reason,
            Error::FeatureDisabled { .. } | Error::Unsupported { .. } => continue,
            other => panic!("{url}: {other}"),
        };
        let (_, known) = known.split_once("known are ").unwrap();
        let own = section(title);
        for option in known.split(", ") {
            let row = |section: &str| {
                section.lines().any(|line| {
                    line.starts_with("| `")
                        && line.split(" | ").next().unwrap().contains(&format!("`{option}`"))
                })
            };
            assert!(
                row(own) || row(common),
                "docs/options.md has no `{option}` for {url}"
            );
        }
    }
}
