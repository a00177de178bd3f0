//! Integration tests of the ZooKeeper backend, on real servers.

mod cancel;
mod conformance;
mod crowd;
mod ensemble;
mod faults;
mod packets;
mod peers;
mod reattach;
mod recipe;
mod server;
mod sessions;
