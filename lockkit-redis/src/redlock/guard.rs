//! The restart guard: a master that may have lost what it granted has no vote until all of that is over.
//!
//! Each master keeps a marker beside its data, which names the process that wrote it. A process that finds another's, or
//! none, was restarted, restored or emptied, and is in quarantine for the longest ttl of the deployment. The scripts
//! compare the marker with the process that a connection leads to, so that no client with an old view has a say.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use lockkit_core::{Error, Result};
use redis::{Value, aio::MultiplexedConnection};
use tokio::{
    sync::Notify,
    time::{Instant, MissedTickBehavior},
};

use crate::{
    error::{failed, unexpected},
    redlock::{NAME, masters::Masters},
    script,
};

/// How often a master without a vote is looked at.
const TICK: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(1);

/// What a client knows of the processes behind its masters.
#[derive(Debug)]
pub(crate) struct Guard {
    /// The longest ttl of the deployment, in ms.
    longest: u64,
    durable: bool,
    seats: Mutex<Vec<Seat>>,
    changed: Notify,
}

#[derive(Clone, Debug, Default)]
struct Seat {
    run_id: String,
    /// It had a marker when it was connected to.
    marked: bool,
    standing: Standing,
}

#[derive(Clone, Copy, Debug, Default)]
enum Standing {
    /// To be found out.
    #[default]
    Unknown,
    Votes,
    /// It has had none for so long at least.
    Quarantined(Instant),
}

impl Guard {
    pub(crate) fn new(masters: usize, max_ttl: Duration, durable: bool) -> Self {
        Self {
            longest: u64::try_from(max_ttl.as_millis()).unwrap_or(u64::MAX),
            durable,
            seats: Mutex::new(vec![Seat::default(); masters]),
            changed: Notify::new(),
        }
    }

    fn seats(&self) -> MutexGuard<'_, Vec<Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets in a connection to `master`, or says why not.
    pub(crate) async fn greet(
        &self,
        master: usize,
        run_id: &str,
        connection: &mut MultiplexedConnection,
    ) -> Result<()> {
        let refused = |reason: String| Err(Error::permanent(NAME, "connect", reason));
        if run_id.is_empty() {
            return refused("it does not tell its run_id, by which a restart shows".to_owned());
        }
        if self.durable {
            for (setting, needed) in [("appendonly", "yes"), ("appendfsync", "always")] {
                let (_, found): (String, String) = redis::cmd("CONFIG")
                    .arg("GET")
                    .arg(setting)
                    .query_async(connection)
                    .await
                    .map_err(|error| failed("connect", error))?;
                if found != needed {
                    return refused(format!(
                        "`durable` needs `{setting} {needed}`, and it has `{setting} {found}`"
                    ));
                }
            }
        }
        let marker: Option<String> = redis::cmd("GET")
            .arg("lockkit#redlock")
            .query_async(connection)
            .await
            .map_err(|error| failed("connect", error))?;
        let longest = marker.as_deref().and_then(|marker| marker.split(' ').nth(1));
        if let Some(longest) = longest
            && longest != self.longest.to_string()
        {
            return Err(self.conflict(longest));
        }
        let mut seats = self.seats();
        let others = seats.iter().enumerate().filter(|(other, _)| *other != master);
        if others.clone().any(|(_, other)| other.run_id == run_id) {
            return refused("it is the same server as another of the masters".to_owned());
        }
        let seat = &mut seats[master];
        if seat.run_id != run_id {
            *seat = Seat {
                run_id: run_id.to_owned(),
                ..Seat::default()
            };
        }
        seat.marked = marker.is_some();
        Ok(())
    }

    /// A connection that was let in is in use.
    pub(crate) fn connected(&self) {
        self.changed.notify_one();
    }

    fn conflict(&self, longest: &str) -> Error {
        let theirs = longest.parse().map_or_else(
            |_| longest.to_owned(),
            |ms| format!("{:?}", Duration::from_millis(ms)),
        );
        let ours = Duration::from_millis(self.longest);
        Error::invalid_option(
            "max_ttl",
            format!(
                "this client goes by {ours:?} and the masters by {theirs}; all clients of a deployment need the same"
            ),
        )
    }

