//! The backend's failures, each with the path that it is about.

use std::{
    io,
    path::{Path, PathBuf},
};

use lockkit_core::Error;
use rustix::io::Errno;
use tokio::runtime::Handle;

use crate::NAME;

pub(crate) type Result<T, E = FileError> = std::result::Result<T, E>;

/// A failure, before it is known which operation it made fail.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("cannot {doing} {}{}", .path.display(), advice(.source))]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{} is {found}, not {wanted}; {}", .path.display(), instead(.found, .wanted))]
    WrongType {
        path: PathBuf,
        found: &'static str,
        wanted: &'static str,
    },
    #[error(
        "{} is damaged: neither copy of its token counter is whole. Once nobody holds the lock, delete the file: \
         tokens then go on from the clock",
        .path.display()
    )]
    Damaged { path: PathBuf },
    #[error(
        "{} belongs to the lock {found:?}, from whose file it was copied or renamed. Once nobody holds the lock, delete the \
         file: tokens then go on from the clock",
        .path.display()
    )]
    OtherName { path: PathBuf, found: String },
    #[error("{} has no fencing tokens left", .path.display())]
    Exhausted { path: PathBuf },
    #[error("{} has a waiter with the last number that there is; end that waiter", .path.display())]
    NoTickets { path: PathBuf },
    #[error("{} was replaced again and again while it was being locked", .path.display())]
    Replaced { path: PathBuf },
    #[error("{} stayed locked by another process for over {waited_ms} ms; it may be stopped", .path.display())]
    StillLocked { path: PathBuf, waited_ms: u64 },
    #[error("it has to wait, which it may not where it runs")]
    NeedsWorker,
    #[error("the worker thread ended before it was done")]
    WorkerDied,
    #[error("it was granted, and given up when nobody had taken it for as long as its ttl")]
    GrantExpired,
    #[error("this must be awaited within a Tokio runtime")]
    NoRuntime,
    #[error("{reason}")]
    PermitsInUse { reason: String },
}

/// Returns what to do about something else in the place of what is wanted.
fn instead(found: &str, wanted: &str) -> &'static str {
    match (found, wanted) {
        // The locks of others may be where it leads to: without it, a new directory would be made.
        ("a symbolic link", "a directory") => "choose the directory that it leads to, for all processes",
        _ => "remove it, or choose another directory for all processes",
    }
}

/// Returns what to do, if there is something, behind the path.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => " (give this user the right to it)",
        io::ErrorKind::NotFound => " (was it removed, or does a symbolic link above it lead nowhere?)",
        // Another directory has other locks: who goes on in the former one excludes nobody here.
        io::ErrorKind::NotADirectory => {
            " (a file is in a directory's place: remove it, or choose another directory for all processes)"
        }
        io::ErrorKind::IsADirectory => " (remove it)",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => " (make room on the disk)",
        io::ErrorKind::ReadOnlyFilesystem => {
            " (mount it for writing; another directory must be the same for all processes)"
        }
        _ => "",
    }
}

impl FileError {
    /// Returns what `map_err` needs for a failure of `doing` something to `path`.
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            doing,
            path: path.to_owned(),
            source,
        }
    }

    /// Fails outside of a runtime, where asking for a worker thread would panic.
    pub(crate) fn require_runtime() -> Result<()> {
        Handle::try_current().map(drop).map_err(|_| Self::NoRuntime)
    }

    /// Converts it to the error that `operation` returns.
    pub(crate) fn into_error(self, operation: &'static str) -> Error {
        if let Self::PermitsInUse { reason } = self {
            return Error::invalid_option("permits", reason);
        }
        if self.is_transient() {
            Error::transient(NAME, operation, self)
        } else {
            Error::permanent(NAME, operation, self)
        }
    }

    /// A full disk is not transient: a waiter should hear of it rather than wait for a clean-up.
    fn is_transient(&self) -> bool {
        match self {
            Self::Replaced { .. } | Self::StillLocked { .. } | Self::WorkerDied | Self::GrantExpired => true,
            Self::Io { source, .. } => {
                matches!(
                    source.kind(),
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::Interrupted
                        | io::ErrorKind::TimedOut
                        | io::ErrorKind::OutOfMemory
                ) || [Errno::MFILE, Errno::NFILE, Errno::NOLCK]
                    .iter()
                    .any(|errno| source.raw_os_error() == Some(errno.raw_os_error()))
            }
            _ => false,
        }
    }
}
