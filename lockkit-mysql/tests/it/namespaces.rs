//! Two accounts that have the documented rights, each on what it needs: in one database, and with a database each.

use lockkit_core::{FencingToken, LockClient, spi::chain};
use lockkit_mysql::{Mode, MySqlConfig, Schema, ddl, sqlx};
use lockkit_testbed::{
    eventually,
    mysql::{Flavour, MySql},
};

use crate::servers::{Admin, Waiter, connect, cycle, for_each_flavour, listed, name, private, row, shared};

for_each_flavour! {
    what_accounts_may_do_to_each_other_is_documented
    force_ends_no_session_of_another_database
}

const OURS: &str = "ours";
const THEIRS: &str = "theirs";
const PASSWORD: &str = "open-sesame";
const DOCS: &str = include_str!("../../../docs/mysql.md");

/// The outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Allowed,
    Refused,
}

use Outcome::{Allowed, Refused};

/// An attempt of an account on what is another's: in a database that is common to both, and in one of the other's alone.
struct Attempt {
    /// As the documentation has it.
    what: &'static str,
    in_common: Outcome,
    apart: Outcome,
    /// `DB` stands for the database of the others, `SESSION` for the session of their holder.
    sql: &'static [&'static str],
}

const fn attempt(
    what: &'static str,
    in_common: Outcome,
    apart: Outcome,
    sql: &'static [&'static str],
) -> Attempt {
    Attempt {
        what,
        in_common,
        apart,
        sql,
    }
}

/// Attempts on row locks.
const ON_ROWS: &[Attempt] = &[
    attempt(
        "read who holds, and which names there are",
        Allowed,
        Refused,
        &[
            "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; SELECT name, token, label FROM DB.lockkit_holder",
            "SELECT name FROM DB.lockkit_gate",
            "SELECT * FROM DB.lockkit_map",
        ],
    ),
    attempt(
        "take a free lock or permit by its row, also without a token, and keep it",
        Allowed,
        Refused,
        &[
            "START TRANSACTION; SELECT name FROM DB.lockkit_gate WHERE name='theirs:free' FOR UPDATE; ROLLBACK",
            "START TRANSACTION; SELECT slot FROM DB.lockkit_permit WHERE name='theirs#free' FOR UPDATE; ROLLBACK",
        ],
    ),
    attempt(
        "queue for a lock that is held",
        Allowed,
        Refused,
        &[
            "SET innodb_lock_wait_timeout=1; SELECT name FROM DB.lockkit_gate WHERE name='theirs:a' FOR UPDATE",
        ],
    ),
    attempt(
        "delete a row, so that two hold the lock",
        Allowed,
        Refused,
        &[
            "DELETE FROM DB.lockkit_gate WHERE name='theirs:free'",
            "DELETE FROM DB.lockkit_permit WHERE name='theirs#free'",
        ],
    ),
    attempt(
        "change how many permits there are",
        Allowed,
        Refused,
        &["INSERT INTO DB.lockkit_permit VALUES ('theirs#free', 7, 8)"],
    ),
    attempt(
        "set tokens back or ahead, and end a life of the server",
        Allowed,
        Refused,
        &[
            "UPDATE DB.lockkit_fence SET reserved=1 WHERE name='theirs:free'",
            "DELETE FROM DB.lockkit_fence WHERE name='theirs:free'",
            "UPDATE DB.lockkit_fence SET reserved=reserved+1 WHERE name=x''",
            "INSERT INTO DB.lockkit_fence VALUES ('%fence', 7) ON DUPLICATE KEY UPDATE reserved=reserved+1",
            "UPDATE DB.lockkit_map SET base=1, last=1 WHERE name='theirs:free'",
        ],
    ),
    attempt(
        "show a hold that is none",
        Allowed,
        Refused,
        &["INSERT INTO DB.lockkit_holder VALUES ('theirs:none', 1, 2, 3, 'x', NULL)"],
    ),
    attempt(
        "empty, change, lock or drop a table",
        Refused,
        Refused,
        &[
            "TRUNCATE TABLE DB.lockkit_gate",
            "DROP TABLE DB.lockkit_gate",
            "ALTER TABLE DB.lockkit_gate ADD COLUMN x INT",
            "CREATE TABLE DB.lockkit_more (x INT)",
            "CREATE TRIGGER DB.t BEFORE INSERT ON DB.lockkit_gate FOR EACH ROW SET @x=1",
            "LOCK TABLES DB.lockkit_gate WRITE",
        ],
    ),
];

