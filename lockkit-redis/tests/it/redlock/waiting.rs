//! Waiters, the counters of unused names, and clients whose tokens are outrun.

use std::{
    cell::Cell,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use futures_util::FutureExt as _;
use lockkit_conformance::stall::timeout;
use lockkit_core::{
    AcquireOptions, LockClient, LockName, LossReason, Revocation,
    spi::{Backend as _, ClaimRequest, Mode as SpiMode, OwnerId},
};
use lockkit_redis::RedlockBackend;
use lockkit_testbed::{Clock, Mode, redis::RedisServer};
use tokio::task::JoinSet;

use super::world::{self, World};
use crate::common::{AT_ONCE, LONG, MS, SECOND, granted, lock, no_server, shown, until, waiter, within};

/// The time for which a waiter counts after it asked last, and the pause before waiters ask again.
const SILENT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_secs(2);

#[tokio::test]
async fn a_dead_writer_keeps_readers_out_for_ten_seconds() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (dead, proxies) = world.client_behind_proxies().await;
    let (holder, reader, living) = (world.client().await, world.client().await, world.client().await);
    let held = lock(&holder, "a", LONG).shared().acquire().await.unwrap();
    let _dead = waiter(&lock(&dead, "a", LONG));
    world.waiters("a", 1).await;
    // Its host is gone.
    for proxy in proxies.iter() {
        proxy.set(Mode::Blackhole);
    }
    let reading = waiter(&lock(&reader, "a", LONG).shared());
    world.waiters("a", 2).await;
    // A waiter behind both of them, which goes on asking.
    let writing = waiter(&lock(&living, "a", LONG));
    world.waiters("a", 3).await;
    let read = granted(SILENT + POLL + 3 * SECOND, "the reader", reading).await;
    held.check().unwrap();
    assert!(!writing.is_finished(), "PROMISE BROKEN: an overlap");
    held.release().await.unwrap();
    read.release().await.unwrap();
    granted(SILENT, "the writer", writing)
        .await
        .release()
        .await
        .unwrap();
    world.nothing_is_left("after a dead writer").await;
}

/// The holder stays, so nobody else tells them.
#[tokio::test]
async fn readers_behind_a_writer_that_gives_up_are_told() {
    if no_server() {
        return;
    }
    let world = World::five();
    let backend = Box::pin(RedlockBackend::connect(world.config())).await.unwrap();
    // Past the driver, which has waiters ask every second or two.
    let claim = async |mode, owner| {
        let request = ClaimRequest::new(LockName::new("a").unwrap(), mode, LONG, OwnerId::new(owner));
        backend.claim(&request).await.unwrap()
    };
    let mut holder = claim(SpiMode::Shared, 1).await;
    let mut writer = claim(SpiMode::Exclusive, 2).await;
    let mut reader = claim(SpiMode::Shared, 3).await;
    holder.attempt(LONG).await.unwrap().expect("it is free");
    assert!(writer.attempt(LONG).await.unwrap().is_none());
    assert!(reader.attempt(LONG).await.unwrap().is_none(), "a writer waits");
    world.waiters("a", 2).await;
    assert!(reader.notified().now_or_never().is_none());
    writer.release().await.unwrap();
    within(AT_ONCE, "told", reader.notified()).await;
    let granted = reader.attempt(LONG).await.unwrap();
    granted.expect("only readers are in");
    for mut claim in [holder, reader] {
        claim.release().await.unwrap();
    }
    world.nothing_is_left("after a writer that gave up").await;
    backend.close().await.unwrap();
}

