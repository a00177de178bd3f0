//! Connections whose requests survive the future that waits for them.
//!
//! A server runs a statement whether its sender waits or not, and a connection whose reply was read by half can never be used again.
//! A claim's futures may be dropped at any await. So a [`Resumable`] connection owns the reply under way: waiting for it may stop,
//! and go on later.

use std::{any::Any, fmt, future::Future, panic::AssertUnwindSafe, pin::Pin, time::Duration};

use futures_util::FutureExt as _;
use tokio::{runtime::Handle, task::JoinSet, time::Instant};

use crate::Error;

/// A connection to a server, as a client library has it.
pub trait Connection: Send + 'static {
    /// The reply to a request.
    type Reply: Send;
    /// The reason why there is no reply.
    type Error: Send;

    /// Returns `true` if the connection can not, or should not, be used after this error.
    fn is_ended_by(error: &Self::Error) -> bool;

    /// Returns the error of a connection that has ended.
    fn ended() -> Self::Error;

    /// Returns the error of a connection that has ended since the client library panicked, and said this. A server can bring that about.
    fn panicked(_text: &str) -> Self::Error {
        Self::ended()
    }
}

/// Does `work` in a task of a client's runtime. So it goes on also while nobody polls this future, and a mutex that it locks is not kept from
/// others by a caller that does something else, and a connection that it opens lasts as long as the client.
///
/// # Errors
/// A permanent one if that runtime has ended. The caller may be on another one. A transient one if the work has panicked.
///
/// # Cancel safety
/// Dropping the future ends the work at an await.
pub async fn on_runtime<T: Send + 'static>(
    backend: &'static str,
    operation: &'static str,
    work: impl Future<Output = T> + Send + 'static,
    runtime: &Handle,
) -> crate::Result<T> {
    let mut tasks = JoinSet::new();
    tasks.spawn_on(work, runtime);
    match tasks.join_next().await {
        Some(Ok(done)) => Ok(done),
        Some(Err(ended)) if ended.is_panic() => {
            let panic = ended.into_panic();
            Err(Error::transient(backend, operation, said(text_of(&*panic))))
        }
        _ => Err(Error::permanent(
            backend,
            operation,
            "the runtime that this client lives on has ended; connect again within one that lasts",
        )),
    }
}

/// Returns the error text for a panic of the client library.
pub fn said(text: &str) -> String {
    format!("the client library panicked: {text}")
}

/// Returns what a panic said.
pub fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or_default()
}

type Result<C> = std::result::Result<<C as Connection>::Reply, <C as Connection>::Error>;
type Exchange<C> = Pin<Box<dyn Future<Output = (C, Result<C>)> + Send>>;

/// A connection that owns the request under way, and its reply.
pub struct Resumable<C: Connection>(State<C>);

enum State<C: Connection> {
    Idle(C),
    Running(Exchange<C>, Instant),
    Received(C, Result<C>),
    Closed,
    /// Closed by a panic, which said this.
    Panicked(String),
}

impl<C: Connection> Resumable<C> {
    /// Wraps a connection without a request under way.
    pub const fn new(connection: C) -> Self {
        Self(State::Idle(connection))
    }

    /// Starts a request: `exchange` sends it and returns its reply. The first wait for the reply polls it. Forgets an earlier reply.
    /// If an earlier request still runs, the connection closes.
    pub fn start<F>(&mut self, exchange: impl FnOnce(C) -> F)
    where
        F: Future<Output = (C, Result<C>)> + Send + 'static,
    {
        let connection = match std::mem::replace(&mut self.0, State::Closed) {
            State::Idle(connection) => connection,
            State::Received(connection, reply) if is_usable_after::<C>(&reply) => connection,
            _ => return,
        };
        self.0 = State::Running(Box::pin(exchange(connection)), Instant::now());
    }

    /// Waits for the reply, and keeps it here. If the client library panics, the connection closes.
    ///
    /// # Cancel safety
    /// May be dropped at any await, and called again.
    pub async fn receive(&mut self) {
        if let State::Running(exchange, _) = &mut self.0 {
            self.0 = match AssertUnwindSafe(exchange).catch_unwind().await {
                Ok((connection, reply)) => State::Received(connection, reply),
                Err(panic) => State::Panicked(text_of(&*panic).to_owned()),
            };
        }
    }

    /// Returns the reply that was received and not yet taken.
    pub fn received(&mut self) -> Option<&mut Result<C>> {
        match &mut self.0 {
            State::Received(_, reply) => Some(reply),
            _ => None,
        }
    }

