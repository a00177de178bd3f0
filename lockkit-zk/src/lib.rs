//! lockkit's ZooKeeper backend.
//!
//! Applications use the facade, `lockkit`, with its feature `zk` and a URL such as `zk://zk1:2181,zk2:2181/services`.
//!
//! The layout on the server is documented and stable, and other clients share it on purpose: see [`Nodes`]. The lock `n` of
//! the namespace `lockkit` is the directory `/lockkit/n`. Its name is percent-encoded outside of `[A-Za-z0-9._-]`.
//! Semaphores are in `/lockkit/%semaphores`. Each session writes to a node of its own in `/lockkit/%sessions`.
//!
//! ```no_run
//! use lockkit_core::LockClient;
//! use lockkit_zk::{ZkBackend, ZkConfig};
//!
//! # async fn example() -> lockkit_core::Result<()> {
//! let backend = ZkBackend::connect(ZkConfig::new("zk1:2181,zk2:2181,zk3:2181")).await?;
//! let client = LockClient::new(backend);
//! let guard = client.lock("orders/42")?.acquire().await?;
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod abandon_watch;
mod backend;
mod claim;
mod config;
mod connection;
mod crowded_dirs;
mod distance;
mod error;
mod layout;
mod lease;
mod own_node;
mod predecessors;
mod queue;
mod session;
mod simple;
mod turn;
mod watch;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use backend::ZkBackend;
pub use config::{Access, Digest, Nodes, Parents, ZkConfig};

/// The name of this backend.
const NAME: &str = "zookeeper";

/// Locks a mutex, also a poisoned one: no change under one of these mutexes can be left half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
