//! lockkit's file backend: locks between the processes of one host, by the operating system's advisory file locks.
//!
//! Applications use the facade, `lockkit`, with its feature `file` and a URL such as `file:///var/lib/app/locks`.
//! Systems other than Unix have no such backend: there, this crate is empty.
//!
//! ```no_run
//! use lockkit_core::LockClient;
//! use lockkit_file::{FileBackend, FileConfig};
//!
//! # async fn example() -> lockkit_core::Result<()> {
//! let backend = FileBackend::open(FileConfig::new("/var/lib/app/locks")).await?;
//! let client = LockClient::new(backend);
//! let guard = client.lock("orders/42")?.acquire().await?;
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```

#![cfg(unix)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod blocking_claim;
mod boot;
mod claim;
mod config;
#[cfg(test)]
mod crash_tests;
mod disk_pace;
mod error;
mod flock;
mod hold;
mod inspect;
mod layout;
mod list;
mod queue;
mod token_record;
#[cfg_attr(not(target_os = "linux"), path = "unwatched.rs")]
mod watch;

pub use backend::FileBackend;
pub use config::FileConfig;

/// The backend's name.
const NAME: &str = "file";
