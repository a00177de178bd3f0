//! Everyone who takes part in the comparison: each backend on private servers, and what it is measured beside.

use std::{any::Any, collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit::{BoxError, LockClient, spi::chain};
use lockkit_conformance::{
    Harness,
    helper::Launch,
    measure::{Contestant, Counter, Effort, Locks, Processes, Role, Scenario, Subject, contest},
};
use lockkit_testbed::{
    Proxy,
    mysql::{Flavour, MySql},
    redis::{self, RedisServer},
    zookeeper::{self, ZkServer},
};

use crate::{
    peers::{
        Curator, DistributedFileLock, EphemeralNode, ForUpdate, GetLock, ListElement, LockedFile, Peer,
        Rslock, SetNx, TokioSync,
    },
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

    /// A peer, which helper processes are as well.
    fn peer(&mut self, backend: &str, name: &str, peer: Peer) {
        let processes = Processes::new(self.launch.clone(), peer.to_string());
        match peer {
            Peer::DistributedLock(it) => self.add(backend, name, Role::Peer, Abroad(it, processes)),
            Peer::Rslock(it) => self.add(backend, name, Role::Peer, Abroad(it, processes)),
            Peer::Curator(it) => self.add(backend, name, Role::Peer, Abroad(it, processes)),
            Peer::GetLock(it) => self.add(backend, name, Role::Peer, Abroad(it, processes)),
        }
    }

    /// lockkit at `url`; processes whose traffic is counted are behind `proxies`, at `counted`.
    fn ours(&mut self, backend: &str, name: &str, url: String, counted: String, proxies: Arc<[Proxy]>) {
        let sent = move || proxies.iter().map(|proxy| proxy.counts().requests.chunks).sum();
        let locks = Locks::new(At(url))
            .helpers(self.launch.clone())
            .counted(counted, Arc::new(sent) as Counter);
        self.add(backend, name, Role::Ours, locks);
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
        self.add(
            "memory",
            "lockkit",
            Role::Ours,
            Locks::new(At("memory:".to_owned())),
        );
        self.add("memory", "tokio::sync", Role::Peer, TokioSync::default());
    }

    fn file(&mut self) -> Result<(), Absent> {
        let dir = Directory::new()?;
        let under = |name: &str| dir.0.join(name);
        let floor = LockedFile { dir: under("floor") };
        self.add("file", "flock, write, fdatasync", Role::Floor, floor);
        let locks = Locks::new(At(format!("file://{}", under("lockkit").display())));
        let locks = locks.helpers(self.launch.clone());
        let ours = Contestant::new("file", "lockkit", Role::Ours, locks);
        self.contestants.push(ours.sitting_out(|scenario| {
            (scenario == Scenario::Held(10_000)).then_some(
                "the first grant of a name waits for the disk, which takes half a minute for so many",
            )
        }));
        let peer = DistributedFileLock { dir: under("peer") };
        self.peer("file", "distributed-lock", Peer::DistributedLock(peer));
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
        let element = ListElement { url: url.clone() };
        let element = Contestant::new("redis", "BLPOP, by hand", Role::Floor, element);
        self.contestants
            .push(element.only(|scenario| scenario == Scenario::HandOff));
        self.ours("redis", "lockkit", url.clone(), counted, Arc::new([proxy]));
        self.ours_handing_on("redis", &url);
        self.peer("redis", "rslock", Peer::Rslock(Rslock { urls: vec![url] }));
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
        lockkit::connect(&url)
            .await?
            .close(Duration::from_secs(5))
            .await?;
        let proxies: Arc<[Proxy]> = addrs.map(Proxy::start).collect::<Result<_, _>>()?;
        let counted = redlock(proxies.iter().map(Proxy::addr));
        self.versions.insert(
            "redlock".to_owned(),
            format!("{MASTERS} × {}", version(&masters[0])?),
        );
        self.ours("redlock", "lockkit", url.clone(), counted, proxies);
        self.ours_handing_on("redlock", &url);
        let urls: Vec<_> = masters.iter().map(|master| master.url().to_owned()).collect();
        self.peer("redlock", "rslock", Peer::Rslock(Rslock { urls }));
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
        self.ours("zookeeper", "lockkit", url, counted, Arc::new([proxy]));
        let name = "zookeeper-client's recipe";
        self.peer("zookeeper", name, Peer::Curator(Curator { addr }));
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
        self.add(backend, "FOR UPDATE, by hand", Role::Floor, floor);
        for (name, parameters) in [
            ("lockkit", ""),
            ("lockkit, mode=lease", "?mode=lease&namespace=lease"),
        ] {
            let proxy = Proxy::start(server.addr())?;
            let counted = format!("{}{parameters}", MySql::url_at(proxy.addr()));
            let url = format!("{url}{parameters}");
            self.ours(backend, name, url, counted, Arc::new([proxy]));
        }
        self.ours_handing_on(backend, &url);
        self.peer(backend, "GET_LOCK", Peer::GetLock(GetLock { url }));
        self.servers.push(Box::new(server));
        Ok(())
    }
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
