//! What is said to the server on behalf of one claim with a row lock.

use std::fmt::Display;

use lockkit_core::spi::{ClaimRequest, Mode};

use crate::{
    key::{Key, literal},
    server::Flavour,
};

/// How long a waiter for a permit lets the server pause before it looks again, in seconds.
const PERMIT_PAUSE: &str = "0.02";

/// The most permits of a semaphore, each of which is a row.
pub(crate) const MAX_PERMITS: u32 = 1_000;

#[derive(Debug)]
pub(crate) struct Sql {
    key: Key,
    mode: Mode,
    flavour: Flavour,
}

/// An expression: 1 if the server is read-only now, else 0. A primary that is being replaced goes on with the connections that it has. MySQL's
/// `super_read_only` implies this one.
macro_rules! read_only {
    () => {
        "CAST(@@global.read_only AS CHAR) NOT IN ('0', 'OFF')"
    };
}

pub(crate) const READ_ONLY: &str = read_only!();

/// Locks a row, looks at the server's counter, and reads the mapping of looks to tokens: `NULL` if there is none. `?` is
/// the name.
///
/// The look is made after the row is locked, so that looks come in the order of grants. So is the mapping read, by a
/// consistent read that is this statement's only one and that needs the locked row's name, in disguise lest the optimizer
/// see that it is known beforehand: those who share the row lock nothing that keeps others from making another mapping.
/// Last comes whether the server is read-only, which it may have become while the statement waited: in the same disguise.
macro_rules! lock {
    ($columns:literal, $table:literal, $how:literal) => {
        concat!(
            "SELECT UUID_SHORT() look, (SELECT CONCAT_WS('/', life, base, since, last, step) \
             FROM lockkit_map WHERE name=CONCAT(r.name)) map, ",
            $columns,
            "IF(LENGTH(r.name), ",
            read_only!(),
            ", 1) ro FROM ",
            $table,
            " r WHERE r.name=? ",
            $how
        )
    };
}

/// Fails if the transaction that was shown is gone, whatever has ended it, and changes nothing if it is not. Says as well
/// whether the server is read-only.
pub(crate) fn still_holds() -> String {
    format!("ROLLBACK TO SAVEPOINT held; SELECT {READ_ONLY}")
}

/// An expression: the name of the lock of the server's own that says that the life of this number goes on. Whoever gave it
/// that number has the lock, and the server forgets it when it ends. Other databases of the server have numbers of their own.
fn life_lock(number: impl Display) -> String {
    format!("CONCAT('lockkit-life:', LEFT(SHA2(DATABASE(), 256), 16), ':', {number})")
}

/// The number of the life that the server is in. No row if nobody has given it one who is still there. `''` is no name with
/// MariaDB's `sql_mode=EMPTY_STRING_IS_NULL`.
pub(crate) fn life() -> String {
    let lock = life_lock("reserved");
    format!("SELECT reserved FROM lockkit_fence WHERE name=x'' AND IS_USED_LOCK({lock}) IS NOT NULL")
}

/// Gives the life that the server is in a number, above all that there were, and says it. The lock is this session's until it
/// ends. If the last number was deleted, it is above those that mappings have.
pub(crate) fn begin_life() -> String {
    let lock = life_lock("LAST_INSERT_ID()");
    format!(
        "INSERT IGNORE INTO lockkit_fence (name, reserved) SELECT x'', COALESCE(MAX(life), 0) FROM lockkit_map \
         WHERE NOT EXISTS (SELECT 1 FROM lockkit_fence WHERE name=x''); \
         UPDATE lockkit_fence SET reserved=LAST_INSERT_ID(GREATEST(reserved + 1, {CLOCK})) WHERE name=x''; \
         SELECT LAST_INSERT_ID(), GET_LOCK({lock}, 0)"
    )
}

/// A row if the server is in the life of this number.
pub(crate) fn lives(life: u64) -> String {
    format!(
        "SELECT 1 FROM DUAL WHERE IS_USED_LOCK({}) IS NOT NULL",
        life_lock(life)
    )
}

/// Whether the server is read-only, and, by answering, that the session lives.
pub(crate) fn proof() -> String {
    format!("SELECT {READ_ONLY}")
}

/// Ends a transaction that was shown. Fails if it is gone.
pub(crate) const LET_GO: &str = "RELEASE SAVEPOINT held; ROLLBACK";

