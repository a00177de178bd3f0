//! From an exclusive hold to a shared one.
//!
//! One transaction makes a shared node in the place of the holder's, and deletes that. The shared node has the same number, so that
//! it is before all who have queued since; Curator and kazoo sort it there, too. Its name also has the hold's token, since the
//! transaction that made it is later than those of the waiters' nodes.
//!
//! A waiter with one other before it takes its turn when that one's node is deleted, without another look. So the transaction
//! writes the node before it deletes it. A watch tells one event: this one tells that the node was written, and the waiter looks.

use std::result;

use lockkit_core::{
    LossReason,
    spi::{Lease, Mode},
};

use crate::{
    claim::ZkClaim,
    error::{Failure, Result},
    layout::{NodeRef, REVOKE, shared_in_place_of},
    own_node::OwnNode,
    session::FoundNode,
};

impl ZkClaim {
    /// Returns the lease of the shared hold, or the reason if there is no hold.
    pub(crate) async fn make_shared(&mut self) -> Result<result::Result<Lease, LossReason>> {
        let ttl = self.request.ttl;
        let Some(node) = &mut self.node else {
            return Ok(Err(LossReason::Disconnected));
        };
        let session = node.session.clone();
        if let Some(reason) = session.ended() {
            return Ok(Err(reason));
        }
        if self.request.mode == Mode::Shared {
            // Nothing was proven when its node had been made.
            return node.lease(ttl).map(Ok);
        }
        let Some(FoundNode { path, czxid }) = node.node().cloned() else {
            return Err(Failure::NotProven);
        };
        // The reply to an earlier request may have been lost.
        let is_made = match &mut self.shared_node {
            Some(shared) => shared.look().await?,
            None => false,
        };
        if !is_made {
            let read = session.read_latest(&path).await?;
            let Some((data, stat)) = read.filter(|(_, stat)| stat.czxid == czxid) else {
                return Ok(Err(LossReason::Revoked));
            };
            if data == REVOKE {
                return Ok(Err(LossReason::Asked));
            }
            let guid = self.next_guid();
            let path_of_shared = shared_in_place_of(&path, guid, czxid, self.shared.nodes());
            let asked = NodeRef::At(path_of_shared.clone());
            if let Some(before) = self.shared_node.take() {
                // It was not made, and the requests of one session come in order.
                before.clear();
            }
            let shared = self.shared_node.insert(OwnNode::new(session.clone(), asked, ttl));
            let replaced = session
                .replace(&shared.abandon_watch, &path, stat.version, &path_of_shared, &data)
                .await?;
            // A node that was written or deleted since: the next call looks what became of it.
            let czxid = replaced?;
            shared.made(FoundNode {
                path: path_of_shared,
                czxid,
            });
        }
        let in_crowd = self.node.as_ref().is_some_and(|node| node.in_crowd);
        self.clear();
        self.node = self.shared_node.take();
        self.request.mode = Mode::Shared;
        let node = self.node.as_mut().ok_or(Failure::NotProven)?;
        node.in_crowd = in_crowd;
        node.lease(ttl).map(Ok)
    }
}
