//! The backend: one session for all its locks, replaced when it has ended.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use futures_util::{
    FutureExt as _,
    future::{self, BoxFuture},
};
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, LockKind, LockName, LockState, LossReason,
    Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Mode},
};
use tokio::{runtime::Handle, task::AbortHandle};
use zookeeper_client::Stat;

use crate::{
    NAME, Nodes, ZkConfig,
    config::Address,
    crowded_dirs::CrowdedDirs,
    error::{self, Failure},
    layout::Layout,
    queue::QueueClaim,
    session::{self, Servers, Session},
    simple::{self, SimpleClaim},
    turn,
};

/// A waiter for a permit watches as many others as there are permits.
const MAX_PERMITS: u32 = 1_000;
/// How often an inspection looks again if whom it saw has left meanwhile.
const MAX_LOOKS: usize = 5;
/// Watches are told reliably, so that this is a last resort; each poll of each waiter is two small reads.
const FALLBACK_POLL: Duration = Duration::from_secs(5);
/// Of `nodes=simple`.
const QUEUE_INSTEAD: &str =
    "with nodes=simple one node is the lock, which one alone can hold; use another layout";

/// Locks on a ZooKeeper ensemble.
///
/// A hold is an ephemeral node, so it ends with the client's session: at once when it is closed, and a
/// [session timeout](ZkConfig#structfield.session_timeout) after the ensemble last heard of it otherwise. All locks of a
/// client share one session. When it has expired, what was held is lost; acquisitions go on with a new one.
///
/// A holder proves its session with writes to the ensemble and counts the time itself, so that it is told of a loss
/// before the ensemble lets anyone else in, also if the server it is connected to has lost touch with the others without
/// knowing. Its lease is that proof, or its ttl if that is shorter; the ttl cannot make it longer. Fencing tokens are
/// the ids of the transactions that made the nodes: they rise over everything, also when a lock's directory is removed
/// and made anew.
///
/// Waiters are granted strictly in the order of their nodes' numbers, so there are no local hand-offs. What it cannot do:
/// keep its promises on servers that have lost data they had acknowledged, or whose ticks are longer than
/// [`tick_time`](ZkConfig#structfield.tick_time); and tell a holder *before* the next one is granted when somebody else
/// deletes its node or ends its session. It is told then as soon as its server tells it, which takes a round trip or so,
/// and when its lease ends at the latest.
///
/// Clones share the session, and closing one closes all.
#[derive(Clone)]
pub struct ZkBackend {
    shared: Arc<Shared>,
}

/// What claims and backend have in common.
pub(crate) struct Shared {
    config: ZkConfig,
    address: Address,
    layout: Layout,
    /// Where sessions live.
    runtime: Handle,
    servers: Servers,
    current: Mutex<Option<Arc<Session>>>,
    pub(crate) crowded_dirs: CrowdedDirs,
    opening: Mutex<Option<Opening>>,
    closed: AtomicBool,
}

/// A session that is being opened, also if whoever asked for it is gone.
struct Opening {
    task: AbortHandle,
    outcome: future::Shared<BoxFuture<'static, error::Result<()>>>,
}

impl ZkBackend {
    /// Opens a session. Within a Tokio runtime: the session lives there.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a value that cannot be kept, also because of what the server grants;
    /// [`Error::Backend`] if no server can be reached, or none lets this client in.
    ///
    /// # Cancel safety
    /// May be dropped at any await. A session that has been opened ends, and directories that were made are removed with
    /// it or stay, as [`parents`](ZkConfig#structfield.parents) says.
    pub async fn connect(config: ZkConfig) -> Result<Self> {
        let address = config.check()?;
        let layout = Layout::new(&address.chroot, &config.namespace);
        let runtime = Handle::try_current().map_err(|_| Failure::NoRuntime.during("connect"))?;
        let shared = Shared {
            servers: Servers::new(&config, &address),
            config,
            address,
            layout,
            runtime,
            current: Mutex::default(),
            crowded_dirs: CrowdedDirs::new(),
            opening: Mutex::default(),
            closed: AtomicBool::new(false),
        };
        let shared = Arc::new(shared);
        shared.session().await.map_err(|error| error.during("connect"))?;
        Ok(Self { shared })
    }

