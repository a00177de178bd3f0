//! The connection of a client to a master: one at a time, replaced when it breaks.
//!
//! A request is sent once. If its connection breaks, its outcome is unknown, and the claim asks again as the same owner. The
//! supervisor, a task of the client, watches the connection. It finds out when the connection falls silent, makes another, and
//! then has every claim ask again, since a push may have been missed. The new connection first has the server end the old one,
//! so that nothing which is still on its way there takes effect later.

use std::{
    fmt,
    pin::{Pin, pin},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{
    future::try_join,
    stream::{FuturesUnordered, StreamExt},
};
use lockkit_core::{
    Error, Result,
    spi::{Mutex, OwnerId, chain},
};
use redis::{Cmd, ErrorKind, Pipeline, PushInfo, PushKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
    time::{Instant, MissedTickBehavior, timeout},
};

use crate::{
    announcement::Announcements,
    claim::FOLLOWER_DELAY,
    connect::{Connector, Established, HostPort, OnPush, Role, ServerInfo},
    error::{NAME, breaks_connection, demoted, disconnected, failed, failed_at},
    layout::{self, Record},
    script::{self, Call},
    wakeup::{PushOrigin, Wakeups},
};

/// The time between two looks of the supervisor at the connection.
const TICK: Duration = Duration::from_millis(500);
/// The longest time for the server to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// The time after which a client says again that its waiters are alive, and looks which have become the first in their queue.
/// With a tick of the supervisor it is no longer than `HANDOFF_TTL`.
const HEARTBEAT: Duration = Duration::from_millis(2_500);
/// The time for which a waiter counts as alive after its client's heartbeat: `ALIVE_FOR` of the scripts.
pub(crate) const ALIVE_FOR: Duration = Duration::from_secs(10);
/// The age of the last reply at which a client with waiters sends a ping. A push after an older reply is not fresh enough to be
/// a grant.
const MAX_REPLY_AGE: Duration = Duration::from_secs(1);
/// The time by which a lock that somebody waits for outlives its lease: `GRACE` of the scripts.
const GRACE: Duration = Duration::from_secs(10);
/// The longest pause between attempts to connect.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// A connection to one master that is replaced when it breaks.
#[derive(Debug)]
pub(crate) struct ManagedConnection {
    state: Mutex<State>,
    last_broken: LastBroken,
    /// A former connection to the server's process may still be there.
    outlived: AtomicBool,
    supervisor: OnceLock<AbortHandle>,
    errand: mpsc::UnboundedSender<Errand>,
}

#[derive(Debug)]
enum State {
    Up(Arc<Connection>),
    /// No connection, for this reason.
    Down(String),
    Closed,
}

/// Receives the pushes of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Inbox {
    /// The client's name, which is that of its channel.
    pub(crate) client: Arc<str>,
    pub(crate) wakeups: Arc<Wakeups>,
    pub(crate) announcements: Arc<Announcements>,
    /// The number of the master, and how many are a majority, if it is one of several.
    pub(crate) master: Option<(usize, usize)>,
}

impl Inbox {
    /// Delivers a push. Returns what it handed to a claim that is gone.
    fn push(&self, message: &[u8], origin: Option<PushOrigin>) -> Option<Abandoned> {
        if let Some((master, majority)) = self.master {
            self.wakeups.hint(master, majority, message);
            return None;
        }
        let (owner, lock) = self.wakeups.push(message, origin)?;
        Some((owner, lock.to_vec()))
    }
}

/// A hold, or a place in the queue, that has to be released since its claim is gone: its owner, and the key of the lock.
type Abandoned = (OwnerId, Vec<u8>);

/// What the supervisor does for those who are gone.
enum Errand {
    Release(Abandoned),
    /// Unsubscribe from this channel, unless somebody watches its lock.
    Leave(Vec<u8>),
}

/// One connection.
pub(crate) struct Connection {
    established: Established,
    /// From 1 on, for each connection that the client tries to make.
    number: u64,
    last_answered: Arc<LastAnswered>,
    /// The number of requests that were sent.
    sent: AtomicU64,
    /// The number of the last request that was answered. Replies come in the order of the requests.
    answered: AtomicU64,
    /// The time in ms for which requests under way may keep the server from answering others.
    held_up: AtomicU64,
}

