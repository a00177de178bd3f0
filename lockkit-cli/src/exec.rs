//! The step between `lockkit run` and its command: the same program once more, which ties itself to the life of its
//! parent and then becomes the command.
//!
//! Between fork and exec only async-signal-safe code may run, which safe Rust cannot promise; so the parent-death
//! signal is armed here, after an exec of our own. It survives the next exec, unless the command is set-user-ID.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, PipeReader, PipeWriter, Read, Write},
    os::{fd::AsRawFd, unix::process::CommandExt},
    path::Path,
    process::{self, Stdio},
};

use lockkit::spi::chain;
use rustix::{
    fs::{OFlags, fcntl_setfl},
    process::getppid,
};
use tokio::signal::unix::{self, SignalKind};

use crate::{
    args::Exec,
    failure::{FAILED, Failure, NOT_EXECUTABLE, NOT_FOUND, cannot_start},
    family::proc_is_of_this,
};

/// The hidden subcommand.
pub(crate) const SUBCOMMAND: &str = "__exec";

/// Its option.
const SAYS_THAT_IT_BEGINS: &str = "--begins";

/// The pipe by which a process says why it could not become the command, and if it is a job, that it is about to. Neither its status nor
/// its name tells that: a command may have the same. Nor could the process say it itself: what it would write to may be a pipe that nobody
/// reads, or has read to its end.
///
/// No end of the pipe is inherited. The process opens it by way of its parent, where the system has a way (Linux, if its user may read this
/// program). Elsewhere it says so itself, and each command counts as one that has run.
pub(crate) struct NotRun {
    told: PipeReader,
    tell: PipeWriter,
    /// The process says when it is about to become the command. A signal that ends it before has ended no job.
    hears_of_begin: bool,
}

/// The room that each pipe has, however many its user has.
const ROOM: usize = 4096;

/// The byte that a process writes before it becomes a job.
const BEGINS: u8 = b'\n';

impl NotRun {
    fn new(is_job: bool) -> io::Result<Self> {
        let (told, tell) = io::pipe()?;
        fcntl_setfl(&told, OFlags::NONBLOCK)?;
        Ok(Self {
            told,
            tell,
            hears_of_begin: is_job && children_can_open_what_this_has(),
        })
    }

    /// Returns why there was no command, if there was none. To be asked when it has exited.
    pub(crate) fn why(&self) -> Option<String> {
        let mut said = [0; ROOM];
        let Ok(count) = (&self.told).read(&mut said) else {
            return self
                .hears_of_begin
                .then(|| "the command did not begin".to_owned());
        };
        let why = said[..count].strip_prefix(&[BEGINS]).unwrap_or(&said[..count]);
        (!why.is_empty()).then(|| String::from_utf8_lossy(why).into_owned())
    }
}

/// `command`, to be spawned by this process from a thread that lives as long as this process does. If it `ignores_children`, it
/// begins with CHLD ignored, as it [can](can_ignore_children). If it `is_job`, [`NotRun`] knows of one that was ended before it began.
pub(crate) fn tied_to_this_process(
    command: &[OsString],
    ignores_children: bool,
    is_job: bool,
) -> Result<(process::Command, NotRun), Failure> {
    let not_run = NotRun::new(is_job).map_err(|error| cannot_start(&error))?;
    // This path stays good when the file has been replaced or removed since. `env` is another program than this one, and has to be told
    // which that is.
    let this_program = if cfg!(target_os = "linux") {
        let this = if ignores_children {
            // The id that `/proc` knows this process by. If that is of another namespace, this one's own id is a stranger's there.
            fs::read_link("/proc/self").map_err(|error| cannot_start(&error))?
        } else {
            "self".into()
        };
        Path::new("/proc").join(this).join("exe")
    } else {
        std::env::current_exe().map_err(|error| cannot_start(&error))?
    };
    let mut tied = if ignores_children {
        let mut tied = process::Command::new(ENV);
        tied.arg(IGNORE_CHILDREN).arg(this_program);
        tied
    } else {
        process::Command::new(this_program)
    };
    tied.arg(SUBCOMMAND);
    if not_run.hears_of_begin {
        tied.arg(SAYS_THAT_IT_BEGINS);
    }
    tied.arg(process::id().to_string())
        .arg(not_run.tell.as_raw_fd().to_string())
        .arg("--")
        .args(command)
        .stdin(Stdio::inherit());
    Ok((tied, not_run))
}

