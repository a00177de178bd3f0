//! Each fault happens, as the server itself or the proxy shows, and what heals it undoes it.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant, SystemTime},
};

use lockkit::LockClient;
use lockkit_conformance::torture::{Strike, Target as _};
use lockkit_testbed::{
    Mode,
    etcd::EtcdServer,
    mysql::{Flavour, MySql},
    postgres::{self as pg, PgServer},
    redis::{self as servers, RedisServer},
    skipped,
};
use tokio::runtime::Runtime;

use lockkit_torture::{
    Deployment, Servers,
    embedded::Files,
    etcd,
    mysql::{Database, run},
    postgres,
    redis::Redis,
    redlock::Redlock,
    sentinels::Sentinels,
    zookeeper::{Ensemble, Single},
};

/// The time within which something shows.
const LIMIT: Duration = Duration::from_secs(30);
/// The key of a lock, and one of none.
const LOCK: &str = "lockkit:planted";
const OTHER: &str = "other";

fn strike(fault: &str, place: u32) -> Strike {
    let (at, fault, lasts) = (0, fault.to_owned(), 1_500);
    Strike {
        at,
        fault,
        place,
        lasts,
    }
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < LIMIT, "{what} does not show");
        thread::sleep(Duration::from_millis(10));
    }
}

/// The proof that a fault happened, and that it was undone. `before` is what [`Table::look`] saw.
type Shows<S> = fn(&S, before: &[String]) -> bool;

/// All faults of the servers, but those of the ways.
struct Table<S> {
    /// Prepares for a fault, and says what is seen before it.
    look: fn(&S) -> Vec<String>,
    rows: Vec<(&'static str, u32, Shows<S>, Shows<S>)>,
}

impl<S: Servers> Table<S> {
    fn try_all(&self, it: &Deployment<S>) {
        let faults = it.faults();
        let of_servers = faults.iter().filter(|fault| !fault.way);
        let there: BTreeSet<_> = of_servers.map(|fault| fault.name).collect();
        let tried: BTreeSet<_> = self.rows.iter().map(|row| row.0).collect();
        assert_eq!(there, tried, "no fault goes without a row");
        let runtime = Runtime::new().expect("a runtime");
        for (fault, place, happens, undone) in &self.rows {
            let strike = strike(fault, *place);
            let _clients = clients(&runtime, it);
            let before = (self.look)(&it.servers);
            it.strike(&strike, &["planted".to_owned()]).expect("a strike");
            until(&format!("{fault} {place}"), || happens(&it.servers, &before));
            it.heal(&strike).expect("healed");
            until(&format!("the end of {fault} {place}"), || {
                undone(&it.servers, &before)
            });
        }
    }
}

fn is_paused(pid: Option<u32>) -> bool {
    let status = pid.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/status")).ok());
    status.is_some_and(|status| status.contains("State:\tT"))
}

/// Clients that are there meanwhile.
fn clients<S: Servers>(runtime: &Runtime, it: &Deployment<S>) -> Vec<LockClient> {
    let connect = |route: String| {
        let began = Instant::now();
        loop {
            match runtime.block_on(it.connect(&route)) {
                Ok(client) => return client,
                Err(error) => assert!(began.elapsed() < LIMIT, "no client: {error:?}"),
            }
        }
    };
    it.routes().into_iter().map(connect).collect()
}

/// Somebody who was there before is not any more.
fn is_one_gone(before: &[String], now: io::Result<Vec<String>>) -> bool {
    assert!(!before.is_empty(), "nobody was there");
    now.is_ok_and(|now| before.iter().any(|id| !now.contains(id)))
}

fn says(server: &RedisServer, command: &[&str], answer: &str) -> bool {
    server.cli(command).is_ok_and(|said| said.contains(answer))
}

fn has(server: &RedisServer, key: &str) -> bool {
    says(server, &["EXISTS", key], "1")
}

fn plant(server: &RedisServer) {
    for command in [
        &["SET", LOCK, "x"][..],
        &["SET", OTHER, "x"],
        &["SCRIPT", "LOAD", "return 1"],
    ] {
        server.cli(command).expect("planted");
    }
}

/// Says this to whoever writes.
fn refuses(server: &RedisServer, says: &str) -> bool {
    let said = server.cli(&["SET", "written", "1"]);
    said.unwrap_or_else(|error| error.to_string()).contains(says)
}

/// No keys, and not those of before either.
fn is_empty(server: &RedisServer) -> bool {
    server
        .cli(&["EXISTS", LOCK, OTHER])
        .is_ok_and(|there| there == "0")
}

fn has_no_scripts(server: &RedisServer) -> bool {
    // The name of what was planted.
    says(
        server,
        &["SCRIPT", "EXISTS", "e0e1f9fabfc9d4800c877a703b823ac0578ff8db"],
        "0",
    )
}

fn subscribers(server: &RedisServer) -> io::Result<Vec<String>> {
    let clients = server.cli(&["CLIENT", "LIST"])?;
    let subscribed = clients.lines().filter(|line| line.contains(" sub=1 "));
    Ok(subscribed
        .filter_map(|line| Some(line.split_once(' ')?.0.to_owned()))
        .collect())
}

/// By how much a clock is ahead, in seconds.
fn ahead(seconds: &str) -> f64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    seconds.parse().unwrap_or(f64::NAN) - now.expect("a clock").as_secs_f64()
}

