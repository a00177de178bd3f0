//! The way to the servers: opening a session, attaching it again, closing it.

use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::LossReason;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout as within},
};
use zookeeper_client::{Client, Connector, Error as ZkError};

use super::{Core, end_reason};
use crate::{
    ZkConfig,
    config::{Address, check_session_timeout},
    connection::Connection,
    error::Result,
    lock,
};

/// The least time that a server may be silent, or take to let a client in, before another one is tried. It is long against
/// what a server takes, and short against a session.
const SHORTEST_SILENCE: Duration = Duration::from_secs(1);
/// The pause after a round in which no server has let the client in.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The servers, and how to connect to them.
#[derive(Clone)]
pub(crate) struct Servers {
    hosts: Vec<String>,
    credentials: Option<String>,
    /// The session timeout to ask for.
    timeout: Duration,
    tick: Duration,
    /// The session timeout that was granted last.
    granted: Arc<Mutex<Duration>>,
}

impl Servers {
    pub(crate) fn new(config: &ZkConfig, address: &Address) -> Self {
        Self {
            hosts: address.hosts.split(',').map(str::to_owned).collect(),
            credentials: config
                .auth
                .as_ref()
                .map(|digest| format!("{}:{}", digest.user, digest.password)),
            timeout: config.session_timeout,
            tick: config.tick_time,
            granted: Arc::new(Mutex::new(config.session_timeout)),
        }
    }

    /// Returns the same servers, to be asked for this session timeout.
    pub(super) fn with_timeout(&self, timeout: Duration) -> Self {
        Self {
            timeout,
            ..self.clone()
        }
    }

    /// Returns the session timeout that was granted last.
    pub(crate) fn granted(&self) -> Duration {
        *lock(&self.granted)
    }

    pub(super) fn note_granted(&self, timeout: Duration) {
        *lock(&self.granted) = timeout;
    }

    /// Opens a session, and returns when it was asked for. Silent servers are tried once more, for longer.
    pub(super) async fn open(&self) -> Result<(Connection, Instant)> {
        let mut last = ZkError::NoHosts;
        for round in [0, u32::MAX] {
            let mut silent = false;
            for host in self.shuffled() {
                let sent = Instant::now();
                match within(self.limit(round), Connection::connect(self.connector(), &host)).await {
                    Ok(Ok(connection)) => return Ok((connection, sent)),
                    Ok(Err(error)) => last = error,
                    Err(_) => silent = true,
                }
            }
            if !silent || last == ZkError::AuthFailed {
                break;
            }
        }
        Err(last.into())
    }

    fn connector(&self) -> Connector {
        let connector = Client::connector()
            .with_session_timeout(self.timeout)
            .with_connection_timeout(self.silence())
            .with_fail_eagerly();
        match &self.credentials {
            Some(credentials) => connector.with_auth("digest", credentials.as_bytes()),
            None => connector,
        }
    }

    fn silence(&self) -> Duration {
        (self.timeout / 5).max(SHORTEST_SILENCE)
    }

    /// Returns how long one server may take in this round. Early rounds are short, for the sake of those who wait.
    fn limit(&self, round: u32) -> Duration {
        SHORTEST_SILENCE
            .saturating_mul(1 << round.min(5))
            .min(self.silence())
    }

    /// Returns the servers in random order, so that clients spread over them.
    fn shuffled(&self) -> Vec<String> {
        let mut hosts = self.hosts.clone();
        fastrand::shuffle(&mut hosts);
        hosts
    }
}

/// Attaches the session again whenever its connection is lost. Returns why the session has ended.
pub(super) async fn stay_attached(core: &Core) -> LossReason {
    loop {
        let connection = core.connection.borrow().clone();
        if let Some(connection) = connection {
            let state = connection.liveness().ended().await;
            if let Some(reason) = end_reason(state) {
                return reason;
            }
            core.connection.send_replace(None);
        }
        match attach(core).await {
            Ok(connection) => core.connection.send_replace(Some(Arc::new(connection))),
            Err(reason) => return reason,
        };
    }
}

