//! From the call to the grant, in the caller's own future: nothing is spawned, and dropping it is the cancellation.

use std::{sync::Arc, task::Poll, time::Duration};

use tokio::time::Instant;

use crate::{
    Error, LockGuard, Result,
    driver::{
        cell::Phase,
        hold::Hold,
        line::{Answer, Grip, Line, Served, SlotUse, Terms, closed, hinted},
        settle,
        timing::{self, Backoff, HintBudget},
    },
    spi::{Claim, ClaimRequest, Grant, Mode},
};

/// How long beyond the caller's deadline an attempt may take to say why it was not granted, if nothing has been heard
/// from the server yet: without an answer, "taken" cannot be told from "cannot tell".
const GRACE: Duration = Duration::from_millis(100);

/// Acquires `line` on `terms`.
pub(crate) async fn acquire(line: &Arc<Line>, terms: &Arc<Terms>) -> Result<LockGuard> {
    let outcome = contend_for(line, terms).await;
    match &outcome {
        Ok(_) => {}
        Err(err) => crate::observe::not_granted(line, err),
    }
    outcome
}

async fn contend_for(line: &Arc<Line>, terms: &Arc<Terms>) -> Result<LockGuard> {
    if line.core.is_closed() {
        return Err(Error::Closed);
    }
    let clock = Clock::start(terms);
    let entry = if terms.once() {
        if line.is_held_here() {
            return Err(clock.taken(line));
        }
        Entry::Contend(line.enter(terms).unwrap_or_else(|| line.bypass(terms)))
    } else {
        queue(line, terms, &clock).await?
    };
    match entry {
        Entry::Held(guard) => Ok(guard),
        Entry::Contend(grip) => contend(grip, line, terms, &clock).await,
    }
}

/// How a caller gets past the local queue.
enum Entry {
    Contend(Grip),
    Held(LockGuard),
}

/// Waits in line for the slot, or for a hold that is passed on.
async fn queue(line: &Arc<Line>, terms: &Arc<Terms>, clock: &Clock) -> Result<Entry> {
    loop {
        let in_line = match line.enter_or_join(terms) {
            Ok(grip) => return Ok(Entry::Contend(grip)),
            Err(in_line) => in_line,
        };
        timing::require_runtime(line.backend(), "acquire")?;
        let served = match clock.at() {
            None => in_line.await,
            Some(at) => match timing::within(line.backend(), "acquire", in_line, || at).await? {
                Some(served) => served,
                None => return Err(clock.verdict(line, &line.answer())),
            },
        };
        match served {
            Served::Slot(grip) => return Ok(Entry::Contend(grip)),
            Served::Hold(hold) => {
                if let Some(guard) = accept(hold) {
                    return Ok(Entry::Held(guard));
                }
            }
            Served::Lapsed => {}
            Served::Closed => return Err(Error::Closed),
        }
    }
}

/// Takes a hold that was passed on, unless it was lost on the way.
fn accept(hold: Arc<Hold>) -> Option<LockGuard> {
    hold.cell.accept(Instant::now()).then(|| LockGuard::new(hold))
}

/// Goes to the server until it grants, the caller's time is over, or it says something that no repeating will change.
async fn contend(grip: Grip, line: &Arc<Line>, terms: &Arc<Terms>, clock: &Clock) -> Result<LockGuard> {
    match step(grip, line, terms, clock, &Answer::Unknown).await {
        Step::Granted(guard) => Ok(guard),
        // What it takes to wait is made when there is need to wait.
        not_yet => Box::pin(keep_contending(not_yet, line, terms, clock)).await,
    }
}

/// What one exchange with the server came to.
enum Step {
    Granted(LockGuard),
    Taken(Grip),
    Failed(Grip, Error),
}

async fn keep_contending(
    mut last: Step,
    line: &Arc<Line>,
    terms: &Arc<Terms>,
    clock: &Clock,
) -> Result<LockGuard> {
    let mut heard = Answer::Unknown;
    let mut backoff = Backoff::default();
    let mut hints = HintBudget::default();
    loop {
        let (mut grip, taken) = match last {
            Step::Granted(guard) => return Ok(guard),
            Step::Taken(grip) if terms.once() => {
                // An attempt without patience stays out of every queue: there is nothing to withdraw.
                grip.settled();
                return Err(clock.taken(line));
            }
            Step::Taken(grip) => {
                backoff.reset();
                heard = Answer::Taken;
                (grip, true)
            }
            Step::Failed(grip, err) if err.is_transient() && !terms.once() => {
                crate::observe::attempt_failed(line, &err);
                if matches!(heard, Answer::Unknown) && grip.has_slot() {
                    // Those before it in this client's queue may have heard more.
                    heard = line.answer();
                }
                // An attempt that the caller's deadline cut short says nothing new.
                if !(clock.is_over() && matches!(heard, Answer::Taken)) {
                    heard = Answer::Failed(describe(&err).into());
                }
                (grip, false)
            }
            Step::Failed(grip, err) => return Err(give_up(grip, err).await),
        };
        if grip.has_slot() {
            line.set_answer(heard.clone());
        }
        timing::require_runtime(line.backend(), "acquire")?;
        let pause = if taken {
            timing::jittered(line.core.info.fallback_poll)
        } else {
            backoff.next()
        };
        let listening = Instant::now();
        tokio::select! {
            biased;
            err = closed(&line.core) => return Err(give_up(grip, err).await),
            () = hinted(&mut grip.claim), if taken && hints.listens() => hints.hinted(listening.elapsed()),
            () = clock.deadline() => return Err(give_up(grip, clock.verdict(line, &heard)).await),
            () = tokio::time::sleep(pause) => hints.rested(),
        }
        last = step(grip, line, terms, clock, &heard).await;
    }
}

