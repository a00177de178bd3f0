//! Locks by name, from whatever provides them.

use std::sync::Arc;

use lockkit_core::{DistributedLock, Error, LockClient, LockKind, LockProvider, MemoryBackend, Result};

/// A mock of what makes locks: every name is taken, but those of the server within.
#[derive(Debug)]
struct Taken;

impl LockProvider for Taken {
    fn lock(&self, name: &str) -> Result<Arc<dyn DistributedLock>> {
        let server = MemoryBackend::new();
        let client = LockClient::new(server.clone());
        // Its guard is forgotten: nobody ever releases the lock.
        std::mem::forget(server.guard(name)?);
        LockProvider::lock(&client, name)
    }

    fn shared(&self, name: &str) -> Result<Arc<dyn DistributedLock>> {
        self.lock(name)
    }

    fn semaphore(&self, _: &str, _: u32) -> Result<Arc<dyn DistributedLock>> {
        Err(Error::unsupported("mock", "semaphores"))
    }
}

#[tokio::test]
async fn a_client_provides_its_own_locks() {
    let client = LockClient::new(MemoryBackend::new());
    let providers: [Arc<dyn LockProvider>; 3] = [
        Arc::new(client.clone()),
        Arc::new(Box::new(client.clone())),
        Arc::new(Arc::new(client.clone()) as Arc<dyn LockProvider>),
    ];
    for locks in providers {
        assert_eq!(locks.lock("a").unwrap().id(), client.lock("a").unwrap().id());
        let guard = locks.lock("a").unwrap().acquire().await.unwrap();
        assert!(client.lock("a").unwrap().try_acquire().await.unwrap().is_none());
        assert!(locks.shared("a").unwrap().try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();

        let readers = [locks.shared("a").unwrap(), locks.shared("a").unwrap()];
        let _first = readers[0].acquire().await.unwrap();
        assert!(readers[1].try_acquire().await.unwrap().is_some());
        assert!(locks.lock("a").unwrap().try_acquire().await.unwrap().is_none());

        let permits = locks.semaphore("a", 1).unwrap();
        assert_eq!(permits.id().kind(), LockKind::Semaphore);
        let _permit = permits.acquire().await.unwrap();
        assert!(permits.try_acquire().await.unwrap().is_none());
        assert_eq!(permits.inspect().await.unwrap().holders.len(), 1);
    }
}

#[tokio::test]
async fn a_provider_refuses_bad_names_as_its_client_does() {
    let locks: Arc<dyn LockProvider> = Arc::new(LockClient::new(MemoryBackend::new()));
    for refused in [locks.lock(""), locks.shared(""), locks.semaphore("", 2)] {
        assert!(matches!(refused, Err(Error::InvalidName { .. })), "{refused:?}");
    }
    let none = locks.semaphore("a", 0);
    assert!(matches!(none, Err(Error::InvalidOptions { .. })), "{none:?}");
}

#[tokio::test]
async fn a_provider_is_mocked() {
    let locks: Arc<dyn LockProvider> = Arc::new(Taken);
    assert!(locks.lock("a").unwrap().try_acquire().await.unwrap().is_none());
    assert!(locks.semaphore("a", 2).is_err());
}
