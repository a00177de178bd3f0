//! Sentinels: which server they call the master, and a task that hears when it is another one.
//!
//! After a planned fail-over the former master answers as before for some 10 s, until Sentinel makes it a replica. So each client
//! listens to one sentinel, and leaves a master for the one that this sentinel names.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use lockkit_core::{
    BoxError, Error, Result,
    spi::{Mutex, chain},
};
use redis::{PushInfo, PushKind};
use tokio::{
    sync::Notify,
    task::AbortHandle,
    time::{Instant, sleep, timeout},
};

use super::{Connector, OnPush, Opened};
use crate::{
    config::{is_path, shown},
    connection::{ManagedConnection, reason},
    error::{NAME, failed},
};

/// The longest time for a sentinel to name the master.
const PATIENCE: Duration = Duration::from_millis(500);
/// The time after which a sentinel that says nothing is asked again. So a silent one is found, and a push that was lost made up for.
const PERIOD: Duration = Duration::from_secs(1);
/// The pauses before the next sentinel is asked.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(500);
/// The time after which a sentinel is believed that knows of no configuration as late as the latest one, if no other has named that for
/// as long: all of them may have been set up anew, and count from the beginning.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);
/// The channel of a sentinel on which it says that a master is another server.
const SWITCHES: &str = "+switch-master";

/// Host and port of a server.
pub(crate) type HostPort = (String, u16);

/// The epoch of the latest configuration by which a sentinel has named the master, and when that was last heard. Each fail-over has a
/// higher one. A sentinel that was cut off, or paused, names the former master by a lower one until it has heard of the next.
#[derive(Debug, Default)]
pub(crate) struct LatestEpoch(Mutex<Option<(u64, Instant)>>);

impl LatestEpoch {
    /// Notes an epoch. Returns the latest one if this one is behind it.
    fn ahead_of(&self, epoch: u64) -> Option<u64> {
        let mut latest = self.0.lock();
        match *latest {
            Some((known, heard)) if epoch < known && heard.elapsed() < FORGOTTEN_AFTER => Some(known),
            _ => {
                *latest = Some((epoch, Instant::now()));
                None
            }
        }
    }
}

impl Connector {
    /// Asks the sentinel of this number for the master's address.
    pub(super) async fn ask_sentinel(&self, n: usize, master: &str) -> Result<HostPort> {
        let nothing: OnPush = Arc::new(|_| {});
        self.patiently(n, async {
            let mut opened = self.open_sentinel(n, &nothing).await?;
            self.named_by(n, &mut opened, master).await
        })
        .await
    }

    /// Opens a connection to a sentinel. Sentinels have users of their own, or none, which is more common.
    async fn open_sentinel(&self, n: usize, on_push: &OnPush) -> Result<Opened> {
        let (host, port) = &self.address.hosts[n];
        match self.open(host, *port, 0, true, on_push).await {
            Err(err) if !err.is_transient() => {
                let opened = self.open(host, *port, 0, false, on_push).await;
                opened.map_err(|_| self.about_sentinel(n, err))
            }
            opened => opened.map_err(|err| self.about_sentinel(n, err)),
        }
    }

