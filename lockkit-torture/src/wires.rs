//! The ways to servers, and what befalls them.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockkit_conformance::torture::{Fault, Strike};
use lockkit_testbed::{Mode, Proxy};

/// Ways through proxies. A client that takes one shares it with some others.
#[derive(Debug)]
pub(crate) struct Wires(pub(crate) Vec<Proxy>);

impl Wires {
    /// So many ways to each of the servers. Those of one client group are next to each other.
    pub(crate) fn to(servers: &[SocketAddr], groups: usize) -> io::Result<Self> {
        let proxies = (0..groups)
            .flat_map(|_| servers)
            .map(|server| Proxy::start(*server));
        Ok(Self(proxies.collect::<io::Result<_>>()?))
    }

    /// What may befall them. `recovery` is how long a client may take to connect again.
    pub(crate) fn faults(&self, recovery: Duration) -> [Fault; 7] {
        let places = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        ["cut", "reset", "lose", "delay", "requests", "silence", "refuse"]
            .map(|name| Fault::new(name).places(places).recovery(recovery).of_a_way())
    }

    /// Whether it was one of theirs.
    pub(crate) fn strike(&self, strike: &Strike) -> bool {
        let Some(proxy) = self.0.get(strike.place as usize) else {
            return false;
        };
        let lasts = Duration::from_millis(strike.lasts);
        let zero = Duration::ZERO;
        match strike.fault.as_str() {
            "reset" => proxy.reset(),
            "cut" => proxy.set(Mode::Blackhole),
            "lose" => proxy.set(Mode::DropReplies),
            "delay" => {
                let late = (lasts / 8).min(Duration::from_millis(300));
                let (requests, replies) = (late, late);
                proxy.set(Mode::Delay { requests, replies });
            }
            // One direction alone stands still.
            "requests" => {
                let (requests, replies) = (lasts, zero);
                proxy.set(Mode::Delay { requests, replies });
            }
            "silence" => proxy.set(Mode::HalfOpen),
            "refuse" => {
                proxy.set(Mode::Refuse);
                proxy.reset();
            }
            _ => return false,
        }
        true
    }

    pub(crate) fn heal(&self, strike: &Strike) -> bool {
        let ours = ["cut", "reset", "lose", "delay", "requests", "silence", "refuse"];
        let proxy = self
            .0
            .get(strike.place as usize)
            .filter(|_| ours.contains(&strike.fault.as_str()));
        let Some(proxy) = proxy else { return false };
        if strike.fault != "reset" {
            proxy.set(Mode::Pass);
        }
        true
    }
}

/// What has befallen servers: each suffers one thing at a time, and a second one meanwhile is none.
#[derive(Debug, Default)]
pub(crate) struct Suffering(Mutex<HashMap<u32, Strike>>);

impl Suffering {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Strike>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does `act` to the server of that place, unless it suffers already.
    pub(crate) fn begin(
        &self,
        place: u32,
        strike: &Strike,
        act: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let mut suffering = self.lock();
        if suffering.contains_key(&place) {
            return Ok(());
        }
        suffering.insert(place, strike.clone());
        act()
    }

    /// Does `act`, if `strike` is what the server of that place suffers from.
    pub(crate) fn end(
        &self,
        place: u32,
        strike: &Strike,
        act: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let mut suffering = self.lock();
        if suffering.get(&place) != Some(strike) {
            return Ok(());
        }
        suffering.remove(&place);
        act()
    }
}

/// A strike that no target of that kind knows.
pub(crate) fn unknown(strike: &Strike) -> io::Error {
    io::Error::other(format!(
        "there is no fault {:?} at place {} here",
        strike.fault, strike.place
    ))
}
