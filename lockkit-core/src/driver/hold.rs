//! One grant, shared by its guard, its views and the worker that keeps it alive.

use std::{
    future::pending,
    mem,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    AcquireOptions, Error, FencingToken, LockName, LossReason, Result,
    driver::{
        cell::{HoldCell, Phase},
        contender::Contender,
        core::Core,
        finish_release::finish_release_at_once,
        keep_alive::KeepAlive,
        lock_queue::{LockQueue, SlotGeneration},
        max_hold::MaxHold,
        moment::{Clock, Moment, Proof},
        observe::Mark,
        register::NO_KEY,
        request::AcquireRequest,
        timing::{self, HintBudget},
    },
    spi::{Lease, Renewal},
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
    /// In a box, since few holds have one.
    max_hold: Option<Box<MaxHold>>,
    /// In a box, since few holds have one.
    least: Option<Box<Least>>,
    pub(crate) keep_alive: KeepAlive,
    /// The slot that its contender has. The contender may be on loan when the slot has to be given up.
    slot: Option<SlotGeneration>,
    /// Its key in its queue's register.
    pub(crate) key: AtomicUsize,
}

/// The time for which nobody else gets the lock of a hold, even if that is released before.
#[derive(Debug)]
struct Least {
    /// A release before that leaves the hold to a lease until then.
    not_before: Instant,
    /// It does so. A part of a set that is not complete does not.
    keeps: AtomicBool,
}

impl Record {
    pub(crate) fn is_held(&self) -> bool {
        self.cell.phase(self.now()) == Phase::Held
    }

    /// The length of the lease in force when it was proven.
    pub(crate) fn lease_length(&self) -> Option<Duration> {
        let lease = self.cell.renewed_for().or(self.granted_for);
        lease.or_else(|| {
            let max_hold = self.max_hold.as_ref()?;
            self.is_past_max_hold().then(|| max_hold.grace())
        })
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self.cell.phase(self.now()) {
            Phase::Lost(reason) => Err(self.lost(reason)),
            Phase::Releasing | Phase::Detached => Err(Error::Released {
                backend: self.backend,
                name: self.name.clone(),
            }),
            Phase::Offered | Phase::Held => Ok(()),
        }
    }

    /// Looks at the clocks.
    pub(crate) fn now(&self) -> Moment {
        if let Some(max_hold) = &self.max_hold {
            self.cell.set_limit(max_hold.look());
        }
        self.clock.now()
    }

    /// Returns whether it is not renewed any more, since its `max_hold` is over.
    pub(crate) fn is_past_max_hold(&self) -> bool {
        self.max_hold.is_some() && self.cell.limit_is_over(self.now())
    }

    /// Returns the time at which its `max_hold` will be over.
    pub(crate) fn max_hold_to_come(&self) -> Option<Instant> {
        self.max_hold.as_ref()?;
        self.cell.limit_to_come(self.now())
    }

    /// The local end of the present lease, on the clock that timers run on.
    pub(crate) fn valid_until(&self) -> Option<Instant> {
        let now = self.now();
        self.cell.end(now).map(|end| end.seen_from(now))
    }

    /// Returns whether its lease is over, also if it is being released. A hold without a lease has no end of its own.
    pub(crate) fn is_over(&self) -> bool {
        let now = self.now();
        self.cell.end(now).is_some_and(|end| now.has_reached(end))
    }

