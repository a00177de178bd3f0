//! Integration tests of the core.

mod conformance;
#[cfg(feature = "blocking")]
mod blocking;
mod cancel;
mod driver;
#[cfg(all(feature = "file", unix))]
mod file;
mod edges;
mod handoff;
mod probe;
mod swarm;
