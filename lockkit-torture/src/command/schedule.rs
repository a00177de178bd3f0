//! Schedules, which follow from a seed.

use std::{fmt, time::Duration};

use fastrand::Rng;
use lockkit_conformance::torture::{Strike, Target};
use rustix::process::Signal;

use super::witness::{Act, Kid, Place, UponTerm};

/// Some seconds of `lockkit run`: who competes for one name, in which surroundings, and what befalls them.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// The seed that it follows from.
    pub seed: u64,
    pub(super) span: Duration,
    pub(super) ttl: Duration,
    pub(super) runs: Vec<Run>,
    pub(super) strikes: Vec<Strike>,
}

/// One process of `lockkit run`.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) at: Duration,
    pub(super) patience: Patience,
    pub(super) foreground: bool,
    pub(super) max_hold: Option<Duration>,
    pub(super) around: Surroundings,
    pub(super) command: Command,
    pub(super) bursts: Vec<Burst>,
}

/// For how long it waits for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    Ever,
    Wait(Duration),
    Try,
}

/// What its command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Witness(Act),
    /// There is no such program.
    Missing,
    /// It is a directory.
    NotExecutable,
}

/// What lockkit finds where it is started.
#[derive(Clone, Debug)]
pub(super) struct Surroundings {
    pub(super) stdin: Stream,
    pub(super) stdout: Stream,
    pub(super) stderr: Stream,
    /// The limit on open files.
    pub(super) descriptors: Option<u32>,
    pub(super) ignored: Vec<Signal>,
    pub(super) blocked: Vec<Signal>,
    pub(super) session: Session,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    /// `/dev/null`, or for standard error a pipe that is read.
    Plain,
    /// A pipe that is full, and that nobody reads.
    Full,
    /// A pipe whose reader has gone.
    Broken,
    /// `/dev/full`
    NoSpace,
    /// None.
    Closed,
    /// The terminal that lockkit has, or else a pipe that is read.
    Terminal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Session {
    /// A process group of its own in the session of the caller.
    Group,
    /// A session of its own, without a terminal.
    Bare,
    /// A session of its own, in the foreground of a pseudo-terminal.
    Terminal,
}

/// Signals, one right after the other.
#[derive(Clone, Debug)]
pub(super) struct Burst {
    /// The time since lockkit began to listen to signals.
    pub(super) at: Duration,
    pub(super) signals: Vec<Shot>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Shot {
    pub(super) to: Whom,
    pub(super) signal: Signal,
    /// The pause after it.
    pub(super) pause: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whom {
    Lockkit,
    /// Lockkit's process group, which the command may be in.
    Group,
    Command,
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn one_in(rng: &mut Rng, n: u32) -> bool {
    rng.u32(..n) == 0
}

fn any<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.usize(..of.len())]
}

/// Signals that may be ignored from the start.
const IGNORED: [Signal; 8] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::USR1,
    Signal::ALARM,
    Signal::WINCH,
    Signal::CHILD,
    Signal::TTOU,
];
/// Signals that may be blocked from the start. Who has blocked what ends a process cannot be ended by it.
const BLOCKED: [Signal; 3] = [Signal::USR2, Signal::WINCH, Signal::CHILD];
const SENT: [Signal; 7] = [
    Signal::TERM,
    Signal::INT,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::WINCH,
    Signal::TTOU,
];

impl Schedule {
    /// Returns the schedule of this seed for `target`.
    pub fn generate(seed: u64, target: &dyn Target) -> Self {
        let mut schedule = Self::without_later(seed, target);
        Strike::turn_later(&mut schedule.strikes, seed, &target.faults());
        schedule
    }

