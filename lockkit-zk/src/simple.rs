//! One ephemeral node that is the lock: whoever makes it holds it, and all others watch it.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, LossReason,
    spi::{Claim, ClaimRequest, Grant, Renewal, SessionProof},
};
use uuid::Uuid;
use zookeeper_client::{Error as ZkError, Stat};

use crate::{
    NAME,
    backend::Shared,
    error::{Failure, Result, is_refusal},
    layout::parent,
    own_node::{NodeRef, OwnNode},
    queue::guid,
    session::{PendingDelete, Session},
    watch::Watch,
};

/// How often the node may vanish or appear within one attempt.
const MAX_LOOKS: usize = 16;

/// A contender.
#[derive(Debug)]
pub(crate) struct SimpleClaim {
    shared: Arc<Shared>,
    request: ClaimRequest,
    /// The lock's node.
    path: String,
    /// How the data of its own node begin: differently for each that it asks for, so that what removes one spares the next.
    mark: String,
    /// The number of nodes that it has asked for.
    asked: u32,
    place: Option<Place>,
    /// While it waits: the watch of whoever holds.
    other: Option<Watch>,
}

/// A node that there is, or may be.
#[derive(Debug)]
struct Place {
    own_node: OwnNode,
    /// The transaction that made it; `None` while it is not known whether it was made.
    czxid: Option<i64>,
}

/// The data of a holder's node: who it is, and its label.
pub(crate) fn label(data: &[u8]) -> Option<&[u8]> {
    let (mark, label) = data.split_at_checked(MARK)?;
    let is_uuid = std::str::from_utf8(mark).is_ok_and(|mark| Uuid::try_parse(mark).is_ok());
    is_uuid.then(|| label.strip_prefix(b" ").unwrap_or(label))
}

const MARK: usize = 36;

/// Whether a node ends with its session. Containers and nodes with a time to live have an owner too, of a kind.
pub(crate) fn is_holders(stat: &Stat) -> bool {
    stat.ephemeral_owner != 0 && stat.ephemeral_owner != i64::MIN && stat.ephemeral_owner >> 56 != -1
}

impl SimpleClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: ClaimRequest, path: String) -> Self {
        Self {
            shared,
            mark: String::new(),
            asked: 0,
            request,
            path,
            place: None,
            other: None,
        }
    }

    async fn try_once(&mut self, waits: bool) -> Result<Option<Grant>> {
        self.other = None;
        if self
            .place
            .as_ref()
            .is_some_and(|place| !place.own_node.abandon_watch.asks())
        {
            self.clear();
        }
        for _ in 0..MAX_LOOKS {
            if self.is_there().await? {
                return self.grant().map(Some);
            }
            let session = self.shared.session().await?;
            if !waits && let Some((_, stat)) = session.read_latest(&self.path).await? {
                return self.taken_by(&stat);
            }
            if self.make(&session).await? {
                return self.grant().map(Some);
            }
            let reply = session.watch_all(std::slice::from_ref(&self.path)).await?;
            if let Some((_, stat, watch)) = reply.into_iter().flatten().next() {
                self.other = waits.then_some(watch);
                return self.taken_by(&stat);
            }
            if !waits {
                return Ok(None);
            }
        }
        Err(Failure::Restless {
            path: self.path.clone(),
        })
    }

    /// What is there is held, or was never a lock.
    fn taken_by(&self, stat: &Stat) -> Result<Option<Grant>> {
        if is_holders(stat) {
            return Ok(None);
        }
        Err(Failure::NoLock {
            path: self.path.clone(),
        })
    }

    /// Makes the node; `false` if there is one already.
    async fn make(&mut self, session: &Arc<Session>) -> Result<bool> {
        let label = self.request.label.clone().unwrap_or_default();
        for _ in 0..MAX_LOOKS {
            self.mark = guid(self.request.owner.get(), self.asked).to_string();
            self.asked += 1;
            let data = format!("{} {label}", self.mark);
            let own_node = OwnNode::new(session.clone(), self.pending_delete(), self.request.ttl);
            let abandon_watch = own_node.abandon_watch.clone();
            self.place = Some(Place {
                own_node,
                czxid: None,
            });
            match session
                .create(&abandon_watch, &self.path, data.as_bytes())
                .await?
            {
                Ok(stat) => {
                    if let Some(place) = &mut self.place {
                        place.czxid = Some(stat.czxid);
                    }
                    return Ok(true);
                }
                Err(ZkError::NodeExists) => {
                    self.clear();
                    return Ok(false);
                }
                Err(ZkError::NoNode) => {
                    self.clear();
                    session.make_directory(parent(&self.path)).await?;
                }
                Err(error) => {
                    if is_refusal(&error) {
                        self.clear();
                    }
                    return Err(error.into());
                }
            }
        }
        Err(Failure::Restless {
            path: self.path.clone(),
        })
    }

    /// Whether its own node is there, after an attempt of unknown outcome.
    async fn is_there(&mut self) -> Result<bool> {
        let Some(place) = &mut self.place else {
            return Ok(false);
        };
        place.czxid = match place.own_node.session.over() {
            Some(_) => None,
            None => place.own_node.find(node_ref(&self.path, &self.mark)).await?,
        };
        if place.czxid.is_none() {
            self.clear();
        }
        Ok(self.place.is_some())
    }

    fn grant(&mut self) -> Result<Grant> {
        match &mut self.place {
            Some(Place {
                own_node,
                czxid: Some(czxid),
            }) => own_node.grant(*czxid, self.request.ttl),
            _ => Err(Failure::NotProven),
        }
    }

    /// Deletes the node, if it is there and its own. `false` if it was held and turned out to be gone.
    async fn leave(&mut self) -> Result<bool> {
        let Some(Place { own_node, .. }) = &mut self.place else {
            return Ok(true);
        };
        let mut kept = true;
        if own_node.session.over().is_none() {
            // Deleting goes by the path, which is everyone's: it has to be seen to be its own first.
            kept = match own_node.find(node_ref(&self.path, &self.mark)).await? {
                Some(_) => own_node.delete(&self.path, None).await?,
                None => own_node.is_leaving() || !own_node.is_held(),
            };
        }
        self.clear();
        Ok(kept)
    }

    /// There is no node, or no more.
    fn clear(&mut self) {
        if let Some(place) = self.place.take() {
            place.own_node.clear();
        }
    }

    fn pending_delete(&self) -> PendingDelete {
        PendingDelete::Marked {
            path: self.path.clone(),
            mark: self.mark.clone(),
        }
    }
}

