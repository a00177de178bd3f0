//! A connection whose statements survive the future that waits for them.
//!
//! A statement that was sent runs on the server whether its sender waits or not, and a connection whose reply was left
//! half-read can never be used again. So the reply in progress belongs to the connection, and waiting for it may stop
//! at any await and go on later.

use std::{fmt, future::Future, pin::Pin, time::Duration};

use futures_util::TryStreamExt;
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, Decode, Either, Execute, Executor, MySql, Row,
    mysql::{MySqlConnection, MySqlRow},
};
use tokio::{task::JoinSet, time::Instant};

use crate::{control::Options, fault};

type Running = Pin<Box<dyn Future<Output = (MySqlConnection, sqlx::Result<Reply>)> + Send>>;

pub(crate) struct Wire(State);

enum State {
    Idle(MySqlConnection),
    Running(Running, Instant),
    Answered(MySqlConnection, sqlx::Result<Reply>),
    Closed,
}

/// What each statement of one request came to, in order.
#[derive(Debug, Default)]
pub(crate) struct Reply(Vec<Outcome>);

#[derive(Debug, Default)]
struct Outcome {
    rows: Vec<MySqlRow>,
    affected: u64,
    last_insert_id: u64,
}

impl Wire {
    /// Connects, on the runtime that the client lives on: one that it is used on may end before.
    pub(crate) async fn open(options: &Options) -> sqlx::Result<Self> {
        let connect = options.connect.clone();
        let mut connecting = JoinSet::new();
        connecting.spawn_on(async move { connect.connect().await }, &options.runtime);
        match connecting.join_next().await {
            Some(Ok(connected)) => Ok(Self(State::Idle(connected?))),
            _ => Err(closed()),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.0, State::Closed)
    }

    /// Whether an answer has been owed for longer than `limit`.
    pub(crate) fn is_overdue(&self, limit: Duration) -> bool {
        matches!(self.0, State::Running(_, since) if since.elapsed() > limit)
    }

    /// Sends `sql`, one or more statements in one request, as soon as it is waited for. Whatever was answered before
    /// is forgotten; what is still running is waited for first.
    pub(crate) async fn send(&mut self, sql: String) {
        self.settle().await;
        self.start(sql);
    }

    /// The same at once: what is still running is not waited for, and closes the connection.
    pub(crate) fn start(&mut self, sql: String) {
        // Names are in it as hexadecimal literals, and nothing else comes from outside.
        self.run(sqlx::raw_sql(AssertSqlSafe(sql)));
    }

    /// The same for a statement with one parameter, which the server prepares when it comes for the first time.
    pub(crate) fn execute(&mut self, sql: &'static str, parameter: &[u8]) {
        self.run(sqlx::query(sql).bind(parameter));
    }

    fn run(&mut self, query: impl Execute<'static, MySql> + 'static) {
        let connection = match std::mem::replace(&mut self.0, State::Closed) {
            State::Idle(connection) => connection,
            State::Answered(connection, answer) if goes_on(&answer) => connection,
            _ => return,
        };
        self.0 = State::Running(Box::pin(exchange(connection, query)), Instant::now());
    }

    /// Waits for the answer and leaves it here.
    pub(crate) async fn settle(&mut self) {
        if let State::Running(running, _) = &mut self.0 {
            let (connection, answer) = running.await;
            self.0 = State::Answered(connection, answer);
        }
    }

    /// The time at which the request was sent whose answer is still owed.
    pub(crate) fn running_since(&self) -> Option<Instant> {
        match self.0 {
            State::Running(_, since) => Some(since),
            _ => None,
        }
    }

    /// The answer that is here and that nobody has taken.
    pub(crate) fn answered(&mut self) -> Option<&mut sqlx::Result<Reply>> {
        match &mut self.0 {
            State::Answered(_, answer) => Some(answer),
            _ => None,
        }
    }

