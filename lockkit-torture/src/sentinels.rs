//! A Redis master, its replica, and the Sentinels that watch over both.

use std::{io, net::SocketAddr, time::Duration};

use lockkit::LockClient;
use lockkit_conformance::torture::{Fault, Told};
use lockkit_testbed::redis::{RedisSentinels, RedisServer};

use crate::{
    deployment::{Harm, Servers},
    redis::{left_at, stays},
};

/// Two servers and three Sentinels. The ways lead to the Sentinels; clients reach the servers by themselves.
#[derive(Debug)]
pub struct Sentinels(pub RedisSentinels);

/// The former master grants, too, until the Sentinels have made a replica of it, and its clients learn of the new one within a second of
/// their word. A hold is renewed there, or its holder is told.
const TOLD: Told = Told::AtRenewal(Duration::from_secs(5));

impl Sentinels {
    /// Starts them.
    ///
    /// # Errors
    /// If they do not come up.
    pub fn start() -> io::Result<Self> {
        RedisSentinels::start().map(Self)
    }

    /// Starts whoever is down, resumes whoever stands still, and waits until all have settled.
    fn settle(&self) -> io::Result<()> {
        for server in self.0.servers().iter().chain(self.0.sentinels()) {
            if server.pid().is_some() {
                server.resume()?;
            } else {
                server.start()?;
            }
        }
        self.0.settle()
    }
}

impl Servers for Sentinels {
    const GROUPS: usize = 2;
    // And until the Sentinels try again, if a fail-over came too soon after another.
    const RECOVERY: Duration = Duration::from_secs(20);

    fn addrs(&self) -> Vec<SocketAddr> {
        self.0.sentinels().iter().map(RedisServer::addr).collect()
    }

    fn url(&self, addrs: &[SocketAddr]) -> String {
        let sentinels: Vec<_> = addrs.iter().map(ToString::to_string).collect();
        format!(
            "redis://{}?sentinel={}",
            sentinels.join(","),
            RedisSentinels::MASTER_NAME
        )
    }

    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        client.dead_holder_bound(ttl).max(Duration::from_secs(11))
    }

    fn harms(&self) -> Vec<Harm<Self>> {
        let fault = |name| Fault::new(name).recovery(Self::RECOVERY);
        // What a replica did not get is granted again there, with tokens from its own counter.
        let costs = |name| fault(name).excuses_overlap(TOLD).restarts_tokens();
        vec![
            // Planned, as by `SENTINEL FAILOVER`. The former master answers meanwhile.
            Harm::<Self>::new(costs("failover").weight(3), |it, _| it.0.fail_over())
                .healed(|it, _| it.settle()),
            Harm::<Self>::new(costs("kill-master").weight(2), |it, _| it.0.master()?.kill())
                .healed(|it, _| it.settle()),
            // For less than two seconds nobody takes its place.
            Harm::<Self>::new(costs("pause-master").weight(2), |it, _| it.0.master()?.pause())
                .healed(|it, _| it.settle()),
            Harm::<Self>::new(fault("sentinel").places(3), |it, blow| {
                it.0.sentinels()[blow.place()].pause()
            })
            .healed(|it, _| it.settle()),
        ]
    }

    fn left(&self) -> io::Result<Vec<String>> {
        let mut left = Vec::new();
        for server in self.0.servers() {
            left.extend(left_at(server, stays)?);
        }
        for sentinel in self.0.sentinels() {
            let clients = sentinel.cli(&["CLIENT", "LIST", "TYPE", "pubsub"])?;
            let ours = clients.lines().filter(|line| !line.contains(" name=sentinel-"));
            left.extend(ours.map(|line| format!("at {} the listener {line}", sentinel.addr().port())));
        }
        Ok(left)
    }
}
