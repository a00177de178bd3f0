use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::{RedisServer, resp::Value};

/// After as long a Sentinel has given up a fail-over that it could not finish.
const GIVEN_UP: Duration = Duration::from_secs(5);

/// Three Sentinels that watch over a master and its replica, and make the replica the master when the master is down.
///
/// The servers and the Sentinels can be paused, killed and started one by one. A master that comes back after it was
/// replaced becomes a replica. A fail-over begins 2 s after the master fell silent.
#[derive(Debug)]
pub struct RedisSentinels {
    servers: [RedisServer; 2],
    sentinels: Vec<RedisServer>,
}

impl RedisSentinels {
    /// The name under which the Sentinels know the master.
    pub const MASTER_NAME: &str = "lockkit";

    /// Starts all five and waits until the Sentinels know each other and the replica.
    ///
    /// # Errors
    /// If one of them does not come up within two minutes.
    pub fn start() -> io::Result<Self> {
        let master = RedisServer::plain()?;
        let replica = RedisServer::builder().replica_of(master.addr()).start()?;
        let sentinels = (0..3)
            .map(|_| watching(master.addr()))
            .collect::<io::Result<_>>()?;
        let group = Self {
            servers: [master, replica],
            sentinels,
        };
        for sentinel in &group.sentinels {
            sentinel.wait_ready(|| knows_all(sentinel))?;
        }
        Ok(group)
    }

    /// Starts a Sentinel that knows of no others, and takes this server for the master, whatever they say.
    ///
    /// # Errors
    /// If it does not come up within two minutes.
    pub fn on_its_own(master: SocketAddr) -> io::Result<RedisServer> {
        watching(master)
    }

    /// The two servers; the first was the master at the start.
    pub fn servers(&self) -> &[RedisServer; 2] {
        &self.servers
    }

    /// The Sentinels.
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// The server that the Sentinels call the master now. It is the first Sentinel that answers which is believed.
    ///
    /// # Errors
    /// If no Sentinel answers.
    pub fn master(&self) -> io::Result<&RedisServer> {
        let mut last = io::Error::other("there is no Sentinel");
        for sentinel in &self.sentinels {
            match sentinel.cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Self::MASTER_NAME]) {
                Ok(answer) => {
                    let addr = answer.replace('\n', ":");
                    let server = self
                        .servers
                        .iter()
                        .find(|server| server.addr().to_string() == addr);
                    return server
                        .ok_or_else(|| io::Error::other(format!("a stranger is the master: {addr}")));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Makes the replica the master while the master is well, and waits until the Sentinels say so. They are asked
    /// again if they give up, which they do if the machine stands still for a while.
    ///
    /// # Errors
    /// If there is no good replica, or it takes longer than two minutes.
    pub fn fail_over(&self) -> io::Result<()> {
        let before = self.master()?.addr();
        let [first, ..] = self.sentinels.as_slice() else {
            return Err(io::Error::other("there is no Sentinel"));
        };
        let mut asked: Option<Instant> = None;
        first.wait_ready(|| {
            if self.master()?.addr() != before {
                return Ok(());
            }
            if asked.is_none_or(|asked| asked.elapsed() > GIVEN_UP) {
                first.cli(&["SENTINEL", "FAILOVER", Self::MASTER_NAME])?;
                asked = Some(Instant::now());
            }
            Err(io::Error::other("the master has not changed"))
        })
    }
}

impl RedisSentinels {
    /// Waits until all Sentinels name one master, and the other server follows it.
    ///
    /// # Errors
    /// If it takes longer than two minutes.
    pub fn settle(&self) -> io::Result<()> {
        for sentinel in &self.sentinels {
            sentinel.wait_ready(|| knows_all(sentinel))?;
        }
        let [first, ..] = &self.servers;
        first.wait_ready(|| {
            let master = self.master()?.addr();
            for server in &self.servers {
                let replication = server.info("replication")?;
                let field = |name: &str| replication.get(name).map_or("", String::as_str);
                let is_right = if server.addr() == master {
                    field("role") == "master"
                } else {
                    let follows = field("master_port") == master.port().to_string();
                    field("role") == "slave" && follows && field("master_link_status") == "up"
                };
                if !is_right {
                    return Err(io::Error::other(format!("{} has not settled", server.addr())));
                }
            }
            Ok(())
        })
    }
}

fn watching(master: SocketAddr) -> io::Result<RedisServer> {
    let name = RedisSentinels::MASTER_NAME;
    let (ip, port) = (master.ip().to_string(), master.port().to_string());
    let sentinel = RedisServer::builder()
        .sentinel()
        .directive("sentinel", &["monitor", name, &ip, &port, "2"])
        .directive("sentinel", &["down-after-milliseconds", name, "2000"])
        .directive("sentinel", &["failover-timeout", name, "4000"])
        .start()?;
    // It asks about everything once in 10 s otherwise, tells of itself once in 2 s, and does nothing for 30 s after the
    // machine stood still for 2 s. Four times as long as it tells in, it takes a new master that it was not told of for
    // one that is mistaken; that has to be longer than it does nothing. Before version 7 it cannot be told to hurry, and
    // is slow.
    for (period, ms) in [
        ("INFO-PERIOD", "200"),
        ("PUBLISH-PERIOD", "400"),
        ("TILT-PERIOD", "500"),
    ] {
        let _ = sentinel.cli(&["SENTINEL", "DEBUG", period, ms]);
    }
    Ok(sentinel)
}

/// Checks that it has found the master, the replica and the other Sentinels.
fn knows_all(sentinel: &RedisServer) -> io::Result<()> {
    let master = fields(sentinel.command(&["SENTINEL", "MASTER", RedisSentinels::MASTER_NAME])?);
    expect(&master, "flags", "master")?;
    expect(&master, "num-slaves", "1")?;
    expect(&master, "num-other-sentinels", "2")?;
    let Value::List(replicas) = sentinel.command(&["SENTINEL", "REPLICAS", RedisSentinels::MASTER_NAME])?
    else {
        return Err(io::Error::other("no list of replicas"));
    };
    // A Sentinel promotes none before it has heard how it is doing.
    let replica = replicas.into_iter().next().map(fields).unwrap_or_default();
    expect(&replica, "flags", "slave")?;
    expect(&replica, "master-link-status", "ok")
}

fn expect(fields: &[(String, String)], name: &str, value: &str) -> io::Result<()> {
    match fields.iter().find(|field| field.0 == name) {
        Some((_, found)) if found == value => Ok(()),
        Some((_, found)) => Err(io::Error::other(format!("{name} is {found}, not {value}"))),
        None => Err(io::Error::other(format!("there is no {name}"))),
    }
}

/// A list of names and values in turn.
fn fields(list: Value) -> Vec<(String, String)> {
    let Value::List(items) = list else {
        return Vec::new();
    };
    let texts: Vec<String> = items.iter().map(ToString::to_string).collect();
    texts
        .chunks_exact(2)
        .map(|pair| (pair[0].clone(), pair[1].clone()))
        .collect()
}
