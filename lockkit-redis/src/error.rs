//! Converts errors of the client library.

use std::{io, sync::Arc};

use lockkit_core::{BoxError, Error, spi::shortened};
use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::{layout, script};

pub(crate) const NAME: &str = "redis";

/// Converts an error of `operation`. Unless the server refused it, its outcome is unknown.
#[expect(clippy::needless_pass_by_value, reason = "as `map_err` has it")]
pub(crate) fn failed(operation: &'static str, error: RedisError) -> Error {
    failed_at(operation, &error, None, NO_MASTER)
}

/// Converts an error of `operation`, which asked for this key at a server for which this is to be done `if_replica`.
pub(crate) fn failed_at(
    operation: &'static str,
    error: &RedisError,
    key: Option<&[u8]>,
    if_replica: &str,
) -> Error {
    let code = code(error).to_owned();
    let detail = error.detail().unwrap_or_default();
    let is_full = detail.starts_with(TOO_MANY_CLIENTS);
    let lacks_a_right = code == "NOPERM" || detail.starts_with(NO_RIGHT_IN_SCRIPT);
    let advice = match (error.kind(), code.as_str()) {
        (_, "READONLY") => Some(now_replica(if_replica)),
        (_, "WRONGTYPE") => Some(format!(
            "{} holds something else than a lock, perhaps another program's: choose another namespace for all \
             clients",
            named(key, "the key")
        )),
        (_, "OOM") => {
            Some("the server's memory is full: raise its `maxmemory`, and let it evict no locks".to_owned())
        }
        (_, "MISCONF") => Some("the server refuses writes: look at its log".to_owned()),
        (_, "NOREPLICAS") => Some("the server refuses writes: look at its `INFO replication`".to_owned()),
        (_, "LOADING") => Some("wait until it has".to_owned()),
        (ErrorKind::AuthenticationFailed, _) | (_, "NOAUTH" | "WRONGPASS") => {
            Some("check user and password in the URL".to_owned())
        }
        _ if is_full => Some("raise its `maxclients`, or end clients of other programs".to_owned()),
        // It is tried again, and renewed no more. A script may have ended the hold before it came to what it may not do.
        _ if lacks_a_right && operation == "release" => Some(format!(
            "{}; the lock may stay taken until its lease ends",
            missing_right(error, key)
        )),
        _ if lacks_a_right => Some(missing_right(error, key)),
        _ if operation != "connect" && breaks_connection(error) => {
            Some("the client connects again by itself".to_owned())
        }
        _ => None,
    };
    let permanent = !is_full
        && (matches!(
            error.kind(),
            ErrorKind::AuthenticationFailed
                | ErrorKind::InvalidClientConfig
                | ErrorKind::RESP3NotSupported
                | ErrorKind::UnexpectedReturnType
                | ErrorKind::Server(
                    ServerErrorKind::NoPerm | ServerErrorKind::Moved | ServerErrorKind::CrossSlot
                )
        ) || matches!(code.as_str(), "WRONGTYPE" | "NOAUTH" | "WRONGPASS" | "ERR"));
    let mut text = words(error);
    if let Some(advice) = advice {
        text = format!("{text} ({advice})");
    }
    let source: BoxError = match io_kind(error) {
        Some(kind) => io::Error::new(kind, text).into(),
        None => text.into(),
    };
    if permanent {
        Error::permanent(NAME, operation, source)
    } else {
        Error::transient(NAME, operation, source)
    }
}

/// What to do about a replica of which nobody tells the master.
pub(crate) const NO_MASTER: &str = "give the address of its master, or the sentinels'";
/// What to do about one of several masters that is a replica.
pub(crate) const OF_SEVERAL: &str = "make it a master, or name another in its place";
/// The words of a server that takes no more connections.
const TOO_MANY_CLIENTS: &str = "max number of clients";
/// The words of Redis 7 if a script runs a command, or asks for a key, without the right to it. It does not say which.
const NO_RIGHT_IN_SCRIPT: &str = "The user executing the script can't";
/// The most bytes of the server's words. What is longer ends with its first sentence.
const MOST_WORDS: usize = 180;

fn now_replica(if_replica: &str) -> String {
    format!("the server is a replica now: {if_replica}")
}

/// Returns the server's own words, once. Leaves out where in a script they were said.
pub(crate) fn words(error: &RedisError) -> String {
    let (Some(code), Some(detail)) = (error.code(), error.detail()) else {
        if error.kind() == ErrorKind::Parse {
            return "the answer is no reply of Redis".to_owned();
        }
        return error.to_string();
    };
    let detail = detail.split(IN_SCRIPT).next().unwrap_or_default();
    // An error of the script itself.
    if let Some((_, own)) = detail
        .strip_prefix("user_script:")
        .and_then(|own| own.split_once(": "))
    {
        return shortened(own).into_owned();
    }
    // The server's own advice is for those who type commands.
    let first = match detail
        .split_once(". ")
        .or_else(|| detail.split_once(", otherwise "))
    {
        Some((first, _)) if detail.len() > MOST_WORDS => first,
        _ => detail,
    };
    shortened(&format!("{code} {}", first.trim_end_matches('.'))).into_owned()
}

const IN_SCRIPT: &str = " script: ";

/// Says which right the user lacks. The server tells the line of the script alone.
fn missing_right(error: &RedisError, key: Option<&[u8]>) -> String {
    let place = error
        .detail()
        .and_then(|detail| detail.split_once(IN_SCRIPT)?.1.split_once(", on @user_script:"));
    let commands = place.and_then(|(digest, line)| {
        let line = line.trim_end_matches('.').parse().ok()?;
        script::commands(digest, line)
    });
    let what = match (commands, key) {
        (Some((commands, is_counter)), Some(key)) => {
            let counter = if is_counter {
                format!(" on `{}`", String::from_utf8_lossy(&layout::fence(key)))
            } else {
                String::new()
            };
            format!(
                "the script for {} runs {commands}{counter}; ",
                named(Some(key), "")
            )
        }
        (Some((commands, _)), None) => format!("the script runs {commands}; "),
        (None, Some(key)) => format!("for {}; ", named(Some(key), "")),
        (None, None) => String::new(),
    };
    format!("{what}grant the user the commands, keys and channels that docs/redis.md lists")
}

fn named(key: Option<&[u8]>, unknown: &str) -> String {
    key.map_or_else(
        || unknown.to_owned(),
        |key| format!("`{}`", String::from_utf8_lossy(key)),
    )
}

/// Returns the kind of an error that is not the server's but the connection's.
fn io_kind(error: &RedisError) -> Option<io::ErrorKind> {
    if error.kind() == ErrorKind::Parse {
        return Some(io::ErrorKind::InvalidData);
    }
    let cause = std::error::Error::source(error)?;
    let error = match cause.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>() {
        Some(shared) => shared.downcast_ref::<io::Error>(),
        None => cause.downcast_ref::<io::Error>(),
    };
    error.map(io::Error::kind)
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

/// Returns the error of an operation that a replica has answered.
pub(crate) fn demoted(operation: &'static str, if_replica: &str) -> Error {
    Error::transient(NAME, operation, now_replica(if_replica))
}

/// Returns the error for a reply that none of the scripts gives.
pub(crate) fn unexpected(operation: &'static str, reply: &redis::Value) -> Error {
    Error::permanent(NAME, operation, format!("the server answered {reply:?}"))
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
