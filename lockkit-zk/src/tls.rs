//! Encrypted connections to servers.

use std::io;

use lockkit_core::spi::tls::{self, Handshake};
use tokio_rustls::TlsConnector;
use zookeeper_client::Error as ZkError;

use crate::{
    ZkConfig,
    config::Tls,
    error::{Failure, Result},
    relay::{self, Relay},
};

/// The port that a server speaks TLS on.
const PORT: &str = "a `secureClientPort`";

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
        let stream = relay::connect(host).await?;
        let (config, handshake) = self
            .0
            .handshake(host, PORT, &[])
            .map_err(|error| Failure::refused(error.to_string(), true))?;
        let stream = TlsConnector::from(config).connect(name, stream).await;
        match stream {
            Ok(stream) => {
                let mut pass = [0; 4];
                let random = self.0.provider().secure_random.fill(&mut pass);
                random.map_err(|_| Failure::refused("no random numbers".to_owned(), false))?;
                let peer = Peer(handshake);
                let explain = move |error: &io::Error| Some(peer.failure_on_standing(error));
                Relay::new(Box::new(stream), Box::new(explain), pass).await
            }
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
    pub(crate) fn failure_on_standing(&self, error: &io::Error) -> Failure {
        match self.0.refused(error) {
            Some((reason, permanent)) => Failure::refused(reason, permanent),
            None => {
                tracing::debug!(host = self.0.host(), %error, "a connection over TLS is lost");
                Failure::Server(ZkError::ConnectionLoss)
            }
        }
    }
}
