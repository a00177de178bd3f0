//! The time after which a hold is not renewed any more.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tokio::time::Instant;

use crate::driver::moment::{Clock, Moment};

/// The `max_hold` of one hold, from its grant or its hand-off on. The time for which the machine is suspended counts, on every
/// backend: a task that does not end has not ended meanwhile.
#[derive(Debug)]
pub(crate) struct MaxHold {
    clock: Clock,
    over: Moment,
    /// The ttl in force, in microseconds: the longest time that a hold has from then on.
    grace: AtomicU64,
}

/// A [`MaxHold`] on the clock that timers run on, as far as is known at one moment. What is slept later makes both earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HoldLimit {
    /// No renewal from here on.
    pub(crate) over: Instant,
    /// The end of a hold whose lease does not end before.
    pub(crate) end: Instant,
}

impl MaxHold {
    /// Begins to count now. `clock` counts what is slept.
    pub(crate) fn begin(clock: &Clock, length: Duration, ttl: Duration) -> Self {
        let over = clock.now().later(length);
        Self {
            clock: clock.clone(),
            over,
            grace: AtomicU64::new(micros(ttl)),
        }
    }

    pub(crate) fn grace(&self) -> Duration {
        Duration::from_micros(self.grace.load(Ordering::Relaxed))
    }

    /// Notes the ttl that the hold asks for from now on.
    pub(crate) fn set_ttl(&self, ttl: Duration) {
        self.grace.store(micros(ttl), Ordering::Relaxed);
    }

    pub(crate) fn look(&self) -> HoldLimit {
        let now = self.clock.now();
        HoldLimit {
            over: self.over.seen_from(now),
            end: self.over.later(self.grace()).seen_from(now),
        }
    }
}

impl Clone for MaxHold {
    fn clone(&self) -> Self {
        Self {
            clock: self.clock.clone(),
            over: self.over,
            grace: AtomicU64::new(self.grace.load(Ordering::Relaxed)),
        }
    }
}

fn micros(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX)
}
