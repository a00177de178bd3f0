//! Files.

use std::{fs, os::unix::fs::symlink, path::Path};

use tempfile::TempDir;

use super::{Table, alone, connect, connecting, meanwhile, says, trying};
use crate::tool::in_this_process;

fn url(dir: &Path) -> String {
    format!("file://{}", dir.display())
}

/// A directory in which a lock was held before, so that its files are there.
fn used() -> TempDir {
    let dir = TempDir::new().unwrap();
    in_this_process(async {
        let client = connect(&url(dir.path())).await.unwrap();
        client
            .lock("job")
            .unwrap()
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    });
    dir
}

#[test]
fn file_errors_are_those_of_the_catalogue() {
    let mut table = Table::new("Files", "The system's words are those of Linux.");

    table.row(
        "the directory cannot be made",
        says("Not a directory", "choose another directory").of("/dev/null/locks"),
        "Name a directory that can.",
        || connecting("file:///dev/null/locks"),
    );
    table.row(
        "the directory is a file",
        says("is a file", "choose another directory"),
        "Name a directory.",
        || {
            let dir = TempDir::new().unwrap();
            let file = dir.path().join("locks");
            fs::write(&file, "").unwrap();
            connecting(&url(&file))
        },
    );
    table.row(
        "the directory is a symbolic link",
        says("is a symbolic link", "choose another directory"),
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
        says("is a symbolic link", "choose another directory").of("job.lock"),
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
        says("is a file, not a directory", "choose another directory"),
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
    table.check();
}
