//! From an exclusive hold to a shared one, on a real server.

use lockkit_core::{AcquireOptions, DowngradeError, Error, LockClient, LossReason, Result};
use lockkit_testbed::{Mode, redis::RedisServer};

use crate::common::{
    AT_ONCE, LONG, RECOVERED, SECOND, client, client_behind_proxy, granted, lock, no_server, nothing_is_left,
    until, waiter, waiters, within,
};

#[tokio::test]
async fn a_downgrade_whose_replies_are_lost_is_repeated() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (ours, proxy) = client_behind_proxy(&server).await;
    let theirs = client(server.url()).await;
    let options = AcquireOptions::new().ttl(LONG).op_timeout(SECOND);
    let guard = ours.lock("a").unwrap().acquire_with(&options).await.unwrap();
    let (token, view) = (guard.token(), guard.view());
    let writer = waiter(&lock(&theirs, "a", LONG));
    waiters(&server, "a", 1).await;
    proxy.set(Mode::DropReplies);
    let downgrade = tokio::spawn(guard.downgrade());
    // The request has taken effect, and nobody here has been told.
    until(RECOVERED, "shared at the server", async || {
        server
            .cli(&["GET", "lockkit:a"])
            .is_ok_and(|value| value == "lockkit#shared")
    })
    .await;
    assert!(!view.is_held() && !downgrade.is_finished());
    proxy.set(Mode::Pass);
    let reading = within(RECOVERED, "a reply", downgrade).await.unwrap().unwrap();
    assert!(reading.is_held() && reading.token() == token && !writer.is_finished());
    let shown = theirs.inspect("a").await.unwrap();
    assert_eq!(
        (shown.holders.len(), shown.holders[0].token),
        (1, token),
        "{shown:?}"
    );
    reading.release().await.unwrap();
    let writer = granted(AT_ONCE, "the writer that waited", writer).await;
    assert!(writer.token() > token);
    writer.release().await.unwrap();
    nothing_is_left(&server, "after a downgrade").await;
}

#[tokio::test]
async fn a_downgrade_without_replies_ends_with_its_lease() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (ours, proxy) = client_behind_proxy(&server).await;
    let theirs = lock(&client(server.url()).await, "a", LONG);
    let options = AcquireOptions::new().ttl(3 * SECOND).op_timeout(SECOND);
    let guard = ours.lock("a").unwrap().acquire_with(&options).await.unwrap();
    proxy.set(Mode::DropReplies);
    let downgrade = guard.downgrade();
    let error = over(within(LONG, "the end of the lease", downgrade).await);
    assert!(
        matches!(
            error,
            Error::Lost {
                reason: LossReason::Expired,
                ..
            }
        ),
        "{error}"
    );
    proxy.set(Mode::Pass);
    let next = within(LONG, "the next", theirs.acquire()).await.unwrap();
    next.release().await.unwrap();
    nothing_is_left(&server, "after a downgrade without replies").await;
}

#[tokio::test]
async fn a_hold_that_was_asked_back_is_not_downgraded() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let ours = client(server.url()).await;
    let guard = lock(&ours, "a", LONG).acquire().await.unwrap();
    let value = server.cli(&["GET", "lockkit:a"]).unwrap();
    let owner = &value["lockkit:".len()..][..32];
    // The mark of one who asks, without the push that tells the holder.
    let token = guard.token().to_string();
    server
        .cli(&["HSET", "lockkit:lockkit#revoked:{lockkit:a}", owner, &token])
        .unwrap();
    let error = over(guard.downgrade().await);
    assert!(
        matches!(
            error,
            Error::Lost {
                reason: LossReason::Asked,
                ..
            }
        ),
        "{error}"
    );
    server
        .cli(&["DEL", "lockkit:lockkit#revoked:{lockkit:a}"])
        .unwrap();
    nothing_is_left(&server, "after it was released").await;
}

#[tokio::test]
async fn a_hold_that_is_gone_is_not_made_anew() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (ours, theirs) = (client(server.url()).await, client(server.url()).await);
    // Nobody else has it, and somebody else has it.
    for next in [None, Some(lock(&theirs, "a", LONG))] {
        let guard = lock(&ours, "a", LONG).acquire().await.unwrap();
        server.cli(&["DEL", "lockkit:a"]).unwrap();
        let next = match &next {
            Some(next) => Some(next.acquire().await.unwrap()),
            None => None,
        };
        let error = over(guard.downgrade().await);
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
        if let Some(next) = next {
            assert!(next.is_held());
            next.renew().await.unwrap();
            next.release().await.unwrap();
        }
        nothing_is_left(&server, "after a hold that was gone").await;
    }
}

