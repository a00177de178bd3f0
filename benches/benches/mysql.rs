//! The MySQL backend beside what it is made of: a row lock by hand (`SELECT … FOR UPDATE`, then `ROLLBACK`: no token, no
//! lease, nobody told of anything) and the server's own named lock (`GET_LOCK`), on a private MariaDB.
//!
//! After criterion's means come the medians, measured in turns of one run each, and their ratios to the row lock by hand.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use criterion::{Criterion, criterion_group};
use futures_util::future::join_all;
use lockkit::{Lock, LockClient, spi::Mode};
use lockkit_benches::{
    duel,
    peers::{ForUpdate, GetLock},
    time_cycles,
};
use lockkit_conformance::measure::{Client, Contender};
use lockkit_testbed::mysql::{Flavour, MySql};
use tokio::{
    runtime::{Builder, Runtime},
    sync::Mutex,
};

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime")
}

fn server() -> MySql {
    MySql::start(Flavour::MariaDb, &[]).expect("MariaDB")
}

async fn client(server: &MySql, parameters: &str) -> LockClient {
    let url = format!("{}{parameters}", server.url());
    lockkit::connect(&url).await.expect("connected")
}

/// A connection that locks a row by hand.
type Row = <ForUpdate as Client>::Contender;
/// A connection that takes a named lock by hand.
type Named = <GetLock as Client>::Contender;

async fn row(server: &MySql, name: &str) -> Row {
    let by_hand = ForUpdate { url: server.url() };
    by_hand.contender(name, Mode::Exclusive).await.expect("connected")
}

async fn named(server: &MySql, name: &str) -> Named {
    let by_hand = GetLock { url: server.url() };
    by_hand.contender(name, Mode::Exclusive).await.expect("connected")
}

async fn take(by_hand: &mut impl Contender<Held = ()>) {
    by_hand.acquire().await.expect("locked");
}

async fn give_back(by_hand: &mut impl Contender<Held = ()>) {
    by_hand.release(()).await.expect("unlocked");
}

async fn cycle_by_hand(by_hand: &mut impl Contender<Held = ()>) {
    take(by_hand).await;
    give_back(by_hand).await;
}

async fn cycle(lock: &Lock) {
    let guard = lock.acquire().await.expect("granted");
    guard.release().await.expect("released");
}

/// One task, uncontended.
fn uncontended(c: &mut Criterion) {
    let (runtime, server) = (runtime(), server());
    let (lock, row, named) = runtime.block_on(async {
        (
            client(&server, "").await.lock("one").expect("a name"),
            Mutex::new(row(&server, "one").await),
            Mutex::new(named(&server, "one").await),
        )
    });
    let mut group = c.benchmark_group("mysql, uncontended");
    group.measurement_time(Duration::from_secs(3));
    duel(
        &mut group,
        ("lockkit", |n| time_cycles(&runtime, n, || cycle(&lock))),
        ("FOR UPDATE by hand", |n| {
            time_cycles(&runtime, n, || async {
                cycle_by_hand(&mut *row.lock().await).await;
            })
        }),
    );
    group.bench_function("GET_LOCK by hand", |bencher| {
        bencher.iter_custom(|n| {
            time_cycles(&runtime, n, || async {
                cycle_by_hand(&mut *named.lock().await).await;
            })
        });
    });
    group.finish();
}

