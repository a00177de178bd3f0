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
pub(crate) struct Wakeups {
    by_owner: Mutex<HashMap<u128, Arc<Wakeup>>>,
    queued: AtomicUsize,
    /// Those that are gone and may be in a queue at the server all the same, since it could not be told: in which.
    left_behind: Mutex<HashMap<u128, Vec<u8>>>,
}

/// One claim, as far as wake-ups are concerned.
#[derive(Debug, Default)]
pub(crate) struct Wakeup {
    changed: Notify,
    woken: AtomicBool,
    ask_at: Mutex<Option<Instant>>,
    /// The lock for which it waits behind others at the server, which do not tell it when it has become the first; and
    /// whether a foreign client holds it.
    behind: Mutex<Option<(Vec<u8>, bool)>>,
    /// Which of several masters have told it since it asked last, while it waits.
    told_by: Mutex<Option<Vec<usize>>>,
    /// What it was passed since it asked last.
    passed: Mutex<Option<Passed>>,
}

/// A hold that a push has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Passed {
    /// The first.
    pub(crate) token: u64,
    pub(crate) heard: Heard,
}

/// How a push was heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heard {
    /// The number of the connection.
    pub(crate) on: u64,
    /// When the last request was sent there that was answered before it.
    pub(crate) since: Instant,
}

impl Wakeups {
    fn map(&self) -> MutexGuard<'_, HashMap<u128, Arc<Wakeup>>> {
        self.by_owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, owner: OwnerId) -> Arc<Wakeup> {
        self.map().entry(owner.get()).or_default().clone()
    }

    pub(crate) fn remove(&self, owner: OwnerId) {
        self.map().remove(&owner.get());
    }

    fn left(&self) -> MutexGuard<'_, HashMap<u128, Vec<u8>>> {
        self.left_behind.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A claim is gone that may be in this lock's queue, where its client's heartbeat would keep its place.
    pub(crate) fn leave_behind(&self, owner: OwnerId, lock: Vec<u8>) {
        /// A server that refuses requests for days must not fill the client's memory.
        const MOST: usize = 10_000;

        let mut left = self.left();
        if left.len() < MOST {
            left.insert(owner.get(), lock);
        }
    }

    pub(crate) fn left_behind(&self) -> Vec<(OwnerId, Vec<u8>)> {
        let left = self.left();
        let pairs = left.iter();
        pairs
            .map(|(owner, lock)| (OwnerId::new(*owner), lock.clone()))
            .collect()
    }

    /// The server has been told.
    pub(crate) fn taken_out(&self, owner: OwnerId) {
        self.left().remove(&owner.get());
    }

    /// How many claims stand in a queue at the server.
    pub(crate) fn queued(&self) -> &AtomicUsize {
        &self.queued
    }

    /// A push: `<owner> <ms>[:<token>] <lock>`. Zero: the lock was passed to the owner, with this token if it is told, or its
    /// hold was ended. Otherwise it is the first in the queue now, and the lease before it lasts for so long. Returns owner
    /// and lock if the claim is not here any more but was passed something.
    pub(crate) fn push<'a>(&self, message: &'a [u8], heard: Option<Heard>) -> Option<(OwnerId, &'a [u8])> {
        let mut parts = message.splitn(3, |b| *b == b' ');
        let owner = std::str::from_utf8(parts.next()?).ok()?;
        let owner = OwnerId::new(u128::from_str_radix(owner, 16).ok()?);
        let what = std::str::from_utf8(parts.next()?).ok()?;
        let (ms, token) = what.split_once(':').unwrap_or((what, ""));
        let ms: u64 = ms.parse().ok()?;
        let lock = parts.next()?;
        let wakeup = self.map().get(&owner.get()).cloned();
        match wakeup {
            Some(wakeup) if ms == 0 => {
                let token = token.parse().ok();
                *wakeup.passed() = token.zip(heard).map(|(token, heard)| Passed { token, heard });
                wakeup.wake();
            }
            Some(wakeup) => wakeup.ask_in(Duration::from_millis(ms)),
            None if ms == 0 => return Some((owner, lock)),
            None => {}
        }
        None
    }

    /// A push from one of several masters: `<owner> <what> <lock>`. `1`: the lock is free there, and kept for the owner;
    /// it is asked for when a majority, which is so many, has said so. `0`: its hold was ended there.
    pub(crate) fn hint(&self, master: usize, majority: usize, message: &[u8]) {
        let mut parts = message.splitn(3, |b| *b == b' ');
        let owner = parts.next().and_then(|owner| std::str::from_utf8(owner).ok());
        let owner = owner.and_then(|owner| u128::from_str_radix(owner, 16).ok());
        let Some(wakeup) = owner.and_then(|owner| self.map().get(&owner).cloned()) else {
            return;
        };
        match parts.next() {
            Some(b"0") => wakeup.wake(),
            Some(b"1") => wakeup.told(master, majority),
            _ => {}
        }
    }

    /// Those who wait behind others, and for which lock.
    pub(crate) fn behind(&self) -> Vec<(OwnerId, Arc<Wakeup>, Vec<u8>)> {
        let map = self.map();
        let behind = map.iter().filter_map(|(owner, wakeup)| {
            let (lock, _) = wakeup.lock_behind().clone()?;
            Some((OwnerId::new(*owner), wakeup.clone(), lock))
        });
        behind.collect()
    }

    /// After a new connection: any push may have been missed.
    pub(crate) fn wake_all(&self) {
        let wakeups: Vec<_> = self.map().values().cloned().collect();
        for wakeup in wakeups {
            wakeup.wake();
        }
    }
}

