//! The backend: one client of one master.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, LockKind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, HolderWatch, Lease, Lister, Secrets, fence},
};
use redis::Value;
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    time::Instant,
};

use crate::{
    RedisConfig,
    announcement::RedisWatch,
    claim::{FOLLOWER_DELAY, RedisClaim},
    connect::{Connector, SentinelWatch},
    connection::{Inbox, ManagedConnection},
    error::{NAME, failed, unexpected},
    layout,
    list::RedisLister,
    script,
    wakeup::Wakeups,
};

/// The least ttl: with a shorter one, the timers and replies of a machine that is not idle use the lease up.
const LEAST_TTL: Duration = Duration::from_millis(50);

/// Covers what nothing else does: a waiter is woken by a push, asks when the lease before it ends, and asks after a
/// reconnection.
const FALLBACK_POLL: Duration = Duration::from_secs(60);

/// The longest lease of a lock that was handed off, until its new holder renews it: `HANDOFF_TTL` of the scripts.
pub(crate) const HANDOFF_TTL: Duration = Duration::from_secs(3);

/// The highest token that tokens are raised above. Scripts count exactly up to 2⁵³. What is left is enough for 35 years of the clock.
const HIGHEST_FENCE: u64 = (1 << 53) - (1 << 50);

/// The time that a revocation gives a holder to publish its token, and the pause between two looks. A hold that was passed on
/// within its client has a new token, which a renewal publishes within some milliseconds.
const PUBLISHED_WITHIN: Duration = Duration::from_millis(200);
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// Locks on one Redis master.
///
/// A hold is a key with a time to live, so it ends unless it is renewed. The server grants in the order of arrival, from a
/// queue. A release hands the lock off to the next in line and wakes it with a push, in one round trip. Every grant draws
/// fencing tokens from one counter per database.
///
/// It cannot survive the loss of the server's data, which includes a fail-over to a replica, nor a jump of the server's clock,
/// nor eviction. `docs/guarantees.md` has the table, and `docs/redis.md` the keys.
pub struct RedisBackend {
    shared: Arc<Shared>,
    server: Arc<str>,
    secrets: Secrets,
}

/// Shared by the claims of a client.
pub(crate) struct Shared {
    pub(crate) connection: Arc<ManagedConnection>,
    /// A second connection to wait for replicas on, how many there have to be, and for how long to wait. Waiting on the first
    /// would hold up everything behind it.
    pub(crate) replicas: Option<(Arc<ManagedConnection>, u32, Duration)>,
    /// Has the connections replaced when the sentinels name another master, if there are sentinels.
    pub(crate) sentinels: Option<SentinelWatch>,
    pub(crate) inbox: Inbox,
    pub(crate) namespace: Arc<str>,
}

impl RedisBackend {
    /// Connects to the master. A task on the current runtime watches the connection and replaces it when it breaks, so the
    /// client lives on that runtime.
    ///
    /// ```no_run
    /// # async fn example() -> lockkit_core::Result<()> {
    /// use lockkit_core::LockClient;
    /// use lockkit_redis::{RedisBackend, RedisConfig};
    ///
    /// let client = LockClient::new(RedisBackend::connect(RedisConfig::new("redis://127.0.0.1")).await?);
    /// # let _ = client;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidUrl`], [`Error::InvalidOptions`] or [`Error::FeatureDisabled`] if the config is invalid;
    /// [`Error::Unsupported`] for a cluster; [`Error::Backend`] if the server cannot be used: it cannot be reached, it is a
    /// replica, it is older than Redis 6, or it refuses the user.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection.
    pub async fn connect(config: RedisConfig) -> Result<Self> {
        let server = config.address()?.server(config.sentinel.as_deref());
        let Ok(runtime) = Handle::try_current() else {
            let reason = "this must be awaited within a Tokio runtime";
            return Err(Error::permanent(NAME, "connect", reason));
        };
        let connector = Connector::new(&config)?;
        // The short lease of a hand-off has to be renewed while its holder works without an await. The only thread of a runtime
        // cannot do that.
        let takes_hand_offs = runtime.runtime_flavor() != RuntimeFlavor::CurrentThread;
        let inbox = Inbox {
            client: layout::new_client(&config.namespace, takes_hand_offs).into(),
            wakeups: Arc::new(Wakeups::new(takes_hand_offs)),
            announcements: Arc::default(),
            master: None,
        };
        let connection = ManagedConnection::open(connector.clone(), Some(inbox.clone())).await?;
        let replicas = match config.replicas {
            0 => None,
            replicas => Some((
                ManagedConnection::open_second(connector.clone(), inbox.wakeups.clone()).await?,
                replicas,
                config.replicas_timeout,
            )),
        };
        warn_of_eviction(&connection)?;
        let second = replicas.iter().map(|(connection, ..)| connection);
        let sentinels = SentinelWatch::start(&connector, second.chain([&connection]));
        Ok(Self {
            shared: Arc::new(Shared {
                connection,
                replicas,
                sentinels,
                inbox,
                namespace: config.namespace.into(),
            }),
            server: server.into(),
            secrets: connector.secrets().clone(),
        })
    }
}

