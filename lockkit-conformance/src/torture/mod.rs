//! Torture: random schedules over all of the API, on a real server, with faults, and a judge.
//!
//! A [`Schedule`] is one epoch of some seconds: clients in several processes, what their tasks do and when, and what
//! befalls the deployment meanwhile. It follows from a seed. A [`Target`] is the deployment; what its [`Fault`]s excuse
//! is what docs/guarantees.md calls ✘, in just that window.

mod faults;
mod judge;
mod play;
mod record;
mod run;
mod schedule;
mod shrink;

pub use faults::{Bare, Fault, Target, Told};
use judge::Bounds;
pub(crate) use play::help;
pub use record::{Finding, Law};
pub(crate) use run::read_part;
pub use run::{Campaign, Effort, Failure, Report, Torture, Verdict};

pub use schedule::{
    Ask, ClientPlan, End, Fate, HoldAs, KILL, Millis, STOP, Schedule, Shape, Step, Strike, TaskPlan,
};
