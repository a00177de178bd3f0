//! Sessions: connections that hold a lock, wait for one, or are idle until the next acquisition.

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};

use futures_util::{FutureExt, future::join_all};
use lockkit_core::{
    Error, FencingDurability, Result,
    spi::{
        Mutex,
        resumable::{self, Resumable},
    },
};
use tokio::{
    sync::{OnceCell, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    NAME, Schema,
    connection::{Options, Parameter, Query, Reply, Wire},
    control::{Control, DEAD_AFTER},
    error::{During, Failure},
    schema,
    server::{self, Backend},
    sql,
};

/// The most idle sessions. A burst of tasks needs as many as the burst before, and to open one takes longer than to lock. The
/// server ends those that nobody uses for a ttl.
const MAX_IDLE: usize = 32;

/// The time between two checks of the idle sessions.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(5);

/// A session that the server would end within this time is not used.
const EXPIRY_MARGIN: Duration = Duration::from_millis(200);

/// A connection may be dead if a reply takes longer. It is abandoned for another.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(1);

/// The time within which one makes all that locks need. Others that make the same come first, each for a moment. Who comes after one that heard
/// nothing for so long finds the connection dead, and takes another.
const PREPARE_TIMEOUT: Duration = DEAD_AFTER.saturating_mul(2);

/// One session of the server: no other ever has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionId {
    pub(crate) process: i32,
    /// In µs since 1970.
    started: i64,
}

impl SessionId {
    pub(crate) fn parameters(self) -> Vec<Parameter> {
        vec![Parameter::Int(self.process), Parameter::Bigint(self.started)]
    }
}

#[derive(Debug)]
pub(crate) struct Session {
    connection: Resumable<Wire>,
    pub(crate) id: SessionId,
    /// Its lease in ms. `None` from the request that changes it until the server has confirmed the change, since the future that
    /// waits for the reply may be dropped in between.
    lease: Option<u32>,
    /// The lease that the request under way sets.
    setting: Option<u32>,
    /// True if the server has replied since the session was taken from the idle ones.
    pub(crate) is_proven: bool,
    /// The key of the lock that it waited for last. Whoever takes it for the same lock is likely to wait, too.
    pub(crate) waited_for: Option<i64>,
    last_used: Instant,
    _slot: OwnedSemaphorePermit,
}

#[derive(Debug)]
pub(crate) struct Sessions {
    pub(crate) control: Control,
    /// A control connection for inspections, which take their time. No withdrawal waits behind them.
    pub(crate) inspections: Control,
    options: Options,
    idle: Mutex<Vec<Session>>,
    slots: Arc<Semaphore>,
    max_connections: u32,
    schema: Schema,
    /// Set once all that locks need is known to be in the database.
    prepared: Arc<OnceCell<()>>,
    /// Whether tokens outlive a crash of the machine, as the session that was opened last has said.
    is_durable: AtomicBool,
}

impl Sessions {
    pub(crate) fn new(options: Options, max_connections: u32, schema: Schema) -> Self {
        Self {
            control: Control::new(options.clone()),
            inspections: Control::new(options.clone()),
            options,
            idle: Mutex::default(),
            slots: Arc::new(Semaphore::new(max_connections as usize)),
            max_connections,
            schema,
            prepared: Arc::default(),
            is_durable: AtomicBool::new(true),
        }
    }

    /// Makes what locks need in the database, if it is missing and to be made here, before the first of them. One does so, and the others
    /// wait for it: to make the tables takes a connection.
    ///
    /// # Cancel safety
    /// May be dropped at any await. Then the next one does it.
    pub(crate) async fn prepare(&self, operation: &'static str) -> Result<()> {
        if self.prepared.initialized() {
            return Ok(());
        }
        let (prepared, control, schema) = (self.prepared.clone(), self.control.clone(), self.schema);
        // An acquisition that nobody polls for a while would otherwise keep all others waiting, and so would a server that falls silent.
        let preparing = async move {
            let prepare = || async {
                let done = timeout(PREPARE_TIMEOUT, schema::prepare(operation, &control, schema)).await;
                done.unwrap_or_else(|_| {
                    let why =
                        format!("what locks need in the database was not there within {PREPARE_TIMEOUT:?}");
                    Err(Error::transient(NAME, operation, why))
                })
            };
            prepared.get_or_try_init(prepare).await.copied()
        };
        resumable::on_runtime(NAME, operation, preparing, &self.options.runtime).await?
    }

