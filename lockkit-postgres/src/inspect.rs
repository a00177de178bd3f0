//! Inspections, which read who holds without taking part, and the end of holds by force.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use lockkit_core::{Error, FencingToken, Holder, LockKind, LockName, LockState, Result};
use tokio::time::Instant;
use tokio_postgres::Row;

use crate::{
    NAME,
    backend::Shared,
    config,
    connection::{Parameter, Query},
    error::{During, Failure},
    layout::Keys,
    sql,
};

/// A hold is shown some milliseconds after its grant. So long is waited for one of lockkit's: for longer, its client stands still, or it
/// cannot be shown.
const SHOWN_WITHIN: Duration = Duration::from_secs(1);
/// The time after which one that is not shown is looked at again.
pub(crate) const SHOWN_SOON: Duration = Duration::from_millis(10);

/// The holders and waiters of a lock or semaphore.
struct Found {
    state: LockState,
    /// True if each holder of lockkit's is shown.
    is_complete: bool,
}

impl Shared {
    /// Reads who holds. A holder that is no lockkit's has the token 0 and its `application_name`, one that is not shown the token 0 alone.
    pub(crate) async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let keys = Keys::new(&self.namespace, kind, name);
        self.seen("inspect", &keys, kind)
            .await
            .map(|(_, found)| found.state)
    }

    /// Returns the keys that holders may have, and who holds.
    async fn seen(
        &self,
        operation: &'static str,
        keys: &Keys,
        kind: LockKind,
    ) -> Result<(Arc<[i64]>, Found)> {
        let mut held = self.held_keys(operation, keys, kind).await?;
        loop {
            let found = self.shown(operation, keys, &held).await?;
            let now = self.held_keys(operation, keys, kind).await?;
            // Otherwise it has another size since, and permits that were not looked at.
            if now.len() == held.len() {
                return Ok((held, found));
            }
            held = now;
        }
    }

    /// Ends the session that holds with this token. One request finds and ends it: by the next, its client may hold another lock in
    /// it.
    pub(crate) async fn end_by_force(
        &self,
        name: &LockName,
        kind: LockKind,
        token: FencingToken,
    ) -> Result<bool> {
        let keys = Keys::new(&self.namespace, kind, name);
        let (held, found) = self.seen("revoke", &keys, kind).await?;
        let Ok(number) = i64::try_from(token.get()) else {
            return Ok(false);
        };
        if found.state.holders.iter().all(|holder| holder.token != token) {
            if found.is_complete {
                return Ok(false);
            }
            let why = "a holder does not show which token it has; ask again, or end its session with pg_terminate_backend";
            return Err(Error::transient(NAME, "revoke", why));
        }
        let parameters = vec![Parameter::Bigints(held), Parameter::Bigint(number)];
        let end = vec![Query::once(sql::TERMINATE_HOLDER, parameters)];
        // Once: the second reply would be that there is no such hold.
        let reply = self.sessions.inspections.run_once("revoke", end).await?;
        let ended = reply.first().and_then(|rows| rows.first());
        let ended = ended.map(|row| row.try_get(0)).transpose().during("revoke")?;
        Ok(ended.unwrap_or(false))
    }

    /// Returns the keys that holders may have.
    async fn held_keys(&self, operation: &'static str, keys: &Keys, kind: LockKind) -> Result<Arc<[i64]>> {
        if kind == LockKind::Lock {
            return Ok(keys.held(0));
        }
        let ask = Query::prepared(sql::SIZE, vec![Parameter::Bigint(keys.queue)]);
        let inspections = &self.sessions.inspections;
        let rows = inspections.look(Duration::ZERO, operation, ask).await?;
        let size = rows.as_ref().and_then(|rows| rows.first());
        let size: Option<i32> = size.map(|row| row.try_get(0)).transpose().during(operation)?;
        Ok(keys.held(size.and_then(|size| u32::try_from(size).ok()).unwrap_or(0)))
    }

    async fn shown(&self, operation: &'static str, keys: &Keys, held: &Arc<[i64]>) -> Result<Found> {
        let all: Arc<[i64]> = held
            .iter()
            .copied()
            .chain((!held.contains(&keys.queue)).then_some(keys.queue))
            .collect();
        let (deadline, mut is_first) = (Instant::now() + SHOWN_WITHIN, true);
        loop {
            let pause = if is_first { Duration::ZERO } else { SHOWN_SOON };
            let ask = |statement| Query::prepared(statement, vec![Parameter::Bigints(all.clone())]);
            let inspections = &self.sessions.inspections;
            let rows = match inspections.look(pause, operation, ask(sql::INSPECT)).await? {
                Some(rows) => rows,
                // Other programs take part without them.
                None => inspections
                    .run(operation, vec![ask(sql::INSPECT_WITHOUT_TABLES)])
                    .await?
                    .pop()
                    .unwrap_or_default(),
            };
            let found = found(&rows, held).map_err(Failure::from).during(operation)?;
            is_first = false;
            if found.is_complete || Instant::now() >= deadline {
                return Ok(found);
            }
        }
    }
}

fn found(rows: &[Row], held: &[i64]) -> std::result::Result<Found, tokio_postgres::Error> {
    let (mut holders, mut waiters, mut is_complete) = (Vec::new(), 0, true);
    for row in rows {
        let key: i64 = row.try_get(0)?;
        let is_granted: bool = row.try_get(1)?;
        if !is_granted || !held.contains(&key) {
            // Also the head of a semaphore's queue, which has the key of the queue.
            waiters += 1;
            continue;
        }
        let token: Option<i64> = row.try_get(2)?;
        let program: Option<String> = row.try_get(7)?;
        let program = program.filter(|program| program != config::APPLICATION_NAME);
        is_complete &= token.is_some() || program.is_some();
        let label: Option<String> = match token {
            Some(_) => row.try_get(3)?,
            None => program,
        };
        holders.push(holder(token, label, row, 4)?);
    }
    Ok(Found {
        state: LockState::new(holders, Some(waiters)),
        is_complete,
    })
}

/// Returns a holder whose lease in ms, time of grant in µs, and ms of silence are in the columns from this one on.
pub(crate) fn holder(
    token: Option<i64>,
    label: Option<String>,
    row: &Row,
    column: usize,
) -> std::result::Result<Holder, tokio_postgres::Error> {
    let lease: Option<i32> = row.try_get(column)?;
    let since: Option<i64> = row.try_get(column + 1)?;
    // `NULL` while it is at a statement, and for a role that may not see the session.
    let silent: Option<i64> = row.try_get(column + 2)?;
    let silent = u64::try_from(silent.unwrap_or(0)).unwrap_or(0);
    let left =
        lease.map(|lease| Duration::from_millis(u64::try_from(lease).unwrap_or(0).saturating_sub(silent)));
    let since = since.map(|since| SystemTime::UNIX_EPOCH + Duration::from_micros(since.unsigned_abs()));
    let token = FencingToken::new(u64::try_from(token.unwrap_or(0)).unwrap_or(0));
    Ok(Holder::new(token, label, left).since(since))
}
