//! The operating system's advisory lock, held for as long as a value lives.

use std::{
    fs::{File, TryLockError},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    fault::{Fault, Result},
    space,
};

/// How long the ledger may stay locked before it counts as "cannot tell". It is never held while the disk is waited
/// for.
const LEDGER_PATIENCE: Duration = Duration::from_secs(2);
const LEDGER_FIRST_POLL: Duration = Duration::from_micros(50);
const LEDGER_LAST_POLL: Duration = Duration::from_millis(1);

/// A held `flock`. Dropping it unlocks rather than closes: a forked child may have the same descriptor.
#[derive(Debug)]
pub(super) struct Flock(Arc<File>);

impl Flock {
    /// Locks `file` alone; `None` if it is locked already.
    pub(super) fn exclusive(file: &Arc<File>, path: &Path) -> Result<Option<Self>> {
        Self::answer(file.try_lock(), file, path)
    }

    /// Locks `file` together with others; `None` if someone has it alone.
    pub(super) fn shared(file: &Arc<File>, path: &Path) -> Result<Option<Self>> {
        Self::answer(file.try_lock_shared(), file, path)
    }

    /// Goes from exclusive to shared. The system lets go in between, so another may get ahead.
    pub(super) fn downgrade(self, path: &Path) -> Result<Option<Self>> {
        match self.0.try_lock_shared() {
            Ok(()) => Ok(Some(self)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(Fault::io("lock", path)(error)),
        }
    }

    /// Locks what others lock only for moments.
    pub(super) fn briefly(path: &Path, open: impl Fn() -> Result<File>) -> Result<Self> {
        let began = Instant::now();
        let mut file = Arc::new(open()?);
        let mut pause = LEDGER_FIRST_POLL;
        loop {
            if let Some(lock) = Self::exclusive(&file, path)? {
                if space::is_at(path, space::inode(&file, path)?)? {
                    return Ok(lock);
                }
                file = Arc::new(open()?);
            }
            if began.elapsed() >= LEDGER_PATIENCE {
                return Err(Fault::LedgerBusy {
                    path: path.to_owned(),
                    waited_ms: LEDGER_PATIENCE.as_secs() * 1_000,
                });
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LEDGER_LAST_POLL);
        }
    }

    /// What is locked.
    pub(super) fn file(&self) -> &Arc<File> {
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
