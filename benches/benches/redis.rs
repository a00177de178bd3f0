//! The Redis backend, beside the raw commands on a connection with the same settings, and beside `rslock`.
//!
//! Criterion measures the uncontended cycles, the contestants taking turns. What is about waiting is shown in tables
//! after that: who waits for how long cannot be told from a mean.
#![expect(
    clippy::cast_precision_loss,
    reason = "counts of a few seconds, to be printed"
)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use criterion::{Criterion, criterion_group};
use lockkit::{AcquireOptions, Lock, LockClient, spi::Mode};
use lockkit_benches::{
    contest,
    peers::{Rslock, RslockKey, SetNx, SetNxKey},
    turns::{Cycle, median, medians, take},
};
use lockkit_conformance::measure::{Client, Contender, Subject};
use lockkit_testbed::redis::{RedisServer, missing};
use tokio::runtime::{Builder, Runtime};

const TTL: Duration = Duration::from_secs(30);

/// Whoever takes a lock and gives it back.
#[derive(Clone)]
enum Contestant {
    Lockkit(Lock),
    Rslock(RslockKey),
    /// The least that can be done.
    Raw(SetNxKey),
}

impl Cycle for Contestant {
    async fn cycle(&mut self) {
        match self {
            Self::Lockkit(lock) => take(lock).await,
            Self::Rslock(key) => take(key).await,
            Self::Raw(key) => take(key).await,
        }
    }
}

/// A client of its own.
async fn client<S: Subject>(subject: S) -> S::Client {
    subject.client().await.expect("a client")
}

async fn raw(server: &RedisServer) -> impl Client<Contender = SetNxKey> {
    let url = server.url().to_owned();
    client(SetNx { url }).await
}

async fn rslock(server: &RedisServer) -> impl Client<Contender = RslockKey> {
    let urls = vec![server.url().to_owned()];
    client(Rslock { urls }).await
}

