//! Leader election: candidates of which one leads, and observers who see which.

use std::{
    fmt,
    future::Future,
    ops::{ControlFlow, Deref},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures_util::stream::{self, Stream};
#[cfg(feature = "blocking")]
use tokio::time::timeout_at;
use tokio::time::{Instant, sleep_until};

use crate::{
    AcquireOptions, Error, FencingToken, HoldView, Lock, LockGuard, LockKind, LockName, LockState, Result,
    driver::{core::Core, timing},
    name::Shown,
    spi::{HolderWatch, Mode, chain, require_runtime},
};

/// The longest name of an election, in bytes.
const MAX_BYTES: usize = LockName::MAX_BYTES - LockName::OF_ELECTIONS.len();
/// The time between two looks of an observer whom nobody wakes.
const POLL: Duration = Duration::from_secs(1);
/// The time between two looks of an observer whom the backend wakes.
const POLL_WHEN_WOKEN: Duration = Duration::from_secs(10);
/// The shortest time between two looks of an observer, however often the backend wakes it.
const LEAST_PAUSE: Duration = Duration::from_millis(5);
/// The shortest time between two looks that a lease which is about to end asks for.
const LEASE_PAUSE: Duration = Duration::from_millis(50);
/// The shortest time from the beginning of a term to the next campaign of [`Candidate::lead`].
const LEAST_TERM: Duration = Duration::from_millis(100);
/// The time after which nobody was there for the answer to a look: it has `op_timeout` from its first poll on.
const AWAY_AFTER: Duration = AcquireOptions::DEFAULT_OP_TIMEOUT.saturating_add(POLL);
/// The operation that errors of observers name.
const OBSERVE: &str = "observe";

/// An election of this name: candidates of which at most one leads at a time, and observers. Having it does nothing. Cloning
/// is cheap. Made by [`LockClient::election`](crate::LockClient::election).
///
/// A leader holds an exclusive lock, so all that the backend promises of exclusion holds for leaders, and no more:
/// two may believe that they lead where the [guarantees](https://github.com/lockkit/lockkit/blob/main/docs/guarantees.md) say so
/// of holders. Send the token along with every write.
///
/// The lock of the election `jobs` has the name `lockkit#election:jobs` ([`lock_name`](Self::lock_name)). So the lock `jobs` is
/// another one, and [`LockClient::lock`](crate::LockClient::lock) refuses names that begin like that of an election.
///
/// ```
/// use lockkit_core::{LockClient, MemoryBackend};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let election = LockClient::new(MemoryBackend::new()).election("scheduler")?;
/// let mut observer = election.observe();
/// assert_eq!(observer.next().await?, None, "nobody leads yet");
///
/// let leadership = election.candidate("host-7")?.campaign().await?;
/// let leader = observer.next().await?.expect("somebody leads");
/// assert_eq!((&*leader.id, leader.token), ("host-7", leadership.token()));
/// assert!(election.candidate("host-8")?.try_campaign().await?.is_none());
///
/// leadership.resign().await?;
/// assert_eq!(observer.next().await?, None);
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
#[must_use = "an election does nothing by itself: make a candidate, or observe"]
pub struct Election {
    core: Arc<Core>,
    name: LockName,
    lock_name: LockName,
    options: AcquireOptions,
}

impl Election {
    pub(crate) fn new(core: &Arc<Core>, name: &str, defaults: &AcquireOptions) -> Result<Self> {
        let name = LockName::new(name)?;
        let refused = if name.is_of_election() {
            "it begins with `lockkit#election:`, which is the lock of an election; give the election's own name"
        } else if name.as_str().len() > MAX_BYTES {
            "it is longer than 1,007 bytes, the most for an election"
        } else {
            let lock_name = LockName::new([LockName::OF_ELECTIONS, name.as_str()].concat())?;
            return Ok(Self {
                core: core.clone(),
                name,
                lock_name,
                options: AcquireOptions {
                    // A campaign waits until it is won.
                    wait: None,
                    label: None,
                    renew: Some(true),
                    max_hold: None,
                    hold_at_least: None,
                    // Leaders change at the server, where observers see it.
                    local_handoffs: Some(0),
                    ..defaults.clone()
                },
            });
        };
        Err(LockName::refused(name.as_str(), refused))
    }

    /// Returns this election with another ttl for its leaders: the time after which another may lead once the leader is cut
    /// off, from 10 ms to a year. Where something else decides, such as a server's session, it does not count.
    pub fn with_ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = Some(ttl);
        self
    }

    /// Returns its name.
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// Returns the name of the lock that its leader holds: for operators, who inspect or revoke it.
    pub fn lock_name(&self) -> &LockName {
        &self.lock_name
    }

    /// Makes a candidate of this id: who it is, for those who observe. It is the label of the leader's hold. Sends nothing.
    ///
    /// Two candidates may have one id. They are two all the same, and their leaderships have different tokens.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for an id that is empty or longer than 256 bytes, and for a ttl out of bounds.
    pub fn candidate(&self, id: impl Into<Arc<str>>) -> Result<Candidate> {
        let id: Arc<str> = id.into();
        if id.is_empty() {
            return Err(Error::invalid_option("candidate", "its id is empty"));
        }
        if id.len() > AcquireOptions::MAX_LABEL_BYTES {
            return Err(Error::invalid_option(
                "candidate",
                "its id is longer than 256 bytes",
            ));
        }
        let options = self.options.clone().label(id.clone());
        options.validate()?;
        let queue = self.core.queue(self.lock_name.clone(), Mode::Exclusive);
        Ok(Candidate {
            core: self.core.clone(),
            lock: Lock::new(queue, Arc::new(options)),
            id,
        })
    }

    /// Returns who leads, by one look at the server; `None` if nobody does.
    ///
    /// # Errors
    /// As [`Observer::next`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn leader(&self) -> Result<Option<Leader>> {
        let state = self.ask().await.1?;
        let shown = self.leader_in(&state, None)?;
        Ok(shown.map(|(id, token)| Leader::new(id, token, None)))
    }

    /// Makes an observer, who sees who leads and each change of it. Sends nothing yet. It is no candidate, and delays none.
    pub fn observe(&self) -> Observer {
        Observer {
            election: self.clone(),
            wakes: Wakes::NotAsked,
            due: None,
            is_woken: false,
            asked: Instant::now(),
            lease_ends: None,
            looked_at: None,
            leader: None,
            highest: FencingToken::new(0),
        }
    }

    /// Asks the server who holds the lock. Returns the time of that, and the answer.
    ///
    /// Whoever has not polled this for long asks again: the answer from then may show who led long ago, or that none came in time.
    async fn ask(&self) -> (Instant, Result<LockState>) {
        loop {
            let asked = Instant::now();
            let state = self.core.inspect(&self.lock_name, LockKind::Lock).await;
            if asked.elapsed() < AWAY_AFTER {
                return (asked, state);
            }
        }
    }

    /// Returns the leader whom an inspection shows to one who knew this leader before.
    fn leader_in<'a>(
        &self,
        state: &'a LockState,
        known: Option<&'a Leader>,
    ) -> Result<Option<(&'a str, FencingToken)>> {
        let holder = state.holders.iter().max_by_key(|holder| holder.token);
        let Some(holder) = holder else { return Ok(None) };
        match &holder.label {
            Some(id) if holder.token.get() > 0 => Ok(Some((id, holder.token))),
            // ZooKeeper's request for a hold is written over the label. The token says that it is the same leader.
            None if known.is_some_and(|known| known.token == holder.token) => {
                Ok(known.map(|known| (&*known.id, known.token)))
            }
            None if holder.token.get() == 0 => {
                let cause = "the holder has not shown yet who it is";
                Err(Error::transient(self.core.info.name, "observe", cause).for_lock(&self.lock_name))
            }
            _ => Err(Error::invalid_option(
                "election",
                format!(
                    "`{}` is an election, and a lock of that name at the server, `{}`, is held by somebody who is no candidate",
                    self.name, self.lock_name
                ),
            )),
        }
    }
}

