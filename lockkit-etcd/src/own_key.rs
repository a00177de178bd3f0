//! A claim's own key: asked for, queued, waiting, held, deleted.

use std::{
    future::{pending, poll_fn},
    mem,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use lockkit_core::{
    LossReason,
    spi::{
        Grant, Lease, Renewal,
        fence::Bases,
        queue::{AbandonWatch, NotifyingWaker},
    },
};
use tokio::time::{Instant, sleep_until};

use crate::{
    error::{Failure, Result},
    fence,
    layout::is_asked_back,
    lease::seconds,
    members::Members,
    session::{Entering, Leftover, Session},
    watch::{Watch, WatchEvent},
    wire::{
        Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, Request, TxnRequest, TxnResponse,
    },
};

/// The age from which a hold is watched that did not wait. To watch it takes more requests than all the rest, and most holds are over by
/// then. Whoever deletes its key, or asks for the hold, before that is heard so much later.
const WATCHED_FROM: Duration = Duration::from_millis(20);

/// The number of times that a key is read to write to it.
pub(crate) const MAX_CHANGES: usize = 16;

/// A claim's own key, which may be there. If it is dropped without having been [cleared](OwnKey::clear), its session deletes the key.
#[derive(Debug)]
pub(crate) struct OwnKey {
    pub(crate) session: Arc<Session>,
    pub(crate) abandon_watch: Arc<AbandonWatch<Leftover>>,
    pub(crate) key: Vec<u8>,
    /// The key that says that this one shall never be made.
    gone: String,
    stage: Stage,
    /// The watch of the key itself.
    watch: Option<Watch>,
    /// The events of the key since its watch was confirmed.
    seen: Option<Seen>,
    /// A request to delete it was sent.
    leaving: bool,
    /// The sessions whose leases the key may have by now.
    changing: Vec<Arc<Session>>,
    /// The base that makes a token of its revision, as it was read after the key was made, or with that.
    bases: Option<Bases>,
}

/// The state of a key as it was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    There,
    /// Somebody has asked its holder to give up the hold.
    Asked,
    Gone,
}

#[derive(Debug)]
enum Stage {
    /// It was asked for, and the answer is awaited.
    Asked(Entering),
    /// It was asked for. It is not known whether it was made.
    Unknown,
    /// It was made by the transaction of this revision. Nobody is watched.
    Queued(i64),
    /// The claim waits for those before it.
    Waiting(i64, Predecessors),
    /// The claim holds.
    Held(Held),
}

#[derive(Clone, Copy, Debug)]
struct Held {
    revision: i64,
    /// The time of the grant.
    since: Instant,
    /// The end of the lease that was granted last.
    until: Instant,
}

/// The contenders before a waiter that it watches.
#[derive(Debug)]
pub(crate) struct Predecessors {
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) watches: Vec<Watch>,
    /// Once one of them is gone, nobody is before the waiter.
    pub(crate) one_to_go: bool,
}

impl Predecessors {
    /// The watch of one of them that has told of its deletion.
    fn gone(&self) -> Option<&Watch> {
        let mut watches = self.watches.iter();
        watches.find(|watch| watch.look() == Some(WatchEvent::Deleted))
    }

    /// All are watched, and no watch has told anything.
    pub(crate) fn are_quiet(&self) -> bool {
        self.watches.iter().all(Watch::is_quiet)
    }
}

impl OwnKey {
    /// Asks for a key. From now on the session deletes it if the claim is abandoned.
    pub(crate) fn ask(
        session: Arc<Session>,
        key: Vec<u8>,
        gone: String,
        ttl: Duration,
        request: TxnRequest,
    ) -> Self {
        let leftover = Leftover::Asked {
            key: key.clone(),
            gone: gone.clone(),
        };
        let abandon_watch = Arc::new(AbandonWatch::new(leftover, ttl));
        let entering = session.enter(request);
        session.delete_if_abandoned(&abandon_watch);
        Self {
            session,
            abandon_watch,
            key,
            gone,
            stage: Stage::Asked(entering),
            watch: None,
            seen: None,
            leaving: false,
            changing: Vec::new(),
            bases: None,
        }
    }

