//! Several holds at once, all or none. That none of them is in the way of others for longer than a moment is a matter of liveness.

use std::collections::HashMap;

use lockkit_core::spi::Mode;

use super::{Court, describe, nanos};
use crate::{
    history::Nanos,
    torture::record::{Asked, Fared, Finding, Law, Record},
};

/// Those who were told that one of several locks is taken, each with what is known against that: a detail, as long as all of them were
/// free.
#[derive(Default)]
pub(super) struct Refusals(HashMap<(u32, u64), Option<String>>);

impl Refusals {
    pub(super) fn hear(&mut self, court: &Court<'_>) {
        let refused = |record: &&&Record| {
            let is_lock = !matches!(record.acquisition.mode, Mode::Permits(_));
            (record.asked, record.fared) == (Asked::TriedTogether, Fared::Taken) && is_lock
        };
        for record in court.records.iter().filter(refused) {
            let key = (record.process, record.acquisition.who);
            let detail = court.was_free(record).map(|_| {
                format!(
                    "{} was told that one of several is taken, and nobody can have had any of them",
                    describe(record)
                )
            });
            let known = self.0.entry(key).or_insert_with(|| detail.clone());
            *known = known.take().and(detail);
        }
    }

    pub(super) fn judge(self, findings: &mut Vec<Finding>) {
        let guilty = self.0.into_values().flatten().min();
        findings.extend(guilty.map(|detail| Finding::new(Law::Answer, detail)));
    }
}

impl Court<'_> {
    /// From when to when others may have had to wait until this one had collected its permits.
    pub(super) fn collects(&self, record: &Record) -> (Nanos, Nanos) {
        let a = &record.acquisition;
        let linger = nanos(super::LINGER);
        let dead = self.story.bounds.dead_holder(record.ttl);
        let end = match record.answered() {
            Nanos::MAX => self.gone_or_dead(record).saturating_add(dead),
            at if self.may_have_failed(record, at.saturating_add(linger)) => at.saturating_add(dead),
            at => at,
        };
        (a.asked, end.saturating_add(linger))
    }
}
