//! Several masters.

use std::{
    fmt, io,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use lockkit::LockClient;
use lockkit_conformance::torture::{Fault, Strike, Told};
use lockkit_testbed::redis::RedisServer;

use crate::{
    deployment::{Blow, Harm, Servers},
    redis::{delete_keys, left_at},
};

/// Masters that know nothing of each other.
pub struct Redlock {
    /// Each of them.
    pub masters: Vec<RedisServer>,
}

impl fmt::Debug for Redlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redlock")
            .field("masters", &self.masters.len())
            .finish_non_exhaustive()
    }
}

const MAX_TTL: Duration = Duration::from_secs(5);
/// A busy machine takes longer than the 100 ms of the default, and a master that is late is one without a say.
const MASTER_TIMEOUT: Duration = Duration::from_millis(400);
/// After its renewal.
const TOLD: Told = Told::AtRenewal(Duration::from_secs(1));
/// 5 ms and two round trips, on a busy machine.
const REPAIRED: Duration = Duration::from_millis(50);

impl Redlock {
    /// Starts so many.
    ///
    /// # Errors
    /// If one does not come up.
    pub fn start(masters: usize) -> io::Result<Self> {
        let masters = (0..masters).map(|_| RedisServer::plain());
        let masters = masters.collect::<io::Result<_>>()?;
        Ok(Self { masters })
    }

    fn master(&self, blow: Blow<'_>) -> &RedisServer {
        &self.masters[blow.place()]
    }
}

impl Servers for Redlock {
    const GROUPS: usize = 2;
    const RECOVERY: Duration = Duration::from_secs(8);

    fn addrs(&self) -> Vec<SocketAddr> {
        self.masters.iter().map(RedisServer::addr).collect()
    }

    fn url(&self, addrs: &[SocketAddr]) -> String {
        let masters: Vec<_> = addrs.iter().map(ToString::to_string).collect();
        format!(
            "redlock://{}?max_ttl={}s&master_timeout={}ms",
            masters.join(","),
            MAX_TTL.as_secs(),
            MASTER_TIMEOUT.as_millis()
        )
    }

    fn max_ttl(&self) -> Duration {
        MAX_TTL
    }

    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        client.dead_holder_bound(ttl).max(Duration::from_secs(11))
    }

    fn splits(&self) -> bool {
        true
    }

    fn seat(&self, strike: &Strike) -> u32 {
        strike.place
    }

    fn harms(&self) -> Vec<Harm<Self>> {
        let all = u32::try_from(self.masters.len()).unwrap_or(u32::MAX);
        let fault = |name| Fault::new(name).places(all).recovery(Self::RECOVERY);
        let quarantined = |name| fault(name).recovery(MAX_TTL + Self::RECOVERY);
        let delete = fault("delete").places((all - 1) / 2).weight(4);
        let delete = delete.excuses_overlap_of_bare(TOLD, REPAIRED);
        vec![
            Harm::<Self>::new(fault("pause"), |it, blow| it.master(blow).pause())
                .healed(|it, blow| it.master(blow).resume()),
            // With its data.
            Harm::<Self>::new(quarantined("restart").weight(2), |it, blow| {
                it.master(blow).restart()
            }),
            Harm::<Self>::new(
                quarantined("restart-empty").places(all - 1).weight(2),
                |it, blow| it.master(blow).kill(),
            )
            .healed(|it, blow| it.master(blow).restart_empty()),
            Harm::<Self>::new(quarantined("empty").places(all - 1).weight(3), |it, blow| {
                it.master(blow).cli(&["FLUSHALL"]).map(drop)
            }),
            // Again and again, at one.
            Harm::<Self>::new(delete, |it, blow| {
                let until = Instant::now() + Duration::from_millis(blow.strike.lasts.min(1_000));
                while Instant::now() < until {
                    delete_keys(it.master(blow), blow.names)?;
                    thread::sleep(Duration::from_millis(10));
                }
                Ok(())
            }),
            Harm::<Self>::new(fault("scripts"), |it, blow| {
                it.master(blow).cli(&["SCRIPT", "FLUSH"]).map(drop)
            }),
        ]
    }

    fn left(&self) -> io::Result<Vec<String>> {
        let mut left = Vec::new();
        for master in &self.masters {
            left.extend(left_at(master, stays)?);
        }
        Ok(left)
    }
}

/// The marker, counters, which go when they were not used for weeks, and what says who was asked to give up a hold, or whose hold was
/// ended, for a little longer than that hold would have had.
fn stays(key: &str, ttl: i64) -> bool {
    let auxiliary = ["lockkit:lockkit#fence:{", "lockkit:lockkit#revoked:{"];
    key == "lockkit:lockkit#redlock" || ttl > 0 && auxiliary.iter().any(|start| key.starts_with(start))
}
