//! Faults of masters and connections, and keys that vanish. At a minority they cost nothing, at a majority they are an error.
//! Neither lets two hold at once, except where the guarantees say so.

use std::time::{Duration, Instant};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{AcquireOptions, FenceGate, LossReason};
use lockkit_testbed::{Mode, Proxy, eventually, poll_at_most, redis::Fsync};

use super::world::{World, config, connect};
use crate::common::{
    Alone, LONG, MS, RECOVERED, SECOND, granted, lock, no_server, renewed, shown, until, waiter, within,
};

/// The `master_timeout` where replies are lost, and the time that a busy machine may take on top.
const PATIENCE: Duration = Duration::from_millis(300);
const MORE: Duration = Duration::from_millis(700);

#[tokio::test]
async fn two_dead_masters_cost_nothing_three_are_a_named_error() {
    if no_server() {
        return;
    }
    let world = World::five();
    // Dead masters refuse at once. A busy machine may delay the others.
    let mut config = world.config();
    config.master_timeout = LONG;
    let client = connect(config.clone()).await.unwrap();
    let lock = lock(&client, "a", LONG);
    let held = lock.acquire().await.unwrap();
    for master in &world.masters[..2] {
        master.kill().unwrap();
    }
    held.renew().await.unwrap();
    let mut last = held.token();
    held.release().await.unwrap();
    // Also for a client that has never been connected to them.
    let late = connect(config.clone()).await.unwrap();
    for lock in [lock.clone(), self::lock(&late, "a", LONG), lock.shared()] {
        for _ in 0..10 {
            let held = lock
                .try_acquire()
                .await
                .unwrap()
                .expect("free, by the word of three");
            assert!(held.token() > last);
            last = held.token();
            held.release().await.unwrap();
        }
    }
    assert!(client.inspect("a").await.unwrap().is_free());

    world.masters[2].kill().unwrap();
    let began = Stopwatch::start();
    let error = lock.try_acquire().await.unwrap_err();
    assert!(began.elapsed() < PATIENCE + MORE, "{:?}", began.elapsed());
    assert!(error.is_transient() && !error.is_timeout(), "{error}");
    let text = shown(&error);
    assert!(text.contains("3 of 5 masters did not take part"), "{text}");
    for master in &world.masters[..3] {
        assert!(text.contains(&master.addr().to_string()), "{text}");
    }
    assert!(text.contains("refused"), "{text}");
    let error = lock.acquire_timeout(SECOND).await.unwrap_err();
    assert!(error.is_transient() && !error.is_timeout(), "{error}");
    assert!(client.inspect("a").await.is_err());
    let error = connect(config).await.unwrap_err();
    assert!(
        shown(&error).contains("3 of 5 masters did not take part"),
        "{error:?}"
    );
    world.nothing_is_left("three masters dead").await;
}

#[tokio::test]
async fn a_master_that_stands_still_costs_nothing() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let lock = lock(&client, "a", LONG);
    for master in &world.masters[3..] {
        master.pause().unwrap();
    }
    let mut took = Vec::new();
    for _ in 0..50 {
        let began = Stopwatch::start();
        lock.acquire().await.unwrap().release().await.unwrap();
        took.push(began.elapsed());
    }
    took.sort_unstable();
    // The client never waits for it, before and after its connection counts as broken.
    assert!(took[25] < PATIENCE / 3, "{took:?}");
    let late = within(LONG, "connected beside it", world.client()).await;
    drop(late);
    for master in &world.masters[3..] {
        master.resume().unwrap();
    }
    // Requests under way to it take effect in order, or not at all.
    world.nothing_is_left("after masters stood still").await;
}

/// A renewal waits for the last masters for a sixth of the ttl at most.
#[tokio::test]
async fn a_master_that_stands_still_costs_no_hold_its_lease() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = world.client().await;
    let held = lock(&client, "a", 2 * SECOND).acquire().await.unwrap();
    world.masters[2].pause().unwrap();
    for _ in 0..3 {
        renewed(&held).await;
    }
    held.check().unwrap();
    world.masters[2].resume().unwrap();
    held.release().await.unwrap();
    world.nothing_is_left("after a master stood still").await;
}

