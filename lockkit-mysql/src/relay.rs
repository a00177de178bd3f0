//! The login at a server, read on its way.
//!
//! sqlx sends the password itself to a server whose greeting names the plug-in for it, and encrypts it with whatever key a server sends.
//! Over TLS it trusts the system's authorities beside those that it is given. It has no option against either, and connects to an address or
//! a Unix socket and to nothing else. So it connects to a socket of this process, and its bytes pass here, where TLS begins, if it is to. The
//! packets of the login are looked at one by one, and a connection ends before the password is on its way to one who has proved nothing.
//! What follows the login is passed on as it is.

use std::{any::Any, io, path::PathBuf, pin::pin, time::Duration};

use lockkit_core::{Error, Result, spi::Unencrypted};
use sqlx::{
    ConnectOptions,
    mysql::{MySqlConnectOptions, MySqlConnection},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, copy, split},
    net::TcpStream,
    time::timeout,
};

use crate::{NAME, config::PublicKey, error, replies::Replied, tls::Encryption};

/// The plug-in to which a client sends the password itself.
const CLEAR_TEXT: &[u8] = b"mysql_clear_password";
/// The plug-in to which a client sends the password itself over TLS, and encrypted with the server's key otherwise.
const SHA256: &[u8] = b"sha256_password\0";
/// The version of the protocol, with which a greeting begins.
const GREETING: u8 = 10;
const OK: u8 = 0x00;
const ERR: u8 = 0xff;
/// More about the login: the plug-in's own packets begin with it.
const MORE: u8 = 0x01;
/// The server knew the password's digest. It says OK next, without being asked.
const IS_KNOWN: u8 = 0x03;
/// It did not, and wants the password: over TLS in clear text, encrypted with its key otherwise.
const IS_UNKNOWN: u8 = 0x04;
/// The server has the client log in by another plug-in, whose name follows.
const SWITCH: u8 = 0xfe;
/// The requests for the server's public key: those of `sha256_password` and `caching_sha2_password`.
const KEY_REQUESTS: [&[u8]; 2] = [&[0x01], &[0x02]];
/// The longest packet of a login. Most have less than a hundred bytes, and a key has some hundreds.
const LONGEST: usize = 64 * 1024;
/// The time for what is still to be passed on when a connection ends.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// The flag of the capabilities with which TLS is asked for: in the second of their bytes.
const TLS: u8 = 0x08;

/// The way to a server.
#[derive(Clone)]
pub(crate) struct Route {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) socket: Option<PathBuf>,
    pub(crate) has_password: bool,
    pub(crate) public_key: PublicKey,
    pub(crate) encryption: Option<Encryption>,
    pub(crate) unencrypted: Unencrypted,
}

pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Keeps a socket of the server open while it lives. The relay ends with its runtime; a hold ends with its connection, and not before
/// its owner is told.
pub(crate) type Open = Box<dyn Any + Send + Sync>;

/// The reason why a login ended.
pub(crate) enum End {
    /// Another attempt would end in the same way.
    Refused(String),
    /// TLS did not begin, for a reason that may pass.
    #[cfg(feature = "tls")]
    Interrupted(String),
    Failed(io::Error),
}

impl End {
    fn during(self, operation: &'static str) -> Error {
        match self {
            Self::Refused(reason) => Error::permanent(NAME, operation, reason),
            #[cfg(feature = "tls")]
            Self::Interrupted(reason) => Error::transient(NAME, operation, reason),
            Self::Failed(error) => error::failed(operation, sqlx::Error::Io(error)),
        }
    }
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

impl Route {
    /// Connects, with the login under guard. Further bytes are relayed by a task of the current runtime until either end closes. Returns
    /// also what keeps the server's socket open.
    ///
    /// # Errors
    /// A permanent one for a server that asks for the password itself, or for its encryption with a key that nobody vouches for; and for
    /// one that TLS does not begin with.
    pub(crate) async fn connect(
        &self,
        operation: &'static str,
        options: &MySqlConnectOptions,
    ) -> Result<(MySqlConnection, Open)> {
        let failed = |error: io::Error| End::Failed(error).during(operation);
        let (server, open, is_local) = self.reach().await.map_err(failed)?;
        let meeting = Meeting::new().map_err(failed)?;
        // Whether the password itself may be asked for is decided here.
        let options = meeting.route(options.clone().enable_cleartext_plugin(self.encryption.is_some()));
        let login = async {
            let mut library = meeting.accept().await?;
            let server = self.guard(server, &mut library, is_local).await?;
            Ok::<_, End>((server, library))
        };
        let mut connecting = Box::pin(options.connect());
        let (server, library) = tokio::select! {
            biased;
            ended = login => ended.map_err(|end| end.during(operation))?,
            // No login was seen, so it is none.
            connected = &mut connecting => return match connected {
                Ok(_) => Err(failed(io::ErrorKind::ConnectionAborted.into())),
                Err(error) => Err(error::failed(operation, error)),
            },
        };
        tokio::spawn(relay(server, library));
        let connected = connecting
            .await
            .map_err(|error| error::failed(operation, error))?;
        Ok((connected, open))
    }

