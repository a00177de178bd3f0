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
#[cfg(all(feature = "file", unix))]
mod file;
#[cfg(all(feature = "file", target_os = "linux"))]
mod file_stops;
mod guarantees;
mod handoff;
mod probe;
mod runtime;
mod swarm;
