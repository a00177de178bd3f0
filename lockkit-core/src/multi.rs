//! Several locks at once, all or none.

use std::{fmt, pin::pin, time::Duration};

use futures_util::future::join_all;
use tokio::time::Instant;

use crate::{
    AcquireOptions, DistributedLock, Error, Lock, LockGuard, LockName, LossReason, Result,
    driver::{acquire::GRACE, timing},
    guard::{LostSignal, first_lost},
    lock::none_if_taken,
    spi::Mode,
};

/// The time for which a lock is waited for while others are held that somebody else may take after it.
const FIRST_PATIENCE: Duration = Duration::from_secs(2);

/// Acquires all of `locks` or none. They may be of different clients and backends.
///
/// Two callers never wait for each other for good. Locks of one server are taken in the order of their [ids](crate::LockId), which is
/// the same for everyone. For locks of several servers it need not be, since a server may go by several addresses. There, it takes
/// the first in the same order, for as long as it takes, and waits for each of the others for no more than about two seconds. After
/// that it releases what it has, and begins anew with the one that was taken, at the end of its queue. Each such round is twice as
/// patient as the one before. So it has its turn in the end, also where locks are held for long, and others may pass it until then.
///
/// One `wait` is for all of them together, and for all rounds: that of `options`, or else the shortest of the locks' own.
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
/// [`Error::InvalidOptions`] if one id is there twice. A lock that is there twice under two addresses of its server is not noticed:
/// it is waited for until `wait` is over. [`Error::Lost`] if one lock is lost while others are waited for.
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
    let is_of_one_server = |pair: &[&L]| pair[0].id().server() == pair[1].id().server();
    if sorted.windows(2).all(is_of_one_server) {
        Ok(collect(&sorted, options, &deadline, None).await?)
    } else {
        Box::pin(collect_in_rounds(&sorted, options, &deadline)).await
    }
}

/// Several permits of a semaphore.
impl Lock {
    /// Acquires this many permits of a semaphore, all or none. Each has a guard and a token of its own.
    ///
    /// Those who want several collect them one after the other, and one at a time: whoever collects holds the exclusive lock
    /// `lockkit#permits:<name>` meanwhile, with this lock's ttl and label. So two that want three of four each never wait for each other,
    /// and who came first is served first where the backend keeps the order. Those who want one permit wait for no collector, but may get
    /// one that it would take. The permits that are collected already are held, and nobody uses them.
    ///
    /// A task that has a permit should not ask for more: all permits may be with such tasks.
    ///
    /// ```
    /// use lockkit_core::{LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let gpus = LockClient::new(MemoryBackend::new()).semaphore("gpu", 4)?;
    /// let three = gpus.acquire_many(3).await?;
    /// assert_eq!(three.guards().len(), 3);
    /// assert!(gpus.try_acquire_many(2).await?.is_none());
    /// assert!(gpus.try_acquire().await?.is_some());
    /// three.release().await?;
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] if it is no semaphore, for no permits, and for more than the semaphore has. [`Error::InvalidName`] for
    /// several permits of a semaphore whose name is longer than 1,008 bytes. [`Error::Lost`] if one of the permits is lost while others
    /// are waited for, or the collector's lock is. Otherwise as [`acquire`](Self::acquire). Its `wait` is for all of them together.
    /// After an error nothing is held: the permits acquired so far are released, in the background if that takes longer than
    /// the rest of `wait`.
    ///
    /// # Cancel safety
    /// If the future is dropped at any await, the permits acquired so far are released in the background.
    pub async fn acquire_many(&self, permits: u32) -> Result<LockSet> {
        self.collect(permits, self.options().wait).await
    }

    /// Acquires this many permits if so many are free now, as [`acquire_many`](Self::acquire_many). Returns `None` if they are not, and
    /// also if another is just collecting several.
    ///
    /// # Errors
    /// As [`acquire_many`](Self::acquire_many), but never [`Error::Timeout`]. An outage is an error, never `None`.
    ///
    /// # Cancel safety
    /// As [`acquire_many`](Self::acquire_many).
    pub async fn try_acquire_many(&self, permits: u32) -> Result<Option<LockSet>> {
        none_if_taken(self.collect(permits, Some(Duration::ZERO)).await)
    }

    async fn collect(&self, permits: u32, wait: Option<Duration>) -> Result<LockSet> {
        let refused = |reason: String| Err(Error::invalid_option("permits", reason));
        match self.mode() {
            Mode::Permits(_) if permits == 0 => return refused("at least one is asked for".to_owned()),
            Mode::Permits(size) if permits > size.get() => {
                return refused(format!("the semaphore has {size}, and {permits} are asked for"));
            }
            Mode::Permits(_) => {}
            Mode::Exclusive | Mode::Shared => {
                return refused(format!("{} is no semaphore", self.id()));
            }
        }
        // Before it waits for others who collect: the collector's lock is another kind of lock, with other options.
        self.check()?;
        let collector = if permits == 1 {
            None
        } else {
            Some(self.collector()?)
        };
        collect_permits(self, collector.as_ref(), permits, wait).await
    }

    /// Returns the lock of those who want several permits. However long that takes, it is renewed.
    fn collector(&self) -> Result<Self> {
        let name = self.name().as_str();
        if name.len() > LockName::MAX_BYTES - LockName::OF_COLLECTORS.len() {
            let reason = "it is longer than 1,008 bytes, the most for several permits at once";
            return Err(LockName::refused(name, reason));
        }
        let name = LockName::new([LockName::OF_COLLECTORS, name].concat())?;
        let mut options = self.options().clone();
        (options.renew, options.max_hold, options.hold_at_least) = (None, None, None);
        Ok(self.sibling(name, options))
    }
}

