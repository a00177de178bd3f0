//! Finds the holders of a name. The operating system's locks say whether there are any, the files only say which.

use std::{
    fs::{self, File},
    io,
    path::Path,
    sync::Arc,
};

use lockkit_core::{LockKind, LockName};

use crate::{
    backend::MAX_PERMITS,
    error::{FileError, Result},
    flock::Flock,
    hold::wake_watchers,
    layout::{self, Files},
    token_record::{self, TokenRecord},
};

/// Returns the holders of `name`. It probes under the exclusive ledger, so that no attempt fails because of it, and
/// for moments only: an inspection that is stopped there blocks everybody.
pub(crate) fn holders(files: &Files, name: &LockName, kind: LockKind) -> Result<Vec<TokenRecord>> {
    let path = files.main();
    let Some(file) = layout::open(&path)?.map(Arc::new) else {
        return Ok(Vec::new());
    };
    let Some(last) = token_record::read(files, &file)? else {
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
        let _ = fs::remove_file(files.revocation(token));
        return Ok(false);
    };
    files.open_or_create(&files.revocation(holder.grantee.token))?;
    if let Some(main) = layout::open(&files.main())? {
        wake_watchers(&main);
    }
    Ok(true)
}

/// Returns the name of these files, and its holders; `None` if they were never used, or if the name is not meant.
pub(crate) fn holders_in(
    files: &Files,
    is_meant: impl FnOnce(&LockName) -> bool,
) -> Result<Option<(LockName, Vec<TokenRecord>)>> {
    let path = files.main();
    let Some(file) = layout::open(&path)?.map(Arc::new) else {
        return Ok(None);
    };
    let Some(last) = token_record::read(files, &file)? else {
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

/// Returns the live shared holders. With `sweep`, removes the notes of killed ones.
fn readers(files: &Files, sweep: bool) -> Result<Vec<TokenRecord>> {
    let dir = files.readers();
    let entries = match fs::read_dir(&dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(FileError::io("read the directory", &dir))?,
    };
    let mut holders = Vec::new();
    for entry in entries {
        let entry = entry.map_err(FileError::io("read the directory", &dir))?;
        let path = entry.path();
        // A note in the making is no holder's yet. If nobody holds the lock, its maker was killed or starts again.
        if !sweep && entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let Some(file) = layout::open(&path)?.map(Arc::new) else {
            continue;
        };
        if let Some(_stale) = Flock::exclusive(&file, &path)? {
            if sweep && layout::is_at(&path, layout::inode(&file, &path)?)? {
                // Another inspection or an administrator may have removed it first.
                let _ = fs::remove_file(&path);
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
