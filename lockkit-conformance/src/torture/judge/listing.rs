//! Lists of what is held. That they delay and refuse nobody is a matter of liveness and of answers.

use std::time::Duration;

use super::{Court, describe, nanos, told_after};
use crate::{
    history::Nanos,
    torture::{
        play::election_of,
        record::{Finding, Law, Listed, Record},
    },
};

/// The time after its grant, and after what kept its client from it, within which a hold is shown that is shown late.
const SHOWN: Duration = Duration::from_secs(1);

impl Court<'_> {
    /// Convicts a list that leaves out a hold which was there throughout.
    pub(super) fn lists(&self, findings: &mut Vec<Finding>) {
        let Some(lock) = self.records.first().map(|record| &record.acquisition.lock) else {
            return;
        };
        let is_asked_for = |listed: &&Listed| listed.of_elections == election_of(lock).is_some();
        let lists = self.story.lists.iter().filter(is_asked_for);
        let guilty = lists
            .filter(|listed| !listed.names.contains(lock))
            .find_map(|listed| {
                let through = |record: &&&Record| {
                    let sure = record.sure();
                    sure.is_some_and(|(from, to)| from <= listed.from && to >= listed.to)
                        && !self.may_be_gone(record, listed)
                        && !self.may_be_unshown(record, listed)
                };
                let held = self.records.iter().find(through)?;
                Some(format!(
                    "{} held, and a list did not show it: {listed:?}",
                    describe(held)
                ))
            });
        findings.extend(guilty.map(|detail| Finding::new(Law::List, detail)));
    }

    /// Says whether something may have kept its client from showing the hold, from its first moments until the list.
    fn may_be_unshown(&self, record: &Record, listed: &Listed) -> bool {
        if !self.story.bounds.shows_late {
            return false;
        }
        let shown = nanos(SHOWN + self.story.stood_still);
        let keeps_from_it = |from: Nanos, to: Nanos| {
            from <= record.answered().saturating_add(shown) && listed.from <= to.saturating_add(shown)
        };
        let struck = self.story.struck.iter().filter(|struck| struck.fault.is_some());
        struck
            .map(|struck| (struck.from, struck.to))
            .chain(self.pauses_of(record, listed.to))
            .any(|(from, to)| keeps_from_it(from, to))
    }

    /// Says whether the server may not have had the hold in that time, whatever its holder came to know of it.
    fn may_be_gone(&self, record: &Record, listed: &Listed) -> bool {
        let told_by = |to, told| listed.from <= u64::saturating_add(to, told_after(record, told));
        let mut struck = self.story.struck.iter();
        struck.any(|struck| {
            let overlap = struck.fault.and_then(|fault| fault.overlap);
            overlap.is_some_and(|told| {
                let to = struck.to.saturating_add(nanos(self.story.stood_still));
                struck.from <= listed.to && told_by(to, self.told(struck, told))
            })
        }) || self.story.breaks.iter().any(|(lock, from, to)| {
            *lock == record.acquisition.lock && *from <= listed.to && told_by(*to, super::REVOKED)
        })
    }
}
