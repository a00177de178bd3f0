//! One contender for a lock, from the moment that it may go to the server until nothing of its claim is left there.

use std::{future::pending, ops::RangeInclusive, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    driver::{
        lock_queue::{LockQueue, SlotGeneration},
        moment::Proof,
        observe::Mark,
        request::AcquireRequest,
    },
    spi::Claim,
};

/// A contender, and after the grant the substance of its hold: the claim, perhaps the slot, and the reserved tokens.
///
/// Dropping it is safe at any point. A claim that the server may know of goes to the client's worker, which releases it.
/// The slot goes to the next waiter.
#[derive(Debug)]
#[must_use]
pub(crate) struct Contender {
    pub(crate) claim: Option<Box<dyn Claim>>,
    pub(crate) request: Arc<AcquireRequest>,
    /// The ttls that its claim has asked for, if they are not the request's. In a box, since few holds have any.
    other_ttls: Option<Box<Ttls>>,
    /// Tokens that the grant reserved for hand-offs.
    pub(crate) spare_tokens: RangeInclusive<u64>,
    /// The number of hand-offs so far.
    pub(crate) handoffs: u32,
    /// The limit of that number: the smallest that one of its holders set.
    pub(crate) most_handoffs: u32,
    /// The last proof; `None` before the grant.
    pub(crate) lease: Option<Proof>,
    /// The server has hinted since that proof that the hold may be gone, or a renewal was begun, and none has succeeded.
    pub(crate) is_doubted: bool,
    /// The time of the first request of a renewal that has failed since and has yet to succeed.
    pub(crate) renewing_since: Option<Mark>,
    /// The time before which its release leaves it to a lease until then. In a box, since few holds have one.
    not_before: Option<Box<Instant>>,
    /// The server may know of this claim, so it has to be released.
    pub(crate) is_known: bool,
    slot: Option<SlotGeneration>,
    /// It is in its queue's count of those who contend.
    is_counted: bool,
}

#[derive(Debug)]
struct Ttls {
    last: Duration,
    shortest: Duration,
    longest: Duration,
}

impl Contender {
    /// A contender that its queue has just counted.
    pub(crate) fn counted(request: &Arc<AcquireRequest>, slot: Option<SlotGeneration>) -> Self {
        let mut contender = Self::new(request.clone(), slot);
        contender.is_counted = true;
        contender
    }

    fn new(request: Arc<AcquireRequest>, slot: Option<SlotGeneration>) -> Self {
        Self {
            claim: None,
            other_ttls: None,
            request,
            spare_tokens: RangeInclusive::new(1, 0),
            handoffs: 0,
            most_handoffs: 0,
            lease: None,
            is_doubted: false,
            renewing_since: None,
            not_before: None,
            is_known: false,
            slot,
            is_counted: false,
        }
    }

    /// The ttl that its claim asks for.
    pub(crate) fn ttl(&self) -> Duration {
        self.other_ttls
            .as_ref()
            .map_or(self.request.ttl, |ttls| ttls.last)
    }

    /// The longest ttl that its claim has asked for: the server may still count with it.
    pub(crate) fn longest_ttl(&self) -> Duration {
        self.other_ttls
            .as_ref()
            .map_or(self.request.ttl, |ttls| ttls.longest)
    }

    /// The shortest ttl that its renewals have asked for: one that comes late may leave it to that.
    pub(crate) fn shortest_ttl(&self) -> Duration {
        self.other_ttls
            .as_ref()
            .map_or(self.request.ttl, |ttls| ttls.shortest)
    }

    /// Notes that its claim asks for this ttl from now on.
    pub(crate) fn set_ttl(&mut self, ttl: Duration) {
        self.other_ttls = Some(Box::new(Ttls {
            last: ttl,
            shortest: self.shortest_ttl().min(ttl),
            longest: self.longest_ttl().max(ttl),
        }));
    }

    /// Notes that its release asks for a lease of this length. That ends no sooner than it shall, however late the request comes.
    pub(crate) fn leave_for(&mut self, rest: Duration) {
        self.other_ttls = Some(Box::new(Ttls {
            last: rest,
            shortest: self.shortest_ttl(),
            longest: self.longest_ttl().max(rest),
        }));
    }

    /// Has its release leave it to a lease until this time.
    pub(crate) fn keep_until(&mut self, not_before: Option<Instant>) {
        self.not_before = not_before.map(Box::new);
    }

    /// Returns the time for which a release leaves it to a lease.
    pub(crate) fn rest(&self, now: Instant) -> Option<Duration> {
        let at = self.not_before.as_deref().filter(|at| **at > now)?;
        Some(*at - now)
    }

    pub(crate) fn queue(&self) -> &Arc<LockQueue> {
        &self.request.queue
    }

    /// Leaves the count to its queue, which registers it as a hold.
    pub(crate) fn becomes_hold(&mut self) {
        self.is_counted = false;
    }

    pub(crate) fn has_slot(&self) -> bool {
        self.slot.is_some()
    }

    pub(crate) fn slot(&self) -> Option<SlotGeneration> {
        self.slot
    }

    /// Takes the slot, for a caller that gives it up together with something else.
    pub(crate) fn take_slot(&mut self) -> Option<SlotGeneration> {
        self.slot.take()
    }

    /// Says that this is a hold which can be passed on, to this waiter, and that the options of both leave a hand-off.
    pub(crate) fn may_be_passed_to(&self, heir: &AcquireRequest) -> bool {
        self.has_slot()
            && self.queue().is_exclusive()
            && self.handoffs < self.most_handoffs.min(heir.local_handoffs)
            && self.ttl() == heir.ttl
            && self.request.fits(heir)
            && heir.hold_at_least.is_none()
            && self.rest(Instant::now()).is_none()
            && !self.request.core().is_closed()
    }

    /// Lets the next waiter of this client go to the server.
    pub(crate) fn pass_slot(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.queue().pass(slot);
        }
    }

    /// Drops the claim, of which nothing is left at the server.
    pub(crate) fn forget_claim(&mut self) {
        self.claim = None;
        self.is_known = false;
    }

    /// Moves everything but its count into another contender. Dropping this one then does no more than to uncount it.
    pub(crate) fn take(&mut self) -> Self {
        let nothing = Self::new(self.request.clone(), None);
        let mut taken = std::mem::replace(self, nothing);
        std::mem::swap(&mut self.is_counted, &mut taken.is_counted);
        taken
    }

    /// Moves the claim of a hold into a contender of the other mode, which has nothing yet. The slot stays, and the tokens in
    /// reserve are void.
    pub(crate) fn move_claim(&mut self, into: &mut Self) {
        into.claim = self.claim.take();
        into.other_ttls = self.other_ttls.take();
        into.is_known = std::mem::take(&mut self.is_known);
    }

    /// Resolves when the backend hints that something has changed.
    pub(crate) async fn hinted(&mut self) {
        match &mut self.claim {
            Some(claim) => claim.notified().await,
            None => pending().await,
        }
    }
}

impl Drop for Contender {
    fn drop(&mut self) {
        if self.claim.is_some() && self.is_known {
            let abandoned = self.take();
            self.request.core().worker.clean_up(abandoned);
        } else {
            self.pass_slot();
        }
        if self.is_counted {
            // After the worker has been given what is left.
            self.queue().retreat();
        }
    }
}
