//! The tables, which are checked when the client connects, and created by its first acquisition.

use lockkit_core::{Error, Result};

use crate::{
    Mode, NAME, Schema,
    connection::{Reply, ResumableConnection, column},
    error::During,
};

/// A row per lock. A session that has locked the row has the lock, also without this library.
const GATE: &str = "\
CREATE TABLE IF NOT EXISTS lockkit_gate (
    name VARBINARY(255) NOT NULL PRIMARY KEY
) ENGINE=InnoDB";

/// The last reserved token per name. The row without a name has the number of the server's latest life.
const FENCE: &str = "\
CREATE TABLE IF NOT EXISTS lockkit_fence (
    name VARBINARY(255) NOT NULL PRIMARY KEY,
    reserved BIGINT UNSIGNED NOT NULL DEFAULT 0
) ENGINE=InnoDB";

/// The mapping of tickets to tokens per name, see [`Mapping`](crate::tokens::Mapping). Not in the row that is locked, since it is
/// committed while readers share that one.
const MAP: &str = "\
CREATE TABLE IF NOT EXISTS lockkit_map (
    name VARBINARY(255) NOT NULL PRIMARY KEY,
    life BIGINT UNSIGNED NOT NULL DEFAULT 0,
    base BIGINT UNSIGNED NOT NULL DEFAULT 0,
    since BIGINT UNSIGNED NOT NULL DEFAULT 0,
    last BIGINT UNSIGNED NOT NULL DEFAULT 0,
    step BIGINT UNSIGNED NOT NULL DEFAULT 0
) ENGINE=InnoDB";

/// A row per permit of a semaphore.
const PERMIT: &str = "\
CREATE TABLE IF NOT EXISTS lockkit_permit (
    name VARBINARY(255) NOT NULL,
    slot INT UNSIGNED NOT NULL,
    size INT UNSIGNED NOT NULL,
    PRIMARY KEY (name, slot)
) ENGINE=InnoDB";

/// The holders, for inspections. A row is never committed: it lives in the transaction that has the lock. `full_name` is there if
/// `name` has not the whole of it.
const HOLDER: &str = "\
CREATE TABLE IF NOT EXISTS lockkit_holder (
    name VARBINARY(255) NOT NULL,
    connection BIGINT UNSIGNED NOT NULL,
    token BIGINT UNSIGNED NOT NULL,
    seconds INT UNSIGNED NOT NULL,
    label VARBINARY(256),
    full_name VARBINARY(1024),
    PRIMARY KEY (name, connection)
) ENGINE=InnoDB";

/// The locks of `mode=lease`. `expires` is in µs since 1970 on the server's clock. `token` is 0 while nobody holds. `latest` is the
/// last reserved token. `asked` is the token of the hold whose holder was last asked to give it up. `full_name` is there if `name`
/// has not the whole of it.
const LEASE: &str = "\
CREATE TABLE IF NOT EXISTS lockkit_lease (
    name VARBINARY(255) NOT NULL PRIMARY KEY,
    owner BINARY(16) NOT NULL,
    expires BIGINT UNSIGNED NOT NULL,
    token BIGINT UNSIGNED NOT NULL,
    latest BIGINT UNSIGNED NOT NULL,
    asked BIGINT UNSIGNED NOT NULL DEFAULT 0,
    label VARBINARY(256),
    full_name VARBINARY(1024)
) ENGINE=InnoDB";

fn tables(mode: Mode) -> &'static [(&'static str, &'static str)] {
    match mode {
        Mode::ForUpdate => &[
            ("lockkit_gate", GATE),
            ("lockkit_permit", PERMIT),
            ("lockkit_fence", FENCE),
            ("lockkit_map", MAP),
            ("lockkit_holder", HOLDER),
        ],
        Mode::Lease => &[("lockkit_lease", LEASE)],
    }
}

/// Returns the statements that create the tables for `mode`.
///
/// For databases in which the application may not create tables ([`Schema::Manual`]). Its account then needs `SELECT`, `INSERT`,
/// `UPDATE` and `DELETE` on them, and nothing else.
///
/// ```
/// use lockkit_mysql::{Mode, ddl};
///
/// assert!(ddl(Mode::ForUpdate).contains("CREATE TABLE IF NOT EXISTS lockkit_gate"));
/// ```
pub fn ddl(mode: Mode) -> String {
    statements(tables(mode).iter())
}

fn statements<'a>(tables: impl Iterator<Item = &'a (&'static str, &'static str)>) -> String {
    tables.flat_map(|(_, table)| [*table, ";\n"]).collect()
}

