//! The faults of the ways to servers.

use std::{io, time::Duration};

use lockkit_conformance::torture::Fault;
use lockkit_testbed::{Mode, Proxy};

use crate::deployment::{Blow, Harm};

/// `ways` is how many there are, `recovery` how long a client may take to connect again.
pub(crate) fn harms<S>(ways: usize, recovery: Duration) -> [Harm<S>; 7] {
    let places = u32::try_from(ways).unwrap_or(u32::MAX);
    let fault = |name| Fault::new(name).places(places).recovery(recovery).of_a_way();
    [
        Harm::new(fault("cut"), |_, blow| set(blow, Mode::Blackhole)).healed(pass),
        Harm::new(fault("reset"), |_, blow| {
            way(blow)?.reset();
            Ok(())
        }),
        Harm::new(fault("lose"), |_, blow| set(blow, Mode::DropReplies)).healed(pass),
        Harm::new(fault("delay"), |_, blow| {
            let late = lasts(blow) / 8;
            let late = late.min(Duration::from_millis(300));
            let (requests, replies) = (late, late);
            set(blow, Mode::Delay { requests, replies })
        })
        .healed(pass),
        // One direction alone stands still.
        Harm::new(fault("requests"), |_, blow| {
            let (requests, replies) = (lasts(blow), Duration::ZERO);
            set(blow, Mode::Delay { requests, replies })
        })
        .healed(pass),
        Harm::new(fault("silence"), |_, blow| set(blow, Mode::HalfOpen)).healed(pass),
        Harm::new(fault("refuse"), |_, blow| {
            set(blow, Mode::Refuse)?;
            way(blow)?.reset();
            Ok(())
        })
        .healed(pass),
    ]
}

fn lasts(blow: Blow<'_>) -> Duration {
    Duration::from_millis(blow.strike.lasts)
}

fn way(blow: Blow<'_>) -> io::Result<&Proxy> {
    let way = blow.ways.get(blow.place());
    way.ok_or_else(|| io::Error::other(format!("there is no way {}", blow.place())))
}

fn set(blow: Blow<'_>, mode: Mode) -> io::Result<()> {
    way(blow)?.set(mode);
    Ok(())
}

fn pass<S>(_: &S, blow: Blow<'_>) -> io::Result<()> {
    set(blow, Mode::Pass)
}
