//! A connection that holds no lock: it interrupts and ends sessions, and inspects.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    Error, Result,
    spi::resumable::{self, Resumable},
};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};
use tokio_postgres::Row;

use crate::{
    NAME,
    connection::{Options, Query, Reply, Wire},
    error::{During, Failure},
    schema,
    server::{self, Backend},
    session::{REPLY_TIMEOUT, SessionId},
    sql,
};

/// A connection is dead if a reply takes longer. All its statements are short.
pub(crate) const DEAD_AFTER: Duration = Duration::from_secs(5);

/// The time after which work ends that has no reply, whatever `op_timeout` allows. Where nobody polls it, all others would wait for its
/// connection for as long as that seems to be there. The next one finds it dead.
const ENDS_AFTER: Duration = Duration::from_secs(30);

/// The time after which a session that had not read its request is looked at again.
const MOMENT: Duration = Duration::from_millis(2);

/// The time between two questions whether a session waits.
const PAUSE: Duration = Duration::from_millis(20);

/// All work with the connection is done in tasks of the client's runtime: an acquisition that nobody polls for a while would otherwise keep the
/// connection from all others. Clones have the same connection.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    options: Options,
    state: Arc<Mutex<Option<Resumable<Wire>>>>,
}

impl Control {
    pub(crate) fn new(options: Options) -> Self {
        Self {
            options,
            state: Arc::default(),
        }
    }

    /// Connects, and returns what the server is.
    pub(crate) async fn connect(&self, operation: &'static str) -> Result<Backend> {
        let mut state = self.state.lock().await;
        let (wire, backend) = self.open(operation).await?;
        *state = Some(Resumable::new(wire));
        Ok(backend)
    }

    /// Runs statements. Runs them again on a new connection if the existing one has ended, so they have to be harmless twice.
    pub(crate) async fn run(&self, operation: &'static str, queries: Vec<Query>) -> Result<Reply> {
        self.try_to_run(operation, queries).await?.during(operation)
    }

    /// Runs statements once at most.
    ///
    /// # Errors
    /// Also if there was no reply. Then nobody can tell whether they have run.
    pub(crate) async fn run_once(&self, operation: &'static str, queries: Vec<Query>) -> Result<Reply> {
        let (state, options) = (self.state.clone(), self.options.clone());
        let work = async move {
            let mut state = state.lock().await;
            let working = async {
                if usable(&mut state).is_none() {
                    let (wire, _) = server::open(&options, 0).await.during(operation)?;
                    *state = Some(Resumable::new(wire));
                }
                let reply = match &mut *state {
                    Some(connection) => run(connection, queries).await,
                    None => Err(Failure::Ended),
                };
                reply.during(operation)
            };
            in_time(operation, working).await
        };
        resumable::on_runtime(NAME, operation, work, &self.options.runtime).await?
    }

    /// Replaces the connection if it has ended, so that what [runs once](Self::run_once) after this is not lost with it.
    pub(crate) async fn refresh(&self, operation: &'static str) -> Result<()> {
        let ask = vec![Query::prepared(sql::IS_THERE, Vec::new())];
        self.run(operation, ask).await.map(drop)
    }

    /// Runs statements as [`run`](Self::run) does, after a pause. It goes by this host's clock: one at the server lasts for as long as its wall
    /// clock was set back.
    pub(crate) async fn run_after(
        &self,
        pause: Duration,
        operation: &'static str,
        queries: Vec<Query>,
    ) -> Result<Reply> {
        self.pause(pause, operation).await?;
        self.run(operation, queries).await
    }

    async fn pause(&self, pause: Duration, operation: &'static str) -> Result<()> {
        if pause.is_zero() {
            return Ok(());
        }
        let pausing = async move { sleep(pause).await };
        resumable::on_runtime(NAME, operation, pausing, &self.options.runtime).await
    }

    /// Runs a statement that only reads lockkit's tables, after a pause. Returns `None` if nothing of lockkit's is in the database.
    ///
    /// # Errors
    /// Also if only a part of it is there.
    pub(crate) async fn look(
        &self,
        pause: Duration,
        operation: &'static str,
        ask: Query,
    ) -> Result<Option<Vec<Row>>> {
        self.pause(pause, operation).await?;
        let mut reply = self.try_to_run(operation, vec![ask.clone()]).await?;
        if reply.as_ref().is_err_and(Failure::is_about_what_is_missing) {
            if schema::is_absent(operation, self).await? {
                return Ok(None);
            }
            // Somebody may have made it in between.
            reply = self.try_to_run(operation, vec![ask]).await?;
        }
        Ok(Some(reply.during(operation)?.pop().unwrap_or_default()))
    }

    /// Runs statements as [`run`](Self::run) does, and returns the server's own error as it is.
    pub(crate) async fn try_to_run(
        &self,
        operation: &'static str,
        queries: Vec<Query>,
    ) -> Result<std::result::Result<Reply, Failure>> {
        let (state, options) = (self.state.clone(), self.options.clone());
        let work = async move {
            let mut state = state.lock().await;
            let working = async {
                if let Some(connection) = usable(&mut state) {
                    match run(connection, queries.clone()).await {
                        Err(failure) if failure.ends_the_session() => {}
                        reply => return Ok(reply),
                    }
                }
                let (wire, _) = server::open(&options, 0).await.during(operation)?;
                Ok(run(state.insert(Resumable::new(wire)), queries).await)
            };
            in_time(operation, working).await
        };
        resumable::on_runtime(NAME, operation, work, &self.options.runtime).await?
    }

