//! One session: its requests, the proof that it lives, and what is still to be cleaned up on it.

use std::{
    collections::VecDeque,
    fmt::{self, Write as _},
    iter::successors,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::future::{OptionFuture, join_all};
#[cfg(not(test))]
use lockkit_core::spi::asleep;
use lockkit_core::{LossReason, spi::SessionProof};
#[cfg(test)]
use tests::asleep;
use tokio::{
    net::TcpStream,
    runtime::Handle,
    sync::{Notify, watch},
    time::{Instant, sleep, timeout as within},
};
use zookeeper_client::{
    Acls, Client, Connector, CreateMode, CreateOptions, CreateSequence, Error as ZkError, MultiReadResult,
    MultiWriteError, MultiWriteResult, SessionInfo, SessionState, Stat,
};

use crate::{
    Access, Parents, ZkConfig,
    abandon_watch::AbandonWatch,
    config::{Address, check_session_timeout},
    connection::Connection,
    distance::Distance,
    error::{Failure, Result, is_refusal},
    layout::{Layout, basename, parent},
    lease::Proof,
    watch::{Watch, WatchEvent, WatchState},
};

/// How long a server may be silent, or take to let a client in, before another one is tried, at least. It is long against
/// what a server takes, and short against a session.
const SHORTEST_SILENCE: Duration = Duration::from_secs(1);
/// How long to wait after no server of a round has let the client in.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How many watches are set again at once.
const WATCHES_AT_ONCE: usize = 256;
/// How often a directory that vanishes as soon as it is made is made again.
const MAX_VANISHED: usize = 8;
/// How many of its last holds a session names. A waiter asks for one within a round trip or so of its release.
const MAX_NAMED: usize = 16;
/// What is less than this is two clocks' not being read in the same instant.
const LEAST_SLEEP: Duration = Duration::from_millis(1);

/// A session with an ensemble. When it is dropped, it ends, and all its nodes with it.
pub(crate) struct Session {
    core: Arc<Core>,
}

struct Core {
    id: i64,
    /// To attach it again.
    info: SessionInfo,
    access: Servers,
    /// The connection, while there is one that is known to lead to the ensemble.
    connection: watch::Sender<Option<Arc<Connection>>>,
    status: watch::Sender<Status>,
    /// The end of what is proven, for each hold to heed, or why it is over.
    proven: watch::Sender<std::result::Result<Instant, LossReason>>,
    /// Where it writes, to prove that it lives.
    heartbeat_path: String,
    /// What it writes there, behind the session timeout: the transactions that made the nodes that it last held and
    /// [let go by name](Session::delete_by_name).
    named: Mutex<VecDeque<i64>>,
    options: NodeOptions,
    pending_delete: Mutex<Vec<PendingDelete>>,
    delete_pending: Notify,
    /// Of the nodes that somebody has asked for. Those that nobody looks after any more are removed.
    abandon_watches: Mutex<Vec<Weak<AbandonWatch>>>,
    distance: Distance,
    /// A server does not know multi-reads.
    old: AtomicBool,
    watches: Mutex<Watches>,
    /// There is a watch that was set on a connection that is lost.
    blinded: Notify,
    /// It is to be closed at the server.
    closing: watch::Sender<bool>,
    /// Its task has ended: by itself, or with its runtime.
    done: watch::Sender<Option<bool>>,
}

/// The watches that somebody waits for.
#[derive(Default)]
struct Watches {
    all: Vec<Weak<WatchState>>,
    /// With so many, those are forgotten that nobody waits for any more.
    many: usize,
}

/// How to reach the servers.
#[derive(Clone)]
pub(crate) struct Servers {
    hosts: Vec<String>,
    credentials: Option<String>,
    /// The session timeout to ask for.
    timeout: Duration,
    tick: Duration,
    /// What was granted last.
    granted: Arc<Mutex<Duration>>,
}

/// What is known of a session.
#[derive(Clone, Debug)]
pub(crate) struct Status {
    proof: Proof,
    /// What the machine has slept in all, as far as the proof knows.
    asleep: Duration,
    /// The server's clock in ms since 1970, and when it was that.
    server_clock: (i64, Instant),
    over: Option<LossReason>,
}

/// How nodes are made.
#[derive(Clone, Copy, Debug)]
struct NodeOptions {
    acls: Acls<'static>,
    parents: CreateMode,
}

/// A node that nobody has a use for any more, and that may be there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PendingDelete {
    /// At this path.
    At(String),
    /// With this path and some sequence number behind it, if it was created at all.
    Begins(String),
    /// At this path, if it is this session's and its data begin so.
    Marked { path: String, mark: String },
}

/// A sequential node that has been made.
#[derive(Debug)]
pub(crate) struct Enqueued {
    pub(crate) path: String,
    pub(crate) sequence: i64,
    pub(crate) czxid: i64,
    /// How many others are in the directory, all of them before it; `None` if that was not to be asked.
    pub(crate) others: Option<usize>,
    /// How the name begins of the node that was made there before it, unless others made that.
    pub(crate) last: Option<String>,
}

/// A node that was looked for.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) path: String,
    pub(crate) czxid: i64,
}

impl Enqueued {
    /// It was made without a look at the others.
    fn by_itself(prefix: &str, (stat, sequence): (Stat, CreateSequence)) -> Self {
        Self {
            path: format!("{prefix}{sequence}"),
            sequence: sequence.into_i64(),
            czxid: stat.czxid,
            others: None,
            last: None,
        }
    }
}

