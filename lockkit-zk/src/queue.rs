//! The recipe: a queue of sequential nodes.
//!
//! Each contender makes an ephemeral sequential node in the lock's directory. It holds the lock once no node in conflict is
//! before its own. Everyone else watches the nearest of those before it, so that a release wakes one waiter and not all. This
//! is the recipe of the ZooKeeper documentation, with the node names of Apache Curator, and these differences:
//!
//! - One request makes the node and asks whether it is alone.
//! - A waiter that had one other before it when it looked is granted when that one goes, without another look. Nobody can
//!   have come in before it, and a watch on its own node would have told first if that had gone.
//! - The fencing token is the id of the transaction that made the node.
//! - Nothing is granted unless the session is proven to be alive.

use std::sync::Arc;

use lockkit_core::spi::{Grant, Mode};
use zookeeper_client::Error as ZkError;

use crate::{
    claim::{MAX_LOOKS, ZkClaim},
    crowded_dirs::Crowding,
    error::{Failure, Result, is_refusal},
    layout::{NodeRef, basename, earlier_node, is_owners, is_used_up, marker, sequence},
    own_node::OwnNode,
    predecessors::{Predecessors, Writer},
    session::{Enqueued, FoundNode, Session},
    turn::{Before, Turn, excludes, is_busy, is_writer, turn},
};

/// A newcomer's view of the others, from the requests that made its node.
enum Seen {
    /// There are none, so that it may hold.
    Nobody,
    /// These nodes are in the directory.
    All(Vec<String>),
    /// The node right before its own probably has this name.
    Nearest(String),
    Nothing,
}

impl ZkClaim {
    /// Takes a place in the queue, or goes on from the one that the claim has.
    pub(crate) async fn queue_up(&mut self, waits: bool) -> Result<Option<Grant>> {
        let mode = self.request.mode;
        if let Some(node) = &mut self.node
            && is_next(node).await?
        {
            return self.grant().await;
        }
        for _ in 0..MAX_LOOKS {
            let mut seen = Seen::Nothing;
            if self.node.is_none() {
                let session = self.shared.session().await?;
                if !waits && self.is_busy(&session).await? {
                    return Ok(None);
                }
                session.prepare().await?;
                seen = self.enqueue(&session).await?;
                if matches!(seen, Seen::Nobody) {
                    return self.grant().await;
                }
            }
            let Some(node) = &mut self.node else { continue };
            if node.waits_as_before().await? {
                return self.wait();
            }
            let so_far = node.take_predecessors();
            if !node.look().await? {
                self.clear();
                continue;
            }
            let Some(FoundNode { path, .. }) = node.node().cloned() else {
                continue;
            };
            let session = node.session.clone();
            if waits
                && let Seen::Nearest(nearest) = &seen
                && excludes(nearest, mode)
            {
                let before = Before {
                    watch: vec![nearest.as_str()],
                    one_to_go: false,
                    ahead: None,
                };
                if self.watch(before, None).await? {
                    return self.wait();
                }
            }
            if sequence(&path).is_some_and(is_used_up) {
                self.begin_directory_anew(&session).await?;
                continue;
            }
            let children = match seen {
                Seen::All(children) => children,
                Seen::Nobody | Seen::Nearest(_) | Seen::Nothing => session.list(&self.path).await?,
            };
            let own = basename(&path);
            if let Some(earlier) = earlier_node(&children, own, self.request.owner.get(), self.asked) {
                session.delete(&format!("{}/{earlier}", self.path)).await?;
                continue;
            }
            match turn(&children, own, mode) {
                Turn::Mine => return self.grant().await,
                Turn::Gone => self.clear(),
                Turn::OtherSize(size) => {
                    self.leave().await?;
                    let name = self.request.name.clone();
                    let wanted = match mode {
                        Mode::Permits(wanted) => wanted,
                        Mode::Exclusive | Mode::Shared => size,
                    };
                    return Err(Failure::OtherSize { name, size, wanted });
                }
                Turn::After(_) if !waits => {
                    self.leave().await?;
                    return Ok(None);
                }
                Turn::After(before) => {
                    if self.watch(before, so_far).await? {
                        return self.wait();
                    }
                }
            }
        }
        Err(self.unstable())
    }

