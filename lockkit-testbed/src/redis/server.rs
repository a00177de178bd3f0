use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt, fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{
    Monitor, program,
    resp::{Access, Value},
};
use crate::{
    Certificates, Clock, Port, Process,
    process::{START_UP, controls},
};

/// A private `redis-server` on a port of its own, which it keeps over restarts.
///
/// Its dropping ends it, and so does the end of the test process. Everything here blocks until it is done, and gives up
/// on a server that does not answer for 5 s.
pub struct RedisServer {
    process: Process,
    /// The operator's access: the port without TLS, as the default user.
    access: Access,
    addr: SocketAddr,
    url: String,
    kind: Kind,
    _ports: Vec<Arc<Port>>,
    _clock: Option<Clock>,
    _certificates: Option<Arc<Certificates>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    /// Forgets its data when it ends, unless told to save it.
    #[default]
    InMemory,
    AppendOnly,
    /// In memory too.
    ClusterNode,
    Sentinel,
}

/// The time at which a server with an append-only file has it on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fsync {
    /// Before it answers.
    Always,
    /// Once a second. A killed server loses nothing, since the system has it; a crashed machine may.
    EverySec,
}

/// The options of a [`RedisServer`]. Without any: no persistence, no password, plain TCP.
#[derive(Clone, Default)]
pub struct RedisBuilder {
    program: Option<OsString>,
    /// Names and values.
    directives: Vec<(String, Vec<String>)>,
    kind: Kind,
    password: Option<String>,
    user: Option<(String, String)>,
    replica: bool,
    clock: Option<Clock>,
    certificates: Option<Arc<Certificates>>,
}

impl RedisBuilder {
    /// Keeps an append-only file, from which [`kill`](RedisServer::kill) and [`start`](RedisServer::start) recover.
    pub fn append_only(self, fsync: Fsync) -> Self {
        let fsync = match fsync {
            Fsync::Always => "always",
            Fsync::EverySec => "everysec",
        };
        let mut this = self
            .directive("appendonly", &["yes"])
            .directive("appendfsync", &[fsync]);
        this.kind = Kind::AppendOnly;
        this
    }

    /// A replica of the server at `master`. [`start`](Self::start) waits until it has caught up for the first time.
    pub fn replica_of(self, master: SocketAddr) -> Self {
        let mut this = self.directive(
            "replicaof",
            &[&master.ip().to_string(), &master.port().to_string()],
        );
        this.replica = true;
        this
    }

    /// Asks for a password, also as a replica from its master.
    pub fn password(self, password: &str) -> Self {
        let mut this = self
            .directive("requirepass", &[password])
            .directive("masterauth", &[password]);
        this.password = Some(password.to_owned());
        this
    }

    /// Has a user besides the default one, who may do what `rules` say (`~* &* +@all`, for instance). It is the one
    /// that [`url`](RedisServer::url) names.
    pub fn user(self, name: &str, password: &str, rules: &str) -> Self {
        let secret = format!(">{password}");
        let mut line = vec![name, "on", &secret];
        line.extend(rules.split_whitespace());
        let mut this = self.directive("user", &line);
        this.user = Some((name.to_owned(), password.to_owned()));
        this
    }

    /// Serves TLS at [`addr`](RedisServer::addr), with the server's certificate among `certificates`. A client needs
    /// none; to ask for one, add the directive `tls-auth-clients yes`.
    pub fn tls(mut self, certificates: &Arc<Certificates>) -> Self {
        self.certificates = Some(certificates.clone());
        self
    }

    /// Evicts keys by `policy` (`volatile-lru`, say) once it uses more than `bytes`.
    pub fn max_memory(self, bytes: u64, policy: &str) -> Self {
        self.directive("maxmemory", &[&bytes.to_string()])
            .directive("maxmemory-policy", &[policy])
    }

