//! How many contend for a lock.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::{AtomicU64, Ordering},
};

/// With so many others in a directory, a newcomer has to read its list.
const SEVERAL: usize = 2;
/// With so many, the list is dearer than what spares it.
const CROWD: usize = 64;
const SLOTS: usize = 64;

/// How many others there were in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Crowding {
    Few,
    Several,
    Crowd,
}

/// How many there were in directories when this client was last in them. It forgets, and mistakes one for another, now and
/// then: what is made of it may only be a matter of speed.
#[derive(Debug)]
pub(crate) struct CrowdedDirs([AtomicU64; SLOTS]);

impl CrowdedDirs {
    pub(crate) fn new() -> Self {
        Self([const { AtomicU64::new(0) }; SLOTS])
    }

    /// So many others were seen in `dir`.
    pub(crate) fn seen(&self, dir: &str, others: usize) -> Crowding {
        let seen = Crowding::of(others);
        if seen != self.last_seen(dir) {
            let (slot, mark) = self.slot(dir);
            slot.store(mark | seen.bits(), Ordering::Relaxed);
        }
        seen
    }

    /// What was seen in `dir` last.
    pub(crate) fn last_seen(&self, dir: &str) -> Crowding {
        let (slot, mark) = self.slot(dir);
        let found = slot.load(Ordering::Relaxed);
        let all = [Crowding::Several, Crowding::Crowd];
        let is_found = |others: &Crowding| found == mark | others.bits();
        all.into_iter().find(is_found).unwrap_or(Crowding::Few)
    }

    /// Where a directory's is, and how it begins.
    fn slot(&self, dir: &str) -> (&AtomicU64, u64) {
        let mut hasher = DefaultHasher::new();
        dir.hash(&mut hasher);
        let hash = hasher.finish();
        let slot = usize::try_from(hash >> 32).unwrap_or(0) % SLOTS;
        (&self.0[slot], hash & !Crowding::BITS)
    }
}

impl Crowding {
    const BITS: u64 = 3;

    fn of(others: usize) -> Self {
        match others {
            ..SEVERAL => Self::Few,
            SEVERAL..CROWD => Self::Several,
            CROWD.. => Self::Crowd,
        }
    }

    fn bits(self) -> u64 {
        match self {
            Self::Few => 0,
            Self::Several => 1,
            Self::Crowd => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_last_counts() {
        let crowded_dirs = CrowdedDirs::new();
        assert_eq!(crowded_dirs.last_seen("/a"), Crowding::Few);
        let steps = [
            (CROWD - 1, Crowding::Several),
            (CROWD, Crowding::Crowd),
            (SEVERAL, Crowding::Several),
            (SEVERAL - 1, Crowding::Few),
            (CROWD, Crowding::Crowd),
            (0, Crowding::Few),
        ];
        for (others, is) in steps {
            assert_eq!(crowded_dirs.seen("/a", others), is);
            assert_eq!(crowded_dirs.last_seen("/a"), is);
            assert_eq!(crowded_dirs.last_seen("/b"), Crowding::Few);
        }
    }
}
