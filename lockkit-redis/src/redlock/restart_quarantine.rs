//! The restart quarantine: a master that may have lost its grants has no vote until all of them are over.
//!
//! Each master keeps a marker beside its data, which names the process that wrote it. A process that finds no marker, or
//! that of another process, was restarted, restored or emptied. It is in quarantine for the longest ttl of the deployment.
//! The scripts compare the marker with the process that the caller's connection leads to, so a client with an outdated view
//! cannot let a master vote.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use lockkit_core::{Error, Result, spi::Mutex};
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

/// The time between two checks of a master without a vote.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// The time that a check may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// A client's view of the processes behind its masters.
#[derive(Debug)]
pub(crate) struct RestartQuarantine {
    /// The key of the marker.
    marker: String,
    /// The longest ttl of the deployment.
    max_ttl: Duration,
    durable: bool,
    processes: Mutex<Vec<Process>>,
    changed: Notify,
}

/// The process behind one master.
#[derive(Clone, Debug, Default)]
struct Process {
    run_id: String,
    /// Host and port by which it was reached.
    server: String,
    /// The master had a marker when the client connected.
    had_marker: bool,
    standing: Standing,
}

#[derive(Clone, Debug, Default)]
enum Standing {
    #[default]
    Unknown,
    Votes,
    /// In the quarantine that began at the second value, in ms of the master's clock. Known at least since the first.
    Quarantined(Instant, i64),
    /// Votes for clients with this `max_ttl`, in ms. It is not ours.
    OtherMaxTtl(String),
}

impl RestartQuarantine {
    pub(crate) fn new(masters: usize, marker: String, max_ttl: Duration, durable: bool) -> Self {
        Self {
            marker,
            max_ttl,
            durable,
            processes: Mutex::new(vec![Process::default(); masters]),
            changed: Notify::new(),
        }
    }

    fn max_ttl_ms(&self) -> u64 {
        u64::try_from(self.max_ttl.as_millis()).unwrap_or(u64::MAX)
    }

    /// Checks a new connection to `master`. Returns the marker with which that process votes, as the scripts want it: its key, and
    /// what has to be there. Or returns why the process cannot be used.
    pub(crate) async fn greet(
        &self,
        master: usize,
        server: &str,
        run_id: &str,
        connection: &mut MultiplexedConnection,
    ) -> Result<String> {
        let refused = |reason: String| Err(Error::permanent(NAME, "connect", reason));
        if run_id.is_empty() {
            return refused("it does not report its run_id, which is needed to detect restarts".to_owned());
        }
        let marker: Option<String> = redis::cmd("GET")
            .arg(&self.marker)
            .query_async(connection)
            .await
            .map_err(|error| failed("connect", error))?;
        if self.durable
            && let Some(missing) = missing_durability(connection).await?
        {
            // A process with other settings usually starts from other data: its last snapshot instead of its log. That
            // stays so when the settings are right again, so the quarantine begins now.
            let is_of_earlier_process =
                |marker: &str| !marker.starts_with('-') && !marker.starts_with(run_id);
            if marker.as_deref().is_some_and(is_of_earlier_process) {
                let mut call = script::REDLOCK_MARKER.call(self.marker.as_bytes());
                call.arg(run_id).arg(self.max_ttl_ms()).arg("look");
                // The master is refused in any case.
                let _ = connection.send_packed_command(&call.command).await;
            }
            return refused(missing);
        }
        // The `max_ttl` of a quarantine can be overcome, that of a vote cannot.
        let votes = marker.as_deref().filter(|marker| !marker.starts_with('-'));
        let theirs = votes.and_then(|marker| marker.split(' ').nth(1));
        if let Some(theirs) = theirs
            && theirs != self.max_ttl_ms().to_string()
        {
            return Err(self.conflict(theirs));
        }
        let mut processes = self.processes.lock();
        let mut others = processes.iter().enumerate().filter(|(other, _)| *other != master);
        if let Some((_, other)) = others.find(|(_, other)| other.run_id == run_id) {
            return refused(format!(
                "it is the same server as {}; name another server in place of one",
                other.server
            ));
        }
        let process = &mut processes[master];
        if process.run_id != run_id {
            *process = Process {
                run_id: run_id.to_owned(),
                server: server.to_owned(),
                ..Process::default()
            };
        }
        process.had_marker = marker.is_some();
        Ok(format!("{} {run_id} {}", self.marker, self.max_ttl_ms()))
    }

    /// Has the masters checked, since a connection that [`greet`](Self::greet) admitted is in use.
    pub(crate) fn connected(&self) {
        self.changed.notify_one();
    }

    fn conflict(&self, theirs: &str) -> Error {
        Error::invalid_option("max_ttl", self.difference(theirs))
    }

    fn difference(&self, theirs: &str) -> String {
        let theirs = theirs.parse().map_or_else(
            |_| theirs.to_owned(),
            |ms| format!("{:?}", Duration::from_millis(ms)),
        );
        let (ours, marker) = (self.max_ttl, &self.marker);
        format!(
            "this client goes by {ours:?} and the masters by {theirs}; all clients of a deployment need the same \
             `max_ttl`. To change it, stop them, wait until nothing is held, and delete `{marker}` from every master"
        )
    }

