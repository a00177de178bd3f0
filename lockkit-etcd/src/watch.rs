//! Watches, all on one stream of the connection in use.
//!
//! A watch begins *now*, and who makes one reads what it watches once the server has confirmed it. One from a past revision could be told
//! late, by up to a tenth of a second, and could meet a compaction. When the stream ends, each watch says so, and its claim looks and
//! watches anew. So nothing depends on an event, and none is counted on over an interruption.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    future::poll_fn,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{StreamExt as _, future::OptionFuture, stream, task::AtomicWaker};
use lockkit_core::spi::Secrets;
use tokio::{
    sync::mpsc,
    task::AbortHandle,
    time::{Instant, sleep_until, timeout},
};

use crate::{
    connection::Connection,
    error::{Failure, Result},
    lock,
    members::Members,
    wire::{Event, EventType, WatchCancel, WatchCreate, WatchFilter, WatchRequest, WatchResponse},
};

/// The time within which a server has to confirm a watch, or another before it. Holders are not renewed without one.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(3);
/// A token that is younger than this is not why a watch was refused.
const FRESH: Duration = Duration::from_secs(1);

/// An event of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchEvent {
    /// A key was deleted.
    Deleted,
    /// A key was written.
    Written,
    /// The watch has ended, with its connection or otherwise. What it has missed is not known.
    Interrupted,
    /// The user has no right to watch.
    Denied,
}

/// A watch, which remembers its first event. Dropping it ends it.
pub(crate) struct Watch {
    state: Arc<WatchState>,
    commands: mpsc::UnboundedSender<Command>,
    watching: Arc<AtomicUsize>,
}

struct WatchState {
    id: i64,
    key: Vec<u8>,
    range_end: Vec<u8>,
    with_puts: bool,
    inner: Mutex<Inner>,
    waker: AtomicWaker,
}

#[derive(Debug, Default)]
struct Inner {
    /// The stream on which the server has confirmed it.
    stream: Option<u64>,
    event: Option<WatchEvent>,
}

enum Command {
    Create(Arc<WatchState>),
    Cancel(i64),
}

/// Makes watches. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Watcher {
    commands: mpsc::UnboundedSender<Command>,
    next: AtomicI64,
    /// The number of watches.
    watching: Arc<AtomicUsize>,
    /// The time of the last answer on a stream.
    heard: Arc<Mutex<Option<Instant>>>,
    task: AbortHandle,
}

impl Watcher {
    /// Makes it. Call it within a Tokio runtime, where its task lives.
    pub(crate) fn new(members: Arc<Members>) -> Self {
        let (commands, asked) = mpsc::unbounded_channel();
        let heard = Arc::default();
        let task = tokio::spawn(serve(members, asked, Arc::clone(&heard)));
        Self {
            commands,
            next: AtomicI64::new(1),
            watching: Arc::default(),
            heard,
            task: task.abort_handle(),
        }
    }

    /// Begins to watch a key for its deletion.
    pub(crate) fn deletion(&self, key: &[u8]) -> Watch {
        self.watch(key.to_vec(), Vec::new(), false)
    }

    /// Begins to watch a key for its deletion and for writes.
    pub(crate) fn changes(&self, key: &[u8]) -> Watch {
        self.watch(key.to_vec(), Vec::new(), true)
    }

    /// Begins to watch all keys of a range.
    pub(crate) fn range(&self, (key, range_end): (Vec<u8>, Vec<u8>)) -> Watch {
        self.watch(key, range_end, true)
    }

    /// Returns whether the server still tells of what is watched, if anything is: it has so long to confirm one watch more, of this key, or
    /// another before it. An interruption is told to all watches, and is no matter here.
    pub(crate) async fn is_alive(&self, key: &str, limit: Duration) -> bool {
        if self.watching.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let began = Instant::now();
        let one_more = self.deletion(key.as_bytes());
        timeout(limit, one_more.confirmed()).await.is_ok()
            || lock(&self.heard).is_some_and(|heard| heard >= began)
    }

