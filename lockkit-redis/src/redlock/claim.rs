//! One contender for one lock.

use std::{fmt, ops::RangeInclusive, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, LossReason, Result,
    spi::{Claim, ClaimRequest, Grant, Lease, Mode, Renewal},
};
use redis::Value;
use tokio::time::Instant;

use crate::{
    error::unexpected,
    layout::{self, Record},
    redlock::{
        NAME,
        masters::{Answer, Failures, Kind, Masters, Requests, micros, require_runtime},
        quorum::{
            Attempt, AttemptConfig, Beginning, Confirmation, Defeat, LAST_TOKEN, Outcome, QuorumCount,
            Report, Step, Vote,
        },
    },
    script::{self, Call},
    wakeup::Wakeup,
};

/// The time for which an attempt that does not wait retries while its tokens are outrun.
const LONGEST_TRY: Duration = Duration::from_secs(2);

pub(crate) struct RedlockClaim {
    masters: Arc<Masters>,
    request: ClaimRequest,
    key: Vec<u8>,
    record: Record,
    /// What it says at the masters, as far as is known.
    value: String,
    /// Where hints for it arrive, from when it first may get one.
    place: Option<Arc<Wakeup>>,
    /// From when it asks, in µs of this machine's clock.
    arrival: u64,
    /// It may be listed as waiting.
    listed: bool,
    /// How many rounds in a row ended with the masters divided.
    divided: u32,
    /// The beginning of the attempt before, if others were ahead until its end: the next one is as far ahead as both.
    outrun_since: Option<Beginning>,
    /// What it holds with.
    tokens: Option<RangeInclusive<u64>>,
    /// Until when it was last known to hold.
    until: Option<Instant>,
    /// What masters have yet to say that were not waited for, or are being repaired.
    late: Option<Requests>,
    /// Some master lacks the hold, or may, that can soon be repaired.
    is_short: bool,
    /// How often it has asked early for that since.
    repairs: u32,
}

impl RedlockClaim {
    pub(super) fn new(masters: Arc<Masters>, request: &ClaimRequest) -> Self {
        let record = Record::new(request, &masters.inbox.client);
        Self {
            key: layout::key(&masters.namespace, &request.name, request.mode.kind()),
            value: record.with_token(0),
            record,
            request: request.clone(),
            masters,
            place: None,
            arrival: 0,
            listed: false,
            divided: 0,
            outrun_since: None,
            tokens: None,
            until: None,
            late: None,
            is_short: false,
            repairs: 0,
        }
    }

    fn place(&mut self) -> &Arc<Wakeup> {
        let Self {
            masters,
            request,
            place,
            ..
        } = self;
        place.get_or_insert_with(|| masters.inbox.wakeups.add(request.owner))
    }

    fn ttl_ms(&self) -> u64 {
        u64::try_from(self.request.ttl.as_millis()).unwrap_or(u64::MAX)
    }

