//! A FIFO queue for one slot within this process. Sans-IO: it moves no task, it returns wakers.
//!
//! The slot's owner may contend at the server, and in exclusive mode keeps the slot while it holds the lock. Giving the slot up
//! offers it to the first waiter. A hand-off offers the hold itself instead, and the slot goes with it. At most one offer is
//! open at a time, since there is one slot.

use std::{collections::BTreeMap, task::Waker};

/// The number of a waiter in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

/// An offer to the waiter whose turn it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Offer<H> {
    /// The slot: go and contend.
    Slot,
    /// A hold that its last owner has passed on; the slot comes with it.
    Hold(H),
}

/// The result of a waiter's look.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn<H> {
    /// It is not its turn. The waker was kept.
    Wait,
    /// It is its turn, with this offer.
    Offered(Offer<H>),
    /// An offer was not taken in time and has been withdrawn: queue again.
    Lapsed,
    /// The queue is closed.
    Closed,
}

/// The queue for a slot that may come with a hold of type `H`. A waiter brings a request of type `W`.
#[derive(Debug)]
pub(crate) struct SlotQueue<W, H> {
    taken: bool,
    offered: Option<(Ticket, Offer<H>)>,
    waiting: BTreeMap<Ticket, Waiting<W>>,
    last: Ticket,
    closed: bool,
}

#[derive(Debug)]
struct Waiting<W> {
    request: W,
    waker: Option<Waker>,
}

impl<W, H> Default for SlotQueue<W, H> {
    fn default() -> Self {
        Self {
            taken: false,
            offered: None,
            waiting: BTreeMap::new(),
            last: Ticket(0),
            closed: false,
        }
    }
}

impl<W, H> SlotQueue<W, H> {
    /// Takes the slot if it is free. It is free only while nobody waits.
    pub(crate) fn enter(&mut self) -> bool {
        let free = !self.taken && !self.closed;
        self.taken |= free;
        free
    }

    /// Queues up behind everyone. Only for a slot that [`enter`](Self::enter) has just found to be taken: nobody would be
    /// woken for a free one.
    pub(crate) fn join(&mut self, request: W) -> Ticket {
        self.last.0 += 1;
        self.waiting.insert(self.last, Waiting { request, waker: None });
        self.last
    }

    /// Returns `ticket`'s turn. If it has not come, `waker` is called when it may have.
    pub(crate) fn poll(&mut self, ticket: Ticket, waker: &Waker) -> Turn<H> {
        if let Some((_, offer)) = self.offered.take_if(|(to, _)| *to == ticket) {
            return Turn::Offered(offer);
        }
        if self.closed {
            // It may have joined since.
            self.waiting.remove(&ticket);
            return Turn::Closed;
        }
        match self.waiting.get_mut(&ticket) {
            Some(waiting) => {
                match &mut waiting.waker {
                    Some(known) => known.clone_from(waker),
                    unset => *unset = Some(waker.clone()),
                }
                Turn::Wait
            }
            None => Turn::Lapsed,
        }
    }

    /// Leaves the queue. Returns the offer that had been made, which the caller must pass on.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> Option<Offer<H>> {
        if let Some((_, offer)) = self.offered.take_if(|(to, _)| *to == ticket) {
            return Some(offer);
        }
        self.waiting.remove(&ticket);
        None
    }

    /// Gives up the slot: to the first waiter, whom the returned waker wakes, or to nobody.
    #[must_use]
    pub(crate) fn pass(&mut self) -> Option<Waker> {
        match self.waiting.pop_first() {
            Some((ticket, waiting)) => {
                self.offered = Some((ticket, Offer::Slot));
                waiting.waker
            }
            None => {
                self.taken = false;
                None
            }
        }
    }

    /// Returns the first waiter's request.
    pub(crate) fn first(&self) -> Option<&W> {
        self.waiting.first_key_value().map(|(_, first)| &first.request)
    }

    /// Passes a hold, and the slot with it, to the [first](Self::first) waiter. The caller has just seen that waiter, under the
    /// same lock.
    #[must_use]
    pub(crate) fn hand_off(&mut self, hold: H) -> Option<Waker> {
        let (ticket, waiting) = self.waiting.pop_first()?;
        self.offered = Some((ticket, Offer::Hold(hold)));
        waiting.waker
    }

    /// Takes back a hold that was offered and not accepted.
    pub(crate) fn withdraw(&mut self, is_it: impl FnOnce(&H) -> bool) -> Option<H> {
        match &self.offered {
            Some((_, Offer::Hold(hold))) if is_it(hold) => match self.offered.take() {
                Some((_, Offer::Hold(hold))) => Some(hold),
                _ => None,
            },
            _ => None,
        }
    }

    /// Lets nobody enter any more. Returns the wakers of those who wait, for them to find that out.
    #[must_use]
    pub(crate) fn close(&mut self) -> Vec<Waker> {
        self.closed = true;
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_values().filter_map(|w| w.waker).collect()
    }

    /// Returns `true` if the slot is free, and so nobody waits.
    pub(crate) fn is_idle(&self) -> bool {
        !self.taken
    }
}