/// Attempts on leases.
const ON_LEASES: &[Attempt] = &[
    attempt(
        "read who holds, and which names there are",
        Allowed,
        Refused,
        &["SELECT name, token, label FROM DB.lockkit_lease"],
    ),
    attempt(
        "take a lock, free or held, and keep it",
        Allowed,
        Refused,
        &[
            "UPDATE DB.lockkit_lease SET owner=x'01', expires=9000000000000000000 WHERE name='theirs:free'",
            "SET innodb_lock_wait_timeout=1; SELECT name FROM DB.lockkit_lease WHERE name='theirs:free' FOR UPDATE",
        ],
    ),
    attempt(
        "end a hold, or ask for it",
        Allowed,
        Refused,
        &[
            "UPDATE DB.lockkit_lease SET expires=0 WHERE name='theirs:free'",
            "UPDATE DB.lockkit_lease SET asked=token WHERE name='theirs:free'",
            "DELETE FROM DB.lockkit_lease WHERE name='theirs:free'",
        ],
    ),
    attempt(
        "set tokens back or ahead",
        Allowed,
        Refused,
        &[
            "UPDATE DB.lockkit_lease SET latest=1, token=1 WHERE name='theirs:more'",
            "UPDATE DB.lockkit_lease SET latest=latest+1 WHERE name='%fence'",
        ],
    ),
    attempt(
        "show a hold that is none",
        Allowed,
        Refused,
        &[
            "INSERT INTO DB.lockkit_lease VALUES ('theirs:none', x'01', 9000000000000000000, 2, 2, 0, 'x', NULL)",
        ],
    ),
    attempt(
        "read or change the secret of which the names of the waiters' server locks are made",
        Allowed,
        Refused,
        &[
            "SELECT owner FROM DB.lockkit_lease WHERE name=x''",
            "UPDATE DB.lockkit_lease SET owner=owner WHERE name=x''",
        ],
    ),
    attempt(
        "empty, change, lock or drop the table",
        Refused,
        Refused,
        &[
            "TRUNCATE TABLE DB.lockkit_lease",
            "DROP TABLE DB.lockkit_lease",
            "ALTER TABLE DB.lockkit_lease ADD COLUMN x INT",
            "CREATE TABLE DB.lockkit_more (x INT)",
            "CREATE TRIGGER DB.t BEFORE INSERT ON DB.lockkit_lease FOR EACH ROW SET @x=1",
            "LOCK TABLES DB.lockkit_lease WRITE",
        ],
    ),
];

/// Attempts on the server, in either mode.
const ON_SERVER: &[Attempt] = &[
    attempt(
        "end or interrupt a session",
        Refused,
        Refused,
        &["KILL SESSION", "KILL QUERY SESSION"],
    ),
    attempt(
        "make the server read-only, stop it, lock all tables, or give itself rights",
        Refused,
        Refused,
        &[
            "SET GLOBAL read_only=ON",
            "SET GLOBAL innodb_lock_wait_timeout=1",
            "SHUTDOWN",
            "FLUSH TABLES WITH READ LOCK",
            "GRANT ALL ON DB.* TO 'ours'@'%'",
            "DROP USER 'theirs'@'%'",
        ],
    ),
    attempt(
        "take a lock of the server itself (`GET_LOCK`) whose name it knows",
        Allowed,
        Allowed,
        &["SELECT GET_LOCK('lockkit-anything', 0)"],
    ),
];

/// The rows of the documentation for these attempts.
fn documented(attempts: &[Attempt]) -> impl Iterator<Item = String> {
    let word = |outcome| match outcome {
        Allowed => "yes",
        Refused => "no",
    };
    attempts
        .iter()
        .map(move |it| format!("| {} | {} | {} |", it.what, word(it.in_common), word(it.apart)))
}

/// The statement that the documentation grants rights with, for this account on this table.
fn grant(database: &str, table: &str, user: &str) -> String {
    let documented = "GRANT SELECT, INSERT, UPDATE, DELETE ON app.lockkit_gate TO 'locker'@'%';";
    assert!(DOCS.contains(documented), "the documented rights");
    documented
        .replace("app.lockkit_gate", &format!("{database}.{table}"))
        .replace("locker", user)
}

fn tables(mode: Mode) -> &'static [&'static str] {
    match mode {
        Mode::Lease => &["lockkit_lease"],
        _ => &[
            "lockkit_gate",
            "lockkit_fence",
            "lockkit_map",
            "lockkit_permit",
            "lockkit_holder",
        ],
    }
}

