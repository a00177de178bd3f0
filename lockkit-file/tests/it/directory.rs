//! The directory: what is created there, and what may be wrong with it.

use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use lockkit_conformance::Traces;
use lockkit_core::{
    Error, FencingToken, LockClient, LockKind,
    spi::{Backend, Mode, chain},
};
use lockkit_file::{FileBackend, FileConfig};
use lockkit_testbed::Mounted;
use tempfile::TempDir;

use crate::fixture::{DIR, PATIENCE, ROLE, TRY, claim, files, granted, held, name, open, permits, request};

async fn refusal(dir: impl Into<PathBuf>) -> Error {
    FileBackend::open(FileConfig::new(dir)).await.unwrap_err()
}

#[tokio::test]
async fn symbolic_links_and_foreign_files_are_refused() {
    let dir = TempDir::new().unwrap();
    let real = dir.path().join("real");
    fs::create_dir(&real).unwrap();
    let link = dir.path().join("link");
    symlink(&real, &link).unwrap();
    for path in [
        link.clone(),
        link.join("."),
        PathBuf::from(format!("{}/", link.display())),
    ] {
        let error = chain(&refusal(&path).await);
        assert!(error.contains("link is a symbolic link"), "{error}");
    }
    symlink(dir.path(), real.join("lockkit")).unwrap();
    let error = chain(&refusal(&real).await);
    assert!(error.contains("lockkit is a symbolic link"), "{error}");
    fs::remove_file(real.join("lockkit")).unwrap();

    let backend = open(&real).await;
    granted(&mut claim(&backend, "n", Mode::Exclusive).await).await;
    let target = dir.path().join("target");
    fs::write(&target, "precious").unwrap();
    symlink(&target, real.join("lockkit/linked.lock")).unwrap();
    let error = claim(&backend, "linked", Mode::Exclusive)
        .await
        .attempt(TRY)
        .await
        .unwrap_err();
    assert!(
        chain(&error).contains("linked.lock is a symbolic link"),
        "{}",
        chain(&error)
    );
    assert!(!error.is_transient());
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");

    fs::create_dir(real.join("lockkit/dir.lock")).unwrap();
    let error = claim(&backend, "dir", Mode::Exclusive)
        .await
        .attempt(TRY)
        .await
        .unwrap_err();
    assert!(chain(&error).contains("dir.lock"), "{}", chain(&error));

    fs::write(real.join("lockkit/foreign.lock"), "not ours").unwrap();
    let error = claim(&backend, "foreign", Mode::Exclusive)
        .await
        .attempt(TRY)
        .await
        .unwrap_err();
    assert!(
        chain(&error).contains("foreign.lock is damaged"),
        "{}",
        chain(&error)
    );
    assert_eq!(
        fs::read_to_string(real.join("lockkit/foreign.lock")).unwrap(),
        "not ours"
    );
}

/// Returns a directory elsewhere that has these files, and puts a link to it in the place of `path`.
fn link_in_place_of(path: &Path, files: &[&str]) -> TempDir {
    let elsewhere = TempDir::new().unwrap();
    for file in files {
        fs::write(elsewhere.path().join(file), "precious").unwrap();
    }
    fs::remove_dir_all(path).unwrap();
    symlink(elsewhere.path(), path).unwrap();
    elsewhere
}

/// Returns what refuses each way to look.
async fn refusals_to_look(dir: &Path, kind: LockKind) -> [Error; 3] {
    let backend = open(dir).await;
    let inspected = backend.inspect(&name("n"), kind).await.unwrap_err();
    let revoked = backend.revoke(&name("n"), kind, FencingToken::new(1)).await;
    let listed = LockClient::new(backend).list("").unwrap().next().await;
    [inspected, revoked.unwrap_err(), listed.unwrap().unwrap_err()]
}

