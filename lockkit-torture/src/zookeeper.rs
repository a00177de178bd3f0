//! One ZooKeeper server, and three.

use std::{io, net::SocketAddr, time::Duration};

use lockkit_conformance::torture::{Fault, Told};
use lockkit_testbed::zookeeper::{OneWay, ZkEnsemble, ZkServer};

use crate::deployment::{Blow, Harm, Servers};

/// Long enough for a lease that is worth something, and short enough to be waited for.
const SESSION: Duration = Duration::from_secs(6);
/// The longest session that servers grant, in ms.
const MAX_SESSION: u32 = 60_000;
/// The time by which the end of a session by an operator is told.
const TOLD: Told = Told::Within(Duration::from_secs(3));

fn url(addrs: &[SocketAddr], nodes: &str) -> String {
    let servers: Vec<_> = addrs.iter().map(ToString::to_string).collect();
    format!(
        "zk://{}?nodes={nodes}&tick_time={}ms&session_timeout={}s",
        servers.join(","),
        ZkServer::TICK.as_millis(),
        SESSION.as_secs()
    )
}

/// One of the sessions that there are, ended as an operator would.
fn end_session(server: &ZkServer, blow: Blow<'_>) -> io::Result<()> {
    let ids = server.sessions()?;
    if let Some(id) = ids.get(blow.place() % ids.len().max(1)) {
        server.end_session(*id)?;
    }
    Ok(())
}

fn session(recovery: Duration) -> Fault {
    Fault::new("session")
        .places(6)
        .recovery(recovery)
        .excuses_overlap(TOLD)
}

/// Sessions that `leader` knows, connections to `servers`, and nodes. Nothing stays: directories are containers.
fn left_at(leader: &ZkServer, servers: &[ZkServer]) -> io::Result<Vec<String>> {
    let mut left = Vec::new();
    for id in leader.sessions()? {
        left.push(format!("the session {id:#x}"));
    }
    for server in servers {
        let connections = server.word("cons")?;
        // One that has no session is that which asks.
        for line in connections.lines().filter(|line| line.contains("sid=")) {
            let (client, _) = line.trim().split_once('[').unwrap_or((line, ""));
            left.push(format!("at {} the connection {client}", server.addr().port()));
        }
    }
    // Which is a look in a session of its own.
    if left.is_empty() {
        left.extend(leader.nodes()?.into_iter().map(|node| format!("the node {node}")));
    }
    Ok(left)
}

/// One server.
#[derive(Debug)]
pub struct Single {
    /// The server.
    pub server: ZkServer,
    nodes: &'static str,
}

impl Single {
    /// Starts it, for locks with the layout `nodes`.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start(nodes: &'static str) -> io::Result<Self> {
        let server = ZkServer::plain()?;
        Ok(Self { server, nodes })
    }

    /// Has it come back with other settings.
    fn restart_with(&self, max_session: u32, tick: Duration) -> io::Result<()> {
        self.server.kill()?;
        self.server
            .reconfigure(&format!("maxSessionTimeout={max_session}"))?;
        self.server
            .reconfigure(&format!("tickTime={}", tick.as_millis()))?;
        self.server.start()
    }
}

impl Servers for Single {
    const GROUPS: usize = 3;
    // And until a session that was not attached again is over.
    const RECOVERY: Duration = Duration::from_secs(12);

    fn addrs(&self) -> Vec<SocketAddr> {
        vec![self.server.addr()]
    }

    fn url(&self, addrs: &[SocketAddr]) -> String {
        url(addrs, self.nodes)
    }

    fn of_a_way(&self, fault: Fault) -> Fault {
        match fault.name {
            "cut" => fault.weight(4),
            "reset" => fault.keeps_order().weight(2),
            _ => fault,
        }
    }

    fn harms(&self) -> Vec<Harm<Self>> {
        let fault = |name| Fault::new(name).recovery(Self::RECOVERY);
        vec![
            Harm::<Self>::new(fault("pause"), |it, _| it.server.pause()).healed(|it, _| it.server.resume()),
            Harm::<Self>::new(fault("restart"), |it, _| it.server.kill()).healed(|it, _| it.server.start()),
            // It comes back, and grants sessions of two seconds at most.
            Harm::<Self>::new(fault("settings").lasting().weight(4), |it, _| {
                it.restart_with(2_000, ZkServer::TICK)
            })
            .healed(|it, _| it.restart_with(MAX_SESSION, ZkServer::TICK)),
            // It comes back, and counts sessions by shorter or longer ticks.
            Harm::<Self>::new(fault("ticks").places(2).lasting().later(), |it, blow| {
                let tick = match blow.place() {
                    0 => ZkServer::TICK * 2 / 5,
                    _ => ZkServer::TICK * 5,
                };
                it.restart_with(MAX_SESSION, tick)
            })
            .healed(|it, _| it.restart_with(MAX_SESSION, ZkServer::TICK)),
            Harm::<Self>::new(session(Self::RECOVERY), |it, blow| end_session(&it.server, blow)),
        ]
    }

    fn left(&self) -> io::Result<Vec<String>> {
        left_at(&self.server, std::slice::from_ref(&self.server))
    }
}

/// Three servers, one of which may suffer: two are a majority.
#[derive(Debug)]
pub struct Ensemble(pub ZkEnsemble);

impl Ensemble {
    /// Starts them.
    ///
    /// # Errors
    /// If they do not come up.
    pub fn start() -> io::Result<Self> {
        ZkEnsemble::start().map(Self)
    }

    fn member(&self, blow: Blow<'_>) -> &ZkServer {
        self.0.member(blow.place())
    }
}

impl Servers for Ensemble {
    const GROUPS: usize = 2;
    const RECOVERY: Duration = Duration::from_secs(20);

    fn addrs(&self) -> Vec<SocketAddr> {
        self.0.addrs()
    }

    fn url(&self, addrs: &[SocketAddr]) -> String {
        url(addrs, "mutex")
    }

    fn harms(&self) -> Vec<Harm<Self>> {
        let fault = |name| Fault::new(name).places(3).recovery(Self::RECOVERY);
        vec![
            Harm::<Self>::new(fault("pause"), |it, blow| it.member(blow).pause())
                .healed(|it, blow| it.member(blow).resume()),
            Harm::<Self>::new(fault("restart").weight(2), |it, blow| it.member(blow).kill())
                .healed(|it, blow| it.member(blow).start()),
            Harm::<Self>::new(fault("isolate").weight(3), |it, blow| {
                it.0.cut(blow.place());
                Ok(())
            })
            .healed(|it, _| it.0.mend()),
            // In one direction alone.
            Harm::<Self>::new(fault("one-way").places(6).later(), |it, blow| {
                let way = if blow.place() < 3 {
                    OneWay::Mute
                } else {
                    OneWay::Deaf
                };
                it.0.cut_one_way(blow.place() % 3, way);
                Ok(())
            })
            .healed(|it, _| it.0.mend()),
            Harm::<Self>::new(session(Self::RECOVERY), |it, blow| {
                end_session(it.0.member(it.0.leader()?), blow)
            }),
        ]
    }

    fn left(&self) -> io::Result<Vec<String>> {
        left_at(self.0.member(self.0.leader()?), self.0.members())
    }
}
