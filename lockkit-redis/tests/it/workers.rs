//! Shared by the soaks: workers that contend for locks through a schedule of faults, and what has to be true
//! of all that they saw.
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

use lockkit_conformance::history::{Acquisition, History, Limits, Nanos, Summary, Write, at, now};
use lockkit_core::{AcquireOptions, FenceGate, Lock, LockClient, LockGuard, spi::Mode};
use tokio::task::JoinSet;

use crate::common::{LONG, MS, SECOND};

/// The ttl of the longest holds; others of the same client have a half or a third of it.
pub(crate) const TTL: Duration = SECOND;
const IN_CI: Duration = Duration::from_secs(40);
/// The factor by which a soak may last longer on a busy machine, until there were enough acquisitions.
const BUSY: u32 = 6;

/// Workers, and the faults that they have been through.
pub(crate) struct Workers {
    seed: u64,
    cycles: Option<usize>,
    rng: fastrand::Rng,
    shared: Arc<Shared>,
    tasks: JoinSet<Vec<Acquisition>>,
    faults: Vec<(Nanos, &'static str)>,
    took: Duration,
}

/// Shared by the workers.
struct Shared {
    over: AtomicBool,
    granted: AtomicUsize,
    lost: AtomicUsize,
    names: &'static [&'static str],
    /// A resource for each lock that refuses tokens below the highest it has seen, and what it was asked.
    resources: Vec<Mutex<(FenceGate, Vec<Write>)>>,
}

impl Workers {
    /// Workers for the locks of these names; nobody is at work yet.
    pub(crate) fn new(names: &'static [&'static str]) -> Self {
        let seed =
            std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
        let cycles = std::env::var("LOCKKIT_SOAK_CYCLES").ok();
        eprintln!("replay with LOCKKIT_SEED={seed}");
        Self {
            seed,
            cycles: cycles.map(|cycles| cycles.parse().unwrap()),
            rng: fastrand::Rng::with_seed(seed),
            shared: Arc::new(Shared {
                over: AtomicBool::new(false),
                granted: AtomicUsize::new(0),
                lost: AtomicUsize::new(0),
                names,
                resources: names.iter().map(|_| Mutex::default()).collect(),
            }),
            tasks: JoinSet::new(),
            faults: Vec::new(),
            took: Duration::ZERO,
        }
    }

    /// The number of further workers, which share a client.
    pub(crate) fn add(&mut self, client: &LockClient, count: usize) {
        for _ in 0..count {
            let who = self.tasks.len() as u64;
            let rng = fastrand::Rng::with_seed(self.rng.u64(..));
            self.tasks
                .spawn(contend(client.clone(), self.shared.clone(), who, rng));
        }
    }

    /// Has one fault after the other, with `calm` between them, give or take, for as long as the soak goes on, and until there
    /// were `least` acquisitions. `fault` takes from its beginning to its end, and says what it was.
    pub(crate) async fn disturb(
        &mut self,
        calm: Duration,
        least: usize,
        mut fault: impl AsyncFnMut(&mut fastrand::Rng) -> &'static str,
    ) {
        let started = Instant::now();
        let granted = || self.shared.granted.load(Ordering::Relaxed);
        while match self.cycles {
            Some(cycles) => granted() < cycles,
            None => started.elapsed() < IN_CI || (granted() < least && started.elapsed() < BUSY * IN_CI),
        } {
            tokio::time::sleep(calm.mul_f64(0.5 + self.rng.f64())).await;
            let moment = now();
            self.faults.push((moment, fault(&mut self.rng).await));
        }
        self.took = started.elapsed();
    }

    /// Has all of them end, and returns what they saw.
    pub(crate) async fn history(&mut self) -> History {
        self.shared.over.store(true, Ordering::Relaxed);
        let mut history = History::default();
        while let Some(records) = tokio::time::timeout(LONG, self.tasks.join_next())
            .await
            .expect("after the last fault every waiter is granted")
        {
            history.acquisitions.extend(records.unwrap());
        }
        for resource in &self.shared.resources {
            history.writes.append(&mut resource.lock().unwrap().1);
        }
        history
    }

    /// The history has every property, and it shows something: at least `least` acquisitions, and faults that hit somebody.
    pub(crate) fn check(&self, history: &History, limits: &Limits, least: usize) -> Summary {
        let (seed, faults) = (self.seed, &self.faults);
        let summary = history
            .check(limits)
            .unwrap_or_else(|violation| panic!("LOCKKIT_SEED={seed}: {violation}\nfaults: {faults:?}"));

        let hits = faults.iter().filter(|(moment, _)| {
            let spans = |a: &Acquisition| {
                let end = a.held().map(|(_, to)| to).or(a.gave_up);
                a.asked <= *moment && end.is_none_or(|end| end >= *moment)
            };
            history.acquisitions.iter().any(spans)
        });
        let (hits, faults) = (hits.count(), faults.len());
        let rate = summary.granted as u128 * 1_000 / self.took.as_millis();
        let refused = history.writes.iter().filter(|write| !write.admitted).count();
        eprintln!(
            "{} cycles in {:?} ({rate}/s), {} contended, {} given up, {} lost, {faults} faults of which {hits} hit, \
             {refused} stale writes refused",
            summary.granted,
            self.took,
            summary.contended,
            summary.given_up,
            self.shared.lost.load(Ordering::Relaxed),
        );
        assert!(
            summary.granted >= least,
            "a vacuous pass: {} acquisitions",
            summary.granted
        );
        assert!(
            hits * 10 >= faults * 9 && faults >= 10,
            "a vacuous pass: {hits} of {faults} faults hit"
        );
        summary
    }
}

/// Acquires in one of the ways there are, works, and ends the hold in one of the ways there are, until it is over.
async fn contend(
    client: LockClient,
    shared: Arc<Shared>,
    who: u64,
    mut rng: fastrand::Rng,
) -> Vec<Acquisition> {
    let named = |name: &&str| client.lock(*name).unwrap();
    let locks: Vec<_> = shared.names.iter().map(named).collect();
    let mut records = Vec::new();
    while !shared.over.load(Ordering::Relaxed) {
        let index = rng.usize(..locks.len());
        let mixed = AcquireOptions::new()
            .ttl(TTL / rng.u32(1..=3))
            .renew(rng.u8(..8) > 0)
            .local_handoffs(rng.u32(..4));
        let lock = locks[index].with_options(mixed);
        records.push(one_round(&lock, &shared, index, who, &mut rng).await);
    }
    records
}

async fn one_round(
    lock: &Lock,
    shared: &Shared,
    index: usize,
    who: u64,
    rng: &mut fastrand::Rng,
) -> Acquisition {
    let mut record = Acquisition::asked(shared.names[index], Mode::Exclusive, who, now());
    let patience = MS * rng.u32(1..100);
    let granted = match rng.u8(..10) {
        0 => tokio::time::timeout(patience, lock.acquire()).await.ok(),
        1 => Some(lock.acquire_timeout(patience).await),
        2 => lock.try_acquire().await.transpose(),
        3 => tokio::time::timeout(SECOND, lock.try_acquire())
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
    shared.granted.fetch_add(1, Ordering::Relaxed);
    work(guard, shared, index, &mut record, rng).await;
    record
}

async fn work(
    guard: LockGuard,
    shared: &Shared,
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
        let mut resource = shared.resources[index].lock().unwrap();
        let admitted = resource.0.admit(guard.token()).is_ok();
        resource.1.push(Write {
            lock: shared.names[index].to_owned(),
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
