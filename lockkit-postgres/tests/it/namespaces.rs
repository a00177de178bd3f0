//! Two roles that have the documented rights, each on what it needs: in one database, and with a database each.

use lockkit_core::{FencingToken, LockClient, spi::chain};
use lockkit_postgres::{PostgresConfig, Schema, ddl};
use lockkit_testbed::postgres::PgServer;

use crate::servers::{Waiter, connect, listed, tests, waits};

tests! {
    what_roles_may_do_to_each_other_is_documented
}

const OURS: &str = "ours";
const THEIRS: &str = "theirs";
const COMMON: &str = "common";
const PASSWORD: &str = "open-sesame";
const DOCS: &str = include_str!("../../../docs/postgres.md");

/// The outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Allowed,
    Refused,
}

use Outcome::{Allowed, Refused};

/// An attempt of a role on what is another's: in a database that is common to both, and in one of the other's alone.
struct Attempt {
    /// As the documentation has it.
    what: &'static str,
    in_common: Outcome,
    apart: Outcome,
    /// The role may connect to any database of its own for it.
    is_from_own: bool,
    /// `KEY(…)` stands for the key of that text, `SESSION` for the process of their holder.
    sql: &'static [&'static str],
}

const fn there(what: &'static str, in_common: Outcome, sql: &'static [&'static str]) -> Attempt {
    Attempt {
        what,
        in_common,
        apart: Refused,
        is_from_own: false,
        sql,
    }
}

const fn anywhere(what: &'static str, outcome: Outcome, sql: &'static [&'static str]) -> Attempt {
    Attempt {
        what,
        in_common: outcome,
        apart: outcome,
        is_from_own: true,
        sql,
    }
}

const ATTEMPTS: &[Attempt] = &[
    there(
        "read who holds, with its name and label",
        Allowed,
        &[
            "SELECT name, label, token FROM lockkit.holder",
            "SELECT * FROM lockkit.semaphore",
        ],
    ),
    there(
        "take a free lock or permit, without a token, and keep it",
        Allowed,
        &[
            "SELECT pg_try_advisory_lock(KEY(theirs:free))",
            "SELECT pg_try_advisory_lock(KEY(theirs/0#free))",
        ],
    ),
    there(
        "queue for a lock that is held, or for a permit",
        Allowed,
        &[
            "SET lock_timeout = 50; SELECT pg_advisory_lock(KEY(theirs:a))",
            "SELECT pg_advisory_lock(KEY(theirs#free))",
        ],
    ),
    there(
        "keep clients from beginning an epoch, and from locking after a start or a crash",
        Allowed,
        &["SELECT pg_advisory_xact_lock(1819242347, 1)"],
    ),
    there(
        "hide a hold, or show one that is none",
        Allowed,
        &[
            "DELETE FROM lockkit.holder WHERE pid = SESSION",
            "INSERT INTO lockkit.holder VALUES (1, 2, 3, 4, 5, 'theirs', 'x', false, 'x', now())",
        ],
    ),
    there(
        "change how many permits there are",
        Allowed,
        &[
            "UPDATE lockkit.semaphore SET permits = 100",
            "DELETE FROM lockkit.semaphore",
        ],
    ),
    there(
        "set tokens back or ahead",
        Allowed,
        &[
            "SELECT setval('lockkit.token', nextval('lockkit.token'))",
            "DELETE FROM lockkit.epoch",
        ],
    ),
    there(
        "lock a table",
        Allowed,
        &["BEGIN; LOCK TABLE lockkit.holder IN ACCESS EXCLUSIVE MODE; COMMIT"],
    ),
    there(
        "empty, change or drop a table or the sequence",
        Refused,
        &[
            "TRUNCATE lockkit.holder",
            "DROP TABLE lockkit.holder",
            "ALTER TABLE lockkit.holder ADD COLUMN x int",
            "ALTER SEQUENCE lockkit.token INCREMENT BY 1",
            "CREATE TABLE lockkit.more (x int)",
            "CREATE TRIGGER t BEFORE INSERT ON lockkit.holder FOR EACH ROW \
             EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        ],
    ),
    anywhere(
        "end or interrupt a session",
        Refused,
        &[
            "SELECT pg_terminate_backend(SESSION)",
            "SELECT pg_cancel_backend(SESSION)",
        ],
    ),
    anywhere(
        "change a setting of the server, a role or a database, or give itself rights",
        Refused,
        &[
            "ALTER SYSTEM SET idle_session_timeout = 1",
            "SELECT pg_reload_conf()",
            "ALTER ROLE theirs SET idle_session_timeout = 1",
            "ALTER ROLE theirs PASSWORD 'x'",
            "ALTER DATABASE theirs SET default_transaction_read_only = on",
            "DROP DATABASE theirs",
            "SET ROLE theirs",
        ],
    ),
    anywhere(
        "see the keys of advisory locks in `pg_locks`, and with them whether a name is held that it knows",
        Allowed,
        &["SELECT classid, objid, granted FROM pg_locks WHERE locktype = 'advisory'"],
    ),
];

/// The row of the documentation for this attempt.
fn documented(attempt: &Attempt) -> String {
    let word = |outcome| match outcome {
        Allowed => "yes",
        Refused => "no",
    };
    format!(
        "| {} | {} | {} |",
        attempt.what,
        word(attempt.in_common),
        word(attempt.apart)
    )
}

/// The statements of the documentation that begin so, for another role or database.
fn rights(begin: &str, change: (&str, &str), user: &str) -> String {
    let found = DOCS
        .lines()
        .filter(|line| line.starts_with(begin) && !line.ends_with("TO observer;"));
    let found: Vec<_> = found
        .map(|line| {
            line.replace(change.0, change.1)
                .replace("TO locker", &format!("TO {user}"))
        })
        .collect();
    assert!(!found.is_empty(), "the documented rights: {begin}");
    found.join("\n")
}

fn make(server: &PgServer, database: &str, users: &[&str]) {
    server.sql(&format!("CREATE DATABASE {database}")).unwrap();
    let on_database = ("DATABASE locks", format!("DATABASE {database}"));
    server
        .sql(&rights(
            "REVOKE CONNECT",
            (on_database.0, &on_database.1),
            "nobody",
        ))
        .unwrap();
    let mut inside = server.session_in(database).unwrap();
    inside.sql(ddl()).unwrap();
    for user in users {
        inside
            .sql(&rights("GRANT CONNECT", (on_database.0, &on_database.1), user))
            .unwrap();
        for begin in ["GRANT USAGE", "GRANT SELECT"] {
            inside.sql(&rights(begin, ("", ""), user)).unwrap();
        }
    }
}

async fn client(server: &PgServer, user: &str, database: &str) -> lockkit_core::Result<LockClient> {
    let mut config = PostgresConfig::new(format!(
        "postgres://{user}:{PASSWORD}@{}/{database}",
        server.addr()
    ));
    config.schema = Schema::Manual;
    config.namespace = THEIRS.into();
    connect(config).await
}

/// Returns whether the server has refused this attempt for want of rights.
fn outcome(server: &PgServer, database: &str, sql: &str) -> Result<Outcome, String> {
    let tried = server
        .session_as(OURS, database)
        .and_then(|mut session| session.sql(sql));
    match tried {
        Ok(_) => Ok(Allowed),
        Err(error) => match error.to_string() {
            refused if refused.starts_with("42501") => Ok(Refused),
            // It has waited for the lock.
            waited if waited.starts_with("55P03") => Ok(Allowed),
            other => Err(format!("{sql}: {other}")),
        },
    }
}

/// Returns the attempts whose outcome is another than the documentation says.
fn faults(server: &PgServer, database: &str, session: &str) -> Vec<String> {
    let is_apart = database == THEIRS;
    let mut faults = Vec::new();
    for attempt in ATTEMPTS {
        let (expected, from) = match (is_apart, attempt.is_from_own) {
            (true, true) => (attempt.apart, OURS),
            (true, false) => (attempt.apart, database),
            (false, _) => (attempt.in_common, database),
        };
        for sql in attempt.sql {
            let mut sql = sql.replace("SESSION", session);
            while let Some((before, rest)) = sql.split_once("KEY(") {
                let (text, after) = rest.split_once(')').unwrap();
                let digest = format!("sha256(convert_to('{text}', 'UTF8'))");
                sql = format!("{before}('x' || left(encode({digest}, 'hex'), 16))::bit(64)::bigint{after}");
            }
            match outcome(server, from, &sql) {
                Ok(outcome) if outcome == expected => {}
                outcome => faults.push(format!(
                    "{} in {from}: {sql}: expected {expected:?}, got {outcome:?}",
                    attempt.what
                )),
            }
        }
    }
    faults
}

async fn what_roles_may_do_to_each_other_is_documented() {
    for attempt in ATTEMPTS {
        let row = documented(attempt);
        assert!(DOCS.contains(&row), "docs/postgres.md lacks {row}");
    }
    let server = PgServer::builder()
        .access("local all ours trust")
        .start()
        .unwrap();
    for user in [OURS, THEIRS] {
        server
            .sql(&format!("CREATE ROLE {user} LOGIN PASSWORD '{PASSWORD}'"))
            .unwrap();
    }
    make(&server, OURS, &[OURS]);
    make(&server, THEIRS, &[THEIRS]);
    make(&server, COMMON, &[OURS, THEIRS]);

    for database in [THEIRS, COMMON] {
        let theirs = async || client(&server, THEIRS, database).await.unwrap();
        let (one, two) = (theirs().await, theirs().await);
        let fence = one.fence().await.unwrap();
        one.raise_fence(FencingToken::new(fence.get() + 1_000))
            .await
            .unwrap();
        let held = one.lock("a").unwrap().acquire().await.unwrap();
        let waiting = Waiter::of(two.lock("a").unwrap());
        let shared = one.lock("shared").unwrap().shared().acquire().await.unwrap();
        let permit = one.semaphore("s", 1).unwrap().acquire().await.unwrap();
        waits(&two, "a").await;
        let session = server
            .sql(&format!(
                "SELECT pid FROM pg_stat_activity WHERE usename = '{THEIRS}' LIMIT 1"
            ))
            .unwrap();

        let said = if database == THEIRS {
            let tokens = "SELECT last_value FROM lockkit.token";
            let tables = "SELECT key, token, name FROM lockkit.holder ORDER BY key";
            let mut inside = server.session_in(THEIRS).unwrap();
            let (token, rows) = (inside.sql(tokens).unwrap(), inside.sql(tables).unwrap());
            let said = faults(&server, database, &session);
            assert_eq!(inside.sql(tokens).unwrap(), token, "nothing has changed");
            assert_eq!(inside.sql(tables).unwrap(), rows, "nothing has changed");
            // Nor by lockkit itself, neither there nor under their name in its own.
            let refused = client(&server, OURS, THEIRS).await.unwrap_err();
            assert!(chain(&refused).contains("42501"), "{}", chain(&refused));
            let ours = client(&server, OURS, OURS).await.unwrap();
            let own = ours.lock("a").unwrap().try_acquire().await.unwrap();
            let own = own.expect("another lock");
            assert_eq!(listed(&ours, "").await.unwrap(), 1, "its own");
            assert!(!ours.revoke_by_force("a", held.token()).await.unwrap());
            let raised = FencingToken::new(held.token().get() + 1_000_000_000_000);
            ours.raise_fence(raised).await.unwrap();
            assert!(one.fence().await.unwrap() < raised, "a sequence each");
            own.release().await.unwrap();
            said
        } else {
            let ours = client(&server, OURS, COMMON).await.unwrap();
            assert!(ours.lock("a").unwrap().try_acquire().await.unwrap().is_none());
            assert!(listed(&ours, "").await.unwrap() > 0, "what they hold");
            let by_force = ours.revoke_by_force("a", held.token()).await.unwrap_err();
            assert!(chain(&by_force).contains("42501"), "{}", chain(&by_force));
            faults(&server, database, &session)
        };
        assert!(said.is_empty(), "{}", said.join("\n"));
        assert!(held.is_held() && shared.is_held() && permit.is_held());
        held.release().await.unwrap();
        waiting.granted().await.0.release().await.unwrap();
        shared.release().await.unwrap();
        permit.release().await.unwrap();
    }

    // The judge finds rights that are wider.
    let wider = format!("GRANT CONNECT ON DATABASE {THEIRS} TO {OURS}");
    server.sql(&wider).unwrap();
    let said = faults(&server, THEIRS, "0");
    assert!(
        said.iter().any(|fault| fault.starts_with("take a free lock")),
        "{said:?}"
    );
}
