//! The backend: one connection for all locks of a client, and one session for each ttl.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use futures_util::{
    FutureExt as _,
    future::{self, BoxFuture, join_all, try_join_all},
};
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, LockKind, LockName, LockState, Result,
    spi::{
        Backend, BackendInfo, Claim, ClaimRequest, HolderWatch, Lease, Lister, Mode, Secrets, Unencrypted,
        fence::{Bases, MOST, check},
        queue::holders,
    },
};
use tokio::{runtime::Handle, time::Instant};

use crate::{
    EtcdConfig, NAME,
    claim::EtcdClaim,
    config::Address,
    connection::Options,
    error::{self, Failure},
    fence,
    holder_watch::EtcdWatch,
    layout::{Layout, asked_back, contender, is_asked_back, label, lost_lease, prefix, reads_as_asked},
    lease::{MAX_TTL, seconds},
    list::EtcdLister,
    lock,
    members::Members,
    own_key::{MAX_CHANGES, as_read, put_back},
    session::Session,
    watch::Watcher,
    wire::{
        Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, Request, SortOrder, SortTarget,
        TxnRequest,
    },
};

/// The largest semaphore. A waiter for a permit watches as many others as there are permits.
const MAX_PERMITS: u32 = 1_000;
/// The last resort of a waiter, since watches are reliable. Each poll of a waiter takes one small read.
const FALLBACK_POLL: Duration = Duration::from_secs(5);
/// The servers look for leases that have ended every half second, and delete their keys then.
const EXPIRY_LOOKS: Duration = Duration::from_millis(500);

/// Locks on an etcd cluster.
///
/// A hold is a key with a lease. All holds of a client with one ttl, in whole seconds, share a lease. It ends when the client is closed,
/// or its ttl after the cluster renewed it last. Then all its holds are lost, and acquisitions go on with a new lease.
///
/// A holder proves its lease by a renewal and a read after it, in one term of the cluster's leader, and counts the time itself. So it
/// learns of a loss before the cluster lets anyone else in. That is true also if the member that renews has lost touch with the others
/// without knowing. Fencing tokens are the revisions that made the keys, until tokens are raised. They rise over everything.
///
/// Waiters are granted strictly in the order of these revisions, so there are no local hand-offs. `etcdctl lock` and the mutex of etcd's
/// Go package `concurrency` on the key `<namespace>/<name>` queue with them, and are exclusive.
///
/// It cannot keep its promises on servers that have lost data they had acknowledged, or were restored from a snapshot. Before 3.4.31 and
/// 3.5.13, a leader that was stuck may end leases that were renewed meanwhile. If somebody else deletes a holder's key or revokes its
/// lease, the holder does not learn of that *before* the next one is granted. It learns of it as soon as its member tells it, which takes
/// a round trip or so, and when its lease ends at the latest.
///
/// Clones share the connection. Closing one closes all.
#[derive(Clone)]
pub struct EtcdBackend {
    pub(crate) shared: Arc<Shared>,
}

/// The state that the claims and the backend share.
pub(crate) struct Shared {
    config: EtcdConfig,
    address: Address,
    layout: Layout,
    /// The runtime that connections and sessions live on.
    runtime: Handle,
    pub(crate) members: Arc<Members>,
    pub(crate) watcher: Arc<Watcher>,
    /// By their ttl in seconds.
    sessions: Mutex<HashMap<u64, Opening>>,
    closed: AtomicBool,
}

/// A session that is open or being opened. It goes on without those who asked for it.
type Opening = future::Shared<BoxFuture<'static, error::Result<Arc<Session>>>>;

