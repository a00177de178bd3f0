//! The plan of one epoch: a value, its text, and how it follows from a seed.

use std::{fmt, num::NonZeroU32, str::FromStr, time::Duration};

use fastrand::Rng;
use lockkit_core::{Capabilities, spi::Mode};

use super::Fault;

mod additions;
mod storms;

/// Milliseconds.
pub type Millis = u64;

/// The parts that a schedule may be made of.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "each is a property of its own")]
pub struct Shape {
    /// The backend's capabilities.
    pub capabilities: Capabilities,
    /// In how many processes clients may be. The first is the one that judges.
    pub processes: u32,
    /// The shortest ttl that the deployment takes.
    pub min_ttl: Millis,
    /// The longest ttl that the deployment takes.
    pub max_ttl: Millis,
    /// The faults that may befall the deployment.
    pub faults: Vec<Fault>,
    /// Processes of clients are stopped, if there are several.
    pub stops: bool,
    /// They are killed.
    pub kills: bool,
    /// Clients lose their runtimes.
    pub runtimes: bool,
    /// Clients disagree about the size of a semaphore, if the backend has any.
    pub sizes: bool,
}

impl Shape {
    /// One process, a ttl of half a second up to a minute, no faults.
    pub fn new(capabilities: Capabilities) -> Self {
        Self {
            capabilities,
            processes: 1,
            min_ttl: 500,
            max_ttl: 60_000,
            faults: Vec::new(),
            stops: true,
            kills: true,
            runtimes: true,
            sizes: true,
        }
    }
}

/// One epoch: clients, what their tasks do and when, and what befalls the deployment meanwhile. Ends in a quiet point.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Schedule {
    /// The seed that it was made from.
    pub seed: u64,
    /// The time after which nothing new begins.
    pub span: Millis,
    /// The sizes of the semaphores. Their names are numbered, as those of the locks are.
    pub sizes: Vec<u32>,
    /// The clients.
    pub clients: Vec<ClientPlan>,
    /// Their tasks.
    pub tasks: Vec<TaskPlan>,
    /// The faults.
    pub strikes: Vec<Strike>,
}

/// One client, connected when the epoch begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientPlan {
    /// Its number.
    pub id: u32,
    /// The process that it is in.
    pub process: u32,
    /// Its fate before the end of the epoch, and when.
    pub fate: Option<(Millis, Fate)>,
}

/// The fate of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is closed while it is used.
    Close,
    /// The runtime that it was connected in is shut down. Its tasks are in another, and go on with it.
    Runtime,
    /// It is closed, and its tasks go on with a new one.
    Anew,
}

/// One task of one client. It does one thing after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskPlan {
    /// Its number.
    pub id: u32,
    /// The client's number.
    pub client: u32,
    /// Its steps.
    pub steps: Vec<Step>,
}

/// One acquisition, or a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The earliest time for it to begin.
    pub at: Millis,
    /// The number of the lock, or of the semaphore.
    pub name: u32,
    /// The way to hold it.
    pub hold_as: HoldAs,
    /// The lease.
    pub ttl: Millis,
    /// The local hand-offs; `None` where a backend refuses them.
    pub handoffs: Option<u32>,
    /// True if the lease is renewed.
    pub renew: bool,
    /// True if it has a label.
    pub label: bool,
    /// The way to ask.
    pub ask: Ask,
    /// The time for which it holds.
    pub hold: Millis,
    /// The end of the hold.
    pub end: End,
    /// The number of repetitions, one after the other, for as long as it is granted.
    pub times: u32,
    /// The `max_hold`.
    pub max_hold: Option<Millis>,
    /// Every so often while it holds, its ttl is changed to this one, or back.
    pub retime: Option<(Millis, Millis)>,
    /// The time for which it keeps its guard after a loss.
    pub stays: Millis,
    /// After so long, an exclusive hold is made a shared one. The future is dropped after so many polls, if it has a number.
    pub downgrade: Option<(Millis, Option<u32>)>,
    /// The size of the semaphore, if it is another than the schedule's.
    pub size: Option<u32>,
}

/// The way to hold a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldAs {
    /// A lock, alone.
    Exclusive,
    /// A lock, with others.
    Shared,
    /// A permit of a semaphore.
    Permit,
    /// The leadership of an election. Those who wait for it campaign.
    Leader,
}

/// The way in which a step asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// It waits for as long as it takes.
    Wait,
    /// It waits for so long.
    Within(Millis),
    /// It asks once.
    Try,
    /// Drops its future after so long.
    CancelAfter(Millis),
    /// Drops its future after so many polls.
    CancelPolls(u32),
    /// Polls its future so many times, and drops it after the time for which it would hold.
    Unpolled(u32),
    /// This and the next locks, all or none, within so long.
    All(Millis),
    /// All of the set at once, or none.
    AllNow,
    /// Several permits, all or none, within a time if it has a limit.
    Many(u32, Option<Millis>),
    /// Several permits at once, or none.
    ManyNow(u32),
    /// Adopts a hold of this name that somebody has detached, if there is one within so long. The future is dropped after so many polls,
    /// if it has a number, and the hold is adopted anew.
    Adopt(Millis, Option<u32>),
    /// Twice, by the same owner.
    Twice,
    /// Asks who holds.
    Inspect,
    /// Ends the hold of the holder.
    Revoke,
    /// Asks the holder for its hold, and waits for so long.
    AskBack(Millis),
    /// Watches who leads, for as long as it would hold.
    Observe,
    /// Lists what is held: of elections, where it would lead one.
    List,
}

/// The way in which a hold ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// `release` is awaited.
    Release,
    /// The guard is dropped.
    Drop,
    /// The guard is forgotten: the hold ends with its client.
    Forget,
    /// `release` is polled once and dropped.
    HalfRelease,
    /// The hold is detached: it goes on, for whoever adopts it.
    Detach,
    /// `detach` is polled once and dropped.
    HalfDetach,
}

/// A fault: something that befalls the deployment or a process of clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strike {
    /// The time.
    pub at: Millis,
    /// The fault, by its name: [`STOP`], [`KILL`] or one of the deployment's.
    pub fault: String,
    /// The number of the process, of the server, or of the way to it.
    pub place: u32,
    /// Until it is healed.
    pub lasts: Millis,
}

/// A process of clients is stopped, and goes on.
pub const STOP: &str = "stop";
/// A process of clients is killed.
pub const KILL: &str = "kill";

