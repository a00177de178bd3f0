//! Holds that go on without a guard: lost replies, claims that waited, late requests, replicas, and masters that fail.

use std::time::Duration;

use lockkit_core::{
    AcquireOptions, DetachedHold, Error, FencingToken, LockClient, LockName, LossReason, Result,
    spi::{Backend as _, Claim, ClaimRequest, Mode as HoldMode, OwnerId, Renewal},
};
use lockkit_redis::{RedisBackend, RedisConfig, RedlockBackend};
use lockkit_testbed::{Mode, Proxy, eventually, redis::RedisServer};

use crate::{
    common::{
        LONG, MS, Peer, RECOVERED, SECOND, client, client_behind_proxy, connect, granted, lock, no_server,
        nothing_is_left, shown, until, waiter, waiters, within,
    },
    redlock::world::World,
};

/// A client that soon knows that there is no answer.
fn hasty(client: LockClient) -> LockClient {
    client
        .with_defaults(AcquireOptions::new().op_timeout(300 * MS))
        .unwrap()
}

fn copy(detached: &DetachedHold) -> DetachedHold {
    DetachedHold::decode(&detached.encode()).unwrap()
}

fn is_gone<T>(adopted: &Result<T>) -> bool {
    matches!(
        adopted,
        Err(Error::Lost {
            reason: LossReason::Gone,
            ..
        })
    )
}

fn owner_of(server: &RedisServer, name: &str) -> String {
    let value = server.cli(&["GET", &format!("lockkit:{name}")]).unwrap();
    value.split(' ').next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_lost_reply_to_an_adoption_is_asked_again() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let here = client(server.url()).await;
    let (there, proxy) = client_behind_proxy(&server).await;
    let there = hasty(there);
    let guard = lock(&here, "a", LONG).acquire().await.unwrap();
    let (token, before) = (guard.token(), owner_of(&server, "a"));
    let elsewhere = client(server.url()).await;
    let waiting = waiter(&lock(&elsewhere, "a", LONG));
    waiters(&server, "a", 1).await;
    let mut detached = guard.detach().await.unwrap();
    let mut other = copy(&detached);

    proxy.set(Mode::DropReplies);
    let err = there.adopt(&mut detached).await.unwrap_err();
    assert!(
        err.is_transient() && !err.is_lost(),
        "no answer is not `gone`: {err}"
    );
    let adopted_as = owner_of(&server, "a").replace('+', ":");
    assert_ne!(adopted_as, before.replace('+', ":"), "the server has done it");
    assert!(is_gone(&here.adopt(&mut other).await), "for one client alone");
    proxy.set(Mode::Pass);
    let mut adopted = None;
    until(RECOVERED, "adopted", async || {
        match there.adopt(&mut detached).await {
            Ok(guard) => adopted.insert(guard).is_held(),
            Err(err) => {
                assert!(err.is_transient(), "{err}");
                false
            }
        }
    })
    .await;
    let adopted = adopted.unwrap();
    assert_eq!(adopted.token(), token);
    assert_eq!(
        owner_of(&server, "a").replace('+', ":"),
        adopted_as,
        "the same one"
    );
    assert!(!waiting.is_finished(), "granted in between");
    adopted.release().await.unwrap();
    let next = granted(RECOVERED, "the waiter", waiting).await;
    assert!(next.token() > token);
    next.release().await.unwrap();
    nothing_is_left(&server, "after a lost reply").await;
}

#[tokio::test]
async fn a_detach_without_a_reply_leaves_the_guard_as_it_is() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let (here, proxy) = client_behind_proxy(&server).await;
    let here = hasty(here);
    let guard = lock(&here, "a", LONG).acquire().await.unwrap();
    proxy.set(Mode::DropReplies);
    let err = guard.detach().await.unwrap_err();
    assert!(err.error.is_transient(), "{err}");
    let guard = err.guard;
    assert!(guard.is_held());
    proxy.set(Mode::Pass);
    until(RECOVERED, "renewed again", async || guard.renew().await.is_ok()).await;
    let mut detached = guard.detach().await.unwrap();
    here.adopt(&mut detached).await.unwrap().release().await.unwrap();
    nothing_is_left(&server, "after a detach").await;
}

