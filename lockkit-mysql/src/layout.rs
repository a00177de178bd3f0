//! The names of rows, and how they are written in SQL.

use lockkit_core::{LockKind, LockName};
use sha2::{Digest, Sha256};

/// The width of the column, in bytes.
const MAX_BYTES: usize = 255;

/// The length of a hash in a name.
const HASH_BYTES: usize = 64;

/// The name of a lock's or semaphore's rows: `<namespace>:<name>` or `<namespace>#<name>`.
///
/// A namespace contains neither `:` nor `#`, so the first of them ends it. A name that would have 255 bytes or more keeps its
/// beginning, for people who read the table, and ends in the SHA-256 of the whole. It has 255 bytes exactly, as no other name
/// has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(Box<[u8]>);

impl Key {
    pub(crate) fn new(namespace: &str, kind: LockKind, name: &LockName) -> Self {
        let mut bytes = [namespace, mark(kind), name.as_str()].concat().into_bytes();
        if bytes.len() >= MAX_BYTES {
            let digest = hexadecimal(&Sha256::digest(&bytes));
            bytes.truncate(MAX_BYTES - HASH_BYTES);
            bytes.extend(digest.as_bytes());
        }
        Self(bytes.into())
    }

    /// Returns the key of a row that was found.
    pub(crate) fn found(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// Returns the name of which this is the key; `None` if there is none. `full_name` is what stands beside a key that does not
    /// have the whole name.
    pub(crate) fn name(&self, namespace: &str, kind: LockKind, full_name: Option<&[u8]>) -> Option<LockName> {
        let plain = || self.0.strip_prefix(namespace.as_bytes())?.get(1..);
        let name = LockName::new(std::str::from_utf8(full_name.or_else(plain)?).ok()?).ok()?;
        (Self::new(namespace, kind, &name) == *self).then_some(name)
    }

    /// Returns `name` if this is its key and does not have the whole of it.
    pub(crate) fn full_name<'a>(&self, name: &'a LockName) -> Option<&'a str> {
        (self.0.len() >= MAX_BYTES).then_some(name.as_str())
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the name as a literal for SQL.
    pub(crate) fn as_sql(&self) -> String {
        literal(&self.0)
    }
}

/// The keys of the names with a prefix, and perhaps of some others with the same long beginning.
#[derive(Clone, Debug)]
pub(crate) struct Range {
    begin: Vec<u8>,
    /// `begin` itself is not in it.
    excludes_begin: bool,
    /// Is not in it.
    end: Vec<u8>,
}

impl Range {
    pub(crate) fn of_prefix(namespace: &str, kind: LockKind, prefix: &str) -> Self {
        let mut begin = [namespace, mark(kind), prefix].concat().into_bytes();
        // A longer key has a hash behind so many bytes.
        begin.truncate(MAX_BYTES - HASH_BYTES);
        let mut end = begin.clone();
        if let Some(last) = end.last_mut() {
            // No byte of UTF-8 is the highest.
            *last += 1;
        }
        Self {
            begin,
            excludes_begin: false,
            end,
        }
    }

    /// Returns the range of this key alone.
    pub(crate) fn of_key(key: &[u8]) -> Self {
        Self {
            begin: key.to_vec(),
            excludes_begin: false,
            end: [key, &[0]].concat(),
        }
    }

    /// Leaves out all keys up to this one.
    pub(crate) fn goes_on_after(&mut self, key: &[u8]) {
        self.begin = key.to_vec();
        self.excludes_begin = true;
    }

    /// Returns the condition for the column `name`.
    pub(crate) fn as_sql(&self) -> String {
        let above = if self.excludes_begin { ">" } else { ">=" };
        format!(
            "name{above}{} AND name<{}",
            literal(&self.begin),
            literal(&self.end)
        )
    }
}

fn mark(kind: LockKind) -> &'static str {
    match kind {
        LockKind::Lock => ":",
        LockKind::Semaphore => "#",
    }
}