fn redis_ahead(server: &RedisServer) -> f64 {
    let time = server.cli(&["TIME"]).expect("its time");
    let (seconds, micros) = time.split_once('\n').expect("two numbers");
    ahead(&format!("{seconds}.{micros:0>6}"))
}

fn redis(program: std::ffi::OsString) {
    let it = Deployment::of(Redis::start(program).expect("a server")).expect("ways");
    let always: Shows<Redis> = |_, _| true;
    let is_right: Shows<Redis> = |it, _| redis_ahead(&it.server).abs() < 0.5;
    let table = Table::<Redis> {
        look: |it| {
            plant(&it.server);
            until("its clients", || {
                subscribers(&it.server).is_ok_and(|ids| ids.len() >= 3)
            });
            subscribers(&it.server).expect("its clients")
        },
        rows: vec![
            (
                "pause",
                0,
                |it, _| is_paused(it.server.pid()),
                |it, _| says(&it.server, &["PING"], "PONG"),
            ),
            (
                "restart",
                0,
                |it, _| it.server.pid().is_none() && it.server.cli(&["PING"]).is_err(),
                |it, _| has(&it.server, OTHER),
            ),
            (
                "session",
                0,
                |it, before| is_one_gone(before, subscribers(&it.server)),
                always,
            ),
            ("scripts", 0, |it, _| has_no_scripts(&it.server), always),
            (
                "memory",
                0,
                |it, before| refuses(&it.server, "OOM") && is_one_gone(before, subscribers(&it.server)),
                |it, _| refuses(&it.server, "OK"),
            ),
            (
                "disk",
                0,
                |it, before| refuses(&it.server, "MISCONF") && is_one_gone(before, subscribers(&it.server)),
                |it, _| refuses(&it.server, "OK"),
            ),
            ("empty", 0, |it, _| is_empty(&it.server), always),
            (
                "restart-empty",
                0,
                |it, _| it.server.pid().is_none(),
                |it, _| is_empty(&it.server),
            ),
            (
                "delete",
                0,
                |it, _| !has(&it.server, LOCK) && has(&it.server, OTHER),
                always,
            ),
            ("clock", 0, |it, _| redis_ahead(&it.server) > 1.0, is_right),
            ("clock", 1, |it, _| redis_ahead(&it.server) < -1.0, is_right),
        ],
    };
    table.try_all(&it);
}

#[test]
fn of_redis_happen_and_heal() {
    if !skipped("redis", servers::missing()) {
        redis(servers::program());
    }
}

#[test]
fn of_sentinels_happen_and_heal() {
    if skipped("redis", servers::missing()) {
        return;
    }
    let it = Deployment::of(Sentinels::start().expect("servers")).expect("ways");
    // The other one takes its place.
    let is_another: Shows<Sentinels> = |it, before| {
        let master = it.0.master();
        master.is_ok_and(|master| !before.contains(&master.addr().to_string()))
    };
    let has_settled: Shows<Sentinels> = |it, _| {
        let role = |server: &RedisServer| server.cli(&["ROLE"]).unwrap_or_default();
        let [one, other] = it.0.servers();
        let servers = [one, other].into_iter();
        servers
            .filter(|server| role(server).starts_with("master"))
            .count()
            == 1
    };
    let table = Table::<Sentinels> {
        look: |it| vec![it.0.master().expect("a master").addr().to_string()],
        rows: vec![
            ("failover", 0, is_another, has_settled),
            ("kill-master", 0, is_another, has_settled),
            ("pause-master", 0, is_another, has_settled),
            (
                "sentinel",
                1,
                |it, _| is_paused(it.0.sentinels()[1].pid()),
                has_settled,
            ),
        ],
    };
    table.try_all(&it);
}

