//! One ZooKeeper server, and three.

use std::{io, net::SocketAddr, sync::Mutex, sync::PoisonError, time::Duration};

use async_trait::async_trait;
use lockkit::{LockClient, Result};
use lockkit_conformance::torture::{Fault, Strike, Target, Told};
use lockkit_testbed::{
    Proxy,
    zookeeper::{ZkEnsemble, ZkServer},
};

use crate::wires::{Suffering, Wires, unknown};

/// Long enough for a lease that is worth something, and short enough to be waited for.
const SESSION: Duration = Duration::from_secs(6);
/// Until a client is back, and a session that was not is over.
const RECOVERY: Duration = Duration::from_secs(12);
/// Of a session that an operator ends.
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
fn end_session(server: &ZkServer, place: u32) -> io::Result<()> {
    let dump = server.word("dump")?;
    let ids = dump.lines().filter_map(|line| line.trim().strip_prefix("0x"));
    let ids: Vec<_> = ids
        .filter_map(|id| u64::from_str_radix(id.trim_end_matches(':'), 16).ok())
        .map(u64::cast_signed)
        .collect();
    if let Some(id) = ids.get(place as usize % ids.len().max(1)) {
        server.end_session(*id)?;
    }
    Ok(())
}

#[derive(Debug)]
pub(crate) struct Single {
    server: ZkServer,
    nodes: &'static str,
    wires: Wires,
    suffering: Suffering,
}

impl Single {
    pub(crate) fn start(nodes: &'static str) -> io::Result<Self> {
        let server = ZkServer::plain()?;
        let wires = Wires::to(&[server.addr()], 3)?;
        let suffering = Suffering::default();
        Ok(Self {
            server,
            nodes,
            wires,
            suffering,
        })
    }
}

#[async_trait]
impl Target for Single {
    fn routes(&self) -> Vec<String> {
        let addrs = self.wires.0.iter().map(Proxy::addr);
        addrs.map(|addr| url(&[addr], self.nodes)).collect()
    }

    async fn connect(&self, route: &str) -> Result<LockClient> {
        lockkit::connect(route).await
    }

    fn faults(&self) -> Vec<Fault> {
        let mut faults: Vec<_> = self.wires.faults(RECOVERY).into();
        for fault in &mut faults {
            match fault.name {
                "cut" => *fault = fault.weight(4),
                "reset" => *fault = fault.keeps_order().weight(2),
                _ => {}
            }
        }
        faults.extend([
            Fault::new("pause").recovery(RECOVERY),
            Fault::new("restart").recovery(RECOVERY),
            // It comes back, and grants sessions of two seconds at most.
            Fault::new("settings").recovery(RECOVERY).lasting().weight(4),
            Fault::new("session")
                .places(6)
                .recovery(RECOVERY)
                .excuses_overlap(TOLD),
        ]);
        faults
    }

    fn strike(&self, strike: &Strike, _: &[String]) -> io::Result<()> {
        if self.wires.strike(strike) {
            return Ok(());
        }
        if strike.fault == "session" {
            return self
                .suffering
                .begin(0, strike, || end_session(&self.server, strike.place));
        }
        self.suffering.begin(0, strike, || match strike.fault.as_str() {
            "pause" => self.server.pause(),
            "restart" => self.server.kill(),
            "settings" => {
                self.server.kill()?;
                self.server.reconfigure("maxSessionTimeout=2000")?;
                self.server.start()
            }
            _ => Err(unknown(strike)),
        })
    }

    fn heal(&self, strike: &Strike) -> io::Result<()> {
        if self.wires.heal(strike) {
            return Ok(());
        }
        self.suffering.end(0, strike, || match strike.fault.as_str() {
            "pause" => self.server.resume(),
            "restart" => self.server.start(),
            "settings" => {
                self.server.kill()?;
                self.server.reconfigure("maxSessionTimeout=60000")?;
                self.server.start()
            }
            _ => Ok(()),
        })
    }
}

#[derive(Debug)]
pub(crate) struct Ensemble {
    servers: ZkEnsemble,
    wires: Wires,
    suffering: Mutex<Option<Strike>>,
}

impl Ensemble {
    pub(crate) fn start() -> io::Result<Self> {
        let servers = ZkEnsemble::start()?;
        let wires = Wires::to(&servers.addrs(), 2)?;
        Ok(Self {
            servers,
            wires,
            suffering: Mutex::default(),
        })
    }
}

#[async_trait]
impl Target for Ensemble {
    fn routes(&self) -> Vec<String> {
        let addrs: Vec<_> = self.wires.0.iter().map(Proxy::addr).collect();
        addrs.chunks(3).map(|addrs| url(addrs, "mutex")).collect()
    }

    async fn connect(&self, route: &str) -> Result<LockClient> {
        lockkit::connect(route).await
    }

    fn faults(&self) -> Vec<Fault> {
        let recovery = RECOVERY + Duration::from_secs(8);
        let mut faults: Vec<_> = self.wires.faults(recovery).into();
        faults.extend([
            Fault::new("pause").places(3).recovery(recovery),
            Fault::new("restart").places(3).recovery(recovery).weight(2),
            Fault::new("isolate").places(3).recovery(recovery).weight(3),
            Fault::new("session")
                .places(6)
                .recovery(recovery)
                .excuses_overlap(TOLD),
        ]);
        faults
    }

    fn strike(&self, strike: &Strike, _: &[String]) -> io::Result<()> {
        if self.wires.strike(strike) {
            return Ok(());
        }
        // One member at a time: two are a majority.
        let mut suffering = self.suffering.lock().unwrap_or_else(PoisonError::into_inner);
        if suffering.is_some() {
            return Ok(());
        }
        *suffering = Some(strike.clone());
        let member = self.servers.member(strike.place as usize % 3);
        match strike.fault.as_str() {
            "pause" => member.pause(),
            "restart" => member.kill(),
            "isolate" => {
                self.servers.cut(strike.place as usize % 3);
                Ok(())
            }
            "session" => end_session(self.servers.member(self.servers.leader()?), strike.place),
            _ => Err(unknown(strike)),
        }
    }

    fn heal(&self, strike: &Strike) -> io::Result<()> {
        if self.wires.heal(strike) {
            return Ok(());
        }
        let mut suffering = self.suffering.lock().unwrap_or_else(PoisonError::into_inner);
        if suffering.as_ref() != Some(strike) {
            return Ok(());
        }
        *suffering = None;
        let member = self.servers.member(strike.place as usize % 3);
        match strike.fault.as_str() {
            "pause" => member.resume(),
            "restart" => member.start(),
            "isolate" => self.servers.mend(),
            _ => Ok(()),
        }
    }
}
