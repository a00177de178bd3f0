//! A session: one lease for all holds and waiters of a client that have asked for its ttl, and its one task.

use std::{
    fmt,
    ops::Deref,
    pin::Pin,
    sync::{Arc, Mutex, Weak},
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{
    FutureExt as _, StreamExt as _,
    future::{BoxFuture, join_all},
    stream::FuturesUnordered,
};
use lockkit_core::{
    LossReason,
    spi::{asleep, queue::AbandonWatch},
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, timeout},
};

use crate::{
    connection::Connection,
    error::{Failure, Result},
    layout::Layout,
    lease::{self, Patience, Proof, Sent},
    lock,
    members::Members,
    watch::Watcher,
    wire::{
        DeleteRangeRequest, KeyValue, LeaseGrantRequest, PutRequest, RangeRequest, Request, TxnRequest,
        TxnResponse,
    },
};

/// The time within which a lease has to be granted.
const GRANT_TIMEOUT: Duration = Duration::from_secs(3);
/// The most keys that are read in one transaction. Servers take 128 operations in one unless they are told otherwise (`--max-txn-ops`).
const MAX_READS: usize = 100;

/// A session. Dropping it ends it, and revokes its lease.
pub(crate) struct Session(Arc<Core>);

/// A session as its own task sees it, which does not keep the session from being dropped.
pub(crate) struct Core {
    pub(crate) lease: i64,
    ttl: Duration,
    members: Arc<Members>,
    pub(crate) watcher: Arc<Watcher>,
    layout: Layout,
    proof: Mutex<Proof>,
    /// Why the session has ended, if it has. Those who wait for it are woken by each proof, too.
    ended: watch::Sender<Option<LossReason>>,
    /// The failure of the last beat, since no member could be reached, or they refused it. `None` if it went well, or failed for another
    /// reason, for which the next one goes to another member.
    trouble: Mutex<Option<Failure>>,
    leftovers: Mutex<Vec<Leftover>>,
    delete_requested: Notify,
    beat_requested: Notify,
    abandon_watches: Mutex<Vec<Weak<AbandonWatch<Leftover>>>>,
    closing: watch::Sender<bool>,
    /// Whether the lease was revoked, once the task has ended.
    task_ended: watch::Sender<Option<bool>>,
}

/// A request for an entry, which is sent when it is polled. Once it is done, do not poll it again.
pub(crate) struct Entering(BoxFuture<'static, Result<TxnResponse>>);

impl Future for Entering {
    type Output = Result<TxnResponse>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for Entering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Entering")
    }
}

/// A key to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// The transaction of this revision has made it.
    Made { key: Vec<u8>, revision: i64 },
    /// It was asked for. It may be there, or may yet come.
    Asked { key: Vec<u8>, gone: String },
}

impl Session {
    /// Has a lease granted of so many seconds. Call it within a Tokio runtime, where the session's task lives.
    pub(crate) async fn open(
        members: &Arc<Members>,
        watcher: &Arc<Watcher>,
        layout: &Layout,
        seconds: u64,
    ) -> Result<Self> {
        let connection = members.connection().await?;
        let sent = now();
        let request = LeaseGrantRequest {
            ttl: i64::try_from(seconds).unwrap_or(i64::MAX),
        };
        let granted = timeout(GRANT_TIMEOUT, connection.call(&request)).await;
        let granted = granted.unwrap_or_else(|_| {
            Err(Failure::Unknown(format!(
                "no lease was granted within {GRANT_TIMEOUT:?} (do most of the members run, and reach each other?)"
            )))
        });
        if let Err(failure) = &granted {
            // Another member's database is as full.
            let is_late = !failure.is_refusal() && !matches!(failure, Failure::Full(_));
            if is_late && members.has_others() {
                Members::leave(&connection).await;
            }
        }
        let granted = granted?;
        // A key with the lease 0 has none.
        if granted.ttl != request.ttl || granted.id == 0 {
            // Otherwise it ends by itself.
            let _ = timeout(GRANT_TIMEOUT, connection.revoke(granted.id)).await;
            if granted.ttl > request.ttl {
                return Err(Failure::ShortLease { granted: granted.ttl });
            }
            return Err(Failure::Unknown(format!(
                "the servers have granted the lease {:x} of {} s, and {} s were asked for",
                granted.id, granted.ttl, request.ttl
            )));
        }
        let proof = Proof::new(sent, now(), seconds);
        let core = Core {
            lease: granted.id,
            ttl: Duration::from_secs(seconds),
            members: members.clone(),
            watcher: watcher.clone(),
            layout: layout.clone(),
            proof: Mutex::new(proof),
            ended: watch::Sender::new(None),
            trouble: Mutex::default(),
            leftovers: Mutex::default(),
            delete_requested: Notify::new(),
            beat_requested: Notify::new(),
            abandon_watches: Mutex::default(),
            closing: watch::Sender::new(false),
            task_ended: watch::Sender::new(None),
        };
        let core = Arc::new(core);
        // A beat takes two round trips, and the grant took one.
        let patience = Patience::new(2 * sent.at.elapsed());
        tokio::spawn(run(EndOnDrop(core.clone()), patience));
        Ok(Self(core))
    }

