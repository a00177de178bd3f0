//! Finds the holders of a name. The operating system's locks say whether there are any, the files only say which.

use std::{
    fs::{self, File},
    io,
    path::Path,
    sync::Arc,
};

use lockkit_core::{LockKind, LockName};

use crate::{
    error::{FileError, Result},
    flock::Flock,
    hold::wake_watchers,
    layout::{self, Files},
    token_record::{self, Grantee},
};

/// Returns the holders of `name`. It probes under the exclusive ledger, so that no attempt fails because of it, and
/// for moments only: an inspection that is stopped there blocks everybody.
pub(crate) fn holders(files: &Files, name: &LockName, kind: LockKind) -> Result<Vec<Grantee>> {
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

fn lock_holders(files: &Files, file: &Arc<File>, path: &Path) -> Result<Vec<Grantee>> {
    let ledger = files.lock_ledger()?;
    if let Some(probe) = Flock::exclusive(file, path)? {
        drop(probe);
        drop(ledger);
        // A waiter that the probe kept out would otherwise retry only at its fallback poll.
        wake_watchers(file);
        readers(files, true)?;
        return Ok(Vec::new());
    }
    let last = token_record::read(files, file)?.map(|last| last.grantee);
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
fn readers(files: &Files, sweep: bool) -> Result<Vec<Grantee>> {
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
            holders.push(note.grantee);
        }
    }
    holders.sort_by_key(|holder| holder.token);
    Ok(holders)
}

fn permit_holders(files: &Files, file: &File) -> Result<Vec<Grantee>> {
    let permits = token_record::read(files, file)?.map_or(0, |last| last.permits);
    let mut holders = Vec::new();
    let mut probed = false;
    for index in 0..permits {
        let path = files.permit(index);
        let Some(permit) = layout::open(&path)?.map(Arc::new) else {
            continue;
        };
        let _ledger = files.lock_ledger()?;
        if Flock::exclusive(&permit, &path)?.is_some() {
            probed = true;
        } else if let Some(note) = token_record::read_note(&permit, &path)? {
            holders.push(note.grantee);
        }
    }
    if probed {
        // As above.
        wake_watchers(file);
    }
    holders.sort_by_key(|holder| holder.token);
    Ok(holders)
}
