//! How the worker looks after one hold: a future that it polls, and that whoever releases the hold ends from there.
//!
//! To ask the worker for the claim and to wait for it would be two changes of thread, which on a machine with nothing
//! else to do take longer than a round trip to a server nearby.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use crate::sync::Mutex;

type Care = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A place for the future. There is none before it has begun, and none once it is over.
#[derive(Default)]
pub(crate) struct Attendance(Mutex<Option<Care>>);

impl Attendance {
    pub(crate) fn begin(&self, care: impl Future<Output = ()> + Send + 'static) {
        *self.0.lock() = Some(Box::pin(care));
    }

    /// Ready when it is over, by itself or because it was ended.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut place = self.0.lock();
        if let Some(care) = place.as_mut() {
            ready!(care.as_mut().poll(cx));
        }
        let over = place.take();
        drop(place);
        drop(over);
        Poll::Ready(())
    }

    /// Drops the future, and so gives back what it has borrowed, unless it is being polled at this very moment.
    pub(crate) fn end(&self) {
        // The future is dropped after the place was let go, since its end may wake others.
        let care = self.0.try_lock().and_then(|mut place| place.take());
        drop(care);
    }

    /// The same, also if it has to wait until a poll is over.
    pub(crate) fn end_at_last(&self) {
        let care = self.0.lock().take();
        drop(care);
    }
}

impl fmt::Debug for Attendance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attendance").finish_non_exhaustive()
    }
}
