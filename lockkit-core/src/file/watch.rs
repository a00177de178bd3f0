//! Wake-ups by inotify: one instance and one thread per backend, one watch per file that someone cares about.
//!
//! A thread of its own, and not a task, because it needs nothing from the runtime: a runtime without I/O is good
//! enough, and a busy one does not delay it.

use std::{
    collections::HashMap,
    io::{self, PipeReader, PipeWriter},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask, Watches};
use rustix::event::{PollFd, PollFlags};
use tokio::sync::watch;

/// Tells about changes of files. Dropping it ends its thread.
#[derive(Debug)]
pub(super) struct Watcher {
    registry: Arc<Registry>,
    _stop: PipeWriter,
}

impl Watcher {
    /// Fails if the system has no inotify instance left for this user.
    pub(super) fn new() -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let (stopped, stop) = io::pipe()?;
        let registry = Arc::new(Registry(Mutex::new(Watched {
            watches: inotify.watches(),
            signals: HashMap::new(),
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

    /// Begins to watch the file at `path`, from now on. It tells of releases, of deletion and of renaming, and not of
    /// a grant or a failed attempt.
    pub(super) fn watch(&self, path: &Path) -> io::Result<Events> {
        let mut watched = self.registry.lock();
        if watched.dead {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let descriptor = watched.watches.add(
            path,
            WatchMask::CLOSE_WRITE
                | WatchMask::ATTRIB
                | WatchMask::DELETE_SELF
                | WatchMask::MOVE_SELF
                | WatchMask::DONT_FOLLOW,
        )?;
        let id = descriptor.get_watch_descriptor_id();
        let signal = watched.signals.entry(id).or_insert_with(|| Signal {
            descriptor,
            sender: watch::Sender::new(()),
        });
        Ok(Events {
            changed: signal.sender.subscribe(),
            id,
            registry: Arc::clone(&self.registry),
        })
    }
}

/// The changes of one file. Those that were not asked for yet are remembered.
#[derive(Debug)]
pub(super) struct Events {
    changed: watch::Receiver<()>,
    id: i32,
    registry: Arc<Registry>,
}

impl Events {
    /// Nothing more will be told: the file is gone, or inotify failed.
    pub(super) fn ended(&self) -> bool {
        self.changed.has_changed().is_err()
    }

    /// Whether something happened since this or [`next`](Self::next) last said so.
    pub(super) fn seen(&mut self) -> bool {
        let seen = self.changed.has_changed().unwrap_or(true);
        self.changed.mark_unchanged();
        seen
    }

    /// Waits for something to happen. Cancel safe.
    pub(super) async fn next(&mut self) {
        if self.changed.changed().await.is_err() {
            // Whoever tries again now finds that out; here, waking would only spin.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let mut watched = self.registry.lock();
        let last = watched
            .signals
            .get(&self.id)
            .is_some_and(|signal| signal.sender.receiver_count() == 1);
        if last && let Some(signal) = watched.signals.remove(&self.id) {
            // It fails if the file was deleted meanwhile, and its watch with it.
            let _ = watched.watches.remove(signal.descriptor);
        }
    }
}

#[derive(Debug)]
struct Registry(Mutex<Watched>);

#[derive(Debug)]
struct Watched {
    watches: Watches,
    signals: HashMap<i32, Signal>,
    dead: bool,
}

#[derive(Debug)]
struct Signal {
    descriptor: WatchDescriptor,
    sender: watch::Sender<()>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn tell(&mut self, id: i32, mask: EventMask) {
        if mask.contains(EventMask::Q_OVERFLOW) {
            for signal in self.signals.values() {
                signal.sender.send_replace(());
            }
            return;
        }
        if let Some(signal) = self.signals.get(&id) {
            signal.sender.send_replace(());
        }
        if mask.contains(EventMask::IGNORED) {
            self.signals.remove(&id);
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
        let watcher = Watcher::new().unwrap();
        let mut events = watcher.watch(&lock).unwrap();
        let mut others = watcher.watch(&other).unwrap();

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
        let watcher = Watcher::new().unwrap();
        let (mut one, mut two) = (watcher.watch(&path).unwrap(), watcher.watch(&path).unwrap());
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
        let watcher = Watcher::new().unwrap();
        let mut events = watcher.watch(&path).unwrap();
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
        let watcher = Watcher::new().unwrap();
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
