//! The facade from outside.

mod config;
mod connecting;
mod urls;