/// The time at which the last request was sent that has been answered. The server sends a push that is read later after that.
#[derive(Default)]
struct LastAnswered(Mutex<Option<Instant>>);

impl LastAnswered {
    fn note(&self, sent: Instant) {
        let mut last = self.0.lock();
        *last = (*last).max(Some(sent));
    }

    fn get(&self) -> Option<Instant> {
        *self.0.lock()
    }
}

/// The number of the last connection that is known to be broken. Tells the supervisor.
type LastBroken = watch::Sender<u64>;

fn report_broken(last: &LastBroken, number: u64) {
    last.send_modify(|last| *last = number.max(*last));
}

impl ManagedConnection {
    /// Connects, and stays connected from then on.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection.
    pub(crate) async fn open(connector: Connector, inbox: Option<Inbox>) -> Result<Arc<Self>> {
        let mut supervisor = Supervisor::new(connector, inbox);
        let first = supervisor.connect().await?;
        Ok(supervisor.start(Ok(first)))
    }

    /// Connects a second time, without pushes. Renewals may go this way, so holders ask again when the connection was replaced.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection.
    pub(crate) async fn open_second(connector: Connector, wakeups: Arc<Wakeups>) -> Result<Arc<Self>> {
        let mut supervisor = Supervisor::new(connector, None);
        supervisor.holders = Some(wakeups);
        let first = supervisor.connect().await?;
        Ok(supervisor.start(Ok(first)))
    }

    fn stop_supervisor(&self) {
        if let Some(supervisor) = self.supervisor.get() {
            supervisor.abort();
        }
    }

    /// Returns the connection that there is now.
    pub(crate) fn current(&self, operation: &'static str) -> Result<Arc<Connection>> {
        match &*self.state.lock() {
            State::Up(connection) => Ok(connection.clone()),
            State::Down(why) => Err(disconnected(operation, why)),
            State::Closed => Err(Error::Closed),
        }
    }

    /// Runs a script on a lock.
    ///
    /// # Cancel safety
    /// The request may be sent and take effect all the same.
    pub(crate) async fn run(&self, operation: &'static str, call: Call) -> Result<Value> {
        let connection = self.current(operation)?;
        self.run_on(&connection, operation, call).await
    }

    /// Runs a script that changes nothing, and fails at a server that [is no master](Self::check_master) by then.
    ///
    /// # Cancel safety
    /// The request may be sent all the same.
    pub(crate) async fn look(&self, operation: &'static str, call: Call) -> Result<Value> {
        // One connection: the next one may lead to another server, which says nothing of this one's reply.
        let connection = self.current(operation)?;
        let looks = try_join(
            self.run_on(&connection, operation, call),
            self.check_master(&connection, operation),
        );
        looks.await.map(|(reply, ())| reply)
    }

    /// Fails if the server of this connection is no master any more, and leaves it. One that was demoted keeps its connections. It refuses
    /// to write, but goes on to answer who only looks. A user who only looks may not try to write, either.
    pub(crate) async fn check_master(&self, connection: &Connection, operation: &'static str) -> Result<()> {
        let mut ask = redis::cmd("INFO");
        ask.arg("replication");
        let info = self.send(connection, &ask).await;
        let info = info.and_then(|info| Ok(redis::from_redis_value::<String>(info)?));
        let info = info.map_err(|error| failed(operation, error))?;
        if info.lines().any(|line| line.trim() == "role:master") {
            return Ok(());
        }
        report_broken(&self.last_broken, connection.number);
        Err(demoted(operation, connection.server().if_replica))
    }

    /// Runs a script on this connection, which may have been replaced meanwhile.
    ///
    /// # Cancel safety
    /// The request may be sent and take effect all the same.
    pub(crate) async fn run_on(
        &self,
        connection: &Connection,
        operation: &'static str,
        call: Call,
    ) -> Result<Value> {
        let mut reply = self.send(connection, &call.command).await;
        if reply.as_ref().is_err_and(is_unknown_script) {
            // The server forgot it: after SCRIPT FLUSH, or as a replica that was promoted.
            reply = self.send(connection, &call.in_full()).await;
        }
        let if_replica = connection.server().if_replica;
        reply.map_err(|error| failed_at(operation, &error, call.key(), if_replica))
    }

