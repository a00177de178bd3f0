//! Listings: rows, in the order of their names, a page at a time.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, FencingToken, Holder, ListedLock, LockKind, LockName, LockState, Result,
    spi::{Lister, require_runtime},
};
use sqlx::mysql::MySqlRow;

use crate::{
    Mode, NAME,
    backend::Shared,
    connection::column,
    error::During,
    layout::{Key, Range},
    lease_sql, row_sql,
};

const OPERATION: &str = "list";

/// The number of names on a page.
const PAGE: usize = 16;

/// The most holds of one request, unless they are of one name. Each has some 1.5 KiB at most, and a reply may have [8 MiB](crate::replies).
const MOST_HOLDS: usize = 2_000;

/// A hold is shown some milliseconds after its grant. So a listing begins that much later, to show what was held when it was
/// asked for.
const BEGINS_AFTER: &str = "DO SLEEP(0.1)";

/// A listing.
pub(crate) struct MySqlLister {
    shared: Arc<Shared>,
    mode: Mode,
    prefix: String,
    /// The kinds that are still to be listed, and what is left of the first one.
    kinds: Vec<(LockKind, Range)>,
    has_begun: bool,
}

/// The holds of one name.
struct Held {
    key: Key,
    name: LockName,
    holders: Vec<Holder>,
}

impl MySqlLister {
    pub(crate) fn new(shared: Arc<Shared>, mode: Mode, prefix: &str) -> Self {
        let of_kind = |kind| (kind, Range::of_prefix(&shared.namespace, kind, prefix));
        let kinds = match mode {
            Mode::ForUpdate => vec![of_kind(LockKind::Semaphore), of_kind(LockKind::Lock)],
            Mode::Lease => vec![of_kind(LockKind::Lock)],
        };
        Self {
            shared,
            mode,
            prefix: prefix.to_owned(),
            kinds,
            has_begun: false,
        }
    }

    /// Reads the holds of the next names of this range, and the key after which there may be more.
    async fn read(&mut self, range: &Range) -> Result<(Vec<MySqlRow>, Option<Vec<u8>>)> {
        let mut rows = self.read_holds(range, MOST_HOLDS).await?;
        let keys: sqlx::Result<Vec<_>> = rows.iter().map(key_of).collect();
        let mut keys = keys.during(OPERATION)?;
        if keys.len() < MOST_HOLDS {
            keys.dedup();
            let is_full = keys.len() >= PAGE;
            return Ok((rows, keys.pop().filter(|_| is_full)));
        }
        // The last name may have more holds. It begins the next page, or has a request of its own.
        let begin = keys.iter().position(|key| Some(key) == keys.last()).unwrap_or(0);
        if begin > 0 {
            rows.truncate(begin);
            keys.truncate(begin);
        } else if let Some(key) = keys.last() {
            rows = self.read_holds(&Range::of_key(key), usize::MAX).await?;
        }
        Ok((rows, keys.pop()))
    }

    async fn read_holds(&mut self, range: &Range, most: usize) -> Result<Vec<MySqlRow>> {
        let mut question = match self.mode {
            Mode::ForUpdate => row_sql::page(range, PAGE, most),
            Mode::Lease => lease_sql::page(range, PAGE),
        };
        if self.mode == Mode::ForUpdate && !self.has_begun {
            question = format!("{BEGINS_AFTER}; {question}");
        }
        self.has_begun = true;
        let reply = self.shared.sessions.inspections.read(OPERATION, question).await;
        let reply = self.shared.unless_unmade(OPERATION, reply).await?;
        Ok(reply.map_or_else(Vec::new, |mut reply| reply.take_last()))
    }

