//! From an exclusive hold to a shared one.
//!
//! The exclusive hold ends here before anything is sent: from then on the server may let others in. The claim goes on as
//! another hold, in the queue of the shared mode. In between the server has it in one mode or the other, and both keep
//! writers out. So a reply that is lost costs nothing but time: the request is repeated for as long as the lease lasts.

use std::{future::pending, sync::Arc};

use tokio::time::Instant;

use crate::{
    Error, LossReason, Result,
    driver::{
        contender::Contender,
        core::Core,
        finish_release::{Registration, reclaim},
        hold::Hold,
        lock_queue::LockQueue,
        observe,
        timing::Backoff,
    },
    spi::{Lease, Mode, NO_DOWNGRADE},
};

const OPERATION: &str = "downgrade";

/// An exclusive hold that has ended, to go on as a shared one. The caller finishes it at once: from then on, dropping the future
/// releases it.
#[must_use]
pub(crate) struct Downgrade<'a> {
    registration: Registration<'a>,
    /// `None` while the worker has it.
    contender: Option<Contender>,
}

/// Ends the exclusive hold, if it may become a shared one.
///
/// # Errors
/// Nothing has changed: [`Error::Unsupported`], [`Error::Lost`], [`Error::Closed`], or [`Error::Backend`] once its `max_hold` is
/// over.
pub(crate) fn begin(hold: &Hold) -> Result<Downgrade<'_>> {
    let queue = hold.queue();
    if !queue.is_exclusive() {
        let what = "a downgrade of a hold that is not exclusive";
        return Err(Error::unsupported(hold.backend, what));
    }
    let can = &queue.core.info.capabilities;
    if !can.shared || !can.downgrade {
        return Err(Error::unsupported(hold.backend, NO_DOWNGRADE));
    }
    hold.check()?;
    queue.core.is_open(OPERATION)?;
    hold.may_be_renewed(OPERATION)?;
    match hold.cell.begin_release(hold.now()) {
        Ok(mut contender) => {
            // Until it goes on as another hold, it may end as any does that is dropped.
            if let Some(contender) = &mut contender {
                contender.keep_until(hold.not_before());
            }
            Ok(Downgrade {
                registration: Registration { hold, slot: None },
                contender,
            })
        }
        Err(reason) => Err(hold.lost(reason)),
    }
}

impl Downgrade<'_> {
    /// Returns the shared hold. The caller makes a guard of it at once: dropping the hold does not release it.
    ///
    /// # Errors
    /// The hold is over, and goes to the worker to be released.
    pub(crate) async fn finish(self) -> Result<Hold> {
        let Self {
            mut registration,
            contender,
        } = self;
        let hold = registration.hold;
        let mut contender = match contender.or_else(|| hold.recall()) {
            Some(contender) => contender,
            None => Box::pin(reclaim(hold.clone())).await?,
        };
        contender.keep_until(hold.not_before());
        let lease = match convert(hold, &mut contender).await {
            Ok(lease) => lease,
            Err(err) => {
                if let Error::Lost { reason, .. } = &err {
                    observe::lost(hold.queue(), *reason);
                    // What is lost is not prolonged.
                    contender.keep_until(None);
                }
                return Err(err);
            }
        };
        let shared = match share(hold, &mut contender, &lease) {
            Ok(shared) => shared,
            Err(err) => {
                contender.keep_until(None);
                return Err(err);
            }
        };
        // The next exclusive waiter of this client queues at the server, once the shared hold is registered: whoever closes the
        // client sees one of them.
        registration.slot = contender.take_slot();
        drop(registration);
        if let Err(err) = hold.queue().core.is_open(OPERATION) {
            // It may have come too late to be lost with all the others.
            shared.abandon();
            return Err(err);
        }
        observe::continued(&shared);
        Ok(shared)
    }
}

/// Asks the server, again and again until it answers, or the lease or the `max_hold` is over.
async fn convert(hold: &Hold, contender: &mut Contender) -> Result<Lease> {
    let request = contender.request.clone();
    let core = request.core();
    let mut backoff = Backoff::default();
    loop {
        let Some(claim) = &mut contender.claim else {
            return Err(Error::Closed);
        };
        // This look also keeps what was slept before the request from being taken off its lease.
        let end = hold.valid_until();
        let now = Instant::now();
        if end.is_some_and(|end| end <= now) {
            return Err(hold.lost(LossReason::Expired));
        }
        // It is a renewal, too.
        if hold.is_past_max_hold() {
            return Err(hold.lost(LossReason::MaxHold));
        }
        let until = |at: Instant| end.map_or(at, |end| end.min(at));
        let limit = until(now + request.op_timeout);
        let conversion = core.request(OPERATION, claim.downgrade());
        let reply = core
            .within(OPERATION, Core::is_open, || limit, conversion)
            .await?;
        let err = match reply {
            Some(Ok(lease)) => return Ok(lease),
            Some(Err(err)) if err.is_transient() => err,
            Some(Err(err)) => return Err(err.for_lock(&hold.name)),
            None => core.no_answer(OPERATION),
        };
        observe::downgrade_failed(hold.queue(), &err);
        let pause_ends = until(Instant::now() + backoff.next());
        core.within(OPERATION, Core::is_open, || pause_ends, pending::<()>())
            .await?;
    }
}

/// Makes a shared hold of the claim, and registers it.
fn share(hold: &Hold, contender: &mut Contender, lease: &Lease) -> Result<Hold> {
    let core = &hold.queue().core;
    let lease = core.clock.proof(lease);
    let now = core.clock.now();
    if lease.end().is_some_and(|end| now.has_reached(end)) {
        return Err(hold.lost(LossReason::Expired));
    }
    let queue = core.queue(hold.name.clone(), Mode::Shared);
    let request = Arc::new(contender.request.in_queue(queue));
    let mut shared = LockQueue::bypass(&request);
    contender.move_claim(&mut shared);
    shared.lease = Some(lease);
    shared.becomes_hold();
    let shared = hold.continued(request, shared, &lease);
    shared.queue().register(&shared, now.at);
    Ok(shared)
}
