//! Raised tokens, for backends whose tokens are numbers that the server counts anyway, such as those of its transactions.
//!
//! Such a number cannot be raised. So a *base* is added to it to make the token. To raise tokens is to write a higher base at the
//! server, which counts for the numbers after that write. The bases before it are kept beside it: so everybody makes the same token
//! of a number, at any time, also of one from before the last raise. This module is without I/O.
//!
//! ```
//! use lockkit_core::spi::fence::Bases;
//!
//! // The server has come to number 6.
//! let text = Bases::default().raised(1_000_000, 6).unwrap();
//! // It writes the text with number 7.
//! let bases = Bases::read(&text, 7).unwrap();
//! assert_eq!(bases.token(6), Some(6));
//! assert_eq!(bases.token(8), Some(1_000_002));
//! ```

use std::fmt::Write as _;

use crate::{Error, FencingToken, Result};

/// The highest token that tokens are raised above, on a backend that counts to `i64::MAX`: half of that, which SQL's `BIGINT` has. What is
/// left is enough for any server.
pub const MOST: u64 = 1 << 62;

/// The number of bases that are kept. A hold that outlasts so many raises is shown with another token than it has, and a place in the queue
/// may be granted with a lower one. Nobody raises so often: each one changes the backend.
const KEPT: usize = 1_000;

/// Refuses to raise tokens above one that is higher than `most`.
///
/// # Errors
/// [`Error::InvalidOptions`] if it is.
pub fn check(above: FencingToken, most: u64) -> Result<()> {
    if above.get() <= most {
        return Ok(());
    }
    let reason = format!(
        "{above} is above {most}, the most to which this backend can raise its tokens, so that enough are left"
    );
    Err(Error::invalid_option("above", reason))
}

/// The bases that were ever added to a server's numbers, up to the one in use. None at first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bases {
    /// The number of the transaction that wrote each, and the base: it counts for the numbers after that one. The oldest is first.
    all: Vec<(u64, u64)>,
}

impl Bases {
    /// Reads what [`raised`](Self::raised) has made, and a transaction of this number has written. `None` if it is something else.
    pub fn read(text: &[u8], written: u64) -> Option<Self> {
        let mut all = Vec::new();
        let mut parts = std::str::from_utf8(text).ok()?.split(' ').peekable();
        while let Some(part) = parts.next() {
            let (base, since) = match (part.split_once('@'), parts.peek()) {
                (Some((base, since)), Some(_)) => (base, since.parse().ok()?),
                (None, None) => (part, written),
                _ => return None,
            };
            all.push((since, base.parse().ok()?));
        }
        all.is_sorted_by(|before, after| before.0 < after.0 && before.1 <= after.1)
            .then_some(Self { all })
    }

    /// Returns the token of the hold that has this number. `None` if there is no such token.
    pub fn token(&self, number: u64) -> Option<u64> {
        let mut newest_first = self.all.iter().rev();
        let base = newest_first.find(|(since, _)| *since < number);
        number.checked_add(base.map_or(0, |(_, base)| *base))
    }

    /// Returns the number with which they were written.
    fn written(&self) -> u64 {
        self.all.last().map_or(0, |(since, _)| *since)
    }

    /// Returns the highest token there may be, where the server has come to this number: all later ones are above it.
    pub fn fence(&self, number: u64) -> Option<u64> {
        let number = number.max(self.written());
        self.token(number.checked_add(1)?)?.checked_sub(1)
    }

    /// Returns the text that raises all later tokens above this one, where the server has come to this number. `None` if they are above it
    /// without that.
    pub fn raised(&self, above: u64, number: u64) -> Option<Vec<u8>> {
        if self.fence(number).is_none_or(|fence| fence >= above) {
            return None;
        }
        let base = above.saturating_sub(number.max(self.written()));
        let mut text = String::new();
        let kept = self.all.len().saturating_sub(KEPT - 1);
        for (since, base) in &self.all[kept..] {
            // Writing to a string does not fail.
            let _ = write!(text, "{base}@{since} ");
        }
        let _ = write!(text, "{base}");
        Some(text.into_bytes())
    }
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_number_has_one_token_for_good() {
        let none = Bases::default();
        assert_eq!(none.token(7), Some(7));
        assert_eq!(none.raised(9, 9), None, "it is above without that");
        let first = none.raised(1_000, 9).unwrap();
        assert_eq!(first, b"991");
        let first = Bases::read(&first, 10).unwrap();
        assert_eq!(first.fence(10), Some(1_001), "later ones are above");
        assert_eq!(first.raised(1_001, 10), None);
        assert_eq!(first.raised(1_010, 19), None);
        assert_eq!(first.raised(1_001, 3), None, "it has come to 10 at least");
        assert_eq!(first.raised(1_002, 3), Some(b"991@10 992".to_vec()));
        let second = first.raised(5_000, 15).unwrap();
        assert_eq!(second, b"991@10 4985");
        let second = Bases::read(&second, 20).unwrap();
        for bases in [&first, &second] {
            assert_eq!(bases.token(9), Some(9));
            assert_eq!(bases.token(11), Some(1_002));
            assert_eq!(bases.token(19), Some(1_010));
        }
        assert_eq!(second.token(21), Some(5_006));
        assert_eq!(second.token(u64::MAX), None);
        assert_eq!(second.raised(u64::MAX, u64::MAX), None);
    }

    #[test]
    fn what_is_no_list_of_bases_is_refused() {
        for text in [
            "",
            "x",
            "1@2",
            "1 2",
            "5@9 7@9 8",
            "-1",
            "9@1 5",
            "1@1 ",
            "18446744073709551616",
        ] {
            assert_eq!(Bases::read(text.as_bytes(), 9), None, "{text:?}");
        }
    }

    #[test]
    fn the_list_does_not_grow_for_ever() {
        let mut bases = Bases::default();
        for round in 1..=1_000 {
            let text = bases.raised(round * 1_000_000, round * 10 - 1).unwrap();
            bases = Bases::read(&text, round * 10).unwrap();
        }
        assert_eq!(bases.all.len(), KEPT);
        assert_eq!(bases.token(10_001), Some(1_000_000_002));
        assert_eq!(bases.token(9_999), Some(999_000_010));
    }

    #[test]
    fn a_token_beyond_the_most_is_refused() {
        assert!(check(FencingToken::new(7), 7).is_ok());
        let refused = check(FencingToken::new(8), 7).unwrap_err();
        assert!(refused.to_string().contains("8 is above 7"), "{refused}");
    }
}
