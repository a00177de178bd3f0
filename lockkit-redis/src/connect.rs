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
use lockkit_core::{Error, Result};
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, IntoConnectionInfo, ProtocolVersion, PushInfo, RedisError,
    RedisResult, Value,
    aio::MultiplexedConnection,
    io::tcp::{
        TcpSettings,
        socket2::{SockRef, TcpKeepalive},
    },
};
use tokio::net::{TcpStream, lookup_host};

use crate::{
    config::{Address, RedisConfig, shown},
    connection_io::{ConnectionIo, IoHandle},
    error::{NAME, failed, unexpected},
    layout,
    redlock::RestartQuarantine,
    script,
};

/// What to do with each push that comes on a connection.
pub(crate) type OnPush = Arc<dyn Fn(PushInfo) + Send + Sync>;

/// A connection, and what is known about where it leads.
pub(crate) struct Established {
    pub(crate) connection: MultiplexedConnection,
    /// Which process it leads to.
    pub(crate) run_id: String,
    /// What that process calls the connection, if it tells.
    pub(crate) id: Option<i64>,
    /// What becomes of keys when memory runs out.
    pub(crate) eviction: String,
    /// If it compares and deletes by itself, and this user may have it do so.
    pub(crate) native: Option<Native>,
    /// It is one of several masters.
    pub(crate) votes: bool,
    /// The marker beside its data with which it then has a vote.
    marker: String,
    /// What runs the connection, if it is not a task of its own.
    pub(crate) driven: Option<IoHandle>,
}

impl Established {
    pub(crate) fn marker(&self) -> &str {
        &self.marker
    }
}

/// A server's own command to delete a string that has a certain value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Native {
    /// Valkey's, from 9.0 on.
    DelIfEq,
    /// Redis's, from 8.4 on.
    DelEx,
}

impl Native {
    pub(crate) fn delete(self, key: &[u8], value: &str) -> Cmd {
        let mut delete = Cmd::with_capacity(4, 192);
        match self {
            Self::DelIfEq => delete.arg("DELIFEQ").arg(key),
            Self::DelEx => delete.arg("DELEX").arg(key).arg("IFEQ"),
        };
        delete.arg(value);
        delete
    }

    /// Which one the server does for this user, found out on a key that is never there.
    async fn of(connection: &mut MultiplexedConnection) -> RedisResult<Option<Self>> {
        let all = [Self::DelIfEq, Self::DelEx];
        let mut trial = redis::pipe();
        for native in all {
            trial.add_command(native.delete(layout::NOWHERE, ""));
        }
        // A refusal of one is an answer like the other's.
        let answers = connection.send_packed_commands(&trial, 0, all.len()).await?;
        let done = answers.iter().position(|answer| matches!(answer, Value::Int(_)));
        Ok(done.and_then(|at| all.get(at).copied()))
    }
}

/// How long it may take until a connection to a server can be used.
const READY_WITHIN: Duration = Duration::from_secs(2);
/// How long a sentinel may take to say where the master is.
const SENTINEL_PATIENCE: Duration = Duration::from_millis(500);

/// Makes connections to one master.
#[derive(Clone)]
pub(crate) struct Connector {
    address: Address,
    sentinel: Option<String>,
    /// Which of the sentinels last named a master that is one.
    right: Arc<AtomicUsize>,
    /// If it is one of several.
    guard: Option<(Arc<RestartQuarantine>, usize)>,
    /// What is to run the connections.
    connection_io: OnceLock<ConnectionIo>,
    #[cfg(feature = "tls")]
    ca: Option<Vec<u8>>,
}

