//! Redlock's decisions, without I/O: what the masters' replies add up to.
//!
//! [`Attempt`] decides an acquisition, [`QuorumCount`] a renewal or a release. Replies go in, and the next step comes out.
//! Time goes in as the span since a moment that the caller chose. So the simulator runs this code on clocks that drift and
//! over networks that lose messages.
//!
//! # Tokens
//!
//! An attempt proposes its fencing tokens along with its vote. Each master that is free takes the lock *and* raises its
//! counter to them, in one step. If a majority does both, the lock is won in one round trip. The tokens are then above
//! those of any earlier confirmed acquisition, since that one raised the counter at one of the same masters. For the same
//! reason nobody else can get them.
//!
//! Where a counter was already as high, that master holds the lock but does not count for the tokens. If such masters are
//! needed for a majority, the attempt proposes tokens above every counter seen, and a majority has to raise to those.
//! These tokens are ahead of the clock by as much as the counters may have risen when the request arrives. So a client
//! that is far from the masters can share a lock with holders that are near.
//!
//! Somebody may have set a counter beyond every clock. Such counters are left out if the other masters are a majority.
//! That is safe: tokens are new since a majority raised its counters to them from below, whatever they were proposed from.
//! A confirmed counter beyond the clocks is that of a majority, and then the others are none.
//!
//! The votes are [Redlock](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/). That it has no tokens
//! is [Martin Kleppmann's](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html) objection to it.

// `#[inline]` has the functions optimized along with the simulator, also in test builds.

use std::{ops::RangeInclusive, time::Duration};

/// The parameters of a deployment's votes.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub masters: usize,
    /// The number of masters that decide. Any two quorums share a master.
    pub quorum: usize,
    /// The time that masters have to reply, in each phase.
    pub patience: Duration,
    /// The difference allowed between two clocks over a lease: a part of it in ppm, and a constant.
    pub drift: (u32, Duration),
}

impl Rules {
    /// Returns Redlock's: a quorum of more than half of the masters, and 1 % and 2 ms for drift.
    pub fn of(masters: usize, patience: Duration) -> Self {
        Self {
            masters,
            quorum: masters / 2 + 1,
            patience,
            drift: (10_000, Duration::from_millis(2)),
        }
    }

    /// Returns the lease that a ttl at the masters is worth to its holder, from before the request was sent.
    #[inline]
    pub fn lease(&self, ttl: Duration) -> Duration {
        let (ppm, rest) = self.drift;
        ttl.saturating_sub(ttl.mul_f64(f64::from(ppm) / 1e6) + rest)
    }

    /// Returns whether so many masters leave no quorum among the others.
    #[inline]
    fn blocks(&self, masters: usize) -> bool {
        self.masters - masters.min(self.masters) < self.quorum
    }
}

/// The µs since 1970 in about the year 2100. A clock or a counter that was set beyond must not use up the numbers.
pub const LAST_CLOCK: u64 = (1 << 52) - (1 << 48);

/// The highest token. Above it, the scripts' numbers are not exact.
pub const LAST_TOKEN: u64 = 1 << 52;

/// Returns whether no clock has reached this counter.
#[inline]
fn is_beyond(counter: u64) -> bool {
    counter >= LAST_CLOCK
}

/// The moment when an attempt began.
#[derive(Clone, Copy, Debug)]
pub struct Beginning {
    pub at: Duration,
    /// The wall clock of its machine at that moment, in µs.
    clock: u64,
}

impl Beginning {
    pub fn new(at: Duration, clock: u64) -> Self {
        let clock = if is_beyond(clock) { 0 } else { clock };
        Self { at, clock }
    }

    /// Returns the first token to propose `now`, above those that were `seen`.
    ///
    /// Others raise the counters with the time, and will have done so again when the request arrives. So the token is ahead
    /// of the clock by the time that the attempt has taken. It is not ahead of `seen` by that much: if everybody did this,
    /// the counters would leave the clocks behind. Ahead of `seen` it is by a thousandth of that.
    #[inline]
    fn first_above(&self, seen: u64, now: Duration) -> u64 {
        const MOST: Duration = Duration::from_secs(10);

        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or_default();
        let tried = now.saturating_sub(self.at);
        let ahead = micros(tried.min(MOST));
        let above = seen.saturating_add(1 + ahead / 1000);
        above.max(self.clock + micros(tried) + ahead)
    }
}

/// A master's reply to a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    /// Holds the lock for the attempt, and raised its counter to the proposed tokens.
    Granted,
    /// Holds the lock for the attempt, but its counter stands at this. Others may have the proposed tokens.
    Behind(u64),
    /// Has another holder, for so long unless that one renews.
    Taken(Option<Duration>),
    /// Has no vote for a while, since it may have lost earlier grants.
    Abstains,
    /// Sent no valid reply.
    Silent,
}

/// A master's reply to tokens that it is to confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confirmation {
    /// Still holds the lock for the attempt, and raised its counter.
    Raised,
    /// Does not hold it any more, or its counter has passed the tokens. The counter stands at this.
    Refused(u64),
    /// Sent no valid reply.
    Silent,
}

/// The next step of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait for replies, until [`deadline`](Attempt::deadline).
    Wait,
    /// Have these masters confirm these tokens.
    Confirm(RangeInclusive<u64>, Vec<usize>),
    /// Propose again: call [`retry`](Attempt::retry). Only the tokens were outrun. The next round replaces what this one took.
    Retry,
    /// Hold the lock with these tokens. Its lease counts from [`since`](Attempt::since).
    Won(RangeInclusive<u64>),
    /// Give the lock back at every master that [may hold](Attempt::may_hold) it.
    Lost(Defeat),
}

