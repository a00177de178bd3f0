//! From the end of a hold to its hand-off or its confirmed release.

use std::{pin::Pin, sync::atomic::Ordering, time::Duration};

use futures_util::FutureExt;
use tokio::time::Instant;

use crate::{
    AcquireOptions, Error, Result,
    driver::{
        contender::Contender,
        core::Core,
        hold::Hold,
        lock_queue::{LockQueue, PassOn, Renewed, SlotGeneration},
        moment::Moment,
        observe,
        timing::Backoff,
    },
    spi::{Claim, Lease, Renewal, chain},
};

/// Releases a hold on the caller's time.
pub(crate) async fn release(hold: &Hold) -> Result<()> {
    let now = hold.now();
    match hold.cell.begin_release(now) {
        Ok(contender) => finish_release(hold, contender, now).await,
        Err(reason) => {
            hold.give_up_lost();
            Err(hold.lost(reason))
        }
    }
}

/// Passes a hold whose guard has been given up to the next waiter of this client, or releases it at the server.
///
/// Runs in the caller's future for `release().await`, and for a dropped guard in the worker, or [at once](finish_release_at_once). If
/// it is dropped half-way, the worker does the rest.
pub(crate) async fn finish_release(hold: &Hold, contender: Option<Contender>, now: Moment) -> Result<()> {
    let mut registration = Registration { hold, slot: None };
    let (mut contender, now) = match contender.or_else(|| hold.recall()) {
        Some(contender) => (contender, now),
        // That may have taken a while, if nobody polled this.
        None => (Box::pin(reclaim(hold.clone())).await?, hold.now()),
    };
    contender.keep_until(hold.not_before());
    if hand_off(hold, &mut contender, now).await {
        return Ok(());
    }
    let released = release_claim(&mut contender).await;
    match contender.take_slot() {
        // The server says that it was gone: nobody here knows that the lock is taken.
        Some(slot) if released.as_ref().is_err_and(Error::is_lost) => hold.queue().pass_after_loss(slot),
        slot => registration.slot = slot,
    }
    released
}

/// Does what [`finish_release`] does by one poll, for a dropped guard of a backend that needs no I/O for it. The worker does what has to
/// wait.
pub(crate) fn finish_release_at_once(hold: &Hold, contender: Option<Contender>, now: Moment) {
    if let Some(Err(err)) = finish_release(hold, contender, now).now_or_never()
        && !err.is_lost()
    {
        observe::release_failed(hold.queue(), &err);
    }
    let queue = hold.queue();
    if queue.name().is_of_election() {
        drop(
            queue
                .core
                .worker
                .announce(queue.core.clone(), queue.name().clone()),
        );
    }
}

/// Keeps a hold in the register until its release is confirmed or has gone to the worker, so that closing the client
/// waits for it. Then the worker may forget it.
#[must_use]
pub(super) struct Registration<'a> {
    pub(super) hold: &'a Hold,
    /// The slot that goes to the next waiter with that.
    pub(super) slot: Option<SlotGeneration>,
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        self.hold.queue().end(self.hold, self.slot);
    }
}

/// Gets the claim back from the worker that was renewing it. If this is dropped, the worker goes on with the release.
pub(super) async fn reclaim(hold: Hold) -> Result<Contender> {
    struct OrElseWorker(Option<Hold>);
    impl Drop for OrElseWorker {
        fn drop(&mut self) {
            if let Some(hold) = self.0.take() {
                hold.clone().request.core().worker.release(hold, None);
            }
        }
    }
    let mut unfinished = OrElseWorker(Some(hold.clone()));
    let contender = hold.cell.reclaim().await.keep();
    unfinished.0 = None;
    contender.ok_or(Error::Closed)
}

/// Passes an exclusive hold to the next waiter of this client, if there is one that it fits, tokens are left for it,
/// and it is fresh enough or can be renewed.
async fn hand_off(ended: &Hold, contender: &mut Contender, now: Moment) -> bool {
    let queue = ended.queue();
    if !contender.has_slot() || !queue.is_exclusive() {
        return false;
    }
    match queue.pass_on(ended, contender, now, Renewed::No) {
        PassOn::Stale => Box::pin(renew_and_pass_on(ended, contender)).await,
        PassOn::Done => true,
        PassOn::NoHeir => false,
    }
}

async fn renew_and_pass_on(ended: &Hold, contender: &mut Contender) -> bool {
    let renewed = ended.renew_with(contender, true).await;
    renewed.is_ok() && ended.queue().pass_on(ended, contender, ended.now(), Renewed::Yes) == PassOn::Done
}

