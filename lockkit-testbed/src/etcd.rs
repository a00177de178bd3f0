//! etcd servers: one by itself, and a cluster of three whose members can be cut off from each other.
//!
//! ```no_run
//! use lockkit_testbed::etcd::EtcdServer;
//!
//! # fn main() -> std::io::Result<()> {
//! let server = EtcdServer::plain()?;
//! server.ctl(&["put", "locks/a", "label"])?;
//! server.kill()?;
//! server.start()?;
//! assert_eq!(server.keys("locks/")?, ["locks/a"]);
//! # Ok(())
//! # }
//! ```
//!
//! The wall clock of such a server cannot be set: it asks the system for it without a library in between. It reckons with
//! its monotonic clock alone.

use std::{env, ffi::OsString, process::Command};

use crate::template::printed;

mod cluster;
mod server;
mod sockets;

pub use cluster::EtcdCluster;
pub use server::{EtcdBuilder, EtcdServer};

/// The server's program: what the environment variable `LOCKKIT_ETCD` names, or else `etcd`.
fn program() -> OsString {
    env::var_os("LOCKKIT_ETCD").unwrap_or_else(|| "etcd".into())
}

/// The command-line client: what the environment variable `LOCKKIT_ETCDCTL` names, or else `etcdctl`.
fn control() -> OsString {
    env::var_os("LOCKKIT_ETCDCTL").unwrap_or_else(|| "etcdctl".into())
}

/// Returns why there are no etcd servers on this machine, and what to do; `None` if there are.
pub fn missing() -> Option<String> {
    let error = printed(Command::new(program()).arg("--version"))
        .and_then(|_| printed(Command::new(control()).arg("version").env("ETCDCTL_API", "3")))
        .err()?;
    Some(format!(
        "{error}; on Debian or Ubuntu: apt-get install etcd-server etcd-client"
    ))
}
