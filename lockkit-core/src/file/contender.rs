//! One claim's contest, as blocking code: attempts in each mode, the hold, and its release.

use std::{fs::File, num::NonZeroU32, path::PathBuf, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    fault::{Fault, Inode, Result},
    flock::Flock,
    hold::{Beacon, Hold, ReaderNote},
    journal::{self, Entry},
    space::{self, Files},
    watch::{Events, Watcher},
};
use crate::{
    Kind,
    spi::{ClaimRequest, Grant, Lease, Mode},
};

/// How often a file that is replaced between locking and looking is tried again.
const MAX_REPLACED: usize = 16;
/// How long after the last event a reader honours the gate of a lock that nobody holds. By then a live writer has
/// taken the lock; a stopped one must not keep everyone out.
const GATE_GRACE: Duration = Duration::from_millis(25);

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
    pub last_event: Instant,
    gate: Option<Gate>,
    main: Option<Opened>,
}

/// Keeps new readers out while a writer waits for those inside.
#[derive(Debug)]
struct Gate {
    _lock: Flock,
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
            last_event: Instant::now(),
            gate: None,
            main: None,
        }
    }

    /// Tries to be granted, once. One that `waits` keeps its place at the gate and is told of releases from now on.
    pub(super) fn attempt(&mut self, waits: bool, since: Instant) -> Result<()> {
        if !waits {
            self.gate = None;
        }
        let mut hold = self.contend(waits, since, None)?;
        if hold.is_none() && waits && self.begin_to_watch() {
            // It may have been released before the watch was there.
            hold = self.contend(waits, since, None)?;
        }
        if hold.is_none() && !waits && self.spec.request.mode.kind() == Kind::Lock {
            // An inspection may have been probing. It does so under the ledger's lock, so now it does not.
            let ledger = self.spec.files.lock_ledger()?;
            hold = self.contend(waits, since, Some(ledger))?;
        }
        if hold.is_some() {
            self.gate = None;
            self.begin_to_watch();
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

    /// Begins to hear of changes to the main file. Says whether it did not before.
    fn begin_to_watch(&mut self) -> bool {
        if self.events.as_ref().is_some_and(|events| !events.ended()) {
            return false;
        }
        // Without a watch, because there is no watcher or the system has no more to give, it polls.
        let watcher = self.spec.watcher.as_deref();
        self.events = watcher.and_then(|watcher| watcher.watch(&self.spec.files.main()).ok());
        self.events.is_some()
    }

    fn contend(&mut self, waits: bool, since: Instant, ledger: Option<Flock>) -> Result<Option<Hold>> {
        match self.spec.request.mode {
            Mode::Exclusive => self.exclusive(waits, since, ledger),
            Mode::Shared => self.shared(waits, since, ledger),
            Mode::Permits(permits) => self.permit(permits, since),
        }
    }

    fn exclusive(&mut self, waits: bool, since: Instant, mut ledger: Option<Flock>) -> Result<Option<Hold>> {
        for _ in 0..MAX_REPLACED {
            let main = self.main()?;
            let Some(lock) = Flock::exclusive(&main.file, &main.path)? else {
                if waits {
                    self.close_gate(&main)?;
                }
                return Ok(None);
            };
            let beacon = match self.gate.take() {
                Some(gate) => Some(gate.beacon),
                None => main.beacon()?,
            };
            if let Some(beacon) = main.matching(beacon)? {
                return self
                    .enter(beacon, lock, ledger.take(), vec![(main.path, main.inode)], since)
                    .map(Some);
            }
        }
        Err(self.replaced())
    }

    fn shared(&mut self, waits: bool, since: Instant, mut ledger: Option<Flock>) -> Result<Option<Hold>> {
        for _ in 0..MAX_REPLACED {
            let main = self.main()?;
            let lock = if !self.gate_is_closed()? {
                Flock::shared(&main.file, &main.path)?
            } else if waits && self.last_event.elapsed() >= GATE_GRACE {
                // Alone at first, to see that there is no reader inside for whom the writer at the gate still waits.
                ledger = Some(self.spec.files.lock_ledger()?);
                match Flock::exclusive(&main.file, &main.path)? {
                    Some(lock) => lock.downgrade(&main.path)?,
                    None => None,
                }
            } else {
                None
            };
            let Some(lock) = lock else { return Ok(None) };
            if let Some(beacon) = main.matching(main.beacon()?)? {
                // Moved, so that on an error it is unlocked before the beacon tells that it is.
                let lock = lock;
                let ledger = match ledger {
                    Some(ledger) => ledger,
                    None => self.spec.files.lock_ledger()?,
                };
                return self
                    .enter(beacon, lock, Some(ledger), vec![(main.path, main.inode)], since)
                    .map(Some);
            }
        }
        Err(self.replaced())
    }

    fn permit(&mut self, permits: NonZeroU32, since: Instant) -> Result<Option<Hold>> {
        for _ in 0..MAX_REPLACED {
            let main = self.main()?;
            let files = &self.spec.files;
            let ledger = files.lock_ledger()?;
            if space::inode(ledger.file(), &main.path)? != main.inode {
                continue;
            }
            self.check_permits(permits, &main)?;
            let Some((lock, slot)) = self.free_permit(permits)? else {
                return Ok(None);
            };
            let lives_in = vec![(main.path.clone(), main.inode), slot];
            if let Some(beacon) = main.matching(main.beacon()?)? {
                return self.enter(beacon, lock, Some(ledger), lives_in, since).map(Some);
            }
        }
        Err(self.replaced())
    }

    /// Refuses a number of permits that differs from the one in use.
    fn check_permits(&self, permits: NonZeroU32, main: &Opened) -> Result<()> {
        let name = self.spec.request.name.as_str();
        let Some(last) = journal::read(&main.file, &main.path)? else {
            return Ok(());
        };
        last.check_name(name, &main.path)?;
        if last.permits == permits.get() {
            return Ok(());
        }
        for index in 0..last.permits {
            let path = self.spec.files.permit(index);
            let Some(slot) = space::open(&path)?.map(Arc::new) else {
                continue;
            };
            if Flock::exclusive(&slot, &path)?.is_none() {
                let reason = format!(
                    "semaphore `{name}` has {} permits, not {permits}, for as long as any of them is held; ask for \
                     the same number everywhere",
                    last.permits
                );
                return Err(Fault::Permits { reason });
            }
        }
        Ok(())
    }

    /// Locks a permit that is free. Beginning at one of its own saves looking at those that others began at.
    fn free_permit(&self, permits: NonZeroU32) -> Result<Option<(Flock, (PathBuf, Inode))>> {
        let count = u128::from(permits.get());
        let first = self.spec.request.owner.get() % count;
        for step in 0..count {
            let Ok(index) = u32::try_from((first + step) % count) else {
                continue;
            };
            let path = self.spec.files.permit(index);
            let file = Arc::new(self.spec.files.open_or_create(&path)?);
            let Some(lock) = Flock::exclusive(&file, &path)? else {
                continue;
            };
            let inode = space::inode(&file, &path)?;
            if space::is_at(&path, inode)? {
                return Ok(Some((lock, (path, inode))));
            }
        }
        Ok(None)
    }

    /// Mints the tokens and leaves word of who holds. On an error the parameters go in reverse order: what was locked
    /// is free before the beacon tells so. The ledger is let go before the disk is waited for.
    fn enter(
        &self,
        beacon: Beacon,
        lock: Flock,
        ledger: Option<Flock>,
        lives_in: Vec<(PathBuf, Inode)>,
        since: Instant,
    ) -> Result<Hold> {
        let Spec { request, files, .. } = &*self.spec;
        let entry = journal::reserve(
            files,
            &beacon.0,
            request.name.as_str(),
            request.mode,
            request.tokens,
            request.label.as_deref(),
        )?;
        let mut reader = None;
        match request.mode {
            Mode::Exclusive => {}
            Mode::Shared => reader = Some(self.note_reader(&entry)?),
            Mode::Permits(_) => {
                if let Some((slot, _)) = lives_in.last() {
                    journal::note(slot, &entry)?;
                }
            }
        }
        drop(ledger);
        journal::make_durable(files, &beacon.0, &entry)?;
        let grant = Grant {
            tokens: entry.tokens(),
            lease: Lease { since, length: None },
        };
        Ok(Hold::new(reader, lock, beacon, lives_in, grant))
    }

    fn note_reader(&self, entry: &Entry) -> Result<ReaderNote> {
        let Spec { request, files, .. } = &*self.spec;
        let path = files.ensure_readers()?.join(request.owner.to_string());
        let file = Arc::new(files.open_or_create(&path)?);
        let Some(lock) = Flock::exclusive(&file, &path)? else {
            return Err(Fault::Replaced { path });
        };
        let note = ReaderNote { path, _lock: lock };
        journal::note(&note.path, entry)?;
        Ok(note)
    }

    /// Keeps new readers out, if it is readers that this writer waits for. While a writer is inside there is no need
    /// for it, and readers get an even chance when that one leaves.
    fn close_gate(&mut self, main: &Opened) -> Result<()> {
        let last = journal::read(&main.file, &main.path)?;
        if !last.is_some_and(|last| last.is_shared()) {
            self.gate = None;
            return Ok(());
        }
        if self.gate.is_some() {
            return Ok(());
        }
        let path = self.spec.files.gate();
        let file = Arc::new(self.spec.files.open_or_create(&path)?);
        let Some(lock) = Flock::exclusive(&file, &path)? else {
            return Ok(());
        };
        if space::is_at(&path, space::inode(&file, &path)?)?
            && let Some(beacon) = main.beacon()?
        {
            self.gate = Some(Gate { _lock: lock, beacon });
        }
        Ok(())
    }

    fn gate_is_closed(&self) -> Result<bool> {
        let path = self.spec.files.gate();
        match space::open(&path)?.map(Arc::new) {
            Some(gate) => Ok(Flock::shared(&gate, &path)?.is_none()),
            None => Ok(false),
        }
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
        if let Some(last) = journal::read(&file, &path)? {
            last.check_name(self.spec.request.name.as_str(), &path)?;
        }
        let inode = space::inode(&file, &path)?;
        let file = Arc::new(file);
        Ok(self.main.insert(Opened { file, path, inode }).clone())
    }

    fn replaced(&self) -> Fault {
        Fault::Replaced {
            path: self.spec.files.main(),
        }
    }
}

impl Opened {
    fn beacon(&self) -> Result<Option<Beacon>> {
        Ok(space::open_writable(&self.path)?.map(Beacon))
    }

    /// `beacon`, if it is on the same file.
    fn matching(&self, beacon: Option<Beacon>) -> Result<Option<Beacon>> {
        match beacon {
            Some(beacon) if beacon.inode(&self.path)? == self.inode => Ok(Some(beacon)),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::{super::space::Space, *};
    use crate::{LockName, spi::OwnerId};

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
        assert!(main.matching(main.beacon().unwrap()).unwrap().is_some());
        fs::remove_file(files.main()).unwrap();
        assert!(
            main.matching(main.beacon().unwrap()).unwrap().is_none(),
            "deleted"
        );
        fs::write(files.main(), "").unwrap();
        assert!(
            main.matching(main.beacon().unwrap()).unwrap().is_none(),
            "replaced"
        );
        assert_ne!(contender.main().unwrap().inode, main.inode);
    }
}
