//! From the call to the grant, in the caller's own future: nothing is spawned, and dropping it is the cancellation.

use std::{sync::Arc, time::Duration};

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
    spi::{ClaimRequest, Grant, Mode},
};

/// How long beyond the caller's deadline an attempt may take to say why it was not granted, if nothing has been heard
/// from the server yet: without an answer, "taken" cannot be told from "cannot tell".
const GRACE: Duration = Duration::from_millis(100);

/// Acquires `line` on `terms`.
pub(crate) async fn acquire(line: &Arc<Line>, terms: Terms) -> Result<LockGuard> {
    let outcome = contend_for(line, terms).await;
    match &outcome {
        Ok(_) => {}
        Err(err) => crate::observe::not_granted(line, err),
    }
    outcome
}

async fn contend_for(line: &Arc<Line>, terms: Terms) -> Result<LockGuard> {
    if line.core.is_closed() {
        return Err(Error::Closed);
    }
    let clock = Clock::start(&terms);
    let entry = if terms.once() {
        if line.is_held_here() {
            return Err(clock.taken(line));
        }
        Entry::Contend(line.enter().unwrap_or_else(|| line.bypass()))
    } else {
        queue(line, &terms, &clock).await?
    };
    match entry {
        Entry::Held(guard) => Ok(guard),
        Entry::Contend(mut grip) => {
            grip.terms = Some(terms);
            contend(grip, &clock).await
        }
    }
}

/// How a caller gets past the local queue.
enum Entry {
    Contend(Grip),
    Held(LockGuard),
}

/// Waits in line for the slot, or for a hold that is passed on.
async fn queue(line: &Arc<Line>, terms: &Terms, clock: &Clock) -> Result<Entry> {
    loop {
        let in_line = match line.enter_or_join(terms) {
            Ok(grip) => return Ok(Entry::Contend(grip)),
            Err(in_line) => in_line,
        };
        timing::require_runtime(line.backend(), "acquire")?;
        let served = tokio::select! {
            biased;
            served = in_line => served,
            () = clock.deadline() => return Err(clock.verdict(line, &line.answer())),
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
async fn contend(mut grip: Grip, clock: &Clock) -> Result<LockGuard> {
    let line = grip.line.clone();
    let terms = grip.terms.clone().ok_or(Error::Closed)?;
    let mut heard = if grip.has_slot() {
        line.answer()
    } else {
        Answer::Unknown
    };
    let mut backoff = Backoff::default();
    let mut hints = HintBudget::default();
    loop {
        let taken = match step(&mut grip, &terms, clock, &heard).await {
            Ok(Some(grant)) => match take_up(grip, &terms, grant)? {
                Taken::Up(guard) => return Ok(guard),
                Taken::TooLate(returned) => {
                    grip = returned;
                    withdraw(&mut grip).await?;
                    false
                }
            },
            Ok(None) if terms.once() => {
                // An attempt without patience stays out of every queue: there is nothing to withdraw.
                grip.settled();
                return Err(clock.taken(&line));
            }
            Ok(None) => {
                backoff.reset();
                heard = Answer::Taken;
                true
            }
            Err(err) if err.is_transient() && !terms.once() => {
                crate::observe::attempt_failed(&line, &err);
                // An attempt that the caller's deadline cut short says nothing new.
                if !(clock.is_over() && matches!(heard, Answer::Taken)) {
                    heard = Answer::Failed(describe(&err).into());
                }
                false
            }
            Err(err) => return Err(give_up(grip, err).await),
        };
        if grip.has_slot() {
            line.set_answer(heard.clone());
        }
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
            () = clock.deadline() => return Err(give_up(grip, clock.verdict(&line, &heard)).await),
            () = tokio::time::sleep(pause) => hints.rested(),
        }
    }
}

/// One exchange with the server: opens the claim if there is none, then attempts.
async fn step(grip: &mut Grip, terms: &Terms, clock: &Clock, heard: &Answer) -> Result<Option<Grant>> {
    let line = grip.line.clone();
    let core = &line.core;
    let backend = line.backend();
    let patience = clock.patience(core.info.max_patience);
    let limit = |patience: Duration| {
        let limit = Instant::now() + patience + terms.op_timeout;
        let grace = if matches!(heard, Answer::Taken) {
            Duration::ZERO
        } else {
            GRACE
        };
        clock.at().map_or(limit, |deadline| limit.min(deadline + grace))
    };
    let no_answer = || {
        let cause = "no answer in time from the server";
        Error::transient(backend, "acquire", cause).for_lock(line.name())
    };
    if grip.claim.is_none() {
        let request = request(&line, terms)?;
        let opening = timing::within(backend, "acquire", core.backend.claim(&request), || {
            limit(Duration::ZERO)
        });
        let claim = unless_closed(core, opening).await?.ok_or_else(no_answer)?;
        grip.claim = Some(claim.map_err(|err| err.for_lock(line.name()))?);
    }
    let Some(claim) = &mut grip.claim else {
        return Err(Error::Closed);
    };
    grip.known = true;
    let attempt = timing::within(backend, "acquire", claim.attempt(patience), || limit(patience));
    let outcome = unless_closed(core, attempt).await?.ok_or_else(no_answer)?;
    outcome.map_err(|err| err.for_lock(line.name()))
}

/// A client that is closed waits for no server. The check costs nothing for a future that is ready at once.
async fn unless_closed<T>(core: &crate::client::Core, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        biased;
        done = work => done,
        err = closed(core) => Err(err),
    }
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
    /// Its lease was over when it arrived.
    TooLate(Grip),
}

fn take_up(mut grip: Grip, terms: &Terms, grant: Grant) -> Result<Taken> {
    let line = grip.line.clone();
    let now = Instant::now();
    let (first, last) = grant.tokens.into_inner();
    if first > last {
        return Err(
            Error::permanent(line.backend(), "acquire", "the grant has no token").for_lock(line.name()),
        );
    }
    if timing::valid_until(&grant.lease).is_some_and(|end| now >= end) {
        return Ok(Taken::TooLate(grip));
    }
    grip.spare = (first.saturating_add(1), last);
    grip.handoffs_left = terms.local_handoffs;
    grip.lease = Some(grant.lease);
    if line.is_exclusive() {
        if grip.has_slot() {
            line.set_slot_use(SlotUse::Holding);
        }
    } else {
        // Shared holders and permits have a claim each: the next waiter may go to the server.
        grip.pass_slot();
    }
    let hold = Hold::new(Phase::Held, grip, terms, first, &grant.lease);
    let guard = LockGuard::new(hold.clone());
    line.core.worker.register(&hold, now)?;
    crate::observe::granted(&line);
    Ok(Taken::Up(guard))
}

/// Gives up what a late grant may have left at the server; the same claim goes on contending.
async fn withdraw(grip: &mut Grip) -> Result<()> {
    let backend = grip.line.backend();
    let op_timeout = grip.terms.as_ref().map_or(GRACE, |terms| terms.op_timeout);
    if let Some(claim) = &mut grip.claim {
        let _ = timing::within(backend, "release", claim.release(), || {
            Instant::now() + op_timeout
        })
        .await?;
    }
    Ok(())
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
pub(crate) async fn release(hold: Arc<Hold>) -> Result<()> {
    match hold.cell.begin_release(Instant::now()) {
        Ok(grip) => settle::settle(hold, grip).await,
        Err(reason) => Err(hold.lost(reason)),
    }
}
