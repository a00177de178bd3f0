//! Locks in MySQL and MariaDB.
//!
//! A lock is a row that a session of its own keeps locked (`SELECT … FOR UPDATE`), so it is as exclusive as the server's
//! row locks are, also against programs that know nothing of this library and lock that row themselves. The session's
//! `wait_timeout` is the lease: the server itself ends a holder that falls silent, in the middle of its transaction. A
//! holder's death frees the lock at once. Fencing tokens are reserved in blocks, apart from the transaction that holds, so
//! that no rollback takes them back; within a block they follow a counter of the server's that costs no write.
//!
//! ```no_run
//! use lockkit_core::LockClient;
//! use lockkit_mysql::{MySqlBackend, MySqlConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkit_core::Result<()> {
//! let config = MySqlConfig::new("mysql://app:s3cret@db.example/app");
//! let client = LockClient::new(MySqlBackend::connect(config).await?);
//! let guard = client.lock("orders/42")?.acquire().await?;
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```

mod alarm;
mod config;
mod control;
mod fault;
mod fenced;
mod inspect;
mod key;
mod lease;
mod names;
mod rows;
mod schema;
mod server;
mod session;
mod sql;
mod tokens;
mod wire;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Capabilities, Error, FencingToken, LockKind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Mode as Hold},
};

use tokio::task::JoinSet;

pub use config::{Mode, MySqlConfig, Schema, Tls};
pub use fenced::{FencedError, FencedTable};
pub use schema::ddl;
/// The database client that [`FencedTable`] takes its connections from.
pub use sqlx;

use crate::{
    control::Term, key::Key, lease::LeaseClaim, names::Names, rows::RowClaim, server::Server,
    session::Sessions, sql::Sql, wire::column,
};

const NAME: &str = "mysql";

/// How often a waiter asks whether it still waits.
const FALLBACK_POLL: Duration = Duration::from_secs(2);

const ROW_LOCKS_INSTEAD: &str = "mode=lease has exclusive locks alone, use mode=for_update";

/// Locks in a MySQL or MariaDB database.
pub struct MySqlBackend {
    shared: Arc<Shared>,
    mode: Mode,
    url: Arc<str>,
    /// Looks after the sessions for as long as there is a backend.
    _tending: JoinSet<()>,
}

/// What a backend and its claims share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) sessions: Sessions,
    pub(crate) names: Names,
    pub(crate) server: Server,
    pub(crate) namespace: Arc<str>,
    pub(crate) database: Arc<str>,
}

impl Shared {
    /// Whether the server still has a session that waits: of a connection that went dead nothing is ever heard.
    pub(crate) async fn still_waits(&self, session: u64, term: &Term) -> Result<bool> {
        Ok(self.stage(session, term).await?.is_some())
    }

    /// The server's word for what it does for a session. `None` if that is idle or gone.
    pub(crate) async fn stage(&self, session: u64, term: &Term) -> Result<Option<String>> {
        let control = &self.sessions.control;
        let look = format!(
            "SELECT COALESCE(STATE, x'') FROM information_schema.PROCESSLIST \
             WHERE ID={session} AND COMMAND NOT IN ('Sleep', 'Killed')"
        );
        let reply = control.ask("acquire", look).await?;
        let stage = reply.last().first().map(|row| column::<Vec<u8>>(row, 0));
        let stage = stage
            .transpose()
            .map_err(|error| fault::error("acquire", error))?;
        Ok(stage
            .filter(|_| control.is_latest(term))
            .map(|stage| String::from_utf8_lossy(&stage).into_owned()))
    }
}

impl MySqlBackend {
    /// Connects, looks whether the server's row locks can be relied on, and makes the tables that are missing.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a value that cannot be kept; [`Error::Unsupported`] for a server that cannot keep
    /// locks: a Galera cluster, group replication with several primaries, a read-only server, one without
    /// `SKIP LOCKED`, with row locks one with a pool of threads, a proxy that does not pass `wait_timeout` on;
    /// [`Error::Backend`] if it cannot be reached, refuses the account, or lacks tables that are not to be made here, with
    /// the statements that make them.
    ///
    /// # Cancel safety
    /// May be dropped at any await. Tables that were made stay.
    pub async fn connect(config: MySqlConfig) -> Result<Self> {
        let target = config.target()?;
        require_runtime("connect")?;
        let options = config.connect_options(&target);
        let sessions = Sessions::new(options, config.mode, config.max_connections);
        let (_, server) = sessions.control.term("connect").await?;
        sessions.control.prepare(config.mode, config.schema).await?;
        // Whether a session keeps its promises shows when there is one.
        let first = sessions.get("connect", lease::SECONDS).await?;
        sessions.keep(first).await;
        let url = config.server(&target).into();
        let shared = Arc::new(Shared {
            sessions,
            names: Names::default(),
            server,
            namespace: config.namespace.as_str().into(),
            database: target.database.into(),
        });
        let mut tending = JoinSet::new();
        tending.spawn({
            let shared = shared.clone();
            async move { shared.sessions.tend().await }
        });
        Ok(Self {
            mode: config.mode,
            url,
            shared,
            _tending: tending,
        })
    }
}

#[async_trait]
impl Backend for MySqlBackend {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new(NAME, self.url.clone());
        info.namespace = self.shared.namespace.clone();
        info.fallback_poll = FALLBACK_POLL;
        let mut capabilities = Capabilities::default();
        info.instead = (self.mode == Mode::Lease).then_some(ROW_LOCKS_INSTEAD);
        capabilities.shared = self.mode == Mode::ForUpdate;
        capabilities.permits = self.mode == Mode::ForUpdate;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.local_handoffs = true;
        capabilities.revoke = true;
        capabilities.fencing = self.shared.server.fencing;
        info.capabilities = capabilities;
        info
    }

    /// The `ttl`. With row locks in whole seconds, after which the server ends the session of a host that fell silent; with
    /// [`Mode::Lease`] some seconds more, since whoever was next in line may have died, too.
    fn dead_holder_bound(&self, ttl: Duration) -> Duration {
        match self.mode {
            Mode::ForUpdate => Duration::from_secs(rows::seconds(ttl).into()),
            Mode::Lease => ttl.saturating_add(lease::PASSED_OVER_WITHIN),
        }
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        if self.mode == Mode::Lease {
            if request.mode != Hold::Exclusive {
                return Err(Error::unsupported(NAME, ROW_LOCKS_INSTEAD));
            }
            return Ok(Box::new(LeaseClaim::new(self.shared.clone(), request.clone())));
        }
        if let Hold::Permits(permits) = request.mode
            && permits.get() > sql::MAX_PERMITS
        {
            return Err(Error::invalid_option(
                "permits",
                format!(
                    "{permits} is more than the {} that a semaphore in a database can have",
                    sql::MAX_PERMITS
                ),
            ));
        }
        let key = Key::new(&self.shared.namespace, request.mode.kind(), &request.name);
        let sql = Sql::new(key, request.mode, self.shared.server.flavour);
        Ok(Box::new(RowClaim::new(self.shared.clone(), request.clone(), sql)))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        require_runtime("inspect")?;
        match self.mode {
            Mode::ForUpdate => self.shared.look(name, kind).await,
            Mode::Lease => self.shared.look_at_lease(name, kind).await,
        }
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        require_runtime("revoke")?;
        match self.mode {
            Mode::ForUpdate => self.shared.revoke_row(name, kind, token.get()).await,
            Mode::Lease => self.shared.revoke_lease(name, kind, token.get()).await,
        }
    }

    async fn close(&self) -> Result<()> {
        require_runtime("close")?;
        self.shared.sessions.close().await;
        Ok(())
    }
}

impl fmt::Debug for MySqlBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlBackend")
            .field("server", &self.url)
            .field("namespace", &self.shared.namespace)
            .finish_non_exhaustive()
    }
}

/// Sockets are the runtime's.
fn require_runtime(operation: &'static str) -> Result<()> {
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(Error::permanent(
            NAME,
            operation,
            "this must be awaited within a Tokio runtime",
        ));
    }
    Ok(())
}
