//! The stand-in for `meters` without the feature `metrics`: it has no size and no cost, and reads no clock.

use tokio::time::Instant;

use crate::driver::observe::{End, Outcome};

#[derive(Clone, Debug)]
pub(crate) struct Meters;

impl Meters {
    pub(crate) const ARE_ON: bool = false;

    pub(crate) fn new(_: &'static str) -> Self {
        Self
    }

    #[expect(clippy::unused_self, reason = "the feature's stand-in")]
    pub(crate) fn request<F>(&self, _: &'static str, exchange: F) -> F {
        exchange
    }
}

/// Declares methods that do nothing.
macro_rules! nothing {
    ($($name:ident($($argument:ty),*);)+) => {
        impl Meters {
            $(pub(crate) fn $name(&self, $(_: $argument),*) {})+
        }
    };
}

nothing! {
    begin_waiting();
    end_waiting(Outcome, Mark);
    begin_hold();
    held(End, Mark);
    end_hold();
    renewed(Mark);
    renewal_failed();
    release_failed();
    lost(End);
}

/// No moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark;

impl Mark {
    pub(crate) fn now() -> Self {
        Self
    }

    pub(crate) fn at(_: Instant) -> Self {
        Self
    }
}

// Each client, acquisition and hold has them.
const _: () = assert!(
    size_of::<Meters>() + size_of::<Mark>() == 0,
    "metrics cost nothing without the feature"
);
