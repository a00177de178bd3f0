//! Redis servers: single ones, replicas, a group under Sentinel and a cluster.
//!
//! ```no_run
//! use lockkit_testbed::redis::RedisServer;
//!
//! # fn main() -> std::io::Result<()> {
//! let server = RedisServer::plain()?;
//! assert_eq!(server.cli(&["SET", "key", "value"])?, "OK");
//! server.restart()?;
//! assert_eq!(server.cli(&["GET", "key"])?, "value");
//! # Ok(())
//! # }
//! ```

use std::process::{Command, Stdio};

mod cluster;
mod monitor;
mod resp;
mod sentinels;
mod server;

pub use cluster::RedisCluster;
pub use monitor::Monitor;
pub use sentinels::RedisSentinels;
pub use server::{Fsync, RedisBuilder, RedisServer};

const PROGRAM: &str = "redis-server";

/// Why there are no Redis servers on this machine, and what to do; `None` if there are.
pub fn missing() -> Option<String> {
    let version = Command::new(PROGRAM)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match version {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("{PROGRAM} does not run: {status}")),
        Err(error) => Some(format!(
            "{PROGRAM} cannot be run ({error}); on Debian or Ubuntu: apt-get install redis-server"
        )),
    }
}
