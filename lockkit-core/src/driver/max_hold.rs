//! The time after which a hold is not renewed any more.

use std::time::Duration;

use tokio::time::Instant;

use crate::driver::moment::{Clock, Moment};

/// The `max_hold` of one hold, from its grant or its hand-off on. The time for which the machine is suspended counts, on every
/// backend: a task that does not end has not ended meanwhile.
#[derive(Clone, Debug)]
pub(crate) struct MaxHold {
    clock: Clock,
    over: Moment,
    /// The time that a hold without a lease has from then on.
    pub(crate) grace: Duration,
}

/// A [`MaxHold`] on the clock that timers run on, as far as is known at one moment. What is slept later makes both earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HoldLimit {
    /// No renewal from here on.
    pub(crate) over: Instant,
    /// The end of a hold without a lease.
    pub(crate) end: Instant,
}

impl MaxHold {
    /// Begins to count now. `clock` counts what is slept.
    pub(crate) fn begin(clock: &Clock, length: Duration, ttl: Duration) -> Self {
        let over = clock.now().later(length);
        Self {
            clock: clock.clone(),
            over,
            grace: ttl,
        }
    }

    pub(crate) fn look(&self) -> HoldLimit {
        let now = self.clock.now();
        HoldLimit {
            over: self.over.seen_from(now),
            end: self.over.later(self.grace).seen_from(now),
        }
    }
}
