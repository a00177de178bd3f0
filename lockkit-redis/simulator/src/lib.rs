//! Redlock's decisions on simulated masters, clocks and networks.
//!
//! The decisions are those of the backend: `lockkit_redis::redlock_quorum`, with the very `Attempt` that a claim runs.
//! Around them are clients that do what the driver does, and masters that do what the scripts do, all without I/O and on
//! one virtual clock. A schedule follows from a [`Config`] and a seed. Afterwards its holds are compared with each other.

mod campaign;
mod client;
mod config;
mod history;
mod master;
mod mutant;
#[cfg(test)]
mod schedules;
mod table;
mod world;

pub use campaign::{Finding, Summary, campaign};
pub use config::{Config, Crash, Expected, Features, Network, Promise, Vanishing, WallClocks};
pub use history::Faults;
pub use mutant::Mutant;
pub use table::{replaced, table};
pub use world::{Report, Tally, run, trace};
