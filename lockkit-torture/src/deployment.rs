//! Servers behind proxies, with one table of what may befall them.

use std::{
    collections::HashMap,
    fmt, io,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use lockkit::{LockClient, Result};
use lockkit_conformance::torture::{Fault, Strike, Target};
use lockkit_testbed::Proxy;

use crate::wires;

/// A strike, and what it may need to know.
#[derive(Clone, Copy, Debug)]
pub struct Blow<'a> {
    /// The strike: where, and for how long.
    pub strike: &'a Strike,
    /// The names of the locks of the epoch; none when it is healed.
    pub names: &'a [String],
    /// The ways to the servers.
    pub ways: &'a [Proxy],
}

impl Blow<'_> {
    /// Returns the number of the server, or of the way.
    pub fn place(self) -> usize {
        self.strike.place as usize
    }

    /// Resets the connections of all ways.
    pub fn reset_all(self) {
        for way in self.ways {
            way.reset();
        }
    }

    /// By how much a clock is set, which is bearable.
    pub fn step(self) -> Duration {
        Duration::from_millis(self.strike.lasts.min(10_000))
    }
}

type Act<S> = fn(&S, Blow<'_>) -> io::Result<()>;

/// A row of the table: a fault, what is done to the servers `S`, and what undoes it.
#[derive(Debug)]
pub struct Harm<S> {
    pub(crate) fault: Fault,
    strike: Act<S>,
    heal: Act<S>,
}

impl<S> Harm<S> {
    /// One that heals by itself.
    pub fn new(fault: Fault, strike: Act<S>) -> Self {
        let heal: Act<S> = |_, _| Ok(());
        Self { fault, strike, heal }
    }

    /// One that is undone.
    #[must_use]
    pub fn healed(mut self, heal: Act<S>) -> Self {
        self.heal = heal;
        self
    }
}

/// Private servers.
pub trait Servers: fmt::Debug + Send + Sync + Sized + 'static {
    /// The number of groups of clients, each with ways of its own.
    const GROUPS: usize;
    /// Until a client is connected again after a way failed.
    const RECOVERY: Duration;

    /// All addresses that a client is told.
    fn addrs(&self) -> Vec<SocketAddr>;

    /// The URL of a client that reaches them there instead.
    fn url(&self, addrs: &[SocketAddr]) -> String;

    /// Returns the faults that may befall them, besides those of the ways.
    fn harms(&self) -> Vec<Harm<Self>>;

    /// Returns what a fault of a way excuses here.
    fn of_a_way(&self, fault: Fault) -> Fault {
        fault
    }

    /// The server that a strike is at. One suffers one thing at a time.
    fn seat(&self, _: &Strike) -> u32 {
        0
    }

    /// Returns what is left at the servers, as [`Target::left`] does.
    ///
    /// # Errors
    /// If they cannot be asked.
    fn left(&self) -> io::Result<Vec<String>>;

    /// Returns the shortest ttl, as [`Target::min_ttl`] does.
    fn min_ttl(&self) -> Duration {
        Duration::from_millis(500)
    }

    /// Returns the longest ttl, as [`Target::max_ttl`] does.
    fn max_ttl(&self) -> Duration {
        Duration::from_mins(1)
    }

    /// Returns whether lists may lack a hold whose client cannot show it yet, as [`Target::shows_late`] does.
    fn shows_late(&self) -> bool {
        false
    }

    /// Returns the bound for a dead waiter, as [`Target::dead_waiter_bound`] does.
    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        client.dead_holder_bound(ttl)
    }

    /// Returns whether several who adopt one hold at once may split the servers, as [`Target::splits`] does.
    fn splits(&self) -> bool {
        false
    }
}

/// Servers, the ways to them, and what they suffer from.
#[derive(Debug)]
pub struct Deployment<S> {
    /// The servers.
    pub servers: S,
    /// The ways to them: those of one group of clients are next to each other.
    pub ways: Vec<Proxy>,
    suffering: Mutex<HashMap<u32, Strike>>,
}

impl<S: Servers> Deployment<S> {
    /// A deployment of `servers`, with new ways.
    ///
    /// # Errors
    /// If a proxy does not start.
    pub fn of(servers: S) -> io::Result<Self> {
        let addrs = servers.addrs();
        let ways = (0..S::GROUPS).flat_map(|_| &addrs);
        let ways = ways.map(|addr| Proxy::start(*addr)).collect::<io::Result<_>>()?;
        let suffering = Mutex::default();
        Ok(Self {
            servers,
            ways,
            suffering,
        })
    }

    fn harms(&self) -> Vec<Harm<S>> {
        let mut harms: Vec<_> = wires::harms(self.ways.len(), S::RECOVERY).into();
        for harm in &mut harms {
            harm.fault = self.servers.of_a_way(harm.fault);
        }
        harms.extend(self.servers.harms());
        harms
    }

    fn harm(&self, strike: &Strike) -> io::Result<Harm<S>> {
        let is_it = |harm: &Harm<S>| harm.fault.name == strike.fault && strike.place < harm.fault.places;
        self.harms().into_iter().find(is_it).ok_or_else(|| {
            let Strike { fault, place, .. } = strike;
            io::Error::other(format!("there is no fault {fault:?} at place {place} here"))
        })
    }

    fn suffering(&self) -> MutexGuard<'_, HashMap<u32, Strike>> {
        self.suffering.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl<S: Servers> Target for Deployment<S> {
    fn routes(&self) -> Vec<String> {
        let addrs: Vec<_> = self.ways.iter().map(Proxy::addr).collect();
        let groups = addrs.chunks(addrs.len() / S::GROUPS);
        groups.map(|addrs| self.servers.url(addrs)).collect()
    }

    async fn connect(&self, route: &str) -> Result<LockClient> {
        lockkit::connect(route).await
    }

    fn min_ttl(&self) -> Duration {
        self.servers.min_ttl()
    }

    fn max_ttl(&self) -> Duration {
        self.servers.max_ttl()
    }

    fn dead_waiter_bound(&self, client: &LockClient, ttl: Duration) -> Duration {
        self.servers.dead_waiter_bound(client, ttl)
    }

    fn splits(&self) -> bool {
        self.servers.splits()
    }

    fn shows_late(&self) -> bool {
        self.servers.shows_late()
    }

    fn faults(&self) -> Vec<Fault> {
        self.harms().into_iter().map(|harm| harm.fault).collect()
    }

    fn strike(&self, strike: &Strike, names: &[String]) -> io::Result<()> {
        let harm = self.harm(strike)?;
        let ways = &self.ways;
        let blow = Blow { strike, names, ways };
        if harm.fault.way {
            return (harm.strike)(&self.servers, blow);
        }
        let mut suffering = self.suffering();
        let seat = self.servers.seat(strike);
        if suffering.contains_key(&seat) {
            return Ok(());
        }
        suffering.insert(seat, strike.clone());
        (harm.strike)(&self.servers, blow)
    }

    fn heal(&self, strike: &Strike) -> io::Result<()> {
        let harm = self.harm(strike)?;
        let (names, ways) = (&[][..], &self.ways[..]);
        let blow = Blow { strike, names, ways };
        if harm.fault.way {
            return (harm.heal)(&self.servers, blow);
        }
        let mut suffering = self.suffering();
        let seat = self.servers.seat(strike);
        // Another one's end is its own.
        if suffering.get(&seat) != Some(strike) {
            return Ok(());
        }
        suffering.remove(&seat);
        (harm.heal)(&self.servers, blow)
    }

    fn left(&self) -> io::Result<Vec<String>> {
        self.servers.left()
    }
}