/// Returns the names of the tables in which locks are taken. They are made last: while none of them is there, nobody holds and no token was
/// drawn, whatever others are there.
pub(crate) fn taken_in(mode: Mode) -> &'static [&'static str] {
    match mode {
        Mode::ForUpdate => &["lockkit_gate", "lockkit_permit"],
        Mode::Lease => &["lockkit_lease"],
    }
}

/// Checks the tables, and creates missing ones if `schema` allows and `makes` is true. Without that, nothing is written. Returns true if all are
/// there then.
///
/// # Errors
/// With the statements to run, if tables are missing after that, and would not be created later. If a table is not as it has to be.
pub(crate) async fn prepare(
    operation: &'static str,
    connection: &mut ResumableConnection,
    mode: Mode,
    schema: Schema,
    makes: bool,
) -> Result<bool> {
    let mut missing = find_missing(operation, connection, mode).await?;
    if schema == Schema::Auto {
        if !makes {
            return Ok(missing.is_empty());
        }
        // Those in which locks are taken come last. Whoever is stopped half-way, as by a demotion, leaves none in use.
        for (name, table) in tables(mode).iter().rev() {
            if missing.contains(name) {
                connection.query((*table).to_owned()).await.during(operation)?;
            }
        }
        if !missing.is_empty() {
            missing = find_missing(operation, connection, mode).await?;
        }
    }
    if missing.is_empty() {
        return Ok(true);
    }
    let statements = statements(tables(mode).iter().filter(|(name, _)| missing.contains(name)));
    // On one line, so that they can be copied from a log.
    let statements = statements.split_whitespace().collect::<Vec<_>>().join(" ");
    Err(Error::permanent(
        NAME,
        operation,
        format!(
            "the tables {} are missing, or not visible to this account; have them made with: {statements}",
            missing.join(", ")
        ),
    ))
}

async fn find_missing(
    operation: &'static str,
    connection: &mut ResumableConnection,
    mode: Mode,
) -> Result<Vec<&'static str>> {
    let reply = connection.query(question(mode)).await.during(operation)?;
    check(operation, &reply, mode)
}

fn question(mode: Mode) -> String {
    let names: Vec<_> = tables(mode).iter().map(|(name, _)| format!("'{name}'")).collect();
    let names = names.join(", ");
    format!(
        "SELECT t.TABLE_NAME, t.ENGINE, c.DATA_TYPE, c.CHARACTER_MAXIMUM_LENGTH FROM information_schema.TABLES t \
         LEFT JOIN information_schema.COLUMNS c ON c.TABLE_SCHEMA = t.TABLE_SCHEMA AND c.TABLE_NAME = t.TABLE_NAME \
         AND c.COLUMN_NAME = 'name' WHERE t.TABLE_SCHEMA = DATABASE() AND t.TABLE_NAME IN ({names}) ORDER BY t.TABLE_NAME"
    )
}

/// Returns the names of the missing tables.
///
/// # Errors
/// If one is not as it has to be.
fn check(operation: &'static str, reply: &Reply, mode: Mode) -> Result<Vec<&'static str>> {
    let mut missing: Vec<_> = tables(mode).iter().map(|(name, _)| *name).collect();
    for row in reply.last() {
        let table: String = column(row, 0).during(operation)?;
        let engine: Option<String> = column(row, 1).during(operation)?;
        let kind: Option<String> = column(row, 2).during(operation)?;
        let width: Option<u64> = column(row, 3).during(operation)?;
        missing.retain(|name| !name.eq_ignore_ascii_case(&table));
        let Some(engine) = engine else {
            return Err(Error::unsupported(
                NAME,
                format!("`{table}`, which is a view and no table; drop it, or take another database"),
            ));
        };
        if !engine.eq_ignore_ascii_case("InnoDB") {
            return Err(Error::unsupported(
                NAME,
                format!(
                    "table `{table}` with the engine {engine}, which has no row locks; while no lock is held, make it ENGINE=InnoDB"
                ),
            ));
        }
        if kind.is_none() {
            // The server hides the columns to which the account has no right.
            return Err(Error::permanent(
                NAME,
                operation,
                format!(
                    "the columns of the table `{table}` are hidden from this account; \
                     grant it SELECT, INSERT, UPDATE and DELETE on the table"
                ),
            ));
        }
        let is_exact = kind.is_some_and(|kind| kind.eq_ignore_ascii_case("varbinary"));
        if !is_exact || width.is_none_or(|width| width < 255) {
            return Err(Error::unsupported(
                NAME,
                format!(
                    "table `{table}` whose column `name` is not VARBINARY(255): with other types, two names can be one; \
                     drop the table while no lock is held, and the next acquisition makes it anew"
                ),
            ));
        }
    }
    Ok(missing)
}
