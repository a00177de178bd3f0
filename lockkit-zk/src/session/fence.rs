//! Tokens: the transactions that made nodes, and what was added to them since tokens were raised.
//!
//! The [bases](lockkit_core::spi::fence) are in a node. They say from which transaction on each counts, so a transaction has one token for
//! good, whoever makes it and whenever. A session only has to know the bases up to that transaction, and it does not read the node each
//! time: it watches the node on its connection. A server tells of a change before it tells of anything later. So while the watch is quiet,
//! no base was written before the last transaction that the session was told of. Once the watch has told something, or has lost its
//! connection, the session reads the node before it makes another token.

use std::iter::successors;

use futures_util::future::join_all;
use lockkit_core::{LockKind, spi::fence::Bases};
use zookeeper_client::{CreateMode, Error as ZkError, Stat};

use super::{Core, heartbeat::pass_quorum};
use crate::{
    error::{Failure, Result},
    layout::{Layout, parent},
    watch::Watch,
};

/// The number of looks of one request. It looks again if the node has changed meanwhile.
const MAX_LOOKS: usize = 64;
/// The number of directories that are looked at together.
const DIRS_AT_ONCE: usize = 256;

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

    /// Returns the highest token that there may be. Writes nothing, since whoever asks may only be allowed to read.
    pub(crate) async fn fence(&self, layout: &Layout) -> Result<u64> {
        let connection = self.connection().await?;
        // From here on, this server has all that was done before.
        pass_quorum(&connection).await?;
        let bases = match self.read_latest(&self.fence_path).await? {
            Some((data, stat)) => self.read(&data, &stat)?,
            None => Bases::default(),
        };
        let root = layout.locks_path(LockKind::Lock);
        let mut dirs = Vec::new();
        for dir in [&layout.locks_path(LockKind::Semaphore), &root] {
            let children = self.children(dir).await.map_err(|failure| failure.about(dir))?;
            let dir_above = dir.trim_end_matches('/');
            dirs.extend(children.iter().map(|child| format!("{dir_above}/{child}")));
            dirs.push(dir.clone());
        }
        // A node that has a token was made in one of these, or in one that has gone since: that was a change of the one above, which comes
        // after it here.
        let above = successors(Some(parent(&root)), |dir| (!dir.is_empty()).then(|| parent(dir)));
        dirs.extend(above.map(|dir| match dir {
            "" => "/".to_owned(),
            dir => dir.to_owned(),
        }));
        let mut latest = 0;
        for some in dirs.chunks(DIRS_AT_ONCE) {
            let looks = some.iter().map(|dir| connection.client.check_stat(dir));
            for stat in join_all(looks).await {
                latest = stat?.map_or(latest, |stat| latest.max(stat.pzxid));
            }
        }
        let number = u64::try_from(latest).map_err(|_| Failure::NoTokens(latest))?;
        bases.fence(number).ok_or(Failure::NoTokens(latest))
    }

    /// Has all later tokens be above this one, unless they are without that. Returns the highest that there may be by then.
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
