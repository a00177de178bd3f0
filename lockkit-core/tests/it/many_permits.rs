//! Several permits of a semaphore at once.

use std::time::Duration;

use lockkit_core::{AcquireOptions, Error, Lock, LockClient, LockName, MemoryBackend};

use crate::cancel::cancel_after;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(9);
const COLLECTOR: &str = "lockkit#permits:a";

fn semaphore(server: &MemoryBackend) -> Lock {
    let semaphore = LockClient::new(server.clone()).semaphore("a", 4).unwrap();
    semaphore.with_options(AcquireOptions::new().ttl(TTL))
}

async fn has_holders(server: &MemoryBackend, count: usize) {
    let client = LockClient::new(server.clone());
    let reached = async {
        while client.inspect_semaphore("a").await.unwrap().holders.len() != count {
            tokio::time::sleep(MS).await;
        }
    };
    tokio::time::timeout(SECOND, reached)
        .await
        .unwrap_or_else(|_| panic!("never {count} holders"));
}

/// Somebody else may collect by then, and each would wait for what the other has.
#[tokio::test(start_paused = true)]
async fn a_collector_that_is_lost_keeps_no_permit() {
    let server = MemoryBackend::new();
    let (ours, theirs) = (semaphore(&server), semaphore(&server));
    let two = theirs.acquire_many(2).await.unwrap();
    let collecting = tokio::spawn(async move { ours.acquire_many(3).await });
    has_holders(&server, 4).await;
    assert!(server.revoke(COLLECTOR));
    let err = collecting.await.unwrap().unwrap_err();
    assert!(
        matches!(&err, Error::Lost { name, .. } if name.as_str() == COLLECTOR),
        "{err}"
    );
    has_holders(&server, 2).await;
    assert!(two.check().is_ok());
}

/// What is collected for longer than the hold may last, or is not renewed by its user, is still collected by one.
#[tokio::test(start_paused = true)]
async fn a_collector_is_renewed_for_as_long_as_it_takes() {
    let server = MemoryBackend::new();
    let (ours, theirs) = (semaphore(&server), semaphore(&server));
    let all = theirs.acquire_many(4).await.unwrap();
    let options = AcquireOptions::new().renew(false).max_hold(TTL);
    let collecting = tokio::spawn({
        let ours = ours.with_options(options);
        async move { ours.acquire_many(2).await }
    });
    tokio::time::sleep(10 * TTL).await;
    assert!(!collecting.is_finished());
    assert!(theirs.try_acquire_many(2).await.unwrap().is_none());
    all.release().await.unwrap();
    let two = collecting.await.unwrap().unwrap();
    assert!(two.guards().len() == 2 && two.check().is_ok());
    has_holders(&server, 2).await;
    two.release().await.unwrap();
}

/// Whoever collects is not waited for, and is no reason to say that the permits are taken.
#[tokio::test(start_paused = true)]
async fn what_no_permit_can_have_is_refused_at_once() {
    let server = MemoryBackend::new();
    let (ours, theirs) = (semaphore(&server), semaphore(&server));
    let all = theirs.acquire_many(4).await.unwrap();
    let collecting = tokio::spawn(async move { theirs.acquire_many(2).await });
    tokio::time::sleep(SECOND).await;
    let collector = LockClient::new(server.clone()).inspect(COLLECTOR).await.unwrap();
    assert!(!collector.is_free());
    for (options, named) in [
        (AcquireOptions::new().max_hold(TTL.saturating_sub(MS)), "max_hold"),
        (
            AcquireOptions::new().renew(false).hold_at_least(TTL + MS),
            "hold_at_least",
        ),
    ] {
        let ours = ours.with_options(options);
        let waits = tokio::time::timeout(SECOND, ours.acquire_many(2)).await;
        for refused in [
            ours.try_acquire_many(2).await,
            waits.expect("it waits for whoever collects").map(Some),
        ] {
            assert!(
                matches!(&refused, Err(Error::InvalidOptions { option, .. }) if *option == named),
                "{named}: {refused:?}"
            );
        }
    }
    all.release().await.unwrap();
    collecting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn acquire_many_dropped_at_any_poll_leaves_nothing() {
    for taken in [0, 2] {
        let mut polls = 1;
        loop {
            let server = MemoryBackend::new();
            let (ours, theirs) = (semaphore(&server), semaphore(&server));
            let mut before = Vec::new();
            for _ in 0..taken {
                before.push(theirs.acquire().await.unwrap());
            }
            let releasing = tokio::spawn(async move {
                for guard in before {
                    tokio::time::sleep(MS).await;
                    guard.release().await.unwrap();
                }
            });
            let outcome = cancel_after(polls, ours.acquire_many(4)).await;
            let is_over = outcome.is_some();
            drop(outcome);
            releasing.await.unwrap();
            let freed = async {
                while server.names() > 0 {
                    tokio::time::sleep(MS).await;
                }
            };
            let freed = tokio::time::timeout(SECOND, freed).await;
            assert!(freed.is_ok(), "taken={taken}, polls={polls}: something is left");
            if is_over {
                break;
            }
            polls += 1;
            assert!(polls < 1_000, "it never ends");
        }
        assert!(polls > taken, "{polls}");
    }
}

#[tokio::test(start_paused = true)]
async fn names_that_leave_no_room_for_the_collector_are_refused() {
    let client = LockClient::new(MemoryBackend::new());
    let longest = LockName::MAX_BYTES - COLLECTOR.len() + 1;
    for (length, fits) in [(longest, true), (longest + 1, false)] {
        let semaphore = client.semaphore("x".repeat(length), 2).unwrap();
        let several = semaphore.acquire_many(2).await;
        assert_eq!(several.is_ok(), fits, "{several:?}");
        if let Err(err) = several {
            assert!(matches!(err, Error::InvalidName { .. }), "{err}");
        }
    }
    // One permit needs no collector.
    let semaphore = client.semaphore("y".repeat(longest + 1), 2).unwrap();
    semaphore.acquire_many(1).await.unwrap().release().await.unwrap();
}
