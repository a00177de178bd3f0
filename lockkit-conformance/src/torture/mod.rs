//! Torture: random schedules over all of the API, on a real server, with faults, and a judge.
//!
//! A [`Schedule`] is one epoch of some seconds: clients in several processes, what their tasks do and when, and what
//! befalls the deployment meanwhile. It follows from a seed. A [`Target`] is the deployment; what its [`Fault`]s excuse
//! is what docs/guarantees.md calls ✘, in just that window.
//!
//! For a backend of your own, begin with its [`Harness`](crate::Harness) as a [`Bare`] target, which has no faults. With
//! [`helpers`](Torture::helpers), clients in other processes take part, and are stopped and killed.
//!
//! ```no_run
//! use std::{sync::Arc, time::Duration};
//!
//! use async_trait::async_trait;
//! use lockkit_conformance::{Harness, torture::{Bare, Effort, Torture}};
//! use lockkit_core::{LockClient, MemoryBackend, Result};
//!
//! #[derive(Debug, Default)]
//! struct Mine(MemoryBackend); // your backend in its place
//!
//! #[async_trait]
//! impl Harness for Mine {
//!     async fn client(&self) -> Result<LockClient> {
//!         Ok(LockClient::new(self.0.clone()))
//!     }
//! }
//!
//! // Outside of any runtime: it has its own.
//! fn main() -> std::io::Result<()> {
//!     let mut torture = Torture::new(Arc::new(Bare(Arc::new(Mine::default()))))?;
//!     let effort = Effort::new(Duration::from_secs(600));
//!     let report = torture.run(4711, effort, |_, verdict| println!("{} grants", verdict.granted))?;
//!     for failure in &report.failures {
//!         println!("{:?}\n{}\n{}", failure.findings, failure.schedule, failure.log);
//!     }
//!     assert!(report.granted > 0 && report.failures.is_empty(), "{report}");
//!     Ok(())
//! }
//! ```
//!
//! Then write a [`Target`] that names its [`Fault`]s, makes them happen in [`strike`](Target::strike), and lists what is left over at the
//! end: most of what a torture finds, it finds beside a fault.

mod chronicle;
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
