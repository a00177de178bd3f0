//! The backend: connecting, and the core's [`Backend`].

use std::{
    fmt,
    sync::{
        Arc, LazyLock, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Capabilities, Error, FencingToken, LockKind, LockName, LockState, Result,
    spi::{
        self, Backend, BackendInfo, Claim, ClaimRequest, Lease, Lister, Secrets, chain,
        fence::{MOST, check},
        require_runtime,
    },
};
use tokio::task::JoinSet;

use crate::{
    Mode, MySqlConfig, NAME, Schema,
    config::Target,
    connection::column,
    control::Epoch,
    error::{self, During},
    layout::Key,
    lease_claim::{self, LeaseClaim},
    lease_sql::{self, ServerLocks},
    list::MySqlLister,
    name_cache::NameCache,
    row_claim::{self, RowClaim},
    row_sql::{self, CLOCK, RowSql},
    server::{CONNECT, Server},
    session::Sessions,
};

/// The least ttl: with a shorter one, the timers and replies of a machine that is not idle use the lease up.
const LEAST_TTL: Duration = Duration::from_millis(50);

/// The least ttl with [`Mode::Lease`], where each renewal is a durable write.
const LEAST_LEASE_TTL: Duration = Duration::from_millis(200);

/// The time between two questions of a waiter whether the server still has it wait.
const FALLBACK_POLL: Duration = Duration::from_secs(2);

const ROW_LOCKS_INSTEAD: &str = "mode=lease has exclusive locks alone, use mode=for_update";

const ONLY_BY_FORCE: &str = "asking the holder of a row lock to give it up, since nobody else can write where it would look; end it by \
                             force, or use mode=lease";

/// Locks in a MySQL or MariaDB database.
pub struct MySqlBackend {
    shared: Arc<Shared>,
    mode: Mode,
    url: Arc<str>,
    /// Maintains the idle sessions for as long as there is a backend.
    _maintenance: JoinSet<()>,
}

/// The parts that a backend and its claims share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) sessions: Sessions,
    pub(crate) names: NameCache,
    pub(crate) server: Server,
    pub(crate) namespace: Arc<str>,
    /// True if all tables were there when the client connected, or have been made since.
    has_tables: AtomicBool,
    server_locks: OnceLock<ServerLocks>,
    database: String,
    /// The secrets that are blanked in whatever the server says.
    pub(crate) secrets: Secrets,
    mode: Mode,
    schema: Schema,
}

impl Shared {
    /// Returns the error of an attempt. If the tables have gone since the client connected, as by a restore, it first has them as they
    /// were when it connected, and then the next attempt succeeds. Not those of leases: a table of row locks cannot be dropped while one is
    /// held, and with that of leases goes what is held.
    pub(crate) async fn mended(&self, error: Error) -> Error {
        if !error::lacks_a_table(&error) {
            return error;
        }
        let words = std::error::Error::source(&error).map_or_else(String::new, chain);
        if self.mode == Mode::Lease {
            let advice = "what was held is held no more; stop what locks, then connect anew: the next acquisition makes it";
            return Error::permanent(NAME, "acquire", format!("{words} ({advice})"));
        }
        let control = &self.sessions.control;
        if let Err(why) = control.prepare("acquire", self.mode, self.schema, true).await {
            return why;
        }
        // What it has noted in the tables is gone, too. The next connection notes it anew.
        control.close().await;
        Error::transient(NAME, "acquire", format!("{words} (it is made anew; try again)"))
    }

    /// Makes missing tables, and reads what those who lock share. Once is enough. Whoever only looks makes nothing.
    pub(crate) async fn prepare(&self, operation: &'static str) -> Result<&ServerLocks> {
        if let Some(locks) = self.server_locks.get() {
            return Ok(locks);
        }
        // Several tasks may come here at once, and do it all again: none waits for another that nobody polls.
        let control = &self.sessions.control;
        if !self.has_tables.load(Ordering::Relaxed) {
            control.prepare(operation, self.mode, self.schema, true).await?;
            self.has_tables.store(true, Ordering::Relaxed);
        }
        let locks = match self.mode {
            Mode::Lease => match control.secret(operation).await {
                Ok(secret) => ServerLocks::new(&secret, &self.database),
                Err(error) => return Err(self.mended(error).await),
            },
            Mode::ForUpdate => ServerLocks::default(),
        };
        Ok(self.server_locks.get_or_init(|| locks))
    }

    /// Returns the server locks of leases without writing. Those that nobody has before the first acquisition.
    pub(crate) async fn find_server_locks(&self, operation: &'static str) -> Result<&ServerLocks> {
        static NOBODYS: LazyLock<ServerLocks> = LazyLock::new(ServerLocks::default);

        if let Some(locks) = self.server_locks.get() {
            return Ok(locks);
        }
        let secret = self.sessions.control.read_secret(operation).await;
        let secret = self.unless_unmade(operation, secret).await?.flatten();
        Ok(match secret {
            Some(secret) => {
                let locks = ServerLocks::new(&secret, &self.database);
                self.server_locks.get_or_init(|| locks)
            }
            None => LazyLock::force(&NOBODYS),
        })
    }

