//! A claim's own node: asked for, queued, waiting, held, deleted.

use std::{
    future::{pending, poll_fn},
    mem,
    sync::Arc,
    task::Context,
    time::Duration,
};

use lockkit_core::{
    LossReason,
    spi::{
        Grant, Lease, Renewal,
        queue::{AbandonWatch, NotifyingWaker},
    },
};
use tokio::time::{Instant, sleep_until};

use crate::{
    error::{Failure, Result},
    layout::{NodeRef, is_revoked},
    predecessors::Predecessors,
    session::{FoundNode, Session, fence::token},
    watch::{Watch, WatchEvent},
};

/// A claim's own node, which may be there. If it is dropped without having been [cleared](OwnNode::clear), its session deletes
/// the node.
#[derive(Debug)]
pub(crate) struct OwnNode {
    pub(crate) session: Arc<Session>,
    pub(crate) abandon_watch: Arc<AbandonWatch<NodeRef>>,
    /// The directory had a crowd when the node was made.
    pub(crate) in_crowd: bool,
    /// The node as it was asked for.
    asked: NodeRef,
    stage: Stage,
    /// The watch of the node itself.
    watch: Option<Watch>,
    /// A request to delete it was sent.
    leaving: bool,
    /// Somebody has asked its holder to give up the hold.
    is_revoked: bool,
}

#[derive(Debug)]
enum Stage {
    /// The node was asked for. It is not known whether it was made.
    Asked,
    /// The node was made. Nobody is watched.
    Queued(FoundNode),
    /// The claim waits for those before it.
    Waiting(FoundNode, Predecessors),
    /// The claim holds. The lease that was granted last ends then.
    Held(FoundNode, Instant),
}

impl OwnNode {
    /// Makes the record of a node that is about to be asked for. From now on the session deletes the node if the claim is
    /// abandoned.
    pub(crate) fn new(session: Arc<Session>, asked: NodeRef, ttl: Duration) -> Self {
        let abandon_watch = Arc::new(AbandonWatch::new(asked.clone(), ttl));
        session.delete_if_abandoned(&abandon_watch);
        Self {
            session,
            abandon_watch,
            in_crowd: false,
            asked,
            stage: Stage::Asked,
            watch: None,
            leaving: false,
            is_revoked: false,
        }
    }

    /// Forgets the node: it is not there, or no longer.
    pub(crate) fn clear(self) {
        self.abandon_watch.take_pending_delete();
    }

    /// Notes that the node was made.
    pub(crate) fn made(&mut self, node: FoundNode) {
        if let NodeRef::Prefix(_) = self.asked {
            self.abandon_watch
                .set_pending_delete(NodeRef::At(node.path.clone()));
        }
        if matches!(self.stage, Stage::Asked) {
            self.stage = Stage::Queued(node);
        }
    }

    /// Returns whether the node is there, and looks for it unless that is known. A sequential node's path is its own, so that
    /// it is known once it was made. The path of a marked node may have another's since.
    pub(crate) async fn look(&mut self) -> Result<bool> {
        if matches!(self.asked, NodeRef::Prefix(_)) && self.node().is_some() {
            return Ok(true);
        }
        let found = self.session.find(&self.asked).await?;
        Ok(found.map(|node| self.made(node)).is_some())
    }

    /// Returns the node, once it is known to have been made.
    pub(crate) fn node(&self) -> Option<&FoundNode> {
        match &self.stage {
            Stage::Asked => None,
            Stage::Queued(node) | Stage::Waiting(node, _) | Stage::Held(node, _) => Some(node),
        }
    }

    /// Changes the stage, unless it is [`Stage::Asked`].
    fn advance(&mut self, stage: impl FnOnce(FoundNode) -> Stage) {
        self.stage = match mem::replace(&mut self.stage, Stage::Asked) {
            Stage::Asked => Stage::Asked,
            Stage::Queued(node) | Stage::Waiting(node, _) | Stage::Held(node, _) => stage(node),
        };
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held_until().is_some()
    }

    fn held_until(&self) -> Option<Instant> {
        match self.stage {
            Stage::Held(_, until) => Some(until),
            _ => None,
        }
    }

    /// The node was seen to be deleted.
    pub(crate) fn is_gone(&mut self) -> bool {
        self.watch.as_mut().and_then(Watch::look) == Some(WatchEvent::Deleted)
    }