impl fmt::Debug for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Election")
            .field("name", &self.name)
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}

/// Checks that this is no name of a lock that is taken in another way: what holds it is a candidate, or collects permits.
///
/// # Errors
/// [`Error::InvalidName`].
pub(crate) fn check_not_reserved(name: LockName) -> Result<LockName> {
    if name.is_of_election() {
        return Err(LockName::refused(
            name.as_str(),
            "it begins with `lockkit#election:`, as the lock of an election does; use `election` with the rest of the name",
        ));
    }
    if name.is_of_collector() {
        return Err(LockName::refused(
            name.as_str(),
            "it begins with `lockkit#permits:`, as the lock does with which several permits are collected; use `acquire_many` of a \
             semaphore",
        ));
    }
    Ok(name)
}

/// A candidate, who can lead. It campaigns only when it is told to. Cloning is cheap. Made by [`Election::candidate`].
#[derive(Clone)]
#[must_use = "a candidate does nothing by itself: campaign, or lead"]
pub struct Candidate {
    core: Arc<Core>,
    lock: Lock,
    id: Arc<str>,
}

impl Candidate {
    /// Returns its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Waits until this candidate leads, for ever if need be. Candidates lead in the order in which they began to wait, where the
    /// backend's locks have such an order.
    ///
    /// # Errors
    /// As [`DistributedLock::acquire_with`](crate::DistributedLock::acquire_with), but for the time-out.
    ///
    /// # Cancel safety
    /// Drop the future to withdraw the candidacy, at any await. Nobody leads because of it. Exception: if a reply was still out,
    /// others may have to wait until the ttl is over. Keep polling the future, or drop it: otherwise it keeps others waiting.
    pub async fn campaign(&self) -> Result<Leadership> {
        let guard = self.lock.acquire().await?;
        Ok(self.won(guard).await)
    }

