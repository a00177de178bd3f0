//! Redlock's decisions on simulated masters, clocks and networks.
//!
//! The file that decides, `quorum.rs` of `lockkit-redis`, is compiled into this package as it is. Around it are clients
//! that do what the driver does, without I/O, and masters that do what the scripts do, all on one virtual clock. A
//! schedule follows from a [`Config`] and a seed; its holds are compared with each other afterwards.

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
