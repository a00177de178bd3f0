//! A contender for a lock, by whichever layout of nodes.
//!
//! [`queue`](crate::queue) and [`simple`](crate::simple) have the attempt. All else is the same.

use std::{future::pending, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, LossReason,
    spi::{Claim, ClaimRequest, Grant, Lease, Mode, Renewal, SessionProof},
};
use uuid::Uuid;

use crate::{
    NAME, Nodes,
    backend::Shared,
    error::{Failure, Result, contained},
    layout::{NodeRef, guid},
    own_node::OwnNode,
    session::Session,
    watch::Watch,
};

/// The number of looks of one attempt. It looks again if the directory or the node has changed meanwhile.
pub(crate) const MAX_LOOKS: usize = 16;

/// A contender.
#[derive(Debug)]
pub(crate) struct ZkClaim {
    pub(crate) shared: Arc<Shared>,
    pub(crate) request: ClaimRequest,
    /// The lock's directory; with [`Nodes::Simple`], its node.
    pub(crate) path: String,
    /// The number of nodes that the claim has asked for. Each has another name or mark.
    pub(crate) asked: u32,
    pub(crate) node: Option<OwnNode>,
    /// The shared node that takes the place of the holder's, while it is not known whether it has been made.
    pub(crate) shared_node: Option<OwnNode>,
    /// The watch of the holder's node, while the claim waits without a node of its own.
    pub(crate) holder: Option<Watch>,
}

impl ZkClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: ClaimRequest, path: String) -> Self {
        Self {
            shared,
            request,
            path,
            asked: 0,
            node: None,
            shared_node: None,
            holder: None,
        }
    }

    async fn try_once(&mut self, waits: bool) -> Result<Option<Grant>> {
        // A node in a session that has ended is no node, nor is one that has gone or was taken away.
        let is_lost = |node: &mut OwnNode| {
            node.session.ended().is_some() || node.is_gone() || !node.abandon_watch.attempt()
        };
        if self.node.as_mut().is_some_and(is_lost) {
            self.clear();
        }
        match self.shared.nodes() {
            Nodes::Simple => self.take_or_watch(waits).await,
            Nodes::Mutex | Nodes::ReadWrite => self.queue_up(waits).await,
        }
    }

    /// Returns a GUID that no other request of anyone has had.
    pub(crate) fn next_guid(&mut self) -> Uuid {
        self.asked += 1;
        guid(self.request.owner.get(), self.asked - 1)
    }

    /// Makes the record of a node that is about to be asked for.
    pub(crate) fn ask_for(&mut self, session: &Arc<Session>, asked: NodeRef) -> &mut OwnNode {
        let node = OwnNode::new(session.clone(), asked, self.request.ttl);
        self.node.insert(node)
    }

    pub(crate) async fn grant(&mut self) -> Result<Option<Grant>> {
        let ttl = self.request.ttl;
        let node = self.node.as_mut().ok_or(Failure::NotProven)?;
        node.grant(ttl).await.map(Some)
    }

    /// Deletes the node, if there is or may be one. Returns `false` if it was held and turned out to be gone.
    pub(crate) async fn leave(&mut self) -> Result<bool> {
        let mut kept = true;
        if let Some(node) = &mut self.node {
            // The next exclusive waiter in a crowd is spared the list.
            kept = node
                .delete(node.in_crowd && self.request.mode == Mode::Exclusive)
                .await?;
        }
        if let Some(node) = &mut self.shared_node
            && node.session.ended().is_none()
        {
            kept |= node.look().await?;
            node.delete(false).await?;
        }
        if let Some(node) = self.shared_node.take() {
            node.clear();
        }
        self.clear();
        Ok(kept)
    }

    /// Forgets the node: it is not there, or no longer.
    pub(crate) fn clear(&mut self) {
        if let Some(node) = self.node.take() {
            node.clear();
        }
    }

    /// Returns the failure of an attempt that has looked [too often](MAX_LOOKS).
    pub(crate) fn unstable(&self) -> Failure {
        Failure::Unstable {
            path: self.path.clone(),
        }
    }
}

#[async_trait]
impl Claim for ZkClaim {
    async fn attempt(&mut self, patience: Duration) -> lockkit_core::Result<Option<Grant>> {
        let granted = contained(self.try_once(!patience.is_zero())).await;
        granted.map_err(|failure| failure.about(&self.path).during("acquire"))
    }

    async fn renew(&mut self) -> lockkit_core::Result<Renewal> {
        let Some(node) = &mut self.node else {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        };
        let renewed = contained(node.renew(self.request.ttl)).await;
        renewed.map_err(|failure| failure.during("renew"))
    }

    /// The server knows no ttl.
    fn set_ttl(&mut self, ttl: Duration) -> lockkit_core::Result<Option<Duration>> {
        self.request.ttl = ttl;
        if let Some(node) = &mut self.node {
            node.forget_lease();
        }
        Ok(Some(ttl))
    }

    async fn downgrade(&mut self) -> lockkit_core::Result<Lease> {
        let shared = contained(self.make_shared()).await;
        let shared = shared.map_err(|failure| failure.during("downgrade"))?;
        shared.map_err(|reason| Error::lost(NAME, self.request.name.clone(), reason))
    }

    async fn release(&mut self) -> lockkit_core::Result<()> {
        let session = self.node.as_ref().map(|node| node.session.clone());
        let kept = contained(self.leave()).await;
        if kept.map_err(|failure| failure.about(&self.path).during("release"))? {
            return Ok(());
        }
        let ended = session.and_then(|session| session.ended());
        let reason = ended.unwrap_or(LossReason::Revoked);
        Err(Error::lost(NAME, self.request.name.clone(), reason))
    }

    fn session(&self) -> Option<SessionProof> {
        self.node.as_ref().map(|node| node.session.proof())
    }

    async fn notified(&mut self) {
        match (&mut self.node, &mut self.holder) {
            (Some(node), _) => node.notified().await,
            (None, Some(holder)) => {
                holder.event().await;
            }
            (None, None) => pending().await,
        }
    }
}
