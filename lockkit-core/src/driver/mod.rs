//! The one driver: everything between a user's call and a backend's claim. To read in this order:
//!
//! - [`request`]: one acquisition's request, with every default filled in.
//! - [`slot_queue`]: the waiters for one slot (sans-IO).
//! - [`lock_queue`]: the queue of one lock of one client, with its slot and its holds.
//! - [`contender`]: one contender, and after the grant the substance of its hold.
//! - [`acquire`](mod@acquire): from the call to the grant, in the caller's own future.
//! - [`cell`]: the life of one hold: offered, held, released or lost (sans-IO).
//! - [`max_hold`]: the time after which a hold is not renewed any more.
//! - [`hold`]: one grant, shared by its guard, its views and the worker.
//! - [`register`]: the holds of one queue, for the worker to find (sans-IO).
//! - [`finish_release`](mod@finish_release): from the end of a hold to its hand-off or its confirmed release.
//! - [`detach`](mod@detach): a hold that goes on without a guard, and its adoption.
//! - [`downgrade`](mod@downgrade): from an exclusive hold to a shared one.
//! - [`revoke`](mod@revoke): asks another holder for its hold, and waits until that has ended.
//! - [`worker`]: one task per client that renews, notices losses and cleans up.
//! - [`keep_alive`]: the future by which the worker keeps one hold alive.
//! - [`core`](mod@core): the state that all handles of a client share.
//! - [`moment`]: time as leases are counted in. [`timing`]: when to do what.
//! - [`observe`]: the driver's tracing events, spans and metrics.

pub(crate) mod acquire;
pub(crate) mod cell;
pub(crate) mod contender;
pub(crate) mod core;
pub(crate) mod detach;
pub(crate) mod downgrade;
pub(crate) mod finish_release;
pub(crate) mod hold;
pub(crate) mod keep_alive;
pub(crate) mod lock_queue;
pub(crate) mod max_hold;
pub(crate) mod moment;
pub(crate) mod observe;
pub(crate) mod register;
pub(crate) mod request;
pub(crate) mod revoke;
pub(crate) mod slot_queue;
pub(crate) mod timing;
pub(crate) mod worker;

#[cfg(all(test, lockkit_loom))]
mod loom_tests;
