//! One session: its state, the proof that it is alive, and its end.
//!
//! [`attach`] keeps it attached to a server, [`requests`] has what claims ask for, [`heartbeat`] proves it, and [`upkeep`]
//! arms its watches and deletes nodes that nobody needs.

mod attach;
pub(crate) mod fence;
mod heartbeat;
mod requests;
mod upkeep;

use std::{
    collections::VecDeque,
    fmt,
    ops::Deref,
    sync::{Arc, Weak, atomic::AtomicBool},
    time::Duration,
};

#[cfg(not(test))]
use lockkit_core::spi::asleep;
use lockkit_core::{
    LossReason,
    spi::{Mutex, SessionProof, queue::AbandonWatch},
};
#[cfg(test)]
use tests::asleep;
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    time::{Instant, timeout as within},
};
use zookeeper_client::{SessionInfo, SessionState};

pub(crate) use self::{
    attach::Servers,
    heartbeat::session_timeout,
    requests::{Enqueued, FoundNode, NodeState, Watched},
};
use self::{requests::NodeOptions, upkeep::Watches};
use crate::{
    ZkConfig,
    config::check_session_timeout,
    connection::Connection,
    distance::Distance,
    error::{Failure, Result, contained},
    layout::{Layout, NodeRef},
    lease::Proof,
    watch::WatchEvent,
};

/// Less sleep than this is the difference of two clocks that are not read in the same instant.
const LEAST_SLEEP: Duration = Duration::from_millis(1);

/// A session with an ensemble. Dropping it ends it, and the servers delete all its nodes.
pub(crate) struct Session {
    core: Arc<Core>,
}

/// A session as its own task sees it, which does not keep the session from being dropped.
pub(crate) struct Core {
    id: i64,
    /// The credentials to attach it again.
    info: SessionInfo,
    servers: Servers,
    /// The connection, while there is one that is known to lead to the ensemble.
    connection: watch::Sender<Option<Arc<Connection>>>,
    status: watch::Sender<Status>,
    /// The end of what is proven, or why the session has ended, for the driver to look at with each hold.
    proven: watch::Sender<std::result::Result<Instant, LossReason>>,
    /// The node that it writes to, to prove that it is alive.
    heartbeat_path: String,
    /// It has that node, or makes it anew. A session that only looks makes none.
    has_node: AtomicBool,
    /// The node of what is added to transactions to make tokens of them.
    fence_path: String,
    known_bases: Mutex<Option<fence::Known>>,
    /// The holds whose release it [announced](Core::delete_held) last, by the transactions that made their nodes. It writes them
    /// to its node, behind the session timeout.
    recent_holds: Mutex<VecDeque<i64>>,
    node_options: NodeOptions,
    pending_deletes: Mutex<Vec<NodeRef>>,
    delete_requested: Notify,
    /// Those of the nodes that claims have asked for.
    abandon_watches: Mutex<Vec<Weak<AbandonWatch<NodeRef>>>>,
    distance: Distance,
    /// The server does not know multi-reads.
    lacks_multi_read: AtomicBool,
    watches: Mutex<Watches>,
    /// A watch was added that was armed on a connection that has ended.
    unarmed: Notify,
    /// The session is to be closed at the server.
    closing: watch::Sender<bool>,
    /// The session's task has ended: `true` by itself, `false` with its runtime.
    task_ended: watch::Sender<Option<bool>>,
}

/// The state of a session, as far as it is known.
#[derive(Clone, Debug)]
pub(crate) struct Status {
    proof: Proof,
    /// The time that the machine has slept in all, as far as it was taken off the proof.
    asleep: Duration,
    /// The server's clock in ms since 1970, and when it showed that.
    server_clock: (i64, Instant),
    ended: Option<LossReason>,
}

impl Session {
    /// Opens a session.
    pub(crate) async fn open(config: &ZkConfig, servers: &Servers, layout: &Layout) -> Result<Self> {
        let asleep = asleep();
        let (connection, sent) = servers.open().await?;
        Self::on(connection, (sent, asleep), config, servers, layout).await
    }