    /// Takes the reply that was received.
    ///
    /// # Errors
    /// The server's error, or that of an ended connection if no reply was received.
    pub fn take_reply(&mut self) -> Result<C> {
        match std::mem::replace(&mut self.0, State::Closed) {
            State::Received(connection, reply) => {
                if is_usable_after::<C>(&reply) {
                    self.0 = State::Idle(connection);
                }
                reply
            }
            State::Panicked(text) => Err(C::panicked(&text)),
            other => {
                self.0 = other;
                Err(C::ended())
            }
        }
    }

    /// Returns the connection while no request is under way.
    pub fn idle(&mut self) -> Option<&mut C> {
        match &mut self.0 {
            State::Idle(connection) => Some(connection),
            State::Received(connection, reply) if is_usable_after::<C>(reply) => Some(connection),
            _ => None,
        }
    }

    /// Returns the connection, to be closed in order, if no request is under way and no reply is kept.
    pub fn into_idle(self) -> Option<C> {
        match self.0 {
            State::Idle(connection) => Some(connection),
            _ => None,
        }
    }

    /// Returns the time at which the request under way was started.
    pub fn running_since(&self) -> Option<Instant> {
        match self.0 {
            State::Running(_, since) => Some(since),
            _ => None,
        }
    }

    /// Returns `true` if a reply has been due for longer than `limit`.
    pub fn is_overdue(&self, limit: Duration) -> bool {
        self.running_since().is_some_and(|since| since.elapsed() > limit)
    }

    /// Returns `true` if the connection is gone.
    pub fn is_closed(&self) -> bool {
        matches!(self.0, State::Closed | State::Panicked(_))
    }
}

fn is_usable_after<C: Connection>(reply: &Result<C>) -> bool {
    reply.as_ref().err().is_none_or(|error| !C::is_ended_by(error))
}

impl<C: Connection> fmt::Debug for Resumable<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            State::Idle(_) => "Resumable(idle)",
            State::Running(..) => "Resumable(running)",
            State::Received(..) => "Resumable(received)",
            State::Closed | State::Panicked(_) => "Resumable(closed)",
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    struct Line;

    impl Connection for Line {
        type Reply = u8;
        type Error = &'static str;

        fn is_ended_by(error: &Self::Error) -> bool {
            *error == "ended"
        }

        fn ended() -> Self::Error {
            "ended"
        }

        fn panicked(text: &str) -> Self::Error {
            assert_eq!(text, "9 is no packet");
            "panicked: 9 is no packet"
        }
    }

    fn started(line: &mut Resumable<Line>) -> oneshot::Sender<Result<Line>> {
        let (reply, coming) = oneshot::channel();
        line.start(|connection| async move { (connection, coming.await.unwrap_or(Err("ended"))) });
        reply
    }

    #[tokio::test]
    async fn a_reply_outlives_the_future_that_waits_for_it() {
        let mut line = Resumable::new(Line);
        let reply = started(&mut line);
        let dropped = tokio::time::timeout(Duration::ZERO, line.receive()).await;
        assert!(dropped.is_err() && line.running_since().is_some() && line.idle().is_none());
        assert_eq!(line.take_reply(), Err("ended"), "none has come");
        reply.send(Ok(7)).unwrap();
        line.receive().await;
        assert_eq!(line.received(), Some(&mut Ok(7)));
        assert_eq!(line.take_reply(), Ok(7));
        assert!(line.idle().is_some() && !line.is_overdue(Duration::ZERO));
    }

    #[tokio::test]
    async fn an_error_that_ends_the_connection_closes_it() {
        for (error, closes) in [("refused", false), ("ended", true)] {
            let mut line = Resumable::new(Line);
            started(&mut line).send(Err(error)).unwrap();
            line.receive().await;
            assert_eq!(line.take_reply(), Err(error));
            assert_eq!(line.is_closed(), closes, "{error}");
            assert_eq!(line.into_idle().is_none(), closes, "{error}");
        }
    }

    #[tokio::test]
    async fn a_request_behind_another_closes_the_connection() {
        let mut line = Resumable::new(Line);
        let _first = started(&mut line);
        let _second = started(&mut line);
        assert!(line.is_closed(), "two replies could not be told apart");
    }

    #[tokio::test]
    async fn a_panic_closes_the_connection_and_is_its_error() {
        let mut line = Resumable::new(Line);
        line.start(|_| async { panic!("{} is no packet", 9) });
        line.receive().await;
        assert!(line.is_closed() && line.received().is_none() && line.idle().is_none());
        assert_eq!(line.take_reply(), Err("panicked: 9 is no packet"));
        assert_eq!(line.take_reply(), Err("ended"));
        line.start(|connection| async move { (connection, Ok(1)) });
        assert!(line.is_closed());

        let work = async { panic!("at work") };
        let error = on_runtime::<()>("test", "connect", work, &Handle::current())
            .await
            .unwrap_err();
        assert!(error.is_transient());
        assert!(crate::spi::chain(&error).contains("at work"), "{error:?}");
    }
}
