//! Leader election: candidates of which one leads, and observers who see which.

use std::{
    fmt,
    ops::{ControlFlow, Deref},
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt;
use tokio::time::Instant;

use super::{Host, LockGuard, reentrant::Inner};
use crate::{AcquireOptions, Error, HoldView, Leader, LockName, Result};

/// An election of this name; the blocking [`Election`](crate::Election), whose docs say what holds for leaders. Having it does
/// nothing. Cloning is cheap. Made by [`LockClient::election`](super::LockClient::election).
///
/// ```
/// use lockkit_core::{MemoryBackend, blocking::LockClient};
///
/// let election = LockClient::new(MemoryBackend::new())?.election("scheduler")?;
/// let mut observer = election.observe();
/// assert_eq!(observer.next().transpose()?, Some(None), "nobody leads yet");
///
/// let leadership = election.candidate("host-7")?.campaign()?;
/// let leader = observer.next().transpose()?.flatten().expect("somebody leads");
/// assert_eq!((&*leader.id, leader.token), ("host-7", leadership.token()));
/// assert!(election.candidate("host-8")?.try_campaign()?.is_none());
///
/// leadership.resign()?;
/// assert_eq!(observer.next().transpose()?, Some(None));
/// # Ok::<(), lockkit_core::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "an election does nothing by itself: make a candidate, or observe"]
pub struct Election {
    election: crate::Election,
    host: Arc<Host>,
}

impl Election {
    pub(super) fn new(election: crate::Election, host: &Arc<Host>) -> Self {
        Self {
            election,
            host: host.clone(),
        }
    }

    /// Returns this election with another ttl for its leaders, as [`crate::Election::with_ttl`].
    pub fn with_ttl(self, ttl: Duration) -> Self {
        let Self { election, host } = self;
        let election = election.with_ttl(ttl);
        Self { election, host }
    }

    /// Returns its name.
    pub fn name(&self) -> &LockName {
        self.election.name()
    }

    /// Returns the name of the lock that its leader holds: for operators, who inspect or revoke it.
    pub fn lock_name(&self) -> &LockName {
        self.election.lock_name()
    }

    /// Makes a candidate of this id, as [`crate::Election::candidate`]. Sends nothing.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for an id that is empty or longer than 256 bytes, and for a ttl out of bounds.
    pub fn candidate(&self, id: impl Into<Arc<str>>) -> Result<Candidate> {
        Ok(Candidate {
            candidate: self.election.candidate(id)?,
            host: self.host.clone(),
        })
    }

    /// Returns who leads, by one look at the server; `None` if nobody does.
    ///
    /// # Errors
    /// As [`crate::Observer::next`]; [`Error::Backend`] within an async task.
    pub fn leader(&self) -> Result<Option<Leader>> {
        self.host.block_on("inspect", self.election.leader())
    }

    /// Makes an observer, who sees who leads and each change of it. Sends nothing yet. It is no candidate, and delays none.
    pub fn observe(&self) -> Observer {
        Observer {
            inner: self.election.observe(),
            is_over: false,
            host: self.host.clone(),
        }
    }
}

impl fmt::Debug for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("blocking::Election").field(&self.election).finish()
    }
}

/// A candidate, who can lead; the blocking [`Candidate`](crate::Candidate). It campaigns only when it is told to. Cloning is cheap.
/// Made by [`Election::candidate`].
#[derive(Clone)]
#[must_use = "a candidate does nothing by itself: campaign, or lead"]
pub struct Candidate {
    candidate: crate::Candidate,
    host: Arc<Host>,
}

impl Candidate {
    /// Returns its id.
    pub fn id(&self) -> &str {
        self.candidate.id()
    }

    /// Waits until this candidate leads, for ever if need be, as [`crate::Candidate::campaign`].
    ///
    /// # Errors
    /// As there; [`Error::Backend`] within an async task.
    pub fn campaign(&self) -> Result<Leadership> {
        let leadership = self.host.block_on("campaign", self.candidate.campaign())?;
        Ok(Leadership::new(leadership, &self.host))
    }

