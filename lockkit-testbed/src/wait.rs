use std::time::{Duration, Instant};

/// The time in which a condition comes true: far longer than on the busiest machine, since nobody waits for it
/// unless the test fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` holds, asking again every few milliseconds. `what` says what was waited for.
///
/// # Panics
/// If it does not hold within a minute.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
