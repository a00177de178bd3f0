//! `spi::Backend`: the locks of one directory.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, UNIX_EPOCH},
};

use async_trait::async_trait;
use lockkit_core::{
    Capabilities, Error, FencingDurability, FencingToken, Holder, LockKind, LockName, LockState, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Lease, Lister, Mode, Mutex},
};
use tokio::{task::spawn_blocking, time::Instant};

use crate::{
    NAME,
    blocking_claim::ClaimSpec,
    claim::FileClaim,
    config::FileConfig,
    disk_pace::DiskPace,
    error::FileError,
    inspect,
    layout::Layout,
    list::FileLister,
    token_record::{Grantee, TokenRecord},
    watch::Watcher,
};

/// The largest semaphore: finding a free permit means trying each.
pub(crate) const MAX_PERMITS: u32 = 10_000;
/// Long, as each retry wakes two threads of a sleeping process, and a hundred processes may wait.
const POLL_WATCHED: Duration = Duration::from_secs(10);
const POLL_UNWATCHED: Duration = Duration::from_millis(25);

/// Locks between the processes of one host.
///
/// A hold is an advisory lock of the operating system on a file. It ends with its process, however the process ends,
/// and needs no lease. Fencing tokens keep rising after a crash of the host: a number above them is on disk before
/// they are granted. Waiters are granted in turn. On Linux, inotify wakes them. On other systems, and where the user
/// has no inotify instance left, they poll.
///
/// It serves one host only, also on a network file system, and cannot end another process's hold. A stopped holder
/// keeps its lock until it is continued or killed. If the file of a held lock is deleted, the holder learns that the
/// lock is lost, but another may be granted first.
pub struct FileBackend {
    layout: Arc<Layout>,
    namespace: Arc<str>,
    poll: Option<Duration>,
    watcher: Mutex<Option<Arc<Watcher>>>,
    pace: Arc<DiskPace>,
    watched: bool,
    /// True if the directory was there, and could be written.
    is_prepared: AtomicBool,
}

impl FileBackend {
    /// Opens the directory. Creates nothing: the first acquisition creates a directory that is missing, and to look, it is enough to read.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] for a value that cannot be kept. [`Error::Backend`], naming the path, if the
    /// directory cannot be read, or if it or the namespace in it is a symbolic link or no directory. If it cannot be
    /// created or written, acquisitions say so.
    ///
    /// # Cancel safety
    /// May be dropped at any await.
    pub async fn open(config: FileConfig) -> Result<Self> {
        config.check()?;
        let FileConfig { dir, namespace, poll } = config;
        let namespace: Arc<str> = namespace.into();
        let inner = Arc::clone(&namespace);
        let opened = blocking(move || {
            let layout = Layout::open(&dir, &inner)?;
            let open_to_others = layout.open_to_others();
            Ok((layout, open_to_others))
        });
        let (layout, open_to_others) = opened.await.map_err(|error| error.into_error("connect"))?;
        if let Some(dir) = open_to_others {
            tracing::warn!(
                ?dir,
                "other accounts may write to the locks' directory, and so keep locks, free them, and set their tokens back; give it to \
                 this account alone"
            );
        }
        let watcher = Watcher::new(layout.ancestors())
            .inspect_err(|error| tracing::debug!(%error, "no inotify; waiters poll"))
            .ok();
        Ok(Self {
            layout: Arc::new(layout),
            namespace,
            poll,
            watched: watcher.is_some(),
            watcher: Mutex::new(watcher.map(Arc::new)),
            pace: Arc::default(),
            is_prepared: AtomicBool::new(false),
        })
    }

