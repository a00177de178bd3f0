//! Locks in PostgreSQL, from version 14 on.
//!
//! A session of its own has the lock: a session-level advisory lock, which no table, row or transaction keeps. So an idle holder
//! delays no vacuum, however long it holds. The lease is the session's `idle_session_timeout`: the server ends the session of a
//! silent holder. A holder's death frees the lock at once, and a holder whose session has ended is told by the server. Fencing
//! tokens are drawn from a sequence in the statement that locks, after the lock is had.
//!
//! ```no_run
//! use lockkit_core::LockClient;
//! use lockkit_postgres::{PostgresBackend, PostgresConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkit_core::Result<()> {
//! let config = PostgresConfig::new("postgres://app:s3cret@db.example/locks");
//! let client = LockClient::new(PostgresBackend::connect(config).await?);
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
mod control;
mod error;
mod fenced;
mod inspect;
mod layout;
mod list;
mod replies;
mod schema;
mod server;
mod session;
mod sql;
mod stream;
#[cfg(feature = "tls")]
mod tls;

pub use backend::PostgresBackend;
pub use config::{PostgresConfig, Schema, SslMode};
pub use fenced::{FencedError, FencedTable};
pub use schema::ddl;
/// The database client that [`FencedTable`] takes its connections from.
pub use tokio_postgres;

const NAME: &str = "postgres";
