//! The record in a lock's file: the token counter, and the last grant.
//!
//! There are two copies, a page apart, each with a checksum. Writes alternate between them, and the whole copy with
//! the higher sequence number is valid. A killed writer leaves the other copy, so the counter never goes back.
//!
//! Only a crash of the host takes back what was written, so a grant does not wait for the disk. Each record has a
//! *floor* above its last token. Within one boot of the host, tokens continue from the last one; in the next boot,
//! from the highest floor. A floor above a token is on disk before the token is granted. The floor is raised by many
//! tokens at a time, in the lock's file and in a second file of the same layout, which is written for nothing else. A
//! crash may tear both copies in the first file, which change all the time. It never tears both in the second, where
//! one is on disk before the other is written.
//!
//! Where the system does not tell its boots apart, each grant is on disk before it is returned, with its last token for
//! the floor. The next token is then above the floor, whoever wrote it. So processes that know the boot and others may
//! share files.
//!
//! Shared holders and permits do not exclude each other, so they write side by side, each in a *lane*: two copies of its
//! own in either file. So a writer that is stopped blocks nobody. Tokens continue from the highest of all lanes. No two
//! lanes mint the same token: each has those that leave its number when divided by the number of lanes.

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
    boot::BootId,
    error::{FileError, Result},
    layout::{self, Files},
};

const MAGIC: &[u8; 8] = b"lockkit1";
/// The distance between copies: no write to one touches a sector or a page of the other.
const STRIDE: usize = 4_096;
/// The least that a disk writes as a whole, in bytes.
const SECTOR: usize = 512;
const SUM_BYTES: usize = 16;
/// The number of writers side by side. An exclusive holder uses the first lane, so most files have no other.
const LANES: u64 = 8;
/// The number of tokens by which the floor is raised. A new boot skips as many: a sixtieth of a second of the clock
/// at which new counters start.
const STEP: u64 = 1 << 14;

/// The state after a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TokenRecord {
    /// The lock's full name.
    pub name: String,
    /// The semaphore's size; 1 for an exclusive grant, 0 for a shared one.
    pub permits: u32,
    pub grantee: Grantee,
    /// The last minted token.
    last: u64,
    /// The boot in which `last` is valid; `None` if it was on disk before the grant.
    boot: Option<BootId>,
    /// The highest token that this boot may grant without waiting for the disk: a floor at least as high is there. 0 until one is.
    ceiling: u64,
    /// The token above which any other boot continues. It rises with each record. Without a boot id, it is the last token.
    floor: u64,
    /// The number of records so far in its lane.
    sequence: u64,
}

/// The process that was last granted. Only the operating system's lock tells whether it still holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grantee {
    pub token: u64,
    pub pid: u32,
    /// Microseconds since 1970.
    pub since: u64,
    pub label: Option<String>,
}

impl TokenRecord {
    /// Returns the tokens of the grant: of the hold, and of those that it is passed on to within its client.
    pub(crate) fn tokens(&self) -> RangeInclusive<u64> {
        self.grantee.token..=self.last
    }

    /// Returns the token above which `boot` continues.
    fn above(&self, boot: Option<BootId>) -> u64 {
        if self.is_of(boot) { self.last } else { self.floor }
    }

    /// Returns whether it names another boot than `boot`. Its holder may live all the same, in a container with a boot id of its own.
    pub(crate) fn is_of_another(&self, boot: Option<BootId>) -> bool {
        self.boot.is_some() && self.boot != boot
    }

    fn is_of(&self, boot: Option<BootId>) -> bool {
        self.boot.is_some() && self.boot == boot
    }

    /// Checks that the file belongs to this name.
    pub(crate) fn check_name(&self, name: &str, path: &Path) -> Result<()> {
        if self.name == name {
            return Ok(());
        }
        Err(FileError::OtherName {
            path: path.to_owned(),
            found: self.name.clone(),
        })
    }
}

