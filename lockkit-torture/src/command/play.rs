//! Plays a schedule, and records what happens.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs, io,
    path::Path,
    process::ExitStatus,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use lockkit_conformance::{
    stall::Stopwatch,
    torture::{Strike, Target},
};
use rustix::process::{
    Pid, PidfdFlags, Signal, getpgid, kill_process, kill_process_group, pidfd_open, pidfd_send_signal,
};

use super::{
    Programs,
    schedule::{Command, Patience, Run, Schedule, Shot, Whom},
    surroundings,
    witness::{Act, SPEC, Spec, now},
};

/// The bound on one exchange with the server, which the URLs say.
pub(super) const OP_TIMEOUT: Duration = Duration::from_secs(1);
/// For how long lockkit may stay when its wait or its command has ended: [`OP_TIMEOUT`], 0.4 s, a second for a client that is kept
/// busy and another for a reader of standard error, and as much again for a busy machine.
pub(super) const ENDS_WITHIN: Duration = Duration::from_secs(7);
/// The time that a command gets after the TERM that ends a schedule.
const GETS: Duration = Duration::from_millis(1_500);
/// A pause that is longer is no part of a burst.
const AT_ONCE: Duration = Duration::from_millis(5);
const LOOK: Duration = Duration::from_millis(2);
/// From a signal that continues a process to a look at whether it goes on.
const GOES_ON_WITHIN: Duration = Duration::from_secs(2);

/// All that happened.
#[derive(Debug)]
pub(super) struct Record {
    /// What the witnesses have said, in order.
    pub(super) lines: Vec<Line>,
    pub(super) runs: Vec<Played>,
    pub(super) strikes: Vec<Struck>,
    /// For how long the machine has stood still.
    pub(super) stood_still: Duration,
    /// The time at which the schedule began.
    pub(super) began: u64,
    /// The runs were without a lock.
    pub(super) unprotected: bool,
}

/// A line of a witness.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) at: u64,
    pub(super) run: usize,
    /// `c` is the command, `k` is what it has started and lockkit reaches, `s` is out of reach.
    pub(super) role: char,
    pub(super) pid: i32,
    pub(super) what: String,
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(5, ' ');
        Some(Self {
            at: words.next()?.parse().ok()?,
            run: words.next()?.parse().ok()?,
            role: words.next()?.parse().ok()?,
            pid: words.next()?.parse().ok()?,
            what: words.next()?.to_owned(),
        })
    }
}

/// A run, as it was seen from outside.
#[derive(Debug, Default)]
pub(super) struct Played {
    pub(super) pid: i32,
    /// When it had begun to listen to signals.
    pub(super) listens: Option<u64>,
    pub(super) sent: Vec<Sent>,
    pub(super) ended: Option<u64>,
    pub(super) status: Option<ExitStatus>,
    /// What it has said, where that is read.
    pub(super) said: Option<String>,
    /// What was there of the command when lockkit had ended.
    pub(super) left: Vec<String>,
    /// What was stopped and should not have been.
    pub(super) stopped: Vec<String>,
    /// When what it ran was killed, so that the schedule ends.
    pub(super) killed: Option<u64>,
    /// It did not end.
    pub(super) hung: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) at: u64,
    pub(super) to: Whom,
    pub(super) signal: Signal,
}

/// A fault that happened.
#[derive(Debug)]
pub(super) struct Struck {
    pub(super) strike: Strike,
    pub(super) at: u64,
    pub(super) healed: u64,
}

/// The stage of a schedule.
struct Stage<'a> {
    programs: &'a Programs,
    schedule: &'a Schedule,
    urls: Vec<String>,
    log: &'a Path,
    began: Instant,
    over: AtomicBool,
}

pub(super) fn play(target: &dyn Target, programs: &Programs, schedule: &Schedule) -> io::Result<Record> {
    let directory = tempfile::tempdir()?;
    let log = directory.path().join("witness");
    fs::write(&log, "")?;
    let watch = Stopwatch::start();
    let began = now();
    let stage = Stage {
        programs,
        schedule,
        urls: target.routes(),
        log: &log,
        began: Instant::now(),
        over: AtomicBool::new(false),
    };
    let (runs, strikes) = thread::scope(|scope| {
        let runs: Vec<_> = (0..schedule.runs.len())
            .map(|number| {
                let stage = &stage;
                scope.spawn(move || stage.attend(number))
            })
            .collect();
        let strikes = stage.strikes(target);
        stage.over.store(true, Ordering::SeqCst);
        let runs: Vec<_> = runs
            .into_iter()
            .map(|run| {
                run.join()
                    .unwrap_or_else(|_| Err(io::Error::other("a run was not attended")))
            })
            .collect();
        (runs, strikes)
    });
    let runs = runs.into_iter().collect::<io::Result<_>>()?;
    let said = fs::read_to_string(&log)?;
    Ok(Record {
        lines: said.lines().filter_map(Line::parse).collect(),
        runs,
        strikes: strikes?,
        stood_still: watch.stood_still(),
        began,
        unprotected: programs.lockkit.is_none(),
    })
}

