use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use super::{control, program, sockets::clients_of};
use crate::{
    Certificates, Peer, Port, Process,
    process::{START_UP, controls},
    template,
};

/// A private etcd server on a port of its own, which it keeps over restarts. Its data stay on disk, but by default it does not
/// wait for the disk.
///
/// Its dropping ends it, and so does the end of the test process. Everything here blocks until it is done, and gives up
/// on a server that does not answer for 20 s.
#[derive(Debug)]
pub struct EtcdServer {
    process: Process,
    client: Port,
    /// Where it tells everybody its figures, without TLS or a password.
    metrics: Port,
    options: EtcdBuilder,
    /// Its process id, for those who may not wait for a process that is just being ended.
    pid: Arc<AtomicU32>,
    _peer: Option<Port>,
}

/// The options of an [`EtcdServer`], or of all members of an [`EtcdCluster`](super::EtcdCluster).
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct EtcdBuilder {
    syncs: bool,
    election_timeout: Option<Duration>,
    certificates: Option<Arc<Certificates>>,
    asks_for_certificates: bool,
    authorised: Option<String>,
    options: Vec<String>,
}

impl EtcdBuilder {
    /// Has each change on disk before it is acknowledged, as a production server does.
    pub fn fsync(mut self) -> Self {
        self.syncs = true;
        self
    }

    /// Elects a leader after so long without one, instead of after a second. It is ten beats. The shortest lease that is granted
    /// is half as long again, in whole seconds.
    pub fn election_timeout(mut self, timeout: Duration) -> Self {
        self.election_timeout = Some(timeout);
        self
    }

    /// Speaks TLS with clients, with the server's certificate among `certificates`.
    pub fn tls(mut self, certificates: &Arc<Certificates>) -> Self {
        self.certificates = Some(certificates.clone());
        self
    }

    /// Lets in no client without a certificate of the authority of [`tls`](Self::tls).
    pub fn client_certificates(mut self) -> Self {
        self.asks_for_certificates = true;
        self
    }

    /// Asks for a password, and lets [`USER`](EtcdServer::USER) read and write the keys that begin with `prefix`, and nothing else.
    pub fn authorise(mut self, prefix: &str) -> Self {
        self.authorised = Some(prefix.to_owned());
        self
    }

    /// Any other option, such as `--quota-backend-bytes=2000000`.
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    /// Starts a server by itself, and waits until it answers.
    ///
    /// # Errors
    /// If it is not installed, or does not come up within a minute.
    pub fn start(self) -> io::Result<EtcdServer> {
        let peer = Port::reserve()?;
        let url = format!("http://{}", peer.addr());
        let member = Member {
            name: "server".to_owned(),
            listens: url.clone(),
            cluster: format!("server={url}"),
            advertises: url,
        };
        let server = self.make(&member, Some(peer))?;
        server.start()?;
        server.authorise()?;
        Ok(server)
    }

    /// A server that is not running yet.
    pub(super) fn make(self, member: &Member, peer: Option<Port>) -> io::Result<EtcdServer> {
        let client = Port::reserve()?;
        let metrics = Port::reserve()?;
        let urls = format!("{}://{}", self.scheme(), client.addr());
        let process = Process::new("etcd", |directory| {
            let mut command = Command::new(program());
            command
                .arg(format!("--name={}", member.name))
                .arg(format!("--data-dir={}", directory.join(DATA).display()))
                .arg(format!("--listen-client-urls={urls}"))
                .arg(format!("--advertise-client-urls={urls}"))
                .arg(format!("--listen-metrics-urls=http://{}", metrics.addr()))
                .arg(format!("--listen-peer-urls={}", member.listens))
                .arg(format!("--initial-advertise-peer-urls={}", member.advertises))
                .arg(format!("--initial-cluster={}", member.cluster))
                .args(["--logger=zap", "--log-level=warn"])
                // For JSON it would be a client of itself.
                .arg("--enable-grpc-gateway=false")
                // Its answer to a password takes a while by default, on purpose.
                .arg("--bcrypt-cost=4");
            if !self.syncs {
                command.arg("--unsafe-no-fsync");
            }
            if let Some(timeout) = self.election_timeout {
                command
                    .arg(format!("--election-timeout={}", timeout.as_millis()))
                    .arg(format!("--heartbeat-interval={}", timeout.as_millis() / 10));
            }
            if let Some(certificates) = &self.certificates {
                command
                    .arg(format!("--cert-file={}", certificates.server().display()))
                    .arg(format!("--key-file={}", certificates.server_key().display()));
                if self.asks_for_certificates {
                    command.arg("--client-cert-auth").arg(format!(
                        "--trusted-ca-file={}",
                        certificates.authority().display()
                    ));
                }
            }
            command.args(&self.options);
            // Its settings may also come from there.
            for (name, _) in std::env::vars_os() {
                if name.as_encoded_bytes().starts_with(b"ETCD") {
                    command.env_remove(name);
                }
            }
            command
        })?;
        Ok(EtcdServer {
            process,
            client,
            metrics,
            options: self,
            pid: Arc::default(),
            _peer: peer,
        })
    }

