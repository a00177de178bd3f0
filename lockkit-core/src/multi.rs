//! Several locks at once, all or none.

use std::{fmt, pin::pin, time::Duration};

use futures_util::future::join_all;
use tokio::time::Instant;

use crate::{
    AcquireOptions, DistributedLock, Error, LockGuard, LossReason, Result,
    driver::{acquire::GRACE, timing},
    guard::{LostSignal, first_lost},
};

/// Acquires all of `locks` or none. They may be of different clients and backends.
///
/// It takes them in the order of their [ids](crate::LockId), so two callers never wait for each other. One `wait` is for all of
/// them together: that of `options`, or else the shortest of the locks' own.
///
/// ```
/// use lockkit_core::{AcquireOptions, LockClient, MemoryBackend, acquire_all};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let client = LockClient::new(MemoryBackend::new());
/// let (from, to) = (client.lock("account/1")?, client.lock("account/2")?);
/// let set = acquire_all(&[&from, &to], &AcquireOptions::new()).await?;
/// assert_eq!(set.guards().len(), 2);
/// set.release().await?;
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
///
/// # Errors
/// [`Error::InvalidOptions`] if one id is there twice. [`Error::Lost`] if one lock is lost while others are waited for.
/// Otherwise as [`DistributedLock::acquire_with`]. After an error nothing is held: the locks acquired so far are released, in
/// the background if that takes longer than the rest of `wait`.
///
/// # Cancel safety
/// If the future is dropped at any await, the locks acquired so far are released in the background.
pub async fn acquire_all<L>(locks: &[&L], options: &AcquireOptions) -> Result<LockSet>
where
    L: DistributedLock + ?Sized,
{
    options.validate()?;
    let mut sorted = locks.to_vec();
    sorted.sort_by(|a, b| a.id().cmp(b.id()));
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].id() == pair[1].id()) {
        return Err(Error::invalid_option(
            "locks",
            format!("{} is there twice", pair[0].id()),
        ));
    }
    let own_wait = || locks.iter().filter_map(|lock| lock.options().wait).min();
    let deadline = Deadline::new(options.wait.or_else(own_wait));
    let mut set = LockSet {
        guards: Vec::with_capacity(sorted.len()),
    };
    for lock in sorted {
        let mut options = options.clone();
        options.wait = deadline.left();
        let next = tokio::select! {
            biased;
            lost = set.first_lost() => Err(lost),
            guard = lock.acquire_with(&options) => guard,
        };
        match next {
            Ok(guard) => set.guards.push(guard),
            Err(err) => {
                set.give_back(&deadline).await;
                return Err(err);
            }
        }
    }
    if let Err(err) = set.check() {
        set.give_back(&deadline).await;
        return Err(err);
    }
    Ok(set)
}

struct Deadline {
    wait: Option<Duration>,
    started: Instant,
}

impl Deadline {
    fn new(wait: Option<Duration>) -> Self {
        Self {
            wait,
            started: Instant::now(),
        }
    }

    fn at(&self) -> Option<Instant> {
        let wait = self.wait?;
        // A lock's own `wait` has not been checked.
        Some(self.started + wait.min(AcquireOptions::MAX_DURATION))
    }

    /// Returns the time that is left: at least a millisecond, so that each further lock still gets an attempt. A `wait` of zero
    /// stays one.
    fn left(&self) -> Option<Duration> {
        self.wait.map(|wait| {
            wait.saturating_sub(self.started.elapsed())
                .max(wait.min(Duration::from_millis(1)))
        })
    }
}

/// Locks that are held together. Dropping the set releases them in the background.
#[must_use = "dropping the set releases the locks"]
pub struct LockSet {
    guards: Vec<LockGuard>,
}

impl LockSet {
    /// Returns the guards, in the order of their locks' ids.
    pub fn guards(&self) -> &[LockGuard] {
        &self.guards
    }

    /// Resolves when the first of them is lost. Stays pending for ever for an empty set.
    ///
    /// # Cancel safety
    /// Loss is latched: dropping the future loses nothing.
    pub fn lost(&self) -> impl Future<Output = LossReason> + Send + 'static {
        let signals: Vec<LostSignal> = self.guards.iter().map(LockGuard::lost).collect();
        async move { first_lost(signals).await.1 }
    }

    /// Checks that all are still held.
    ///
    /// # Errors
    /// [`Error::Lost`] of the first one that is not.
    pub fn check(&self) -> Result<()> {
        self.guards.iter().try_for_each(LockGuard::check)
    }

    /// Releases all of them at once.
    ///
    /// # Errors
    /// The first error, in the reverse order of their ids; the others are released all the same.
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, the rest is released in the background.
    pub async fn release(self) -> Result<()> {
        let released = join_all(self.guards.into_iter().rev().map(LockGuard::release)).await;
        released.into_iter().collect()
    }

    async fn first_lost(&self) -> Error {
        let signals = self.guards.iter().map(LockGuard::lost).collect();
        let (index, _) = first_lost(signals).await;
        self.guards[index].check().err().unwrap_or(Error::Closed)
    }

    /// Releases a partial acquisition on the caller's time, and in the background if that is too short. The caller gets the
    /// error that stopped the acquisition; an error of this release is logged.
    async fn give_back(self, deadline: &Deadline) {
        let releasing = pin!(self.release());
        let released = match deadline.at() {
            Some(at) => {
                let limit = || at.max(Instant::now() + GRACE);
                timing::within("lockkit", "release", releasing, limit).await
            }
            None => Ok(Some(releasing.await)),
        };
        if let Err(err) = released.and_then(|released| released.unwrap_or(Ok(()))) {
            tracing::warn!(
                error = crate::spi::chain(&err),
                "releasing a part of a set of locks failed"
            );
        }
    }
}

impl fmt::Debug for LockSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.guards.iter().map(LockGuard::name))
            .finish()
    }
}
