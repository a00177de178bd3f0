//! Fencing tokens, from a counter of the server's that rises with every look and is in no file: `UUID_SHORT()`.
//!
//! Whoever locks a row looks at that counter in the same statement, so that the order of looks is the order of grants.
//! What is durable is a mapping per name: it says which token the looks of one life of the server stand for, and all of
//! its tokens are from a block that was reserved, by a durable write, before it was made. A life of the server has a
//! number. A mapping from an earlier one, or one that is used up, is replaced by one with tokens above all of its own.

use std::str::FromStr;

/// For how many looks a name's first mapping in a life of the server lasts, whoever makes them.
const FIRST_LOOKS: u64 = 1_024;

/// The most tokens of a block that is larger than the first: a minute of the clock, which counters are not to outrun,
/// since one that is deleted begins anew there.
const MOST: u64 = 1 << 26;

/// The tokens that looks stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// The life of the server in which it was made.
    pub(crate) life: u64,
    /// The first token of the block, which the look `since` stands for.
    pub(crate) base: u64,
    pub(crate) since: u64,
    /// The last token of the block.
    pub(crate) last: u64,
    /// How much higher a look's token is than that of the look before.
    pub(crate) step: u64,
}

impl Mapping {
    /// The first of the `count` tokens of a look that was made in `life`. `None` if another mapping is needed.
    pub(crate) fn first(&self, look: u64, life: u64, count: u64) -> Option<u64> {
        if self.life < life || self.step < count {
            return None;
        }
        let above = look.checked_sub(self.since)?.checked_mul(self.step)?;
        let first = self.base.checked_add(above)?;
        (first.checked_add(count)? <= self.last.checked_add(1)?).then_some(first)
    }

    /// The size of the block for the mapping that is to replace this one, and its step. It is 64 times as large as one that
    /// was used up in the same life.
    pub(crate) fn next(&self, life: u64, count: u64) -> (u64, u64) {
        let (step, size) = if self.life < life {
            (count, 0)
        } else {
            (
                count.max(self.step),
                self.last.saturating_sub(self.base).saturating_add(1),
            )
        };
        let size = size.saturating_mul(64).min(MOST);
        (size.max(step.saturating_mul(FIRST_LOOKS)), step)
    }
}

/// As the server spells its columns, in their order.
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
    fn a_look_stands_for_tokens_of_its_own() {
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
        assert_eq!(MAPPING.first(49, 7, 1), None, "a look from before it was made");
        assert_eq!(MAPPING.first(51, 8, 1), None, "it is from an earlier life");
        assert_eq!(
            MAPPING.first(51, 7, 11),
            None,
            "the next look's tokens are among them"
        );
        assert_eq!(MAPPING.first(u64::MAX, 7, 1), None);
        assert_eq!(Mapping::default().first(1, 1, 1), None);
    }

    #[test]
    fn blocks_grow_where_they_are_used_up() {
        let grown = Mapping {
            last: MAPPING.base + 40_959,
            ..MAPPING
        };
        assert_eq!(grown.next(7, 1), (2_621_440, 10));
        assert_eq!(
            grown.next(7, 10_000),
            (10_240_000, 10_000),
            "for as many looks as at first"
        );
        assert_eq!(grown.next(8, 1), (1_024, 1), "another life");
        let most = Mapping {
            last: MAPPING.base + MOST,
            ..MAPPING
        };
        assert_eq!(most.next(7, 1), (MOST, 10));
        let widest = 65_536;
        assert_eq!(most.next(7, widest), (widest * FIRST_LOOKS, widest));
        assert_eq!(Mapping::default().next(1, 65), (65 * 1_024, 65));
    }
}
