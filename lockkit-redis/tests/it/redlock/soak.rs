//! A soak: contenders on five masters, each client behind proxies of its own, with a fault every other second. The
//! history has every property.
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

use lockkit_conformance::history::{Acquisition, History, Limits, Write, at, now};
use lockkit_core::{AcquireOptions, FenceGate, LockClient, LockGuard, spi::Mode};
use lockkit_testbed::{Mode as Fault, Proxy, redis::Fsync};
use tokio::task::JoinSet;

use super::world::{World, config, connect, url};
use crate::common::{LONG, MS, SECOND, no_server};

const CLIENTS: u64 = 3;
const WORKERS: u64 = 2;
const TTL: Duration = SECOND;
const IN_CI: Duration = Duration::from_secs(40);
const NAME: &str = "a";

#[derive(Default)]
struct Shared {
    over: AtomicBool,
    granted: AtomicUsize,
    lost: AtomicUsize,
    resource: Mutex<(FenceGate, Vec<Write>)>,
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

    let world = World::built(5, |builder| {
        builder
            .append_only(Fsync::Always)
            // So that they come back as fast in the end as in the beginning.
            .directive("auto-aof-rewrite-min-size", &["1mb"])
    });
    let shared = Arc::new(Shared::default());
    let (mut all, mut workers) = (Vec::new(), JoinSet::new());
    for index in 0..CLIENTS {
        let proxies: Vec<_> = world
            .masters
            .iter()
            .map(|master| Proxy::start(master.addr()).unwrap())
            .collect();
        let urls: Vec<_> = proxies
            .iter()
            .map(|proxy| format!("redis://{}", proxy.addr()))
            .collect();
        let mut config = config(&url(urls.iter().map(String::as_str)));
        // They keep what they granted, and are back before anything of it could be over.
        config.durable = true;
        let client = connect(config).await.unwrap();
        for worker in 0..WORKERS {
            let rng = fastrand::Rng::with_seed(rng.u64(..));
            workers.spawn(contend(
                client.clone(),
                shared.clone(),
                index * WORKERS + worker,
                rng,
            ));
        }
        all.push(proxies);
    }

    let started = Instant::now();
    let mut faults = Vec::new();
    while match cycles {
        Some(cycles) => shared.granted.load(Ordering::Relaxed) < cycles,
        None => started.elapsed() < IN_CI,
    } {
        tokio::time::sleep(SECOND.mul_f64(0.5 + rng.f64())).await;
        faults.push((now(), fault(&world, &all, &mut rng).await));
    }
    let took = started.elapsed();
    shared.over.store(true, Ordering::Relaxed);

    let mut history = History::default();
    while let Some(records) = tokio::time::timeout(LONG, workers.join_next())
        .await
        .expect("after the last fault every waiter is granted")
    {
        history.acquisitions.extend(records.unwrap());
    }
    history.writes.append(&mut shared.resource.lock().unwrap().1);
    world.nothing_is_left("after the soak").await;

    let mut limits = Limits::default();
    // The longest fault, finding out and connecting again, and what it left at a minority.
    limits.idle = 3 * SECOND + 8 * SECOND + 2 * TTL;
    limits.detection = TTL + SECOND;
    let summary = history
        .check(&limits)
        .unwrap_or_else(|violation| panic!("LOCKKIT_SEED={seed}: {violation}\nfaults: {faults:?}"));

    // It must have shown something.
    let spans = |moment, a: &Acquisition| {
        let end = a.held().map(|(_, to)| to).or(a.gave_up);
        a.asked <= moment && end.is_none_or(|end| end >= moment)
    };
    let hits = faults
        .iter()
        .filter(|(moment, _)| history.acquisitions.iter().any(|a| spans(*moment, a)))
        .count();
    let rate = summary.granted as u128 * 1_000 / took.as_millis();
    let refused = history.writes.iter().filter(|write| !write.admitted).count();
    eprintln!(
        "{} cycles in {took:?} ({rate}/s), {} contended, {} given up, {} lost, {} faults of which {hits} hit, {refused} \
         stale writes refused",
        summary.granted,
        summary.contended,
        summary.given_up,
        shared.lost.load(Ordering::Relaxed),
        faults.len(),
    );
    assert!(rate >= 20, "a vacuous pass: {rate} acquisitions/s");
    assert!(
        hits * 10 >= faults.len() * 9 && faults.len() >= 10,
        "a vacuous pass: {hits} of {} faults hit",
        faults.len()
    );
}

