//! Masters, clients and the network between them, on one virtual clock. Everything follows from one seed.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use fastrand::Rng;
use lockkit_redis::redlock_quorum::{Defeat, LAST_CLOCK, Rules};

use crate::{
    client::{Alarm, Client, Effect, Habits, Now},
    config::{Config, Crash, Features, Network, Vanishing, WallClocks},
    history::{Faults, Hold, Resource, judge},
    master::{Answer, Claim, Data, Master, Micros, Mode, Request},
    mutant::Mutant,
};

/// The outcome of a schedule.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Faults found.
    pub faults: Faults,
    /// Events counted.
    pub tally: Tally,
}

/// Declares [`Tally`], all fields of which are added up.
macro_rules! tally {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// Counts of events.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[expect(missing_docs, reason = "they say what they are")]
        pub struct Tally {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Tally {
            /// Adds the counts of another schedule.
            pub fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)*
            }
        }
    };
}

tally! {
    events,
    acquired,
    /// Acquired in one round trip.
    at_once,
    taken,
    outrun,
    undecided,
    too_late,
    out_of_tokens,
    renewed,
    /// Holds that expired or were lost before their release.
    cut_short,
    /// Writes that the resource refused.
    refused,
    /// Stops, jumps, crashes and the like.
    strikes,
    /// Strikes while somebody held the lock, or tried to.
    hits,
}

/// Runs one schedule.
pub fn run(config: &Config, mutant: Option<Mutant>, seed: u64) -> Report {
    World::new(config, mutant, seed, None).run().0
}

/// Runs one schedule, and returns its trace.
pub fn trace(config: &Config, mutant: Option<Mutant>, seed: u64) -> (Report, String) {
    World::new(config, mutant, seed, Some(String::new())).run()
}

/// Writes a line of the trace, if there is one.
macro_rules! say {
    ($world:expr, $($what:tt)*) => {
        if $world.trace.is_some() {
            let line = format!($($what)*);
            $world.line(&line);
        }
    };
}

const MILLI: Micros = 1000;
const SECOND: Micros = 1000 * MILLI;
/// The end of the faults.
const QUIET: Micros = 5 * SECOND;
/// The time by which every client has to be served.
const END: Micros = QUIET + 60 * SECOND;

struct World {
    features: Features,
    rng: Rng,
    now: Micros,
    sequence: u64,
    /// The events to come, by time and then in the order in which they were pushed.
    queue: BTreeMap<(Micros, u64), Event>,
    masters: Vec<Server>,
    clients: Vec<Process>,
    holds: Vec<Hold>,
    resource: Resource,
    tally: Tally,
    trace: Option<String>,
    effects: Vec<Effect>,
}

/// A master and its machine.
struct Server {
    master: Master,
    clock: Clock,
    /// The wall clock, less the time that the clock's rate gives.
    offset: i64,
    up: bool,
    stopped_until: Micros,
    /// The data at an earlier moment.
    backup: Data,
    /// Per client, the connection below which requests are no longer heard.
    oldest: Vec<u32>,
    /// Per client, the arrival of its last request, and that of the last reply to it.
    order: Vec<(Micros, Micros)>,
}

/// A client and its machine.
struct Process {
    client: Client,
    clock: Clock,
    /// Its wall clock when everything began.
    wall: u64,
    stopped_until: Micros,
    /// The index of its present hold.
    hold: Option<usize>,
    claim: Option<Claim>,
}

#[derive(Clone, Copy, Debug)]
struct Clock {
    rate: f64,
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a minute in microseconds"
)]
impl Clock {
    fn at(self, time: Micros) -> Micros {
        (time as f64 * self.rate) as Micros
    }

    /// Returns the moment at which the clock shows this.
    fn when(self, shown: Micros) -> Micros {
        (shown as f64 / self.rate).ceil() as Micros
    }
}

/// A connection of a client to a master.
#[derive(Clone, Copy, Debug)]
struct Route {
    client: usize,
    master: usize,
    connection: u32,
}

#[derive(Clone, Debug)]
enum Event {
    /// A request, of this operation, arrives at a master.
    Request(Route, u32, Request),
    /// The reply to this operation arrives at a client.
    Answer(Route, u32, Answer),
    /// A client asks for a new connection.
    Connect(Route),
    Connected {
        route: Route,
        life: u32,
        marked: bool,
    },
    Broken(Route),
    Alarm {
        client: usize,
        alarm: Alarm,
    },
    /// The user of a hold writes.
    Write {
        client: usize,
        hold: usize,
    },
    /// The write arrives at the resource.
    Written {
        hold: usize,
    },
    Restart {
        master: usize,
    },
    Strike,
}

