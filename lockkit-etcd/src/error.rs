//! Failures, and what they say about the state at the servers.

use std::{borrow::Cow, num::NonZeroU32};

use lockkit_core::{
    Error, LockName, LossReason,
    spi::{Secrets, queue::Abandoned},
};
use tonic::{Code, Status};

use crate::NAME;

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// A failure within this backend. [`during`](Self::during) makes an error of lockkit's of it.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Nothing was changed.
    #[error("{reason}")]
    Refused { reason: String, permanent: bool },
    /// Nothing was changed.
    #[error("the lease has ended at the servers")]
    NoLease,
    /// The database is full. It may have been carried out: 3.4 carries out the transaction that fills it, and then answers so.
    #[error("{0}")]
    Full(String),
    /// The token of this user has ended, or there is none. Nothing was changed.
    #[error("the servers ask for a token of this client that they know")]
    StaleToken,
    /// It may have been carried out.
    #[error("{0}")]
    Unknown(String),
    /// Nothing was sent.
    #[error("{0}")]
    Unreachable(String),
    #[error("the lease has ended: {0}")]
    SessionEnded(LossReason),
    #[error("the lease is not proven to last at the moment, so nothing is granted on it")]
    NotProven,
    #[error("{Abandoned}; the next attempt queues anew")]
    Abandoned,
    #[error("the queue for `{0}` keeps changing while it is read; try again")]
    Unstable(LockName),
    #[error(
        "semaphore `{name}` is in use with {size} permits, not {wanted}; ask for the same number everywhere"
    )]
    OtherSize {
        name: LockName,
        size: NonZeroU32,
        wanted: NonZeroU32,
    },
    #[error(
        "the servers grant no lease below {granted} s, 1.5 times their election timeout; ask for a ttl of {granted} s or more"
    )]
    ShortLease { granted: i64 },
    #[error("the client has been closed")]
    Closed,
    #[error("this must be awaited within a Tokio runtime")]
    NoRuntime,
    #[error("the runtime that this client lives on has ended; connect again within one that lasts")]
    RuntimeGone,
}

/// What a member says by word or by its status that only catches up with the others.
pub(crate) const LEARNER: &str = "the member is a learner, which serves nobody until it is promoted";

/// What a member says to a user who has no right, in lockkit's words, and what to do.
pub(crate) const NO_RIGHT: &str = "the user has no right to these keys; run `etcdctl role grant-permission ROLE readwrite NAMESPACE/ --prefix`";

/// The place of the prefix in these words, and in those of a watch that is refused.
const PREFIX: &str = "NAMESPACE/ --prefix";

const CONNECTION_FAILED: &str = "the connection failed";

impl From<Abandoned> for Failure {
    fn from(Abandoned: Abandoned) -> Self {
        Self::Abandoned
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        if was_not_sent(&status) {
            return Self::Unreachable(unknown(&status));
        }
        let text = status.message();
        let says = |part: &str| text.contains(part);
        let (reason, permanent) = match status.code() {
            Code::NotFound if says("lease not found") => return Self::NoLease,
            Code::Unauthenticated | Code::PermissionDenied if says("invalid auth token") => {
                return Self::StaleToken;
            }
            // The revision of the users has changed since the token was made.
            Code::InvalidArgument if says("revision of auth store is old") => return Self::StaleToken,
            Code::PermissionDenied => (NO_RIGHT, true),
            // It had none.
            Code::InvalidArgument if says("user name is empty") => return Self::StaleToken,
            Code::InvalidArgument if says("authentication failed") => {
                ("the user or the password is wrong: check both in the URL", true)
            }
            Code::ResourceExhausted if says("database space exceeded") => {
                return Self::Full(format!(
                    "the servers' database is full (NOSPACE), so that nothing new can be locked; compact and defragment it, and \
                     disarm the alarm ({text})"
                ));
            }
            // It says so before it looks at anything else.
            _ if says("not supported for learner") => (LEARNER, false),
            Code::Unimplemented => ("this server does not speak the API of etcd 3", true),
            Code::ResourceExhausted if says("too many requests") => ("the servers are overloaded", false),
            Code::FailedPrecondition | Code::InvalidArgument if says("etcdserver:") => (text, true),
            _ => return Self::Unknown(unknown(&status)),
        };
        let reason = if says(reason) || text.is_empty() {
            reason.to_owned()
        } else {
            format!("{reason} ({text})")
        };
        Self::Refused { reason, permanent }
    }
}

