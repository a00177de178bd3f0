//! Files.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

use lockkit::Lock;
use lockkit_testbed::Mounted;
use rustix::process::geteuid;
use tempfile::TempDir;

use super::{Printed, Table, alone, connect, connecting, meanwhile, says, trying};
use crate::tool::in_this_process;

fn url(dir: &Path) -> String {
    format!("file://{}", dir.display())
}

/// A directory in which a lock was held before, so that its files are there.
fn used() -> TempDir {
    let dir = TempDir::new().unwrap();
    lock_once(dir.path(), "job");
    dir
}

fn lock_once(dir: &Path, name: &str) {
    in_this_process(async {
        let client = connect(&url(dir)).await.unwrap();
        let guard = client.lock(name).unwrap().acquire().await.unwrap();
        guard.release().await.unwrap();
    });
}

/// The error of a shared lock, or of a semaphore with one permit, that is tried for where this file is in the way.
fn barred_by(file: &str, is_semaphore: bool) -> Printed {
    let dir = used();
    fs::write(dir.path().join("lockkit").join(file), "not ours").unwrap();
    in_this_process(async {
        let client = connect(&url(dir.path())).await.unwrap();
        let lock: Lock = if is_semaphore {
            client.semaphore("job", 1).unwrap()
        } else {
            client.lock("job").unwrap().shared()
        };
        alone(&lock.try_acquire().await.unwrap_err())
    })
}

