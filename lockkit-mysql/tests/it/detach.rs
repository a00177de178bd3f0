//! Holds of `mode=lease` that go on without a guard.

use std::time::Duration;

use lockkit_core::{
    AcquireOptions, DetachedHold, Error, FencingToken, LossReason,
    spi::{self, Backend as _, ClaimRequest, OwnerId, Renewal, chain},
};
use lockkit_mysql::{Mode, MySqlBackend};
use lockkit_testbed::{Proxy, eventually, mysql::Flavour};
use tokio::time::Instant;

use crate::{
    servers::{
        Admin, client, config, connect, cycle, for_each_flavour, hold_back, name, private, request, shared,
    },
    settings::accounts_at,
};

for_each_flavour! {
    late_requests_of_a_former_owner_do_nothing
    an_adoption_that_comes_late_shortens_no_lease
    nothing_is_adopted_at_a_primary_that_is_read_only
    a_demotion_that_is_taken_back_keeps_no_hold_from_its_adopter
    a_renewal_that_comes_late_frees_nothing_before_its_time
    a_close_during_a_demotion_leaves_a_job_taken
}

const TTL: Duration = Duration::from_secs(30);

fn request_of(name: &str, owner: u128) -> ClaimRequest {
    let mut request = request(name, spi::Mode::Exclusive);
    request.owner = OwnerId::new(owner);
    request.ttl = TTL;
    request
}

async fn backend(flavour: Flavour) -> MySqlBackend {
    let mut config = config(shared(flavour).addr());
    config.mode = Mode::Lease;
    MySqlBackend::connect(config).await.unwrap()
}

async fn late_requests_of_a_former_owner_do_nothing(flavour: Flavour) {
    let (backend, name) = (backend(flavour).await, name("former"));
    let mut first = backend.claim(&request_of(&name, 1)).await.unwrap();
    let mut second = backend.claim(&request_of(&name, 2)).await.unwrap();
    let mut third = backend.claim(&request_of(&name, 3)).await.unwrap();
    let grant = first.attempt(Duration::ZERO).await.unwrap().unwrap();
    let token = FencingToken::new(*grant.tokens.start());
    let owner = first.detach().unwrap();
    for _ in 0..2 {
        // A second time as if the reply to the first had been lost.
        let adopted = second.adopt(owner, token).await.unwrap();
        assert!(matches!(adopted, Some(Renewal::Held(_))), "{adopted:?}");
    }
    assert!(matches!(first.renew().await.unwrap(), Renewal::Lost(_)));
    assert!(first.release().await.unwrap_err().is_lost());
    let late = third.adopt(owner, token).await.unwrap();
    assert!(matches!(late, Some(Renewal::Lost(LossReason::Gone))), "{late:?}");
    assert!(matches!(second.renew().await.unwrap(), Renewal::Held(_)));
    second.release().await.unwrap();
    assert!(third.attempt(Duration::ZERO).await.unwrap().is_some());
    third.release().await.unwrap();
}

/// The request of an adoption that was given up, from a connection that was.
async fn an_adoption_that_comes_late_shortens_no_lease(flavour: Flavour) {
    let server = shared(flavour);
    let name = name("late");
    let here = client(server.addr(), Mode::Lease).await;
    cycle(&here, &name).await;
    let (addr, mut adoption) = hold_back(server.addr(), "GREATEST(expires").await.unwrap();
    let there = client(addr, Mode::Lease).await;
    let lock = here.lock(&name).unwrap();
    let guard = lock.acquire_with(&AcquireOptions::new().ttl(TTL)).await.unwrap();
    let token = guard.token();
    let mut detached = guard.detach().await.unwrap();
    {
        let mut given_up = Box::pin(there.adopt(&mut detached));
        tokio::select! {
            () = adoption.came() => {}
            adopted = &mut given_up => panic!("{adopted:?}"),
        }
    }
    let adopted = here.adopt(&mut detached).await.unwrap();
    assert_eq!(adopted.token(), token);
    adopted.set_ttl(10 * TTL).await.unwrap();
    adoption.deliver().await.unwrap();
    let left = here.inspect(&name).await.unwrap().holders[0].left.unwrap();
    assert!(left > 5 * TTL, "{left:?} are left");
    adopted.renew().await.unwrap();
    adopted.release().await.unwrap();
}

