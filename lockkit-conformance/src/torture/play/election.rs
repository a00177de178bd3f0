//! Elections: what is contended for as a lock is, and those who look on.

use std::{ops::Deref, time::Duration};

use lockkit_core::{
    AcquireOptions, Candidate, Error, Leadership, Lock, LockClient, LockGuard, Observer, Result, spi::chain,
};
use tokio::time::{Instant, sleep, timeout};

use super::{HoldAs, OP_TIMEOUT, Scene, election_of};
use crate::{
    history::{Nanos, at, now},
    torture::record::{Law, Note, Sight},
};

/// A lock, or an election that its winner leads.
pub(super) enum Contest {
    Lock(Lock),
    Election(Candidate),
}

/// A hold: the guard of a lock, or a leadership.
pub(super) enum Held {
    Guard(LockGuard),
    Leadership(Leadership),
}

impl Deref for Held {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        match self {
            Self::Guard(guard) => guard,
            Self::Leadership(leadership) => leadership,
        }
    }
}

impl Held {
    pub(super) async fn release(self) -> Result<()> {
        match self {
            Self::Guard(guard) => guard.release().await,
            Self::Leadership(leadership) => leadership.resign().await,
        }
    }
}

impl Contest {
    pub(super) async fn acquire(&self) -> Result<Held> {
        match self {
            Self::Lock(lock) => lock.acquire().await.map(Held::Guard),
            Self::Election(candidate) => candidate.campaign().await.map(Held::Leadership),
        }
    }

    pub(super) async fn acquire_timeout(&self, wait: Duration) -> Result<Held> {
        match self {
            Self::Lock(lock) => lock.acquire_timeout(wait).await.map(Held::Guard),
            // No schedule has it.
            Self::Election(candidate) => candidate.campaign().await.map(Held::Leadership),
        }
    }

    pub(super) async fn try_acquire(&self) -> Result<Option<Held>> {
        Ok(match self {
            Self::Lock(lock) => lock.try_acquire().await?.map(Held::Guard),
            Self::Election(candidate) => candidate.try_campaign().await?.map(Held::Leadership),
        })
    }
}

/// The id of a candidate, by which those who see it lead know who it is.
fn id(who: u64) -> String {
    format!("torture {who}")
}

impl Scene<'_> {
    pub(super) fn contest(&self, client: &LockClient, name: &str) -> Result<Contest> {
        if self.step.hold_as != HoldAs::Leader {
            return self.lock(client, name).map(Contest::Lock);
        }
        let defaults = AcquireOptions::new().op_timeout(OP_TIMEOUT);
        let client = client.clone().with_defaults(defaults)?;
        let election = client.election(election_of(name).unwrap_or(name))?;
        let election = election.with_ttl(Duration::from_millis(self.step.ttl));
        election.candidate(id(self.who)).map(Contest::Election)
    }

    /// Tells what an observer sees.
    pub(super) async fn observe(&self, client: &LockClient, name: &str) {
        let mut observer = match client.election(election_of(name).unwrap_or(name)) {
            Ok(election) => election.observe(),
            Err(error) => {
                self.stage
                    .find(Law::Failure, format!("no election {name:?}: {}", chain(&error)));
                return;
            }
        };
        let until = (Instant::now() + Duration::from_millis(self.step.hold)).min(self.stage.ends);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(seen) = timeout(left, observer.next()).await else {
                break;
            };
            match seen {
                Ok(leader) => {
                    let (token, id) =
                        leader.map_or((0, None), |leader| (leader.token.get(), Some(leader.id)));
                    self.saw(name, &observer, token, id);
                }
                Err(_) if self.seat.is_gone() => break,
                Err(error @ Error::InvalidOptions { .. }) => {
                    let detail = format!("an observer of {name}: {}", chain(&error));
                    self.stage.find(Law::Election, detail);
                    break;
                }
                Err(error) => {
                    if self.is_calm() {
                        let detail = format!("observing {name}: {}", chain(&error));
                        self.stage.find(Law::Failure, detail);
                    }
                    if !error.is_transient() {
                        break;
                    }
                    // The next look comes after its pause.
                    sleep(Duration::from_millis(1)).await;
                }
            }
        }
        self.note_sight(name, Sight::END, now(), now());
    }

    fn saw(&self, name: &str, observer: &Observer, token: u64, id: Option<String>) {
        let leader = match id {
            None => 0,
            Some(id) => match id.strip_prefix("torture ").and_then(|who| who.parse().ok()) {
                Some(who) => who,
                None => {
                    let detail = format!("an observer of {name} sees {id:?} lead, who is no candidate");
                    self.stage.find(Law::Election, detail);
                    return;
                }
            },
        };
        let looked = observer.looked_at().map_or_else(now, at);
        self.note_sight(name, (token, leader), looked, now());
    }

    fn note_sight(&self, name: &str, (token, leader): (u64, u64), looked: Nanos, seen: Nanos) {
        self.stage.note(Note::Saw(Sight {
            lock: name.to_owned(),
            observer: self.who,
            looked,
            seen,
            token,
            leader,
        }));
    }
}
