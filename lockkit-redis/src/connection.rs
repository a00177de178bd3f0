//! The connection of a client: one at a time, replaced when it breaks.
//!
//! A request is sent once. If its connection breaks, its outcome is not known, and whoever made it asks again with
//! the same owner. A task of the client watches the connection: it finds one that has gone silent, dials anew, and
//! then has every claim ask again, since a push may have been missed. The new connection first has the server end its
//! predecessor, so that nothing which is still on its way there takes effect any more.

use std::{
    fmt, io,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::stream::{FuturesUnordered, StreamExt};
use lockkit_core::{
    Error, Result,
    spi::{OwnerId, chain},
};
use redis::{Cmd, ErrorKind, Pipeline, PushInfo, PushKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::{
    sync::{Notify, mpsc},
    task::AbortHandle,
    time::{Instant, MissedTickBehavior},
};

use crate::{
    claim::FOLLOWER_DELAY,
    connect::{Connector, Established, OnPush},
    error::{NAME, breaks_connection, disconnected, failed},
    layout::{self, Record},
    script::{self, Call},
    wakeup::{Heard, Wakeups},
};

/// How often the connection is looked at.
const TICK: Duration = Duration::from_millis(500);
/// How long the server may take to answer a ping.
const PATIENCE: Duration = Duration::from_secs(1);
/// The time after which a client says again that its waiters are alive, and looks which have become the first in their queue; and
/// for how long it is believed. With a tick of the supervisor it is no longer than a hold that was passed on and is not taken up.
const HEARTBEAT: Duration = Duration::from_millis(2_500);
pub(crate) const ALIVE_FOR: Duration = Duration::from_secs(10);
/// The age from which on it is known too badly, while somebody waits, how long ago a push was sent: whoever is passed a lock then
/// would have to ask.
const HEARD: Duration = Duration::from_secs(1);
/// By how much a lock that somebody waits for outlives its lease: `GRACE` of the scripts.
const GRACE: Duration = Duration::from_secs(10);
/// The longest pause between attempts to connect.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// A link to one master.
#[derive(Debug)]
pub(crate) struct ManagedConnection {
    state: Mutex<State>,
    signals: Arc<Signals>,
    /// The task that watches it.
    supervisor: OnceLock<AbortHandle>,
}

#[derive(Debug)]
enum State {
    Up(Arc<Connection>),
    /// And why.
    Down(String),
    Closed,
}

/// The pushes that a link receives.
#[derive(Clone, Debug)]
pub(crate) struct Inbox {
    pub(crate) client: Arc<str>,
    pub(crate) wakeups: Arc<Wakeups>,
    /// If it is that of one of several masters: which, and how many are a majority.
    pub(crate) master: Option<(usize, usize)>,
}

impl Inbox {
    /// What a claim that is gone was passed, if it was.
    fn push(&self, message: &[u8], heard: Option<Heard>) -> Option<Stray> {
        if let Some((master, majority)) = self.master {
            self.wakeups.hint(master, majority, message);
            return None;
        }
        let (owner, lock) = self.wakeups.push(message, heard)?;
        Some((owner, lock.to_vec()))
    }
}

/// One connection.
pub(crate) struct Connection {
    dialled: Established,
    number: u64,
    heard: Arc<Hearing>,
    /// How many requests there were so far.
    sent: AtomicU64,
    /// Up to which of them replies are known to have come: they come in the order of the requests.
    answered: AtomicU64,
    /// Somebody stopped waiting for a reply, who would not have done so otherwise.
    doubted: AtomicBool,
    /// There is another in its place: replies that have not come will not. Of one that the library runs; others are ended.
    replaced: AtomicBool,
    on_replaced: Notify,
    /// For how long requests that are under way may keep the server from answering others, in ms.
    held_up: AtomicU64,
}

/// What is known of how long ago a push was sent, at the most. Whoever reads a push has read the replies before it.
struct Hearing {
    began: Instant,
    /// When the last request was sent that has been answered, in µs since then. 0 if there is none.
    since: AtomicU64,
}

impl Hearing {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            since: AtomicU64::new(0),
        }
    }

    fn answered(&self, sent: Instant) {
        let since = sent.saturating_duration_since(self.began).as_micros();
        self.since
            .fetch_max(u64::try_from(since).unwrap_or(0), Ordering::Relaxed);
    }

    fn since(&self) -> Option<Instant> {
        let since = self.since.load(Ordering::Relaxed);
        (since > 0).then(|| self.began + Duration::from_micros(since))
    }
}