impl Schedule {
    /// The schedule that follows from `seed`: the same for the same seed and shape.
    pub fn generate(seed: u64, shape: &Shape) -> Self {
        let mut schedule = Self::before_storms(seed, &shape.without_later());
        if shape.sizes {
            schedule.add_sizes();
        }
        Strike::turn_later(&mut schedule.strikes, seed, &shape.faults);
        schedule
    }

    fn before_storms(seed: u64, shape: &Shape) -> Self {
        let mut rng = Rng::with_seed(seed);
        let rng = &mut rng;
        let processes = if shape.processes > 1 {
            rng.u32(1..=shape.processes)
        } else {
            1
        };
        let plot = Plot::new(rng, shape, processes);
        let span = plot.span(rng);
        let mut schedule = Self {
            seed,
            span,
            ..Self::default()
        };
        schedule.strikes = plot.strikes(rng, shape, span, processes);
        schedule.strikes.sort_by_key(|strike| strike.at);
        for id in 0..rng.u32(3..=8) {
            let fate = match rng.u8(0..40) {
                0..2 => Some(Fate::Close),
                // It needs no plot, and is in the way of one.
                2 if shape.runtimes && matches!(plot, Plot::Calm | Plot::Scattered) => Some(Fate::Runtime),
                3..5 => Some(Fate::Anew),
                _ => None,
            };
            let fate = fate.map(|fate| (rng.u64(span / 10..span), fate));
            let anew = plot.anew(rng, shape, &schedule, id);
            schedule.clients.push(ClientPlan {
                id,
                // There is somebody in each.
                process: if id < processes { id } else { rng.u32(0..processes) },
                fate: anew.map(|at| (at, Fate::Anew)).or(fate),
            });
        }
        let mut kinds = vec![plot.mood(rng)];
        // Nobody is to have waited before.
        if plot != Plot::Arrival {
            if rng.bool() {
                kinds.push(Kind::any(rng));
            }
            if rng.u8(0..8) > 0 {
                kinds.push(Kind::Rush);
            }
        }
        let mut locks = 0;
        for kind in kinds {
            let mut mood = Mood::new(rng, shape, &mut schedule, kind, locks);
            mood.lasting = plot == Plot::Lasting;
            // A step that takes several takes the next ones too.
            locks += mood.locks + 2;
            for (client, steps) in mood.tasks(rng, &schedule) {
                let id = u32::try_from(schedule.tasks.len()).unwrap_or(u32::MAX);
                schedule.tasks.push(TaskPlan { id, client, steps });
            }
        }
        // Nobody is to have waited before.
        if plot != Plot::Arrival {
            schedule.add(shape);
        }
        schedule
    }

    /// Returns the mode in which a step holds. `None` for a semaphore that the schedule does not have.
    pub(super) fn mode(&self, step: &Step) -> Option<Mode> {
        Some(match step.hold_as {
            HoldAs::Exclusive | HoldAs::Leader => Mode::Exclusive,
            HoldAs::Shared => Mode::Shared,
            HoldAs::Permit => {
                let size = *self.sizes.get(step.name as usize)?;
                Mode::Permits(NonZeroU32::new(step.size.unwrap_or(size))?)
            }
        })
    }

    /// Returns whether somebody who holds or waits may vanish without a word.
    pub(super) fn is_harmless(&self) -> bool {
        let lives = |client: &ClientPlan| !matches!(client.fate, Some((_, Fate::Runtime)));
        self.strikes.is_empty() && self.clients.iter().all(lives)
    }

    /// Returns whether holds may be left to end with their leases, although nothing is wrong.
    pub(super) fn detaches(&self) -> bool {
        let mut steps = self.tasks.iter().flat_map(|task| &task.steps);
        steps.any(|step| matches!(step.end, End::Detach | End::HalfDetach))
    }
}

/// The pattern of faults in an epoch: what happens by itself is found by all, and what has to meet by few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plot {
    Calm,
    /// A few kinds, anywhere.
    Scattered,
    /// One fault again and again, for a short time each.
    Train,
    /// A change that lasts, and some of the ways fail long afterwards.
    Lasting,
    /// A process of clients stands still for long, or dies, and the others go on for long.
    Doom,
    /// A server suffers twice within the longest ttl, while one of the ways is gone.
    Pile,
    /// A way on which places in the queue are kept is gone for a while. Those behind it have just begun to wait for the
    /// first time, and the others hand the lock on meanwhile.
    Arrival,
}

/// The longest time for which each way of a train is gone.
const SHORT: Millis = 300;
/// The longest time for which those who have just arrived are gone.
const AWAY: Millis = 700;

impl Plot {
    fn new(rng: &mut Rng, shape: &Shape, processes: u32) -> Self {
        // A bug that needs no fault must not be excused by one.
        let mut plots = vec![Self::Calm, Self::Calm];
        let doom = processes > 1 && (shape.stops || shape.kills);
        if doom {
            plots.extend([Self::Scattered, Self::Doom]);
        }
        if !shape.faults.is_empty() {
            plots.extend([Self::Scattered, Self::Train, Self::Train, Self::Pile]);
        }
        if shape.faults.iter().any(|fault| fault.lasting) {
            plots.extend([Self::Lasting, Self::Lasting]);
        }
        if shape.faults.iter().any(Self::is_arrivals) {
            plots.extend([Self::Arrival, Self::Arrival]);
        }
        choice(rng, &plots)
    }

    fn is_arrivals(fault: &Fault) -> bool {
        fault.way && fault.order > Duration::from_millis(AWAY)
    }

    fn span(self, rng: &mut Rng) -> Millis {
        match self {
            Self::Calm => match rng.u8(0..8) {
                0 => rng.u64(10_000..20_000),
                1..4 => rng.u64(5_000..10_000),
                _ => rng.u64(2_000..5_000),
            },
            Self::Scattered => match rng.u8(0..10) {
                0..6 => rng.u64(2_000..5_000),
                6..9 => rng.u64(5_000..12_000),
                _ => rng.u64(18_000..30_000),
            },
            Self::Train => rng.u64(4_000..10_000),
            Self::Lasting => rng.u64(18_000..26_000),
            Self::Doom => rng.u64(25_000..46_000),
            Self::Pile => rng.u64(8_000..14_000),
            Self::Arrival => rng.u64(9_000..11_000),
        }
    }

