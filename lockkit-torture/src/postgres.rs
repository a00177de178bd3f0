//! PostgreSQL, and a standby that takes its place.

use std::{
    io,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockkit::LockClient;
use lockkit_conformance::torture::{Fault, Told};
use lockkit_testbed::{Clock, postgres::PgServer};

use crate::deployment::{Harm, Servers};

/// A primary, and its standby.
#[derive(Debug)]
pub struct Database {
    /// The primary.
    pub primary: PgServer,
    /// A new one when the one before has taken the primary's place.
    standby: Mutex<PgServer>,
    clock: Clock,
}

/// A session that ends frees its locks at once, and its client is told as soon as it looks at the connection.
const AT_ONCE: Told = Told::Within(Duration::from_secs(2));

/// What an operator may have all sessions begin with.
const HOSTILE: [&str; 7] = [
    "statement_timeout=300",
    "lock_timeout=300",
    "idle_session_timeout=300",
    "idle_in_transaction_session_timeout=300",
    "default_transaction_isolation='serializable'",
    "default_transaction_deferrable=on",
    "search_path='elsewhere'",
];

impl Database {
    /// Starts both.
    ///
    /// # Errors
    /// If one does not come up.
    pub fn start() -> io::Result<Self> {
        let clock = Clock::new()?;
        let primary = PgServer::builder().clock(&clock).start()?;
        let standby = Mutex::new(PgServer::builder().standby_of(&primary)?);
        Ok(Self {
            primary,
            standby,
            clock,
        })
    }

    /// The standby, or what is primary in the place of one that is down.
    pub fn standby(&self) -> MutexGuard<'_, PgServer> {
        self.standby.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The process ids of the role's sessions.
///
/// # Errors
/// If the server does not answer.
pub fn sessions(server: &PgServer) -> io::Result<Vec<String>> {
    let user = PgServer::USER;
    let sql = format!("SELECT pid FROM pg_stat_activity WHERE usename = '{user}' ORDER BY pid");
    lines(server, &sql)
}

fn lines(server: &PgServer, sql: &str) -> io::Result<Vec<String>> {
    Ok(server.sql(sql)?.lines().map(str::to_owned).collect())
}

/// Sessions, locks, and tables that nobody documents. The rows in the schema say who holds, and are believed only of sessions that
/// are there.
fn left_at(server: &PgServer) -> io::Result<Vec<String>> {
    let (port, mut left) = (server.addr().port(), Vec::new());
    for pid in sessions(server)? {
        left.push(format!("at {port} the session {pid}"));
    }
    // They outlive no session, or so it should be.
    let sql = "SELECT classid, objid, pid FROM pg_locks WHERE locktype = 'advisory'";
    for lock in lines(server, sql)? {
        left.push(format!("at {port} the lock {lock}"));
    }
    let sql = "SELECT schemaname || '.' || tablename FROM pg_tables \
               WHERE schemaname NOT IN ('pg_catalog', 'information_schema', 'lockkit')";
    for table in lines(server, sql)? {
        left.push(format!("at {port} the table {table}"));
    }
    Ok(left)
}

impl Servers for Database {
    const GROUPS: usize = 3;
    const RECOVERY: Duration = Duration::from_secs(10);

    fn addrs(&self) -> Vec<SocketAddr> {
        vec![self.primary.addr()]
    }

    fn url(&self, addrs: &[SocketAddr]) -> String {
        PgServer::url_at(addrs[0])
    }

    fn shows_late(&self) -> bool {
        true
    }

    fn of_a_way(&self, fault: Fault) -> Fault {
        match fault.name {
            "reset" | "refuse" | "lose" => fault.excuses_overlap(AT_ONCE),
            // Its client hears nothing of that.
            "silence" => fault.excuses_overlap(Told::AtLeaseEnd(Duration::from_secs(1))),
            _ => fault,
        }
    }

    /// A waiting statement has no limit of the server's, and its connection stands while its process is stopped. So a writer that waits
    /// among readers keeps new ones out until it goes on: for no longer than an epoch.
    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        client.dead_holder_bound(ttl).max(Duration::from_secs(50))
    }

    fn harms(&self) -> Vec<Harm<Self>> {
        let fault = |name| Fault::new(name).recovery(Self::RECOVERY);
        let costs = |name| fault(name).excuses_overlap(Told::Within(Duration::from_secs(3)));
        vec![
            Harm::<Self>::new(fault("pause"), |it, _| it.primary.pause()).healed(|it, _| it.primary.resume()),
            Harm::<Self>::new(costs("restart"), |it, _| it.primary.kill()).healed(|it, _| it.primary.start()),
            // One process is killed, and the server ends all sessions and recovers by itself.
            Harm::<Self>::new(costs("crash").places(8).weight(2), |it, blow| {
                let pids = sessions(&it.primary)?;
                if let Some(pid) = pids.get(blow.place() % pids.len().max(1)) {
                    // It may have ended meanwhile.
                    let _ = it.primary.kill_process(pid.parse().map_err(io::Error::other)?);
                }
                it.primary.wait_ready()
            }),
            Harm::<Self>::new(costs("session").places(8).weight(3), |it, blow| {
                let pids = sessions(&it.primary)?;
                if let Some(pid) = pids.get(blow.place() % pids.len().max(1)) {
                    it.primary.sql(&format!("SELECT pg_terminate_backend({pid})"))?;
                }
                Ok(())
            }),
            // The primary dies, the standby takes its place; in the end it is the other way round.
            Harm::<Self>::new(costs("failover").lasting().weight(3), |it, blow| {
                it.primary.kill()?;
                let standby = it.standby();
                standby.promote()?;
                for way in blow.ways {
                    way.set_upstream(standby.addr());
                    way.reset();
                }
                Ok(())
            })
            .healed(|it, blow| {
                let mut standby = it.standby();
                standby.kill()?;
                it.primary.start()?;
                for way in blow.ways {
                    way.set_upstream(it.primary.addr());
                    way.reset();
                }
                *standby = PgServer::builder().standby_of(&it.primary)?;
                Ok(())
            }),
            // It comes back, and all sessions of the role begin with settings that are bad for them.
            Harm::<Self>::new(costs("settings").later(), |it, _| {
                let role = PgServer::USER;
                for setting in HOSTILE {
                    it.primary.sql(&format!("ALTER ROLE {role} SET {setting}"))?;
                }
                it.primary.kill()?;
                it.primary.start()
            })
            .healed(|it, _| {
                let role = PgServer::USER;
                it.primary.sql(&format!("ALTER ROLE {role} RESET ALL")).map(drop)
            }),
            // It counts silence by its time of day, and sets the next alarm when the one before is over.
            Harm::<Self>::new(
                costs("clock").places(2).recovery(Duration::from_secs(20)),
                |it, blow| match blow.place() {
                    0 => it.clock.forward(blow.step()),
                    _ => it.clock.back(blow.step()),
                },
            )
            .healed(|it, _| it.clock.reset()),
        ]
    }

    fn left(&self) -> io::Result<Vec<String>> {
        left_at(&self.primary)
    }
}
