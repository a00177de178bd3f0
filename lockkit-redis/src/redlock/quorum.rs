//! Redlock's decisions, without I/O: what the answers of the masters add up to.
//!
//! Time comes in as the span since some moment of the caller's own clock, requests go out as values. So the simulator
//! runs this very file, on clocks that drift and over networks that lose what they carry.
//!
//! An acquisition proposes its fencing tokens along with its vote: each master that is free takes the lock *and* raises
//! its counter to them, in one step. If a majority did both, that was all: any earlier acquisition that was confirmed
//! had raised the counter at one of the same masters, so the tokens are above its own, and no other can ever have the
//! same ones. Where a counter already stood higher, the lock is held but the tokens are not; a second round then
//! proposes tokens above every counter seen, and a majority has to raise to those. They are ahead of the clock by as much
//! as the counters may have risen when they arrive: whoever is far from the masters is let in with shared holders who are
//! near.
//!
//! Counters that no clock has reached are left out if the others are a majority: somebody has set them. What makes a token
//! new is that a majority has raised to it from below, whatever it was proposed from, so it stays above all that were
//! confirmed. A counter of those that was confirmed is the counter of a majority, and then the others are none.
//!
//! The first round is [Redlock](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/). What it
//! lacks without tokens is [Martin Kleppmann's](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html)
//! objection.

use std::{ops::RangeInclusive, time::Duration};

/// What every round goes by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) masters: usize,
    /// How many of them decide: any two quorums have a master in common.
    pub(crate) quorum: usize,
    /// For how long a master's answer is waited for, in each phase.
    pub(crate) patience: Duration,
    /// By how much two clocks may differ over a lease: a part of it in ppm, and a fixed rest.
    pub(crate) drift: (u32, Duration),
}

impl Rules {
    /// Those of Redlock: more than half of the masters, and an allowance of 1 % and 2 ms for drift.
    pub(crate) fn of(masters: usize, patience: Duration) -> Self {
        Self {
            masters,
            quorum: masters / 2 + 1,
            patience,
            drift: (10_000, Duration::from_millis(2)),
        }
    }

    /// What a time to live at the masters is worth to whoever set it, from before the request was sent.
    pub(crate) fn lease(&self, ttl: Duration) -> Duration {
        let (ppm, rest) = self.drift;
        ttl.saturating_sub(ttl.mul_f64(f64::from(ppm) / 1e6) + rest)
    }

    /// So many answers of one kind leave no quorum for the other.
    fn blocks(&self, answers: usize) -> bool {
        self.masters - answers.min(self.masters) < self.quorum
    }
}

/// About the year 2100, in µs: a clock, or a counter, that has been set to this or more must not use up the numbers.
pub(crate) const LAST_CLOCK: u64 = (1 << 52) - (1 << 48);

/// The beginning of an acquisition, which is that of its first round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beginning {
    pub(crate) at: Duration,
    /// The time that the clock of its machine showed then, in µs.
    clock: u64,
}

impl Beginning {
    pub(crate) fn new(at: Duration, clock: u64) -> Self {
        let clock = if clock < LAST_CLOCK { clock } else { 0 };
        Self { at, clock }
    }

    /// The first token to propose `now`, above those that were `seen`.
    ///
    /// Others raise the counters with the time, and have done so again when it arrives: it is ahead of the clock by as much
    /// as it took so far. If it were ahead of what was seen by that, and others of it by theirs, the counters would leave
    /// the clocks behind. Of those that have done so it is ahead by a thousandth of that.
    pub(crate) fn first_above(&self, seen: u64, now: Duration) -> u64 {
        const MOST: Duration = Duration::from_secs(10);

        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or_default();
        let tried = now.saturating_sub(self.at);
        let ahead = micros(tried.min(MOST));
        let above = seen.saturating_add(1 + ahead / 1000);
        above.max(self.clock + micros(tried) + ahead)
    }
}

/// A master's answer to a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    /// Held, and the counter raised to the proposed tokens.
    Granted,
    /// Held, but the counter stands at this, so the proposed tokens may be somebody's.
    Behind(u64),
    /// Somebody else has it, for so long unless it is renewed.
    Taken(Option<Duration>),
    /// It may have lost what it once granted, and keeps out of votes for a while.
    Abstains,
    /// No answer, or one that is none.
    Silent,
}

/// A master's answer to tokens that it is to confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Confirmation {
    /// Still held, and the counter raised.
    Raised,
    /// Not held any more, or the counter stands at this by now.
    Refused(u64),
    Silent,
}

/// What to do next in an acquisition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Wait for answers, until [`deadline`](QuorumRound::deadline).
    Wait,
    /// Have these masters confirm these tokens.
    Confirm(RangeInclusive<u64>, Vec<usize>),
    /// It is held, with these tokens, from when the round began.
    Won(RangeInclusive<u64>),
    /// It is not. Every master that [may hold](QuorumRound::may_hold) it is to release it.
    Lost(Defeat),
}

