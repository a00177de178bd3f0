//! Files of certificates and keys, for backends whose connections are encrypted, and what servers say of a client's certificate.
//!
//! The files are read and checked before anything is sent: one that cannot be used is no failure of the server. An error names the
//! option and the file, and has nothing of a private key in it.

mod trust;

use std::{fmt, fs, path::Path};

use rustls::{
    AlertDescription as Alert, Error as TlsError, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};

pub use self::trust::{Handshake, Trust, server_name};

use crate::{Error, Result};

/// The authorities that a client trusts, from a file of its option `ca`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Authorities {
    /// The contents of the file.
    pub pem: Vec<u8>,
    /// Its certificates.
    pub roots: RootCertStore,
}

impl Authorities {
    /// Reads the file.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] if it cannot be read, is no PEM, or has a certificate that is no authority's.
    pub fn read(ca: &Path) -> Result<Self> {
        let (pem, certificates) = certificates("ca", ca)?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates {
            roots.add(certificate).map_err(|error| {
                let reason = format!("{} has one that is no authority's: {error}", ca.display());
                Error::invalid_option("ca", reason)
            })?;
        }
        Ok(Self { pem, roots })
    }
}

/// The certificate of a client and its private key, from files of its options `cert` and `key`.
#[derive(Clone)]
#[non_exhaustive]
pub struct Identity {
    /// The contents of the file of the certificate, and of those up to its authority.
    pub cert_pem: Vec<u8>,
    /// The contents of the file of the private key: a secret.
    pub key_pem: Vec<u8>,
    /// Both, as rustls takes them.
    pub pair: CertifiedKey,
}

