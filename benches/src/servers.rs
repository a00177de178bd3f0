//! Everyone who takes part in the comparison: each backend on private servers, and what it is measured beside.

use std::{
    any::Any, collections::BTreeMap, fmt, io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration,
};

use async_trait::async_trait;
use lockkit::{
    BoxError, Lock, LockClient,
    etcd::{EtcdBackend, EtcdConfig},
    spi::{self, chain},
    zk::{ZkBackend, ZkConfig},
};
use lockkit_conformance::{
    Harness,
    helper::Launch,
    measure::{
        Client, Clock, Contestant, Counter, Effort, Locks, Processes, Role, Scenario, Subject, contest,
    },
};
use lockkit_testbed::{
    Mode, Proxy,
    etcd::{self, EtcdCluster, EtcdServer},
    mysql::{Flavour, MySql},
    postgres::{self, PgServer},
    redis::{self, RedisServer},
    zookeeper::{self, ZkServer},
};

use crate::{
    peers::{
        AdvisoryLock, Curator, DistributedFileLock, EphemeralNode, Flock, ForUpdate, Form, GetLock,
        LockRequest, LockedFile, Peer, PutKey, Rslock, SetNx, TokenRing, TokioSync,
    },
    processor::processor_time,
    results::Skipped,
};

/// All that may take part, by name.
pub const BACKENDS: [&str; 10] = [
    "memory",
    "file",
    "redis",
    "redlock",
    "zookeeper",
    "mariadb",
    "mysql",
    "postgres",
    "etcd",
    "etcd3",
];
/// The number of masters that Redlock is measured on.
const MASTERS: usize = 5;
/// The time it takes over the network from a client to a server and back.
const ROUND_TRIP: Duration = Duration::from_millis(1);
/// The scenarios that are measured over the network.
pub const FAR: [Scenario; 6] = [
    Scenario::Uncontended,
    Scenario::OwnNames(64),
    Scenario::Clients(2),
    Scenario::Clients(16),
    Scenario::Processes(4),
    Scenario::HandOff,
];
/// The limit of local hand-offs for a program that contends mostly with itself.
const MANY_HANDOFFS: u32 = 1_000;

/// The contestants, and the servers that they need, which end when this is dropped.
pub struct Comparison {
    /// Backend by backend, first the floor, then lockkit, then the peers.
    pub contestants: Vec<Contestant>,
    /// Those of them that reach their servers over a network, in the same order.
    pub far: Vec<Contestant>,
    /// The backends that are not among them, and why.
    pub skipped: Vec<Skipped>,
    /// The version that each server reports.
    pub versions: BTreeMap<String, String>,
    launch: Launch,
    running: Vec<Box<dyn Any>>,
}

/// No server, and why.
type Absent = BoxError;

impl Comparison {
    /// Starts whatever is installed here. `launch` starts helper processes; `wanted` picks backends by name.
    ///
    /// # Cancel safety
    /// Dropped half-way, the servers so far are ended.
    pub async fn start(launch: Launch, wanted: impl Fn(&str) -> bool) -> Self {
        let mut comparison = Self {
            contestants: Vec::new(),
            far: Vec::new(),
            skipped: Vec::new(),
            versions: BTreeMap::new(),
            launch,
            running: Vec::new(),
        };
        for backend in BACKENDS {
            if !wanted(backend) {
                continue;
            }
            let there = match backend {
                "memory" => {
                    comparison.memory();
                    Ok(())
                }
                "file" => comparison.file(),
                "redis" => comparison.redis(),
                "redlock" => comparison.redlock().await,
                "zookeeper" => comparison.zookeeper().await,
                "mariadb" => comparison.mysql(backend, Flavour::MariaDb).await,
                "mysql" => comparison.mysql(backend, Flavour::MySql).await,
                "postgres" => comparison.postgres().await,
                "etcd" => comparison.etcd(),
                _ => comparison.etcd3(),
            };
            if let Err(why) = there {
                comparison.skipped.push(Skipped {
                    backend: backend.to_owned(),
                    why: chain(&*why),
                });
            }
        }
        comparison
    }

