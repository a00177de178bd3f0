//! The certificates of connections over TLS, as the client library takes them.

use std::{error::Error as StdError, io, sync::Arc};

use lockkit_core::{
    Result,
    spi::tls::{self, Authorities, Identity},
};
use redis::{ClientTlsConfig, RedisError, TlsCertificates};
use rustls::{CertificateError, Error as TlsError};

use crate::RedisConfig;

/// Reads the files that the config names; `None` if it names none.
///
/// # Errors
/// Those of [`Authorities::read`] and [`Identity::read`].
pub(crate) fn read(config: &RedisConfig) -> Result<Option<TlsCertificates>> {
    let root_cert = match &config.ca {
        Some(ca) => Some(Authorities::read(ca)?.pem),
        None => None,
    };
    let client_tls = match (&config.cert, &config.key) {
        (Some(cert), Some(key)) => {
            let identity = Identity::read(cert, key)?;
            Some(ClientTlsConfig {
                client_cert: identity.cert_pem,
                client_key: identity.key_pem,
            })
        }
        _ => None,
    };
    Ok(
        (root_cert.is_some() || client_tls.is_some()).then_some(TlsCertificates {
            client_tls,
            root_cert,
        }),
    )
}

/// Returns what the server minds about this client's certificate, or this client about the server's, if the connection has failed for
/// that.
pub(crate) fn refusal(error: &RedisError) -> Option<String> {
    let cause = error
        .source()?
        .downcast_ref::<Arc<dyn StdError + Send + Sync>>()?;
    match cause.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref()? {
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
