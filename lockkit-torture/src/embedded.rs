//! The targets that need no server.

use std::{
    fs::{self, TryLockError},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use lockkit::{LockClient, MemoryBackend, Result};
use lockkit_conformance::torture::{Fault, Strike, Target, Told};
use tempfile::TempDir;

/// The memory of this process.
#[derive(Debug, Default)]
pub struct Memory(pub MemoryBackend);

#[async_trait]
impl Target for Memory {
    fn routes(&self) -> Vec<String> {
        vec!["memory:".to_owned()]
    }

    async fn connect(&self, _: &str) -> Result<LockClient> {
        Ok(LockClient::new(self.0.clone()))
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn left(&self) -> io::Result<Vec<String>> {
        Ok(match self.0.names() {
            0 => Vec::new(),
            names => vec![format!("{names} names in memory")],
        })
    }
}

/// Files in a directory.
#[derive(Debug)]
pub struct Files(pub TempDir);

impl Files {
    /// A deployment in a directory of its own.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new() -> io::Result<Self> {
        Ok(Self(TempDir::new()?))
    }

    /// All files of locks, wherever they are.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn files(&self) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        let mut directories = vec![self.0.path().to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory)? {
                let path = entry?.path();
                if path.is_dir() {
                    directories.push(path);
                } else {
                    found.push(path);
                }
            }
        }
        found.sort();
        Ok(found)
    }
}

#[async_trait]
impl Target for Files {
    fn routes(&self) -> Vec<String> {
        vec![format!("file://{}", self.0.path().display())]
    }

    async fn connect(&self, route: &str) -> Result<LockClient> {
        lockkit::connect(route).await
    }

    fn faults(&self) -> Vec<Fault> {
        let told = Told::AtRenewal(Duration::from_secs(11));
        vec![
            Fault::new("delete")
                .places(4)
                .excuses_overlap(told)
                .restarts_tokens(),
        ]
    }

    fn strike(&self, strike: &Strike, _: &[String]) -> io::Result<()> {
        let files = self.files()?;
        if let Some(file) = files.get(strike.place as usize % files.len().max(1)) {
            match fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Files that somebody has locked, and this process's descriptors. Files stay, but those of shared holders.
    fn left(&self) -> io::Result<Vec<String>> {
        let mut left = Vec::new();
        for path in self.files()? {
            let file = fs::File::open(&path)?;
            let is_locked = match file.try_lock() {
                Ok(()) => false,
                Err(TryLockError::WouldBlock) => true,
                Err(TryLockError::Error(error)) => return Err(error),
            };
            let of_a_reader = path.parent().and_then(Path::extension) == Some("readers".as_ref());
            let what = match (is_locked, of_a_reader) {
                (true, _) => "locked",
                (false, true) => "of a reader",
                (false, false) => continue,
            };
            left.push(format!("{what}, the file {}", path.display()));
        }
        // Which Linux alone shows; now that those that looked are closed.
        for descriptor in fs::read_dir("/proc/self/fd").into_iter().flatten() {
            // It may be that of this very look.
            let Ok(path) = fs::read_link(descriptor?.path()) else {
                continue;
            };
            if path.starts_with(self.0.path()) {
                left.push(format!("open, the file {}", path.display()));
            }
        }
        Ok(left)
    }
}
