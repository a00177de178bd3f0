//! One etcd server, and three.

use std::{io, net::SocketAddr, time::Duration};

use lockkit::spi::queue::component;
use lockkit_conformance::torture::{Fault, Told};
use lockkit_testbed::etcd::{EtcdCluster, EtcdServer};

use crate::deployment::{Blow, Harm, Servers};

/// The time by which the end of a key is told: by its watch, or by the renewal after a stream is open again.
const TOLD: Told = Told::AtRenewal(Duration::from_secs(3));

/// One of the leases that there are, ended as an operator would.
fn revoke(server: &EtcdServer, blow: Blow<'_>) -> io::Result<()> {
    let leases = server.leases()?;
    if let Some(lease) = leases.get(blow.place() % leases.len().max(1)) {
        // It may have ended meanwhile.
        let _ = server.revoke(lease);
    }
    Ok(())
}

/// The keys of one of the names, as an operator would delete them who wants to have the lock free.
fn delete(server: &EtcdServer, blow: Blow<'_>) -> io::Result<()> {
    let Some(name) = blow.names.get(blow.place() % blow.names.len().max(1)) else {
        return Ok(());
    };
    let name = component(name);
    for queue in ["lockkit", "lockkit/%semaphores"] {
        server.ctl(&["del", "--prefix", &format!("{queue}/{name}/")])?;
    }
    Ok(())
}

fn compact(server: &EtcdServer) -> io::Result<()> {
    // Nothing may have changed since the last time.
    let _ = server.compact();
    server.healthy()
}

/// Leases, keys, and connections to `servers`. Nothing stays.
fn left_at(servers: &[EtcdServer]) -> io::Result<Vec<String>> {
    let mut left = Vec::new();
    for server in servers {
        let port = server.addr().port();
        for client in server.connections()? {
            left.push(format!("at {port} the connection {client}"));
        }
    }
    // The command that asks would be one of them.
    if left.is_empty() {
        for lease in servers[0].leases()? {
            left.push(format!("the lease {lease}"));
        }
        for key in servers[0].keys("")? {
            left.push(format!("the key {key}"));
        }
    }
    Ok(left)
}

/// One server.
#[derive(Debug)]
pub struct Single {
    /// The server.
    pub server: EtcdServer,
}

impl Single {
    /// Starts it.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start() -> io::Result<Self> {
        // It grants leases of a second then, and has nobody to elect but itself.
        let server = EtcdServer::builder()
            .election_timeout(Duration::from_millis(100))
            .start()?;
        Ok(Self { server })
    }
}

impl Servers for Single {
    const GROUPS: usize = 3;
    // And until a lease that was not renewed has ended: each begins anew when the server does.
    const RECOVERY: Duration = Duration::from_secs(12);

    fn addrs(&self) -> Vec<SocketAddr> {
        vec![self.server.addr()]
    }

    fn url(&self, addrs: &[SocketAddr]) -> String {
        self.server.url_at(addrs[0])
    }

    fn min_ttl(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn harms(&self) -> Vec<Harm<Self>> {
        let fault = |name| Fault::new(name).recovery(Self::RECOVERY);
        let costs = |name| fault(name).places(6).excuses_overlap(TOLD);
        vec![
            Harm::<Self>::new(fault("pause"), |it, _| it.server.pause()).healed(|it, _| it.server.resume()),
            Harm::<Self>::new(fault("restart").weight(2), |it, _| it.server.kill())
                .healed(|it, _| it.server.start()),
            Harm::<Self>::new(costs("lease").weight(2), |it, blow| revoke(&it.server, blow)),
            Harm::<Self>::new(costs("delete"), |it, blow| delete(&it.server, blow)),
            // Of all that was before.
            Harm::<Self>::new(fault("compact").keeps_order(), |it, _| compact(&it.server)),
        ]
    }

    fn left(&self) -> io::Result<Vec<String>> {
        left_at(std::slice::from_ref(&self.server))
    }
}

/// Three servers, one of which may suffer: two are a majority.
#[derive(Debug)]
pub struct Cluster(pub EtcdCluster);

impl Cluster {
    /// Starts them.
    ///
    /// # Errors
    /// If they do not come up.
    pub fn start() -> io::Result<Self> {
        EtcdCluster::start().map(Self)
    }

    fn member(&self, blow: Blow<'_>) -> &EtcdServer {
        self.0.member(blow.place())
    }

    fn leader(&self) -> io::Result<&EtcdServer> {
        Ok(self.0.member(self.0.leader()?))
    }
}

impl Servers for Cluster {
    const GROUPS: usize = 2;
    const RECOVERY: Duration = Duration::from_secs(20);

    fn addrs(&self) -> Vec<SocketAddr> {
        self.0.addrs()
    }

    fn url(&self, addrs: &[SocketAddr]) -> String {
        self.0.url_at(addrs)
    }

    fn min_ttl(&self) -> Duration {
        Duration::from_secs(2)
    }

    fn harms(&self) -> Vec<Harm<Self>> {
        let fault = |name| Fault::new(name).places(3).recovery(Self::RECOVERY);
        // A leader that was stopped or cut off has the leases revoked that it has not heard of meanwhile, when it goes on: before
        // 3.4.31 and 3.5.13.
        let of_a_member = |name| fault(name).excuses_overlap(TOLD);
        let costs = |name| {
            Fault::new(name)
                .places(6)
                .recovery(Self::RECOVERY)
                .excuses_overlap(TOLD)
        };
        vec![
            Harm::<Self>::new(of_a_member("pause"), |it, blow| it.member(blow).pause())
                .healed(|it, blow| it.member(blow).resume()),
            Harm::<Self>::new(fault("restart").weight(2), |it, blow| it.member(blow).kill())
                .healed(|it, blow| it.member(blow).start()),
            Harm::<Self>::new(of_a_member("isolate").weight(3), |it, blow| {
                it.0.cut(blow.place());
                Ok(())
            })
            .healed(|it, _| it.0.mend()),
            Harm::<Self>::new(costs("lease"), |it, blow| revoke(it.leader()?, blow)),
            Harm::<Self>::new(costs("delete"), |it, blow| delete(it.leader()?, blow)),
            Harm::<Self>::new(fault("compact").places(1).keeps_order(), |it, _| {
                compact(it.leader()?)
            }),
        ]
    }

    fn left(&self) -> io::Result<Vec<String>> {
        left_at(self.0.members())
    }
}
