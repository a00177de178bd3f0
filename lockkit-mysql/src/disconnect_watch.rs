//! A connection that notices at once when the server is gone.
//!
//! When a holder's connection breaks, the server frees its lock at once, and the client learns of it only with its next
//! request. So the client keeps one more connection, with a reply always under way. A crash of the server, a fail-over or a
//! reset of the network ends this connection too, and then every holder proves its hold.
//!
//! If a holder's own connection ends alone, the next renewal reports it. If this connection ends alone, every holder
//! proves its hold, and the watch begins again.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::spi::Mutex;
use tokio::{sync::watch, task::AbortHandle, time::timeout};

use crate::{
    connection::{ResumableConnection, column},
    control::{COMMON_SETTINGS, Epoch, NO_STATEMENT_LIMIT, Options, SERVER_IDENTITY},
};

/// The request under way. The server does not notice that the client of a sleeping session is gone, so it is a short one.
const SLEEP: &str = "DO SLEEP(5)";

/// A watch without a reply for so long is dead.
const DEAD_AFTER: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct DisconnectWatch {
    breaks: watch::Sender<u64>,
    is_running: AtomicBool,
    /// True if the latest watch could not connect.
    is_failing: AtomicBool,
    task: Mutex<Task>,
}

#[derive(Debug, Default)]
struct Task {
    abort: Option<AbortHandle>,
    /// The watch's session, and the epoch of its id.
    session: Option<(u64, Epoch)>,
}

impl DisconnectWatch {
    pub(crate) fn new() -> Self {
        Self {
            breaks: watch::Sender::new(0),
            is_running: AtomicBool::new(false),
            is_failing: AtomicBool::new(false),
            task: Mutex::default(),
        }
    }

    /// Returns a receiver that changes when connections break.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.breaks.subscribe()
    }

    /// Has every holder prove its hold: a connection has ended that should not have.
    pub(crate) fn notify(&self) {
        self.breaks.send_modify(|times| *times += 1);
    }

    /// Starts the watch unless it runs. Each grant and each renewal calls this, since a watch may end alone.
    pub(crate) fn start(self: &Arc<Self>, options: &Options, epoch: &Epoch) {
        if self.is_running.swap(true, Ordering::Acquire) {
            return;
        }
        let running = Running(Arc::downgrade(self));
        let (options, epoch) = (options.clone(), epoch.clone());
        let runtime = options.runtime.clone();
        let task = runtime.spawn(async move {
            let opened = timeout(DEAD_AFTER, ResumableConnection::open("watch", &options))
                .await
                .ok()
                .and_then(Result::ok);
            let watch = running.0.upgrade();
            let was_failing =
                watch.is_none_or(|watch| watch.is_failing.swap(opened.is_none(), Ordering::Relaxed));
            let Some(mut connection) = opened else {
                // The cause may have broken the holders' connections, too. Told each time, they would never rest.
                if !was_failing {
                    running.end();
                }
                return;
            };
            let setup = format!(
                "SET SESSION {COMMON_SETTINGS} {NO_STATEMENT_LIMIT}; SELECT CONNECTION_ID(), {SERVER_IDENTITY}"
            );
            let reply = timeout(DEAD_AFTER, connection.query(setup))
                .await
                .ok()
                .and_then(Result::ok);
            if let (Some(watch), Some(row)) =
                (running.0.upgrade(), reply.as_ref().and_then(|reply| reply.row(1)))
                && let (Ok(id), Ok(server)) = (column::<u64>(row, 0), column::<String>(row, 1))
                && server == epoch.server
            {
                watch.task.lock().session = Some((id, epoch));
            }
            while let Ok(Ok(_)) = timeout(DEAD_AFTER, connection.query(SLEEP.to_owned())).await {
                if running.0.strong_count() == 0 {
                    return connection.quit().await;
                }
            }
            running.end();
        });
        self.task.lock().abort = Some(task.abort_handle());
    }

    /// Ends the watch, and returns the session to kill.
    pub(crate) fn close(&self) -> Option<(u64, Epoch)> {
        let Task { abort, session } = std::mem::take(&mut *self.task.lock());
        abort?.abort();
        session
    }
}

impl Drop for DisconnectWatch {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

/// Clears `is_running` when the watch ends, however it does, so that another may start.
struct Running(Weak<DisconnectWatch>);

impl Running {
    /// Has every holder prove its hold.
    fn end(self) {
        let watch = self.0.upgrade();
        // First, so that the holders can start another watch.
        drop(self);
        if let Some(watch) = watch {
            watch.notify();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(watch) = self.0.upgrade() {
            watch.task.lock().session = None;
            watch.is_running.store(false, Ordering::Release);
        }
    }
}