    /// Returns the quarantines of all masters, if all are connected, none had a marker, and none has a vote. As far as this
    /// client can tell, they have then never granted anything.
    pub(crate) fn blank_masters(&self) -> Option<Vec<i64>> {
        let began = |process: &Process| match process.standing {
            Standing::Quarantined(_, since) if !process.had_marker => Some(since),
            _ => None,
        };
        self.processes.lock().iter().map(began).collect()
    }

    /// Returns whether clients have used some master before.
    pub(crate) fn is_known_deployment(&self) -> bool {
        self.processes.lock().iter().any(|process| process.had_marker)
    }

    /// Notes that a master replied that it has no vote.
    pub(crate) fn abstained(&self, master: usize) {
        let standing = &mut self.processes.lock()[master].standing;
        if matches!(standing, Standing::Votes) {
            *standing = Standing::Unknown;
            self.changed.notify_one();
        }
    }

    /// Returns why a master abstained, for errors.
    pub(crate) fn why_no_vote(&self, master: usize) -> String {
        let why = "it was restarted or emptied, and has no vote";
        match &self.processes.lock()[master].standing {
            Standing::Quarantined(seen, _) => {
                let left = self.max_ttl.saturating_sub(seen.elapsed());
                format!("{why} for {left:.1?} at most")
            }
            Standing::OtherMaxTtl(theirs) => self.difference(theirs),
            _ => why.to_owned(),
        }
    }

    /// Finds out whether a master has a vote. Ends its quarantine when that is over, or if the deployment `is_new`.
    pub(crate) async fn check(&self, masters: &Masters, master: usize, is_new: bool) -> Result<()> {
        let link = &masters.all[master].link;
        let live = link.current("connect")?;
        let run_id = &live.server().run_id;
        let Some(process) = self.processes.lock().get(master).cloned() else {
            return Ok(());
        };
        if process.run_id != *run_id || matches!(process.standing, Standing::Votes) {
            return Ok(());
        }
        let mut call = script::REDLOCK_MARKER.call(self.marker.as_bytes());
        call.arg(run_id).arg(self.max_ttl_ms());
        match process.standing {
            // Ends this quarantine alone: a master that was emptied since is in another.
            Standing::Quarantined(seen, since) if is_new || seen.elapsed() >= self.max_ttl => call.arg(since),
            _ if self.durable => call.arg("trust"),
            _ => call.arg("look"),
        };
        let standing = match link.run_on(&live, "connect", call).await? {
            Value::Int(-1) => Standing::Votes,
            Value::Int(since) => match process.standing {
                Standing::Quarantined(_, before) if before == since => process.standing,
                _ => Standing::Quarantined(Instant::now(), since),
            },
            Value::BulkString(theirs) => Standing::OtherMaxTtl(String::from_utf8_lossy(&theirs).into_owned()),
            other => return Err(unexpected("connect", &other)),
        };
        let outcome = match &standing {
            Standing::OtherMaxTtl(theirs) => Err(self.conflict(theirs)),
            _ => Ok(()),
        };
        let mut processes = self.processes.lock();
        if processes[master].run_id == *run_id {
            processes[master].standing = standing;
        }
        outcome
    }

    /// Returns when each master's quarantine began, in ms of its clock, if it is in one.
    fn quarantines(&self) -> Vec<Option<i64>> {
        let began = |process: &Process| match process.standing {
            Standing::Quarantined(_, since) => Some(since),
            _ => None,
        };
        self.processes.lock().iter().map(began).collect()
    }

    /// Logs the quarantines that began or ended since `before`.
    fn log_changes(&self, masters: &Masters, before: &[Option<i64>]) {
        for (master, (before, now)) in before.iter().zip(self.quarantines()).enumerate() {
            let server = &masters.all[master].name;
            let votes = matches!(self.processes.lock()[master].standing, Standing::Votes);
            if now.is_some() && now != *before {
                tracing::warn!(
                    backend = NAME,
                    %server,
                    "the master was restarted or emptied, and has no vote for as long as its earlier grants may be held"
                );
            } else if before.is_some() && votes {
                tracing::info!(backend = NAME, %server, "the master votes again");
            }
        }
    }

    fn all_vote(&self) -> bool {
        self.processes
            .lock()
            .iter()
            .all(|process| process.run_id.is_empty() || matches!(process.standing, Standing::Votes))
    }
}

/// Returns the setting that a master lacks to keep all that it acknowledged.
async fn missing_durability(connection: &mut MultiplexedConnection) -> Result<Option<String>> {
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

/// Checks the masters without a vote, until the masters are dropped.
pub(crate) async fn watch(quarantine: Arc<RestartQuarantine>, masters: Weak<Masters>) {
    let mut interval = tokio::time::interval(CHECK_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = Vec::new();
    loop {
        {
            let Some(masters) = masters.upgrade() else { return };
            before.resize(masters.all.len(), None);
            quarantine.log_changes(&masters, &before);
            before = quarantine.quarantines();
        }
        tokio::select! {
            () = quarantine.changed.notified() => {}
            _ = interval.tick(), if !quarantine.all_vote() => {}
        }
        let Some(masters) = masters.upgrade() else { return };
        for master in 0..masters.all.len() {
            // A check that fails is repeated with the next tick.
            let check = quarantine.check(&masters, master, false);
            if let Ok(Err(err)) = tokio::time::timeout(PATIENCE, check).await {
                tracing::debug!(backend = NAME, server = %masters.all[master].name, error = %err, "cannot tell whether it votes");
            }
        }
    }
}
