//! `lockkit run` under random schedules: odd surroundings, bursts of signals, commands that do not behave, and servers that fail.
//!
//! A [`Schedule`] follows from a seed. Two or three processes of `lockkit run` compete for one name. The command that each of them runs
//! is a [witness]: it appends to one file when it begins, as it goes on and when it ends, and so do the processes that it starts. The order of the
//! lines in that file shows two commands at once, whatever any clock says. docs/torture.md has the laws.

mod judge;
mod play;
mod schedule;
mod surroundings;
pub mod witness;

use std::{ffi::OsString, io, path::PathBuf};

use lockkit_conformance::torture::Target;

pub use schedule::Schedule;

/// The programs that a schedule starts.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The `lockkit` program. `None` runs the commands without a lock, which the judge has to notice.
    pub lockkit: Option<PathBuf>,
    /// The program that is a [witness] if its environment says so, with its arguments.
    pub witness: Vec<OsString>,
}

/// The outcome of a schedule.
#[derive(Debug, Default)]
pub struct Verdict {
    /// The violations, each of which begins with the law.
    pub findings: Vec<String>,
    /// The commands that began.
    pub begun: usize,
    /// The commands that were stopped since their lock was lost.
    pub lost: usize,
    /// All that happened, for whoever looks into a violation.
    pub log: String,
}

/// Plays a schedule and judges it.
///
/// # Errors
/// If something of the machine's own fails, such as a fault that cannot be done.
pub fn play(target: &dyn Target, programs: &Programs, schedule: &Schedule) -> io::Result<Verdict> {
    let record = play::play(target, programs, schedule)?;
    Ok(judge::judge(schedule, &target.faults(), &record))
}
