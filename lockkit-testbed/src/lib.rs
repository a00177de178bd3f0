//! Servers and faults for the tests of lockkit's backends: everything private to the test process, on loopback, in
//! temporary directories, and gone when the process ends, however it ends.
//!
//! - [`Process`]: a server's process, to pause, resume, kill and restart.
//! - [`Port`]: a port of its own for the whole life of a server, restarts included.
//! - [`Proxy`]: a TCP proxy that loses replies, delays, cuts and resets on command.
//! - [`eventually`]: waits for a condition, so that no test waits for time to pass.
//!
//! Whatever starts or ends a process blocks for some milliseconds up to some seconds and may be called from anywhere,
//! an async test included: the proxy runs on a thread of its own.

mod directory;
mod port;
mod process;
mod proxy;
mod wait;

pub use port::Port;
pub use process::Process;
pub use proxy::{Counts, Mode, Proxy, Traffic};
pub use wait::eventually;
