//! Sessions: connections that hold a lock, wait for one, or are idle until the next acquisition.

use std::{sync::Arc, time::Duration};

use futures_util::{
    FutureExt,
    future::{join, join_all},
};
use lockkit_core::{Error, Result, spi::Mutex};
use sqlx::mysql::MySqlConnectOptions;
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    Mode, NAME,
    connection::{Reply, ResumableConnection, column},
    control::{AbandonedSession, COMMON_SETTINGS, Control, Epoch, Options, SERVER_IDENTITY},
    disconnect_watch::DisconnectWatch,
    error::{self, During},
    relay::Route,
    row_sql,
    server::Flavour,
};

/// The most idle sessions. A burst of tasks needs as many as the burst before, and to open one takes longer than to lock. The
/// server ends those that nobody uses for a ttl, or for a minute if they serve leases.
const MAX_IDLE: usize = 64;

/// The time between two checks of the idle sessions.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(5);

/// A session that the server would end within this time is not used.
const EXPIRY_MARGIN: Duration = Duration::from_millis(200);

/// The time for which a reply that the server has sent may be with the [relay](crate::relay).
const RELAYED_WITHIN: Duration = Duration::from_millis(100);

/// The beginning of the name of each session's own server lock.
const MARKER: &str = "lockkit-session:";

/// A connection may be dead if a reply takes longer. It is abandoned for another.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Session {
    connection: ResumableConnection,
    pub(crate) id: u64,
    /// The epoch of the id.
    pub(crate) epoch: Epoch,
    /// The number of the server's life. 0 for leases, which need none, and until it [is needed](Sessions::get_in_life).
    pub(crate) life: u64,
    /// The server lock that this session alone ever had.
    marker: String,
    /// The session's `wait_timeout` in seconds. `None` from the request that changes it until the server has confirmed the
    /// change, since the future that waits for the reply may be dropped in between.
    wait_timeout: Option<u32>,
    /// The change of `wait_timeout` that the request under way makes.
    setting: Option<Setting>,
    /// The longest `wait_timeout` that the server is known to keep. It may shorten a longer one, and say nothing.
    kept: u32,
    /// False once the server has refused to prepare a statement.
    pub(crate) prepares: bool,
    /// True if the server has replied since the session was taken from the idle ones.
    pub(crate) is_proven: bool,
    last_used: Instant,
    _slot: OwnedSemaphorePermit,
    /// The slot of a lease's request. Dropped when the session becomes idle.
    request_slot: Option<OwnedSemaphorePermit>,
    /// The slot of a lease's waiter. Dropped together with `request_slot`.
    waiter_slot: Option<OwnedSemaphorePermit>,
}

/// The way in which a request sets `wait_timeout`.
#[derive(Clone, Copy, Debug)]
enum Setting {
    /// Its first statement sets this value.
    First(u32),
    /// Its first statement sets a value, and the second returns what the server has made of it.
    FirstAndRead,
    /// Its last statements set the value of an expression, and return it. The first statement sets another value if
    /// `also_first`.
    Last { also_first: bool },
}

#[derive(Debug)]
pub(crate) struct Sessions {
    pub(crate) control: Control,
    /// A control connection for inspections, which take their time. No reservation of tokens waits behind them.
    pub(crate) inspections: Control,
    pub(crate) disconnect_watch: Arc<DisconnectWatch>,
    mode: Mode,
    options: Options,
    idle: Mutex<Vec<Session>>,
    slots: Arc<Semaphore>,
    /// Bounds the leases that have a session at once. A lease has one for the time of a request.
    request_slots: Arc<Semaphore>,
    /// Bounds those of them that wait for a lock. The rest is for holders.
    waiter_slots: Arc<Semaphore>,
    max_connections: u32,
    /// The epoch, and the longest `wait_timeout` that the server has confirmed in it. The server may shorten a longer one.
    longest_timeout: Mutex<(u64, u32)>,
}

