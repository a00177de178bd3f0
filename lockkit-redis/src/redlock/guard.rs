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

#[derive(Clone, Debug, Default)]
enum Standing {
    /// To be found out.
    #[default]
    Unknown,
    Votes,
    /// It has had none for so long at least, in the quarantine that began when its own clock showed this.
    Quarantined(Instant, i64),
    /// It is kept for clients that go by another longest ttl, in ms.
    Others(String),
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

    /// Lets in a connection to `master`, or says why not. The marker with which that has a vote.
    pub(crate) async fn greet(
        &self,
        master: usize,
        run_id: &str,
        connection: &mut MultiplexedConnection,
    ) -> Result<String> {
        let refused = |reason: String| Err(Error::permanent(NAME, "connect", reason));
        if run_id.is_empty() {
            return refused("it does not tell its run_id, by which a restart shows".to_owned());
        }
        let marker: Option<String> = redis::cmd("GET")
            .arg("lockkit#redlock")
            .query_async(connection)
            .await
            .map_err(|error| failed("connect", error))?;
        if self.durable
            && let Some(lacks) = lacks_syncs(connection).await?
        {
            // One that came back with other settings has come back with other data, too, as a rule: what it last saved,
            // and not what it logged. That remains so when its settings are right again.
            let of_before = |marker: &str| !marker.starts_with('-') && !marker.starts_with(run_id);
            if marker.as_deref().is_some_and(of_before) {
                let mut call = script::REDLOCK_MARKER.call(b"");
                call.arg(run_id).arg(self.longest).arg("look");
                // It is left out all the same.
                let _ = connection.send_packed_command(&call.command).await;
            }
            return refused(lacks);
        }
        // That of a quarantine may be overcome.
        let votes = marker.as_deref().filter(|marker| !marker.starts_with('-'));
        let longest = votes.and_then(|marker| marker.split(' ').nth(1));
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
        Ok(format!("{run_id} {}", self.longest))
    }

    /// A connection that was let in is in use.
    pub(crate) fn connected(&self) {
        self.changed.notify_one();
    }

    fn conflict(&self, longest: &str) -> Error {
        Error::invalid_option("max_ttl", self.difference(longest))
    }

    fn difference(&self, longest: &str) -> String {
        let theirs = longest.parse().map_or_else(
            |_| longest.to_owned(),
            |ms| format!("{:?}", Duration::from_millis(ms)),
        );
        let ours = Duration::from_millis(self.longest);
        format!(
            "this client goes by {ours:?} and the masters by {theirs}; all clients of a deployment need the same \
             `max_ttl`. To change it, stop them, wait until nothing is held, and delete `lockkit#redlock` from every master"
        )
    }

    /// The quarantines of all masters, if all are here, none had a marker, and none has a vote: as far as this client can
    /// tell, they have never granted anything.
    pub(crate) fn blank(&self) -> Option<Vec<i64>> {
        let began = |seat: &Seat| match seat.standing {
            Standing::Quarantined(_, since) if !seat.marked => Some(since),
            _ => None,
        };
        self.seats().iter().map(began).collect()
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
        match &self.seats()[master].standing {
            Standing::Quarantined(seen, _) => {
                let left = Duration::from_millis(self.longest).saturating_sub(seen.elapsed());
                format!("{why} for {left:.1?} at most")
            }
            Standing::Others(longest) => self.difference(longest),
            _ => why.to_owned(),
        }
    }

    /// Finds out whether a master has a vote, and gives it one when it is time, or if what it is kept out for `is_nothing`.
    pub(crate) async fn look(&self, masters: &Masters, master: usize, is_nothing: bool) -> Result<()> {
        let link = &masters.all[master].link;
        let live = link.current("connect")?;
        let run_id = &live.server().run_id;
        let Some(seat) = self.seats().get(master).cloned() else {
            return Ok(());
        };
        if seat.run_id != *run_id || matches!(seat.standing, Standing::Votes) {
            return Ok(());
        }
        let longest = Duration::from_millis(self.longest);
        let mut call = script::REDLOCK_MARKER.call(b"");
        call.arg(run_id).arg(self.longest);
        match seat.standing {
            // Only this one: a master that was emptied since is in another.
            Standing::Quarantined(seen, since) if is_nothing || seen.elapsed() >= longest => call.arg(since),
            _ if self.durable => call.arg("trust"),
            _ => call.arg("look"),
        };
        let standing = match link.run_on(&live, "connect", call).await? {
            Value::Int(-1) => Standing::Votes,
            Value::Int(since) => match seat.standing {
                Standing::Quarantined(_, before) if before == since => seat.standing,
                _ => Standing::Quarantined(Instant::now(), since),
            },
            Value::BulkString(longest) => Standing::Others(String::from_utf8_lossy(&longest).into_owned()),
            other => return Err(unexpected("connect", &other)),
        };
        let refused = match &standing {
            Standing::Others(longest) => Err(self.conflict(longest)),
            _ => Ok(()),
        };
        let mut seats = self.seats();
        if seats[master].run_id == *run_id {
            seats[master].standing = standing;
        }
        refused
    }

    /// Whether each has no vote, for the log.
    fn quarantines(&self) -> Vec<Option<i64>> {
        let began = |seat: &Seat| match seat.standing {
            Standing::Quarantined(_, since) => Some(since),
            _ => None,
        };
        self.seats().iter().map(began).collect()
    }

    /// What has become of quarantines.
    fn tell(&self, masters: &Masters, before: &[Option<i64>]) {
        for (master, (before, now)) in before.iter().zip(self.quarantines()).enumerate() {
            let server = &masters.all[master].name;
            let votes = matches!(self.seats()[master].standing, Standing::Votes);
            if now.is_some() && now != *before {
                tracing::warn!(
                    backend = NAME,
                    %server,
                    "it was restarted or emptied, and has no vote for as long as what it granted before may be held"
                );
            } else if before.is_some() && votes {
                tracing::info!(backend = NAME, %server, "it votes again");
            }
        }
    }

    fn all_vote(&self) -> bool {
        self.seats()
            .iter()
            .all(|seat| seat.run_id.is_empty() || matches!(seat.standing, Standing::Votes))
    }
}

/// What a master lacks to lose nothing that it acknowledged.
async fn lacks_syncs(connection: &mut MultiplexedConnection) -> Result<Option<String>> {
    for (setting, needed) in [
        ("appendonly", "yes"),
        ("appendfsync", "always"),
        ("no-appendfsync-on-rewrite", "no"),
    ] {
        let (_, found): (String, String) = redis::cmd("CONFIG")
            .arg("GET")
            .arg(setting)
            .query_async(connection)
            .await
            .map_err(|error| failed("connect", error))?;
        if found != needed {
            return Ok(Some(format!(
                "`durable` needs `{setting} {needed}`, and it has `{setting} {found}`"
            )));
        }
    }
    Ok(None)
}

/// Watches over those that have no vote, for as long as there are masters.
pub(crate) async fn watch(guard: Arc<Guard>, masters: Weak<Masters>) {
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = Vec::new();
    loop {
        {
            let Some(masters) = masters.upgrade() else { return };
            before.resize(masters.all.len(), None);
            guard.tell(&masters, &before);
            before = guard.quarantines();
        }
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
