//! The backend: one client of one master.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, Kind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest},
};
use redis::Value;
use tokio::time::Instant;

use crate::{
    RedisConfig,
    claim::{BEHIND, RedisClaim},
    dial::Dialler,
    error::{NAME, unexpected},
    layout,
    link::{Inbox, Link},
    script,
};

/// A waiter is woken by a push, asks when the lease before it runs out, and asks anew after a reconnection. This is
/// for what none of them covers.
const FALLBACK_POLL: Duration = Duration::from_secs(60);

/// For how long a lock that was passed on waits for its new holder: `CLAIM` of the scripts.
const PASSED_ON: Duration = Duration::from_secs(3);

/// A holder says its token to the server within a few milliseconds. How long an inspection waits for that, and how often
/// it looks.
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
    pub(crate) link: Arc<Link>,
    /// A connection to wait for replicas on, since that keeps everything behind it waiting, too; how many have to
    /// follow, and within which time.
    pub(crate) replicas: Option<(Arc<Link>, u32, Duration)>,
    pub(crate) inbox: Inbox,
    pub(crate) contended: Contended,
    pub(crate) namespace: Arc<str>,
}

/// Locks that are contended for, or were a moment ago. To these, asking in full at once saves the round trip that finds
/// out. It is only a guess: two locks may share a place.
pub(crate) struct Contended {
    since: Instant,
    places: [Contest; 32],
}

#[derive(Default)]
struct Contest {
    /// Of the lock.
    hash: AtomicU64,
    /// Until when it is one, in ms.
    until: AtomicU64,
}

impl Contended {
    /// Among clients that contend, it is free for less.
    const LATELY: Duration = Duration::from_millis(100);

    fn new() -> Self {
        Self {
            since: Instant::now(),
            places: Default::default(),
        }
    }

    fn place(&self, key: &[u8]) -> (&Contest, u64) {
        // FNV-1a: who makes keys collide costs their users a round trip.
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = key.iter().fold(0xcbf2_9ce4_8422_2325, step) | 1;
        (&self.places[(hash >> 32) as usize % self.places.len()], hash)
    }

    fn ms(&self, after: Duration) -> u64 {
        u64::try_from((self.since.elapsed() + after).as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn is_quiet(&self, key: &[u8]) -> bool {
        let (place, hash) = self.place(key);
        place.hash.load(Ordering::Relaxed) != hash
            || place.until.load(Ordering::Relaxed) <= self.ms(Duration::ZERO)
    }

    /// It was found taken, or left to somebody else.
    pub(crate) fn note(&self, key: &[u8]) {
        let (place, hash) = self.place(key);
        place.hash.store(hash, Ordering::Relaxed);
        place.until.store(u64::MAX, Ordering::Relaxed);
    }

    /// It was left, and nobody waited.
    pub(crate) fn left_free(&self, key: &[u8]) {
        let (place, hash) = self.place(key);
        // If another lock has the place by now, that one stays.
        if place.hash.load(Ordering::Relaxed) == hash {
            let until = self.ms(Self::LATELY);
            place.until.fetch_min(until, Ordering::Relaxed);
        }
    }
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
        if tokio::runtime::Handle::try_current().is_err() {
            let reason = "this must be awaited within a Tokio runtime";
            return Err(Error::permanent(NAME, "connect", reason));
        }
        let dialler = Dialler::new(&config)?;
        let inbox = Inbox {
            client: layout::new_client().into(),
            places: Arc::default(),
            master: None,
        };
        let link = Link::open(dialler.clone(), Some(inbox.clone())).await?;
        let replicas = match config.replicas {
            0 => None,
            replicas => Some((
                Link::open(dialler, None).await?,
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
                contended: Contended::new(),
                namespace: config.namespace.into(),
            }),
            server: server.into(),
        })
    }
}

fn warn_of_eviction(link: &Link) -> Result<()> {
    let live = link.live("connect")?;
    let policy = &live.dialled().eviction;
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
        ttl.saturating_add(ttl / 100 + BEHIND + PASSED_ON)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        Ok(Box::new(RedisClaim::new(self.shared.clone(), request)))
    }

    async fn inspect(&self, name: &LockName, kind: Kind) -> Result<LockState> {
        let key = layout::key(&self.shared.namespace, name, kind);
        let mut looks = 0;
        loop {
            let call = script::INSPECT.call(&key);
            let reply = self.shared.link.run("inspect", call).await?;
            let (state, complete) = state(&reply).ok_or_else(|| unexpected("inspect", &reply))?;
            looks += 1;
            if complete || looks == LOOKS {
                return Ok(state);
            }
            tokio::time::sleep(SAID_WITHIN / LOOKS).await;
        }
    }

    async fn revoke(&self, name: &LockName, kind: Kind, token: u64) -> Result<bool> {
        let key = layout::key(&self.shared.namespace, name, kind);
        for look in 0..LOOKS {
            if look > 0 {
                tokio::time::sleep(SAID_WITHIN / LOOKS).await;
            }
            let mut call = script::REVOKE.call(&key);
            call.arg(token);
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

/// What the inspection script found, and whether that is all: a holder's token may not have been said yet.
fn state(reply: &Value) -> Option<(LockState, bool)> {
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
    let mut is_foreign = false;
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
            is_foreign = holder.is_none();
            // A foreign client's hold has no token.
            holders.push(holder.unwrap_or_else(|| Holder::new(FencingToken::new(0), None, after(*left))));
        }
    }
    let complete = is_foreign || holders.iter().all(|holder| holder.token.get() > 0);
    Some((LockState::new(holders, usize::try_from(*waiters).ok()), complete))
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend")
            .field("server", &self.server)
            .field("namespace", &self.shared.namespace)
            .finish_non_exhaustive()
    }
}