impl Sessions {
    /// Creates the sessions of a client that lives on the current Tokio runtime.
    pub(crate) fn new(connect: MySqlConnectOptions, route: Route, mode: Mode, max_connections: u32) -> Self {
        let options = Options {
            connect,
            route,
            runtime: Handle::current(),
        };
        let slots = |count: u32| Arc::new(Semaphore::new(count as usize));
        Self {
            control: Control::new(options.clone(), mode),
            inspections: Control::new(options.clone(), mode),
            disconnect_watch: Arc::new(DisconnectWatch::new()),
            mode,
            options,
            idle: Mutex::default(),
            slots: slots(max_connections),
            request_slots: slots(max_connections),
            waiter_slots: slots(max_connections - kept_for_holders(max_connections)),
            max_connections,
            longest_timeout: Mutex::default(),
        }
    }

    /// Returns an idle session, preferably one with this `wait_timeout`, or opens one with it.
    ///
    /// # Errors
    /// If the server cannot be reached, the limit of connections is reached, or the server does not keep the `wait_timeout`.
    pub(crate) async fn get(&self, operation: &'static str, wait_timeout: u32) -> Result<Session> {
        match self.take_idle(wait_timeout) {
            Some(session) => Ok(session),
            None => self.open(operation, wait_timeout).await,
        }
    }

    /// Returns a session that knows the number of the server's life, else as [`get`](Self::get) does.
    ///
    /// # Errors
    /// As `get`. If the life has no number and can be given none.
    pub(crate) async fn get_in_life(&self, operation: &'static str, wait_timeout: u32) -> Result<Session> {
        loop {
            let mut session = self.get(operation, wait_timeout).await?;
            if session.life != 0 {
                return Ok(session);
            }
            let was_idle = !session.is_proven;
            let asked = session.query(wait_timeout, format!("{}; ROLLBACK", row_sql::life()));
            let reply = if was_idle {
                timeout(REPLY_TIMEOUT, asked).await.ok()
            } else {
                Some(asked.await)
            };
            let reply = match reply {
                Some(Err(error)) if session.ended_idle(&error) => None,
                reply => reply,
            };
            let Some(reply) = reply else {
                // It had ended while it was idle, or is dead. Other idle ones may be so, too.
                self.discard_idle();
                continue;
            };
            session.life = match reply.during(operation)?.row(0) {
                Some(row) => column(row, 0).during(operation)?,
                None => self.begin_life(operation, wait_timeout, &mut session).await?,
            };
            session.is_proven = true;
            return Ok(session);
        }
    }

    /// Returns a session for a lease's request, and waits for one while the limit of connections is reached.
    ///
    /// # Errors
    /// If the server cannot be reached, or does not keep the `wait_timeout`.
    pub(crate) async fn borrow(&self, operation: &'static str, wait_timeout: u32) -> Result<Session> {
        // Nobody closes the semaphore.
        let slot = self.request_slots.clone().acquire_owned().await.ok();
        let mut session = self.get(operation, wait_timeout).await?;
        session.request_slot = slot;
        Ok(session)
    }

    /// Lets a lease wait for its lock in this session.
    ///
    /// # Errors
    /// If too many wait.
    pub(crate) fn admit_waiter(&self, session: &mut Session) -> Result<()> {
        if session.waiter_slot.is_none() {
            let Ok(slot) = self.waiter_slots.clone().try_acquire_owned() else {
                let (max, holders) = (self.max_connections, kept_for_holders(self.max_connections));
                return Err(Error::permanent(
                    NAME,
                    "acquire",
                    format!(
                        "all but {holders} of the {max} connections that this client may have wait for locks, one per name, \
                         and the rest are for holders; raise max_connections (and the server's)"
                    ),
                ));
            };
            session.waiter_slot = Some(slot);
        }
        Ok(())
    }