    async fn look(&self, name: &LockName, kind: LockKind) -> error::Result<LockState> {
        let path = self.shared.layout.of(name, kind);
        let session = self.shared.session().await?;
        if self.shared.nodes() == Nodes::Simple {
            let found = session.read_latest(&path).await?;
            let nodes: Vec<_> = found
                .filter(|(_, stat)| simple::is_holders(stat))
                .into_iter()
                .collect();
            return Ok(LockState::new(
                holders(&self.shared, &session, nodes).await?,
                None,
            ));
        }
        for _ in 0..MAX_LOOKS {
            let children = session.list_latest(&path).await?;
            let (first, waiting) = turn::holders(&children, kind);
            let paths: Vec<_> = first.iter().map(|holder| format!("{path}/{holder}")).collect();
            let nodes: Vec<_> = session.read_all(&paths).await?.into_iter().flatten().collect();
            if nodes.is_empty() && !paths.is_empty() {
                continue;
            }
            return Ok(LockState::new(
                holders(&self.shared, &session, nodes).await?,
                Some(waiting),
            ));
        }
        Err(Failure::Restless { path })
    }

    async fn end(&self, name: &LockName, kind: LockKind, token: u64) -> error::Result<bool> {
        let path = self.shared.layout.of(name, kind);
        let session = self.shared.session().await?;
        let is_meant = |stat: &Stat| u64::try_from(stat.czxid) == Ok(token);
        if self.shared.nodes() == Nodes::Simple {
            return match session.read_latest(&path).await? {
                Some((_, stat)) if is_meant(&stat) && simple::is_holders(&stat) => {
                    session.delete(&path).await
                }
                _ => Ok(false),
            };
        }
        let children = session.list_latest(&path).await?;
        let (first, _) = turn::holders(&children, kind);
        let paths: Vec<_> = first.iter().map(|holder| format!("{path}/{holder}")).collect();
        let nodes = session.read_all(&paths).await?;
        for (path, node) in paths.iter().zip(nodes) {
            if node.is_some_and(|(_, stat)| is_meant(&stat)) {
                return session.delete(path).await;
            }
        }
        Ok(false)
    }
}

/// Who made these nodes. The lease of one is what its session has left, as far as its last proof says.
async fn holders(
    shared: &Shared,
    session: &Session,
    nodes: Vec<(Vec<u8>, Stat)>,
) -> error::Result<Vec<Holder>> {
    let beats: Vec<_> = nodes
        .iter()
        .map(|(_, stat)| shared.layout.session(stat.ephemeral_owner))
        .collect();
    let beats = session.read_all(&beats).await?;
    let holders = nodes.iter().zip(beats).filter_map(|((data, stat), beat)| {
        let label = match shared.nodes() {
            Nodes::Simple => simple::label(data).unwrap_or(data),
            Nodes::Mutex | Nodes::ReadWrite => data,
        };
        let label = std::str::from_utf8(label).ok().filter(|label| !label.is_empty());
        let token = FencingToken::new(u64::try_from(stat.czxid).ok()?);
        let left = beat.and_then(|(data, beat)| left(session, &data, &beat));
        Some(Holder::new(token, label.map(str::to_owned), left))
    });
    Ok(holders.collect())
}

/// What is left of a session that last proved itself at this time of the server's.
fn left(session: &Session, data: &[u8], beat: &Stat) -> Option<Duration> {
    let timeout = session::timeout(data)?;
    let now = session.server_clock().unwrap_or(beat.mtime);
    let ago = Duration::from_millis(u64::try_from(now.saturating_sub(beat.mtime)).unwrap_or(0));
    Some(timeout.saturating_sub(ago))
}

impl Shared {
    pub(crate) fn nodes(&self) -> Nodes {
        self.config.nodes
    }

    /// What the session of this id writes to.
    pub(crate) fn heartbeat_path(&self, session: i64) -> String {
        self.layout.session(session)
    }