/// One exchange with the server: opens the claim if there is none, then attempts.
async fn step(mut grip: Grip, line: &Arc<Line>, terms: &Arc<Terms>, clock: &Clock, heard: &Answer) -> Step {
    if grip.claim.is_none() {
        match open(line, terms, clock, heard).await {
            Ok(claim) => grip.claim = Some(claim),
            Err(err) => return Step::Failed(grip, err),
        }
    }
    let patience = clock.patience(line.core.info.max_patience);
    grip.known = true;
    let Some(claim) = &mut grip.claim else {
        return Step::Failed(grip, Error::Closed);
    };
    let limit = clock.limit(patience, terms, heard);
    match exchange(line, claim.attempt(patience), limit).await {
        Ok(Some(grant)) => match take_up(grip, line, terms, &grant) {
            Taken::Up(guard) => Step::Granted(guard),
            Taken::Not(grip, err) => Box::pin(withdraw(grip, err)).await,
        },
        Ok(None) => Step::Taken(grip),
        Err(err) => Step::Failed(grip, err),
    }
}

async fn open(line: &Line, terms: &Terms, clock: &Clock, heard: &Answer) -> Result<Box<dyn Claim>> {
    let request = request(line, terms)?;
    let limit = clock.limit(Duration::ZERO, terms, heard);
    exchange(line, line.core.backend.claim(&request), limit).await
}

/// One exchange, until `limit` and for as long as the client is open.
async fn exchange<T>(
    line: &Line,
    mut exchange: impl Future<Output = Result<T>> + Unpin,
    limit: impl FnOnce() -> Instant,
) -> Result<T> {
    let backend = line.backend();
    if let Poll::Ready(done) = timing::poll_once(&mut exchange).await {
        return done.map_err(|err| err.for_lock(line.name()));
    }
    timing::require_runtime(backend, "acquire")?;
    let limit = limit();
    let waiting = async {
        tokio::select! {
            biased;
            done = exchange => done,
            err = closed(&line.core) => Err(err),
            () = tokio::time::sleep_until(limit) => {
                Err(Error::transient(backend, "acquire", "no answer in time from the server"))
            }
        }
    };
    Box::pin(waiting).await.map_err(|err| err.for_lock(line.name()))
}

fn request(line: &Line, terms: &Terms) -> Result<ClaimRequest> {
    let owner = line.core.owners.draw(line.backend())?;
    let mut request = ClaimRequest::new(line.name().clone(), line.mode, terms.ttl, owner);
    request.label.clone_from(&terms.label);
    if line.mode == Mode::Exclusive {
        request.tokens = request.tokens.saturating_add(terms.local_handoffs);
    }
    Ok(request)
}

/// What a grant becomes.
enum Taken {
    Up(LockGuard),
    Not(Grip, Error),
}

fn take_up(mut grip: Grip, line: &Arc<Line>, terms: &Arc<Terms>, grant: &Grant) -> Taken {
    let now = Instant::now();
    let failed = |grip: Grip, cause: &'static str, transient: bool| {
        let backend = line.backend();
        let err = if transient {
            Error::transient(backend, "acquire", cause)
        } else {
            Error::permanent(backend, "acquire", cause)
        };
        let err = err.for_lock(line.name());
        Taken::Not(grip, err)
    };
    let (first, last) = (*grant.tokens.start(), *grant.tokens.end());
    if first > last {
        return failed(grip, "the grant came without a fencing token", false);
    }
    if timing::valid_until(&grant.lease).is_some_and(|end| now >= end) {
        return failed(grip, "the lease was over when the grant arrived", true);
    }
    grip.spare = (first.saturating_add(1), last);
    grip.handoffs_left = terms.local_handoffs;
    grip.lease = Some(grant.lease);
    if !line.is_exclusive() {
        // Shared holders and permits have a claim each: the next waiter may go to the server.
        grip.pass_slot();
    } else if grip.has_slot() {
        line.set_slot_use(SlotUse::Holding);
    }
    let hold = Hold::new(Phase::Held, grip, terms.clone(), first, &grant.lease);
    if let Err(err) = line.core.worker.register(&hold, &grant.lease, now) {
        // The runtime that the client lives on is gone: nobody would ever renew this.
        return match hold.cell.begin_release(now) {
            Ok(Some(grip)) => Taken::Not(grip, err),
            _ => failed(line.bypass(terms), "the client's runtime is gone", false),
        };
    }
    crate::observe::granted(line);
    Taken::Up(LockGuard::new(hold))
}

