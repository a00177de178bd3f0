//! The step between `lockkit run` and its command: the same program once more, which ties itself to the life of its
//! parent and then becomes the command.
//!
//! Between fork and exec only async-signal-safe code may run, which safe Rust cannot promise; so the parent-death
//! signal is armed here, after an exec of our own. It survives the next exec, unless the command is set-user-ID.

use std::{
    ffi::{CStr, OsString},
    io,
    os::unix::process::CommandExt,
    process::{self, Stdio},
};

use lockkit::spi::chain;

use crate::{
    args::Exec,
    failure::{FAILED, Failure, NOT_EXECUTABLE, NOT_FOUND, cannot_start},
};

/// The hidden subcommand.
pub(crate) const SUBCOMMAND: &str = "__exec";

/// The name that the process goes by once it could not become the command. Statuses tell nothing: a command may have the same.
pub(crate) const NOT_RUN: &CStr = c"lockkit-not-run";

/// `command`, to be spawned by this process from a thread that lives as long as this process does.
pub(crate) fn tied_to_this_process(command: &[OsString]) -> Result<process::Command, Failure> {
    // This path stays good when the file has been replaced or removed since.
    let this_program = if cfg!(target_os = "linux") {
        "/proc/self/exe".into()
    } else {
        std::env::current_exe().map_err(|error| cannot_start(&error))?
    };
    let mut tied = process::Command::new(this_program);
    tied.arg(SUBCOMMAND)
        .arg(process::id().to_string())
        .arg("--")
        .args(command)
        .stdin(Stdio::inherit());
    Ok(tied)
}

/// Returns only if it fails. Its parent finds out by the [name](NOT_RUN) that the process has then.
pub(crate) fn become_command(args: &Exec) -> Failure {
    let failure = try_to_become_command(args);
    #[cfg(target_os = "linux")]
    {
        // Without it, the command counts as one that has run.
        let _ = rustix::thread::set_name(NOT_RUN);
    }
    failure
}

fn try_to_become_command(args: &Exec) -> Failure {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, getppid, set_parent_process_death_signal};

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
    let error = process::Command::new(program).args(arguments).exec();
    let status = if error.kind() == io::ErrorKind::NotFound {
        NOT_FOUND
    } else {
        NOT_EXECUTABLE
    };
    Failure::new(
        status,
        format!("cannot run {}: {}", program.to_string_lossy(), chain(&error)),
    )
}
