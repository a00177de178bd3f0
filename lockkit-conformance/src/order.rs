//! The order in which a backend grants, asked of its claims themselves.

use std::time::Duration;

use lockkit_core::{
    LockName, Result,
    spi::{Backend, ClaimRequest, Mode, OwnerId},
};

/// Asserts that a free lock goes to the first that waits for it, although the second asks before. The driver lets only one claim of
/// a client wait, so this is asked of the backend itself. Lock `a` has to be free, and nobody else may use it.
///
/// # Errors
/// Those of the backend.
///
/// # Panics
/// If the second waiter is granted the lock.
pub async fn grants_in_order(backend: &impl Backend) -> Result<()> {
    const PATIENCE: Duration = Duration::from_millis(1);
    const TTL: Duration = Duration::from_secs(30);

    let mut claims = Vec::new();
    for owner in 1..=3 {
        let request = ClaimRequest::new(LockName::new("a")?, Mode::Exclusive, TTL, OwnerId::new(owner));
        let mut claim = backend.claim(&request).await?;
        let granted = claim.attempt(PATIENCE).await?.is_some();
        assert_eq!(granted, owner == 1);
        claims.push(claim);
    }
    claims[0].release().await?;
    // The second waiter asks before the first does.
    let second = claims[2].attempt(PATIENCE).await?;
    assert!(second.is_none(), "it overtook the first");
    Ok(())
}
