//! A connection that holds no lock: it reserves tokens, kills sessions, and inspects.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use lockkit_core::{Error, Result};
use sqlx::mysql::MySqlConnectOptions;
use tokio::{runtime::Handle, sync::Mutex};

use crate::{
    Mode, NAME, Schema,
    connection::{Reply, ResumableConnection, column},
    error::{self, During, code},
    row_sql, schema,
    server::{self, Server},
};

/// An expression that identifies the server. Two sessions in which it differs do not share row locks.
pub(crate) const SERVER_IDENTITY: &str = "CONCAT_WS('/', @@hostname, @@port, @@server_id)";

/// The prefix of the server lock that this connection has on MariaDB and never releases; its id follows. A session that asks
/// for that lock sleeps until its own time-out.
pub(crate) const TIMER_LOCK: &str = "lockkit-timer:";

/// The end of a `SET SESSION` after which the server ends no statement early.
pub(crate) const NO_STATEMENT_LIMIT: &str =
    "/*M!100600 , max_statement_time=0 */ /*!80000 , max_execution_time=0 */";

/// A connection is dead if a reply takes longer. All its statements are short.
const DEAD_AFTER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Control {
    options: Options,
    /// The kind of lock, which decides what the server has to be relied on for.
    mode: Mode,
    state: Mutex<State>,
    /// The number of the latest epoch.
    latest: AtomicU64,
}

/// The server's address, and the runtime of all connections. Its `Debug` form leaves out the password.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) connect: MySqlConnectOptions,
    pub(crate) runtime: Handle,
}

#[derive(Debug, Default)]
struct State {
    connection: Option<ResumableConnection>,
    epoch: Epoch,
    server: Option<Server>,
}

/// The life of one control connection. While it lasts, the server has not restarted, and the id of a session that began in it
/// means that session and no other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch {
    pub(crate) number: u64,
    /// The server's identity.
    pub(crate) server: String,
    /// The id of the control connection's own session.
    pub(crate) session: u64,
}

/// A session whose connection was closed, and that has to be killed.
#[derive(Clone, Debug)]
pub(crate) struct AbandonedSession {
    pub(crate) id: u64,
    /// The epoch of the id.
    pub(crate) epoch: Epoch,
    /// The server lock that this session alone ever had.
    pub(crate) marker: String,
}

/// The outcome of a `KILL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KillOutcome {
    /// The session was there.
    Killed,
    /// The session had ended before.
    NotFound,
    /// Nothing was sent, or nothing found: the id may be another session's by now.
    Unknown,
}

impl Control {
    pub(crate) fn new(options: Options, mode: Mode) -> Self {
        Self {
            options,
            mode,
            state: Mutex::default(),
            latest: AtomicU64::new(0),
        }
    }

    /// Connects unless connected.
    pub(crate) async fn connect(&self, operation: &'static str) -> Result<(Epoch, Server)> {
        self.open(&mut *self.state.lock().await, operation).await
    }

    /// True if `epoch` is the latest.
    pub(crate) fn is_current(&self, epoch: &Epoch) -> bool {
        self.latest.load(Ordering::Relaxed) == epoch.number
    }

    /// Runs `sql`, each of its statements in a transaction of its own. Runs it again on a new connection if the existing one
    /// has ended, so it has to be harmless twice.
    pub(crate) async fn query(&self, operation: &'static str, sql: String) -> Result<Reply> {
        let mut state = self.state.lock().await;
        let was_connected = state.connection.is_some();
        self.open(&mut state, operation).await?;
        match state.query(sql.clone()).await {
            Err(error) if was_connected && error::ends_the_session(&error) => {
                self.open(&mut state, operation).await?;
                state.query(sql).await
            }
            reply => reply,
        }
        .during(operation)
    }

