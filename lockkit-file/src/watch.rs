//! Wake-ups by inotify: one instance and one thread per backend, one watch per file that someone cares about.
//!
//! A thread of its own, and not a task, because it needs nothing from the runtime: a runtime without I/O is good
//! enough, and a busy one does not delay it.

use std::{
    collections::HashMap,
    io::{self, PipeReader, PipeWriter},
    path::{Path, PathBuf},
    sync::{Arc, MutexGuard},
    thread,
};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask, Watches};
use rustix::event::{PollFd, PollFlags};
use tokio::sync::watch;

use crate::mutex::Mutex;

/// Tells about changes of files. Dropping it ends its thread.
#[derive(Debug)]
pub(crate) struct Watcher {
    registry: Arc<Registry>,
    _stop: PipeWriter,
}

impl Watcher {
    /// Watches the directories on the `way` to the files, too: if one is moved, everyone is told. Fails if the system
    /// has no inotify instance left for this user.
    pub(crate) fn new(way: Vec<PathBuf>) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let (stopped, stop) = io::pipe()?;
        let registry = Arc::new(Registry(Mutex::new(Watched {
            watches: inotify.watches(),
            signals: HashMap::new(),
            way,
            on_the_way: HashMap::new(),
            astray: true,
            next: 0,
            dead: false,
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

    /// Begins to watch what is at `paths`, from now on: a file or the files of a directory. All tell of deletion and
    /// of renaming, and the first of releases too. None tells of a grant or a failed attempt.
    pub(crate) fn watch(&self, paths: &[impl AsRef<Path>]) -> io::Result<Events> {
        let mut watched = self.registry.lock();
        if watched.dead {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        watched.find_way();
        let listener = watched.next;
        watched.next += 1;
        let (sender, changed) = watch::channel(());
        let sender = Arc::new(sender);
        // Should one of the paths be refused, its drop ends the watches before it.
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

/// The changes of what is watched for one claim. Those that were not asked for yet are remembered.
#[derive(Debug)]
pub(crate) struct Events {
    changed: watch::Receiver<()>,
    listener: u64,
    watches: Vec<i32>,
    registry: Arc<Registry>,
}

impl Events {
    /// Nothing more will be told: the file is gone, or inotify failed.
    pub(crate) fn ended(&self) -> bool {
        self.changed.has_changed().is_err()
    }

    /// Whether something happened since this or [`next`](Self::next) last said so.
    pub(crate) fn seen(&mut self) -> bool {
        let seen = self.changed.has_changed().unwrap_or(true);
        self.changed.mark_unchanged();
        seen
    }

    /// Waits for something to happen. Cancel safe.
    pub(crate) async fn next(&mut self) {
        if self.changed.changed().await.is_err() {
            // Whoever tries again now finds that out; here, waking would only spin.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let mut watched = self.registry.lock();
        for id in &self.watches {
            let Some(signal) = watched.signals.get_mut(id) else {
                continue;
            };
            signal.listeners.remove(&self.listener);
            if signal.listeners.is_empty()
                && let Some(signal) = watched.signals.remove(id)
            {
                // It fails if the file was deleted meanwhile, and its watch with it.
                let _ = watched.watches.remove(signal.descriptor);
            }
        }
    }
}

#[derive(Debug)]
struct Registry(Mutex<Watched>);

#[derive(Debug)]
struct Watched {
    watches: Watches,
    signals: HashMap<i32, Signal>,
    /// The directories that lead to the files.
    way: Vec<PathBuf>,
    on_the_way: HashMap<i32, WatchDescriptor>,
    /// One of them may no longer be what is watched.
    astray: bool,
    /// The next listener's number.
    next: u64,
    dead: bool,
}

#[derive(Debug)]
struct Signal {
    descriptor: WatchDescriptor,
    listeners: HashMap<u64, Arc<watch::Sender<()>>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.0.lock()
    }

    /// Passes events on until the other end of `stopped` is closed.
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
                Err(errno) => return self.give_up(&errno.into()),
            }
            match inotify.read_events(&mut buffer) {
                Ok(events) => {
                    let mut watched = self.lock();
                    for event in events {
                        watched.tell(event.wd.get_watch_descriptor_id(), event.mask);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.give_up(&error),
            }
        }
    }

    fn give_up(&self, error: &io::Error) {
        tracing::warn!(%error, "inotify failed; waiters poll from now on");
        let mut watched = self.lock();
        watched.dead = true;
        watched.signals.clear();
    }
}

impl Watched {
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
        let signal = self.signals.entry(id).or_insert_with(|| Signal {
            descriptor,
            listeners: HashMap::new(),
        });
        signal.listeners.insert(listener, Arc::clone(sender));
        Ok(id)
    }

    /// Watches the directories that are on the way now. One that may not be read cannot be watched; its move is then
    /// found at the next look.
    fn find_way(&mut self) {
        if !std::mem::take(&mut self.astray) {
            return;
        }
        let mut before = std::mem::take(&mut self.on_the_way);
        for dir in &self.way {
            let mask = WatchMask::MOVE_SELF | WatchMask::DELETE_SELF | WatchMask::ONLYDIR;
            if let Ok(descriptor) = self.watches.add(dir, mask) {
                let id = descriptor.get_watch_descriptor_id();
                before.remove(&id);
                self.on_the_way.insert(id, descriptor);
            }
        }
        for old in before.into_values() {
            // It fails if the directory is gone, and its watch with it.
            let _ = self.watches.remove(old);
        }
    }

    fn tell(&mut self, id: i32, mask: EventMask) {
        let way = self.on_the_way.contains_key(&id);
        if way || mask.contains(EventMask::Q_OVERFLOW) {
            self.astray = true;
            for signal in self.signals.values() {
                signal.tell();
            }
            return;
        }
        if let Some(signal) = self.signals.get(&id) {
            signal.tell();
        }
        if mask.contains(EventMask::IGNORED)
            && let Some(gone) = self.signals.remove(&id)
        {
            // What else they listen to is of no use to them any more: they have to begin anew.
            for signal in self.signals.values_mut() {
                signal
                    .listeners
                    .retain(|listener, _| !gone.listeners.contains_key(listener));
            }
        }
    }
}

impl Signal {
    fn tell(&self) {
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

    async fn told(events: &mut Events) {
        tokio::time::timeout(LIMIT, events.next())
            .await
            .expect("told in time");
    }

    #[tokio::test]
    async fn a_failed_attempt_tells_nobody() {
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
        // Events come in order, so one about the first file would be here by now.
        told(&mut others).await;
        assert!(!events.seen());

        drop(File::options().write(true).open(&lock).unwrap());
        told(&mut events).await;
    }

    #[tokio::test]
    async fn all_who_watch_a_file_are_told_and_the_last_one_ends_it() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        fs::write(&path, "").unwrap();
        let watcher = Watcher::new(Vec::new()).unwrap();
        let (mut one, mut two) = (watcher.watch(&[&path]).unwrap(), watcher.watch(&[&path]).unwrap());
        fs::write(&path, "").unwrap();
        told(&mut one).await;
        told(&mut two).await;
        drop(one);
        fs::write(&path, "").unwrap();
        told(&mut two).await;
        drop(two);
        assert!(watcher.registry.lock().signals.is_empty());
    }

    #[tokio::test]
    async fn deletion_is_told_and_then_there_is_no_more() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("lock");
        fs::write(&path, "").unwrap();
        let watcher = Watcher::new(Vec::new()).unwrap();
        let mut events = watcher.watch(&[&path]).unwrap();
        fs::remove_file(&path).unwrap();
        told(&mut events).await;
        let wait = async {
            while !events.ended() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LIMIT, wait).await.expect("ended in time");
        assert!(watcher.registry.lock().signals.is_empty());
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