#[test]
fn of_valkey_happen_and_heal() {
    if !skipped("valkey", servers::missing_valkey()) {
        redis(servers::valkey());
    }
}

/// The masters but the middle one have what they had.
fn other_masters_do_not(it: &Redlock) -> bool {
    let rest = [&it.masters[0], &it.masters[2]];
    let has_all = |other: &&RedisServer| has(other, LOCK) && !has_no_scripts(other);
    rest.iter().all(has_all)
}

#[test]
fn of_redlock_happen_at_one_master_and_heal() {
    if skipped("redis", servers::missing()) {
        return;
    }
    let it = Deployment::of(Redlock::start(3).expect("masters")).expect("ways");
    let table = Table::<Redlock> {
        look: |it| {
            it.masters.iter().for_each(plant);
            vec![format!("{:?}", it.masters[1].pid())]
        },
        rows: vec![
            (
                "pause",
                1,
                |it, _| is_paused(it.masters[1].pid()) && other_masters_do_not(it),
                |it, _| says(&it.masters[1], &["PING"], "PONG"),
            ),
            (
                "restart",
                1,
                |it, before| format!("{:?}", it.masters[1].pid()) != before[0] && other_masters_do_not(it),
                |it, _| has(&it.masters[1], LOCK),
            ),
            (
                "restart-empty",
                1,
                |it, _| it.masters[1].pid().is_none() && other_masters_do_not(it),
                |it, _| is_empty(&it.masters[1]),
            ),
            (
                "empty",
                1,
                |it, _| is_empty(&it.masters[1]) && other_masters_do_not(it),
                |_, _| true,
            ),
            (
                "scripts",
                1,
                |it, _| has_no_scripts(&it.masters[1]) && other_masters_do_not(it),
                |_, _| true,
            ),
            (
                "delete",
                0,
                |it, _| !has(&it.masters[0], LOCK) && has(&it.masters[0], OTHER) && has(&it.masters[1], LOCK),
                |_, _| true,
            ),
        ],
    };
    table.try_all(&it);
    let beyond = it.strike(&strike("delete", 1), &[]).expect_err("a majority");
    assert!(beyond.to_string().contains("\"delete\" at place 1"), "{beyond}");
}

fn asked(server: SocketAddr, what: &str) -> String {
    let rows = run(server, &format!("SELECT CAST({what} AS CHAR)"));
    rows.map_or_else(|error| error.to_string(), |rows| rows.concat().concat())
}

fn sessions(server: &MySql) -> io::Result<Vec<String>> {
    let sql = format!(
        "SELECT CAST(ID AS CHAR) FROM information_schema.PROCESSLIST WHERE USER = '{}'",
        MySql::USER
    );
    Ok(run(server.addr(), &sql)?.concat())
}

/// `None` if it does not say.
fn is_read_only(it: &Database) -> Option<bool> {
    let said = asked(it.primary.addr(), "@@global.read_only");
    match said.as_str() {
        "1" | "ON" => Some(true),
        "0" | "OFF" => Some(false),
        _ => None,
    }
}

fn mysql_ahead(server: &MySql) -> f64 {
    ahead(&asked(server.addr(), "UNIX_TIMESTAMP(NOW(6))"))
}

/// The time in seconds after which a session gives up a row.
fn locks_wait_for(it: &Database) -> String {
    asked(it.primary.addr(), "@@global.innodb_lock_wait_timeout")
}

fn isolates(it: &Database, level: &str) -> bool {
    // The name that one flavour has, and the one that both have had.
    let said = run(
        it.primary.addr(),
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('transaction_isolation', 'tx_isolation')",
    );
    said.is_ok_and(|rows| rows.iter().any(|row| row[1] == level))
}

