//! Connecting: refusals, the schema, and rights.

use std::{io, net::Ipv4Addr, time::Duration};

use lockkit_conformance::Traces;
use lockkit_core::{
    AcquireOptions, Error, FencingDurability, LockClient,
    spi::{self, Backend as _, chain},
};
use lockkit_postgres::{PostgresBackend, PostgresConfig, Schema, SslMode, ddl};
use lockkit_testbed::{
    eventually, hangs_up, own_address,
    postgres::{PgBouncer, PgServer, PgSession, PoolMode, missing_bouncer},
    skipped,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use tracing::instrument::WithSubscriber as _;

use crate::servers::{
    Waiter, client, config, connect, cycle, key, listed, name, private, relay, request, session, shared,
    tests, waits,
};

tests! {
    a_pooler_is_refused
    a_standby_is_refused_until_it_is_the_primary
    a_session_that_is_read_only_is_refused
    a_server_that_becomes_read_only_grants_nothing
    a_server_without_a_lease_is_refused
    a_proxy_that_swallows_the_lease_is_refused
    who_only_looks_writes_nothing
    who_may_not_look_is_not_told_that_all_is_free
    half_a_schema_is_no_free_lock
    what_another_role_has_is_listed_or_an_error
    a_schema_that_is_missing_is_printed_and_not_made
    a_schema_that_cannot_be_made_here_is_printed
    the_rights_that_are_documented_are_enough
    rights_that_are_missing_are_named
    a_schema_that_was_changed_is_refused
    many_may_make_the_schema_at_once
    durability_is_what_the_server_has
    durability_that_is_lost_is_warned_about_once
    a_refused_role_is_no_transient_error
    a_full_server_is_no_taken_lock
    the_limit_of_connections_is_a_clear_error
    settings_of_the_role_do_not_count
    a_search_path_decides_nothing
    a_unix_socket_is_a_way_to_the_server
    locks_of_two_databases_do_not_exclude
    too_many_permits_are_refused
    a_ttl_too_short_to_be_kept_is_refused
}

/// A database of a test's own, with a role that may connect to it.
fn database(rights: &str) -> (PgSession, PostgresConfig) {
    let server = shared();
    let of = format!("t{:016x}", fastrand::u64(..));
    let mut admin = session(server);
    admin
        .sql(&format!("CREATE ROLE {of} LOGIN PASSWORD 'pw'"))
        .unwrap();
    admin.sql(&format!("CREATE DATABASE {of}")).unwrap();
    let mut inside = server.session_in(&of).unwrap();
    for right in rights.split(';').map(str::trim).filter(|right| !right.is_empty()) {
        inside.sql(&right.replace("HERE", &of)).unwrap();
    }
    (
        inside,
        PostgresConfig::new(format!("postgres://{of}:pw@{}/{of}", server.addr())),
    )
}

fn refusal(result: Result<impl Sized, Error>) -> String {
    match result {
        Err(Error::Unsupported { what, .. }) => what,
        Err(other) => panic!("{}", chain(&other)),
        Ok(_) => panic!("it is accepted"),
    }
}

/// Two clients of one server session would both be granted one lock.
async fn a_pooler_is_refused() {
    if skipped("pgbouncer", missing_bouncer()) {
        return;
    }
    let server = shared();
    for mode in [PoolMode::Transaction, PoolMode::Session] {
        for lines in [&[][..], &["ignore_startup_parameters = options"][..]] {
            let bouncer = PgBouncer::start(server.addr(), mode, lines).unwrap();
            let mut config = PostgresConfig::new(bouncer.url());
            config.sslmode = SslMode::Disable;
            let what = refusal(connect(config).await);
            assert!(
                what.contains("pooler") && what.contains("directly"),
                "{mode:?} {lines:?}: {what}"
            );
        }
    }
}

/// Its locks are its own: the primary grants them as well.
async fn a_standby_is_refused_until_it_is_the_primary() {
    let primary = private(&[]);
    let before = client(primary.addr())
        .await
        .lock("a")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let standby = PgServer::builder().standby_of(&primary).unwrap();
    standby.wait_caught_up(&primary).unwrap();
    let what = refusal(connect(config(standby.addr())).await);
    assert!(what.contains("standby"), "{what}");
    primary.kill().unwrap();
    standby.promote().unwrap();
    let after = client(standby.addr())
        .await
        .lock("a")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    assert!(after.token() > before.token());
}

async fn a_session_that_is_read_only_is_refused() {
    let (mut admin, config) = database("GRANT CREATE ON DATABASE HERE TO HERE");
    connect(config.clone()).await.unwrap();
    let role = admin.sql("SELECT current_database()").unwrap();
    admin
        .sql(&format!("ALTER ROLE {role} SET default_transaction_read_only=on"))
        .unwrap();
    let what = refusal(connect(config).await);
    assert!(what.contains("default_transaction_read_only"), "{what}");
}

/// As an operator makes it before a switch-over. Its error comes after the lock: the lock must not stay.
async fn a_server_that_becomes_read_only_grants_nothing() {
    let server = private(&[]);
    let client = client(server.addr()).await;
    cycle(&client, "a").await;
    let mut admin = session(&server);
    admin
        .sql("ALTER SYSTEM SET default_transaction_read_only=on")
        .unwrap();
    server.reload().unwrap();
    let key = crate::servers::key("a");
    let lock = client.lock("a").unwrap();
    eventually("the sessions have heard of it", async || {
        lock.try_acquire().await.is_err()
    })
    .await;
    for answer in [
        lock.try_acquire().await.map(drop),
        lock.acquire_timeout(Duration::from_secs(1)).await.map(drop),
    ] {
        let error = answer.unwrap_err();
        assert!(!error.is_timeout(), "{}", chain(&error));
        let free = admin.sql(&format!("SELECT pg_try_advisory_lock({key})")).unwrap();
        assert_eq!(free, "t", "an error left the lock behind: {}", chain(&error));
        admin.sql(&format!("SELECT pg_advisory_unlock({key})")).unwrap();
    }
    admin
        .sql("ALTER SYSTEM RESET default_transaction_read_only")
        .unwrap();
    server.reload().unwrap();
    eventually("the sessions have heard of it", async || {
        lock.try_acquire().await.is_ok()
    })
    .await;
    cycle(&client, "a").await;
}

/// A server before version 14 knows no such parameter.
async fn a_server_without_a_lease_is_refused() {
    let old = relay(
        shared().addr(),
        "idle_session_timeout=0",
        "idle_session_timeoot=0",
    )
    .await
    .unwrap();
    let mut config = config(old);
    config.sslmode = SslMode::Disable;
    let what = refusal(connect(config).await);
    assert!(what.contains("PostgreSQL 14"), "{what}");
}

async fn a_proxy_that_swallows_the_lease_is_refused() {
    let swallowing = relay(
        shared().addr(),
        "idle_session_timeout=30000",
        "geqo_pool_size=0000000000 ",
    )
    .await
    .unwrap();
    let mut config = config(swallowing);
    config.sslmode = SslMode::Disable;
    let client = connect(config).await.unwrap();
    let what = refusal(client.lock(name("swallowed")).unwrap().try_acquire().await);
    assert!(what.contains("idle_session_timeout"), "{what}");
}

/// The error of a try, which is none of a taken lock.
async fn refused_try(client: &LockClient) -> String {
    let error = client.lock("a").unwrap().try_acquire().await.unwrap_err();
    assert!(!error.is_transient(), "{}", chain(&error));
    chain(&error)
}

/// The configuration of the superuser in this session's database.
fn superuser(admin: &mut PgSession) -> PostgresConfig {
    let database = admin.sql("SELECT current_database()").unwrap();
    let (user, password, addr) = (PgServer::SUPERUSER, PgServer::PASSWORD, shared().addr());
    let url = format!("postgres://{user}:{password}@{addr}/{database}");
    PostgresConfig::new(url)
}

/// It may do nothing but look, at first where nothing is.
async fn who_only_looks_writes_nothing() {
    let (mut admin, config) = database("");
    let looks = connect(config).await.unwrap();
    assert!(looks.inspect("a").await.unwrap().is_free());
    assert!(looks.inspect_semaphore("s").await.unwrap().is_free());
    assert_eq!(listed(&looks, "").await.unwrap(), 0);
    let before = looks.fence().await.unwrap();
    let text = refused_try(&looks).await;
    assert!(text.contains("have it made with: CREATE SCHEMA"), "{text}");
    let there = "SELECT count(*) FROM pg_namespace WHERE nspname = 'lockkit'";
    assert_eq!(admin.sql(there).unwrap(), "0");
    // Another program takes part without it.
    let role = admin.sql("SELECT current_database()").unwrap();
    let mut by_hand = shared().session_in(&role).unwrap();
    by_hand
        .sql(&format!("SELECT pg_advisory_lock({})", key("a")))
        .unwrap();
    let seen = looks.inspect("a").await.unwrap();
    assert_eq!(seen.holders[0].label.as_deref(), Some("testbed"));
    drop(by_hand);

    let holder = connect(superuser(&mut admin)).await.unwrap();
    let guard = holder.lock("a").unwrap().acquire().await.unwrap();
    assert!(guard.token() > before);
    let permit = holder.semaphore("s", 2).unwrap().acquire().await.unwrap();
    admin
        .sql(&format!(
            "GRANT USAGE ON SCHEMA lockkit TO {role}; GRANT SELECT ON SEQUENCE lockkit.token TO {role}; \
             GRANT SELECT ON lockkit.epoch, lockkit.holder, lockkit.semaphore TO {role}"
        ))
        .unwrap();
    let written = "SELECT (SELECT last_value FROM lockkit.token), (SELECT count(*) FROM lockkit.epoch)";
    let before = admin.sql(written).unwrap();
    assert_eq!(looks.inspect("a").await.unwrap().holders[0].token, guard.token());
    let permits = looks.inspect_semaphore("s").await.unwrap();
    assert_eq!(permits.holders[0].token, permit.token());
    assert_eq!(listed(&looks, "").await.unwrap(), 2);
    assert!(looks.fence().await.unwrap() >= permit.token());
    let text = refused_try(&looks).await;
    assert!(text.contains("lacks rights"), "{text}");
    assert_eq!(admin.sql(written).unwrap(), before, "it has written");
    guard.release().await.unwrap();
    permit.release().await.unwrap();
}

async fn who_may_not_look_is_not_told_that_all_is_free() {
    let (mut admin, config) = database("");
    let holder = connect(superuser(&mut admin)).await.unwrap();
    let guard = holder.lock("a").unwrap().acquire().await.unwrap();
    let looks = connect(config).await.unwrap();
    for answer in [
        looks.inspect("a").await.map(drop),
        looks.inspect_semaphore("s").await.map(drop),
        listed(&looks, "").await.map(drop),
        looks.fence().await.map(drop),
    ] {
        let error = answer.unwrap_err();
        let text = chain(&error);
        assert!(!error.is_transient() && text.contains("42501"), "{text}");
    }
    guard.release().await.unwrap();
}

async fn half_a_schema_is_no_free_lock() {
    for dropped in ["TABLE lockkit.holder", "TABLE lockkit.semaphore"] {
        let (mut admin, config) = database(&format!("{}{RIGHTS}; DROP {dropped}", ddl()));
        let looks = connect(config).await.unwrap();
        let mut answers = vec![
            looks.inspect_semaphore("a").await.map(drop),
            listed(&looks, "").await.map(drop),
        ];
        if dropped == "TABLE lockkit.holder" {
            answers.push(looks.inspect("a").await.map(drop));
        }
        for answer in answers {
            let text = chain(&answer.unwrap_err());
            assert!(text.contains("42P01"), "{dropped}: {text}");
        }
        let text = refused_try(&looks).await;
        assert!(text.contains("is not complete"), "{dropped}: {text}");
        // Who may make it makes the rest.
        cycle(&connect(superuser(&mut admin)).await.unwrap(), "a").await;
    }
    for dropped in ["TABLE lockkit.epoch", "SEQUENCE lockkit.token"] {
        let (_admin, config) = database(&format!("{}{RIGHTS}; DROP {dropped}", ddl()));
        let fence = connect(config).await.unwrap().fence().await;
        let text = chain(&fence.unwrap_err());
        assert!(text.contains("42P01"), "{dropped}: {text}");
    }
}

/// The sessions of another role tell neither when they began nor what they do.
async fn what_another_role_has_is_listed_or_an_error() {
    let (mut admin, config) = database(&format!("{}{RIGHTS}", ddl()));
    let looks = connect(config).await.unwrap();
    let theirs = connect(superuser(&mut admin)).await.unwrap();
    let semaphore = theirs.semaphore("s", 1).unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let waiter = Waiter::of(semaphore);
    eventually("it is the head", async || {
        looks.inspect_semaphore("s").await.unwrap().waiters == Some(1)
    })
    .await;
    assert_eq!(listed(&looks, "").await.unwrap(), 1);
    // Nobody shows what a claim alone has.
    let backend = PostgresBackend::connect(superuser(&mut admin)).await.unwrap();
    let mut claim = backend.claim(&request("a", spi::Mode::Exclusive)).await.unwrap();
    assert!(claim.attempt(Duration::ZERO).await.unwrap().is_some());
    let error = listed(&looks, "").await.unwrap_err();
    assert!(
        error.is_transient() && chain(&error).contains("does not show"),
        "{}",
        chain(&error)
    );
    claim.renew().await.unwrap();
    assert_eq!(listed(&looks, "").await.unwrap(), 2);
    claim.release().await.unwrap();
    permit.release().await.unwrap();
    waiter.granted().await.0.release().await.unwrap();
}

async fn a_schema_that_is_missing_is_printed_and_not_made() {
    let (mut admin, mut config) = database("GRANT CREATE ON DATABASE HERE TO HERE");
    config.schema = Schema::Manual;
    let error = connect(config.clone()).await.unwrap_err();
    let text = chain(&error);
    assert!(!error.is_transient(), "{text}");
    let (_, statements) = text
        .split_once("have it made with: ")
        .unwrap_or_else(|| panic!("{text}"));
    let there = "SELECT count(*) FROM pg_namespace WHERE nspname='lockkit'";
    assert_eq!(admin.sql(there).unwrap(), "0");
    // They are sufficient, as a log shows them, also where another role owns what they make.
    admin.sql(statements).unwrap();
    cycle(&connect(config).await.unwrap(), "a").await;
}

async fn a_schema_that_cannot_be_made_here_is_printed() {
    let (_admin, config) = database("");
    let text = refused_try(&connect(config).await.unwrap()).await;
    assert!(text.contains("have it made with: CREATE SCHEMA"), "{text}");
}

const RIGHTS: &str = "GRANT USAGE ON SCHEMA lockkit TO HERE; GRANT USAGE, UPDATE ON SEQUENCE lockkit.token TO HERE; \
                      GRANT SELECT, INSERT, UPDATE, DELETE ON lockkit.epoch, lockkit.holder, lockkit.semaphore TO HERE";

async fn the_rights_that_are_documented_are_enough() {
    let (_admin, mut config) = database(&format!("{}{RIGHTS}", ddl()));
    config.schema = Schema::Manual;
    let (client, other) = (
        connect(config.clone()).await.unwrap(),
        connect(config).await.unwrap(),
    );
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    assert!(other.lock("a").unwrap().try_acquire().await.unwrap().is_none());
    assert_eq!(other.inspect("a").await.unwrap().holders.len(), 1);
    let waiter = Waiter::of(other.lock("a").unwrap());
    waits(&client, "a").await;
    guard.release().await.unwrap();
    let granted = waiter.granted().await.0;
    for permits in [2, 3] {
        let permit = client.semaphore("s", permits).unwrap().acquire().await.unwrap();
        permit.release().await.unwrap();
    }
    assert!(
        client.revoke_by_force("a", granted.token()).await.unwrap(),
        "its own role's sessions may be ended"
    );
}

async fn rights_that_are_missing_are_named() {
    let rights: Vec<_> = RIGHTS.split(';').collect();
    for missing in 0..rights.len() {
        let mut given = rights.clone();
        given.remove(missing);
        let (mut admin, mut config) = database(&format!("{}{}", ddl(), given.join(";")));
        config.schema = Schema::Manual;
        let client = connect(config).await.unwrap();
        let text = refused_try(&client).await;
        let (_, grants) = text.split_once("run: ").unwrap_or_else(|| panic!("{text}"));
        admin.sql(grants).unwrap();
        cycle(&client, "a").await;
    }
}

async fn a_schema_that_was_changed_is_refused() {
    for change in [
        "ALTER SEQUENCE lockkit.token CACHE 32",
        "ALTER SEQUENCE lockkit.token INCREMENT BY 1",
        "ALTER SEQUENCE lockkit.token CYCLE",
        "ALTER TABLE lockkit.epoch SET LOGGED",
    ] {
        let (mut admin, config) = database(&format!("{}{RIGHTS}; {change}", ddl()));
        let what = refusal(connect(config.clone()).await);
        let (_, mend) = what.split_once("run: ").unwrap_or_else(|| panic!("{what}"));
        admin.sql(mend).unwrap();
        cycle(&connect(config).await.unwrap(), "a").await;
    }
}

async fn many_may_make_the_schema_at_once() {
    let (_admin, config) = database("GRANT CREATE ON DATABASE HERE TO HERE");
    let all = (0..20).map(|_| {
        let config = config.clone();
        async move { cycle(&connect(config).await.unwrap(), "a").await }
    });
    futures_util::future::join_all(all).await;
}

/// Returns the error of connecting, with the password `canary p%ss`, to a server that refuses the login with these words, and all that was
/// shown of it.
async fn refused_with(words: &str) -> (Error, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let fields = format!("SFATAL\0VFATAL\0C28P01\0M{words}\0\0");
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut heard = vec![0; 1024];
            let _ = client.read(&mut heard).await;
            let size = u32::try_from(fields.len() + 4).unwrap().to_be_bytes();
            let _ = client
                .write_all(&[&b"E"[..], &size, fields.as_bytes()].concat())
                .await;
        }
    });
    let config = PostgresConfig::new(format!("postgres://app:canary%20p%25ss@{addr}/app"));
    let traces = Traces::default();
    let connecting = connect(config).with_subscriber(traces.clone());
    let error = connecting.await.unwrap_err();
    let text = format!("{} {error:?} {error:#?} {}", chain(&error), traces.text());
    (error, text)
}

