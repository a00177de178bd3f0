//! The sights of observers of elections. That one leads at a time, with tokens that grow, is a matter of exclusion and of tokens.

use std::{collections::BTreeMap, time::Duration};

use super::{Story, describe, nanos};
use crate::{
    history::Nanos,
    torture::record::{Fared, Finding, Law, Over, Record, Sight},
};

/// The time by which what a server shows may be late.
const LATE: Duration = Duration::from_secs(1);
/// The time within which an observer sees who leads, where nothing is wrong: one that nobody wakes looks once a second.
const SEEN: Duration = Duration::from_secs(5);

pub(super) fn elections(story: &Story, findings: &mut Vec<Finding>) {
    let mut observers = BTreeMap::<(&str, u64), Vec<&Sight>>::new();
    for sight in &story.sights {
        let observer = (sight.lock.as_str(), sight.observer);
        observers.entry(observer).or_default().push(sight);
    }
    let guilty = observers.into_iter().find_map(|((lock, _), mut sights)| {
        sights.sort_by_key(|sight| (sight.seen, sight.is_end()));
        let records = story.records.iter();
        let records = records.filter(|record| record.acquisition.lock == lock).collect();
        let election = Election { story, records };
        let seen = || sights.iter().filter(|sight| !sight.is_end());
        out_of_order(&sights)
            .or_else(|| seen().find_map(|sight| election.is_wrong(sight)))
            .or_else(|| election.is_missed(&sights))
    });
    findings.extend(guilty.map(|detail| Finding::new(Law::Election, detail)));
}

/// Whatever befalls the server, an observer sees tokens rise, and no leader twice in a row.
fn out_of_order(sights: &[&Sight]) -> Option<String> {
    let mut highest = 0;
    for pair in sights.windows(2) {
        highest = pair[0].token.max(highest);
        let (last, next) = (pair[0], pair[1]);
        let is_lower = next.token > 0 && next.token < highest;
        if !next.is_end() && (last.token == next.token || is_lower) {
            return Some(format!(
                "an observer saw {next:?} after {last:?}, and {highest} before"
            ));
        }
    }
    None
}

struct Election<'a> {
    story: &'a Story,
    records: Vec<&'a Record>,
}

impl Election<'_> {
    /// Nothing befell anybody, so that a server shows what is.
    fn is_calm(&self) -> bool {
        let Story {
            schedule,
            struck,
            pauses,
            breaks,
            ..
        } = self.story;
        schedule.is_harmless() && struck.is_empty() && pauses.is_empty() && breaks.is_empty()
    }

    fn late(&self) -> Nanos {
        nanos(LATE + self.story.stood_still)
    }

    fn is_wrong(&self, sight: &Sight) -> Option<String> {
        if sight.token == 0 {
            let leads = |record: &&&Record| {
                let sure = record.sure();
                sure.is_some_and(|(from, to)| {
                    from.saturating_add(self.late()) <= sight.looked && to >= sight.seen
                })
            };
            let leader = self.records.iter().find(leads).filter(|_| self.is_calm())?;
            return Some(format!(
                "{} led, and an observer saw nobody: {sight:?}",
                describe(leader)
            ));
        }
        let mut records = self.records.iter();
        let Some(leader) = records.find(|record| record.acquisition.who == sight.leader) else {
            return Some(format!("an observer saw one lead who never asked: {sight:?}"));
        };
        let why = if leader.acquisition.asked > sight.seen {
            "had not asked yet"
        } else if !self.is_calm() {
            return None;
        } else if leader.fared == Fared::Granted && leader.token() != sight.token {
            "led with another token"
        } else if self.had_resigned(leader, sight) {
            "had resigned"
        } else {
            return None;
        };
        Some(format!(
            "{} {why}, and an observer saw it lead: {sight:?}",
            describe(leader)
        ))
    }

    fn had_resigned(&self, leader: &Record, sight: &Sight) -> bool {
        let resigned = leader
            .acquisition
            .released
            .filter(|_| leader.over == Over::Released);
        resigned.is_some_and(|at| at.saturating_add(self.late()) < sight.looked)
    }

    /// Somebody leads for long, and an observer who looks meanwhile does not see it.
    fn is_missed(&self, sights: &[&Sight]) -> Option<String> {
        let (first, last) = (sights.first()?, sights.last()?);
        if !self.is_calm() || first.is_end() || !last.is_end() {
            return None;
        }
        let time = nanos(SEEN + self.story.stood_still);
        let missed = self.records.iter().find(|record| {
            let Some((from, to)) = record.sure() else {
                return false;
            };
            let (from, to) = (from.max(first.seen), to.min(last.seen));
            to.saturating_sub(from) > time && !sights.iter().any(|sight| sight.token == record.token())
        })?;
        Some(format!(
            "{} led, and an observer saw {sights:?}",
            describe(missed)
        ))
    }
}
