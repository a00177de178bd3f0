//! From the end of a hold to its hand-off or its confirmed release.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use crate::{
    Error, Result,
    driver::{
        hold::Hold,
        line::{Grip, PassOn, Renewed, SlotTurn},
        moment::Moment,
        timing::Backoff,
    },
};

/// Releases a hold whose guard has been given up, or passes it to the next waiter of this client.
///
/// Runs in the caller's future for `release().await` and in the worker for a dropped guard. Dropped half-way, what is
/// left of it goes to the worker.
pub(crate) async fn settle(hold: &Hold, grip: Option<Grip>, now: Moment) -> Result<()> {
    let mut registered = UntilSettled { hold, turn: None };
    let mut grip = match grip.or_else(|| hold.recall()) {
        Some(grip) => grip,
        None => Box::pin(reclaim(hold.clone())).await?,
    };
    if hand_off(hold, &mut grip, now).await {
        return Ok(());
    }
    let released = release(&mut grip).await;
    registered.turn = grip.take_slot();
    released
}

/// A hold stays in the register until its release is confirmed or has gone to the worker, so that closing the client
/// waits for it. Then the worker may forget it.
struct UntilSettled<'a> {
    hold: &'a Hold,
    /// The slot that goes to the next waiter with that.
    turn: Option<SlotTurn>,
}

impl Drop for UntilSettled<'_> {
    fn drop(&mut self) {
        self.hold.line().end(self.hold, self.turn);
    }
}

/// Gets the claim back from the worker that was renewing it. If this is dropped, the worker goes on with it.
async fn reclaim(hold: Hold) -> Result<Grip> {
    struct OrElseWorker(Option<Hold>);
    impl Drop for OrElseWorker {
        fn drop(&mut self) {
            if let Some(hold) = self.0.take() {
                hold.clone().line().core.worker.settle(hold, None);
            }
        }
    }
    let mut unfinished = OrElseWorker(Some(hold.clone()));
    let grip = hold.cell.reclaim().await.keep();
    unfinished.0 = None;
    grip.ok_or(Error::Closed)
}

/// Passes an exclusive hold to the next waiter of this client, if there is one that it fits, tokens are left for it,
/// and it is fresh enough or can be renewed.
async fn hand_off(ended: &Hold, grip: &mut Grip, now: Moment) -> bool {
    let line = ended.line();
    if !grip.has_slot() || !line.is_exclusive() {
        return false;
    }
    match line.pass_on(ended, grip, now, Renewed::No) {
        PassOn::Stale => Box::pin(renew_and_pass_on(ended, grip)).await,
        PassOn::Done => true,
        PassOn::NoHeir => false,
    }
}

async fn renew_and_pass_on(ended: &Hold, grip: &mut Grip) -> bool {
    let line = ended.line();
    if prove(grip).await && line.pass_on(ended, grip, ended.now(), Renewed::Yes) == PassOn::Done {
        return true;
    }
    // Too little is left of it to be of use to anyone else.
    grip.most_handoffs = 0;
    line.pass_on(ended, grip, ended.now(), Renewed::No) == PassOn::Done
}

/// Renews a lease that cannot be passed on as it is.
async fn prove(grip: &mut Grip) -> bool {
    let Some(claim) = &mut grip.claim else {
        return false;
    };
    let core = &grip.terms.line.core;
    // Also so that what was slept before the request is not taken off its lease.
    let now = core.clock.now();
    let lease_end = grip.lease.and_then(|lease| lease.end());
    let limit = || {
        let limit = now.at + grip.terms.op_timeout;
        lease_end.map_or(limit, |end| end.seen_from(now).min(limit))
    };
    match core.within("renew", claim.renew(), limit).await {
        Ok(Some(Ok(crate::spi::Renewal::Held(lease)))) => {
            grip.lease = Some(core.clock.proof(&lease));
            grip.is_doubted = false;
            true
        }
        _ => false,
    }
}

/// Releases at the server. Unless that is confirmed, the worker goes on trying.
async fn release(grip: &mut Grip) -> Result<()> {
    let outcome = try_release(grip).await;
    match &outcome {
        Err(err) if !err.is_lost() => {
            // Whether the server still has it is not known, so that a waiter may as well ask.
            grip.pass_slot();
            let unconfirmed = grip.take();
            grip.terms.line.core.worker.clean_up(unconfirmed);
        }
        Err(Error::Lost { reason, .. }) => {
            crate::observe::lost(&grip.terms.line, *reason);
            grip.settled();
        }
        _ => grip.settled(),
    }
    outcome
}

async fn try_release(grip: &mut Grip) -> Result<()> {
    let Some(claim) = &mut grip.claim else {
        return Ok(());
    };
    let op_timeout = grip.terms.op_timeout;
    let limit = || Instant::now() + op_timeout;
    let line = &grip.terms.line;
    let released = match line.core.within("release", claim.release(), limit).await {
        Ok(Some(released)) => released,
        Ok(None) => {
            let cause = format!("no answer within {op_timeout:?}; it is tried again until the lease ends");
            Err(Error::transient(line.backend(), "release", cause))
        }
        Err(err) => Err(err),
    };
    released.map_err(|err| err.for_lock(line.name()))
}

/// Releases in the background what nobody waits for, again and again until it is confirmed or nothing can be left.
pub(crate) async fn clean_up(mut grip: Grip) {
    let core = grip.terms.line.core.clone();
    let mut backoff = Backoff::default();
    // No request of this claim is under way any more; after this long, none that was can have any effect left.
    let over = Instant::now() + grip.terms.ttl + grip.terms.op_timeout;
    loop {
        let err = match try_release(&mut grip).await {
            Ok(()) => break,
            Err(err) if err.is_lost() => break,
            Err(err) => err,
        };
        grip.pass_slot();
        if Instant::now() >= over {
            core.unconfirmed.fetch_add(1, Ordering::Relaxed);
            crate::observe::release_unconfirmed(&grip.terms.line, &err);
            break;
        }
        tracing::debug!(lock = %grip.terms.line.id, error = crate::spi::chain(&err), "release not confirmed; trying again");
        tokio::time::sleep(backoff.next()).await;
    }
    grip.settled();
}