#[tokio::test]
async fn masters_restarted_with_their_data_keep_holds_and_waiters() {
    if no_server() {
        return;
    }
    let world = World::built(5, |builder| builder.append_only(Fsync::Always));
    let mut config = world.config();
    config.durable = true;
    let (holder, other) = (
        connect(config.clone()).await.unwrap(),
        connect(config).await.unwrap(),
    );
    let mut last = 0;
    for round in 0..3 {
        let held = lock(&holder, "a", LONG).acquire().await.unwrap();
        assert!(held.token().get() > last, "tokens went back");
        let waiting = waiter(&lock(&other, "a", LONG));
        world.waiters("a", 1).await;
        // A majority, and then all of them at once.
        let crashing = &world.masters[round % 2..][..3 + round];
        for master in crashing {
            master.kill().unwrap();
        }
        for master in crashing {
            master.start().unwrap();
        }
        until(RECOVERED, "renewed", async || {
            assert!(held.is_held());
            held.renew().await.is_ok()
        })
        .await;
        assert!(!waiting.is_finished(), "PROMISE BROKEN: an overlap");
        let token = held.token();
        within(RECOVERED, "released", async {
            held.release().await.unwrap();
        })
        .await;
        let next = granted(RECOVERED, "the waiter", waiting).await;
        assert!(next.token() > token);
        last = next.token().get();
        next.release().await.unwrap();
        // And while idle.
        world.masters[round].kill().unwrap();
        world.masters[round].start().unwrap();
        world.voting(5).await;
    }
    world.nothing_is_left("after crashes").await;
}

#[tokio::test]
async fn lost_replies_cost_nothing_and_of_a_majority_leave_nothing() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (mut config, proxies) = world.behind_proxies();
    config.master_timeout = PATIENCE;
    let client = connect(config).await.unwrap();
    let ours = lock(&client, "a", 3 * SECOND);
    for mode in [Mode::DropReplies, Mode::Blackhole, Mode::HalfOpen] {
        for proxy in &proxies[..2] {
            proxy.set(mode);
        }
        for _ in 0..10 {
            let held = within(PATIENCE + MORE, "granted by three", ours.acquire())
                .await
                .unwrap();
            within(PATIENCE + MORE, "renewed by three", held.renew())
                .await
                .unwrap();
            within(PATIENCE + MORE, "released by three", held.release())
                .await
                .unwrap();
        }
        proxies[2].set(mode);
        let began = Stopwatch::start();
        let error = ours.try_acquire().await.unwrap_err();
        assert!(began.elapsed() < PATIENCE * 2 + MORE, "{:?}", began.elapsed());
        assert!(error.is_transient() && !error.is_timeout(), "{mode:?}: {error}");
        for proxy in proxies.iter() {
            proxy.set(Mode::Pass);
        }
        world.nothing_is_left(&format!("{mode:?}")).await;
        // Silent connections are detected and replaced.
        until(RECOVERED, "granted by all", async || {
            let Ok(held) = ours.acquire().await else {
                return false;
            };
            let all = world.holding("a") == 5;
            held.release().await.is_ok() && all
        })
        .await;
    }
}