/// Returns any bytes as a literal for SQL. Hexadecimal, so that no byte can end it.
pub(crate) fn literal(bytes: &[u8]) -> String {
    format!("x'{}'", hexadecimal(bytes))
}

/// Returns a text as a literal for SQL, or `NULL`.
pub(crate) fn literal_or_null(text: Option<&str>) -> String {
    text.map_or_else(|| "NULL".to_owned(), |text| literal(text.as_bytes()))
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    const DIGITS: [char; 16] = [
        '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f',
    ];
    let digit = |value: u8| DIGITS[usize::from(value)];
    bytes
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn key(namespace: &str, kind: LockKind, name: &str) -> Key {
        Key::new(namespace, kind, &LockName::new(name).unwrap())
    }

    #[test]
    fn different_names_have_different_keys() {
        let long = "x".repeat(LockName::MAX_BYTES - 1);
        let hash = key("ns", LockKind::Lock, &format!("{long}1"));
        // A name that looks like the hash of another one.
        let spelled = String::from_utf8(hash.0.into()).unwrap();
        let lookalike = spelled.strip_prefix("ns:").unwrap().to_owned();
        assert_eq!(spelled.len(), 255);
        let names = [
            "a",
            "A",
            "a ",
            "ä",
            "a\u{308}",
            ":a",
            "#a",
            "\0",
            &format!("{long}1"),
            &format!("{long}2"),
            &long,
            &lookalike,
            &"y".repeat(251),
            &"y".repeat(252),
            &"y".repeat(253),
        ]
        .map(str::to_owned);
        let mut keys = HashSet::new();
        for name in &names {
            for (namespace, kind) in [
                ("", LockKind::Lock),
                ("ns", LockKind::Lock),
                ("ns", LockKind::Semaphore),
            ] {
                let key = key(namespace, kind, name);
                assert!(key.0.len() <= MAX_BYTES, "{key:?}");
                assert!(keys.insert(key), "{namespace} {kind:?} {name}");
            }
        }
    }

    #[test]
    fn a_key_leads_to_its_name_and_is_in_its_prefixes_ranges() {
        let long = format!("é{}", "x".repeat(LockName::MAX_BYTES - 2));
        for name in ["a", ":", "#a", "é", "\0", &"y".repeat(252), &long] {
            for (namespace, kind) in [
                ("", LockKind::Lock),
                ("ns", LockKind::Lock),
                ("ns", LockKind::Semaphore),
            ] {
                let lock = LockName::new(name).unwrap();
                let key = Key::new(namespace, kind, &lock);
                let beside = key.full_name(&lock).map(str::as_bytes);
                assert_eq!(key.name(namespace, kind, beside), Some(lock.clone()), "{name}");
                if beside.is_some() {
                    assert_eq!(key.name(namespace, kind, None), None, "{name} is not its hash");
                }
                for (end, _) in name.char_indices() {
                    let range = Range::of_prefix(namespace, kind, &name[..end]);
                    let bytes = key.as_bytes();
                    assert!(
                        &*range.begin <= bytes && bytes < &*range.end,
                        "{name} {end}: {range:?}"
                    );
                }
            }
        }
        let alone = Range::of_key(b"ns:a");
        assert_eq!((&*alone.begin, &*alone.end), (&b"ns:a"[..], &b"ns:a\0"[..]));
        let other = Range::of_prefix("n", LockKind::Lock, "");
        assert!(key("ns", LockKind::Lock, "a").as_bytes() >= &*other.end);
        assert!(key("n", LockKind::Semaphore, "a").as_bytes() < &*other.begin);
    }

    #[test]
    fn a_short_name_is_readable_in_the_table() {
        assert_eq!(key("lockkit", LockKind::Lock, "a").as_bytes(), b"lockkit:a");
        assert_eq!(key("", LockKind::Lock, "é").as_sql(), "x'3ac3a9'");
    }
}
