//! The capabilities of a backend, and the result of an inspection.

use std::time::{Duration, SystemTime};

use crate::{FencingToken, LockKind, LockName};

/// The capabilities of a backend. The conformance suite asserts each one.
///
/// ```
/// use lockkit_core::Capabilities;
///
/// let mut capabilities = Capabilities::default();
/// capabilities.shared = true;
/// assert!(!capabilities.fifo);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an independent yes or no about a backend"
)]
pub struct Capabilities {
    /// Waiters are granted the lock in the order in which they began to wait, also across processes, with
    /// `local_handoffs = 0`.
    pub fifo: bool,
    /// It has shared mode.
    pub shared: bool,
    /// It has semaphores.
    pub permits: bool,
    /// The backend wakes a waiter for a lock, rather than the fallback poll alone. A waiter for a permit is woken too, or looks
    /// much more often than that poll; the backend's page says how often.
    pub notified: bool,
    /// A hold has a lease that expires unless it is renewed. Without one, a hold lasts as long as its process or
    /// connection.
    pub lease: bool,
    /// A release may pass the hold on within a client. `false` where the order across processes is strict.
    pub local_handoffs: bool,
    /// [`LockGuard::downgrade`](crate::LockGuard::downgrade) turns an exclusive hold into a shared one without a gap.
    pub downgrade: bool,
    /// [`LockClient::revoke`](crate::LockClient::revoke) can ask another holder to give up its hold.
    pub revoke: bool,
    /// [`LockClient::revoke_by_force`](crate::LockClient::revoke_by_force) can end someone else's hold.
    pub revoke_by_force: bool,
    /// [`LockClient::list`](crate::LockClient::list) lists what is held.
    pub list: bool,
    /// A hold can be [detached](crate::LockGuard::detach), and adopted by another client, in each of the backend's modes.
    pub detach: bool,
    /// [`LockClient::raise_fence`](crate::LockClient::raise_fence) can raise its tokens.
    pub raise_fence: bool,
    /// The failures that fencing tokens survive.
    pub fencing: FencingDurability,
}

/// The failures after which a backend's fencing tokens still rise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FencingDurability {
    /// None: they rise during the life of the process that keeps the counter.
    #[default]
    Process,
    /// Crashes of all processes and of the machine. A token, or a number above it, is on disk before it is handed out.
    Durable,
}

/// The state of a lock, as far as its backend can tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LockState {
    /// The holders; empty if the lock is free.
    pub holders: Vec<Holder>,
    /// The number of waiters, where the backend knows it.
    pub waiters: Option<usize>,
}

impl LockState {
    /// Makes a state with these holders and waiters.
    pub fn new(holders: Vec<Holder>, waiters: Option<usize>) -> Self {
        Self { holders, waiters }
    }

    /// Returns `true` if nobody holds it.
    pub fn is_free(&self) -> bool {
        self.holders.is_empty()
    }
}

/// One holder of a lock, as an inspection shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Holder {
    /// The label it was acquired with.
    pub label: Option<String>,
    /// Its fencing token. After local hand-offs it is the first of the block that the server granted.
    pub token: FencingToken,
    /// The rest of its lease; `None` if it has none.
    pub left: Option<Duration>,
    /// The time at which the server granted it, where the backend knows that. A wall clock told it, the server's or the holder's,
    /// which may be ahead of this machine's. A local hand-off does not change it.
    pub since: Option<SystemTime>,
}

impl Holder {
    /// Makes a holder with this token, of which nobody knows since when it holds.
    pub fn new(token: FencingToken, label: Option<String>, left: Option<Duration>) -> Self {
        Self {
            label,
            token,
            left,
            since: None,
        }
    }

    /// Returns the same holder, which holds since then.
    pub fn since(self, since: Option<SystemTime>) -> Self {
        Self { since, ..self }
    }
}

/// A lock or semaphore that somebody holds, as [`LockClient::list`](crate::LockClient::list) shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ListedLock {
    /// Its name.
    pub name: LockName,
    /// A lock or a semaphore. Those of one name are listed apart.
    pub kind: LockKind,
    /// Its holders, of which there is one at least, and its waiters.
    pub state: LockState,
}

impl ListedLock {
    /// Makes an entry of a listing.
    pub fn new(name: LockName, kind: LockKind, state: LockState) -> Self {
        Self { name, kind, state }
    }
}
