//! What is to happen in one epoch: a value, its text, and how it follows from a seed.

use std::{fmt, num::NonZeroU32, str::FromStr};

use fastrand::Rng;
use lockkit_core::{Capabilities, spi::Mode};

use super::Fault;

/// Milliseconds.
pub type Millis = u64;

/// What a schedule may be made of.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shape {
    /// What the backend can do.
    pub capabilities: Capabilities,
    /// In how many processes clients may be. The first is the one that judges.
    pub processes: u32,
    /// The longest ttl that the deployment takes.
    pub max_ttl: Millis,
    /// What the deployment may suffer.
    pub faults: Vec<Fault>,
    /// Processes of clients are stopped, if there are several.
    pub stops: bool,
    /// They are killed.
    pub kills: bool,
    /// Clients lose their runtimes.
    pub runtimes: bool,
}

impl Shape {
    /// One process, a ttl of up to a minute, no faults.
    pub fn new(capabilities: Capabilities) -> Self {
        Self {
            capabilities,
            processes: 1,
            max_ttl: 60_000,
            faults: Vec::new(),
            stops: true,
            kills: true,
            runtimes: true,
        }
    }
}

/// One epoch: clients, what their tasks do and when, and what befalls the deployment meanwhile. Ends in a quiet point.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Schedule {
    /// What it was made from.
    pub seed: u64,
    /// From when on nothing new begins.
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
    /// What becomes of it before the end of the epoch, and when.
    pub fate: Option<(Millis, Fate)>,
}

/// What becomes of a client.
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
    /// What it does.
    pub steps: Vec<Step>,
}

/// One acquisition, or a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Not before this.
    pub at: Millis,
    /// The number of the lock, or of the semaphore.
    pub name: u32,
    /// How it is to be held.
    pub hold_as: HoldAs,
    /// The lease.
    pub ttl: Millis,
    /// The local hand-offs; `None` where a backend refuses them.
    pub handoffs: Option<u32>,
    /// Whether the lease is renewed.
    pub renew: bool,
    /// Whether it has a label.
    pub label: bool,
    /// How it asks.
    pub ask: Ask,
    /// For how long it holds.
    pub hold: Millis,
    /// How the hold ends.
    pub end: End,
}

/// How a name is to be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldAs {
    /// A lock, alone.
    Exclusive,
    /// A lock, with others.
    Shared,
    /// A permit of a semaphore.
    Permit,
}

/// How a step asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// For as long as it takes.
    Wait,
    /// For so long.
    Within(Millis),
    /// Once.
    Try,
    /// Drops its future after so long.
    CancelAfter(Millis),
    /// Drops its future after so many polls.
    CancelPolls(u32),
    /// Polls its future so many times, and drops it after the time for which it would hold.
    Unpolled(u32),
    /// This and the next locks, all or none, within so long.
    All(Millis),
    /// Twice, by the same owner.
    Twice,
    /// Asks who holds.
    Inspect,
    /// Ends the hold of whoever holds.
    Revoke,
}

/// How a hold ends.
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
}

/// A fault: something that befalls the deployment or a process of clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strike {
    /// When.
    pub at: Millis,
    /// Which fault, by its name: [`STOP`], [`KILL`] or one of the deployment's.
    pub fault: String,
    /// Where: the number of the process, of the server, or of the way to it.
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
        let mut rng = Rng::with_seed(seed);
        let rng = &mut rng;
        let span = match rng.u8(0..10) {
            0..6 => rng.u64(2_000..5_000),
            6..8 => rng.u64(5_000..12_000),
            _ => rng.u64(18_000..30_000),
        };
        let processes = if shape.processes > 1 {
            rng.u32(1..=shape.processes)
        } else {
            1
        };
        let mut schedule = Self {
            seed,
            span,
            ..Self::default()
        };
        if shape.capabilities.permits && rng.u8(0..3) == 0 {
            schedule.sizes.push(choice(rng, &[1, 2, 3, 5]));
        }
        schedule.strikes = strikes(rng, shape, span, processes);
        let deadly = schedule.strikes.iter().any(|strike| strike.fault == KILL);
        let mood = Mood::new(rng, shape, &schedule, deadly);
        for id in 0..rng.u32(2..=if mood.crowd == 1 { 8 } else { 6 }) {
            let fate = match rng.u8(0..20) {
                0 => Some(Fate::Close),
                1 if shape.runtimes => Some(Fate::Runtime),
                2 => Some(Fate::Anew),
                _ => None,
            };
            schedule.clients.push(ClientPlan {
                id,
                process: rng.u32(0..processes),
                fate: fate.map(|fate| (rng.u64(span / 10..span), fate)),
            });
            for _ in 0..rng.u32(1..=mood.crowd) {
                let steps = steps(rng, &mood, span);
                let (id, client) = (u32::try_from(schedule.tasks.len()).unwrap_or(u32::MAX), id);
                schedule.tasks.push(TaskPlan { id, client, steps });
            }
        }
        schedule
    }

    /// How a step holds, as the backend's contract has it. `None` for a semaphore that the schedule does not have.
    pub(super) fn mode(&self, step: &Step) -> Option<Mode> {
        Some(match step.hold_as {
            HoldAs::Exclusive => Mode::Exclusive,
            HoldAs::Shared => Mode::Shared,
            HoldAs::Permit => Mode::Permits(NonZeroU32::new(*self.sizes.get(step.name as usize)?)?),
        })
    }

    /// Whether somebody who holds or waits may vanish without a word.
    pub(super) fn is_harmless(&self) -> bool {
        let lives = |client: &ClientPlan| !matches!(client.fate, Some((_, Fate::Runtime)));
        self.strikes.is_empty() && self.clients.iter().all(lives)
    }
}

