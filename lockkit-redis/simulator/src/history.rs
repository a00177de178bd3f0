//! The holds and writes of a schedule, and the faults in them.

use crate::master::{Micros, Mode};

/// Faults of a schedule. Each field counts the pairs of holds, or the writes, that show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Conflicting holds at the same time.
    pub overlaps: u32,
    /// Holds with the same token.
    pub duplicates: u32,
    /// Tokens that are not above that of a conflicting hold acquired before.
    pub disorder: u32,
    /// Such tokens where the earlier hold was acquired before the later request began.
    pub reversals: u32,
    /// Writes of one holder that the resource accepted after another's. It refuses tokens below the highest it has seen.
    pub interleaved: u32,
    /// Holds that were renewed although another client had asked for the lock and acquired it meanwhile.
    pub revived: u32,
    /// Clients that were not served after the end of all faults.
    pub starved: u32,
}

/// One hold as its user sees it: from the return of the acquisition to the release, the end of the lease, or the loss.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) client: usize,
    pub(crate) mode: Mode,
    pub(crate) token: u64,
    /// The beginning of its last round.
    pub(crate) asked: Micros,
    pub(crate) from: Micros,
    pub(crate) until: Micros,
    /// The beginning of its last successful renewal.
    pub(crate) renewed: Option<Micros>,
}

/// A resource that refuses tokens below the highest it has seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Resource {
    highest: u64,
    last: Option<usize>,
    done: Vec<usize>,
    pub(crate) refused: u32,
    pub(crate) interleaved: u32,
}

impl Resource {
    pub(crate) fn write(&mut self, hold: usize, token: u64) {
        if token < self.highest {
            self.refused += 1;
            return;
        }
        self.highest = token;
        if self.last != Some(hold) {
            self.done.extend(self.last);
            self.last = Some(hold);
        }
        if self.done.contains(&hold) {
            self.interleaved += 1;
        }
    }
}

/// Compares every pair of holds.
pub(crate) fn judge(holds: &[Hold], faults: &mut Faults) {
    for (index, one) in holds.iter().enumerate() {
        for other in &holds[index + 1..] {
            // Holds come in the order in which they were acquired.
            debug_assert!(one.from <= other.from);
            if one.token == other.token {
                faults.duplicates += 1;
            }
            if one.mode == Mode::Shared && other.mode == Mode::Shared {
                continue;
            }
            if other.from < one.until && other.from < other.until {
                faults.overlaps += 1;
            }
            if other.token <= one.token {
                faults.disorder += 1;
                faults.reversals += u32::from(one.from <= other.asked);
            }
            let granted = other.from < other.until && one.client != other.client;
            let since = one.from <= other.asked;
            if granted && since && one.renewed.is_some_and(|renewed| other.from < renewed) {
                faults.revived += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(from: Micros, until: Micros, token: u64) -> Hold {
        Hold {
            client: usize::try_from(token).unwrap_or_default(),
            mode: Mode::Exclusive,
            token,
            asked: from.saturating_sub(1),
            from,
            until,
            renewed: None,
        }
    }

    fn faults(holds: &[Hold]) -> Faults {
        let mut faults = Faults::default();
        judge(holds, &mut faults);
        faults
    }

    #[test]
    fn a_good_history_has_no_faults() {
        assert_eq!(
            faults(&[hold(0, 5, 1), hold(5, 9, 2), hold(20, 30, 7)]),
            Faults::default()
        );
    }

    #[test]
    fn an_overlap_is_seen() {
        assert_eq!(faults(&[hold(0, 6, 1), hold(5, 9, 2)]).overlaps, 1);
    }

    #[test]
    fn a_hold_that_was_over_when_it_came_overlaps_with_nobody() {
        assert_eq!(faults(&[hold(0, 6, 1), hold(5, 5, 2)]).overlaps, 0);
    }

    #[test]
    fn readers_overlap_with_writers_alone() {
        let shared = |hold| Hold {
            mode: Mode::Shared,
            ..hold
        };
        assert_eq!(
            faults(&[shared(hold(0, 6, 3)), shared(hold(5, 9, 2))]),
            Faults::default()
        );
        assert_eq!(faults(&[shared(hold(0, 6, 1)), hold(5, 9, 2)]).overlaps, 1);
    }

    #[test]
    fn a_token_that_repeats_or_falls_back_is_seen() {
        let again = faults(&[hold(0, 5, 2), hold(5, 9, 2)]);
        assert_eq!((again.duplicates, again.disorder, again.reversals), (1, 1, 1));
        let side_by_side = Hold {
            asked: 0,
            ..hold(6, 9, 1)
        };
        let back = faults(&[hold(1, 5, 2), side_by_side]);
        assert_eq!((back.duplicates, back.disorder, back.reversals), (0, 1, 0));
        let back = faults(&[hold(0, 5, 2), hold(7, 9, 1)]);
        assert_eq!((back.duplicates, back.disorder, back.reversals), (0, 1, 1));
    }

    #[test]
    fn a_hold_renewed_after_another_was_granted_is_seen() {
        let renewed = |at| Hold {
            renewed: Some(at),
            ..hold(0, 50, 1)
        };
        assert_eq!(faults(&[renewed(10), hold(11, 12, 2)]).revived, 0);
        assert_eq!(faults(&[renewed(13), hold(11, 12, 2)]).revived, 1);
    }

    #[test]
    fn a_resource_takes_interleaved_writes_only_from_equal_tokens() {
        let mut resource = Resource::default();
        for (hold, token) in [(0, 1), (1, 2), (0, 1), (1, 2)] {
            resource.write(hold, token);
        }
        assert_eq!((resource.refused, resource.interleaved), (1, 0));
        for (hold, token) in [(2, 2), (1, 2)] {
            resource.write(hold, token);
        }
        assert_eq!(resource.interleaved, 1);
    }
}
