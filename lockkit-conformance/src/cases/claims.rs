//! What the driver relies on, asked for past the driver: replies that are lost, and requests that come late.

use std::time::Duration;

use lockkit_core::spi::{Claim, Grant, Renewal};
use tokio::time::{Instant, sleep};

use crate::case_run::{CaseRun, LIMIT, Outcome, Stop, comes_free, ensure, failed, taken};

pub(crate) async fn late_renewal_takes_nothing(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let detection = case.detection(client.info());
    let mut old = case.claim(&client, "a", LIMIT).await?;
    let mut new = case.claim(&other, "a", LIMIT).await?;
    let first = granted(Duration::ZERO, "a lock nobody has used", &mut *old).await?;
    case.break_hold(&client, "a").await?;
    let second = granted(detection, "the hold was broken", &mut *new).await?;
    ensure!(
        second.tokens.start() > first.tokens.end(),
        "{:?} came after {:?}",
        second.tokens,
        first.tokens
    );
    is_over(detection, &mut *old).await?;
    still_held("the old holder has renewed", &mut *new).await?;
    let outsider = case.lock("a").await?;
    taken("by a third, after the old holder has renewed", &outsider).await?;
    let _ = old.release().await;
    still_held("the old holder has released", &mut *new).await?;
    taken("by a third, after the old holder has released", &outsider).await?;
    new.release().await?;
    comes_free(detection, "the new holder has released", &outsider).await
}

/// Attempts again and again without patience, for at most `limit`.
async fn granted(limit: Duration, what: &str, claim: &mut dyn Claim) -> Result<Grant, Stop> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(grant) = claim.attempt(Duration::ZERO).await? {
            return Ok(grant);
        }
        ensure!(
            Instant::now() < deadline,
            "expected a grant within {limit:?}: {what}"
        );
        sleep(Duration::from_millis(2)).await;
    }
}

/// Renews a hold that another has by now, until the server says that it is lost.
async fn is_over(limit: Duration, claim: &mut dyn Claim) -> Outcome {
    let deadline = Instant::now() + limit;
    loop {
        match claim.renew().await {
            Ok(Renewal::Lost(_)) => return Ok(()),
            // Its connection may have gone with the hold.
            Err(err) if err.is_transient() && Instant::now() < deadline => {}
            other => {
                let failure = failed(format!(
                    "expected Lost from renewing a hold that is another's by now, got {other:?}"
                ));
                return Err(match other {
                    Ok(_) => failure.whatever_the_machine_did(),
                    Err(_) => failure,
                });
            }
        }
        sleep(Duration::from_millis(2)).await;
    }
}

async fn still_held(after: &str, claim: &mut dyn Claim) -> Outcome {
    let renewed = claim.renew().await;
    ensure!(
        matches!(renewed, Ok(Renewal::Held(_))),
        "{after}, and the present holder is told {renewed:?}"
    );
    Ok(())
}