#[tokio::test]
async fn a_holder_cut_off_is_told_before_the_next_is_granted() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (holder, proxies) = world.client_behind_proxies().await;
    let other = world.client().await;
    for mode in [Mode::Blackhole, Mode::DropReplies, Mode::HalfOpen, Mode::Refuse] {
        let held = lock(&holder, "a", 2 * SECOND).acquire().await.unwrap();
        let waiting = waiter(&lock(&other, "a", LONG));
        world.waiters("a", 1).await;
        for proxy in &proxies[1..4] {
            proxy.set(mode);
            if mode == Mode::Refuse {
                proxy.reset();
            }
        }
        let reason = within(3 * SECOND, "told", held.lost()).await;
        assert_eq!(reason, LossReason::Expired, "{mode:?}");
        assert!(!waiting.is_finished(), "an overlap: {mode:?}");
        for proxy in proxies.iter() {
            proxy.set(Mode::Pass);
        }
        let next = granted(2 * SECOND + RECOVERED, "the waiter", waiting).await;
        assert!(next.token() > held.token());
        next.release().await.unwrap();
        drop(held);
        world.nothing_is_left(&format!("{mode:?}")).await;
        until(RECOVERED, "connected again", async || {
            matches!(lock(&holder, "b", LONG).try_acquire().await, Ok(Some(_)))
        })
        .await;
    }
}

#[tokio::test]
async fn a_storm_of_resets_costs_nobody_a_hold() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (client, proxies) = world.client_behind_proxies().await;
    let other = world.client().await;
    let held = lock(&client, "a", 9 * SECOND).acquire().await.unwrap();
    let theirs = lock(&other, "b", LONG).acquire().await.unwrap();
    let waiting = waiter(&lock(&client, "b", LONG));
    world.waiters("b", 1).await;
    let storm = Instant::now();
    let began = held.valid_until();
    let mut rng = fastrand::Rng::with_seed(7);
    // Its renewal is due after three seconds, in the midst of the resets.
    while storm.elapsed() < 4 * SECOND || held.valid_until() == began {
        if rng.u8(..10) == 0 {
            proxies.iter().for_each(Proxy::reset);
        } else {
            proxies[rng.usize(..5)].reset();
        }
        tokio::time::sleep(20 * MS).await;
        held.check().expect("held throughout");
        assert!(!waiting.is_finished(), "PROMISE BROKEN: an overlap");
        // On a busy machine, connecting takes longer than the time between two resets.
        let soon = tokio::time::Instant::now() + 5 * SECOND;
        if held.valid_until().is_some_and(|end| end < soon) {
            renewed(&held).await;
        }
    }
    let resets: u64 = proxies.iter().map(|proxy| proxy.counts().connections).sum();
    assert!(resets > 20, "no storm: {resets} connections");
    theirs.release().await.unwrap();
    granted(RECOVERED, "the waiter", waiting)
        .await
        .release()
        .await
        .unwrap();
    within(RECOVERED, "released", async { held.release().await.unwrap() }).await;
    world.nothing_is_left("after resets").await;
}

#[tokio::test]
async fn dropped_at_every_await_nothing_is_left_at_any_master() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (client, proxies) = world.client_behind_proxies().await;
    // A release lost with its connection leaves the key at one master, until its lease ends.
    let (ours, other) = (lock(&client, "a", SECOND), world.client().await);
    let theirs = lock(&other, "a", SECOND);
    let mut rng = fastrand::Rng::with_seed(7);
    for (name, contended) in [("acquire", false), ("release", false), ("wait", true)] {
        let mut done = false;
        for polls in 1..40 {
            // Replies of some, or a connection, are lost on the way.
            let which = rng.usize(..5);
            match polls % 3 {
                0 => proxies[which].set(Mode::DropReplies),
                1 => proxies[which].reset(),
                _ => {}
            }
            let held = if contended {
                Some(theirs.acquire().await.unwrap())
            } else {
                None
            };
            let released = tokio::spawn(async move {
                if let Some(held) = held {
                    tokio::time::sleep(20 * MS).await;
                    held.release().await.unwrap();
                }
            });
            let lock = if polls % 2 == 0 {
                ours.clone()
            } else {
                ours.shared()
            };
            done = if name == "release" {
                let held = lock.acquire().await.unwrap();
                poll_at_most(polls, held.release()).await.is_some()
            } else {
                poll_at_most(polls, lock.acquire()).await.is_some()
            };
            released.await.unwrap();
            proxies[which].set(Mode::Pass);
            world
                .nothing_is_left(&format!("{name}, dropped after poll {polls}"))
                .await;
            if done && polls > 12 {
                break;
            }
        }
        assert!(done, "{name} never came to an end");
    }
}

