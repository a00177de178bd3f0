//! Where there is no inotify, waiters poll.

use std::{
    convert::Infallible,
    io,
    path::{Path, PathBuf},
};

/// There is none.
#[derive(Debug)]
pub(super) struct Watcher(Infallible);

impl Watcher {
    pub(super) fn new(_: Vec<PathBuf>) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn watch(&self, _: &[impl AsRef<Path>]) -> io::Result<Events> {
        match self.0 {}
    }
}

/// There are none.
#[derive(Debug)]
pub(super) struct Events(Infallible);

impl Events {
    pub(super) fn ended(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn seen(&mut self) -> bool {
        match self.0 {}
    }

    pub(super) async fn next(&mut self) {
        match self.0 {}
    }
}