    /// Returns what was read. `None` if a table is missing since no lock was taken yet, so that nobody holds and no token was drawn.
    ///
    /// # Errors
    /// Also if the account may not read a table, or one is missing beside those in which locks are taken: it cannot be told who holds.
    pub(crate) async fn unless_unmade<T>(
        &self,
        operation: &'static str,
        read: Result<T>,
    ) -> Result<Option<T>> {
        match read {
            Err(error) if error::lacks_a_table(&error) => {
                if self.sessions.control.is_unmade(operation, self.mode).await? {
                    return Ok(None);
                }
                let words = std::error::Error::source(&error).map_or_else(String::new, chain);
                let what = format!(
                    "{words} (others are there: they are just being made, or somebody has dropped it)"
                );
                Err(Error::transient(NAME, operation, what))
            }
            read => read.map(Some),
        }
    }

    /// Returns the server's state of a session's statement. `None` if the session is idle or gone, or its id may be another's. Of a
    /// dead connection nothing else is ever heard.
    pub(crate) async fn statement_state(&self, session: u64, epoch: &Epoch) -> Result<Option<String>> {
        let control = &self.sessions.control;
        let question = format!(
            "SELECT COALESCE(STATE, x'') FROM information_schema.PROCESSLIST \
             WHERE ID={session} AND COMMAND NOT IN ('Sleep', 'Killed')"
        );
        let reply = control.query("acquire", question).await?;
        let state = reply.last().first().map(|row| column::<Vec<u8>>(row, 0));
        let state = state.transpose().during("acquire")?;
        Ok(state
            .filter(|_| control.is_current(epoch))
            .map(|state| String::from_utf8_lossy(&state).into_owned()))
    }
}

impl MySqlBackend {
    /// Connects, and checks that the server's locks can be relied on. Writes nothing: the first acquisition creates missing tables. Until then
    /// nobody holds, and who may only read can look.
    ///
    /// # Errors
    /// - [`Error::InvalidOptions`] for an option that cannot be kept.
    /// - [`Error::Unsupported`] for a server that cannot keep locks: a Galera cluster, group replication with several primaries, a
    ///   read-only server, a server without `SKIP LOCKED`, with row locks one with a pool of threads, or a proxy that does not
    ///   forward `wait_timeout`.
    /// - [`Error::Backend`] if the server cannot be reached or refuses the account; or with [`Schema::Manual`] if tables are missing, with the
    ///   statements that create them.
    ///
    /// # Cancel safety
    /// May be dropped at any await.
    pub async fn connect(config: MySqlConfig) -> Result<Self> {
        let target = config.target()?;
        let secrets = Secrets::of_passwords(&target.password);
        let connected = Self::connect_to(target, config, secrets.clone()).await;
        connected.map_err(|error| secrets.blanked(error))
    }

    async fn connect_to(target: Target, config: MySqlConfig, secrets: Secrets) -> Result<Self> {
        require_runtime(NAME, "connect")?;
        let options = MySqlConfig::connect_options(&target);
        let sessions = Sessions::new(
            options,
            config.route(&target)?,
            config.mode,
            config.max_connections,
        );
        let (_, server) = sessions.control.connect(CONNECT).await?;
        let tables = sessions
            .control
            .prepare(CONNECT, config.mode, config.schema, false);
        let has_tables = tables.await?.into();
        // Opening a session checks that the server keeps its `wait_timeout`.
        let first = sessions.get(CONNECT, lease_claim::WAIT_TIMEOUT).await?;
        sessions.put(first).await;
        let url = config.server(&target).into();
        let shared = Arc::new(Shared {
            sessions,
            names: NameCache::default(),
            server,
            namespace: config.namespace.as_str().into(),
            has_tables,
            server_locks: OnceLock::new(),
            database: target.database,
            secrets,
            mode: config.mode,
            schema: config.schema,
        });
        let mut maintenance = JoinSet::new();
        maintenance.spawn({
            let shared = shared.clone();
            async move { shared.sessions.maintain().await }
        });
        Ok(Self {
            mode: config.mode,
            url,
            shared,
            _maintenance: maintenance,
        })
    }
}

