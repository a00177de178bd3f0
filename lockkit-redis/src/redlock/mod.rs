//! Redlock: a majority of independent masters grants the lock.
//!
//! `quorum` decides what the masters' replies add up to, without I/O. `masters` sends requests to all of them at once.
//! `claim` is one contender. `restart_quarantine` takes the vote from masters that may have lost their grants.

mod backend;
mod claim;
mod config;
mod list;
mod masters;
#[doc(hidden)]
pub mod quorum;
mod restart_quarantine;

pub use backend::RedlockBackend;
pub use config::RedlockConfig;
pub(crate) use restart_quarantine::RestartQuarantine;

const NAME: &str = "redlock";
