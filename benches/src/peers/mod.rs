//! What lockkit is measured beside: the least that can be done on each server, and other libraries.

mod file;
mod memory;
mod mysql;
mod redis;
mod zookeeper;

use lockkit_conformance::measure::Scenario;

pub use self::{
    file::{DistributedFileLock, LockedFile},
    memory::TokioSync,
    mysql::{ForUpdate, GetLock},
    redis::{Rslock, SetNx},
    zookeeper::{Curator, CuratorLock, EphemeralNode, curator_lock},
};

/// Most have no shared mode and no semaphores, or other ones.
fn exclusive_alone(scenario: Scenario) -> Option<String> {
    matches!(scenario, Scenario::Shared(_) | Scenario::Permits)
        .then(|| "it is measured in exclusive mode alone".to_owned())
}

/// The least that can be done does not wait for anybody.
fn uncontended_alone(scenario: Scenario) -> Option<String> {
    let fits = matches!(scenario, Scenario::Uncontended | Scenario::OwnNames(_));
    (!fits).then(|| "it cannot wait".to_owned())
}
