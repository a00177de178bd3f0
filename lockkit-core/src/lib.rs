//! The core of lockkit.

mod capabilities;
mod error;
mod name;
mod options;
pub mod spi;
mod token;

pub use capabilities::{Capabilities, FencingDurability, Holder, LockState};
pub use error::{BoxError, Error, LossReason, Result};
pub use name::{Kind, LockId, LockName};
pub use options::AcquireOptions;
pub use token::{FenceGate, FencingToken, StaleToken};