#[tokio::test]
async fn forgotten_scripts_are_made_known_again() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let lock = lock(&client, "a", 3 * SECOND);
    for _ in 0..3 {
        for master in &world.masters {
            master.cli(&["SCRIPT", "FLUSH"]).unwrap();
        }
        let held = lock.acquire().await.unwrap();
        for master in &world.masters {
            master.cli(&["SCRIPT", "FLUSH"]).unwrap();
        }
        held.renew().await.unwrap();
        for master in &world.masters {
            master.cli(&["SCRIPT", "FLUSH"]).unwrap();
        }
        held.release().await.unwrap();
        assert!(client.inspect("a").await.unwrap().is_free());
    }
    // A release of an unknown script is not repeated if nobody awaits its reply. The lease ends that key.
    world.nothing_is_left("after forgotten scripts").await;
    until(RECOVERED, "all take part again", async || {
        let held = lock.acquire().await.unwrap();
        let all = world.holding("a") == 5;
        held.release().await.unwrap();
        all
    })
    .await;
}

/// Its scripts are there, and it may be asked to load them again by each look at whether it is there.
#[tokio::test]
async fn a_master_that_refuses_to_load_scripts_is_there() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let (client, proxies) = world.client_behind_proxies().await;
    let refuses = &world.masters[0];
    let connections = proxies[0].counts().connections;
    refuses.cli(&["ACL", "SETUSER", "default", "-script"]).unwrap();
    let pings = || {
        refuses
            .command_counts()
            .unwrap()
            .get("ping")
            .copied()
            .unwrap_or_default()
    };
    let before = pings();
    // Its replies come when nobody awaits them any more, so that it seems to be silent.
    proxies[0].set(Mode::Delay {
        requests: Duration::ZERO,
        replies: 50 * MS,
    });
    let lock = lock(&client, "a", LONG);
    lock.acquire().await.unwrap().release().await.unwrap();
    until(LONG, "it is asked whether it is there", async || pings() > before).await;
    // It has answered, and is silent no more.
    until(2 * LONG, "hardly a ping in three seconds", async || {
        let answered = pings();
        tokio::time::sleep(3 * SECOND).await;
        pings() <= answered + 1
    })
    .await;
    let connected = proxies[0].counts().connections;
    assert_eq!(connected, connections, "its connection was replaced");
}

/// A clock that jumps ahead, an eviction and a careless admin all do this.
#[tokio::test]
async fn keys_expired_at_a_majority_let_two_in_with_rising_tokens() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (first, second) = (world.client().await, world.client().await);
    let stale = lock(&first, "a", LONG)
        .with_options(AcquireOptions::new().ttl(LONG).renew(false))
        .acquire()
        .await
        .unwrap();
    let theirs = lock(&second, "a", LONG);
    for (n, master) in world.masters.iter().enumerate() {
        assert!(
            theirs.try_acquire().await.unwrap().is_none(),
            "{n} of them are no majority"
        );
        master.cli(&["PEXPIRE", "lockkit:a", "1"]).unwrap();
        if n == 2 {
            break;
        }
    }
    eventually("expired at three", async || world.holding("a") == 2).await;
    let fresh = theirs.try_acquire().await.unwrap().expect("to be had at three");
    assert!(stale.is_held(), "the overlap that this reproduces");
    assert!(fresh.token() > stale.token(), "tokens rise all the same");
    let gate = FenceGate::new();
    gate.admit(fresh.token()).unwrap();
    assert!(gate.admit(stale.token()).is_err(), "a stale write is refused");
    // The next renewal reports it.
    assert!(stale.renew().await.unwrap_err().is_lost());
    let reason = within(SECOND, "told", stale.lost()).await;
    assert_eq!(reason, LossReason::Revoked);
    fresh.release().await.unwrap();
    drop(stale);
    world.nothing_is_left("after keys went").await;
}