/// It stands still, though its client is connected. The lock would be kept for it, in vain.
#[tokio::test]
async fn a_writer_that_has_not_asked_lately_is_passed_over() {
    const CHANNEL: &str = "lockkit:lockkit#client:test";

    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = world.client().await;
    let connect = |master: &RedisServer| {
        let client = redis::Client::open(master.url()).unwrap();
        client.get_connection().unwrap()
    };
    let mut connections: Vec<_> = world.masters.iter().map(connect).collect();
    let mut listening: Vec<_> = connections.iter_mut().map(redis::Connection::as_pubsub).collect();
    for connection in &mut listening {
        connection.subscribe(CHANNEL).unwrap();
    }
    let [silent, lately] = [1, 2].map(|owner| format!("{owner:032x} {CHANNEL}"));
    // A busy machine may look only when the lock is no longer kept.
    until(LONG, "seen as kept", async || {
        let held = lock(&client, "a", LONG).acquire().await.unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let now = now.as_millis().to_string();
        for (list, first, second) in [("writers", "1", "2"), ("asked", "1", &*now)] {
            let list = format!("lockkit:lockkit#{list}:{{lockkit:a}}");
            for master in &world.masters {
                master
                    .cli(&["ZADD", &list, first, &silent, second, &lately])
                    .unwrap();
            }
        }
        held.release().await.unwrap();
        let values = world
            .masters
            .iter()
            .map(|master| master.cli(&["GET", "lockkit:a"]));
        let mut kept: Vec<_> = values.map(Result::unwrap).collect();
        kept.retain(|value| value.starts_with("lockkit#next "));
        for value in &kept {
            assert_eq!(*value, format!("lockkit#next {}", &lately[..32]));
        }
        !kept.is_empty()
    })
    .await;
    world.nothing_is_left("after writers that do not exist").await;
}

#[tokio::test]
async fn counters_go_after_weeks_without_use() {
    const COUNTER: &str = "lockkit:lockkit#fence:{lockkit:a}";
    const WEEKS: u64 = 4 * 7 * 24 * 3_600_000;

    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    let left = || {
        let left = world
            .masters
            .iter()
            .map(|master| master.cli(&["PTTL", COUNTER]).unwrap());
        left.map(|left| left.parse::<i64>().unwrap()).collect::<Vec<_>>()
    };
    let is_new = |left: &[i64]| {
        let new = |left: &&i64| {
            (WEEKS - 60_000..=WEEKS + 1_000).contains(&u64::try_from(**left).unwrap_or_default())
        };
        left.iter().filter(new).count() >= 3
    };
    let every = |command: &[&str]| {
        for master in &world.masters {
            master.cli(command).unwrap();
        }
    };
    let mut last = 0;
    for ours in [lock(&client, "a", LONG), lock(&client, "a", LONG).shared()] {
        let held = ours.acquire().await.unwrap();
        assert!(is_new(&left()), "ms until the counters go: {:?}", left());
        every(&["PEXPIRE", COUNTER, "600000"]);
        held.renew().await.unwrap();
        assert!(is_new(&left()), "held on: {:?}", left());
        held.release().await.unwrap();
        every(&["PEXPIRE", COUNTER, "600000"]);
        ours.acquire().await.unwrap().release().await.unwrap();
        assert!(is_new(&left()), "used again: {:?}", left());
        // The state after weeks.
        every(&["DEL", COUNTER]);
        let held = ours.acquire().await.unwrap();
        assert!(held.token().get() > last, "tokens went back");
        last = held.token().get();
        held.release().await.unwrap();
    }
    // A counter ahead of the clocks stays until they have reached it.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let year = Duration::from_secs(365 * 24 * 3600);
    every(&["SET", COUNTER, &(now + year).as_micros().to_string()]);
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    let raised = left()
        .into_iter()
        .filter(|left| *left > 365 * 24 * 3_600_000)
        .count();
    assert!(raised >= 3, "{:?}", left());
    held.release().await.unwrap();
}