    /// Returns an idle session, preferably one with this lease, or opens one with it.
    ///
    /// # Errors
    /// If the server cannot be reached, or the limit of connections is reached.
    pub(crate) async fn get(&self, operation: &'static str, lease: u32) -> Result<Session> {
        match self.take_idle(lease) {
            Some(session) => Ok(session),
            None => self.open(operation, lease).await,
        }
    }

    /// Puts a session among the idle ones. It has no request under way and no lock, and shows none.
    pub(crate) async fn put(&self, mut session: Session) {
        session.last_used = Instant::now();
        session.is_proven = false;
        let surplus = {
            let mut idle = self.idle.lock();
            if session.lease.is_some() && idle.len() < MAX_IDLE {
                idle.push(session);
                return;
            }
            session
        };
        surplus.quit().await;
    }

    /// Closes all idle sessions: one of them was dead, and the others may be.
    pub(crate) fn discard_idle(&self) {
        // Under the lock, so that nobody finds no session here and their slots still taken.
        self.idle.lock().clear();
    }

    /// Checks the idle sessions for ever. A session that the server has ended would otherwise keep its socket until somebody
    /// uses it.
    pub(crate) async fn maintain(&self) {
        loop {
            sleep(MAINTENANCE_INTERVAL).await;
            let expiring = {
                let mut idle = self.idle.lock();
                idle.retain_mut(|session| !session.has_ended());
                let is_expiring = |session: &mut Session| {
                    session.last_used.elapsed() >= MAINTENANCE_INTERVAL
                        && session.ends_within(MAINTENANCE_INTERVAL)
                };
                // Their slots are free before anybody finds no session here.
                let expiring = idle.extract_if(.., is_expiring);
                expiring
                    .filter_map(|session| session.connection.into_idle())
                    .collect::<Vec<_>>()
            };
            join_all(expiring.into_iter().map(Wire::quit)).await;
        }
    }

    pub(crate) async fn close(&self) {
        let idle = std::mem::take(&mut *self.idle.lock());
        join_all(idle.into_iter().map(Session::quit)).await;
        self.inspections.close().await;
        self.control.close().await;
    }

    /// Takes the session that was used last, of those with this lease if there is one. Looks at no more of them than it has to.
    fn take_idle(&self, lease: u32) -> Option<Session> {
        let mut idle = self.idle.lock();
        loop {
            let fitting = idle.iter().rposition(|session| session.lease == Some(lease));
            let last = idle.len().checked_sub(1)?;
            // In order, so that the one that was used last stays the last.
            let mut session = idle.remove(fitting.unwrap_or(last));
            if !session.ends_within(EXPIRY_MARGIN) && !session.has_ended() {
                return Some(session);
            }
        }
    }

    async fn open(&self, operation: &'static str, lease: u32) -> Result<Session> {
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            return Err(Error::permanent(
                NAME,
                operation,
                format!(
                    "all {} connections that this client may have are in use, one per held lock and name waited for; \
                     raise max_connections (and the server's)",
                    self.max_connections
                ),
            ));
        };
        self.prepare(operation).await?;
        let options = self.options.clone();
        let opening = async move { open_for_locks(&options, lease).await };
        let opened = resumable::on_runtime(NAME, operation, opening, &self.options.runtime).await?;
        let (wire, backend) = opened.during(operation)?;
        let Backend {
            process,
            started,
            fencing,
        } = backend;
        let is_durable = fencing == FencingDurability::Durable;
        if self.is_durable.swap(is_durable, Ordering::Relaxed) && !is_durable {
            tracing::warn!("fsync is off: after a crash of the machine, fencing tokens may go back");
        }
        Ok(Session {
            connection: Resumable::new(wire),
            id: SessionId { process, started },
            lease: Some(lease),
            setting: None,
            is_proven: true,
            waited_for: None,
            last_used: Instant::now(),
            _slot: slot,
        })
    }
}

/// Opens a session that may lock: tokens that are drawn in it are above all that were granted before.
async fn open_for_locks(options: &Options, lease: u32) -> std::result::Result<(Wire, Backend), Failure> {
    let (mut wire, backend) = server::open(options, lease).await?;
    let reply = wire.run(vec![Query::once(sql::IS_SAME_LIFE, Vec::new())]).await?;
    // No session outlives a crash, so this is looked at once per session.
    if reply.first().is_none_or(Vec::is_empty) {
        wire.run_together(schema::BEGIN_EPOCH).await?;
    }
    // The row of an earlier process is believed only if this one holds the same lock, and is replaced when that is shown.
    schema::unless_locked(wire.run(vec![Query::once(sql::HIDE, Vec::new())]).await)?;
    wire.prepare(vec![sql::TRY, sql::WAIT, sql::UNLOCK, sql::PROVE])
        .await?;
    // Not when it is needed: to a list, the session would then have done something else than to show its hold.
    schema::unless_locked(wire.prepare(vec![sql::SHOW, sql::HIDE]).await)?;
    Ok((wire, backend))
}