impl Wakeup {
    fn wake(&self) {
        self.woken.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    fn ask_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.ask_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_behind(&self) -> MutexGuard<'_, Option<(Vec<u8>, bool)>> {
        self.behind.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has been heard so far is dealt with by what begins now.
    pub(crate) fn begin(&self) {
        *self.ask_at() = None;
        *self.lock_behind() = None;
        *self.passed() = None;
        self.woken.store(false, Ordering::Relaxed);
    }

    /// When to ask although nothing woke it, at the latest. A push may be dealt with before the reply that the server
    /// gave before it, and knows better.
    pub(crate) fn ask_in(&self, after: Duration) {
        let at = Instant::now() + after;
        let mut ask_at = self.ask_at();
        *ask_at = Some(ask_at.map_or(at, |before| before.min(at)));
        drop(ask_at);
        self.changed.notify_one();
    }

    /// It waits for this lock, and is not the first.
    pub(crate) fn waits_behind(&self, lock: &[u8], foreign: bool) {
        *self.lock_behind() = Some((lock.to_vec(), foreign));
    }

    /// It has become the first: it asks for how long the lease before it lasts.
    pub(crate) fn is_first(&self) {
        if self.lock_behind().take().is_some() {
            self.wake();
        }
    }

    /// It is not the first yet: it asks by then at the latest, if it does not just ask. How long a foreign hold lasts says
    /// nothing.
    pub(crate) fn is_behind(&self, after: Duration) {
        let asks = matches!(&*self.lock_behind(), Some((_, false)));
        if asks {
            self.ask_in(after);
        }
    }

    /// It does not wait any more.
    pub(crate) fn stop(&self) {
        *self.ask_at() = None;
        *self.lock_behind() = None;
        *self.told_by() = None;
        *self.passed() = None;
    }

    /// What it was passed since it asked last. Twice is once.
    pub(crate) fn take_push(&self) -> Option<Passed> {
        self.passed().take()
    }

    fn passed(&self) -> MutexGuard<'_, Option<Passed>> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It waits from now on to be told by a majority of several masters.
    pub(crate) fn listen(&self) {
        *self.told_by() = Some(Vec::new());
    }

    /// The lock is free at this master. Whoever asked at once might come to the others before the release does; and those
    /// who are told by none but a minority are not to wait for more.
    fn told(&self, master: usize, majority: usize) {
        const SOON: Duration = Duration::from_millis(1);
        let mut told_by = self.told_by();
        let Some(masters) = &mut *told_by else { return };
        if !masters.contains(&master) {
            masters.push(master);
        }
        let enough = masters.len() >= majority;
        drop(told_by);
        if enough {
            self.wake();
        } else {
            self.ask_in(SOON);
        }
    }

    fn told_by(&self) -> MutexGuard<'_, Option<Vec<usize>>> {
        self.told_by.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resolves when it has been woken, or is to ask.
    pub(crate) async fn notified(&self) {
        loop {
            if self.woken.swap(false, Ordering::Acquire) {
                return;
            }
            let at = *self.ask_at();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_push_that_overtakes_the_reply_before_it_is_not_forgotten() {
        let wakeups = Wakeups::default();
        let owner = OwnerId::new(7);
        let wakeup = wakeups.add(owner);
        wakeup.begin();
        // At the server first the reply, "25 s left", and then this.
        assert!(wakeups.push(format!("{owner} 3000 n").as_bytes(), None).is_none());
        wakeup.ask_in(Duration::from_secs(25));
        let asked = Instant::now();
        wakeup.notified().await;
        assert_eq!(asked.elapsed().as_secs(), 3);
        wakeup.begin();
        wakeup.ask_in(Duration::from_secs(25));
        wakeup.notified().await;
        assert_eq!(asked.elapsed().as_secs(), 28, "what was heard before is over");
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_is_told_by_a_majority_asks_at_once_and_by_fewer_a_moment_later() {
        let wakeups = Wakeups::default();
        let owner = OwnerId::new(7);
        let wakeup = wakeups.add(owner);
        let free = format!("{owner} 1 n");
        let tell = |master| wakeups.hint(master, 3, free.as_bytes());
        let asked = Instant::now();
        let is_woken = || wakeup.woken.load(Ordering::Relaxed);
        tell(0);
        assert!(wakeup.ask_at().is_none(), "it does not wait");
        wakeup.begin();
        wakeup.listen();
        for master in [0, 1, 1, 0] {
            tell(master);
            assert!(!is_woken(), "by two masters");
        }
        tell(4);
        wakeup.notified().await;
        assert_eq!(asked.elapsed(), Duration::ZERO);

        wakeup.begin();
        wakeup.listen();
        tell(0);
        wakeup.notified().await;
        assert_eq!(asked.elapsed().as_millis(), 1);

        wakeup.stop();
        (0..5).for_each(tell);
        assert!(!is_woken() && wakeup.ask_at().is_none(), "it holds");
        wakeups.hint(0, 3, format!("{owner} 0 n").as_bytes());
        assert!(is_woken(), "its hold was ended");
    }
}
