//! The backend: connecting, and the core's [`Backend`].

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, LockKind, LockName, LockState, Result,
    spi::{
        self, Backend, BackendInfo, Claim, ClaimRequest, Lease, Lister, Secrets, Unencrypted,
        fence::{MOST, check},
    },
};
use tokio::{runtime::Handle, task::JoinSet};

use crate::{
    NAME, PostgresConfig,
    claim::PostgresClaim,
    config::Target,
    connection::{Options, Query},
    error::{During, Failure},
    layout,
    list::PostgresLister,
    schema,
    session::Sessions,
    sql,
};

/// The time between two questions of a waiter whether the server still has it wait.
const FALLBACK_POLL: Duration = Duration::from_secs(2);

/// The most permits of a semaphore, each of which is a key that is looked at.
const MAX_PERMITS: u32 = 1_000;

/// The least ttl. The holder's own lease is 20 ms shorter, and has to be proven within a third of itself.
const LEAST_TTL: Duration = Duration::from_millis(50);

const ONLY_BY_FORCE: &str = "asking the holder of an advisory lock to give it up, since each of its renewals prolongs the hold; end it \
                             by force";

/// Locks in a PostgreSQL database.
pub struct PostgresBackend {
    shared: Arc<Shared>,
    url: Arc<str>,
    fencing: FencingDurability,
    /// Maintains the idle sessions for as long as there is a backend.
    _maintenance: JoinSet<()>,
}

/// The parts that a backend and its claims share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) sessions: Sessions,
    pub(crate) namespace: Arc<str>,
    /// The secrets that are blanked in whatever the server says.
    pub(crate) secrets: Secrets,
}

impl PostgresBackend {
    /// Connects, and checks that the server's locks can be relied on. The first acquisition creates what is missing of the schema `lockkit`;
    /// before that, and for inspections and lists, nothing is written.
    ///
    /// # Errors
    /// - [`Error::InvalidOptions`] for an option that cannot be kept, or a file that cannot be used.
    /// - [`Error::Unsupported`] for a server that cannot keep locks: one before PostgreSQL 14, a standby, a session that is read-only, a
    ///   pooler such as PgBouncer, or a schema that was changed.
    /// - [`Error::Backend`] if the server cannot be reached or refuses the role; or if the schema is not there and is not to be created
    ///   here, with the statements that create it. If it cannot be created here, or the role lacks rights, the first acquisition says so.
    ///
    /// # Cancel safety
    /// May be dropped at any await.
    pub async fn connect(config: PostgresConfig) -> Result<Self> {
        let target = config.target()?;
        let secrets = Secrets::of_passwords(&target.password);
        let connected = Self::connect_to(target, config, secrets.clone()).await;
        connected.map_err(|error| secrets.blanked(error))
    }

    async fn connect_to(target: Target, config: PostgresConfig, secrets: Secrets) -> Result<Self> {
        require_runtime("connect")?;
        let options = Options {
            address: target.address.clone(),
            login: target.login(),
            ssl_mode: config.effective_sslmode(),
            unencrypted: Unencrypted::default(),
            #[cfg(feature = "tls")]
            trust: crate::tls::Trust::new(&config)?,
            runtime: Handle::current(),
        };
        let sessions = Sessions::new(options, config.max_connections, config.schema);
        let server = sessions.control.connect("connect").await?;
        schema::check(&sessions.control, config.schema).await?;
        let shared = Arc::new(Shared {
            sessions,
            namespace: config.namespace.as_str().into(),
            secrets,
        });
        let mut maintenance = JoinSet::new();
        maintenance.spawn({
            let shared = shared.clone();
            async move { shared.sessions.maintain().await }
        });
        Ok(Self {
            url: target.server().into(),
            shared,
            fencing: server.fencing,
            _maintenance: maintenance,
        })
    }
}

