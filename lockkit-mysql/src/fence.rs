//! Fencing tokens, drawn in blocks: one durable write reserves many, and most grants take theirs from memory.
//!
//! The counter's row says where the latest block ends. Whoever holds the lock and finds its own block's end there knows
//! that nobody has drawn another since, and goes on with it. Whoever does not moves the counter on, on the control
//! connection, since the transaction that holds the lock must not be committed, and has its session prove afterwards that
//! it still has the lock. A block whose client dies is given up. The scheme is known as hi-lo.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use tokio::time::Instant;

use crate::key::Key;

/// Of more names than this the block of one is forgotten for each that comes, which costs it a durable write.
const MOST_NAMES: usize = 10_000;

#[derive(Debug, Default)]
pub(crate) struct Fence(Mutex<HashMap<Key, Block>>);

#[derive(Debug)]
struct Block {
    next: u64,
    end: u64,
    /// For how many grants it was drawn.
    grants: u32,
    /// For how many waits nothing is drawn ahead, since it was in vain.
    holds_off: u32,
    /// The term of the control connection that it was drawn in. A server that was restarted may have lost the locks
    /// of those who draw from it.
    term: u64,
    /// The time at which it last gave tokens.
    gave: Option<Instant>,
}

/// The share of a block for a claim that has locked the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The first of its tokens.
    From(u64),
    /// Tokens for whoever still has the row. It gave some after this claim last heard from its session: one of the two has
    /// lost the row since, and the later of the tokens must be the later holder's.
    Unproven,
    /// Nothing: another is to be drawn.
    Nothing,
}

impl Fence {
    /// Whether this name's rows have been seen.
    pub(crate) fn knows(&self, key: &Key) -> bool {
        self.blocks().contains_key(key)
    }

    /// Takes `count` tokens from memory, if this client drew the block that the counter ends at. `proven` is before the
    /// request was sent whose answer said that the row is locked.
    pub(crate) fn take(&self, key: &Key, latest: u64, term: u64, count: u64, proven: Instant) -> Taken {
        let mut blocks = self.blocks();
        let Some(block) = blocks.get_mut(key) else {
            return Taken::Nothing;
        };
        if block.end != latest || block.term != term || (block.end + 1).saturating_sub(block.next) < count {
            return Taken::Nothing;
        }
        if block.gave.is_some_and(|gave| gave >= proven) {
            return Taken::Unproven;
        }
        let first = block.next;
        block.next += count;
        block.gave = Some(Instant::now());
        Taken::From(first)
    }

    /// For how many grants to draw, at most `most`: more each time a block was used up, and no more than one where
    /// another client takes turns with this one and makes what is left of a block useless. So the counter of a name
    /// does not run ahead of the clock, at which it began, and would begin anew if it were deleted.
    pub(crate) fn grants(&self, key: &Key, latest: u64, most: u32) -> u32 {
        const FIRST: u32 = 16;
        const HOLDS_OFF: u32 = 16;
        match self.blocks().get_mut(key) {
            None => FIRST.min(most),
            Some(block) if block.end == latest => block.grants.saturating_mul(2).min(most),
            Some(superseded) => {
                superseded.holds_off = HOLDS_OFF;
                1
            }
        }
    }

    /// Whether to draw a block while waiting. Where more than two clients take turns, each would draw for nothing and
    /// keep the counter busy.
    pub(crate) fn draws_ahead(&self, key: &Key) -> bool {
        self.blocks().get_mut(key).is_none_or(|block| {
            let draws = block.holds_off == 0;
            block.holds_off = block.holds_off.saturating_sub(1);
            draws
        })
    }

    /// Remembers what is left of a block that was drawn.
    pub(crate) fn drawn(&self, key: &Key, (before, end): (u64, u64), grants: u32, term: u64) {
        let mut blocks = self.blocks();
        if blocks.len() >= MOST_NAMES && !blocks.contains_key(key) {
            // Whichever comes first: names that are used in turn are not all forgotten before their next turn.
            let any = blocks.keys().next().cloned();
            any.map(|any| blocks.remove(&any));
        }
        let next = before + 1;
        let holds_off = blocks.get(key).map_or(0, |block| block.holds_off);
        let block = Block {
            next,
            end,
            grants,
            holds_off,
            term,
            gave: None,
        };
        blocks.insert(key.clone(), block);
    }

    fn blocks(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Block>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit_core::{Kind, LockName};

    use super::*;

    #[test]
    fn a_block_is_used_up_and_only_while_it_is_the_latest() {
        let fence = Fence::default();
        let key = Key::new("ns", Kind::Lock, &LockName::new("a").unwrap());
        let later = || Instant::now() + Duration::from_secs(1);
        assert_eq!(fence.take(&key, 0, 1, 1, later()), Taken::Nothing);
        assert_eq!(fence.grants(&key, 100, 8), 8);
        fence.drawn(&key, (100, 110), 5, 1);
        let before = Instant::now();
        assert_eq!(fence.take(&key, 110, 1, 4, before), Taken::From(101));
        assert_eq!(
            fence.take(&key, 110, 1, 4, before),
            Taken::Unproven,
            "another took some since"
        );
        assert_eq!(
            fence.take(&key, 120, 1, 1, later()),
            Taken::Nothing,
            "somebody drew a later block"
        );
        assert_eq!(
            fence.take(&key, 110, 2, 1, later()),
            Taken::Nothing,
            "the server may have been restarted"
        );
        assert_eq!(fence.take(&key, 110, 1, 6, later()), Taken::From(105));
        assert_eq!(fence.take(&key, 110, 1, 1, later()), Taken::Nothing, "used up");
        assert_eq!(fence.grants(&key, 110, 1_024), 10);
        assert_eq!(fence.grants(&key, 110, 8), 8);
        assert!(fence.draws_ahead(&key));
        assert_eq!(fence.grants(&key, 120, 1_024), 1, "others take turns");
        fence.drawn(&key, (120, 130), 1, 1);
        assert_eq!((0..20).filter(|_| fence.draws_ahead(&key)).count(), 4);
    }

    #[test]
    fn names_in_turn_keep_their_blocks() {
        let fence = Fence::default();
        let names = MOST_NAMES + 1;
        let keys: Vec<_> = (0..names)
            .map(|index| Key::new("ns", Kind::Lock, &LockName::new(index.to_string()).unwrap()))
            .collect();
        let mut cold = 0;
        for key in keys.iter().chain(&keys) {
            if !fence.knows(key) {
                cold += 1;
                fence.drawn(key, (0, 10), 1, 1);
            }
        }
        assert!(cold < names + names / 10, "{cold} of {} were cold", 2 * names);
        assert!(fence.blocks().len() <= MOST_NAMES);
    }
}
