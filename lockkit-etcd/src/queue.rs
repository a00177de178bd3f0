//! The recipe: a queue of keys, in the order of the revisions that made them.
//!
//! Each contender makes a key with the lease of its session under the lock's prefix. It holds the lock once no key in conflict was made
//! before its own. Everyone else watches the nearest of those before it, so that a release wakes one waiter and not all. That is what
//! etcd's own `concurrency` package and `etcdctl lock` do, with these differences:
//!
//! - One transaction makes the key and looks at the others.
//! - Each entry has a key of its own: a name that came back would be taken for the one before.
//! - A waiter that had one other before it is granted when that one goes, without another look. Nobody can have come in before it, and
//!   the watch of its own key would have told first if that had gone.
//! - The fencing token is made of the revision that made the own key, not that of the grant, which could be above that of a later holder.
//! - Nothing is granted unless the lease is proven to last.

use std::sync::Arc;

use lockkit_core::spi::{
    Grant, Mode,
    queue::{self, Before, Contender, Turn, is_busy, turn},
};

use crate::{
    claim::EtcdClaim,
    error::{Failure, Result},
    fence,
    layout::{contender, entry, lost_lease, prefix},
    members::Members,
    own_key::{OwnKey, Predecessors, made_by, put_back},
    session::Session,
    wire::{Compare, KeyValue, PutRequest, RangeRequest, Request, SortOrder, SortTarget, TxnRequest},
};

/// The number of looks of one attempt. It looks again if the queue or the key has changed meanwhile.
const MAX_LOOKS: usize = 16;
/// An exclusive contender needs to see its own key, the one before, and whether there is another.
const NEAREST: i64 = 3;

impl EtcdClaim {
    /// Takes a place in the queue, or goes on from the one that the claim has.
    pub(crate) async fn queue_up(&mut self, waits: bool) -> Result<Option<Grant>> {
        if self.own.as_ref().is_some_and(OwnKey::is_next) {
            return self.grant().await;
        }
        for _ in 0..MAX_LOOKS {
            if self.own.is_none() {
                self.shared.members.logged_in().await?;
                let session = self.shared.session(self.request.ttl).await?;
                // An exclusive newcomer makes its key only if nobody else has one. The others have to look first.
                if !waits && self.request.mode != Mode::Exclusive {
                    let seen = session.range(self.look(None)).await?;
                    let is_taken = self.is_busy(&seen);
                    if is_taken && !has_lost_keys(&self.shared.members, &self.queue, &seen).await {
                        return Ok(None);
                    }
                }
                self.ask(session, waits);
            }
            let Some(own) = &mut self.own else { continue };
            let mut seen = None;
            match own.answer().await {
                Ok(Some(answer)) => match made_by(&answer) {
                    Some(revision) => {
                        own.made(revision);
                        let looks = answer.responses.into_iter().filter_map(|answer| answer.range);
                        let mut looks = looks.map(|look| look.kvs);
                        seen = looks.next();
                        if let Some(found) = looks.next() {
                            own.set_bases(fence::bases(&found)?);
                        }
                    }
                    None => {
                        let seen = answer.responses.into_iter().find_map(|answer| answer.range);
                        let seen = seen.map(|seen| seen.kvs).unwrap_or_default();
                        self.clear();
                        let is_taken = !waits && self.is_busy(&seen);
                        if is_taken && !has_lost_keys(&self.shared.members, &self.queue, &seen).await {
                            return Ok(None);
                        }
                        // Something else has kept the key from being made.
                        continue;
                    }
                },
                Ok(None) => {
                    if !own.settle().await? {
                        self.clear();
                        continue;
                    }
                }
                // Somebody has revoked the lease. The next look has another one.
                Err(Failure::NoLease) => {
                    own.session.has_no_lease();
                    self.clear();
                    continue;
                }
                Err(failure) => {
                    if failure.is_refusal() {
                        self.clear();
                    }
                    return Err(failure);
                }
            }
            if let Some(granted) = self.take_turn(seen, waits).await? {
                return Ok(granted);
            }
        }
        Err(self.unstable())
    }