async fn key<C: Client>(client: &C, name: &str) -> C::Contender {
    client.contender(name, Mode::Exclusive).await.expect("a key")
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

async fn connect(server: &RedisServer, local_handoffs: u32) -> LockClient {
    let url = format!("{}?local_handoffs={local_handoffs}", server.url());
    lockkit::connect(&url).await.expect("a server")
}

/// `tasks` tasks, each on a name of its own.
fn uncontended(c: &mut Criterion, tasks: usize) {
    let server = RedisServer::plain().expect("a server");
    let runtime = runtime();
    let (lockkit, theirs, plain) = runtime.block_on(async {
        let client = connect(&server, 32).await;
        let (raw, rslock) = (raw(&server).await, rslock(&server).await);
        let mut all = (Vec::new(), Vec::new(), Vec::new());
        for task in 0..tasks {
            let name = task.to_string();
            all.0
                .push(Contestant::Lockkit(client.lock(&*name).expect("a name")));
            all.1.push(Contestant::Rslock(key(&rslock, &name).await));
            all.2.push(Contestant::Raw(key(&raw, &name).await));
        }
        all
    });
    let run = |contenders: Vec<Contestant>| {
        let runtime = &runtime;
        Box::new(move |n: u64| {
            runtime.block_on(async {
                let started = Instant::now();
                let share = n.div_ceil(contenders.len() as u64);
                let tasks: Vec<_> = contenders
                    .iter()
                    .cloned()
                    .map(|mut contender| {
                        tokio::spawn(async move {
                            for _ in 0..share {
                                contender.cycle().await;
                            }
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await.expect("no panic");
                }
                started.elapsed()
            })
        })
    };
    let mut group = c.benchmark_group(format!("redis, uncontended, {tasks} tasks"));
    group.throughput(criterion::Throughput::Elements(1));
    contest(
        &mut group,
        &mut [
            ("raw", run(plain)),
            ("lockkit", run(lockkit)),
            ("rslock", run(theirs)),
        ],
    );
    group.finish();
}

fn cycles(c: &mut Criterion) {
    for tasks in [1, 64] {
        uncontended(c, tasks);
    }
}

fn latencies() {
    let server = RedisServer::plain().expect("a server");
    let runtime = runtime();
    let contestants = runtime.block_on(async {
        let client = connect(&server, 32).await;
        let lock = client.lock("one").expect("a name");
        [
            ("raw", Contestant::Raw(key(&raw(&server).await, "one").await)),
            ("lockkit", Contestant::Lockkit(lock)),
            (
                "rslock",
                Contestant::Rslock(key(&rslock(&server).await, "one").await),
            ),
        ]
    });
    medians(&runtime, "redis, uncontended, 1 task", 15, 2_000, &contestants);
}

/// What each of several contenders for one lock saw.
struct Waits {
    locks: Vec<usize>,
    longest: Duration,
    total: Duration,
    elapsed: Duration,
    commands: u64,
}

impl Waits {
    fn print(&self, name: &str) {
        let locks: usize = self.locks.iter().sum();
        let n = self.locks.len() as f64;
        let sum = locks as f64;
        let squares: f64 = self.locks.iter().map(|count| (*count as f64).powi(2)).sum();
        println!(
            "  {name:36} {:>9.0} locks/s   mean wait {:>9.1?}   longest {:>9.1?}   Jain {:.3}   {:.2} commands/lock",
            sum / self.elapsed.as_secs_f64(),
            self.total / u32::try_from(locks.max(1)).unwrap_or(u32::MAX),
            self.longest,
            sum * sum / (n * squares),
            self.commands as f64 / sum,
        );
    }
}

/// How often the server executed each of `commands`, inside of scripts as well.
fn executed(server: &RedisServer, commands: &[&str]) -> u64 {
    let counts = server.command_counts().expect("counts");
    commands.iter().filter_map(|command| counts.get(*command)).sum()
}

/// Scripts and releases without one.
const REQUESTS: [&str; 4] = ["evalsha", "eval", "delifeq", "delex"];

/// The commands that lockkit's clients sent for as many locks, without what scripts did. An attempt without a script is
/// three of them, and seen by its GET: scripts do one for each look at the clock, and one more for each release.
fn commands(server: &RedisServer, locks: usize) -> u64 {
    let gets = executed(server, &["get", "delifeq", "delex"]);
    let attempts = gets.saturating_sub(executed(server, &["time"]) + locks as u64);
    executed(server, &REQUESTS) + 3 * attempts
}

/// All of them at once, for `FOR`, holding for no time at all.
fn fight(runtime: &Runtime, server: &RedisServer, contenders: Vec<Contestant>) -> Waits {
    const FOR: Duration = Duration::from_secs(3);
    let stop = Arc::new(AtomicBool::new(false));
    server.cli(&["CONFIG", "RESETSTAT"]).expect("counts from now on");
    let started = Instant::now();
    let tasks: Vec<_> = contenders
        .into_iter()
        .map(|mut contender| {
            let stop = stop.clone();
            runtime.spawn(async move {
                let (mut locks, mut longest, mut total) = (0, Duration::ZERO, Duration::ZERO);
                while !stop.load(Ordering::Relaxed) {
                    let asked = Instant::now();
                    contender.cycle().await;
                    let waited = asked.elapsed();
                    longest = longest.max(waited);
                    total += waited;
                    locks += 1;
                }
                (locks, longest, total)
            })
        })
        .collect();
    std::thread::sleep(FOR);
    stop.store(true, Ordering::Relaxed);
    let elapsed = started.elapsed();
    let results: Vec<_> = tasks
        .into_iter()
        .map(|task| runtime.block_on(task).expect("no panic"))
        .collect();
    let locks: Vec<usize> = results.iter().map(|result| result.0).collect();
    Waits {
        commands: commands(server, locks.iter().sum()),
        locks,
        longest: results.iter().map(|result| result.1).max().unwrap_or_default(),
        total: results.iter().map(|result| result.2).sum(),
        elapsed,
    }
}

fn contended() {
    const MANY: usize = 16;
    let server = RedisServer::plain().expect("a server");
    let runtime = runtime();
    println!("\nredis, one lock, held for no time, 3 s each");

    let clients = runtime.block_on(async {
        let mut all = Vec::new();
        for _ in 0..MANY {
            let client = connect(&server, 0).await;
            all.push(Contestant::Lockkit(client.lock("clients").expect("a name")));
        }
        all
    });
    fight(&runtime, &server, clients).print("16 clients, lockkit");
    let clients = runtime.block_on(async {
        let mut all = Vec::new();
        for _ in 0..MANY {
            all.push(Contestant::Rslock(key(&rslock(&server).await, "clients").await));
        }
        all
    });
    fight(&runtime, &server, clients).print("16 clients, rslock");

    for handoffs in [0, 32, 1_000] {
        let client = runtime.block_on(connect(&server, handoffs));
        let lock = Contestant::Lockkit(client.lock("tasks").expect("a name"));
        let name = format!("16 tasks, lockkit, local_handoffs {handoffs}");
        fight(&runtime, &server, vec![lock.clone(); MANY]).print(&name);
        let other = runtime.block_on(connect(&server, handoffs));
        let waits = beside(&runtime, vec![lock; MANY], &other.lock("tasks").expect("a name"));
        println!("  {:36} longest wait of another client {waits:.1?}", "");
    }
    let lock = Contestant::Rslock(runtime.block_on(async { key(&rslock(&server).await, "tasks").await }));
    fight(&runtime, &server, vec![lock; MANY]).print("16 tasks, rslock");
}

/// How long another client has to wait at most, while `contenders` fight among themselves.
fn beside(runtime: &Runtime, contenders: Vec<Contestant>, other: &Lock) -> Duration {
    let stop = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = contenders
        .into_iter()
        .map(|mut contender| {
            let stop = stop.clone();
            runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    contender.cycle().await;
                }
            })
        })
        .collect();
    let longest = runtime.block_on(async {
        let mut longest = Duration::ZERO;
        for _ in 0..200 {
            let asked = Instant::now();
            let guard = other.acquire().await.expect("granted");
            longest = longest.max(asked.elapsed());
            guard.release().await.expect("released");
        }
        longest
    });
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        runtime.block_on(task).expect("no panic");
    }
    longest
}

