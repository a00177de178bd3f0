//! The thread that a call blocks: may it be held up, and how it waits.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
};

use futures_util::FutureExt;
use tokio::{runtime::Handle, task::consume_budget};

use crate::{Error, Result};

/// Refuses to block in an async task: it would hold up the other tasks of its runtime, maybe for ever.
pub(super) fn refuse_in_async(operation: &'static str) -> Result<()> {
    if Handle::try_current().is_err() || may_be_held_up() {
        return Ok(());
    }
    let cause =
        "a blocking call within an async task; use the async API there, or tokio::task::spawn_blocking";
    Err(Error::permanent("lockkit", operation, cause))
}

/// Returns `true` if the running code may hold up its thread. Tokio gives each task that it polls a budget of operations, and none
/// to code that is meant to block: there is no other sign that differs between the two.
///
/// In a task this uses up the budget. So the task makes way for others at its next await, after a call that has failed.
fn may_be_held_up() -> bool {
    /// More than any budget, which Tokio counts in a byte.
    const BEYOND_ANY_BUDGET: usize = 256;
    (0..BEYOND_ANY_BUDGET).all(|_| consume_budget().now_or_never().is_some())
}

/// Runs `work` on this thread, as a part of `runtime`, whose own thread runs its timers and its I/O.
///
/// Unlike Tokio's own way to block, it does not panic within a task that was not recognised as one.
pub(super) fn block_on<F: Future>(runtime: &Handle, work: F) -> F::Output {
    let _within = runtime.enter();
    let parked = Arc::new(Parked {
        thread: thread::current(),
        is_woken: AtomicBool::new(true),
    });
    let waker = Waker::from(parked.clone());
    let mut context = Context::from_waker(&waker);
    let mut work = pin!(work);
    loop {
        // Something in `work` may park this thread too, and take a wake-up that was for this loop: so it is noted here as well.
        if !parked.is_woken.swap(false, Ordering::AcqRel) {
            thread::park();
        } else if let Poll::Ready(output) = work.as_mut().poll(&mut context) {
            return output;
        }
    }
}

struct Parked {
    thread: Thread,
    is_woken: AtomicBool,
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_woken.swap(true, Ordering::AcqRel) {
            self.thread.unpark();
        }
    }
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[test]
    fn a_wake_up_that_another_wait_takes_is_not_lost() {
        let (done, is_done) = mpsc::channel();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let mut polls = 0;
            let work = std::future::poll_fn(|context| {
                polls += 1;
                if polls == 2 {
                    return Poll::Ready(());
                }
                context.waker().wake_by_ref();
                // As a channel of the standard library does when it is empty.
                thread::park();
                Poll::Pending
            });
            block_on(runtime.handle(), work);
            done.send(()).unwrap();
        });
        is_done.recv_timeout(Duration::from_mins(1)).unwrap();
    }
}
