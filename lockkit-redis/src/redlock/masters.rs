//! The masters, and requests to all of them at once.

use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::future::join_all;
use lockkit_core::{BoxError, Error, Result};
use redis::{RedisResult, Value};
use tokio::{
    task::AbortHandle,
    time::{Instant, Sleep},
};

use crate::{
    connection::{Connection, Inbox, ManagedConnection, is_unknown_script, reason},
    error::failed,
    redlock::{NAME, guard::Guard, quorum::Rules},
    script::Call,
};

/// What the claims of a client share.
#[derive(Debug)]
pub(crate) struct Masters {
    pub(super) all: Vec<Master>,
    pub(super) rules: Rules,
    pub(super) guard: Arc<Guard>,
    pub(super) inbox: Inbox,
    pub(super) namespace: Arc<str>,
    /// Where the clock of the rounds begins.
    origin: Instant,
    /// The highest token seen so far.
    highest: AtomicU64,
    /// The task that watches over those without a vote.
    pub(super) watch: OnceLock<AbortHandle>,
}

pub(crate) struct Master {
    pub(super) link: Arc<ManagedConnection>,
    /// Host and port.
    pub(super) name: String,
    /// Requests without a reply that nobody waits for any more.
    stragglers: Mutex<VecDeque<Reply>>,
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
        guard: Arc<Guard>,
        inbox: Inbox,
        namespace: &str,
    ) -> Self {
        Self {
            all,
            rules,
            guard,
            inbox,
            namespace: namespace.into(),
            origin: Instant::now(),
            highest: AtomicU64::new(0),
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

    /// The highest token seen so far, of whatever lock.
    pub(super) fn highest(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    pub(super) fn saw(&self, token: u64) {
        self.highest.fetch_max(token, Ordering::Relaxed);
    }

    /// Waits for the answers that nobody waits for, as long as for those of a round, and gives up the rest. A request
    /// without an answer keeps its connection open.
    pub(super) async fn settle(&self) {
        let stragglers: Vec<_> = self.all.iter().flat_map(Master::take_stragglers).collect();
        if !stragglers.is_empty() && require_runtime("close").is_ok() {
            let _ = tokio::time::timeout(self.rules.patience, join_all(stragglers)).await;
        }
    }

    /// Why too few masters took part.
    pub(super) fn undecided(&self, operation: &'static str, failures: &Failures) -> Error {
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

/// The time of this machine in µs, with which tokens and places in a line begin.
pub(super) fn micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// What went wrong: at which master, why, and whether asking again is of no use.
#[derive(Debug, Default)]
pub(super) struct Failures(Vec<(usize, String, bool)>);

impl Failures {
    pub(super) fn note(&mut self, master: usize, error: &Error) {
        self.0.push((master, reason(error), !error.is_transient()));
    }

    pub(super) fn say(&mut self, master: usize, why: String) {
        self.0.push((master, why, false));
    }

    /// These masters' counters of tokens stand where no clock has been.
    pub(super) fn left_out(&mut self, masters: Vec<(usize, u64)>) {
        for (master, counter) in masters {
            let why = format!(
                "its counter of this lock's fencing tokens stands at {counter}, which nobody can have reached: set it to the \
                 highest that the others have"
            );
            self.say(master, why);
        }
        self.0.sort_by_key(|(master, ..)| *master);
    }

    /// Every other of `masters` that is not in `answered` took too long.
    pub(super) fn late(&mut self, answered: &[bool], patience: Duration) {
        for (master, answered) in answered.iter().enumerate() {
            if !answered && !self.0.iter().any(|(failed, ..)| *failed == master) {
                self.0
                    .push((master, format!("no answer within {patience:?}"), false));
            }
        }
        self.0.sort_by_key(|(master, ..)| *master);
    }

    /// Too few of the masters of these names took part.
    pub(super) fn to_error(&self, operation: &'static str, names: &[impl AsRef<str>], rules: Rules) -> Error {
        let mut text = format!(
            "{} of {} masters did not take part: ",
            self.0.len(),
            rules.masters
        );
        for (n, (master, why, _)) in self.0.iter().enumerate() {
            text.push_str(if n == 0 { "" } else { "; " });
            text.push_str(names[*master].as_ref());
            text.push_str(": ");
            text.push_str(why);
        }
        let permanent = self.0.iter().filter(|(_, _, permanent)| *permanent).count();
        if rules.masters - permanent < rules.quorum {
            Error::permanent(NAME, operation, text)
        } else {
            Error::transient(NAME, operation, text)
        }
    }
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Vote,
    Confirmation,
    Report,
}

/// The answer of a master.
pub(super) struct Answer {
    pub(super) master: usize,
    pub(super) kind: Kind,
    pub(super) reply: Result<Value>,
}

/// A request on its way.
pub(super) struct Pending {
    master: usize,
    kind: Kind,
    live: Arc<Connection>,
    is_in_full: bool,
    /// It has been handed to the connection.
    is_sent: bool,
    reply: Reply,
}

/// With what was asked.
type Reply = Pin<Box<dyn Future<Output = (Call, RedisResult<Value>)> + Send>>;

/// Requests that are under way, on the connections of several masters at once.
///
/// Those that nobody waits for any longer take effect all the same. A request is handed to its connection when it is first
/// polled, and [`next`](Self::next) polls all of them before it returns anything. The connection's own task writes it a
/// moment later, unless whoever asked is gone by then; so those without a reply are kept by the [`Masters`] for a while.
pub(super) struct Requests {
    masters: Arc<Masters>,
    operation: &'static str,
    pending: Vec<Pending>,
    answers: VecDeque<Answer>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Requests {
    pub(super) fn new(masters: &Arc<Masters>, operation: &'static str) -> Self {
        Self {
            masters: masters.clone(),
            operation,
            pending: Vec::with_capacity(masters.all.len()),
            answers: VecDeque::new(),
            timer: None,
        }
    }

    /// Asks `master`, by what `call` makes for the marker with which it has a vote.
    pub(super) fn ask(&mut self, master: usize, kind: Kind, call: impl FnOnce(&str) -> Call) {
        match self.masters.all[master].link.current(self.operation) {
            Ok(live) => {
                let call = call(live.server().marker());
                self.send(master, kind, live, call, false);
            }
            Err(err) => self.answers.push_back(Answer {
                master,
                kind,
                reply: Err(err),
            }),
        }
    }

    pub(super) fn ask_all(&mut self, kind: Kind, call: impl Fn(&str) -> Call) {
        for master in 0..self.masters.all.len() {
            self.ask(master, kind, &call);
        }
    }

    fn send(&mut self, master: usize, kind: Kind, live: Arc<Connection>, call: Call, is_in_full: bool) {
        let (link, on) = (self.masters.all[master].link.clone(), live.clone());
        // A task that has used up its turn is refused the room in the queue to the connection, even if there is some.
        let reply = tokio::task::unconstrained(async move {
            let reply = link.send(&on, &call.command).await;
            (call, reply)
        });
        self.pending.push(Pending {
            master,
            kind,
            live,
            is_in_full,
            is_sent: false,
            reply: Box::pin(reply),
        });
    }

    /// The next answer, or `None` if there is none before `deadline`.
    pub(super) async fn next(&mut self, deadline: Instant) -> Option<Answer> {
        poll_fn(|cx| {
            self.poll_all(cx);
            if let Some(answer) = self.answers.pop_front() {
                return Poll::Ready(Some(answer));
            }
            if self.pending.is_empty() {
                return Poll::Ready(None);
            }
            let timer = self
                .timer
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
            if timer.deadline() != deadline {
                timer.as_mut().reset(deadline);
            }
            timer.as_mut().poll(cx).map(|()| None)
        })
        .await
    }

    /// The next answer, however long it takes; `None` if there is none to come.
    pub(super) async fn late(&mut self) -> Option<Answer> {
        poll_fn(|cx| {
            self.poll_all(cx);
            match self.answers.pop_front() {
                None if !self.pending.is_empty() => Poll::Pending,
                answer => Poll::Ready(answer),
            }
        })
        .await
    }

    /// The next answer, if there is one by now.
    pub(super) async fn at_hand(&mut self) -> Option<Answer> {
        if self.answers.is_empty() {
            self.hand_over().await;
        }
        self.answers.pop_front()
    }

    /// Hands over what was asked, and waits for none of it.
    pub(super) async fn hand_over(&mut self) {
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
            let Pending {
                master,
                kind,
                live,
                is_in_full,
                ..
            } = self.pending.remove(at);
            if reply.as_ref().is_err_and(is_unknown_script) && !is_in_full {
                // The server forgot it.
                self.send(master, kind, live, call.into_full(), true);
                continue;
            }
            let reply = reply.map_err(|error| failed(self.operation, error));
            self.answers.push_back(Answer { master, kind, reply });
        }
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        for request in self.pending.drain(..).filter(|request| request.is_sent) {
            self.masters.all[request.master].keep(request.reply);
        }
    }
}

impl Master {
    /// The most replies to be kept track of that nobody waits for. A connection that is so far behind leads to a master
    /// that hangs.
    const MOST: usize = 256;

    pub(super) fn new(link: Arc<ManagedConnection>, name: String) -> Self {
        Self {
            link,
            name,
            stragglers: Mutex::default(),
        }
    }

    fn stragglers(&self) -> MutexGuard<'_, VecDeque<Reply>> {
        self.stragglers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_stragglers(&self) -> VecDeque<Reply> {
        std::mem::take(&mut *self.stragglers())
    }

    /// Keeps a request until it is answered, so that it is sent. They are answered in their order.
    fn keep(&self, request: Reply) {
        let mut stragglers = self.stragglers();
        let mut cx = Context::from_waker(Waker::noop());
        while let Some(first) = stragglers.front_mut() {
            if first.as_mut().poll(&mut cx).is_pending() {
                break;
            }
            stragglers.pop_front();
        }
        if stragglers.len() >= Self::MOST {
            stragglers.pop_front();
        }
        stragglers.push_back(request);
    }
}

/// Timers need one.
pub(super) fn require_runtime(operation: &'static str) -> Result<()> {
    match tokio::runtime::Handle::try_current() {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::permanent(
            NAME,
            operation,
            BoxError::from("this must be awaited within a Tokio runtime"),
        )),
    }
}