impl Session {
    /// Returns true if the server has said that the session is over, or the connection is closed.
    fn has_ended(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        self.connection
            .idle()
            .is_none_or(|wire| wire.poll_end(&mut cx).is_ready())
    }

    /// Waits for the end of the session while no request is under way. The server says so at once.
    ///
    /// # Cancel safety
    /// May be dropped, and called again.
    pub(crate) async fn ended(&mut self) {
        poll_fn(|cx| match self.connection.idle() {
            Some(wire) => wire.poll_end(cx),
            None => std::task::Poll::Ready(()),
        })
        .await;
    }

    /// True if the server ends the session within `time` unless it is used.
    fn ends_within(&self, time: Duration) -> bool {
        let limit = Duration::from_millis(self.lease.unwrap_or(0).into());
        self.last_used.elapsed() + time >= limit
    }

    /// True if `failure` says that the session had ended while it was idle. Other idle ones may have ended with it.
    pub(crate) fn ended_idle(&self, failure: &Failure) -> bool {
        failure.ends_the_session() && !self.is_proven
    }

    /// Starts a request of one or more statements, with this lease from its beginning. The first wait for its reply sends it. If an
    /// earlier request still runs, the connection closes.
    pub(crate) fn send(&mut self, lease: u32, mut queries: Vec<Query>) {
        if self.lease != Some(lease) {
            let text = |number: u32| Parameter::Text(Some(number.to_string().into()));
            let set = vec![
                text(lease),
                text(server::user_timeout(lease)),
                text(server::lock_timeout(lease)),
            ];
            queries.insert(0, Query::prepared(sql::SET_LEASE, set));
            self.lease = None;
            self.setting = Some(lease);
        }
        self.connection.start(|mut wire| async move {
            let reply = wire.run(queries).await;
            (wire, reply)
        });
    }

    /// Waits for the reply, and keeps it here. All replies are read here.
    ///
    /// # Cancel safety
    /// May be dropped at any await, and called again.
    pub(crate) async fn receive(&mut self) {
        self.connection.receive().await;
        let (Some(reply), Some(lease)) = (self.connection.received(), self.setting) else {
            return;
        };
        self.setting = None;
        // After an error, it is not known which statements the server has run.
        if let Ok(reply) = reply {
            reply.remove(0);
            self.lease = Some(lease);
        }
    }

    /// Waits for the reply until `limit` after the request. Returns false if there is none by then.
    pub(crate) async fn receive_within(&mut self, limit: Duration) -> bool {
        match self.connection.running_since() {
            Some(since) => timeout_at(since + limit, self.receive()).await.is_ok(),
            None => true,
        }
    }

    /// True if no reply is due. Sends the request if that has not happened yet, and waits for nothing.
    pub(crate) fn has_reply(&mut self) -> bool {
        self.receive().now_or_never().is_some()
    }

    /// Takes the reply that was received, without that of what the session itself had added to the request.
    ///
    /// # Errors
    /// The server's error, or that of a connection that has ended.
    pub(crate) fn take_reply(&mut self) -> std::result::Result<Reply, Failure> {
        self.connection.take_reply()
    }

    /// Runs a request: waits for an earlier reply, which it forgets, sends this one, and returns its reply.
    ///
    /// # Errors
    /// As [`take_reply`](Self::take_reply).
    pub(crate) async fn run(
        &mut self,
        lease: u32,
        queries: Vec<Query>,
    ) -> std::result::Result<Reply, Failure> {
        self.receive().await;
        self.send(lease, queries);
        self.receive().await;
        self.take_reply()
    }

    /// Returns the failure that was received and not yet taken.
    pub(crate) fn failure(&mut self) -> Option<&Failure> {
        self.connection.received()?.as_ref().err()
    }

    /// Closes the connection in order, so that the server logs no broken one.
    pub(crate) async fn quit(self) {
        if let Some(wire) = self.connection.into_idle() {
            wire.quit().await;
        }
    }
}
