//! One session: its requests, the proof that it lives, and what is still to be cleaned up on it.

use std::{
    collections::VecDeque,
    fmt::{self, Write as _},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use futures_util::future::join_all;
use lockkit_core::LossReason;
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    task::AbortHandle,
    time::{Instant, sleep_until},
};
use zookeeper_client::{
    Acls, Client, CreateMode, CreateOptions, Error as ZkError, MultiWriteError, MultiWriteResult,
    OneshotWatcher, SessionState, Stat, StateWatcher,
};

use crate::{
    Access, Parents, ZkConfig,
    config::{Address, check_session_timeout},
    fault::{Fault, Result, is_refusal},
    layout::{Space, basename, parent},
    lease::Proof,
    post::Post,
};

/// How long a server may be silent, or take to let a client in, before another one is tried, at least. It is long against
/// what a server takes, and short against a session.
const SHORTEST_SILENCE: Duration = Duration::from_secs(1);
/// How often a directory that vanishes as soon as it is made is made again.
const MAX_VANISHED: usize = 8;
/// How many of its last holds a session names. A waiter asks for one within a round trip or so of its release.
const MAX_NAMED: usize = 16;

/// A session with an ensemble. When it is dropped, it ends, and all its nodes with it.
pub(crate) struct Session {
    core: Arc<Core>,
    keeper: AbortHandle,
}

struct Core {
    /// Taken away to close the session.
    client: Mutex<Option<Arc<Client>>>,
    id: i64,
    timeout: Duration,
    states: StateWatcher,
    news: watch::Sender<News>,
    /// Where it writes, to prove that it lives.
    beat_path: String,
    /// What it writes there, behind the session timeout: the transactions that made the nodes that it last held and
    /// [let go by name](Session::delete_by_name).
    named: Mutex<VecDeque<i64>>,
    options: Options,
    litter: Mutex<Vec<Litter>>,
    littered: Notify,
    /// Of the nodes that somebody has asked for. Those that nobody looks after any more are removed.
    posts: Mutex<Vec<Weak<Post>>>,
}

/// What is known of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct News {
    proof: Proof,
    /// The server's clock in ms since 1970, and when it was that.
    server_clock: (i64, Instant),
    over: Option<LossReason>,
}

/// How nodes are made.
#[derive(Clone, Copy, Debug)]
struct Options {
    acls: Acls<'static>,
    parents: CreateMode,
}

/// A node that nobody has a use for any more, and that may be there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Litter {
    /// At this path.
    At(String),
    /// With this path and some sequence number behind it, if it was created at all.
    Begins(String),
    /// At this path, if it is this session's and its data begin so.
    Marked { path: String, mark: String },
}

/// A sequential node that has been made.
#[derive(Debug)]
pub(crate) struct Entered {
    pub(crate) path: String,
    pub(crate) sequence: i64,
    pub(crate) czxid: i64,
    /// How many others are in the directory, all of them before it; `None` if that was not to be asked.
    pub(crate) others: Option<usize>,
}

/// A node that was looked for.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) path: String,
    pub(crate) czxid: i64,
}

impl Session {
    /// Opens a session.
    pub(crate) async fn open(config: &ZkConfig, address: &Address, space: &Space) -> Result<Self> {
        let runtime = Handle::try_current().map_err(|_| Fault::NoRuntime)?;
        let mut connector = Client::connector()
            .with_session_timeout(config.session_timeout)
            .with_connection_timeout((config.session_timeout / 5).max(SHORTEST_SILENCE))
            .with_fail_eagerly();
        if let Some(digest) = &config.auth {
            let credentials = format!("{}:{}", digest.user, digest.password);
            connector = connector.with_auth("digest", credentials.as_bytes());
        }
        let sent = Instant::now();
        let client = connector.connect(&address.hosts).await?;
        let timeout = client.session_timeout();
        check_session_timeout(timeout, config.tick_time, "granted by the server").map_err(Fault::Config)?;
        let id = client.session_id().0;
        let core = Arc::new(Core {
            id,
            timeout,
            states: client.state_watcher(),
            news: watch::Sender::new(News {
                proof: Proof::opened(timeout, config.tick_time, sent),
                server_clock: (0, sent),
                over: None,
            }),
            beat_path: space.session(id),
            named: Mutex::default(),
            options: Options::of(config),
            client: Mutex::new(Some(Arc::new(client))),
            litter: Mutex::default(),
            littered: Notify::new(),
            posts: Mutex::default(),
        });
        core.make_beat_node().await?;
        let keeper = runtime.spawn(keep(core.clone())).abort_handle();
        Ok(Self { core, keeper })
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
        self.core.news.borrow().proof.end()
    }

