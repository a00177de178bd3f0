//! Which directories are crowded.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::{AtomicU64, Ordering},
};

/// With so many others in a directory, its list is dearer than what spares it.
const CROWD: usize = 64;
const SLOTS: usize = 64;

/// The directories that were crowded when this client was last in them. It forgets, and mistakes one for another, now and
/// then: what is made of it may only be a matter of speed.
#[derive(Debug)]
pub(crate) struct Crowds([AtomicU64; SLOTS]);

impl Crowds {
    pub(crate) fn new() -> Self {
        Self([const { AtomicU64::new(0) }; SLOTS])
    }

    /// So many others were seen in `dir`. Says whether they are a crowd.
    pub(crate) fn seen(&self, dir: &str, others: usize) -> bool {
        let crowded = others >= CROWD;
        if crowded || self.has(dir) {
            let (slot, mark) = self.slot(dir);
            slot.store(if crowded { mark } else { 0 }, Ordering::Relaxed);
        }
        crowded
    }

    pub(crate) fn has(&self, dir: &str) -> bool {
        let (slot, mark) = self.slot(dir);
        slot.load(Ordering::Relaxed) == mark
    }

    fn slot(&self, dir: &str) -> (&AtomicU64, u64) {
        let mut hasher = DefaultHasher::new();
        dir.hash(&mut hasher);
        // Zero is nobody's.
        let mark = hasher.finish() | 1;
        (&self.0[usize::try_from(mark >> 32).unwrap_or(0) % SLOTS], mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_last_counts() {
        let crowds = Crowds::new();
        assert!(!crowds.has("/a"));
        assert!(!crowds.seen("/a", CROWD - 1) && !crowds.has("/a"));
        assert!(crowds.seen("/a", CROWD) && crowds.has("/a"));
        assert!(!crowds.has("/b"));
        assert!(!crowds.seen("/a", 0) && !crowds.has("/a"));
    }
}
