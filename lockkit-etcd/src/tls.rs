//! Encrypted connections to members.

use std::{
    io,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
};

use lockkit_core::spi::tls;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    EtcdConfig,
    config::Tls,
    error::{Failure, Result},
};

/// The port that a member speaks TLS on.
const PORT: &str = "one of the `https` among the member's `listen-client-urls`";
/// The protocol that is spoken over TLS: HTTP/2.
const PROTOCOL: &[u8] = b"h2";

/// Whom the client trusts, and who it is.
#[derive(Clone)]
pub(crate) struct Trust(tls::Trust);

impl Trust {
    /// Returns `None` if connections are not encrypted.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`](lockkit_core::Error::InvalidOptions) names the option whose file cannot be used.
    pub(crate) fn new(config: &EtcdConfig) -> lockkit_core::Result<Option<Self>> {
        if config.tls == Tls::Off {
            return Ok(None);
        }
        let identity = config.cert.as_deref().zip(config.key.as_deref());
        let trust = tls::Trust::new(config.tls == Tls::Verify, config.ca.as_deref(), identity)?;
        Ok(Some(Self(trust)))
    }

    /// Shakes hands with this member.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub(crate) async fn shake_hands(&self, host: &str, stream: TcpStream) -> Result<Secured> {
        let name = tls::server_name(host).map_err(|reason| Failure::refused(reason, true))?;
        let (config, handshake) = self
            .0
            .handshake(host, PORT, &[PROTOCOL])
            .map_err(|error| Failure::refused(error.to_string(), true))?;
        match TlsConnector::from(config).connect(name, stream).await {
            Ok(stream) => Ok(Secured {
                stream,
                handshake,
                fault: Arc::default(),
            }),
            Err(error) => {
                let (reason, permanent) = handshake.failure(&error);
                Err(Failure::refused(reason, permanent))
            }
        }
    }
}

/// The fault of TLS on a connection, once it is known.
pub(crate) type Fault = Arc<OnceLock<Failure>>;

/// A connection on which the handshake is done. With TLS 1.3, a server that minds the client's certificate says so only now, and those
/// who use the connection pass on the words of that alone. So it notes what they mean.
pub(crate) struct Secured {
    stream: TlsStream<TcpStream>,
    handshake: tls::Handshake,
    fault: Fault,
}

impl Secured {
    pub(crate) fn fault(&self) -> Fault {
        self.fault.clone()
    }

    /// Reads why the server has closed the connection, if it has said so: a write may fail before that is read, and then nobody reads.
    /// Ready at the end.
    fn poll_last_words(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut buf = [0; 256];
        loop {
            let mut buf = ReadBuf::new(&mut buf);
            match Pin::new(&mut *self).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {}
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

impl AsyncRead for Secured {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if let Poll::Ready(Err(error)) = &read
            && let Some((reason, permanent)) = self.handshake.refused(error)
        {
            let _ = self.fault.set(Failure::refused(reason, permanent));
        }
        read
    }
}

impl AsyncWrite for Secured {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        if let Poll::Ready(Err(_)) = &written {
            // The server has closed the connection, so that the end of what it sent comes.
            ready!(self.poll_last_words(cx));
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        if let Poll::Ready(Err(_)) = &flushed {
            ready!(self.poll_last_words(cx));
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
