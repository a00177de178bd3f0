//! Holds that go on without a guard, and are adopted by another client, on paused time.

use std::{sync::atomic::Ordering, time::Duration};

use lockkit_core::{
    AcquireOptions, DetachedHold, Error, HoldEnd, LockClient, LockGuard, LockName, LossReason, MemoryBackend,
    memory::FaultPoint,
    spi::{Backend, ClaimRequest, Mode, OwnerId, Renewal},
};

use crate::probe::Probe;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(9);

async fn held(client: &LockClient) -> LockGuard {
    let options = AcquireOptions::new().ttl(TTL);
    client.lock("a").unwrap().acquire_with(&options).await.unwrap()
}

fn is_gone(err: &Error) -> bool {
    let reason = LossReason::Gone;
    matches!(err, Error::Lost { reason: told, .. } if *told == reason)
}

/// What the server says.
async fn holders(memory: &MemoryBackend) -> usize {
    let state = LockClient::new(memory.clone()).inspect("a").await.unwrap();
    state.holders.len()
}

#[tokio::test(start_paused = true)]
async fn a_detached_hold_is_left_alone_by_the_client_that_had_it() {
    let probe = Probe::default();
    let client = LockClient::new(probe.clone());
    let guard = held(&client).await;
    // The worker keeps it alive by then.
    tokio::time::sleep(TTL / 2).await;
    let view = guard.view();
    let detached = guard.detach().await.unwrap();
    let calls = probe.counts.calls();
    assert_eq!(probe.counts.claims.load(Ordering::SeqCst), 0, "the claim is gone");
    assert_eq!(view.ended().await, HoldEnd::Detached);
    assert!(!view.is_held() && view.lost().reason().is_none());
    tokio::time::sleep(TTL.saturating_sub(10 * MS)).await;
    assert_eq!(holders(&probe.memory).await, 1, "for a full ttl");
    drop(detached);
    client.close(SECOND).await.unwrap();
    assert_eq!(holders(&probe.memory).await, 1, "whatever happens here");
    assert_eq!(probe.counts.calls(), calls, "no renewal, and no release");
    tokio::time::sleep(10 * MS).await;
    assert_eq!(holders(&probe.memory).await, 0);
}

/// A waiter of the client waits for the server's word, like all others.
#[tokio::test(start_paused = true)]
async fn a_detached_hold_is_not_passed_to_a_local_waiter() {
    let probe = Probe::default();
    let (here, there) = (LockClient::new(probe.clone()), LockClient::new(probe.clone()));
    let first = held(&here).await;
    let mut waiters = Vec::new();
    for _ in 0..3 {
        let here = here.clone();
        waiters.push(tokio::spawn(async move { held(&here).await }));
        tokio::time::sleep(MS).await;
    }
    first.release().await.unwrap();
    let passed = waiters.remove(0).await.unwrap();
    let token = passed.token();
    assert_eq!(*probe.counts.passed_on.lock().unwrap(), [token.get()]);
    let mut detached = passed.detach().await.unwrap();
    tokio::time::sleep(TTL / 2).await;
    assert!(!waiters[0].is_finished(), "granted what is detached");
    let adopted = there.adopt(&mut detached).await.unwrap();
    assert_eq!(adopted.token(), token, "of the hold that was passed on");
    tokio::time::sleep(TTL * 2).await;
    assert!(!waiters[0].is_finished() && adopted.is_held());
    adopted.release().await.unwrap();
    let next = waiters.remove(0).await.unwrap();
    assert!(next.token() > token);
}

#[tokio::test(start_paused = true)]
async fn a_detach_without_a_reply_leaves_the_guard_as_it_is() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(memory.clone());
    let mut guard = held(&client).await;
    for lose in [false, true] {
        if lose {
            memory.lose_replies(FaultPoint::Renew, 1);
        } else {
            memory.fail_next(FaultPoint::Renew, 1);
        }
        let err = guard.detach().await.unwrap_err();
        assert!(err.error.is_transient(), "{err}");
        guard = err.guard;
        tokio::time::sleep(TTL * 2).await;
        assert!(guard.is_held(), "renewed as before");
    }
    guard.detach().await.unwrap().encode();
    assert_eq!(holders(&memory).await, 1);
}