impl Servers {
    pub(crate) fn new(config: &ZkConfig, address: &Address) -> Self {
        Self {
            hosts: address.hosts.split(',').map(str::to_owned).collect(),
            credentials: config
                .auth
                .as_ref()
                .map(|digest| format!("{}:{}", digest.user, digest.password)),
            timeout: config.session_timeout,
            tick: config.tick_time,
            granted: Arc::new(Mutex::new(config.session_timeout)),
        }
    }

    /// The session timeout that was granted last.
    pub(crate) fn granted(&self) -> Duration {
        *lock(&self.granted)
    }

    fn connector(&self) -> Connector {
        let connector = Client::connector()
            .with_session_timeout(self.timeout)
            .with_connection_timeout(self.silence())
            .with_fail_eagerly();
        match &self.credentials {
            Some(credentials) => connector.with_auth("digest", credentials.as_bytes()),
            None => connector,
        }
    }

    fn silence(&self) -> Duration {
        (self.timeout / 5).max(SHORTEST_SILENCE)
    }

    /// How long one server may take in the `round`th round: at first little, for the sake of those who wait.
    fn limit(&self, round: u32) -> Duration {
        SHORTEST_SILENCE
            .saturating_mul(1 << round.min(5))
            .min(self.silence())
    }

    /// The servers in any order, so that clients spread over them.
    fn shuffled(&self) -> Vec<String> {
        let mut hosts = self.hosts.clone();
        fastrand::shuffle(&mut hosts);
        hosts
    }

    /// Opens a session; says when it was asked for. Servers that are silent are tried once more, for longer.
    async fn open(&self) -> Result<(Connection, Instant)> {
        let mut last = ZkError::NoHosts;
        for round in [0, u32::MAX] {
            let mut silent = false;
            for host in self.shuffled() {
                let sent = Instant::now();
                match within(self.limit(round), Connection::connect(self.connector(), &host)).await {
                    Ok(Ok(connection)) => return Ok((connection, sent)),
                    Ok(Err(error)) => last = error,
                    Err(_) => silent = true,
                }
            }
            if !silent || last == ZkError::AuthFailed {
                break;
            }
        }
        Err(last.into())
    }
}

impl Session {
    /// Opens a session.
    pub(crate) async fn open(config: &ZkConfig, servers: &Servers, layout: &Layout) -> Result<Self> {
        let asleep = asleep();
        let (connection, sent) = servers.open().await?;
        Self::on(connection, (sent, asleep), config, servers, layout).await
    }

    /// A session that this connection has opened; it was asked for then, when the machine had slept so much.
    async fn on(
        connection: Connection,
        (sent, asleep): (Instant, Duration),
        config: &ZkConfig,
        servers: &Servers,
        layout: &Layout,
    ) -> Result<Self> {
        let runtime = Handle::try_current().map_err(|_| Failure::NoRuntime)?;
        let timeout = connection.timeout();
        check_session_timeout(timeout, config.tick_time, "granted by the server")
            .map_err(Failure::ShortSession)?;
        *lock(&servers.granted) = timeout;
        let connection = Arc::new(connection);
        let info = connection.client.session().clone();
        let id = info.id().0;
        let proof = Proof::opened(timeout, config.tick_time, connection.liveness().number(), sent);
        let core = Arc::new(Core {
            id,
            info,
            access: Servers {
                timeout,
                ..servers.clone()
            },
            connection: watch::Sender::new(Some(connection.clone())),
            proven: watch::Sender::new(Ok(proof.end())),
            status: watch::Sender::new(Status {
                proof,
                asleep,
                server_clock: (0, sent),
                over: None,
            }),
            heartbeat_path: layout.session(id),
            named: Mutex::default(),
            options: NodeOptions::of(config),
            pending_delete: Mutex::default(),
            delete_pending: Notify::new(),
            abandon_watches: Mutex::default(),
            distance: Distance::default(),
            old: AtomicBool::new(false),
            watches: Mutex::default(),
            blinded: Notify::new(),
            closing: watch::Sender::new(false),
            done: watch::Sender::new(None),
        });
        // With this connection or not at all: so far nobody makes another.
        core.make_heartbeat_node(&connection).await?;
        runtime.spawn(keep(EndOnDrop(core.clone())));
        Ok(Self { core })
    }

    pub(crate) fn id(&self) -> i64 {
        self.core.id
    }

    /// Why it has ended, if it has.
    pub(crate) fn over(&self) -> Option<LossReason> {
        self.core.over()
    }

    /// Until when the server cannot have ended it by itself.
    pub(crate) fn proven_until(&self) -> Instant {
        self.core.asleep();
        self.core.status.borrow().proof.end()
    }

    /// The end of what is proven, for whoever is to be told when it is less, or over.
    pub(crate) fn proof(&self) -> SessionProof {
        self.core.proven.subscribe()
    }

    /// When it is [over](Self::over), or turns out not to be proven until then.
    pub(crate) async fn proven_less_than(&self, until: Instant) {
        let mut status = self.core.status.subscribe();
        let _ = status
            .wait_for(|status| status.over.is_some() || status.proof.end() < until)
            .await;
    }

    /// When it is [over](Self::over), or proven for longer than `until`.
    pub(crate) async fn proven_beyond(&self, until: Instant) {
        let mut status = self.core.status.subscribe();
        // The sender lives as long as the session.
        let _ = status
            .wait_for(|status| status.over.is_some() || status.proof.end() > until)
            .await;
    }

    /// The next beat or the end, whichever comes first.
    pub(crate) async fn next_news(&self) {
        let _ = self.core.status.subscribe().changed().await;
    }