    /// Ends the session, and waits until its lease is revoked.
    pub(crate) async fn close(&self) -> Result<()> {
        self.closing.send_replace(true);
        let mut ended = self.task_ended.subscribe();
        let revoked = ended.wait_for(Option::is_some).await;
        // The sender is part of `self`.
        if revoked.is_ok_and(|revoked| *revoked == Some(true)) {
            return Ok(());
        }
        self.members.connection().await?.revoke(self.lease).await?;
        self.task_ended.send_replace(Some(true));
        Ok(())
    }
}

impl Deref for Session {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.0
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.closing.send_replace(true);
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("lease", &format_args!("{:x}", self.lease))
            .field("ended", &self.ended())
            .finish_non_exhaustive()
    }
}

impl Core {
    /// Returns why the session has ended, if it has.
    pub(crate) fn ended(&self) -> Option<LossReason> {
        *self.ended.borrow()
    }

    /// Returns the lease's length, as the servers count it.
    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Returns until when the lease is proven to last.
    pub(crate) fn proven_until(&self) -> Instant {
        lock(&self.proof).end(asleep())
    }

    /// Waits until the lease is proven to last beyond then, or has ended.
    ///
    /// # Errors
    /// If it has ended.
    pub(crate) async fn proven_beyond(&self, at: impl Fn() -> Instant) -> Result<()> {
        let mut proofs = self.ended.subscribe();
        loop {
            if let Some(reason) = self.ended() {
                return Err(Failure::SessionEnded(reason));
            }
            if self.proven_until() > at() {
                return Ok(());
            }
            // The sender is part of `self`, so that this does not fail.
            let _ = proofs.changed().await;
        }
    }

    /// Returns whether what is proven is as new as proofs are.
    pub(crate) fn is_current(&self) -> bool {
        lock(&self.proof).is_current(now(), self.ttl)
    }

    /// Waits until what is proven is as new as proofs are, or the lease has ended.
    pub(crate) async fn current(&self) {
        let mut proofs = self.ended.subscribe();
        while self.ended().is_none() && !self.is_current() {
            // The sender is part of `self`, so that this does not fail.
            let _ = proofs.changed().await;
        }
    }

    /// Returns why the last beat failed, if it did: no member could be reached, or they refused it.
    pub(crate) fn trouble(&self) -> Option<Failure> {
        lock(&self.trouble).clone()
    }

    fn is_in_trouble(&self, failure: Failure) {
        *lock(&self.trouble) = Some(failure);
    }

    /// Has the next beat come now.
    pub(crate) fn request_beat(&self) {
        self.beat_requested.notify_one();
    }

    /// Waits for the next proof, or the end.
    pub(crate) async fn next_beat(&self) {
        let _ = self.ended.subscribe().changed().await;
    }

    /// Returns a request for an entry. Poll it wherever its claim is polled, and drop it with the claim alone: so nothing is left
    /// unknown that need not be. In a task of its own it would take longer.
    pub(crate) fn enter(&self, request: TxnRequest) -> Entering {
        let members = self.members.clone();
        Entering(async move { members.call(request).await }.boxed())
    }

