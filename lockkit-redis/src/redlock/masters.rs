//! The masters, and requests to all of them at once.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker, ready},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::future::join_all;
use lockkit_core::{
    Error, Result,
    spi::{Mutex, require_runtime},
};
use redis::{RedisResult, Value};
use tokio::{
    task::AbortHandle,
    time::{Instant, Sleep},
};

use crate::{
    connection::{Connection, Inbox, ManagedConnection, is_unknown_script, reason},
    connection_io::ConnectionIo,
    error::{OF_SEVERAL, failed_at, unexpected},
    redlock::{NAME, quorum::Rules, restart_quarantine::RestartQuarantine},
    script::Call,
};

/// The most rounds of one kind under way at a time. A round has a request or two to each master. So those of all rounds together
/// are answered in a small part of the time that a master has for its reply.
const MOST_ROUNDS: usize = 128;

/// The time that masters have at least for their replies to a release. Unlike others, it has no lease to lose by waiting, and to ask again
/// on the same connection would bring no reply sooner.
pub(super) const RELEASE_PATIENCE: Duration = Duration::from_secs(1);

/// The time within which a waiter comes for its place, unless nobody polls it or its thread is busy. Then it does not count.
const COMES_WITHIN: Duration = Duration::from_millis(100);

/// The places for rounds under way. A round waits for its place before its clock begins.
///
/// Whoever does not poll its future would keep its place for ever. So a place counts for no longer than a round that is polled takes.
#[derive(Debug)]
pub(super) struct Places {
    /// The time by which a round is over, if it is polled.
    longest: Duration,
    usage: Mutex<Usage>,
}

#[derive(Debug, Default)]
struct Usage {
    /// The last ticket.
    last: u64,
    /// The places in use, by ticket.
    taken: BTreeMap<u64, Turn>,
    /// Those who wait, in their order.
    waiting: BTreeMap<u64, Waker>,
}

#[derive(Debug)]
struct Turn {
    /// The time until which it counts.
    until: Instant,
    /// Whoever waited for it has come.
    came: bool,
}

impl Usage {
    fn is_full(&self) -> bool {
        self.taken.len() >= MOST_ROUNDS
    }

    /// Gives the places that are free, or do not count any more, to those who wait. Returns their wakers.
    #[must_use]
    fn pass_on(&mut self, now: Instant) -> Vec<Waker> {
        let mut wakers = Vec::new();
        if self.is_full() && !self.waiting.is_empty() {
            self.taken.retain(|_, turn| turn.until > now);
        }
        while !self.is_full()
            && let Some((ticket, waker)) = self.waiting.pop_first()
        {
            let until = now + COMES_WITHIN;
            self.taken.insert(ticket, Turn { until, came: false });
            wakers.push(waker);
        }
        wakers
    }

    /// Returns when a place may not count any more, for those who wait. While some are at work, each that is done passes on all
    /// such places. Else thousands would look every few milliseconds.
    fn next_end(&self) -> Option<Instant> {
        let ends = |came| {
            self.taken
                .values()
                .filter(move |turn| turn.came == came)
                .map(|turn| turn.until)
        };
        ends(true).min().or_else(|| ends(false).min())
    }
}

impl Places {
    fn new(patience: Duration) -> Self {
        Self {
            longest: patience.max(RELEASE_PATIENCE),
            usage: Mutex::default(),
        }
    }

    /// Waits for a place, in the order of those who ask.
    ///
    /// # Cancel safety
    /// Whoever waits has sent nothing yet, and leaves the queue.
    pub(super) async fn take(&self) -> Place<'_> {
        let place = {
            let mut usage = self.usage.lock();
            usage.last += 1;
            Place {
                places: self,
                ticket: usage.last,
            }
        };
        let mut is_new = true;
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|cx| {
            loop {
                let Some(again) = place.wait(std::mem::take(&mut is_new), cx) else {
                    return Poll::Ready(());
                };
                let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(again)));
                if timer.is_elapsed() {
                    timer.as_mut().reset(again);
                }
                ready!(timer.as_mut().poll(cx));
            }
        })
        .await;
        place
    }
}

