//! A client: what the driver and the claim do around an [`Attempt`] and a [`QuorumCount`], without I/O. Time, replies and
//! alarms go in. What to send, when to wake it and what it holds come out.

use std::{ops::RangeInclusive, time::Duration};

use fastrand::Rng;
use lockkit_redis::redlock_quorum::{
    Attempt, AttemptConfig, Beginning, Defeat, Outcome, QuorumCount, Report, Rules, Step, Vote,
};

use crate::{
    master::{Answer, Bid, Claim, Mode, Request},
    mutant::Mutant,
};

/// The time for which an attempt retries while its tokens are outrun, as of a claim that does not wait.
const LONGEST_TRY: Duration = Duration::from_secs(2);

/// The client's own clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    /// Since some moment, and never back.
    pub(crate) monotonic: Duration,
    /// Microseconds since 1970, if it is set right.
    pub(crate) wall: u64,
}

#[expect(clippy::struct_excessive_bools, reason = "each is there or not, on its own")]
#[derive(Clone, Debug)]
pub(crate) struct Habits {
    pub(crate) ttl: Duration,
    /// The length of a restart quarantine.
    pub(crate) quarantine: Duration,
    pub(crate) renews: bool,
    pub(crate) shares: bool,
    pub(crate) cancels: bool,
    /// Retries within a millisecond of the reported end of a lease.
    pub(crate) hurries: bool,
    /// Tokens per grant, for hand-offs without a request.
    pub(crate) block: u64,
    /// The number of holds after which it is finished.
    pub(crate) goal: u32,
    /// The time for which its user holds.
    pub(crate) hold: std::ops::Range<Duration>,
    /// The share of holds that last far beyond the lease.
    pub(crate) overstays: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alarm {
    /// The deadline of this operation.
    Deadline(u32),
    Retry(u32),
    Cancel(u32),
    /// A renewal is due, unless a later alarm replaced this one.
    Renew(u32, u32),
    LeaseEnd(u32),
    UserDone(u32),
    /// The worker releases a cancelled claim.
    LateRelease(Claim),
    Reconnect(usize, u32),
    /// Checks whether this master has a vote by now.
    Look(usize),
}

#[derive(Clone, Debug)]
pub(crate) enum Effect {
    Send(usize, u32, Request),
    /// Opens a new connection, which ends the one before.
    Connect(usize, u32),
    Wake(Duration, Alarm),
    Acquired {
        began: Duration,
        until: Duration,
        token: u64,
        mode: Mode,
        at_once: bool,
        /// The planned end of its use.
        done: Duration,
    },
    /// Extends the hold to the second moment, by a renewal begun at the first.
    Extended(Duration, Duration),
    /// The hold was released or lost.
    Over,
    /// The hold was lost.
    CutShort,
    Lost(Defeat),
}

#[derive(Debug)]
pub(crate) struct Client {
    rules: Rules,
    habits: Habits,
    mutant: Option<Mutant>,
    rng: Rng,
    links: Vec<Link>,
    claim: Claim,
    /// The owner of the next claim.
    next_owner: u32,
    highest: u64,
    /// The beginning of the attempt before, if that was outrun to its end.
    outrun_since: Option<Beginning>,
    operation: u32,
    /// The number of the present state. Alarms of earlier states are void.
    epoch: u32,
    /// The number of the latest alarm for a renewal. Earlier ones are void.
    renewals: u32,
    /// The number of early renewals that it has asked for, since masters lacked the hold.
    repairs: u32,
    state: State,
    pub(crate) done: u32,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    connection: u32,
    up: bool,
    /// The life of the master's process.
    life: u32,
    watch: Watch,
}

/// Knowledge of whether a master has a vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watch {
    Off,
    /// Unknown, and being checked.
    Looking,
    /// In quarantine: known since the first moment, begun at the second by the master's clock.
    Quarantined(Duration, u64),
}

#[derive(Debug)]
enum State {
    Idle,
    Acquiring {
        attempt: Attempt,
        mode: Mode,
        confirmed: bool,
    },
    Holding(Hold),
    Releasing(QuorumCount),
    Finished,
}

