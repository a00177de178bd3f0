//! Beside the PostgreSQL backend.

use std::{
    fmt,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::{Duration, Instant},
};

use lockkit::{
    BoxError,
    postgres::tokio_postgres::{self, Client as Session, NoTls, SimpleQueryMessage, Statement},
    spi::Mode,
};
use lockkit_conformance::measure::{Client, Contender, Scenario, Subject};

use tokio::time::sleep;

use super::exclusive_alone;

/// The server's own advisory lock by hand, in a session of its own: `pg_advisory_lock`, then `pg_advisory_unlock`. No token, no
/// lease, nobody told of anything.
#[derive(Clone)]
pub struct AdvisoryLock {
    /// The server and the role.
    pub url: String,
    /// The form in which it asks.
    pub form: Form,
}

/// The form of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Text, which the server parses each time.
    Text,
    /// Prepared once.
    Prepared,
}

impl AdvisoryLock {
    /// Returns the version that the server reports.
    ///
    /// # Errors
    /// If it cannot be reached.
    ///
    /// # Cancel safety
    /// Nothing changes if it is dropped.
    pub async fn version(&self) -> Result<String, BoxError> {
        let session = connect(&self.url).await?;
        let row = session.query_one("SHOW server_version", &[]).await?;
        let version: String = row.try_get(0)?;
        // `15.18 (Debian 15.18-0+deb12u1)`
        Ok(version.split(' ').next().unwrap_or_default().to_owned())
    }
}

async fn connect(url: &str) -> Result<Session, BoxError> {
    let (session, connection) = tokio_postgres::connect(url, NoTls).await?;
    // It ends with the session.
    tokio::spawn(connection);
    Ok(session)
}

impl Subject for AdvisoryLock {
    type Client = Self;

    async fn client(&self) -> Result<Self, BoxError> {
        Ok(self.clone())
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        Ok(match scenario {
            Scenario::Shared(_) | Scenario::BusyTry | Scenario::Withdrawal => None,
            other => exclusive_alone(other),
        })
    }
}

impl Client for AdvisoryLock {
    type Contender = LockedKey;

    async fn contender(&self, name: &str, mode: Mode) -> Result<LockedKey, BoxError> {
        let session = connect(&self.url).await?;
        let key = key_of(name);
        let shared = if mode == Mode::Shared { "_shared" } else { "" };
        let ask = async |what: &str| match self.form {
            Form::Text => Ok(Ask::Text(format!("SELECT pg_{what}{shared}({key})"))),
            Form::Prepared => {
                let sql = format!("SELECT pg_{what}{shared}($1)");
                session.prepare(&sql).await.map(Ask::Prepared)
            }
        };
        let (lock, unlock) = (ask("advisory_lock").await?, ask("advisory_unlock").await?);
        let attempt = ask("try_advisory_lock").await?;
        Ok(LockedKey {
            session,
            key,
            lock,
            unlock,
            attempt,
        })
    }

    /// The statement is cancelled over another connection, and its session unlocks whatever it may have been granted meanwhile.
    async fn withdraw(&self, name: &str, waits: Duration) -> Result<Duration, BoxError> {
        let (session, other) = (connect(&self.url).await?, connect(&self.url).await?);
        let id: i32 = session
            .query_one("SELECT pg_backend_pid()", &[])
            .await?
            .try_get(0)?;
        let cancel = other.prepare("SELECT pg_cancel_backend($1)").await?;
        let lock = format!("SELECT pg_advisory_lock({})", key_of(name));
        let cancelling = async {
            sleep(waits).await;
            let began = Instant::now();
            other.query_one(&cancel, &[&id]).await.map(|_| began)
        };
        let (waited, began) = tokio::join!(session.simple_query(&lock), cancelling);
        let began = began?;
        if waited.is_ok() {
            return Err("it was granted what somebody else holds".into());
        }
        session.simple_query("SELECT pg_advisory_unlock_all()").await?;
        Ok(began.elapsed())
    }
}

/// The same in each process.
fn key_of(name: &str) -> i64 {
    let mut key = DefaultHasher::new();
    name.hash(&mut key);
    key.finish().cast_signed()
}

enum Ask {
    Text(String),
    Prepared(Statement),
}

/// A key, in a session.
pub struct LockedKey {
    session: Session,
    key: i64,
    lock: Ask,
    unlock: Ask,
    attempt: Ask,
}

impl fmt::Debug for LockedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockedKey")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

impl LockedKey {
    async fn ask(&self, what: &Ask) -> Result<(), BoxError> {
        match what {
            Ask::Text(sql) => self.session.simple_query(sql).await.map(drop)?,
            Ask::Prepared(statement) => self.session.query_one(statement, &[&self.key]).await.map(drop)?,
        }
        Ok(())
    }
}

impl Contender for LockedKey {
    type Held = ();

    async fn acquire(&mut self) -> Result<(), BoxError> {
        self.ask(&self.lock).await
    }

    async fn release(&mut self, (): ()) -> Result<(), BoxError> {
        self.ask(&self.unlock).await
    }

    async fn try_acquire(&mut self) -> Result<Option<()>, BoxError> {
        let is_granted = match &self.attempt {
            Ask::Text(sql) => {
                let answer = self.session.simple_query(sql).await?;
                answer
                    .iter()
                    .any(|it| matches!(it, SimpleQueryMessage::Row(row) if row.get(0) == Some("t")))
            }
            Ask::Prepared(statement) => self
                .session
                .query_one(statement, &[&self.key])
                .await?
                .try_get(0)?,
        };
        Ok(is_granted.then_some(()))
    }
}
