//! A deployment, the faults that befall it, and what they excuse.

use std::{fmt, io, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{LockClient, Result};

use super::Strike;
use crate::Harness;

/// A kind of fault that a deployment has, and what docs/guarantees.md says that it breaks. What it does not excuse is
/// a violation, also while it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "each is a property of its own")]
pub struct Fault {
    /// Its name in schedules.
    pub name: &'static str,
    /// In how many places it may strike. A fault that is bearable at a minority has no more places than that.
    pub places: u32,
    /// Its weight in the choice among all faults.
    pub weight: u32,
    /// It is healed at the end of the epoch, however long the schedule says that it lasts.
    pub lasting: bool,
    /// It befalls a way to a server, and not the server.
    pub way: bool,
    /// Exclusion (**ME ✘**) until the older holder is told.
    pub overlap: Option<Told>,
    /// The time for which it excuses only holds with nothing to spare: after a grant that others contended for, or for as long
    /// as those may keep what they took if they have died; and while something else befalls the deployment.
    pub bare: Option<Duration>,
    /// Counters of tokens begin at the clock anew, so that tokens go back (**F ✘**) where they had outrun it.
    pub restarts: bool,
    /// Waiters may lose their places if it lasts for so long.
    pub order: Duration,
    /// The time after it has healed for which nobody can expect a grant.
    pub recovery: Duration,
    /// It came to the deployment when seeds had been recorded: without it, they make the schedules that they made.
    pub later: bool,
}

/// Within which time a holder is told of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// This time, whatever its ttl.
    Within(Duration),
    /// At its next renewal, a third of its ttl, and this time.
    AtRenewal(Duration),
    /// At the end of its lease, and this time later.
    AtLeaseEnd(Duration),
}

impl Told {
    /// Returns how long after the fault a holder with `ttl` may still believe that it holds.
    pub fn after(self, ttl: Duration) -> Duration {
        match self {
            Self::Within(time) => time,
            Self::AtRenewal(time) => ttl / 3 + time,
            Self::AtLeaseEnd(time) => ttl + time,
        }
    }

    /// The time for a holder whose renewals are not answered: the end of its lease instead of its next renewal.
    #[must_use]
    pub const fn unanswered(self) -> Self {
        match self {
            Self::AtRenewal(time) => Self::AtLeaseEnd(time),
            other => other,
        }
    }
}

impl Fault {
    /// One that excuses nothing but a wait of two seconds after it has healed, and the order of waiters.
    pub const fn new(name: &'static str) -> Self {
        Self {
            name,
            places: 1,
            weight: 1,
            lasting: false,
            way: false,
            overlap: None,
            bare: None,
            restarts: false,
            order: Duration::ZERO,
            recovery: Duration::from_secs(2),
            later: false,
        }
    }

    /// In how many places.
    #[must_use]
    pub const fn places(mut self, places: u32) -> Self {
        self.places = places;
        self
    }

    /// Sets how often it is chosen.
    #[must_use]
    pub const fn weight(mut self, weight: u32) -> Self {
        self.weight = weight;
        self
    }

    /// It lasts until the end of the epoch.
    #[must_use]
    pub const fn lasting(mut self) -> Self {
        self.lasting = true;
        self
    }

    /// It befalls a way to a server.
    #[must_use]
    pub const fn of_a_way(mut self) -> Self {
        self.way = true;
        self
    }

    /// Two may hold until the older one is told.
    #[must_use]
    pub const fn excuses_overlap(mut self, until: Told) -> Self {
        self.overlap = Some(until);
        self
    }

    /// Two may hold until the older one is told, if its hold has nothing to spare, as it has for this time at most
    /// after a grant that others contended for.
    #[must_use]
    pub const fn excuses_overlap_of_bare(mut self, until: Told, within: Duration) -> Self {
        self.bare = Some(within);
        self.excuses_overlap(until)
    }

    /// Counters of tokens begin anew, at the microseconds since 1970.
    #[must_use]
    pub const fn restarts_tokens(mut self) -> Self {
        self.restarts = true;
        self
    }

    /// Waiters keep their places.
    #[must_use]
    pub const fn keeps_order(self) -> Self {
        self.keeps_order_until(Duration::MAX)
    }

    /// Waiters keep their places if it lasts for less than this.
    #[must_use]
    pub const fn keeps_order_until(mut self, length: Duration) -> Self {
        self.order = length;
        self
    }

    /// Sets how long it takes to get over it.
    #[must_use]
    pub const fn recovery(mut self, recovery: Duration) -> Self {
        self.recovery = recovery;
        self
    }

    /// It came later. In some of the schedules it takes the place of another fault; all else in them is what it was without it.
    #[must_use]
    pub const fn later(mut self) -> Self {
        self.later = true;
        self
    }
}

/// A deployment under torture. Any [`Harness`] is one without faults of its own, by [`Bare`].
#[async_trait]
pub trait Target: fmt::Debug + Send + Sync + 'static {
    /// The ways to it: client n takes the n-th, and begins again when they are used up. At least one.
    fn routes(&self) -> Vec<String>;

    /// A new client by the way `route`.
    ///
    /// # Errors
    /// Whatever connecting reports.
    async fn connect(&self, route: &str) -> Result<LockClient>;

    /// Returns whether other processes reach it by the same routes.
    fn is_shared(&self) -> bool {
        true
    }

    /// The shortest ttl that it takes.
    fn min_ttl(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// The longest ttl that it takes.
    fn max_ttl(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// Returns for how long a waiter whose process died or stands still may keep the name from others.
    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        client.dead_holder_bound(ttl)
    }

    /// Returns whether several who adopt one hold at once may split the servers, so that none of them gets it.
    fn splits(&self) -> bool {
        false
    }

    /// Returns whether a client shows its holds by requests of their own, some time after their grants. What keeps it from that keeps them
    /// off lists.
    fn shows_late(&self) -> bool {
        false
    }

    /// Returns the faults that may befall it.
    fn faults(&self) -> Vec<Fault> {
        Vec::new()
    }

    /// Has `strike` befall it. `names` are those of the locks of the epoch. Called from a thread that may block.
    ///
    /// # Errors
    /// If it cannot be done, which ends the torture: a fault that did not happen excuses nothing.
    fn strike(&self, strike: &Strike, names: &[String]) -> io::Result<()> {
        let _ = names;
        Err(io::Error::other(format!(
            "there is no fault {:?} here",
            strike.fault
        )))
    }

    /// Undoes it. Called once for each strike.
    ///
    /// # Errors
    /// If it cannot be done.
    fn heal(&self, strike: &Strike) -> io::Result<()> {
        let _ = strike;
        Ok(())
    }

    /// Lists what there is of lockkit's own and is not documented to stay: connections, sessions, entries, as the
    /// deployment itself shows them. Each has a name that it keeps. Asked when all clients are closed, until there is
    /// nothing or the dead have had their time. Called from a thread that may block.
    ///
    /// # Errors
    /// If the deployment cannot be asked.
    fn left(&self) -> io::Result<Vec<String>> {
        Ok(Vec::new())
    }
}

/// A server without faults.
#[derive(Clone, Debug)]
pub struct Bare(pub Arc<dyn Harness>);

#[async_trait]
impl Target for Bare {
    fn routes(&self) -> Vec<String> {
        vec![self.0.url().unwrap_or_default()]
    }

    async fn connect(&self, route: &str) -> Result<LockClient> {
        match self.0.url() {
            Some(_) => self.0.connect(route).await,
            None => self.0.client().await,
        }
    }

    fn is_shared(&self) -> bool {
        self.0.url().is_some()
    }
}