/// Gives up what a grant that cannot be used may have left at the server; the same claim may go on contending.
async fn withdraw(mut grip: Grip, err: Error) -> Step {
    let (backend, op_timeout) = (grip.line.backend(), grip.terms.op_timeout);
    if let Some(claim) = &mut grip.claim {
        // If this fails as well, the claim stays known to the server and is cleaned up in the end.
        let _ = timing::within(backend, "release", claim.release(), || {
            Instant::now() + op_timeout
        })
        .await;
    }
    Step::Failed(grip, err)
}

/// Withdraws the claim on the caller's time if that is quick, else in the background, and returns `err`.
async fn give_up(mut grip: Grip, err: Error) -> Error {
    if grip.claim.is_none() || matches!(err, Error::Closed) {
        return err;
    }
    if let Some(claim) = &mut grip.claim {
        let backend = grip.line.backend();
        let withdrawn = timing::within(backend, "release", claim.release(), || Instant::now() + GRACE).await;
        if let Ok(Some(Ok(()))) = withdrawn {
            grip.settled();
            return err;
        }
    }
    err
}

fn describe(err: &Error) -> String {
    let mut text = err.to_string();
    let mut cause = std::error::Error::source(err);
    while let Some(err) = cause {
        text.push_str(": ");
        text.push_str(&err.to_string());
        cause = err.source();
    }
    text
}

/// The caller's time.
struct Clock {
    started: Option<Instant>,
    wait: Option<Duration>,
}

impl Clock {
    fn start(terms: &Terms) -> Self {
        Self {
            started: terms.wait.map(|_| Instant::now()),
            wait: terms.wait,
        }
    }

    /// When the caller's time is over. A single attempt has no deadline: it is bounded by `op_timeout`.
    fn at(&self) -> Option<Instant> {
        match (self.started, self.wait) {
            (Some(started), Some(wait)) if !wait.is_zero() => Some(started + wait),
            _ => None,
        }
    }

    fn is_over(&self) -> bool {
        self.at().is_some_and(|at| Instant::now() >= at)
    }

    /// Until when an exchange may take.
    fn limit(&self, patience: Duration, terms: &Terms, heard: &Answer) -> impl FnOnce() -> Instant + use<> {
        let op_timeout = terms.op_timeout;
        let grace = if matches!(heard, Answer::Taken) {
            Duration::ZERO
        } else {
            GRACE
        };
        let deadline = self.at();
        move || {
            let limit = Instant::now() + patience + op_timeout;
            deadline.map_or(limit, |deadline| limit.min(deadline + grace))
        }
    }

    async fn deadline(&self) {
        match self.at() {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// How long an attempt may block at the server. Zero only for a single attempt.
    fn patience(&self, most: Duration) -> Duration {
        if self.wait == Some(Duration::ZERO) {
            return Duration::ZERO;
        }
        let left = self
            .at()
            .map_or(most, |at| at.saturating_duration_since(Instant::now()));
        left.min(most).max(Duration::from_millis(1))
    }

    fn taken(&self, line: &Line) -> Error {
        Error::Timeout {
            backend: line.backend(),
            name: line.name().clone(),
            waited: self.started.map_or(Duration::ZERO, |started| started.elapsed()),
        }
    }

    /// What to say when the time is over: "taken" only if that was the server's last word.
    fn verdict(&self, line: &Line, heard: &Answer) -> Error {
        let cause: crate::BoxError = match heard {
            Answer::Taken => return self.taken(line),
            Answer::Failed(why) => format!("no grant in time; the last attempt failed: {why}").into(),
            Answer::Unknown => "no answer in time from the server".into(),
        };
        Error::transient(line.backend(), "acquire", cause).for_lock(line.name())
    }
}

/// Settles a hold that its guard gives up on the caller's time.
pub(crate) async fn release(hold: &Arc<Hold>) -> Result<()> {
    let now = Instant::now();
    match hold.cell.begin_release(now) {
        Ok(grip) => settle::settle(hold, grip, now).await,
        Err(reason) => Err(hold.lost(reason)),
    }
}
