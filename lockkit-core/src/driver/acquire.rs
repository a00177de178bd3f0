//! From the call to the grant, in the caller's own future: nothing is spawned, and dropping it is the cancellation.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{Arc, OnceLock},
    task::Poll,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    Error, Result,
    driver::{
        cell::Phase,
        contender::Contender,
        core::Core,
        hold::Hold,
        lock_queue::{LastReply, LockQueue, WaitOutcome, Waiter},
        moment::Proof,
        observe::{self, Acquisition, Outcome},
        request::AcquireRequest,
        timing::{self, Backoff, HintBudget},
    },
    spi::{Claim, ClaimRequest, Grant, Mode, chain, require_runtime},
};

const OPERATION: &str = "acquire";

/// The time beyond the caller's deadline that an attempt may take if the server has not replied before. Without a reply,
/// "taken" cannot be told from "cannot tell".
pub(crate) const GRACE: Duration = Duration::from_millis(100);

/// The most of it, for a server that was never quicker to reply.
const LONGEST_GRACE: Duration = Duration::from_millis(400);

/// The interval at which those whose time is over look whether another of them has an answer.
const ANSWERED_SOON: Duration = Duration::from_millis(10);

/// The time for which the server's word counts that a lock is taken. After that, the server may have been away for long.
const WORD_COUNTS: Duration = Duration::from_secs(1);

/// Acquires a lock. The caller makes a guard of the hold at once: dropping the hold does not release it.
pub(crate) async fn acquire(request: &Arc<AcquireRequest>) -> Result<Hold> {
    let queue = &request.queue;
    // Dropped last: what is left of a cancelled acquisition is on its way before that counts as ended.
    let acquisition = Acquisition::begin(queue);
    let mut work = pin!(enter_and_contend(request));
    match poll_fn(|cx| acquisition.poll(work.as_mut(), cx)).await {
        Ok((hold, outcome)) => {
            acquisition.granted(&hold, outcome);
            Ok(hold)
        }
        Err(err) => {
            let err = err.for_lock(queue.name());
            acquisition.failed(&err);
            // A client that can do nothing any more says so at once. Whoever asks again and again would never pause, and a runtime ends
            // a task only where it pauses.
            if !err.is_transient() && !err.is_timeout() {
                timing::pause_once().await;
            }
            Err(err)
        }
    }
}

async fn enter_and_contend(request: &Arc<AcquireRequest>) -> Result<(Hold, Outcome)> {
    let core = request.core();
    core.is_open(OPERATION)?;
    let deadline = Deadline::new(request);
    let entered = if request.is_try() {
        // Always asks the server: a hold of this client may have been lost a moment ago.
        Ok(LockQueue::enter(request).unwrap_or_else(|| LockQueue::bypass(request)))
    } else {
        LockQueue::enter_or_join(request)
    };
    let (contender, now) = match entered {
        Ok(contender) => (contender, None),
        Err(waiter) => match wait_in_queue(request, &deadline, waiter).await? {
            Entry::Contend(contender) => (contender, Some(core.clock.now().at)),
            Entry::Held(hold) => return Ok((hold, Outcome::HandedOff)),
            Entry::TimeIsOver => {
                let hold = Box::pin(end_behind_others(request, &deadline)).await?;
                return Ok((hold, Outcome::Granted));
            }
        },
    };
    // Either this sees that the client is closed, or the one who closes it sees the contender.
    core.is_open(OPERATION)?;
    let hold = contend(contender, &deadline, now).await?;
    Ok((hold, Outcome::Granted))
}

/// The end of waiting in the local queue.
enum Entry {
    Contend(Contender),
    Held(Hold),
    TimeIsOver,
}

