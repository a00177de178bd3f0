//! The core of lockkit: values, the [backend contract](spi), the one driver, and the memory backend.
//!
//! Applications use the facade, `lockkit`, which re-exports all of this. A backend of your own needs this crate alone:
//! implement [`spi::Backend`] and pass it to [`LockClient::new`].

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "blocking")]
pub mod blocking;
mod capabilities;
mod client;
mod detached;
mod driver;
mod election;
mod error;
mod guard;
mod list;
mod lock;
pub mod memory;
mod multi;
mod name;
mod options;
mod provider;
mod reentrant;
mod revocation;
pub mod spi;
mod suspension;
mod sync;
mod token;

/// The attribute of an `impl` of [`DistributedLock`], [`spi::Backend`] or [`spi::Claim`].
#[doc(no_inline)]
pub use async_trait::async_trait;
pub use capabilities::{Capabilities, FencingDurability, Holder, ListedLock, LockState};
pub use client::LockClient;
pub use detached::{DetachError, DetachedHold};
pub use election::{Candidate, Election, Leader, Leadership, Observer};
pub use error::{BoxError, DowngradeError, Error, HoldEnd, LossReason, Result, RunError};
pub use guard::{EndedSignal, HoldView, LockGuard, LostSignal, RenewalFailing};
pub use list::LockList;
pub use lock::{DistributedLock, DistributedLockExt, Lock};
pub use memory::MemoryBackend;
pub use multi::{LockSet, acquire_all, try_acquire_all};
pub use name::{LockId, LockKind, LockName};
pub use options::AcquireOptions;
pub use provider::LockProvider;
pub use reentrant::{ReentrantGuard, ReentrantLock, ReentrantOwner};
pub use revocation::Revocation;
pub use token::{FenceGate, FencingToken, StaleToken};
pub use tokio::time::Instant;
