//! A one-shot watch that remembers what it told.

use std::{
    fmt,
    future::poll_fn,
    panic::AssertUnwindSafe,
    task::{Context, Poll, Waker},
};

use futures_util::{FutureExt, future::BoxFuture};
use zookeeper_client::{EventType, OneshotWatcher};

/// The watch of one node.
pub(crate) struct Watch {
    event: BoxFuture<'static, Told>,
    told: Option<Told>,
}

/// What a watch has told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Deleted,
    /// Somebody wrote to the node.
    Written,
    /// The session, and with it the watch, has ended.
    Over,
}

impl Watch {
    pub(crate) fn new(watcher: OneshotWatcher) -> Self {
        // The client library panics if its task has gone with its runtime.
        let event = AssertUnwindSafe(watcher.changed()).catch_unwind();
        let event = event.map(|event| match event.map(|event| event.event_type) {
            Ok(EventType::NodeDeleted) => Told::Deleted,
            Ok(EventType::Session) | Err(_) => Told::Over,
            Ok(_) => Told::Written,
        });
        Self {
            event: event.boxed(),
            told: None,
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Told> {
        if let Some(told) = self.told {
            return Poll::Ready(told);
        }
        let told = self.event.poll_unpin(cx);
        if let Poll::Ready(told) = told {
            self.told = Some(told);
        }
        told
    }

    /// What it has told so far.
    pub(crate) fn look(&mut self) -> Option<Told> {
        match self.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(told) => Some(told),
            Poll::Pending => None,
        }
    }

    pub(crate) async fn told(&mut self) -> Told {
        poll_fn(|cx| self.poll(cx)).await
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("told", &self.told)
            .finish_non_exhaustive()
    }
}
