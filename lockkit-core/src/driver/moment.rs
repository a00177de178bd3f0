//! Time as leases are counted in: the clock that timers run on, and the time for which the machine was suspended.
//!
//! While a machine is suspended, its monotonic clock stands still, and a lease at a server elsewhere goes on. Linux has a
//! second clock that goes on as well: the difference of the two is what was slept. A sleep counts from the look that noticed
//! it. A later look makes a sleep seem later, which ends a lease early and never late. So the driver looks before each request
//! that may prove a lease.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    AcquireOptions,
    spi::Lease,
    suspension::{self, asleep},
    sync::Mutex,
};

/// The time before the end of its lease at which a hold ends. Timers have a granularity of a millisecond and fire after it;
/// the loss has to be latched before the server can grant the lock to another.
const TIMER_SLACK: Duration = Duration::from_millis(2);

/// A moment by both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    /// By the clock that timers run on.
    pub(crate) at: Instant,
    /// The time for which the machine had been suspended by then, in all.
    asleep: Duration,
}

impl Moment {
    /// A moment for leases that stand still with the machine.
    pub(crate) fn plain(at: Instant) -> Self {
        let asleep = Duration::ZERO;
        Self { at, asleep }
    }

    /// The moment at this instant, as far as is known at this one.
    pub(crate) fn at_instant(self, at: Instant) -> Self {
        Self {
            at,
            asleep: self.asleep,
        }
    }

    /// The moment that is so much later, if the machine does not sleep until then.
    pub(crate) fn later(self, time: Duration) -> Self {
        Self {
            at: self.at + time,
            asleep: self.asleep,
        }
    }

    pub(crate) fn has_reached(self, end: Self) -> bool {
        end.seen_from(self) <= self.at
    }

    /// The local end of a hold that is `proven` until then at most.
    pub(crate) fn end_of_hold(self, proven: Instant) -> Self {
        Self {
            at: proven.checked_sub(TIMER_SLACK).unwrap_or(proven),
            asleep: self.asleep,
        }
    }

    /// The instant of this moment on the clock that timers run on, as far as is known at `now`. What was slept meanwhile is
    /// taken off.
    pub(crate) fn seen_from(self, now: Self) -> Instant {
        let slept = now.asleep.saturating_sub(self.asleep);
        self.at.checked_sub(slept).unwrap_or(now.at)
    }
}

/// A lease that begins at a moment by both clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proof {
    since: Moment,
    pub(crate) length: Option<Duration>,
}

impl Proof {
    /// The local end of a hold with this lease.
    pub(crate) fn end(&self) -> Option<Moment> {
        let length = self.length?.saturating_sub(TIMER_SLACK);
        Some(self.after(length))
    }

    /// The moment of the regular renewal: after a third of the lease. A hold without a lease is checked as often as one of its
    /// ttl would be renewed.
    pub(crate) fn renewal_due(&self, ttl: Duration) -> Moment {
        self.after(self.length.unwrap_or(ttl) / 3)
    }

    /// Returns `true` while two thirds are left: then a hand-off may pass it on as it is.
    pub(crate) fn is_fresh(&self, now: Moment) -> bool {
        self.length
            .is_none_or(|length| !now.has_reached(self.after(length / 3 + Duration::from_nanos(1))))
    }

    fn after(&self, length: Duration) -> Moment {
        self.since.later(length)
    }
}

/// The clock by which a client's leases are counted.
#[derive(Clone, Debug)]
pub(crate) struct Clock(Option<Arc<Mutex<Sleeps>>>);

impl Clock {
    /// A clock for leases that `stand_still` with the machine, or go on while it is suspended.
    pub(crate) fn new(stand_still: bool) -> Self {
        let sleeps = || Arc::new(Mutex::new(Sleeps::new(asleep())));
        Self((!stand_still && suspension::IS_KNOWN).then(sleeps))
    }

    /// Returns this clock if it counts what is slept, else one that does.
    pub(crate) fn counting_sleep(&self) -> Self {
        match &self.0 {
            Some(_) => self.clone(),
            None => Self::new(false),
        }
    }

    pub(crate) fn now(&self) -> Moment {
        let Some(sleeps) = &self.0 else {
            return Moment::plain(Instant::now());
        };
        let asleep = asleep();
        let at = Instant::now();
        let asleep = sleeps.lock().see(at, asleep);
        Moment { at, asleep }
    }

    /// Looks for what has been slept, if that counts for leases. Returns the time of that look.
    pub(crate) fn look(&self) -> Option<Instant> {
        self.0.is_some().then(|| self.now().at)
    }

    /// The proof that `lease` gives. Somebody has looked before the request.
    pub(crate) fn proof(&self, lease: &Lease) -> Proof {
        let asleep = match &self.0 {
            Some(sleeps) => sleeps.lock().by(lease.since),
            None => Duration::ZERO,
        };
        let since = Moment {
            at: lease.since,
            asleep,
        };
        // Far beyond any use, and near enough for the clock to count to.
        let length = lease
            .length
            .map(|length| length.min(AcquireOptions::MAX_DURATION));
        Proof { since, length }
    }
}

