//! The notes of a process about its part in an epoch.

use std::{fmt, str::FromStr};

use lockkit_core::LossReason;

use super::Millis;
use crate::history::{Acquisition, BROKEN, Nanos};

/// One line of what happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// An acquisition, as far as it has come. A later one of the same step and lock takes its place.
    Record(Box<Record>),
    /// Somebody ended the hold of the holder.
    Break { lock: String, from: Nanos, to: Nanos },
    /// Somebody asks the holder for its hold. A later one of the same moment takes its place.
    AskBack(AskBack),
    /// An observer saw a change of who leads.
    Saw(Sight),
    /// A list has come to its end.
    Listed(Listed),
    /// A client met its fate, was closed for a forgotten guard, or was closed at the end.
    Gone { client: u32, at: Nanos },
    /// A finding that is wrong whatever the others did.
    Finding(Finding),
}

/// A rule by which the judge decides. A finding breaks one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Law {
    /// Two that exclude each other hold at one time, or more have permits than there are.
    Exclusion,
    /// A token does not rise, or is there twice.
    Tokens,
    /// A fenced resource refuses a rightful holder.
    Fencing,
    /// Somebody waits for a lock that is free.
    Liveness,
    /// Waiters are granted out of order, where the order is promised.
    Order,
    /// The server says "taken", and nobody can have it.
    Answer,
    /// Somebody is granted what another was asked for and has not let go, whoever was asked is not told, or whoever asked is told
    /// wrong.
    Asked,
    /// A hold lasts for longer than its `max_hold` lets it, or does not say so, or has another lease than its ttl asks for.
    Length,
    /// An observer of an election sees a leader who does not lead, none where there is one, or changes out of order.
    Election,
    /// A list shows a name that nobody uses, or one twice, or leaves out what is held throughout.
    List,
    /// A detached hold gives way to another, is adopted twice or as another, or is refused to whoever comes in time.
    Detached,
    /// A backend does what it says it cannot, or refuses what it can.
    Denial,
    /// Something fails although nothing is wrong.
    Failure,
    /// An operation does not return within its bound.
    Hang,
    /// Something is left at the end.
    Residue,
    /// Nothing is granted, or far less than what could not fail: whatever was judged, it was too little.
    Vacuity,
}

const LAWS: [Law; 16] = [
    Law::Exclusion,
    Law::Tokens,
    Law::Fencing,
    Law::Liveness,
    Law::Order,
    Law::Answer,
    Law::Asked,
    Law::Length,
    Law::Election,
    Law::List,
    Law::Detached,
    Law::Denial,
    Law::Failure,
    Law::Hang,
    Law::Residue,
    Law::Vacuity,
];

/// Something that must not be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Against which law.
    pub law: Law,
    /// A log of who did what when.
    pub detail: String,
}

impl Finding {
    pub(super) fn new(law: Law, detail: impl Into<String>) -> Self {
        let detail = detail.into().replace('\n', " ");
        Self { law, detail }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.law {
            Law::Exclusion | Law::Tokens | Law::Fencing | Law::Residue => BROKEN,
            _ => "",
        };
        write!(f, "{mark}{:?}: {}", self.law, self.detail)
    }
}

/// The manner of a request, as far as the judge minds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// It waited, and looked after its turn.
    Waited,
    /// It wanted an answer at once.
    Tried,
    /// It was dropped when it was still under way, or might be.
    Cancelled,
    /// It did not look after its turn.
    Unpolled,
    /// It wanted several, and waited.
    Together,
    /// It wanted several, and an answer at once.
    TriedTogether,
    /// It wanted to go on with a hold that had been detached.
    Adopts,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fared {
    /// A result that is not known yet, or never, since its process was killed.
    Pending,
    Granted,
    Taken,
    Dropped,
    Failed,
    /// It was told that the semaphore has another size.
    OtherSize,
}