    /// The number of the connection, if there is one: another one means that it was interrupted.
    pub(crate) fn connection_id(&self) -> Option<u64> {
        let connection = self.core.connection.borrow();
        let liveness = connection.as_ref().map(|connection| connection.liveness());
        liveness
            .filter(|liveness| !liveness.is_over())
            .map(|liveness| liveness.number())
    }

    /// The server is so far that a request more is cheaper than to wait for one.
    pub(crate) fn is_far(&self) -> bool {
        self.core.distance.is_far()
    }

    /// The server's clock, in ms since 1970; `None` before the first beat.
    pub(crate) fn server_clock(&self) -> Option<i64> {
        let (then, at) = self.core.status.borrow().server_clock;
        (then > 0).then(|| then.saturating_add(i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX)))
    }

    /// Has it cleaned up, for as long as that takes.
    pub(crate) fn leave_behind(&self, pending_delete: PendingDelete) {
        self.core.leave_behind([pending_delete]);
    }

    /// Has it removed if it is forsaken.
    pub(crate) fn watch_over(&self, abandon_watch: &Arc<AbandonWatch>) {
        lock(&self.core.abandon_watches).push(Arc::downgrade(abandon_watch));
    }

    /// Makes a sequential node and asks, in the same request, whether it is alone.
    ///
    /// The two go together as a transaction that also writes the directory, whose state comes back: the number of nodes
    /// in it, and, as that of its last change, the transaction's id, which is the new node's `czxid` too. What it writes
    /// is how the node's name begins, for whoever comes next and [follows](Entered::last): that one reads it, sent before and
    /// together with all this. So many directories as are `missing` are made as well: servers do not remove one that
    /// never had a child.
    pub(crate) async fn enqueue(
        &self,
        abandon_watch: &AbandonWatch,
        prefix: &str,
        data: &[u8],
        missing: usize,
        follows: bool,
    ) -> Result<std::result::Result<Enqueued, ZkError>> {
        let connection = self.core.connection().await?;
        let client = &connection.client;
        let mut writer = client.new_multi_writer();
        let options = self.core.options.ephemeral(CreateMode::EphemeralSequential);
        let above = successors(Some(parent(prefix)), |dir| Some(parent(dir)));
        let missing: Vec<_> = above.take(missing).collect();
        for dir in missing.iter().rev() {
            writer.add_create(dir, b"", &self.core.options.directory())?;
        }
        writer.add_create(prefix, data, &options)?;
        writer.add_set_data(parent(prefix), basename(prefix).as_bytes(), None)?;
        let last = follows.then(|| client.get_data(parent(prefix)));
        let committed = abandon_watch.asks_by(|| writer.commit())?;
        let (last, committed) = tokio::join!(OptionFuture::from(last), committed);
        let error = match committed {
            Ok(results) => match &results[..] {
                [
                    ..,
                    MultiWriteResult::Create { path, .. },
                    MultiWriteResult::SetData { stat },
                ] => {
                    let sequence = path.get(prefix.len()..).and_then(|number| number.parse().ok());
                    let sequence = sequence.ok_or_else(|| {
                        ZkError::UnexpectedError(format!("a sequential node came out as {path}"))
                    })?;
                    return Ok(Ok(Enqueued {
                        path: path.clone(),
                        sequence,
                        czxid: stat.mzxid,
                        others: usize::try_from(stat.num_children - 1).ok(),
                        last: last.and_then(|last| entrant(last.ok()?.0)),
                    }));
                }
                _ => ZkError::UnexpectedError("a transaction had too few results".to_owned()),
            },
            // The directory is not to be written: without it, then, and without knowing who else is there.
            Err(MultiWriteError::OperationFailed {
                index: 1,
                source: ZkError::NoAuth,
            }) if missing.is_empty() => {
                let made = abandon_watch
                    .asks_by(|| client.create(prefix, data, &options))?
                    .await;
                return Ok(made.map(|made| Enqueued::by_itself(prefix, made)));
            }
            Err(
                MultiWriteError::OperationFailed { source, .. } | MultiWriteError::RequestFailed { source },
            ) => source,
        };
        Ok(Err(error))
    }

    /// Makes a sequential node and lists the directory, which are sent together.
    pub(crate) async fn enqueue_and_list(
        &self,
        abandon_watch: &AbandonWatch,
        prefix: &str,
        data: &[u8],
    ) -> Result<(std::result::Result<Enqueued, ZkError>, Result<Vec<String>>)> {
        let connection = self.core.connection().await?;
        let client = &connection.client;
        let options = self.core.options.ephemeral(CreateMode::EphemeralSequential);
        let made = abandon_watch.asks_by(|| client.create(prefix, data, &options))?;
        let (made, children) = tokio::join!(made, client.list_children(parent(prefix)));
        Ok((
            made.map(|made| Enqueued::by_itself(prefix, made)),
            listed(children),
        ))
    }

    /// Makes an ephemeral node.
    pub(crate) async fn create(
        &self,
        abandon_watch: &AbandonWatch,
        path: &str,
        data: &[u8],
    ) -> Result<std::result::Result<Stat, ZkError>> {
        let connection = self.core.connection().await?;
        let client = &connection.client;
        let options = self.core.options.ephemeral(CreateMode::Ephemeral);
        let created = abandon_watch
            .asks_by(|| client.create(path, data, &options))?
            .await;
        Ok(created.map(|(stat, _)| stat))
    }

    /// Makes a directory and those above it.
    pub(crate) async fn make_directory(&self, path: &str) -> Result<()> {
        self.core.make_directory(path).await
    }

    /// Deletes a node; `false` if there is none.
    pub(crate) async fn delete(&self, path: &str) -> Result<bool> {
        let connection = self.core.connection().await?;
        deleted(connection.client.delete(path, None).await)
    }

    /// Deletes a node unless it was taken away: then it may be another's by now.
    pub(crate) async fn delete_by(&self, abandon_watch: &AbandonWatch, path: &str) -> Result<bool> {
        let connection = self.core.connection().await?;
        let client = &connection.client;
        deleted(abandon_watch.asks_by(|| client.delete(path, None))?.await)
    }

    /// Deletes a node that was held, and says in the same transaction, for [whoever watches it](Self::has_held), that it
    /// was; `false` if there is none.
    pub(crate) async fn delete_by_name(&self, path: &str, czxid: i64) -> Result<bool> {
        let data = self.core.names(czxid);
        let connection = self.core.connection().await?;
        let client = &connection.client;
        let mut writer = client.new_multi_writer();
        writer.add_set_data(&self.core.heartbeat_path, data.as_bytes(), None)?;
        writer.add_delete(path, None)?;
        match writer.commit().await {
            Ok(_) => Ok(true),
            Err(MultiWriteError::OperationFailed {
                index: 1,
                source: ZkError::NoNode,
            }) => Ok(false),
            // It cannot be said.
            Err(MultiWriteError::OperationFailed { .. }) => self.delete(path).await,
            Err(MultiWriteError::RequestFailed { source }) => Err(source.into()),
        }
    }

    /// Whether the session that writes to `heartbeat_path` says that it held the node that transaction `czxid` made, and the node
    /// at `own` is there. If not, both may be so all the same.
    pub(crate) async fn has_held(&self, heartbeat_path: &str, czxid: i64, own: &str) -> Result<bool> {
        if self.core.old.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let connection = self.core.connection().await?;
        let mut reader = connection.client.new_multi_reader();
        reader.add_get_data(heartbeat_path)?;
        reader.add_get_data(own)?;
        let read = match reader.commit().await {
            // It is older than such requests, and closes the connection: not again.
            Err(ZkError::Unimplemented) => {
                self.core.old.store(true, Ordering::Relaxed);
                return Ok(false);
            }
            read => read?,
        };
        Ok(match &read[..] {
            [MultiReadResult::Data { data, .. }, MultiReadResult::Data { .. }] => {
                names(data).any(|name| name == czxid)
            }
            // Another user's, or gone.
            _ => false,
        })
    }

    /// The nodes in a directory, as far as the connected server knows. None if there is no directory.
    pub(crate) async fn list(&self, dir: &str) -> Result<Vec<String>> {
        let connection = self.core.connection().await?;
        listed(self.core.distance.of(connection.client.list_children(dir)).await)
    }

    /// The nodes in a directory, with everything that was done before the call.
    pub(crate) async fn list_latest(&self, dir: &str) -> Result<Vec<String>> {
        self.core.list_latest(dir).await
    }

    /// A node's data and state, with everything that was done before the call.
    pub(crate) async fn read_latest(&self, path: &str) -> Result<Option<(Vec<u8>, Stat)>> {
        self.core.read_latest(path).await
    }

    /// The data and states of several nodes; `None` for one that is not there.
    pub(crate) async fn read_all(&self, paths: &[String]) -> Result<Vec<Option<(Vec<u8>, Stat)>>> {
        let connection = self.core.connection().await?;
        let client = &connection.client;
        let replies = join_all(paths.iter().map(|path| client.get_data(path))).await;
        replies
            .into_iter()
            .map(|reply| some(reply).map_err(Failure::from))
            .collect()
    }

    /// Which of several nodes are there.
    pub(crate) async fn are_there(&self, paths: &[String]) -> Result<Vec<bool>> {
        let connection = self.core.connection().await?;
        let client = &connection.client;
        let replies = join_all(paths.iter().map(|path| client.check_stat(path))).await;
        replies.into_iter().map(|reply| Ok(reply?.is_some())).collect()
    }

    /// Watches several nodes for their deletion; `None` for one that is not there.
    pub(crate) async fn watch_all(&self, paths: &[String]) -> Result<Vec<Option<(Vec<u8>, Stat, Watch)>>> {
        let connection = self.core.connection().await?;
        let asked = join_all(
            paths
                .iter()
                .map(|path| connection.client.get_and_watch_data(path)),
        );
        let replies = self.core.distance.of(asked).await;
        let watched = |(path, reply): (&String, _)| {
            let found = some(reply)?;
            Ok(found.map(|(data, stat, watcher)| {
                let watch = Watch::new(path.clone(), &stat, watcher, connection.liveness());
                self.core.keeps(watch.eye());
                (data, stat, watch)
            }))
        };
        paths.iter().zip(replies).map(watched).collect()
    }

    /// Looks for a node that this session may have made, whose path begins with `prefix`.
    pub(crate) async fn find(&self, prefix: &str) -> Result<Option<Found>> {
        self.core.find(prefix).await
    }

    /// Ends the session, and with it all its nodes. Resolves when the server has confirmed it, or nothing of it can be
    /// left.
    ///
    /// # Errors
    /// If its runtime has ended: nobody has told the server.
    pub(crate) async fn close(&self) -> Result<()> {
        self.begin_closing();
        let mut done = self.core.done.subscribe();
        // The sender is part of the session.
        let done = done.wait_for(Option::is_some).await.ok().and_then(|done| *done);
        done.filter(|by_itself| *by_itself)
            .map(drop)
            .ok_or(Failure::RuntimeGone)
    }

    fn begin_closing(&self) {
        self.core.closing.send_replace(true);
        self.core.end(LossReason::Disconnected);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.begin_closing();
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("id", &format_args!("{:#x}", self.core.id))
            .finish_non_exhaustive()
    }
}