/// A server that knows the password, and says it.
#[tokio::test]
async fn a_password_that_a_server_repeats_is_not_shown() {
    let password = "canary p%ss";
    let words = format!("{password}: {password:?}\0Dcanary%20p%25ss");
    let (error, text) = refused_with(&words).await;
    assert!(text.contains("***: \"***\""), "{text}");
    assert!(!text.contains("canary"), "{text}");
    assert!(!error.is_transient());
}

/// The words of a server are told in 500 characters.
#[tokio::test]
async fn no_part_of_a_password_is_left_where_words_end() {
    for before in 489..=496 {
        let words = "n".repeat(before) + "canary p%ss, or so";
        let (_, text) = refused_with(&words).await;
        assert!(text.contains("n***"), "{text}");
        assert!(!text.contains("cana"), "{text}");
    }
}

async fn durability_is_what_the_server_has() {
    for (fsync, promised) in [
        ("on", FencingDurability::Durable),
        ("off", FencingDurability::Process),
    ] {
        let server = private(&[("fsync", fsync)]);
        assert_eq!(client(server.addr()).await.capabilities().fencing, promised);
    }
}

/// What the client promises is what the server had when it connected.
async fn durability_that_is_lost_is_warned_about_once() {
    let server = private(&[("fsync", "on")]);
    let traces = Traces::default();
    let warned = || {
        let text = traces.text();
        let warnings = text.lines().filter(|line| line.contains("fsync is off"));
        warnings.count()
    };
    let taking = async {
        let client = client(server.addr()).await;
        cycle(&client, "a").await;
        assert_eq!(warned(), 0);
        for _ in 0..2 {
            server.configure("fsync", "off").unwrap();
            server.restart().unwrap();
            cycle(&client, "a").await;
            assert_eq!(warned(), 1);
        }
    };
    taking.with_subscriber(traces.clone()).await;
}