#[derive(Debug, Default)]
struct Signals {
    /// The latest connection that is known to be broken. They are numbered from 1.
    broken: AtomicU64,
    changed: Notify,
}

impl Signals {
    fn break_off(&self, number: u64) {
        self.broken.fetch_max(number, Ordering::AcqRel);
        self.changed.notify_one();
    }

    fn is_broken(&self, number: u64) -> bool {
        self.broken.load(Ordering::Acquire) >= number
    }
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop_supervisor(&self) {
        if let Some(supervisor) = self.supervisor.get() {
            supervisor.abort();
        }
    }

    /// The connection there is.
    pub(crate) fn current(&self, operation: &'static str) -> Result<Arc<Connection>> {
        match &*self.state() {
            State::Up(live) => Ok(live.clone()),
            State::Down(why) => Err(disconnected(operation, why)),
            State::Closed => Err(Error::Closed),
        }
    }

    /// Runs a script on a lock.
    ///
    /// # Cancel safety
    /// The request may be sent and take effect all the same.
    pub(crate) async fn run(&self, operation: &'static str, call: Call) -> Result<Value> {
        let live = self.current(operation)?;
        self.run_on(&live, operation, call).await
    }

    /// The same on this connection, which may have been replaced meanwhile.
    pub(crate) async fn run_on(
        &self,
        live: &Connection,
        operation: &'static str,
        call: Call,
    ) -> Result<Value> {
        let mut reply = self.send(live, &call.command).await;
        if reply.as_ref().is_err_and(is_unknown_script) {
            // The server forgot it: after SCRIPT FLUSH, or as a replica that was promoted.
            reply = self.send(live, &call.in_full()).await;
        }
        reply.map_err(|error| failed(operation, error))
    }

    /// Deletes a key that has this value, by a command of the server's own. `false` if it has another, or the server has
    /// no such command or refuses it: a script then does what there is to do, or is told why not.
    ///
    /// # Cancel safety
    /// The request may be sent and take effect all the same.
    pub(crate) async fn delete(&self, operation: &'static str, key: &[u8], value: &str) -> Result<bool> {
        let live = self.current(operation)?;
        let Some(native) = live.dialled.native else {
            return Ok(false);
        };
        match self.send(&live, &native.delete(key, value)).await {
            Ok(deleted) => Ok(deleted == Value::Int(1)),
            Err(error) if error.code().is_some() => Ok(false),
            Err(error) => Err(failed(operation, error)),
        }
    }

    /// Runs a script that writes, and then waits for the writes of this connection to reach replicas. The script's
    /// reply, and how many they reached `within` this time.
    pub(crate) async fn run_replicated(
        &self,
        operation: &'static str,
        call: Call,
        replicas: u32,
        within: Duration,
    ) -> Result<(Value, i64)> {
        // On one connection: WAIT knows of no other's writes.
        let live = self.current(operation)?;
        let reply = self.run_on(&live, operation, call).await?;
        let mut wait = redis::cmd("WAIT");
        wait.arg(replicas)
            .arg(u64::try_from(within.as_millis()).unwrap_or(u64::MAX));
        let reached = {
            let _held_up = live.hold_up(within);
            self.send(&live, &wait).await
        };
        let reached = reached.and_then(|reached| Ok(redis::from_redis_value(reached)?));
        Ok((reply, reached.map_err(|error| failed(operation, error))?))
    }

