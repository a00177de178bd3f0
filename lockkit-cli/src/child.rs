//! The command that `run` runs, as a process with what it has started.

use std::{
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Command, ExitStatus},
    time::Duration,
};

use rustix::{
    fs::{Mode, OFlags, open},
    process::{
        Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getpgid, getpgrp, getpid, kill_process,
        kill_process_group, test_kill_process_group, waitid, waitpgid, waitpid,
    },
    termios::tcgetpgrp,
};
use tokio::{
    signal::unix::{self, SignalKind},
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    failure::say,
    family::{self, Relative},
    signals::{handles, is_blocked, outlives},
};

/// The pause between looks for processes that were told to end. They say so to nobody, and to look through
/// all processes of a big host takes its time.
const LOOK: Duration = Duration::from_millis(20);
/// The pause between looks for processes that were killed.
const LOOK_KILLED: Duration = Duration::from_millis(1);
/// The looks for what was begun while all was stopped, or told to end. Whoever is stopped or ends begins nothing.
const LOOKS_AT_NEW: usize = 20;
/// The pause between looks at the command where nothing tells of its end.
const LOOK_UNTOLD: Duration = Duration::from_millis(50);

const NOT_KNOWN: &str = "it is not known whether all that the command has started is gone: /proc does not show this process, as in a PID \
                         namespace with another one's /proc";

/// Signals that end a process that does not handle them, and that one which is stopped handles only once it goes on.
const ENDING: [Signal; 5] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::ALARM,
];

/// Signals that the terminal sends to all of a group.
const OF_TERMINAL: [Signal; 6] = [
    Signal::INT,
    Signal::QUIT,
    Signal::TSTP,
    Signal::TTIN,
    Signal::TTOU,
    Signal::WINCH,
];

/// Signals that end, stop or continue all of the command, also what has a process group of its own, as below `timeout` or in a shell that
/// controls jobs. The others are left to whoever made that group, so that they come once.
const TO_ALL: [Signal; 4] = [Signal::TERM, Signal::KILL, Signal::STOP, Signal::CONT];

/// The place of the command: whose process group and terminal it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a process group of its own, which signals go to as a whole.
    Apart,
    /// In this process's group, so that it may use the terminal.
    Foreground {
        /// The terminal sends its signals to both.
        at_terminal: bool,
    },
}

impl Place {
    /// In the foreground if this process is there: a group of its own would be stopped as soon as it used the terminal.
    pub(crate) fn choose(foreground: bool) -> Self {
        let terminal = open(
            "/dev/tty",
            OFlags::RDONLY | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let at_front = terminal
            .as_ref()
            .is_ok_and(|terminal| tcgetpgrp(terminal) == Ok(getpgrp()));
        if foreground || at_front {
            let at_terminal = terminal.is_ok();
            return Self::Foreground { at_terminal };
        }
        Self::Apart
    }
}

/// The command. It is killed when this is dropped before its end.
#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
    place: Place,
    /// What this process had begun before: it may have been another program then, as a script that ends with `exec lockkit run`.
    before: Vec<Relative>,
    changes: unix::Signal,
    /// Whoever started this process has blocked the signal that tells of changes.
    is_untold: bool,
    reaped: bool,
}

/// What was there before the command. To look at all processes of a big host takes its time.
pub(crate) struct Before {
    relatives: Vec<Relative>,
    /// Made before there is anything to miss.
    changes: unix::Signal,
}

impl Before {
    pub(crate) fn look() -> io::Result<Self> {
        family::adopt_orphans();
        Ok(Self {
            changes: unix::signal(SignalKind::child())?,
            relatives: family::relatives(&[]).unwrap_or_default().unwrap_or_default(),
        })
    }
}

/// A change of the command: it has ended or stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Exited,
    Stopped,
}

