//! Claims, asked past the driver for what it relies on: replies that are lost, and requests that come late.

use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use lockkit_core::{
    Error, FencingToken, LockClient,
    spi::{Claim, Grant, Lease, Renewal},
};
use tokio::time::{Instant, sleep, timeout};

use crate::case_run::{
    CaseRun, LIMIT, Outcome, PATIENCE, PROMPT, Stop, comes_free, ensure, eventually, failed, poll_at_most,
    taken,
};

/// More than any attempt takes.
const MOST_POLLS: usize = 200;

pub(crate) async fn late_renewal_takes_nothing(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let detection = case.detection(client.info());
    let mut old = case.claim(&client, "a", LIMIT).await?;
    let mut new = case.claim(&other, "a", LIMIT).await?;
    let first = granted(Duration::ZERO, "a lock nobody has used", &mut *old).await?;
    break_shown(case, &client, &mut *old, &first).await?;
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

pub(crate) async fn late_release_is_lost(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let detection = case.detection(client.info());
    for is_taken in [false, true] {
        let mut old = case.claim(&client, "a", LIMIT).await?;
        let mut new = case.claim(&other, "a", LIMIT).await?;
        let grant = granted(detection, "a lock that is free", &mut *old).await?;
        break_shown(case, &client, &mut *old, &grant).await?;
        if is_taken {
            granted(detection, "the hold was broken", &mut *new).await?;
        }
        let deadline = Instant::now() + detection;
        let released = loop {
            match old.release().await {
                // Its connection may have gone with the hold.
                Err(err) if err.is_transient() && Instant::now() < deadline => {}
                released => break released,
            }
            sleep(Duration::from_millis(2)).await;
        };
        ensure!(
            released.as_ref().is_err_and(Error::is_lost),
            "expected Lost from the release of a hold that the server has dropped, got {released:?}"
        );
        if is_taken {
            still_held("the old holder has released", &mut *new).await?;
            new.release().await?;
        }
    }
    Ok(())
}

pub(crate) async fn released_claim_goes_on(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.lock("a").await?);
    let mut claim = case.claim(&client, "a", LIMIT).await?;
    claim.release().await?;
    let mut last = None;
    for _ in 0..3 {
        let grant = granted(PATIENCE, "the claim was released", &mut *claim).await?;
        ensure!(
            Some(*grant.tokens.start()) > last,
            "{:?} came after {last:?}",
            grant.tokens
        );
        last = Some(*grant.tokens.end());
        taken("while the claim holds", &other).await?;
        claim.release().await?;
        claim.release().await?;
        comes_free(PATIENCE, "the claim was released", &other).await?;
    }
    Ok(())
}

pub(crate) async fn lost_grant_is_found_again(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.lock("a").await?);
    for polls in 1..MOST_POLLS {
        let mut claim = case.claim(&client, "a", LIMIT).await?;
        if poll_at_most(polls, claim.attempt(Duration::ZERO)).await.is_some() {
            claim.release().await?;
            return comes_free(PATIENCE, "the claim was released", &other).await;
        }
        let shown = shown_soon(case, &client).await?;
        let again = granted(PATIENCE, "its own, which nobody else has", &mut *claim).await?;
        ensure!(
            shown.is_none_or(|token| token.get() <= *again.tokens.start()),
            "after {polls} polls, the server had granted {shown:?}; asked again, it grants {:?}",
            again.tokens
        );
        taken("after the attempt was repeated", &other).await?;
        still_held("the attempt was repeated", &mut *claim).await?;
        claim.release().await?;
        comes_free(PATIENCE, "the claim was released", &other).await?;
    }
    Err(failed(format!("no grant after {MOST_POLLS} polls")))
}

pub(crate) async fn found_grant_is_proven_anew(case: &CaseRun) -> Outcome {
    const ENOUGH: usize = 2;

    let (client, other) = (case.client().await?, case.lock("a").await?);
    let ttl = case.harness.ttl();
    let mut found = 0;
    for polls in 1..MOST_POLLS {
        let mut claim = case.claim(&client, "a", ttl).await?;
        if poll_at_most(polls, claim.attempt(Duration::ZERO)).await.is_some() || found == ENOUGH {
            claim.release().await?;
            return Ok(());
        }
        if shown_soon(case, &client).await?.is_some() {
            found += 1;
            sleep(ttl / 2).await;
            let again = granted(PATIENCE, "its own, which nobody else has", &mut *claim).await?;
            kept_to_its_end(case, &again.lease).await?;
        }
        let _ = claim.release().await;
        let limit = ttl + case.limits(&client).idle;
        comes_free(limit, "the claim was released", &other).await?;
    }
    Err(failed(format!("no grant after {MOST_POLLS} polls")))
}

pub(crate) async fn lease_counts_from_the_request(case: &CaseRun) -> Outcome {
    const ROUNDS: usize = 5;

    let client = case.client().await?;
    let (mut attempts, mut renewals) = (Clocks::default(), Clocks::default());
    for _ in 0..ROUNDS {
        let mut claim = case.claim(&client, "a", LIMIT).await?;
        let (grant, replied) = slowly(claim.attempt(Duration::ZERO)).await;
        let grant = grant?.ok_or_else(|| failed("expected a grant from one try, got \"taken\""))?;
        attempts.note(&grant.lease, replied);
        let (renewal, replied) = slowly(claim.renew()).await;
        match renewal? {
            Renewal::Held(lease) => renewals.note(&lease, replied),
            other => return Err(failed(format!("expected Held from `renew`, got {other:?}"))),
        }
        claim.release().await?;
    }
    for (what, clocks) in [("grant", attempts), ("renewal", renewals)] {
        ensure!(
            clocks.early > 0 || clocks.late == 0,
            "the lease of each {what}, {} in all, counts from when its reply had come",
            clocks.late
        );
    }
    Ok(())
}

