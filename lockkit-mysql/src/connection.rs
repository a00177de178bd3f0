//! A connection whose requests survive the future that waits for them.

use std::{fmt, time::Duration};

use futures_util::TryStreamExt;
use lockkit_core::{
    Error, Result,
    spi::resumable::{self, Resumable},
};
use sqlx::{
    AssertSqlSafe, Connection, Decode, Either, Execute, Executor, MySql, Row,
    mysql::{MySqlConnection, MySqlRow},
};
use tokio::{task::yield_now, time::Instant};

use crate::{NAME, control::Options, error, relay::Open};

/// The rows and results that are read before others of the runtime have their turn: sqlx reads on for as long as there is something to read,
/// and the relay may be on another thread.
const TURN: usize = 1_024;

/// A connection, as sqlx has it, and what keeps it open.
pub(crate) struct Wire(MySqlConnection, Open);

pub(crate) struct ResumableConnection(Resumable<Wire>);

/// The results of one request, one for each of its statements.
#[derive(Debug, Default)]
pub(crate) struct Reply(Vec<Outcome>);

#[derive(Debug, Default)]
struct Outcome {
    rows: Vec<MySqlRow>,
    affected: u64,
    last_insert_id: u64,
}

impl resumable::Connection for Wire {
    type Reply = Reply;
    type Error = sqlx::Error;

    fn is_ended_by(error: &sqlx::Error) -> bool {
        error::ends_the_session(error)
    }

    fn ended() -> sqlx::Error {
        sqlx::Error::Io(std::io::Error::new(
            std::io::ErrorKind::NotConnected,
            "the connection has ended",
        ))
    }

    fn panicked(text: &str) -> sqlx::Error {
        sqlx::Error::Io(std::io::Error::other(resumable::said(text)))
    }
}

impl ResumableConnection {
    /// Connects on the client's runtime. The runtime of the caller may end before.
    pub(crate) async fn open(operation: &'static str, options: &Options) -> Result<Self> {
        let (connect, route) = (options.connect.clone(), options.route.clone());
        let connecting = async move {
            let (connection, open) = route.connect(operation, &connect).await?;
            Ok::<_, Error>(Wire(connection, open))
        };
        let connected: Result<Wire> =
            resumable::on_runtime(NAME, operation, connecting, &options.runtime).await?;
        Ok(Self(Resumable::new(connected?)))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// True if a reply has been due for longer than `limit`.
    pub(crate) fn is_overdue(&self, limit: Duration) -> bool {
        self.0.is_overdue(limit)
    }

    /// Starts a request of one or more statements. The first wait for its reply sends it. Forgets an earlier reply. If an
    /// earlier request still runs, the connection closes.
    pub(crate) fn send(&mut self, sql: String) {
        // Names are in it as hexadecimal literals, and nothing else comes from outside.
        self.run(sqlx::raw_sql(AssertSqlSafe(sql)));
    }

    /// Starts a statement with one parameter, in the same way. The server prepares it once per connection.
    pub(crate) fn execute(&mut self, sql: &'static str, parameter: &[u8]) {
        self.run(sqlx::query(sql).bind(parameter));
    }

    fn run(&mut self, query: impl Execute<'static, MySql> + 'static) {
        self.0.start(|wire| exchange(wire, query));
    }

    /// Waits for the reply, and keeps it here.
    pub(crate) async fn receive(&mut self) {
        self.0.receive().await;
    }

    /// Returns the time at which the request under way was started.
    pub(crate) fn running_since(&self) -> Option<Instant> {
        self.0.running_since()
    }

    /// Returns the reply that was received and not yet taken.
    pub(crate) fn received(&mut self) -> Option<&mut sqlx::Result<Reply>> {
        self.0.received()
    }

    /// Takes the reply that was received.
    ///
    /// # Errors
    /// The server's error, or an I/O error if the connection has ended or no reply was received.
    pub(crate) fn take_reply(&mut self) -> sqlx::Result<Reply> {
        self.0.take_reply()
    }

    /// Runs a request: waits for an earlier reply, which it forgets, sends `sql`, and returns the reply.
    ///
    /// # Errors
    /// As [`take_reply`](Self::take_reply).
    pub(crate) async fn query(&mut self, sql: String) -> sqlx::Result<Reply> {
        self.receive().await;
        self.send(sql);
        self.receive().await;
        self.take_reply()
    }

    /// Closes an idle connection in order, so that the server logs no aborted one.
    pub(crate) async fn quit(self) {
        if let Some(Wire(connection, _open)) = self.0.into_idle() {
            // An error means that it is closed already.
            let _ = connection.close().await;
        }
    }
}

impl fmt::Debug for ResumableConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

async fn exchange(
    mut wire: Wire,
    query: impl Execute<'static, MySql> + 'static,
) -> (Wire, sqlx::Result<Reply>) {
    let reply = read(&mut wire.0, query).await;
    (wire, reply)
}

async fn read(
    connection: &mut MySqlConnection,
    query: impl Execute<'static, MySql> + 'static,
) -> sqlx::Result<Reply> {
    let mut parts = connection.fetch_many(query);
    let mut outcomes = Vec::with_capacity(2);
    let mut outcome = Outcome::default();
    let mut count: usize = 0;
    while let Some(part) = parts.try_next().await? {
        count += 1;
        if count.is_multiple_of(TURN) {
            yield_now().await;
        }
        match part {
            Either::Right(row) => outcome.rows.push(row),
            Either::Left(done) => {
                outcome.affected = done.rows_affected();
                outcome.last_insert_id = done.last_insert_id();
                outcomes.push(std::mem::take(&mut outcome));
            }
        }
    }
    Ok(Reply(outcomes))
}

impl Reply {
    /// Returns the rows of one statement.
    pub(crate) fn rows(&self, statement: usize) -> &[MySqlRow] {
        self.0.get(statement).map_or(&[], |outcome| &outcome.rows)
    }

