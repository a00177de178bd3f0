//! ZooKeeper servers: one by itself, and an ensemble of three whose members can be cut off from each other.
//!
//! ```no_run
//! use lockkit_testbed::zookeeper::ZkServer;
//!
//! # fn main() -> std::io::Result<()> {
//! let server = ZkServer::plain()?;
//! assert!(server.word("srvr")?.contains("Mode: standalone"));
//! server.kill()?;
//! server.start()?;
//! # Ok(())
//! # }
//! ```

use std::{
    path::Path,
    process::{Command, Stdio},
};

mod ensemble;
mod journal;
mod server;
mod wire;

pub use ensemble::{OneWay, ZkEnsemble};
pub use server::{ZkBuilder, ZkServer};

const JAVA: &str = "java";
const JARS: [&str; 2] = [
    "/usr/share/java/zookeeper.jar",
    "/usr/share/java/slf4j-simple.jar",
];

/// The libraries for TLS, which come with the package of ZooKeeper.
const TLS_JARS: [&str; 8] = [
    "/usr/share/java/netty-handler.jar",
    "/usr/share/java/netty-transport.jar",
    "/usr/share/java/netty-buffer.jar",
    "/usr/share/java/netty-common.jar",
    "/usr/share/java/netty-codec.jar",
    "/usr/share/java/netty-resolver.jar",
    "/usr/share/java/netty-transport-native-epoll.jar",
    "/usr/share/java/netty-transport-native-unix-common.jar",
];

/// Returns why there are no ZooKeeper servers on this machine, and what to do; `None` if there are.
pub fn missing() -> Option<String> {
    let install = "on Debian or Ubuntu: apt-get install zookeeper default-jre-headless";
    let version = Command::new(JAVA)
        .arg("-version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match version {
        Ok(status) if status.success() => {}
        Ok(status) => return Some(format!("{JAVA} does not run: {status}; {install}")),
        Err(error) => return Some(format!("{JAVA} cannot be run ({error}); {install}")),
    }
    let mut jars = JARS.iter().chain(&TLS_JARS);
    let jar = jars.find(|jar| !Path::new(jar).exists())?;
    Some(format!("{jar} is not there; {install}"))
}
