//! Beside the file backend.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{Seek, Write},
    path::PathBuf,
    sync::Arc,
};

use distributed_lock_core::traits::{DistributedLock, LockHandle as _, LockProvider};
use distributed_lock_file::FileLockProvider;
use lockkit::{BoxError, spi::Mode};
use lockkit_conformance::measure::{Client, Contender, Scenario, Subject};

use super::{exclusive_alone, uncontended_alone};

/// The system calls that a lock with a durable token cannot do without: lock a file, write a number, sync it.
#[derive(Clone, Debug)]
pub struct LockedFile {
    /// The directory of the files.
    pub dir: PathBuf,
}

impl Subject for LockedFile {
    type Client = Self;

    async fn client(&self) -> Result<Self, BoxError> {
        fs::create_dir_all(&self.dir)?;
        Ok(self.clone())
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(uncontended_alone(scenario))
    }
}

impl Client for LockedFile {
    type Contender = OneFile;

    async fn contender(&self, name: &str, _: Mode) -> Result<OneFile, BoxError> {
        Ok(OneFile {
            path: self.dir.join(name.replace('/', "-")),
            token: 0,
        })
    }
}

/// The file of one name.
#[derive(Debug)]
pub struct OneFile {
    path: PathBuf,
    token: u64,
}

impl Contender for OneFile {
    type Held = File;

    async fn acquire(&mut self) -> Result<File, BoxError> {
        let file = File::create_new(&self.path).or_else(|_| File::open(&self.path))?;
        file.lock()?;
        self.token += 1;
        let mut writer = OpenOptions::new().write(true).open(&self.path)?;
        writer.rewind()?;
        writer.write_all(&self.token.to_le_bytes())?;
        writer.sync_data()?;
        Ok(file)
    }

    async fn release(&mut self, held: File) -> Result<(), BoxError> {
        held.unlock()?;
        // It blocks its thread for milliseconds: the runtime's own work comes in between.
        tokio::task::yield_now().await;
        Ok(())
    }
}

/// A file lock by hand: `flock`. No token, nothing written, no order among those who wait.
#[derive(Clone, Debug)]
pub struct Flock {
    /// The directory of the files.
    pub dir: PathBuf,
}

impl Subject for Flock {
    type Client = Self;

    async fn client(&self) -> Result<Self, BoxError> {
        fs::create_dir_all(&self.dir)?;
        Ok(self.clone())
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(match scenario {
            Scenario::Shared(_) => None,
            other => exclusive_alone(other),
        })
    }
}

impl Client for Flock {
    type Contender = OpenFile;

    async fn contender(&self, name: &str, mode: Mode) -> Result<OpenFile, BoxError> {
        let path = self.dir.join(name.replace('/', "-"));
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(OpenFile {
            file: Arc::new(file),
            shared: mode == Mode::Shared,
        })
    }
}

/// An open file of its own, by which the kernel tells it from others of its process.
#[derive(Debug)]
pub struct OpenFile {
    file: Arc<File>,
    shared: bool,
}

impl Contender for OpenFile {
    type Held = ();

    async fn acquire(&mut self) -> Result<(), BoxError> {
        let tried = if self.shared {
            self.file.try_lock_shared()
        } else {
            self.file.try_lock()
        };
        match tried {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        // The holder may need this thread.
        let (file, shared) = (self.file.clone(), self.shared);
        let waiting = move || if shared { file.lock_shared() } else { file.lock() };
        Ok(tokio::task::spawn_blocking(waiting).await??)
    }

    async fn release(&mut self, (): ()) -> Result<(), BoxError> {
        Ok(self.file.unlock()?)
    }
}

/// The crate `distributed-lock` on files: a lock that is tried again after a pause, without a token.
#[derive(Clone, Debug)]
pub struct DistributedFileLock {
    /// The directory of the files.
    pub dir: PathBuf,
}

impl Subject for DistributedFileLock {
    type Client = Self;

    async fn client(&self) -> Result<Self, BoxError> {
        Ok(self.clone())
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(exclusive_alone(scenario))
    }
}

impl Client for DistributedFileLock {
    type Contender = DistributedFile;

    async fn contender(&self, name: &str, _: Mode) -> Result<DistributedFile, BoxError> {
        Ok(DistributedFile(
            FileLockProvider::new(&self.dir)?.create_lock(name),
        ))
    }
}

type Theirs = <FileLockProvider as LockProvider>::Lock;

/// A file.
pub struct DistributedFile(Theirs);

impl Contender for DistributedFile {
    type Held = <Theirs as DistributedLock>::Handle;

    async fn acquire(&mut self) -> Result<Self::Held, BoxError> {
        Ok(self.0.acquire(None).await?)
    }

    async fn release(&mut self, held: Self::Held) -> Result<(), BoxError> {
        Ok(held.release().await?)
    }
}
