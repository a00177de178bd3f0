//! Integration tests of the core.

#[cfg(feature = "blocking")]
mod blocking;
mod cancel;
mod conformance;
mod corners;
#[cfg(feature = "metrics")]
mod counters;
mod driver;
mod edges;
mod ended;
mod guarantees;
mod handoff;
mod probe;
mod runtime;
mod swarm;