fn database(flavour: Flavour, lease: bool) {
    let it = Deployment::of(Database::start(flavour, lease).expect("servers")).expect("ways");
    let is_right: Shows<Database> = |it, _| mysql_ahead(&it.primary).abs() < 0.5;
    let is_default: Shows<Database> = |it, _| locks_wait_for(it) == "50" && isolates(it, "REPEATABLE-READ");
    let mut table = Table::<Database> {
        look: |it| {
            until("its clients", || {
                sessions(&it.primary).is_ok_and(|ids| !ids.is_empty())
            });
            sessions(&it.primary).expect("its clients")
        },
        rows: vec![
            (
                "pause",
                0,
                |it, _| is_paused(it.primary.process().pid()),
                |it, _| asked(it.primary.addr(), "1") == "1",
            ),
            (
                "restart",
                0,
                |it, _| it.primary.process().pid().is_none(),
                |it, _| run(it.primary.addr(), "SELECT 1").is_ok(),
            ),
            (
                "session",
                0,
                |it, before| is_one_gone(before, sessions(&it.primary)),
                |_, _| true,
            ),
            (
                "switch",
                0,
                |it, _| is_read_only(it) == Some(true),
                |it, _| is_read_only(it) == Some(false),
            ),
            ("clock", 0, |it, _| mysql_ahead(&it.primary) > 1.0, is_right),
            (
                "settings",
                0,
                |it, _| locks_wait_for(it) == "50" && isolates(it, "SERIALIZABLE"),
                is_default,
            ),
            (
                "settings",
                1,
                |it, _| locks_wait_for(it) == "1" && isolates(it, "REPEATABLE-READ"),
                is_default,
            ),
            (
                "hostile",
                2,
                |it, before| {
                    let begins_with = asked(it.primary.addr(), "@@global.init_connect");
                    begins_with.contains("sql_safe_updates") && is_one_gone(before, sessions(&it.primary))
                },
                |it, _| asked(it.primary.addr(), "@@global.init_connect").is_empty(),
            ),
        ],
    };
    if lease {
        let is_ahead: Shows<Database> = |it, _| (mysql_ahead(&it.primary) - 3_600.0).abs() < 0.5;
        table.rows.extend([
            (
                "clock",
                1,
                |it: &Database, _: &[String]| mysql_ahead(&it.primary) < -1.0,
                is_right,
            ),
            (
                "hour",
                1,
                |it, _| (mysql_ahead(&it.primary) + 3_600.0).abs() < 0.5,
                is_right,
            ),
            // The last: it stays so.
            ("hour", 0, is_ahead, is_ahead),
        ] as [(_, _, Shows<Database>, Shows<Database>); 3]);
    }
    table.try_all(&it);

    // What is at the other end of the ways.
    let lead_to = |server: &MySql| {
        let port = server.addr().port().to_string();
        it.ways.iter().all(|way| asked(way.addr(), "@@port") == port)
    };
    let switch = strike("switch", 0);
    until("the primary", || lead_to(&it.servers.primary));
    it.strike(&switch, &[]).expect("a strike");
    until("the successor", || lead_to(&it.servers.successor));
    it.heal(&switch).expect("healed");
    until("the primary again", || lead_to(&it.servers.primary));
}

#[test]
fn of_mariadb_happen_and_heal() {
    if !skipped("mysql", MySql::missing(Flavour::MariaDb)) {
        database(Flavour::MariaDb, true);
    }
}

#[test]
fn of_mysql_happen_and_heal() {
    if !skipped("mysql-server", MySql::missing(Flavour::MySql)) {
        database(Flavour::MySql, false);
    }
}

fn pg_says(server: &PgServer, what: &str, answer: &str) -> bool {
    server
        .sql(&format!("SELECT {what}"))
        .is_ok_and(|said| said == answer)
}

fn pg_ahead(server: &PgServer) -> f64 {
    ahead(
        &server
            .sql("SELECT extract(epoch FROM clock_timestamp())")
            .unwrap_or_default(),
    )
}