    /// The kind of mood that it is most telling for, more often than not.
    fn mood(self, rng: &mut Rng) -> Kind {
        let any = Kind::any(rng);
        if self == Self::Arrival {
            return Kind::Arrival;
        }
        if rng.u8(0..4) == 0 {
            return any;
        }
        match self {
            Self::Scattered => any,
            Self::Train => Kind::Queue,
            Self::Calm => choice(rng, &[Kind::Idle, Kind::Queue]),
            Self::Lasting | Self::Pile => Kind::Idle,
            Self::Doom => Kind::Readers,
            Self::Arrival => Kind::Arrival,
        }
    }

    /// Returns when a client connects anew, if that is telling.
    fn anew(self, rng: &mut Rng, shape: &Shape, schedule: &Schedule, client: u32) -> Option<Millis> {
        if rng.u8(0..4) == 0 {
            return None;
        }
        let strikes = &schedule.strikes;
        match self {
            // What it has not done yet when its way breaks can be cut short.
            Self::Train => {
                let befalls = |strike: &&Strike| {
                    let fault = shape.faults.iter().find(|fault| fault.name == strike.fault);
                    let places = fault
                        .filter(|fault| fault.way)
                        .map_or(1, |fault| fault.places.max(1));
                    strike.at >= 800 && strike.place % places == client % places
                };
                let at: Vec<_> = strikes.iter().filter(befalls).map(|strike| strike.at).collect();
                (!at.is_empty()).then(|| choice(rng, &at) - rng.u64(260..450))
            }
            // So it is here, for those who are then to wait.
            Self::Arrival => {
                let strike = strikes.first()?;
                let ways = ways(shape);
                (client % ways == strike.place % ways).then(|| strike.at - rng.u64(400..450))
            }
            // Its connections may lead elsewhere than those that there are.
            Self::Lasting => {
                let lasting = |strike: &&Strike| {
                    let mut faults = shape.faults.iter();
                    faults.any(|fault| fault.lasting && fault.name == strike.fault)
                };
                let at = strikes.iter().find(lasting)?.at;
                Some(at + rng.u64(schedule.span / 20..schedule.span / 2))
            }
            _ => None,
        }
    }

    fn strikes(self, rng: &mut Rng, shape: &Shape, span: Millis, processes: u32) -> Vec<Strike> {
        let kinds_of = |chosen: &dyn Fn(&Fault) -> bool| {
            let mut kinds: Vec<(&str, u32)> = Vec::new();
            for fault in shape.faults.iter().filter(|fault| chosen(fault)) {
                for _ in 0..fault.weight {
                    kinds.push((fault.name, fault.places));
                }
            }
            kinds
        };
        let mut kinds = kinds_of(&|_| true);
        let ways = kinds_of(&|fault| fault.way);
        let doomed = |rng: &mut Rng, fault: &str, at: Millis, lasts: Millis| Strike {
            at,
            fault: fault.to_owned(),
            // The process that judges goes on.
            place: rng.u32(1..processes),
            lasts,
        };
        let mut strikes = Vec::new();
        match self {
            Self::Calm => {}
            Self::Scattered => {
                if processes > 1 && shape.stops {
                    kinds.extend([(STOP, 0), (STOP, 0)]);
                }
                if processes > 1 && shape.kills {
                    kinds.push((KILL, 0));
                }
                // The same few kinds in a schedule, so that they meet.
                let kinds: Vec<_> = (0..rng.u32(1..=3)).map(|_| choice(rng, &kinds)).collect();
                for _ in 0..choice(rng, &[1, 1, 2, 2, 3, 5]) {
                    let (fault, places) = choice(rng, &kinds);
                    let at = rng.u64(span / 20..span * 9 / 10);
                    strikes.push(if fault == STOP || fault == KILL {
                        let lasts = log_uniform(rng, 20, span);
                        doomed(rng, fault, at, lasts)
                    } else {
                        let lasts = log_uniform(rng, 20, span / 2);
                        strike(rng, at, (fault, places), lasts)
                    });
                }
            }
            Self::Train => {
                // Where order is kept, it can be seen whether it is.
                let orderly = kinds_of(&|fault| fault.order > Duration::from_millis(SHORT));
                let kinds = if orderly.is_empty() || rng.u8(0..4) == 0 {
                    kinds
                } else {
                    orderly
                };
                let kind = choice(rng, &kinds);
                // The first of them finds clients that have not done much yet.
                let mut at = rng.u64(250..800);
                while at < span && strikes.len() < 12 {
                    let lasts = rng.u64(20..SHORT);
                    strikes.push(strike(rng, at, kind, lasts));
                    at += lasts + rng.u64(200..1_200);
                }
            }
            Self::Lasting => {
                let kind = choice(rng, &kinds_of(&|fault| fault.lasting));
                let at = rng.u64(span / 20..span / 4);
                strikes.push(strike(rng, at, kind, 1_000));
                let kinds = if ways.is_empty() { kinds } else { ways };
                for _ in 0..rng.u32(1..=3) {
                    let kind = choice(rng, &kinds);
                    let at = rng.u64(span / 3..span * 3 / 4);
                    let lasts = log_uniform(rng, 2_000, 8_000);
                    strikes.push(strike(rng, at, kind, lasts));
                }
            }
            Self::Doom => {
                let among: &[&str] = match (shape.stops, shape.kills) {
                    (true, true) => &[STOP, STOP, KILL],
                    (true, false) => &[STOP],
                    _ => &[KILL],
                };
                let fault = choice(rng, among);
                let at = rng.u64(span / 25..span / 7);
                let lasts = rng.u64(span / 2..span * 4 / 5);
                strikes.push(doomed(rng, fault, at, lasts));
            }
            Self::Pile => {
                let servers = kinds_of(&|fault| !fault.way && !fault.lasting);
                let kinds = if servers.is_empty() { kinds } else { servers };
                strikes = pile(rng, span, shape.max_ttl.min(6_000), &kinds, &ways);
            }
            Self::Arrival => {
                let kind = choice(rng, &kinds_of(&Self::is_arrivals));
                let at = rng.u64(1_000..2_000);
                let lasts = rng.u64(300..AWAY);
                strikes.push(strike(rng, at, kind, lasts));
            }
        }
        strikes
    }
}

/// The number of ways to the deployment.
fn ways(shape: &Shape) -> u32 {
    let ways = shape.faults.iter().filter(|fault| fault.way);
    ways.map(|fault| fault.places).max().unwrap_or_default().max(1)
}

