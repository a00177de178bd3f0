//! From an address to a connection that is ready for use.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::select_ok;
use lockkit_core::{
    Error, Result,
    spi::{Secrets, Unencrypted},
};
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, IntoConnectionInfo, ProtocolVersion, PushInfo,
    RedisConnectionInfo, RedisError, RedisResult, Value,
    aio::MultiplexedConnection,
    io::tcp::{
        TcpSettings,
        socket2::{SockRef, TcpKeepalive},
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
};

#[cfg(feature = "tls")]
use crate::certificates::{self, Trust};
use crate::{
    config::{Address, RedisConfig, is_path, shown},
    connection_io::{ConnectionIo, IoHandle},
    error::{NAME, NO_MASTER, OF_SEVERAL, failed, words},
    intake::{BoundedStream, Intake},
    layout,
    redlock::RestartQuarantine,
    script,
};

mod sentinel;

use self::sentinel::LatestEpoch;
pub(crate) use self::sentinel::{HostPort, SentinelWatch};

/// Handles each push that comes on a connection.
pub(crate) type OnPush = Arc<dyn Fn(PushInfo) + Send + Sync>;

/// A new connection, ready for use.
pub(crate) struct Established {
    pub(crate) stream: MultiplexedConnection,
    /// Runs the I/O of the connection.
    pub(crate) io: IoHandle,
    pub(crate) intake: Arc<Intake>,
    pub(crate) server: ServerInfo,
}

/// A connection after the login.
struct Opened {
    stream: MultiplexedConnection,
    io: IoHandle,
    intake: Arc<Intake>,
}

/// Describes the server, in its own words.
pub(crate) struct ServerInfo {
    /// The host and port by which it was reached.
    pub(crate) address: HostPort,
    /// Identifies its process.
    pub(crate) run_id: String,
    /// The number that it has given the connection, if it tells.
    pub(crate) client_id: Option<i64>,
    /// Its `maxmemory-policy`.
    pub(crate) eviction: String,
    pub(crate) role: Role,
    /// What to do once it is a replica.
    pub(crate) if_replica: &'static str,
}

/// The part that the server plays for its client.
pub(crate) enum Role {
    /// The only master, with its own compare-and-delete, if it has one that this user may run.
    Only(Option<CompareAndDelete>),
    /// One of several masters, with the marker beside its data with which it has a vote.
    Voter(String),
}

impl ServerInfo {
    /// Returns `true` for one of several masters.
    pub(crate) fn is_voter(&self) -> bool {
        matches!(self.role, Role::Voter(_))
    }

    pub(crate) fn marker(&self) -> &str {
        match &self.role {
            Role::Only(_) => "",
            Role::Voter(marker) => marker,
        }
    }
}

/// A server's own command to delete a string that has a certain value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CompareAndDelete {
    /// Valkey's, from 9.0 on.
    DelIfEq,
    /// Redis's, from 8.4 on.
    DelEx,
}

impl CompareAndDelete {
    pub(crate) fn command(self, key: &[u8], value: &str) -> Cmd {
        let mut delete = Cmd::with_capacity(4, 192);
        match self {
            Self::DelIfEq => delete.arg("DELIFEQ").arg(key),
            Self::DelEx => delete.arg("DELEX").arg(key).arg("IFEQ"),
        };
        delete.arg(value);
        delete
    }

    /// Finds out which one the server runs for this user, by a key that is never there.
    async fn find(nowhere: &str, connection: &mut MultiplexedConnection) -> RedisResult<Option<Self>> {
        let all = [Self::DelIfEq, Self::DelEx];
        let mut trial = redis::pipe();
        for command in all {
            trial.add_command(command.command(nowhere.as_bytes(), ""));
        }
        let replies = connection.send_packed_commands(&trial, 0, all.len()).await?;
        let found = replies.iter().position(|reply| matches!(reply, Value::Int(_)));
        Ok(found.and_then(|at| all.get(at).copied()))
    }
}

/// The longest time until a connection to a server is ready.
const READY_WITHIN: Duration = Duration::from_secs(2);

