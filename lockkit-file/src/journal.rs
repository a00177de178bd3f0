//! What a lock file says: the token counter, and who was last granted.
//!
//! Two copies take turns, a page apart, each with a checksum; the one with the higher sequence number that is whole
//! counts. A writer that is killed leaves the other copy, so the counter never goes back.
//!
//! Nothing but a crash of the host takes back what was written, so a grant waits for no disk. Each entry has a *floor* beside the
//! last token. Within one life of the host tokens go on from the last one, and in the next life from the highest floor. Before a token is
//! given out, there is a floor above it on disk: it is raised by many tokens at a time, in the lock's file, and in a second file of the same
//! layout, which is written for that alone. A crash may tear both copies in the first, which change all the time, and never both in the second, where
//! one is on disk before the other is written.
//!
//! Where the system does not tell its lives apart, each grant is on disk before it is given out. So it was in the versions
//! that knew of no floor: they have the last token in its place. To them the floor is the last token, so old and new may share files.
//!
//! Holders that do not exclude each other write side by side, each in a lane, which is two copies of its own in either file. So one
//! that is stopped while it writes is in nobody's way. Tokens go on from the highest of all lanes, and a lane gives
//! out only its own: those that leave its number when they are divided by the number of lanes.

use std::{
    fs::File,
    io,
    ops::RangeInclusive,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use lockkit_core::spi::{ClaimRequest, Mode};
use sha2::{Digest, Sha256};

use crate::{
    fault::{Fault, Result},
    life::Life,
    space::{self, Files},
};

const MAGIC: &[u8; 8] = b"lockkit1";
/// Copies are this far apart, so that no write to one touches a sector or page of the other.
const STRIDE: usize = 4_096;
/// The least that a disk writes as a whole.
const SECTOR: usize = 512;
const SUM_BYTES: usize = 16;
/// The number of those who may write side by side. Whoever writes alone uses the first lane, so most files have no other.
const LANES: u64 = 8;
/// The number of tokens after which the floor is raised again. To begin a life costs as many: a sixtieth of a second of the clock
/// that new counters start at.
const STEP: u64 = 1 << 14;

/// The state after a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The lock's name, in full.
    pub name: String,
    /// How many permits there are: 1 for a lock held alone, 0 for one that is shared.
    pub permits: u32,
    /// Who was granted.
    pub holder: Holding,
    /// The last token that was given out.
    last: u64,
    /// In which life of the host that can be relied on. `None` if it was on disk before it was given out.
    life: Option<Life>,
    /// A floor that is on disk, in this life: tokens up to it may be given out. 0 until there is one.
    ceiling: u64,
    /// In another life tokens go on above it. It rises with each entry; without a life, it is the last token.
    floor: u64,
    /// The number of entries that its lane has had.
    sequence: u64,
}

/// Who was granted. Whether it still holds, only the operating system's lock can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holding {
    pub token: u64,
    pub pid: u32,
    /// Microseconds since 1970.
    pub since: u64,
    pub label: Option<String>,
}

impl Entry {
    /// The tokens of the grant.
    pub(crate) fn tokens(&self) -> RangeInclusive<u64> {
        self.holder.token..=self.last
    }

    /// The token above which `life` goes on.
    fn above(&self, life: Option<Life>) -> u64 {
        if self.is_of(life) { self.last } else { self.floor }
    }

    fn is_of(&self, life: Option<Life>) -> bool {
        self.life.is_some() && self.life == life
    }

    /// Checks that the file is about this name.
    pub(crate) fn check_name(&self, name: &str, path: &Path) -> Result<()> {
        if self.name == name {
            return Ok(());
        }
        Err(Fault::OtherName {
            path: path.to_owned(),
            found: self.name.clone(),
        })
    }
}

/// Gives out tokens to a holder: as many as it asks for if it holds alone, else one. The caller cannot be granted
/// beside one that holds alone.
///
/// A new file starts at the clock, in microseconds, so that tokens go on rising if the file was deleted. Before it waits for the
/// disk, and before it has written anything, it asks whether it `may_wait`.
pub(crate) fn mint(
    files: &Files,
    file: &File,
    request: &ClaimRequest,
    may_wait: impl FnOnce() -> Result<()>,
) -> Result<Entry> {
    let entry = if request.mode == Mode::Exclusive {
        // There is no reader inside, so nobody writes in any lane.
        append(files, file, request, (0, request.tokens.get()), may_wait)?
    } else {
        let (lane, _lock) = files.lock_lane(LANES)?;
        append(files, file, request, (lane, 1), may_wait)?
    };
    if entry.life.is_none() {
        sync(file, &files.main())?;
        // The second of a lane is the first that is granted, where the first set a semaphore's size.
        if entry.sequence <= 2 {
            files.space().sync()?;
        }
    }
    Ok(entry)
}

