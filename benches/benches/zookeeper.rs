//! The ZooKeeper backend, beside the recipe that comes with its client library, on one server and on three.
//!
//! `nodes=simple` stands beside both to show what a herd is.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use criterion::{
    BenchmarkGroup, Criterion, SamplingMode, criterion_group, criterion_main, measurement::WallTime,
};
use lockkit::{
    AcquireOptions, Lock, LockClient,
    spi::Mode,
    zk::{Nodes, Parents, ZkBackend, ZkConfig},
};
use lockkit_benches::{
    duel,
    peers::{Curator, CuratorLock, EphemeralNode},
};
use lockkit_conformance::measure::{Client as _, Contender, Subject as _};
use lockkit_testbed::zookeeper::{ZkEnsemble, ZkServer};
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};
use zookeeper_client::Client;

/// Waiters are spread over so many sessions, for each of the contestants.
const SESSIONS: usize = 10;
const SAMPLES: usize = 20;
/// How long new servers are used before anything is measured.
const WARM_UP: Duration = Duration::from_secs(5);
const OURS: &str = "lockkit";
const SIMPLE: &str = "lockkit, nodes=simple";
const THEIRS: &str = "zookeeper-client's recipe";

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

/// So many contenders for one lock, in its directory `/lockkit/<name>`; with `nodes=simple`, `/simple/<name>`.
async fn ours(nodes: Nodes, addr: &str, many: usize, name: &str) -> Vec<Lock> {
    let mut backends = Vec::new();
    for _ in 0..many.min(SESSIONS) {
        let mut config = ZkConfig::new(addr);
        if nodes == Nodes::Simple {
            config.namespace = "simple".into();
        }
        config.nodes = nodes;
        config.tick_time = ZkServer::TICK;
        // As the others' are. The servers here look for empty containers 200 times as often as a real one.
        config.parents = Parents::Persistent;
        backends.push(ZkBackend::connect(config).await.expect("a session"));
    }
    let locks = (0..many).map(|index| {
        // A client each: within one client only one of the waiters goes to the server.
        let client = LockClient::new(backends[index % backends.len()].clone());
        let options = AcquireOptions::new().ttl(Duration::from_mins(10));
        client.lock(name).expect("a name").with_options(options)
    });
    locks.collect()
}

/// The same, in the directory `/crate/<name>`.
async fn theirs(addr: &str, many: usize, name: &str) -> Vec<CuratorLock> {
    let curator = Curator {
        addr: addr.to_owned(),
    };
    let mut sessions = Vec::new();
    for _ in 0..many.min(SESSIONS) {
        sessions.push(curator.client().await.expect("a session"));
    }
    let mut locks = Vec::new();
    for index in 0..many {
        let session = &sessions[index % sessions.len()];
        locks.push(session.contender(name, Mode::Exclusive).await.expect("a lock"));
    }
    locks
}

fn only<T, const N: usize>(all: Vec<T>) -> [T; N] {
    all.try_into().unwrap_or_else(|_| unreachable!("{N} were made"))
}

async fn raw(addr: &str) -> Client {
    Client::connect(addr).await.expect("a session")
}

/// Times the acquisitions of `n` cycles, without their releases.
async fn acquisitions(contender: &mut impl Contender, n: u64) -> Duration {
    let mut took = Duration::ZERO;
    for _ in 0..n {
        let began = Instant::now();
        let held = contender.acquire().await.expect("granted");
        took += began.elapsed();
        contender.release(held).await.expect("released");
    }
    took
}

fn uncontended(group: &mut BenchmarkGroup<'_, WallTime>, runtime: &Runtime, addr: &str) {
    let [mut ours] = only(runtime.block_on(ours(Nodes::Mutex, addr, 1, "uncontended")));
    let [mut theirs] = only(runtime.block_on(theirs(addr, 1, "uncontended")));
    // Servers that have just come up become faster while they are measured, and the first would be the slowest.
    let began = Instant::now();
    while began.elapsed() < WARM_UP {
        runtime.block_on(acquisitions(&mut ours, 100));
        runtime.block_on(acquisitions(&mut theirs, 100));
    }
    duel(
        group,
        (&format!("acquire/{OURS}"), |n| {
            runtime.block_on(acquisitions(&mut ours, n))
        }),
        (&format!("acquire/{THEIRS}"), |n| {
            runtime.block_on(acquisitions(&mut theirs, n))
        }),
    );
}

