//! What docs/command.md promises, and whether a record keeps to it.

use std::{collections::BTreeSet, fmt::Write, os::unix::process::ExitStatusExt, time::Duration};

use lockkit_conformance::torture::{Fault, Told};
use lockkit_testbed::{mysql::MySql, postgres::PgServer};
use rustix::process::Signal;

use super::{
    Verdict,
    play::{ENDS_WITHIN, Line, Played, Record, Struck},
    schedule::{Command, Patience, Run, Schedule, Session, Stream, Whom},
    witness::AFTER_TERM,
};

/// Signals that end a process that does not handle them.
const ENDING: [Signal; 7] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
];
/// Signals that stop a process that does not handle them.
const STOPPING: [Signal; 2] = [Signal::TSTP, Signal::TTOU];

/// The statuses of docs/command.md.
const LOST: i32 = 123;
const NOT_GRANTED: i32 = 124;
const FAILED: i32 = 125;
const NOT_EXECUTABLE: i32 = 126;
const NOT_FOUND: i32 = 127;

/// What a machine that is busy adds.
const BUSY: Duration = Duration::from_millis(300);
/// The time after a signal that continues lockkit and its command, in which lockkit kills a command that it finds to have no lock.
const AFTER_CONT: Duration = Duration::from_secs(1);
/// From a stall of this length on, a lease may be over for no other reason.
const STALL: Duration = Duration::from_millis(150);
/// The lines that a run may say.
const MOST_LINES: usize = 20;

pub(super) fn judge(schedule: &Schedule, faults: &[Fault], record: &Record) -> Verdict {
    let mut judge = Judge {
        schedule,
        faults,
        record,
        findings: Vec::new(),
    };
    judge.exclusion();
    for (number, run) in schedule.runs.iter().enumerate() {
        let played = &record.runs[number];
        if record.unprotected {
            continue;
        }
        judge.ends(number, played);
        judge.status(number, run, played);
        judge.left(number, played);
        judge.words(number, run, played);
        judge.inherited(number, run);
        judge.alone(number);
    }
    let begun = (0..schedule.runs.len()).filter(|number| judge.begin(*number).is_some());
    let begun = begun.count();
    let lost = record.runs.iter().filter(|played| code(played) == Some(LOST));
    Verdict {
        begun,
        lost: lost.count(),
        log: log(schedule, record),
        findings: judge.findings,
    }
}

struct Judge<'a> {
    schedule: &'a Schedule,
    faults: &'a [Fault],
    record: &'a Record,
    findings: Vec<String>,
}

