//! The errors, and the reasons for which a hold is lost.

use std::{fmt, time::Duration};

use crate::{LockName, name::Shown};

/// A boxed cause.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// The result of lockkit's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns a time without the digits that nobody has asked for: a wait of three seconds takes 2.997845498 s.
fn legible(waited: Duration) -> Duration {
    let millis = match waited.as_micros() {
        0..1_000 => return waited,
        micros @ 1_000..1_000_000 => (micros + 500) / 1_000,
        micros => (micros + 50_000) / 100_000 * 100,
    };
    u64::try_from(millis).map_or(waited, Duration::from_millis)
}

/// An error of lockkit: what failed, on which backend, for which lock.
///
/// "Taken" and "cannot tell" are never mixed up. [`Timeout`](Self::Timeout) means that the backend's last word was that
/// someone else holds the lock, and that it is no older than a second, or is all that this client's queue for the lock knows.
/// [`Backend`](Self::Backend) means that it gave no word.
///
/// Names and other text from outside are escaped in messages, so that a message is one line of a log.
///
/// A message never repeats its source. Print the chain (`{:#}` with anyhow, or walk
/// [`source`](std::error::Error::source)) to see all of it.
///
/// ```
/// use std::time::Duration;
///
/// use lockkit_core::{Error, LockClient, MemoryBackend};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let lock = LockClient::new(MemoryBackend::new()).lock("report")?;
/// let guard = lock.acquire().await?;
/// match lock.acquire_timeout(Duration::from_millis(10)).await {
///     Err(Error::Timeout { .. }) => {} // somebody else has it: skip this round
///     Err(err) if err.is_transient() => println!("the server gave no word; try later: {err}"),
///     Err(err) => return Err(err), // repeating will not help
///     Ok(guard) => guard.release().await?,
/// }
/// guard.release().await?;
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name is empty or too long.
    #[error("invalid lock name {name:?}: {reason}")]
    #[non_exhaustive]
    InvalidName {
        /// The name, or its beginning.
        name: String,
        /// The fault in it.
        reason: &'static str,
    },

    /// An option is out of bounds, or the backend cannot keep it. Nothing was sent.
    #[error("invalid option `{option}`: {}", Shown(.reason))]
    #[non_exhaustive]
    InvalidOptions {
        /// The option's name, as in [`AcquireOptions`](crate::AcquireOptions) or the config.
        option: &'static str,
        /// The fault in it, and the remedy.
        reason: String,
    },

    /// The URL, or one of its parameters, is invalid.
    #[error("invalid lock URL {url:?}: {}", Shown(.reason))]
    #[non_exhaustive]
    InvalidUrl {
        /// The URL without credentials.
        url: String,
        /// The fault in it, and the remedy.
        reason: String,
    },

    /// No backend has this URL scheme.
    #[error("unknown lock URL scheme `{}`; known are {known}", Shown(.scheme))]
    #[non_exhaustive]
    UnknownScheme {
        /// The scheme, or what stood in its place.
        scheme: String,
        /// The known schemes.
        known: String,
    },

    /// The scheme is known, but its backend is not in this build.
    #[error(
        "lock URL scheme `{}` needs lockkit's cargo {}, which this build does not have",
        Shown(.scheme),
        features(feature)
    )]
    #[non_exhaustive]
    FeatureDisabled {
        /// The scheme.
        scheme: String,
        /// The cargo feature that brings its backend. `redis,tls` if it takes both.
        feature: &'static str,
    },

    /// The lock was taken, and still was when the time to wait was over.
    #[error("{backend}: lock `{}` is taken: not granted within {:?}", Shown(.name.as_str()), legible(*.waited))]
    #[non_exhaustive]
    Timeout {
        /// The backend's name.
        backend: &'static str,
        /// The lock.
        name: LockName,
        /// The time that was waited.
        waited: Duration,
    },

    /// The lock was held and is not any more. Stop: what the lock protects may belong to another holder.
    #[error("{backend}: lock `{}` was lost: {reason}", Shown(.name.as_str()))]
    #[non_exhaustive]
    Lost {
        /// The backend's name.
        backend: &'static str,
        /// The lock.
        name: LockName,
        /// The reason.
        reason: LossReason,
    },

    /// The lock is not held here any more, since its guard was released, dropped or detached: that is no loss. Only views of a hold
    /// say so.
    #[error("{backend}: lock `{}` is not held any more: it was released or detached", Shown(.name.as_str()))]
    #[non_exhaustive]
    Released {
        /// The backend's name.
        backend: &'static str,
        /// The lock.
        name: LockName,
    },

    /// The backend does not have this feature.
    #[error("{backend}: not supported: {}", Shown(.what))]
    #[non_exhaustive]
    Unsupported {
        /// The backend's name.
        backend: &'static str,
        /// The missing feature, and what to do instead.
        what: String,
    },

    /// The backend failed or gave no reply. It is not known whether the operation took effect.
    #[error("{backend}: {operation} failed{}", for_lock(.name.as_ref()))]
    #[non_exhaustive]
    Backend {
        /// The backend's name.
        backend: &'static str,
        /// The operation: `connect`, `acquire`, `renew`, `downgrade`, `release`, `detach`, `adopt`, `inspect`, `watch`, `observe`,
        /// `revoke`, `fence`, `raise`, `close`.
        operation: &'static str,
        /// The lock, where there is one.
        name: Option<LockName>,
        /// True if the same call may succeed later.
        transient: bool,
        /// The cause.
        source: BoxError,
    },

    /// The client was closed.
    #[error("the lock client is closed")]
    Closed,
}

