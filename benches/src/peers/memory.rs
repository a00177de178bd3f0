//! Beside the memory backend.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use lockkit::{BoxError, spi::Mode};
use lockkit_conformance::measure::{Client, Contender, Scenario, Subject};
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use super::exclusive_alone;

/// `tokio::sync::Mutex` and `Semaphore`, by name: no fencing token, no lease, one process.
#[derive(Clone, Debug, Default)]
pub struct TokioSync {
    mutexes: Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>,
    semaphores: Arc<Mutex<HashMap<String, Arc<Semaphore>>>>,
}

impl Subject for TokioSync {
    type Client = Self;

    async fn client(&self) -> Result<Self, BoxError> {
        Ok(self.clone())
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(match scenario {
            Scenario::Permits => None,
            other => exclusive_alone(other),
        })
    }
}

impl Client for TokioSync {
    type Contender = TokioLock;

    async fn contender(&self, name: &str, mode: Mode) -> Result<TokioLock, BoxError> {
        Ok(match mode {
            Mode::Exclusive => {
                let mut mutexes = self.mutexes.lock().unwrap_or_else(PoisonError::into_inner);
                TokioLock::Mutex(mutexes.entry(name.to_owned()).or_default().clone())
            }
            Mode::Permits(permits) => {
                let mut semaphores = self.semaphores.lock().unwrap_or_else(PoisonError::into_inner);
                let permits = permits.get() as usize;
                let semaphore = semaphores
                    .entry(name.to_owned())
                    .or_insert_with(|| Arc::new(Semaphore::new(permits)));
                TokioLock::Semaphore(semaphore.clone())
            }
            Mode::Shared => return Err("a mutex has no shared mode".into()),
        })
    }
}

/// One of them.
#[derive(Debug)]
pub enum TokioLock {
    /// Alone.
    Mutex(Arc<tokio::sync::Mutex<()>>),
    /// One of several.
    Semaphore(Arc<Semaphore>),
}

/// The hold that it grants.
#[derive(Debug)]
pub enum TokioHeld {
    /// Alone.
    Mutex(OwnedMutexGuard<()>),
    /// One of several.
    Semaphore(OwnedSemaphorePermit),
}

impl Contender for TokioLock {
    type Held = TokioHeld;

    async fn acquire(&mut self) -> Result<TokioHeld, BoxError> {
        Ok(match self {
            Self::Mutex(mutex) => TokioHeld::Mutex(mutex.clone().lock_owned().await),
            Self::Semaphore(semaphore) => TokioHeld::Semaphore(semaphore.clone().acquire_owned().await?),
        })
    }

    async fn release(&mut self, held: TokioHeld) -> Result<(), BoxError> {
        drop(held);
        Ok(())
    }
}