impl Connector {
    /// Without I/O except for reading certificates.
    pub(crate) fn new(config: &RedisConfig) -> Result<Self> {
        let address = config.address()?;
        #[cfg(feature = "tls")]
        let ca = match &config.ca {
            None => None,
            Some(path) => Some(std::fs::read(path).map_err(|err| {
                Error::invalid_option("ca", format!("{} cannot be read: {err}", path.display()))
            })?),
        };
        #[cfg(feature = "tls")]
        if address.tls {
            // Without a default, rustls panics where a program's other crates bring several providers. An earlier
            // choice of the program stays.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        Ok(Self {
            address,
            sentinel: config.sentinel.clone(),
            right: Arc::default(),
            guard: None,
            connection_io: OnceLock::new(),
            #[cfg(feature = "tls")]
            ca,
        })
    }

    /// One of several masters, by its number among them.
    pub(crate) fn guarded(
        mut self,
        guard: &Arc<RestartQuarantine>,
        master: usize,
        connection_io: &ConnectionIo,
    ) -> Self {
        self.guard = Some((guard.clone(), master));
        self.connection_io = OnceLock::from(connection_io.clone());
        self
    }

    /// The connection that was dialled last is in use.
    pub(crate) fn connected(&self) {
        if let Some((guard, _)) = &self.guard {
            guard.connected();
        }
    }

    /// What it leads to, without credentials.
    pub(crate) fn server(&self) -> String {
        self.address.server(self.sentinel.as_deref())
    }

    /// A connection to the master, with every script known to it, and pushes on `channel`, if one is given, going to what
    /// `on_push` makes for each try. The token counter of the one master is above its clock; one of several has been let
    /// in by the guard.
    ///
    /// A sentinel that was cut off may name a master that is none any more: then the others are asked, too, and whoever
    /// was right is asked first the next time.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection.
    pub(crate) async fn dial(
        &self,
        channel: Option<&str>,
        mut on_push: impl FnMut() -> OnPush + Send,
    ) -> Result<Established> {
        let hosts = &self.address.hosts;
        let Some(master) = &self.sentinel else {
            return self.dial_server(&hosts[0], channel, &on_push()).await;
        };
        let mut tried = Vec::new();
        let (mut silent, mut unusable) = (None, None);
        let first = self.right.load(Ordering::Relaxed);
        for n in (0..hosts.len()).map(|n| (first + n) % hosts.len()) {
            match self.ask_sentinel(&hosts[n], master).await {
                Err(err) => silent = Some(err),
                Ok(named) if tried.contains(&named) => {}
                Ok(named) => match self.dial_server(&named, channel, &on_push()).await {
                    Ok(dialled) => {
                        self.right.store(n, Ordering::Relaxed);
                        return Ok(dialled);
                    }
                    Err(err) => {
                        unusable = Some(err);
                        tried.push(named);
                    }
                },
            }
        }
        // What is wrong with a master says more than that a sentinel is silent.
        let err = unusable.or(silent);
        Err(err.unwrap_or_else(|| Error::transient(NAME, "connect", "there is no sentinel to ask")))
    }

    async fn dial_server(
        &self,
        server: &(String, u16),
        channel: Option<&str>,
        on_push: &OnPush,
    ) -> Result<Established> {
        let dialled = tokio::time::timeout(READY_WITHIN, self.greet(server, channel, on_push)).await;
        dialled.unwrap_or_else(|_| Err(Error::transient(NAME, "connect", "the server does not answer")))
    }

    async fn greet(
        &self,
        (host, port): &(String, u16),
        channel: Option<&str>,
        on_push: &OnPush,
    ) -> Result<Established> {
        let port = *port;
        let (mut connection, driven) = self.open(host, port, self.address.db, true, on_push).await?;
        let connecting = |error| failed("connect", error);
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
        // Valkey's name for it, and everyone else's.
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
            let reason = format!("{} is a replica; locks need the master", shown(host, port));
            return Err(match self.guard {
                None => Error::transient(NAME, "connect", reason),
                // Nobody promotes and demotes these.
                Some(_) => Error::permanent(NAME, "connect", reason),
            });
        }
        let id = redis::cmd("CLIENT")
            .arg("ID")
            .query_async(&mut connection)
            .await
            .ok();
        if let Some(channel) = channel {
            connection.subscribe(channel).await.map_err(connecting)?;
        }
        let run_id = field("run_id");
        let mut marker = String::new();
        let native = match &self.guard {
            None => {
                script::load(&script::ALL, &mut connection)
                    .await
                    .map_err(connecting)?;
                prepare_counter(&mut connection).await?;
                Native::of(&mut connection).await.map_err(connecting)?
            }
            Some((guard, master)) => {
                script::load(&script::REDLOCK, &mut connection)
                    .await
                    .map_err(connecting)?;
                marker = guard.greet(*master, &run_id, &mut connection).await?;
                None
            }
        };
        Ok(Established {
            run_id,
            eviction: field("maxmemory_policy"),
            connection,
            id,
            native,
            votes: self.guard.is_some(),
            marker,
            driven,
        })
    }

    async fn open(
        &self,
        host: &str,
        port: u16,
        db: i64,
        as_user: bool,
        on_push: &OnPush,
    ) -> Result<(MultiplexedConnection, Option<IoHandle>)> {
        let address = if self.address.tls {
            ConnectionAddr::TcpTls {
                host: host.to_owned(),
                port,
                insecure: false,
                tls_params: None,
            }
        } else {
            ConnectionAddr::Tcp(host.to_owned(), port)
        };
        let connecting = |error| failed("connect", error);
        let info = address.into_connection_info().map_err(connecting)?;
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
        let on_push = on_push.clone();
        // How long to wait for an answer is for the driver to say; a silent connection is the link's to find.
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(None)
            .set_pipeline_buffer_size(1024)
            .set_push_sender(move |push: PushInfo| -> Result<(), redis::aio::SendError> {
                on_push(push);
                Ok(())
            });
        // A connection that the library encrypts has a task of its own.
        if !self.address.tls {
            let stream = stream_to(host, port, &tcp)
                .await
                .map_err(|error| connecting(error.into()))?;
            let (connection, driver) = MultiplexedConnection::new_with_config(&settings, stream, config)
                .await
                .map_err(greeted)?;
            return Ok((
                connection,
                Some(self.connection_io.get_or_init(ConnectionIo::start).run(driver)),
            ));
        }
        let info = info.set_redis_settings(settings).set_tcp_settings(tcp);
        #[cfg(feature = "tls")]
        let client = match &self.ca {
            Some(ca) => {
                let certificates = redis::TlsCertificates {
                    client_tls: None,
                    root_cert: Some(ca.clone()),
                };
                redis::Client::build_with_tls(info, certificates)
            }
            None => redis::Client::open(info),
        };
        #[cfg(not(feature = "tls"))]
        let client = redis::Client::open(info);
        let connection = client
            .map_err(connecting)?
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .map_err(greeted)?;
        Ok((connection, None))
    }

    /// The master's address, as this sentinel has it.
    async fn ask_sentinel(&self, (host, port): &(String, u16), master: &str) -> Result<(String, u16)> {
        let nothing: OnPush = Arc::new(|_| {});
        let asking = async {
            let (mut connection, _driven) = match self.open(host, *port, 0, true, &nothing).await {
                // Sentinels have users of their own, or, more often, none.
                Err(err) if !err.is_transient() => self
                    .open(host, *port, 0, false, &nothing)
                    .await
                    .map_err(|_| err)?,
                opened => opened?,
            };
            let known: Option<(String, u16)> = redis::cmd("SENTINEL")
                .arg("GET-MASTER-ADDR-BY-NAME")
                .arg(master)
                .query_async(&mut connection)
                .await
                .map_err(|error| failed("connect", error))?;
            known.ok_or_else(|| {
                let reason = format!("the sentinel {} knows no master `{master}`", shown(host, *port));
                Error::transient(NAME, "connect", reason)
            })
        };
        let answer = tokio::time::timeout(SENTINEL_PATIENCE, asking).await;
        answer.unwrap_or_else(|_| {
            let reason = format!("the sentinel {} does not answer", shown(host, *port));
            Err(Error::transient(NAME, "connect", reason))
        })
    }
}

/// To whichever of the host's addresses answers first.
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

/// Tokens are to go on above the server's clock.
async fn prepare_counter(connection: &mut MultiplexedConnection) -> Result<()> {
    let floor = script::FLOOR.call(b"");
    let reply = connection.send_packed_command(&floor.command).await;
    match reply.map_err(|error| failed("connect", error))? {
        Value::Int(_) => Ok(()),
        other => Err(unexpected("connect", &other)),
    }
}

fn cluster() -> Error {
    Error::unsupported(
        NAME,
        "Redis Cluster; locks need one master: give it one of its own, or use redlock:// or another backend",
    )
}

/// What the server has against the first words on a connection: version, user and database.
fn greeted(error: RedisError) -> Error {
    let text = error.to_string();
    if text.contains("unknown command") {
        // Without its own words: they repeat the request, and with it the password.
        return Error::permanent(
            NAME,
            "connect",
            "the server does not know HELLO: it is older than Redis 6",
        );
    }
    if text.contains("cluster mode") {
        return cluster();
    }
    failed("connect", error)
}
