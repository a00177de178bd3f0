//! What a lock file says: the token counter, and who was last granted.
//!
//! Two copies take turns, a page apart, each with a checksum; the one with the higher sequence number that is whole
//! counts. A write that tears leaves the other copy, so the counter never goes back. A disk writes whole sectors, so an entry
//! that fits into one does not tear; a longer one is written when the one before is on disk.
//!
//! Holders that do not exclude each other write side by side, each in a lane, which is two copies of its own. So one
//! that is stopped while it writes is in nobody's way. Tokens go on from the highest of all lanes, and a lane gives
//! out only its own: those that leave its number when they are divided by the number of lanes.

use std::{
    fs::File,
    io,
    ops::RangeInclusive,
    os::unix::fs::FileExt,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use sha2::{Digest, Sha256};

use super::{
    fault::{Fault, Result},
    space::Files,
};
use crate::spi::{ClaimRequest, Mode};

const MAGIC: &[u8; 8] = b"lockkit1";
/// Copies are this far apart, so that no write to one touches a sector or page of the other.
const STRIDE: u64 = 4_096;
/// The least that a disk writes as a whole.
const SECTOR: usize = 512;
const SUM_BYTES: usize = 16;
/// The number of those who may write side by side. Whoever writes alone uses the first lane, so most files have no other.
const LANES: u64 = 8;

/// The state after a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The lock's name, in full.
    pub name: String,
    /// How many permits there are: 1 for a lock held alone, 0 for one that is shared.
    pub permits: u32,
    /// Who was granted.
    pub holder: Holding,
    /// The last token that was given out.
    counter: u64,
    /// The number of entries that its lane has had.
    sequence: u64,
}

/// Who was granted. Whether it still holds, only the operating system's lock can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holding {
    pub token: u64,
    pub pid: u32,
    /// Microseconds since 1970.
    pub since: u64,
    pub label: Option<String>,
}

impl Entry {
    /// The tokens of the grant.
    pub(super) fn tokens(&self) -> RangeInclusive<u64> {
        self.holder.token..=self.counter
    }

    /// The last grant was to a shared holder.
    pub(super) fn is_shared(&self) -> bool {
        self.permits == 0
    }

    /// Checks that the file is about this name.
    pub(super) fn check_name(&self, name: &str, path: &Path) -> Result<()> {
        if self.name == name {
            return Ok(());
        }
        Err(Fault::OtherName {
            path: path.to_owned(),
            found: self.name.clone(),
        })
    }
}

/// Reserves tokens for a holder: as many as it asks for if it holds alone, else one. The caller cannot be granted
/// beside one that holds alone, and before it hands out a token it [makes them durable](make_durable).
///
/// A new file starts at the clock, in microseconds, so that tokens go on rising if the file was deleted.
pub(super) fn reserve(files: &Files, file: &File, request: &ClaimRequest) -> Result<Entry> {
    if request.mode == Mode::Exclusive {
        // There is no reader inside, so nobody writes in any lane.
        return append(files, file, request, 0, request.tokens.get());
    }
    let (lane, _lock) = files.lock_lane(LANES)?;
    append(files, file, request, lane, 1)
}

/// Sets a semaphore's size. The caller has it locked, and nobody has a permit.
pub(super) fn set_size(files: &Files, file: &File, request: &ClaimRequest) -> Result<()> {
    append(files, file, request, 0, 1).map(drop)
}

fn append(files: &Files, file: &File, request: &ClaimRequest, lane: u64, tokens: u32) -> Result<Entry> {
    let path = files.main();
    let lanes = read_lanes(file, &path)?;
    let last = newest(&lanes);
    if let Some(last) = last {
        last.check_name(request.name.as_str(), &path)?;
    }
    let now = micros_since_epoch();
    let before = last.map_or(now, |last| last.counter);
    let sequence = usize::try_from(lane)
        .ok()
        .and_then(|lane| lanes.get(lane)?.as_ref())
        .map_or(0, |last| last.sequence);
    let exhausted = || Fault::Exhausted { path: path.clone() };
    let mut token = before.checked_add(1).ok_or_else(exhausted)?;
    if request.mode != Mode::Exclusive {
        let further = (lane + LANES - token % LANES) % LANES;
        token = token.checked_add(further).ok_or_else(exhausted)?;
    }
    let entry = Entry {
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
        counter: token.checked_add(u64::from(tokens) - 1).ok_or_else(exhausted)?,
        sequence: sequence.checked_add(1).ok_or_else(exhausted)?,
    };
    let written = encode(&entry);
    if written.len() > SECTOR {
        // Who wrote the other copy may still wait for the disk, or have been killed: the two must not tear together.
        sync(file, &path)?;
    }
    file.write_all_at(&written, place(lane, entry.sequence))
        .map_err(Fault::io("write to", &path))?;
    Ok(entry)
}

