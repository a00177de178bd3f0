//! Connecting: refusals, tables, and rights.

use std::{io, time::Duration};

use lockkit_core::{AcquireOptions, Error, FencingToken, LockClient, spi::chain};
use lockkit_mysql::{Mode, MySqlConfig, Schema, ddl};
use lockkit_testbed::mysql::{Flavour, MySql};
use tokio::net::{TcpListener, TcpStream};

use crate::servers::{
    Admin, MODES, Waiter, client, config, connect, cycle, for_each_flavour, listed, name, private, relay,
    shared, waits,
};

for_each_flavour! {
    tables_that_are_missing_are_printed_and_not_made
    looking_makes_no_table
    who_may_not_read_is_told_of_no_free_lock
    the_rights_on_the_tables_are_enough
    an_account_without_rights_keeps_no_lease_from_others
    tables_that_cannot_exclude_are_refused
    many_may_make_the_tables_at_once
    a_read_only_server_is_refused
    a_proxy_that_swallows_the_lease_is_refused
    connections_to_different_servers_are_refused
    a_password_that_needs_a_public_key_is_no_hurdle
    a_refused_account_is_no_transient_error
    durability_is_what_the_server_has
    leases_are_exclusive_and_say_so
    leases_need_two_connections
}

/// A database and an account of a test's own on the shared server.
async fn database(flavour: Flavour, rights: &str) -> (Admin, MySqlConfig) {
    let server = shared(flavour);
    let mut admin = Admin::of(server).await;
    let database = format!("t{:016x}", fastrand::u64(..));
    admin
        .run(&format!(
            "CREATE DATABASE {database}; CREATE USER '{database}'@'%' IDENTIFIED BY 'pw'; USE {database}"
        ))
        .await;
    for right in rights.split(';').map(str::trim).filter(|right| !right.is_empty()) {
        admin
            .run(&format!("GRANT {right} TO '{database}'@'%'").replace("HERE", &database))
            .await;
    }
    let url = format!("mysql://{database}:pw@{}/{database}", server.addr());
    (admin, MySqlConfig::new(url))
}

async fn tables_that_are_missing_are_printed_and_not_made(flavour: Flavour) {
    for mode in MODES {
        let (mut admin, mut config) = database(flavour, "ALL ON HERE.*").await;
        config.mode = mode;
        config.schema = Schema::Manual;
        let error = connect(config.clone()).await.unwrap_err();
        let text = chain(&error);
        let printed = text.split_once("have them made with: ");
        let (_, statements) = printed.unwrap_or_else(|| panic!("{text}"));
        assert!(!error.is_transient(), "{text}");
        let tables = "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA=DATABASE()";
        assert_eq!(admin.value(tables).await, "0");
        // They are sufficient, as a log shows them.
        admin.run(statements).await;
        let client = connect(config).await.unwrap();
        cycle(&client, "a").await;
    }
}

/// Another account, which may read these tables of the database.
async fn reader(flavour: Flavour, admin: &mut Admin, mode: Mode, tables: &str) -> LockClient {
    let database = admin.value("SELECT DATABASE()").await;
    let user = format!("r{:016x}", fastrand::u64(..));
    admin
        .run(&format!(
            "CREATE USER '{user}'@'%' IDENTIFIED BY 'pw'; GRANT SELECT ON {database}.{tables} TO '{user}'@'%'"
        ))
        .await;
    let url = format!("mysql://{user}:pw@{}/{database}", shared(flavour).addr());
    let mut config = MySqlConfig::new(url);
    config.mode = mode;
    connect(config).await.unwrap()
}