/// Why an acquisition came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defeat {
    /// Another holder has so many masters that it is not to be had. The first of those leases to end does so then.
    Taken(Option<Duration>),
    /// The lock was to be had at a majority but not the tokens, which another acquisition was after as well.
    Outrun,
    /// Too few masters took part to tell.
    Undecided { answered: usize, abstained: usize },
    /// It took so long that nothing is left of the lease.
    TooLate,
}

/// One round of an acquisition, which takes another where it was outrun.
#[derive(Debug)]
pub(crate) struct QuorumRound {
    rules: Rules,
    began: Beginning,
    since: Duration,
    /// When a hold that began with it would end.
    until: Duration,
    tokens: RangeInclusive<u64>,
    confirms: bool,
    deadline: Duration,
    seats: Vec<Seat>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seat {
    /// Asked for its vote.
    Asked,
    Voted(Vote),
    /// Asked to confirm.
    Confirming,
    Answered(Confirmation),
}

impl Seat {
    /// The counter of this master, if it named it.
    fn counter(&self) -> Option<u64> {
        match self {
            Self::Voted(Vote::Behind(fence)) | Self::Answered(Confirmation::Refused(fence)) => Some(*fence),
            _ => None,
        }
    }

    fn is_beyond(&self) -> bool {
        self.counter().is_some_and(is_beyond)
    }
}

/// No clock has reached it.
fn is_beyond(counter: u64) -> bool {
    counter >= LAST_CLOCK
}

impl QuorumRound {
    /// Begins it `now`: before the first byte of a proposal is sent, which then goes to every master. The acquisition
    /// `began` with this round, or with one that was outrun.
    pub(crate) fn begin(
        rules: Rules,
        began: Beginning,
        now: Duration,
        ttl: Duration,
        tokens: RangeInclusive<u64>,
    ) -> Self {
        Self {
            rules,
            began,
            since: now,
            until: now + rules.lease(ttl),
            tokens,
            confirms: false,
            deadline: now + rules.patience,
            seats: vec![Seat::Asked; rules.masters],
        }
    }

    /// From when its lease counts.
    pub(crate) fn since(&self) -> Duration {
        self.since
    }

    /// When to say [`tick`](Self::tick) if nothing else happens.
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The highest counter that a master named and that counts, or the tokens that were proposed.
    pub(crate) fn highest(&self) -> u64 {
        let left_out = self.left_out();
        let counts = |(master, seat): (usize, &Seat)| {
            let fence = seat.counter()?;
            (!left_out.contains(&(master, fence))).then_some(fence)
        };
        let seen = self.seats.iter().enumerate().filter_map(counts);
        seen.fold(*self.tokens.end(), u64::max)
    }

    /// The masters whose counters do not count, and where they stand.
    pub(crate) fn left_out(&self) -> Vec<(usize, u64)> {
        let leaves_out = self.leaves_out();
        let beyond = |(master, seat): (usize, &Seat)| {
            let fence = seat.counter().filter(|fence| leaves_out && is_beyond(*fence))?;
            Some((master, fence))
        };
        self.seats.iter().enumerate().filter_map(beyond).collect()
    }

    /// Counters beyond the clocks do not count: so few masters have one that the others may be a majority.
    fn leaves_out(&self) -> bool {
        !is_beyond(*self.tokens.start()) && !self.rules.blocks(self.count(Seat::is_beyond))
    }

    /// The masters that may have it by now: those that did not answer, too, but not those where somebody else has it.
    pub(crate) fn may_hold(&self) -> Vec<usize> {
        let may_hold = |(master, seat): (usize, &Seat)| {
            let is_taken = matches!(seat, Seat::Voted(Vote::Taken(_)));
            (!is_taken).then_some(master)
        };
        self.seats.iter().enumerate().filter_map(may_hold).collect()
    }

    /// Some master is known to lack what was won: somebody else has it there. Those that have not answered may yet say so.
    pub(crate) fn is_short(&self) -> bool {
        let lacks = |seat: &Seat| {
            matches!(
                seat,
                Seat::Voted(Vote::Taken(_)) | Seat::Answered(Confirmation::Refused(_))
            )
        };
        self.seats.iter().any(lacks)
    }

    /// A master voted.
    pub(crate) fn voted(&mut self, now: Duration, master: usize, vote: Vote) -> Step {
        if self.seats[master] != Seat::Asked {
            return Step::Wait;
        }
        self.seats[master] = match vote {
            Vote::Granted if self.confirms => Seat::Confirming,
            Vote::Behind(fence) if self.confirms && fence < *self.tokens.start() => Seat::Confirming,
            Vote::Behind(fence) if self.confirms => Seat::Answered(Confirmation::Refused(fence)),
            vote => Seat::Voted(vote),
        };
        if self.seats[master] == Seat::Confirming {
            return Step::Confirm(self.tokens.clone(), vec![master]);
        }
        self.next(now)
    }

    /// A master answered to [`Step::Confirm`].
    pub(crate) fn confirmed(&mut self, now: Duration, master: usize, answer: Confirmation) -> Step {
        if self.seats[master] != Seat::Confirming {
            return Step::Wait;
        }
        self.seats[master] = Seat::Answered(answer);
        self.next(now)
    }

