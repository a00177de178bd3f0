//! lockkit's file backend: locks between the processes of one host, by the operating system's advisory file locks.
//!
//! Applications use the facade, `lockkit`, with its feature `file` and a URL such as `file:///var/lib/app/locks`.
//! Systems other than Unix have no such backend: there, this crate is empty.
//!
//! ```no_run
//! use lockkit_core::LockClient;
//! use lockkit_file::{FileBackend, FileConfig};
//!
//! # async fn example() -> lockkit_core::Result<()> {
//! let backend = FileBackend::open(FileConfig::new("/var/lib/app/locks")).await?;
//! let client = LockClient::new(backend);
//! let guard = client.lock("orders/42")?.acquire().await?;
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
#![cfg(unix)]

mod claim;
mod contender;
#[cfg(test)]
mod crash_tests;
mod fault;
mod flock;
mod hold;
mod inspect;
mod journal;
mod life;
mod mutex;
mod queue;
mod space;
#[cfg(target_os = "linux")]
mod watch;
#[cfg(not(target_os = "linux"))]
#[path = "unwatched.rs"]
mod watch;

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, LockKind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Mode},
};
use tokio::task::spawn_blocking;

use crate::{
    claim::FileClaim,
    contender::{Pace, Spec},
    fault::Fault,
    journal::Holding,
    mutex::Mutex,
    space::Space,
    watch::Watcher,
};

const NAME: &str = "file";
/// Looking for a free permit takes a look at each.
const MAX_PERMITS: u32 = 10_000;
/// Long: a look wakes two threads of a process that is asleep, and there may be a hundred such processes.
const POLL_WATCHED: Duration = Duration::from_secs(10);
const POLL_UNWATCHED: Duration = Duration::from_millis(25);

/// Where a [`FileBackend`] keeps its files.
///
/// ```
/// use lockkit_file::FileConfig;
///
/// let mut config = FileConfig::new("/var/lib/app/locks");
/// config.namespace = "billing".into();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileConfig {
    /// The directory. It is made, for its owner alone, if it is missing, and so are the files: one account has to run all
    /// processes. It has to be on a local file system, and better on one that is not emptied at boot, the tokens with it.
    pub dir: PathBuf,
    /// Keeps applications that share the directory apart: a directory in it, none if empty. Of `[A-Za-z0-9._-]`.
    pub namespace: String,
    /// How often a waiter asks again although nothing woke it. Unset: 10 s with inotify, 25 ms without.
    pub poll: Option<Duration>,
}

impl FileConfig {
    /// Files in `dir`, in the default namespace.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            namespace: BackendInfo::DEFAULT_NAMESPACE.to_owned(),
            poll: None,
        }
    }

    fn check(&self) -> Result<()> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if !self.namespace.chars().all(allowed) {
            return Err(Error::invalid_option(
                "namespace",
                format!(
                    "{:?} has other characters than letters, digits, `.`, `_` and `-`",
                    self.namespace
                ),
            ));
        }
        if self.namespace.len() > Space::MAX_NAMESPACE {
            return Err(Error::invalid_option(
                "namespace",
                format!("it is longer than {} bytes", Space::MAX_NAMESPACE),
            ));
        }
        if self.poll.is_some_and(|poll| poll < Duration::from_millis(1)) {
            return Err(Error::invalid_option("poll", "it is shorter than 1 ms"));
        }
        Ok(())
    }
}

/// Locks between the processes of one host.
///
/// A hold is an advisory lock of the operating system on a file, so it ends with the process that has it, however that
/// ends, and needs no lease. Fencing tokens go on rising when the host crashes: a number above them is on disk
/// before they are handed out. Waiters are granted in turn. They are woken by inotify on Linux; elsewhere, and where the system's
/// inotify instances are used up, they poll.
///
/// What it cannot do: serve more than one host (also through a network file system), or end someone else's hold. A holder
/// that is stopped holds on until it is continued or killed. If a lock's file is deleted while the lock is held, the holder is
/// told that it is lost, but not before another may be granted.
pub struct FileBackend {
    space: Arc<Space>,
    namespace: Arc<str>,
    poll: Option<Duration>,
    watcher: Mutex<Option<Arc<Watcher>>>,
    pace: Arc<Pace>,
    watched: bool,
}

