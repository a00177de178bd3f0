//! What needs no server.

use std::{fs, io, path::PathBuf, time::Duration};

use async_trait::async_trait;
use lockkit::{LockClient, MemoryBackend, Result};
use lockkit_conformance::torture::{Fault, Strike, Target, Told};
use tempfile::TempDir;

/// The memory of this process.
#[derive(Debug, Default)]
pub(crate) struct Memory(MemoryBackend);

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
}

/// Files in a directory.
#[derive(Debug)]
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(TempDir::new()?))
    }

    /// All files of locks, wherever they are.
    fn files(&self) -> io::Result<Vec<PathBuf>> {
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
        vec![Fault::new("delete").places(4).excuses_overlap(told)]
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
}
