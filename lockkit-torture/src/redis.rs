//! One Redis or Valkey server.

use std::{ffi::OsString, io, time::Duration};

use async_trait::async_trait;
use lockkit::{LockClient, Result};
use lockkit_conformance::torture::{Fault, Strike, Target, Told};
use lockkit_testbed::{
    Clock, Proxy,
    redis::{Fsync, RedisServer},
};

use crate::wires::{Suffering, Wires, unknown};

pub(crate) struct Redis {
    server: RedisServer,
    clock: Clock,
    wires: Wires,
    suffering: Suffering,
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redis").finish_non_exhaustive()
    }
}

/// How long a client may take to be connected again, and the head of the queue to be found to be gone.
const RECOVERY: Duration = Duration::from_secs(8);
/// After its renewal.
const TOLD: Told = Told::AtRenewal(Duration::from_secs(3));

impl Redis {
    pub(crate) fn start(program: OsString) -> io::Result<Self> {
        let clock = Clock::new()?;
        let server = RedisServer::builder()
            .program(program)
            .append_only(Fsync::Always)
            .clock(&clock)
            .start()?;
        let wires = Wires::to(&[server.addr()], 3)?;
        let suffering = Suffering::default();
        Ok(Self {
            server,
            clock,
            wires,
            suffering,
        })
    }
}

/// The keys of the locks of these names, and not the counters.
pub(crate) fn delete_keys(server: &RedisServer, names: &[String]) -> io::Result<()> {
    for name in names {
        for key in [
            format!("lockkit:{name}"),
            format!("lockkit#semaphore:{{lockkit:{name}}}"),
        ] {
            server.cli(&["DEL", &key])?;
        }
    }
    Ok(())
}

#[async_trait]
impl Target for Redis {
    fn routes(&self) -> Vec<String> {
        let addrs = self.wires.0.iter().map(Proxy::addr);
        addrs.map(|addr| format!("redis://{addr}")).collect()
    }

    async fn connect(&self, route: &str) -> Result<LockClient> {
        lockkit::connect(route).await
    }

    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        client.dead_holder_bound(ttl).max(Duration::from_secs(11))
    }

    fn faults(&self) -> Vec<Fault> {
        let mut faults: Vec<_> = self.wires.faults(RECOVERY).into();
        for fault in &mut faults {
            match fault.name {
                "reset" => *fault = fault.keeps_order().weight(3),
                // Who is back in ten seconds keeps its place.
                "refuse" => *fault = fault.keeps_order_until(Duration::from_secs(5)).weight(3),
                _ => {}
            }
        }
        faults.extend([
            Fault::new("pause").recovery(RECOVERY),
            Fault::new("restart").recovery(RECOVERY).weight(2),
            Fault::new("session").places(6).recovery(RECOVERY).keeps_order(),
            Fault::new("scripts").recovery(RECOVERY),
            Fault::new("empty").excuses_overlap(TOLD).recovery(RECOVERY),
            Fault::new("restart-empty")
                .excuses_overlap(TOLD)
                .recovery(RECOVERY),
            Fault::new("delete").excuses_overlap(TOLD).recovery(RECOVERY),
            // A dead holder's lease lasts for so much longer.
            Fault::new("clock")
                .places(2)
                .excuses_overlap(TOLD)
                .recovery(Duration::from_secs(20)),
        ]);
        faults
    }

    fn strike(&self, strike: &Strike, names: &[String]) -> io::Result<()> {
        if self.wires.strike(strike) {
            return Ok(());
        }
        let step = Duration::from_millis(strike.lasts.min(10_000));
        self.suffering.begin(0, strike, || match strike.fault.as_str() {
            "pause" => self.server.pause(),
            "restart" | "restart-empty" => self.server.kill(),
            "session" => {
                let clients = self.server.cli(&["CLIENT", "LIST"])?;
                let ids = clients.lines().filter(|line| line.contains(" sub=1 "));
                let ids: Vec<_> = ids
                    .filter_map(|line| line.strip_prefix("id=")?.split(' ').next())
                    .collect();
                if let Some(id) = ids.get(strike.place as usize % ids.len().max(1)) {
                    self.server.cli(&["CLIENT", "KILL", "ID", id])?;
                }
                Ok(())
            }
            "scripts" => self.server.cli(&["SCRIPT", "FLUSH"]).map(drop),
            "empty" => self.server.cli(&["FLUSHALL"]).map(drop),
            "delete" => delete_keys(&self.server, names),
            "clock" if strike.place == 0 => self.clock.forward(step),
            "clock" => self.clock.back(step),
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
            "restart-empty" => self.server.restart_empty(),
            "clock" => self.clock.reset(),
            _ => Ok(()),
        })
    }
}