/// Makes connections to one master.
#[derive(Clone)]
pub(crate) struct Connector {
    address: Address,
    sentinel: Option<String>,
    /// A key of the namespace that is never there.
    nowhere: String,
    /// The index of the sentinel that last named a server that was a master, or another one than the others knew.
    right: Arc<AtomicUsize>,
    latest: Arc<LatestEpoch>,
    /// Set for one of several masters, with its number among them.
    quarantine: Option<(Arc<RestartQuarantine>, usize)>,
    connection_io: OnceLock<ConnectionIo>,
    unencrypted: Unencrypted,
    #[cfg(feature = "tls")]
    trust: Option<Trust>,
}

impl Connector {
    /// Does no I/O but to read certificates.
    pub(crate) fn new(config: &RedisConfig) -> Result<Self> {
        let address = config.address()?;
        #[cfg(feature = "tls")]
        let trust = address.tls.then(|| Trust::new(config)).transpose()?;
        Ok(Self {
            address,
            sentinel: config.sentinel.clone(),
            nowhere: layout::nowhere(&config.namespace),
            right: Arc::default(),
            latest: Arc::default(),
            quarantine: None,
            connection_io: OnceLock::new(),
            unencrypted: Unencrypted::default(),
            #[cfg(feature = "tls")]
            trust,
        })
    }

    /// Makes it one of several masters, by its number among them.
    pub(crate) fn voter(
        mut self,
        quarantine: &Arc<RestartQuarantine>,
        master: usize,
        connection_io: &ConnectionIo,
        unencrypted: &Unencrypted,
    ) -> Self {
        self.quarantine = Some((quarantine.clone(), master));
        self.connection_io = OnceLock::from(connection_io.clone());
        self.unencrypted = unencrypted.clone();
        self
    }

    /// Notes that the connection made last is in use.
    pub(crate) fn connected(&self) {
        if let Some((quarantine, _)) = &self.quarantine {
            quarantine.connected();
        }
    }

    /// Returns what is blanked in whatever the servers say.
    pub(crate) fn secrets(&self) -> &Secrets {
        &self.address.secrets
    }

