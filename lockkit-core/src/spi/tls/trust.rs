//! Connections of a client to servers of one cluster: whom it trusts, who it is, and what a handshake that fails says.

use std::{
    fmt, io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError,
    RootCertStore, SignatureScheme,
    client::{
        ResolvesClientCert, Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    sign::CertifiedKey,
};

use super::{Authorities, Identity};
use crate::{Error, Result};

/// The authorities that a client trusts, and its own certificate. Files are read once, when it is made.
#[derive(Clone)]
pub struct Trust {
    provider: Arc<CryptoProvider>,
    verifier: Arc<dyn ServerCertVerifier>,
    identity: Option<Arc<CertifiedKey>>,
}

impl Trust {
    /// Trusts the authorities in the file `ca`, else the system's; anybody, unless it `checks` certificates. With `identity`, it has the
    /// certificate and the private key in these files.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] names the option whose file cannot be used. It has nothing of a private key in it.
    pub fn new(checks: bool, ca: Option<&Path>, identity: Option<(&Path, &Path)>) -> Result<Self> {
        // The program's own default, if it has one, is of no concern here.
        let provider = Arc::new(ring::default_provider());
        let verifier: Arc<dyn ServerCertVerifier> = if checks {
            let roots = Arc::new(authorities(ca)?);
            WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
                .build()
                .map_err(|error| Error::invalid_option("ca", error.to_string()))?
        } else {
            Arc::new(Unverified(provider.clone()))
        };
        let identity = match identity {
            Some((cert, key)) => Some(Arc::new(Identity::read(cert, key)?.pair)),
            None => None,
        };
        Ok(Self {
            provider,
            verifier,
            identity,
        })
    }

    /// Begins a handshake with `host` for these application protocols, which may be none. `port` describes the port that a server
    /// would expect, for the error if this is another: "`a secureClientPort`".
    ///
    /// # Errors
    /// The fault in the provider, if it has none of the versions of TLS.
    pub fn handshake(
        &self,
        host: &str,
        port: &'static str,
        protocols: &[&[u8]],
    ) -> std::result::Result<(Arc<ClientConfig>, Handshake), TlsError> {
        let asked = Arc::new(AskedFor {
            certificate: self.identity.clone(),
            was_asked: AtomicBool::new(false),
        });
        let mut config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(self.verifier.clone())
            .with_client_cert_resolver(asked.clone());
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        // A session that is resumed is not verified again, and its certificate may have expired since.
        config.resumption = Resumption::disabled();
        let handshake = Handshake {
            host: host.to_owned(),
            port,
            identity: asked,
        };
        Ok((Arc::new(config), handshake))
    }

    /// Returns the provider of cryptography.
    pub fn provider(&self) -> &CryptoProvider {
        &self.provider
    }
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust").finish_non_exhaustive()
    }
}

/// A handshake, and the connection after it: for what its failures mean.
#[derive(Debug)]
pub struct Handshake {
    host: String,
    port: &'static str,
    identity: Arc<AskedFor>,
}

impl Handshake {
    /// Returns the host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns what this error of the handshake says, and whether another attempt would fail as well.
    pub fn failure(&self, error: &io::Error) -> (String, bool) {
        self.refused(error).unwrap_or_else(|| {
            let Self { host, port, .. } = self;
            // The system tells one end in several ways, by chance.
            let why = match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    String::new()
                }
                _ => format!(" ({error})"),
            };
            let reason = format!("the connection to {host} ended while TLS began{why}; is this port {port}?");
            (reason, false)
        })
    }

    /// Returns what this error of a connection says and whether another attempt would fail as well, if it is one of TLS.
    ///
    /// With TLS 1.3, the client is done with the handshake before the server has looked at the client's certificate. So it may be later
    /// that the client learns of a server that minds it.
    pub fn refused(&self, error: &io::Error) -> Option<(String, bool)> {
        let tls = error.get_ref()?.downcast_ref::<TlsError>()?;
        let reason = match tls {
            // The latter is that of an authority with the name of one that is trusted.
            TlsError::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            ) => {
                format!(
                    "{tls}: no authority that is trusted has issued it; give its authority's present certificate as `ca`"
                )
            }
            TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ) => format!("{tls}; write a host that it is for"),
            TlsError::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            ) => format!("{tls}; renew it at the server, or set the clock of this host"),
            TlsError::AlertReceived(alert) => self.refusal(*alert),
            TlsError::InvalidMessage(_) => {
                format!("{tls}; is this port {}?", self.port)
            }
            _ => tls.to_string(),
        };
        let passes = matches!(
            tls,
            TlsError::AlertReceived(AlertDescription::InternalError | AlertDescription::UserCanceled)
        );
        Some((format!("TLS with {} failed: {reason}", self.host), !passes))
    }

    /// Returns what a server that has sent this alert minds.
    fn refusal(&self, alert: AlertDescription) -> String {
        use AlertDescription as Alert;

        let of_certificates = matches!(
            alert,
            Alert::AccessDenied
                | Alert::BadCertificate
                | Alert::CertificateExpired
                | Alert::CertificateRequired
                | Alert::CertificateRevoked
                | Alert::CertificateUnknown
                | Alert::DecryptError
                | Alert::HandshakeFailure
                | Alert::UnknownCA
                | Alert::UnsupportedCertificate
        );
        if !of_certificates || !self.identity.was_asked.load(Ordering::Relaxed) {
            return format!("the server refused with the alert {alert:?}");
        }
        match self.identity.certificate {
            Some(_) => format!(
                "the server does not accept the certificate of `cert` (alert {alert:?}); has it expired, and does the server know its authority?"
            ),
            None => {
                format!(
                    "the server asks for a client certificate (alert {alert:?}); give one as `cert` and `key`"
                )
            }
        }
    }
}

/// The certificate of this client, for one connection.
struct AskedFor {
    certificate: Option<Arc<CertifiedKey>>,
    /// The server has asked for it.
    was_asked: AtomicBool,
}

impl ResolvesClientCert for AskedFor {
    fn resolve(&self, _issuers: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.was_asked.store(true, Ordering::Relaxed);
        self.certificate.clone()
    }

    fn has_certs(&self) -> bool {
        self.certificate.is_some()
    }
}

impl fmt::Debug for AskedFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AskedFor")
            .field("was_asked", &self.was_asked)
            .finish_non_exhaustive()
    }
}

/// Takes any certificate, whose key the server has to have nevertheless.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Returns the name that the certificate of this `host:port` has to be for.
///
/// # Errors
/// Says why no certificate can be for it.
pub fn server_name(host: &str) -> std::result::Result<ServerName<'static>, String> {
    let name = host.rsplit_once(':').map_or(host, |(name, _port)| name);
    let plain = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    ServerName::try_from(plain.unwrap_or(name).to_owned()).map_err(|_| {
        format!("no certificate can be for {name:?}, which is neither a host name nor an address")
    })
}

/// Returns the authorities that are trusted: those in the file, or the system's.
fn authorities(ca: Option<&Path>) -> Result<RootCertStore> {
    if let Some(ca) = ca {
        return Ok(Authorities::read(ca)?.roots);
    }
    let mut roots = RootCertStore::empty();
    // Some that cannot be read or used are no reason not to trust the others.
    let (known, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    match known {
        0 => Err(Error::invalid_option(
            "ca",
            "this system trusts nobody that could be found; give a file of certificates to trust",
        )),
        _ => Ok(roots),
    }
}
