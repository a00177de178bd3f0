//! The faults that came to a deployment later. They are drawn from a stream of their own, so that the rest of a seed stays what it was,
//! and all of a seed without them.

use fastrand::Rng;

use super::{Shape, Strike, choice};
use crate::torture::Fault;

/// The difference of that stream's seed from the schedule's.
const STREAM: u64 = 0x7374_6f72_6d73_5f21;

impl Shape {
    /// The shape without what came when seeds had been recorded: the faults that came [`later`](Fault::later), and clients that disagree
    /// about the size of a semaphore. With those faults, if there are no others.
    #[must_use]
    pub fn without_later(&self) -> Self {
        let mut shape = self.clone();
        shape.sizes = false;
        if shape.faults.iter().any(|fault| !fault.later) {
            shape.faults.retain(|fault| !fault.later);
        }
        shape
    }
}

impl Strike {
    /// Has some of the strikes of a schedule be by those of `faults` that came [`later`](Fault::later), if `seed` says so, at the same
    /// times. A fault of a way stays where something else befalls a server, since it is there to meet that.
    pub fn turn_later(strikes: &mut [Self], seed: u64, faults: &[Fault]) {
        let known = |strike: &Self| faults.iter().find(|fault| fault.name == strike.fault);
        let rng = &mut Rng::with_seed(seed ^ STREAM);
        let befalls_a_server = |strike: &Self| known(strike).is_some_and(|fault| !fault.way);
        let ways_stay = strikes.iter().any(befalls_a_server);
        let mut names: Vec<_> = strikes.iter().filter_map(known).collect();
        names.retain(|fault| !(fault.later || fault.way && ways_stay));
        names.sort_unstable_by_key(|fault| fault.name);
        names.dedup_by_key(|fault| fault.name);
        if names.is_empty() || rng.bool() {
            return;
        }
        let turned = choice(rng, &names);
        let both = rng.bool();
        for before in names {
            if before.name != turned.name && !both {
                continue;
            }
            let later = faults
                .iter()
                .filter(|fault| fault.later && fault.lasting == before.lasting);
            let later: Vec<_> = later
                .flat_map(|fault| std::iter::repeat_n(fault, fault.weight as usize))
                .collect();
            if later.is_empty() {
                continue;
            }
            let fault = choice(rng, &later);
            for strike in strikes.iter_mut().filter(|strike| strike.fault == before.name) {
                fault.name.clone_into(&mut strike.fault);
                strike.place = rng.u32(0..fault.places.max(1));
            }
        }
    }
}