    /// The node is watched at this moment, and the watch has told nothing.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.watch.as_mut().is_some_and(Watch::is_quiet)
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watch.is_some()
    }

    pub(crate) fn set_watch(&mut self, watch: Option<Watch>) {
        self.watch = watch;
    }

    /// Returns those that it waits for.
    pub(crate) fn predecessors(&mut self) -> Option<&mut Predecessors> {
        match &mut self.stage {
            Stage::Waiting(_, predecessors) => Some(predecessors),
            _ => None,
        }
    }

    /// Ends the wait, and returns those that it waited for.
    pub(crate) fn take_predecessors(&mut self) -> Option<Predecessors> {
        match mem::replace(&mut self.stage, Stage::Asked) {
            Stage::Waiting(node, predecessors) => {
                self.stage = Stage::Queued(node);
                Some(predecessors)
            }
            other => {
                self.stage = other;
                None
            }
        }
    }

    /// Begins to wait for these.
    pub(crate) fn wait_for(&mut self, predecessors: Predecessors) {
        self.advance(|node| Stage::Waiting(node, predecessors));
    }

    /// Returns whether it waits as before: no watch has told anything, and the nodes are still there, in case that a
    /// notification got lost.
    pub(crate) async fn waits_as_before(&mut self) -> Result<bool> {
        let Stage::Waiting(node, predecessors) = &mut self.stage else {
            return Ok(false);
        };
        let is_undisturbed = self.watch.as_mut().is_none_or(Watch::is_quiet);
        if !is_undisturbed || !predecessors.is_unchanged() {
            return Ok(false);
        }
        let mut paths = predecessors.paths.clone();
        paths.push(node.path.clone());
        self.session.are_there(&paths).await
    }

    /// Ends an attempt without a grant. From now on the events of its watches are noted, also if nobody listens. Returns
    /// `false` if the node was taken away.
    pub(crate) fn wait(&mut self) -> bool {
        let is_ours = self.abandon_watch.wait();
        if let Stage::Waiting(_, predecessors) = &mut self.stage {
            let waker = NotifyingWaker::waker(&self.abandon_watch, None);
            if predecessors
                .poll_near(self.watch.as_mut(), &mut Context::from_waker(&waker))
                .is_ready()
            {
                waker.wake();
            }
        }
        is_ours
    }

    /// Resolves when an attempt or a renewal is worth while.
    pub(crate) async fn notified(&mut self) {
        match &mut self.stage {
            Stage::Held(_, until) => {
                let until = *until;
                self.disturbed(until).await;
            }
            Stage::Waiting(_, predecessors) => {
                poll_fn(|cx| {
                    let waker = NotifyingWaker::waker(&self.abandon_watch, Some(cx.waker()));
                    let near = predecessors.poll_near(self.watch.as_mut(), &mut Context::from_waker(&waker));
                    // A waiter that does not come to look ahead is in nobody's way.
                    if near.is_ready() {
                        near
                    } else {
                        predecessors.poll_ahead(cx)
                    }
                })
                .await;
            }
            Stage::Asked | Stage::Queued(_) => pending().await,
        }
    }

    /// Makes a hold of it.
    pub(crate) async fn grant(&mut self, ttl: Duration) -> Result<Grant> {
        let Some(czxid) = self.node().map(|node| node.czxid) else {
            return Err(Failure::NotProven);
        };
        let token = token(&self.session.bases().await?, czxid)?;
        let lease = self.lease(ttl)?;
        Ok(Grant::new(token..=token, lease))
    }

    /// Holds for as long as is proven now.
    pub(crate) fn lease(&mut self, ttl: Duration) -> Result<Lease> {
        if let Some(reason) = self.session.ended() {
            return Err(Failure::SessionEnded(reason));
        }
        let now = Instant::now();
        let end = self.lease_end(now, ttl);
        if end <= now {
            return Err(Failure::NotProven);
        }
        if !self.abandon_watch.hold(end) {
            return Err(Failure::Abandoned);
        }
        self.advance(|node| Stage::Held(node, end));
        Ok(Lease::new(now, Some(end - now)))
    }

    /// Returns the end of a lease that lasts as long as the session is proven to be alive, and no longer than the ttl, which
    /// nobody but the driver counts.
    fn lease_end(&self, now: Instant, ttl: Duration) -> Instant {
        self.session.proven_until().min(now + ttl)
    }

    /// Waits until a longer lease is proven than was granted last, by a server that has been heard of late. What is proven otherwise
    /// counts, and confirms nothing: less at once, and more when half of what was granted is over.
    pub(crate) async fn renew(&mut self, ttl: Duration) -> Result<Renewal> {
        let Some(granted) = self.held_until() else {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        };
        let session = self.session.clone();
        let now = Instant::now();
        let unheard = now + granted.saturating_duration_since(now) / 2;
        loop {
            if let Some(reason) = session.ended() {
                return Ok(Renewal::Lost(reason));
            }
            if session.proven_until() < granted {
                return self.shorten(ttl);
            }
            let is_watched = tokio::select! {
                is_watched = self.ensure_watched() => is_watched?,
                () = session.proven_less_than(granted) => continue,
            };
            if !is_watched {
                return Ok(Renewal::Lost(LossReason::Revoked));
            }
            if self.is_revoked {
                return Ok(Renewal::Asked);
            }
            let now = Instant::now();
            let is_longer = self.lease_end(now, ttl) > granted;
            if is_longer && session.is_current() {
                return Ok(Renewal::Held(self.lease(ttl)?));
            }
            if is_longer && now >= unheard {
                return Ok(Renewal::Unconfirmed(self.lease(ttl)?));
            }
            tokio::select! {
                () = session.current(), if is_longer => {}
                () = sleep_until(unheard), if is_longer => {}
                () = session.proven_beyond(granted), if !is_longer => {}
                () = session.proven_less_than(granted) => {}
                _ = self.event() => {}
            }
        }
    }

    /// Has the next renewal grant what is proven, also if that is no longer than what was granted last.
    pub(crate) fn forget_lease(&mut self) {
        if let Stage::Held(_, until) = &mut self.stage {
            *until = Instant::now().min(*until);
        }
    }

    /// Counts with a shorter lease, since less is proven than was granted.
    fn shorten(&mut self, ttl: Duration) -> Result<Renewal> {
        match self.lease(ttl) {
            Ok(lease) => Ok(Renewal::Unconfirmed(lease)),
            Err(Failure::NotProven) => Ok(Renewal::Lost(LossReason::Expired)),
            Err(failure) => Err(failure),
        }
    }

    /// Resolves when a hold with a lease until then should be renewed: less is proven, the node may have gone, or its holder is asked
    /// to give up the hold.
    async fn disturbed(&mut self, granted: Instant) {
        let session = self.session.clone();
        tokio::select! {
            () = session.proven_less_than(granted) => {}
            () = self.gone_or_ended() => {}
        }
    }

    async fn gone_or_ended(&mut self) {
        loop {
            match self.ensure_watched().await {
                Ok(true) if !self.is_revoked && self.event().await == WatchEvent::Written => {}
                Ok(_) => return,
                Err(_) if self.session.ended().is_some() => return,
                // The next heartbeat shows that the connection is back.
                Err(_) => self.session.status_changed().await,
            }
        }
    }

    /// Makes sure that the watch will tell the node's deletion; `false` if the node is gone.
    async fn ensure_watched(&mut self) -> Result<bool> {
        match self.watch.as_mut().map(Watch::look) {
            Some(None) => return Ok(true),
            Some(Some(WatchEvent::Deleted)) => return Ok(false),
            Some(Some(WatchEvent::SessionEnded)) => return Err(Failure::NotProven),
            Some(Some(WatchEvent::Written)) | None => {}
        }
        let Some(path) = self.node().map(|node| node.path.clone()) else {
            return Ok(false);
        };
        let reply = self.session.watch_all(&[path]).await?;
        let own = reply.into_iter().flatten().next();
        let own = own.filter(|(data, stat, _)| self.session.is_own(&self.asked, data, stat));
        self.is_revoked = own.as_ref().is_some_and(|(data, stat, _)| is_revoked(data, stat));
        self.watch = own.map(|(_, _, watch)| watch);
        Ok(self.watch.is_some())
    }

    async fn event(&mut self) -> WatchEvent {
        match &mut self.watch {
            Some(watch) => watch.event().await,
            None => pending().await,
        }
    }

    /// Deletes the node, if it is there. `announces` says at the server that it was a hold. Returns `false` if it was held and
    /// turned out to be gone.
    pub(crate) async fn delete(&mut self, announces: bool) -> Result<bool> {
        if self.session.ended().is_some() {
            // The node ends with it, or has ended.
            return Ok(!self.is_held());
        }
        let is_there = self.look().await?;
        let is_held = self.is_held();
        let is_again = self.leaving;
        let Some(FoundNode { path, czxid }) = self.node().filter(|_| is_there).cloned() else {
            return Ok(is_again || !is_held);
        };
        let sent = &mut self.leaving;
        let deleted = if announces && is_held {
            self.session.delete_held(&path, czxid, sent).await?
        } else {
            match self.session.delete_own(&self.abandon_watch, &path, sent).await {
                // The session has deleted it, or will.
                Err(Failure::Abandoned) => false,
                deleted => deleted?,
            }
        };
        Ok(deleted || is_again || !is_held)
    }
}

impl Drop for OwnNode {
    fn drop(&mut self) {
        let pending_delete = self.abandon_watch.take_pending_delete();
        if let Some(node) = pending_delete
            && self.session.ended().is_none()
        {
            self.session.delete_later(node);
        }
    }
}
