//! The mutex of this crate's own state. Under `--cfg lockkit_loom` it is loom's, which explores every interleaving.
//!
//! A poisoned mutex is entered all the same: each critical section leaves its state whole before anything in it could panic.

#[cfg(lockkit_loom)]
use loom::sync as imp;
#[cfg(not(lockkit_loom))]
use std::sync as imp;

use std::sync::{PoisonError, TryLockError};

pub(crate) use imp::MutexGuard;

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks it unless it is locked at this moment.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
