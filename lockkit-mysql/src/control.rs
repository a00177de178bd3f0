//! A connection that holds no lock: it reserves tokens, kills sessions, and inspects.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    Error, Result,
    spi::{chain, resumable},
};
use sqlx::mysql::MySqlConnectOptions;
use tokio::{
    runtime::Handle,
    sync::{Mutex, OwnedMutexGuard},
    time::timeout,
};

use crate::{
    Mode, NAME, Schema,
    connection::{Reply, ResumableConnection, column},
    error::{self, During, code},
    lease_sql, random,
    relay::Route,
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

/// The variables that every session sets, at the beginning of a `SET SESSION`: an operator or an `init_connect` may have set them for all.
/// `DEFAULT` would be the server's own setting, but for the clock. The client library has set the character set and the time zone.
pub(crate) const COMMON_SETTINGS: &str = "sql_mode='STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', timestamp=DEFAULT, \
     sql_select_limit=18446744073709551615, sql_safe_updates=0, sql_big_selects=1, div_precision_increment=4, \
     completion_type=0, lock_wait_timeout=2";

/// A connection is dead if a reply takes longer. All its statements are short.
const DEAD_AFTER: Duration = Duration::from_secs(5);

/// The time after which work ends that has no reply, whatever `op_timeout` allows. Where nobody polls it, all others would wait for its
/// connection for as long as that seems to be there. The next one finds it dead.
const ENDS_AFTER: Duration = Duration::from_secs(30);

/// All work with the connection is done in tasks of the client's runtime: an inspection that nobody polls for a while would otherwise keep the
/// connection from all others.
#[derive(Debug)]
pub(crate) struct Control {
    runtime: Handle,
    state: Arc<Mutex<State>>,
    /// The number of the latest epoch.
    latest: Arc<AtomicU64>,
}

/// The server's address, and the runtime of all connections. Its `Debug` form leaves out the password.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) connect: MySqlConnectOptions,
    /// The way to the server.
    pub(crate) route: Route,
    pub(crate) runtime: Handle,
}

