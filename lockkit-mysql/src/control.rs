//! The one connection of a backend that holds no lock: it reserves tokens, ends sessions, and looks.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use lockkit_core::{Error, Result};
use sqlx::mysql::MySqlConnectOptions;
use tokio::{runtime::Handle, sync::Mutex};

use crate::{
    Mode, NAME, fault,
    server::{self, Server},
    sql,
    wire::{Reply, Wire, column},
};

/// What says which server answered. Two sessions with different answers do not share row locks.
pub(crate) const IDENTITY: &str = "CONCAT_WS('/', @@hostname, @@port, @@server_id)";

/// What the name of a lock of the server's own begins with that this connection has on MariaDB, and never gives up: before
/// its id. Whoever asks for that lock waits for as long as it likes.
pub(crate) const NIGHT: &str = "lockkit-night:";

/// The end of a `SET SESSION` after which the server ends no statement early.
pub(crate) const UNLIMITED: &str = "/*M!100600 , max_statement_time=0 */ /*!80000 , max_execution_time=0 */";

/// A statement that has not been answered for so long never will be: all of them are short.
const HUNG: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Control {
    options: Options,
    /// The kind of lock, which says what the server is relied on for.
    mode: Mode,
    link: Mutex<Link>,
    /// The number of the latest term.
    latest: AtomicU64,
}

/// How to connect, and the runtime that connections live on. Without the password in its `Debug` form.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) connect: MySqlConnectOptions,
    pub(crate) runtime: Handle,
}

#[derive(Debug, Default)]
struct Link {
    wire: Option<Wire>,
    term: Term,
    server: Option<Server>,
}

/// One life of the control connection. While it lasts, the server has not restarted, and an id of a session that was
/// begun in it means that session and no other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Term {
    pub(crate) number: u64,
    pub(crate) server: String,
    /// The id of the control connection itself.
    pub(crate) session: u64,
}

/// A session that has been given up, and has to be ended.
#[derive(Clone, Debug)]
pub(crate) struct GivenUp {
    pub(crate) id: u64,
    /// The term in which that id means it.
    pub(crate) term: Term,
    /// The lock of the server's own that it has.
    pub(crate) mark: String,
}

/// What came of ending a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Killed {
    /// It was there.
    Now,
    /// It had ended before.
    Before,
    /// Its id may be another's by now.
    Unknown,
}

impl Control {
    pub(crate) fn new(options: Options, mode: Mode) -> Self {
        Self {
            options,
            mode,
            link: Mutex::default(),
            latest: AtomicU64::new(0),
        }
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    /// Sees to it that the connection is open.
    pub(crate) async fn term(&self, operation: &'static str) -> Result<(Term, Server)> {
        self.open(&mut *self.link.lock().await, operation).await
    }

    /// Whether `term` is the latest there was.
    pub(crate) fn is_latest(&self, term: &Term) -> bool {
        self.latest.load(Ordering::Relaxed) == term.number
    }

    /// Runs `sql`, each of its statements a transaction of its own, on a new connection if the one there was has
    /// ended. It has to be harmless if run twice.
    pub(crate) async fn ask(&self, operation: &'static str, sql: String) -> Result<Reply> {
        let mut link = self.link.lock().await;
        let kept = link.wire.is_some();
        self.open(&mut link, operation).await?;
        match link.ask(sql.clone()).await {
            Err(error) if kept && fault::ends_the_session(&error) => {
                self.open(&mut link, operation).await?;
                link.ask(sql).await
            }
            answer => answer,
        }
        .map_err(|error| fault::error(operation, error))
    }

    /// The same, and once at most: an error if it was not answered.
    pub(crate) async fn ask_once(&self, operation: &'static str, sql: String) -> Result<Reply> {
        let mut link = self.link.lock().await;
        self.open(&mut link, operation).await?;
        link.ask(sql)
            .await
            .map_err(|error| fault::error(operation, error))
    }

    /// The same, once at most and if this is still the connection of `term`: `None` if it is not, or has ended.
    pub(crate) async fn ask_in(
        &self,
        operation: &'static str,
        sql: String,
        term: &Term,
    ) -> Result<Option<Reply>> {
        let mut link = self.link.lock().await;
        if !link.is_of(term) {
            return Ok(None);
        }
        match link.ask(sql).await {
            Ok(reply) => Ok(Some(reply)),
            Err(_) if link.wire.is_none() => Ok(None),
            Err(error) => Err(fault::error(operation, error)),
        }
    }

    /// Numbers the life that the server is in, for as long as this connection lasts.
    pub(crate) async fn begin_life(&self, operation: &'static str) -> Result<u64> {
        let reply = self.ask(operation, sql::begin_life()).await?;
        let during = |error| fault::error(operation, error);
        let row = reply.last().first().ok_or(sqlx::Error::RowNotFound);
        let row = row.map_err(during)?;
        let (life, is_marked): (u64, Option<u64>) =
            (column(row, 0).map_err(during)?, column(row, 1).map_err(during)?);
        if reply.affected(1) == 1 && is_marked == Some(1) {
            return Ok(life);
        }
        // Any number would be taken for one that was given.
        let what = "this life of the server has no number: the row without a name is missing in lockkit_fence, or was deleted \
                    just now";
        Err(Error::transient(NAME, operation, what))
    }

    /// Makes the tables, or looks at them.
    pub(crate) async fn prepare(&self, mode: crate::Mode, schema: crate::Schema) -> Result<()> {
        let mut link = self.link.lock().await;
        self.open(&mut link, "connect").await?;
        match &mut link.wire {
            Some(wire) => crate::schema::prepare(wire, mode, schema).await,
            None => Err(Error::transient(NAME, "connect", "the connection has ended")),
        }
    }

    /// Those of these sessions that the server still has: none if this connection has ended, without which their ids mean
    /// nothing. `None` if it is in use.
    pub(crate) async fn living(&self, ids: &[u64]) -> Option<Vec<u64>> {
        let mut link = self.link.try_lock().ok()?;
        if link.is_hung() {
            link.wire = None;
        }
        if link.wire.is_none() {
            return Some(Vec::new());
        }
        let look = if ids.is_empty() {
            "DO 0".to_owned()
        } else {
            let ids: Vec<_> = ids.iter().map(u64::to_string).collect();
            format!(
                "SELECT ID FROM information_schema.PROCESSLIST WHERE ID IN ({})",
                ids.join(", ")
            )
        };
        let Ok(reply) = link.ask(look).await else {
            return link.wire.is_none().then(Vec::new);
        };
        reply.last().iter().map(|row| column(row, 0).ok()).collect()
    }

    /// Ends the session of this id that was begun in `term`, if that can be said without fear of hitting another.
    pub(crate) async fn kill(&self, operation: &'static str, id: u64, term: &Term) -> Result<Killed> {
        self.end(operation, format!("KILL {id}"), term).await
    }

    /// Ends what the session of this id is at, on the same terms.
    pub(crate) async fn interrupt(&self, operation: &'static str, id: u64, term: &Term) -> Result<Killed> {
        self.end(operation, format!("KILL QUERY {id}"), term).await
    }

    /// Ends one that has been given up, by its mark if its id may be another's by now. What is not found so may be at another server.
    pub(crate) async fn end_given_up(&self, operation: &'static str, session: &GivenUp) -> Result<Killed> {
        match self.kill(operation, session.id, &session.term).await {
            Ok(Killed::Unknown) => {}
            // This connection had ended too, and the next does not know whom the id means.
            Err(error) if error.is_transient() => {}
            known => return known,
        }
        let kill = format!("KILL IS_USED_LOCK('{}')", session.mark);
        match self.kill_by(operation, kill).await? {
            Killed::Now => Ok(Killed::Now),
            _ => Ok(Killed::Unknown),
        }
    }

    async fn end(&self, operation: &'static str, kill: String, term: &Term) -> Result<Killed> {
        let mut link = self.link.lock().await;
        if !link.is_of(term) {
            return Ok(Killed::Unknown);
        }
        link.kill(operation, kill).await
    }

    /// Ends a session by a request that finds it by itself, once at most: an error if it was not answered.
    pub(crate) async fn kill_by(&self, operation: &'static str, kill: String) -> Result<Killed> {
        let mut link = self.link.lock().await;
        self.open(&mut link, operation).await?;
        link.kill(operation, kill).await
    }

    async fn open(&self, link: &mut Link, operation: &'static str) -> Result<(Term, Server)> {
        let opened = link.open(&self.options, self.mode, operation).await?;
        self.latest.store(opened.0.number, Ordering::Relaxed);
        Ok(opened)
    }

    pub(crate) async fn close(&self) {
        let wire = self.link.lock().await.wire.take();
        if let Some(wire) = wire {
            wire.quit().await;
        }
    }
}

impl Link {
    fn is_of(&self, term: &Term) -> bool {
        self.wire.is_some() && self.term == *term && !self.is_hung()
    }

