//! Holds that somebody was asked for, and how long holds last.

use std::time::Duration;

use super::{Court, describe, millis, nanos, told_after};
use crate::{
    history::Nanos,
    torture::{
        Told,
        record::{AskBack, Finding, Law, Loss, Record, Said},
    },
};

/// A holder that was asked is told with its next renewal, where its server cannot tell it before.
const TOLD: Told = Told::AtRenewal(Duration::from_secs(2));
/// The time that a hold may take to end, or to be seen ended, beyond its length.
const LATE: Duration = Duration::from_millis(100);

impl Court<'_> {
    fn asks(&self) -> impl Iterator<Item = &AskBack> {
        let lock = self.records.first().map(|record| &record.acquisition.lock);
        let asks = self.story.asks.iter();
        asks.filter(move |asked| Some(&asked.lock) == lock)
    }

    /// Whoever was asked is told, and whoever asked is told right. That nobody else is let in before is a matter of exclusion.
    pub(super) fn asking(&self, findings: &mut Vec<Finding>) {
        let mut guilty = self.records.iter().find_map(|record| self.was_not_asked(record));
        for asked in self.asks() {
            let holds = self.records.iter();
            for record in holds.filter(|record| record.token() == asked.token) {
                guilty = guilty
                    .or_else(|| self.goes_on_after_its_end(record, asked))
                    .or_else(|| self.was_not_told(record, asked));
            }
        }
        findings.extend(guilty.map(|detail| Finding::new(Law::Asked, detail)));
    }

    fn was_not_asked(&self, record: &Record) -> Option<String> {
        let lost = record.acquisition.lost.filter(|_| record.loss == Loss::Asked)?;
        let is_asked = self.asks().any(|asked| asked.from <= lost);
        (!is_asked).then(|| {
            format!(
                "{} was told that it was asked, and nobody had asked",
                describe(record)
            )
        })
    }

    /// Whoever asked was told that the hold had ended.
    fn goes_on_after_its_end(&self, record: &Record, asked: &AskBack) -> Option<String> {
        let (granted, had) = record.had()?;
        let is_wrong = match asked.said {
            Said::NotHeld => granted <= asked.from && had > asked.to,
            Said::Ended => had > asked.to,
            Said::Nothing | Said::Still => false,
        };
        (is_wrong && !self.may_be_dropped(record, asked.to)).then(|| {
            format!(
                "{} had what was said to have ended or not to be held: {asked:?}",
                describe(record)
            )
        })
    }

    /// Says whether a fault, or somebody by force, may have ended the hold by `then` without a word to its holder yet.
    pub(super) fn may_be_dropped(&self, record: &Record, then: Nanos) -> bool {
        let Some((_, had)) = record.had() else {
            return true;
        };
        let untold = |from: Nanos, to: Nanos, told: Told| {
            from <= then && had <= to.saturating_add(told_after(record, told))
        };
        let mut struck = self.story.struck.iter();
        struck.any(|struck| {
            let overlap = struck.fault.and_then(|fault| fault.overlap);
            overlap.is_some_and(|told| untold(struck.from, struck.to, self.told(struck, told)))
        }) || self
            .story
            .breaks
            .iter()
            .any(|(lock, from, to)| *lock == record.acquisition.lock && untold(*from, *to, super::REVOKED))
    }

    /// The server had answered that the holder is asked. From then on it does not renew the hold.
    fn was_not_told(&self, record: &Record, asked: &AskBack) -> Option<String> {
        let (granted, seen) = record.sure()?;
        if asked.said != Said::Still || granted > asked.to {
            return None;
        }
        let told = match (record.renew, self.story.bounds.lease) {
            (true, _) => TOLD,
            (false, true) => TOLD.unanswered(),
            (false, false) => return None,
        };
        let told = told.after(millis(record.ttl)) + self.story.stood_still;
        let limit = asked.to.saturating_add(nanos(told));
        let disturbed = self.is_disturbed(record, (asked.from, seen)) || self.is_struck(asked.from, seen);
        (seen > limit && !disturbed).then(|| {
            format!(
                "{} was asked for it, and was not told within {told:?}: {asked:?}",
                describe(record)
            )
        })
    }

    /// Something befell the deployment in that time, or it had to get over it.
    pub(super) fn is_struck(&self, from: Nanos, to: Nanos) -> bool {
        let mut struck = self.story.struck.iter();
        struck.any(|struck| {
            let recovery = struck.fault.map_or(Duration::ZERO, |fault| fault.recovery);
            struck.from <= to && struck.to.saturating_add(nanos(recovery)) >= from
        })
    }

    /// The moment at which a hold that its holder was asked for, or whose `max_hold` was over, has surely ended, if its release
    /// reaches the server.
    pub(super) fn let_go(&self, record: &Record) -> Option<Nanos> {
        let lost = record.acquisition.lost?;
        let guard = record
            .acquisition
            .released
            .unwrap_or_else(|| self.gone_or_dead(record));
        match record.loss {
            Loss::Asked if self.story.bounds.lease => {
                let dead = self.story.bounds.dead_holder(record.ttl_now);
                Some(guard.min(lost.saturating_add(dead)))
            }
            Loss::Asked => Some(guard),
            // Whatever becomes of its guard.
            Loss::MaxHold => Some(lost),
            Loss::Not | Loss::Expired | Loss::Other => None,
        }
    }

    /// A hold with a `max_hold` ends by a ttl after that, and says so.
    pub(super) fn lengths(&self, findings: &mut Vec<Finding>) {
        let too_long = self.records.iter().filter_map(|record| {
            let (granted, seen) = record.sure()?;
            let end = granted.saturating_add(nanos(millis(record.max_hold? + record.ttl) + LATE));
            (seen > end).then(|| format!("{} held for longer than it may", describe(record)))
        });
        let unsaid = self.records.iter().filter_map(|record| {
            let (granted, seen) = record.sure()?;
            // It held then, so that its lease ended after that.
            let over = seen > granted.saturating_add(nanos(millis(record.max_hold?)));
            (record.loss == Loss::Expired && over).then(|| {
                format!(
                    "{} ended, and did not say that its `max_hold` was over",
                    describe(record)
                )
            })
        });
        let guilty = too_long.chain(unsaid).next();
        findings.extend(guilty.map(|detail| Finding::new(Law::Length, detail)));
    }
}
