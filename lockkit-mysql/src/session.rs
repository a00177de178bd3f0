//! Sessions: a connection each, that hold a lock, wait for one, or are kept for the next.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    task::Poll,
    time::Duration,
};

use futures_util::future::{join, join_all};
use lockkit_core::{Error, Result};
use sqlx::mysql::MySqlConnectOptions;
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    Mode, NAME,
    alarm::Alarm,
    control::{Control, GivenUp, IDENTITY, Options, Term},
    fault,
    server::Flavour,
    sql,
    wire::{Reply, Wire, column},
};

/// How many sessions are kept for the next acquisition: what a burst of tasks has needed the next one needs, too, and to
/// begin one takes longer than to lock. The server ends those that nobody uses for a ttl, or for a minute if they serve leases.
const MOST_IDLE: usize = 64;

/// How often sessions that nobody uses are looked after.
const TENDED_EVERY: Duration = Duration::from_secs(5);

/// What the server would end within this is not used.
const ENDS_SOON: Duration = Duration::from_millis(200);

/// How long a reply may take before its connection is taken for dead, and is left for another.
pub(crate) const REPLY_TAKES: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Session {
    wire: Wire,
    pub(crate) id: u64,
    /// That of the control connection when this one was begun.
    pub(crate) term: Term,
    /// The number of the life that the server is in; 0 for leases, which do without.
    pub(crate) life: u64,
    /// The lock of the server's own that it has, and that no other ever had.
    mark: String,
    /// The seconds of silence that the server bears. `None` from before it is told until it has said that it was: whoever told
    /// it may be dropped in between.
    seconds: Option<u32>,
    /// The change of it that the request under way makes.
    setting: Option<Setting>,
    /// Whether the server prepares statements for it.
    pub(crate) prepares: bool,
    /// Whether the server has answered since this was taken from those that are kept.
    pub(crate) is_proven: bool,
    used: Instant,
    _slot: OwnedSemaphorePermit,
    /// That of a lease, which is over when this is kept or dropped.
    turn: Option<OwnedSemaphorePermit>,
    /// Among those that wait for a lease, for as long as the turn.
    place: Option<OwnedSemaphorePermit>,
}

/// A way in which a request sets for how long the server bears the session's silence.
#[derive(Clone, Copy, Debug)]
enum Setting {
    /// By its first statement.
    First(u32),
    /// By an expression, whose value its last statement says; also by its first one, or not.
    Last { also_first: bool },
}

#[derive(Debug)]
pub(crate) struct Sessions {
    pub(crate) control: Control,
    /// The same for looks that take their time, behind which no reservation is to wait.
    pub(crate) looks: Control,
    pub(crate) alarm: Arc<Alarm>,
    mode: Mode,
    options: Options,
    idle: Mutex<Vec<Session>>,
    slots: Arc<Semaphore>,
    /// Leases need a session for as long as a request takes: so many have one.
    turns: Arc<Semaphore>,
    /// So many of these may be waiting ones, which leaves some for holders.
    places: Arc<Semaphore>,
    most: u32,
    /// The longest silence that a server was seen to bear, in seconds, and in which term of the control connection: it may keep less
    /// of a longer one than it is told.
    borne: Mutex<(u64, u32)>,
}

impl Sessions {
    /// Within the Tokio runtime that the client is to live on.
    pub(crate) fn new(connect: MySqlConnectOptions, mode: Mode, most: u32) -> Self {
        let runtime = Handle::current();
        let options = Options { connect, runtime };
        Self {
            control: Control::new(options.clone(), mode),
            looks: Control::new(options.clone(), mode),
            alarm: Arc::new(Alarm::new()),
            mode,
            options,
            idle: Mutex::default(),
            slots: Arc::new(Semaphore::new(most as usize)),
            turns: Arc::new(Semaphore::new(most as usize)),
            places: Arc::new(Semaphore::new((most - for_holders(most)) as usize)),
            most,
            borne: Mutex::default(),
        }
    }

