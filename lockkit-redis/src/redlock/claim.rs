//! `spi::Claim` on a majority of masters: one contender for one lock.

use std::{fmt, ops::RangeInclusive, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, FencingToken, LossReason, Result,
    spi::{Claim, ClaimRequest, Grant, Lease, Mode, OwnerId, Renewal, require_runtime},
};
use redis::Value;
use tokio::time::Instant;

use crate::{
    layout::{self, Record},
    redlock::{
        NAME,
        backend::check_ttl,
        masters::{
            Failures, Masters, Place, RELEASE_PATIENCE, Replies, RequestKind, Requests, Response,
            wall_clock_micros,
        },
        quorum::{
            Attempt, AttemptConfig, Beginning, Confirmation, Defeat, LAST_TOKEN, Outcome, QuorumCount,
            Report, Rules, Step, Vote,
        },
    },
    script::{self, Call},
    wakeup::Wakeup,
};

/// The time for which an attempt that does not wait retries while its tokens are outrun, or nobody gets a majority.
const LONGEST_TRY: Duration = Duration::from_secs(2);

pub(crate) struct RedlockClaim {
    masters: Arc<Masters>,
    /// The longest ttl that these masters can keep.
    max_ttl: Duration,
    request: ClaimRequest,
    key: Vec<u8>,
    record: Record,
    /// The lock's value at the masters, as far as is known.
    value: String,
    /// Receives wake-ups, once there may be one.
    place: Option<Arc<Wakeup>>,
    /// The time of its first request, in µs of this machine's clock. 0 before.
    waiting_since: u64,
    /// The masters may list it as a waiter.
    may_be_listed: bool,
    /// The number of rounds in a row that left the masters divided.
    divided_rounds: u32,
    /// The beginning of the attempt before, if that was outrun to its end. The next one is as far ahead of the clock as both.
    outrun_since: Option<Beginning>,
    /// The tokens that it holds with.
    tokens: Option<RangeInclusive<u64>>,
    /// The end of its last proven lease.
    until: Option<Instant>,
    /// Requests of the last win or renewal whose replies were not awaited, repairs among them.
    late: Option<Requests>,
    /// Some master lacks the hold, or may, and can soon be repaired.
    lacks_masters: bool,
    /// The number of early renewals since the last win or complete renewal.
    early_renewals: u32,
    /// The shortest ttl that its hold has asked for.
    shortest_ttl: Duration,
}

impl RedlockClaim {
    pub(super) fn new(masters: Arc<Masters>, request: &ClaimRequest, max_ttl: Duration) -> Result<Self> {
        let record = Record::new(request, &masters.inbox.client);
        Ok(Self {
            key: layout::key(&masters.namespace, &request.name, request.mode.kind())?,
            value: record.with_token(0),
            record,
            request: request.clone(),
            masters,
            max_ttl,
            place: None,
            waiting_since: 0,
            may_be_listed: false,
            divided_rounds: 0,
            outrun_since: None,
            tokens: None,
            until: None,
            late: None,
            lacks_masters: false,
            early_renewals: 0,
            shortest_ttl: request.ttl,
        })
    }