    /// Puts a session among the idle ones. It has no request under way and no transaction open.
    pub(crate) async fn put(&self, mut session: Session) {
        session.last_used = Instant::now();
        session.is_proven = false;
        let surplus = {
            let mut idle = self.idle.lock();
            if session.wait_timeout.is_some() && idle.len() < MAX_IDLE {
                let slots = (session.waiter_slot.take(), session.request_slot.take());
                idle.push(session);
                drop(idle);
                // Only now, so that the next one to get a slot finds the session.
                drop(slots);
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
            // Without a reply by then, nothing is known to have ended.
            let _ = timeout(MAINTENANCE_INTERVAL, self.maintain_once()).await;
        }
    }

    async fn maintain_once(&self) {
        let expiring = self.take_expiring().into_iter();
        join(
            join_all(expiring.map(ResumableConnection::quit)),
            self.drop_ended(),
        )
        .await;
    }

    async fn drop_ended(&self) {
        let ids: Vec<_> = self.idle.lock().iter().map(|session| session.id).collect();
        if let Some(alive) = self.control.alive_among(&ids).await {
            let has_ended = |id| ids.contains(&id) && !alive.contains(&id);
            self.idle.lock().retain(|session| !has_ended(session.id));
        }
        self.inspections.alive_among(&[]).await;
    }

    /// Takes the sessions that were not used since the last check, and that the server would end before the next. Their slots
    /// are free from then on.
    fn take_expiring(&self) -> Vec<ResumableConnection> {
        let is_expiring = |session: &mut Session| {
            session.last_used.elapsed() >= MAINTENANCE_INTERVAL && session.ends_within(MAINTENANCE_INTERVAL)
        };
        let mut idle = self.idle.lock();
        idle.extract_if(.., is_expiring)
            .map(Session::into_connection)
            .collect()
    }

    /// Starts the watch for breaks: a session of this epoch holds a lock.
    pub(crate) fn watch(&self, epoch: &Epoch) {
        self.disconnect_watch.start(&self.options, epoch);
    }

    pub(crate) async fn close(&self) {
        if let Some((id, epoch)) = self.disconnect_watch.close() {
            // The server would not notice before its sleep is over.
            let _ = self.control.kill("close", id, &epoch).await;
        }
        let idle = std::mem::take(&mut *self.idle.lock());
        for session in idle {
            session.quit().await;
        }
        self.inspections.close().await;
        self.control.close().await;
    }

    fn take_idle(&self, wait_timeout: u32) -> Option<Session> {
        let mut idle = self.idle.lock();
        // Drops those that the server is about to end, and those of an earlier epoch, which could not be killed by their id.
        idle.retain(|session| !session.ends_within(EXPIRY_MARGIN) && self.control.is_current(&session.epoch));
        let fitting = idle
            .iter()
            .rposition(|session| session.wait_timeout == Some(wait_timeout));
        let last = idle.len().checked_sub(1)?;
        if wait_timeout > self.longest_timeout.lock().1 {
            // A new session finds out whether the server keeps it, and needs a slot.
            idle.pop();
            return None;
        }
        let mut session = idle.swap_remove(fitting.unwrap_or(last));
        session.kept = session.kept.max(self.longest_timeout.lock().1);
        Some(session)
    }

    async fn open(&self, operation: &'static str, wait_timeout: u32) -> Result<Session> {
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            return Err(Error::permanent(
                NAME,
                operation,
                format!(
                    "all {} connections that this client may have are in use, one per held lock and name waited for; \
                     raise max_connections (and the server's), or use mode=lease",
                    self.max_connections
                ),
            ));
        };
        // First, so that the session is not older than the epoch of its id.
        let (epoch, server) = self.control.connect(operation).await?;
        let mut connection = ResumableConnection::open(operation, &self.options).await?;
        let limits = match server.flavour {
            Flavour::MariaDb => {
                "max_statement_time=0, idle_transaction_timeout=0, idle_write_transaction_timeout=0, \
                 idle_readonly_transaction_timeout=0"
            }
            Flavour::MySql => "max_execution_time=0",
        };
        // A row lock is a transaction; a lease changes by one statement.
        let autocommit = u8::from(self.mode == Mode::Lease);
        let setup = format!(
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; \
             SET SESSION {COMMON_SETTINGS}, autocommit={autocommit}, wait_timeout={wait_timeout}, innodb_lock_wait_timeout=30, \
             {limits}, @lockkit_marker=CONCAT('{MARKER}', UUID()); \
             SELECT CONNECTION_ID(), CAST(@@wait_timeout AS UNSIGNED), {SERVER_IDENTITY}, @lockkit_marker, \
             GET_LOCK(@lockkit_marker, 0)"
        );
        let reply = connection.query(setup).await.during(operation)?;
        let row = reply.row(2).ok_or(sqlx::Error::RowNotFound).during(operation)?;
        let id = column(row, 0).during(operation)?;
        let confirmed: u64 = column(row, 1).during(operation)?;
        let identity: String = column(row, 2).during(operation)?;
        let marker: String = column(row, 3).during(operation)?;
        if !is_marker(&marker) {
            let what = "the session's marker, which UUID() makes, came back as something else; connect to the server directly, and with \
                        tls=verify";
            return Err(Error::permanent(NAME, operation, what));
        }
        if confirmed != u64::from(wait_timeout) {
            return Err(Error::unsupported(
                NAME,
                format!(
                    "a server or proxy that does not keep a session's wait_timeout: it was set to {wait_timeout} s and is \
                     {confirmed} s, so that a silent holder would keep its lock for ever; connect to the server directly"
                ),
            ));
        }
        if identity != epoch.server {
            // After a fail-over only one of them is right. The next epoch decides.
            self.control.close().await;
            return Err(Error::transient(
                NAME,
                operation,
                format!(
                    "connections of one client reach different servers, {identity} and {}, which do not share locks; \
                     connect to one server and not to a balancer",
                    epoch.server
                ),
            ));
        }
        {
            let mut longest = self.longest_timeout.lock();
            let before = if longest.0 == epoch.number { longest.1 } else { 0 };
            *longest = (epoch.number, before.max(wait_timeout));
        }
        Ok(Session {
            connection,
            id,
            epoch,
            life: 0,
            marker,
            wait_timeout: Some(wait_timeout),
            setting: None,
            kept: wait_timeout,
            prepares: true,
            is_proven: true,
            last_used: Instant::now(),
            _slot: slot,
            request_slot: None,
            waiter_slot: None,
        })
    }

