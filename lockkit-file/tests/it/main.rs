//! Integration tests of the file backend.
#![cfg(unix)]

mod conformance;
mod directory;
mod fixture;
mod guarantees;
mod holds;
mod inspection;
mod moved_files;
mod semaphores;
#[cfg(target_os = "linux")]
mod stops;
mod waiters;
