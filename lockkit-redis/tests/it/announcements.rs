//! Observers of elections are woken by what leaders publish, over each connection anew.

use std::{pin::pin, time::Duration};

use futures_util::FutureExt as _;
use lockkit_core::Observer;
use lockkit_testbed::redis::RedisServer;

use crate::common::{AT_ONCE, LONG, MS, RECOVERED, client, client_behind_proxy, no_server, until, within};

/// Returns the token of the leader that is seen next; `None` for nobody.
async fn next(observer: &mut Observer) -> Option<u64> {
    loop {
        match observer.next().await {
            Ok(leader) => return leader.map(|leader| leader.token.get()),
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    }
}

/// Without a push an observer looks once in ten seconds.
#[tokio::test]
async fn observers_are_woken_over_a_new_connection_too() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (watching, proxy) = client_behind_proxy(&server).await;
    let leading = client(server.url()).await;
    let candidate = leading
        .election("n")
        .unwrap()
        .with_ttl(LONG)
        .candidate("ada")
        .unwrap();
    let election = watching.election("n").unwrap();
    let (mut observer, mut another) = (election.observe(), election.observe());
    for observer in [&mut observer, &mut another] {
        assert_eq!(within(LONG, "the first look", next(observer)).await, None);
    }
    for round in 0..3 {
        let leadership = candidate.campaign().await.unwrap();
        let token = leadership.token().get();
        for observer in [&mut observer, &mut another] {
            let seen = within(AT_ONCE, "a leader is seen", next(observer)).await;
            assert_eq!(seen, Some(token));
        }
        leadership.resign().await.unwrap();
        for observer in [&mut observer, &mut another] {
            assert_eq!(
                within(AT_ONCE, "a resignation is seen", next(observer)).await,
                None
            );
        }
        if round == 0 {
            proxy.reset();
            // What is announced meanwhile is found once the connection is back.
            let leadership = candidate.campaign().await.unwrap();
            let token = leadership.token().get();
            for observer in [&mut observer, &mut another] {
                let seen = within(RECOVERED, "a leader is seen after a cut", next(observer)).await;
                assert_eq!(seen, Some(token));
            }
            leadership.resign().await.unwrap();
            for observer in [&mut observer, &mut another] {
                assert_eq!(
                    within(AT_ONCE, "a resignation is seen", next(observer)).await,
                    None
                );
            }
        }
    }
}

/// The rights that the documentation lists are enough: the channel is one of lockkit's.
#[tokio::test]
async fn a_user_with_the_documented_rights_observes() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let rights = "on >secret ~lockkit:* resetchannels &lockkit:* +ping +info +select +subscribe +unsubscribe \
                  +client|id +client|kill +eval +evalsha +script|load +wait +time +get +set +del +exists +pexpire \
                  +pttl +publish +zadd +zcard +zrange +zrangebyscore +zrevrange +zrank +zrem +zscore +hget \
                  +hset +hdel";
    let mut command = vec!["ACL", "SETUSER", "locker"];
    command.extend(rights.split_whitespace());
    assert_eq!(server.cli(&command).unwrap(), "OK");
    let url = format!("redis://locker:secret@{}", server.addr());
    let (watching, leading) = (client(&url).await, client(&url).await);
    let mut observer = watching.election("n").unwrap().observe();
    assert_eq!(within(LONG, "the first look", next(&mut observer)).await, None);
    let candidate = leading
        .election("n")
        .unwrap()
        .with_ttl(LONG)
        .candidate("ada")
        .unwrap();
    let leadership = candidate.campaign().await.unwrap();
    let seen = within(AT_ONCE, "a leader is seen", next(&mut observer)).await;
    assert_eq!(seen, Some(leadership.token().get()));
    leadership.resign().await.unwrap();
    drop(observer);
    unsubscribed(&server).await;
    assert_eq!(server.cli(&["ACL", "LOG"]).unwrap(), "", "nothing was refused");
}

