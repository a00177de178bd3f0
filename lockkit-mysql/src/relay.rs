//! The login of a connection without TLS, read on its way.
//!
//! sqlx sends the password itself to a server whose greeting names the plug-in for it, and encrypts it with whatever key a server sends. It
//! has no option against either, and connects to an address and to nothing else. So it connects to a port of this process, and its
//! bytes pass here. The packets of the login are looked at one by one, and a connection ends before the password is on its way to one
//! who has proved nothing. What follows the login is passed on as it is.

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use lockkit_core::{Error, Result};
use sqlx::{
    ConnectOptions,
    mysql::{MySqlConnectOptions, MySqlConnection},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, copy, split},
    net::{TcpListener, TcpStream},
};

use crate::{NAME, config::PublicKey, error};

/// The plug-in to which a client sends the password itself.
const CLEAR_TEXT: &[u8] = b"mysql_clear_password";
/// The version of the protocol, with which a greeting begins.
const GREETING: u8 = 10;
const OK: u8 = 0x00;
const ERR: u8 = 0xff;
/// More about the login: the plug-in's own packets begin with it.
const MORE: u8 = 0x01;
/// The server knew the password's digest. It says OK next, without being asked.
const IS_KNOWN: u8 = 0x03;
/// The requests for the server's public key: those of `sha256_password` and `caching_sha2_password`.
const KEY_REQUESTS: [&[u8]; 2] = [&[0x01], &[0x02]];
/// The longest packet of a login. Most have less than a hundred bytes, and a key has some hundreds.
const LONGEST: usize = 64 * 1024;

/// A server that is used without TLS and with a password.
#[derive(Clone)]
pub(crate) struct PlainRoute {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) socket: Option<PathBuf>,
    pub(crate) public_key: PublicKey,
    /// Its owner has been told that the network can read along.
    pub(crate) has_warned: Arc<AtomicBool>,
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// The reason why a login ended.
enum End {
    /// The server asked for what it does not get.
    Refused(&'static str),
    Failed(io::Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

impl PlainRoute {
    /// Connects, with the login under guard. Further bytes are relayed by a task of the current runtime until either end closes.
    ///
    /// # Errors
    /// A permanent one for a server that asks for the password itself, or for its encryption with a key that nobody vouches for.
    pub(crate) async fn connect(
        &self,
        operation: &'static str,
        options: &MySqlConnectOptions,
    ) -> Result<MySqlConnection> {
        let failed = |error: io::Error| error::failed(operation, sqlx::Error::Io(error));
        let (mut server, is_local) = self.reach().await.map_err(failed)?;
        if !is_local && !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                host = %self.host,
                "the connection is not encrypted: anyone on its way can read along, and take it over after the login; connect with \
                 tls=verify"
            );
        }
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let options = options.clone().host("127.0.0.1").port(port);
        let may_fetch = match self.public_key {
            PublicKey::Local => is_local,
            PublicKey::Always => true,
            PublicKey::Never => false,
        };
        let login = async {
            let (mut library, _) = listener.accept().await?;
            // Requests are small packets.
            let _ = library.set_nodelay(true);
            guard(&mut server, &mut library, may_fetch).await?;
            Ok::<_, End>(library)
        };
        let mut connecting = Box::pin(options.connect());
        let library = tokio::select! {
            biased;
            ended = login => match ended {
                Ok(library) => library,
                Err(End::Refused(reason)) => return Err(Error::permanent(NAME, operation, reason)),
                Err(End::Failed(error)) => return Err(failed(error)),
            },
            // No login was seen, so it is none.
            connected = &mut connecting => return match connected {
                Ok(_) => Err(failed(io::ErrorKind::ConnectionAborted.into())),
                Err(error) => Err(error::failed(operation, error)),
            },
        };
        tokio::spawn(relay(server, library));
        connecting.await.map_err(|error| error::failed(operation, error))
    }

    /// Connects to the server. Returns also whether it is one of this host.
    async fn reach(&self) -> io::Result<(Box<dyn Stream>, bool)> {
        if let Some(socket) = &self.socket {
            #[cfg(unix)]
            return Ok((Box::new(tokio::net::UnixStream::connect(socket).await?), true));
            #[cfg(not(unix))]
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("this system has no Unix sockets: {}", socket.display()),
            ));
        }
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        let _ = stream.set_nodelay(true);
        let is_local = stream.peer_addr()?.ip().to_canonical().is_loopback();
        Ok((Box::new(stream), is_local))
    }
}

