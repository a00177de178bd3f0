//! What a backend can do, and what an inspection shows.

use std::time::Duration;

use crate::FencingToken;

/// What a backend can do. The conformance suite asserts each one.
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
    /// Waiters are granted in the order in which they began to wait, across processes, with `local_handoffs = 0`.
    pub fifo: bool,
    /// Shared mode.
    pub shared: bool,
    /// Semaphores.
    pub permits: bool,
    /// A waiter for a lock is woken by the backend, rather than by the fallback poll alone. One for a permit is too, or looks
    /// so often that a free permit is its long before that poll: how often, its backend's page says.
    pub notified: bool,
    /// A hold has a lease that lapses unless it is renewed. Without it, a hold lasts as long as its process or
    /// connection.
    pub lease: bool,
    /// A release may pass the hold on within a client. Off where the order across processes is strict.
    pub local_handoffs: bool,
    /// [`LockClient::revoke`](crate::LockClient::revoke) can end someone else's hold.
    pub revoke: bool,
    /// What fencing tokens survive.
    pub fencing: FencingDurability,
}

/// What the rise of a backend's fencing tokens survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FencingDurability {
    /// The life of the process that keeps the counter.
    #[default]
    Process,
    /// Crashes of every process and of the machine: a token, or a number above it, is on disk before it is handed out.
    Durable,
}

/// Who holds a lock, as far as its backend can tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockState {
    /// The holders; empty if the lock is free.
    pub holders: Vec<Holder>,
    /// How many wait, where the backend knows.
    pub waiters: Option<usize>,
}

impl LockState {
    /// A state with these holders and waiters.
    pub fn new(holders: Vec<Holder>, waiters: Option<usize>) -> Self {
        Self { holders, waiters }
    }

    /// Nobody holds it.
    pub fn is_free(&self) -> bool {
        self.holders.is_empty()
    }
}

/// One holder of a lock, as an inspection shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The label it was acquired with.
    pub label: Option<String>,
    /// Its fencing token. After local hand-offs it is the first of the block that the server granted.
    pub token: FencingToken,
    /// What is left of its lease; `None` if it has none.
    pub left: Option<Duration>,
}

impl Holder {
    /// A holder with this token.
    pub fn new(token: FencingToken, label: Option<String>, left: Option<Duration>) -> Self {
        Self { label, token, left }
    }
}
