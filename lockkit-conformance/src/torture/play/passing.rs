//! Holds that become others: exclusive ones that are made shared, and those that are detached and adopted.

use std::{fs, io, time::Duration};

use lockkit_core::{DetachedHold, Error, LockClient, LockGuard, LossReason, Result, spi::chain};
use tokio::time::{Instant, sleep};

use super::{Held, OP_TIMEOUT, SLACK, Scene, look};
use crate::{
    case_run::poll_at_most,
    history::{Nanos, now},
    torture::record::{Asked, Fared, Law, Over, Record},
};

/// The pause between two looks for a hold to adopt, and between two requests to adopt it.
const PAUSE: Duration = Duration::from_millis(5);

impl Scene<'_> {
    /// Makes an exclusive hold a shared one, and returns it, or what it was if it is that still. `None` if the hold is over.
    pub(super) async fn downgrade(
        &self,
        held: Held,
        record: &mut Record,
        polls: Option<u32>,
    ) -> Option<Held> {
        let Held::Guard(guard) = held else {
            return Some(held);
        };
        let client = self.seat.client();
        let can = client.capabilities();
        let can = can.shared && can.downgrade;
        let token = guard.token();
        let what = format!("a downgrade by {} on {}", self.who, record.acquisition.lock);
        record.downgraded = Some(now());
        self.note(record);
        let done = match polls {
            Some(polls) => poll_at_most(polls as usize, guard.downgrade()).await,
            None => {
                // It is asked for again until the lease is over.
                let ttl = Duration::from_millis(record.ttl);
                let limit = client.dead_holder_bound(ttl) + OP_TIMEOUT + SLACK;
                self.stage.bounded(limit, &what, guard.downgrade()).await
            }
        };
        record.over = Over::Dropped;
        let error = match done {
            Some(Ok(guard)) => {
                record.shared = Some(now());
                record.over = Over::Not;
                if !can {
                    self.stage
                        .find(Law::Denial, format!("{what}: done, where it is refused"));
                }
                if guard.token() != token {
                    let detail = format!("{what}: {token} became {}", guard.token());
                    self.stage.find(Law::Tokens, detail);
                }
                look(&guard.view(), record);
                self.note(record);
                return Some(Held::Guard(guard));
            }
            Some(Err(error)) => error,
            None => {
                record.acquisition.released = Some(now());
                return None;
            }
        };
        match &error.error {
            Error::Unsupported { .. } if !can => {}
            Error::Unsupported { .. } => {
                let detail = format!("{what}: refused: {}", chain(&error.error));
                self.stage.find(Law::Denial, detail);
            }
            Error::Lost { reason, .. } => was_lost(*reason, record),
            _ if self.seat.is_gone() => {}
            other => record.error = chain(other),
        }
        if let Some(guard) = error.guard {
            (record.downgraded, record.over) = (None, Over::Not);
            return Some(Held::Guard(guard));
        }
        record.acquisition.released = Some(now());
        if record.acquisition.lost.is_some() {
            record.over = Over::Lost;
        }
        None
    }

    /// Detaches a hold, and leaves it for those who adopt it.
    pub(super) async fn detach(&self, held: Held, record: &mut Record) {
        record.over = Over::Dropped;
        let Held::Guard(guard) = held else { return };
        let can = self.seat.client().capabilities().detach;
        let (token, begun) = (guard.token(), now());
        let what = format!("detaching of {} on {}", self.who, record.acquisition.lock);
        let done = self.stage.bounded(OP_TIMEOUT + SLACK, &what, guard.detach());
        match done.await {
            Some(Ok(detached)) => {
                self.detached(&detached, begun, record);
                if !can {
                    self.stage
                        .find(Law::Denial, format!("{what}: done, where it is refused"));
                }
                if detached.token() != token || detached.name().as_str() != record.acquisition.lock {
                    let detail = format!("{what}: {token} became {detached:?}");
                    self.stage.find(Law::Detached, detail);
                }
                self.note(record);
                if let Err(error) = self.leave(&detached) {
                    self.stage.find(Law::Failure, format!("{what}: {error}"));
                }
            }
            Some(Err(failed)) => match failed.error {
                Error::Unsupported { .. } if !can => {
                    let what = format!("release of {} on {}", self.who, record.acquisition.lock);
                    let released = failed.guard.release();
                    let released = self.stage.bounded(OP_TIMEOUT + SLACK, &what, released).await;
                    self.released(released, record);
                }
                error @ Error::Unsupported { .. } => {
                    let detail = format!("{what}: refused: {}", chain(&error));
                    self.stage.find(Law::Denial, detail);
                }
                Error::Lost { reason, .. } => was_lost(reason, record),
                _ if self.seat.is_gone() => {}
                error => record.error = chain(&error),
            },
            None => {}
        }
    }

    /// Notes that the hold goes on without a guard: for the ttl from `begun` on, when its last renewal had not been sent.
    pub(super) fn detached(&self, detached: &DetachedHold, begun: Nanos, record: &mut Record) {
        let ttls = [Some(self.step.ttl), self.step.retime.map(|(_, ttl)| ttl)];
        // A renewal that comes late may shorten the lease to any ttl that it has had.
        let ttl = ttls.into_iter().flatten().min().map(Duration::from_millis);
        let ttl = ttl.map_or(detached.ttl(), |ttl| ttl.min(detached.ttl()));
        let ttl = u64::try_from(ttl.as_nanos()).unwrap_or_default();
        record.over = Over::Detached;
        record.acquisition.released = Some(now());
        record.detached = Some(begun.saturating_add(ttl));
    }

    fn leave(&self, detached: &DetachedHold) -> io::Result<()> {
        let messages = &self.stage.part.messages;
        let name = format!("{}{}", beginning(detached.name().as_str()), self.who);
        // It is there as a whole or not at all.
        let whole = messages.join(format!(".{name}"));
        fs::write(&whole, detached.encode())?;
        fs::rename(&whole, messages.join(name))
    }

    /// Adopts a hold that somebody has detached, and holds it. Returns whether it did.
    pub(super) async fn adopt(
        &self,
        client: &LockClient,
        name: &str,
        within: Duration,
        polls: Option<u32>,
    ) -> bool {
        if !client.capabilities().detach {
            self.adopt_nothing(client, name).await;
            return false;
        }
        let Some((from, text)) = self.message(name, within).await else {
            return false;
        };
        let detached = DetachedHold::decode(&text);
        let (Ok(mut detached), Some(mut record)) = (detached, self.record(name, Asked::Adopts)) else {
            let detail = format!("no detached hold of {name} is what {from} has left");
            self.stage.find(Law::Failure, detail);
            return false;
        };
        let ttl = detached.ttl();
        record.ttl = u64::try_from(ttl.as_millis()).unwrap_or_default();
        record.ttl_now = record.ttl;
        record.adopts = Some(from);
        record.acquisition.mode = detached.mode();
        self.note(&record);
        let what = format!("adoption by {} of what {from} had on {name}", self.who);
        let guard = match self.adopted(client, &mut detached, polls, &what).await {
            Some(Ok(guard)) => Some(guard),
            Some(Err(Error::Lost { reason, .. })) => {
                record.fared = Fared::Taken;
                if reason == LossReason::Asked {
                    was_lost(reason, &mut record);
                }
                None
            }
            Some(Err(error)) => {
                if matches!(error, Error::Unsupported { .. }) {
                    self.stage
                        .find(Law::Denial, format!("{what}: refused: {}", chain(&error)));
                }
                self.failed(&mut record, &error);
                None
            }
            None => {
                record.fared = Fared::Dropped;
                None
            }
        };
        let Some(guard) = guard else {
            record.acquisition.gave_up = Some(now());
            self.note(&record);
            return false;
        };
        record.fared = Fared::Granted;
        record.acquisition.granted = Some((now(), guard.token().get()));
        if guard.token() != detached.token() || guard.name().as_str() != name {
            let detail = format!("{what}: {detached:?} became {guard:?}");
            self.stage.find(Law::Detached, detail);
        }
        self.judge_length(&guard, client, ttl, &what);
        self.hold_and_end(Held::Guard(guard), record).await;
        true
    }

    /// Asks for as long as no answer comes, and the hold may still be there.
    async fn adopted(
        &self,
        client: &LockClient,
        detached: &mut DetachedHold,
        mut polls: Option<u32>,
        what: &str,
    ) -> Option<Result<LockGuard>> {
        let client = match client.clone().with_defaults(self.options()) {
            Ok(client) => client,
            Err(error) => return Some(Err(error)),
        };
        let until = Instant::now() + detached.ttl();
        loop {
            let answer = match polls.take() {
                Some(polls) => poll_at_most(polls as usize, client.adopt(detached)).await,
                None => {
                    // To open a claim, and to exchange its owner.
                    let limit = OP_TIMEOUT * 2 + SLACK;
                    let adopting = self.stage.bounded(limit, what, client.adopt(detached));
                    Some(adopting.await?)
                }
            };
            let again = match &answer {
                None => true,
                Some(answer) => answer.as_ref().is_err_and(Error::is_transient),
            };
            if !again || Instant::now() >= until && answer.is_some() {
                return answer;
            }
            sleep(PAUSE).await;
        }
    }

    /// Waits for a message about this name that nobody of this client has had, and returns who has left it.
    async fn message(&self, name: &str, within: Duration) -> Option<(u64, String)> {
        let until = (Instant::now() + within).min(self.stage.ends);
        loop {
            if let Some(message) = self.next_message(name) {
                return Some(message);
            }
            if Instant::now() >= until {
                return None;
            }
            sleep(PAUSE).await;
        }
    }

    /// The last one: those before it may be too late.
    fn next_message(&self, name: &str) -> Option<(u64, String)> {
        let beginning = beginning(name);
        let mut had = self.seat.messages();
        let files = fs::read_dir(&self.stage.part.messages).ok()?;
        let messages = files.filter_map(|file| {
            let file = file.ok()?;
            let name = file.file_name().into_string().ok()?;
            let who = name.strip_prefix(&beginning)?.parse().ok()?;
            let left = file.metadata().ok()?.modified().ok()?;
            (!had.contains(&name)).then_some((left, name, who))
        });
        let (_, name, who) = messages.max()?;
        let text = fs::read_to_string(self.stage.part.messages.join(&name)).ok()?;
        had.insert(name);
        Some((who, text))
    }

    /// Nothing is adopted where nothing can be detached.
    async fn adopt_nothing(&self, client: &LockClient, name: &str) {
        let text = format!("1:x:{}:1:{:032x}:{}:{name}", self.step.ttl, 1, name.len());
        let what = format!("adoption by {} on {name}", self.who);
        let limit = OP_TIMEOUT * 2 + SLACK;
        let adopting = async { client.adopt(&mut DetachedHold::decode(&text)?).await };
        match self.stage.bounded(limit, &what, adopting).await {
            None | Some(Err(Error::Unsupported { .. })) => {}
            Some(Err(_)) if self.seat.is_gone() => {}
            Some(answer) => {
                let detail = format!("{what}: {answer:?}, where it is refused");
                self.stage.find(Law::Denial, detail);
            }
        }
    }
}

fn was_lost(reason: LossReason, record: &mut Record) {
    record.acquisition.lost.get_or_insert_with(now);
    record.loss = reason.into();
}

/// The beginning of the names of messages about a lock or semaphore.
fn beginning(name: &str) -> String {
    format!("{}-", name.rsplit('/').next().unwrap_or(name))
}