    /// A contestant on each way to the servers, which helper processes are as well.
    fn peers(
        &mut self,
        (backend, name, role): (&str, &str, Role),
        servers: &Servers,
        peer: impl Fn(&[SocketAddr]) -> Peer,
    ) -> Result<(), Absent> {
        for way in servers.ways()? {
            self.peer((backend, name, role), peer(&way.addrs), way);
        }
        Ok(())
    }

    fn peer(&mut self, who: (&str, &str, Role), peer: Peer, way: Way) {
        let mut processes = Processes::new(self.launch.clone(), peer.to_string());
        if let Some(clock) = way.clock {
            processes = processes.served_by(clock);
        }
        let there = (processes, way.round_trips);
        match peer {
            Peer::SetNx(it) => self.enter(who, Abroad(it, there), |_| true),
            Peer::EphemeralNode(it) => self.enter(who, Abroad(it, there), |_| true),
            Peer::Flock(it) => self.enter(who, Abroad(it, there), |_| true),
            // There is another floor for what is not contended.
            Peer::TokenRing(it) => self.enter(who, Abroad(it, there), |scenario| {
                !matches!(scenario, Scenario::Uncontended | Scenario::OwnNames(_))
            }),
            Peer::ForUpdate(it) => self.enter(who, Abroad(it, there), |_| true),
            Peer::AdvisoryLock(it) => self.enter(who, Abroad(it, there), |_| true),
            Peer::PutKey(it) => self.enter(who, Abroad(it, there), |_| true),
            Peer::LockRequest(it) => self.enter(who, Abroad(it, there), |_| true),
            Peer::DistributedLock(it) => self.enter(who, Abroad(it, there), |_| true),
            Peer::Rslock(it) => self.enter(who, Abroad(it, there), |_| true),
            Peer::Curator(it) => self.enter(who, Abroad(it, there), |_| true),
            Peer::GetLock(it) => self.enter(who, Abroad(it, there), |_| true),
        }
    }

    /// lockkit on each way to the servers, at the URL that `url` makes of their addresses.
    fn ours(
        &mut self,
        (backend, name): (&str, &str),
        servers: &Servers,
        url: impl Fn(&[SocketAddr]) -> String,
    ) -> Result<(), Absent> {
        for way in servers.ways()? {
            let mut locks = Locks::new(At(url(&way.addrs))).helpers(self.launch.clone());
            if let Some(counter) = way.round_trips {
                locks = locks.counting_round_trips(counter);
            } else {
                let proxies = servers.proxies()?;
                let addrs: Vec<_> = proxies.iter().map(Proxy::addr).collect();
                let sent = move || proxies.iter().map(|proxy| proxy.counts().requests.chunks).sum();
                locks = locks.counted(url(&addrs), Arc::new(sent));
            }
            if let Some(clock) = way.clock {
                locks = locks.served_by(clock);
            }
            self.enter((backend, name, Role::Ours), locks, |scenario| {
                !matches!(scenario, Scenario::Waiters(_))
            });
        }
        Ok(())
    }

    /// lockkit at `url` with more local hand-offs than by default, where they count.
    fn ours_handing_on(&mut self, backend: &str, url: &str) {
        let between = if url.contains('?') { '&' } else { '?' };
        let locks = Locks::new(At(format!("{url}{between}local_handoffs={MANY_HANDOFFS}")));
        let name = format!("lockkit, local_handoffs={MANY_HANDOFFS}");
        self.enter((backend, &name, Role::Ours), locks, |scenario| {
            matches!(scenario, Scenario::Tasks(_) | Scenario::Beside(_))
        });
    }

    fn enter(
        &mut self,
        (backend, name, role): (&str, &str, Role),
        subject: impl Subject,
        enters: fn(Scenario) -> bool,
    ) {
        let there = if subject.round_trips().is_some() {
            &mut self.far
        } else {
            &mut self.contestants
        };
        there.push(Contestant::new(backend, name, role, subject).only(enters));
    }