    fn mode(&self) -> &'static str {
        if self.request.mode == Mode::Exclusive {
            "x"
        } else {
            "s"
        }
    }

    fn lease(&self, since: Instant) -> Lease {
        Lease {
            since,
            length: Some(self.masters.rules.lease(Duration::from_millis(self.ttl_ms()))),
        }
    }

    fn vote(&self, marker: &str, tokens: &RangeInclusive<u64>, waits: &str) -> Call {
        let mut call = script::REDLOCK_VOTE.call(&self.key);
        call.arg(marker)
            .arg(&self.value)
            .arg(self.ttl_ms())
            .arg(*tokens.start())
            .arg(*tokens.end())
            .arg(self.mode())
            .arg(self.arrival)
            .arg(waits);
        call
    }

    fn renewal(&self, marker: &str, tokens: &RangeInclusive<u64>) -> Call {
        let mut call = script::REDLOCK_RENEW.call(&self.key);
        call.arg(marker)
            .arg(&self.value)
            .arg(self.ttl_ms())
            .arg(*tokens.start())
            .arg(*tokens.end())
            .arg(self.mode());
        call
    }

    fn confirmation(&self, marker: &str, value: &str, tokens: &RangeInclusive<u64>) -> Call {
        let mut call = script::REDLOCK_CONFIRM.call(&self.key);
        call.arg(marker)
            .arg(&self.value)
            .arg(value)
            .arg(*tokens.start())
            .arg(*tokens.end())
            .arg(self.mode());
        call
    }

    fn withdrawal(&self, how: &str) -> Call {
        let mut call = script::REDLOCK_RELEASE.call(&self.key);
        call.arg(&self.value).arg(how);
        call
    }

    /// Proposes the attempt's tokens to every master: a new round.
    fn propose(&mut self, attempt: &Attempt, waits: &str) -> (Requests, RoundReplies) {
        let tokens = attempt.tokens();
        self.value = self.record.with_token(*tokens.start());
        self.masters.saw(attempt.seen());
        let mut requests = Requests::new(&self.masters, "acquire");
        requests.ask_all(Kind::Vote, |marker| self.vote(marker, tokens, waits));
        (requests, RoundReplies::new(self.masters.all.len()))
    }

    /// Does what `attempt` says until that is decided. Returns the last round.
    async fn run(
        &mut self,
        attempt: &mut Attempt,
        waits: &str,
    ) -> (Result<RangeInclusive<u64>, Defeat>, Requests, RoundReplies) {
        let masters = self.masters.clone();
        let (mut requests, mut replies) = self.propose(attempt, waits);
        let mut confirmed = self.value.clone();
        let outcome = loop {
            let step = match requests.next(masters.at(attempt.deadline())).await {
                None => attempt.tick(masters.now().max(attempt.deadline())),
                Some(answer) => replies.add(&masters, attempt, answer),
            };
            if step == Step::Wait {
                continue;
            }
            masters.saw(attempt.seen());
            match step {
                Step::Wait => {}
                Step::Confirm(tokens, holding) => {
                    confirmed = self.record.with_token(*tokens.start());
                    for master in holding {
                        requests.ask(master, Kind::Confirmation, |marker| {
                            self.confirmation(marker, &confirmed, &tokens)
                        });
                    }
                }
                Step::Retry => {
                    attempt.retry(masters.now(), masters.highest());
                    (requests, replies) = self.propose(attempt, waits);
                    confirmed.clone_from(&self.value);
                }
                Step::Won(tokens) => break Ok(tokens),
                Step::Lost(defeat) => break Err(defeat),
            }
        };
        // The masters have this value by now, unless too few of them confirmed it.
        self.value = confirmed;
        (outcome, requests, replies)
    }

    fn won(&mut self, attempt: &Attempt, tokens: RangeInclusive<u64>, requests: Requests) -> Grant {
        let lease = self.lease(self.masters.at(attempt.since()));
        self.until = lease.end();
        self.tokens = Some(tokens.clone());
        self.listed = false;
        self.divided = 0;
        if let Some(place) = &self.place {
            place.stop();
        }
        self.late = Some(requests);
        self.repairs = 0;
        self.is_short = attempt.is_short();
        if self.is_short {
            self.repair_soon();
        }
        Grant { tokens, lease }
    }

    /// Gives the lock back at `masters`. It does not wait for replies, since a master handles requests in their order.
    async fn give_back(&mut self, masters: impl IntoIterator<Item = usize>) {
        let mut requests = Requests::new(&self.masters, "release");
        for master in masters {
            requests.ask(master, Kind::Report, |_| self.withdrawal("yield"));
        }
        requests.hand_over().await;
    }

    /// Has the hold renewed before that is due, since masters that lack it are repaired with that: at once at first, as
    /// those who lost to it give way, and then later and later.
    fn repair_soon(&mut self) {
        const PAUSE: Duration = Duration::from_millis(5);

        self.is_short = true;
        let after = match self.repairs {
            0 => Duration::ZERO,
            n => PAUSE * (1 << n.min(16)),
        };
        // By then it is due.
        if after < self.request.ttl / 3 {
            self.place().ask_in(after);
        }
    }

    /// How long to wait before it asks again although nothing woke it.
    fn asks_again_in(&mut self, left: Option<Duration>, is_divided: bool, is_foreign: bool) -> Duration {
        /// Foreign clients wake nobody.
        const FOREIGN: Duration = Duration::from_millis(50);
        /// Whoever draws the shortest finds the masters undivided.
        const DIVIDED: Duration = Duration::from_millis(20);
        /// Those who wait are not to ask all at once when a lease runs out.
        const SPREAD: Duration = Duration::from_millis(50);
        const LONGEST: Duration = Duration::from_secs(60);

        if is_foreign {
            return FOREIGN.mul_f64(1.0 + fastrand::f64());
        }
        if is_divided {
            self.divided = (self.divided + 1).min(4);
            return DIVIDED.mul_f64(fastrand::f64() * f64::from(1_u32 << self.divided));
        }
        self.divided = 0;
        left.unwrap_or(LONGEST) + SPREAD.mul_f64(fastrand::f64())
    }

    fn loss(&self) -> LossReason {
        if self.until.is_some_and(|until| until > Instant::now()) {
            LossReason::Revoked
        } else {
            LossReason::Expired
        }
    }
}

