//! From an exclusive hold to a shared one: the node that takes the place of another.

use std::time::Duration;

use lockkit_core::{AcquireOptions, DowngradeError, Error, LockGuard, LossReason, Revocation};
use lockkit_testbed::{Mode, Proxy, eventually};
use lockkit_zk::Nodes;

use crate::server::{
    self, children, config, connect, contend, dir, in_order, lock, no_zookeeper, raw, shared, soon,
    takes_its_turn, unique, waiter,
};

fn over(outcome: Result<LockGuard, DowngradeError<LockGuard>>) -> Error {
    match outcome {
        Err(DowngradeError {
            error, guard: None, ..
        }) => error,
        other => panic!("expected a hold that is over, got {other:?}"),
    }
}

#[tokio::test]
async fn the_shared_node_has_the_place_and_token_of_the_other() {
    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    for nodes in [Nodes::Mutex, Nodes::ReadWrite] {
        let name = unique("place");
        let mut config = config(shared().addr());
        config.nodes = nodes;
        let (ours, theirs) = (
            server::client(config.clone()).await.unwrap(),
            server::client(config).await.unwrap(),
        );
        let labelled = AcquireOptions::new().label("billing");
        let mine = lock(&ours, &name).with_options(labelled);
        let guard = mine.acquire().await.unwrap();
        let token = guard.token();
        let exclusive = in_order(&raw, &name).await[0].clone();
        let waiting = waiter(&lock(&theirs, &name));
        contend(&raw, &name, 2).await;
        let reading = guard.downgrade().await.unwrap();
        let [reader, writer] = &in_order(&raw, &name).await[..] else {
            panic!("two nodes expected: {:?}", children(&raw, &name).await);
        };
        let number = |path: &str| path[path.len() - 10..].to_owned();
        assert!(
            reader.contains("__READ__") && !writer.contains("__READ__"),
            "{reader} {writer}"
        );
        assert_eq!(number(reader), number(&exclusive));
        let (data, stat) = raw.get_data(reader).await.unwrap();
        assert_eq!(data, b"billing");
        assert_ne!(stat.ephemeral_owner, 0);
        // What waits has a token already.
        let (_, writers) = raw.get_data(writer).await.unwrap();
        assert!(
            stat.czxid > writers.czxid && reading.token() == token,
            "{reading:?}"
        );
        let shown = theirs.inspect(&name).await.unwrap();
        assert_eq!(
            (shown.holders.len(), shown.holders[0].token),
            (1, token),
            "{shown:?}"
        );
        assert_eq!(shown.holders[0].label.as_deref(), Some("billing"));
        reading.renew().await.unwrap();
        reading.release().await.unwrap();
        let (next, _) = soon("the writer", waiting).await.unwrap();
        assert!(next.token() > token, "{:?} after {token:?}", next.token());
        next.release().await.unwrap();
        contend(&raw, &name, 0).await;
    }
}

#[tokio::test]
async fn a_downgraded_hold_is_found_by_its_token() {
    if no_zookeeper() {
        return;
    }
    let name = unique("found");
    let (ours, theirs) = (connect(shared().addr()).await, connect(shared().addr()).await);
    for by_force in [false, true] {
        let guard = lock(&ours, &name).acquire().await.unwrap();
        let token = guard.token();
        let reading = guard.downgrade().await.unwrap();
        if by_force {
            assert!(theirs.revoke_by_force(&name, token).await.unwrap());
            assert_eq!(soon("told", reading.lost()).await, LossReason::Revoked);
            drop(reading);
        } else {
            let asking = tokio::spawn({
                let (theirs, name) = (theirs.clone(), name.clone());
                async move { theirs.revoke(&name, token, Duration::from_secs(20)).await }
            });
            assert_eq!(soon("told", reading.lost()).await, LossReason::Asked);
            drop(reading);
            let outcome = soon("its end", asking).await.unwrap().unwrap();
            assert_eq!(outcome, Revocation::Confirmed);
        }
    }
    let raw = raw(shared().addr()).await;
    contend(&raw, &name, 0).await;
}

