//! The command, a directory for its locks, and processes that do not outlive a test.

use std::{
    io::{BufRead, BufReader, PipeReader, PipeWriter, Read},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, PidfdFlags, Signal, getpgid, getsid, pidfd_open, pidfd_send_signal};
use tempfile::TempDir;

/// Longer than anything takes that is not measured, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// In a script, before a command that is to have a process group of its own.
pub(crate) const IN_A_GROUP: &str = "perl -e 'setpgrp(0, 0); exec @ARGV'";

/// A lock server of a test's own, and a place for its files.
pub(crate) struct Site {
    dir: TempDir,
    pub(crate) url: String,
}

impl Site {
    pub(crate) fn new() -> Self {
        Self::within(tempfile::tempdir().unwrap())
    }

    /// Where other users come, too: the way to a test's own directory is not open to all.
    pub(crate) fn open_to_all() -> Self {
        Self::within(tempfile::tempdir_in("/tmp").unwrap())
    }

    fn within(dir: TempDir) -> Self {
        let url = format!("file://{}/locks", dir.path().display());
        Self { dir, url }
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    /// `lockkit` with these arguments; its server is this one.
    pub(crate) fn lockkit(&self, arguments: &[&str]) -> Command {
        let mut command = lockkit(arguments);
        command.env("LOCKKIT_URL", &self.url).current_dir(self.dir.path());
        command
    }

    /// `lockkit run OPTIONS job -- sh -c SCRIPT`.
    pub(crate) fn run(&self, options: &[&str], script: &str) -> Command {
        self.lockkit(&[&["run"], options, &["job", "--", "sh", "-c", script]].concat())
    }

    /// Starts it as a process, and waits for its first line.
    pub(crate) fn running(&self, options: &[&str], script: &str) -> Running {
        let mut running = Running::spawn(self.run(options, script).stdin(Stdio::piped()));
        assert_eq!(running.line(), "up", "the script begins with `echo up`");
        running
    }

    /// Every lock file there is.
    pub(crate) fn lock_files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut dirs = vec![self.path("locks")];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                let found = if path.is_dir() { &mut dirs } else { &mut files };
                found.push(path);
            }
        }
        files
    }
}

/// `lockkit` with these arguments and without a server in its environment.
pub(crate) fn lockkit(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockkit"));
    command
        .args(arguments)
        .env_remove("LOCKKIT_URL")
        .stdin(Stdio::null());
    command
}

/// The exit status, the output, and the one line of complaint.
pub(crate) fn outcome(command: &mut Command) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// A process with its output piped. It is killed and reaped on drop.
pub(crate) struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
    complaints: BufReader<PipeReader>,
}

impl Running {
    pub(crate) fn spawn(command: &mut Command) -> Self {
        Self::complaining_to(std::io::pipe().unwrap(), command)
    }

    /// With a pipe of the test's own for its complaints.
    pub(crate) fn complaining_to(pipe: (PipeReader, PipeWriter), command: &mut Command) -> Self {
        let (complaints, writer) = pipe;
        let spawned = command.stdout(Stdio::piped()).stderr(writer).spawn();
        // Else the pipe would not end with the process.
        command.stderr(Stdio::null());
        let mut child = spawned.unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            output,
            complaints: BufReader::new(complaints),
        }
    }

    /// The next line of its output.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// The next line of its complaints.
    pub(crate) fn complaint(&mut self) -> String {
        let mut line = String::new();
        self.complaints.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Ends its input, for a script that waits with `read`.
    pub(crate) fn close_input(&mut self) {
        drop(self.child.stdin.take());
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        signal_to(self.pid(), signal);
    }

    /// Waits for its end, and answers with the status.
    pub(crate) fn status(&mut self) -> ExitStatus {
        eventually("the process ends", || self.child.try_wait().unwrap())
    }

    /// Waits for its end; answers with the status and its complaints.
    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        let status = self.status();
        let mut complaints = String::new();
        self.complaints.read_to_string(&mut complaints).unwrap();
        (status, complaints)
    }

    /// Reads its output to the end, and answers with that and the status.
    pub(crate) fn end_with_output(mut self) -> (ExitStatus, String) {
        let mut shown = String::new();
        self.output.read_to_string(&mut shown).unwrap();
        (self.status(), shown)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// By a handle, which no thread has: ids are used again, and a signal to that of a thread of this process would end all tests.
pub(crate) fn signal_to(pid: i32, signal: Signal) {
    let process = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    pidfd_send_signal(process, signal).unwrap();
}

/// Asks again until there is an answer.
pub(crate) fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(began.elapsed() < PATIENCE, "not so within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until there is no such process any more, or nothing of it but its place in a table.
#[cfg(target_os = "linux")]
pub(crate) fn gone(pid: i32) {
    eventually("the process is gone", || {
        (state(pid).is_none_or(|state| state == 'Z')).then_some(())
    });
}

/// There is no such process any more, at once.
#[cfg(target_os = "linux")]
pub(crate) fn has_ended(pid: i32, when: &str) {
    let state = state(pid);
    assert!(state.is_none_or(|state| state == 'Z'), "{state:?} {when}");
}

/// The state of a process, as `ps` shows it.
#[cfg(target_os = "linux")]
pub(crate) fn state(pid: i32) -> Option<char> {
    stat(pid, 0)?.chars().next()
}

/// That nothing happens is the condition. lockkit waits for 50 ms before it stops.
#[cfg(target_os = "linux")]
pub(crate) fn is_not_stopped_soon(pid: i32) {
    thread::sleep(Duration::from_millis(300));
    assert_ne!(state(pid), Some('T'), "it is stopped");
}

#[cfg(target_os = "linux")]
pub(crate) fn parent(pid: i32) -> Option<i32> {
    stat(pid, 1)?.parse().ok()
}

/// Field by field what the system says of a process, behind its program's name.
#[cfg(target_os = "linux")]
fn stat(pid: i32, field: usize) -> Option<String> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(field).map(str::to_owned)
}

pub(crate) fn group(pid: i32) -> i32 {
    let group = getpgid(Pid::from_raw(pid)).unwrap();
    group.as_raw_nonzero().get()
}

pub(crate) fn session(pid: i32) -> i32 {
    let session = getsid(Pid::from_raw(pid)).unwrap();
    session.as_raw_nonzero().get()
}

/// Returns whether the process has a handler for the signal.
#[cfg(target_os = "linux")]
pub(crate) fn catches(pid: i32, signal: Signal) -> bool {
    in_mask(&pid.to_string(), "SigCgt:", signal)
}

/// Returns whether this process was started with the signal ignored, as a shell's `&` does with INT and QUIT. Its
/// children are then, too.
#[cfg(target_os = "linux")]
pub(crate) fn ignored(signal: Signal) -> bool {
    in_mask("self", "SigIgn:", signal)
}

#[cfg(target_os = "linux")]
fn in_mask(process: &str, mask: &str, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix(mask)).unwrap();
    let mask = u64::from_str_radix(mask.trim(), 16).unwrap();
    mask >> (signal.as_raw() - 1) & 1 == 1
}

/// A client of the test's own on the same server, to wait for the lock without starting a process.
pub(crate) fn in_this_process<T>(task: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(task)
}