/// The masters' replies in a round, as far as they matter for errors and for when to ask again.
struct RoundReplies {
    answered: Vec<bool>,
    failures: Failures,
    /// Who has it, at how many masters.
    holders: Vec<(Vec<u8>, usize)>,
    is_foreign: bool,
}

impl RoundReplies {
    fn new(masters: usize) -> Self {
        Self {
            answered: vec![false; masters],
            failures: Failures::default(),
            holders: Vec::new(),
            is_foreign: false,
        }
    }

    fn add(&mut self, masters: &Masters, attempt: &mut Attempt, answer: Answer) -> Step {
        let now = masters.now();
        let Answer { master, kind, reply } = answer;
        match kind {
            Kind::Vote => attempt.voted(now, master, self.vote(masters, master, reply)),
            _ => attempt.confirmed(now, master, self.confirmation(master, reply)),
        }
    }

    fn vote(&mut self, masters: &Masters, master: usize, reply: Result<Value>) -> Vote {
        match reply {
            Ok(Value::Int(1)) => {
                self.answered[master] = true;
                Vote::Granted
            }
            Ok(Value::Int(0)) => {
                self.answered[master] = true;
                masters.guard.abstained(master);
                self.failures.say(master, masters.guard.why_no_vote(master));
                Vote::Abstains
            }
            Ok(Value::BulkString(fence)) => {
                self.answered[master] = true;
                match number(&fence) {
                    Some(fence) => Vote::Behind(fence),
                    None => self.silent(master, &unexpected("acquire", &Value::BulkString(fence))),
                }
            }
            Ok(Value::Array(parts)) => match &*parts {
                [Value::Int(left), Value::BulkString(who)] => {
                    self.answered[master] = true;
                    self.is_foreign |= who == b"foreign";
                    match self.holders.iter_mut().find(|(holder, _)| holder == who) {
                        Some((_, masters)) => *masters += 1,
                        None => self.holders.push((who.clone(), 1)),
                    }
                    Vote::Taken(u64::try_from(*left).ok().map(Duration::from_millis))
                }
                _ => self.silent(master, &unexpected("acquire", &Value::Array(parts))),
            },
            Ok(other) => self.silent(master, &unexpected("acquire", &other)),
            Err(err) => self.silent(master, &err),
        }
    }

    fn silent(&mut self, master: usize, err: &Error) -> Vote {
        self.failures.note(master, err);
        Vote::Silent
    }

    fn confirmation(&mut self, master: usize, reply: Result<Value>) -> Confirmation {
        match reply {
            Ok(Value::Int(1)) => Confirmation::Raised,
            Ok(Value::BulkString(fence)) => Confirmation::Refused(number(&fence).unwrap_or_default()),
            Ok(other) => {
                self.failures.note(master, &unexpected("acquire", &other));
                Confirmation::Silent
            }
            Err(err) => {
                self.failures.note(master, &err);
                Confirmation::Silent
            }
        }
    }

    /// Returns whether nobody is known to have a majority.
    fn is_divided(&self, quorum: usize) -> bool {
        self.holders.iter().all(|(_, masters)| *masters < quorum)
    }

    /// Returns why each master that took no part did not.
    fn failures(&mut self, masters: &Masters, attempt: &Attempt) -> Failures {
        let mut failures = std::mem::take(&mut self.failures);
        if masters.now() >= attempt.deadline() {
            failures.late(&self.answered, masters.rules.patience);
        }
        failures.left_out(attempt.left_out());
        failures
    }
}