/// The servers' clocks expire the counters, which had outrun the clients' clocks.
#[tokio::test]
async fn clocks_that_are_weeks_ahead_take_counters_along() {
    if no_server() {
        return;
    }
    let clock = Clock::new().unwrap();
    let world = World::built(3, |builder| builder.clock(&clock));
    let client = world.client().await;
    let block = AcquireOptions::new().ttl(LONG).local_handoffs(65_535);
    let ours = client.lock("a").unwrap().with_options(block);
    let mut last = 0;
    // Each grant reserves the tokens of 65 ms.
    for _ in 0..400 {
        let held = ours.acquire().await.unwrap();
        last = held.token().get();
        held.release().await.unwrap();
    }
    for (weeks, goes_on) in [(3, true), (5, false)] {
        clock
            .forward(Duration::from_secs(weeks * 7 * 24 * 3_600))
            .unwrap();
        // It has seen none of these tokens.
        let late = world.client().await;
        let held = lock(&late, "a", LONG).acquire().await.unwrap();
        assert_eq!(held.token().get() > last, goes_on, "after {weeks} more weeks");
        held.release().await.unwrap();
    }
}

#[tokio::test]
async fn clocks_that_are_set_back_keep_the_lock_of_a_dead_holder() {
    if no_server() {
        return;
    }
    let clock = Clock::new().unwrap();
    let world = World::built(3, |builder| builder.clock(&clock));
    let (dead, proxies) = world.client_behind_proxies().await;
    let living = world.client().await;
    let held = lock(&dead, "a", SECOND).acquire().await.unwrap();
    for proxy in proxies.iter() {
        proxy.set(Mode::Blackhole);
    }
    clock.back(Duration::from_secs(60)).unwrap();
    within(LONG, "told by its own clock", held.lost()).await;
    tokio::time::sleep(SECOND).await;
    let tried = lock(&living, "a", LONG).try_acquire().await.unwrap();
    assert!(tried.is_none(), "its lease is over");
    clock.reset().unwrap();
    let next = within(LONG, "granted", lock(&living, "a", LONG).acquire())
        .await
        .unwrap();
    assert!(next.token() > held.token());
    next.release().await.unwrap();
}

/// Counts commands at a master, those in scripts included. Takes the median of the five masters: slower ones have not got all
/// requests yet, others have got repeated ones.
#[tokio::test]
async fn a_try_in_vain_and_a_hand_off_cost_few_commands() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (one, other) = (world.client().await, world.client().await);
    let (one, other) = (lock(&one, "a", LONG), lock(&other, "a", LONG));
    let counts = || -> Vec<_> {
        let masters = world.masters.iter();
        masters.map(|master| master.command_count().unwrap()).collect()
    };
    let third_since = |before: &[u64]| {
        let now = counts();
        let mut each: Vec<_> = now.iter().zip(before).map(|(now, before)| now - before).collect();
        each.sort_unstable();
        each[2]
    };
    let (mut of_try, mut of_hand_off) = (u64::MAX, u64::MAX);
    // A waiter may happen to ask again by itself.
    for _ in 0..3 {
        let held = one.acquire().await.unwrap();
        until(LONG, "held by all", async || world.holding("a") == 5).await;
        let before = counts();
        assert!(other.try_acquire().await.unwrap().is_none());
        of_try = of_try.min(third_since(&before));
        let waiting = waiter(&other);
        world.waiters("a", 1).await;
        let before = counts();
        held.release().await.unwrap();
        let next = granted(LONG, "the waiter", waiting).await;
        of_hand_off = of_hand_off.min(third_since(&before));
        next.release().await.unwrap();
    }
    assert!(of_try <= 3, "{of_try}");
    assert!(of_hand_off <= 15, "{of_hand_off}");
}

/// Others have asked at the same time, and each has got some masters for a moment.
#[tokio::test]
async fn a_try_at_divided_masters_is_not_told_that_it_is_taken() {
    if no_server() {
        return;
    }
    let world = World::five();
    let client = world.client().await;
    for (owner, masters) in [(1, 0..2), (2, 2..4)] {
        let value = format!("lockkit:{owner:032x} 1 5 lockkit:lockkit#client:other ");
        for master in &world.masters[masters] {
            master.cli(&["SET", "lockkit:a", &value, "PX", "700"]).unwrap();
        }
    }
    let tried = lock(&client, "a", LONG).try_acquire().await.unwrap();
    let held = tried.expect("nobody has a majority");
    held.release().await.unwrap();
    world.nothing_is_left("after a divided vote").await;
}

