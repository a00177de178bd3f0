//! Temporary directories that are removed when the test process ends, however it ends.
//!
//! A static is not dropped and a killed process runs nothing, so the removal cannot be left to `Drop` alone. One
//! helper process waits for the end of a pipe whose other end is here, and removes everything then.

use std::{
    io,
    process::{Child, Command, Stdio},
    sync::Mutex,
};

use tempfile::TempDir;

/// The parent of all this process's directories, and the process that removes them.
struct Home {
    root: TempDir,
    /// Its standard input is the pipe.
    _janitor: Child,
}

static HOME: Mutex<Option<Home>> = Mutex::new(None);

/// Whatever still works in there is killed first: a server's children may be paused, and are told of nothing then. One
/// that is just being killed may still write a file into a directory as it is removed.
const JANITOR: &str = r#"
trap '' HUP INT TERM
while read -r _; do :; done
for process in /proc/[0-9]*; do
    case $(readlink "$process/cwd") in "$1"/*) kill -9 "${process#/proc/}" ;; esac
done
for _ in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf "$1" && exit
    sleep 0.1
done
"#;

/// A new empty directory. It goes with the value, or with the process.
pub(crate) fn new(name: &str) -> io::Result<TempDir> {
    let mut home = HOME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let home = match &mut *home {
        Some(home) => home,
        none => none.insert(Home::new()?),
    };
    tempfile::Builder::new()
        .prefix(&format!("{name}-"))
        .tempdir_in(home.root.path())
}

impl Home {
    fn new() -> io::Result<Self> {
        let root = tempfile::Builder::new().prefix("lockkit-testbed-").tempdir()?;
        let janitor = Command::new("sh")
            .args(["-c", JANITOR, "janitor"])
            .arg(root.path())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self {
            root,
            _janitor: janitor,
        })
    }
}
