//! The backend: one client of one master.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, LockKind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest},
};
use redis::Value;
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::{
    RedisConfig,
    claim::{FOLLOWER_DELAY, RedisClaim},
    connect::Connector,
    connection::{Inbox, ManagedConnection},
    error::{NAME, unexpected},
    layout, script,
};

/// A waiter is woken by a push, asks when the lease before it runs out, and asks anew after a reconnection. This is
/// for what none of them covers.
const FALLBACK_POLL: Duration = Duration::from_secs(60);

/// Says that a hold can be renewed while its holder is at work without an await. On a runtime of one thread, the short lease of
/// what a push has brought would be over before the hold is renewed, and only where the lock is contended.
fn renews_meanwhile(runtime: &Handle) -> bool {
    runtime.runtime_flavor() != RuntimeFlavor::CurrentThread
}

/// For how long a lock that was passed on waits for its new holder: `CLAIM` of the scripts.
pub(crate) const HANDOFF_TTL: Duration = Duration::from_secs(3);

/// A hold that is passed on within its client has another token, which the server is told within a few milliseconds. How long
/// a revocation waits for that, and how often it looks.
const SAID_WITHIN: Duration = Duration::from_millis(200);
const LOOKS: u32 = 20;

/// Locks on one Redis master.
///
/// A hold is a key with a time to live, so it ends unless it is renewed. Grants go through a queue at the server in
/// the order of arrival; a release passes the lock to the next in line and wakes it with a push, in one round trip.
/// Every grant draws fencing tokens from one counter per database.
///
/// What it cannot do: survive the loss of the server's data, which includes a fail-over to a replica; nor a jump of
/// the server's clock, nor eviction. `docs/guarantees.md` has the table, and `docs/redis.md` the keys.
pub struct RedisBackend {
    shared: Arc<Shared>,
    server: Arc<str>,
}

/// What the claims of a client share.
pub(crate) struct Shared {
    pub(crate) link: Arc<ManagedConnection>,
    /// A connection to wait for replicas on, since that keeps everything behind it waiting, too; how many have to
    /// follow, and within which time.
    pub(crate) replicas: Option<(Arc<ManagedConnection>, u32, Duration)>,
    pub(crate) inbox: Inbox,
    pub(crate) namespace: Arc<str>,
}

impl RedisBackend {
    /// Connects to the master. The connection is watched and replaced by a task on the current runtime, which is the
    /// one that the client then lives on.
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
    /// [`Error::InvalidUrl`], [`Error::InvalidOptions`] or [`Error::FeatureDisabled`] for a config that cannot be;
    /// [`Error::Unsupported`] for a cluster; [`Error::Backend`] if the server cannot be used: it is not there, it is a
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
        let inbox = Inbox {
            client: layout::new_client(renews_meanwhile(&runtime)).into(),
            wakeups: Arc::default(),
            master: None,
        };
        let link = ManagedConnection::open(connector.clone(), Some(inbox.clone())).await?;
        let replicas = match config.replicas {
            0 => None,
            replicas => Some((
                ManagedConnection::open(connector, None).await?,
                replicas,
                config.replicas_timeout,
            )),
        };
        warn_of_eviction(&link)?;
        Ok(Self {
            shared: Arc::new(Shared {
                link,
                replicas,
                inbox,
                namespace: config.namespace.into(),
            }),
            server: server.into(),
        })
    }
}

fn warn_of_eviction(link: &ManagedConnection) -> Result<()> {
    let live = link.current("connect")?;
    let policy = &live.server().eviction;
    if !policy.is_empty() && policy != "noeviction" {
        tracing::warn!(
            backend = NAME,
            maxmemory_policy = %policy,
            "the server may evict locks that are held when its memory runs out; set maxmemory-policy noeviction"
        );
    }
    Ok(())
}

#[async_trait]
impl Backend for RedisBackend {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new(NAME, self.server.clone());
        info.namespace = self.shared.namespace.clone();
        info.fallback_poll = FALLBACK_POLL;
        let mut capabilities = Capabilities::default();
        capabilities.fifo = true;
        capabilities.shared = true;
        capabilities.permits = true;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.local_handoffs = true;
        capabilities.revoke = true;
        capabilities.fencing = FencingDurability::Process;
        info.capabilities = capabilities;
        info
    }

    /// The `ttl`, when whoever is first in the queue asks, by a server's clock that is up to 1 % slower. If the first has
    /// died as well, those behind it ask 5 s later; and if the server has not noticed that, as when a host crashes, what
    /// is passed to the dead lapses after another 3 s.
    fn dead_holder_bound(&self, ttl: Duration) -> Duration {
        ttl.saturating_add(ttl / 100 + FOLLOWER_DELAY + HANDOFF_TTL)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Ok(Box::new(RedisClaim::new(self.shared.clone(), request)))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let key = layout::key(&self.shared.namespace, name, kind);
        let reply = self
            .shared
            .link
            .run("inspect", script::INSPECT.call(&key))
            .await?;
        state(&reply).ok_or_else(|| unexpected("inspect", &reply))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        let key = layout::key(&self.shared.namespace, name, kind);
        for look in 0..LOOKS {
            if look > 0 {
                tokio::time::sleep(SAID_WITHIN / LOOKS).await;
            }
            let mut call = script::REVOKE.call(&key);
            call.arg(token.get());
            if look + 1 == LOOKS {
                call.arg("at last");
            }
            match self.shared.link.run("revoke", call).await? {
                Value::Int(-1) => {}
                Value::Int(found) => return Ok(found == 1),
                other => return Err(unexpected("revoke", &other)),
            }
        }
        let reason = "the holder has not told its token yet: it has ended, or stands still";
        Err(Error::transient(NAME, "revoke", reason))
    }

    async fn close(&self) -> Result<()> {
        self.shared.link.close(Some(&self.shared.inbox)).await;
        if let Some((link, ..)) = &self.shared.replicas {
            link.close(None).await;
        }
        Ok(())
    }
}

/// What the inspection script found.
fn state(reply: &Value) -> Option<LockState> {
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