impl Identity {
    /// Reads the files, and checks that the key is that of the certificate.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] if one cannot be read or is no PEM, if the key is another's, or cannot be used by ring.
    pub fn read(cert: &Path, key: &Path) -> Result<Self> {
        let (cert_pem, chain) = certificates("cert", cert)?;
        let key_pem = read_pem("key", key, "PRIVATE KEY")?;
        let private = PrivateKeyDer::from_pem_slice(&key_pem).map_err(|_| damaged("key", key))?;
        let pair =
            CertifiedKey::from_der(chain, private, &ring::default_provider()).map_err(
                |error| match error {
                    TlsError::InconsistentKeys(_) => Error::invalid_option(
                        "key",
                        format!(
                            "{} is not the private key of the certificate in {}",
                            key.display(),
                            cert.display()
                        ),
                    ),
                    TlsError::InvalidCertificate(_) => damaged("cert", cert),
                    error => {
                        Error::invalid_option("key", format!("{} cannot be used: {error}", key.display()))
                    }
                },
            )?;
        Ok(Self {
            cert_pem,
            key_pem,
            pair,
        })
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

/// Returns what a server minds about this client's certificate that has sent this alert; `None` if it is something else.
///
/// With TLS 1.3, the client is done with the handshake before the server has looked at its certificate. So it may be the first
/// request that fails with this.
pub fn refusal(alert: Alert) -> Option<String> {
    match alert {
        Alert::CertificateRequired => Some(format!(
            "the server asks for a client certificate (alert {alert:?}); give one as `cert` and `key`"
        )),
        Alert::AccessDenied
        | Alert::BadCertificate
        | Alert::CertificateExpired
        | Alert::CertificateRevoked
        | Alert::CertificateUnknown
        | Alert::UnknownCA
        | Alert::UnsupportedCertificate => Some(format!(
            "the server does not accept the certificate of `cert` (alert {alert:?}); has it expired, and does the server know its authority?"
        )),
        _ => None,
    }
}

/// Reads certificates, and returns them with the contents of their file.
fn certificates(option: &'static str, path: &Path) -> Result<(Vec<u8>, Vec<CertificateDer<'static>>)> {
    let pem = read_pem(option, path, "CERTIFICATE")?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .map_err(|_| damaged(option, path))?;
    if certificates.is_empty() {
        return Err(without(option, path, "certificate"));
    }
    Ok((pem, certificates))
}

/// Returns the error for a file that is no PEM. What the parser says may quote the file, and stays out of it.
fn damaged(option: &'static str, path: &Path) -> Error {
    Error::invalid_option(option, format!("{} is damaged", path.display()))
}

/// Reads a file in PEM form: a block whose label is or ends in `label`, such as `CERTIFICATE` or `PRIVATE KEY`.
fn read_pem(option: &'static str, path: &Path, label: &str) -> Result<Vec<u8>> {
    let path_shown = path.display();
    let pem = fs::read(path)
        .map_err(|error| Error::invalid_option(option, format!("{path_shown} cannot be read: {error}")))?;
    let end = format!("{label}-----");
    let has_block = pem.split(|byte| *byte == b'\n').any(|line| {
        let line = line.trim_ascii();
        line.starts_with(b"-----BEGIN ") && line.ends_with(end.as_bytes())
    });
    if has_block {
        return Ok(pem);
    }
    Err(without(option, path, &label.to_ascii_lowercase()))
}

/// Returns the error for a file that lacks `what` it is for.
fn without(option: &'static str, path: &Path, what: &str) -> Error {
    Error::invalid_option(option, format!("{} has no {what} in PEM form", path.display()))
}

#[cfg(test)]
mod tests {
    use std::{env, process};

    use super::*;

    /// A block of another kind is none, whatever its label ends in.
    #[test]
    fn a_file_of_authorities_has_one() {
        let path = env::temp_dir().join(format!("lockkit-ca-{}", process::id()));
        let block = |label: &str| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
        for contents in [
            String::new(),
            "-----BEGIN CERTIFICATE-----\n".to_owned(),
            block("TRUSTED CERTIFICATE"),
            block("X509 CERTIFICATE"),
            block("CERTIFICATE REQUEST"),
            block("PRIVATE KEY"),
        ] {
            fs::write(&path, &contents).unwrap();
            let read = Authorities::read(&path);
            fs::remove_file(&path).unwrap();
            let text = read.expect_err(&contents).to_string();
            assert!(text.contains("`ca`") && text.contains("lockkit-ca-"), "{text}");
        }
        let missing = Authorities::read(&path).unwrap_err().to_string();
        assert!(
            missing.contains("`ca`") && missing.contains("lockkit-ca-"),
            "{missing}"
        );
    }

    #[test]
    fn a_pem_file_has_the_block_or_is_named() {
        let path = env::temp_dir().join(format!("lockkit-pem-{}", process::id()));
        let read = |contents: &str, label: &str| {
            fs::write(&path, contents).unwrap();
            let read = read_pem("key", &path, label);
            fs::remove_file(&path).unwrap();
            read
        };
        let block = "text\r\n-----BEGIN EC PRIVATE KEY-----\r\ncanary\r\n-----END EC PRIVATE KEY-----\r\n";
        assert_eq!(read(block, "PRIVATE KEY").unwrap(), block.as_bytes());
        for contents in [
            "",
            "canary",
            "BEGIN PRIVATE KEY canary",
            "-----BEGIN PRIVATE KEYS-----",
            "-----END PRIVATE KEY-----",
        ] {
            let error = read(contents, "PRIVATE KEY").unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(
                matches!(&error, Error::InvalidOptions { option: "key", .. }),
                "{text}"
            );
            assert!(
                text.contains("has no private key") && text.contains("lockkit-pem-"),
                "{text}"
            );
            assert!(!text.contains("canary"), "{text}");
        }
        assert!(read(block, "CERTIFICATE").is_err());
        let error = read_pem("ca", &path, "CERTIFICATE").unwrap_err().to_string();
        assert!(
            error.contains("cannot be read") && error.contains("ca"),
            "{error}"
        );
    }
}
