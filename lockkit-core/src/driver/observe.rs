//! The driver's tracing events, and its metrics with the feature of that name.
//!
//! | metric | kind | labels | what |
//! |---|---|---|---|
//! | `lockkit_acquisitions_total` | counter | `backend`, `outcome` | acquisitions by outcome: `granted`, `handed_off`, `timeout`, `error` |
//! | `lockkit_losses_total` | counter | `backend`, `reason` | holds that were lost |
//! | `lockkit_renewal_failures_total` | counter | `backend` | renewals that failed and were tried again |
//! | `lockkit_release_failures_total` | counter | `backend` | releases that were not confirmed |

use crate::{Error, driver::lock_queue::LockQueue, spi::chain};

pub(crate) fn granted(queue: &LockQueue) {
    count(queue, "lockkit_acquisitions_total", "outcome", "granted");
    tracing::trace!(lock = %queue.id, "granted");
}

pub(crate) fn handed_off(queue: &LockQueue) {
    count(queue, "lockkit_acquisitions_total", "outcome", "handed_off");
    tracing::trace!(lock = %queue.id, "handed to the next waiter of this client");
}

pub(crate) fn not_granted(queue: &LockQueue, err: &Error) {
    let outcome = if err.is_timeout() { "timeout" } else { "error" };
    count(queue, "lockkit_acquisitions_total", "outcome", outcome);
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
    count(queue, "lockkit_renewal_failures_total", "", "");
    tracing::warn!(lock = %queue.id, error = chain(err), "renewal failed; trying again until the lease ends");
}

pub(crate) fn release_failed(queue: &LockQueue, err: &Error) {
    count(queue, "lockkit_release_failures_total", "", "");
    tracing::warn!(lock = %queue.id, error = chain(err), "release of a dropped guard failed");
}

pub(crate) fn release_unconfirmed(queue: &LockQueue, err: &Error) {
    count(queue, "lockkit_release_failures_total", "", "");
    tracing::warn!(lock = %queue.id, error = chain(err), "release was never confirmed; the lease is over");
}

pub(crate) fn lost(queue: &LockQueue, reason: crate::LossReason) {
    let short = match reason {
        crate::LossReason::Expired => "expired",
        crate::LossReason::Revoked => "revoked",
        crate::LossReason::Disconnected => "disconnected",
        crate::LossReason::Released => "released",
    };
    count(queue, "lockkit_losses_total", "reason", short);
    tracing::warn!(name: "lost", lock = %queue.id, %reason, "lost");
}

#[cfg(feature = "metrics")]
fn count(queue: &LockQueue, metric: &'static str, key: &'static str, value: &'static str) {
    if key.is_empty() {
        metrics::counter!(metric, "backend" => queue.backend()).increment(1);
    } else {
        metrics::counter!(metric, "backend" => queue.backend(), key => value).increment(1);
    }
}

#[cfg(not(feature = "metrics"))]
fn count(_: &LockQueue, _: &'static str, _: &'static str, _: &'static str) {}
