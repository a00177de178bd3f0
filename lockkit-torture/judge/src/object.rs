//! A lock as it ought to be, and the search for an order in which it would have done what was seen.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use stateright::semantics::{ConsistencyTester as _, LinearizabilityTester, SequentialSpec};

use crate::{
    plan::{Does, Operation},
    text::Hold,
};

/// A lock or semaphore without any concurrency.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    is_semaphore: bool,
    /// The number of permits that those who hold have given.
    size: u32,
    /// Whether each holds alone.
    holders: BTreeMap<usize, bool>,
    /// The highest token so far, and that of an exclusive hold.
    highest: u64,
    highest_exclusive: u64,
    /// Tokens of those that exclude each other rise.
    rise: bool,
    /// The steps that the search has left.
    steps: Rc<Cell<u64>>,
}

impl Object {
    pub(crate) fn new(holds: &[&Hold]) -> Self {
        // A semaphore of one is a lock.
        let permits = holds.iter().map(|hold| hold.of).max().unwrap_or_default();
        Self {
            is_semaphore: permits > 1,
            size: 0,
            holders: BTreeMap::new(),
            highest: 0,
            highest_exclusive: 0,
            rise: permits <= 1,
            steps: Rc::default(),
        }
    }

    /// Nobody certainly holds what was held in the epoch before; its tokens go on.
    pub(crate) fn of_next_epoch(self, holds: &[&Hold]) -> Self {
        Self {
            highest: self.highest,
            highest_exclusive: self.highest_exclusive,
            ..Self::new(holds)
        }
    }

    pub(crate) fn without_tokens(&self) -> Self {
        Self {
            rise: false,
            ..self.clone()
        }
    }

    fn is_free_for(&self, is_exclusive: bool, of: u32) -> bool {
        if self.is_semaphore {
            // Two sizes exclude each other.
            self.holders.is_empty() || self.size == of && self.holders.len() < of as usize
        } else if is_exclusive {
            self.holders.is_empty()
        } else {
            self.holders.values().all(|alone| !alone)
        }
    }

    /// Does it, if it can be done.
    fn does(&mut self, does: Does) -> bool {
        match does {
            Does::Acquire {
                hold,
                is_exclusive,
                of,
                token,
                adopts,
                may_be_over,
                is_superseded,
            } => {
                let above = if is_exclusive {
                    self.highest
                } else {
                    self.highest_exclusive
                };
                if is_superseded && token < above {
                    return true;
                }
                // A hold that is adopted has the token that it had.
                let rises = token > above || may_be_over || adopts && token == above;
                if !self.is_free_for(is_exclusive, of) || self.rise && !rises {
                    return false;
                }
                self.holders.insert(hold, is_exclusive);
                self.size = of;
                self.highest = self.highest.max(token);
                if is_exclusive {
                    self.highest_exclusive = self.highest_exclusive.max(token);
                }
                true
            }
            Does::Downgrade { hold } => {
                // It may have been ended before.
                if let Some(alone) = self.holders.get_mut(&hold) {
                    *alone = false;
                }
                true
            }
            Does::End { hold, is_superseded } => self.holders.remove(&hold).is_some() || is_superseded,
            Does::Restart { clock } => {
                self.highest = self.highest.min(clock);
                self.highest_exclusive = self.highest_exclusive.min(clock);
                true
            }
        }
    }
}

impl SequentialSpec for Object {
    type Op = Does;
    /// It was done.
    type Ret = bool;

    fn invoke(&mut self, does: &Does) -> bool {
        let Some(left) = self.steps.get().checked_sub(1) else {
            return false;
        };
        self.steps.set(left);
        self.does(*does)
    }
}

/// The result of a search.
pub(crate) enum Search {
    /// The lock after all that is in the window.
    Order(Object),
    None,
    /// There was no end within the bound.
    Undecided,
}

/// Searches for an order of what is in `window`, from what `object` was before.
pub(crate) fn search(object: &Object, window: &[Operation], steps: u64) -> Search {
    let object = Object {
        steps: Rc::new(Cell::new(steps)),
        ..object.clone()
    };
    // The search tries those with the lowest numbers first: in the order in which they have to be done is a good guess.
    let mut window: Vec<_> = window.iter().collect();
    window.sort_by_key(|operation| (operation.to, operation.from));
    let mut moments = BTreeSet::new();
    for (number, operation) in window.iter().enumerate() {
        // What begins when another ends is beside it.
        moments.insert((operation.from, false, number));
        moments.insert((operation.to, true, number));
    }
    let mut tester = LinearizabilityTester::new(object.clone());
    for (_, is_done, number) in moments {
        let does = window[number].does;
        let noted = if is_done {
            tester.on_return(number, true)
        } else {
            tester.on_invoke(number, does)
        };
        if noted.is_err() {
            return Search::Undecided;
        }
    }
    let Some(order) = tester.serialized_history() else {
        return if object.steps.get() == 0 {
            Search::Undecided
        } else {
            Search::None
        };
    };
    let mut object = object;
    for (does, _) in order {
        object.does(does);
    }
    Search::Order(object)
}