fn strike(rng: &mut Rng, at: Millis, (fault, places): (&str, u32), lasts: Millis) -> Strike {
    Strike {
        at,
        fault: fault.to_owned(),
        place: rng.u32(0..places.max(1)),
        lasts,
    }
}

/// One of `ways` is struck for long, and one server again and again, each time `within` so long of the last.
fn pile(
    rng: &mut Rng,
    span: Millis,
    within: Millis,
    kinds: &[(&str, u32)],
    ways: &[(&str, u32)],
) -> Vec<Strike> {
    let mut strikes = Vec::new();
    if !ways.is_empty() {
        let way = choice(rng, ways);
        let at = rng.u64(span / 20..span / 8);
        let lasts = rng.u64(span / 2..span);
        strikes.push(strike(rng, at, way, lasts));
    }
    let place = rng.u32(..);
    let mut at = rng.u64(span / 5..span / 2);
    for _ in 0..rng.u32(2..=3) {
        let (fault, places) = choice(rng, kinds);
        let lasts = log_uniform(rng, 20, 500);
        strikes.push(Strike {
            at,
            fault: fault.to_owned(),
            place: place % places.max(1),
            lasts,
        });
        at += rng.u64(within / 8..within);
    }
    strikes
}

/// The pattern of some tasks, which are about the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Many short holds, by many tasks.
    Rush,
    /// Everything.
    Mixed,
    /// One client cancels those with short leases, and holds for long and idly with long ones; others want what it has.
    Idle,
    /// Each client has one task, which waits in line, or only tries.
    Queue,
    /// Readers, one of which holds for long, and a lone writer that waits, in a process that may be doomed.
    Readers,
    /// Some begin to wait just before their way is gone, others meanwhile, and the lock is handed on among the others.
    Arrival,
}

impl Kind {
    fn any(rng: &mut Rng) -> Self {
        choice(rng, &[Self::Mixed, Self::Idle, Self::Queue, Self::Readers])
    }
}

#[derive(Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a property of its own")]
struct Mood {
    kind: Kind,
    ttls: Vec<Millis>,
    /// The number of the first lock, and how many there are.
    first: u32,
    locks: u32,
    /// The numbers of the semaphores.
    sizes: Vec<u32>,
    /// The number of steps in 10 that ask for a shared hold.
    shared: u8,
    handoffs: Vec<Option<u32>>,
    /// The most tasks of a client.
    crowd: u32,
    all: bool,
    revokes: bool,
    /// A guard that is forgotten keeps the name until the end.
    forgets: bool,
    /// Something changes for good, and who held before may be there for long after it.
    lasting: bool,
    /// The number of ways to the deployment.
    ways: u32,
    span: Millis,
}

impl Mood {
    fn new(rng: &mut Rng, shape: &Shape, schedule: &mut Schedule, kind: Kind, first: u32) -> Self {
        let most = shape.max_ttl;
        let calm = schedule.strikes.is_empty();
        let doom = schedule
            .strikes
            .iter()
            .any(|strike| strike.fault == KILL || strike.fault == STOP);
        let ttls = match kind {
            Kind::Idle => {
                let short = log_uniform(rng, 500, 1_500);
                // A dead holder keeps its name for its ttl, which somebody has to wait for.
                let long = if calm { most } else { most.min(9_000) };
                vec![short, log_uniform(rng, (short * 6).min(long), long)]
            }
            _ => {
                let upto = if doom { 2_500 } else { 6_000 };
                let short = 0..rng.usize(1..=3);
                let mut ttls: Vec<_> = short.map(|_| log_uniform(rng, 500, upto.min(most))).collect();
                if calm && kind == Kind::Mixed && rng.bool() {
                    ttls.push(log_uniform(rng, 8_000.min(most), most));
                }
                ttls
            }
        };
        // Here, so that a deployment that takes shorter ones has the schedules that it always had.
        let ttls = ttls.into_iter().map(|ttl| ttl.max(shape.min_ttl)).collect();
        let handoffs = match (shape.capabilities.local_handoffs, rng.u8(0..10)) {
            (false, _) => vec![None],
            // What is handed on costs the server nothing, and most of the grants are a rush's.
            (true, 0..4) if kind == Kind::Rush => vec![None, Some(1_000)],
            (true, 0..6) => vec![Some(0)],
            (true, _) if matches!(kind, Kind::Queue | Kind::Arrival) => vec![Some(0)],
            (true, 6..8) => vec![None, Some(32)],
            (true, _) => vec![None, Some(0), Some(1_000)],
        };
        let mut sizes = Vec::new();
        if shape.capabilities.permits && matches!(kind, Kind::Rush | Kind::Mixed) && rng.u8(0..3) == 0 {
            sizes.push(u32::try_from(schedule.sizes.len()).unwrap_or_default());
            schedule.sizes.push(choice(rng, &[1, 2, 3, 5]));
        }
        let (locks, shared): (&[u32], &[u8]) = match kind {
            Kind::Rush => (&[1, 2, 4, 8], &[0, 0, 2, 5]),
            Kind::Mixed => (&[1, 1, 1, 2, 3], &[0, 3, 6]),
            Kind::Idle => (&[2, 3, 4, 6], &[0]),
            Kind::Queue | Kind::Readers | Kind::Arrival => (&[1, 2, 3], &[0]),
        };
        Self {
            kind,
            ttls,
            first,
            locks: choice(rng, locks),
            sizes,
            shared: if shape.capabilities.shared {
                choice(rng, shared)
            } else {
                0
            },
            handoffs,
            crowd: choice(
                rng,
                if kind == Kind::Rush {
                    &[2, 4, 6, 8]
                } else {
                    &[1, 1, 2, 3, 6]
                },
            ),
            all: kind == Kind::Mixed && rng.u8(0..3) == 0,
            revokes: kind == Kind::Mixed && shape.capabilities.revoke_by_force && rng.u8(0..6) == 0,
            forgets: kind == Kind::Mixed && rng.u8(0..4) == 0,
            lasting: false,
            ways: ways(shape),
            span: schedule.span,
        }
        .with_readers(shape)
    }

    fn with_readers(mut self, shape: &Shape) -> Self {
        // Where nothing is shared, they are a queue.
        if self.kind == Kind::Readers && !shape.capabilities.shared {
            self.kind = Kind::Queue;
            self.handoffs.truncate(1);
        }
        self
    }