/// Attaches the session to a server that the quorum listens to.
async fn attach(core: &Core) -> std::result::Result<Connection, LossReason> {
    for round in 0_u32.. {
        let hosts = core.servers.shuffled();
        let mut unknown = 0;
        for host in &hosts {
            match attach_to(core, host, core.servers.limit(round)).await {
                Ok(Some(connection)) => return Ok(connection),
                Ok(None) => {}
                Err(LossReason::Expired) if core.is_proven() => unknown += 1,
                Err(reason) => return Err(reason),
            }
            // A deposed leader that does not know it yet has not heard of younger sessions, so one such reply proves nothing.
            if unknown * 2 > hosts.len() {
                return Err(LossReason::Expired);
            }
        }
        sleep(PAUSE.saturating_mul(1 << round.min(5)).min(LONGEST_PAUSE)).await;
    }
    Err(LossReason::Disconnected)
}

/// Attaches the session to this server. Returns `None` if another server should be tried, and why the session has ended if
/// this server says so.
async fn attach_to(
    core: &Core,
    host: &str,
    limit: Duration,
) -> std::result::Result<Option<Connection>, LossReason> {
    // A server that cannot be reached cannot have changed the session's timeout either.
    match within(limit, TcpStream::connect(host)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => {
            tracing::debug!(host, %error, "a server cannot be reached");
            return Ok(None);
        }
        Err(_) => return Ok(None),
    }
    let (asleep, sent) = (core.note_sleep(), Instant::now());
    let connector = core.servers.connector().with_session(core.info.clone());
    let mut connecting = pin!(within(limit, Connection::connect(connector, host)));
    let note_silence = || {
        let (sent, now) = (core.before_sleep(sent, asleep), Instant::now());
        core.update_status(|status| {
            status.proof.unanswered(sent, now);
            true
        });
    };
    // A silent server may have granted less. That has to be counted with while there is still time.
    let doubts_after = core.status.borrow().proof.doubts_after();
    let reply = if let Ok(reply) = within(doubts_after, &mut connecting).await {
        reply
    } else {
        note_silence();
        connecting.await
    };
    let connection = match reply {
        Ok(Ok(connection)) => connection,
        Ok(Err(ZkError::SessionExpired | ZkError::SessionMoved)) => return Err(LossReason::Expired),
        Ok(Err(ZkError::AuthFailed)) => return Err(LossReason::Disconnected),
        // It has closed the connection instead, as a server without a leader does.
        Ok(Err(error)) => {
            tracing::debug!(host, %error, "a server does not take the session");
            return Ok(None);
        }
        Err(_) => {
            note_silence();
            return Ok(None);
        }
    };
    let (granted, id) = (connection.timeout(), connection.liveness().id());
    let sent = core.before_sleep(sent, asleep);
    core.update_status(|status| {
        status.proof.attached(id, granted, sent);
        true
    });
    core.servers.note_granted(granted);
    if let Err(error) = check_session_timeout(granted, core.servers.tick, "granted by the server") {
        tracing::warn!(host, %error, "a session is given up");
        connection.abort().await;
        return Err(LossReason::Disconnected);
    }
    // Nothing is read from this server before the quorum has acknowledged a write of this session through it. After that, the
    // server shows every request of the connection before, or that request was never carried out.
    match within(limit, core.make_heartbeat_node(&connection)).await {
        Ok(Ok(_)) => {
            core.note_sleep();
            core.update_status(|status| {
                status.proof.confirmed();
                true
            });
            Ok(Some(connection))
        }
        Ok(Err(failure)) if failure.is_refusal() => Ok(Some(connection)),
        Ok(Err(_)) | Err(_) => {
            connection.abort().await;
            Ok(None)
        }
    }
}

/// Closes the session at the server, over one connection after the other. A dead or lost connection tells the server nothing.
/// A connection may also be kept by someone who waits for a reply on it and is not polled.
pub(super) async fn close_at_server(core: &Core) {
    let connection = core.connection.send_replace(None);
    let mut connection = connection.filter(|connection| !connection.liveness().has_ended());
    for round in 0_u32.. {
        let ending = match connection.take() {
            Some(connection) => connection.ending(),
            None => match attach(core).await {
                Ok(connection) => connection.ending(),
                Err(_) => return,
            },
        };
        // The session is closed when the last owner of the connection has dropped it.
        if end_reason(ending.within(core.servers.limit(round)).await).is_some() {
            return;
        }
        sleep(PAUSE).await;
    }
}
