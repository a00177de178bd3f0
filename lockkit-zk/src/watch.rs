//! One-shot watches that outlive their connection and remember what they have told.

use std::{
    fmt,
    future::poll_fn,
    sync::{Arc, MutexGuard, Weak},
    task::{Context, Poll, Wake, Waker},
};

use futures_util::{FutureExt, future::BoxFuture, task::AtomicWaker};
use lockkit_core::spi::Mutex;
use zookeeper_client::{EventType, OneshotWatcher, Stat};

use crate::connection::Liveness;

/// The watch of one node, for the claim that waits for its event.
pub(crate) struct Watch(Arc<WatchState>);

/// The watch of one node, for its session, which arms it again on each connection.
pub(crate) struct WatchState {
    pub(crate) path: String,
    /// The transactions that made the node and that wrote it last.
    czxid: i64,
    mzxid: i64,
    inner: Mutex<Inner>,
    waker: AtomicWaker,
}

struct Inner {
    /// The client library's watch, while this one is armed.
    armed: Option<BoxFuture<'static, WatchEvent>>,
    /// The connection that it was armed on.
    liveness: Arc<Liveness>,
    event: Option<WatchEvent>,
    /// The waker for the client library.
    relay: Waker,
}

/// An event of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchEvent {
    /// The node was deleted.
    Deleted,
    /// The node was written.
    Written,
    /// The session has ended, and the watch with it.
    SessionEnded,
}

impl Watch {
    pub(crate) fn new(path: String, stat: &Stat, watcher: OneshotWatcher, liveness: &Arc<Liveness>) -> Self {
        Self::of(path, (stat.czxid, stat.mzxid), watcher, liveness)
    }

    /// Makes the watch of a node that these transactions made and wrote last.
    pub(crate) fn of(
        path: String,
        (czxid, mzxid): (i64, i64),
        watcher: OneshotWatcher,
        liveness: &Arc<Liveness>,
    ) -> Self {
        Self(Arc::new_cyclic(|state| WatchState {
            path,
            czxid,
            mzxid,
            inner: Mutex::new(Inner {
                armed: Some(next_event(watcher)),
                liveness: liveness.clone(),
                event: None,
                relay: Waker::from(Arc::new(Relay { state: state.clone() })),
            }),
            waker: AtomicWaker::new(),
        }))
    }

    pub(crate) fn state(&self) -> &Arc<WatchState> {
        &self.0
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<WatchEvent> {
        // Registered before the look, so that no event is missed.
        self.0.waker.register(cx.waker());
        self.0.inner().look().map_or(Poll::Pending, Poll::Ready)
    }

    /// Returns the event, if there was one so far.
    pub(crate) fn look(&mut self) -> Option<WatchEvent> {
        self.0.inner().look()
    }

    /// It is armed on the current connection and has told nothing.
    pub(crate) fn is_quiet(&mut self) -> bool {
        let mut inner = self.0.inner();
        inner.look().is_none() && inner.armed.is_some()
    }

    /// Waits for the event.
    pub(crate) async fn event(&mut self) -> WatchEvent {
        poll_fn(|cx| self.poll(cx)).await
    }
}

impl WatchState {
    /// The connection that it was armed on has ended, and it has told nothing.
    pub(crate) fn is_unarmed(&self) -> bool {
        let inner = self.inner();
        inner.event.is_none() && inner.liveness.has_ended()
    }

    /// Arms it again, on another connection. It tells an event if the node has changed meanwhile.
    pub(crate) fn rearm(&self, stat: &Stat, watcher: OneshotWatcher, liveness: Arc<Liveness>) {
        if stat.czxid != self.czxid {
            return self.tell(WatchEvent::Deleted);
        }
        if stat.mzxid != self.mzxid {
            return self.tell(WatchEvent::Written);
        }
        let mut inner = self.inner();
        inner.armed = Some(next_event(watcher));
        inner.liveness = liveness;
        let has_event = inner.look().is_some();
        drop(inner);
        if has_event {
            self.waker.wake();
        }
    }

    /// Tells this event, unless there was another before.
    pub(crate) fn tell(&self, event: WatchEvent) {
        let mut inner = self.inner();
        inner.event.get_or_insert(event);
        let armed = inner.armed.take();
        drop(inner);
        drop(armed);
        self.waker.wake();
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }
}

impl Inner {
    fn look(&mut self) -> Option<WatchEvent> {
        let ended = self.liveness.lock();
        if *ended {
            // The session finds out what became of the node.
            self.armed = None;
        } else if let Some(armed) = &mut self.armed
            && let Poll::Ready(event) = armed.poll_unpin(&mut Context::from_waker(&self.relay))
        {
            self.armed = None;
            self.event.get_or_insert(event);
        }
        self.event
    }
}

/// Passes the client library's wake-ups on while the connection stands. The loss of a connection is no event.
struct Relay {
    state: Weak<WatchState>,
}

impl Wake for Relay {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(state) = self.state.upgrade()
            && !state.inner().liveness.has_ended()
        {
            state.waker.wake();
        }
    }
}

fn next_event(watcher: OneshotWatcher) -> BoxFuture<'static, WatchEvent> {
    let event = |event_type| match event_type {
        EventType::NodeDeleted => WatchEvent::Deleted,
        EventType::Session => WatchEvent::SessionEnded,
        _ => WatchEvent::Written,
    };
    watcher
        .changed()
        .map(move |watched| event(watched.event_type))
        .boxed()
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("path", &self.0.path)
            .finish_non_exhaustive()
    }
}
