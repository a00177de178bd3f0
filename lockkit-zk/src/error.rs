//! What goes wrong, and what is known after it did.

use std::num::NonZeroU32;

use lockkit_core::{Error, LockName, LossReason};
use zookeeper_client::Error as ZkError;

use crate::NAME;

pub(crate) type Result<T> = std::result::Result<T, Failure>;

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    Server(ZkError),
    #[error("the session has ended: {0}")]
    SessionOver(LossReason),
    #[error("the session is not proven to live just now; nothing is granted on it")]
    NotProven,
    #[error("it did not come when it was its turn; it queues anew")]
    Abandoned,
    #[error(
        "its directory {dir} has (nearly) run out of sequence numbers; it is begun anew as soon as nobody holds or waits, \
         and until then nobody is let in"
    )]
    UsedUp { dir: String },
    #[error("{path} keeps changing while it is looked at")]
    Restless { path: String },
    #[error("{path} is a directory, of a namespace perhaps, and no lock")]
    NoLock { path: String },
    #[error("semaphore `{name}` is in use with {size} permits, not {wanted}")]
    OtherSize {
        name: LockName,
        size: NonZeroU32,
        wanted: NonZeroU32,
    },
    #[error("the client has been closed")]
    Closed,
    #[error("this must be awaited within a Tokio runtime")]
    NoRuntime,
    #[error("the runtime that this client lives on has ended")]
    RuntimeGone,
    #[error("{0}")]
    ShortSession(String),
}

impl From<ZkError> for Failure {
    fn from(error: ZkError) -> Self {
        match error {
            // What the client library says of a request whose connection has been given up.
            ZkError::UnexpectedError(text) if text.starts_with("BUG: ") => {
                Self::Server(ZkError::ConnectionLoss)
            }
            error => Self::Server(error),
        }
    }
}

impl Failure {
    pub(crate) fn during(self, operation: &'static str) -> Error {
        match self {
            Self::ShortSession(reason) => Error::invalid_option("session_timeout", reason),
            Self::Closed => Error::Closed,
            Self::OtherSize { .. } => Error::invalid_option("permits", self.to_string()),
            Self::NoRuntime | Self::RuntimeGone | Self::NoLock { .. } => {
                Error::permanent(NAME, operation, self)
            }
            Self::Server(ref source) if !may_pass(source) => Error::permanent(NAME, operation, self),
            _ => Error::transient(NAME, operation, self),
        }
    }
}

/// Whether it may go better another time.
fn may_pass(error: &ZkError) -> bool {
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

/// Whether the server, or the client before it sent anything, has refused: nothing has been changed. After any other
/// error the request may have been carried out.
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