    pub(crate) fn not_lost(&self) -> Result<()> {
        match self.cell.phase(self.now()) {
            Phase::Lost(reason) => Err(self.lost(reason)),
            Phase::Offered | Phase::Held | Phase::Releasing | Phase::Detached => Ok(()),
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
        let max_hold = request.max_hold.map(|length| {
            let clock = &request.core().max_hold_clock;
            Box::new(MaxHold::begin(clock, length, request.ttl))
        });
        let not_before = request
            .hold_at_least
            .as_deref()
            .map(|least| Instant::now() + *least);
        Self::with_limits(phase, request, token, contender, lease, max_hold, not_before)
    }

    /// Makes the hold that this one, which has ended, goes on as. It has the same token, and its `max_hold` and its `hold_at_least` go on.
    pub(crate) fn continued(
        &self,
        request: Arc<AcquireRequest>,
        contender: Contender,
        lease: &Proof,
    ) -> Self {
        let (token, max_hold) = (self.token.get(), self.max_hold.clone());
        Self::with_limits(
            Phase::Held,
            request,
            token,
            contender,
            lease,
            max_hold,
            self.not_before(),
        )
    }

    fn with_limits(
        phase: Phase,
        request: Arc<AcquireRequest>,
        token: u64,
        contender: Contender,
        lease: &Proof,
        max_hold: Option<Box<MaxHold>>,
        not_before: Option<Instant>,
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
            max_hold,
            least: not_before.map(|not_before| {
                Box::new(Least {
                    not_before,
                    keeps: AtomicBool::new(true),
                })
            }),
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

    /// Has a release before its `hold_at_least` is over leave it to a lease, or free it.
    pub(crate) fn keeps(&self, keeps: bool) {
        if let Some(least) = &self.least {
            least.keeps.store(keeps, Ordering::Relaxed);
        }
    }

    /// Returns the time before which a release leaves it to a lease until then.
    pub(crate) fn not_before(&self) -> Option<Instant> {
        let least = self.least.as_ref()?;
        least.keeps.load(Ordering::Relaxed).then_some(least.not_before)
    }

    /// Has the worker release it, since nobody will use it any more, or releases it here if that needs no I/O. Does no I/O and
    /// cannot block.
    pub(crate) fn abandon(&self) {
        let now = self.now();
        match self.cell.begin_release(now) {
            Ok(contender) if self.request.core().info.releases_at_once => {
                finish_release_at_once(self, contender, now);
            }
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

    /// Resolves when the user has let go of a lost hold that was asked back: at once if it was lost otherwise. Resolves at the
    /// end of its lease, too, and when the client is closed. A hold without a lease has an end once its `max_hold` is over.
    pub(crate) async fn let_go(&self) {
        let over = async {
            loop {
                // Before the end is read: there is one as soon as this is not to come any more.
                let max_hold = self.max_hold_to_come();
                // By then, a server that counts the lease has ended the hold by itself. So whoever asked can tell that from a release.
                let by_then = self.valid_until().map(|end| {
                    let length = self.lease_length().unwrap_or(self.request.ttl);
                    end + length / 50 + Duration::from_millis(50)
                });
                if by_then.is_some_and(|at| Instant::now() >= at) {
                    return;
                }
                // Meanwhile a session may prove more than it does now.
                match by_then.or(max_hold) {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => pending().await,
                }
            }
        };
        tokio::select! {
            biased;
            () = std::future::poll_fn(|cx| self.cell.poll_let_go(cx)) => {}
            () = over => {}
            _ = self.request.core().over("release", Core::is_open) => {}
        }
    }

    /// Resolves when the server says that a lost hold that was asked back is gone, though its user has not let go of it: it was ended
    /// by force, say. Its [`valid_until`](Record::valid_until) is now from then on.
    pub(crate) async fn gone_after_all(&self) {
        const OPERATION: &str = "renew";
        /// The time after which it is asked without a hint.
        const LOOKS_AGAIN_AFTER: Duration = Duration::from_secs(1);

        let core = self.request.core();
        let mut loan = self.cell.reclaim().await;
        loop {
            let Some(contender) = loan.as_mut() else {
                return pending().await;
            };
            tokio::select! {
                () = contender.hinted() => {}
                () = tokio::time::sleep(LOOKS_AGAIN_AFTER) => {}
            }
            let Some(claim) = &mut contender.claim else {
                return pending().await;
            };
            // This prolongs nothing, since the hold was asked back.
            let renewal = core.request(OPERATION, claim.renew());
            let limit = || Instant::now() + self.request.op_timeout;
            match core.within(OPERATION, Core::is_alive, limit, renewal).await {
                Ok(Some(Ok(Renewal::Lost(_)))) => return self.cell.is_over(self.now()),
                Ok(_) => {}
                Err(_) => return pending().await,
            }
            // A backend may hint for as long as the hold is asked for.
            tokio::time::sleep(HintBudget::HOLDERS_REST).await;
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

    /// # Errors
    /// [`Error::Backend`] once its `max_hold` is over.
    pub(crate) fn may_be_renewed(&self, operation: &'static str) -> Result<()> {
        match self.request.max_hold {
            Some(max_hold) if self.is_past_max_hold() => {
                let cause =
                    format!("its `max_hold` of {max_hold:?} is over, so that it is not renewed any more");
                Err(Error::permanent(self.backend, operation, cause).for_lock(&self.name))
            }
            _ => Ok(()),
        }
    }

    /// Checks that it may have another ttl, as far as the driver knows.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a ttl out of range or above its `max_hold`; [`Error::Unsupported`] where it has no lease;
    /// [`Error::Backend`] once its `max_hold` is over.
    pub(crate) fn may_have_ttl(&self, ttl: Duration) -> Result<()> {
        let mut options = AcquireOptions::new().ttl(ttl);
        options.max_hold = self.request.max_hold;
        options.validate()?;
        if !self.request.core().info.capabilities.lease {
            return Err(self.has_one_ttl());
        }
        self.request.core().check_ttl(ttl)?;
        self.may_be_renewed("set_ttl")
    }

    fn has_one_ttl(&self) -> Error {
        Error::unsupported(
            self.backend,
            "another ttl for a live hold: its holds have no lease",
        )
    }

    /// Changes the ttl, and renews the hold once for it.
    ///
    /// From the first request on, the server may count with the new ttl, whether or not a reply comes or this future goes on. So a
    /// shorter lease counts here before that, and a longer one once it is proven.
    ///
    /// # Errors
    /// As [`renew_with`](Self::renew_with). [`Error::InvalidOptions`] or [`Error::Unsupported`] if the backend refuses the ttl, and
    /// nothing has changed.
    pub(crate) async fn set_ttl_with(&self, contender: &mut Contender, ttl: Duration) -> Result<()> {
        let Some(claim) = &mut contender.claim else {
            return Err(Error::Closed);
        };
        let length = claim.set_ttl(ttl).map_err(|err| err.for_lock(&self.name))?;
        let length = length.ok_or_else(|| self.has_one_ttl())?;
        contender.set_ttl(ttl);
        if let Some(max_hold) = &self.max_hold {
            max_hold.set_ttl(ttl);
        }
        let now = self.now();
        let lease = self.clock.proof(&Lease {
            since: now.at,
            length: Some(length),
        });
        if lease.end().is_some_and(|end| self.cell.shorten(end, now)) {
            // The next renewal is due by the lease that counts.
            contender.lease = Some(lease);
        }
        self.renew_with(contender, true).await
    }

    /// Has the next request ask for what is left of the lease, and hardly more. Past its `max_hold`, a hold is renewed only to find out
    /// whether it is still there, and must not last longer at the server for that.
    pub(crate) fn ask_for_the_rest(&self, contender: &mut Contender) {
        let ttl = contender.ttl();
        let Some(claim) = &mut contender.claim else { return };
        // A session is alive for longer than its holds in any case.
        if !self.request.core().info.capabilities.lease || claim.session().is_some() {
            return;
        }
        let now = self.now();
        let Some(end) = self.cell.valid_until() else {
            return;
        };
        let left = end.seen_from(now).saturating_duration_since(now.at);
        // More than any backend takes off for the drift of clocks: the lease here must not become shorter, also without a reply.
        let rest = left + left / 50 + AcquireOptions::MIN_TTL;
        if rest >= ttl {
            return;
        }
        match claim.set_ttl(rest) {
            Ok(Some(length)) if length >= left => contender.set_ttl(rest),
            Ok(_) => {
                let _ = claim.set_ttl(ttl);
            }
            Err(_) => {}
        }
    }

    /// Returns whether this lease ends before the one that counts. Such a lease always counts.
    fn is_shorter(&self, lease: &Proof) -> bool {
        let now = self.now();
        lease.end().is_some_and(|end| {
            let known = self.cell.valid_until();
            known.is_none_or(|known| end.seen_from(now) < known.seen_from(now))
        })
    }

    /// Renews the hold once. The caller has the `contender` on loan, or for good.
    ///
    /// # Errors
    /// [`Error::Lost`] if it is lost; [`Error::Backend`] if the server did not say.
    pub(crate) async fn renew_with(&self, contender: &mut Contender, adopt_lease: bool) -> Result<()> {
        const OPERATION: &str = "renew";
        /// The number of times that it goes on after a lease that is not confirmed. Each should take a while.
        const MOST_UNCONFIRMED: usize = 16;

        // This look also keeps what was slept before the request from being taken off its lease.
        let now = self.now();
        let began = contender.renewing_since.take().unwrap_or(Mark::at(now.at));
        let given_up = now.at + self.request.op_timeout;
        let core = self.request.core();
        // This future may be dropped with a loss found and not told.
        let was_doubted = mem::replace(&mut contender.is_doubted, true);
        let mut unconfirmed = 0;
        let reply = loop {
            let Some(claim) = &mut contender.claim else {
                return Err(Error::Closed);
            };
            let (mut limit, mut overdue) = (given_up, given_up);
            if let Some(end) = self.cell.valid_until() {
                let end = end.seen_from(now);
                limit = limit.min(end);
                overdue = timing::renewal_overdue(end, self.lease_length()).min(limit);
            }
            let mut renewal = core.request(OPERATION, claim.renew());
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
            let Some(Ok(Renewal::Unconfirmed(lease))) = reply else {
                break reply;
            };
            drop(renewal);
            let lease = self.clock.proof(&lease);
            if adopt_lease || self.is_shorter(&lease) {
                contender.lease = Some(lease);
                self.cell.count_with(lease.end(), self.now());
            }
            unconfirmed += 1;
            if unconfirmed == MOST_UNCONFIRMED {
                break None;
            }
        };
        match reply {
            Some(Ok(Renewal::Held(lease))) => {
                contender.is_doubted = false;
                core.meters.renewed(began);
                let lease = self.clock.proof(&lease);
                if adopt_lease || self.is_shorter(&lease) {
                    contender.lease = Some(lease);
                    self.cell.extend(lease.end(), self.now());
                } else {
                    self.cell.renewal_succeeded();
                }
                self.not_lost()
            }
            Some(Ok(Renewal::Asked)) => {
                self.cell.lose_asked();
                self.not_lost()?;
                // It is being released: that is all that was asked for, but it cannot be handed off.
                Err(self.lost(LossReason::Asked))
            }
            Some(Ok(Renewal::Lost(reason))) => {
                self.cell.lose(reason);
                self.not_lost()?;
                // It is being released: no loss to its user, but it cannot be handed off.
                Err(self.lost(reason))
            }
            Some(Err(err)) => {
                contender.is_doubted = was_doubted;
                contender.renewing_since = Some(began);
                self.cell.renewal_failed();
                Err(err.for_lock(&self.name))
            }
            None | Some(Ok(Renewal::Unconfirmed(_))) => {
                self.not_lost()?;
                contender.renewing_since = Some(began);
                self.cell.renewal_failed();
                let cause = format!("no answer within {:?}", self.request.op_timeout);
                Err(Error::transient(self.backend, OPERATION, cause).for_lock(&self.name))
            }
        }
    }
}
