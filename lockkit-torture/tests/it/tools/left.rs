//! Leftovers are told, whatever they are, and what is documented to stay is not.

use std::{
    fs,
    io::Write as _,
    net::TcpStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use lockkit::{AcquireOptions, LockClient, LockGuard, MemoryBackend};
use lockkit_conformance::torture::Target;
use lockkit_testbed::{
    etcd::EtcdServer,
    mysql::{Flavour, MySql},
    postgres as pg,
    redis::{self as servers, RedisServer},
    skipped,
    zookeeper::ZkServer,
};
use lockkit_torture::{
    Deployment,
    embedded::{Files, Memory},
    etcd,
    mysql::{Database, run},
    postgres,
    redis::Redis,
    redlock::Redlock,
    zookeeper::{Ensemble, Single},
};

/// Waits until all of `parts` are told, each in one of the things that are left.
fn told(target: &dyn Target, parts: &[&str]) {
    until(target, parts, |left| {
        parts.iter().all(|part| left.iter().any(|one| one.contains(part)))
    });
}

fn nothing(target: &dyn Target) {
    until(target, &["nothing"], <[_]>::is_empty);
}

fn until(target: &dyn Target, what: &[&str], condition: impl Fn(&[String]) -> bool) {
    let began = Instant::now();
    loop {
        let left = target.left().expect("an answer");
        if condition(&left) {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{what:?} in {left:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A client that holds a lock, shared if it can, on a runtime of its own.
struct Holder {
    runtime: tokio::runtime::Runtime,
    client: LockClient,
    guard: LockGuard,
}

impl Holder {
    fn of(target: &dyn Target) -> Self {
        Self::by(target, &target.routes()[0])
    }

    fn by(target: &dyn Target, route: &str) -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let (client, guard) = runtime.block_on(async {
            let began = Instant::now();
            let client = loop {
                match target.connect(route).await {
                    Ok(client) => break client,
                    // The machine is busy.
                    Err(error) => assert!(began.elapsed() < Duration::from_secs(20), "{error:?}"),
                }
            };
            let lock = client.lock("tools").expect("a name");
            let options = AcquireOptions::new().ttl(Duration::from_secs(5));
            let guard = lock.acquire_with(&options).await.expect("a hold");
            (client, guard)
        });
        Self {
            runtime,
            client,
            guard,
        }
    }

    fn end(self) {
        self.runtime.block_on(async {
            self.guard.release().await.expect("released");
            self.client.close(Duration::from_secs(5)).await.expect("closed");
        });
    }
}

/// Checks what all of them have in common: a hold is told, a released one is not.
fn tells_of_a_hold(target: &dyn Target, parts: &[&str]) {
    nothing(target);
    let holder = Holder::of(target);
    told(target, parts);
    holder.end();
    nothing(target);
}

/// Connections, channels and keys at a server, of a lock and of something else.
fn tells_of_a_redis(target: &dyn Target, server: &RedisServer) {
    let mut line = TcpStream::connect(server.addr()).expect("a connection");
    let connection = format!("the connection {}", line.local_addr().expect("an address"));
    told(target, &[&connection]);
    line.write_all(b"SUBSCRIBE lockkit:lockkit#client:x\r\n")
        .expect("written");
    told(target, &["a subscription to lockkit:lockkit#client:x"]);
    drop(line);
    nothing(target);
    for key in [
        "lockkit:x",
        "lockkit:lockkit#queue:{lockkit:x}",
        "lockkit:lockkit#client:x",
        "stray",
    ] {
        server.cli(&["SET", key, "1"]).expect("planted");
        told(target, &[&format!("the key {key}")]);
        server.cli(&["DEL", key]).expect("deleted");
        nothing(target);
    }
}

#[test]
fn at_redis_is_told() {
    if skipped("redis", servers::missing()) {
        return;
    }
    let it = Deployment::of(Redis::start(servers::program()).expect("a server")).expect("ways");
    tells_of_a_hold(
        &it,
        &["the connection", "a subscription to", "the key lockkit:tools"],
    );
    tells_of_a_redis(&it, &it.servers.server);
    goes_or_is_told(&it, &it.servers.server, "lockkit:lockkit#queue:{lockkit:x}");
}

/// A key that is documented to go is none that is left, unless it does not.
fn goes_or_is_told(target: &dyn Target, server: &RedisServer, key: &str) {
    server.cli(&["SET", key, "1"]).expect("planted");
    told(target, &[key]);
    server.cli(&["PEXPIRE", key, "100000"]).expect("it is to go");
    nothing(target);
}

#[test]
fn at_one_of_redlock_s_masters_is_told() {
    if skipped("redis", servers::missing()) {
        return;
    }
    let it = Deployment::of(Redlock::start(3).expect("masters")).expect("ways");
    tells_of_a_hold(
        &it,
        &["the connection", "a subscription to", "the key lockkit:tools"],
    );
    let master = &it.servers.masters[2];
    tells_of_a_redis(&it, master);
    goes_or_is_told(&it, master, "lockkit:lockkit#fence:{lockkit:x}");
}

#[test]
fn at_zookeeper_is_told() {
    if skipped("zk", lockkit_testbed::zookeeper::missing()) {
        return;
    }
    let it = Deployment::of(Single::start("mutex").expect("a server")).expect("ways");
    tells_of_a_hold(&it, &["the session 0x", "the connection /127.0.0.1:"]);
    tells_of_a_node(&it, &it.servers.server);
}

#[test]
fn at_the_ensemble_is_told() {
    if skipped("zk", lockkit_testbed::zookeeper::missing()) {
        return;
    }
    let it = Deployment::of(Ensemble::start().expect("servers")).expect("ways");
    tells_of_a_hold(&it, &["the session 0x", "the connection /127.0.0.1:"]);
    tells_of_a_node(&it, it.servers.0.member(1));
}

/// Persistent directories, which stay.
fn tells_of_a_node(target: &dyn Target, server: &ZkServer) {
    let route = format!("zk://{}?parents=persistent&tick_time=100ms", server.addr());
    Holder::by(target, &route).end();
    told(target, &["the node /lockkit/tools"]);
}

fn at_a_database(flavour: Flavour) {
    let rows = Deployment::of(Database::start(flavour, false).expect("servers")).expect("ways");
    tells_of_a_hold(&rows, &["the connection", "a transaction of the connection"]);
    let (primary, successor) = (rows.servers.primary.addr(), rows.servers.successor.addr());
    let told_of = |sql: &str, part: &str, undo: &str| {
        run(primary, sql).expect("planted");
        told(&rows, &[part]);
        run(primary, undo).expect("undone");
        nothing(&rows);
    };
    told_of(
        "INSERT INTO lockkit_holder (name, connection, token, seconds) VALUES ('x', 1, 4711, 5)",
        "in lockkit_holder the hold x 4711",
        "DELETE FROM lockkit_holder",
    );
    told_of(
        "CREATE TABLE stray (a INT)",
        "the table stray",
        "DROP TABLE stray",
    );
    // The other server, too.
    let at_successor = MySql::url_at(successor);
    let holder = Holder::by(&rows, &at_successor);
    told(&rows, &[&format!("at {} the connection", successor.port())]);
    holder.end();
    nothing(&rows);
}

#[test]
fn at_mariadb_is_told() {
    if !skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        at_a_database(Flavour::MariaDb);
    }
}

#[test]
fn at_mysql_is_told() {
    if !skipped("mysql-server", MySql::missing(Flavour::MySql)) {
        at_a_database(Flavour::MySql);
    }
}

#[test]
fn of_a_lease_in_a_row_is_told() {
    if !skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        let rows = Deployment::of(Database::start(Flavour::MariaDb, true).expect("servers")).expect("ways");
        tells_of_a_hold(
            &rows,
            &["the connection", "in lockkit_lease the hold lockkit:tools"],
        );
    }
}

#[test]
fn at_postgres_is_told() {
    if skipped("postgres", pg::missing()) {
        return;
    }
    let it = Deployment::of(postgres::Database::start().expect("servers")).expect("ways");
    tells_of_a_hold(&it, &["the session", "the lock"]);
    let server = &it.servers.primary;
    server.sql("CREATE TABLE stray (a int)").expect("planted");
    told(&it, &["the table public.stray"]);
    server.sql("DROP TABLE stray").expect("undone");
    // One that is not of lockkit's session.
    let mut session = server.session().expect("a session");
    session.sql("SELECT pg_advisory_lock(4711)").expect("locked");
    told(&it, &["the lock 0|4711"]);
    drop(session);
    nothing(&it);
}

/// A lease, and a key without one.
fn tells_of_an_etcd(target: &dyn Target, server: &EtcdServer) {
    tells_of_a_hold(target, &["the connection 127.0.0.1:"]);
    server.ctl(&["lease", "grant", "600"]).expect("planted");
    let lease = server.leases().expect("leases").remove(0);
    told(target, &[&format!("the lease {lease}")]);
    server.revoke(&lease).expect("undone");
    nothing(target);
    server.ctl(&["put", "stray", "1"]).expect("planted");
    told(target, &["the key stray"]);
    server.delete("stray").expect("undone");
    nothing(target);
}

#[test]
fn at_etcd_is_told() {
    if skipped("etcd", lockkit_testbed::etcd::missing()) {
        return;
    }
    let it = Deployment::of(etcd::Single::start().expect("a server")).expect("ways");
    tells_of_an_etcd(&it, &it.servers.server);
}

#[test]
fn at_the_cluster_is_told() {
    if skipped("etcd", lockkit_testbed::etcd::missing()) {
        return;
    }
    let it = Deployment::of(etcd::Cluster::start().expect("servers")).expect("ways");
    tells_of_an_etcd(&it, it.servers.0.member(1));
}

#[test]
fn in_a_directory_is_told() {
    let files = Files::new().expect("a directory");
    tells_of_a_hold(&files, &["locked, the file", "open, the file"]);
    let readers = files.0.path().join("lockkit/tools.readers");
    fs::create_dir_all(&readers).expect("a directory");
    fs::write(readers.join("4711"), "").expect("a file");
    told(&files, &["of a reader, the file"]);
}

#[test]
fn in_memory_is_told() {
    let memory = Arc::new(Memory(MemoryBackend::new()));
    tells_of_a_hold(&*memory, &["1 names in memory"]);
}
