//! The scenarios that are measured, and their figures.

use std::{error::Error, fmt, str::FromStr};

/// A situation in which locks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "String", try_from = "String"))]
#[non_exhaustive]
pub enum Scenario {
    /// One task takes a lock that nobody else wants, and gives it back.
    Uncontended,
    /// This many tasks of one client, each on a name of its own.
    OwnNames(u32),
    /// This many tasks of one client, all on one name.
    Tasks(u32),
    /// This many clients in up to four processes, all on one name.
    Clients(u32),
    /// Four processes of one client each, so many tasks in each of them, all on one name.
    Processes(u32),
    /// 16 clients in four processes, all on one name, who hold it for so many ms.
    Holding(u32),
    /// This many waiters in line on one name, all of them at the server, over ten connections.
    Waiters(u32),
    /// One more client, on a name that so many tasks of another client contend for.
    Beside(u32),
    /// From the release by one client to the grant of another that has slept for 35 ms.
    HandOff,
    /// One client tries to take what another one holds.
    BusyTry,
    /// One client gives up that has waited for 35 ms for what another one holds.
    Withdrawal,
    /// 16 tasks of four clients on one name, of which so many per cent ask for it exclusively and the others shared.
    Shared(u32),
    /// 16 tasks of four clients on a semaphore of four permits.
    Permits,
    /// One client holds so many locks and does nothing else.
    Held(u32),
    /// From the kill −9 of the holder's process to the grant of a client that waits.
    Recovery,
    /// From the moment when the holder's process is stopped, and says nothing any more, to the grant of a client that waits.
    Silence,
}

impl Scenario {
    /// Every scenario, in the order in which they are shown.
    pub const ALL: [Self; 29] = [
        Self::Uncontended,
        Self::OwnNames(1),
        Self::OwnNames(4),
        Self::OwnNames(16),
        Self::OwnNames(64),
        Self::Tasks(2),
        Self::Tasks(16),
        Self::Tasks(100),
        Self::Clients(2),
        Self::Clients(16),
        Self::Clients(100),
        Self::Processes(4),
        Self::Holding(1),
        Self::Holding(10),
        Self::Waiters(10),
        Self::Waiters(1_000),
        Self::Beside(16),
        Self::HandOff,
        Self::BusyTry,
        Self::Withdrawal,
        Self::Shared(0),
        Self::Shared(5),
        Self::Shared(50),
        Self::Permits,
        Self::Held(10),
        Self::Held(1_000),
        Self::Held(10_000),
        Self::Recovery,
        Self::Silence,
    ];

    /// Returns what happens in it, in a line.
    pub fn title(self) -> String {
        match self {
            Self::Uncontended => "acquire and release, uncontended".to_owned(),
            Self::OwnNames(1) => "throughput of one task".to_owned(),
            Self::OwnNames(n) => format!("throughput of {n} tasks, each on a name of its own"),
            Self::Tasks(n) => format!("{n} tasks of one client on one name"),
            Self::Clients(n) => format!("{n} clients of up to four processes on one name"),
            Self::Processes(n) => format!("four processes of {n} tasks each on one name"),
            Self::Holding(n) => format!("16 clients of four processes on one name, held for {n} ms"),
            Self::Waiters(n) => format!("{n} waiters in line on one name"),
            Self::Beside(n) => format!("what a second client waits, beside {n} tasks of the first"),
            Self::HandOff => "hand-off to a client that has slept for 35 ms".to_owned(),
            Self::BusyTry => "a try that finds the lock held".to_owned(),
            Self::Withdrawal => "the withdrawal of a waiter".to_owned(),
            Self::Shared(n) => format!("16 shared holders on one name, {n} % of them exclusive"),
            Self::Permits => "16 tasks of four clients on four permits".to_owned(),
            Self::Held(n) => format!("{n} locks held by one client"),
            Self::Recovery => "the next grant after the holder's kill −9".to_owned(),
            Self::Silence => "the next grant after the holder's process was stopped".to_owned(),
        }
    }