#[tokio::test]
async fn keys_expired_at_a_minority_are_set_again_by_the_next_renewal() {
    const COUNTER: &str = "lockkit:lockkit#fence:{lockkit:a}";

    if no_server() {
        return;
    }
    let world = World::five();
    let (first, second) = (world.client().await, world.client().await);
    let several = AcquireOptions::new().ttl(LONG).local_handoffs(8);
    let exclusive = first.lock("a").unwrap().with_options(several);
    for ours in [exclusive.clone(), exclusive.shared()] {
        let held = ours.acquire().await.unwrap();
        eventually("held by all", async || world.holding("a") == 5).await;
        for master in &world.masters[3..] {
            master.cli(&["DEL", "lockkit:a"]).unwrap();
        }
        let theirs = lock(&second, "a", LONG);
        assert!(theirs.try_acquire().await.unwrap().is_none());
        eventually("what the try took is given back", async || {
            world.holding("a") == 3
        })
        .await;
        // An unconfirmed acquisition with lower tokens leaves this.
        for master in &world.masters[3..] {
            master.cli(&["SET", COUNTER, &held.token().to_string()]).unwrap();
        }
        held.renew().await.unwrap();
        eventually("repaired", async || world.holding("a") == 5).await;
        held.check().unwrap();
        let last = world.masters[0].cli(&["GET", COUNTER]).unwrap();
        for master in &world.masters[3..] {
            assert_eq!(
                master.cli(&["GET", COUNTER]).unwrap(),
                last,
                "all tokens are carried"
            );
        }
        held.release().await.unwrap();
        world.nothing_is_left("after a repair").await;
    }
}

#[tokio::test]
async fn a_divided_vote_is_repeated_until_somebody_wins() {
    if no_server() {
        return;
    }
    let world = World::five();
    let mut tasks = Vec::new();
    let inside = Alone::default();
    for _ in 0..6 {
        let (lock, inside) = (lock(&world.client().await, "a", LONG), inside.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..30 {
                let held = lock.acquire().await.unwrap();
                inside.enter(&held).await;
                held.release().await.unwrap();
            }
        }));
    }
    for task in tasks {
        within(LONG, "everybody gets on", task).await.unwrap();
    }
    world.nothing_is_left("after contention").await;
}

#[tokio::test]
async fn a_master_with_something_else_at_the_key_has_no_say() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let lock = lock(&client, "a", LONG);
    for (n, master) in world.masters.iter().enumerate() {
        master.cli(&["HSET", "lockkit:a", "some", "thing"]).unwrap();
        if n == 2 {
            break;
        }
        lock.acquire().await.unwrap().release().await.unwrap();
    }
    let error = lock.try_acquire().await.unwrap_err();
    assert!(!error.is_transient(), "{error:?}");
    assert!(shown(&error).contains("something else than a lock"), "{error:?}");
    let config = config("redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3");
    let error = connect(config).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
}

/// Counters are ahead after clocks were set back, or beside a client whose clock is ahead.
#[tokio::test]
async fn counters_ahead_cost_a_second_round_and_tokens_rise() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let fence = "lockkit:lockkit#fence:{lockkit:a}";
    let mut ahead = 1 << 51;
    for ours in [lock(&client, "a", LONG), lock(&client, "a", LONG).shared()] {
        for round in 0..5_u64 {
            // Each time at other masters, and with different values.
            for (n, master) in (0_u64..).zip(&world.masters) {
                if (n + round) % 5 < 3 {
                    master.cli(&["SET", fence, &(ahead + n * 7).to_string()]).unwrap();
                }
            }
            let held = ours.acquire().await.unwrap();
            assert!(
                held.token().get() > ahead,
                "{} is not above {ahead}",
                held.token()
            );
            let raised = world.masters.iter().filter(|master| {
                let counter: u64 = master.cli(&["GET", fence]).unwrap().parse().unwrap_or_default();
                counter >= held.token().get()
            });
            assert!(raised.count() >= 3, "a majority knows of it");
            let state = client.inspect("a").await.unwrap();
            assert_eq!(state.holders[0].token, held.token());
            ahead = held.token().get() + 1_000;
            held.release().await.unwrap();
        }
    }
    world.nothing_is_left("after second rounds").await;

    for master in &world.masters {
        master.cli(&["SET", fence, "9007199254740993"]).unwrap();
    }
    let error = lock(&client, "a", LONG).try_acquire().await.unwrap_err();
    assert!(shown(&error).contains("fencing tokens"), "{error:?}");
    world.nothing_is_left("after a counter that cannot be").await;
    let held = lock(&client, "b", LONG).try_acquire().await.unwrap();
    assert!(held.is_some(), "other locks go on");
}

