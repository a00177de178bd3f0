//! A namespace is a border for users whose rights end at it.

use lockkit_core::{Error, FencingToken, LockClient, Result};
use lockkit_redis::{RedisBackend, RedisConfig, RedlockBackend, RedlockConfig};
use lockkit_testbed::redis::{RedisBuilder, RedisServer};
use redis::{Cmd, Connection, cmd};

use crate::common::{AT_ONCE, LONG, SECOND, granted, keys, lock, no_server, shown, until, waiter};

const OURS: &str = "ours";
const THEIRS: &str = "their.s-1";
const PASSWORD: &str = "open-sesame";

/// The rules that a page of the documentation gives for a user of this namespace alone.
fn documented_rights(docs: &str, namespace: &str) -> String {
    let (_, after) = docs
        .split_once("ACL SETUSER locker on >secret")
        .expect("the rules");
    let (rules, _) = after.split_once("```").expect("their end");
    let words: Vec<_> = rules.split_whitespace().filter(|word| *word != "\\").collect();
    words.join(" ").replace("lockkit:", &format!("{namespace}:"))
}

fn with_two_users(docs: &str) -> impl Fn(RedisBuilder) -> RedisBuilder {
    let users = [OURS, THEIRS].map(|namespace| (namespace, documented_rights(docs, namespace)));
    move |builder| {
        let both = users.iter();
        both.fold(builder, |builder, (user, rules)| {
            builder.user(user, PASSWORD, rules)
        })
    }
}

fn url(server: &RedisServer, user: &str) -> String {
    format!("redis://{user}:{PASSWORD}@{}", server.addr())
}

async fn connect(server: &RedisServer, user: &str, namespace: &str) -> Result<LockClient> {
    let mut config = RedisConfig::new(url(server, user));
    config.namespace = namespace.into();
    let backend = Box::pin(RedisBackend::connect(config)).await?;
    Ok(LockClient::new(backend))
}

/// The attempts of a user on other keys and channels.
struct Intruder {
    connection: Connection,
    refused: usize,
}

impl Intruder {
    fn at(server: &RedisServer) -> Self {
        let client = redis::Client::open(url(server, OURS)).unwrap();
        Self {
            connection: client.get_connection().unwrap(),
            refused: 0,
        }
    }

    fn tries(&mut self, command: &str, arguments: &[&str]) {
        let mut tried: Cmd = cmd(command);
        tried.arg(arguments);
        let outcome = tried.query::<redis::Value>(&mut self.connection);
        let error = outcome.expect_err(&format!("{command} {arguments:?}"));
        // Within a script, Redis 7.0 says so in words alone.
        let text = error.to_string();
        let is_refused =
            error.code() == Some("NOPERM") || text.contains("The user executing the script can't");
        assert!(is_refused, "{command} {arguments:?}: {text}");
        self.refused += 1;
    }

    fn tries_key(&mut self, key: &str) {
        self.tries("DEL", &[key]);
        self.tries("GET", &[key]);
        self.tries("SET", &[key, "9000000000000000"]);
        self.tries("PEXPIRE", &[key, "1"]);
        self.tries("ZREM", &[key, "x"]);
        self.tries("ZADD", &[key, "1", "x"]);
        self.tries("HSET", &[key, "x", "1"]);
        self.tries("EVAL", &["return redis.call('DEL', KEYS[1])", "1", key]);
        let hidden = format!("return redis.call('DEL', '{key}')");
        self.tries("EVAL", &[&hidden, "1", "ours:x"]);
    }

    fn tries_channel(&mut self, channel: &str) {
        self.tries("PUBLISH", &[channel, "x"]);
        let hidden = format!("return redis.call('PUBLISH', '{channel}', 'x')");
        self.tries("EVAL", &[&hidden, "1", "ours:x"]);
        self.tries("SUBSCRIBE", &[channel]);
    }
}