/// Mints tokens for a holder that has its lock: as many as it asks for if it is exclusive, else one.
///
/// A new file starts at the clock, in microseconds, so that tokens keep rising if the file was deleted. It calls
/// `require_worker` before it waits for the disk, and before it has written anything.
pub(crate) fn mint(
    files: &Files,
    file: &File,
    request: &ClaimRequest,
    require_worker: impl FnOnce() -> Result<()>,
) -> Result<TokenRecord> {
    let record = if request.mode == Mode::Exclusive {
        // There is no other holder, so nobody writes in any lane.
        append(files, file, request, (0, request.tokens.get()), require_worker)?
    } else {
        let (lane, _lock) = files.lock_lane(LANES)?;
        append(files, file, request, (lane, 1), require_worker)?
    };
    if record.boot.is_none() {
        sync(file, &files.main())?;
        // A lane's first record may have set a semaphore's size; its second is then the first grant.
        if record.sequence <= 2 {
            files.layout().sync()?;
        }
    }
    Ok(record)
}

/// Sets a semaphore's size. The caller has the size locked, and nobody holds a permit.
pub(crate) fn set_size(files: &Files, file: &File, request: &ClaimRequest) -> Result<()> {
    append(files, file, request, (0, 1), || Ok(())).map(drop)
}

/// Appends a record to a lane, with so many tokens.
fn append(
    files: &Files,
    file: &File,
    request: &ClaimRequest,
    (lane, tokens): (u64, u32),
    require_worker: impl FnOnce() -> Result<()>,
) -> Result<TokenRecord> {
    let path = files.main();
    let boot = files.layout().boot();
    let lanes = read_main(files, file)?;
    let newest = newest(&lanes);
    if let Some(newest) = newest {
        newest.check_name(request.name.as_str(), &path)?;
    }
    let exhausted = || FileError::Exhausted { path: path.clone() };
    let next = |above: u64| {
        let mut token = above.checked_add(1)?;
        if request.mode != Mode::Exclusive {
            token = token.checked_add((lane + LANES - token % LANES) % LANES)?;
        }
        Some((token, token.checked_add(u64::from(tokens) - 1)?))
    };
    let now = micros_since_epoch();
    let records = || lanes.iter().flatten();
    let mut above = records().map(|record| record.above(boot)).max().unwrap_or(now);
    let previous = of_lane(&lanes, lane);
    let of_this_boot = records().filter(|record| record.is_of(boot));
    let ceiling = of_this_boot.map(|record| record.ceiling).max().unwrap_or(0);
    // The first record of a boot raises the floor in each lane, which tells a lane of this boot from one that a crash
    // tore. A writer that was killed meanwhile has left no ceiling.
    let is_begun = previous.is_some_and(|previous| previous.is_of(boot) && previous.ceiling > 0);
    let is_covered = is_begun && next(above).is_some_and(|(_, last)| last <= ceiling);
    // Whoever looks would find a lock that is taken, and the record of a holder before, of an earlier boot perhaps. And it finds a ledger
    // wherever there is a record.
    let ledger = if is_covered {
        None
    } else {
        require_worker()?;
        match files.share_ledger() {
            // By a process that was stopped while it looked. It keeps nobody out.
            Err(FileError::StillLocked { .. }) => None,
            shared => Some(shared?),
        }
    };
    let ceilings = if boot.is_none() || is_covered {
        None
    } else {
        // After a crash, the main file may be behind what was granted.
        let ceilings = CeilingFile::open(files)?;
        above = above.max(ceilings.highest());
        Some(ceilings)
    };
    let (token, last) = next(above).ok_or_else(exhausted)?;
    let floor = match newest {
        _ if boot.is_none() => last,
        Some(newest) => newest.floor.checked_add(1).ok_or_else(exhausted)?,
        None => last,
    };
    let mut record = TokenRecord {
        name: request.name.as_str().to_owned(),
        permits: match request.mode {
            Mode::Exclusive => 1,
            Mode::Shared => 0,
            Mode::Permits(permits) => permits.get(),
        },
        grantee: Grantee {
            token,
            pid: std::process::id(),
            since: now,
            label: request.label.as_deref().map(str::to_owned),
        },
        last,
        boot,
        ceiling: if is_covered { ceiling } else { 0 },
        floor,
        sequence: previous.map_or(0, |previous| previous.sequence),
    };
    if let Some(mut ceilings) = ceilings {
        record.floor = floor.max(last.saturating_add(STEP));
        // As in `write_through`. From the write on, whoever looks sees this grant.
        sync(file, &path)?;
        write(file, &path, lane, &mut record)?;
        drop(ledger);
        sync(file, &path)?;
        // Who knows no boots finds the floor nowhere else, and a crash may tear either copy.
        write_through(file, &path, lane, &mut record)?;
        ceilings.raise(lane, &record)?;
        files.layout().sync()?;
        record.ceiling = record.floor;
    }
    write(file, &path, lane, &mut record)?;
    Ok(record)
}