    /// Returns the first row of one statement.
    pub(crate) fn row(&self, statement: usize) -> Option<&MySqlRow> {
        self.rows(statement).first()
    }

    /// Returns the rows of the last statement.
    pub(crate) fn last(&self) -> &[MySqlRow] {
        self.0.last().map_or(&[], |outcome| &outcome.rows)
    }

    /// Removes the rows of the last statement, and returns them.
    pub(crate) fn take_last(&mut self) -> Vec<MySqlRow> {
        let last = self.0.last_mut();
        last.map(|outcome| std::mem::take(&mut outcome.rows))
            .unwrap_or_default()
    }

    /// Returns the rows of the last statement but one.
    pub(crate) fn before_last(&self) -> &[MySqlRow] {
        let outcome = self.0.len().checked_sub(2).and_then(|at| self.0.get(at));
        outcome.map_or(&[], |outcome| &outcome.rows)
    }

    /// Removes the result of the last statement.
    pub(crate) fn drop_last(&mut self) {
        self.0.pop();
    }

    /// Removes the result of the first statement.
    pub(crate) fn drop_first(&mut self) {
        if !self.0.is_empty() {
            self.0.remove(0);
        }
    }

    /// Removes the result of the last statement, and returns its first row.
    pub(crate) fn pop_last(&mut self) -> Option<MySqlRow> {
        self.0.pop()?.rows.into_iter().next()
    }

    /// Returns the number of rows that a statement matched.
    pub(crate) fn affected(&self, statement: usize) -> u64 {
        self.0.get(statement).map_or(0, |outcome| outcome.affected)
    }

    /// Returns the value that a statement gave to `LAST_INSERT_ID`, or 0. It comes without a row.
    pub(crate) fn last_insert_id(&self, statement: usize) -> u64 {
        self.0.get(statement).map_or(0, |outcome| outcome.last_insert_id)
    }
}

/// Reads a column of a row, of whatever type the server has chosen for it.
pub(crate) fn column<'r, T: Decode<'r, MySql>>(row: &'r MySqlRow, index: usize) -> sqlx::Result<T> {
    row.try_get_unchecked(index)
}