    /// None of the masters has a marker, and all are here: they have never granted anything.
    pub(crate) fn is_new(&self) -> bool {
        self.seats()
            .iter()
            .all(|seat| !seat.run_id.is_empty() && !seat.marked)
    }

    /// Some master has been here before.
    pub(crate) fn is_known(&self) -> bool {
        self.seats().iter().any(|seat| seat.marked)
    }

    /// It said that it has no vote.
    pub(crate) fn abstained(&self, master: usize) {
        let standing = &mut self.seats()[master].standing;
        if matches!(standing, Standing::Votes) {
            *standing = Standing::Unknown;
            self.changed.notify_one();
        }
    }

    /// Why a master abstained.
    pub(crate) fn why_no_vote(&self, master: usize) -> String {
        let why = "it was restarted or emptied, and has no vote";
        match self.seats()[master].standing {
            Standing::Quarantined(since) => {
                let left = Duration::from_millis(self.longest).saturating_sub(since.elapsed());
                format!("{why} for {left:.1?} at most")
            }
            _ => why.to_owned(),
        }
    }

    /// Finds out whether a master has a vote, and gives it one when it is time, or if the deployment `is_new`.
    pub(crate) async fn look(&self, masters: &Masters, master: usize, is_new: bool) -> Result<()> {
        let link = &masters.all[master].link;
        let live = link.live("connect")?;
        let run_id = &live.dialled().run_id;
        let Some(seat) = self.seats().get(master).cloned() else {
            return Ok(());
        };
        if seat.run_id != *run_id || matches!(seat.standing, Standing::Votes) {
            return Ok(());
        }
        let is_over = match seat.standing {
            Standing::Quarantined(since) => since.elapsed() >= Duration::from_millis(self.longest),
            _ => false,
        };
        let how = if is_new {
            "new"
        } else if is_over {
            "admit"
        } else if self.durable {
            "trust"
        } else {
            "look"
        };
        let mut call = script::REDLOCK_MARKER.call(b"");
        call.arg(run_id).arg(self.longest).arg(how);
        let standing = match link.run_on(&live, "connect", call).await? {
            Value::Int(-1) => Standing::Votes,
            Value::Int(_) => match seat.standing {
                Standing::Quarantined(since) if !is_over => Standing::Quarantined(since),
                _ => Standing::Quarantined(Instant::now()),
            },
            Value::BulkString(longest) => return Err(self.conflict(&String::from_utf8_lossy(&longest))),
            other => return Err(unexpected("connect", &other)),
        };
        let mut seats = self.seats();
        if seats[master].run_id == *run_id {
            let server = &masters.all[master].name;
            match (seats[master].standing, standing) {
                (Standing::Quarantined(_), Standing::Votes) => {
                    tracing::info!(backend = NAME, %server, "it votes again");
                }
                (Standing::Unknown, Standing::Quarantined(_)) => tracing::warn!(
                    backend = NAME,
                    %server,
                    "it was restarted or emptied, and has no vote for as long as what it granted before may be held"
                ),
                _ => {}
            }
            seats[master].standing = standing;
        }
        Ok(())
    }

    fn all_vote(&self) -> bool {
        self.seats()
            .iter()
            .all(|seat| seat.run_id.is_empty() || matches!(seat.standing, Standing::Votes))
    }
}

/// Watches over those that have no vote, for as long as there are masters.
pub(crate) async fn watch(guard: Arc<Guard>, masters: Weak<Masters>) {
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = guard.changed.notified() => {}
            _ = tick.tick(), if !guard.all_vote() => {}
        }
        let Some(masters) = masters.upgrade() else { return };
        for master in 0..masters.all.len() {
            // What failed is tried again with the next tick.
            let looking = guard.look(&masters, master, false);
            if let Ok(Err(err)) = tokio::time::timeout(PATIENCE, looking).await {
                tracing::debug!(backend = NAME, server = %masters.all[master].name, error = %err, "cannot tell whether it votes");
            }
        }
    }
}
