//! Redlock on five real masters.

mod conformance;
mod connecting;
mod faults;
mod foreign;
mod guard;
mod repair;
mod soak;
mod waiting;
mod world;
