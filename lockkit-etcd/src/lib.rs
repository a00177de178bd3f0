//! lockkit's etcd backend.
//!
//! Applications use the facade, `lockkit`, with its feature `etcd` and a URL such as `etcd://etcd1:2379,etcd2:2379/services`.
//!
//! The layout on the servers is documented and stable, and other clients share it on purpose: the contenders for the lock `n` of the
//! namespace `lockkit` have their keys under `lockkit/n/`, as those of `etcdctl lock lockkit/n` have. Its name is percent-encoded outside
//! of `[A-Za-z0-9._-]`. Semaphores are under `lockkit/%semaphores/`.
//!
//! ```no_run
//! use lockkit_core::LockClient;
//! use lockkit_etcd::{EtcdBackend, EtcdConfig};
//!
//! # async fn example() -> lockkit_core::Result<()> {
//! let backend = EtcdBackend::connect(EtcdConfig::new("etcd1:2379,etcd2:2379,etcd3:2379")).await?;
//! let client = LockClient::new(backend);
//! let guard = client.lock("orders/42")?.acquire().await?;
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod bounded;
mod claim;
mod config;
mod connection;
mod error;
mod fence;
mod holder_watch;
mod layout;
mod lease;
mod list;
mod members;
mod own_key;
mod queue;
#[cfg(test)]
mod rogue;
mod session;
#[cfg(feature = "tls")]
mod tls;
mod watch;
mod wire;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use backend::EtcdBackend;
pub use config::{Credentials, EtcdConfig, Tls};

/// The name of this backend.
const NAME: &str = "etcd";

/// Locks a mutex, also a poisoned one: no change under one of these mutexes can be left half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
