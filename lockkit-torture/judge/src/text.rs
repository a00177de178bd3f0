//! The text of a history.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::Deserialize;

/// Nanoseconds of the machine's monotonic clock.
pub(crate) type Moment = u64;

/// The epochs of a file, in their order.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub(crate) epochs: Vec<Epoch>,
}

/// A line that is none of a history.
#[derive(Clone, Debug)]
pub struct Unreadable(String);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unreadable {}

#[derive(Clone, Debug, Default)]
pub(crate) struct Epoch {
    pub(crate) seed: u64,
    /// The wall clock at moment 0, in µs since 1970.
    pub(crate) clock: u64,
    pub(crate) holds: BTreeMap<usize, Hold>,
    pub(crate) ends: Vec<End>,
    pub(crate) theirs: Vec<String>,
}

impl Epoch {
    /// The moments from which counters of tokens may have begun anew, and the clock that they begin at.
    pub(crate) fn restarts(&self) -> impl Iterator<Item = (Moment, u64)> {
        let restarts = self.ends.iter().filter(|end| end.restarts);
        restarts.map(|end| (end.from, self.clock.saturating_add(end.from / 1_000)))
    }
}

/// An acquisition, and what it came to.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) id: usize,
    pub(crate) name: String,
    pub(crate) mode: Mode,
    /// The number of permits; of a lock, 1 if it is exclusive and 0 if it is shared.
    pub(crate) of: u32,
    pub(crate) ttl: Moment,
    pub(crate) adopts: bool,
    pub(crate) asked: Moment,
    /// When the reply came, and the token.
    pub(crate) granted: Option<(Moment, u64)>,
    /// The last look at which it held.
    pub(crate) held: Option<Moment>,
    pub(crate) downgraded: Option<Moment>,
    /// Whoever holds it is told nothing more, or kept it after being told.
    pub(crate) is_kept: bool,
}

impl Hold {
    /// From the grant to the last moment at which it certainly held.
    pub(crate) fn certain(&self) -> Option<(Moment, Moment)> {
        let (granted, _) = self.granted?;
        let held = self.held?;
        (granted <= held).then_some((granted, held))
    }

    pub(crate) fn is_exclusive(&self) -> bool {
        match self.mode {
            Mode::Exclusive => true,
            Mode::Shared => false,
            Mode::Permit => self.of == 1,
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    Exclusive,
    Shared,
    Permit,
}

/// Something that may end holds without a word to their holders.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) from: Moment,
    pub(crate) until: Moment,
    /// Of this lock alone.
    pub(crate) name: Option<String>,
    /// `None` if it ends none.
    pub(crate) told: Option<(Told, Moment)>,
    /// Counters of tokens may begin anew.
    pub(crate) restarts: bool,
}

impl End {
    /// Says whether it may end this hold.
    pub(crate) fn is_of(&self, hold: &Hold) -> bool {
        self.name.as_ref().is_none_or(|name| *name == hold.name)
    }

    /// The moment by which the holder is told, if it ends any.
    pub(crate) fn told_by(&self, hold: &Hold) -> Option<Moment> {
        let (told, late) = self.told?;
        let after = match told {
            Told::Within => 0,
            Told::Renewal => hold.ttl / 3,
            Told::Lease => hold.ttl,
        };
        Some(self.until.saturating_add(after).saturating_add(late))
    }
}

/// The time in which a holder is told, beside the one that is added.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Told {
    Within,
    /// A third of the ttl.
    Renewal,
    /// The ttl.
    Lease,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
enum Line {
    Epoch {
        seed: u64,
        clock: u64,
    },
    Call {
        at: Moment,
        hold: usize,
        name: String,
        mode: Mode,
        of: u32,
        /// In ms.
        ttl: u64,
        #[serde(default)]
        adopts: bool,
    },
    Granted {
        at: Moment,
        hold: usize,
        token: u64,
    },
    Held {
        at: Moment,
        hold: usize,
    },
    Downgrade {
        at: Moment,
        hold: usize,
    },
    Kept {
        hold: usize,
    },
    Over {
        hold: usize,
        how: String,
    },
    Fault {
        at: Moment,
        until: Moment,
        told: Option<Told>,
        #[serde(default)]
        late: u64,
        #[serde(default)]
        restarts: bool,
    },
    Break {
        at: Moment,
        until: Moment,
        name: String,
        told: Told,
        late: u64,
    },
    Judged {
        laws: Vec<String>,
    },
    // What else was seen, which says nothing of when a hold began or ended for certain.
    Refused,
    Shared,
    Lost,
    Pause,
}

const MS: Moment = 1_000_000;

impl FromStr for History {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let mut history = Self::default();
        for (number, line) in (1..).zip(text.lines()) {
            let why = |what: &dyn fmt::Display| Unreadable(format!("line {number}: {what}: {line}"));
            let read = serde_json::from_str(line).map_err(|error| why(&error))?;
            history.add(read).map_err(|error| why(&error))?;
        }
        Ok(history)
    }
}

impl History {
    fn add(&mut self, line: Line) -> Result<(), &'static str> {
        if let Line::Epoch { seed, clock } = line {
            self.epochs.push(Epoch {
                seed,
                clock,
                ..Epoch::default()
            });
            return Ok(());
        }
        let epoch = self.epochs.last_mut().ok_or("no epoch has begun")?;
        let nobody = "a hold that nobody has called for";
        match line {
            Line::Call {
                at: asked,
                hold: id,
                name,
                mode,
                of,
                ttl,
                adopts,
            } => {
                let hold = Hold {
                    id,
                    name,
                    mode,
                    of,
                    ttl: ttl.saturating_mul(MS),
                    adopts,
                    asked,
                    granted: None,
                    held: None,
                    downgraded: None,
                    is_kept: false,
                };
                if epoch.holds.insert(id, hold).is_some() {
                    return Err("a hold that was called for before");
                }
            }
            Line::Granted { at, hold, token } => {
                epoch.holds.get_mut(&hold).ok_or(nobody)?.granted = Some((at, token));
            }
            Line::Held { at, hold } => epoch.holds.get_mut(&hold).ok_or(nobody)?.held = Some(at),
            Line::Downgrade { at, hold } => epoch.holds.get_mut(&hold).ok_or(nobody)?.downgraded = Some(at),
            Line::Kept { hold } => epoch.holds.get_mut(&hold).ok_or(nobody)?.is_kept = true,
            Line::Over { hold, how } => {
                let hold = epoch.holds.get_mut(&hold).ok_or(nobody)?;
                hold.is_kept |= how == "detached";
            }
            Line::Fault {
                at: from,
                until,
                told,
                late,
                restarts,
            } => epoch.ends.push(End {
                from,
                until,
                name: None,
                told: told.map(|told| (told, late.saturating_mul(MS))),
                restarts,
            }),
            Line::Break {
                at: from,
                until,
                name,
                told,
                late,
            } => epoch.ends.push(End {
                from,
                until,
                name: Some(name),
                told: Some((told, late.saturating_mul(MS))),
                restarts: false,
            }),
            Line::Judged { laws } => epoch.theirs.extend(laws),
            Line::Epoch { .. } | Line::Refused | Line::Shared | Line::Lost | Line::Pause => {}
        }
        Ok(())
    }
}
