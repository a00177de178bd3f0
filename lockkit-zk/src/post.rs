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
    fault::{Fault, Result},
    session::Litter,
};

/// How long a waiter may take to come when it is its turn.
const COMES_WITHIN: Duration = Duration::from_secs(1);
/// The time that an attempt may stand still, or a hold be over and its node be there, at least.
const GOES_ON_WITHIN: Duration = Duration::from_secs(10);

/// A node, and when it was last looked after.
#[derive(Debug)]
pub(crate) struct Post(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    state: State,
    /// What to remove if nobody looks after it any more; `None` once nothing is left to remove.
    litter: Option<Litter>,
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
    Dismissed,
}

impl Post {
    pub(crate) fn new(litter: Litter, ttl: Duration) -> Self {
        Self(Mutex::new(Inner {
            state: State::Asking(Instant::now()),
            litter: Some(litter),
            patience: ttl.max(GOES_ON_WITHIN),
        }))
    }

    /// From now on this is to be removed.
    pub(crate) fn is_now(&self, litter: Litter) {
        let mut inner = self.inner();
        if inner.litter.is_some() {
            inner.litter = Some(litter);
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
        if inner.state == State::Dismissed {
            return Err(Fault::Dismissed);
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
    pub(crate) fn take_litter(&self) -> Option<Litter> {
        self.inner().litter.take()
    }

    /// Takes the node away from whoever does not look after it. What is to be removed for that comes back. Nobody could do
    /// anything before there was a connection, `since` then.
    pub(crate) fn dismiss_if_forsaken(&self, now: Instant, since: Instant) -> Option<Litter> {
        let mut inner = self.inner();
        let (at, limit) = match inner.state {
            State::Called(at) => (at, COMES_WITHIN),
            // Of a hold that is over, a renewal or a release may stand still.
            State::Asking(at) | State::Held(at) => (at, inner.patience),
            State::Waiting | State::Dismissed => return None,
        };
        if now < at.max(since) + limit {
            return None;
        }
        inner.state = State::Dismissed;
        inner.litter.take()
    }

    fn called(&self) {
        let mut inner = self.inner();
        if inner.state == State::Waiting {
            inner.state = State::Called(Instant::now());
        }
    }

    fn becomes(&self, state: State) -> bool {
        let mut inner = self.inner();
        if inner.state == State::Dismissed {
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
pub(crate) struct Calls {
    post: Arc<Post>,
    waker: Option<Waker>,
}

impl Calls {
    pub(crate) fn waker(post: &Arc<Post>, waker: Option<&Waker>) -> Waker {
        Waker::from(Arc::new(Self {
            post: post.clone(),
            waker: waker.cloned(),
        }))
    }
}

impl Wake for Calls {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.post.called();
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn post() -> Post {
        Post::new(Litter::At("/n".to_owned()), Duration::from_secs(3))
    }

    /// On a connection that is older than all else.
    fn dismissed(post: &Post, after: Duration) -> Option<Litter> {
        let now = Instant::now();
        post.dismiss_if_forsaken(now + after, now)
    }

    fn is_dismissed(post: &Post, after: Duration) -> bool {
        dismissed(post, after).is_some()
    }

    #[test]
    fn who_is_called_and_does_not_come_is_dismissed() {
        let post = Arc::new(post());
        assert!(post.waits());
        assert!(
            !is_dismissed(&post, Duration::from_secs(1_000)),
            "it may wait for ever"
        );
        Calls::waker(&post, None).wake();
        assert!(!is_dismissed(&post, COMES_WITHIN / 2));
        assert!(is_dismissed(&post, COMES_WITHIN));
        assert!(
            !post.asks() && !post.holds(Instant::now()) && !post.waits(),
            "there is no way back"
        );
        assert_eq!(post.take_litter(), None);
        let asked = post.asks_by(|| "for a node that nobody would remove");
        assert!(matches!(asked, Err(Fault::Dismissed)));
    }

    #[test]
    fn who_comes_in_time_or_holds_is_not() {
        let post = Arc::new(post());
        assert!(post.waits());
        Calls::waker(&post, None).wake();
        assert!(post.asks());
        assert!(!is_dismissed(&post, COMES_WITHIN));
        assert!(post.holds(Instant::now() + Duration::from_secs(1_000)));
        Calls::waker(&post, None).wake();
        assert!(!is_dismissed(&post, Duration::from_secs(1_000)));
        assert_eq!(post.take_litter(), Some(Litter::At("/n".to_owned())));
    }

    #[test]
    fn a_hold_is_dismissed_when_it_has_long_been_over() {
        let post = post();
        let lease = Duration::from_secs(5);
        for _ in 0..2 {
            assert!(post.holds(Instant::now() + lease));
            assert!(!is_dismissed(&post, lease + GOES_ON_WITHIN / 2));
        }
        assert!(is_dismissed(&post, lease + GOES_ON_WITHIN));
        assert!(!post.holds(Instant::now() + lease), "it is not renewed");
    }

    #[test]
    fn an_attempt_that_stands_still_is_dismissed() {
        let post = post();
        post.is_now(Litter::At("/m".to_owned()));
        assert!(!is_dismissed(&post, GOES_ON_WITHIN / 2));
        let later = Instant::now() + GOES_ON_WITHIN;
        let at_once = post.dismiss_if_forsaken(later, later - GOES_ON_WITHIN / 2);
        assert_eq!(at_once, None, "it may have waited for the connection");
        assert_eq!(
            dismissed(&post, GOES_ON_WITHIN),
            Some(Litter::At("/m".to_owned()))
        );
    }
}