    fn hold(&self, row: &MySqlRow) -> sqlx::Result<Holder> {
        let label: Option<Vec<u8>> = column(row, 3)?;
        let label = label.map(|label| String::from_utf8_lossy(&label).into_owned());
        let left = match self.mode {
            Mode::ForUpdate => {
                let seconds: u64 = column(row, 4)?;
                // `NULL` for an account that may not see the session.
                let silent: Option<i64> = column(row, 5)?;
                let silent = silent.and_then(|silent| u64::try_from(silent).ok()).unwrap_or(0);
                Duration::from_secs(seconds.saturating_sub(silent))
            }
            Mode::Lease => Duration::from_micros(column(row, 4)?),
        };
        Ok(Holder::new(FencingToken::new(column(row, 2)?), label, Some(left)))
    }

    /// Returns the number of waiters of each of these names that has any.
    async fn waiters(&self, kind: LockKind, page: &[Held]) -> Result<HashMap<Key, usize>> {
        let shared = &self.shared;
        if page.is_empty() {
            return Ok(HashMap::new());
        }
        let locks = match self.mode {
            Mode::ForUpdate => None,
            Mode::Lease => Some(shared.find_server_locks(OPERATION).await?),
        };
        let waits: HashMap<Vec<u8>, &Key> = page
            .iter()
            .flat_map(|held| {
                let flavour = shared.server.flavour;
                let statements = match locks {
                    None => row_sql::waits(&held.key, flavour, kind),
                    Some(locks) => lease_sql::waits(locks, &held.key, flavour).into(),
                };
                statements.into_iter().map(|sql| (sql.into_bytes(), &held.key))
            })
            .collect();
        let mut waiters = HashMap::new();
        let question = row_sql::count_waits(waits.keys());
        let reply = shared.sessions.inspections.query(OPERATION, question).await?;
        for row in reply.last() {
            let statement: Vec<u8> = column(row, 0).during(OPERATION)?;
            let count: u64 = column(row, 1).during(OPERATION)?;
            if let Some(key) = waits.get(&statement) {
                let count = usize::try_from(count).unwrap_or(usize::MAX);
                *waiters.entry((*key).clone()).or_default() += count;
            }
        }
        Ok(waiters)
    }
}

fn key_of(row: &MySqlRow) -> sqlx::Result<Vec<u8>> {
    column(row, 0)
}

#[async_trait]
impl Lister for MySqlLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        require_runtime(NAME, OPERATION)?;
        let Some((kind, range)) = self.kinds.last().cloned() else {
            return Ok(None);
        };
        let (rows, goes_on_after) = self.read(&range).await?;
        let mut page: Vec<Held> = Vec::new();
        for row in rows {
            let key = Key::found(&key_of(&row).during(OPERATION)?);
            let full_name: Option<Vec<u8>> = column(&row, 1).during(OPERATION)?;
            let token: Option<u64> = column(&row, 2).during(OPERATION)?;
            if token.is_none() {
                continue;
            }
            let holder = self.hold(&row).during(OPERATION)?;
            if let Some(held) = page.last_mut().filter(|held| held.key == key) {
                held.holders.push(holder);
                continue;
            }
            let Some(name) = key.name(&self.shared.namespace, kind, full_name.as_deref()) else {
                let text = String::from_utf8_lossy(key.as_bytes()).into_owned();
                let cause =
                    format!("the row of {text:?} is of no name: somebody else has made or changed it");
                return Err(Error::permanent(NAME, OPERATION, cause));
            };
            if name.as_str().starts_with(&self.prefix) {
                page.push(Held {
                    key,
                    name,
                    holders: vec![holder],
                });
            }
        }
        match goes_on_after {
            Some(last) => {
                if let Some((_, rest)) = self.kinds.last_mut() {
                    rest.goes_on_after(&last);
                }
            }
            None => {
                self.kinds.pop();
            }
        }
        let mut waiters = self.waiters(kind, &page).await?;
        let listed = page.into_iter().map(|held| {
            let waiting = waiters.remove(&held.key).unwrap_or(0);
            ListedLock::new(held.name, kind, LockState::new(held.holders, Some(waiting)))
        });
        Ok(Some(listed.collect()))
    }
}
