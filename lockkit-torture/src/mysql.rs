//! MariaDB and MySQL, in both modes.

use std::{io, net::SocketAddr, thread, time::Duration};

use lockkit::{
    LockClient,
    mysql::{Mode, ddl},
};
use lockkit_conformance::torture::{Fault, Told};
use lockkit_testbed::{
    Clock,
    mysql::{Flavour, MySql},
};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Row as _,
    mysql::{MySqlConnectOptions, MySqlSslMode},
};

use crate::deployment::{Blow, Harm, Servers};

/// A primary, and what takes its place.
#[derive(Debug)]
pub struct Database {
    /// The primary.
    pub primary: MySql,
    /// The server that becomes the primary in a planned change of roles.
    pub successor: MySql,
    flavour: Flavour,
    lease: bool,
    clock: Clock,
    /// The successor's.
    _ahead: Clock,
}

/// A step of a clock that no lease bears.
const HOUR: Duration = Duration::from_hours(1);
/// Past all that the primary's clock is set forward in a run.
const AHEAD: Duration = Duration::from_hours(10_000);

const AT_RENEWAL: Told = Told::AtRenewal(Duration::from_secs(3));

impl Database {
    /// Starts both.
    ///
    /// # Errors
    /// If one does not come up.
    pub fn start(flavour: Flavour, lease: bool) -> io::Result<Self> {
        let clock = Clock::new()?;
        let primary = MySql::start_by(Some(&clock), flavour, &[])?;
        // Past whatever the primary's counters may have run ahead of its own clock.
        let ahead = Clock::new()?;
        ahead.forward(AHEAD)?;
        let successor = MySql::start_by(Some(&ahead), flavour, &[])?;
        // As a replica would have them.
        let mode = if lease { Mode::Lease } else { Mode::ForUpdate };
        run(successor.addr(), &ddl(mode))?;
        Ok(Self {
            primary,
            successor,
            flavour,
            lease,
            clock,
            _ahead: ahead,
        })
    }
}

impl Database {
    /// Kills the primary, and has it come back with these statements run before anybody can connect.
    fn restart_with(&self, statements: &[&str]) -> io::Result<()> {
        self.primary.process().kill()?;
        self.primary.at_start(statements)?;
        self.primary.start_again()
    }

    /// The settings of all sessions of a server that serves others as well.
    fn settings(&self, place: usize) -> Vec<&'static str> {
        if place == 0 {
            return vec!["SET GLOBAL TRANSACTION ISOLATION LEVEL SERIALIZABLE"];
        }
        let mut settings = vec![
            "SET GLOBAL innodb_lock_wait_timeout=1",
            "SET GLOBAL lock_wait_timeout=1",
            "SET GLOBAL wait_timeout=2",
            "SET GLOBAL interactive_timeout=2",
        ];
        settings.extend(match self.flavour {
            Flavour::MariaDb => &[
                "SET GLOBAL max_statement_time=0.5",
                "SET GLOBAL idle_transaction_timeout=1",
            ][..],
            Flavour::MySql => &["SET GLOBAL max_execution_time=500"],
        });
        settings
    }

    /// Has new sessions begin with this, and all sessions begin anew.
    fn begin_with(&self, setting: &str, blow: Blow<'_>) -> io::Result<()> {
        let setting = setting.replace('\'', "''");
        run(
            self.primary.addr(),
            &format!("SET GLOBAL init_connect='{setting}'"),
        )?;
        blow.reset_all();
        Ok(())
    }
}

/// What an operator may have all sessions begin with: each is bad for who counts on the opposite.
const HOSTILE: [&str; 4] = [
    "SET timestamp=1000000000, sql_select_limit=0, autocommit=0",
    "SET sql_mode='ANSI,PAD_CHAR_TO_FULL_LENGTH,NO_BACKSLASH_ESCAPES,NO_UNSIGNED_SUBTRACTION', completion_type='RELEASE'",
    "SET innodb_lock_wait_timeout=1, lock_wait_timeout=1, wait_timeout=1, sql_safe_updates=1",
    "SET time_zone='+05:45', sql_big_selects=0, max_join_size=1, character_set_connection='latin1', autocommit=0",
];