impl Event {
    /// Returns the client or the master that has to be running for this event.
    fn actor(&self) -> Actor {
        match *self {
            Self::Answer(route, ..) | Self::Connected { route, .. } | Self::Broken(route) => {
                Actor::Client(route.client)
            }
            Self::Alarm { client, .. } | Self::Write { client, .. } => Actor::Client(client),
            Self::Request(route, ..) | Self::Connect(route) => Actor::Master(route.master),
            Self::Written { .. } | Self::Restart { .. } | Self::Strike => Actor::Nobody,
        }
    }
}

enum Actor {
    Client(usize),
    Master(usize),
    Nobody,
}

/// Draws some of a swarm's features.
fn drawn(features: Features, rng: &mut Rng) -> Features {
    Features {
        masters: [3, 5, 5, 7][rng.usize(..4)],
        network: if rng.bool() {
            Network::Connections
        } else {
            Network::Datagrams
        },
        late: [0, 30, 150][rng.usize(..3)],
        stops: features.stops && rng.bool(),
        jumps: features.jumps && rng.bool(),
        vanishing: features.vanishing.filter(|_| rng.bool()),
        crash: features.crash.filter(|_| rng.bool()),
        flushes: features.flushes && rng.bool(),
        counters: features.counters && rng.bool(),
        quarantine: features.quarantine && (features.crash != Some(Crash::Kept) || rng.bool()),
        walls: if rng.bool() {
            features.walls
        } else {
            WallClocks::Close
        },
        renewal: features.renewal && rng.bool(),
        shared: features.shared && rng.bool(),
        block: if rng.bool() { features.block } else { 1 },
        cancels: features.cancels && rng.bool(),
        tight: features.tight && rng.bool(),
        coarse: features.coarse && rng.bool(),
        short: features.short && rng.u8(..4) == 0,
    }
}

impl World {
    fn new(config: &Config, mutant: Option<Mutant>, seed: u64, trace: Option<String>) -> Self {
        let mut rng = Rng::with_seed(seed);
        let features = if config.swarm {
            drawn(config.features, &mut rng)
        } else {
            config.features
        };
        let mutant = mutant.or(config.naive_tokens.then_some(Mutant::NaiveTokens));
        let ttl = Duration::from_millis(if features.short { 160 } else { 1000 });
        let mut rules = Rules::of(features.masters, Duration::from_millis(100));
        match mutant {
            Some(Mutant::TwoOfFive) => rules.quorum = features.masters / 2,
            Some(Mutant::NoDriftAllowance) => rules.drift = (0, Duration::ZERO),
            _ => {}
        }
        let clients = 2 + rng.usize(..3);
        // Longer than any message takes, so that a hold that was given away does not come back unnoticed.
        let shortest = match features.vanishing {
            Some(Vanishing::Anywhere | Vanishing::Minority) => Duration::from_millis(20),
            _ => Duration::ZERO,
        };
        let habits = Habits {
            ttl,
            quarantine: ttl,
            renews: features.renewal,
            shares: features.shared,
            cancels: features.cancels,
            hurries: features.tight,
            block: features.block,
            goal: if features.block > 1 { 6 } else { 3 },
            hold: shortest..if features.short { ttl } else { ttl / 3 },
            overstays: if features.tight { 0.8 } else { 0.2 },
        };
        let mut clock = |fast: bool| Clock {
            rate: match (features.tight, fast) {
                (true, true) => 1.003,
                (true, false) => 0.997,
                _ => 0.997 + 0.006 * rng.f64(),
            },
        };
        let mut world = Self {
            masters: (0..features.masters)
                .map(|_| Server {
                    master: Master {
                        life: 1,
                        quarantines: features.quarantine,
                        mutant,
                        ..Master::default()
                    },
                    clock: clock(true),
                    offset: 0,
                    up: true,
                    stopped_until: 0,
                    backup: Data::default(),
                    oldest: vec![0; clients],
                    order: vec![(0, 0); clients],
                })
                .collect(),
            clients: (0..clients)
                .map(|number| Process {
                    client: Client::new(
                        u32::try_from(number + 1).unwrap_or(u32::MAX),
                        rules,
                        habits.clone(),
                        mutant,
                        Rng::with_seed(seed ^ (number as u64 + 1) << 48),
                    ),
                    clock: clock(false),
                    wall: 0,
                    stopped_until: 0,
                    hold: None,
                    claim: None,
                })
                .collect(),
            features,
            rng,
            now: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            holds: Vec::with_capacity(32),
            resource: Resource::default(),
            tally: Tally::default(),
            trace,
            effects: Vec::new(),
        };
        world.set_clocks();
        world
    }

