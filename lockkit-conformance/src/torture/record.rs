//! The notes of a process about its part in an epoch.

use std::{fmt, str::FromStr};

use super::Millis;
use crate::history::{Acquisition, Nanos};

/// One line of what happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// An acquisition, as far as it has come. A later one of the same step and lock takes its place.
    Record(Box<Record>),
    /// Somebody ended the hold of the holder.
    Break { lock: String, from: Nanos, to: Nanos },
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
    /// Something fails although nothing is wrong.
    Failure,
    /// An operation does not return within its bound.
    Hang,
    /// Something is left at the end.
    Residue,
    /// Nothing is granted, or far less than what could not fail: whatever was judged, it was too little.
    Vacuity,
}

const LAWS: [Law; 10] = [
    Law::Exclusion,
    Law::Tokens,
    Law::Fencing,
    Law::Liveness,
    Law::Order,
    Law::Answer,
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
        write!(f, "{:?}: {}", self.law, self.detail)
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
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fared {
    /// Not known yet, or never, since its process was killed.
    Pending,
    Granted,
    Taken,
    Dropped,
    Failed,
}

/// The end of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Not yet, or forgotten.
    Not,
    /// The release was confirmed.
    Released,
    /// It is for the worker to release it.
    Dropped,
    /// It was lost, or whether it is released is not known.
    Lost,
}

const ASKED: [Asked; 4] = [Asked::Waited, Asked::Tried, Asked::Cancelled, Asked::Unpolled];
const FARED: [Fared; 5] = [
    Fared::Pending,
    Fared::Granted,
    Fared::Taken,
    Fared::Dropped,
    Fared::Failed,
];
const OVER: [Over; 4] = [Over::Not, Over::Released, Over::Dropped, Over::Lost];

/// An acquisition of the torture. `until` is the last moment at which its holder was seen to hold, by itself, and
/// `released` the moment at which the end of the hold was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) process: u32,
    pub(super) client: u32,
    pub(super) ttl: Millis,
    pub(super) handoffs: Option<u32>,
    pub(super) asked: Asked,
    pub(super) fared: Fared,
    pub(super) over: Over,
    /// Several locks at once, or a wait so short that its end may come before the first answer.
    pub(super) lenient: bool,
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
        write!(
            f,
            "{} {} {} {handoffs} {} {} {} {} {}|{}",
            self.process,
            self.client,
            self.ttl,
            self.asked as u8,
            self.fared as u8,
            self.over as u8,
            u8::from(self.lenient),
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
    let mut words = words.splitn(9, ' ');
    let mut number = || words.next()?.parse::<i64>().ok();
    let unsigned = |number: i64| u32::try_from(number).ok();
    let (process, client) = (unsigned(number()?)?, unsigned(number()?)?);
    let (ttl, handoffs) = (number()?, number()?);
    let mut index = || usize::try_from(number()?).ok();
    let (asked, fared, over, lenient) = (index()?, index()?, index()?, index()?);
    Some(Record {
        process,
        client,
        ttl: ttl.try_into().ok()?,
        handoffs: unsigned(handoffs),
        asked: *ASKED.get(asked)?,
        fared: *FARED.get(fared)?,
        over: *OVER.get(over)?,
        lenient: lenient == 1,
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