/// Whoever asks has listed the exclusive node when the shared one takes its place.
#[tokio::test]
async fn a_hold_is_found_in_the_moment_of_its_downgrade() {
    const WAY: Duration = Duration::from_millis(50);

    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    let proxy = Proxy::start(shared().addr()).unwrap();
    let (ours, theirs) = (connect(shared().addr()).await, connect(proxy.addr()).await);
    for by_force in [false, true] {
        // The downgrade comes before each step of the other's way: to the list, to the node, to the change of the node.
        for before in 0..6_u32 {
            let name = unique("moment");
            let guard = lock(&ours, &name).acquire().await.unwrap();
            let token = guard.token();
            proxy.set(Mode::Delay {
                requests: WAY,
                replies: WAY,
            });
            let ends = tokio::spawn({
                let (theirs, name) = (theirs.clone(), name.clone());
                async move {
                    if by_force {
                        return theirs.revoke_by_force(&name, token).await.unwrap();
                    }
                    let outcome = theirs.revoke(&name, token, Duration::from_secs(20)).await;
                    outcome.unwrap() == Revocation::Confirmed
                }
            });
            tokio::time::sleep(WAY * before + WAY / 2).await;
            let view = guard.view();
            let reading = match guard.downgrade().await {
                Ok(reading) => Some(reading),
                // It came too late.
                Err(error) => {
                    assert!(error.error.is_lost() && !view.is_held(), "{error}");
                    None
                }
            };
            if let Some(reading) = &reading {
                soon("told", reading.lost()).await;
            }
            drop(reading);
            let ended = soon("its end", ends).await.unwrap();
            assert!(
                ended,
                "by_force={by_force}, {before} ways before: there is no such hold"
            );
            proxy.set(Mode::Pass);
            contend(&raw, &name, 0).await;
        }
    }
}

#[tokio::test]
async fn a_downgrade_whose_reply_is_lost_is_found() {
    if no_zookeeper() {
        return;
    }
    let (name, raw) = (unique("reply"), raw(shared().addr()).await);
    let proxy = Proxy::start(shared().addr()).unwrap();
    let (ours, theirs) = (connect(proxy.addr()).await, connect(shared().addr()).await);
    let guard = lock(&ours, &name).acquire().await.unwrap();
    let token = guard.token();
    let waiting = waiter(&lock(&theirs, &name));
    contend(&raw, &name, 2).await;
    // Replies are on their way for long enough for that of the transaction to be lost with the connection.
    proxy.set(Mode::Delay {
        requests: Duration::ZERO,
        replies: Duration::from_millis(500),
    });
    let downgrade = tokio::spawn(guard.downgrade());
    eventually("the shared node", async || {
        children(&raw, &name)
            .await
            .iter()
            .any(|node| node.contains("__READ__"))
    })
    .await;
    assert!(!downgrade.is_finished());
    proxy.reset();
    proxy.set(Mode::Pass);
    let reading = soon("found again", downgrade).await.unwrap().unwrap();
    assert!(reading.is_held() && reading.token() == token && !waiting.is_finished());
    contend(&raw, &name, 2).await;
    reading.release().await.unwrap();
    takes_its_turn("the writer behind it", waiting).await;
    contend(&raw, &name, 0).await;
}

#[tokio::test]
async fn what_was_written_to_a_node_is_no_downgrade() {
    if no_zookeeper() {
        return;
    }
    let raw = raw(shared().addr()).await;
    let client = connect(shared().addr()).await;
    // As Curator's `Revoker` asks, and as somebody deletes it, before our client has been told.
    for asked in [true, false] {
        let name = unique("written");
        let guard = lock(&client, &name).acquire().await.unwrap();
        let node = format!("{}/{}", dir(&name), children(&raw, &name).await[0]);
        if asked {
            raw.set_data(&node, b"__REVOKE__", None).await.unwrap();
        } else {
            raw.delete(&node, None).await.unwrap();
        }
        // The watch may have told it before.
        let error = match guard.downgrade().await {
            Err(DowngradeError {
                error,
                guard: Some(guard),
                ..
            }) => {
                assert!(!guard.is_held());
                error
            }
            outcome => over(outcome),
        };
        let expected = if asked {
            LossReason::Asked
        } else {
            LossReason::Revoked
        };
        assert!(
            matches!(error, Error::Lost { reason, .. } if reason == expected),
            "{error}"
        );
        contend(&raw, &name, 0).await;
    }
}
