//! The ZooKeeper backend, beside the recipe that comes with its client library, on one server and on three.
//!
//! `nodes=simple` stands beside both to show what a herd is.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main, measurement::WallTime};
use lockkit::{
    AcquireOptions, Lock, LockClient,
    zk::{Nodes, ZkBackend, ZkConfig},
};
use lockkit_benches::{
    duel,
    peers::{CuratorLock, curator_lock},
};
use lockkit_conformance::measure::Contender as _;
use lockkit_testbed::zookeeper::{ZkEnsemble, ZkServer};
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};
use zookeeper_client::{Acls, Client, CreateMode};

/// Waiters are spread over so many sessions, for each of the contestants.
const SESSIONS: usize = 10;
const EVERYONE: Acls<'static> = Acls::anyone_all();

/// One server, or three.
enum Servers {
    One(Box<ZkServer>),
    Three(ZkEnsemble),
}

impl Servers {
    fn name(&self) -> &'static str {
        match self {
            Self::One(_) => "one server",
            Self::Three(_) => "three servers",
        }
    }

    /// Where clients connect to: all to the same server, so that none has a shorter way. Of three it is a follower.
    fn addr(&self) -> String {
        match self {
            Self::One(server) => server.addr().to_string(),
            Self::Three(ensemble) => {
                let leader = ensemble.leader().expect("a leader");
                ensemble.member((leader + 1) % 3).addr().to_string()
            }
        }
    }
}

/// What the contestants are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contestant {
    Lockkit,
    Simple,
    Crate,
}

impl Contestant {
    fn name(self) -> &'static str {
        match self {
            Self::Lockkit => "lockkit",
            Self::Simple => "lockkit, nodes=simple",
            Self::Crate => "zookeeper-client's recipe",
        }
    }
}

/// Whoever acquires and releases.
#[derive(Clone)]
enum Contender {
    Ours(Lock),
    Theirs(CuratorLock),
}

/// What it holds.
enum Held {
    Ours(lockkit::LockGuard),
    Theirs(CuratorLock, String),
}

impl Contender {
    async fn acquire(&self) -> Held {
        match self {
            Self::Ours(lock) => Held::Ours(lock.acquire().await.expect("granted")),
            Self::Theirs(lock) => {
                let mut lock = lock.clone();
                let path = lock.acquire().await.expect("granted");
                Held::Theirs(lock, path)
            }
        }
    }
}

impl Held {
    async fn release(self) {
        match self {
            Self::Ours(guard) => guard.release().await.expect("released"),
            Self::Theirs(mut lock, path) => lock.release(path).await.expect("deleted"),
        }
    }
}

/// So many contenders for one lock.
async fn contenders(contestant: Contestant, addr: &str, many: usize, name: &str) -> Vec<Contender> {
    let sessions = many.min(SESSIONS);
    let mut all = Vec::new();
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for _ in 0..sessions {
        if contestant == Contestant::Crate {
            theirs.push(raw(addr).await);
        } else {
            let mut config = ZkConfig::new(addr);
            config.namespace = format!("{contestant:?}").to_lowercase();
            config.tick_time = ZkServer::TICK;
            if contestant == Contestant::Simple {
                config.nodes = Nodes::Simple;
            }
            ours.push(ZkBackend::connect(config).await.expect("a session"));
        }
    }
    for index in 0..many {
        all.push(if contestant == Contestant::Crate {
            Contender::Theirs(curator_lock(&theirs[index % sessions], format!("/crate/{name}")))
        } else {
            // A client each: within one client only one of the waiters goes to the server.
            let client = LockClient::new(ours[index % sessions].clone());
            let options = AcquireOptions::new().ttl(Duration::from_secs(600));
            Contender::Ours(client.lock(name).expect("a name").with_options(options))
        });
    }
    all
}

async fn raw(addr: &str) -> Client {
    let connector = Client::connector().with_session_timeout(Duration::from_secs(30));
    connector.connect(addr).await.expect("a session")
}

/// Times the acquisitions of `n` cycles, without their releases.
async fn acquisitions(contender: &Contender, n: u64) -> Duration {
    let mut took = Duration::ZERO;
    for _ in 0..n {
        let began = Instant::now();
        let held = contender.acquire().await;
        took += began.elapsed();
        held.release().await;
    }
    took
}

fn uncontended(group: &mut BenchmarkGroup<'_, WallTime>, runtime: &Runtime, addr: &str) {
    let one = |contestant| {
        runtime
            .block_on(contenders(contestant, addr, 1, "uncontended"))
            .remove(0)
    };
    let (ours, theirs) = (one(Contestant::Lockkit), one(Contestant::Crate));
    duel(
        group,
        (&format!("acquire/{}", Contestant::Lockkit.name()), |n| {
            runtime.block_on(acquisitions(&ours, n))
        }),
        (&format!("acquire/{}", Contestant::Crate.name()), |n| {
            runtime.block_on(acquisitions(&theirs, n))
        }),
    );
}