impl Stage<'_> {
    /// Has the faults befall the servers, and heals them in the end.
    fn strikes(&self, target: &dyn Target) -> io::Result<Vec<Struck>> {
        let Schedule { strikes, span, .. } = self.schedule;
        let names = [self.name()];
        let faults = target.faults();
        let is_lasting = |strike: &Strike| {
            let mut faults = faults.iter();
            faults.any(|fault| fault.name == strike.fault && fault.lasting)
        };
        let mut events = Vec::new();
        for (place, strike) in strikes.iter().enumerate() {
            let at = Duration::from_millis(strike.at);
            let lasts = if is_lasting(strike) {
                *span
            } else {
                Duration::from_millis(strike.lasts)
            };
            events.push((at, place, true));
            events.push(((at + lasts).min(*span), place, false));
        }
        events.sort();
        let mut struck: Vec<Struck> = Vec::new();
        let mut failed = None;
        for (at, place, begins) in events {
            self.sleep_until(at);
            let strike = &strikes[place];
            let done = if begins {
                let at = now();
                struck.push(Struck {
                    strike: strike.clone(),
                    at,
                    healed: u64::MAX,
                });
                target.strike(strike, &names)
            } else {
                let healed = target.heal(strike);
                let open = struck
                    .iter_mut()
                    .find(|it| it.strike == *strike && it.healed == u64::MAX);
                if let Some(open) = open {
                    open.healed = now();
                }
                healed
            };
            // All that was begun is healed before that is said.
            if let Err(error) = done {
                failed.get_or_insert(error);
            }
        }
        self.sleep_until(*span);
        failed.map_or(Ok(struck), Err)
    }

    fn sleep_until(&self, at: Duration) {
        thread::sleep(at.saturating_sub(self.began.elapsed()));
    }

    fn name(&self) -> String {
        format!("torture-{}", self.schedule.seed)
    }

    /// Starts a run, sends it what it is to get, and sees it end.
    fn attend(&self, number: usize) -> io::Result<Played> {
        let run = &self.schedule.runs[number];
        self.sleep_until(run.at);
        let (program, arguments) = self.command_line(number);
        let mut act = run.command.act().copied().unwrap_or(NO_ACT);
        if self.programs.lockkit.is_none() {
            act.keep_out();
        }
        let spec = Spec {
            run: number,
            act,
            reach: None,
            log: self.log.to_owned(),
        };
        let environment = [
            (SPEC, spec.encode().into()),
            ("LOCKKIT_URL", OsString::from(self.url(number))),
        ];
        let mut started = surroundings::start(&run.around, &program, &arguments, &environment)?;
        let pid = i32::try_from(started.child.id()).map_err(io::Error::other)?;
        let mut played = Played {
            pid,
            ..Played::default()
        };
        let mut shots = timeline(run);
        let mut listens: Option<Instant> = None;
        let mut over: Option<Instant> = None;
        let mut told = false;
        loop {
            if let Some(status) = started.child.try_wait()? {
                played.ended = Some(now());
                played.status = Some(status);
                break;
            }
            if listens.is_none() && listens_to_signals(pid) {
                listens = Some(Instant::now());
                played.listens = Some(now());
            }
            if over.is_none()
                && let Some(listens) = listens
                && shots.front().is_some_and(|(at, _)| listens.elapsed() >= *at)
                && let Some((_, shots)) = shots.pop_front()
            {
                for shot in shots {
                    self.shoot(number, shot, &mut played);
                    thread::sleep(shot.pause);
                }
                continue;
            }
            if over.is_none() && self.over.load(Ordering::SeqCst) {
                over = Some(Instant::now());
                played.stopped = self.wrongly_stopped(number, &played);
                for to in [Whom::Lockkit, Whom::Command] {
                    self.shoot(number, shot(to, Signal::CONT), &mut played);
                }
            }
            if let Some(over) = over {
                let for_so_long = over.elapsed();
                if !told && (played.listens.is_some() || for_so_long > GETS) {
                    told = true;
                    self.shoot(number, shot(Whom::Lockkit, Signal::TERM), &mut played);
                    if self.programs.lockkit.is_none() {
                        played.killed = Some(now());
                        started.child.kill()?;
                    }
                }
                if for_so_long > GETS {
                    let killed = self.kill_all(number, Some(pid));
                    if killed > 0 {
                        played.killed.get_or_insert(now());
                    }
                }
                if for_so_long > GETS + ENDS_WITHIN {
                    played.hung = true;
                    started.child.kill()?;
                }
            }
            thread::sleep(LOOK);
        }
        played.left = self.family(number).into_iter().map(|(_, what)| what).collect();
        while self.kill_all(number, None) > 0 {
            thread::sleep(LOOK);
        }
        played.said = started.said();
        Ok(played)
    }

    fn url(&self, number: usize) -> String {
        let url = &self.urls[number % self.urls.len()];
        let mark = if url.contains('?') { '&' } else { '?' };
        format!("{url}{mark}op_timeout={}ms", OP_TIMEOUT.as_millis())
    }

    fn command_line(&self, number: usize) -> (OsString, Vec<OsString>) {
        let run = &self.schedule.runs[number];
        let mut command: Vec<OsString> = Vec::new();
        match run.command {
            Command::Missing => command.push("/nowhere/at/all".into()),
            Command::NotExecutable => command.push("/".into()),
            Command::Witness(act) => {
                if act.closes {
                    const CLOSE: &str = "for fd in /proc/self/fd/*; do fd=${fd##*/}; [ $fd -le 2 ] || eval \"exec $fd>&-\"; done 2>/dev/null; \
                                         exec <&- >&- 2>&-; exec \"$0\" \"$@\"";
                    command.extend(["bash", "-c", CLOSE].map(OsString::from));
                }
                command.extend(self.programs.witness.iter().cloned());
            }
        }
        let Some(lockkit) = &self.programs.lockkit else {
            return (command.remove(0), command);
        };
        let mut arguments: Vec<OsString> = vec!["run".into(), "--ttl".into()];
        arguments.push(milliseconds(self.schedule.ttl));
        match run.patience {
            Patience::Ever => {}
            Patience::Wait(time) => arguments.extend(["--wait".into(), milliseconds(time)]),
            Patience::Try => arguments.push("--try".into()),
        }
        if run.foreground {
            arguments.push("--foreground".into());
        }
        if let Some(time) = run.max_hold {
            arguments.extend(["--max-hold".into(), milliseconds(time)]);
        }
        arguments.extend([self.name().into(), "--".into()]);
        arguments.extend(command);
        (lockkit.as_os_str().to_owned(), arguments)
    }

    fn shoot(&self, number: usize, shot: Shot, played: &mut Played) {
        let at = now();
        let sent = match shot.to {
            Whom::Lockkit => signal(played.pid, shot.signal),
            Whom::Group => {
                Pid::from_raw(played.pid).is_some_and(|group| kill_process_group(group, shot.signal).is_ok())
            }
            Whom::Command => self
                .command(number)
                .is_some_and(|command| self.signal(command, shot.signal)),
        };
        if sent {
            let Shot { to, signal, .. } = shot;
            played.sent.push(Sent { at, to, signal });
        }
    }

    /// The process of the command, while it is there.
    fn command(&self, number: usize) -> Option<i32> {
        let said = fs::read_to_string(self.log).ok()?;
        let mut lines = said.lines().rev().filter_map(Line::parse);
        let begin =
            lines.find(|line| line.run == number && line.role == 'c' && line.what.starts_with("begin"))?;
        self.spec_of(begin.pid).map(|_| begin.pid)
    }

    /// Returns which witness of this schedule a process is, or is to become.
    fn spec_of(&self, pid: i32) -> Option<String> {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let spec = environment.split(|byte| *byte == 0).find_map(|variable| {
            variable
                .strip_prefix(SPEC.as_bytes())?
                .strip_prefix(b"=")
                .map(<[u8]>::to_vec)
        })?;
        let spec = String::from_utf8(spec).ok()?;
        spec.ends_with(&*self.log.to_string_lossy()).then_some(spec)
    }

    /// The processes of a run that have not ended, and what they are.
    fn family(&self, number: usize) -> Vec<(i32, String)> {
        let processes = fs::read_dir("/proc").into_iter().flatten();
        let processes = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
        let of_run = format!("{number} ");
        processes
            .filter_map(|pid| {
                let spec = self.spec_of(pid)?;
                let state = state(pid)?;
                if !spec.starts_with(&of_run) || matches!(state, 'Z' | 'X') {
                    return None;
                }
                let group = Pid::from_raw(pid).and_then(|pid| getpgid(Some(pid)).ok());
                let group = group.map_or(0, |group| group.as_raw_nonzero().get());
                let mut words = spec
                    .split(' ')
                    .skip(7)
                    .map(|word| word.parse::<i32>().unwrap_or(0));
                let reach = [words.next()?, words.next()?];
                let role = match reach {
                    [0, 0] => 'c',
                    reach if reach.contains(&group) => 'k',
                    _ => 's',
                };
                Some((pid, format!("{role} {pid} in the group {group}, state {state}")))
            })
            .collect()
    }

    /// Sends a signal to a witness, and returns whether it is still there. Its id alone may be that of another process by now, or of a thread,
    /// perhaps of this process: what is sent to a thread's id ends all of its process.
    fn signal(&self, pid: i32, signal: Signal) -> bool {
        // Of the process that is looked at then, or of one that has ended.
        let handle = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        handle.is_some_and(|handle| self.spec_of(pid).is_some() && pidfd_send_signal(handle, signal).is_ok())
    }

    /// Kills what there is of a run, `but` for one process, and returns how many that were.
    fn kill_all(&self, number: usize, but: Option<i32>) -> usize {
        let mut family = self.family(number);
        family.retain(|(pid, _)| Some(*pid) != but);
        for (pid, _) in &family {
            self.signal(*pid, Signal::KILL);
        }
        family.len()
    }

    /// Returns what is stopped although the last that it was told is to go on.
    fn wrongly_stopped(&self, number: usize, played: &Played) -> Vec<String> {
        let stops = [Signal::TSTP, Signal::TTOU];
        let jobs = |sent: &&Sent| stops.contains(&sent.signal) || sent.signal == Signal::CONT;
        let last = played.sent.iter().rfind(jobs);
        let Some(last) = last.filter(|last| last.signal == Signal::CONT && last.to != Whom::Command) else {
            return Vec::new();
        };
        let run = &self.schedule.runs[number];
        let stops_itself = run.command.act().is_some_and(|act| act.stops);
        let deadline = last.at + u64::try_from(GOES_ON_WITHIN.as_micros()).unwrap_or(u64::MAX);
        loop {
            let mut stopped = Vec::new();
            if state(played.pid) == Some('T') {
                stopped.push("lockkit".to_owned());
            }
            if !stops_itself && self.command(number).and_then(state) == Some('T') {
                stopped.push("its command".to_owned());
            }
            if stopped.is_empty() || now() >= deadline {
                return stopped;
            }
            thread::sleep(LOOK);
        }
    }
}