    /// Deletes a key that has this value, by the server's own command. Returns `false` if the key has another value, or if the
    /// server has no such command or refuses it. A script then does the work, or reports why it cannot be done.
    ///
    /// # Cancel safety
    /// The request may be sent and take effect all the same.
    pub(crate) async fn delete(&self, operation: &'static str, key: &[u8], value: &str) -> Result<bool> {
        let connection = self.current(operation)?;
        let Role::Only(Some(compare_and_delete)) = connection.server().role else {
            return Ok(false);
        };
        match self
            .send(&connection, &compare_and_delete.command(key, value))
            .await
        {
            Ok(deleted) => Ok(deleted == Value::Int(1)),
            Err(error) if error.code().is_some() => Ok(false),
            Err(error) => Err(failed(operation, error)),
        }
    }

    /// Runs a script, and waits `within` this time for replicas to have the writes of this connection, if `wrote` says of its reply that it
    /// has written. Returns the script's reply, and how many replicas have them.
    ///
    /// # Cancel safety
    /// The request may be sent and take effect all the same.
    pub(crate) async fn run_replicated(
        &self,
        operation: &'static str,
        call: Call,
        (replicas, within): (u32, Duration),
        wrote: impl Fn(&Value) -> bool,
    ) -> Result<(Value, i64)> {
        // On one connection: WAIT covers no other's writes.
        let connection = self.current(operation)?;
        let reply = self.run_on(&connection, operation, call).await?;
        if !wrote(&reply) {
            return Ok((reply, 0));
        }
        let mut wait = redis::cmd("WAIT");
        wait.arg(replicas)
            .arg(u64::try_from(within.as_millis()).unwrap_or(u64::MAX));
        let reached = {
            let _held_up = connection.hold_up(within);
            self.send(&connection, &wait).await
        };
        let reached = reached.and_then(|reached| Ok(redis::from_redis_value(reached)?));
        Ok((reply, reached.map_err(|error| failed(operation, error))?))
    }

    /// Returns whether both lead to the same process. Each is replaced by itself, and the master may be another one by then.
    pub(crate) fn is_same_server(&self, operation: &'static str, other: &Self) -> Result<bool> {
        let (one, two) = (self.current(operation)?, other.current(operation)?);
        Ok(one.server().run_id == two.server().run_id)
    }

    /// Returns whether a request on a former connection may come late, since the server has not ended that.
    pub(crate) fn may_have_late_requests(&self) -> bool {
        self.outlived.load(Ordering::Relaxed)
    }

    /// Has the connection replaced although it is not broken.
    pub(crate) fn replace(&self) {
        if let Some(number) = self.number() {
            report_broken(&self.last_broken, number);
        }
    }

    /// Returns host and port of the server, if there is a connection.
    pub(crate) fn server(&self) -> Option<HostPort> {
        match &*self.state.lock() {
            State::Up(connection) => Some(connection.server().address.clone()),
            State::Down(_) | State::Closed => None,
        }
    }

    /// Returns the number of the connection, if there is one.
    pub(crate) fn number(&self) -> Option<u64> {
        match &*self.state.lock() {
            State::Up(connection) => Some(connection.number),
            State::Down(_) | State::Closed => None,
        }
    }

    /// Has the supervisor unsubscribe from a channel on which a watch has ended, unless others are there.
    pub(crate) fn leave(&self, channel: Vec<u8>) {
        let _ = self.errand.send(Errand::Leave(channel));
    }

    /// Sends a request on this connection, once.
    pub(crate) async fn send(&self, connection: &Connection, command: &Cmd) -> RedisResult<Value> {
        let reply = connection.send(command).await;
        if reply.as_ref().is_err_and(breaks_connection) {
            report_broken(&self.last_broken, connection.number);
        }
        reply
    }

    /// Ends the connection. There are no more requests.
    ///
    /// # Cancel safety
    /// The connection ends all the same.
    pub(crate) async fn close(&self, inbox: Option<&Inbox>) {
        self.stop_supervisor();
        let before = std::mem::replace(&mut *self.state.lock(), State::Closed);
        if let (State::Up(connection), Some(inbox)) = (before, inbox) {
            let mut delete = redis::cmd("DEL");
            delete.arg(&*inbox.client);
            // If it does not get there, the key expires.
            let _ = timeout(PING_TIMEOUT, connection.send(&delete)).await;
        }
    }
}

