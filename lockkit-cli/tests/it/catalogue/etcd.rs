//! etcd.

use std::sync::Arc;

use lockkit_testbed::{
    Certificates, Port,
    etcd::{self, EtcdServer},
    redis::RedisServer,
    skipped,
};

use super::{Table, connecting, meanwhile, says, trying, until};

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn etcd_errors_are_those_of_the_catalogue() {
    if skipped("etcd", etcd::missing()) {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let strangers = Certificates::generate().unwrap();
    let encrypted = EtcdServer::builder()
        .tls(&certificates)
        .client_certificates()
        .start()
        .unwrap();
    let users = EtcdServer::builder().authorise("lockkit/").start().unwrap();
    let plain = EtcdServer::plain().unwrap();
    let mut table = Table::new("etcd", "The servers' words are those of etcd 3.4.");
    let rights = "Grant the role what [etcd.md](etcd.md) says.";

    table.row(
        "nobody listens at the port",
        says("refused", "is the server running"),
        "Start the server; check host and port.",
        || {
            connecting(&format!(
                "etcd://{}?connect_timeout=1s",
                Port::reserve().unwrap().addr()
            ))
        },
    );
    table.row(
        "nobody knows the host",
        says("lookup", "check the host in the URL").of("h.invalid"),
        "Correct the host in the URL, or what resolves it.",
        || connecting("etcd://h.invalid?connect_timeout=1s"),
    );
    table.row(
        "the server accepts connections and says nothing",
        says(
            "no answer within the connect_timeout of 1s",
            "does the server run",
        ),
        "Look whether the server hangs, or another program has its port.",
        || {
            let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            connecting(&format!(
                "etcd://{}?connect_timeout=1s",
                silent.local_addr().unwrap()
            ))
        },
    );
    table.row(
        "Redis is at the port",
        says("ended before etcd had answered", "connect with tls=verify"),
        "Correct the port.",
        || {
            let redis = RedisServer::plain().unwrap();
            connecting(&format!("etcd://{}?connect_timeout=1s", redis.addr()))
        },
    );
    table.row(
        "TLS with a port that has none",
        says("ended while TLS began", "is this port"),
        "Correct the port, or configure TLS at the server. If it worked before, somebody may be in the way: do not switch TLS off.",
        || {
            let ca = certificates.authority();
            connecting(&format!(
                "etcd://{}?tls=verify&ca={}&connect_timeout=1s",
                plain.addr(),
                ca.display()
            ))
        },
    );
    table.row(
        "a port that has TLS, without it",
        says("ended before etcd had answered", "connect with tls=verify"),
        "Write `tls=verify`.",
        || connecting(&format!("etcd://{}?connect_timeout=1s", encrypted.addr())),
    );
    table.row(
        "a certificate of an unknown authority",
        says("invalid peer certificate", "as `ca`"),
        "Name the authority's file in the option `ca`.",
        || {
            let ca = strangers.authority();
            connecting(&format!(
                "etcd://{}?tls=verify&ca={}",
                encrypted.addr(),
                ca.display()
            ))
        },
    );
    table.row(
        "a client certificate is asked for",
        says("certificate", "`cert`"),
        "Give the options `cert` and `key`.",
        || {
            let ca = certificates.authority();
            connecting(&format!(
                "etcd://{}?tls=verify&ca={}&connect_timeout=1s",
                encrypted.addr(),
                ca.display()
            ))
        },
    );
    table.row(
        "the password is wrong",
        says("authentication failed", "check both in the URL"),
        "Correct it.",
        || {
            connecting(&format!(
                "etcd://{}:not-canary@{}",
                EtcdServer::USER,
                users.addr()
            ))
        },
    );
    table.row(
        "a user is asked for",
        says("ask for a user", "etcd://user:password@host"),
        "Write it into the URL.",
        || trying(&format!("etcd://{}", users.addr())),
    );
    table.row(
        "the user has no right to the keys",
        says("permission denied", "readwrite"),
        rights,
        || trying(&format!("{}?namespace=elsewhere", users.url())),
    );
    table.row(
        "the database is full",
        says("database space exceeded", "compact and defragment"),
        "Compact, defragment, and disarm the alarm.",
        || {
            let full = EtcdServer::builder()
                .option("--quota-backend-bytes=1000000")
                .start()
                .unwrap();
            let large = "x".repeat(100_000);
            until("it is full", || {
                let put = full.ctl(&["put", "large", &large]);
                put.is_err_and(|error| error.to_string().contains("space exceeded"))
            });
            trying(&full.url())
        },
    );
    table.row(
        "a ttl that is too short for the servers",
        says("grant no lease below", "ask for a ttl of"),
        "Take the ttl that it says.",
        || trying(&format!("{}?ttl=1s", plain.url())),
    );
    table.row(
        "the server has died while its client was connected",
        says("broken pipe", "connects again by itself"),
        "Start it; the client connects by itself.",
        || {
            let dead = EtcdServer::plain().unwrap();
            let url = format!("{}?op_timeout=1s&connect_timeout=1s", dead.url());
            meanwhile(&url, |_| dead.kill().unwrap())
        },
    );
    table.check();
}
