//! Redlock on five real masters.

mod conformance;
mod faults;
mod foreign;
mod guard;
mod soak;
mod world;