/// Over a new connection, a client has those of its claims leave the queue that were dropped while they might be in it. That is a
/// release.
#[tokio::test]
async fn a_hold_that_was_waited_for_is_left_by_its_claim() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let one = client(server.url()).await;
    let (two, proxy) = client_behind_proxy(&server).await;
    // Granted by a push, or by its own request at the end of a lease.
    for dies in [false, true] {
        let ttl = if dies { SECOND } else { LONG };
        let first = lock(&one, "a", ttl).with_options(AcquireOptions::new().renew(!dies));
        let first = first.acquire().await.unwrap();
        let waiting = waiter(&lock(&two, "a", LONG));
        waiters(&server, "a", 1).await;
        if dies {
            first.lost().await;
        } else {
            first.release().await.unwrap();
        }
        let guard = granted(LONG, "the waiter", waiting).await;
        let token = guard.token();
        let mut detached = guard.detach().await.unwrap();
        proxy.reset();
        until(RECOVERED, "connected again", async || {
            two.inspect("a").await.is_ok()
        })
        .await;
        // What was dropped leaves the queue now.
        tokio::time::sleep(SECOND / 2).await;
        let tried = lock(&one, "a", LONG).try_acquire().await.unwrap();
        assert!(tried.is_none(), "released, dies: {dies}");
        let adopted = one.adopt(&mut detached).await.unwrap();
        assert_eq!(adopted.token(), token);
        adopted.release().await.unwrap();
    }
    nothing_is_left(&server, "after holds that were waited for").await;
}

/// Renewals, releases and adoptions of a client that stood still.
#[tokio::test]
async fn late_requests_of_a_former_owner_do_nothing() {
    if no_server() {
        return;
    }
    let (server, world) = (RedisServer::plain().unwrap(), World::of(3));
    let name = |text: &str| LockName::new(text).unwrap();
    for mode in [HoldMode::Exclusive, HoldMode::Shared] {
        let mut claims: Vec<[Box<dyn Claim>; 3]> = Vec::new();
        let requests = [1, 2, 3].map(|owner| ClaimRequest::new(name("a"), mode, LONG, OwnerId::new(owner)));
        let redis = RedisBackend::connect(RedisConfig::new(server.url()))
            .await
            .unwrap();
        let redlock = RedlockBackend::connect(world.config()).await.unwrap();
        let [one, two, three] = &requests;
        claims.push([
            redis.claim(one).await.unwrap(),
            redis.claim(two).await.unwrap(),
            redis.claim(three).await.unwrap(),
        ]);
        claims.push([
            redlock.claim(one).await.unwrap(),
            redlock.claim(two).await.unwrap(),
            redlock.claim(three).await.unwrap(),
        ]);
        for [mut first, mut second, mut third] in claims {
            let grant = first.attempt(Duration::ZERO).await.unwrap().unwrap();
            let token = FencingToken::new(*grant.tokens.start());
            let owner = first.detach().unwrap();
            for _ in 0..2 {
                // A second time as if the reply to the first had been lost.
                let adopted = second.adopt(owner, token).await.unwrap();
                assert!(matches!(adopted, Some(Renewal::Held(_))), "{mode:?}: {adopted:?}");
            }
            assert!(
                matches!(first.renew().await.unwrap(), Renewal::Lost(_)),
                "{mode:?}"
            );
            assert!(first.release().await.unwrap_err().is_lost(), "{mode:?}");
            let late = third.adopt(owner, token).await.unwrap();
            assert!(
                matches!(late, Some(Renewal::Lost(LossReason::Gone))),
                "{mode:?}: {late:?}"
            );
            let renewed = second.renew().await.unwrap();
            assert!(matches!(renewed, Renewal::Held(_)), "{mode:?}: {renewed:?}");
            second.release().await.unwrap();
        }
    }
    nothing_is_left(&server, "late requests").await;
    world.nothing_is_left("late requests").await;
}