#[test]
fn of_postgres_happen_and_heal() {
    if skipped("postgres", pg::missing()) {
        return;
    }
    let it = Deployment::of(postgres::Database::start().expect("servers")).expect("ways");
    let answers: Shows<postgres::Database> = |it, _| pg_says(&it.primary, "1", "1");
    let is_right: Shows<postgres::Database> = |it, _| pg_ahead(&it.primary).abs() < 0.5;
    let table = Table::<postgres::Database> {
        look: |it| {
            let sessions = || postgres::sessions(&it.primary);
            until("its clients", || sessions().is_ok_and(|pids| pids.len() >= 3));
            sessions().expect("its clients")
        },
        rows: vec![
            ("pause", 0, |it, _| is_paused(it.primary.pid()), answers),
            ("restart", 0, |it, _| it.primary.pid().is_none(), answers),
            (
                "crash",
                0,
                |it, before| are_all_gone(before, postgres::sessions(&it.primary)),
                answers,
            ),
            (
                "session",
                1,
                |it, before| {
                    let now = postgres::sessions(&it.primary);
                    is_one_gone(before, now) && is_there_still(before, postgres::sessions(&it.primary))
                },
                answers,
            ),
            (
                "failover",
                0,
                |it, _| it.primary.pid().is_none() && pg_says(&it.standby(), "pg_is_in_recovery()", "f"),
                |it, _| {
                    pg_says(&it.primary, "pg_is_in_recovery()", "f")
                        && pg_says(&it.standby(), "pg_is_in_recovery()", "t")
                },
            ),
            (
                "settings",
                0,
                |it, before| {
                    let settings = format!(
                        "(SELECT rolconfig FROM pg_roles WHERE rolname='{}')",
                        PgServer::USER
                    );
                    let said = it.primary.sql(&format!("SELECT {settings}"));
                    said.is_ok_and(|said| said.contains("lock_timeout=300"))
                        && are_all_gone(before, postgres::sessions(&it.primary))
                },
                |it, _| {
                    let user = PgServer::USER;
                    pg_says(
                        &it.primary,
                        &format!("rolconfig IS NULL FROM pg_roles WHERE rolname='{user}'"),
                        "t",
                    )
                },
            ),
            ("clock", 0, |it, _| pg_ahead(&it.primary) > 1.0, is_right),
            ("clock", 1, |it, _| pg_ahead(&it.primary) < -1.0, is_right),
        ],
    };
    table.try_all(&it);

    // What is at the other end of the ways.
    let runtime = Runtime::new().expect("a runtime");
    let failover = strike("failover", 0);
    it.strike(&failover, &[]).expect("a strike");
    let there = clients(&runtime, &it);
    let at_standby = postgres::sessions(&it.servers.standby());
    assert!(at_standby.is_ok_and(|pids| pids.len() >= 3));
    it.heal(&failover).expect("healed");
    drop(there);
    let _there = clients(&runtime, &it);
    let at_primary = postgres::sessions(&it.servers.primary);
    assert!(at_primary.is_ok_and(|pids| pids.len() >= 3));
}

/// Nobody of those who were there before is any more.
fn are_all_gone(before: &[String], now: io::Result<Vec<String>>) -> bool {
    assert!(!before.is_empty(), "nobody was there");
    now.is_ok_and(|now| before.iter().all(|id| !now.contains(id)))
}

fn zookeeper_sessions(server: &lockkit_testbed::zookeeper::ZkServer) -> io::Result<Vec<String>> {
    Ok(server.sessions()?.iter().map(ToString::to_string).collect())
}

#[test]
fn of_zookeeper_happen_and_heal() {
    if skipped("zk", lockkit_testbed::zookeeper::missing()) {
        return;
    }
    let it = Deployment::of(Single::start("mutex").expect("a server")).expect("ways");
    let serves: Shows<Single> = |it, _| it.server.word("srvr").is_ok_and(|said| said.contains("Mode:"));
    assert!(grants_at_most(&it.servers, "60000"));
    let table = Table::<Single> {
        look: |it| {
            until("its sessions", || {
                it.server.sessions().is_ok_and(|ids| ids.len() >= 3)
            });
            zookeeper_sessions(&it.server).expect("its sessions")
        },
        rows: vec![
            ("pause", 0, |it, _| is_paused(it.server.pid()), serves),
            (
                "restart",
                0,
                |it, _| it.server.pid().is_none(),
                |it, before| is_there_still(before, zookeeper_sessions(&it.server)),
            ),
            (
                "settings",
                0,
                |it, _| grants_at_most(it, "2000") && ticks(it, "100"),
                |it, _| grants_at_most(it, "60000") && ticks(it, "100"),
            ),
            (
                "ticks",
                0,
                |it, _| grants_at_most(it, "60000") && ticks(it, "40"),
                |it, _| grants_at_most(it, "60000") && ticks(it, "100"),
            ),
            (
                "ticks",
                1,
                |it, _| grants_at_most(it, "60000") && ticks(it, "500"),
                |it, _| grants_at_most(it, "60000") && ticks(it, "100"),
            ),
            (
                "session",
                0,
                |it, before| is_one_gone(before, zookeeper_sessions(&it.server)),
                serves,
            ),
        ],
    };
    table.try_all(&it);
}