fn warn_of_eviction(connection: &ManagedConnection) -> Result<()> {
    let current = connection.current("connect")?;
    let policy = &current.server().eviction;
    if !policy.is_empty() && policy != "noeviction" {
        tracing::warn!(
            backend = NAME,
            maxmemory_policy = %policy,
            "the server may evict locks that are held when its memory runs out; set maxmemory-policy noeviction"
        );
    }
    Ok(())
}

impl RedisBackend {
    fn fence_call(&self, above: u64, what: &str) -> script::Call {
        let mut call = script::RAISE_FENCE.call(layout::own(&self.shared.namespace, "fence").as_bytes());
        call.arg(above).arg(what);
        call
    }
}

#[async_trait]
impl Backend for RedisBackend {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new(NAME, self.server.clone());
        info.namespace = self.shared.namespace.clone();
        info.secrets = self.secrets.clone();
        info.fallback_poll = FALLBACK_POLL;
        info.least_ttl = LEAST_TTL;
        let mut capabilities = Capabilities::default();
        capabilities.fifo = true;
        capabilities.shared = true;
        capabilities.permits = true;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.local_handoffs = true;
        capabilities.downgrade = true;
        capabilities.revoke = true;
        capabilities.revoke_by_force = true;
        capabilities.list = true;
        capabilities.detach = true;
        capabilities.raise_fence = true;
        capabilities.fencing = FencingDurability::Process;
        info.capabilities = capabilities;
        info
    }

    /// Returns the ttl by a server's clock that is up to 1 % slower, after which the head of the queue asks; 5 s, after which the
    /// others ask if the head died as well; and 3 s, after which a hand-off to a head expires whose death the server has not
    /// noticed, as when its host crashed.
    fn dead_holder_bound(&self, ttl: Duration) -> Duration {
        ttl.saturating_add(ttl / 100 + FOLLOWER_DELAY + HANDOFF_TTL)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Ok(Box::new(RedisClaim::new(self.shared.clone(), request)?))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let call = script::INSPECT.call(&layout::key(&self.shared.namespace, name, kind)?);
        let reply = self.shared.connection.look("inspect", call).await?;
        state(&reply).ok_or_else(|| unexpected("inspect", &reply))
    }

    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        layout::check(&self.shared.namespace, prefix)?;
        Ok(Box::new(RedisLister::new(self.shared.clone(), prefix)))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        let mut call = script::ASK_BACK.call(&layout::key(&self.shared.namespace, name, kind)?);
        call.arg(token.get());
        let since = Instant::now();
        match self.shared.connection.run("revoke", call).await? {
            Value::Int(-1) => Ok(None),
            Value::Int(left) => {
                let length = u64::try_from(left).ok().map(Duration::from_millis);
                Ok(Some(Lease::new(since, length)))
            }
            other => Err(unexpected("revoke", &other)),
        }
    }

    async fn watch(&self, name: &LockName, kind: LockKind) -> Result<Option<Box<dyn HolderWatch>>> {
        let Shared {
            connection,
            inbox,
            namespace,
            ..
        } = &*self.shared;
        let channel = layout::watch_channel(&layout::key(namespace, name, kind)?);
        let watch = RedisWatch::begin(connection, &inbox.announcements, channel).await?;
        Ok(Some(Box::new(watch)))
    }

    async fn announce(&self, name: &LockName, kind: LockKind) -> Result<()> {
        const OPERATION: &str = "announce";

        let channel = layout::watch_channel(&layout::key(&self.shared.namespace, name, kind)?);
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(channel).arg("");
        let connection = &self.shared.connection;
        let current = connection.current(OPERATION)?;
        let published = connection.send(&current, &publish).await;
        published.map(drop).map_err(|error| failed(OPERATION, error))
    }

    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        let key = layout::key(&self.shared.namespace, name, kind)?;
        let mut give_up = None;
        loop {
            let mut call = script::REVOKE.call(&key);
            call.arg(token.get());
            if give_up.is_some_and(|at| Instant::now() >= at) {
                call.arg("published or not");
            }
            match self.shared.connection.run("revoke", call).await? {
                Value::Int(-1) => {
                    // The holder has that long from the first look on, however late its reply was.
                    give_up.get_or_insert_with(|| Instant::now() + PUBLISHED_WITHIN);
                    tokio::time::sleep(LOOK_AGAIN_AFTER).await;
                }
                Value::Int(found) => return Ok(found == 1),
                other => return Err(unexpected("revoke", &other)),
            }
        }
    }

    async fn fence(&self) -> Result<FencingToken> {
        const OPERATION: &str = "fence";

        let reply = self.shared.connection.look(OPERATION, self.fence_call(0, "show"));
        fence_in(OPERATION, &reply.await?)
    }

    async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        const OPERATION: &str = "raise";

        fence::check(above, HIGHEST_FENCE)?;
        let call = self.fence_call(above.get(), "raise");
        let Some((connection, replicas, within)) = &self.shared.replicas else {
            return fence_in(OPERATION, &self.shared.connection.run(OPERATION, call).await?);
        };
        // It has written, whatever the counter is.
        let replicated = connection.run_replicated(OPERATION, call, (*replicas, *within), |_| true);
        let (reply, reached) = replicated.await?;
        if reached < i64::from(*replicas) {
            let lack =
                format!("{reached} of {replicas} replicas acknowledged the raised counter within {within:?}");
            return Err(Error::transient(NAME, OPERATION, lack));
        }
        fence_in(OPERATION, &reply)
    }

    async fn close(&self) -> Result<()> {
        if let Some(sentinels) = &self.shared.sentinels {
            sentinels.stop();
        }
        self.shared.connection.close(Some(&self.shared.inbox)).await;
        if let Some((connection, ..)) = &self.shared.replicas {
            connection.close(None).await;
        }
        Ok(())
    }
}