/// Sixteen who want one thing, as tasks of one client and as clients: a cycle by each of them.
fn contended(c: &mut Criterion) {
    let (runtime, server) = (runtime(), server());
    let (one, many, rows) = runtime.block_on(async {
        let one = client(&server, "").await.lock("sixteen").expect("a name");
        let mut many = Vec::new();
        let mut rows = Vec::new();
        for _ in 0..16 {
            many.push(client(&server, "").await.lock("sixteen").expect("a name"));
            rows.push(Mutex::new(row(&server, "sixteen").await));
        }
        (vec![one; 16], many, rows)
    });
    let all = |locks: &[Lock], n: u64| {
        let cycles = locks.iter().map(|lock| async move {
            for _ in 0..n {
                cycle(lock).await;
            }
        });
        let began = Instant::now();
        runtime.block_on(join_all(cycles));
        began.elapsed()
    };
    let by_hand = |n: u64| {
        let cycles = rows.iter().map(|row| async move {
            for _ in 0..n {
                cycle_by_hand(&mut *row.lock().await).await;
            }
        });
        let began = Instant::now();
        runtime.block_on(join_all(cycles));
        began.elapsed()
    };
    let mut group = c.benchmark_group("mysql, sixteen on one name, a cycle each");
    group.measurement_time(Duration::from_secs(3)).sample_size(20);
    duel(
        &mut group,
        ("lockkit, tasks", |n| all(&one, n)),
        ("FOR UPDATE by hand", by_hand),
    );
    duel(
        &mut group,
        ("lockkit, clients", |n| all(&many, n)),
        ("FOR UPDATE by hand (again)", by_hand),
    );
    group.finish();
}

criterion_group!(benches, uncontended, contended);

fn main() {
    benches();
    // Under `cargo test` and with a filter, that is all.
    if std::env::args().any(|argument| argument == "--bench") {
        medians();
    }
}

/// Times that were measured in turns.
#[derive(Default)]
struct Times(Vec<Duration>);

impl Times {
    fn median(&mut self) -> Duration {
        self.0.sort_unstable();
        self.0.get(self.0.len() / 2).copied().unwrap_or_default()
    }

    fn worst(&mut self) -> Duration {
        self.0.iter().max().copied().unwrap_or_default()
    }
}

fn medians() {
    let (runtime, server) = (runtime(), server());
    runtime.block_on(async {
        let server = Arc::new(server);
        one_task(&server).await;
        sixteen_names(&server).await;
        hand_off(&server).await;
        sixteen_clients(&server).await;
        two_hundred_waiters(&server).await;
    });
}

fn report(what: &str, mut times: Vec<(&str, Times)>) {
    println!("\n{what}");
    let floor = times[0].1.median();
    for (name, times) in &mut times {
        let ratio = times.median().as_secs_f64() / floor.as_secs_f64();
        println!(
            "  {name:32} median {:>10.1?}  {ratio:5.2}  worst {:>10.1?}",
            times.median(),
            times.worst()
        );
    }
}

async fn timed(times: &mut Times, work: impl Future<Output = ()>) {
    let began = Instant::now();
    work.await;
    times.0.push(began.elapsed());
}

async fn one_task(server: &MySql) {
    let lock = client(server, "").await.lock("median").expect("a name");
    let each = client(server, "?token_block=1&local_handoffs=0")
        .await
        .lock("each")
        .expect("a name");
    let lease = client(server, "?mode=lease")
        .await
        .lock("median")
        .expect("a name");
    let (mut row, mut get_lock) = (row(server, "median").await, named(server, "median").await);
    let mut times: [Times; 5] = Default::default();
    for round in 0..5_500 {
        if round == 500 {
            times = Default::default();
        }
        timed(&mut times[0], cycle_by_hand(&mut row)).await;
        timed(&mut times[1], cycle(&lock)).await;
        timed(&mut times[2], cycle_by_hand(&mut get_lock)).await;
        if round % 5 == 0 {
            timed(&mut times[3], cycle(&each)).await;
            timed(&mut times[4], cycle(&lease)).await;
        }
    }
    let names = [
        "FOR UPDATE by hand",
        "lockkit",
        "GET_LOCK by hand",
        "lockkit, a durable write each",
        "lockkit, mode=lease",
    ];
    report(
        "acquire and release, one task",
        names.into_iter().zip(times).collect(),
    );
}

