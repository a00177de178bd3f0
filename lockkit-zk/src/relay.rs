//! The way of the client library's bytes to a server and back.
//!
//! lockkit has the connection to the server, with TLS or without, and the client library connects to a port of this process, since it can
//! connect to nothing else than a TCP port. What it lacks is done on the way:
//!
//! - *Bounds.* The library reads for as long as there is something to read, whatever else its runtime has to do, makes room for whatever
//!   length a packet promises, and has a request for each event that nobody waits for. Here one task reads from the server and writes to
//!   the library, in turns with all else of the runtime, and ends the connection at the bounds.
//! - *TLS.* That of the library brings a second cryptographic provider, cannot do without verification, panics at some host names, and says
//!   nothing of why it failed.
//!
//! That port is on the loopback interface, where any process of the host can connect. The relay serves only the one that asks
//! for a session timeout which nobody else knows, and then asks the server for the real one. The password of a user does not
//! pass that port: the library sends a placeholder, and the relay replaces it.

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
    net::SocketAddr,
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _, stream::FuturesUnordered};
use tokio::{
    io::{
        AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
        BufWriter, copy, split,
    },
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::coop::consume_budget,
    time::timeout as within,
};
use zookeeper_client::Error as ZkError;

use crate::{
    connection::Route,
    error::{Failure, Result},
};

/// The credentials that the library sends to this process.
const PLACEHOLDER: &str = "user:password";

/// The connections that may come before the library's, and their guesses.
const MOST_STRANGERS: usize = 64;
/// The longest first packet. A request for a session has 45 bytes.
const LONGEST_FIRST: usize = 1_024;
/// The place of the session timeout in that packet: behind a version and the id of a transaction.
const TIMEOUT_AT: usize = 4 + 8;
/// The request that has the credentials.
const AUTH: i32 = 100;
/// The longest time to wait for what a server has to say that takes no more requests.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The longest packet of a server. The list of a directory with ten thousand contenders has a tenth of it.
const LONGEST: usize = 8 * 1024 * 1024;
/// The bytes for which an event counts beside its own: the library has a request for each that nobody waits for.
const PER_EVENT: usize = 256;
/// The bytes of events that a reply gives leave for: those of one, also with the longest path that a lock has.
const PER_REPLY: usize = 4 * 1024;
/// The most bytes of events beyond those that replies gave leave for.
const MOST_EVENTS: usize = 16 * 1024 * 1024;
/// The most bytes of events that may come at once. Each watch has one event, and was set by a request with its reply; so these are for those of
/// two hundred thousand waiters at once, and of forty thousand with the longest paths.
const MOST_AT_ONCE: usize = 64 * 1024 * 1024;
/// The number in the place of that of a request with which an event begins.
const EVENT: [u8; 4] = (-1_i32).to_be_bytes();

/// A server does not keep to the bounds.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "the server has sent a packet of more than 8 MiB, perhaps the list of a directory with too many nodes, or more events than anybody \
     waits for"
)]
struct TooMuch;

pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// What an error of a connection says; `None` if the library says more when it finds its own closed.
type Explain = Box<dyn Fn(&io::Error) -> Option<Failure> + Send + Sync>;

/// A connection to a server, and the port of this process from which it is used.
pub(crate) struct Relay {
    explain: Explain,
    server: Box<dyn Stream>,
    listener: TcpListener,
    port: SocketAddr,
    /// The timeout that the library has to ask for in place of its session timeout, in ms.
    pass: i32,
}