    /// Looks whose turn it is, if that was not `seen` already. Returns `None` if something has changed meanwhile.
    async fn take_turn(&mut self, seen: Option<Vec<KeyValue>>, waits: bool) -> Result<Option<Option<Grant>>> {
        let mode = self.request.mode;
        let Some(own) = &self.own else { return Ok(None) };
        let Some(revision) = own.revision() else {
            return Ok(None);
        };
        let (session, key) = (own.session.clone(), own.key.clone());
        let seen = match seen {
            Some(seen) => seen,
            None => session.range(self.look(Some(revision))).await?,
        };
        if has_lost_keys(&self.shared.members, &self.queue, &seen).await {
            return Ok(None);
        }
        let contenders = self.contenders(&seen);
        // One that was made by another revision is another one's.
        let is_there = contenders
            .iter()
            .any(|one| one.order == revision && one.name == key);
        match turn(&contenders, &key.as_slice(), mode) {
            _ if !is_there => self.clear(),
            Turn::Gone => self.clear(),
            Turn::Mine => return self.grant().await.map(Some),
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
                return Ok(Some(None));
            }
            Turn::After(before) => {
                let revisions = before.watch.iter().map(|key| {
                    let one = contenders.iter().find(|one| one.name == *key);
                    one.map_or(0, |one| one.order)
                });
                let revisions = revisions.collect();
                if self.watch(before, revisions).await? {
                    return Ok(Some(None));
                }
            }
        }
        Ok(None)
    }

    async fn grant(&mut self) -> Result<Option<Grant>> {
        let ttl = self.request.ttl;
        let own = self.own.as_mut().ok_or(Failure::NotProven)?;
        if !own.has_bases() {
            own.set_bases(self.shared.bases().await?);
        }
        own.grant(ttl).await.map(Some)
    }

    /// Asks for a key.
    fn ask(&mut self, session: Arc<Session>, waits: bool) {
        let (owner, n) = (self.request.owner, self.asked);
        self.asked += 1;
        let key = entry(&self.queue, session.lease, owner, n, self.request.mode);
        let gone = self.shared.layout().gone(owner, n);
        let mut compare = vec![
            Compare::created(key.as_str(), 0),
            Compare::created(gone.as_str(), 0),
        ];
        let mut failure = Vec::new();
        if !waits && self.request.mode == Mode::Exclusive {
            compare.push(Compare::nothing_in(prefix(&self.queue)));
            failure.push(Request::Range(self.look(None)).into());
        }
        let put = PutRequest {
            key: key.as_str().into(),
            value: self.request.label.as_deref().unwrap_or_default().into(),
            lease: session.lease,
            ..PutRequest::default()
        };
        let request = TxnRequest {
            compare,
            success: vec![
                Request::Put(put).into(),
                Request::Range(self.look(None)).into(),
                Request::Range(fence::look(&self.shared)).into(),
            ],
            failure,
        };
        self.own = Some(OwnKey::ask(session, key.into(), gone, self.request.ttl, request));
    }

    /// Returns the request for what the claim has to see of the queue: of those up to the key of this revision, if there is one, else of
    /// all.
    fn look(&self, revision: Option<i64>) -> RangeRequest {
        let (key, range_end) = prefix(&self.queue);
        RangeRequest {
            key,
            range_end,
            limit: match self.request.mode {
                Mode::Exclusive => NEAREST,
                Mode::Shared | Mode::Permits(_) => 0,
            },
            sort_order: SortOrder::Descend.into(),
            sort_target: SortTarget::Create.into(),
            keys_only: true,
            max_create_revision: revision.unwrap_or(0),
        }
    }

    fn contenders<'a>(&self, seen: &'a [KeyValue]) -> Vec<Contender<&'a [u8]>> {
        let kind = self.request.mode.kind();
        let contenders = seen.iter().filter_map(|kv| contender(&self.queue, kind, kv));
        contenders.collect()
    }

    fn is_busy(&self, seen: &[KeyValue]) -> bool {
        is_busy(&self.contenders(seen), self.request.mode)
    }

    /// Begins to watch those before the own key, which these revisions have made, and the own key. Returns `false` if one of them has
    /// gone meanwhile.
    async fn watch(&mut self, before: Before<&[u8]>, revisions: Vec<i64>) -> Result<bool> {
        let queue::Before { watch, one_to_go, .. } = before;
        let Some(own) = &mut self.own else {
            return Ok(false);
        };
        if let Some(waits_for) = own.predecessors()
            && waits_for.keys == watch
            && waits_for.one_to_go == one_to_go
            && waits_for.are_quiet()
            && own.quiet_watch().is_some()
        {
            own.wait()?;
            return Ok(true);
        }
        let session = own.session.clone();
        own.ensure_watch();
        let watches: Vec<_> = watch.iter().map(|key| session.watcher.deletion(key)).collect();
        for watch in &watches {
            watch.confirmed().await?;
        }
        own.ensure_watch().confirmed().await?;
        // What went before the watches began is not told.
        let mut keys = watch;
        keys.push(&own.key);
        let mut found = session.read(&keys).await?;
        keys.pop();
        let keys = keys.into_iter().map(<[u8]>::to_vec).collect();
        let expected = revisions.into_iter().map(Some).chain([own.revision()]);
        let are_there = found
            .iter()
            .map(|kv| kv.as_ref().map(|kv| kv.create_revision))
            .eq(expected);
        if !are_there {
            return Ok(false);
        }
        if let Some(kv) = found.pop().flatten()
            && !own.keep_on_lease(kv).await?
        {
            return Ok(false);
        }
        own.wait_for(Predecessors {
            keys,
            watches,
            one_to_go,
        });
        own.wait()?;
        Ok(true)
    }
}