    /// Makes one attempt to lead. Returns `None` if another leads, also if that is another candidate of this client.
    ///
    /// # Errors
    /// As [`campaign`](Self::campaign). An outage is an error, never `None`.
    ///
    /// # Cancel safety
    /// As [`campaign`](Self::campaign).
    pub async fn try_campaign(&self) -> Result<Option<Leadership>> {
        match self.lock.try_acquire().await? {
            Some(guard) => Ok(Some(self.won(guard).await)),
            None => Ok(None),
        }
    }

    /// Leads with `work`, again and again: campaigns, runs the future that `work` makes for as long as it leads, and campaigns
    /// anew.
    ///
    /// - A loss stops the work at once: its future is dropped at its await. What it has begun elsewhere, in a task of its own or
    ///   in a thread, goes on: have it ask the [`HoldView`].
    /// - Work that returns [`ControlFlow::Continue`] resigns, and is made again once this candidate leads again. Whoever waited
    ///   meanwhile comes first, where the backend's locks have an order. A tenth of a second passes from one term to the next.
    /// - Work that returns [`ControlFlow::Break`] resigns, and ends the whole.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use lockkit_core::{LockClient, MemoryBackend};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let candidate = LockClient::new(MemoryBackend::new()).election("scheduler")?.candidate("host-7")?;
    /// let mut terms = 0;
    /// let last = candidate
    ///     .lead(|held| {
    ///         terms += 1;
    ///         let is_last = terms == 2;
    ///         async move {
    ///             // ... the work of a leader, each write of which carries the token ...
    ///             if is_last { ControlFlow::Break(held.token()) } else { ControlFlow::Continue(()) }
    ///         }
    ///     })
    ///     .await?;
    /// assert!(last.get() > 0);
    /// # Ok::<(), lockkit_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`campaign`](Self::campaign), which ends the whole. A loss is no error, nor is an outage that passes. A resignation that
    /// is not confirmed is logged; it is tried again in the background.
    ///
    /// # Cancel safety
    /// If the future is dropped, so is the future of `work`, and then the leadership, which resigns in the background.
    pub async fn lead<T, F, Fut>(&self, mut work: F) -> Result<T>
    where
        F: FnMut(HoldView) -> Fut,
        Fut: Future<Output = ControlFlow<T>>,
    {
        loop {
            let leadership = self.campaign().await?;
            let began = Instant::now();
            // It may have been lost while observers were told of it.
            let outcome = if leadership.is_held() {
                leadership.during(work(leadership.view())).await
            } else {
                None
            };
            if let Some(output) = self.end_term(leadership, began, outcome).await {
                return Ok(output);
            }
        }
    }

