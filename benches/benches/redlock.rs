//! Redlock, beside the raw commands and beside `rslock` on the same masters, all taking turns.
//!
//! Tables of medians: what a stopped master or a contended lock costs cannot be told from a mean.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use lockkit::{Lock, LockClient};
use lockkit_testbed::redis::{RedisServer, missing};
use redis::aio::MultiplexedConnection;
use rslock::LockManager;
use tokio::runtime::{Builder, Runtime};

const TTL: Duration = Duration::from_secs(30);
const ROUNDS: usize = 15;
const DELETE_IF_MINE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// Whoever takes a lock and gives it back.
#[derive(Clone)]
enum Contender {
    Lockkit(Lock),
    Rslock(LockManager, String),
    /// The commands to all masters at once, and all of their answers: no token, no renewal, no notice of loss.
    Raw(Vec<MultiplexedConnection>, String, Arc<str>),
}

impl Contender {
    async fn cycle(&mut self) {
        match self {
            Self::Lockkit(lock) => {
                let guard = lock.acquire().await.expect("granted");
                // On a busy machine, masters may be late; the release goes on in the background.
                if let Err(error) = guard.release().await {
                    assert!(error.is_transient() || error.is_lost(), "{error}");
                }
            }
            Self::Rslock(manager, name) => {
                // It gives up after three tries, unless it is told otherwise.
                let lock = loop {
                    if let Ok(lock) = manager.lock(name.as_bytes(), TTL).await {
                        break lock;
                    }
                };
                manager.unlock(&lock).await;
            }
            Self::Raw(masters, name, digest) => {
                let mine = "0123456789abcdef0123456789abcdef";
                let mut set = redis::cmd("SET");
                set.arg(&*name).arg(mine).arg("NX").arg("PX").arg(30_000);
                to_all(masters, &set).await;
                let mut delete = redis::cmd("EVALSHA");
                delete.arg(&**digest).arg(1).arg(&*name).arg(mine);
                to_all(masters, &delete).await;
            }
        }
    }
}

async fn to_all(masters: &mut [MultiplexedConnection], command: &redis::Cmd) {
    let replies = join_all(
        masters
            .iter_mut()
            .map(|master| master.send_packed_command(command)),
    )
    .await;
    for reply in replies {
        assert_ne!(reply.expect("an answer"), redis::Value::Nil);
    }
}

fn start(masters: usize) -> Vec<RedisServer> {
    (0..masters)
        .map(|_| RedisServer::plain().expect("a server"))
        .collect()
}

fn urls(masters: &[RedisServer]) -> Vec<&str> {
    masters.iter().map(RedisServer::url).collect()
}

async fn connect(masters: &[RedisServer]) -> LockClient {
    let url = match urls(masters).as_slice() {
        [one] => (*one).to_owned(),
        several => format!(
            "redlock://{}",
            several
                .iter()
                .map(|url| url.trim_start_matches("redis://"))
                .collect::<Vec<_>>()
                .join(",")
        ),
    };
    lockkit::connect(&url).await.expect("masters")
}

async fn lockkit(masters: &[RedisServer]) -> Contender {
    Contender::Lockkit(connect(masters).await.lock("one").expect("a name"))
}

fn rslock(masters: &[RedisServer]) -> Contender {
    Contender::Rslock(LockManager::new(urls(masters)), "rslock".to_owned())
}

async fn raw(masters: &[RedisServer]) -> Contender {
    let mut connections = Vec::new();
    let mut digest = String::new();
    for master in masters {
        let client = redis::Client::open(master.url()).expect("a client");
        let mut connection = client
            .get_multiplexed_async_connection()
            .await
            .expect("a connection");
        digest = redis::cmd("SCRIPT")
            .arg("LOAD")
            .arg(DELETE_IF_MINE)
            .query_async(&mut connection)
            .await
            .expect("a digest");
        connections.push(connection);
    }
    Contender::Raw(connections, "raw".to_owned(), digest.into())
}