    /// Returns whether others keep it out. A node of its own that it has given up may still be there.
    async fn is_busy(&self, session: &Session) -> Result<bool> {
        let mut others = session.list_latest(&self.path).await?;
        others.retain(|child| !is_owners(child, self.request.owner.get(), self.asked));
        Ok(is_busy(&others, self.request.mode))
    }

    /// Makes the node.
    async fn enqueue(&mut self, session: &Arc<Session>) -> Result<Seen> {
        let mut missing = 0;
        for _ in 0..MAX_LOOKS {
            let crowding = self.shared.crowded_dirs.last(&self.path);
            let prefix = self.next_prefix();
            let label = self.request.label.clone().unwrap_or_default();
            let label = label.as_bytes();
            let node = self.ask_for(session, NodeRef::Prefix(prefix.clone()));
            let abandon_watch = node.abandon_watch.clone();
            let (enqueued, listed) = if crowding == Crowding::Several && missing == 0 {
                let (enqueued, listed) = session.enqueue_and_list(&abandon_watch, &prefix, label).await?;
                (enqueued, Some(listed))
            } else {
                // Elsewhere, to ask for the last would be a request too many.
                let asks_for_last = crowding == Crowding::Crowd
                    && matches!(self.request.mode, Mode::Exclusive | Mode::Shared);
                let enqueued = session
                    .enqueue(&abandon_watch, &prefix, label, missing, asks_for_last)
                    .await?;
                (enqueued, None)
            };
            match enqueued {
                Ok(Enqueued {
                    path,
                    sequence,
                    czxid,
                    others,
                    last_prefix,
                }) => {
                    let Some(node) = &mut self.node else { break };
                    node.made(FoundNode { path, czxid });
                    if matches!(listed, Some(Err(Failure::Server(ZkError::NoAuth)))) {
                        // A client that may not list can still be told that it is alone.
                        self.shared.crowded_dirs.note(&self.path, 0);
                        self.leave().await?;
                        continue;
                    }
                    let listed = listed.transpose()?;
                    let listed_others = listed.as_ref().map(|children| children.len().saturating_sub(1));
                    if let Some(others) = others.or(listed_others) {
                        let crowding = self.shared.crowded_dirs.note(&self.path, others);
                        node.in_crowd = crowding == Crowding::Crowd;
                    }
                    return Ok(match (listed, last_prefix) {
                        (Some(children), _) => Seen::All(children),
                        _ if is_used_up(sequence) => Seen::Nothing,
                        _ if others == Some(0) => Seen::Nobody,
                        (None, Some(prefix)) => Seen::Nearest(format!("{prefix}{:010}", sequence - 1)),
                        (None, None) => Seen::Nothing,
                    });
                }
                Err(ZkError::NoNode) => {
                    self.clear();
                    missing += 1;
                }
                // Another client has made it.
                Err(ZkError::NodeExists) if missing > 0 => {
                    self.clear();
                    missing -= 1;
                }
                Err(error) => {
                    if is_refusal(&error) {
                        self.clear();
                    }
                    return Err(error.into());
                }
            }
        }
        Err(self.unstable())
    }

    /// Returns the path of a node, but for its number, that no other request of anyone has had.
    fn next_prefix(&mut self) -> String {
        let guid = self.next_guid();
        let marker = marker(self.request.mode, self.shared.nodes());
        format!("{}/_c_{guid}-{marker}", self.path)
    }

    /// Deletes a directory whose sequence numbers are used up, if nobody else is in it, so that it begins anew. Tokens go on
    /// rising: they are not made of these numbers.
    async fn begin_directory_anew(&mut self, session: &Session) -> Result<()> {
        self.leave().await?;
        match session.delete(&self.path).await {
            Err(Failure::Server(ZkError::NotEmpty)) => Err(Failure::UsedUp {
                dir: self.path.clone(),
            }),
            Err(failure) => Err(failure),
            Ok(_) => Ok(()),
        }
    }