/// The program that begins another with a signal ignored. lockkit has a handler for CHLD, which an exec takes away, and safe Rust
/// ignores no signal.
const ENV: &str = "env";
const IGNORE_CHILDREN: &str = "--ignore-signal=CHLD";

/// Returns whether the system's `env` is one that can: GNU's. Within a runtime.
pub(crate) fn can_ignore_children() -> bool {
    // Nobody can wait for a child while CHLD is ignored.
    let handled = unix::signal(SignalKind::child());
    let mut env = process::Command::new(ENV);
    env.arg(IGNORE_CHILDREN)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    handled.is_ok() && env.status().is_ok_and(|status| status.success())
}

/// Returns only if it fails: with the status to exit with, if the parent was [told](NotRun) why.
pub(crate) fn become_command(args: &Exec) -> Result<u8, Failure> {
    let mut tell = None;
    if args.begins {
        // Without that, the parent would take a job that runs for one that has not.
        let opened = open_of_parent(args);
        tell = Some(
            opened
                .map_err(|error| Failure::because("cannot tell lockkit that the command begins", &error))?,
        );
    }
    let failure = try_to_become_command(args, tell.as_mut());
    let why = failure.message().as_bytes();
    let tell = tell.or_else(|| open_of_parent(args).ok());
    match tell.map(|mut tell| tell.write_all(&why[..why.len().min(ROOM - 1)])) {
        Some(Ok(())) => Ok(failure.status()),
        _ => Err(failure),
    }
}

/// Opens the end of the pipe that the parent is told through.
fn open_of_parent(args: &Exec) -> io::Result<File> {
    if !is_child_of(args.parent) {
        return Err(io::Error::other("lockkit has gone"));
    }
    let tell = format!("/proc/{}/fd/{}", args.parent, args.tell);
    OpenOptions::new().write(true).open(tell)
}

/// Returns whether a child finds the descriptors of this process in `/proc`. Not where its user may not read the program: what such a
/// process has is no user's but root's to open.
fn children_can_open_what_this_has() -> bool {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{DumpableBehavior, dumpable_behavior};

        proc_is_of_this() && dumpable_behavior() == Ok(DumpableBehavior::Dumpable)
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Returns whether this is the parent, and `/proc` that of its processes: else its name there may be a stranger's.
fn is_child_of(parent: i32) -> bool {
    proc_is_of_this() && getppid().is_some_and(|now| now.as_raw_nonzero().get() == parent)
}

/// If there is somebody to `tell`, it hears right before the command begins.
fn try_to_become_command(args: &Exec, tell: Option<&mut File>) -> Failure {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, set_parent_process_death_signal};

        if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
            return Failure::because("cannot tie the command to lockkit", &error);
        }
        // A parent that died before the signal was armed has sent none.
        if getppid().map(rustix::process::Pid::as_raw_nonzero).map(i32::from) != Some(args.parent) {
            return Failure::new(FAILED, "lockkit died before it could start the command");
        }
    }
    let [program, arguments @ ..] = args.command.as_slice() else {
        return Failure::new(FAILED, "there is no command to run");
    };
    if let Some(Err(error)) = tell.map(|tell| tell.write_all(&[BEGINS])) {
        return Failure::because("cannot tell lockkit that the command begins", &error);
    }
    let error = process::Command::new(program).args(arguments).exec();
    let status = if error.kind() == io::ErrorKind::NotFound {
        NOT_FOUND
    } else {
        NOT_EXECUTABLE
    };
    Failure::of_arguments(
        status,
        &format!("cannot run {}: {}", program.to_string_lossy(), chain(&error)),
    )
}
