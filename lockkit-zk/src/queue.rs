//! The recipe: a place in a queue of sequential nodes.
//!
//! Each contender makes an ephemeral sequential node in the lock's directory. Whoever has nobody in conflict before it
//! holds the lock; everyone else watches the nearest of those before it, so that a release wakes one waiter and not
//! all. It is the recipe of the ZooKeeper documentation, with the node names of Apache Curator, and these differences:
//!
//! - Making the node and asking whether it is alone is one request.
//! - A waiter that had one other before it when it looked is granted when that one goes, without another look. It may
//!   be: nobody can come in before it, and a watch on its own node would have told first had that gone.
//! - The fencing token is the id of the transaction that made the node.
//! - Nothing is granted unless the session is proven to live.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Error, LossReason,
    spi::{Claim, ClaimRequest, Grant, Mode, Renewal, SessionProof},
};
use uuid::Uuid;
use zookeeper_client::Error as ZkError;

use crate::{
    NAME,
    abandon_watch::NotifiedWaker,
    backend::Shared,
    crowded_dirs::Crowding,
    error::{Failure, Result, is_refusal},
    layout::{self, basename, is_used_up},
    own_node::{NodeRef, OwnNode},
    session::{Enqueued, Found, PendingDelete, Session},
    turn::{Before, Turn, excludes, is_busy, is_writer, turn},
    watch::{Watch, WatchEvent},
};

/// How often a directory is looked at anew within one attempt, because it changed meanwhile.
const MAX_LOOKS: usize = 16;

/// A contender.
#[derive(Debug)]
pub(crate) struct QueueClaim {
    shared: Arc<Shared>,
    request: ClaimRequest,
    /// The lock's directory.
    dir: String,
    /// How many nodes it has asked for: each is named differently.
    asked: u32,
    place: Option<Place>,
}

/// A node that there is, or may be.
#[derive(Debug)]
struct Place {
    own_node: OwnNode,
    node: Node,
    /// There were many in the directory when it came.
    crowded: bool,
    /// Who is probably the one right before it.
    nearest: Option<String>,
    waits: Option<Waits>,
}

/// What whoever has made its node has been told besides.
enum Seen {
    /// It is alone, which makes it a holder.
    Alone,
    /// These are in the directory.
    All(Vec<String>),
    Nothing,
}

#[derive(Debug)]
enum Node {
    /// Asked for with this prefix; whether it was made is not known.
    Asked(String),
    Made {
        path: String,
        sequence: i64,
        czxid: i64,
    },
}

/// Whom it waits for.
#[derive(Debug)]
struct Waits {
    paths: Vec<String>,
    watches: Vec<Watch>,
    /// Once one of them is gone, nobody is before it.
    one_to_go: bool,
    /// In a crowd, if it waits for a writer: so is nobody if that one has held the lock.
    writer: Option<Writer>,
    /// The connection on which it began to.
    connection_id: Option<u64>,
}

/// A node whose holder is alone.
#[derive(Debug)]
struct Writer {
    /// Where its session says what it has held.
    heartbeat_path: String,
    czxid: i64,
}

/// Where a node's GUID, which is its owner's, tells which of its nodes it is.
const EARLIER: u32 = 96;

/// The name of the `which`th node that this owner asks for, from 0 on.
pub(crate) fn guid(owner: u128, which: u32) -> Uuid {
    Uuid::from_u128(owner ^ (u128::from(which) << EARLIER))
}

/// A node that this owner has made before `own` and that was believed not to be there. Of the `asked` nodes that it asked
/// for the last is its own.
fn earlier_node<'a>(children: &'a [String], own: &str, owner: u128, asked: u32) -> Option<&'a String> {
    let is_owners = |child: &str| {
        let guid = child.strip_prefix("_c_").and_then(|rest| rest.get(..36));
        let guid = guid.and_then(|guid| Uuid::try_parse(guid).ok());
        guid.is_some_and(|guid| {
            (guid.as_u128() ^ owner) >> EARLIER < u128::from(asked)
                && (guid.as_u128() ^ owner) << (128 - EARLIER) == 0
        })
    };
    if asked < 2 {
        return None;
    }
    children.iter().find(|child| *child != own && is_owners(child))
}