    fn scheme(&self) -> &'static str {
        if self.certificates.is_some() {
            "https"
        } else {
            "http"
        }
    }
}

/// The place of a server in its cluster.
pub(super) struct Member {
    pub(super) name: String,
    /// The URL at which it listens for other members.
    pub(super) listens: String,
    /// The URL at which they reach it.
    pub(super) advertises: String,
    /// All names and the URLs at which they are reached.
    pub(super) cluster: String,
}

const DATA: &str = "data";

impl EtcdServer {
    /// The user of a server that [asks for a password](EtcdBuilder::authorise).
    pub const USER: &str = "lockkit";
    /// Its password, and that of the user `root`.
    pub const PASSWORD: &str = "hush-4711-canary";

    /// A server with nothing special about it.
    ///
    /// # Errors
    /// As [`EtcdBuilder::start`].
    pub fn plain() -> io::Result<Self> {
        Self::builder().start()
    }

    /// A server to be.
    pub fn builder() -> EtcdBuilder {
        EtcdBuilder::default()
    }

    /// Returns the address that clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.client.addr()
    }

    /// Its URL for clients, with the user and the password if it asks for one: `etcd://127.0.0.1:40000`. What they want to know of
    /// TLS is theirs to add.
    pub fn url(&self) -> String {
        self.options.url_of(&[self.addr()])
    }

    /// Returns the URL of this server as it is reached at `addr`, through a proxy.
    pub fn url_at(&self, addr: SocketAddr) -> String {
        self.options.url_of(&[addr])
    }

    /// Runs `etcdctl` with these arguments, as `root` and with the client's certificate where that is needed. Returns what
    /// it prints.
    ///
    /// # Errors
    /// If it fails, with what it said.
    pub fn ctl(&self, arguments: &[&str]) -> io::Result<String> {
        let mut command = self.ctl_command();
        command.args(["--dial-timeout=20s", "--command-timeout=20s"]);
        let printed = template::printed(command.args(arguments))?;
        Ok(printed.trim_end().to_owned())
    }

    /// `etcdctl` for this server, to be given its arguments.
    pub fn ctl_command(&self) -> Command {
        let mut command = Command::new(control());
        let endpoint = format!("{}://{}", self.options.scheme(), self.addr());
        command
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints={endpoint}"));
        if let Some(certificates) = &self.options.certificates {
            command.arg(format!("--cacert={}", certificates.authority().display()));
            if self.options.asks_for_certificates {
                command
                    .arg(format!("--cert={}", certificates.client().display()))
                    .arg(format!("--key={}", certificates.client_key().display()));
            }
        }
        if self.options.authorised.is_some() {
            command.arg(format!("--user=root:{}", Self::PASSWORD));
        }
        command
    }

    /// Locks `name` by `etcdctl lock`, with a lease of `ttl`. Once it has it, it [says](Peer::hear) the name of its key. It
    /// releases it when it is [asked to end](Peer::end), and leaves it to its lease when it is dropped.
    ///
    /// # Errors
    /// If it cannot be run.
    pub fn lock(&self, name: &str, ttl: Duration) -> io::Result<Peer> {
        let mut command = self.ctl_command();
        command.args(["lock", &format!("--ttl={}", ttl.as_secs()), name]);
        Peer::start(&command)
    }

    /// The keys that begin with `prefix`, in their order.
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl).
    pub fn keys(&self, prefix: &str) -> io::Result<Vec<String>> {
        let printed = self.ctl(&["get", "--prefix", "--keys-only", prefix])?;
        let lines = printed.lines().filter(|line| !line.is_empty());
        Ok(lines.map(str::to_owned).collect())
    }

    /// The ids of all leases, in hexadecimal digits as `etcdctl` has them.
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl).
    pub fn leases(&self) -> io::Result<Vec<String>> {
        // The first line counts them.
        let printed = self.ctl(&["lease", "list"])?;
        Ok(printed.lines().skip(1).map(str::to_owned).collect())
    }

    /// Deletes a key. `false` if it was not there.
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl).
    pub fn delete(&self, key: &str) -> io::Result<bool> {
        Ok(self.ctl(&["del", key])? == "1")
    }

    /// Ends a lease, and deletes its keys.
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl), or if there is no such lease.
    pub fn revoke(&self, lease: &str) -> io::Result<()> {
        self.ctl(&["lease", "revoke", lease]).map(drop)
    }

    /// The revision of its data, which rises with each change.
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl).
    pub fn revision(&self) -> io::Result<u64> {
        let status = self.ctl(&["endpoint", "status", "--write-out=json"])?;
        let (_, rest) = status.split_once("\"revision\":").unwrap_or_default();
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().map_err(io::Error::other)
    }

    /// Forgets all that was before the current [`revision`](Self::revision).
    ///
    /// # Errors
    /// As [`ctl`](Self::ctl), or if nothing has changed since the last time.
    pub fn compact(&self) -> io::Result<()> {
        let revision = self.revision()?.to_string();
        self.ctl(&["compaction", "--physical=true", &revision]).map(drop)
    }

    /// The addresses of all who are connected to it as clients.
    ///
    /// # Errors
    /// If the system does not tell.
    pub fn connections(&self) -> io::Result<Vec<SocketAddr>> {
        clients_of(self.addr())
    }

    /// One of the figures that it tells about itself, with its labels if it has some, such as `etcd_server_has_leader`.
    ///
    /// # Errors
    /// If it does not answer, or has no such figure.
    pub fn figure(&self, name: &str) -> io::Result<f64> {
        let figures = self.get("/metrics", Duration::from_secs(20))?;
        let mut lines = figures.lines().filter_map(|line| line.rsplit_once(' '));
        let figure = lines.find(|(found, _)| *found == name);
        let figure = figure.and_then(|(_, figure)| figure.parse().ok());
        figure.ok_or_else(|| io::Error::other(format!("it has no figure {name}")))
    }

    /// Returns whether it leads its cluster, or believes so.
    ///
    /// # Errors
    /// If it does not answer within a second.
    pub fn leads(&self) -> io::Result<bool> {
        let figures = self.get("/metrics", Duration::from_secs(1))?;
        Ok(figures.lines().any(|line| line == "etcd_server_is_leader 1"))
    }

    /// Returns whether its cluster has agreed on a version, as far as it knows. The first leader proposes one, and the next one some
    /// seconds later if that was lost with it.
    ///
    /// # Errors
    /// If it does not answer within a second.
    pub(super) fn knows_version(&self) -> io::Result<bool> {
        let figures = self.get("/metrics", Duration::from_secs(1))?;
        Ok(figures
            .lines()
            .any(|line| line.starts_with("etcd_cluster_version{")))
    }

    /// Fails unless it is a learner of a cluster that has a leader.
    pub(super) fn learns(&self) -> io::Result<()> {
        let figures = self.get("/metrics", Duration::from_secs(1))?;
        let has = |figure: &str| figures.lines().any(|line| line == figure);
        if has("etcd_server_is_learner 1") && has("etcd_server_has_leader 1") {
            return Ok(());
        }
        Err(io::Error::other("it is no learner, or knows no leader"))
    }

    /// Returns whether it has a leader and can serve a linearizable read. One whose database is full can.
    ///
    /// # Errors
    /// If it does not, with what it says, or does not answer within two seconds.
    pub fn healthy(&self) -> io::Result<()> {
        let answer = self.get("/health?exclude=NOSPACE", Duration::from_secs(2))?;
        if answer.contains("\"health\":\"true\"") {
            return Ok(());
        }
        Err(io::Error::other(answer))
    }

    /// Its answer to a request by HTTP, head and all.
    fn get(&self, path: &str, patience: Duration) -> io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&self.metrics.addr(), patience)?;
        stream.set_read_timeout(Some(patience))?;
        write!(
            stream,
            "GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n",
            self.metrics.addr()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Starts it again after [`kill`](Self::kill) or [`stop`](Self::stop), with its data, and waits until it answers. A member of
    /// a cluster answers once it has a leader.
    ///
    /// # Errors
    /// If it runs, or does not come up within a minute.
    pub fn start(&self) -> io::Result<()> {
        self.spawn()?;
        self.wait_ready()
    }

    /// Kills it if it runs, and starts it again without its data, as one that is new. Not for a member of a cluster, whose
    /// others would not take it for one of them.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_empty(&self) -> io::Result<()> {
        self.kill()?;
        self.forget()?;
        self.start()?;
        self.authorise()
    }

    /// Removes its data. It must not run.
    pub(super) fn forget(&self) -> io::Result<()> {
        fs::remove_dir_all(self.data())
    }

    /// Starts it without waiting for it.
    pub(super) fn spawn(&self) -> io::Result<()> {
        self.process.start()?;
        self.pid.store(self.pid().unwrap_or_default(), Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn wait_ready(&self) -> io::Result<()> {
        self.process.wait_ready(START_UP, || self.healthy())
    }

    /// Waits until it is a learner.
    pub(super) fn wait_learning(&self) -> io::Result<()> {
        self.process.wait_ready(START_UP, || self.learns())
    }

    /// Its process id, kept up to date; 0 before its first start.
    pub(super) fn last_pid(&self) -> &Arc<AtomicU32> {
        &self.pid
    }

    /// Lets [`USER`](Self::USER) in, and nobody without a password, if that was asked for.
    pub(super) fn authorise(&self) -> io::Result<()> {
        let Some(prefix) = &self.options.authorised else {
            return Ok(());
        };
        let (user, password) = (Self::USER, Self::PASSWORD);
        // `root` asks already, by a name that nobody asks for yet.
        self.ctl(&["user", "add", &format!("root:{password}")])?;
        self.ctl(&["user", "grant-role", "root", "root"])?;
        self.ctl(&["user", "add", &format!("{user}:{password}")])?;
        self.ctl(&["role", "add", user])?;
        self.ctl(&[
            "role",
            "grant-permission",
            user,
            "readwrite",
            "--prefix=true",
            prefix,
        ])?;
        self.ctl(&["user", "grant-role", user, user])?;
        self.ctl(&["auth", "enable"]).map(drop)
    }

    controls!();

    /// Sets an option that it was not made with, such as `quota-backend-bytes`, from its next start on.
    pub fn set_option(&self, option: &str, value: &str) {
        let name = option.to_uppercase().replace('-', "_");
        self.set_env(&format!("ETCD_{name}"), value);
    }

    /// Sets what its environment says from its next start on.
    pub(super) fn set_env(&self, name: &str, value: &str) {
        self.process.set_env(name, value);
    }

    fn data(&self) -> PathBuf {
        self.process.directory().join(DATA)
    }
}

impl EtcdBuilder {
    /// The URL of servers with these options.
    pub(super) fn url_of(&self, addrs: &[SocketAddr]) -> String {
        let access = if self.authorised.is_some() {
            format!("{}:{}@", EtcdServer::USER, EtcdServer::PASSWORD)
        } else {
            String::new()
        };
        let addrs: Vec<_> = addrs.iter().map(ToString::to_string).collect();
        format!("etcd://{access}{}", addrs.join(","))
    }
}