    fn memory(&mut self) {
        let locks = Locks::new(At("memory:".to_owned()));
        self.enter(("memory", "lockkit", Role::Ours), locks, |scenario| {
            !matches!(scenario, Scenario::Waiters(_))
        });
        self.enter(
            ("memory", "tokio::sync", Role::Peer),
            TokioSync::default(),
            |_| true,
        );
    }

    fn file(&mut self) -> Result<(), Absent> {
        let dir = Directory::new()?;
        let under = |name: &str| dir.0.join(name);
        let durable = LockedFile { dir: under("floor") };
        self.enter(("file", "flock, write, fdatasync", Role::Floor), durable, |_| {
            true
        });
        let flock = Peer::Flock(Flock { dir: under("flock") });
        self.peer(("file", "flock, by hand", Role::Floor), flock, Way::default());
        let locks = Locks::new(At(format!("file://{}", under("lockkit").display())));
        let ours = Contestant::new("file", "lockkit", Role::Ours, locks.helpers(self.launch.clone()));
        let ours = ours.only(|scenario| !matches!(scenario, Scenario::Waiters(_)));
        self.contestants.push(ours.sitting_out(|scenario| {
            (scenario == Scenario::Held(10_000)).then_some(
                "the first grant of a name waits for the disk, which takes half a minute for so many",
            )
        }));
        let peer = Peer::DistributedLock(DistributedFileLock { dir: under("peer") });
        self.peer(("file", "distributed-lock", Role::Peer), peer, Way::default());
        self.running.push(Box::new(dir));
        Ok(())
    }

    fn redis(&mut self) -> Result<(), Absent> {
        if let Some(missing) = redis::missing() {
            return Err(missing.into());
        }
        let server = RedisServer::plain()?;
        self.versions.insert("redis".to_owned(), version(&server)?);
        let servers = Servers::new([server.addr()], [server.pid()]);
        let url = |addrs: &[SocketAddr]| format!("redis://{}", addrs[0]);
        self.peers(("redis", "SET NX, by hand", Role::Floor), &servers, |addrs| {
            Peer::SetNx(SetNx { url: url(addrs) })
        })?;
        self.peers(("redis", "BLPOP, by hand", Role::Floor), &servers, |addrs| {
            Peer::TokenRing(TokenRing { url: url(addrs) })
        })?;
        self.ours(("redis", "lockkit"), &servers, url)?;
        self.ours_handing_on("redis", &url(&servers.addrs));
        self.peers(("redis", "rslock", Role::Peer), &servers, |addrs| {
            Peer::Rslock(Rslock {
                urls: vec![url(addrs)],
            })
        })?;
        self.running.push(Box::new(server));
        Ok(())
    }

    async fn redlock(&mut self) -> Result<(), Absent> {
        if let Some(missing) = redis::missing() {
            return Err(missing.into());
        }
        let masters: Vec<_> = (0..MASTERS)
            .map(|_| RedisServer::plain())
            .collect::<Result<_, _>>()?;
        let servers = Servers::new(
            masters.iter().map(RedisServer::addr),
            masters.iter().map(RedisServer::pid),
        );
        let url = redlock(&servers.addrs);
        Client::close(lockkit::connect(&url).await?).await?;
        self.versions.insert(
            "redlock".to_owned(),
            format!("{MASTERS} × {}", version(&masters[0])?),
        );
        self.ours(("redlock", "lockkit"), &servers, redlock)?;
        self.ours_handing_on("redlock", &url);
        self.peers(("redlock", "rslock", Role::Peer), &servers, |addrs| {
            let urls = addrs.iter().map(|addr| format!("redis://{addr}"));
            Peer::Rslock(Rslock { urls: urls.collect() })
        })?;
        self.running.push(Box::new(masters));
        Ok(())
    }