    /// When it is [over](Self::over), or proven for longer than `until`.
    pub(crate) async fn proven_beyond(&self, until: Instant) {
        let mut news = self.core.news.subscribe();
        // The sender lives as long as the session.
        let _ = news
            .wait_for(|news| news.over.is_some() || news.proof.end() > until)
            .await;
    }

    /// The next beat or the end, whichever comes first.
    pub(crate) async fn next_news(&self) {
        let _ = self.core.news.subscribe().changed().await;
    }

    /// Tells whether the connection was interrupted, from now on.
    pub(crate) fn interruptions(&self) -> StateWatcher {
        let mut states = self.core.states.clone();
        states.state();
        states
    }

    /// The server's clock, in ms since 1970; `None` before the first beat.
    pub(crate) fn server_clock(&self) -> Option<i64> {
        let (then, at) = self.core.news.borrow().server_clock;
        (then > 0).then(|| then.saturating_add(i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX)))
    }

    /// Has it cleaned up, for as long as that takes.
    pub(crate) fn leave_behind(&self, litter: Litter) {
        self.core.leave_behind([litter]);
    }

    /// Has it removed if it is forsaken.
    pub(crate) fn watch_over(&self, post: &Arc<Post>) {
        lock(&self.core.posts).push(Arc::downgrade(post));
    }

    /// Makes a sequential node and asks, in the same request, whether it is alone.
    ///
    /// The two go together as a transaction that also writes the directory, whose state comes back: the number of nodes
    /// in it, and, as that of its last change, the transaction's id, which is the new node's `czxid` too. What it writes
    /// is how the node's name begins, for [whoever comes next](Self::last_entrant).
    pub(crate) async fn enter(
        &self,
        prefix: &str,
        data: &[u8],
    ) -> Result<std::result::Result<Entered, ZkError>> {
        let client = self.core.client()?;
        let mut writer = client.new_multi_writer();
        let options = self.core.options.ephemeral(CreateMode::EphemeralSequential);
        writer.add_create(prefix, data, &options)?;
        writer.add_set_data(parent(prefix), basename(prefix).as_bytes(), None)?;
        let error = match writer.commit().await {
            Ok(results) => match &results[..] {
                [
                    MultiWriteResult::Create { path, .. },
                    MultiWriteResult::SetData { stat },
                ] => {
                    let sequence = path.get(prefix.len()..).and_then(|number| number.parse().ok());
                    let sequence = sequence.ok_or_else(|| {
                        ZkError::UnexpectedError(format!("a sequential node came out as {path}"))
                    })?;
                    return Ok(Ok(Entered {
                        path: path.clone(),
                        sequence,
                        czxid: stat.mzxid,
                        others: usize::try_from(stat.num_children - 1).ok(),
                    }));
                }
                _ => {
                    ZkError::UnexpectedError("a transaction of two had another number of results".to_owned())
                }
            },
            // The directory is not to be written: without it, then, and without knowing who else is there.
            Err(MultiWriteError::OperationFailed {
                index: 1,
                source: ZkError::NoAuth,
            }) => {
                return Ok(client
                    .create(prefix, data, &options)
                    .await
                    .map(|(stat, sequence)| Entered {
                        path: format!("{prefix}{sequence}"),
                        sequence: sequence.into_i64(),
                        czxid: stat.czxid,
                        others: None,
                    }));
            }
            Err(
                MultiWriteError::OperationFailed { source, .. } | MultiWriteError::RequestFailed { source },
            ) => source,
        };
        Ok(Err(error))
    }

    /// How the name begins of the node that was made last in a directory, unless others made it.
    pub(crate) async fn last_entrant(&self, dir: &str) -> Result<Option<String>> {
        let read = some(self.core.client()?.get_data(dir).await)?;
        let name = read.and_then(|(name, _)| String::from_utf8(name).ok());
        // Anything may be written there.
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        Ok(name.filter(|name| name.bytes().all(is_plain)))
    }

    /// Makes an ephemeral node.
    pub(crate) async fn create(&self, path: &str, data: &[u8]) -> Result<std::result::Result<Stat, ZkError>> {
        let client = self.core.client()?;
        let options = self.core.options.ephemeral(CreateMode::Ephemeral);
        Ok(client.create(path, data, &options).await.map(|(stat, _)| stat))
    }

    /// Makes a directory and those above it.
    pub(crate) async fn make_directory(&self, path: &str) -> Result<()> {
        self.core.make_directory(path).await
    }

    /// Deletes a node; `false` if there is none.
    pub(crate) async fn delete(&self, path: &str) -> Result<bool> {
        let client = self.core.client()?;
        match client.delete(path, None).await {
            Ok(()) => Ok(true),
            Err(ZkError::NoNode) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes a node that was held, and says in the same transaction, for [whoever watches it](Self::has_held), that it
    /// was; `false` if there is none.
    pub(crate) async fn delete_by_name(&self, path: &str, czxid: i64) -> Result<bool> {
        let data = self.core.names(czxid);
        let client = self.core.client()?;
        let mut writer = client.new_multi_writer();
        writer.add_set_data(&self.core.beat_path, data.as_bytes(), None)?;
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

    /// Whether the session that writes to `beat_path` says that it held the node that transaction `czxid` made. If not,
    /// it may have held it all the same.
    pub(crate) async fn has_held(&self, beat_path: &str, czxid: i64) -> Result<bool> {
        let read = match self.core.client()?.get_data(beat_path).await {
            // Another user's.
            Err(ZkError::NoAuth) => None,
            read => some(read)?,
        };
        Ok(read.is_some_and(|(data, _)| names(&data).any(|name| name == czxid)))
    }

    /// The nodes in a directory, as far as the connected server knows. None if there is no directory.
    pub(crate) async fn list(&self, dir: &str) -> Result<Vec<String>> {
        listed(self.core.client()?.list_children(dir).await)
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
        let client = self.core.client()?;
        let replies = join_all(paths.iter().map(|path| client.get_data(path))).await;
        replies
            .into_iter()
            .map(|reply| some(reply).map_err(Fault::from))
            .collect()
    }

    /// Which of several nodes are there.
    pub(crate) async fn are_there(&self, paths: &[String]) -> Result<Vec<bool>> {
        let client = self.core.client()?;
        let replies = join_all(paths.iter().map(|path| client.check_stat(path))).await;
        replies.into_iter().map(|reply| Ok(reply?.is_some())).collect()
    }

    /// Watches several nodes for their deletion; `None` for one that is not there.
    pub(crate) async fn watch_all(
        &self,
        paths: &[String],
    ) -> Result<Vec<Option<(Vec<u8>, Stat, OneshotWatcher)>>> {
        let client = self.core.client()?;
        let replies = join_all(paths.iter().map(|path| client.get_and_watch_data(path))).await;
        replies
            .into_iter()
            .map(|reply| some(reply).map_err(Fault::from))
            .collect()
    }

    /// Looks for a node that this session may have made, whose path begins with `prefix`.
    pub(crate) async fn find(&self, prefix: &str) -> Result<Option<Found>> {
        self.core.find(prefix).await
    }

    /// Ends the session, and with it all its nodes. Resolves when the server has confirmed it.
    pub(crate) async fn close(&self) {
        self.keeper.abort();
        self.core.end(LossReason::Disconnected);
        lock(&self.core.client).take();
        let mut states = self.core.states.clone();
        // The current state counts as seen.
        let mut state = states.state();
        while !state.is_terminated() {
            state = states.changed().await;
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("id", &format_args!("{:#x}", self.core.id))
            .field("timeout", &self.core.timeout)
            .finish_non_exhaustive()
    }
}

impl Options {
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
}

impl Core {
    fn client(&self) -> Result<Arc<Client>> {
        if let Some(reason) = self.over() {
            return Err(Fault::SessionOver(reason));
        }
        let client = lock(&self.client);
        client.clone().ok_or(Fault::Closed)
    }

    fn over(&self) -> Option<LossReason> {
        let known = self.news.borrow().over;
        known.or_else(|| reason(self.states.peek_state()))
    }

    fn end(&self, reason: LossReason) {
        self.news.send_if_modified(|news| {
            let first = news.over.is_none();
            news.over.get_or_insert(reason);
            first
        });
    }

    fn leave_behind(&self, litter: impl IntoIterator<Item = Litter>) {
        lock(&self.litter).extend(litter);
        self.littered.notify_one();
    }

    async fn make_directory(&self, path: &str) -> Result<()> {
        let client = self.client()?;
        let options = self.options.parents.with_acls(self.options.acls);
        client.mkdir(path, &options).await?;
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
        self.beat_data()
    }

    fn beat_data(&self) -> String {
        let mut data = self.timeout.as_millis().to_string();
        for czxid in &*lock(&self.named) {
            // Writing to a string does not fail.
            let _ = write!(data, " {czxid:x}");
        }
        data
    }

    async fn make_beat_node(&self) -> Result<Instant> {
        let client = self.client()?;
        let options = self.options.ephemeral(CreateMode::Ephemeral);
        let data = self.beat_data();
        for _ in 0..MAX_VANISHED {
            let sent = Instant::now();
            match client.create(&self.beat_path, data.as_bytes(), &options).await {
                // It exists if the reply to an earlier attempt was lost: no other session has this id.
                Ok(_) | Err(ZkError::NodeExists) => return Ok(sent),
                Err(ZkError::NoNode) => self.make_directory(parent(&self.beat_path)).await?,
                Err(error) => return Err(error.into()),
            }
        }
        Err(Fault::Restless {
            path: self.beat_path.clone(),
        })
    }

    async fn list_latest(&self, dir: &str) -> Result<Vec<String>> {
        let client = self.client()?;
        // Sent together: they are served in order.
        let (synced, children) = (client.sync(dir), client.list_children(dir));
        let (synced, children) = tokio::join!(synced, children);
        synced?;
        listed(children)
    }

    async fn read_latest(&self, path: &str) -> Result<Option<(Vec<u8>, Stat)>> {
        let client = self.client()?;
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
        let Some((_, stat)) = some(self.client()?.get_data(&path).await)? else {
            return Ok(None);
        };
        // One of another session ends with that session, and is nobody's to hold.
        Ok((stat.ephemeral_owner == self.id).then_some(Found {
            path,
            czxid: stat.czxid,
        }))
    }

    /// Removes one piece of litter. An error means that it may still be there.
    async fn remove(&self, litter: &Litter) -> Result<()> {
        let path = match litter {
            Litter::At(path) => path.clone(),
            Litter::Begins(prefix) => match self.find(prefix).await? {
                Some(found) => found.path,
                None => return Ok(()),
            },
            Litter::Marked { path, mark } => match self.read_latest(path).await? {
                Some((data, stat))
                    if stat.ephemeral_owner == self.id && data.starts_with(mark.as_bytes()) =>
                {
                    path.clone()
                }
                _ => return Ok(()),
            },
        };
        match self.client()?.delete(&path, None).await {
            Err(error) if error != ZkError::NoNode => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// What a session does by itself, until it ends.
async fn keep(core: Arc<Core>) {
    /// Also if its runtime is shut down.
    struct Ends(Arc<Core>);
    impl Drop for Ends {
        fn drop(&mut self) {
            self.0.end(LossReason::Disconnected);
        }
    }
    let _ends = Ends(core.clone());
    let reason = tokio::select! {
        reason = ended(core.states.clone()) => reason,
        reason = beat(&core) => reason,
        () = clean_up(&core) => LossReason::Disconnected,
        () = dismiss(&core) => LossReason::Disconnected,
    };
    core.end(reason);
}

async fn ended(mut states: StateWatcher) -> LossReason {
    let mut state = states.state();
    loop {
        if let Some(reason) = reason(state) {
            return reason;
        }
        state = states.changed().await;
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
async fn beat(core: &Core) -> LossReason {
    let beat = core.news.borrow().proof.beat();
    let mut at = Instant::now() + beat;
    loop {
        sleep_until(at).await;
        let sent = Instant::now();
        let Ok(client) = core.client() else {
            return LossReason::Disconnected;
        };
        let data = core.beat_data();
        let acknowledged = match client.set_data(&core.beat_path, data.as_bytes(), None).await {
            Ok(stat) => Some((sent, Some(stat.mtime))),
            // Somebody deleted it.
            Err(ZkError::NoNode) => core.make_beat_node().await.ok().map(|sent| (sent, None)),
            // The connection's task is gone.
            Err(ZkError::ClientClosed | ZkError::UnexpectedError(_)) => return LossReason::Disconnected,
            Err(error) => {
                tracing::debug!(%error, "a session could not be proven to live");
                None
            }
        };
        drop(client);
        let now = Instant::now();
        at = match acknowledged {
            Some((sent, mtime)) => {
                core.news.send_modify(|news| {
                    news.proof.acknowledged(sent);
                    if let Some(mtime) = mtime {
                        news.server_clock = (mtime, now);
                    }
                });
                sent + beat
            }
            // Requests wait for the connection to come back: this is no busy loop.
            None => now + beat / 10,
        };
    }
}

/// Removes litter until none is left, again and again where it fails.
async fn clean_up(core: &Core) {
    let mut news = core.news.subscribe();
    loop {
        let litter = std::mem::take(&mut *lock(&core.litter));
        if litter.is_empty() {
            core.littered.notified().await;
            continue;
        }
        let outcomes = join_all(litter.iter().map(|piece| core.remove(piece))).await;
        let mut left = Vec::new();
        for (piece, outcome) in litter.into_iter().zip(outcomes) {
            match outcome {
                Ok(()) => {}
                Err(Fault::Server(error)) if is_refusal(&error) => {
                    tracing::warn!(?piece, %error, "a node stays until its session ends");
                }
                Err(error) => {
                    tracing::debug!(?piece, %error, "a node is not removed yet; trying again");
                    left.push(piece);
                }
            }
        }
        if !left.is_empty() {
            lock(&core.litter).extend(left);
            // The next beat says that the connection is back.
            news.mark_unchanged();
            let _ = news.changed().await;
        }
    }
}

/// Looks with each beat for nodes that are forsaken.
async fn dismiss(core: &Core) {
    let mut news = core.news.subscribe();
    while news.changed().await.is_ok() {
        let now = Instant::now();
        let mut litter = Vec::new();
        lock(&core.posts).retain(|post| {
            let post = post.upgrade();
            litter.extend(post.as_ref().and_then(|post| post.dismiss_if_forsaken(now)));
            post.is_some()
        });
        core.leave_behind(litter);
    }
}

/// The session timeout that a session's node tells.
pub(crate) fn timeout(beat_data: &[u8]) -> Option<Duration> {
    let timeout = std::str::from_utf8(beat_data).ok()?.split(' ').next()?;
    Some(Duration::from_millis(timeout.parse().ok()?))
}

/// The nodes that it names.
fn names(beat_data: &[u8]) -> impl Iterator<Item = i64> {
    let data = std::str::from_utf8(beat_data).unwrap_or_default();
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

fn listed(reply: std::result::Result<Vec<String>, ZkError>) -> Result<Vec<String>> {
    Ok(some(reply)?.unwrap_or_default())
}