/// The connection ended before it took the request.
fn was_not_sent(status: &Status) -> bool {
    let mut causes = std::iter::successors(std::error::Error::source(status), |error| error.source());
    causes.any(|error| {
        let error = error.downcast_ref::<hyper::Error>();
        error.is_some_and(hyper::Error::is_canceled)
    })
}

/// Returns what is known of a request that may have been carried out.
fn unknown(status: &Status) -> String {
    match status.message() {
        text if text.starts_with("etcdserver:") || text.starts_with("the member ") => text.to_owned(),
        text => {
            let mut text = text.to_owned();
            let mut cause = std::error::Error::source(status);
            while let Some(error) = cause {
                let words = error.to_string();
                if !text.contains(&words) {
                    text = format!("{text}: {words}");
                }
                cause = error.source();
            }
            format!("{CONNECTION_FAILED}: {text}")
        }
    }
}

impl Failure {
    /// Returns the failure without secrets that the servers have repeated.
    pub(crate) fn blanked(mut self, secrets: &Secrets) -> Self {
        if let Self::Refused { reason: text, .. }
        | Self::Full(text)
        | Self::Unknown(text)
        | Self::Unreachable(text) = &mut self
            && let Cow::Owned(blanked) = secrets.blank(text)
        {
            *text = blanked;
        }
        self
    }

    /// Names the prefix of all keys, if the user has no right to them.
    pub(crate) fn about(mut self, root: &str) -> Self {
        if let Self::Refused { reason, .. } = &mut self
            && reason.contains(PREFIX)
        {
            let root = if root.is_empty() { "''" } else { root };
            // A server's words come behind lockkit's own.
            *reason = reason.replacen(PREFIX, &format!("{root} --prefix"), 1);
        }
        self
    }

    /// Returns the error for a caller of `operation`.
    pub(crate) fn during(self, operation: &'static str) -> Error {
        match self {
            Self::Unknown(text) | Self::Unreachable(text)
                if operation != "connect" && text.starts_with(CONNECTION_FAILED) =>
            {
                let advised = format!("{text} (the client connects again by itself)");
                Error::transient(NAME, operation, advised)
            }
            Self::Closed => Error::Closed,
            Self::OtherSize { .. } => Error::invalid_option("permits", self.to_string()),
            Self::ShortLease { .. } => Error::invalid_option("ttl", self.to_string()),
            Self::NoRuntime | Self::RuntimeGone | Self::Refused { permanent: true, .. } => {
                Error::permanent(NAME, operation, self)
            }
            _ => Error::transient(NAME, operation, self),
        }
    }

    pub(crate) fn refused(reason: impl Into<String>, permanent: bool) -> Self {
        Self::Refused {
            reason: reason.into(),
            permanent,
        }
    }

    /// Nothing was changed. After any other failure the request may have been carried out, or may yet be.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Refused { .. } | Self::NoLease | Self::StaleToken | Self::Unreachable(_)
        )
    }

    pub(crate) fn is_permanent(&self) -> bool {
        matches!(self, Self::Refused { permanent: true, .. })
    }

    /// Returns the failure to report if two members did not let the client in, first with `self`. A member that refuses says more
    /// than one that is silent.
    pub(crate) fn or(self, later: Self) -> Self {
        match (self, later) {
            (first @ Self::Refused { permanent: true, .. }, Self::Refused { permanent: true, .. }) => first,
            (Self::Refused { reason, .. }, _) | (_, Self::Refused { reason, .. }) => {
                Self::refused(reason, false)
            }
            (_, later) => later,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_learner_may_serve_later() {
        let says = "etcdserver: rpc not supported for learner";
        for status in [Status::unavailable(says), Status::failed_precondition(says)] {
            let failure = Failure::from(status);
            assert!(failure.is_refusal() && !failure.is_permanent(), "{failure:?}");
            assert!(failure.to_string().contains(LEARNER), "{failure}");
        }
    }

    #[test]
    fn a_full_database_may_have_carried_it_out() {
        let status = Status::resource_exhausted("etcdserver: mvcc: database space exceeded");
        let failure = Failure::from(status);
        assert!(!failure.is_refusal() && !failure.is_permanent());
        assert!(failure.to_string().contains("NOSPACE"), "{failure}");
    }
}