    /// Campaigns as [`campaign`](Self::campaign) does, for up to `wait`: for a thread, which has no future to drop.
    #[cfg(feature = "blocking")]
    pub(crate) async fn campaign_timeout(&self, wait: Duration) -> Result<Leadership> {
        let guard = self.lock.acquire_timeout(wait).await?;
        Ok(self.won(guard).await)
    }

    /// Ends a term: resigns, unless the leadership is lost. Returns the output of work that was the last, and otherwise waits for the
    /// rest of the shortest term.
    pub(crate) async fn end_term<T>(
        &self,
        leadership: Leadership,
        began: Instant,
        outcome: Option<ControlFlow<T>>,
    ) -> Option<T> {
        if leadership.is_held() {
            self.resign(leadership).await;
        } else {
            tracing::info!(election = %self.lock.id(), candidate = %Shown(&self.id), "leads no more: lost");
            drop(leadership);
        }
        if let Some(ControlFlow::Break(output)) = outcome {
            return Some(output);
        }
        // Without it, work that is done at once would go round as fast as the server answers.
        sleep_until(began + LEAST_TERM).await;
        None
    }

    async fn won(&self, guard: LockGuard) -> Leadership {
        let leadership = Leadership {
            guard,
            core: self.core.clone(),
            id: self.id.clone(),
        };
        self.core.announce(self.lock.name()).await;
        leadership
    }

    async fn resign(&self, leadership: Leadership) {
        if let Err(err) = leadership.resign().await {
            tracing::warn!(election = %self.lock.id(), error = chain(&err), "resignation failed");
        }
    }
}

impl fmt::Debug for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Candidate")
            .field("id", &self.id)
            .field("lock", &self.lock)
            .finish_non_exhaustive()
    }
}

/// The leadership of a candidate: a [`LockGuard`], whose methods it has, of the election's lock.
///
/// - `token()` is the fencing token, which is higher than that of each leader before.
/// - `lost()` resolves when another may lead. `check()` and `is_held()` look at the clock, too.
/// - `run(work)` stops the work when the leadership is lost.
/// - `view()` is for those who may look and not resign.
///
/// Dropping it resigns in the background. [`resign`](Self::resign) waits for the outcome.
#[must_use = "dropping the leadership resigns"]
#[derive(Debug)]
pub struct Leadership {
    guard: LockGuard,
    core: Arc<Core>,
    id: Arc<str>,
}

impl Leadership {
    /// Returns the id of the candidate that leads.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Resigns, and returns the outcome. The next candidate may lead then.
    ///
    /// # Errors
    /// [`Error::Lost`] if the leadership had been lost before. [`Error::Backend`] if no confirmation came: it is tried again in the
    /// background, and the leadership ends with its lease at the latest.
    ///
    /// # Cancel safety
    /// If the future is dropped half-way, the resignation goes on in the background.
    pub async fn resign(self) -> Result<()> {
        let Self { guard, core, .. } = self;
        let name = guard.name().clone();
        guard.release().await?;
        core.announce_by_worker(&name).await;
        Ok(())
    }

    /// Runs `work` until it is done, or until the leadership is lost: then it is dropped, and `None` is returned.
    async fn during<F: Future>(&self, work: F) -> Option<F::Output> {
        let work = pin!(work);
        tokio::select! {
            biased;
            // A loss comes first: no step of the work runs after it.
            _ = self.guard.lost() => None,
            output = work => Some(output),
        }
    }
}