    /// Runs by `clock`, which the test can set forward and back.
    pub fn clock(mut self, clock: &Clock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Runs another [`program`] that speaks the protocol.
    pub fn program(mut self, program: impl Into<OsString>) -> Self {
        self.program = Some(program.into());
        self
    }

    /// Any other line of the configuration: its name and values, unquoted.
    pub fn directive(mut self, name: &str, values: &[&str]) -> Self {
        let values = values.iter().map(ToString::to_string).collect();
        self.directives.push((name.to_owned(), values));
        self
    }

    /// A member of a cluster that does not exist yet.
    pub fn cluster_node(mut self) -> Self {
        self.kind = Kind::ClusterNode;
        self
    }

    /// A Sentinel. What it watches is to be said by directives.
    pub(super) fn sentinel(mut self) -> Self {
        self.kind = Kind::Sentinel;
        self
    }

    /// Starts the server and waits until it answers; a replica, until it has caught up.
    ///
    /// # Errors
    /// If it does not come up within two minutes, with the end of what it printed.
    pub fn start(self) -> io::Result<RedisServer> {
        let plain = Arc::new(Port::reserve()?);
        let tls = self
            .certificates
            .is_some()
            .then(Port::reserve)
            .transpose()?
            .map(Arc::new);
        let in_cluster = self.kind == Kind::ClusterNode;
        let bus = in_cluster.then(Port::reserve).transpose()?.map(Arc::new);

        let process = Process::new("redis", |directory| {
            let mut command = Command::new(self.program.clone().unwrap_or_else(program));
            command.arg(directory.join(CONFIGURATION));
            if self.kind == Kind::Sentinel {
                command.arg("--sentinel");
            }
            if let Some(clock) = &self.clock {
                clock.apply(&mut command);
            }
            command
        })?;
        let directory = process.directory();
        let configuration = self.configuration(directory, &plain, tls.as_deref(), bus.as_deref())?;
        fs::create_dir(directory.join(DATA))?;
        fs::write(directory.join(CONFIGURATION), configuration)?;

        let addr = tls.as_ref().unwrap_or(&plain).addr();
        let server = RedisServer {
            process,
            access: Access {
                addr: plain.addr(),
                password: self.password.clone(),
            },
            addr,
            url: self.url(addr),
            kind: self.kind,
            _ports: [Some(plain), tls, bus].into_iter().flatten().collect(),
            _clock: self.clock,
            _certificates: self.certificates,
        };
        server.start()?;
        if self.replica {
            server.process.wait_ready(START_UP, || {
                let replication = server.info("replication")?;
                match replication.get("master_link_status").map(String::as_str) {
                    Some("up") => Ok(()),
                    _ => Err(io::Error::other("it has not caught up with its master")),
                }
            })?;
        }
        Ok(server)
    }

    fn configuration(
        &self,
        directory: &Path,
        plain: &Port,
        tls: Option<&Port>,
        bus: Option<&Port>,
    ) -> io::Result<String> {
        let data = text(directory.join(DATA))?;
        let port = plain.number().to_string();
        let mut lines = Lines::default();
        lines.push("bind", &["127.0.0.1"]);
        lines.push("port", &[&port]);
        lines.push("dir", &[&data]);
        if self.kind != Kind::Sentinel {
            lines.push("save", &[""]);
            // A replica is in step as soon as it can be, and keeps no copy of what it was sent.
            lines.push("repl-diskless-sync", &["yes"]);
            lines.push("repl-diskless-sync-delay", &["0"]);
            lines.push("rdb-del-sync-files", &["yes"]);
        }
        if let (Some(certificates), Some(tls)) = (&self.certificates, tls) {
            lines.push("tls-port", &[&tls.number().to_string()]);
            lines.push("tls-cert-file", &[&text(certificates.server())?]);
            lines.push("tls-key-file", &[&text(certificates.server_key())?]);
            lines.push("tls-ca-cert-file", &[&text(certificates.authority())?]);
            lines.push("tls-auth-clients", &["no"]);
        }
        if let Some(bus) = bus {
            lines.push("cluster-enabled", &["yes"]);
            lines.push("cluster-port", &[&bus.number().to_string()]);
            // Beside the data, which may be lost without the membership.
            lines.push("cluster-config-file", &[&text(directory.join("nodes.conf"))?]);
        }
        for (name, values) in &self.directives {
            lines.push(name, &values.iter().map(String::as_str).collect::<Vec<_>>());
        }
        Ok(lines.0)
    }

    fn url(&self, addr: SocketAddr) -> String {
        let scheme = if self.certificates.is_some() {
            "rediss"
        } else {
            "redis"
        };
        let encode = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
        match (&self.user, &self.password) {
            (Some((name, password)), _) => format!("{scheme}://{}:{}@{addr}", encode(name), encode(password)),
            (None, Some(password)) => format!("{scheme}://:{}@{addr}", encode(password)),
            (None, None) => format!("{scheme}://{addr}"),
        }
    }
}

impl RedisServer {
    /// A server with nothing special about it.
    ///
    /// # Errors
    /// As [`RedisBuilder::start`].
    pub fn plain() -> io::Result<Self> {
        Self::builder().start()
    }

