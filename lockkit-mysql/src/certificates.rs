//! The certificates of connections over TLS. The client library reads their files for each connection.

use lockkit_core::{
    Result,
    spi::tls::{self, Authorities, Identity},
};
use rustls::Error as TlsError;

use crate::MySqlConfig;

/// Checks the files that the config names, so that one that cannot be used is no failure of the server.
///
/// # Errors
/// Those of [`Authorities::read`] and [`Identity::read`].
pub(crate) fn check(config: &MySqlConfig) -> Result<()> {
    if let Some(ca) = &config.ca {
        Authorities::read(ca)?;
    }
    if let (Some(cert), Some(key)) = (&config.cert, &config.key) {
        Identity::read(cert, key)?;
    }
    Ok(())
}

/// Returns what the server minds about this client's certificate, if the connection has failed for that.
pub(crate) fn refusal(error: &sqlx::Error) -> Option<String> {
    let sqlx::Error::Io(error) = error else {
        return None;
    };
    match error.get_ref()?.downcast_ref()? {
        TlsError::AlertReceived(alert) => tls::refusal(*alert),
        _ => None,
    }
}