    /// Returns the master that this sentinel names.
    ///
    /// # Errors
    /// Also if it is behind another one that was asked before.
    async fn named_by(
        &self,
        n: usize,
        Opened { stream, intake, .. }: &mut Opened,
        master: &str,
    ) -> Result<HostPort> {
        // Before the address, so that a fail-over in between shows the new master by the former epoch, and not the other way round.
        let mut describe = redis::cmd("SENTINEL");
        describe.arg("MASTER").arg(master);
        let mut ask = redis::cmd("SENTINEL");
        ask.arg("GET-MASTER-ADDR-BY-NAME").arg(master);
        let mut same = stream.clone();
        let described = describe.query_async::<HashMap<String, String>>(&mut same);
        let (described, known) = tokio::join!(biased; described, ask.query_async::<Option<HostPort>>(stream));
        let known = match known {
            Ok(known) => known,
            Err(error) if error.to_string().contains("unknown command") => {
                let server = self.sentinel_name(n);
                let reason = format!(
                    "{server} is no sentinel, since it does not know the command SENTINEL: list sentinels, whose \
                     default port is 26379, or leave out the option `sentinel`"
                );
                return Err(Error::permanent(NAME, "connect", reason));
            }
            Err(error) => return Err(self.about_sentinel(n, failed("connect", intake.explain(error)))),
        };
        let known = known.ok_or_else(|| {
            let reason = format!(
                "the sentinel {} knows no master `{master}`; correct the option `sentinel`",
                self.sentinel_name(n)
            );
            Error::transient(NAME, "connect", reason)
        })?;
        if is_path(&known.0) {
            // Only the URL may name a Unix socket, at which there is no TLS.
            let server = self.sentinel_name(n);
            let reason = format!("the sentinel {server} names a path in place of the master's host");
            return Err(Error::permanent(NAME, "connect", reason));
        }
        // A user who may not see it gets no comparison.
        let epoch = described
            .ok()
            .and_then(|fields| fields.get("config-epoch")?.parse().ok());
        if let Some(epoch) = epoch
            && let Some(latest) = self.latest.ahead_of(epoch)
        {
            let reason = format!(
                "the sentinel {} is behind: it names the master of epoch {epoch}, and there is one of epoch {latest}",
                self.sentinel_name(n)
            );
            return Err(Error::transient(NAME, "connect", reason));
        }
        Ok(known)
    }

    async fn patiently<T>(&self, n: usize, asking: impl Future<Output = Result<T>>) -> Result<T> {
        timeout(PATIENCE, asking).await.unwrap_or_else(|_| {
            let reason = format!("the sentinel {} does not answer", self.sentinel_name(n));
            Err(Error::transient(NAME, "connect", reason))
        })
    }

    fn sentinel_name(&self, n: usize) -> String {
        let (host, port) = &self.address.hosts[n];
        shown(host, *port)
    }

    fn about_sentinel(&self, n: usize, err: Error) -> Error {
        about(&format!("the sentinel {}", self.sentinel_name(n)), err)
    }

    /// Adds to an error which server it comes from, and who named that.
    pub(super) fn about_master(&self, n: usize, (host, port): &HostPort, err: Error) -> Error {
        let (master, sentinel) = (shown(host, *port), self.sentinel_name(n));
        about(
            &format!("{master}, which the sentinel {sentinel} names as the master"),
            err,
        )
    }
}

fn about(server: &str, err: Error) -> Error {
    let Error::Backend {
        transient, source, ..
    } = err
    else {
        return err;
    };
    let reason = format!("{server}: {}", chain(&*source));
    let reason: BoxError = match source.downcast_ref::<io::Error>() {
        Some(error) => io::Error::new(error.kind(), reason).into(),
        None => reason.into(),
    };
    if transient {
        Error::transient(NAME, "connect", reason)
    } else {
        Error::permanent(NAME, "connect", reason)
    }
}

/// Listens to the sentinels for a client. Dropping it ends that.
#[derive(Debug)]
pub(crate) struct SentinelWatch {
    doubt: Arc<Notify>,
    task: AbortHandle,
}

impl SentinelWatch {
    /// Starts a task that has these connections replaced when they lead elsewhere than to the master. Returns `None` if there
    /// are no sentinels.
    pub(crate) fn start<'a>(
        connector: &Connector,
        connections: impl IntoIterator<Item = &'a Arc<ManagedConnection>>,
    ) -> Option<Self> {
        let master = connector.sentinel.clone()?;
        let doubt = Arc::<Notify>::default();
        let listener = Listener {
            misled: vec![None; connector.address.hosts.len()],
            connector: connector.clone(),
            master,
            connections: connections.into_iter().map(Arc::downgrade).collect(),
            doubt: doubt.clone(),
        };
        let task = tokio::spawn(listener.run()).abort_handle();
        Some(Self { doubt, task })
    }

    /// Has the next sentinel asked. The present one may be behind.
    pub(crate) fn doubt(&self) {
        self.doubt.notify_one();
    }

    pub(crate) fn stop(&self) {
        self.task.abort();
    }
}

