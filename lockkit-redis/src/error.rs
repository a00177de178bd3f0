//! What the client library reports, in lockkit's terms.

use std::io;

use lockkit_core::{BoxError, Error};
use redis::{ErrorKind, RedisError, ServerErrorKind};

pub(crate) const NAME: &str = "redis";

/// `operation` failed; whether it took effect is not known unless the server refused it.
pub(crate) fn failed(operation: &'static str, error: RedisError) -> Error {
    let code = error.code().unwrap_or_default().to_owned();
    let advice = match (error.kind(), code.as_str()) {
        (ErrorKind::Server(ServerErrorKind::ReadOnly), _) => {
            Some("the server is a replica now; looking for its master")
        }
        (ErrorKind::Server(ServerErrorKind::NoPerm), _) => {
            Some("the user may not run what locks need; docs/redis.md lists the commands and keys")
        }
        (_, "WRONGTYPE") => Some("the key of this lock holds something else than a string"),
        (_, "OOM") => Some("the server is at its `maxmemory`"),
        (_, "MISCONF" | "NOREPLICAS") => Some("the server refuses writes"),
        (ErrorKind::AuthenticationFailed, _) | (_, "NOAUTH" | "WRONGPASS") => {
            Some("check user and password in the URL")
        }
        _ => None,
    };
    let permanent = matches!(
        error.kind(),
        ErrorKind::AuthenticationFailed
            | ErrorKind::InvalidClientConfig
            | ErrorKind::RESP3NotSupported
            | ErrorKind::UnexpectedReturnType
            | ErrorKind::Server(
                ServerErrorKind::NoPerm | ServerErrorKind::Moved | ServerErrorKind::CrossSlot
            )
    ) || matches!(code.as_str(), "WRONGTYPE" | "NOAUTH" | "WRONGPASS" | "ERR");
    let source: BoxError = match advice {
        Some(advice) => format!("{error} ({advice})").into(),
        None => error.into(),
    };
    if permanent {
        Error::permanent(NAME, operation, source)
    } else {
        Error::transient(NAME, operation, source)
    }
}

/// There is no connection at the moment.
pub(crate) fn disconnected(operation: &'static str, why: &str) -> Error {
    let reason = format!("no connection to the server: {why}");
    Error::transient(
        NAME,
        operation,
        io::Error::new(io::ErrorKind::NotConnected, reason),
    )
}

/// A reply that no script of ours gives.
pub(crate) fn unexpected(operation: &'static str, reply: &redis::Value) -> Error {
    Error::permanent(NAME, operation, format!("the server answered {reply:?}"))
}

/// Whether the connection is to be given up: it is gone, or leads to a server that is no master any more.
pub(crate) fn breaks_connection(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_connection_dropped()
        || error.is_unrecoverable_error()
        || matches!(error.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly))
}