/// The floors that are on disk, as the latest record of each lane.
struct CeilingFile {
    file: File,
    path: PathBuf,
    lanes: Vec<Option<TokenRecord>>,
}

impl CeilingFile {
    fn open(files: &Files) -> Result<Self> {
        let path = files.ceiling();
        let Some((file, _)) = layout::create_writable(&path)? else {
            return Err(FileError::Replaced { path });
        };
        let lanes = read_lanes(&file, &path, |_| Ok(false))?;
        Ok(Self { file, path, lanes })
    }

    fn highest(&self) -> u64 {
        newest(&self.lanes).map_or(0, |record| record.floor)
    }

    /// Puts the floor of a record on disk. The caller has the lane locked.
    fn raise(&mut self, lane: u64, record: &TokenRecord) -> Result<()> {
        let mut record = record.clone();
        record.sequence = of_lane(&self.lanes, lane).map_or(0, |last| last.sequence);
        write_through(&self.file, &self.path, lane, &mut record)
    }
}

/// Writes the next record of a lane, and waits until it is on disk.
fn write_through(file: &File, path: &Path, lane: u64, record: &mut TokenRecord) -> Result<()> {
    // The writer of the other copy may have been killed before that was on disk: the two must not tear together.
    sync(file, path)?;
    write(file, path, lane, record)?;
    sync(file, path)
}

/// Writes the next record of a lane.
fn write(file: &File, path: &Path, lane: u64, record: &mut TokenRecord) -> Result<()> {
    let next = record.sequence.checked_add(1);
    record.sequence = next.ok_or_else(|| FileError::Exhausted {
        path: path.to_owned(),
    })?;
    let written = encode(record);
    if record.boot.is_none() && written.len() > SECTOR {
        // As above; or its writer still waits for the disk.
        sync(file, path)?;
    }
    file.write_all_at(&written, offset(lane, record.sequence))
        .map_err(FileError::io("write to", path))
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
    file.sync_data().map_err(FileError::io("sync", path))
}

/// Removes the note of a holder before.
pub(crate) fn clear_note(file: &File, path: &Path) -> Result<()> {
    file.set_len(0).map_err(FileError::io("write to", path))
}

/// Writes a grant to a file of its own, for inspections. The counter is elsewhere, so this need not survive a crash.
pub(crate) fn write_note(file: &File, path: &Path, record: &TokenRecord) -> Result<()> {
    file.set_len(0)
        .and_then(|()| file.write_all_at(&encode(record), 0))
        .map_err(FileError::io("write to", path))
}

/// Reads what [`write_note`] wrote; `None` if there is nothing.
pub(crate) fn read_note(file: &File, path: &Path) -> Result<Option<TokenRecord>> {
    Ok(newest(&read_lanes(file, path, |_| Ok(false))?).cloned())
}

/// Reads the main file; `None` if nothing was ever granted, or a crash of the host tore it.
pub(crate) fn read(files: &Files, file: &File) -> Result<Option<TokenRecord>> {
    Ok(newest(&read_main(files, file)?).cloned())
}

fn newest(lanes: &[Option<TokenRecord>]) -> Option<&TokenRecord> {
    lanes.iter().flatten().max_by_key(|record| record.floor)
}

fn of_lane(lanes: &[Option<TokenRecord>], lane: u64) -> Option<&TokenRecord> {
    lanes.get(usize::try_from(lane).ok()?)?.as_ref()
}

fn read_main(files: &Files, file: &File) -> Result<Vec<Option<TokenRecord>>> {
    read_lanes(file, &files.main(), |lane| is_from_earlier_boot(files, lane))
}

/// Returns whether the lane has a floor on disk, and none of this boot. Then nothing in it is of this boot, and if a
/// crash tore it that does not matter: nobody holds from before the crash.
fn is_from_earlier_boot(files: &Files, lane: u64) -> Result<bool> {
    let path = files.ceiling();
    let (Some(boot), Some(file)) = (files.layout().boot(), layout::open(&path)?) else {
        return Ok(false);
    };
    let lanes = read_lanes(&file, &path, |_| Ok(false))?;
    Ok(of_lane(&lanes, lane).is_some_and(|last| !last.is_of(Some(boot))))
}