impl Drop for SentinelWatch {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Listener {
    connector: Connector,
    master: String,
    connections: Vec<Weak<ManagedConnection>>,
    doubt: Arc<Notify>,
    /// For each sentinel, the server for which connections were replaced at its word, until one leads there.
    misled: Vec<Option<HostPort>>,
}

impl Listener {
    async fn run(mut self) {
        let sentinels = self.misled.len();
        let mut n = self.connector.right.load(Ordering::Relaxed);
        let mut pause = FIRST_PAUSE;
        let mut in_vain = 0;
        loop {
            let since = Instant::now();
            let outcome = self.listen_to(n).await;
            if since.elapsed() > PERIOD {
                (pause, in_vain) = (FIRST_PAUSE, 0);
            }
            if let Err(err) = outcome {
                let error = reason(&self.connector.secrets().blanked(err));
                tracing::debug!(backend = NAME, %error, "asking the next sentinel");
                in_vain += 1;
                if in_vain == sentinels {
                    tracing::warn!(
                        backend = NAME,
                        server = %self.connector.server(),
                        %error,
                        "no sentinel says who is the master, trying again"
                    );
                }
            }
            n = (n + 1) % sentinels;
            sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// Listens to one sentinel until that fails, or is not to be believed.
    async fn listen_to(&mut self, n: usize) -> Result<()> {
        let switched = Arc::<Notify>::default();
        let notify = switched.clone();
        let on_push: OnPush = Arc::new(move |push: PushInfo| {
            if matches!(push.kind, PushKind::Message | PushKind::Disconnection) {
                notify.notify_one();
            }
        });
        let opening = async {
            let mut opened = self.connector.open_sentinel(n, &on_push).await?;
            match opened.stream.subscribe(SWITCHES).await {
                // A user who may not do that still asks once a second.
                Err(error) if error.code().is_none() => {
                    let error = opened.intake.explain(error);
                    Err(self.connector.about_sentinel(n, failed("connect", error)))
                }
                _ => Ok(opened),
            }
        };
        let mut opened = self.connector.patiently(n, opening).await?;
        loop {
            let asking = self.connector.named_by(n, &mut opened, &self.master);
            let named = self.connector.patiently(n, asking).await?;
            if !self.go_to(n, named) {
                return Ok(());
            }
            tokio::select! {
                () = switched.notified() => {}
                () = self.doubt.notified() => return Ok(()),
                () = sleep(PERIOD) => {}
            }
        }
    }

    /// Has the connections replaced that lead elsewhere than to the server that this sentinel names. Returns `false` if that was
    /// in vain before: the sentinel is behind the one that was asked then.
    fn go_to(&mut self, n: usize, named: HostPort) -> bool {
        let (mut there, mut elsewhere) = (false, Vec::new());
        for connection in self.connections.iter().filter_map(Weak::upgrade) {
            // While there is no connection, one is being made by the word of the sentinels.
            match connection.server() {
                Some(server) if server == named => there = true,
                Some(_) => elsewhere.push(connection),
                None => {}
            }
        }
        if there {
            self.misled[n] = None;
        }
        if there || !elsewhere.is_empty() {
            if self.misled[n].as_ref() == Some(&named) {
                return false;
            }
            // New connections ask it first: others may not have heard yet.
            self.connector.right.store(n, Ordering::Relaxed);
        }
        if !elsewhere.is_empty() {
            let (host, port) = &named;
            let master = shown(host, *port);
            tracing::info!(backend = NAME, master = %self.connector.secrets().blank(&master), "the sentinels name another master");
            for connection in elsewhere {
                connection.replace();
            }
            self.misled[n] = Some(named);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_epoch_counts_until_nobody_names_it_for_a_minute() {
        let latest = LatestEpoch::default();
        assert_eq!(latest.ahead_of(0), None);
        assert_eq!(latest.ahead_of(7), None);
        assert_eq!(latest.ahead_of(6), Some(7));
        sleep(FORGOTTEN_AFTER / 2).await;
        assert_eq!(latest.ahead_of(7), None, "still the latest");
        sleep(FORGOTTEN_AFTER / 2).await;
        assert_eq!(latest.ahead_of(1), Some(7));
        sleep(FORGOTTEN_AFTER / 2).await;
        assert_eq!(latest.ahead_of(1), None, "set up anew");
        assert_eq!(latest.ahead_of(0), Some(1));
    }
}
