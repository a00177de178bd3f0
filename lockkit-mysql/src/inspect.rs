//! Inspections, which read who holds without taking part, and revocations.

use std::time::Duration;

use lockkit_core::{FencingToken, Holder, LockKind, LockName, LockState, Result, spi::Lease};
use sqlx::mysql::MySqlRow;
use tokio::time::Instant;

use crate::{
    backend::Shared,
    connection::{Reply, column},
    control::KillOutcome,
    error::During,
    layout::Key,
    lease_sql, row_sql, server,
};

/// A hold is shown some milliseconds after its grant. A lock without a hold after so many reads is free.
const READS: usize = 10;
const BETWEEN_READS: &str = "DO SLEEP(0.01)";

/// A hold as it is shown.
struct Shown {
    token: u64,
    label: Option<Vec<u8>>,
    left: Duration,
}

impl Shared {
    /// Reads who holds a row lock.
    pub(crate) async fn inspect_rows(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        Ok(state(self.shown(name, kind, "inspect").await?))
    }

    /// Kills the session that holds with this token. One request finds and kills it: by the next, its client may hold another lock
    /// in it.
    pub(crate) async fn revoke_row(&self, name: &LockName, kind: LockKind, token: u64) -> Result<bool> {
        let (shown, _) = self.shown(name, kind, "revoke").await?;
        if shown.iter().all(|shown| shown.token != token) {
            return Ok(false);
        }
        let kill = row_sql::kill_holder(&Key::new(&self.namespace, kind, name), token);
        let killed = self.sessions.inspections.kill_matching("revoke", kill).await?;
        Ok(killed == KillOutcome::Killed)
    }

    /// Returns the holds of a name, and the number of its waiters.
    async fn shown(
        &self,
        name: &LockName,
        kind: LockKind,
        operation: &'static str,
    ) -> Result<(Vec<Shown>, usize)> {
        let key = Key::new(&self.namespace, kind, name);
        let question = row_sql::holders(&key, self.server.flavour, kind);
        let control = &self.sessions.inspections;
        let mut question_now = question.clone();
        let mut reads = 1;
        loop {
            let reply = control.read(operation, question_now).await;
            let Some(reply) = self.unless_unmade(operation, reply).await? else {
                return Ok((Vec::new(), 0));
            };
            let found = read(&reply, shown_row).during(operation)?;
            if !found.0.is_empty() || reads == READS {
                return Ok(found);
            }
            reads += 1;
            question_now = format!("{BETWEEN_READS}; {question}");
        }
    }

    /// Reads who holds a lease.
    pub(crate) async fn inspect_lease(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let key = Key::new(&self.namespace, kind, name);
        let locks = self.find_server_locks("inspect").await?;
        let question = lease_sql::holder(locks, &key, self.server.flavour);
        let reply = self.sessions.control.read("inspect", question).await;
        Ok(state(match self.unless_unmade("inspect", reply).await? {
            Some(reply) => read(&reply, lease_row).during("inspect")?,
            None => (Vec::new(), 0),
        }))
    }

    /// Asks the holder of the lease with this token to give it up. Its next renewal tells it.
    pub(crate) async fn ask_lease_back(
        &self,
        name: &LockName,
        kind: LockKind,
        token: u64,
    ) -> Result<Option<Lease>> {
        let key = Key::new(&self.namespace, kind, name);
        let control = &self.sessions.control;
        let since = Instant::now();
        let reply = control.query("revoke", lease_sql::ask_back(&key, token)).await;
        let Some(reply) = self.unless_unmade("revoke", reply).await? else {
            return Ok(None);
        };
        let Some(row) = reply.last().first() else {
            // It may be held, and not have been written.
            if server::says_read_only(&control.query("revoke", row_sql::proof()).await?) {
                return Err(server::read_only("revoke", "read_only"));
            }
            return Ok(None);
        };
        let left = Duration::from_micros(column(row, 0).during("revoke")?);
        Ok(Some(Lease::new(since, Some(left))))
    }

    /// Frees the lease that is held with this token, and wakes the head of its queue.
    pub(crate) async fn revoke_lease(&self, name: &LockName, kind: LockKind, token: u64) -> Result<bool> {
        let key = Key::new(&self.namespace, kind, name);
        let control = &self.sessions.control;
        let locks = self.find_server_locks("revoke").await?;
        let (free, wake) = lease_sql::revoke(locks, &key, token);
        // The connection may have ended. This replaces it. The next request is not to be sent twice: its second reply would
        // be that there is no such hold.
        control.query("revoke", "DO 0".to_owned()).await?;
        let reply = control.query_once("revoke", free).await;
        let Some(reply) = self.unless_unmade("revoke", reply).await? else {
            return Ok(false);
        };
        let is_freed = reply.affected(0) == 1;
        if !is_freed && server::says_read_only(&control.query("revoke", row_sql::proof()).await?) {
            return Err(server::read_only("revoke", "read_only"));
        }
        if let Some(sleeper) = lease_sql::sleeper(&reply).filter(|_| is_freed) {
            // Without this, the sleeper wakes by itself a little later.
            let _ = control.kill_matching("revoke", wake(sleeper)).await;
        }
        Ok(is_freed)
    }
}

fn state((shown, waiters): (Vec<Shown>, usize)) -> LockState {
    let holders = shown.into_iter().map(|shown| {
        let label = shown
            .label
            .map(|label| String::from_utf8_lossy(&label).into_owned());
        Holder::new(FencingToken::new(shown.token), label, Some(shown.left))
    });
    LockState::new(holders.collect(), Some(waiters))
}

/// Reads the holds of the last result but one, and the number of waiters of the last.
fn read(reply: &Reply, hold: impl Fn(&MySqlRow) -> sqlx::Result<Shown>) -> sqlx::Result<(Vec<Shown>, usize)> {
    let waiters = reply.last().first().map_or(Ok(0), |row| column::<u64>(row, 0))?;
    let holds = reply.before_last().iter().map(hold).collect::<Result<_, _>>()?;
    Ok((holds, usize::try_from(waiters).unwrap_or(usize::MAX)))
}

fn shown_row(row: &MySqlRow) -> sqlx::Result<Shown> {
    let seconds: u64 = column(row, 2)?;
    // `NULL` for an account that may not see the session.
    let silent: Option<i64> = column(row, 3)?;
    let silent = silent.and_then(|silent| u64::try_from(silent).ok()).unwrap_or(0);
    Ok(Shown {
        token: column(row, 0)?,
        label: column(row, 1)?,
        left: Duration::from_secs(seconds.saturating_sub(silent)),
    })
}

fn lease_row(row: &MySqlRow) -> sqlx::Result<Shown> {
    Ok(Shown {
        token: column(row, 0)?,
        label: column(row, 1)?,
        left: Duration::from_micros(column(row, 2)?),
    })
}