/// The right to have a round of requests under way, or a place in the queue for it. It ends when a majority has replied, or the round is
/// over.
#[derive(Debug)]
pub(super) struct Place<'a> {
    places: &'a Places,
    ticket: u64,
}

impl Place<'_> {
    /// Returns `None` when its turn has come, and otherwise the time at which a place may not count any more.
    fn wait(&self, is_new: bool, cx: &Context<'_>) -> Option<Instant> {
        let now = Instant::now();
        let mut usage = self.places.usage.lock();
        let mut wakers = Vec::new();
        if usage.waiting.contains_key(&self.ticket) || (is_new && usage.is_full()) {
            usage.waiting.insert(self.ticket, cx.waker().clone());
            wakers = usage.pass_on(now);
        }
        let again = if usage.waiting.contains_key(&self.ticket) {
            usage.next_end()
        } else {
            // Its turn may have come so long ago that another has the place by now. It goes on all the same.
            let until = now + self.places.longest;
            usage.taken.insert(self.ticket, Turn { until, came: true });
            None
        };
        drop(usage);
        wakers.into_iter().for_each(Waker::wake);
        again
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut usage = self.places.usage.lock();
        usage.waiting.remove(&self.ticket);
        usage.taken.remove(&self.ticket);
        let wakers = usage.pass_on(Instant::now());
        drop(usage);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// The part of a client that its claims share.
#[derive(Debug)]
pub(crate) struct Masters {
    pub(super) all: Vec<Master>,
    pub(super) rules: Rules,
    pub(super) quarantine: Arc<RestartQuarantine>,
    pub(super) inbox: Inbox,
    pub(super) namespace: Arc<str>,
    /// The places of those who have a hold: to renew, release, pass on or end one.
    pub(super) for_holders: Places,
    /// The places of all others. However many they are, holders do not queue behind them.
    pub(super) for_others: Places,
    pub(super) connection_io: ConnectionIo,
    /// The moment from which `quorum` counts time.
    origin: Instant,
    /// The highest token that this client has seen, of any lock.
    highest_token: AtomicU64,
    /// The task that watches the masters without a vote.
    pub(super) watch: OnceLock<AbortHandle>,
}

pub(crate) struct Master {
    pub(super) link: Arc<ManagedConnection>,
    /// Host and port.
    pub(super) name: String,
    /// Requests without a reply that nobody awaits any more, in their order.
    stragglers: Mutex<VecDeque<PendingReply>>,
}

impl fmt::Debug for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Master").field(&self.name).finish()
    }
}

impl Masters {
    pub(super) fn new(
        all: Vec<Master>,
        rules: Rules,
        quarantine: Arc<RestartQuarantine>,
        inbox: Inbox,
        connection_io: ConnectionIo,
        namespace: &str,
    ) -> Self {
        Self {
            all,
            rules,
            quarantine,
            inbox,
            namespace: namespace.into(),
            for_holders: Places::new(rules.patience),
            for_others: Places::new(rules.patience),
            connection_io,
            origin: Instant::now(),
            highest_token: AtomicU64::new(0),
            watch: OnceLock::new(),
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.since_origin(Instant::now())
    }

    /// Returns a moment as `quorum` counts it.
    pub(super) fn since_origin(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.origin)
    }

    pub(super) fn at(&self, since_origin: Duration) -> Instant {
        self.origin + since_origin
    }

    /// Returns the highest token that this client has seen, of any lock.
    pub(super) fn highest_token(&self) -> u64 {
        self.highest_token.load(Ordering::Relaxed)
    }

    pub(super) fn saw(&self, token: u64) {
        self.highest_token.fetch_max(token, Ordering::Relaxed);
    }

    /// Returns whether a request to some master may come late, over a connection that was given up.
    pub(super) fn may_have_late_requests(&self) -> bool {
        self.all.iter().any(|master| master.link.may_have_late_requests())
    }

