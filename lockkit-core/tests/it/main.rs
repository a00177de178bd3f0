//! Integration tests of the core.

mod conformance;
mod driver;
#[cfg(all(feature = "file", unix))]
mod file;