impl EtcdBackend {
    /// Connects to one of the members. Call it within a Tokio runtime: the connection lives there.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a value that cannot be kept, and for a file of certificates that cannot be used. Files are read
    /// once, here. [`Error::Backend`] if no member can be reached, or none lets this client in. It is permanent if all members refuse.
    ///
    /// # Cancel safety
    /// May be dropped at any await. Nothing is left.
    pub async fn connect(config: EtcdConfig) -> Result<Self> {
        let address = config.check()?;
        let layout = Layout::new(&address.prefix, &config.namespace);
        let runtime = Handle::try_current().map_err(|_| Failure::NoRuntime.during("connect"))?;
        let options = Options {
            credentials: config.auth.clone(),
            secrets: Secrets::of_passwords(config.auth.iter().map(|auth| &auth.password)),
            unencrypted: Unencrypted::default(),
            has_warned: Arc::default(),
            #[cfg(feature = "tls")]
            trust: crate::tls::Trust::new(&config)?,
        };
        let members = Members::new(address.hosts.clone(), options);
        let shared = Shared {
            watcher: Arc::new(Watcher::new(members.clone())),
            members,
            config,
            address,
            layout,
            runtime,
            sessions: Mutex::default(),
            closed: AtomicBool::new(false),
        };
        let connected = shared.members.logged_in().await;
        connected.map_err(|failure| failure.during("connect"))?;
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    async fn look(&self, name: &LockName, kind: LockKind) -> error::Result<LockState> {
        let queue = self.shared.layout.queue(name, kind);
        self.shared.members.logged_in().await?;
        let seen = self.shared.read_queue(&queue).await?;
        let mut states = self.shared.states(vec![(queue, kind, seen)]).await?;
        Ok(states.pop().unwrap_or_default())
    }

    /// Returns the key of the holder with this token, if there is one.
    async fn key_of(
        &self,
        name: &LockName,
        kind: LockKind,
        token: FencingToken,
    ) -> error::Result<Option<KeyValue>> {
        let queue = self.shared.layout.queue(name, kind);
        self.shared.members.logged_in().await?;
        let seen = self.shared.read_queue(&queue).await?;
        let held = holding(&queue, kind, &seen).0.into_iter().cloned();
        let bases = self.shared.bases().await?;
        let mut held = held.filter(|kv| self::token(&bases, kv) == Some(token));
        Ok(held.next())
    }

    /// Asks the holder with this token to make way, by a write to its key that leaves its lease as it is.
    async fn ask_back(
        &self,
        name: &LockName,
        kind: LockKind,
        token: FencingToken,
    ) -> error::Result<Option<Lease>> {
        let members = &self.shared.members;
        let queue = self.shared.layout.queue(name, kind);
        for _ in 0..MAX_CHANGES {
            let Some(kv) = self.key_of(name, kind, token).await? else {
                return Ok(None);
            };
            if let Some(lease) = lost_lease(&queue, &kv) {
                // First of all: after another write, nobody could tell any more which lease its client counts with.
                put_back(members, kv, lease).await?;
                continue;
            }
            let since = Instant::now();
            let left = members.connection().await?.time_to_live(kv.lease).await?;
            let lease = Lease::new(since, left.map(Duration::from_secs));
            if is_asked_back(&kv) {
                return Ok(Some(lease));
            }
            let put = PutRequest {
                key: kv.key.clone(),
                value: asked_back(&kv),
                ignore_lease: true,
                ..PutRequest::default()
            };
            // One that was written to meanwhile may have been taken off its lease, and is read again.
            let request = TxnRequest {
                compare: as_read(&kv),
                success: vec![Request::Put(put).into()],
                failure: Vec::new(),
            };
            if members.call(request).await?.succeeded {
                return Ok(Some(lease));
            }
        }
        Err(Failure::Unknown("the key keeps being written to".to_owned()))
    }

    async fn end(&self, name: &LockName, kind: LockKind, token: FencingToken) -> error::Result<bool> {
        let Some(kv) = self.key_of(name, kind, token).await? else {
            return Ok(false);
        };
        let delete = DeleteRangeRequest {
            key: kv.key.clone(),
            prev_kv: false,
        };
        // It may be a key of another program, whose names come back.
        let request = TxnRequest {
            compare: vec![Compare::created(kv.key, kv.create_revision)],
            success: vec![Request::Delete(delete).into()],
            failure: Vec::new(),
        };
        Ok(self.shared.members.call(request).await?.succeeded)
    }
}

/// Refuses a ttl that no lease has.
pub(crate) fn check_ttl(ttl: Duration) -> Result<()> {
    if ttl <= MAX_TTL {
        return Ok(());
    }
    let reason = format!(
        "{ttl:?} is longer than a lease on etcd may last, {MAX_TTL:?}; renewals keep a hold for longer"
    );
    Err(Error::invalid_option("ttl", reason))
}

/// Returns the token of the hold whose key this is.
fn token(bases: &Bases, kv: &KeyValue) -> Option<FencingToken> {
    fence::token(bases, kv.create_revision)
        .ok()
        .map(FencingToken::new)
}

/// Returns the keys of those who hold, and the number of those who wait.
fn holding<'a>(queue: &str, kind: LockKind, seen: &'a [KeyValue]) -> (Vec<&'a KeyValue>, usize) {
    let contenders: Vec<_> = seen.iter().filter_map(|kv| contender(queue, kind, kv)).collect();
    let (held, waiting) = holders(&contenders, kind);
    let held = held
        .iter()
        .filter_map(|key| seen.iter().find(|kv| kv.key == *key));
    (held.collect(), waiting)
}

