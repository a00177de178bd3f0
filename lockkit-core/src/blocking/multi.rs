//! Several locks at once, all or none.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use futures_util::{FutureExt, future::join_all};

use super::{Host, Lock, LockGuard, reentrant::Inner};
use crate::{AcquireOptions, Error, LossReason, Result, guard::first_lost};

/// Acquires all of `locks` or none, as [`crate::acquire_all`]. They may be of different clients and backends.
///
/// ```
/// use lockkit_core::{AcquireOptions, MemoryBackend, blocking::{LockClient, acquire_all}};
///
/// let client = LockClient::new(MemoryBackend::new())?;
/// let (from, to) = (client.lock("account/1")?, client.lock("account/2")?);
/// let set = acquire_all(&[&from, &to], &AcquireOptions::new())?;
/// assert_eq!(set.guards().len(), 2);
/// set.release()?;
/// # Ok::<(), lockkit_core::Error>(())
/// ```
///
/// # Errors
/// As [`crate::acquire_all`]; [`Error::Backend`] within an async task.
pub fn acquire_all(locks: &[&Lock], options: &AcquireOptions) -> Result<LockSet> {
    let inner = inner(locks);
    let set = block_on(locks, crate::acquire_all(&inner, options))?;
    Ok(LockSet::new(set, locks))
}

/// Acquires all of `locks` if all of them are free now, as [`crate::try_acquire_all`]. Returns `None` if one of them is taken.
///
/// # Errors
/// As [`crate::try_acquire_all`]; [`Error::Backend`] within an async task. An outage is an error, never `None`.
pub fn try_acquire_all(locks: &[&Lock], options: &AcquireOptions) -> Result<Option<LockSet>> {
    let inner = inner(locks);
    let set = block_on(locks, crate::try_acquire_all(&inner, options))?;
    Ok(set.map(|set| LockSet::new(set, locks)))
}

fn inner<'a>(locks: &[&'a Lock]) -> Vec<&'a crate::Lock> {
    locks.iter().map(|lock| &lock.lock).collect()
}

/// Runs `work` within the runtime of the first client. Each client goes on to live on its own.
fn block_on<T>(locks: &[&Lock], work: impl Future<Output = Result<T>>) -> Result<T> {
    match locks.first() {
        Some(lock) => lock.host.block_on("acquire", work),
        // There is nothing to wait for.
        None => work.now_or_never().unwrap_or(Err(Error::Closed)),
    }
}

/// Locks that are held together. Dropping the set releases them in the background.
#[must_use = "dropping the set releases the locks"]
pub struct LockSet {
    guards: Vec<LockGuard>,
}

impl LockSet {
    fn new(set: crate::LockSet, locks: &[&Lock]) -> Self {
        let mut locks = locks.to_vec();
        // In the order of the guards.
        locks.sort_by(|a, b| a.id().cmp(b.id()));
        let guards = set.into_guards().into_iter().zip(locks);
        Self {
            guards: guards
                .map(|(guard, lock)| LockGuard::new(guard, &lock.host))
                .collect(),
        }
    }

    pub(super) fn of_one(set: crate::LockSet, host: &Arc<Host>) -> Self {
        let guards = set.into_guards().into_iter();
        Self {
            guards: guards.map(|guard| LockGuard::new(guard, host)).collect(),
        }
    }

    /// Returns the guards, in the order of their locks' ids.
    pub fn guards(&self) -> &[LockGuard] {
        &self.guards
    }

    /// Checks that all are still held.
    ///
    /// # Errors
    /// [`Error::Lost`] of the first one that is not.
    pub fn check(&self) -> Result<()> {
        self.guards.iter().try_for_each(LockGuard::check)
    }

    /// Blocks until the first of them is lost, for up to `timeout`. Returns `None` if all are still held then, and at once for an
    /// empty set.
    ///
    /// # Errors
    /// [`Error::Backend`] within an async task.
    pub fn wait_lost(&self, timeout: Duration) -> Result<Option<LossReason>> {
        let Some(first) = self.guards.first() else {
            return Ok(None);
        };
        let timeout = timeout.min(AcquireOptions::MAX_DURATION);
        let signals = self.guards.iter().map(|guard| guard.guard.lost()).collect();
        first.host.block_on("wait_lost", async {
            let lost = tokio::time::timeout(timeout, first_lost(signals)).await;
            Ok(lost.ok().map(|(_, reason)| reason))
        })
    }

    /// Releases all of them at once.
    ///
    /// # Errors
    /// The first error, in the reverse order of their ids; the others are released all the same. Within an async task
    /// [`Error::Backend`]: the releases then go on in the background, as if the set had been dropped.
    pub fn release(self) -> Result<()> {
        let (guards, hosts): (Vec<_>, Vec<_>) =
            self.guards.into_iter().rev().map(LockGuard::into_parts).unzip();
        // The hosts stay until all is released: the last handle of a client closes it.
        let Some(host) = hosts.first() else {
            return Ok(());
        };
        host.block_on("release", async {
            let released = join_all(guards.into_iter().map(Inner::release)).await;
            released.into_iter().collect()
        })
    }
}

impl fmt::Debug for LockSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.guards.iter().map(LockGuard::name))
            .finish()
    }
}
