//! Connections over TLS: whom a client trusts, who it is, and what a failed handshake means.

use std::{error::Error as StdError, io, sync::Arc};

use lockkit_core::{
    Error, Result,
    spi::tls::{self, server_name},
};
use redis::RedisError;
use rustls::{CertificateError, Error as TlsError};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    RedisConfig,
    error::{NAME, failed},
};

/// The port that a server speaks TLS on.
const PORT: &str = "a `tls-port`";

/// The authorities that a client trusts, and its own certificate. Files are read once, when it is made.
#[derive(Clone)]
pub(crate) struct Trust(tls::Trust);

impl Trust {
    /// Reads the files that the config names.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] names the option whose file cannot be used.
    pub(crate) fn new(config: &RedisConfig) -> Result<Self> {
        let identity = config.cert.as_deref().zip(config.key.as_deref());
        Ok(Self(tls::Trust::new(true, config.ca.as_deref(), identity)?))
    }

    /// Shakes hands with the server at this `host:port`.
    ///
    /// # Errors
    /// A permanent one for a certificate that is not accepted, here or there.
    pub(crate) async fn shake_hands(&self, host: &str, stream: TcpStream) -> Result<TlsStream<TcpStream>> {
        let permanent = |reason: String| Error::permanent(NAME, "connect", reason);
        let name = server_name(host).map_err(permanent)?;
        let handshake = self.0.handshake(host, PORT, &[]);
        let (config, _) = handshake.map_err(|error| permanent(error.to_string()))?;
        let shaken = TlsConnector::from(config).connect(name, stream).await;
        shaken.map_err(|error| match refusal_in(&error) {
            Some(reason) => permanent(reason),
            None => failed("connect", error.into()),
        })
    }
}

/// Returns what the server minds about this client's certificate, or this client about the server's, if the connection has failed for
/// that.
pub(crate) fn refusal(error: &RedisError) -> Option<String> {
    let cause = error
        .source()?
        .downcast_ref::<Arc<dyn StdError + Send + Sync>>()?;
    refusal_in(cause.downcast_ref()?)
}

fn refusal_in(error: &io::Error) -> Option<String> {
    match error.get_ref()?.downcast_ref()? {
        TlsError::AlertReceived(alert) => tls::refusal(*alert),
        // The latter is that of an authority with the name of one that is trusted.
        error @ TlsError::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) => Some(format!(
            "{error}: no authority that is trusted has issued it; give its authority's present certificate as `ca`"
        )),
        error @ TlsError::InvalidCertificate(_) => Some(format!(
            "{error}; check the host in the URL, and the server's certificate"
        )),
        _ => None,
    }
}
