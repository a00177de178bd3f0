//! A session's chores: watches that lost their connection, nodes to delete, claims that were abandoned.

use std::sync::{Arc, Weak};

use futures_util::future::join_all;
use lockkit_core::spi::queue::AbandonWatch;
use tokio::time::Instant;
use zookeeper_client::Error as ZkError;

use super::Core;
use crate::{
    connection::Connection,
    error::{Failure, Result, contained},
    layout::NodeRef,
    watch::{WatchEvent, WatchState},
};

/// The number of watches that are armed again at once.
const WATCHES_AT_ONCE: usize = 256;

/// The watches that somebody waits for.
#[derive(Default)]
pub(super) struct Watches {
    all: Vec<Weak<WatchState>>,
    /// At this number, those that nobody waits for any more are removed.
    limit: usize,
}

impl Core {
    /// Arms this watch again on each connection.
    pub(super) fn keep_armed(&self, watch: &Arc<WatchState>) {
        {
            let mut watches = self.watches.lock();
            if watches.all.len() >= watches.limit {
                watches.all.retain(|watch| watch.strong_count() > 0);
                watches.limit = (watches.all.len() * 2).max(WATCHES_AT_ONCE);
            }
            watches.all.push(Arc::downgrade(watch));
        }
        if self.status.borrow().ended.is_some() {
            watch.tell(WatchEvent::SessionEnded);
        } else if watch.is_unarmed() {
            self.unarmed.notify_one();
        }
    }

    pub(super) fn watches(&self, which: impl Fn(&WatchState) -> bool) -> Vec<Arc<WatchState>> {
        let watches = self.watches.lock();
        watches
            .all
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|watch| which(watch))
            .collect()
    }

    /// Deletes this node, for as long as that takes.
    pub(crate) fn delete_later(&self, node: NodeRef) {
        self.delete_all_later([node]);
    }

    fn delete_all_later(&self, nodes: impl IntoIterator<Item = NodeRef>) {
        self.pending_deletes.lock().extend(nodes);
        self.delete_requested.notify_one();
    }

    /// Deletes this node if its claim is abandoned.
    pub(crate) fn delete_if_abandoned(&self, abandon_watch: &Arc<AbandonWatch<NodeRef>>) {
        self.abandon_watches.lock().push(Arc::downgrade(abandon_watch));
    }

    /// Deletes a node that may be there. After an error it may still be there.
    async fn delete_found(&self, node: &NodeRef) -> Result<()> {
        let path = match node {
            NodeRef::At(path) => path.clone(),
            NodeRef::Prefix(_) | NodeRef::Marked { .. } => match self.find(node).await? {
                Some(found) => found.path,
                None => return Ok(()),
            },
        };
        self.delete(&path).await.map(drop)
    }
}

/// Arms the watches again that were armed on connections that have ended.
pub(super) async fn rearm_watches(core: &Core) {
    let mut connections = core.connection.subscribe();
    loop {
        let connection = connections.borrow_and_update().clone();
        if let Some(connection) = connection {
            let unarmed = core.watches(WatchState::is_unarmed);
            for some in unarmed.chunks(WATCHES_AT_ONCE) {
                if connection.liveness().has_ended() {
                    break;
                }
                join_all(some.iter().map(|watch| rearm(&connection, watch))).await;
            }
        }
        tokio::select! {
            _ = connections.changed() => {}
            () = core.unarmed.notified() => {}
        }
    }
}

async fn rearm(connection: &Connection, watch: &WatchState) {
    let looked = contained(async { Ok(connection.client.get_and_watch_data(&watch.path).await?) });
    match looked.await {
        Ok((_, stat, watcher)) => watch.rearm(&stat, watcher, connection.liveness().clone()),
        Err(Failure::Server(ZkError::NoNode)) => watch.tell(WatchEvent::Deleted),
        // The next connection arms it.
        Err(_) if connection.liveness().has_ended() => {}
        // The claim that waits for it is to look.
        Err(_) => watch.tell(WatchEvent::Written),
    }
}

/// Deletes the nodes that nobody needs any more, again and again where that fails.
pub(super) async fn delete_pending(core: &Core) {
    let mut status = core.status.subscribe();
    loop {
        let nodes = std::mem::take(&mut *core.pending_deletes.lock());
        if nodes.is_empty() {
            core.delete_requested.notified().await;
            continue;
        }
        let outcomes = join_all(nodes.iter().map(|node| contained(core.delete_found(node)))).await;
        let mut left = Vec::new();
        for (node, outcome) in nodes.into_iter().zip(outcomes) {
            match outcome {
                Ok(()) => {}
                Err(error) if error.is_refusal() => {
                    tracing::warn!(?node, %error, "a node stays until its session ends");
                }
                Err(error) => {
                    tracing::debug!(?node, %error, "a node is not deleted yet; trying again");
                    left.push(node);
                }
            }
        }
        if !left.is_empty() {
            core.pending_deletes.lock().extend(left);
            // The next heartbeat shows that the connection is back.
            status.mark_unchanged();
            let _ = status.changed().await;
        }
    }
}

/// Takes the nodes of abandoned claims away. It looks with each heartbeat.
pub(super) async fn take_abandoned(core: &Core) {
    let mut status = core.status.subscribe();
    while status.changed().await.is_ok() {
        let liveness = core
            .connection
            .borrow()
            .as_ref()
            .map(|connection| connection.liveness().clone());
        let Some(liveness) = liveness.filter(|liveness| !liveness.has_ended()) else {
            continue;
        };
        let now = Instant::now();
        let mut abandoned = Vec::new();
        core.abandon_watches.lock().retain(|watch| {
            let Some(watch) = watch.upgrade() else {
                return false;
            };
            abandoned.extend(watch.take_if_abandoned(now, liveness.since()));
            true
        });
        core.delete_all_later(abandoned);
    }
}
