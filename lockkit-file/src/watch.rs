//! Wake-ups by inotify: one instance and one thread per backend, one watch per file that somebody listens to.
//!
//! It is a thread, not a task: so a runtime without I/O is enough, and a busy runtime does not delay it.

use std::{
    collections::HashMap,
    io::{self, PipeReader, PipeWriter},
    path::{Path, PathBuf},
    sync::{Arc, MutexGuard},
    thread,
};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask, Watches};
use lockkit_core::spi::Mutex;
use rustix::event::{PollFd, PollFlags};
use tokio::sync::watch;

/// Reports changes of files. Dropping it ends its thread.
#[derive(Debug)]
pub(crate) struct Watcher {
    registry: Arc<Registry>,
    _stop: PipeWriter,
}

impl Watcher {
    /// Starts the thread. It also watches the `ancestors` of the files: if one is moved, it wakes everybody. Fails if
    /// this user has no inotify instance left.
    pub(crate) fn new(ancestors: Vec<PathBuf>) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let (stopped, stop) = io::pipe()?;
        let registry = Arc::new(Registry(Mutex::new(WatchTable {
            watches: inotify.watches(),
            by_id: HashMap::new(),
            ancestors,
            watched_ancestors: HashMap::new(),
            ancestors_stale: true,
            next: 0,
            failed: false,
        })));
        let reader = Arc::clone(&registry);
        thread::Builder::new()
            .name("lockkit-file".into())
            .spawn(move || reader.read(inotify, &stopped))?;
        Ok(Self {
            registry,
            _stop: stop,
        })
    }

    /// Watches `paths`, files or directories of files, from now on. All report deletion and renaming, and the first
    /// path also releases. None reports a grant or a failed attempt.
    pub(crate) fn watch(&self, paths: &[impl AsRef<Path>]) -> io::Result<Events> {
        let mut watched = self.registry.lock();
        if watched.failed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        watched.watch_ancestors();
        let listener = watched.next;
        watched.next += 1;
        let (sender, changed) = watch::channel(());
        let sender = Arc::new(sender);
        // If a path is refused, dropping this ends the watches before it.
        let mut events = Events {
            changed,
            listener,
            watches: Vec::new(),
            registry: Arc::clone(&self.registry),
        };
        let mut refused = None;
        for (at, path) in paths.iter().enumerate() {
            match watched.listen(path.as_ref(), at == 0, listener, &sender) {
                Ok(id) => events.watches.push(id),
                Err(error) => refused = Some(error),
            }
        }
        drop(watched);
        refused.map_or(Ok(events), Err)
    }
}

/// The events for one claim. It remembers those that were not taken yet.
#[derive(Debug)]
pub(crate) struct Events {
    changed: watch::Receiver<()>,
    listener: u64,
    watches: Vec<i32>,
    registry: Arc<Registry>,
}

impl Events {
    /// Returns whether no event can come any more: the file is gone, or inotify failed.
    pub(crate) fn ended(&self) -> bool {
        self.changed.has_changed().is_err()
    }

    /// Returns whether an event came since this or [`next`](Self::next) last reported one.
    pub(crate) fn seen(&mut self) -> bool {
        let seen = self.changed.has_changed().unwrap_or(true);
        self.changed.mark_unchanged();
        seen
    }

    /// Waits for an event. Cancel safe.
    pub(crate) async fn next(&mut self) {
        if self.changed.changed().await.is_err() {
            // The next attempt finds that out. Waking here would only spin.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let mut watched = self.registry.lock();
        for id in &self.watches {
            let Some(watch) = watched.by_id.get_mut(id) else {
                continue;
            };
            watch.listeners.remove(&self.listener);
            if watch.listeners.is_empty()
                && let Some(watch) = watched.by_id.remove(id)
            {
                // It fails if the file was deleted, and its watch with it.
                let _ = watched.watches.remove(watch.descriptor);
            }
        }
    }
}

#[derive(Debug)]
struct Registry(Mutex<WatchTable>);

#[derive(Debug)]
struct WatchTable {
    watches: Watches,
    by_id: HashMap<i32, Watch>,
    /// The directories above the files.
    ancestors: Vec<PathBuf>,
    watched_ancestors: HashMap<i32, WatchDescriptor>,
    /// Another directory may be at one of these paths than the one that is watched.
    ancestors_stale: bool,
    /// The next listener's number.
    next: u64,
    failed: bool,
}

#[derive(Debug)]
struct Watch {
    descriptor: WatchDescriptor,
    listeners: HashMap<u64, Arc<watch::Sender<()>>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, WatchTable> {
        self.0.lock()
    }