/// Reads the counter of tokens in the reply of its script.
fn fence_in(operation: &'static str, reply: &Value) -> Result<FencingToken> {
    match reply {
        Value::Int(counter) => u64::try_from(*counter).ok(),
        _ => None,
    }
    .map(FencingToken::new)
    .ok_or_else(|| unexpected(operation, reply))
}

/// Converts the inspection script's reply.
pub(crate) fn state(reply: &Value) -> Option<LockState> {
    let Value::Array(parts) = reply else { return None };
    let [Value::Int(waiters), value, Value::Int(left), entries @ ..] = &**parts else {
        return None;
    };
    let text = |value: &Value| match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        _ => None,
    };
    let after = |left: i64| u64::try_from(left).ok().map(Duration::from_millis);
    let mut holders = Vec::new();
    match text(value) {
        None => {}
        Some(value) if layout::is_group(&value) => {
            for entry in entries.chunks(2) {
                let [Value::Int(left), record] = entry else {
                    return None;
                };
                holders.push(layout::holder(&text(record)?, after(*left))?);
            }
        }
        Some(value) => {
            let holder = layout::record_in(&value).and_then(|record| layout::holder(record, after(*left)));
            // A foreign client's hold has no token.
            holders.push(holder.unwrap_or_else(|| Holder::new(FencingToken::new(0), None, after(*left))));
        }
    }
    Some(LockState::new(holders, usize::try_from(*waiters).ok()))
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend")
            .field("server", &self.server)
            .field("namespace", &self.shared.namespace)
            .finish_non_exhaustive()
    }
}
