//! From the call to the grant, in the caller's own future: nothing is spawned, and dropping it is the cancellation.

use std::{
    sync::{Arc, OnceLock},
    task::Poll,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    Error, LockGuard, Result,
    driver::{
        cell::Phase,
        hold::Hold,
        line::{Answer, Grip, InLine, Line, Served, SlotUse, Terms, hinted},
        moment::Proof,
        settle,
        timing::{self, Backoff, HintBudget},
    },
    spi::{Claim, ClaimRequest, Grant, Mode, chain},
};

/// How long beyond the caller's deadline an attempt may take to say why it was not granted, if nothing has been heard
/// from the server yet: without an answer, "taken" cannot be told from "cannot tell".
pub(crate) const GRACE: Duration = Duration::from_millis(100);

/// Acquires a lock on `terms`.
pub(crate) async fn acquire(terms: &Arc<Terms>) -> Result<LockGuard> {
    let line = &terms.line;
    let outcome = contend_for(terms).await.map_err(|err| err.for_lock(line.name()));
    match &outcome {
        Ok(_) => {}
        Err(err) => crate::observe::not_granted(line, err),
    }
    outcome
}

async fn contend_for(terms: &Arc<Terms>) -> Result<LockGuard> {
    let line = &terms.line;
    line.core.serves("acquire")?;
    let clock = Clock::start(terms);
    let entered = if terms.once() {
        // Always the server's own word: a hold of this client may have been lost a moment ago.
        Ok(Line::enter(terms).unwrap_or_else(|| Line::bypass(terms)))
    } else {
        Line::enter_or_join(terms)
    };
    let (grip, now) = match entered {
        Ok(grip) => (grip, None),
        Err(in_line) => match queue(terms, &clock, in_line).await? {
            Entry::Contend(grip) => (grip, Some(line.core.clock.now().at)),
            Entry::Held(guard) => return Ok(guard),
        },
    };
    // Either this sees that the client is closed, or whoever closes it sees the grip.
    line.core.serves("acquire")?;
    contend(grip, &clock, now).await
}

/// How a caller gets past the local queue.
enum Entry {
    Contend(Grip),
    Held(LockGuard),
}

/// Waits in line for the slot, or for a hold that is passed on.
async fn queue<'a>(terms: &'a Arc<Terms>, clock: &Clock, mut in_line: InLine<'a>) -> Result<Entry> {
    let line = &terms.line;
    loop {
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
            Served::Closed => return Err(line.core.over("acquire").await),
        }
        in_line = match Line::enter_or_join(terms) {
            Ok(grip) => return Ok(Entry::Contend(grip)),
            Err(in_line) => in_line,
        };
    }
}

/// Takes a hold that was passed on, unless it was lost on the way.
fn accept(hold: Hold) -> Option<LockGuard> {
    hold.cell.accept(hold.now()).then(|| {
        crate::observe::handed_off(hold.line());
        LockGuard::new(hold)
    })
}

/// Goes to the server until it grants, the caller's time is over, or it says something that no repeating will change.
async fn contend(mut grip: Grip, clock: &Clock, now: Option<Instant>) -> Result<LockGuard> {
    match step(&mut grip, clock, now, &Answer::Unknown).await {
        Ok(Some(granted)) => hold(grip, granted),
        // What it takes to wait is made when there is need to wait.
        not_yet => Box::pin(keep_contending(grip, not_yet, clock)).await,
    }
}