impl Relay {
    /// Connects to this server without TLS. Nothing of a session is sent.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub(crate) async fn plain(host: &str) -> Result<Self> {
        let server = Box::new(connect(host).await?);
        let host = host.to_owned();
        let explain = move |error: &io::Error| {
            tracing::debug!(%host, %error, "a connection is lost");
            None
        };
        // Keyed at random by the system, so that nobody guesses it.
        let [a, b, c, d, ..] = RandomState::new().hash_one(0).to_be_bytes();
        Self::new(server, Box::new(explain), [a, b, c, d]).await
    }

    /// Makes the port for a connection, and `pass` what the library shows there.
    pub(crate) async fn new(server: Box<dyn Stream>, explain: Explain, pass: [u8; 4]) -> Result<Self> {
        let local = |error: io::Error| {
            let reason = format!("no port of this process for the connection to the server: {error}");
            Failure::refused(reason, false)
        };
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(local)?;
        let port = listener.local_addr().map_err(local)?;
        Ok(Self {
            explain,
            server,
            listener,
            port,
            // Never one that somebody would ask for, since they are a day long at most.
            pass: (i32::from_be_bytes(pass) & i32::MAX) | (1 << 30),
        })
    }

    /// Returns the way for the library, on which the server is asked for this session timeout with these credentials.
    pub(crate) fn route(self, timeout: Duration, credentials: Option<String>) -> Route {
        Route {
            host: self.port.to_string(),
            timeout: Duration::from_millis(u64::from(self.pass.unsigned_abs())),
            credentials: credentials.is_some().then(|| PLACEHOLDER.to_owned()),
            relay: self.run(timeout, credentials).boxed(),
        }
    }

    /// Relays until either end closes its connection. Dropped, it closes both, as a lost network does.
    async fn run(self, timeout: Duration, credentials: Option<String>) -> Result<()> {
        let failed = |error: io::Error| {
            if error
                .get_ref()
                .is_some_and(<dyn std::error::Error + Send + Sync>::is::<TooMuch>)
            {
                return Err(Failure::refused(TooMuch.to_string(), false));
            }
            (self.explain)(&error).map_or(Ok(()), Err)
        };
        let (mut library, mut first) = match admit(self.listener, self.pass).await {
            Ok(Some(admitted)) => admitted,
            Ok(None) => {
                let reason = "others keep connecting to the port of this process for its server";
                return Err(Failure::refused(reason.to_owned(), false));
            }
            Err(error) => return failed(error),
        };
        let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        first[TIMEOUT_AT..TIMEOUT_AT + 4].copy_from_slice(&timeout.to_be_bytes());
        let (mut from_library, mut to_library) = library.split();
        let (mut from_server, mut to_server) = split(self.server);
        let (answers, answered) = oneshot::channel();
        let mut requests = Box::pin(async {
            to_server.write_all(&packet(&first)).await?;
            to_server.flush().await?;
            if let Some(credentials) = &credentials {
                let auth = receive(&mut from_library).await?;
                // A server that meets it before the session has begun may close the connection: one with TLS, which reads by Netty.
                let _ = answered.await;
                to_server
                    .write_all(&packet(&with_credentials(&auth, credentials)?))
                    .await?;
                to_server.flush().await?;
            }
            copy(&mut from_library, &mut to_server).await?;
            to_server.shutdown().await
        });
        let mut replies = Box::pin(pass_on(&mut from_server, &mut to_library, answers));
        tokio::select! {
            ended = &mut replies => ended.or_else(failed),
            sent = &mut requests => match sent {
                Ok(()) => Ok(()),
                // A server that minds the certificate says so before it closes the connection.
                Err(error) => match within(LAST_WORDS, replies).await {
                    Ok(Err(last_words)) => failed(last_words),
                    _ => failed(error),
                },
            },
        }
    }
}