/// One fault, from its beginning to its end; what it was.
async fn fault(world: &World, proxies: &[Vec<Proxy>], rng: &mut fastrand::Rng) -> &'static str {
    // A minority, more often than not.
    let mut which: Vec<_> = (0..5).collect();
    rng.shuffle(&mut which);
    which.truncate(rng.usize(1..4));
    let client = &proxies[rng.usize(..proxies.len())];
    match rng.u8(..5) {
        0 => {
            for master in &which {
                world.masters[*master].kill().unwrap();
            }
            tokio::time::sleep(MS * rng.u32(..300)).await;
            for master in &which {
                world.masters[*master].start().unwrap();
            }
            "killed"
        }
        1 => {
            for master in &which {
                world.masters[*master].pause().unwrap();
            }
            // Now and then for longer than a lease.
            let longest = if rng.u8(..4) == 0 { 2_500 } else { 500 };
            tokio::time::sleep(MS * rng.u32(..longest)).await;
            for master in &which {
                world.masters[*master].resume().unwrap();
            }
            "stopped"
        }
        2 => {
            for _ in 0..rng.u32(1..10) {
                client[rng.usize(..5)].reset();
                tokio::time::sleep(MS * rng.u32(..50)).await;
            }
            "reset"
        }
        fault => {
            let (mode, name) = if fault == 3 {
                (Fault::DropReplies, "replies lost")
            } else {
                (Fault::Blackhole, "cut off")
            };
            for master in &which {
                client[*master].set(mode);
            }
            tokio::time::sleep(MS * rng.u32(..1_500)).await;
            for master in &which {
                client[*master].set(Fault::Pass);
            }
            name
        }
    }
}

/// Acquires in one of the ways there are, works, and ends the hold in one of the ways there are, until it is over.
async fn contend(
    client: LockClient,
    shared: Arc<Shared>,
    who: u64,
    mut rng: fastrand::Rng,
) -> Vec<Acquisition> {
    let options = AcquireOptions::new().ttl(TTL).local_handoffs(2);
    let lock = client.lock(NAME).unwrap().with_options(options);
    let mut records = Vec::new();
    while !shared.over.load(Ordering::Relaxed) {
        let mut record = Acquisition::asked(NAME, Mode::Exclusive, who, now());
        let patience = MS * rng.u32(1..100);
        let granted = match rng.u8(..10) {
            0 => tokio::time::timeout(patience, lock.acquire()).await.ok(),
            1 => Some(lock.acquire_timeout(patience).await),
            2 => lock.try_acquire().await.transpose(),
            _ => Some(lock.acquire().await),
        };
        match granted {
            Some(Ok(guard)) => {
                record.granted = Some((now(), guard.token().get()));
                shared.granted.fetch_add(1, Ordering::Relaxed);
                work(guard, &shared, &mut record, &mut rng).await;
            }
            Some(Err(error)) if !error.is_timeout() && !error.is_transient() => {
                panic!("neither taken nor an outage: {error}")
            }
            _ => {
                record.gave_up = Some(now());
                // One that has been told "no connection" must not spin.
                tokio::time::sleep(5 * MS).await;
            }
        }
        records.push(record);
    }
    records
}

async fn work(guard: LockGuard, shared: &Shared, record: &mut Acquisition, rng: &mut fastrand::Rng) {
    // Now and then for so long that it is renewed, or that a fault finds it held.
    let work = match rng.u16(..500) {
        0 => MS * rng.u32(0..3_000),
        1..10 => MS * rng.u32(0..300),
        _ => Duration::from_micros(rng.u64(..3_000)),
    };
    let lost = tokio::time::timeout(work, guard.lost()).await.is_ok();
    {
        let mut resource = shared.resource.lock().unwrap();
        let admitted = resource.0.admit(guard.token()).is_ok();
        resource.1.push(Write {
            lock: NAME.to_owned(),
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
        shared.lost.fetch_add(1, Ordering::Relaxed);
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
