//! Redlock and Sentinel.

use lockkit_testbed::{
    Port,
    redis::{self, RedisSentinels, RedisServer},
    skipped,
};

use super::{Printed, Table, alone, connect, connecting, meanwhile, says, until};
use crate::tool::in_this_process;

const PASSWORD: &str = "canary-sesame";

fn url(masters: &[String]) -> String {
    format!("redlock://{}", masters.join(","))
}

/// Three masters, each made by this.
fn three(make: impl Fn(usize) -> RedisServer) -> ([RedisServer; 3], String) {
    let masters = std::array::from_fn(make);
    let url = url(&masters.each_ref().map(|master| master.addr().to_string()));
    (masters, url)
}

fn plain(_: usize) -> RedisServer {
    RedisServer::plain().unwrap()
}

/// The error of a lock that is tried for after `something`, where all masters have a vote.
fn voting(url: &str, something: impl FnOnce()) -> Printed {
    in_this_process(async {
        let client = connect(&format!("{url}?max_ttl=1s&ttl=1s")).await.unwrap();
        let lock = client.lock("job").unwrap();
        lock.acquire().await.unwrap().release().await.unwrap();
        something();
        alone(&lock.try_acquire().await.unwrap_err())
    })
}

#[test]
fn redlock_errors_are_those_of_the_catalogue() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let mut table = Table::new("Redlock", "The servers' words are those of Redis 7.0.");

    table.row(
        "nobody listens at any port",
        says("Connection refused", "is the server running"),
        "Start the masters; check hosts and ports.",
        || {
            let ports: [Port; 3] = std::array::from_fn(|_| Port::reserve().unwrap());
            let addresses = ports.each_ref().map(|port| port.addr().to_string());
            connecting(&format!("{}?connect_timeout=1s", url(&addresses)))
        },
    );
    table.row(
        "two of three masters are away",
        says("Connection refused", "is the server running"),
        "Start them.",
        || {
            let (masters, url) = three(plain);
            masters[1].kill().unwrap();
            masters[2].kill().unwrap();
            connecting(&format!("{url}?connect_timeout=1s"))
        },
    );
    table.row(
        "the password is wrong",
        says("WRONGPASS", "check user and password in the URL"),
        "Correct it.",
        || {
            let (_masters, url) = three(|_| RedisServer::builder().password(PASSWORD).start().unwrap());
            connecting(&url.replace("redlock://", "redlock://:not-canary@"))
        },
    );
    table.row(
        "a master is a replica",
        says("is a replica", "locks need the master"),
        "Name its master, or take it off the list.",
        || {
            let first = RedisServer::plain().unwrap();
            let at = first.addr();
            let (_masters, url) = three(|_| RedisServer::builder().replica_of(at).start().unwrap());
            connecting(&url)
        },
    );
    table.row(
        "without the right to `info`",
        says("NOPERM", "docs/redis.md").of("'info'"),
        "Grant the user what [redis.md](redis.md#rights) lists.",
        || {
            let (_masters, url) = three(|_| {
                RedisServer::builder()
                    .user("poor", PASSWORD, "~* &* +@all -info")
                    .start()
                    .unwrap()
            });
            connecting(&url.replace("redlock://", &format!("redlock://poor:{PASSWORD}@")))
        },
    );
    table.row(
        "two of three masters died while their client was connected",
        says("broken pipe", "connects again by itself"),
        "Start them; the client connects by itself.",
        || {
            let (masters, url) = three(plain);
            meanwhile(&url, |_| {
                masters[1].kill().unwrap();
                masters[2].kill().unwrap();
            })
        },
    );
    table.row(
        "the memory of two of three masters is full",
        says("OOM", "raise its `maxmemory`"),
        "Raise `maxmemory`, or free memory.",
        || {
            let (masters, url) = three(plain);
            voting(&url, || {
                for master in &masters[1..] {
                    master.cli(&["CONFIG", "SET", "maxmemory", "1"]).unwrap();
                }
            })
        },
    );
    table.check();
}

#[test]
fn sentinel_errors_are_those_of_the_catalogue() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let group = RedisSentinels::start().unwrap();
    let group = &group;
    let mut table = Table::new("Sentinel", "The servers' words are those of Redis 7.0.");
    let named = |name: &str| {
        let sentinels: Vec<_> = group
            .sentinels()
            .iter()
            .map(|one| one.addr().to_string())
            .collect();
        format!("redis://{}?sentinel={name}", sentinels.join(","))
    };

    table.row(
        "nobody listens at any sentinel's port",
        says("Connection refused", "is the server running"),
        "Start the sentinels; check hosts and ports.",
        || {
            connecting(&format!(
                "redis://{}?sentinel=main",
                Port::reserve().unwrap().addr()
            ))
        },
    );
    table.row(
        "no sentinel knows the master",
        says("knows no master", "correct the option `sentinel`").of("`nobody`"),
        "Give the name that `sentinel monitor` has.",
        || connecting(&named("nobody")),
    );
    table.row(
        "a server is named in a sentinel's place",
        says("is no sentinel", "list sentinels"),
        "Name the sentinels' port, often 26379.",
        || connecting(&format!("redis://{}?sentinel=main", group.servers()[0].addr())),
    );
    table.row(
        "a sentinel is named without the option `sentinel`",
        says("is a sentinel", "give the option `sentinel`"),
        "Give the option `sentinel`.",
        || connecting(group.sentinels()[0].url()),
    );
    table.row(
        "the master asks for a password",
        says("NOAUTH", "check user and password in the URL"),
        "Write it into the URL.",
        || {
            let other = RedisSentinels::start().unwrap();
            other.servers()[0]
                .cli(&["CONFIG", "SET", "requirepass", PASSWORD])
                .unwrap();
            let url = format!(
                "redis://{}?sentinel={}",
                other.sentinels()[0].addr(),
                RedisSentinels::MASTER_NAME
            );
            connecting(&url)
        },
    );
    table.row(
        "the master is dead",
        says("Connection refused", "is the server running"),
        "Wait for the fail-over, or start it.",
        || {
            let other = RedisSentinels::start().unwrap();
            other.servers()[0].kill().unwrap();
            until("it is gone", || other.servers()[0].cli(&["PING"]).is_err());
            let url = format!(
                "redis://{}?sentinel={}",
                other.sentinels()[0].addr(),
                RedisSentinels::MASTER_NAME
            );
            connecting(&url)
        },
    );
    table.check();
}
