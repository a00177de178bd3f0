//! The lock as one ephemeral node: the contender that makes it holds the lock, and all others watch it.

use std::sync::Arc;

use lockkit_core::spi::Grant;
use uuid::Uuid;
use zookeeper_client::{Error as ZkError, Stat};

use crate::{
    claim::{MAX_LOOKS, ZkClaim},
    error::{Failure, Result, is_refusal},
    layout::{NodeRef, parent},
    session::{FoundNode, Session},
};

/// Returns the label in the data of a holder's node, behind the UUID that marks it as the holder's.
pub(crate) fn label(data: &[u8]) -> Option<&[u8]> {
    let (mark, label) = data.split_at_checked(MARK)?;
    let is_uuid = std::str::from_utf8(mark).is_ok_and(|mark| Uuid::try_parse(mark).is_ok());
    is_uuid.then(|| label.strip_prefix(b" ").unwrap_or(label))
}

const MARK: usize = 36;

/// A node with this state ends with its session. Containers and nodes with a time to live have an owner of a kind, too.
pub(crate) fn is_holders(stat: &Stat) -> bool {
    stat.ephemeral_owner != 0 && stat.ephemeral_owner != i64::MIN && stat.ephemeral_owner >> 56 != -1
}

impl ZkClaim {
    /// Makes the node. If there is one already, watches that.
    pub(crate) async fn take_or_watch(&mut self, waits: bool) -> Result<Option<Grant>> {
        self.holder = None;
        if let Some(node) = &mut self.node {
            // The outcome of an attempt before is unknown.
            if node.look().await? {
                return self.grant().await;
            }
            self.clear();
        }
        for _ in 0..MAX_LOOKS {
            let session = self.shared.session().await?;
            if !waits && let Some((_, stat)) = session.read_latest(&self.path).await? {
                return self.taken_by(&stat);
            }
            session.prepare().await?;
            if self.make(&session).await? {
                return self.grant().await;
            }
            let reply = session.watch_all(std::slice::from_ref(&self.path)).await?;
            if let Some((_, stat, watch)) = reply.into_iter().flatten().next() {
                self.holder = waits.then_some(watch);
                return self.taken_by(&stat);
            }
            if !waits {
                return Ok(None);
            }
        }
        Err(self.unstable())
    }

    /// Returns "taken" for a holder's node, and an error for one that was never a lock.
    fn taken_by(&self, stat: &Stat) -> Result<Option<Grant>> {
        if is_holders(stat) {
            return Ok(None);
        }
        Err(Failure::NoLock {
            path: self.path.clone(),
        })
    }

    /// Makes the node; `false` if there is one already. Its data begin with a mark that no other node has, so that what deletes
    /// one spares the next.
    async fn make(&mut self, session: &Arc<Session>) -> Result<bool> {
        for _ in 0..MAX_LOOKS {
            let (path, mark) = (self.path.clone(), self.next_guid().to_string());
            let data = format!("{mark} {}", self.request.label.as_deref().unwrap_or_default());
            let asked = NodeRef::Marked {
                path: path.clone(),
                mark,
            };
            let node = self.ask_for(session, asked);
            let abandon_watch = node.abandon_watch.clone();
            match session.create(&abandon_watch, &path, data.as_bytes()).await? {
                Ok(stat) => {
                    node.made(FoundNode {
                        path,
                        czxid: stat.czxid,
                    });
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
        Err(self.unstable())
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