fn grants_at_most(it: &Single, most: &str) -> bool {
    has_setting(it, &format!("maxSessionTimeout={most}"))
}

fn ticks(it: &Single, milliseconds: &str) -> bool {
    has_setting(it, &format!("tickTime={milliseconds}"))
}

fn has_setting(it: &Single, setting: &str) -> bool {
    let settings = it.server.word("conf");
    settings.is_ok_and(|said| said.lines().any(|line| line == setting))
}

/// Its data are what they were.
fn is_there_still(before: &[String], now: io::Result<Vec<String>>) -> bool {
    now.is_ok_and(|now| before.iter().any(|id| now.contains(id)))
}

fn serves(it: &Ensemble, member: usize) -> bool {
    let said = it.0.member(member).word("srvr");
    said.is_ok_and(|said| said.contains("Mode:"))
}

/// The members but the middle one.
fn others_serve(it: &Ensemble) -> bool {
    serves(it, 0) && serves(it, 2)
}

#[test]
fn of_the_ensemble_happen_at_one_member_and_heal() {
    if skipped("zk", lockkit_testbed::zookeeper::missing()) {
        return;
    }
    let it = Deployment::of(Ensemble::start().expect("servers")).expect("ways");
    let undone: Shows<Ensemble> = |it, _| serves(it, 1) && others_serve(it);
    let table = Table::<Ensemble> {
        look: |it| {
            let leader = || it.0.member(it.0.leader().expect("a leader"));
            until("its sessions", || {
                leader().sessions().is_ok_and(|ids| ids.len() >= 2)
            });
            zookeeper_sessions(leader()).expect("its sessions")
        },
        rows: vec![
            (
                "pause",
                1,
                |it, _| is_paused(it.0.member(1).pid()) && others_serve(it),
                undone,
            ),
            (
                "restart",
                1,
                |it, _| it.0.member(1).pid().is_none() && others_serve(it),
                undone,
            ),
            (
                "isolate",
                1,
                |it, _| it.0.member(1).pid().is_some() && !serves(it, 1) && others_serve(it),
                undone,
            ),
            // Whoever hears nothing, or is not heard, has no leader in the end.
            ("one-way", 1, |it, _| !serves(it, 1) && others_serve(it), undone),
            ("one-way", 4, |it, _| !serves(it, 1) && others_serve(it), undone),
            (
                "session",
                1,
                |it, before| {
                    let leader = it.0.member(it.0.leader().expect("a leader"));
                    is_one_gone(before, zookeeper_sessions(leader))
                },
                undone,
            ),
        ],
    };
    table.try_all(&it);
}

/// Plants a key of a lock, one of none with a history, and a lease, which it says.
fn plant_at_etcd(server: &EtcdServer) -> Vec<String> {
    server.ctl(&["lease", "grant", "600"]).expect("planted");
    for key in [ETCD_LOCK, OTHER, OTHER] {
        server.ctl(&["put", key, "1"]).expect("planted");
    }
    server.leases().expect("leases")
}

const ETCD_LOCK: &str = "lockkit/planted/1";

fn has_key(server: &EtcdServer, key: &str) -> bool {
    server.keys(key).is_ok_and(|keys| keys == [key])
}

fn is_compacted(server: &EtcdServer) -> bool {
    let past = server.ctl(&["get", "--rev=2", OTHER]);
    past.is_err_and(|error| error.to_string().contains("compacted"))
}

