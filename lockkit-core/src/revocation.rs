//! The outcome of asking a holder to give up its hold.

use std::time::Duration;

/// The outcome of [`LockClient::revoke`](crate::LockClient::revoke), which asks a holder to give up its hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub enum Revocation {
    /// No hold has that token. Nothing was asked or changed.
    NotHeld,
    /// The hold ended before its lease was over: its holder has released it or passed it on, or has closed its client or session.
    ///
    /// Who ended it does not show at the server. So this is also said of a hold that somebody else ended meanwhile, by force or by
    /// deleting it, or that the server lost; where a hold ends with its process (file), of a holder that was killed; and on ZooKeeper
    /// of one that let its lease run out, since its client ends it then.
    Confirmed,
    /// The hold was there until its lease was over, or nearly so. Its holder may not have confirmed.
    Expired,
    /// The holder has not confirmed in time, and still has the hold. It stays asked: the server does not prolong the hold.
    StillHeld {
        /// The rest of its lease. `None` where no lease ends the hold, but only its holder or the end of its session or process.
        left: Option<Duration>,
    },
}