    /// A kept session, preferably one whose silence the server bears for `seconds`, or a new one, which is begun so.
    ///
    /// # Errors
    /// If the server cannot be reached or the limit is, or a new session turns out not to keep its promise.
    pub(crate) async fn get(&self, operation: &'static str, seconds: u32) -> Result<Session> {
        match self.kept(seconds) {
            Some(session) => Ok(session),
            None => self.begin(operation, seconds).await,
        }
    }

    /// The same for a lease, which is about to be done with it and waits until another is.
    ///
    /// # Errors
    /// If the server cannot be reached, or a new session turns out not to keep its promise.
    pub(crate) async fn borrow(&self, operation: &'static str, seconds: u32) -> Result<Session> {
        // Nobody closes the semaphore.
        let turn = self.turns.clone().acquire_owned().await.ok();
        let mut session = self.get(operation, seconds).await?;
        session.turn = turn;
        Ok(session)
    }

    /// Has a lease wait in its session.
    ///
    /// # Errors
    /// If too many do.
    pub(crate) fn wait_in(&self, session: &mut Session) -> Result<()> {
        if session.place.is_none() {
            let Ok(place) = self.places.clone().try_acquire_owned() else {
                let (most, holders) = (self.most, for_holders(self.most));
                return Err(Error::permanent(
                    NAME,
                    "acquire",
                    format!(
                        "all but {holders} of the {most} connections that this client may have wait for locks, one per name, \
                         and the rest are for holders; raise max_connections (and the server's)"
                    ),
                ));
            };
            session.place = Some(place);
        }
        Ok(())
    }

    /// Keeps a session that is idle and has no transaction open.
    pub(crate) async fn keep(&self, mut session: Session) {
        session.used = Instant::now();
        session.is_proven = false;
        let surplus = {
            let mut idle = self.idle();
            if session.seconds.is_some() && idle.len() < MOST_IDLE {
                let over = (session.place.take(), session.turn.take());
                idle.push(session);
                drop(idle);
                // Now that somebody else can have it.
                drop(over);
                return;
            }
            session
        };
        surplus.quit().await;
    }

    /// Those that are kept are no good any more.
    pub(crate) fn forget(&self) {
        // Under the lock: whoever finds none here is not to find them counted.
        self.idle().clear();
    }

    /// Looks after what nobody uses. A connection that the server has ended would keep its socket until somebody wants to
    /// use it, which may be never.
    pub(crate) async fn tend(&self) {
        loop {
            sleep(TENDED_EVERY).await;
            // What is not answered meanwhile has not ended.
            let _ = timeout(TENDED_EVERY, self.tend_once()).await;
        }
    }

    async fn tend_once(&self) {
        join(join_all(self.unused().into_iter().map(Wire::quit)), self.look()).await;
    }

    async fn look(&self) {
        let kept: Vec<_> = self.idle().iter().map(|session| session.id).collect();
        if let Some(living) = self.control.living(&kept).await {
            let has_ended = |id| kept.contains(&id) && !living.contains(&id);
            self.idle().retain(|session| !has_ended(session.id));
        }
        self.looks.living(&[]).await;
    }

    /// Takes those that have not been used since the last round, and that the server would end before the next. They count
    /// no more from then on.
    fn unused(&self) -> Vec<Wire> {
        let is_unused = |session: &mut Session| {
            session.used.elapsed() >= TENDED_EVERY && session.ends_within(TENDED_EVERY)
        };
        let mut idle = self.idle();
        idle.extract_if(.., is_unused).map(Session::into_wire).collect()
    }

    /// Something is held by a session of this term, whose connection may break.
    pub(crate) fn watch(&self, term: &Term) {
        self.alarm.watch(&self.options, term);
    }

