//! Failures, and what they say about the state at the server.

use std::{num::NonZeroU32, panic::AssertUnwindSafe};

use futures_util::FutureExt as _;
use lockkit_core::{
    Error, LockName, LossReason,
    spi::{queue::Abandoned, resumable},
};
use zookeeper_client::Error as ZkError;

use crate::NAME;

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// A failure within this backend. [`during`](Self::during) makes an error of lockkit's of it.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}{advice}", advice = advice(.0))]
    Server(ZkError),
    /// The server has refused a request for this lock.
    #[error(
        "{why} for {path}, or above it (check user and password in the URL, or grant the user what docs/zookeeper.md lists)"
    )]
    Denied { path: String, why: ZkError },
    /// There is a node in the place of a directory that can be none.
    #[error(
        "{why}: {path}, or a node above it, is one (it is another program's, or a client's with nodes=simple: all clients need the same `nodes`)"
    )]
    NoDirectory { path: String, why: ZkError },
    #[error("the session has ended: {0}")]
    SessionEnded(LossReason),
    #[error("the session is not proven to be alive at the moment, so nothing is granted on it")]
    NotProven,
    #[error("{Abandoned}; the next attempt queues anew")]
    Abandoned,
    #[error(
        "its directory {dir} has (nearly) run out of sequence numbers; newcomers are refused until nobody holds or waits, \
         and then the directory is begun anew"
    )]
    UsedUp { dir: String },
    #[error("{path} keeps changing while it is read; try again")]
    Unstable { path: String },
    #[error(
        "{path} is a directory, perhaps that of a namespace, and not a lock; use another name or namespace"
    )]
    NoLock { path: String },
    #[error(
        "{path} is not what lockkit has written there to raise tokens; delete it, and raise them again above all that were granted"
    )]
    NoBases { path: String },
    #[error("no tokens are left at transaction {0}")]
    NoTokens(i64),
    #[error(
        "semaphore `{name}` is in use with {size} permits, not {wanted}; ask for the same number everywhere"
    )]
    OtherSize {
        name: LockName,
        size: NonZeroU32,
        wanted: NonZeroU32,
    },
    #[error("the client has been closed")]
    Closed,
    #[error("this must be awaited within a Tokio runtime")]
    NoRuntime,
    #[error("the runtime that this client lives on has ended; connect again within one that lasts")]
    RuntimeGone,
    #[error("{0}")]
    ShortSession(String),
    #[error("{0}")]
    Panicked(String),
    /// A connection to a server failed on this side, for a reason that may pass or not.
    #[error("{reason}")]
    Refused { reason: String, permanent: bool },
}

impl From<Abandoned> for Failure {
    fn from(Abandoned: Abandoned) -> Self {
        Self::Abandoned
    }
}

impl From<ZkError> for Failure {
    fn from(error: ZkError) -> Self {
        match error {
            // The client library says this of a request whose connection has been aborted.
            ZkError::UnexpectedError(text) if text.starts_with("BUG: ") => {
                Self::Server(ZkError::ConnectionLoss)
            }
            // How the socket ended differs from time to time.
            ZkError::Custom(cause) if cause.to_string().contains("(os error ") => {
                Self::Server(ZkError::ConnectionLoss)
            }
            error => Self::Server(error),
        }
    }
}

/// Awaits a request, and makes a failure of a panic of the client library. A server can bring that about, by an empty path.
pub(crate) async fn contained<T>(request: impl Future<Output = Result<T>>) -> Result<T> {
    let outcome = AssertUnwindSafe(request).catch_unwind().await;
    outcome.unwrap_or_else(|panic| Err(Failure::Panicked(resumable::said(resumable::text_of(&*panic)))))
}

