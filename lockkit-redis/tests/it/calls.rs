//! Counts what a server executes for each lock, from its own statistics: calls are what its one thread spends its time on.

use std::{
    collections::{BTreeMap, VecDeque},
    num::NonZeroU32,
    time::Duration,
};

use futures_util::future::join_all;
use lockkit_conformance::stall::Stopwatch;
use lockkit_core::{
    LockName,
    spi::{Backend, Claim, ClaimRequest, Mode, OwnerId, Renewal},
};
use lockkit_redis::{RedisBackend, RedisConfig, RedlockBackend};
use lockkit_testbed::redis::{self, RedisServer};

use crate::{
    common::{LONG, MS, SECOND, no_server, no_valkey, within},
    redlock::world::World,
};

/// The calls of each command.
type Counts = BTreeMap<String, u64>;

/// What one server is asked for, requests and what scripts call together.
#[derive(Debug, PartialEq)]
struct Cost {
    /// To acquire and release a lock that nobody else wants.
    alone: u64,
    /// For a hold of a lock that others wait for as well: to queue up, and to be released to the next. Among two clients, nobody else is
    /// in the queue.
    of_2: u64,
    of_16: u64,
    of_100: u64,
}

/// The requests for a lock: a script, or a release without one.
const REQUESTS: [&str; 3] = ["evalsha", "delifeq", "delex"];

/// The number of steps over which the time of a server is the mean.
const TIMED: u32 = 200;

/// Clients that want one lock.
struct Ring<'a> {
    servers: &'a [RedisServer],
    /// The holder first, and the others in the order of their arrival.
    claims: VecDeque<(Box<dyn Backend>, Box<dyn Claim>)>,
    owners: u128,
}

impl<'a> Ring<'a> {
    async fn new<B: Backend + 'static>(
        servers: &'a [RedisServer],
        size: usize,
        connect: &mut impl AsyncFnMut() -> B,
    ) -> Self {
        let mut ring = Self {
            servers,
            claims: VecDeque::new(),
            owners: 0,
        };
        for _ in 0..size {
            let backend: Box<dyn Backend> = Box::new(connect().await);
            let mut claim = ring.claim(&*backend).await;
            let granted = claim.attempt(LONG).await.unwrap().is_some();
            assert_eq!(granted, ring.claims.is_empty());
            ring.claims.push_back((backend, claim));
        }
        ring
    }

    async fn claim(&mut self, backend: &dyn Backend) -> Box<dyn Claim> {
        self.owners += 1;
        let name = LockName::new("a").unwrap();
        let mut request = ClaimRequest::new(name, Mode::Exclusive, LONG, OwnerId::new(self.owners));
        request.label = Some("billing@host-7".into());
        request.tokens = NonZeroU32::new(33).unwrap();
        request.renews = true;
        backend.claim(&request).await.unwrap()
    }

    /// Has the holder take its place behind the others.
    async fn hand_off(&mut self) {
        let (backend, mut claim) = self.claims.pop_front().unwrap();
        claim.release().await.unwrap();
        let (_, next) = &mut self.claims[0];
        within(LONG, "handed the lock", async {
            loop {
                next.notified().await;
                if next.attempt(LONG).await.unwrap().is_some() {
                    break;
                }
            }
        })
        .await;
        let mut claim = self.claim(&*backend).await;
        assert!(claim.attempt(LONG).await.unwrap().is_none());
        self.claims.push_back((backend, claim));
    }

    /// Has the only one acquire and release the lock.
    async fn take(&mut self) {
        let (backend, _) = self.claims.pop_front().unwrap();
        let mut claim = self.claim(&*backend).await;
        assert!(claim.attempt(Duration::ZERO).await.unwrap().is_some());
        claim.release().await.unwrap();
        self.claims.push_back((backend, claim));
    }

    /// Has the holder renew its hold.
    async fn renew(&mut self) {
        let (_, held) = &mut self.claims[0];
        let renewed = held.renew().await.unwrap();
        assert!(matches!(renewed, Renewal::Held(_)), "{renewed:?}");
    }

    /// Has a client that waits try as well.
    async fn try_in_vain(&mut self) {
        let (backend, waiting) = self.claims.pop_back().unwrap();
        let mut claim = self.claim(&*backend).await;
        assert!(claim.attempt(Duration::ZERO).await.unwrap().is_none());
        self.claims.push_back((backend, waiting));
    }

    /// Returns the least that any server executed in a step, which takes at least so many requests of each. The clients send something
    /// now and then beside, and a busy machine makes that more.
    async fn least(&mut self, stated: u64, requests: u64, mut step: impl AsyncFnMut(&mut Self)) -> u64 {
        const LEAST: usize = 20;
        const MOST: usize = 600;

        let mut least: Vec<Option<Counts>> = vec![None; self.servers.len()];
        for round in 0..MOST {
            let is_least =
                |counts: &Option<Counts>| counts.as_ref().is_some_and(|counts| sum(counts) <= stated);
            if round >= LEAST && least.iter().all(is_least) {
                break;
            }
            let before = self.counts();
            step(self).await;
            let watch = Stopwatch::start();
            let mut spent = self.spent(&before);
            // A majority of the masters is enough for the client. The others are not slower by much.
            while spent.iter().any(|spent| requests_in(spent) < requests) && watch.elapsed() < SECOND {
                tokio::time::sleep(MS).await;
                spent = self.spent(&before);
            }
            for (least, spent) in least.iter_mut().zip(spent) {
                let is_less = least.as_ref().is_none_or(|least| sum(&spent) < sum(least));
                if is_less {
                    *least = Some(spent);
                }
            }
        }
        eprintln!("{least:?}");
        let sums = least.iter().flatten().map(sum);
        sums.max().unwrap()
    }

    /// Returns how long a server works on a step, the mean of all servers. A minority may be late with the last ones.
    async fn time(&mut self, mut step: impl AsyncFnMut(&mut Self)) -> Duration {
        let before = self.worked();
        for _ in 0..TIMED {
            step(self).await;
        }
        let servers = u32::try_from(self.servers.len()).unwrap();
        self.worked().saturating_sub(before) / (TIMED * servers)
    }

    /// Returns how long the servers together have worked on requests for a lock.
    fn worked(&self) -> Duration {
        let times = self.servers.iter().map(|server| server.command_times().unwrap());
        times
            .map(|times| {
                let of_requests = REQUESTS.iter().filter_map(|request| times.get(*request));
                of_requests.sum::<Duration>()
            })
            .sum()
    }

    fn counts(&self) -> Vec<Counts> {
        let counts = self.servers.iter().map(RedisServer::command_counts);
        counts.map(Result::unwrap).collect()
    }

    /// Returns what each server has executed since.
    fn spent(&self, before: &[Counts]) -> Vec<Counts> {
        let spent = |(now, before): (Counts, &Counts)| {
            let spent = now.into_iter().map(|(command, calls)| {
                let before = before.get(&command).copied().unwrap_or_default();
                (command, calls - before)
            });
            spent.filter(|(_, calls)| *calls > 0).collect()
        };
        self.counts().into_iter().zip(before).map(spent).collect()
    }
}