    /// Makes a session of a connection that has opened one. The request was sent at `sent`, when the machine had slept for
    /// `asleep`.
    async fn on(
        connection: Connection,
        (sent, asleep): (Instant, Duration),
        config: &ZkConfig,
        servers: &Servers,
        layout: &Layout,
    ) -> Result<Self> {
        let runtime = Handle::try_current().map_err(|_| Failure::NoRuntime)?;
        let granted = connection.timeout();
        check_session_timeout(granted, config.tick_time, "granted by the server")
            .map_err(Failure::ShortSession)?;
        servers.note_granted(granted);
        let timeout = servers.relied_on(granted);
        let connection = Arc::new(connection);
        let info = connection.client.session().clone();
        let id = info.id().0;
        let proof = Proof::opened(timeout, config.tick_time, connection.liveness().id(), sent);
        let core = Arc::new(Core {
            id,
            info,
            servers: servers.with_timeout(timeout),
            connection: watch::Sender::new(Some(connection.clone())),
            proven: watch::Sender::new(Ok(proof.end())),
            status: watch::Sender::new(Status {
                proof,
                asleep,
                server_clock: (0, sent),
                ended: None,
            }),
            heartbeat_path: layout.heartbeat_path(id),
            has_node: AtomicBool::new(false),
            fence_path: layout.fence_path(),
            known_bases: Mutex::default(),
            recent_holds: Mutex::default(),
            node_options: NodeOptions::new(config),
            pending_deletes: Mutex::default(),
            delete_requested: Notify::new(),
            abandon_watches: Mutex::default(),
            distance: Distance::default(),
            lacks_multi_read: AtomicBool::new(false),
            watches: Mutex::default(),
            unarmed: Notify::new(),
            closing: watch::Sender::new(false),
            task_ended: watch::Sender::new(None),
        });
        // It succeeds on this connection or not at all: the task that makes another does not run yet.
        contained(core.confirm(&connection)).await?;
        runtime.spawn(run(EndOnDrop(core.clone())));
        Ok(Self { core })
    }

    /// Ends the session, and with it all its nodes. Resolves once the server has confirmed that, or nothing can be left of
    /// it.
    ///
    /// # Errors
    /// [`Failure::RuntimeGone`] if its runtime has ended: then nobody has told the server.
    pub(crate) async fn close(&self) -> Result<()> {
        self.begin_closing();
        let mut task_ended = self.task_ended.subscribe();
        // The sender is part of the session, so that this does not fail.
        let by_itself = task_ended
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|ended| *ended);
        by_itself
            .filter(|by_itself| *by_itself)
            .map(drop)
            .ok_or(Failure::RuntimeGone)
    }

    fn begin_closing(&self) {
        self.closing.send_replace(true);
        self.end(LossReason::Disconnected);
    }
}

impl Deref for Session {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
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
            .field("id", &format_args!("{:#x}", self.id))
            .finish_non_exhaustive()
    }
}

impl Core {
    pub(crate) fn id(&self) -> i64 {
        self.id
    }

    /// Returns why the session has ended, if it has.
    pub(crate) fn ended(&self) -> Option<LossReason> {
        let known = self.status.borrow().ended;
        known.or_else(|| {
            let connection = self.connection.borrow();
            connection
                .as_ref()
                .and_then(|connection| end_reason(connection.client.state()))
        })
    }

    /// Returns until when the server cannot have ended the session by itself.
    pub(crate) fn proven_until(&self) -> Instant {
        self.note_sleep();
        self.status.borrow().proof.end()
    }

    /// Returns the proof for the driver, which sees there when less is proven and when the session ends.
    pub(crate) fn proof(&self) -> SessionProof {
        self.proven.subscribe()
    }

    /// Resolves when the session has [ended](Self::ended) or turns out not to be proven until then.
    pub(crate) async fn proven_less_than(&self, until: Instant) {
        let mut status = self.status.subscribe();
        let _ = status
            .wait_for(|status| status.ended.is_some() || status.proof.end() < until)
            .await;
    }

    /// Resolves when the session has [ended](Self::ended) or is proven for longer than `until`.
    pub(crate) async fn proven_beyond(&self, until: Instant) {
        let mut status = self.status.subscribe();
        // The sender lives as long as the session.
        let _ = status
            .wait_for(|status| status.ended.is_some() || status.proof.end() > until)
            .await;
    }

