//! The contenders that a waiter watches.

use std::task::{Context, Poll};

use crate::watch::{Watch, WatchEvent};

/// The contenders before a waiter that it watches.
#[derive(Debug)]
pub(crate) struct Predecessors {
    pub(crate) paths: Vec<String>,
    pub(crate) watches: Vec<Watch>,
    /// The number of watches, from the first on, that may make it the waiter's turn. Another one is to look ahead.
    pub(crate) near: usize,
    /// Once one of them is gone, nobody is before the waiter.
    pub(crate) one_to_go: bool,
    /// The predecessor, if it is exclusive and the directory has a crowd (64 other nodes or more). Once its node is gone, and
    /// its session's heartbeat node names it among recent holds, nobody is before the waiter, and the waiter needs no list.
    pub(crate) writer: Option<Writer>,
    /// The connection on which the waiter began to watch.
    pub(crate) connection_id: Option<u64>,
}

/// A contender that excludes all others while it holds.
#[derive(Debug)]
pub(crate) struct Writer {
    /// The node in which its session names the holds that it had.
    pub(crate) heartbeat_path: String,
    pub(crate) czxid: i64,
}

impl Predecessors {
    /// One of them is gone.
    pub(crate) fn has_one_gone(&mut self) -> bool {
        let mut watches = self.watches.iter_mut();
        watches.any(|watch| watch.look() == Some(WatchEvent::Deleted))
    }

    /// No watch has told anything.
    pub(crate) fn is_unchanged(&mut self) -> bool {
        self.watches.iter_mut().all(|watch| watch.look().is_none())
    }

    /// The one of `paths` is the nearest of them, and has been watched on this connection.
    pub(crate) fn begin_with(&self, paths: &[String], connection_id: Option<u64>) -> bool {
        paths.len() == 1
            && self.paths.first() == paths.first()
            && connection_id.is_some()
            && self.connection_id == connection_id
    }

    /// Keeps the nearest alone. Returns `false` if that is gone, too, or was written to.
    pub(crate) fn keep_nearest(&mut self) -> bool {
        self.paths.truncate(1);
        self.watches.truncate(1);
        self.near = 1;
        self.one_to_go = true;
        self.watches.iter_mut().all(Watch::is_quiet)
    }

    /// Is ready once a watch that may make it the waiter's turn has told something, or that of the waiter's own node, if there
    /// is one.
    pub(crate) fn poll_near(&mut self, own: Option<&mut Watch>, cx: &mut Context<'_>) -> Poll<()> {
        any_told(self.watches.iter_mut().take(self.near).chain(own), cx)
    }

    /// Is ready once the watch that looks ahead has told something.
    pub(crate) fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        any_told(self.watches.iter_mut().skip(self.near), cx)
    }
}

fn any_told<'a>(mut watches: impl Iterator<Item = &'a mut Watch>, cx: &mut Context<'_>) -> Poll<()> {
    if watches.any(|watch| watch.poll(cx).is_ready()) {
        Poll::Ready(())
    } else {
        Poll::Pending
    }
}
