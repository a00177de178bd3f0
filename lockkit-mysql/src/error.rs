//! Errors of the server and of connections to it, as errors of the core.

use std::io;

use lockkit_core::{
    BoxError, Error, Result,
    spi::{chain, shortened},
};
use sqlx::mysql::MySqlDatabaseError;

use crate::NAME;

/// The server's error numbers that matter to a lock.
pub(crate) mod code {
    pub(crate) const OUT_OF_MEMORY: u16 = 1037;
    pub(crate) const OUT_OF_SORT_MEMORY: u16 = 1038;
    pub(crate) const TOO_MANY_CONNECTIONS: u16 = 1040;
    pub(crate) const OUT_OF_RESOURCES: u16 = 1041;
    /// The server cannot find out the client's host.
    pub(crate) const BAD_HOST: u16 = 1042;
    pub(crate) const SHUTDOWN_IN_PROGRESS: u16 = 1053;
    pub(crate) const NO_SUCH_THREAD: u16 = 1094;
    pub(crate) const KILL_DENIED: u16 = 1095;
    pub(crate) const CANNOT_CREATE_THREAD: u16 = 1135;
    /// The server could not read or write the connection.
    pub(crate) const NET_READ_ERROR: u16 = 1158;
    pub(crate) const NET_READ_INTERRUPTED: u16 = 1159;
    pub(crate) const NET_ERROR_ON_WRITE: u16 = 1160;
    pub(crate) const NET_WRITE_INTERRUPTED: u16 = 1161;
    pub(crate) const LOCK_WAIT_TIMEOUT: u16 = 1205;
    pub(crate) const LOCK_TABLE_FULL: u16 = 1206;
    pub(crate) const DEADLOCK: u16 = 1213;
    pub(crate) const TOO_MANY_USER_CONNECTIONS: u16 = 1203;
    pub(crate) const USER_LIMIT_REACHED: u16 = 1226;
    pub(crate) const PRIVILEGE_NEEDED: u16 = 1227;
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
    pub(crate) const PASSWORD_EXPIRED: u16 = 1820;
    pub(crate) const PASSWORD_EXPIRED_AT_LOGIN: u16 = 1862;
    pub(crate) const ACCOUNT_LOCKED_OF_MYSQL: u16 = 3118;
    pub(crate) const ACCOUNT_LOCKED_OF_MARIADB: u16 = 4151;
    /// The server is read-only.
    pub(crate) const OPTION_PREVENTS_STATEMENT: u16 = 1290;
    pub(crate) const QUERY_INTERRUPTED: u16 = 1317;
    pub(crate) const TABLE_CHANGED: u16 = 1412;
    pub(crate) const MAX_PREPARED_STMT_COUNT_REACHED: u16 = 1461;
    pub(crate) const NEED_REPREPARE: u16 = 1615;
    /// The server has sent what none sends. This client itself says so, in the server's place.
    pub(crate) const MALFORMED_PACKET: u16 = 2027;
    /// MySQL: the storage engine is read-only.
    pub(crate) const READ_ONLY_MODE: u16 = 1836;
    /// MySQL: the same, with `innodb_read_only`.
    pub(crate) const INNODB_READ_ONLY: u16 = 1874;
    /// MariaDB: the connection was killed.
    pub(crate) const CONNECTION_KILLED: u16 = 1927;
    /// MariaDB: the statement was longer than `max_statement_time`.
    pub(crate) const STATEMENT_TIMEOUT: u16 = 1969;
    /// MySQL: the statement was longer than `max_execution_time`.
    pub(crate) const QUERY_TIMEOUT: u16 = 3024;
    /// MySQL: an operator has ended all sessions but those of operators.
    pub(crate) const OFFLINE_MODE: u16 = 3032;
    /// MySQL: the session was killed, then closed for another reason.
    pub(crate) const SESSION_KILLED: u16 = 3169;
    /// MySQL: the session was silent for longer than its `wait_timeout`.
    pub(crate) const CLIENT_INTERACTION_TIMEOUT: u16 = 4031;
}

/// What can be done about an error of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// The same request may succeed later.
    Passes,
    /// So it may, and the server ends this connection.
    Ends,
    /// So it may, over another connection: another server may be the primary by now, or this one again.
    Demoted,
    /// Repeating mends nothing.
    Stays,
}