/// Nor does connecting. So who may only read can look.
async fn looking_makes_no_table(flavour: Flavour) {
    for mode in MODES {
        let (mut admin, mut config) = database(flavour, "ALL ON HERE.*").await;
        config.mode = mode;
        let owner = connect(config).await.unwrap();
        let reader = reader(flavour, &mut admin, mode, "*").await;
        for client in [&owner, &reader] {
            assert!(client.inspect("a").await.unwrap().is_free(), "{mode:?}");
            assert_eq!(listed(client).await.unwrap(), [""; 0], "{mode:?}");
            assert!(client.fence().await.unwrap().get() > 0, "{mode:?}");
        }
        let token = FencingToken::new(1);
        assert!(!owner.revoke_by_force("a", token).await.unwrap(), "{mode:?}");
        let tables = "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA=DATABASE()";
        assert_eq!(admin.value(tables).await, "0", "{mode:?}");
        let refused = reader.lock("b").unwrap().try_acquire().await.unwrap_err();
        assert!(!refused.is_transient(), "{mode:?}: {refused:?}");

        let guard = owner.lock("a").unwrap().acquire().await.unwrap();
        for client in [&owner, &reader] {
            assert_eq!(client.inspect("a").await.unwrap().holders.len(), 1, "{mode:?}");
            assert_eq!(listed(client).await.unwrap(), ["a"], "{mode:?}");
            assert!(client.fence().await.unwrap() >= guard.token(), "{mode:?}");
        }
        let refused = reader.lock("b").unwrap().try_acquire().await.unwrap_err();
        assert!(
            !refused.is_transient() && chain(&refused).contains("1142"),
            "{mode:?}: {refused:?}"
        );
        guard.release().await.unwrap();
    }
}

/// The server hides tables from those who may not read them.
async fn who_may_not_read_is_told_of_no_free_lock(flavour: Flavour) {
    for mode in MODES {
        let (mut admin, mut config) = database(flavour, "ALL ON HERE.*").await;
        config.mode = mode;
        admin.run("CREATE TABLE other (x INT)").await;
        let owner = connect(config).await.unwrap();
        let blind = reader(flavour, &mut admin, mode, "other").await;
        for is_held in [false, true] {
            let guard = if is_held {
                Some(owner.lock("a").unwrap().acquire().await.unwrap())
            } else {
                None
            };
            for answer in [
                blind.inspect("a").await.map(drop),
                listed(&blind).await.map(drop),
                blind.fence().await.map(drop),
            ] {
                let error = answer.unwrap_err();
                assert!(
                    !error.is_transient() && chain(&error).contains("1142"),
                    "{mode:?}, {is_held}: {error:?}"
                );
            }
            drop(guard);
        }
        if mode == Mode::ForUpdate {
            // A table that is missing while others are there says nothing either.
            owner.close(Duration::from_secs(5)).await.unwrap();
            let reader = reader(flavour, &mut admin, mode, "*").await;
            admin.run("RENAME TABLE lockkit_holder TO elsewhere").await;
            for answer in [
                reader.inspect("a").await.map(drop),
                listed(&reader).await.map(drop),
            ] {
                let text = chain(&answer.unwrap_err());
                assert!(text.contains("1146"), "{text}");
            }
        }
    }
}

async fn the_rights_on_the_tables_are_enough(flavour: Flavour) {
    for mode in MODES {
        let (mut admin, mut config) = database(flavour, "").await;
        config.mode = mode;
        config.schema = Schema::Manual;
        let refused = connect(config.clone()).await.unwrap_err();
        assert!(!refused.is_transient(), "{refused}");
        admin.run(&ddl(mode)).await;
        let account = admin.value("SELECT DATABASE()").await;
        for table in ddl(mode)
            .lines()
            .filter_map(|line| line.strip_prefix("CREATE TABLE IF NOT EXISTS "))
        {
            let table = table.trim_end_matches(" (");
            admin
                .run(&format!(
                    "GRANT SELECT, INSERT, UPDATE, DELETE ON {account}.{table} TO '{account}'@'%'"
                ))
                .await;
        }
        let (client, other) = (
            connect(config.clone()).await.unwrap(),
            connect(config).await.unwrap(),
        );
        let lock = client.lock("a").unwrap();
        let guard = lock.acquire().await.unwrap();
        assert!(other.lock("a").unwrap().try_acquire().await.unwrap().is_none());
        assert_eq!(other.inspect("a").await.unwrap().holders.len(), 1);
        let waiter = Waiter::of(other.lock("a").unwrap());
        waits(&client, "a").await;
        guard.release().await.unwrap();
        waiter.granted().await.0.release().await.unwrap();
        if mode == Mode::ForUpdate {
            for permits in [2, 3] {
                let permit = client.semaphore("s", permits).unwrap().acquire().await.unwrap();
                permit.release().await.unwrap();
            }
        }
        let guard = lock.acquire().await.unwrap();
        let token = guard.token();
        assert!(
            other.revoke_by_force("a", token).await.unwrap(),
            "its own account's sessions may be ended"
        );
    }
}

