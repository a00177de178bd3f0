//! Locks of one's own: pointers to locks, decorators, and the guards of mocks.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    AcquireOptions, DistributedLock, DistributedLockExt, Error, Lock, LockClient, LockGuard, LockId,
    LockName, LockState, LossReason, MemoryBackend, ReentrantLock, ReentrantOwner, Result, acquire_all,
    async_trait, memory::FaultPoint, try_acquire_all,
};

const SECOND: Duration = Duration::from_secs(1);

fn lock(name: &str) -> Lock {
    LockClient::new(MemoryBackend::new()).lock(name).unwrap()
}

/// A lock with its own way of everything, which notes what was called.
#[derive(Debug)]
struct Peculiar(Lock, Mutex<Vec<&'static str>>);

impl Peculiar {
    fn called(&self, method: &'static str) -> &Lock {
        self.1.lock().unwrap().push(method);
        &self.0
    }
}

#[async_trait]
impl DistributedLock for Peculiar {
    fn id(&self) -> &LockId {
        self.called("id").id()
    }

    fn name(&self) -> &LockName {
        self.called("name").name()
    }

    fn options(&self) -> &AcquireOptions {
        self.called("options").options()
    }

    async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        self.called("acquire_with").acquire_with(options).await
    }

    async fn acquire(&self) -> Result<LockGuard> {
        self.called("acquire").acquire().await
    }

    async fn try_acquire(&self) -> Result<Option<LockGuard>> {
        self.called("try_acquire").try_acquire().await
    }

    async fn acquire_timeout(&self, wait: Duration) -> Result<LockGuard> {
        self.called("acquire_timeout").acquire_timeout(wait).await
    }

    async fn inspect(&self) -> Result<LockState> {
        self.called("inspect").inspect().await
    }
}