    /// Returns its figures, the one that counts first.
    pub fn figures(self) -> &'static [Figure] {
        match self {
            Self::Uncontended => &[
                Figure::P50,
                Figure::P99,
                Figure::AcquireTrips,
                Figure::ReleaseTrips,
            ],
            Self::OwnNames(_) | Self::Waiters(_) => &[Figure::Rate],
            Self::Tasks(_) => &[Figure::Rate, Figure::Longest, Figure::Mean, Figure::Fairness],
            Self::Clients(_) | Self::Processes(_) => &[
                Figure::Rate,
                Figure::Longest,
                Figure::Mean,
                Figure::Fairness,
                Figure::ServerTime,
                Figure::ClientTime,
            ],
            // How often they get it says little: most of the time somebody holds.
            Self::Holding(_) => &[
                Figure::ServerTime,
                Figure::ClientTime,
                Figure::Rate,
                Figure::Longest,
                Figure::Mean,
                Figure::Fairness,
            ],
            Self::Beside(_) | Self::Withdrawal => &[Figure::P50, Figure::Longest],
            Self::HandOff => &[
                Figure::P50,
                Figure::Longest,
                Figure::Release,
                Figure::HandOffTrips,
            ],
            Self::BusyTry => &[Figure::P50, Figure::P99],
            Self::Shared(_) | Self::Permits => &[Figure::Rate, Figure::Longest],
            Self::Held(_) => &[
                Figure::Processor,
                Figure::Memory,
                Figure::Packets,
                Figure::Closing,
            ],
            Self::Recovery | Self::Silence => &[Figure::Recovery],
        }
    }

    /// Returns whether there are so many contenders, or they hold for so long, that most of a measurement is to wait
    /// for the last of them.
    pub(super) fn is_crowded(self) -> bool {
        match self {
            Self::Tasks(n) | Self::Clients(n) => n >= 100,
            Self::Holding(_) => true,
            _ => false,
        }
    }

    /// The figure that counts.
    pub fn figure(self) -> Figure {
        self.figures()[0]
    }
}

/// Its name in results and on command lines, such as `own-names-16`.
impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uncontended => f.write_str("uncontended"),
            Self::OwnNames(n) => write!(f, "own-names-{n}"),
            Self::Tasks(n) => write!(f, "tasks-{n}"),
            Self::Clients(n) => write!(f, "clients-{n}"),
            Self::Processes(n) => write!(f, "processes-{n}"),
            Self::Holding(n) => write!(f, "holding-{n}ms"),
            Self::Waiters(n) => write!(f, "waiters-{n}"),
            Self::Beside(n) => write!(f, "beside-{n}"),
            Self::HandOff => f.write_str("hand-off"),
            Self::BusyTry => f.write_str("busy-try"),
            Self::Withdrawal => f.write_str("withdrawal"),
            Self::Shared(n) => write!(f, "shared-{n}"),
            Self::Permits => f.write_str("permits"),
            Self::Held(n) => write!(f, "held-{n}"),
            Self::Recovery => f.write_str("recovery"),
            Self::Silence => f.write_str("silence"),
        }
    }
}

impl From<Scenario> for String {
    fn from(scenario: Scenario) -> Self {
        scenario.to_string()
    }
}

impl FromStr for Scenario {
    type Err = UnknownScenario;

    fn from_str(name: &str) -> Result<Self, UnknownScenario> {
        let known = Self::ALL.into_iter().find(|it| it.to_string() == name);
        known.ok_or_else(|| UnknownScenario(name.to_owned()))
    }
}

impl TryFrom<String> for Scenario {
    type Error = UnknownScenario;

    fn try_from(name: String) -> Result<Self, UnknownScenario> {
        name.parse()
    }
}

/// There is no such scenario.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownScenario(String);