/// Releases at the server. Unless that is confirmed, the worker goes on trying.
async fn release_claim(contender: &mut Contender) -> Result<()> {
    let outcome = try_release(contender).await;
    match &outcome {
        Err(err) if !err.is_lost() => {
            // It is not known whether the server still has it, so a waiter may as well ask.
            contender.pass_slot();
            let unconfirmed = contender.take();
            contender.request.core().worker.clean_up(unconfirmed);
        }
        Err(Error::Lost { reason, .. }) => {
            observe::lost(contender.queue(), *reason);
            contender.forget_claim();
        }
        _ => contender.forget_claim(),
    }
    outcome
}

async fn try_release(contender: &mut Contender) -> Result<()> {
    let now = Instant::now();
    // No lease may be longer than what the backend was asked about.
    let most = contender.request.hold_at_least.as_deref().copied();
    let rest = contender.rest(now).map(|rest| {
        let rest = in_whole_millis(rest);
        most.map_or(rest, |most| rest.min(most))
            .max(AcquireOptions::MIN_TTL)
    });
    if let Some(rest) = rest {
        contender.leave_for(rest);
    }
    let Contender { claim, request, .. } = contender;
    let Some(claim) = claim else {
        return Ok(());
    };
    let op_timeout = request.op_timeout;
    let limit = || Instant::now() + op_timeout;
    let core = request.core();
    let end: Pin<Box<dyn Future<Output = Result<()>> + Send>> = match rest {
        Some(rest) => Box::pin(leave(&request.queue, claim.as_mut(), rest)),
        None => claim.release(),
    };
    let release = core.request("release", end);
    let released = core.within("release", Core::is_alive, limit, release).await;
    let released = released.and_then(|released| {
        released.unwrap_or_else(|| {
            let cause = format!("no answer within {op_timeout:?}; it is tried again until the lease ends");
            Err(Error::transient(core.info.name, "release", cause))
        })
    });
    released.map_err(|err| err.for_lock(request.queue.name()))
}

/// Returns a time that is no shorter, by a millisecond at most, and that a server can count which counts in milliseconds.
pub(super) fn in_whole_millis(time: Duration) -> Duration {
    Duration::from_millis(millis(time).saturating_add(1))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Leaves the hold to a lease of this length, which nobody renews. It ends at once if somebody has asked for it.
///
/// # Errors
/// Also if the lease is shorter, since an earlier renewal may still be under way that shortens it.
async fn leave(queue: &LockQueue, claim: &mut dyn Claim, length: Duration) -> Result<()> {
    let confirmed = Lease::of_ttl(Instant::now(), Duration::from_millis(millis(length))).length;
    claim.set_ttl(length)?;
    match claim.renew().await? {
        Renewal::Held(lease) if lease.length.is_none() || lease.length >= confirmed => {
            claim.detach();
            Ok(())
        }
        Renewal::Asked => claim.release().await,
        Renewal::Lost(reason) => Err(Error::lost(queue.backend(), queue.name().clone(), reason)),
        Renewal::Held(_) | Renewal::Unconfirmed(_) => {
            let cause =
                "the server has not confirmed the rest of its time; it is tried again until the lease ends";
            Err(Error::transient(queue.backend(), "release", cause))
        }
    }
}

/// Releases in the background what nobody waits for, again and again until it is confirmed or nothing can be left. One that is refused
/// for good keeps no client from closing: that ends the connection, which may end what is left. Exception: the rest of a `hold_at_least`
/// would be cut to its lease by that, and a server may refuse for a second, as one that is read-only in a switch-over does.
pub(crate) async fn clean_up(mut contender: Contender) {
    let request = contender.request.clone();
    let queue = &request.queue;
    let mut backoff = Backoff::default();
    // No request of this claim is under way any more. After this time, none of the past can have any effect left.
    let over = Instant::now() + contender.longest_ttl() + request.op_timeout;
    loop {
        let err = match try_release(&mut contender).await {
            Ok(()) => break,
            Err(err) if err.is_lost() => break,
            Err(err) => err,
        };
        contender.pass_slot();
        let has_rest = contender.rest(Instant::now()).is_some();
        let is_refused = !err.is_transient() && !has_rest;
        if Instant::now() >= over || is_refused && queue.core.is_closed() {
            queue.core.unconfirmed.fetch_add(1, Ordering::Relaxed);
            // Whoever may not even ask has been told so, and has nothing to release.
            if contender.lease.is_some() || !is_refused {
                observe::release_unconfirmed(queue, &err);
            }
            break;
        }
        tracing::debug!(lock = %queue.id, error = chain(&err), "release not confirmed; trying again");
        let mut pause = backoff.next();
        if has_rest {
            // An earlier renewal that comes late leaves the hold to a lease of its ttl: that must not end before the next try.
            pause = pause.min((contender.shortest_ttl() / 4).max(Duration::from_millis(20)));
        }
        tokio::select! {
            _ = queue.core.over("release", Core::is_open), if is_refused => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
    contender.forget_claim();
}