fn features(list: &str) -> String {
    match list.split_once(',') {
        Some((one, other)) => format!("features `{one}` and `{other}`"),
        None => format!("feature `{list}`"),
    }
}

fn for_lock(name: Option<&LockName>) -> String {
    name.map_or_else(String::new, |name| {
        format!(" for lock `{}`", Shown(name.as_str()))
    })
}

impl Error {
    /// Returns `true` for [`Timeout`](Self::Timeout): the lock was taken for as long as the caller would wait.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }

    /// Returns `true` for [`Lost`](Self::Lost): the lock was held and is not any more, although nobody has released it.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// Returns `true` for a [`Backend`](Self::Backend) error after which the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Backend { transient: true, .. })
    }

    /// An error for backends: an option that this backend cannot keep.
    pub fn invalid_option(option: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidOptions {
            option,
            reason: reason.into(),
        }
    }

    /// An error for backends: an invalid URL, already without credentials.
    pub fn invalid_url(url: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidUrl {
            url: url.into(),
            reason: reason.into(),
        }
    }

    /// An error for backends: a missing feature, and what to do instead.
    pub fn unsupported(backend: &'static str, what: impl Into<String>) -> Self {
        Self::Unsupported {
            backend,
            what: what.into(),
        }
    }

    /// An error for backends: a failure that may pass, such as a broken connection. The driver tries again while it may.
    pub fn transient(backend: &'static str, operation: &'static str, source: impl Into<BoxError>) -> Self {
        Self::backend(backend, operation, true, source.into())
    }

    /// An error for backends: a failure that repeating will not mend, such as a refused password.
    pub fn permanent(backend: &'static str, operation: &'static str, source: impl Into<BoxError>) -> Self {
        Self::backend(backend, operation, false, source.into())
    }

    /// An error for decorators and mocks: `name` was taken for as long as the caller would wait. A backend returns
    /// [`Ok(None)`](crate::spi::Claim::attempt) instead.
    pub fn timeout(backend: &'static str, name: LockName, waited: Duration) -> Self {
        Self::Timeout {
            backend,
            name,
            waited,
        }
    }

    /// An error for backends: a hold of `name` turned out to be gone.
    pub fn lost(backend: &'static str, name: LockName, reason: LossReason) -> Self {
        Self::Lost {
            backend,
            name,
            reason,
        }
    }

    /// The error of `lockkit::connect` for a scheme that no backend has.
    pub fn unknown_scheme(scheme: impl Into<String>, known: impl Into<String>) -> Self {
        Self::UnknownScheme {
            scheme: scheme.into(),
            known: known.into(),
        }
    }

    /// The error of `lockkit::connect` for a scheme whose backend is not in this build: `redis`, or `redis,tls` if two features are missing.
    pub fn feature_disabled(scheme: impl Into<String>, feature: &'static str) -> Self {
        Self::FeatureDisabled {
            scheme: scheme.into(),
            feature,
        }
    }

    fn backend(backend: &'static str, operation: &'static str, transient: bool, source: BoxError) -> Self {
        Self::Backend {
            backend,
            operation,
            name: None,
            transient,
            source,
        }
    }

    /// Adds the lock's name, if the backend left it out.
    pub(crate) fn for_lock(mut self, lock: &LockName) -> Self {
        if let Self::Backend { name, .. } = &mut self {
            name.get_or_insert_with(|| lock.clone());
        }
        self
    }
}

/// The error of [`LockGuard::run`](crate::LockGuard::run) and of `with_lock`, with what the work has returned if it was done by
/// then.
///
/// A loss can come while the last step of the work runs. Nobody may then rely on the lock, but the work is done: its output may
/// be the only record of what has to be undone, or that there is nothing to undo. So it is not thrown away.
///
/// `?` turns it into an [`Error`] where the output does not matter.
///
/// ```
/// use lockkit_core::{LockClient, MemoryBackend};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let backend = MemoryBackend::new();
/// let guard = LockClient::new(backend.clone()).lock("parcel/7")?.acquire().await?;
/// match guard.run(async { "shipped as 1Z999" }).await {
///     Ok(shipment) => println!("{shipment}"),
///     Err(err) => match err.output {
///         Some(shipment) => println!("{shipment}, maybe twice: {}", err.error),
///         None => return Err(err.error), // stopped on the way
///     },
/// }
/// guard.run(async {}).await?;
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
#[non_exhaustive]
pub struct RunError<T> {
    /// The error: the lock was lost or released, or could not be acquired.
    pub error: Error,
    /// The output of the work, if it was done all the same. `None` if it was stopped, or never begun.
    pub output: Option<T>,
}

