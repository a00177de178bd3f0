//! A lock that the same owner may acquire again while it holds it.

use std::{
    collections::HashMap,
    fmt,
    ops::Deref,
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::Mutex as AsyncMutex, time::Instant};

use crate::{AcquireOptions, DistributedLock, Error, LockGuard, Result, driver::timing, sync::Mutex};

tokio::task_local! {
    static CURRENT: ReentrantOwner;
}

/// The owner of a [`ReentrantLock`]: an identity that the program hands around. No thread or task can stand for it: a task may
/// move between threads, and a unit of work may span several tasks.
///
/// ```
/// use lockkit_core::ReentrantOwner;
///
/// let owner = ReentrantOwner::new();
/// assert_ne!(owner, ReentrantOwner::new());
/// assert_eq!(ReentrantOwner::current(), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReentrantOwner(u64);

impl ReentrantOwner {
    /// Makes an owner that differs from all others in this process.
    #[expect(
        clippy::new_without_default,
        reason = "a default value that differs each time would surprise"
    )]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs `work` with this owner as its task's [current](Self::current) one. Tasks that it spawns start without one.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`.
    pub async fn scope<F: Future>(self, work: F) -> F::Output {
        CURRENT.scope(self, work).await
    }

    /// Returns the owner that the running task is [scoped](Self::scope) to.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(|owner| *owner).ok()
    }
}

/// A lock with a hold count. The [`ReentrantOwner`] that holds it acquires it again without a request and without waiting. All
/// others wait. The lock is released when its owner's last guard is.
///
/// Clones share the count. Another `ReentrantLock` around the same lock does not.
///
/// ```
/// use lockkit_core::{LockClient, MemoryBackend, ReentrantOwner, ReentrantLock};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let lock = ReentrantLock::new(LockClient::new(MemoryBackend::new()).lock("tree")?);
/// let owner = ReentrantOwner::new();
/// let outer = lock.acquire(&owner).await?;
/// let inner = lock.acquire(&owner).await?;
/// assert_eq!((inner.hold_count(), inner.token()), (2, outer.token()));
/// assert!(lock.try_acquire(&ReentrantOwner::new()).await?.is_none());
/// inner.release().await?;
/// outer.release().await?;
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[must_use = "having a lock holds nothing: call `acquire(&owner)` and keep the guard"]
pub struct ReentrantLock<L> {
    shared: Arc<Shared<L>>,
}

struct Shared<L> {
    lock: L,
    seats: Arc<Seats>,
}

/// The seats: one for each owner that holds or is acquiring. A seat's mutex makes two tasks of one owner share one hold.
type Seats = Mutex<HashMap<ReentrantOwner, Arc<Seat>>>;

type Seat = AsyncMutex<Weak<Seated>>;

impl<L: DistributedLock> ReentrantLock<L> {
    /// Wraps `lock`.
    pub fn new(lock: L) -> Self {
        Self {
            shared: Arc::new(Shared {
                lock,
                seats: Arc::default(),
            }),
        }
    }

    /// Returns the lock inside.
    pub fn inner(&self) -> &L {
        &self.shared.lock
    }