fn no_tokens_left() -> Error {
    let reason = format!(
        "the counters of this lock's fencing tokens are about to pass {LAST_TOKEN}, the last there is, which nobody can have \
         reached: set them right"
    );
    Error::permanent(NAME, "acquire", reason)
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[async_trait]
impl Claim for RedlockClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        require_runtime("acquire")?;
        self.late = None;
        if self.arrival == 0 {
            self.arrival = micros();
        }
        let waits = match (patience.is_zero(), self.listed) {
            (true, _) => "try",
            (false, false) => "wait",
            (false, true) => "again",
        };
        // Also for one that does not wait: what it wins may be ended before anybody looks after it.
        let place = self.place();
        if !patience.is_zero() {
            place.begin();
            place.listen();
            self.listed = true;
        }
        let masters = self.masters.clone();
        let now = masters.now();
        // If the driver cut the attempt short, it would not know that the masters had replied.
        let longest = match patience {
            Duration::ZERO => LONGEST_TRY,
            _ => patience / 2,
        };
        let config = AttemptConfig {
            rules: masters.rules,
            began: self
                .outrun_since
                .take()
                .unwrap_or_else(|| Beginning::new(now, micros())),
            ttl: Duration::from_millis(self.ttl_ms()),
            tokens: self.request.tokens.get().into(),
            retry_until: now + longest,
        };
        let mut attempt = Attempt::begin(config, now, masters.highest());
        let (outcome, mut requests, mut replies) = self.run(&mut attempt, waits).await;
        let defeat = match outcome {
            Ok(tokens) => return Ok(Some(self.won(&attempt, tokens, requests))),
            Err(defeat) => defeat,
        };
        // A master that has reported another holder by now has nothing to give back.
        while let Some(answer) = requests.at_hand().await {
            if answer.kind == Kind::Vote {
                replies.add(&masters, &mut attempt, answer);
            }
        }
        drop(requests);
        let failures = replies.failures(&masters, &attempt);
        self.give_back(attempt.may_hold()).await;
        let left = match defeat {
            Defeat::Taken(left) => left,
            Defeat::Outrun => {
                self.outrun_since = Some(attempt.began());
                None
            }
            Defeat::TooLate => {
                let reason = "the lease was over when a majority of the masters had granted it";
                return Err(Error::transient(NAME, "acquire", reason));
            }
            Defeat::OutOfTokens => return Err(no_tokens_left()),
            Defeat::Undecided { .. } => return Err(masters.undecided("acquire", &failures)),
        };
        if !patience.is_zero() {
            let is_foreign = replies.is_foreign && defeat != Defeat::Outrun;
            let after = self.asks_again_in(left, replies.is_divided(masters.rules.quorum), is_foreign);
            self.place().ask_in(after);
        }
        Ok(None)
    }

    async fn renew(&mut self) -> Result<Renewal> {
        require_runtime("renew")?;
        if let Some(place) = &self.place {
            place.begin();
        }
        let Some(tokens) = self.tokens.clone() else {
            return Ok(Renewal::Lost(self.loss()));
        };
        // If this one does not come to an end, there is to be another.
        if self.late.take().is_some() || self.is_short {
            self.repair_soon();
            self.repairs = self.repairs.saturating_add(1);
        }
        let masters = self.masters.clone();
        let since = Instant::now();
        let mut count = QuorumCount::of_renewal(masters.rules, masters.since_origin(since));
        let mut requests = Requests::new(&masters, "renew");
        requests.ask_all(Kind::Report, |marker| self.renewal(marker, &tokens));
        // The others are heard for as long as the lease can do without the answer.
        let enough = since + self.request.ttl / 6;
        let (outcome, failures) = tally(&masters, &mut requests, &mut count, "renew", Some(enough)).await;
        match outcome {
            Outcome::Held { repair, taken } => {
                let lease = self.lease(since);
                self.until = lease.end();
                if let Some(place) = &self.place {
                    place.stop();
                }
                self.is_short = false;
                if taken {
                    self.repair_soon();
                } else if repair.is_empty() {
                    self.repairs = 0;
                }
                if self.until.is_some_and(|until| Instant::now() < until) {
                    // The counter may stand between the first and the last by now: it is to reach the last all the same.
                    let last = *tokens.end()..=*tokens.end();
                    for master in repair {
                        requests.ask(master, Kind::Vote, |marker| self.vote(marker, &last, "repair"));
                    }
                    requests.hand_over().await;
                }
                self.late = Some(requests);
                Ok(Renewal::Held(lease))
            }
            Outcome::Lost => Ok(Renewal::Lost(self.loss())),
            _ => Err(masters.undecided("renew", &failures)),
        }
    }

    async fn release(&mut self) -> Result<()> {
        require_runtime("release")?;
        self.late = None;
        self.is_short = false;
        let masters = self.masters.clone();
        let mut count = QuorumCount::of_release(masters.rules, masters.now());
        let mut requests = Requests::new(&masters, "release");
        requests.ask_all(Kind::Report, |_| self.withdrawal("end"));
        let (outcome, failures) = tally(&masters, &mut requests, &mut count, "release", None).await;
        drop(requests);
        let held = match outcome {
            Outcome::Held { .. } => true,
            Outcome::Lost => false,
            _ => return Err(masters.undecided("release", &failures)),
        };
        self.listed = false;
        let loss = self.loss();
        let was_held = self.tokens.take().is_some();
        self.until = None;
        if was_held && !held {
            return Err(Error::lost(NAME, self.request.name.clone(), loss));
        }
        Ok(())
    }

    async fn notified(&mut self) {
        let place = self.place().clone();
        loop {
            let Some(late) = &mut self.late else {
                return place.notified().await;
            };
            tokio::select! {
                biased;
                () = place.notified() => return,
                answer = late.late() => match answer {
                    Some(answer) if lacks(&answer) => self.repair_soon(),
                    Some(_) => {}
                    None => self.late = None,
                }
            }
        }
    }
}

