//! Servers and faults for the tests of lockkit's backends: everything private to the test process, on loopback, in
//! temporary directories, and gone when the process ends, however it ends.
//!
//! - [`Process`]: a server's process, to pause, resume, kill and restart.
//! - [`Port`]: a port of its own for the whole life of a server, restarts included.
//! - [`own_address`], [`hangs_up`]: an address beyond loopback, and a server that says nothing.
//! - [`redis`]: Redis servers.
//! - [`zookeeper`]: ZooKeeper servers.
//! - [`mysql`]: MariaDB and MySQL servers.
//! - [`postgres`]: PostgreSQL servers.
//! - [`etcd`]: etcd servers.
//! - [`Clock`]: a server's wall clock, to set forward and back.
//! - [`Certificates`]: for servers that speak TLS.
//! - [`Mounted`]: a file system of limited size.
//! - [`Proxy`]: a TCP proxy that loses replies, delays, cuts and resets on command.
//! - [`Rogue`]: a server that answers what no server answers.
//! - [`Shared`]: a server that the tests of a process share.
//! - [`Peer`]: a program that holds locks by another library.
//! - [`eventually`], [`soon`]: wait for a condition or a future, so that no test waits for time to pass.
//! - [`poll_at_most`]: drops a future after some polls.
//! - [`skipped`]: skips a test whose server is missing.
//!
//! Whatever starts or ends a process blocks for some milliseconds up to some seconds and may be called from anywhere,
//! an async test included: the proxy runs on a thread of its own.

mod alarm;
mod certificates;
mod clock;
mod directory;
pub mod etcd;
mod lateness;
mod mounted;
pub mod mysql;
mod peer;
mod port;
pub mod postgres;
mod process;
mod proxy;
pub mod redis;
mod rogue;
mod shared;
mod skip;
mod template;
mod wait;
pub mod zookeeper;

pub use certificates::{Certificates, ServerPair};
pub use clock::Clock;
pub use lateness::Lateness;
pub use mounted::Mounted;
pub use peer::{Peer, missing_python};
pub use port::{Port, hangs_up, own_address};
pub use process::Process;
pub use proxy::{Counts, Mode, Proxy, Traffic};
pub use rogue::{Ended, Plays, Rogue, Wire};
pub use shared::Shared;
pub use skip::skipped;
pub use wait::{eventually, poll_at_most, soon};
