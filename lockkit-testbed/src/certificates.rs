use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::directory;

/// A certificate authority that nobody else trusts, with a certificate for servers on this machine (`127.0.0.1`,
/// `localhost`), one for their clients, and some that are not to be accepted. All are PEM files, which go with the value.
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

    /// A client's certificate that expired long ago.
    pub fn expired_client(&self) -> PathBuf {
        self.path("expired-client.pem")
    }

    /// The private key of the [`expired_client`](Self::expired_client).
    pub fn expired_client_key(&self) -> PathBuf {
        self.path("expired-client.key")
    }

    /// A server's certificate and its private key in one file, as ZooKeeper reads them.
    pub fn server_pair(&self, which: ServerPair) -> PathBuf {
        self.path(match which {
            ServerPair::Valid => "server.pair.pem",
            ServerPair::Expired => "expired-server.pair.pem",
            ServerPair::Elsewhere => "elsewhere.pair.pem",
        })
    }

    /// Shakes hands with a client as the [`server`](Self::server), which offers these protocols.
    ///
    /// # Errors
    /// If a file cannot be read, or the client does not accept the server.
    pub async fn accept(&self, client: TcpStream, protocols: &[&str]) -> io::Result<TlsStream<TcpStream>> {
        let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(self.server())
            .map_err(io::Error::other)?
            .collect();
        let key = PrivateKeyDer::from_pem_file(self.server_key()).map_err(io::Error::other)?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(chain.map_err(io::Error::other)?, key)
            .map_err(io::Error::other)?;
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        TlsAcceptor::from(Arc::new(config)).accept(client).await
    }

    /// Shakes hands with the server at this address as the [`client`](Self::client). That one of them refuses the other is an answer, too.
    ///
    /// # Errors
    /// If the server says nothing for so long.
    pub(crate) fn shake_hands(&self, addr: SocketAddr, limit: Duration) -> io::Result<()> {
        let authority = CertificateDer::from_pem_file(self.authority()).map_err(io::Error::other)?;
        let client = CertificateDer::from_pem_file(self.client()).map_err(io::Error::other)?;
        let key = PrivateKeyDer::from_pem_file(self.client_key()).map_err(io::Error::other)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority).map_err(io::Error::other)?;
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![client], key)
            .map_err(io::Error::other)?;
        let name = addr.ip().into();
        let mut hands = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
        let mut stream = std::net::TcpStream::connect_timeout(&addr, limit)?;
        stream.set_read_timeout(Some(limit))?;
        match hands.complete_io(&mut stream) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(()),
            Ok(_) if hands.is_handshaking() => Err(io::ErrorKind::TimedOut.into()),
            done => done.map(drop),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

/// The servers' certificates of one authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerPair {
    /// For this machine.
    Valid,
    /// For this machine, and expired long ago.
    Expired,
    /// For a host elsewhere.
    Elsewhere,
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

    let here = &["127.0.0.1", "localhost"][..];
    let leaves = [
        ("server", ExtendedKeyUsagePurpose::ServerAuth, here),
        ("expired-server", ExtendedKeyUsagePurpose::ServerAuth, here),
        (
            "elsewhere",
            ExtendedKeyUsagePurpose::ServerAuth,
            &["elsewhere.example"][..],
        ),
        ("client", ExtendedKeyUsagePurpose::ClientAuth, here),
        ("expired-client", ExtendedKeyUsagePurpose::ClientAuth, here),
    ];
    for (name, usage, subjects) in leaves {
        let mut leaf = named(&format!("lockkit test {name}"), subjects)?;
        if name.starts_with("expired") {
            leaf.not_before = date_time_ymd(2001, 1, 1);
            leaf.not_after = date_time_ymd(2002, 1, 1);
        }
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        leaf.extended_key_usages = vec![usage];
        leaf.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let (certificate, key) = (leaf.signed_by(&key, &issuer)?.pem(), key.serialize_pem());
        fs::write(directory.join(format!("{name}.pem")), &certificate)?;
        fs::write(directory.join(format!("{name}.key")), &key)?;
        fs::write(
            directory.join(format!("{name}.pair.pem")),
            format!("{key}\n{certificate}"),
        )?;
    }
    Ok(())
}

fn named(common_name: &str, subjects: &[&str]) -> Result<CertificateParams, Failure> {
    let subjects: Vec<String> = subjects.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(subjects)?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    Ok(params)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// It may be that of a server which is just coming up.
    #[test]
    fn a_port_that_says_nothing_is_no_server() {
        let certificates = Certificates::generate().unwrap();
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let shaken = certificates.shake_hands(silent.local_addr().unwrap(), Duration::from_millis(50));
        assert!(shaken.is_err());
    }

    #[tokio::test]
    async fn a_server_answers_a_handshake_also_by_a_refusal() {
        let certificates = Arc::new(Certificates::generate().unwrap());
        let stranger = Arc::new(Certificates::generate().unwrap());
        for (server, is_trusted) in [(&certificates, true), (&stranger, false)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = listener.local_addr().unwrap();
            let client = certificates.clone();
            let shaking =
                tokio::task::spawn_blocking(move || client.shake_hands(addr, Duration::from_secs(60)));
            let (stream, _) = listener.accept().await.unwrap();
            let accepted = server.accept(stream, &[]).await;
            shaking.await.unwrap().unwrap();
            // What the client sends last may come after the server is done.
            assert!(accepted.is_ok() || !is_trusted);
        }
    }
}
