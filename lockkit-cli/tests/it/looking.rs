//! Looking, by those who may not lock.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
};

use crate::tool::{Running, outcome};

/// As root, this tries it as another user, to whom rights apply.
#[test]
fn a_directory_that_may_only_be_read_can_be_looked_at() {
    const SOMEBODY: u32 = 65_534;
    // The way to a test's own directory is not open to all.
    let place = tempfile::tempdir_in("/tmp").unwrap();
    let (program, locks) = (place.path().join("lockkit"), place.path().join("locks"));
    fs::copy(env!("CARGO_BIN_EXE_lockkit"), &program).unwrap();
    fs::create_dir(&locks).unwrap();
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        std::os::unix::fs::chown(&locks, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
    }
    let allow = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    allow(place.path(), 0o711);
    let url = format!("file://{}", locks.display());
    let command = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command
            .args(arguments)
            .env("LOCKKIT_URL", &url)
            .env("PATH", "/usr/bin:/bin");
        command.current_dir("/").stdin(Stdio::null());
        if is_root {
            command.uid(SOMEBODY).gid(SOMEBODY);
        }
        command
    };
    let look = || {
        [&["inspect", "job"][..], &["list"]].map(|arguments| {
            let (status, shown, complaint) = outcome(&mut command(arguments));
            assert_eq!((status, &*complaint), (0, ""), "{arguments:?}");
            shown
        })
    };
    let nothing = look();
    assert_eq!(fs::read_dir(&locks).unwrap().count(), 0, "looking makes nothing");

    let mut holder =
        Running::spawn(command(&["run", "job", "--", "sh", "-c", "echo up; cat"]).stdin(Stdio::piped()));
    assert_eq!(holder.line(), "up");
    let dirs = [locks.join("lockkit"), locks.clone()];
    // From now on, nobody creates what an inspection locks otherwise.
    fs::remove_file(dirs[0].join("job.ledger")).unwrap();
    for dir in &dirs {
        allow(dir, 0o500);
    }
    let held = look();
    let tried = outcome(&mut command(&["run", "--try", "other", "--", "true"]));
    assert!(!dirs[0].join("job.ledger").exists());
    for dir in &dirs {
        allow(dir, 0o700);
    }
    assert_ne!(held, nothing);
    assert!(held[1].contains("job"), "{held:?}");
    let (status, _, complaint) = tried;
    assert_eq!(status, 125, "{complaint}");
    assert!(
        complaint.contains("(give this user the right to it): Permission denied"),
        "{complaint}"
    );
    holder.close_input();
    assert!(holder.end().0.success());
}