fn code(played: &Played) -> Option<i32> {
    played.status?.code()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Judge<'_> {
    fn find(&mut self, law: &str, what: impl AsRef<str>) {
        self.findings.push(format!("{law}: {}", what.as_ref()));
    }

    /// Where in the file a run's command has begun.
    fn begin(&self, number: usize) -> Option<usize> {
        let mut lines = self.record.lines.iter();
        lines.position(|line| line.run == number && line.role == 'c' && line.what.starts_with("begin"))
    }

    /// Returns whether a run's command was stopped since its lock was lost. One that ends by itself ends its hold, and what it leaves
    /// behind is free; if the server says afterwards that the hold was lost, that changes nothing.
    fn was_stopped(&self, number: usize) -> bool {
        let its = |line: &&Line| line.run == number && line.role == 'c';
        let ends = |line: &Line| line.what.starts_with("end ");
        let has = |what: &dyn Fn(&Line) -> bool| self.record.lines.iter().filter(its).any(what);
        let told = has(&|line| line.what == "term");
        let told_by_others = self.record.runs[number]
            .sent
            .iter()
            .any(|sent| sent.signal == Signal::TERM);
        code(&self.record.runs[number]) == Some(LOST) && (!has(&ends) || told && !told_by_others)
    }

    /// The last line of a run's command that proves that it was there, and of what it has started if that was to end with it.
    fn last(&self, number: usize) -> Option<(usize, &Line)> {
        let all = self.was_stopped(number);
        let mut lines = self.record.lines.iter().enumerate();
        let of_it = |line: &Line| line.run == number && (line.role == 'c' || all && line.role == 'k');
        lines.rfind(|(_, line)| of_it(line))
    }

    fn exclusion(&mut self) {
        let runs = 0..self.schedule.runs.len();
        let mut found = Vec::new();
        for one in runs.clone() {
            for other in runs.clone() {
                let (Some(begin), Some(begins), Some((last, line))) =
                    (self.begin(one), self.begin(other), self.last(one))
                else {
                    continue;
                };
                if begin < begins && begins < last {
                    let at = self.record.lines[begins].at;
                    if !self.is_excused(one, at, line.at) {
                        let late = Duration::from_micros(line.at.saturating_sub(at));
                        found.push(format!(
                            "the command of run {other} began, and that of run {one} was there {late:?} later ({} {})",
                            line.role, line.what
                        ));
                    }
                }
            }
        }
        for what in found {
            self.find("exclusion", what);
        }
    }

    /// Two commands from `at` until `until`, of which `one` was the first.
    fn is_excused(&self, one: usize, at: u64, until: u64) -> bool {
        let of_a_fault = self.record.strikes.iter().any(|struck| {
            let told = self.fault(struck).and_then(|fault| fault.overlap);
            told.is_some_and(|told| {
                let after = told_after(told, self.schedule.ttl) + BUSY;
                struck.at <= until && at <= struck.healed.saturating_add(micros(after))
            })
        });
        of_a_fault || self.was_continued(one, until)
    }

    /// Somebody has just continued lockkit and its command, or its command alone.
    fn was_continued(&self, number: usize, at: u64) -> bool {
        let sent = &self.record.runs[number].sent;
        sent.iter().any(|sent| {
            sent.signal == Signal::CONT
                && sent.to != Whom::Lockkit
                && (sent.at..sent.at + micros(AFTER_CONT)).contains(&at)
        })
    }

    fn fault(&self, struck: &Struck) -> Option<&Fault> {
        self.faults.iter().find(|fault| fault.name == struck.strike.fault)
    }

    fn ends(&mut self, number: usize, played: &Played) {
        if played.hung {
            self.find(
                "hang",
                format!("run {number} was there {ENDS_WITHIN:?} after its end"),
            );
        }
        for what in &played.stopped {
            self.find(
                "stopped",
                format!("{what} of run {number} is stopped, and was told to go on"),
            );
        }
    }

    fn status(&mut self, number: usize, run: &Run, played: &Played) {
        let Some(status) = played.status else { return };
        if played.hung {
            return;
        }
        let Some(code) = status.code() else {
            let signal = status.signal().unwrap_or(0);
            let sent = |sent: &&super::play::Sent| sent.signal.as_raw() == signal && sent.to != Whom::Command;
            // Before it listens, it is a process like any other.
            if played.listens.is_some() || !played.sent.iter().any(|it| sent(&it)) {
                self.find("status", format!("run {number} was ended by signal {signal}"));
            }
            return;
        };
        let mut allowed = self.of_its_end(number, run, played);
        let causes = self.causes(run, played);
        if causes.lost {
            allowed.insert(LOST);
        }
        if causes.failed && self.begin(number).is_none() {
            allowed.insert(FAILED);
        }
        if !allowed.contains(&code) {
            self.find(
                "status",
                format!("run {number} exited with {code}, and not with one of {allowed:?}"),
            );
        }
    }

    /// The statuses of a run that nothing befell but signals.
    fn of_its_end(&self, number: usize, run: &Run, played: &Played) -> BTreeSet<i32> {
        let mut allowed = BTreeSet::new();
        let signals = played.sent.iter().filter(|sent| ENDING.contains(&sent.signal));
        let ignored = |signal: &Signal| run.around.ignored.contains(signal);
        let signals = signals.filter(|sent| !ignored(&sent.signal));
        allowed.extend(signals.map(|sent| 128 + sent.signal.as_raw()));
        if played.killed.is_some() {
            allowed.insert(128 + Signal::KILL.as_raw());
        }
        if self.begin(number).is_none() {
            match run.command {
                Command::Missing => _ = allowed.insert(NOT_FOUND),
                Command::NotExecutable => _ = allowed.insert(NOT_EXECUTABLE),
                Command::Witness(_) => {}
            }
            if run.patience != Patience::Ever {
                allowed.insert(NOT_GRANTED);
            }
            return allowed;
        }
        let mut lines = self.record.lines.iter();
        let ended = lines.find_map(|line| {
            let is_its = line.run == number && line.role == 'c';
            line.what
                .strip_prefix("end ")
                .filter(|_| is_its)
                .and_then(|code| code.parse::<i32>().ok())
        });
        if let Some(ended) = ended {
            // What comes after this line may still be by a signal.
            allowed.insert(ended);
            return allowed;
        }
        if run.around.session == Session::Terminal && run.around.stderr == Stream::Terminal {
            // Nothing more is known of it.
            allowed.insert(i32::from(AFTER_TERM));
        }
        allowed
    }

    fn causes(&self, run: &Run, played: &Played) -> Causes {
        let befallen = !self.record.strikes.is_empty()
            || self.record.stood_still > STALL
            || run.around.descriptors.is_some();
        let stopped = played.sent.iter().any(|sent| STOPPING.contains(&sent.signal));
        Causes {
            lost: befallen || stopped || run.max_hold.is_some(),
            failed: befallen,
        }
    }

    /// After a loss, nothing is left of the command.
    fn left(&mut self, number: usize, played: &Played) {
        if !self.was_stopped(number) {
            return;
        }
        for what in &played.left {
            if !what.starts_with('s') {
                self.find(
                    "left",
                    format!("run {number} has lost its lock and ended, and there is {what}"),
                );
            }
        }
    }

    /// Standard error: lines of lockkit's own, each once.
    fn words(&mut self, number: usize, run: &Run, played: &Played) {
        if run.around.stderr != Stream::Plain {
            return;
        }
        let Some(said) = &played.said else {
            return self.find(
                "words",
                format!("the standard error of run {number} does not end"),
            );
        };
        let mut wrong = Vec::new();
        for secret in [MySql::PASSWORD, PgServer::PASSWORD] {
            if said.contains(secret) {
                wrong.push("a password".to_owned());
            }
        }
        let mut known = BTreeSet::new();
        for line in said.lines() {
            if !line.starts_with("lockkit: ") {
                wrong.push(format!("{line:?}"));
            }
            if !known.insert(line) {
                wrong.push(format!("twice {line:?}"));
            }
        }
        if said.lines().count() > MOST_LINES {
            wrong.push(format!("{} lines", said.lines().count()));
        }
        if code(played).is_some_and(|code| (LOST..=NOT_FOUND).contains(&code))
            && said.is_empty()
            && !self.is_its_own(number, played)
        {
            wrong.push("nothing, with a status of lockkit's own".to_owned());
        }
        for what in wrong {
            self.find("words", format!("run {number} said {what}"));
        }
    }

    /// The status is what the command itself has exited with.
    fn is_its_own(&self, number: usize, played: &Played) -> bool {
        let end = format!("end {}", code(played).unwrap_or(-1));
        let mut lines = self.record.lines.iter();
        lines.any(|line| line.run == number && line.role == 'c' && line.what == end)
    }

    /// The command ignores and has blocked what lockkit's caller has, but for PIPE, which the witness always ignores.
    fn inherited(&mut self, number: usize, run: &Run) {
        let Some(begin) = self.begin(number) else { return };
        // The shell that closes descriptors has its own mind.
        if run.command.act().is_some_and(|act| act.closes) {
            return;
        }
        let line = &self.record.lines[begin];
        // Those behind are the C library's own, or have no names.
        let named = (1 << 31) - 1 - bit(Signal::PIPE);
        let mut masks = line.what.split(' ').skip(1);
        let mut mask = || masks.next().and_then(|mask| u64::from_str_radix(mask, 16).ok());
        let (Some(ignored), Some(blocked)) = (mask(), mask()) else {
            return;
        };
        for (what, wanted, found) in [
            ("ignored", &run.around.ignored, ignored & named),
            ("blocked", &run.around.blocked, blocked & named),
        ] {
            let wanted = wanted.iter().fold(0, |mask, signal| mask | bit(*signal));
            if wanted != found {
                self.find(
                    "inherited",
                    format!(
                        "the command of run {number} has {what} the signals {found:x}, and lockkit's caller {wanted:x}"
                    ),
                );
            }
        }
    }

    /// Without its servers, no command goes on for longer than a ttl.
    fn alone(&mut self, number: usize) {
        let [struck] = self.record.strikes.as_slice() else {
            return;
        };
        // Whatever the way that this run takes, it leads to no server.
        if struck.strike.fault != "pause" || self.record.stood_still > STALL {
            return;
        }
        let played = &self.record.runs[number];
        if self
            .begin(number)
            .is_none_or(|begin| self.record.lines[begin].at > struck.at)
            || played.sent.iter().any(|sent| STOPPING.contains(&sent.signal))
        {
            return;
        }
        let over = struck.at + micros(self.schedule.ttl + BUSY);
        let lines = self.record.lines.iter();
        let mut late =
            lines.filter(|line| line.run == number && matches!(line.role, 'c' | 'k') && line.at > over);
        let Some(late) = late.rfind(|line| line.at < struck.healed && line.what != "term") else {
            return;
        };
        // What has ended by itself leaves what it likes behind.
        if late.role == 'k' && !self.was_stopped(number) {
            return;
        }
        let for_so_long = Duration::from_micros(late.at - struck.at);
        let what = format!(
            "the server stood still, and run {number} went on for {for_so_long:?} ({} {})",
            late.role, late.what
        );
        self.find("alone", what);
    }
}