    /// Awaits the stragglers, as long as a round's replies, and drops the rest. A request without a reply keeps its connection
    /// open.
    pub(super) async fn drain_stragglers(&self) {
        let stragglers: Vec<_> = self.all.iter().flat_map(Master::take_stragglers).collect();
        if !stragglers.is_empty() && require_runtime(NAME, "close").is_ok() {
            let _ = tokio::time::timeout(self.rules.patience, join_all(stragglers)).await;
        }
    }

    /// Returns the error that too few masters took part.
    pub(super) fn no_quorum(&self, operation: &'static str, failures: &Failures) -> Error {
        let names: Vec<_> = self.all.iter().map(|master| &*master.name).collect();
        failures.to_error(operation, &names, self.rules)
    }
}

impl Drop for Masters {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.get() {
            watch.abort();
        }
    }
}

/// Returns the wall clock of this machine in µs. Tokens and the order of waiters go by it.
pub(super) fn wall_clock_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Failures: at which master, why, and whether they are permanent.
#[derive(Debug, Default)]
pub(super) struct Failures(Vec<(usize, String, bool)>);

impl Failures {
    pub(super) fn note(&mut self, master: usize, error: &Error) {
        self.0.push((master, reason(error), !error.is_transient()));
    }

    pub(super) fn note_reason(&mut self, master: usize, why: String) {
        self.0.push((master, why, false));
    }

    /// Notes masters whose counters are beyond every clock.
    pub(super) fn note_left_out(&mut self, masters: Vec<(usize, u64)>) {
        for (master, counter) in masters {
            let why = format!(
                "its counter of this lock's fencing tokens stands at {counter}, which nobody can have reached: set it to the \
                 highest that the others have"
            );
            self.note_reason(master, why);
        }
        self.0.sort_by_key(|(master, ..)| *master);
    }

    /// Notes that masters without a reply, and without a failure so far, took too long.
    fn note_late(&mut self, replied: &[bool], patience: Duration) {
        for (master, replied) in replied.iter().enumerate() {
            if !replied && !self.0.iter().any(|(failed, ..)| *failed == master) {
                self.0
                    .push((master, format!("no reply within {patience:?}"), false));
            }
        }
        self.0.sort_by_key(|(master, ..)| *master);
    }

    /// Returns the error that too few of the masters of these names took part.
    pub(super) fn to_error(&self, operation: &'static str, names: &[impl AsRef<str>], rules: Rules) -> Error {
        let mut text = format!(
            "{} of {} masters did not take part: ",
            self.0.len(),
            rules.masters
        );
        // A reason that several have is told once.
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for (master, why, _) in &self.0 {
            let name = names[*master].as_ref();
            match reasons.iter_mut().find(|(other, _)| other == why) {
                Some((_, those)) => those.push(name),
                None => reasons.push((why, vec![name])),
            }
        }
        let reasons: Vec<_> = reasons
            .into_iter()
            .map(|(why, those)| format!("{}: {why}", those.join(", ")))
            .collect();
        text.push_str(&reasons.join("; "));
        let permanent = self.0.iter().filter(|(_, _, permanent)| *permanent).count();
        if rules.masters - permanent < rules.quorum {
            Error::permanent(NAME, operation, text)
        } else {
            Error::transient(NAME, operation, text)
        }
    }
}

/// The masters' replies to a request: which masters have replied, and why others have not.
pub(super) struct Replies {
    operation: &'static str,
    /// The time that each had.
    patience: Duration,
    replied: Vec<bool>,
    pub(super) failures: Failures,
}

impl Replies {
    pub(super) fn new(masters: &Masters, operation: &'static str, patience: Duration) -> Self {
        Self {
            operation,
            patience,
            replied: vec![false; masters.all.len()],
            failures: Failures::default(),
        }
    }