/// When a counter starts, and where its blocks begin if it is behind: at the clock, so that a row that was deleted does not
/// start over below its tokens.
pub(crate) const CLOCK: &str = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)";

impl Sql {
    pub(crate) fn new(key: Key, mode: Mode, flavour: Flavour) -> Self {
        Self { key, mode, flavour }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn is_permit(&self) -> bool {
        matches!(self.mode, Mode::Permits(_))
    }

    /// Whether the rows of this name are there.
    pub(crate) fn exists(&self) -> String {
        let key = self.key.as_sql();
        match self.mode {
            Mode::Exclusive | Mode::Shared => format!("SELECT 1 FROM lockkit_gate WHERE name={key}"),
            Mode::Permits(_) => format!("SELECT size FROM lockkit_permit WHERE name={key} LIMIT 1"),
        }
    }

    /// Locks the row if nobody has it, and looks at the counter. To be prepared, or [named](Self::named).
    pub(crate) fn lock_or_skip(&self) -> &'static str {
        match (self.mode, self.flavour) {
            (Mode::Exclusive, _) => lock!("", "lockkit_gate", "FOR UPDATE SKIP LOCKED"),
            (Mode::Shared, Flavour::MariaDb) => lock!("", "lockkit_gate", "LOCK IN SHARE MODE SKIP LOCKED"),
            (Mode::Shared, Flavour::MySql) => lock!("", "lockkit_gate", "FOR SHARE SKIP LOCKED"),
            (Mode::Permits(_), _) => lock!("r.size, ", "lockkit_permit", "LIMIT 1 FOR UPDATE SKIP LOCKED"),
        }
    }

    /// Waits a moment for a permit, and tries again: whether the rows are there is the answer before the last.
    pub(crate) fn pause_and_try(&self) -> String {
        let (pause, exists) = (self.wait(), self.exists());
        format!("ROLLBACK; {pause}; {exists}; {}", self.named(self.lock_or_skip()))
    }

    /// The statement with the name in its place.
    pub(crate) fn named(&self, statement: &str) -> String {
        statement.replacen('?', &self.key.as_sql(), 1)
    }

    /// The same, waiting at the server; for a permit, waiting a moment before the next try.
    pub(crate) fn wait(&self) -> String {
        match self.mode {
            Mode::Exclusive => self.named(lock!("", "lockkit_gate", "FOR UPDATE")),
            Mode::Shared => self.named(lock!("", "lockkit_gate", "LOCK IN SHARE MODE")),
            // The name is there for `waiters`.
            Mode::Permits(_) => format!("SELECT SLEEP({PERMIT_PAUSE}), {}", self.key.as_sql()),
        }
    }

    /// Makes the rows of a name, whoever comes first.
    ///
    /// Only who makes the counter makes those that are locked, so that nobody waits for a row that somebody has locked
    /// already; with `repair`, if somebody deleted them.
    pub(crate) fn create(&self, repair: bool) -> String {
        let key = self.key.as_sql();
        let first = if repair { "1=1" } else { "ROW_COUNT()=1" };
        let fence = format!(
            "ROLLBACK; INSERT IGNORE INTO lockkit_map (name) VALUES ({key}); \
             INSERT IGNORE INTO lockkit_fence (name, reserved) VALUES ({key}, {CLOCK})"
        );
        match self.mode {
            Mode::Exclusive | Mode::Shared => format!(
                "{fence}; INSERT IGNORE INTO lockkit_gate (name) SELECT {key} FROM DUAL \
                 WHERE {first} AND NOT EXISTS (SELECT 1 FROM lockkit_gate WHERE name={key}); COMMIT"
            ),
            Mode::Permits(size) => format!(
                "{fence}; INSERT IGNORE INTO lockkit_permit (name, slot, size) \
                 WITH RECURSIVE s AS (SELECT 0 AS slot UNION ALL SELECT slot+1 FROM s WHERE slot+1 < {size}) \
                 SELECT {key}, s.slot, {size} FROM s \
                 WHERE {first} AND NOT EXISTS (SELECT 1 FROM lockkit_permit WHERE name={key}); COMMIT"
            ),
        }
    }

    /// Whether somebody holds, says its second statement, and of what size the semaphore is after that look, its last one. The
    /// look sees what is not committed. The session has no transaction open, before and after.
    pub(crate) fn is_held(&self) -> String {
        let key = self.key.as_sql();
        format!(
            "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
             SELECT 1 FROM lockkit_holder WHERE name={key} LIMIT 1; ROLLBACK; {}; ROLLBACK",
            self.exists()
        )
    }

