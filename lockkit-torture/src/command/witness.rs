//! The command under the lock. It appends to a file when it begins, every few milliseconds while it goes on, and when it ends.

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::PathBuf,
    process::{Command, Stdio},
    str::FromStr,
    time::Duration,
};

use rustix::{
    process::{Pid, Signal, getpgid, getpgrp, getpid, getppid, kill_process, setpgid, setsid},
    time::{ClockId, clock_gettime},
};
use tokio::{
    runtime,
    signal::unix::{self, SignalKind},
    time::{Instant, interval},
};

/// The environment variable that makes a program a witness, and says which.
pub const SPEC: &str = "LOCKKIT_TORTURE_WITNESS";

/// The pause between two lines.
const TICK: Duration = Duration::from_millis(15);
/// For how long what a command has started goes on.
const KID_LASTS: Duration = Duration::from_secs(6);

/// Returns the time by the clock of all lines, in microseconds.
pub(super) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000
}

/// What a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Act {
    pub(super) lasts: Duration,
    /// The status that it exits with.
    pub(super) code: u8,
    pub(super) upon_term: UponTerm,
    pub(super) place: Place,
    pub(super) kid: Kid,
    /// Closes all descriptors before it begins.
    pub(super) closes: bool,
    /// Stops itself in the middle.
    pub(super) stops: bool,
}

impl Act {
    /// Keeps it out of its parent's process group: without lockkit that is the group of whoever plays. When the last one in a group ends
    /// that has a parent in another group of the session, and something in it is stopped, the system sends HUP to all of the group.
    pub(super) fn keep_out(&mut self) {
        if self.place == Place::Joins {
            self.place = Place::Stays;
        }
        if self.kid == Kid::Joins {
            self.kid = Kid::Plain;
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UponTerm {
    Default,
    Ignore,
    /// Exits with [`AFTER_TERM`], so long after it.
    Exit(Duration),
}

/// The status of a command that ends upon TERM.
pub(super) const AFTER_TERM: u8 = 7;

/// Where the command goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Stays,
    /// To lockkit's process group.
    Joins,
    /// To a process group of its own.
    Leaves,
    /// To a session of its own, if it may.
    Session,
}

/// What the command starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kid {
    None,
    Plain,
    /// One that ignores TERM.
    Stubborn,
    /// One whose parent ends at once.
    Orphan,
    /// One in lockkit's process group.
    Joins,
    /// One in a process group of its own, out of reach.
    Leaves,
    /// One in a session of its own, out of reach.
    Session,
}

const PLACES: [Place; 4] = [Place::Stays, Place::Joins, Place::Leaves, Place::Session];
const KIDS: [Kid; 7] = [
    Kid::None,
    Kid::Plain,
    Kid::Stubborn,
    Kid::Orphan,
    Kid::Joins,
    Kid::Leaves,
    Kid::Session,
];

/// Which witness a process is.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    /// The number of the run.
    pub(super) run: usize,
    pub(super) act: Act,
    /// The groups that lockkit reaches, if this is a kid.
    pub(super) reach: Option<[i32; 2]>,
    pub(super) log: PathBuf,
}

impl Spec {
    /// Returns the value of [`SPEC`].
    pub(super) fn encode(&self) -> String {
        let Act {
            lasts,
            code,
            upon_term,
            place,
            kid,
            stops,
            closes: _,
        } = self.act;
        let term = match upon_term {
            UponTerm::Default => -1,
            UponTerm::Ignore => -2,
            UponTerm::Exit(after) => i64::try_from(after.as_millis()).unwrap_or(0),
        };
        let place = PLACES.iter().position(|it| *it == place).unwrap_or(0);
        let kid = KIDS.iter().position(|it| *it == kid).unwrap_or(0);
        let [one, other] = self.reach.unwrap_or([0, 0]);
        format!(
            "{} {} {code} {term} {place} {kid} {} {one} {other} {}",
            self.run,
            lasts.as_millis(),
            u8::from(stops),
            self.log.display()
        )
    }

    fn decode(text: &str) -> Option<Self> {
        fn next<T: FromStr>(words: &mut dyn Iterator<Item = &str>) -> Option<T> {
            words.next()?.parse().ok()
        }
        let words = &mut text.splitn(10, ' ');
        let run = next(words)?;
        let lasts = Duration::from_millis(next(words)?);
        let code = next(words)?;
        let upon_term = match next::<i64>(words)? {
            -1 => UponTerm::Default,
            -2 => UponTerm::Ignore,
            after => UponTerm::Exit(Duration::from_millis(u64::try_from(after).ok()?)),
        };
        let place = *PLACES.get(next::<usize>(words)?)?;
        let kid = *KIDS.get(next::<usize>(words)?)?;
        let stops = next::<u8>(words)? == 1;
        let reach = [next(words)?, next(words)?];
        Some(Self {
            run,
            act: Act {
                lasts,
                code,
                upon_term,
                place,
                kid,
                closes: false,
                stops,
            },
            reach: (reach != [0, 0]).then_some(reach),
            log: words.next()?.into(),
        })
    }
}

/// Returns whether this process is to be a witness.
pub fn is_witness() -> bool {
    env::var_os(SPEC).is_some()
}