/// It is not known there whether the hold goes on, also to an account that may write all the same.
async fn nothing_is_adopted_at_a_primary_that_is_read_only(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    for (account, mut config) in accounts_at(server.addr()).into_iter().enumerate() {
        config.mode = Mode::Lease;
        let client = connect(config).await.unwrap();
        let guard = client.lock("a").unwrap().acquire().await.unwrap();
        let mut detached = guard.detach().await.unwrap();
        let mut other = DetachedHold::decode(&detached.encode()).unwrap();
        admin.run("SET GLOBAL read_only=1").await;
        let err = client.adopt(&mut detached).await.unwrap_err();
        let shown = chain(&err);
        assert!(
            !err.is_lost() && !matches!(err, Error::Timeout { .. }),
            "{account}: {shown}"
        );
        assert!(
            shown.contains("read_only") || shown.contains("read-only"),
            "{account}: {shown}"
        );
        admin.run("SET GLOBAL read_only=0").await;
        let adopted = client.adopt(&mut detached).await.unwrap();
        let err = client.adopt(&mut other).await.unwrap_err();
        assert!(err.is_lost() && adopted.is_held(), "{account}: {err}");
        adopted.release().await.unwrap();
    }
}

/// Between a request that has changed nothing and the read of the reason.
async fn a_demotion_that_is_taken_back_keeps_no_hold_from_its_adopter(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let here = client(server.addr(), Mode::Lease).await;
    let mut detached = here
        .lock("a")
        .unwrap()
        .acquire()
        .await
        .unwrap()
        .detach()
        .await
        .unwrap();
    let (addr, mut why) = hold_back(server.addr(), "SELECT (SELECT IF(asked=")
        .await
        .unwrap();
    let mut config = accounts_at(addr)[1].clone();
    config.mode = Mode::Lease;
    let there = connect(config).await.unwrap();
    admin.run("SET GLOBAL read_only=1").await;
    let adopting = tokio::spawn(async move { there.adopt(&mut detached).await });
    why.came().await;
    admin.run("SET GLOBAL read_only=0").await;
    drop(why.deliver());
    let adopted = adopting.await.unwrap().unwrap();
    assert!(adopted.is_held());
    adopted.release().await.unwrap();
}

/// A rest that is hardly longer than the ttl: what a late renewal leaves of it is no allowance for the drift of clocks.
async fn a_renewal_that_comes_late_frees_nothing_before_its_time(flavour: Flavour) {
    const LEAST: Duration = Duration::from_millis(33_200);

    let server = shared(flavour);
    let other = client(server.addr(), Mode::Lease).await;
    let (addr, mut renewal) = hold_back(server.addr(), "SET expires=").await.unwrap();
    let here = client(addr, Mode::Lease).await;
    let name = name("least");
    let options = AcquireOptions::new().ttl(TTL).hold_at_least(LEAST);
    let asked = Instant::now();
    let guard = here.lock(&name).unwrap().acquire_with(&options).await.unwrap();
    tokio::select! {
        renewed = guard.renew() => panic!("it was not held back: {renewed:?}"),
        () = renewal.came() => {}
    }
    // Its connection is given up a second later. Until the rest is no longer than the ttl, a late renewal may shorten it.
    let unconfirmed = guard.release().await.unwrap_err();
    assert!(unconfirmed.is_transient(), "{unconfirmed}");
    let left = async || other.inspect(&name).await.unwrap().holders[0].left.unwrap();
    eventually("the rest is asked for", async || left().await > TTL).await;
    renewal.deliver().await.unwrap();
    eventually("the rest is asked for again", async || {
        left().await + asked.elapsed() >= LEAST
    })
    .await;
    assert!(other.lock(&name).unwrap().try_acquire().await.unwrap().is_none());
    here.close(Duration::from_secs(10)).await.unwrap();
    let kept = left().await + asked.elapsed();
    assert!(kept >= LEAST, "free after {kept:?}");
}

/// A primary is read-only for a moment, and its client shuts down in that moment.
async fn a_close_during_a_demotion_leaves_a_job_taken(flavour: Flavour) {
    const SHORT: Duration = Duration::from_secs(5);
    const LEAST: Duration = Duration::from_secs(60);

    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let proxy = Proxy::start(server.addr()).unwrap();
    let (here, other) = (
        client(proxy.addr(), Mode::Lease).await,
        client(server.addr(), Mode::Lease).await,
    );
    let options = AcquireOptions::new().ttl(SHORT).hold_at_least(LEAST);
    let asked = Instant::now();
    let guard = here.lock("a").unwrap().acquire_with(&options).await.unwrap();
    admin.run("SET GLOBAL read_only=1").await;
    let before = proxy.counts().replies.chunks;
    drop(guard);
    let closing = tokio::spawn(async move { here.close(Duration::from_secs(20)).await });
    eventually("it has been refused", async || {
        proxy.counts().replies.chunks > before + 1
    })
    .await;
    admin.run("SET GLOBAL read_only=0").await;
    closing.await.unwrap().unwrap();
    let left = other.inspect("a").await.unwrap().holders[0].left.unwrap();
    let kept = left + asked.elapsed();
    assert!(kept >= LEAST, "free after {kept:?}");
}