async fn a_refused_role_is_no_transient_error() {
    let addr = shared().addr();
    for url in [
        format!("postgres://lockkit:wrong-canary@{addr}/lockkit"),
        format!("postgres://nobody:wrong-canary@{addr}/lockkit"),
        format!("postgres://lockkit:{}@{addr}/elsewhere", PgServer::PASSWORD),
        format!("postgres://lockkit@{addr}/lockkit"),
    ] {
        let error = connect(PostgresConfig::new(url)).await.unwrap_err();
        assert!(!error.is_transient(), "{}", chain(&error));
        let shown = format!("{} {error:?} {error:#?}", chain(&error));
        assert!(
            !shown.contains("canary") && !shown.contains(PgServer::PASSWORD),
            "{shown}"
        );
    }
}

/// No more connections, and no more room for locks.
async fn a_full_server_is_no_taken_lock() {
    let server = private(&[("max_connections", "12"), ("max_locks_per_transaction", "10")]);
    let client = client(server.addr()).await;
    let taken = client.lock("a").unwrap().acquire().await.unwrap();
    let mut others = Vec::new();
    let full = loop {
        match server.session() {
            Ok(session) if others.len() < 20 => others.push(session),
            Ok(_) => panic!("it has room for too many"),
            Err(error) => break error,
        }
    };
    assert!(full.to_string().starts_with("53300"), "{full}");
    let error = client.lock("b").unwrap().try_acquire().await.unwrap_err();
    assert!(
        error.is_transient() && chain(&error).contains("too many clients"),
        "{}",
        chain(&error)
    );
    others.truncate(3);
    // One session takes all there is.
    let mut greedy = others.pop().unwrap();
    let all = greedy
        .sql("SELECT count(pg_advisory_lock(g)) FROM generate_series(1, 100000) g")
        .unwrap_err();
    assert!(all.to_string().starts_with("53200"), "{all}");
    let error = loop {
        match client.lock("c").unwrap().try_acquire().await {
            Ok(None) => panic!("a full table is no taken lock"),
            // The session had the room from before.
            Ok(Some(guard)) => drop(guard),
            Err(error) => break error,
        }
        greedy
            .sql("SELECT count(pg_advisory_lock(g)) FROM generate_series(100000, 200000) g")
            .unwrap_err();
    };
    assert!(error.is_transient(), "{}", chain(&error));
    drop((greedy, others));
    eventually("there is room again", async || {
        client.lock("c").unwrap().try_acquire().await.is_ok()
    })
    .await;
    taken.check().unwrap();
}

