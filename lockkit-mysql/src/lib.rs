//! Locks in MySQL and MariaDB.
//!
//! A session of its own locks the lock's row (`SELECT … FOR UPDATE`). So a lock is as exclusive as the server's row locks, also
//! towards programs that lock that row without this library. The lease is the session's `wait_timeout`: the server ends the
//! session of a silent holder, in the middle of its transaction. A holder's death frees the lock at once. Fencing tokens are
//! reserved in blocks, apart from the transaction that holds, so no rollback takes them back. Within a block they follow a
//! counter of the server, which costs no write.
//!
//! [`Mode::Lease`] keeps owner and expiry in a row instead.
//!
//! ```no_run
//! use lockkit_core::LockClient;
//! use lockkit_mysql::{MySqlBackend, MySqlConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkit_core::Result<()> {
//! let config = MySqlConfig::new("mysql://app:s3cret@db.example/app");
//! let client = LockClient::new(MySqlBackend::connect(config).await?);
//! let guard = client.lock("orders/42")?.acquire().await?;
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod config;
mod connection;
mod control;
mod disconnect_watch;
mod error;
mod fenced;
mod inspect;
mod layout;
mod lease_claim;
mod lease_sql;
mod list;
mod name_cache;
mod relay;
mod replies;
mod row_claim;
mod row_sql;
mod schema;
mod server;
mod session;
mod tls;
mod tokens;

pub use backend::MySqlBackend;
pub use config::{Mode, MySqlConfig, PublicKey, Schema, Tls};
pub use fenced::{FencedError, FencedTable};
pub use schema::ddl;
/// The database client that [`FencedTable`] takes its connections from.
pub use sqlx;

const NAME: &str = "mysql";

/// Returns random bytes of the operating system, which nobody guesses.
fn random<const LENGTH: usize>(operation: &'static str) -> lockkit_core::Result<[u8; LENGTH]> {
    let mut bytes = [0; LENGTH];
    getrandom::fill(&mut bytes).map_err(|error| {
        lockkit_core::Error::permanent(NAME, operation, format!("no random numbers: {error}"))
    })?;
    Ok(bytes)
}