async fn keep_contending(
    mut grip: Grip,
    mut last: Result<Option<Granted>>,
    clock: &Clock,
) -> Result<LockGuard> {
    let terms = grip.terms.clone();
    let line = &terms.line;
    let once = terms.once();
    let mut heard = Answer::Unknown;
    let mut backoff = Backoff::default();
    let mut hints = HintBudget::default();
    loop {
        let taken = match last {
            Ok(Some(granted)) => return hold(grip, granted),
            Ok(None) if once => {
                // An attempt without patience stays out of every queue: there is nothing to withdraw.
                grip.settled();
                return Err(clock.taken(line));
            }
            Ok(None) => {
                backoff.reset();
                heard = Answer::Taken;
                true
            }
            Err(err) if err.is_transient() && !once => {
                if matches!(heard, Answer::Unknown) && grip.has_slot() {
                    // Those before it in this client's queue may have heard more.
                    heard = line.answer();
                }
                let why: Arc<str> = chain(&err).into();
                let known = matches!(&heard, Answer::Failed(before) if *before == why);
                // An attempt that the caller's deadline cut short says nothing new, and there is no other.
                let over = clock.is_over();
                crate::observe::attempt_failed(line, &why, known || over);
                if !(over && matches!(heard, Answer::Taken)) {
                    heard = Answer::Failed(why);
                }
                false
            }
            Err(err) => return Err(give_up(grip, err).await),
        };
        if grip.has_slot() {
            line.set_answer(heard.clone());
        }
        timing::require_runtime(line.backend(), "acquire")?;
        let pause = if taken {
            hints.pause(line.core.info.fallback_poll)
        } else {
            backoff.next()
        };
        let listening = Instant::now();
        tokio::select! {
            biased;
            err = line.core.over("acquire") => return Err(give_up(grip, err).await),
            () = hinted(&mut grip.claim), if taken && hints.listens() => hints.hinted(listening.elapsed()),
            () = clock.deadline() => return Err(give_up(grip, clock.verdict(line, &heard)).await),
            () = tokio::time::sleep(pause) => hints.rested(),
        }
        let now = line.core.clock.now().at;
        last = step(&mut grip, clock, Some(now), &heard).await;
    }
}

/// What a grant's holder gets of it.
#[derive(Clone, Copy)]
struct Granted {
    token: u64,
    /// The moment when it was found to be good. Its lease may have begun long before.
    at: Instant,
}

/// One exchange with the server: opens the claim if there is none, then attempts. A grant's token comes back; the rest
/// of the grant is kept in the grip. Somebody has looked at the client's clock `now`, or when the caller's time began, so
/// that what was slept before the request is not taken off its lease.
async fn step(
    grip: &mut Grip,
    clock: &Clock,
    mut now: Option<Instant>,
    heard: &Answer,
) -> Result<Option<Granted>> {
    let Grip { terms, claim, .. } = grip;
    let line = &terms.line;
    let claim = match claim {
        Some(claim) => claim,
        unopened => unopened.insert(open(line, terms, clock, &mut now, heard).await?),
    };
    grip.known = true;
    let patience = clock.patience(line.core.info.max_patience, now);
    let limit = clock.limit(patience, terms, heard);
    let Some(grant) = exchange(line, claim.attempt(patience), limit).await? else {
        return Ok(None);
    };
    let proof = line.core.clock.proof(&grant.lease);
    let at = match check(line, &grant, &proof) {
        Ok(at) => at,
        Err(err) => return Box::pin(withdraw(grip, err)).await,
    };
    let token = *grant.tokens.start();
    grip.spare = grant.tokens;
    grip.spare.next();
    grip.most_handoffs = terms.local_handoffs;
    grip.lease = Some(proof);
    Ok(Some(Granted { token, at }))
}

/// The moment when a grant can be used, if it can.
fn check(line: &Line, grant: &Grant, proof: &Proof) -> Result<Instant> {
    let backend = line.backend();
    let now = line.core.clock.now();
    let err = if grant.tokens.is_empty() {
        Error::permanent(backend, "acquire", "the grant came without a fencing token")
    } else if proof.end().is_some_and(|end| now.has_reached(end)) {
        Error::transient(backend, "acquire", "the lease was over when the grant arrived")
    } else {
        return Ok(now.at);
    };
    Err(err.for_lock(line.name()))
}

/// Makes a hold of what has been granted.
fn hold(mut grip: Grip, granted: Granted) -> Result<LockGuard> {
    let terms = grip.terms.clone();
    let line = &terms.line;
    let lease = grip.lease.ok_or(Error::Closed)?;
    if !line.is_exclusive() {
        // Shared holders and permits have a claim each: the next waiter may go to the server.
        grip.pass_slot();
    } else if grip.has_slot() {
        line.set_slot_use(SlotUse::Holding);
    }
    // Fails if there is nothing for the client to live on: nobody would ever renew it.
    line.core.worker.begin("acquire")?;
    grip.becomes_hold();
    let hold = Hold::new(Phase::Held, terms, granted.token, grip, &lease);
    hold.terms.line.register(&hold, granted.at);
    if let Err(err) = hold.line().core.serves("acquire") {
        // It may have come too late to be lost with all the others.
        hold.abandon();
        return Err(err);
    }
    crate::observe::granted(hold.line());
    Ok(LockGuard::new(hold))
}

