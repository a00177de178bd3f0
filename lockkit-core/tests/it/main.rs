//! Integration tests of the core.

mod conformance;
mod driver;
