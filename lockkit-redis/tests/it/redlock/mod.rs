//! Redlock on five real masters.

mod conformance;
mod connecting;
mod faults;
mod foreign;
mod repair;
mod restart_quarantine;
mod soak;
mod waiting;
mod world;