#[test]
fn of_etcd_happen_and_heal() {
    if skipped("etcd", lockkit_testbed::etcd::missing()) {
        return;
    }
    let it = Deployment::of(etcd::Single::start().expect("a server")).expect("ways");
    let serves: Shows<etcd::Single> = |it, _| it.server.healthy().is_ok();
    let has_all: Shows<etcd::Single> = |it, _| has_key(&it.server, ETCD_LOCK) && has_key(&it.server, OTHER);
    let table = Table::<etcd::Single> {
        look: |it| plant_at_etcd(&it.server),
        rows: vec![
            ("pause", 0, |it, _| is_paused(it.server.pid()), serves),
            ("restart", 0, |it, _| it.server.pid().is_none(), has_all),
            (
                "lease",
                0,
                |it, before| {
                    is_one_gone(before, it.server.leases()) && is_there_still(before, it.server.leases())
                },
                has_all,
            ),
            (
                "delete",
                0,
                |it, _| !has_key(&it.server, ETCD_LOCK) && has_key(&it.server, OTHER),
                serves,
            ),
            ("compact", 0, |it, _| is_compacted(&it.server), has_all),
        ],
    };
    table.try_all(&it);
}

fn is_healthy(it: &etcd::Cluster, member: usize) -> bool {
    it.0.member(member).healthy().is_ok()
}

#[test]
fn of_the_cluster_happen_at_one_member_and_heal() {
    if skipped("etcd", lockkit_testbed::etcd::missing()) {
        return;
    }
    let it = Deployment::of(etcd::Cluster::start().expect("servers")).expect("ways");
    let undone: Shows<etcd::Cluster> = |it, _| (0..3).all(|member| is_healthy(it, member));
    let table = Table::<etcd::Cluster> {
        look: |it| plant_at_etcd(it.0.member(0)),
        rows: vec![
            (
                "pause",
                1,
                |it, _| is_paused(it.0.member(1).pid()) && is_healthy(it, 0) && is_healthy(it, 2),
                undone,
            ),
            (
                "restart",
                1,
                |it, _| it.0.member(1).pid().is_none() && is_healthy(it, 0) && is_healthy(it, 2),
                undone,
            ),
            (
                "isolate",
                1,
                |it, _| {
                    it.0.member(1).pid().is_some()
                        && !is_healthy(it, 1)
                        && is_healthy(it, 0)
                        && is_healthy(it, 2)
                },
                undone,
            ),
            (
                "lease",
                0,
                |it, before| is_one_gone(before, it.0.member(0).leases()),
                undone,
            ),
            (
                "delete",
                0,
                |it, _| {
                    let member = it.0.member(0);
                    !has_key(member, ETCD_LOCK) && has_key(member, OTHER)
                },
                undone,
            ),
            ("compact", 0, |it, _| is_compacted(it.0.member(0)), undone),
        ],
    };
    table.try_all(&it);
}

#[test]
fn of_files_happen() {
    let it = Files::new().expect("a directory");
    for name in ["a", "b"] {
        fs::write(it.0.path().join(name), "").expect("a file");
    }
    it.strike(&strike("delete", 1), &[]).expect("a strike");
    assert_eq!(it.files().expect("its files"), [it.0.path().join("a")]);
    it.strike(&strike("delete", 3), &[]).expect("a strike");
    assert!(it.files().expect("its files").is_empty(), "places begin again");

    let locks = it.0.path().join("lockkit");
    fs::create_dir(&locks).expect("a directory");
    fs::write(locks.join("a"), "").expect("a file");
    it.strike(&strike("directory", 0), &[]).expect("a strike");
    assert!(!locks.exists(), "it was deleted");

    let full = strike("full", 0);
    if it.faults().iter().any(|fault| fault.name == full.fault) {
        let write = || fs::write(it.0.path().join("c"), "one more").map_err(|error| error.kind());
        it.strike(&full, &[]).expect("a strike");
        assert_eq!(write(), Err(io::ErrorKind::StorageFull));
        it.heal(&full).expect("healed");
        // A process that has just been forked may still have the deleted file open.
        until("room", || write() == Ok(()));
    }
}

/// A connection to a Redis server.
struct Line(TcpStream);

impl Line {
    fn to(addr: SocketAddr) -> io::Result<Self> {
        TcpStream::connect(addr).map(Self)
    }

