//! Redlock on five real masters.

mod conformance;
mod world;