/// Is the witness that the environment asks for, and returns the status to exit with.
///
/// # Errors
/// If it cannot say what it does.
pub fn main() -> io::Result<u8> {
    let spec = env::var(SPEC).ok().and_then(|text| Spec::decode(&text));
    let spec = spec.ok_or_else(|| io::Error::other("it is not said what to witness"))?;
    let log = OpenOptions::new().append(true).open(&spec.log)?;
    runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(Witness { spec, log }.witness())
}

struct Witness {
    spec: Spec,
    log: File,
}

impl Witness {
    /// Appends a line.
    fn say(&mut self, role: char, what: &str) -> io::Result<()> {
        let pid = getpid().as_raw_nonzero();
        let line = format!("{} {} {role} {pid} {what}\n", now(), self.spec.run);
        self.log.write_all(line.as_bytes())
    }

    async fn witness(mut self) -> io::Result<u8> {
        let Act {
            lasts,
            code,
            upon_term,
            place,
            kid,
            stops,
            ..
        } = self.spec.act;
        let mut term = match upon_term {
            UponTerm::Default => None,
            UponTerm::Ignore | UponTerm::Exit(_) => Some(unix::signal(SignalKind::terminate())?),
        };
        let role = match self.spec.reach {
            None => 'c',
            Some(reach) if reach.contains(&raw(getpgrp())) => 'k',
            Some(_) => 's',
        };
        let [ignored, blocked] = masks()?;
        self.say(role, &format!("begin {ignored:x} {blocked:x}"))?;
        if role == 'c' {
            self.settle(place)?;
            self.start(kid)?;
        }
        let until = Instant::now() + lasts;
        let middle = Instant::now() + lasts / 2;
        let mut has_stopped = !stops;
        let mut ticks = interval(TICK);
        let mut end = None;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                Some(()) = async { term.as_mut()?.recv().await } => {
                    self.say(role, "term")?;
                    if let UponTerm::Exit(after) = upon_term {
                        end.get_or_insert((Instant::now() + after, AFTER_TERM));
                    }
                }
            }
            let now = Instant::now();
            if !has_stopped && now >= middle {
                has_stopped = true;
                self.say(role, "stops")?;
                kill_process(getpid(), Signal::STOP)?;
            }
            let over = end.filter(|(at, _)| now >= *at).map(|(_, code)| code);
            let over = over.or((now >= until).then_some(code));
            if let Some(code) = over {
                self.say(role, &format!("end {code}"))?;
                return Ok(code);
            }
            self.say(role, "on")?;
        }
    }

    /// Goes where it is to be.
    fn settle(&mut self, place: Place) -> io::Result<()> {
        match place {
            Place::Stays => {}
            Place::Joins => {
                // The group may be of another session if lockkit is not the parent any more.
                if let Some(group) = getppid().and_then(|lockkit| getpgid(Some(lockkit)).ok()) {
                    let _ = setpgid(None, Some(group));
                }
            }
            Place::Leaves => _ = setpgid(None, None),
            // Refused to the leader of a group.
            Place::Session => _ = setsid(),
        }
        self.say('c', &format!("in {}", raw(getpgrp())))
    }

    fn start(&mut self, kid: Kid) -> io::Result<()> {
        if kid == Kid::None {
            return Ok(());
        }
        let program = env::current_exe()?;
        let arguments = env::args_os().skip(1);
        let mut command = match kid {
            Kid::Orphan => {
                let mut command = Command::new("sh");
                command.args(["-c", "\"$0\" \"$@\" &"]).arg(program);
                command
            }
            Kid::Session => {
                let mut command = Command::new("setsid");
                command.arg(program);
                command
            }
            _ => Command::new(program),
        };
        let lockkits = getppid().and_then(|lockkit| getpgid(Some(lockkit)).ok());
        let lockkits = lockkits.map_or(0, raw);
        // In this very group it is in reach if the command is where it was begun.
        let own = match self.spec.act.place {
            Place::Stays => raw(getpgrp()),
            Place::Joins | Place::Leaves | Place::Session => lockkits,
        };
        let spec = Spec {
            run: self.spec.run,
            act: Act {
                lasts: KID_LASTS,
                code: 0,
                upon_term: if kid == Kid::Stubborn {
                    UponTerm::Ignore
                } else {
                    UponTerm::Default
                },
                place: Place::Stays,
                kid: Kid::None,
                closes: false,
                stops: false,
            },
            reach: Some([lockkits, own]),
            log: self.spec.log.clone(),
        };
        command.args(arguments).env(SPEC, spec.encode());
        if kid == Kid::Leaves {
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
        }
        if kid == Kid::Joins && lockkits != 0 {
            std::os::unix::process::CommandExt::process_group(&mut command, lockkits);
        }
        match command.stdin(Stdio::null()).spawn() {
            Ok(_) => Ok(()),
            // There may be no descriptor left, or no such group.
            Err(error) => self.say('c', &format!("no kid: {error}")),
        }
    }
}

fn raw(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

/// Returns which signals this process ignores, and which are blocked.
fn masks() -> io::Result<[u64; 2]> {
    let status = fs::read_to_string("/proc/thread-self/status")?;
    Ok(["SigIgn:", "SigBlk:"].map(|name| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .unwrap_or(0)
    }))
}