    /// Draws the tasks of each client.
    fn tasks(&self, rng: &mut Rng, schedule: &Schedule) -> Vec<(u32, Vec<Step>)> {
        let mut tasks = Vec::new();
        match self.kind {
            Kind::Rush => {
                let mut clients = shuffled(rng, schedule);
                clients.truncate(rng.usize(2..=clients.len()));
                for client in clients {
                    for _ in 0..rng.u32(1..=self.crowd) {
                        tasks.push((client, self.rush(rng)));
                    }
                }
            }
            Kind::Mixed => {
                for client in shuffled(rng, schedule) {
                    for _ in 0..rng.u32(1..=self.crowd) {
                        tasks.push((client, self.mixed(rng)));
                    }
                }
            }
            // What has to meet has more chances on several names.
            Kind::Idle | Kind::Queue | Kind::Readers | Kind::Arrival => {
                for first in self.first..self.first + self.locks {
                    let (locks, clients) = (1, shuffled(rng, schedule));
                    let one = Self {
                        first,
                        locks,
                        ..self.clone()
                    };
                    tasks.extend(one.tasks_of_one(rng, schedule, clients));
                }
                if let (Kind::Arrival, Some(strike)) = (self.kind, schedule.strikes.first()) {
                    for client in &schedule.clients {
                        tasks.push((client.id, self.tries(rng, strike)));
                    }
                }
            }
        }
        tasks
    }

    /// Draws what clients do about one lock, each by one task.
    fn tasks_of_one(
        &self,
        rng: &mut Rng,
        schedule: &Schedule,
        mut clients: Vec<u32>,
    ) -> Vec<(u32, Vec<Step>)> {
        let mut tasks = Vec::new();
        match self.kind {
            Kind::Idle => {
                tasks.push((clients[0], self.idle(rng)));
                for client in clients.iter().skip(1).take(3) {
                    tasks.push((*client, self.contender(rng)));
                }
            }
            Kind::Readers => {
                let mut doomed = schedule.strikes.iter();
                let doomed = doomed.find(|strike| strike.fault == STOP || strike.fault == KILL);
                let is_doomed = |id: &u32| {
                    let mut clients = schedule.clients.iter();
                    let plan = clients.find(|client| client.id == *id);
                    matches!((plan, doomed), (Some(plan), Some(strike)) if plan.process == strike.place)
                };
                let writer = clients.iter().position(is_doomed).unwrap_or(0);
                tasks.push((clients.swap_remove(writer), self.writer(rng)));
                clients.retain(|id| !is_doomed(id));
                if let Some(anchor) = clients.first() {
                    tasks.push((*anchor, self.anchor(rng)));
                }
                for client in clients.iter().take(4) {
                    let eager = rng.bool();
                    tasks.push((*client, self.reader(rng, eager)));
                }
            }
            Kind::Arrival => {
                if let Some(strike) = schedule.strikes.first() {
                    tasks = self.arrival(rng, strike, clients);
                }
            }
            _ => {
                let pace = choice(rng, &[(20, 150), (200, 600), (1_001, 2_000)]);
                for client in clients.into_iter().take(7) {
                    tasks.push((client, self.queue(rng, pace)));
                }
            }
        }
        tasks
    }

    fn step(&self, rng: &mut Rng, at: Millis, ask: Ask, hold: Millis) -> Step {
        Step {
            at,
            name: self.first + rng.u32(0..self.locks),
            hold_as: if rng.u8(0..10) < self.shared {
                HoldAs::Shared
            } else {
                HoldAs::Exclusive
            },
            ttl: choice(rng, &self.ttls),
            handoffs: choice(rng, &self.handoffs),
            renew: true,
            label: rng.u8(0..3) == 0,
            ask,
            hold,
            end: match rng.u8(0..40) {
                0..28 => End::Release,
                28..38 => End::Drop,
                _ => End::HalfRelease,
            },
            times: 1,
            max_hold: None,
            retime: None,
            stays: 0,
            downgrade: None,
            size: None,
        }
    }

