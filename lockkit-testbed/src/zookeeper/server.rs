use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Write as _},
    net::SocketAddr,
    process::Command,
    sync::Arc,
    time::Duration,
};

use super::{JARS, JAVA, TLS_JARS, journal, wire};
use crate::{
    Certificates, Clock, Port, Process, ServerPair,
    process::{START_UP, controls},
};

/// The servers' tick.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// The longest that a server may take for one step of a handshake. Before the first one a JVM loads all that it needs for that, which takes
/// seconds on a busy machine.
const HANDSHAKE: Duration = Duration::from_secs(20);

/// A private ZooKeeper server on a port of its own, which it keeps over restarts. Its data stay on disk.
///
/// Its tick is 100 ms, and it grants session timeouts from 200 ms to a minute. Its dropping ends it, and so does the
/// end of the test process. Everything here blocks until it is done, and gives up on a server that does not answer for
/// 20 s.
#[derive(Debug)]
pub struct ZkServer {
    process: Process,
    port: Port,
    secure: Option<Port>,
    _clock: Option<Clock>,
    certificates: Option<Arc<Certificates>>,
}

/// The options of a [`ZkServer`].
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct ZkBuilder {
    syncs: bool,
    used: Option<(String, i32)>,
    clock: Option<Clock>,
    reaps_seldom: bool,
    is_large: bool,
    certificates: Option<Arc<Certificates>>,
    directives: Vec<String>,
}

impl ZkBuilder {
    /// Has each transaction on disk before it is acknowledged, as a production server does.
    pub fn fsync(mut self) -> Self {
        self.syncs = true;
        self
    }

    /// Begins with a directory `path`, such as `/locks`, whose next sequential node is numbered `next`.
    pub fn used(mut self, path: &str, next: i32) -> Self {
        self.used = Some((path.to_owned(), next));
        self
    }

