//! Finds the holders of a name. The operating system's locks say whether there are any, the files only say which.

use std::{
    fs::File,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use lockkit_core::{LockKind, LockName};
use rustix::{
    fs::{AtFlags, unlinkat},
    io::Errno,
};

use crate::{
    backend::MAX_PERMITS,
    error::{FileError, Result},
    flock::Flock,
    hold::wake_watchers,
    layout::{self, Files},
    token_record::{self, TokenRecord},
};

/// The time within which whoever has locked a file for the first time of a boot has written its record. One that stands still has not.
pub(crate) const WRITTEN_WITHIN: Duration = Duration::from_millis(500);
/// The time between two looks at such a file. Whoever waits for the ledger asks for it more often.
const WRITTEN_SOON: Duration = Duration::from_millis(5);

/// Returns the holders of `name`. It probes under the exclusive ledger, so that no attempt fails because of it, and
/// for moments only: an inspection that is stopped there blocks everybody.
pub(crate) fn holders(files: &Files, name: &LockName, kind: LockKind) -> Result<Vec<TokenRecord>> {
    let path = files.main();
    let Some(file) = layout::open(&path)?.map(Arc::new) else {
        return Ok(Vec::new());
    };
    let Some(last) = last_grant(files, &file, WRITTEN_WITHIN)? else {
        return Ok(Vec::new());
    };
    last.check_name(name.as_str(), &path)?;
    match kind {
        LockKind::Lock => lock_holders(files, &file, &path),
        LockKind::Semaphore => permit_holders(files, &file),
    }
}

/// Marks the hold that has this token, and wakes its holder to see the mark. Returns `false` if there is none, and removes a mark
/// that it left.
///
/// A hold that was passed on within its client has one of the tokens that were reserved with the first. The files do not say which,
/// so that each of them stands for the present hold. The mark of one that was asked for by a later token, and was killed
/// before it saw it, stays: it names a hold that is over.
pub(crate) fn ask_back(files: &Files, name: &LockName, kind: LockKind, token: u64) -> Result<bool> {
    let holders = holders(files, name, kind)?;
    let Some(holder) = holders.iter().find(|holder| holder.tokens().contains(&token)) else {
        let _ = layout::remove(&files.revocation(token));
        return Ok(false);
    };
    files.open_or_create(&files.revocation(holder.grantee.token))?;
    if let Some(main) = layout::open(&files.main())? {
        wake_watchers(&main);
    }
    Ok(true)
}

/// Returns the name of these files, and its holders; `None` if they were never used, or if the name is not meant. A record that cannot be
/// read gets that time to be written.
pub(crate) fn holders_in(
    files: &Files,
    is_meant: impl FnOnce(&LockName) -> bool,
    written_within: Duration,
) -> Result<Option<(LockName, Vec<TokenRecord>)>> {
    let path = files.main();
    let Some(file) = layout::open(&path)?.map(Arc::new) else {
        return Ok(None);
    };
    let Some(last) = last_grant(files, &file, written_within)? else {
        return Ok(None);
    };
    let name = LockName::new(&last.name).ok().filter(|name| files.are_of(name));
    let Some(name) = name else {
        // Somebody has renamed or copied it.
        let found = last.name;
        return Err(FileError::OtherName { path, found });
    };
    if !is_meant(&name) {
        return Ok(None);
    }
    let holders = match files.kind() {
        LockKind::Lock => lock_holders(files, &file, &path)?,
        LockKind::Semaphore => permit_holders(files, &file)?,
    };
    Ok(Some((name, holders)))
}

/// Returns the last grant; `None` if there was none, or if a crash of the host tore the record of it.
///
/// # Errors
/// If the record cannot be read and somebody holds: to a process with another boot id, as in a container, damage looks like the work of a
/// crash, after which nobody would hold.
fn last_grant(files: &Files, file: &Arc<File>, written_within: Duration) -> Result<Option<TokenRecord>> {
    let last = token_record::read(files, file)?;
    if last.is_some() || !has_content(files, file)? {
        return Ok(last);
    }
    let began = Instant::now();
    loop {
        let ledger = files.lock_ledger()?;
        let is_held = is_held(files, file)?;
        drop(ledger);
        // As below.
        wake_watchers(file);
        // If the first grant of a boot was under way and had the ledger, it has written its record by now.
        let last = token_record::read(files, file)?;
        if last.is_some() || !is_held {
            return Ok(last);
        }
        // If it had not, it has locked the file, and waits for the ledger behind this.
        if began.elapsed() >= written_within {
            return Err(FileError::Damaged { path: files.main() });
        }
        thread::sleep(WRITTEN_SOON);
    }
}

/// Fails if the size of a semaphore cannot be read, and somebody has a permit. The caller shares the ledger.
pub(crate) fn check_unread_size(files: &Files, file: &Arc<File>) -> Result<()> {
    if has_content(files, file)? && is_held(files, file)? {
        return Err(FileError::Damaged { path: files.main() });
    }
    Ok(())
}

fn has_content(files: &Files, file: &File) -> Result<bool> {
    let path = files.main();
    let metadata = file.metadata().map_err(FileError::io("look at", &path))?;
    Ok(metadata.len() > 0)
}

/// Returns whether anybody has the lock or a permit, whatever the record says.
fn is_held(files: &Files, file: &Arc<File>) -> Result<bool> {
    if files.kind() == LockKind::Lock {
        return Ok(Flock::exclusive(file, &files.main())?.is_none());
    }
    let dir = files.permits();
    let Some(entries) = layout::entries(&dir)? else {
        return Ok(false);
    };
    for entry in entries {
        let entry = entry.map_err(|errno| FileError::io("read the directory", &dir)(errno.into()))?;
        let name = entry.file_name().to_str().unwrap_or_default();
        if name.parse::<u32>().is_err() {
            continue;
        }
        let path = dir.join(name);
        if let Some(permit) = layout::open(&path)?.map(Arc::new)
            && Flock::exclusive(&permit, &path)?.is_none()
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn lock_holders(files: &Files, file: &Arc<File>, path: &Path) -> Result<Vec<TokenRecord>> {
    let ledger = files.lock_ledger()?;
    if let Some(probe) = Flock::exclusive(file, path)? {
        drop(probe);
        drop(ledger);
        // A waiter that the probe kept out would otherwise retry only at its fallback poll.
        wake_watchers(file);
        readers(files, true)?;
        return Ok(Vec::new());
    }
    let last = token_record::read(files, file)?;
    if let Some(probe) = Flock::shared(file, path)? {
        drop(probe);
        drop(ledger);
        wake_watchers(file);
        let readers = readers(files, false)?;
        // Nobody has a note if all were killed and their children keep the descriptors.
        return Ok(if readers.is_empty() {
            last.into_iter().collect()
        } else {
            readers
        });
    }
    Ok(last.into_iter().collect())
}

/// Returns the live shared holders. With `sweep`, removes the notes of killed ones, from the directory that it reads: its path may lead
/// elsewhere by then.
fn readers(files: &Files, sweep: bool) -> Result<Vec<TokenRecord>> {
    let dir = files.readers();
    let Some(mut entries) = layout::entries(&dir)? else {
        return Ok(Vec::new());
    };
    let failed = |errno: Errno| FileError::io("read the directory", &dir)(errno.into());
    let mut holders = Vec::new();
    while let Some(entry) = entries.read() {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_str().unwrap_or_default();
        // A note in the making is no holder's yet. If nobody holds the lock, its maker was killed or starts again.
        let in_making = name.strip_prefix('.').filter(|_| sweep);
        if !layout::is_owner(in_making.unwrap_or(name)) {
            continue;
        }
        let path = dir.join(name);
        let Some((file, inode)) = layout::open_entry(&entries, name, &path)? else {
            continue;
        };
        let file = Arc::new(file);
        if let Some(_stale) = Flock::exclusive(&file, &path)? {
            if sweep && layout::is_at(&path, inode)? {
                // Another inspection or an administrator may have removed it first.
                let _ = unlinkat(entries.fd().map_err(failed)?, name, AtFlags::empty());
            }
        } else if let Some(note) = token_record::read_note(&file, &path)? {
            holders.push(note);
        }
    }
    holders.sort_by_key(|holder| holder.grantee.token);
    Ok(holders)
}

fn permit_holders(files: &Files, file: &File) -> Result<Vec<TokenRecord>> {
    let permits = token_record::read(files, file)?.map_or(0, |last| last.permits);
    let mut holders = Vec::new();
    let mut probed = false;
    // No semaphore has more, whatever the record says.
    for index in 0..permits.min(MAX_PERMITS) {
        let path = files.permit(index);
        let Some(permit) = layout::open(&path)?.map(Arc::new) else {
            continue;
        };
        let _ledger = files.lock_ledger()?;
        if Flock::exclusive(&permit, &path)?.is_some() {
            probed = true;
        } else if let Some(note) = token_record::read_note(&permit, &path)? {
            holders.push(note);
        }
    }
    if probed {
        // As above.
        wake_watchers(file);
    }
    holders.sort_by_key(|holder| holder.grantee.token);
    Ok(holders)
}

#[cfg(test)]
mod tests {
    use std::{fs, num::NonZeroU32, os::unix::fs::FileExt};

    use lockkit_core::spi::{ClaimRequest, Mode, OwnerId};
    use tempfile::TempDir;

    use super::*;
    use crate::{
        blocking_claim::{BlockingClaim, ClaimSpec},
        boot::BootId,
        layout::Layout,
    };

    /// A host or a container, by its boot id, on the same files.
    struct Boot(Arc<Layout>);

    impl Boot {
        fn new(dir: &TempDir, number: u8) -> Self {
            let boot = BootId::from_bytes([number; BootId::BYTES]);
            Self(Arc::new(Layout::open_in(boot, dir.path(), "").unwrap()))
        }

        fn files(&self, kind: LockKind) -> Files {
            self.0.files(&name(), kind)
        }

        fn holders(&self, kind: LockKind) -> Result<Vec<TokenRecord>> {
            holders(&self.files(kind), &name(), kind)
        }

        fn claim(&self, mode: Mode, owner: u128) -> BlockingClaim {
            let ttl = Duration::from_secs(30);
            BlockingClaim::new(Arc::new(ClaimSpec {
                request: ClaimRequest::new(name(), mode, ttl, OwnerId::new(owner)),
                files: self.files(mode.kind()),
                watcher: None,
                poll: ttl,
                pace: Arc::default(),
            }))
        }

        /// Returns a claim after a try.
        fn try_for(&self, mode: Mode, owner: u128) -> Result<BlockingClaim> {
            let mut claim = self.claim(mode, owner);
            claim.attempt(false, Instant::now().into())?;
            Ok(claim)
        }
    }

    fn name() -> LockName {
        LockName::new("n").unwrap()
    }

    fn permits(count: u32) -> Mode {
        Mode::Permits(NonZeroU32::new(count).unwrap())
    }

    #[test]
    fn a_holder_of_another_boot_holds_while_its_lock_is_locked() {
        for mode in [Mode::Exclusive, Mode::Shared, permits(2)] {
            let dir = TempDir::new().unwrap();
            let (one, other) = (Boot::new(&dir, 1), Boot::new(&dir, 2));
            let holder = one.try_for(mode, 1).unwrap();
            let token = *holder.hold.as_ref().unwrap().grant.tokens.start();
            let shown = other.holders(mode.kind()).unwrap();
            assert_eq!(shown.len(), 1, "{mode:?}");
            assert_eq!(shown[0].grantee.token, token, "{mode:?}");
            assert!(shown[0].is_of_another(other.0.boot()), "{mode:?}");
            drop(holder);
            assert_eq!(other.holders(mode.kind()).unwrap(), [], "{mode:?}");
        }
    }

    #[test]
    fn a_permit_is_of_no_holder_from_before_while_it_is_granted() {
        let dir = TempDir::new().unwrap();
        let (one, next) = (Boot::new(&dir, 1), Boot::new(&dir, 2));
        drop(one.try_for(permits(1), 1).unwrap());
        let permit = one.files(LockKind::Semaphore).permit(0);
        assert!(
            fs::metadata(&permit).unwrap().len() > 0,
            "it stays when it is free"
        );
        let mut claim = next.claim(permits(1), 2);
        // It goes no further than to where it would wait for the disk.
        claim.inline = true;
        let waits = claim.attempt(false, Instant::now().into());
        assert!(matches!(waits, Err(FileError::NeedsWorker)), "{waits:?}");
        assert_eq!(fs::metadata(&permit).unwrap().len(), 0);
    }

    /// Whoever is granted has locked the file, and waits for the ledger while another looks.
    #[test]
    fn a_record_that_is_written_behind_a_look_is_no_damage() {
        let dir = TempDir::new().unwrap();
        let (one, other) = (Boot::new(&dir, 1), Boot::new(&dir, 2));
        let holder = one.try_for(Mode::Exclusive, 1).unwrap();
        let main = one.files(LockKind::Lock).main();
        let (file, _) = layout::open_writable(&main).unwrap().unwrap();
        let whole = fs::read(&main).unwrap();
        let torn = vec![!0_u8; whole.len()];
        file.write_all_at(&torn, 0).unwrap();
        let shown = thread::scope(|scope| {
            let look = scope.spawn(|| other.holders(LockKind::Lock));
            thread::sleep(WRITTEN_SOON * 4);
            file.write_all_at(&whole, 0).unwrap();
            look.join().unwrap()
        });
        assert_eq!(shown.unwrap().len(), 1);
        drop(holder);
    }

    /// To the other boot, it looks as if a crash of the host had torn the record.
    #[test]
    fn a_damaged_record_frees_nobody_of_another_boot() {
        for mode in [Mode::Exclusive, Mode::Shared, permits(2)] {
            let dir = TempDir::new().unwrap();
            let (one, other) = (Boot::new(&dir, 1), Boot::new(&dir, 2));
            let holder = one.try_for(mode, 1).unwrap();
            let (main, _) = layout::open_writable(&one.files(mode.kind()).main())
                .unwrap()
                .unwrap();
            // Within each copy.
            for at in (40..main.metadata().unwrap().len()).step_by(4_096) {
                main.write_all_at(&[!0; 8], at).unwrap();
            }
            let shown = other.holders(mode.kind());
            assert!(
                matches!(shown, Err(FileError::Damaged { .. })),
                "{mode:?}: {shown:?}"
            );
            if mode.kind() == LockKind::Semaphore {
                let tried = other.try_for(permits(5), 2).map(|claim| claim.hold.is_some());
                assert!(
                    matches!(tried, Err(FileError::Damaged { .. })),
                    "two sizes: {tried:?}"
                );
            }
            drop(holder);
            assert_eq!(other.holders(mode.kind()).unwrap(), [], "{mode:?}");
            let next = other.try_for(mode, 3).unwrap();
            assert!(next.hold.is_some(), "{mode:?}");
        }
    }
}