    fn rush(&self, rng: &mut Rng) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = rng.u64(0..self.span / 8);
        while at < self.span && steps.len() < 1_000 {
            let ask = match rng.u8(0..100) {
                0..60 => Ask::Wait,
                60..75 => Ask::Within(log_uniform(rng, 10, 3_000)),
                75..90 => Ask::Try,
                90..93 => Ask::CancelAfter(log_uniform(rng, 1, 1_000)),
                93..99 => Ask::CancelPolls(rng.u32(1..8)),
                _ => Ask::Twice,
            };
            let hold = match rng.u8(0..200) {
                0..140 => 0,
                140..199 => rng.u64(1..6),
                _ => rng.u64(5..200),
            };
            let mut step = self.step(rng, at, ask, hold);
            if let (Some(number), true) = (self.sizes.first(), rng.u8(0..10) < 4) {
                (step.name, step.hold_as) = (*number, HoldAs::Permit);
            }
            // To the end of the span, since what befalls the deployment is to find it busy.
            at += hold + rng.u64(0..40);
            if hold == 0 && rng.bool() {
                let times = log_uniform(rng, 1, 100);
                step.times = u32::try_from(times).unwrap_or(1);
                at += times;
            }
            steps.push(step);
            if rng.u8(0..40) == 0 {
                at += rng.u64(0..self.span / 20);
            }
        }
        steps
    }

    fn mixed(&self, rng: &mut Rng) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = rng.u64(0..self.span / 2);
        while at < self.span && steps.len() < 200 {
            let permit = !self.sizes.is_empty() && rng.u8(0..10) < 4;
            let hold = match rng.u8(0..20) {
                0..7 => 0,
                7..14 => rng.u64(1..50),
                14..18 => rng.u64(50..1_000),
                _ => rng.u64(1_000..self.span.max(2_000)),
            };
            let ask = match rng.u8(0..100) {
                0..35 => Ask::Wait,
                35..52 => Ask::Within(log_uniform(rng, 10, 5_000)),
                52..66 => Ask::Try,
                66..72 => Ask::CancelAfter(log_uniform(rng, 1, 3_000)),
                72..84 => Ask::CancelPolls(rng.u32(1..8)),
                84..87 => Ask::Unpolled(rng.u32(1..5)),
                87..91 if self.all && !permit => Ask::All(log_uniform(rng, 50, 4_000)),
                91..94 => Ask::Twice,
                94..97 if self.revokes => Ask::Revoke,
                _ => Ask::Inspect,
            };
            let mut step = self.step(rng, at, ask, hold);
            step.renew = rng.u8(0..8) > 0;
            if let (Some(number), true) = (self.sizes.first(), permit) {
                (step.name, step.hold_as) = (*number, HoldAs::Permit);
            }
            if self.forgets && rng.u8(0..40) == 0 {
                step.end = End::Forget;
            }
            steps.push(step);
            at += match rng.u8(0..10) {
                0..4 => 0,
                4..8 => rng.u64(0..50),
                _ => rng.u64(50..self.span / 2),
            };
            // It is no plan to do more than there is time for.
            at += hold.min(self.span / 4);
        }
        steps
    }

    fn idle(&self, rng: &mut Rng) -> Vec<Step> {
        let (short, long) = (self.ttls[0], self.ttls[1]);
        let mut steps = Vec::new();
        let mut at = rng.u64(0..500);
        if self.lasting && rng.bool() {
            let hold = rng.u64(self.span / 2..self.span * 2);
            let mut step = self.step(rng, at, Ask::Wait, hold);
            step.ttl = long;
            steps.push(step);
            at += hold;
        }
        while at < self.span {
            let (ask, ttl, hold) = match rng.u8(0..10) {
                0..4 => (Ask::CancelPolls(rng.u32(1..5)), short, 0),
                4..6 => (Ask::Within(500), choice(rng, &self.ttls), rng.u64(0..20)),
                6 => (Ask::Try, choice(rng, &self.ttls), 0),
                7 => (Ask::Wait, short, log_uniform(rng, short, self.span)),
                _ => (
                    Ask::Wait,
                    long,
                    log_uniform(rng, short * 3 / 2, (self.span / 2).max(short * 3)),
                ),
            };
            let mut step = self.step(rng, at, ask, hold);
            step.ttl = ttl;
            steps.push(step);
            at += hold + rng.u64(0..100);
        }
        steps
    }

    fn contender(&self, rng: &mut Rng) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = rng.u64(0..1_000);
        while at < self.span {
            let ask = match rng.u8(0..4) {
                0 => Ask::Wait,
                1 => Ask::Within(log_uniform(rng, 500, 6_000)),
                _ => Ask::Try,
            };
            let hold = if rng.u8(0..4) == 0 {
                rng.u64(50..1_000)
            } else {
                rng.u64(0..50)
            };
            steps.push(self.step(rng, at, ask, hold));
            at += rng.u64(10..300);
        }
        steps
    }

    fn queue(&self, rng: &mut Rng, (least, most): (Millis, Millis)) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = rng.u64(0..500);
        while at < self.span {
            let ask = match rng.u8(0..20) {
                0..13 => Ask::Wait,
                13 => Ask::CancelAfter(log_uniform(rng, 1, 1_000)),
                _ => Ask::Try,
            };
            let hold = log_uniform(rng, least, most);
            let mut step = self.step(rng, at, ask, hold);
            step.end = End::Release;
            steps.push(step);
            at += rng.u64(0..least * 2);
        }
        steps
    }

    /// The lock is handed on while some are away, and again when they are back.
    fn arrival(&self, rng: &mut Rng, strike: &Strike, clients: Vec<u32>) -> Vec<(u32, Vec<Step>)> {
        let (away, stay): (Vec<_>, Vec<_>) = clients
            .into_iter()
            .partition(|client| client % self.ways == strike.place % self.ways);
        // A client that is cut off for a moment is back soon after it.
        let handed_on = strike.at + log_uniform(rng, 5, strike.lasts);
        // Who is away is back in line when such a hold is over.
        let hold = rng.u64(1_500..2_500);
        let mut step = |at, hold| Step {
            end: End::Release,
            ..self.step(rng, at, Ask::Wait, hold)
        };
        let mut tasks = Vec::new();
        for (n, client) in (0..).zip(away.into_iter().take(2)) {
            tasks.push((client, vec![step(strike.at - 330 + n * 30, 20)]));
        }
        for (n, client) in (0..).zip(stay.into_iter().take(3)) {
            tasks.push((
                client,
                match n {
                    0 => vec![step(0, handed_on), step(handed_on, hold)],
                    _ => vec![step(strike.at - 150 + n * 50, hold)],
                },
            ));
        }
        tasks
    }

    /// Answers, up to when the way is gone, which say that what was asked before is there.
    fn tries(&self, rng: &mut Rng, strike: &Strike) -> Vec<Step> {
        let (mut steps, mut at) = (Vec::new(), strike.at - 400);
        while at < strike.at {
            let mut step = self.step(rng, at, Ask::Try, 0);
            step.name = self.first + self.locks;
            steps.push(step);
            at += rng.u64(10..40);
        }
        steps
    }

    fn writer(&self, rng: &mut Rng) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = rng.u64(0..1_000);
        while at < self.span {
            let hold = rng.u64(0..50);
            steps.push(self.step(rng, at, Ask::Wait, hold));
            at += log_uniform(rng, 20, 3_000);
        }
        steps
    }

    /// Holds with others, for long.
    fn anchor(&self, rng: &mut Rng) -> Vec<Step> {
        let all_along = rng.bool();
        let mut steps = Vec::new();
        let mut at = rng.u64(0..200);
        while at < self.span {
            let hold = if all_along {
                self.span
            } else {
                log_uniform(rng, 1_000, (self.span / 3).max(2_000))
            };
            let mut step = self.step(rng, at, Ask::Wait, hold);
            step.hold_as = HoldAs::Shared;
            steps.push(step);
            at += hold;
        }
        steps
    }

    fn reader(&self, rng: &mut Rng, eager: bool) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = rng.u64(0..1_000);
        while at < self.span {
            let ask = match rng.u8(0..10) {
                0..2 if !eager => Ask::Wait,
                2..4 if !eager => Ask::Within(log_uniform(rng, 50, 5_000)),
                _ => Ask::Try,
            };
            let hold = rng.u64(0..100);
            let mut step = self.step(rng, at, ask, hold);
            step.hold_as = HoldAs::Shared;
            steps.push(step);
            at += rng.u64(20..400);
        }
        steps
    }
}

fn shuffled(rng: &mut Rng, schedule: &Schedule) -> Vec<u32> {
    let mut clients: Vec<_> = schedule.clients.iter().map(|client| client.id).collect();
    rng.shuffle(&mut clients);
    clients
}