/// The end of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// No end yet, or a guard that was forgotten.
    Not,
    /// The release was confirmed.
    Released,
    /// It is for the worker to release it.
    Dropped,
    /// It was detached, and goes on until its lease is over or another's adoption of it.
    Detached,
    /// It was lost, or whether it is released is not known.
    Lost,
}

/// The reason of a loss, as far as the judge minds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// None, or one that nobody saw.
    Not,
    /// Its holder was asked for it.
    Asked,
    /// Its `max_hold` was over.
    MaxHold,
    /// Its lease was over.
    Expired,
    Other,
}

impl From<LossReason> for Loss {
    fn from(reason: LossReason) -> Self {
        match reason {
            LossReason::Asked => Self::Asked,
            LossReason::MaxHold => Self::MaxHold,
            LossReason::Expired => Self::Expired,
            _ => Self::Other,
        }
    }
}

/// The answer to one who asked a holder for its hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// None yet, or an error.
    Nothing,
    /// Nobody has a hold of this token.
    NotHeld,
    /// It has ended.
    Ended,
    /// It goes on, and its holder is to be told.
    Still,
}

/// A holder was asked for its hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AskBack {
    pub(super) lock: String,
    pub(super) token: u64,
    pub(super) from: Nanos,
    /// The time of the answer.
    pub(super) to: Nanos,
    pub(super) said: Said,
}

/// A change of who leads, as an observer saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sight {
    pub(super) lock: String,
    pub(super) observer: u64,
    /// It was true then, or later.
    pub(super) looked: Nanos,
    /// It had been seen by then.
    pub(super) seen: Nanos,
    /// The leader's, and 0 if nobody led.
    pub(super) token: u64,
    /// The candidate's number.
    pub(super) leader: u64,
}

impl Sight {
    /// The token and the leader of the last one, which says that the observer looks no more.
    pub(super) const END: (u64, u64) = (u64::MAX, u64::MAX);

    pub(super) fn is_end(&self) -> bool {
        (self.token, self.leader) == Self::END
    }
}

/// A list: the holds that it showed, and when it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) from: Nanos,
    pub(super) to: Nanos,
    /// It was asked for elections, not for locks and semaphores.
    pub(super) of_elections: bool,
    pub(super) names: Vec<String>,
}

const ASKED: [Asked; 7] = [
    Asked::Waited,
    Asked::Tried,
    Asked::Cancelled,
    Asked::Unpolled,
    Asked::Together,
    Asked::TriedTogether,
    Asked::Adopts,
];
const FARED: [Fared; 6] = [
    Fared::Pending,
    Fared::Granted,
    Fared::Taken,
    Fared::Dropped,
    Fared::Failed,
    Fared::OtherSize,
];
const OVER: [Over; 5] = [
    Over::Not,
    Over::Released,
    Over::Dropped,
    Over::Detached,
    Over::Lost,
];
const LOSS: [Loss; 5] = [Loss::Not, Loss::Asked, Loss::MaxHold, Loss::Expired, Loss::Other];
const SAID: [Said; 4] = [Said::Nothing, Said::NotHeld, Said::Ended, Said::Still];

/// An acquisition of the torture. `until` is the last moment at which its holder was seen to hold, by itself, and
/// `released` the moment at which the end of the hold was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) process: u32,
    pub(super) client: u32,
    /// The longest that it has had.
    pub(super) ttl: Millis,
    /// The longest that its server may go by.
    pub(super) ttl_now: Millis,
    pub(super) renew: bool,
    pub(super) max_hold: Option<Millis>,
    pub(super) handoffs: Option<u32>,
    pub(super) asked: Asked,
    pub(super) fared: Fared,
    pub(super) over: Over,
    /// Several locks at once, a wait so short that its end may come before the first answer, or a semaphore whose size changed just then.
    pub(super) lenient: bool,
    pub(super) loss: Loss,
    /// The last moment at which its holder, who had been asked for it, still had its guard, and a lease that was not over.
    pub(super) kept: Option<Nanos>,
    /// From then on it was to be a shared hold.
    pub(super) downgraded: Option<Nanos>,
    /// It was known to be one.
    pub(super) shared: Option<Nanos>,
    /// The end of the lease that it was detached with. The judge puts the moment in its place up to which nobody else may have been
    /// let in.
    pub(super) detached: Option<Nanos>,
    /// Whose detached hold it adopts.
    pub(super) adopts: Option<u64>,
    /// Its place among the permits that were asked for at once, and their number.
    pub(super) place: (u32, u32),
    pub(super) acquisition: Acquisition,
    /// The error that an operation failed with.
    pub(super) error: String,
}

