//! A look at who holds, from outside.

use std::time::Duration;

use lockkit_core::{FencingToken, Holder, LockKind, LockName, LockState, Result, spi::Mode};

use crate::{
    Shared,
    control::Killed,
    fault,
    key::Key,
    sql,
    wire::{Reply, column},
};

/// A hold shows itself some milliseconds after its grant; one that is not shown after these looks is not there.
const LOOKS: usize = 10;
const BETWEEN_LOOKS: &str = "DO SLEEP(0.01)";

/// A hold as its session shows it.
struct Shown {
    token: u64,
    label: Option<Vec<u8>>,
    left: Duration,
}

impl Shared {
    pub(crate) async fn look(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let (shown, waiters) = self.shown(name, kind, "inspect").await?;
        let holders = shown.into_iter().map(|shown| {
            let label = shown
                .label
                .map(|label| String::from_utf8_lossy(&label).into_owned());
            Holder::new(FencingToken::new(shown.token), label, Some(shown.left))
        });
        Ok(LockState::new(holders.collect(), Some(waiters)))
    }

    /// Ends the session that holds with this token. It is found and ended by one request: by the next its client may hold
    /// something else in it.
    pub(crate) async fn revoke_row(&self, name: &LockName, kind: LockKind, token: u64) -> Result<bool> {
        let (shown, _) = self.shown(name, kind, "revoke").await?;
        if shown.iter().all(|shown| shown.token != token) {
            return Ok(false);
        }
        let key = Key::new(&self.namespace, kind, name);
        let killed = self
            .sessions
            .looks
            .kill_by("revoke", sql::kill_holder(&key, token));
        Ok(killed.await? == Killed::Now)
    }

    /// The holds of a name, and how many wait for it.
    async fn shown(
        &self,
        name: &LockName,
        kind: LockKind,
        operation: &'static str,
    ) -> Result<(Vec<Shown>, usize)> {
        let key = Key::new(&self.namespace, kind, name);
        let modes: &[Mode] = match kind {
            LockKind::Lock => &[Mode::Exclusive, Mode::Shared],
            LockKind::Semaphore => &[Mode::Permits(std::num::NonZeroU32::MIN)],
        };
        let question = sql::holders(&key, self.server.flavour, modes);
        let control = &self.sessions.looks;
        let mut seen = read(&control.ask(operation, question.clone()).await?)
            .map_err(|error| fault::error(operation, error))?;
        for _ in 1..LOOKS {
            if !seen.0.is_empty() {
                break;
            }
            let again = format!("{BETWEEN_LOOKS}; {question}");
            seen = read(&control.ask(operation, again).await?)
                .map_err(|error| fault::error(operation, error))?;
        }
        Ok(seen)
    }
}

fn read(reply: &Reply) -> sqlx::Result<(Vec<Shown>, usize)> {
    let waiters = reply.last().first().map_or(Ok(0), |row| column::<u64>(row, 0))?;
    let mut shown = Vec::new();
    for row in reply.before_last() {
        let seconds: u64 = column(row, 2)?;
        // How long it has been silent is not for everybody to see.
        let silent: Option<i64> = column(row, 3)?;
        let silent = silent.and_then(|silent| u64::try_from(silent).ok()).unwrap_or(0);
        shown.push(Shown {
            token: column(row, 0)?,
            label: column(row, 1)?,
            left: Duration::from_secs(seconds.saturating_sub(silent)),
        });
    }
    Ok((shown, usize::try_from(waiters).unwrap_or(usize::MAX)))
}
