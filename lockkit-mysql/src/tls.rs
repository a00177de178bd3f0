//! Encrypted connections to servers.

#[cfg(feature = "tls")]
pub(crate) use with::Encryption;
#[cfg(not(feature = "tls"))]
pub(crate) use without::Encryption;

#[cfg(feature = "tls")]
mod with {
    use std::io;

    use lockkit_core::spi::tls::{Handshake, Trust, server_name};
    use tokio_rustls::TlsConnector;

    use crate::{
        MySqlConfig,
        config::Tls,
        relay::{End, Stream},
    };

    /// The port that a server speaks TLS on, after its greeting.
    const PORT: &str = "that of a MySQL server";

    /// Whom the client trusts, and who it is.
    #[derive(Clone)]
    pub(crate) struct Encryption {
        trust: Trust,
        is_verified: bool,
    }

    /// A connection on which the handshake is done: for what its failures mean.
    pub(crate) struct Secured(Handshake);

    impl Encryption {
        /// Returns `None` if connections are not encrypted.
        ///
        /// # Errors
        /// [`Error::InvalidOptions`](lockkit_core::Error::InvalidOptions) names the option whose file cannot be used.
        pub(crate) fn new(config: &MySqlConfig) -> lockkit_core::Result<Option<Self>> {
            if config.tls == Tls::Off {
                return Ok(None);
            }
            let is_verified = config.tls == Tls::Verify;
            let identity = config.cert.as_deref().zip(config.key.as_deref());
            let trust = Trust::new(is_verified, config.ca.as_deref(), identity)?;
            Ok(Some(Self { trust, is_verified }))
        }

        /// A certificate proves which server it is, or there is no connection.
        pub(crate) fn is_verified(&self) -> bool {
            self.is_verified
        }

        /// Shakes hands with a server that has been asked to.
        pub(crate) async fn begin(
            &self,
            host: &str,
            server: Box<dyn Stream>,
        ) -> Result<(Box<dyn Stream>, Secured), End> {
            let at = if host.contains(':') {
                format!("[{host}]:0")
            } else {
                format!("{host}:0")
            };
            let name = server_name(&at).map_err(End::Refused)?;
            let (config, handshake) = self
                .trust
                .handshake(host, PORT, &[])
                .map_err(|error| End::Refused(error.to_string()))?;
            match TlsConnector::from(config).connect(name, server).await {
                Ok(stream) => Ok((Box::new(stream), Secured(handshake))),
                Err(error) => Err(end(handshake.failure(&error))),
            }
        }
    }

    impl Secured {
        /// Returns the reason why the login ended that was cut off by this error.
        pub(crate) fn ended_by(&self, error: io::Error) -> End {
            self.0.refused(&error).map_or(End::Failed(error), end)
        }
    }

    fn end((reason, permanent): (String, bool)) -> End {
        if permanent {
            End::Refused(reason)
        } else {
            End::Interrupted(reason)
        }
    }
}

/// There is none without the feature, and an option that asks for one is refused.
#[cfg(not(feature = "tls"))]
mod without {
    use std::io;

    use crate::{
        MySqlConfig,
        relay::{End, Stream},
    };

    #[derive(Clone)]
    pub(crate) enum Encryption {}

    pub(crate) enum Secured {}

    impl Encryption {
        #[expect(clippy::unnecessary_wraps, reason = "it fails with the feature")]
        pub(crate) fn new(_: &MySqlConfig) -> lockkit_core::Result<Option<Self>> {
            Ok(None)
        }

        pub(crate) fn is_verified(&self) -> bool {
            match *self {}
        }

        #[expect(clippy::unused_async, reason = "it waits with the feature")]
        pub(crate) async fn begin(
            &self,
            _: &str,
            _: Box<dyn Stream>,
        ) -> Result<(Box<dyn Stream>, Secured), End> {
            match *self {}
        }
    }

    impl Secured {
        pub(crate) fn ended_by(&self, _: io::Error) -> End {
            match *self {}
        }
    }
}
