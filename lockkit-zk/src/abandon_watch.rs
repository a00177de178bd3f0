//! Whether whoever asked for a node still looks after it.
//!
//! A future that is neither polled nor dropped would keep its node in the queue, and everyone behind it waiting. So the
//! session takes away the node of a contender that does not come when it is its turn, or that began an attempt and
//! never went on with it, and that of a holder whose lease has long been over. Should the contender be polled again, it
//! queues anew: a node that had not been asked for by then never is.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Wake, Waker},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    error::{Failure, Result},
    session::PendingDelete,
};

/// How long a waiter may take to come when it is its turn.
const COMES_WITHIN: Duration = Duration::from_secs(1);
/// The time that an attempt may stand still, or a hold be over and its node be there, at least.
const GOES_ON_WITHIN: Duration = Duration::from_secs(10);

/// A node, and when it was last looked after.
#[derive(Debug)]
pub(crate) struct AbandonWatch(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    state: State,
    /// What to remove if nobody looks after it any more; `None` once nothing is left to remove.
    pending_delete: Option<PendingDelete>,
    patience: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is being asked for since then, or it was and that failed.
    Asking(Instant),
    /// It waits for others.
    Waiting,
    /// One of those others went, then, and it has not asked yet.
    Called(Instant),
    /// It is held, and nobody believes so for longer than this, unless it is renewed.
    Held(Instant),
    /// It was taken away.
    Abandoned,
}

impl AbandonWatch {
    pub(crate) fn new(pending_delete: PendingDelete, ttl: Duration) -> Self {
        Self(Mutex::new(Inner {
            state: State::Asking(Instant::now()),
            pending_delete: Some(pending_delete),
            patience: ttl.max(GOES_ON_WITHIN),
        }))
    }

    /// From now on this is to be removed.
    pub(crate) fn is_now(&self, pending_delete: PendingDelete) {
        let mut inner = self.inner();
        if inner.pending_delete.is_some() {
            inner.pending_delete = Some(pending_delete);
        }
    }

    /// An attempt begins. `false` if the node was taken away, here and below.
    pub(crate) fn asks(&self) -> bool {
        self.becomes(State::Asking(Instant::now()))
    }

    /// Has `send` ask the server for the node, or to delete it, unless it was taken away. Whoever takes it away looks for it
    /// over the same connection, and thereafter, or over a later one.
    pub(crate) fn asks_by<T>(&self, send: impl FnOnce() -> T) -> Result<T> {
        let mut inner = self.inner();
        if inner.state == State::Abandoned {
            return Err(Failure::Abandoned);
        }
        inner.state = State::Asking(Instant::now());
        Ok(send())
    }

    /// An attempt ends without a grant.
    pub(crate) fn waits(&self) -> bool {
        self.becomes(State::Waiting)
    }

    /// It is granted, or renewed: its lease ends then.
    pub(crate) fn holds(&self, until: Instant) -> bool {
        self.becomes(State::Held(until))
    }

    /// There is nothing to remove, or somebody else does it.
    pub(crate) fn take_pending_delete(&self) -> Option<PendingDelete> {
        self.inner().pending_delete.take()
    }

    /// Takes the node away from whoever does not look after it. What is to be removed for that comes back. Nobody could do
    /// anything before there was a connection, `since` then.
    pub(crate) fn take_if_abandoned(&self, now: Instant, since: Instant) -> Option<PendingDelete> {
        let mut inner = self.inner();
        let (at, limit) = match inner.state {
            State::Called(at) => (at, COMES_WITHIN),
            // Of a hold that is over, a renewal or a release may stand still.
            State::Asking(at) | State::Held(at) => (at, inner.patience),
            State::Waiting | State::Abandoned => return None,
        };
        if now < at.max(since) + limit {
            return None;
        }
        inner.state = State::Abandoned;
        inner.pending_delete.take()
    }

    fn called(&self) {
        let mut inner = self.inner();
        if inner.state == State::Waiting {
            inner.state = State::Called(Instant::now());
        }
    }