    /// Makes one attempt to lead. Returns `None` if another leads, also if that is another candidate of this client.
    ///
    /// # Errors
    /// As [`campaign`](Self::campaign). An outage is an error, never `None`.
    pub fn try_campaign(&self) -> Result<Option<Leadership>> {
        let leadership = self.host.block_on("campaign", self.candidate.try_campaign())?;
        Ok(leadership.map(|leadership| Leadership::new(leadership, &self.host)))
    }

    /// Waits until this candidate leads, for up to `wait`. Then it withdraws: nobody leads because of it.
    ///
    /// # Errors
    /// [`Error::Timeout`] if another still leads then; [`Error::InvalidOptions`] for a time of more than a year. Otherwise as
    /// [`campaign`](Self::campaign).
    pub fn campaign_timeout(&self, wait: Duration) -> Result<Leadership> {
        let leadership = self
            .host
            .block_on("campaign", self.candidate.campaign_timeout(wait))?;
        Ok(Leadership::new(leadership, &self.host))
    }

    /// Leads with `work`, again and again: campaigns, runs `work`, and campaigns anew.
    ///
    /// - Nothing stops `work` when the leadership is lost. Call [`HoldView::check`] between its steps, and return
    ///   [`ControlFlow::Continue`] once that fails.
    /// - Work that returns [`ControlFlow::Continue`] resigns, unless the leadership is lost, and runs again once this candidate
    ///   leads again. Whoever waited meanwhile comes first, where the backend's locks have an order. A tenth of a second passes from one
    ///   term to the next.
    /// - Work that returns [`ControlFlow::Break`] resigns, and ends the whole, also if the leadership is lost.
    /// - Work that panics resigns in the background.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use lockkit_core::{MemoryBackend, blocking::LockClient};
    ///
    /// let candidate = LockClient::new(MemoryBackend::new())?.election("scheduler")?.candidate("host-7")?;
    /// let mut steps = 0;
    /// let last = candidate.lead(|held| {
    ///     while held.check().is_ok() {
    ///         steps += 1; // ... a step of the work of a leader, each write of which carries the token ...
    ///         if steps == 3 {
    ///             return ControlFlow::Break(held.token());
    ///         }
    ///     }
    ///     ControlFlow::Continue(())
    /// })?;
    /// assert!(last.get() > 0);
    /// # Ok::<(), lockkit_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`campaign`](Self::campaign), which ends the whole. A loss is no error, nor is an outage that passes. A resignation that
    /// is not confirmed is logged; it is tried again in the background.
    pub fn lead<T>(&self, mut work: impl FnMut(HoldView) -> ControlFlow<T>) -> Result<T> {
        loop {
            let leadership = self.host.block_on("campaign", self.candidate.campaign())?;
            let began = Instant::now();
            // Outside of the client's runtime: what it starts with Tokio belongs to the caller's. The leadership may have been lost while
            // observers were told of it.
            let flow = leadership.is_held().then(|| work(leadership.view()));
            let ended = self.candidate.end_term(leadership, began, flow);
            if let Some(output) = self.host.block_on("resign", ended.map(Ok))? {
                return Ok(output);
            }
        }
    }
}

impl fmt::Debug for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("blocking::Candidate")
            .field(&self.candidate)
            .finish()
    }
}

/// The leadership of a candidate: a [`LockGuard`], whose methods it has, of the election's lock; the blocking
/// [`Leadership`](crate::Leadership).
///
/// `check()` and `is_held()` tell whether it still leads, and `wait_lost()` blocks until it does not. `token()` is higher than that of each
/// leader before. Dropping it resigns in the background. [`resign`](Self::resign) waits for the outcome.
#[must_use = "dropping the leadership resigns"]
#[derive(Debug)]
pub struct Leadership {
    guard: LockGuard,
    id: Box<str>,
}

