//! Listings: enough masters are scanned for keys that each majority has one of them, and all are asked about each key.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use lockkit_core::{
    ListedLock, LockKind, Result,
    spi::{Lister, require_runtime},
};
use tokio::time::timeout;

use crate::{
    list::{Found, KeyScan, Shown},
    redlock::{
        NAME,
        backend::{has_vote, report},
        masters::{Failures, Masters},
    },
};

const OPERATION: &str = "list";

/// A listing of the locks that a majority has.
///
/// A lock is missed if its majority moves meanwhile: it was renewed at a master that had lost it, after that was scanned, and the
/// others of its majority are not scanned.
pub(super) struct RedlockLister {
    masters: Arc<Masters>,
    prefix: String,
    /// The master that is being scanned.
    master: usize,
    keys: KeyScan,
    /// The number of masters with a vote that have been scanned.
    scanned: usize,
    failures: Failures,
    shown: Shown,
}

impl RedlockLister {
    pub(super) fn new(masters: Arc<Masters>, prefix: &str) -> Self {
        Self {
            keys: scan(&masters, prefix),
            masters,
            prefix: prefix.to_owned(),
            master: 0,
            scanned: 0,
            failures: Failures::default(),
            shown: Shown::default(),
        }
    }

    /// Returns the next keys at the present master, and goes on to the next one when it has no more or fails.
    async fn next_keys(&mut self) -> Result<Option<Vec<Found>>> {
        let (rules, all) = (self.masters.rules, &self.masters.all);
        // Any majority has one of so many.
        let enough = all.len() - rules.quorum + 1;
        if self.scanned >= enough {
            return Ok(None);
        }
        let Some(master) = all.get(self.master) else {
            return Err(self.masters.no_quorum(OPERATION, &self.failures));
        };
        let next = async {
            match self.keys.next(&master.link).await? {
                // What it has shown counts. That it has no more does not, if it may have lost some.
                None => has_vote(&self.masters, self.master, OPERATION).await.map(Err),
                Some(found) => Ok(Ok(found)),
            }
        };
        match timeout(rules.patience, next).await {
            Ok(Ok(Ok(found))) => return Ok(Some(found)),
            Ok(Ok(Err(true))) => self.scanned += 1,
            Ok(Ok(Err(false))) => {
                let why = self.masters.quarantine.why_no_vote(self.master);
                self.failures.note_reason(self.master, why);
            }
            Ok(Err(error)) => self.failures.note(self.master, &error),
            Err(_) => {
                let why = format!("no reply within {:?}", rules.patience);
                self.failures.note_reason(self.master, why);
            }
        }
        self.master += 1;
        self.keys = scan(&self.masters, &self.prefix);
        Ok(Some(Vec::new()))
    }

    async fn look(&self, found: Found) -> Result<Option<(Found, ListedLock)>> {
        let state = report(&self.masters, &found.key, OPERATION).await?;
        // Without a namespace, nothing tells a lock of another client from any other string.
        let is_ours = || state.holders.iter().any(|holder| holder.token.get() != 0);
        if state.is_free() || (self.masters.namespace.is_empty() && !is_ours()) {
            return Ok(None);
        }
        let lock = ListedLock::new(found.name.clone(), found.kind, state);
        Ok(Some((found, lock)))
    }
}

fn scan(masters: &Masters, prefix: &str) -> KeyScan {
    KeyScan::new(masters.namespace.clone(), prefix, &[LockKind::Lock])
}

#[async_trait]
impl Lister for RedlockLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        require_runtime(NAME, OPERATION)?;
        let Some(found) = self.next_keys().await? else {
            return Ok(None);
        };
        let unseen = found.into_iter().filter(|found| !self.shown.has(found));
        let looked = try_join_all(unseen.map(|found| self.look(found))).await?;
        Ok(Some(self.shown.add_new(looked)))
    }
}