    /// Returns what to do about a replica. Only sentinels tell the client of another server.
    fn if_replica(&self) -> &'static str {
        match (&self.quarantine, &self.sentinel) {
            (Some(_), _) => OF_SEVERAL,
            (None, Some(_)) => "wait until the sentinels name another",
            (None, None) => NO_MASTER,
        }
    }

    /// Returns the server's address, without credentials.
    pub(crate) fn server(&self) -> String {
        self.address.server(self.sentinel.as_deref())
    }

    /// Connects to the master, loads all scripts, and subscribes to `channel`, if one is given. Pushes go to the handler that
    /// `on_push` makes for each try. One of several masters has been let in by its quarantine. Nothing is written, so that a server
    /// which refuses writes can still be looked at, and holds can be renewed and released where memory is full.
    ///
    /// A sentinel that was cut off may name a server that is no longer the master. Then the other sentinels are asked, too, and
    /// the one that was right is asked first the next time.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection.
    pub(crate) async fn connect(
        &self,
        channel: Option<&str>,
        on_push: impl FnMut() -> OnPush + Send,
    ) -> Result<Established> {
        let connected = self.connect_to_master(channel, on_push).await;
        connected.map_err(|error| self.address.secrets.blanked(error))
    }

    async fn connect_to_master(
        &self,
        channel: Option<&str>,
        mut on_push: impl FnMut() -> OnPush + Send,
    ) -> Result<Established> {
        let hosts = &self.address.hosts;
        let Some(master) = &self.sentinel else {
            return self.connect_to(&hosts[0], channel, &on_push()).await;
        };
        let mut tried = Vec::new();
        let (mut silent, mut unusable) = (None, None);
        let first = self.right.load(Ordering::Relaxed);
        for n in (0..hosts.len()).map(|n| (first + n) % hosts.len()) {
            match self.ask_sentinel(n, master).await {
                // One that is wrong for good does not speak for those that may answer later.
                Err(err) if err.is_transient() || silent.is_none() => silent = Some(err),
                Err(_) => {}
                Ok(named) if tried.contains(&named) => {}
                Ok(named) => match self.connect_to(&named, channel, &on_push()).await {
                    Ok(established) => {
                        self.right.store(n, Ordering::Relaxed);
                        return Ok(established);
                    }
                    Err(err) => {
                        unusable = Some(self.about_master(n, &named, err));
                        tried.push(named);
                    }
                },
            }
        }
        // A server's fault says more than a sentinel's silence.
        let err = unusable.or(silent);
        Err(err.unwrap_or_else(|| Error::transient(NAME, "connect", "there is no sentinel to ask")))
    }

    async fn connect_to(
        &self,
        server: &HostPort,
        channel: Option<&str>,
        on_push: &OnPush,
    ) -> Result<Established> {
        let handshake = self.handshake(server, channel, on_push);
        let established = tokio::time::timeout(READY_WITHIN, handshake).await;
        established.unwrap_or_else(|_| {
            let reason = format!("the server does not answer within {READY_WITHIN:?}");
            let silent = io::Error::new(io::ErrorKind::TimedOut, reason);
            Err(Error::transient(NAME, "connect", silent))
        })
    }

    async fn handshake(
        &self,
        server: &HostPort,
        channel: Option<&str>,
        on_push: &OnPush,
    ) -> Result<Established> {
        let (host, port) = (&server.0, server.1);
        let Opened {
            stream: mut connection,
            io,
            intake,
        } = self.open(host, port, self.address.db, true, on_push).await?;
        let connecting = |error| failed("connect", intake.explain(error));
        let info: String = redis::cmd("INFO")
            .query_async(&mut connection)
            .await
            .map_err(connecting)?;
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        // Valkey's name of the field, and Redis's.
        if [field("server_mode"), field("redis_mode")].contains(&"sentinel".to_owned()) {
            return Err(Error::permanent(
                NAME,
                "connect",
                format!(
                    "{} is a sentinel: give the option `sentinel` with the master's name",
                    shown(host, port)
                ),
            ));
        }
        if field("cluster_enabled") == "1" {
            return Err(cluster());
        }
        if field("role") != "master" {
            let reason = format!("{} is a replica: {}", shown(host, port), self.if_replica());
            return Err(match self.quarantine {
                None => Error::transient(NAME, "connect", reason),
                // Nothing promotes or demotes Redlock's masters.
                Some(_) => Error::permanent(NAME, "connect", reason),
            });
        }
        let client_id = redis::cmd("CLIENT")
            .arg("ID")
            .query_async(&mut connection)
            .await
            .ok();
        if let Some(channel) = channel {
            connection.subscribe(channel).await.map_err(connecting)?;
        }
        let run_id = field("run_id");
        let scripts: &[_] = match &self.quarantine {
            None => &script::ALL,
            Some(_) => &script::REDLOCK,
        };
        script::load(scripts, &mut connection).await.map_err(connecting)?;
        let role = match &self.quarantine {
            None => {
                let command = CompareAndDelete::find(&self.nowhere, &mut connection).await;
                Role::Only(command.map_err(connecting)?)
            }
            Some((quarantine, master)) => {
                let named = shown(host, port);
                Role::Voter(
                    quarantine
                        .greet(*master, &named, &run_id, &mut connection)
                        .await?,
                )
            }
        };
        Ok(Established {
            stream: connection,
            io,
            intake,
            server: ServerInfo {
                address: server.clone(),
                run_id,
                client_id,
                // It is shown.
                eviction: self
                    .address
                    .secrets
                    .blank(&field("maxmemory_policy"))
                    .into_owned(),
                role,
                if_replica: self.if_replica(),
            },
        })
    }

    /// Opens a connection and logs in, as the user of the URL if `as_user`.
    async fn open(&self, host: &str, port: u16, db: i64, as_user: bool, on_push: &OnPush) -> Result<Opened> {
        let connecting = |error| failed("connect", error);
        // Only for the settings: the stream is opened here, whatever the address.
        let info = ConnectionAddr::Tcp(host.to_owned(), port)
            .into_connection_info()
            .map_err(connecting)?;
        let mut settings = info
            .redis_settings()
            .clone()
            .set_protocol(ProtocolVersion::RESP3)
            .set_db(db);
        if let Some(username) = self.address.username.as_ref().filter(|_| as_user) {
            settings = settings.set_username(username);
        }
        if let Some(password) = self.address.password.as_ref().filter(|_| as_user) {
            settings = settings.set_password(password);
        }
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(5))
            .with_interval(Duration::from_secs(2));
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(Duration::from_secs(5));
        let intake = Arc::<Intake>::default();
        let (on_push, pushed) = (on_push.clone(), intake.clone());
        // The driver bounds each operation, and the supervisor finds a silent connection. So there is no timeout here.
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(None)
            .set_pipeline_buffer_size(1024)
            .set_push_sender(move |push: PushInfo| -> Result<(), redis::aio::SendError> {
                pushed.note_push();
                on_push(push);
                Ok(())
            });
        let unreachable = |error: io::Error| connecting(error.into());
        if is_path(host) {
            let stream = socket_at(host).await.map_err(unreachable)?;
            return self.log_in(stream, &settings, config, intake).await;
        }
        let stream = stream_to(host, port, &tcp).await.map_err(unreachable)?;
        #[cfg(feature = "tls")]
        if let Some(trust) = &self.trust {
            let stream = trust.shake_hands(&shown(host, port), stream).await?;
            return self.log_in(stream, &settings, config, intake).await;
        }
        if as_user && self.address.password.is_some() {
            let instead = match self.quarantine {
                None => "rediss://",
                Some(_) => "tls=true",
            };
            let peer = stream.peer_addr().ok();
            self.unencrypted.note(NAME, &shown(host, port), peer, instead);
        }
        self.log_in(stream, &settings, config, intake).await
    }

    /// Logs in on a stream, whose I/O runs here.
    async fn log_in(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        settings: &RedisConnectionInfo,
        config: AsyncConnectionConfig,
        intake: Arc<Intake>,
    ) -> Result<Opened> {
        let stream = BoundedStream::new(stream, intake.clone());
        let (stream, io) = MultiplexedConnection::new_with_config(settings, stream, config)
            .await
            .map_err(|error| self.login_failed(intake.explain(error)))?;
        let io = self.connection_io.get_or_init(ConnectionIo::start).run(io);
        Ok(Opened { stream, io, intake })
    }

    /// Converts an error of the login.
    fn login_failed(&self, error: RedisError) -> Error {
        // Each of several masters has credentials of its own.
        if self.quarantine.is_some() && self.address.password.is_none() && error.code() == Some("NOAUTH") {
            let words = words(&error);
            return Error::permanent(
                NAME,
                "connect",
                format!("{words} (write its password before this master: redlock://a,b,:password@c)"),
            );
        }
        login_failed(error)
    }
}