    /// Locks every free permit.
    pub(crate) fn lock_all(&self) -> String {
        let key = self.key.as_sql();
        format!("SELECT slot FROM lockkit_permit WHERE name={key} FOR UPDATE SKIP LOCKED")
    }

    /// Gives the semaphore, all of whose permits are locked by this session, the size that is asked for.
    pub(crate) fn resize(&self, size: u32) -> String {
        let key = self.key.as_sql();
        let slots: Vec<_> = (0..size).map(|slot| format!("({key}, {slot}, {size})")).collect();
        format!(
            "DELETE FROM lockkit_permit WHERE name={key}; \
             INSERT INTO lockkit_permit (name, slot, size) VALUES {}; COMMIT",
            slots.join(", ")
        )
    }

    /// Reserves a block of `size` tokens above `last` and above all that were reserved before, and has the name's looks from
    /// this one on mapped to it, unless there is a mapping with higher tokens: two durable writes, one after the other. Says the last of
    /// its tokens, or 0 if the counter is missing; no row if the mapping is.
    pub(crate) fn reserve(&self, last: u64, size: u64, life: u64, look: u64, step: u64) -> String {
        let key = self.key.as_sql();
        format!(
            "DO LAST_INSERT_ID(0); \
             UPDATE lockkit_fence SET reserved=LAST_INSERT_ID(GREATEST(reserved, CAST({last} AS UNSIGNED), {CLOCK}) + {size}) \
             WHERE name={key}; \
             UPDATE lockkit_map SET life={life}, base=LAST_INSERT_ID() - {size} + 1, since={look}, last=LAST_INSERT_ID(), \
             step={step} WHERE name={key} AND last + {size} <= LAST_INSERT_ID(); \
             SELECT LAST_INSERT_ID() FROM lockkit_map WHERE name={key}"
        )
    }

    /// Shows a hold to those who look, within its transaction, and marks that. The mark is made before as well, so that
    /// it is there also if the hold cannot be shown. It may be shown already, with the token of a grant that nobody heard of: rows
    /// of this session alone have its id. Says whether the server is read-only.
    pub(crate) fn show(&self, connection: u64, token: u64, seconds: u32, request: &ClaimRequest) -> String {
        let key = self.key.as_sql();
        let label = request
            .label
            .as_ref()
            .map_or_else(|| "NULL".to_owned(), |label| literal(label.as_bytes()));
        format!(
            "SAVEPOINT held; INSERT INTO lockkit_holder (name, connection, token, seconds, label) \
             VALUES ({key}, {connection}, {token}, {seconds}, {label}) \
             ON DUPLICATE KEY UPDATE token={token}, seconds={seconds}, label={label}; SAVEPOINT held; SELECT {READ_ONLY}"
        )
    }

    /// Shows a hold that was shown before with another token. Fails if its transaction is gone, before anything else.
    pub(crate) fn show_passed_on(&self, connection: u64, token: u64) -> String {
        let key = self.key.as_sql();
        format!(
            "ROLLBACK TO SAVEPOINT held; \
             UPDATE lockkit_holder SET token={token} WHERE name={key} AND connection={connection}; \
             SAVEPOINT held; SELECT {READ_ONLY}"
        )
    }
}

/// Who holds, and for how long they have been silent; and how many statements are under way that wait for it. All in
/// one look, which sees what is not committed and locks nothing.
pub(crate) fn holders(key: &Key, flavour: Flavour, modes: &[Mode]) -> String {
    let waits: Vec<_> = modes
        .iter()
        .map(|mode| literal(Sql::new(key.clone(), *mode, flavour).wait().as_bytes()))
        .collect();
    format!(
        "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
         SELECT h.token, h.label, h.seconds, CAST(p.TIME AS SIGNED) FROM lockkit_holder h \
         LEFT JOIN information_schema.PROCESSLIST p ON p.ID=h.connection WHERE h.name={} ORDER BY h.token; \
         SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE CAST(INFO AS BINARY) IN ({})",
        key.as_sql(),
        waits.join(", ")
    )
}

/// Ends the session that holds with this token. Fails as if there were none if there is none.
pub(crate) fn kill_holder(key: &Key, token: u64) -> String {
    format!(
        "SET @lockkit_holder=NULL; SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
         SELECT connection INTO @lockkit_holder FROM lockkit_holder WHERE name={} AND token={token}; \
         KILL @lockkit_holder",
        key.as_sql()
    )
}