#[derive(Debug)]
struct Hold {
    mode: Mode,
    began: Duration,
    until: Duration,
    /// The tokens of the grant.
    granted: RangeInclusive<u64>,
    /// The first unused token.
    next: u64,
    renewal: Option<(QuorumCount, Duration)>,
}

type Out = Vec<Effect>;

impl Client {
    pub(crate) fn new(number: u32, rules: Rules, habits: Habits, mutant: Option<Mutant>, rng: Rng) -> Self {
        Self {
            rules,
            habits,
            mutant,
            rng,
            links: vec![
                Link {
                    connection: 1,
                    up: true,
                    life: 1,
                    watch: Watch::Off,
                };
                rules.masters
            ],
            claim: Claim {
                owner: number * 1000,
                round: 0,
            },
            next_owner: number * 1000 + 1,
            highest: 0,
            outrun_since: None,
            operation: 0,
            epoch: 0,
            renewals: 0,
            repairs: 0,
            state: State::Idle,
            done: 0,
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        matches!(self.state, State::Finished)
    }

    pub(crate) fn is_renewing(&self) -> bool {
        matches!(&self.state, State::Holding(hold) if hold.renewal.is_some())
    }

    /// Returns the first token of the present grant.
    pub(crate) fn granted(&self) -> Option<u64> {
        match &self.state {
            State::Holding(hold) => Some(*hold.granted.start()),
            _ => None,
        }
    }

    pub(crate) fn is_connected(&self, master: usize) -> bool {
        self.links[master].up
    }

    pub(crate) fn connection(&self, master: usize) -> u32 {
        self.links[master].connection
    }

    pub(crate) fn begin(&mut self, now: Now, out: &mut Out) {
        self.idle(now, Duration::ZERO..Duration::from_millis(50), out);
    }

    pub(crate) fn alarm(&mut self, now: Now, alarm: Alarm, out: &mut Out) {
        match alarm {
            Alarm::Deadline(operation) if operation == self.operation => self.deadline(now, out),
            Alarm::Retry(epoch) if epoch == self.epoch => self.acquire(now, out),
            Alarm::Cancel(epoch) if epoch == self.epoch => self.cancel(now, out),
            Alarm::Renew(epoch, renewal) if (epoch, renewal) == (self.epoch, self.renewals) => {
                self.renew(now, out);
            }
            Alarm::LeaseEnd(epoch) if epoch == self.epoch => self.lease_end(now, out),
            Alarm::UserDone(epoch) if epoch == self.epoch => self.user_done(now, out),
            Alarm::LateRelease(claim) => self.release_everywhere(claim, out),
            Alarm::Reconnect(master, connection)
                if self.links[master].connection == connection && !self.links[master].up =>
            {
                self.connect(now, master, out);
            }
            Alarm::Look(master) => self.look(now, master, out),
            _ => {}
        }
    }

    /// Handles the end of the connection to a master.
    pub(crate) fn broken(&mut self, now: Now, master: usize, out: &mut Out) {
        let link = &mut self.links[master];
        link.up = false;
        // Replies on the old connection no longer count.
        link.connection += 1;
        let connection = link.connection;
        let pause = self.pause(Duration::from_millis(1)..Duration::from_millis(40));
        out.push(Effect::Wake(
            now.monotonic + pause,
            Alarm::Reconnect(master, connection),
        ));
    }

    fn connect(&mut self, now: Now, master: usize, out: &mut Out) {
        let link = &mut self.links[master];
        link.connection += 1;
        let connection = link.connection;
        out.push(Effect::Connect(master, connection));
        let again = now.monotonic + Duration::from_millis(150);
        out.push(Effect::Wake(again, Alarm::Reconnect(master, connection)));
    }

    /// Handles a new connection.
    pub(crate) fn connected(
        &mut self,
        now: Now,
        master: usize,
        connection: u32,
        life: u32,
        marked: bool,
        out: &mut Out,
    ) {
        let link = &mut self.links[master];
        if link.connection != connection || link.up {
            return;
        }
        link.up = true;
        if link.life != life {
            link.watch = Watch::Off;
        }
        link.life = life;
        if !marked {
            self.watch(now, master, out);
        }
        // Replies on the connection before may be lost.
        if matches!(&self.state, State::Holding(hold) if hold.renewal.is_none()) {
            self.repair_soon(now, out);
        }
    }

    /// Watches a master that has no vote.
    fn watch(&mut self, now: Now, master: usize, out: &mut Out) {
        let link = &mut self.links[master];
        if link.watch == Watch::Off {
            link.watch = Watch::Looking;
            self.look(now, master, out);
        }
    }

    fn look(&mut self, now: Now, master: usize, out: &mut Out) {
        let quarantine = self.habits.quarantine;
        let link = self.links[master];
        let over = match link.watch {
            Watch::Off => return,
            Watch::Quarantined(seen, since) if seen + quarantine <= now.monotonic => Some(since),
            _ => None,
        };
        let request = Request::Look {
            life: link.life,
            over,
            quarantine: micros(quarantine),
        };
        out.push(Effect::Send(master, 0, request));
        let pause = self.pause(quarantine / 8..quarantine / 4);
        out.push(Effect::Wake(now.monotonic + pause, Alarm::Look(master)));
    }

    /// Handles a master's report of its quarantine.
    fn looked(&mut self, now: Now, master: usize, life: u32, since: Option<u64>) {
        let link = &mut self.links[master];
        if life != link.life || link.watch == Watch::Off {
            return;
        }
        link.watch = match (since, link.watch) {
            (None, _) => Watch::Off,
            (Some(since), Watch::Quarantined(seen, before))
                if since == before || self.mutant == Some(Mutant::QuarantineGoesOn) =>
            {
                Watch::Quarantined(seen, since)
            }
            (Some(since), _) => Watch::Quarantined(now.monotonic, since),
        };
    }

    pub(crate) fn answered(
        &mut self,
        now: Now,
        master: usize,
        operation: u32,
        answer: Answer,
        out: &mut Out,
    ) {
        let current = operation == self.operation;
        if let Answer::Standing(life, since) = answer {
            return self.looked(now, master, life, since);
        }
        if let Answer::Vote(Vote::Abstains) | Answer::Report(Report::Abstains) = answer {
            self.watch(now, master, out);
        }
        match (&mut self.state, answer) {
            (State::Acquiring { attempt, .. }, Answer::Vote(vote))
                if current || self.mutant == Some(Mutant::OldVotesCount) =>
            {
                let step = attempt.voted(now.monotonic, master, vote);
                self.step(now, step, out);
            }
            (State::Acquiring { attempt, .. }, Answer::Confirmation(answer)) if current => {
                let step = attempt.confirmed(now.monotonic, master, answer);
                self.step(now, step, out);
            }
            (State::Holding(hold), Answer::Report(report)) if current => {
                if let Some((count, _)) = &mut hold.renewal {
                    let outcome = count.reported(master, report);
                    self.renewed(now, outcome, out);
                } else if report == Report::Other {
                    self.repair_soon(now, out);
                }
            }
            // A late vote, after the others had decided.
            (State::Holding(hold), Answer::Vote(Vote::Taken(_))) if current && hold.renewal.is_none() => {
                self.repair_soon(now, out);
            }
            (State::Releasing(count), Answer::Report(report)) if current => {
                let outcome = count.reported(master, report);
                self.released(now, &outcome, out);
            }
            _ => {}
        }
    }

    fn deadline(&mut self, now: Now, out: &mut Out) {
        match &mut self.state {
            State::Acquiring { attempt, .. } => {
                let step = attempt.tick(now.monotonic);
                self.step(now, step, out);
            }
            State::Holding(hold) => {
                if let Some((count, _)) = &mut hold.renewal {
                    let outcome = count.tick(now.monotonic);
                    self.renewed(now, outcome, out);
                }
            }
            State::Releasing(count) => {
                let outcome = count.tick(now.monotonic);
                self.released(now, &outcome, out);
            }
            State::Idle | State::Finished => {}
        }
    }

    fn acquire(&mut self, now: Now, out: &mut Out) {
        let mode = if self.habits.shares && self.rng.f64() < 0.6 {
            Mode::Shared
        } else {
            Mode::Exclusive
        };
        self.epoch += 1;
        if self.habits.cancels && self.rng.f64() < 0.15 {
            let pause = self.pause(Duration::ZERO..Duration::from_millis(60));
            out.push(Effect::Wake(now.monotonic + pause, Alarm::Cancel(self.epoch)));
        }
        let began = if self.mutant == Some(Mutant::NaiveTokens) {
            // Its tokens follow from the counters alone.
            Beginning::new(Duration::MAX, 0)
        } else {
            let before = self.outrun_since.take();
            before.unwrap_or_else(|| Beginning::new(now.monotonic, now.wall))
        };
        let config = AttemptConfig {
            rules: self.rules,
            began,
            ttl: self.habits.ttl,
            tokens: self.habits.block,
            retry_until: now.monotonic + LONGEST_TRY,
        };
        let attempt = Attempt::begin(config, now.monotonic, self.highest);
        self.propose(attempt, mode, out);
    }

    fn propose(&mut self, attempt: Attempt, mode: Mode, out: &mut Out) {
        self.operation += 1;
        if self.mutant != Some(Mutant::RoundsLookAlike) {
            self.claim.round += 1;
        }
        self.saw(&attempt);
        for master in 0..self.rules.masters {
            let request = Request::Vote(Bid {
                claim: self.claim,
                mode,
                ttl: micros(self.habits.ttl),
                tokens: attempt.tokens().clone(),
            });
            out.push(Effect::Send(master, self.operation, request));
        }
        out.push(Effect::Wake(attempt.deadline(), Alarm::Deadline(self.operation)));
        self.state = State::Acquiring {
            attempt,
            mode,
            confirmed: false,
        };
    }

    fn saw(&mut self, attempt: &Attempt) {
        if self.mutant != Some(Mutant::NaiveTokens) {
            self.highest = self.highest.max(attempt.seen());
        }
    }

    fn step(&mut self, now: Now, step: Step, out: &mut Out) {
        if step == Step::Wait {
            return;
        }
        let State::Acquiring {
            mut attempt,
            mode,
            confirmed,
        } = std::mem::replace(&mut self.state, State::Idle)
        else {
            return;
        };
        match step {
            Step::Wait => {}
            Step::Confirm(tokens, _) if self.mutant == Some(Mutant::NaiveTokens) => {
                self.won(now, &attempt, mode, tokens, true, out);
            }
            Step::Confirm(tokens, masters) => {
                self.highest = self.highest.max(*tokens.end());
                for master in masters {
                    let request = Request::Confirm {
                        claim: self.claim,
                        tokens: tokens.clone(),
                    };
                    out.push(Effect::Send(master, self.operation, request));
                }
                if !confirmed {
                    out.push(Effect::Wake(attempt.deadline(), Alarm::Deadline(self.operation)));
                }
                if self.mutant == Some(Mutant::ConfirmsAlone) {
                    return self.won(now, &attempt, mode, tokens, false, out);
                }
                self.state = State::Acquiring {
                    attempt,
                    mode,
                    confirmed: true,
                };
            }
            Step::Won(tokens) => self.won(now, &attempt, mode, tokens, !confirmed, out),
            Step::Retry => {
                self.saw(&attempt);
                out.push(Effect::Lost(Defeat::Outrun));
                attempt.retry(now.monotonic, self.highest);
                self.propose(attempt, mode, out);
            }
            Step::Lost(defeat) => {
                self.saw(&attempt);
                out.push(Effect::Lost(defeat));
                if defeat == Defeat::Outrun {
                    self.outrun_since = Some(attempt.began());
                }
                Self::release_at(attempt.may_hold(), self.claim, out);
                self.idle(now, self.patience_after(defeat), out);
            }
        }
    }

    fn patience_after(&self, defeat: Defeat) -> std::ops::Range<Duration> {
        let millis = Duration::from_millis;
        match defeat {
            Defeat::Taken(Some(left)) if self.habits.hurries => {
                let soon = left.saturating_sub(millis(15));
                soon..soon + millis(1)
            }
            Defeat::Taken(Some(left)) => millis(5).min(left)..left.clamp(millis(20), millis(250)),
            _ => millis(20)..millis(120),
        }
    }

    fn won(
        &mut self,
        now: Now,
        attempt: &Attempt,
        mode: Mode,
        tokens: RangeInclusive<u64>,
        at_once: bool,
        out: &mut Out,
    ) {
        let since = attempt.since();
        let since_when = if self.mutant == Some(Mutant::LeaseFromTheWin) {
            now.monotonic
        } else {
            since
        };
        let until = since_when + self.rules.lease(self.habits.ttl);
        let hold = Hold {
            mode,
            began: since,
            until,
            next: *tokens.start(),
            granted: tokens,
            renewal: None,
        };
        self.hold(now, hold, at_once, out);
        self.repairs = 0;
        self.renew_at(now.monotonic + self.habits.ttl / 3, out);
        if attempt.lacks_masters() {
            self.repair_soon(now, out);
        }
    }

    fn renew_at(&mut self, moment: Duration, out: &mut Out) {
        if self.habits.renews {
            self.renewals += 1;
            out.push(Effect::Wake(moment, Alarm::Renew(self.epoch, self.renewals)));
        }
    }

    /// Asks for an early renewal, which repairs masters that lack the hold: at first as soon as the worker has adopted the
    /// hold, then after pauses that double.
    fn repair_soon(&mut self, now: Now, out: &mut Out) {
        if !self.habits.renews || self.mutant == Some(Mutant::RepairsLate) {
            return;
        }
        let millis = Duration::from_millis;
        let pause = match self.repairs {
            0 => self.pause(Duration::ZERO..millis(5)),
            n => millis(5) * (1 << n.min(16)),
        };
        self.repairs += 1;
        if pause < self.habits.ttl / 3 {
            self.renew_at(now.monotonic + pause, out);
        }
    }

    /// Hands the lock to a user of this process, with the next token.
    fn hold(&mut self, now: Now, mut hold: Hold, at_once: bool, out: &mut Out) {
        self.epoch += 1;
        let longest = if self.rng.f64() < self.habits.overstays {
            self.habits.ttl * 2
        } else {
            self.habits.hold.end
        };
        let done = now.monotonic + self.pause(self.habits.hold.start..longest);
        out.push(Effect::Acquired {
            began: hold.began,
            until: hold.until,
            token: hold.next,
            mode: hold.mode,
            at_once,
            done,
        });
        out.push(Effect::Wake(done, Alarm::UserDone(self.epoch)));
        out.push(Effect::Wake(hold.until, Alarm::LeaseEnd(self.epoch)));
        hold.next += 1;
        self.state = State::Holding(hold);
    }

    fn renew(&mut self, now: Now, out: &mut Out) {
        let ttl = self.habits.ttl;
        let State::Holding(hold) = &mut self.state else {
            return;
        };
        if now.monotonic >= hold.until {
            return self.lease_end(now, out);
        }
        self.operation += 1;
        let count = QuorumCount::of_renewal(self.rules, now.monotonic);
        out.push(Effect::Wake(count.deadline(), Alarm::Deadline(self.operation)));
        hold.renewal = Some((count, now.monotonic));
        let request = Request::Renew(Bid {
            claim: self.claim,
            mode: hold.mode,
            ttl: micros(ttl),
            tokens: hold.granted.clone(),
        });
        for master in 0..self.rules.masters {
            out.push(Effect::Send(master, self.operation, request.clone()));
        }
    }

    fn renewed(&mut self, now: Now, outcome: Outcome, out: &mut Out) {
        let State::Holding(hold) = &mut self.state else {
            return;
        };
        // A late reply revives nothing.
        if now.monotonic >= hold.until {
            return self.lease_end(now, out);
        }
        let Some((_, since)) = &hold.renewal else { return };
        let since = *since;
        let next = match outcome {
            Outcome::Wait => return,
            Outcome::Lost => return self.give_up(now, out),
            Outcome::Undecided { .. } => self.habits.ttl / 10,
            Outcome::Held { repair, taken } => {
                hold.until = hold.until.max(since + self.rules.lease(self.habits.ttl));
                out.push(Effect::Extended(since, hold.until));
                let request = Request::Repair(Bid {
                    claim: self.claim,
                    mode: hold.mode,
                    ttl: micros((since + self.habits.ttl).saturating_sub(now.monotonic)),
                    tokens: hold.granted.clone(),
                });
                hold.renewal = None;
                self.operation += 1;
                if repair.is_empty() && !taken {
                    self.repairs = 0;
                }
                for master in repair {
                    out.push(Effect::Send(master, self.operation, request.clone()));
                }
                self.renew_at(now.monotonic + self.habits.ttl / 3, out);
                if taken {
                    self.repair_soon(now, out);
                }
                return;
            }
        };
        hold.renewal = None;
        self.operation += 1;
        self.renew_at(now.monotonic + next, out);
    }

    fn lease_end(&mut self, now: Now, out: &mut Out) {
        let State::Holding(hold) = &self.state else { return };
        if now.monotonic < hold.until {
            out.push(Effect::Wake(hold.until, Alarm::LeaseEnd(self.epoch)));
            return;
        }
        self.give_up(now, out);
    }

    /// Ends a lost hold. A user that does not check it goes on writing.
    fn give_up(&mut self, now: Now, out: &mut Out) {
        out.push(Effect::Over);
        out.push(Effect::CutShort);
        self.release_everywhere(self.claim, out);
        self.next_hold(now, out);
    }

    fn user_done(&mut self, now: Now, out: &mut Out) {
        let State::Holding(hold) = &self.state else { return };
        out.push(Effect::Over);
        let plenty = now.monotonic + self.habits.ttl * 2 / 3 < hold.until;
        if hold.next <= *hold.granted.end() && plenty && hold.renewal.is_none() {
            self.done += 1;
            let hold = Hold {
                granted: hold.granted.clone(),
                renewal: None,
                ..*hold
            };
            self.hold(now, hold, true, out);
            self.renew_at(now.monotonic + self.habits.ttl / 10, out);
            return;
        }
        self.operation += 1;
        self.epoch += 1;
        let count = QuorumCount::of_release(self.rules, now.monotonic);
        out.push(Effect::Wake(count.deadline(), Alarm::Deadline(self.operation)));
        for master in 0..self.rules.masters {
            let request = Request::Release { claim: self.claim };
            out.push(Effect::Send(master, self.operation, request));
        }
        self.state = State::Releasing(count);
    }

    fn released(&mut self, now: Now, outcome: &Outcome, out: &mut Out) {
        if *outcome != Outcome::Wait {
            self.next_hold(now, out);
        }
    }

    fn next_hold(&mut self, now: Now, out: &mut Out) {
        self.done += 1;
        if self.done >= self.habits.goal {
            self.operation += 1;
            self.epoch += 1;
            self.state = State::Finished;
            return;
        }
        if self.rng.bool() {
            self.new_claim();
        }
        self.idle(now, Duration::ZERO..Duration::from_millis(60), out);
    }

    /// Drops the acquiring future. The worker releases its claim, at once or later.
    fn cancel(&mut self, now: Now, out: &mut Out) {
        if !matches!(self.state, State::Acquiring { .. }) {
            return;
        }
        let claim = self.claim;
        let late = if self.rng.bool() {
            Duration::ZERO
        } else {
            self.pause(Duration::ZERO..Duration::from_millis(80))
        };
        out.push(Effect::Wake(now.monotonic + late, Alarm::LateRelease(claim)));
        self.new_claim();
        self.idle(now, Duration::ZERO..Duration::from_millis(40), out);
    }

    fn new_claim(&mut self) {
        self.claim = Claim {
            owner: self.next_owner,
            round: 0,
        };
        self.next_owner += 1;
    }

    fn release_everywhere(&self, claim: Claim, out: &mut Out) {
        Self::release_at(0..self.rules.masters, claim, out);
    }

    fn release_at(masters: impl IntoIterator<Item = usize>, claim: Claim, out: &mut Out) {
        for master in masters {
            out.push(Effect::Send(master, 0, Request::Release { claim }));
        }
    }

    fn idle(&mut self, now: Now, pause: std::ops::Range<Duration>, out: &mut Out) {
        self.operation += 1;
        self.epoch += 1;
        self.state = State::Idle;
        let pause = self.pause(pause);
        out.push(Effect::Wake(now.monotonic + pause, Alarm::Retry(self.epoch)));
    }

    fn pause(&mut self, range: std::ops::Range<Duration>) -> Duration {
        let (from, to) = (
            micros(range.start),
            micros(range.end).max(micros(range.start) + 1),
        );
        Duration::from_micros(self.rng.u64(from..to))
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
