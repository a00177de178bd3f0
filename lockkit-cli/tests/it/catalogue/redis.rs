//! Redis.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::Arc,
    thread,
    time::Duration,
};

use lockkit_testbed::{
    Certificates, Port,
    redis::{self, RedisCluster, RedisServer},
    skipped,
};

use super::{Table, alone, connect, connecting, meanwhile, says, trying, until};
use crate::tool::in_this_process;

const PASSWORD: &str = "canary-sesame";
const ALL: &str = "~* &* +@all";

/// The server of those who want for a right, and of all that leaves it as it is.
fn with_users() -> RedisServer {
    let mut server = RedisServer::builder();
    for (name, rules) in [
        ("disabled", "off ~* &* +@all"),
        ("login", "~* &* +@all -hello"),
        ("info", "~* &* +@all -info"),
        ("load", "~* &* +@all -script|load"),
        ("subscribe", "~* &* +@all -subscribe"),
        ("channel", "resetchannels ~* &other:* +@all"),
        ("evalsha", "~* &* +@all -evalsha"),
        ("key", "~other:* &* +@all"),
        ("counter", "~lockkit:job &* +@all"),
        ("set", "~* &* +@all -set"),
        ("get", "~* &* +@all -get"),
        ("time", "~* &* +@all -time"),
        ("publish", "~* &* +@all -publish"),
        ("zrange", "~* &* +@all -zrange"),
        ("locker", ALL),
    ] {
        server = server.user(name, PASSWORD, rules);
    }
    server.start().unwrap()
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn redis_errors_are_those_of_the_catalogue() {
    if skipped("redis", redis::missing()) {
        return;
    }
    let users = with_users();
    let at = users.addr().to_string();
    let with_password = RedisServer::builder().password(PASSWORD).start().unwrap();
    let certificates = Arc::new(Certificates::generate().unwrap());
    let strangers = Certificates::generate().unwrap();
    let encrypted = RedisServer::builder()
        .tls(&certificates)
        .directive("tls-auth-clients", &["yes"])
        .start()
        .unwrap();
    let as_user = |user: &str| format!("redis://{user}:{PASSWORD}@{at}");
    let mut table = Table::new("Redis", "The servers' words are those of Redis 7.0.");
    let rights = "Grant the user what [redis.md](redis.md#rights) lists.";

    table.row(
        "nobody listens at the port",
        says("Connection refused", "is the server running"),
        "Start the server; check host and port.",
        || connecting(&format!("redis://{}", Port::reserve().unwrap().addr())),
    );
    table.row(
        "nobody knows the host",
        says("failed to lookup address", "check the host in the URL").of("h.invalid"),
        "Correct the host in the URL, or what resolves it.",
        || connecting("redis://h.invalid"),
    );
    table.row(
        "the server accepts connections and says nothing",
        says("does not answer within 2s", "does the server run").of("127.0.0.1"),
        "Look whether the server hangs, or another program has its port.",
        || {
            let server = RedisServer::plain().unwrap();
            server.pause().unwrap();
            connecting(server.url())
        },
    );
    table.row(
        "a web server is at the port",
        says("answer is no reply of Redis", "is this the server's port").of("127.0.0.1"),
        "Correct the port.",
        || {
            connecting(&format!(
                "redis://{}",
                answering(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            ))
        },
    );
    table.row(
        "TLS with a port that has none",
        says("does not answer within 2s", "is this its port for TLS"),
        "Correct the port, or configure TLS at the server. If it worked before, somebody may be in the way: do not switch TLS off.",
        || connecting(&format!("rediss://{at}")),
    );
    table.row(
        "a port that has TLS, without it",
        says("reset by peer", "is TLS on at both ends"),
        "Write `rediss://`.",
        || connecting(&format!("redis://{}", encrypted.addr())),
    );
    table.row(
        "a certificate of an unknown authority",
        says("invalid peer certificate", "present certificate as `ca`"),
        "Name the authority's file in the option `ca`.",
        || {
            connecting(&format!(
                "rediss://{}?ca={}",
                encrypted.addr(),
                strangers.authority().display()
            ))
        },
    );
    table.row(
        "a client certificate is asked for",
        says("CertificateRequired", "give one as `cert`"),
        "Give the options `cert` and `key`.",
        || {
            connecting(&format!(
                "rediss://{}?ca={}",
                encrypted.addr(),
                certificates.authority().display()
            ))
        },
    );
    table.row(
        "a password is asked for",
        says("NOAUTH", "check user and password in the URL"),
        "Write it into the URL.",
        || connecting(&format!("redis://{}", with_password.addr())),
    );
    table.row(
        "the password is wrong",
        says("WRONGPASS", "check user and password in the URL"),
        "Correct it.",
        || connecting(&format!("redis://:not-{PASSWORD}@{}", with_password.addr())),
    );
    table.row(
        "the user is disabled",
        says("user is disabled", "check user and password in the URL"),
        "Enable it: `ACL SETUSER name on`.",
        || connecting(&as_user("disabled")),
    );
    table.row(
        "the server has no such database",
        says(
            "DB index is out of range",
            "correct the database in the URL, to the one that all clients use",
        ),
        "Correct the number in the URL: clients of other databases lock something else.",
        || connecting(&format!("redis://{at}/99")),
    );
    for (what, user, right) in [
        ("without the right to `info`", "info", "info"),
        ("without the right to `script load`", "load", "script|load"),
        ("without the right to `subscribe`", "subscribe", "subscribe"),
        ("without the right to the channels", "channel", "channel"),
    ] {
        let url = as_user(user);
        table.row(
            what,
            says("NOPERM", "docs/redis.md").of(right),
            rights,
            move || connecting(&url),
        );
    }
    let (in_script, key_in_script) = ("can't run this command", "can't access at least one of the keys");
    for (what, user, right, words) in [
        (
            "without the right to `evalsha`",
            "evalsha",
            "evalsha",
            "no permissions",
        ),
        (
            "without the right to the lock's key",
            "key",
            "`lockkit:job`",
            "no permissions",
        ),
        (
            "without the right to the counter's key",
            "counter",
            "runs GET on `lockkit:lockkit#fence`",
            key_in_script,
        ),
        (
            "without the right to `get`, which a script needs",
            "get",
            "the script for `lockkit:job` runs GET;",
            in_script,
        ),
        (
            "without the right to `set`, which a script needs",
            "set",
            "SET",
            in_script,
        ),
        (
            "without the right to `time`, which a script needs",
            "time",
            "TIME",
            in_script,
        ),
    ] {
        let url = as_user(user);
        table.row(what, says(words, "docs/redis.md").of(right), rights, move || {
            trying(&url)
        });
    }
    for (what, user, right) in [
        (
            "without the right to `publish`, which a hand-off needs",
            "publish",
            "PUBLISH",
        ),
        (
            "without the right to `zrange`, which a hand-off needs",
            "zrange",
            "ZRANGE",
        ),
    ] {
        let (url, other) = (as_user(user), as_user("locker"));
        table.row(
            what,
            says(in_script, "docs/redis.md")
                .of(right)
                .of("may stay taken until its lease ends"),
            rights,
            move || {
                in_this_process(async {
                    let name = format!("hand-off/{user}");
                    let (one, two) = (connect(&url).await.unwrap(), connect(&other).await.unwrap());
                    let held = one.lock(&name).unwrap().acquire().await.unwrap();
                    let next = two.lock(&name).unwrap();
                    let waiting = tokio::spawn(async move { next.acquire().await });
                    while two.inspect(&name).await.unwrap().waiters != Some(1) {
                        tokio::task::yield_now().await;
                    }
                    let error = held.release().await.unwrap_err();
                    waiting.abort();
                    alone(&error)
                })
            },
        );
    }
    table.row(
        "the lock's key holds something else",
        says("WRONGTYPE", "choose another namespace for all clients").of("`taken:job`"),
        "Find out whose it is: it may be another program's lock. Take another namespace for all clients.",
        || {
            users.cli(&["RPUSH", "taken:job", "x"]).unwrap();
            trying(&format!("redis://{at}?namespace=taken"))
        },
    );
    table.row(
        "the counter of tokens holds something else",
        says("is no number", "delete the key").of("odd:lockkit#fence"),
        "Stop all clients, delete the key, and raise the tokens above the highest `last_token`.",
        || {
            users.cli(&["SET", "odd:lockkit#fence", "x"]).unwrap();
            trying(&format!("redis://{at}?namespace=odd"))
        },
    );
    table.row(
        "the server loads its data",
        says("LOADING", "wait until it has"),
        "Wait, and try again.",
        loading,
    );
    table.row(
        "the server is busy with somebody's script",
        says("BUSY", "SCRIPT KILL"),
        "End the script, or wait.",
        busy,
    );
    table.row(
        "the server cannot save to its disk",
        says("MISCONF", "look at its log"),
        "Look at its log and its disk.",
        || {
            let server = RedisServer::builder()
                .directive("save", &["3600", "1"])
                .start()
                .unwrap();
            let dir = server.cli(&["CONFIG", "GET", "dir"]).unwrap();
            fs::remove_dir_all(dir.lines().last().unwrap()).unwrap();
            server.cli(&["BGSAVE"]).unwrap();
            until("the save has failed", || {
                let info = server.cli(&["INFO", "persistence"]).unwrap();
                info.contains("rdb_last_bgsave_status:err")
            });
            trying(server.url())
        },
    );
    table.row(
        "the server has too few replicas",
        says("NOREPLICAS", "look at its `INFO replication`"),
        "Start its replicas. With a lower `min-replicas-to-write`, a fail-over loses more.",
        || {
            let server = RedisServer::builder()
                .directive("min-replicas-to-write", &["1"])
                .start()
                .unwrap();
            trying(server.url())
        },
    );
    table.row(
        "the server's memory is full",
        says("OOM", "raise its `maxmemory`, and let it evict no locks"),
        "Raise `maxmemory`, or free memory. Leave `maxmemory-policy` at `noeviction`.",
        || {
            let server = RedisServer::builder()
                .max_memory(1, "noeviction")
                .start()
                .unwrap();
            trying(server.url())
        },
    );
    table.row(
        "the server has as many clients as it takes",
        says("max number of clients reached", "raise its `maxclients`"),
        "Raise `maxclients`, or end clients.",
        || {
            let server = RedisServer::builder()
                .directive("maxclients", &["3"])
                .start()
                .unwrap();
            let _clients = full(&server, 3);
            connecting(server.url())
        },
    );
    table.row(
        "the server is a replica",
        says(
            "is a replica",
            "give the address of its master, or the sentinels'",
        ),
        "Give the master's address, or the sentinels' with the option `sentinel`.",
        || {
            let replica = RedisServer::builder().replica_of(users.addr()).start().unwrap();
            connecting(replica.url())
        },
    );
    table.row(
        "the server was made a replica while its client was connected",
        says("READONLY", "give the address of its master, or the sentinels'"),
        "Give the master's address. Only a client of sentinels finds it by itself.",
        || {
            let server = RedisServer::plain().unwrap();
            let port = users.addr().port().to_string();
            meanwhile(server.url(), |_| {
                server.cli(&["REPLICAOF", "127.0.0.1", &port]).unwrap();
            })
        },
    );
    table.row(
        "the server has died while its client was connected",
        says("broken pipe", "connects again by itself"),
        "Start it; the client connects by itself.",
        || {
            let server = RedisServer::plain().unwrap();
            meanwhile(server.url(), |_| server.kill().unwrap())
        },
    );
    table.row(
        "the server is a node of a cluster",
        says("Redis Cluster", "or another backend"),
        "Take a server that is no node of a cluster.",
        || connecting(RedisCluster::start().unwrap().nodes()[0].url()),
    );
    table.row(
        "the server is older than Redis 6",
        says("does not know HELLO", "take Redis 6 or newer, and do not rename"),
        "Take a newer server, or leave out its `rename-command HELLO`.",
        || {
            let server = RedisServer::builder()
                .directive("rename-command", &["HELLO", ""])
                .start()
                .unwrap();
            connecting(server.url())
        },
    );
    table.check();
}

/// A server that gives one answer, whatever it is asked. It ends with the process.
fn answering(answer: &'static [u8]) -> std::net::SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut asked = [0; 1024];
            let _ = stream.read(&mut asked).and_then(|_| stream.write_all(answer));
        }
    });
    address
}