    /// Returns what `read` makes of a master's reply, or notes a failure if it is no valid one.
    pub(super) fn read<T>(
        &mut self,
        master: usize,
        reply: Result<Value>,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Option<T> {
        let outcome = reply.and_then(|reply| read(&reply).ok_or_else(|| unexpected(self.operation, &reply)));
        match outcome {
            Ok(reply) => {
                self.replied[master] = true;
                Some(reply)
            }
            Err(err) => {
                self.failures.note(master, &err);
                None
            }
        }
    }

    /// Returns why masters took no part. After the deadline, those without a reply were too late.
    pub(super) fn failures(self, masters: &Masters, deadline: Duration) -> Failures {
        let mut failures = self.failures;
        if masters.now() >= deadline {
            failures.note_late(&self.replied, self.patience);
        }
        failures
    }
}

/// The kind of reply that a request gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    Vote,
    Confirmation,
    Report,
}

/// A master's reply to a request.
pub(super) struct Response {
    pub(super) master: usize,
    pub(super) kind: RequestKind,
    pub(super) reply: Result<Value>,
}

/// A request without a reply so far.
pub(super) struct PendingRequest {
    master: usize,
    kind: RequestKind,
    live: Arc<Connection>,
    is_full_script: bool,
    /// Handed to the connection.
    is_sent: bool,
    reply: PendingReply,
}

/// Resolves to the request and its reply.
type PendingReply = Pin<Box<dyn Future<Output = (Call, RedisResult<Value>)> + Send>>;

/// Requests to several masters at once.
///
/// A request takes effect even if nobody awaits its reply any longer. It is handed to its connection when it is first
/// polled, and [`next`](Self::next) polls all requests before it returns. The connection's task writes it a moment later, but
/// drops it if nobody awaits it by then. So each [`Master`] keeps the requests without a reply for a while.
pub(super) struct Requests {
    masters: Arc<Masters>,
    operation: &'static str,
    pending: Vec<PendingRequest>,
    responses: VecDeque<Response>,
    /// The deadline, and a timer for it or for some time after.
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
    /// The delay of the connections when the requests were made.
    delay_before: Duration,
}

impl Requests {
    pub(super) fn new(masters: &Arc<Masters>, operation: &'static str) -> Self {
        Self {
            masters: masters.clone(),
            operation,
            pending: Vec::with_capacity(masters.all.len()),
            responses: VecDeque::new(),
            timer: None,
            delay_before: masters.connection_io.delay(),
        }
    }

    /// Sends a request to `master`. `call` makes it, from the marker with which that master has a vote.
    pub(super) fn ask(&mut self, master: usize, kind: RequestKind, call: impl FnOnce(&str) -> Call) {
        match self.masters.all[master].link.current(self.operation) {
            Ok(live) => {
                let call = call(live.server().marker());
                self.send(master, kind, live, call, false);
            }
            Err(err) => self.responses.push_back(Response {
                master,
                kind,
                reply: Err(err),
            }),
        }
    }

    pub(super) fn ask_all(&mut self, kind: RequestKind, call: impl Fn(&str) -> Call) {
        for master in 0..self.masters.all.len() {
            self.ask(master, kind, &call);
        }
    }

    fn send(
        &mut self,
        master: usize,
        kind: RequestKind,
        live: Arc<Connection>,
        call: Call,
        is_full_script: bool,
    ) {
        let (link, on) = (self.masters.all[master].link.clone(), live.clone());
        // Tokio refuses a task that has used up its budget room in the connection's queue, even if there is some.
        let reply = tokio::task::unconstrained(async move {
            let reply = link.send(&on, &call.command).await;
            (call, reply)
        });
        self.pending.push(PendingRequest {
            master,
            kind,
            live,
            is_full_script,
            is_sent: false,
            reply: Box::pin(reply),
        });
    }

    /// Returns the next response, or `None` if there is none before `deadline`. Time in which this client did not get to write
    /// requests and to read replies does not count.
    pub(super) async fn next(&mut self, deadline: Instant) -> Option<Response> {
        self.next_by(deadline, true).await
    }