impl fmt::Display for UnknownScenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no scenario `{}`", self.0)
    }
}

impl Error for UnknownScenario {}

/// A figure that a round ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Figure {
    /// The median time, in µs.
    P50,
    /// The time that 99 in 100 stay below, in µs.
    P99,
    /// Acquisitions per second.
    Rate,
    /// The longest wait, in µs.
    Longest,
    /// The mean wait, in µs.
    Mean,
    /// Jain's index of how evenly the acquisitions were shared out: 1 is evenly, 1/n is all to one of n.
    Fairness,
    /// The server's processor time per lock, in µs.
    ServerTime,
    /// The clients' processor time per lock, in µs.
    ClientTime,
    /// The share of one processor core that keeping the locks takes with a ttl of 30 s, in per cent.
    Processor,
    /// The process's resident memory per lock, in bytes.
    Memory,
    /// The pieces of traffic that the client sent while every lock was renewed once: round trips, as far as they can
    /// be told from outside.
    Packets,
    /// The round trips of an acquisition, where something on the way [counts](super::Subject::round_trips) them.
    AcquireTrips,
    /// The round trips of a release, likewise.
    ReleaseTrips,
    /// The round trips from the call that releases to the next grant, by whomever they are, likewise.
    HandOffTrips,
    /// The median time of the release that hands the lock on, in µs: what a hand-off waits for at least.
    Release,
    /// The time until the next grant, in µs.
    Recovery,
    /// The time in which a client is closed that holds them, in µs: until each release is confirmed.
    Closing,
}

impl Figure {
    /// Its name, for a table's head.
    pub fn title(self) -> &'static str {
        match self {
            Self::P50 => "median",
            Self::P99 => "p99",
            Self::Rate => "locks/s",
            Self::Longest => "longest wait",
            Self::Mean => "mean wait",
            Self::Fairness => "Jain",
            Self::ServerTime => "server's processor time per lock",
            Self::ClientTime => "clients' processor time per lock",
            Self::Processor => "% of a core",
            Self::Memory => "bytes per lock",
            Self::Packets => "round trips per renewal of all",
            Self::AcquireTrips => "round trips per acquisition",
            Self::ReleaseTrips => "round trips per release",
            Self::HandOffTrips => "round trips per hand-off",
            Self::Release => "release",
            Self::Recovery => "time",
            Self::Closing => "closing",
        }
    }

    /// Returns whether it is a time, in µs.
    pub fn is_time(self) -> bool {
        matches!(
            self,
            Self::P50
                | Self::P99
                | Self::Longest
                | Self::Mean
                | Self::ServerTime
                | Self::ClientTime
                | Self::Release
                | Self::Recovery
                | Self::Closing
        )
    }

    /// Returns whether more is better.
    pub fn more_is_better(self) -> bool {
        matches!(self, Self::Rate | Self::Fairness)
    }

    /// A value of it, as people read it: three digits that count, and the unit if it is a time.
    pub fn show(self, value: f64) -> String {
        if self.is_time() {
            return match value {
                v if v < 1e3 => format!("{} µs", digits(v)),
                v if v < 1e6 => format!("{} ms", digits(v / 1e3)),
                v => format!("{} s", digits(v / 1e6)),
            };
        }
        match self {
            Self::Fairness => format!("{value:.2}"),
            _ => digits(value),
        }
    }
}

/// Three digits that count; thousands are set apart.
fn digits(value: f64) -> String {
    match value.abs() {
        v if v < 0.005 => "0".to_owned(),
        v if v < 10.0 => format!("{value:.2}"),
        v if v < 100.0 => format!("{value:.1}"),
        _ => {
            let plain = format!("{value:.0}");
            let mut grouped = String::new();
            for (place, digit) in plain.chars().enumerate() {
                if place > 0 && (plain.len() - place).is_multiple_of(3) {
                    grouped.push(',');
                }
                grouped.push(digit);
            }
            grouped
        }
    }
}
