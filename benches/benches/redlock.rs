//! Redlock on 1, 3, 5 and 7 masters, beside the raw commands and beside `rslock` on the same masters, in turns.
//!
//! `cargo bench -p lockkit-benches --bench redlock [-- TEXT]`: a TEXT picks one of `uncontended`, `own-names`, `hand-off`,
//! `clients` and `stopped`. What five masters cost beside the other backends is in the bench `matrix`.

use std::{
    fmt,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::future::{join_all, try_join_all};
use lockkit::{BoxError, LockClient, spi::Mode};
use lockkit_benches::{
    peers::{Rslock, SetNx, SetNxClient, SetNxKey},
    results::table,
};
use lockkit_conformance::{
    Harness,
    measure::{Client, Contender, Contestant, Effort, Locks, Role, Scenario, Subject, contest},
};
use lockkit_testbed::redis::{RedisServer, missing};

const EFFORT: Effort = Effort {
    rounds: 15,
    ..Effort::FULL
};

/// The commands to all masters at once, and all of their answers: no token, no renewal, no notice of loss.
struct Raw(Vec<SetNx>);

struct RawClient(Vec<SetNxClient>);

struct RawKeys(Vec<SetNxKey>);

impl Subject for Raw {
    type Client = RawClient;

    async fn client(&self) -> Result<RawClient, BoxError> {
        Ok(RawClient(try_join_all(self.0.iter().map(Subject::client)).await?))
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        self.0[0].declines(scenario).await
    }
}

impl Client for RawClient {
    type Contender = RawKeys;

    async fn contender(&self, name: &str, mode: Mode) -> Result<RawKeys, BoxError> {
        let keys = self.0.iter().map(|client| client.contender(name, mode));
        Ok(RawKeys(try_join_all(keys).await?))
    }
}

impl Contender for RawKeys {
    type Held = ();

    async fn acquire(&mut self) -> Result<(), BoxError> {
        let all = join_all(self.0.iter_mut().map(Contender::acquire)).await;
        all.into_iter().collect()
    }

    async fn release(&mut self, (): ()) -> Result<(), BoxError> {
        let all = join_all(self.0.iter_mut().map(|key| key.release(()))).await;
        all.into_iter().collect()
    }
}

/// lockkit on these masters.
struct At(String);

impl fmt::Debug for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[async_trait]
impl Harness for At {
    async fn client(&self) -> lockkit::Result<LockClient> {
        lockkit::connect(&self.0).await
    }
}

/// The same, but the last master stands still once the client is connected.
struct OneStopped<S> {
    subject: S,
    masters: Arc<Vec<RedisServer>>,
    stopped: OnceLock<()>,
}

impl<S: Subject> Subject for OneStopped<S> {
    type Client = S::Client;

    async fn client(&self) -> Result<S::Client, BoxError> {
        let client = self.subject.client().await?;
        if let Some(last) = self.masters.last()
            && self.stopped.set(()).is_ok()
        {
            last.pause()?;
        }
        Ok(client)
    }
}

fn start(masters: usize) -> Vec<RedisServer> {
    (0..masters)
        .map(|_| RedisServer::plain().expect("a server"))
        .collect()
}

fn lockkit(masters: &[RedisServer]) -> Locks {
    let addrs: Vec<SocketAddr> = masters.iter().map(RedisServer::addr).collect();
    let addrs: Vec<String> = addrs.iter().map(ToString::to_string).collect();
    let scheme = if addrs.len() == 1 { "redis" } else { "redlock" };
    Locks::new(At(format!("{scheme}://{}", addrs.join(","))))
}

fn rslock(masters: &[RedisServer]) -> Rslock {
    Rslock {
        urls: urls(masters).collect(),
    }
}

fn urls(masters: &[RedisServer]) -> impl Iterator<Item = String> {
    masters.iter().map(|master| master.url().to_owned())
}

/// A row for each, and how the others compare with the first, round by round.
async fn measure(contestants: &mut [Contestant], scenario: Scenario, effort: &Effort) {
    let rows = contest(contestants, &[scenario], effort, |_| ()).await;
    println!("\n{}", table(scenario, &rows).trim_end());
    let Some((first, others)) = rows.split_first() else {
        return;
    };
    for row in others {
        if let Some(ratio) = row.ratio(first, scenario.figure()) {
            println!("  {}: {ratio:.2} × {}", row.contestant, first.contestant);
        }
    }
}

async fn on_masters(count: usize, scenario: Scenario) {
    let masters = start(count);
    let backend = format!("{count} masters");
    // Whoever connects first finds masters that nobody has used.
    let ours = lockkit(&masters);
    let client = ours.client().await.expect("masters");
    Client::close(client).await.expect("nothing is held");
    let raw = Raw(urls(&masters).map(|url| SetNx { url }).collect());
    let mut contestants = [
        Contestant::new(&backend, "rslock", Role::Peer, rslock(&masters)),
        Contestant::new(&backend, "SET NX, by hand", Role::Floor, raw),
        Contestant::new(&backend, "lockkit", Role::Ours, ours),
    ];
    measure(&mut contestants, scenario, &EFFORT).await;
}

/// Beside five healthy masters. `rslock` waits for half a second each time, so that it has a table of its own.
async fn one_stopped() {
    let healthy = start(5);
    let stopped = Arc::new(start(5));
    let ours = OneStopped {
        subject: lockkit(&stopped),
        masters: stopped.clone(),
        stopped: OnceLock::new(),
    };
    let mut contestants = [
        Contestant::new("healthy", "lockkit", Role::Ours, lockkit(&healthy)),
        Contestant::new("one of five stopped", "lockkit", Role::Ours, ours),
    ];
    measure(&mut contestants, Scenario::Uncontended, &EFFORT).await;
    let theirs = rslock(&stopped);
    let mut contestants = [Contestant::new(
        "one of five stopped",
        "rslock",
        Role::Peer,
        theirs,
    )];
    let effort = Effort {
        rounds: 3,
        stretch: Duration::from_secs(2),
        ..EFFORT
    };
    measure(&mut contestants, Scenario::Uncontended, &effort).await;
    if let Some(last) = stopped.last() {
        last.resume().expect("resumed");
    }
}

fn main() {
    if let Some(missing) = missing() {
        println!("skipped: {missing}");
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let wanted = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with("--"));
    let is_wanted = |name: &str| wanted.as_ref().is_none_or(|wanted| name.contains(wanted));
    runtime.block_on(async {
        for scenario in [
            Scenario::Uncontended,
            Scenario::OwnNames(16),
            Scenario::HandOff,
            Scenario::Clients(8),
        ] {
            if is_wanted(&scenario.to_string()) {
                for count in [1, 3, 5, 7] {
                    on_masters(count, scenario).await;
                }
            }
        }
        if is_wanted("stopped") {
            one_stopped().await;
        }
    });
}
