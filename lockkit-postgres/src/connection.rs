//! A connection that is polled by whoever waits for it, and notices its end also while nobody asks anything.

use std::{
    collections::HashMap,
    fmt,
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::BytesMut;
use futures_util::future::join_all;
use lockkit_core::{
    BoxError,
    spi::{Unencrypted, resumable},
};
use tokio::runtime::Handle;
use tokio_postgres::{
    Client, Config, Connection, NoTls, Row, Statement,
    tls::NoTlsStream,
    types::{IsNull, ToSql, Type, to_sql_checked},
};

use crate::{
    config::{Address, SslMode},
    error::Failure,
    stream::Stream,
};

/// The server's address, and the runtime of all connections. Its `Debug` form leaves out the password.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) address: Address,
    /// User, password and database.
    pub(crate) login: Config,
    pub(crate) ssl_mode: SslMode,
    pub(crate) unencrypted: Unencrypted,
    #[cfg(feature = "tls")]
    pub(crate) trust: Option<crate::tls::Trust>,
    pub(crate) runtime: Handle,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Options({})", self.address)
    }
}

/// A statement, with its parameters.
#[derive(Clone, Debug)]
pub(crate) struct Query {
    sql: &'static str,
    parameters: Vec<Parameter>,
    is_prepared: bool,
    is_optional: bool,
}

/// A parameter of a statement.
#[derive(Clone, Debug)]
pub(crate) enum Parameter {
    Int(i32),
    Bigint(i64),
    Bigints(Arc<[i64]>),
    Text(Option<Arc<str>>),
    Bytes(Vec<u8>),
}

impl Query {
    /// Makes a statement that the server prepares once per connection.
    pub(crate) fn prepared(sql: &'static str, parameters: Vec<Parameter>) -> Self {
        Self {
            sql,
            parameters,
            is_prepared: true,
            is_optional: false,
        }
    }

    /// Makes a statement that is prepared anew each time it is run.
    pub(crate) fn once(sql: &'static str, parameters: Vec<Parameter>) -> Self {
        Self {
            is_prepared: false,
            ..Self::prepared(sql, parameters)
        }
    }

    /// Makes it the last statement of a request, whose error leaves the replies to those before it as they are. The reply has no rows of it
    /// then, and not even none.
    pub(crate) fn optional(self) -> Self {
        Self {
            is_optional: true,
            ..self
        }
    }
}

impl Parameter {
    fn kind(&self) -> Type {
        match self {
            Self::Int(_) => Type::INT4,
            Self::Bigint(_) => Type::INT8,
            Self::Bigints(_) => Type::INT8_ARRAY,
            Self::Text(_) => Type::TEXT,
            Self::Bytes(_) => Type::BYTEA,
        }
    }
}

impl ToSql for Parameter {
    fn to_sql(&self, kind: &Type, out: &mut BytesMut) -> Result<IsNull, BoxError> {
        match self {
            Self::Int(value) => value.to_sql(kind, out),
            Self::Bigint(value) => value.to_sql(kind, out),
            Self::Bigints(values) => (&**values).to_sql(kind, out),
            Self::Text(text) => text.as_deref().to_sql(kind, out),
            Self::Bytes(bytes) => bytes.to_sql(kind, out),
        }
    }

    /// The statements are here, too, and give each parameter the type that it has.
    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

/// The rows of each statement of a request.
pub(crate) type Reply = Vec<Vec<Row>>;

/// A connection, as the client library has it: requests go to one half, and whoever waits polls the other.
pub(crate) struct Wire {
    client: Arc<Client>,
    /// `None` once it has ended. What still waits for a reply then hears so.
    connection: Option<Connection<Stream, NoTlsStream>>,
    statements: HashMap<&'static str, Statement>,
    /// Why it has ended, until somebody has taken it.
    end: Option<tokio_postgres::Error>,
}

impl resumable::Connection for Wire {
    type Reply = Reply;
    type Error = Failure;

    fn is_ended_by(failure: &Failure) -> bool {
        failure.ends_the_session()
    }

    fn ended() -> Failure {
        Failure::Ended
    }
}

impl Wire {
    /// Connects and logs in, with these settings of the session from its beginning. Returns the connection with the id of the process
    /// that the server said it is.
    pub(crate) async fn open(options: &Options, settings: &str) -> Result<(Self, i32), Failure> {
        let (stream, process) = Stream::open(options).await?;
        let mut login = options.login.clone();
        login.options(settings);
        let (client, connection) = login.connect_raw(stream, NoTls).await?;
        let wire = Self {
            client: Arc::new(client),
            connection: Some(connection),
            statements: HashMap::new(),
            end: None,
        };
        Ok((wire, process.load(std::sync::atomic::Ordering::Acquire)))
    }