impl Child {
    pub(crate) fn spawn(before: Before, mut command: Command, place: Place) -> io::Result<Self> {
        if place == Place::Apart {
            command.process_group(0);
        }
        let id = command.spawn()?.id();
        let pid = i32::try_from(id).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("it has no process id"))?;
        Ok(Self {
            pid,
            place,
            before: before.relatives,
            changes: before.changes,
            is_untold: is_blocked(Signal::CHILD),
            reaped: false,
        })
    }

    /// Resolves when the command itself has exited. Its id stays its own until it is reaped. Cancel safe.
    pub(crate) async fn exited(&mut self) -> io::Result<()> {
        self.changed(None).await.map(drop)
    }

    /// Resolves when the command itself has exited, or is stopped, if stops count: then not before `stops_from`. Cancel safe.
    pub(crate) async fn changed(&mut self, stops_from: Option<Instant>) -> io::Result<Change> {
        let mut which = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        which.set(WaitIdOptions::STOPPED, stops_from.is_some());
        if let Some(from) = stops_from {
            sleep_until(from).await;
        }
        loop {
            if let Some(status) = waitid(WaitId::Pid(self.pid), which)? {
                return Ok(if status.stopped() {
                    Change::Stopped
                } else {
                    Change::Exited
                });
            }
            let change = self.changes.recv();
            if self.is_untold {
                let _ = timeout(LOOK_UNTOLD, change).await;
            } else {
                change.await;
            }
            family::reap_orphans(self.pid);
        }
    }

    /// Resolves when nothing is left of what the command has started and not sent away. Where the system does not tell,
    /// it is killed. Cancel safe.
    pub(crate) async fn others_gone(&self) {
        let mut seen_none = false;
        loop {
            let none = match self.members() {
                Ok(Some(others)) => others.is_empty(),
                Ok(None) => return self.signal(Signal::KILL),
                Err(_) => false,
            };
            // One may be overlooked while its parent ends, but not twice.
            if none && std::mem::replace(&mut seen_none, true) {
                return;
            }
            seen_none = none;
            sleep(LOOK).await;
        }
    }

    /// Passes on a signal that came to this process.
    pub(crate) fn pass_on(&self, signal: Signal) {
        if self.place != (Place::Foreground { at_terminal: true }) || !OF_TERMINAL.contains(&signal) {
            self.signal(signal);
        }
    }

    /// Passes on a signal that came while the command began: the terminal may have sent it to nobody else. If it came later, because this
    /// process had to wait for its turn, the command has a handler by now, and does not get it twice.
    pub(crate) fn pass_on_early(&self, signal: Signal) {
        if handles(self.pid, signal) {
            self.pass_on(signal);
        } else {
            self.signal(signal);
        }
    }

    /// Sends a signal to the command and what it has started. One that is stopped goes on, if it is to end. What does not get the signal
    /// stays stopped, as a job that its user has suspended.
    pub(crate) fn signal(&self, signal: Signal) {
        let to_all = TO_ALL.contains(&signal);
        // A look at all processes of a big host takes its time, which a lease that is nearly over does not have. What is killed is looked
        // for again and again, until it is gone.
        let before = if signal == Signal::KILL {
            None
        } else {
            self.present()
        };
        if signal == Signal::TERM {
            // Asked before: who has ended no longer tells.
            let handlers = handlers(before.iter().flatten());
            let told = self.send(signal, to_all, before);
            self.tell_new(told, handlers);
        } else {
            self.send(signal, to_all, before);
        }
        if ENDING.contains(&signal) {
            self.send(Signal::CONT, to_all, self.present());
        }
    }

    /// Sends TERM to what was begun while it was sent to those who were `told`. Its `handlers` among them may have begun another one upon it,
    /// to do the last of the work: that is not told, nor is what it begins.
    fn tell_new(&self, told: Vec<Relative>, mut handlers: Vec<Pid>) {
        let mut ending: Vec<Pid> = told.iter().map(|it| it.pid).collect();
        let mut known = told;
        for _ in 0..LOOKS_AT_NEW {
            let new = self.begun_since(&mut known).unwrap_or_default();
            if new.is_empty() {
                return;
            }
            // Whether one is told, its parent says.
            for it in family::parents_first(new) {
                let is_told = match it.parent {
                    // Whoever has ended has left it to this process. Was that one who handled the signal, it may be the last of the work.
                    Some(parent) if parent == getpid() => {
                        handlers.iter().all(|handler| handles(*handler, Signal::TERM))
                    }
                    // A handler that has ended since the look no longer shows that it is one.
                    Some(parent) => {
                        ending.contains(&parent)
                            && !handlers.contains(&parent)
                            && !outlives(parent, Signal::TERM)
                    }
                    None => false,
                };
                if is_told {
                    handlers.extend(self::handlers([&it]));
                    ending.push(it.pid);
                    // The system leaves out nobody of a group.
                    if self.place != Place::Apart || it.group != Some(self.pid) {
                        it.signal(Signal::TERM);
                    }
                }
            }
        }
    }

    /// Stops the command and all that it has started, also what is begun meanwhile. Returns whether there was nobody new in the end.
    pub(crate) fn stop(&self) -> bool {
        let mut known = self.send(Signal::STOP, true, self.present());
        for _ in 0..LOOKS_AT_NEW {
            match self.begun_since(&mut known) {
                Ok(new) if new.is_empty() => return true,
                Ok(new) => new.iter().for_each(|it| it.signal(Signal::STOP)),
                // It is not known who there is.
                Err(_) => {}
            }
        }
        false
    }

    /// Returns those of the command that are not `known` yet. They are from then on.
    fn begun_since(&self, known: &mut Vec<Relative>) -> io::Result<Vec<Relative>> {
        let mut new = self.members()?.unwrap_or_default();
        new.retain(|it| !known.iter().any(|known| known.is(it)));
        known.extend(&new);
        Ok(new)
    }

    /// Sends it `to_all` of the command, or else to its group and that of this process. Returns those who were there `before`, or if that is
    /// not known, those who are there now.
    fn send(&self, signal: Signal, to_all: bool, before: Option<Vec<Relative>>) -> Vec<Relative> {
        // What can fail is signalling a process of another user (a set-user-ID command), which is not ours to end.
        let has_id = self.has_id();
        // Another lockkit within continues its own command, if it still holds its lock.
        let spared = match &before {
            Some(before) if signal == Signal::CONT => family::below_another_run(before),
            _ => Vec::new(),
        };
        // Some of whom may be of the group.
        let is_apart = self.place == Place::Apart && has_id && spared.is_empty();
        if is_apart {
            let _ = kill_process_group(self.pid, signal);
        }
        // The command itself may have left its group.
        let was_sent_it = is_apart && getpgid(Some(self.pid)) == Ok(self.pid);
        if has_id && !was_sent_it {
            let _ = kill_process(self.pid, signal);
        }
        // Those before are out of sight now if they have lost the parent by whom they are found, and others may have left the group.
        let now = self.present().unwrap_or_default();
        let before = before.unwrap_or_else(|| now.clone());
        let is_among = |all: &[Relative], member: &Relative| all.iter().any(|it| it.is(member));
        let lost_sight_of = before.iter().filter(|member| !is_among(&now, member));
        for member in lost_sight_of.chain(&now) {
            let is_meant = to_all || member.shares_group || member.group == Some(self.pid);
            let was_sent_it = has_id && member.pid == self.pid || is_apart && member.group == Some(self.pid);
            // Whether a new one is to be told, its parent says.
            let is_to_wait = signal == Signal::TERM && !is_among(&before, member);
            if is_meant && !was_sent_it && !is_to_wait && !spared.contains(&member.pid) {
                member.signal(signal);
            }
        }
        before
    }

    /// Returns whether the command's id is its own, as that of its group is then: it has not been reaped. Later they may be a stranger's.
    fn has_id(&self) -> bool {
        let which = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !self.reaped && waitid(WaitId::Pid(self.pid), which).is_ok()
    }

    /// Kills the command and what it has started, and answers when all of it is gone, or `within` that time after the
    /// command itself, which has as long: with whether all is gone.
    pub(crate) async fn end(&mut self, within: Duration) -> io::Result<bool> {
        self.signal(Signal::KILL);
        // One of another user (a set-user-ID command) goes on, and may for ever.
        let Ok(exited) = timeout(within, self.exited()).await else {
            return Ok(false);
        };
        exited?;
        if self.place == Place::Apart {
            // Again, while the group's id is still its own, for whom was begun meanwhile.
            self.signal(Signal::KILL);
        }
        self.reap()?;
        Ok(self.end_all(within).await)
    }

    /// Kills what there is of the command, again and again until it is gone, or `within` that time. Returns whether all that can be known of
    /// is gone, and says so if that may not be all.
    pub(crate) async fn end_all(&self, within: Duration) -> bool {
        let deadline = Instant::now() + within;
        let mut seen_none = false;
        loop {
            let looked = family::look(&self.before);
            // Of short-lived ones that begin each other, each has gone before a signal to it alone. Nobody slips out of a group.
            for group in looked.iter().flatten().flat_map(|(_, groups)| groups) {
                if self.is_its_session(group.session, group.shares_session) {
                    let _ = kill_process_group(group.id, Signal::KILL);
                }
            }
            let members = looked.map(|looked| looked.map(|(relatives, _)| self.members_of(relatives)));
            for member in members.iter().flatten().flatten() {
                member.signal(Signal::KILL);
            }
            // Elsewhere the system never tells, as is documented.
            let is_untold = cfg!(target_os = "linux") && matches!(members, Ok(None));
            let none = match members {
                Ok(Some(members)) => members.is_empty(),
                Ok(None) => !self.has_group(),
                Err(_) => false,
            };
            // One may be overlooked while its parent ends, but not twice.
            let gone = std::mem::replace(&mut seen_none, none) && none;
            if gone || Instant::now() >= deadline {
                if gone && is_untold {
                    say(NOT_KNOWN);
                }
                family::reap_orphans(self.pid);
                return gone;
            }
            sleep(LOOK_KILLED).await;
        }
    }

    /// The status of a command that has [exited](Self::exited).
    pub(crate) fn reap(&mut self) -> io::Result<ExitStatus> {
        let waited = waitpid(Some(self.pid), WaitOptions::empty())?;
        self.reaped = true;
        let (_, status) = waited.ok_or_else(|| io::Error::other("it has no status"))?;
        Ok(ExitStatus::from_raw(status.as_raw()))
    }

    /// The processes of the command, itself included, but for those that have a session of their own. `None` where the
    /// system does not tell.
    fn members(&self) -> io::Result<Option<Vec<Relative>>> {
        let relatives = family::relatives(&self.before)?;
        Ok(relatives.map(|relatives| self.members_of(relatives)))
    }

    fn members_of(&self, mut relatives: Vec<Relative>) -> Vec<Relative> {
        relatives.retain(|it| self.is_its_session(it.session, it.shares_session));
        relatives
    }

    /// Returns whether this is a session of the command. If it has made one itself, that has its id.
    fn is_its_session(&self, session: Option<Pid>, is_shared: bool) -> bool {
        is_shared || session == Some(self.pid)
    }

    /// The [members](Self::members), if the system tells now.
    fn present(&self) -> Option<Vec<Relative>> {
        self.members().ok().flatten()
    }

    /// Returns whether there is anybody in the group that the command was given, once it has been reaped itself.
    fn has_group(&self) -> bool {
        if self.place != Place::Apart {
            return false;
        }
        while let Ok(Some(_)) = waitpgid(self.pid, WaitOptions::NOHANG) {}
        test_kill_process_group(self.pid).is_ok()
    }
}

/// Those who have a handler for TERM.
fn handlers<'a>(all: impl IntoIterator<Item = &'a Relative>) -> Vec<Pid> {
    let all = all.into_iter().map(|it| it.pid);
    all.filter(|pid| handles(*pid, Signal::TERM)).collect()
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            self.signal(Signal::KILL);
        }
    }
}
