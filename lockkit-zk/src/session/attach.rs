//! The way to the servers: opening a session, attaching it again, closing it.

use std::{pin::pin, sync::Arc, time::Duration};

use lockkit_core::{
    LossReason,
    spi::{Mutex, Unencrypted},
};
use tokio::time::{Instant, sleep, timeout as within};
use zookeeper_client::{Client, Error as ZkError, SessionInfo};

use super::{Core, end_reason};
#[cfg(feature = "tls")]
use crate::tls::Trust;
use crate::{
    NAME, ZkConfig,
    config::{Address, check_session_timeout},
    connection::{Connection, Route},
    error::{Failure, Result, contained},
    relay::Relay,
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
    unencrypted: Unencrypted,
    #[cfg(feature = "tls")]
    trust: Option<Trust>,
    /// The session timeout to ask for.
    timeout: Duration,
    tick: Duration,
    /// The session timeout that was granted last.
    granted: Arc<Mutex<Duration>>,
}

impl Servers {
    /// Does no I/O but to read certificates.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`](lockkit_core::Error::InvalidOptions) for a file that cannot be used.
    #[cfg_attr(
        not(feature = "tls"),
        expect(clippy::unnecessary_wraps, reason = "only the files of TLS can fail")
    )]
    pub(crate) fn new(config: &ZkConfig, address: &Address) -> lockkit_core::Result<Self> {
        Ok(Self {
            hosts: address.hosts.split(',').map(str::to_owned).collect(),
            credentials: config
                .auth
                .as_ref()
                .map(|digest| format!("{}:{}", digest.user, digest.password)),
            unencrypted: Unencrypted::default(),
            #[cfg(feature = "tls")]
            trust: Trust::new(config)?,
            timeout: config.session_timeout,
            tick: config.tick_time,
            granted: Arc::new(Mutex::new(config.session_timeout)),
        })
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
        *self.granted.lock()
    }

    /// Returns how much of a session timeout that was granted is relied on: no more than was asked for. A server may keep sessions for
    /// longer, or say so.
    pub(super) fn relied_on(&self, granted: Duration) -> Duration {
        granted.min(self.timeout)
    }

    pub(super) fn note_granted(&self, timeout: Duration) {
        *self.granted.lock() = timeout;
    }

    /// Opens a session, and returns when it was asked for. Silent servers are tried once more, for longer.
    pub(super) async fn open(&self) -> Result<(Connection, Instant)> {
        let mut failed = ZkError::NoHosts.into();
        for round in [0, u32::MAX] {
            let mut silent = false;
            let mut last: Option<Failure> = None;
            for host in self.shuffled() {
                let opening = async {
                    let route = self.route(&host).await?;
                    let sent = Instant::now();
                    Ok((self.connect(route, None).await?, sent))
                };
                let failure = match within(self.limit(round), opening).await {
                    Ok(Ok(opened)) => return Ok(opened),
                    Ok(Err(failure)) => failure,
                    Err(_) => {
                        silent = true;
                        ZkError::NoHosts.into()
                    }
                };
                last = Some(match last {
                    Some(first) => first.or(failure),
                    None => failure,
                });
            }
            failed = last.unwrap_or(failed);
            if !silent || matches!(failed, Failure::Server(ZkError::AuthFailed)) {
                break;
            }
        }
        Err(failed)
    }

    /// Makes the way to this server: connects, and with TLS, shakes hands with it. Nothing of a session is sent.
    async fn route(&self, host: &str) -> Result<Route> {
        #[cfg(feature = "tls")]
        if let Some(trust) = &self.trust {
            let relay = trust.reach(host).await?;
            return Ok(relay.route(self.timeout, self.credentials.clone()));
        }
        if self.credentials.is_some() {
            self.unencrypted
                .note(NAME, host, None, "tls=verify, to the servers' `secureClientPort`");
        }
        let relay = Relay::plain(host).await?;
        Ok(relay.route(self.timeout, self.credentials.clone()))
    }

    /// Connects that way, and opens or attaches a session.
    async fn connect(&self, route: Route, session: Option<SessionInfo>) -> Result<Connection> {
        let mut connector = Client::connector()
            .with_session_timeout(route.timeout)
            .with_connection_timeout(self.silence())
            .with_fail_eagerly();
        if let Some(credentials) = &route.credentials {
            connector = connector.with_auth("digest", credentials.as_bytes());
        }
        if let Some(session) = session {
            connector = connector.with_session(session);
        }
        Connection::connect(connector, &route.host, route.relay).await
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
        let (mut unknown, mut distrust) = (0, 0);
        for host in &hosts {
            match attach_to(core, host, core.servers.limit(round)).await {
                Ok(connection) => return Ok(connection),
                Err(NotAttached::Away) => {}
                Err(NotAttached::Distrust(failure)) => {
                    distrust += 1;
                    // Once is enough for a fault that stays.
                    if round == 0 {
                        tracing::warn!(host, error = %failure, "the session is not attached to a server");
                    }
                }
                Err(NotAttached::Ended(LossReason::Expired)) if core.is_proven() => unknown += 1,
                Err(NotAttached::Ended(reason)) => return Err(reason),
            }
            // A deposed leader that does not know it yet has not heard of younger sessions, so one such reply proves nothing.
            if unknown * 2 > hosts.len() {
                return Err(LossReason::Expired);
            }
        }
        // Nothing that waits would come of it. To open another session says to everyone who asks for one what is wrong.
        if distrust == hosts.len() && !core.is_proven() {
            return Err(LossReason::Disconnected);
        }
        sleep(PAUSE.saturating_mul(1 << round.min(5)).min(LONGEST_PAUSE)).await;
    }
    Err(LossReason::Disconnected)
}