impl Shared {
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the error for a caller of `operation`. It names the keys of this namespace.
    pub(crate) fn error(&self, operation: &'static str, failure: Failure) -> Error {
        failure.about(self.layout.root()).during(operation)
    }

    /// Returns the contenders whose keys begin with this prefix.
    pub(crate) async fn read_queue(&self, queue: &str) -> error::Result<Vec<KeyValue>> {
        let (key, range_end) = prefix(queue);
        let request = RangeRequest {
            key,
            range_end,
            sort_order: SortOrder::Ascend.into(),
            sort_target: SortTarget::Create.into(),
            ..RangeRequest::default()
        };
        self.check_open()?;
        Ok(self.members.call(request).await?.kvs)
    }

    /// Returns the states of the locks with these prefixes and contenders.
    pub(crate) async fn states(
        &self,
        queues: Vec<(String, LockKind, Vec<KeyValue>)>,
    ) -> error::Result<Vec<LockState>> {
        let held: Vec<_> = queues
            .iter()
            .map(|(queue, kind, seen)| holding(queue, *kind, seen))
            .collect();
        let mut leases: Vec<_> = held
            .iter()
            .flat_map(|(held, _)| held.iter().map(|kv| kv.lease))
            .collect();
        leases.sort_unstable();
        leases.dedup();
        let bases = if leases.is_empty() {
            Bases::default()
        } else {
            self.bases().await?
        };
        let connection = self.members.connection().await?;
        let left = leases.iter().map(|lease| connection.time_to_live(*lease));
        let left = try_join_all(left).await?;
        let left: HashMap<_, _> = leases.iter().zip(left).collect();
        let states = held.into_iter().map(|(held, waiting)| {
            let holders = held.into_iter().map(|kv| {
                let left = left.get(&kv.lease).copied().flatten();
                // Without it the lock is held all the same, and is not shown as free.
                let token = FencingToken::new(fence::token(&bases, kv.create_revision)?);
                Ok(Holder::new(token, label(kv), left.map(Duration::from_secs)))
            });
            let holders = holders.collect::<error::Result<Vec<_>>>()?;
            Ok(LockState::new(holders, Some(waiting)))
        });
        states.collect()
    }

    /// Returns the session for this ttl, or a new one if it has ended.
    pub(crate) async fn session(self: &Arc<Self>, ttl: Duration) -> error::Result<Arc<Session>> {
        let seconds = seconds(ttl);
        let opening = {
            let mut sessions = lock(&self.sessions);
            // Under the lock, so that a close finds it.
            self.check_open()?;
            let is_over = |opening: &mut Opening| match opening.peek() {
                Some(Ok(session)) => session.ended().is_some(),
                Some(Err(_)) => true,
                None => false,
            };
            if sessions.get_mut(&seconds).is_some_and(is_over) {
                sessions.remove(&seconds);
            }
            // Each caller has a handle of its own, so that one that is not polled is in nobody's way.
            let opening = sessions.entry(seconds).or_insert_with(|| self.open(seconds));
            opening.clone()
        };
        opening.await
    }

    fn open(&self, seconds: u64) -> Opening {
        let (members, watcher, layout) = (self.members.clone(), self.watcher.clone(), self.layout.clone());
        // On the runtime where the session lives, which need not be the caller's.
        let opened = self.runtime.spawn(async move {
            let opened = Session::open(&members, &watcher, &layout, seconds).await;
            opened.map(Arc::new)
        });
        let outcome = opened.map(|opened| opened.unwrap_or(Err(Failure::RuntimeGone)));
        outcome.boxed().shared()
    }