impl MySqlBackend {
    async fn read_fence(&self, operation: &'static str) -> Result<FencingToken> {
        require_runtime(NAME, operation)?;
        let read = match self.mode {
            Mode::ForUpdate => row_sql::fence(),
            Mode::Lease => lease_sql::fence(),
        };
        let control = &self.shared.sessions.control;
        let found = control.read(operation, read).await;
        let reply = match self.shared.unless_unmade(operation, found).await? {
            Some(reply) => reply,
            None => control.read(operation, format!("SELECT {CLOCK}")).await?,
        };
        let row = reply
            .last()
            .first()
            .ok_or(sqlx::Error::RowNotFound)
            .during(operation)?;
        let fence: u64 = column(row, 0).during(operation)?;
        Ok(FencingToken::new(fence))
    }
}

#[async_trait]
impl Backend for MySqlBackend {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new(NAME, self.url.clone());
        info.namespace = self.shared.namespace.clone();
        info.secrets = self.shared.secrets.clone();
        info.fallback_poll = FALLBACK_POLL;
        info.least_ttl = match self.mode {
            Mode::ForUpdate => LEAST_TTL,
            Mode::Lease => LEAST_LEASE_TTL,
        };
        let mut capabilities = Capabilities::default();
        info.instead = (self.mode == Mode::Lease).then_some(ROW_LOCKS_INSTEAD);
        capabilities.shared = self.mode == Mode::ForUpdate;
        capabilities.permits = self.mode == Mode::ForUpdate;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.local_handoffs = true;
        capabilities.revoke = self.mode == Mode::Lease;
        capabilities.revoke_by_force = true;
        capabilities.list = true;
        capabilities.raise_fence = true;
        capabilities.detach = self.mode == Mode::Lease;
        capabilities.fencing = self.shared.server.fencing;
        info.capabilities = capabilities;
        info
    }

    /// Returns the `ttl`. Row locks: in whole seconds, after which the server ends a silent session. [`Mode::Lease`]: five seconds
    /// more, since the head of the queue may have died, too.
    fn dead_holder_bound(&self, ttl: Duration) -> Duration {
        match self.mode {
            Mode::ForUpdate => Duration::from_secs(row_claim::seconds(ttl).into()),
            Mode::Lease => ttl.saturating_add(lease_claim::DEAD_HEAD_BOUND),
        }
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        if self.mode == Mode::Lease {
            if request.mode != spi::Mode::Exclusive {
                return Err(Error::unsupported(NAME, ROW_LOCKS_INSTEAD));
            }
            let locks = self.shared.prepare("acquire").await?;
            return Ok(Box::new(LeaseClaim::new(
                self.shared.clone(),
                request.clone(),
                locks,
            )));
        }
        if let spi::Mode::Permits(permits) = request.mode
            && permits.get() > row_sql::MAX_PERMITS
        {
            return Err(Error::invalid_option(
                "permits",
                format!(
                    "{permits} is more than the {} that a semaphore in a database can have",
                    row_sql::MAX_PERMITS
                ),
            ));
        }
        self.shared.prepare("acquire").await?;
        let key = Key::new(&self.shared.namespace, request.mode.kind(), &request.name);
        let sql = RowSql::new(key, request.mode, self.shared.server.flavour);
        Ok(Box::new(RowClaim::new(self.shared.clone(), request.clone(), sql)))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        require_runtime(NAME, "inspect")?;
        match self.mode {
            Mode::ForUpdate => self.shared.inspect_rows(name, kind).await,
            Mode::Lease => self.shared.inspect_lease(name, kind).await,
        }
    }

    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        Ok(Box::new(MySqlLister::new(self.shared.clone(), self.mode, prefix)))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        require_runtime(NAME, "revoke")?;
        match self.mode {
            Mode::ForUpdate => Err(Error::unsupported(NAME, ONLY_BY_FORCE)),
            Mode::Lease => self.shared.ask_lease_back(name, kind, token.get()).await,
        }
    }

    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        require_runtime(NAME, "revoke")?;
        match self.mode {
            Mode::ForUpdate => self.shared.revoke_row(name, kind, token.get()).await,
            Mode::Lease => self.shared.revoke_lease(name, kind, token.get()).await,
        }
    }

    async fn fence(&self) -> Result<FencingToken> {
        self.read_fence("fence").await
    }

    async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        const OPERATION: &str = "raise";

        check(above, MOST)?;
        require_runtime(NAME, OPERATION)?;
        self.shared.prepare(OPERATION).await?;
        let raise = match self.mode {
            Mode::ForUpdate => row_sql::raise_fence(above.get()),
            Mode::Lease => lease_sql::raise_fence(above.get()),
        };
        for statement in raise {
            // Whoever renews or reserves goes in between.
            while self
                .shared
                .sessions
                .control
                .query(OPERATION, statement.clone())
                .await?
                .affected(0)
                >= row_sql::RAISED_AT_ONCE
            {}
        }
        self.read_fence(OPERATION).await
    }

    async fn close(&self) -> Result<()> {
        require_runtime(NAME, "close")?;
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