/// The hold is broken before the worker has adopted it.
#[tokio::test]
async fn a_hold_of_a_try_that_is_broken_at_once_is_told_at_once() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let (holder, operator) = (world.client().await, world.client().await);
    let held = lock(&holder, "a", LONG).try_acquire().await.unwrap().unwrap();
    assert!(operator.revoke_by_force("a", held.token()).await.unwrap());
    assert_eq!(within(AT_ONCE, "told", held.lost()).await, LossReason::Revoked);
}

/// The operator is nearer to some masters than to others, and the holder renews its hold in between.
#[tokio::test]
async fn a_hold_that_is_broken_at_one_master_after_another_ends() {
    if no_server() {
        return;
    }
    let world = World::five();
    let holder = world.client().await;
    let (operator, proxies) = world.client_behind_proxies().await;
    let ours = lock(&holder, "a", 60 * SECOND);
    for ours in [ours.clone(), ours.shared()] {
        let held = ours.try_acquire().await.unwrap().unwrap();
        until(LONG, "held by all", async || world.holding("a") == 5).await;
        for (master, proxy) in (0..).zip(proxies.iter()) {
            proxy.set(Mode::Delay {
                requests: 100 * MS * master,
                replies: Duration::ZERO,
            });
        }
        assert!(operator.revoke_by_force("a", held.token()).await.unwrap());
        assert_eq!(within(SECOND, "told", held.lost()).await, LossReason::Revoked);
        let other = lock(&operator, "a", LONG).try_acquire().await.unwrap();
        other.expect("it is free").release().await.unwrap();
        for proxy in proxies.iter() {
            proxy.set(Mode::Pass);
        }
    }
}

/// The operator is told that it cannot tell. Once the lease that it ended would have been over, the hold is repaired.
#[tokio::test]
async fn a_break_that_reaches_a_minority_is_an_error_and_passes() {
    if no_server() {
        return;
    }
    let world = World::five();
    let holder = world.client().await;
    let (mut config, proxies) = world.behind_proxies();
    config.master_timeout = 200 * MS;
    let operator = world::connect(config).await.unwrap();
    let held = lock(&holder, "a", 5 * SECOND)
        .try_acquire()
        .await
        .unwrap()
        .unwrap();
    until(LONG, "held by all", async || world.holding("a") == 5).await;
    for proxy in &proxies[2..] {
        proxy.set(Mode::Blackhole);
    }
    let error = operator.revoke_by_force("a", held.token()).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert_eq!(world.holding("a"), 3, "ended at two, and not repaired yet");
    until(LONG, "repaired", async || world.holding("a") == 5).await;
    held.check().unwrap();
    held.release().await.unwrap();
}

/// The operator is nearer to one master than to the others, and the holder lets go at once.
#[tokio::test]
async fn a_hold_that_was_let_go_at_once_was_one() {
    if no_server() {
        return;
    }
    let world = World::five();
    let holder = world.client().await;
    let (operator, proxies) = world.client_behind_proxies().await;
    let held = lock(&holder, "a", LONG).acquire().await.unwrap();
    until(LONG, "at all masters", async || world.holding("a") == 5).await;
    for proxy in &proxies[1..] {
        proxy.set(Mode::Delay {
            requests: 300 * MS,
            replies: Duration::ZERO,
        });
    }
    let token = held.token();
    let letting_go = tokio::spawn(async move {
        let why = held.lost().await;
        drop(held);
        why
    });
    let outcome = operator.revoke("a", token, 10 * SECOND).await.unwrap();
    assert_eq!(letting_go.await.unwrap(), LossReason::Asked);
    assert_eq!(outcome, Revocation::Confirmed);
}

