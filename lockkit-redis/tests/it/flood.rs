//! A server that sends without end, as fast as it can. Its client has a single thread, which does all else in time.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use lockkit_conformance::stall::Stopwatch;
use lockkit_core::LockGuard;
use lockkit_redis::{RedisConfig, RedlockConfig};
use lockkit_testbed::{Lateness, redis::RedisServer};

use crate::{
    common::{LONG, MS, SECOND, connect, lock, no_server, renewed, shown, until},
    redlock::world::{self, World, config, url},
};

const TTL: Duration = Duration::from_secs(6);
/// For a program that was not optimized. What the flood itself costs the machine comes on top, see [`much`].
const MUCH: Duration = Duration::from_secs(1);

const PUSH: &[u8] = b">2\r\n$1\r\na\r\n$1\r\nb\r\n";
const MESSAGE: &[u8] = b">3\r\n$7\r\nmessage\r\n$1\r\na\r\n$1\r\nb\r\n";
const SUBSCRIBED: &[u8] = b">3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n";
const REPLY: &[u8] = b"+OK\r\n";

/// The moment from which a [`Flooding`] sends nothing but its flood.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Once it is told to.
    Told,
    Login,
    Beginning,
}

/// Passes everything on, up to some moment.
struct Flooding {
    addr: SocketAddr,
    told: Arc<AtomicBool>,
}

impl Flooding {
    fn start(upstream: SocketAddr, from: Moment, flood: &'static [u8]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let told = Arc::new(AtomicBool::new(from == Moment::Beginning));
        let is_told = told.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let is_told = is_told.clone();
                thread::spawn(move || play(client, upstream, &is_told, from, flood));
            }
        });
        Self { addr, told }
    }

    fn begin(&self) {
        self.told.store(true, Ordering::Relaxed);
    }
}

fn play(
    mut client: TcpStream,
    upstream: SocketAddr,
    is_told: &AtomicBool,
    from: Moment,
    flood: &[u8],
) -> io::Result<()> {
    let mut server = TcpStream::connect(upstream)?;
    server.set_read_timeout(Some(10 * MS))?;
    let (mut requests, mut to_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        let copied = io::copy(&mut requests, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Both);
        copied
    });
    let flood = flood.repeat(5_000);
    let mut replies = [0; 4096];
    let mut is_in = false;
    loop {
        if is_told.load(Ordering::Relaxed) || (is_in && from == Moment::Login) {
            return pour(client, &flood);
        }
        match server.read(&mut replies) {
            Ok(0) => return Ok(()),
            Ok(count) => client.write_all(&replies[..count])?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        is_in = true;
    }
}

/// Sends this again and again without a rest. A writer that waits for room leaves the reader nothing to read for a moment.
fn pour(mut client: TcpStream, flood: &[u8]) -> io::Result<()> {
    client.set_nonblocking(true)?;
    let mut at = 0;
    loop {
        match client.write(&flood[at..]) {
            Ok(written) => at = (at + written) % flood.len(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::yield_now(),
            Err(error) => return Err(error),
        }
    }
}

/// Runs this on a thread of its own with a runtime of that thread. The test goes on also if that runtime does not.
fn alone<T: Send + 'static>(what: &str, work: impl AsyncFnOnce() -> T + Send + 'static) -> T {
    let (done, outcome) = mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let _ = done.send(runtime.unwrap().block_on(work()));
    });
    let outcome = outcome.recv_timeout(LONG);
    outcome.unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// Does this, and returns how late the runtime let another task go on meanwhile, at most.
async fn latest(during: impl Future<Output = ()>) -> Duration {
    let mut late = Duration::ZERO;
    tokio::select! {
        () = during => late,
        () = async {
            loop {
                let due = Instant::now() + 20 * MS;
                tokio::time::sleep(20 * MS).await;
                late = late.max(due.elapsed());
            }
        } => unreachable!("it goes on"),
    }
}

/// Returns the most by which a client that no flood holds up is late on this machine.
fn much(beside: &Lateness) -> Duration {
    MUCH + 3 * beside.most()
}

async fn stays_held(guard: &LockGuard, during: Duration) {
    let end = Instant::now() + during;
    while Instant::now() < end {
        assert!(guard.is_held(), "PROMISE BROKEN: the other masters renew it");
        tokio::time::sleep(20 * MS).await;
    }
}

