//! Tests against private servers. Both flavours run every case: MariaDB from its package, and MySQL where the environment
//! variable `LOCKKIT_MYSQLD` names its server.

mod child;
mod conformance;
mod connecting;
mod detach;
mod dropped;
mod faults;
mod fenced;
mod flood;
mod listing;
mod mixed;
mod namespaces;
mod rogue;
mod servers;
mod sessions;
mod settings;
#[cfg(feature = "tls")]
mod tls;
mod tokens;