#[tokio::test]
async fn what_a_minority_has_left_of_a_hold_is_none() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (holder, operator) = (world.client().await, world.client().await);
    let options = AcquireOptions::new().ttl(LONG).renew(false);
    let lock = holder.lock("a").unwrap().with_options(options);
    let held = lock.acquire().await.unwrap();
    until(LONG, "at all masters", async || world.holding("a") == 5).await;
    for master in &world.masters[2..] {
        master.cli(&["DEL", "lockkit:a"]).unwrap();
    }
    let outcome = operator.revoke("a", held.token(), LONG).await.unwrap();
    assert_eq!(outcome, Revocation::NotHeld);
    drop(held);
}

/// The operator's requests reach two masters before the adoption and two after it. They do not reach the last one.
#[tokio::test]
async fn a_hold_that_is_ended_while_it_is_adopted_ends() {
    if no_server() {
        return;
    }
    let world = World::five();
    let (here, there) = (world.client().await, world.client().await);
    let (operator, proxies) = world.client_behind_proxies().await;
    let held = lock(&here, "a", LONG).try_acquire().await.unwrap().unwrap();
    until(LONG, "held by all", async || world.holding("a") == 5).await;
    let token = held.token();
    let mut detached = held.detach().await.unwrap();
    for proxy in &proxies[2..4] {
        proxy.set(Mode::Delay {
            requests: SECOND,
            replies: Duration::ZERO,
        });
    }
    proxies[4].set(Mode::Blackhole);
    let ended = tokio::spawn(async move { operator.revoke_by_force("a", token).await });
    until(LONG, "ended at two", async || world.holding("a") == 3).await;
    // On a machine that stands still, it comes too late for that.
    let adopted = there.adopt(&mut detached).await;
    assert!(ended.await.unwrap().unwrap());
    match adopted {
        Ok(adopted) => assert_eq!(within(SECOND, "told", adopted.lost()).await, LossReason::Revoked),
        Err(err) => assert!(err.is_lost(), "{err}"),
    }
    let other = lock(&here, "a", LONG);
    within(AT_ONCE, "free", other.acquire())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// The masters do not know which token of its block a hold uses.
#[tokio::test]
async fn any_token_of_a_block_breaks_the_hold_that_there_is() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let (holder, operator) = (world.client().await, world.client().await);
    let mine = holder.lock("a").unwrap();
    let before = mine.acquire().await.unwrap();
    let mut waiting = pin!(mine.acquire());
    assert!(waiting.as_mut().now_or_never().is_none());
    let superseded = before.token();
    before.release().await.unwrap();
    let heir = waiting.await.unwrap();
    assert!(heir.token() > superseded, "passed on");
    let shown = operator.inspect("a").await.unwrap();
    assert_eq!(shown.holders[0].token, superseded, "the first of the block");
    assert!(operator.revoke_by_force("a", superseded).await.unwrap());
    assert_eq!(within(AT_ONCE, "told", heir.lost()).await, LossReason::Revoked);
}

/// Keys at two of five expire early, and the next renewal sets them again.
#[tokio::test]
async fn clocks_set_forward_at_a_minority_cost_nothing() {
    if no_server() {
        return;
    }
    let clock = Clock::new().unwrap();
    let masters = Cell::new(0);
    let world = World::built(5, |builder| {
        let wrong = masters.replace(masters.get() + 1) < 2;
        if wrong { builder.clock(&clock) } else { builder }
    });
    let (holder, other) = (world.client().await, world.client().await);
    let mut last = 0;
    for ours in [lock(&holder, "a", LONG), lock(&holder, "a", LONG).shared()] {
        let held = ours.acquire().await.unwrap();
        assert!(held.token().get() > last, "tokens went back");
        last = held.token().get();
        until(LONG, "held by all", async || world.holding("a") == 5).await;
        clock.forward(60 * SECOND).unwrap();
        until(LONG, "at two it is over", async || world.holding("a") == 3).await;
        let theirs = lock(&other, "a", LONG).try_acquire().await.unwrap();
        assert!(theirs.is_none(), "PROMISE BROKEN: an overlap");
        until(LONG, "repaired", async || {
            held.renew().await.unwrap();
            world.holding("a") == 5
        })
        .await;
        held.release().await.unwrap();
        world.nothing_is_left("after clocks went forward").await;
    }
}

