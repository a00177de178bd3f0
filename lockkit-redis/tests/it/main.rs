//! The Redis backend against real servers.

mod cancel;
mod common;
mod conformance;
mod cost;
mod deployments;
mod faults;
mod foreign;
mod guarantees;
mod native;
mod passed;
mod peers;
mod queue;
mod redlock;
mod refusals;
mod review;
mod soak;
mod workers;