fn channels(server: &RedisServer) -> Vec<String> {
    let channels = server.cli(&["PUBSUB", "CHANNELS", "*"]).unwrap();
    channels.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_user_reaches_no_other_namespace() {
    if no_server() {
        return;
    }
    let builder = with_two_users(include_str!("../../../docs/redis.md"))(RedisServer::builder());
    let server = builder.start().unwrap();
    let ours = connect(&server, OURS, OURS).await.unwrap();
    let [one, two] = [
        connect(&server, THEIRS, THEIRS).await.unwrap(),
        connect(&server, THEIRS, THEIRS).await.unwrap(),
    ];
    // Everything that there can be: a lock that is waited for, shared holds, permits, one that is asked for, an election.
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", LONG));
    let shared = lock(&one, "shared", LONG).shared().acquire().await.unwrap();
    let permit = one.semaphore("s", 1).unwrap().acquire().await.unwrap();
    let asked = lock(&one, "asked", LONG).acquire().await.unwrap();
    let _ = two.revoke("asked", asked.token(), SECOND / 100).await.unwrap();
    let candidate = one.election("e").unwrap().candidate("n").unwrap();
    let leader = candidate.campaign().await.unwrap();
    let mut observer = two.election("e").unwrap().observe();
    let _ = observer.next().await;
    let is_there = |what: &str| keys(&server).iter().any(|key| key.contains(what));
    for what in [
        "#queue:",
        "#about:",
        "#holders:",
        "#revoked:",
        "#fence",
        "#semaphore:",
        "#client:",
    ] {
        until(LONG, what, async || is_there(what)).await;
    }
    let own = lock(&ours, "a", LONG).acquire().await.unwrap();

    let prefix = format!("{THEIRS}:");
    let theirs: Vec<_> = keys(&server)
        .into_iter()
        .filter(|key| !key.starts_with("ours:"))
        .collect();
    assert!(theirs.iter().all(|key| key.starts_with(&prefix)), "{theirs:?}");
    let heard: Vec<_> = channels(&server)
        .into_iter()
        .filter(|name| !name.starts_with("ours:"))
        .collect();
    assert!(
        heard.len() >= 3 && heard.iter().all(|name| name.starts_with(&prefix)),
        "{heard:?}"
    );
    let mut intruder = Intruder::at(&server);
    for key in &theirs {
        intruder.tries_key(key);
    }
    for channel in &heard {
        intruder.tries_channel(channel);
    }
    assert!(intruder.refused > 50, "{}", intruder.refused);
    // Nor by lockkit itself.
    let refused = connect(&server, OURS, THEIRS).await.unwrap_err();
    assert!(shown(&refused).contains("docs/redis.md"), "{refused:?}");

    let counter: u64 = server
        .cli(&["GET", &format!("{prefix}lockkit#fence")])
        .unwrap()
        .parse()
        .unwrap();
    assert!(counter < 1 << 52, "{counter}");
    held.release().await.unwrap();
    granted(AT_ONCE, "it kept its place", waiting)
        .await
        .release()
        .await
        .unwrap();
    shared.release().await.unwrap();
    permit.release().await.unwrap();
    own.release().await.unwrap();
    leader.resign().await.unwrap();
}

#[tokio::test]
async fn a_user_reaches_no_other_namespace_of_redlock() {
    if no_server() {
        return;
    }
    let build = with_two_users(include_str!("../../../docs/redlock.md"));
    let masters = [(); 3].map(|()| build(RedisServer::builder()).start().unwrap());
    let client = async |namespace: &str| {
        let hosts = masters
            .each_ref()
            .map(|master| format!("{namespace}:{PASSWORD}@{}", master.addr()));
        let mut config = RedlockConfig::new(format!("redlock://{}", hosts.join(",")));
        config.namespace = namespace.into();
        LockClient::new(Box::pin(RedlockBackend::connect(config)).await.unwrap())
    };
    let (ours, one, two) = (client(OURS).await, client(THEIRS).await, client(THEIRS).await);
    let held = lock(&one, "a", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&two, "a", LONG));
    let shared = lock(&one, "shared", LONG).shared().acquire().await.unwrap();
    let asked = lock(&one, "asked", LONG).acquire().await.unwrap();
    let _ = two.revoke("asked", asked.token(), SECOND / 100).await.unwrap();
    let own = lock(&ours, "a", LONG).acquire().await.unwrap();
    let prefix = format!("{THEIRS}:");
    let mut refused = 0;
    for master in &masters {
        let is_there = |what: &str| {
            keys(master)
                .iter()
                .any(|key| key.starts_with(&prefix) && key.contains(what))
        };
        for what in [
            "#writers:",
            "#asked:",
            "#about:",
            "#holders:",
            "#revoked:",
            "#fence:",
            "#redlock",
        ] {
            until(LONG, what, async || is_there(what)).await;
        }
        let mut intruder = Intruder::at(master);
        for key in keys(master).iter().filter(|key| !key.starts_with("ours:")) {
            assert!(key.starts_with(&prefix), "{key}");
            intruder.tries_key(key);
        }
        for channel in channels(master).iter().filter(|name| !name.starts_with("ours:")) {
            assert!(channel.starts_with(&prefix), "{channel}");
            intruder.tries_channel(channel);
        }
        refused += intruder.refused;
    }
    assert!(refused > 50, "{refused}");
    held.release().await.unwrap();
    granted(AT_ONCE, "it kept its place", waiting)
        .await
        .release()
        .await
        .unwrap();
    shared.release().await.unwrap();
    own.release().await.unwrap();
}

/// Without a namespace, `a:b` would be the lock `b` of the namespace `a`, and there have another longest ttl, another quarantine and
/// another counter.
async fn refuses_names_of_other_namespaces(client: &LockClient) {
    let refused = |result: Result<()>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::InvalidOptions { .. }), "{error}");
        assert!(error.to_string().contains("namespace `a`"), "{error}");
    };
    let other = lock(client, "a:b", LONG);
    refused(other.try_acquire().await.map(drop));
    refused(other.acquire().await.map(drop));
    refused(other.shared().try_acquire().await.map(drop));
    refused(client.inspect("a:b").await.map(drop));
    let token = FencingToken::new(1);
    refused(client.revoke("a:b", token, SECOND).await.map(drop));
    refused(client.revoke_by_force("a:b", token).await.map(drop));
    // Nobody else has a name that begins so.
    for name in ["a", "é:b", ":b"] {
        let own = lock(client, name, LONG).acquire().await.unwrap();
        own.release().await.unwrap();
    }
}

#[tokio::test]
async fn without_a_namespace_others_names_are_refused() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let mut config = RedisConfig::new(server.url());
    config.namespace = String::new();
    let client = LockClient::new(Box::pin(RedisBackend::connect(config)).await.unwrap());
    refuses_names_of_other_namespaces(&client).await;
    let permit = client.semaphore("a:b", 2).unwrap().try_acquire().await;
    assert!(matches!(permit, Err(Error::InvalidOptions { .. })), "{permit:?}");
}

#[tokio::test]
async fn without_a_namespace_redlock_refuses_others_names() {
    if no_server() {
        return;
    }
    let masters = [(); 3].map(|()| RedisServer::plain().unwrap());
    let hosts = masters.each_ref().map(|master| master.addr().to_string());
    let mut config = RedlockConfig::new(format!("redlock://{}", hosts.join(",")));
    config.namespace = String::new();
    let client = LockClient::new(Box::pin(RedlockBackend::connect(config)).await.unwrap());
    refuses_names_of_other_namespaces(&client).await;
}
