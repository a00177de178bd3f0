//! Who holds a name. The operating system's locks say whether someone does, the files only say who.

use lockkit_core::{LockKind, LockName};
use std::{
    fs::{self, File},
    io,
    path::Path,
    sync::Arc,
};

use crate::{
    fault::{Fault, Result},
    flock::Flock,
    hold::touch,
    journal::{self, Holding},
    space::{self, Files},
};

/// The holders of `name`. It probes with the ledger to itself, so that no attempt gives up because of it, and for
/// moments only: stopped in one of them, it is in everybody's way.
pub(crate) fn holders(files: &Files, name: &LockName, kind: LockKind) -> Result<Vec<Holding>> {
    let path = files.main();
    let Some(file) = space::open(&path)?.map(Arc::new) else {
        return Ok(Vec::new());
    };
    let Some(last) = journal::read(files, &file)? else {
        return Ok(Vec::new());
    };
    last.check_name(name.as_str(), &path)?;
    match kind {
        LockKind::Lock => lock_holders(files, &file, &path),
        LockKind::Semaphore => permit_holders(files, &file),
    }
}

fn lock_holders(files: &Files, file: &Arc<File>, path: &Path) -> Result<Vec<Holding>> {
    let ledger = files.lock_ledger()?;
    if let Some(probe) = Flock::exclusive(file, path)? {
        drop(probe);
        drop(ledger);
        // A waiter that tried just then would otherwise not try again before its fallback poll.
        touch(file);
        readers(files, true)?;
        return Ok(Vec::new());
    }
    let last = journal::read(files, file)?.map(|last| last.holder);
    if let Some(probe) = Flock::shared(file, path)? {
        drop(probe);
        drop(ledger);
        touch(file);
        let inside = readers(files, false)?;
        // None has a file of its own if all were killed and left their descriptors to child processes.
        return Ok(if inside.is_empty() {
            last.into_iter().collect()
        } else {
            inside
        });
    }
    Ok(last.into_iter().collect())
}

/// The shared holders that are alive. With `sweep`, the files of those that were killed are removed.
fn readers(files: &Files, sweep: bool) -> Result<Vec<Holding>> {
    let dir = files.readers();
    let entries = match fs::read_dir(&dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(Fault::io("read the directory", &dir))?,
    };
    let mut holders = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Fault::io("read the directory", &dir))?;
        let path = entry.path();
        // One that is being made is not a holder's yet; if nobody has the lock, its maker was killed or begins anew.
        if !sweep && entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let Some(file) = space::open(&path)?.map(Arc::new) else {
            continue;
        };
        if let Some(_stale) = Flock::exclusive(&file, &path)? {
            if sweep && space::is_at(&path, space::inode(&file, &path)?)? {
                // Another inspection or an administrator may have been quicker.
                let _ = fs::remove_file(&path);
            }
        } else if let Some(note) = journal::read_note(&file, &path)? {
            holders.push(note.holder);
        }
    }
    holders.sort_by_key(|holder| holder.token);
    Ok(holders)
}

fn permit_holders(files: &Files, file: &File) -> Result<Vec<Holding>> {
    let permits = journal::read(files, file)?.map_or(0, |last| last.permits);
    let mut holders = Vec::new();
    let mut probed = false;
    for index in 0..permits {
        let path = files.permit(index);
        let Some(slot) = space::open(&path)?.map(Arc::new) else {
            continue;
        };
        let _ledger = files.lock_ledger()?;
        if Flock::exclusive(&slot, &path)?.is_some() {
            probed = true;
        } else if let Some(note) = journal::read_note(&slot, &path)? {
            holders.push(note.holder);
        }
    }
    if probed {
        // A waiter that tried just then would otherwise not try again before its fallback poll.
        touch(file);
    }
    holders.sort_by_key(|holder| holder.token);
    Ok(holders)
}