impl Leadership {
    fn new(leadership: crate::Leadership, host: &Arc<Host>) -> Self {
        Self {
            id: leadership.id().into(),
            guard: LockGuard::new(leadership, host),
        }
    }

    /// Returns the id of the candidate that leads.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Resigns, and returns the outcome. The next candidate may lead then.
    ///
    /// # Errors
    /// [`Error::Lost`] if the leadership had been lost before. [`Error::Backend`] if no confirmation came: it is tried again in the
    /// background, and the leadership ends with its lease at the latest. Within an async task also [`Error::Backend`]: the
    /// resignation then goes on in the background, as if the leadership had been dropped.
    pub fn resign(self) -> Result<()> {
        self.guard.release()
    }
}

impl Deref for Leadership {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        &self.guard
    }
}

impl From<crate::Leadership> for Inner {
    fn from(leadership: crate::Leadership) -> Self {
        Self::Leading(Box::new(leadership))
    }
}

/// One who sees who leads an election, and each change of it: an iterator over the leaders, `None` for nobody. The blocking
/// [`Observer`](crate::Observer), whose docs say what it sees, and when. Made by [`Election::observe`].
///
/// The first item is who leads now. Each further one is waited for, for ever if need be: [`next_timeout`](Self::next_timeout) does not.
/// An error that is transient is no end: the next item comes once it can tell again. The iterator ends after any other error, such as
/// [`Error::Closed`], and after one within an async task.
///
/// ```
/// use std::time::Duration;
///
/// use lockkit_core::{MemoryBackend, blocking::LockClient};
///
/// let election = LockClient::new(MemoryBackend::new())?.election("scheduler")?;
/// let leadership = election.candidate("host-7")?.campaign()?;
/// let mut observer = election.observe();
/// for change in observer.by_ref().take(1) {
///     match change? {
///         Some(leader) => println!("{} leads, with token {}", leader.id, leader.token),
///         None => println!("nobody leads"),
///     }
/// }
/// assert!(observer.next_timeout(Duration::from_millis(20)).is_none(), "no change");
/// leadership.resign()?;
/// # Ok::<(), lockkit_core::Error>(())
/// ```
#[must_use = "an observer sees nothing unless it is iterated over"]
pub struct Observer {
    inner: crate::Observer,
    is_over: bool,
    host: Arc<Host>,
}

impl Observer {
    /// Blocks until the next change, for up to `timeout`. Returns `None` if there is none by then, and after the end. A look at the
    /// server that is under way by then goes on, for up to two [`op_timeout`](AcquireOptions::DEFAULT_OP_TIMEOUT)s: one in which the server
    /// is asked to wake this observer, and one in which it is asked who leads.
    ///
    /// # Errors
    /// Those of the iterator.
    pub fn next_timeout(&mut self, timeout: Duration) -> Option<Result<Option<Leader>>> {
        if self.is_over {
            return None;
        }
        let (observer, timeout) = (&mut self.inner, timeout.min(AcquireOptions::MAX_DURATION));
        let next = async { observer.next_timeout(timeout).await.transpose() };
        let change = self.host.block_on("observe", next);
        self.is_over = is_end(&change);
        change.transpose()
    }

    /// Returns the time of the last look that showed who leads, as [`crate::Observer::looked_at`].
    pub fn looked_at(&self) -> Option<Instant> {
        self.inner.looked_at()
    }
}

impl Iterator for Observer {
    type Item = Result<Option<Leader>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let change = self.host.block_on("observe", self.inner.next());
        self.is_over = is_end(&change);
        Some(change)
    }
}

fn is_end<T>(change: &Result<T>) -> bool {
    !change.as_ref().err().is_none_or(Error::is_transient)
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("blocking::Observer").field(&self.inner).finish()
    }
}
