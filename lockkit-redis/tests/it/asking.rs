//! A request to give up a hold, at the server: the mark, and what becomes of it.

use std::time::Duration;

use lockkit_core::{
    FencingToken, LockKind, LockName, Revocation,
    spi::{Backend, Claim, ClaimRequest, Mode, OwnerId, Renewal},
};
use lockkit_redis::{RedisBackend, RedisConfig};
use lockkit_testbed::{eventually, redis::RedisServer};

use crate::common::{AT_ONCE, LONG, MS, SECOND, client, lock, no_server, waiter, waiters, within};

const MARK: &str = "lockkit:lockkit#revoked:{lockkit:a}";

/// A claim on `a` that nobody renews, and its backend.
async fn holds(server: &RedisServer, mode: Mode) -> (RedisBackend, Box<dyn Claim>, FencingToken) {
    let backend = RedisBackend::connect(RedisConfig::new(server.url()))
        .await
        .unwrap();
    let name = LockName::new("a").unwrap();
    let request = ClaimRequest::new(name, mode, LONG, OwnerId::new(7));
    let mut claim = backend.claim(&request).await.unwrap();
    let grant = claim.attempt(Duration::ZERO).await.unwrap().unwrap();
    (backend, claim, FencingToken::new(*grant.tokens.start()))
}

fn left(server: &RedisServer) -> i64 {
    server
        .cli(&["PTTL", "lockkit:a"])
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

#[tokio::test]
async fn a_request_that_the_server_lost_is_repeated() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (_backend, mut claim, token) = holds(&server, Mode::Exclusive).await;
    let operator = client(server.url()).await;
    let asking = tokio::spawn(async move { operator.revoke("a", token, LONG).await });
    let marked = async || {
        server
            .cli(&["EXISTS", MARK])
            .is_ok_and(|there| there.trim() == "1")
    };
    eventually("the hold is marked", marked).await;
    server.cli(&["DEL", MARK]).unwrap();
    eventually("the hold is marked again", marked).await;
    assert_eq!(claim.renew().await.unwrap(), Renewal::Asked);
    assert!(!asking.is_finished(), "the holder has not let go");
    claim.release().await.unwrap();
    let said = within(AT_ONCE, "whoever asked is told", asking).await.unwrap();
    assert_eq!(said.unwrap(), Revocation::Confirmed);
}

/// With and without somebody who waits, which changes the key.
#[tokio::test]
async fn no_renewal_prolongs_a_hold_that_is_asked_for() {
    if no_server() {
        return;
    }
    for (mode, is_waited_for) in [
        (Mode::Exclusive, false),
        (Mode::Exclusive, true),
        (Mode::Shared, false),
    ] {
        let server = RedisServer::plain().unwrap();
        let (backend, mut claim, token) = holds(&server, mode).await;
        let other = client(server.url()).await;
        let waiting = is_waited_for.then(|| waiter(&lock(&other, "a", LONG)));
        if is_waited_for {
            waiters(&server, "a", 1).await;
        }
        assert!(matches!(claim.renew().await.unwrap(), Renewal::Held(_)));
        let name = LockName::new("a").unwrap();
        let lease = backend.revoke(&name, LockKind::Lock, token).await.unwrap();
        let end = lease.unwrap().end().unwrap();
        within(AT_ONCE, "its claim is told", claim.notified()).await;
        tokio::time::sleep(20 * MS).await;
        let before = left(&server);
        assert_eq!(
            claim.renew().await.unwrap(),
            Renewal::Asked,
            "{mode:?} {is_waited_for}"
        );
        assert!(left(&server) <= before, "{mode:?} {is_waited_for}: prolonged");
        let again = backend.revoke(&name, LockKind::Lock, token).await.unwrap();
        let again = again.unwrap().end().unwrap();
        assert!(again <= end + SECOND, "{mode:?}: {:?} more", again - end);
        claim.release().await.unwrap();
        assert_eq!(backend.revoke(&name, LockKind::Lock, token).await.unwrap(), None);
        if let Some(waiting) = waiting {
            let next = within(AT_ONCE, "the next is granted", waiting).await;
            next.unwrap().unwrap().release().await.unwrap();
        }
    }
}

/// The heir has a token of its own, which the server learns with a renewal.
#[tokio::test]
async fn a_hold_that_was_passed_on_since_is_not_hit() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let backend = RedisBackend::connect(RedisConfig::new(server.url()))
        .await
        .unwrap();
    let name = LockName::new("a").unwrap();
    let mut request = ClaimRequest::new(name.clone(), Mode::Exclusive, LONG, OwnerId::new(7));
    request.tokens = 3.try_into().unwrap();
    request.locally_contended = true;
    let mut claim = backend.claim(&request).await.unwrap();
    let first = *claim
        .attempt(Duration::ZERO)
        .await
        .unwrap()
        .unwrap()
        .tokens
        .start();
    let ask = async |token: u64| {
        let token = FencingToken::new(token);
        backend
            .revoke(&name, LockKind::Lock, token)
            .await
            .unwrap()
            .is_some()
    };
    claim.passed_on(FencingToken::new(first + 1));
    assert!(ask(first).await, "the server does not know better");
    assert!(matches!(claim.renew().await.unwrap(), Renewal::Held(_)));
    assert!(!ask(first).await, "that hold is over");
    // One that the server has not seen yet.
    claim.passed_on(FencingToken::new(first + 2));
    assert!(ask(first + 2).await);
    assert_eq!(claim.renew().await.unwrap(), Renewal::Asked);
    claim.release().await.unwrap();
}

/// Somebody else may write what looks like a hold of ours.
#[tokio::test]
async fn asking_for_what_is_no_hold_of_ours_finds_none() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let operator = client(server.url()).await;
    let token = FencingToken::new(7);
    for value in [
        "lockkit:ab ",
        "lockkit+ab 1",
        "lockkit:ab 1 x",
        "lockkit#shared",
        "lockkit#permits x",
        "theirs",
    ] {
        server.cli(&["SET", "lockkit:a", value, "PX", "60000"]).unwrap();
        let asked = operator.revoke("a", token, Duration::ZERO).await;
        assert!(matches!(asked, Ok(Revocation::NotHeld)), "{value:?}: {asked:?}");
        let ended = operator.revoke_by_force("a", token).await;
        assert!(matches!(ended, Ok(false)), "{value:?}: {ended:?}");
        server.cli(&["DEL", "lockkit:a"]).unwrap();
    }
}
