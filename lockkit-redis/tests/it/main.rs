//! The Redis backend against real servers.

mod announcements;
mod answers;
mod asking;
mod calls;
mod cancel;
#[cfg(feature = "tls")]
mod client_certificates;
mod common;
mod conformance;
mod corners;
mod cost;
mod deployments;
mod detach;
mod downgrade;
mod faults;
mod flood;
mod foreign;
mod guarantees;
mod handoff;
mod listing;
mod namespaces;
mod native;
mod peers;
mod queue;
mod redlock;
mod refusals;
mod rogue;
mod sentinels;
mod short_ways;
mod soak;
mod workers;