/// Connects to the Unix socket at this path.
#[cfg(unix)]
async fn socket_at(path: &str) -> io::Result<tokio::net::UnixStream> {
    tokio::net::UnixStream::connect(path).await
}

/// There are none on this system.
#[cfg(not(unix))]
async fn socket_at(_path: &str) -> io::Result<TcpStream> {
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "this system has no Unix sockets",
    ))
}

/// Connects to all of the host's addresses at once, and keeps the first connection.
async fn stream_to(host: &str, port: u16, settings: &TcpSettings) -> io::Result<TcpStream> {
    let connecting: Vec<_> = lookup_host((host, port))
        .await?
        .map(|address| Box::pin(TcpStream::connect(address)))
        .collect();
    if connecting.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    }
    let (stream, _) = select_ok(connecting).await?;
    stream.set_nodelay(settings.nodelay())?;
    let socket = SockRef::from(&stream);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(settings.user_timeout())?;
    Ok(stream)
}

fn cluster() -> Error {
    Error::unsupported(
        NAME,
        "Redis Cluster; take a server that is no node of a cluster, or another backend",
    )
}

/// Converts an error of the login: the server's version, the client's certificate, the user or the database.
fn login_failed(error: RedisError) -> Error {
    #[cfg(feature = "tls")]
    if let Some(reason) = certificates::refusal(&error) {
        return Error::permanent(NAME, "connect", reason);
    }
    let text = error.to_string();
    if text.contains("unknown command") {
        // The server's own words would repeat the request, and with it the password.
        return Error::permanent(
            NAME,
            "connect",
            "the server does not know HELLO: take Redis 6 or newer, and do not rename that command",
        );
    }
    if text.contains("cluster mode") {
        return cluster();
    }
    if let Some((_, words)) = text.split_once("refused to switch database - ") {
        let words = words.rsplit(": ").next().unwrap_or_default();
        return Error::permanent(
            NAME,
            "connect",
            format!("{words} (correct the database in the URL, to the one that all clients use)"),
        );
    }
    failed("connect", error)
}