/// What excuses a status.
struct Causes {
    lost: bool,
    failed: bool,
}

/// A holder whose renewals are not answered is told at the end of its lease.
fn told_after(told: Told, ttl: Duration) -> Duration {
    told.unanswered().after(ttl)
}

fn bit(signal: Signal) -> u64 {
    1 << (signal.as_raw() - 1)
}

/// All that happened, in order.
fn log(schedule: &Schedule, record: &Record) -> String {
    let mut events: Vec<(u64, String)> = Vec::new();
    for struck in &record.strikes {
        events.push((struck.at, format!("{} strikes", struck.strike.fault)));
        events.push((struck.healed, format!("{} is healed", struck.strike.fault)));
    }
    for (number, played) in record.runs.iter().enumerate() {
        let mut say = |at: Option<u64>, what: String| {
            if let Some(at) = at {
                events.push((at, format!("run {number} {what}")));
            }
        };
        say(played.listens, format!("listens, as {}", played.pid));
        for sent in &played.sent {
            say(
                Some(sent.at),
                format!("is sent {:?} to {:?}", sent.signal, sent.to),
            );
        }
        say(played.killed, "has what it runs killed".to_owned());
        say(
            played.ended,
            format!("ends: {:?}, {:?}", played.status, played.said),
        );
    }
    let mut last = std::collections::BTreeMap::new();
    for line in &record.lines {
        let what = format!("run {}: {} {} {}", line.run, line.role, line.pid, line.what);
        if line.what == "on" {
            last.insert(line.pid, (line.at, what));
        } else {
            events.push((line.at, what));
        }
    }
    events.extend(
        last.into_values()
            .map(|(at, what)| (at, format!("{what} (last)"))),
    );
    events.sort();
    let mut log = schedule.to_string();
    for (at, what) in events {
        let at = Duration::from_micros(at.saturating_sub(record.began));
        let _ = writeln!(log, "{at:>12.3?} {what}");
    }
    log
}