    async fn zookeeper(&mut self) -> Result<(), Absent> {
        if let Some(missing) = zookeeper::missing() {
            return Err(missing.into());
        }
        let server = ZkServer::builder().reaps_seldom().start()?;
        let servers = Servers::new([server.addr()], [server.pid()]);
        let first = self.contestants.len();
        let version = server.word("srvr")?;
        let version = version.lines().next().and_then(|line| line.split(": ").nth(1));
        let version = version
            .and_then(|text| text.split('-').next())
            .unwrap_or_default();
        self.versions.insert("zookeeper".to_owned(), version.to_owned());
        self.peers(("zookeeper", "create, delete", Role::Floor), &servers, |addrs| {
            let addr = addrs[0].to_string();
            Peer::EphemeralNode(EphemeralNode { addr })
        })?;
        // A session is what outlives a process that dies; the holds that are left behind ask for a ttl of 4 s.
        let parameters = format!("tick_time={}ms&session_timeout=4s", ZkServer::TICK.as_millis());
        self.ours(("zookeeper", "lockkit"), &servers, |addrs| {
            format!("zk://{}?{parameters}", addrs[0])
        })?;
        let line = ClientEach {
            addr: server.addr().to_string(),
        };
        let who = ("zookeeper", "lockkit, a client each", Role::Ours);
        self.enter(who, line, |scenario| matches!(scenario, Scenario::Waiters(_)));
        let who = ("zookeeper", "zookeeper-client's recipe", Role::Peer);
        self.peers(who, &servers, |addrs| {
            let addr = addrs[0].to_string();
            Peer::Curator(Curator { addr })
        })?;
        self.running.push(Box::new(server));
        // A virtual machine that has just started interprets what it will have compiled after some seconds of work, and
        // is several times slower until then.
        let work = Effort {
            rounds: 1,
            stretch: Duration::from_secs(1),
            ..Effort::QUICK
        };
        let scenarios = [Scenario::OwnNames(16), Scenario::Uncontended];
        contest(&mut self.contestants[first..], &scenarios, &work, |_| ()).await;
        Ok(())
    }

    async fn mysql(&mut self, backend: &str, flavour: Flavour) -> Result<(), Absent> {
        if let Some(missing) = MySql::missing(flavour) {
            return Err(missing.into());
        }
        // For 100 clients of each contestant.
        let server = MySql::start(flavour, &["--max-connections=4000"])?;
        let servers = Servers::new([server.addr()], [server.process().pid()]);
        let url = |addrs: &[SocketAddr]| MySql::url_at(addrs[0]);
        let version = ForUpdate { url: server.url() }.version().await?;
        self.versions.insert(backend.to_owned(), version);
        self.peers((backend, "FOR UPDATE, by hand", Role::Floor), &servers, |addrs| {
            Peer::ForUpdate(ForUpdate { url: url(addrs) })
        })?;
        self.ours((backend, "lockkit"), &servers, url)?;
        self.ours((backend, "lockkit, mode=lease"), &servers, |addrs| {
            format!("{}?mode=lease&namespace=lease", url(addrs))
        })?;
        self.ours_handing_on(backend, &server.url());
        self.peers((backend, "GET_LOCK", Role::Peer), &servers, |addrs| {
            Peer::GetLock(GetLock { url: url(addrs) })
        })?;
        self.running.push(Box::new(server));
        Ok(())
    }

    async fn postgres(&mut self) -> Result<(), Absent> {
        if let Some(missing) = postgres::missing() {
            return Err(missing.into());
        }
        // For 100 clients of each contestant.
        let server = PgServer::builder().setting("max_connections", "2000").start()?;
        let server = Arc::new(server);
        let servers = Servers::of_processes(&server);
        let url = |addrs: &[SocketAddr]| PgServer::url_at(addrs[0]);
        let by_hand = |form, addrs: &[SocketAddr]| AdvisoryLock {
            url: url(addrs),
            form,
        };
        let version = by_hand(Form::Text, &servers.addrs).version().await?;
        self.versions.insert("postgres".to_owned(), version);
        for (name, form) in [
            ("pg_advisory_lock, by hand", Form::Text),
            ("pg_advisory_lock, prepared", Form::Prepared),
        ] {
            self.peers(("postgres", name, Role::Floor), &servers, |addrs| {
                Peer::AdvisoryLock(by_hand(form, addrs))
            })?;
        }
        // For 64 names.
        self.ours(("postgres", "lockkit"), &servers, |addrs| {
            format!("{}?max_connections=100", url(addrs))
        })?;
        self.ours_handing_on("postgres", &server.url());
        self.running.push(Box::new(server));
        Ok(())
    }

