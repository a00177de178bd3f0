//! The crowding of directories, as far as this client remembers.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::{AtomicU64, Ordering},
};

/// From this many others on, a newcomer has to read the directory's list.
const SEVERAL: usize = 2;
/// From this many others on, the list costs more than the requests that replace it.
const CROWD: usize = 64;
const SLOTS: usize = 64;

/// The number of other nodes in a directory, roughly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Crowding {
    Few,
    Several,
    Crowd,
}

/// The crowding of directories when this client was last in them. It forgets now and then, and takes one directory for another:
/// use it for speed alone.
#[derive(Debug)]
pub(crate) struct CrowdedDirs([AtomicU64; SLOTS]);

impl CrowdedDirs {
    pub(crate) fn new() -> Self {
        Self([const { AtomicU64::new(0) }; SLOTS])
    }

    /// Notes that `dir` has this many others.
    pub(crate) fn note(&self, dir: &str, others: usize) -> Crowding {
        let crowding = Crowding::of(others);
        if crowding != self.last(dir) {
            let (slot, mark) = self.slot(dir);
            slot.store(mark | crowding.bits(), Ordering::Relaxed);
        }
        crowding
    }

    /// Returns what was noted of `dir` last.
    pub(crate) fn last(&self, dir: &str) -> Crowding {
        let (slot, mark) = self.slot(dir);
        let noted = slot.load(Ordering::Relaxed);
        let all = [Crowding::Several, Crowding::Crowd];
        let is_noted = |crowding: &Crowding| noted == mark | crowding.bits();
        all.into_iter().find(is_noted).unwrap_or(Crowding::Few)
    }

    /// Returns a directory's slot, and the upper bits by which the directory is recognised there.
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
    fn what_was_noted_last_counts() {
        let dirs = CrowdedDirs::new();
        assert_eq!(dirs.last("/a"), Crowding::Few);
        let steps = [
            (CROWD - 1, Crowding::Several),
            (CROWD, Crowding::Crowd),
            (SEVERAL, Crowding::Several),
            (SEVERAL - 1, Crowding::Few),
            (CROWD, Crowding::Crowd),
            (0, Crowding::Few),
        ];
        for (others, crowding) in steps {
            assert_eq!(dirs.note("/a", others), crowding);
            assert_eq!(dirs.last("/a"), crowding);
            assert_eq!(dirs.last("/b"), Crowding::Few);
        }
    }
}
