//! Errors of the server and of connections to it, as errors of the core.

use std::io;

use lockkit_core::{BoxError, Error, Result, spi::chain};
use sqlx::mysql::MySqlDatabaseError;

use crate::NAME;

/// The server's error numbers that matter to a lock.
pub(crate) mod code {
    pub(crate) const TOO_MANY_CONNECTIONS: u16 = 1040;
    pub(crate) const SHUTDOWN_IN_PROGRESS: u16 = 1053;
    pub(crate) const NO_SUCH_THREAD: u16 = 1094;
    pub(crate) const LOCK_WAIT_TIMEOUT: u16 = 1205;
    pub(crate) const DEADLOCK: u16 = 1213;
    pub(crate) const TOO_MANY_USER_CONNECTIONS: u16 = 1203;
    pub(crate) const USER_LIMIT_REACHED: u16 = 1226;
    pub(crate) const NO_SUCH_SAVEPOINT: u16 = 1305;
    pub(crate) const DATABASE_ACCESS_DENIED: u16 = 1044;
    pub(crate) const ACCESS_DENIED: u16 = 1045;
    pub(crate) const UNKNOWN_DATABASE: u16 = 1049;
    pub(crate) const TABLE_FULL: u16 = 1114;
    pub(crate) const HOST_BLOCKED: u16 = 1129;
    pub(crate) const HOST_NOT_ALLOWED: u16 = 1130;
    pub(crate) const TABLE_ACCESS_DENIED: u16 = 1142;
    pub(crate) const COLUMN_ACCESS_DENIED: u16 = 1143;
    pub(crate) const NO_SUCH_TABLE: u16 = 1146;
    pub(crate) const PASSWORD_EXPIRED: [u16; 2] = [1820, 1862];
    /// MySQL's and MariaDB's.
    pub(crate) const ACCOUNT_LOCKED: [u16; 2] = [3118, 4151];
    /// The server is read-only.
    pub(crate) const OPTION_PREVENTS_STATEMENT: u16 = 1290;
    pub(crate) const QUERY_INTERRUPTED: u16 = 1317;
    pub(crate) const MAX_PREPARED_STMT_COUNT_REACHED: u16 = 1461;
    pub(crate) const NEED_REPREPARE: u16 = 1615;
    /// The server has sent what none sends. This client itself says so, in the server's place.
    pub(crate) const MALFORMED_PACKET: u16 = 2027;
    /// MySQL: the storage engine is read-only.
    pub(crate) const READ_ONLY_MODE: u16 = 1836;
    /// MariaDB: the connection was killed.
    pub(crate) const CONNECTION_KILLED: u16 = 1927;
    /// MySQL: the session was killed, then closed for another reason.
    pub(crate) const SESSION_KILLED: u16 = 3169;
    /// MySQL: the session was silent for longer than its `wait_timeout`.
    pub(crate) const CLIENT_INTERACTION_TIMEOUT: u16 = 4031;
}

/// Returns the server's error number; `None` if the error is not the server's.
pub(crate) fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?;
    Some(error.try_downcast_ref::<MySqlDatabaseError>()?.number())
}

/// True if the connection can not, or should not, be used after this error. A server that has become read-only is left:
/// another may be the primary by now.
pub(crate) fn ends_the_session(error: &sqlx::Error) -> bool {
    number(error).is_none_or(|number| {
        ends_the_session_by_number(number)
            || matches!(number, code::OPTION_PREVENTS_STATEMENT | code::READ_ONLY_MODE)
    })
}

fn ends_the_session_by_number(number: u16) -> bool {
    matches!(
        number,
        code::SHUTDOWN_IN_PROGRESS
            | code::MALFORMED_PACKET
            | code::CONNECTION_KILLED
            | code::SESSION_KILLED
            | code::CLIENT_INTERACTION_TIMEOUT
    )
}