async fn sixteen_names(server: &MySql) {
    let client = client(server, "").await;
    let mut rows = Vec::new();
    let mut locks = Vec::new();
    for index in 0..16 {
        let name = format!("of sixteen {index}");
        rows.push(row(server, &name).await);
        locks.push(client.lock(name).expect("a name"));
    }
    let mut times: [Times; 2] = Default::default();
    for round in 0..600 {
        if round == 100 {
            times = Default::default();
        }
        timed(&mut times[0], async {
            join_all(rows.iter_mut().map(cycle_by_hand)).await;
        })
        .await;
        timed(&mut times[1], async {
            join_all(locks.iter().map(cycle)).await;
        })
        .await;
    }
    let names = ["FOR UPDATE by hand", "lockkit"];
    report(
        "acquire and release, sixteen at once, a name each",
        names.into_iter().zip(times).collect(),
    );
}

/// From the release by one client to the grant to another that waits.
async fn hand_off(server: &Arc<MySql>) {
    let mut times: [Times; 4] = Default::default();
    let name = "hand-off";
    let (mut a, mut b) = (row(server, name).await, row(server, name).await);
    let mut pairs = Vec::new();
    for parameters in ["", "?mode=lease"] {
        let (a, b) = (client(server, parameters).await, client(server, parameters).await);
        pairs.push((a.lock(name).expect("a name"), b.lock(name).expect("a name")));
    }
    let pause = || tokio::time::sleep(Duration::from_millis(2));
    for round in 0..330 {
        if round == 30 {
            times = Default::default();
        }
        take(&mut a).await;
        let waiter = tokio::spawn(async move {
            take(&mut b).await;
            let granted = Instant::now();
            give_back(&mut b).await;
            (b, granted)
        });
        pause().await;
        let released = Instant::now();
        give_back(&mut a).await;
        let (back, granted) = waiter.await.expect("granted");
        b = back;
        times[0].0.push(granted - released);
        for (index, (a, b)) in pairs.iter().enumerate() {
            let guard = a.acquire().await.expect("granted");
            let b = b.clone();
            let waiter = tokio::spawn(async move {
                let guard = b.acquire().await.expect("granted");
                let granted = Instant::now();
                guard.release().await.expect("released");
                granted
            });
            pause().await;
            let released = Instant::now();
            guard.release().await.expect("released");
            times[index + 1].0.push(waiter.await.expect("granted") - released);
        }
        // The same between two tasks of one client.
        let lock = &pairs[0].0;
        let guard = lock.acquire().await.expect("granted");
        let waiting = lock.clone();
        let waiter = tokio::spawn(async move {
            let guard = waiting.acquire().await.expect("granted");
            let granted = Instant::now();
            guard.release().await.expect("released");
            granted
        });
        pause().await;
        let released = Instant::now();
        guard.release().await.expect("released");
        times[3].0.push(waiter.await.expect("granted") - released);
    }
    let names = [
        "FOR UPDATE by hand",
        "lockkit, two clients",
        "lockkit, mode=lease, two clients",
        "lockkit, two tasks of one client",
    ];
    report(
        "from release to the next grant",
        names.into_iter().zip(times).collect(),
    );
}