/// Returns what to do, if there is something, behind the words of the client library.
fn advice(error: &ZkError) -> &'static str {
    match error {
        ZkError::NoAuth => {
            " (check user and password in the URL, or grant the user what docs/zookeeper.md lists)"
        }
        ZkError::AuthFailed => " (check user and password in the URL)",
        ZkError::ConnectionLoss => " (the client connects again by itself)",
        ZkError::NoHosts => {
            " (do the servers run, are these their hosts and ports, and do they take more connections of this host?)"
        }
        ZkError::QuotaExceeded => " (raise the quota)",
        _ => "",
    }
}

impl Failure {
    /// Names what the request was about, if the user has no right to it, or it has no room for others.
    pub(crate) fn about(self, path: &str) -> Self {
        match self {
            Self::Server(why @ (ZkError::NoAuth | ZkError::InvalidAcl)) => Self::Denied {
                path: path.to_owned(),
                why,
            },
            Self::Server(why @ ZkError::NoChildrenForEphemerals) => Self::NoDirectory {
                path: path.to_owned(),
                why,
            },
            other => other,
        }
    }

    /// Returns the error for a caller of `operation`.
    pub(crate) fn during(self, operation: &'static str) -> Error {
        match self {
            Self::ShortSession(reason) => Error::invalid_option("session_timeout", reason),
            Self::Closed => Error::Closed,
            Self::OtherSize { .. } => Error::invalid_option("permits", self.to_string()),
            Self::NoRuntime
            | Self::Denied { .. }
            | Self::NoDirectory { .. }
            | Self::RuntimeGone
            | Self::NoLock { .. }
            | Self::NoBases { .. }
            | Self::NoTokens(_)
            | Self::Refused { permanent: true, .. } => Error::permanent(NAME, operation, self),
            Self::Server(ref source) if !is_transient(source) => Error::permanent(NAME, operation, self),
            _ => Error::transient(NAME, operation, self),
        }
    }

    pub(crate) fn refused(reason: String, permanent: bool) -> Self {
        Self::Refused { reason, permanent }
    }

    /// The connection failed on this side, as over TLS, and will fail again until somebody changes something.
    pub(crate) fn is_distrust(&self) -> bool {
        match self {
            Self::Refused { permanent, .. } => *permanent,
            _ => false,
        }
    }

    /// Returns the failure to report if two servers did not let the client in, first with `self`.
    ///
    /// What is wrong with TLS says more than silence does. It is permanent only if all servers have such a fault.
    pub(crate) fn or(self, later: Self) -> Self {
        match (self, later) {
            (refused @ Self::Server(ZkError::AuthFailed), _)
            | (_, refused @ Self::Server(ZkError::AuthFailed)) => refused,
            (first @ Self::Refused { permanent: true, .. }, Self::Refused { permanent: true, .. }) => first,
            (Self::Refused { reason, .. }, _) | (_, Self::Refused { reason, .. }) => {
                Self::refused(reason, false)
            }
            (_, later) => later,
        }
    }

    /// The server, or the client library before it sent anything, has [refused](is_refusal) the request.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Server(error) if is_refusal(error))
    }
}

/// A later attempt may succeed.
fn is_transient(error: &ZkError) -> bool {
    !matches!(
        error,
        ZkError::NoAuth
            | ZkError::AuthFailed
            | ZkError::InvalidAcl
            | ZkError::BadArguments(_)
            | ZkError::NoChildrenForEphemerals
            | ZkError::Unimplemented
            | ZkError::MarshallingError
    )
}

/// The server, or the client library before it sent anything, has refused: nothing was changed. After any other error the
/// request may have been applied.
pub(crate) fn is_refusal(error: &ZkError) -> bool {
    matches!(
        error,
        ZkError::NoNode
            | ZkError::NodeExists
            | ZkError::NotEmpty
            | ZkError::NoAuth
            | ZkError::InvalidAcl
            | ZkError::BadVersion
            | ZkError::BadArguments(_)
            | ZkError::NoChildrenForEphemerals
            | ZkError::NotReadOnly
            | ZkError::QuotaExceeded
            | ZkError::Unimplemented
    )
}
