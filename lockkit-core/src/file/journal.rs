//! What a lock file says: the token counter, and who was last granted.
//!
//! Two copies take turns, a page apart, each with a checksum; the one with the higher sequence number that is whole
//! counts. A write that tears leaves the other copy, so the counter never goes back.

use std::{
    fs::File,
    io,
    num::NonZeroU32,
    ops::RangeInclusive,
    os::unix::fs::FileExt,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use sha2::{Digest, Sha256};

use super::{
    fault::{Fault, Result},
    space::{self, Files},
};
use crate::spi::Mode;

const MAGIC: &[u8; 8] = b"lockkit1";
/// Copies are this far apart, so that no write to one touches a sector or page of the other.
const STRIDE: u64 = 4_096;
const SUM_BYTES: usize = 16;

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

/// Reserves `tokens` tokens for a holder. The caller has locked out all others who might, and before it hands out a
/// token it [makes them durable](make_durable).
///
/// A new file starts at the clock, in microseconds, so that tokens go on rising if the file was deleted.
pub(super) fn reserve(
    files: &Files,
    file: &File,
    name: &str,
    mode: Mode,
    tokens: NonZeroU32,
    label: Option<&str>,
) -> Result<Entry> {
    let path = files.main();
    let last = read(file, &path)?;
    if let Some(last) = &last {
        last.check_name(name, &path)?;
    }
    let now = micros_since_epoch();
    let (sequence, before) = last
        .as_ref()
        .map_or((0, now), |last| (last.sequence, last.counter));
    let exhausted = || Fault::Exhausted { path: path.clone() };
    let entry = Entry {
        name: name.to_owned(),
        permits: match mode {
            Mode::Exclusive => 1,
            Mode::Shared => 0,
            Mode::Permits(permits) => permits.get(),
        },
        holder: Holding {
            token: before.checked_add(1).ok_or_else(exhausted)?,
            pid: std::process::id(),
            since: now,
            label: label.map(str::to_owned),
        },
        counter: before
            .checked_add(u64::from(tokens.get()))
            .ok_or_else(exhausted)?,
        sequence: sequence.checked_add(1).ok_or_else(exhausted)?,
    };
    write(file, &entry, &path)?;
    Ok(entry)
}

/// Makes reserved tokens survive a crash of the machine, and the file if they are its first.
pub(super) fn make_durable(files: &Files, file: &File, entry: &Entry) -> Result<()> {
    file.sync_data().map_err(Fault::io("sync", &files.main()))?;
    if entry.sequence == 1 {
        files.space().sync()?;
    }
    Ok(())
}

/// Leaves a copy of a grant, alone in its file, for whoever inspects. The counter is elsewhere, so this need not
/// survive a crash.
pub(super) fn note(path: &Path, entry: &Entry) -> Result<()> {
    let file =
        space::open_writable(path)?.ok_or_else(|| Fault::io("open", path)(io::ErrorKind::NotFound.into()))?;
    file.set_len(0)
        .and_then(|()| file.write_all_at(&encode(entry), 0))
        .map_err(Fault::io("write to", path))
}

/// What the file says; `None` if nothing was ever granted.
pub(super) fn read(file: &File, path: &Path) -> Result<Option<Entry>> {
    let mut copies = [Vec::new(), Vec::new()];
    for (at, copy) in [0, STRIDE].into_iter().zip(&mut copies) {
        *copy = read_page(file, at).map_err(Fault::io("read", path))?;
    }
    let newest = copies
        .iter()
        .filter_map(|copy| decode(copy))
        .max_by_key(|entry| entry.sequence);
    if newest.is_some() {
        return Ok(newest);
    }
    // The second copy is first written after the first one was whole and durable. Without it, what is there can only
    // be a first write that never finished, and no token came of it.
    let [first, second] = copies;
    let unfinished = first.starts_with(MAGIC) || first.iter().all(|byte| *byte == 0);
    if second.is_empty() && unfinished {
        return Ok(None);
    }
    Err(Fault::Damaged {
        path: path.to_owned(),
    })
}

fn write(file: &File, entry: &Entry, path: &Path) -> Result<()> {
    // The first entry has the sequence number 1 and goes to the first copy.
    let at = if entry.sequence % 2 == 1 { 0 } else { STRIDE };
    file.write_all_at(&encode(entry), at)
        .map_err(Fault::io("write to", path))
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
    use std::sync::Arc;

    use tempfile::TempDir;

    use super::{super::space::Space, *};
    use crate::{Kind, LockName};

    struct Fixture {
        _dir: TempDir,
        files: Files,
        file: File,
    }

    impl Fixture {
        fn new() -> Self {
            let dir = TempDir::new().unwrap();
            let space = Arc::new(Space::open(dir.path(), "").unwrap());
            let files = space.files(&LockName::new("n").unwrap(), Kind::Lock);
            files.open_or_create(&files.main()).unwrap();
            let file = space::open_writable(&files.main()).unwrap().unwrap();
            Self {
                _dir: dir,
                files,
                file,
            }
        }

        fn mint(&self) -> Result<Entry> {
            let tokens = NonZeroU32::new(3).unwrap();
            reserve(
                &self.files,
                &self.file,
                "n",
                Mode::Exclusive,
                tokens,
                Some("label"),
            )
        }

        fn read(&self) -> Result<Option<Entry>> {
            read(&self.file, &self.files.main())
        }

        /// Spoils a byte of the copy that the entry is in.
        fn spoil(&self, entry: &Entry) {
            let at = if entry.sequence % 2 == 1 { 0 } else { STRIDE } + 40;
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
    fn with_both_copies_damaged_there_are_no_tokens() {
        let fixture = Fixture::new();
        for entry in [fixture.mint().unwrap(), fixture.mint().unwrap()] {
            fixture.spoil(&entry);
        }
        assert!(matches!(fixture.read(), Err(Fault::Damaged { .. })));
        assert!(matches!(fixture.mint(), Err(Fault::Damaged { .. })));
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
        let minted = reserve(
            &fixture.files,
            &fixture.file,
            "m",
            Mode::Exclusive,
            NonZeroU32::MIN,
            None,
        );
        assert!(matches!(minted, Err(Fault::OtherName { found, .. }) if found == "n"));
        assert_eq!(fixture.read().unwrap(), Some(entry));
    }

    #[test]
    fn the_last_token_is_an_error_not_a_wrap() {
        let fixture = Fixture::new();
        let mut entry = fixture.mint().unwrap();
        entry.counter = u64::MAX - 2;
        entry.sequence += 1;
        write(&fixture.file, &entry, &fixture.files.main()).unwrap();
        assert!(matches!(fixture.mint(), Err(Fault::Exhausted { .. })));
    }
}