/// What the steps of one schedule have in common.
struct Mood {
    ttls: Vec<Millis>,
    locks: u32,
    sizes: u32,
    /// Of 10, how many ask for a shared hold.
    shared: u8,
    handoffs: Vec<Option<u32>>,
    /// Many short holds.
    busy: bool,
    /// How many tasks a client has at most.
    crowd: u32,
    all: bool,
    revokes: bool,
}

impl Mood {
    fn new(rng: &mut Rng, shape: &Shape, schedule: &Schedule, deadly: bool) -> Self {
        let most = shape.max_ttl;
        let short = 0..rng.usize(1..=3);
        let mut ttls: Vec<_> = short.map(|_| log_uniform(rng, 500, 6_000.min(most))).collect();
        // A dead holder keeps its name for its ttl, which somebody has to wait for.
        if !deadly && rng.u8(0..10) < 4 {
            ttls.push(log_uniform(rng, 8_000.min(most), most));
        }
        let handoffs = match (shape.capabilities.local_handoffs, rng.u8(0..10)) {
            (false, _) => vec![None],
            (true, 0..6) => vec![Some(0)],
            (true, 6..8) => vec![None, Some(32)],
            (true, _) => vec![None, Some(0), Some(1_000)],
        };
        Self {
            ttls,
            locks: choice(rng, &[1, 1, 1, 2, 3]),
            sizes: u32::try_from(schedule.sizes.len()).unwrap_or_default(),
            shared: if shape.capabilities.shared {
                choice(rng, &[0, 3, 6])
            } else {
                0
            },
            handoffs,
            busy: rng.bool(),
            crowd: choice(rng, &[1, 1, 2, 3, 6]),
            all: rng.u8(0..3) == 0,
            revokes: shape.capabilities.revoke && rng.u8(0..6) == 0,
        }
    }
}

fn steps(rng: &mut Rng, mood: &Mood, span: Millis) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut at = rng.u64(0..span / 2);
    while at < span && steps.len() < if mood.busy { 1_000 } else { 200 } {
        let permit = mood.sizes > 0 && rng.u8(0..10) < 4;
        let hold_as = match permit {
            true => HoldAs::Permit,
            false if rng.u8(0..10) < mood.shared => HoldAs::Shared,
            false => HoldAs::Exclusive,
        };
        let hold = match rng.u8(0..20) {
            0..12 if mood.busy => 0,
            12..19 if mood.busy => rng.u64(0..6),
            _ if mood.busy => rng.u64(5..300),
            0..7 => 0,
            7..14 => rng.u64(1..50),
            14..18 => rng.u64(50..1_000),
            _ => rng.u64(1_000..span.max(2_000)),
        };
        let ask = match rng.u8(0..100) {
            0..35 => Ask::Wait,
            35..52 => Ask::Within(log_uniform(rng, 10, 5_000)),
            52..66 => Ask::Try,
            66..72 => Ask::CancelAfter(log_uniform(rng, 1, 3_000)),
            72..84 => Ask::CancelPolls(rng.u32(1..8)),
            84..87 => Ask::Unpolled(rng.u32(1..5)),
            87..91 if mood.all && !permit => Ask::All(log_uniform(rng, 50, 4_000)),
            91..94 => Ask::Twice,
            94..97 if mood.revokes => Ask::Revoke,
            _ => Ask::Inspect,
        };
        steps.push(Step {
            at,
            name: rng.u32(0..if permit { mood.sizes } else { mood.locks }),
            hold_as,
            ttl: choice(rng, &mood.ttls),
            handoffs: choice(rng, &mood.handoffs),
            renew: rng.u8(0..8) > 0,
            label: rng.u8(0..3) == 0,
            ask,
            hold,
            end: match rng.u8(0..40) {
                0..26 => End::Release,
                26..36 => End::Drop,
                36..39 => End::HalfRelease,
                _ => End::Forget,
            },
        });
        at += match rng.u8(0..10) {
            0..8 if mood.busy => 0,
            _ if mood.busy => rng.u64(1..100),
            0..4 => 0,
            4..8 => rng.u64(0..50),
            _ => rng.u64(50..span / 2),
        };
        // It is no plan to do more than there is time for.
        at += hold.min(span / 4);
    }
    steps
}

