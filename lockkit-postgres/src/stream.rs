//! The bytes of a connection, and the process that the server says it is.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::TcpStream,
};

use crate::{
    config::{Address, SslMode},
    connection::Options,
    error::Failure,
};

pub(crate) trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

/// A connection's bytes. The client library keeps to itself which process the server said it is, so it is read on the way.
pub(crate) struct Stream {
    bytes: Box<dyn Bytes>,
    greeting: Option<Greeting>,
}

/// The request for an encrypted connection: its length, and the number that stands for it.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];

impl Stream {
    /// Connects, and encrypts the connection if the options say so. Returns it with the cell in which the id of the server's process
    /// will be.
    pub(crate) async fn open(options: &Options) -> Result<(Self, Arc<AtomicI32>), Failure> {
        let bytes = match &options.address {
            #[cfg(unix)]
            Address::Socket(path) => Box::new(tokio::net::UnixStream::connect(path).await?) as Box<dyn Bytes>,
            #[cfg(not(unix))]
            Address::Socket(_) => {
                return Err(
                    io::Error::new(io::ErrorKind::Unsupported, "this system has no Unix sockets").into(),
                );
            }
            Address::Tcp(host, port) => match options.ssl_mode {
                SslMode::Disable => Box::new(plain(options, host, tcp(host, *port).await?)),
                mode => match encrypted(options, host, *port).await {
                    // The mode says that an encrypted connection is only preferred.
                    Err(_) if mode == SslMode::Prefer => {
                        Box::new(plain(options, host, tcp(host, *port).await?))
                    }
                    opened => opened?,
                },
            },
        };
        let process = Arc::new(AtomicI32::new(0));
        let greeting = Some(Greeting::new(process.clone()));
        Ok((Self { bytes, greeting }, process))
    }
}

async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((host, port)).await?;
    // Each request is one small packet.
    stream.set_nodelay(true)?;
    SockRef::from(&stream).set_tcp_keepalive(&keepalive())?;
    Ok(stream)
}

/// Uses a connection as it is.
fn plain(options: &Options, host: &str, stream: TcpStream) -> TcpStream {
    if options.login.get_password().is_some() {
        let peer = stream.peer_addr().ok();
        options
            .unencrypted
            .note(crate::NAME, host, peer, "sslmode=verify-full");
    }
    stream
}

/// Asks a silent peer now and then whether it still knows the connection: a machine that was started anew, or has taken another's place,
/// does not. One that does not reply may be cut off for a while, which no lease is to end for.
fn keepalive() -> TcpKeepalive {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(5))
        .with_interval(Duration::from_secs(5));
    #[cfg(target_os = "linux")]
    let keepalive = keepalive.with_retries(100);
    keepalive
}

/// Asks the server for an encrypted connection. Reads the one byte of its reply and no more: what came behind it would not have been
/// encrypted.
async fn encrypted(options: &Options, host: &str, port: u16) -> Result<Box<dyn Bytes>, Failure> {
    let mut stream = tcp(host, port).await?;
    stream.write_all(&SSL_REQUEST).await?;
    match stream.read_u8().await? {
        b'S' => shake_hands(options, host, stream).await,
        b'N' if options.ssl_mode == SslMode::Prefer => Ok(Box::new(plain(options, host, stream))),
        _ => Err(Failure::Refused(Box::new(lockkit_core::Error::permanent(
            crate::NAME,
            "connect",
            format!(
                "the server has no encrypted connections, and sslmode={} asks for one; switch on `ssl` at the server",
                options.ssl_mode
            ),
        )))),
    }
}

#[cfg(feature = "tls")]
async fn shake_hands(options: &Options, host: &str, stream: TcpStream) -> Result<Box<dyn Bytes>, Failure> {
    match &options.trust {
        Some(trust) => Ok(Box::new(trust.shake_hands(host, stream).await?)),
        None => Err(Failure::Ended),
    }
}

#[cfg(not(feature = "tls"))]
async fn shake_hands(_: &Options, _: &str, _: TcpStream) -> Result<Box<dyn Bytes>, Failure> {
    std::future::ready(Err(Failure::Ended)).await
}

/// Reads the messages up to the one that has the id of the server's process. Each is a letter, a length that counts itself, and so many
/// bytes.
struct Greeting {
    process: Arc<AtomicI32>,
    /// The message under way, as far as it is of interest.
    begun: Vec<u8>,
    /// The bytes of a message that are still to come and of no interest.
    skipped: usize,
}

impl Greeting {
    const KEY: u8 = b'K';
    const READY: u8 = b'Z';

    fn new(process: Arc<AtomicI32>) -> Self {
        Self {
            process,
            begun: Vec::new(),
            skipped: 0,
        }
    }

    /// Returns `true` once there is nothing more to read.
    fn read(&mut self, bytes: &[u8]) -> bool {
        for &byte in bytes {
            if self.skipped > 0 {
                self.skipped -= 1;
                continue;
            }
            self.begun.push(byte);
            match self.begun[..] {
                [Self::KEY, _, _, _, _, a, b, c, d] => {
                    self.process
                        .store(i32::from_be_bytes([a, b, c, d]), Ordering::Release);
                    return true;
                }
                [Self::READY, _, _, _, _] => return true,
                [kind, a, b, c, d] if kind != Self::KEY => {
                    let length = u32::from_be_bytes([a, b, c, d]);
                    self.skipped = usize::try_from(length).unwrap_or(0).saturating_sub(4);
                    self.begun.clear();
                }
                _ => {}
            }
        }
        false
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.bytes).poll_read(cx, buffer))?;
        if let Some(greeting) = &mut this.greeting
            && greeting.read(&buffer.filled()[before..])
        {
            this.greeting = None;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().bytes).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().bytes).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().bytes).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_is_read_however_the_bytes_arrive() {
        // An authentication, a parameter, the key, and that the server is ready.
        let mut bytes = vec![b'R', 0, 0, 0, 8, 0, 0, 0, 0];
        bytes.extend([b'S', 0, 0, 0, 8, b'K', 0, b'Z', 0]);
        bytes.extend([b'K', 0, 0, 0, 12, 0, 0, 0x30, 0x39, 1, 2, 3, 4]);
        bytes.extend([b'Z', 0, 0, 0, 5, b'I']);
        for size in 1..=bytes.len() {
            let process = Arc::new(AtomicI32::new(0));
            let mut greeting = Greeting::new(process.clone());
            assert!(bytes.chunks(size).any(|chunk| greeting.read(chunk)), "{size}");
            assert_eq!(process.load(Ordering::Acquire), 12_345, "{size}");
        }
        let process = Arc::new(AtomicI32::new(0));
        assert!(Greeting::new(process.clone()).read(&[b'Z', 0, 0, 0, 5, b'I']));
        assert_eq!(process.load(Ordering::Acquire), 0, "it was not said");
    }
}