    /// Passes on events until the other end of `stopped` is closed.
    fn read(&self, mut inotify: Inotify, stopped: &PipeReader) {
        let mut buffer = [0; 4_096];
        loop {
            let mut ready = [
                PollFd::new(&inotify, PollFlags::IN),
                PollFd::new(stopped, PollFlags::IN),
            ];
            match rustix::event::poll(&mut ready, None) {
                Ok(_) if !ready[1].revents().is_empty() => return,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return self.fail(&errno.into()),
            }
            match inotify.read_events(&mut buffer) {
                Ok(events) => {
                    let mut watched = self.lock();
                    for event in events {
                        watched.notify(event.wd.get_watch_descriptor_id(), event.mask);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.fail(&error),
            }
        }
    }

    fn fail(&self, error: &io::Error) {
        tracing::warn!(%error, "inotify failed; waiters poll from now on");
        let mut watched = self.lock();
        watched.failed = true;
        watched.by_id.clear();
    }
}

impl WatchTable {
    fn listen(
        &mut self,
        path: &Path,
        releases: bool,
        listener: u64,
        sender: &Arc<watch::Sender<()>>,
    ) -> io::Result<i32> {
        let mut mask = WatchMask::ATTRIB
            | WatchMask::DELETE
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::DONT_FOLLOW;
        mask.set(WatchMask::CLOSE_WRITE, releases);
        let descriptor = self.watches.add(path, mask)?;
        let id = descriptor.get_watch_descriptor_id();
        let watch = self.by_id.entry(id).or_insert_with(|| Watch {
            descriptor,
            listeners: HashMap::new(),
        });
        watch.listeners.insert(listener, Arc::clone(sender));
        Ok(id)
    }

    /// Watches the directories that are above the files now. A directory that may not be read cannot be watched; the
    /// next check finds its move.
    fn watch_ancestors(&mut self) {
        if !std::mem::take(&mut self.ancestors_stale) {
            return;
        }
        let mut before = std::mem::take(&mut self.watched_ancestors);
        for dir in &self.ancestors {
            let mask = WatchMask::MOVE_SELF | WatchMask::DELETE_SELF | WatchMask::ONLYDIR;
            if let Ok(descriptor) = self.watches.add(dir, mask) {
                let id = descriptor.get_watch_descriptor_id();
                before.remove(&id);
                self.watched_ancestors.insert(id, descriptor);
            }
        }
        for old in before.into_values() {
            // It fails if the directory is gone, and its watch with it.
            let _ = self.watches.remove(old);
        }
    }

    fn notify(&mut self, id: i32, mask: EventMask) {
        if self.watched_ancestors.contains_key(&id) || mask.contains(EventMask::Q_OVERFLOW) {
            self.ancestors_stale = true;
            for watch in self.by_id.values() {
                watch.notify();
            }
            return;
        }
        if let Some(watch) = self.by_id.get(&id) {
            watch.notify();
        }
        if mask.contains(EventMask::IGNORED)
            && let Some(gone) = self.by_id.remove(&id)
        {
            // These listeners have to start again, so their other watches are of no use.
            for watch in self.by_id.values_mut() {
                watch
                    .listeners
                    .retain(|listener, _| !gone.listeners.contains_key(listener));
            }
        }
    }
}

impl Watch {
    fn notify(&self) {
        for listener in self.listeners.values() {
            listener.send_replace(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        time::Duration,
    };

    use tempfile::TempDir;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    async fn woken(events: &mut Events) {
        tokio::time::timeout(LIMIT, events.next())
            .await
            .expect("woken in time");
    }

    #[tokio::test]
    async fn a_failed_attempt_wakes_nobody() {
        let dir = TempDir::new().unwrap();
        let (lock, other) = (dir.path().join("lock"), dir.path().join("other"));
        let _holder = File::create(&lock).unwrap();
        fs::write(&other, "").unwrap();
        let watcher = Watcher::new(Vec::new()).unwrap();
        let mut events = watcher.watch(&[&lock]).unwrap();
        let mut others = watcher.watch(&[&other]).unwrap();

        let file = File::open(&lock).unwrap();
        assert!(file.try_lock_shared().is_ok());
        drop(file);
        fs::write(&other, "later").unwrap();
        // Events come in order, so one of the first file would be here by now.
        woken(&mut others).await;
        assert!(!events.seen());

        drop(File::options().write(true).open(&lock).unwrap());
        woken(&mut events).await;
    }

    #[tokio::test]
    async fn all_watchers_are_woken_and_the_last_ends_the_watch() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        fs::write(&path, "").unwrap();
        let watcher = Watcher::new(Vec::new()).unwrap();
        let (mut one, mut two) = (watcher.watch(&[&path]).unwrap(), watcher.watch(&[&path]).unwrap());
        fs::write(&path, "").unwrap();
        woken(&mut one).await;
        woken(&mut two).await;
        drop(one);
        fs::write(&path, "").unwrap();
        woken(&mut two).await;
        drop(two);
        assert!(watcher.registry.lock().by_id.is_empty());
    }

    #[tokio::test]
    async fn a_deletion_is_the_last_event() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        fs::write(&path, "").unwrap();
        let watcher = Watcher::new(Vec::new()).unwrap();
        let mut events = watcher.watch(&[&path]).unwrap();
        fs::remove_file(&path).unwrap();
        woken(&mut events).await;
        let wait = async {
            while !events.ended() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LIMIT, wait).await.expect("ended in time");
        assert!(watcher.registry.lock().by_id.is_empty());
    }

    #[tokio::test]
    async fn dropping_the_watcher_ends_its_thread() {
        let watcher = Watcher::new(Vec::new()).unwrap();
        let registry = Arc::downgrade(&watcher.registry);
        assert!(registry.strong_count() == 2, "the thread has one");
        drop(watcher);
        let wait = async {
            while registry.strong_count() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LIMIT, wait).await.expect("ended in time");
    }
}
