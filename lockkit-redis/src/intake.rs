//! The bounds on what a server may send, so that none keeps its client from anything else, or fills its memory.
//!
//! The client library reads a connection for as long as there is something to read, whatever it is. So what it reads passes here.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};

use lockkit_core::spi::Mutex;
use redis::RedisError;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    runtime::Handle,
    task::{JoinHandle, yield_now},
};

/// The number of bytes that are read before others of the runtime have their turn: some hundred replies.
const TURN: usize = 16 * 1024;
/// The most bytes for one request. A semaphore with ten thousand holders is described in less than half of it.
const MOST: usize = 8 * 1024 * 1024;
/// The bytes for which a line counts beside its own: a value has one or two, and takes more in memory than on the wire.
const PER_LINE: usize = 40;
/// The most pushes for one request. Whoever is told something asks next, within a turn or so. Only a client that does nothing else, and
/// watches a lock or may not unsubscribe, comes to see so many of an honest server, after a long time. It loses nothing with the connection.
const MOST_PUSHES: usize = 10_000;

/// The most bytes of an error that is the server's only word.
const MOST_FIRST_WORDS: usize = 256;

const TOO_MUCH: &str = "the server has sent more than 8 MiB for one request, or for none";
const ENDLESS: &str = "the server sends pushes without end that nobody asked for";

/// The account of what a server sends on one connection.
#[derive(Debug, Default)]
pub(crate) struct Intake {
    /// The number of bytes since the last request was written, or the last reply was complete. The client library may still keep them.
    kept: AtomicUsize,
    /// The number of pushes since the last request was written.
    pushes: AtomicUsize,
    excess: OnceLock<&'static str>,
    /// The server's words so far, while they are one error and nothing else: `-ERR max number of clients reached`.
    first_words: Mutex<Vec<u8>>,
}

impl Intake {
    /// Notes that a push is complete.
    pub(crate) fn note_push(&self) {
        if self.pushes.fetch_add(1, Ordering::Relaxed) >= MOST_PUSHES {
            self.excess.get_or_init(|| ENDLESS);
        }
    }

    /// Notes that a reply is complete. Another request may have been sent before it, whose reply comes next.
    pub(crate) fn note_reply(&self) {
        self.kept.store(0, Ordering::Relaxed);
    }

    /// Returns the bound that the server did not keep, for which the connection ends.
    pub(crate) fn excess(&self) -> Option<&'static str> {
        self.excess.get().copied()
    }

    /// Returns this error of a request, or why its connection has ended.
    pub(crate) fn explain(&self, error: RedisError) -> RedisError {
        if let Some(excess) = self.excess()
            && error.is_connection_dropped()
        {
            return ended(excess).into();
        }
        if error.is_connection_dropped() || error.is_io_error() {
            return self.refusal().unwrap_or(error);
        }
        error
    }

    /// Returns the error with which the server has taken leave, without having been asked for anything.
    fn refusal(&self) -> Option<RedisError> {
        let words = self.first_words.lock().clone();
        if !words.ends_with(b"\r\n") {
            return None;
        }
        redis::parse_redis_value(&words).ok()?.extract_error().err()
    }

    /// Keeps what the server says first. Returns `false` once it has said something else than one error.
    fn note_first_words(&self, bytes: &[u8]) -> bool {
        let mut words = self.first_words.lock();
        words.extend_from_slice(bytes);
        let lines = words.split_inclusive(|byte| *byte == b'\n').count();
        let is_error = words.first().is_none_or(|first| *first == b'-');
        let is_one = is_error && lines <= 1 && words.len() <= MOST_FIRST_WORDS;
        if !is_one {
            *words = Vec::new();
        }
        is_one
    }

    fn note_read(&self, bytes: &[u8]) {
        let lines = bytes.split(|byte| *byte == b'\n').count() - 1;
        let weight = bytes.len() + lines * PER_LINE;
        let kept = self
            .kept
            .fetch_add(weight, Ordering::Relaxed)
            .saturating_add(weight);
        if kept > MOST {
            self.excess.get_or_init(|| TOO_MUCH);
        }
    }

    fn note_request(&self) {
        self.kept.store(0, Ordering::Relaxed);
        self.pushes.store(0, Ordering::Relaxed);
    }

    fn check(&self) -> io::Result<()> {
        self.excess().map_or(Ok(()), |excess| Err(ended(excess)))
    }
}

/// Returns the error that a reader gets in the place of more: of a kind with which a connection ends for the client library.
fn ended(excess: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, excess)
}

/// A stream that is read in turns with all else that the runtime has to do.
pub(crate) struct BoundedStream<S> {
    stream: S,
    intake: Arc<Intake>,
    runtime: Handle,
    /// The number of bytes that may still be read in this turn.
    left: usize,
    /// The server has said something else than an error.
    is_in: bool,
    /// Resolves when others have had their turn. That of a task alone would not do: a future that waits for a reply reads, too.
    others: Option<JoinHandle<()>>,
}

impl<S> BoundedStream<S> {
    /// Wraps a stream that is read on this runtime.
    pub(crate) fn new(stream: S, intake: Arc<Intake>) -> Self {
        Self {
            stream,
            intake,
            runtime: Handle::current(),
            left: TURN,
            is_in: false,
            others: None,
        }
    }

    fn note(&mut self, read: &[u8]) {
        if !self.is_in {
            self.is_in = !self.intake.note_first_words(read);
        }
    }
}

impl<S: AsyncRead + Unpin> BoundedStream<S> {
    /// Reads what the server has said before it closed the connection, in case that nobody has.
    fn hear_it_out(&mut self, cx: &mut Context<'_>) {
        let mut bytes = [0; MOST_FIRST_WORDS];
        let mut said = ReadBuf::new(&mut bytes);
        if !self.is_in && Pin::new(&mut self.stream).poll_read(cx, &mut said).is_ready() {
            self.note(said.filled());
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BoundedStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.intake.check()?;
        if let Some(others) = &mut this.others {
            // An error means that the runtime has ended, and the stream ends with it.
            let _ = ready!(Pin::new(others).poll(cx));
            (this.others, this.left) = (None, TURN);
        }
        let room = buf.remaining().min(this.left);
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(room));
        let polled = Pin::new(&mut this.stream).poll_read(cx, &mut part);
        let read = part.filled().len();
        if polled.is_pending() {
            this.left = TURN;
            return Poll::Pending;
        }
        this.note(part.filled());
        this.intake.note_read(part.filled());
        buf.advance(read);
        this.left -= read;
        if this.left == 0 {
            this.others = Some(this.runtime.spawn(yield_now()));
        }
        this.intake.check()?;
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for BoundedStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.stream).poll_write(cx, buf));
        if written.is_err() {
            this.hear_it_out(cx);
        }
        let written = written?;
        this.intake.note_request();
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