    /// The session, or a new one if it has ended.
    pub(crate) async fn session(self: &Arc<Self>) -> error::Result<Arc<Session>> {
        if let Some(session) = self.live()? {
            return Ok(session);
        }
        let opened = {
            let mut opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
            // What became of one that is done was for those who had asked by then.
            opening.take_if(|opening| opening.task.is_finished());
            if let Some(session) = self.live()? {
                return Ok(session);
            }
            let opening = opening.get_or_insert_with(|| self.begin_opening());
            // Each has an end of it: one that is not polled is in nobody's way.
            opening.outcome.clone()
        };
        opened.await?;
        self.live()?.ok_or(Failure::SessionOver(LossReason::Disconnected))
    }

    fn begin_opening(self: &Arc<Self>) -> Opening {
        let shared = self.clone();
        // Where it can live on, which need not be where this is awaited.
        let opened = self.runtime.spawn(async move { shared.open().await });
        let task = opened.abort_handle();
        let outcome = opened.map(|opened| opened.unwrap_or(Err(Failure::RuntimeGone)));
        Opening {
            task,
            outcome: outcome.boxed().shared(),
        }
    }

    async fn open(&self) -> error::Result<()> {
        let session = Session::open(&self.config, &self.servers, &self.layout).await?;
        *self.slot() = Some(Arc::new(session));
        // Whoever closed it meanwhile found none to close.
        if self.is_closed() {
            self.slot().take();
            return Err(Failure::Closed);
        }
        Ok(())
    }

    fn live(&self) -> error::Result<Option<Arc<Session>>> {
        if self.is_closed() {
            return Err(Failure::Closed);
        }
        Ok(self.slot().clone().filter(|session| session.over().is_none()))
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<Session>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Backend for ZkBackend {
    fn info(&self) -> BackendInfo {
        let is_queue = self.shared.nodes() != Nodes::Simple;
        let mut capabilities = Capabilities::default();
        capabilities.fifo = is_queue;
        capabilities.shared = is_queue;
        capabilities.permits = is_queue;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.revoke = true;
        capabilities.fencing = FencingDurability::Durable;
        let Address { hosts, chroot } = &self.shared.address;
        let mut info = BackendInfo::new(NAME, format!("zk://{hosts}{chroot}"));
        info.namespace = self.shared.config.namespace.as_str().into();
        info.instead = (!is_queue).then_some(QUEUE_INSTEAD);
        info.capabilities = capabilities;
        info.fallback_poll = FALLBACK_POLL;
        info
    }

    /// The session timeout that was granted last, whatever the `ttl`. The servers round it up to a tick, and count from
    /// when they were told of the session last, which is half a tick late.
    fn dead_holder_bound(&self, _ttl: Duration) -> Duration {
        self.shared.servers.granted() + self.shared.config.tick_time * 2
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let shared = self.shared.clone();
        let path = shared.layout.of(&request.name, request.mode.kind());
        match request.mode {
            Mode::Shared | Mode::Permits(_) if shared.nodes() == Nodes::Simple => {
                Err(Error::unsupported(NAME, QUEUE_INSTEAD))
            }
            Mode::Permits(permits) if permits.get() > MAX_PERMITS => {
                let reason =
                    format!("{permits} is more than the {MAX_PERMITS} that a semaphore can have here");
                Err(Error::invalid_option("permits", reason))
            }
            _ if shared.nodes() == Nodes::Simple => {
                Ok(Box::new(SimpleClaim::new(shared, request.clone(), path)))
            }
            _ => Ok(Box::new(QueueClaim::new(shared, request.clone(), path))),
        }
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let looked = self.look(name, kind).await;
        looked.map_err(|error| error.during("inspect"))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        let ended = self.end(name, kind, token.get()).await;
        ended.map_err(|error| error.during("revoke"))
    }

    async fn close(&self) -> Result<()> {
        self.shared.closed.store(true, Ordering::SeqCst);
        let session = self.shared.slot().clone();
        if let Some(session) = session {
            // Kept until it is done, so that closing again goes on.
            session.close().await.map_err(|error| error.during("close"))?;
            self.shared.slot().take();
        }
        Ok(())
    }
}

impl fmt::Debug for ZkBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkBackend")
            .field("config", &self.shared.config)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}