/// Sixteen clients want one name, again and again: how many locks a second, how long one waits at worst, and how evenly
/// they get it. In turns of half a second each.
async fn sixteen_clients(server: &Arc<MySql>) {
    const CLIENTS: usize = 16;
    const TURNS: u32 = 6;
    const TURN: Duration = Duration::from_millis(500);
    let name = "of sixteen clients";
    let (mut rows, mut names) = (Vec::new(), Vec::new());
    let (mut plain, mut lease) = (Vec::new(), Vec::new());
    for _ in 0..CLIENTS {
        rows.push(Mutex::new(row(server, name).await));
        names.push(Mutex::new(named(server, name).await));
        plain.push(client(server, "").await.lock(name).expect("a name"));
        lease.push(client(server, "?mode=lease").await.lock(name).expect("a name"));
    }
    let mut runs: [Vec<Vec<Duration>>; 4] = std::array::from_fn(|_| vec![Vec::new(); CLIENTS]);
    for _ in 0..TURNS {
        turn(TURN, &rows, &mut runs[0], granted_by_hand).await;
        turn(TURN, &names, &mut runs[1], granted_by_hand).await;
        for (locks, run) in [&plain, &lease].into_iter().zip(2..) {
            turn(TURN, locks, &mut runs[run], async |lock| {
                let guard = lock.acquire().await.expect("granted");
                let granted = Instant::now();
                guard.release().await.expect("released");
                granted
            })
            .await;
        }
    }
    println!(
        "\nsixteen clients on one name, {} s each",
        (TURN * TURNS).as_secs()
    );
    let names = [
        "FOR UPDATE by hand",
        "GET_LOCK by hand",
        "lockkit",
        "lockkit, mode=lease",
    ];
    for (name, waits) in names.into_iter().zip(runs) {
        let counts = waits.iter().map(Vec::len);
        let (fewest, most) = (counts.clone().min(), counts.clone().max());
        let rate = counts.sum::<usize>() as u128 * 1_000 / (TURN * TURNS).as_millis();
        let mut waits = Times(waits.concat());
        println!(
            "  {name:32} {rate:>8}/s  wait: median {:>10.1?}  longest {:>10.1?}  each client {} to {} times",
            waits.median(),
            waits.worst(),
            fewest.unwrap_or_default(),
            most.unwrap_or_default(),
        );
    }
}

/// A cycle, and when it was granted.
async fn granted_by_hand(by_hand: &Mutex<impl Contender<Held = ()>>) -> Instant {
    let mut by_hand = by_hand.lock().await;
    take(&mut *by_hand).await;
    let granted = Instant::now();
    give_back(&mut *by_hand).await;
    granted
}

/// For as long as `lasts`, each contender does its cycle, which says when it was granted; how long each of them waited.
async fn turn<T>(
    lasts: Duration,
    contenders: &[T],
    waits: &mut [Vec<Duration>],
    cycle: impl AsyncFn(&T) -> Instant,
) {
    let end = Instant::now() + lasts;
    let all = contenders.iter().zip(waits).map(async |(contender, waits)| {
        while Instant::now() < end {
            let asked = Instant::now();
            waits.push(cycle(contender).await - asked);
        }
    });
    join_all(all).await;
}

/// Two hundred wait, and each holds for an instant: how long until all have had it.
async fn two_hundred_waiters(server: &Arc<MySql>) {
    const WAITERS: usize = 200;
    let client = client(server, "").await;
    let lock = client.lock("crowd").expect("a name");
    let mut rows = Vec::new();
    for _ in 0..WAITERS {
        rows.push(row(server, "crowd").await);
    }
    let mut gate = row(server, "crowd").await;
    let mut times: [Times; 2] = Default::default();
    for _ in 0..5 {
        take(&mut gate).await;
        let waiters: Vec<_> = std::mem::take(&mut rows)
            .into_iter()
            .map(|mut row| {
                tokio::spawn(async move {
                    cycle_by_hand(&mut row).await;
                    row
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(100)).await;
        timed(&mut times[0], async {
            give_back(&mut gate).await;
            for waiter in waiters {
                rows.push(waiter.await.expect("granted"));
            }
        })
        .await;
        let guard = lock.acquire().await.expect("granted");
        let waiters: Vec<_> = (0..WAITERS)
            .map(|_| {
                let lock = lock.clone();
                tokio::spawn(async move { cycle(&lock).await })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(100)).await;
        timed(&mut times[1], async {
            guard.release().await.expect("released");
            join_all(waiters).await;
        })
        .await;
    }
    let names = ["FOR UPDATE by hand, 200 sessions", "lockkit, 200 tasks"];
    report(
        "two hundred waiters, all served",
        names.into_iter().zip(times).collect(),
    );
}
