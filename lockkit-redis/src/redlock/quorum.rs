//! Redlock's decisions, without I/O: what the answers of the masters add up to.
//!
//! Time comes in as the span since some moment of the caller's own clock, requests go out as values. So the simulator
//! runs this very file, on clocks that drift and over networks that lose what they carry.
//!
//! An acquisition proposes its fencing tokens along with its vote: each master that is free takes the lock *and* raises
//! its counter to them, in one step. If a majority did both, that was all: any earlier acquisition that was confirmed
//! had raised the counter at one of the same masters, so the tokens are above its own, and no other can ever have the
//! same ones. Where a counter already stood higher, the lock is held but the tokens are not; a second round then
//! proposes tokens above every counter seen, and a majority has to raise to those.
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
    /// It is not. Every master is to release it, those that did not answer, too.
    Lost(Defeat),
}

/// Why an acquisition came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defeat {
    /// Enough masters to decide it have another holder. The first of those leases to end does so then.
    Taken(Option<Duration>),
    /// The lock was to be had but not the tokens, which another acquisition was after as well.
    Outrun,
    /// Too few masters took part to tell.
    Undecided { answered: usize, abstained: usize },
    /// It took so long that nothing is left of the lease.
    TooLate,
}

/// One acquisition.
#[derive(Debug)]
pub(crate) struct QuorumRound {
    rules: Rules,
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

impl QuorumRound {
    /// Begins it `now`: before the first byte of a proposal is sent, which then goes to every master.
    pub(crate) fn begin(rules: Rules, now: Duration, ttl: Duration, tokens: RangeInclusive<u64>) -> Self {
        Self {
            rules,
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

    /// The highest counter that a master named, or the tokens that were proposed.
    pub(crate) fn highest(&self) -> u64 {
        let seen = self.seats.iter().map(|seat| match seat {
            Seat::Voted(Vote::Behind(fence)) | Seat::Answered(Confirmation::Refused(fence)) => *fence,
            _ => 0,
        });
        seen.fold(*self.tokens.end(), u64::max)
    }

    /// A master voted.
    pub(crate) fn voted(&mut self, now: Duration, master: usize, vote: Vote) -> Step {
        if self.seats[master] != Seat::Asked {
            return Step::Wait;
        }
        self.seats[master] = Seat::Voted(vote);
        if self.confirms {
            let has_it = match vote {
                Vote::Granted => true,
                Vote::Behind(fence) => fence < *self.tokens.start(),
                _ => false,
            };
            if has_it {
                self.seats[master] = Seat::Confirming;
                return Step::Confirm(self.tokens.clone(), vec![master]);
            }
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
        let held = granted + self.count(|seat| matches!(seat, Seat::Voted(Vote::Behind(_))));
        if held >= self.rules.quorum {
            return self.begin_confirming(now);
        }
        let open = self.count(|seat| *seat == Seat::Asked);
        if held + open >= self.rules.quorum {
            return Step::Wait;
        }
        Step::Lost(self.defeat(open))
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
        let refused = self.count(|seat| matches!(seat, Seat::Answered(Confirmation::Refused(_))));
        if refused > 0 {
            return Step::Lost(Defeat::Outrun);
        }
        Step::Lost(self.defeat(open))
    }

    fn begin_confirming(&mut self, now: Duration) -> Step {
        let tokens = self.tokens.end() - self.tokens.start();
        let first = self.highest() + 1;
        self.tokens = first..=first + tokens;
        self.confirms = true;
        self.deadline = now + self.rules.patience;
        let mut holding = Vec::new();
        for (master, seat) in self.seats.iter_mut().enumerate() {
            if matches!(seat, Seat::Voted(Vote::Granted | Vote::Behind(_))) {
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

    fn defeat(&self, open: usize) -> Defeat {
        let taken = self.count(|seat| matches!(seat, Seat::Voted(Vote::Taken(_))));
        if self.rules.blocks(taken) {
            let left = self.seats.iter().filter_map(|seat| match seat {
                Seat::Voted(Vote::Taken(left)) => *left,
                _ => None,
            });
            return Defeat::Taken(left.min());
        }
        let abstained = self.count(|seat| matches!(seat, Seat::Voted(Vote::Abstains)));
        let silent = self.count(|seat| {
            matches!(
                seat,
                Seat::Voted(Vote::Silent) | Seat::Answered(Confirmation::Silent)
            )
        });
        Defeat::Undecided {
            answered: self.rules.masters - silent - open,
            abstained,
        }
    }
}

/// A master's answer to a renewal, or to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// It was held there, and is renewed or released now.
    Held,
    /// It is not held there, by nobody.
    Free,
    /// Somebody else has it, or the master keeps out.
    Other,
    /// No answer, or one that is none.
    Silent,
}

/// What the answers to a renewal or a release add up to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Wait for answers, until [`deadline`](QuorumCount::deadline).
    Wait,
    /// A majority had it. After a renewal it may be set anew at these masters, as long as the lease lasts: they are not
    /// counted before the next one.
    Held { repair: Vec<usize> },
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
        if self.rules.blocks(count(&[Report::Free, Report::Other])) {
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
            };
        }
        Outcome::Undecided {
            answered: self.rules.masters - count(&[Report::Silent]),
        }
    }
}