/// Makes reserved tokens survive a crash of the machine, and the file if they are its first.
pub(super) fn make_durable(files: &Files, file: &File, entry: &Entry) -> Result<()> {
    sync(file, &files.main())?;
    // The second of a lane is the first that is granted, where the first set a semaphore's size.
    if entry.sequence <= 2 {
        files.space().sync()?;
    }
    Ok(())
}

fn sync(file: &File, path: &Path) -> Result<()> {
    #[cfg(test)]
    tests::on_disk(file);
    file.sync_data().map_err(Fault::io("sync", path))
}

/// Leaves a copy of a grant, alone in its file, for whoever inspects. The counter is elsewhere, so this need not
/// survive a crash.
pub(super) fn note(file: &File, path: &Path, entry: &Entry) -> Result<()> {
    file.set_len(0)
        .and_then(|()| file.write_all_at(&encode(entry), 0))
        .map_err(Fault::io("write to", path))
}

/// What the file says; `None` if nothing was ever granted.
pub(super) fn read(file: &File, path: &Path) -> Result<Option<Entry>> {
    Ok(newest(&read_lanes(file, path)?).cloned())
}

fn newest(lanes: &[Option<Entry>]) -> Option<&Entry> {
    lanes.iter().flatten().max_by_key(|entry| entry.counter)
}

/// The last entry of each lane, as far as the file goes.
fn read_lanes(file: &File, path: &Path) -> Result<Vec<Option<Entry>>> {
    let mut lanes = Vec::new();
    for lane in 0..LANES {
        let at = 2 * lane * STRIDE;
        let first = read_page(file, at).map_err(Fault::io("read", path))?;
        if first.is_empty() {
            break;
        }
        let second = read_page(file, at + STRIDE).map_err(Fault::io("read", path))?;
        lanes.push(read_lane([first, second], path)?);
    }
    Ok(lanes)
}

fn read_lane(copies: [Vec<u8>; 2], path: &Path) -> Result<Option<Entry>> {
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
    if blank(&second) && (blank(beginning) || first.starts_with(MAGIC)) {
        return Ok(None);
    }
    Err(Fault::Damaged {
        path: path.to_owned(),
    })
}

/// The place in the file where a lane's entry goes. The first has the sequence number 1 and goes to the first copy.
fn place(lane: u64, sequence: u64) -> u64 {
    (2 * lane + (sequence + 1) % 2) * STRIDE
}