/// A request of an adoption that was given up may arrive after the hold has got a longer lease.
#[tokio::test]
async fn an_adoption_shortens_no_lease() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let backend = RedisBackend::connect(RedisConfig::new(server.url()))
        .await
        .unwrap();
    let claim = async |owner, ttl| {
        let name = LockName::new("a").unwrap();
        let request = ClaimRequest::new(name, HoldMode::Exclusive, ttl, OwnerId::new(owner));
        backend.claim(&request).await.unwrap()
    };
    let mut first = claim(1, LONG).await;
    let grant = first.attempt(Duration::ZERO).await.unwrap().unwrap();
    let token = FencingToken::new(*grant.tokens.start());
    let owner = first.detach().unwrap();
    let mut adopted = claim(2, LONG).await;
    adopted.adopt(owner, token).await.unwrap();
    adopted.set_ttl(10 * LONG).unwrap();
    adopted.renew().await.unwrap();
    claim(2, LONG).await.adopt(owner, token).await.unwrap();
    let left: u64 = server.cli(&["PTTL", "lockkit:a"]).unwrap().parse().unwrap();
    assert!(u128::from(left) > 5 * LONG.as_millis(), "{left} ms are left");
    adopted.release().await.unwrap();
}

/// Killed −9 at once, again and again, while others try for the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_die_pass_on_what_they_have_detached() {
    const ROUNDS: usize = 5;

    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let here = client(server.url()).await;
    let mut holder = Peer::start(server.url()).await;
    let token = holder.hold(10 * SECOND, "a").await;
    let waiting = waiter(&lock(&here, "a", LONG));
    waiters(&server, "a", 1).await;
    for round in 1..=ROUNDS {
        let mut next = Peer::start(server.url()).await;
        holder.send("detach slot");
        let answer = holder.reply().await;
        holder.process.kill().unwrap();
        let message = answer
            .strip_prefix("detached ")
            .unwrap_or_else(|| panic!("round {round}: {answer}"));
        assert!(
            here.lock("a").unwrap().try_acquire().await.unwrap().is_none(),
            "round {round}"
        );
        next.send(&format!("adopt slot {message}"));
        assert_eq!(next.granted().await, token, "round {round}");
        assert!(!waiting.is_finished(), "round {round}: granted in between");
        holder = next;
    }
    holder.send("release slot");
    assert_eq!(holder.reply().await, "released");
    let next = granted(LONG, "the waiter", waiting).await;
    assert!(next.token().get() > token);
    next.release().await.unwrap();
    nothing_is_left(&server, "after processes that died").await;
}

/// What replicas do not know of would be the former owner's after a fail-over, for anybody to adopt once more.
#[tokio::test]
async fn an_adoption_waits_for_replicas_too() {
    if no_server() {
        return;
    }
    let master = RedisServer::plain().unwrap();
    let replica = RedisServer::builder().replica_of(master.addr()).start().unwrap();
    eventually("the replica is connected", async || {
        master
            .cli(&["INFO", "replication"])
            .is_ok_and(|info| info.contains("state=online"))
    })
    .await;
    let here = client(master.url()).await;
    let mut config = RedisConfig::new(master.url());
    config.replicas = 1;
    config.replicas_timeout = 200 * MS;
    let there = connect(config).await.unwrap();
    let guard = lock(&here, "a", LONG).acquire().await.unwrap();
    let token = guard.token();
    let mut detached = guard.detach().await.unwrap();
    replica.pause().unwrap();
    let err = there.adopt(&mut detached).await.unwrap_err();
    assert!(
        err.is_transient() && shown(&err).contains("0 of 1 replicas"),
        "{}",
        shown(&err)
    );
    assert!(
        lock(&here, "a", LONG).try_acquire().await.unwrap().is_none(),
        "given up"
    );
    replica.resume().unwrap();
    let mut adopted = None;
    until(RECOVERED, "adopted", async || {
        match there.adopt(&mut detached).await {
            Ok(guard) => adopted.insert(guard).is_held(),
            Err(err) => {
                assert!(err.is_transient(), "{err}");
                false
            }
        }
    })
    .await;
    let adopted = adopted.unwrap();
    assert_eq!(adopted.token(), token);
    adopted.release().await.unwrap();
}