/// Has the master account run something, and answers with the rows as text.
///
/// # Errors
/// If the server cannot be reached, or does not do it.
pub fn run(server: SocketAddr, sql: &str) -> io::Result<Vec<Vec<String>>> {
    let options = MySqlConnectOptions::new()
        .host(&server.ip().to_string())
        .port(server.port())
        .username("root")
        .database(MySql::DATABASE)
        .ssl_mode(MySqlSslMode::Disabled);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut connection = options.connect().await.map_err(io::Error::other)?;
        let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut connection).await;
        let text = |row: &sqlx::mysql::MySqlRow, index| {
            let bytes: Option<Vec<u8>> = row.try_get_unchecked(index).unwrap_or_default();
            String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
        };
        let rows = rows.map_err(io::Error::other)?;
        Ok(rows
            .iter()
            .map(|row| (0..row.len()).map(|index| text(row, index)).collect())
            .collect())
    })
}

/// The ids of the account's connections.
fn connections(server: &MySql) -> io::Result<Vec<String>> {
    let user = MySql::USER;
    let sql = format!(
        "SELECT CAST(ID AS CHAR) FROM information_schema.PROCESSLIST WHERE USER = '{user}' ORDER BY ID"
    );
    Ok(run(server.addr(), &sql)?.concat())
}

/// Connections, transactions, and rows that say that somebody holds.
fn left_at(server: &MySql) -> io::Result<Vec<String>> {
    let (port, mut left) = (server.addr().port(), Vec::new());
    for id in connections(server)? {
        left.push(format!("at {port} the connection {id}"));
    }
    // InnoDB says what it said before to whoever asks within a tenth of a second.
    thread::sleep(Duration::from_millis(120));
    // They outlive the sessions that are ended.
    let sql = "SELECT CAST(trx_mysql_thread_id AS CHAR) FROM information_schema.INNODB_TRX \
               WHERE trx_mysql_thread_id <> CONNECTION_ID()";
    for id in run(server.addr(), sql)?.concat() {
        left.push(format!("at {port} a transaction of the connection {id}"));
    }
    let tables = run(server.addr(), "SHOW TABLES")?.concat();
    for table in tables {
        // The rows of the others are names, which stay.
        let held = match table.as_str() {
            "lockkit_gate" | "lockkit_permit" | "lockkit_fence" | "lockkit_map" => continue,
            "lockkit_holder" => "TRUE",
            "lockkit_lease" => "token <> 0 AND expires > UNIX_TIMESTAMP(NOW(6)) * 1000000",
            _ => {
                left.push(format!("at {port} the table {table}"));
                continue;
            }
        };
        let sql = format!("SELECT CAST(name AS CHAR), CAST(token AS CHAR) FROM {table} WHERE {held}");
        for row in run(server.addr(), &sql)? {
            left.push(format!("at {port} in {table} the hold {}", row.join(" ")));
        }
    }
    Ok(left)
}

impl Servers for Database {
    const GROUPS: usize = 3;
    // And until a dead session is ended over another connection.
    const RECOVERY: Duration = Duration::from_secs(10);

    fn addrs(&self) -> Vec<SocketAddr> {
        vec![self.primary.addr()]
    }

    fn shows_late(&self) -> bool {
        !self.lease
    }

