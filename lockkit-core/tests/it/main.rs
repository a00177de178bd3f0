//! Integration tests of the core.

mod conformance;
#[cfg(feature = "blocking")]
mod blocking;
mod driver;
#[cfg(all(feature = "file", unix))]
mod file;
