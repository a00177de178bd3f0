//! Integration tests of the file backend.
#![cfg(unix)]

mod conformance;
mod file;
mod guarantees;
#[cfg(target_os = "linux")]
mod stops;
