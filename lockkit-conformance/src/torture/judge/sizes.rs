//! Semaphores of which clients give several sizes: a size is that of all who hold, and whoever gives another is refused meanwhile.

use super::{Court, IDLE, describe, differ_in_size, nanos};
use crate::{
    history::Nanos,
    torture::record::{Fared, Finding, Law, Record},
};

impl Court<'_> {
    /// Nobody is told that a semaphore has another size where nobody can have given one.
    pub(super) fn sizes(&self, findings: &mut Vec<Finding>) {
        let mut refused = self
            .records
            .iter()
            .filter(|record| record.fared == Fared::OtherSize);
        if let Some(record) = refused.find(|record| !self.may_have_another_size(record)) {
            let detail = format!(
                "{} was told that it has another size, and nobody can have given one: {}",
                describe(record),
                record.error
            );
            findings.push(Finding::new(Law::Answer, detail));
        }
    }

    fn may_have_another_size(&self, record: &Record) -> bool {
        let to = record.answered();
        let from = record
            .acquisition
            .asked
            .saturating_sub(nanos(IDLE + self.story.stood_still));
        let meets = |(since, until): (Nanos, Nanos)| since <= to && until >= from;
        let mut struck = self.story.struck.iter().filter_map(|struck| {
            let recovery = nanos(struck.fault?.recovery);
            Some((struck.from, struck.to.saturating_add(recovery)))
        });
        let mut others = self.records.iter().filter(|other| differ_in_size(record, other));
        self.is_disturbed(record, (from, to))
            || struck.any(meets)
            || others.any(|other| meets(self.possibly(other)) || self.waits(other).into_iter().any(meets))
    }
}
