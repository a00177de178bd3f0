//! Files and directories that are deleted, moved or replaced under a holder or a waiter.

use std::{fs, time::Duration};

use lockkit_core::{
    Error, LockClient, LossReason,
    spi::{Mode, Renewal},
};
use lockkit_testbed::{Mounted, poll_at_most};
use tempfile::TempDir;

use crate::fixture::{
    LIMIT, PATIENCE, TRY, claim, files, granted, held_and_waited_for, looks, open, permits,
};

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_holder_learns_of_the_move_of_any_file() {
    for (mode, what) in [
        (Mode::Exclusive, "at/locks/lockkit/n.lock"),
        (Mode::Exclusive, "at/locks/lockkit"),
        (Mode::Shared, "at/locks"),
        (Mode::Exclusive, "at"),
        (permits(1), "at/locks/lockkit/n.permits/0"),
        (permits(1), "at/locks/lockkit/n.permits"),
        (permits(1), "at/locks/lockkit/n.sem"),
        (permits(1), "at/locks"),
    ] {
        for (deleted, watched) in [(false, false), (false, true), (true, false), (true, true)] {
            let dir = TempDir::new().unwrap();
            let locks = dir.path().join("at/locks");
            let (a, b) = (open(&locks).await, open(&locks).await);
            let mut holder = claim(&a, "n", mode).await;
            granted(&mut holder).await;
            let rival = if mode == Mode::Shared {
                Mode::Exclusive
            } else {
                mode
            };
            let mut waiter = claim(&b, "n", rival).await;
            assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
            if watched {
                assert!(poll_at_most(1, holder.notified()).await.is_none());
            }
            let what = dir.path().join(what);
            if !deleted {
                fs::rename(&what, dir.path().join("moved")).unwrap();
            } else if what.is_dir() {
                fs::remove_dir_all(&what).unwrap();
            } else {
                fs::remove_file(&what).unwrap();
            }
            let what = format!(
                "{mode:?}: {}, deleted: {deleted}, watched: {watched}",
                what.display()
            );
            let told = tokio::time::timeout(LIMIT, holder.notified()).await;
            assert!(told.is_ok(), "the holder was not woken: {what}");
            assert_eq!(
                holder.renew().await.unwrap(),
                Renewal::Lost(LossReason::Revoked),
                "{what}"
            );
            if what.contains("n.sem") {
                // The permit is still there.
                assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None, "{what}");
                holder.release().await.unwrap_err();
            }
            granted(&mut waiter).await;
            drop(holder);
            assert!(
                matches!(waiter.renew().await.unwrap(), Renewal::Held(_)),
                "{what}"
            );
        }
    }
}

#[tokio::test]
async fn a_second_move_of_a_directory_is_noticed_too() {
    let dir = TempDir::new().unwrap();
    let locks = dir.path().join("locks");
    let backend = open(&locks).await;
    for round in 0..3 {
        let mut holder = claim(&backend, "n", Mode::Exclusive).await;
        granted(&mut holder).await;
        assert!(poll_at_most(1, holder.notified()).await.is_none());
        fs::rename(&locks, dir.path().join(round.to_string())).unwrap();
        if cfg!(target_os = "linux") {
            let told = tokio::time::timeout(LIMIT, holder.notified()).await;
            assert!(told.is_ok(), "the holder was not woken in round {round}");
        }
        assert_eq!(holder.renew().await.unwrap(), Renewal::Lost(LossReason::Revoked));
    }
}

