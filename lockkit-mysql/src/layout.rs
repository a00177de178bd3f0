//! The names of rows, and how they are written in SQL.

use lockkit_core::{LockKind, LockName};
use sha2::{Digest, Sha256};

/// The width of the column, in bytes.
const MAX_BYTES: usize = 255;

/// The name of a lock's or semaphore's rows: `<namespace>:<name>` or `<namespace>#<name>`.
///
/// A namespace contains neither `:` nor `#`, so the first of them ends it. A name that would have 255 bytes or more keeps its
/// beginning, for people who read the table, and ends in the SHA-256 of the whole. It has 255 bytes exactly, as no other name
/// has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(Box<[u8]>);

impl Key {
    pub(crate) fn new(namespace: &str, kind: LockKind, name: &LockName) -> Self {
        let mark = match kind {
            LockKind::Lock => ":",
            LockKind::Semaphore => "#",
        };
        let mut bytes = [namespace, mark, name.as_str()].concat().into_bytes();
        if bytes.len() >= MAX_BYTES {
            let digest = hexadecimal(&Sha256::digest(&bytes));
            bytes.truncate(MAX_BYTES - digest.len());
            bytes.extend(digest.as_bytes());
        }
        Self(bytes.into())
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the name as a literal for SQL.
    pub(crate) fn as_sql(&self) -> String {
        literal(&self.0)
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
    fn a_short_name_is_readable_in_the_table() {
        assert_eq!(key("lockkit", LockKind::Lock, "a").as_bytes(), b"lockkit:a");
        assert_eq!(key("", LockKind::Lock, "é").as_sql(), "x'3ac3a9'");
    }
}