/// From the call of release to the grant of a waiter in another client, which has slept for a while.
fn hand_off() {
    let server = RedisServer::plain().expect("a server");
    let (ours, theirs) = runtime().block_on(async {
        let (a, b) = (connect(&server, 0).await, connect(&server, 0).await);
        let ours = hand_offs(a.lock("n").expect("a name"), b.lock("n").expect("a name")).await;
        let (a, b) = (rslock(&server).await, rslock(&server).await);
        (ours, hand_offs(key(&a, "n").await, key(&b, "n").await).await)
    });
    println!(
        "\nredis, hand-off to a waiter that has slept for 35 ms, {} times",
        ours.len()
    );
    for (name, times) in [("lockkit", ours), ("rslock", theirs)] {
        let longest = times.iter().max().copied().unwrap_or_default();
        println!(
            "  {name:10} p50 {:>9.1?}   longest {longest:>9.1?}",
            median(times)
        );
    }
}

async fn hand_offs<C: Contender>(mut a: C, mut b: C) -> Vec<Duration> {
    let mut times = Vec::new();
    for _ in 0..100 {
        let held = a.acquire().await.expect("granted");
        let waiter = tokio::spawn(async move {
            let held = b.acquire().await.expect("granted");
            (b, held, Instant::now())
        });
        tokio::time::sleep(Duration::from_millis(35)).await;
        let released = Instant::now();
        a.release(held).await.expect("released");
        let (back, held, granted) = waiter.await.expect("no panic");
        b = back;
        times.push(granted - released);
        b.release(held).await.expect("released");
    }
    times
}

/// What it costs to keep many locks.
fn many_holds() {
    const HOLDS: usize = 10_000;
    const WATCHED: Duration = Duration::from_secs(10);
    let server = RedisServer::plain().expect("a server");
    let runtime = runtime();
    println!("\nredis, {HOLDS} locks held for {WATCHED:?} with a ttl of {TTL:?}");
    runtime.block_on(async {
        let client = connect(&server, 32).await;
        let options = AcquireOptions::new().ttl(TTL);
        let mut guards = Vec::new();
        for name in 0..HOLDS {
            let lock = client.lock(format!("{name}")).expect("a name");
            guards.push(
                lock.with_options(options.clone())
                    .acquire()
                    .await
                    .expect("granted"),
            );
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (requests_before, cpu_before) = (executed(&server, &REQUESTS), cpu_time());
        tokio::time::sleep(WATCHED).await;
        let renewals = executed(&server, &REQUESTS) - requests_before;
        let cpu = cpu_time().saturating_sub(cpu_before).as_secs_f64() / WATCHED.as_secs_f64();
        assert!(
            guards.iter().all(lockkit::LockGuard::is_held),
            "all are still held"
        );
        println!(
            "  {:.0} renewals/s, {:.2} % of a core, {:.1} µs each",
            renewals as f64 / WATCHED.as_secs_f64(),
            cpu * 100.0,
            cpu * WATCHED.as_secs_f64() * 1e6 / renewals as f64,
        );
        Client::close(client).await.expect("closed");
    });
}

/// The processor time of this process so far.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<_> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    let ticks: u64 = fields[11..13]
        .iter()
        .map(|field| field.parse::<u64>().expect("a number"))
        .sum();
    Duration::from_millis(ticks * 10)
}

criterion_group!(benches, cycles);

fn main() {
    if let Some(missing) = missing() {
        println!("skipped: {missing}");
        return;
    }
    // `cargo bench -- a-filter` is for criterion; without one, the tables are shown as well.
    let filtered = std::env::args()
        .skip(1)
        .any(|argument| !argument.starts_with("--"));
    if !filtered {
        latencies();
        contended();
        hand_off();
        many_holds();
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
