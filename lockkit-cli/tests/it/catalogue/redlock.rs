//! Redlock and Sentinel.

use lockkit_testbed::{
    Port,
    redis::{self, RedisSentinels, RedisServer},
    skipped,
};

use super::{Printed, Table, alone, connect, connecting, meanwhile, says, trying, until};
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
#[expect(clippy::too_many_lines, reason = "a table")]
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
        says("is a replica", "make it a master, or name another in its place"),
        "Make it a master of its own (`REPLICAOF NO ONE`), or name another in its place. The number of masters stays odd.",
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
        says("OOM", "raise its `maxmemory`, and let it evict no locks"),
        "Raise `maxmemory`, or free memory. Leave `maxmemory-policy` at `noeviction`.",
        || {
            let (masters, url) = three(plain);
            voting(&url, || {
                for master in &masters[1..] {
                    master.cli(&["CONFIG", "SET", "maxmemory", "1"]).unwrap();
                }
            })
        },
    );
    table.row(
        "one of the masters asks for a password",
        says(
            "NOAUTH",
            "write its password before this master: redlock://a,b,:password@c",
        ),
        "Write it before that master: `redlock://a,b,:password@c`.",
        || {
            let (_masters, url) = three(|n| {
                if n == 2 {
                    RedisServer::builder().password(PASSWORD).start().unwrap()
                } else {
                    plain(n)
                }
            });
            connecting(&url)
        },
    );
    table.row(
        "one of the masters is a node of a cluster",
        says("Redis Cluster", "or another backend"),
        "Take a server that is no node of a cluster.",
        || {
            let [one, other] = [plain(0), plain(1)];
            let node = RedisServer::builder().cluster_node().start().unwrap();
            let masters = [one.addr(), other.addr(), node.addr()];
            connecting(&url(&masters.map(|addr| addr.to_string())))
        },
    );
    table.row(
        "nobody knows the hosts",
        says("failed to lookup address", "check the host in the URL").of("h.invalid"),
        "Correct the hosts in the URL, or what resolves them.",
        || connecting("redlock://h.invalid,i.invalid,j.invalid?connect_timeout=1s"),
    );
    table.row(
        "two masters are one server by two names",
        says("the same server as", "name another server in place of one"),
        "Name three servers.",
        || {
            let [one, other] = [plain(0), plain(1)];
            let port = one.addr().port();
            connecting(&format!(
                "redlock://127.0.0.1:{port},localhost:{port},{}",
                other.addr()
            ))
        },
    );
    table.row(
        "two masters are two databases of one server",
        says("are the same server", "name another server in place of one").of("masters 1 and 3"),
        "Name three servers.",
        || connecting("redlock://a/1,b,a/2"),
    );
    table.row(
        "two masters",
        says("tolerate no more failures", "use an odd number").of("2 masters"),
        "Take three, or one and `redis://`.",
        || connecting("redlock://a,b"),
    );
    table.row(
        "one master",
        says("has no majority", "use redis://"),
        "Write `redis://`.",
        || connecting("redlock://a"),
    );
    table.row(
        "a ttl longer than `max_ttl`",
        says("is longer than these masters'", "ask for less").of("`ttl`"),
        "Take a shorter ttl. To raise `max_ttl`, see [redlock.md](redlock.md).",
        || {
            let (_masters, url) = three(plain);
            trying(&format!("{url}?max_ttl=5s&ttl=10s"))
        },
    );
    table.row(
        "another client has another `max_ttl`",
        says("the masters by 1s", "need the same").of("`max_ttl`"),
        "Give all clients the same one, or do what it says.",
        || {
            let (_masters, url) = three(plain);
            in_this_process(async {
                let client = connect(&format!("{url}?max_ttl=1s&ttl=1s")).await.unwrap();
                let guard = client.lock("job").unwrap().acquire().await.unwrap();
                guard.release().await.unwrap();
            });
            connecting(&format!("{url}?max_ttl=2s&ttl=1s"))
        },
    );
    table.row(
        "`durable=true` with masters that do not sync each write",
        says("and it has `appendonly no`", "needs `appendonly yes`"),
        "Configure the masters so.",
        || {
            let (_masters, url) = three(plain);
            connecting(&format!("{url}?durable=true"))
        },
    );
    table.row(
        "a semaphore",
        says("not supported", "use another backend").of("semaphores"),
        "Take another backend for it.",
        || {
            let (_masters, url) = three(plain);
            in_this_process(async {
                let client = connect(&url).await.unwrap();
                let tried = async { client.semaphore("job", 2)?.try_acquire().await };
                alone(&tried.await.unwrap_err())
            })
        },
    );
    for (what, command, words, advice, to_do) in [
        (
            "two of three masters have too few replicas",
            &["CONFIG", "SET", "min-replicas-to-write", "1"][..],
            "NOREPLICAS",
            "look at its `INFO replication`",
            "Start their replicas, or lower `min-replicas-to-write`: Redlock needs none.",
        ),
        (
            "two of three masters are replicas since",
            &["REPLICAOF", "127.0.0.1", "1"][..],
            "READONLY",
            "make it a master",
            "Make them masters again.",
        ),
    ] {
        table.row(what, says(words, advice), to_do, move || {
            let (masters, url) = three(plain);
            voting(&url, || {
                for master in &masters[1..] {
                    master.cli(command).unwrap();
                }
            })
        });
    }
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
