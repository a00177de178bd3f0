//! Integration tests of the core.

mod driver;
