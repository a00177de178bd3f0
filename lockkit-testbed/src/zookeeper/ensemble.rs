use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use super::{ZkBuilder, ZkServer};
use crate::process::START_UP;
use crate::{Mode, Port, Proxy};

/// Long enough for whatever is late by it to be lost.
const NEVER: Duration = Duration::from_secs(3_600);

/// The direction in which a member is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OneWay {
    /// Nobody hears it.
    Mute,
    /// It hears nobody.
    Deaf,
}

/// The number of members.
const SIZE: usize = 3;

/// Three servers that replicate to each other. Members are known by their index.
///
/// Each reaches each other one through a link of its own, so that any of them can be cut off from the others.
#[derive(Debug)]
pub struct ZkEnsemble {
    members: Vec<ZkServer>,
    /// By who connects and to whom.
    links: BTreeMap<(usize, usize), Link>,
    _ports: Vec<[Port; 2]>,
}

/// The proxies through which one member reaches another. They are cut as a whole: a leader that is cut off from its
/// followers but not from their elections can win those, and it does so time and again if it has the highest number.
#[derive(Debug)]
struct Link {
    /// The way to the other one's port for followers, in use if it leads.
    quorum: Proxy,
    /// To agree on who does.
    election: Proxy,
}

impl Link {
    fn to([quorum, election]: &[Port; 2]) -> io::Result<Self> {
        Ok(Self {
            quorum: Proxy::start(quorum.addr())?,
            election: Proxy::start_and_edit(election.addr(), without_address)?,
        })
    }

    fn proxies(&self) -> [&Proxy; 2] {
        [&self.quorum, &self.election]
    }
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
        let mut links = BTreeMap::new();
        for member in 0..SIZE {
            for other in (0..SIZE).filter(|other| *other != member) {
                links.insert((member, other), Link::to(&ports[other])?);
            }
        }
        let mut members = Vec::new();
        for member in 0..SIZE {
            let mut builder = ZkServer::builder()
                // A follower that comes before its leader listens is not refused by the proxy, but thrown out, and does not
                // try again; the leader waits for so many ticks before both vote anew.
                .directive("initLimit=15")
                .directive("syncLimit=20")
                .directive("standaloneEnabled=false");
            for (other, own) in ports.iter().enumerate() {
                let [quorum, election] = match links.get(&(member, other)) {
                    Some(link) => link.proxies().map(|proxy| proxy.addr().port()),
                    None => [own[0].number(), own[1].number()],
                };
                builder = builder.directive(format!("server.{}=127.0.0.1:{quorum}:{election}", other + 1));
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

    /// Returns the addresses that clients connect to.
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.members.iter().map(ZkServer::addr).collect()
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

    /// Counts how often others have set out to follow this member so far, because they believed that it was elected.
    pub fn followed(&self, member: usize) -> u64 {
        let links = self.links.iter().filter(|((_, to), _)| *to == member);
        links.map(|(_, link)| link.quorum.counts().connections).sum()
    }

    /// Cuts a member off from all others, leader or follower, without a word to either side. It still serves its
    /// clients, for as long as it believes in its leader or its followers.
    pub fn cut(&self, member: usize) {
        for (_, link) in self.links_of(member) {
            link.set(Mode::Blackhole);
        }
    }

    /// Cuts a member off from all others in one direction: they do not hear it, or it does not hear them. Connections stand.
    pub fn cut_one_way(&self, member: usize, cut: OneWay) {
        for (from, link) in self.links_of(member) {
            // Who has connected sends what the proxy takes for requests.
            let (requests, replies) = if (from == member) == (cut == OneWay::Mute) {
                (NEVER, Duration::ZERO)
            } else {
                (Duration::ZERO, NEVER)
            };
            link.set(Mode::Delay { requests, replies });
        }
    }

    /// Undoes [`cut`](Self::cut) and [`cut_one_way`](Self::cut_one_way) for all members, and waits until all of them serve clients again.
    ///
    /// # Errors
    /// If that takes more than a minute.
    pub fn mend(&self) -> io::Result<()> {
        let links = self.links.values().flat_map(Link::proxies);
        for link in links.filter(|link| link.mode() != Mode::Pass) {
            // What was held back would be delivered to those who have given up long ago.
            link.reset();
            link.set(Mode::Pass);
        }
        for member in &self.members {
            member.wait_ready()?;
        }
        Ok(())
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

    /// The ways from and to a member, each with the member that connects.
    fn links_of(&self, member: usize) -> impl Iterator<Item = (usize, &Proxy)> {
        self.links
            .iter()
            .filter(move |((from, to), _)| [from, to].contains(&&member))
            .flat_map(|((from, _), link)| link.proxies().map(|proxy| (*from, proxy)))
    }
}

/// Takes out of what a member says first on a connection for elections where it can be reached itself. Of two members
/// the one with the higher number connects: called by the other, it hangs up and calls back, there if it was told, else
/// where its configuration says, which is the link.
fn without_address(greeting: &mut Vec<u8>) {
    // The version of the protocol and the number of the member; then the length of an address, and the address.
    const START: usize = 16;
    // An address that ZooKeeper takes for none.
    const NOWHERE: &[u8] = b"\0\0\0\x090.0.0.0:0";
    let length = greeting.get(START..).and_then(|rest| rest.first_chunk());
    let length = length.expect("a whole greeting of ZooKeeper 3.5 or later");
    let end = START + size_of_val(length) + u32::from_be_bytes(*length) as usize;
    greeting.splice(START..end, NOWHERE.iter().copied());
}

fn member_of(builder: ZkBuilder, index: usize) -> io::Result<ZkServer> {
    builder.make(
        "org.apache.zookeeper.server.quorum.QuorumPeerMain",
        Some(index + 1),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_loses_its_address_and_nothing_else() {
        let mut greeting = b"versionsmember.1\0\0\0\x0f127.0.0.1:12345and a vote".to_vec();
        without_address(&mut greeting);
        assert_eq!(greeting, b"versionsmember.1\0\0\0\x090.0.0.0:0and a vote");
    }
}
