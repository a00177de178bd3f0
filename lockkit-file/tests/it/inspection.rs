//! Inspections, and their probes beside attempts.

use std::{
    fs,
    path::PathBuf,
    pin::pin,
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use lockkit_core::{
    Error, FencingToken, LockClient, LockKind,
    spi::{Backend, Mode, chain},
};
use lockkit_testbed::Mounted;
use tempfile::TempDir;

use crate::fixture::{LIMIT, PATIENCE, TRY, claim, files, granted, held, name, open, permits, request};

#[tokio::test]
async fn inspection_shows_labels_and_tokens_of_all_holders() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    assert!(
        backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
    assert_eq!(
        files(dir.path()),
        Vec::<PathBuf>::new(),
        "an inspection creates no files"
    );
    for (mode, count) in [(Mode::Exclusive, 1), (Mode::Shared, 3), (permits(3), 3)] {
        let (mut held, mut expected) = (Vec::new(), Vec::new());
        for label in ["a", "b", "c"].into_iter().take(count) {
            let mut request = request("n", mode);
            request.label = Some(label.into());
            let mut claim = backend.claim(&request).await.unwrap();
            expected.push((Some(label.to_owned()), *granted(&mut claim).await.tokens.start()));
            held.push(claim);
        }
        let state = backend.inspect(&name("n"), mode.kind()).await.unwrap();
        let shown: Vec<_> = state
            .holders
            .iter()
            .map(|h| (h.label.clone(), h.token.get()))
            .collect();
        assert_eq!(shown, expected);
        assert!(state.waiters.is_none() && state.holders.iter().all(|holder| holder.left.is_none()));

        let token = expected[0].1;
        let error = backend
            .revoke_by_force(&name("n"), mode.kind(), FencingToken::new(token))
            .await
            .unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains(&format!("end process {}", std::process::id())),
            "{error}"
        );
        assert!(
            !backend
                .revoke_by_force(&name("n"), mode.kind(), FencingToken::new(1))
                .await
                .unwrap(),
            "nobody has that token"
        );
        for mut claim in held {
            claim.release().await.unwrap();
        }
        assert!(backend.inspect(&name("n"), mode.kind()).await.unwrap().is_free());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inspection_makes_no_attempt_fail() {
    let dir = TempDir::new().unwrap();
    let backend = Arc::new(open(dir.path()).await);
    let stop = Arc::new(AtomicBool::new(false));
    let looked = Arc::new(AtomicUsize::new(0));
    let inspector = tokio::spawn({
        let (backend, stop, looked) = (backend.clone(), stop.clone(), looked.clone());
        async move {
            while !stop.load(Ordering::SeqCst) {
                for kind in [LockKind::Lock, LockKind::Semaphore] {
                    backend.inspect(&name("n"), kind).await.unwrap();
                }
                looked.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    let mut round = 0;
    while round < 300 || looked.load(Ordering::SeqCst) < 300 {
        for mode in [Mode::Exclusive, Mode::Shared, permits(1)] {
            let mut claim = claim(&backend, "n", mode).await;
            assert!(
                claim.attempt(TRY).await.unwrap().is_some(),
                "{mode:?} in round {round}"
            );
            claim.release().await.unwrap();
        }
        round += 1;
    }
    stop.store(true, Ordering::SeqCst);
    inspector.await.unwrap();
}

#[tokio::test]
async fn a_probe_makes_no_try_return_taken() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    for mode in [Mode::Exclusive, Mode::Shared] {
        let mut claim = claim(&backend, "n", mode).await;
        granted(&mut claim).await;
        claim.release().await.unwrap();
        // As an inspection does, which probes while it has the ledger.
        let locked = |suffix: &str| {
            let path = dir.path().join("lockkit/n").with_extension(suffix);
            let file = fs::File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path);
            let file = file.unwrap();
            file.try_lock().unwrap();
            file
        };
        let (ledger, probe) = (locked("ledger"), locked("lock"));
        let mut attempt = claim.attempt(TRY);
        let early = tokio::time::timeout(Duration::from_millis(100), &mut attempt).await;
        assert!(
            early.is_err(),
            "it cannot tell while there may be a probe: {early:?}"
        );
        // Not by closing: another test may be between fork and exec of a child.
        probe.unlock().unwrap();
        ledger.unlock().unwrap();
        assert!(attempt.await.unwrap().is_some(), "{mode:?}");
        claim.release().await.unwrap();
    }
}

#[tokio::test]
async fn an_inspection_probes_under_the_ledger() {
    let dir = TempDir::new().unwrap();
    let (backend, _holder) = held(dir.path(), Mode::Exclusive).await;
    let ledger = fs::File::create(dir.path().join("lockkit/n.ledger")).unwrap();
    ledger.try_lock().unwrap();
    let lock = name("n");
    let mut inspection = pin!(backend.inspect(&lock, LockKind::Lock));
    let early = tokio::time::timeout(Duration::from_millis(100), &mut inspection).await;
    assert!(early.is_err(), "{early:?}");
    ledger.unlock().unwrap();
    assert!(!inspection.await.unwrap().is_free());
}

/// Whoever may only read would find a lock without a ledger, and probe without it.
#[tokio::test]
async fn the_ledger_is_there_with_the_first_record() {
    for (mode, ledger) in [
        (Mode::Exclusive, "n.ledger"),
        (Mode::Shared, "n.ledger"),
        (permits(2), "n.semledger"),
    ] {
        let dir = TempDir::new().unwrap();
        let (backend, _holder) = held(dir.path(), mode).await;
        let before = files(dir.path());
        assert!(
            before.contains(&dir.path().join("lockkit").join(ledger)),
            "{before:?}"
        );
        assert!(!backend.inspect(&name("n"), mode.kind()).await.unwrap().is_free());
        let listed = LockClient::new(backend).list("").unwrap().next().await;
        assert!(matches!(listed, Some(Ok(_))), "{listed:?}");
        assert_eq!(files(dir.path()), before, "to look makes nothing");
    }
}

#[tokio::test]
async fn a_look_goes_without_a_ledger_that_cannot_be_made() {
    let dir = TempDir::new().unwrap();
    let Some(_mounted) = Mounted::new(dir.path(), "size=1m,nr_inodes=32") else {
        println!("not shown, for want of the right to mount");
        return;
    };
    let (backend, _holder) = held(dir.path(), Mode::Exclusive).await;
    let ledger = dir.path().join("lockkit/n.ledger");
    fs::remove_file(&ledger).unwrap();
    let filler = |number| fs::write(dir.path().join(format!("filler-{number}")), "");
    assert!(
        (0..64).any(|number| filler(number).is_err()),
        "there is no room for a file"
    );
    let state = backend.inspect(&name("n"), LockKind::Lock).await.unwrap();
    assert!(!state.is_free());
    let listed = LockClient::new(backend).list("").unwrap().next().await;
    assert!(matches!(listed, Some(Ok(_))), "{listed:?}");
    assert!(!ledger.exists());
}

#[tokio::test]
async fn a_file_that_cannot_be_read_hides_no_other_from_a_list() {
    let dir = TempDir::new().unwrap();
    let backend = open(dir.path()).await;
    // More than a page.
    let names: Vec<_> = (0..40).map(|number| format!("n{number:02}")).collect();
    let mut holders = Vec::new();
    for name in &names {
        let mut holder = claim(&backend, name, Mode::Exclusive).await;
        granted(&mut holder).await;
        holders.push(holder);
    }
    let at = dir.path().join("lockkit");
    fs::write(at.join("foreign.lock"), "not ours").unwrap();
    fs::copy(at.join("n00.lock"), at.join("copied.lock")).unwrap();
    fs::create_dir(at.join("directory.lock")).unwrap();
    let client = LockClient::new(backend);
    let mut list = client.list("").unwrap();
    let mut shown = Vec::new();
    let error = loop {
        match list.next().await.expect("what cannot be read is told") {
            Ok(lock) => shown.push(lock.name.as_str().to_owned()),
            Err(error) => break error,
        }
    };
    shown.sort();
    assert_eq!(shown, names);
    let said = chain(&error);
    let told = ["foreign.lock", "copied.lock", "directory.lock"];
    assert!(told.iter().any(|file| said.contains(file)), "{said}");
    assert!(list.next().await.is_none());
}

#[tokio::test]
async fn a_ledger_that_stays_locked_is_an_error_and_not_taken() {
    let dir = TempDir::new().unwrap();
    let (backend, mut holder) = held(dir.path(), Mode::Exclusive).await;
    let ledger = fs::File::create(dir.path().join("lockkit/n.ledger")).unwrap();
    ledger.try_lock().unwrap();
    let mut denied = claim(&backend, "n", Mode::Shared).await;
    let error = denied.attempt(TRY).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert!(chain(&error).contains("n.ledger"), "{}", chain(&error));
    holder.release().await.unwrap();
    for mode in [Mode::Exclusive, Mode::Shared] {
        let mut next = claim(&backend, "n", mode).await;
        let grant = next.attempt(TRY).await.unwrap();
        assert!(
            grant.is_some(),
            "a free lock is granted without the ledger: {mode:?}"
        );
        next.release().await.unwrap();
    }
    ledger.unlock().unwrap();
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn an_inspection_wakes_a_waiter_that_its_probe_kept_out() {
    let dir = TempDir::new().unwrap();
    let (backend, mut waiter) = held(dir.path(), Mode::Exclusive).await;
    waiter.release().await.unwrap();
    let probe = fs::File::open(dir.path().join("lockkit/n.lock")).unwrap();
    probe.try_lock().unwrap();
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    while tokio::time::timeout(Duration::from_millis(200), waiter.notified())
        .await
        .is_ok()
    {
        assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    }
    probe.unlock().unwrap();
    assert!(
        backend
            .inspect(&name("n"), LockKind::Lock)
            .await
            .unwrap()
            .is_free()
    );
    tokio::time::timeout(LIMIT, waiter.notified())
        .await
        .expect("woken in time");
    granted(&mut waiter).await;
}