/// Returns the last record of each lane, as far as the file goes. A lane without a whole copy is an error, unless it
/// `may_be_torn`; then it is blank.
fn read_lanes(
    file: &File,
    path: &Path,
    may_be_torn: impl Fn(u64) -> Result<bool>,
) -> Result<Vec<Option<TokenRecord>>> {
    let mut lanes = Vec::new();
    for lane in 0..LANES {
        let look = || read_at(file, offset(lane, 1), 2 * STRIDE).map_err(FileError::io("read", path));
        let mut copies = look()?;
        if copies.is_empty() {
            break;
        }
        let record = match read_lane(halves(&copies)) {
            Ok(record) => record,
            Err(BothTorn) if may_be_torn(lane)? => None,
            Err(BothTorn) => {
                // A writer may have been at it, and has made it whole before anything else told that it is in use.
                copies = look()?;
                read_lane(halves(&copies)).map_err(|BothTorn| FileError::Damaged {
                    path: path.to_owned(),
                })?
            }
        };
        lanes.push(record);
        if copies.len() < 2 * STRIDE {
            break;
        }
    }
    Ok(lanes)
}

/// Returns the two copies of a lane, as far as they are there.
fn halves(copies: &[u8]) -> [&[u8]; 2] {
    let (first, second) = copies.split_at(copies.len().min(STRIDE));
    [first, second]
}

/// A lane without a whole copy.
struct BothTorn;

fn read_lane(copies: [&[u8]; 2]) -> Result<Option<TokenRecord>, BothTorn> {
    let newest = copies
        .iter()
        .filter_map(|copy| decode(copy))
        .max_by_key(|record| record.sequence);
    if newest.is_some() {
        return Ok(newest);
    }
    // The second copy is first written when the first is whole. Without it, the first can only be a write that never
    // finished, perhaps without its beginning, and granted no token. If a later lane is in use, the second is there
    // and blank.
    let blank = |copy: &[u8]| copy.iter().all(|byte| *byte == 0);
    let [first, second] = copies;
    let (beginning, _) = first.split_at(SECTOR.min(first.len()));
    if blank(second) && (blank(beginning) || first.starts_with(MAGIC)) {
        return Ok(None);
    }
    Err(BothTorn)
}

/// Returns the offset of a lane's record in the file. The first has the sequence number 1 and is the first copy.
fn offset(lane: u64, sequence: u64) -> u64 {
    (2 * lane + (sequence + 1) % 2) * STRIDE as u64
}

fn encode(record: &TokenRecord) -> Vec<u8> {
    let TokenRecord {
        name,
        permits,
        grantee,
        last,
        boot,
        ceiling,
        floor,
        sequence,
    } = record;
    let label = grantee.label.as_deref();
    let mut body = Vec::with_capacity(128 + name.len());
    body.extend(sequence.to_le_bytes());
    body.extend(floor.to_le_bytes());
    body.extend(grantee.token.to_le_bytes());
    body.extend(grantee.since.to_le_bytes());
    body.extend(permits.to_le_bytes());
    body.extend(grantee.pid.to_le_bytes());
    body.push(u8::from(label.is_some()));
    for text in [label.unwrap_or_default(), name] {
        let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
        body.extend(length.to_le_bytes());
        body.extend(&text.as_bytes()[..usize::from(length)]);
    }
    if let Some(boot) = boot {
        body.extend(boot.bytes());
        body.extend(last.to_le_bytes());
        body.extend(ceiling.to_le_bytes());
    }
    let mut copy = MAGIC.to_vec();
    copy.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    copy.extend(&Sha256::digest(&body)[..SUM_BYTES]);
    copy.extend(body);
    copy
}

