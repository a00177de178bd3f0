//! The statements of row locks.

use std::{fmt::Display, num::NonZeroU32};

use lockkit_core::{
    LockKind,
    spi::{ClaimRequest, Mode},
};

use crate::{
    layout::{Key, Range, literal, literal_or_null},
    server::Flavour,
};

/// The time between two tries of a waiter for a permit, in seconds. The server keeps it.
const PERMIT_PAUSE: &str = "0.02";

/// The most permits of a semaphore. Each is a row.
pub(crate) const MAX_PERMITS: u32 = 1_000;

/// The statements of one claim.
#[derive(Debug)]
pub(crate) struct RowSql {
    key: Key,
    mode: Mode,
    flavour: Flavour,
}

/// An expression: 1 if the server is read-only now, else 0. A primary that is being replaced keeps the connections that it has.
/// MySQL's `super_read_only` implies `read_only`.
macro_rules! read_only {
    () => {
        "CAST(@@global.read_only AS CHAR) NOT IN ('0', 'OFF')"
    };
}

pub(crate) const READ_ONLY: &str = read_only!();

/// Locks a row, draws a ticket, and reads the mapping of tickets to tokens, `NULL` if there is none. `?` is the name.
///
/// All but the lock has to happen after the row is locked:
///
/// - The ticket is drawn per row, so tickets are in the order of the grants.
/// - The mapping is read by the statement's only consistent read, whose snapshot is taken when it runs. It needs the name of
///   the locked row. `CONCAT` hides from the optimizer that the name is known before. It locks nothing, so that readers keep
///   nobody from making another mapping.
/// - The last column says whether the server is read-only, as it may have become while the statement waited. `LENGTH` hides
///   in the same way that the value does not depend on the row.
macro_rules! lock {
    ($columns:literal, $table:literal, $how:literal) => {
        concat!(
            "SELECT UUID_SHORT() ticket, (SELECT CONCAT_WS('/', life, base, since, last, step) \
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

/// Fails if the transaction of a shown hold is gone, whatever has ended it. Changes nothing if it is there. Returns also whether
/// the server is read-only.
pub(crate) fn still_holds() -> String {
    format!("ROLLBACK TO SAVEPOINT held; SELECT {READ_ONLY}")
}

/// An expression on the row without a name of `lockkit_map`: the name of the server lock that exists while the life of this number lasts.
/// The session that gave the number has it, and the server forgets it when it ends. Any account of the server may take any such lock, and one
/// that took that of an earlier life would have this one pass for it. So the name has a secret in it, which those know who may read the table.
/// Each database of the server has its own numbers.
fn life_lock(number: impl Display) -> String {
    format!("CONCAT('lockkit-life:', LEFT(SHA2(CONCAT_WS('/', DATABASE(), {number}, since), 256), 48))")
}

/// Returns the number of the server's life. No row if it has none, or if the session that gave it has ended. The name is `x''`,
/// since `''` is `NULL` with MariaDB's `sql_mode=EMPTY_STRING_IS_NULL`.
pub(crate) fn life() -> String {
    let lock = life_lock("reserved");
    format!(
        "SELECT reserved FROM lockkit_fence f, lockkit_map m WHERE f.name=x'' AND m.name=x'' AND IS_USED_LOCK({lock}) IS NOT NULL"
    )
}

/// Gives the server's life a number above all earlier ones, and returns it. This session has the life's lock until it ends. If
/// the latest number was deleted, the new one is above those of all mappings. The number has random bits: a copy of the table at another
/// server, or with a clock that is behind, gives another one. The secret is the table's, unless it has one.
pub(crate) fn begin_life(secret: u64, random: u32) -> String {
    let lock = life_lock("LAST_INSERT_ID()");
    let above = u64::from(random) + 1;
    format!(
        "INSERT IGNORE INTO lockkit_fence (name, reserved) SELECT x'', COALESCE(MAX(life), 0) FROM lockkit_map \
         WHERE NOT EXISTS (SELECT 1 FROM lockkit_fence WHERE name=x''); \
         INSERT IGNORE INTO lockkit_map (name, since) VALUES (x'', {secret}); \
         UPDATE lockkit_fence SET reserved=LAST_INSERT_ID(GREATEST(reserved, {CLOCK}) + {above}) WHERE name=x''; \
         SELECT LAST_INSERT_ID(), GET_LOCK({lock}, 0) FROM lockkit_map WHERE name=x''"
    )
}

/// Returns a row if the server is in the life of this number.
pub(crate) fn is_in_life(life: u64) -> String {
    format!(
        "SELECT 1 FROM lockkit_map WHERE name=x'' AND IS_USED_LOCK({}) IS NOT NULL",
        life_lock(life)
    )
}

/// Returns whether the server is read-only. A reply proves that the session lives.
pub(crate) fn proof() -> String {
    format!("SELECT {READ_ONLY}")
}

/// Ends the transaction of a shown hold. Fails if it is gone.
pub(crate) const ROLLBACK_IF_INTACT: &str = "RELEASE SAVEPOINT held; ROLLBACK";

/// The lowest value of a counter that is made or raised: the clock, in µs since 1970. So a counter that was deleted does not
/// start again below its tokens.
pub(crate) const CLOCK: &str = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)";

/// The row of the token that all others were raised above, in the table of counters. No name's rows begin so.
pub(crate) const RAISED: &str = "'%fence'";

/// Reads the last token that was ever reserved, or the clock if that is ahead. Rows that came back from a backup say nothing about the
/// tokens since, which began at the clock.
pub(crate) fn fence() -> String {
    format!(
        "SELECT CAST(GREATEST((SELECT COALESCE(MAX(reserved), 0) FROM lockkit_fence WHERE name<>x''), \
         (SELECT COALESCE(MAX(last), 0) FROM lockkit_map), {CLOCK}) AS UNSIGNED)"
    )
}

/// The most rows that one statement raises, so that whoever needs one of them waits for a moment.
pub(crate) const RAISED_AT_ONCE: u64 = 500;

/// Has all tokens of claims that begin later be above this one: those of counters that are made later, those of all counters, and then
/// those of the mappings in use, whose blocks are given up. A mapping that is stored at the same time, on to a block that was reserved
/// before, finds a higher one. Each statement is repeated until it finds fewer than [`RAISED_AT_ONCE`] rows.
pub(crate) fn raise_fence(above: u64) -> Vec<String> {
    vec![
        format!(
            "INSERT INTO lockkit_fence (name, reserved) VALUES ({RAISED}, {above}) \
             ON DUPLICATE KEY UPDATE reserved=GREATEST(reserved, {above})"
        ),
        format!(
            "UPDATE lockkit_fence SET reserved={above} WHERE name<>x'' AND reserved<{above} ORDER BY name LIMIT {RAISED_AT_ONCE}"
        ),
        format!(
            "UPDATE lockkit_map SET step=0, base=GREATEST(last, {above}), last=GREATEST(last, {above}) \
             WHERE base<={above} AND (step<>0 OR base<{above} OR last<{above}) ORDER BY name LIMIT {RAISED_AT_ONCE}"
        ),
    ]
}

impl RowSql {
    pub(crate) fn new(key: Key, mode: Mode, flavour: Flavour) -> Self {
        Self { key, mode, flavour }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn is_permit(&self) -> bool {
        matches!(self.mode, Mode::Permits(_))
    }

    /// Returns a row if the name has rows; for a semaphore, with its size.
    pub(crate) fn exists(&self) -> String {
        let key = self.key.as_sql();
        match self.mode {
            Mode::Exclusive | Mode::Shared => format!("SELECT 1 FROM lockkit_gate WHERE name={key}"),
            Mode::Permits(_) => format!("SELECT size FROM lockkit_permit WHERE name={key} LIMIT 1"),
        }
    }

    /// Locks the row if it is free, and draws a ticket. To be prepared, or [named](Self::named).
    pub(crate) fn lock_or_skip(&self) -> &'static str {
        match (self.mode, self.flavour) {
            (Mode::Exclusive, _) => lock!("", "lockkit_gate", "FOR UPDATE SKIP LOCKED"),
            (Mode::Shared, Flavour::MariaDb) => lock!("", "lockkit_gate", "LOCK IN SHARE MODE SKIP LOCKED"),
            (Mode::Shared, Flavour::MySql) => lock!("", "lockkit_gate", "FOR SHARE SKIP LOCKED"),
            (Mode::Permits(_), _) => lock!("r.size, ", "lockkit_permit", "LIMIT 1 FOR UPDATE SKIP LOCKED"),
        }
    }

    /// Waits a moment for a permit, and tries again. The last result but one is that of [`exists`](Self::exists).
    pub(crate) fn pause_and_try(&self) -> String {
        let (pause, exists) = (self.wait(), self.exists());
        format!("ROLLBACK; {pause}; {exists}; {}", self.named(self.lock_or_skip()))
    }

    /// Puts the name into a statement.
    pub(crate) fn named(&self, statement: &str) -> String {
        statement.replacen('?', &self.key.as_sql(), 1)
    }

    /// Waits at the server for the row. For a permit, only pauses.
    pub(crate) fn wait(&self) -> String {
        match self.mode {
            Mode::Exclusive => self.named(lock!("", "lockkit_gate", "FOR UPDATE")),
            Mode::Shared => self.named(lock!("", "lockkit_gate", "LOCK IN SHARE MODE")),
            // The name is there for inspections, which count waiters by their statement.
            Mode::Permits(_) => format!("SELECT SLEEP({PERMIT_PAUSE}), {}", self.key.as_sql()),
        }
    }

    /// Makes the rows of a name.
    ///
    /// Only the transaction that makes the counter makes the rows that are locked, so that nobody waits for a row that another has
    /// locked already. With `repair` it makes them also if the counter was there, since somebody deleted them.
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

    /// Reads whether somebody holds a permit (second result) and then the semaphore's size (fourth result). Holds are shown by
    /// rows that are not committed. The session has no transaction open, before and after.
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

    /// Changes the size of the semaphore. This session has locked all of its permits.
    pub(crate) fn resize(&self, size: u32) -> String {
        let key = self.key.as_sql();
        let slots: Vec<_> = (0..size).map(|slot| format!("({key}, {slot}, {size})")).collect();
        format!(
            "DELETE FROM lockkit_permit WHERE name={key}; \
             INSERT INTO lockkit_permit (name, slot, size) VALUES {}; COMMIT",
            slots.join(", ")
        )
    }

    /// Reserves a block of `size` tokens above `last`, above all blocks before it and above what tokens were raised above, and maps the tickets from this one on to it,
    /// unless there is a mapping with higher tokens. Two durable writes, one after the other. Returns the block's last token, 0 if
    /// the counter is missing, or no row if the mapping is missing.
    pub(crate) fn reserve(&self, last: u64, size: u64, life: u64, ticket: u64, step: u64) -> String {
        let key = self.key.as_sql();
        format!(
            "SELECT COALESCE(MAX(reserved), 0) INTO @lockkit_raised FROM lockkit_fence WHERE name={RAISED}; \
             DO LAST_INSERT_ID(0); \
             UPDATE lockkit_fence SET reserved=LAST_INSERT_ID(GREATEST(reserved, CAST({last} AS UNSIGNED), \
             CAST(@lockkit_raised AS UNSIGNED), {CLOCK}) + {size}) \
             WHERE name={key}; \
             UPDATE lockkit_map SET life={life}, base=LAST_INSERT_ID() - {size} + 1, since={ticket}, last=LAST_INSERT_ID(), \
             step={step} WHERE name={key} AND last + {size} <= LAST_INSERT_ID(); \
             SELECT LAST_INSERT_ID() FROM lockkit_map WHERE name={key}"
        )
    }

    /// Shows a hold to inspections, within its transaction, and sets a savepoint. There is a savepoint before, too, for a hold that
    /// cannot be shown. The row may be there already, with the token of a grant whose reply nobody read: only this session's rows
    /// have its id. Returns whether the server is read-only.
    pub(crate) fn show(&self, connection: u64, token: u64, seconds: u32, request: &ClaimRequest) -> String {
        let key = self.key.as_sql();
        let label = literal_or_null(request.label.as_deref());
        let full_name = literal_or_null(self.key.full_name(&request.name));
        format!(
            "SAVEPOINT held; INSERT INTO lockkit_holder (name, connection, token, seconds, label, full_name) \
             VALUES ({key}, {connection}, {token}, {seconds}, {label}, {full_name}) \
             ON DUPLICATE KEY UPDATE token={token}, seconds={seconds}, label={label}; SAVEPOINT held; SELECT {READ_ONLY}"
        )
    }

    /// Shows a hold with another token or ttl than before. Fails if its transaction is gone, and then changes nothing.
    pub(crate) fn show_changed(&self, connection: u64, token: u64, seconds: u32) -> String {
        let key = self.key.as_sql();
        format!(
            "ROLLBACK TO SAVEPOINT held; \
             UPDATE lockkit_holder SET token={token}, seconds={seconds} WHERE name={key} AND connection={connection}; \
             SAVEPOINT held; SELECT {READ_ONLY}"
        )
    }
}

/// Returns the holders, with the time for which each was silent, and the number of statements that wait. Reads what is not
/// committed, and locks nothing.
pub(crate) fn holders(key: &Key, flavour: Flavour, kind: LockKind) -> String {
    let waits = waits(key, flavour, kind);
    let waits: Vec<_> = waits.iter().map(|wait| literal(wait.as_bytes())).collect();
    format!(
        "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
         SELECT h.token, h.label, h.seconds, CAST(p.TIME AS SIGNED) FROM lockkit_holder h \
         LEFT JOIN information_schema.PROCESSLIST p ON p.ID=h.connection WHERE h.name={} ORDER BY h.token; \
         SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE CAST(INFO AS BINARY) IN ({})",
        key.as_sql(),
        waits.join(", ")
    )
}

/// Returns the holders of the next `names` names of a range, in the order of the names, and `most` of them at most: name, full name, token, label,
/// and the time for which each is granted and was silent. A name whose holders have gone since it was found has no token, and counts
/// nevertheless: the range may go on behind it. Reads what is not committed, and locks nothing.
pub(crate) fn page(range: &Range, names: usize, most: usize) -> String {
    let range = range.as_sql();
    format!(
        "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
         SELECT n.name, h.full_name, h.token, h.label, h.seconds, CAST(p.TIME AS SIGNED) \
         FROM (SELECT DISTINCT name FROM lockkit_holder WHERE {range} ORDER BY name LIMIT {names}) n \
         LEFT JOIN lockkit_holder h ON h.name=n.name \
         LEFT JOIN information_schema.PROCESSLIST p ON p.ID=h.connection ORDER BY n.name, h.token LIMIT {most}"
    )
}

/// Returns the statements of those who wait for a name.
pub(crate) fn waits(key: &Key, flavour: Flavour, kind: LockKind) -> Vec<String> {
    let modes: &[Mode] = match kind {
        LockKind::Lock => &[Mode::Exclusive, Mode::Shared],
        LockKind::Semaphore => &[Mode::Permits(NonZeroU32::MIN)],
    };
    let wait = |mode: &Mode| RowSql::new(key.clone(), *mode, flavour).wait();
    modes.iter().map(wait).collect()
}

/// Counts the sessions that run each of these statements.
pub(crate) fn count_waits<'a>(statements: impl Iterator<Item = &'a Vec<u8>>) -> String {
    let statements: Vec<_> = statements.map(|statement| literal(statement)).collect();
    format!(
        "SELECT CAST(INFO AS BINARY) statement, COUNT(*) FROM information_schema.PROCESSLIST \
         WHERE CAST(INFO AS BINARY) IN ({}) GROUP BY statement",
        statements.join(", ")
    )
}

/// Kills the session that holds with this token. Fails with `NO_SUCH_THREAD` if there is no such hold. Who may write the table can show a hold
/// of any session: one that is seen to be in another database is no holder.
pub(crate) fn kill_holder(key: &Key, token: u64) -> String {
    format!(
        "SET @lockkit_holder=NULL; SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
         SELECT h.connection INTO @lockkit_holder FROM lockkit_holder h \
         LEFT JOIN information_schema.PROCESSLIST p ON p.ID=h.connection \
         WHERE h.name={} AND h.token={token} AND (p.ID IS NULL OR p.DB=DATABASE()); \
         KILL @lockkit_holder",
        key.as_sql()
    )
}

#[cfg(test)]
mod tests {
    use lockkit_core::LockName;
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

    /// A client may be between the two writes of a reservation when tokens are raised.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_block_from_before_is_in_use_once_tokens_are_raised() {
        const ABOVE: u64 = 1 << 60;

        for (kept, flavour, backend) in [
            (Kept::MariaDb, Flavour::MariaDb, "mysql"),
            (Kept::MySql, Flavour::MySql, "mysql-server"),
        ] {
            if skipped(backend, MySql::missing(kept)) {
                continue;
            }
            let server = MySql::start(kept, &[]).unwrap();
            let options: MySqlConnectOptions = server.url().parse().unwrap();
            let [mut client, mut operator] =
                [options.connect().await.unwrap(), options.connect().await.unwrap()];
            run(&mut client, &crate::ddl(crate::Mode::ForUpdate)).await;
            let raise = raise_fence(ABOVE);
            let writes = 2;
            assert_eq!(raise.len(), 3);
            // The statements of the operator between which each of the client's two writes is.
            let places =
                (0..=raise.len()).flat_map(|first| (first..=raise.len()).map(move |second| [first, second]));
            for places in places.collect::<Vec<_>>() {
                run(
                    &mut operator,
                    "DELETE FROM lockkit_fence; DELETE FROM lockkit_map; DELETE FROM lockkit_gate",
                )
                .await;
                let name = LockName::new("a").unwrap();
                let sql = RowSql::new(
                    Key::new("lockkit", LockKind::Lock, &name),
                    Mode::Exclusive,
                    flavour,
                );
                run(&mut client, &sql.create(false)).await;
                let reserve = sql.reserve(0, 1_024, 7, 1, 1);
                let mut reserve: Vec<_> = reserve.split("; ").map(str::to_owned).collect();
                let rest = reserve.split_off(reserve.len() - writes);
                let mut client_does = [reserve.join("; "), rest.join("; ")]
                    .into_iter()
                    .zip(places)
                    .peekable();
                for done in 0..=raise.len() {
                    while let Some((statements, _)) = client_does.next_if(|(_, place)| *place == done) {
                        run(&mut client, &statements).await;
                    }
                    if let Some(statement) = raise.get(done) {
                        run(&mut operator, statement).await;
                    }
                }
                let mapping = async |connection: &mut MySqlConnection| {
                    let read = "SELECT CONCAT_WS('/', life, base, since, last, step) FROM lockkit_map";
                    let mapping: Vec<u8> = run(connection, read).await[0].try_get_unchecked(0).unwrap();
                    String::from_utf8(mapping).unwrap().parse::<Mapping>().unwrap()
                };
                let what = format!("{kept:?} {places:?}");
                let in_use = mapping(&mut client).await;
                let token = in_use.first(2, 7, 1);
                assert!(token.is_none_or(|token| token > ABOVE), "{what}: {in_use:?}");
                let (size, step) = in_use.next(7, 1);
                run(&mut client, &sql.reserve(in_use.last, size, 7, 3, step)).await;
                let next = mapping(&mut client).await;
                assert!(
                    next.first(4, 7, 1).is_some_and(|token| token > ABOVE),
                    "{what}: {next:?}"
                );
            }
        }
    }

    /// A statement that waits for the row has to draw its ticket after the grant, and to see the mapping that was committed while
    /// it waited. Earlier ones would repeat tokens.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_ticket_is_drawn_after_the_row_is_locked() {
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
                // READ COMMITTED is what sessions have. REPEATABLE READ has a snapshot from before, and shows that this test
                // would notice.
                for (isolation, prepares, expected) in [
                    ("READ COMMITTED", false, 2),
                    ("READ COMMITTED", true, 2),
                    ("REPEATABLE READ", false, 1),
                    ("REPEATABLE READ", true, 1),
                ] {
                    let name = LockName::new(format!("{mode:?} {isolation} {prepares}")).unwrap();
                    let sql = RowSql::new(Key::new("lockkit", LockKind::Lock, &name), mode, flavour);
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
                    // The prepared statement skips locked rows. This one is the same otherwise.
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
                    let waits = "SELECT 1 FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT UUID_SHORT() ticket%'";
                    eventually("it waits", async || !run(&mut other, waits).await.is_empty()).await;
                    run(
                        &mut other,
                        &format!("UPDATE lockkit_map SET life=2 WHERE name={key}"),
                    )
                    .await;
                    let before = &run(&mut holder, "SELECT UUID_SHORT()").await[0];
                    let before: u64 = before.try_get_unchecked(0).unwrap();
                    run(&mut holder, "ROLLBACK").await;
                    let (ticket, life) = waiter.await.unwrap();
                    let what = format!("{kept:?} {mode:?} {isolation} {prepares}");
                    assert!(ticket > before, "{what}: it was drawn before the row was locked");
                    assert_eq!(life, expected, "{what}");
                }
            }
        }
    }
}
