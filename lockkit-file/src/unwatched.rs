//! The watcher of systems without inotify: there is none, and waiters poll.

use std::{
    convert::Infallible,
    io,
    path::{Path, PathBuf},
};

/// A watcher that cannot be made.
#[derive(Debug)]
pub(crate) struct Watcher(Infallible);

impl Watcher {
    pub(crate) fn new(_: Vec<PathBuf>) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn watch(&self, _: &[impl AsRef<Path>]) -> io::Result<Events> {
        match self.0 {}
    }
}

/// Events that never come.
#[derive(Debug)]
pub(crate) struct Events(Infallible);

impl Events {
    pub(crate) fn ended(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn seen(&mut self) -> bool {
        match self.0 {}
    }

    pub(crate) async fn next(&mut self) {
        match self.0 {}
    }
}
