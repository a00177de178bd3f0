//! What tells holders to look whether they still hold.
//!
//! A connection that breaks frees its lock at the server at once, and is not noticed here before something is said over
//! it. So one more connection is kept on which an answer is always outstanding: whatever takes all connections away, a
//! crash of the server, a fail-over, a reset of the network, is noticed by its end. A hold whose own connection alone is
//! ended is told with its next renewal.

use std::sync::{
    Arc, Mutex, PoisonError, Weak,
    atomic::{AtomicBool, Ordering},
};

use sqlx::mysql::MySqlConnectOptions;
use tokio::{sync::watch, task::AbortHandle};

use crate::wire::Wire;

/// The server does not look whether a sleeper's client still lives; so not for long at a time.
const SLEEP: &str = "DO SLEEP(5)";

#[derive(Debug)]
pub(crate) struct Alarm {
    raised: watch::Sender<u64>,
    is_watching: AtomicBool,
    watcher: Mutex<Option<AbortHandle>>,
}

impl Alarm {
    pub(crate) fn new() -> Self {
        Self {
            raised: watch::Sender::new(0),
            is_watching: AtomicBool::new(false),
            watcher: Mutex::default(),
        }
    }

    /// What a hold waits on.
    pub(crate) fn listen(&self) -> watch::Receiver<u64> {
        self.raised.subscribe()
    }

    /// Some connection has ended that should not have.
    pub(crate) fn raise(&self) {
        self.raised.send_modify(|times| *times += 1);
    }

    /// Sees to it that a connection is watched while there is something to hold.
    pub(crate) fn watch(self: &Arc<Self>, options: &MySqlConnectOptions) {
        if self.is_watching.swap(true, Ordering::Relaxed) {
            return;
        }
        let watching = Watching(Arc::downgrade(self));
        let options = options.clone();
        let task = tokio::spawn(async move {
            let Ok(mut wire) = Wire::open(&options).await else {
                return;
            };
            while wire.ask(SLEEP.to_owned()).await.is_ok() {
                if watching.0.strong_count() == 0 {
                    return wire.quit().await;
                }
            }
            if let Some(alarm) = watching.0.upgrade() {
                alarm.raise();
            }
        });
        *self.watcher() = Some(task.abort_handle());
    }

    pub(crate) fn close(&self) {
        if let Some(watcher) = self.watcher().take() {
            watcher.abort();
        }
    }

    fn watcher(&self) -> std::sync::MutexGuard<'_, Option<AbortHandle>> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.close();
    }
}

/// However the watcher ends, another may follow.
struct Watching(Weak<Alarm>);

impl Drop for Watching {
    fn drop(&mut self) {
        if let Some(alarm) = self.0.upgrade() {
            alarm.is_watching.store(false, Ordering::Relaxed);
        }
    }
}