#[cfg(test)]
mod tests {
    use lockkit_core::{LockKind, LockName};
    use lockkit_testbed::{
        eventually,
        mysql::{Flavour as Kept, MySql},
        skipped,
    };
    use sqlx::{
        AssertSqlSafe, ConnectOptions, Row,
        mysql::{MySqlConnectOptions, MySqlConnection},
    };

    use super::*;
    use crate::tokens::Mapping;

    async fn run(connection: &mut MySqlConnection, sql: &str) -> Vec<sqlx::mysql::MySqlRow> {
        let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await;
        rows.unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// A statement that waits for the row has to look at the server's counter after the grant, and to see the mapping that was
    /// committed while it waited: others from before would repeat tokens.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_counter_is_read_after_the_row_is_locked() {
        for (kept, flavour, backend) in [
            (Kept::MariaDb, Flavour::MariaDb, "mysql"),
            (Kept::MySql, Flavour::MySql, "mysql-server"),
        ] {
            if skipped(backend, MySql::missing(kept)) {
                continue;
            }
            let server = MySql::start(kept, &[]).unwrap();
            let options: MySqlConnectOptions = server.url().parse().unwrap();
            let [mut holder, mut other] =
                [options.connect().await.unwrap(), options.connect().await.unwrap()];
            run(&mut other, &crate::ddl(crate::Mode::ForUpdate)).await;
            for mode in [Mode::Exclusive, Mode::Shared] {
                // As a session has it, as text and prepared; and a snapshot from before, by which the test sees that it
                // would notice.
                for (isolation, prepares, expected) in [
                    ("READ COMMITTED", false, 2),
                    ("READ COMMITTED", true, 2),
                    ("REPEATABLE READ", false, 1),
                    ("REPEATABLE READ", true, 1),
                ] {
                    let name = LockName::new(format!("{mode:?} {isolation} {prepares}")).unwrap();
                    let sql = Sql::new(Key::new("lockkit", LockKind::Lock, &name), mode, flavour);
                    let key = sql.key.as_sql();
                    run(
                        &mut other,
                        &format!(
                            "INSERT INTO lockkit_gate VALUES ({key}); \
                             INSERT INTO lockkit_map (name, life) VALUES ({key}, 1)"
                        ),
                    )
                    .await;
                    run(
                        &mut holder,
                        &format!("START TRANSACTION; SELECT 1 FROM lockkit_gate WHERE name={key} FOR UPDATE"),
                    )
                    .await;
                    let mut waiting = options.connect().await.unwrap();
                    run(
                        &mut waiting,
                        &format!(
                            "SET SESSION TRANSACTION ISOLATION LEVEL {isolation}; SET SESSION autocommit=0; \
                             SELECT COUNT(*) FROM lockkit_map"
                        ),
                    )
                    .await;
                    let wait = sql.wait();
                    // What is prepared skips rows; this one is the same but for that.
                    let prepared = sql.lock_or_skip().replace(" SKIP LOCKED", "");
                    let name = sql.key.as_bytes().to_owned();
                    let waiter = tokio::spawn(async move {
                        let rows = if prepares {
                            let query = sqlx::query(AssertSqlSafe(prepared)).bind(name);
                            query.fetch_all(&mut waiting).await.unwrap()
                        } else {
                            run(&mut waiting, &wait).await
                        };
                        let mapping: String = rows[0].try_get_unchecked(1).unwrap();
                        let mapping: Mapping = mapping.parse().unwrap();
                        (rows[0].try_get_unchecked::<u64, _>(0).unwrap(), mapping.life)
                    });
                    let looks = "SELECT 1 FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT UUID_SHORT() look%'";
                    eventually("it waits", async || !run(&mut other, looks).await.is_empty()).await;
                    run(
                        &mut other,
                        &format!("UPDATE lockkit_map SET life=2 WHERE name={key}"),
                    )
                    .await;
                    let before = &run(&mut holder, "SELECT UUID_SHORT()").await[0];
                    let before: u64 = before.try_get_unchecked(0).unwrap();
                    run(&mut holder, "ROLLBACK").await;
                    let (look, life) = waiter.await.unwrap();
                    let what = format!("{kept:?} {mode:?} {isolation} {prepares}");
                    assert!(look > before, "{what}: it looked before it had the row");
                    assert_eq!(life, expected, "{what}");
                }
            }
        }
    }
}
