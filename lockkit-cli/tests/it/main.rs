//! The `lockkit` command as its users have it: real processes on a real directory.

mod breaking;
mod catalogue;
mod check;
mod command_line;
mod connecting;
mod fencing;
mod held_up;
mod holding;
mod jobs;
mod limits;
mod listing;
mod looking;
mod losing;
mod rogues;
mod servers;
mod signals;
mod terminal;
mod tool;
mod torture;
mod zookeeper;