/// Waits in the local queue for the slot, or for a hold that is passed on.
async fn wait_in_queue<'a>(
    request: &'a Arc<AcquireRequest>,
    deadline: &Deadline,
    mut waiter: Waiter<'a>,
) -> Result<Entry> {
    let queue = &request.queue;
    loop {
        require_runtime(queue.backend(), OPERATION)?;
        let outcome = match deadline.at() {
            None => waiter.await,
            Some(at) => match timing::within(queue.backend(), OPERATION, waiter, || at).await? {
                Some(outcome) => outcome,
                None => return Ok(Entry::TimeIsOver),
            },
        };
        match outcome {
            WaitOutcome::Slot(contender) => return Ok(Entry::Contend(contender)),
            WaitOutcome::Hold(hold) => {
                if hold.cell.accept(hold.now()) {
                    return Ok(Entry::Held(hold));
                }
            }
            WaitOutcome::Lapsed => {}
            WaitOutcome::Closed => return Err(queue.core.over(OPERATION, Core::is_open).await),
        }
        waiter = match LockQueue::enter_or_join(request) {
            Ok(contender) => return Ok(Entry::Contend(contender)),
            Err(waiter) => waiter,
        };
    }
}

/// Says what is the case when the caller's time is over in the local queue. If the server has said nothing, or too long ago, one of all
/// those whose time is over asks it for the others, too.
async fn end_behind_others(request: &Arc<AcquireRequest>, deadline: &Deadline) -> Result<Hold> {
    let queue = &request.queue;
    let others_have = Instant::now() + LONGEST_GRACE;
    loop {
        let last_reply = queue.last_reply();
        if !last_reply.says_nothing() {
            return Err(deadline.verdict(queue, &last_reply));
        }
        if let Some(_asking) = queue.begin_asking() {
            let contender = LockQueue::bypass(request);
            // Either this sees that the client is closed, or the one who closes it sees the contender.
            queue.core.is_open(OPERATION)?;
            return ask_at_the_end(contender, deadline, LONGEST_GRACE).await;
        }
        if Instant::now() >= others_have {
            return Err(queue.core.no_answer(OPERATION).for_lock(queue.name()));
        }
        require_runtime(queue.backend(), OPERATION)?;
        tokio::select! {
            biased;
            err = queue.core.over(OPERATION, Core::is_open) => return Err(err),
            () = tokio::time::sleep(ANSWERED_SOON) => {}
        }
    }
}

/// Asks once more, and says what is the case now that the caller's time is over.
async fn ask_at_the_end(mut contender: Contender, deadline: &Deadline, quickest: Duration) -> Result<Hold> {
    let request = contender.request.clone();
    let (queue, core) = (&request.queue, request.core());
    let now = core.clock.now().at;
    // It has its grace from now on: this may be late. To a server that is far away, a reply takes longer.
    let grace = deadline.overrun() + (quickest * 2).clamp(GRACE, LONGEST_GRACE);
    let asked = Instant::now();
    let last_reply = match attempt(&mut contender, deadline, Some(now), grace).await {
        Ok(Some(granted)) => return make_hold(contender, granted),
        Ok(None) => LastReply::Taken(Instant::now()),
        Err(err) if err.is_transient() => LastReply::Failed(chain(&err).into()),
        Err(err) => return Err(give_up(contender, err).await),
    };
    queue.set_last_reply(last_reply.clone());
    let err = deadline.verdict(queue, &last_reply);
    if asked.elapsed() >= GRACE {
        // To withdraw takes as long: the worker does it.
        return Err(err);
    }
    Err(give_up(contender, err).await)
}

/// Attempts until the server grants, the caller's time is over, or an error says that no repeating will help.
async fn contend(mut contender: Contender, deadline: &Deadline, now: Option<Instant>) -> Result<Hold> {
    match attempt(&mut contender, deadline, now, GRACE).await {
        Ok(Some(granted)) => make_hold(contender, granted),
        // What it takes to wait is made only when there is need to wait.
        not_yet => Box::pin(keep_contending(contender, not_yet, deadline)).await,
    }
}