/// Others come and go, and each wakes the holder.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_holder_of_a_busy_semaphore_learns_of_its_loss() {
    let dir = TempDir::new().unwrap();
    let semaphore = |backend| LockClient::new(backend).semaphore("n", 2).unwrap();
    // Its next check, which comes in a third of that, would tell it, too.
    let hour = lockkit_core::AcquireOptions::new().ttl(Duration::from_secs(3600));
    let guard = semaphore(open(dir.path()).await);
    let guard = guard.with_options(hour).acquire().await.unwrap();
    let permit = dir.path().join("lockkit/n.permits/0");
    let other = permit.with_file_name("1");
    let held = if permit.exists() { permit } else { other };
    let touched = held.clone();
    let busy = move || {
        let began = std::time::Instant::now();
        while began.elapsed() < Duration::from_millis(500) {
            drop(fs::File::options().write(true).open(&touched).unwrap());
        }
    };
    tokio::task::spawn_blocking(busy).await.unwrap();
    fs::remove_file(held).unwrap();
    let told = tokio::time::timeout(Duration::from_mins(1), guard.lost()).await;
    assert_eq!(told, Ok(LossReason::Revoked), "its next check is far away");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_waiter_moves_on_to_replaced_permits() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    let mut holder = claim(&a, "n", permits(1)).await;
    granted(&mut holder).await;
    let mut waiter = claim(&b, "n", permits(1)).await;
    assert_eq!(waiter.attempt(PATIENCE).await.unwrap(), None);
    looks(&mut waiter).await;
    let permits_dir = dir.path().join("lockkit/n.permits");
    fs::rename(&permits_dir, dir.path().join("moved")).unwrap();
    let mut next = claim(&a, "n", permits(1)).await;
    granted(&mut next).await;
    assert!(looks(&mut waiter).await > 0, "the move did not wake the waiter");
    next.release().await.unwrap();
    let told = tokio::time::timeout(LIMIT, waiter.notified()).await;
    assert!(told.is_ok(), "the waiter was not woken");
    granted(&mut waiter).await;
    let quiet = Duration::from_secs(1);
    while tokio::time::timeout(quiet, waiter.notified()).await.is_ok() {
        assert!(matches!(waiter.renew().await.unwrap(), Renewal::Held(_)));
    }
    fs::remove_file(permits_dir.join("0")).unwrap();
    let told = tokio::time::timeout(LIMIT, waiter.notified()).await;
    assert!(told.is_ok(), "the holder was not woken");
    assert_eq!(waiter.renew().await.unwrap(), Renewal::Lost(LossReason::Revoked));
}

#[tokio::test]
async fn a_deleted_file_is_a_lost_hold_and_tokens_rise() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path()).await, open(dir.path()).await);
    for mode in [Mode::Exclusive, Mode::Shared, permits(2)] {
        let mut holder = claim(&a, "n", mode).await;
        let before = granted(&mut holder).await;
        for file in files(dir.path()) {
            fs::remove_file(file).unwrap();
        }
        if cfg!(target_os = "linux") {
            tokio::time::timeout(LIMIT, holder.notified())
                .await
                .expect("woken by the deletion");
        }
        assert_eq!(
            holder.renew().await.unwrap(),
            Renewal::Lost(LossReason::Revoked),
            "{mode:?}"
        );
        let mut next = claim(&b, "n", mode).await;
        let after = next.attempt(TRY).await.unwrap().expect("a new file is free");
        assert!(after.tokens.start() > before.tokens.end(), "{before:?} {after:?}");
        let error = holder.release().await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Lost {
                    reason: LossReason::Revoked,
                    ..
                }
            ),
            "{error}"
        );
        holder.release().await.unwrap();
        assert!(
            matches!(next.renew().await.unwrap(), Renewal::Held(_)),
            "harmless to the next holder"
        );
        next.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_waiter_moves_on_to_a_replaced_file() {
    let dir = TempDir::new().unwrap();
    let (_backend, [mut holder, mut waiter]) = held_and_waited_for(dir.path(), Mode::Exclusive).await;
    fs::remove_dir_all(dir.path().join("lockkit")).unwrap();
    granted(&mut waiter).await;
    assert_eq!(holder.renew().await.unwrap(), Renewal::Lost(LossReason::Revoked));
}

/// ✘: a mount is no event, so the holder finds out at its next check.
#[tokio::test]
async fn a_mount_over_the_directory_is_found_at_the_next_check() {
    let dir = TempDir::new().unwrap();
    let before = open(dir.path()).await;
    let mut holder = claim(&before, "n", Mode::Exclusive).await;
    let held = granted(&mut holder).await;
    let Some(_mounted) = Mounted::new(dir.path(), "size=64k") else {
        println!("not shown, for want of the right to mount");
        return;
    };
    let after = open(dir.path()).await;
    let mut next = claim(&after, "n", Mode::Exclusive).await;
    assert!(granted(&mut next).await.tokens.start() > held.tokens.end());
    assert_eq!(holder.renew().await.unwrap(), Renewal::Lost(LossReason::Revoked));
    assert!(matches!(next.renew().await.unwrap(), Renewal::Held(_)));
}