impl Drop for ManagedConnection {
    fn drop(&mut self) {
        self.stop_supervisor();
    }
}

pub(crate) fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

impl Connection {
    /// Returns what the server has said of itself.
    pub(crate) fn server(&self) -> &ServerInfo {
        &self.established.server
    }

    /// Returns its number, by which it differs from every other of the client.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Subscribes to this channel as well.
    pub(crate) async fn subscribe(&self, channel: &[u8]) -> RedisResult<()> {
        let mut stream = self.established.stream.clone();
        let request = pin!(stream.subscribe(channel));
        self.reply(request).await
    }

    async fn unsubscribe(&self, channel: &[u8]) -> RedisResult<()> {
        let mut stream = self.established.stream.clone();
        let request = pin!(stream.unsubscribe(channel));
        self.reply(request).await
    }

    async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        let mut stream = self.established.stream.clone();
        let request = pin!(stream.send_packed_command(command));
        self.reply(request).await?.extract_error()
    }

    /// Sends several commands as one request. Each reply may be an error.
    async fn send_all(&self, commands: &Pipeline) -> RedisResult<Vec<Value>> {
        let mut stream = self.established.stream.clone();
        let request = pin!(stream.send_packed_commands(commands, 0, commands.len()));
        self.reply(request).await
    }

    /// Sends a request and returns its reply, or an error if the connection is replaced before.
    async fn reply<T>(&self, request: Pin<&mut impl Future<Output = RedisResult<T>>>) -> RedisResult<T> {
        let number = self.sent.fetch_add(1, Ordering::Relaxed) + 1;
        let sent = Instant::now();
        // One task reads the replies of all masters, and wakes the claim that asked them once.
        let reply = if self.server().is_voter() {
            request.await
        } else {
            self.established.io.drive(request).await
        };
        if reply.is_ok() {
            self.last_answered.note(sent);
        }
        self.answered.fetch_max(number, Ordering::Relaxed);
        self.established.intake.note_reply();
        reply.map_err(|error| self.established.intake.explain(error))
    }

    /// Ends all requests that wait for a reply. The server may be gone without a word.
    fn end_requests(&self) {
        self.established.io.end();
    }

    fn hold_up(&self, within: Duration) -> HeldUp<'_> {
        let ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        self.held_up.fetch_add(ms, Ordering::Relaxed);
        HeldUp(self, ms)
    }

    /// Sends a ping. Returns whether the server answers in time.
    async fn ping(&self) -> bool {
        let patience = PING_TIMEOUT + Duration::from_millis(self.held_up.load(Ordering::Relaxed));
        let answer = timeout(patience, async {
            if self.server().is_voter() {
                // The server may have forgotten a script, and each claim may have stopped waiting before it was told.
                let mut stream = self.established.stream.clone();
                match script::load(&script::REDLOCK, &mut stream).await {
                    Err(error) if breaks_connection(&error) => return Err(error),
                    // A server that refuses is there.
                    _ => {}
                }
            }
            self.send(&redis::cmd("PING")).await
        });
        answer
            .await
            .is_ok_and(|answer| !answer.is_err_and(|error| breaks_connection(&error)))
    }

    /// Returns whether a request that was sent before the call before this one has no reply. `sent_before` is the number of
    /// requests at that time, and is brought up to date.
    fn is_silent(&self, sent_before: &mut u64) -> bool {
        let silent = *sent_before > self.answered.load(Ordering::Relaxed);
        *sent_before = self.sent.load(Ordering::Relaxed);
        silent
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// A request that the server answers late, with everything behind it.
struct HeldUp<'a>(&'a Connection, u64);