/// The server has the first token of the block.
#[tokio::test]
async fn a_hold_that_was_passed_on_keeps_the_token_in_use() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let ours: LockClient = client(server.url()).await;
    let mine = ours.lock("a").unwrap();
    let first = mine.acquire().await.unwrap();
    let next = waiter(&mine);
    // The next claim reserves tokens, since somebody waits.
    first.release().await.unwrap();
    let first = granted(AT_ONCE, "the waiter", next).await;
    let mut heirs = Vec::new();
    for _ in 0..2 {
        heirs.push(waiter(&mine));
        tokio::task::yield_now().await;
    }
    first.release().await.unwrap();
    let mut heirs = heirs.into_iter();
    let second = granted(AT_ONCE, "an heir", heirs.next().unwrap()).await;
    let last = waiter(&mine);
    second.release().await.unwrap();
    let third = granted(AT_ONCE, "the next heir", heirs.next().unwrap()).await;
    let token = third.token();
    let reading = third.downgrade().await.unwrap();
    assert_eq!(reading.token(), token);
    let shown = ours.inspect("a").await.unwrap();
    assert_eq!(
        (shown.holders.len(), shown.holders[0].token),
        (1, token),
        "{shown:?}"
    );
    reading.renew().await.unwrap();
    reading.release().await.unwrap();
    let last = granted(AT_ONCE, "the last", last).await;
    assert!(last.token() > token);
    last.release().await.unwrap();
    nothing_is_left(&server, "after hand-offs").await;
}

/// As a fail-over does to a replica that was behind: the hold is an exclusive one there.
#[tokio::test]
async fn a_server_that_lost_a_downgrade_is_told_by_a_renewal() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (ours, theirs) = (client(server.url()).await, client(server.url()).await);
    let guard = lock(&ours, "a", LONG).acquire().await.unwrap();
    let before = server.cli(&["GET", "lockkit:a"]).unwrap();
    let reading = guard.downgrade().await.unwrap();
    server
        .cli(&[
            "DEL",
            "lockkit:lockkit#holders:{lockkit:a}",
            "lockkit:lockkit#about:{lockkit:a}",
        ])
        .unwrap();
    server.cli(&["SET", "lockkit:a", &before, "PX", "30000"]).unwrap();
    let reader = waiter(&lock(&theirs, "a", LONG).shared());
    waiters(&server, "a", 1).await;
    reading.renew().await.unwrap();
    let beside = granted(AT_ONCE, "a reader that waited", reader).await;
    assert!(beside.token() > reading.token() && reading.is_held());
    assert!(lock(&theirs, "a", LONG).try_acquire().await.unwrap().is_none());
    let writer = waiter(&lock(&theirs, "a", LONG));
    waiters(&server, "a", 1).await;
    beside.release().await.unwrap();
    reading.renew().await.unwrap();
    assert!(!writer.is_finished());
    reading.release().await.unwrap();
    granted(AT_ONCE, "the writer", writer)
        .await
        .release()
        .await
        .unwrap();
    nothing_is_left(&server, "after a downgrade that was lost").await;
}

#[tokio::test]
async fn a_waiter_is_told_of_a_shorter_lease_of_a_shared_hold() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (ours, proxy) = client_behind_proxy(&server).await;
    let theirs = client(server.url()).await;
    let unrenewed = AcquireOptions::new().ttl(LONG).renew(false);
    let guard = ours.lock("a").unwrap().acquire_with(&unrenewed).await.unwrap();
    let reading = guard.downgrade().await.unwrap();
    let writer = waiter(&lock(&theirs, "a", LONG));
    waiters(&server, "a", 1).await;
    reading.set_ttl(2 * SECOND).await.unwrap();
    // Its client cannot release it.
    proxy.set(Mode::Blackhole);
    let writer = granted(RECOVERED, "the lock of one who is cut off", writer).await;
    assert!(!reading.is_held());
    writer.release().await.unwrap();
}

fn over<G: std::fmt::Debug>(outcome: Result<G, DowngradeError<G>>) -> Error {
    match outcome {
        Err(DowngradeError {
            error, guard: None, ..
        }) => error,
        other => panic!("expected a hold that is over, got {other:?}"),
    }
}
