use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use tempfile::TempDir;

use crate::directory;

/// A certificate authority that nobody else trusts, with a certificate for servers on this machine (`127.0.0.1`,
/// `localhost`) and one for their clients. All are PEM files, which go with the value.
#[derive(Debug)]
pub struct Certificates {
    directory: TempDir,
}

impl Certificates {
    /// A new authority.
    ///
    /// # Errors
    /// If the files cannot be written.
    pub fn generate() -> io::Result<Self> {
        let directory = directory::new("certificates")?;
        write_all(directory.path()).map_err(io::Error::other)?;
        Ok(Self { directory })
    }

    /// The authority's own certificate, for clients to trust.
    pub fn authority(&self) -> PathBuf {
        self.path("authority.pem")
    }

    /// The server's certificate.
    pub fn server(&self) -> PathBuf {
        self.path("server.pem")
    }

    /// The server's private key.
    pub fn server_key(&self) -> PathBuf {
        self.path("server.key")
    }

    /// The client's certificate.
    pub fn client(&self) -> PathBuf {
        self.path("client.pem")
    }

    /// The client's private key.
    pub fn client_key(&self) -> PathBuf {
        self.path("client.key")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn write_all(directory: &Path) -> Result<(), Failure> {
    let mut authority = named("lockkit test authority", &[])?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let key = KeyPair::generate()?;
    fs::write(
        directory.join("authority.pem"),
        authority.self_signed(&key)?.pem(),
    )?;
    let issuer = Issuer::new(authority, key);

    let leaves = [
        ("server", ExtendedKeyUsagePurpose::ServerAuth),
        ("client", ExtendedKeyUsagePurpose::ClientAuth),
    ];
    for (name, usage) in leaves {
        let mut leaf = named(&format!("lockkit test {name}"), &["127.0.0.1", "localhost"])?;
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        leaf.extended_key_usages = vec![usage];
        leaf.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        fs::write(
            directory.join(format!("{name}.pem")),
            leaf.signed_by(&key, &issuer)?.pem(),
        )?;
        fs::write(directory.join(format!("{name}.key")), key.serialize_pem())?;
    }
    Ok(())
}

fn named(common_name: &str, subjects: &[&str]) -> Result<CertificateParams, Failure> {
    let subjects: Vec<String> = subjects.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(subjects)?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    Ok(params)
}
