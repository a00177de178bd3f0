//! Listings: the directories of the locks, and what contends in each, by plain reads.

use std::collections::HashMap;

use async_trait::async_trait;
use futures_util::{TryFutureExt as _, future::try_join_all};
use lockkit_core::{ListedLock, LockKind, LockName, LockState, Result, spi::Lister};

use crate::{
    Nodes,
    backend::ZkBackend,
    error::{self, Failure},
    session::{NodeState, Session},
    simple, turn,
};

/// The number of locks on a page, which are read at once.
const PAGE: usize = 32;

/// A listing. It has the names of all directories: a server returns them in one piece.
pub(crate) struct ZkLister {
    backend: ZkBackend,
    prefix: String,
    kinds: Vec<LockKind>,
    /// The names of the last kind that was taken, as the server has them, as far as they are not shown yet.
    encoded: Vec<String>,
    kind: LockKind,
}

/// A lock, and the nodes of its holders.
struct Held {
    name: LockName,
    path: String,
    holders: Vec<String>,
    waiting: Option<usize>,
}

impl ZkLister {
    pub(crate) fn new(backend: ZkBackend, prefix: &str) -> Self {
        Self {
            backend,
            prefix: prefix.to_owned(),
            kinds: vec![LockKind::Semaphore, LockKind::Lock],
            encoded: Vec::new(),
            kind: LockKind::Lock,
        }
    }

    async fn next_page(&mut self) -> error::Result<Option<Vec<ListedLock>>> {
        let shared = &self.backend.shared;
        let session = shared.session().await?;
        if self.encoded.is_empty() {
            let Some(kind) = self.kinds.pop() else {
                return Ok(None);
            };
            self.kind = kind;
            // Everything that was held before the listing is known to the server from here on.
            let dir = shared.layout().locks_path(kind);
            let listed = session.list_latest(&dir).await;
            self.encoded = listed.map_err(|failure| failure.about(&dir))?;
        }
        let layout = shared.layout();
        let mut names = Vec::with_capacity(PAGE);
        while names.len() < PAGE
            && let Some(encoded) = self.encoded.pop()
        {
            let name = layout.name(&encoded, self.kind);
            names.extend(name.filter(|name| name.as_str().starts_with(&self.prefix)));
        }
        self.look(&session, names).await.map(Some)
    }

    async fn look(&self, session: &Session, names: Vec<LockName>) -> error::Result<Vec<ListedLock>> {
        let layout = self.backend.shared.layout();
        let paths = names.iter().map(|name| layout.lock_path(name, self.kind));
        let paths: Vec<_> = paths.collect();
        let is_simple = self.backend.shared.nodes() == Nodes::Simple;
        let contenders = if is_simple {
            Vec::new()
        } else {
            let looks = paths.iter().map(|path| {
                let children = session.children(path);
                children.map_err(move |failure| failure.about(path))
            });
            try_join_all(looks).await?
        };
        let mut held = Vec::with_capacity(names.len());
        for (index, (name, path)) in names.into_iter().zip(paths).enumerate() {
            let (holders, waiting) = match contenders.get(index) {
                Some(children) => {
                    let (holders, waiting) = turn::holders(children, self.kind);
                    let holders = holders.iter().map(|holder| format!("{path}/{holder}"));
                    (holders.collect(), Some(waiting))
                }
                None => (vec![path.clone()], None),
            };
            held.push(Held {
                name,
                path,
                holders,
                waiting,
            });
        }
        held.retain(|held| !held.holders.is_empty());
        let holders: Vec<_> = held.iter().flat_map(|held| held.holders.clone()).collect();
        let mut nodes = session.read_all(&holders).await?.into_iter();
        let mut looks = Vec::with_capacity(held.len());
        for held in held {
            let found = held.holders.iter().cloned().zip(nodes.by_ref());
            let found = found.filter_map(|(path, node)| Some((path, node?)));
            let found: Vec<(String, NodeState)> = found
                .filter(|(_, (_, stat))| !is_simple || simple::is_holders(stat))
                .collect();
            looks.push((held, found));
        }
        let heartbeats = self.heartbeats(session, &looks).await?;
        let bases = session.bases().await?;
        let mut page = Vec::with_capacity(looks.len());
        for (held, found) in looks {
            let state = if found.is_empty() && !is_simple {
                // All have left meanwhile, and others may hold by now.
                match self.backend.look_at(&held.path, self.kind).await {
                    // They leave faster than it reads, so that nobody has it throughout.
                    Err(Failure::Unstable { path }) if path == held.path => continue,
                    state => state?,
                }
            } else {
                let holders = found.iter().map(|(path, node)| {
                    let heartbeat = heartbeats.get(&node.1.ephemeral_owner);
                    self.backend.holder(session, &bases, path, node, heartbeat)
                });
                LockState::new(holders.collect::<error::Result<_>>()?, held.waiting)
            };
            if !state.is_free() {
                page.push(ListedLock::new(held.name, self.kind, state));
            }
        }
        Ok(page)
    }

    /// Returns the node of each session that has one of these, once however many it has.
    async fn heartbeats(
        &self,
        session: &Session,
        looks: &[(Held, Vec<(String, NodeState)>)],
    ) -> error::Result<HashMap<i64, NodeState>> {
        let nodes = looks.iter().flat_map(|(_, found)| found);
        let mut owners: Vec<_> = nodes.map(|(_, (_, stat))| stat.ephemeral_owner).collect();
        owners.sort_unstable();
        owners.dedup();
        let paths = owners
            .iter()
            .map(|owner| self.backend.shared.heartbeat_path(*owner));
        let paths: Vec<_> = paths.collect();
        let read = session.read_all(&paths).await?;
        let read = owners.into_iter().zip(read);
        Ok(read.filter_map(|(owner, node)| Some((owner, node?))).collect())
    }
}

#[async_trait]
impl Lister for ZkLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        error::contained(self.next_page())
            .await
            .map_err(|error| error.during("list"))
    }
}