/// Gives an error of the client library the operation that it failed.
pub(crate) trait During<T> {
    /// Turns the error into one of the core.
    ///
    /// # Errors
    /// A transient one if it may pass by itself. A permanent one if it is a matter of configuration, of rights, or of a
    /// read-only server.
    fn during(self, operation: &'static str) -> Result<T>;
}

impl<T> During<T> for sqlx::Result<T> {
    fn during(self, operation: &'static str) -> Result<T> {
        self.map_err(|error| failed(operation, error))
    }
}

/// Returns the core's error for `operation`, which failed with `error`. See [`During`].
pub(crate) fn failed(operation: &'static str, error: sqlx::Error) -> Error {
    let may_pass = match &error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        error => number(error).is_some_and(|number| {
            ends_the_session_by_number(number)
                || matches!(
                    number,
                    code::TOO_MANY_CONNECTIONS
                        | code::TOO_MANY_USER_CONNECTIONS
                        | code::USER_LIMIT_REACHED
                        | code::LOCK_WAIT_TIMEOUT
                        | code::DEADLOCK
                        | code::QUERY_INTERRUPTED
                )
        }),
    };
    let source = cause(operation, error);
    if may_pass {
        Error::transient(NAME, operation, source)
    } else {
        Error::permanent(NAME, operation, source)
    }
}

/// The error for a request that the server has refused, with what to do.
#[derive(Debug, thiserror::Error)]
#[error("{number} {words}{}", advice(*.number).map_or_else(String::new, |advice| format!(" ({advice})")))]
struct Refusal {
    number: u16,
    words: String,
}

/// Returns the cause of an error, told once: the client library's errors repeat theirs.
fn cause(operation: &'static str, error: sqlx::Error) -> BoxError {
    if let Some(number) = number(&error)
        && let Some(words) = error.as_database_error().map(|error| error.message().to_owned())
    {
        return Refusal { number, words }.into();
    }
    match error {
        sqlx::Error::Io(error) if operation == "connect" => error.into(),
        sqlx::Error::Io(error) => {
            let text = format!("{error} (the client connects again by itself)");
            io::Error::new(error.kind(), text).into()
        }
        error => chain(&error).into(),
    }
}

/// Returns `true` if the operation failed since a table was not there.
pub(crate) fn lacks_a_table(error: &Error) -> bool {
    let refusal = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<Refusal>());
    refusal.is_some_and(|refusal| refusal.number == code::NO_SUCH_TABLE)
}

fn advice(number: u16) -> Option<&'static str> {
    Some(match number {
        code::ACCESS_DENIED => "check user and password in the URL",
        code::HOST_BLOCKED => "run FLUSH HOSTS at the server",
        code::HOST_NOT_ALLOWED => "make an account for this host",
        code::DATABASE_ACCESS_DENIED | code::TABLE_ACCESS_DENIED | code::COLUMN_ACCESS_DENIED => {
            "grant the account what docs/mysql.md lists"
        }
        code::UNKNOWN_DATABASE => "correct the database in the URL, or create it",
        code::TOO_MANY_CONNECTIONS => {
            "raise the server's max_connections, or end connections of other programs"
        }
        code::TOO_MANY_USER_CONNECTIONS | code::USER_LIMIT_REACHED => {
            "raise the account's limit, or lower max_connections in the URL"
        }
        code::TABLE_FULL => "make room on the server's disk",
        code::OPTION_PREVENTS_STATEMENT | code::READ_ONLY_MODE => "connect to the primary",
        code::CONNECTION_KILLED | code::SESSION_KILLED | code::SHUTDOWN_IN_PROGRESS => {
            "the client connects again by itself"
        }
        number if code::PASSWORD_EXPIRED.contains(&number) => "give the account a new password",
        number if code::ACCOUNT_LOCKED.contains(&number) => "unlock it, or take another",
        _ => return None,
    })
}

/// The connection of a waiter was lost without a sign.
pub(crate) fn waiter_went_dead() -> Error {
    Error::transient(
        NAME,
        "acquire",
        "the connection that waited for the lock went dead",
    )
}
