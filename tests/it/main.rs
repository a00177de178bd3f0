//! The facade from outside.

#[cfg(feature = "blocking")]
mod blocking;
mod config;
mod connecting;
#[cfg(all(
    target_os = "linux",
    feature = "file",
    feature = "redis",
    feature = "zk",
    feature = "mysql",
    feature = "etcd",
    feature = "postgres",
))]
mod connections;
#[cfg(all(
    feature = "file",
    feature = "redis",
    feature = "zk",
    feature = "mysql",
    feature = "etcd",
    feature = "postgres",
    feature = "tls",
    feature = "serde"
))]
mod documented;
#[cfg(all(feature = "file", feature = "redis", feature = "zk", feature = "mysql"))]
mod listing;
#[cfg(feature = "metrics")]
mod observability;
#[cfg(all(
    feature = "file",
    feature = "redis",
    feature = "zk",
    feature = "mysql",
    feature = "etcd",
    feature = "postgres",
))]
mod swaps;
#[cfg(all(
    target_os = "linux",
    feature = "file",
    feature = "redis",
    feature = "zk",
    feature = "mysql",
    feature = "etcd",
    feature = "postgres",
))]
mod tasks;
mod urls;