impl Shared {
    async fn fence(&self, operation: &'static str) -> Result<FencingToken> {
        let control = &self.sessions.control;
        let ask = Query::once(sql::FENCE, Vec::new());
        let rows = match control.look(Duration::ZERO, operation, ask).await? {
            Some(rows) => rows,
            None => control
                .run(operation, vec![Query::once(sql::FENCE_OF_NONE, Vec::new())])
                .await?
                .pop()
                .unwrap_or_default(),
        };
        let row = rows.first().ok_or(Failure::Ended).during(operation)?;
        if !row.try_get::<_, bool>(1).during(operation)? {
            let why = "the role may not see the sequence lockkit.token; grant it SELECT there";
            return Err(Error::permanent(NAME, operation, why));
        }
        let last: i64 = row.try_get(0).during(operation)?;
        // A sequence that somebody has set below zero has granted nothing.
        Ok(FencingToken::new(u64::try_from(last).unwrap_or_default()))
    }
}

#[async_trait]
impl Backend for PostgresBackend {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new(NAME, self.url.clone());
        info.namespace = self.shared.namespace.clone();
        info.secrets = self.shared.secrets.clone();
        info.fallback_poll = FALLBACK_POLL;
        info.least_ttl = LEAST_TTL;
        let mut capabilities = Capabilities::default();
        capabilities.fifo = true;
        capabilities.shared = true;
        capabilities.permits = true;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.local_handoffs = true;
        capabilities.revoke_by_force = true;
        capabilities.list = true;
        capabilities.raise_fence = true;
        capabilities.fencing = self.fencing;
        info.capabilities = capabilities;
        info
    }

    /// Returns the `ttl`, after which the server ends a silent session.
    fn dead_holder_bound(&self, ttl: Duration) -> Duration {
        ttl
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let permits = layout::permits(request.mode);
        if permits > MAX_PERMITS {
            let why = format!(
                "{permits} is more than the {MAX_PERMITS} that a semaphore in a database can have; ask for fewer"
            );
            return Err(Error::invalid_option("permits", why));
        }
        if request.label.as_ref().is_some_and(|label| label.contains('\0')) {
            let why = "it has a NUL byte, which no text in PostgreSQL can have";
            return Err(Error::invalid_option("label", why));
        }
        Ok(Box::new(PostgresClaim::new(self.shared.clone(), request.clone())))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        require_runtime("inspect")?;
        self.shared.inspect(name, kind).await
    }

    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        Ok(Box::new(PostgresLister::new(self.shared.clone(), prefix)))
    }

    async fn revoke(&self, _: &LockName, _: LockKind, _: FencingToken) -> Result<Option<Lease>> {
        Err(Error::unsupported(NAME, ONLY_BY_FORCE))
    }

    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        require_runtime("revoke")?;
        self.shared.end_by_force(name, kind, token).await
    }

    async fn fence(&self) -> Result<FencingToken> {
        require_runtime("fence")?;
        self.shared.fence("fence").await
    }

    async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        const OPERATION: &str = "raise";

        check(above, MOST)?;
        require_runtime(OPERATION)?;
        let sessions = &self.shared.sessions;
        sessions.prepare(OPERATION).await?;
        sessions
            .control
            .run_together(OPERATION, &schema::raise_fence(above.get()))
            .await?;
        self.shared.fence(OPERATION).await
    }

    async fn close(&self) -> Result<()> {
        require_runtime("close")?;
        self.shared.sessions.close().await;
        Ok(())
    }
}

impl fmt::Debug for PostgresBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresBackend")
            .field("server", &self.url)
            .field("namespace", &self.shared.namespace)
            .finish_non_exhaustive()
    }
}

/// Refuses a ttl that leaves the holder no lease, or hardly any.
pub(crate) fn check_ttl(ttl: Duration) -> Result<()> {
    if ttl >= LEAST_TTL {
        return Ok(());
    }
    let reason = format!(
        "{ttl:?} is shorter than a lease in PostgreSQL can be, of which 20 ms are kept back for the server's clock; set {LEAST_TTL:?} \
         or more"
    );
    Err(Error::invalid_option("ttl", reason))
}

/// # Errors
/// Outside of a Tokio runtime, which sockets need.
pub(crate) fn require_runtime(operation: &'static str) -> Result<()> {
    spi::require_runtime(NAME, operation)
}