/// Decodes a copy; `None` if it is not whole.
fn decode(copy: &[u8]) -> Option<TokenRecord> {
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
    let boot = body.boot();
    let (last, ceiling) = match boot {
        Some(_) => (body.u64()?, body.u64()?),
        None => (floor, 0),
    };
    Some(TokenRecord {
        name,
        permits,
        grantee: Grantee {
            token,
            pid,
            since,
            label: labelled.then_some(label),
        },
        last,
        boot,
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

    fn boot(&mut self) -> Option<BootId> {
        BootId::from_bytes(self.take(BootId::BYTES)?.try_into().ok()?)
    }

    fn text(&mut self) -> Option<String> {
        let length = u16::from_le_bytes(self.take(2)?.try_into().ok()?);
        String::from_utf8(self.take(usize::from(length))?.to_vec()).ok()
    }
}

/// Reads up to `length` bytes.
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
    // A clock before 1970, or after the year 584,000, is no use.
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
    use crate::layout::Layout;
    use lockkit_core::{LockKind, LockName, spi::OwnerId};

    /// The disk of a host that may crash, instead of the real one.
    #[derive(Debug, Default)]
    struct Disk {
        /// The files, as they were last synced.
        synced: HashMap<PathBuf, Vec<u8>>,
        /// The number of syncs after which the process is killed.
        killed_after: Option<usize>,
        /// Each sync tries to lock it, and notes whether it did.
        looked_at: Option<(PathBuf, Vec<bool>)>,
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
                    return Some(Err(FileError::WorkerDied));
                };
                *left = fewer;
            }
            if let Some((path, looks)) = &mut disk.looked_at {
                looks.push(File::open(path).unwrap().try_lock().is_ok());
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

    /// Returns a file as a crash may leave it: each sector that was not synced is old, new or, if it `tears`, half of
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

    fn boot(number: u8) -> Option<BootId> {
        BootId::from_bytes([number; BootId::BYTES])
    }

    struct Fixture {
        dir: TempDir,
        files: Files,
        file: File,
    }

    impl Fixture {
        fn new() -> Self {
            Self::of("n", boot(1))
        }

        fn of(name: &str, boot: Option<BootId>) -> Self {
            Self::at(TempDir::new().unwrap(), name, boot)
        }

        fn at(dir: TempDir, name: &str, boot: Option<BootId>) -> Self {
            let layout = Arc::new(Layout::open_in(boot, dir.path(), "").unwrap());
            let files = layout.files(&LockName::new(name).unwrap(), LockKind::Lock);
            files.open_or_create(&files.main()).unwrap();
            let (file, _) = layout::open_writable(&files.main()).unwrap().unwrap();
            Self { dir, files, file }
        }

        /// Returns the same files in another boot.
        fn in_boot(self, name: &str, boot: Option<BootId>) -> Self {
            Self::at(self.dir, name, boot)
        }

        fn mint_for(&self, request: &ClaimRequest) -> Result<TokenRecord> {
            mint(&self.files, &self.file, request, || Ok(()))
        }

        fn mint(&self) -> Result<TokenRecord> {
            self.mint_for(&request("n", Mode::Exclusive))
        }

        fn mint_shared(&self) -> TokenRecord {
            self.mint_for(&request("n", Mode::Shared)).unwrap()
        }

        fn read(&self) -> Result<Option<TokenRecord>> {
            read(&self.files, &self.file)
        }

        /// Spoils a byte of the copy that the record is in.
        fn spoil(&self, record: &TokenRecord) {
            let at = offset(0, record.sequence) + 40;
            let mut byte = [0];
            self.file.read_exact_at(&mut byte, at).unwrap();
            self.file.write_all_at(&[!byte[0]], at).unwrap();
        }
    }

    /// The first grant of a boot writes whole copies over torn ones, and then the floor by which that would be known.
    #[test]
    fn a_lane_that_is_made_whole_meanwhile_is_not_damaged() {
        let fixture = Fixture::new();
        let [first, second] = [fixture.mint().unwrap(), fixture.mint().unwrap()];
        let whole = all_of(&fixture.file);
        fixture.spoil(&first);
        fixture.spoil(&second);
        let path = fixture.files.main();
        let torn = read_lanes(&fixture.file, &path, |_| Ok(false));
        assert!(matches!(torn, Err(FileError::Damaged { .. })), "{torn:?}");
        let lanes = read_lanes(&fixture.file, &path, |_| {
            fixture.file.write_all_at(&whole, 0).unwrap();
            Ok(false)
        });
        assert_eq!(newest(&lanes.unwrap()), Some(&second));
    }

    #[test]
    fn what_is_written_is_read_and_tokens_continue() {
        let fixture = Fixture::new();
        assert_eq!(fixture.read().unwrap(), None);
        let began = micros_since_epoch();
        let mut last = fixture.mint().unwrap();
        assert!(last.grantee.token >= began, "a new counter starts at the clock");
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
            // The write did not finish, so its tokens were never granted.
            before = fixture.mint().unwrap();
            assert_eq!(before.sequence, torn.sequence);
        }
    }

    #[test]
    fn a_writer_stopped_in_its_lane_blocks_nobody() {
        let fixture = Fixture::new();
        let mut last = fixture.mint().unwrap();
        let mut stopped = Vec::new();
        for lane in (0..LANES).rev() {
            // The last one finds the only lane that is left.
            let mut seen = vec![fixture.mint_shared().grantee.token];
            for _ in 0..3 {
                seen.push(fixture.mint_shared().grantee.token);
            }
            assert!(seen[0] > last.last && seen.is_sorted_by(|a, b| a < b), "{seen:?}");
            last = fixture.read().unwrap().unwrap();
            let (locked, lock) = fixture.files.lock_lane(LANES).unwrap();
            assert_eq!(locked + lane, LANES - 1);
            stopped.push(lock);
        }
        let none = fixture.mint_for(&request("n", Mode::Shared));
        assert!(matches!(none, Err(FileError::StillLocked { .. })));
        stopped.pop();
        assert!(fixture.mint_shared().grantee.token > last.last);
    }

    #[test]
    fn writers_side_by_side_share_no_token() {
        let fixture = Fixture::new();
        let threads = 2 * usize::try_from(LANES).unwrap();
        let tokens = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let mut last = 0;
                    for _ in 0..50 {
                        let token = fixture.mint_shared().grantee.token;
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
        for record in [fixture.mint().unwrap(), fixture.mint().unwrap()] {
            fixture.spoil(&record);
        }
        assert!(matches!(fixture.read(), Err(FileError::Damaged { .. })));
        assert!(matches!(fixture.mint(), Err(FileError::Damaged { .. })));
    }

    /// A writer may be killed at any point while it raises the floor, and a crash may leave any mixture of unsynced
    /// sectors.
    #[test]
    fn tokens_rise_whatever_a_crash_tears() {
        let seed =
            std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
        println!("LOCKKIT_SEED={seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let long = "n".repeat(LockName::MAX_BYTES);
        for round in 0..60 {
            let name = if round % 2 == 0 { "n" } else { &long };
            DISK.set(Some(Disk::default()));
            let mut granted = 0;
            let mut fixture = Fixture::of(name, boot(1));
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
                        Ok(record) => {
                            assert!(
                                *record.tokens().start() > granted,
                                "{:?} after {granted}",
                                record.tokens()
                            );
                            granted = *record.tokens().end();
                        }
                        Err(killed) => assert!(matches!(killed, FileError::WorkerDied), "{killed}"),
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
                fixture = fixture.in_boot(name, boot(number + 1));
            }
        }
        DISK.set(None);
    }

    /// Without boot ids, there is no second file.
    #[test]
    fn one_copy_is_whole_whatever_a_crash_tears() {
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
                    // Two in three are killed before they are granted. A long record takes one sync more.
                    let syncs = (n % 3 != 2).then_some(usize::from(name.len() > 1));
                    DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = syncs);
                    let minted = fixture.mint_for(&request);
                    for _ in 0..64 {
                        let left = after_a_crash(&fixture.files.main(), false, &mut rng);
                        let copy = tempfile::tempfile().unwrap();
                        copy.write_all_at(&left, 0).unwrap();
                        let read = read_note(&copy, Path::new("left by a crash"));
                        let last = read.map(|record| record.map_or(0, |record| record.last));
                        assert!(
                            last.as_ref().is_ok_and(|last| *last >= granted),
                            "{} bytes, {mode:?}, record {n}: {last:?} after {granted}",
                            name.len()
                        );
                    }
                    assert_eq!(minted.is_ok(), syncs.is_none());
                    granted = minted.map_or(granted, |record| record.last);
                }
            }
        }
        DISK.set(None);
    }

    /// As in a container without `/proc`. They continue from the floor and sync each token.
    #[test]
    fn processes_that_know_no_boots_may_take_part() {
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
                    let knows_no_boots = rng.bool();
                    fixture = fixture.in_boot(name, if knows_no_boots { None } else { boot(number) });
                    let mut request = request(name, if rng.bool() { Mode::Shared } else { Mode::Exclusive });
                    request.tokens = NonZeroU32::new(rng.u32(1..9_000)).unwrap();
                    let record = match fixture.mint_for(&request) {
                        // A record longer than a sector may be torn.
                        Err(FileError::Damaged { .. }) if knows_no_boots && round % 2 == 1 => continue,
                        minted => minted.unwrap(),
                    };
                    assert!(
                        *record.tokens().start() > granted,
                        "{:?} after {granted}",
                        record.tokens()
                    );
                    granted = *record.tokens().end();
                    assert_eq!(fixture.read().unwrap(), Some(record), "the newest to either");
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
    fn a_boot_begins_above_the_floor_and_syncs_once() {
        DISK.set(Some(Disk::default()));
        let mut fixture = Fixture::new();
        let mut last = 0;
        for number in 1..4 {
            fixture = fixture.in_boot("n", boot(number));
            let first = fixture.mint().unwrap();
            assert!(first.grantee.token > last);
            if number > 1 {
                assert!(
                    first.grantee.token > last + STEP - 1_000,
                    "{} after {last}",
                    first.grantee.token
                );
            }
            DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = Some(0));
            for n in 1..300 {
                assert_eq!(fixture.mint().unwrap().grantee.token, first.grantee.token + 3 * n);
            }
            DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = None);
            last = first.grantee.token + 3 * 299 + 2;
        }
        // A process of an earlier boot, as on another host, begins a boot of its own.
        let earlier = fixture.in_boot("n", boot(1));
        assert!(earlier.mint().unwrap().grantee.token > last + STEP - 1_000);
        DISK.set(None);
    }

    /// Whoever looked would name a holder from before the restart.
    #[test]
    fn nobody_looks_before_the_first_record_of_a_boot() {
        for mode in [Mode::Exclusive, Mode::Shared] {
            let fixture = Fixture::new();
            fixture.mint_for(&request("n", mode)).unwrap();
            let fixture = fixture.in_boot("n", boot(2));
            let looked_at = Some((fixture.dir.path().join("n.ledger"), Vec::new()));
            DISK.set(Some(Disk {
                looked_at,
                ..Disk::default()
            }));
            fixture.mint_for(&request("n", mode)).unwrap();
            let (ledger, looks) = DISK.take().unwrap().looked_at.unwrap();
            assert!(looks.len() > 1, "{mode:?}: {looks:?}");
            for (at, may_look) in looks.iter().enumerate() {
                assert_eq!(
                    *may_look,
                    at > 0,
                    "{mode:?}: it waits for no more than it has to: {looks:?}"
                );
            }
            assert!(File::open(ledger).unwrap().try_lock().is_ok(), "{mode:?}");
        }
    }

    /// An inspection that is stopped keeps nobody out.
    #[test]
    fn a_ledger_that_stays_locked_stops_no_first_grant() {
        let fixture = Fixture::new();
        let first = fixture.mint().unwrap();
        let ledger = File::open(fixture.dir.path().join("n.ledger")).unwrap();
        ledger.try_lock().unwrap();
        let next = fixture.in_boot("n", boot(2)).mint().unwrap();
        assert!(next.grantee.token > first.last);
    }

    #[test]
    fn the_floor_is_raised_before_it_is_reached() {
        DISK.set(Some(Disk::default()));
        let fixture = Fixture::new();
        let mut last = fixture.mint().unwrap();
        let mut raised = 0;
        for _ in 0..2 * STEP / 3 {
            let next = fixture.mint().unwrap();
            assert!(next.grantee.token > last.last);
            raised += u64::from(next.ceiling > last.ceiling);
            let on_disk = fixture.files.ceiling();
            let synced = synced(&on_disk);
            let floors = synced
                .chunks(STRIDE)
                .filter_map(decode)
                .map(|record| record.floor);
            assert!(floors.max() > Some(next.last), "above {}", next.last);
            last = next;
        }
        assert!((1..=2).contains(&raised), "{raised} times");
        DISK.set(None);
    }

    #[test]
    fn a_lane_whose_first_writer_died_is_blank_after_a_crash() {
        DISK.set(Some(Disk::default()));
        let fixture = Fixture::new();
        fixture.mint_shared();
        let (_, first) = fixture.files.lock_lane(LANES).unwrap();
        DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = Some(2));
        let killed = fixture.mint_for(&request("n", Mode::Shared));
        assert!(matches!(killed, Err(FileError::WorkerDied)));
        DISK.with_borrow_mut(|disk| disk.as_mut().unwrap().killed_after = None);
        drop(first);
        // The floor is raised for the first lane, and high enough for both.
        fixture.mint_shared();
        let (_, first) = fixture.files.lock_lane(LANES).unwrap();
        let records = [fixture.mint_shared(), fixture.mint_shared()];
        drop(first);
        for record in &records {
            fixture
                .file
                .write_all_at(&[!0], offset(1, record.sequence) + 40)
                .unwrap();
        }
        let next = fixture.in_boot("n", boot(2)).mint().unwrap();
        assert!(next.grantee.token > records[1].last);
        DISK.set(None);
    }

    /// It may be long until the lane is written again.
    #[test]
    fn a_lane_that_a_crash_tore_is_blank() {
        let fixture = Fixture::new();
        let records = [fixture.mint_shared(), fixture.mint_shared()];
        let (_, lane) = fixture.files.lock_lane(LANES).unwrap();
        let beside = fixture.mint_shared();
        drop(lane);
        for record in &records {
            fixture.spoil(record);
        }
        let fixture = fixture.in_boot("n", boot(2));
        let (_, lane) = fixture.files.lock_lane(LANES).unwrap();
        let mut last = beside.last;
        for _ in 0..3 {
            let next = fixture.mint_shared();
            assert!(next.grantee.token > last);
            last = next.last;
        }
        drop(lane);
        assert!(
            fixture.mint_shared().grantee.token > last,
            "the lane is used again"
        );
    }

    /// ✘: nothing shows that writes were lost.
    #[test]
    fn tokens_repeat_if_the_disk_loses_writes_within_a_boot() {
        let fixture = Fixture::new();
        fixture.mint().unwrap();
        let written_back = all_of(&fixture.file);
        let granted = fixture.mint().unwrap();
        fixture.file.write_all_at(&written_back, 0).unwrap();
        assert!(fixture.mint().unwrap().grantee.token <= granted.grantee.token);
    }

    #[test]
    fn damage_is_an_error_until_the_next_boot() {
        let fixture = Fixture::new();
        let records = [fixture.mint().unwrap(), fixture.mint().unwrap()];
        for record in &records {
            fixture.spoil(record);
        }
        assert!(matches!(fixture.read(), Err(FileError::Damaged { .. })));
        let fixture = fixture.in_boot("n", boot(2));
        assert_eq!(fixture.read().unwrap(), None);
        assert!(fixture.mint().unwrap().grantee.token > records[1].last);
    }

    #[test]
    fn a_torn_first_write_is_started_again() {
        let fixture = Fixture::new();
        let first = fixture.mint().unwrap();
        let whole = encode(&first);
        for length in [0, 8, 20, whole.len() - 1] {
            fixture.file.set_len(0).unwrap();
            fixture.file.write_all_at(&whole[..length], 0).unwrap();
            assert_eq!(fixture.read().unwrap(), None, "{length} bytes");
            assert!(fixture.mint().unwrap().grantee.token > first.grantee.token);
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
        let record = fixture.mint().unwrap();
        let minted = fixture.mint_for(&request("m", Mode::Exclusive));
        assert!(matches!(minted, Err(FileError::OtherName { found, .. }) if found == "n"));
        assert_eq!(fixture.read().unwrap(), Some(record));
    }

    #[test]
    fn the_last_token_is_an_error_not_a_wrap() {
        let fixture = Fixture::new();
        let mut record = fixture.mint().unwrap();
        record.last = u64::MAX - 2;
        record.sequence += 1;
        let at = offset(0, record.sequence);
        fixture.file.write_all_at(&encode(&record), at).unwrap();
        assert!(matches!(fixture.mint(), Err(FileError::Exhausted { .. })));
    }
}
