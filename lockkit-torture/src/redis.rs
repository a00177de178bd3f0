//! One Redis or Valkey server.

use std::{ffi::OsString, fmt, io, net::SocketAddr, time::Duration};

use lockkit::LockClient;
use lockkit_conformance::torture::{Fault, Told};
use lockkit_testbed::{
    Clock,
    redis::{Fsync, RedisServer},
};

use crate::deployment::{Harm, Servers};

/// A server that syncs each write, by a clock that can be set.
pub struct Redis {
    /// The server.
    pub server: RedisServer,
    clock: Clock,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").finish_non_exhaustive()
    }
}

/// After its renewal.
const TOLD: Told = Told::AtRenewal(Duration::from_secs(3));

impl Redis {
    /// Starts `program`.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start(program: OsString) -> io::Result<Self> {
        let clock = Clock::new()?;
        let server = RedisServer::builder()
            .program(program)
            .append_only(Fsync::Always)
            .clock(&clock)
            .start()?;
        Ok(Self { server, clock })
    }
}

/// Deletes the keys of the locks of these names, and not the counters.
pub(crate) fn delete_keys(server: &RedisServer, names: &[String]) -> io::Result<()> {
    for name in names {
        for key in [
            format!("lockkit:{name}"),
            // An election's.
            format!("lockkit:%{name}"),
            format!("lockkit:lockkit#semaphore:{{lockkit:{name}}}"),
        ] {
            server.cli(&["DEL", &key])?;
        }
    }
    Ok(())
}

/// The ids of the connections that locks are told of.
fn connections(server: &RedisServer) -> io::Result<Vec<String>> {
    let clients = server.cli(&["CLIENT", "LIST"])?;
    let ours = clients.lines().filter(|line| line.contains(" sub=1 "));
    let ids = ours.filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
    Ok(ids.map(str::to_owned).collect())
}

/// Connections, channels and keys, but for what `stays`, of which it is told the key and its time to live in ms.
pub(crate) fn left_at(server: &RedisServer, stays: fn(&str, i64) -> bool) -> io::Result<Vec<String>> {
    let (port, mut left) = (server.addr().port(), Vec::new());
    let clients = server.cli(&["CLIENT", "LIST"])?;
    // But for the one that asks, Sentinels, a replica, and the way of one to its master.
    let others = [" cmd=client", " name=sentinel-", " flags=S ", " flags=M "];
    let is_ours = |line: &&str| !others.iter().any(|other| line.contains(other));
    for client in clients.lines().filter(is_ours) {
        left.push(format!("at {port} the connection {}", field(client, "addr=")));
    }
    let channels = server.cli(&["PUBSUB", "CHANNELS"])?;
    for channel in channels
        .lines()
        .filter(|channel| *channel != "__sentinel__:hello")
    {
        left.push(format!("at {port} a subscription to {channel}"));
    }
    for key in server.cli(&["KEYS", "*"])?.lines() {
        let ttl = server.cli(&["PTTL", key])?.parse().map_err(io::Error::other)?;
        // -2: it has gone meanwhile.
        if ttl != -2 && !stays(key, ttl) {
            left.push(format!("at {port} the key {key}"));
        }
    }
    Ok(left)
}

fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let value = line.split(' ').find_map(|field| field.strip_prefix(name));
    value.unwrap_or(line)
}

impl Servers for Redis {
    const GROUPS: usize = 3;
    // And until the head of the queue is found to be gone.
    const RECOVERY: Duration = Duration::from_secs(8);

    fn addrs(&self) -> Vec<SocketAddr> {
        vec![self.server.addr()]
    }

    fn url(&self, addrs: &[SocketAddr]) -> String {
        format!("redis://{}", addrs[0])
    }

    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        client.dead_holder_bound(ttl).max(Duration::from_secs(11))
    }

    fn of_a_way(&self, fault: Fault) -> Fault {
        match fault.name {
            "reset" => fault.keeps_order().weight(3),
            // Who is back in ten seconds keeps its place.
            "refuse" => fault.keeps_order_until(Duration::from_secs(5)).weight(5),
            _ => fault,
        }
    }

    fn harms(&self) -> Vec<Harm<Self>> {
        let fault = |name| Fault::new(name).recovery(Self::RECOVERY);
        let costs = |name| fault(name).excuses_overlap(TOLD);
        vec![
            Harm::<Self>::new(fault("pause"), |it, _| it.server.pause()).healed(|it, _| it.server.resume()),
            Harm::<Self>::new(fault("restart").weight(2), |it, _| it.server.kill())
                .healed(|it, _| it.server.start()),
            Harm::<Self>::new(fault("session").places(6).keeps_order(), |it, blow| {
                let ids = connections(&it.server)?;
                if let Some(id) = ids.get(blow.place() % ids.len().max(1)) {
                    it.server.cli(&["CLIENT", "KILL", "ID", id])?;
                }
                Ok(())
            }),
            Harm::<Self>::new(fault("scripts"), |it, _| {
                it.server.cli(&["SCRIPT", "FLUSH"]).map(drop)
            }),
            // Nothing new is locked, and connections are made anew meanwhile.
            Harm::<Self>::new(fault("memory").later(), |it, blow| {
                it.server.cli(&["CONFIG", "SET", "maxmemory", "1"])?;
                blow.reset_all();
                Ok(())
            })
            .healed(|it, _| it.server.cli(&["CONFIG", "SET", "maxmemory", "0"]).map(drop)),
            // Nothing at all is written.
            Harm::<Self>::new(fault("disk").later(), |it, blow| {
                it.server.fail_snapshots()?;
                blow.reset_all();
                Ok(())
            })
            .healed(|it, _| it.server.mend_snapshots()),
            Harm::<Self>::new(costs("empty").restarts_tokens(), |it, _| {
                it.server.cli(&["FLUSHALL"]).map(drop)
            }),
            Harm::<Self>::new(costs("restart-empty").restarts_tokens(), |it, _| it.server.kill())
                .healed(|it, _| it.server.restart_empty()),
            Harm::<Self>::new(costs("delete"), |it, blow| delete_keys(&it.server, blow.names)),
            // A dead holder's lease lasts for so much longer.
            Harm::<Self>::new(
                costs("clock").places(2).recovery(Duration::from_secs(20)),
                |it, blow| match blow.place() {
                    0 => it.clock.forward(blow.step()),
                    _ => it.clock.back(blow.step()),
                },
            )
            .healed(|it, _| it.clock.reset()),
        ]
    }

    fn left(&self) -> io::Result<Vec<String>> {
        left_at(&self.server, stays)
    }
}

/// The counter, and for ten idle minutes what says who held and waited. What says who was asked to give up a hold lasts a little
/// longer than the lease that this hold would have had.
pub(crate) fn stays(key: &str, ttl: i64) -> bool {
    let auxiliary = [
        "lockkit:lockkit#holders:{",
        "lockkit:lockkit#queue:{",
        "lockkit:lockkit#about:{",
        "lockkit:lockkit#revoked:{",
    ];
    key == "lockkit:lockkit#fence" || ttl > 0 && auxiliary.iter().any(|start| key.starts_with(start))
}
