//! The sequence of tokens and the tables, which are checked when the client connects, and created by its first acquisition.

use lockkit_core::{Error, Result};

use crate::{
    NAME, Schema,
    connection::Query,
    control::Control,
    error::{During, Failure, code, failed},
    sql,
};

/// The tokens of one grant, which are apart from those of all others.
pub(crate) const TOKENS_PER_GRANT: u32 = 1_024;

/// In a schema of that name, so that all clients of a database use the same, whatever their `search_path` is.
///
/// The tables are unlogged: the server empties them when it recovers from a crash, and a promoted standby has them empty. Without its
/// row in `epoch`, tokens are not known to be above those that were granted before. A row's `server` is that of one start of a server.
const DDL: &str = "\
CREATE SCHEMA IF NOT EXISTS lockkit;
CREATE SEQUENCE IF NOT EXISTS lockkit.token INCREMENT BY 1024 CACHE 1;
CREATE UNLOGGED TABLE IF NOT EXISTS lockkit.epoch (
    server bigint NOT NULL,
    database bigint NOT NULL,
    sequence bigint NOT NULL,
    PRIMARY KEY (server, database, sequence)
);
CREATE UNLOGGED TABLE IF NOT EXISTS lockkit.holder (
    pid int PRIMARY KEY,
    key bigint NOT NULL,
    queue bigint NOT NULL,
    token bigint NOT NULL,
    lease int NOT NULL,
    namespace text NOT NULL,
    name bytea NOT NULL,
    semaphore bool NOT NULL,
    label text,
    since timestamptz NOT NULL
);
CREATE UNLOGGED TABLE IF NOT EXISTS lockkit.semaphore (
    key bigint PRIMARY KEY,
    permits int NOT NULL
);
";

/// A lock that one client has while it creates what is missing, or begins an epoch. Pairs of numbers are apart from all names' keys.
const EXCLUSIVELY: &str =
    "SELECT set_config('lock_timeout', '0', true); SELECT pg_advisory_xact_lock(1819242347, 1);";

/// Has tokens go on above all that may have been granted, here or at a copy: at the clock, which is ahead of all of them unless it was set
/// back or tokens were raised. A crash may have lost draws, some thirty of each session: the sequence has to be behind the clock by more than
/// those. Else it goes further by more than those, and no copy is known to be passed. The new position is on disk before anybody can see the
/// row.
pub(crate) const BEGIN_EPOCH: &str = concat!(
    "SELECT set_config('lock_timeout', '0', true); SELECT pg_advisory_xact_lock(1819242347, 1); \
     SELECT setval('lockkit.token', CASE WHEN next + 1024 * 100000::bigint < clock THEN clock \
     ELSE next + 1024 * 1000000::bigint END) \
     FROM (SELECT nextval('lockkit.token') AS next, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint * 1000 AS clock \
     WHERE NOT EXISTS (SELECT FROM lockkit.epoch WHERE ",
    sql::this_epoch!(),
    ")) AS position; DELETE FROM lockkit.epoch WHERE NOT (",
    sql::this_epoch!(),
    "); INSERT INTO lockkit.epoch (server, database, sequence) \
     SELECT system_identifier # (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint, \
     (SELECT oid::bigint FROM pg_database WHERE datname = current_database()), \
     pg_relation_filenode('lockkit.token')::bigint FROM pg_control_system() ON CONFLICT DO NOTHING;",
);

/// Returns the statements that have tokens go on above this one, and above all that are granted meanwhile, unless they do without that.
/// The new position is on disk once they are committed.
pub(crate) fn raise_fence(above: u64) -> String {
    format!(
        "{BEGIN_EPOCH} SELECT setval('lockkit.token', greatest({above}, nextval('lockkit.token') + 1024 * 1000000::bigint)) \
         WHERE coalesce(pg_sequence_last_value('lockkit.token'::regclass), 0) + 1023 < {above};"
    )
}

/// The objects that are there: the schema, the sequence as it has to be, and the tables, unlogged. And who asks.
const WHAT_IS_THERE: &str = "\
SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'lockkit'), \
(SELECT s.seqincrement = 1024 AND s.seqcache = 1 AND NOT s.seqcycle FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid \
JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'lockkit' AND c.relname = 'token'), \
(SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'lockkit' \
AND c.relkind = 'r' AND c.relname IN ('epoch', 'holder', 'semaphore')), \
(SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'lockkit' \
AND c.relkind = 'r' AND c.relname IN ('epoch', 'holder', 'semaphore') AND c.relpersistence = 'u'), \
current_user::text";

/// The rights of this role, once everything is there.
const RIGHTS: &str = "\
SELECT has_schema_privilege('lockkit', 'USAGE'), \
(SELECT bool_and(has_sequence_privilege(c.oid, 'USAGE') AND has_sequence_privilege(c.oid, 'UPDATE')) FROM pg_class c \
JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'lockkit' AND c.relname = 'token'), \
(SELECT bool_and(has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT') \
AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE')) FROM pg_class c \
JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'lockkit' AND c.relkind = 'r' \
AND c.relname IN ('epoch', 'holder', 'semaphore')), current_user::text";

/// Returns the statements that create what lockkit needs in a database.
///
/// For databases in which the application may not create a schema ([`Schema::Manual`]). Its role then needs `USAGE` on the schema
/// `lockkit`, `USAGE` and `UPDATE` on the sequence there, and `SELECT`, `INSERT`, `UPDATE` and `DELETE` on the tables.
///
/// ```
/// assert!(lockkit_postgres::ddl().contains("CREATE SEQUENCE IF NOT EXISTS lockkit.token"));
/// ```
pub fn ddl() -> &'static str {
    DDL
}

