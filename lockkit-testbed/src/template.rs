//! Templates of what takes long to make and is the same each time: kept beside the build, and copied.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
};

/// The directory `name`, which `make` makes at the path that it is given, unless it is there from an earlier run.
pub(crate) fn kept(name: &str, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    let home = build_directory().join("testbed");
    let kept = home.join(name);
    // Tests that begin together would each make it, and all but one in vain.
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if kept.is_dir() {
        return Ok(kept);
    }
    fs::create_dir_all(&home)?;
    // Several test processes may be at it.
    let making = tempfile::Builder::new().prefix("making-").tempdir_in(&home)?;
    let data = making.path().join("data");
    make(&data)?;
    match fs::rename(&data, &kept) {
        Err(_) if kept.is_dir() => Ok(kept),
        done => done.map(|()| kept),
    }
}

/// `target`, of which the running test is in `<profile>/deps`.
fn build_directory() -> PathBuf {
    let test = std::env::current_exe().unwrap_or_default();
    let deps = test.ancestors().find(|path| path.ends_with("deps"));
    deps.and_then(|deps| deps.ancestors().nth(2))
        .map_or_else(std::env::temp_dir, Path::to_path_buf)
}

/// Copies a directory by `cp`, which is `command`.
pub(crate) fn copy(mut command: Command, from: &Path, to: &Path) -> io::Result<()> {
    printed(command.arg("-R").arg(from).arg(to)).map(drop)
}

/// Runs a program to its end. What it printed is the result, or part of the error.
pub(crate) fn printed(command: &mut Command) -> io::Result<String> {
    let program = command.get_program().display().to_string();
    let output = command
        .output()
        .map_err(|error| io::Error::new(error.kind(), format!("cannot run {program}: {error}")))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        return Ok(printed.into_owned());
    }
    let failed = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!(
        "{program}: {}: {printed}{failed}",
        output.status
    )))
}