    /// Connects to the server. Returns also what keeps it open, and whether it is one of this host.
    async fn reach(&self) -> io::Result<(Box<dyn Stream>, Open, bool)> {
        if let Some(socket) = &self.socket {
            #[cfg(unix)]
            {
                let stream = tokio::net::UnixStream::connect(socket).await?.into_std()?;
                let open = Box::new(stream.try_clone()?);
                return Ok((Box::new(tokio::net::UnixStream::from_std(stream)?), open, true));
            }
            #[cfg(not(unix))]
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("this system has no Unix sockets: {}", socket.display()),
            ));
        }
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        let _ = stream.set_nodelay(true);
        let peer = stream.peer_addr()?;
        if self.encryption.is_none() && self.has_password {
            self.unencrypted.note(NAME, &self.host, Some(peer), "tls=verify");
        }
        let is_local = peer.ip().to_canonical().is_loopback();
        let stream = stream.into_std()?;
        let open = Box::new(stream.try_clone()?);
        Ok((Box::new(TcpStream::from_std(stream)?), open, is_local))
    }

    /// Passes on the packets of a login, in turns as the protocol has them, up to the server's last word. A key would be taken out of turn,
    /// too, so nothing is passed on ahead of its turn. Returns the server's stream.
    async fn guard(
        &self,
        mut server: Box<dyn Stream>,
        library: &mut impl Stream,
        is_local: bool,
    ) -> std::result::Result<Box<dyn Stream>, End> {
        let trusts = match self.public_key {
            // There is none to give away.
            _ if !self.has_password => true,
            PublicKey::Local => is_local,
            PublicKey::Always => true,
            PublicKey::Never => false,
        };
        let mut greeting = Packet::read(&mut server).await?;
        match greeting.payload() {
            [ERR, ..] if greeting.is_whole_error() => {
                greeting.write(library).await?;
                return Ok(server);
            }
            [GREETING, ..] if greeting.is_whole_greeting() => self.check(&greeting)?,
            _ => return Err(unexpected("a server of another kind")),
        }
        if self.encryption.is_some() {
            if !greeting.offers_tls() {
                return Err(End::Refused(
                    "the server does not speak TLS; configure it there".to_owned(),
                ));
            }
            greeting.name_no_sha256();
        }
        greeting.write(library).await?;
        let mut reply = Packet::read(library).await?;
        let mut handshake = None;
        if let Some(encryption) = &self.encryption {
            // Its server reads the capabilities once, from the request for TLS.
            let request = reply.request_for_tls()?;
            request.write(&mut server).await?;
            let begun = encryption.begin(&self.host, server).await?;
            (server, handshake) = (begun.0, Some(begun.1));
        }
        loop {
            if handshake.is_none() && KEY_REQUESTS.contains(&reply.payload()) && !trusts {
                return Err(End::Refused(
                    "the server needs the password encrypted with its public key, and without TLS anyone on the way could send another \
                     one; connect with tls=verify, or set public_key=always if the network up to the server is trusted"
                        .to_owned(),
                ));
            }
            reply.write(&mut server).await?;
            loop {
                let packet = Packet::read(&mut server).await;
                let mut packet = match (packet, &handshake) {
                    // With TLS 1.3, a server looks at the client's certificate after the handshake.
                    (Err(End::Failed(error)), Some(handshake)) => return Err(handshake.ended_by(error)),
                    (packet, _) => packet?,
                };
                self.check(&packet)?;
                if handshake.is_some() && packet.wants_the_password() {
                    if !self.is_verified() && !trusts {
                        return Err(End::Refused(
                            "the server needs the password itself, and with tls=unverified it may be anybody's; connect with tls=verify, \
                             or set public_key=always if the network up to the server is trusted"
                                .to_owned(),
                        ));
                    }
                    packet.switch_to_clear_text();
                }
                // sqlx reads what is not there.
                let is_whole = match packet.payload() {
                    [ERR, ..] => packet.is_whole_error(),
                    payload => payload != [MORE],
                };
                if !is_whole {
                    return Err(unexpected("a packet that is cut short"));
                }
                packet.write(library).await?;
                match packet.payload() {
                    [OK | ERR, ..] => return Ok(server),
                    [MORE, IS_KNOWN, ..] => {}
                    _ => break,
                }
            }
            reply = Packet::read(library).await?;
        }
    }

    /// Refuses a packet of the server with the plug-in for clear text, wherever in it the name is: whether this reads it as sqlx does must
    /// not matter.
    fn check(&self, packet: &Packet) -> std::result::Result<(), End> {
        if packet.has(CLEAR_TEXT) && !self.is_verified() {
            return Err(End::Refused(
                "the server asks for the password in clear text (mysql_clear_password), which it gets only if a certificate proves who \
                 it is; connect with tls=verify"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// A certificate proves which server it is, or there is no connection.
    fn is_verified(&self) -> bool {
        self.encryption.as_ref().is_some_and(Encryption::is_verified)
    }
}

/// Where the library meets this module: a socket with a name of its own that no file system has. The system says which process comes.
#[cfg(target_os = "linux")]
struct Meeting {
    listener: tokio::net::UnixListener,
    name: String,
}

#[cfg(target_os = "linux")]
impl Meeting {
    fn new() -> io::Result<Self> {
        let name = format!("\0lockkit-mysql-{:032x}", fastrand::u128(..));
        let listener = tokio::net::UnixListener::bind(&name)?;
        Ok(Self { listener, name })
    }

    fn route(&self, options: MySqlConnectOptions) -> MySqlConnectOptions {
        options.socket(&self.name)
    }

    /// Waits for the library. Others of the host are not let in.
    async fn accept(&self) -> io::Result<tokio::net::UnixStream> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            let who = stream.peer_cred()?.pid();
            if who.and_then(|pid| u32::try_from(pid).ok()) == Some(std::process::id()) {
                return Ok(stream);
            }
        }
    }
}

/// Where the library meets this module: a port. Whoever else of the host comes first gets a connection on which he has to log in himself, but
/// with this client's certificate, and at a Unix socket as this process's user. The library gets none.
#[cfg(not(target_os = "linux"))]
struct Meeting(tokio::net::TcpListener);

#[cfg(not(target_os = "linux"))]
impl Meeting {
    fn new() -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0))?;
        listener.set_nonblocking(true)?;
        tokio::net::TcpListener::from_std(listener).map(Self)
    }

    fn route(&self, options: MySqlConnectOptions) -> MySqlConnectOptions {
        let port = self.0.local_addr().map_or(0, |addr| addr.port());
        options.host("127.0.0.1").port(port)
    }

    async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = self.0.accept().await?;
        // Requests are small packets.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }
}