async fn keep_contending(
    mut contender: Contender,
    mut attempted: Result<Option<Granted>>,
    deadline: &Deadline,
) -> Result<Hold> {
    let request = contender.request.clone();
    let (queue, core) = (&request.queue, request.core());
    let is_try = request.is_try();
    let mut last_reply = LastReply::Unknown;
    let mut quickest = LONGEST_GRACE;
    let mut asked = deadline.started();
    let mut backoff = Backoff::default();
    let mut hints = HintBudget::default();
    loop {
        let taken = match attempted {
            Ok(Some(granted)) => return make_hold(contender, granted),
            Ok(None) if is_try => {
                // An attempt without patience stays out of every queue: there is nothing to withdraw.
                contender.forget_claim();
                return Err(deadline.taken(queue));
            }
            Ok(None) => {
                backoff.reset();
                let answered = Instant::now();
                last_reply = LastReply::Taken(answered);
                quickest = quickest.min(answered - asked);
                true
            }
            Err(err) if err.is_transient() && !is_try => {
                if matches!(last_reply, LastReply::Unknown) && contender.has_slot() {
                    // Those before it in this client's queue may know more.
                    last_reply = queue.last_reply();
                }
                let why: Arc<str> = chain(&err).into();
                let known = matches!(&last_reply, LastReply::Failed(before) if *before == why);
                // An attempt that the caller's deadline cut short says nothing new, and there is no other.
                let over = deadline.is_over();
                observe::attempt_failed(queue, &why, known || over);
                if !(over && matches!(last_reply, LastReply::Taken(_))) {
                    last_reply = LastReply::Failed(why);
                }
                false
            }
            Err(err) => return Err(give_up(contender, err).await),
        };
        if contender.has_slot() {
            queue.set_last_reply(last_reply.clone());
        }
        require_runtime(queue.backend(), OPERATION)?;
        let pause = if taken {
            hints.pause(core.info.fallback_poll)
        } else {
            backoff.next()
        };
        let listening = Instant::now();
        tokio::select! {
            biased;
            err = core.over(OPERATION, Core::is_open) => return Err(give_up(contender, err).await),
            () = contender.hinted(), if taken && hints.listens() => hints.hinted(listening.elapsed()),
            () = deadline.passed() => {
                if matches!(last_reply, LastReply::Taken(_)) && last_reply.says_nothing() {
                    return ask_at_the_end(contender, deadline, quickest).await;
                }
                return Err(give_up(contender, deadline.verdict(queue, &last_reply)).await);
            }
            () = tokio::time::sleep(pause) => hints.rested(),
        }
        let now = core.clock.now().at;
        asked = now;
        attempted = attempt(&mut contender, deadline, Some(now), last_reply.grace()).await;
    }
}

/// The part of a grant that only its holder needs.
#[derive(Clone, Copy)]
pub(super) struct Granted {
    pub(super) token: u64,
    /// The moment when it was found to be good. Its lease may have begun long before.
    pub(super) at: Instant,
    /// Nobody has had the hold before.
    pub(super) is_new: bool,
}

/// Opens the claim if there is none, then makes one attempt. Returns a grant's token, and leaves the rest in the contender.
///
/// Somebody has looked at the client's clock `now`, or else when the caller's time began, so that what was slept before the
/// request is not taken off its lease.
async fn attempt(
    contender: &mut Contender,
    deadline: &Deadline,
    mut now: Option<Instant>,
    grace: Duration,
) -> Result<Option<Granted>> {
    let Contender { request, claim, .. } = contender;
    let (queue, core) = (&request.queue, request.core());
    let claim = match claim {
        Some(claim) => claim,
        unopened => unopened.insert(open(request, deadline, &mut now, grace).await?),
    };
    contender.is_known = true;
    let patience = deadline.patience(core.info.max_patience, now);
    let limit = deadline.limit(patience, request, grace);
    let attempt = core.request(OPERATION, claim.attempt(patience));
    let Some(grant) = queue.exchange(OPERATION, Core::is_open, limit, attempt).await? else {
        return Ok(None);
    };
    let proof = core.clock.proof(&grant.lease);
    let at = match usable_at(queue, &grant, &proof) {
        Ok(at) => at,
        Err(err) => return Box::pin(withdraw(contender, err)).await,
    };
    let token = *grant.tokens.start();
    contender.most_handoffs = request.local_handoffs;
    contender.spare_tokens = grant.tokens;
    contender.spare_tokens.next();
    contender.lease = Some(proof);
    let is_new = true;
    Ok(Some(Granted { token, at, is_new }))
}