async fn the_limit_of_connections_is_a_clear_error() {
    let mut config = config(shared().addr());
    config.max_connections = 2;
    let client = connect(config).await.unwrap();
    let name = name("limit");
    let lock = |of: &str| client.lock(format!("{name}/{of}")).unwrap();
    let (a, b) = (
        lock("a").acquire().await.unwrap(),
        lock("b").acquire().await.unwrap(),
    );
    for answer in [
        lock("c").try_acquire().await.map(drop),
        lock("c").acquire_timeout(Duration::from_secs(5)).await.map(drop),
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
}

/// Time-outs that an operator has set for a role's queries end neither a wait nor a hold.
async fn settings_of_the_role_do_not_count() {
    let (mut admin, config) = database("GRANT CREATE ON DATABASE HERE TO HERE");
    let role = admin.sql("SELECT current_database()").unwrap();
    for setting in [
        "statement_timeout=300",
        "lock_timeout=300",
        "idle_session_timeout=300",
        "synchronous_commit=off",
        "default_transaction_isolation='serializable'",
        "search_path='elsewhere'",
        "extra_float_digits=0",
        "bytea_output='escape'",
        "TimeZone='Asia/Kathmandu'",
        "idle_in_transaction_session_timeout=300",
        "default_transaction_deferrable=on",
        "standard_conforming_strings=off",
        "DateStyle='German'",
        "IntervalStyle='sql_standard'",
        "client_encoding='LATIN1'",
        "row_security=off",
        "plan_cache_mode='force_generic_plan'",
    ] {
        admin.sql(&format!("ALTER ROLE {role} SET {setting}")).unwrap();
    }
    let (client, other) = (
        connect(config.clone()).await.unwrap(),
        connect(config).await.unwrap(),
    );
    let guard = client.lock("a").unwrap().acquire().await.unwrap();
    let waiter = Waiter::of(other.lock("a").unwrap());
    waits(&client, "a").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!waiter.is_finished());
    let wait = "SELECT count(*) FROM pg_locks WHERE locktype='advisory' AND NOT granted AND waitstart < clock_timestamp() - interval '0.9 s'";
    assert_eq!(
        admin
            .sql(&format!(
                "{wait} AND database=(SELECT oid FROM pg_database WHERE datname=current_database())"
            ))
            .unwrap(),
        "1",
        "it waits anew"
    );
    guard.release().await.unwrap();
    waiter.granted().await.0.release().await.unwrap();
}

