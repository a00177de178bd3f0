//! The trait that hides which client makes the locks.

use std::{fmt, sync::Arc};

use crate::{DistributedLock, LockClient, Result};

/// A source of locks by name, which is a [`LockClient`] of any backend, or stands before one. Code that makes its locks' names itself, such
/// as `orders/42`, keeps it as `Arc<dyn LockProvider>`: it can then be decorated and mocked as a [`DistributedLock`] can.
///
/// A reference, a `Box` and an `Arc` of a provider are providers, too. A [`LockClient`] has methods of the same names: call those where
/// you have the client itself, since its [`Lock`](crate::Lock)s can do more, and cost one allocation less for each acquisition.
///
/// ```
/// use std::sync::Arc;
///
/// use lockkit_core::{DistributedLock, LockClient, LockProvider, MemoryBackend, Result};
///
/// /// What the application does: it knows names, and no backend.
/// async fn ship(locks: &dyn LockProvider, order: u64) -> Result<bool> {
///     let Some(guard) = locks.lock(&format!("orders/{order}"))?.try_acquire().await? else {
///         return Ok(false); // somebody else ships it
///     };
///     guard.release().await?;
///     Ok(true)
/// }
///
/// /// A decorator: each tenant has locks of its own.
/// #[derive(Debug)]
/// struct Tenant<P> {
///     locks: P,
///     name: String,
/// }
///
/// impl<P: LockProvider> LockProvider for Tenant<P> {
///     fn lock(&self, name: &str) -> Result<Arc<dyn DistributedLock>> {
///         self.locks.lock(&format!("{}/{name}", self.name))
///     }
///
///     fn shared(&self, name: &str) -> Result<Arc<dyn DistributedLock>> {
///         self.locks.shared(&format!("{}/{name}", self.name))
///     }
///
///     fn semaphore(&self, name: &str, permits: u32) -> Result<Arc<dyn DistributedLock>> {
///         self.locks.semaphore(&format!("{}/{name}", self.name), permits)
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let client = LockClient::new(MemoryBackend::new());
/// let (one, two) = (
///     Tenant { locks: &client, name: "one".to_owned() },
///     Tenant { locks: &client, name: "two".to_owned() },
/// );
/// let held = one.lock("orders/42")?.acquire().await?;
/// assert_eq!(held.name().as_str(), "one/orders/42");
/// assert!(!ship(&one, 42).await?);
/// assert!(ship(&two, 42).await?);
/// # Ok::<(), lockkit_core::Error>(())
/// # }).unwrap();
/// ```
pub trait LockProvider: fmt::Debug + Send + Sync {
    /// Returns the lock of this name, in exclusive mode. Does no I/O and holds nothing.
    ///
    /// # Errors
    /// [`Error::InvalidName`](crate::Error::InvalidName), as [`LockClient::lock`].
    fn lock(&self, name: &str) -> Result<Arc<dyn DistributedLock>>;

    /// Returns the lock of this name in shared mode, as [`Lock::shared`](crate::Lock::shared). Does no I/O and holds nothing.
    ///
    /// # Errors
    /// As [`lock`](Self::lock). An acquisition is [`Error::Unsupported`](crate::Error::Unsupported) where there is no such mode.
    fn shared(&self, name: &str) -> Result<Arc<dyn DistributedLock>>;

    /// Returns the semaphore of this name, which up to `permits` holders have at once. Does no I/O and holds nothing.
    ///
    /// # Errors
    /// As [`LockClient::semaphore`]. An acquisition is [`Error::Unsupported`](crate::Error::Unsupported) where there are none.
    fn semaphore(&self, name: &str, permits: u32) -> Result<Arc<dyn DistributedLock>>;
}

impl LockProvider for LockClient {
    fn lock(&self, name: &str) -> Result<Arc<dyn DistributedLock>> {
        Ok(Arc::new(LockClient::lock(self, name)?))
    }

    fn shared(&self, name: &str) -> Result<Arc<dyn DistributedLock>> {
        Ok(Arc::new(LockClient::lock(self, name)?.shared()))
    }

    fn semaphore(&self, name: &str, permits: u32) -> Result<Arc<dyn DistributedLock>> {
        Ok(Arc::new(LockClient::semaphore(self, name, permits)?))
    }
}

/// Implements the trait for a pointer to a provider.
macro_rules! pass_on_through {
    ($($pointer:ty),+) => {$(
        impl<T: LockProvider + ?Sized> LockProvider for $pointer {
            fn lock(&self, name: &str) -> Result<Arc<dyn DistributedLock>> {
                (**self).lock(name)
            }

            fn shared(&self, name: &str) -> Result<Arc<dyn DistributedLock>> {
                (**self).shared(name)
            }

            fn semaphore(&self, name: &str, permits: u32) -> Result<Arc<dyn DistributedLock>> {
                (**self).semaphore(name, permits)
            }
        }
    )+};
}

pass_on_through!(&T, Box<T>, Arc<T>);
