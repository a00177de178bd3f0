//! A master: the effect of each script on one lock's keys, in one step.

use std::{ops::RangeInclusive, time::Duration};

use lockkit_redis::redlock_quorum::{Confirmation, Report, Vote};

use crate::mutant::Mutant;

/// Microseconds, of whichever clock.
pub(crate) type Micros = u64;

/// An owner and its round, as in a key's value.
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

/// A hold that a round asks of a master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bid {
    pub(crate) claim: Claim,
    pub(crate) mode: Mode,
    pub(crate) ttl: Micros,
    pub(crate) tokens: RangeInclusive<u64>,
}

/// A client's request to a master.
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
    /// Asks this life whether it has a vote. `over` is the beginning of a quarantine that the client knows to be over.
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
    /// This life has a vote, unless it is in a quarantine, which began then by its clock.
    Standing(u32, Option<Micros>),
}

/// The data that a crash may keep, lose or set back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data {
    holders: Vec<Holder>,
    fence: u64,
    marker: Option<Marker>,
}

/// The state of a life of the server, as written beside its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marker {
    /// Votes: its data was complete.
    Votes(u32),
    /// Has no vote since this moment of its clock: it may have lost data.
    Quarantined(u32, Micros),
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    claim: Claim,
    mode: Mode,
    /// The first token that this round raised the counter to, here, or would have.
    token: u64,
    /// The counter has to be at these tokens by now.
    carries: bool,
    expires: Micros,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Master {
    pub(crate) data: Data,
    /// The number of this life of the server. It grows with each crash.
    pub(crate) life: u32,
    /// It has no vote after it may have lost data.
    pub(crate) quarantines: bool,
    pub(crate) mutant: Option<Mutant>,
}

impl Master {
    pub(crate) fn is_marked(&self) -> bool {
        self.data.marker == Some(Marker::Votes(self.life))
    }

    /// Gives this life a vote.
    pub(crate) fn mark(&mut self) {
        self.data.marker = Some(Marker::Votes(self.life));
    }

    /// Checks the marker, and ends a quarantine that is over. Returns when the present quarantine began.
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

    /// Returns the rest of this claim's hold, if that carries the tokens from `first` on. It may still have those of its vote,
    /// while others were confirmed elsewhere.
    pub(crate) fn holding(&self, now: Micros, claim: Claim, first: u64) -> Option<Micros> {
        let held = self.data.holders.iter().find(|holder| holder.claim == claim)?;
        let counts = now < held.expires && held.carries && held.token == first;
        counts.then(|| held.expires - now)
    }

    pub(crate) fn is_held_besides(&self, now: Micros, claim: Claim) -> bool {
        let mut holders = self.data.holders.iter();
        holders.any(|holder| now < holder.expires && holder.claim.owner != claim.owner)
    }

    /// Sets the counter, as an operator may.
    pub(crate) fn set_counter(&mut self, to: u64) {
        self.data.fence = to;
    }

    /// Deletes the lock's key.
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
                // A request to an earlier life comes from a connection that has ended.
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

    /// Returns the holders that the bid would have to wait for.
    fn in_the_way(&self, bid: &Bid) -> impl Iterator<Item = &Holder> {
        let (claim, mode) = (bid.claim, bid.mode);
        self.data.holders.iter().filter(move |holder| {
            // A request of an earlier round never turns a later one's key back.
            let is_its = holder.claim.owner == claim.owner;
            claim.is_before(holder.claim) || !is_its && !admits(holder.mode, mode)
        })
    }

    /// Sets the hold, which replaces its owner's earlier one.
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
        // A hold in the other mode, of a lost round, does not exclude the same others.
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
        // The key of an earlier round may have come back with old data, after votes for others.
        if keeps_out && !is_known {
            return Report::Abstains;
        }
        held.expires = now + bid.ttl;
        // The fast path prolongs the key of this round as it is.
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
        // Also the key of an earlier round, if a vote overtook its release.
        self.data
            .holders
            .retain(|holder| holder.claim != claim && !holder.claim.is_before(claim));
        if self.data.holders.len() < before {
            Report::Held
        } else {
            self.lacking(Mode::Exclusive)
        }
    }

    /// Reports to an owner without a hold whether it could have one in this mode.
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
