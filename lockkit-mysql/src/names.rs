//! What this client has lately seen of its names.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::time::Instant;

use crate::key::Key;

/// Of more names than this one is forgotten for each that comes, whose next try looks again if it has rows.
const MOST_NAMES: usize = 10_000;

#[derive(Debug, Default)]
pub(crate) struct Names(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// The time of each name's latest grant.
    granted: HashMap<Key, Instant>,
    /// The latest of those that were forgotten.
    forgotten: Option<Instant>,
}

impl Names {
    /// True if this name's rows have been seen.
    pub(crate) fn knows(&self, key: &Key) -> bool {
        self.known().granted.contains_key(key)
    }

    /// Notes a grant, unless this client was granted the name after `proven`: one of the two has lost the row since, and
    /// this one may be it. `true` if it is noted.
    pub(crate) fn grant(&self, key: &Key, proven: Instant) -> bool {
        let mut known = self.known();
        let latest = known.granted.get(key).copied().or(known.forgotten);
        let is_certain = latest.is_none_or(|latest| latest < proven);
        if is_certain {
            known.note(key);
        }
        is_certain
    }

    /// Notes a grant beside which there may be others.
    pub(crate) fn share(&self, key: &Key) {
        self.known().note(key);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn note(&mut self, key: &Key) {
        let Self { granted, forgotten } = self;
        if granted.len() >= MOST_NAMES && !granted.contains_key(key) {
            // Whichever comes first: names that are used in turn are not all forgotten before their next turn.
            let any = granted.keys().next().cloned();
            *forgotten = any.and_then(|any| granted.remove(&any)).max(*forgotten);
        }
        granted.insert(key.clone(), Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit_core::{Kind, LockName};

    use super::*;

    fn key(name: usize) -> Key {
        Key::new("ns", Kind::Lock, &LockName::new(name.to_string()).unwrap())
    }

    #[test]
    fn a_grant_that_another_came_after_is_not_certain() {
        let names = Names::default();
        let asked = Instant::now();
        assert!(!names.knows(&key(0)));
        assert!(names.grant(&key(0), asked) && names.knows(&key(0)));
        assert!(!names.grant(&key(0), asked), "another was granted since");
        let later = Instant::now() + Duration::from_secs(1);
        assert!(names.grant(&key(0), later));
        assert!(names.grant(&key(1), asked), "a name of its own");
    }

    #[test]
    fn what_is_forgotten_makes_no_grant_certain() {
        let names = Names::default();
        let (asked, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
        let mut cold = 0;
        for name in (0..=MOST_NAMES).chain(0..=MOST_NAMES) {
            cold += usize::from(!names.knows(&key(name)));
            assert!(names.grant(&key(name), later));
        }
        assert!(cold < MOST_NAMES + MOST_NAMES / 10, "{cold} were cold");
        assert_eq!(names.known().granted.len(), MOST_NAMES);
        for name in 0..=MOST_NAMES {
            assert!(!names.grant(&key(name), asked), "{name}");
        }
    }
}
