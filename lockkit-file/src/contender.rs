//! One claim's contest, as blocking code: attempts in each mode, the hold, and its release.

use std::{
    fs::{self, File},
    io,
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use lockkit_core::spi::{ClaimRequest, Grant, Lease, Mode};
use tokio::time::Instant;

use crate::{
    fault::{Fault, Inode, Result},
    flock::Flock,
    hold::{Hold, ReaderNote, Taken},
    journal::{self, Entry},
    mutex::Mutex,
    queue::{self, BEAT, Before, Place},
    space::{self, Files},
    watch::{Events, Watcher},
};

/// How often a file that is replaced between locking and looking is tried again.
const MAX_REPLACED: usize = 16;
/// What is claimed, and where.
#[derive(Debug)]
pub(crate) struct Spec {
    pub request: ClaimRequest,
    pub files: Files,
    pub watcher: Option<Arc<Watcher>>,
    /// How often to try again without a watcher.
    pub poll: Duration,
    pub pace: Arc<Pace>,
}

/// How fast the disk answers. A busy one may keep even a step that does not wait for it.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Until when nothing is done where it would keep others.
    spared: Mutex<Option<Instant>>,
}

impl Pace {
    /// A step that takes longer would keep others who share its thread.
    const SLOW: Duration = Duration::from_millis(1);
    /// How many times as long as it took its thread is spared then, so that others have nine tenths of it.
    const SPARED: u32 = 10;
    const MOST_SPARED: Duration = Duration::from_millis(100);

    /// Does a step, unless one was slow of late.
    pub(crate) fn at_once<T>(&self, step: impl FnOnce() -> T) -> Option<T> {
        let began = Instant::now();
        if self.is_spared(began) {
            return None;
        }
        let done = step();
        self.took(began, Instant::now());
        Some(done)
    }

    pub(crate) fn is_spared(&self, now: Instant) -> bool {
        self.spared.lock().is_some_and(|until| now < until)
    }

    pub(crate) fn took(&self, began: Instant, ended: Instant) {
        let took = ended - began;
        if took > Self::SLOW {
            *self.spared.lock() = Some(ended + (took * Self::SPARED).min(Self::MOST_SPARED));
        }
    }

    #[cfg(test)]
    pub(crate) fn spare(&self) {
        *self.spared.lock() = Some(Instant::now() + Duration::from_secs(3_600));
    }
}

/// The state of one claim. Dropping it leaves nothing locked.
#[derive(Debug)]
pub(crate) struct Contender {
    spec: Arc<Spec>,
    /// What has to wait is a fault, for another thread to repeat it.
    pub in_place: bool,
    pub hold: Option<Hold>,
    /// A release found the hold gone, and its caller has not been told yet.
    pub lost: bool,
    pub events: Option<Events>,
    /// The directory of the permits, when the events were begun.
    slots: Option<Inode>,
    /// It was the first in the queue, or has still the same waiter before it, after the last attempt. Who wakes it may be about to go.
    pub is_stuck: bool,
    /// The instant of the next [`beat`](Self::beat).
    pub look_at: Option<Instant>,
    /// The place in the queue, while it waits.
    place: Option<Place>,
    /// The waiter before it, if it is not the first.
    before: Option<PathBuf>,
    /// Of which the events are, if they are not the main file's.
    watched: Option<PathBuf>,
    main: Option<Opened>,
}

/// A file that is to be locked; the main one is open from one attempt to the next.
#[derive(Clone, Debug)]
struct Opened {
    file: Arc<File>,
    /// Closing it wakes others, so only who waits for it anyway opens it for writing before it is locked.
    writes: bool,
    path: PathBuf,
    inode: Inode,
}

/// What came of locking a file.
enum Locking {
    Locked(Taken),
    Taken,
    /// The path does not lead to it any more.
    Replaced,
}

impl Contender {
    pub(crate) fn new(spec: Arc<Spec>) -> Self {
        Self {
            spec,
            in_place: false,
            hold: None,
            lost: false,
            events: None,
            slots: None,
            is_stuck: false,
            look_at: None,
            place: None,
            before: None,
            watched: None,
            main: None,
        }
    }

    /// Tries to be granted, once. One that `waits` has its place in the queue and is told when to try again from now on.
    pub(crate) fn attempt(&mut self, waits: bool, since: Instant) -> Result<()> {
        let before = self.before.clone();
        let hold = if waits {
            self.in_turn(since)?
        } else {
            self.leave_queue();
            self.out_of_turn(since)?
        };
        self.is_stuck = self.place.is_some() && (self.before.is_none() || self.before == before);
        if hold.is_some() {
            self.place = None;
            self.before = None;
            // What tells of the end of the hold by being closed is to be open nowhere else. A semaphore's main file stays open,
            // so that no other that takes its place has its inode.
            self.main = self.main.take().filter(|main| !main.writes);
        } else {
            self.check_name()?;
            // An attempt that fails with an error does not show life: a waiter that cannot be granted must not keep others out.
            self.beat();
        }
        self.hold = hold;
        Ok(())
    }

