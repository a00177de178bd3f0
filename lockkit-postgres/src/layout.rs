//! From names to the keys of advisory locks.

use std::sync::Arc;

use lockkit_core::{LockKind, LockName, spi::Mode};
use sha2::{Digest, Sha256};

/// The keys of a lock or semaphore.
///
/// A key is the first 8 bytes of the SHA-256 of a text. The character behind the namespace says what the text stands for, since a
/// namespace has none of these: `<namespace>:<name>` is a lock, `<namespace>#<name>` a semaphore's queue, `<namespace>/<i>#<name>` its
/// permit `i`, from 0 on, and `<namespace>/size#<name>` the right to change its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    namespace: Arc<str>,
    name: LockName,
    kind: LockKind,
    /// The key on which waiters queue. For a lock, that is its only one.
    pub(crate) queue: i64,
}

impl Keys {
    pub(crate) fn new(namespace: &Arc<str>, kind: LockKind, name: &LockName) -> Self {
        let mark = match kind {
            LockKind::Lock => ":",
            LockKind::Semaphore => "#",
        };
        Self {
            queue: key(&[namespace, mark, name.as_str()]),
            namespace: namespace.clone(),
            name: name.clone(),
            kind,
        }
    }

    /// Returns the keys that a holder may have: the lock's, or those of so many permits.
    pub(crate) fn held(&self, permits: u32) -> Arc<[i64]> {
        match self.kind {
            LockKind::Lock => Arc::new([self.queue]),
            LockKind::Semaphore => (0..permits).map(|permit| self.permit(permit)).collect(),
        }
    }

    fn permit(&self, permit: u32) -> i64 {
        key(&[&self.namespace, "/", &permit.to_string(), "#", self.name.as_str()])
    }

    /// Returns the key of the right to change a semaphore's size.
    pub(crate) fn size(&self) -> i64 {
        key(&[&self.namespace, "/size#", self.name.as_str()])
    }
}

/// Returns the permits of a semaphore; 0 for a lock.
pub(crate) fn permits(mode: Mode) -> u32 {
    match mode {
        Mode::Exclusive | Mode::Shared => 0,
        Mode::Permits(permits) => permits.get(),
    }
}

fn key(text: &[&str]) -> i64 {
    let digest = Sha256::digest(text.concat());
    let mut first = [0; 8];
    for (byte, of_digest) in first.iter_mut().zip(digest) {
        *byte = of_digest;
    }
    i64::from_be_bytes(first)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn keys(namespace: &str, kind: LockKind, name: &str) -> Keys {
        Keys::new(&namespace.into(), kind, &LockName::new(name).unwrap())
    }

    #[test]
    fn keys_are_those_that_are_documented() {
        let lock = keys("lockkit", LockKind::Lock, "orders/42");
        assert_eq!(lock.queue, 3_216_439_531_431_116_635);
        assert_eq!(lock.held(0)[..], [lock.queue]);
        let semaphore = keys("lockkit", LockKind::Semaphore, "orders/42");
        assert_eq!(semaphore.held(2)[1], key(&["lockkit/1#orders/42"]));
    }

    #[test]
    fn different_things_have_different_keys() {
        let mut seen = HashSet::new();
        for namespace in ["", "a", "a.b"] {
            for name in [
                "a", "A", "a ", "ä", "0#a", "1#a", "size#a", "/0#a", ":a", "#a", "\0",
            ] {
                assert!(seen.insert(keys(namespace, LockKind::Lock, name).queue));
                let semaphore = keys(namespace, LockKind::Semaphore, name);
                assert!(seen.insert(semaphore.queue) && seen.insert(semaphore.size()));
                for key in &*semaphore.held(3) {
                    assert!(seen.insert(*key), "{namespace} {name}");
                }
            }
        }
    }
}