/// Three releases are each lost at another master. The keys left behind are a majority, of nobody.
#[tokio::test]
async fn releases_lost_at_one_master_after_another_add_up() {
    if no_server() {
        return;
    }
    let ttl = 30 * SECOND;
    let world = World::five();
    let (ours, proxies) = world.client_behind_proxies().await;
    let theirs = world.client().await;
    let mine = lock(&ours, "a", ttl);
    for (n, proxy) in proxies[..3].iter().enumerate() {
        let held = within(LONG, "granted", mine.acquire()).await.unwrap();
        eventually("all others have voted", async || world.holding("a") == 5).await;
        proxy.set(Mode::HalfOpen);
        // An error, once a majority can no longer confirm the release.
        let _ = held.release().await;
        proxy.set(Mode::Pass);
        eventually("the others have let it go", async || world.holding("a") == n + 1).await;
        if n == 0 {
            // Its lease is to end long before those of the others.
            tokio::time::sleep(ttl / 3).await;
        }
    }
    let left_behind = || -> Vec<_> {
        let masters = world.masters[1..3].iter();
        masters
            .map(|master| master.cli(&["GET", "lockkit:a"]).unwrap())
            .collect()
    };
    let before = left_behind();
    let taken = lock(&theirs, "a", ttl).acquire_timeout(2 * SECOND).await;
    assert!(taken.unwrap_err().is_timeout());
    let next = waiter(&lock(&theirs, "a", ttl));
    let next = granted(2 * ttl, "the first of the leases is over", next).await;
    assert_eq!(
        left_behind(),
        before,
        "it waited for more than the first of the leases"
    );
    drop(next);
}

/// Masters that are out of memory let holds be renewed, asked for, ended and released, also over connections that are made anew.
#[tokio::test]
async fn masters_full_and_resets_end_no_hold() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let (client, proxies) = world.client_behind_proxies().await;
    let mut held = Vec::new();
    for name in ["held", "asked", "ended"] {
        held.push(lock(&client, name, LONG).acquire().await.unwrap());
    }
    let shared = lock(&client, "shared", LONG).shared().acquire().await.unwrap();
    for master in &world.masters {
        master.cli(&["CONFIG", "SET", "maxmemory", "1"]).unwrap();
    }
    for proxy in &*proxies {
        proxy.reset();
    }

    let looker = world.client().await;
    until(LONG, "connected again", async || {
        client.inspect("held").await.is_ok()
    })
    .await;
    assert_eq!(looker.inspect("held").await.unwrap().holders.len(), 1);
    for guard in &held {
        guard.renew().await.unwrap();
    }
    shared.renew().await.unwrap();
    shared.release().await.unwrap();
    let _ = looker.revoke("asked", held[1].token(), MS).await.unwrap();
    within(LONG, "told", held[1].lost()).await;
    assert!(looker.revoke_by_force("ended", held[2].token()).await.unwrap());
    within(LONG, "told", held[2].lost()).await;
    held.swap_remove(0).release().await.unwrap();
    let refused = lock(&looker, "new", LONG).try_acquire().await.unwrap_err();
    assert!(shown(&refused).contains("maxmemory"), "{refused:?}");
}