/// Calls all methods through what is a lock by itself.
async fn use_as_a_lock<L: DistributedLock>(lock: L) {
    assert_eq!(lock.name(), lock.id().name());
    assert_eq!(lock.options(), &AcquireOptions::new());
    let guard = lock.acquire().await.unwrap();
    assert!(lock.try_acquire().await.unwrap().is_none());
    assert_eq!(lock.inspect().await.unwrap().holders[0].token, guard.token());
    guard.release().await.unwrap();
    lock.acquire_timeout(SECOND)
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let guard = lock.acquire_with(&AcquireOptions::new()).await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_pointer_to_a_lock_passes_all_on() {
    let peculiar = || Peculiar(lock("a"), Mutex::default());
    let borrowed = peculiar();
    use_as_a_lock(&borrowed).await;
    let expected = [
        "name",
        "id",
        "options",
        "acquire",
        "try_acquire",
        "inspect",
        "acquire_timeout",
        "acquire_with",
    ];
    assert_eq!(*borrowed.1.lock().unwrap(), expected);

    let shared = Arc::new(peculiar());
    let any: Arc<dyn DistributedLock> = shared.clone();
    use_as_a_lock(any).await;
    assert_eq!(*shared.1.lock().unwrap(), expected);

    let boxed: Box<dyn DistributedLock> = Box::new(shared.clone());
    use_as_a_lock(&boxed).await;
    use_as_a_lock(&&*boxed).await;
    use_as_a_lock(boxed).await;
    assert_eq!(*shared.1.lock().unwrap(), expected.repeat(4));
}

#[tokio::test]
async fn a_set_and_a_nested_hold_need_no_lock_of_their_own() {
    let (a, b) = (lock("a"), lock("b"));
    let any: [Box<dyn DistributedLock + '_>; 2] = [Box::new(&a), Box::new(&b)];
    let set = acquire_all(&[&any[0], &any[1]], &AcquireOptions::new())
        .await
        .unwrap();
    assert_eq!(set.guards().len(), 2);
    set.release().await.unwrap();
    let owner = ReentrantOwner::new();
    let reentrant = ReentrantLock::new(&a);
    let outer = reentrant.acquire(&owner).await.unwrap();
    assert_eq!(reentrant.acquire(&owner).await.unwrap().hold_count(), 2);
    outer.release().await.unwrap();
    any[0]
        .with_lock(async |held| assert!(held.is_held()))
        .await
        .unwrap();
}

/// A decorator that has no more than the trait asks for.
#[derive(Debug)]
struct Counted<L>(L, AtomicUsize);

#[async_trait]
impl<L: DistributedLock> DistributedLock for Counted<L> {
    fn id(&self) -> &LockId {
        self.0.id()
    }

    fn options(&self) -> &AcquireOptions {
        self.0.options()
    }

    async fn acquire_with(&self, options: &AcquireOptions) -> Result<LockGuard> {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.acquire_with(options).await
    }

    async fn inspect(&self) -> Result<LockState> {
        self.0.inspect().await
    }
}

#[tokio::test]
async fn a_decorator_sees_every_acquisition() {
    let counted = Counted(lock("a"), AtomicUsize::new(0));
    let seen = || counted.1.swap(0, Ordering::SeqCst);
    drop(counted.acquire().await.unwrap());
    drop(counted.try_acquire().await.unwrap());
    drop(counted.acquire_timeout(SECOND).await.unwrap());
    assert_eq!(seen(), 3);
    counted.with_lock(async |_| ()).await.unwrap();
    drop(acquire_all(&[&counted], &AcquireOptions::new()).await.unwrap());
    // The set is released in the background.
    let set = try_acquire_all(&[&counted], &AcquireOptions::new()).await;
    drop(set.unwrap());
    assert_eq!(seen(), 3);
    let reentrant = ReentrantLock::new(&counted);
    let owner = ReentrantOwner::new();
    let outer = reentrant.acquire(&owner).await.unwrap();
    drop(reentrant.acquire(&owner).await.unwrap());
    outer.release().await.unwrap();
    assert_eq!(seen(), 1, "a nested hold is no acquisition");
    assert_eq!(counted.name().as_str(), "a");
}

#[tokio::test(start_paused = true)]
async fn a_guard_for_a_mock_is_a_real_hold() {
    let server = MemoryBackend::new();
    let elsewhere = LockClient::new(server.clone()).lock("a").unwrap();
    let guard = server.guard("a").unwrap();
    assert!(elsewhere.try_acquire().await.unwrap().is_none());
    assert!(server.guard("a").unwrap_err().is_timeout());
    let before = guard.token();
    tokio::time::sleep(100 * SECOND).await;
    assert!(guard.is_held(), "it is renewed");
    guard.release().await.unwrap();
    let guard = server.guard("a").unwrap();
    assert!(guard.token() > before);
    assert!(server.revoke("a"));
    assert_eq!(guard.lost().await, LossReason::Revoked);
    drop(guard);
    let guard = server.guard("a").unwrap();
    drop(guard);
    elsewhere
        .acquire_timeout(SECOND)
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    assert!(matches!(server.guard(""), Err(Error::InvalidName { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_cannot_be_had_at_once_is_an_error() {
    let server = MemoryBackend::new();
    server.fail_next(FaultPoint::Attempt, 1);
    assert!(server.guard("a").unwrap_err().is_transient());
    server.delay(FaultPoint::Attempt, SECOND);
    assert!(server.guard("a").unwrap_err().is_transient());
    server.delay(FaultPoint::Attempt, Duration::ZERO);
    tokio::time::sleep(SECOND).await;
    // What the delayed attempt got is given back.
    server.guard("a").unwrap().release().await.unwrap();
    let outside = std::thread::spawn(move || server.guard("a"));
    let err = outside.join().unwrap().unwrap_err();
    assert!(
        matches!(err, Error::Backend { .. }) && !err.is_transient(),
        "{err}"
    );
}

#[tokio::test]
async fn a_mock_says_that_it_is_taken_as_a_lock_does() {
    let real = lock("a");
    let guard = real.acquire().await.unwrap();
    let real = real.acquire_timeout(Duration::ZERO).await.unwrap_err();
    let mocked = Error::timeout("memory", guard.name().clone(), Duration::ZERO);
    assert!(mocked.is_timeout() && real.is_timeout());
    assert_eq!(std::mem::discriminant(&mocked), std::mem::discriminant(&real));
}