fn strikes(rng: &mut Rng, shape: &Shape, span: Millis, processes: u32) -> Vec<Strike> {
    let mut kinds: Vec<(&str, u32)> = Vec::new();
    for fault in &shape.faults {
        for _ in 0..fault.weight {
            kinds.push((fault.name, fault.places));
        }
    }
    if processes > 1 && shape.stops {
        kinds.extend([(STOP, processes), (STOP, processes)]);
    }
    if processes > 1 && shape.kills {
        kinds.push((KILL, processes));
    }
    if kinds.is_empty() {
        return Vec::new();
    }
    let mut strikes = Vec::new();
    // The same few kinds in a schedule, so that they meet.
    let kinds: Vec<_> = (0..rng.u32(1..=3)).map(|_| choice(rng, &kinds)).collect();
    for _ in 0..choice(rng, &[0, 0, 1, 1, 2, 2, 3, 5]) {
        let (fault, places) = choice(rng, &kinds);
        let of_a_process = fault == STOP || fault == KILL;
        let most = if of_a_process { span } else { span / 2 };
        strikes.push(Strike {
            at: rng.u64(span / 20..span * 9 / 10),
            fault: fault.to_owned(),
            // The process that judges goes on.
            place: if of_a_process {
                rng.u32(1..places)
            } else {
                rng.u32(0..places.max(1))
            },
            lasts: log_uniform(rng, 20, most),
        });
    }
    strikes.sort_by_key(|strike| strike.at);
    strikes
}

fn choice<T: Clone>(rng: &mut Rng, among: &[T]) -> T {
    among[rng.usize(0..among.len())].clone()
}

/// As often between 1 and 10 as between 10 and 100.
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

    /// What the parts say of each other.
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
        }
        Ok(())
    }
}

/// `at name hold_as ttl handoffs renew label ask hold end`
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let handoffs = self.handoffs.map_or_else(|| "-".to_owned(), |n| n.to_string());
        let hold_as = match self.hold_as {
            HoldAs::Exclusive => "exclusive",
            HoldAs::Shared => "shared",
            HoldAs::Permit => "permit",
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
            Ask::Twice => write!(f, "twice"),
            Ask::Inspect => write!(f, "inspect"),
            Ask::Revoke => write!(f, "revoke"),
        }?;
        let end = match self.end {
            End::Release => "release",
            End::Drop => "drop",
            End::Forget => "forget",
            End::HalfRelease => "half-release",
        };
        write!(f, " {} {end}", self.hold)
    }
}

fn parse_step(words: &[&str]) -> Option<Step> {
    let [at, name, hold_as, ttl, handoffs, renew, label, ask, hold, end] = *words else {
        return None;
    };
    let flag = |word: &str| match word {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    };
    let (ask, figure) = ask.split_once(':').unwrap_or((ask, ""));
    Some(Step {
        at: at.parse().ok()?,
        name: name.parse().ok()?,
        hold_as: match hold_as {
            "exclusive" => HoldAs::Exclusive,
            "shared" => HoldAs::Shared,
            "permit" => HoldAs::Permit,
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
            "twice" => Ask::Twice,
            "inspect" => Ask::Inspect,
            "revoke" => Ask::Revoke,
            _ => return None,
        },
        hold: hold.parse().ok()?,
        end: match end {
            "release" => End::Release,
            "drop" => End::Drop,
            "forget" => End::Forget,
            "half-release" => End::HalfRelease,
            _ => return None,
        },
    })
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