impl<T> RunError<T> {
    /// Makes an error of work that was done all the same.
    pub(crate) fn done(error: Error, output: T) -> Self {
        Self {
            error,
            output: Some(output),
        }
    }
}

impl<T> From<Error> for RunError<T> {
    /// Makes an error of work that was stopped, or never begun.
    fn from(error: Error) -> Self {
        Self { error, output: None }
    }
}

impl<T> From<RunError<T>> for Error {
    fn from(error: RunError<T>) -> Self {
        error.error
    }
}

impl<T> fmt::Display for RunError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = if self.output.is_some() {
            "; the work under it was done by then"
        } else {
            ""
        };
        write!(f, "{}{done}", self.error)
    }
}

/// Leaves out the output, which need not be printable.
impl<T> fmt::Debug for RunError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunError")
            .field("error", &self.error)
            .field("is_done", &self.output.is_some())
            .finish_non_exhaustive()
    }
}

impl<T> std::error::Error for RunError<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Its message has that of the error in it.
        self.error.source()
    }
}

/// The error of [`LockGuard::downgrade`](crate::LockGuard::downgrade), with the guard if nothing has changed.
///
/// `?` turns it into an [`Error`], which releases a guard that was left.
#[non_exhaustive]
pub struct DowngradeError<G> {
    /// The error.
    pub error: Error,
    /// The guard, if nothing was asked of the server: still exclusive, or lost if the error says so. `None` if the hold is over.
    pub guard: Option<G>,
}

impl<G> DowngradeError<G> {
    /// Makes an error of a hold that nothing was done to.
    pub(crate) fn unchanged(error: Error, guard: G) -> Self {
        Self {
            error,
            guard: Some(guard),
        }
    }

    /// Makes an error of a hold that is over.
    pub(crate) fn over(error: Error) -> Self {
        Self { error, guard: None }
    }
}

impl<G> From<DowngradeError<G>> for Error {
    fn from(error: DowngradeError<G>) -> Self {
        error.error
    }
}

impl<G> fmt::Display for DowngradeError<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hold = if self.guard.is_some() {
            "the hold is as it was before"
        } else {
            "the hold is over"
        };
        write!(f, "{}; {hold}", self.error)
    }
}

impl<G> fmt::Debug for DowngradeError<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DowngradeError")
            .field("error", &self.error)
            .field("has_guard", &self.guard.is_some())
            .finish_non_exhaustive()
    }
}

impl<G> std::error::Error for DowngradeError<G> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Its message has that of the error in it.
        self.error.source()
    }
}

/// The end of a hold: its release, or its loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum HoldEnd {
    /// Its guard was released or dropped, or [made a shared one](crate::LockGuard::downgrade).
    Released,
    /// It was [detached](crate::LockGuard::detach): it goes on at the server, for whoever adopts it.
    Detached,
    /// It was lost.
    Lost(LossReason),
}

impl HoldEnd {
    /// Returns the reason of a loss; `None` if it was none.
    pub fn loss(self) -> Option<LossReason> {
        match self {
            Self::Released | Self::Detached => None,
            Self::Lost(reason) => Some(reason),
        }
    }
}

impl fmt::Display for HoldEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Released => f.write_str("released"),
            Self::Detached => f.write_str("detached"),
            Self::Lost(reason) => write!(f, "lost: {reason}"),
        }
    }
}

/// The reason for which a hold was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease expired before it could be renewed.
    Expired,
    /// The server says that the hold is gone: deleted, evicted, or broken by an operator.
    Revoked,
    /// Its holder was [asked](crate::LockClient::revoke) to give it up. Nobody else is granted it before its guard is released or
    /// dropped, or its lease is over: there is time to bring the work to an end.
    Asked,
    /// The connection, session or client that the hold was bound to has ended.
    Disconnected,
    /// It was held for its [`max_hold`](crate::AcquireOptions#structfield.max_hold), and its lease ended after that.
    MaxHold,
    /// It was detached, and was not there to be [adopted](crate::LockClient::adopt) any more: its lease ran out, it was ended, or
    /// another client has adopted it.
    Gone,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "its lease ran out before it could be renewed",
            Self::Revoked => "the server no longer has it: it was deleted, evicted or broken by force",
            Self::Asked => "its holder was asked to give it up",
            Self::Disconnected => "the client, session or connection that held it has ended",
            Self::MaxHold => "its `max_hold` was over, so it was not renewed any more",
            Self::Gone => {
                "it cannot be adopted: its lease ran out, it was ended, or another client has adopted it"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_as_it_was_asked_for() {
        for (nanos, told) in [
            (0, "0ns"),
            (120_400, "120.4µs"),
            (300_412_345, "300ms"),
            (999_700_000, "1s"),
            (2_997_845_498, "3s"),
            (3_312_345_678, "3.3s"),
            (600_001_234_567, "600s"),
        ] {
            let name = LockName::new("job").unwrap();
            let error = Error::timeout("memory", name, Duration::from_nanos(nanos));
            let expected = format!("memory: lock `job` is taken: not granted within {told}");
            assert_eq!(error.to_string(), expected);
        }
        assert_eq!(legible(Duration::MAX), Duration::MAX);
    }
}
