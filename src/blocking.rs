//! The blocking API, for programs without an async runtime: every call blocks its thread until it is done.
//!
//! Here is [`connect`]. Everything else is that of [`lockkit_core::blocking`], whose docs say how it goes together with an async
//! runtime.
//!
//! ```
//! use lockkit::{AcquireOptions, ReentrantOwner, blocking};
//!
//! let client = blocking::connect("memory:?namespace=blocking")?;
//! let (from, to) = (client.lock("account/1")?, client.lock("account/2")?);
//! let token = from.with_lock(|held| held.token())?;
//! let both = blocking::acquire_all(&[&from, &to], &AcquireOptions::new())?;
//! assert!(both.guards()[0].token() > token);
//! assert!(from.try_acquire()?.is_none());
//! both.release()?;
//!
//! let (tree, me) = (blocking::ReentrantLock::new(client.lock("tree")?), ReentrantOwner::new());
//! let (outer, inner) = (tree.acquire(&me)?, tree.acquire(&me)?);
//! assert_eq!(outer.token(), inner.token());
//!
//! let leadership = client.election("scheduler")?.candidate("me")?.campaign()?;
//! assert!(leadership.is_held());
//! leadership.resign()?;
//! # Ok::<(), lockkit::Error>(())
//! ```

#[doc(inline)]
pub use lockkit_core::blocking::*;

use crate::{LockConfig, Result};

/// Connects to the lock server that `url` names, as [`crate::connect`] does.
///
/// For a [`LockConfig`], call [`LockClient::connect_with`]:
///
/// ```
/// use lockkit::{LockConfig, blocking};
///
/// let config = LockConfig::from_url("memory:?ttl=10s")?;
/// let client = blocking::LockClient::connect_with(|| config.connect())?;
/// assert!(client.inspect("job")?.is_free());
/// # Ok::<(), lockkit::Error>(())
/// ```
///
/// # Errors
/// Those of [`crate::connect`]; [`Error::Backend`](crate::Error::Backend) if the background thread cannot be started, or within an
/// async task.
pub fn connect(url: &str) -> Result<LockClient> {
    let config = LockConfig::from_url(url)?;
    LockClient::connect_with(|| config.connect())
}