/// Any account may take any lock of the server itself, and so the place at the head of a queue, if it knows its name.
async fn an_account_without_rights_keeps_no_lease_from_others(flavour: Flavour) {
    let server = shared(flavour);
    let mut admin = Admin::of(server).await;
    let account = format!("t{:016x}", fastrand::u64(..));
    admin
        .run(&format!("CREATE USER '{account}'@'%' IDENTIFIED BY 'pw'"))
        .await;
    let mut stranger = Admin::stranger(server.addr(), &account, "pw").await.unwrap();
    let name = name("a");
    // All that goes into it, but what the table alone has.
    let digest = format!(
        "SELECT SHA2(CONCAT('{}/x''', LOWER(HEX('lockkit:{name}')), ''''), 256)",
        MySql::DATABASE
    );
    let digest = stranger.value(&digest).await;
    for kind in ["lockkit", "lockkit-sleep", "lockkit-asleep"] {
        let taken = stranger
            .value(&format!("SELECT GET_LOCK('{kind}:{}', 0)", &digest[..48]))
            .await;
        assert_eq!(taken, "1");
    }
    let (holder, other) = (
        client(server.addr(), Mode::Lease).await,
        client(server.addr(), Mode::Lease).await,
    );
    let tried = holder.lock(&name).unwrap().try_acquire().await.unwrap();
    let guard = tried.expect("nobody holds it");
    let waiter = Waiter::of(other.lock(&name).unwrap());
    waits(&holder, &name).await;
    // What is run has the names.
    let seen = "SELECT INFO FROM information_schema.PROCESSLIST WHERE INFO LIKE CONCAT('%lock', 'kit%')";
    assert_eq!(stranger.run(seen).await, [[""; 0]; 0]);
    guard.release().await.unwrap();
    waiter.granted().await.0.release().await.unwrap();
}

async fn tables_that_cannot_exclude_are_refused(flavour: Flavour) {
    for (table, part) in [
        (
            "CREATE TABLE lockkit_gate (name VARBINARY(255) PRIMARY KEY) ENGINE=MyISAM",
            "row locks",
        ),
        (
            "CREATE TABLE lockkit_gate (name VARCHAR(255) PRIMARY KEY) ENGINE=InnoDB",
            "VARBINARY(255)",
        ),
        (
            "CREATE TABLE lockkit_fence (name VARBINARY(64) PRIMARY KEY) ENGINE=InnoDB",
            "VARBINARY(255)",
        ),
    ] {
        let (mut admin, config) = database(flavour, "ALL ON HERE.*").await;
        admin.run(table).await;
        match connect(config).await.unwrap_err() {
            Error::Unsupported { what, .. } => assert!(what.contains(part), "{what}"),
            other => panic!("{table}: {other}"),
        }
    }
}

async fn many_may_make_the_tables_at_once(flavour: Flavour) {
    let (_admin, config) = database(flavour, "ALL ON HERE.*").await;
    let all = (0..20).map(async |_| cycle(&connect(config.clone()).await.unwrap(), "a").await);
    futures_util::future::join_all(all).await;
}

