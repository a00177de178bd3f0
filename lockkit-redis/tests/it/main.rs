//! The Redis backend against real servers.

mod common;
mod conformance;
mod faults;
mod foreign;
mod guarantees;
mod queue;
mod refusals;
mod soak;