/// A role that finds functions, operators and views of the server's names before the server's own.
async fn a_search_path_decides_nothing() {
    let (mut admin, config) = database("GRANT CREATE ON DATABASE HERE TO HERE");
    let plain = connect(config).await.unwrap();
    cycle(&plain, "a").await;
    let role = admin.sql("SELECT current_database()").unwrap();
    for statement in [
        "CREATE SCHEMA theirs",
        "GRANT USAGE ON SCHEMA theirs TO PUBLIC",
        "CREATE FUNCTION theirs.pg_try_advisory_lock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true'",
        "CREATE FUNCTION theirs.pg_advisory_lock(bigint) RETURNS text LANGUAGE sql AS $$SELECT 'locked'$$",
        "CREATE FUNCTION theirs.pg_advisory_unlock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true'",
        "CREATE FUNCTION theirs.nextval(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 7::bigint'",
        "CREATE FUNCTION theirs.never(bigint, bigint) RETURNS bool LANGUAGE sql AS 'SELECT false'",
        "CREATE OPERATOR theirs.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = theirs.never)",
        "CREATE VIEW theirs.pg_locks AS SELECT * FROM pg_catalog.pg_locks WHERE false",
        &format!("CREATE ROLE {role}_b LOGIN PASSWORD 'pw' IN ROLE {role}"),
        &format!("ALTER ROLE {role}_b SET search_path = theirs, pg_catalog"),
    ] {
        admin
            .sql(statement)
            .unwrap_or_else(|error| panic!("{statement}: {error}"));
    }
    let url = format!("postgres://{role}_b:pw@{}/{role}", shared().addr());
    let other = connect(PostgresConfig::new(url)).await.unwrap();
    let guard = plain.lock("a").unwrap().acquire().await.unwrap();
    let token = guard.token();
    let lock = other.lock("a").unwrap();
    assert!(lock.try_acquire().await.unwrap().is_none(), "both hold");
    let seen = other.inspect("a").await.unwrap();
    assert_eq!(seen.holders[0].token, token);
    let waiter = Waiter::of(lock);
    waits(&plain, "a").await;
    guard.release().await.unwrap();
    let granted = waiter.granted().await.0;
    assert!(granted.token() > token, "a sequence of its own");
    assert!(plain.lock("a").unwrap().try_acquire().await.unwrap().is_none());
    granted.release().await.unwrap();
    cycle(&plain, "a").await;
}

