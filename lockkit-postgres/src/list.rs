//! Listings: holds that are shown, in the order of their names, a page at a time.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{Error, Holder, ListedLock, LockKind, LockName, LockState, Result, spi::Lister};
use tokio::time::Instant;
use tokio_postgres::Row;

use crate::{
    NAME,
    backend::{Shared, require_runtime},
    connection::{Parameter, Query},
    error::During,
    inspect::{self, SHOWN_SOON},
    sql,
};

const OPERATION: &str = "list";

/// The number of names on a page.
const PAGE: i32 = 16;

/// A listing waits for so long until what was held when it was asked for is shown. It is longer only where a client stands still, or
/// its hold cannot be shown.
const SHOWN_WITHIN: Duration = Duration::from_secs(1);

/// A session by its process and start, and the time of its last change; `None` while it is at a statement. Of a session of another role,
/// neither time is told.
type NotShown = HashMap<(i32, Option<i64>), Option<i64>>;

/// A listing.
pub(crate) struct PostgresLister {
    shared: Arc<Shared>,
    prefix: Vec<u8>,
    /// The kinds that are still to be listed, and the name up to which the first of them was.
    kinds: Vec<(LockKind, Vec<u8>)>,
    has_begun: bool,
}

/// The holds of one name.
struct Held {
    name: Vec<u8>,
    holders: Vec<Holder>,
    waiters: usize,
}

impl PostgresLister {
    pub(crate) fn new(shared: Arc<Shared>, prefix: &str) -> Self {
        Self {
            shared,
            prefix: prefix.as_bytes().to_vec(),
            kinds: vec![(LockKind::Semaphore, Vec::new()), (LockKind::Lock, Vec::new())],
            has_begun: false,
        }
    }

    /// Waits until all sessions show what they hold that had something when it was asked for. Returns false if there is no table in which
    /// anything could be shown.
    ///
    /// # Errors
    /// Also if a session of another role does not show it: nobody can tell whether it still is the same hold.
    async fn wait_until_shown(&self) -> Result<bool> {
        let deadline = Instant::now() + SHOWN_WITHIN;
        let Some(mut hidden) = self.not_shown(Duration::ZERO).await? else {
            return Ok(false);
        };
        while !hidden.is_empty() && Instant::now() < deadline {
            let still = self.not_shown(SHOWN_SOON).await?.unwrap_or_default();
            hidden.retain(|session, changed| match (still.get(session), *changed) {
                (None, _) => false,
                // It may be about to show it.
                (Some(None), _) => true,
                (Some(now), None) => {
                    *changed = *now;
                    true
                }
                // It has done something else since, so that it holds anew or does not show it.
                (Some(now), before) => *now == before,
            });
        }
        if let Some((process, _)) = hidden.keys().find(|(_, started)| started.is_none()) {
            let why = format!(
                "a session of another role has a lock and does not show which (process {process}): ask again, or as a role with \
                 pg_read_all_stats"
            );
            return Err(Error::transient(NAME, OPERATION, why));
        }
        Ok(true)
    }

    async fn not_shown(&self, pause: Duration) -> Result<Option<NotShown>> {
        let ask = Query::prepared(sql::NOT_SHOWN, Vec::new());
        let inspections = &self.shared.sessions.inspections;
        let Some(rows) = inspections.look(pause, OPERATION, ask).await? else {
            return Ok(None);
        };
        let sessions = rows
            .iter()
            .map(|row| Ok(((row.try_get(0)?, row.try_get(1)?), row.try_get(2)?)));
        let sessions: std::result::Result<_, tokio_postgres::Error> = sessions.collect();
        sessions.during(OPERATION).map(Some)
    }

    async fn read(&self, kind: LockKind, after: &[u8]) -> Result<Vec<Row>> {
        let length = i32::try_from(self.prefix.len()).unwrap_or(i32::MAX);
        let parameters = vec![
            Parameter::Text(Some(self.shared.namespace.clone())),
            Parameter::Int(i32::from(kind == LockKind::Semaphore)),
            Parameter::Bytes(after.to_vec()),
            Parameter::Int(length),
            Parameter::Bytes(self.prefix.clone()),
            Parameter::Int(PAGE),
        ];
        let ask = vec![Query::prepared(sql::PAGE, parameters)];
        let mut reply = self.shared.sessions.inspections.run(OPERATION, ask).await?;
        Ok(reply.pop().unwrap_or_default())
    }
}

#[async_trait]
impl Lister for PostgresLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        require_runtime(OPERATION)?;
        let Some((kind, after)) = self.kinds.last().cloned() else {
            return Ok(None);
        };
        if !self.has_begun {
            if !self.wait_until_shown().await? {
                self.kinds.clear();
                return Ok(None);
            }
            self.has_begun = true;
        }
        let rows = self.read(kind, &after).await?;
        let mut page: Vec<Held> = Vec::new();
        for row in &rows {
            let name: Vec<u8> = row.try_get(0).during(OPERATION)?;
            let (token, label) = (
                row.try_get(1).during(OPERATION)?,
                row.try_get(2).during(OPERATION)?,
            );
            let waiters: i64 = row.try_get(6).during(OPERATION)?;
            let holder = inspect::holder(token, label, row, 3).during(OPERATION)?;
            match page.last_mut().filter(|held| held.name == name) {
                Some(held) => held.holders.push(holder),
                None => page.push(Held {
                    name,
                    holders: vec![holder],
                    waiters: usize::try_from(waiters).unwrap_or(0),
                }),
            }
        }
        match page.last() {
            Some(last) if page.len() >= PAGE.unsigned_abs() as usize => {
                if let Some((_, after)) = self.kinds.last_mut() {
                    after.clone_from(&last.name);
                }
            }
            _ => {
                self.kinds.pop();
            }
        }
        let listed = page.into_iter().map(|held| {
            let name = String::from_utf8(held.name)
                .ok()
                .and_then(|name| LockName::new(name).ok());
            let name = name.ok_or_else(|| {
                let cause = "a row of lockkit.holder has no name: somebody else has made or changed it";
                Error::permanent(NAME, OPERATION, cause)
            })?;
            let state = LockState::new(held.holders, Some(held.waiters));
            Ok(ListedLock::new(name, kind, state))
        });
        listed.collect::<Result<_>>().map(Some)
    }
}