impl NodeOptions {
    fn of(config: &ZkConfig) -> Self {
        Self {
            acls: match config.access() {
                Access::Everyone => Acls::anyone_all(),
                Access::Creator => Acls::creator_all(),
            },
            parents: match config.parents {
                Parents::Container => CreateMode::Container,
                Parents::Persistent => CreateMode::Persistent,
            },
        }
    }

    fn ephemeral(&self, mode: CreateMode) -> CreateOptions<'static> {
        mode.with_acls(self.acls)
    }

    fn directory(&self) -> CreateOptions<'static> {
        self.parents.with_acls(self.acls)
    }
}

impl Core {
    /// The connection, as soon as there is one.
    async fn connection(&self) -> Result<Arc<Connection>> {
        let mut connections = self.connection.subscribe();
        loop {
            if let Some(reason) = self.over() {
                return Err(Failure::SessionOver(reason));
            }
            let connection = connections.borrow_and_update().clone();
            if let Some(connection) = connection.filter(|connection| !connection.liveness().is_over()) {
                return Ok(connection);
            }
            // The sender is part of this.
            let _ = connections.changed().await;
        }
    }

    fn over(&self) -> Option<LossReason> {
        let known = self.status.borrow().over;
        known.or_else(|| {
            let connection = self.connection.borrow();
            connection
                .as_ref()
                .and_then(|connection| reason(connection.client.state()))
        })
    }

