use std::{
    future::poll_fn,
    pin::pin,
    task::Poll,
    time::{Duration, Instant},
};

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

/// Awaits what should come soon. `what` says what that is.
///
/// # Panics
/// If it does not come within a minute.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(PATIENCE, work).await;
    done.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}

/// Polls `work` at most `polls` times, then drops it. Returns `None` if it was not done by then.
pub async fn poll_at_most<F: Future>(polls: usize, work: F) -> Option<F::Output> {
    let mut work = pin!(work);
    let mut left = polls;
    poll_fn(|context| {
        left = left.saturating_sub(1);
        match work.as_mut().poll(context) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
