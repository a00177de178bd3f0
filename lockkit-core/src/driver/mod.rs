//! The one driver: everything between a user's call and a backend's claim.
//!
//! - [`queue`]: who is next within this process (sans-IO).
//! - [`cell`]: the life of one hold: offered, held, released or lost (sans-IO).
//! - [`moment`]: until when a lease lasts, by which clock.
//! - [`line`](mod@line): one name and mode of one client: its queue, and the slot that lets one contender go to the server.
//! - [`register`]: the holds of one line, for the worker to find.
//! - [`acquire`]: from the call to the grant, in the caller's own future.
//! - [`settle`]: from the end of a hold to its hand-off or its confirmed release.
//! - [`attendance`]: how the worker looks after one hold, until whoever releases it ends that.
//! - [`worker`]: one task per client that renews, watches and cleans up.

pub(crate) mod acquire;
pub(crate) mod attendance;
pub(crate) mod cell;
pub(crate) mod hold;
pub(crate) mod line;
pub(crate) mod moment;
pub(crate) mod queue;
pub(crate) mod register;
pub(crate) mod settle;
pub(crate) mod timing;
pub(crate) mod worker;

#[cfg(all(test, lockkit_loom))]
mod loom_tests;