/// What is in it would be removed, with the rights of the one who looks.
#[tokio::test]
async fn a_link_in_the_place_of_the_notes_is_refused() {
    let dir = TempDir::new().unwrap();
    let (backend, mut holder) = held(dir.path(), Mode::Shared).await;
    holder.release().await.unwrap();
    // The other is named as a note is.
    let precious = ["precious", &"0".repeat(32)];
    let elsewhere = link_in_place_of(&dir.path().join("lockkit/n.readers"), &precious);
    for error in refusals_to_look(dir.path(), LockKind::Lock).await {
        assert!(
            chain(&error).contains("n.readers is a symbolic link"),
            "{}",
            chain(&error)
        );
    }
    let tried = claim(&backend, "n", Mode::Shared).await.attempt(TRY).await;
    tried.unwrap_err();
    assert_eq!(files(elsewhere.path()).len(), precious.len());
}

#[tokio::test]
async fn no_file_but_a_dead_holders_note_is_removed() {
    let dir = TempDir::new().unwrap();
    let (backend, mut holder) = held(dir.path(), Mode::Shared).await;
    holder.release().await.unwrap();
    let notes = dir.path().join("lockkit/n.readers");
    let hex = "0".repeat(32);
    for file in ["precious", &hex, &format!(".{hex}"), &format!("{hex}.old")] {
        fs::write(notes.join(file), "").unwrap();
    }
    let state = backend.inspect(&name("n"), LockKind::Lock).await.unwrap();
    assert!(state.is_free());
    assert_eq!(
        files(&notes),
        [notes.join(format!("{hex}.old")), notes.join("precious")]
    );
}

/// Permits would be made there, and what is named as one is would be emptied.
#[tokio::test]
async fn a_link_in_the_place_of_the_permits_is_refused() {
    let dir = TempDir::new().unwrap();
    let (backend, mut holder) = held(dir.path(), permits(2)).await;
    holder.release().await.unwrap();
    let elsewhere = link_in_place_of(&dir.path().join("lockkit/n.permits"), &["0"]);
    let tried = claim(&backend, "n", permits(2)).await.attempt(TRY).await;
    let looked = refusals_to_look(dir.path(), LockKind::Semaphore).await;
    for error in looked.into_iter().chain([tried.unwrap_err()]) {
        assert!(
            chain(&error).contains("n.permits is a symbolic link"),
            "{}",
            chain(&error)
        );
    }
    let precious = elsewhere.path().join("0");
    assert_eq!(files(elsewhere.path()), std::slice::from_ref(&precious));
    assert_eq!(fs::read_to_string(precious).unwrap(), "precious");
}

/// It may be put there when the directory has been opened.
#[tokio::test]
async fn a_link_in_the_place_of_the_namespace_is_refused() {
    let dir = TempDir::new().unwrap();
    let (backend, mut holder) = held(dir.path(), Mode::Exclusive).await;
    holder.release().await.unwrap();
    let elsewhere = link_in_place_of(&dir.path().join("lockkit"), &[]);
    let mut refused = Vec::new();
    for mode in [Mode::Exclusive, Mode::Shared, permits(2)] {
        let tried = claim(&backend, "n", mode).await.attempt(TRY).await;
        refused.push(tried.unwrap_err());
        refused.push(backend.inspect(&name("n"), mode.kind()).await.unwrap_err());
    }
    let listed = LockClient::new(backend).list("").unwrap().next().await;
    refused.push(listed.unwrap().unwrap_err());
    for error in refused {
        assert!(
            chain(&error).contains("lockkit is a symbolic link"),
            "{}",
            chain(&error)
        );
    }
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn bad_directories_and_namespaces_are_one_clear_error() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = refusal(&file).await;
    assert!(
        chain(&error).contains("file is a file, not a directory"),
        "{}",
        chain(&error)
    );
    let error = refusal(file.join("below")).await;
    assert!(
        chain(&error).contains(file.join("below").to_str().unwrap()),
        "{}",
        chain(&error)
    );
    for namespace in ["a/b", "a b", "é", "a:b", &"x".repeat(81)] {
        let mut config = FileConfig::new(dir.path());
        config.namespace = namespace.to_owned();
        let error = FileBackend::open(config).await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::InvalidOptions {
                    option: "namespace",
                    ..
                }
            ),
            "{namespace}: {error}"
        );
    }
    for namespace in [".", "..", "CON", "A"] {
        let mut config = FileConfig::new(dir.path().join("sub"));
        config.namespace = namespace.to_owned();
        let backend = FileBackend::open(config).await.unwrap();
        granted(&mut claim(&backend, "n", Mode::Exclusive).await).await;
    }
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        2,
        "nothing beside the directory"
    );
    assert_eq!(fs::read_dir(dir.path().join("sub")).unwrap().count(), 4);
}