    /// Runs `sql` once at most.
    ///
    /// # Errors
    /// Also if there was no reply.
    pub(crate) async fn query_once(&self, operation: &'static str, sql: String) -> Result<Reply> {
        let mut state = self.state.lock().await;
        self.open(&mut state, operation).await?;
        state.query(sql).await.during(operation)
    }

    /// Runs `sql` once at most, and only over the connection of `epoch`. Returns `None` if that has ended.
    pub(crate) async fn query_in(
        &self,
        operation: &'static str,
        sql: String,
        epoch: &Epoch,
    ) -> Result<Option<Reply>> {
        let mut state = self.state.lock().await;
        if !state.is_in(epoch) {
            return Ok(None);
        }
        match state.query(sql).await {
            Err(_) if state.connection.is_none() => Ok(None),
            reply => reply.map(Some).during(operation),
        }
    }

    /// Gives the current life of the server a number, which is valid for as long as this connection lasts.
    pub(crate) async fn begin_life(&self, operation: &'static str) -> Result<u64> {
        let reply = self.query(operation, row_sql::begin_life()).await?;
        let row = reply.last().first().ok_or(sqlx::Error::RowNotFound);
        let row = row.during(operation)?;
        let life: u64 = column(row, 0).during(operation)?;
        let is_marked: Option<u64> = column(row, 1).during(operation)?;
        if reply.affected(1) == 1 && is_marked == Some(1) {
            return Ok(life);
        }
        // Otherwise it would take any number for one that was given.
        let what = "this life of the server has no number: the row without a name is missing in lockkit_fence, or was deleted \
                    just now";
        Err(Error::transient(NAME, operation, what))
    }

    /// Creates or checks the tables.
    pub(crate) async fn prepare(&self, mode: Mode, schema: Schema) -> Result<()> {
        let mut state = self.state.lock().await;
        self.open(&mut state, "connect").await?;
        match &mut state.connection {
            Some(connection) => schema::prepare(connection, mode, schema).await,
            None => Err(Error::transient(NAME, "connect", "the connection has ended")),
        }
    }

    /// Returns those of these sessions that the server still has. Returns none if this connection has ended, since the ids mean
    /// nothing without it. Returns `None` if it is in use.
    pub(crate) async fn alive_among(&self, ids: &[u64]) -> Option<Vec<u64>> {
        let mut state = self.state.try_lock().ok()?;
        if state.is_dead() {
            state.connection = None;
        }
        if state.connection.is_none() {
            return Some(Vec::new());
        }
        let question = if ids.is_empty() {
            "DO 0".to_owned()
        } else {
            let ids: Vec<_> = ids.iter().map(u64::to_string).collect();
            format!(
                "SELECT ID FROM information_schema.PROCESSLIST WHERE ID IN ({})",
                ids.join(", ")
            )
        };
        let Ok(reply) = state.query(question).await else {
            return state.connection.is_none().then(Vec::new);
        };
        reply.last().iter().map(|row| column(row, 0).ok()).collect()
    }

    /// Kills the session that has this id in `epoch`, unless the id may be another's.
    pub(crate) async fn kill(&self, operation: &'static str, id: u64, epoch: &Epoch) -> Result<KillOutcome> {
        self.kill_in(operation, format!("KILL {id}"), epoch).await
    }

    /// Interrupts the statement of the session that has this id in `epoch`, unless the id may be another's.
    pub(crate) async fn interrupt(
        &self,
        operation: &'static str,
        id: u64,
        epoch: &Epoch,
    ) -> Result<KillOutcome> {
        self.kill_in(operation, format!("KILL QUERY {id}"), epoch).await
    }

