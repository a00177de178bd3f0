//! The backend: one session for all locks of a client, replaced when it has ended.

use std::{
    fmt,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, UNIX_EPOCH},
};

use async_trait::async_trait;
use futures_util::{
    FutureExt as _,
    future::{self, BoxFuture},
};
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, LockKind, LockName, LockState, LossReason,
    Result,
    spi::{
        Backend, BackendInfo, Claim, ClaimRequest, HolderWatch, Lease, Lister, Mode, Mutex, Secrets,
        fence::{Bases, MOST, check},
    },
};
use tokio::{
    runtime::Handle,
    task::AbortHandle,
    time::{Instant, timeout},
};
use zookeeper_client::{Acl, Permission, Stat};

use crate::{
    NAME, Nodes, ZkConfig,
    claim::ZkClaim,
    config::{Access, Address},
    crowded_dirs::CrowdedDirs,
    error::{self, Failure},
    holder_watch::ZkWatch,
    layout::{Layout, REVOKE, is_revoked, is_writers, made_by},
    list::ZkLister,
    session::{NodeState, Servers, Session, fence::token, session_timeout},
    simple, turn,
};

/// The largest semaphore. A waiter for a permit watches as many others as there are permits.
const MAX_PERMITS: u32 = 1_000;
/// The number of looks of one inspection. It looks again if all holders that it saw have left meanwhile.
const MAX_LOOKS: usize = 5;
/// The number of looks for the node of one hold. A downgrade puts another in its place, which happens once.
const LOOKS_FOR_A_HOLD: usize = 2;
/// The least ttl: with a shorter one, the timers and replies of a machine that is not idle use the lease up.
const LEAST_TTL: Duration = Duration::from_millis(50);
/// The last resort of a waiter, since watches are reliable. Each poll of a waiter takes two small reads.
const FALLBACK_POLL: Duration = Duration::from_secs(5);
/// The longest time that connecting takes to find out who else may touch the nodes.
const LOOKS_FOR_OTHERS: Duration = Duration::from_secs(1);
/// The answer to requests that `nodes=simple` cannot serve.
const QUEUE_INSTEAD: &str =
    "with nodes=simple the lock is one node, which only one client can hold; use another layout";

/// The answer to who asks the holder of such a node. A write that is meant for it could hit the node of the next.
const ONLY_BY_FORCE: &str =
    "asking a holder to give up its hold with nodes=simple; end it by force, or use another layout";

/// Locks on a ZooKeeper ensemble.
///
/// A hold is an ephemeral node, so it ends with the client's session. The session ends at once when it is closed. Otherwise it
/// ends a [session timeout](ZkConfig#structfield.session_timeout) after the ensemble last heard of it. All locks of a client
/// share one session. When that has expired, all holds are lost, and acquisitions go on with a new session.
///
/// A holder proves its session with writes to the ensemble and counts the time itself. So it learns of a loss before the
/// ensemble lets anyone else in. That is true also if its server has lost touch with the others without knowing. Its lease is
/// that proof, or its ttl if that is shorter. The ttl cannot make the lease longer. Fencing tokens are the ids of the
/// transactions that made the nodes, until tokens are raised. They rise over everything, also when a lock's directory is removed and made anew.
///
/// Waiters are granted strictly in the order of their nodes' numbers, so there are no local hand-offs.
///
/// It cannot keep its promises on servers that have lost data they had acknowledged, or whose ticks are longer than
/// [`tick_time`](ZkConfig#structfield.tick_time). If somebody else deletes a holder's node or ends its session, the holder
/// does not learn of that *before* the next one is granted. It learns of it as soon as its server tells it, which takes a round
/// trip or so, and when its lease ends at the latest.
///
/// Clones share the session. Closing one closes all.
#[derive(Clone)]
pub struct ZkBackend {
    pub(crate) shared: Arc<Shared>,
}