/// Where there is no witness.
const NO_ACT: Act = Act {
    lasts: Duration::ZERO,
    code: 0,
    upon_term: super::witness::UponTerm::Default,
    place: super::witness::Place::Stays,
    kid: super::witness::Kid::None,
    closes: false,
    stops: false,
};

fn shot(to: Whom, signal: Signal) -> Shot {
    let pause = Duration::ZERO;
    Shot { to, signal, pause }
}

/// Each moment at which something is sent, and what.
fn timeline(run: &Run) -> VecDeque<(Duration, Vec<Shot>)> {
    let mut timeline = Vec::new();
    for burst in &run.bursts {
        let mut at = burst.at;
        let mut shots = Vec::new();
        for shot in &burst.signals {
            if shot.pause <= AT_ONCE {
                shots.push(*shot);
                continue;
            }
            shots.push(Shot {
                pause: Duration::ZERO,
                ..*shot
            });
            timeline.push((at, std::mem::take(&mut shots)));
            at += shot.pause;
        }
        timeline.push((at, shots));
    }
    timeline.sort_by_key(|(at, _)| *at);
    timeline.into()
}

fn milliseconds(time: Duration) -> OsString {
    format!("{}ms", time.as_millis()).into()
}

/// Sends a signal to a child that is not reaped, and returns whether it was sent.
fn signal(pid: i32, signal: Signal) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// The state of a process, as `ps` shows it.
fn state(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn listens_to_signals(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let caught = field("SigCgt:").and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // It is the last one that is listened to and never ignored. The shell before has no handler for it.
    let last = Signal::CONT.as_raw() - 1;
    caught.is_some_and(|mask| mask >> last & 1 == 1) && !is_shell(field("Name:"))
}

fn is_shell(name: Option<&str>) -> bool {
    name.is_some_and(|name| ["bash", "env", "setsid"].contains(&name.trim()))
}