    /// Gives the server's life a number, and checks that it is the life of this session.
    async fn begin_life(
        &self,
        operation: &'static str,
        wait_timeout: u32,
        session: &mut Session,
    ) -> Result<u64> {
        let life = self.control.begin_life(operation).await?;
        let is_in_life = format!("{}; ROLLBACK", row_sql::is_in_life(life));
        let reply = session.query(wait_timeout, is_in_life).await;
        if reply.during(operation)?.row(0).is_none() {
            let what = "connections of one client reach a server before and after it came back";
            return Err(Error::transient(NAME, operation, what));
        }
        Ok(life)
    }
}

impl Session {
    /// True if `wait_timeout` is known to be the session's.
    pub(crate) fn has_timeout(&self, wait_timeout: u32) -> bool {
        self.wait_timeout == Some(wait_timeout)
    }

    /// True if the server ends the session within `time` unless it is used.
    fn ends_within(&self, time: Duration) -> bool {
        let limit = Duration::from_secs(self.wait_timeout.unwrap_or(0).into());
        self.last_used.elapsed() + time >= limit
    }

    /// True if `error` says that the session had ended while it was idle. Other idle ones may have ended with it.
    pub(crate) fn ended_idle(&self, error: &sqlx::Error) -> bool {
        error::ends_the_session(error) && !self.is_proven
    }

    /// The session's `wait_timeout`, if that is known to be shorter than this one, which it was set to.
    pub(crate) fn shorter_timeout(&self, wait_timeout: u32) -> Option<u32> {
        // What could not be read is relied on for nothing.
        let actual = self.wait_timeout.unwrap_or(0);
        (actual < wait_timeout).then_some(actual)
    }