fn node_ref<'a>(path: &'a str, mark: &'a str) -> NodeRef<'a> {
    NodeRef { path, mark }
}

#[async_trait]
impl Claim for SimpleClaim {
    async fn attempt(&mut self, patience: Duration) -> lockkit_core::Result<Option<Grant>> {
        let granted = self.try_once(!patience.is_zero()).await;
        granted.map_err(|error| error.during("acquire"))
    }

    async fn renew(&mut self) -> lockkit_core::Result<Renewal> {
        let node_ref = node_ref(&self.path, &self.mark);
        let renewed = match &mut self.place {
            Some(Place { own_node, .. }) => own_node.prove(node_ref, self.request.ttl).await,
            None => Ok(Renewal::Lost(LossReason::Disconnected)),
        };
        renewed.map_err(|error| error.during("renew"))
    }

    async fn release(&mut self) -> lockkit_core::Result<()> {
        let held = self.place.as_ref().filter(|place| place.own_node.is_held());
        let over = held.and_then(|place| place.own_node.session.over());
        let kept = self.leave().await;
        let reason = match kept {
            Ok(kept) => over.or((!kept).then_some(LossReason::Revoked)),
            Err(error) => return Err(error.during("release")),
        };
        match reason {
            None => Ok(()),
            Some(reason) => Err(Error::lost(NAME, self.request.name.clone(), reason)),
        }
    }

    fn session(&self) -> Option<SessionProof> {
        self.place.as_ref().map(|place| place.own_node.session.proof())
    }

    async fn notified(&mut self) {
        if let Some(Place { own_node, .. }) = &mut self.place
            && own_node.is_held()
        {
            return own_node.disturbed(node_ref(&self.path, &self.mark)).await;
        }
        match &mut self.other {
            Some(other) => {
                other.told().await;
            }
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_what_follows_the_mark() {
        let mark = Uuid::from_u128(7).to_string();
        assert_eq!(label(format!("{mark} host-7").as_bytes()), Some(&b"host-7"[..]));
        assert_eq!(label(format!("{mark} ").as_bytes()), Some(&b""[..]));
        assert_eq!(label(b"10.0.0.7"), None);
        assert_eq!(label("-".repeat(40).as_bytes()), None);
    }
}