    /// Waits for the answer to what was sent last.
    ///
    /// # Errors
    /// What the server said; an I/O error if nothing can be said over this connection any more.
    pub(crate) async fn answer(&mut self) -> sqlx::Result<Reply> {
        self.settle().await;
        match std::mem::replace(&mut self.0, State::Closed) {
            State::Answered(connection, answer) => {
                if goes_on(&answer) {
                    self.0 = State::Idle(connection);
                }
                answer
            }
            other => {
                self.0 = other;
                Err(closed())
            }
        }
    }

    /// Sends and waits for the answer.
    ///
    /// # Errors
    /// As [`answer`](Self::answer).
    pub(crate) async fn ask(&mut self, sql: String) -> sqlx::Result<Reply> {
        self.send(sql).await;
        self.answer().await
    }

    /// Says goodbye, so that the server logs no aborted connection. Only an idle one can.
    pub(crate) async fn quit(self) {
        if let State::Idle(connection) = self.0 {
            // An error means that it is closed already.
            let _ = connection.close().await;
        }
    }
}

/// Whether the connection outlives this answer.
fn goes_on(answer: &sqlx::Result<Reply>) -> bool {
    answer
        .as_ref()
        .err()
        .is_none_or(|error| !fault::ends_the_session(error))
}

fn closed() -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::new(
        std::io::ErrorKind::NotConnected,
        "the connection has ended",
    ))
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            State::Idle(_) => "Wire(idle)",
            State::Running(..) => "Wire(running)",
            State::Answered(..) => "Wire(answered)",
            State::Closed => "Wire(closed)",
        })
    }
}

async fn exchange(
    mut connection: MySqlConnection,
    query: impl Execute<'static, MySql> + 'static,
) -> (MySqlConnection, sqlx::Result<Reply>) {
    let answer = read(&mut connection, query).await;
    (connection, answer)
}

async fn read(
    connection: &mut MySqlConnection,
    query: impl Execute<'static, MySql> + 'static,
) -> sqlx::Result<Reply> {
    let mut parts = connection.fetch_many(query);
    let mut outcomes = Vec::with_capacity(2);
    let mut outcome = Outcome::default();
    while let Some(part) = parts.try_next().await? {
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
    /// The rows of one statement.
    pub(crate) fn rows(&self, statement: usize) -> &[MySqlRow] {
        self.0.get(statement).map_or(&[], |outcome| &outcome.rows)
    }

    /// The first row of one statement.
    pub(crate) fn row(&self, statement: usize) -> Option<&MySqlRow> {
        self.rows(statement).first()
    }

    /// The rows of the last statement.
    pub(crate) fn last(&self) -> &[MySqlRow] {
        self.0.last().map_or(&[], |outcome| &outcome.rows)
    }

    /// Takes off what the first statement came to.
    pub(crate) fn drop_first(&mut self) {
        if !self.0.is_empty() {
            self.0.remove(0);
        }
    }

    /// Takes off what the last statement came to: its first row.
    pub(crate) fn pop_last(&mut self) -> Option<MySqlRow> {
        self.0.pop()?.rows.into_iter().next()
    }

    /// The rows of the last statement but one.
    pub(crate) fn before_last(&self) -> &[MySqlRow] {
        let outcome = self.0.len().checked_sub(2).and_then(|at| self.0.get(at));
        outcome.map_or(&[], |outcome| &outcome.rows)
    }

    /// How many rows a statement matched.
    pub(crate) fn affected(&self, statement: usize) -> u64 {
        self.0.get(statement).map_or(0, |outcome| outcome.affected)
    }

    /// The value that a statement gave to `LAST_INSERT_ID`, which costs no row; 0 if it gave none.
    pub(crate) fn last_insert_id(&self, statement: usize) -> u64 {
        self.0.get(statement).map_or(0, |outcome| outcome.last_insert_id)
    }
}

/// A column of a row, in whatever type the server has chosen for it.
pub(crate) fn column<'r, T: Decode<'r, MySql>>(row: &'r MySqlRow, index: usize) -> sqlx::Result<T> {
    row.try_get_unchecked(index)
}