    pub(crate) fn has_bases(&self) -> bool {
        self.bases.is_some()
    }

    pub(crate) fn set_bases(&mut self, bases: Bases) {
        self.bases = Some(bases);
    }

    /// Forgets the key: it is not there, or no longer.
    pub(crate) fn clear(self) {
        self.abandon_watch.take_pending_delete();
    }

    /// Waits for the answer to the request for the key. Returns it once, `None` when it was there before, or does not say what
    /// has come of the request.
    ///
    /// # Cancel safety
    /// May be dropped: the answer is awaited the next time.
    pub(crate) async fn answer(&mut self) -> Result<Option<TxnResponse>> {
        let Stage::Asked(entering) = &mut self.stage else {
            return Ok(None);
        };
        let answer = tokio::select! {
            biased;
            answer = entering => answer,
            // Without its lease there is no entry.
            reason = self.session.over() => Err(Failure::SessionEnded(reason)),
        };
        self.stage = Stage::Unknown;
        answer.map(known)
    }

    /// Notes that the transaction of this revision has made the key.
    pub(crate) fn made(&mut self, revision: i64) {
        if matches!(self.stage, Stage::Asked(_) | Stage::Unknown) {
            self.abandon_watch.set_pending_delete(Leftover::Made {
                key: self.key.clone(),
                revision,
            });
            self.stage = Stage::Queued(revision);
        }
    }

    /// Finds out whether the key was made. If it is not there, sees to it that it never will be, and returns `false`.
    pub(crate) async fn settle(&mut self) -> Result<bool> {
        if self.revision().is_some() {
            return Ok(true);
        }
        let found = self.session.read(&[&self.key]).await?;
        if let Some(Some(kv)) = found.into_iter().next() {
            self.made(kv.create_revision);
            return Ok(true);
        }
        self.session.fence(&self.key, &self.gone).await?;
        Ok(false)
    }

    /// Returns the revision that made the key, once that is known.
    pub(crate) fn revision(&self) -> Option<i64> {
        match self.stage {
            Stage::Asked(_) | Stage::Unknown => None,
            Stage::Queued(revision) | Stage::Waiting(revision, _) | Stage::Held(Held { revision, .. }) => {
                Some(revision)
            }
        }
    }

    pub(crate) fn is_held(&self) -> bool {
        matches!(self.stage, Stage::Held(..))
    }

    /// A request to delete the key was sent, and may yet arrive.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// The key was seen to be deleted.
    pub(crate) fn is_gone(&self) -> bool {
        self.seen == Some(Seen::Gone)
            || self.watch.as_ref().and_then(Watch::look) == Some(WatchEvent::Deleted)
    }

    /// Returns the watch of the key, unless it has told something.
    pub(crate) fn quiet_watch(&self) -> Option<&Watch> {
        self.watch.as_ref().filter(|watch| watch.is_quiet())
    }

    /// Begins to watch the key, unless it is watched.
    pub(crate) fn ensure_watch(&mut self) -> &Watch {
        if self.watch.take_if(|watch| watch.look().is_some()).is_some() {
            self.seen = None;
        }
        let (session, key) = (&self.session, &self.key);
        self.watch.get_or_insert_with(|| session.watcher.changes(key))
    }

    /// Returns those that it waits for.
    pub(crate) fn predecessors(&self) -> Option<&Predecessors> {
        match &self.stage {
            Stage::Waiting(_, predecessors) => Some(predecessors),
            _ => None,
        }
    }

    /// Returns `true` if the watches of a waiter show that it is its turn: the last one before it has gone, and its own key was there
    /// at that time. One stream tells in the order in which things happen, so that its own would have been told first.
    pub(crate) fn is_next(&self) -> bool {
        let Some(predecessors) = self.predecessors() else {
            return false;
        };
        // In this order: what comes in between is the loss of a hold.
        let gone = predecessors.gone().and_then(Watch::stream);
        let own = self.quiet_watch().and_then(Watch::stream);
        predecessors.one_to_go && gone.is_some() && gone == own
    }

