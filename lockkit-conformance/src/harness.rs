//! The part of the suite that a backend's author provides.

use std::{fmt, time::Duration};

use async_trait::async_trait;
use lockkit_core::{Error, LockClient, Result, spi::BackendInfo};

/// Reaches the backend under test. Only [`client`](Self::client) has to be written.
#[async_trait]
pub trait Harness: fmt::Debug + Send + Sync + 'static {
    /// A new client of the same server: nothing that lives in a process is shared with the clients before it.
    ///
    /// # Errors
    /// Whatever connecting reports; it fails the case.
    async fn client(&self) -> Result<LockClient>;

    /// Returns why there is no server to test, if there is none. Every case is skipped then; if the environment variable
    /// `LOCKKIT_REQUIRE`, a list separated by commas, names the backend (or `all`), every case fails.
    fn missing(&self) -> Option<Missing> {
        None
    }

    /// Returns the URL by which another process reaches the same server. `None`, the default, skips the cases with
    /// several processes. It is passed to them in an environment variable, so that it may hold a password.
    fn url(&self) -> Option<String> {
        None
    }

    /// A client of the server at `url`, which came from [`url`](Self::url) in another process.
    ///
    /// # Errors
    /// Whatever connecting reports. By default that it is not supported.
    async fn connect(&self, url: &str) -> Result<LockClient> {
        let _ = url;
        Err(Error::unsupported(
            "conformance",
            "this harness has a `url` but no `connect`",
        ))
    }

    /// Makes the server drop the holder of the lock `name`, behind its back. By default through
    /// [`LockClient::revoke_by_force`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if nothing can do that, which skips the cases that need it.
    async fn break_hold(&self, name: &str) -> Result<()> {
        let client = self.client().await?;
        for holder in client.inspect(name).await?.holders {
            client.revoke_by_force(name, holder.token).await?;
        }
        Ok(())
    }

    /// The lease to test with: the shortest that does not lapse by itself on a busy machine. Default: 1 s.
    fn ttl(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// Returns how long others may have to wait for the hold of a process that died. Default: what the backend says of
    /// the lease to test with, and a second; or a quarter of a second if a hold has no lease.
    fn freed_after_death(&self, client: &LockClient) -> Duration {
        if client.capabilities().lease {
            client.dead_holder_bound(self.ttl()) + Duration::from_secs(1)
        } else {
            Duration::from_millis(250)
        }
    }

    /// Returns the time within which a holder is told that the server dropped its hold. Default: the lease and a
    /// second.
    fn detection(&self, info: &BackendInfo) -> Duration {
        let _ = info;
        self.ttl() + Duration::from_secs(1)
    }

    /// A new client of the same server, on a way of its own that the suite can cut. `None`, the default, skips the case in which the
    /// server is away.
    ///
    /// # Errors
    /// Whatever connecting reports; it fails the case.
    async fn on_a_way(&self) -> Result<Option<(LockClient, Way)>> {
        Ok(None)
    }

    /// A password or the like in the configuration, which must never show in any message.
    fn secret(&self) -> Option<String> {
        None
    }
}

/// The manner in which a client's server is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outage {
    /// Connections are reset, and new ones refused.
    Refused,
    /// Nothing is answered, on connections old and new.
    Silent,
}

impl Outage {
    /// Returns `true` if nothing is answered.
    pub fn is_silent(self) -> bool {
        self == Self::Silent
    }
}

/// A client's way to its server, which is open at first. Dropping it may leave the client cut off.
pub struct Way(Box<dyn Fn(Option<Outage>) + Send + Sync>);

impl Way {
    /// Makes a way that is cut, for this outage, and opened again, for `None`, by a function. Has taken effect when it returns.
    pub fn new(set: impl Fn(Option<Outage>) + Send + Sync + 'static) -> Self {
        Self(Box::new(set))
    }

    pub(crate) fn cut(&self, outage: Outage) {
        (self.0)(Some(outage));
    }

    pub(crate) fn open(&self) {
        (self.0)(None);
    }
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Way").finish_non_exhaustive()
    }
}

/// There is no server to test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The backend's name, as `LOCKKIT_REQUIRE` calls it.
    pub backend: String,
    /// The part that is missing, and how to get it.
    pub reason: String,
}