    /// Returns the schedule of this seed without the faults that came to `target` later.
    pub fn without_later(seed: u64, target: &dyn Target) -> Self {
        let rng = &mut Rng::with_seed(seed);
        let ttl = ms(any(rng, &[1_500, 2_000, 3_000])).max(target.min_ttl());
        let span = ms(rng.u64(2_500..5_000)) + ttl / 2;
        let count = rng.usize(2..=3);
        let strikes = strikes(rng, target, span, ttl);
        let runs = (0..count).map(|place| Run::generate(rng, place, ttl)).collect();
        Self {
            seed,
            span,
            ttl,
            runs,
            strikes,
        }
    }
}

fn strikes(rng: &mut Rng, target: &dyn Target, span: Duration, ttl: Duration) -> Vec<Strike> {
    let mut faults = target.faults();
    faults.retain(|fault| !fault.later);
    let weights: u32 = faults.iter().map(|fault| fault.weight).sum();
    if weights == 0 {
        return Vec::new();
    }
    let mut strikes = Vec::new();
    for _ in 0..any(rng, &[0, 1, 1, 1, 2]) {
        let mut chosen = rng.u32(..weights);
        let fault = faults.iter().find(|fault| {
            let is_it = chosen < fault.weight;
            chosen = chosen.saturating_sub(fault.weight);
            is_it
        });
        let Some(fault) = fault else { continue };
        let half = u64::try_from(span.as_millis()).unwrap_or(u64::MAX) / 2;
        let ttl = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let lasts = if rng.bool() {
            rng.u64(50..ttl)
        } else {
            rng.u64(ttl..ttl * 2)
        };
        strikes.push(Strike {
            at: rng.u64(200..200 + half),
            fault: fault.name.to_owned(),
            place: rng.u32(..fault.places),
            lasts,
        });
    }
    strikes
}

impl Run {
    fn generate(rng: &mut Rng, place: usize, ttl: Duration) -> Self {
        let patience = match rng.u32(..6) {
            0 => Patience::Try,
            1 => Patience::Wait(ms(rng.u64(100..3_000))),
            _ => Patience::Ever,
        };
        let bursts = if one_in(rng, 3) {
            Vec::new()
        } else {
            (0..rng.usize(1..=2)).map(|_| Burst::generate(rng)).collect()
        };
        Self {
            // The first is there first more often than not.
            at: if place == 0 { ms(0) } else { ms(rng.u64(0..1_500)) },
            patience,
            foreground: one_in(rng, 4),
            max_hold: one_in(rng, 10).then(|| ttl + ms(rng.u64(0..1_000))),
            around: Surroundings::generate(rng),
            command: Command::generate(rng, ttl),
            bursts,
        }
    }
}

impl Surroundings {
    fn generate(rng: &mut Rng) -> Self {
        const ODD: [Stream; 5] = [
            Stream::Full,
            Stream::Broken,
            Stream::NoSpace,
            Stream::Closed,
            Stream::Terminal,
        ];
        let session = match rng.u32(..5) {
            0 => Session::Bare,
            1 => Session::Terminal,
            _ => Session::Group,
        };
        let stderr = match rng.u32(..8) {
            0 | 1 => Stream::Full,
            2 | 3 => any(rng, &ODD),
            _ => Stream::Plain,
        };
        let odd = |rng: &mut Rng| {
            if one_in(rng, 3) {
                any(rng, &ODD)
            } else {
                Stream::Plain
            }
        };
        let some = |rng: &mut Rng, of: &[Signal]| {
            let mut some = of.to_vec();
            some.retain(|_| rng.bool());
            some
        };
        Self {
            stdin: odd(rng),
            stdout: odd(rng),
            stderr,
            descriptors: one_in(rng, 6).then(|| rng.u32(12..40)),
            ignored: if one_in(rng, 4) {
                some(rng, &IGNORED)
            } else {
                Vec::new()
            },
            blocked: if one_in(rng, 8) {
                some(rng, &BLOCKED)
            } else {
                Vec::new()
            },
            session,
        }
    }
}

impl Command {
    fn generate(rng: &mut Rng, ttl: Duration) -> Self {
        match rng.u32(..30) {
            0 => return Self::Missing,
            1 => return Self::NotExecutable,
            _ => {}
        }
        let lasts = match rng.u32(..4) {
            0 => ms(rng.u64(1..100)),
            1 => ttl * 4,
            _ => ms(rng.u64(100..2_500)),
        };
        let upon_term = match rng.u32(..4) {
            0 | 1 => UponTerm::Default,
            2 => UponTerm::Ignore,
            _ => UponTerm::Exit(ms(rng.u64(0..300))),
        };
        let place = any(
            rng,
            &[
                Place::Stays,
                Place::Stays,
                Place::Stays,
                Place::Joins,
                Place::Leaves,
                Place::Session,
            ],
        );
        let kid = any(
            rng,
            &[
                Kid::None,
                Kid::None,
                Kid::Plain,
                Kid::Stubborn,
                Kid::Orphan,
                Kid::Joins,
                Kid::Leaves,
                Kid::Session,
            ],
        );
        Self::Witness(Act {
            lasts,
            code: any(rng, &[0, 0, 3, 255]),
            upon_term,
            place,
            kid,
            closes: one_in(rng, 8),
            stops: one_in(rng, 12),
        })
    }

