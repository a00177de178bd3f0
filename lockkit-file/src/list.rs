//! Listings: the directory's entries, a page at a time. Each lock that has a file is probed, as an inspection does. One that cannot be told
//! hides no other: the first such failure comes after the last page.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{ListedLock, LockName, LockState, Result, spi::Lister};
use rustix::fs::Dir;

use crate::{
    backend::{blocking, shown},
    error::FileError,
    inspect::{self, WRITTEN_WITHIN},
    layout::{self, Files, Layout},
};

/// The number of directory entries that one page looks at.
const PAGE: usize = 64;

pub(crate) struct FileLister {
    layout: Arc<Layout>,
    prefix: Arc<str>,
    progress: Progress,
    /// The first failure to tell of a lock.
    failed: Option<FileError>,
}

enum Progress {
    NotBegun,
    At(Dir),
    /// Over, or with the worker thread.
    Gone,
}

/// What was found among some entries, and the directory from there on.
struct Page {
    locks: Vec<ListedLock>,
    failed: Option<FileError>,
    rest: Dir,
}

impl FileLister {
    pub(crate) fn new(layout: Arc<Layout>, prefix: &str) -> Self {
        Self {
            layout,
            prefix: prefix.into(),
            progress: Progress::NotBegun,
            failed: None,
        }
    }
}

#[async_trait]
impl Lister for FileLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        let (layout, prefix) = (self.layout.clone(), self.prefix.clone());
        let progress = std::mem::replace(&mut self.progress, Progress::Gone);
        let has_failed = self.failed.is_some();
        let looked = blocking(move || look(&layout, &prefix, progress, has_failed)).await;
        let looked = looked.map_err(|error| error.into_error("list"))?;
        let Some(Page { locks, failed, rest }) = looked else {
            let failed = self.failed.take();
            return failed.map_or(Ok(None), |error| Err(error.into_error("list")));
        };
        self.progress = Progress::At(rest);
        self.failed = self.failed.take().or(failed);
        Ok(Some(locks))
    }
}

fn look(
    layout: &Arc<Layout>,
    prefix: &str,
    progress: Progress,
    has_failed: bool,
) -> Result<Option<Page>, FileError> {
    let dir = layout.dir();
    let mut rest = match progress {
        Progress::At(entries) => entries,
        Progress::NotBegun => match layout::entries(&dir)? {
            // Somebody removed it, with all that was held.
            None => return Ok(None),
            Some(entries) => entries,
        },
        Progress::Gone => return Ok(None),
    };
    let (mut locks, mut failed) = (Vec::new(), None);
    for seen in 0..PAGE {
        let Some(entry) = rest.read() else {
            if seen == 0 {
                return Ok(None);
            }
            break;
        };
        let entry = entry.map_err(|errno| FileError::io("read the directory", &dir)(errno.into()))?;
        let file_name = OsStr::from_bytes(entry.file_name().to_bytes());
        let Some(files) = layout.files_of(file_name, prefix) else {
            continue;
        };
        // A list that ends with an error anyway waits for no other record: there may be many damaged ones.
        let written_within = if has_failed || failed.is_some() {
            Duration::ZERO
        } else {
            WRITTEN_WITHIN
        };
        match lock(&files, prefix, written_within) {
            Ok(found) => locks.extend(found),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    Ok(Some(Page { locks, failed, rest }))
}

/// Returns the lock that has these files, if its name has the prefix and somebody holds it.
fn lock(files: &Files, prefix: &str, written_within: Duration) -> Result<Option<ListedLock>, FileError> {
    let is_meant = |name: &LockName| name.as_str().starts_with(prefix);
    let Some((name, holders)) = inspect::holders_in(files, is_meant, written_within)? else {
        return Ok(None);
    };
    if holders.is_empty() {
        return Ok(None);
    }
    let state = LockState::new(holders.into_iter().map(shown).collect(), None);
    Ok(Some(ListedLock::new(name, files.kind(), state)))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::FileExt, time::Instant};

    use lockkit_core::{
        LockKind,
        spi::{ClaimRequest, Mode, OwnerId},
    };
    use tempfile::TempDir;

    use super::*;
    use crate::{
        blocking_claim::{BlockingClaim, ClaimSpec},
        boot::BootId,
    };

    /// A holder whose record another boot cannot read.
    fn damaged(layout: &Arc<Layout>, number: u8) -> BlockingClaim {
        let name = LockName::new(format!("job-{number}")).unwrap();
        let files = layout.files(&name, LockKind::Lock);
        let main = files.main();
        let ttl = Duration::from_secs(30);
        let mut claim = BlockingClaim::new(Arc::new(ClaimSpec {
            request: ClaimRequest::new(name, Mode::Exclusive, ttl, OwnerId::new(number.into())),
            files,
            watcher: None,
            poll: ttl,
            pace: Arc::default(),
        }));
        claim.attempt(false, Instant::now().into()).unwrap();
        let (file, _) = layout::open_writable(&main).unwrap().unwrap();
        let torn = vec![!0_u8; fs::read(&main).unwrap().len()];
        file.write_all_at(&torn, 0).unwrap();
        claim
    }

    #[tokio::test]
    async fn damaged_records_cost_a_list_one_wait_in_all() {
        let dir = TempDir::new().unwrap();
        let [one, other] = [1, 2].map(|number| {
            let boot = BootId::from_bytes([number; BootId::BYTES]);
            Arc::new(Layout::open_in(boot, dir.path(), "").unwrap())
        });
        let holders: Vec<_> = (1..=8).map(|number| damaged(&one, number)).collect();
        let mut list = FileLister::new(other, "");
        let began = Instant::now();
        let ended = loop {
            match list.page().await {
                Ok(Some(page)) => assert!(page.is_empty(), "{page:?}"),
                ended => break ended,
            }
        };
        let took = began.elapsed();
        assert!(ended.is_err(), "they are held");
        assert!(took < WRITTEN_WITHIN * 4, "{took:?}");
        drop(holders);
    }
}