/// Passes on the packets of a login, in turns as the protocol has them, up to the server's last word. A key would be taken out of turn,
/// too, so nothing is passed on ahead of its turn.
async fn guard(
    server: &mut (impl AsyncRead + AsyncWrite + Unpin),
    library: &mut (impl AsyncRead + AsyncWrite + Unpin),
    may_fetch: bool,
) -> std::result::Result<(), End> {
    let mut is_first = true;
    loop {
        let packet = Packet::read(server).await?;
        // Wherever it is in a packet: whether this reads it as sqlx does must not matter.
        if packet.has(CLEAR_TEXT) {
            return Err(End::Refused(
                "the server asks for the password in clear text (mysql_clear_password), which it gets over TLS alone; connect with \
                 tls=verify",
            ));
        }
        packet.write(library).await?;
        let is_last = match packet.payload() {
            [ERR, ..] => true,
            [GREETING, ..] if is_first => false,
            _ if is_first => return Err(unexpected("a server of another kind")),
            [OK, ..] => true,
            [MORE, IS_KNOWN, ..] => continue,
            [MORE] => return Err(unexpected("an empty packet of a plug-in")),
            _ => false,
        };
        if is_last {
            return Ok(());
        }
        is_first = false;
        let reply = Packet::read(library).await?;
        if KEY_REQUESTS.contains(&reply.payload()) && !may_fetch {
            return Err(End::Refused(
                "the server needs the password encrypted with its public key, and without TLS anyone on the way could send another \
                 one; connect with tls=verify, or set public_key=always if the network up to the server is trusted",
            ));
        }
        reply.write(server).await?;
    }
}

fn unexpected(what: &str) -> End {
    End::Failed(io::Error::new(io::ErrorKind::InvalidData, what))
}

/// Passes on bytes until either end closes its connection, and closes the other.
async fn relay(server: Box<dyn Stream>, library: TcpStream) {
    let (mut from_server, mut to_server) = split(server);
    let (mut from_library, mut to_library) = library.into_split();
    // How it ended is what the library finds at its end.
    tokio::select! {
        _ = copy(&mut from_library, &mut to_server) => {}
        _ = copy(&mut from_server, &mut to_library) => {}
    }
}

/// A packet with its header: three bytes of length, and one that counts.
struct Packet(Vec<u8>);

impl Packet {
    const HEADER: usize = 4;

    async fn read(from: &mut (impl AsyncRead + Unpin)) -> std::result::Result<Self, End> {
        let mut packet = vec![0; Self::HEADER];
        from.read_exact(&mut packet).await?;
        let length = u32::from_le_bytes([packet[0], packet[1], packet[2], 0]) as usize;
        if !(1..=LONGEST).contains(&length) {
            return Err(unexpected("a packet whose length no login has"));
        }
        packet.resize(Self::HEADER + length, 0);
        from.read_exact(&mut packet[Self::HEADER..]).await?;
        Ok(Self(packet))
    }

    async fn write(&self, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        to.write_all(&self.0).await?;
        to.flush().await
    }

    fn payload(&self) -> &[u8] {
        self.0.get(Self::HEADER..).unwrap_or_default()
    }

    fn has(&self, part: &[u8]) -> bool {
        self.payload().windows(part.len()).any(|bytes| bytes == part)
    }
}