    /// Creates the directory if it is missing, and checks that it can be written, unless that was done. What misses it later creates it anew.
    async fn prepare(&self) -> Result<()> {
        if self.is_prepared.load(Ordering::Relaxed) {
            return Ok(());
        }
        let layout = Arc::clone(&self.layout);
        blocking(move || layout.prepare())
            .await
            .map_err(|error| error.into_error("acquire"))?;
        self.is_prepared.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn holders(&self, name: &LockName, kind: LockKind) -> Result<Vec<TokenRecord>> {
        let files = self.layout.files(name, kind);
        let asked = name.clone();
        blocking(move || inspect::holders(&files, &asked, kind))
            .await
            .map_err(|error| error.into_error("inspect"))
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
        capabilities.revoke = true;
        capabilities.list = true;
        capabilities.fencing = FencingDurability::Durable;
        let mut info = BackendInfo::new(NAME, self.layout.url());
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
                format!(
                    "{permits} is more than the {MAX_PERMITS} that a file semaphore can have; ask for fewer"
                ),
            ));
        }
        self.prepare().await?;
        Ok(Box::new(FileClaim::new(ClaimSpec {
            request: request.clone(),
            files: self.layout.files(&request.name, request.mode.kind()),
            watcher: self.watcher.lock().clone(),
            poll: self.poll.unwrap_or(POLL_UNWATCHED),
            pace: Arc::clone(&self.pace),
        })))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let holders = self.holders(name, kind).await?;
        Ok(LockState::new(holders.into_iter().map(shown).collect(), None))
    }

    /// Probes each lock that has a file with the prefix, for a moment, as [`inspect`](Self::inspect) does. A file that cannot be read is an
    /// error after all that can be.
    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        Ok(Box::new(FileLister::new(Arc::clone(&self.layout), prefix)))
    }

    async fn revoke(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        let files = self.layout.files(name, kind);
        let asked = name.clone();
        let found = blocking(move || inspect::ask_back(&files, &asked, kind, token.get()))
            .await
            .map_err(|error| error.into_error("revoke"))?;
        Ok(found.then(|| Lease::new(Instant::now(), None)))
    }

    async fn revoke_by_force(&self, name: &LockName, kind: LockKind, token: FencingToken) -> Result<bool> {
        let holders = self.holders(name, kind).await?;
        let Some(holder) = holders
            .iter()
            .find(|holder| holder.tokens().contains(&token.get()))
        else {
            return Ok(false);
        };
        // This host may have another process of that number.
        let whose = if holder.is_of_another(self.layout.boot()) {
            " of the container that has another boot id than this process"
        } else {
            ""
        };
        Err(Error::unsupported(
            NAME,
            format!(
                "ending another process's hold of `{name}`; end process {}{whose}, or what it started",
                holder.grantee.pid
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
            .field("server", &self.layout.url())
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Returns a holder as it is shown.
pub(crate) fn shown(holder: TokenRecord) -> Holder {
    let Grantee {
        token, since, label, ..
    } = holder.grantee;
    let since = UNIX_EPOCH.checked_add(Duration::from_micros(since));
    Holder::new(FencingToken::new(token), label, None).since(since)
}

/// Runs `work` on a worker thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FileError> + Send + 'static,
) -> Result<T, FileError> {
    FileError::require_runtime()?;
    spawn_blocking(work).await.unwrap_or(Err(FileError::WorkerDied))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use lockkit_core::spi::{OwnerId, Renewal};

    use super::*;
    use crate::{layout, queue, token_record};

    async fn claim(backend: &FileBackend, owner: u128) -> Box<dyn Claim> {
        let request = ClaimRequest::new(
            LockName::new("n").unwrap(),
            Mode::Exclusive,
            Duration::from_secs(30),
            OwnerId::new(owner),
        );
        backend.claim(&request).await.unwrap()
    }

    /// A holder whose runtime has ended keeps its lock until it learns that it is lost.
    #[test]
    fn work_that_never_begins_frees_nothing() {
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
            backend.pace.offload_all();
            let mut holder = claim(&backend, 1).await;
            assert!(holder.attempt(Duration::ZERO).await.unwrap().is_some());
            first.shutdown_background();
            let within = ended.enter();
            holder.renew().await.unwrap_err();
            drop(within);
            let mut rival = claim(&backend, 2).await;
            let tried = rival.attempt(Duration::ZERO).await.unwrap();
            assert_eq!(tried, None, "the holder has not learnt of it");
            assert!(matches!(holder.renew().await.unwrap(), Renewal::Held(_)));
            holder.release().await.unwrap();
            assert!(rival.attempt(Duration::ZERO).await.unwrap().is_some());
        });
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_process_of_another_boot_is_told_apart() {
        use crate::boot::BootId;

        let dir = tempfile::TempDir::new().unwrap();
        let mut backend = FileBackend::open(FileConfig::new(dir.path())).await.unwrap();
        let mut holder = claim(&backend, 1).await;
        let token = *holder
            .attempt(Duration::ZERO)
            .await
            .unwrap()
            .unwrap()
            .tokens
            .start();
        let name = LockName::new("n").unwrap();
        for (boot, is_of_another) in [
            (BootId::current(), false),
            (BootId::from_bytes([1; BootId::BYTES]), true),
        ] {
            backend.layout = Arc::new(Layout::open_in(boot, dir.path(), "lockkit").unwrap());
            let forced = backend
                .revoke_by_force(&name, LockKind::Lock, FencingToken::new(token))
                .await;
            let said = forced.unwrap_err().to_string();
            assert!(
                said.contains(&format!("end process {}", std::process::id())),
                "{said}"
            );
            assert_eq!(said.contains("another boot id"), is_of_another, "{said}");
        }
    }

    /// Whoever may write the files may write any size.
    #[test]
    fn a_size_that_no_semaphore_has_keeps_nobody_for_long() {
        let name = LockName::new("n").unwrap();
        let request = |permits| {
            let mode = Mode::Permits(NonZeroU32::new(permits).unwrap());
            ClaimRequest::new(name.clone(), mode, Duration::from_secs(30), OwnerId::new(1))
        };
        let (two, most) = (request(2), request(u32::MAX));
        let dir = tempfile::TempDir::new().unwrap();
        let config = FileConfig::new(dir.path());
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let backend = FileBackend::open(config).await.unwrap();
                let mut claim = backend.claim(&two).await.unwrap();
                assert!(claim.attempt(Duration::ZERO).await.unwrap().is_some());
                claim.release().await.unwrap();
                let files = backend.layout.files(&two.name, LockKind::Semaphore);
                let (file, _) = layout::open_writable(&files.main()).unwrap().unwrap();
                token_record::set_size(&files, &file, &most).unwrap();
                let seen = backend.inspect(&two.name, LockKind::Semaphore).await.unwrap();
                assert!(seen.is_free());
                assert!(claim.attempt(Duration::ZERO).await.unwrap().is_some());
                claim.release().await.unwrap();
            });
            let _ = done.send(());
        });
        // It takes tens of milliseconds, and for the size as it is more than an hour.
        let waited = wait.recv_timeout(Duration::from_mins(1));
        assert!(
            waited.is_ok(),
            "it still looks for permits, or has failed: {waited:?}"
        );
    }

    #[tokio::test]
    async fn a_waiter_keeps_its_turn_on_a_slow_disk() {
        let dir = tempfile::TempDir::new().unwrap();
        let backend = FileBackend::open(FileConfig::new(dir.path())).await.unwrap();
        let mut claims = [claim(&backend, 1).await, claim(&backend, 2).await];
        let [holder, waiter] = &mut claims;
        assert!(holder.attempt(Duration::ZERO).await.unwrap().is_some());
        backend.pace.offload_all();
        assert!(waiter.attempt(Duration::from_secs(1)).await.unwrap().is_none());
        let tickets = || {
            let entries = std::fs::read_dir(dir.path().join("lockkit/n.queue")).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
        };
        let [ticket] = &tickets()[..] else {
            panic!("one waits")
        };
        // For longer than a ticket without heartbeats stays live.
        let looks = tokio::time::timeout(Duration::from_secs(5), async {
            loop {
                waiter.notified().await;
                assert!(waiter.attempt(Duration::from_secs(1)).await.unwrap().is_none());
            }
        });
        looks.await.unwrap_err();
        assert!(queue::is_live(ticket).unwrap());
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