/// Sets a semaphore's size. The caller has it locked, and nobody has a permit.
pub(crate) fn set_size(files: &Files, file: &File, request: &ClaimRequest) -> Result<()> {
    append(files, file, request, (0, 1), || Ok(())).map(drop)
}

fn append(
    files: &Files,
    file: &File,
    request: &ClaimRequest,
    (lane, tokens): (u64, u32),
    may_wait: impl FnOnce() -> Result<()>,
) -> Result<Entry> {
    let path = files.main();
    let life = files.space().life();
    let lanes = read_main(files, file)?;
    let newest = newest(&lanes);
    if let Some(newest) = newest {
        newest.check_name(request.name.as_str(), &path)?;
    }
    let exhausted = || Fault::Exhausted { path: path.clone() };
    let next = |above: u64| {
        let mut token = above.checked_add(1)?;
        if request.mode != Mode::Exclusive {
            token = token.checked_add((lane + LANES - token % LANES) % LANES)?;
        }
        Some((token, token.checked_add(u64::from(tokens) - 1)?))
    };
    let now = micros_since_epoch();
    let entries = || lanes.iter().flatten();
    let mut above = entries().map(|entry| entry.above(life)).max().unwrap_or(now);
    let before = of_lane(&lanes, lane);
    let of_life = entries().filter(|entry| entry.is_of(life));
    let ceiling = of_life.map(|entry| entry.ceiling).max().unwrap_or(0);
    // The first entry of a life raises the floor in each lane, which tells it from what a crash has spoilt. Who was killed
    // meanwhile has left no ceiling.
    let begun = before.is_some_and(|last| last.is_of(life) && last.ceiling > 0);
    let is_covered = begun && next(above).is_some_and(|(_, last)| last <= ceiling);
    if !is_covered {
        may_wait()?;
    }
    let ceilings = if life.is_none() || is_covered {
        None
    } else {
        // What a crash has left of the main file may be less than what was given out.
        let ceilings = Ceilings::open(files)?;
        above = above.max(ceilings.highest());
        Some(ceilings)
    };
    let (token, last) = next(above).ok_or_else(exhausted)?;
    let floor = match newest {
        _ if life.is_none() => last,
        Some(newest) => newest.floor.checked_add(1).ok_or_else(exhausted)?,
        None => last,
    };
    let mut entry = Entry {
        name: request.name.as_str().to_owned(),
        permits: match request.mode {
            Mode::Exclusive => 1,
            Mode::Shared => 0,
            Mode::Permits(permits) => permits.get(),
        },
        holder: Holding {
            token,
            pid: std::process::id(),
            since: now,
            label: request.label.as_deref().map(str::to_owned),
        },
        last,
        life,
        ceiling: if is_covered { ceiling } else { 0 },
        floor,
        sequence: before.map_or(0, |last| last.sequence),
    };
    if let Some(mut ceilings) = ceilings {
        entry.floor = floor.max(last.saturating_add(STEP));
        // Older versions look for it nowhere else, and it may be either copy that a crash tears.
        for _ in 0..2 {
            write_through(file, &path, lane, &mut entry)?;
        }
        ceilings.raise(lane, &entry)?;
        files.space().sync()?;
        entry.ceiling = entry.floor;
    }
    write(file, &path, lane, &mut entry)?;
    Ok(entry)
}

/// The floors that are on disk, the latest of each lane.
struct Ceilings {
    file: File,
    path: PathBuf,
    lanes: Vec<Option<Entry>>,
}

impl Ceilings {
    fn open(files: &Files) -> Result<Self> {
        let path = files.ceiling();
        let Some((file, _)) = space::create_writable(&path)? else {
            return Err(Fault::Replaced { path });
        };
        let lanes = read_lanes(&file, &path, |_| Ok(false))?;
        Ok(Self { file, path, lanes })
    }

    fn highest(&self) -> u64 {
        newest(&self.lanes).map_or(0, |entry| entry.floor)
    }

    /// Puts the floor of an entry on disk. The caller has the lane to itself.
    fn raise(&mut self, lane: u64, entry: &Entry) -> Result<()> {
        let mut entry = entry.clone();
        entry.sequence = of_lane(&self.lanes, lane).map_or(0, |last| last.sequence);
        write_through(&self.file, &self.path, lane, &mut entry)
    }
}

/// Writes the next entry of a lane to the disk.
fn write_through(file: &File, path: &Path, lane: u64, entry: &mut Entry) -> Result<()> {
    // Who wrote the other copy may have been killed before it was on disk: the two must not tear together.
    sync(file, path)?;
    write(file, path, lane, entry)?;
    sync(file, path)
}