    /// Returns whether what is proven is as new as proofs are.
    pub(crate) fn is_current(&self) -> bool {
        self.note_sleep();
        self.status.borrow().proof.is_current(Instant::now())
    }

    /// Resolves when the session has [ended](Self::ended) or what is proven is as new as proofs are.
    pub(crate) async fn current(&self) {
        let mut status = self.status.subscribe();
        let _ = status
            .wait_for(|status| status.ended.is_some() || status.proof.is_current(Instant::now()))
            .await;
    }

    /// Resolves with the next heartbeat or the end, whichever comes first.
    pub(crate) async fn status_changed(&self) {
        let _ = self.status.subscribe().changed().await;
    }

    /// Returns the connection's number, if there is a connection. Another number means that it was interrupted.
    pub(crate) fn connection_id(&self) -> Option<u64> {
        let connection = self.connection.borrow();
        let liveness = connection.as_ref().map(|connection| connection.liveness());
        liveness
            .filter(|liveness| !liveness.has_ended())
            .map(|liveness| liveness.id())
    }

    /// The server is so far away that one more request costs less than waiting for a reply.
    pub(crate) fn is_far(&self) -> bool {
        self.distance.is_far()
    }

    /// Returns the server's clock, in ms since 1970; `None` before the first write to its node.
    pub(crate) fn server_clock(&self) -> Option<i64> {
        let (then, at) = self.status.borrow().server_clock;
        (then > 0).then(|| then.saturating_add(i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX)))
    }

    /// Returns the connection, as soon as there is one.
    async fn connection(&self) -> Result<Arc<Connection>> {
        let mut connections = self.connection.subscribe();
        loop {
            if let Some(reason) = self.ended() {
                return Err(Failure::SessionEnded(reason));
            }
            let connection = connections.borrow_and_update().clone();
            if let Some(connection) = connection.filter(|connection| !connection.liveness().has_ended()) {
                return Ok(connection);
            }
            // The sender is part of `self`, so that this does not fail.
            let _ = connections.changed().await;
        }
    }

    /// Changes the status and returns what `change` returns: whether to wake those who wait for a change. The proof for the
    /// driver changes first, so that no holder can ask before it has been told.
    fn update_status(&self, change: impl FnOnce(&mut Status) -> bool) -> bool {
        self.status.send_if_modified(|status| {
            let changed = change(status);
            let proven = status.ended.map_or(Ok(status.proof.end()), Err);
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

    /// Ends the session on this side.
    fn end(&self, reason: LossReason) {
        let first = self.update_status(|status| {
            let first = status.ended.is_none();
            status.ended.get_or_insert(reason);
            first
        });
        if first {
            // Wakes those who wait for a connection.
            self.connection.send_modify(|_| {});
            for watch in self.watches(|_| true) {
                watch.tell(WatchEvent::SessionEnded);
            }
        }
    }

    /// Takes off the proof what the machine has slept since the last call, and returns how long it has slept in all.
    fn note_sleep(&self) -> Duration {
        let asleep = asleep();
        self.update_status(|status| {
            let slept = asleep.saturating_sub(status.asleep);
            if slept >= LEAST_SLEEP {
                status.asleep = asleep;
                status.proof.slept(slept);
            }
            slept >= LEAST_SLEEP
        });
        self.status.borrow().asleep
    }

    /// The ensemble cannot have ended the session, unless somebody asked for that.
    fn is_proven(&self) -> bool {
        self.note_sleep();
        self.status.borrow().proof.end() > Instant::now()
    }

    /// Returns the time of something that was done at `at`, by when the machine had slept for `asleep`. What it has slept
    /// since counts as time that has passed.
    fn before_sleep(&self, at: Instant, asleep: Duration) -> Instant {
        let slept = self.note_sleep().saturating_sub(asleep);
        at.checked_sub(slept).unwrap_or(at)
    }
}

/// Ends a session with its task, also if the task's runtime is shut down.
struct EndOnDrop(Arc<Core>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end(LossReason::Disconnected);
        self.0.task_ended.send_if_modified(|ended| {
            let first = ended.is_none();
            ended.get_or_insert(false);
            first
        });
    }
}

/// The session's one task.
async fn run(session: EndOnDrop) {
    let core = &*session.0;
    let reason = tokio::select! {
        reason = attach::stay_attached(core) => reason,
        () = closing(core) => LossReason::Disconnected,
        () = heartbeat::heartbeat(core) => LossReason::Disconnected,
        () = upkeep::rearm_watches(core) => LossReason::Disconnected,
        () = upkeep::delete_pending(core) => LossReason::Disconnected,
        () = upkeep::take_abandoned(core) => LossReason::Disconnected,
    };
    core.end(reason);
    // To close a session ends it here first, which ends each of the branches above.
    if *core.closing.borrow() && reason != LossReason::Expired {
        let left = core.servers.granted();
        // After that, nothing is left of it at the server.
        let _ = within(left, attach::close_at_server(core)).await;
    }
    core.connection.send_replace(None);
    core.task_ended.send_replace(Some(true));
}

async fn closing(core: &Core) {
    let _ = core.closing.subscribe().wait_for(|closing| *closing).await;
}

/// Returns why a session in this state has ended; `None` if it has not.
fn end_reason(state: SessionState) -> Option<LossReason> {
    match state {
        SessionState::Expired => Some(LossReason::Expired),
        SessionState::Closed | SessionState::AuthFailed => Some(LossReason::Disconnected),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use lockkit_testbed::zookeeper::{self, ZkServer};

    use super::*;

    static ASLEEP: AtomicU64 = AtomicU64::new(0);

    /// Returns how long a machine has slept that sleeps when it is told to.
    pub(super) fn asleep() -> Duration {
        lockkit_core::spi::asleep() + Duration::from_secs(ASLEEP.load(Ordering::SeqCst))
    }

    /// Returns a configuration for a server of one's own, and its servers.
    fn config(server: &ZkServer) -> (ZkConfig, Servers) {
        let mut config = ZkConfig::new(server.addr().to_string());
        (config.session_timeout, config.tick_time) = (Duration::from_secs(20), ZkServer::TICK);
        let servers = Servers::new(&config, &config.check().unwrap()).unwrap();
        (config, servers)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_slept_is_taken_off_what_is_proven() {
        const SLEPT: Duration = Duration::from_secs(5);
        if lockkit_testbed::skipped("zk", zookeeper::missing()) {
            return;
        }
        let server = ZkServer::plain().unwrap();
        let (config, servers) = config(&server);
        let layout = Layout::new("", "asleep");
        let session = Session::open(&config, &servers, &layout).await.unwrap();
        let proven = session.proven_until();
        ASLEEP.fetch_add(SLEPT.as_secs(), Ordering::SeqCst);
        assert_eq!(proven - session.proven_until(), SLEPT);
        let again = within(Duration::from_secs(60), session.proven_beyond(proven)).await;
        assert!(again.is_ok() && session.ended().is_none(), "it lives on");
    }

    /// An outage would not end a hold for as long as any server says.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_session_is_proven_for_no_longer_than_was_asked_for() {
        if lockkit_testbed::skipped("zk", zookeeper::missing()) {
            return;
        }
        let server = ZkServer::builder()
            .directive("minSessionTimeout=60000")
            .start()
            .unwrap();
        let (config, servers) = config(&server);
        let layout = Layout::new("", "long");
        let session = Session::open(&config, &servers, &layout).await.unwrap();
        assert_eq!(servers.granted(), Duration::from_secs(60));
        let first = session.proven_until();
        assert!(first <= Instant::now() + config.session_timeout, "when opened");
        let again = within(Duration::from_secs(60), session.proven_beyond(first)).await;
        assert!(again.is_ok(), "it lives on");
        assert!(
            session.proven_until() <= Instant::now() + config.session_timeout,
            "by a heartbeat"
        );
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_opening_whose_connection_is_lost_fails() {
        if lockkit_testbed::skipped("zk", zookeeper::missing()) {
            return;
        }
        let server = ZkServer::plain().unwrap();
        let (config, servers) = config(&server);
        let layout = Layout::new("", "lost");
        let (connection, sent) = servers.open().await.unwrap();
        connection.abort().await;
        let opening = Session::on(connection, (sent, asleep()), &config, &servers, &layout);
        let opened = within(Duration::from_secs(60), opening).await;
        let failure = opened.expect("it waits for no other connection").unwrap_err();
        assert!(failure.during("connect").is_transient());
    }
}