    /// Whether both lead to the same process, as far as that is known: each is made anew by itself, and the master may be
    /// another one by then.
    pub(crate) fn leads_where(&self, operation: &'static str, other: &Self) -> Result<bool> {
        let (one, two) = (self.current(operation)?, other.current(operation)?);
        Ok(one.dialled.run_id == two.dialled.run_id)
    }

    /// Has the connection made anew, although it stands.
    pub(crate) fn make_anew(&self) {
        if let State::Up(live) = &*self.state() {
            self.signals.break_off(live.number);
        }
    }

    /// The number of the connection, if there is one.
    pub(crate) fn number(&self) -> Option<u64> {
        match &*self.state() {
            State::Up(live) => Some(live.number),
            State::Down(_) | State::Closed => None,
        }
    }

    /// Sends a request on this connection, once.
    pub(crate) async fn send(&self, live: &Connection, command: &Cmd) -> RedisResult<Value> {
        let reply = live.send(command).await;
        self.seen(live, reply)
    }

    fn seen<T>(&self, live: &Connection, reply: RedisResult<T>) -> RedisResult<T> {
        if reply.as_ref().is_err_and(breaks_connection) {
            self.signals.break_off(live.number);
        }
        reply
    }

    /// Ends the connection. There are no more requests.
    ///
    /// # Cancel safety
    /// The connection ends all the same.
    pub(crate) async fn close(&self, inbox: Option<&Inbox>) {
        self.stop_supervisor();
        let before = std::mem::replace(&mut *self.state(), State::Closed);
        if let (State::Up(live), Some(inbox)) = (before, inbox) {
            let mut gone = redis::cmd("DEL");
            gone.arg(layout::client(&inbox.client));
            // If it does not get there, the key lapses.
            let _ = tokio::time::timeout(PATIENCE, live.send(&gone)).await;
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
    /// What the server said of itself.
    pub(crate) fn server(&self) -> &Established {
        &self.dialled
    }

    async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        let mut connection = self.dialled.connection.clone();
        let request = pin!(connection.send_packed_command(command));
        self.reply(request).await?.extract_error()
    }

    /// Several as one. Each of the replies may be an error.
    async fn send_all(&self, commands: &Pipeline) -> RedisResult<Vec<Value>> {
        let mut connection = self.dialled.connection.clone();
        let request = pin!(connection.send_packed_commands(commands, 0, commands.len()));
        self.reply(request).await
    }

    /// What comes of a request, unless the connection is replaced before.
    async fn reply<T>(&self, mut request: Pin<&mut impl Future<Output = RedisResult<T>>>) -> RedisResult<T> {
        let number = self.sent.fetch_add(1, Ordering::Relaxed) + 1;
        let since = Instant::now();
        let waiting = Waiting(self);
        let reply = match &self.dialled.driven {
            // One task for all masters reads what comes from them at a time, and wakes whoever asked them once.
            Some(_) if self.dialled.votes => request.await,
            Some(driven) => driven.drive(request).await,
            None => {
                // Made first, so that a replacement from now on is not missed.
                let replaced = self.on_replaced.notified();
                if self.replaced.load(Ordering::Acquire) {
                    Err(was_replaced())
                } else {
                    tokio::select! {
                        biased;
                        reply = request.as_mut() => reply,
                        () = replaced => Err(was_replaced()),
                    }
                }
            }
        };
        if reply.is_ok() {
            self.heard.answered(since);
        }
        waiting.answered(number);
        reply
    }

    /// Nobody waits any longer for replies on it: its peer may be gone without a word.
    fn replace(&self) {
        match &self.dialled.driven {
            Some(driven) => driven.end(),
            None => {
                self.replaced.store(true, Ordering::Release);
                self.on_replaced.notify_waiters();
            }
        }
    }

    fn hold_up(&self, within: Duration) -> HeldUp<'_> {
        let ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        self.held_up.fetch_add(ms, Ordering::Relaxed);
        HeldUp(self, ms)
    }

