//! Measures one client of Redlock with many holds that renews and releases all of them at once, on five masters of this machine.
//!
//! ```sh
//! cargo run --release -p lockkit-redis --example redlock_burst -- 20000
//! ```

use std::{collections::BTreeMap, time::Instant};

use futures_util::{StreamExt as _, future::join_all, stream};
use lockkit_core::{AcquireOptions, LockClient, LockGuard, Result, spi::chain};
use lockkit_redis::{RedlockBackend, RedlockConfig};
use lockkit_testbed::redis::RedisServer;

#[tokio::main]
async fn main() {
    let count: usize = match std::env::args().nth(1).map(|count| count.parse()) {
        None => 10_000,
        Some(Ok(count)) => count,
        Some(Err(_)) => {
            eprintln!("usage: redlock_burst [<number of holds>]");
            return;
        }
    };
    let masters: Vec<_> = (0..5)
        .map(|_| RedisServer::builder().start().expect("redis-server"))
        .collect();
    let hosts: Vec<_> = masters.iter().map(|master| master.addr().to_string()).collect();
    let config = RedlockConfig::new(format!("redlock://{}", hosts.join(",")));
    let backend = RedlockBackend::connect(config).await.expect("connected");
    let client = LockClient::new(backend);
    let client = &client;

    let began = Instant::now();
    let held: Vec<_> = stream::iter(0..count)
        .map(|n| async move {
            let options = AcquireOptions::new().ttl(std::time::Duration::from_secs(60));
            client.lock(n.to_string())?.with_options(options).acquire().await
        })
        .buffer_unordered(64)
        .collect()
        .await;
    let held = report("64 acquired at a time", began, held);

    let began = Instant::now();
    let renewals = spawned(held.into_iter().map(|guard| async move {
        let renewed = guard.renew().await;
        (guard, renewed)
    }));
    let (held, renewed): (Vec<_>, Vec<_>) = renewals.await.into_iter().unzip();
    report("renewed at once", began, renewed);

    let began = Instant::now();
    let released = spawned(held.into_iter().map(LockGuard::release)).await;
    report("released at once", began, released);
}

/// Runs each in a task of its own.
async fn spawned<T: Send + 'static>(
    futures: impl Iterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    let tasks: Vec<_> = futures.map(tokio::spawn).collect();
    let ended = join_all(tasks).await;
    ended.into_iter().map(|ended| ended.expect("no panic")).collect()
}

/// Prints how many succeeded and how long all took. Returns what they came to.
fn report<T>(what: &str, began: Instant, outcomes: Vec<Result<T>>) -> Vec<T> {
    let (took, all) = (began.elapsed(), outcomes.len());
    let (mut well, mut failures) = (Vec::new(), BTreeMap::<String, usize>::new());
    for outcome in outcomes {
        match outcome {
            Ok(outcome) => well.push(outcome),
            Err(error) => {
                let text = chain(&error);
                let why = text.split("take part").last().unwrap_or_default();
                *failures.entry(why.chars().take(60).collect()).or_default() += 1;
            }
        }
    }
    println!("{all} {what}: {} failed, {took:.2?}", all - well.len());
    for (why, count) in failures {
        println!("    {count} times: {why}");
    }
    well
}
