//! What can go wrong, told apart.

use std::{fmt, time::Duration};

use crate::{LockName, name::Shown};

/// A boxed cause.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// The result of lockkit's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What failed, on which backend, for which lock.
///
/// "Taken" and "cannot tell" are different answers everywhere: [`Timeout`](Self::Timeout) means that the backend's
/// last word was that someone else holds the lock; [`Backend`](Self::Backend) means that it gave no word.
///
/// Names and what else comes from outside are escaped in messages, so that each is one line of a log.
///
/// A source is never repeated in the message: print the chain (`{:#}` with anyhow, or walk
/// [`source`](std::error::Error::source)) to see it all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name is empty or too long.
    #[error("invalid lock name {name:?}: {reason}")]
    #[non_exhaustive]
    InvalidName {
        /// The name, or its beginning.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// An option has a value that cannot be kept. Nothing was sent.
    #[error("invalid option `{option}`: {}", Shown(.reason))]
    #[non_exhaustive]
    InvalidOptions {
        /// The option's name, as in [`AcquireOptions`](crate::AcquireOptions) or the config.
        option: &'static str,
        /// What is wrong with it, and what would be right.
        reason: String,
    },

    /// The URL cannot be understood, or one of its parameters cannot.
    #[error("invalid lock URL {url:?}: {}", Shown(.reason))]
    #[non_exhaustive]
    InvalidUrl {
        /// The URL without credentials.
        url: String,
        /// What is wrong with it, and what would be right.
        reason: String,
    },

    /// No backend has this URL scheme.
    #[error("unknown lock URL scheme `{}`; known are {known}", Shown(.scheme))]
    #[non_exhaustive]
    UnknownScheme {
        /// The scheme, or what stood in its place.
        scheme: String,
        /// The schemes there are.
        known: String,
    },

    /// The scheme is known, but its backend is not in this build.
    #[error(
        "lock URL scheme `{}` needs lockkit's cargo feature `{feature}`, which this build does not have",
        Shown(.scheme)
    )]
    #[non_exhaustive]
    FeatureDisabled {
        /// The scheme.
        scheme: String,
        /// The cargo feature that brings its backend.
        feature: &'static str,
    },

    /// The lock was taken, and still was when the time to wait ran out.
    #[error("{backend}: lock `{}` is taken: not granted within {waited:?}", Shown(.name.as_str()))]
    #[non_exhaustive]
    Timeout {
        /// The backend's name.
        backend: &'static str,
        /// The lock.
        name: LockName,
        /// How long was waited.
        waited: Duration,
    },

    /// The lock was held and is not any more. Stop; what the lock protected may belong to another holder.
    #[error("{backend}: lock `{}` was lost: {reason}", Shown(.name.as_str()))]
    #[non_exhaustive]
    Lost {
        /// The backend's name.
        backend: &'static str,
        /// The lock.
        name: LockName,
        /// Why.
        reason: LossReason,
    },

    /// The backend cannot do this, now or ever.
    #[error("{backend}: not supported: {}", Shown(.what))]
    #[non_exhaustive]
    Unsupported {
        /// The backend's name.
        backend: &'static str,
        /// What it cannot do, and what can be done instead.
        what: String,
    },

    /// The backend failed or gave no answer. Whether the operation took effect is not known.
    #[error("{backend}: {operation} failed{}", for_lock(.name.as_ref()))]
    #[non_exhaustive]
    Backend {
        /// The backend's name.
        backend: &'static str,
        /// What was being done: `connect`, `acquire`, `renew`, `release`, `inspect`, `close`.
        operation: &'static str,
        /// The lock, where there is one.
        name: Option<LockName>,
        /// Whether the same call may succeed later.
        transient: bool,
        /// The cause.
        source: BoxError,
    },

    /// The client was closed.
    #[error("the lock client is closed")]
    Closed,
}

fn for_lock(name: Option<&LockName>) -> String {
    name.map_or_else(String::new, |name| {
        format!(" for lock `{}`", Shown(name.as_str()))
    })
}

impl Error {
    /// The lock was taken for as long as the caller would wait.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }

    /// The lock was held and is not any more.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// The backend could not tell, and the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Backend { transient: true, .. })
    }

    /// For backends: an option that this backend cannot keep.
    pub fn invalid_option(option: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidOptions {
            option,
            reason: reason.into(),
        }
    }

    /// For backends: a URL, already without credentials, that cannot be understood.
    pub fn invalid_url(url: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidUrl {
            url: url.into(),
            reason: reason.into(),
        }
    }

    /// For backends: something it cannot do, and what can be done instead.
    pub fn unsupported(backend: &'static str, what: impl Into<String>) -> Self {
        Self::Unsupported {
            backend,
            what: what.into(),
        }
    }

    /// For backends: a failure that may pass, such as a connection that broke. The driver retries while it may.
    pub fn transient(backend: &'static str, operation: &'static str, source: impl Into<BoxError>) -> Self {
        Self::backend(backend, operation, true, source.into())
    }

    /// For backends: a failure that repeating will not mend, such as a refused password.
    pub fn permanent(backend: &'static str, operation: &'static str, source: impl Into<BoxError>) -> Self {
        Self::backend(backend, operation, false, source.into())
    }

    /// For backends: a hold of `name` turned out to be gone.
    pub fn lost(backend: &'static str, name: LockName, reason: LossReason) -> Self {
        Self::Lost {
            backend,
            name,
            reason,
        }
    }

    /// A connection that could not be made, as `lockkit::connect` reports it.
    pub fn unknown_scheme(scheme: impl Into<String>, known: impl Into<String>) -> Self {
        Self::UnknownScheme {
            scheme: scheme.into(),
            known: known.into(),
        }
    }

    /// A scheme whose backend was left out of the build.
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

    /// Says which lock it was about, where the backend did not.
    pub(crate) fn for_lock(mut self, lock: &LockName) -> Self {
        if let Self::Backend { name, .. } = &mut self {
            name.get_or_insert_with(|| lock.clone());
        }
        self
    }
}

/// Why a hold ended without being released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease ran out before it could be renewed.
    Expired,
    /// The server says that the hold is gone: deleted, evicted, or broken by an operator.
    Revoked,
    /// The connection, session or client that the hold was bound to has ended.
    Disconnected,
    /// It was released, and somebody waits for its [`ended`](crate::LockGuard::ended) or asks a view of it that was kept. No
    /// [`lost`](crate::LockGuard::lost) ever says so.
    Released,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "its lease ran out before it could be renewed",
            Self::Revoked => "the server no longer has it: it was deleted, evicted or broken by force",
            Self::Disconnected => "the client, session or connection that held it has ended",
            Self::Released => "it was released before",
        })
    }
}