/// Makes a database with lockkit's tables, and gives these accounts the documented rights on them.
async fn make(admin: &mut Admin, mode: Mode, database: &str, users: &[&str]) {
    admin
        .run(&format!(
            "CREATE DATABASE {database}; USE {database}; {}",
            ddl(mode)
        ))
        .await;
    for user in users {
        for table in tables(mode) {
            admin.run(&grant(database, table, user)).await;
        }
    }
}

async fn client(
    server: &MySql,
    mode: Mode,
    user: &str,
    database: &str,
    namespace: &str,
) -> lockkit_core::Result<LockClient> {
    let mut config = MySqlConfig::new(format!("mysql://{user}:{PASSWORD}@{}/{database}", server.addr()));
    config.mode = mode;
    config.schema = Schema::Manual;
    config.namespace = namespace.into();
    connect(config).await
}

/// Returns whether the server has refused this attempt for want of rights.
async fn outcome(server: &MySql, sql: &str) -> Result<Outcome, String> {
    let mut connection = Admin::stranger(server.addr(), OURS, PASSWORD)
        .await
        .map_err(|error| format!("no connection: {error}"))?;
    let outcome = connection.try_run(sql).await;
    connection.close().await;
    let Err(error) = outcome else { return Ok(Allowed) };
    let number = error
        .as_database_error()
        .and_then(<dyn sqlx::error::DatabaseError>::try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>)
        .map(sqlx::mysql::MySqlDatabaseError::number);
    match number {
        // A database, a table, a privilege of the server, the owner of a session, and a trigger of one who has not `SUPER`.
        Some(1044 | 1142 | 1227 | 1095 | 1419) => Ok(Refused),
        // It has waited for the lock.
        Some(1205) => Ok(Allowed),
        _ => Err(format!("{sql}: {error}")),
    }
}

/// Returns the attempts whose outcome is another than the documentation says.
async fn faults(server: &MySql, attempts: &[&[Attempt]], database: &str, session: &str) -> Vec<String> {
    let is_apart = database == THEIRS;
    let mut faults = Vec::new();
    for attempt in attempts.iter().copied().flatten() {
        let expected = if is_apart {
            attempt.apart
        } else {
            attempt.in_common
        };
        for sql in attempt.sql {
            let sql = sql.replace("DB", database).replace("SESSION", session);
            match outcome(server, &sql).await {
                Ok(outcome) if outcome == expected => {}
                outcome => faults.push(format!(
                    "{} in {database}: {sql}: expected {expected:?}, got {outcome:?}",
                    attempt.what
                )),
            }
        }
    }
    faults
}

/// All that is in their tables, but for how long leases last.
async fn contents(admin: &mut Admin, mode: Mode) -> Vec<Vec<Vec<String>>> {
    let mut contents = Vec::new();
    for table in tables(mode) {
        let columns = match mode {
            Mode::Lease => "name, HEX(owner), token, latest, asked, label",
            _ => "*",
        };
        let sql = format!("SELECT {columns} FROM {THEIRS}.{table} ORDER BY name");
        contents.push(admin.run(&sql).await);
    }
    contents
}

async fn what_accounts_may_do_to_each_other_is_documented(flavour: Flavour) {
    for rows in [ON_ROWS, ON_LEASES, ON_SERVER] {
        for row in documented(rows) {
            assert!(DOCS.contains(&row), "docs/mysql.md lacks {row}");
        }
    }
    for mode in crate::servers::MODES {
        Box::pin(two_accounts(flavour, mode)).await;
    }
}

