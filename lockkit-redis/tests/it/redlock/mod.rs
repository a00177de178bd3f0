//! Redlock on five real masters.

mod bursts;
mod conformance;
mod connecting;
mod downgrade;
mod faults;
mod foreign;
mod listing;
mod repair;
mod restart_quarantine;
mod soak;
mod waiting;
pub(crate) mod world;
