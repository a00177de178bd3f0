//! What a granted claim keeps.

use std::{
    fs::{self, File, FileTimes},
    path::PathBuf,
    sync::Arc,
    time::SystemTime,
};

use lockkit_core::spi::Grant;

use crate::{
    fault::{Inode, Result},
    flock::Flock,
    queue::Queue,
    space,
};

/// A hold. Dropping it gives it up and wakes the waiters, in the order of its fields.
#[derive(Debug)]
pub(crate) struct Hold {
    pub grant: Grant,
    /// Goes first, so that no inspection shows a holder whose lock is free already.
    _reader: Option<ReaderNote>,
    taken: Taken,
    /// The files that the hold lives in. If one was deleted or replaced, others no longer see the hold.
    lives_in: Vec<(PathBuf, Inode)>,
}

impl Hold {
    pub(crate) fn new(
        reader: Option<ReaderNote>,
        taken: Taken,
        lives_in: Vec<(PathBuf, Inode)>,
        grant: Grant,
    ) -> Self {
        Self {
            grant,
            _reader: reader,
            taken,
            lives_in,
        }
    }

    /// The file whose lock is the hold.
    pub(crate) fn file(&self) -> &Arc<File> {
        self.taken.lock.file()
    }

    /// Whether others can still see it.
    pub(crate) fn stands(&self) -> Result<bool> {
        for (path, inode) in &self.lives_in {
            if !space::is_at(path, *inode)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A lock that is taken through a writable descriptor, whose last close wakes the first in the queue, in whichever process that is.
#[derive(Debug)]
pub(crate) struct Taken {
    pub lock: Flock,
    pub queue: Queue,
}

impl Drop for Taken {
    fn drop(&mut self) {
        // Stopped between the unlocking and the closing, a process would leave a free lock that nobody hears of; and while a forked
        // child has the descriptor too, closing it tells nobody. Who is woken now looks again soon, and in most cases it
        // is free by then.
        if self.queue.was_ever_waited_in() {
            touch(self.lock.file());
        }
    }
}

/// Wakes whoever watches `file`.
pub(crate) fn touch(file: &File) {
    let now = SystemTime::now();
    // Both times, or inotify would report a mere modification. Should it fail, the fallback poll is left.
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
        // An inspection removes what stays behind.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{queue::Place, watch::Watcher};
    use lockkit_core::spi::OwnerId;

    #[tokio::test]
    async fn waiters_are_told_although_a_forked_child_has_the_descriptor() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let file = Arc::new(File::create(&path).unwrap());
        let _childs = file.try_clone().unwrap();
        let queue = Queue::new(dir.path().join("queue"));
        let _waiter = Place::take(&queue, OwnerId::new(1)).unwrap();
        let lock = Flock::exclusive(&file, &path).unwrap().unwrap();
        drop(file);
        let watcher = Watcher::new(Vec::new()).unwrap();
        let mut events = watcher.watch(&[&path]).unwrap();
        drop(Taken { lock, queue });
        tokio::time::timeout(Duration::from_secs(20), events.next())
            .await
            .expect("told in time");
    }
}
