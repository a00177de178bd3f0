//! A node of one's own in a session: what both recipes do with it.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    LossReason,
    spi::{Grant, Lease, Renewal},
};
use tokio::time::Instant;
use zookeeper_client::{Error as ZkError, Stat};

use crate::{
    abandon_watch::AbandonWatch,
    error::{Failure, Result},
    session::{PendingDelete, Session},
    watch::{Watch, WatchEvent},
};

/// A node of one's own that there is, or may be. When it is dropped without having been [cleared](Stake::clear), its
/// session removes the node.
#[derive(Debug)]
pub(crate) struct OwnNode {
    pub(crate) session: Arc<Session>,
    pub(crate) abandon_watch: Arc<AbandonWatch>,
    /// The watch of the node.
    own: Option<Watch>,
    /// Once it is held: when the lease ends that was last told.
    held: Option<Instant>,
    /// It was asked to be deleted before.
    leaving: bool,
}

/// Where the node is, and how its data begin if it is one's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeRef<'a> {
    pub(crate) path: &'a str,
    pub(crate) mark: &'a str,
}

impl OwnNode {
    /// `pending_delete` is what is to be removed once nobody looks after it.
    pub(crate) fn new(session: Arc<Session>, pending_delete: PendingDelete, ttl: Duration) -> Self {
        let abandon_watch = Arc::new(AbandonWatch::new(pending_delete, ttl));
        session.watch_over(&abandon_watch);
        Self {
            session,
            abandon_watch,
            own: None,
            held: None,
            leaving: false,
        }
    }

    /// There is no node, or no more.
    pub(crate) fn clear(self) {
        self.abandon_watch.take_pending_delete();
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// It was asked to be deleted before.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// The node has been seen to be deleted.
    pub(crate) fn is_gone(&mut self) -> bool {
        self.own_so_far() == Some(WatchEvent::Deleted)
    }

    /// It is watched just now, and the watch has told nothing.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.own.as_mut().is_some_and(Watch::is_quiet)
    }

    /// Its watch is [quiet](Self::is_quiet), or there is none.
    pub(crate) fn is_undisturbed(&mut self) -> bool {
        self.own.as_mut().is_none_or(Watch::is_quiet)
    }

    pub(crate) fn own(&mut self) -> Option<&mut Watch> {
        self.own.as_mut()
    }

    pub(crate) fn watched_by(&mut self, own: Option<Watch>) {
        self.own = own;
    }

    fn own_so_far(&mut self) -> Option<WatchEvent> {
        self.own.as_mut().and_then(Watch::look)
    }

    /// Makes a hold of it.
    pub(crate) fn grant(&mut self, czxid: i64, ttl: Duration) -> Result<Grant> {
        let lease = self.lease(ttl)?;
        let token = u64::try_from(czxid).map_err(|_| {
            // The server counts transactions from one.
            ZkError::UnexpectedError(format!("a node was made by transaction {czxid}"))
        })?;
        Ok(Grant {
            tokens: token..=token,
            lease,
        })
    }

    fn lease(&mut self, ttl: Duration) -> Result<Lease> {
        if let Some(reason) = self.session.over() {
            return Err(Failure::SessionOver(reason));
        }
        let now = Instant::now();
        let end = self.lease_end(now, ttl);
        if end <= now {
            return Err(Failure::NotProven);
        }
        if !self.abandon_watch.holds(end) {
            return Err(Failure::Abandoned);
        }
        self.held = Some(end);
        Ok(Lease {
            since: now,
            length: Some(end - now),
        })
    }

    /// As long as the session is proven to live, and no longer than the ttl, which nobody but the driver counts.
    fn lease_end(&self, now: Instant, ttl: Duration) -> Instant {
        self.session.proven_until().min(now + ttl)
    }