    /// Kills an abandoned session: by its id, or by its marker if the id may be another's. A session without that marker may be
    /// at another server.
    pub(crate) async fn kill_abandoned(
        &self,
        operation: &'static str,
        session: &AbandonedSession,
    ) -> Result<KillOutcome> {
        match self.kill(operation, session.id, &session.epoch).await {
            Ok(KillOutcome::Unknown) => {}
            // This connection has ended too, and the next one does not know the id.
            Err(error) if error.is_transient() => {}
            known => return known,
        }
        let kill = format!("KILL IS_USED_LOCK('{}')", session.marker);
        match self.kill_matching(operation, kill).await? {
            KillOutcome::Killed => Ok(KillOutcome::Killed),
            _ => Ok(KillOutcome::Unknown),
        }
    }

    async fn kill_in(&self, operation: &'static str, kill: String, epoch: &Epoch) -> Result<KillOutcome> {
        let mut state = self.state.lock().await;
        if !state.is_in(epoch) {
            return Ok(KillOutcome::Unknown);
        }
        state.kill(operation, kill).await
    }

    /// Kills by a request that finds the session itself, once at most.
    ///
    /// # Errors
    /// Also if there was no reply.
    pub(crate) async fn kill_matching(&self, operation: &'static str, kill: String) -> Result<KillOutcome> {
        let mut state = self.state.lock().await;
        self.open(&mut state, operation).await?;
        state.kill(operation, kill).await
    }

    async fn open(&self, state: &mut State, operation: &'static str) -> Result<(Epoch, Server)> {
        if state.is_dead()
            || state
                .connection
                .as_ref()
                .is_some_and(ResumableConnection::is_closed)
        {
            state.connection = None;
        }
        if let (Some(_), Some(server)) = (&state.connection, state.server) {
            return Ok((state.epoch.clone(), server));
        }
        let mut connection = ResumableConnection::open(&self.options).await.during(operation)?;
        let setup = format!(
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; \
             SET SESSION autocommit=1, completion_type=0, wait_timeout=86400, innodb_lock_wait_timeout=2, \
             lock_wait_timeout=2 {NO_STATEMENT_LIMIT}; \
             SELECT {SERVER_IDENTITY}, CONNECTION_ID() /*M!100600 , GET_LOCK(CONCAT('{TIMER_LOCK}', CONNECTION_ID()), 0) */; {}",
            server::SETTINGS
        );
        let reply = connection.query(setup).await.during(operation)?;
        let row = reply.row(2).ok_or(sqlx::Error::RowNotFound).during(operation)?;
        let epoch = Epoch {
            number: state.epoch.number + 1,
            server: column(row, 0).during(operation)?,
            session: column(row, 1).during(operation)?,
        };
        let server = Server::read(&reply, self.mode)?;
        self.latest.store(epoch.number, Ordering::Relaxed);
        *state = State {
            connection: Some(connection),
            epoch: epoch.clone(),
            server: Some(server),
        };
        Ok((epoch, server))
    }

    pub(crate) async fn close(&self) {
        let connection = self.state.lock().await.connection.take();
        if let Some(connection) = connection {
            connection.quit().await;
        }
    }
}

impl State {
    fn is_in(&self, epoch: &Epoch) -> bool {
        self.connection.is_some() && self.epoch == *epoch && !self.is_dead()
    }

    fn is_dead(&self) -> bool {
        self.connection
            .as_ref()
            .is_some_and(|connection| connection.is_overdue(DEAD_AFTER))
    }

    async fn kill(&mut self, operation: &'static str, kill: String) -> Result<KillOutcome> {
        match self.query(kill).await {
            Err(error) if error::number(&error) == Some(code::NO_SUCH_THREAD) => Ok(KillOutcome::NotFound),
            reply => reply.map(|_| KillOutcome::Killed).during(operation),
        }
    }

    async fn query(&mut self, sql: String) -> sqlx::Result<Reply> {
        let Some(connection) = &mut self.connection else {
            return Err(sqlx::Error::WorkerCrashed);
        };
        let reply = connection.query(sql).await;
        if connection.is_closed() {
            self.connection = None;
        }
        reply
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let options = &self.connect;
        write!(f, "Options({}:{})", options.get_host(), options.get_port())
    }
}
