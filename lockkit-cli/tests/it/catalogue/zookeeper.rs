//! ZooKeeper.

use std::sync::Arc;

use lockkit_testbed::{
    Certificates, Port,
    redis::RedisServer,
    skipped,
    zookeeper::{self, ZkServer},
};
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

use super::{Table, alone, connect, connecting, meanwhile, says, trying};
use crate::tool::in_this_process;

/// Makes this node, with these rights for everybody.
fn node(server: &ZkServer, path: &str, rights: Permission) {
    in_this_process(async {
        let client = Client::connect(&server.addr().to_string()).await.unwrap();
        let acl = [Acl::new(rights, AuthId::anyone())];
        let options = CreateMode::Persistent.with_acls(Acls::new(&acl));
        client.create(path, b"", &options).await.unwrap();
    });
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
            in_this_process(async {
                let client = connect(&other).await.unwrap();
                client
                    .lock("job")
                    .unwrap()
                    .acquire()
                    .await
                    .unwrap()
                    .release()
                    .await
                    .unwrap();
                client.close(std::time::Duration::from_secs(1)).await.unwrap();
            });
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
                super::printed(&error, &url)
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
    table.check();
}
