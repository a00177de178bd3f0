//! One claim's contest, as blocking code: attempts in each mode, the hold, and its release.

use std::{
    fs::{self, File},
    io,
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use super::{
    fault::{Fault, Inode, Result},
    flock::Flock,
    hold::{Beacon, Hold, ReaderNote, Taken, touch},
    journal::{self, Entry},
    space::{self, Files},
    watch::{Events, Watcher},
};
use crate::spi::{ClaimRequest, Grant, Lease, Mode};

/// How often a file that is replaced between locking and looking is tried again.
const MAX_REPLACED: usize = 16;
/// The pause after which a writer at the gate shows again that it is alive.
const BEAT: Duration = Duration::from_millis(500);
/// The time for which the gate stays closed after its writer last showed that. A stopped one must not keep everyone out.
const GATE_LASTS: Duration = Duration::from_secs(2);

/// What is claimed, and where.
#[derive(Debug)]
pub(super) struct Spec {
    pub request: ClaimRequest,
    pub files: Files,
    pub watcher: Option<Arc<Watcher>>,
    /// How often to try again without a watcher.
    pub poll: Duration,
}

/// The state of one claim. Dropping it leaves nothing locked.
#[derive(Debug)]
pub(super) struct Contender {
    spec: Arc<Spec>,
    pub hold: Option<Hold>,
    /// A release found the hold gone, and its caller has not been told yet.
    pub lost: bool,
    pub events: Option<Events>,
    /// The directory of the permits, when the events were begun.
    slots: Option<Inode>,
    /// The instant at which to try again although nothing is told.
    pub look_at: Option<Instant>,
    gate: Option<Gate>,
    main: Option<Opened>,
}

/// Keeps new readers out while a writer waits for those inside.
#[derive(Debug)]
struct Gate {
    lock: Flock,
    inode: Inode,
    /// Wakes the readers when the writer gives up or is killed.
    beacon: Beacon,
}

/// The main file, open from one attempt to the next.
#[derive(Clone, Debug)]
struct Opened {
    file: Arc<File>,
    path: PathBuf,
    inode: Inode,
}

impl Contender {
    pub(super) fn new(spec: Arc<Spec>) -> Self {
        Self {
            spec,
            hold: None,
            lost: false,
            events: None,
            slots: None,
            look_at: None,
            gate: None,
            main: None,
        }
    }

    /// Tries to be granted, once. One that `waits` keeps its place at the gate and is told of releases from now on.
    pub(super) fn attempt(&mut self, waits: bool, since: Instant) -> Result<()> {
        self.look_at = None;
        if !waits {
            self.gate = None;
        }
        let mut hold = self.contend(waits, since, None)?;
        if hold.is_none() && waits && self.begin_to_watch() {
            // It may have been released before the watch was there.
            hold = self.contend(waits, since, None)?;
        }
        if hold.is_none() && !waits {
            // An inspection may have been probing. It does so with the ledger to itself, so now it does not.
            let ledger = self.spec.files.share_ledger()?;
            hold = self.contend(waits, since, Some(ledger))?;
        }
        if let Some(hold) = &hold {
            self.gate = None;
            // What happened to its files before the watch was there, nobody tells.
            if self.begin_to_watch() && !hold.stands()? {
                return Err(self.replaced());
            }
        }
        self.hold = hold;
        Ok(())
    }

    /// Whether the hold is still there for others to see.
    pub(super) fn stands(&self) -> Result<bool> {
        self.hold.as_ref().map_or(Ok(false), Hold::stands)
    }

    /// Gives everything up.
    pub(super) fn release(&mut self) {
        self.gate = None;
        if let Some(hold) = self.hold.take() {
            // If it cannot tell, the release succeeds all the same.
            self.lost = matches!(hold.stands(), Ok(false));
        }
        self.events = None;
    }

    /// Begins to hear of changes to the main file, and of releases. Says whether it did not before.
    fn begin_to_watch(&mut self) -> bool {
        let slots = match self.spec.request.mode {
            Mode::Permits(_) => space::inode_at(&self.spec.files.permits()).ok().flatten(),
            Mode::Exclusive | Mode::Shared => None,
        };
        // A directory that was moved tells of what happens to it where it is now.
        if self.slots == slots && self.events.as_ref().is_some_and(|events| !events.ended()) {
            return false;
        }
        self.slots = slots;
        // Without a watch, because there is no watcher or the system has no more to give, it polls.
        let paths = self.spec.files.watched();
        let watcher = self.spec.watcher.as_deref();
        self.events = watcher.and_then(|watcher| watcher.watch(&paths).ok());
        self.events.is_some()
    }

    /// With the ledger, nobody probes meanwhile. It is let go before the disk is waited for.
    fn contend(&mut self, waits: bool, since: Instant, ledger: Option<Flock>) -> Result<Option<Hold>> {
        match self.spec.request.mode {
            Mode::Exclusive => self.exclusive(waits, since, ledger),
            Mode::Shared => self.shared(since, ledger),
            Mode::Permits(permits) => self.permit(permits, since, ledger),
        }
    }

    fn exclusive(&mut self, waits: bool, since: Instant, ledger: Option<Flock>) -> Result<Option<Hold>> {
        for _ in 0..MAX_REPLACED {
            let main = self.main()?;
            let Some(probe) = Flock::exclusive(&main.file, &main.path)? else {
                if waits {
                    self.close_gate(&main)?;
                }
                return Ok(None);
            };
            let beacon = match self.gate.take() {
                Some(gate) => Some(gate.beacon),
                None => main.beacon()?,
            };
            let Some(beacon) = beacon else { continue };
            // Another may get in between the two, and then it is taken.
            drop(probe);
            let Some(taken) = beacon.lock(Flock::exclusive, &main.path)? else {
                return Ok(None);
            };
            if space::is_at(&main.path, main.inode)? {
                drop(ledger);
                return self
                    .enter(&main, taken, vec![(main.path.clone(), main.inode)], since)
                    .map(Some);
            }
        }
        Err(self.replaced())
    }

    fn shared(&mut self, since: Instant, ledger: Option<Flock>) -> Result<Option<Hold>> {
        for _ in 0..MAX_REPLACED {
            let main = self.main()?;
            if self.gate_is_closed()? {
                return Ok(None);
            }
            let Some(probe) = Flock::shared(&main.file, &main.path)? else {
                return Ok(None);
            };
            let Some(beacon) = main.beacon()? else { continue };
            let taken = beacon.lock(Flock::shared, &main.path)?;
            drop(probe);
            if let Some(taken) = taken
                && space::is_at(&main.path, main.inode)?
            {
                drop(ledger);
                return self
                    .enter(&main, taken, vec![(main.path.clone(), main.inode)], since)
                    .map(Some);
            }
        }
        Err(self.replaced())
    }

    fn permit(&mut self, permits: NonZeroU32, since: Instant, ledger: Option<Flock>) -> Result<Option<Hold>> {
        for _ in 0..MAX_REPLACED {
            let main = self.main()?;
            if size(&self.spec.files, &main)? != Some(permits.get()) {
                self.set_size(permits, &main)?;
                continue;
            }
            let Some((taken, slot)) = self.free_permit(permits)? else {
                return Ok(None);
            };
            // Who changes the size has looked at this permit before it was taken, or will find it taken.
            let unchanged = self.spec.files.share_size()?;
            let agreed = size(&self.spec.files, &main)? == Some(permits.get())
                && space::is_at(&main.path, main.inode)?;
            drop(unchanged);
            if agreed {
                drop(ledger);
                let lives_in = vec![(main.path.clone(), main.inode), slot];
                return self.enter(&main, taken, lives_in, since).map(Some);
            }
        }
        Err(self.replaced())
    }

    /// Makes `permits` the size, unless another one is in use.
    fn set_size(&self, permits: NonZeroU32, main: &Opened) -> Result<()> {
        let Spec { request, files, .. } = &*self.spec;
        let _size = files.lock_size()?;
        let Some(beacon) = main.beacon()? else {
            return Ok(());
        };
        let in_use = size(files, main)?;
        if in_use == Some(permits.get()) {
            return Ok(());
        }
        // A probe would look like a holder.
        let _ledger = files.share_ledger()?;
        for index in 0..in_use.unwrap_or(0) {
            let path = files.permit(index);
            let Some(slot) = space::open(&path)?.map(Arc::new) else {
                continue;
            };
            if Flock::exclusive(&slot, &path)?.is_none() {
                let reason = format!(
                    "semaphore `{}` has {} permits, not {permits}, for as long as any of them is held; ask for the \
                     same number everywhere",
                    request.name,
                    in_use.unwrap_or(0)
                );
                return Err(Fault::Permits { reason });
            }
        }
        journal::set_size(files, &beacon.0, request)
    }

    /// Locks a permit that is free. Beginning at one of its own saves looking at those that others began at.
    fn free_permit(&self, permits: NonZeroU32) -> Result<Option<(Taken, (PathBuf, Inode))>> {
        let count = u128::from(permits.get());
        let first = self.spec.request.owner.get() % count;
        for step in 0..count {
            let Ok(index) = u32::try_from((first + step) % count) else {
                continue;
            };
            let path = self.spec.files.permit(index);
            let slot = Opened::new(self.spec.files.open_or_create(&path)?, path)?;
            let Some(probe) = Flock::exclusive(&slot.file, &slot.path)? else {
                continue;
            };
            let Some(beacon) = slot.beacon()? else { continue };
            drop(probe);
            let taken = beacon.lock(Flock::exclusive, &slot.path)?;
            if let Some(taken) = taken
                && space::is_at(&slot.path, slot.inode)?
            {
                return Ok(Some((taken, (slot.path, slot.inode))));
            }
        }
        Ok(None)
    }

    /// Mints the tokens and leaves word of who holds.
    fn enter(
        &self,
        main: &Opened,
        taken: Taken,
        lives_in: Vec<(PathBuf, Inode)>,
        since: Instant,
    ) -> Result<Hold> {
        let Spec { request, files, .. } = &*self.spec;
        let entry;
        let mut reader = None;
        match request.mode {
            Mode::Exclusive => {
                entry = journal::mint(files, taken.lock.file(), request)?;
            }
            Mode::Shared => {
                entry = journal::mint(files, taken.lock.file(), request)?;
                reader = Some(self.note_reader(&entry)?);
            }
            Mode::Permits(_) => {
                let counter = main.writable()?.ok_or_else(|| self.replaced())?;
                entry = journal::mint(files, &counter, request)?;
                if let Some((slot, _)) = lives_in.last() {
                    journal::note(taken.lock.file(), slot, &entry)?;
                }
            }
        }
        let grant = Grant {
            tokens: entry.tokens(),
            lease: Lease { since, length: None },
        };
        Ok(Hold::new(reader, taken, lives_in, grant))
    }

    /// Makes the note under a name that nobody lists, and renames it once it is locked and written.
    fn note_reader(&self, entry: &Entry) -> Result<ReaderNote> {
        let Spec { request, files, .. } = &*self.spec;
        let dir = files.ensure_readers()?;
        let path = dir.join(request.owner.to_string());
        let unlisted = dir.join(format!(".{}", request.owner));
        for _ in 0..MAX_REPLACED {
            let Some(file) = space::create_writable(&unlisted)?.map(Arc::new) else {
                continue;
            };
            // An inspection that takes it for a dead reader's may have it, and removes it.
            let Some(lock) = Flock::exclusive(&file, &unlisted)? else {
                continue;
            };
            journal::note(&file, &unlisted, entry)?;
            match fs::rename(&unlisted, &path) {
                Ok(()) => return Ok(ReaderNote { path, _lock: lock }),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Fault::io("rename", &unlisted)(error)),
            }
        }
        Err(Fault::Replaced { path })
    }

    /// Keeps new readers out, if it is readers that this writer waits for. While a writer is inside there is no need
    /// for it, and readers get an even chance when that one leaves.
    fn close_gate(&mut self, main: &Opened) -> Result<()> {
        let last = journal::read(&self.spec.files, &main.file)?;
        if !last.is_some_and(|last| last.is_shared()) {
            self.gate = None;
            return Ok(());
        }
        let path = self.spec.files.gate();
        match &self.gate {
            Some(gate) if space::is_at(&path, gate.inode)? => {}
            _ => self.gate = self.take_gate(&path, main)?,
        }
        if let Some(gate) = &self.gate {
            touch(gate.lock.file());
            self.look_in(BEAT);
        }
        Ok(())
    }

    /// Locks the gate, unless another writer has it. That of a writer that shows no life any more is replaced.
    fn take_gate(&mut self, path: &Path, main: &Opened) -> Result<Option<Gate>> {
        for _ in 0..MAX_REPLACED {
            let file = Arc::new(self.spec.files.open_or_create(path)?);
            let inode = space::inode(&file, path)?;
            let Some(lock) = Flock::exclusive(&file, path)? else {
                if let Some(left) = gate_lasts(&file, path)? {
                    self.look_in(left);
                    return Ok(None);
                }
                // Another may have done so before, and then its writer takes the gate again.
                let _ = fs::remove_file(path);
                continue;
            };
            if space::is_at(path, inode)? {
                return Ok(main.beacon()?.map(|beacon| Gate { lock, inode, beacon }));
            }
        }
        Ok(None)
    }

    fn gate_is_closed(&mut self) -> Result<bool> {
        let path = self.spec.files.gate();
        let Some(gate) = space::open(&path)?.map(Arc::new) else {
            return Ok(false);
        };
        let Some(left) = gate_lasts(&gate, &path)? else {
            return Ok(false);
        };
        if Flock::shared(&gate, &path)?.is_some() {
            return Ok(false);
        }
        self.look_in(left);
        Ok(true)
    }

    fn look_in(&mut self, after: Duration) {
        self.look_at = Some(Instant::now() + after);
    }

    /// The main file as it is now. One that was replaced is left, together with what was in hand on it.
    fn main(&mut self) -> Result<Opened> {
        if let Some(main) = &self.main
            && space::is_at(&main.path, main.inode)?
        {
            return Ok(main.clone());
        }
        self.main = None;
        self.gate = None;
        self.events = None;
        let path = self.spec.files.main();
        let file = self.spec.files.open_or_create(&path)?;
        if let Some(last) = journal::read(&self.spec.files, &file)? {
            last.check_name(self.spec.request.name.as_str(), &path)?;
        }
        Ok(self.main.insert(Opened::new(file, path)?).clone())
    }

    fn replaced(&self) -> Fault {
        Fault::Replaced {
            path: self.spec.files.main(),
        }
    }
}