/// Times `n` hand-offs, from the call that releases to the return of the call that waited.
async fn handoffs(pair: &[Contender; 2], raw: &Client, dir: &str, n: u64) -> Duration {
    let mut took = Duration::ZERO;
    let mut held = pair[0].acquire().await;
    for round in 0..n {
        let next = pair[usize::from(round % 2 == 0)].clone();
        let waiting = tokio::spawn(async move { (next.acquire().await, Instant::now()) });
        while raw.list_children(dir).await.expect("listed").len() < 2 {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        // It has made its node; now it begins to watch the holder's.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let began = Instant::now();
        held.release().await;
        let (next, granted) = waiting.await.expect("granted");
        took += granted.saturating_duration_since(began);
        held = next;
    }
    held.release().await;
    took
}

/// Times the deletion of `n` nodes that nobody watches.
async fn deletions(raw: &Client, n: u64) -> Duration {
    let options = CreateMode::Ephemeral.with_acls(EVERYONE);
    let mut took = Duration::ZERO;
    for _ in 0..n {
        raw.create("/deleted", b"", &options).await.expect("created");
        // As after a hand-off, there was a pause before.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let began = Instant::now();
        raw.delete("/deleted", None).await.expect("deleted");
        took += began.elapsed();
    }
    took
}

fn handed_over(group: &mut BenchmarkGroup<'_, WallTime>, runtime: &Runtime, addr: &str) {
    let raw = runtime.block_on(raw(addr));
    for contestant in [Contestant::Lockkit, Contestant::Crate] {
        let pair = runtime.block_on(contenders(contestant, addr, 2, "handoff"));
        let pair: [Contender; 2] = pair.try_into().unwrap_or_else(|_| unreachable!("two were made"));
        let dir = format!("/{}/handoff", format!("{contestant:?}").to_lowercase());
        duel(
            group,
            (&format!("hand-off/{}", contestant.name()), |n| {
                runtime.block_on(handoffs(&pair, &raw, &dir, n))
            }),
            (
                &format!("hand-off/a delete's round trip, beside {}", contestant.name()),
                |n| runtime.block_on(deletions(&raw, n)),
            ),
        );
    }
}

/// Waiters that come back as soon as they have been in.
struct Crowd {
    stop: Arc<AtomicBool>,
    grants: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<()>>,
}

impl Crowd {
    async fn start(contestant: Contestant, addr: &str, many: usize) -> Self {
        let (stop, grants) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let mut tasks = Vec::new();
        for contender in contenders(contestant, addr, many, &format!("crowd-{many}")).await {
            let (stop, grants) = (stop.clone(), grants.clone());
            tasks.push(tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let held = contender.acquire().await;
                    grants.fetch_add(1, Ordering::Relaxed);
                    held.release().await;
                }
            }));
        }
        let crowd = Self { stop, grants, tasks };
        // Until all have come and some have been in.
        crowd.grant(many.min(100) as u64).await;
        crowd
    }

    /// Waits for `n` more grants.
    async fn grant(&self, n: u64) -> Duration {
        let (began, until) = (Instant::now(), self.grants.load(Ordering::Relaxed) + n);
        while self.grants.load(Ordering::Relaxed) < until {
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        began.elapsed()
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("it ends");
        }
    }
}

fn crowded(group: &mut BenchmarkGroup<'_, WallTime>, runtime: &Runtime, addr: &str) {
    for many in [10, 100, 1_000] {
        for contestant in [Contestant::Lockkit, Contestant::Crate, Contestant::Simple] {
            if contestant == Contestant::Simple && many > 100 {
                // It takes seconds for each grant.
                continue;
            }
            let crowd = runtime.block_on(Crowd::start(contestant, addr, many));
            group.bench_function(format!("{many} waiters/{}", contestant.name()), |bencher| {
                bencher.iter_custom(|n| runtime.block_on(crowd.grant(n)));
            });
            runtime.block_on(crowd.end());
        }
    }
}

fn busy(group: &mut BenchmarkGroup<'_, WallTime>, runtime: &Runtime, addr: &str) {
    let [holder, ours]: [Contender; 2] = runtime
        .block_on(contenders(Contestant::Lockkit, addr, 2, "busy"))
        .try_into()
        .unwrap_or_else(|_| unreachable!("two were made"));
    let raw = runtime.block_on(raw(addr));
    let held = runtime.block_on(holder.acquire());
    let Contender::Ours(lock) = ours else {
        unreachable!("they are ours")
    };
    duel(
        group,
        ("try, busy/lockkit", |n| {
            runtime.block_on(async {
                let began = Instant::now();
                for _ in 0..n {
                    assert!(lock.try_acquire().await.expect("an answer").is_none());
                }
                began.elapsed()
            })
        }),
        ("try, busy/a list's round trip", |n| {
            runtime.block_on(async {
                let began = Instant::now();
                for _ in 0..n {
                    raw.list_children("/lockkit/busy").await.expect("listed");
                }
                began.elapsed()
            })
        }),
    );
    runtime.block_on(held.release());
}

fn zookeeper(c: &mut Criterion) {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    for servers in [
        Servers::One(Box::new(ZkServer::plain().expect("a server"))),
        Servers::Three(ZkEnsemble::start().expect("three servers")),
    ] {
        let addr = servers.addr();
        let mut group = c.benchmark_group(format!("zookeeper, {}", servers.name()));
        group.sample_size(20);
        group.measurement_time(Duration::from_secs(4));
        uncontended(&mut group, &runtime, &addr);
        handed_over(&mut group, &runtime, &addr);
        busy(&mut group, &runtime, &addr);
        crowded(&mut group, &runtime, &addr);
        group.finish();
    }
}

criterion_group!(benches, zookeeper);
criterion_main!(benches);
