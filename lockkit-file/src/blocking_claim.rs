//! A claim as blocking code: its attempts in each mode, its hold, and the release.

use std::{
    fs::File,
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use lockkit_core::spi::{ClaimRequest, Grant, Lease, Mode};
use tokio::time::Instant;

use crate::{
    backend::MAX_PERMITS,
    disk_pace::DiskPace,
    error::{FileError, Result},
    flock::Flock,
    hold::{Hold, ReaderNote, WakingLock},
    inspect,
    layout::{self, Files, Inode, Removal},
    queue::{self, HEARTBEAT, Predecessor, Ticket},
    token_record::{self, TokenRecord},
    watch::{Events, Watcher},
};

/// Limits the attempts to lock a file that is replaced each time.
const MAX_REPLACED: usize = 16;

/// The request of a claim, with its files and what the claims of a backend share.
#[derive(Debug)]
pub(crate) struct ClaimSpec {
    pub request: ClaimRequest,
    pub files: Files,
    pub watcher: Option<Arc<Watcher>>,
    /// The interval of a waiter's retries without a watcher.
    pub poll: Duration,
    pub pace: Arc<DiskPace>,
}

/// The state of one claim. Dropping it leaves nothing locked.
#[derive(Debug)]
pub(crate) struct BlockingClaim {
    spec: Arc<ClaimSpec>,
    /// It runs on the caller's thread. Work that has to wait fails with [`FileError::NeedsWorker`].
    pub inline: bool,
    pub hold: Option<Hold>,
    /// A release found the hold gone, and its caller does not know yet.
    pub lost: bool,
    /// The mark by which its holder was asked to give up the hold.
    mark: Option<Removal>,
    pub events: Option<Events>,
    /// The directory of the permits that the events are about.
    permits_dir: Option<Inode>,
    /// After the last attempt it was first in the queue, or its predecessor had not changed: the cause of a wake-up
    /// may be about to leave.
    pub retry_soon: bool,
    /// The time of the next [`heartbeat`](Self::heartbeat).
    pub next_heartbeat: Option<Instant>,
    /// Its ticket in the queue, while it waits.
    ticket: Option<Ticket>,
    /// The ticket before its own, unless it is first.
    predecessor: Option<PathBuf>,
    /// The ticket that the events are about, if it is not the main file.
    watched_ticket: Option<PathBuf>,
    main: Option<OpenFile>,
}

/// A file to be locked. The main file stays open from one attempt to the next.
#[derive(Clone, Debug)]
struct OpenFile {
    file: Arc<File>,
    /// Closing a writable file wakes others. Only a waiter opens the file so before it is locked.
    writable: bool,
    path: PathBuf,
    inode: Inode,
}

/// The outcome of locking a file.
enum LockOutcome {
    Locked(WakingLock),
    Taken,
    /// The path leads to another file, or to none.
    Replaced,
}

impl BlockingClaim {
    pub(crate) fn new(spec: Arc<ClaimSpec>) -> Self {
        Self {
            spec,
            inline: false,
            hold: None,
            lost: false,
            mark: None,
            events: None,
            permits_dir: None,
            retry_soon: false,
            next_heartbeat: None,
            ticket: None,
            predecessor: None,
            watched_ticket: None,
            main: None,
        }
    }

    /// Attempts once to be granted. If it `waits`, it joins the queue, and events say when to retry.
    pub(crate) fn attempt(&mut self, waits: bool, since: Instant) -> Result<()> {
        let before = self.predecessor.clone();
        let hold = if waits {
            self.attempt_in_turn(since)?
        } else {
            self.leave_queue();
            self.attempt_once(since)?
        };
        self.retry_soon = self.ticket.is_some() && (self.predecessor.is_none() || self.predecessor == before);
        if hold.is_some() {
            self.ticket = None;
            self.predecessor = None;
            // The last close of a writable descriptor shows the end of the hold, so no other stays open. A
            // semaphore's read-only main file does, so that a file that replaces it cannot have its inode.
            self.main = self.main.take().filter(|main| !main.writable);
        } else {
            self.check_name()?;
            // Not after an error: a waiter that cannot be granted must not keep others out.
            self.heartbeat();
        }
        self.hold = hold;
        Ok(())
    }

    fn attempt_in_turn(&mut self, since: Instant) -> Result<Option<Hold>> {
        if self.ticket.is_some() {
            self.find_predecessor()?;
        } else {
            if self.spec.files.queue().is_empty()? {
                if let Some(hold) = self.contend(true, since, None)? {
                    return Ok(Some(hold));
                }
            } else if let Mode::Permits(permits) = self.spec.request.mode {
                // A wrong size fails at once, and not only in its turn.
                let main = self.main(false)?;
                if size(&self.spec.files, &main)? != Some(permits.get()) {
                    self.set_size(permits, &main)?;
                }
            }
            self.join_queue()?;
        }
        if !self.is_first()? {
            return Ok(None);
        }
        self.begin_to_watch();
        let mut hold = self.contend(true, since, None)?;
        if hold.is_none() && self.begin_to_watch() {
            // The file was replaced. The new one may have been released before it was watched.
            hold = self.contend(true, since, None)?;
        }
        Ok(hold)
    }

    /// Attempts without a ticket. It takes a free lock before the waiters, but a reader does not: readers that follow
    /// each other would keep a writer out.
    fn attempt_once(&mut self, since: Instant) -> Result<Option<Hold>> {
        if self.spec.request.mode == Mode::Shared && self.spec.files.queue().has_waiters()? {
            return Ok(None);
        }
        let mut hold = self.contend(false, since, None)?;
        if hold.is_none() {
            self.require_worker()?;
            // An inspection may have probed the file. It cannot while the ledger is shared.
            let ledger = self.spec.files.share_ledger()?;
            hold = self.contend(false, since, Some(ledger))?;
        }
        Ok(hold)
    }

    fn join_queue(&mut self) -> Result<()> {
        // Creating a file may wait for the disk while the file system commits its journal.
        self.require_worker()?;
        let (ticket, before) = Ticket::draw(&self.spec.files.queue(), self.spec.request.owner)?;
        self.ticket = Some(ticket);
        self.predecessor = match before {
            Predecessor::Waiter(ticket) => Some(ticket),
            Predecessor::Nobody | Predecessor::Unlisted => None,
        };
        Ok(())
    }

    fn leave_queue(&mut self) {
        self.ticket = None;
        self.predecessor = None;
        self.next_heartbeat = None;
        if self.watched_ticket.take().is_some() {
            self.events = None;
        }
    }

    /// Updates the predecessor. If its ticket was removed, it draws a new one, behind all.
    fn find_predecessor(&mut self) -> Result<()> {
        let before = match &self.ticket {
            Some(ticket) => ticket.predecessor()?,
            None => Predecessor::Unlisted,
        };
        match before {
            Predecessor::Nobody => self.predecessor = None,
            Predecessor::Waiter(ticket) => self.predecessor = Some(ticket),
            Predecessor::Unlisted => {
                self.leave_queue();
                self.join_queue()?;
            }
        }
        Ok(())
    }

    /// Returns whether it is first. If not, it watches its predecessor.
    fn is_first(&mut self) -> Result<bool> {
        for _ in 0..MAX_REPLACED {
            let Some(before) = &self.predecessor else {
                if self.watched_ticket.take().is_some() {
                    self.events = None;
                }
                return Ok(true);
            };
            if self.watched_ticket.as_ref() == Some(before) {
                return Ok(false);
            }
            self.watched_ticket = Some(before.clone());
            let watcher = self.spec.watcher.as_deref();
            self.events = watcher.and_then(|watcher| watcher.watch(&[before]).ok());
            if queue::is_live(before)? {
                return Ok(false);
            }
            // The predecessor left before it was watched.
            self.find_predecessor()?;
        }
        Ok(false)
    }

    /// Writes a heartbeat, and checks the predecessor's. Returns whether an attempt is worth while. If not, it sets
    /// the time of the next heartbeat.
    pub(crate) fn heartbeat(&mut self) -> bool {
        let Some(ticket) = &mut self.ticket else {
            self.next_heartbeat = None;
            return false;
        };
        ticket.heartbeat();
        let is_listed = ticket.is_listed();
        self.heartbeat_in(Duration::ZERO);
        if !is_listed {
            return true;
        }
        let time_left = match &self.predecessor {
            Some(ticket) => queue::time_left(ticket).ok().flatten(),
            None => Some(HEARTBEAT),
        };
        let Some(time_left) = time_left else {
            return true;
        };
        self.heartbeat_in(HEARTBEAT.min(time_left + Duration::from_millis(1)));
        false
    }

    /// Begins to watch a hold's files. Returns whether the hold was already gone, or is asked for.
    pub(crate) fn watch_hold(&mut self) -> bool {
        let begins = self.begin_to_watch() || self.events.is_none();
        begins && (matches!(self.is_intact(), Ok(false)) || matches!(self.is_revoked(), Ok(true)))
    }

    /// Fails on the caller's thread, before work that has to wait.
    fn require_worker(&self) -> Result<()> {
        if self.inline {
            return Err(FileError::NeedsWorker);
        }
        Ok(())
    }

    /// Returns whether others still see the hold.
    pub(crate) fn is_intact(&self) -> Result<bool> {
        self.hold.as_ref().map_or(Ok(false), Hold::is_intact)
    }

    /// Returns whether the holder is asked to give up the hold.
    pub(crate) fn is_revoked(&mut self) -> Result<bool> {
        let Some(hold) = &self.hold else { return Ok(false) };
        let mark = self.spec.files.revocation(*hold.grant.tokens.start());
        if layout::inode_at(&mark)?.is_none() {
            return Ok(false);
        }
        if self.mark.as_ref().is_none_or(|known| known.path() != mark) {
            self.mark = Some(Removal::of(mark));
        }
        Ok(true)
    }

    /// Releases the hold or leaves the queue.
    pub(crate) fn release(&mut self) {
        self.leave_queue();
        self.main = None;
        if let Some(hold) = self.hold.take() {
            // If this cannot be told, the release succeeds all the same.
            self.lost = matches!(hold.is_intact(), Ok(false));
        }
        if let Some(mark) = self.mark.take() {
            // If it stays, it names a hold that is over.
            let _ = mark.remove();
        }
        self.events = None;
    }

    /// Watches the main file, and for releases. Returns whether this is a new watch.
    fn begin_to_watch(&mut self) -> bool {
        let permits_dir = match self.spec.request.mode {
            Mode::Permits(_) => layout::inode_at(&self.spec.files.permits()).ok().flatten(),
            Mode::Exclusive | Mode::Shared => None,
        };
        // The watch of a moved directory follows it to its new path.
        if self.permits_dir == permits_dir && self.events.as_ref().is_some_and(|events| !events.ended()) {
            return false;
        }
        self.permits_dir = permits_dir;
        // It polls if there is no watcher, or the system refuses another watch.
        let paths = self.spec.files.watched();
        let watcher = self.spec.watcher.as_deref();
        self.events = watcher.and_then(|watcher| watcher.watch(&paths).ok());
        self.events.is_some()
    }

    /// Tries to take what the mode asks for. A shared ledger keeps probes out until that is locked.
    fn contend(&mut self, waits: bool, since: Instant, ledger: Option<Flock>) -> Result<Option<Hold>> {
        match self.spec.request.mode {
            Mode::Exclusive | Mode::Shared => self.contend_for_lock(waits, since, ledger),
            Mode::Permits(permits) => self.contend_for_permit(permits, since, ledger),
        }
    }

    fn contend_for_lock(
        &mut self,
        waits: bool,
        since: Instant,
        ledger: Option<Flock>,
    ) -> Result<Option<Hold>> {
        let how = match self.spec.request.mode {
            Mode::Shared => Flock::shared,
            Mode::Exclusive | Mode::Permits(_) => Flock::exclusive,
        };
        for _ in 0..MAX_REPLACED {
            let main = self.main(waits)?;
            match main.lock(how, &self.spec.files)? {
                LockOutcome::Locked(lock) => {
                    drop(ledger);
                    let backing = vec![(main.path.clone(), main.inode)];
                    return self.grant(&main, lock, backing, since).map(Some);
                }
                LockOutcome::Taken => return Ok(None),
                LockOutcome::Replaced => {}
            }
        }
        Err(self.replaced())
    }

    fn contend_for_permit(
        &mut self,
        permits: NonZeroU32,
        since: Instant,
        ledger: Option<Flock>,
    ) -> Result<Option<Hold>> {
        for _ in 0..MAX_REPLACED {
            let main = self.main(false)?;
            if size(&self.spec.files, &main)? != Some(permits.get()) {
                self.set_size(permits, &main)?;
                continue;
            }
            let Some((lock, permit)) = self.free_permit(permits)? else {
                return Ok(None);
            };
            // A process that changes the size has probed this permit before it was taken, or will find it taken.
            let unchanged = self.spec.files.share_size()?;
            let agreed = size(&self.spec.files, &main)? == Some(permits.get())
                && layout::is_at(&main.path, main.inode)?;
            drop(unchanged);
            if agreed {
                drop(ledger);
                let backing = vec![(main.path.clone(), main.inode), permit];
                return self.grant(&main, lock, backing, since).map(Some);
            }
        }
        Err(self.replaced())
    }

    /// Sets the size to `permits`, unless another size is in use.
    fn set_size(&self, permits: NonZeroU32, main: &OpenFile) -> Result<()> {
        let ClaimSpec { request, files, .. } = &*self.spec;
        let _size = files.lock_size()?;
        let Some(file) = main.reopen_writable()? else {
            return Ok(());
        };
        let in_use = size(files, main)?;
        if in_use == Some(permits.get()) {
            return Ok(());
        }
        // An inspection's probe would look like a holder.
        let _ledger = files.share_ledger()?;
        if in_use.is_none() {
            inspect::check_unread_size(files, &main.file)?;
        }
        // No semaphore has more. A record that says so would keep this going for hours.
        for index in 0..in_use.unwrap_or(0).min(MAX_PERMITS) {
            let path = files.permit(index);
            let Some(permit) = layout::open(&path)?.map(Arc::new) else {
                continue;
            };
            if Flock::exclusive(&permit, &path)?.is_none() {
                let reason = format!(
                    "semaphore `{}` has {} permits, not {permits}, for as long as any of them is held; ask for the \
                     same number everywhere",
                    request.name,
                    in_use.unwrap_or(0)
                );
                return Err(FileError::PermitsInUse { reason });
            }
        }
        token_record::set_size(files, &file, request)
    }

    /// Locks a free permit. Owners start their search at different permits, to collide less.
    fn free_permit(&self, permits: NonZeroU32) -> Result<Option<(WakingLock, (PathBuf, Inode))>> {
        let count = u128::from(permits.get());
        let first = self.spec.request.owner.get() % count;
        for step in 0..count {
            let Ok(index) = u32::try_from((first + step) % count) else {
                continue;
            };
            let path = self.spec.files.permit(index);
            let permit = OpenFile::new(self.spec.files.open_or_create(&path)?, false, path);
            if let LockOutcome::Locked(lock) = permit.lock(Flock::exclusive, &self.spec.files)? {
                return Ok(Some((lock, (permit.path, permit.inode))));
            }
        }
        Ok(None)
    }

    /// Mints the tokens and records the holder.
    fn grant(
        &self,
        main: &OpenFile,
        lock: WakingLock,
        backing: Vec<(PathBuf, Inode)>,
        since: Instant,
    ) -> Result<Hold> {
        let ClaimSpec { request, files, .. } = &*self.spec;
        let mint = |counter: &File| token_record::mint(files, counter, request, || self.require_worker());
        let locked = lock.flock.file();
        let mut reader = None;
        let record = match request.mode {
            Mode::Exclusive => mint(locked)?,
            Mode::Shared => {
                let record = mint(locked)?;
                reader = Some(self.note_reader(&record)?);
                record
            }
            Mode::Permits(_) => {
                if let Some((permit, _)) = backing.last() {
                    // It would be shown in the place of this one, for as long as the disk is waited for.
                    token_record::clear_note(locked, permit)?;
                }
                let record = mint(&main.reopen_writable()?.ok_or_else(|| self.replaced())?)?;
                if let Some((permit, _)) = backing.last() {
                    token_record::write_note(locked, permit, &record)?;
                }
                record
            }
        };
        let grant = Grant::new(record.tokens(), Lease::new(since, None));
        Ok(Hold {
            grant,
            _reader: reader,
            lock,
            backing,
        })
    }

    /// Creates the note under a name that inspections skip, and renames it once it is locked and written.
    fn note_reader(&self, record: &TokenRecord) -> Result<ReaderNote> {
        let ClaimSpec { request, files, .. } = &*self.spec;
        let dir = files.ensure_readers()?;
        let owner = request.owner.to_string();
        let path = dir.join(&owner);
        let unlisted = dir.join(format!(".{owner}"));
        for _ in 0..MAX_REPLACED {
            let Some((file, _)) = layout::create_writable(&unlisted)? else {
                continue;
            };
            let file = Arc::new(file);
            // An inspection may take it for a dead reader's, lock it and remove it.
            let Some(lock) = Flock::exclusive(&file, &unlisted)? else {
                continue;
            };
            token_record::write_note(&file, &unlisted, record)?;
            if layout::rename(&unlisted, &owner)? {
                return Ok(ReaderNote { path, _lock: lock });
            }
        }
        Err(FileError::Replaced { path })
    }

    fn heartbeat_in(&mut self, after: Duration) {
        self.next_heartbeat = Some(Instant::now() + after);
    }

    /// Returns the current main file. Drops a replaced one, and its events.
    fn main(&mut self, writable: bool) -> Result<OpenFile> {
        if let Some(main) = &self.main
            && layout::is_at(&main.path, main.inode)?
        {
            return Ok(main.clone());
        }
        if self.main.take().is_some() {
            self.events = None;
        }
        let files = &self.spec.files;
        let path = files.main();
        let opened = if writable {
            files.open_or_create_writable(&path)?
        } else {
            files.open_or_create(&path)?
        };
        Ok(self.main.insert(OpenFile::new(opened, writable, path)).clone())
    }

    /// Checks that the file belongs to the claimed name.
    fn check_name(&self) -> Result<()> {
        let Some(main) = &self.main else { return Ok(()) };
        let last = token_record::read(&self.spec.files, &main.file)?;
        last.map_or(Ok(()), |last| {
            last.check_name(self.spec.request.name.as_str(), &main.path)
        })
    }

    fn replaced(&self) -> FileError {
        FileError::Replaced {
            path: self.spec.files.main(),
        }
    }
}

impl OpenFile {
    fn new((file, inode): (File, Inode), writable: bool, path: PathBuf) -> Self {
        let file = Arc::new(file);
        Self {
            file,
            writable,
            path,
            inode,
        }
    }

    /// Locks it through a writable descriptor.
    fn lock(
        &self,
        how: impl Fn(&Arc<File>, &Path) -> Result<Option<Flock>>,
        files: &Files,
    ) -> Result<LockOutcome> {
        let mut file = Arc::clone(&self.file);
        if !self.writable {
            let Some(probe) = how(&file, &self.path)? else {
                return Ok(LockOutcome::Taken);
            };
            let Some(writable) = self.reopen_writable()? else {
                return Ok(LockOutcome::Replaced);
            };
            file = Arc::new(writable);
            // Another process may lock it in between; then it is taken.
            drop(probe);
        }
        let Some(flock) = how(&file, &self.path)? else {
            return Ok(LockOutcome::Taken);
        };
        if !layout::is_at(&self.path, self.inode)? {
            return Ok(LockOutcome::Replaced);
        }
        let queue = files.queue();
        Ok(LockOutcome::Locked(WakingLock { flock, queue }))
    }

    /// Opens the same file for writing; `None` if it was replaced.
    fn reopen_writable(&self) -> Result<Option<File>> {
        let opened = layout::open_writable(&self.path)?;
        Ok(opened.and_then(|(file, inode)| (inode == self.inode).then_some(file)))
    }
}

/// Returns the size that the semaphore has now.
fn size(files: &Files, main: &OpenFile) -> Result<Option<u32>> {
    Ok(token_record::read(files, &main.file)?.map(|last| last.permits))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lockkit_core::{LockKind, LockName, spi::OwnerId};
    use tempfile::TempDir;

    use super::*;
    use crate::layout::Layout;

    #[test]
    fn a_file_replaced_after_its_opening_is_not_locked() {
        let dir = TempDir::new().unwrap();
        let name = LockName::new("n").unwrap();
        let files = Arc::new(Layout::open(dir.path(), "").unwrap()).files(&name, LockKind::Lock);
        let mut state = BlockingClaim::new(Arc::new(ClaimSpec {
            request: ClaimRequest::new(name, Mode::Exclusive, Duration::from_secs(30), OwnerId::new(1)),
            files: files.clone(),
            watcher: None,
            poll: Duration::from_secs(1),
            pace: Arc::default(),
        }));
        let main = state.main(false).unwrap();
        assert!(main.reopen_writable().unwrap().is_some());
        fs::remove_file(files.main()).unwrap();
        assert!(main.reopen_writable().unwrap().is_none(), "deleted");
        fs::write(files.main(), "").unwrap();
        assert!(main.reopen_writable().unwrap().is_none(), "replaced");
        assert_ne!(state.main(false).unwrap().inode, main.inode);
    }
}
