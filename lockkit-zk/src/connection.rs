//! One connection of a session, which does not reconnect by itself.
//!
//! The client library reattaches a session silently: whoever holds locks on it is not told what timeout the server granted
//! this time, nor that the watches could not be set again. So each connection is a client of its own, whose task is ended
//! as soon as it has lost its server, and [`session`](crate::session) reattaches.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use spawns_core::{Spawn, Task};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::AbortHandle,
    time::{Instant, timeout},
};
use zookeeper_client::{Client, Connector, Error as ZkError, SessionState, StateWatcher};

/// A connection. Dropped, it closes its session.
pub(crate) struct Connection {
    pub(crate) client: Client,
    liveness: Arc<Liveness>,
    task: AbortHandle,
}

/// Whether a connection stands. It outlives the connection.
#[derive(Debug)]
pub(crate) struct Liveness {
    /// Which connection of the process it is.
    number: u64,
    since: Instant,
    over: RwLock<bool>,
    state: watch::Sender<Option<SessionState>>,
}

impl Connection {
    /// Connects to one server, and stays with it. Within a Tokio runtime: the connection's task lives there.
    pub(crate) async fn connect(connector: Connector, host: &str) -> Result<Self, ZkError> {
        let spawned = Spawned::default();
        let mut connecting = pin!(connector.connect(host));
        let client = poll_fn(|cx| {
            let _scope = spawns_core::enter(&spawned);
            connecting.as_mut().poll(cx)
        });
        let client = client.await?;
        let (Some(serve), Ok(runtime)) = (spawned.take(), Handle::try_current()) else {
            return Err(ZkError::ClientClosed);
        };
        let liveness = Arc::new(Liveness::default());
        let run = Run {
            serve: Some(serve),
            states: client.state_watcher(),
            liveness: liveness.clone(),
        };
        let task = runtime.spawn(run).abort_handle();
        Ok(Self {
            client,
            liveness,
            task,
        })
    }

    /// The session timeout that this server has granted.
    pub(crate) fn timeout(&self) -> Duration {
        self.client.session_timeout()
    }

    pub(crate) fn liveness(&self) -> &Arc<Liveness> {
        &self.liveness
    }

    /// Ends the connection, not the session.
    pub(crate) async fn cut(&self) {
        // Not to be dropped before, which would close the session.
        self.ending().cut().await;
    }

    /// To await its end with.
    pub(crate) fn ending(&self) -> Ending {
        Ending {
            liveness: self.liveness.clone(),
            task: self.task.clone(),
        }
    }
}

/// The end of a connection, for whoever does not keep it.
pub(crate) struct Ending {
    liveness: Arc<Liveness>,
    task: AbortHandle,
}

impl Ending {
    /// What the session's state was last. After `limit` the connection is cut.
    pub(crate) async fn within(self, limit: Duration) -> SessionState {
        match timeout(limit, self.liveness.ended()).await {
            Ok(state) => state,
            Err(_) => self.cut().await,
        }
    }

    async fn cut(&self) -> SessionState {
        self.task.abort();
        self.liveness.ended().await
    }
}

impl Liveness {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The moment at which it began.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    pub(crate) fn is_over(&self) -> bool {
        *self.look()
    }

    /// Whether it is over, and keeps it from ending meanwhile.
    pub(crate) fn look(&self) -> RwLockReadGuard<'_, bool> {
        self.over.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the session's state was last, as far as this connection knows, once it is over.
    pub(crate) async fn ended(&self) -> SessionState {
        let mut state = self.state.subscribe();
        loop {
            if let Some(state) = *state.borrow_and_update() {
                return state;
            }
            // The sender is part of this.
            let _ = state.changed().await;
        }
    }

    fn end(&self, state: SessionState) {
        self.state
            .send_if_modified(|known| known.replace(state).is_none());
    }
}

impl Default for Liveness {
    fn default() -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            since: Instant::now(),
            over: RwLock::new(false),
            state: watch::Sender::new(None),
        }
    }
}

/// The client library's task for one connection, until that is lost.
struct Run {
    serve: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    states: StateWatcher,
    liveness: Arc<Liveness>,
}

impl Run {
    fn end(&mut self) {
        let Some(serve) = self.serve.take() else { return };
        // Before the library drops its end of the watches: whoever polled one after that would panic.
        *self.liveness.over.write().unwrap_or_else(PoisonError::into_inner) = true;
        drop(serve);
        self.liveness.end(self.states.peek_state());
    }
}

impl Future for Run {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let done = self
            .serve
            .as_mut()
            .is_none_or(|serve| serve.as_mut().poll(cx).is_ready());
        if done || self.states.peek_state() == SessionState::Disconnected {
            self.end();
            return Poll::Ready(());
        }
        Poll::Pending
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.end();
    }
}

/// What the client library has spawned.
#[derive(Default)]
struct Spawned(Mutex<Option<Task>>);

impl Spawned {
    fn take(&self) -> Option<Pin<Box<dyn Future<Output = ()> + Send>>> {
        let mut task = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        task.take().map(|task| Box::into_pin(task.future))
    }
}

impl Spawn for Spawned {
    fn spawn(&self, task: Task) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }
}
