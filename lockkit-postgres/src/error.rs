//! Errors of the server and of connections to it, as errors of the core.

use std::io;

use lockkit_core::{
    BoxError, Error, Result,
    spi::{chain, shortened},
};
use tokio_postgres::error::{DbError, Severity};

use crate::{NAME, replies::Misconduct};

/// The server's error codes that matter to a lock.
pub(crate) mod code {
    pub(crate) const PROTOCOL_VIOLATION: &str = "08P01";
    pub(crate) const DEADLOCK_DETECTED: &str = "40P01";
    pub(crate) const UNDEFINED_OBJECT: &str = "42704";
    pub(crate) const UNDEFINED_TABLE: &str = "42P01";
    pub(crate) const UNDEFINED_SCHEMA: &str = "3F000";
    pub(crate) const LOCK_NOT_AVAILABLE: &str = "55P03";
    pub(crate) const UNTRANSLATABLE_CHARACTER: &str = "22P05";
    pub(crate) const QUERY_CANCELED: &str = "57014";
    pub(crate) const ADMIN_SHUTDOWN: &str = "57P01";
    pub(crate) const IDLE_SESSION_TIMEOUT: &str = "57P05";
}

/// The beginnings of codes of errors that may pass by themselves: connections, serialization, resources, tables that are locked, and what
/// operators and shutdowns do. A code that has one of `PERMANENT` does not.
const PASSING: [&str; 5] = ["08", "40", "53", code::LOCK_NOT_AVAILABLE, "57"];
const PERMANENT: [&str; 1] = [code::PROTOCOL_VIOLATION];

/// The reason why a request has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The server's error, or that of the client library.
    #[error(transparent)]
    Library(#[from] tokio_postgres::Error),
    /// No connection, or no encrypted one.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The server cannot be relied on, or a certificate is refused.
    #[error(transparent)]
    Refused(#[from] Box<Error>),
    #[error("the connection has ended")]
    Ended,
}

impl Failure {
    /// Returns the server's error.
    pub(crate) fn database(&self) -> Option<&DbError> {
        match self {
            Self::Library(error) => error.as_db_error(),
            _ => None,
        }
    }

    /// Returns the server's error code; an empty one if the error is not the server's.
    pub(crate) fn code(&self) -> &str {
        self.database().map_or("", |error| error.code().code())
    }

    /// Returns `true` if the session has ended with this error, or may have.
    pub(crate) fn ends_the_session(&self) -> bool {
        self.database()
            .is_none_or(|error| error.parsed_severity() != Some(Severity::Error))
    }

    /// Returns `true` if the server knows no such schema, table or sequence.
    pub(crate) fn is_about_what_is_missing(&self) -> bool {
        matches!(self.code(), code::UNDEFINED_TABLE | code::UNDEFINED_SCHEMA)
    }

    /// Returns `true` if the server ended a statement that nobody here has withdrawn: an operator has, or a deadlock was found.
    pub(crate) fn is_interruption(&self) -> bool {
        matches!(
            self.code(),
            code::QUERY_CANCELED | code::DEADLOCK_DETECTED | code::LOCK_NOT_AVAILABLE
        )
    }
}

/// Gives a failure the operation that it ended.
pub(crate) trait During<T> {
    /// Turns the failure into an error of the core.
    ///
    /// # Errors
    /// A transient one if it may pass by itself. A permanent one if it is a matter of configuration, of rights, or of a
    /// read-only server.
    fn during(self, operation: &'static str) -> Result<T>;
}

impl<T, E: Into<Failure>> During<T> for std::result::Result<T, E> {
    fn during(self, operation: &'static str) -> Result<T> {
        self.map_err(|error| failed(operation, error.into()))
    }
}

/// Returns the core's error for `operation`, which failed with `failure`. See [`During`].
pub(crate) fn failed(operation: &'static str, failure: Failure) -> Error {
    let failure = match failure {
        Failure::Refused(error) => return *error,
        other => other,
    };
    let may_pass = match &failure {
        Failure::Io(_) | Failure::Ended | Failure::Refused(_) => true,
        Failure::Library(error) => match error.as_db_error() {
            Some(error) => {
                let code = error.code().code();
                PASSING.iter().any(|class| code.starts_with(class)) && !PERMANENT.contains(&code)
            }
            None => {
                let cause = io_cause(error);
                #[cfg(feature = "tls")]
                if let Some(reason) = cause.and_then(crate::tls::refusal) {
                    return Error::permanent(NAME, operation, reason);
                }
                if let Some(reason @ Misconduct::WantsPassword) = cause.and_then(Misconduct::of) {
                    return Error::permanent(NAME, operation, reason);
                }
                // Neither a login without a password nor one without a proof passes, nor a value of another type.
                error.is_closed() || cause.is_some() && !is_about_the_login(error)
            }
        },
    };
    let source = cause(operation, failure);
    if may_pass {
        Error::transient(NAME, operation, source)
    } else {
        Error::permanent(NAME, operation, source)
    }
}

/// Returns the cause of an error, told once: the client library's errors say "db error" and have the server's words behind that.
fn cause(operation: &'static str, failure: Failure) -> BoxError {
    let library = match failure {
        Failure::Library(error) => error,
        Failure::Io(error) if operation == "connect" => return error.into(),
        Failure::Io(error) => {
            let text = format!("{error} (the client connects again by itself)");
            return io::Error::new(error.kind(), text).into();
        }
        other => return other.into(),
    };
    let text = match library.as_db_error() {
        Some(error) => {
            let (code, message) = (error.code().code(), shortened(error.message()));
            match advice(code) {
                Some(advice) => format!("{code} {message} ({advice})"),
                None => format!("{code} {message}"),
            }
        }
        None => chain(&library),
    };
    let ended = library.is_closed() || io_cause(&library).is_some();
    let text = if ended && operation != "connect" {
        format!("{text} (the client connects again by itself)")
    } else {
        text
    };
    match io_cause(&library) {
        Some(error) => io::Error::new(error.kind(), text).into(),
        None => text.into(),
    }
}

fn advice(code: &str) -> Option<&'static str> {
    Some(match code {
        "28P01" => "check user and password in the URL",
        "28000" => "check the user in the URL, and the server's pg_hba.conf",
        "3D000" => "correct the database in the URL, or create it",
        "42501" => "grant the role what docs/postgres.md lists",
        code::UNDEFINED_TABLE | code::UNDEFINED_SCHEMA => {
            "the tables have gone: connect anew, and the next acquisition makes them"
        }
        "42703" => {
            "this table has another layout: while no lock is held, drop the schema lockkit, and the next acquisition makes it"
        }
        "55000" => "does the database allow connections?",
        "53300" => "raise max_connections, or end connections of other programs",
        "53100" => "make room on the server's disk",
        "25006" => "connect to the primary",
        "57P01" | "57P02" | "57P05" => "the client connects again by itself",
        "57P03" => "wait until it is up",
        _ => return None,
    })
}

/// Returns `true` if the server asks for what this client has not, or has not proven that it knows the password.
fn is_about_the_login(error: &tokio_postgres::Error) -> bool {
    // The library does not tell in another way.
    error.to_string().starts_with("authentication error")
}

fn io_cause(error: &tokio_postgres::Error) -> Option<&io::Error> {
    std::error::Error::source(error)?.downcast_ref()
}