    /// Waits until a longer lease is proven than was told before.
    pub(crate) async fn prove(&mut self, node_ref: NodeRef<'_>, ttl: Duration) -> Result<Renewal> {
        let Some(told) = self.held else {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        };
        let session = self.session.clone();
        loop {
            if let Some(reason) = session.over() {
                return Ok(Renewal::Lost(reason));
            }
            if session.proven_until() < told {
                return self.shortened(ttl);
            }
            let watched = tokio::select! {
                watched = self.watch(node_ref) => watched?,
                () = session.proven_less_than(told) => continue,
            };
            if !watched {
                return Ok(Renewal::Lost(LossReason::Revoked));
            }
            if self.lease_end(Instant::now(), ttl) > told {
                return Ok(Renewal::Held(self.lease(ttl)?));
            }
            tokio::select! {
                () = session.proven_beyond(told) => {}
                () = session.proven_less_than(told) => {}
                _ = self.own_told() => {}
            }
        }
    }

    /// Less is proven than was told before.
    fn shortened(&mut self, ttl: Duration) -> Result<Renewal> {
        match self.lease(ttl) {
            Ok(lease) => Ok(Renewal::Held(lease)),
            Err(Failure::NotProven) => Ok(Renewal::Lost(LossReason::Expired)),
            Err(error) => Err(error),
        }
    }

    /// Resolves when the hold should be looked after.
    pub(crate) async fn disturbed(&mut self, node_ref: NodeRef<'_>) {
        let session = self.session.clone();
        let held = self.held;
        let shorter = async {
            match held {
                Some(told) => session.proven_less_than(told).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shorter => {}
            () = self.told_or_over(node_ref) => {}
        }
    }

    async fn told_or_over(&mut self, node_ref: NodeRef<'_>) {
        loop {
            match self.watch(node_ref).await {
                Ok(true) if self.own_told().await == WatchEvent::Written => {}
                Ok(_) => return,
                Err(_) if self.session.over().is_some() => return,
                // The next beat says that the connection is back.
                Err(_) => self.session.next_news().await,
            }
        }
    }

    /// Makes sure that the node's deletion will be told; `false` if it is gone.
    async fn watch(&mut self, node_ref: NodeRef<'_>) -> Result<bool> {
        match self.own.as_mut().map(Watch::look) {
            Some(None) => return Ok(true),
            Some(Some(WatchEvent::Deleted)) => return Ok(false),
            Some(Some(WatchEvent::Over)) => return Err(Failure::NotProven),
            Some(Some(WatchEvent::Written)) | None => {}
        }
        let reply = self.session.watch_all(&[node_ref.path.to_owned()]).await?;
        let own = reply.into_iter().flatten().next();
        let own = own.filter(|(data, stat, _)| self.is_own(node_ref, data, stat));
        self.own = own.map(|(_, _, watch)| watch);
        Ok(self.own.is_some())
    }

    async fn own_told(&mut self) -> WatchEvent {
        match &mut self.own {
            Some(own) => own.told().await,
            None => std::future::pending().await,
        }
    }

    /// The transaction that made the node, if it is there and one's own.
    pub(crate) async fn find(&mut self, node_ref: NodeRef<'_>) -> Result<Option<i64>> {
        let found = self.session.read_latest(node_ref.path).await?;
        Ok(found
            .filter(|(data, stat)| self.is_own(node_ref, data, stat))
            .map(|(_, stat)| stat.czxid))
    }

    fn is_own(&self, node_ref: NodeRef<'_>, data: &[u8], stat: &Stat) -> bool {
        stat.ephemeral_owner == self.session.id() && data.starts_with(node_ref.mark.as_bytes())
    }

    /// Deletes the node; of a hold that transaction `named` began, and says so. `false` if it was held and turned out to
    /// be gone.
    pub(crate) async fn delete(&mut self, path: &str, named: Option<i64>) -> Result<bool> {
        let again = std::mem::replace(&mut self.leaving, true);
        let deleted = match named.filter(|_| self.is_held()) {
            Some(czxid) => self.session.delete_by_name(path, czxid).await?,
            None => match self.session.delete_by(&self.abandon_watch, path).await {
                // Its session has deleted it, or will.
                Err(Failure::Abandoned) => false,
                deleted => deleted?,
            },
        };
        Ok(deleted || again || !self.is_held())
    }
}

impl Drop for OwnNode {
    fn drop(&mut self) {
        let pending_delete = self.abandon_watch.take_pending_delete();
        if let Some(pending_delete) = pending_delete
            && self.session.over().is_none()
        {
            self.session.leave_behind(pending_delete);
        }
    }
}