async fn a_unix_socket_is_a_way_to_the_server() {
    let server = shared();
    let name = name("socket");
    let guard = client(server.addr())
        .await
        .lock(&name)
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let mut by_option = config(server.addr());
    by_option.socket = Some(server.directory().to_owned());
    for config in [PostgresConfig::new(server.socket_url()), by_option] {
        let client = connect(config).await.unwrap();
        assert!(client.lock(&name).unwrap().try_acquire().await.unwrap().is_none());
        cycle(&client, &format!("{name}/other")).await;
    }
    guard.release().await.unwrap();
    let missing = PostgresConfig::new("postgres://lockkit@%2Fnowhere/lockkit");
    let error = connect(missing).await.unwrap_err();
    assert!(
        error.is_transient() && chain(&error).contains(&io::Error::from_raw_os_error(2).to_string()),
        "{}",
        chain(&error)
    );
}

async fn locks_of_two_databases_do_not_exclude() {
    let (_admin, config) = database("GRANT CREATE ON DATABASE HERE TO HERE");
    let (here, there) = (client(shared().addr()).await, connect(config).await.unwrap());
    let name = name("databases");
    let (a, b) = (here.lock(&name).unwrap(), there.lock(&name).unwrap());
    assert_ne!(a.id(), b.id());
    let (a, b) = (a.acquire().await.unwrap(), b.try_acquire().await.unwrap());
    assert!(a.is_held() && b.is_some());
    assert_eq!(here.inspect(&name).await.unwrap().holders.len(), 1);
}