    /// Changes what is known; says whether that is news to anyone. Those who hold something are told before they could ask.
    fn changes(&self, change: impl FnOnce(&mut Status) -> bool) -> bool {
        self.status.send_if_modified(|status| {
            let changed = change(status);
            let proven = status.over.map_or(Ok(status.proof.end()), Err);
            self.proven.send_if_modified(|known| {
                let before = std::mem::replace(known, proven);
                match (before, proven) {
                    (Ok(before), Ok(now)) => now < before,
                    (before, now) => before != now,
                }
            });
            changed
        })
    }

    fn end(&self, reason: LossReason) {
        let first = self.changes(|status| {
            let first = status.over.is_none();
            status.over.get_or_insert(reason);
            first
        });
        if first {
            // For those who wait for it.
            self.connection.send_modify(|_| {});
            for watch in self.watches(|_| true) {
                watch.tells(WatchEvent::Over);
            }
        }
    }

    /// Sets this watch again on each connection.
    fn keeps(&self, watch: &Arc<WatchState>) {
        {
            let mut watches = lock(&self.watches);
            if watches.all.len() >= watches.many {
                watches.all.retain(|watch| watch.strong_count() > 0);
                watches.many = (watches.all.len() * 2).max(WATCHES_AT_ONCE);
            }
            watches.all.push(Arc::downgrade(watch));
        }
        if self.status.borrow().over.is_some() {
            watch.tells(WatchEvent::Over);
        } else if watch.is_shut() {
            self.blinded.notify_one();
        }
    }