    /// Acquires it for `owner`, or adds one to the hold count if `owner` holds it already.
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`]. [`Error::Lost`] if the owner's hold was lost, until its last guard is gone.
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn acquire(&self, owner: &ReentrantOwner) -> Result<ReentrantGuard> {
        self.acquire_with(owner, &AcquireOptions::new()).await
    }

    /// Makes one attempt for `owner`. Returns `None` if somebody else holds it, or if another task of this owner is acquiring it: then
    /// nobody has asked for this one.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn try_acquire(&self, owner: &ReentrantOwner) -> Result<Option<ReentrantGuard>> {
        match self
            .acquire_with(owner, &AcquireOptions::new().wait(Duration::ZERO))
            .await
        {
            Ok(guard) => Ok(Some(guard)),
            Err(err) if err.is_timeout() => Ok(None),
            Err(err) => Err(err),
        }
    }

    /// Acquires it for `owner` with other options, which apply to the owner's first hold.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire). [`Error::Timeout`] also if another task of this owner is still acquiring it when the time is over.
    ///
    /// # Cancel safety
    /// As [`DistributedLock::acquire_with`].
    pub async fn acquire_with(
        &self,
        owner: &ReentrantOwner,
        options: &AcquireOptions,
    ) -> Result<ReentrantGuard> {
        let mut options = options.or(self.shared.lock.options());
        options.validate()?;
        let started = Instant::now();
        let claimed = ClaimedSeat::new(&self.shared.seats, *owner);
        let seated = match options.wait {
            // Another task of this owner may be at the server right now. A try does not wait for its outcome.
            Some(wait) => {
                let seat = pin!(claimed.seat.clone().lock_owned());
                timing::within("reentrant", "acquire", seat, || started + wait).await?
            }
            None => Some(claimed.seat.clone().lock_owned().await),
        };
        let Some(mut seat) = seated else {
            return Err(Error::Timeout {
                backend: "reentrant",
                name: self.shared.lock.name().clone(),
                waited: started.elapsed(),
            });
        };
        if let Some(seated) = seat.upgrade() {
            seated.guard.check()?;
            return Ok(ReentrantGuard { seated });
        }
        if let Some(wait) = options.wait.filter(|wait| !wait.is_zero()) {
            // At least a millisecond, so that it stays a wait and does not become a try.
            options.wait = Some(
                wait.saturating_sub(started.elapsed())
                    .max(Duration::from_millis(1)),
            );
        }
        let guard = self.shared.lock.acquire_with(&options).await?;
        let seated = Arc::new(Seated { guard, claimed });
        *seat = Arc::downgrade(&seated);
        Ok(ReentrantGuard { seated })
    }
}

/// The hold that an owner's guards share.
#[derive(Debug)]
struct Seated {
    guard: LockGuard,
    claimed: ClaimedSeat,
}

/// A use of an owner's seat, by a task that acquires or by the hold. The last one to go removes the seat.
struct ClaimedSeat {
    seats: Arc<Seats>,
    owner: ReentrantOwner,
    seat: Arc<Seat>,
}

impl ClaimedSeat {
    fn new(seats: &Arc<Seats>, owner: ReentrantOwner) -> Self {
        let seat = seats.lock().entry(owner).or_default().clone();
        Self {
            seats: seats.clone(),
            owner,
            seat,
        }
    }
}

impl Drop for ClaimedSeat {
    fn drop(&mut self) {
        let mut seats = self.seats.lock();
        // Dropped before the others are counted: else of two that go at once neither would be the last.
        drop(std::mem::take(&mut self.seat));
        if seats
            .get(&self.owner)
            .is_some_and(|seat| Arc::strong_count(seat) == 1)
        {
            seats.remove(&self.owner);
        }
    }
}

impl fmt::Debug for ClaimedSeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimedSeat")
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

impl<L> Clone for ReentrantLock<L> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
        }
    }
}

impl<L: fmt::Debug> fmt::Debug for ReentrantLock<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReentrantLock").field(&self.shared.lock).finish()
    }
}

/// One of an owner's nested holds. All of them are one hold of the lock inside, with one fencing token. It has all methods of a
/// [`LockGuard`] but the release, which is its own.
#[must_use = "dropping the guard gives up this hold"]
#[derive(Debug)]
pub struct ReentrantGuard {
    seated: Arc<Seated>,
}

impl ReentrantGuard {
    /// Returns the number of this owner's guards.
    pub fn hold_count(&self) -> usize {
        Arc::strong_count(&self.seated)
    }

    /// Gives up this hold. The last one releases the lock.
    ///
    /// # Errors
    /// [`Error::Lost`] if the lock had been lost; for the last one, as [`LockGuard::release`].
    ///
    /// # Cancel safety
    /// As [`LockGuard::release`].
    pub async fn release(self) -> Result<()> {
        let held = self.seated.guard.view();
        match Arc::into_inner(self.seated) {
            Some(Seated { guard, claimed }) => {
                let released = guard.release().await;
                drop(claimed);
                released
            }
            None => held.not_lost(),
        }
    }
}

impl Deref for ReentrantGuard {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        &self.seated.guard
    }
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use super::*;
    use crate::{LockClient, MemoryBackend};

    #[tokio::test]
    async fn no_seat_is_left_behind() {
        let lock = ReentrantLock::new(LockClient::new(MemoryBackend::new()).lock("a").unwrap());
        let seats = || lock.shared.seats.lock().len();
        let owner = ReentrantOwner::new();
        let outer = lock.acquire(&owner).await.unwrap();
        let inner = lock.acquire(&owner).await.unwrap();
        for _ in 0..100 {
            assert!(lock.try_acquire(&ReentrantOwner::new()).await.unwrap().is_none());
        }
        assert_eq!(seats(), 1);
        drop(outer);
        assert_eq!(seats(), 1, "it is still held");
        assert_eq!(lock.acquire(&owner).await.unwrap().hold_count(), 2);
        inner.release().await.unwrap();
        assert_eq!(seats(), 0);
        // One of two tasks of one owner gives up.
        let taken = lock.acquire(&ReentrantOwner::new()).await.unwrap();
        let mut first = Box::pin(lock.acquire(&owner));
        let mut second = Box::pin(lock.acquire(&owner));
        for waiting in [&mut first, &mut second] {
            assert!(timing::poll_once(waiting).await.is_pending());
        }
        assert_eq!(seats(), 2);
        drop(first);
        drop(taken);
        drop(second.await.unwrap());
        assert_eq!(seats(), 0);
    }
}
