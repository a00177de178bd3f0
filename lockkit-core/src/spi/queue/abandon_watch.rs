//! Detects abandoned claims, so that their entries can be deleted.
//!
//! A future that is neither polled nor dropped would keep its entry in the queue, and everyone behind it waiting. So the
//! session deletes the entry of a waiter that does not take its turn, of an attempt that stands still, and of a holder whose
//! lease ended long ago. A claim that is polled again after that queues anew. If it had not asked for its entry by then, it
//! never asks for that one.

use std::{
    fmt,
    sync::Arc,
    task::{Wake, Waker},
    time::Duration,
};

use tokio::time::Instant;

use crate::{spi::Mutex, sync::MutexGuard};

/// The time within which a waiter has to take its turn.
const TURN_LIMIT: Duration = Duration::from_secs(1);
/// The least time that an attempt may stand still, and that a hold's entry may outlast its lease.
const MIN_STALL_LIMIT: Duration = Duration::from_secs(10);

/// An entry in the queue, and the last sign that its claim is looked after.
#[derive(Debug)]
pub struct AbandonWatch<E>(Mutex<Inner<E>>);

/// The entry was taken away, since its claim was not polled in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "there is nothing more to say")]
pub struct Abandoned;

impl fmt::Display for Abandoned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the acquisition was not polled in time, so that its place in the queue was given up")
    }
}

impl std::error::Error for Abandoned {}

#[derive(Debug)]
struct Inner<E> {
    state: State,
    /// The entry to delete if the claim is abandoned; `None` once nothing is left to delete.
    pending_delete: Option<E>,
    stall_limit: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// An attempt began then, and goes on or has failed.
    Attempting(Instant),
    /// The claim waits for others.
    Waiting,
    /// One of those others went then. No attempt has begun since.
    Notified(Instant),
    /// The claim holds. Its lease ends then, unless it is renewed.
    Held(Instant),
    /// The entry was taken away. Nothing leads out of this state.
    Abandoned,
}

impl<E> AbandonWatch<E> {
    /// Begins with an attempt, for an entry that is about to be asked for, and a claim with this ttl.
    pub fn new(pending_delete: E, ttl: Duration) -> Self {
        Self(Mutex::new(Inner {
            state: State::Attempting(Instant::now()),
            pending_delete: Some(pending_delete),
            stall_limit: ttl.max(MIN_STALL_LIMIT),
        }))
    }

    /// Replaces the entry to delete, unless nothing is left to delete.
    pub fn set_pending_delete(&self, entry: E) {
        let mut inner = self.inner();
        if inner.pending_delete.is_some() {
            inner.pending_delete = Some(entry);
        }
    }

    /// Notes that an attempt begins. This, [`wait`](Self::wait) and [`hold`](Self::hold) return `false` if the entry was
    /// taken away.
    pub fn attempt(&self) -> bool {
        self.enter(State::Attempting(Instant::now()))
    }

    /// Notes that an attempt ends without a grant.
    pub fn wait(&self) -> bool {
        self.enter(State::Waiting)
    }

    /// Notes a grant or a renewal, with a lease until then.
    pub fn hold(&self, until: Instant) -> bool {
        self.enter(State::Held(until))
    }

    /// Sends a request that makes or deletes the entry. Both happen under one mutex: whoever takes the entry away looks for it after
    /// that.
    ///
    /// # Errors
    /// [`Abandoned`] if the entry was taken away. The request was not sent.
    pub fn send<T>(&self, request: impl FnOnce() -> T) -> Result<T, Abandoned> {
        let mut inner = self.inner();
        if inner.state == State::Abandoned {
            return Err(Abandoned);
        }
        inner.state = State::Attempting(Instant::now());
        Ok(request())
    }

    /// Takes the duty to delete the entry. Call it if there is no entry, or if the caller deletes it.
    pub fn take_pending_delete(&self) -> Option<E> {
        self.inner().pending_delete.take()
    }

    /// Takes the entry away if its claim is abandoned, and returns the entry to delete. Time counts from `connected` at the
    /// earliest: without a connection no claim can go on.
    pub fn take_if_abandoned(&self, now: Instant, connected: Instant) -> Option<E> {
        let mut inner = self.inner();
        let (since, limit) = match inner.state {
            State::Notified(at) => (at, TURN_LIMIT),
            // After a hold's lease a renewal or a release may stand still.
            State::Attempting(at) | State::Held(at) => (at, inner.stall_limit),
            State::Waiting | State::Abandoned => return None,
        };
        if now < since.max(connected) + limit {
            return None;
        }
        inner.state = State::Abandoned;
        inner.pending_delete.take()
    }