/// Sees to the keys that somebody has taken off their leases: those of clients that are gone would bar the name for ever. Returns `true` if it
/// has done so for one, so that it is to be looked again.
async fn has_lost_keys(members: &Members, queue: &str, seen: &[KeyValue]) -> bool {
    let mut has = false;
    for kv in seen {
        let Some(lease) = lost_lease(queue, kv) else {
            continue;
        };
        match put_back(members, kv.clone(), lease).await {
            Ok(()) => has = true,
            Err(error) => tracing::debug!(%error, "a key without its lease stays without it"),
        }
    }
    has
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit_core::{
        LockName,
        spi::{Backend as _, ClaimRequest, OwnerId},
    };

    use super::*;
    use crate::{
        EtcdBackend, EtcdConfig,
        rogue::{Answer, serve},
        wire::{LeaseResponse, Nothing},
    };

    /// A lock is taken if the servers show who has it, and not because a key was not made.
    #[tokio::test]
    async fn a_key_that_is_not_made_is_not_the_word_taken() {
        let lease = LeaseResponse {
            header: None,
            id: 7,
            ttl: 20,
        };
        // Nobody is there, and no transaction succeeds.
        let host = serve(move |request| async move {
            if request.uri().path().ends_with("LeaseGrant") {
                Answer::of(&lease)
            } else {
                Answer::of(&Nothing {})
            }
        });
        let backend = EtcdBackend::connect(EtcdConfig::new(host.await)).await.unwrap();
        for mode in [Mode::Exclusive, Mode::Shared] {
            let name = LockName::new("a").unwrap();
            let request = ClaimRequest::new(name, mode, Duration::from_secs(20), OwnerId::new(9));
            let mut claim = backend.claim(&request).await.unwrap();
            let tried = claim.attempt(Duration::ZERO).await;
            assert!(tried.is_err(), "{mode:?}: {tried:?}");
        }
    }
}
