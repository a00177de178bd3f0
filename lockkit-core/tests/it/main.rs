//! Integration tests of the core.

#[cfg(feature = "blocking")]
mod blocking;
#[cfg(feature = "blocking")]
mod blocking_election;
mod blocking_likes;
#[cfg(feature = "blocking")]
mod blocking_places;
mod cancel;
mod conformance;
mod corners;
mod detach;
mod downgrade;
mod driver;
mod edges;
mod election;
mod ended;
mod guarantees;
mod handoff;
mod hold_at_least;
mod listing;
mod many_permits;
mod max_hold;
mod memory;
#[cfg(feature = "metrics")]
mod meters;
mod own_locks;
mod probe;
mod provider;
mod revoke;
mod run_error;
mod runtime;
#[cfg(feature = "serde")]
mod serialized;
mod spans;
mod spellings;
mod swarm;
mod try_all;
mod ttl;