    fn place(&mut self) -> &Arc<Wakeup> {
        let Self {
            masters,
            request,
            key,
            place,
            ..
        } = self;
        place.get_or_insert_with(|| masters.inbox.wakeups.add(request.owner, key))
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

    /// Returns the lease that a majority proves for a request sent at `since`. One that may come late may shorten it.
    fn lease(&self, since: Instant) -> Lease {
        let mut ttl = Duration::from_millis(self.ttl_ms());
        if self.masters.may_have_late_requests() {
            ttl = ttl.min(self.shortest_ttl);
        }
        let length = self.masters.rules.lease(ttl);
        Lease::new(since, Some(length))
    }

    fn vote(&self, marker: &str, tokens: &RangeInclusive<u64>, waits: &str) -> Call {
        let mut call = script::REDLOCK_VOTE.call(&self.key);
        call.arg(marker)
            .arg(&self.value)
            .arg(self.ttl_ms())
            .arg(*tokens.start())
            .arg(*tokens.end())
            .arg(self.mode())
            .arg(self.waiting_since)
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

    fn adoption(&self, marker: &str, from: OwnerId, token: FencingToken) -> Call {
        let mut call = script::REDLOCK_ADOPT.call(&self.key);
        call.arg(marker)
            .arg(&self.value)
            .arg(token.get())
            .arg(from.to_string())
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

    /// Begins a round: proposes the attempt's tokens to every master.
    fn propose(&mut self, attempt: &Attempt, waits: &str) -> (Requests, RoundReplies) {
        let tokens = attempt.tokens();
        self.value = self.record.with_token(*tokens.start());
        self.masters.saw(attempt.seen());
        let mut requests = Requests::new(&self.masters, "acquire");
        requests.ask_all(RequestKind::Vote, |marker| self.vote(marker, tokens, waits));
        (requests, RoundReplies::new(&self.masters))
    }

    /// Does what `attempt` says until it is decided. Returns the last round's requests and replies as well.
    async fn run<'a>(
        &mut self,
        masters: &'a Arc<Masters>,
        mut place: Place<'a>,
        attempt: &mut Attempt,
        waits: &str,
    ) -> (Result<RangeInclusive<u64>, Defeat>, Requests, RoundReplies) {
        let (mut requests, mut replies) = self.propose(attempt, waits);
        let mut confirmed = self.value.clone();
        let outcome = loop {
            let step = match requests.next(masters.at(attempt.deadline())).await {
                None => attempt.tick(masters.now().max(attempt.deadline())),
                Some(response) => replies.add(masters, attempt, response),
            };
            masters.saw(attempt.seen());
            match step {
                Step::Wait => {}
                Step::Confirm(tokens, holding) => {
                    confirmed = self.record.with_token(*tokens.start());
                    for master in holding {
                        requests.ask(master, RequestKind::Confirmation, |marker| {
                            self.confirmation(marker, &confirmed, &tokens)
                        });
                    }
                }
                Step::Retry => {
                    // Others may have waited for one while this attempt was outrun.
                    drop(place);
                    place = masters.for_others.take().await;
                    attempt.retry(masters.now(), masters.highest_token());
                    (requests, replies) = self.propose(attempt, waits);
                    confirmed.clone_from(&self.value);
                }
                Step::Won(tokens) => break Ok(tokens),
                Step::Lost(defeat) => break Err(defeat),
            }
        };
        drop(place);
        // The masters have this value by now, unless too few of them confirmed it.
        self.value = confirmed;
        (outcome, requests, replies)
    }

    /// Contends for the lock once, and again while only its tokens are outrun, for so long.
    async fn contend(&mut self, waits: &str, longest: Duration) -> Result<Contended> {
        let masters = self.masters.clone();
        let first = masters.for_others.take().await;
        let now = masters.now();
        let config = AttemptConfig {
            rules: masters.rules,
            began: self
                .outrun_since
                .take()
                .unwrap_or_else(|| Beginning::new(now, wall_clock_micros())),
            ttl: Duration::from_millis(self.ttl_ms()),
            tokens: self.request.tokens.get().into(),
            retry_until: now + longest,
        };
        let mut attempt = Attempt::begin(config, now, masters.highest_token());
        let (outcome, mut requests, mut replies) = self.run(&masters, first, &mut attempt, waits).await;
        let defeat = match outcome {
            Ok(tokens) => return Ok(Contended::Won(self.won(&attempt, tokens, requests))),
            Err(defeat) => defeat,
        };
        // A master that has reported another holder by now has nothing to give back.
        while let Some(response) = requests.try_next().await {
            if response.kind == RequestKind::Vote {
                replies.add(&masters, &mut attempt, response);
            }
        }
        drop(requests);
        let is_divided = replies.is_divided(masters.rules.quorum);
        let is_foreign = replies.is_foreign && defeat != Defeat::Outrun;
        let mut failures = replies.replies.failures(&masters, attempt.deadline());
        failures.note_left_out(attempt.left_out());
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
            Defeat::Undecided { .. } => return Err(masters.no_quorum("acquire", &failures)),
        };
        Ok(Contended::Taken {
            left,
            is_divided,
            is_foreign,
        })
    }

    fn won(&mut self, attempt: &Attempt, tokens: RangeInclusive<u64>, requests: Requests) -> Grant {
        let lease = self.lease(self.masters.at(attempt.since()));
        self.until = lease.end();
        self.tokens = Some(tokens.clone());
        self.may_be_listed = false;
        self.divided_rounds = 0;
        if let Some(place) = &self.place {
            place.stop();
        }
        self.late = Some(requests);
        self.early_renewals = 0;
        self.lacks_masters = attempt.lacks_masters();
        if self.lacks_masters {
            self.repair_soon();
        }
        Grant::new(tokens, lease)
    }

    /// Gives the lock back at `masters`. It does not wait for replies, since a master handles requests in their order.
    async fn give_back(&mut self, masters: impl IntoIterator<Item = usize>) {
        let mut requests = Requests::new(&self.masters, "release");
        for master in masters {
            requests.ask(master, RequestKind::Report, |_| self.withdrawal("yield"));
        }
        requests.send_all().await;
    }

    /// Asks for an early renewal, which repairs the masters that lack the hold. The first one is due at once, when those who
    /// lost to this claim give way. The pauses then double.
    fn repair_soon(&mut self) {
        const PAUSE: Duration = Duration::from_millis(5);

        self.lacks_masters = true;
        let after = match self.early_renewals {
            0 => Duration::ZERO,
            n => PAUSE * (1 << n.min(16)),
        };
        // After a third of the ttl, the driver renews anyway.
        if after < self.request.ttl / 3 {
            self.place().ask_in(after);
        }
    }

    /// Returns the pause before it asks again if nothing wakes it.
    fn pause_before_retry(&mut self, left: Option<Duration>, is_divided: bool, is_foreign: bool) -> Duration {
        /// Foreign clients send no wake-ups.
        const FOREIGN: Duration = Duration::from_millis(50);
        /// The contender with the shortest pause finds the masters undivided.
        const DIVIDED: Duration = Duration::from_millis(20);
        /// Spreads the requests of waiters when a lease ends.
        const SPREAD: Duration = Duration::from_millis(50);
        const LONGEST: Duration = Duration::from_secs(60);

        if is_foreign {
            return FOREIGN.mul_f64(1.0 + fastrand::f64());
        }
        if is_divided {
            self.divided_rounds = (self.divided_rounds + 1).min(4);
            return DIVIDED.mul_f64(fastrand::f64() * f64::from(1_u32 << self.divided_rounds));
        }
        self.divided_rounds = 0;
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

/// The outcome of contending.
enum Contended {
    Won(Grant),
    Taken {
        /// The rest of the first lease to end.
        left: Option<Duration>,
        /// Nobody is known to have a majority.
        is_divided: bool,
        is_foreign: bool,
    },
}

/// The masters' replies in a round.
struct RoundReplies {
    replies: Replies,
    /// The holders, each with its number of masters.
    holders: Vec<(Vec<u8>, usize)>,
    is_foreign: bool,
}

impl RoundReplies {
    fn new(masters: &Masters) -> Self {
        Self {
            replies: Replies::new(masters, "acquire", masters.rules.patience),
            holders: Vec::new(),
            is_foreign: false,
        }
    }

    fn add(&mut self, masters: &Masters, attempt: &mut Attempt, response: Response) -> Step {
        let now = masters.now();
        let Response { master, kind, reply } = response;
        match kind {
            RequestKind::Vote => attempt.voted(now, master, self.vote(masters, master, reply)),
            _ => attempt.confirmed(now, master, self.confirmation(master, reply)),
        }
    }

    fn vote(&mut self, masters: &Masters, master: usize, reply: Result<Value>) -> Vote {
        let Self {
            replies,
            holders,
            is_foreign,
        } = self;
        let vote = replies.read(master, reply, |reply| match reply {
            Value::Int(1) => Some(Vote::Granted),
            Value::Int(0) => Some(Vote::Abstains),
            Value::BulkString(fence) => number(fence).map(Vote::Behind),
            Value::Array(parts) => {
                let [Value::Int(left), Value::BulkString(who)] = &**parts else {
                    return None;
                };
                *is_foreign |= who == b"foreign";
                match holders.iter_mut().find(|(holder, _)| holder == who) {
                    Some((_, masters)) => *masters += 1,
                    None => holders.push((who.clone(), 1)),
                }
                Some(Vote::Taken(u64::try_from(*left).ok().map(Duration::from_millis)))
            }
            _ => None,
        });
        if vote == Some(Vote::Abstains) {
            masters.quarantine.abstained(master);
            let why = masters.quarantine.why_no_vote(master);
            replies.failures.note_reason(master, why);
        }
        vote.unwrap_or(Vote::Silent)
    }

    fn confirmation(&mut self, master: usize, reply: Result<Value>) -> Confirmation {
        let confirmation = self.replies.read(master, reply, confirmation_in);
        confirmation.unwrap_or(Confirmation::Silent)
    }

    /// Returns whether nobody is known to have a majority.
    fn is_divided(&self, quorum: usize) -> bool {
        self.holders.iter().all(|(_, masters)| *masters < quorum)
    }
}

fn no_tokens_left() -> Error {
    let reason = format!(
        "the counters of this lock's fencing tokens are about to pass {LAST_TOKEN}, the last there is, which nobody can have \
         reached: set them right"
    );
    Error::permanent(NAME, "acquire", reason)
}

/// Reads a master's reply to the request to confirm tokens; `None` if it is none.
fn confirmation_in(reply: &Value) -> Option<Confirmation> {
    match reply {
        Value::Int(1) => Some(Confirmation::Raised),
        Value::BulkString(fence) => number(fence).map(Confirmation::Refused),
        _ => None,
    }
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[async_trait]
impl Claim for RedlockClaim {
    async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
        require_runtime(NAME, "acquire")?;
        self.late = None;
        if self.waiting_since == 0 {
            self.waiting_since = wall_clock_micros();
        }
        let waits = match (patience.is_zero(), self.may_be_listed) {
            (true, _) => "try",
            (false, false) => "wait",
            (false, true) => "again",
        };
        let end = Instant::now() + LONGEST_TRY;
        loop {
            // If the driver cut the attempt short, it would not know that the masters had replied.
            let longest = match patience {
                Duration::ZERO => end.saturating_duration_since(Instant::now()),
                _ => patience / 2,
            };
            // Also without waiting: the hold that it wins may be revoked before `notified` is called.
            let place = self.place();
            place.begin();
            if !patience.is_zero() {
                place.listen();
                self.may_be_listed = true;
            }
            let (left, is_divided, is_foreign) = match self.contend(waits, longest).await? {
                Contended::Won(grant) => return Ok(Some(grant)),
                Contended::Taken {
                    left,
                    is_divided,
                    is_foreign,
                } => (left, is_divided, is_foreign),
            };
            let after = self.pause_before_retry(left, is_divided, is_foreign);
            self.place().ask_in(after);
            // Of several tries at once, each may have got some masters. Then none of them has found it taken.
            let goes_on = patience.is_zero() && is_divided && !is_foreign && Instant::now() + after < end;
            if !goes_on {
                return Ok(None);
            }
            self.place().clone().notified().await;
        }
    }

    async fn renew(&mut self) -> Result<Renewal> {
        require_runtime(NAME, "renew")?;
        if let Some(place) = &self.place {
            place.begin();
        }
        let Some(tokens) = self.tokens.clone() else {
            return Ok(Renewal::Lost(self.loss()));
        };
        // In case this renewal is dropped.
        if self.late.take().is_some() || self.lacks_masters {
            self.repair_soon();
            self.early_renewals = self.early_renewals.saturating_add(1);
        }
        let masters = self.masters.clone();
        let place = masters.for_holders.take().await;
        let since = Instant::now();
        let mut count = QuorumCount::of_renewal(masters.rules, masters.since_origin(since));
        let mut requests = Requests::new(&masters, "renew");
        requests.ask_all(RequestKind::Report, |marker| self.renewal(marker, &tokens));
        // With a majority, waiting for the others must not cost too much of the lease.
        let enough = since + self.request.ttl / 6;
        let Counted {
            outcome,
            failures,
            asked,
        } = count_reports(&masters, place, &mut requests, &mut count, "renew", Some(enough)).await;
        match outcome {
            // One master with the mark will do: whoever asks goes on until a majority has it.
            _ if asked => Ok(Renewal::Asked),
            Outcome::Held { repair, taken } => {
                let lease = self.lease(since);
                self.until = lease.end();
                if let Some(place) = &self.place {
                    place.stop();
                }
                self.lacks_masters = false;
                if taken {
                    self.repair_soon();
                } else if repair.is_empty() {
                    self.early_renewals = 0;
                }
                if self.until.is_some_and(|until| Instant::now() < until) {
                    // The counter may stand between the first and the last token by now, and has to reach the last.
                    let last = *tokens.end()..=*tokens.end();
                    for master in repair {
                        requests.ask(master, RequestKind::Vote, |marker| {
                            self.vote(marker, &last, "repair")
                        });
                    }
                    requests.send_all().await;
                }
                self.late = Some(requests);
                Ok(Renewal::Held(lease))
            }
            Outcome::Lost => Ok(Renewal::Lost(self.loss())),
            _ => Err(masters.no_quorum("renew", &failures)),
        }
    }

    /// An earlier request does not come late: a new connection has its master end the old one, or the [lease](Self::lease) tells.
    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        check_ttl(ttl, self.max_ttl)?;
        self.request.ttl = ttl;
        let asked_for = self.tokens.as_ref().map_or(ttl, |_| self.shortest_ttl);
        self.shortest_ttl = asked_for.min(ttl);
        Ok(self.lease(Instant::now()).length)
    }

    /// Shared at some masters and exclusive at others, it excludes writers all the same. Once it is shared at a majority, readers can
    /// have one, too. A master that did not get the request keeps them out until the next renewal.
    async fn downgrade(&mut self) -> Result<Lease> {
        const OPERATION: &str = "downgrade";

        require_runtime(NAME, OPERATION)?;
        let name = self.request.name.clone();
        let lost = |reason| Err(Error::lost(NAME, name.clone(), reason));
        let Some(tokens) = self.tokens.clone() else {
            return lost(self.loss());
        };
        self.late = None;
        let masters = self.masters.clone();
        let place = masters.for_holders.take().await;
        let since = Instant::now();
        let mut count = QuorumCount::of_renewal(masters.rules, masters.since_origin(since));
        let mut requests = Requests::new(&masters, OPERATION);
        // The exclusive hold has ended. Masters that are asked make it a shared one, also if this future is dropped now, and what is asked
        // for a shared one finds both.
        self.request.mode = Mode::Shared;
        requests.ask_all(RequestKind::Report, |marker| {
            let mut call = script::REDLOCK_DOWNGRADE.call(&self.key);
            call.arg(marker)
                .arg(&self.value)
                .arg(self.ttl_ms())
                .arg(*tokens.end());
            call
        });
        let enough = since + self.request.ttl / 6;
        let Counted {
            outcome,
            failures,
            asked,
        } = count_reports(
            &masters,
            place,
            &mut requests,
            &mut count,
            OPERATION,
            Some(enough),
        )
        .await;
        match outcome {
            // As for a renewal.
            _ if asked => lost(LossReason::Asked),
            Outcome::Held { repair, taken } => {
                let lease = self.lease(since);
                self.until = lease.end();
                self.late = Some(requests);
                if taken || !repair.is_empty() {
                    self.repair_soon();
                }
                Ok(lease)
            }
            Outcome::Lost => lost(self.loss()),
            _ => Err(masters.no_quorum(OPERATION, &failures)),
        }
    }

    fn detach(&mut self) -> Option<OwnerId> {
        Some(self.request.owner)
    }

    /// A majority that had the hold for its former owner now has it for this one, and only then is it prolonged. So what a minority
    /// has is over in time, however often it is asked. The renewal also repairs the others.
    async fn adopt(&mut self, from: OwnerId, token: FencingToken) -> Result<Option<Renewal>> {
        require_runtime(NAME, "adopt")?;
        // From now on, it hears of the end of its hold.
        self.place();
        self.value = self.record.with_token(token.get());
        let masters = self.masters.clone();
        let place = masters.for_holders.take().await;
        let now = Instant::now();
        let mut count = QuorumCount::of_renewal(masters.rules, masters.since_origin(now));
        let mut requests = Requests::new(&masters, "adopt");
        requests.ask_all(RequestKind::Report, |marker| self.adoption(marker, from, token));
        let enough = now + self.request.ttl / 6;
        let Counted {
            outcome,
            failures,
            asked,
        } = count_reports(&masters, place, &mut requests, &mut count, "adopt", Some(enough)).await;
        match outcome {
            // Nobody goes on with it, and those who have exchanged the owner prolong it no more either.
            _ if asked => return Ok(Some(Renewal::Asked)),
            Outcome::Held { .. } => {
                self.tokens = Some(token.get()..=token.get());
                match self.renew().await? {
                    Renewal::Lost(_) => {}
                    renewed => return Ok(Some(renewed)),
                }
            }
            Outcome::Lost => {}
            _ => return Err(masters.no_quorum("adopt", &failures)),
        }
        // Of several who adopt at once, each may have got some masters.
        drop(requests);
        self.give_back(0..masters.rules.masters).await;
        Ok(Some(Renewal::Lost(LossReason::Gone)))
    }

    async fn release(&mut self) -> Result<()> {
        require_runtime(NAME, "release")?;
        self.late = None;
        self.lacks_masters = false;
        let masters = self.masters.clone();
        let place = masters.for_holders.take().await;
        let rules = Rules {
            patience: masters.rules.patience.max(RELEASE_PATIENCE),
            ..masters.rules
        };
        let mut count = QuorumCount::of_release(rules, masters.now());
        let mut requests = Requests::new(&masters, "release");
        requests.ask_all(RequestKind::Report, |_| self.withdrawal("end"));
        let Counted {
            outcome, failures, ..
        } = count_reports(&masters, place, &mut requests, &mut count, "release", None).await;
        drop(requests);
        let held = match outcome {
            Outcome::Held { .. } => true,
            Outcome::Lost => false,
            _ => return Err(masters.no_quorum("release", &failures)),
        };
        self.may_be_listed = false;
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
                response = late.next_unbounded() => match response {
                    Some(response) if reports_lack(&response) => self.repair_soon(),
                    Some(_) => {}
                    None => self.late = None,
                }
            }
        }
    }
}