fn encode(entry: &Entry) -> Vec<u8> {
    let Entry {
        name,
        permits,
        holder,
        counter,
        sequence,
    } = entry;
    let label = holder.label.as_deref();
    let mut body = Vec::with_capacity(128 + name.len());
    body.extend(sequence.to_le_bytes());
    body.extend(counter.to_le_bytes());
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
    let (sequence, counter, token, since) = (body.u64()?, body.u64()?, body.u64()?, body.u64()?);
    let (permits, pid) = (body.u32()?, body.u32()?);
    let labelled = body.take(1)? == [1];
    let (label, name) = (body.text()?, body.text()?);
    Some(Entry {
        name,
        permits,
        holder: Holding {
            token,
            pid,
            since,
            label: labelled.then_some(label),
        },
        counter,
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

    fn text(&mut self) -> Option<String> {
        let length = u16::from_le_bytes(self.take(2)?.try_into().ok()?);
        String::from_utf8(self.take(usize::from(length))?.to_vec()).ok()
    }
}

/// Up to one stride of bytes.
fn read_page(file: &File, at: u64) -> io::Result<Vec<u8>> {
    let mut page = vec![0; usize::try_from(STRIDE).unwrap_or(usize::MAX)];
    let mut filled = 0;
    while filled < page.len() {
        match file.read_at(&mut page[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    page.truncate(filled);
    Ok(page)
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
        num::NonZeroU32,
        sync::{Arc, Mutex},
        thread,
        time::Duration,
    };

    use tempfile::TempDir;

    use super::{
        super::space::{self, Space},
        *,
    };
    use crate::{Kind, LockName, spi::OwnerId};

    thread_local! {
        /// The file, as this thread last had it synced.
        static ON_DISK: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn on_disk(file: &File) {
        ON_DISK.set(all_of(file));
    }

    fn all_of(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Everything that a crash may leave of a file, some of whose sectors were not synced.
    fn after_a_crash(synced: &[u8], written: &[u8]) -> Vec<Vec<u8>> {
        let mut synced = synced.to_vec();
        synced.resize(written.len(), 0);
        let sectors = synced.chunks(SECTOR).zip(written.chunks(SECTOR));
        let dirty: Vec<_> = (0..)
            .zip(sectors)
            .filter(|(_, (before, after))| before != after)
            .map(|(at, _)| at * SECTOR)
            .collect();
        (0..1_u32 << dirty.len())
            .map(|written_back| {
                let mut left = synced.clone();
                for (bit, at) in dirty.iter().enumerate() {
                    if written_back >> bit & 1 == 1 {
                        let end = (at + SECTOR).min(written.len());
                        left[*at..end].copy_from_slice(&written[*at..end]);
                    }
                }
                left
            })
            .collect()
    }

    fn request(name: &str, mode: Mode) -> ClaimRequest {
        let name = LockName::new(name).unwrap();
        let mut request = ClaimRequest::new(name, mode, Duration::from_secs(30), OwnerId::new(1));
        request.tokens = NonZeroU32::new(3).unwrap();
        request.label = Some("label".into());
        request
    }

    struct Fixture {
        _dir: TempDir,
        files: Files,
        file: File,
    }

    impl Fixture {
        fn new() -> Self {
            Self::of("n")
        }

        fn of(name: &str) -> Self {
            let dir = TempDir::new().unwrap();
            let space = Arc::new(Space::open(dir.path(), "").unwrap());
            let files = space.files(&LockName::new(name).unwrap(), Kind::Lock);
            files.open_or_create(&files.main()).unwrap();
            let file = space::open_writable(&files.main()).unwrap().unwrap();
            Self {
                _dir: dir,
                files,
                file,
            }
        }

        fn mint(&self) -> Result<Entry> {
            reserve(&self.files, &self.file, &request("n", Mode::Exclusive))
        }

        fn mint_shared(&self) -> Entry {
            reserve(&self.files, &self.file, &request("n", Mode::Shared)).unwrap()
        }

        fn read(&self) -> Result<Option<Entry>> {
            read(&self.file, &self.files.main())
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
            assert!(
                seen[0] > last.counter && seen.is_sorted_by(|a, b| a < b),
                "{seen:?}"
            );
            last = fixture.read().unwrap().unwrap();
            let (locked, lock) = fixture.files.lock_lane(LANES).unwrap();
            assert_eq!(locked + lane, LANES - 1);
            stopped.push(lock);
        }
        let none = reserve(&fixture.files, &fixture.file, &request("n", Mode::Shared));
        assert!(matches!(none, Err(Fault::LedgerBusy { .. })));
        stopped.pop();
        assert!(fixture.mint_shared().holder.token > last.counter);
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

    /// Those who mint side by side, or were killed before their sync, leave more than one write that a crash may tear.
    #[test]
    fn whatever_a_crash_tears_one_copy_is_whole() {
        let name = "n".repeat(LockName::MAX_BYTES);
        for name in ["n", &name] {
            for mode in [Mode::Shared, Mode::Exclusive] {
                let fixture = Fixture::of(name);
                on_disk(&fixture.file);
                let mut granted = 0;
                for n in 0..12_usize {
                    let mut request = request(name, mode);
                    request.label = Some("l".repeat(n * 37 % 257).into());
                    let entry = reserve(&fixture.files, &fixture.file, &request).unwrap();
                    let synced = ON_DISK.with_borrow(Clone::clone);
                    let states = after_a_crash(&synced, &all_of(&fixture.file));
                    for left in &states {
                        let copy = tempfile::tempfile().unwrap();
                        copy.write_all_at(left, 0).unwrap();
                        let read = read(&copy, Path::new("left by a crash"));
                        let counter = read.map(|last| last.map_or(0, |last| last.counter));
                        assert!(
                            counter.as_ref().is_ok_and(|counter| *counter >= granted),
                            "{} bytes, {mode:?}, entry {n}: {counter:?} after {granted}",
                            name.len()
                        );
                    }
                    // Two in three are stopped or killed before they get that far.
                    if n % 3 == 2 {
                        make_durable(&fixture.files, &fixture.file, &entry).unwrap();
                        granted = entry.counter;
                    }
                }
            }
        }
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
        let minted = reserve(&fixture.files, &fixture.file, &request("m", Mode::Exclusive));
        assert!(matches!(minted, Err(Fault::OtherName { found, .. }) if found == "n"));
        assert_eq!(fixture.read().unwrap(), Some(entry));
    }

    #[test]
    fn the_last_token_is_an_error_not_a_wrap() {
        let fixture = Fixture::new();
        let mut entry = fixture.mint().unwrap();
        entry.counter = u64::MAX - 2;
        entry.sequence += 1;
        let at = place(0, entry.sequence);
        fixture.file.write_all_at(&encode(&entry), at).unwrap();
        assert!(matches!(fixture.mint(), Err(Fault::Exhausted { .. })));
    }
}
