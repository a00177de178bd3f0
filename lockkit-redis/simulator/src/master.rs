//! One master: what the scripts do to one lock's keys, in one step each.

use std::{ops::RangeInclusive, time::Duration};

use lockkit_redis::redlock_quorum::{Confirmation, Report, Vote};

use crate::mutant::Mutant;

/// Microseconds, of whichever clock.
pub(crate) type Micros = u64;

/// One round of one owner: what a key's value says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) owner: u32,
    pub(crate) round: u32,
}

impl Claim {
    /// An earlier round of the same owner.
    fn is_before(self, other: Self) -> bool {
        self.owner == other.owner && self.round < other.round
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Exclusive,
    Shared,
}

/// What a round asks a master to hold for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bid {
    pub(crate) claim: Claim,
    pub(crate) mode: Mode,
    pub(crate) ttl: Micros,
    pub(crate) tokens: RangeInclusive<u64>,
}

/// What a client asks of a master about the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Vote(Bid),
    Confirm {
        claim: Claim,
        tokens: RangeInclusive<u64>,
    },
    Renew(Bid),
    Repair(Bid),
    Release {
        claim: Claim,
    },
    /// Asks this life whether it has a vote. The quarantine that began then is over, and they last for so long.
    Look {
        life: u32,
        over: Option<Micros>,
        quarantine: Micros,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Vote(Vote),
    Confirmation(Confirmation),
    Report(Report),
    /// This life has a vote, unless it is in a quarantine that began then by its clock.
    Standing(u32, Option<Micros>),
}

/// What a crash may keep, lose, or bring back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data {
    holders: Vec<Holder>,
    fence: u64,
    marker: Option<Marker>,
}

/// What a life of the server is to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marker {
    /// Its data was whole.
    Votes(u32),
    /// It may have lost some, before this moment of its clock.
    Quarantined(u32, Micros),
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    claim: Claim,
    mode: Mode,
    /// The first token that this round raised the counter to, here, or would have.
    token: u64,
    /// Whether the counter is to be at these tokens by now.
    carries: bool,
    expires: Micros,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Master {
    pub(crate) data: Data,
    /// Which life of the server this is.
    pub(crate) life: u32,
    /// Whether a master that may have lost data keeps out.
    pub(crate) quarantines: bool,
    pub(crate) mutant: Option<Mutant>,
}

impl Master {
    pub(crate) fn is_marked(&self) -> bool {
        self.data.marker == Some(Marker::Votes(self.life))
    }

    /// Its data counts as whole from now on, in this life.
    pub(crate) fn mark(&mut self) {
        self.data.marker = Some(Marker::Votes(self.life));
    }

    /// A client looks at the marker, and changes it if it is time. When its quarantine began, if it is in one.
    fn look(&mut self, now: Micros, over: Option<Micros>, quarantine: Micros) -> Option<Micros> {
        if self.is_marked() {
            return None;
        }
        match self.data.marker {
            Some(Marker::Quarantined(life, since)) if life == self.life => {
                if over == Some(since) || since + quarantine <= now {
                    self.mark();
                    return None;
                }
                Some(since)
            }
            _ => {
                self.data.marker = Some(Marker::Quarantined(self.life, now));
                Some(now)
            }
        }
    }

    /// For how long yet this claim holds, if the counter is to be at its tokens from `first` on. It may be at those of its
    /// vote yet, and others were confirmed elsewhere.
    pub(crate) fn holding(&self, now: Micros, claim: Claim, first: u64) -> Option<Micros> {
        let held = self.data.holders.iter().find(|holder| holder.claim == claim)?;
        let counts = now < held.expires && held.carries && held.token == first;
        counts.then(|| held.expires - now)
    }

    pub(crate) fn is_held_besides(&self, now: Micros, claim: Claim) -> bool {
        let mut holders = self.data.holders.iter();
        holders.any(|holder| now < holder.expires && holder.claim.owner != claim.owner)
    }

    /// Somebody sets the counter.
    pub(crate) fn set_counter(&mut self, to: u64) {
        self.data.fence = to;
    }

    /// Its keys are deleted.
    pub(crate) fn delete(&mut self) {
        self.data.holders.clear();
    }

    pub(crate) fn answer(&mut self, now: Micros, request: &Request) -> Answer {
        self.expire(now);
        match request {
            Request::Vote(bid) => Answer::Vote(self.vote(now, bid)),
            Request::Confirm { claim, tokens } => Answer::Confirmation(self.confirm(*claim, tokens)),
            Request::Renew(bid) => {
                let report = self.renew(now, bid);
                if report == Report::Free && self.mutant == Some(Mutant::RepairCounts) {
                    return Answer::Report(self.repair(now, bid));
                }
                Answer::Report(report)
            }
            Request::Repair(bid) => Answer::Report(self.repair(now, bid)),
            Request::Release { claim } => Answer::Report(self.release(*claim)),
            Request::Look {
                life,
                over,
                quarantine,
            } => {
                // A request to an earlier life came on a connection that is gone.
                if *life != self.life {
                    return Answer::Standing(*life, Some(now));
                }
                Answer::Standing(*life, self.look(now, *over, *quarantine))
            }
        }
    }

    fn expire(&mut self, now: Micros) {
        self.data.holders.retain(|holder| now < holder.expires);
    }