/// It was released with time left, which is asked for again until no earlier renewal can shorten it.
#[tokio::test]
async fn a_late_renewal_frees_nothing_before_its_time() {
    const SHORT: Duration = Duration::from_secs(6);
    const LEAST: Duration = Duration::from_secs(20);

    if no_server() {
        return;
    }
    let rules = "~* &* +@all -client|kill";
    let server = RedisServer::builder()
        .user("bound", "open-sesame", rules)
        .start()
        .unwrap();
    let other = lock(&client(server.url()).await, "a", LONG);
    // The first connection goes a long way, those after it go straight.
    let far = Proxy::start(server.addr()).unwrap();
    let near = Proxy::start(far.addr()).unwrap();
    let here = client(&format!("redis://bound:open-sesame@{}", near.addr())).await;
    near.set_upstream(server.addr());
    let options = AcquireOptions::new()
        .ttl(SHORT)
        .op_timeout(300 * MS)
        .hold_at_least(LEAST);
    let asked = std::time::Instant::now();
    let guard = here.lock("a").unwrap().acquire_with(&options).await.unwrap();
    far.set(Mode::Blackhole);
    guard.renew().await.unwrap_err();
    until(RECOVERED, "connected again", async || {
        near.counts().connections >= 2 && here.inspect("a").await.is_ok()
    })
    .await;
    let unconfirmed = guard.release().await.unwrap_err();
    assert!(unconfirmed.is_transient(), "{unconfirmed}");
    let left = async || {
        let state = here.inspect("a").await.unwrap();
        state.holders[0].left.unwrap()
    };
    until(RECOVERED, "the rest is asked for", async || left().await > SHORT).await;
    far.set(Mode::Pass);
    let free = loop {
        if let Some(guard) = other.try_acquire().await.unwrap() {
            break guard;
        }
        tokio::time::sleep(20 * MS).await;
    };
    assert!(asked.elapsed() >= LEAST, "free after {:?}", asked.elapsed());
    free.release().await.unwrap();
}

/// ✘ availability: the hold that nobody has adopted yet ends before its ttl is over. Without the right to end the connection before,
/// its client cannot tell that a renewal is still on the way there.
#[tokio::test]
async fn a_late_renewal_shortens_a_detached_hold() {
    const SHORT: Duration = Duration::from_secs(6);

    if no_server() {
        return;
    }
    let rules = "~* &* +@all -client|kill";
    let server = RedisServer::builder()
        .user("bound", "open-sesame", rules)
        .start()
        .unwrap();
    let there = client(server.url()).await;
    // The first connection goes a long way, those after it go straight.
    let far = Proxy::start(server.addr()).unwrap();
    let near = Proxy::start(far.addr()).unwrap();
    let here = client(&format!("redis://bound:open-sesame@{}", near.addr())).await;
    near.set_upstream(server.addr());
    let options = AcquireOptions::new().ttl(LONG).op_timeout(300 * MS);
    let guard = here.lock("a").unwrap().acquire_with(&options).await.unwrap();
    far.set(Mode::Blackhole);
    let err = guard.set_ttl(SHORT).await.unwrap_err();
    assert!(err.is_transient(), "{err}");
    until(RECOVERED, "connected again", async || {
        near.counts().connections >= 2 && here.inspect("a").await.is_ok()
    })
    .await;
    guard.set_ttl(LONG).await.unwrap();
    let mut detached = guard.detach().await.unwrap();
    assert_eq!(detached.ttl(), LONG);
    let left_there = async || {
        let state = there.inspect("a").await.unwrap();
        state.holders[0].left.unwrap()
    };
    assert!(left_there().await > 2 * SHORT, "detached for its ttl");
    far.set(Mode::Pass);
    until(RECOVERED, "the late one has come", async || {
        left_there().await <= SHORT
    })
    .await;
    // Whoever adopts it in time has it for a full ttl.
    let adopted = there.adopt(&mut detached).await.unwrap();
    assert!(left_there().await > 2 * SHORT && adopted.is_held());
    adopted.release().await.unwrap();
}

#[tokio::test]
async fn an_adoption_in_vain_prolongs_no_minority() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (here, there) = (world.client().await, hasty(world.client().await));
    let guard = lock(&here, "a", 3 * SECOND).acquire().await.unwrap();
    until(LONG, "at all masters", async || world.holding("a") == 5).await;
    let mut detached = guard.detach().await.unwrap();
    for master in &world.masters[..3] {
        master.pause().unwrap();
    }
    let minority = &world.masters[3..];
    until(4 * SECOND, "over at the minority", async || {
        let err = there.adopt(&mut detached).await.unwrap_err();
        assert!(err.is_transient() && !err.is_lost(), "{err}");
        minority.iter().all(|master| {
            master
                .cli(&["EXISTS", "lockkit:a"])
                .is_ok_and(|there| there == "0")
        })
    })
    .await;
    for master in &world.masters[..3] {
        master.resume().unwrap();
    }
    world.nothing_is_left("after an adoption in vain").await;
}

