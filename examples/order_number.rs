//! Ten tasks draw order numbers from a counter in a file: first without any protection, then under a lock.
//!
//! `cargo run --example order_number [URL]`. Default: `memory:`. It fails if there are no duplicates without the lock,
//! or if there are any with it.

use std::{
    collections::BTreeSet,
    error::Error,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use lockkit::{FencingToken, Lock};
use tokio::{sync::Barrier, task::JoinSet};

const TASKS: usize = 10;
const DRAWS: usize = 10;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

// With one thread, the pause between reading and writing does the harm, and does it each time.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    let dir = tempfile::tempdir()?;
    let counter = dir.path().join("counter");

    fs::write(&counter, "0")?;
    let numbers: Vec<u64> = draw_all(&counter, None)
        .await?
        .into_iter()
        .map(|d| d.number)
        .collect();
    let different = numbers.iter().collect::<BTreeSet<_>>().len();
    let duplicates = numbers.len() - different;
    println!(
        "without the lock: {} numbers drawn, {duplicates} of them duplicates",
        numbers.len()
    );
    assert!(duplicates > 0, "the counter is unprotected");

    let client = lockkit::connect(&url).await?;
    fs::write(&counter, "0")?;
    let mut draws = draw_all(&counter, Some(client.lock("order-number")?)).await?;
    draws.sort_by_key(|draw| draw.token);
    let in_order = draws
        .iter()
        .map(|draw| draw.number)
        .eq(1..=(TASKS * DRAWS) as u64);
    println!(
        "with the lock:    {} numbers drawn, in order of the tokens: {in_order}",
        draws.len()
    );
    assert!(
        in_order,
        "every number once, and in the order in which the lock was granted"
    );

    client.close(Duration::from_secs(5)).await?;
    Ok(())
}

struct Draw {
    number: u64,
    token: Option<FencingToken>,
}

/// Lets every task draw its numbers. All of them begin together.
async fn draw_all(counter: &Path, lock: Option<Lock>) -> Result<Vec<Draw>> {
    let start = Arc::new(Barrier::new(TASKS));
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (start, counter, lock) = (start.clone(), counter.to_owned(), lock.clone());
        tasks.spawn(async move {
            start.wait().await;
            let mut drawn = Vec::with_capacity(DRAWS);
            for _ in 0..DRAWS {
                drawn.push(draw(&counter, lock.as_ref()).await?);
            }
            Ok(drawn)
        });
    }
    let drawn = tasks.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(drawn.into_iter().flatten().collect())
}

async fn draw(counter: &PathBuf, lock: Option<&Lock>) -> Result<Draw> {
    let guard = match lock {
        Some(lock) => Some(lock.acquire().await?),
        None => None,
    };
    let number = fs::read_to_string(counter)?.parse::<u64>()? + 1;
    // Stands for anything that takes time between reading and writing.
    tokio::time::sleep(Duration::from_millis(1)).await;
    fs::write(counter, number.to_string())?;
    let token = guard.as_ref().map(lockkit::LockGuard::token);
    if let Some(guard) = guard {
        guard.release().await?;
    }
    Ok(Draw { number, token })
}