    /// Runs statements without parameters in one transaction.
    pub(crate) async fn run_together(&self, operation: &'static str, statements: &str) -> Result<()> {
        let (state, options) = (self.state.clone(), self.options.clone());
        let statements = statements.to_owned();
        let work = async move {
            // Not over the kept connection: it would be lost with a future that is dropped, and others would wait for it.
            let (mut wire, _) = server::open(&options, 0).await.during(operation)?;
            wire.run_together(&statements).await.during(operation)?;
            *state.lock().await = Some(Resumable::new(wire));
            Ok(())
        };
        resumable::on_runtime(NAME, operation, work, &self.options.runtime).await?
    }

    /// Interrupts the statement of a session, if it is at one within a moment. Returns false if not: it may not have read its request yet.
    pub(crate) async fn cancel(&self, operation: &'static str, session: SessionId) -> Result<bool> {
        let look = Query::prepared(sql::CANCEL, session.parameters());
        let reply = self.run(operation, vec![look.clone()]).await?;
        if reply.last().is_some_and(|rows| !rows.is_empty()) {
            return Ok(true);
        }
        let reply = self.run_after(MOMENT, operation, vec![look]).await?;
        Ok(reply.last().is_some_and(|rows| !rows.is_empty()))
    }

    /// Ends a session, by one request. Returns false if there is no such session.
    ///
    /// # Errors
    /// Also if there was no reply. Then it may have ended the session.
    pub(crate) async fn terminate(&self, operation: &'static str, session: SessionId) -> Result<bool> {
        let end = Query::prepared(sql::TERMINATE, session.parameters());
        let reply = self.run_once(operation, vec![end]).await?;
        Ok(reply.first().is_some_and(|rows| !rows.is_empty()))
    }

    /// Returns true as soon as the server has a session wait: it may not have read its request yet. While the session is at its statement
    /// and does not wait, a slow server is at work, and nothing is known. Returns false if it was at none for a while: a reply that it
    /// had sent should have come by then.
    pub(crate) async fn has_wait(&self, operation: &'static str, session: SessionId) -> Result<bool> {
        let ask = Query::prepared(sql::DOES_IT_WAIT, session.parameters());
        let mut reply = self.run(operation, vec![ask.clone()]).await?;
        let mut idle_since = Instant::now();
        loop {
            match reply.last().and_then(|rows| rows.first()) {
                Some(row) => {
                    if row.try_get(0).during(operation)? {
                        return Ok(true);
                    }
                    idle_since = Instant::now();
                }
                None if idle_since.elapsed() >= REPLY_TIMEOUT => return Ok(false),
                None => {}
            }
            reply = self.run_after(PAUSE, operation, vec![ask.clone()]).await?;
        }
    }

    /// Returns true if the server replies over the connection that is there: it has not been shut down.
    pub(crate) async fn is_still_there(&self) -> bool {
        let state = self.state.clone();
        let work = async move {
            match usable(&mut *state.lock().await) {
                Some(connection) => {
                    let asked = run(connection, vec![Query::prepared(sql::IS_THERE, Vec::new())]);
                    matches!(timeout(ENDS_AFTER, asked).await, Ok(Ok(_)))
                }
                None => false,
            }
        };
        resumable::on_runtime(NAME, "renew", work, &self.options.runtime)
            .await
            .unwrap_or(false)
    }

    /// Connects on the client's runtime.
    async fn open(&self, operation: &'static str) -> Result<(Wire, Backend)> {
        let options = self.options.clone();
        let opening = async move { server::open(&options, 0).await };
        resumable::on_runtime(NAME, operation, opening, &self.options.runtime)
            .await?
            .during(operation)
    }

    pub(crate) async fn close(&self) {
        let connection = self.state.lock().await.take();
        if let Some(wire) = connection.and_then(Resumable::into_idle) {
            wire.quit().await;
        }
    }
}

/// Works with the connection, which this keeps from others, for so long at most.
async fn in_time<T>(operation: &'static str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let done = timeout(ENDS_AFTER, work).await;
    done.unwrap_or_else(|_| {
        let what = format!("no reply within {ENDS_AFTER:?}");
        Err(Error::transient(NAME, operation, what))
    })
}

fn usable(state: &mut Option<Resumable<Wire>>) -> Option<&mut Resumable<Wire>> {
    state
        .as_mut()
        .filter(|connection| !connection.is_closed() && !connection.is_overdue(DEAD_AFTER))
}

/// Waits for the reply to the request of a future that was dropped, and runs this one.
async fn run(connection: &mut Resumable<Wire>, queries: Vec<Query>) -> std::result::Result<Reply, Failure> {
    connection.receive().await;
    connection.start(|mut wire| async move {
        let reply = wire.run(queries).await;
        (wire, reply)
    });
    connection.receive().await;
    connection.take_reply()
}
