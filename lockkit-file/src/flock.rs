//! The operating system's advisory lock, held for as long as a value lives.

use std::{
    fs::{File, TryLockError},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::fault::{Fault, Result};

/// The time for which what is locked for moments may stay locked before it counts as "cannot tell". It is held while the
/// disk is waited for by who raises the floor of a lane; there are others.
const PATIENCE: Duration = Duration::from_secs(2);
const FIRST_POLL: Duration = Duration::from_micros(50);
const LAST_POLL: Duration = Duration::from_millis(1);

/// A held `flock`. Dropping it unlocks rather than closes: a forked child may have the same descriptor.
#[derive(Debug)]
pub(crate) struct Flock(Arc<File>);

impl Flock {
    /// Locks `file` alone; `None` if it is locked already.
    pub(crate) fn exclusive(file: &Arc<File>, path: &Path) -> Result<Option<Self>> {
        Self::answer(file.try_lock(), file, path)
    }

    /// Locks `file` together with others; `None` if someone has it alone.
    pub(crate) fn shared(file: &Arc<File>, path: &Path) -> Result<Option<Self>> {
        Self::answer(file.try_lock_shared(), file, path)
    }

    /// Locks what others lock only for moments: asks `lock` again and again until it has an answer.
    pub(crate) fn briefly<T>(path: &Path, mut lock: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let began = Instant::now();
        let mut pause = FIRST_POLL;
        loop {
            if let Some(locked) = lock()? {
                return Ok(locked);
            }
            if began.elapsed() >= PATIENCE {
                return Err(Fault::LedgerBusy {
                    path: path.to_owned(),
                    waited_ms: PATIENCE.as_secs() * 1_000,
                });
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LAST_POLL);
        }
    }

    /// What is locked.
    pub(crate) fn file(&self) -> &Arc<File> {
        &self.0
    }

    fn answer(answer: Result<(), TryLockError>, file: &Arc<File>, path: &Path) -> Result<Option<Self>> {
        match answer {
            Ok(()) => Ok(Some(Self(Arc::clone(file)))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(Fault::io("lock", path)(error)),
        }
    }
}

impl Drop for Flock {
    fn drop(&mut self) {
        // It fails only on a descriptor that is not one; closing it would have unlocked it.
        let _ = self.0.unlock();
    }
}