/// The state that the claims and the backend share.
pub(crate) struct Shared {
    config: ZkConfig,
    address: Address,
    layout: Layout,
    /// The runtime that sessions live on.
    runtime: Handle,
    servers: Servers,
    current: Mutex<Option<Arc<Session>>>,
    pub(crate) crowded_dirs: CrowdedDirs,
    opening: Mutex<Option<Opening>>,
    closed: AtomicBool,
}

/// The outcome of a look for the node of a hold.
enum Look {
    /// There is none.
    None,
    Found(String, NodeState),
    /// The node of an exclusive hold has gone since it was listed, and a shared one may be in its place.
    Outdated,
}

/// A session that is being opened. It goes on without those who asked for it.
struct Opening {
    task: AbortHandle,
    outcome: future::Shared<BoxFuture<'static, error::Result<()>>>,
}

impl ZkBackend {
    /// Opens a session. Makes no node: the first acquisition makes the directories that are missing, and to look, it is enough to read.
    /// Call it within a Tokio runtime: the session lives there.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a value that cannot be kept, perhaps because of what the server grants, and for a file of
    /// certificates that cannot be used. Files are read once, here. [`Error::Backend`] if no server can be reached, or none lets
    /// this client in. It is permanent if TLS with every server failed because of a certificate. If nodes cannot be made, acquisitions
    /// say so.
    ///
    /// # Cancel safety
    /// May be dropped at any await. A session that has been opened ends.
    pub async fn connect(config: ZkConfig) -> Result<Self> {
        let address = config.check()?;
        let layout = Layout::new(&address.chroot, &config.namespace);
        let runtime = Handle::try_current().map_err(|_| Failure::NoRuntime.during("connect"))?;
        let shared = Shared {
            servers: Servers::new(&config, &address)?,
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
        let session = shared.session().await;
        let session = session.map_err(|error| error.during("connect"))?;
        shared.warn_of_open_directories(&session).await;
        Ok(Self { shared })
    }

    async fn look(&self, name: &LockName, kind: LockKind) -> error::Result<LockState> {
        self.look_at(&self.shared.layout.lock_path(name, kind), kind)
            .await
    }

    /// Returns the state of the lock or semaphore at this path.
    pub(crate) async fn look_at(&self, path: &str, kind: LockKind) -> error::Result<LockState> {
        let session = self.shared.session().await?;
        for _ in 0..MAX_LOOKS {
            let (nodes, waiting) = self.holding_nodes(&session, path, kind).await?;
            let is_outdated = !nodes.is_empty() && nodes.iter().all(|(_, node)| node.is_none());
            if !is_outdated {
                let nodes = nodes.into_iter();
                let nodes: Vec<_> = nodes.filter_map(|(path, node)| Some((path, node?))).collect();
                return Ok(LockState::new(self.holders(&session, nodes).await?, waiting));
            }
        }
        Err(Failure::Unstable {
            path: path.to_owned(),
        })
    }

    /// Returns the holders that made these nodes. A holder's lease is what its session has left, as far as its last heartbeat
    /// shows.
    async fn holders(
        &self,
        session: &Session,
        nodes: Vec<(String, NodeState)>,
    ) -> error::Result<Vec<Holder>> {
        let heartbeats = nodes
            .iter()
            .map(|(_, (_, stat))| self.shared.heartbeat_path(stat.ephemeral_owner));
        let heartbeats: Vec<_> = heartbeats.collect();
        let heartbeats = session.read_all(&heartbeats).await?;
        let bases = session.bases().await?;
        let holders = nodes.iter().zip(&heartbeats);
        let holders = holders
            .map(|((path, node), heartbeat)| self.holder(session, &bases, path, node, heartbeat.as_ref()));
        holders.collect()
    }

    /// Returns the token of the hold whose node is at this path.
    fn token(&self, bases: &Bases, path: &str, stat: &Stat) -> error::Result<u64> {
        let made_by = match self.shared.nodes() {
            Nodes::Simple => stat.czxid,
            Nodes::Mutex | Nodes::ReadWrite => made_by(path, stat.czxid),
        };
        token(bases, made_by)
    }

    /// Returns the holder that made this node at `path`, and whose session has this other node.
    ///
    /// # Errors
    /// If it has no token. It holds all the same.
    pub(crate) fn holder(
        &self,
        session: &Session,
        bases: &Bases,
        path: &str,
        (data, stat): &NodeState,
        heartbeat: Option<&NodeState>,
    ) -> error::Result<Holder> {
        let is_simple = self.shared.nodes() == Nodes::Simple;
        let label = if is_simple {
            simple::label(data).unwrap_or(data)
        } else {
            data
        };
        let is_label = |label: &&str| !label.is_empty() && !is_revoked(label.as_bytes(), stat);
        let label = std::str::from_utf8(label).ok().filter(is_label);
        let token = FencingToken::new(self.token(bases, path, stat)?);
        let left = heartbeat.and_then(|(data, stat)| left(session, data, stat));
        // In a queue, a node is made when its owner begins to wait.
        let made = u64::try_from(stat.ctime).ok().filter(|_| is_simple);
        let since = made.and_then(|made| UNIX_EPOCH.checked_add(Duration::from_millis(made)));
        Ok(Holder::new(token, label.map(str::to_owned), left).since(since))
    }

    /// Asks the holder with this token to make way, as Curator's `Revoker` does, by writing to its node. The number of its node is
    /// no other's, so that the request hits nobody else.
    async fn ask_back(&self, name: &LockName, kind: LockKind, token: u64) -> error::Result<Option<Lease>> {
        let path = self.shared.layout.lock_path(name, kind);
        let session = self.shared.session().await?;
        for _ in 0..LOOKS_FOR_A_HOLD {
            match self.node_of(&session, &path, kind, token).await? {
                Look::None => return Ok(None),
                Look::Found(path, node) if session.write(&path, REVOKE).await? => {
                    let since = Instant::now();
                    let holder = self.holders(&session, vec![(path, node)]).await?.pop();
                    return Ok(Some(Lease::new(since, holder.and_then(|holder| holder.left))));
                }
                Look::Found(..) | Look::Outdated => {}
            }
        }
        Ok(None)
    }

    async fn end(&self, name: &LockName, kind: LockKind, token: u64) -> error::Result<bool> {
        let path = self.shared.layout.lock_path(name, kind);
        let session = self.shared.session().await?;
        for _ in 0..LOOKS_FOR_A_HOLD {
            match self.node_of(&session, &path, kind, token).await? {
                Look::None => return Ok(false),
                Look::Found(path, _) if session.delete(&path).await? => return Ok(true),
                Look::Found(..) | Look::Outdated => {}
            }
        }
        Ok(false)
    }

    /// Looks for the node of the hold with this token.
    async fn node_of(
        &self,
        session: &Session,
        path: &str,
        kind: LockKind,
        token: u64,
    ) -> error::Result<Look> {
        let (nodes, _) = self.holding_nodes(session, path, kind).await?;
        let bases = session.bases().await?;
        let mut look = Look::None;
        for (path, node) in nodes {
            match node {
                Some(node) if self.token(&bases, &path, &node.1).is_ok_and(|its| its == token) => {
                    return Ok(Look::Found(path, node));
                }
                None if is_writers(&path) => look = Look::Outdated,
                Some(_) | None => {}
            }
        }
        Ok(look)
    }

    async fn show_fence(&self) -> error::Result<FencingToken> {
        let session = self.shared.session().await?;
        session.fence(self.shared.layout()).await.map(FencingToken::new)
    }

    async fn raise(&self, above: u64) -> error::Result<FencingToken> {
        let session = self.shared.session().await?;
        session.raise_fence(above).await.map(FencingToken::new)
    }

    /// Returns the nodes of the holders, `None` for one that has gone since, and in a queue how many wait.
    async fn holding_nodes(
        &self,
        session: &Session,
        path: &str,
        kind: LockKind,
    ) -> error::Result<(Vec<(String, Option<NodeState>)>, Option<usize>)> {
        if self.shared.nodes() == Nodes::Simple {
            let node = session.read_latest(path).await?;
            let held = node.filter(|(_, stat)| simple::is_holders(stat));
            let nodes = held.map(|node| (path.to_owned(), Some(node)));
            return Ok((nodes.into_iter().collect(), None));
        }
        let children = session.list_latest(path).await?;
        let (holders, waiting) = turn::holders(&children, kind);
        let paths: Vec<_> = holders.iter().map(|holder| format!("{path}/{holder}")).collect();
        let nodes = session.read_all(&paths).await?;
        Ok((paths.into_iter().zip(nodes).collect(), Some(waiting)))
    }
}

/// Returns how much of a session is left whose node has these data and this state.
fn left(session: &Session, data: &[u8], heartbeat: &Stat) -> Option<Duration> {
    let timeout = session_timeout(data)?;
    let now = session.server_clock().unwrap_or(heartbeat.mtime);
    let ago = Duration::from_millis(u64::try_from(now.saturating_sub(heartbeat.mtime)).unwrap_or(0));
    Some(timeout.saturating_sub(ago))
}

impl Shared {
    /// Warns if others may create or delete nodes where this client's are, which nobody else is to touch.
    async fn warn_of_open_directories(&self, session: &Session) {
        if self.config.access() != Access::Creator {
            return;
        }
        let directories = self.layout.directories();
        let looks = future::join_all(directories.iter().map(|directory| session.acl(directory)));
        // A server that does not answer gives no locks either, and no reason to warn.
        let Ok(acls) = timeout(LOOKS_FOR_OTHERS, looks).await else {
            return;
        };
        let open = directories.iter().zip(acls).filter(|(_, acl)| {
            let acl = acl.as_ref().ok().and_then(Option::as_ref);
            acl.is_some_and(|acl| acl.iter().any(|acl| self.lets_others_in(acl)))
        });
        let open: Vec<_> = open.map(|(directory, _)| directory.as_str()).collect();
        if !open.is_empty() {
            tracing::warn!(
                directories = open.join(", "),
                "others may create or delete nodes in directories of the locks, and so delete holds or put something else in their place; \
                 let the user of this client alone do that"
            );
        }
    }

