//! The Redis backend of lockkit: fenced, fair and notified locks on one master, and Redlock on a majority of several masters.
//!
//! Most programs use it through the facade `lockkit`, with the feature `redis` and a URL `redis://…` or `redlock://…`.
//!
//! An exclusive lock is a plain string that is set with `NX PX` and deleted after a comparison, as in
//! [Redis's own description](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/), so that it and
//! clients in other languages exclude each other. Keys of their own hold the rest: a queue, whose head gets the lock from the
//! release before it; shared holders and permits, with a lease each; and a counter of
//! [fencing tokens](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html).

#![cfg_attr(docsrs, feature(doc_cfg))]

mod announcement;
mod backend;
#[cfg(feature = "tls")]
mod certificates;
mod claim;
mod config;
mod connect;
mod connection;
mod connection_io;
mod error;
mod intake;
mod layout;
mod list;
mod redlock;
mod script;
mod wakeup;

pub use backend::RedisBackend;
pub use config::RedisConfig;
/// Redlock's decisions, for the simulator. Not part of the public API: they may change with any release.
#[doc(hidden)]
pub use redlock::quorum as redlock_quorum;
pub use redlock::{RedlockBackend, RedlockConfig};
