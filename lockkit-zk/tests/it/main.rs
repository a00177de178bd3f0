//! Integration tests of the ZooKeeper backend, on real servers.

mod cancel;
mod conformance;
mod crowd;
mod downgrade;
mod ensemble;
mod faults;
mod flood;
mod namespaces;
mod observers;
mod packets;
mod peers;
mod reattach;
mod recipe;
mod rogue;
mod server;
mod sessions;
#[cfg(feature = "tls")]
mod tls;