    /// Whether the server answers.
    async fn answers(&self) -> bool {
        let mut connection = self.dialled.connection.clone();
        let sent = self.sent.load(Ordering::Relaxed);
        let patience = PATIENCE + Duration::from_millis(self.held_up.load(Ordering::Relaxed));
        let answer = async {
            if self.dialled.votes {
                // Nobody may have waited for long enough to hear that the server forgot a script.
                let loaded = script::load(&script::REDLOCK, &mut connection).await;
                !loaded.is_err_and(|error| breaks_connection(&error))
            } else {
                let ping = redis::cmd("PING");
                connection.send_packed_command(&ping).await.is_ok()
            }
        };
        let answers = tokio::time::timeout(patience, answer).await.unwrap_or(false);
        if answers {
            self.answered.fetch_max(sent, Ordering::Relaxed);
        }
        answers
    }

    /// Whether requests are left without a reply: not all that were sent `before` have one by now. What was sent by now
    /// takes the place of that.
    fn is_silent(&self, before: &mut u64) -> bool {
        let stuck = *before > self.answered.load(Ordering::Relaxed);
        *before = self.sent.load(Ordering::Relaxed);
        self.doubted.swap(false, Ordering::Relaxed) || stuck
    }
}

fn was_replaced() -> RedisError {
    io::Error::new(io::ErrorKind::ConnectionReset, "the connection was replaced").into()
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// A request that waits for its reply.
struct Waiting<'a>(&'a Connection);

impl Waiting<'_> {
    fn answered(self, number: u64) {
        self.0.answered.fetch_max(number, Ordering::Relaxed);
        std::mem::forget(self);
    }
}

impl Drop for Waiting<'_> {
    /// It may have been a caller that went away, or a server that did. Where others voted first, nothing is amiss.
    fn drop(&mut self) {
        if !self.0.dialled.votes {
            self.0.doubted.store(true, Ordering::Relaxed);
        }
    }
}

/// A request that the server is to answer late, and nothing behind it before.
struct HeldUp<'a>(&'a Connection, u64);