pub(crate) fn unexpected(what: &str) -> End {
    End::Failed(io::Error::new(io::ErrorKind::InvalidData, what))
}

/// Passes on bytes until either end closes its connection, and closes the other.
async fn relay(server: Box<dyn Stream>, library: impl Stream) {
    let (mut from_server, mut to_server) = split(server);
    let (from_library, to_library) = split(library);
    let replied = Replied::default();
    let mut requests = replied.since_requests_of(from_library);
    // How it ended is what the library finds at its end.
    {
        let mut up = pin!(copy(&mut requests, &mut to_server));
        tokio::select! {
            _ = &mut up => {}
            ended = replied.pass_on(&mut from_server, to_library) => {
                // What the library has sent before it closed still reaches the server.
                if ended.is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
                    let _ = timeout(LAST_WORDS, up).await;
                }
            }
        }
    }
    drop(requests);
    // Its owner still keeps it open.
    let _ = timeout(LAST_WORDS, to_server.shutdown()).await;
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

    /// True if all is there that sqlx reads of an error without looking: a number, and a state of five characters if it is marked as one.
    fn is_whole_error(&self) -> bool {
        match self.payload() {
            [ERR, _, _, b'#', state @ ..] => state.len() >= 5,
            [ERR, _, _, ..] => true,
            _ => false,
        }
    }

    /// True if all is there that sqlx reads of a greeting without looking: after the version a number, eight bytes of the nonce, capabilities,
    /// and what is reserved; the rest of the nonce; the name of a plug-in.
    fn is_whole_greeting(&self) -> bool {
        const FIXED: usize = 4 + 8 + 1 + 2 + 1 + 2 + 2 + 1 + 10;

        let mut parts = self
            .payload()
            .get(1..)
            .unwrap_or_default()
            .splitn(2, |byte| *byte == 0);
        let Some(rest) = parts.nth(1).filter(|rest| rest.len() >= FIXED) else {
            return false;
        };
        let nonce = usize::from(rest[FIXED - 11].saturating_sub(9)).max(12) + 1;
        rest.len() > FIXED + nonce
    }

    /// True if the server that greets so speaks TLS.
    fn offers_tls(&self) -> bool {
        // After the versions of the protocol and of the server: the number of the connection, half of the nonce, and a zero.
        const BEFORE: usize = 4 + 8 + 1;

        let mut parts = self
            .payload()
            .get(1..)
            .unwrap_or_default()
            .splitn(2, |byte| *byte == 0);
        let capabilities = parts.nth(1).and_then(|rest| rest.get(BEFORE..BEFORE + 2));
        capabilities.is_some_and(|bytes| bytes[1] & TLS != 0)
    }

    /// Has a greeting name a plug-in whose answer is a digest, instead of one for which sqlx would ask for a key at once. The server asks for
    /// the other one again.
    fn name_no_sha256(&mut self) {
        if self.payload().ends_with(SHA256) {
            self.0.truncate(self.0.len() - SHA256.len());
            self.0.extend(b"mysql_native_password\0");
            self.count();
        }
    }

    /// Makes this answer to a greeting the one that follows a request for TLS, and returns the request.
    fn request_for_tls(&mut self) -> std::result::Result<Self, End> {
        // Capabilities, the largest packet, the character set, and what is reserved.
        const LENGTH: usize = 32;

        let beginning = self.0.get_mut(..Self::HEADER + LENGTH);
        let beginning = beginning.ok_or_else(|| unexpected("no answer to the greeting"))?;
        beginning[Self::HEADER + 1] |= TLS;
        let mut request = Self(beginning.to_vec());
        request.count();
        // It is numbered as the next one.
        self.0[3] = self.0[3].wrapping_add(1);
        Ok(request)
    }

    /// True if a server with TLS asks for the password itself: of one plug-in, or by a switch to the other.
    fn wants_the_password(&self) -> bool {
        match self.payload() {
            [MORE, IS_UNKNOWN, ..] => true,
            [SWITCH, plugin @ ..] => plugin.starts_with(SHA256),
            _ => false,
        }
    }

    /// Makes this a request for the password that sqlx answers with it, and not with a request for a key: it knows of no TLS here.
    fn switch_to_clear_text(&mut self) {
        self.0.truncate(Self::HEADER);
        self.0.push(SWITCH);
        self.0.extend(CLEAR_TEXT);
        self.0.push(0);
        self.count();
    }

    /// Has the header say how long the packet is.
    fn count(&mut self) {
        let [low, middle, high, ..] = (self.0.len() - Self::HEADER).to_le_bytes();
        self.0[..3].copy_from_slice(&[low, middle, high]);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::{
        io::{BufRead as _, BufReader},
        process::{Command, Stdio},
    };

    use super::*;

    #[tokio::test]
    async fn a_stranger_who_comes_first_is_not_taken_for_the_library() {
        let meeting = Meeting::new().unwrap();
        let stranger = format!(
            "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0{}')\nprint('there', flush=True)\nsys.stdin.read()",
            &meeting.name[1..]
        );
        let mut stranger = Command::new("python3")
            .args(["-c", &stranger])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(stranger.stdout.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        assert_eq!(said, "there\n");
        let mut library = tokio::net::UnixStream::connect(&meeting.name).await.unwrap();
        let mut met = meeting.accept().await.unwrap();
        library.write_all(b"login").await.unwrap();
        let mut login = [0; 5];
        // The stranger says nothing for as long as it is there.
        timeout(Duration::from_mins(1), met.read_exact(&mut login))
            .await
            .expect("it met the library")
            .unwrap();
        assert_eq!(&login, b"login");
        drop(stranger.stdin.take());
        stranger.wait().unwrap();
    }
}