async fn two_accounts(flavour: Flavour, mode: Mode) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    for user in [OURS, THEIRS] {
        admin
            .run(&format!("CREATE USER '{user}'@'%' IDENTIFIED BY '{PASSWORD}'"))
            .await;
    }
    make(&mut admin, mode, OURS, &[OURS]).await;
    make(&mut admin, mode, THEIRS, &[THEIRS]).await;
    make(&mut admin, mode, "common", &[OURS, THEIRS]).await;
    let attempts = match mode {
        Mode::Lease => [ON_LEASES, ON_SERVER],
        _ => [ON_ROWS, ON_SERVER],
    };

    for database in [THEIRS, "common"] {
        let theirs = async || client(&server, mode, THEIRS, database, THEIRS).await.unwrap();
        let (one, two) = (theirs().await, theirs().await);
        for free in ["free", "more"] {
            let guard = one.lock(free).unwrap().acquire().await.unwrap();
            guard.release().await.unwrap();
        }
        let fence = one.fence().await.unwrap();
        one.raise_fence(FencingToken::new(fence.get() + 1_000))
            .await
            .unwrap();
        let held = one.lock("a").unwrap().acquire().await.unwrap();
        let waiting = Waiter::of(two.lock("a").unwrap());
        let permit = match mode {
            Mode::Lease => None,
            _ => {
                let free = one.semaphore("free", 2).unwrap().acquire().await.unwrap();
                free.release().await.unwrap();
                Some(one.semaphore("s", 1).unwrap().acquire().await.unwrap())
            }
        };
        if mode == Mode::Lease {
            // A row lock's waiter is counted by who may see its session.
            eventually("it waits", async || !waiting.is_finished()).await;
        }
        // Those of the round before, in another database, are at their end.
        let sessions = admin
            .run(&format!(
                "SELECT ID FROM information_schema.PROCESSLIST WHERE USER='{THEIRS}' AND DB='{database}' ORDER BY ID LIMIT 1"
            ))
            .await;
        let session = &sessions[0][0];

        if database == THEIRS {
            let before = contents(&mut admin, mode).await;
            let faults = faults(&server, &attempts, database, session).await;
            assert!(faults.is_empty(), "{flavour:?}, {mode:?}\n{}", faults.join("\n"));
            assert_eq!(contents(&mut admin, mode).await, before, "nothing has changed");
            // Nor by lockkit itself, neither there nor under their name in its own.
            let refused = client(&server, mode, OURS, THEIRS, THEIRS).await.unwrap_err();
            assert!(chain(&refused).contains("1044"), "{}", chain(&refused));
            let ours = client(&server, mode, OURS, OURS, THEIRS).await.unwrap();
            let own = ours.lock("a").unwrap().try_acquire().await.unwrap();
            let own = own.expect("another lock");
            assert_eq!(listed(&ours).await.unwrap().len(), 1, "its own");
            assert!(!ours.revoke_by_force("a", held.token()).await.unwrap());
            let raised = FencingToken::new(held.token().get() + 1_000_000_000_000);
            ours.raise_fence(raised).await.unwrap();
            assert!(one.fence().await.unwrap() < raised, "a fence each");
            own.release().await.unwrap();
        } else {
            let ours = client(&server, mode, OURS, database, THEIRS).await.unwrap();
            assert!(ours.lock("a").unwrap().try_acquire().await.unwrap().is_none());
            assert!(!listed(&ours).await.unwrap().is_empty(), "what they hold");
            let forced = ours.revoke_by_force("a", FencingToken::new(1)).await.unwrap();
            assert!(!forced, "nobody has that token");
            let faults = faults(&server, &attempts, database, session).await;
            assert!(faults.is_empty(), "{flavour:?}, {mode:?}\n{}", faults.join("\n"));
        }
        assert!(held.is_held());
        held.release().await.unwrap();
        waiting.granted().await.0.release().await.unwrap();
        if let Some(permit) = permit {
            permit.release().await.unwrap();
        }
    }

    // The judge finds rights that are wider.
    admin
        .run(&format!("GRANT SELECT ON {THEIRS}.* TO '{OURS}'@'%'"))
        .await;
    let faults = faults(&server, &attempts, THEIRS, "0").await;
    assert!(
        faults.iter().any(|fault| fault.starts_with("read who holds")),
        "{faults:?}"
    );
    admin.close().await;
}

/// Who may write the table shows a hold of a session that is none, for an operator with more rights to end it.
async fn force_ends_no_session_of_another_database(flavour: Flavour) {
    let server = shared(flavour);
    let url = format!("mysql://root@{}/{}", server.addr(), MySql::DATABASE);
    let operator = connect(MySqlConfig::new(url)).await.unwrap();
    let name = name("force");
    cycle(&operator, &name).await;
    let mut forger = Admin::of(server).await;
    for uses in ["DO 0", "USE mysql"] {
        let mut other = Admin::stranger(server.addr(), "root", "").await.unwrap();
        other.run(uses).await;
        let id = other.value("SELECT CONNECTION_ID()").await;
        let show = "INSERT INTO lockkit_holder (name, connection, token, seconds)";
        forger
            .run(&format!("{show} VALUES ({}, {id}, 7, 3600)", row(&name)))
            .await;
        let state = operator.inspect(&name).await.unwrap();
        assert_eq!(state.holders.len(), 1, "{state:?}");
        let token = FencingToken::new(7);
        assert!(!operator.revoke_by_force(&name, token).await.unwrap(), "{uses}");
        other.try_run("DO 0").await.expect("it goes on");
        forger
            .run(&format!("DELETE FROM lockkit_holder WHERE name={}", row(&name)))
            .await;
    }
}
