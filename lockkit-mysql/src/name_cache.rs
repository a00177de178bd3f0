//! The names that this client has used lately.

use std::{collections::HashMap, time::Duration};

use lockkit_core::spi::Mutex;
use tokio::time::Instant;

use crate::layout::Key;

/// The most names that are remembered. Each further one replaces another, whose next use asks again whether it has rows.
const MAX_NAMES: usize = 10_000;

/// A name that was taken within this time is likely to be taken again.
const RECENT: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct NameCache(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    names: HashMap<Key, Entry>,
    /// The latest grant of the names that were forgotten.
    forgotten: Option<Instant>,
}

#[derive(Debug, Default)]
struct Entry {
    /// The time of the latest grant, or a later one.
    granted: Option<Instant>,
    /// The time at which the server last said that the name is taken.
    taken: Option<Instant>,
}

impl NameCache {
    /// True if this name has been seen to have rows.
    pub(crate) fn has_rows(&self, key: &Key) -> bool {
        self.0.lock().names.contains_key(key)
    }

    /// Notes that the server has said that the name is taken.
    pub(crate) fn note_taken(&self, key: &Key) {
        self.0.lock().entry(key).taken = Some(Instant::now());
    }

    /// True if the name was taken a moment ago.
    pub(crate) fn was_taken(&self, key: &Key) -> bool {
        let entries = self.0.lock();
        let taken = entries.names.get(key).and_then(|entry| entry.taken);
        taken.is_some_and(|taken| taken.elapsed() < RECENT)
    }

    /// Notes an exclusive grant, and returns true. Returns false if this client was granted the name after `proven`: one of the
    /// two claims has lost the row since, and it may be this one.
    pub(crate) fn note_grant(&self, key: &Key, proven: Instant) -> bool {
        let mut entries = self.0.lock();
        let entry = entries.entry(key);
        let is_certain = entry.granted.is_none_or(|latest| latest < proven);
        if is_certain {
            entry.granted = Some(Instant::now());
        }
        is_certain
    }

    /// Notes a grant that may have others beside it.
    pub(crate) fn note_shared_grant(&self, key: &Key) {
        self.0.lock().entry(key).granted = Some(Instant::now());
    }
}

impl Entries {
    fn entry(&mut self, key: &Key) -> &mut Entry {
        let Self { names, forgotten } = self;
        if names.len() >= MAX_NAMES && !names.contains_key(key) {
            // An arbitrary one: of names that are used in turn, not each is forgotten before its next turn.
            let any = names.keys().next().cloned();
            let entry = any.and_then(|any| names.remove(&any));
            *forgotten = entry.and_then(|entry| entry.granted).max(*forgotten);
        }
        names.entry(key.clone()).or_insert(Entry {
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
    fn a_grant_is_not_certain_after_a_later_one() {
        let names = NameCache::default();
        let asked = Instant::now();
        assert!(!names.has_rows(&key(0)));
        assert!(names.note_grant(&key(0), asked) && names.has_rows(&key(0)));
        assert!(!names.note_grant(&key(0), asked), "another was granted since");
        let later = Instant::now() + Duration::from_secs(1);
        assert!(names.note_grant(&key(0), later));
        assert!(names.note_grant(&key(1), asked), "a name of its own");
    }

    #[test]
    fn a_name_stays_taken_for_a_second() {
        let names = NameCache::default();
        names.note_taken(&key(0));
        assert!(names.has_rows(&key(0)) && names.was_taken(&key(0)) && !names.was_taken(&key(1)));
        names.0.lock().entry(&key(0)).taken = Instant::now().checked_sub(RECENT);
        assert!(!names.was_taken(&key(0)));
    }

    #[test]
    fn a_forgotten_name_makes_no_grant_certain() {
        let names = NameCache::default();
        let (asked, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
        let mut cold = 0;
        for name in (0..=MAX_NAMES).chain(0..=MAX_NAMES) {
            cold += usize::from(!names.has_rows(&key(name)));
            assert!(names.note_grant(&key(name), later));
        }
        assert!(cold < MAX_NAMES + MAX_NAMES / 10, "{cold} were cold");
        assert_eq!(names.0.lock().names.len(), MAX_NAMES);
        for name in 0..=MAX_NAMES {
            assert!(!names.note_grant(&key(name), asked), "{name}");
        }
    }
}