    /// A server to be.
    pub fn builder() -> RedisBuilder {
        RedisBuilder::default()
    }

    /// Returns the address that clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its URL for clients, with the user and the password if it has them: `redis://127.0.0.1:40000`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Runs one command and renders the answer as `redis-cli --raw` does, but nil as `(nil)`. It is the default user
    /// who does it, without TLS and on a connection of its own, on which `WAIT`, `MULTI` and the like have no sense.
    ///
    /// # Errors
    /// The server's own error, or that it cannot be reached or does not answer within 5 s.
    pub fn cli(&self, command: &[&str]) -> io::Result<String> {
        Ok(self.access.command(command)?.to_string())
    }

    /// Counts how often each command was executed since the start, by name in small letters; inside of scripts as well.
    /// What this very method needs is left out, so that differences are exact.
    ///
    /// # Errors
    /// As [`cli`](Self::cli).
    pub fn command_counts(&self) -> io::Result<BTreeMap<String, u64>> {
        self.command_statistics("calls=")
    }

    /// Returns how long the server has executed each command since the start, by its own clock, and by name as
    /// [`command_counts`](Self::command_counts) does. The time of a script has that of the commands that it calls.
    ///
    /// # Errors
    /// As [`cli`](Self::cli).
    pub fn command_times(&self) -> io::Result<BTreeMap<String, Duration>> {
        let times = self.command_statistics("usec=")?.into_iter();
        Ok(times
            .map(|(name, micros)| (name, Duration::from_micros(micros)))
            .collect())
    }

    /// Counts the commands executed since the start: the sum of [`command_counts`](Self::command_counts).
    ///
    /// # Errors
    /// As [`cli`](Self::cli).
    pub fn command_count(&self) -> io::Result<u64> {
        Ok(self.command_counts()?.values().sum())
    }

    /// Records every command from now on.
    ///
    /// # Errors
    /// As [`cli`](Self::cli).
    pub fn monitor(&self) -> io::Result<Monitor> {
        Monitor::start(&self.access)
    }

    /// Starts it again after [`kill`](Self::kill) or [`stop`](Self::stop), with the data it has on disk, and waits
    /// until it answers.
    ///
    /// # Errors
    /// If it runs, or does not come up within two minutes.
    pub fn start(&self) -> io::Result<()> {
        self.process.start()?;
        self.process
            .wait_ready(START_UP, || self.access.command(&["PING"]).map(drop))
    }

    controls! {
        /// Without an append-only file its data is lost.
    }

