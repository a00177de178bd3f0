//! Tests against private servers.

mod child;
mod conformance;
mod connecting;
mod faults;
mod fenced;
mod namespaces;
mod schedules;
mod servers;
mod sessions;
mod soak;
#[cfg(feature = "tls")]
mod tls;
mod tokens;