    /// Starts a request of one or more statements, with this `wait_timeout` from its beginning, or the longest that the server keeps.
    /// The first wait for its reply sends it. If an earlier request still runs, the connection closes.
    pub(crate) fn send(&mut self, wait_timeout: u32, request: String) {
        if self.has_timeout(wait_timeout) {
            self.connection.send(request);
            return;
        }
        self.wait_timeout = None;
        let (setting, read) = if wait_timeout > self.kept {
            (Setting::FirstAndRead, "SELECT CAST(@@wait_timeout AS UNSIGNED); ")
        } else {
            (Setting::First(wait_timeout), "")
        };
        self.setting = Some(setting);
        self.connection.send(format!(
            "SET SESSION wait_timeout={wait_timeout}; {read}{request}"
        ));
    }

    /// Starts a request as [`send`](Self::send) does. After it, `wait_timeout` is the value of the expression `after`.
    pub(crate) fn send_and_set(&mut self, wait_timeout: u32, request: &str, after: &str) {
        let also_first = !self.has_timeout(wait_timeout);
        let first = if also_first {
            format!("SET SESSION wait_timeout={wait_timeout}; ")
        } else {
            String::new()
        };
        self.wait_timeout = None;
        self.setting = Some(Setting::Last { also_first });
        self.connection.send(format!(
            "{first}{request}; SET SESSION wait_timeout={after}; SELECT CAST(@@wait_timeout AS UNSIGNED)"
        ));
    }

    /// Starts a statement with one parameter. The server prepares it once per session.
    pub(crate) fn execute(&mut self, sql: &'static str, parameter: &[u8]) {
        self.connection.execute(sql, parameter);
    }

    /// True if a request is under way.
    pub(crate) fn is_running(&self) -> bool {
        self.connection.running_since().is_some()
    }

    /// Waits for the reply, and keeps it here. All replies are read here.
    ///
    /// # Cancel safety
    /// May be dropped at any await, and called again.
    pub(crate) async fn receive(&mut self) {
        self.connection.receive().await;
        let (Some(reply), Some(setting)) = (self.connection.received(), self.setting) else {
            return;
        };
        self.setting = None;
        // After an error, it is not known which statements the server has run.
        let Ok(reply) = reply else { return };
        self.wait_timeout = match setting {
            Setting::First(wait_timeout) => {
                reply.drop_first();
                Some(wait_timeout)
            }
            Setting::FirstAndRead => {
                reply.drop_first();
                let read = reply.row(0).and_then(|row| column(row, 0).ok());
                reply.drop_first();
                self.kept = self.kept.max(read.unwrap_or(0));
                read
            }
            Setting::Last { also_first } => {
                if also_first {
                    reply.drop_first();
                }
                let last = reply.pop_last();
                // The result of `SET`.
                reply.pop_last();
                last.and_then(|row| column(&row, 0).ok())
            }
        };
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

    /// Waits for the reply of a server that is no longer at the statement. False if the connection is dead.
    ///
    /// # Cancel safety
    /// As [`receive`](Self::receive).
    pub(crate) async fn was_replied_to(&mut self) -> bool {
        timeout(RELAYED_WITHIN, self.receive()).await.is_ok()
    }

    /// Takes the reply that was received, without the results of what the session itself had added to the request.
    ///
    /// # Errors
    /// The server's error, or an I/O error if the connection has ended.
    pub(crate) fn take_reply(&mut self) -> sqlx::Result<Reply> {
        self.connection.take_reply()
    }

    /// Runs a request: waits for an earlier reply, which it forgets, sends this one, and returns its reply.
    ///
    /// # Errors
    /// As [`take_reply`](Self::take_reply).
    pub(crate) async fn query(&mut self, wait_timeout: u32, request: String) -> sqlx::Result<Reply> {
        self.receive().await;
        self.send(wait_timeout, request);
        self.receive().await;
        self.take_reply()
    }

    /// Returns the error that was received and not yet taken.
    pub(crate) fn failure(&mut self) -> Option<&sqlx::Error> {
        self.connection.received()?.as_ref().err()
    }

    /// Closes the connection, and returns the session to kill.
    pub(crate) fn abandon(self) -> AbandonedSession {
        AbandonedSession {
            id: self.id,
            epoch: self.epoch,
            marker: self.marker,
        }
    }

    /// Closes the connection in order, so that the server logs no aborted one. Its slots are free at once.
    pub(crate) async fn quit(self) {
        self.into_connection().quit().await;
    }

    /// Frees the session's slots.
    fn into_connection(self) -> ResumableConnection {
        let Self {
            connection,
            request_slot,
            waiter_slot,
            _slot: slot,
            ..
        } = self;
        // In this order: the next one to get the request slot may open another session.
        drop((slot, request_slot, waiter_slot));
        connection
    }
}

/// Returns how many of `max` sessions no waiting lease may have, so that others are released and renewed meanwhile.
fn kept_for_holders(max: u32) -> u32 {
    max.div_ceil(10).min(max - 1)
}

/// Returns true for what a server makes of the statement that sets a session up. The marker goes into the statement that kills the session.
fn is_marker(text: &str) -> bool {
    let is_part = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-');
    text.strip_prefix(MARKER)
        .is_some_and(|id| id.len() == 36 && id.bytes().all(is_part))
}

#[cfg(test)]
mod tests {
    use lockkit_testbed::{
        Mode, Proxy,
        mysql::{Flavour as Kept, MySql},
        skipped,
    };