/// Writes the next entry of a lane.
fn write(file: &File, path: &Path, lane: u64, entry: &mut Entry) -> Result<()> {
    let next = entry.sequence.checked_add(1);
    entry.sequence = next.ok_or_else(|| Fault::Exhausted {
        path: path.to_owned(),
    })?;
    let written = encode(entry);
    if entry.life.is_none() && written.len() > SECTOR {
        // Who wrote the other copy may still wait for the disk, or have been killed: the two must not tear together.
        sync(file, path)?;
    }
    file.write_all_at(&written, place(lane, entry.sequence))
        .map_err(Fault::io("write to", path))
}

fn sync(file: &File, path: &Path) -> Result<()> {
    #[cfg(test)]
    if let Some(synced) = tests::sync_to_disk(file, path) {
        return synced;
    }
    #[cfg(test)]
    if crate::crash_tests::sync_to_disk(file, path) {
        return Ok(());
    }
    file.sync_data().map_err(Fault::io("sync", path))
}

/// Leaves a copy of a grant, alone in its file, for whoever inspects. The counter is elsewhere, so this need not
/// survive a crash.
pub(crate) fn note(file: &File, path: &Path, entry: &Entry) -> Result<()> {
    file.set_len(0)
        .and_then(|()| file.write_all_at(&encode(entry), 0))
        .map_err(Fault::io("write to", path))
}

/// Reads a [`note`]; `None` if there is none.
pub(crate) fn read_note(file: &File, path: &Path) -> Result<Option<Entry>> {
    Ok(newest(&read_lanes(file, path, |_| Ok(false))?).cloned())
}

/// Reads the main file; `None` if nothing was ever granted, or if a crash of the host has spoilt it.
pub(crate) fn read(files: &Files, file: &File) -> Result<Option<Entry>> {
    Ok(newest(&read_main(files, file)?).cloned())
}

fn newest(lanes: &[Option<Entry>]) -> Option<&Entry> {
    lanes.iter().flatten().max_by_key(|entry| entry.floor)
}

fn of_lane(lanes: &[Option<Entry>], lane: u64) -> Option<&Entry> {
    lanes.get(usize::try_from(lane).ok()?)?.as_ref()
}

fn read_main(files: &Files, file: &File) -> Result<Vec<Option<Entry>>> {
    read_lanes(file, &files.main(), |lane| outlived(files, lane))
}

/// Says whether the lane has a floor on disk, and none of this life. Then nothing of this life is in it, and what a crash has spoilt
/// does not matter: nobody holds from before it.
fn outlived(files: &Files, lane: u64) -> Result<bool> {
    let path = files.ceiling();
    let (Some(life), Some(file)) = (files.space().life(), space::open(&path)?) else {
        return Ok(false);
    };
    let lanes = read_lanes(&file, &path, |_| Ok(false))?;
    Ok(of_lane(&lanes, lane).is_some_and(|last| !last.is_of(Some(life))))
}

/// The last entry of each lane, as far as the file goes. Where neither copy is whole and `may_be_spoilt` does not allow for
/// it, that is an error.
fn read_lanes(
    file: &File,
    path: &Path,
    may_be_spoilt: impl Fn(u64) -> Result<bool>,
) -> Result<Vec<Option<Entry>>> {
    let mut lanes = Vec::new();
    for lane in 0..LANES {
        let copies = read_at(file, place(lane, 1), 2 * STRIDE).map_err(Fault::io("read", path))?;
        if copies.is_empty() {
            break;
        }
        let (first, second) = copies.split_at(copies.len().min(STRIDE));
        let entry = match read_lane([first, second]) {
            Ok(entry) => entry,
            Err(Spoilt) if may_be_spoilt(lane)? => None,
            Err(Spoilt) => {
                return Err(Fault::Damaged {
                    path: path.to_owned(),
                });
            }
        };
        lanes.push(entry);
        if second.len() < STRIDE {
            break;
        }
    }
    Ok(lanes)
}

/// Neither copy is whole.
struct Spoilt;

fn read_lane(copies: [&[u8]; 2]) -> Result<Option<Entry>, Spoilt> {
    let newest = copies
        .iter()
        .filter_map(|copy| decode(copy))
        .max_by_key(|entry| entry.sequence);
    if newest.is_some() {
        return Ok(newest);
    }
    // The second copy is first written after the first one was whole. Without it, what is there can only be a first
    // write that never finished, perhaps without its beginning, and no token came of it. Where a later lane is in use, it is
    // there and blank.
    let blank = |copy: &[u8]| copy.iter().all(|byte| *byte == 0);
    let [first, second] = copies;
    let (beginning, _) = first.split_at(SECTOR.min(first.len()));
    if blank(second) && (blank(beginning) || first.starts_with(MAGIC)) {
        return Ok(None);
    }
    Err(Spoilt)
}