/// A reason for an attempt to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defeat {
    /// Other holders have too many masters. The first of their leases ends after this time.
    Taken(Option<Duration>),
    /// A majority granted the lock but not the tokens, which others were after as well.
    Outrun,
    /// Too few masters took part to decide.
    Undecided { answered: usize, abstained: usize },
    /// The lease was over before a majority had granted it.
    TooLate,
    /// The counters of a majority leave no token up to [`LAST_TOKEN`].
    OutOfTokens,
}

/// The parameters of an attempt.
#[derive(Clone, Copy, Debug)]
pub struct AttemptConfig {
    pub rules: Rules,
    /// The beginning of this attempt, or of the one before if that was outrun to its end.
    pub began: Beginning,
    /// The time to live that is set at the masters.
    pub ttl: Duration,
    /// The number of tokens of a grant.
    pub tokens: u64,
    /// An attempt that is outrun is repeated until then.
    pub retry_until: Duration,
}

/// An attempt to acquire: a round of votes, confirmed if need be, and further rounds while only its tokens are outrun.
#[derive(Debug)]
pub struct Attempt {
    config: AttemptConfig,
    /// The beginning of this round.
    since: Duration,
    /// The end of a hold won by this round.
    until: Duration,
    tokens: RangeInclusive<u64>,
    is_confirming: bool,
    deadline: Duration,
    /// The ballots, by master.
    ballots: Vec<Ballot>,
}

/// The state of one master in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ballot {
    /// Asked for its vote.
    Asked,
    Voted(Vote),
    /// Asked to confirm.
    Confirming,
    Answered(Confirmation),
}

impl Ballot {
    /// Returns the master's counter, if the reply names it.
    #[inline]
    fn counter(&self) -> Option<u64> {
        match self {
            Self::Voted(Vote::Behind(fence)) | Self::Answered(Confirmation::Refused(fence)) => Some(*fence),
            _ => None,
        }
    }

    #[inline]
    fn is_beyond(&self) -> bool {
        self.counter().is_some_and(is_beyond)
    }
}

impl Attempt {
    /// Begins the first round `now`, before anything is sent. Its [`tokens`](Self::tokens) are above those that this client
    /// has `seen`; propose them to every master.
    #[inline]
    pub fn begin(config: AttemptConfig, now: Duration, seen: u64) -> Self {
        let first = config.began.first_above(seen, now);
        Self {
            config,
            since: now,
            until: now + config.rules.lease(config.ttl),
            tokens: first..=first + (config.tokens - 1),
            is_confirming: false,
            deadline: now + config.rules.patience,
            ballots: vec![Ballot::Asked; config.rules.masters],
        }
    }

    /// Begins another round, after [`Step::Retry`].
    pub fn retry(&mut self, now: Duration, seen: u64) {
        *self = Self::begin(self.config, now, seen);
    }

    pub fn began(&self) -> Beginning {
        self.config.began
    }

    /// Returns the moment from which the lease of this round counts.
    pub fn since(&self) -> Duration {
        self.since
    }

    /// Returns the tokens proposed last.
    #[inline]
    pub fn tokens(&self) -> &RangeInclusive<u64> {
        &self.tokens
    }

    /// Returns the moment to call [`tick`](Self::tick) if nothing happens before.
    #[inline]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns the highest token seen, as the minimum for this client's next proposals. A counter beyond the clocks counts for
    /// its own lock at most, and is none.
    #[inline]
    pub fn seen(&self) -> u64 {
        let highest = self.highest();
        if is_beyond(highest) { 0 } else { highest }
    }

    /// Returns the highest of the tokens proposed and of the counters that count.
    #[inline]
    fn highest(&self) -> u64 {
        let left_out = self.left_out();
        let counts = |(master, ballot): (usize, &Ballot)| {
            let fence = ballot.counter()?;
            (!left_out.contains(&(master, fence))).then_some(fence)
        };
        let seen = self.ballots.iter().enumerate().filter_map(counts);
        seen.fold(*self.tokens.end(), u64::max)
    }

    /// Returns the masters whose counters do not count, and those counters.
    #[inline]
    pub fn left_out(&self) -> Vec<(usize, u64)> {
        let leaves_out = self.leaves_out();
        let beyond = |(master, ballot): (usize, &Ballot)| {
            let fence = ballot.counter().filter(|fence| leaves_out && is_beyond(*fence))?;
            Some((master, fence))
        };
        self.ballots.iter().enumerate().filter_map(beyond).collect()
    }

    /// Returns whether counters beyond the clocks are left out: so few masters have one that the others may be a majority.
    #[inline]
    fn leaves_out(&self) -> bool {
        !is_beyond(*self.tokens.start()) && !self.config.rules.blocks(self.count(Ballot::is_beyond))
    }

    /// Returns the masters that may hold the lock for this attempt: all but those that reported another holder.
    #[inline]
    pub fn may_hold(&self) -> Vec<usize> {
        let may_hold = |(master, ballot): (usize, &Ballot)| {
            let is_taken = matches!(ballot, Ballot::Voted(Vote::Taken(_)));
            (!is_taken).then_some(master)
        };
        self.ballots.iter().enumerate().filter_map(may_hold).collect()
    }

    /// Returns whether some master is known to lack the hold that was won. Masters without a reply may yet say so.
    pub fn lacks_masters(&self) -> bool {
        let lacks = |ballot: &Ballot| {
            matches!(
                ballot,
                Ballot::Voted(Vote::Taken(_)) | Ballot::Answered(Confirmation::Refused(_))
            )
        };
        self.ballots.iter().any(lacks)
    }