fn sum(counts: &Counts) -> u64 {
    counts.values().sum()
}

/// Returns how many requests for a lock are among these.
fn requests_in(counts: &Counts) -> u64 {
    REQUESTS.iter().filter_map(|request| counts.get(*request)).sum()
}

/// Compares what a lock costs with what is stated. Each hand-off takes so many requests of a server. Prints how long a server works on
/// them, which depends on the machine.
async fn costs<B: Backend + 'static>(
    servers: &[RedisServer],
    requests: u64,
    stated: Cost,
    mut connect: impl AsyncFnMut() -> B,
) {
    let mut alone = Ring::new(servers, 1, &mut connect).await;
    let (_, held) = &mut alone.claims[0];
    held.release().await.unwrap();
    let worked = alone.time(Ring::take).await;
    eprintln!("alone: a server works for {worked:?} on it");
    let alone = alone.least(stated.alone, 2, Ring::take).await;
    let mut found = Vec::new();
    for (size, stated) in [(2, stated.of_2), (16, stated.of_16), (100, stated.of_100)] {
        let mut ring = Ring::new(servers, size, &mut connect).await;
        let worked = ring.time(Ring::hand_off).await;
        eprintln!("of {size}: a server works for {worked:?} on it");
        found.push(ring.least(stated, requests, Ring::hand_off).await);
        let ends = ring.claims.iter_mut().rev().map(|(_, claim)| claim.release());
        join_all(ends).await;
        let closes = ring.claims.iter().map(|(backend, _)| backend.close());
        join_all(closes).await;
    }
    let found = Cost {
        alone,
        of_2: found[0],
        of_16: found[1],
        of_100: found[2],
    };
    assert_eq!(found, stated, "spend less, or say why it has to be more");
}

async fn costs_of_one_master(server: RedisServer, stated: Cost) {
    let url = server.url().to_owned();
    let connect = async || RedisBackend::connect(RedisConfig::new(&url)).await.unwrap();
    costs(&[server], 2, stated, connect).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_a_lock_on_redis() {
    if no_server() {
        return;
    }
    let server = RedisServer::plain().unwrap();
    let stated = Cost {
        alone: 8,
        of_2: 21,
        of_16: 18,
        of_100: 18,
    };
    costs_of_one_master(server, stated).await;
}

/// It releases a short hold by a command of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_a_lock_on_valkey() {
    if no_valkey() {
        return;
    }
    let server = RedisServer::builder().program(redis::valkey()).start().unwrap();
    let stated = Cost {
        alone: 6,
        of_2: 21,
        of_16: 18,
        of_100: 18,
    };
    costs_of_one_master(server, stated).await;
}

/// Holds that last for a while are renewed, and who polls a lock tries in vain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_a_renewal_and_a_try_where_others_wait() {
    if no_server() {
        return;
    }
    let servers = [RedisServer::plain().unwrap()];
    let url = servers[0].url().to_owned();
    let mut connect = async || RedisBackend::connect(RedisConfig::new(&url)).await.unwrap();
    let mut ring = Ring::new(&servers, 3, &mut connect).await;
    let found = [
        ring.least(7, 1, Ring::renew).await,
        ring.least(5, 1, Ring::try_in_vain).await,
    ];
    assert_eq!(found, [7, 5], "spend less, or say why it has to be more");
}

/// At each master: a vote to queue up, one to take what is kept, and the release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_a_lock_on_a_master_of_redlock() {
    if no_server() {
        return;
    }
    let world = World::of(3);
    let stated = Cost {
        alone: 9,
        of_2: 23,
        of_16: 23,
        of_100: 23,
    };
    let connect = async || RedlockBackend::connect(world.config()).await.unwrap();
    costs(&world.masters, 3, stated, connect).await;
}
