//! A hold that goes on without a guard, and its adoption by another client.
//!
//! Both are one exchange with the server, and both may be asked again. To detach a hold is to renew it once more and to forget
//! its claim: the server is told of nothing that it would have to remember. To adopt it is to exchange its owner at the server, in the
//! step that renews it. So of two who adopt, the second finds no hold of that owner; and whatever the first client still has on the
//! way (a renewal, a release) is another owner's, and does nothing.

use std::{future::poll_fn, pin::pin, sync::Arc};

use tokio::time::Instant;

use crate::{
    AcquireOptions, DetachedHold, Error, LossReason, Result,
    driver::{
        acquire::{Granted, for_long_enough, make_hold},
        contender::Contender,
        core::Core,
        finish_release::in_whole_millis,
        hold::Hold,
        lock_queue::LockQueue,
        observe::{Acquisition, Outcome},
        request::AcquireRequest,
    },
    spi::{ClaimRequest, OwnerId, Renewal},
};

const ADOPT: &str = "adopt";

/// Renews the hold for a full ttl, and then ends it here without releasing it.
///
/// If it is dropped, or returns an error, the hold is as it was. After the renewal it awaits nothing, so that no hold is detached that
/// the caller does not learn of.
///
/// # Errors
/// [`Error::Lost`] if it is lost; [`Error::Unsupported`]; [`Error::Backend`] if the server did not confirm the renewal, or if its
/// `max_hold` is over.
pub(crate) async fn detach(hold: &Hold) -> Result<DetachedHold> {
    let core = hold.request.core();
    if !core.info.capabilities.detach {
        return Err(unsupported(core));
    }
    hold.may_be_renewed("detach")?;
    let mut loan = hold.cell.reclaim().await;
    let Some(contender) = loan.as_mut() else {
        return Err(Error::Closed);
    };
    // It may have waited for the claim.
    hold.may_be_renewed("detach")?;
    hold.renew_with(contender, true).await?;
    let owner = contender.claim.as_mut().and_then(|claim| claim.detach());
    let owner = owner.ok_or_else(|| unsupported(core))?;
    let ttl = contender.ttl();
    hold.cell.detach(hold.now()).map_err(|reason| hold.lost(reason))?;
    let slot = loan.keep().and_then(|mut contender| {
        contender.forget_claim();
        contender.take_slot()
    });
    let queue = hold.queue();
    queue.end(hold, slot);
    let now = Instant::now();
    let not_before = hold.not_before().filter(|at| *at > now);
    let (shortest, longest) = (AcquireOptions::MIN_TTL, AcquireOptions::MAX_DURATION);
    let least = not_before.map(|at| in_whole_millis(at - now).clamp(shortest, longest));
    Ok(DetachedHold::new(
        hold.name.clone(),
        queue.mode,
        owner,
        hold.token,
        ttl,
        least,
    ))
}

/// Makes a hold of this client of a detached one. The caller makes a guard of it at once: dropping the hold does not release it.
///
/// Without a reply, nothing is released: the server may have exchanged the owner, and to ask again with the same `detached` then
/// finds that. If nobody asks again, what is left ends with its lease.
///
/// # Errors
/// [`Error::Lost`] if the server says that the hold is over, another's, or was asked back; [`Error::Unsupported`];
/// [`Error::Backend`] if it did not say; [`Error::Closed`].
pub(crate) async fn adopt(request: &Arc<AcquireRequest>, detached: &mut DetachedHold) -> Result<Hold> {
    let queue = &request.queue;
    let acquisition = Acquisition::begin(queue);
    let mut work = pin!(take_over(request, detached));
    match poll_fn(|cx| acquisition.poll(work.as_mut(), cx)).await {
        Ok(hold) => {
            acquisition.granted(&hold, Outcome::Granted);
            Ok(hold)
        }
        Err(err) => {
            let err = err.for_lock(queue.name());
            acquisition.failed(&err);
            Err(err)
        }
    }
}

async fn take_over(request: &Arc<AcquireRequest>, detached: &mut DetachedHold) -> Result<Hold> {
    let (queue, core) = (&request.queue, request.core());
    core.is_open(ADOPT)?;
    if !core.info.capabilities.detach {
        return Err(unsupported(core));
    }
    if detached.is_adopted {
        return Err(lost(queue, LossReason::Gone));
    }
    let successor = match detached.successor {
        Some(successor) => successor,
        None => *detached.successor.insert(queue.owner()?),
    };
    // With the slot if it is free: others of this client then know without asking that the lock is taken.
    let mut contender = LockQueue::enter(request).unwrap_or_else(|| LockQueue::bypass(request));
    // Either this sees that the client is closed, or the one who closes it sees the contender.
    core.is_open(ADOPT)?;
    let lease = match exchange_owner(&mut contender, detached, successor).await? {
        Some(Renewal::Held(lease)) => lease,
        Some(Renewal::Unconfirmed(_)) => {
            let cause = "the server has not confirmed it";
            return Err(Error::transient(core.info.name, ADOPT, cause));
        }
        Some(Renewal::Lost(_)) => return Err(lost(queue, LossReason::Gone)),
        Some(Renewal::Asked) => return Err(lost(queue, LossReason::Asked)),
        None => return Err(unsupported(core)),
    };
    let (proof, now) = (core.clock.proof(&lease), core.clock.now());
    if proof.end().is_some_and(|end| now.has_reached(end)) {
        let cause = "the lease was over when the answer arrived";
        return Err(Error::transient(core.info.name, ADOPT, cause));
    }
    // From here on it is a hold of this client, which releases what it does not make a guard of.
    detached.is_adopted = true;
    contender.is_known = true;
    contender.lease = Some(proof);
    make_hold(
        contender,
        Granted {
            token: detached.token.get(),
            at: now.at,
            is_new: false,
        },
    )
}

/// Opens a claim with the new owner, and has the server exchange the owners. The claim stays in `contender`, which does not release it:
/// it is not said to be known to the server.
async fn exchange_owner(
    contender: &mut Contender,
    detached: &DetachedHold,
    successor: OwnerId,
) -> Result<Option<Renewal>> {
    let Contender { request, claim, .. } = contender;
    let (queue, core) = (&request.queue, request.core());
    let mut claim_request = ClaimRequest::new(queue.name().clone(), queue.mode, request.ttl, successor);
    claim_request.label.clone_from(&request.label);
    claim_request.renews = request.renew;
    let limit = || Instant::now() + request.op_timeout;
    let opened = core.blanked(core.backend.claim(&claim_request));
    let opened = queue.exchange(ADOPT, Core::is_open, limit, opened).await?;
    let claim = claim.insert(for_long_enough(opened, request)?);
    // What was slept before the request is not taken off its lease.
    core.clock.look();
    let exchange = core.request(ADOPT, claim.adopt(detached.owner, detached.token));
    queue.exchange(ADOPT, Core::is_open, limit, exchange).await
}

fn lost(queue: &LockQueue, reason: LossReason) -> Error {
    Error::lost(queue.backend(), queue.name().clone(), reason)
}

fn unsupported(core: &Core) -> Error {
    Error::unsupported(
        core.info.name,
        "detaching a hold, since its holds end with a session, a transaction or a process; keep the guard, or acquire anew",
    )
}