    /// Takes in a master's vote.
    #[inline]
    pub fn voted(&mut self, now: Duration, master: usize, vote: Vote) -> Step {
        if self.ballots[master] != Ballot::Asked {
            return Step::Wait;
        }
        self.ballots[master] = match vote {
            Vote::Granted if self.is_confirming => Ballot::Confirming,
            Vote::Behind(fence) if self.is_confirming && fence < *self.tokens.start() => Ballot::Confirming,
            Vote::Behind(fence) if self.is_confirming => Ballot::Answered(Confirmation::Refused(fence)),
            vote => Ballot::Voted(vote),
        };
        if self.ballots[master] == Ballot::Confirming {
            return Step::Confirm(self.tokens.clone(), vec![master]);
        }
        self.next(now)
    }

    /// Takes in a master's reply to [`Step::Confirm`].
    #[inline]
    pub fn confirmed(&mut self, now: Duration, master: usize, answer: Confirmation) -> Step {
        if self.ballots[master] != Ballot::Confirming {
            return Step::Wait;
        }
        self.ballots[master] = Ballot::Answered(answer);
        self.next(now)
    }

    /// Takes in the time: after the deadline, masters without a reply are silent.
    #[inline]
    pub fn tick(&mut self, now: Duration) -> Step {
        if now < self.deadline {
            return Step::Wait;
        }
        for ballot in &mut self.ballots {
            match ballot {
                Ballot::Asked => *ballot = Ballot::Voted(Vote::Silent),
                Ballot::Confirming => *ballot = Ballot::Answered(Confirmation::Silent),
                _ => {}
            }
        }
        self.next(now)
    }

    #[inline]
    fn count(&self, counted: impl Fn(&Ballot) -> bool) -> usize {
        self.ballots.iter().filter(|ballot| counted(ballot)).count()
    }

    #[inline]
    fn next(&mut self, now: Duration) -> Step {
        if self.is_confirming {
            return self.next_confirming(now);
        }
        let granted = self.count(|ballot| matches!(ballot, Ballot::Voted(Vote::Granted)));
        if granted >= self.config.rules.quorum {
            return self.won(now);
        }
        let beyond = self.count(Ballot::is_beyond);
        let behind = self.count(|ballot| matches!(ballot, Ballot::Voted(Vote::Behind(_))));
        // A majority has to raise its counters. Those that are left out do not.
        let held = |beyond_count: bool| granted + behind - if beyond_count { 0 } else { beyond };
        if held(!self.leaves_out()) >= self.config.rules.quorum {
            return self.begin_confirming(now);
        }
        let open = self.count(|ballot| *ballot == Ballot::Asked);
        // The open ones may have counters beyond the clocks as well, and then all of these count.
        if held(self.config.rules.blocks(beyond + open)) + open >= self.config.rules.quorum {
            return Step::Wait;
        }
        self.defeat(open)
    }

    #[inline]
    fn next_confirming(&self, now: Duration) -> Step {
        let raised = self.count(|ballot| *ballot == Ballot::Answered(Confirmation::Raised));
        if raised >= self.config.rules.quorum {
            return self.won(now);
        }
        let open = self.count(|ballot| matches!(ballot, Ballot::Asked | Ballot::Confirming));
        if raised + open >= self.config.rules.quorum {
            return Step::Wait;
        }
        let leaves_out = self.leaves_out();
        let refused = self.count(|ballot| {
            let is_refusal = matches!(ballot, Ballot::Answered(Confirmation::Refused(_)));
            is_refusal && !(leaves_out && ballot.is_beyond())
        });
        if refused > 0 && raised + refused >= self.config.rules.quorum {
            return if now >= self.until {
                Step::Lost(Defeat::TooLate)
            } else if now < self.config.retry_until {
                Step::Retry
            } else {
                Step::Lost(Defeat::Outrun)
            };
        }
        if refused > 0 && raised + refused + open >= self.config.rules.quorum {
            return Step::Wait;
        }
        self.defeat(open)
    }

    #[inline]
    fn begin_confirming(&mut self, now: Duration) -> Step {
        let first = self.config.began.first_above(self.highest(), now);
        let last = first.saturating_add(self.config.tokens - 1);
        if last > LAST_TOKEN {
            return Step::Lost(Defeat::OutOfTokens);
        }
        self.tokens = first..=last;
        self.is_confirming = true;
        self.deadline = now + self.config.rules.patience;
        let mut holding = Vec::new();
        let below = |ballot: &Ballot| ballot.counter().is_none_or(|fence| fence < first);
        for (master, ballot) in self.ballots.iter_mut().enumerate() {
            if matches!(ballot, Ballot::Voted(Vote::Granted | Vote::Behind(_))) && below(ballot) {
                *ballot = Ballot::Confirming;
                holding.push(master);
            }
        }
        Step::Confirm(self.tokens.clone(), holding)
    }

    #[inline]
    fn won(&self, now: Duration) -> Step {
        if now < self.until {
            Step::Won(self.tokens.clone())
        } else {
            Step::Lost(Defeat::TooLate)
        }
    }

    /// Decides why the round failed. A verdict of `Taken` may have to wait for the `open` masters.
    #[inline]
    fn defeat(&self, open: usize) -> Step {
        let taken = self.count(|ballot| matches!(ballot, Ballot::Voted(Vote::Taken(_))));
        let held = self.count(|ballot| matches!(ballot, Ballot::Voted(Vote::Granted | Vote::Behind(_))));
        // With a majority that holds but has counters left out, the masters needed instead are others'.
        if self.config.rules.blocks(taken) || (taken > 0 && held >= self.config.rules.quorum) {
            let left = self.ballots.iter().filter_map(|ballot| match ballot {
                Ballot::Voted(Vote::Taken(left)) => *left,
                _ => None,
            });
            return Step::Lost(Defeat::Taken(left.min()));
        }
        if self.config.rules.blocks(taken + open) {
            return Step::Wait;
        }
        let abstained = self.count(|ballot| matches!(ballot, Ballot::Voted(Vote::Abstains)));
        let silent = self.count(|ballot| {
            matches!(
                ballot,
                Ballot::Voted(Vote::Silent) | Ballot::Answered(Confirmation::Silent)
            )
        });
        Step::Lost(Defeat::Undecided {
            answered: self.config.rules.masters - silent - open,
            abstained,
        })
    }
}

