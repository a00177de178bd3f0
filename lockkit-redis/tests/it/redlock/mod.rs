//! Redlock on five real masters.

mod conformance;
mod faults;
mod guard;
mod world;
