//! The hold of a granted claim: its lock, and the note about it.

use std::{
    fs::{File, FileTimes},
    path::PathBuf,
    sync::Arc,
    time::SystemTime,
};

use lockkit_core::spi::Grant;

use crate::{
    error::Result,
    flock::Flock,
    layout::{self, Inode},
    queue::Queue,
};

/// A hold. Dropping it releases it and wakes the waiters, in the order of its fields.
#[derive(Debug)]
pub(crate) struct Hold {
    pub grant: Grant,
    /// Dropped first, so that no inspection shows a holder whose lock is free already.
    pub _reader: Option<ReaderNote>,
    pub lock: WakingLock,
    /// The files that the hold depends on. Others no longer see the hold if one is deleted or replaced.
    pub backing: Vec<(PathBuf, Inode)>,
}

impl Hold {
    /// Returns the file whose lock is the hold.
    pub(crate) fn file(&self) -> &Arc<File> {
        self.lock.flock.file()
    }

    /// Returns whether others still see it.
    pub(crate) fn is_intact(&self) -> Result<bool> {
        for (path, inode) in &self.backing {
            if !layout::is_at(path, *inode)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A lock that wakes the first in the queue when it ends, in any process: its descriptor is writable, and the last
/// close of such a descriptor is an event.
#[derive(Debug)]
pub(crate) struct WakingLock {
    pub flock: Flock,
    pub queue: Queue,
}

impl Drop for WakingLock {
    fn drop(&mut self) {
        // Closing alone wakes nobody if the process is stopped between unlocking and closing, or while a forked child
        // has the descriptor, too. A waiter that is woken now looks again soon, and mostly finds the lock free by
        // then.
        if self.queue.may_have_waiters() {
            wake_watchers(self.flock.file());
        }
    }
}

/// Wakes all that watch `file`.
pub(crate) fn wake_watchers(file: &File) {
    let now = SystemTime::now();
    // Both times, or inotify would report a mere modification. If it fails, the fallback poll is left.
    let _ = file.set_times(FileTimes::new().set_accessed(now).set_modified(now));
}

/// A shared holder's file, locked while it holds.
#[derive(Debug)]
pub(crate) struct ReaderNote {
    pub path: PathBuf,
    pub _lock: Flock,
}

impl Drop for ReaderNote {
    fn drop(&mut self) {
        // An inspection removes a file that stays behind.
        let _ = layout::remove(&self.path);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::Duration;

    use lockkit_core::spi::OwnerId;

    use super::*;
    use crate::{queue::Ticket, watch::Watcher};

    #[tokio::test]
    async fn waiters_are_woken_while_a_child_has_the_descriptor() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let file = Arc::new(File::create(&path).unwrap());
        let _childs = file.try_clone().unwrap();
        let queue = Queue::new(dir.path().join("queue"));
        let _waiter = Ticket::draw(&queue, OwnerId::new(1)).unwrap();
        let flock = Flock::exclusive(&file, &path).unwrap().unwrap();
        drop(file);
        let watcher = Watcher::new(Vec::new()).unwrap();
        let mut events = watcher.watch(&[&path]).unwrap();
        drop(WakingLock { flock, queue });
        tokio::time::timeout(Duration::from_secs(20), events.next())
            .await
            .expect("woken in time");
    }
}
