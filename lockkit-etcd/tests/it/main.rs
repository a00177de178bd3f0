//! Integration tests of the etcd backend, on real servers.

mod access;
mod cancel;
mod cluster;
mod conformance;
mod faults;
mod gate;
mod namespaces;
mod observers;
mod recipe;
mod server;
mod sessions;
mod settings;
#[cfg(feature = "tls")]
mod tls;