impl Opened {
    fn new(file: File, path: PathBuf) -> Result<Self> {
        let inode = space::inode(&file, &path)?;
        let file = Arc::new(file);
        Ok(Self { file, path, inode })
    }

    /// The same file, open for writing; `None` if it was replaced.
    fn writable(&self) -> Result<Option<File>> {
        let Some(file) = space::open_writable(&self.path)? else {
            return Ok(None);
        };
        Ok((space::inode(&file, &self.path)? == self.inode).then_some(file))
    }

    fn beacon(&self) -> Result<Option<Beacon>> {
        Ok(self.writable()?.map(|file| Beacon(Arc::new(file))))
    }
}

/// The number of permits that was last asked for.
fn size(files: &Files, main: &Opened) -> Result<Option<u32>> {
    Ok(journal::read(files, &main.file)?.map(|last| last.permits))
}

/// For how long the gate stays closed if its writer shows no life; `None` if it is open by now. A clock that was set
/// opens it, until its writer shows life again.
fn gate_lasts(gate: &File, path: &Path) -> Result<Option<Duration>> {
    let shown = gate.metadata().and_then(|metadata| metadata.modified());
    let shown = shown.map_err(Fault::io("look at", path))?;
    let age = SystemTime::now().duration_since(shown).ok();
    Ok(age.and_then(|age| GATE_LASTS.checked_sub(age)))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::{super::space::Space, *};
    use crate::{Kind, LockName, spi::OwnerId};

    #[test]
    fn a_file_replaced_after_it_was_opened_is_not_locked() {
        let dir = TempDir::new().unwrap();
        let name = LockName::new("n").unwrap();
        let files = Arc::new(Space::open(dir.path(), "").unwrap()).files(&name, Kind::Lock);
        let mut contender = Contender::new(Arc::new(Spec {
            request: ClaimRequest::new(name, Mode::Exclusive, Duration::from_secs(30), OwnerId::new(1)),
            files: files.clone(),
            watcher: None,
            poll: Duration::from_secs(1),
        }));
        let main = contender.main().unwrap();
        assert!(main.writable().unwrap().is_some());
        fs::remove_file(files.main()).unwrap();
        assert!(main.writable().unwrap().is_none(), "deleted");
        fs::write(files.main(), "").unwrap();
        assert!(main.writable().unwrap().is_none(), "replaced");
        assert_ne!(contender.main().unwrap().inode, main.inode);
    }
}