/// The reason why a server has not attached the session.
enum NotAttached {
    /// Another server should be tried, or this one later.
    Away,
    /// So it should, but this one would do the same again.
    Distrust(Failure),
    /// The session has ended, as this server says.
    Ended(LossReason),
}

/// Attaches the session to this server.
async fn attach_to(core: &Core, host: &str, limit: Duration) -> std::result::Result<Connection, NotAttached> {
    // A server that cannot be reached cannot have changed the session's timeout either.
    let route = match within(limit, core.servers.route(host)).await {
        Ok(Ok(route)) => route,
        Ok(Err(failure)) => return Err(not_attached(failure)),
        Err(_) => return Err(NotAttached::Away),
    };
    let (asleep, sent) = (core.note_sleep(), Instant::now());
    let connecting = core.servers.connect(route, Some(core.info.clone()));
    let mut connecting = pin!(within(limit, connecting));
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
        Ok(Err(Failure::Server(ZkError::SessionExpired | ZkError::SessionMoved))) => {
            return Err(NotAttached::Ended(LossReason::Expired));
        }
        Ok(Err(Failure::Server(ZkError::AuthFailed))) => {
            return Err(NotAttached::Ended(LossReason::Disconnected));
        }
        // It has closed the connection instead, as a server without a leader does.
        Ok(Err(failure)) => {
            tracing::debug!(host, error = %failure, "a server does not take the session");
            return Err(not_attached(failure));
        }
        Err(_) => {
            note_silence();
            return Err(NotAttached::Away);
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
        return Err(NotAttached::Ended(LossReason::Disconnected));
    }
    // Nothing is read from this server before the quorum has acknowledged a transaction of this session through it. After that, the
    // server shows every request of the connection before, or that request was never carried out.
    match within(limit, contained(core.confirm(&connection))).await {
        Ok(Ok(())) => {
            core.note_sleep();
            core.update_status(|status| {
                status.proof.confirmed();
                true
            });
            Ok(connection)
        }
        Ok(Err(failure)) if failure.is_refusal() => Ok(connection),
        Ok(Err(_)) | Err(_) => {
            connection.abort().await;
            Err(NotAttached::Away)
        }
    }
}

fn not_attached(failure: Failure) -> NotAttached {
    if failure.is_distrust() {
        NotAttached::Distrust(failure)
    } else {
        NotAttached::Away
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