    /// Time has passed: whoever did not answer by the deadline will not.
    pub(crate) fn tick(&mut self, now: Duration) -> Step {
        if now < self.deadline {
            return Step::Wait;
        }
        for seat in &mut self.seats {
            match seat {
                Seat::Asked => *seat = Seat::Voted(Vote::Silent),
                Seat::Confirming => *seat = Seat::Answered(Confirmation::Silent),
                _ => {}
            }
        }
        self.next(now)
    }

    fn count(&self, counted: impl Fn(&Seat) -> bool) -> usize {
        self.seats.iter().filter(|seat| counted(seat)).count()
    }

    fn next(&mut self, now: Duration) -> Step {
        if self.confirms {
            return self.next_confirming(now);
        }
        let granted = self.count(|seat| matches!(seat, Seat::Voted(Vote::Granted)));
        if granted >= self.rules.quorum {
            return self.won(now);
        }
        let beyond = self.count(Seat::is_beyond);
        let behind = self.count(|seat| matches!(seat, Seat::Voted(Vote::Behind(_))));
        // A majority has to raise, and those that are left out do not.
        let held = |beyond_count: bool| granted + behind - if beyond_count { 0 } else { beyond };
        if held(!self.leaves_out()) >= self.rules.quorum {
            return self.begin_confirming(now);
        }
        let open = self.count(|seat| *seat == Seat::Asked);
        // By then so many may be beyond that they count.
        if held(self.rules.blocks(beyond + open)) + open >= self.rules.quorum {
            return Step::Wait;
        }
        self.defeat(open)
    }

    fn next_confirming(&self, now: Duration) -> Step {
        let raised = self.count(|seat| *seat == Seat::Answered(Confirmation::Raised));
        if raised >= self.rules.quorum {
            return self.won(now);
        }
        let open = self.count(|seat| matches!(seat, Seat::Asked | Seat::Confirming));
        if raised + open >= self.rules.quorum {
            return Step::Wait;
        }
        let leaves_out = self.leaves_out();
        let refused = self.count(|seat| {
            let is_refusal = matches!(seat, Seat::Answered(Confirmation::Refused(_)));
            is_refusal && !(leaves_out && seat.is_beyond())
        });
        if refused > 0 && raised + refused >= self.rules.quorum {
            let is_over = now >= self.until;
            return Step::Lost(if is_over { Defeat::TooLate } else { Defeat::Outrun });
        }
        if refused > 0 && raised + refused + open >= self.rules.quorum {
            return Step::Wait;
        }
        self.defeat(open)
    }

    fn begin_confirming(&mut self, now: Duration) -> Step {
        let tokens = self.tokens.end() - self.tokens.start();
        let first = self.began.first_above(self.highest(), now);
        self.tokens = first..=first.saturating_add(tokens);
        self.confirms = true;
        self.deadline = now + self.rules.patience;
        let mut holding = Vec::new();
        let below = |seat: &Seat| seat.counter().is_none_or(|fence| fence < first);
        for (master, seat) in self.seats.iter_mut().enumerate() {
            if matches!(seat, Seat::Voted(Vote::Granted | Vote::Behind(_))) && below(seat) {
                *seat = Seat::Confirming;
                holding.push(master);
            }
        }
        Step::Confirm(self.tokens.clone(), holding)
    }

    fn won(&self, now: Duration) -> Step {
        if now < self.until {
            Step::Won(self.tokens.clone())
        } else {
            Step::Lost(Defeat::TooLate)
        }
    }

    /// It cannot be won any more. Whether it is taken may yet be to be heard.
    fn defeat(&self, open: usize) -> Step {
        let taken = self.count(|seat| matches!(seat, Seat::Voted(Vote::Taken(_))));
        let held = self.count(|seat| matches!(seat, Seat::Voted(Vote::Granted | Vote::Behind(_))));
        // A majority that holds and does not count has some that are left out, and others have what it would need instead.
        if self.rules.blocks(taken) || (taken > 0 && held >= self.rules.quorum) {
            let left = self.seats.iter().filter_map(|seat| match seat {
                Seat::Voted(Vote::Taken(left)) => *left,
                _ => None,
            });
            return Step::Lost(Defeat::Taken(left.min()));
        }
        if self.rules.blocks(taken + open) {
            return Step::Wait;
        }
        let abstained = self.count(|seat| matches!(seat, Seat::Voted(Vote::Abstains)));
        let silent = self.count(|seat| {
            matches!(
                seat,
                Seat::Voted(Vote::Silent) | Seat::Answered(Confirmation::Silent)
            )
        });
        Step::Lost(Defeat::Undecided {
            answered: self.rules.masters - silent - open,
            abstained,
        })
    }
}

/// A master's answer to a renewal, or to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// It was held there, and is renewed or released now.
    Held,
    /// It is not held there, by nobody.
    Free,
    /// Somebody else has it.
    Other,
    /// It is not held there, and the master keeps out of votes.
    Abstains,
    /// No answer, or one that is none.
    Silent,
}