impl FileBackend {
    /// Opens the directory.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a value that cannot be kept; [`Error::Backend`], naming the path, if the
    /// directory cannot be made, read or written, or if it or the namespace in it is a symbolic link or no directory.
    ///
    /// # Cancel safety
    /// May be dropped at any await. A directory that was made stays.
    pub async fn open(config: FileConfig) -> Result<Self> {
        config.check()?;
        let FileConfig { dir, namespace, poll } = config;
        let namespace: Arc<str> = namespace.into();
        let inner = Arc::clone(&namespace);
        let space = blocking(move || Space::open(&dir, &inner))
            .await
            .map_err(|fault| fault.during("connect"))?;
        let watcher = Watcher::new(space.way())
            .inspect_err(|error| tracing::debug!(%error, "no inotify; waiters poll"))
            .ok();
        Ok(Self {
            space: Arc::new(space),
            namespace,
            poll,
            watched: watcher.is_some(),
            watcher: Mutex::new(watcher.map(Arc::new)),
            pace: Arc::default(),
        })
    }

    async fn holders(&self, name: &LockName, kind: LockKind) -> Result<Vec<Holding>> {
        let files = self.space.files(name, kind);
        let asked = name.clone();
        blocking(move || inspect::holders(&files, &asked, kind))
            .await
            .map_err(|fault| fault.during("inspect"))
    }
}

#[async_trait]
impl Backend for FileBackend {
    fn info(&self) -> BackendInfo {
        let mut capabilities = Capabilities::default();
        capabilities.shared = true;
        capabilities.permits = true;
        capabilities.notified = self.watched;
        capabilities.local_handoffs = true;
        capabilities.fencing = FencingDurability::Durable;
        let mut info = BackendInfo::new(NAME, self.space.url());
        info.namespace = Arc::clone(&self.namespace);
        info.capabilities = capabilities;
        let poll = if self.watched {
            POLL_WATCHED
        } else {
            POLL_UNWATCHED
        };
        info.fallback_poll = self.poll.unwrap_or(poll);
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        if let Mode::Permits(permits) = request.mode
            && permits.get() > MAX_PERMITS
        {
            return Err(Error::invalid_option(
                "permits",
                format!("{permits} is more than the {MAX_PERMITS} that a file semaphore can have"),
            ));
        }
        Ok(Box::new(FileClaim::new(Spec {
            request: request.clone(),
            files: self.space.files(&request.name, request.mode.kind()),
            watcher: self.watcher.lock().clone(),
            poll: self.poll.unwrap_or(POLL_UNWATCHED),
            pace: Arc::clone(&self.pace),
        })))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let holders = self.holders(name, kind).await?;
        let holders = holders
            .into_iter()
            .map(|holder| Holder::new(FencingToken::new(holder.token), holder.label, None))
            .collect();
        Ok(LockState::new(holders, None))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        let holders = self.holders(name, kind).await?;
        let Some(holder) = holders.iter().find(|holder| holder.token == token.get()) else {
            return Ok(false);
        };
        Err(Error::unsupported(
            NAME,
            format!(
                "ending another process's hold of `{name}`; end process {}, or what it started",
                holder.pid
            ),
        ))
    }

    async fn close(&self) -> Result<()> {
        *self.watcher.lock() = None;
        Ok(())
    }
}