/// Connects to this server.
pub(crate) async fn connect(host: &str) -> Result<TcpStream> {
    let stream = TcpStream::connect(host).await.map_err(|error| {
        tracing::debug!(host, %error, "a server cannot be reached");
        // As the client library says.
        Failure::Server(ZkError::NoHosts)
    })?;
    // Each request is one small packet.
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

/// Passes on packets until the server ends its connection, or does not keep to the bounds. Says when the first one has come.
async fn pass_on(
    server: impl AsyncRead + Unpin,
    library: impl AsyncWrite + Unpin,
    answers: oneshot::Sender<()>,
) -> io::Result<()> {
    let mut answers = Some(answers);
    let (mut server, mut library) = (BufReader::new(server), BufWriter::new(library));
    let mut leave = MOST_EVENTS;
    loop {
        // Others of the runtime have their turn.
        consume_budget().await;
        // What is there is passed on together, and does not wait for more.
        if server.buffer().len() < 2 * EVENT.len() {
            library.flush().await?;
        }
        if server.fill_buf().await?.is_empty() {
            return Ok(());
        }
        let head = server.read_u32().await?;
        if let Some(answers) = answers.take() {
            let _ = answers.send(());
        }
        let (length, mut number) = (head as usize, [0; EVENT.len()]);
        let known = length.min(number.len());
        server.read_exact(&mut number[..known]).await?;
        let left = if known == number.len() && number == EVENT {
            leave.checked_sub(length.saturating_add(PER_EVENT))
        } else {
            Some(MOST_AT_ONCE.min(leave + PER_REPLY))
        };
        let Some(left) = left.filter(|_| length <= LONGEST) else {
            tracing::warn!("a connection is given up: {TooMuch}");
            library.flush().await?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, TooMuch));
        };
        leave = left;
        library.write_u32(head).await?;
        library.write_all(&number[..known]).await?;
        let mut rest = length - known;
        while rest > 0 {
            if server.buffer().is_empty() {
                library.flush().await?;
            }
            let piece = server.fill_buf().await?;
            if piece.is_empty() {
                return Ok(());
            }
            let passed = piece.len().min(rest);
            library.write_all(&piece[..passed]).await?;
            server.consume(passed);
            rest -= passed;
        }
    }
}

/// Waits for the one who knows the pass. Returns its connection and its first packet; `None` if too many others came.
async fn admit(listener: TcpListener, pass: i32) -> io::Result<Option<(TcpStream, Vec<u8>)>> {
    let mut candidates = FuturesUnordered::new();
    let mut came = 0;
    loop {
        tokio::select! {
            accepted = listener.accept(), if came < MOST_STRANGERS => {
                came += 1;
                let (mut stream, _) = accepted?;
                candidates.push(async move {
                    let first = receive(&mut stream).await.ok()?;
                    (first.get(TIMEOUT_AT..TIMEOUT_AT + 4) == Some(&pass.to_be_bytes())).then_some((stream, first))
                });
            }
            candidate = candidates.next(), if !candidates.is_empty() => {
                if let Some(Some((stream, first))) = candidate {
                    let _ = stream.set_nodelay(true);
                    return Ok(Some((stream, first)));
                }
            }
            else => return Ok(None),
        }
    }
}

/// Returns this request for authentication with these credentials in it.
fn with_credentials(auth: &[u8], credentials: &str) -> io::Result<Vec<u8>> {
    let header: Option<&[u8; 8]> = auth.first_chunk();
    let Some(header) = header.filter(|header| header[4..] == AUTH.to_be_bytes()) else {
        return Err(io::Error::other("the client library has sent something else"));
    };
    let mut request = header.to_vec();
    request.extend(0_i32.to_be_bytes()); // kind
    request.extend(packet(b"digest"));
    request.extend(packet(credentials.as_bytes()));
    Ok(request)
}

/// Returns these bytes, which are short, with their length in front.
fn packet(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], body].concat()
}

