//! One connection of a session. It does not reconnect by itself.
//!
//! The client library reattaches a session silently: a holder is told neither which timeout the server granted this time,
//! nor that watches could not be set again. So each connection is a client of its own, whose task is ended as soon as it
//! has lost its server, and [`session`](crate::session) reattaches.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use lockkit_core::spi::Mutex;
use spawns_core::{Spawn, Task};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::AbortHandle,
    time::{Instant, timeout},
};
use zookeeper_client::{Client, Connector, Error as ZkError, SessionState, StateWatcher};

use crate::error::{Failure, Result, contained};

/// The way to one server for the client library.
pub(crate) struct Route {
    /// `host:port` to connect to.
    pub(crate) host: String,
    /// The session timeout to ask for.
    pub(crate) timeout: Duration,
    /// `user:password`.
    pub(crate) credentials: Option<String>,
    /// Carries the bytes. It is polled for as long as the connection lives.
    pub(crate) relay: Relaying,
}

type Relaying = BoxFuture<'static, Result<()>>;

/// A connection. Dropping it closes its session.
pub(crate) struct Connection {
    pub(crate) client: Client,
    liveness: Arc<Liveness>,
    task: AbortHandle,
}

/// The state of a connection: standing, or ended. It outlives the connection.
#[derive(Debug)]
pub(crate) struct Liveness {
    /// The connection's number within the process.
    id: u64,
    since: Instant,
    ended: RwLock<bool>,
    final_state: watch::Sender<Option<SessionState>>,
    /// Why the connection was given up on this side, if it was.
    given_up: OnceLock<Failure>,
}

impl Connection {
    /// Connects to the server at `host`, and stays with it. Call it within a Tokio runtime: the connection's task lives there.
    pub(crate) async fn connect(connector: Connector, host: &str, relay: Relaying) -> Result<Self> {
        let mut relay = Some(relay);
        let captured = CapturedTask::default();
        let mut connecting = pin!(connector.connect(host));
        let client = poll_fn(|cx| {
            // Its failure says more than the end of the connection, which is what the library sees of it.
            if let Poll::Ready(Err(failure)) = poll_relay(&mut relay, cx) {
                return Poll::Ready(Err(failure));
            }
            let _scope = spawns_core::enter(&captured);
            connecting.as_mut().poll(cx).map_err(Into::into)
        });
        let client = contained(client).await?;
        let (Some(serve), Ok(runtime)) = (captured.take(), Handle::try_current()) else {
            return Err(ZkError::ClientClosed.into());
        };
        let liveness = Arc::new(Liveness::default());
        let run = Run {
            serve: Some(serve),
            relay,
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

    /// Returns the session timeout that this server has granted.
    pub(crate) fn timeout(&self) -> Duration {
        self.client.session_timeout()
    }

    pub(crate) fn liveness(&self) -> &Arc<Liveness> {
        &self.liveness
    }

    /// Returns the reply to a request that changes nothing. One that failed since the connection was given up says why it was.
    pub(crate) fn reply<T>(&self, reply: Result<T>) -> Result<T> {
        reply.map_err(|failure| match self.liveness.given_up.get() {
            Some(why) if matches!(failure, Failure::Server(ZkError::ConnectionLoss)) => why.clone(),
            _ => failure,
        })
    }

    /// Ends the connection, not the session.
    pub(crate) async fn abort(&self) {
        // The connection must not be dropped before its task has ended: that would close the session.
        self.ending().abort().await;
    }

    /// Returns a handle on the connection's end that does not keep the connection.
    pub(crate) fn ending(&self) -> Ending {
        Ending {
            liveness: self.liveness.clone(),
            task: self.task.clone(),
        }
    }
}

/// The end of a connection, without the connection.
pub(crate) struct Ending {
    liveness: Arc<Liveness>,
    task: AbortHandle,
}

impl Ending {
    /// Waits for the end, aborts the connection after `limit`, and returns the session's last known state.
    pub(crate) async fn within(self, limit: Duration) -> SessionState {
        match timeout(limit, self.liveness.ended()).await {
            Ok(state) => state,
            Err(_) => self.abort().await,
        }
    }

    async fn abort(&self) -> SessionState {
        self.task.abort();
        self.liveness.ended().await
    }
}

impl Liveness {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Returns when the connection began.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    pub(crate) fn has_ended(&self) -> bool {
        *self.lock()
    }

    /// Returns [`has_ended`](Self::has_ended), under a lock that keeps the connection from ending meanwhile.
    pub(crate) fn lock(&self) -> RwLockReadGuard<'_, bool> {
        self.ended.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end, and returns the session's last state that this connection knows of.
    pub(crate) async fn ended(&self) -> SessionState {
        let mut final_state = self.final_state.subscribe();
        loop {
            if let Some(state) = *final_state.borrow_and_update() {
                return state;
            }
            // The sender is part of `self`, so that this does not fail.
            let _ = final_state.changed().await;
        }
    }

    fn end(&self, state: SessionState) {
        self.final_state
            .send_if_modified(|known| known.replace(state).is_none());
    }
}

impl Default for Liveness {
    fn default() -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            since: Instant::now(),
            ended: RwLock::new(false),
            final_state: watch::Sender::new(None),
            given_up: OnceLock::new(),
        }
    }
}

/// The client library's task for one connection. It ends when the connection is lost.
struct Run {
    serve: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    relay: Option<Relaying>,
    states: StateWatcher,
    liveness: Arc<Liveness>,
}

impl Run {
    fn end(&mut self) {
        let Some(serve) = self.serve.take() else { return };
        // Set before the library drops its end of the watches: polling a watch after that would panic.
        *self
            .liveness
            .ended
            .write()
            .unwrap_or_else(PoisonError::into_inner) = true;
        drop(serve);
        self.liveness.end(self.states.peek_state());
    }
}

impl Future for Run {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // Once it has ended, the library finds its connection closed.
        if let Poll::Ready(Err(failure)) = poll_relay(&mut self.relay, cx) {
            let _ = self.liveness.given_up.set(failure);
        }
        let done = self
            .serve
            .as_mut()
            .is_none_or(|serve| is_done(serve.as_mut(), cx));
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

/// Polls the library's task. If that panics, it is done: the connection ends, and another one is made.
fn is_done(serve: Pin<&mut (dyn Future<Output = ()> + Send)>, cx: &mut Context<'_>) -> bool {
    catch_unwind(AssertUnwindSafe(|| serve.poll(cx))).map_or(true, |polled| polled.is_ready())
}

/// Polls a relay until it is done, and drops it then, which closes the library's connection.
fn poll_relay(relay: &mut Option<Relaying>, cx: &mut Context<'_>) -> Poll<Result<()>> {
    let Some(relaying) = relay else {
        return Poll::Pending;
    };
    let done = relaying.as_mut().poll(cx);
    if done.is_ready() {
        *relay = None;
    }
    done
}

/// The task that the client library spawns while it connects.
#[derive(Default)]
struct CapturedTask(Mutex<Option<Task>>);

impl CapturedTask {
    fn take(&self) -> Option<Pin<Box<dyn Future<Output = ()> + Send>>> {
        let mut task = self.0.lock();
        task.take().map(|task| Box::into_pin(task.future))
    }
}

impl Spawn for CapturedTask {
    fn spawn(&self, task: Task) {
        *self.0.lock() = Some(task);
    }
}