    fn watches(&self, which: impl Fn(&WatchState) -> bool) -> Vec<Arc<WatchState>> {
        let watches = lock(&self.watches);
        watches
            .all
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|eye| which(eye))
            .collect()
    }

    /// What the machine has slept so far. It is taken off what is proven.
    fn asleep(&self) -> Duration {
        let asleep = asleep();
        self.changes(|status| {
            let slept = asleep.saturating_sub(status.asleep);
            if slept >= LEAST_SLEEP {
                status.asleep = asleep;
                status.proof.slept(slept);
            }
            slept >= LEAST_SLEEP
        });
        self.status.borrow().asleep
    }

    /// Whether the ensemble cannot have ended it, unless somebody asked for that.
    fn is_proven(&self) -> bool {
        self.asleep();
        self.status.borrow().proof.end() > Instant::now()
    }

    /// When something was done at `at`, by when the machine had slept so much: what it slept since was time, too.
    fn done(&self, at: Instant, asleep: Duration) -> Instant {
        let slept = self.asleep().saturating_sub(asleep);
        at.checked_sub(slept).unwrap_or(at)
    }

    fn leave_behind(&self, pending_delete: impl IntoIterator<Item = PendingDelete>) {
        lock(&self.pending_delete).extend(pending_delete);
        self.delete_pending.notify_one();
    }

    async fn make_directory(&self, path: &str) -> Result<()> {
        let connection = self.connection().await?;
        self.make_directory_on(&connection, path).await
    }

    async fn make_directory_on(&self, connection: &Connection, path: &str) -> Result<()> {
        connection.client.mkdir(path, &self.options.directory()).await?;
        Ok(())
    }

    /// What its node says, from now on with this name.
    fn names(&self, czxid: i64) -> String {
        {
            let mut named = lock(&self.named);
            named.retain(|name| *name != czxid);
            named.push_front(czxid);
            named.truncate(MAX_NAMED);
        }
        self.heartbeat_data()
    }

    fn heartbeat_data(&self) -> String {
        let mut data = self.status.borrow().proof.timeout().as_millis().to_string();
        for czxid in &*lock(&self.named) {
            // Writing to a string does not fail.
            let _ = write!(data, " {czxid:x}");
        }
        data
    }

    /// Makes the node that it writes to. An answer is the quorum's.
    async fn make_heartbeat_node(&self, connection: &Connection) -> Result<Instant> {
        let options = self.options.ephemeral(CreateMode::Ephemeral);
        let data = self.heartbeat_data();
        for _ in 0..MAX_VANISHED {
            let sent = Instant::now();
            match connection
                .client
                .create(&self.heartbeat_path, data.as_bytes(), &options)
                .await
            {
                // It exists if the reply to an earlier attempt was lost: no other session has this id.
                Ok(_) | Err(ZkError::NodeExists) => return Ok(sent),
                Err(ZkError::NoNode) => {
                    self.make_directory_on(connection, parent(&self.heartbeat_path))
                        .await?
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(Failure::Restless {
            path: self.heartbeat_path.clone(),
        })
    }

    async fn list_latest(&self, dir: &str) -> Result<Vec<String>> {
        let connection = self.connection().await?;
        let client = &connection.client;
        // Sent together: they are served in order.
        let (synced, children) = (client.sync(dir), client.list_children(dir));
        let (synced, children) = tokio::join!(synced, children);
        synced?;
        listed(children)
    }

    async fn read_latest(&self, path: &str) -> Result<Option<(Vec<u8>, Stat)>> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let (synced, read) = (client.sync(path), client.get_data(path));
        let (synced, read) = tokio::join!(synced, read);
        synced?;
        Ok(some(read)?)
    }

    async fn find(&self, prefix: &str) -> Result<Option<Found>> {
        let (dir, begins) = (parent(prefix), basename(prefix));
        let children = self.list_latest(dir).await?;
        let Some(name) = children.iter().find(|child| child.starts_with(begins)) else {
            return Ok(None);
        };
        let path = format!("{dir}/{name}");
        let Some((_, stat)) = some(self.connection().await?.client.get_data(&path).await)? else {
            return Ok(None);
        };
        // One of another session ends with that session, and is nobody's to hold.
        Ok((stat.ephemeral_owner == self.id).then_some(Found {
            path,
            czxid: stat.czxid,
        }))
    }

    /// Removes one piece of litter. An error means that it may still be there.
    async fn remove(&self, pending_delete: &PendingDelete) -> Result<()> {
        let path = match pending_delete {
            PendingDelete::At(path) => path.clone(),
            PendingDelete::Begins(prefix) => match self.find(prefix).await? {
                Some(found) => found.path,
                None => return Ok(()),
            },
            PendingDelete::Marked { path, mark } => match self.read_latest(path).await? {
                Some((data, stat))
                    if stat.ephemeral_owner == self.id && data.starts_with(mark.as_bytes()) =>
                {
                    path.clone()
                }
                _ => return Ok(()),
            },
        };
        match self.connection().await?.client.delete(&path, None).await {
            Err(error) if error != ZkError::NoNode => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// Ends a session with its task, also if its runtime is shut down.
struct EndOnDrop(Arc<Core>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end(LossReason::Disconnected);
        self.0.done.send_if_modified(|done| {
            let first = done.is_none();
            done.get_or_insert(false);
            first
        });
    }
}

/// What a session does by itself, until it ends.
async fn keep(ends: EndOnDrop) {
    let core = &*ends.0;
    let reason = tokio::select! {
        reason = stay_attached(core) => reason,
        () = asked_to_close(core) => LossReason::Disconnected,
        () = beat(core) => LossReason::Disconnected,
        () = watch_again(core) => LossReason::Disconnected,
        () = clean_up(core) => LossReason::Disconnected,
        () = dismiss(core) => LossReason::Disconnected,
    };
    core.end(reason);
    // Who is asked to close it has ended it here before, which ends each of these.
    if *core.closing.borrow() && reason != LossReason::Expired {
        let left = core.status.borrow().proof.timeout();
        // There is nothing left of it after that.
        let _ = within(left, say_goodbye(core)).await;
    }
    core.connection.send_replace(None);
    core.done.send_replace(Some(true));
}

/// Attaches the session again and again, until it has ended.
async fn stay_attached(core: &Core) -> LossReason {
    loop {
        let connection = core.connection.borrow().clone();
        if let Some(connection) = connection {
            let state = connection.liveness().ended().await;
            if let Some(reason) = reason(state) {
                return reason;
            }
            core.connection.send_replace(None);
        }
        match attach(core).await {
            Ok(connection) => core.connection.send_replace(Some(Arc::new(connection))),
            Err(reason) => return reason,
        };
    }
}

/// Attaches the session to a server that the quorum listens to.
async fn attach(core: &Core) -> std::result::Result<Connection, LossReason> {
    for round in 0_u32.. {
        let hosts = core.access.shuffled();
        let mut unknown = 0;
        for host in &hosts {
            match attach_to(core, host, core.access.limit(round)).await {
                Ok(Some(connection)) => return Ok(connection),
                Ok(None) => {}
                Err(LossReason::Expired) if core.is_proven() => unknown += 1,
                Err(reason) => return Err(reason),
            }
            // One that was the leader, and does not know that it is none any more, has not heard of younger sessions.
            if unknown * 2 > hosts.len() {
                return Err(LossReason::Expired);
            }
        }
        sleep(PAUSE.saturating_mul(1 << round.min(5)).min(LONGEST_PAUSE)).await;
    }
    Err(LossReason::Disconnected)
}

async fn attach_to(
    core: &Core,
    host: &str,
    limit: Duration,
) -> std::result::Result<Option<Connection>, LossReason> {
    // Whoever cannot be reached cannot have changed the session's timeout, either.
    match within(limit, TcpStream::connect(host)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => {
            tracing::debug!(host, %error, "a server cannot be reached");
            return Ok(None);
        }
        Err(_) => return Ok(None),
    }
    let (asleep, sent) = (core.asleep(), Instant::now());
    let connector = core.access.connector().with_session(core.info.clone());
    let mut connecting = pin!(within(limit, Connection::connect(connector, host)));
    let unanswered = || {
        let (sent, now) = (core.done(sent, asleep), Instant::now());
        core.changes(|status| {
            status.proof.unanswered(sent, now);
            true
        });
    };
    // What it may have granted is to be heeded while there is still time.
    let doubts = core.status.borrow().proof.doubts_after();
    let answer = if let Ok(answer) = within(doubts, &mut connecting).await {
        answer
    } else {
        unanswered();
        connecting.await
    };
    let connection = match answer {
        Ok(Ok(connection)) => connection,
        Ok(Err(ZkError::SessionExpired | ZkError::SessionMoved)) => return Err(LossReason::Expired),
        Ok(Err(ZkError::AuthFailed)) => return Err(LossReason::Disconnected),
        // It has closed the connection instead, as one does that has no leader.
        Ok(Err(error)) => {
            tracing::debug!(host, %error, "a server does not take the session");
            return Ok(None);
        }
        Err(_) => {
            unanswered();
            return Ok(None);
        }
    };
    let (granted, number) = (connection.timeout(), connection.liveness().number());
    let sent = core.done(sent, asleep);
    core.changes(|status| {
        status.proof.attached(number, granted, sent);
        true
    });
    *lock(&core.access.granted) = granted;
    if let Err(error) = check_session_timeout(granted, core.access.tick, "granted by the server") {
        tracing::warn!(host, %error, "a session is given up");
        connection.cut().await;
        return Err(LossReason::Disconnected);
    }
    // Nothing is read from this server before it has had a write of this session from the quorum: what was asked for over
    // the connection before is then in what it shows, or was never done.
    match within(limit, core.make_heartbeat_node(&connection)).await {
        Ok(Ok(_)) => {
            core.asleep();
            core.changes(|status| {
                status.proof.confirmed();
                true
            });
            Ok(Some(connection))
        }
        Ok(Err(Failure::Server(error))) if is_refusal(&error) => Ok(Some(connection)),
        Ok(Err(_)) | Err(_) => {
            connection.cut().await;
            Ok(None)
        }
    }
}

async fn asked_to_close(core: &Core) {
    let _ = core.closing.subscribe().wait_for(|closing| *closing).await;
}

/// Closes the session at the server, over one connection after the other: one that is dead or lost tells nobody, and one may
/// be kept by whoever waits for an answer on it and does not look.
async fn say_goodbye(core: &Core) {
    let connection = core.connection.send_replace(None);
    let mut connection = connection.filter(|connection| !connection.liveness().is_over());
    for round in 0_u32.. {
        let ending = match connection.take() {
            Some(connection) => connection.ending(),
            None => match attach(core).await {
                Ok(connection) => connection.ending(),
                Err(_) => return,
            },
        };
        // With the last who had the connection, the session is closed.
        if reason(ending.within(core.access.limit(round)).await).is_some() {
            return;
        }
        sleep(PAUSE).await;
    }
}

/// Sets the watches again that were set on connections that are lost.
async fn watch_again(core: &Core) {
    let mut connections = core.connection.subscribe();
    loop {
        let connection = connections.borrow_and_update().clone();
        if let Some(connection) = connection {
            let shut = core.watches(WatchState::is_shut);
            for some in shut.chunks(WATCHES_AT_ONCE) {
                if connection.liveness().is_over() {
                    break;
                }
                join_all(some.iter().map(|watch| open_again(&connection, watch))).await;
            }
        }
        tokio::select! {
            _ = connections.changed() => {}
            () = core.blinded.notified() => {}
        }
    }
}

async fn open_again(connection: &Connection, watch: &WatchState) {
    match connection.client.get_and_watch_data(&watch.path).await {
        Ok((_, stat, watcher)) => watch.opens(&stat, watcher, connection.liveness().clone()),
        Err(ZkError::NoNode) => watch.tells(WatchEvent::Deleted),
        // It is set on the next connection.
        Err(_) if connection.liveness().is_over() => {}
        // Whoever waits for it is to look.
        Err(_) => watch.tells(WatchEvent::Written),
    }
}

fn reason(state: SessionState) -> Option<LossReason> {
    match state {
        SessionState::Expired => Some(LossReason::Expired),
        SessionState::Closed | SessionState::AuthFailed => Some(LossReason::Disconnected),
        _ => None,
    }
}

/// Proves time and again, with a write that the quorum has to agree to, that the session lives. It returns when there
/// is nothing left to prove.
async fn beat(core: &Core) {
    let mut refused = false;
    let mut connections = core.connection.subscribe();
    loop {
        let beat = core.status.borrow().proof.beat();
        // Over another connection, nothing that was written before counts.
        tokio::select! {
            () = sleep(beat) => {}
            _ = connections.changed() => {}
        }
        let Ok(connection) = core.connection().await else {
            return;
        };
        let data = core.heartbeat_data();
        let (asleep, sent) = (core.asleep(), Instant::now());
        let acknowledged = match connection
            .client
            .set_data(&core.heartbeat_path, data.as_bytes(), None)
            .await
        {
            Ok(stat) => Ok((sent, Some(stat.mtime))),
            // Somebody deleted it.
            Err(ZkError::NoNode) => core
                .make_heartbeat_node(&connection)
                .await
                .map(|sent| (sent, None)),
            Err(error) => Err(error.into()),
        };
        match acknowledged {
            Ok((sent, mtime)) => {
                let sent = core.done(sent, asleep);
                let now = Instant::now();
                core.changes(|status| {
                    status
                        .proof
                        .acknowledged(connection.liveness().number(), sent, now);
                    if let Some(mtime) = mtime {
                        status.server_clock = (mtime, now);
                    }
                    true
                });
                refused = false;
            }
            Err(error) => {
                let refusal = matches!(&error, Failure::Server(error) if is_refusal(error));
                if refusal && !std::mem::replace(&mut refused, true) {
                    let path = &core.heartbeat_path;
                    tracing::warn!(%error, path, "a session may not write its node; it holds nothing until it may");
                } else {
                    tracing::debug!(%error, "a session could not be proven to live");
                }
            }
        }
    }
}

/// Removes litter until none is left, again and again where it fails.
async fn clean_up(core: &Core) {
    let mut status = core.status.subscribe();
    loop {
        let pending_delete = std::mem::take(&mut *lock(&core.pending_delete));
        if pending_delete.is_empty() {
            core.delete_pending.notified().await;
            continue;
        }
        let outcomes = join_all(pending_delete.iter().map(|piece| core.remove(piece))).await;
        let mut left = Vec::new();
        for (piece, outcome) in pending_delete.into_iter().zip(outcomes) {
            match outcome {
                Ok(()) => {}
                Err(Failure::Server(error)) if is_refusal(&error) => {
                    tracing::warn!(?piece, %error, "a node stays until its session ends");
                }
                Err(error) => {
                    tracing::debug!(?piece, %error, "a node is not removed yet; trying again");
                    left.push(piece);
                }
            }
        }
        if !left.is_empty() {
            lock(&core.pending_delete).extend(left);
            // The next beat says that the connection is back.
            status.mark_unchanged();
            let _ = status.changed().await;
        }
    }
}

/// Looks with each beat for nodes that are forsaken.
async fn dismiss(core: &Core) {
    let mut status = core.status.subscribe();
    while status.changed().await.is_ok() {
        let liveness = core
            .connection
            .borrow()
            .as_ref()
            .map(|connection| connection.liveness().clone());
        let Some(liveness) = liveness.filter(|liveness| !liveness.is_over()) else {
            continue;
        };
        let now = Instant::now();
        let mut pending_delete = Vec::new();
        lock(&core.abandon_watches).retain(|abandon_watch| {
            let Some(abandon_watch) = abandon_watch.upgrade() else {
                return false;
            };
            pending_delete.extend(abandon_watch.take_if_abandoned(now, liveness.since()));
            true
        });
        core.leave_behind(pending_delete);
    }
}

/// The session timeout that a session's node tells.
pub(crate) fn timeout(heartbeat_data: &[u8]) -> Option<Duration> {
    let timeout = std::str::from_utf8(heartbeat_data).ok()?.split(' ').next()?;
    Some(Duration::from_millis(timeout.parse().ok()?))
}

/// How a node's name begins, if a directory's data say that.
fn entrant(data: Vec<u8>) -> Option<String> {
    // Anything may be written there.
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    String::from_utf8(data)
        .ok()
        .filter(|name| name.bytes().all(is_plain))
}

/// The nodes that it names.
fn names(heartbeat_data: &[u8]) -> impl Iterator<Item = i64> {
    let data = std::str::from_utf8(heartbeat_data).unwrap_or_default();
    data.split(' ')
        .skip(1)
        .filter_map(|name| i64::from_str_radix(name, 16).ok())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn some<T>(reply: std::result::Result<T, ZkError>) -> std::result::Result<Option<T>, ZkError> {
    match reply {
        Ok(value) => Ok(Some(value)),
        Err(ZkError::NoNode) => Ok(None),
        Err(error) => Err(error),
    }
}

fn deleted(reply: std::result::Result<(), ZkError>) -> Result<bool> {
    Ok(some(reply)?.is_some())
}

fn listed(reply: std::result::Result<Vec<String>, ZkError>) -> Result<Vec<String>> {
    Ok(some(reply)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use lockkit_testbed::zookeeper::{self, ZkServer};

    use super::*;

    static ASLEEP: AtomicU64 = AtomicU64::new(0);

    /// That of a machine that sleeps when it is told to.
    pub(super) fn asleep() -> Duration {
        lockkit_core::spi::asleep() + Duration::from_secs(ASLEEP.load(Ordering::SeqCst))
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_slept_is_taken_off_what_is_proven() {
        const SLEPT: Duration = Duration::from_secs(5);
        if lockkit_testbed::skipped("zk", zookeeper::missing()) {
            return;
        }
        let server = ZkServer::plain().unwrap();
        let mut config = ZkConfig::new(server.addr().to_string());
        (config.session_timeout, config.tick_time) = (Duration::from_secs(20), ZkServer::TICK);
        let servers = Servers::new(&config, &config.check().unwrap());
        let layout = Layout::new("", "asleep");
        let session = Session::open(&config, &servers, &layout).await.unwrap();
        let proven = session.proven_until();
        ASLEEP.fetch_add(SLEPT.as_secs(), Ordering::SeqCst);
        assert_eq!(proven - session.proven_until(), SLEPT);
        let again = within(Duration::from_secs(60), session.proven_beyond(proven)).await;
        assert!(again.is_ok() && session.over().is_none(), "it lives on");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_opening_whose_connection_is_lost_fails() {
        if lockkit_testbed::skipped("zk", zookeeper::missing()) {
            return;
        }
        let server = ZkServer::plain().unwrap();
        let mut config = ZkConfig::new(server.addr().to_string());
        (config.session_timeout, config.tick_time) = (Duration::from_secs(20), ZkServer::TICK);
        let servers = Servers::new(&config, &config.check().unwrap());
        let layout = Layout::new("", "lost");
        let (connection, sent) = servers.open().await.unwrap();
        connection.cut().await;
        let opening = Session::on(connection, (sent, asleep()), &config, &servers, &layout);
        let opened = within(Duration::from_secs(60), opening).await;
        let error = opened.expect("it waits for no other connection").unwrap_err();
        assert!(error.during("connect").is_transient());
    }
}