async fn receive(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let length = stream.read_u32().await? as usize;
    if length > LONGEST_FIRST {
        return Err(io::Error::other("a packet that is too long"));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASS: i32 = 0x5eed_cafe;
    /// Longer than a busy machine takes.
    const LONG: Duration = Duration::from_secs(20);

    /// Returns the first packet of a client that asks for this session timeout.
    fn first(timeout: i32) -> Vec<u8> {
        let mut body = vec![0; 44];
        body[TIMEOUT_AT..TIMEOUT_AT + 4].copy_from_slice(&timeout.to_be_bytes());
        packet(&body)
    }

    async fn sends(port: SocketAddr, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(port).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    #[tokio::test]
    async fn only_the_one_with_the_pass_is_admitted() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap();
        let admitted = tokio::spawn(admit(listener, PASS));
        // One is silent, and others guess, or send anything.
        let silent = TcpStream::connect(port).await.unwrap();
        for bytes in [first(PASS - 1), first(0), vec![0xff; 64], packet(b"short")] {
            let mut stranger = sends(port, &bytes).await;
            let mut end = Vec::new();
            let read = within(LONG, stranger.read_to_end(&mut end)).await;
            let read = read.expect("a stranger's connection is closed");
            assert!(read.is_err() || end.is_empty(), "it is told nothing");
        }
        assert!(!admitted.is_finished());
        let library = sends(port, &first(PASS)).await;
        let admitted = within(LONG, admitted).await.expect("it is admitted");
        let (stream, body) = admitted.unwrap().unwrap().unwrap();
        assert_eq!(stream.peer_addr().unwrap(), library.local_addr().unwrap());
        assert_eq!(packet(&body), first(PASS));
        drop(silent);
        let refused = TcpStream::connect(port).await;
        assert!(refused.is_err(), "one connection, and no more");
    }

    #[tokio::test]
    async fn guesses_are_counted() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap();
        let admitted = tokio::spawn(admit(listener, PASS));
        let mut strangers = Vec::new();
        for guess in 0..i32::try_from(MOST_STRANGERS).unwrap() {
            strangers.push(sends(port, &first(guess)).await);
        }
        let admitted = within(LONG, admitted).await.expect("an end of the guesses");
        assert!(admitted.unwrap().unwrap().is_none());
    }

    fn event() -> Vec<u8> {
        let mut event = [-1, -1, -1, 0, 3, 3, 2].map(i32::to_be_bytes).concat();
        event.extend(b"/a");
        packet(&event)
    }

    /// Returns how passing these bytes on ends, and how much was passed on.
    async fn passed(bytes: &[u8]) -> (io::Result<()>, usize) {
        let mut library = Vec::new();
        let ended = pass_on(bytes, &mut library, oneshot::channel().0).await;
        assert!(bytes.starts_with(&library), "as they are");
        (ended, library.len())
    }

    #[tokio::test]
    async fn what_is_honest_passes() {
        // Each reply gives leave for the event of a watch.
        let asked = [packet(&[0; 16]), event()].concat().repeat(100_000);
        let long_path = packet(&[&EVENT[..], &[0; 1024]].concat());
        let far = [packet(&[0; 16]), long_path.clone()].concat().repeat(20_000);
        let at_once = [packet(&[0; 16]).repeat(20_000), long_path.repeat(20_000)].concat();
        let long = packet(&vec![7; 1024 * 1024]);
        let short = [packet(&[]), packet(&[1]), packet(&[0xff; 3])].concat();
        let half = packet(&[7; 100])[..50].to_vec();
        for bytes in [asked, far, at_once, event().repeat(10_000), long, short, half] {
            let (ended, count) = passed(&bytes).await;
            assert!(ended.is_ok() && count == bytes.len(), "{ended:?}, {count}");
        }
    }

    #[tokio::test]
    async fn what_nobody_waits_for_ends_the_connection() {
        let long = [&u32::MAX.to_be_bytes()[..], &[0; 64]].concat();
        let spared = [packet(&[0; 16]).repeat(100_000), event().repeat(300_000)].concat();
        for bytes in [event().repeat(100_000), spared, long] {
            let (ended, count) = passed(&bytes).await;
            assert!(ended.is_err() && count < bytes.len(), "{ended:?}, {count}");
        }
    }

    #[test]
    fn the_placeholder_is_replaced_in_authentication_alone() {
        let mut request = 7_i32.to_be_bytes().to_vec();
        request.extend(AUTH.to_be_bytes());
        request.extend(0_i32.to_be_bytes());
        request.extend(packet(b"digest"));
        let prefix = request.clone();
        request.extend(packet(PLACEHOLDER.as_bytes()));
        let replaced = with_credentials(&request, "me:secret").unwrap();
        assert_eq!(replaced, [prefix, packet(b"me:secret")].concat());
        request[7] ^= 1;
        assert!(with_credentials(&request, "me:secret").is_err());
        assert!(with_credentials(&request[..6], "me:secret").is_err());
    }
}