    fn watch(&self, key: Vec<u8>, range_end: Vec<u8>, with_puts: bool) -> Watch {
        let state = Arc::new(WatchState {
            id: self.next.fetch_add(1, Ordering::Relaxed),
            key,
            range_end,
            with_puts,
            inner: Mutex::default(),
            waker: AtomicWaker::new(),
        });
        if self.commands.send(Command::Create(state.clone())).is_err() {
            state.tell(WatchEvent::Interrupted);
        }
        self.watching.fetch_add(1, Ordering::Relaxed);
        Watch {
            state,
            commands: self.commands.clone(),
            watching: self.watching.clone(),
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watch {
    /// Waits until the server has confirmed the watch. It tells of all that happens from then on.
    ///
    /// # Errors
    /// If the watch has ended.
    pub(crate) async fn confirmed(&self) -> Result<()> {
        poll_fn(|cx| {
            self.state.waker.register(cx.waker());
            let inner = self.state.inner();
            match inner.event {
                _ if inner.stream.is_some() => Poll::Ready(Ok(())),
                None => Poll::Pending,
                Some(WatchEvent::Denied) => {
                    let reason = "the user may not watch these keys; run `etcdctl role grant-permission ROLE readwrite NAMESPACE/ \
                                  --prefix`";
                    // It had the right to write them a moment before.
                    Poll::Ready(Err(Failure::refused(reason, false)))
                }
                Some(_) => Poll::Ready(Err(Failure::Unknown(
                    "the connection was lost before a watch was confirmed".to_owned(),
                ))),
            }
        })
        .await
    }

    /// Returns the first event, if there was one.
    pub(crate) fn look(&self) -> Option<WatchEvent> {
        self.state.inner().event
    }

    /// Returns the stream on which the server has confirmed it. It tells its events in the order in which they happened.
    pub(crate) fn stream(&self) -> Option<u64> {
        self.state.inner().stream
    }

    /// The server has confirmed the watch, which has told nothing.
    pub(crate) fn is_quiet(&self) -> bool {
        let inner = self.state.inner();
        inner.stream.is_some() && inner.event.is_none()
    }

    /// Is ready once there is an event. Wakes the last who asked.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<WatchEvent> {
        self.state.waker.register(cx.waker());
        match self.look() {
            Some(event) => Poll::Ready(event),
            None => Poll::Pending,
        }
    }

    /// Waits for the first event.
    pub(crate) async fn event(&self) -> WatchEvent {
        poll_fn(|cx| self.poll(cx)).await
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watching.fetch_sub(1, Ordering::Relaxed);
        let _ = self.commands.send(Command::Cancel(self.state.id));
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("key", &self.state.key.escape_ascii().to_string())
            .field("state", &*self.state.inner())
            .finish_non_exhaustive()
    }
}

impl WatchState {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    fn confirm(&self, stream: u64) {
        self.inner().stream = Some(stream);
        self.waker.wake();
    }

    fn tell(&self, event: WatchEvent) {
        self.inner().event.get_or_insert(event);
        self.waker.wake();
    }

    fn request(&self) -> WatchRequest {
        let filters = if self.with_puts {
            Vec::new()
        } else {
            vec![WatchFilter::NoPut.into()]
        };
        WatchRequest {
            create: Some(WatchCreate {
                key: self.key.clone(),
                range_end: self.range_end.clone(),
                filters,
                watch_id: self.id,
            }),
            cancel: None,
        }
    }
}

/// The watches on one stream.
struct OnStream {
    id: u64,
    requests: mpsc::UnboundedSender<WatchRequest>,
    all: HashMap<i64, Arc<WatchState>>,
    /// Those that the server has not answered yet, in the order of the requests and of the answers.
    asked: VecDeque<i64>,
    /// When the first of these was asked for, or the one before it was answered.
    since: Instant,
}

/// Serves watches, on one stream after the other.
async fn serve(
    members: Arc<Members>,
    mut commands: mpsc::UnboundedReceiver<Command>,
    heard: Arc<Mutex<Option<Instant>>>,
) {
    // A member may refuse an old token. When a new one was asked for last.
    let mut authenticated: Option<Instant> = None;
    let mut streams = 0;
    while let Some(command) = commands.recv().await {
        let Command::Create(first) = command else { continue };
        let Ok(connection) = members.connection().await else {
            first.tell(WatchEvent::Interrupted);
            continue;
        };
        streams += 1;
        let (requests, asked) = mpsc::unbounded_channel();
        let mut on_stream = OnStream {
            id: streams,
            requests,
            all: HashMap::new(),
            asked: VecDeque::new(),
            since: Instant::now(),
        };
        on_stream.create(first);
        let token = connection.token();
        let ended = on_stream
            .run(&connection, asked, &mut commands, authenticated, &heard)
            .await;
        for watch in on_stream.all.values() {
            watch.tell(WatchEvent::Interrupted);
        }
        match ended {
            StreamEnd::Interrupted => {}
            StreamEnd::StaleToken => match connection.renew_token(token.as_ref()).await {
                // That one may have ended, too.
                Ok(false) => {}
                Ok(true) => authenticated = Some(Instant::now()),
                Err(error) => {
                    authenticated = Some(Instant::now());
                    tracing::debug!(%error, "no new token for watches");
                }
            },
            StreamEnd::Closed => return,
        }
    }
}

enum StreamEnd {
    Interrupted,
    /// The token that the stream was opened with may have ended.
    StaleToken,
    /// Nobody watches any more.
    Closed,
}

impl OnStream {
    async fn run(
        &mut self,
        connection: &Connection,
        mut asked: mpsc::UnboundedReceiver<WatchRequest>,
        commands: &mut mpsc::UnboundedReceiver<Command>,
        authenticated: Option<Instant>,
        heard: &Mutex<Option<Instant>>,
    ) -> StreamEnd {
        // At each refusal: a stream may outlive several tokens.
        let may_be_stale = || connection.has_user() && authenticated.is_none_or(|at| at.elapsed() > FRESH);
        // The server answers the opening with its first answer, so that the first request comes before that.
        let opening = connection.watches(stream::poll_fn(move |cx| asked.poll_recv(cx)));
        tokio::pin!(opening);
        let mut answers = None;
        loop {
            let is_opening = answers.is_none();
            let (is_asked, late) = (!self.asked.is_empty(), self.since + CONFIRM_TIMEOUT);
            let next: OptionFuture<_> = answers.as_mut().map(tonic::Streaming::next).into();
            tokio::select! {
                opened = &mut opening, if is_opening => match opened {
                    Ok(opened) => answers = Some(opened),
                    Err(Failure::StaleToken) if may_be_stale() => return StreamEnd::StaleToken,
                    Err(error) => {
                        tracing::debug!(%error, "no stream of watches");
                        return StreamEnd::Interrupted;
                    }
                },
                Some(answer) = next => match answer {
                    Some(Ok(answer)) => {
                        *lock(heard) = Some(Instant::now());
                        if !self.answered(&answer, may_be_stale(), connection.secrets()) {
                            return StreamEnd::StaleToken;
                        }
                    }
                    Some(Err(error)) => {
                        let error = connection.secrets().chain(&error);
                        tracing::debug!(error, "the stream of watches has ended");
                        return StreamEnd::Interrupted;
                    }
                    None => return StreamEnd::Interrupted,
                },
                command = commands.recv() => match command {
                    Some(Command::Create(watch)) => self.create(watch),
                    Some(Command::Cancel(id)) => self.cancel(id),
                    None => return StreamEnd::Closed,
                },
                () = sleep_until(late), if is_asked => {
                    tracing::debug!("a member does not confirm a watch");
                    Members::leave(connection).await;
                    return StreamEnd::Interrupted;
                }
                () = connection.ended() => return StreamEnd::Interrupted,
            }
        }
    }

    fn create(&mut self, watch: Arc<WatchState>) {
        if self.asked.is_empty() {
            self.since = Instant::now();
        }
        self.asked.push_back(watch.id);
        // If the stream has ended, that is seen next.
        let _ = self.requests.send(watch.request());
        self.all.insert(watch.id, watch);
    }

    fn cancel(&mut self, watch_id: i64) {
        if self.all.remove(&watch_id).is_some() {
            let _ = self.requests.send(WatchRequest {
                create: None,
                cancel: Some(WatchCancel { watch_id }),
            });
        }
    }

    /// Notes an answer. Returns `false` if a watch was refused that a new token may be granted.
    fn answered(&mut self, answer: &WatchResponse, may_be_stale: bool, secrets: &Secrets) -> bool {
        // Some versions do not repeat the number of a watch that they refuse.
        let id = if answer.created {
            self.since = Instant::now();
            self.asked.pop_front().unwrap_or(answer.watch_id)
        } else {
            answer.watch_id
        };
        if answer.canceled {
            let Some(watch) = self.all.remove(&id) else {
                return true;
            };
            let is_denied = answer.created && answer.cancel_reason.contains("etcdserver:");
            let reason = &*secrets.blank(&answer.cancel_reason);
            tracing::debug!(reason, "a watch was cancelled");
            if is_denied && may_be_stale {
                watch.tell(WatchEvent::Interrupted);
                return false;
            }
            watch.tell(if is_denied {
                WatchEvent::Denied
            } else {
                WatchEvent::Interrupted
            });
            return true;
        }
        let Some(watch) = self.all.get(&id) else {
            return true;
        };
        if answer.created {
            watch.confirm(self.id);
        }
        let is_deletion = |event: &Event| event.kind == i32::from(EventType::Delete);
        if answer.events.iter().any(is_deletion) {
            watch.tell(WatchEvent::Deleted);
        } else if !answer.events.is_empty() {
            watch.tell(WatchEvent::Written);
        }
        true
    }
}