fn choice<T: Clone>(rng: &mut Rng, among: &[T]) -> T {
    among[rng.usize(0..among.len())].clone()
}

/// Draws a number, as often between 1 and 10 as between 10 and 100.
fn log_uniform(rng: &mut Rng, from: Millis, to: Millis) -> Millis {
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of a minute")]
    let (low, high) = ((from.max(1) as f64).ln(), (to.max(from + 1) as f64).ln());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between two that fit"
    )]
    let drawn = (low + (high - low) * rng.f64()).exp() as Millis;
    drawn.clamp(from, to.max(from))
}

const HEADER: &str = "lockkit torture schedule 1";

/// A line for each thing: a file that can be run again.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEADER}\nseed {}\nspan {}", self.seed, self.span)?;
        for size in &self.sizes {
            writeln!(f, "size {size}")?;
        }
        for ClientPlan { id, process, fate } in &self.clients {
            match fate {
                None => writeln!(f, "client {id} {process}")?,
                Some((at, fate)) => writeln!(f, "client {id} {process} {fate} {at}")?,
            }
        }
        for TaskPlan { id, client, steps } in &self.tasks {
            writeln!(f, "task {id} {client}")?;
            for step in steps {
                writeln!(f, "step {step}")?;
            }
        }
        for Strike {
            at,
            fault,
            place,
            lasts,
        } in &self.strikes
        {
            writeln!(f, "strike {at} {fault} {place} {lasts}")?;
        }
        Ok(())
    }
}

impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut lines = text.lines().enumerate();
        let mut schedule = Self::default();
        match lines.next() {
            Some((_, HEADER)) => {}
            _ => return Err(format!("no schedule: it does not begin with `{HEADER}`")),
        }
        for (number, line) in lines {
            let words: Vec<_> = line.split_whitespace().collect();
            if words.is_empty() {
                continue;
            }
            schedule
                .line(&words)
                .ok_or_else(|| format!("line {} of the schedule is not understood: {line:?}", number + 1))?;
        }
        schedule.verify()?;
        Ok(schedule)
    }
}

impl Schedule {
    fn line(&mut self, words: &[&str]) -> Option<()> {
        match *words {
            ["seed", seed] => self.seed = seed.parse().ok()?,
            ["span", span] => self.span = span.parse().ok()?,
            ["size", size] => self.sizes.push(size.parse().ok().filter(|size| *size > 0)?),
            ["client", id, process, ref fate @ ..] => self.clients.push(ClientPlan {
                id: id.parse().ok()?,
                process: process.parse().ok()?,
                fate: match *fate {
                    [] => None,
                    [fate, at] => Some((at.parse().ok()?, fate.parse().ok()?)),
                    _ => return None,
                },
            }),
            ["task", id, client] => self.tasks.push(TaskPlan {
                id: id.parse().ok()?,
                client: client.parse().ok()?,
                steps: Vec::new(),
            }),
            ["step", ref step @ ..] => self.tasks.last_mut()?.steps.push(parse_step(step)?),
            ["strike", at, fault, place, lasts] => self.strikes.push(Strike {
                at: at.parse().ok()?,
                fault: fault.to_owned(),
                place: place.parse().ok()?,
                lasts: lasts.parse().ok()?,
            }),
            _ => return None,
        }
        Some(())
    }

    /// Checks what the parts say of each other.
    fn verify(&self) -> Result<(), String> {
        for task in &self.tasks {
            if !self.clients.iter().any(|client| client.id == task.client) {
                return Err(format!(
                    "task {} is of client {}, which is not there",
                    task.id, task.client
                ));
            }
            if task.steps.iter().any(|step| self.mode(step).is_none()) {
                return Err(format!(
                    "task {} wants a permit of a semaphore that is not there",
                    task.id
                ));
            }
            if let Some(step) = task.steps.iter().find(|step| !step.makes_sense()) {
                return Err(format!("task {} wants what there is not: {step}", task.id));
            }
        }
        Ok(())
    }
}

impl Step {
    /// Returns whether there is such a step, for a leader or somebody else.
    fn makes_sense(&self) -> bool {
        let asks = match self.ask {
            Ask::Observe => self.hold_as == HoldAs::Leader,
            Ask::Within(_) | Ask::Twice | Ask::Revoke | Ask::AskBack(_) | Ask::Adopt(..) => {
                self.hold_as != HoldAs::Leader
            }
            Ask::All(_) | Ask::AllNow => matches!(self.hold_as, HoldAs::Exclusive | HoldAs::Shared),
            Ask::Many(permits, _) | Ask::ManyNow(permits) => self.hold_as == HoldAs::Permit && permits > 0,
            _ => true,
        };
        let ends = match self.end {
            End::Detach | End::HalfDetach => self.has_guard() && self.hold_as != HoldAs::Leader,
            _ => true,
        };
        // What is adopted has the size that it had.
        let passes = matches!(self.ask, Ask::Adopt(..)) || matches!(self.end, End::Detach | End::HalfDetach);
        let has_size = self.size.is_none() || self.hold_as == HoldAs::Permit && !passes;
        let downgrades = self.downgrade.is_none() || self.has_guard() && self.hold_as == HoldAs::Exclusive;
        asks && ends && has_size && downgrades
    }

    /// Returns whether it has a guard of one hold if it is granted.
    pub(super) fn has_guard(&self) -> bool {
        match self.ask {
            Ask::Wait
            | Ask::Within(_)
            | Ask::Try
            | Ask::CancelAfter(_)
            | Ask::CancelPolls(_)
            | Ask::Unpolled(_)
            | Ask::Adopt(..) => true,
            Ask::All(_)
            | Ask::AllNow
            | Ask::Many(..)
            | Ask::ManyNow(_)
            | Ask::Twice
            | Ask::Inspect
            | Ask::Revoke
            | Ask::AskBack(_)
            | Ask::Observe
            | Ask::List => false,
        }
    }
}

