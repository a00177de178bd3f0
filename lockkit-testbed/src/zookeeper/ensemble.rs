use std::{
    io,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use super::{ZkBuilder, ZkServer, server::START_UP};
use crate::{Mode, Port, Proxy};

/// How many members it has.
const SIZE: usize = 3;

/// Three servers that replicate to each other. Members are known by their index.
///
/// A follower reaches its leader through a [`Proxy`] of its own, so that any of them can be cut off from any other.
/// Elections have ports of their own, which are never cut.
#[derive(Debug)]
pub struct ZkEnsemble {
    members: Vec<ZkServer>,
    /// What a member reaches another one through: by member, then by the other.
    links: Vec<Vec<Proxy>>,
    _ports: Vec<[Port; 2]>,
}

impl ZkEnsemble {
    /// Three members that do not wait for their disks, with a leader.
    ///
    /// # Errors
    /// If they do not come up within a minute, with the end of what one of them printed.
    pub fn start() -> io::Result<Self> {
        let ports = (0..SIZE)
            .map(|_| Ok([Port::reserve()?, Port::reserve()?]))
            .collect::<io::Result<Vec<_>>>()?;
        let links = (0..SIZE)
            .map(|_| {
                ports
                    .iter()
                    .map(|[quorum, _]| Proxy::start(quorum.addr()))
                    .collect()
            })
            .collect::<io::Result<Vec<Vec<_>>>>()?;
        let mut members = Vec::new();
        for (member, links) in links.iter().enumerate() {
            let mut builder = ZkServer::builder()
                // A follower that comes before its leader listens is not refused by the proxy, but thrown out, and does not
                // try again; the leader waits for so many ticks before both vote anew.
                .directive("initLimit=15")
                .directive("syncLimit=20")
                .directive("standaloneEnabled=false");
            for (other, [quorum, election]) in ports.iter().enumerate() {
                let quorum = if other == member {
                    quorum.number()
                } else {
                    links[other].addr().port()
                };
                let line = format!("server.{}=127.0.0.1:{quorum}:{}", other + 1, election.number());
                builder = builder.directive(line);
            }
            members.push(member_of(builder, member)?);
        }
        for member in &members {
            member.spawn()?;
        }
        for member in &members {
            member.wait_ready()?;
        }
        Ok(Self {
            members,
            links,
            _ports: ports,
        })
    }

    /// The member of this index, 0 to 2.
    pub fn member(&self, index: usize) -> &ZkServer {
        &self.members[index]
    }

    /// All members.
    pub fn members(&self) -> &[ZkServer] {
        &self.members
    }

    /// Where clients connect to.
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.members.iter().map(ZkServer::addr).collect()
    }

    /// Which member leads.
    ///
    /// # Errors
    /// If none does within a minute.
    pub fn leader(&self) -> io::Result<usize> {
        self.leader_but(None)
    }

    /// Which member leads, other than `old`, which may still believe that it does.
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
                if Some(index) != old
                    && member.pid().is_some()
                    && member
                        .word("srvr")
                        .is_ok_and(|answer| answer.contains("Mode: leader"))
                {
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
    /// clients, for as long as it believes in its leader or its followers.
    pub fn cut(&self, member: usize) {
        self.switch(member, Mode::Blackhole);
    }

    /// Undoes [`cut`](Self::cut).
    pub fn heal(&self, member: usize) {
        self.switch(member, Mode::Pass);
        // What was held back would be delivered to those who have given up long ago.
        for link in self.links_of(member) {
            link.reset();
        }
    }

    /// Undoes [`cut`](Self::cut) for all members, and waits until all of them serve clients again.
    ///
    /// # Errors
    /// If that takes more than a minute.
    pub fn mend(&self) -> io::Result<()> {
        for member in 0..SIZE {
            if self.links_of(member).any(|link| link.mode() != Mode::Pass) {
                self.heal(member);
            }
        }
        for member in &self.members {
            member.wait_ready()?;
        }
        Ok(())
    }

    fn switch(&self, member: usize, mode: Mode) {
        for link in self.links_of(member) {
            link.set(mode);
        }
    }

    fn links_of(&self, member: usize) -> impl Iterator<Item = &Proxy> {
        let out = self.links[member].iter();
        let into = self.links.iter().map(move |links| &links[member]);
        out.chain(into)
    }
}

fn member_of(builder: ZkBuilder, index: usize) -> io::Result<ZkServer> {
    builder.make(
        "org.apache.zookeeper.server.quorum.QuorumPeerMain",
        Some(index + 1),
    )
}