#[tokio::test(start_paused = true)]
async fn an_error_that_is_thrown_away_releases() {
    async fn detach(guard: LockGuard) -> lockkit_core::Result<DetachedHold> {
        Ok(guard.detach().await?)
    }
    let memory = MemoryBackend::new();
    let guard = held(&LockClient::new(memory.clone())).await;
    memory.fail_next(FaultPoint::Renew, 1);
    assert!(detach(guard).await.unwrap_err().is_transient());
    tokio::time::sleep(MS).await;
    assert_eq!(holders(&memory).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_is_lost_or_over_cannot_be_detached() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(memory.clone());
    let guard = held(&client).await;
    memory.revoke("a");
    let err = guard.detach().await.unwrap_err();
    assert!(err.error.is_lost(), "{err}");
    assert_eq!(err.guard.lost().await, LossReason::Revoked);

    let guard = held(&client).await;
    client.close(SECOND).await.unwrap();
    let err = guard.detach().await.unwrap_err();
    assert!(err.error.is_lost(), "{err}");
    assert_eq!(holders(&memory).await, 0);
}

#[tokio::test(start_paused = true)]
async fn an_adoption_without_a_reply_is_asked_again() {
    let memory = MemoryBackend::new();
    let (here, there) = (LockClient::new(memory.clone()), LockClient::new(memory.clone()));
    for lose in [false, true] {
        let guard = held(&here).await;
        let token = guard.token();
        let detached = guard.detach().await.unwrap();
        let mut first = DetachedHold::decode(&detached.encode()).unwrap();
        let mut second = DetachedHold::decode(&detached.encode()).unwrap();
        if lose {
            memory.lose_replies(FaultPoint::Adopt, 1);
        } else {
            memory.fail_next(FaultPoint::Adopt, 1);
        }
        let err = there.adopt(&mut first).await.unwrap_err();
        assert!(err.is_transient() && !err.is_lost(), "{err}");
        tokio::time::sleep(TTL / 2).await;
        assert_eq!(holders(&memory).await, 1, "nothing is released");
        // Of another client of that server, too.
        let adopted = here.adopt(&mut first).await.unwrap();
        assert_eq!(adopted.token(), token);
        for client in [&here, &there] {
            assert!(is_gone(&client.adopt(&mut first).await.unwrap_err()));
            assert!(is_gone(&client.adopt(&mut second).await.unwrap_err()));
        }
        tokio::time::sleep(TTL * 2).await;
        assert!(adopted.is_held() && holders(&memory).await == 1);
        adopted.release().await.unwrap();
    }
}

/// Its reply takes so long that the lease may be over.
#[tokio::test(start_paused = true)]
async fn an_adoption_whose_answer_is_late_makes_no_guard() {
    let memory = MemoryBackend::new();
    let options = AcquireOptions::new().op_timeout(TTL * 4);
    let client = LockClient::new(memory.clone()).with_defaults(options).unwrap();
    let mut detached = held(&client).await.detach().await.unwrap();
    memory.delay(FaultPoint::Adopt, TTL + MS);
    let err = client.adopt(&mut detached).await.unwrap_err();
    assert!(err.is_transient(), "{err}");
    memory.delay(FaultPoint::Adopt, Duration::ZERO);
    assert!(is_gone(&client.adopt(&mut detached).await.unwrap_err()));
}

/// Nobody can adopt what nobody asks for again, so it has to end.
#[tokio::test(start_paused = true)]
async fn an_adoption_that_is_given_up_ends_with_its_lease() {
    let memory = MemoryBackend::new();
    let client = LockClient::new(memory.clone());
    let mut detached = held(&client).await.detach().await.unwrap();
    memory.lose_replies(FaultPoint::Adopt, 1);
    client.adopt(&mut detached).await.unwrap_err();
    let asked = lockkit_core::Instant::now();
    drop(detached);
    let next = held(&client).await;
    assert!(asked.elapsed() <= TTL + SECOND && asked.elapsed() + SECOND > TTL);
    next.release().await.unwrap();
    client.close(SECOND).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_ttl_of_the_hold_goes_along_and_other_options_do_not() {
    let memory = MemoryBackend::new();
    let here = LockClient::new(memory.clone());
    let options = AcquireOptions::new().ttl(SECOND).label("here");
    let guard = here.lock("a").unwrap().acquire_with(&options).await.unwrap();
    guard.set_ttl(TTL).await.unwrap();
    let mut detached = guard.detach().await.unwrap();
    assert_eq!(detached.ttl(), TTL);

    let too_short = AcquireOptions::new().max_hold(TTL.saturating_sub(MS));
    let there = LockClient::new(memory.clone()).with_defaults(too_short).unwrap();
    let err = there.adopt(&mut detached).await.unwrap_err();
    assert!(
        matches!(
            err,
            Error::InvalidOptions {
                option: "max_hold",
                ..
            }
        ),
        "{err}"
    );

    let options = AcquireOptions::new().ttl(SECOND).max_hold(TTL * 2).label("there");
    let there = LockClient::new(memory.clone()).with_defaults(options).unwrap();
    let guard = there.adopt(&mut detached).await.unwrap();
    let adopted = lockkit_core::Instant::now();
    assert_eq!(guard.lease_length(), Some(TTL));
    let shown = there.inspect("a").await.unwrap().holders;
    assert_eq!(shown[0].label.as_deref(), Some("there"));
    // Its `max_hold` counts from then, and a hold that is past it is not detached for another one.
    guard.renewal_failing().await;
    assert!(adopted.elapsed() >= TTL * 2);
    let err = guard.detach().await.unwrap_err();
    assert!(
        matches!(err.error, Error::Backend { transient: false, .. }),
        "{err}"
    );
    assert_eq!(err.guard.lost().await, LossReason::MaxHold);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_adopted_is_refused() {
    let client = LockClient::new(MemoryBackend::new());
    for (name, is_refused) in [("lockkit#election:a", true), ("b", false)] {
        let text = format!("1:x:30000:7:{:032x}:{}:{name}", 1, name.len());
        let err = client
            .adopt(&mut DetachedHold::decode(&text).unwrap())
            .await
            .unwrap_err();
        assert_eq!(matches!(err, Error::InvalidName { .. }), is_refused, "{err}");
        assert_eq!(is_gone(&err), !is_refused, "{err}");
    }
    let mut detached = held(&client).await.detach().await.unwrap();
    client.close(SECOND).await.unwrap();
    assert!(matches!(client.adopt(&mut detached).await, Err(Error::Closed)));
}

/// A semaphore is no lock, and may have the name of one that is taken in another way. Each of its permits goes its own way.
#[tokio::test(start_paused = true)]
async fn permits_are_adopted_whatever_the_name() {
    let server = MemoryBackend::new();
    let (here, there) = (LockClient::new(server.clone()), LockClient::new(server));
    for name in ["lockkit#election:a", "lockkit#permits:a", "a"] {
        let semaphore = here.semaphore(name, 3).unwrap();
        let (kept, passed) = (
            semaphore.acquire().await.unwrap(),
            semaphore.acquire().await.unwrap(),
        );
        let mut detached = passed.detach().await.unwrap();
        let adopted = there.adopt(&mut detached).await.unwrap();
        assert!(adopted.is_held() && kept.is_held(), "{name}");
        let last = semaphore.acquire_many(1).await.unwrap();
        assert!(
            semaphore.try_acquire().await.unwrap().is_none(),
            "{name}: a permit too many"
        );
        adopted.release().await.unwrap();
        assert!(semaphore.try_acquire().await.unwrap().is_some(), "{name}");
        last.release().await.unwrap();
    }
}

/// With its mode, which the server compares.
#[tokio::test(start_paused = true)]
async fn a_hold_is_adopted_as_what_it_is() {
    let client = LockClient::new(MemoryBackend::new());
    let text = held(&client).await.detach().await.unwrap().encode();
    let semaphore = text.replacen(":x:", ":p1:", 1);
    let err = client
        .adopt(&mut DetachedHold::decode(&semaphore).unwrap())
        .await
        .unwrap_err();
    assert!(is_gone(&err), "{err}");
    let shared = text.replacen(":x:", ":s:", 1);
    let err = client
        .adopt(&mut DetachedHold::decode(&shared).unwrap())
        .await
        .unwrap_err();
    assert!(is_gone(&err), "{err}");
    let mut as_it_is = DetachedHold::decode(&text).unwrap();
    assert!(client.adopt(&mut as_it_is).await.unwrap().is_held());
}

/// The client that had it may have stood still with requests on their way.
#[tokio::test]
async fn late_requests_of_the_former_owner_do_nothing() {
    let backend = MemoryBackend::new();
    let claim = async |owner| {
        let request = ClaimRequest::new(
            LockName::new("a").unwrap(),
            Mode::Exclusive,
            TTL,
            OwnerId::new(owner),
        );
        backend.claim(&request).await.unwrap()
    };
    let (mut first, mut second) = (claim(1).await, claim(2).await);
    let grant = first.attempt(Duration::ZERO).await.unwrap().unwrap();
    let token = lockkit_core::FencingToken::new(*grant.tokens.start());
    let owner = first.detach().unwrap();
    let adopted = second.adopt(owner, token).await.unwrap();
    assert!(matches!(adopted, Some(Renewal::Held(_))), "{adopted:?}");
    assert!(matches!(first.renew().await.unwrap(), Renewal::Lost(_)));
    assert!(first.release().await.unwrap_err().is_lost());
    assert!(matches!(second.renew().await.unwrap(), Renewal::Held(_)));
    assert!(matches!(
        claim(3).await.adopt(owner, token).await.unwrap(),
        Some(Renewal::Lost(LossReason::Gone))
    ));
    second.release().await.unwrap();
}
