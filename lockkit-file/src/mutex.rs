//! A mutex that ignores poisoning.

use std::sync::{MutexGuard, PoisonError};

/// A mutex that a panicking holder does not spoil: each critical section leaves its state whole before anything in it
/// could panic.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
