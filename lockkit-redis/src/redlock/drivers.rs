//! One task for the connections to all masters.
//!
//! A request to five masters is five writes, and their answers come within microseconds of each other. With a task for
//! each connection that is ten tasks to wake, most of them on another thread, for what one task does in two turns.

use std::{future::poll_fn, pin::Pin, task::Poll};

use futures_util::future::{AbortHandle, abortable};
use tokio::{sync::mpsc, task::unconstrained};

/// What a connection does: it ends when the connection does.
type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs what connections do. Its task ends when this is gone and they are.
#[derive(Clone, Debug)]
pub(crate) struct Drivers {
    add: mpsc::UnboundedSender<Driver>,
}

impl Drivers {
    /// On the current runtime.
    pub(crate) fn start() -> Self {
        let (add, added) = mpsc::unbounded_channel();
        // What there is to do at one connection must not use up the turn of the others.
        tokio::spawn(unconstrained(drive_all(added)));
        Self { add }
    }

    /// Runs this one, too, for as long as what is returned is kept.
    pub(crate) fn run(&self, driver: impl Future<Output = ()> + Send + 'static) -> Driven {
        let (driver, handle) = abortable(driver);
        // If the runtime is gone, so is the connection: requests find it closed.
        let _ = self.add.send(Box::pin(async move {
            let _ = driver.await;
        }));
        Driven(handle)
    }
}

/// A connection that is run. Dropping this ends it.
#[derive(Debug)]
pub(crate) struct Driven(AbortHandle);

impl Drop for Driven {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn drive_all(mut added: mpsc::UnboundedReceiver<Driver>) {
    let mut drivers: Vec<Driver> = Vec::new();
    poll_fn(|cx| {
        let is_over = loop {
            match added.poll_recv(cx) {
                Poll::Ready(Some(driver)) => drivers.push(driver),
                Poll::Ready(None) => break true,
                Poll::Pending => break false,
            }
        };
        // All of them, whichever was woken: most of the time there is something to do at most of them.
        drivers.retain_mut(|driver| driver.as_mut().poll(cx).is_pending());
        if is_over && drivers.is_empty() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    type Pings = mpsc::UnboundedSender<oneshot::Sender<()>>;

    /// Answers each ping.
    fn echo() -> (impl Future<Output = ()>, Pings) {
        let (pings, mut pinged) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        let driver = async move {
            while let Some(ping) = pinged.recv().await {
                let _ = ping.send(());
            }
        };
        (driver, pings)
    }

    async fn answers(pings: &Pings) -> bool {
        let (ping, answer) = oneshot::channel();
        pings.send(ping).is_ok() && answer.await.is_ok()
    }

    #[tokio::test]
    async fn each_is_run_for_as_long_as_it_is_kept_and_the_task_for_as_long_as_any() {
        let (add, added) = mpsc::unbounded_channel();
        let task = tokio::spawn(drive_all(added));
        let drivers = Drivers { add };
        let ((first, to_first), (second, to_second)) = (echo(), echo());
        let kept = drivers.run(first);
        assert!(answers(&to_first).await);
        let dropped = drivers.run(second);
        assert!(answers(&to_second).await && answers(&to_first).await);
        drop(dropped);
        // Its receiver is gone, so its driver is.
        to_second.closed().await;
        assert!(answers(&to_first).await);
        drop(drivers);
        assert!(answers(&to_first).await, "no more are to come");
        drop(kept);
        to_first.closed().await;
        task.await.unwrap();
    }

    #[tokio::test]
    async fn one_that_ends_by_itself_leaves_the_others() {
        let drivers = Drivers::start();
        let ((first, to_first), (second, to_second)) = (echo(), echo());
        let (_ends, _kept) = (drivers.run(first), drivers.run(second));
        assert!(answers(&to_first).await);
        drop(to_first);
        assert!(answers(&to_second).await);
    }
}
