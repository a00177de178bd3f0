//! One grant, shared by its guard, its views and the worker that keeps it alive.

use std::{
    ops::Deref,
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    Error, FencingToken, LockName, LossReason, Result,
    driver::{
        cell::{HoldCell, Phase},
        contender::Contender,
        core::Core,
        keep_alive::KeepAlive,
        lock_queue::{LockQueue, SlotGeneration},
        moment::{Clock, Moment, Proof},
        register::NO_KEY,
        request::AcquireRequest,
        timing,
    },
    spi::Renewal,
};

/// The part of a hold that views keep. Once the hold is over, it keeps nothing of the client.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) token: FencingToken,
    pub(crate) name: LockName,
    pub(crate) backend: &'static str,
    pub(crate) cell: HoldCell<Contender>,
    /// The length of its first lease.
    granted_for: Option<Duration>,
    clock: Clock,
    pub(crate) keep_alive: KeepAlive,
    /// The slot that its contender has. The contender may be on loan when the slot has to be given up.
    slot: Option<SlotGeneration>,
    /// Its key in its queue's register.
    pub(crate) key: AtomicUsize,
}

impl Record {
    pub(crate) fn is_held(&self) -> bool {
        self.cell.phase(self.now()) == Phase::Held
    }

    /// The length of the lease in force when it was proven.
    pub(crate) fn lease_length(&self) -> Option<Duration> {
        self.cell.renewed_for().or(self.granted_for)
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self.cell.phase(self.now()) {
            Phase::Lost(reason) => Err(self.lost(reason)),
            Phase::Releasing => Err(self.lost(LossReason::Released)),
            Phase::Offered | Phase::Held => Ok(()),
        }
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    /// The local end of the present lease, on the clock that timers run on.
    pub(crate) fn valid_until(&self) -> Option<Instant> {
        let now = self.now();
        self.cell.end(now).map(|end| end.seen_from(now))
    }

    pub(crate) fn not_lost(&self) -> Result<()> {
        match self.cell.phase(self.now()) {
            Phase::Lost(reason) => Err(self.lost(reason)),
            Phase::Offered | Phase::Held | Phase::Releasing => Ok(()),
        }
    }

    pub(crate) fn lost(&self, reason: LossReason) -> Error {
        Error::lost(self.backend, self.name.clone(), reason)
    }
}

/// A hold, for its guard and for the worker, which renew and release it.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) record: Arc<Record>,
    pub(crate) request: Arc<AcquireRequest>,
}

impl Deref for Hold {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.record
    }
}

impl Hold {
    /// Makes a hold of `contender`, on a lease that has been proven.
    pub(crate) fn new(
        phase: Phase,
        request: Arc<AcquireRequest>,
        token: u64,
        contender: Contender,
        lease: &Proof,
    ) -> Self {
        let session = contender.claim.as_ref().and_then(|claim| claim.session());
        let queue = &request.queue;
        let record = Record {
            token: FencingToken::new(token),
            name: queue.name().clone(),
            backend: queue.backend(),
            slot: contender.slot(),
            cell: HoldCell::new(phase, contender, lease.end(), session),
            granted_for: lease.length,
            clock: queue.core.clock.clone(),
            keep_alive: KeepAlive::default(),
            key: AtomicUsize::new(NO_KEY),
        };
        Self {
            record: Arc::new(record),
            request,
        }
    }

    pub(crate) fn queue(&self) -> &Arc<LockQueue> {
        &self.request.queue
    }

    /// Has the worker release it, since nobody will use it any more. Does no I/O and cannot block.
    pub(crate) fn abandon(&self) {
        match self.cell.begin_release(self.now()) {
            Ok(contender) => self.request.core().worker.release(self.clone(), contender),
            Err(_) => self.give_up_lost(),
        }
    }

    /// Leaves what is left of a lost hold to the worker, which releases it. If the worker has died, it is dropped here, with
    /// the guard and not with the last view.
    pub(crate) fn give_up_lost(&self) {
        if self.request.core().is_alive("release").is_err() {
            drop(self.cell.discard());
        }
    }

    /// Lets the next waiter of this client go to the server after a loss, wherever the claim is.
    pub(crate) fn pass_slot_after_loss(&self) {
        if let Some(slot) = self.slot {
            self.queue().pass_after_loss(slot);
        }
    }

    /// Takes the claim of a hold that is being released from the worker, unless that is at work on it at this very
    /// moment.
    pub(crate) fn recall(&self) -> Option<Contender> {
        self.keep_alive.stop();
        self.cell.take()
    }

    /// Returns the error of a renewal that cannot go on. The end of the client's runtime is a loss, which may not have reached this
    /// hold yet.
    fn cannot_go_on(&self, operation: &'static str, err: Error) -> Error {
        if self.request.core().is_alive(operation).is_err() {
            self.cell.lose(LossReason::Disconnected);
            if let Err(lost) = self.not_lost() {
                return lost;
            }
        }
        err.for_lock(&self.name)
    }

    /// Renews the hold once. The caller has the `contender` on loan, or for good.
    ///
    /// # Errors
    /// [`Error::Lost`] if it is lost; [`Error::Backend`] if the server did not say.
    pub(crate) async fn renew_with(&self, contender: &mut Contender, adopt_lease: bool) -> Result<()> {
        const OPERATION: &str = "renew";

        let Some(claim) = &mut contender.claim else {
            return Err(Error::Closed);
        };
        // This look also keeps what was slept before the request from being taken off its lease.
        let now = self.now();
        let mut limit = now.at + self.request.op_timeout;
        let mut overdue = limit;
        if let Some(end) = self.cell.valid_until() {
            let end = end.seen_from(now);
            limit = limit.min(end);
            overdue = timing::renewal_overdue(end, self.lease_length()).min(limit);
        }
        let core = self.request.core();
        let mut renewal = claim.renew();
        let mut reply = core
            .within(OPERATION, Core::is_alive, || overdue, &mut renewal)
            .await
            .map_err(|err| self.cannot_go_on(OPERATION, err))?;
        if reply.is_none() && overdue < limit {
            // It may still succeed, but those who have something to bring to an end can wait no longer.
            self.cell.renewal_failed();
            reply = core
                .within(OPERATION, Core::is_alive, || limit, &mut renewal)
                .await
                .map_err(|err| self.cannot_go_on(OPERATION, err))?;
        }
        match reply {
            Some(Ok(Renewal::Held(lease))) => {
                contender.is_doubted = false;
                let lease = self.clock.proof(&lease);
                let (end, now) = (lease.end(), self.now());
                // A lease that turns out to be shorter always counts.
                let is_shorter = end.is_some_and(|end| {
                    let known = self.cell.valid_until();
                    known.is_none_or(|known| end.seen_from(now) < known.seen_from(now))
                });
                if adopt_lease || is_shorter {
                    contender.lease = Some(lease);
                    self.cell.extend(end, now);
                } else {
                    self.cell.renewal_succeeded();
                }
                self.not_lost()
            }
            Some(Ok(Renewal::Lost(reason))) => {
                self.cell.lose(reason);
                self.not_lost()?;
                // It is being released: no loss to its user, but it cannot be handed off.
                Err(self.lost(reason))
            }
            Some(Err(err)) => {
                self.cell.renewal_failed();
                Err(err.for_lock(&self.name))
            }
            None => {
                self.not_lost()?;
                self.cell.renewal_failed();
                let cause = format!("no answer within {:?}", self.request.op_timeout);
                Err(Error::transient(self.backend, OPERATION, cause).for_lock(&self.name))
            }
        }
    }
}