/// A master's reply to a renewal or a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// Held the lock for this owner, and has renewed or released it.
    Held,
    /// Has no holder.
    Free,
    /// Has another holder.
    Other,
    /// Does not hold it for this owner, and has no vote.
    Abstains,
    /// Sent no valid reply.
    Silent,
}

/// The outcome of a renewal or a release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Wait for replies, until [`deadline`](QuorumCount::deadline).
    Wait,
    /// A majority had it. A renewal may set it anew at the masters to `repair`, while the lease lasts; they count from the
    /// next renewal on. `taken` says whether another master had another holder.
    Held { repair: Vec<usize>, taken: bool },
    /// Somebody else may hold it, since so many masters lack it.
    Lost,
    /// Too few masters replied to decide.
    Undecided { answered: usize },
}

/// A renewal or a release of a hold.
#[derive(Debug)]
pub struct QuorumCount {
    rules: Rules,
    /// Waits for all masters, since those that lack the lock have to be repaired.
    hears_all: bool,
    deadline: Duration,
    reports: Vec<Option<Report>>,
}

impl QuorumCount {
    /// Begins to count a renewal `now`, before a request is sent to every master.
    pub fn of_renewal(rules: Rules, now: Duration) -> Self {
        Self::begin(rules, now, true)
    }

    /// Begins to count a release `now`. It is over when a majority had the lock.
    pub fn of_release(rules: Rules, now: Duration) -> Self {
        Self::begin(rules, now, false)
    }

    #[inline]
    fn begin(rules: Rules, now: Duration, hears_all: bool) -> Self {
        Self {
            rules,
            hears_all,
            deadline: now + rules.patience,
            reports: vec![None; rules.masters],
        }
    }

    /// Returns the moment to call [`tick`](Self::tick) if nothing happens before.
    #[inline]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns the time that the masters have to reply.
    pub fn patience(&self) -> Duration {
        self.rules.patience
    }

    /// Takes in a master's reply. Only its first one counts.
    #[inline]
    pub fn reported(&mut self, master: usize, report: Report) -> Outcome {
        self.reports[master].get_or_insert(report);
        self.outcome()
    }

    /// Takes in the time: after the deadline, masters without a reply are silent.
    #[inline]
    pub fn tick(&mut self, now: Duration) -> Outcome {
        if now >= self.deadline {
            for report in &mut self.reports {
                report.get_or_insert(Report::Silent);
            }
        }
        self.outcome()
    }