/// The medians of several rounds in which the contenders took turns, and the ratios to the first of them.
fn in_turns(runtime: &Runtime, title: &str, cycles: usize, contenders: &[(&str, Contender)]) {
    let mut medians = vec![Vec::new(); contenders.len()];
    for _ in 0..ROUNDS {
        for ((_, contender), medians) in contenders.iter().zip(&mut medians) {
            let mut contender = contender.clone();
            let task = runtime.spawn(async move {
                let mut times = Vec::new();
                for _ in 0..cycles {
                    let started = Instant::now();
                    contender.cycle().await;
                    times.push(started.elapsed());
                }
                median(times)
            });
            medians.push(runtime.block_on(task).expect("no panic"));
        }
    }
    println!("\n{title}: medians of {ROUNDS} rounds in turns");
    let first = medians[0].clone();
    for ((name, _), medians) in contenders.iter().zip(medians) {
        let mut ratios: Vec<f64> = medians
            .iter()
            .zip(&first)
            .map(|(own, first)| own.as_secs_f64() / first.as_secs_f64())
            .collect();
        ratios.sort_by(f64::total_cmp);
        println!(
            "  {name:22} p50 {:>9.1?}   {:.2} × {}",
            median(medians),
            ratios[ratios.len() / 2],
            contenders[0].0
        );
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn uncontended(runtime: &Runtime) {
    for count in [1, 3, 5, 7] {
        let masters = start(count);
        let contenders = runtime.block_on(async {
            [
                ("rslock", rslock(&masters)),
                ("raw", raw(&masters).await),
                ("lockkit", lockkit(&masters).await),
            ]
        });
        let title = format!("{count} masters, uncontended, 1 task");
        in_turns(runtime, &title, 500, &contenders);
    }
}

/// Beside five healthy masters, so that they can take turns.
fn one_stopped(runtime: &Runtime) {
    let (healthy, stopped) = (start(5), start(5));
    let contenders = runtime.block_on(async {
        let contenders = [
            ("five healthy", lockkit(&healthy).await),
            ("one of five stopped", lockkit(&stopped).await),
        ];
        stopped[4].pause().expect("paused");
        contenders
    });
    in_turns(runtime, "5 masters, uncontended, lockkit", 500, &contenders);
    let mut theirs = rslock(&stopped);
    runtime.block_on(async {
        let mut times = Vec::new();
        for _ in 0..5 {
            let started = Instant::now();
            theirs.cycle().await;
            times.push(started.elapsed());
        }
        println!("  rslock, one of five stopped: p50 {:.1?}", median(times));
    });
    stopped[4].resume().expect("resumed");
}

/// Several processes' worth of clients, who want the same lock.
fn contended(runtime: &Runtime) {
    const CLIENTS: usize = 8;
    const WINDOW: Duration = Duration::from_millis(500);
    for count in [1, 3, 5, 7] {
        let masters = start(count);
        let (ours, theirs) = runtime.block_on(async {
            let mut ours = Vec::new();
            for _ in 0..CLIENTS {
                ours.push(lockkit(&masters).await);
            }
            let theirs: Vec<_> = (0..CLIENTS).map(|_| rslock(&masters)).collect();
            (ours, theirs)
        });
        println!(
            "\n{count} masters, {CLIENTS} clients on one lock: median cycles/s of {ROUNDS} rounds in turns"
        );
        let mut rates = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (contenders, rates) in [&ours, &theirs].into_iter().zip(&mut rates) {
                rates.push(runtime.block_on(rate(contenders, WINDOW)));
            }
        }
        for (name, mut rates) in ["lockkit", "rslock"].into_iter().zip(rates) {
            rates.sort_unstable();
            println!("  {name:22} {:>6}", rates[rates.len() / 2]);
        }
    }
}

/// Cycles per second of all of them together.
async fn rate(contenders: &[Contender], window: Duration) -> u64 {
    let over = Arc::new(AtomicBool::new(false));
    let count = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = contenders
        .iter()
        .cloned()
        .map(|mut contender| {
            let (over, count) = (over.clone(), count.clone());
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    contender.cycle().await;
                    if !over.load(Ordering::Relaxed) {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    tokio::time::sleep(window).await;
    over.store(true, Ordering::Relaxed);
    let counted = count.load(Ordering::Relaxed);
    for task in tasks {
        task.await.expect("no panic");
    }
    counted * 1_000 / u64::try_from(window.as_millis()).unwrap_or(u64::MAX)
}

fn main() {
    if let Some(missing) = missing() {
        println!("skipped: {missing}");
        return;
    }
    let runtime = Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let wanted = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with("--"));
    for (name, table) in [
        ("uncontended", uncontended as fn(&Runtime)),
        ("stopped", one_stopped),
        ("contended", contended),
    ] {
        if wanted.as_ref().is_none_or(|wanted| wanted == name) {
            table(&runtime);
        }
    }
}
