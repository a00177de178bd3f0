//! The driver's tracing: its events and spans. With the feature `metrics`, its metrics, which are listed in [`meters`].
//!
//! An acquisition and a hold are values here, and their end is their drop. So the gauges are right whichever way they end, and
//! whoever ends them.

/// Declares the values of a label.
macro_rules! label {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $value:ident = $label:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name { $($(#[$of])* $value,)+ }

        impl $name {
            #[cfg(feature = "metrics")]
            const ALL: &[Self] = &[$(Self::$value),+];

            const fn label(self) -> &'static str {
                match self { $(Self::$value => $label,)+ }
            }
        }
    };
}

#[cfg(feature = "metrics")]
mod meters;
#[cfg(not(feature = "metrics"))]
mod no_meters;
mod spans;

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use tracing::Span;

#[cfg(feature = "metrics")]
pub(crate) use self::meters::{Mark, Meters};
#[cfg(not(feature = "metrics"))]
pub(crate) use self::no_meters::{Mark, Meters};
use crate::{
    Error, LossReason,
    driver::{hold::Hold, lock_queue::LockQueue},
    spi::chain,
};

label! {
    /// The end of an acquisition.
    Outcome {
        /// The server granted the lock.
        Granted = "granted",
        /// Another holder of this client passed it on.
        HandedOff = "handed_off",
        /// It was taken for as long as the caller would wait.
        Timeout = "timeout",
        Error = "error",
        /// The caller dropped the future.
        Cancelled = "cancelled",
    }
}

label! {
    /// The end of a hold.
    End {
        /// Its guard was released, dropped or detached.
        Released = "released",
        Expired = "expired",
        Revoked = "revoked",
        Asked = "asked",
        Disconnected = "disconnected",
        MaxHold = "max_hold",
    }
}

impl End {
    /// The end of a hold that was lost.
    const fn lost(reason: LossReason) -> Self {
        match reason {
            LossReason::Expired => Self::Expired,
            // No hold ends as gone: what is gone was not adopted, and never held here.
            LossReason::Revoked | LossReason::Gone => Self::Revoked,
            LossReason::Asked => Self::Asked,
            LossReason::Disconnected => Self::Disconnected,
            LossReason::MaxHold => Self::MaxHold,
        }
    }
}

/// An acquisition under way. It ends when it is dropped: cancelled, unless it was told of another outcome.
#[must_use]
pub(crate) struct Acquisition<'a> {
    queue: &'a LockQueue,
    began: Mark,
    span: Span,
    outcome: Outcome,
}

impl<'a> Acquisition<'a> {
    pub(crate) fn begin(queue: &'a LockQueue) -> Self {
        queue.core.meters.begin_waiting();
        Self {
            queue,
            began: Mark::now(),
            span: spans::acquire(queue),
            outcome: Outcome::Cancelled,
        }
    }

    /// Polls `work` within its span.
    pub(crate) fn poll<F: Future>(&self, work: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.span.in_scope(|| work.poll(cx))
    }

    /// Ends with `hold`, which is observed from now on.
    pub(crate) fn granted(mut self, hold: &Hold, outcome: Outcome) {
        self.outcome = outcome;
        let queue = self.queue;
        self.span.in_scope(|| match outcome {
            Outcome::HandedOff => {
                tracing::trace!(lock = %queue.id, "handed to the next waiter of this client");
            }
            _ => tracing::trace!(lock = %queue.id, "granted"),
        });
        let span = spans::hold(hold, &self.span);
        if Meters::ARE_ON || span.is_some() {
            hold.cell.observe(ObservedHold::begin(&queue.core.meters, span));
        }
    }

    pub(crate) fn failed(mut self, err: &Error) {
        self.outcome = if err.is_timeout() {
            Outcome::Timeout
        } else {
            spans::failed(&self.span, err);
            Outcome::Error
        };
    }
}

impl Drop for Acquisition<'_> {
    fn drop(&mut self) {
        self.queue.core.meters.end_waiting(self.outcome, self.began);
        spans::record(&self.span, "lockkit.acquire.outcome", self.outcome.label());
    }
}

/// Observes a hold that goes on as another one.
pub(crate) fn continued(hold: &Hold) {
    let meters = &hold.queue().core.meters;
    let span = spans::hold(hold, &Span::none());
    if Meters::ARE_ON || span.is_some() {
        hold.cell.observe(ObservedHold::begin(meters, span));
    }
    tracing::trace!(lock = %hold.queue().id, "shared from now on");
}

/// Logs a downgrade without an answer, which is asked for again.
pub(crate) fn downgrade_failed(queue: &LockQueue, err: &Error) {
    tracing::debug!(lock = %queue.id, error = chain(err), "downgrade failed; trying again until the lease ends");
}

/// A hold from its grant to its end, as its metrics and its span see it. It is in the cell of the hold, which ends it where it
/// latches that end. Dropped without an end, it is only not counted any more.
#[derive(Debug)]
pub(crate) struct ObservedHold {
    meters: Meters,
    since: Mark,
    span: spans::HoldSpan,
}

impl ObservedHold {
    fn begin(meters: &Meters, span: spans::HoldSpan) -> Self {
        meters.begin_hold();
        Self {
            meters: meters.clone(),
            since: Mark::now(),
            span,
        }
    }

    /// Ends it: lost for this reason, or else released.
    pub(crate) fn end(self, lost: Option<LossReason>) {
        let end = lost.map_or(End::Released, End::lost);
        self.meters.held(end, self.since);
        if let Some(span) = &self.span {
            spans::ended(span, end);
        }
    }
}

impl Drop for ObservedHold {
    fn drop(&mut self) {
        self.meters.end_hold();
    }
}

/// Logs a failed attempt: as a warning the first time, for debugging if the same failure was logged `before`.
pub(crate) fn attempt_failed(queue: &LockQueue, why: &str, before: bool) {
    if before {
        tracing::debug!(lock = %queue.id, error = why, "the attempt failed again; trying on");
    } else {
        tracing::warn!(lock = %queue.id, error = why, "the attempt failed; trying again");
    }
}

pub(crate) fn renewal_failed(queue: &LockQueue, err: &Error) {
    queue.core.meters.renewal_failed();
    tracing::warn!(lock = %queue.id, error = chain(err), "renewal failed; trying again until the lease ends");
}

pub(crate) fn release_failed(queue: &LockQueue, err: &Error) {
    queue.core.meters.release_failed();
    tracing::warn!(lock = %queue.id, error = chain(err), "release of a dropped guard failed");
}

pub(crate) fn release_unconfirmed(queue: &LockQueue, err: &Error) {
    queue.core.meters.release_failed();
    tracing::warn!(lock = %queue.id, error = chain(err), "release was never confirmed; the lease is over");
}

pub(crate) fn lost(queue: &LockQueue, reason: LossReason) {
    queue.core.meters.lost(End::lost(reason));
    tracing::warn!(name: "lost", lock = %queue.id, %reason, "lost");
}