async fn a_read_only_server_is_refused(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let client = connect(config(server.addr())).await.unwrap();
    cycle(&client, "known").await;
    admin.run("SET GLOBAL read_only=1").await;
    match connect(config(server.addr())).await.unwrap_err() {
        Error::Unsupported { what, .. } => assert!(what.contains("read_only"), "{what}"),
        other => panic!("{other}"),
    }
    // A server that becomes read-only later returns an error that may pass, neither "taken" nor a wait without end.
    let lock = client.lock("new").unwrap();
    for answer in [
        lock.try_acquire().await.map(|_| ()),
        lock.acquire_timeout(Duration::from_secs(1)).await.map(|_| ()),
    ] {
        let error = answer.unwrap_err();
        assert!(
            error.is_transient() && chain(&error).contains("1290"),
            "{}",
            chain(&error)
        );
    }
    admin.run("SET GLOBAL read_only=0").await;
    lock.acquire().await.unwrap().release().await.unwrap();
}

async fn a_proxy_that_swallows_the_lease_is_refused(flavour: Flavour) {
    let swallowing = relay(shared(flavour).addr(), " wait_timeout=60,", " sql_notes=1    ,")
        .await
        .unwrap();
    match connect(config(swallowing)).await.unwrap_err() {
        Error::Unsupported { what, .. } => assert!(what.contains("wait_timeout"), "{what}"),
        other => panic!("{other}"),
    }
}