/// The one table of the server's errors: what each means, and a piece of advice. It does not matter which request has failed, nor what the
/// client did before. An error that is not in it stays.
fn meaning(number: u16) -> (Meaning, Option<&'static str>) {
    use Meaning::{Demoted, Ends, Passes, Stays};

    const ANEW: &str = "the client connects again by itself";
    const MEMORY: &str = "the server is short of memory: give it more, or end what takes it";

    match number {
        code::LOCK_WAIT_TIMEOUT
        | code::DEADLOCK
        | code::QUERY_INTERRUPTED
        | code::STATEMENT_TIMEOUT
        | code::QUERY_TIMEOUT
        | code::TABLE_CHANGED
        | code::NEED_REPREPARE
        | code::BAD_HOST => (Passes, None),
        code::OUT_OF_MEMORY
        | code::OUT_OF_SORT_MEMORY
        | code::OUT_OF_RESOURCES
        | code::CANNOT_CREATE_THREAD
        | code::LOCK_TABLE_FULL => (Passes, Some(MEMORY)),
        code::TOO_MANY_CONNECTIONS => (
            Passes,
            Some("raise the server's max_connections, or end connections of other programs"),
        ),
        code::TOO_MANY_USER_CONNECTIONS | code::USER_LIMIT_REACHED => (
            Passes,
            Some("raise the account's limit, or lower max_connections in the URL"),
        ),
        code::MAX_PREPARED_STMT_COUNT_REACHED => (Passes, Some("raise the server's max_prepared_stmt_count")),
        code::HOST_BLOCKED => (Passes, Some("run FLUSH HOSTS at the server")),
        code::SHUTDOWN_IN_PROGRESS
        | code::OFFLINE_MODE
        | code::CONNECTION_KILLED
        | code::SESSION_KILLED
        | code::NET_READ_ERROR
        | code::NET_READ_INTERRUPTED
        | code::NET_ERROR_ON_WRITE
        | code::NET_WRITE_INTERRUPTED => (Ends, Some(ANEW)),
        code::MALFORMED_PACKET | code::CLIENT_INTERACTION_TIMEOUT => (Ends, None),
        code::OPTION_PREVENTS_STATEMENT | code::READ_ONLY_MODE | code::INNODB_READ_ONLY => {
            (Demoted, Some("connect to the primary"))
        }
        code::ACCESS_DENIED => (Stays, Some("check user and password in the URL")),
        code::HOST_NOT_ALLOWED => (Stays, Some("make an account for this host")),
        code::DATABASE_ACCESS_DENIED
        | code::TABLE_ACCESS_DENIED
        | code::COLUMN_ACCESS_DENIED
        | code::KILL_DENIED
        | code::PRIVILEGE_NEEDED => (Stays, Some("grant the account what docs/mysql.md lists")),
        code::UNKNOWN_DATABASE => (Stays, Some("correct the database in the URL, or create it")),
        code::TABLE_FULL => (Stays, Some("make room on the server's disk")),
        code::PASSWORD_EXPIRED | code::PASSWORD_EXPIRED_AT_LOGIN => {
            (Stays, Some("give the account a new password"))
        }
        code::ACCOUNT_LOCKED_OF_MYSQL | code::ACCOUNT_LOCKED_OF_MARIADB => {
            (Stays, Some("unlock it, or take another"))
        }
        _ => (Stays, None),
    }
}

/// Returns the server's error number; `None` if the error is not the server's.
pub(crate) fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?;
    Some(error.try_downcast_ref::<MySqlDatabaseError>()?.number())
}

/// True if the server itself says that it has not done what was asked.
pub(crate) fn is_refusal(error: &sqlx::Error) -> bool {
    number(error).is_some_and(|number| number != code::MALFORMED_PACKET)
}

/// True if the connection can not, or should not, be used after this error. A server that has become read-only is left:
/// another may be the primary by now.
pub(crate) fn ends_the_session(error: &sqlx::Error) -> bool {
    number(error).is_none_or(|number| matches!(meaning(number).0, Meaning::Ends | Meaning::Demoted))
}

/// Gives an error of the client library the operation that it failed.
pub(crate) trait During<T> {
    /// Turns the error into one of the core.
    ///
    /// # Errors
    /// A transient one if it may pass by itself, as a demotion of the server does. A permanent one if it is a matter of configuration or
    /// of rights.
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
        error => number(error).is_some_and(|number| meaning(number).0 != Meaning::Stays),
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
#[error("{number} {words}{}", meaning(*.number).1.map_or_else(String::new, |advice| format!(" ({advice})")))]
struct Refusal {
    number: u16,
    words: String,
}

/// Returns the cause of an error, told once: the client library's errors repeat theirs.
fn cause(operation: &'static str, error: sqlx::Error) -> BoxError {
    if let Some(number) = number(&error)
        && let Some(words) = error
            .as_database_error()
            .map(|error| shortened(error.message()).into_owned())
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

/// The connection of a waiter was lost without a sign.
pub(crate) fn waiter_went_dead() -> Error {
    Error::transient(
        NAME,
        "acquire",
        "the connection that waited for the lock went dead",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_told_from_what_stays() {
        let table: [(&[u16], Meaning); 4] = [
            (
                &[
                    1037, 1038, 1040, 1041, 1042, 1129, 1135, 1203, 1205, 1206, 1213, 1226, 1317, 1412, 1461,
                    1615, 1969, 3024,
                ],
                Meaning::Passes,
            ),
            (
                &[1053, 1158, 1159, 1160, 1161, 1927, 2027, 3032, 3169, 4031],
                Meaning::Ends,
            ),
            (&[1290, 1836, 1874], Meaning::Demoted),
            (
                &[
                    1044, 1045, 1049, 1064, 1095, 1114, 1130, 1142, 1143, 1146, 1227, 1305, 1665, 1820, 1862,
                    3118, 4151,
                ],
                Meaning::Stays,
            ),
        ];
        for (numbers, expected) in table {
            for number in numbers {
                assert_eq!(meaning(*number).0, expected, "{number}");
            }
        }
    }
}