    use super::*;

    #[test]
    fn a_marker_has_nothing_that_ends_a_literal() {
        let id = "0123abcd-89ef-4567-89ab-cdef01234567";
        assert!(is_marker(&format!("{MARKER}{id}")));
        for other in [
            id.to_owned(),
            MARKER.to_owned(),
            format!("{MARKER}{}", &id[1..]),
            format!("{MARKER}{id}0"),
            format!("{MARKER}{}'", &id[1..]),
            format!("{MARKER}{}\\", &id[1..]),
            format!("{MARKER}{}", id.to_ascii_uppercase()),
            format!("{MARKER}{}ä", &id[2..]),
        ] {
            assert!(!is_marker(&other), "{other}");
        }
    }

    /// With `max_connections=1`, the one idle session is about to be closed, and the server is slow to list its sessions.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_idle_session_that_is_closed_frees_its_slot() {
        for (kept, backend) in [(Kept::MariaDb, "mysql"), (Kept::MySql, "mysql-server")] {
            if skipped(backend, MySql::missing(kept)) {
                continue;
            }
            let server = MySql::start(kept, &[]).unwrap();
            let proxy = Proxy::start(server.addr()).unwrap();
            let config = crate::MySqlConfig::new(MySql::url_at(proxy.addr()));
            let target = config.target().unwrap();
            let sessions = Sessions::new(
                crate::MySqlConfig::connect_options(&target),
                config.route(&target).unwrap(),
                crate::Mode::ForUpdate,
                1,
            );
            let session = sessions.get("acquire", 10).await.unwrap();
            sessions.put(session).await;
            for session in &mut *sessions.idle.lock() {
                session.last_used = session.last_used.checked_sub(MAINTENANCE_INTERVAL).unwrap();
            }
            // Its slot is free before it is closed.
            let unused = sessions.take_expiring();
            assert_eq!(unused.len(), 1);
            let session = sessions.get("acquire", 10).await.unwrap();
            drop(unused);
            sessions.put(session).await;
            for session in &mut *sessions.idle.lock() {
                session.last_used = session.last_used.checked_sub(MAINTENANCE_INTERVAL).unwrap();
            }
            proxy.set(Mode::Blackhole);
            tokio::select! {
                biased;
                () = sessions.maintain_once() => panic!("nothing was asked"),
                got = timeout(Duration::from_millis(200), sessions.get("acquire", 10)) => {
                    assert!(got.is_err(), "{got:?}");
                }
            }
            proxy.set(Mode::Pass);
            sessions.get("acquire", 10).await.unwrap();
        }
    }
}
