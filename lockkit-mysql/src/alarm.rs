//! What tells holders to look whether they still hold.
//!
//! A connection that breaks frees its lock at the server at once, and is not noticed here before something is said over
//! it. So one more connection is kept on which an answer is always outstanding: whatever takes all connections away, a
//! crash of the server, a fail-over, a reset of the network, is noticed by its end. A hold whose own connection alone is
//! ended is told with its next renewal; and if this one is ended alone, every hold looks, and another is begun.

use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, task::AbortHandle, time::timeout};

use crate::{
    control::{IDENTITY, Options, Term, UNLIMITED},
    wire::{Wire, column},
};

/// The server does not look whether a sleeper's client still lives; so not for long at a time.
const SLEEP: &str = "DO SLEEP(5)";

/// A watch from which nothing is heard for so long never hears of anything.
const DEAF: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Alarm {
    raised: watch::Sender<u64>,
    is_watching: AtomicBool,
    /// Whether the last one that was begun came to nothing.
    is_missing: AtomicBool,
    watcher: Mutex<Watcher>,
}

#[derive(Debug, Default)]
struct Watcher {
    task: Option<AbortHandle>,
    /// Its session, and the term in which that id means it.
    session: Option<(u64, Term)>,
}

impl Alarm {
    pub(crate) fn new() -> Self {
        Self {
            raised: watch::Sender::new(0),
            is_watching: AtomicBool::new(false),
            is_missing: AtomicBool::new(false),
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

    /// Sees to it that a connection is watched while there is something to hold. Called again with each renewal, since
    /// that connection may have ended alone.
    pub(crate) fn watch(self: &Arc<Self>, options: &Options, term: &Term) {
        if self.is_watching.swap(true, Ordering::Acquire) {
            return;
        }
        let watching = Watching(Arc::downgrade(self));
        let (options, term) = (options.clone(), term.clone());
        let runtime = options.runtime.clone();
        let task = runtime.spawn(async move {
            let opened = timeout(DEAF, Wire::open(&options))
                .await
                .ok()
                .and_then(Result::ok);
            let alarm = watching.0.upgrade();
            let was_missing =
                alarm.is_none_or(|alarm| alarm.is_missing.swap(opened.is_none(), Ordering::Relaxed));
            let Some(mut wire) = opened else {
                // What broke it on its way may have broken the others. Told again and again, they would look again and again.
                if !was_missing {
                    watching.end();
                }
                return;
            };
            let question =
                format!("SET SESSION lock_wait_timeout=2 {UNLIMITED}; SELECT CONNECTION_ID(), {IDENTITY}");
            let who = timeout(DEAF, wire.ask(question)).await.ok().and_then(Result::ok);
            let who = who.as_ref().and_then(|reply| reply.row(1));
            if let (Some(alarm), Some(row)) = (watching.0.upgrade(), who)
                && let (Ok(id), Ok(server)) = (column::<u64>(row, 0), column::<String>(row, 1))
                && server == term.server
            {
                alarm.watcher().session = Some((id, term));
            }
            while let Ok(Ok(_)) = timeout(DEAF, wire.ask(SLEEP.to_owned())).await {
                if watching.0.strong_count() == 0 {
                    return wire.quit().await;
                }
            }
            watching.end();
        });
        self.watcher().task = Some(task.abort_handle());
    }

    /// Ends the watch, and says which session is to be ended for it.
    pub(crate) fn close(&self) -> Option<(u64, Term)> {
        let Watcher { task, session } = std::mem::take(&mut *self.watcher());
        task?.abort();
        session
    }

    fn watcher(&self) -> std::sync::MutexGuard<'_, Watcher> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

/// However the watcher ends, another may follow.
struct Watching(Weak<Alarm>);

impl Watching {
    /// Has every hold look.
    fn end(self) {
        let alarm = self.0.upgrade();
        // Before those who are told look, and have another begun.
        drop(self);
        if let Some(alarm) = alarm {
            alarm.raise();
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        if let Some(alarm) = self.0.upgrade() {
            alarm.watcher().session = None;
            alarm.is_watching.store(false, Ordering::Release);
        }
    }
}