    fn notify(&self) {
        let mut inner = self.inner();
        if inner.state == State::Waiting {
            inner.state = State::Notified(Instant::now());
        }
    }

    fn enter(&self, state: State) -> bool {
        let mut inner = self.inner();
        if inner.state == State::Abandoned {
            return false;
        }
        inner.state = state;
        true
    }

    fn inner(&self) -> MutexGuard<'_, Inner<E>> {
        self.0.lock()
    }
}

/// Notes that a watch has told an event, and wakes the waiter if there is one.
pub struct NotifyingWaker<E> {
    abandon_watch: Arc<AbandonWatch<E>>,
    waiter: Option<Waker>,
}

impl<E: Send + 'static> NotifyingWaker<E> {
    /// Makes a waker for the watches of those that a claim waits for. Note the waiter's own, if it listens.
    pub fn waker(abandon_watch: &Arc<AbandonWatch<E>>, waiter: Option<&Waker>) -> Waker {
        Waker::from(Arc::new(Self {
            abandon_watch: abandon_watch.clone(),
            waiter: waiter.cloned(),
        }))
    }
}

impl<E: Send + 'static> Wake for NotifyingWaker<E> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.abandon_watch.notify();
        if let Some(waiter) = &self.waiter {
            waiter.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched() -> AbandonWatch<&'static str> {
        AbandonWatch::new("n", Duration::from_secs(3))
    }

    /// Asks `after` so long, on a connection that is older than all else.
    fn taken(watched: &AbandonWatch<&'static str>, after: Duration) -> Option<&'static str> {
        let now = Instant::now();
        watched.take_if_abandoned(now + after, now)
    }

    fn is_taken(watched: &AbandonWatch<&'static str>, after: Duration) -> bool {
        taken(watched, after).is_some()
    }

    #[test]
    fn a_waiter_that_misses_its_turn_is_abandoned() {
        let watched = Arc::new(watched());
        assert!(watched.wait());
        assert!(
            !is_taken(&watched, Duration::from_secs(1_000)),
            "it may wait for ever"
        );
        NotifyingWaker::waker(&watched, None).wake();
        assert!(!is_taken(&watched, TURN_LIMIT / 2));
        assert!(is_taken(&watched, TURN_LIMIT));
        assert!(
            !watched.attempt() && !watched.hold(Instant::now()) && !watched.wait(),
            "there is no way back"
        );
        assert_eq!(watched.take_pending_delete(), None);
        let sent = watched.send(|| "a request for an entry that nobody would delete");
        assert!(matches!(sent, Err(Abandoned)));
    }

    #[test]
    fn a_waiter_in_time_and_a_holder_are_not_abandoned() {
        let watched = Arc::new(watched());
        assert!(watched.wait());
        NotifyingWaker::waker(&watched, None).wake();
        assert!(watched.attempt());
        assert!(!is_taken(&watched, TURN_LIMIT));
        assert!(watched.hold(Instant::now() + Duration::from_secs(1_000)));
        NotifyingWaker::waker(&watched, None).wake();
        assert!(!is_taken(&watched, Duration::from_secs(1_000)));
        assert_eq!(watched.take_pending_delete(), Some("n"));
    }

    #[test]
    fn a_hold_is_abandoned_long_after_its_lease() {
        let watched = watched();
        let lease = Duration::from_secs(5);
        for _ in 0..2 {
            assert!(watched.hold(Instant::now() + lease));
            assert!(!is_taken(&watched, lease + MIN_STALL_LIMIT / 2));
        }
        assert!(is_taken(&watched, lease + MIN_STALL_LIMIT));
        assert!(!watched.hold(Instant::now() + lease), "it is not renewed");
    }

    #[test]
    fn an_attempt_that_stands_still_is_abandoned() {
        let watched = watched();
        watched.set_pending_delete("m");
        assert!(!is_taken(&watched, MIN_STALL_LIMIT / 2));
        let later = Instant::now() + MIN_STALL_LIMIT;
        let at_once = watched.take_if_abandoned(later, later - MIN_STALL_LIMIT / 2);
        assert_eq!(at_once, None, "it may have waited for the connection");
        assert_eq!(taken(&watched, MIN_STALL_LIMIT), Some("m"));
    }
}
