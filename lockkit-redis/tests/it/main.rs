//! The Redis backend against real servers.

mod conformance;
