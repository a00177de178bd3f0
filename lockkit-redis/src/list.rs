//! Listings: `SCAN` finds the keys, and the inspection script shows what is held there.

use std::{
    collections::{HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use async_trait::async_trait;
use futures_util::future::{try_join, try_join_all};
use lockkit_core::{Error, ListedLock, LockKind, LockName, Result, spi::Lister};
use redis::Value;

use crate::{
    backend::{Shared, state},
    connection::{Connection, ManagedConnection},
    error::{NAME, failed, unexpected},
    layout, script,
};

const OPERATION: &str = "list";

/// The number of keys that one `SCAN` looks at. It takes the server some 20 µs.
const SCANNED: u32 = 128;

/// The number of locks on a page. They are inspected at once, so this bounds for how long the server serves nobody else.
pub(crate) const PAGE: usize = 16;

/// A lock or semaphore by its key.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) key: Vec<u8>,
    pub(crate) name: LockName,
    pub(crate) kind: LockKind,
}

/// The keys at one server of the names with a prefix.
///
/// A `SCAN` returns each key that is there from its begin to its end, perhaps more than once.
pub(crate) struct KeyScan {
    namespace: Arc<str>,
    prefix: String,
    /// The kinds that are still to be looked for. The last one is being looked for.
    kinds: Vec<LockKind>,
    cursor: Vec<u8>,
    /// The server's process. The cursor of one means nothing to another.
    run_id: Option<String>,
    found: VecDeque<Found>,
}

impl KeyScan {
    const BEGIN: &[u8] = b"0";

    pub(crate) fn new(namespace: Arc<str>, prefix: &str, kinds: &[LockKind]) -> Self {
        Self {
            namespace,
            prefix: prefix.to_owned(),
            kinds: kinds.to_vec(),
            cursor: Self::BEGIN.to_vec(),
            run_id: None,
            found: VecDeque::new(),
        }
    }

    /// Returns the next keys, of which there may be none. Returns `None` after the last ones.
    ///
    /// # Errors
    /// If the server cannot tell, or is another one than before.
    pub(crate) async fn next(&mut self, link: &ManagedConnection) -> Result<Option<Vec<Found>>> {
        if self.found.is_empty() {
            let Some(kind) = self.kinds.last().copied() else {
                return Ok(None);
            };
            self.scan(link, kind).await?;
        }
        let many = self.found.len().min(PAGE);
        Ok(Some(self.found.drain(..many).collect()))
    }

    /// Returns the connection that there is now.
    ///
    /// # Errors
    /// If it leads to another server than before, of which neither the cursor nor what was found says anything.
    pub(crate) fn connection(&mut self, link: &ManagedConnection) -> Result<Arc<Connection>> {
        let live = link.current(OPERATION)?;
        let run_id = &live.server().run_id;
        if self.run_id.get_or_insert_with(|| run_id.clone()) != run_id {
            let cause = "another server has taken the place of the one that was being listed";
            return Err(Error::transient(NAME, OPERATION, cause));
        }
        Ok(live)
    }

    async fn scan(&mut self, link: &ManagedConnection, kind: LockKind) -> Result<()> {
        let live = self.connection(link)?;
        let mut scan = redis::cmd("SCAN");
        scan.arg(&self.cursor)
            .arg("MATCH")
            .arg(layout::pattern(&self.namespace, &self.prefix, kind))
            .arg("COUNT")
            .arg(SCANNED)
            .arg("TYPE")
            .arg("string");
        let scanned = async {
            let reply = link.send(&live, &scan).await;
            reply.map_err(|error| failed(OPERATION, error))
        };
        // Also where nothing is found.
        let (reply, ()) = try_join(scanned, link.check_master(&live, OPERATION)).await?;
        let (cursor, keys) = parts(&reply).ok_or_else(|| unexpected(OPERATION, &reply))?;
        self.cursor = cursor.to_vec();
        for key in keys {
            let Value::BulkString(key) = key else {
                return Err(unexpected(OPERATION, &reply));
            };
            let name = layout::name(&self.namespace, key, kind);
            let meant = name.filter(|name| name.as_str().starts_with(&self.prefix));
            self.found.extend(meant.map(|name| Found {
                key: key.clone(),
                name,
                kind,
            }));
        }
        if self.cursor == Self::BEGIN {
            self.kinds.pop();
        }
        Ok(())
    }
}

/// Returns the next cursor, and the keys.
fn parts(reply: &Value) -> Option<(&[u8], &[Value])> {
    let Value::Array(parts) = reply else { return None };
    let [Value::BulkString(cursor), Value::Array(keys)] = &**parts else {
        return None;
    };
    Some((cursor, keys))
}

/// The locks that have been shown, by two hashes with random keys: 16 bytes for each, and nobody can have one lock taken for
/// another.
#[derive(Default)]
pub(crate) struct Shown {
    hashers: [RandomState; 2],
    hashes: HashSet<[u64; 2]>,
}

impl Shown {
    pub(crate) fn has(&self, found: &Found) -> bool {
        self.hashes.contains(&self.hash(found))
    }

    /// Adds the locks of a page, and returns those that are new. A key may be twice on one page.
    pub(crate) fn add_new(&mut self, looked: Vec<Option<(Found, ListedLock)>>) -> Vec<ListedLock> {
        let new = looked.into_iter().flatten().filter_map(|(found, lock)| {
            let hash = self.hash(&found);
            self.hashes.insert(hash).then_some(lock)
        });
        new.collect()
    }

    fn hash(&self, found: &Found) -> [u64; 2] {
        self.hashers.each_ref().map(|hasher| hasher.hash_one(&found.key))
    }
}

/// A listing of one master.
pub(crate) struct RedisLister {
    shared: Arc<Shared>,
    keys: KeyScan,
    shown: Shown,
}

impl RedisLister {
    pub(crate) fn new(shared: Arc<Shared>, prefix: &str) -> Self {
        let kinds = [LockKind::Semaphore, LockKind::Lock];
        Self {
            keys: KeyScan::new(shared.namespace.clone(), prefix, &kinds),
            shared,
            shown: Shown::default(),
        }
    }

    async fn look(&self, live: &Connection, found: Found) -> Result<Option<(Found, ListedLock)>> {
        let call = script::INSPECT.call(&found.key);
        let reply = self.shared.connection.run_on(live, OPERATION, call).await?;
        let unreadable = || {
            let cause = format!(
                "{:?} cannot be read: the server answered {reply:?}",
                found.name.as_str()
            );
            Error::permanent(NAME, OPERATION, cause)
        };
        let state = state(&reply).ok_or_else(unreadable)?;
        // Without a namespace, nothing tells a lock of another client from any other string.
        let is_ours = || state.holders.iter().any(|holder| holder.token.get() != 0);
        if state.is_free() || (self.shared.namespace.is_empty() && !is_ours()) {
            return Ok(None);
        }
        let lock = ListedLock::new(found.name.clone(), found.kind, state);
        Ok(Some((found, lock)))
    }
}

#[async_trait]
impl Lister for RedisLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        let connection = &self.shared.connection;
        let Some(found) = self.keys.next(connection).await? else {
            return Ok(None);
        };
        // One that is no longer there has ended, at the server where it was found.
        let live = self.keys.connection(connection)?;
        let unseen = found.into_iter().filter(|found| !self.shown.has(found));
        let looks = try_join_all(unseen.map(|found| self.look(&live, found)));
        let (looked, ()) = try_join(looks, connection.check_master(&live, OPERATION)).await?;
        Ok(Some(self.shown.add_new(looked)))
    }
}
