//! The proof that a session is alive: writes to a node of its own, which the quorum acknowledges.

use std::{fmt::Write as _, sync::atomic::Ordering, time::Duration};

use tokio::time::{Instant, sleep};
use zookeeper_client::{CreateMode, Error as ZkError, MultiWriteError, MultiWriteResult};

use super::Core;
use crate::{
    connection::Connection,
    error::{Failure, Result, contained, is_refusal},
    layout::parent,
};

/// The number of times that a directory that vanishes at once is made.
const MAX_VANISHED: usize = 8;
/// The number of its last holds that a session names. A waiter asks for one within a round trip or so of its release.
const MAX_NAMED: usize = 16;

impl Core {
    /// Returns the data of the session's node, from now on with this hold among the recent ones.
    pub(super) fn heartbeat_data_with(&self, hold: i64) -> String {
        {
            let mut recent = self.recent_holds.lock();
            recent.retain(|known| *known != hold);
            recent.push_front(hold);
            recent.truncate(MAX_NAMED);
        }
        self.heartbeat_data()
    }

    pub(super) fn heartbeat_data(&self) -> String {
        // Others read for how long the servers keep what is the session's, which may be longer than it relies on.
        let mut data = self.servers.granted().as_millis().to_string();
        for czxid in &*self.recent_holds.lock() {
            // Writing to a string does not fail.
            let _ = write!(data, " {czxid:x}");
        }
        data
    }

    /// Makes the node that the session writes to, unless it has one. Comes before anything is held or queued for.
    pub(crate) async fn prepare(&self) -> Result<()> {
        if self.has_node.load(Ordering::Relaxed) {
            return Ok(());
        }
        let connection = self.connection().await?;
        let made = self.make_heartbeat_node(&connection).await;
        made.map(drop)
            .map_err(|failure| failure.about(parent(&self.heartbeat_path)))
    }

    /// Has the quorum acknowledge a first request of this session on the connection, which makes its node if it is to have one.
    pub(super) async fn confirm(&self, connection: &Connection) -> Result<()> {
        if self.has_node.load(Ordering::Relaxed) {
            return self.make_heartbeat_node(connection).await.map(drop);
        }
        pass_quorum(connection).await
    }

    /// Makes the node that the session writes to, and returns when the request was sent. A reply is the quorum's.
    pub(super) async fn make_heartbeat_node(&self, connection: &Connection) -> Result<Instant> {
        let options = self.node_options.contender(CreateMode::Ephemeral);
        let data = self.heartbeat_data();
        for _ in 0..MAX_VANISHED {
            let sent = Instant::now();
            match connection
                .client
                .create(&self.heartbeat_path, data.as_bytes(), &options)
                .await
            {
                // It exists if the reply to an earlier request was lost: no other session has this id.
                Ok(_) | Err(ZkError::NodeExists) => {
                    self.has_node.store(true, Ordering::Relaxed);
                    return Ok(sent);
                }
                Err(ZkError::NoNode) => {
                    self.make_directory_on(connection, parent(&self.heartbeat_path))
                        .await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(Failure::Unstable {
            path: self.heartbeat_path.clone(),
        })
    }
}

/// Has the quorum acknowledge a transaction that changes nothing. A refusal is the quorum's reply, too.
pub(super) async fn pass_quorum(connection: &Connection) -> Result<()> {
    let mut checks = connection.client.new_multi_writer();
    checks.add_check_version("/", -1)?;
    match checks.commit().await {
        Ok(results) if matches!(&results[..], [MultiWriteResult::Check]) => Ok(()),
        Ok(_) => Err(ZkError::UnexpectedError("a check had another result".to_owned()).into()),
        Err(MultiWriteError::OperationFailed { source, .. }) if is_refusal(&source) => Ok(()),
        Err(MultiWriteError::OperationFailed { source, .. } | MultiWriteError::RequestFailed { source }) => {
            Err(source.into())
        }
    }
}

/// Proves again and again, by a write that the quorum acknowledges, that the session is alive. One that has only looked so far writes
/// nothing to it. Returns when the session has ended.
pub(super) async fn heartbeat(core: &Core) {
    let mut was_refused = false;
    let mut connections = core.connection.subscribe();
    loop {
        let interval = core.status.borrow().proof.heartbeat_interval();
        // On a new connection, no earlier write counts.
        tokio::select! {
            () = sleep(interval) => {}
            _ = connections.changed() => {}
        }
        let Ok(connection) = core.connection().await else {
            return;
        };
        let data = core.heartbeat_data();
        let (asleep, sent) = (core.note_sleep(), Instant::now());
        let acknowledged = contained(async {
            if !core.has_node.load(Ordering::Relaxed) {
                pass_quorum(&connection).await?;
                return Ok((sent, None));
            }
            let client = &connection.client;
            match client.set_data(&core.heartbeat_path, data.as_bytes(), None).await {
                Ok(stat) => Ok((sent, Some(stat.mtime))),
                // Somebody has deleted the node.
                Err(ZkError::NoNode) => {
                    let sent = core.make_heartbeat_node(&connection).await;
                    sent.map(|sent| (sent, None))
                }
                Err(error) => Err(error.into()),
            }
        })
        .await;
        match acknowledged {
            Ok((sent, mtime)) => {
                let sent = core.before_sleep(sent, asleep);
                let now = Instant::now();
                core.update_status(|status| {
                    status.proof.acknowledged(connection.liveness().id(), sent, now);
                    if let Some(mtime) = mtime {
                        status.server_clock = (mtime, now);
                    }
                    true
                });
                was_refused = false;
            }
            Err(error) => {
                if error.is_refusal() && !std::mem::replace(&mut was_refused, true) {
                    let path = &core.heartbeat_path;
                    tracing::warn!(%error, path, "a session may not write its node; it holds nothing until it may");
                } else {
                    tracing::debug!(%error, "a session could not be proven to be alive");
                }
            }
        }
    }
}

/// Returns the session timeout in the data of a session's node.
pub(crate) fn session_timeout(heartbeat_data: &[u8]) -> Option<Duration> {
    let timeout = std::str::from_utf8(heartbeat_data).ok()?.split(' ').next()?;
    Some(Duration::from_millis(timeout.parse().ok()?))
}

/// Returns the recent holds in the data of a session's node.
pub(super) fn recent_holds(heartbeat_data: &[u8]) -> impl Iterator<Item = i64> {
    let data = std::str::from_utf8(heartbeat_data).unwrap_or_default();
    data.split(' ')
        .skip(1)
        .filter_map(|czxid| i64::from_str_radix(czxid, 16).ok())
}