impl Drop for HeldUp<'_> {
    fn drop(&mut self) {
        self.0.held_up.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// What a claim that is gone was passed, or its place in the queue, that has to be given back: owner and lock.
type Stray = (OwnerId, Vec<u8>);

/// Makes the connections of a link, and watches over them.
pub(crate) struct Supervisor {
    connector: Connector,
    inbox: Option<Inbox>,
    signals: Arc<Signals>,
    give_back: mpsc::UnboundedSender<Stray>,
    strays: mpsc::UnboundedReceiver<Stray>,
    /// Of the latest connection.
    number: u64,
}

impl Supervisor {
    pub(crate) fn new(connector: Connector, inbox: Option<Inbox>) -> Self {
        let (give_back, strays) = mpsc::unbounded_channel();
        Self {
            connector,
            inbox,
            signals: Arc::default(),
            give_back,
            strays,
            number: 0,
        }
    }

    /// The link that begins with this connection, or by making one.
    pub(crate) fn start(self, first: Result<Connection>) -> Arc<ManagedConnection> {
        let link = Arc::new(ManagedConnection {
            state: Mutex::new(match first {
                Ok(first) => State::Up(Arc::new(first)),
                Err(err) => State::Down(reason(&err)),
            }),
            signals: self.signals.clone(),
            supervisor: OnceLock::new(),
        });
        let keeping = tokio::spawn(self.supervise(Arc::downgrade(&link)));
        let _ = link.supervisor.set(keeping.abort_handle());
        link
    }

    /// One try to connect.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection.
    pub(crate) async fn connect(&mut self) -> Result<Connection> {
        let Self {
            connector,
            inbox,
            signals,
            give_back,
            number,
            ..
        } = self;
        let channel = inbox.as_ref().map(|inbox| layout::client(&inbox.client));
        let heard = Arc::new(Hearing::new());
        // Each try has a number of its own: the end of one that came to nothing is not that of the next.
        let dialling = connector.dial(channel.as_deref(), || {
            *number += 1;
            on_push(*number, &heard, signals, inbox.as_ref(), give_back)
        });
        let dialled = dialling.await?;
        Ok(Connection {
            dialled,
            number: *number,
            heard,
            sent: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            doubted: AtomicBool::new(false),
            replaced: AtomicBool::new(false),
            on_replaced: Notify::new(),
            held_up: AtomicU64::new(0),
        })
    }

    async fn supervise(mut self, link: Weak<ManagedConnection>) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let signals = self.signals.clone();
        let mut sent = 0;
        let mut beaten = None;
        // Beside all else: each may wait for a reply, and the connection is to be looked at meanwhile.
        let mut giving_back = FuturesUnordered::new();
        if link
            .upgrade()
            .is_some_and(|link| link.current("connect").is_err())
        {
            self.reconnect(&link, None).await;
        }
        loop {
            tokio::select! {
                () = signals.changed.notified() => {}
                _ = tick.tick() => {}
                Some((owner, lock)) = self.strays.recv() => {
                    giving_back.push(give_back(link.clone(), self.inbox.clone(), owner, lock));
                    continue;
                }
                Some(()) = giving_back.next(), if !giving_back.is_empty() => continue,
            }
            let Some(live) = link.upgrade().and_then(|link| link.current("connect").ok()) else {
                return;
            };
            if signals.is_broken(live.number)
                || (live.is_silent(&mut sent) && !live.answers().await)
                || !self.heartbeat(&live, &mut beaten).await
            {
                // They would keep the link alive for as long as there is no server. What was passed lapses.
                giving_back.clear();
                self.reconnect(&link, Some(&live)).await;
                beaten = None;
                sent = 0;
            }
        }
    }

    /// Says that this client's waiters are alive, if there are any and it is time, has those ask that have become the first
    /// in their queue, and the others in time for the lease of whoever holds. Whether that got through.
    async fn heartbeat(&self, live: &Connection, beaten: &mut Option<Instant>) -> bool {
        let Some(inbox) = &self.inbox else {
            return true;
        };
        let waits = inbox.wakeups.queued().load(Ordering::Relaxed) > 0;
        if !waits {
            return true;
        }
        // At the tick that is nearest.
        if beaten.is_some_and(|last| last.elapsed() + TICK / 2 < HEARTBEAT) {
            let heard = live.heard.since();
            if heard.is_some_and(|since| since.elapsed() + TICK / 2 < HEARD) {
                return true;
            }
            let answer = tokio::time::timeout(PATIENCE, live.send(&redis::cmd("PING"))).await;
            return answer.is_ok_and(|answer| !answer.is_err_and(|error| breaks_connection(&error)));
        }
        *beaten = Some(Instant::now());
        let behind = inbox.wakeups.behind();
        let mut commands = Pipeline::with_capacity(1 + 2 * behind.len());
        commands
            .cmd("SET")
            .arg(layout::client(&inbox.client))
            .arg(1)
            .arg("PX")
            .arg(u64::try_from(ALIVE_FOR.as_millis()).unwrap_or(u64::MAX));
        for (.., lock) in &behind {
            commands.cmd("ZRANGE").arg(layout::queue(lock)).arg(0).arg(0);
            commands.cmd("PTTL").arg(lock);
        }
        let answers = match tokio::time::timeout(PATIENCE, live.send_all(&commands)).await {
            Ok(Ok(answers)) => answers,
            // A server that refuses is there all the same.
            Ok(Err(error)) => return !breaks_connection(&error),
            Err(_) => return false,
        };
        let mut answers = answers.into_iter().skip(1);
        for (owner, wakeup, _) in behind {
            let (Some(first), Some(left)) = (answers.next(), answers.next()) else {
                break;
            };
            let first = redis::from_redis_value::<Vec<String>>(first).unwrap_or_default();
            if first.first().is_some_and(|first| *first == owner.to_string()) {
                wakeup.is_first();
            } else if let Value::Int(left) = left {
                // Whoever holds it now may have a shorter lease than the one of whom this waiter was told.
                let left = u64::try_from(left).map_or(GRACE, Duration::from_millis);
                wakeup.is_behind((left + FOLLOWER_DELAY).saturating_sub(GRACE));
            }
        }
        true
    }

    /// Replaces a broken connection, or makes the first, for as long as it takes.
    async fn reconnect(&mut self, link: &Weak<ManagedConnection>, broken: Option<&Connection>) {
        let mut why = broken.map(|_| "it broke, and is being made anew".to_owned());
        let mut pause = Duration::from_millis(10);
        loop {
            {
                let Some(link) = link.upgrade() else { return };
                let mut state = link.state();
                match (&mut *state, &why) {
                    (State::Closed, _) => return,
                    (state, Some(why)) => *state = State::Down(why.clone()),
                    _ => {}
                }
            }
            match self.connect().await {
                Ok(live) => {
                    if let Some(broken) = broken {
                        end_predecessor(&live, broken).await;
                    }
                    let Some(link) = link.upgrade() else { return };
                    let mut state = link.state();
                    if !matches!(*state, State::Closed) {
                        *state = State::Up(Arc::new(live));
                    }
                    drop(state);
                    self.connector.connected();
                    if let Some(broken) = broken {
                        broken.replace();
                    }
                    if let Some(inbox) = &self.inbox {
                        inbox.wakeups.wake_all();
                        for left_behind in inbox.wakeups.left_behind() {
                            let _ = self.give_back.send(left_behind);
                        }
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

/// What becomes of the pushes that come on the connection of this number.
fn on_push(
    number: u64,
    hearing: &Arc<Hearing>,
    signals: &Arc<Signals>,
    inbox: Option<&Inbox>,
    give_back: &mpsc::UnboundedSender<Stray>,
) -> OnPush {
    let (signals, inbox, give_back) = (signals.clone(), inbox.cloned(), give_back.clone());
    let hearing = hearing.clone();
    Arc::new(move |push: PushInfo| match (&push.kind, &*push.data) {
        (PushKind::Disconnection, _) => signals.break_off(number),
        (PushKind::Message, [_, Value::BulkString(message)]) => {
            let heard = hearing.since().map(|since| Heard { on: number, since });
            if let Some(stray) = inbox.as_ref().and_then(|inbox| inbox.push(message, heard)) {
                let _ = give_back.send(stray);
            }
        }
        _ => {}
    })
}

/// Whatever is still on its way to the server on the connection before must not take effect after this. It is for
/// the server that it was made to only: another one has given its number to somebody else's connection.
async fn end_predecessor(live: &Connection, broken: &Connection) {
    let Some(id) = broken.dialled.id else { return };
    if live.dialled.run_id.is_empty() || live.dialled.run_id != broken.dialled.run_id {
        return;
    }
    let mut kill = redis::cmd("CLIENT");
    kill.arg("KILL").arg("ID").arg(id);
    // If it may not be done, a late request can hold a lock that nobody knows of, until its lease runs out.
    let _ = tokio::time::timeout(PATIENCE, live.send(&kill)).await;
}

async fn give_back(link: Weak<ManagedConnection>, inbox: Option<Inbox>, owner: OwnerId, lock: Vec<u8>) {
    let Some(link) = link.upgrade() else { return };
    let mut release = script::RELEASE.call(&lock);
    release.arg(Record::of(owner));
    // If this fails, what was passed lapses with its short lease, and a place is given back over the next connection.
    let given_back = tokio::time::timeout(PATIENCE, link.run("release", release)).await;
    if let (Ok(Ok(_)), Some(inbox)) = (given_back, inbox) {
        inbox.wakeups.taken_out(owner);
    }
}

/// What caused an error.
pub(crate) fn reason(err: &Error) -> String {
    std::error::Error::source(err).map_or_else(|| err.to_string(), chain)
}