/// Returns the address of one of five masters, as the others see it, and a URL in which it floods.
fn one_of(world: &World, from: Moment, flood: &'static [u8]) -> (Flooding, RedlockConfig) {
    let rogue = Flooding::start(world.masters[2].addr(), from, flood);
    let mut urls: Vec<_> = world
        .masters
        .iter()
        .map(|master| master.url().to_owned())
        .collect();
    urls[2] = format!("redis://{}", rogue.addr);
    let config = config(&url(urls.iter().map(String::as_str)));
    (rogue, config)
}

#[test]
fn a_master_that_floods_costs_no_hold() {
    if no_server() {
        return;
    }
    for flood in [PUSH, REPLY] {
        let world = World::five();
        let (rogue, config) = one_of(&world, Moment::Told, flood);
        let honest = world.config();
        let beside = Lateness::watch();
        let (late, overlaps) = alone("the holder", async move || {
            let client = world::connect(config).await.unwrap();
            let held = lock(&client, "a", TTL).acquire().await.unwrap();
            renewed(&held).await;
            let over = Arc::new(AtomicBool::new(false));
            let competitor = competitor(honest, over.clone());
            rogue.begin();
            let late = latest(stays_held(&held, 2 * TTL)).await;
            renewed(&held).await;
            over.store(true, Ordering::Relaxed);
            until(LONG, "the competitor's end", async || competitor.is_finished()).await;
            held.release().await.unwrap();
            (late, competitor.join().unwrap())
        });
        let allowed = much(&beside);
        assert!(late < allowed, "{late:?}, and allowed are {allowed:?}");
        assert_eq!(overlaps, 0, "PROMISE BROKEN: an overlap");
    }
}

/// Counts how often a client on a thread of its own gets the lock.
fn competitor(config: RedlockConfig, is_over: Arc<AtomicBool>) -> thread::JoinHandle<usize> {
    thread::spawn(move || {
        alone("the competitor", async move || {
            let client = world::connect(config).await.unwrap();
            let lock = lock(&client, "a", TTL);
            let mut granted = 0;
            while !is_over.load(Ordering::Relaxed) {
                // That it cannot tell is no grant.
                granted += usize::from(matches!(lock.try_acquire().await, Ok(Some(_))));
                tokio::time::sleep(20 * MS).await;
            }
            granted
        })
    })
}

#[test]
fn four_of_five_are_enough_to_connect_to() {
    if no_server() {
        return;
    }
    let world = World::five();
    // The deployment is known.
    alone("a first client", {
        let config = world.config();
        async move || drop(world::connect(config).await.unwrap())
    });
    for from in [Moment::Login, Moment::Beginning] {
        for flood in [PUSH, SUBSCRIBED] {
            let (_rogue, config) = one_of(&world, from, flood);
            alone("connected", async move || {
                let client = world::connect(config).await.unwrap();
                let held = lock(&client, "a", TTL).acquire().await.unwrap();
                held.renew().await.unwrap();
                held.release().await.unwrap();
            });
        }
    }
}

#[test]
fn a_server_that_floods_is_left_with_its_reason() {
    if no_server() {
        return;
    }
    for flood in [PUSH, MESSAGE, SUBSCRIBED, REPLY] {
        let server = RedisServer::plain().unwrap();
        let rogue = Flooding::start(server.addr(), Moment::Told, flood);
        alone("left", async move || {
            let client = connect(RedisConfig::new(format!("redis://{}", rogue.addr)))
                .await
                .unwrap();
            let held = lock(&client, "a", TTL).acquire().await.unwrap();
            let lost = held.lost();
            rogue.begin();
            let told = async {
                lost.await;
            };
            let (beside, watch) = (Lateness::watch(), Stopwatch::start());
            let late = latest(told).await;
            let (took, allowed) = (watch.elapsed(), much(&beside));
            assert!(late < allowed, "{late:?}, and allowed are {allowed:?}");
            assert!(
                took < TTL + allowed,
                "told after {took:?}, and allowed are {allowed:?} on top of the lease"
            );
            // What is taken for replies ends no connection.
            if [PUSH, MESSAGE].contains(&flood) {
                until(LONG, "the reason", async || {
                    let error = client.inspect("a").await.unwrap_err();
                    shown(&error).contains("pushes without end")
                })
                .await;
            }
            let other = lock(&client, "b", TTL);
            let (beside, watch) = (Lateness::watch(), Stopwatch::start());
            let error = other.acquire_timeout(SECOND).await.unwrap_err();
            let (took, allowed) = (watch.elapsed(), much(&beside));
            assert!(
                took < SECOND + allowed,
                "{error} after {took:?}, and allowed are {allowed:?} on top of the wait"
            );
        });
    }
}
