//! The operating system's advisory lock, held while a value lives.

use std::{
    fs::{File, TryLockError},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::error::{FileError, Result};

/// The time for which a file that is only ever locked for moments may stay locked. Then the result is "cannot tell".
/// The holder of one lane waits for the disk while it raises the floor; there are other lanes.
const PATIENCE: Duration = Duration::from_secs(2);
const FIRST_POLL: Duration = Duration::from_micros(50);
const LAST_POLL: Duration = Duration::from_millis(1);

/// A held `flock`. Dropping it unlocks rather than closes: a forked child may have the same descriptor.
#[derive(Debug)]
pub(crate) struct Flock(Arc<File>);

impl Flock {
    /// Locks `file` exclusively; `None` if it is locked.
    pub(crate) fn exclusive(file: &Arc<File>, path: &Path) -> Result<Option<Self>> {
        Self::of(file.try_lock(), file, path)
    }

    /// Locks `file` shared; `None` if it is locked exclusively.
    pub(crate) fn shared(file: &Arc<File>, path: &Path) -> Result<Option<Self>> {
        Self::of(file.try_lock_shared(), file, path)
    }

    /// Polls `lock` until it locks a file that others lock for moments only.
    pub(crate) fn poll<T>(path: &Path, mut lock: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let began = Instant::now();
        let mut pause = FIRST_POLL;
        loop {
            if let Some(locked) = lock()? {
                return Ok(locked);
            }
            if began.elapsed() >= PATIENCE {
                return Err(FileError::StillLocked {
                    path: path.to_owned(),
                    waited_ms: PATIENCE.as_secs() * 1_000,
                });
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LAST_POLL);
        }
    }

    /// Returns the locked file.
    pub(crate) fn file(&self) -> &Arc<File> {
        &self.0
    }

    fn of(outcome: Result<(), TryLockError>, file: &Arc<File>, path: &Path) -> Result<Option<Self>> {
        match outcome {
            Ok(()) => Ok(Some(Self(Arc::clone(file)))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(FileError::io("lock", path)(error)),
        }
    }
}

impl Drop for Flock {
    fn drop(&mut self) {
        // It fails only on an invalid descriptor.
        let _ = self.0.unlock();
    }
}
