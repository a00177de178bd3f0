//! The names of rows.

use std::fmt::Write as _;

use lockkit_core::{Kind, LockName};
use sha2::{Digest, Sha256};

/// The column's width.
const MAX: usize = 255;

/// The name of a lock's or semaphore's rows: `<namespace>:<name>` or `<namespace>#<name>`, as a literal for SQL.
///
/// No namespace has a `:` or `#` in it, so the first one ends it. A name that would be 255 bytes or longer keeps its
/// beginning, for whoever reads the table, and ends in the SHA-256 of the whole: 255 bytes exactly, which none of the
/// others has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(String);

impl Key {
    pub(crate) fn new(namespace: &str, kind: Kind, name: &LockName) -> Self {
        let mark = match kind {
            Kind::Lock => ':',
            Kind::Semaphore => '#',
        };
        let mut bytes = format!("{namespace}{mark}{name}").into_bytes();
        if bytes.len() >= MAX {
            let digest = hexadecimal(&Sha256::digest(&bytes));
            bytes.truncate(MAX - digest.len());
            bytes.extend(digest.as_bytes());
        }
        Self(literal(&bytes))
    }

    /// The literal.
    pub(crate) fn as_sql(&self) -> &str {
        &self.0
    }
}

/// Any bytes as a literal that nothing can break out of.
pub(crate) fn literal(bytes: &[u8]) -> String {
    format!("x'{}'", hexadecimal(bytes))
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn key(namespace: &str, kind: Kind, name: &str) -> Key {
        Key::new(namespace, kind, &LockName::new(name).unwrap())
    }

    #[test]
    fn what_differs_has_different_keys() {
        let long = "x".repeat(LockName::MAX_BYTES - 1);
        let hash = key("ns", Kind::Lock, &format!("{long}1"));
        // A name that looks as the hash of another does.
        let bytes = (0..hash.0.len() - 3)
            .step_by(2)
            .map(|at| u8::from_str_radix(&hash.0[at + 2..at + 4], 16).unwrap());
        let spelled = String::from_utf8(bytes.collect()).unwrap();
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
            for (namespace, kind) in [("", Kind::Lock), ("ns", Kind::Lock), ("ns", Kind::Semaphore)] {
                let key = key(namespace, kind, name);
                assert!(key.0.len() <= 2 * MAX + 3, "{key:?}");
                assert!(keys.insert(key), "{namespace} {kind:?} {name}");
            }
        }
    }

    #[test]
    fn a_short_name_is_the_row_that_others_lock() {
        assert_eq!(key("lockkit", Kind::Lock, "a").as_sql(), literal(b"lockkit:a"));
        assert_eq!(key("", Kind::Lock, "é").as_sql(), literal(":é".as_bytes()));
    }
}