impl QueueClaim {
    pub(crate) fn new(shared: Arc<Shared>, request: ClaimRequest, dir: String) -> Self {
        Self {
            shared,
            request,
            dir,
            asked: 0,
            place: None,
        }
    }

    async fn try_once(&mut self, waits: bool) -> Result<Option<Grant>> {
        let mode = self.request.mode;
        self.begin();
        if let Some(place) = &mut self.place
            && place.its_turn().await?
        {
            return self.grant().map(Some);
        }
        for _ in 0..MAX_LOOKS {
            let mut listed = None;
            if self.place.is_none() {
                let session = self.shared.session().await?;
                if !waits && is_busy(&session.list_latest(&self.dir).await?, mode) {
                    return Ok(None);
                }
                match self.enqueue(session).await? {
                    Seen::Alone => return self.grant().map(Some),
                    Seen::All(children) => listed = Some(children),
                    Seen::Nothing => {}
                }
            }
            let Some(place) = &mut self.place else { continue };
            if place.nothing_has_changed().await? {
                self.wait()?;
                return Ok(None);
            }
            let so_far = place.waits.take();
            if !place.was_made().await? {
                self.clear();
                continue;
            }
            if waits && place.follows(&self.shared, &self.dir, mode).await? {
                self.wait()?;
                return Ok(None);
            }
            let Node::Made { path, sequence, .. } = &place.node else {
                continue;
            };
            if is_used_up(*sequence) {
                self.begin_directory_anew().await?;
                continue;
            }
            let session = place.own_node.session.clone();
            let own = basename(path).to_owned();
            let children = match listed {
                Some(children) => children,
                None => session.list(&self.dir).await?,
            };
            if let Some(earlier) = earlier_node(&children, &own, self.request.owner.get(), self.asked) {
                session.delete(&format!("{}/{earlier}", self.dir)).await?;
                continue;
            }
            match turn(&children, &own, mode) {
                Turn::Mine => return self.grant().map(Some),
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
                    if place.watch(&self.shared, &self.dir, before, so_far).await? {
                        self.wait()?;
                        return Ok(None);
                    }
                }
            }
        }
        Err(Failure::Restless {
            path: self.dir.clone(),
        })
    }

    /// Makes the node.
    async fn enqueue(&mut self, session: Arc<Session>) -> Result<Seen> {
        let mut missing = 0;
        for _ in 0..MAX_LOOKS {
            let last_seen = self.shared.crowded_dirs.last_seen(&self.dir);
            let prefix = self.next_prefix();
            let place = Place::asked(session.clone(), prefix.clone(), self.request.ttl);
            let abandon_watch = place.own_node.abandon_watch.clone();
            self.place = Some(place);
            let label = self.request.label.as_deref().unwrap_or_default().as_bytes();
            let (entered, listed) = if last_seen == Crowding::Several && missing == 0 {
                let (entered, listed) = session.enqueue_and_list(&abandon_watch, &prefix, label).await?;
                (entered, Some(listed))
            } else {
                // Elsewhere it would be a request more.
                let follows = last_seen == Crowding::Crowd
                    && matches!(self.request.mode, Mode::Exclusive | Mode::Shared);
                let entered = session
                    .enqueue(&abandon_watch, &prefix, label, missing, follows)
                    .await?;
                (entered, None)
            };
            match entered {
                Ok(Enqueued {
                    path,
                    sequence,
                    czxid,
                    others,
                    last,
                }) => {
                    let Some(place) = &mut self.place else { break };
                    place.made(path, sequence, czxid);
                    if matches!(listed, Some(Err(Failure::Server(ZkError::NoAuth)))) {
                        // Whoever may not list can still be told that it is alone.
                        self.shared.crowded_dirs.seen(&self.dir, 0);
                        self.leave().await?;
                        continue;
                    }
                    if !is_used_up(sequence) {
                        place.nearest = last.map(|last| format!("{last}{:010}", sequence - 1));
                    }
                    let listed = listed.transpose()?;
                    let listed_others = listed.as_ref().map(|children| children.len().saturating_sub(1));
                    if let Some(others) = others.or(listed_others) {
                        place.crowded = self.shared.crowded_dirs.seen(&self.dir, others) == Crowding::Crowd;
                    }
                    return Ok(match listed {
                        Some(children) => Seen::All(children),
                        None if others == Some(0) && !is_used_up(sequence) => Seen::Alone,
                        None => Seen::Nothing,
                    });
                }
                Err(ZkError::NoNode) => {
                    self.clear();
                    missing += 1;
                }
                // Somebody else has made it.
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
        Err(Failure::Restless {
            path: self.dir.clone(),
        })
    }

    /// A path that no other request of anyone has had.
    fn next_prefix(&mut self) -> String {
        self.asked += 1;
        let guid = guid(self.request.owner.get(), self.asked - 1);
        let marker = layout::marker(self.request.mode, self.shared.nodes());
        format!("{}/_c_{guid}-{marker}", self.dir)
    }

    /// Begins a directory anew whose sequence numbers are used up, if nobody else is in it. The token goes on rising:
    /// it is not made of them.
    async fn begin_directory_anew(&mut self) -> Result<()> {
        let Some(session) = self.place.as_ref().map(|place| place.own_node.session.clone()) else {
            return Ok(());
        };
        self.leave().await?;
        match session.delete(&self.dir).await {
            Err(Failure::Server(ZkError::NotEmpty)) => Err(Failure::UsedUp {
                dir: self.dir.clone(),
            }),
            Err(error) => Err(error),
            Ok(_) => Ok(()),
        }
    }

    fn grant(&mut self) -> Result<Grant> {
        match &mut self.place {
            Some(Place {
                own_node,
                node: Node::Made { czxid, .. },
                waits,
                ..
            }) => {
                let grant = own_node.grant(*czxid, self.request.ttl)?;
                *waits = None;
                Ok(grant)
            }
            _ => Err(Failure::NotProven),
        }
    }

    /// Deletes the node, if there is or may be one. `false` if it was held and turned out to be gone.
    async fn leave(&mut self) -> Result<bool> {
        let Some(place) = &mut self.place else {
            return Ok(true);
        };
        let mut kept = true;
        if place.own_node.session.over().is_none() && place.was_made().await? {
            let Place {
                own_node,
                node,
                crowded,
                ..
            } = place;
            if let Node::Made { path, czxid, .. } = node {
                let alone = self.request.mode == Mode::Exclusive;
                kept = own_node
                    .delete(path, (*crowded && alone).then_some(*czxid))
                    .await?;
            }
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

    /// Begins an attempt. A place in a session that has ended is no place, nor is one that was taken away.
    fn begin(&mut self) {
        let is_gone = |place: &mut Place| {
            place.own_node.session.over().is_some()
                || place.own_node.is_gone()
                || !place.own_node.abandon_watch.asks()
        };
        if self.place.as_mut().is_some_and(is_gone) {
            self.clear();
        }
    }

    /// Ends an attempt without a grant.
    fn wait(&mut self) -> Result<()> {
        let waiting = self.place.as_mut().is_some_and(Place::listen);
        waiting.then_some(()).ok_or(Failure::Abandoned)
    }
}

impl Place {
    fn asked(session: Arc<Session>, prefix: String, ttl: Duration) -> Self {
        Self {
            own_node: OwnNode::new(session, PendingDelete::Begins(prefix.clone()), ttl),
            node: Node::Asked(prefix),
            crowded: false,
            nearest: None,
            waits: None,
        }
    }

    /// Whether the node was made; looks for it if that is not known.
    async fn was_made(&mut self) -> Result<bool> {
        let Node::Asked(prefix) = &self.node else {
            return Ok(true);
        };
        let Some(Found { path, czxid }) = self.own_node.session.find(prefix).await? else {
            return Ok(false);
        };
        let sequence = path.get(prefix.len()..).and_then(|number| number.parse().ok());
        let Some(sequence) = sequence else {
            return Ok(false);
        };
        self.made(path, sequence, czxid);
        Ok(true)
    }

    fn made(&mut self, path: String, sequence: i64, czxid: i64) {
        self.own_node
            .abandon_watch
            .is_now(PendingDelete::At(path.clone()));
        self.node = Node::Made {
            path,
            sequence,
            czxid,
        };
    }

    /// Whether what has been watched says that it is its turn, and if that is not enough, who has gone.
    async fn its_turn(&mut self) -> Result<bool> {
        if !self.has_seen_one_go() {
            return Ok(false);
        }
        match &self.waits {
            Some(Waits { one_to_go: true, .. }) => Ok(self.is_there_still()),
            Some(Waits {
                writer:
                    Some(Writer {
                        heartbeat_path,
                        czxid,
                    }),
                ..
            }) => {
                let Node::Made { path, .. } = &self.node else {
                    return Ok(false);
                };
                self.own_node.session.has_held(heartbeat_path, *czxid, path).await
            }
            _ => Ok(false),
        }
    }

    /// Whether one of those it watches has gone.
    fn has_seen_one_go(&mut self) -> bool {
        let watches = self.waits.iter_mut().flat_map(|waits| &mut waits.watches);
        watches
            .map(Watch::look)
            .any(|told| told == Some(WatchEvent::Deleted))
    }

    /// Whether its own node had not gone before what its watches have told.
    fn is_there_still(&mut self) -> bool {
        let connection_id = self.waits.as_ref().and_then(|waits| waits.connection_id);
        // What happened first is told first, but for what happened during an interruption.
        self.own_node.is_quiet()
            && connection_id.is_some()
            && connection_id == self.own_node.session.connection_id()
    }

    /// Whether it waits as before: no watch has told anything, and, in case that a notification got lost, its node and
    /// those it waits for are still there.
    async fn nothing_has_changed(&mut self) -> Result<bool> {
        let (Some(waits), Node::Made { path, .. }) = (&mut self.waits, &self.node) else {
            return Ok(false);
        };
        if !self.own_node.is_undisturbed() || waits.watches.iter_mut().any(|watch| watch.look().is_some()) {
            return Ok(false);
        }
        let mut paths = waits.paths.clone();
        paths.push(path.clone());
        let there = self.own_node.session.are_there(&paths).await?;
        Ok(there.iter().all(|there| *there))
    }

    /// Has it noted when one of its watches tells something, also if nobody listens.
    fn listen(&mut self) -> bool {
        let Self { own_node, waits, .. } = self;
        let waiting = own_node.abandon_watch.waits();
        if let Some(waits) = waits {
            let calls = NotifiedWaker::waker(&own_node.abandon_watch, None);
            if waits
                .poll(own_node.own(), &mut Context::from_waker(&calls))
                .is_ready()
            {
                calls.wake();
            }
        }
        waiting
    }

    /// Begins to watch the one right before it, if it is known and there.
    async fn follows(&mut self, shared: &Shared, dir: &str, mode: Mode) -> Result<bool> {
        let Some(nearest) = self.nearest.take() else {
            return Ok(false);
        };
        if !excludes(&nearest, mode) {
            return Ok(false);
        }
        let before = Before {
            watch: vec![nearest],
            one_to_go: false,
            ahead: None,
        };
        self.watch(shared, dir, before, None).await
    }

    /// Begins to watch those before it, and itself if nothing else will show that it is still there when they have gone. What
    /// it waited for `so_far` is watched already. `false` if one of them has gone meanwhile.
    async fn watch(
        &mut self,
        shared: &Shared,
        dir: &str,
        before: Before,
        so_far: Option<Waits>,
    ) -> Result<bool> {
        let Node::Made { path, .. } = &self.node else {
            return Ok(false);
        };
        let connection_id = self.own_node.session.connection_id();
        let mut paths: Vec<_> = before.watch.iter().map(|name| format!("{dir}/{name}")).collect();
        if before.one_to_go
            && let Some(mut waits) = so_far.filter(|waits| waits.begin_with(&paths, connection_id))
            && self.own_node.is_quiet()
        {
            // It has gone on being watched while the list was asked for.
            let is_quiet = waits.is_left_with_one();
            self.waits = Some(waits);
            return Ok(is_quiet);
        }
        // Of a crowd, those before it are told by what they have held.
        let ahead = before
            .ahead
            .filter(|_| !self.crowded && self.own_node.session.is_far());
        // Elsewhere it lists at its turn.
        let guarded = before.one_to_go || ahead.is_some() || self.own_node.own().is_some();
        paths.extend(ahead.map(|ahead| format!("{dir}/{ahead}")));
        let others = paths.len();
        if guarded && !self.own_node.is_quiet() {
            paths.push(path.clone());
        }
        let replies = self.own_node.session.watch_all(&paths).await?;
        let writer = match (&replies[..], &before.watch[..]) {
            ([Some((_, stat, _)), ..], [name]) if self.crowded && is_writer(name) => Some(Writer {
                heartbeat_path: shared.heartbeat_path(stat.ephemeral_owner),
                czxid: stat.czxid,
            }),
            _ => None,
        };
        let mut watches: Vec<_> = replies
            .into_iter()
            .map(|reply| reply.map(|(_, _, watch)| watch))
            .collect();
        for own in watches.drain(others..) {
            self.own_node.watched_by(own);
        }
        paths.truncate(others);
        let all: Option<Vec<_>> = watches.into_iter().collect();
        let (Some(watches), true) = (all, !guarded || self.own_node.is_quiet()) else {
            return Ok(false);
        };
        self.waits = Some(Waits {
            paths,
            watches,
            one_to_go: before.one_to_go,
            writer,
            connection_id,
        });
        Ok(true)
    }
}

impl Waits {
    /// Whether the one of `paths` is the nearest of those it watches, and has been on this connection.
    fn begin_with(&self, paths: &[String], connection_id: Option<u64>) -> bool {
        paths.len() == 1
            && self.paths.first() == paths.first()
            && connection_id.is_some()
            && self.connection_id == connection_id
    }

    /// Of those before it the nearest is left. `false` if that has gone, too.
    fn is_left_with_one(&mut self) -> bool {
        self.paths.truncate(1);
        self.watches.truncate(1);
        self.one_to_go = true;
        self.watches.iter_mut().all(Watch::is_quiet)
    }

    /// Ready once one of the watches, that of its own node included if there is one, has told something.
    fn poll(&mut self, own: Option<&mut Watch>, cx: &mut Context<'_>) -> Poll<()> {
        let mut all = self.watches.iter_mut().chain(own);
        if all.any(|watch| watch.poll(cx).is_ready()) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

#[async_trait]
impl Claim for QueueClaim {
    async fn attempt(&mut self, patience: Duration) -> lockkit_core::Result<Option<Grant>> {
        let granted = self.try_once(!patience.is_zero()).await;
        granted.map_err(|error| error.during("acquire"))
    }

    async fn renew(&mut self) -> lockkit_core::Result<Renewal> {
        let ttl = self.request.ttl;
        let renewed = match &mut self.place {
            Some(Place {
                own_node,
                node: Node::Made { path, .. },
                ..
            }) => own_node.prove(NodeRef { path, mark: "" }, ttl).await,
            _ => Ok(Renewal::Lost(LossReason::Disconnected)),
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
        let Some(Place {
            own_node,
            node,
            waits,
            ..
        }) = &mut self.place
        else {
            return std::future::pending().await;
        };
        if let Node::Made { path, .. } = node
            && own_node.is_held()
        {
            return own_node.disturbed(NodeRef { path, mark: "" }).await;
        }
        let Some(waits) = waits else {
            return std::future::pending().await;
        };
        poll_fn(|cx| {
            let waker = NotifiedWaker::waker(&own_node.abandon_watch, Some(cx.waker()));
            waits.poll(own_node.own(), &mut Context::from_waker(&waker))
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_node_is_told_from_others() {
        let owner = u128::MAX / 3;
        let named = |which: u32, number: u32| format!("_c_{}-lock-{number:010}", guid(owner, which));
        let of_another = format!("_c_{}-lock-0000000001", Uuid::from_u128(owner ^ 1));
        let children = vec![
            of_another,
            "junk".to_owned(),
            named(0, 3),
            named(1, 4),
            named(2, 5),
        ];
        let found = |own: u32, number, asked| earlier_node(&children, &named(own, number), owner, asked);
        assert_eq!(found(1, 4, 2), Some(&named(0, 3)));
        assert_eq!(found(0, 3, 1), None, "the others were asked for by nobody");
        assert_eq!(earlier_node(&children[..4], &named(0, 3), owner, 1), None);
        assert_eq!(earlier_node(&children[3..4], &named(1, 4), owner, 2), None);
    }
}
