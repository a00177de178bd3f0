//! The targets that need no server.

use std::{
    fs::{self, TryLockError},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use lockkit::{LockClient, MemoryBackend, Result};
use lockkit_conformance::torture::{Fault, Strike, Target, Told};
use lockkit_testbed::Mounted;
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

/// Files in a directory, which is a small file system if this user may mount one.
#[derive(Debug)]
pub struct Files(pub TempDir, Option<Mounted>);

/// Room for the files of an epoch many times over, and soon full.
const ROOM: &str = "size=16m";

impl Files {
    /// A deployment in a directory of its own.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new() -> io::Result<Self> {
        let home = TempDir::new()?;
        let room = Mounted::new(home.path(), ROOM);
        Ok(Self(home, room))
    }

    /// The file that takes all the room that there is.
    fn filler(&self) -> PathBuf {
        self.0.path().join("filler")
    }

    /// Takes all the room, to the last byte.
    fn fill(&self) -> io::Result<()> {
        let mut filler = fs::File::create(self.filler())?;
        let mut piece = vec![0; 1 << 20];
        while !piece.is_empty() {
            match filler.write(&piece) {
                Err(error) if error.kind() == io::ErrorKind::StorageFull => piece.truncate(piece.len() / 2),
                Ok(_) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Deletes the directory of the locks, while others write to it.
    fn delete_directory(&self) -> io::Result<()> {
        let locks = self.0.path().join("lockkit");
        for _ in 0..100 {
            match fs::remove_dir_all(&locks) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
                removed => return removed,
            }
        }
        Err(io::Error::other(format!("{} does not go", locks.display())))
    }

    /// All files of locks, wherever they are.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn files(&self) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        let mut directories = vec![self.0.path().to_owned()];
        while let Some(directory) = directories.pop() {
            let entries = match fs::read_dir(directory) {
                // It was deleted meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                entries => entries?,
            };
            for entry in entries {
                let path = entry?.path();
                if path.is_dir() {
                    directories.push(path);
                } else if path != self.filler() {
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
        let costs = |name| Fault::new(name).excuses_overlap(told).restarts_tokens();
        let mut faults = vec![costs("delete").places(4), costs("directory").later()];
        if self.1.is_some() {
            faults.push(Fault::new("full").later());
        }
        faults
    }

    fn strike(&self, strike: &Strike, _: &[String]) -> io::Result<()> {
        match strike.fault.as_str() {
            "full" => return self.fill(),
            "directory" => return self.delete_directory(),
            _ => {}
        }
        let files = self.files()?;
        if let Some(file) = files.get(strike.place as usize % files.len().max(1)) {
            match fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn heal(&self, strike: &Strike) -> io::Result<()> {
        if strike.fault != "full" {
            return Ok(());
        }
        match fs::remove_file(self.filler()) {
            // Another one has healed before.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
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

impl Drop for Files {
    fn drop(&mut self) {
        // Before its directory, which cannot be removed under it.
        self.1.take();
    }
}