/// Near readers raise the counters several times while a far one's request is under way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_far_reader_is_let_in_with_near_ones() {
    const WAY: Duration = Duration::from_millis(10);

    if no_server() {
        return;
    }
    let world = World::five();
    let (far, proxies) = world.client_behind_proxies().await;
    let near = [world.client().await, world.client().await];
    let stay = lock(&near[0], "a", LONG).shared().acquire().await.unwrap();
    for proxy in proxies.iter() {
        proxy.set(Mode::Delay {
            requests: WAY,
            replies: WAY,
        });
    }
    let rounds = Arc::new(AtomicUsize::new(0));
    let come_and_go = |client: &LockClient| {
        let (ours, rounds) = (lock(client, "a", LONG).shared(), rounds.clone());
        tokio::spawn(async move {
            loop {
                ours.acquire().await.unwrap().release().await.unwrap();
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    let crowd: Vec<_> = near
        .iter()
        .flat_map(|client| [come_and_go(client), come_and_go(client)])
        .collect();
    let theirs = lock(&far, "a", LONG).shared();
    for _ in 0..10 {
        let before = rounds.load(Ordering::Relaxed);
        let tried = within(LONG, "an answer", theirs.try_acquire()).await.unwrap();
        let held = tried.expect("only readers are in");
        // Others came while its request was under way, and come while it is released.
        until(LONG, "others come", async || {
            rounds.load(Ordering::Relaxed) > before
        })
        .await;
        held.release().await.unwrap();
    }
    for task in crowd {
        assert!(!task.is_finished(), "a vacuous pass: {:?}", task.await);
        task.abort();
    }
    stay.release().await.unwrap();
    world.nothing_is_left("after a far reader").await;
}

/// An outrun acquisition proposes tokens ahead of the clock. Others that are outrun see these, but stay ahead of the clock
/// alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_stay_with_the_clocks_while_readers_come_and_go() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let began = Instant::now();
    let held_so_far = Arc::new(AtomicU32::new(0));
    let mut crowd = JoinSet::new();
    for _ in 0..8 {
        let client = world.client().await;
        for _ in 0..2 {
            let ours = lock(&client, "a", LONG).shared();
            let held_so_far = held_so_far.clone();
            crowd.spawn(async move {
                let mut longest = Duration::ZERO;
                let goes_on = || {
                    let few = held_so_far.load(Ordering::Relaxed) <= 100;
                    began.elapsed() < if few { 2 * LONG } else { 3 * SECOND }
                };
                while goes_on() {
                    let asked = Instant::now();
                    let held = ours.acquire().await.unwrap();
                    longest = longest.max(asked.elapsed());
                    held.release().await.unwrap();
                    held_so_far.fetch_add(1, Ordering::Relaxed);
                }
                longest
            });
        }
    }
    let outcomes = crowd.join_all().await;
    let longest = outcomes.into_iter().max().unwrap();
    let times = held_so_far.load(Ordering::Relaxed);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    for master in &world.masters {
        let counter = master.cli(&["GET", "lockkit:lockkit#fence:{lockkit:a}"]).unwrap();
        let ahead = Duration::from_micros(counter.parse().unwrap()).saturating_sub(now);
        assert!(
            ahead <= longest + 100 * MS,
            "{ahead:?} ahead after {times} holds, none of which took longer than {longest:?}"
        );
    }
    assert!(times > 100, "a vacuous pass: {times}");
}

/// An operator's mistake at a majority of the masters.
#[tokio::test]
async fn a_counter_that_is_about_to_end_takes_no_other_lock_along() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let client = world.client().await;
    let last = (1_u64 << 52) - 1_000_000;
    for master in &world.masters[1..] {
        set_counter(master, last);
    }
    let held = lock(&client, "a", LONG).acquire().await.unwrap();
    assert!(held.token().get() > last, "{} is below {last}", held.token());
    held.release().await.unwrap();
    let other = lock(&client, "b", LONG).acquire().await.unwrap();
    assert!(
        other.token().get() < last / 2,
        "{} goes on above {last}",
        other.token()
    );
    other.release().await.unwrap();
    for master in &world.masters[1..] {
        set_counter(master, u64::MAX);
    }
    let refused = lock(&client, "a", LONG).acquire().await.unwrap_err();
    assert!(
        !refused.is_transient() && shown(&refused).contains("are about to pass 4503599627370496"),
        "{}",
        shown(&refused)
    );
    world.nothing_is_left("after there was no token").await;
}

/// An operator's mistake at a minority of the masters.
#[tokio::test]
async fn a_counter_set_to_its_end_at_a_minority_costs_nothing() {
    const BEYOND: u64 = (1 << 52) - (1 << 48);

    if no_server() {
        return;
    }
    for (masters, wrong) in [(3, 1), (5, 2)] {
        let world = World::of(masters);
        let clients = [world.client().await, world.client().await];
        let mut last = lock(&clients[0], "a", LONG)
            .acquire()
            .await
            .unwrap()
            .token()
            .get();
        for end in [BEYOND, 1 << 52, (1 << 63) - 1, u64::MAX] {
            for round in 0..10 {
                // Sets it between two grants, again and again.
                for master in &world.masters[..wrong] {
                    set_counter(master, end);
                }
                for mode in ["alone", "to share", "to share as well"] {
                    let ours = lock(&clients[round % 2], "a", LONG);
                    let ours = if mode == "alone" { ours } else { ours.shared() };
                    let held = within(LONG, "a grant", ours.acquire()).await;
                    let held =
                        held.unwrap_or_else(|err| panic!("{mode} of {masters}, at {end}: {}", shown(&err)));
                    let token = held.token().get();
                    assert!(last < token && token < BEYOND, "{token} after {last}, at {end}");
                    last = token;
                    let theirs = lock(&clients[1 - round % 2], "a", LONG);
                    assert!(
                        theirs.try_acquire().await.unwrap().is_none(),
                        "PROMISE BROKEN: an overlap"
                    );
                    held.renew().await.unwrap();
                    held.release().await.unwrap();
                }
            }
        }
        world.nothing_is_left("after counters were set").await;
        // If one more is lost, no majority has a counter that counts.
        for master in &world.masters[..wrong] {
            set_counter(master, BEYOND);
        }
        world.masters[masters - 1].kill().unwrap();
        let unknown = lock(&clients[0], "a", LONG).try_acquire().await.unwrap_err();
        let text = shown(&unknown);
        let named = format!("{} of {masters} masters did not take part", wrong + 1);
        assert!(unknown.is_transient() && !unknown.is_timeout(), "{text}");
        assert!(
            text.contains(&named) && text.contains("stands at 4222124650659840"),
            "{text}"
        );
    }
}

/// ✘ availability: near readers, whose clocks are two hours ahead, raise the counters further than the tokens of a far one.
/// The masters still reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_outrun_to_the_end_is_told_that_it_is_taken() {
    const WAY: Duration = Duration::from_millis(50);
    const AHEAD: Duration = Duration::from_secs(7200);

    if no_server() {
        return;
    }
    let world = World::of(3);
    let (far, proxies) = world.client_behind_proxies().await;
    lock(&far, "a", LONG)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    for proxy in proxies.iter() {
        proxy.set(Mode::Delay {
            requests: WAY,
            replies: WAY,
        });
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let raising: Vec<_> = world
        .masters
        .iter()
        .map(|master| {
            let client = redis::Client::open(master.url()).unwrap();
            let mut connection = client.get_connection().unwrap();
            let is_over = is_over.clone();
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                    let mut raise = redis::cmd("SET");
                    let to = u64::try_from((now + AHEAD).as_micros()).unwrap();
                    raise.arg("lockkit:lockkit#fence:{lockkit:a}").arg(to);
                    raise.exec(&mut connection).unwrap();
                    std::thread::sleep(MS);
                }
            })
        })
        .collect();
    let ours = lock(&far, "a", LONG).shared();
    // A machine that stalls may let it in, or delay a reply.
    let mut last = String::new();
    let outcome = timeout(LONG, async {
        loop {
            match ours.acquire_timeout(SECOND).await {
                Ok(held) => held.release().await.unwrap(),
                Err(error) if error.is_timeout() => return,
                Err(error) => last = shown(&error),
            }
        }
    });
    assert!(outcome.await.is_ok(), "who waits: {last}");
    let outcome = timeout(LONG, async {
        loop {
            match ours.try_acquire().await {
                Ok(Some(held)) => held.release().await.unwrap(),
                Ok(None) => return,
                Err(error) => last = shown(&error),
            }
        }
    });
    assert!(outcome.await.is_ok(), "who tries: {last}");
    is_over.store(true, Ordering::Relaxed);
    for thread in raising {
        thread.join().unwrap();
    }
    within(LONG, "it is let in", ours.acquire())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    world.nothing_is_left("after it was outrun").await;
}