    /// Begins to wait for these. The key was seen to be there since its watch was confirmed.
    pub(crate) fn wait_for(&mut self, predecessors: Predecessors) {
        self.seen = Some(Seen::There);
        if let Some(revision) = self.revision() {
            self.stage = Stage::Waiting(revision, predecessors);
        }
    }

    /// Ends an attempt without a grant. From now on the events of its watches are noted, also if nobody listens.
    pub(crate) fn wait(&mut self) -> Result<()> {
        if !self.abandon_watch.wait() {
            return Err(Failure::Abandoned);
        }
        let waker = NotifyingWaker::waker(&self.abandon_watch, None);
        if self.poll_watches(&mut Context::from_waker(&waker)).is_ready() {
            waker.wake();
        }
        Ok(())
    }

    /// Is ready once a watch of a waiter has told something.
    fn poll_watches(&self, cx: &mut Context<'_>) -> Poll<()> {
        let Stage::Waiting(_, predecessors) = &self.stage else {
            return Poll::Pending;
        };
        let mut told = false;
        for watch in predecessors.watches.iter().chain(&self.watch) {
            told |= watch.poll(cx).is_ready();
        }
        if told { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Resolves when an attempt or a renewal is worth while.
    pub(crate) async fn notified(&mut self) {
        match self.stage {
            Stage::Held(Held { since, .. }) => self.disturbed(since).await,
            Stage::Waiting(..) => {
                let session = self.session.clone();
                let told = poll_fn(move |cx| {
                    let waker = NotifyingWaker::waker(&self.abandon_watch, Some(cx.waker()));
                    self.poll_watches(&mut Context::from_waker(&waker))
                });
                tokio::select! {
                    () = told => {}
                    // Its key has gone with its lease.
                    _ = session.over() => {}
                }
            }
            Stage::Asked(_) | Stage::Unknown | Stage::Queued(_) => pending().await,
        }
    }

    /// Makes a hold of it, once the lease is proven to last for half of the ttl at least.
    pub(crate) async fn grant(&mut self, ttl: Duration) -> Result<Grant> {
        let half = ttl.min(self.session.ttl()) / 2;
        self.session.proven_beyond(|| Instant::now() + half).await?;
        let (Some(revision), Some(bases)) = (self.revision(), &self.bases) else {
            return Err(Failure::NotProven);
        };
        let token = fence::token(bases, revision)?;
        // It went while the proof was awaited.
        if self.is_gone() {
            return Err(Failure::NotProven);
        }
        let lease = self.lease(ttl)?;
        Ok(Grant::new(token..=token, lease))
    }

    /// Holds for as long as is proven now, and no longer than the ttl, which nobody but the driver counts.
    fn lease(&mut self, ttl: Duration) -> Result<Lease> {
        if let Some(reason) = self.session.ended() {
            return Err(Failure::SessionEnded(reason));
        }
        let now = Instant::now();
        let end = self.session.proven_until().min(now + ttl);
        if end <= now {
            return Err(Failure::NotProven);
        }
        if !self.abandon_watch.hold(end) {
            return Err(Failure::Abandoned);
        }
        if let Some(revision) = self.revision() {
            let since = match self.stage {
                Stage::Held(held) => held.since,
                _ => now,
            };
            self.stage = Stage::Held(Held {
                revision,
                since,
                until: end,
            });
        }
        Ok(Lease::new(now, Some(end - now)))
    }

    /// Waits until a longer lease is proven than was granted last, by a server that has been heard of late. What is proven otherwise
    /// counts when half of what was granted is over, or the server cannot be asked, and confirms nothing.
    pub(crate) async fn renew(&mut self, ttl: Duration) -> Result<Renewal> {
        let Stage::Held(Held { until: granted, .. }) = self.stage else {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        };
        let session = self.session.clone();
        let now = Instant::now();
        let unheard = now + granted.saturating_duration_since(now) / 2;
        loop {
            if let Some(reason) = session.ended() {
                return Ok(Renewal::Lost(reason));
            }
            let is_longer = session.proven_until().min(Instant::now() + ttl) > granted;
            let seen = tokio::select! {
                biased;
                seen = self.look() => seen,
                // A server that is silent tells nothing of the key, either.
                () = sleep_until(unheard), if is_longer => Err(Failure::NotProven),
            };
            match seen {
                Ok(Seen::There) if is_longer && session.is_current() => {
                    return self.renewed(ttl, Renewal::Held);
                }
                Ok(Seen::There) => {}
                Ok(Seen::Asked) => return Ok(Renewal::Asked),
                Ok(Seen::Gone) => return Ok(Renewal::Lost(session.ended().unwrap_or(LossReason::Revoked))),
                Err(failure) if failure.is_permanent() => return Err(failure),
                Err(failure) if !is_longer => {
                    // Whoever connects again, or renews the lease, may know more than that a connection was lost.
                    let why = session.connection().await.err().or_else(|| session.trouble());
                    return Err(why.unwrap_or(failure));
                }
                Err(_) => return self.renewed(ttl, Renewal::Unconfirmed),
            }
            if is_longer && Instant::now() >= unheard {
                return self.renewed(ttl, Renewal::Unconfirmed);
            }
            session.request_beat();
            tokio::select! {
                () = session.current(), if is_longer => {}
                () = sleep_until(unheard), if is_longer => {}
                _ = session.proven_beyond(|| granted), if !is_longer => {}
                () = event(self.watch.as_ref()) => {}
            }
        }
    }

    fn renewed(&mut self, ttl: Duration, outcome: impl FnOnce(Lease) -> Renewal) -> Result<Renewal> {
        match self.lease(ttl) {
            Ok(lease) => Ok(outcome(lease)),
            Err(Failure::SessionEnded(reason)) => Ok(Renewal::Lost(reason)),
            Err(failure) => Err(failure),
        }
    }

    /// Has the next renewal grant what is proven, also if that is no longer than what was granted last.
    pub(crate) fn forget_lease(&mut self) {
        if let Stage::Held(Held { until, .. }) = &mut self.stage {
            *until = Instant::now().min(*until);
        }
    }

    /// Resolves when a hold should be renewed: its key may have gone, or its holder is asked to give up the hold.
    async fn disturbed(&mut self, since: Instant) {
        let session = self.session.clone();
        let watched_from = since + WATCHED_FROM;
        // From the grant on, and not from now: whoever drops this future and asks again, and a process that was paused, hears no later.
        if self.watch.is_none() && Instant::now() < watched_from {
            tokio::select! {
                () = sleep_until(watched_from) => {}
                _ = session.over() => return,
            }
        }
        loop {
            match self.look().await {
                Ok(Seen::There) => {
                    tokio::select! {
                        () = event(self.watch.as_ref()) => {}
                        _ = session.over() => return,
                    }
                }
                Ok(_) => return,
                Err(_) if session.ended().is_some() => return,
                // The next proof shows that there is a connection again.
                Err(_) => session.next_beat().await,
            }
        }
    }

    /// Makes sure that the watch will tell of a change of the key, and returns what the key is now.
    async fn look(&mut self) -> Result<Seen> {
        if self.is_gone() {
            return Ok(Seen::Gone);
        }
        if let (Some(seen), Some(_)) = (self.seen, self.quiet_watch()) {
            return Ok(seen);
        }
        self.ensure_watch().confirmed().await?;
        let request = RangeRequest {
            key: self.key.clone(),
            ..RangeRequest::default()
        };
        let found = self.session.range(request).await?.into_iter().next();
        let seen = match found.filter(|kv| Some(kv.create_revision) == self.revision()) {
            None => Seen::Gone,
            Some(kv) => {
                let is_asked = is_asked_back(&kv);
                // If it was not, the watch tells of the change.
                self.keep_on_lease(kv).await?;
                if is_asked { Seen::Asked } else { Seen::There }
            }
        };
        self.seen = Some(seen);
        Ok(seen)
    }

    /// Puts the key, which was read, on its lease again, if somebody has written to it without: it would stay when its client is gone, and bar
    /// the name for ever. Returns `true` if it was on it.
    pub(crate) async fn keep_on_lease(&mut self, kv: KeyValue) -> Result<bool> {
        let mut sessions = self.changing.iter().chain([&self.session]);
        if sessions.any(|session| session.lease == kv.lease) {
            return Ok(true);
        }
        let key = self.key.escape_ascii();
        tracing::warn!(%key, "somebody has written to a key and taken it off its lease; putting it back");
        // One that was written to meanwhile is read again, since its watch tells of that.
        self.session.txn(lease_change(kv, self.session.lease)).await?;
        Ok(false)
    }

    /// The key has a lease for this ttl, and no other was asked for.
    pub(crate) fn has_lease_for(&self, ttl: Duration) -> bool {
        self.changing.is_empty() && self.session.ttl() == Duration::from_secs(seconds(ttl))
    }

    /// Has the key go on with the lease of another session, half of which is left at least. Until that is confirmed, it may have
    /// either. A request that comes late, after a later one was confirmed, changes nothing.
    pub(crate) async fn change_lease(&mut self, session: Arc<Session>) -> Result<()> {
        let Some(revision) = self.revision() else {
            return Err(Failure::NotProven);
        };
        let half = session.ttl() / 2;
        session.proven_beyond(|| Instant::now() + half).await?;
        for _ in 0..MAX_CHANGES {
            let found = session.read(&[&self.key]).await?.into_iter().flatten().next();
            let Some(kv) = found.filter(|kv| kv.create_revision == revision) else {
                self.seen = Some(Seen::Gone);
                return Ok(());
            };
            let request = lease_change(kv, session.lease);
            if !self.changing.iter().any(|one| Arc::ptr_eq(one, &session)) {
                self.changing.push(session.clone());
            }
            // Else somebody has written to the key meanwhile, as those do who ask its holder for the lock.
            if session.txn(request).await?.succeeded {
                self.changing.clear();
                self.session = session;
                self.session.delete_if_abandoned(&self.abandon_watch);
                return Ok(());
            }
        }
        Err(Failure::Unknown("the key keeps being written to".to_owned()))
    }

    /// Returns why its key is gone, if that is known by the end of its lease.
    pub(crate) fn ended(&self) -> Option<LossReason> {
        let ended = self.session.ended();
        let mut changing = self.changing.iter();
        changing.try_fold(ended?, |_, session| session.ended())
    }

    /// Deletes the key, if it is there. Returns why it was lost, if it was held and turned out to be gone.
    pub(crate) async fn delete(&mut self) -> Result<Option<LossReason>> {
        if let Stage::Asked(_) = self.stage {
            match self.answer().await {
                Ok(Some(answer)) => match made_by(&answer) {
                    Some(revision) => self.made(revision),
                    None => return Ok(None),
                },
                Err(failure) if failure.is_refusal() => return Ok(None),
                Ok(None) | Err(_) => {}
            }
        }
        let is_held = self.is_held();
        if let Some(reason) = self.ended() {
            // The key ends with its lease.
            return Ok(is_held.then_some(reason));
        }
        let is_again = mem::replace(&mut self.leaving, true);
        let Some(revision) = self.revision() else {
            self.session.fence(&self.key, &self.gone).await?;
            return Ok(None);
        };
        let deleted = match self.session.delete(&self.key, revision).await {
            Err(failure) if failure.is_refusal() => {
                // It has deleted nothing: if the key is gone the next time, somebody else has.
                self.leaving = is_again;
                return Err(failure);
            }
            deleted => deleted?,
        };
        if deleted || is_again || !is_held {
            return Ok(None);
        }
        Ok(Some(self.ended().unwrap_or(LossReason::Revoked)))
    }
}

impl Drop for OwnKey {
    fn drop(&mut self) {
        let leftover = self.abandon_watch.take_pending_delete();
        let sessions = self.changing.iter().chain([&self.session]);
        let alive = sessions.into_iter().find(|session| session.ended().is_none());
        if let (Some(leftover), Some(session)) = (leftover, alive) {
            session.delete_later(leftover);
        }
    }
}

/// Returns the revision that has made the key that this transaction was to make; `None` if it has not made it.
pub(crate) fn made_by(answer: &TxnResponse) -> Option<i64> {
    let revision = answer.header.map(|header| header.revision);
    revision.filter(|revision| answer.succeeded && *revision > 0)
}

/// Returns an answer that says what has come of the request. One that says that the key was made, and by no revision, does not.
fn known(answer: TxnResponse) -> Option<TxnResponse> {
    (!answer.succeeded || made_by(&answer).is_some()).then_some(answer)
}

/// Returns the request that puts a key that was read, with another lease and nothing else.
fn lease_change(kv: KeyValue, lease: i64) -> TxnRequest {
    let compare = as_read(&kv);
    let put = PutRequest {
        key: kv.key,
        lease,
        ignore_value: true,
        ..PutRequest::default()
    };
    TxnRequest {
        compare,
        success: vec![Request::Put(put).into()],
        failure: Vec::new(),
    }
}

/// Returns the comparisons by which a key that was read is still as it was.
pub(crate) fn as_read(kv: &KeyValue) -> Vec<Compare> {
    vec![
        Compare::created(kv.key.as_slice(), kv.create_revision),
        Compare::modified(kv.key.as_slice(), kv.mod_revision),
    ]
}

/// Sees to the key of another claim, which was read, that somebody has taken off this lease, and whose client counts with that: puts it on it
/// again, as its client does, or deletes it if the lease is gone, as the servers would have done.
pub(crate) async fn put_back(members: &Members, kv: KeyValue, lease: i64) -> Result<()> {
    let key = kv.key.escape_ascii();
    tracing::warn!(%key, "somebody has written to a key and taken it off its lease; it ends with that");
    let back = lease_change(kv.clone(), lease);
    let delete = DeleteRangeRequest {
        key: kv.key,
        prev_kv: false,
    };
    // Unless somebody has seen to it meanwhile.
    let gone = TxnRequest {
        compare: back.compare.clone(),
        success: vec![Request::Delete(delete).into()],
        failure: Vec::new(),
    };
    match members.call(back).await {
        Err(Failure::NoLease) => members.call(gone).await.map(drop),
        put => put.map(drop),
    }
}

/// Waits for an event of this watch.
async fn event(watch: Option<&Watch>) {
    match watch {
        Some(watch) => drop(watch.event().await),
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use lockkit_testbed::{
        Mode, Proxy,
        etcd::{self, EtcdServer},
        eventually,
    };
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::{session::tests::open, wire::Header};

    /// Makes a key.
    async fn own_key(session: &Arc<Session>) -> OwnKey {
        let put = PutRequest {
            key: b"key".into(),
            lease: session.lease,
            ..PutRequest::default()
        };
        let request = TxnRequest {
            success: vec![Request::Put(put).into()],
            ..TxnRequest::default()
        };
        let (key, gone) = (b"key".into(), "gone".to_owned());
        let mut own = OwnKey::ask(session.clone(), key, gone, session.ttl(), request);
        let answer = own.answer().await.unwrap().unwrap();
        own.made(made_by(&answer).unwrap());
        own.set_bases(Bases::default());
        own
    }

    /// It is looked for, as after an answer that was lost. The key that was made would be left behind.
    #[test]
    fn a_success_without_a_revision_is_not_known() {
        let header = |revision| {
            Some(Header {
                cluster_id: 1,
                revision,
                raft_term: 1,
            })
        };
        for (succeeded, header, is_known) in [
            (true, header(7), true),
            (true, header(0), false),
            (true, header(-1), false),
            (true, None, false),
            (false, header(7), true),
            (false, None, true),
        ] {
            let answer = TxnResponse {
                header,
                succeeded,
                responses: Vec::new(),
            };
            assert_eq!(known(answer).is_some(), is_known, "{succeeded}, {header:?}");
        }
    }

    /// Reads a key.
    async fn read(own: &OwnKey) -> KeyValue {
        let found = own.session.read(&[&own.key]).await.unwrap();
        found.into_iter().flatten().next().unwrap()
    }

    /// The driver may keep listening anew, and the process may be paused meanwhile.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_hold_is_watched_from_an_age_on_and_not_from_a_call() {
        if lockkit_testbed::skipped("etcd", etcd::missing()) {
            return;
        }
        let server = tokio::task::block_in_place(EtcdServer::plain).unwrap();
        let session = Arc::new(open(server.addr().to_string(), 20).await);
        let mut own = own_key(&session).await;
        own.grant(session.ttl()).await.unwrap();
        assert!(own.notified().now_or_never().is_none());
        sleep(WATCHED_FROM).await;
        assert!(own.notified().now_or_never().is_none());
        assert!(own.watch.is_some(), "nobody watches it");
        session.delete(&own.key, own.revision().unwrap()).await.unwrap();
        timeout(Duration::from_secs(20), own.notified()).await.unwrap();
        let renewed = own.renew(session.ttl()).await.unwrap();
        assert!(
            matches!(renewed, Renewal::Lost(LossReason::Revoked)),
            "{renewed:?}"
        );
    }

    /// Else a hold that somebody else has ended since is said to be released.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_deletion_that_was_refused_has_deleted_nothing() {
        if lockkit_testbed::skipped("etcd", etcd::missing()) {
            return;
        }
        let server = tokio::task::block_in_place(|| EtcdServer::builder().fsync().start()).unwrap();
        let session = Arc::new(open(server.addr().to_string(), 60).await);
        let mut own = own_key(&session).await;
        own.grant(session.ttl()).await.unwrap();
        tokio::task::block_in_place(|| server.kill()).unwrap();
        eventually("it is noticed", async || session.connection().await.is_err()).await;
        let refused = own.delete().await.unwrap_err();
        assert!(refused.is_refusal(), "{refused:?}");
        tokio::task::block_in_place(|| server.start()).unwrap();
        assert!(tokio::task::block_in_place(|| server.delete("key")).unwrap());
        eventually("it is back", async || session.connection().await.is_ok()).await;
        assert_eq!(own.delete().await.unwrap(), Some(LossReason::Revoked));
    }

    /// Else a hold that counts with a long lease would end with a short one.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_change_of_the_lease_that_comes_late_changes_nothing() {
        if lockkit_testbed::skipped("etcd", etcd::missing()) {
            return;
        }
        let server = tokio::task::block_in_place(EtcdServer::plain).unwrap();
        let host = server.addr().to_string();
        let [first, short, long] = [20, 5, 60].map(|seconds| open(host.clone(), seconds));
        let (first, short, long) = tokio::join!(first, short, long);
        let (first, short, long) = (Arc::new(first), Arc::new(short), Arc::new(long));
        let mut own = own_key(&first).await;
        let late = lease_change(read(&own).await, short.lease);
        let watched_by = Arc::weak_count(&own.abandon_watch);
        own.change_lease(long.clone()).await.unwrap();
        assert!(
            Arc::weak_count(&own.abandon_watch) > watched_by,
            "the new session does not watch"
        );
        assert!(
            !short.txn(late).await.unwrap().succeeded,
            "it has the short lease"
        );
        assert_eq!(read(&own).await.lease, long.lease);
        assert!(!own.is_gone());
    }

