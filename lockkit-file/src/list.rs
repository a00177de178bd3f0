//! Listings: the directory's entries, a page at a time. Each lock that has a file is probed, as an inspection does.

use std::{
    fs::{self, ReadDir},
    io,
    sync::Arc,
};

use async_trait::async_trait;
use lockkit_core::{ListedLock, LockName, LockState, Result, spi::Lister};

use crate::{
    backend::{blocking, shown},
    error::FileError,
    inspect,
    layout::{Files, Layout},
};

/// The number of directory entries that one page looks at.
const PAGE: usize = 64;

pub(crate) struct FileLister {
    layout: Arc<Layout>,
    prefix: Arc<str>,
    progress: Progress,
}

enum Progress {
    NotBegun,
    At(ReadDir),
    /// Over, or with the worker thread.
    Gone,
}

impl FileLister {
    pub(crate) fn new(layout: Arc<Layout>, prefix: &str) -> Self {
        Self {
            layout,
            prefix: prefix.into(),
            progress: Progress::NotBegun,
        }
    }
}

#[async_trait]
impl Lister for FileLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        let (layout, prefix) = (self.layout.clone(), self.prefix.clone());
        let progress = std::mem::replace(&mut self.progress, Progress::Gone);
        let looked = blocking(move || look(&layout, &prefix, progress)).await;
        let looked = looked.map_err(|error| error.into_error("list"))?;
        Ok(looked.map(|(page, entries)| {
            self.progress = Progress::At(entries);
            page
        }))
    }
}

fn look(
    layout: &Arc<Layout>,
    prefix: &str,
    progress: Progress,
) -> Result<Option<(Vec<ListedLock>, ReadDir)>, FileError> {
    let dir = layout.dir();
    let failed = |error| FileError::io("read the directory", &dir)(error);
    let mut entries = match progress {
        Progress::At(entries) => entries,
        Progress::NotBegun => match fs::read_dir(&dir) {
            // Somebody removed it, with all that was held.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(failed)?,
        },
        Progress::Gone => return Ok(None),
    };
    let mut page = Vec::new();
    for seen in 0..PAGE {
        let Some(entry) = entries.next() else {
            if seen == 0 {
                return Ok(None);
            }
            break;
        };
        let file_name = entry.map_err(failed)?.file_name();
        let Some(files) = layout.files_of(&file_name, prefix) else {
            continue;
        };
        page.extend(lock(&files, prefix)?);
    }
    Ok(Some((page, entries)))
}

/// Returns the lock that has these files, if its name has the prefix and somebody holds it.
fn lock(files: &Files, prefix: &str) -> Result<Option<ListedLock>, FileError> {
    let is_meant = |name: &LockName| name.as_str().starts_with(prefix);
    let Some((name, holders)) = inspect::holders_in(files, is_meant)? else {
        return Ok(None);
    };
    if holders.is_empty() {
        return Ok(None);
    }
    let state = LockState::new(holders.into_iter().map(shown).collect(), None);
    Ok(Some(ListedLock::new(name, files.kind(), state)))
}