/// `at name hold_as ttl handoffs renew label ask hold end`, then `times` if it is more than one, and what else there is:
/// `max-hold=2000 retime=300:1500 stays=40 downgrade=70 size=2`.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let handoffs = self.handoffs.map_or_else(|| "-".to_owned(), |n| n.to_string());
        let hold_as = match self.hold_as {
            HoldAs::Exclusive => "exclusive",
            HoldAs::Shared => "shared",
            HoldAs::Permit => "permit",
            HoldAs::Leader => "leader",
        };
        write!(f, "{} {} {hold_as} {} {handoffs} ", self.at, self.name, self.ttl)?;
        write!(f, "{} {} ", u8::from(self.renew), u8::from(self.label))?;
        match self.ask {
            Ask::Wait => write!(f, "wait"),
            Ask::Within(time) => write!(f, "within:{time}"),
            Ask::Try => write!(f, "try"),
            Ask::CancelAfter(time) => write!(f, "cancel-after:{time}"),
            Ask::CancelPolls(polls) => write!(f, "cancel-polls:{polls}"),
            Ask::Unpolled(polls) => write!(f, "unpolled:{polls}"),
            Ask::All(time) => write!(f, "all:{time}"),
            Ask::AllNow => write!(f, "all-now"),
            Ask::Many(permits, None) => write!(f, "many:{permits}"),
            Ask::Many(permits, Some(time)) => write!(f, "many:{permits}:{time}"),
            Ask::ManyNow(permits) => write!(f, "many-now:{permits}"),
            Ask::Adopt(time, None) => write!(f, "adopt:{time}"),
            Ask::Adopt(time, Some(polls)) => write!(f, "adopt:{time}:{polls}"),
            Ask::Twice => write!(f, "twice"),
            Ask::Inspect => write!(f, "inspect"),
            Ask::Revoke => write!(f, "revoke"),
            Ask::AskBack(time) => write!(f, "ask-back:{time}"),
            Ask::Observe => write!(f, "observe"),
            Ask::List => write!(f, "list"),
        }?;
        let end = match self.end {
            End::Release => "release",
            End::Drop => "drop",
            End::Forget => "forget",
            End::HalfRelease => "half-release",
            End::Detach => "detach",
            End::HalfDetach => "half-detach",
        };
        write!(f, " {} {end}", self.hold)?;
        if self.times != 1 {
            write!(f, " {}", self.times)?;
        }
        if let Some(max_hold) = self.max_hold {
            write!(f, " max-hold={max_hold}")?;
        }
        if let Some((every, ttl)) = self.retime {
            write!(f, " retime={every}:{ttl}")?;
        }
        if self.stays > 0 {
            write!(f, " stays={}", self.stays)?;
        }
        match self.downgrade {
            None => Ok(()),
            Some((after, None)) => write!(f, " downgrade={after}"),
            Some((after, Some(polls))) => write!(f, " downgrade={after}:{polls}"),
        }?;
        self.size.map_or(Ok(()), |size| write!(f, " size={size}"))
    }
}

fn parse_step(words: &[&str]) -> Option<Step> {
    let [
        at,
        name,
        hold_as,
        ttl,
        handoffs,
        renew,
        label,
        ask,
        hold,
        end,
        ref more @ ..,
    ] = *words
    else {
        return None;
    };
    let flag = |word: &str| match word {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    };
    let (ask, figure) = ask.split_once(':').unwrap_or((ask, ""));
    let (mut times, mut max_hold, mut retime, mut stays, mut downgrade) = (1, None, None, 0, None);
    let mut size = None;
    for word in more {
        match word.split_once('=') {
            None => times = word.parse().ok()?,
            Some(("max-hold", time)) => max_hold = Some(time.parse().ok()?),
            Some(("retime", how)) => {
                let (every, ttl) = how.split_once(':')?;
                retime = Some((every.parse().ok()?, ttl.parse().ok()?));
            }
            Some(("stays", time)) => stays = time.parse().ok()?,
            Some(("downgrade", how)) => downgrade = Some(parse_two(how)?),
            Some(("size", permits)) => size = Some(permits.parse::<NonZeroU32>().ok()?.get()),
            _ => return None,
        }
    }
    Some(Step {
        at: at.parse().ok()?,
        name: name.parse().ok()?,
        hold_as: match hold_as {
            "exclusive" => HoldAs::Exclusive,
            "shared" => HoldAs::Shared,
            "permit" => HoldAs::Permit,
            "leader" => HoldAs::Leader,
            _ => return None,
        },
        ttl: ttl.parse().ok()?,
        handoffs: match handoffs {
            "-" => None,
            handoffs => Some(handoffs.parse().ok()?),
        },
        renew: flag(renew)?,
        label: flag(label)?,
        ask: match ask {
            "wait" => Ask::Wait,
            "within" => Ask::Within(figure.parse().ok()?),
            "try" => Ask::Try,
            "cancel-after" => Ask::CancelAfter(figure.parse().ok()?),
            "cancel-polls" => Ask::CancelPolls(figure.parse().ok()?),
            "unpolled" => Ask::Unpolled(figure.parse().ok()?),
            "all" => Ask::All(figure.parse().ok()?),
            "all-now" => Ask::AllNow,
            "many" => {
                let (permits, within) = parse_two(figure)?;
                Ask::Many(permits, within)
            }
            "many-now" => Ask::ManyNow(figure.parse().ok()?),
            "adopt" => {
                let (within, polls) = parse_two(figure)?;
                Ask::Adopt(within, polls)
            }
            "twice" => Ask::Twice,
            "inspect" => Ask::Inspect,
            "revoke" => Ask::Revoke,
            "ask-back" => Ask::AskBack(figure.parse().ok()?),
            "observe" => Ask::Observe,
            "list" => Ask::List,
            _ => return None,
        },
        hold: hold.parse().ok()?,
        end: match end {
            "release" => End::Release,
            "drop" => End::Drop,
            "forget" => End::Forget,
            "half-release" => End::HalfRelease,
            "detach" => End::Detach,
            "half-detach" => End::HalfDetach,
            _ => return None,
        },
        times,
        max_hold,
        retime,
        stays,
        downgrade,
        size,
    })
}

/// `figure`, or `figure:another`.
fn parse_two<A: FromStr, B: FromStr>(figures: &str) -> Option<(A, Option<B>)> {
    let Some((one, other)) = figures.split_once(':') else {
        return Some((figures.parse().ok()?, None));
    };
    Some((one.parse().ok()?, Some(other.parse().ok()?)))
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Close => "close",
            Self::Runtime => "runtime",
            Self::Anew => "anew",
        })
    }
}

impl FromStr for Fate {
    type Err = ();

    fn from_str(word: &str) -> Result<Self, ()> {
        match word {
            "close" => Ok(Self::Close),
            "runtime" => Ok(Self::Runtime),
            "anew" => Ok(Self::Anew),
            _ => Err(()),
        }
    }
}
