//! That each tool really does what the tests of the backends rely on.

mod clock;
mod echo;
mod mysql;
mod port;
mod process;
mod proxy;
mod redis;
mod skip;
mod until;
mod zookeeper;