    fn set_clocks(&mut self) {
        for server in &mut self.masters {
            server.offset = self.rng.i64(0..10_000_000) + 10_000_000;
            server.master.mark();
            server.backup = server.master.data.clone();
        }
        for process in &mut self.clients {
            let range = match self.features.walls {
                WallClocks::Close if self.features.coarse => 1,
                WallClocks::Close => 50 * MILLI,
                WallClocks::Wild => 1_200_000_000 * SECOND,
            };
            process.wall = 1_100_000_000 * SECOND + self.rng.u64(..range);
        }
    }

    fn run(mut self) -> (Report, String) {
        for client in 0..self.clients.len() {
            self.with_client(client, Client::begin);
        }
        let first = self.rng.u64(..300 * MILLI);
        self.push(first, Event::Strike);
        while let Some(((at, _), event)) = self.queue.pop_first() {
            if at > END || self.clients.iter().all(|process| process.client.is_finished()) {
                break;
            }
            self.now = at;
            let running_from = match event.actor() {
                Actor::Client(client) => self.clients[client].stopped_until,
                Actor::Master(master) => self.masters[master].stopped_until,
                Actor::Nobody => 0,
            };
            if running_from > at {
                self.push(running_from, event);
                continue;
            }
            self.tally.events += 1;
            self.happen(event);
        }
        let unserved = self
            .clients
            .iter()
            .filter(|process| !process.client.is_finished());
        let mut faults = Faults {
            interleaved: self.resource.interleaved,
            starved: u32::try_from(unserved.count()).unwrap_or(u32::MAX),
            ..Faults::default()
        };
        for hold in &mut self.holds {
            hold.until = hold.until.max(hold.from);
        }
        judge(&self.holds, &mut faults);
        self.tally.acquired = self.holds.len() as u64;
        self.tally.refused = u64::from(self.resource.refused);
        let report = Report {
            faults,
            tally: self.tally,
        };
        (report, self.trace.unwrap_or_default())
    }

