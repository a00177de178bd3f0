//! Kinds of schedules: their faults, and the algorithm's promises under these.

use crate::history::Faults;

/// The behaviour of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Delivers in order on each connection, late at times. A connection may break and lose what is under way.
    Connections,
    /// Delivers each message on its own: late, never, twice, or out of order.
    Datagrams,
}

/// The effect of a crash on a master's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// Kept, up to the last reply.
    Kept,
    /// Lost.
    Lost,
    /// Set back to an earlier moment.
    Restored,
    /// Lost, but only at masters without which a majority still has what the present holder has confirmed.
    Spared,
}

/// Masters at which keys vanish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vanishing {
    /// Those without which a majority still has the key for as long as the lease lasts.
    Spare,
    /// Always the same minority, even if a hold needs it.
    Minority,
    /// All.
    Anywhere,
}

/// Clients' wall clocks, from which tokens are proposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WallClocks {
    /// Within 50 ms of each other.
    Close,
    /// Years apart, and set forward and back at any time.
    Wild,
}

/// The ingredients of a schedule.
#[expect(clippy::struct_excessive_bools, reason = "each is there or not, on its own")]
#[derive(Clone, Copy, Debug)]
pub struct Features {
    /// The number of masters.
    pub masters: usize,
    /// The behaviour of the network.
    pub network: Network,
    /// Messages in a thousand that are very late.
    pub late: u32,
    /// Clients and masters stop for a while, connections break.
    pub stops: bool,
    /// Wall clocks of masters, which the time to live goes by, are set by up to 3 s.
    pub jumps: bool,
    /// Keys vanish ahead of time.
    pub vanishing: Option<Vanishing>,
    /// Masters crash.
    pub crash: Option<Crash>,
    /// Masters are emptied while they run, most of all in quarantine.
    pub flushes: bool,
    /// Counters are set beyond every clock, always at the same minority of masters.
    pub counters: bool,
    /// A master that may have lost data has no vote for a ttl.
    pub quarantine: bool,
    /// Clients' wall clocks.
    pub walls: WallClocks,
    /// Holds are renewed, and masters that lack them repaired.
    pub renewal: bool,
    /// Readers and writers.
    pub shared: bool,
    /// Tokens per grant, for hand-offs within a process.
    pub block: u64,
    /// Acquisitions are abandoned on their way.
    pub cancels: bool,
    /// All masters' clocks are fast by 0.3 %, all clients' slow, delays are short, and retries come when a lease ends.
    pub tight: bool,
    /// Clients' clocks tick every 4 ms, and agree unless they are wild, so that clients propose the same tokens.
    pub coarse: bool,
    /// Leases so short that a message may outlive them.
    pub short: bool,
}

impl Features {
    /// Returns the µs between two ticks of a client's clock.
    pub(crate) fn tick(&self) -> u64 {
        if self.coarse { 4_000 } else { 1 }
    }
}

/// A promise about one kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// It never happens.
    Never,
    /// It may happen, and the simulator has to find it.
    Happens,
    /// It may happen.
    None,
}

/// The promises about each kind of fault.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// The promise about [`Faults::overlaps`].
    pub overlaps: Promise,
    /// The promise about [`Faults::duplicates`].
    pub duplicates: Promise,
    /// The promise about [`Faults::disorder`].
    pub disorder: Promise,
    /// The promise about [`Faults::reversals`].
    pub reversals: Promise,
    /// The promise about [`Faults::interleaved`].
    pub interleaved: Promise,
    /// The promise about [`Faults::revived`].
    pub revived: Promise,
}

impl Expected {
    const NOTHING_WRONG: Self = Self {
        overlaps: Promise::Never,
        duplicates: Promise::Never,
        disorder: Promise::Never,
        reversals: Promise::Never,
        interleaved: Promise::Never,
        revived: Promise::Never,
    };
    const EXCLUSION: Self = Self {
        duplicates: Promise::None,
        disorder: Promise::None,
        reversals: Promise::None,
        interleaved: Promise::None,
        ..Self::NOTHING_WRONG
    };
    const TOKENS: Self = Self {
        overlaps: Promise::Happens,
        disorder: Promise::None,
        revived: Promise::None,
        ..Self::NOTHING_WRONG
    };
    const NOTHING: Self = Self {
        overlaps: Promise::Happens,
        revived: Promise::None,
        ..Self::EXCLUSION
    };
    const WRONG_TOKENS: Self = Self {
        duplicates: Promise::Happens,
        disorder: Promise::Happens,
        reversals: Promise::Happens,
        interleaved: Promise::None,
        ..Self::NOTHING_WRONG
    };

