//! Converts errors of the client library.

use std::io;

use lockkit_core::{BoxError, Error};
use redis::{ErrorKind, RedisError, ServerErrorKind};

pub(crate) const NAME: &str = "redis";

/// Converts an error of `operation`. Unless the server refused it, its outcome is unknown.
pub(crate) fn failed(operation: &'static str, error: RedisError) -> Error {
    let code = code(&error).to_owned();
    let advice = match (error.kind(), code.as_str()) {
        (_, "READONLY") => Some("the server is a replica now; looking for its master"),
        (_, "NOPERM") => {
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
    ) || matches!(code.as_str(), "WRONGTYPE" | "NOAUTH" | "WRONGPASS" | "ERR")
        && !is_full(&error);
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

/// Returns the error of an operation while there is no connection.
pub(crate) fn disconnected(operation: &'static str, why: &str) -> Error {
    let reason = format!("no connection to the server: {why}");
    Error::transient(
        NAME,
        operation,
        io::Error::new(io::ErrorKind::NotConnected, reason),
    )
}

/// Returns the error for a reply that none of the scripts gives.
pub(crate) fn unexpected(operation: &'static str, reply: &redis::Value) -> Error {
    Error::permanent(NAME, operation, format!("the server answered {reply:?}"))
}

/// Returns whether the server has no room for another connection now. It has no code of its own for that.
fn is_full(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    detail.contains("max number of clients")
}

/// Returns the server's code of an error. Before Redis 7, an error within a script is an `ERR` whose text has the code.
fn code(error: &RedisError) -> &str {
    const WITHIN: [&str; 8] = [
        "READONLY",
        "WRONGTYPE",
        "OOM",
        "MISCONF",
        "NOREPLICAS",
        "NOPERM",
        "LOADING",
        "MASTERDOWN",
    ];
    let code = error.code().unwrap_or_default();
    let detail = error.detail().unwrap_or_default();
    if code != "ERR" || !detail.starts_with("Error running script") {
        return code;
    }
    let mut words = detail.split([' ', '-', ':']);
    words
        .find_map(|word| WITHIN.into_iter().find(|kind| *kind == word))
        .unwrap_or(code)
}

/// Returns whether the connection has to be replaced: it is gone, or the server is no longer a master.
pub(crate) fn breaks_connection(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_connection_dropped()
        || error.is_unrecoverable_error()
        || code(error) == "READONLY"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_server(line: &str) -> RedisError {
        let reply = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        reply.extract_error().unwrap_err()
    }

    #[test]
    fn a_server_without_room_may_have_some_later() {
        for line in [
            "ERR max number of clients reached",
            "ERR max number of clients + cluster connections reached",
        ] {
            assert!(failed("connect", from_server(line)).is_transient(), "{line}");
        }
    }

    #[test]
    fn old_servers_errors_within_scripts_are_recognized() {
        let within = "ERR Error running script (call to f_81fc): @user_script:9: @user_script: 9: ";
        let demoted = "READONLY You can't write against a read only replica.";
        for line in [demoted.to_owned(), format!("{within}-{demoted}")] {
            assert!(breaks_connection(&from_server(&line)), "{line}");
            assert!(failed("renew", from_server(&line)).is_transient(), "{line}");
        }
        for line in [
            "ERR unknown command",
            "ERR Error running script (call to f_8): READONLYISH",
        ] {
            assert!(!breaks_connection(&from_server(line)), "{line}");
            assert!(!failed("renew", from_server(line)).is_transient(), "{line}");
        }
        let full = format!("{within}-OOM command not allowed when used memory > 'maxmemory'.");
        assert!(failed("acquire", from_server(&full)).is_transient());
        let other = format!("{within}WRONGTYPE Operation against a key holding the wrong kind of value");
        assert!(!failed("acquire", from_server(&other)).is_transient());
    }
}
