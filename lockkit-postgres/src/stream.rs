//! The bytes of a connection.

use std::{
    io,
    pin::Pin,
    sync::{Arc, atomic::AtomicI32},
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
    replies::Replies,
};

pub(crate) trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

/// A connection's bytes, of which those of the server pass if they keep to the bounds.
pub(crate) struct Stream {
    bytes: Box<dyn Bytes>,
    replies: Replies,
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
        // Others than the server's account may listen at its port while it is down, but not in its directory.
        let is_trusted = matches!(options.address, Address::Socket(_))
            || matches!(options.ssl_mode, SslMode::VerifyCa | SslMode::VerifyFull);
        let replies = Replies::new(process.clone(), is_trusted);
        Ok((Self { bytes, replies }, process))
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

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.bytes).poll_read(cx, buffer))?;
        this.replies.look_at(&buffer.filled()[before..])?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.bytes).poll_write(cx, bytes))?;
        this.replies.note_request();
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().bytes).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().bytes).poll_shutdown(cx)
    }
}
