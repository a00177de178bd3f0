//! The facade from outside.

#[cfg(feature = "blocking")]
mod blocking;
mod config;
mod connecting;
#[cfg(all(feature = "file", feature = "redis", feature = "zk", feature = "mysql"))]
mod listing;
#[cfg(feature = "metrics")]
mod observability;
mod urls;
