//! Everyone who takes part in the comparison: each backend on private servers, and what it is measured beside.

use std::{any::Any, collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit::{
    BoxError, Lock, LockClient,
    spi::{Mode, chain},
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
    Proxy,
    mysql::{Flavour, MySql},
    redis::{self, RedisServer},
    zookeeper::{self, ZkServer},
};

use crate::{
    peers::{
        Curator, DistributedFileLock, EphemeralNode, Flock, ForUpdate, GetLock, LockedFile, Peer, Rslock,
        SetNx, TokenRing, TokioSync,
    },
    processor::processor_time,
    results::Skipped,
};

/// How many masters Redlock is measured on.
const MASTERS: usize = 5;
/// So many local hand-offs a program allows itself that contends with itself alone most of the time.
const MANY_HANDOFFS: u32 = 1_000;

/// The contestants, and the servers that they need, which end when this is dropped.
pub struct Field {
    /// Backend by backend, first the floor, then lockkit, then the peers.
    pub contestants: Vec<Contestant>,
    /// The backends that are not among them, and why.
    pub skipped: Vec<Skipped>,
    /// What each server calls its version.
    pub versions: BTreeMap<String, String>,
    launch: Launch,
    servers: Vec<Box<dyn Any>>,
}

/// No server, and why.
type Absent = BoxError;

impl Field {
    /// Starts whatever is installed here. `launch` starts helper processes; `wanted` picks backends by name.
    ///
    /// # Cancel safety
    /// Dropped half-way, the servers so far are ended.
    pub async fn gather(launch: Launch, wanted: impl Fn(&str) -> bool) -> Self {
        let mut field = Self {
            contestants: Vec::new(),
            skipped: Vec::new(),
            versions: BTreeMap::new(),
            launch,
            servers: Vec::new(),
        };
        for backend in [
            "memory",
            "file",
            "redis",
            "redlock",
            "zookeeper",
            "mariadb",
            "mysql",
        ] {
            if !wanted(backend) {
                continue;
            }
            let there = match backend {
                "memory" => {
                    field.memory();
                    Ok(())
                }
                "file" => field.file(),
                "redis" => field.redis(),
                "redlock" => field.redlock().await,
                "zookeeper" => field.zookeeper().await,
                "mariadb" => field.mysql(backend, Flavour::MariaDb).await,
                _ => field.mysql(backend, Flavour::MySql).await,
            };
            if let Err(why) = there {
                field.skipped.push(Skipped {
                    backend: backend.to_owned(),
                    why: chain(&*why),
                });
            }
        }
        field
    }

    fn add(&mut self, backend: &str, name: &str, role: Role, subject: impl Subject) {
        self.contestants
            .push(Contestant::new(backend, name, role, subject));
    }

    /// What helper processes are as well, served by these.
    fn peer(&mut self, backend: &str, name: &str, role: Role, peer: Peer, servers: &[u32]) {
        let mut processes = Processes::new(self.launch.clone(), peer.to_string());
        if let Some(clock) = clock(servers) {
            processes = processes.served_by(clock);
        }
        match peer {
            Peer::Flock(it) => self.add(backend, name, role, Abroad(it, processes)),
            Peer::TokenRing(it) => {
                let ring = Contestant::new(backend, name, role, Abroad(it, processes));
                self.contestants.push(
                    ring.only(|scenario| !matches!(scenario, Scenario::Uncontended | Scenario::OwnNames(_))),
                );
            }
            Peer::ForUpdate(it) => self.add(backend, name, role, Abroad(it, processes)),
            Peer::DistributedLock(it) => self.add(backend, name, role, Abroad(it, processes)),
            Peer::Rslock(it) => self.add(backend, name, role, Abroad(it, processes)),
            Peer::Curator(it) => self.add(backend, name, role, Abroad(it, processes)),
            Peer::GetLock(it) => self.add(backend, name, role, Abroad(it, processes)),
        }
    }

    /// lockkit at `url`, served by these; processes whose traffic is counted are behind `proxies`, at `counted`.
    fn ours(
        &mut self,
        backend: &str,
        name: &str,
        (url, servers): (String, &[u32]),
        (counted, proxies): (String, Arc<[Proxy]>),
    ) {
        let sent = move || proxies.iter().map(|proxy| proxy.counts().requests.chunks).sum();
        let mut locks = Locks::new(At(url))
            .helpers(self.launch.clone())
            .counted(counted, Arc::new(sent) as Counter);
        if let Some(clock) = clock(servers) {
            locks = locks.served_by(clock);
        }
        self.add_ours(Contestant::new(backend, name, Role::Ours, locks));
    }

    /// In what it has no answer to it has no row.
    fn add_ours(&mut self, contestant: Contestant) {
        self.contestants
            .push(contestant.only(|scenario| !matches!(scenario, Scenario::Waiters(_))));
    }

    /// lockkit at `url` with more local hand-offs than by default, where they count.
    fn ours_handing_on(&mut self, backend: &str, url: &str) {
        let between = if url.contains('?') { '&' } else { '?' };
        let locks = Locks::new(At(format!("{url}{between}local_handoffs={MANY_HANDOFFS}")));
        let name = format!("lockkit, local_handoffs={MANY_HANDOFFS}");
        let contestant = Contestant::new(backend, name, Role::Ours, locks);
        self.contestants
            .push(contestant.only(|scenario| matches!(scenario, Scenario::Tasks(_) | Scenario::Beside(_))));
    }

    fn memory(&mut self) {
        let locks = Locks::new(At("memory:".to_owned()));
        self.add_ours(Contestant::new("memory", "lockkit", Role::Ours, locks));
        self.add("memory", "tokio::sync", Role::Peer, TokioSync::default());
    }

    fn file(&mut self) -> Result<(), Absent> {
        let dir = Directory::new()?;
        let under = |name: &str| dir.0.join(name);
        let floor = LockedFile { dir: under("floor") };
        self.add("file", "flock, write, fdatasync", Role::Floor, floor);
        let flock = Peer::Flock(Flock { dir: under("flock") });
        self.peer("file", "flock, by hand", Role::Floor, flock, &[]);
        let locks = Locks::new(At(format!("file://{}", under("lockkit").display())));
        let locks = locks.helpers(self.launch.clone());
        let ours = Contestant::new("file", "lockkit", Role::Ours, locks);
        self.add_ours(ours.sitting_out(|scenario| {
            (scenario == Scenario::Held(10_000)).then_some(
                "the first grant of a name waits for the disk, which takes half a minute for so many",
            )
        }));
        let peer = DistributedFileLock { dir: under("peer") };
        self.peer(
            "file",
            "distributed-lock",
            Role::Peer,
            Peer::DistributedLock(peer),
            &[],
        );
        self.servers.push(Box::new(dir));
        Ok(())
    }

    fn redis(&mut self) -> Result<(), Absent> {
        if let Some(missing) = redis::missing() {
            return Err(missing.into());
        }
        let server = RedisServer::plain()?;
        let proxy = Proxy::start(server.addr())?;
        let (url, counted) = (server.url().to_owned(), format!("redis://{}", proxy.addr()));
        self.versions.insert("redis".to_owned(), version(&server)?);
        self.add(
            "redis",
            "SET NX, by hand",
            Role::Floor,
            SetNx { url: url.clone() },
        );
        let pids = pids([server.pid()]);
        let ring = Peer::TokenRing(TokenRing { url: url.clone() });
        self.peer("redis", "BLPOP, by hand", Role::Floor, ring, &pids);
        self.ours(
            "redis",
            "lockkit",
            (url.clone(), &pids),
            (counted, Arc::new([proxy])),
        );
        self.ours_handing_on("redis", &url);
        let rslock = Peer::Rslock(Rslock { urls: vec![url] });
        self.peer("redis", "rslock", Role::Peer, rslock, &pids);
        self.servers.push(Box::new(server));
        Ok(())
    }

    async fn redlock(&mut self) -> Result<(), Absent> {
        if let Some(missing) = redis::missing() {
            return Err(missing.into());
        }
        let masters: Vec<_> = (0..MASTERS)
            .map(|_| RedisServer::plain())
            .collect::<Result<_, _>>()?;
        let addrs = masters.iter().map(RedisServer::addr);
        let url = redlock(addrs.clone());
        Client::close(lockkit::connect(&url).await?).await?;
        let proxies: Arc<[Proxy]> = addrs.map(Proxy::start).collect::<Result<_, _>>()?;
        let counted = redlock(proxies.iter().map(Proxy::addr));
        self.versions.insert(
            "redlock".to_owned(),
            format!("{MASTERS} × {}", version(&masters[0])?),
        );
        let pids = pids(masters.iter().map(RedisServer::pid));
        self.ours("redlock", "lockkit", (url.clone(), &pids), (counted, proxies));
        self.ours_handing_on("redlock", &url);
        let urls: Vec<_> = masters.iter().map(|master| master.url().to_owned()).collect();
        let rslock = Peer::Rslock(Rslock { urls });
        self.peer("redlock", "rslock", Role::Peer, rslock, &pids);
        self.servers.push(Box::new(masters));
        Ok(())
    }

    async fn zookeeper(&mut self) -> Result<(), Absent> {
        if let Some(missing) = zookeeper::missing() {
            return Err(missing.into());
        }
        let server = ZkServer::builder().reaps_seldom().start()?;
        let proxy = Proxy::start(server.addr())?;
        let first = self.contestants.len();
        let addr = server.addr().to_string();
        let version = server.word("srvr")?;
        let version = version.lines().next().and_then(|line| line.split(": ").nth(1));
        let version = version
            .and_then(|text| text.split('-').next())
            .unwrap_or_default();
        self.versions.insert("zookeeper".to_owned(), version.to_owned());
        self.add(
            "zookeeper",
            "create, delete",
            Role::Floor,
            EphemeralNode { addr: addr.clone() },
        );
        // A session is what outlives a process that dies; the holds that are left behind ask for a ttl of 4 s.
        let parameters = format!("tick_time={}ms&session_timeout=4s", ZkServer::TICK.as_millis());
        let at = |addr: &dyn fmt::Display| format!("zk://{addr}?{parameters}");
        let (url, counted) = (at(&addr), at(&proxy.addr()));
        let pids = pids([server.pid()]);
        self.ours("zookeeper", "lockkit", (url, &pids), (counted, Arc::new([proxy])));
        let line = ClientEach { addr: addr.clone() };
        let line = Contestant::new("zookeeper", "lockkit, a client each", Role::Ours, line);
        self.contestants
            .push(line.only(|scenario| matches!(scenario, Scenario::Waiters(_))));
        let name = "zookeeper-client's recipe";
        self.peer(
            "zookeeper",
            name,
            Role::Peer,
            Peer::Curator(Curator { addr }),
            &pids,
        );
        self.servers.push(Box::new(server));
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
        let url = server.url();
        let floor = ForUpdate { url: url.clone() };
        let version = floor.version().await?;
        self.versions.insert(backend.to_owned(), version);
        let pids = pids([server.process().pid()]);
        let floor = Peer::ForUpdate(floor);
        self.peer(backend, "FOR UPDATE, by hand", Role::Floor, floor, &pids);
        for (name, parameters) in [
            ("lockkit", ""),
            ("lockkit, mode=lease", "?mode=lease&namespace=lease"),
        ] {
            let proxy = Proxy::start(server.addr())?;
            let counted = format!("{}{parameters}", MySql::url_at(proxy.addr()));
            let url = format!("{url}{parameters}");
            self.ours(backend, name, (url, &pids), (counted, Arc::new([proxy])));
        }
        self.ours_handing_on(backend, &url);
        let get_lock = Peer::GetLock(GetLock { url });
        self.peer(backend, "GET_LOCK", Role::Peer, get_lock, &pids);
        self.servers.push(Box::new(server));
        Ok(())
    }
}

fn pids(servers: impl IntoIterator<Item = Option<u32>>) -> Vec<u32> {
    servers.into_iter().flatten().collect()
}

/// The processor time of these servers together, if there are any.
fn clock(servers: &[u32]) -> Option<Clock> {
    let servers = servers.to_vec();
    (!servers.is_empty())
        .then(|| Arc::new(move || servers.iter().copied().map(processor_time).sum()) as Clock)
}

fn redlock(masters: impl Iterator<Item = SocketAddr>) -> String {
    let masters: Vec<_> = masters.map(|addr| addr.to_string()).collect();
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
    type Client = Session;

    async fn client(&self) -> Result<Session, BoxError> {
        let mut config = ZkConfig::new(&self.addr);
        config.tick_time = ZkServer::TICK;
        Ok(Session(ZkBackend::connect(config).await?))
    }
}

/// A session.
struct Session(ZkBackend);

impl Client for Session {
    type Contender = Lock;

    async fn contender(&self, name: &str, mode: Mode) -> Result<Lock, BoxError> {
        LockClient::new(self.0.clone()).contender(name, mode).await
    }
}

/// A subject with helper processes.
struct Abroad<S>(S, Processes);

impl<S: Subject> Subject for Abroad<S> {
    type Client = S::Client;

    fn client(&self) -> impl Future<Output = Result<S::Client, BoxError>> + Send {
        self.0.client()
    }

    fn declines(&self, scenario: Scenario) -> impl Future<Output = Result<Option<String>, BoxError>> + Send {
        self.0.declines(scenario)
    }

    fn processes(&self) -> Result<Processes, String> {
        Ok(self.1.clone())
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