    /// Runs by `clock`, which the test can set forward and back.
    pub fn clock(mut self, clock: &Clock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Looks once a minute for empty containers to delete, as a production server does. By default it is every 300 ms.
    pub fn reaps_seldom(mut self) -> Self {
        self.reaps_seldom = true;
        self
    }

    /// Has room for a million nodes: 3 GiB of heap. By default it has 128 MiB, which 100,000 held locks fill.
    pub fn large(mut self) -> Self {
        self.is_large = true;
        self
    }

    /// Also serves TLS, at [`secure_addr`](ZkServer::secure_addr), with the server's certificate among `certificates`. A client
    /// needs none; to ask for one, add the directive `ssl.clientAuth=need`.
    pub fn tls(mut self, certificates: &Arc<Certificates>) -> Self {
        self.certificates = Some(certificates.clone());
        self
    }

    /// Any other line of the configuration.
    pub fn directive(mut self, line: impl Into<String>) -> Self {
        self.directives.push(line.into());
        self
    }

    /// Starts a server that is no member of an ensemble, and waits until it answers.
    ///
    /// # Errors
    /// If it does not come up within a minute, with the end of what it printed.
    pub fn start(self) -> io::Result<ZkServer> {
        let server = self.make("org.apache.zookeeper.server.ZooKeeperServerMain", None)?;
        server.start()?;
        Ok(server)
    }

    /// A server that is not running yet. `id` is that of a member of an ensemble.
    pub(super) fn make(self, class: &str, id: Option<usize>) -> io::Result<ZkServer> {
        let port = Port::reserve()?;
        let secure = self.certificates.as_ref().map(|_| Port::reserve()).transpose()?;
        let process = Process::new("zookeeper", |directory| {
            let mut command = Command::new(JAVA);
            if let Some(clock) = &self.clock {
                clock.apply(&mut command);
            }
            if self.used.is_some() {
                // It has a log and no snapshot.
                command.arg("-Dzookeeper.snapshot.trust.empty=true");
            }
            let mut class_path = JARS.to_vec();
            if secure.is_some() {
                class_path.extend(TLS_JARS);
            }
            command
                // Quick to start, and modest: tests start many.
                .arg(if self.is_large { "-Xmx3g" } else { "-Xmx128m" })
                .args(["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"])
                .arg(format!(
                    "-Dzookeeper.forceSync={}",
                    if self.syncs { "yes" } else { "no" }
                ))
                .arg(format!(
                    "-Dznode.container.checkIntervalMs={}",
                    if self.reaps_seldom { 60_000 } else { 300 }
                ))
                .arg("-Dznode.container.maxPerMinute=100000")
                // How long a member that finds no leader waits at most before it asks again: by default, up to a minute.
                .arg("-Dzookeeper.fastleader.maxNotificationInterval=400")
                .arg("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
                .args(["-cp", &class_path.join(":"), class])
                .arg(directory.join("zoo.cfg"));
            command
        })?;
        let data = process.directory().join("data");
        fs::create_dir(&data)?;
        if let Some((path, next)) = &self.used {
            journal::write(&data, path, *next)?;
        }
        if let Some(id) = id {
            fs::write(data.join("myid"), id.to_string())?;
        }
        let tick = TICK.as_millis();
        let mut lines = vec![
            format!("tickTime={tick}"),
            "minSessionTimeout=200".to_owned(),
            "maxSessionTimeout=60000".to_owned(),
            format!("dataDir={}", data.display()),
            format!("clientPort={}", port.number()),
            "clientPortAddress=127.0.0.1".to_owned(),
            "maxClientCnxns=0".to_owned(),
            "admin.enableServer=false".to_owned(),
            "4lw.commands.whitelist=*".to_owned(),
            "extendedTypesEnabled=true".to_owned(),
        ];
        if let (Some(certificates), Some(secure)) = (&self.certificates, &secure) {
            let pair = certificates.server_pair(ServerPair::Valid);
            lines.extend([
                "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".to_owned(),
                format!("secureClientPort={}", secure.number()),
                "secureClientPortAddress=127.0.0.1".to_owned(),
                format!("ssl.keyStore.location={}", pair.display()),
                "ssl.keyStore.type=PEM".to_owned(),
                format!("ssl.trustStore.location={}", certificates.authority().display()),
                "ssl.trustStore.type=PEM".to_owned(),
                "ssl.clientAuth=none".to_owned(),
            ]);
        }
        lines.extend(self.directives);
        lines.push(String::new());
        fs::write(process.directory().join("zoo.cfg"), lines.join("\n"))?;
        Ok(ZkServer {
            process,
            port,
            secure,
            _clock: self.clock,
            certificates: self.certificates,
        })
    }
}

impl ZkServer {
    /// The tick of all servers here.
    pub const TICK: Duration = TICK;

    /// A server with nothing special about it, which does not wait for its disk.
    ///
    /// # Errors
    /// As [`ZkBuilder::start`].
    pub fn plain() -> io::Result<Self> {
        Self::builder().start()
    }

    /// A server to be.
    pub fn builder() -> ZkBuilder {
        ZkBuilder::default()
    }

    /// Returns the address that clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Returns the address for clients that speak TLS, if there is one.
    pub fn secure_addr(&self) -> Option<SocketAddr> {
        self.secure.as_ref().map(Port::addr)
    }

    /// The answer to a four-letter word, such as `srvr`, `mntr`, `wchs` or `dump`.
    ///
    /// # Errors
    /// If the server cannot be reached or does not answer.
    pub fn word(&self, word: &str) -> io::Result<String> {
        wire::word(self.addr(), word, wire::PATIENCE)
    }

    /// The figures that `mntr` answers, by name.
    ///
    /// # Errors
    /// As [`word`](Self::word).
    pub fn figures(&self) -> io::Result<BTreeMap<String, String>> {
        let answer = self.word("mntr")?;
        let fields = answer.lines().filter_map(|line| line.split_once('\t'));
        Ok(fields
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect())
    }

    /// One of the [figures](Self::figures), as a whole number.
    ///
    /// # Errors
    /// If there is none of that name, or it is no whole number.
    pub fn figure(&self, name: &str) -> io::Result<u64> {
        let figures = self.figures()?;
        let figure = figures.get(name).and_then(|figure| figure.parse().ok());
        figure.ok_or_else(|| io::Error::other(format!("`mntr` has no figure {name}: {figures:?}")))
    }

    /// The paths of the nodes that sessions watch, and by how many each is watched. Those whose children are watched are not among them.
    ///
    /// # Errors
    /// If the server cannot be reached or does not answer.
    pub fn watched(&self) -> io::Result<BTreeMap<String, usize>> {
        let mut watched = BTreeMap::new();
        let mut last = None;
        for line in self.word("wchp")?.lines() {
            if line.starts_with('/') {
                last = Some(watched.entry(line.to_owned()).or_default());
            } else if let Some(sessions) = last.as_deref_mut()
                && line.starts_with('\t')
            {
                *sessions += 1;
            }
        }
        Ok(watched)
    }

    /// Ends the session of this id as its client would: its nodes are deleted, its connection is closed. `false` if
    /// there is none.
    ///
    /// # Errors
    /// If the server cannot be reached or does not answer.
    pub fn end_session(&self, id: i64) -> io::Result<bool> {
        wire::end_session(self.addr(), id)
    }

    /// The paths of all nodes that it shows, but for those that every server has.
    ///
    /// # Errors
    /// If the server cannot be reached, does not answer, or does not let everybody look.
    pub fn nodes(&self) -> io::Result<Vec<String>> {
        wire::nodes(self.addr())
    }

    /// The ids of all sessions that there are; of an ensemble the leader knows them.
    ///
    /// # Errors
    /// As [`word`](Self::word).
    pub fn sessions(&self) -> io::Result<Vec<i64>> {
        let dump = self.word("dump")?;
        // Each once by when it expires, and once more if it has nodes.
        let ids = dump.lines().filter_map(|line| line.trim().strip_prefix("0x"));
        let ids = ids.filter_map(|id| u64::from_str_radix(id.trim_end_matches(':'), 16).ok());
        let ids: BTreeSet<_> = ids.map(u64::cast_signed).collect();
        Ok(ids.into_iter().collect())
    }

    /// Gives it another line of configuration, which counts from its next start on and overrides an earlier one.
    ///
    /// # Errors
    /// If its configuration cannot be written.
    pub fn reconfigure(&self, line: &str) -> io::Result<()> {
        let mut config = fs::File::options()
            .append(true)
            .open(self.process.directory().join("zoo.cfg"))?;
        writeln!(config, "{line}")
    }

    /// Starts it again after [`kill`](Self::kill) or [`stop`](Self::stop), and waits until it answers. A member of an
    /// ensemble answers once it has a leader.
    ///
    /// # Errors
    /// If it runs, or does not come up within a minute.
    pub fn start(&self) -> io::Result<()> {
        self.spawn()?;
        self.wait_ready()
    }

    /// Starts it without waiting for it.
    pub(super) fn spawn(&self) -> io::Result<()> {
        self.process.start()
    }

    pub(super) fn wait_ready(&self) -> io::Result<()> {
        self.process.wait_ready(START_UP, || {
            // One that is just coming up may accept a connection and never look at it.
            let answer = wire::word(self.addr(), "srvr", Duration::from_millis(200))?;
            if !answer.contains("Mode:") {
                return Err(io::Error::other(answer));
            }
            // It begins to listen there a little later, and clients do not wait for as long as its first handshake may take.
            match (self.secure_addr(), &self.certificates) {
                (Some(addr), Some(certificates)) => certificates.shake_hands(addr, HANDSHAKE),
                _ => Ok(()),
            }
        })
    }

    controls!();
}
