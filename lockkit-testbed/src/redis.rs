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

use std::{
    env,
    ffi::{OsStr, OsString},
    process::{Command, Stdio},
};

mod cluster;
mod monitor;
mod resp;
mod sentinels;
mod server;

pub use cluster::RedisCluster;
pub use monitor::Monitor;
pub use sentinels::RedisSentinels;
pub use server::{Fsync, RedisBuilder, RedisServer};

/// The server that everything here runs on unless told otherwise: what the environment variable `LOCKKIT_REDIS_SERVER`
/// names, or else `redis-server`.
pub fn program() -> OsString {
    env::var_os("LOCKKIT_REDIS_SERVER").unwrap_or_else(|| "redis-server".into())
}

/// A server of Valkey: what the environment variable `LOCKKIT_VALKEY_SERVER` names, or else `valkey-server`. For
/// [`RedisBuilder::program`].
pub fn valkey() -> OsString {
    env::var_os("LOCKKIT_VALKEY_SERVER").unwrap_or_else(|| "valkey-server".into())
}

/// Returns why there are no Redis servers on this machine, and what to do; `None` if there are.
pub fn missing() -> Option<String> {
    cannot_run(&program(), "on Debian or Ubuntu: apt-get install redis-server")
}

/// Returns why there are no Valkey servers on this machine, and what to do; `None` if there are.
pub fn missing_valkey() -> Option<String> {
    cannot_run(
        &valkey(),
        "say where it is in the environment variable LOCKKIT_VALKEY_SERVER",
    )
}

fn cannot_run(program: &OsStr, advice: &str) -> Option<String> {
    let version = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let program = program.display();
    match version {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("{program} does not run: {status}")),
        Err(error) => Some(format!("{program} cannot be run ({error}); {advice}")),
    }
}
