//! A lock that the same owner may acquire again while it holds it.

use std::{fmt, ops::Deref};

use super::{Lock, LockGuard};
use crate::{AcquireOptions, ReentrantOwner, Result};

/// A lock with a hold count; the blocking [`ReentrantLock`](crate::ReentrantLock). The [`ReentrantOwner`] that holds it acquires it
/// again without a request and without waiting. All others wait. The lock is released when its owner's last guard is.
///
/// The owner is a value, not the thread: give it to each function that may acquire.
///
/// ```
/// use lockkit_core::{MemoryBackend, ReentrantOwner, blocking::{LockClient, ReentrantLock}};
///
/// let lock = ReentrantLock::new(LockClient::new(MemoryBackend::new())?.lock("tree")?);
/// let owner = ReentrantOwner::new();
/// let outer = lock.acquire(&owner)?;
/// let inner = lock.acquire(&owner)?;
/// assert_eq!((inner.hold_count(), inner.token()), (2, outer.token()));
/// assert!(lock.try_acquire(&ReentrantOwner::new())?.is_none());
/// inner.release()?;
/// outer.release()?;
/// # Ok::<(), lockkit_core::Error>(())
/// ```
#[must_use = "having a lock holds nothing: call `acquire(&owner)` and keep the guard"]
#[derive(Clone)]
pub struct ReentrantLock {
    inner: Lock,
    lock: crate::ReentrantLock<crate::Lock>,
}

impl ReentrantLock {
    /// Wraps `lock`.
    pub fn new(lock: Lock) -> Self {
        Self {
            lock: crate::ReentrantLock::new(lock.lock.clone()),
            inner: lock,
        }
    }

    /// Returns the lock inside.
    pub fn inner(&self) -> &Lock {
        &self.inner
    }

    /// Acquires it for `owner`, or adds one to the hold count if `owner` holds it already.
    ///
    /// # Errors
    /// As [`crate::ReentrantLock::acquire`]; [`Error::Backend`](crate::Error::Backend) within an async task.
    pub fn acquire(&self, owner: &ReentrantOwner) -> Result<ReentrantGuard> {
        self.acquire_with(owner, &AcquireOptions::new())
    }

    /// Makes one attempt for `owner`. Returns `None` if somebody else holds it.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn try_acquire(&self, owner: &ReentrantOwner) -> Result<Option<ReentrantGuard>> {
        let host = &self.inner.host;
        let guard = host.block_on("acquire", self.lock.try_acquire(owner))?;
        Ok(guard.map(|guard| ReentrantGuard(LockGuard::new(guard, host))))
    }

    /// Acquires it for `owner` with other options, which apply to the owner's first hold.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_with(&self, owner: &ReentrantOwner, options: &AcquireOptions) -> Result<ReentrantGuard> {
        let host = &self.inner.host;
        let guard = host.block_on("acquire", self.lock.acquire_with(owner, options))?;
        Ok(ReentrantGuard(LockGuard::new(guard, host)))
    }
}

impl fmt::Debug for ReentrantLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("blocking::ReentrantLock")
            .field(&self.inner.lock)
            .finish()
    }
}

/// One of an owner's nested holds. All of them are one hold of the lock inside, with one fencing token. It has all methods of a
/// [`LockGuard`] but the release, which is its own.
#[must_use = "dropping the guard gives up this hold"]
#[derive(Debug)]
pub struct ReentrantGuard(LockGuard);

impl ReentrantGuard {
    /// Returns the number of this owner's guards.
    pub fn hold_count(&self) -> usize {
        match &self.0.guard {
            Inner::Nested(guard) => guard.hold_count(),
            Inner::Own(_) | Inner::Leading(_) => 1,
        }
    }

    /// Gives up this hold. The last one releases the lock.
    ///
    /// # Errors
    /// [`Error::Lost`](crate::Error::Lost) if the lock had been lost; for the last one, as [`LockGuard::release`].
    pub fn release(self) -> Result<()> {
        self.0.release()
    }
}

impl Deref for ReentrantGuard {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        &self.0
    }
}

/// The async guard in a blocking one.
#[derive(Debug)]
pub(super) enum Inner {
    Own(crate::LockGuard),
    Nested(crate::ReentrantGuard),
    Leading(Box<crate::Leadership>),
}

impl Inner {
    pub(super) async fn release(self) -> Result<()> {
        match self {
            Self::Own(guard) => guard.release().await,
            Self::Nested(guard) => guard.release().await,
            Self::Leading(leadership) => leadership.resign().await,
        }
    }
}

impl Deref for Inner {
    type Target = crate::LockGuard;

    fn deref(&self) -> &crate::LockGuard {
        match self {
            Self::Own(guard) => guard,
            Self::Nested(guard) => guard,
            Self::Leading(leadership) => leadership,
        }
    }
}

impl From<crate::LockGuard> for Inner {
    fn from(guard: crate::LockGuard) -> Self {
        Self::Own(guard)
    }
}

impl From<crate::ReentrantGuard> for Inner {
    fn from(guard: crate::ReentrantGuard) -> Self {
        Self::Nested(guard)
    }
}