#[tokio::test]
async fn created_files_are_for_their_owner_alone() {
    let parent = TempDir::new().unwrap();
    let dir = parent.path().join("made/here");
    let backend = open(&dir).await;
    granted(&mut claim(&backend, "n", Mode::Shared).await).await;
    granted(&mut claim(&backend, "n", permits(2)).await).await;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for path in [&dir, &dir.join("lockkit"), &dir.join("lockkit/n.readers")] {
        assert_eq!(mode(path), 0o700, "{}", path.display());
    }
    for path in files(&dir) {
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
    let real = dir.canonicalize().unwrap();
    let server = format!("file://{}", real.display());
    assert!(
        backend.info().server.eq_ignore_ascii_case(&server),
        "{} {server}",
        backend.info().server
    );

    let there = parent.path().join("there");
    fs::create_dir(&there).unwrap();
    fs::set_permissions(&there, fs::Permissions::from_mode(0o750)).unwrap();
    open(&there).await;
    assert_eq!(mode(&there), 0o750, "an existing directory is left as it was");
}

/// As one in `/tmp` that somebody else has made first.
#[tokio::test]
async fn a_directory_that_others_may_write_is_warned_about() {
    let parent = TempDir::new().unwrap();
    let dir = parent.path().join("locks");
    fs::create_dir_all(dir.join("lockkit")).unwrap();
    let allow = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    for (mode, namespaces, expected) in [
        (0o700, 0o700, false),
        (0o755, 0o775, false),
        (0o777, 0o700, true),
        (0o1777, 0o700, true),
        (0o755, 0o777, true),
    ] {
        allow(&dir, mode);
        allow(&dir.join("lockkit"), namespaces);
        let traces = Traces::default();
        let _recording = tracing::subscriber::set_default(traces.clone());
        open(&dir).await;
        let warned = traces.text().contains("other accounts may write");
        assert_eq!(warned, expected, "{mode:o} {namespaces:o}");
    }
}

/// It is made by whoever locks first.
#[tokio::test]
async fn looking_makes_no_directory() {
    let parent = TempDir::new().unwrap();
    let dir = parent.path().join("made/here");
    let client = LockClient::new(open(&dir).await);
    assert!(client.inspect("n").await.unwrap().is_free());
    assert!(client.list("").unwrap().next().await.is_none());
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    let guard = client.lock("n").unwrap().acquire().await.unwrap();
    assert!(dir.join("lockkit/n.lock").exists());
    assert_eq!(client.inspect("n").await.unwrap().holders[0].token, guard.token());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_read_only_directory_is_one_clear_error() {
    let dir = TempDir::new().unwrap();
    // Root may write anywhere but on a read-only file system.
    let _mounted = if rustix::process::getuid().is_root() {
        let Some(mounted) = Mounted::new(dir.path(), "size=64k") else {
            let error = refusal_to_lock(Path::new("/proc/lockkit")).await;
            println!("root without the right to mount: tried /proc in place of a read-only file system");
            assert!(chain(&error).contains("/proc/lockkit"), "{}", chain(&error));
            return;
        };
        used(dir.path()).await;
        mounted.again("remount,ro").unwrap();
        Some(mounted)
    } else {
        used(dir.path()).await;
        for path in [dir.path().join("lockkit"), dir.path().to_owned()] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o500)).unwrap();
        }
        None
    };
    let state = open(dir.path()).await.inspect(&name("n"), LockKind::Lock).await;
    let error = refusal_to_lock(dir.path()).await;
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).ok();
    assert!(state.unwrap().is_free());
    assert!(!error.is_transient());
    assert!(
        chain(&error).contains(dir.path().to_str().unwrap()),
        "{}",
        chain(&error)
    );
}