/// Returns whether a late reply says that its master has another holder or none. A master without a vote is repaired when it
/// has one again.
fn reports_lack(response: &Response) -> bool {
    matches!(
        (response.kind, &response.reply),
        (RequestKind::Vote, Ok(Value::Array(_)))
            | (RequestKind::Confirmation, Ok(Value::BulkString(_)))
            | (RequestKind::Report, Ok(Value::Int(0 | 2)))
    )
}

/// The sum of the masters' reports.
pub(super) struct Counted {
    pub(super) outcome: Outcome,
    pub(super) failures: Failures,
    /// A master reports that the holder was asked to give up its hold. Then the outcome means nothing.
    pub(super) asked: bool,
}

/// Counts the masters' reports until they decide, or time is over. Once a majority has the lock, that is at `enough`, and others may
/// have the place: a master that hangs must not hold them up.
pub(super) async fn count_reports(
    masters: &Masters,
    place: Place<'_>,
    requests: &mut Requests,
    count: &mut QuorumCount,
    operation: &'static str,
    enough: Option<Instant>,
) -> Counted {
    let mut replies = Replies::new(masters, operation, count.patience());
    let (mut held, mut place) = (0, Some(place));
    loop {
        let is_held = held >= masters.rules.quorum;
        if is_held {
            drop(place.take());
        }
        let deadline = masters.at(count.deadline());
        let (mut asked, mut may_have_lost_it) = (false, false);
        let response = if is_held {
            // However busy this client is: the lease that a majority has renewed is counted from the request on.
            let enough = enough.map_or(deadline, |enough| deadline.min(enough));
            requests.next_if_soon(enough).await
        } else {
            requests.next(deadline).await
        };
        let outcome = match response {
            None => count.tick(count.deadline()),
            Some(Response { master, reply, .. }) => {
                let report = replies.read(master, reply, |reply| match reply {
                    Value::Int(1) => Some(Report::Held),
                    Value::Int(0) => Some(Report::Free),
                    Value::Int(2) => Some(Report::Other),
                    Value::Int(3) => Some(Report::Abstains),
                    Value::Int(4) => {
                        asked = true;
                        Some(Report::Held)
                    }
                    Value::Int(5) => {
                        may_have_lost_it = true;
                        Some(Report::Silent)
                    }
                    _ => None,
                });
                if may_have_lost_it || report == Some(Report::Abstains) {
                    masters.quarantine.abstained(master);
                }
                if may_have_lost_it {
                    let why = masters.quarantine.why_no_vote(master);
                    replies.failures.note_reason(master, why);
                }
                held += usize::from(report == Some(Report::Held));
                count.reported(master, report.unwrap_or(Report::Silent))
            }
        };
        if asked || outcome != Outcome::Wait {
            return Counted {
                outcome,
                failures: replies.failures(masters, count.deadline()),
                asked,
            };
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

#[cfg(test)]
mod tests {
    use lockkit_core::{LockName, spi::Backend as _};
    use lockkit_testbed::{
        Mode as ProxyMode, Proxy,
        redis::{self, RedisServer},
    };
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::{RedlockBackend, RedlockConfig};

    /// It is not zero, below which a master would have refused no token.
    #[test]
    fn a_counter_that_cannot_be_read_is_no_reply() {
        let counter = |text: &str| confirmation_in(&Value::BulkString(text.into()));
        assert_eq!(counter("12"), Some(Confirmation::Refused(12)));
        for text in ["", "1e99", "0x10", "-1", "12.5", "18446744073709551616"] {
            assert_eq!(counter(text), None, "{text}");
        }
    }

    /// A client that is busy all the time would wait for the last master until the lease is over.
    #[tokio::test]
    async fn a_majority_is_enough_however_busy_the_client_is() {
        if lockkit_testbed::skipped("redis", redis::missing()) {
            return;
        }
        let servers = [(); 3].map(|()| RedisServer::plain().unwrap());
        let silent = Proxy::start(servers[2].addr()).unwrap();
        let [one, two, three] = [servers[0].addr(), servers[1].addr(), silent.addr()];
        let config = RedlockConfig::new(format!("redlock://{one},{two},{three}"));
        let backend = Box::pin(RedlockBackend::connect(config)).await.unwrap();
        let minute = Duration::from_secs(60);
        let name = LockName::new("a").unwrap();
        let request = ClaimRequest::new(name, Mode::Exclusive, minute, OwnerId::new(7));
        let mut claim = RedlockClaim::new(backend.masters().clone(), &request, minute).unwrap();
        claim.attempt(Duration::ZERO).await.unwrap().unwrap();
        silent.set(ProxyMode::Blackhole);
        let busy = async {
            sleep(Duration::from_millis(20)).await;
            backend.masters().connection_io.add_delay(60 * minute);
        };
        let renewing = timeout(minute / 6, claim.renew());
        let (renewed, ()) = tokio::join!(renewing, busy);
        let renewed = renewed.expect("two of three have renewed it").unwrap();
        assert!(matches!(renewed, Renewal::Held(_)), "{renewed:?}");
        silent.set(ProxyMode::Pass);
        claim.release().await.unwrap();
        backend.close().await.unwrap();
    }
}
