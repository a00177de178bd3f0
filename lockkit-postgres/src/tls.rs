//! Encrypted connections: what is trusted, and who this client is.

use std::{fmt, io, sync::Arc};

use lockkit_core::{
    Error, Result,
    spi::tls::{self, Authorities, Identity},
};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
    client::{
        Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{NAME, PostgresConfig, SslMode, error::Failure};

/// The authorities that are trusted, and who this client is. Files are read once, when it is made.
#[derive(Clone)]
pub(crate) struct Trust(Arc<ClientConfig>);

impl Trust {
    /// Returns `None` if connections are not encrypted.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] names the option whose file cannot be used. It has nothing of a private key in it.
    pub(crate) fn new(config: &PostgresConfig) -> Result<Option<Self>> {
        let mode = config.effective_sslmode();
        if mode == SslMode::Disable {
            return Ok(None);
        }
        // The program's own default, if it has one, is of no concern here.
        let provider = Arc::new(ring::default_provider());
        let verifier = Arc::new(Verifier {
            chain: match mode {
                SslMode::VerifyCa | SslMode::VerifyFull => Some(chain_verifier(config, &provider)?),
                _ => None,
            },
            checks_name: mode == SslMode::VerifyFull,
            provider: provider.clone(),
        });
        let unusable = |error: TlsError| Error::invalid_option("sslcert", error.to_string());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::invalid_option("sslmode", error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut client = match (&config.sslcert, &config.sslkey) {
            (Some(cert), Some(key)) => {
                let identity = Identity::read(cert, key).map_err(as_libpq_spells)?;
                let key = rustls::pki_types::pem::PemObject::from_pem_slice(&identity.key_pem)
                    .map_err(|_| Error::invalid_option("sslkey", format!("{} is damaged", key.display())))?;
                builder
                    .with_client_auth_cert(identity.pair.cert.clone(), key)
                    .map_err(unusable)?
            }
            _ => builder.with_no_client_auth(),
        };
        // A session that is resumed is not verified again, and its certificate may have expired since.
        client.resumption = Resumption::disabled();
        Ok(Some(Self(Arc::new(client))))
    }

    /// Shakes hands with the server of this name.
    ///
    /// # Errors
    /// [`Failure::Refused`] for a certificate that is not accepted, here or there.
    pub(crate) async fn shake_hands(
        &self,
        host: &str,
        stream: TcpStream,
    ) -> std::result::Result<TlsStream<TcpStream>, Failure> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| refused(format!("{host:?} cannot be the name in a certificate")))?;
        let connecting = TlsConnector::from(self.0.clone()).connect(name, stream).await;
        connecting.map_err(|error| refusal(&error).map_or(Failure::Io(error), refused))
    }
}

/// Returns what is wrong with a certificate, if a connection has failed for that. With TLS 1.3 a server looks at the client's only after
/// the handshake, so that it may be the login that fails.
pub(crate) fn refusal(error: &io::Error) -> Option<String> {
    match error.get_ref()?.downcast_ref()? {
        TlsError::AlertReceived(alert) => tls::refusal(*alert).map(|reason| {
            reason
                .replace("`cert` and `key`", "`sslcert` and `sslkey`")
                .replace("`cert`", "`sslcert`")
        }),
        TlsError::InvalidCertificate(error) => {
            // The latter is that of an authority with the name of one that is trusted.
            let advice = match error {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                    "give that of its authority as `sslrootcert`"
                }
                _ => "check the host in the URL, and the certificate",
            };
            Some(format!(
                "the server's certificate is not accepted: {error}; {advice}"
            ))
        }
        _ => None,
    }
}

fn refused(reason: String) -> Failure {
    Failure::Refused(Box::new(Error::permanent(NAME, "connect", reason)))
}

/// Renames the options that the core's errors name.
fn as_libpq_spells(error: Error) -> Error {
    match error {
        Error::InvalidOptions { option, reason, .. } => {
            let option = match option {
                "ca" => "sslrootcert",
                "cert" => "sslcert",
                "key" => "sslkey",
                other => other,
            };
            Error::invalid_option(option, reason)
        }
        other => other,
    }
}

fn chain_verifier(
    config: &PostgresConfig,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>> {
    let roots = match &config.sslrootcert {
        Some(file) => Authorities::read(file).map_err(as_libpq_spells)?.roots,
        None => {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            roots
        }
    };
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|error| Error::invalid_option("sslrootcert", format!("there is nobody to trust: {error}")))
}

/// Checks of a server's certificate as much as the mode asks for.
struct Verifier {
    /// `None` if any certificate is accepted.
    chain: Option<Arc<WebPkiServerVerifier>>,
    checks_name: bool,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        let Some(chain) = &self.chain else {
            return Ok(ServerCertVerified::assertion());
        };
        match chain.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            // The name is looked at last, so that the rest is in order.
            Err(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.checks_name => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(
            message,
            cert,
            signed,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(
            message,
            cert,
            signed,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").finish_non_exhaustive()
    }
}
