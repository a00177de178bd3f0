//! A soak under a schedule of faults: clients behind proxies of their own contend while the server crashes and comes
//! back, stops and goes on, and their connections are reset or lose replies. The history has every property.
//!
//! `LOCKKIT_SEED` replays a schedule. `LOCKKIT_SOAK_CYCLES` says how many acquisitions to go on for, instead of the
//! time that suits a test run.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_conformance::history::{Acquisition, History, Limits, Sight, Write, at, now};
use lockkit_core::{AcquireOptions, FenceGate, Kind, Lock, LockClient, LockGuard, spi::Mode};
use lockkit_testbed::{
    Mode as Fault, Proxy,
    redis::{Fsync, RedisServer},
};
use tokio::task::JoinSet;

use crate::common::{LONG, MS, SECOND, client_behind_proxy, no_server, nothing_is_left};

const CLIENTS: usize = 4;
const WORKERS: u64 = 3;
const TTL: Duration = SECOND;
/// Between the end of a fault and the next, give or take.
const CALM: Duration = Duration::from_millis(1_600);
const IN_CI: Duration = Duration::from_secs(40);

/// What the workers share.
#[derive(Default)]
struct World {
    over: AtomicBool,
    granted: AtomicUsize,
    lost: AtomicUsize,
    /// A resource for each lock that refuses tokens below the highest it has seen, and what it was asked.
    resources: [Mutex<(FenceGate, Vec<Write>)>; 2],
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_soak_under_faults_has_no_overlap_and_no_token_goes_back() {
    if no_server() {
        return;
    }
    let seed = std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    let cycles: Option<usize> = std::env::var("LOCKKIT_SOAK_CYCLES")
        .ok()
        .map(|cycles| cycles.parse().unwrap());
    eprintln!("replay with LOCKKIT_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);

    let server = RedisServer::builder()
        .append_only(Fsync::Always)
        // So that it comes back as fast in the end as in the beginning.
        .directive("auto-aof-rewrite-min-size", &["1mb"])
        .start()
        .unwrap();
    let world = Arc::new(World::default());
    let (mut clients, mut proxies) = (Vec::new(), Vec::new());
    let mut workers = JoinSet::new();
    for index in 0..CLIENTS {
        let (client, proxy) = client_behind_proxy(&server).await;
        for worker in 0..WORKERS {
            let who = index as u64 * WORKERS + worker;
            let rng = fastrand::Rng::with_seed(rng.u64(..));
            workers.spawn(contend(client.clone(), world.clone(), who, rng));
        }
        clients.push(client);
        proxies.push(proxy);
    }

    let started = Instant::now();
    let mut faults = Vec::new();
    while match cycles {
        Some(cycles) => world.granted.load(Ordering::Relaxed) < cycles,
        None => started.elapsed() < IN_CI,
    } {
        tokio::time::sleep(CALM.mul_f64(0.5 + rng.f64())).await;
        faults.push((now(), fault(&server, &proxies, &mut rng).await));
    }
    let took = started.elapsed();
    world.over.store(true, Ordering::Relaxed);

    let mut history = History::default();
    while let Some(records) = tokio::time::timeout(LONG, workers.join_next())
        .await
        .expect("after the last fault every waiter is granted")
    {
        history.acquisitions.extend(records.unwrap());
    }
    for resource in &world.resources {
        history.writes.append(&mut resource.lock().unwrap().1);
    }
    nothing_is_left(&server, "after the soak").await;
    for name in NAMES {
        let at = now();
        let state = clients[0].inspect(name).await.unwrap();
        history.sights.push(Sight {
            lock: name.to_owned(),
            kind: Kind::Lock,
            at,
            holders: state.holders.iter().map(|holder| holder.token.get()).collect(),
            waiters: state.waiters,
        });
    }

    let mut limits = Limits::default();
    // The longest fault, then finding out and connecting again, a lease, and what those behind the head allow for.
    limits.idle = 3 * SECOND + 8 * SECOND + TTL + 6 * SECOND;
    limits.detection = TTL + SECOND;
    limits.linger = Duration::ZERO;
    let summary = history
        .check(&limits)
        .unwrap_or_else(|violation| panic!("LOCKKIT_SEED={seed}: {violation}\nfaults: {faults:?}"));

    // It must have shown something.
    let hits = faults.iter().filter(|(moment, _)| {
        let spans = |a: &Acquisition| {
            let end = a.held().map(|(_, to)| to).or(a.gave_up);
            a.asked <= *moment && end.is_none_or(|end| end >= *moment)
        };
        history.acquisitions.iter().any(spans)
    });
    let (hits, faults) = (hits.count(), faults.len());
    let rate = summary.granted as u128 * 1_000 / took.as_millis();
    let refused = history.writes.iter().filter(|write| !write.admitted).count();
    eprintln!(
        "{} cycles in {took:?} ({rate}/s), {} contended, {} given up, {} lost, {faults} faults of which {hits} hit, \
         {refused} stale writes refused",
        summary.granted,
        summary.contended,
        summary.given_up,
        world.lost.load(Ordering::Relaxed),
    );
    assert!(rate >= 50, "a vacuous pass: {rate} acquisitions/s");
    assert!(
        hits * 10 >= faults * 9,
        "a vacuous pass: {hits} of {faults} faults hit"
    );
    assert!(
        faults >= 10 && summary.contended * 2 > summary.granted,
        "{summary:?}"
    );
    assert_eq!(summary.quiet_sights, NAMES.len());
}

const NAMES: [&str; 2] = ["a", "b"];

/// One fault, from its beginning to its end; what it was.
async fn fault(server: &RedisServer, proxies: &[Proxy], rng: &mut fastrand::Rng) -> &'static str {
    let proxy = &proxies[rng.usize(..proxies.len())];
    match rng.u8(..4) {
        0 => {
            server.kill().unwrap();
            tokio::time::sleep(MS * rng.u32(..300)).await;
            server.start().unwrap();
            "killed"
        }
        1 => {
            server.pause().unwrap();
            // Now and then for longer than a lease.
            let longest = if rng.u8(..4) == 0 { 2_500 } else { 500 };
            tokio::time::sleep(MS * rng.u32(..longest)).await;
            server.resume().unwrap();
            "stopped"
        }
        2 => {
            for _ in 0..rng.u32(1..10) {
                proxy.reset();
                tokio::time::sleep(MS * rng.u32(..50)).await;
            }
            "reset"
        }
        _ => {
            proxy.set(Fault::DropReplies);
            tokio::time::sleep(MS * rng.u32(..600)).await;
            proxy.set(Fault::Pass);
            "replies lost"
        }
    }
}

/// Acquires in one of the ways there are, works, and ends the hold in one of the ways there are, until it is over.
async fn contend(
    client: LockClient,
    world: Arc<World>,
    who: u64,
    mut rng: fastrand::Rng,
) -> Vec<Acquisition> {
    let locks = NAMES.map(|name| {
        let options = AcquireOptions::new().ttl(TTL).local_handoffs(2);
        client.lock(name).unwrap().with_options(options)
    });
    let mut records = Vec::new();
    while !world.over.load(Ordering::Relaxed) {
        let index = rng.usize(..NAMES.len());
        records.push(one_round(&locks[index], &world, index, who, &mut rng).await);
    }
    records
}

async fn one_round(
    lock: &Lock,
    world: &World,
    index: usize,
    who: u64,
    rng: &mut fastrand::Rng,
) -> Acquisition {
    let mut record = Acquisition::asked(NAMES[index], Mode::Exclusive, who, now());
    let patience = MS * rng.u32(1..100);
    let granted = match rng.u8(..10) {
        0 => tokio::time::timeout(patience, lock.acquire()).await.ok(),
        1 => Some(lock.acquire_timeout(patience).await),
        2 => tokio::time::timeout(SECOND, lock.try_acquire())
            .await
            .ok()
            .and_then(Result::transpose),
        _ => Some(lock.acquire().await),
    };
    let guard = match granted {
        Some(Ok(guard)) => guard,
        Some(Err(error)) if !error.is_timeout() && !error.is_transient() => {
            panic!("neither taken nor an outage: {error}")
        }
        _ => {
            record.gave_up = Some(now());
            // One that has been told "no connection" must not spin.
            tokio::time::sleep(5 * MS).await;
            return record;
        }
    };
    record.granted = Some((now(), guard.token().get()));
    world.granted.fetch_add(1, Ordering::Relaxed);
    work(guard, world, index, &mut record, rng).await;
    record
}

async fn work(
    guard: LockGuard,
    world: &World,
    index: usize,
    record: &mut Acquisition,
    rng: &mut fastrand::Rng,
) {
    // Now and then for so long that it is renewed, or that a fault finds it held.
    let work = match rng.u16(..500) {
        0 => MS * rng.u32(..3_000),
        1..10 => MS * rng.u32(..300),
        _ => Duration::from_micros(rng.u64(..3_000)),
    };
    let lost = tokio::time::timeout(work, guard.lost()).await.is_ok();
    {
        let mut resource = world.resources[index].lock().unwrap();
        let admitted = resource.0.admit(guard.token()).is_ok();
        resource.1.push(Write {
            lock: NAMES[index].to_owned(),
            who: record.who,
            token: guard.token().get(),
            at: now(),
            admitted,
        });
    }
    // Its end by the clock counts, however late this task gets to run.
    record.until = guard.valid_until().map(at);
    if lost {
        record.lost = Some(now());
        world.lost.fetch_add(1, Ordering::Relaxed);
        return;
    }
    record.released = Some(now());
    if rng.bool() {
        if let Err(error) = guard.release().await {
            assert!(error.is_lost() || error.is_transient(), "{error}");
        }
    } else {
        drop(guard);
    }
}