    fn is_hung(&self) -> bool {
        self.wire.as_ref().is_some_and(|wire| wire.is_overdue(HUNG))
    }

    async fn open(
        &mut self,
        options: &Options,
        mode: Mode,
        operation: &'static str,
    ) -> Result<(Term, Server)> {
        if self.is_hung() || self.wire.as_ref().is_some_and(Wire::is_closed) {
            self.wire = None;
        }
        if let (Some(_), Some(server)) = (&self.wire, self.server) {
            return Ok((self.term.clone(), server));
        }
        let during = |error| fault::error(operation, error);
        let mut wire = Wire::open(options).await.map_err(during)?;
        let setup = format!(
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; \
             SET SESSION autocommit=1, completion_type=0, wait_timeout=86400, innodb_lock_wait_timeout=2, \
             lock_wait_timeout=2 {UNLIMITED}; \
             SELECT {IDENTITY}, CONNECTION_ID() /*M!100600 , GET_LOCK(CONCAT('{NIGHT}', CONNECTION_ID()), 0) */; {}",
            server::QUESTION
        );
        let reply = wire.ask(setup).await.map_err(during)?;
        let row = reply.row(2).ok_or(sqlx::Error::RowNotFound).map_err(during)?;
        let (identity, session) = (column(row, 0).map_err(during)?, column(row, 1).map_err(during)?);
        let server = Server::read(&reply, mode)?;
        self.term = Term {
            number: self.term.number + 1,
            server: identity,
            session,
        };
        self.server = Some(server);
        self.wire = Some(wire);
        Ok((self.term.clone(), server))
    }

    async fn kill(&mut self, operation: &'static str, kill: String) -> Result<Killed> {
        match self.ask(kill).await {
            Ok(_) => Ok(Killed::Now),
            Err(error) if fault::number(&error) == Some(fault::code::NO_SUCH_THREAD) => Ok(Killed::Before),
            Err(error) => Err(fault::error(operation, error)),
        }
    }

    async fn ask(&mut self, sql: String) -> sqlx::Result<Reply> {
        let Some(wire) = &mut self.wire else {
            return Err(sqlx::Error::WorkerCrashed);
        };
        let answer = wire.ask(sql).await;
        if wire.is_closed() {
            self.wire = None;
        }
        answer
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let options = &self.connect;
        write!(f, "Options({}:{})", options.get_host(), options.get_port())
    }
}