/// The place in the file where a lane's entry goes. The first has the sequence number 1 and goes to the first copy.
fn place(lane: u64, sequence: u64) -> u64 {
    (2 * lane + (sequence + 1) % 2) * STRIDE as u64
}

fn encode(entry: &Entry) -> Vec<u8> {
    let Entry {
        name,
        permits,
        holder,
        last,
        life,
        ceiling,
        floor,
        sequence,
    } = entry;
    let label = holder.label.as_deref();
    let mut body = Vec::with_capacity(128 + name.len());
    body.extend(sequence.to_le_bytes());
    body.extend(floor.to_le_bytes());
    body.extend(holder.token.to_le_bytes());
    body.extend(holder.since.to_le_bytes());
    body.extend(permits.to_le_bytes());
    body.extend(holder.pid.to_le_bytes());
    body.push(u8::from(label.is_some()));
    for text in [label.unwrap_or_default(), name] {
        let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
        body.extend(length.to_le_bytes());
        body.extend(&text.as_bytes()[..usize::from(length)]);
    }
    if let Some(life) = life {
        // Versions that know nothing of it read no further than the name.
        body.extend(life.bytes());
        body.extend(last.to_le_bytes());
        body.extend(ceiling.to_le_bytes());
    }
    let mut copy = MAGIC.to_vec();
    copy.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    copy.extend(&Sha256::digest(&body)[..SUM_BYTES]);
    copy.extend(body);
    copy
}