async fn connections_to_different_servers_are_refused(flavour: Flavour) {
    let servers = [
        private(flavour, &["--server-id=11"]),
        private(flavour, &["--server-id=12"]),
    ];
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let balancer = listener.local_addr().unwrap();
    let addrs = servers.each_ref().map(MySql::addr);
    tokio::spawn(async move {
        for upstream in addrs.into_iter().cycle() {
            let (mut client, _) = listener.accept().await?;
            let mut server = TcpStream::connect(upstream).await?;
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
        Ok::<_, io::Error>(())
    });
    let error = connect(config(balancer)).await.unwrap_err();
    assert!(chain(&error).contains("different servers"), "{}", chain(&error));
}

async fn a_password_that_needs_a_public_key_is_no_hurdle(flavour: Flavour) {
    if flavour == Flavour::MariaDb {
        // This version of MariaDB has no caching_sha2_password, so the test uses its own plugin.
        let (_admin, config) = database(flavour, "ALL ON HERE.*").await;
        connect(config).await.unwrap();
        return;
    }
    let (mut admin, config) = database(flavour, "ALL ON HERE.*").await;
    let user = admin.value("SELECT DATABASE()").await;
    admin
        .run(&format!(
            "ALTER USER '{user}'@'%' IDENTIFIED WITH caching_sha2_password BY 'pw'"
        ))
        .await;
    // The first login needs the server's public key. The second uses the server's cache.
    for _ in 0..2 {
        connect(config.clone()).await.unwrap();
    }
}

async fn a_refused_account_is_no_transient_error(flavour: Flavour) {
    let addr = shared(flavour).addr();
    for url in [
        format!("mysql://lockkit:wrong-canary@{addr}/lockkit"),
        format!("mysql://nobody:wrong-canary@{addr}/lockkit"),
        format!("mysql://lockkit:{}@{addr}/elsewhere", MySql::PASSWORD),
    ] {
        let error = connect(MySqlConfig::new(url)).await.unwrap_err();
        assert!(!error.is_transient(), "{}", chain(&error));
        let shown = format!("{} {error:?} {error:#?}", chain(&error));
        assert!(
            !shown.contains("canary") && !shown.contains(MySql::PASSWORD),
            "{shown}"
        );
    }
}

async fn durability_is_what_the_server_has(flavour: Flavour) {
    use lockkit_core::FencingDurability::{Durable, Process};

    for (flush, promised) in [("1", Durable), ("2", Process)] {
        let server = private(flavour, &[&format!("--innodb-flush-log-at-trx-commit={flush}")]);
        let client = connect(config(server.addr())).await.unwrap();
        assert_eq!(client.capabilities().fencing, promised);
    }
}

async fn leases_are_exclusive_and_say_so(flavour: Flavour) {
    let client = client(shared(flavour).addr(), Mode::Lease).await;
    let (lock, semaphore) = (
        client.lock("a").unwrap().shared(),
        client.semaphore("a", 2).unwrap(),
    );
    for (lock, asked) in [(lock, "shared mode"), (semaphore, "semaphores")] {
        match lock.try_acquire().await.unwrap_err() {
            Error::Unsupported { what, .. } => {
                assert!(
                    what.starts_with(asked) && what.contains("mode=for_update"),
                    "{what}"
                );
            }
            other => panic!("{other}"),
        }
    }
}

/// One for a waiter, and one to renew holds meanwhile.
async fn leases_need_two_connections(flavour: Flavour) {
    for (most, is_enough) in [(1, false), (2, true)] {
        let mut config = config(shared(flavour).addr());
        config.mode = Mode::Lease;
        config.max_connections = most;
        match connect(config).await {
            Ok(_) if is_enough => {}
            Err(Error::InvalidOptions { option, reason, .. }) if !is_enough => {
                assert_eq!(option, "max_connections");
                assert!(reason.contains("mode=lease"), "{reason}");
            }
            other => panic!("{most}: {other:?}"),
        }
    }
}

/// A cluster of one node is a cluster.
#[test]
fn galera_is_refused() {
    const PROVIDER: &str = "/usr/lib/galera/libgalera_smm.so";
    crate::servers::run(Flavour::MariaDb, |flavour| async move {
        if lockkit_testbed::skipped(
            "mysql",
            (!std::path::Path::new(PROVIDER).exists()).then(|| format!("there is no {PROVIDER}")),
        ) {
            return;
        }
        let port = lockkit_testbed::Port::reserve().unwrap();
        let server = private(
            flavour,
            &[
                "--wsrep-on=ON",
                &format!("--wsrep-provider={PROVIDER}"),
                "--wsrep-cluster-address=gcomm://",
                &format!(
                    "--wsrep-provider-options=gmcast.listen_addr=tcp://127.0.0.1:{}",
                    port.number()
                ),
                "--wsrep-node-address=127.0.0.1",
                "--binlog-format=ROW",
                "--innodb-autoinc-lock-mode=2",
            ],
        );
        match connect(config(server.addr())).await.unwrap_err() {
            Error::Unsupported { what, .. } => assert!(what.contains("Galera"), "{what}"),
            other => panic!("{other}"),
        }
    });
}

/// After a standstill it counts a session's silence from before that. A lease in a row does not depend on it.
#[test]
fn a_pool_of_threads_keeps_no_row_lock() {
    crate::servers::run(Flavour::MariaDb, |flavour| async move {
        let server = private(flavour, &["--thread-handling=pool-of-threads"]);
        let mut config = config(server.addr());
        match connect(config.clone()).await.unwrap_err() {
            Error::Unsupported { what, .. } => assert!(what.contains("pool-of-threads"), "{what}"),
            other => panic!("{other}"),
        }
        config.mode = Mode::Lease;
        cycle(&connect(config).await.unwrap(), "a").await;
    });
}

/// Options with short time-outs.
#[test]
fn the_limit_of_connections_is_a_clear_error() {
    crate::servers::run(Flavour::MariaDb, |flavour| async move {
        let mut config = config(shared(flavour).addr());
        config.max_connections = 2;
        let client = connect(config).await.unwrap();
        let name = name("limit");
        let lock = |of: &str| client.lock(format!("{name}/{of}")).unwrap();
        let (a, b) = (
            lock("a").acquire().await.unwrap(),
            lock("b").acquire().await.unwrap(),
        );
        let options = AcquireOptions::new().wait(Duration::from_secs(5));
        for answer in [
            lock("c").try_acquire().await.map(|_| ()),
            lock("c").acquire_with(&options).await.map(|_| ()),
        ] {
            let text = chain(&answer.unwrap_err());
            assert!(
                text.contains("all 2 connections") && text.contains("max_connections"),
                "{text}"
            );
        }
        a.release().await.unwrap();
        let c = lock("c").acquire().await.unwrap();
        assert!(b.is_held() && c.is_held());
    });
}