#[derive(Debug)]
struct State {
    options: Options,
    /// The kind of lock, which decides what the server has to be relied on for.
    mode: Mode,
    connection: Option<ResumableConnection>,
    epoch: Epoch,
    latest: Arc<AtomicU64>,
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
        let (runtime, latest) = (options.runtime.clone(), Arc::<AtomicU64>::default());
        let state = State {
            options,
            mode,
            connection: None,
            epoch: Epoch::default(),
            latest: latest.clone(),
            server: None,
        };
        Self {
            runtime,
            state: Arc::new(Mutex::new(state)),
            latest,
        }
    }

    /// Works with the connection in a task. Fails if the client's runtime is gone, or if it takes too long.
    async fn with<T, W>(
        &self,
        operation: &'static str,
        work: impl FnOnce(OwnedMutexGuard<State>) -> W + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        W: Future<Output = Result<T>> + Send,
    {
        let state = self.state.clone();
        let work = async move {
            let working = work(state.lock_owned().await);
            let done = timeout(ENDS_AFTER, working).await;
            done.unwrap_or_else(|_| {
                let what = format!("no reply within {ENDS_AFTER:?}");
                Err(Error::transient(NAME, operation, what))
            })
        };
        resumable::on_runtime(NAME, operation, work, &self.runtime).await?
    }

    /// Connects unless connected.
    pub(crate) async fn connect(&self, operation: &'static str) -> Result<(Epoch, Server)> {
        self.with(operation, async move |mut state| state.open(operation).await)
            .await
    }

    /// True if `epoch` is the latest.
    pub(crate) fn is_current(&self, epoch: &Epoch) -> bool {
        self.latest.load(Ordering::Relaxed) == epoch.number
    }

    /// Runs `sql`, each of its statements in a transaction of its own. Runs it again on a new connection if the existing one
    /// has ended, so it has to be harmless twice.
    pub(crate) async fn query(&self, operation: &'static str, sql: String) -> Result<Reply> {
        let work = async move |mut state: OwnedMutexGuard<State>| {
            let was_connected = state.connection.is_some();
            state.open(operation).await?;
            match state.query(sql.clone()).await {
                Err(error) if was_connected && error::ends_the_session(&error) => {
                    state.open(operation).await?;
                    state.query(sql).await
                }
                reply => reply,
            }
            .during(operation)
        };
        self.with(operation, work).await
    }

    /// Runs `sql`, which changes nothing, in the same way, and fails at a server that is read-only by then: a primary that was
    /// demoted keeps its connections, and does not know what is held at the next one. The next request connects anew.
    pub(crate) async fn read(&self, operation: &'static str, sql: String) -> Result<Reply> {
        let sql = format!("{sql}; {}", row_sql::proof());
        let mut reply = self.query(operation, sql).await?;
        if server::says_read_only(&reply) {
            let disconnect = async move |mut state: OwnedMutexGuard<State>| {
                state.connection = None;
                Ok(())
            };
            self.with(operation, disconnect).await?;
            return Err(server::read_only(operation, "read_only"));
        }
        reply.drop_last();
        Ok(reply)
    }

    /// Runs `sql` once at most.
    ///
    /// # Errors
    /// Also if there was no reply.
    pub(crate) async fn query_once(&self, operation: &'static str, sql: String) -> Result<Reply> {
        let work = async move |mut state: OwnedMutexGuard<State>| {
            state.open(operation).await?;
            state.query(sql).await.during(operation)
        };
        self.with(operation, work).await
    }

    /// Runs `sql` once at most, and only over the connection of `epoch`. Returns `None` if that has ended.
    pub(crate) async fn query_in(
        &self,
        operation: &'static str,
        sql: String,
        epoch: &Epoch,
    ) -> Result<Option<Reply>> {
        let epoch = epoch.clone();
        let work = async move |mut state: OwnedMutexGuard<State>| {
            if !state.is_in(&epoch) {
                return Ok(None);
            }
            match state.query(sql).await {
                Err(_) if state.connection.is_none() => Ok(None),
                reply => reply.map(Some).during(operation),
            }
        };
        self.with(operation, work).await
    }

    /// Gives the current life of the server a number, which is valid for as long as this connection lasts.
    pub(crate) async fn begin_life(&self, operation: &'static str) -> Result<u64> {
        let secret = u64::from_le_bytes(random(operation)?);
        let bits = u32::from_le_bytes(random(operation)?);
        let reply = self.query(operation, row_sql::begin_life(secret, bits)).await?;
        if let Some(row) = reply.last().first() {
            let life: u64 = column(row, 0).during(operation)?;
            let is_marked: Option<u64> = column(row, 1).during(operation)?;
            if reply.affected(2) == 1 && is_marked == Some(1) {
                return Ok(life);
            }
        }
        // Otherwise it would take any number for one that was given.
        let what = "this life of the server has no number: the row without a name is missing in lockkit_fence or lockkit_map, or \
                    was deleted just now";
        Err(Error::transient(NAME, operation, what))
    }

    /// Checks the tables, and creates missing ones if `schema` allows and `makes` is true. As [`query`](Self::query), it begins again on a
    /// new connection if the existing one has ended. Returns true if all are there then.
    pub(crate) async fn prepare(
        &self,
        operation: &'static str,
        mode: Mode,
        schema: Schema,
        makes: bool,
    ) -> Result<bool> {
        let work = async move |mut state: OwnedMutexGuard<State>| {
            let was_connected = state.connection.is_some();
            state.open(operation).await?;
            match state.prepare(operation, mode, schema, makes).await {
                Err(_) if was_connected && state.connection.is_none() => {
                    state.open(operation).await?;
                    state.prepare(operation, mode, schema, makes).await
                }
                prepared => prepared,
            }
        };
        self.with(operation, work).await
    }

    /// True if there is none of the tables in which locks are taken, so that nobody holds.
    ///
    /// # Errors
    /// Also for an account that may not read one of them: it is not told whether that is there.
    pub(crate) async fn is_unmade(&self, operation: &'static str, mode: Mode) -> Result<bool> {
        for table in schema::taken_in(mode) {
            match self
                .query(operation, format!("SELECT 1 FROM {table} LIMIT 0"))
                .await
            {
                Ok(_) => return Ok(false),
                Err(error) if error::lacks_a_table(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Reads the secret of which the names of the server's locks are made for waiters of leases. There is none before the first acquisition.
    pub(crate) async fn read_secret(&self, operation: &'static str) -> Result<Option<Vec<u8>>> {
        let reply = self.query(operation, lease_sql::READ_SECRET.to_owned()).await?;
        let secret = reply.last().first().map(|row| column(row, 0));
        secret.transpose().during(operation)
    }

    /// Reads that secret. Writes only if there is none.
    pub(crate) async fn secret(&self, operation: &'static str) -> Result<Vec<u8>> {
        if let Some(secret) = self.read_secret(operation).await? {
            return Ok(secret);
        }
        let reply = self.query(operation, lease_sql::make_secret(operation)?).await?;
        let row = reply.last().first().ok_or(sqlx::Error::RowNotFound);
        row.and_then(|row| column(row, 0)).during(operation)
    }

    /// Returns those of these sessions that the server still has. Returns none if this connection has ended, since the ids mean
    /// nothing without it. Returns `None` if it is in use.
    pub(crate) async fn alive_among(&self, ids: &[u64]) -> Option<Vec<u64>> {
        let mut state = self.state.clone().try_lock_owned().ok()?;
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
        let work = async move {
            let Ok(reply) = state.query(question).await else {
                return state.connection.is_none().then(Vec::new);
            };
            reply.last().iter().map(|row| column(row, 0).ok()).collect()
        };
        resumable::on_runtime(NAME, "maintain", work, &self.runtime)
            .await
            .ok()?
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

    /// Kills an abandoned session: by its id, or by its marker if the id may be another's. It is not found if it has ended before. At
    /// another server nobody knows of it.
    ///
    /// # Errors
    /// If it is not known to have ended: it may have a lock, or wait for one.
    pub(crate) async fn kill_abandoned(
        &self,
        operation: &'static str,
        session: &AbandonedSession,
    ) -> Result<KillOutcome> {
        let killed = match self.kill(operation, session.id, &session.epoch).await {
            Ok(KillOutcome::Unknown) => self.kill_by_marker(operation, session).await,
            // This connection has ended too, and the next one does not know the id.
            Err(error) if error.is_transient() => self.kill_by_marker(operation, session).await,
            known => known,
        };
        killed.map_err(|why| not_ended(operation, session.id, &why))
    }

    async fn kill_by_marker(
        &self,
        operation: &'static str,
        session: &AbandonedSession,
    ) -> Result<KillOutcome> {
        let AbandonedSession { marker, epoch, .. } = session.clone();
        let work = async move |mut state: OwnedMutexGuard<State>| {
            let (now, _) = state.open(operation).await?;
            let kill = format!("KILL IS_USED_LOCK('{marker}')");
            let killed = state.kill(operation, kill).await?;
            let is_elsewhere = killed == KillOutcome::NotFound && now.server != epoch.server;
            Ok(if is_elsewhere {
                KillOutcome::Unknown
            } else {
                killed
            })
        };
        self.with(operation, work).await
    }

    async fn kill_in(&self, operation: &'static str, kill: String, epoch: &Epoch) -> Result<KillOutcome> {
        let epoch = epoch.clone();
        let work = async move |mut state: OwnedMutexGuard<State>| {
            if !state.is_in(&epoch) {
                return Ok(KillOutcome::Unknown);
            }
            state.kill(operation, kill).await
        };
        self.with(operation, work).await
    }

    /// Kills by a request that finds the session itself, once at most.
    ///
    /// # Errors
    /// Also if there was no reply.
    pub(crate) async fn kill_matching(&self, operation: &'static str, kill: String) -> Result<KillOutcome> {
        let work = async move |mut state: OwnedMutexGuard<State>| {
            state.open(operation).await?;
            state.kill(operation, kill).await
        };
        self.with(operation, work).await
    }

    pub(crate) async fn close(&self) {
        let work = async move |mut state: OwnedMutexGuard<State>| {
            if let Some(connection) = state.connection.take() {
                connection.quit().await;
            }
            Ok(())
        };
        // Without its runtime it has ended.
        let _ = self.with("close", work).await;
    }
}

impl State {
    /// Connects unless connected.
    async fn open(&mut self, operation: &'static str) -> Result<(Epoch, Server)> {
        let is_closed = ResumableConnection::is_closed;
        if self.is_dead() || self.connection.as_ref().is_some_and(is_closed) {
            self.connection = None;
        }
        if let (Some(_), Some(server)) = (&self.connection, self.server) {
            return Ok((self.epoch.clone(), server));
        }
        let mut connection = ResumableConnection::open(operation, &self.options).await?;
        let setup = format!(
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; \
             SET SESSION {COMMON_SETTINGS}, autocommit=1, wait_timeout=86400, innodb_lock_wait_timeout=2 {NO_STATEMENT_LIMIT}; \
             SELECT {SERVER_IDENTITY}, CONNECTION_ID() /*M!100600 , GET_LOCK(CONCAT('{TIMER_LOCK}', CONNECTION_ID()), 0) */; {}",
            server::SETTINGS
        );
        let reply = connection.query(setup).await.during(operation)?;
        let row = reply.row(2).ok_or(sqlx::Error::RowNotFound).during(operation)?;
        let epoch = Epoch {
            number: self.epoch.number + 1,
            server: column(row, 0).during(operation)?,
            session: column(row, 1).during(operation)?,
        };
        let server = Server::read(operation, &reply, self.mode)?;
        self.latest.store(epoch.number, Ordering::Relaxed);
        self.connection = Some(connection);
        self.epoch = epoch.clone();
        self.server = Some(server);
        Ok((epoch, server))
    }

    fn is_in(&self, epoch: &Epoch) -> bool {
        self.connection.is_some() && self.epoch == *epoch && !self.is_dead()
    }

    fn is_dead(&self) -> bool {
        self.connection
            .as_ref()
            .is_some_and(|connection| connection.is_overdue(DEAD_AFTER))
    }

    async fn prepare(
        &mut self,
        operation: &'static str,
        mode: Mode,
        schema: Schema,
        makes: bool,
    ) -> Result<bool> {
        let Some(connection) = &mut self.connection else {
            return Err(sqlx::Error::WorkerCrashed).during(operation);
        };
        let prepared = schema::prepare(operation, connection, mode, schema, makes).await;
        if connection.is_closed() {
            self.connection = None;
        }
        prepared
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

/// The error for a session that could not be ended, for this reason.
fn not_ended(operation: &'static str, id: u64, why: &Error) -> Error {
    let cause = std::error::Error::source(why).map_or_else(|| chain(why), chain);
    let what = format!("session {id}, which may have the lock or wait for it, could not be ended: {cause}");
    if why.is_transient() {
        Error::transient(NAME, operation, what)
    } else {
        Error::permanent(NAME, operation, what)
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Options({}:{})", self.route.host, self.route.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MySqlConfig;

    #[tokio::test]
    async fn its_debug_form_has_the_address_and_no_password() {
        let config = MySqlConfig::new("mysql://me:canary@db.example:7000/app");
        let target = config.target().unwrap();
        let options = Options {
            connect: MySqlConfig::connect_options(&target),
            route: config.route(&target).unwrap(),
            runtime: Handle::current(),
        };
        assert_eq!(format!("{options:?}"), "Options(db.example:7000)");
    }
}