    fn etcd(&mut self) -> Result<(), Absent> {
        if let Some(missing) = etcd::missing() {
            return Err(missing.into());
        }
        let server = EtcdServer::plain()?;
        let servers = Servers::new([server.addr()], [server.pid()]);
        self.etcd_at("etcd", &server, &servers)?;
        self.running.push(Box::new(server));
        Ok(())
    }

    /// Three members, all asked by way of one that follows.
    fn etcd3(&mut self) -> Result<(), Absent> {
        if let Some(missing) = etcd::missing() {
            return Err(missing.into());
        }
        let cluster = EtcdCluster::start()?;
        let members = cluster.members();
        let follower = &members[(cluster.leader()? + 1) % members.len()];
        let servers = Servers::new([follower.addr()], members.iter().map(EtcdServer::pid));
        self.etcd_at("etcd3", follower, &servers)?;
        self.running.push(Box::new(cluster));
        Ok(())
    }

    fn etcd_at(&mut self, backend: &str, server: &EtcdServer, servers: &Servers) -> Result<(), Absent> {
        let version = server.ctl(&["endpoint", "status"])?;
        // `127.0.0.1:40000, 8e9e05c52164694d, 3.4.23, 20 kB, …`
        let version = version.split(", ").nth(2).unwrap_or("unknown").to_owned();
        self.versions.insert(backend.to_owned(), version);
        self.peers((backend, "put, delete, by hand", Role::Floor), servers, |addrs| {
            Peer::PutKey(PutKey { addr: addrs[0] })
        })?;
        self.ours((backend, "lockkit"), servers, |addrs| {
            format!("etcd://{}", addrs[0])
        })?;
        let line = EtcdClientEach {
            addr: server.addr().to_string(),
        };
        let who = (backend, "lockkit, a client each", Role::Ours);
        self.enter(who, line, |scenario| matches!(scenario, Scenario::Waiters(_)));
        self.peers((backend, "the server's Lock", Role::Peer), servers, |addrs| {
            Peer::LockRequest(LockRequest { addr: addrs[0] })
        })
    }
}

/// The servers of a backend.
struct Servers {
    addrs: Vec<SocketAddr>,
    /// The processor time of all of them.
    clock: Clock,
}

/// The way of a contestant to its servers.
#[derive(Default)]
struct Way {
    addrs: Vec<SocketAddr>,
    /// The servers' processor time.
    clock: Option<Clock>,
    /// Of the contestant, on a long way.
    round_trips: Option<Counter>,
}

impl Servers {
    fn new(addrs: impl IntoIterator<Item = SocketAddr>, pids: impl IntoIterator<Item = Option<u32>>) -> Self {
        let pids: Vec<_> = pids.into_iter().flatten().collect();
        Self {
            addrs: addrs.into_iter().collect(),
            clock: Arc::new(move || pids.iter().copied().map(processor_time).sum()),
        }
    }

    /// One that has a process for each connection.
    fn of_processes(server: &Arc<PgServer>) -> Self {
        let addrs = vec![server.addr()];
        let server = server.clone();
        let clock = move || {
            let times = server.processes()?.into_iter().map(processor_time);
            // One may end meanwhile.
            Ok(times.filter_map(Result::ok).sum())
        };
        Self {
            addrs,
            clock: Arc::new(clock),
        }
    }