/// Returns the number of elections that somebody is told of.
fn watched(server: &RedisServer) -> usize {
    let channels = server.cli(&["PUBSUB", "CHANNELS", "lockkit:lockkit#client:watch:*"]);
    channels.unwrap().lines().filter(|line| !line.is_empty()).count()
}

async fn unsubscribed(server: &RedisServer) {
    until(LONG, "unsubscribed", async || watched(server) == 0).await;
}

#[tokio::test]
async fn the_last_observer_of_an_election_unsubscribes() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (watching, leading) = (client(server.url()).await, client(server.url()).await);
    let candidate = leading
        .election("n")
        .unwrap()
        .with_ttl(LONG)
        .candidate("ada")
        .unwrap();
    let election = watching.election("n").unwrap();
    let mut observer = election.observe();
    assert_eq!(within(LONG, "the first look", next(&mut observer)).await, None);
    // Each begins while the one before ends, and hears of the next leader all the same.
    for _ in 0..20 {
        let mut heir = election.observe();
        drop(observer);
        assert_eq!(within(LONG, "the first look", next(&mut heir)).await, None);
        let leadership = candidate.campaign().await.unwrap();
        let seen = within(AT_ONCE, "a leader is seen", next(&mut heir)).await;
        assert_eq!(seen, Some(leadership.token().get()));
        leadership.resign().await.unwrap();
        let seen = within(AT_ONCE, "a resignation is seen", next(&mut heir)).await;
        assert_eq!(seen, None);
        observer = heir;
    }
    drop(observer);
    unsubscribed(&server).await;
}

#[tokio::test]
async fn an_observer_dropped_at_any_poll_unsubscribes() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let watching = client(server.url()).await;
    let mut most_watched = 0;
    for polls in 1.. {
        let mut observer = watching.election("n").unwrap().observe();
        let mut looked = None;
        {
            let mut looking = pin!(observer.next());
            for _ in 0..polls {
                looked = looking.as_mut().now_or_never();
                if looked.is_some() {
                    break;
                }
                // Longer than a reply takes, if the machine does not stand still.
                tokio::time::sleep(2 * MS).await;
            }
        }
        most_watched = watched(&server).max(most_watched);
        drop(observer);
        unsubscribed(&server).await;
        if looked.is_some() {
            break;
        }
    }
    assert_eq!(most_watched, 1);
}

/// A leadership may end in other ways than by a resignation that is waited for, and with nobody who leads next.
#[tokio::test]
async fn observers_are_told_of_every_end_of_a_leadership() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (watching, leading) = (client(server.url()).await, client(server.url()).await);
    let candidate = leading
        .election("n")
        .unwrap()
        .with_ttl(LONG)
        .candidate("ada")
        .unwrap();
    let election = watching.election("n").unwrap();
    let (mut observer, name) = (election.observe(), election.lock_name());
    assert_eq!(within(LONG, "the first look", next(&mut observer)).await, None);
    for end in [
        "dropped",
        "dropped while it resigns",
        "asked for",
        "ended by force",
    ] {
        let leadership = candidate.campaign().await.unwrap();
        let token = leadership.token();
        let seen = within(AT_ONCE, "a leader is seen", next(&mut observer)).await;
        assert_eq!(seen, Some(token.get()));
        match end {
            "dropped" => drop(leadership),
            "dropped while it resigns" => {
                let mut resigns = Box::pin(leadership.resign());
                assert!(resigns.as_mut().now_or_never().is_none());
            }
            "asked for" => {
                let _ = watching.revoke(name, token, Duration::ZERO).await.unwrap();
                within(AT_ONCE, "the leader is told", leadership.lost()).await;
                drop(leadership);
            }
            _ => {
                assert!(watching.revoke_by_force(name, token).await.unwrap());
                within(AT_ONCE, "the leader is told", leadership.lost()).await;
            }
        }
        let seen = within(AT_ONCE, end, next(&mut observer)).await;
        assert_eq!(seen, None, "{end}");
    }
}
