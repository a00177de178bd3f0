//! Work that is run under a lock, and the loss that comes while its last step runs.

use std::{error::Error as _, time::Duration};

use lockkit_core::{
    AcquireOptions, DistributedLockExt, Error, HoldEnd, Lock, LockClient, LossReason, MemoryBackend,
    ReentrantLock, RunError, spi::chain,
};

/// The work has to begin within it.
const TTL: Duration = Duration::from_secs(2);

fn unrenewed() -> Lock {
    let options = AcquireOptions::new().ttl(TTL).renew(false);
    let client = LockClient::new(MemoryBackend::new());
    client.lock("a").unwrap().with_options(options)
}

/// One step, during which the lease ends.
#[expect(clippy::unused_async, reason = "a step has no await")]
async fn long_step() -> &'static str {
    std::thread::sleep(TTL + Duration::from_millis(100));
    "done"
}

fn expired(outcome: Result<&'static str, RunError<&'static str>>) -> Option<&'static str> {
    let err = outcome.unwrap_err();
    let Error::Lost { reason, .. } = &err.error else {
        panic!("{err:?}");
    };
    assert_eq!(*reason, LossReason::Expired);
    err.output
}

#[tokio::test]
async fn a_finished_output_comes_with_the_loss() {
    let lock = unrenewed();
    let guard = lock.acquire().await.unwrap();
    assert_eq!(expired(guard.run(long_step()).await), Some("done"));
    assert_eq!(expired(guard.run(long_step()).await), None, "it is not begun");
    drop(guard);
    let guard = lock.acquire().await.unwrap();
    assert_eq!(expired(guard.view().run(long_step()).await), Some("done"));
    drop(guard);
    assert_eq!(expired(lock.with_lock(|_| long_step()).await), Some("done"));
}

#[tokio::test]
async fn a_loss_that_the_release_finds_comes_with_the_output() {
    let backend = MemoryBackend::new();
    let lock = LockClient::new(backend.clone()).lock("a").unwrap();
    let outcome = lock.with_lock(async |_| backend.revoke("a")).await;
    let err = outcome.unwrap_err();
    assert!(err.error.is_lost(), "{err}");
    assert_eq!(err.output, Some(true));
}

/// A release does not stop the work of a view.
#[tokio::test]
async fn a_view_tells_a_release_from_a_loss() {
    let lock = LockClient::new(MemoryBackend::new()).lock("a").unwrap();
    let guard = lock.acquire().await.unwrap();
    let view = guard.view();
    let work = async {
        guard.release().await.unwrap();
        7
    };
    let err = view.run(work).await.unwrap_err();
    assert!(matches!(err.error, Error::Released { .. }), "{err}");
    assert!(!err.error.is_lost());
    assert_eq!(err.output, Some(7));
    assert_eq!(view.ended().await, HoldEnd::Released);
}

#[tokio::test]
async fn a_run_error_is_an_error_like_others() {
    async fn to_ours(lock: &Lock) -> lockkit_core::Result<&'static str> {
        Ok(lock.acquire().await?.run(long_step()).await?)
    }
    async fn to_any(lock: &Lock) -> Result<&'static str, Box<dyn std::error::Error + Send + Sync>> {
        Ok(lock.acquire().await?.run(long_step()).await?)
    }
    let lock = unrenewed();
    assert!(to_ours(&lock).await.unwrap_err().is_lost());
    let any = to_any(&lock).await.unwrap_err();
    assert!(any.to_string().contains("was lost"), "{any}");
    assert!(any.to_string().ends_with("done by then"), "{any}");

    let backend = MemoryBackend::new();
    let lock = LockClient::new(backend.clone()).lock("a").unwrap();
    backend.fail_next(lockkit_core::memory::FaultPoint::Attempt, 1);
    let options = AcquireOptions::new().wait(Duration::ZERO);
    let never_begun = lock.with_options(options).with_lock(|_| long_step()).await;
    let err = never_begun.unwrap_err();
    assert!(err.error.is_transient() && err.output.is_none(), "{err}");
    assert!(err.source().is_some(), "{}", chain(&err));
}

/// `client.lock("a")?;` holds nothing, and the compiler says so.
#[tokio::test]
#[deny(unfulfilled_lint_expectations)]
async fn a_lock_that_is_not_acquired_is_warned_of() {
    let client = LockClient::new(MemoryBackend::new());
    let lock = client.lock("a").unwrap();
    #[expect(unused_must_use, reason = "this is what it is about")]
    {
        client.lock("a").unwrap();
    }
    #[expect(unused_must_use, reason = "this is what it is about")]
    {
        ReentrantLock::new(lock);
    }
}

#[cfg(feature = "blocking")]
#[test]
#[deny(unfulfilled_lint_expectations)]
fn a_blocking_lock_that_is_not_acquired_is_warned_of() {
    let client = lockkit_core::blocking::LockClient::new(MemoryBackend::new()).unwrap();
    #[expect(unused_must_use, reason = "this is what it is about")]
    {
        client.lock("a").unwrap();
    }
}