/// Opens a claim. Looks at the clock again afterwards if that took a while.
async fn open(
    request: &AcquireRequest,
    deadline: &Deadline,
    now: &mut Option<Instant>,
    grace: Duration,
) -> Result<Box<dyn Claim>> {
    let (queue, core) = (&request.queue, request.core());
    let claim_request = claim_request(request)?;
    let mut opening = core.blanked(core.backend.claim(&claim_request));
    if let Poll::Ready(opened) = timing::poll_once(&mut opening).await {
        return opened
            .and_then(|claim| for_long_enough(claim, request))
            .map_err(|err| err.for_lock(queue.name()));
    }
    let limit = deadline.limit(Duration::ZERO, request, grace);
    let opened = queue.exchange(OPERATION, Core::is_open, limit, opening).await?;
    *now = Some(core.clock.now().at);
    for_long_enough(opened, request)
}

/// Has the backend refuse a `hold_at_least` that is longer than any lease of its, before there is a hold.
pub(super) fn for_long_enough(mut claim: Box<dyn Claim>, request: &AcquireRequest) -> Result<Box<dyn Claim>> {
    if let Some(&least) = request.hold_at_least.as_deref() {
        let refused = |_| {
            let reason = format!("{least:?} is longer than a lease can be");
            Error::invalid_option("hold_at_least", reason)
        };
        claim.set_ttl(least).map_err(refused)?;
        claim.set_ttl(request.ttl)?;
    }
    Ok(claim)
}

fn claim_request(request: &AcquireRequest) -> Result<ClaimRequest> {
    let queue = &request.queue;
    let owner = queue.owner()?;
    let mut claim = ClaimRequest::new(queue.name().clone(), queue.mode, request.ttl, owner);
    claim.label.clone_from(&request.label);
    claim.renews = request.renew;
    if queue.mode == Mode::Exclusive {
        claim.tokens = claim.tokens.saturating_add(request.local_handoffs);
        claim.locally_contended = queue.take_was_waited_in();
    }
    Ok(claim)
}

/// Returns the present moment if a grant can be used now.
fn usable_at(queue: &LockQueue, grant: &Grant, proof: &Proof) -> Result<Instant> {
    let backend = queue.backend();
    let now = queue.core.clock.now();
    let err = if grant.tokens.is_empty() {
        Error::permanent(backend, OPERATION, "the grant came without a fencing token")
    } else if proof.end().is_some_and(|end| now.has_reached(end)) {
        Error::transient(backend, OPERATION, "the lease was over when the grant arrived")
    } else {
        return Ok(now.at);
    };
    Err(err.for_lock(queue.name()))
}

/// Releases at the server what a grant that cannot be used may have left there. The same claim may go on contending.
async fn withdraw(contender: &mut Contender, err: Error) -> Result<Option<Granted>> {
    let Contender { claim, request, .. } = contender;
    if let Some(claim) = claim {
        let limit = || Instant::now() + request.op_timeout;
        let withdrawal = request.core().request("release", claim.release());
        // If this fails as well, the claim stays known to the server and is cleaned up in the end.
        let _ = request
            .queue
            .exchange("release", Core::is_alive, limit, withdrawal)
            .await;
    }
    Err(err)
}

/// Makes a hold of a contender that has been granted the lock.
pub(super) fn make_hold(mut contender: Contender, granted: Granted) -> Result<Hold> {
    let request = contender.request.clone();
    let queue = &request.queue;
    let lease = contender.lease.ok_or(Error::Closed)?;
    // Fails if the client has no runtime to live on: nobody would ever renew the hold.
    queue.core.worker.begin(OPERATION)?;
    if !queue.is_exclusive() {
        // Shared holders and permits have a claim each: the next waiter may go to the server.
        contender.pass_slot();
    } else if contender.has_slot() {
        queue.begin_holding();
    }
    contender.becomes_hold();
    let hold = Hold::new(Phase::Held, request, granted.token, contender, &lease);
    // What nobody has had is free at once, if the client is closed before somebody has.
    hold.keeps(!granted.is_new);
    hold.queue().register(&hold, granted.at);
    if let Err(err) = hold.request.core().is_open(OPERATION) {
        // It may have come too late to be lost with all the others.
        hold.abandon();
        return Err(err);
    }
    hold.keeps(true);
    Ok(hold)
}

