//! The future by which the worker keeps one hold alive. The worker polls it; the release of the hold drops it in place.
//!
//! To ask the worker for the claim and to wait for it would be two changes of thread. On an otherwise idle machine they take
//! longer than a round trip to a server nearby.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use crate::sync::Mutex;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The future of one hold. There is none before it has started, and none once it is over.
#[derive(Default)]
pub(crate) struct KeepAlive(Mutex<Option<Task>>);

impl KeepAlive {
    pub(crate) fn start(&self, task: impl Future<Output = ()> + Send + 'static) {
        *self.0.lock() = Some(Box::pin(task));
    }

    /// Ready when the future is over, by itself or because it was stopped.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut slot = self.0.lock();
        if let Some(task) = slot.as_mut() {
            ready!(task.as_mut().poll(cx));
        }
        let over = slot.take();
        drop(slot);
        drop(over);
        Poll::Ready(())
    }

    /// Drops the future, which gives back what it has borrowed. Does nothing while the future is being polled.
    pub(crate) fn stop(&self) {
        // Dropped after the lock was let go, since its end may wake others.
        let task = self.0.try_lock().and_then(|mut slot| slot.take());
        drop(task);
    }

    /// Drops the future, after waiting for a poll to end.
    pub(crate) fn wait_and_stop(&self) {
        let task = self.0.lock().take();
        drop(task);
    }
}

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeepAlive").finish_non_exhaustive()
    }
}
