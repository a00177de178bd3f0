//! The `lockkit` command as its users have it: real processes on a real directory.

mod command_line;
mod connecting;
mod holding;
mod limits;
mod losing;
mod servers;
mod signals;
mod terminal;
mod tool;
mod zookeeper;
