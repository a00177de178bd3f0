//! Where there is no inotify, waiters poll.

use std::{
    convert::Infallible,
    io,
    path::{Path, PathBuf},
};

/// There is none.
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

/// There are none.
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
