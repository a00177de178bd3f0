//! What this client has lately seen of its names.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::key::Key;

/// Of more names than this one is forgotten for each that comes, whose next try looks again if it has rows.
const MOST_NAMES: usize = 10_000;

/// A name that was taken within this is likely to be taken again.
const LATELY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Names(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    names: HashMap<Key, Seen>,
    /// The latest grant of those that were forgotten.
    forgotten: Option<Instant>,
}

#[derive(Debug, Default)]
struct Seen {
    /// The time of its latest grant, if not later than this.
    granted: Option<Instant>,
    /// The time at which the server last said that it is taken.
    taken: Option<Instant>,
}

impl Names {
    /// True if this name's rows have been seen.
    pub(crate) fn knows(&self, key: &Key) -> bool {
        self.known().names.contains_key(key)
    }

    /// Notes that the server has said that it is taken.
    pub(crate) fn take(&self, key: &Key) {
        self.known().see(key).taken = Some(Instant::now());
    }

    /// True if it was taken lately.
    pub(crate) fn was_taken(&self, key: &Key) -> bool {
        let known = self.known();
        let taken = known.names.get(key).and_then(|seen| seen.taken);
        taken.is_some_and(|taken| taken.elapsed() < LATELY)
    }

    /// Notes a grant, unless this client was granted the name after `proven`: one of the two has lost the row since, and
    /// this one may be it. `true` if it is noted.
    pub(crate) fn grant(&self, key: &Key, proven: Instant) -> bool {
        let mut known = self.known();
        let seen = known.see(key);
        let is_certain = seen.granted.is_none_or(|latest| latest < proven);
        if is_certain {
            seen.granted = Some(Instant::now());
        }
        is_certain
    }

    /// Notes a grant beside which there may be others.
    pub(crate) fn share(&self, key: &Key) {
        self.known().see(key).granted = Some(Instant::now());
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn see(&mut self, key: &Key) -> &mut Seen {
        let Self { names, forgotten } = self;
        if names.len() >= MOST_NAMES && !names.contains_key(key) {
            // Whichever comes first: names that are used in turn are not all forgotten before their next turn.
            let any = names.keys().next().cloned();
            let seen = any.and_then(|any| names.remove(&any));
            *forgotten = seen.and_then(|seen| seen.granted).max(*forgotten);
        }
        names.entry(key.clone()).or_insert(Seen {
            granted: *forgotten,
            taken: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit_core::{LockKind, LockName};

    use super::*;

    fn key(name: usize) -> Key {
        Key::new("ns", LockKind::Lock, &LockName::new(name.to_string()).unwrap())
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
    fn a_name_is_taken_for_a_second() {
        let names = Names::default();
        names.take(&key(0));
        assert!(names.knows(&key(0)) && names.was_taken(&key(0)) && !names.was_taken(&key(1)));
        names.known().see(&key(0)).taken = Instant::now().checked_sub(LATELY);
        assert!(!names.was_taken(&key(0)));
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
        assert_eq!(names.known().names.len(), MOST_NAMES);
        for name in 0..=MOST_NAMES {
            assert!(!names.grant(&key(name), asked), "{name}");
        }
    }
}
