//! A one-shot watch that outlives its connection, and remembers what it told.

use std::{
    fmt,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll, Wake, Waker},
};

use futures_util::{FutureExt, future::BoxFuture, task::AtomicWaker};
use zookeeper_client::{EventType, OneshotWatcher, Stat};

use crate::connection::Liveness;

/// The watch of one node, for whoever waits for it.
pub(crate) struct Watch(Arc<WatchState>);

/// The watch of one node, for its session, which sets it again on each connection.
pub(crate) struct WatchState {
    pub(crate) path: String,
    /// The transactions that made the node and that wrote it last.
    czxid: i64,
    mzxid: i64,
    inner: Mutex<Inner>,
    waker: AtomicWaker,
}

struct Inner {
    event: Option<BoxFuture<'static, WatchEvent>>,
    /// Of the connection that it was set on.
    liveness: Arc<Liveness>,
    told: Option<WatchEvent>,
    /// What the client library wakes.
    relay: Waker,
}

/// What a watch has told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchEvent {
    Deleted,
    /// Somebody wrote to the node.
    Written,
    /// The session, and with it the watch, has ended.
    Over,
}

impl Watch {
    pub(crate) fn new(path: String, stat: &Stat, watcher: OneshotWatcher, liveness: &Arc<Liveness>) -> Self {
        Self(Arc::new_cyclic(|eye| WatchState {
            path,
            czxid: stat.czxid,
            mzxid: stat.mzxid,
            inner: Mutex::new(Inner {
                event: Some(event(watcher)),
                liveness: liveness.clone(),
                told: None,
                relay: Waker::from(Arc::new(Relay { eye: eye.clone() })),
            }),
            waker: AtomicWaker::new(),
        }))
    }

    pub(crate) fn eye(&self) -> &Arc<WatchState> {
        &self.0
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<WatchEvent> {
        // Before it is looked at, so that nothing is told unheard.
        self.0.waker.register(cx.waker());
        self.0.inner().look().map_or(Poll::Pending, Poll::Ready)
    }

    /// What it has told so far.
    pub(crate) fn look(&mut self) -> Option<WatchEvent> {
        self.0.inner().look()
    }

    /// It is set on the connection that there is, and has told nothing.
    pub(crate) fn is_quiet(&mut self) -> bool {
        let mut inner = self.0.inner();
        inner.look().is_none() && inner.event.is_some()
    }

    pub(crate) async fn told(&mut self) -> WatchEvent {
        poll_fn(|cx| self.poll(cx)).await
    }
}

impl WatchState {
    /// It is to be set again, on another connection than the one that it was set on.
    pub(crate) fn is_shut(&self) -> bool {
        let inner = self.inner();
        inner.told.is_none() && inner.liveness.is_over()
    }

    /// It has been set again, and the node was found so.
    pub(crate) fn opens(&self, stat: &Stat, watcher: OneshotWatcher, liveness: Arc<Liveness>) {
        if stat.czxid != self.czxid {
            return self.tells(WatchEvent::Deleted);
        }
        if stat.mzxid != self.mzxid {
            return self.tells(WatchEvent::Written);
        }
        let mut inner = self.inner();
        inner.event = Some(event(watcher));
        inner.liveness = liveness;
        let told = inner.look().is_some();
        drop(inner);
        if told {
            self.waker.wake();
        }
    }

    pub(crate) fn tells(&self, told: WatchEvent) {
        let mut inner = self.inner();
        inner.told.get_or_insert(told);
        let event = inner.event.take();
        drop(inner);
        drop(event);
        self.waker.wake();
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn look(&mut self) -> Option<WatchEvent> {
        let over = self.liveness.look();
        if *over {
            // The session tells what became of the node.
            self.event = None;
        } else if let Some(event) = &mut self.event
            && let Poll::Ready(told) = event.poll_unpin(&mut Context::from_waker(&self.relay))
        {
            self.event = None;
            self.told.get_or_insert(told);
        }
        self.told
    }
}

/// Wakes whoever waits for a watch when it has told something, not when its connection is lost.
struct Relay {
    eye: Weak<WatchState>,
}

impl Wake for Relay {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(eye) = self.eye.upgrade()
            && !eye.inner().liveness.is_over()
        {
            eye.waker.wake();
        }
    }
}

fn event(watcher: OneshotWatcher) -> BoxFuture<'static, WatchEvent> {
    let told = |event_type| match event_type {
        EventType::NodeDeleted => WatchEvent::Deleted,
        EventType::Session => WatchEvent::Over,
        _ => WatchEvent::Written,
    };
    watcher.changed().map(move |event| told(event.event_type)).boxed()
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("path", &self.0.path)
            .finish_non_exhaustive()
    }
}