    fn in_turn(&mut self, since: Instant) -> Result<Option<Hold>> {
        if self.place.is_some() {
            self.find_before()?;
        } else {
            if self.spec.files.queue().is_empty()? {
                if let Some(hold) = self.contend(true, since, None)? {
                    return Ok(Some(hold));
                }
            } else if let Mode::Permits(permits) = self.spec.request.mode {
                // It is told of another size at once, and not when it is its turn.
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
            // The file is another one now. It may have been released before the watch was there.
            hold = self.contend(true, since, None)?;
        }
        Ok(hold)
    }

    /// Tries without a place in the queue. What is free is free to it, but readers that come one after the other must not keep a
    /// writer out.
    fn out_of_turn(&mut self, since: Instant) -> Result<Option<Hold>> {
        if self.spec.request.mode == Mode::Shared && self.spec.files.queue().is_waited_in()? {
            return Ok(None);
        }
        let mut hold = self.contend(false, since, None)?;
        if hold.is_none() {
            self.may_wait()?;
            // An inspection may have been probing. It does so with the ledger to itself, so now it does not.
            let ledger = self.spec.files.share_ledger()?;
            hold = self.contend(false, since, Some(ledger))?;
        }
        Ok(hold)
    }

    fn join_queue(&mut self) -> Result<()> {
        // A file is made, for which a file system that commits its journal may wait for the disk.
        self.may_wait()?;
        let (place, before) = Place::take(&self.spec.files.queue(), self.spec.request.owner)?;
        self.place = Some(place);
        self.before = match before {
            Before::Waiter(ticket) => Some(ticket),
            Before::Nobody | Before::Unlisted => None,
        };
        Ok(())
    }

    fn leave_queue(&mut self) {
        self.place = None;
        self.before = None;
        self.look_at = None;
        if self.watched.take().is_some() {
            self.events = None;
        }
    }

    /// Finds out who is before it now. A place that was lost is taken again, behind all.
    fn find_before(&mut self) -> Result<()> {
        let before = match &self.place {
            Some(place) => place.before()?,
            None => Before::Unlisted,
        };
        match before {
            Before::Nobody => self.before = None,
            Before::Waiter(ticket) => self.before = Some(ticket),
            Before::Unlisted => {
                self.leave_queue();
                self.join_queue()?;
            }
        }
        Ok(())
    }

    /// Says whether it is its turn. If not, it is told when the waiter before it has gone.
    fn is_first(&mut self) -> Result<bool> {
        for _ in 0..MAX_REPLACED {
            let Some(before) = &self.before else {
                if self.watched.take().is_some() {
                    self.events = None;
                }
                return Ok(true);
            };
            if self.watched.as_ref() == Some(before) {
                return Ok(false);
            }
            self.watched = Some(before.clone());
            let watcher = self.spec.watcher.as_deref();
            self.events = watcher.and_then(|watcher| watcher.watch(&[before]).ok());
            if queue::counts(before)? {
                return Ok(false);
            }
            // It left before the watch was there.
            self.find_before()?;
        }
        Ok(false)
    }

    /// Shows that it is alive, and looks whether the waiter before it is. Says that it is worth while to try; if not, it sets the
    /// time of the next look.
    pub(crate) fn beat(&mut self) -> bool {
        let Some(place) = &mut self.place else {
            self.look_at = None;
            return false;
        };
        place.show();
        let is_listed = place.is_listed();
        self.look_in(Duration::ZERO);
        if !is_listed {
            return true;
        }
        let lasts = match &self.before {
            Some(before) => queue::lasts(before).ok().flatten(),
            None => Some(BEAT),
        };
        let Some(lasts) = lasts else { return true };
        self.look_in(BEAT.min(lasts + Duration::from_millis(1)));
        false
    }

    /// Hears of what happens to a hold's files from now on. Says whether something did before.
    pub(crate) fn watch_hold(&mut self) -> bool {
        let begins = self.begin_to_watch() || self.events.is_none();
        begins && matches!(self.stands(), Ok(false))
    }

    fn may_wait(&self) -> Result<()> {
        if self.in_place {
            return Err(Fault::Waits);
        }
        Ok(())
    }

    /// Whether the hold is still there for others to see.
    pub(crate) fn stands(&self) -> Result<bool> {
        self.hold.as_ref().map_or(Ok(false), Hold::stands)
    }

    /// Gives everything up.
    pub(crate) fn release(&mut self) {
        self.leave_queue();
        self.main = None;
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
            Mode::Exclusive | Mode::Shared => self.whole(waits, since, ledger),
            Mode::Permits(permits) => self.permit(permits, since, ledger),
        }
    }

    fn whole(&mut self, waits: bool, since: Instant, ledger: Option<Flock>) -> Result<Option<Hold>> {
        let how = match self.spec.request.mode {
            Mode::Shared => Flock::shared,
            Mode::Exclusive | Mode::Permits(_) => Flock::exclusive,
        };
        for _ in 0..MAX_REPLACED {
            let main = self.main(waits)?;
            match main.lock(how, &self.spec.files)? {
                Locking::Locked(taken) => {
                    drop(ledger);
                    let lives_in = vec![(main.path.clone(), main.inode)];
                    return self.enter(&main, taken, lives_in, since).map(Some);
                }
                Locking::Taken => return Ok(None),
                Locking::Replaced => {}
            }
        }
        Err(self.replaced())
    }

