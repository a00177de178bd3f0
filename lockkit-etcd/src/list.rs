//! Listings: the keys of the contenders in the order of their names, by plain reads of some hundred.

use std::sync::Arc;

use async_trait::async_trait;
use lockkit_core::{ListedLock, LockKind, LockName, Result, spi::Lister};

use crate::{
    backend::Shared,
    error::{self, Failure},
    layout::{after, prefix},
    wire::{Header, KeyValue, RangeRequest},
};

/// The number of keys that are read at once.
const PAGE: i64 = 256;

/// A listing. It knows where to go on, and little else.
///
/// Each page is read at the revision of its moment, so that no compaction is in the way, and each lock at one revision.
pub(crate) struct EtcdLister {
    shared: Arc<Shared>,
    prefix: String,
    kinds: Vec<LockKind>,
    /// The kind that is listed, and the key to go on from.
    at: Option<(LockKind, Vec<u8>)>,
    /// The cluster and the revision of the page before.
    before: Option<(u64, i64)>,
}

impl EtcdLister {
    pub(crate) fn new(shared: Arc<Shared>, prefix: &str) -> Self {
        Self {
            shared,
            prefix: prefix.to_owned(),
            kinds: vec![LockKind::Semaphore, LockKind::Lock],
            at: None,
            before: None,
        }
    }

    async fn next_page(&mut self) -> error::Result<Option<Vec<ListedLock>>> {
        self.shared.members.logged_in().await?;
        let layout = self.shared.layout();
        let (kind, from) = match self.at.take() {
            Some(at) => at,
            None => match self.kinds.pop() {
                Some(kind) => (kind, prefix(&layout.locks(kind)).0),
                None => return Ok(None),
            },
        };
        let request = RangeRequest {
            key: if from.is_empty() { vec![0] } else { from },
            range_end: prefix(&layout.locks(kind)).1,
            limit: PAGE,
            ..RangeRequest::default()
        };
        let answer = self.shared.members.call(request).await?;
        self.goes_on(answer.header)?;
        let mut queues = self.by_name(answer.kvs, kind);
        if answer.more && queues.is_empty() {
            let reason = "the servers say that there is more, and do not show it";
            return Err(Failure::Unknown(reason.to_owned()));
        }
        if answer.more
            && let Some((_, queue, seen)) = queues.last_mut()
        {
            // Some of its keys may be on the next page.
            if !queue.is_empty() {
                *seen = self.shared.read_queue(queue).await?;
            }
            let last = seen.last().map(|kv| kv.key.clone()).unwrap_or_default();
            let next = if queue.is_empty() {
                [&last[..], &[0]].concat()
            } else {
                after(queue.as_bytes())
            };
            self.at = Some((kind, next));
        }
        let mut names = Vec::new();
        let mut contents = Vec::new();
        for (name, queue, seen) in queues {
            if let Some(name) = name.filter(|name| name.as_str().starts_with(&self.prefix)) {
                names.push(name);
                contents.push((queue, kind, seen));
            }
        }
        let states = self.shared.states(contents).await?;
        let listed = names.into_iter().zip(states);
        let held = listed.filter(|(_, state)| !state.is_free());
        let held = held.map(|(name, state)| ListedLock::new(name, kind, state));
        Ok(Some(held.collect()))
    }

    /// Checks that a page is of the cluster that the one before was of, and not of an earlier time.
    fn goes_on(&mut self, header: Option<Header>) -> error::Result<()> {
        let its = header.map_or((0, 0), |header| (header.cluster_id, header.revision));
        let (cluster, revision) = self.before.replace(its).unwrap_or(its);
        if its.0 == cluster && its.1 >= revision {
            return Ok(());
        }
        let reason = "servers with other data have taken the place of those that were being listed";
        Err(Failure::Unknown(reason.to_owned()))
    }

    /// Returns the keys by the name that they are for, with its prefix. What is no lock's has no name, and an empty prefix.
    fn by_name(&self, kvs: Vec<KeyValue>, kind: LockKind) -> Vec<(Option<LockName>, String, Vec<KeyValue>)> {
        let mut queues: Vec<(Option<LockName>, String, Vec<KeyValue>)> = Vec::new();
        for kv in kvs {
            match queues.last_mut() {
                Some((Some(_), queue, seen)) if kv.key.starts_with(queue.as_bytes()) => seen.push(kv),
                _ => {
                    let (name, queue) = self.shared.layout().name(&kv.key, kind).unzip();
                    queues.push((name, queue.unwrap_or_default(), vec![kv]));
                }
            }
        }
        queues
    }
}

#[async_trait]
impl Lister for EtcdLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        let page = self.next_page().await;
        page.map_err(|failure| self.shared.error("list", failure))
    }
}
