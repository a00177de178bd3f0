//! What the server and the connection to it report, as errors of the core.

use lockkit_core::Error;
use sqlx::mysql::MySqlDatabaseError;

use crate::NAME;

/// The server's error numbers that mean something to a lock.
pub(crate) mod code {
    pub(crate) const TOO_MANY_CONNECTIONS: u16 = 1040;
    pub(crate) const SHUTDOWN_IN_PROGRESS: u16 = 1053;
    pub(crate) const NO_SUCH_THREAD: u16 = 1094;
    pub(crate) const LOCK_WAIT_TIMEOUT: u16 = 1205;
    pub(crate) const DEADLOCK: u16 = 1213;
    pub(crate) const TOO_MANY_USER_CONNECTIONS: u16 = 1203;
    pub(crate) const USER_LIMIT_REACHED: u16 = 1226;
    pub(crate) const NO_SUCH_SAVEPOINT: u16 = 1305;
    /// The server is read-only.
    pub(crate) const OPTION_PREVENTS_STATEMENT: u16 = 1290;
    pub(crate) const QUERY_INTERRUPTED: u16 = 1317;
    pub(crate) const MAX_PREPARED_STMT_COUNT_REACHED: u16 = 1461;
    pub(crate) const NEED_REPREPARE: u16 = 1615;
    /// MySQL: so is the whole engine.
    pub(crate) const READ_ONLY_MODE: u16 = 1836;
    /// MariaDB: the connection was killed.
    pub(crate) const CONNECTION_KILLED: u16 = 1927;
    /// MySQL: a session that had been killed, closed for another reason.
    pub(crate) const SESSION_KILLED: u16 = 3169;
    /// MySQL: the session was silent for longer than its `wait_timeout`.
    pub(crate) const CLIENT_INTERACTION_TIMEOUT: u16 = 4031;
}

/// The server's error number; `None` if the error is not the server's.
pub(crate) fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?;
    Some(error.try_downcast_ref::<MySqlDatabaseError>()?.number())
}

/// Whether nothing more can, or should, be said over the connection that this came from. One to a server that has become
/// read-only is left: by now another may be the primary.
pub(crate) fn ends_the_session(error: &sqlx::Error) -> bool {
    number(error).is_none_or(|number| ends_the_session_by_number(number) || is_read_only(number))
}

fn is_read_only(number: u16) -> bool {
    matches!(number, code::OPTION_PREVENTS_STATEMENT | code::READ_ONLY_MODE)
}

fn ends_the_session_by_number(number: u16) -> bool {
    matches!(
        number,
        code::SHUTDOWN_IN_PROGRESS
            | code::CONNECTION_KILLED
            | code::SESSION_KILLED
            | code::CLIENT_INTERACTION_TIMEOUT
    )
}

/// The same as an error of the core. What may pass by itself is transient; what is a matter of configuration, of
/// rights or of a read-only server is not.
pub(crate) fn error(operation: &'static str, error: sqlx::Error) -> Error {
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
    if may_pass {
        Error::transient(NAME, operation, error)
    } else {
        Error::permanent(NAME, operation, error)
    }
}