    #[inline]
    fn outcome(&self) -> Outcome {
        let count = |which: &[Report]| {
            let counted = self.reports.iter().flatten();
            counted.filter(|report| which.contains(report)).count()
        };
        if self
            .rules
            .blocks(count(&[Report::Free, Report::Other, Report::Abstains]))
        {
            return Outcome::Lost;
        }
        let held = count(&[Report::Held]) >= self.rules.quorum;
        if self.reports.iter().any(Option::is_none) && (self.hears_all || !held) {
            return Outcome::Wait;
        }
        if held {
            let free = |(master, report): (usize, &Option<Report>)| {
                (*report == Some(Report::Free)).then_some(master)
            };
            return Outcome::Held {
                repair: self.reports.iter().enumerate().filter_map(free).collect(),
                taken: count(&[Report::Other]) > 0,
            };
        }
        Outcome::Undecided {
            answered: self.rules.masters - count(&[Report::Silent]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Confirmation::{Raised, Refused},
        Defeat::Outrun,
        Report::{Free, Other},
        Step::{Confirm, Lost, Wait, Won},
        Vote::{Abstains, Behind, Granted},
        *,
    };

    const TTL: Duration = Duration::from_secs(30);
    const PATIENCE: Duration = Duration::from_millis(100);
    /// The beginning of every attempt.
    const START: Duration = Duration::from_secs(1000);

    /// An attempt that proposes the tokens 10 to 12 and does not retry.
    fn begin(masters: usize) -> Attempt {
        Attempt::begin(config(masters, Beginning::new(START, 10)), START, 0)
    }

    fn config(masters: usize, began: Beginning) -> AttemptConfig {
        AttemptConfig {
            rules: Rules::of(masters, PATIENCE),
            began,
            ttl: TTL,
            tokens: 3,
            retry_until: START,
        }
    }

    /// The last step after these votes of masters 0, 1, …
    fn votes(round: &mut Attempt, votes: &[Vote]) -> Step {
        let mut step = Wait;
        for (master, vote) in votes.iter().enumerate() {
            assert_eq!(step, Wait, "before {vote:?}");
            step = round.voted(START, master, *vote);
        }
        step
    }

    fn taken(millis: u64) -> Vote {
        Vote::Taken(Some(Duration::from_millis(millis)))
    }

    #[test]
    fn two_quorums_have_a_master_in_common() {
        for masters in 1..20 {
            let rules = Rules::of(masters, PATIENCE);
            assert!(2 * rules.quorum > masters);
            assert!(rules.quorum <= masters);
        }
    }

    #[test]
    fn a_lease_is_shorter_than_its_time_to_live_by_the_drift() {
        let rules = Rules::of(5, PATIENCE);
        assert_eq!(rules.lease(Duration::from_secs(1)), Duration::from_millis(988));
        assert_eq!(rules.lease(Duration::from_millis(1)), Duration::ZERO);
        assert_eq!(rules.lease(Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn a_majority_of_grants_wins_at_once_with_the_proposed_tokens() {
        let mut round = begin(5);
        let step = votes(&mut round, &[Granted, taken(5), Granted, Granted]);
        assert_eq!(step, Won(10..=12));
        assert_eq!(round.since(), START);
    }

    #[test]
    fn a_majority_that_is_behind_confirms_tokens_above_all_counters() {
        let mut round = begin(5);
        let step = votes(&mut round, &[Granted, Behind(40), Behind(20)]);
        assert_eq!(step, Confirm(41..=43, vec![0, 1, 2]));
        assert_eq!(round.confirmed(START, 0, Raised), Wait);
        assert_eq!(round.confirmed(START, 1, Raised), Wait);
        assert_eq!(round.confirmed(START, 1, Raised), Wait, "said twice");
        assert_eq!(round.confirmed(START, 2, Raised), Won(41..=43));
    }

    #[test]
    fn a_vote_while_others_confirm_is_to_be_confirmed_too() {
        let mut round = begin(5);
        votes(&mut round, &[Granted, Behind(40), Behind(20)]);
        assert_eq!(round.voted(START, 3, Granted), Confirm(41..=43, vec![3]));
        assert_eq!(round.voted(START, 4, Behind(40)), Confirm(41..=43, vec![4]));
        assert_eq!(round.confirmed(START, 0, Refused(50)), Wait);
        assert_eq!(round.confirmed(START, 3, Raised), Wait);
        assert_eq!(round.confirmed(START, 4, Raised), Wait);
        assert_eq!(round.confirmed(START, 1, Confirmation::Silent), Wait);
        assert_eq!(round.confirmed(START, 2, Raised), Won(41..=43));
    }

    #[test]
    fn a_vote_with_a_counter_past_the_tokens_is_a_refusal() {
        let mut round = begin(3);
        votes(&mut round, &[Granted, Behind(40)]);
        assert_eq!(round.voted(START, 2, Behind(41)), Wait);
        assert_eq!(round.highest(), 43);
        assert_eq!(round.confirmed(START, 0, Raised), Wait);
        assert_eq!(round.confirmed(START, 1, Confirmation::Silent), Lost(Outrun));
    }

    #[test]
    fn a_second_vote_of_a_master_does_not_count() {
        let mut round = begin(5);
        let step = votes(&mut round, &[Granted, taken(5), Granted]);
        assert_eq!(step, Wait);
        for again in [Granted, Behind(40)] {
            assert_eq!(round.voted(START, 1, again), Wait, "it said that it is taken");
        }
        for again in [taken(5), Vote::Silent, Abstains, Behind(40)] {
            assert_eq!(round.voted(START, 0, again), Wait, "it granted");
        }
        assert_eq!(round.may_hold(), [0, 2, 3, 4]);
        assert_eq!(round.voted(START, 3, Granted), Won(10..=12));
    }

    #[test]
    fn a_second_vote_of_a_confirming_master_does_not_count() {
        let mut round = begin(3);
        votes(&mut round, &[Granted, Behind(40)]);
        assert_eq!(round.voted(START, 0, Granted), Wait, "it is being asked");
        assert_eq!(round.confirmed(START, 0, Raised), Wait);
        assert_eq!(round.voted(START, 0, Behind(70)), Wait, "it raised");
        assert_eq!(round.confirmed(START, 1, Raised), Won(41..=43));
    }

    #[test]
    fn a_second_confirmation_of_a_master_does_not_count() {
        let mut round = begin(5);
        votes(&mut round, &[Granted, Behind(40), Granted]);
        assert_eq!(round.confirmed(START, 0, Raised), Wait);
        assert_eq!(round.confirmed(START, 1, Refused(50)), Wait);
        assert_eq!(round.confirmed(START, 2, Raised), Wait);
        for again in [Refused(50), Confirmation::Silent] {
            assert_eq!(round.confirmed(START, 0, again), Wait, "it raised");
        }
        assert_eq!(round.confirmed(START, 1, Raised), Wait, "it refused");
        assert_eq!(
            round.confirmed(START, 3, Raised),
            Wait,
            "it has not voted, let alone been asked"
        );
        assert_eq!(round.voted(START, 4, Granted), Confirm(41..=43, vec![4]));
        assert_eq!(round.confirmed(START, 4, Raised), Won(41..=43));
    }

    #[test]
    fn who_lost_gives_it_back_where_it_may_have_it() {
        let mut round = begin(5);
        let step = votes(
            &mut round,
            &[taken(5), Abstains, taken(5), Vote::Silent, taken(5)],
        );
        assert!(matches!(step, Lost(Defeat::Taken(_))));
        // A master that abstains by now may have granted it in a round before.
        assert_eq!(round.may_hold(), [1, 3]);
        let mut round = begin(5);
        assert!(matches!(votes(&mut round, &[taken(5); 3]), Lost(_)));
        assert_eq!(round.may_hold(), [3, 4], "they did not answer");
        for vote in [taken(5), Granted] {
            let master = if vote == Granted { 4 } else { 3 };
            assert!(!matches!(round.voted(START, master, vote), Won(_)), "{vote:?}");
        }
        assert_eq!(round.may_hold(), [4], "they did by now");
    }

    #[test]
    fn tokens_that_others_passed_are_proposed_anew_above_theirs() {
        let mut round = begin(3);
        votes(&mut round, &[Granted, Behind(40)]);
        assert_eq!(round.confirmed(START, 0, Refused(70)), Wait);
        assert_eq!(round.voted(START, 2, Vote::Silent), Wait);
        assert_eq!(round.confirmed(START, 1, Raised), Lost(Outrun));
        assert_eq!(round.highest(), 70);
    }

    #[test]
    fn an_outrun_attempt_retries_until_its_time_is_over() {
        let began = Beginning::new(START, 10);
        let later = START + PATIENCE;
        let mut attempt = Attempt::begin(
            AttemptConfig {
                retry_until: later,
                ..config(3, began)
            },
            START,
            0,
        );
        let mut outrun = |now| {
            assert_eq!(attempt.voted(now, 0, Granted), Wait);
            let step = attempt.voted(now, 1, Behind(100_000_000));
            assert!(matches!(step, Confirm(..)), "{step:?}");
            assert_eq!(attempt.voted(now, 2, Vote::Silent), Wait);
            assert_eq!(attempt.confirmed(now, 0, Raised), Wait);
            let step = attempt.confirmed(now, 1, Refused(200_000_000));
            attempt.retry(later, attempt.seen());
            (step, attempt.since(), attempt.tokens().clone())
        };
        let (step, since, tokens) = outrun(START);
        assert_eq!((step, since), (Step::Retry, later));
        // Ahead of what was seen by one, and by a thousandth of the 100 ms that it has tried.
        assert_eq!(tokens, 200_000_101..=200_000_103);
        assert_eq!(outrun(later).0, Lost(Outrun));
    }

    #[test]
    fn one_that_is_ahead_while_others_are_silent_does_not_tell() {
        let mut round = begin(3);
        votes(&mut round, &[Granted, Behind(40)]);
        assert_eq!(round.confirmed(START, 0, Refused(70)), Wait);
        assert_eq!(round.voted(START, 2, Vote::Silent), Wait);
        let defeat = Defeat::Undecided {
            answered: 1,
            abstained: 0,
        };
        assert_eq!(round.tick(round.deadline()), Lost(defeat));
    }

    /// Somebody has set it.
    const BEYOND: Vote = Behind(u64::MAX);

    #[test]
    fn counters_beyond_the_clocks_are_left_out_of_a_majority() {
        let mut round = begin(3);
        assert_eq!(votes(&mut round, &[BEYOND, Behind(40)]), Wait);
        assert_eq!(round.voted(START, 2, Granted), Confirm(41..=43, vec![1, 2]));
        assert_eq!(round.highest(), 43);
        assert_eq!(round.left_out(), [(0, u64::MAX)]);
        assert_eq!(round.confirmed(START, 1, Raised), Wait);
        assert_eq!(round.confirmed(START, 2, Raised), Won(41..=43));
        let mut round = begin(5);
        let step = votes(&mut round, &[BEYOND, BEYOND, Granted, Granted]);
        assert_eq!(step, Wait);
        assert_eq!(round.voted(START, 4, Granted), Won(10..=12));
    }

    #[test]
    fn a_counter_that_is_set_while_tokens_are_confirmed_is_left_out() {
        let confirming = || {
            let mut round = begin(5);
            votes(&mut round, &[Granted, Behind(40), Granted]);
            assert_eq!(round.voted(START, 3, BEYOND), Wait);
            let set = Refused(LAST_CLOCK);
            assert_eq!(round.confirmed(START, 0, set), Wait);
            assert_eq!(round.highest(), 43);
            assert_eq!(round.left_out(), [(0, LAST_CLOCK), (3, u64::MAX)]);
            assert_eq!(round.confirmed(START, 1, Raised), Wait);
            assert_eq!(round.confirmed(START, 2, Raised), Wait);
            round
        };
        assert!(matches!(
            confirming().voted(START, 4, Vote::Silent),
            Lost(Defeat::Undecided {
                answered: 4,
                abstained: 0
            })
        ));
        let mut round = confirming();
        assert_eq!(round.voted(START, 4, Granted), Confirm(41..=43, vec![4]));
        assert_eq!(round.confirmed(START, 4, Raised), Won(41..=43));
    }

    #[test]
    fn counters_beyond_the_clocks_count_if_a_majority_has_them() {
        let real = LAST_CLOCK + 5;
        let mut round = begin(3);
        let step = votes(&mut round, &[Behind(LAST_CLOCK), Behind(real)]);
        assert_eq!(step, Confirm(real + 1..=real + 3, vec![0, 1]));
        assert_eq!(round.left_out(), []);
        // It may be one of a majority, of which the others are silent.
        let mut round = begin(5);
        let step = votes(&mut round, &[Behind(real), Behind(real), Granted, Granted]);
        assert_eq!(step, Wait);
        let defeat = Defeat::Undecided {
            answered: 4,
            abstained: 0,
        };
        assert_eq!(round.voted(START, 4, Vote::Silent), Lost(defeat));
        assert_eq!(round.left_out(), [(0, real), (1, real)]);
        // There is no token above this one.
        let mut round = begin(3);
        let step = votes(&mut round, &[BEYOND, BEYOND]);
        assert_eq!(step, Lost(Defeat::OutOfTokens));
        assert_eq!(round.may_hold(), [0, 1, 2]);
        assert_eq!(round.seen(), 0, "it is no minimum for other locks");
    }

    #[test]
    fn a_counter_beyond_the_clocks_leaves_masters_divided() {
        let step = votes(&mut begin(3), &[BEYOND, taken(30), Granted]);
        assert_eq!(step, Lost(Defeat::Taken(Some(Duration::from_millis(30)))));
        // The silent one may have the same holder.
        let step = votes(&mut begin(3), &[BEYOND, taken(30), Vote::Silent]);
        assert!(matches!(step, Lost(Defeat::Undecided { .. })), "{step:?}");
    }

    #[test]
    fn tokens_to_confirm_are_ahead_of_the_clock_by_the_time_it_took() {
        let confirmed_at = |at: Duration, after: Duration, seen: u64| {
            let began = Beginning::new(at, 10);
            let mut round = Attempt::begin(config(3, began), START, 0);
            assert_eq!(round.voted(START, 0, Behind(seen)), Wait);
            match round.voted(START + after, 1, Granted) {
                Confirm(tokens, _) => tokens,
                step => panic!("{step:?}"),
            }
        };
        let three = Duration::from_millis(3);
        assert_eq!(confirmed_at(START, three, 40), 6_010..=6_012);
        assert_eq!(
            confirmed_at(START.saturating_sub(three), three, 40),
            12_010..=12_012
        );
        let minute = Duration::from_secs(60);
        assert_eq!(confirmed_at(START, minute, 40), 70_000_010..=70_000_012);
        // A counter that is ahead of the clock does not get further ahead with everyone who sees it.
        assert_eq!(confirmed_at(START, three, 9_000), 9_004..=9_006);
    }

    #[test]
    fn a_lease_over_before_confirmation_is_not_outrun() {
        let end = START + Rules::of(3, PATIENCE).lease(TTL);
        let mut round = begin(3);
        votes(&mut round, &[Granted, Behind(40)]);
        assert_eq!(round.confirmed(end, 0, Refused(40)), Wait);
        assert_eq!(round.confirmed(end, 1, Refused(40)), Lost(Defeat::TooLate));
    }

    #[test]
    fn whoever_has_enough_to_decide_it_has_it() {
        let step = votes(&mut begin(5), &[taken(30), Granted, taken(20), taken(40)]);
        assert_eq!(step, Lost(Defeat::Taken(Some(Duration::from_millis(20)))));
    }

    #[test]
    fn a_taken_lock_is_taken_though_a_dead_master_is_quicker() {
        let mut round = begin(3);
        assert_eq!(votes(&mut round, &[Vote::Silent, taken(30)]), Wait);
        assert_eq!(
            round.voted(START, 2, taken(40)),
            Lost(Defeat::Taken(Some(Duration::from_millis(30))))
        );
        let mut round = begin(3);
        assert_eq!(votes(&mut round, &[Vote::Silent, taken(30)]), Wait);
        let defeat = Defeat::Undecided {
            answered: 1,
            abstained: 0,
        };
        assert_eq!(round.tick(round.deadline()), Lost(defeat));
    }

    #[test]
    fn without_a_majority_nothing_is_waited_for() {
        let step = votes(&mut begin(5), &[Vote::Silent, Abstains, Vote::Silent]);
        let defeat = Defeat::Undecided {
            answered: 1,
            abstained: 1,
        };
        assert_eq!(step, Lost(defeat));
    }

    #[test]
    fn patience_begins_anew_with_the_confirmation() {
        let mut round = begin(3);
        let late = START + PATIENCE / 2;
        assert_eq!(round.tick(late), Wait);
        assert_eq!(round.voted(late, 0, Behind(40)), Wait);
        assert!(matches!(round.voted(late, 1, Granted), Confirm(..)));
        assert_eq!(round.deadline(), late + PATIENCE);
        assert_eq!(round.tick(START + PATIENCE), Wait);
        assert_eq!(round.confirmed(late, 0, Raised), Wait);
        let defeat = Defeat::Undecided {
            answered: 1,
            abstained: 0,
        };
        assert_eq!(round.tick(late + PATIENCE), Lost(defeat));
    }

    #[test]
    fn a_lease_that_is_over_is_not_won() {
        let end = START + Rules::of(3, PATIENCE).lease(TTL);
        let mut round = begin(3);
        assert_eq!(round.voted(START, 0, Granted), Wait);
        assert_eq!(round.voted(end, 1, Granted), Lost(Defeat::TooLate));
        let mut round = begin(3);
        assert_eq!(round.voted(START, 0, Granted), Wait);
        let just = end.saturating_sub(Duration::from_nanos(1));
        assert_eq!(round.voted(just, 1, Granted), Won(10..=12));
    }

    /// A round ends, for any replies, in any order, after any time. It is won only by a majority that holds the lock and raised
    /// its counter to these very tokens. It is taken only if others' holds may have decided it.
    #[test]
    fn no_order_of_answers_wins_without_a_majority() {
        for seed in 0..20_000 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let masters = [1, 3, 5, 7][rng.usize(..4)];
            let rules = Rules::of(masters, PATIENCE);
            let mut round = begin(masters);
            let (mut tokens, mut now) = (10..=12, START);
            let mut raised = vec![false; masters];
            let mut confirming: Vec<usize> = Vec::new();
            let mut asked: Vec<usize> = (0..masters).collect();
            let (mut others, mut left_out) = (0, 0);
            let mut step = Wait;
            for _ in 0..4 * masters {
                now += Duration::from_millis(rng.u64(..5));
                step = if !confirming.is_empty() && rng.bool() {
                    let master = confirming.swap_remove(rng.usize(..confirming.len()));
                    let answer = match rng.u8(..4) {
                        0 => Refused(rng.u64(..100)),
                        1 => Confirmation::Silent,
                        _ => Raised,
                    };
                    raised[master] = answer == Raised;
                    round.confirmed(now, master, answer)
                } else if !asked.is_empty() {
                    let master = asked.swap_remove(rng.usize(..asked.len()));
                    let vote = match rng.u8(..8) {
                        0 => Vote::Silent,
                        1 => Abstains,
                        2 | 3 => taken(5),
                        4 if rng.u8(..4) == 0 => Behind(LAST_CLOCK + rng.u64(..50)),
                        4 | 5 => Behind(10 + rng.u64(..50)),
                        _ => Granted,
                    };
                    raised[master] = vote == Granted && *tokens.start() == 10;
                    others += usize::from(vote == taken(5));
                    left_out += usize::from(matches!(vote, Behind(fence) if is_beyond(fence)));
                    round.voted(now, master, vote)
                } else {
                    now = now.max(round.deadline());
                    round.tick(now)
                };
                match &step {
                    Wait => {}
                    Confirm(proposed, these) => {
                        if tokens != *proposed {
                            assert!(*proposed.start() > *tokens.end(), "seed {seed}");
                            raised.fill(false);
                            tokens = proposed.clone();
                        }
                        confirming.extend(these);
                    }
                    Won(_) | Step::Retry | Lost(_) => break,
                }
            }
            match step {
                Won(won) => {
                    assert_eq!(won, tokens, "seed {seed}");
                    let enough = raised.iter().filter(|raised| **raised).count() >= rules.quorum;
                    assert!(enough, "seed {seed}");
                }
                Lost(Defeat::Taken(_)) => {
                    let enough = others + rules.quorum > masters || left_out > 0;
                    assert!(others > 0 && enough, "seed {seed}");
                }
                Lost(_) => {}
                step => panic!("seed {seed}: still at {step:?}"),
            }
        }
    }

    /// Each master votes for one of two. However they are split, and in any order of replies, one of the two wins: that with
    /// more masters.
    #[test]
    fn of_two_at_most_one_wins() {
        for seed in 0..5_000 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let masters = [3, 5, 7][rng.usize(..3)];
            let holders: Vec<bool> = (0..masters).map(|_| rng.bool()).collect();
            let verdict = |me: bool, rng: &mut fastrand::Rng| {
                let mut order: Vec<usize> = (0..masters).collect();
                rng.shuffle(&mut order);
                let mut round = begin(masters);
                let mut steps = order.into_iter().map(|master| {
                    let vote = if holders[master] == me { Granted } else { taken(5) };
                    round.voted(START, master, vote)
                });
                steps.find(|step| *step != Wait)
            };
            let mine = holders.iter().filter(|holder| **holder).count();
            let won = |step| matches!(step, Some(Won(_)));
            let lost = |step| matches!(step, Some(Lost(Defeat::Taken(_))));
            let (first, second) = (verdict(true, &mut rng), verdict(false, &mut rng));
            if mine > masters / 2 {
                assert!(won(first) && lost(second), "seed {seed}");
            } else {
                assert!(lost(first) && won(second), "seed {seed}");
            }
        }
    }

    fn held(repair: &[usize], taken: bool) -> Outcome {
        let repair = repair.to_vec();
        Outcome::Held { repair, taken }
    }

    #[test]
    fn who_won_hears_of_those_that_lack_it() {
        let mut round = begin(5);
        assert!(matches!(votes(&mut round, &[Granted; 3]), Won(_)));
        assert!(!round.lacks_masters());
        for vote in [Vote::Silent, taken(5)] {
            assert!(!round.lacks_masters(), "{vote:?}");
            let master = if vote == Vote::Silent { 3 } else { 4 };
            round.voted(START, master, vote);
        }
        assert!(round.lacks_masters());
        let mut round = begin(5);
        let step = votes(&mut round, &[taken(5), Granted, Granted, Granted]);
        assert!(matches!(step, Won(_)) && round.lacks_masters());
    }

    #[test]
    fn a_renewal_tells_who_is_to_be_repaired_and_who_may_be_later() {
        let mut count = QuorumCount::of_renewal(Rules::of(7, PATIENCE), START);
        for master in 0..4 {
            count.reported(master, Report::Held);
        }
        count.reported(4, Free);
        count.reported(5, Report::Abstains);
        let mut other = QuorumCount {
            reports: count.reports.clone(),
            ..QuorumCount::of_renewal(Rules::of(7, PATIENCE), START)
        };
        assert_eq!(count.reported(6, Report::Silent), held(&[4], false));
        assert_eq!(other.reported(6, Other), held(&[4], true));
    }

    #[test]
    fn a_renewal_hears_all_who_may_lack_it() {
        let mut count = QuorumCount::of_renewal(Rules::of(5, PATIENCE), START);
        for master in 0..3 {
            assert_eq!(count.reported(master, Report::Held), Outcome::Wait);
        }
        assert_eq!(count.reported(3, Free), Outcome::Wait);
        assert_eq!(count.tick(START), Outcome::Wait);
        assert_eq!(count.tick(count.deadline()), held(&[3], false));
    }

    #[test]
    fn a_release_is_over_when_a_majority_had_it() {
        let mut count = QuorumCount::of_release(Rules::of(5, PATIENCE), START);
        assert_eq!(count.reported(0, Free), Outcome::Wait);
        assert_eq!(count.reported(1, Report::Held), Outcome::Wait);
        assert_eq!(count.reported(2, Report::Held), Outcome::Wait);
        assert_eq!(count.reported(2, Report::Held), Outcome::Wait, "said twice");
        assert_eq!(count.reported(3, Report::Held), held(&[0], false));
    }

    #[test]
    fn a_second_report_of_a_master_does_not_count() {
        let mut count = QuorumCount::of_release(Rules::of(3, PATIENCE), START);
        assert_eq!(count.reported(0, Free), Outcome::Wait);
        assert_eq!(count.reported(0, Report::Held), Outcome::Wait);
        assert_eq!(count.reported(1, Report::Held), Outcome::Wait);
        assert_eq!(count.reported(1, Free), Outcome::Wait);
        assert_eq!(count.reported(2, Report::Held), held(&[0], false));
    }

    #[test]
    fn what_a_majority_may_lack_is_lost() {
        for lacking in [Free, Other, Report::Abstains] {
            let mut count = QuorumCount::of_renewal(Rules::of(3, PATIENCE), START);
            assert_eq!(count.reported(0, Other), Outcome::Wait);
            assert_eq!(count.reported(1, lacking), Outcome::Lost);
            assert_eq!(count.reported(2, Report::Held), Outcome::Lost);
        }
    }

    #[test]
    fn silence_is_no_loss() {
        let mut count = QuorumCount::of_renewal(Rules::of(5, PATIENCE), START);
        count.reported(0, Report::Held);
        count.reported(1, Report::Held);
        count.reported(2, Free);
        count.reported(3, Other);
        assert_eq!(count.tick(count.deadline()), Outcome::Undecided { answered: 4 });
        assert_eq!(
            count.reported(4, Report::Held),
            Outcome::Undecided { answered: 4 },
            "too late"
        );
    }
}
