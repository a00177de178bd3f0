//! Waits for the lock `name` on the server of the URL given, says so, and says when it has it.

use std::time::Duration;

#[tokio::main(flavor = "current_thread")]
async fn main() -> lockkit::Result<()> {
    let url = std::env::args().nth(1).unwrap_or_default();
    let lock = lockkit::connect(&url).await?.lock("name")?;
    let mut acquiring = std::pin::pin!(lock.acquire());
    if tokio::time::timeout(Duration::from_millis(200), acquiring.as_mut())
        .await
        .is_err()
    {
        println!("waiting");
    }
    let guard = acquiring.await?;
    println!("granted");
    guard.release().await
}