async fn too_many_permits_are_refused() {
    let client = client(shared().addr()).await;
    let most = client.semaphore(name("most"), 1_000).unwrap();
    most.acquire().await.unwrap().release().await.unwrap();
    let more = client.semaphore(name("more"), 1_001).unwrap();
    assert!(matches!(
        more.try_acquire().await,
        Err(Error::InvalidOptions {
            option: "permits",
            ..
        })
    ));
}

/// The holder's own lease would be over before it is proven.
async fn a_ttl_too_short_to_be_kept_is_refused() {
    const LEAST: Duration = Duration::from_millis(50);
    let client = client(shared().addr()).await;
    let lock = client.lock(name("short")).unwrap();
    let refused = |error: &Error| matches!(error, Error::InvalidOptions { option: "ttl", .. });
    let guard = lock.acquire().await.unwrap();
    for ttl in [10, 20, 49].map(Duration::from_millis) {
        let options = AcquireOptions::new().ttl(ttl).wait(Duration::from_secs(5));
        let other = client.lock(name("shorter")).unwrap().with_options(options);
        for answer in [
            other.acquire().await.map(drop),
            other.try_acquire().await.map(drop),
            guard.set_ttl(ttl).await,
        ] {
            assert!(answer.as_ref().is_err_and(refused), "{ttl:?}: {answer:?}");
        }
    }
    guard.renew().await.unwrap();
    guard.release().await.unwrap();

    let backend = PostgresBackend::connect(config(shared().addr())).await.unwrap();
    let mut request = request(&name("least"), spi::Mode::Exclusive);
    request.ttl = LEAST;
    let mut claim = backend.claim(&request).await.unwrap();
    assert!(claim.attempt(Duration::ZERO).await.unwrap().is_some());
    let length = claim.set_ttl(LEAST).unwrap().unwrap();
    assert!(length > LEAST / 2, "{length:?}");
    claim.release().await.unwrap();
}

/// What goes to an address of this machine's own stays on it, too, but that is not known.
#[tokio::test]
async fn a_password_beyond_this_host_is_warned_about_once() {
    for (at, expected) in [(Some(Ipv4Addr::LOCALHOST.into()), 0), (own_address(), 1)] {
        let Some(at) = at else { continue };
        let addr = hangs_up(at).unwrap();
        let traces = Traces::default();
        let _recording = tracing::subscriber::set_default(traces.clone());
        for sslmode in [SslMode::Disable, SslMode::Prefer] {
            let mut config = PostgresConfig::new(format!("postgres://app:canary@{addr}/app"));
            config.sslmode = sslmode;
            connect(config).await.unwrap_err();
        }
        // One client each.
        let expected = 2 * expected;
        let text = traces.text();
        assert_eq!(
            text.matches("is not encrypted").count(),
            expected,
            "{addr}: {text}"
        );
        assert!(!text.contains("canary"), "{text}");
    }
}