impl fmt::Debug for FileBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileBackend")
            .field("server", &self.space.url())
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Runs `work` on a worker thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    Fault::unless_in_a_runtime()?;
    spawn_blocking(work).await.unwrap_or(Err(Fault::Worker))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockkit_core::spi::{OwnerId, Renewal};

    async fn claim(backend: &FileBackend, owner: u128) -> Box<dyn Claim> {
        let request = ClaimRequest::new(
            LockName::new("n").unwrap(),
            Mode::Exclusive,
            Duration::from_secs(30),
            OwnerId::new(owner),
        );
        backend.claim(&request).await.unwrap()
    }

    /// A holder does not lose its lock before it is told, also where its runtime does no work any more.
    #[test]
    fn work_that_is_never_begun_frees_nothing() {
        let runtime = || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
        };
        let (first, second) = (runtime(), runtime());
        let ended = first.handle().clone();
        let dir = tempfile::TempDir::new().unwrap();
        second.block_on(async {
            let backend = FileBackend::open(FileConfig::new(dir.path())).await.unwrap();
            backend.pace.spare();
            let mut holder = claim(&backend, 1).await;
            assert!(holder.attempt(Duration::ZERO).await.unwrap().is_some());
            first.shutdown_background();
            let within = ended.enter();
            holder.renew().await.unwrap_err();
            drop(within);
            let mut rival = claim(&backend, 2).await;
            let tried = rival.attempt(Duration::ZERO).await.unwrap();
            assert_eq!(tried, None, "nobody has told the holder");
            assert!(matches!(holder.renew().await.unwrap(), Renewal::Held(_)));
            holder.release().await.unwrap();
            assert!(rival.attempt(Duration::ZERO).await.unwrap().is_some());
        });
    }

    #[tokio::test]
    async fn a_waiter_keeps_its_place_however_slow_the_disk() {
        let dir = tempfile::TempDir::new().unwrap();
        let backend = FileBackend::open(FileConfig::new(dir.path())).await.unwrap();
        let mut claims = [claim(&backend, 1).await, claim(&backend, 2).await];
        let [holder, waiter] = &mut claims;
        assert!(holder.attempt(Duration::ZERO).await.unwrap().is_some());
        backend.pace.spare();
        assert!(waiter.attempt(Duration::from_secs(1)).await.unwrap().is_none());
        let tickets = || {
            let entries = std::fs::read_dir(dir.path().join("lockkit/n.queue")).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
        };
        let [ticket] = &tickets()[..] else {
            panic!("one waits")
        };
        // For longer than it counts if it shows no life.
        let looks = tokio::time::timeout(Duration::from_secs(5), async {
            loop {
                waiter.notified().await;
                assert!(waiter.attempt(Duration::from_secs(1)).await.unwrap().is_none());
            }
        });
        looks.await.unwrap_err();
        assert!(queue::counts(ticket).unwrap());
    }

    #[test]
    fn whoever_shares_a_thread_has_most_of_it_however_slow_the_disk() {
        let pace = Pace::default();
        let (mut now, mut kept) = (tokio::time::Instant::now(), Duration::ZERO);
        let began = now;
        for tenths in [1, 9, 11, 20, 100, 70, 5, 40] {
            while pace.is_spared(now) {
                now += Duration::from_micros(100);
            }
            let took = Duration::from_micros(100 * tenths);
            if tenths >= 10 {
                kept += took;
            }
            pace.took(now, now + took);
            now += took;
            assert_eq!(pace.is_spared(now), tenths > 10, "{took:?}");
        }
        while pace.is_spared(now) {
            now += Duration::from_micros(100);
        }
        assert!(kept * 10 <= now - began, "{kept:?} of {:?}", now - began);
        pace.took(now, now + Duration::from_secs(10));
        assert!(
            !pace.is_spared(now + Duration::from_millis(10_101)),
            "for a while only"
        );
    }

    #[tokio::test]
    async fn without_inotify_a_waiter_polls() {
        let dir = tempfile::TempDir::new().unwrap();
        let mut backend = FileBackend::open(FileConfig::new(dir.path())).await.unwrap();
        backend.watched = false;
        backend.watcher = Mutex::new(None);
        let info = backend.info();
        assert!(!info.capabilities.notified);
        assert_eq!(info.fallback_poll, POLL_UNWATCHED);

        let mut claims = [claim(&backend, 1).await, claim(&backend, 2).await];
        let [holder, waiter] = &mut claims;
        assert!(holder.attempt(Duration::ZERO).await.unwrap().is_some());
        let started = std::time::Instant::now();
        let mut denied = 0;
        // Beyond the burst, only the poll is left.
        while denied < 12 {
            assert!(waiter.attempt(Duration::from_secs(1)).await.unwrap().is_none());
            waiter.notified().await;
            denied += 1;
        }
        let looked = started.elapsed();
        assert!(looked > 6 * POLL_UNWATCHED, "a poll is no event: {looked:?}");
        holder.release().await.unwrap();
        let wait = async {
            while waiter.attempt(Duration::from_secs(1)).await.unwrap().is_none() {
                waiter.notified().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap();
    }
}