    fn keeps_out(&self) -> bool {
        self.quarantines && !self.is_marked()
    }

    /// Those whom the bid would have to wait for.
    fn in_the_way(&self, bid: &Bid) -> impl Iterator<Item = &Holder> {
        let (claim, mode) = (bid.claim, bid.mode);
        self.data.holders.iter().filter(move |holder| {
            // A request of an earlier round never turns a later one's key back.
            let is_its = holder.claim.owner == claim.owner;
            claim.is_before(holder.claim) || !is_its && !admits(holder.mode, mode)
        })
    }

    /// It takes the place of whatever its owner had.
    fn hold(&mut self, now: Micros, bid: &Bid, carries: bool) {
        self.data
            .holders
            .retain(|holder| holder.claim.owner != bid.claim.owner);
        self.data.holders.push(Holder {
            claim: bid.claim,
            mode: bid.mode,
            token: *bid.tokens.start(),
            carries,
            expires: now + bid.ttl,
        });
    }

    fn vote(&mut self, now: Micros, bid: &Bid) -> Vote {
        if self.keeps_out() {
            return Vote::Abstains;
        }
        if let Some(left) = self.in_the_way(bid).map(|holder| holder.expires - now).max() {
            return Vote::Taken(Some(Duration::from_micros(left)));
        }
        let (first, last) = (*bid.tokens.start(), *bid.tokens.end());
        self.hold(now, bid, self.data.fence < first);
        match self.mutant {
            Some(Mutant::NaiveTokens) => {
                self.data.fence += 1;
                return Vote::Behind(self.data.fence);
            }
            Some(Mutant::VoteRaisesNothing) if self.data.fence < first => return Vote::Granted,
            _ => {}
        }
        if self.data.fence < first {
            self.data.fence = last;
            Vote::Granted
        } else {
            Vote::Behind(self.data.fence)
        }
    }

    fn confirm(&mut self, claim: Claim, tokens: &RangeInclusive<u64>) -> Confirmation {
        let fence = self.data.fence;
        if self.keeps_out() {
            return Confirmation::Refused(fence);
        }
        let Some(held) = self.data.holders.iter_mut().find(|holder| holder.claim == claim) else {
            return Confirmation::Refused(fence);
        };
        if fence < *tokens.start() {
            self.data.fence = *tokens.end();
            held.token = *tokens.start();
            held.carries = true;
            Confirmation::Raised
        } else if held.token == *tokens.start() || self.mutant == Some(Mutant::ConfirmsAnything) {
            Confirmation::Raised
        } else {
            Confirmation::Refused(fence)
        }
    }

    fn renew(&mut self, now: Micros, bid: &Bid) -> Report {
        let claim = bid.claim;
        let keeps_out = self.keeps_out();
        // One that it set in the other mode, in a round that was lost, excludes others than this one.
        let is_its = |held: &&mut Holder| {
            held.mode == bid.mode && (held.claim == claim || held.claim.is_before(claim))
        };
        let Some(held) = self.data.holders.iter_mut().find(is_its) else {
            return if keeps_out {
                Report::Abstains
            } else {
                self.lacking(bid.mode)
            };
        };
        let is_known = held.claim == claim && held.token == *bid.tokens.start();
        // Of an earlier round, it may have come back with old data, after others had voted here.
        if keeps_out && !is_known {
            return Report::Abstains;
        }
        held.expires = now + bid.ttl;
        // In one look, what this very round set is prolonged as it is.
        if !is_known || held.mode == Mode::Shared {
            held.claim = claim;
            held.token = *bid.tokens.start();
            held.carries = true;
            self.carry(*bid.tokens.end());
        }
        Report::Held
    }

    fn repair(&mut self, now: Micros, bid: &Bid) -> Report {
        if self.keeps_out() && self.mutant != Some(Mutant::RepairsUnmarked) {
            return Report::Abstains;
        }
        if self.in_the_way(bid).next().is_some() {
            return Report::Other;
        }
        self.hold(now, bid, true);
        self.carry(*bid.tokens.end());
        Report::Held
    }

    fn carry(&mut self, last: u64) {
        if self.mutant != Some(Mutant::RepairForgetsTokens) {
            self.data.fence = self.data.fence.max(last);
        }
    }

    fn release(&mut self, claim: Claim) -> Report {
        if self.mutant == Some(Mutant::ReleasesAnyone) {
            self.data.holders.clear();
            return Report::Held;
        }
        let before = self.data.holders.len();
        // An earlier round's key as well, which a request overtaken by its release left behind.
        self.data
            .holders
            .retain(|holder| holder.claim != claim && !holder.claim.is_before(claim));
        if self.data.holders.len() < before {
            Report::Held
        } else {
            self.lacking(Mode::Exclusive)
        }
    }

    /// What one hears that does not hold, and would like to in this mode.
    fn lacking(&self, mode: Mode) -> Report {
        if self.data.holders.iter().all(|holder| admits(holder.mode, mode)) {
            Report::Free
        } else {
            Report::Other
        }
    }
}

fn admits(holder: Mode, newcomer: Mode) -> bool {
    holder == Mode::Shared && newcomer == Mode::Shared
}

#[cfg(test)]
mod differential;