    fn becomes(&self, state: State) -> bool {
        let mut inner = self.inner();
        if inner.state == State::Abandoned {
            return false;
        }
        inner.state = state;
        true
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes whoever waits for a watch, and notes that it was told.
pub(crate) struct NotifiedWaker {
    abandon_watch: Arc<AbandonWatch>,
    waker: Option<Waker>,
}

impl NotifiedWaker {
    pub(crate) fn waker(abandon_watch: &Arc<AbandonWatch>, waker: Option<&Waker>) -> Waker {
        Waker::from(Arc::new(Self {
            abandon_watch: abandon_watch.clone(),
            waker: waker.cloned(),
        }))
    }
}

impl Wake for NotifiedWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.abandon_watch.called();
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn abandon_watch() -> AbandonWatch {
        AbandonWatch::new(PendingDelete::At("/n".to_owned()), Duration::from_secs(3))
    }

    /// On a connection that is older than all else.
    fn dismissed(abandon_watch: &AbandonWatch, after: Duration) -> Option<PendingDelete> {
        let now = Instant::now();
        abandon_watch.take_if_abandoned(now + after, now)
    }

    fn is_dismissed(abandon_watch: &AbandonWatch, after: Duration) -> bool {
        dismissed(abandon_watch, after).is_some()
    }

    #[test]
    fn who_is_called_and_does_not_come_is_dismissed() {
        let abandon_watch = Arc::new(abandon_watch());
        assert!(abandon_watch.waits());
        assert!(
            !is_dismissed(&abandon_watch, Duration::from_secs(1_000)),
            "it may wait for ever"
        );
        NotifiedWaker::waker(&abandon_watch, None).wake();
        assert!(!is_dismissed(&abandon_watch, COMES_WITHIN / 2));
        assert!(is_dismissed(&abandon_watch, COMES_WITHIN));
        assert!(
            !abandon_watch.asks() && !abandon_watch.holds(Instant::now()) && !abandon_watch.waits(),
            "there is no way back"
        );
        assert_eq!(abandon_watch.take_pending_delete(), None);
        let asked = abandon_watch.asks_by(|| "for a node that nobody would remove");
        assert!(matches!(asked, Err(Failure::Abandoned)));
    }

    #[test]
    fn who_comes_in_time_or_holds_is_not() {
        let abandon_watch = Arc::new(abandon_watch());
        assert!(abandon_watch.waits());
        NotifiedWaker::waker(&abandon_watch, None).wake();
        assert!(abandon_watch.asks());
        assert!(!is_dismissed(&abandon_watch, COMES_WITHIN));
        assert!(abandon_watch.holds(Instant::now() + Duration::from_secs(1_000)));
        NotifiedWaker::waker(&abandon_watch, None).wake();
        assert!(!is_dismissed(&abandon_watch, Duration::from_secs(1_000)));
        assert_eq!(
            abandon_watch.take_pending_delete(),
            Some(PendingDelete::At("/n".to_owned()))
        );
    }

    #[test]
    fn a_hold_is_dismissed_when_it_has_long_been_over() {
        let abandon_watch = abandon_watch();
        let lease = Duration::from_secs(5);
        for _ in 0..2 {
            assert!(abandon_watch.holds(Instant::now() + lease));
            assert!(!is_dismissed(&abandon_watch, lease + GOES_ON_WITHIN / 2));
        }
        assert!(is_dismissed(&abandon_watch, lease + GOES_ON_WITHIN));
        assert!(!abandon_watch.holds(Instant::now() + lease), "it is not renewed");
    }

    #[test]
    fn an_attempt_that_stands_still_is_dismissed() {
        let abandon_watch = abandon_watch();
        abandon_watch.is_now(PendingDelete::At("/m".to_owned()));
        assert!(!is_dismissed(&abandon_watch, GOES_ON_WITHIN / 2));
        let later = Instant::now() + GOES_ON_WITHIN;
        let at_once = abandon_watch.take_if_abandoned(later, later - GOES_ON_WITHIN / 2);
        assert_eq!(at_once, None, "it may have waited for the connection");
        assert_eq!(
            dismissed(&abandon_watch, GOES_ON_WITHIN),
            Some(PendingDelete::At("/m".to_owned()))
        );
    }
}