    /// Ends an attempt without a grant.
    fn wait(&mut self) -> Result<Option<Grant>> {
        let is_ours = self.node.as_mut().is_some_and(OwnNode::wait);
        is_ours.then_some(None).ok_or(Failure::Abandoned)
    }

    /// Begins to watch those before the own node. Watches the own node too, if nothing else will show that it is still there
    /// when they have gone. Those that it waited for `so_far` are watched already. Returns `false` if one of them has gone
    /// meanwhile.
    async fn watch(&mut self, before: Before<'_>, so_far: Option<Predecessors>) -> Result<bool> {
        let Some(node) = &mut self.node else {
            return Ok(false);
        };
        let Some(FoundNode { path, .. }) = node.node().cloned() else {
            return Ok(false);
        };
        let connection_id = node.session.connection_id();
        let in_dir = |name: &&str| format!("{}/{name}", self.path);
        let mut paths: Vec<_> = before.watch.iter().map(in_dir).collect();
        if before.one_to_go
            && let Some(mut so_far) = so_far.filter(|so_far| so_far.begin_with(&paths, connection_id))
            && node.is_quiet()
        {
            // It has gone on being watched while the list was on its way.
            let is_quiet = so_far.keep_nearest();
            let is_gone = so_far.has_one_gone();
            node.wait_for(so_far);
            if is_quiet || is_gone {
                return Ok(is_quiet);
            }
            // A watch that has told of a write tells no more.
        }
        // In a crowd, the holds that predecessors say they had take the place of looking ahead.
        let ahead = before.ahead.filter(|_| !node.in_crowd && node.session.is_far());
        // Otherwise it lists at its turn, and the list shows its own node.
        let watches_own = before.one_to_go || ahead.is_some() || node.is_watched();
        paths.extend(ahead.as_ref().map(in_dir));
        let others = paths.len();
        if watches_own && !node.is_quiet() {
            paths.push(path);
        }
        let replies = node.session.watch_all(&paths).await?;
        let writer = match (&replies[..], &before.watch[..]) {
            ([Some((_, stat, _)), ..], [name]) if node.in_crowd && is_writer(name) => Some(Writer {
                heartbeat_path: self.shared.heartbeat_path(stat.ephemeral_owner),
                czxid: stat.czxid,
            }),
            _ => None,
        };
        let mut watches: Vec<_> = replies
            .into_iter()
            .map(|reply| reply.map(|(_, _, watch)| watch))
            .collect();
        for own in watches.drain(others..) {
            node.set_watch(own);
        }
        paths.truncate(others);
        let all: Option<Vec<_>> = watches.into_iter().collect();
        let (Some(watches), true) = (all, !watches_own || node.is_quiet()) else {
            return Ok(false);
        };
        node.wait_for(Predecessors {
            paths,
            watches,
            near: before.watch.len(),
            one_to_go: before.one_to_go,
            writer,
            connection_id,
        });
        Ok(true)
    }
}

/// Returns whether the watches of a waiter show that it is its turn; if they do not suffice, whether its predecessor says so.
async fn is_next(node: &mut OwnNode) -> Result<bool> {
    if !node.predecessors().is_some_and(Predecessors::has_one_gone) {
        return Ok(false);
    }
    // After the look at the predecessors, since a server tells first what happened first: if the own node went before the
    // predecessor did, its watch is not quiet.
    let is_quiet = node.is_quiet();
    let session = node.session.clone();
    let path = node.node().map(|node| node.path.clone());
    match (node.predecessors(), path) {
        (
            Some(Predecessors {
                one_to_go: true,
                connection_id,
                ..
            }),
            _,
        ) => {
            // The order is not kept over an interruption.
            Ok(is_quiet && connection_id.is_some() && *connection_id == session.connection_id())
        }
        (
            Some(Predecessors {
                writer: Some(writer), ..
            }),
            Some(path),
        ) => {
            session
                .was_held(&writer.heartbeat_path, writer.czxid, &path)
                .await
        }
        _ => Ok(false),
    }
}