    /// Returns whether this rule is for others than this client's user, and lets them create or delete.
    fn lets_others_in(&self, acl: &Acl) -> bool {
        let (who, config) = (acl.auth_id(), &self.config);
        let is_own = match who.scheme() {
            // The servers keep the password's hash to themselves.
            "digest" => {
                let user = config.auth.as_ref().map(|digest| digest.user.as_str());
                who.id().split(':').next() == user
            }
            "auth" => true,
            "x509" => config.cert.is_some(),
            _ => false,
        };
        let writes = Permission::CREATE | Permission::DELETE;
        !is_own && (acl.permission() & writes) != Permission::NONE
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn nodes(&self) -> Nodes {
        self.config.nodes
    }

    /// Returns the node that the session of this id writes to.
    pub(crate) fn heartbeat_path(&self, session: i64) -> String {
        self.layout.heartbeat_path(session)
    }

    /// Returns the session, or a new one if it has ended.
    pub(crate) async fn session(self: &Arc<Self>) -> error::Result<Arc<Session>> {
        if let Some(session) = self.live()? {
            return Ok(session);
        }
        let opened = {
            let mut opening = self.opening.lock();
            // The outcome of one that is done was for those who had asked by then.
            opening.take_if(|opening| opening.task.is_finished());
            if let Some(session) = self.live()? {
                return Ok(session);
            }
            let opening = opening.get_or_insert_with(|| self.begin_opening());
            // Each caller has a handle of its own, so that one that is not polled is in nobody's way.
            opening.outcome.clone()
        };
        opened.await?;
        self.live()?
            .ok_or(Failure::SessionEnded(LossReason::Disconnected))
    }

    fn begin_opening(self: &Arc<Self>) -> Opening {
        let shared = self.clone();
        // On the runtime where the session lives, which need not be the caller's.
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
        // A close meanwhile has found no session to close.
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
        Ok(self.slot().clone().filter(|session| session.ended().is_none()))
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<Session>>> {
        self.current.lock()
    }
}

#[async_trait]
impl Backend for ZkBackend {
    fn info(&self) -> BackendInfo {
        let is_queue = self.shared.nodes() != Nodes::Simple;
        let mut capabilities = Capabilities::default();
        capabilities.fifo = is_queue;
        capabilities.shared = is_queue;
        capabilities.downgrade = is_queue;
        capabilities.permits = is_queue;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.revoke = is_queue;
        capabilities.revoke_by_force = true;
        capabilities.list = true;
        capabilities.raise_fence = true;
        capabilities.fencing = FencingDurability::Durable;
        let Address { hosts, chroot } = &self.shared.address;
        let mut info = BackendInfo::new(NAME, format!("zk://{hosts}{chroot}"));
        info.namespace = self.shared.config.namespace.as_str().into();
        info.secrets = Secrets::of_passwords(self.shared.config.auth.iter().map(|auth| &auth.password));
        info.instead = (!is_queue).then_some(QUEUE_INSTEAD);
        info.capabilities = capabilities;
        info.fallback_poll = FALLBACK_POLL;
        info.least_ttl = LEAST_TTL;
        info
    }

    /// Returns the session timeout that was granted last, whatever the `ttl`, and two ticks: the servers round the timeout up
    /// to a tick, and count from when they were last told of the session, which is half a tick late.
    fn dead_holder_bound(&self, _ttl: Duration) -> Duration {
        self.shared.servers.granted() + self.shared.config.tick_time * 2
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        let shared = self.shared.clone();
        let path = shared.layout.lock_path(&request.name, request.mode.kind());
        match request.mode {
            Mode::Shared | Mode::Permits(_) if shared.nodes() == Nodes::Simple => {
                Err(Error::unsupported(NAME, QUEUE_INSTEAD))
            }
            Mode::Permits(permits) if permits.get() > MAX_PERMITS => {
                let reason = format!(
                    "{permits} is more than the {MAX_PERMITS} permits that ZooKeeper can serve; ask for fewer"
                );
                Err(Error::invalid_option("permits", reason))
            }
            _ => Ok(Box::new(ZkClaim::new(shared, request.clone(), path))),
        }
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let looked = error::contained(self.look(name, kind)).await;
        looked.map_err(|error| error.during("inspect"))
    }

    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        Ok(Box::new(ZkLister::new(self.clone(), prefix)))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        if self.shared.nodes() == Nodes::Simple {
            return Err(Error::unsupported(NAME, ONLY_BY_FORCE));
        }
        let asked = error::contained(self.ask_back(name, kind, token.get())).await;
        asked.map_err(|error| error.during("revoke"))
    }

    async fn watch(&self, name: &LockName, kind: LockKind) -> Result<Option<Box<dyn HolderWatch>>> {
        let path = self.shared.layout.lock_path(name, kind);
        let watch = error::contained(ZkWatch::begin(self.shared.clone(), path, kind)).await;
        Ok(Some(Box::new(watch.map_err(|error| error.during("watch"))?)))
    }

    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        let ended = error::contained(self.end(name, kind, token.get())).await;
        ended.map_err(|error| error.during("revoke"))
    }

    async fn fence(&self) -> Result<FencingToken> {
        let fence = error::contained(self.show_fence()).await;
        fence.map_err(|error| error.during("fence"))
    }

    async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        check(above, MOST)?;
        let fence = self.raise(above.get()).await;
        fence.map_err(|error| error.during("raise"))
    }

    async fn close(&self) -> Result<()> {
        self.shared.closed.store(true, Ordering::SeqCst);
        let session = self.shared.slot().clone();
        if let Some(session) = session {
            // It stays in its slot until it is closed, so that closing again goes on.
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