    fn permit(&mut self, permits: NonZeroU32, since: Instant, ledger: Option<Flock>) -> Result<Option<Hold>> {
        for _ in 0..MAX_REPLACED {
            let main = self.main(false)?;
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
        let Some(file) = main.writable()? else {
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
        journal::set_size(files, &file, request)
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
            let slot = Opened::new(self.spec.files.open_or_create(&path)?, false, path);
            if let Locking::Locked(taken) = slot.lock(Flock::exclusive, &self.spec.files)? {
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
                entry = journal::mint(files, taken.lock.file(), request, || self.may_wait())?;
            }
            Mode::Shared => {
                entry = journal::mint(files, taken.lock.file(), request, || self.may_wait())?;
                reader = Some(self.note_reader(&entry)?);
            }
            Mode::Permits(_) => {
                let counter = main.writable()?.ok_or_else(|| self.replaced())?;
                entry = journal::mint(files, &counter, request, || self.may_wait())?;
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
            let Some((file, _)) = space::create_writable(&unlisted)? else {
                continue;
            };
            let file = Arc::new(file);
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

    fn look_in(&mut self, after: Duration) {
        self.look_at = Some(Instant::now() + after);
    }

    /// The main file as it is now. One that was replaced is left, together with what was in hand on it.
    fn main(&mut self, writes: bool) -> Result<Opened> {
        if let Some(main) = &self.main
            && space::is_at(&main.path, main.inode)?
        {
            return Ok(main.clone());
        }
        if self.main.take().is_some() {
            self.events = None;
        }
        let files = &self.spec.files;
        let path = files.main();
        let opened = if writes {
            files.open_or_create_writable(&path)?
        } else {
            files.open_or_create(&path)?
        };
        Ok(self.main.insert(Opened::new(opened, writes, path)).clone())
    }

    /// Checks that what was taken is the name that is claimed.
    fn check_name(&self) -> Result<()> {
        let Some(main) = &self.main else { return Ok(()) };
        let last = journal::read(&self.spec.files, &main.file)?;
        last.map_or(Ok(()), |last| {
            last.check_name(self.spec.request.name.as_str(), &main.path)
        })
    }

    fn replaced(&self) -> Fault {
        Fault::Replaced {
            path: self.spec.files.main(),
        }
    }
}

impl Opened {
    fn new((file, inode): (File, Inode), writes: bool, path: PathBuf) -> Self {
        let file = Arc::new(file);
        Self {
            file,
            writes,
            path,
            inode,
        }
    }

    /// Locks it through a writable descriptor.
    fn lock(
        &self,
        how: impl Fn(&Arc<File>, &Path) -> Result<Option<Flock>>,
        files: &Files,
    ) -> Result<Locking> {
        let mut file = Arc::clone(&self.file);
        if !self.writes {
            let Some(probe) = how(&file, &self.path)? else {
                return Ok(Locking::Taken);
            };
            let Some(writable) = self.writable()? else {
                return Ok(Locking::Replaced);
            };
            file = Arc::new(writable);
            // Another may get in between the two, and then it is taken.
            drop(probe);
        }
        let Some(lock) = how(&file, &self.path)? else {
            return Ok(Locking::Taken);
        };
        if !space::is_at(&self.path, self.inode)? {
            return Ok(Locking::Replaced);
        }
        let queue = files.queue();
        Ok(Locking::Locked(Taken { lock, queue }))
    }

    /// The same file, open for writing; `None` if it was replaced.
    fn writable(&self) -> Result<Option<File>> {
        let opened = space::open_writable(&self.path)?;
        Ok(opened.and_then(|(file, inode)| (inode == self.inode).then_some(file)))
    }
}

/// The number of permits that was last asked for.
fn size(files: &Files, main: &Opened) -> Result<Option<u32>> {
    Ok(journal::read(files, &main.file)?.map(|last| last.permits))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::space::Space;
    use lockkit_core::{LockKind, LockName, spi::OwnerId};

    #[test]
    fn a_file_replaced_after_it_was_opened_is_not_locked() {
        let dir = TempDir::new().unwrap();
        let name = LockName::new("n").unwrap();
        let files = Arc::new(Space::open(dir.path(), "").unwrap()).files(&name, LockKind::Lock);
        let mut contender = Contender::new(Arc::new(Spec {
            request: ClaimRequest::new(name, Mode::Exclusive, Duration::from_secs(30), OwnerId::new(1)),
            files: files.clone(),
            watcher: None,
            poll: Duration::from_secs(1),
            pace: Arc::default(),
        }));
        let main = contender.main(false).unwrap();
        assert!(main.writable().unwrap().is_some());
        fs::remove_file(files.main()).unwrap();
        assert!(main.writable().unwrap().is_none(), "deleted");
        fs::write(files.main(), "").unwrap();
        assert!(main.writable().unwrap().is_none(), "replaced");
        assert_ne!(contender.main(false).unwrap().inode, main.inode);
    }
}