    pub(crate) async fn close(&self) {
        if let Some((id, term)) = self.alarm.close() {
            // The server does not notice by itself before its sleep is over.
            let _ = self.control.kill("close", id, &term).await;
        }
        let kept = std::mem::take(&mut *self.idle());
        for session in kept {
            session.quit().await;
        }
        self.looks.close().await;
        self.control.close().await;
    }

    fn kept(&self, seconds: u32) -> Option<Session> {
        let mut idle = self.idle();
        // Those that the server is about to end, or has ended, are not worth a try; those of an earlier term could
        // not be ended by their id.
        idle.retain(|session| !session.ends_within(ENDS_SOON) && self.control.is_latest(&session.term));
        let fits = idle.iter().rposition(|session| session.bears(seconds));
        let last = idle.len().checked_sub(1)?;
        if seconds > self.borne().1 {
            // A new one says whether it is borne, and needs a place.
            idle.pop();
            return None;
        }
        Some(idle.swap_remove(fits.unwrap_or(last)))
    }

    async fn begin(&self, operation: &'static str, seconds: u32) -> Result<Session> {
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            return Err(Error::permanent(
                NAME,
                operation,
                format!(
                    "all {} connections that this client may have are in use, one per held lock and name waited for; \
                     raise max_connections (and the server's), or use mode=lease",
                    self.most
                ),
            ));
        };
        // First, so that the session cannot be older than the term that vouches for its id.
        let (term, server) = self.control.term(operation).await?;
        let during = |error| fault::error(operation, error);
        let mut wire = Wire::open(&self.options).await.map_err(during)?;
        let limits = match server.flavour {
            Flavour::MariaDb => {
                "max_statement_time=0, idle_transaction_timeout=0, idle_write_transaction_timeout=0, \
                 idle_readonly_transaction_timeout=0"
            }
            Flavour::MySql => "max_execution_time=0",
        };
        // A row lock is a transaction; a lease is changed by one statement.
        let autocommit = u8::from(self.control.mode() == Mode::Lease);
        let setup = format!(
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; \
             SET SESSION autocommit={autocommit}, completion_type=0, wait_timeout={seconds}, innodb_lock_wait_timeout=30, \
             lock_wait_timeout=2, {limits}, @lockkit_mark=CONCAT('lockkit-session:', UUID()); \
             SELECT CONNECTION_ID(), CAST(@@wait_timeout AS UNSIGNED), {IDENTITY}, @lockkit_mark, \
             GET_LOCK(@lockkit_mark, 0)"
        );
        let reply = wire.ask(setup).await.map_err(during)?;
        let row = reply.row(2).ok_or(sqlx::Error::RowNotFound).map_err(during)?;
        let (id, kept, identity, mark): (u64, u64, String, String) = (
            column(row, 0).map_err(during)?,
            column(row, 1).map_err(during)?,
            column(row, 2).map_err(during)?,
            column(row, 3).map_err(during)?,
        );
        if kept != u64::from(seconds) {
            return Err(Error::unsupported(
                NAME,
                format!(
                    "a server or proxy that does not keep a session's wait_timeout: it was set to {seconds} s and is \
                     {kept} s, so that a silent holder would keep its lock for ever; connect to the server directly"
                ),
            ));
        }
        if identity != term.server {
            // After a fail-over only one of them is right, and the next look says which.
            self.control.close().await;
            return Err(Error::transient(
                NAME,
                operation,
                format!(
                    "connections of one client reach different servers, {identity} and {}, which do not share locks; \
                     connect to one server and not to a balancer",
                    term.server
                ),
            ));
        }
        let life = match self.mode {
            Mode::ForUpdate => self.life(operation, &mut wire).await?,
            Mode::Lease => 0,
        };
        {
            let mut borne = self.borne();
            let longest = if borne.0 == term.number { borne.1 } else { 0 };
            *borne = (term.number, longest.max(seconds));
        }
        Ok(Session {
            wire,
            id,
            term,
            life,
            mark,
            seconds: Some(seconds),
            setting: None,
            prepares: true,
            is_proven: true,
            used: Instant::now(),
            _slot: slot,
            turn: None,
            place: None,
        })
    }

    /// The number of the life that the server is in, as a session of its own sees it. If there is none, it gets one.
    async fn life(&self, operation: &'static str, wire: &mut Wire) -> Result<u64> {
        let during = |error| fault::error(operation, error);
        let reply = wire.ask(format!("{}; ROLLBACK", sql::life())).await;
        if let Some(row) = reply.map_err(during)?.row(0) {
            return column(row, 0).map_err(during);
        }
        let life = self.control.begin_life(operation).await?;
        let reply = wire.ask(format!("{}; ROLLBACK", sql::lives(life))).await;
        if reply.map_err(during)?.row(0).is_none() {
            let what = "connections of one client reach a server before and after it came back";
            return Err(Error::transient(NAME, operation, what));
        }
        Ok(life)
    }

    fn borne(&self) -> std::sync::MutexGuard<'_, (u64, u32)> {
        self.borne.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Session>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// True if the server is known to bear its silence for `seconds`.
    pub(crate) fn bears(&self, seconds: u32) -> bool {
        self.seconds == Some(seconds)
    }

    /// True if the server ends it within `time` unless it is used.
    fn ends_within(&self, time: Duration) -> bool {
        let bears = Duration::from_secs(self.seconds.unwrap_or(0).into());
        self.used.elapsed() + time >= bears
    }

    /// Sends `request`, one or more statements, as soon as it is waited for. From its beginning on the server bears the
    /// session's silence for `seconds`. What is still running is waited for first.
    pub(crate) async fn send(&mut self, seconds: u32, request: String) {
        self.settle().await;
        // No await from here on: what is sent and what is known of it go together.
        if self.bears(seconds) {
            self.wire.start(request);
        } else {
            self.seconds = None;
            self.setting = Some(Setting::First(seconds));
            self.wire
                .start(format!("SET SESSION wait_timeout={seconds}; {request}"));
        }
    }

    /// The same, and from the end of `request` on for as many seconds as the expression `after` comes to.
    pub(crate) async fn send_and_set(&mut self, seconds: u32, request: String, after: &str) {
        self.settle().await;
        let also_first = !self.bears(seconds);
        let first = if also_first {
            format!("SET SESSION wait_timeout={seconds}; ")
        } else {
            String::new()
        };
        self.seconds = None;
        self.setting = Some(Setting::Last { also_first });
        self.wire.start(format!(
            "{first}{request}; SET SESSION wait_timeout={after}; SELECT CAST(@@wait_timeout AS UNSIGNED)"
        ));
    }

    /// Sends a statement with one parameter, which the server prepares when it comes for the first time.
    pub(crate) async fn execute(&mut self, sql: &'static str, parameter: &[u8]) {
        self.settle().await;
        self.wire.execute(sql, parameter);
    }

    /// True if the reply to the latest request is still owed.
    pub(crate) fn is_running(&self) -> bool {
        self.wire.running_since().is_some()
    }

    /// Waits for the answer and leaves it here. Whoever reads a reply does it here.
    pub(crate) async fn settle(&mut self) {
        self.wire.settle().await;
        let (Some(answer), Some(setting)) = (self.wire.answered(), self.setting) else {
            return;
        };
        self.setting = None;
        // After an error nobody knows how far the server got.
        let Ok(reply) = answer else { return };
        self.seconds = match setting {
            Setting::First(seconds) => {
                reply.drop_first();
                Some(seconds)
            }
            Setting::Last { also_first } => {
                if also_first {
                    reply.drop_first();
                }
                let last = reply.pop_last();
                // That of the setting itself.
                reply.pop_last();
                last.and_then(|row| column(&row, 0).ok())
            }
        };
    }

    /// The same until `limit` after it was sent. `false` if it is still owed then.
    pub(crate) async fn settle_within(&mut self, limit: Duration) -> bool {
        match self.wire.running_since() {
            Some(since) => timeout_at(since + limit, self.settle()).await.is_ok(),
            None => true,
        }
    }

    /// True if the answer is here already. Waits for nothing.
    pub(crate) async fn is_settled(&mut self) -> bool {
        let mut settle = pin!(self.settle());
        poll_fn(|cx| Poll::Ready(settle.as_mut().poll(cx).is_ready())).await
    }

    /// Waits for the answer to what was sent last: without what the session itself had to say and hear.
    ///
    /// # Errors
    /// As those of the connection.
    pub(crate) async fn answer(&mut self) -> sqlx::Result<Reply> {
        self.settle().await;
        self.wire.answer().await
    }

    /// Sends and waits for the answer.
    ///
    /// # Errors
    /// As those of the connection.
    pub(crate) async fn ask(&mut self, seconds: u32, request: String) -> sqlx::Result<Reply> {
        self.send(seconds, request).await;
        self.answer().await
    }

    /// The answer that is here and that nobody has taken, if it is an error.
    pub(crate) fn failure(&mut self) -> Option<&sqlx::Error> {
        self.wire.answered()?.as_ref().err()
    }

    /// Closes the connection, and says what is to be ended.
    pub(crate) fn give_up(self) -> GivenUp {
        GivenUp {
            id: self.id,
            term: self.term,
            mark: self.mark,
        }
    }

    /// Says goodbye, so that the server logs no aborted connection. Another may be begun in its place meanwhile.
    pub(crate) async fn quit(self) {
        self.into_wire().quit().await;
    }

    /// Gives up its place.
    fn into_wire(self) -> Wire {
        let Self {
            wire,
            turn,
            place,
            _slot: slot,
            ..
        } = self;
        // In this order: whoever has the turn may begin another session.
        drop((slot, turn, place));
        wire
    }
}