/// Two masters miss a downgrade, and the hold is detached before a renewal tells them. They are back when another one fails.
#[tokio::test]
async fn redlock_adopts_also_where_a_downgrade_was_missed() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (here, proxies) = world.client_behind_proxies().await;
    let there = world.client().await;
    let guard = lock(&here, "a", LONG).acquire().await.unwrap();
    let token = guard.token();
    until(LONG, "at all masters", async || world.holding("a") == 5).await;
    for proxy in &proxies[3..] {
        proxy.set(Mode::HalfOpen);
    }
    let reading = within(LONG, "a majority", guard.downgrade()).await.unwrap();
    let mut detached = within(LONG, "a majority", reading.detach()).await.unwrap();
    world.masters[0].pause().unwrap();
    let adopted = there.adopt(&mut detached).await.unwrap();
    assert_eq!(adopted.token(), token);
    let reader = lock(&world.client().await, "a", LONG).shared();
    let beside = within(RECOVERED, "a reader", reader.acquire()).await.unwrap();
    adopted.renew().await.unwrap();
    beside.release().await.unwrap();
    adopted.release().await.unwrap();
}

#[tokio::test]
async fn redlock_adopts_with_a_majority_and_no_less() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (here, there) = (world.client().await, world.client().await);
    let guard = lock(&here, "a", LONG).acquire().await.unwrap();
    let token = guard.token();
    until(LONG, "at all masters", async || world.holding("a") == 5).await;
    let mut detached = guard.detach().await.unwrap();
    for master in &world.masters[..3] {
        master.pause().unwrap();
    }
    let err = there.adopt(&mut detached).await.unwrap_err();
    assert!(err.is_transient() && !err.is_lost(), "{err}");
    let mut other = copy(&detached);
    world.masters[0].resume().unwrap();
    let mut adopted = None;
    until(RECOVERED, "adopted", async || {
        match there.adopt(&mut detached).await {
            Ok(guard) => adopted.insert(guard).is_held(),
            Err(err) => {
                assert!(err.is_transient(), "{err}");
                false
            }
        }
    })
    .await;
    let adopted = adopted.unwrap();
    assert_eq!(adopted.token(), token);
    for master in &world.masters[1..3] {
        master.resume().unwrap();
    }
    adopted.renew().await.unwrap();
    assert!(is_gone(&here.adopt(&mut other).await), "one has adopted it");
    assert!(adopted.renew().await.is_ok() && adopted.is_held());
    adopted.release().await.unwrap();
}

/// Redis, MySQL and the memory compare it, too. Beyond the last token there would be none for the next holder.
#[tokio::test]
async fn redlock_compares_the_token_of_a_detached_hold() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let (here, there) = (world.client().await, world.client().await);
    let fences = || -> Vec<_> {
        let fence = |master: &RedisServer| master.cli(&["GET", "lockkit:lockkit#fence:{lockkit:a}"]);
        world
            .masters
            .iter()
            .map(|master| fence(master).unwrap())
            .collect()
    };
    for lock in [lock(&here, "a", LONG), lock(&here, "a", LONG).shared()] {
        let guard = lock.acquire().await.unwrap();
        let token = guard.token().get();
        until(LONG, "at all masters", async || world.holding("a") == 3).await;
        let mut detached = guard.detach().await.unwrap();
        let before = fences();
        for changed in [u64::MAX, token + 1_000_000, 1] {
            let text = detached.encode();
            let text = text.replace(&format!(":{token}:"), &format!(":{changed}:"));
            let mut changed = DetachedHold::decode(&text).unwrap();
            assert_ne!(changed.token(), detached.token());
            let adopted = there.adopt(&mut changed).await;
            assert!(is_gone(&adopted), "{changed:?}: {adopted:?}");
        }
        assert_eq!(fences(), before, "no counter has moved");
        let adopted = there.adopt(&mut detached).await.unwrap();
        assert_eq!(adopted.token().get(), token);
        adopted.release().await.unwrap();
    }
    world.nothing_is_left("after adoptions with other tokens").await;
}
