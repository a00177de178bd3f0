//! What goes wrong on disk, with the path it went wrong at.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use lockkit_core::Error;
use rustix::io::Errno;

use crate::NAME;

pub(crate) type Result<T, E = Fault> = std::result::Result<T, E>;

/// A failure that does not know yet which operation it made fail.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error("cannot {doing} {}", .path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{} is {found}, not {wanted}; choose another directory, or remove it", .path.display())]
    NotOurs {
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
    #[error("{} belongs to the lock {found:?}, whose encoded name is the same", .path.display())]
    OtherName { path: PathBuf, found: String },
    #[error("{} has no fencing tokens left", .path.display())]
    Exhausted { path: PathBuf },
    #[error("{} was replaced again and again while it was being locked", .path.display())]
    Replaced { path: PathBuf },
    #[error("{} stayed locked by another process for over {waited_ms} ms; it may be stopped", .path.display())]
    LedgerBusy { path: PathBuf, waited_ms: u64 },
    #[error("it has to wait, which it may not where it runs")]
    Waits,
    #[error("the worker thread ended before it was done")]
    Worker,
    #[error("it was granted, and given up when nobody had taken it for as long as its ttl")]
    Untaken,
    #[error("this must be awaited within a Tokio runtime")]
    NoRuntime,
    #[error("{reason}")]
    Permits { reason: String },
}

impl Fault {
    /// For `map_err`: what was being done to which path.
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            doing,
            path: path.to_owned(),
            source,
        }
    }

    /// Without a runtime there are no worker threads, and asking for one would panic.
    pub(crate) fn unless_in_a_runtime() -> Result<()> {
        tokio::runtime::Handle::try_current()
            .map(drop)
            .map_err(|_| Self::NoRuntime)
    }

    /// As the caller of `operation` is told.
    pub(crate) fn during(self, operation: &'static str) -> Error {
        if let Self::Permits { reason } = self {
            return Error::invalid_option("permits", reason);
        }
        if self.may_pass() {
            Error::transient(NAME, operation, self)
        } else {
            Error::permanent(NAME, operation, self)
        }
    }

    /// A full disk does not count as passing: whoever waits should hear of it rather than wait for a clean-up.
    fn may_pass(&self) -> bool {
        match self {
            Self::Replaced { .. } | Self::LedgerBusy { .. } | Self::Worker | Self::Untaken => true,
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

/// Which file system object a path or a descriptor stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    pub(crate) fn of(metadata: &std::fs::Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self {
            device: metadata.dev(),
            number: metadata.ino(),
        }
    }
}

impl fmt::Debug for Inode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.device, self.number)
    }
}
