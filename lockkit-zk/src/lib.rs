//! lockkit's ZooKeeper backend.
//!
//! Applications use the facade, `lockkit`, with its feature `zk` and a URL such as `zk://zk1:2181,zk2:2181/services`.
//!
//! The layout on the server is documented and stable, and other clients share it on purpose: see [`Nodes`]. The lock `n` of
//! the namespace `lockkit` is the directory `/lockkit/n`. Its name is percent-encoded outside of `[A-Za-z0-9._-]`.
//! Semaphores are in `/lockkit/%semaphores`. Each session that has asked for a lock writes to a
//! node of its own in `/lockkit/%sessions`.
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

mod backend;
mod claim;
mod config;
mod connection;
mod crowded_dirs;
mod distance;
mod downgrade;
mod error;
mod holder_watch;
mod layout;
mod lease;
mod list;
mod own_node;
mod predecessors;
mod queue;
mod relay;
mod session;
mod simple;
#[cfg(feature = "tls")]
mod tls;
mod turn;
mod watch;

pub use backend::ZkBackend;
pub use config::{Access, Digest, Nodes, Parents, Tls, ZkConfig};

/// The name of this backend.
const NAME: &str = "zookeeper";