#[cfg(all(test, not(lockkit_loom)))]
mod tests {
    use super::*;

    fn look(queue: &mut SlotQueue<u32, char>, ticket: Ticket) -> Turn<char> {
        queue.poll(ticket, Waker::noop())
    }

    #[test]
    fn the_slot_goes_round_in_order_past_those_who_left() {
        let mut queue = SlotQueue::<u32, char>::default();
        assert!(queue.enter());
        assert!(!queue.enter());
        let tickets: Vec<_> = (0..4).map(|n| queue.join(n)).collect();
        assert_eq!(queue.leave(tickets[1]), None);
        for ticket in [tickets[0], tickets[2], tickets[3]] {
            assert_eq!(look(&mut queue, ticket), Turn::Wait);
            let _ = queue.pass();
            assert!(!queue.enter(), "an offered slot is not free");
            assert_eq!(look(&mut queue, ticket), Turn::Offered(Offer::Slot));
        }
        assert!(queue.pass().is_none());
        assert!(queue.is_idle() && queue.enter());
    }

    #[test]
    fn an_offer_that_nobody_takes_comes_back() {
        let mut queue = SlotQueue::<u32, char>::default();
        assert!(queue.enter());
        let (a, b) = (queue.join(1), queue.join(2));
        assert_eq!(queue.first(), Some(&1));
        let _ = queue.hand_off('x');
        assert_eq!(queue.withdraw(|h| *h == 'y'), None);
        assert_eq!(queue.withdraw(|h| *h == 'x'), Some('x'));
        assert_eq!(look(&mut queue, a), Turn::Lapsed);
        let _ = queue.pass();
        assert_eq!(
            queue.leave(b),
            Some(Offer::Slot),
            "a waiter that leaves must pass its offer on"
        );
    }

    #[test]
    fn those_who_left_leave_nothing_behind() {
        let mut queue = SlotQueue::<u32, char>::default();
        assert!(queue.enter());
        let first = queue.join(0);
        let mut overlapping = queue.join(0);
        for n in 0..10_000 {
            let next = queue.join(n);
            assert_eq!(queue.leave(overlapping), None);
            overlapping = next;
        }
        assert_eq!(queue.waiting.len(), 2);
        assert_eq!(queue.leave(first), None);
        assert_eq!(queue.leave(overlapping), None);
        assert_eq!(queue.waiting.len(), 0);
        assert_eq!(queue.leave(first), None, "leaving twice harms nobody");
    }

    #[test]
    fn closing_turns_everyone_away_but_keeps_an_offer_already_made() {
        let mut queue = SlotQueue::<u32, char>::default();
        assert!(queue.enter());
        let (a, b) = (queue.join(1), queue.join(2));
        let _ = queue.pass();
        let _ = queue.close();
        assert_eq!(look(&mut queue, b), Turn::Closed);
        assert_eq!(look(&mut queue, a), Turn::Offered(Offer::Slot));
        assert!(queue.pass().is_none());
        assert!(!queue.enter());
        let late = queue.join(3);
        assert_eq!(look(&mut queue, late), Turn::Closed);
        assert_eq!(queue.waiting.len(), 0, "what waits keeps the client");
    }
}
