use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{EtcdBuilder, EtcdServer, server::Member, sockets::owner};
use crate::{Mode, Port, Proxy, process::START_UP};

/// The number of members.
const SIZE: usize = 3;

/// Three servers that replicate to each other. Members are known by their index.
///
/// Each reaches each other one through a link of its own, so that any of them can be cut off from the others. All tell each
/// other the same address of a member, its door, from where each connection goes on by the link of whoever made it.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<EtcdServer>,
    options: EtcdBuilder,
    _doors: Vec<Proxy>,
    /// By who connects and to whom.
    links: BTreeMap<(usize, usize), Proxy>,
    _ports: Vec<Port>,
}

impl EtcdCluster {
    /// Three members that do not wait for their disks, with a leader.
    ///
    /// # Errors
    /// If they do not come up within a minute, with the end of what one of them printed.
    pub fn start() -> io::Result<Self> {
        Self::start_with(EtcdServer::builder())
    }

    /// Three members with these options.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(options: EtcdBuilder) -> io::Result<Self> {
        let ports = (0..SIZE)
            .map(|_| Port::reserve())
            .collect::<io::Result<Vec<_>>>()?;
        let mut links = BTreeMap::new();
        for member in 0..SIZE {
            for other in (0..SIZE).filter(|other| *other != member) {
                links.insert((member, other), Proxy::start(ports[other].addr())?);
            }
        }
        let pids = Arc::<OnceLock<Vec<Arc<AtomicU32>>>>::default();
        let mut doors = Vec::new();
        for (member, own) in ports.iter().enumerate() {
            let ways: BTreeMap<_, _> = (0..SIZE)
                .map(|other| {
                    let link = links.get(&(other, member)).map(Proxy::addr);
                    (other, link.unwrap_or(own.addr()))
                })
                .collect();
            let pids = pids.clone();
            doors.push(Proxy::start_and_route(move |from, door| {
                let pids: Vec<_> = pids
                    .get()?
                    .iter()
                    .map(|pid| pid.load(Ordering::Relaxed))
                    .collect();
                let owner = owner(pids.iter().copied(), from, door)?;
                let from = pids.iter().position(|pid| *pid == owner)?;
                ways.get(&from).copied()
            })?);
        }
        let name = |member| format!("member-{member}");
        let url = |member: usize| format!("http://{}", doors[member].addr());
        let cluster: Vec<_> = (0..SIZE)
            .map(|member| format!("{}={}", name(member), url(member)))
            .collect();
        let members = (0..SIZE)
            .map(|member| {
                let place = Member {
                    name: name(member),
                    listens: format!("http://{}", ports[member].addr()),
                    advertises: url(member),
                    cluster: cluster.join(","),
                };
                options.clone().make(&place, None)
            })
            .collect::<io::Result<Vec<_>>>()?;
        let known = members.iter().map(|member| member.last_pid().clone()).collect();
        // It is the first time.
        let _ = pids.set(known);
        for member in &members {
            member.spawn()?;
        }
        for member in &members {
            member.wait_ready()?;
        }
        members[0].authorise()?;
        Ok(Self {
            members,
            options,
            _doors: doors,
            links,
            _ports: ports,
        })
    }

    /// The member of this index, 0 to 2.
    pub fn member(&self, index: usize) -> &EtcdServer {
        &self.members[index]
    }

    /// All members.
    pub fn members(&self) -> &[EtcdServer] {
        &self.members
    }

    /// Returns the addresses that clients connect to.
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.members.iter().map(EtcdServer::addr).collect()
    }

    /// The URL of all members for clients, with the user and the password if they ask for one.
    pub fn url(&self) -> String {
        self.url_at(&self.addrs())
    }

    /// Returns the URL of members that are reached at `addrs`, through proxies.
    pub fn url_at(&self, addrs: &[SocketAddr]) -> String {
        self.options.url_of(addrs)
    }

    /// Returns the member that leads.
    ///
    /// # Errors
    /// If none does within a minute.
    pub fn leader(&self) -> io::Result<usize> {
        self.leader_but(None)
    }

    /// Returns the member that leads, other than `old`, which may still believe that it does.
    ///
    /// # Errors
    /// If none does within a minute.
    pub fn new_leader(&self, old: usize) -> io::Result<usize> {
        self.leader_but(Some(old))
    }

    fn leader_but(&self, old: Option<usize>) -> io::Result<usize> {
        let deadline = Instant::now() + START_UP;
        loop {
            for (index, member) in self.members.iter().enumerate() {
                if Some(index) != old && member.pid().is_some() && member.leads().unwrap_or(false) {
                    return Ok(index);
                }
            }
            if Instant::now() >= deadline {
                return Err(io::Error::other("no member leads"));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Cuts a member off from all others, leader or follower, without a word to either side. It still serves its
    /// clients, as far as it can without them.
    pub fn cut(&self, member: usize) {
        for ((from, to), link) in &self.links {
            if [from, to].contains(&&member) {
                link.set(Mode::Blackhole);
            }
        }
    }

    /// Undoes what was done to the members and the links between them: starts those that are down, resumes those that are paused, and
    /// mends the rest.
    ///
    /// # Errors
    /// If a member does not come up.
    pub fn heal(&self) -> io::Result<()> {
        for member in &self.members {
            if member.pid().is_some() {
                member.resume()?;
            } else {
                member.spawn()?;
            }
        }
        self.mend()
    }

    /// Undoes [`cut`](Self::cut) for all members, and waits until all of them serve clients again.
    ///
    /// # Errors
    /// If that takes more than a minute.
    pub fn mend(&self) -> io::Result<()> {
        for link in self.links.values().filter(|link| link.mode() != Mode::Pass) {
            // What was held back would be delivered to those who have given up long ago.
            link.reset();
            link.set(Mode::Pass);
        }
        for member in &self.members {
            member.wait_ready()?;
        }
        Ok(())
    }

    /// Kills a member and puts another in its place, at the same addresses and without data, as an operator does whose machine
    /// is lost.
    ///
    /// # Errors
    /// If the others do not agree to that, or it does not come up within a minute.
    pub fn replace(&self, member: usize) -> io::Result<()> {
        self.replace_as(member, false)
    }

    /// [Replaces](Self::replace) a member by a learner, which nobody promotes.
    ///
    /// # Errors
    /// As [`replace`](Self::replace).
    pub fn replace_by_learner(&self, member: usize) -> io::Result<()> {
        self.replace_as(member, true)
    }

    fn replace_as(&self, member: usize, is_learner: bool) -> io::Result<()> {
        let lost = &self.members[member];
        let other = &self.members[(member + 1) % SIZE];
        let name = format!("member-{member}");
        lost.kill()?;
        lost.forget()?;
        // What is asked without a leader is lost.
        self.new_leader(member)?;
        other.wait_ready()?;
        let listed = other.ctl(&["member", "list"])?;
        // `8e9e05c52164694d, started, member-0, http://127.0.0.1:2380, …`
        let line = listed.lines().find(|line| line.contains(&format!(", {name}, ")));
        let fields: Vec<_> = line.into_iter().flat_map(|line| line.split(", ")).collect();
        let [id, _, _, url, ..] = fields[..] else {
            return Err(io::Error::other(format!("there is no {name} in:\n{listed}")));
        };
        other.ctl(&["member", "remove", id])?;
        let url = format!("--peer-urls={url}");
        let mut add = vec!["member", "add", name.as_str(), url.as_str()];
        add.extend(is_learner.then_some("--learner"));
        let deadline = Instant::now() + START_UP;
        // They must have been connected for some seconds.
        while let Err(error) = other.ctl(&add) {
            if Instant::now() >= deadline || !error.to_string().contains("unhealthy cluster") {
                return Err(error);
            }
            thread::sleep(Duration::from_millis(100));
        }
        // One that joins a cluster which has agreed on no version yet takes it for one that it does not go with, and ends.
        while !other.knows_version().unwrap_or(false) {
            if Instant::now() >= deadline {
                return Err(io::Error::other("the members agree on no version"));
            }
            thread::sleep(Duration::from_millis(25));
        }
        lost.set_env("ETCD_INITIAL_CLUSTER_STATE", "existing");
        if is_learner {
            lost.spawn()?;
            return lost.wait_learning();
        }
        lost.start()
    }

    /// Kills all members and starts them again without their data, as a new cluster.
    ///
    /// # Errors
    /// If they do not come up within a minute.
    pub fn start_empty(&self) -> io::Result<()> {
        for member in &self.members {
            member.kill()?;
            member.forget()?;
            member.set_env("ETCD_INITIAL_CLUSTER_STATE", "new");
        }
        for member in &self.members {
            member.spawn()?;
        }
        for member in &self.members {
            member.wait_ready()?;
        }
        self.members[0].authorise()
    }
}
