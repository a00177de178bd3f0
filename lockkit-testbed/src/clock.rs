use std::{fs::File, io, os::unix::fs::FileExt, path::PathBuf, process::Command, sync::Arc, time::Duration};

use tempfile::TempDir;

use crate::directory;

/// The wall clock of one server or more, which can be set forward and back while they run.
///
/// A small library, compiled by the system's C compiler and loaded before the server's own, shifts what the server
/// reads as the time of day. Its monotonic clock goes on as it is. A wait of its threads until a time of day ends when
/// that has come by this clock: a step ends it, or prolongs it, as on Linux. That goes for waits on conditions, and for
/// no others.
#[derive(Clone, Debug)]
pub struct Clock {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    directory: TempDir,
    /// The microseconds that the clock is ahead, in the machine's own byte order.
    offset: File,
}

const OFFSET_FILE: &str = "offset";
const LIBRARY: &str = "clock.so";

impl Clock {
    /// A clock that is right, for now.
    ///
    /// # Errors
    /// If there is no C compiler (`cc`).
    pub fn new() -> io::Result<Self> {
        let directory = directory::new("clock")?;
        let offset = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(directory.path().join(OFFSET_FILE))?;
        offset.write_all_at(&0_i64.to_ne_bytes(), 0)?;
        let source = directory.path().join("clock.c");
        std::fs::write(&source, include_str!("clock.c"))?;
        let compiled = Command::new("cc")
            .args(["-O1", "-shared", "-fPIC", "-o"])
            .args([&directory.path().join(LIBRARY), &source])
            .output()
            .map_err(|error| {
                io::Error::new(error.kind(), format!("cannot run the C compiler, cc: {error}"))
            })?;
        if !compiled.status.success() {
            let printed = String::from_utf8_lossy(&compiled.stderr);
            return Err(io::Error::other(format!("cc: {}: {printed}", compiled.status)));
        }
        let shared = Arc::new(Shared { directory, offset });
        Ok(Self { shared })
    }

    /// Has `command` run by this clock.
    pub fn apply(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", self.path(LIBRARY))
            .env("LOCKKIT_TESTBED_CLOCK", self.path(OFFSET_FILE));
    }

    /// Sets it forward by `step`, at once.
    ///
    /// # Errors
    /// If the file that the servers read it from cannot be written.
    pub fn forward(&self, step: Duration) -> io::Result<()> {
        self.set(self.offset()?.saturating_add(micros(step)))
    }

    /// Sets it back by `step`, at once.
    ///
    /// # Errors
    /// If the file that the servers read it from cannot be written.
    pub fn back(&self, step: Duration) -> io::Result<()> {
        self.set(self.offset()?.saturating_sub(micros(step)))
    }

    /// Sets it right.
    ///
    /// # Errors
    /// If the file that the servers read it from cannot be written.
    pub fn reset(&self) -> io::Result<()> {
        self.set(0)
    }

    fn offset(&self) -> io::Result<i64> {
        let mut bytes = [0; 8];
        self.shared.offset.read_exact_at(&mut bytes, 0)?;
        Ok(i64::from_ne_bytes(bytes))
    }

    fn set(&self, micros: i64) -> io::Result<()> {
        self.shared.offset.write_all_at(&micros.to_ne_bytes(), 0)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.shared.directory.path().join(name)
    }
}

fn micros(step: Duration) -> i64 {
    i64::try_from(step.as_micros()).unwrap_or(i64::MAX)
}