    /// Ends it in order and starts it again with all its data, whether it has an append-only file or not.
    ///
    /// # Errors
    /// If it does not run, or as [`stop`](Self::stop) and [`start`](Self::start).
    pub fn restart(&self) -> io::Result<()> {
        if matches!(self.kind, Kind::AppendOnly | Kind::Sentinel) {
            self.stop()?;
            return self.start();
        }
        self.cli(&["SAVE"])?;
        self.stop()?;
        self.start()?;
        // It would come back after a crash otherwise, as what it has long ceased to be.
        match fs::remove_file(self.snapshot()) {
            // A replica does so itself.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Kills it and starts it again without its data, as after the loss of its disk. Its configuration and, in a
    /// cluster, its membership stay.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn restart_empty(&self) -> io::Result<()> {
        self.kill()?;
        let data = self.process.directory().join(DATA);
        fs::remove_dir_all(&data)?;
        fs::create_dir(&data)?;
        self.start()
    }

    /// Has its snapshots fail as on a full disk. From then on it refuses to write (`MISCONF`).
    ///
    /// # Errors
    /// If it does not answer, or goes on to write.
    pub fn fail_snapshots(&self) -> io::Result<()> {
        // Where the file is to be, there is a directory.
        match fs::create_dir(self.snapshot()) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        self.cli(&["CONFIG", "SET", "save", "3600 1"])?;
        self.cli(&["BGSAVE"])?;
        self.process.wait_ready(START_UP, || {
            match self.info("persistence")?.get("rdb_last_bgsave_status") {
                Some(status) if status == "err" => Ok(()),
                other => Err(io::Error::other(format!("its last snapshot is {other:?}"))),
            }
        })
    }

    /// Undoes [`fail_snapshots`](Self::fail_snapshots): it writes again, and makes no snapshots.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn mend_snapshots(&self) -> io::Result<()> {
        self.cli(&["CONFIG", "SET", "save", ""])?;
        fs::remove_dir(self.snapshot())
    }

    fn snapshot(&self) -> PathBuf {
        self.process.directory().join(DATA).join("dump.rdb")
    }

    /// Returns a figure of each command, which the server gives as `figure` and a number.
    fn command_statistics(&self, figure: &str) -> io::Result<BTreeMap<String, u64>> {
        let mut figures = BTreeMap::new();
        for (name, statistics) in self.info("commandstats")? {
            let name = name.trim_start_matches("cmdstat_");
            let of_it = statistics.split(',').find_map(|part| part.strip_prefix(figure));
            let of_it = of_it.and_then(|of_it| of_it.parse().ok());
            if let Some(of_it) = of_it
                && !["info", "auth"].contains(&name)
            {
                figures.insert(name.to_owned(), of_it);
            }
        }
        Ok(figures)
    }

    /// The fields of one section of `INFO`.
    pub(super) fn info(&self, section: &str) -> io::Result<BTreeMap<String, String>> {
        let text = self.cli(&["INFO", section])?;
        let fields = text.lines().filter_map(|line| line.split_once(':'));
        Ok(fields
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect())
    }

    pub(super) fn command(&self, command: &[&str]) -> io::Result<Value> {
        self.access.command(command)
    }

    pub(super) fn wait_ready(&self, ready: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        self.process.wait_ready(START_UP, ready)
    }
}

/// Without what is secret.
impl fmt::Debug for RedisBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.directives.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("RedisBuilder")
            .field("kind", &self.kind)
            .field("directives", &names)
            .finish_non_exhaustive()
    }
}

/// Without what is secret.
impl fmt::Debug for RedisServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisServer")
            .field("kind", &self.kind)
            .field("addr", &self.addr)
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

const CONFIGURATION: &str = "redis.conf";
const DATA: &str = "data";

/// The lines of a configuration file.
#[derive(Default)]
struct Lines(String);

impl Lines {
    fn push(&mut self, name: &str, values: &[&str]) {
        self.0 += name;
        for value in values {
            self.0 += " \"";
            for character in value.chars() {
                if matches!(character, '"' | '\\') {
                    self.0.push('\\');
                }
                self.0.push(character);
            }
            self.0.push('"');
        }
        self.0.push('\n');
    }
}

fn text(path: PathBuf) -> io::Result<String> {
    let not_text = |path: OsString| io::Error::other(format!("not UTF-8: {}", path.display()));
    path.into_os_string().into_string().map_err(not_text)
}