/// What the answers to a renewal or a release add up to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Wait for answers, until [`deadline`](QuorumCount::deadline).
    Wait,
    /// A majority had it. After a renewal it may be set anew at these masters, as long as the lease lasts: they are not
    /// counted before the next one. Somebody else may have had it at others.
    Held { repair: Vec<usize>, taken: bool },
    /// So many do not have it that somebody else may.
    Lost,
    /// Too few answered to tell.
    Undecided { answered: usize },
}

/// One renewal or release of a hold.
#[derive(Debug)]
pub(crate) struct QuorumCount {
    rules: Rules,
    /// A master that lacks the lock is to be repaired, however late it says so.
    hears_all: bool,
    deadline: Duration,
    reports: Vec<Option<Report>>,
}

impl QuorumCount {
    /// A renewal that begins `now`: before the first byte of a request is sent, which then goes to every master.
    pub(crate) fn of_renewal(rules: Rules, now: Duration) -> Self {
        Self::begin(rules, now, true)
    }

    /// A release that begins `now`, and is over when a majority had the lock.
    pub(crate) fn of_release(rules: Rules, now: Duration) -> Self {
        Self::begin(rules, now, false)
    }

    fn begin(rules: Rules, now: Duration, hears_all: bool) -> Self {
        Self {
            rules,
            hears_all,
            deadline: now + rules.patience,
            reports: vec![None; rules.masters],
        }
    }

    /// When to say [`tick`](Self::tick) if nothing else happens.
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// A master answered.
    pub(crate) fn reported(&mut self, master: usize, report: Report) -> Outcome {
        self.reports[master].get_or_insert(report);
        self.outcome()
    }

    /// Time has passed: whoever did not answer by the deadline will not.
    pub(crate) fn tick(&mut self, now: Duration) -> Outcome {
        if now >= self.deadline {
            for report in &mut self.reports {
                report.get_or_insert(Report::Silent);
            }
        }
        self.outcome()
    }

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
    use super::*;

    const TTL: Duration = Duration::from_secs(30);
    const PATIENCE: Duration = Duration::from_millis(100);
    /// When everybody begins.
    const START: Duration = Duration::from_secs(1000);

    fn begin(masters: usize) -> QuorumRound {
        let began = Beginning::new(START, 10);
        QuorumRound::begin(Rules::of(masters, PATIENCE), began, START, TTL, 10..=12)
    }

