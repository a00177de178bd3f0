//! What has to be put in order: operations, each with the span in which it took effect, in windows that do not overlap.

use crate::text::{End, Epoch, Hold, Moment};

/// An operation on a lock, and from when to when it may have taken effect.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) from: Moment,
    pub(crate) to: Moment,
    pub(crate) does: Does,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Does {
    Acquire {
        hold: usize,
        is_exclusive: bool,
        /// The size that it gives of a semaphore.
        of: u32,
        token: u64,
        adopts: bool,
        /// What it was granted may have been over by then, as with a hold that is passed on within its client: a higher token may be out.
        may_be_over: bool,
        /// It was: another had been granted the lock since something had ended it.
        is_superseded: bool,
    },
    /// An exclusive hold becomes one of several.
    Downgrade { hold: usize },
    /// It is released, expires, or is ended by something else.
    End { hold: usize, is_superseded: bool },
    /// The counter begins again at this clock, if it was ahead of that.
    Restart { clock: u64 },
}

/// The operations on one name, in windows: one after the other, what is in one took effect before all that is in the next.
pub(crate) fn windows(epoch: &Epoch, holds: &[&Hold]) -> Vec<Vec<Operation>> {
    let (mut operations, ends) = (Vec::new(), Ends::of(epoch, holds));
    for hold in holds {
        let (Some((granted, held)), Some((_, token))) = (hold.certain(), hold.granted) else {
            continue;
        };
        let may_end = may_end(epoch, hold);
        let may_be_over = may_be_over(epoch, hold, granted);
        let is_superseded = is_superseded(epoch, holds, hold);
        operations.push(Operation {
            from: if may_end.is_some() {
                hold.asked
            } else {
                ends.before(hold, granted)
            },
            to: granted,
            does: Does::Acquire {
                hold: hold.id,
                is_exclusive: hold.is_exclusive(),
                of: hold.of,
                token,
                adopts: hold.adopts,
                may_be_over,
                is_superseded,
            },
        });
        if let Some(at) = hold.downgraded.filter(|at| *at <= held) {
            // Whoever is beside it may be there from this call on.
            operations.push(Operation {
                from: at,
                to: at,
                does: Does::Downgrade { hold: hold.id },
            });
        }
        // To end sooner is to be in the way of fewer. So it ends as soon as it can.
        let over = held.saturating_add(1);
        operations.push(Operation {
            from: may_end.unwrap_or(over),
            to: over,
            does: Does::End {
                hold: hold.id,
                is_superseded,
            },
        });
    }
    if !operations.is_empty() {
        let restarts = epoch.ends.iter().filter(|end| end.restarts);
        operations.extend(restarts.map(|end| Operation {
            from: end.from,
            to: end.until,
            does: Does::Restart {
                clock: epoch.clock.saturating_add(end.from / 1_000),
            },
        }));
    }
    operations.sort_by_key(|operation| operation.from);
    let (mut windows, mut reach) = (Vec::<Vec<Operation>>::new(), 0);
    for operation in operations {
        let to = operation.to;
        match windows.last_mut() {
            Some(window) if operation.from <= reach => window.push(operation),
            _ => windows.push(vec![operation]),
        }
        reach = reach.max(to);
    }
    windows
}

/// Says whether something may have ended, without a word to its client yet, what the hold was granted from.
fn may_be_over(epoch: &Epoch, hold: &Hold, granted: Moment) -> bool {
    let on_the_way = |end: &End| hold.asked <= end.until && end.from <= granted;
    let mut ends = epoch.ends.iter().filter(|end| end.is_of(hold) && on_the_way(end));
    ends.any(|end| end.told_by(hold).is_some_and(|by| granted <= by))
}

/// Says whether its holder had not been told yet that others were let in, by what had happened before they were.
fn is_superseded(epoch: &Epoch, holds: &[&Hold], hold: &Hold) -> bool {
    let Some(((granted, last), (_, token))) = hold.certain().zip(hold.granted) else {
        return false;
    };
    epoch.ends.iter().filter(|end| end.is_of(hold)).any(|end| {
        let in_time = end.told_by(hold).is_some_and(|by| last <= by);
        if hold.asked > end.until || !in_time {
            return false;
        }
        let beside = holds.iter().filter(|other| {
            let together = other
                .certain()
                .is_some_and(|(from, until)| from <= last && granted <= until);
            together && other.id != hold.id && (hold.is_exclusive() || other.is_exclusive())
        });
        let mut higher = beside
            .filter(|other| other.granted.is_some_and(|(_, of)| of > token))
            .peekable();
        higher.peek().is_some() && higher.all(|other| other.granted.is_some_and(|(at, _)| at >= end.from))
    })
}

/// The moment from which on the server may have ended the hold, although its holder was seen to hold later.
fn may_end(epoch: &Epoch, hold: &Hold) -> Option<Moment> {
    let (granted, last) = hold.certain()?;
    // No reply takes longer than a lease.
    let earliest = hold.asked.max(granted.saturating_sub(hold.ttl));
    let excuses = |end: &&End| {
        let kept = if hold.is_kept { hold.ttl } else { 0 };
        let by = end.told_by(hold).map(|by| by.saturating_add(kept));
        let is_here = end.is_of(hold) && earliest <= end.until && end.from <= last;
        is_here && by.is_some_and(|by| last <= by)
    };
    let ends = epoch.ends.iter().filter(excuses);
    ends.map(|end| end.from.max(hold.asked)).min()
}

/// The ends of the holds that were certainly there to their end, in order.
struct Ends {
    /// Of all holds, which are in the way of an exclusive one.
    all: Vec<Moment>,
    /// Of exclusive holds, up to the moment at which they become one of several.
    exclusive: Vec<Moment>,
}

impl Ends {
    fn of(epoch: &Epoch, holds: &[&Hold]) -> Self {
        let (mut all, mut exclusive) = (Vec::new(), Vec::new());
        for hold in holds.iter().filter(|hold| may_end(epoch, hold).is_none()) {
            let Some((_, last)) = hold.certain() else { continue };
            all.push(last);
            if hold.is_exclusive() {
                exclusive.push(hold.downgraded.map_or(last, |at| at.min(last)));
            }
        }
        all.sort_unstable();
        exclusive.sort_unstable();
        Self { all, exclusive }
    }

    /// The first moment at which a hold can have been granted. It holds until after its reply, so it came after each hold that excludes it
    /// and was certainly there, to its end, before that reply.
    fn before(&self, hold: &Hold, granted: Moment) -> Moment {
        if hold.of > 1 {
            // Permits have no order, so that the last moment is the best.
            return granted;
        }
        let ends = if hold.is_exclusive() {
            &self.all
        } else {
            &self.exclusive
        };
        // Its own end is not among them: that comes after its reply.
        let before = ends.partition_point(|end| *end < granted);
        let last = before.checked_sub(1).map(|last| ends[last] + 1);
        last.unwrap_or_default().max(hold.asked)
    }
}

/// Shows the operations of a window, as far as somebody will read it.
pub(crate) fn shown(window: &[Operation]) -> String {
    const MOST: usize = 12;
    let mut text: Vec<_> = window
        .iter()
        .take(MOST)
        .map(|operation| {
            let (from, to) = (operation.from / 1_000, operation.to / 1_000);
            format!("{:?} from {from} to {to} µs", operation.does)
        })
        .collect();
    if window.len() > MOST {
        text.push(format!("{} more", window.len() - MOST));
    }
    text.join("; ")
}