    /// Returns each kind of fault, with its name, promise and count.
    pub fn columns(self, faults: &Faults) -> [(&'static str, Promise, u32); 7] {
        [
            ("overlapping holds", self.overlaps, faults.overlaps),
            ("duplicate tokens", self.duplicates, faults.duplicates),
            ("tokens out of order", self.disorder, faults.disorder),
            ("tokens reversed", self.reversals, faults.reversals),
            ("interleaved writes", self.interleaved, faults.interleaved),
            ("revived holds", self.revived, faults.revived),
            ("starved clients", Promise::Never, faults.starved),
        ]
    }
}

/// A kind of schedule.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Its name.
    pub name: &'static str,
    /// Its description, for the table.
    pub about: &'static str,
    /// Its ingredients. Each schedule of a swarm draws from them.
    pub features: Features,
    /// Each schedule draws some of the features from its seed.
    pub swarm: bool,
    /// Uses [naive tokens](crate::Mutant::NaiveTokens).
    pub naive_tokens: bool,
    /// The algorithm's promises.
    pub expected: Expected,
}

const BASE: Features = Features {
    masters: 5,
    network: Network::Datagrams,
    late: 30,
    stops: true,
    jumps: false,
    vanishing: None,
    crash: None,
    flushes: false,
    counters: false,
    quarantine: true,
    walls: WallClocks::Close,
    renewal: false,
    shared: false,
    block: 1,
    cancels: false,
    tight: false,
    coarse: false,
    short: false,
};

/// All features that lose no data.
const ALL_OF_IT: Features = Features {
    crash: Some(Crash::Kept),
    renewal: true,
    shared: true,
    block: 8,
    cancels: true,
    short: true,
    counters: true,
    walls: WallClocks::Wild,
    ..BASE
};

const PLAIN: Config = Config {
    name: "base",
    about: "delays, losses, duplicates, overtaking, pauses, drift of 0.3 %",
    features: BASE,
    swarm: false,
    naive_tokens: false,
    expected: Expected::NOTHING_WRONG,
};