impl Record {
    /// From the grant to the last moment at which it was seen to hold.
    pub(super) fn sure(&self) -> Option<(Nanos, Nanos)> {
        let (granted, _) = self.acquisition.granted?;
        let seen = self.acquisition.until?;
        (granted <= seen).then_some((granted, seen))
    }

    /// From the grant to the last moment at which nobody else may have been let in: it was seen to hold, kept what it had been
    /// asked for, or was detached.
    pub(super) fn had(&self) -> Option<(Nanos, Nanos)> {
        let (granted, _) = self.acquisition.granted?;
        let seen = self.acquisition.until.max(self.kept).max(self.detached)?;
        (granted <= seen).then_some((granted, seen))
    }

    /// From the grant to the last moment at which its holder was the only one.
    pub(super) fn alone(&self) -> Option<(Nanos, Nanos)> {
        let (from, to) = self.sure()?;
        Some((from, self.downgraded.map_or(to, |at| at.min(to))))
    }

    pub(super) fn token(&self) -> u64 {
        self.acquisition.granted.map_or(0, |(_, token)| token)
    }

    /// Returns the time from which it no longer waited, as far as is known.
    pub(super) fn answered(&self) -> Nanos {
        let granted = self.acquisition.granted.map(|(at, _)| at);
        granted.or(self.acquisition.gave_up).unwrap_or(Nanos::MAX)
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let handoffs = self.handoffs.map_or(-1, i64::from);
        let or_none = |figure: Option<u64>| figure.map_or(-1, |figure| i64::try_from(figure).unwrap_or(-1));
        write!(
            f,
            "{} {} {} {handoffs} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}|{}",
            self.process,
            self.client,
            self.ttl,
            self.asked as u8,
            self.fared as u8,
            self.over as u8,
            u8::from(self.lenient),
            self.ttl_now,
            u8::from(self.renew),
            or_none(self.max_hold),
            self.loss as u8,
            or_none(self.kept),
            or_none(self.downgraded),
            or_none(self.shared),
            or_none(self.detached),
            or_none(self.adopts),
            self.place.0,
            self.place.1,
            self.acquisition,
            self.error.replace('\n', " ")
        )
    }
}

impl FromStr for Record {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        parse(line).ok_or_else(|| format!("not a record of the torture: {line:?}"))
    }
}

fn parse(line: &str) -> Option<Record> {
    let (words, error) = line.split_once('|')?;
    let mut words = words.splitn(20, ' ');
    let mut number = || words.next()?.parse::<i64>().ok();
    let unsigned = |number: i64| u32::try_from(number).ok();
    let (process, client) = (unsigned(number()?)?, unsigned(number()?)?);
    let (ttl, handoffs) = (number()?, number()?);
    let mut index = || usize::try_from(number()?).ok();
    let (asked, fared, over, lenient) = (index()?, index()?, index()?, index()?);
    let (ttl_now, renew, max_hold) = (number()?, number()?, number()?);
    let (loss, kept) = (usize::try_from(number()?).ok()?, number()?);
    let (downgraded, shared, detached, adopts) = (number()?, number()?, number()?, number()?);
    let place = (unsigned(number()?)?, unsigned(number()?)?);
    Some(Record {
        process,
        client,
        ttl: ttl.try_into().ok()?,
        handoffs: unsigned(handoffs),
        asked: *ASKED.get(asked)?,
        fared: *FARED.get(fared)?,
        over: *OVER.get(over)?,
        lenient: lenient == 1,
        ttl_now: ttl_now.try_into().ok()?,
        renew: renew == 1,
        max_hold: max_hold.try_into().ok(),
        loss: *LOSS.get(loss)?,
        kept: kept.try_into().ok(),
        downgraded: downgraded.try_into().ok(),
        shared: shared.try_into().ok(),
        detached: detached.try_into().ok(),
        adopts: adopts.try_into().ok(),
        place,
        acquisition: words.next()?.parse().ok()?,
        error: error.to_owned(),
    })
}

