//! One distributed-lock API with interchangeable backends.
//!
//! Application code holds a [`Lock`], or an `Arc<dyn` [`DistributedLock`]`>`, and never learns which backend serves
//! it. A cargo feature compiles a backend in, and a URL in a config file picks it: see [`connect`].
//!
//! ```
//! use std::time::Duration;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let work = || async { Ok::<(), lockkit::Error>(()) };
//! let client = lockkit::connect("memory:").await?; // or file:///var/lib/app/locks: nothing else changes
//! let lock = client.lock("orders/42")?; // no I/O
//!
//! let guard = lock.acquire().await?; // waits until the lock is free; drop the future to cancel
//! assert!(lock.try_acquire().await?.is_none(), "taken; an outage would be an error, never `None`");
//! let busy = lock.acquire_timeout(Duration::from_millis(10)).await.unwrap_err();
//! assert!(busy.is_timeout());
//!
//! guard.run(work()).await??; // stops the work if the lock is lost
//! let token = guard.token(); // goes with each write: the database refuses a holder that has been superseded
//! guard.check()?; // `Error::Lost` once the lock is lost
//! tokio::select! { // or watch for the loss yourself
//!     reason = guard.lost() => return Err(format!("stop: {reason}").into()),
//!     done = work() => done?,
//! }
//! guard.release().await?; // confirms the release; dropping the guard releases too
//! # let _ = token;
//! # Ok(())
//! # }
//! ```
//!
//! # Where to go from here
//!
//! | to | use |
//! |---|---|
//! | let readers in together | [`Lock::shared`] |
//! | let up to *n* holders in | [`LockClient::semaphore`] |
//! | take several locks at once | [`acquire_all`], [`try_acquire_all`] |
//! | acquire again within a hold | [`ReentrantLock`] |
//! | go on with a hold in another process | [`LockGuard::detach`], [`LockClient::adopt`] |
//! | run a closure under a lock | [`DistributedLockExt::with_lock`], from the [`prelude`] |
//! | elect a leader, or see who leads | [`LockClient::election`] |
//! | set options | [`AcquireOptions`], [`Lock::with_options`], [`LockConfig`] |
//! | see who holds | [`LockClient::inspect`] |
//! | end a program cleanly | [`LockClient::close`] |
//! | wrap or mock a lock | [`DistributedLock`] |
//! | wrap or mock what makes locks by name | [`LockProvider`] |
//! | write a backend of your own | the [`spi`], then [`LockClient::new`] |
//!
//! The [guide](https://github.com/lockkit/lockkit/blob/main/docs/guide.md) is a tutorial with diagrams. Beside it are
//! pages on choosing a backend, on every option, and on what each backend guarantees.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use lockkit::{AcquireOptions, prelude::*};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkit::Result<()> {
//! # let client = lockkit::connect("memory:?namespace=more").await?;
//! let lock = client
//!     .lock("orders/42")?
//!     .with_options(AcquireOptions::new().ttl(Duration::from_secs(10)).label("billing@host-7"));
//! let readers = lock.shared();
//! let gpus = client.semaphore("gpu", 4)?;
//!
//! let answer = lock.with_lock(|held| async move { held.token().get() + 42 }).await?;
//! assert!(answer > 42);
//!
//! let anything: Vec<Arc<dyn DistributedLock>> = vec![Arc::new(readers), Arc::new(gpus)];
//! for lock in &anything {
//!     lock.acquire().await?.release().await?;
//! }
//! client.close(Duration::from_secs(5)).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `file` (default) | the file backend, `file:`: locks between the processes of one host |
//! | `redis` | the Redis backend: one master, `redis:`, or a majority of several, `redlock:` |
//! | `zk` | the ZooKeeper backend, `zk:` |
//! | `mysql` | the MySQL and MariaDB backend, `mysql:` |
//! | `etcd` | the etcd backend, `etcd:` |
//! | `postgres` | the PostgreSQL backend, `postgres:` |
//! | `tls` | connections over TLS for those of Redis, Redlock, ZooKeeper, etcd, MySQL, MariaDB and PostgreSQL that are compiled in |
//! | `full` | every backend; not `tls`, `serde`, `metrics` and `blocking` |
//! | `serde` | `Deserialize` for [`LockConfig`]; both traits for names, tokens, lock states, holders, detached holds and reasons of a loss |
//! | `metrics` | metrics through the `metrics` facade: gauges, histograms and counters |
//! | `blocking` | an API for programs without an async runtime |
//!
//! A feature never changes what another one does. Without any feature there is only the memory backend, and no client
//! crate is compiled. [What a feature costs](https://github.com/lockkit/lockkit/blob/main/docs/footprint.md) counts crates.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "blocking")]
pub mod blocking;
mod config;
mod connect;
mod options;
mod url;

pub use config::{
    EtcdSection, FileSection, LockConfig, MysqlSection, PostgresSection, RedisSection, RedlockSection,
    ZkSection,
};
pub use connect::connect;
#[doc(inline)]
pub use lockkit_core::*;
#[cfg(feature = "etcd")]
pub use lockkit_etcd as etcd;
#[cfg(feature = "etcd")]
#[doc(inline)]
pub use lockkit_etcd::{EtcdBackend, EtcdConfig};
#[cfg(all(feature = "file", unix))]
#[doc(inline)]
pub use lockkit_file::{FileBackend, FileConfig};
#[cfg(feature = "mysql")]
pub use lockkit_mysql as mysql;
#[cfg(feature = "mysql")]
#[doc(inline)]
pub use lockkit_mysql::{MySqlBackend, MySqlConfig};
#[cfg(feature = "postgres")]
pub use lockkit_postgres as postgres;
#[cfg(feature = "postgres")]
#[doc(inline)]
pub use lockkit_postgres::{PostgresBackend, PostgresConfig};
#[cfg(feature = "redis")]
#[doc(inline)]
pub use lockkit_redis::{RedisBackend, RedisConfig, RedlockBackend, RedlockConfig};
#[cfg(feature = "zk")]
pub use lockkit_zk as zk;
#[cfg(feature = "zk")]
#[doc(inline)]
pub use lockkit_zk::{ZkBackend, ZkConfig};

/// The traits, for `use lockkit::prelude::*`.
pub mod prelude {
    pub use lockkit_core::{DistributedLock, DistributedLockExt};
}

/// The Rust in the documents, compiled and run.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../README.md")]
    struct Readme;

    #[doc = include_str!("../docs/guide.md")]
    struct Guide;

    #[doc = include_str!("../docs/choosing.md")]
    struct Choosing;

    #[doc = include_str!("../docs/options.md")]
    struct Options;
}