impl Config {
    /// All configurations, in the order of the table.
    pub const ALL: &[Self] = &[
        PLAIN,
        Self {
            name: "connections",
            about: "the same, in order on connections that break",
            features: Features {
                network: Network::Connections,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "naive",
            about: "base, with `max(INCR)` for a token",
            naive_tokens: true,
            expected: Expected::WRONG_TOKENS,
            ..PLAIN
        },
        Self {
            name: "renewal",
            about: "renewals and repair",
            features: Features {
                renewal: true,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "shared",
            about: "readers and writers, renewals",
            features: Features {
                shared: true,
                renewal: true,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "coarse",
            about: "the same, clients' clocks tick every 4 ms and agree",
            features: Features {
                shared: true,
                renewal: true,
                coarse: true,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "blocks",
            about: "hand-offs within a process, from blocks of 8 tokens; acquisitions cancelled",
            features: Features {
                block: 8,
                cancels: true,
                renewal: true,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "wild-clocks",
            about: "clients' wall clocks years apart, and set at any time",
            features: Features {
                walls: WallClocks::Wild,
                renewal: true,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "counters",
            about: "the same, readers and writers, and counters set to where no clock gets at two of the five",
            features: Features {
                walls: WallClocks::Wild,
                shared: true,
                renewal: true,
                counters: true,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "drift",
            about: "masters fast by 0.3 %, clients slow, and whoever waits comes when a lease ends",
            features: Features {
                tight: true,
                stops: false,
                late: 0,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "late",
            about: "leases so short that messages outlive them",
            features: Features {
                short: true,
                late: 150,
                walls: WallClocks::Wild,
                cancels: true,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "vanishing",
            about: "keys that vanish where the hold has them to spare, with renewals and repair",
            features: Features {
                vanishing: Some(Vanishing::Spare),
                renewal: true,
                network: Network::Connections,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "minority",
            about: "keys that vanish at two of the five, spare or not, with renewals and repair, nothing late",
            features: Features {
                vanishing: Some(Vanishing::Minority),
                renewal: true,
                network: Network::Connections,
                late: 0,
                stops: false,
                ..BASE
            },
            expected: Expected {
                revived: Promise::Never,
                ..Expected::TOKENS
            },
            ..PLAIN
        },
        Self {
            name: "minority-late",
            about: "the same, and messages late, masters and clients that stop",
            features: Features {
                vanishing: Some(Vanishing::Minority),
                renewal: true,
                network: Network::Connections,
                ..BASE
            },
            expected: Expected::TOKENS,
            ..PLAIN
        },
        Self {
            name: "deleted",
            about: "keys deleted at any master, with renewals and repair, nothing late",
            features: Features {
                vanishing: Some(Vanishing::Anywhere),
                renewal: true,
                network: Network::Connections,
                late: 0,
                stops: false,
                ..BASE
            },
            expected: Expected {
                revived: Promise::Never,
                ..Expected::TOKENS
            },
            ..PLAIN
        },
        Self {
            name: "jumps",
            about: "masters' clocks set by up to 3 s",
            features: Features { jumps: true, ..BASE },
            expected: Expected::TOKENS,
            ..PLAIN
        },
        Self {
            name: "jumps-wild",
            about: "the same, clients' wall clocks years apart, renewals",
            features: Features {
                jumps: true,
                walls: WallClocks::Wild,
                renewal: true,
                ..BASE
            },
            expected: Expected::TOKENS,
            ..PLAIN
        },
        Self {
            name: "kept",
            about: "crashes that keep the data, no restart quarantine",
            features: Features {
                crash: Some(Crash::Kept),
                quarantine: false,
                renewal: true,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "kept-quarantine",
            about: "crashes that keep the data, restart quarantine",
            features: Features {
                crash: Some(Crash::Kept),
                network: Network::Connections,
                renewal: true,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "lost",
            about: "crashes that lose the data, no restart quarantine",
            features: Features {
                crash: Some(Crash::Lost),
                quarantine: false,
                ..BASE
            },
            expected: Expected::NOTHING,
            ..PLAIN
        },
        Self {
            name: "lost-quarantine",
            about: "crashes that lose the data, restart quarantine",
            features: Features {
                crash: Some(Crash::Lost),
                renewal: true,
                ..BASE
            },
            expected: Expected::EXCLUSION,
            ..PLAIN
        },
        Self {
            name: "lost-quarantine-late",
            about: "the same, leases so short that messages outlive them",
            features: Features {
                crash: Some(Crash::Lost),
                renewal: true,
                short: true,
                late: 150,
                ..BASE
            },
            expected: Expected::EXCLUSION,
            ..PLAIN
        },
        Self {
            name: "lost-quarantine-wild",
            about: "the same, clients' wall clocks years apart",
            features: Features {
                crash: Some(Crash::Lost),
                renewal: true,
                walls: WallClocks::Wild,
                ..BASE
            },
            expected: Expected {
                disorder: Promise::Happens,
                ..Expected::EXCLUSION
            },
            ..PLAIN
        },
        Self {
            name: "flushed",
            about: "three masters; crashes that keep the data, and masters emptied while they run, also in quarantine; \
                    restart quarantine",
            features: Features {
                crash: Some(Crash::Kept),
                flushes: true,
                renewal: true,
                masters: 3,
                stops: false,
                ..BASE
            },
            expected: Expected::EXCLUSION,
            ..PLAIN
        },
        Self {
            name: "spared",
            about: "three masters; crashes that lose the data of one after renewal and repair, wall clocks years apart",
            features: Features {
                crash: Some(Crash::Spared),
                renewal: true,
                walls: WallClocks::Wild,
                masters: 3,
                late: 100,
                stops: false,
                ..BASE
            },
            ..PLAIN
        },
        Self {
            name: "restored",
            about: "crashes that bring old data back, no restart quarantine",
            features: Features {
                crash: Some(Crash::Restored),
                quarantine: false,
                ..BASE
            },
            expected: Expected::NOTHING,
            ..PLAIN
        },
        Self {
            name: "restored-quarantine",
            about: "crashes that bring old data back, restart quarantine",
            features: Features {
                crash: Some(Crash::Restored),
                renewal: true,
                ..BASE
            },
            expected: Expected::EXCLUSION,
            ..PLAIN
        },
        Self {
            name: "swarm",
            about: "each schedule with some of all that which loses nothing",
            features: ALL_OF_IT,
            swarm: true,
            ..PLAIN
        },
        Self {
            name: "swarm-lost",
            about: "each schedule with some of all that, and crashes and flushes that lose data, restart quarantine",
            features: Features {
                crash: Some(Crash::Lost),
                flushes: true,
                ..ALL_OF_IT
            },
            swarm: true,
            expected: Expected::EXCLUSION,
            ..PLAIN
        },
    ];

    /// Returns the configuration of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|config| config.name == name)
    }
}
