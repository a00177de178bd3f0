//! The metrics of a client.
//!
//! Their handles are made once, at the client's first acquisition, so that a metric costs no look-up, and so that a counter is
//! there, at zero, before its first event. There is no label for the name of a lock: a program may use any number of names, and
//! a time series for each of them would be more than a database of metrics can bear.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
};

use metrics::{Counter, Gauge, Histogram, Label, Unit};
use tokio::time::Instant;

use crate::{
    Result,
    driver::observe::{End, Outcome},
};

label! {
    /// The result of a request to the server.
    Answer {
        Ok = "ok",
        Error = "error",
        /// There was none before the time was over, the client closed, or the caller dropped the future.
        None = "unanswered",
    }
}

/// The operations that ask the server something, as errors name them. Another one counts as the last.
const OPERATIONS: [&str; 11] = [
    "acquire",
    "renew",
    "downgrade",
    "adopt",
    "release",
    "inspect",
    "list",
    "revoke",
    "watch",
    "announce",
    "other",
];

/// The handles of one client's metrics. Clones are the same handles.
#[derive(Clone)]
pub(crate) struct Meters(Arc<Lazy>);

struct Lazy {
    backend: &'static str,
    handles: OnceLock<Handles>,
}

struct Handles {
    waiters: Gauge,
    holds: Gauge,
    acquisitions: ByLabel<Counter>,
    waiting: ByLabel<Histogram>,
    holding: ByLabel<Histogram>,
    renewals: Histogram,
    requests: [(&'static str, ByLabel<Histogram>); OPERATIONS.len()],
    losses: ByLabel<Counter>,
    renewal_failures: Counter,
    release_failures: Counter,
}

/// A handle for each value of a label, in the order of their declaration.
struct ByLabel<H>(Vec<H>);

impl<H> ByLabel<H> {
    fn new<L: Copy>(values: &[L], handle: impl Fn(L) -> H) -> Self {
        Self(values.iter().copied().map(handle).collect())
    }
}

impl Handles {
    /// Makes the handles with the recorder that is installed now, and describes the metrics to it.
    fn new(backend: &'static str) -> Self {
        let of = Of(backend);
        Self {
            waiters: of.gauge("lockkit_waiters", "Acquisitions under way."),
            holds: of.gauge("lockkit_holds", "Locks and permits that are held."),
            acquisitions: ByLabel::new(Outcome::ALL, |outcome| {
                let what = "Acquisitions that ended, by outcome.";
                of.counter(
                    "lockkit_acquisitions_total",
                    what,
                    &[("outcome", outcome.label())],
                )
            }),
            waiting: ByLabel::new(Outcome::ALL, |outcome| {
                let what = "Time from the call of acquire to its outcome.";
                of.histogram("lockkit_wait_seconds", what, &[("outcome", outcome.label())])
            }),
            holding: ByLabel::new(End::ALL, |end| {
                let what = "Time from the grant to the end of the hold, as its holder sees it.";
                of.histogram("lockkit_hold_seconds", what, &[("end", end.label())])
            }),
            renewals: of.histogram(
                "lockkit_renewal_seconds",
                "Time from the first request of a renewal to its success, with the repeats after failures.",
                &[],
            ),
            requests: OPERATIONS.map(|operation| {
                let answers = ByLabel::new(Answer::ALL, |answer| {
                    let what = "Time from a request to the server to its answer.";
                    let labels = [("operation", operation), ("outcome", answer.label())];
                    of.histogram("lockkit_request_seconds", what, &labels)
                });
                (operation, answers)
            }),
            losses: ByLabel::new(End::ALL, |end| match end {
                End::Released => Counter::noop(),
                reason => {
                    let what = "Holds that were lost, by reason.";
                    of.counter("lockkit_losses_total", what, &[("reason", reason.label())])
                }
            }),
            renewal_failures: of.counter(
                "lockkit_renewal_failures_total",
                "Renewals that failed and were tried again.",
                &[],
            ),
            release_failures: of.counter(
                "lockkit_release_failures_total",
                "Releases of dropped guards that failed, and releases that were never confirmed.",
                &[],
            ),
        }
    }
}

impl Meters {
    pub(crate) const ARE_ON: bool = true;

    pub(crate) fn new(backend: &'static str) -> Self {
        let handles = OnceLock::new();
        Self(Arc::new(Lazy { backend, handles }))
    }

    fn handles(&self) -> &Handles {
        let Lazy { backend, handles } = &*self.0;
        handles.get_or_init(|| Handles::new(backend))
    }

    pub(crate) fn begin_waiting(&self) {
        self.handles().waiters.increment(1);
    }

    pub(crate) fn end_waiting(&self, outcome: Outcome, began: Mark) {
        let handles = self.handles();
        handles.waiters.decrement(1);
        handles.acquisitions.0[outcome as usize].increment(1);
        handles.waiting.0[outcome as usize].record(began.0.elapsed());
    }

    pub(crate) fn begin_hold(&self) {
        self.handles().holds.increment(1);
    }

    pub(crate) fn held(&self, end: End, since: Mark) {
        self.handles().holding.0[end as usize].record(since.0.elapsed());
    }

    pub(crate) fn end_hold(&self) {
        self.handles().holds.decrement(1);
    }

    pub(crate) fn renewed(&self, began: Mark) {
        self.handles().renewals.record(began.0.elapsed());
    }

    pub(crate) fn renewal_failed(&self) {
        self.handles().renewal_failures.increment(1);
    }

    pub(crate) fn release_failed(&self) {
        self.handles().release_failures.increment(1);
    }

    pub(crate) fn lost(&self, end: End) {
        self.handles().losses.0[end as usize].increment(1);
    }

    /// Times an exchange with the server, which begins now, to its answer or its drop.
    pub(crate) fn request<F>(&self, operation: &'static str, exchange: F) -> Request<'_, F> {
        let requests = &self.handles().requests;
        let known = requests.iter().find(|(known, _)| *known == operation);
        let (_, answers) = known.unwrap_or(&requests[OPERATIONS.len() - 1]);
        Request {
            exchange,
            answers,
            began: Some(Instant::now()),
        }
    }
}

impl fmt::Debug for Meters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meters").finish_non_exhaustive()
    }
}

/// The backend whose metrics are made.
#[derive(Clone, Copy)]
struct Of(&'static str);

impl Of {
    fn labels(self, labels: &[(&'static str, &'static str)]) -> Vec<Label> {
        let all = [("backend", self.0)].into_iter().chain(labels.iter().copied());
        all.map(|(key, value)| Label::from_static_parts(key, value))
            .collect()
    }

    fn counter(
        self,
        name: &'static str,
        what: &'static str,
        labels: &[(&'static str, &'static str)],
    ) -> Counter {
        metrics::describe_counter!(name, Unit::Count, what);
        metrics::counter!(name, self.labels(labels))
    }

    fn gauge(self, name: &'static str, what: &'static str) -> Gauge {
        metrics::describe_gauge!(name, Unit::Count, what);
        metrics::gauge!(name, self.labels(&[]))
    }

    fn histogram(
        self,
        name: &'static str,
        what: &'static str,
        labels: &[(&'static str, &'static str)],
    ) -> Histogram {
        metrics::describe_histogram!(name, Unit::Seconds, what);
        metrics::histogram!(name, self.labels(labels))
    }
}

/// A moment to measure from, on the clock that timers run on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark(Instant);

impl Mark {
    pub(crate) fn now() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn at(moment: Instant) -> Self {
        Self(moment)
    }
}

/// An exchange with the server that is timed. It counts once: as unanswered if it is dropped before its answer.
pub(crate) struct Request<'a, F> {
    exchange: F,
    answers: &'a ByLabel<Histogram>,
    /// Unset once it has been counted.
    began: Option<Instant>,
}

impl<F> Request<'_, F> {
    fn end(&mut self, answer: Answer) {
        if let Some(began) = self.began.take() {
            self.answers.0[answer as usize].record(began.elapsed());
        }
    }
}

impl<T, F: Future<Output = Result<T>> + Unpin> Future for Request<'_, F> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let reply = ready!(Pin::new(&mut self.exchange).poll(cx));
        self.end(if reply.is_ok() { Answer::Ok } else { Answer::Error });
        Poll::Ready(reply)
    }
}

impl<F> Drop for Request<'_, F> {
    fn drop(&mut self) {
        self.end(Answer::None);
    }
}