    fn push(&mut self, at: Micros, event: Event) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), event);
    }

    #[cold]
    fn line(&mut self, line: &str) {
        let (millis, micros) = (self.now / MILLI, self.now % MILLI);
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{millis:>6}.{micros:03} ms  {line}");
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Request(route, operation, request) => self.requested(route, operation, &request),
            Event::Answer(route, operation, answer) => {
                let Route { client, master, .. } = route;
                // Datagrams belong to no connection.
                if self.features.network == Network::Datagrams || self.is_current(route) {
                    say!(
                        self,
                        "client {client} hears from {master}: {answer:?} (to operation {operation})"
                    );
                    self.with_client(client, |it, now, out| {
                        it.answered(now, master, operation, answer, out);
                    });
                }
            }
            Event::Connect(route) => self.connecting(route),
            Event::Connected { route, life, marked } => self.with_client(route.client, |it, now, out| {
                it.connected(now, route.master, route.connection, life, marked, out);
            }),
            Event::Broken(route) if self.is_current(route) => {
                self.with_client(route.client, |it, now, out| it.broken(now, route.master, out));
            }
            Event::Broken(_) => {}
            Event::Alarm { client, alarm } => {
                self.with_client(client, |it, now, out| it.alarm(now, alarm, out));
            }
            Event::Write { client, hold } => {
                say!(
                    self,
                    "client {client} writes with token {}",
                    self.holds[hold].token
                );
                let at = self.now + self.delay();
                self.push(at, Event::Written { hold });
            }
            Event::Written { hold } => {
                let token = self.holds[hold].token;
                let refused = self.resource.refused;
                self.resource.write(hold, token);
                if self.resource.refused > refused {
                    say!(self, "the resource refuses token {token}");
                } else {
                    say!(self, "the resource takes token {token}");
                }
            }
            Event::Restart { master } => {
                say!(self, "master {master} is back");
                self.masters[master].up = true;
            }
            Event::Strike => self.strike(),
        }
    }

    fn route(&self, client: usize, master: usize) -> Route {
        let connection = self.clients[client].client.connection(master);
        Route {
            client,
            master,
            connection,
        }
    }

    fn is_current(&self, route: Route) -> bool {
        self.clients[route.client].client.connection(route.master) == route.connection
    }

    fn requested(&mut self, route: Route, operation: u32, request: &Request) {
        let Route { client, master, .. } = route;
        let connections = self.features.network == Network::Connections;
        let server = &mut self.masters[master];
        if !server.up || connections && route.connection < server.oldest[client] {
            return;
        }
        let local = server.local(self.now);
        let answer = server.master.answer(local, request);
        say!(
            self,
            "master {master} answers {answer:?} to client {client}: {request:?}"
        );
        self.travel(route, false, Event::Answer(route, operation, answer));
    }

    fn connecting(&mut self, route: Route) {
        let server = &mut self.masters[route.master];
        if !server.up || route.connection < server.oldest[route.client] {
            return;
        }
        server.oldest[route.client] = route.connection;
        let event = Event::Connected {
            route,
            life: server.master.life,
            marked: server.master.is_marked(),
        };
        let at = self.now + self.delay();
        self.push(at, event);
    }

    /// Sends a message: once, twice, or not at all.
    fn travel(&mut self, route: Route, request: bool, event: Event) {
        let mut at = self.now + self.delay();
        if self.features.network == Network::Connections {
            let (requests, answers) = &mut self.masters[route.master].order[route.client];
            let last = if request { requests } else { answers };
            at = at.max(*last);
            *last = at;
        } else if !self.features.tight && self.now < QUIET {
            let luck = self.rng.u32(..1000);
            if luck < 30 {
                return;
            }
            if luck < 50 {
                let again = self.now + self.delay();
                self.push(again, event.clone());
            }
        }
        self.push(at, event);
    }

    fn delay(&mut self) -> Micros {
        if self.features.tight {
            self.rng.u64(20..120)
        } else if self.now < QUIET && self.rng.u32(..1000) < self.features.late {
            let longest = if self.features.short { 250 } else { 1500 };
            self.rng.u64(50 * MILLI..longest * MILLI)
        } else {
            self.rng.u64(300..15 * MILLI)
        }
    }

    /// Has a client act, and applies the effects.
    fn with_client(&mut self, client: usize, act: impl FnOnce(&mut Client, Now, &mut Vec<Effect>)) {
        let mut effects = std::mem::take(&mut self.effects);
        let process = &mut self.clients[client];
        let tick = self.features.tick();
        let now = Now {
            monotonic: Duration::from_micros(process.clock.at(self.now) / tick * tick),
            wall: (process.wall + self.now) / tick * tick,
        };
        act(&mut process.client, now, &mut effects);
        for effect in effects.drain(..) {
            self.effect(client, effect);
        }
        self.effects = effects;
    }

    fn effect(&mut self, client: usize, effect: Effect) {
        let clock = self.clients[client].clock;
        let when = |moment: Duration| clock.when(micros(moment));
        match effect {
            Effect::Send(master, operation, request) => {
                let process = &mut self.clients[client];
                if let Request::Vote(bid) = &request {
                    process.claim = Some(bid.claim);
                }
                if process.client.is_connected(master) {
                    let route = self.route(client, master);
                    self.travel(route, true, Event::Request(route, operation, request));
                }
            }
            Effect::Connect(master, connection) => {
                let at = self.now + self.delay();
                let route = Route {
                    client,
                    master,
                    connection,
                };
                self.push(at, Event::Connect(route));
            }
            Effect::Wake(moment, alarm) => {
                let tick = self.features.tick();
                let shown = micros(moment).div_ceil(tick) * tick;
                let at = clock.when(shown).max(self.now);
                self.push(at, Event::Alarm { client, alarm });
            }
            Effect::Acquired {
                began,
                until,
                token,
                mode,
                at_once,
                done,
            } => {
                say!(self, "client {client} HOLDS with token {token}, {mode:?}");
                self.tally.at_once += u64::from(at_once);
                let (until, done) = (when(until), when(done).max(self.now + 1));
                self.clients[client].hold = Some(self.holds.len());
                let writes = if mode == Mode::Exclusive { 2 } else { 0 };
                for _ in 0..writes {
                    let at = self.rng.u64(self.now..done);
                    let hold = self.holds.len();
                    self.push(at, Event::Write { client, hold });
                }
                self.holds.push(Hold {
                    client,
                    mode,
                    token,
                    asked: when(began),
                    from: self.now,
                    until,
                    renewed: None,
                });
            }
            Effect::Extended(since, until) => {
                self.tally.renewed += 1;
                if let Some(hold) = self.clients[client].hold {
                    self.holds[hold].until = when(until);
                    self.holds[hold].renewed = Some(when(since));
                }
            }
            Effect::Over => {
                if let Some(hold) = self.clients[client].hold.take() {
                    say!(
                        self,
                        "client {client} is over with token {}",
                        self.holds[hold].token
                    );
                    let hold = &mut self.holds[hold];
                    hold.until = hold.until.min(self.now);
                }
            }
            Effect::CutShort => self.tally.cut_short += 1,
            Effect::Lost(defeat) => {
                say!(self, "client {client} does not get it: {defeat:?}");
                match defeat {
                    Defeat::Taken(_) => self.tally.taken += 1,
                    Defeat::Outrun => self.tally.outrun += 1,
                    Defeat::Undecided { .. } => self.tally.undecided += 1,
                    Defeat::TooLate => self.tally.too_late += 1,
                    Defeat::OutOfTokens => self.tally.out_of_tokens += 1,
                }
            }
        }
    }

    /// Injects a fault.
    fn strike(&mut self) {
        if self.now > QUIET {
            return;
        }
        let pace = if self.features.short { 4 } else { 1 };
        let next = self.now + self.rng.u64(40 * MILLI..500 * MILLI) / pace;
        self.push(next, Event::Strike);
        let features = self.features;
        let mut possible: [Option<Strike>; 10] = [None; 10];
        let mut number = 0;
        let mut add = |there: bool, strike| {
            if there {
                possible[number] = Some(strike);
                number += 1;
            }
        };
        add(features.stops, Strike::StopClient);
        add(features.stops, Strike::StopMaster);
        add(features.stops, Strike::BreakConnection);
        add(features.walls == WallClocks::Wild, Strike::SetWallClock);
        add(features.jumps, Strike::SetMasterClock);
        add(features.vanishing.is_some(), Strike::Vanish);
        add(features.crash.is_some(), Strike::Crash);
        add(features.flushes, Strike::Flush);
        add(features.counters, Strike::SetCounter);
        add(features.crash == Some(Crash::Restored), Strike::Backup);
        if number == 0 {
            return;
        }
        let Some(strike) = possible[self.rng.usize(..number)] else {
            return;
        };
        let master = self.rng.usize(..self.masters.len());
        let client = self.rng.usize(..self.clients.len());
        let anywhere = features.crash != Some(Crash::Spared);
        let master = if strike == Strike::Crash && anywhere && self.rng.bool() {
            self.contended().unwrap_or(master)
        } else {
            master
        };
        if self.struck(strike, master, client) {
            self.tally.strikes += 1;
            let holding = |process: &Process| process.hold.is_some();
            self.tally.hits += u64::from(self.clients.iter().any(holding));
        }
    }

    fn struck(&mut self, strike: Strike, master: usize, client: usize) -> bool {
        match strike {
            // A second stop would reorder the events that wait for the end of the first.
            Strike::StopClient if self.clients[client].stopped_until > self.now => return false,
            Strike::StopMaster if self.masters[master].stopped_until > self.now => return false,
            Strike::StopClient => {
                let rest = self.rng.u64(MILLI..1500 * MILLI);
                say!(self, "client {client} stops for {} ms", rest / MILLI);
                self.clients[client].stopped_until = self.now + rest;
            }
            Strike::StopMaster => {
                let rest = self.rng.u64(MILLI..1500 * MILLI);
                say!(self, "master {master} stops for {} ms", rest / MILLI);
                self.masters[master].stopped_until = self.now + rest;
            }
            Strike::BreakConnection => {
                say!(self, "the connection of client {client} to {master} breaks");
                self.break_connection(client, master);
            }
            Strike::SetWallClock => {
                let year = 31_000_000 * SECOND;
                let process = &mut self.clients[client];
                process.wall = process.wall - year + self.rng.u64(..2 * year);
                say!(self, "the wall clock of client {client} is set");
            }
            Strike::SetMasterClock => {
                let span = 3_000_000;
                let by = self.rng.i64(-span..=span);
                say!(self, "the clock of master {master} is set by {} ms", by / 1000);
                self.masters[master].offset += by;
            }
            Strike::Vanish => return self.vanish(master),
            Strike::Backup => {
                let server = &mut self.masters[master];
                server.backup = server.master.data.clone();
            }
            Strike::Crash => return self.crash(master),
            Strike::SetCounter => {
                // Always the same masters, less than a majority.
                let master = master % (self.masters.len() - self.masters.len() / 2 - 1);
                let to = LAST_CLOCK + self.rng.u64(..u64::MAX - LAST_CLOCK);
                say!(self, "the counter of master {master} is set to {to}");
                self.masters[master].master.set_counter(to);
            }
            Strike::Flush => {
                // Often one that is in quarantine already.
                let unmarked = self.masters.iter().position(|server| !server.master.is_marked());
                let master = unmarked.filter(|_| self.rng.bool()).unwrap_or(master);
                say!(self, "master {master} is emptied");
                self.masters[master].master.data = Data::default();
            }
        }
        true
    }

    fn break_connection(&mut self, client: usize, master: usize) {
        let route = self.route(client, master);
        let at = self.now + self.rng.u64(..5 * MILLI);
        self.push(at, Event::Broken(route));
    }

    /// Returns the number of other masters at which the present holder's key carries its tokens and lasts as long as its
    /// lease. `None` if this master has no such key.
    fn others_holding(&self, master: usize) -> Option<usize> {
        let (process, hold) = self.clients.iter().find_map(|process| {
            let hold = &self.holds[process.hold?];
            (self.now < hold.until).then_some((process, hold))
        })?;
        // The client counts on renewals whose replies it has not received yet.
        if process.client.is_renewing() {
            return None;
        }
        let (claim, first) = (process.claim?, process.client.granted()?);
        let lasts = |server: &&Server| {
            let left = server.master.holding(server.local(self.now), claim, first);
            left.is_some_and(|left| self.now + server.clock.when(left) >= hold.until)
        };
        lasts(&&self.masters[master]).then(|| self.masters.iter().filter(lasts).count() - 1)
    }

    /// Returns a master whose key belongs to a contender while another client holds the lock.
    fn contended(&self) -> Option<usize> {
        let holder = self
            .clients
            .iter()
            .find(|process| process.hold.is_some())?
            .claim?;
        let other = |server: &Server| server.master.is_held_besides(server.local(self.now), holder);
        self.masters.iter().position(other)
    }

    fn vanish(&mut self, master: usize) -> bool {
        let masters = self.masters.len();
        let quorum = masters / 2 + 1;
        let master = match self.features.vanishing {
            Some(Vanishing::Spare) if self.others_holding(master).is_none_or(|others| others < quorum) => {
                return false;
            }
            // Always the same masters, even if a hold needs them.
            Some(Vanishing::Minority) => master % (masters - quorum),
            _ => master,
        };
        say!(self, "the key at master {master} is deleted");
        self.masters[master].master.delete();
        true
    }

    fn crash(&mut self, master: usize) -> bool {
        let quorum = self.masters.len() / 2 + 1;
        let Some(crash) = self.features.crash else {
            return false;
        };
        let others = self.others_holding(master);
        if crash == Crash::Spared && others.is_none_or(|others| others < quorum) {
            return false;
        }
        let server = &mut self.masters[master];
        if !server.up {
            return false;
        }
        match crash {
            Crash::Kept => {}
            Crash::Lost | Crash::Spared => server.master.data = Data::default(),
            Crash::Restored => server.master.data = server.backup.clone(),
        }
        server.up = false;
        server.master.life += 1;
        say!(self, "master {master} crashes, its data {crash:?}");
        let back = self.now + self.rng.u64(MILLI..100 * MILLI);
        self.push(back, Event::Restart { master });
        for client in 0..self.clients.len() {
            let connection = self.clients[client].client.connection(master);
            // No connection survives the crash.
            self.masters[master].oldest[client] = connection + 1;
            self.break_connection(client, master);
        }
        true
    }
}

impl Server {
    /// Returns its wall clock.
    fn local(&self, now: Micros) -> Micros {
        self.clock.at(now).saturating_add_signed(self.offset)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strike {
    StopClient,
    StopMaster,
    BreakConnection,
    SetWallClock,
    SetMasterClock,
    Vanish,
    Backup,
    Crash,
    Flush,
    SetCounter,
}

fn micros(span: Duration) -> Micros {
    Micros::try_from(span.as_micros()).unwrap_or(Micros::MAX)
}