/// Sets the counter of tokens of lock `a` at a master.
fn set_counter(master: &RedisServer, to: u64) {
    master
        .cli(&["SET", "lockkit:lockkit#fence:{lockkit:a}", &to.to_string()])
        .unwrap();
}

/// The leader before had a clock that is ahead by a minute. So the tokens that the next one proposes are outrun, and a majority has its
/// vote for two trips before it has the tokens that count.
#[tokio::test]
async fn observers_may_see_a_token_that_was_never_granted() {
    const KEY: &str = "%lockkit#election:e";
    /// Long enough to be looked at on the way, and a trip takes half of the time in which a connection has to be made.
    const WAY: Duration = Duration::from_millis(500);

    if no_server() {
        return;
    }
    let world = World::five();
    let (ours, proxies) = world.client_behind_proxies().await;
    let (theirs, third) = (world.client().await, world.client().await);
    let ahead = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + 60 * SECOND;
    for master in &world.masters {
        let fence = format!("lockkit:lockkit#fence:{{lockkit:{KEY}}}");
        master
            .cli(&["SET", &fence, &ahead.as_micros().to_string()])
            .unwrap();
    }
    let candidate = |client: &LockClient, id| {
        client
            .election("e")
            .unwrap()
            .with_ttl(LONG)
            .candidate(id)
            .unwrap()
    };
    let before = within(LONG, "leads", candidate(&third, "a").campaign()).await;
    let before = before.unwrap();
    let mut old = theirs.election("e").unwrap().observe();
    let first = within(LONG, "seen", old.next()).await;
    assert_eq!(first.unwrap().unwrap().token, before.token());
    before.resign().await.unwrap();
    until(LONG, "free", async || world.holding(KEY) == 0).await;
    for proxy in proxies.iter() {
        proxy.set(Mode::Delay {
            requests: WAY,
            replies: WAY,
        });
    }
    let next = candidate(&ours, "b");
    let campaign = tokio::spawn(async move { next.campaign().await });
    until(LONG, "voted for", async || world.holding(KEY) == 5).await;
    let mut new = theirs.election("e").unwrap().observe();
    let told = async {
        let (mut errors, mut seen) = (0, Ok(None));
        while !matches!(seen, Ok(Some(_))) {
            seen = old.next().await;
            errors += usize::from(seen.is_err());
        }
        (errors, seen.unwrap().unwrap())
    };
    let both = async { tokio::join!(new.next(), told) };
    let (early, (errors, late)) = within(LONG, "told of the next", both).await;
    let led = within(LONG, "the next leads", campaign).await;
    let (early, led) = (early.unwrap().unwrap(), led.unwrap().unwrap());
    assert!(errors > 0, "no exception for who knows the leader before");
    assert_eq!(late.token, led.token());
    assert_eq!(early.id, "b");
    assert!(early.token < led.token(), "{:?} is no exception", early.token);
    let again = within(LONG, "seen with its token", new.next()).await;
    assert_eq!(again.unwrap().unwrap().token, led.token());
}
