//! What the driver tells the world: tracing events, and metrics with the feature of that name.
//!
//! | metric | kind | labels | what |
//! |---|---|---|---|
//! | `lockkit_acquisitions_total` | counter | `backend`, `outcome` | acquisitions by outcome: `granted`, `handed_off`, `timeout`, `error` |
//! | `lockkit_losses_total` | counter | `backend`, `reason` | holds that were lost |
//! | `lockkit_renewal_failures_total` | counter | `backend` | renewals that failed and were tried again |
//! | `lockkit_release_failures_total` | counter | `backend` | releases that were not confirmed |

use crate::{Error, driver::line::Line, spi::chain};

pub(crate) fn granted(line: &Line) {
    count(line, "lockkit_acquisitions_total", "outcome", "granted");
    tracing::trace!(lock = %line.id, "granted");
}

pub(crate) fn handed_off(line: &Line) {
    count(line, "lockkit_acquisitions_total", "outcome", "handed_off");
    tracing::trace!(lock = %line.id, "handed to the next waiter of this client");
}

pub(crate) fn not_granted(line: &Line, err: &Error) {
    let outcome = if err.is_timeout() { "timeout" } else { "error" };
    count(line, "lockkit_acquisitions_total", "outcome", outcome);
}

/// A failure that was heard `before` is told again only to whoever wants to know everything.
pub(crate) fn attempt_failed(line: &Line, why: &str, before: bool) {
    if before {
        tracing::debug!(lock = %line.id, error = why, "the attempt failed again; trying on");
    } else {
        tracing::warn!(lock = %line.id, error = why, "the attempt failed; trying again");
    }
}

pub(crate) fn renewal_failed(line: &Line, err: &Error) {
    count(line, "lockkit_renewal_failures_total", "", "");
    tracing::warn!(lock = %line.id, error = chain(err), "renewal failed; trying again until the lease ends");
}

pub(crate) fn release_failed(line: &Line, err: &Error) {
    count(line, "lockkit_release_failures_total", "", "");
    tracing::warn!(lock = %line.id, error = chain(err), "release of a dropped guard failed");
}

pub(crate) fn release_unconfirmed(line: &Line, err: &Error) {
    count(line, "lockkit_release_failures_total", "", "");
    tracing::warn!(lock = %line.id, error = chain(err), "release was never confirmed; the lease is over");
}

pub(crate) fn lost(line: &Line, reason: crate::LossReason) {
    let short = match reason {
        crate::LossReason::Expired => "expired",
        crate::LossReason::Revoked => "revoked",
        crate::LossReason::Disconnected => "disconnected",
        crate::LossReason::Released => "released",
    };
    count(line, "lockkit_losses_total", "reason", short);
    tracing::warn!(name: "lost", lock = %line.id, %reason, "lost");
}

#[cfg(feature = "metrics")]
fn count(line: &Line, metric: &'static str, key: &'static str, value: &'static str) {
    if key.is_empty() {
        metrics::counter!(metric, "backend" => line.backend()).increment(1);
    } else {
        metrics::counter!(metric, "backend" => line.backend(), key => value).increment(1);
    }
}

#[cfg(not(feature = "metrics"))]
fn count(_: &Line, _: &'static str, _: &'static str, _: &'static str) {}
