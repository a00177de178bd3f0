//! The mutex of the state that the driver and the backends keep in memory. Under `--cfg lockkit_loom` it is loom's, which explores
//! every interleaving.

#[cfg(lockkit_loom)]
use loom::sync as imp;
#[cfg(not(lockkit_loom))]
use std::sync as imp;

use std::sync::{PoisonError, TryLockError};

pub(crate) use imp::MutexGuard;

/// A mutex that a panicking holder does not spoil. Each critical section has to leave its state whole before anything in it could
/// panic.
#[derive(Debug, Default)]
pub struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    /// Makes one that is free.
    pub fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    /// Locks it, also after a panic of a holder.
    pub fn lock(&self) -> MutexGuard<'_, T> {
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