/// Withdraws the claim on the caller's time if that is quick, else in the background. Returns `err`.
async fn give_up(mut contender: Contender, err: Error) -> Error {
    let Contender { claim, request, .. } = &mut contender;
    if request.core().is_open(OPERATION).is_err() {
        return err;
    }
    if let Some(claim) = claim {
        let limit = || Instant::now() + GRACE;
        let withdrawal = request.core().request("release", claim.release());
        let withdrawn = request
            .queue
            .exchange("release", Core::is_alive, limit, withdrawal)
            .await;
        if withdrawn.is_ok() {
            contender.forget_claim();
        }
    }
    err
}

impl LastReply {
    /// Returns the time beyond the caller's deadline that the next attempt may take.
    fn grace(&self) -> Duration {
        match self {
            Self::Taken(_) => Duration::ZERO,
            Self::Unknown | Self::Failed(_) => GRACE,
        }
    }

    /// There was none, or the lock was taken too long ago for that to be said now.
    fn says_nothing(&self) -> bool {
        match self {
            Self::Unknown => true,
            Self::Taken(at) => at.elapsed() >= WORD_COUNTS,
            Self::Failed(_) => false,
        }
    }
}

/// The end of the caller's time.
struct Deadline {
    /// Read when something is first waited for: a lock that is granted at once needs no clock.
    started: OnceLock<Instant>,
    wait: Option<Duration>,
}

impl Deadline {
    fn new(request: &AcquireRequest) -> Self {
        let looked = request.core().clock.look();
        Self {
            started: looked.map_or_else(OnceLock::new, OnceLock::from),
            wait: request.wait,
        }
    }

    fn started(&self) -> Instant {
        *self.started.get_or_init(Instant::now)
    }

    /// Returns the deadline. A single attempt has none: it is bounded by `op_timeout`.
    fn at(&self) -> Option<Instant> {
        let wait = self.wait.filter(|wait| !wait.is_zero())?;
        Some(self.started() + wait)
    }

    fn is_over(&self) -> bool {
        self.at().is_some_and(|at| Instant::now() >= at)
    }

    async fn passed(&self) {
        match self.at() {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// The time by which it is over already.
    fn overrun(&self) -> Duration {
        self.at()
            .map_or(Duration::ZERO, |at| Instant::now().saturating_duration_since(at))
    }

    /// The limit of one exchange that blocks for `patience` at the server, and may take so much longer than the caller's time.
    fn limit(
        &self,
        patience: Duration,
        request: &AcquireRequest,
        grace: Duration,
    ) -> impl FnOnce() -> Instant + use<> {
        let op_timeout = request.op_timeout;
        let deadline = self.at();
        move || {
            let limit = Instant::now() + patience + op_timeout;
            deadline.map_or(limit, |deadline| limit.min(deadline + grace))
        }
    }

    /// The time for which an attempt may block at the server, from `now` on or from the beginning. Zero only for a single
    /// attempt.
    fn patience(&self, most: Duration, now: Option<Instant>) -> Duration {
        if self.wait == Some(Duration::ZERO) {
            return Duration::ZERO;
        }
        let left = match now {
            Some(now) => self.at().map(|at| at.saturating_duration_since(now)),
            None => self.wait,
        };
        left.map_or(most, |left| left.min(most))
            .max(Duration::from_millis(1))
    }

    fn taken(&self, queue: &LockQueue) -> Error {
        Error::Timeout {
            backend: queue.backend(),
            name: queue.name().clone(),
            waited: self.started().elapsed(),
        }
    }

    /// The error for when the time is over: "taken" only if that was the server's last word.
    fn verdict(&self, queue: &LockQueue, last_reply: &LastReply) -> Error {
        let err = match last_reply {
            LastReply::Taken(_) => return self.taken(queue),
            LastReply::Failed(why) => {
                let cause = format!("no grant in time; the last attempt failed: {why}");
                Error::transient(queue.backend(), OPERATION, cause)
            }
            LastReply::Unknown => queue.core.no_answer(OPERATION),
        };
        err.for_lock(queue.name())
    }
}