/// Times `n` hand-offs, from the call that releases to the return of the call that waited.
async fn handoffs<C: Contender>(pair: [C; 2], raw: &Client, dir: &str, n: u64) -> (Duration, [C; 2]) {
    let mut took = Duration::ZERO;
    let [mut holder, mut next] = pair;
    let mut held = holder.acquire().await.expect("granted");
    for _ in 0..n {
        let waiting = tokio::spawn(async move {
            let held = next.acquire().await.expect("granted");
            (held, Instant::now(), next)
        });
        while raw.list_children(dir).await.expect("listed").len() < 2 {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        // It has made its node; now it begins to watch the holder's.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let began = Instant::now();
        holder.release(held).await.expect("released");
        let granted;
        (held, granted, next) = waiting.await.expect("granted");
        took += granted.saturating_duration_since(began);
        std::mem::swap(&mut holder, &mut next);
    }
    holder.release(held).await.expect("released");
    (took, [holder, next])
}

/// Times the deletion of `n` nodes that nobody watches.
async fn deletions(node: &mut impl Contender, n: u64) -> Duration {
    let mut took = Duration::ZERO;
    for _ in 0..n {
        let made = node.acquire().await.expect("created");
        // As after a hand-off, there was a pause before.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let began = Instant::now();
        node.release(made).await.expect("deleted");
        took += began.elapsed();
    }
    took
}

fn handed_over<C: Contender>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    runtime: &Runtime,
    addr: &str,
    (name, dir, pair): (&str, &str, Vec<C>),
) {
    let raw = runtime.block_on(raw(addr));
    let floor = EphemeralNode {
        addr: addr.to_owned(),
    };
    let mut node = runtime.block_on(async {
        let session = floor.client().await.expect("a session");
        session
            .contender("deleted", Mode::Exclusive)
            .await
            .expect("a node")
    });
    let mut pair = Some(only(pair));
    duel(
        group,
        (&format!("hand-off/{name}"), |n| {
            let two = pair.take().expect("they come back");
            let (took, two) = runtime.block_on(handoffs(two, &raw, dir, n));
            pair = Some(two);
            took
        }),
        (&format!("hand-off/a delete's round trip, beside {name}"), |n| {
            runtime.block_on(deletions(&mut node, n))
        }),
    );
}

/// Waiters that come back as soon as they have been in.
struct Crowd {
    grants: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<()>>,
}

impl Crowd {
    fn start<C: Contender>(runtime: &Runtime, contenders: Vec<C>) -> Self {
        let grants = Arc::<AtomicU64>::default();
        let tasks = contenders.into_iter().map(|mut contender| {
            let grants = grants.clone();
            runtime.spawn(async move {
                loop {
                    let held = contender.acquire().await.expect("granted");
                    grants.fetch_add(1, Ordering::Relaxed);
                    contender.release(held).await.expect("released");
                }
            })
        });
        Self {
            tasks: tasks.collect(),
            grants,
        }
    }

    /// Waits for `n` more grants.
    async fn grant(&self, n: u64) -> Duration {
        let (began, until) = (Instant::now(), self.grants.load(Ordering::Relaxed) + n);
        while self.grants.load(Ordering::Relaxed) < until {
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        began.elapsed()
    }

    /// Their sessions end with them.
    async fn end(self) {
        for task in self.tasks {
            task.abort();
            let error = task.await.expect_err("it goes on for ever");
            assert!(error.is_cancelled(), "{error}");
        }
    }
}

fn crowded<C: Contender>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    runtime: &Runtime,
    name: &str,
    contenders: Vec<C>,
) {
    let many = contenders.len();
    let is_herd = name == SIMPLE && many > 100;
    let crowd = Crowd::start(runtime, contenders);
    // Until all have come and have been in; of a herd, where each grant takes seconds, until some have.
    runtime.block_on(crowd.grant(if is_herd { 2 } else { many as u64 }));
    if is_herd {
        group.sample_size(10).sampling_mode(SamplingMode::Flat);
    }
    group.bench_function(format!("{many} waiters/{name}"), |bencher| {
        bencher.iter_custom(|n| runtime.block_on(crowd.grant(n)));
    });
    group.sample_size(SAMPLES).sampling_mode(SamplingMode::Auto);
    runtime.block_on(crowd.end());
}

fn busy(group: &mut BenchmarkGroup<'_, WallTime>, runtime: &Runtime, addr: &str) {
    let [holder, lock] = only(runtime.block_on(ours(Nodes::Mutex, addr, 2, "busy")));
    let raw = runtime.block_on(raw(addr));
    let held = runtime.block_on(holder.acquire()).expect("granted");
    duel(
        group,
        (&format!("try, busy/{OURS}"), |n| {
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
    runtime.block_on(held.release()).expect("released");
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
        group.sample_size(SAMPLES);
        group.measurement_time(Duration::from_secs(4));
        uncontended(&mut group, &runtime, &addr);
        let pair = runtime.block_on(ours(Nodes::Mutex, &addr, 2, "handoff"));
        handed_over(&mut group, &runtime, &addr, (OURS, "/lockkit/handoff", pair));
        let pair = runtime.block_on(theirs(&addr, 2, "handoff"));
        handed_over(&mut group, &runtime, &addr, (THEIRS, "/crate/handoff", pair));
        busy(&mut group, &runtime, &addr);
        for many in [10, 100, 1_000] {
            let name = format!("crowd-{many}");
            let crowd = runtime.block_on(ours(Nodes::Mutex, &addr, many, &name));
            crowded(&mut group, &runtime, OURS, crowd);
            let crowd = runtime.block_on(theirs(&addr, many, &name));
            crowded(&mut group, &runtime, THEIRS, crowd);
            let crowd = runtime.block_on(ours(Nodes::Simple, &addr, many, &name));
            crowded(&mut group, &runtime, SIMPLE, crowd);
        }
        group.finish();
    }
}

criterion_group!(benches, zookeeper);
criterion_main!(benches);
