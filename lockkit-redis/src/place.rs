//! Wake-ups: which claim a push from the server is for.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::spi::OwnerId;
use tokio::{sync::Notify, time::Instant};

/// The claims of one client that a push may be for.
#[derive(Debug, Default)]
pub(crate) struct Places {
    by_owner: Mutex<HashMap<u128, Arc<Place>>>,
    queued: AtomicUsize,
}

/// One claim, as far as wake-ups are concerned.
#[derive(Debug, Default)]
pub(crate) struct Place {
    changed: Notify,
    woken: AtomicBool,
    ask_at: Mutex<Option<Instant>>,
}

impl Places {
    fn map(&self) -> MutexGuard<'_, HashMap<u128, Arc<Place>>> {
        self.by_owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, owner: OwnerId) -> Arc<Place> {
        self.map().entry(owner.get()).or_default().clone()
    }

    pub(crate) fn remove(&self, owner: OwnerId) {
        self.map().remove(&owner.get());
    }

    /// How many claims stand in a queue at the server.
    pub(crate) fn queued(&self) -> &AtomicUsize {
        &self.queued
    }

    /// A push: `<owner> <ms> <lock>`. Zero: the lock was passed to the owner, or its hold was ended. Otherwise it is
    /// the first in the queue now, and the lease before it lasts for so long. Returns owner and lock if the claim is
    /// not here any more but was passed something.
    pub(crate) fn push<'a>(&self, message: &'a [u8]) -> Option<(OwnerId, &'a [u8])> {
        let mut parts = message.splitn(3, |b| *b == b' ');
        let owner = std::str::from_utf8(parts.next()?).ok()?;
        let owner = OwnerId::new(u128::from_str_radix(owner, 16).ok()?);
        let ms: u64 = std::str::from_utf8(parts.next()?).ok()?.parse().ok()?;
        let lock = parts.next()?;
        let place = self.map().get(&owner.get()).cloned();
        match place {
            Some(place) if ms == 0 => place.wake(),
            Some(place) => place.ask_in(Some(Duration::from_millis(ms))),
            None if ms == 0 => return Some((owner, lock)),
            None => {}
        }
        None
    }

    /// After a new connection: any push may have been missed.
    pub(crate) fn wake_all(&self) {
        let places: Vec<_> = self.map().values().cloned().collect();
        for place in places {
            place.wake();
        }
    }
}

impl Place {
    fn wake(&self) {
        self.woken.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// What has been heard so far is dealt with by what begins now.
    pub(crate) fn begin(&self) {
        self.woken.store(false, Ordering::Relaxed);
    }

    /// When to ask although nothing woke it.
    pub(crate) fn ask_in(&self, after: Option<Duration>) {
        let at = after.map(|after| Instant::now() + after);
        *self.ask_at.lock().unwrap_or_else(PoisonError::into_inner) = at;
        self.changed.notify_one();
    }

    /// Resolves when it has been woken, or is to ask.
    pub(crate) async fn notified(&self) {
        loop {
            if self.woken.swap(false, Ordering::Acquire) {
                return;
            }
            let at = *self.ask_at.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(at) = at else {
                self.changed.notified().await;
                continue;
            };
            tokio::select! {
                biased;
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(at) => return,
            }
        }
    }
}
