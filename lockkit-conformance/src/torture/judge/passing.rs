//! Holds that were detached and adopted. That a hold which was made a shared one is exclusive until then, and no longer, is a matter of
//! exclusion, tokens and liveness.

use std::collections::HashMap;

use super::{Court, Story, describe};
use crate::{
    history::Nanos,
    torture::record::{Asked, Fared, Finding, Law, Loss, Over, Record, Said},
};

/// The detached holds, by their holders: each as one up to the moment until which nobody else may have been let in.
pub(super) fn settled(story: &Story) -> HashMap<u64, Record> {
    let detached = story
        .records
        .iter()
        .filter(|record| record.over == Over::Detached);
    let mut settled: HashMap<_, _> = detached
        .map(|record| (record.acquisition.who, (record.clone(), Vec::new())))
        .collect();
    for record in &story.records {
        if let Some((_, adopters)) = record.adopts.and_then(|from| settled.get_mut(&from)) {
            adopters.push(record);
        }
    }
    let settle = |(who, (mut record, adopters)): (u64, (Record, Vec<&Record>))| {
        record.detached = lasts_until(story, &record, &adopters);
        (who, record)
    };
    settled.into_iter().map(settle).collect()
}

fn lasts_until(story: &Story, record: &Record, adopters: &[&Record]) -> Option<Nanos> {
    let granted = adopters
        .iter()
        .filter_map(|heir| Some(heir.acquisition.granted?.0));
    if let Some(granted) = granted.min() {
        // It is the heir's from then on.
        return Some(granted - 1);
    }
    let mut asked: Vec<_> = adopters.iter().map(|heir| heir.acquisition.asked).collect();
    asked.sort_unstable();
    let asked_for = story.asks.iter().filter(|asked| {
        let is_it = asked.lock == record.acquisition.lock && asked.token == record.token();
        is_it && asked.said != Said::NotHeld
    });
    let second = asked.get(1).copied().filter(|_| story.bounds.splits);
    let ends = asked_for.map(|asked| asked.from).chain(second);
    ends.chain(record.detached).min()
}

impl Court<'_> {
    /// A detached hold is adopted once, and of those who come in time one gets it.
    pub(super) fn adoptions(&self, findings: &mut Vec<Finding>) {
        let mut adoptions = HashMap::<u64, Vec<&Record>>::new();
        for record in &self.records {
            if let Some(from) = record.adopts {
                adoptions.entry(from).or_default().push(record);
            }
        }
        let mut guilty: Vec<_> = adoptions
            .iter()
            .filter_map(|(from, adopters)| {
                let refused = || {
                    adopters
                        .iter()
                        .find_map(|heir| self.is_refused(heir, *from, adopters))
                };
                twice(adopters)
                    .or_else(|| adopters.iter().find_map(|heir| self.was_asked_for(heir)))
                    .or_else(refused)
            })
            .collect();
        guilty.sort();
        findings.extend(
            guilty
                .into_iter()
                .next()
                .map(|detail| Finding::new(Law::Detached, detail)),
        );
    }

    /// Its holder is to give it up: nobody goes on with it.
    fn was_asked_for(&self, heir: &Record) -> Option<String> {
        let a = &heir.acquisition;
        let (granted, token) = a.granted?;
        let mut asks = self.story.asks.iter();
        let asked = asks.find(|asked| {
            let is_it = asked.lock == a.lock && asked.token == token && asked.to < a.asked;
            let said = matches!(asked.said, Said::Still | Said::Ended);
            is_it && said && !self.is_struck(asked.from, granted)
        })?;
        Some(format!(
            "{} adopted what had been asked for: {asked:?}",
            describe(heir)
        ))
    }

    fn is_refused(&self, heir: &Record, from: u64, adopters: &[&Record]) -> Option<String> {
        if (heir.asked, heir.fared) != (Asked::Adopts, Fared::Taken) || heir.loss == Loss::Asked {
            return None;
        }
        let answered = heir.answered();
        // One that has not been told that the hold is over may have it.
        let competes = |other: &&Record| {
            !std::ptr::eq(*other, heir)
                && other.acquisition.asked <= answered
                && (self.story.bounds.splits || other.fared != Fared::Taken)
        };
        let mut holders = self.records.iter();
        let former =
            holders.find(|record| record.acquisition.who == from && record.over == Over::Detached)?;
        let in_time = former.detached? > answered && !self.may_be_dropped(former, answered);
        (in_time && !adopters.iter().any(competes)).then(|| {
            format!(
                "{} was told that the hold is over, of {}",
                describe(heir),
                describe(former)
            )
        })
    }

    /// The moment at which somebody had adopted the hold.
    pub(super) fn passed_to_heir(&self, record: &Record) -> Option<Nanos> {
        let heirs = self
            .records
            .iter()
            .filter(|heir| heir.adopts == Some(record.acquisition.who));
        heirs.filter_map(|heir| Some(heir.acquisition.granted?.0)).min()
    }
}

fn twice(adopters: &[&Record]) -> Option<String> {
    let granted = |heir: &&&Record| heir.acquisition.granted.is_some();
    let mut granted = adopters.iter().filter(granted);
    let (one, other) = (granted.next()?, granted.next()?);
    Some(format!(
        "{} and {} have adopted one hold",
        describe(one),
        describe(other)
    ))
}