/// Opens a claim. If that takes a while, it is another `now` afterwards.
async fn open(
    line: &Line,
    terms: &Terms,
    clock: &Clock,
    now: &mut Option<Instant>,
    heard: &Answer,
) -> Result<Box<dyn Claim>> {
    let request = request(line, terms)?;
    let mut opening = line.core.backend.claim(&request);
    if let Poll::Ready(opened) = timing::poll_once(&mut opening).await {
        return opened.map_err(|err| err.for_lock(line.name()));
    }
    let limit = clock.limit(Duration::ZERO, terms, heard);
    let opened = exchange(line, opening, limit).await?;
    *now = Some(line.core.clock.now().at);
    Ok(opened)
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
            err = line.core.over("acquire") => Err(err),
            () = tokio::time::sleep_until(limit) => {
                Err(Error::transient(backend, "acquire", "no answer in time from the server"))
            }
        }
    };
    Box::pin(waiting).await.map_err(|err| err.for_lock(line.name()))
}

fn request(line: &Line, terms: &Terms) -> Result<ClaimRequest> {
    let owner = line.owner()?;
    let mut request = ClaimRequest::new(line.name().clone(), line.mode, terms.ttl, owner);
    request.label.clone_from(&terms.label);
    request.renews = terms.renew;
    if line.mode == Mode::Exclusive {
        request.tokens = request.tokens.saturating_add(terms.local_handoffs);
        request.locally_contended = line.was_waited_in();
    }
    Ok(request)
}

/// Gives up what a grant that cannot be used may have left at the server; the same claim may go on contending.
async fn withdraw(grip: &mut Grip, err: Error) -> Result<Option<Granted>> {
    if let Some(claim) = &mut grip.claim {
        let limit = || Instant::now() + grip.terms.op_timeout;
        // If this fails as well, the claim stays known to the server and is cleaned up in the end.
        let _ = grip
            .terms
            .line
            .core
            .within("release", claim.release(), limit)
            .await;
    }
    Err(err)
}

/// Withdraws the claim on the caller's time if that is quick, else in the background, and returns `err`.
async fn give_up(mut grip: Grip, err: Error) -> Error {
    let core = &grip.terms.line.core;
    if core.serves("acquire").is_err() {
        return err;
    }
    if let Some(claim) = &mut grip.claim {
        let limit = || Instant::now() + GRACE;
        let withdrawn = core.within("release", claim.release(), limit).await;
        if let Ok(Some(Ok(()))) = withdrawn {
            grip.settled();
            return err;
        }
    }
    err
}

/// The caller's time.
struct Clock {
    /// Read when something is first waited for: what is granted at once needs none.
    started: OnceLock<Instant>,
    wait: Option<Duration>,
}

impl Clock {
    fn start(terms: &Terms) -> Self {
        let looked = terms.line.core.clock.look();
        Self {
            started: looked.map_or_else(OnceLock::new, OnceLock::from),
            wait: terms.wait,
        }
    }

    fn started(&self) -> Instant {
        *self.started.get_or_init(Instant::now)
    }

    /// When the caller's time is over. A single attempt has no deadline: it is bounded by `op_timeout`.
    fn at(&self) -> Option<Instant> {
        let wait = self.wait.filter(|wait| !wait.is_zero())?;
        Some(self.started() + wait)
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

    /// How long an attempt may block at the server, from `now` on or from the beginning. Zero only for a single attempt.
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

    fn taken(&self, line: &Line) -> Error {
        Error::Timeout {
            backend: line.backend(),
            name: line.name().clone(),
            waited: self.started().elapsed(),
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
pub(crate) async fn release(hold: &Hold) -> Result<()> {
    let now = hold.now();
    match hold.cell.begin_release(now) {
        Ok(grip) => settle::settle(hold, grip, now).await,
        Err(reason) => {
            hold.give_up_what_is_lost();
            Err(hold.lost(reason))
        }
    }
}