    fn url(&self, addrs: &[SocketAddr]) -> String {
        let parameters = if self.lease { "?mode=lease" } else { "" };
        format!("{}{parameters}", MySql::url_at(addrs[0]))
    }

    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        let bound = client.dead_holder_bound(ttl);
        if self.lease {
            bound
        } else {
            // A statement waits for so long, and its client's end goes unnoticed.
            bound.max(Duration::from_secs(32))
        }
    }

    fn of_a_way(&self, fault: Fault) -> Fault {
        match fault.name {
            _ if self.lease => fault,
            // The server frees a row at once.
            "reset" | "refuse" | "lose" => fault.excuses_overlap(Told::Within(Duration::from_secs(2))),
            "silence" => fault.excuses_overlap(Told::AtLeaseEnd(Duration::from_secs(1))),
            _ => fault,
        }
    }

    fn harms(&self) -> Vec<Harm<Self>> {
        let fault = |name| Fault::new(name).recovery(Self::RECOVERY);
        let mut restart = fault("restart");
        let mut settings = fault("settings").places(2).weight(2).later();
        let mut hostile = fault("hostile").places(4).weight(2).later();
        let mut session = fault("session").places(8).weight(3);
        // It counts silence by another clock.
        let mut clock = fault("clock");
        // The old primary's row locks end with a renewal. Its leases last, and what takes its place has no rows of them.
        let mut switch = fault("switch").lasting().weight(4).excuses_overlap(AT_RENEWAL);
        if self.lease {
            switch = switch.excuses_overlap(Told::AtLeaseEnd(Duration::from_secs(1)));
            clock = clock
                .places(2)
                .excuses_overlap(AT_RENEWAL)
                .recovery(Duration::from_secs(20));
        } else {
            let at_once = Told::Within(Duration::from_secs(3));
            restart = restart.excuses_overlap(at_once);
            settings = settings.excuses_overlap(at_once);
            hostile = hostile.excuses_overlap(at_once);
            session = session.excuses_overlap(AT_RENEWAL);
        }
        let mut harms = vec![
            Harm::<Self>::new(fault("pause"), |it, _| it.primary.process().pause())
                .healed(|it, _| it.primary.process().resume()),
            Harm::<Self>::new(restart, |it, _| it.primary.process().kill().map(drop))
                .healed(|it, _| it.primary.start_again()),
            Harm::<Self>::new(session, |it, blow| {
                let ids = connections(&it.primary)?;
                if let Some(id) = ids.get(blow.place() % ids.len().max(1)) {
                    // It may have ended meanwhile.
                    let _ = run(it.primary.addr(), &format!("KILL {id}"));
                }
                Ok(())
            }),
            // A planned change of roles: the old primary is demoted, its connections stay.
            Harm::<Self>::new(switch, |it, blow| {
                run(it.primary.addr(), "SET GLOBAL read_only = 1")?;
                for way in blow.ways {
                    way.set_upstream(it.successor.addr());
                }
                Ok(())
            })
            .healed(|it, blow| {
                for way in blow.ways {
                    way.set_upstream(it.primary.addr());
                    way.reset();
                }
                run(it.primary.addr(), "SET GLOBAL read_only = 0").map(drop)
            }),
            Harm::<Self>::new(clock, |it, blow| match blow.place() {
                0 => it.clock.forward(blow.step()),
                _ => it.clock.back(blow.step()),
            })
            .healed(|it, blow| match blow.place() {
                0 => it.clock.back(blow.step()),
                _ => it.clock.forward(blow.step()),
            }),
            Harm::<Self>::new(settings, |it, blow| it.restart_with(&it.settings(blow.place())))
                .healed(|it, _| it.restart_with(&[])),
            Harm::<Self>::new(hostile, |it, blow| it.begin_with(HOSTILE[blow.place()], blow))
                .healed(|it, blow| it.begin_with("", blow)),
        ];
        if self.lease {
            // Forward it stays: set back again, it would keep the leases of the dead for an hour. Back it is set right.
            let hour = fault("hour").places(2).later().excuses_overlap(AT_RENEWAL);
            let hour = hour.recovery(Duration::from_secs(20));
            let strike = |it: &Self, blow: Blow<'_>| match blow.place() {
                0 => it.clock.forward(HOUR),
                _ => it.clock.back(HOUR),
            };
            harms.push(
                Harm::<Self>::new(hour, strike).healed(|it, blow| match blow.place() {
                    0 => Ok(()),
                    _ => it.clock.forward(HOUR),
                }),
            );
        }
        harms
    }

    fn left(&self) -> io::Result<Vec<String>> {
        Ok([left_at(&self.primary)?, left_at(&self.successor)?].concat())
    }
}