    /// Waits for the end of the session, and returns why it has ended.
    pub(crate) async fn over(&self) -> LossReason {
        let mut ended = self.ended.subscribe();
        let reason = ended.wait_for(Option::is_some).await;
        // The sender is part of `self`.
        reason
            .ok()
            .and_then(|reason| *reason)
            .unwrap_or(LossReason::Disconnected)
    }

    pub(crate) async fn connection(&self) -> Result<Connection> {
        self.members.connection().await
    }

    pub(crate) async fn txn(&self, request: TxnRequest) -> Result<TxnResponse> {
        self.members.call(request).await
    }

    /// Returns the entries of a range, by a linearizable read.
    pub(crate) async fn range(&self, request: RangeRequest) -> Result<Vec<KeyValue>> {
        Ok(self.members.call(request).await?.kvs)
    }

    /// Returns the entries of these keys, `None` for one that is not there. Each is as it is at a moment from now on, those of up to
    /// [`MAX_READS`] keys at one moment.
    pub(crate) async fn read(&self, keys: &[&[u8]]) -> Result<Vec<Option<KeyValue>>> {
        let mut found = Vec::with_capacity(keys.len());
        for keys in keys.chunks(MAX_READS) {
            let reads = keys.iter().map(|key| {
                let read = RangeRequest {
                    key: key.to_vec(),
                    keys_only: true,
                    ..RangeRequest::default()
                };
                Request::Range(read).into()
            });
            let request = TxnRequest {
                success: reads.collect(),
                ..TxnRequest::default()
            };
            let answers = self.txn(request).await?.responses.into_iter();
            found.extend(answers.map(|answer| answer.range.and_then(|range| range.kvs.into_iter().next())));
        }
        Ok(found)
    }

    /// Deletes the key of an entry, which the transaction of this revision has made. Returns `false` if it is not there.
    ///
    /// Nobody else makes a key of this name, so that the servers need not compare anything first: a transaction costs them more.
    pub(crate) async fn delete(&self, key: &[u8], revision: i64) -> Result<bool> {
        let request = DeleteRangeRequest {
            key: key.to_vec(),
            prev_kv: true,
        };
        let deleted = self.members.call(request).await?.prev_kvs;
        Ok(deleted.iter().any(|kv| kv.create_revision == revision))
    }

