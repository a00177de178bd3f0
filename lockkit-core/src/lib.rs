//! The core of lockkit: values, the [backend contract](spi), the one driver, and the memory backend.
//!
//! Applications use the facade, `lockkit`, which re-exports all of this. A backend of your own needs this crate alone:
//! implement [`spi::Backend`] and pass it to [`LockClient::new`].

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "blocking")]
pub mod blocking;
mod capabilities;
mod client;
mod driver;
mod error;
mod guard;
mod lock;
pub mod memory;
mod multi;
mod name;
mod options;
mod reentrant;
pub mod spi;
mod suspension;
mod sync;
mod token;

pub use capabilities::{Capabilities, FencingDurability, Holder, LockState};
pub use client::LockClient;
pub use error::{BoxError, Error, LossReason, Result};
pub use guard::{EndedSignal, HoldView, LockGuard, LostSignal, RenewalFailing};
pub use lock::{DistributedLock, DistributedLockExt, Lock};
pub use memory::MemoryBackend;
pub use multi::{LockSet, acquire_all};
pub use name::{LockId, LockKind, LockName};
pub use options::AcquireOptions;
pub use reentrant::{ReentrantGuard, ReentrantLock, ReentrantOwner};
pub use token::{FenceGate, FencingToken, StaleToken};
pub use tokio::time::Instant;