impl Drop for HeldUp<'_> {
    fn drop(&mut self) {
        self.0.held_up.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// Makes the connections of a client to one master, and watches over them.
pub(crate) struct Supervisor {
    connector: Connector,
    inbox: Option<Inbox>,
    /// Woken after a reconnection, without an inbox.
    holders: Option<Arc<Wakeups>>,
    last_broken: LastBroken,
    errand: mpsc::UnboundedSender<Errand>,
    errands: mpsc::UnboundedReceiver<Errand>,
    /// The number of the last connection that it tried to make.
    number: u64,
}

impl Supervisor {
    pub(crate) fn new(connector: Connector, inbox: Option<Inbox>) -> Self {
        let (errand, errands) = mpsc::unbounded_channel();
        Self {
            connector,
            inbox,
            holders: None,
            last_broken: watch::Sender::new(0),
            errand,
            errands,
            number: 0,
        }
    }

    /// Starts to watch over this connection. If there is an error in its place, it first makes one.
    pub(crate) fn start(self, first: Result<Connection>) -> Arc<ManagedConnection> {
        let managed = Arc::new(ManagedConnection {
            state: Mutex::new(match first {
                Ok(first) => State::Up(Arc::new(first)),
                Err(err) => State::Down(reason(&err)),
            }),
            last_broken: self.last_broken.clone(),
            outlived: AtomicBool::new(false),
            supervisor: OnceLock::new(),
            errand: self.errand.clone(),
        });
        let supervisor = tokio::spawn(self.supervise(Arc::downgrade(&managed)));
        let _ = managed.supervisor.set(supervisor.abort_handle());
        managed
    }

    /// Tries once to connect.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection.
    pub(crate) async fn connect(&mut self) -> Result<Connection> {
        let Self {
            connector,
            inbox,
            last_broken,
            errand,
            number,
            ..
        } = self;
        let channel = inbox.as_ref().map(|inbox| inbox.client.clone());
        let last_answered = Arc::<LastAnswered>::default();
        // A number for each try: the end of one that failed must not be taken for the end of the next.
        let connecting = connector.connect(channel.as_deref(), || {
            *number += 1;
            on_push(*number, &last_answered, last_broken, inbox.as_ref(), errand)
        });
        let established = connecting.await?;
        Ok(Connection {
            established,
            number: *number,
            last_answered,
            sent: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            held_up: AtomicU64::new(0),
        })
    }

    async fn supervise(mut self, managed: Weak<ManagedConnection>) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_broken = self.last_broken.subscribe();
        let mut sent_before = 0;
        let mut last_heartbeat = None;
        // Beside all else: each may wait for a reply, and the connection has to be watched meanwhile.
        let mut under_way = FuturesUnordered::new();
        if managed
            .upgrade()
            .is_some_and(|managed| managed.current("connect").is_err())
        {
            self.reconnect(&managed, None).await;
        }
        loop {
            tokio::select! {
                Ok(()) = last_broken.changed() => {}
                _ = tick.tick() => {}
                Some(errand) = self.errands.recv() => {
                    under_way.push(run_errand(managed.clone(), self.inbox.clone(), errand));
                    continue;
                }
                Some(()) = under_way.next(), if !under_way.is_empty() => continue,
            }
            let Some(connection) = managed
                .upgrade()
                .and_then(|managed| managed.current("connect").ok())
            else {
                return;
            };
            let is_broken = *last_broken.borrow_and_update() >= connection.number;
            if is_broken
                || (connection.is_silent(&mut sent_before) && !connection.ping().await)
                || !self.heartbeat(&connection, &mut last_heartbeat).await
            {
                // They would keep the client alive for as long as there is no server. What was handed off expires, and a new connection
                // has subscribed to nothing.
                under_way.clear();
                self.reconnect(&managed, Some(&connection)).await;
                last_heartbeat = None;
                sent_before = 0;
            }
        }
    }

    /// Says that this client's waiters are alive, if it has any and it is time. Has those ask that have become the first in their
    /// queue, and the others in time for the holder's lease. Returns whether the server answers.
    async fn heartbeat(&self, connection: &Connection, last: &mut Option<Instant>) -> bool {
        let Some(inbox) = &self.inbox else {
            return true;
        };
        if !inbox.wakeups.any_waits() {
            return true;
        }
        // At the nearest tick.
        let is_due = |since: Instant, interval| since.elapsed() + TICK / 2 >= interval;
        if last.is_some_and(|last| !is_due(last, HEARTBEAT)) {
            let answered = connection.last_answered.get();
            return answered.is_some_and(|sent| !is_due(sent, MAX_REPLY_AGE)) || connection.ping().await;
        }
        *last = Some(Instant::now());
        let followers = inbox.wakeups.followers();
        let mut commands = Pipeline::with_capacity(1 + 2 * followers.len());
        commands
            .cmd("SET")
            .arg(&*inbox.client)
            .arg(1)
            .arg("PX")
            .arg(u64::try_from(ALIVE_FOR.as_millis()).unwrap_or(u64::MAX));
        for (.., lock) in &followers {
            commands.cmd("ZRANGE").arg(layout::queue(lock)).arg(0).arg(0);
            commands.cmd("PTTL").arg(lock);
        }
        let replies = match timeout(PING_TIMEOUT, connection.send_all(&commands)).await {
            Ok(Ok(replies)) => replies,
            // A server that refuses is there all the same.
            Ok(Err(error)) => return !breaks_connection(&error),
            Err(_) => return false,
        };
        let mut replies = replies.into_iter().skip(1);
        for (owner, wakeup, _) in followers {
            let (Some(first), Some(left)) = (replies.next(), replies.next()) else {
                break;
            };
            let first = redis::from_redis_value::<Vec<String>>(first).unwrap_or_default();
            if first.first().is_some_and(|first| *first == owner.to_string()) {
                wakeup.became_first();
            } else if let Value::Int(left) = left {
                // The present holder may have a shorter lease than the one that this waiter was told of.
                let left = u64::try_from(left).map_or(GRACE, Duration::from_millis);
                wakeup.still_follows((left + FOLLOWER_DELAY).saturating_sub(GRACE));
            }
        }
        true
    }

    /// Replaces a broken connection, or makes the first one. Tries until there is one.
    async fn reconnect(&mut self, managed: &Weak<ManagedConnection>, broken: Option<&Connection>) {
        let mut why = broken.map(|_| "it broke, and is being replaced".to_owned());
        let mut pause = Duration::from_millis(10);
        let excess = broken.and_then(|broken| broken.established.intake.excess());
        // It would do so again at once.
        let mut rests = excess.is_some();
        if let Some(excess) = excess {
            let server = self.connector.server();
            tracing::warn!(backend = NAME, %server, error = excess, "the connection is replaced");
            why = Some(excess.to_owned());
        }
        loop {
            {
                let Some(managed) = managed.upgrade() else { return };
                let mut state = managed.state.lock();
                match (&mut *state, &why) {
                    (State::Closed, _) => return,
                    (state, Some(why)) => *state = State::Down(why.clone()),
                    _ => {}
                }
            }
            if std::mem::take(&mut rests) {
                tokio::time::sleep(MAX_PAUSE).await;
            }
            match self.connect().await {
                Ok(connection) => {
                    let outlived = match broken {
                        Some(broken) => end_predecessor(&connection, broken).await,
                        None => Predecessor::None,
                    };
                    let Some(managed) = managed.upgrade() else { return };
                    match outlived {
                        // Those before it may be there as before.
                        Predecessor::Ended => {}
                        Predecessor::None => managed.outlived.store(false, Ordering::Relaxed),
                        Predecessor::MayBeThere => managed.outlived.store(true, Ordering::Relaxed),
                    }
                    let mut state = managed.state.lock();
                    if !matches!(*state, State::Closed) {
                        *state = State::Up(Arc::new(connection));
                    }
                    drop(state);
                    self.connector.connected();
                    if let Some(broken) = broken {
                        broken.end_requests();
                    }
                    if let Some(inbox) = &self.inbox {
                        inbox.wakeups.wake_all();
                        inbox.announcements.tell_all();
                        // A master that was replaced may have confirmed releases of which this one has not heard. Their owners ask for nothing
                        // any more.
                        let released = inbox.wakeups.lately_released();
                        for gone in inbox.wakeups.all_abandoned().into_iter().chain(released) {
                            let _ = self.errand.send(Errand::Release(gone));
                        }
                    }
                    if let Some(holders) = &self.holders {
                        holders.wake_all();
                    }
                    tracing::info!(backend = NAME, server = %self.connector.server(), "connected again");
                    return;
                }
                Err(err) => {
                    let reason = reason(&err);
                    // Once for each reason: a server may be away for days.
                    if why.as_ref() != Some(&reason) {
                        let server = self.connector.server();
                        tracing::warn!(backend = NAME, %server, error = %reason, "cannot connect, trying again");
                    }
                    why = Some(reason);
                }
            }
            tokio::time::sleep(pause.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }
}

/// Makes the handler for pushes on the connection of this number.
fn on_push(
    number: u64,
    last_answered: &Arc<LastAnswered>,
    last_broken: &LastBroken,
    inbox: Option<&Inbox>,
    errand: &mpsc::UnboundedSender<Errand>,
) -> OnPush {
    let (last_broken, inbox, errand) = (last_broken.clone(), inbox.cloned(), errand.clone());
    let last_answered = last_answered.clone();
    Arc::new(move |push: PushInfo| match (&push.kind, &*push.data) {
        (PushKind::Disconnection, _) => report_broken(&last_broken, number),
        (PushKind::Message, [Value::BulkString(channel), Value::BulkString(message)]) => {
            let Some(inbox) = &inbox else { return };
            if *channel != inbox.client.as_bytes() {
                inbox.announcements.deliver(channel);
                return;
            }
            let origin = last_answered.get().map(|since| PushOrigin {
                connection: number,
                since,
            });
            if let Some(abandoned) = inbox.push(message, origin) {
                let _ = errand.send(Errand::Release(abandoned));
            }
        }
        _ => {}
    })
}

/// The connection before a new one.
enum Predecessor {
    /// None led to the process that the new one leads to.
    None,
    Ended,
    MayBeThere,
}

/// Has the server end the connection before this one, so that nothing which is still on its way there takes effect later. Only
/// the process that it led to is asked: another one has given its number to somebody else's connection.
async fn end_predecessor(connection: &Connection, broken: &Connection) -> Predecessor {
    let (new, old) = (connection.server(), broken.server());
    if new.run_id != old.run_id {
        return Predecessor::None;
    }
    let Some(id) = old.client_id.filter(|_| !new.run_id.is_empty()) else {
        return Predecessor::MayBeThere;
    };
    let mut kill = redis::cmd("CLIENT");
    kill.arg("KILL").arg("ID").arg(id);
    // If the user may not do that, a late request can hold a lock that nobody knows of, until its lease ends.
    match timeout(PING_TIMEOUT, connection.send(&kill)).await {
        Ok(Ok(_)) => Predecessor::Ended,
        _ => Predecessor::MayBeThere,
    }
}

async fn run_errand(managed: Weak<ManagedConnection>, inbox: Option<Inbox>, errand: Errand) {
    let Some(managed) = managed.upgrade() else { return };
    match (errand, inbox) {
        (Errand::Release(abandoned), inbox) => release_abandoned(&managed, inbox, abandoned).await,
        (Errand::Leave(channel), Some(inbox)) => leave(&managed, &inbox.announcements, &channel).await,
        (Errand::Leave(_), None) => {}
    }
}

/// Unsubscribes from a channel, unless somebody watches its lock.
async fn leave(managed: &ManagedConnection, announcements: &Announcements, channel: &[u8]) {
    let Ok(connection) = managed.current("watch") else {
        return;
    };
    if announcements.is_watched(channel) {
        return;
    }
    // If it is refused, the client hears of the lock for as long as the connection lasts.
    let _ = timeout(PING_TIMEOUT, connection.unsubscribe(channel)).await;
    if announcements.is_watched(channel) {
        // Who has begun meanwhile may have subscribed before that, and may have missed something since.
        let _ = timeout(PING_TIMEOUT, connection.subscribe(channel)).await;
        announcements.deliver(channel);
    }
}

/// Releases what a claim that is gone has at the server.
async fn release_abandoned(managed: &ManagedConnection, inbox: Option<Inbox>, (owner, lock): Abandoned) {
    let mut release = script::RELEASE.call(&lock);
    release.arg(Record::of(owner));
    // If this fails, a hold expires with its short lease, and a place is given up over the next connection.
    let released = timeout(PING_TIMEOUT, managed.run("release", release)).await;
    if let (Ok(Ok(_)), Some(inbox)) = (released, inbox) {
        inbox.wakeups.forget_abandoned(owner);
    }
}

/// Returns the cause of an error, as text.
pub(crate) fn reason(err: &Error) -> String {
    std::error::Error::source(err).map_or_else(|| err.to_string(), chain)
}