/// `None` if it is not whole.
fn decode(copy: &[u8]) -> Option<Entry> {
    let mut head = Fields(copy.strip_prefix(MAGIC)?);
    let length = usize::try_from(head.u32()?).ok()?;
    let sum = head.take(SUM_BYTES)?;
    let body = head.take(length)?;
    if Sha256::digest(body)[..SUM_BYTES] != *sum {
        return None;
    }
    let mut body = Fields(body);
    let (sequence, floor, token, since) = (body.u64()?, body.u64()?, body.u64()?, body.u64()?);
    let (permits, pid) = (body.u32()?, body.u32()?);
    let labelled = body.take(1)? == [1];
    let (label, name) = (body.text()?, body.text()?);
    let life = body.life();
    let (last, ceiling) = match life {
        Some(_) => (body.u64()?, body.u64()?),
        None => (floor, 0),
    };
    Some(Entry {
        name,
        permits,
        holder: Holding {
            token,
            pid,
            since,
            label: labelled.then_some(label),
        },
        last,
        life,
        ceiling,
        floor,
        sequence,
    })
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (field, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(field)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn life(&mut self) -> Option<Life> {
        Life::from_bytes(self.take(Life::BYTES)?.try_into().ok()?)
    }

    fn text(&mut self) -> Option<String> {
        let length = u16::from_le_bytes(self.take(2)?.try_into().ok()?);
        String::from_utf8(self.take(usize::from(length))?.to_vec()).ok()
    }
}

/// Up to `length` bytes.
fn read_at(file: &File, at: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn micros_since_epoch() -> u64 {
    // A clock before 1970 or after the year 584,000 is no seed worth having.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|elapsed| u64::try_from(elapsed.as_micros()).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{
        cell::RefCell,
        collections::HashMap,
        num::NonZeroU32,
        sync::{Arc, Mutex},
        thread,
        time::Duration,
    };

    use tempfile::TempDir;

    use super::*;
    use crate::space::Space;
    use lockkit_core::{LockKind, LockName, spi::OwnerId};

    /// The disk of a host that may crash, in the place of the real one.
    #[derive(Debug, Default)]
    struct Disk {
        /// The files, as they were last synced.
        synced: HashMap<PathBuf, Vec<u8>>,
        /// The number of syncs after which the process is killed.
        killed_after: Option<usize>,
    }

    thread_local! {
        static DISK: RefCell<Option<Disk>> = const { RefCell::new(None) };
    }

    /// Syncs the file to the disk of this thread; `None` if it has none.
    pub(crate) fn sync_to_disk(file: &File, path: &Path) -> Option<Result<()>> {
        DISK.with_borrow_mut(|disk| {
            let disk = disk.as_mut()?;
            if let Some(left) = &mut disk.killed_after {
                let Some(fewer) = left.checked_sub(1) else {
                    return Some(Err(Fault::Worker));
                };
                *left = fewer;
            }
            disk.synced.insert(path.to_owned(), all_of(file));
            Some(Ok(()))
        })
    }

    fn synced(path: &Path) -> Vec<u8> {
        DISK.with_borrow(|disk| disk.as_ref()?.synced.get(path).cloned())
            .unwrap_or_default()
    }

    fn all_of(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// A file as a crash may leave it: each sector that was not synced as it was, as it is, or, if it `tears`, half of
    /// each.
    fn after_a_crash(path: &Path, tears: bool, rng: &mut fastrand::Rng) -> Vec<u8> {
        let written = std::fs::read(path).unwrap_or_default();
        let mut left = synced(path);
        left.resize(written.len(), 0);
        for (left, written) in left.chunks_mut(SECTOR).zip(written.chunks(SECTOR)) {
            let kept = match rng.u8(0..if tears { 3 } else { 2 }) {
                0 => 0,
                1 => written.len(),
                _ => written.len().min(64 + rng.usize(0..64)),
            };
            left[..kept].copy_from_slice(&written[..kept]);
        }
        left
    }

    fn request(name: &str, mode: Mode) -> ClaimRequest {
        let name = LockName::new(name).unwrap();
        let mut request = ClaimRequest::new(name, mode, Duration::from_secs(30), OwnerId::new(1));
        request.tokens = NonZeroU32::new(3).unwrap();
        request.label = Some("label".into());
        request
    }

    fn life(number: u8) -> Option<Life> {
        Life::from_bytes([number; Life::BYTES])
    }

    struct Fixture {
        dir: TempDir,
        files: Files,
        file: File,
    }

    impl Fixture {
        fn new() -> Self {
            Self::of("n", life(1))
        }

        fn of(name: &str, life: Option<Life>) -> Self {
            Self::at(TempDir::new().unwrap(), name, life)
        }

        fn at(dir: TempDir, name: &str, life: Option<Life>) -> Self {
            let space = Arc::new(Space::open_in(life, dir.path(), "").unwrap());
            let files = space.files(&LockName::new(name).unwrap(), LockKind::Lock);
            files.open_or_create(&files.main()).unwrap();
            let (file, _) = space::open_writable(&files.main()).unwrap().unwrap();
            Self { dir, files, file }
        }

        /// These files in another life.
        fn in_life(self, name: &str, life: Option<Life>) -> Self {
            Self::at(self.dir, name, life)
        }

        fn mint_for(&self, request: &ClaimRequest) -> Result<Entry> {
            mint(&self.files, &self.file, request, || Ok(()))
        }

        fn mint(&self) -> Result<Entry> {
            self.mint_for(&request("n", Mode::Exclusive))
        }

        fn mint_shared(&self) -> Entry {
            self.mint_for(&request("n", Mode::Shared)).unwrap()
        }

        fn read(&self) -> Result<Option<Entry>> {
            read(&self.files, &self.file)
        }

        /// Spoils a byte of the copy that the entry is in.
        fn spoil(&self, entry: &Entry) {
            let at = place(0, entry.sequence) + 40;
            let mut byte = [0];
            self.file.read_exact_at(&mut byte, at).unwrap();
            self.file.write_all_at(&[!byte[0]], at).unwrap();
        }
    }

    #[test]
    fn what_is_written_is_read_and_tokens_go_on() {
        let fixture = Fixture::new();
        assert_eq!(fixture.read().unwrap(), None);
        let began = micros_since_epoch();
        let mut last = fixture.mint().unwrap();
        assert!(last.holder.token >= began, "a new counter starts at the clock");
        for _ in 0..5 {
            assert_eq!(fixture.read().unwrap().as_ref(), Some(&last));
            let next = fixture.mint().unwrap();
            assert_eq!(*next.tokens().start(), last.tokens().end() + 1);
            assert_eq!(next.tokens().count(), 3);
            last = next;
        }
    }

    #[test]
    fn a_torn_write_leaves_the_copy_before() {
        let fixture = Fixture::new();
        let mut before = fixture.mint().unwrap();
        for _ in 0..4 {
            let torn = fixture.mint().unwrap();
            fixture.spoil(&torn);
            assert_eq!(fixture.read().unwrap(), Some(before));
            // As the write did not finish, its tokens were never given out.
            before = fixture.mint().unwrap();
            assert_eq!(before.sequence, torn.sequence);
        }
    }

    #[test]
    fn who_is_stopped_in_its_lane_keeps_no_other_from_a_token() {
        let fixture = Fixture::new();
        let mut last = fixture.mint().unwrap();
        let mut stopped = Vec::new();
        for lane in (0..LANES).rev() {
            // Whoever comes last finds the only lane that is left.
            let mut seen = vec![fixture.mint_shared().holder.token];
            for _ in 0..3 {
                seen.push(fixture.mint_shared().holder.token);
            }
            assert!(seen[0] > last.last && seen.is_sorted_by(|a, b| a < b), "{seen:?}");
            last = fixture.read().unwrap().unwrap();
            let (locked, lock) = fixture.files.lock_lane(LANES).unwrap();
            assert_eq!(locked + lane, LANES - 1);
            stopped.push(lock);
        }
        let none = fixture.mint_for(&request("n", Mode::Shared));
        assert!(matches!(none, Err(Fault::LedgerBusy { .. })));
        stopped.pop();
        assert!(fixture.mint_shared().holder.token > last.last);
    }

    #[test]
    fn who_writes_side_by_side_shares_no_token() {
        let fixture = Fixture::new();
        let threads = 2 * usize::try_from(LANES).unwrap();
        let tokens = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let mut last = 0;
                    for _ in 0..50 {
                        let token = fixture.mint_shared().holder.token;
                        assert!(token > last, "{token} after {last}");
                        last = token;
                        tokens.lock().unwrap().push(token);
                    }
                });
            }
        });
        let mut tokens = tokens.into_inner().unwrap();
        let highest = tokens.iter().max().copied();
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!(tokens.len(), threads * 50, "no token twice");
        let next = *fixture.mint().unwrap().tokens().start();
        assert!(Some(next) > highest);
    }

    #[test]
    fn with_both_copies_damaged_there_are_no_tokens() {
        let fixture = Fixture::new();
        for entry in [fixture.mint().unwrap(), fixture.mint().unwrap()] {
            fixture.spoil(&entry);
        }
        assert!(matches!(fixture.read(), Err(Fault::Damaged { .. })));
        assert!(matches!(fixture.mint(), Err(Fault::Damaged { .. })));
    }

    /// Whoever raises the floor may be killed at any point of it, and a crash may leave any mixture of what was not synced.
    #[test]
    fn whatever_a_crash_tears_tokens_rise() {
        let seed =
            std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
        println!("LOCKKIT_SEED={seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let long = "n".repeat(LockName::MAX_BYTES);
        for round in 0..60 {
            let name = if round % 2 == 0 { "n" } else { &long };
            DISK.set(Some(Disk::default()));
            let mut granted = 0;
            let mut fixture = Fixture::of(name, life(1));
            for number in 1..12 {
                for _ in 0..rng.u8(0..9) {
                    let mode = if rng.bool() { Mode::Shared } else { Mode::Exclusive };
                    let mut request = request(name, mode);
                    request.label = Some("l".repeat(rng.usize(0..257)).into());
                    request.tokens = NonZeroU32::new(rng.u32(1..9_000)).unwrap();
                    DISK.with_borrow_mut(|disk| {
                        disk.as_mut().unwrap().killed_after = Some(rng.usize(0..16)).filter(|n| *n < 8);
                    });
                    // Others write in their lanes meanwhile.
                    let busy = if mode == Mode::Shared { rng.usize(0..3) } else { 0 };
                    let _lanes: Vec<_> = (0..busy)
                        .map(|_| fixture.files.lock_lane(LANES).unwrap())
                        .collect();
                    match fixture.mint_for(&request) {
                        Ok(entry) => {
                            assert!(
                                *entry.tokens().start() > granted,
                                "{:?} after {granted}",
                                entry.tokens()
                            );
                            granted = *entry.tokens().end();
                        }
                        Err(killed) => assert!(matches!(killed, Fault::Worker), "{killed}"),
                    }
                }
                let (main, ceiling) = (fixture.files.main(), fixture.files.ceiling());
                let left = [
                    (&main, after_a_crash(&main, true, &mut rng)),
                    (&ceiling, after_a_crash(&ceiling, false, &mut rng)),
                ];
                for (path, bytes) in left {
                    std::fs::write(path, &bytes).unwrap();
                    DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().synced.insert(path.clone(), bytes));
                }
                fixture = fixture.in_life(name, life(number + 1));
            }
        }
        DISK.set(None);
    }

    /// Without lives, there is no second file.
    #[test]
    fn whatever_a_crash_tears_one_copy_is_whole() {
        let seed =
            std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
        println!("LOCKKIT_SEED={seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let long = "n".repeat(LockName::MAX_BYTES);
        for name in ["n", &long] {
            for mode in [Mode::Shared, Mode::Exclusive] {
                DISK.set(Some(Disk::default()));
                let fixture = Fixture::of(name, None);
                let mut granted = 0;
                for n in 0..12_usize {
                    let mut request = request(name, mode);
                    request.label = Some("l".repeat(n * 37 % 257).into());
                    // Two in three are killed before they are granted. A long entry takes one sync more.
                    let syncs = (n % 3 != 2).then_some(usize::from(name.len() > 1));
                    DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = syncs);
                    let minted = fixture.mint_for(&request);
                    for _ in 0..64 {
                        let left = after_a_crash(&fixture.files.main(), false, &mut rng);
                        let copy = tempfile::tempfile().unwrap();
                        copy.write_all_at(&left, 0).unwrap();
                        let read = read_note(&copy, Path::new("left by a crash"));
                        let last = read.map(|entry| entry.map_or(0, |entry| entry.last));
                        assert!(
                            last.as_ref().is_ok_and(|last| *last >= granted),
                            "{} bytes, {mode:?}, entry {n}: {last:?} after {granted}",
                            name.len()
                        );
                    }
                    assert_eq!(minted.is_ok(), syncs.is_none());
                    granted = minted.map_or(granted, |entry| entry.last);
                }
            }
        }
        DISK.set(None);
    }

    /// Mints as the versions do that know of no lives: they go on from the floor and have each token on disk.
    #[test]
    fn older_versions_may_take_part() {
        let seed =
            std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
        println!("LOCKKIT_SEED={seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let long = "n".repeat(LockName::MAX_BYTES);
        for round in 0..40 {
            let name = if round % 2 == 0 { "n" } else { &long };
            DISK.set(Some(Disk::default()));
            let mut granted = 0;
            let mut fixture = Fixture::of(name, None);
            for number in 1..8 {
                for _ in 0..rng.u8(0..9) {
                    let older = rng.bool();
                    fixture = fixture.in_life(name, if older { None } else { life(number) });
                    let mut request = request(name, if rng.bool() { Mode::Shared } else { Mode::Exclusive });
                    request.tokens = NonZeroU32::new(rng.u32(1..9_000)).unwrap();
                    let entry = match fixture.mint_for(&request) {
                        // What is longer than a sector may be torn.
                        Err(Fault::Damaged { .. }) if older && round % 2 == 1 => continue,
                        minted => minted.unwrap(),
                    };
                    assert!(
                        *entry.tokens().start() > granted,
                        "{:?} after {granted}",
                        entry.tokens()
                    );
                    granted = *entry.tokens().end();
                    assert_eq!(fixture.read().unwrap(), Some(entry), "the newest to either");
                }
                let main = fixture.files.main();
                // Sectors are not torn here.
                let left = after_a_crash(&main, false, &mut rng);
                std::fs::write(&main, &left).unwrap();
                std::fs::write(fixture.files.ceiling(), synced(&fixture.files.ceiling())).unwrap();
                DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().synced.insert(main, left));
            }
        }
        DISK.set(None);
    }

    #[test]
    fn a_life_is_begun_above_the_floor_and_waits_for_the_disk_once() {
        DISK.set(Some(Disk::default()));
        let mut fixture = Fixture::new();
        let mut last = 0;
        for number in 1..4 {
            fixture = fixture.in_life("n", life(number));
            let first = fixture.mint().unwrap();
            assert!(first.holder.token > last);
            if number > 1 {
                assert!(
                    first.holder.token > last + STEP - 1_000,
                    "{} after {last}",
                    first.holder.token
                );
            }
            DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = Some(0));
            for n in 1..300 {
                assert_eq!(fixture.mint().unwrap().holder.token, first.holder.token + 3 * n);
            }
            DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = None);
            last = first.holder.token + 3 * 299 + 2;
        }
        // Whoever comes back from an earlier life, as another host would, begins one of its own.
        let earlier = fixture.in_life("n", life(1));
        assert!(earlier.mint().unwrap().holder.token > last + STEP - 1_000);
        DISK.set(None);
    }

    #[test]
    fn the_floor_is_raised_before_it_is_reached() {
        DISK.set(Some(Disk::default()));
        let fixture = Fixture::new();
        let mut last = fixture.mint().unwrap();
        let mut raised = 0;
        for _ in 0..2 * STEP / 3 {
            let next = fixture.mint().unwrap();
            assert!(next.holder.token > last.last);
            raised += u64::from(next.ceiling > last.ceiling);
            let on_disk = fixture.files.ceiling();
            let synced = synced(&on_disk);
            let floors = synced.chunks(STRIDE).filter_map(decode).map(|entry| entry.floor);
            assert!(floors.max() > Some(next.last), "above {}", next.last);
            last = next;
        }
        assert!((1..=2).contains(&raised), "{raised} times");
        DISK.set(None);
    }

    #[test]
    fn a_lane_whose_first_was_killed_is_blank_after_a_crash() {
        DISK.set(Some(Disk::default()));
        let fixture = Fixture::new();
        fixture.mint_shared();
        let (_, first) = fixture.files.lock_lane(LANES).unwrap();
        DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = Some(2));
        let killed = fixture.mint_for(&request("n", Mode::Shared));
        assert!(matches!(killed, Err(Fault::Worker)));
        DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = None);
        drop(first);
        // The floor is raised for the first lane, and high enough for both.
        fixture.mint_shared();
        let (_, first) = fixture.files.lock_lane(LANES).unwrap();
        let entries = [fixture.mint_shared(), fixture.mint_shared()];
        drop(first);
        for entry in &entries {
            fixture
                .file
                .write_all_at(&[!0], place(1, entry.sequence) + 40)
                .unwrap();
        }
        let next = fixture.in_life("n", life(2)).mint().unwrap();
        assert!(next.holder.token > entries[1].last);
        DISK.set(None);
    }

    /// It may be long until somebody writes in it.
    #[test]
    fn a_lane_that_a_crash_spoilt_is_blank() {
        let fixture = Fixture::new();
        let entries = [fixture.mint_shared(), fixture.mint_shared()];
        let (_, lane) = fixture.files.lock_lane(LANES).unwrap();
        let beside = fixture.mint_shared();
        drop(lane);
        for entry in &entries {
            fixture.spoil(entry);
        }
        let fixture = fixture.in_life("n", life(2));
        let (_, lane) = fixture.files.lock_lane(LANES).unwrap();
        let mut last = beside.last;
        for _ in 0..3 {
            let next = fixture.mint_shared();
            assert!(next.holder.token > last);
            last = next.last;
        }
        drop(lane);
        assert!(
            fixture.mint_shared().holder.token > last,
            "the lane is used again"
        );
    }

    /// ✘: nothing tells that what was written is gone.
    #[test]
    fn tokens_repeat_if_the_disk_loses_writes_within_a_life() {
        let fixture = Fixture::new();
        fixture.mint().unwrap();
        let written_back = all_of(&fixture.file);
        let granted = fixture.mint().unwrap();
        fixture.file.write_all_at(&written_back, 0).unwrap();
        assert!(fixture.mint().unwrap().holder.token <= granted.holder.token);
    }

    #[test]
    fn damage_is_an_error_until_the_next_life() {
        let fixture = Fixture::new();
        let entries = [fixture.mint().unwrap(), fixture.mint().unwrap()];
        for entry in &entries {
            fixture.spoil(entry);
        }
        assert!(matches!(fixture.read(), Err(Fault::Damaged { .. })));
        let fixture = fixture.in_life("n", life(2));
        assert_eq!(fixture.read().unwrap(), None);
        assert!(fixture.mint().unwrap().holder.token > entries[1].last);
    }

    #[test]
    fn a_first_write_that_tore_is_begun_anew() {
        let fixture = Fixture::new();
        let first = fixture.mint().unwrap();
        let whole = encode(&first);
        for length in [0, 8, 20, whole.len() - 1] {
            fixture.file.set_len(0).unwrap();
            fixture.file.write_all_at(&whole[..length], 0).unwrap();
            assert_eq!(fixture.read().unwrap(), None, "{length} bytes");
            assert!(fixture.mint().unwrap().holder.token > first.holder.token);
        }
        fixture.file.set_len(0).unwrap();
        fixture.file.set_len(512).unwrap();
        assert_eq!(fixture.read().unwrap(), None, "allocated and never written");
    }

    #[test]
    fn any_damage_is_noticed_and_nothing_panics() {
        let fixture = Fixture::new();
        let whole = encode(&fixture.mint().unwrap());
        for at in 0..whole.len() {
            let mut spoilt = whole.clone();
            spoilt[at] ^= 1;
            assert_eq!(decode(&spoilt), None, "byte {at}");
            assert_eq!(decode(&whole[..at]), None, "{at} bytes");
        }
    }

    #[test]
    fn the_file_of_another_name_is_left_alone() {
        let fixture = Fixture::new();
        let entry = fixture.mint().unwrap();
        let minted = fixture.mint_for(&request("m", Mode::Exclusive));
        assert!(matches!(minted, Err(Fault::OtherName { found, .. }) if found == "n"));
        assert_eq!(fixture.read().unwrap(), Some(entry));
    }

    #[test]
    fn the_last_token_is_an_error_not_a_wrap() {
        let fixture = Fixture::new();
        let mut entry = fixture.mint().unwrap();
        entry.last = u64::MAX - 2;
        entry.sequence += 1;
        let at = place(0, entry.sequence);
        fixture.file.write_all_at(&encode(&entry), at).unwrap();
        assert!(matches!(fixture.mint(), Err(Fault::Exhausted { .. })));
    }
}
