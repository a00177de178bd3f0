//! Redlock: a lock is held by whoever has a majority of several independent masters.
//!
//! What the answers of the masters add up to is in `quorum`, without I/O. `masters` asks them, all at once; `claim` is one contender; `guard` keeps those out of votes that may have lost what they granted.

mod backend;
mod claim;
mod config;
mod guard;
mod masters;
#[doc(hidden)]
pub mod quorum;

pub use backend::RedlockBackend;
pub use config::RedlockConfig;
pub(crate) use guard::Guard;

const NAME: &str = "redlock";
