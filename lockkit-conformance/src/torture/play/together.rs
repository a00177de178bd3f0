//! Several at once, all or none: locks, or permits of one semaphore.

use std::{collections::BTreeSet, time::Duration};

use lockkit_core::{
    Error, HoldView, LockClient, LockGuard, LockSet, Result, acquire_all, spi::chain, try_acquire_all,
};
use tokio::time::{Instant, sleep};

use super::{ALL, Ask, End, OP_TIMEOUT, SLACK, Scene, look};
use crate::{
    case_run::poll_at_most,
    history::now,
    torture::record::{Asked, Fared, Law, Over, Record},
};

impl Scene<'_> {
    /// Takes all or none, and holds them.
    pub(super) async fn together(&self, client: &LockClient, names: &[String]) {
        let asked = match self.step.ask {
            Ask::AllNow | Ask::ManyNow(_) => Asked::TriedTogether,
            _ => Asked::Together,
        };
        let permits = match self.step.ask {
            Ask::Many(permits, _) | Ask::ManyNow(permits) => permits,
            _ => 1,
        };
        let mut records = Vec::new();
        for name in names {
            for place in 0..permits {
                let record = self.record(name, asked).map(|record| Record {
                    place: (place, permits),
                    ..record
                });
                records.extend(record);
            }
        }
        for record in &records {
            self.note(record);
        }
        let what = format!("{:?} of {names:?} by {}", self.step.ask, self.who);
        let wait = match self.step.ask {
            Ask::All(wait) | Ask::Many(_, Some(wait)) => Duration::from_millis(wait) + OP_TIMEOUT,
            Ask::AllNow => OP_TIMEOUT * ALL,
            // The lock of those who collect them, too.
            Ask::ManyNow(permits) => OP_TIMEOUT * (permits + 1),
            _ => self.stage.patience(),
        };
        let asking = self.set(client, names);
        let set = match self.stage.bounded(wait + SLACK, &what, asking).await {
            Some(Ok(Some(set))) => set,
            failed => return self.none(failed.as_ref(), &mut records),
        };
        let at = now();
        let views: Vec<_> = set.guards().iter().map(LockGuard::view).collect();
        self.judge_set(&views, &records, &what);
        let find = |view: &HoldView, place: usize| {
            let of_lock = |record: &Record| record.acquisition.lock == view.name().as_str();
            if permits > 1 {
                Some(place)
            } else {
                records.iter().position(of_lock)
            }
        };
        let places: Vec<_> = views.iter().enumerate().map(|(n, view)| find(view, n)).collect();
        for (view, place) in views.iter().zip(&places) {
            let Some(record) = place.and_then(|place| records.get_mut(place)) else {
                continue;
            };
            record.acquisition.granted = Some((at, view.token().get()));
            record.fared = Fared::Granted;
            look(view, record);
            self.note(record);
        }
        let until = self.rests_until();
        loop {
            for (view, place) in views.iter().zip(&places) {
                if let Some(record) = place.and_then(|place| records.get_mut(place)) {
                    look(view, record);
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            sleep(left.min(Duration::from_millis(5))).await;
        }
        self.give_back(set, &mut records, names).await;
    }

    async fn set(&self, client: &LockClient, names: &[String]) -> Result<Option<LockSet>> {
        let options = self.options();
        let locks = names.iter().map(|name| self.lock(client, name));
        let locks = locks.collect::<Result<Vec<_>>>()?;
        let all: Vec<_> = locks.iter().collect();
        match self.step.ask {
            Ask::AllNow => try_acquire_all(&all, &options).await,
            Ask::Many(permits, None) => all[0].acquire_many(permits).await.map(Some),
            Ask::Many(permits, Some(wait)) => {
                let lock = all[0].with_options(options.wait(Duration::from_millis(wait)));
                lock.acquire_many(permits).await.map(Some)
            }
            Ask::ManyNow(permits) => all[0].try_acquire_many(permits).await,
            Ask::All(wait) => {
                let options = options.wait(Duration::from_millis(wait));
                acquire_all(&all, &options).await.map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Notes that there is no set. Which of them was taken is not known, nor which were held meanwhile.
    fn none(&self, failed: Option<&Result<Option<LockSet>>>, records: &mut [Record]) {
        let at = now();
        for record in records {
            record.acquisition.gave_up = Some(at);
            match failed {
                Some(Ok(_) | Err(Error::Timeout { .. })) => record.fared = Fared::Taken,
                // A part of it was lost, or it hangs.
                Some(Err(Error::Lost { .. })) | None => record.fared = Fared::Dropped,
                Some(Err(error)) => self.failed(record, error),
            }
            self.note(record);
        }
    }

    /// There are as many as were asked for, and each is another.
    fn judge_set(&self, views: &[HoldView], records: &[Record], what: &str) {
        let holds: BTreeSet<_> = views
            .iter()
            .map(|view| (view.name().as_str(), view.token()))
            .collect();
        if holds.len() != records.len() || views.len() != records.len() {
            let detail = format!("{what}: {} holds, of which are granted {holds:?}", records.len());
            self.stage.find(Law::Exclusion, detail);
        }
    }

    async fn give_back(&self, set: LockSet, records: &mut [Record], names: &[String]) {
        let many = u32::try_from(records.len()).unwrap_or(ALL);
        let over = match self.step.end {
            End::Drop => {
                drop(set);
                Over::Dropped
            }
            End::HalfRelease => {
                let _ = poll_at_most(1, set.release()).await;
                Over::Dropped
            }
            _ => {
                let what = format!("release of all of {names:?} by {}", self.who);
                let limit = OP_TIMEOUT * many + SLACK;
                match self.stage.bounded(limit, &what, set.release()).await {
                    Some(Ok(())) => Over::Released,
                    failed => {
                        let failed = failed.and_then(Result::err);
                        if let Some(error) = failed.filter(|error| !error.is_lost() && !self.seat.is_gone()) {
                            for record in records.iter_mut() {
                                record.error = chain(&error);
                            }
                        }
                        Over::Lost
                    }
                }
            }
        };
        let at = now();
        for record in records {
            record.over = if record.acquisition.lost.is_some() {
                Over::Lost
            } else {
                over
            };
            record.acquisition.released = Some(at);
            self.note(record);
        }
    }
}
