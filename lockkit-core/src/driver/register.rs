//! The holds of one queue, and those of them that the worker has yet to adopt. Sans-IO.
//!
//! Each queue has a register of its own, since the queue is locked anyway where a hold begins and ends. So locks of different
//! names never wait for each other.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use crate::driver::{hold::Hold, timing};

#[derive(Debug, Default)]
pub(crate) struct Register {
    entries: Vec<Entry>,
    free: Vec<usize>,
    unadopted: Vec<usize>,
    /// The time for which the worker has been told to look.
    adopt_at: Option<Instant>,
}

#[derive(Debug, Default)]
struct Entry {
    hold: Option<Hold>,
    /// The time from which the worker keeps it alive.
    adopt_at: Option<Instant>,
    /// The time since which its claim has been passed from hold to hold, unseen by the worker.
    unseen_since: Option<Instant>,
    /// Its index is in `unadopted`. It stays there when the hold is released, and serves the next one.
    queued: bool,
}

/// The key of a hold that is in no register.
pub(crate) const NO_KEY: usize = usize::MAX;

/// Takes a hold's key from it. Only the register's queue does so, under its lock: nobody races with it.
fn take_key(hold: &Hold) -> usize {
    let key = hold.key.load(Ordering::Relaxed);
    hold.key.store(NO_KEY, Ordering::Relaxed);
    key
}

impl Register {
    /// Enters a new hold. Returns the time at which the worker has to look at this queue, if it would come too late by itself.
    #[must_use]
    pub(crate) fn enter(&mut self, hold: &Hold, now: Instant) -> Option<Instant> {
        let key = self.free.pop().unwrap_or_else(|| {
            if self.entries.is_empty() {
                // Most queues never have another.
                self.entries.reserve_exact(1);
                self.unadopted.reserve_exact(1);
            }
            self.entries.push(Entry::default());
            self.entries.len() - 1
        });
        self.entries[key].unseen_since = Some(now);
        self.put(key, hold, now)
    }

    /// Enters a hold in place of the one that has been passed on to it. Returns that one, and the time as [`enter`](Self::enter).
    #[must_use]
    pub(crate) fn replace(
        &mut self,
        ended: &Hold,
        next: &Hold,
        now: Instant,
    ) -> (Option<Hold>, Option<Instant>) {
        let key = take_key(ended);
        match self.entries.get_mut(key) {
            Some(entry) => {
                let before = entry.hold.take();
                if !entry.queued {
                    entry.unseen_since = Some(now);
                }
                (before, self.put(key, next, now))
            }
            // Its release was dropped half-way, and went on as a job.
            None => (None, self.enter(next, now)),
        }
    }

    fn put(&mut self, key: usize, hold: &Hold, now: Instant) -> Option<Instant> {
        let entry = &mut self.entries[key];
        entry.hold = Some(hold.clone());
        hold.key.store(key, Ordering::Relaxed);
        if !std::mem::replace(&mut entry.queued, true) {
            self.unadopted.push(key);
        }
        let adopt_after = hold.request.adopt_after;
        let since = entry.unseen_since.unwrap_or(now);
        let adopt_at = (now + adopt_after).min(timing::adopt_at_last(since, adopt_after));
        entry.adopt_at = Some(adopt_at);
        let sooner = self.adopt_at.is_none_or(|at| adopt_at < at);
        if sooner {
            self.adopt_at = Some(adopt_at);
        }
        sooner.then_some(adopt_at)
    }

    /// Forgets a hold that has ended. Returns it, and `true` if the worker has never seen it. A second time does nothing.
    #[must_use]
    pub(crate) fn leave(&mut self, hold: &Hold) -> Option<(Hold, bool)> {
        let key = take_key(hold);
        let entry = self.entries.get_mut(key)?;
        let left = entry.hold.take()?;
        self.free.push(key);
        Some((left, entry.queued))
    }

    /// Returns the holds that the worker has not seen yet and that have lasted long enough `by` then, or all of them without
    /// it; and the time to look again for the others, if the worker has yet to be told.
    pub(crate) fn adopt(&mut self, by: Option<Instant>) -> (Vec<Hold>, Option<Instant>) {
        let mut adopted = Vec::new();
        if let Some(by) = by
            && self.adopt_at.is_none_or(|at| at > by)
        {
            // It had been told of an earlier time, and of one that is to come.
            return (adopted, None);
        }
        let mut next: Option<Instant> = None;
        let entries = &mut self.entries;
        self.unadopted.retain(|key| {
            let entry = &mut entries[*key];
            if entry.hold.is_some()
                && let (Some(by), Some(at)) = (by, entry.adopt_at)
                && at > by
            {
                next = Some(next.map_or(at, |next| next.min(at)));
                return true;
            }
            entry.queued = false;
            adopted.extend(entry.hold.clone());
            false
        });
        self.adopt_at = next;
        (adopted, next)
    }

    pub(crate) fn holds(&self) -> Vec<Hold> {
        self.entries
            .iter()
            .filter_map(|entry| entry.hold.clone())
            .collect()
    }

    /// Returns whether the lease of one of them is not over, whatever else has become of it.
    pub(crate) fn lasts(&self) -> bool {
        let mut holds = self.entries.iter().filter_map(|entry| entry.hold.as_ref());
        holds.any(|hold| !hold.is_over())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }
}
