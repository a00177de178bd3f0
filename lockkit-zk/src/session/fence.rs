//! Tokens: the transactions that made nodes, and what was added to them since tokens were raised.
//!
//! The bases are in a node that each session watches on its connection. A server tells what happened first before it answers what was
//! asked later. So while that watch is quiet, no base was written before the last transaction that the session was told of. A session
//! whose watch has told something, or has lost its connection, reads the node before it makes another token. The bases say from which
//! transaction on each counts. So a transaction has one token for good, and it does not matter who reads it when.

use lockkit_core::spi::fence::Bases;
use zookeeper_client::{CreateMode, Error as ZkError, Stat};

use super::Core;
use crate::{
    error::{Failure, Result},
    watch::Watch,
};

/// The number of looks of one request. It looks again if the node has changed meanwhile.
const MAX_LOOKS: usize = 64;

/// The bases, and the watch that tells of others.
pub(super) struct Known {
    bases: Bases,
    watch: Watch,
}

/// Returns the token of the node that this transaction has made.
pub(crate) fn token(bases: &Bases, czxid: i64) -> Result<u64> {
    let token = u64::try_from(czxid).ok().and_then(|czxid| bases.token(czxid));
    token.ok_or(Failure::NoTokens(czxid))
}

impl Core {
    /// Returns the bases of the tokens of all nodes that this session has seen.
    pub(crate) async fn bases(&self) -> Result<Bases> {
        if let Some(known) = &mut *self.known_bases.lock()
            && known.watch.is_quiet()
        {
            return Ok(known.bases.clone());
        }
        for _ in 0..MAX_LOOKS {
            let connection = self.connection().await?;
            let client = &connection.client;
            let (stat, watcher) = client.check_and_watch_stat(&self.fence_path).await?;
            let (bases, ids) = match stat {
                None => (Bases::default(), (0, 0)),
                Some(_) => match client.get_data(&self.fence_path).await {
                    Ok((data, stat)) => (self.read(&data, &stat)?, (stat.czxid, stat.mzxid)),
                    Err(ZkError::NoNode) => continue,
                    Err(error) => return Err(error.into()),
                },
            };
            let watch = Watch::of(self.fence_path.clone(), ids, watcher, connection.liveness());
            self.keep_armed(watch.state());
            let known = Known {
                bases: bases.clone(),
                watch,
            };
            *self.known_bases.lock() = Some(known);
            return Ok(bases);
        }
        Err(self.unstable())
    }

    fn read(&self, data: &[u8], stat: &Stat) -> Result<Bases> {
        let written = u64::try_from(stat.mzxid).ok();
        let bases = written.and_then(|written| Bases::read(data, written));
        bases.ok_or_else(|| Failure::NoBases {
            path: self.fence_path.clone(),
        })
    }

    /// Has all later tokens be above this one, unless they are without that. With zero it only looks. Returns the highest that there may
    /// be by then.
    pub(crate) async fn raise_fence(&self, above: u64) -> Result<u64> {
        for _ in 0..MAX_LOOKS {
            let found = self.read_latest(&self.fence_path).await?;
            let bases = match &found {
                Some((data, stat)) => self.read(data, stat)?,
                None => Bases::default(),
            };
            // A write by itself, so that nothing that was done before is above it.
            let latest = self.latest_transaction().await?;
            let number = u64::try_from(latest).map_err(|_| Failure::NoTokens(latest))?;
            let Some(text) = bases.raised(above, number) else {
                return bases.fence(number).ok_or(Failure::NoTokens(latest));
            };
            let connection = self.connection().await?;
            let client = &connection.client;
            let written = if let Some((_, stat)) = &found {
                let written = client.set_data(&self.fence_path, &text, Some(stat.version));
                written.await.map(drop)
            } else {
                let options = self.node_options.contender(CreateMode::Persistent);
                let made = client.create(&self.fence_path, &text, &options);
                made.await.map(drop)
            };
            match written {
                Ok(()) => return Ok(above),
                // Somebody else was here first.
                Err(ZkError::BadVersion | ZkError::NodeExists | ZkError::NoNode) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(self.unstable())
    }

    /// Returns the number of a transaction that begins after this call.
    async fn latest_transaction(&self) -> Result<i64> {
        for _ in 0..MAX_LOOKS {
            let connection = self.connection().await?;
            let data = self.heartbeat_data();
            let written = connection
                .client
                .set_data(&self.heartbeat_path, data.as_bytes(), None);
            match written.await {
                Ok(stat) => return Ok(stat.mzxid),
                // Somebody has deleted the node.
                Err(ZkError::NoNode) => drop(self.make_heartbeat_node(&connection).await?),
                Err(error) => return Err(error.into()),
            }
        }
        Err(self.unstable())
    }

    fn unstable(&self) -> Failure {
        Failure::Unstable {
            path: self.fence_path.clone(),
        }
    }
}