    /// Deletes an entry that may be there, and sees to it that it is not made later: a request whose answer is lost may still be under
    /// way, and no later one of this client is behind it.
    pub(crate) async fn fence(&self, key: &[u8], gone: &str) -> Result<()> {
        let gone = PutRequest {
            key: gone.into(),
            lease: self.lease,
            ..PutRequest::default()
        };
        let delete = DeleteRangeRequest {
            key: key.to_vec(),
            prev_kv: false,
        };
        let request = TxnRequest {
            success: vec![Request::Put(gone).into(), Request::Delete(delete.clone()).into()],
            ..TxnRequest::default()
        };
        match self.txn(request).await {
            // Without its lease the entry is gone, and cannot be made.
            Ok(_) | Err(Failure::NoLease) => Ok(()),
            Err(failure @ Failure::Full(_)) => {
                // An entry that is there stands in nobody's way until there is room to fence it.
                self.members.call(delete).await?;
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Deletes this key, for as long as that takes.
    pub(crate) fn delete_later(&self, leftover: Leftover) {
        lock(&self.leftovers).push(leftover);
        self.delete_requested.notify_one();
    }

    /// Deletes the entry of this claim if the claim is abandoned.
    pub(crate) fn delete_if_abandoned(&self, abandon_watch: &Arc<AbandonWatch<Leftover>>) {
        let mut watches = lock(&self.abandon_watches);
        if watches.len() == watches.capacity() {
            watches.retain(|watch| watch.strong_count() > 0);
        }
        watches.push(Arc::downgrade(abandon_watch));
    }

    /// Ends the session: the servers say that they have no such lease.
    pub(crate) fn has_no_lease(&self) {
        self.end(LossReason::Expired);
    }

    /// Ends the session on this side.
    fn end(&self, reason: LossReason) {
        self.ended.send_modify(|ended| {
            ended.get_or_insert(reason);
        });
    }

    fn proves(&self, proof: Proof) {
        *lock(&self.trouble) = None;
        {
            let mut known = lock(&self.proof);
            *known = known.or_later(proof);
        }
        self.ended.send_modify(|_| {});
    }

    /// Renews the lease, and proves that it was renewed.
    async fn beat(&self, connection: &Connection) -> Result<Beat> {
        let sent = now();
        let renewed = connection.keep_alive(self.lease).await?;
        let Some(ttl) = u64::try_from(renewed.ttl).ok().filter(|ttl| *ttl > 0) else {
            return Ok(Beat::Ended);
        };
        let probe = RangeRequest {
            key: self.layout.probe().into(),
            ..RangeRequest::default()
        };
        let read = connection.call(&probe).await?;
        let term = |header: Option<crate::wire::Header>| header.map(|header| header.raft_term);
        if term(renewed.header) != term(read.header) || renewed.header.is_none() {
            return Ok(Beat::OtherTerm);
        }
        Ok(Beat::Proven(Proof::renewed(sent, now(), ttl, self.ttl)))
    }

    /// Renews the lease as [`beat`](Self::beat) does. Returns `None` if the member is silent, or leaves this request alone unanswered for
    /// too long. A short lease has little time, and all leases share the connection: so a member that answers others is waited for, and
    /// asked again: what it has passed on to a leader that is gone is not answered.
    async fn beat_within(&self, connection: &Connection, patience: Patience) -> Option<Result<Beat>> {
        let given_up = Instant::now() + lease::longest_wait(self.ttl);
        let mut wait = patience.length();
        let mut beats = FuturesUnordered::new();
        loop {
            let since = Instant::now();
            beats.push(self.beat(connection));
            let decided = async {
                let mut last = None;
                while let Some(beat) = beats.next().await {
                    // One that failed says nothing of those after it.
                    let decides = matches!(beat, Ok(Beat::Proven(_) | Beat::Ended) | Err(Failure::NoLease));
                    last = Some(beat);
                    if decides {
                        break;
                    }
                }
                last
            };
            match timeout(wait.min(given_up - since), decided).await {
                Ok(beat) => return beat,
                Err(_) if !connection.heard_since(since) || Instant::now() >= given_up => return None,
                Err(_) => wait *= 2,
            }
        }
    }

    async fn delete_leftover(&self, leftover: &Leftover) -> Result<()> {
        match leftover {
            Leftover::Made { key, revision } => self.delete(key, *revision).await.map(drop),
            Leftover::Asked { key, gone } => self.fence(key, gone).await,
        }
    }

    fn take_abandoned(&self, connection: &Connection) {
        let now = Instant::now();
        let mut abandoned = Vec::new();
        lock(&self.abandon_watches).retain(|watch| {
            let Some(watch) = watch.upgrade() else {
                return false;
            };
            abandoned.extend(watch.take_if_abandoned(now, connection.since()));
            true
        });
        for leftover in abandoned {
            self.delete_later(leftover);
        }
    }
}

enum Beat {
    Proven(Proof),
    /// An election has come between the renewal and the read, which prove nothing.
    OtherTerm,
    /// The servers have no such lease.
    Ended,
}

fn now() -> Sent {
    Sent {
        at: Instant::now(),
        asleep: asleep(),
    }
}

/// Ends a session with its task, also if the task's runtime is shut down.
struct EndOnDrop(Arc<Core>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end(LossReason::Disconnected);
        self.0.task_ended.send_if_modified(|ended| {
            let first = ended.is_none();
            ended.get_or_insert(false);
            first
        });
    }
}

/// The session's one task.
async fn run(session: EndOnDrop, patience: Patience) {
    let core = &*session.0;
    let reason = tokio::select! {
        () = keep_alive(core, patience) => LossReason::Expired,
        () = closing(core) => LossReason::Disconnected,
        () = delete_leftovers(core) => LossReason::Disconnected,
    };
    core.end(reason);
    let revoke = async { core.connection().await?.revoke(core.lease).await };
    // After that it has ended by itself.
    let revoked = timeout(core.ttl, revoke).await;
    let is_over = revoked.is_ok_and(|revoked| revoked.is_ok()) || reason == LossReason::Expired;
    core.task_ended.send_replace(Some(is_over));
}

async fn closing(core: &Core) {
    let _ = core.closing.subscribe().wait_for(|closing| *closing).await;
}

/// Keeps the lease alive, and proves it. Returns when the servers have ended it, or it was not proven for so long that nothing is held
/// on it any more.
async fn keep_alive(core: &Core, mut patience: Patience) {
    let mut next = Instant::now() + lease::beat(core.ttl);
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = core.beat_requested.notified() => {}
        }
        let began = Instant::now();
        let connection = match core.connection().await {
            Ok(connection) => connection,
            Err(failure) => {
                core.is_in_trouble(failure);
                next = began + lease::pause(core.ttl);
                continue;
            }
        };
        // All holds have ended here. To renew the lease all the same would keep others out, with nobody inside.
        if core.proven_until() <= Instant::now() {
            tracing::debug!("a lease was not proven for its whole length; giving it up");
            return;
        }
        core.take_abandoned(&connection);
        let beat = core.beat_within(&connection, patience).await;
        next = began + lease::pause(core.ttl);
        match beat {
            Some(Ok(Beat::Proven(proof))) => {
                patience = Patience::new(began.elapsed());
                core.proves(proof);
                next = began + lease::beat(core.ttl);
                let probe = core.layout.probe();
                let limit = lease::watch_wait(core.ttl, patience);
                if !core.watcher.is_alive(&probe, limit).await {
                    tracing::debug!("a member tells of no watch any more");
                    Members::leave(&connection).await;
                }
            }
            Some(Ok(Beat::Ended) | Err(Failure::NoLease)) => return,
            Some(Ok(Beat::OtherTerm)) => tracing::debug!("a keepalive met an election; sending another"),
            Some(Err(error)) => {
                tracing::debug!(%error, "a lease is not renewed; trying again");
                if error.is_permanent() {
                    core.is_in_trouble(error);
                } else if core.members.has_others() {
                    Members::leave(&connection).await;
                }
            }
            None => {
                tracing::debug!("a member is silent");
                // One that has never answered may be as slow as the next one is.
                if !connection.heard_since(connection.since()) {
                    patience = patience.after_silence();
                }
                Members::leave(&connection).await;
            }
        }
    }
}