/// Takes as many clients as there may be. The one that has seen the server start may still be there.
fn full(server: &RedisServer, clients: usize) -> Vec<TcpStream> {
    let mut connected = Vec::new();
    until("all are in", || {
        let mut stream = TcpStream::connect(server.addr()).unwrap();
        let mut answer = [0; 7];
        let answered = stream
            .write_all(b"PING\r\n")
            .and_then(|()| stream.read_exact(&mut answer));
        if answered.is_ok() && answer == *b"+PONG\r\n" {
            connected.push(stream);
        }
        connected.len() == clients
    });
    connected
}

/// It takes its time for each key.
fn loading() -> super::Printed {
    let server = RedisServer::builder()
        .directive("enable-debug-command", &["yes"])
        .directive("key-load-delay", &["500"])
        .directive("loading-process-events-interval-bytes", &["1024"])
        .start()
        .unwrap();
    server.cli(&["DEBUG", "POPULATE", "100000"]).unwrap();
    server.cli(&["SAVE"]).unwrap();
    server.stop().unwrap();
    thread::scope(|scope| {
        // It waits until the server is ready, which it is not before it is killed.
        scope.spawn(|| server.start());
        until("it loads", || {
            let answer = server.cli(&["PING"]);
            answer.is_err_and(|error| error.to_string().contains("LOADING"))
        });
        let printed = connecting(server.url());
        server.kill().unwrap();
        printed
    })
}

fn busy() -> super::Printed {
    let server = RedisServer::builder()
        .directive("busy-reply-threshold", &["10"])
        .start()
        .unwrap();
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.write_all(b"EVAL \"while true do end\" 0\r\n").unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    until("it is busy", || {
        let answer = server.cli(&["PING"]);
        answer.is_err_and(|error| error.to_string().contains("BUSY"))
    });
    connecting(server.url())
}
