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
        attendance::Attendance,
        cell::{HoldCell, Phase},
        line::{Grip, Line, SlotTurn, Terms},
        moment::{Clock, Moment, Proof},
        register::NOWHERE,
        timing,
    },
    spi::Renewal,
};

/// The part of a hold that views keep: nothing of the client, once it is over.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) token: FencingToken,
    pub(crate) name: LockName,
    pub(crate) backend: &'static str,
    pub(crate) cell: HoldCell<Grip>,
    /// The length of its first lease.
    granted_for: Option<Duration>,
    clock: Clock,
    pub(crate) attendance: Attendance,
    /// The slot that its claim has. The claim may be on loan when it has to be given up.
    slot: Option<SlotTurn>,
    /// Its place in its line's register.
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

    /// The local end of its lease as it is, on the clock that timers run on.
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

/// A hold, for those who can do something with it.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) record: Arc<Record>,
    pub(crate) terms: Arc<Terms>,
}

impl Deref for Hold {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.record
    }
}

impl Hold {
    /// A hold made of `grip`, on a lease that has been proven.
    pub(crate) fn new(phase: Phase, terms: Arc<Terms>, token: u64, grip: Grip, lease: &Proof) -> Self {
        let session = grip.claim.as_ref().and_then(|claim| claim.session());
        let record = Record {
            token: FencingToken::new(token),
            name: terms.line.name().clone(),
            backend: terms.line.backend(),
            slot: grip.slot(),
            cell: HoldCell::new(phase, grip, lease.end(), session),
            granted_for: lease.length,
            clock: terms.line.core.clock.clone(),
            attendance: Attendance::default(),
            key: AtomicUsize::new(NOWHERE),
        };
        Self {
            record: Arc::new(record),
            terms,
        }
    }

    pub(crate) fn line(&self) -> &Line {
        &self.terms.line
    }

    /// Nobody will use it any more: the worker releases it. Does no I/O and cannot block.
    pub(crate) fn abandon(&self) {
        match self.cell.begin_release(self.now()) {
            Ok(grip) => self.line().core.worker.settle(self.clone(), grip),
            Err(_) => self.give_up_what_is_lost(),
        }
    }

    /// Leaves what is left of a lost hold to the worker, which releases it. If there is none any more, it is dropped with the
    /// guard, and not with the last view.
    pub(crate) fn give_up_what_is_lost(&self) {
        if self.line().core.worker.lives("release").is_err() {
            drop(self.cell.discard());
        }
    }

    /// Lets the next waiter of this client go to the server, wherever the claim is.
    pub(crate) fn pass_slot(&self) {
        if let Some(turn) = self.slot {
            self.line().pass(turn);
        }
    }

    /// Takes the claim of a hold that is being released from the worker, unless that is at work on it at this very
    /// moment.
    pub(crate) fn recall(&self) -> Option<Grip> {
        self.attendance.end();
        self.cell.take()
    }

    /// Proves the hold anew, once. The caller has the claim on loan as `grip`.
    pub(crate) async fn renew_with(&self, grip: &mut Grip, adopt_lease: bool) -> Result<()> {
        let Some(claim) = &mut grip.claim else {
            return Err(Error::Closed);
        };
        // Also so that what was slept before the request is not taken off its lease.
        let now = self.now();
        let mut limit = now.at + self.terms.op_timeout;
        let mut overdue = limit;
        if let Some(end) = self.cell.valid_until() {
            let end = end.seen_from(now);
            limit = limit.min(end);
            overdue = timing::renewal_overdue(end, self.lease_length()).min(limit);
        }
        let backend = self.line().backend();
        let mut renewal = claim.renew();
        let mut answer = timing::within(backend, "renew", &mut renewal, || overdue).await?;
        if answer.is_none() && overdue < limit {
            // It is still waited for, but those who have something to bring to an end can wait no longer.
            self.cell.renewal_failed();
            answer = timing::within(backend, "renew", &mut renewal, || limit).await?;
        }
        match answer {
            Some(Ok(Renewal::Held(lease))) => {
                grip.is_doubted = false;
                let lease = self.clock.proof(&lease);
                let (end, now) = (lease.end(), self.now());
                // What the backend has turned out not to prove ends earlier, whoever renews.
                let is_shorter = end.is_some_and(|end| {
                    let told = self.cell.valid_until();
                    told.is_none_or(|told| end.seen_from(now) < told.seen_from(now))
                });
                if adopt_lease || is_shorter {
                    grip.lease = Some(lease);
                    self.cell.extend(end, now);
                } else {
                    self.cell.answered();
                }
                self.not_lost()
            }
            Some(Ok(Renewal::Lost(reason))) => {
                self.cell.lose(reason);
                self.not_lost()
            }
            Some(Err(err)) => {
                self.cell.renewal_failed();
                Err(err.for_lock(self.line().name()))
            }
            None => {
                self.not_lost()?;
                self.cell.renewal_failed();
                let cause = format!("no answer within {:?}", self.terms.op_timeout);
                Err(Error::transient(backend, "renew", cause).for_lock(self.line().name()))
            }
        }
    }
}