/// The leases that count from before their reply had come, and the others.
#[derive(Default)]
struct Clocks {
    early: usize,
    late: usize,
}

impl Clocks {
    /// The reply had come by `replied`, unless it came at once.
    fn note(&mut self, lease: &Lease, replied: Option<Instant>) {
        match replied {
            // A lease may also be what is left of an earlier proof.
            Some(replied) if lease.end().is_some_and(|end| end >= replied + LIMIT) => self.late += 1,
            Some(_) => self.early += 1,
            None => {}
        }
    }
}

/// Polls `work` from time to time only, so that a reply waits. Returns when the last poll began, if it is not the first.
async fn slowly<F: Future>(work: F) -> (F::Output, Option<Instant>) {
    let mut work = pin!(work);
    let mut is_first = true;
    loop {
        let began = Instant::now();
        if let Poll::Ready(done) = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
            return (done, Some(began).filter(|_| !is_first));
        }
        is_first = false;
        sleep(Duration::from_millis(10)).await;
    }
}

pub(crate) async fn expired_hold_is_not_shown(case: &CaseRun) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let ttl = case.harness.ttl();
    let limit = case.freed_after_death(&client) + PROMPT;
    // Nobody renews or releases it: nothing but the clock ends the hold.
    let mut claim = case.claim(&client, "a", ttl).await?;
    let grant = granted(Duration::ZERO, "a lock nobody has used", &mut *claim).await?;
    sleep(limit).await;
    let mut next = case.claim(&other, "a", LIMIT).await?;
    let Some(later) = next.attempt(Duration::ZERO).await? else {
        let why = "a hold ends with something else than its renewals".to_owned();
        return Err(Stop::Skipped(why));
    };
    ensure!(
        later.tokens.start() > grant.tokens.end(),
        "{:?} came after {:?}, which expired",
        later.tokens,
        grant.tokens
    );
    let _ = claim.release().await;
    still_held("the holder before has released", &mut *next).await?;
    next.release().await?;

    let mut claim = case.claim(&client, "a", ttl).await?;
    granted(PATIENCE, "the lock was released", &mut *claim).await?;
    eventually(
        limit,
        "an inspection shows no hold that has expired",
        async || Ok(client.inspect(case.name("a")).await?.is_free()),
    )
    .await?;
    let _ = claim.release().await;
    Ok(())
}

pub(crate) async fn adopted_hold_is_proven_anew(case: &CaseRun) -> Outcome {
    let (here, there) = (case.client().await?, case.client().await?);
    let ttl = case.harness.ttl();
    let mut old = case.claim(&here, "a", ttl).await?;
    let grant = granted(Duration::ZERO, "a lock nobody has used", &mut *old).await?;
    sleep(ttl / 2).await;
    let from = old
        .detach()
        .ok_or_else(|| failed("a hold that can be detached has no owner"))?;
    let mut new = case.claim(&there, "a", ttl).await?;
    let adopted = new.adopt(from, FencingToken::new(*grant.tokens.start())).await?;
    let Some(Renewal::Held(lease)) = adopted else {
        return Err(failed(format!("expected Held from `adopt`, got {adopted:?}")));
    };
    kept_to_its_end(case, &lease).await?;
    let _ = new.release().await;
    Ok(())
}

/// Returns the holder's token, if the server shows one soon: no reply says when a request has arrived.
async fn shown_soon(case: &CaseRun, client: &LockClient) -> Result<Option<FencingToken>, Stop> {
    let deadline = Instant::now() + Duration::from_millis(50);
    loop {
        let state = client.inspect(case.name("a")).await?;
        if let Some(holder) = state.holders.first() {
            return Ok(Some(holder.token));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        sleep(Duration::from_millis(2)).await;
    }
}

/// Tries to get what is held, until its lease is over.
async fn kept_to_its_end(case: &CaseRun, lease: &Lease) -> Outcome {
    let other = case.lock("a").await?;
    let end = lease
        .end()
        .ok_or_else(|| failed("a hold with a lease has no end"))?;
    while Instant::now() < end {
        let guard = other.try_acquire().await?;
        let now = Instant::now();
        if guard.is_some() && now < end {
            let early = end - now;
            let failure = failed(format!(
                "another was granted {early:?} before the end of a lease that was proven anew"
            ));
            return Err(failure.whatever_the_machine_did());
        }
        sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Attempts again and again without patience, for at most `limit`.
async fn granted(limit: Duration, what: &str, claim: &mut dyn Claim) -> Result<Grant, Stop> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(grant) = claim.attempt(Duration::ZERO).await? {
            ensure!(
                grant.tokens.start() == grant.tokens.end(),
                "asked for one token, and granted {:?}",
                grant.tokens
            );
            return Ok(grant);
        }
        ensure!(
            Instant::now() < deadline,
            "expected a grant within {limit:?}: {what}"
        );
        sleep(Duration::from_millis(2)).await;
    }
}

/// Breaks a hold once the server shows it, which may be with its first renewal.
async fn break_shown(case: &CaseRun, client: &LockClient, claim: &mut dyn Claim, grant: &Grant) -> Outcome {
    let deadline = Instant::now() + PATIENCE;
    loop {
        // As the driver does.
        let _ = timeout(Duration::from_millis(2), claim.notified()).await;
        still_held("it was granted", claim).await?;
        let state = client.inspect(case.name("a")).await?;
        let first = *grant.tokens.start();
        if state.holders.iter().any(|holder| holder.token.get() == first) {
            break;
        }
        ensure!(
            Instant::now() < deadline,
            "granted with {first}, and shown is {state:?}"
        );
    }
    case.break_hold(client, "a").await
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