/// A master that was not waited for says that somebody else has what is held, or that nobody has. One without a vote is
/// repaired when it has one.
fn lacks(answer: &Answer) -> bool {
    matches!(
        (answer.kind, &answer.reply),
        (Kind::Vote, Ok(Value::Array(_)))
            | (Kind::Confirmation, Ok(Value::BulkString(_)))
            | (Kind::Report, Ok(Value::Int(0 | 2)))
    )
}

/// Hears what the masters have to report until that decides, or time is over: at `enough` if a majority has it.
pub(super) async fn tally(
    masters: &Masters,
    requests: &mut Requests,
    count: &mut QuorumCount,
    operation: &'static str,
    enough: Option<Instant>,
) -> (Outcome, Failures) {
    let mut answered = vec![false; masters.all.len()];
    let mut failures = Failures::default();
    let mut held = 0;
    loop {
        let deadline = masters.at(count.deadline());
        let enough = enough.filter(|_| held >= masters.rules.quorum);
        let deadline = enough.map_or(deadline, |enough| deadline.min(enough));
        let outcome = match requests.next(deadline).await {
            None => count.tick(count.deadline()),
            Some(Answer { master, reply, .. }) => {
                let report = match reply {
                    Ok(Value::Int(1)) => Report::Held,
                    Ok(Value::Int(0)) => Report::Free,
                    Ok(Value::Int(2)) => Report::Other,
                    Ok(Value::Int(3)) => {
                        masters.guard.abstained(master);
                        Report::Abstains
                    }
                    Ok(other) => {
                        failures.note(master, &unexpected(operation, &other));
                        Report::Silent
                    }
                    Err(err) => {
                        failures.note(master, &err);
                        Report::Silent
                    }
                };
                answered[master] = report != Report::Silent;
                held += usize::from(report == Report::Held);
                count.reported(master, report)
            }
        };
        if outcome != Outcome::Wait {
            if masters.at(count.deadline()) <= Instant::now() {
                failures.late(&answered, masters.rules.patience);
            }
            return (outcome, failures);
        }
    }
}

impl Drop for RedlockClaim {
    fn drop(&mut self) {
        if self.place.is_some() {
            self.masters.inbox.wakeups.remove(self.request.owner);
        }
    }
}

impl fmt::Debug for RedlockClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedlockClaim")
            .field("name", &self.request.name)
            .field("mode", &self.request.mode)
            .finish_non_exhaustive()
    }
}