    /// The short way over loopback, and one that takes a millisecond there and back.
    fn ways(&self) -> io::Result<[Way; 2]> {
        let near = Way {
            addrs: self.addrs.clone(),
            clock: Some(self.clock.clone()),
            round_trips: None,
        };
        let proxies = self.proxies()?;
        for proxy in &*proxies {
            proxy.set(Mode::Delay {
                requests: ROUND_TRIP / 2,
                replies: ROUND_TRIP / 2,
            });
        }
        let far = Way {
            addrs: proxies.iter().map(Proxy::addr).collect(),
            clock: Some(self.clock.clone()),
            // Several servers are asked at once.
            round_trips: Some(Arc::new(move || {
                let each = proxies.iter().map(|proxy| proxy.counts().round_trips);
                each.max().unwrap_or_default()
            })),
        };
        Ok([near, far])
    }

    fn proxies(&self) -> io::Result<Arc<[Proxy]>> {
        self.addrs.iter().copied().map(Proxy::start).collect()
    }
}

fn redlock(masters: &[SocketAddr]) -> String {
    let masters: Vec<_> = masters.iter().map(ToString::to_string).collect();
    format!("redlock://{}", masters.join(","))
}

fn version(server: &RedisServer) -> Result<String, Absent> {
    let info = server.cli(&["INFO", "server"])?;
    let version = info.lines().find_map(|line| line.strip_prefix("redis_version:"));
    Ok(version.unwrap_or("unknown").trim().to_owned())
}

/// lockkit at a URL.
struct At(String);

/// Without the URL, which may hold passwords.
impl fmt::Debug for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("At(…)")
    }
}

#[async_trait]
impl Harness for At {
    async fn client(&self) -> lockkit::Result<LockClient> {
        lockkit::connect(&self.0).await
    }

    fn url(&self) -> Option<String> {
        (self.0 != "memory:").then(|| self.0.clone())
    }

    async fn connect(&self, url: &str) -> lockkit::Result<LockClient> {
        lockkit::connect(url).await
    }
}

/// lockkit on ZooKeeper with sessions that many clients share, each with one waiter: those of one client would wait in
/// their client.
struct ClientEach {
    addr: String,
}

impl Subject for ClientEach {
    type Client = Session<ZkBackend>;

    async fn client(&self) -> Result<Session<ZkBackend>, BoxError> {
        let mut config = ZkConfig::new(&self.addr);
        config.tick_time = ZkServer::TICK;
        Ok(Session(ZkBackend::connect(config).await?))
    }
}

/// Holds of one client on etcd, which share a connection and a lease.
struct EtcdClientEach {
    addr: String,
}

impl Subject for EtcdClientEach {
    type Client = Session<EtcdBackend>;

    async fn client(&self) -> Result<Session<EtcdBackend>, BoxError> {
        Ok(Session(EtcdBackend::connect(EtcdConfig::new(&self.addr)).await?))
    }
}

/// A session.
struct Session<B>(B);

impl<B: spi::Backend + Clone> Client for Session<B> {
    type Contender = Lock;

    async fn contender(&self, name: &str, mode: spi::Mode) -> Result<Lock, BoxError> {
        LockClient::new(self.0.clone()).contender(name, mode).await
    }
}

/// A subject with helper processes, and what counts its round trips.
struct Abroad<S>(S, (Processes, Option<Counter>));

impl<S: Subject> Subject for Abroad<S> {
    type Client = S::Client;

    fn client(&self) -> impl Future<Output = Result<S::Client, BoxError>> + Send {
        self.0.client()
    }

    fn declines(&self, scenario: Scenario) -> impl Future<Output = Result<Option<String>, BoxError>> + Send {
        self.0.declines(scenario)
    }

    fn round_trips(&self) -> Option<Counter> {
        self.1.1.clone()
    }

    fn processes(&self) -> Result<Processes, String> {
        Ok(self.1.0.clone())
    }
}

/// A temporary directory, on the disk that temporary files are on.
struct Directory(PathBuf);

impl Directory {
    fn new() -> std::io::Result<Self> {
        let dir = std::env::temp_dir().join(format!("lockkit-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        Ok(Self(dir))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
