//! Fencing tokens, from tickets of the server.
//!
//! `UUID_SHORT()` draws a *ticket*: the next value of a counter that all sessions of the server share and that no file keeps.
//! A claim draws one in the statement that locks its row, after the row is locked, so tickets are in the order of the
//! grants.
//!
//! A *mapping* per name turns tickets of one life of the server into tokens. It is durable. All of its tokens are from a block
//! that was reserved before by another durable write. Each life of the server has a number. A mapping of an earlier life, or one
//! whose block is used up, is replaced by a mapping with higher tokens.

use std::str::FromStr;

/// The number of tickets in a name's first mapping of a life, from all clients.
const FIRST_TICKETS: u64 = 1_024;

/// The most tokens of a block that is larger than the first one: a minute of the clock, in µs. A counter that was deleted
/// starts again at the clock, so counters are not to get far ahead of it.
const MAX_TOKENS: u64 = 1 << 26;

/// A mapping of tickets to tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// The life of the server in which it was made.
    pub(crate) life: u64,
    /// The first token of the block, which belongs to the ticket `since`.
    pub(crate) base: u64,
    pub(crate) since: u64,
    /// The last token of the block.
    pub(crate) last: u64,
    /// The number of tokens per ticket.
    pub(crate) step: u64,
}

impl Mapping {
    /// Returns the first of the `count` tokens of a ticket that was drawn in `life`. `None` if it takes another mapping.
    pub(crate) fn first(&self, ticket: u64, life: u64, count: u64) -> Option<u64> {
        if self.life < life || self.step < count {
            return None;
        }
        let above = ticket.checked_sub(self.since)?.checked_mul(self.step)?;
        let first = self.base.checked_add(above)?;
        (first.checked_add(count)? <= self.last.checked_add(1)?).then_some(first)
    }

    /// Returns the size of the block and the step of the next mapping. A block that was used up in the same life is followed by
    /// one of 64 times its size.
    pub(crate) fn next(&self, life: u64, count: u64) -> (u64, u64) {
        let (step, size) = if self.life < life {
            (count, 0)
        } else {
            (
                count.max(self.step),
                self.last.saturating_sub(self.base).saturating_add(1),
            )
        };
        let size = size.saturating_mul(64).min(MAX_TOKENS);
        (size.max(step.saturating_mul(FIRST_TICKETS)), step)
    }
}

/// Reads the columns as the server joins them, in this order.
impl FromStr for Mapping {
    type Err = Box<dyn std::error::Error + Send + Sync>;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let numbers: Vec<u64> = text.split('/').map(str::parse).collect::<Result<_, _>>()?;
        let [life, base, since, last, step] = numbers[..] else {
            return Err(format!("`{text}` is no mapping of tokens").into());
        };
        Ok(Self {
            life,
            base,
            since,
            last,
            step,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPPING: Mapping = Mapping {
        life: 7,
        base: 1_001,
        since: 50,
        last: 1_100,
        step: 10,
    };

    #[test]
    fn each_ticket_has_tokens_of_its_own() {
        assert_eq!("7/1001/50/1100/10".parse::<Mapping>().unwrap(), MAPPING);
        assert!("7/1001/50/1100".parse::<Mapping>().is_err());
        assert_eq!(MAPPING.first(50, 7, 10), Some(1_001));
        assert_eq!(MAPPING.first(51, 7, 1), Some(1_011));
        assert_eq!(
            MAPPING.first(51, 6, 1),
            Some(1_011),
            "one life may have several numbers"
        );
        assert_eq!(MAPPING.first(59, 7, 10), Some(1_091));
        assert_eq!(MAPPING.first(60, 7, 1), None, "the block ends before");
        assert_eq!(MAPPING.first(49, 7, 1), None, "a ticket from before it was made");
        assert_eq!(MAPPING.first(51, 8, 1), None, "it is from an earlier life");
        assert_eq!(
            MAPPING.first(51, 7, 11),
            None,
            "the next ticket's tokens are among them"
        );
        assert_eq!(MAPPING.first(u64::MAX, 7, 1), None);
        assert_eq!(Mapping::default().first(1, 1, 1), None);
    }

    #[test]
    fn blocks_grow_when_they_are_used_up() {
        let grown = Mapping {
            last: MAPPING.base + 40_959,
            ..MAPPING
        };
        assert_eq!(grown.next(7, 1), (2_621_440, 10));
        assert_eq!(
            grown.next(7, 10_000),
            (10_240_000, 10_000),
            "for as many tickets as at first"
        );
        assert_eq!(grown.next(8, 1), (1_024, 1), "another life");
        let most = Mapping {
            last: MAPPING.base + MAX_TOKENS,
            ..MAPPING
        };
        assert_eq!(most.next(7, 1), (MAX_TOKENS, 10));
        let widest = 65_536;
        assert_eq!(most.next(7, widest), (widest * FIRST_TICKETS, widest));
        assert_eq!(Mapping::default().next(1, 65), (65 * 1_024, 65));
    }
}
