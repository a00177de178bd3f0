//! ZooKeeper.

use std::{fs, sync::Arc};

use lockkit_testbed::{
    Certificates, Port,
    redis::RedisServer,
    skipped,
    zookeeper::{self, ZkServer},
};
use tempfile::TempDir;
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

use super::{Printed, Table, alone, connect, connecting, meanwhile, printed, says, trying};
use crate::tool::in_this_process;

/// Makes this node, with these rights for everybody.
fn node(server: &ZkServer, path: &str, rights: Permission) {
    node_with(server, path, rights, b"");
}

fn node_with(server: &ZkServer, path: &str, rights: Permission, data: &[u8]) {
    in_this_process(async {
        let client = Client::connect(&server.addr().to_string()).await.unwrap();
        let acl = [Acl::new(rights, AuthId::anyone())];
        let options = CreateMode::Persistent.with_acls(Acls::new(&acl));
        client.create(path, data, &options).await.unwrap();
    });
}

/// Has a lock for a moment, so that its directory is there, and closes the client.
fn lock_once(url: &str) {
    in_this_process(async {
        let client = connect(url).await.unwrap();
        let guard = client.lock("job").unwrap().acquire().await.unwrap();
        guard.release().await.unwrap();
        client.close(std::time::Duration::from_secs(1)).await.unwrap();
    });
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
fn zookeeper_errors_are_those_of_the_catalogue() {
    if skipped("zk", zookeeper::missing()) {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let strangers = Certificates::generate().unwrap();
    let server = ZkServer::builder()
        .tls(&certificates)
        .directive("ssl.clientAuth=need")
        .start()
        .unwrap();
    let server = &server;
    let at = server.addr().to_string();
    let secure = server.secure_addr().unwrap().to_string();
    let mut table = Table::new("ZooKeeper", "The servers' words are those of ZooKeeper 3.8.");
    let rights = "Set the ACL as [zookeeper.md](zookeeper.md#rights) says.";

    table.row(
        "nobody listens at the port",
        says("no available hosts", "do the servers run"),
        "Start the server; check host and port.",
        || {
            connecting(&format!(
                "zk://{}?connect_timeout=1s",
                Port::reserve().unwrap().addr()
            ))
        },
    );
    table.row(
        "nobody knows the host",
        says("no available hosts", "do the servers run").of("h.invalid"),
        "Correct the host in the URL, or what resolves it.",
        || connecting("zk://h.invalid?connect_timeout=1s"),
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
                "zk://{}?connect_timeout=1s",
                silent.local_addr().unwrap()
            ))
        },
    );
    table.row(
        "Redis is at the port",
        says("no answer within the connect_timeout of 1s", "is this its port"),
        "Correct the port.",
        || {
            let redis = RedisServer::plain().unwrap();
            connecting(&format!("zk://{}?connect_timeout=1s", redis.addr()))
        },
    );
    table.row(
        "TLS with a port that has none",
        says("ended while TLS began", "is this port"),
        "Correct the port, or configure TLS at the server. If it worked before, somebody may be in the way: do not switch TLS off.",
        || {
            let ca = certificates.authority();
            connecting(&format!(
                "zk://{at}?tls=verify&ca={}&connect_timeout=1s",
                ca.display()
            ))
        },
    );
    table.row(
        "a certificate of an unknown authority",
        says("invalid peer certificate", "as `ca`"),
        "Name the authority's file in the option `ca`.",
        || {
            let ca = strangers.authority();
            connecting(&format!("zk://{secure}?tls=verify&ca={}", ca.display()))
        },
    );
    table.row(
        "a client certificate is asked for",
        says("certificate", "`cert`"),
        "Give the options `cert` and `key`.",
        || {
            let ca = certificates.authority();
            connecting(&format!("zk://{secure}?tls=verify&ca={}", ca.display()))
        },
    );
    table.row(
        "the directory may not be written",
        says("not authorized", "grant the user").of("/barred"),
        rights,
        || {
            node(server, "/barred", Permission::READ);
            trying(&format!("zk://{at}/barred"))
        },
    );
    table.row(
        "the lock's directory may not be written",
        says("not authorized", "grant the user").of("/closed/lockkit/job"),
        rights,
        || {
            node(server, "/closed", Permission::ALL);
            node(server, "/closed/lockkit", Permission::ALL);
            node(server, "/closed/lockkit/job", Permission::READ);
            trying(&format!("zk://{at}/closed"))
        },
    );
    table.row(
        "the lock's directory was made by another user",
        says("not authorized", "grant the user").of("/owned"),
        rights,
        || {
            let other = format!("zk://other:canary@{at}/owned?access=creator&parents=persistent");
            lock_once(&other);
            trying(&format!("zk://{at}/owned"))
        },
    );
    table.row(
        "the directory may not be deleted from",
        says("not authorized", "grant the user").of("/kept"),
        rights,
        || {
            node(server, "/kept", Permission::READ | Permission::CREATE);
            node(server, "/kept/lockkit", Permission::READ | Permission::CREATE);
            node(server, "/kept/lockkit/job", Permission::READ | Permission::CREATE);
            in_this_process(async {
                let client = connect(&format!("zk://{at}/kept")).await.unwrap();
                let guard = client.lock("job").unwrap().acquire().await.unwrap();
                alone(&guard.release().await.unwrap_err())
            })
        },
    );
    table.row(
        "the server has too many connections of this host",
        says("no available hosts", "do the servers run"),
        "Raise `maxClientCnxns`.",
        || {
            let full = ZkServer::builder().directive("maxClientCnxns=1").start().unwrap();
            let url = format!("zk://{}?connect_timeout=1s", full.addr());
            in_this_process(async {
                let _first = connect(&format!("zk://{}", full.addr())).await.unwrap();
                let error = connect(&url).await.unwrap_err();
                printed(&error, &url)
            })
        },
    );
    table.row(
        "the server grants sessions that are too short",
        says("session", "session_timeout"),
        "Ask for a time that it grants.",
        || connecting(&format!("zk://{at}?session_timeout=500ms")),
    );
    table.row(
        "the server has died while its client was connected",
        says("connection to server has lost", "connects again by itself"),
        "Start it; the client connects by itself.",
        || {
            let dead = ZkServer::plain().unwrap();
            let url = format!("zk://{}?op_timeout=1s&connect_timeout=1s", dead.addr());
            meanwhile(&url, |_| dead.kill().unwrap())
        },
    );
    table.row(
        "a port that has TLS, without it",
        says("", "run, "),
        "Write `tls=verify`.",
        || connecting(&format!("zk://{secure}?connect_timeout=1s")),
    );
    table.row(
        "the client's certificate has expired",
        says("does not accept the certificate", "has it expired"),
        "Renew it.",
        || {
            connecting(&format!(
                "zk://{secure}?tls=verify&ca={}&cert={}&key={}",
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
        "Give one of the authority in the servers' `ssl.trustStore.location`.",
        || {
            connecting(&format!(
                "zk://{secure}?tls=verify&ca={}&cert={}&key={}",
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
                "zk://{secure}?tls=verify&cert={}&key={}&ca={}",
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
        || connecting(&format!("zk://{secure}?tls=verify&ca=/no/ca.pem")),
    );
    table.row(
        "an authority is given without TLS",
        says("has no effect", "without tls=verify").of("`ca`"),
        "Write `tls=verify`.",
        || connecting(&format!("zk://{at}?ca=/no/ca.pem")),
    );
    table.row(
        "the URL's directory is not there and may not be made",
        says("not authorized", "grant the user").of("/walled/app"),
        "Make it with rights for the user, or set the ACL of the one above.",
        || {
            node(server, "/walled", Permission::READ);
            trying(&format!("zk://{at}/walled/app"))
        },
    );
    table.row(
        "the password is wrong",
        says("not authorized", "check user and password in the URL").of("/digest"),
        "Correct it. ZooKeeper takes any password, and each makes another user.",
        || {
            let url =
                |password: &str| format!("zk://me:{password}@{at}/digest?access=creator&parents=persistent");
            lock_once(&url("canary"));
            trying(&url("not-canary"))
        },
    );
    table.row(
        "rights for the creator alone, without a user",
        says("needs a user and a password", "or use `everyone`").of("`access`"),
        "Write the user into the URL, or leave out `access`.",
        || connecting(&format!("zk://{at}?access=creator")),
    );
    table.row(
        "another client has the lock with `nodes=simple`",
        says("ephemeral node can not have children", "need the same `nodes`").of("/mixed/lockkit/job"),
        "Give all clients the same `nodes`.",
        || {
            let url = format!("zk://{at}/mixed");
            in_this_process(async {
                let simple = connect(&format!("{url}?nodes=simple")).await.unwrap();
                let held = simple.lock("job").unwrap().acquire().await.unwrap();
                let client = connect(&url).await.unwrap();
                let error = client.lock("job").unwrap().try_acquire().await.unwrap_err();
                let printed = printed(&error, &url);
                held.release().await.unwrap();
                printed
            })
        },
    );
    table.row(
        "a directory is in the lock's place, with `nodes=simple`",
        says("is a directory", "use another name or namespace").of("/dirs/lockkit/job"),
        "Give all clients the same `nodes`, or take another namespace.",
        || {
            for path in ["/dirs", "/dirs/lockkit", "/dirs/lockkit/job"] {
                node(server, path, Permission::ALL);
            }
            trying(&format!("zk://{at}/dirs?nodes=simple"))
        },
    );
    table.row(
        "the node of raised tokens holds something else",
        says("is not what lockkit has written there", "delete it").of("/odd/lockkit/%fence"),
        "Delete the node, and raise the tokens above the highest `last_token`.",
        || {
            for path in ["/odd", "/odd/lockkit"] {
                node(server, path, Permission::ALL);
            }
            node_with(server, "/odd/lockkit/%fence", Permission::ALL, b"not ours");
            trying(&format!("zk://{at}/odd"))
        },
    );
    table.row(
        "a session of more than a day",
        says("longer than a day", "ask for less").of("`session_timeout`"),
        "Ask for less.",
        || connecting(&format!("zk://{at}?session_timeout=90000s")),
    );
    table.row(
        "the URL's path has an empty part",
        says("is not a path of nodes", "").of("//app"),
        "Write one slash.",
        || connecting(&format!("zk://{at}//app")),
    );
    table.row(
        "a host is named twice",
        says("are the same", "").of("servers 1 and 2"),
        "Name each server once.",
        || connecting(&format!("zk://{at},{at}")),
    );
    table.row(
        "a semaphore has other permits",
        says("with 2 permits, not 3", "ask for the same number everywhere").of("`pair`"),
        "Use one size.",
        || beside_two(&format!("zk://{at}/sizes"), 3),
    );
    table.row(
        "a semaphore with too many permits",
        says("1001 is more than the 1000", "ask for fewer").of("`permits`"),
        "Take fewer permits, or another backend.",
        || beside_two(&format!("zk://{at}/many"), 1_001),
    );
    table.check();
}
