//! Acquire, work while the lock is held, release.
//!
//! `cargo run --example quickstart [URL]`, for instance with `file:///tmp/locks`. Default: `memory:`.

use std::time::Duration;

use lockkit::prelude::*;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    let client = lockkit::connect(&url).await?;
    let lock = client.lock("orders/42")?;

    let guard = lock.acquire().await?;
    println!("holding `{}` with {:?}", guard.name(), guard.token());
    assert!(lock.try_acquire().await?.is_none(), "one at a time");

    // Stops with `Error::Lost` if the lock is lost before the work is done.
    let parcels = guard.run(pack()).await?;
    println!("packed {parcels} parcels");
    let first = guard.token();
    guard.release().await?;

    // The same in one step. A later holder has a higher token.
    let second = lock.with_lock(|held| async move { held.token() }).await?;
    assert!(second > first);
    println!("held it again with {second:?}");

    client.close(Duration::from_secs(5)).await?;
    Ok(())
}

async fn pack() -> u32 {
    tokio::time::sleep(Duration::from_millis(50)).await;
    3
}