/// How many of `most` sessions no waiting lease may have, so that others are released and renewed meanwhile.
fn for_holders(most: u32) -> u32 {
    most.div_ceil(10).min(most - 1)
}

#[cfg(test)]
mod tests {
    use lockkit_testbed::{
        Mode, Proxy,
        mysql::{Flavour as Kept, MySql},
        skipped,
    };

    use super::*;

    /// The only connection that there may be is about to be closed, and the server takes its time to say what it still has.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_nobody_uses_takes_nobodys_place() {
        for (kept, backend) in [(Kept::MariaDb, "mysql"), (Kept::MySql, "mysql-server")] {
            if skipped(backend, MySql::missing(kept)) {
                continue;
            }
            let server = MySql::start(kept, &[]).unwrap();
            let proxy = Proxy::start(server.addr()).unwrap();
            let sessions = Sessions::new(
                MySql::url_at(proxy.addr()).parse().unwrap(),
                crate::Mode::ForUpdate,
                1,
            );
            let tables = sessions
                .control
                .prepare(crate::Mode::ForUpdate, crate::Schema::Auto);
            tables.await.unwrap();
            let session = sessions.get("acquire", 10).await.unwrap();
            sessions.keep(session).await;
            for session in &mut *sessions.idle() {
                session.used = session.used.checked_sub(TENDED_EVERY).unwrap();
            }
            // Also in the instant before it is closed.
            let unused = sessions.unused();
            assert_eq!(unused.len(), 1);
            let session = sessions.get("acquire", 10).await.unwrap();
            drop(unused);
            sessions.keep(session).await;
            for session in &mut *sessions.idle() {
                session.used = session.used.checked_sub(TENDED_EVERY).unwrap();
            }
            proxy.set(Mode::Blackhole);
            tokio::select! {
                biased;
                () = sessions.tend_once() => panic!("nothing was asked"),
                got = timeout(Duration::from_millis(200), sessions.get("acquire", 10)) => {
                    assert!(got.is_err(), "{got:?}");
                }
            }
            proxy.set(Mode::Pass);
            sessions.get("acquire", 10).await.unwrap();
        }
    }
}