    /// The last step after these votes of masters 0, 1, …
    fn votes(round: &mut QuorumRound, votes: &[Vote]) -> Step {
        let mut step = Step::Wait;
        for (master, vote) in votes.iter().enumerate() {
            assert_eq!(step, Step::Wait, "before {vote:?}");
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
        let step = votes(
            &mut round,
            &[Vote::Granted, taken(5), Vote::Granted, Vote::Granted],
        );
        assert_eq!(step, Step::Won(10..=12));
        assert_eq!(round.since(), START);
    }

    #[test]
    fn a_majority_that_is_behind_confirms_tokens_above_all_counters() {
        let mut round = begin(5);
        let step = votes(&mut round, &[Vote::Granted, Vote::Behind(40), Vote::Behind(20)]);
        assert_eq!(step, Step::Confirm(41..=43, vec![0, 1, 2]));
        assert_eq!(round.confirmed(START, 0, Confirmation::Raised), Step::Wait);
        assert_eq!(round.confirmed(START, 1, Confirmation::Raised), Step::Wait);
        assert_eq!(
            round.confirmed(START, 1, Confirmation::Raised),
            Step::Wait,
            "said twice"
        );
        assert_eq!(
            round.confirmed(START, 2, Confirmation::Raised),
            Step::Won(41..=43)
        );
    }

    #[test]
    fn a_vote_that_comes_while_others_confirm_is_to_be_confirmed_too() {
        let mut round = begin(5);
        votes(&mut round, &[Vote::Granted, Vote::Behind(40), Vote::Behind(20)]);
        assert_eq!(
            round.voted(START, 3, Vote::Granted),
            Step::Confirm(41..=43, vec![3])
        );
        assert_eq!(
            round.voted(START, 4, Vote::Behind(40)),
            Step::Confirm(41..=43, vec![4])
        );
        assert_eq!(round.confirmed(START, 0, Confirmation::Refused(50)), Step::Wait);
        assert_eq!(round.confirmed(START, 3, Confirmation::Raised), Step::Wait);
        assert_eq!(round.confirmed(START, 4, Confirmation::Raised), Step::Wait);
        assert_eq!(round.confirmed(START, 1, Confirmation::Silent), Step::Wait);
        assert_eq!(
            round.confirmed(START, 2, Confirmation::Raised),
            Step::Won(41..=43)
        );
    }

    #[test]
    fn a_vote_with_a_counter_that_has_passed_the_tokens_is_a_refusal() {
        let mut round = begin(3);
        votes(&mut round, &[Vote::Granted, Vote::Behind(40)]);
        assert_eq!(round.voted(START, 2, Vote::Behind(41)), Step::Wait);
        assert_eq!(round.highest(), 43);
        assert_eq!(round.confirmed(START, 0, Confirmation::Raised), Step::Wait);
        assert_eq!(
            round.confirmed(START, 1, Confirmation::Silent),
            Step::Lost(Defeat::Outrun)
        );
    }

    #[test]
    fn a_second_vote_of_a_master_does_not_count() {
        let mut round = begin(5);
        let step = votes(&mut round, &[Vote::Granted, taken(5), Vote::Granted]);
        assert_eq!(step, Step::Wait);
        for again in [Vote::Granted, Vote::Behind(40)] {
            assert_eq!(
                round.voted(START, 1, again),
                Step::Wait,
                "it said that it is taken"
            );
        }
        for again in [taken(5), Vote::Silent, Vote::Abstains, Vote::Behind(40)] {
            assert_eq!(round.voted(START, 0, again), Step::Wait, "it granted");
        }
        assert_eq!(round.may_hold(), [0, 2, 3, 4]);
        assert_eq!(round.voted(START, 3, Vote::Granted), Step::Won(10..=12));
    }

    #[test]
    fn a_second_vote_of_a_master_that_confirms_is_not_asked_about_again() {
        let mut round = begin(3);
        votes(&mut round, &[Vote::Granted, Vote::Behind(40)]);
        assert_eq!(
            round.voted(START, 0, Vote::Granted),
            Step::Wait,
            "it is being asked"
        );
        assert_eq!(round.confirmed(START, 0, Confirmation::Raised), Step::Wait);
        assert_eq!(round.voted(START, 0, Vote::Behind(70)), Step::Wait, "it raised");
        assert_eq!(
            round.confirmed(START, 1, Confirmation::Raised),
            Step::Won(41..=43)
        );
    }

    #[test]
    fn a_second_confirmation_of_a_master_does_not_count() {
        let mut round = begin(5);
        votes(&mut round, &[Vote::Granted, Vote::Behind(40), Vote::Granted]);
        assert_eq!(round.confirmed(START, 0, Confirmation::Raised), Step::Wait);
        assert_eq!(round.confirmed(START, 1, Confirmation::Refused(50)), Step::Wait);
        assert_eq!(round.confirmed(START, 2, Confirmation::Raised), Step::Wait);
        for again in [Confirmation::Refused(50), Confirmation::Silent] {
            assert_eq!(round.confirmed(START, 0, again), Step::Wait, "it raised");
        }
        assert_eq!(
            round.confirmed(START, 1, Confirmation::Raised),
            Step::Wait,
            "it refused"
        );
        assert_eq!(
            round.confirmed(START, 3, Confirmation::Raised),
            Step::Wait,
            "it has not voted, let alone been asked"
        );
        assert_eq!(
            round.voted(START, 4, Vote::Granted),
            Step::Confirm(41..=43, vec![4])
        );
        assert_eq!(
            round.confirmed(START, 4, Confirmation::Raised),
            Step::Won(41..=43)
        );
    }

    #[test]
    fn who_lost_gives_it_back_where_it_may_have_it() {
        let mut round = begin(5);
        let step = votes(
            &mut round,
            &[taken(5), Vote::Abstains, taken(5), Vote::Silent, taken(5)],
        );
        assert!(matches!(step, Step::Lost(Defeat::Taken(_))));
        // A master that abstains by now may have granted it in a round before.
        assert_eq!(round.may_hold(), [1, 3]);
        let mut round = begin(5);
        assert!(matches!(votes(&mut round, &[taken(5); 3]), Step::Lost(_)));
        assert_eq!(round.may_hold(), [3, 4], "they did not answer");
        for vote in [taken(5), Vote::Granted] {
            let master = if vote == Vote::Granted { 4 } else { 3 };
            assert!(
                !matches!(round.voted(START, master, vote), Step::Won(_)),
                "{vote:?}"
            );
        }
        assert_eq!(round.may_hold(), [4], "they did by now");
    }

    #[test]
    fn tokens_that_others_passed_are_proposed_anew_above_theirs() {
        let mut round = begin(3);
        votes(&mut round, &[Vote::Granted, Vote::Behind(40)]);
        assert_eq!(round.confirmed(START, 0, Confirmation::Refused(70)), Step::Wait);
        assert_eq!(round.voted(START, 2, Vote::Silent), Step::Wait);
        assert_eq!(
            round.confirmed(START, 1, Confirmation::Raised),
            Step::Lost(Defeat::Outrun)
        );
        assert_eq!(round.highest(), 70);
    }

    #[test]
    fn one_that_is_ahead_while_others_are_silent_does_not_tell() {
        let mut round = begin(3);
        votes(&mut round, &[Vote::Granted, Vote::Behind(40)]);
        assert_eq!(round.confirmed(START, 0, Confirmation::Refused(70)), Step::Wait);
        assert_eq!(round.voted(START, 2, Vote::Silent), Step::Wait);
        let defeat = Defeat::Undecided {
            answered: 1,
            abstained: 0,
        };
        assert_eq!(round.tick(round.deadline()), Step::Lost(defeat));
    }

    /// Somebody has set it.
    const BEYOND: Vote = Vote::Behind(u64::MAX);

    #[test]
    fn counters_beyond_the_clocks_are_left_out_of_a_majority() {
        let mut round = begin(3);
        assert_eq!(votes(&mut round, &[BEYOND, Vote::Behind(40)]), Step::Wait);
        assert_eq!(
            round.voted(START, 2, Vote::Granted),
            Step::Confirm(41..=43, vec![1, 2])
        );
        assert_eq!(round.highest(), 43);
        assert_eq!(round.left_out(), [(0, u64::MAX)]);
        assert_eq!(round.confirmed(START, 1, Confirmation::Raised), Step::Wait);
        assert_eq!(
            round.confirmed(START, 2, Confirmation::Raised),
            Step::Won(41..=43)
        );
        let mut round = begin(5);
        let step = votes(&mut round, &[BEYOND, BEYOND, Vote::Granted, Vote::Granted]);
        assert_eq!(step, Step::Wait);
        assert_eq!(round.voted(START, 4, Vote::Granted), Step::Won(10..=12));
    }

    #[test]
    fn a_counter_that_is_set_while_tokens_are_confirmed_is_left_out() {
        let confirming = || {
            let mut round = begin(5);
            votes(&mut round, &[Vote::Granted, Vote::Behind(40), Vote::Granted]);
            assert_eq!(round.voted(START, 3, BEYOND), Step::Wait);
            let set = Confirmation::Refused(LAST_CLOCK);
            assert_eq!(round.confirmed(START, 0, set), Step::Wait);
            assert_eq!(round.highest(), 43);
            assert_eq!(round.left_out(), [(0, LAST_CLOCK), (3, u64::MAX)]);
            assert_eq!(round.confirmed(START, 1, Confirmation::Raised), Step::Wait);
            assert_eq!(round.confirmed(START, 2, Confirmation::Raised), Step::Wait);
            round
        };
        assert!(matches!(
            confirming().voted(START, 4, Vote::Silent),
            Step::Lost(Defeat::Undecided {
                answered: 4,
                abstained: 0
            })
        ));
        let mut round = confirming();
        assert_eq!(
            round.voted(START, 4, Vote::Granted),
            Step::Confirm(41..=43, vec![4])
        );
        assert_eq!(
            round.confirmed(START, 4, Confirmation::Raised),
            Step::Won(41..=43)
        );
    }

    #[test]
    fn counters_beyond_the_clocks_count_if_a_majority_has_them() {
        let real = LAST_CLOCK + 5;
        let mut round = begin(3);
        let step = votes(&mut round, &[Vote::Behind(LAST_CLOCK), Vote::Behind(real)]);
        assert_eq!(step, Step::Confirm(real + 1..=real + 3, vec![0, 1]));
        assert_eq!(round.left_out(), []);
        // It may be one of a majority, of which the others are silent.
        let mut round = begin(5);
        let step = votes(
            &mut round,
            &[
                Vote::Behind(real),
                Vote::Behind(real),
                Vote::Granted,
                Vote::Granted,
            ],
        );
        assert_eq!(step, Step::Wait);
        let defeat = Defeat::Undecided {
            answered: 4,
            abstained: 0,
        };
        assert_eq!(round.voted(START, 4, Vote::Silent), Step::Lost(defeat));
        assert_eq!(round.left_out(), [(0, real), (1, real)]);
        // There is no token above this one.
        let mut round = begin(3);
        let step = votes(&mut round, &[BEYOND, BEYOND]);
        assert_eq!(step, Step::Confirm(u64::MAX..=u64::MAX, vec![]));
    }

    #[test]
    fn a_counter_beyond_the_clocks_leaves_masters_divided() {
        let step = votes(&mut begin(3), &[BEYOND, taken(30), Vote::Granted]);
        assert_eq!(step, Step::Lost(Defeat::Taken(Some(Duration::from_millis(30)))));
        // The silent one may have the same holder.
        let step = votes(&mut begin(3), &[BEYOND, taken(30), Vote::Silent]);
        assert!(matches!(step, Step::Lost(Defeat::Undecided { .. })), "{step:?}");
    }

    #[test]
    fn tokens_to_confirm_are_ahead_of_the_clock_by_the_time_it_took() {
        let confirmed_at = |at: Duration, after: Duration, seen: u64| {
            let began = Beginning::new(at, 10);
            let mut round = QuorumRound::begin(Rules::of(3, PATIENCE), began, START, TTL, 10..=12);
            assert_eq!(round.voted(START, 0, Vote::Behind(seen)), Step::Wait);
            match round.voted(START + after, 1, Vote::Granted) {
                Step::Confirm(tokens, _) => tokens,
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
    fn a_lease_that_ended_before_it_was_confirmed_is_not_called_outrun() {
        let end = START + Rules::of(3, PATIENCE).lease(TTL);
        let mut round = begin(3);
        votes(&mut round, &[Vote::Granted, Vote::Behind(40)]);
        assert_eq!(round.confirmed(end, 0, Confirmation::Refused(40)), Step::Wait);
        assert_eq!(
            round.confirmed(end, 1, Confirmation::Refused(40)),
            Step::Lost(Defeat::TooLate)
        );
    }

    #[test]
    fn whoever_has_enough_to_decide_it_has_it() {
        let step = votes(&mut begin(5), &[taken(30), Vote::Granted, taken(20), taken(40)]);
        assert_eq!(step, Step::Lost(Defeat::Taken(Some(Duration::from_millis(20)))));
    }

    #[test]
    fn a_lock_that_is_taken_is_not_called_unknown_for_a_dead_master_that_was_quicker_to_say_so() {
        let mut round = begin(3);
        assert_eq!(votes(&mut round, &[Vote::Silent, taken(30)]), Step::Wait);
        assert_eq!(
            round.voted(START, 2, taken(40)),
            Step::Lost(Defeat::Taken(Some(Duration::from_millis(30))))
        );
        let mut round = begin(3);
        assert_eq!(votes(&mut round, &[Vote::Silent, taken(30)]), Step::Wait);
        let defeat = Defeat::Undecided {
            answered: 1,
            abstained: 0,
        };
        assert_eq!(round.tick(round.deadline()), Step::Lost(defeat));
    }

    #[test]
    fn without_a_majority_nothing_is_waited_for() {
        let step = votes(&mut begin(5), &[Vote::Silent, Vote::Abstains, Vote::Silent]);
        let defeat = Defeat::Undecided {
            answered: 1,
            abstained: 1,
        };
        assert_eq!(step, Step::Lost(defeat));
    }

    #[test]
    fn patience_begins_anew_with_the_confirmation() {
        let mut round = begin(3);
        let late = START + PATIENCE / 2;
        assert_eq!(round.tick(late), Step::Wait);
        assert_eq!(round.voted(late, 0, Vote::Behind(40)), Step::Wait);
        assert!(matches!(round.voted(late, 1, Vote::Granted), Step::Confirm(..)));
        assert_eq!(round.deadline(), late + PATIENCE);
        assert_eq!(round.tick(START + PATIENCE), Step::Wait);
        assert_eq!(round.confirmed(late, 0, Confirmation::Raised), Step::Wait);
        let defeat = Defeat::Undecided {
            answered: 1,
            abstained: 0,
        };
        assert_eq!(round.tick(late + PATIENCE), Step::Lost(defeat));
    }

    #[test]
    fn a_lease_that_is_over_is_not_won() {
        let end = START + Rules::of(3, PATIENCE).lease(TTL);
        let mut round = begin(3);
        assert_eq!(round.voted(START, 0, Vote::Granted), Step::Wait);
        assert_eq!(round.voted(end, 1, Vote::Granted), Step::Lost(Defeat::TooLate));
        let mut round = begin(3);
        assert_eq!(round.voted(START, 0, Vote::Granted), Step::Wait);
        let just = end.saturating_sub(Duration::from_nanos(1));
        assert_eq!(round.voted(just, 1, Vote::Granted), Step::Won(10..=12));
    }

    /// Whatever the masters say, in whichever order, and however long it takes: a round ends; it is won only by a
    /// majority that holds and has raised its counter to these very tokens; it is called taken only if others may have
    /// decided it.
    #[test]
    fn no_order_of_answers_wins_without_a_majority() {
        for seed in 0..20_000 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let masters = [1, 3, 5, 7][rng.usize(..4)];
            let rules = Rules::of(masters, PATIENCE);
            let mut round = QuorumRound::begin(rules, Beginning::new(START, 10), START, TTL, 10..=12);
            let (mut tokens, mut now) = (10..=12, START);
            let mut raised = vec![false; masters];
            let mut confirming: Vec<usize> = Vec::new();
            let mut asked: Vec<usize> = (0..masters).collect();
            let (mut others, mut left_out) = (0, 0);
            let mut step = Step::Wait;
            for _ in 0..4 * masters {
                now += Duration::from_millis(rng.u64(..5));
                step = if !confirming.is_empty() && rng.bool() {
                    let master = confirming.swap_remove(rng.usize(..confirming.len()));
                    let answer = match rng.u8(..4) {
                        0 => Confirmation::Refused(rng.u64(..100)),
                        1 => Confirmation::Silent,
                        _ => Confirmation::Raised,
                    };
                    raised[master] = answer == Confirmation::Raised;
                    round.confirmed(now, master, answer)
                } else if !asked.is_empty() {
                    let master = asked.swap_remove(rng.usize(..asked.len()));
                    let vote = match rng.u8(..8) {
                        0 => Vote::Silent,
                        1 => Vote::Abstains,
                        2 | 3 => taken(5),
                        4 if rng.u8(..4) == 0 => Vote::Behind(LAST_CLOCK + rng.u64(..50)),
                        4 | 5 => Vote::Behind(10 + rng.u64(..50)),
                        _ => Vote::Granted,
                    };
                    raised[master] = vote == Vote::Granted && *tokens.start() == 10;
                    others += usize::from(vote == taken(5));
                    left_out += usize::from(matches!(vote, Vote::Behind(fence) if is_beyond(fence)));
                    round.voted(now, master, vote)
                } else {
                    now = now.max(round.deadline());
                    round.tick(now)
                };
                match &step {
                    Step::Wait => {}
                    Step::Confirm(proposed, these) => {
                        if tokens != *proposed {
                            assert!(*proposed.start() > *tokens.end(), "seed {seed}");
                            raised.fill(false);
                            tokens = proposed.clone();
                        }
                        confirming.extend(these);
                    }
                    Step::Won(_) | Step::Lost(_) => break,
                }
            }
            match step {
                Step::Won(won) => {
                    assert_eq!(won, tokens, "seed {seed}");
                    let enough = raised.iter().filter(|raised| **raised).count() >= rules.quorum;
                    assert!(enough, "seed {seed}");
                }
                Step::Lost(Defeat::Taken(_)) => {
                    let enough = others + rules.quorum > masters || left_out > 0;
                    assert!(others > 0 && enough, "seed {seed}");
                }
                Step::Lost(_) => {}
                step => panic!("seed {seed}: still at {step:?}"),
            }
        }
    }

    /// Each master is with one of two; whichever way they are split, and in whatever order they say so, not both win, and
    /// the verdict is that of their number.
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
                    let vote = if holders[master] == me {
                        Vote::Granted
                    } else {
                        taken(5)
                    };
                    round.voted(START, master, vote)
                });
                steps.find(|step| *step != Step::Wait)
            };
            let mine = holders.iter().filter(|holder| **holder).count();
            let won = |step| matches!(step, Some(Step::Won(_)));
            let lost = |step| matches!(step, Some(Step::Lost(Defeat::Taken(_))));
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
        assert!(matches!(votes(&mut round, &[Vote::Granted; 3]), Step::Won(_)));
        assert!(!round.is_short());
        for vote in [Vote::Silent, taken(5)] {
            assert!(!round.is_short(), "{vote:?}");
            let master = if vote == Vote::Silent { 3 } else { 4 };
            round.voted(START, master, vote);
        }
        assert!(round.is_short());
        let mut round = begin(5);
        let step = votes(
            &mut round,
            &[taken(5), Vote::Granted, Vote::Granted, Vote::Granted],
        );
        assert!(matches!(step, Step::Won(_)) && round.is_short());
    }

    #[test]
    fn a_renewal_tells_who_is_to_be_repaired_and_who_may_be_later() {
        let mut count = QuorumCount::of_renewal(Rules::of(7, PATIENCE), START);
        for master in 0..4 {
            count.reported(master, Report::Held);
        }
        count.reported(4, Report::Free);
        count.reported(5, Report::Abstains);
        let mut other = QuorumCount {
            reports: count.reports.clone(),
            ..QuorumCount::of_renewal(Rules::of(7, PATIENCE), START)
        };
        assert_eq!(count.reported(6, Report::Silent), held(&[4], false));
        assert_eq!(other.reported(6, Report::Other), held(&[4], true));
    }

    #[test]
    fn a_renewal_hears_all_who_may_lack_it() {
        let mut count = QuorumCount::of_renewal(Rules::of(5, PATIENCE), START);
        for master in 0..3 {
            assert_eq!(count.reported(master, Report::Held), Outcome::Wait);
        }
        assert_eq!(count.reported(3, Report::Free), Outcome::Wait);
        assert_eq!(count.tick(START), Outcome::Wait);
        assert_eq!(count.tick(count.deadline()), held(&[3], false));
    }

    #[test]
    fn a_release_is_over_when_a_majority_had_it() {
        let mut count = QuorumCount::of_release(Rules::of(5, PATIENCE), START);
        assert_eq!(count.reported(0, Report::Free), Outcome::Wait);
        assert_eq!(count.reported(1, Report::Held), Outcome::Wait);
        assert_eq!(count.reported(2, Report::Held), Outcome::Wait);
        assert_eq!(count.reported(2, Report::Held), Outcome::Wait, "said twice");
        assert_eq!(count.reported(3, Report::Held), held(&[0], false));
    }

    #[test]
    fn a_second_report_of_a_master_does_not_count() {
        let mut count = QuorumCount::of_release(Rules::of(3, PATIENCE), START);
        assert_eq!(count.reported(0, Report::Free), Outcome::Wait);
        assert_eq!(count.reported(0, Report::Held), Outcome::Wait);
        assert_eq!(count.reported(1, Report::Held), Outcome::Wait);
        assert_eq!(count.reported(1, Report::Free), Outcome::Wait);
        assert_eq!(count.reported(2, Report::Held), held(&[0], false));
    }

    #[test]
    fn what_a_majority_may_lack_is_lost() {
        for lacking in [Report::Free, Report::Other, Report::Abstains] {
            let mut count = QuorumCount::of_renewal(Rules::of(3, PATIENCE), START);
            assert_eq!(count.reported(0, Report::Other), Outcome::Wait);
            assert_eq!(count.reported(1, lacking), Outcome::Lost);
            assert_eq!(count.reported(2, Report::Held), Outcome::Lost);
        }
    }

    #[test]
    fn silence_is_no_loss() {
        let mut count = QuorumCount::of_renewal(Rules::of(5, PATIENCE), START);
        count.reported(0, Report::Held);
        count.reported(1, Report::Held);
        count.reported(2, Report::Free);
        count.reported(3, Report::Other);
        assert_eq!(count.tick(count.deadline()), Outcome::Undecided { answered: 4 });
        assert_eq!(
            count.reported(4, Report::Held),
            Outcome::Undecided { answered: 4 },
            "too late"
        );
    }
}