/// Checks what is there, and makes nothing.
pub(crate) async fn check(control: &Control, schema: Schema) -> Result<()> {
    let there = what_is_there("connect", control).await?;
    if schema == Schema::Manual && !there.is_complete() {
        return Err(there.incomplete("connect"));
    }
    there.check()
}

/// Creates what is missing, if that is to be done here, and checks it, and the rights of this role to lock.
pub(crate) async fn prepare(operation: &'static str, control: &Control, schema: Schema) -> Result<()> {
    let mut there = what_is_there(operation, control).await?;
    if schema == Schema::Auto && !there.is_complete() {
        let made = control
            .run_together(operation, &format!("{EXCLUSIVELY}{DDL}"))
            .await;
        made.map_err(|error| there.may_not_create(operation, error))?;
        there = what_is_there(operation, control).await?;
    }
    if !there.is_complete() {
        return Err(there.incomplete(operation));
    }
    there.check()?;
    check_rights(operation, control).await?;
    let sweep = vec![Query::once(sql::SWEEP, Vec::new())];
    unless_locked(control.try_to_run(operation, sweep).await?).during(operation)
}

/// Returns true if nothing of lockkit's is in the database, so that nobody has locked there.
pub(crate) async fn is_absent(operation: &'static str, control: &Control) -> Result<bool> {
    let there = what_is_there(operation, control).await?;
    Ok(there.sequence_is_right.is_none() && there.tables == 0)
}

/// Takes a failure for none if the reason is that somebody has locked the table: the rows say who holds, and do not decide it.
pub(crate) fn unless_locked<T>(outcome: std::result::Result<T, Failure>) -> std::result::Result<(), Failure> {
    match outcome {
        Err(failure) if failure.code() == code::LOCK_NOT_AVAILABLE => Ok(()),
        outcome => outcome.map(drop),
    }
}

struct There {
    has_schema: bool,
    sequence_is_right: Option<bool>,
    tables: i64,
    unlogged: i64,
    role: String,
}

impl There {
    fn is_complete(&self) -> bool {
        self.has_schema && self.sequence_is_right.is_some() && self.tables == 3
    }

    fn check(&self) -> Result<()> {
        let what = if self.sequence_is_right == Some(false) {
            "a sequence lockkit.token whose numbers may be granted twice or out of order; run: ALTER SEQUENCE lockkit.token \
             INCREMENT BY 1024 CACHE 1 NO CYCLE"
        } else if self.unlogged != self.tables {
            "tables in the schema lockkit that survive a crash, by whose absence it is noticed; run: ALTER TABLE lockkit.epoch SET \
             UNLOGGED; ALTER TABLE lockkit.holder SET UNLOGGED; ALTER TABLE lockkit.semaphore SET UNLOGGED"
        } else {
            return Ok(());
        };
        Err(Error::unsupported(NAME, what))
    }

    fn incomplete(&self, operation: &'static str) -> Error {
        let why = format!(
            "the schema lockkit is not complete; have it made with: {}",
            statements(&self.role)
        );
        Error::permanent(NAME, operation, why)
    }

    fn may_not_create(&self, operation: &'static str, error: Error) -> Error {
        if error.is_transient() {
            return error;
        }
        let cause =
            std::error::Error::source(&error).map_or_else(|| error.to_string(), lockkit_core::spi::chain);
        // The statements are the advice.
        let cause = cause.split(" (").next().unwrap_or_default();
        let why = format!(
            "the schema lockkit is not complete and cannot be made here ({cause}); have it made with: {}",
            statements(&self.role)
        );
        Error::permanent(NAME, operation, why)
    }
}

async fn what_is_there(operation: &'static str, control: &Control) -> Result<There> {
    let reply = control
        .run(operation, vec![Query::once(WHAT_IS_THERE, Vec::new())])
        .await?;
    let Some(row) = reply.first().and_then(|rows| rows.first()) else {
        return Err(failed(operation, Failure::Ended));
    };
    Ok(There {
        has_schema: row.try_get(0).during(operation)?,
        sequence_is_right: row.try_get(1).during(operation)?,
        tables: row.try_get(2).during(operation)?,
        unlogged: row.try_get(3).during(operation)?,
        role: row.try_get(4).during(operation)?,
    })
}

async fn check_rights(operation: &'static str, control: &Control) -> Result<()> {
    let reply = control
        .run(operation, vec![Query::once(RIGHTS, Vec::new())])
        .await?;
    let Some(row) = reply.first().and_then(|rows| rows.first()) else {
        return Err(failed(operation, Failure::Ended));
    };
    let rights: [Option<bool>; 3] = [
        row.try_get(0).during(operation)?,
        row.try_get(1).during(operation)?,
        row.try_get(2).during(operation)?,
    ];
    if rights == [Some(true); 3] {
        return Ok(());
    }
    let role: String = row.try_get(3).during(operation)?;
    Err(Error::permanent(
        NAME,
        operation,
        format!("the role lacks rights; run: {}", grants(&role)),
    ))
}

/// The rights of a role to lock.
fn grants(role: &str) -> String {
    let role = role.replace('"', "\"\"");
    format!(
        "GRANT USAGE ON SCHEMA lockkit TO \"{role}\"; GRANT USAGE, UPDATE ON SEQUENCE lockkit.token TO \"{role}\"; \
         GRANT SELECT, INSERT, UPDATE, DELETE ON lockkit.epoch, lockkit.holder, lockkit.semaphore TO \"{role}\""
    )
}

/// The statements in a line, as a log shows them, after which the role can lock, whoever has run them.
fn statements(role: &str) -> String {
    let ddl = DDL.split_whitespace().collect::<Vec<_>>().join(" ");
    format!("{ddl} {}", grants(role))
}
