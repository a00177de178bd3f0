//! Several masters.

use std::{
    io,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use lockkit::{LockClient, Result};
use lockkit_conformance::torture::{Fault, Strike, Target, Told};
use lockkit_testbed::{Proxy, redis::RedisServer};

use crate::{
    redis::delete_keys,
    wires::{Suffering, Wires, unknown},
};

pub(crate) struct Redlock {
    masters: Vec<RedisServer>,
    wires: Wires,
    suffering: Suffering,
}

impl std::fmt::Debug for Redlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redlock")
            .field("masters", &self.masters.len())
            .finish_non_exhaustive()
    }
}

const MAX_TTL: Duration = Duration::from_secs(5);
/// A busy machine takes longer than the 100 ms of the default, and a master that is late is one without a say.
const MASTER_TIMEOUT: Duration = Duration::from_millis(400);
const GROUPS: usize = 2;
/// After its renewal.
const TOLD: Told = Told::AtRenewal(Duration::from_secs(1));
/// 5 ms and two round trips, on a busy machine.
const REPAIRED: Duration = Duration::from_millis(50);

impl Redlock {
    pub(crate) fn start(masters: usize) -> io::Result<Self> {
        let masters: Vec<_> = (0..masters)
            .map(|_| RedisServer::plain())
            .collect::<io::Result<_>>()?;
        let addrs: Vec<_> = masters.iter().map(RedisServer::addr).collect();
        let wires = Wires::to(&addrs, GROUPS)?;
        let suffering = Suffering::default();
        Ok(Self {
            masters,
            wires,
            suffering,
        })
    }
}

#[async_trait]
impl Target for Redlock {
    fn routes(&self) -> Vec<String> {
        let addrs: Vec<_> = self.wires.0.iter().map(Proxy::addr).collect();
        let url = |addrs: &[SocketAddr]| {
            let masters: Vec<_> = addrs.iter().map(ToString::to_string).collect();
            format!(
                "redlock://{}?max_ttl={}s&master_timeout={}ms",
                masters.join(","),
                MAX_TTL.as_secs(),
                MASTER_TIMEOUT.as_millis()
            )
        };
        addrs.chunks(self.masters.len()).map(url).collect()
    }

    async fn connect(&self, route: &str) -> Result<LockClient> {
        lockkit::connect(route).await
    }

    fn max_ttl(&self) -> Duration {
        MAX_TTL
    }

    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        client.dead_holder_bound(ttl).max(Duration::from_secs(11))
    }

    fn faults(&self) -> Vec<Fault> {
        let recovery = Duration::from_secs(8);
        let quarantine = MAX_TTL + recovery;
        let all = u32::try_from(self.masters.len()).unwrap_or(u32::MAX);
        let minority = (all - 1) / 2;
        let mut faults: Vec<_> = self.wires.faults(recovery).into();
        faults.extend([
            Fault::new("pause").places(all).recovery(recovery),
            // With its data.
            Fault::new("restart").places(all).recovery(quarantine).weight(2),
            Fault::new("restart-empty")
                .places(all - 1)
                .recovery(quarantine)
                .weight(2),
            Fault::new("empty").places(all - 1).recovery(quarantine).weight(3),
            // Again and again, at one.
            Fault::new("delete")
                .places(minority)
                .recovery(recovery)
                .weight(4)
                .excuses_overlap_of_bare(TOLD, REPAIRED),
            Fault::new("scripts").places(all).recovery(recovery),
        ]);
        faults
    }

    fn strike(&self, strike: &Strike, names: &[String]) -> io::Result<()> {
        if self.wires.strike(strike) {
            return Ok(());
        }
        let master = self
            .masters
            .get(strike.place as usize)
            .ok_or_else(|| unknown(strike))?;
        self.suffering
            .begin(strike.place, strike, || match strike.fault.as_str() {
                "pause" => master.pause(),
                "restart" => master.restart(),
                "restart-empty" => master.kill(),
                "empty" => master.cli(&["FLUSHALL"]).map(drop),
                "delete" => {
                    let until = Instant::now() + Duration::from_millis(strike.lasts.min(1_000));
                    while Instant::now() < until {
                        delete_keys(master, names)?;
                        thread::sleep(Duration::from_millis(10));
                    }
                    Ok(())
                }
                "scripts" => master.cli(&["SCRIPT", "FLUSH"]).map(drop),
                _ => Err(unknown(strike)),
            })
    }

    fn heal(&self, strike: &Strike) -> io::Result<()> {
        if self.wires.heal(strike) {
            return Ok(());
        }
        let master = self
            .masters
            .get(strike.place as usize)
            .ok_or_else(|| unknown(strike))?;
        self.suffering
            .end(strike.place, strike, || match strike.fault.as_str() {
                "pause" => master.resume(),
                "restart-empty" => master.restart_empty(),
                _ => Ok(()),
            })
    }
}