/// Has a lock for a moment, so that its files are there.
async fn used(dir: &Path) {
    let (_, mut holder) = held(dir, Mode::Exclusive).await;
    holder.release().await.unwrap();
}

async fn refusal_to_lock(dir: &Path) -> Error {
    let backend = open(dir).await;
    backend.claim(&request("n", Mode::Exclusive)).await.unwrap_err()
}

#[tokio::test]
async fn no_room_for_the_token_is_an_error_and_no_hold() {
    let dir = TempDir::new().unwrap();
    // A limit of no bytes per file fails like a full disk, and needs no privilege.
    let done = Command::new("sh")
        .args([
            "-c",
            "trap '' XFSZ; ulimit -f 0; exec \"$0\" --exact fixture::other_process --nocapture",
        ])
        .arg(std::env::current_exe().unwrap())
        .envs([(ROLE, OsStr::new("full")), (DIR, dir.path().as_os_str())])
        .stderr(Stdio::inherit())
        .stdout(Stdio::piped())
        .output()
        .unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(
        said.contains("cannot write to") && said.contains("n.lock"),
        "{said}"
    );
    let backend = open(dir.path()).await;
    assert!(
        backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
    granted(&mut claim(&backend, "n", Mode::Exclusive).await).await;
}

#[tokio::test]
async fn a_full_disk_is_an_error_and_no_hold() {
    let dir = TempDir::new().unwrap();
    let Some(_mounted) = Mounted::new(dir.path(), "size=64k") else {
        println!("cannot mount: left to no_room_for_the_token_is_an_error_and_no_hold");
        return;
    };
    let backend = open(dir.path()).await;
    let filler = dir.path().join("filler");
    for mode in [Mode::Exclusive, Mode::Shared, permits(2)] {
        assert!(fs::write(&filler, vec![1; 1 << 20]).is_err(), "the disk is full");
        let mut denied = claim(&backend, "n", mode).await;
        let error = denied.attempt(PATIENCE).await.unwrap_err();
        assert!(!error.is_transient());
        assert!(chain(&error).contains("o space left"), "{}", chain(&error));
        let kind = mode.kind();
        assert!(backend.inspect(&name("n"), kind).await.unwrap().is_free());
        fs::remove_file(&filler).unwrap();
        let mut next = claim(&backend, "n", mode).await;
        assert!(
            next.attempt(TRY).await.unwrap().is_some(),
            "the one that failed holds nothing"
        );
        next.release().await.unwrap();
        denied.release().await.unwrap();
        for file in files(dir.path()) {
            fs::remove_file(file).unwrap();
        }
    }
}

#[tokio::test]
async fn names_with_one_hash_are_told_apart() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    let [one, other] = ["a".repeat(1_000), "b".repeat(1_000)];
    for (name, mode) in [(&one, Mode::Exclusive), (&one, permits(1))] {
        let mut claim = claim(&backend, name, mode).await;
        granted(&mut claim).await;
        claim.release().await.unwrap();
    }
    let taken = files(dir.path());
    for mode in [Mode::Exclusive, permits(1)] {
        let mut claim = claim(&backend, &other, mode).await;
        granted(&mut claim).await;
        claim.release().await.unwrap();
    }
    let extension = |path: &PathBuf| path.extension().map(OsStr::to_owned);
    for path in files(dir.path()) {
        if !taken.contains(&path) && extension(&path).is_some() {
            let forged = taken
                .iter()
                .find(|old| extension(old) == extension(&path))
                .unwrap();
            fs::copy(forged, path).unwrap();
        }
    }
    for mode in [Mode::Exclusive, Mode::Shared, permits(1)] {
        let error = claim(&backend, &other, mode)
            .await
            .attempt(TRY)
            .await
            .unwrap_err();
        assert!(!error.is_transient());
        assert!(chain(&error).contains("belongs to the lock"), "{}", chain(&error));
        let error = backend.inspect(&name(&other), mode.kind()).await.unwrap_err();
        assert!(chain(&error).contains("belongs to the lock"), "{}", chain(&error));
    }
}
