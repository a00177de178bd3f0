//! etcd.

use std::{fs, sync::Arc};

use lockkit_testbed::{
    Certificates, Port, ServerPair,
    etcd::{self, EtcdServer},
    redis::RedisServer,
    skipped,
};
use tempfile::TempDir;

use super::{Printed, Table, alone, connect, connecting, meanwhile, says, trying, until};
use crate::tool::in_this_process;

/// The error of connecting to a server with this certificate.
fn presenting(certificates: &Arc<Certificates>, which: ServerPair) -> Printed {
    // It takes the last of each option.
    let pair = certificates.server_pair(which);
    let server = EtcdServer::builder()
        .tls(certificates)
        .option(format!("--cert-file={}", pair.display()))
        .option(format!("--key-file={}", pair.display()))
        .start()
        .unwrap();
    let ca = certificates.authority();
    connecting(&format!(
        "etcd://{}?tls=verify&ca={}",
        server.addr(),
        ca.display()
    ))
}

/// The error of a semaphore with so many permits that is tried for while one with two is held.
fn beside_two(url: &str, permits: u32) -> Printed {
    in_this_process(async {
        let client = connect(url).await.unwrap();
        let held = client.semaphore("pair", 2).unwrap().acquire().await.unwrap();
        let other = client.semaphore("pair", permits).unwrap();
        let printed = alone(&other.try_acquire().await.unwrap_err());
        held.release().await.unwrap();
        printed
    })
}

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
    for arguments in [
        &["user", "add", "newcomer:canary"][..],
        &["user", "add", "reader:canary"][..],
        &["role", "add", "reader"][..],
        &[
            "role",
            "grant-permission",
            "reader",
            "read",
            "--prefix=true",
            "lockkit/",
        ][..],
        &["user", "grant-role", "reader", "reader"][..],
    ] {
        users.ctl(arguments).unwrap();
    }
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
        says("permission denied", "readwrite").of("elsewhere/"),
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
    table.row(
        "the server's certificate has expired",
        says("certificate expired", "renew it at the server"),
        "Renew it. Look at this host's clock, too.",
        || presenting(&certificates, ServerPair::Expired),
    );
    table.row(
        "the server's certificate is for another host",
        says("not valid for name", "write a host that it is for").of("elsewhere.example"),
        "Write the host that it is for, or have it issued for this one.",
        || presenting(&certificates, ServerPair::Elsewhere),
    );
    table.row(
        "the client's certificate has expired",
        says("does not accept the certificate", "has it expired"),
        "Renew it.",
        || {
            connecting(&format!(
                "etcd://{}?tls=verify&ca={}&cert={}&key={}",
                encrypted.addr(),
                certificates.authority().display(),
                certificates.expired_client().display(),
                certificates.expired_client_key().display()
            ))
        },
    );
    table.row(
        "the client's certificate is of an authority that the server does not know",
        says(
            "does not accept the certificate",
            "does the server know its authority",
        ),
        "Give one of the authority in the servers' `trusted-ca-file`.",
        || {
            connecting(&format!(
                "etcd://{}?tls=verify&ca={}&cert={}&key={}",
                encrypted.addr(),
                certificates.authority().display(),
                strangers.client().display(),
                strangers.client_key().display()
            ))
        },
    );
    table.row(
        "the private key is another certificate's",
        says("is not the private key of the certificate", "").of("other.key"),
        "Give the two that belong together.",
        || {
            let dir = TempDir::new().unwrap();
            let [cert, key] = ["client.pem", "other.key"].map(|name| dir.path().join(name));
            fs::copy(certificates.client(), &cert).unwrap();
            fs::copy(strangers.client_key(), &key).unwrap();
            connecting(&format!(
                "etcd://{}?tls=verify&cert={}&key={}&ca={}",
                encrypted.addr(),
                cert.display(),
                key.display(),
                certificates.authority().display()
            ))
        },
    );
    table.row(
        "the file of the authority is not there",
        says("No such file", "").of("/no/ca.pem"),
        "Correct the option `ca`.",
        || connecting(&format!("etcd://{}?tls=verify&ca=/no/ca.pem", encrypted.addr())),
    );
    table.row(
        "an authority is given without TLS",
        says("has no effect", "without tls=verify").of("`ca`"),
        "Write `tls=verify`.",
        || connecting(&format!("etcd://{}?ca=/no/ca.pem", plain.addr())),
    );
    table.row(
        "there is no such user",
        says("authentication failed", "check both in the URL"),
        "`etcdctl user add`, or correct the URL.",
        || connecting(&format!("etcd://nobody:canary@{}", users.addr())),
    );
    table.row(
        "the user has no role",
        says("permission denied", "readwrite").of("lockkit/"),
        rights,
        || trying(&format!("etcd://newcomer:canary@{}", users.addr())),
    );
    table.row(
        "the role may read the keys, and not write them",
        says("permission denied", "readwrite").of("lockkit/"),
        rights,
        || trying(&format!("etcd://reader:canary@{}", users.addr())),
    );
    table.row(
        "most of the members do not run",
        says("no lease was granted", "do most of the members run"),
        "Start them.",
        || {
            let lonely = EtcdServer::plain().unwrap();
            // Of two members, two are a majority.
            let nobody = ["member", "add", "nobody", "--peer-urls=http://127.0.0.1:1"];
            lonely.ctl(&nobody).unwrap();
            in_this_process(async {
                let client = connect(&format!("{}?op_timeout=60s", lonely.url()))
                    .await
                    .unwrap();
                alone(&client.lock("job").unwrap().try_acquire().await.unwrap_err())
            })
        },
    );
    table.row(
        "the hosts are of different clusters",
        says("is of the cluster", "name the members of one cluster"),
        "Name the members of one cluster.",
        || connecting(&format!("etcd://{},{}", plain.addr(), users.addr())),
    );
    table.row(
        "a host is named twice",
        says("are the same", "").of("servers 1 and 2"),
        "Name each member once.",
        || connecting(&format!("etcd://{0},{0}", plain.addr())),
    );
    table.row(
        "the key of raised tokens holds something else",
        says("is not what lockkit has written there", "delete it").of("odd/%fence"),
        "Delete the key, and raise the tokens above the highest `last_token`.",
        || {
            plain.ctl(&["put", "odd/%fence", "not ours"]).unwrap();
            trying(&format!("{}?namespace=odd", plain.url()))
        },
    );
    table.row(
        "a semaphore has other permits",
        says("with 2 permits, not 3", "ask for the same number everywhere").of("`pair`"),
        "Use one size.",
        || beside_two(&format!("{}?namespace=sizes", plain.url()), 3),
    );
    table.row(
        "a semaphore with too many permits",
        says("1001 is more than the 1000", "ask for fewer").of("`permits`"),
        "Take fewer permits, or another backend.",
        || beside_two(&format!("{}?namespace=many", plain.url()), 1_001),
    );
    table.check();
}