impl Deref for Leadership {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        &self.guard
    }
}

/// The leader of an election, as an observer sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leader {
    /// The candidate's id.
    pub id: String,
    /// The fencing token of its leadership.
    pub token: FencingToken,
    /// The leadership began after this moment: that of the observer's last look which did not show it. `None` if this leader was
    /// there at the first look. Servers do not tell since when a lock is held; this is what an observer knows of its own.
    pub began_after: Option<Instant>,
    /// The leadership began before this moment: that of the first look which showed it.
    pub began_before: Instant,
}

impl Leader {
    /// A leader that a look shows which has just been answered.
    fn new(id: &str, token: FencingToken, began_after: Option<Instant>) -> Self {
        Self {
            id: id.to_owned(),
            token,
            began_after,
            began_before: Instant::now(),
        }
    }
}

/// One who sees who leads an election, and each change of it. Made by [`Election::observe`].
///
/// It sees each change once, and in order: the tokens of leaders rise, and the same leader is not seen twice in a row. It
/// sees states, not a history: a leader who came and went between two looks is passed over.
///
/// It looks when the backend says that something has changed: at once, in memory, on Redis (one master), on ZooKeeper and on etcd.
/// Without a word from there it looks once in ten seconds, and on other backends once a second. Wherever it knows the end of the
/// leader's lease, it looks then, too, since no server tells of that.
#[must_use = "an observer sees nothing unless `next` is awaited"]
#[derive(Debug)]
pub struct Observer {
    election: Election,
    wakes: Wakes,
    /// The time of the next look; `None` for now.
    due: Option<Instant>,
    /// The backend has said that something changed since the last look was begun.
    is_woken: bool,
    /// The time at which the last look was begun.
    asked: Instant,
    /// The end of the leader's lease, by the last look that was answered.
    lease_ends: Option<Instant>,
    /// The time at which the last look was begun that was answered and believed.
    looked_at: Option<Instant>,
    leader: Option<Leader>,
    /// The highest token that it saw.
    highest: FencingToken,
}

/// The one who wakes an observer.
#[derive(Debug)]
enum Wakes {
    NotAsked,
    Nobody,
    Backend(Box<dyn HolderWatch>),
}

impl Observer {
    /// Waits for the next change, and returns who leads since; `None` if nobody does. The first call returns who leads now.
    ///
    /// # Errors
    /// [`Error::Backend`] if it cannot tell who leads. If that is transient, call it again: it looks again after a pause, and
    /// returns when the leader has changed since its last word. An outage that passes is no change.
    /// [`Error::InvalidOptions`] if somebody who is no candidate holds the election's lock; [`Error::Closed`]. On ZooKeeper a leader
    /// who was asked for its leadership looks like that, until it ends, to those who have not seen it before.
    ///
    /// # Cancel safety
    /// Drop the future at any await: no change is lost, the next call returns it.
    pub async fn next(&mut self) -> Result<Option<Leader>> {
        loop {
            self.pause().await?;
            if self.look().await? {
                return Ok(self.leader.clone());
            }
        }
    }

    /// Returns the next change as [`next`](Self::next) does, for up to `wait`; `None` if there is none by then. A look that is under way
    /// goes on: if it were dropped, nothing would ever be seen of a server that takes longer than `wait` to answer.
    #[cfg(feature = "blocking")]
    pub(crate) async fn next_timeout(&mut self, wait: Duration) -> Option<Result<Option<Leader>>> {
        let until = Instant::now() + wait;
        loop {
            if let Err(err) = timeout_at(until, self.pause()).await.ok()? {
                return Some(Err(err));
            }
            match self.look().await {
                Ok(false) if Instant::now() < until => {}
                Ok(false) => return None,
                Ok(true) => return Some(Ok(self.leader.clone())),
                Err(err) => return Some(Err(err)),
            }
        }
    }