/// The error of a lock that is waited for.
fn waiting(dir: &Path) -> Printed {
    in_this_process(async {
        let client = connect(&url(dir)).await.unwrap();
        alone(&client.lock("job").unwrap().acquire().await.unwrap_err())
    })
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn file_errors_are_those_of_the_catalogue() {
    let mut table = Table::new("Files", "The system's words are those of Linux.");

    table.row(
        "the directory cannot be made",
        says("Not a directory", "choose another directory for all processes").of("/dev/null/locks"),
        "Name a directory that can, for all processes.",
        || connecting("file:///dev/null/locks"),
    );
    table.row(
        "the directory is a file",
        says("is a file", "choose another directory for all processes"),
        "Name a directory, the same for all processes.",
        || {
            let dir = TempDir::new().unwrap();
            let file = dir.path().join("locks");
            fs::write(&file, "").unwrap();
            connecting(&url(&file))
        },
    );
    table.row(
        "the directory is a symbolic link",
        says("is a symbolic link", "choose the directory that it leads to"),
        "Name what it leads to.",
        || {
            let dir = TempDir::new().unwrap();
            let link = dir.path().join("locks");
            symlink(dir.path(), &link).unwrap();
            connecting(&url(&link))
        },
    );
    table.row(
        "a lock's file is a directory",
        says("Is a directory", "remove it").of("job.lock"),
        "Remove it.",
        || {
            let dir = used();
            fs::remove_file(dir.path().join("lockkit/job.lock")).unwrap();
            fs::create_dir(dir.path().join("lockkit/job.lock")).unwrap();
            trying(&url(dir.path()))
        },
    );
    table.row(
        "a lock's file is a symbolic link",
        says("is a symbolic link", "choose another directory for all processes").of("job.lock"),
        "Remove it.",
        || {
            let dir = used();
            fs::remove_file(dir.path().join("lockkit/job.lock")).unwrap();
            symlink("elsewhere", dir.path().join("lockkit/job.lock")).unwrap();
            trying(&url(dir.path()))
        },
    );
    table.row(
        "a lock's file is damaged",
        says("is damaged", "delete the file").of("job.lock"),
        "Delete it once nobody holds the lock.",
        || {
            let dir = used();
            fs::write(dir.path().join("lockkit/job.lock"), "not ours").unwrap();
            trying(&url(dir.path()))
        },
    );
    table.row(
        "a semaphore has other permits",
        says("has 2 permits", "ask for the same number everywhere").of("`job`"),
        "Use one size.",
        || {
            let dir = TempDir::new().unwrap();
            in_this_process(async {
                let client = connect(&url(dir.path())).await.unwrap();
                let _held = client.semaphore("job", 2).unwrap().acquire().await.unwrap();
                let other = client.semaphore("job", 3).unwrap();
                alone(&other.try_acquire().await.unwrap_err())
            })
        },
    );
    table.row(
        "the directory was removed while a client was connected, and a file is in its place",
        says(
            "is a file, not a directory",
            "choose another directory for all processes",
        ),
        "Remove the file.",
        || {
            let dir = TempDir::new().unwrap();
            let locks = dir.path().join("locks");
            fs::create_dir(&locks).unwrap();
            meanwhile(&url(&locks), |_| {
                fs::remove_dir_all(&locks).unwrap();
                fs::write(&locks, "").unwrap();
            })
        },
    );
    table.row(
        "the namespace's directory is a file",
        says(
            "is a file, not a directory",
            "choose another directory for all processes",
        )
        .of("/lockkit"),
        "Remove the file, or choose another `namespace`.",
        || {
            let dir = TempDir::new().unwrap();
            fs::write(dir.path().join("lockkit"), "").unwrap();
            connecting(&url(dir.path()))
        },
    );
    table.row(
        "the namespace's directory is a symbolic link",
        says("is a symbolic link", "choose the directory that it leads to").of("/lockkit"),
        "Remove it, or choose another `namespace`.",
        || {
            let dir = TempDir::new().unwrap();
            symlink(".", dir.path().join("lockkit")).unwrap();
            connecting(&url(dir.path()))
        },
    );
    table.row(
        "a symbolic link above the directory leads nowhere",
        says(
            "is a symbolic link, not a directory",
            "choose the directory that it leads to",
        )
        .of("/gone"),
        "Mount what it leads to, or correct it.",
        || {
            let dir = TempDir::new().unwrap();
            symlink("nowhere", dir.path().join("gone")).unwrap();
            trying(&url(&dir.path().join("gone/locks")))
        },
    );
    table.row(
        "the URL has two slashes before its path",
        says("has no host part", "three slashes make an absolute path").of("file://locks"),
        "Write three slashes and an absolute path.",
        || connecting("file://locks"),
    );
    table.row(
        "the namespace has a slash in it",
        says("characters other than", "").of("team/app"),
        "Take another namespace.",
        || {
            let dir = TempDir::new().unwrap();
            connecting(&format!("{}?namespace=team/app", url(dir.path())))
        },
    );
    table.row(
        "the namespace is too long",
        says("longer than 80 bytes", "").of("`namespace`"),
        "Take a shorter one.",
        || {
            let dir = TempDir::new().unwrap();
            connecting(&format!("{}?namespace={}", url(dir.path()), "x".repeat(81)))
        },
    );
    table.row(
        "a lock's file was copied from another lock's",
        says("belongs to the lock \"report\"", "delete the file").of("job.lock"),
        "Delete the copy once nobody holds the lock.",
        || {
            let dir = TempDir::new().unwrap();
            lock_once(dir.path(), "report");
            let locks = dir.path().join("lockkit");
            fs::copy(locks.join("report.lock"), locks.join("job.lock")).unwrap();
            trying(&url(dir.path()))
        },
    );
    table.row(
        "a lock's file is gone, and its file of floors is damaged",
        says("is damaged", "delete the file").of("job.ceiling"),
        "Delete it once nobody holds the lock.",
        || {
            let dir = used();
            let locks = dir.path().join("lockkit");
            fs::remove_file(locks.join("job.lock")).unwrap();
            fs::write(locks.join("job.ceiling"), "not ours").unwrap();
            trying(&url(dir.path()))
        },
    );
    table.row(
        "a semaphore's file is damaged",
        says("is damaged", "delete the file").of("job.sem"),
        "Delete it once nobody holds a permit.",
        || barred_by("job.sem", true),
    );
    table.row(
        "a file is in the place of a semaphore's permits",
        says("Not a directory", "choose another directory for all processes").of("job.permits"),
        "Remove the file.",
        || barred_by("job.permits", true),
    );
    table.row(
        "a file is in the place of the notes of shared holders",
        says(
            "is a file, not a directory",
            "choose another directory for all processes",
        )
        .of("job.readers"),
        "Remove the file.",
        || barred_by("job.readers", false),
    );
    table.row(
        "a file is in the place of the queue",
        says("Not a directory", "choose another directory for all processes").of("job.queue"),
        "Remove the file.",
        || {
            let dir = used();
            fs::write(dir.path().join("lockkit/job.queue"), "").unwrap();
            waiting(dir.path())
        },
    );
    table.row(
        "a directory is in the place of a waiter's ticket",
        says(
            "is something else, not a regular file",
            "choose another directory for all processes",
        )
        .of("job.queue/"),
        "Remove it.",
        || {
            let dir = used();
            let ticket = format!("lockkit/job.queue/00000000000000000001.{}", "0".repeat(32));
            fs::create_dir_all(dir.path().join(ticket)).unwrap();
            waiting(dir.path())
        },
    );
    table.row(
        "a semaphore with too many permits",
        says("10001 is more than the 10000", "ask for fewer").of("`permits`"),
        "Take fewer permits, or another backend.",
        || {
            let dir = TempDir::new().unwrap();
            in_this_process(async {
                let client = connect(&url(dir.path())).await.unwrap();
                let semaphore = client.semaphore("job", 10_001).unwrap();
                alone(&semaphore.try_acquire().await.unwrap_err())
            })
        },
    );
    let mounts = Mounted::new(TempDir::new().unwrap().path(), "size=64k").is_some();
    table.row_where(
        mounts,
        "the disk is full",
        says("No space left on device", "make room on the disk").of("job.lock"),
        "Make room. What is held stays held.",
        || {
            let dir = TempDir::new().unwrap();
            let _mounted = Mounted::new(dir.path(), "size=64k").unwrap();
            assert!(fs::write(dir.path().join("filler"), vec![1; 1 << 20]).is_err());
            trying(&url(dir.path()))
        },
    );
    table.row_where(
        mounts,
        "the disk has room for no more files",
        says("No space left on device", "make room on the disk").of("/lockkit/job."),
        "Remove files: `df -i` tells how many there may be.",
        || {
            let dir = TempDir::new().unwrap();
            // For the directory, that of the namespace, and one file.
            let _mounted = Mounted::new(dir.path(), "size=1m,nr_inodes=3").unwrap();
            trying(&url(dir.path()))
        },
    );
    table.row_where(
        mounts,
        "the file system is read-only",
        says("Read-only file system", "mount it for writing").of("/lockkit"),
        "Mount it for writing. Another directory has other locks: it has to be the same for all processes.",
        || {
            let dir = TempDir::new().unwrap();
            let mounted = Mounted::new(dir.path(), "size=64k").unwrap();
            lock_once(dir.path(), "job");
            mounted.again("remount,ro").unwrap();
            trying(&url(dir.path()))
        },
    );
    // Root may write anywhere.
    table.row_where(
        !geteuid().is_root(),
        "the directory may not be written",
        says("Permission denied", "give this user the right").of("/lockkit"),
        "Give the user the right, or run all processes under one account.",
        || {
            let dir = used();
            let locks = dir.path().join("lockkit");
            fs::set_permissions(&locks, fs::Permissions::from_mode(0o500)).unwrap();
            let printed = trying(&url(dir.path()));
            fs::set_permissions(&locks, fs::Permissions::from_mode(0o700)).unwrap();
            printed
        },
    );
    table.check();
}