/// One line, for a pipe between processes.
impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Record(record) => write!(f, "record {record}"),
            Self::Break { lock, from, to } => write!(f, "break {from} {to} {lock}"),
            Self::AskBack(asked) => {
                let AskBack {
                    lock,
                    token,
                    from,
                    to,
                    said,
                } = asked;
                write!(f, "ask-back {token} {from} {to} {} {lock}", *said as u8)
            }
            Self::Saw(sight) => {
                let Sight {
                    lock,
                    observer,
                    looked,
                    seen,
                    token,
                    leader,
                } = sight;
                write!(f, "saw {observer} {looked} {seen} {token} {leader} {lock}")
            }
            Self::Listed(listed) => {
                let Listed {
                    from,
                    to,
                    of_elections,
                    names,
                } = listed;
                write!(f, "listed {from} {to} {}", u8::from(*of_elections))?;
                names.iter().try_for_each(|name| write!(f, " {name}"))
            }
            Self::Gone { client, at } => write!(f, "gone {client} {at}"),
            Self::Finding(Finding { law, detail }) => write!(f, "finding {law:?} {detail}"),
        }
    }
}

impl FromStr for Note {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let note = || {
            let (kind, rest) = line.split_once(' ')?;
            Some(match kind {
                "record" => Self::Record(Box::new(parse(rest)?)),
                "break" => {
                    let mut words = rest.splitn(3, ' ');
                    let (from, to) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
                    let lock = words.next()?.to_owned();
                    Self::Break { lock, from, to }
                }
                "ask-back" => {
                    let mut words = rest.splitn(5, ' ');
                    let mut number = || words.next()?.parse::<u64>().ok();
                    let (token, from, to, said) = (number()?, number()?, number()?, number()?);
                    Self::AskBack(AskBack {
                        lock: words.next()?.to_owned(),
                        token,
                        from,
                        to,
                        said: *SAID.get(usize::try_from(said).ok()?)?,
                    })
                }
                "saw" => {
                    let mut words = rest.splitn(6, ' ');
                    let mut number = || words.next()?.parse::<u64>().ok();
                    let (observer, looked, seen) = (number()?, number()?, number()?);
                    let (token, leader) = (number()?, number()?);
                    let lock = words.next()?.to_owned();
                    Self::Saw(Sight {
                        lock,
                        observer,
                        looked,
                        seen,
                        token,
                        leader,
                    })
                }
                "listed" => {
                    let mut words = rest.split(' ');
                    let mut number = || words.next()?.parse::<u64>().ok();
                    let (from, to, of_elections) = (number()?, number()?, number()? == 1);
                    Self::Listed(Listed {
                        from,
                        to,
                        of_elections,
                        names: words.map(str::to_owned).collect(),
                    })
                }
                "gone" => {
                    let (client, at) = rest.split_once(' ')?;
                    let (client, at) = (client.parse().ok()?, at.parse().ok()?);
                    Self::Gone { client, at }
                }
                "finding" => {
                    let (law, detail) = rest.split_once(' ')?;
                    let law = LAWS.into_iter().find(|known| format!("{known:?}") == law)?;
                    Self::Finding(Finding::new(law, detail))
                }
                _ => return None,
            })
        };
        note().ok_or_else(|| format!("not a note of the torture: {line:?}"))
    }
}