    pub(crate) fn check_open(&self) -> error::Result<()> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(Failure::Closed);
        }
        Ok(())
    }

    /// Ends all sessions.
    async fn close(&self) -> error::Result<()> {
        self.members.check_runtime()?;
        let sessions: Vec<_> = {
            let sessions = lock(&self.sessions);
            self.closed.store(true, Ordering::SeqCst);
            sessions
                .iter()
                .map(|(ttl, session)| (*ttl, session.clone()))
                .collect()
        };
        let closed = join_all(sessions.into_iter().map(async |(ttl, session)| {
            if let Ok(session) = session.await {
                session.close().await?;
            }
            // One that is not closed stays, so that closing again goes on.
            lock(&self.sessions).remove(&ttl);
            Ok(())
        }));
        closed.await.into_iter().collect()
    }
}

#[async_trait]
impl Backend for EtcdBackend {
    fn info(&self) -> BackendInfo {
        let mut capabilities = Capabilities::default();
        capabilities.fifo = true;
        capabilities.shared = true;
        capabilities.permits = true;
        capabilities.notified = true;
        capabilities.lease = true;
        capabilities.revoke = true;
        capabilities.revoke_by_force = true;
        capabilities.list = true;
        capabilities.raise_fence = true;
        capabilities.fencing = FencingDurability::Durable;
        let mut info = BackendInfo::new(NAME, self.shared.address.url());
        info.namespace = self.shared.config.namespace.as_str().into();
        info.secrets = Secrets::of_passwords(self.shared.config.auth.iter().map(|auth| &auth.password));
        info.capabilities = capabilities;
        info.fallback_poll = FALLBACK_POLL;
        info
    }

    /// Returns the ttl in whole seconds, and what the servers take to notice. A change of the leader lets every lease begin anew.
    fn dead_holder_bound(&self, ttl: Duration) -> Duration {
        Duration::from_secs(seconds(ttl)) + 2 * EXPIRY_LOOKS
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        check_ttl(request.ttl)?;
        if request.label.as_deref().is_some_and(reads_as_asked) {
            let reason = "it begins as the words by which a holder is asked to give up its hold";
            return Err(Error::invalid_option("label", reason));
        }
        if let Mode::Permits(permits) = request.mode
            && permits.get() > MAX_PERMITS
        {
            let reason = format!(
                "{permits} is more than the {MAX_PERMITS} permits that etcd can serve; ask for fewer"
            );
            return Err(Error::invalid_option("permits", reason));
        }
        let queue = self.shared.layout.queue(&request.name, request.mode.kind());
        Ok(Box::new(EtcdClaim::new(
            self.shared.clone(),
            request.clone(),
            queue,
        )))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let looked = self.look(name, kind).await;
        looked.map_err(|failure| self.shared.error("inspect", failure))
    }

    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        Ok(Box::new(EtcdLister::new(self.shared.clone(), prefix)))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        let asked = self.ask_back(name, kind, token).await;
        asked.map_err(|failure| self.shared.error("revoke", failure))
    }

    async fn watch(&self, name: &LockName, kind: LockKind) -> Result<Option<Box<dyn HolderWatch>>> {
        let queue = self.shared.layout.queue(name, kind);
        let watch = EtcdWatch::begin(self.shared.clone(), queue, kind).await;
        Ok(Some(Box::new(
            watch.map_err(|failure| self.shared.error("watch", failure))?,
        )))
    }

    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        let ended = self.end(name, kind, token).await;
        ended.map_err(|failure| self.shared.error("revoke", failure))
    }

    async fn fence(&self) -> Result<FencingToken> {
        let fence = self.shared.raise_fence(0).await;
        fence
            .map(FencingToken::new)
            .map_err(|failure| self.shared.error("fence", failure))
    }

    async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        check(above, MOST)?;
        let fence = self.shared.raise_fence(above.get()).await;
        fence
            .map(FencingToken::new)
            .map_err(|failure| self.shared.error("raise", failure))
    }

    async fn close(&self) -> Result<()> {
        self.shared
            .close()
            .await
            .map_err(|failure| failure.during("close"))
    }
}

impl fmt::Debug for EtcdBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdBackend")
            .field("config", &self.shared.config)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}
