use std::{
    ffi::OsStr,
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tempfile::TempDir;

use crate::directory;

/// The time that a server may take to come up or catch up, or a cluster to elect a leader: far longer than on the busiest machine.
/// One that ends is told at once.
pub(crate) const START_UP: Duration = Duration::from_secs(120);

/// The longest pause between two looks at a server that comes up.
const LONGEST_PAUSE: Duration = Duration::from_millis(25);

/// A server's process: one program with one directory, which can be started, ended and started again.
///
/// All methods take `&self`, so that a server may be shared by tests through a static. It never outlives the test
/// process: it is killed on drop, and by the system when the test process dies without dropping it. What it prints
/// goes to a file, whose end is part of the error when it does not come up.
///
/// On Linux, a program that changes its user id loses the tie to the test process, unless it ties itself again. So does
/// one that makes others in sessions of their own. Both end with the directory at the latest, if they work in it.
#[derive(Debug)]
pub struct Process {
    directory: TempDir,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    command: Option<Command>,
    child: Option<Child>,
    paused: bool,
}

/// Makes the methods of a server that stop it and let it go on, by its `process`. Takes what there is to say about an orderly end.
macro_rules! controls {
    ($(#[$stop:meta])*) => {
        /// Its process id, `None` if it does not run.
        pub fn pid(&self) -> Option<u32> {
            self.process.pid()
        }

        /// Ends it in order (SIGTERM).
        $(#[$stop])*
        ///
        /// # Errors
        /// If it does not end within 30 s.
        pub fn stop(&self) -> std::io::Result<()> {
            self.process.stop().map(drop)
        }

        /// Kills it (SIGKILL), as a crash would.
        ///
        /// # Errors
        /// If the system refuses.
        pub fn kill(&self) -> std::io::Result<()> {
            self.process.kill().map(drop)
        }

        /// Pauses it (SIGSTOP): it does nothing until it is resumed. The system still accepts connections for it.
        ///
        /// # Errors
        /// If it does not run.
        pub fn pause(&self) -> std::io::Result<()> {
            self.process.pause()
        }

        /// Lets it go on.
        ///
        /// # Errors
        /// If it does not run.
        pub fn resume(&self) -> std::io::Result<()> {
            self.process.resume()
        }
    };
}

pub(crate) use controls;

impl Process {
    /// A process that is not running yet. `command` is called with the new directory that the process is started in
    /// and may write to; `name` is part of the directory's name.
    ///
    /// # Errors
    /// If no directory can be made.
    pub fn new(name: &str, command: impl FnOnce(&Path) -> Command) -> io::Result<Self> {
        let directory = directory::new(name)?;
        let mut command = tied(&command(directory.path()));
        command.current_dir(directory.path()).stdin(Stdio::null());
        Ok(Self {
            directory,
            state: Mutex::new(State {
                command: Some(command),
                child: None,
                paused: false,
            }),
        })
    }

    /// Its directory, the same for each start.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Starts it. A program that cannot be run shows in [`wait_ready`](Self::wait_ready), as one that ends at once.
    ///
    /// # Errors
    /// If it runs already, or the system cannot start it.
    pub fn start(&self) -> io::Result<()> {
        let mut state = self.state();
        if state.running()? {
            return Err(io::Error::other("the process runs already"));
        }
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path())?;
        let mut command = state
            .command
            .take()
            .ok_or_else(|| io::Error::other("an earlier start was cut short"))?;
        command.stdout(log.try_clone()?).stderr(log);
        let (command, child) = spawn_for_good(command)?;
        state.command = Some(command);
        state.child = Some(child?);
        state.paused = false;
        Ok(())
    }

    /// Waits until `ready` answers without an error.
    ///
    /// # Errors
    /// If the process ends first, or is not ready within `limit`. The error has the last answer and the end of what
    /// the process printed.
    pub fn wait_ready(&self, limit: Duration, mut ready: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        // A server that takes long is asked less often: the machine may be busy enough.
        let mut pause = Duration::from_millis(2);
        loop {
            let Err(error) = ready() else {
                return Ok(());
            };
            let why = if !self.is_running()? {
                "it has ended".to_owned()
            } else if Instant::now() >= deadline {
                format!("not within {limit:?}")
            } else {
                thread::sleep(pause);
                pause = (pause * 5 / 4).min(LONGEST_PAUSE);
                continue;
            };
            return Err(io::Error::other(format!(
                "the server does not come up, {why}: {error}\n{}",
                self.log_tail()
            )));
        }
    }

    /// Sets a variable of its environment, from its next start on.
    pub(crate) fn set_env(&self, name: &str, value: &str) {
        if let Some(command) = &mut self.state().command {
            command.env(name, value);
        }
    }

    /// Its process id, `None` if it does not run.
    pub fn pid(&self) -> Option<u32> {
        let mut state = self.state();
        state
            .running()
            .ok()?
            .then(|| state.child.as_ref().map(Child::id))
            .flatten()
    }

    /// Returns whether it runs. A paused process does.
    ///
    /// # Errors
    /// If the system cannot tell.
    pub fn is_running(&self) -> io::Result<bool> {
        self.state().running()
    }

    /// Pauses it as a debugger or a suspended machine would (SIGSTOP): when this returns, none of its threads runs
    /// until it is [resumed](Self::resume). The system goes on accepting connections in its name.
    ///
    /// # Errors
    /// If it does not run, or does not stop within 5 s.
    pub fn pause(&self) -> io::Result<()> {
        let mut state = self.state();
        let pid = state.signal(Signal::STOP)?;
        if state.paused {
            return Ok(());
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        // Stops alone are asked for: an exit is left to be reaped.
        while waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG)?.is_none() {
            if Instant::now() >= deadline {
                return Err(io::Error::other("the process does not stop"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        state.paused = true;
        Ok(())
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// If it does not run.
    pub fn resume(&self) -> io::Result<()> {
        let mut state = self.state();
        state.signal(Signal::CONT)?;
        state.paused = false;
        Ok(())
    }

    /// Kills it as a crash would (SIGKILL), paused or not, and waits for its end. `None` if it was not running.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&self) -> io::Result<Option<ExitStatus>> {
        self.state().kill()
    }

    /// Asks it to end (SIGTERM), resumes it if it is paused, and waits for its end. `None` if it was not running.
    ///
    /// # Errors
    /// If it still runs after 30 s.
    pub fn stop(&self) -> io::Result<Option<ExitStatus>> {
        self.stop_by(Signal::TERM)
    }

    /// Stops it as [`stop`](Self::stop) does, for a program that takes another signal for it.
    pub(crate) fn stop_by(&self, signal: Signal) -> io::Result<Option<ExitStatus>> {
        let mut state = self.state();
        if !state.running()? {
            return Ok(None);
        }
        state.signal(signal)?;
        state.signal(Signal::CONT)?;
        state.paused = false;
        let deadline = Instant::now() + Duration::from_secs(30);
        while let Some(child) = &mut state.child {
            if let Some(status) = child.try_wait()? {
                state.child = None;
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Err(io::Error::other(format!(
                    "the process does not end on {signal:?}\n{}",
                    self.log_tail()
                )));
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(None)
    }

    /// The end of what it has printed, over all its starts: at most 4 KiB.
    pub fn log_tail(&self) -> String {
        tail(&self.log_path()).unwrap_or_else(|error| format!("(its log cannot be read: {error})"))
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has ended already. Its directory goes after it.
        let _ = self.kill();
    }
}

impl State {
    fn running(&mut self) -> io::Result<bool> {
        if let Some(child) = &mut self.child
            && child.try_wait()?.is_some()
        {
            self.child = None;
        }
        Ok(self.child.is_some())
    }

    /// A child that was not reaped keeps its id, so that the signal cannot hit a stranger.
    fn signal(&mut self, signal: Signal) -> io::Result<Pid> {
        if !self.running()? {
            return Err(io::Error::other("the process does not run"));
        }
        let pid = self
            .child
            .as_ref()
            .and_then(|child| i32::try_from(child.id()).ok())
            .and_then(Pid::from_raw)
            .ok_or_else(|| io::Error::other("a child without a process id"))?;
        kill_process(pid, signal)?;
        Ok(pid)
    }

    fn kill(&mut self) -> io::Result<Option<ExitStatus>> {
        let Some(mut child) = self.child.take() else {
            return Ok(None);
        };
        child.kill()?;
        child.wait().map(Some)
    }
}

/// `command`, killed by the system as soon as this process dies. Its environment is kept as far as it was set by name.
pub(crate) fn tied(command: &Command) -> Command {
    // A parent that died before the signal was armed has sent none, hence the look at the parent's id.
    const CHECK_PARENT: &str = r#"[ "$PPID" = "$0" ] && exec "$@""#;

    let mut tied;
    if cfg!(target_os = "linux") {
        tied = Command::new("setpriv");
        tied.args(["--pdeathsig", "KILL", "--", "sh", "-c", CHECK_PARENT])
            .arg(std::process::id().to_string())
            .arg(command.get_program())
            .args(command.get_args());
    } else {
        tied = Command::new(command.get_program());
        tied.args(command.get_args());
    }
    for (name, value) in command.get_envs() {
        set_env(&mut tied, name, value);
    }
    tied
}

fn set_env(command: &mut Command, name: &OsStr, value: Option<&OsStr>) {
    match value {
        Some(value) => command.env(name, value),
        None => command.env_remove(name),
    };
}

type Spawned = (Command, io::Result<Child>);

/// Starts `command` from a thread that lives as long as this process: the system sends the parent-death signal when
/// the *thread* that started the child ends, and a test's thread ends with the test.
pub(crate) fn spawn_for_good(command: Command) -> io::Result<Spawned> {
    static SPAWNER: LazyLock<mpsc::Sender<(Command, mpsc::Sender<Spawned>)>> = LazyLock::new(|| {
        let (orders, incoming) = mpsc::channel::<(Command, mpsc::Sender<Spawned>)>();
        thread::spawn(move || {
            for (mut command, answer) in incoming {
                let child = command.spawn();
                // Nobody waits if the asking thread is gone, which cannot be: it blocks for the answer.
                let _ = answer.send((command, child));
            }
        });
        orders
    });

    let gone = || io::Error::other("the thread that starts processes is gone");
    let (answer, spawned) = mpsc::channel();
    SPAWNER.send((command, answer)).map_err(|_| gone())?;
    spawned.recv().map_err(|_| gone())
}

fn tail(path: &Path) -> io::Result<String> {
    const LENGTH: u64 = 4096;

    let mut log = File::open(path)?;
    let length = log.metadata()?.len();
    log.seek(SeekFrom::Start(length.saturating_sub(LENGTH)))?;
    let mut bytes = Vec::new();
    log.take(LENGTH).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