    /// Returns the next response, or `None` if there is none before `deadline`, also where this client did not get to read it.
    pub(super) async fn next_if_soon(&mut self, deadline: Instant) -> Option<Response> {
        self.next_by(deadline, false).await
    }

    async fn next_by(&mut self, deadline: Instant, extends: bool) -> Option<Response> {
        poll_fn(|cx| {
            self.poll_all(cx);
            if let Some(response) = self.responses.pop_front() {
                return Poll::Ready(Some(response));
            }
            if self.pending.is_empty() {
                return Poll::Ready(None);
            }
            let (due, timer) = self
                .timer
                .get_or_insert_with(|| (deadline, Box::pin(tokio::time::sleep_until(deadline))));
            if *due != deadline || (!extends && timer.deadline() > deadline) {
                *due = deadline;
                timer.as_mut().reset(deadline);
            }
            ready!(timer.as_mut().poll(cx));
            let delay = self
                .masters
                .connection_io
                .delay()
                .saturating_sub(self.delay_before);
            if !extends || timer.deadline() >= deadline + delay {
                return Poll::Ready(None);
            }
            timer.as_mut().reset(deadline + delay);
            if timer.as_mut().poll(cx).is_ready() {
                // The connections may be due at this moment: they come first.
                cx.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await
    }

    /// Returns the next response, however long it takes, or `None` if no request is left.
    pub(super) async fn next_unbounded(&mut self) -> Option<Response> {
        poll_fn(|cx| {
            self.poll_all(cx);
            match self.responses.pop_front() {
                None if !self.pending.is_empty() => Poll::Pending,
                response => Poll::Ready(response),
            }
        })
        .await
    }

    /// Returns the next response that is there already.
    pub(super) async fn try_next(&mut self) -> Option<Response> {
        if self.responses.is_empty() {
            self.send_all().await;
        }
        self.responses.pop_front()
    }

    /// Hands all requests to their connections, and waits for no reply.
    pub(super) async fn send_all(&mut self) {
        poll_fn(|cx| {
            self.poll_all(cx);
            Poll::Ready(())
        })
        .await;
    }

    fn poll_all(&mut self, cx: &mut Context<'_>) {
        let mut at = 0;
        while at < self.pending.len() {
            let request = &mut self.pending[at];
            request.is_sent = true;
            let Poll::Ready((call, reply)) = request.reply.as_mut().poll(cx) else {
                at += 1;
                continue;
            };
            let PendingRequest {
                master,
                kind,
                live,
                is_full_script,
                ..
            } = self.pending.remove(at);
            if reply.as_ref().is_err_and(is_unknown_script) && !is_full_script {
                // The server forgot the script.
                self.send(master, kind, live, call.into_full(), true);
                continue;
            }
            let reply = reply.map_err(|error| failed_at(self.operation, &error, None, OF_SEVERAL));
            self.responses.push_back(Response { master, kind, reply });
        }
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        for request in self.pending.drain(..).filter(|request| request.is_sent) {
            self.masters.all[request.master].keep_straggler(request.reply);
        }
    }
}

impl Master {
    /// The most stragglers to keep. A master that is so far behind hangs.
    const MAX_STRAGGLERS: usize = 256;

    pub(super) fn new(link: Arc<ManagedConnection>, name: String) -> Self {
        Self {
            link,
            name,
            stragglers: Mutex::default(),
        }
    }

    fn take_stragglers(&self) -> VecDeque<PendingReply> {
        std::mem::take(&mut *self.stragglers.lock())
    }

    /// Keeps a request until its reply is there, so that it is sent. Replies come in the order of their requests.
    fn keep_straggler(&self, request: PendingReply) {
        let mut stragglers = self.stragglers.lock();
        let mut cx = Context::from_waker(Waker::noop());
        while let Some(first) = stragglers.front_mut() {
            if first.as_mut().poll(&mut cx).is_pending() {
                break;
            }
            stragglers.pop_front();
        }
        if stragglers.len() >= Self::MAX_STRAGGLERS {
            stragglers.pop_front();
        }
        stragglers.push_back(request);
    }
}