/// Acquires permits of a semaphore, one after the other, after the `collector`, which keeps out others who do the same.
async fn collect_permits(
    semaphore: &Lock,
    collector: Option<&Lock>,
    permits: u32,
    wait: Option<Duration>,
) -> Result<LockSet> {
    let deadline = Deadline::new(wait);
    let locks: Vec<_> = collector
        .into_iter()
        .chain((0..permits).map(|_| semaphore))
        .collect();
    let mut set = collect(&locks, &AcquireOptions::new(), &deadline, None).await?;
    if collector.is_some() {
        // Released in the background: the caller has all that it wants.
        drop(set.guards.remove(0));
    }
    Ok(set)
}

/// Acquires all of `locks` or none, although others may take them in another order. Of two that wait for each other, one gives up
/// what it has.
async fn collect_in_rounds<L>(locks: &[&L], options: &AcquireOptions, deadline: &Deadline) -> Result<LockSet>
where
    L: DistributedLock + ?Sized,
{
    let mut order: Vec<usize> = (0..locks.len()).collect();
    let mut patience = FIRST_PATIENCE;
    loop {
        let ordered: Vec<&L> = order.iter().map(|index| locks[*index]).collect();
        // Two that began together must not give up together.
        let jittered = timing::jittered(patience);
        match collect(&ordered, options, deadline, Some(jittered)).await {
            Ok(set) => {
                let mut guards: Vec<_> = order.into_iter().zip(set.guards).collect();
                guards.sort_unstable_by_key(|(index, _)| *index);
                let guards = guards.into_iter().map(|(_, guard)| guard).collect();
                return Ok(LockSet { guards });
            }
            Err(Stopped { taken: Some(at), .. }) => order[..=at].rotate_right(1),
            Err(Stopped { error, taken: None }) => return Err(error),
        }
        patience = (2 * patience).min(AcquireOptions::MAX_DURATION / 2);
    }
}

/// The reason why not all were acquired.
struct Stopped {
    error: Error,
    /// The place of the lock that was waited for too long, if nothing else was wrong.
    taken: Option<usize>,
}

impl From<Stopped> for Error {
    fn from(stopped: Stopped) -> Self {
        stopped.error
    }
}

/// Acquires all of `locks` or none, in their order. Has so much `patience` for each of them but the first, or as much as there is time.
async fn collect<L>(
    locks: &[&L],
    options: &AcquireOptions,
    deadline: &Deadline,
    patience: Option<Duration>,
) -> std::result::Result<LockSet, Stopped>
where
    L: DistributedLock + ?Sized,
{
    let mut set = LockSet {
        guards: Vec::with_capacity(locks.len()),
    };
    for (at, lock) in locks.iter().enumerate() {
        let (mut options, began, left) = (options.clone(), Instant::now(), deadline.left());
        // To wait for the first one keeps nobody else waiting.
        let limit = patience.filter(|limit| at > 0 && left.is_none_or(|left| *limit < left));
        options.wait = limit.or(left);
        let next = tokio::select! {
            biased;
            lost = set.first_lost() => Err(lost),
            guard = lock.acquire_with(&options) => guard,
        };
        match next {
            Ok(guard) => {
                // What is given back is free at once.
                guard.keeps(false);
                set.guards.push(guard);
            }
            Err(error) => {
                // In an outage, it goes on waiting as it would for a lock that is taken.
                let is_taken = error.is_timeout() || error.is_transient();
                let is_over = limit.is_some_and(|limit| began.elapsed() >= limit);
                set.give_back(deadline).await;
                let taken = (is_taken && is_over).then_some(at);
                return Err(Stopped { error, taken });
            }
        }
    }
    if let Err(error) = set.check() {
        set.give_back(deadline).await;
        return Err(Stopped { error, taken: None });
    }
    for guard in &set.guards {
        guard.keeps(true);
    }
    Ok(set)
}

/// Acquires all of `locks` if all of them are free now. Returns `None` if one of them is taken.
///
/// It makes one attempt for each, in the order of their [ids](crate::LockId), and waits for nobody: a `wait` in `options` or of
/// a lock's own does not count. Of several who try at once one succeeds, unless they spell their servers differently: then each may
/// find what another has.
///
/// ```
/// use lockkit_core::{AcquireOptions, LockClient, MemoryBackend, try_acquire_all};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let client = LockClient::new(MemoryBackend::new());
/// let (from, to) = (client.lock("account/1")?, client.lock("account/2")?);
/// let in_the_way = to.acquire().await?;
/// assert!(try_acquire_all(&[&from, &to], &AcquireOptions::new()).await?.is_none());
/// assert!(from.inspect().await?.is_free(), "nothing stays held");
/// in_the_way.release().await?;
/// let both = try_acquire_all(&[&from, &to], &AcquireOptions::new()).await?;
/// assert!(both.is_some());
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
///
/// # Errors
/// As [`acquire_all`], but never [`Error::Timeout`]. An outage is an error, never `None`. After `None` and after an error
/// nothing is held: the locks acquired so far are released, in the background if the server takes more than a tenth of a second
/// to confirm that.
///
/// # Cancel safety
/// As [`acquire_all`].
pub async fn try_acquire_all<L>(locks: &[&L], options: &AcquireOptions) -> Result<Option<LockSet>>
where
    L: DistributedLock + ?Sized,
{
    none_if_taken(acquire_all(locks, &options.clone().wait(Duration::ZERO)).await)
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

    #[cfg(feature = "blocking")]
    pub(crate) fn into_guards(self) -> Vec<LockGuard> {
        self.guards
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
