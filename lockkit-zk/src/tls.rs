//! Encrypted connections to servers.

use lockkit_core::spi::tls::{self, Handshake};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use zookeeper_client::Error as ZkError;

use crate::{
    ZkConfig,
    config::Tls,
    error::{Failure, Result},
    relay::Relay,
};

/// The port that a server speaks TLS on.
const PORT: &str = "a `secureClientPort`";

/// A connection on which the handshake is done.
pub(crate) type Secured = TlsStream<TcpStream>;

/// Whom the client trusts, and who it is.
#[derive(Clone)]
pub(crate) struct Trust(tls::Trust);

impl Trust {
    /// Returns `None` if connections are not encrypted.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`](lockkit_core::Error::InvalidOptions) names the option whose file cannot be used.
    pub(crate) fn new(config: &ZkConfig) -> lockkit_core::Result<Option<Self>> {
        if config.tls == Tls::Off {
            return Ok(None);
        }
        let identity = config.cert.as_deref().zip(config.key.as_deref());
        let trust = tls::Trust::new(config.tls == Tls::Verify, config.ca.as_deref(), identity)?;
        Ok(Some(Self(trust)))
    }

    /// Connects to this server, and shakes hands with it. Nothing of a session is sent.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub(crate) async fn reach(&self, host: &str) -> Result<Relay> {
        let name = tls::server_name(host).map_err(|reason| Failure::refused(reason, true))?;
        let stream = TcpStream::connect(host).await.map_err(|error| {
            tracing::debug!(host, %error, "a server cannot be reached");
            // As the client library says of servers without TLS.
            Failure::Server(ZkError::NoHosts)
        })?;
        // Each request is one small packet.
        let _ = stream.set_nodelay(true);
        let (config, handshake) = self
            .0
            .handshake(host, PORT, &[])
            .map_err(|error| Failure::refused(error.to_string(), true))?;
        let stream = TlsConnector::from(config).connect(name, stream).await;
        match stream {
            Ok(stream) => Relay::new(Peer(handshake), stream, self.0.provider().secure_random).await,
            Err(error) => {
                let (reason, permanent) = handshake.failure(&error);
                Err(Failure::refused(reason, permanent))
            }
        }
    }
}

/// The other end of a connection, for what its failures mean.
#[derive(Debug)]
pub(crate) struct Peer(Handshake);

impl Peer {
    /// Returns what this error of a connection says on which the handshake is done.
    pub(crate) fn failure_on_standing(&self, error: &std::io::Error) -> Failure {
        match self.0.refused(error) {
            Some((reason, permanent)) => Failure::refused(reason, permanent),
            None => {
                tracing::debug!(host = self.0.host(), %error, "a connection over TLS is lost");
                Failure::Server(ZkError::ConnectionLoss)
            }
        }
    }
}