    /// Runs statements. All of them are written at once, each with its own end of a request: a session whose request has none is never
    /// idle, so that its lease would never end.
    pub(crate) async fn run(&mut self, queries: Vec<Query>) -> Result<Reply, Failure> {
        let new = queries.iter().filter(|query| {
            query.is_prepared && !query.is_optional && !self.statements.contains_key(query.sql)
        });
        let new: Vec<_> = new.map(|query| query.sql).collect();
        self.prepare(new).await?;
        let optional: Vec<_> = queries.iter().map(|query| query.is_optional).collect();
        let replies = queries.into_iter().map(|query| {
            let client = self.client.clone();
            let statement = self.statements.get(query.sql).cloned();
            async move {
                let values = query.parameters.iter().map(|it| it as &(dyn ToSql + Sync));
                match statement {
                    Some(statement) => client.query(&statement, &values.collect::<Vec<_>>()).await,
                    None => {
                        let kinds = query.parameters.iter().map(Parameter::kind);
                        let typed: Vec<_> = values.zip(kinds).collect();
                        client.query_typed(query.sql, &typed).await
                    }
                }
            }
        });
        let replies = self.await_reply(join_all(replies)).await?;
        let mut reply = Reply::new();
        for (rows, is_optional) in replies.into_iter().zip(optional) {
            match rows.map_err(|error| self.explained(error)) {
                Ok(rows) => reply.push(rows),
                Err(failure) if is_optional && !failure.ends_the_session() => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(reply)
    }

    /// Has the server prepare statements.
    pub(crate) async fn prepare(&mut self, statements: Vec<&'static str>) -> Result<(), Failure> {
        if statements.is_empty() {
            return Ok(());
        }
        let client = self.client.clone();
        let preparing = join_all(statements.iter().map(|sql| client.prepare(sql)));
        let prepared = self.await_reply(preparing).await?;
        for (sql, statement) in statements.into_iter().zip(prepared) {
            let statement = statement.map_err(|error| self.explained(error))?;
            self.statements.insert(sql, statement);
        }
        Ok(())
    }

    /// Runs several statements without parameters in one transaction.
    pub(crate) async fn run_together(&mut self, sql: &str) -> Result<(), Failure> {
        let client = self.client.clone();
        Ok(self.await_reply(client.batch_execute(sql)).await??)
    }

    /// Polls the connection while it waits for a reply, which nothing else can bring. So a reply needs no waker, and must not have one: the
    /// task would wake itself with each reply, and a runtime of several threads would rouse another one to run it once more.
    async fn await_reply<F: Future>(&mut self, reply: F) -> Result<F::Output, Failure> {
        let mut reply = pin!(reply);
        let mut poll_reply = || reply.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        // Whoever polled the connection last is not to be woken by this request, and nor is this task: it polls the connection next.
        let _ = self.poll_end(&mut Context::from_waker(Waker::noop()));
        // Hands the request to the connection, which writes it when it is polled.
        if let Poll::Ready(output) = poll_reply() {
            return Ok(output);
        }
        poll_fn(|cx| {
            let has_ended = self.poll_end(cx).is_ready();
            match poll_reply() {
                Poll::Ready(output) => Poll::Ready(Ok(output)),
                Poll::Pending if has_ended => Poll::Ready(Err(Failure::Ended)),
                // A further request that it has made meanwhile wakes the connection, and with it this task.
                Poll::Pending => Poll::Pending,
            }
        })
        .await
        .map_err(|failure| self.end.take().map_or(failure, Failure::Library))
    }

    /// Returns why the server has ended the connection, if all that a request knows is that it has ended.
    fn explained(&mut self, error: tokio_postgres::Error) -> Failure {
        if error.is_closed()
            && let Some(end) = self.end.take()
        {
            return Failure::Library(end);
        }
        Failure::Library(error)
    }

    /// Ready once the connection has ended. The server says why before it ends a session.
    pub(crate) fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(connection) = &mut self.connection {
            match connection.poll_message(cx) {
                // Notices.
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(error))) => {
                    self.connection = None;
                    self.end = Some(error);
                }
                Poll::Ready(None) => self.connection = None,
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(())
    }

    /// Says goodbye, so that the server logs no broken connection.
    pub(crate) async fn quit(mut self) {
        drop(self.client);
        self.statements.clear();
        if let Some(connection) = self.connection {
            // An error means that it is closed already.
            let _ = connection.await;
        }
    }
}