    pub(super) fn act(&self) -> Option<&Act> {
        match self {
            Self::Witness(act) => Some(act),
            Self::Missing | Self::NotExecutable => None,
        }
    }
}

impl Burst {
    fn generate(rng: &mut Rng) -> Self {
        let mut signals = Vec::new();
        let whom = |rng: &mut Rng| any(rng, &[Whom::Lockkit, Whom::Lockkit, Whom::Group, Whom::Command]);
        let soon = |rng: &mut Rng| Duration::from_micros(rng.u64(0..500));
        match rng.u32(..4) {
            // A stop that is taken back at once.
            0 => {
                let to = any(rng, &[Whom::Lockkit, Whom::Group]);
                for _ in 0..rng.u32(1..4) {
                    for signal in [Signal::TSTP, Signal::CONT] {
                        let pause = soon(rng);
                        signals.push(Shot { to, signal, pause });
                    }
                }
            }
            // A stop that lasts.
            1 => {
                let stop = if one_in(rng, 3) {
                    Signal::TTOU
                } else {
                    Signal::TSTP
                };
                let pause = ms(rng.u64(100..4_000));
                let to = any(rng, &[Whom::Lockkit, Whom::Lockkit, Whom::Group]);
                signals.push(Shot {
                    to,
                    signal: stop,
                    pause,
                });
                signals.push(Shot {
                    to,
                    signal: Signal::CONT,
                    pause: soon(rng),
                });
            }
            _ => {
                for _ in 0..rng.u32(1..5) {
                    let mut signal = any(rng, &SENT);
                    let to = whom(rng);
                    if signal == Signal::TTOU {
                        // Else somebody would have to continue it.
                        signal = Signal::CONT;
                    }
                    let pause = soon(rng);
                    signals.push(Shot { to, signal, pause });
                }
            }
        }
        Self {
            at: ms(rng.u64(0..2_500)),
            signals,
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}, for {:?}, with a ttl of {:?}",
            self.seed, self.span, self.ttl
        )?;
        for (number, run) in self.runs.iter().enumerate() {
            writeln!(
                f,
                "run {number} at {:?}: {:?}, foreground {}, max_hold {:?}\n  {:?}\n  {:?}",
                run.at, run.patience, run.foreground, run.max_hold, run.around, run.command
            )?;
            for burst in &run.bursts {
                write!(f, "  after {:?}:", burst.at)?;
                for Shot { to, signal, pause } in &burst.signals {
                    write!(f, " {signal:?} to {to:?}, {pause:?}")?;
                }
                writeln!(f)?;
            }
        }
        for strike in &self.strikes {
            let Strike {
                at,
                fault,
                place,
                lasts,
            } = strike;
            writeln!(f, "at {at} ms: {fault} at place {place} for {lasts} ms")?;
        }
        Ok(())
    }
}