    /// Returns the time of the last look that showed who leads: what `next` has returned was true then, or later. A look that ended
    /// with an error does not count. `None` before the first.
    pub fn looked_at(&self) -> Option<Instant> {
        self.looked_at
    }

    /// Returns the changes as a stream. It ends after an error that is not transient.
    pub fn into_stream(self) -> impl Stream<Item = Result<Option<Leader>>> + Send + 'static {
        stream::unfold(Some(self), |observer| async move {
            let mut observer = observer?;
            let change = observer.next().await;
            let goes_on = change.as_ref().err().is_none_or(Error::is_transient);
            Some((change, goes_on.then_some(observer)))
        })
    }

    /// Waits for the time of the next look.
    async fn pause(&mut self) -> Result<()> {
        let Self { election, wakes, .. } = self;
        let core = &*election.core;
        core.is_open(OBSERVE)?;
        while let Some(due) = self.due {
            require_runtime(core.info.name, OBSERVE)?;
            tokio::select! {
                biased;
                err = core.over(OBSERVE, Core::is_open) => return Err(err),
                () = wakes.changed(), if !self.is_woken => {
                    self.is_woken = true;
                    self.due = Some(due.min(self.asked + LEAST_PAUSE));
                }
                () = sleep_until(due) => self.due = None,
            }
        }
        Ok(())
    }

    /// Looks who leads. Returns whether that is a change.
    async fn look(&mut self) -> Result<bool> {
        let Election { core, lock_name, .. } = &self.election;
        self.is_woken = false;
        if let Wakes::NotAsked = self.wakes {
            // Before the look, so that no change falls between.
            match core.watch(lock_name).await {
                Ok(Some(watch)) => self.wakes = Wakes::Backend(watch),
                Ok(None) => self.wakes = Wakes::Nobody,
                // The next look asks again.
                Err(err) => {
                    tracing::debug!(lock = %Shown(lock_name.as_str()), error = chain(&err), "nobody wakes the observer");
                }
            }
        }
        let (asked, looked) = self.election.ask().await;
        self.asked = asked;
        // A look that fails tells nothing of the lease that was seen last, which ends all the same.
        if let Ok(state) = &looked {
            let left = state.holders.first().and_then(|holder| holder.left);
            self.lease_ends = left.and_then(|left| asked.checked_add(left));
        }
        // Once it is over, the look that shows what has come of it is still to come.
        let left = self
            .lease_ends
            .map(|ends| ends.checked_duration_since(asked).unwrap_or(POLL));
        self.due = Some(self.asked + self.wakes.pause(left));
        let state = looked?;
        let known = self.leader.as_ref();
        let shown = self.election.leader_in(&state, known)?;
        let before = self.looked_at;
        if before.is_some() && shown == known.map(|leader| (leader.id.as_str(), leader.token)) {
            self.looked_at = Some(self.asked);
            return Ok(false);
        }
        if let Some((_, token)) = shown {
            if token < self.highest {
                let backend = core.info.name;
                let why = format!(
                    "it shows a leader with token {token} after one with token {}: the server has lost data, or is not up to date",
                    self.highest
                );
                return Err(Error::transient(backend, OBSERVE, why).for_lock(lock_name));
            }
            self.highest = token;
        }
        self.looked_at = Some(self.asked);
        self.leader = shown.map(|(id, token)| Leader::new(id, token, before));
        Ok(true)
    }
}

impl Wakes {
    /// Resolves when the backend says that something has changed.
    async fn changed(&mut self) {
        match self {
            Self::Backend(watch) => watch.changed().await,
            Self::NotAsked | Self::Nobody => std::future::pending().await,
        }
    }

    /// Returns the time from one look to the next, where the leader's lease has so much left.
    fn pause(&self, left: Option<Duration>) -> Duration {
        let poll = timing::jittered_down(match self {
            Self::Backend(_) => POLL_WHEN_WOKEN,
            Self::NotAsked | Self::Nobody => POLL,
        });
        left.map_or(poll, |left| poll.min(left.max(LEASE_PAUSE)))
    }
}