    /// After what time the answer comes, if it comes within `limit`.
    fn ask(&mut self, what: &str, limit: Duration) -> io::Result<Option<Duration>> {
        let began = Instant::now();
        self.0.write_all(format!("{what}\r\n").as_bytes())?;
        self.0.set_read_timeout(Some(limit))?;
        match self.0.read(&mut [0; 100]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(Some(began.elapsed())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn is_silent(&mut self, what: &str) -> bool {
        matches!(self.ask(what, Duration::from_millis(300)), Ok(None))
    }

    fn answers(&mut self) -> bool {
        matches!(self.ask("PING", LIMIT), Ok(Some(_)))
    }
}

#[test]
fn of_the_ways_happen_and_heal() {
    if skipped("redis", servers::missing()) {
        return;
    }
    let it = Deployment::of(Redis::start(servers::program()).expect("a server")).expect("ways");
    let server = &it.servers.server;
    let (addr, other) = (it.ways[1].addr(), it.ways[0].addr());
    let names: BTreeSet<_> = it
        .faults()
        .iter()
        .filter(|fault| fault.way)
        .map(|fault| fault.name)
        .collect();
    let mut tried = BTreeSet::new();
    let mut case = |fault: &'static str, happens: &dyn Fn(Line), undone: &dyn Fn(Line)| {
        let line = || {
            let mut line = Line::to(addr).expect("a connection");
            assert!(line.answers(), "before {fault}");
            line
        };
        let (first, second) = (line(), line());
        let strike = strike(fault, 1);
        it.strike(&strike, &[]).expect("a strike");
        happens(first);
        assert!(
            Line::to(other).is_ok_and(|mut line| line.answers()),
            "{fault} at another way"
        );
        it.heal(&strike).expect("healed");
        assert_eq!(it.ways[1].mode(), Mode::Pass);
        undone(second);
        assert!(
            Line::to(addr).is_ok_and(|mut line| line.answers()),
            "after {fault}"
        );
        tried.insert(fault);
    };
    let set = |key: &str| server.cli(&["EXISTS", key]).expect("an answer") == "1";
    case(
        "cut",
        &|mut line| {
            assert!(line.is_silent("SET cut 1"));
            assert!(Line::to(addr).expect("it is accepted").is_silent("PING"));
            assert!(!set("cut"));
        },
        &|mut line| assert!(line.answers()),
    );
    case(
        "reset",
        &|mut line| assert!(line.ask("PING", LIMIT).is_err()),
        &|mut line| assert!(line.ask("PING", LIMIT).is_err()),
    );
    case(
        "lose",
        &|mut line| {
            assert!(line.is_silent("SET lose 1"));
            assert!(set("lose"), "the request arrives");
        },
        &|mut line| assert!(line.answers(), "it has lost nothing"),
    );
    case(
        "delay",
        &|mut line| {
            let late = line.ask("PING", LIMIT).expect("an answer").expect("an answer");
            // An eighth of the time that it lasts, each way.
            assert!(late >= Duration::from_millis(370), "{late:?}");
        },
        &|mut line| assert!(line.answers()),
    );
    case(
        "requests",
        &|mut line| {
            assert!(line.is_silent("SET requests 1"));
            assert!(!set("requests"), "it has not arrived");
        },
        &|mut line| assert!(line.answers()),
    );
    case(
        "silence",
        &|mut line| {
            assert!(line.is_silent("SET silence 1"));
            assert!(Line::to(addr).expect("it is accepted").is_silent("PING"));
            assert!(!set("silence"));
            until("the end of the connections, at the server", || {
                let clients = server.cli(&["CLIENT", "LIST"]).expect("a list");
                clients.lines().all(|line| line.contains("cmd=client"))
            });
        },
        &|mut line| assert!(line.is_silent("PING"), "it stays so"),
    );
    case(
        "refuse",
        &|mut line| {
            assert!(line.ask("PING", LIMIT).is_err());
            let refused = Line::to(addr).err().map(|error| error.kind());
            assert_eq!(refused, Some(io::ErrorKind::ConnectionRefused));
        },
        &|mut line| assert!(line.ask("PING", LIMIT).is_err()),
    );
    assert_eq!(tried, names, "no fault goes without a case");
}
