//! The Redis backend against real servers.

mod cancel;
mod common;
mod conformance;
mod corners;
mod cost;
mod deployments;
mod faults;
mod foreign;
mod guarantees;
mod handoff;
mod native;
mod peers;
mod queue;
mod redlock;
mod refusals;
mod soak;
mod workers;