/// The suspensions of the machine, as they were noticed.
#[derive(Debug)]
struct Sleeps {
    /// The sum of its sleeps when this began.
    first: Duration,
    /// The times at which more was noticed, and what it had slept by then.
    seen: Vec<(Instant, Duration)>,
}

impl Sleeps {
    /// The least that counts: the two clocks are not read in the same instant.
    const LEAST: Duration = Duration::from_millis(1);
    /// The number of them that is remembered. A lease from before counts as if it had slept through all of them.
    const MOST: usize = 16;

    fn new(first: Duration) -> Self {
        let seen = Vec::new();
        Self { first, seen }
    }

    /// Notes what had been slept at `at`. Returns what counts.
    fn see(&mut self, at: Instant, asleep: Duration) -> Duration {
        let known = self.seen.last().map_or(self.first, |(_, asleep)| *asleep);
        if asleep < known + Self::LEAST {
            return known;
        }
        if self.seen.len() == Self::MOST {
            self.seen.remove(0);
        }
        self.seen.push((at, asleep));
        asleep
    }

    /// Returns what had been slept by `then`, at least.
    fn by(&self, then: Instant) -> Duration {
        let before = self.seen.iter().rev().find(|(at, _)| *at <= then);
        before.map_or(self.first, |(_, asleep)| *asleep)
    }
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    fn proof(since: Instant, length: Option<Duration>) -> Proof {
        Clock::new(true).proof(&Lease { since, length })
    }

    fn plain(at: Instant) -> Moment {
        Moment::plain(at)
    }

    #[test]
    fn a_hold_ends_before_its_lease_and_is_renewed_after_a_third() {
        let since = Instant::now();
        let lease = proof(since, Some(30_000 * MS));
        assert_eq!(lease.end(), Some(plain(since + 29_998 * MS)));
        assert_eq!(lease.renewal_due(MS), plain(since + 10_000 * MS));
        assert!(lease.is_fresh(plain(since + 10_000 * MS)));
        assert!(!lease.is_fresh(plain(since + 10_001 * MS)));
        let unbounded = proof(since, None);
        assert_eq!(unbounded.end(), None);
        assert_eq!(unbounded.renewal_due(300 * MS), plain(since + 100 * MS));
        assert!(unbounded.is_fresh(plain(since + 1_000_000 * MS)));
    }

    #[test]
    fn no_length_is_too_long_for_the_clock() {
        let end = proof(Instant::now(), Some(Duration::MAX)).end();
        assert!(end.is_some());
    }

    #[test]
    fn what_is_slept_ends_a_lease_sooner() {
        let since = Instant::now();
        let asleep = 7 * SECOND;
        let lease = Proof {
            since: Moment { at: since, asleep },
            length: Some(30 * SECOND),
        };
        let end = lease.end().unwrap();
        for (slept, left) in [
            (0, 29_998),
            (7, 29_998),
            (17, 19_998),
            (36, 998),
            (37, 0),
            (90, 0),
        ] {
            let now = Moment {
                at: since,
                asleep: slept * SECOND,
            };
            let seen = end.seen_from(now).saturating_duration_since(since);
            assert_eq!(seen, left * MS, "{slept} s");
            assert_eq!(now.has_reached(end), left == 0, "{slept} s");
        }
    }

    #[test]
    fn a_sleep_counts_from_when_it_was_noticed() {
        let began = Instant::now();
        let mut sleeps = Sleeps::new(SECOND);
        assert_eq!(sleeps.see(began, SECOND), SECOND);
        let later = |secs| began + secs * SECOND;
        assert_eq!(sleeps.see(later(1), SECOND + MS / 2), SECOND, "that is noise");
        assert_eq!(sleeps.see(later(2), Duration::ZERO), SECOND, "and so is that");
        assert_eq!(sleeps.see(later(3), 5 * SECOND), 5 * SECOND);
        assert_eq!(sleeps.see(later(6), 9 * SECOND), 9 * SECOND);
        for (then, by_then) in [(0, 1), (2, 1), (3, 5), (5, 5), (6, 9), (99, 9)] {
            assert_eq!(sleeps.by(later(then)), by_then * SECOND, "by {then}");
        }
        for n in 0..100 {
            sleeps.see(later(100 + n), (100 + n) * SECOND);
        }
        assert_eq!(sleeps.seen.len(), Sleeps::MOST);
        assert_eq!(sleeps.by(later(150)), SECOND, "long ago is before all");
        assert_eq!(sleeps.by(later(199)), 199 * SECOND);
    }

    /// Clocks that are read one after the other, on a machine that is busy.
    #[test]
    fn a_machine_that_runs_does_not_sleep() {
        let clock = Clock::new(false);
        let began = clock.now();
        let busy: Vec<_> = (0..8)
            .map(|_| {
                let clock = clock.clone();
                std::thread::spawn(move || (0..20_000).for_each(|_| _ = clock.now()))
            })
            .collect();
        for thread in busy {
            thread.join().unwrap();
        }
        assert_eq!(clock.now().asleep, began.asleep);
    }
}
