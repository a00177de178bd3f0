//! Asks a holder to give up its hold, and waits until the hold has ended.

use std::{future::pending, time::Duration};

use tokio::time::Instant;

use crate::{
    AcquireOptions, FencingToken, LockKind, LockName, Result, Revocation,
    driver::{core::Core, timing::Backoff},
};

const OPERATION: &str = "revoke";

/// The longest pause between two requests.
const LOOKS_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Asks the holder that has `token`, and then again and again until the hold has ended, for up to `within`. So a request that got
/// lost at the server, or did not reach the holder, is repeated.
///
/// The first reply says whether there is such a hold at all: after a later one, nobody could tell "there was none" from "it has
/// ended". So a failure of the first request is an error. Several may ask at once. If this is dropped, the mark at the server stays.
pub(crate) async fn revoke(
    core: &Core,
    name: &LockName,
    kind: LockKind,
    token: FencingToken,
    within: Duration,
) -> Result<Revocation> {
    let until = Instant::now() + within.min(AcquireOptions::MAX_DURATION);
    let ask = || core.ask(OPERATION, name, core.backend.revoke(name, kind, token));
    let Some(mut lease) = ask().await? else {
        return Ok(Revocation::NotHeld);
    };
    let mut backoff = Backoff::default();
    let mut failed = None;
    while Instant::now() < until {
        let pause = backoff.next().min(LOOKS_AGAIN_AFTER);
        let pause_ends = (Instant::now() + pause).min(until);
        core.within(OPERATION, Core::is_open, || pause_ends, pending::<()>())
            .await?;
        match ask().await {
            Ok(Some(left)) => (lease, failed) = (left, None),
            Ok(None) => {
                // The lease counts from before its request was sent. So it was not over before this.
                let has_expired = lease.end().is_some_and(|end| Instant::now() >= end);
                return Ok(if has_expired {
                    Revocation::Expired
                } else {
                    Revocation::Confirmed
                });
            }
            Err(err) if err.is_transient() => failed = Some(err),
            Err(err) => return Err(err),
        }
    }
    match failed {
        Some(err) => Err(err),
        None => Ok(Revocation::StillHeld {
            left: lease
                .end()
                .map(|end| end.saturating_duration_since(Instant::now())),
        }),
    }
}