    /// Each change under way may have been carried out.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_key_lasts_for_as_long_as_any_lease_it_may_have() {
        if lockkit_testbed::skipped("etcd", etcd::missing()) {
            return;
        }
        let server = tokio::task::block_in_place(EtcdServer::plain).unwrap();
        let proxy = Proxy::start(server.addr()).unwrap();
        let host = proxy.addr().to_string();
        let sessions = [20, 30, 40].map(|seconds| open(host.clone(), seconds));
        let [first, second, third] = sessions;
        let (first, second, third) = tokio::join!(first, second, third);
        let (first, second, third) = (Arc::new(first), Arc::new(second), Arc::new(third));
        let mut own = own_key(&first).await;
        let way = Duration::from_millis(500);
        proxy.set(Mode::Delay {
            requests: Duration::ZERO,
            replies: way,
        });
        for session in [&second, &third] {
            // The key is read, and the answer to the put is not awaited.
            let changed = timeout(way * 3 / 2, own.change_lease(session.clone())).await;
            assert!(changed.is_err(), "{changed:?}");
        }
        proxy.set(Mode::Pass);
        first.close().await.unwrap();
        third.close().await.unwrap();
        assert_eq!(own.ended(), None);
        second.close().await.unwrap();
        assert!(own.ended().is_some());
    }
}