/// Deletes the keys that nobody needs any more, again and again where that fails.
async fn delete_leftovers(core: &Core) {
    loop {
        let leftovers = std::mem::take(&mut *lock(&core.leftovers));
        if leftovers.is_empty() {
            core.delete_requested.notified().await;
            continue;
        }
        let outcomes = join_all(leftovers.iter().map(|leftover| core.delete_leftover(leftover))).await;
        let mut left = Vec::new();
        for (leftover, outcome) in leftovers.into_iter().zip(outcomes) {
            match outcome {
                Ok(()) => {}
                Err(error) => {
                    if error.is_permanent() {
                        tracing::warn!(?leftover, %error, "a key that nobody needs cannot be deleted; trying again");
                    } else {
                        tracing::debug!(?leftover, %error, "a key is not deleted yet; trying again");
                    }
                    left.push(leftover);
                }
            }
        }
        if !left.is_empty() {
            lock(&core.leftovers).extend(left);
            core.next_beat().await;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use lockkit_testbed::etcd::{self, EtcdCluster, EtcdServer};
    use tokio::time::sleep;

    use super::*;
    use crate::{
        connection::Options,
        rogue::{Answer, serve},
        wire::{LeaseResponse, Nothing},
    };

    pub(crate) async fn open(host: String, seconds: u64) -> Session {
        try_open(host, seconds).await.unwrap()
    }

    async fn try_open(host: String, seconds: u64) -> Result<Session> {
        let options = Options::default();
        let members = Members::new(vec![host], options);
        let watcher = Arc::new(Watcher::new(members.clone()));
        let layout = Layout::new("", "proof");
        Session::open(&members, &watcher, &layout, seconds).await
    }

    /// Holds on it would count with more than there is, or have keys that never end.
    #[tokio::test]
    async fn a_lease_that_was_not_asked_for_is_not_taken() {
        for (id, ttl) in [(7, 19), (7, 0), (7, -20), (0, 20), (7, 21)] {
            let header = None;
            let lease = LeaseResponse { header, id, ttl };
            let grants = serve(move |request| async move {
                if request.uri().path().ends_with("LeaseGrant") {
                    Answer::of(&lease)
                } else {
                    Answer::of(&Nothing {})
                }
            });
            let opened = try_open(grants.await, 20).await;
            let failure = opened.expect_err("it is taken");
            let is_short = matches!(failure, Failure::ShortLease { granted: 21 });
            assert!(is_short || ttl < 21, "{failure}");
            assert!(is_short || failure.to_string().contains("asked for"), "{failure}");
        }
    }

    /// A request is not lost with a connection that has not taken it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_was_not_sent_is_sent_on_the_next_connection() {
        if lockkit_testbed::skipped("etcd", etcd::missing()) {
            return;
        }
        let server = tokio::task::block_in_place(EtcdServer::plain).unwrap();
        let session = open(server.addr().to_string(), 60).await;
        let (mut lost, until) = (0, Instant::now() + Duration::from_secs(2));
        let cuts = async {
            while Instant::now() < until {
                if let Ok(connection) = session.connection().await {
                    connection.abort();
                }
                sleep(Duration::from_millis(1)).await;
            }
        };
        let reads = async {
            while Instant::now() < until {
                match session.read(&[b"key"]).await {
                    Ok(_) => {}
                    Err(Failure::Unknown(_)) => lost += 1,
                    Err(error) => panic!("{error:?}"),
                }
            }
        };
        tokio::join!(cuts, reads);
        assert!(lost > 0, "a vacuous pass: no request was cut off");
    }

    /// A leader that is cut off goes on to answer keepalives until it notices.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_keepalive_of_a_cut_off_leader_proves_nothing() {
        if lockkit_testbed::skipped("etcd", etcd::missing()) {
            return;
        }
        let cluster = tokio::task::block_in_place(EtcdCluster::start).unwrap();
        let mut fooled = 0;
        for _ in 0..3 {
            let leader = tokio::task::block_in_place(|| cluster.leader()).unwrap();
            let session = open(cluster.member(leader).addr().to_string(), 60).await;
            let connection = session.connection().await.unwrap();
            let moment = Duration::from_millis(300);
            let before = timeout(Duration::from_mins(1), session.beat(&connection)).await;
            assert!(matches!(before, Ok(Ok(Beat::Proven(_)))));
            cluster.cut(leader);
            // What was under way has arrived.
            sleep(Duration::from_millis(50)).await;
            for _ in 0..4 {
                let renewed = timeout(moment, connection.keep_alive(session.lease)).await;
                fooled += u32::from(matches!(renewed, Ok(Ok(answer)) if answer.ttl > 0));
                let beat = timeout(moment, session.beat(&connection)).await;
                assert!(
                    !matches!(beat, Ok(Ok(Beat::Proven(_)))),
                    "it is cut off, and the lease counts as proven"
                );
            }
            tokio::task::block_in_place(|| cluster.mend()).unwrap();
            if fooled > 0 {
                return;
            }
        }
        panic!("a vacuous pass: it answered nothing");
    }

    /// A follower that has passed a renewal on to a leader that is cut off does not answer it for seven seconds.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_renewal_that_went_to_a_leader_that_is_gone_is_repeated() {
        if lockkit_testbed::skipped("etcd", etcd::missing()) {
            return;
        }
        let cluster = tokio::task::block_in_place(EtcdCluster::start).unwrap();
        for _ in 0..5 {
            let leader = tokio::task::block_in_place(|| cluster.leader()).unwrap();
            let follower = cluster.member((leader + 1) % 3).addr().to_string();
            let session = open(follower, 60).await;
            let connection = session.connection().await.unwrap();
            cluster.cut(leader);
            let reads = async {
                loop {
                    let _ = timeout(Duration::from_millis(100), session.read(&[b"key"])).await;
                }
            };
            // Long enough for an election.
            let patience = Patience::new(Duration::from_secs(3));
            let beat = tokio::select! {
                beat = session.beat_within(&connection, patience) => beat,
                () = reads => unreachable!(),
            };
            tokio::task::block_in_place(|| cluster.mend()).unwrap();
            match beat {
                Some(Ok(Beat::Proven(_))) => return,
                // The election took longer, or came between a renewal and its read.
                None | Some(Ok(Beat::OtherTerm)) => {}
                Some(beat) => panic!("{:?}", beat.err()),
            }
        }
        panic!("a vacuous pass: no election let it be repeated");
    }
}
