//! Torture: random schedules over all of the API, on a real server, with faults, and a judge.
//!
//! A [`Schedule`] is one epoch of some seconds: clients in several processes, what their tasks do and when, and what
//! befalls the deployment meanwhile. It follows from a seed. A [`Target`] is the deployment; what its [`Fault`]s excuse
//! is what docs/guarantees.md calls ✘, in just that window.

mod faults;
mod schedule;

pub use faults::{Bare, Fault, Target, Told};
pub use schedule::{
    Ask, ClientPlan, End, Fate, HoldAs, KILL, Millis, STOP, Schedule, Shape, Step, Strike, TaskPlan,
};
