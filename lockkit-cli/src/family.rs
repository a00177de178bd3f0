//! The processes that descend from this one, where the system tells.
//!
//! On Linux this process adopts what its command leaves behind, as init would: so nothing of it gets out of sight, and
//! what has ended is reaped although this process may be the only one there is to do so.

#[cfg(target_os = "linux")]
use std::os::fd::OwnedFd;
use std::{collections::HashSet, fs, io, process};

use rustix::process::{Pid, Signal};

use crate::signals::handles;

/// A process that descends from this one, and has not ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Relative {
    pub(crate) pid: Pid,
    pub(crate) parent: Option<Pid>,
    /// `None` if it began outside of this process's namespace, as does the session.
    pub(crate) group: Option<Pid>,
    pub(crate) session: Option<Pid>,
    pub(crate) shares_group: bool,
    pub(crate) shares_session: bool,
    #[cfg(target_os = "linux")]
    began: u64,
}

/// Returns whether `/proc` has this process under the id that it knows: else what is there are strangers.
pub(crate) fn proc_is_of_this() -> bool {
    fs::read_link("/proc/self").is_ok_and(|own| own.as_os_str() == process::id().to_string().as_str())
}

/// From now on, descendants whose parents end become children of this process.
pub(crate) fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    {
        // Without it they go to init, and out of sight.
        let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    }
}

/// From now on, there are descriptors for a look at all processes. A client that connects again and again may take all others, just
/// when something has to be killed.
pub(crate) fn keep_room() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    linux::keep_room()?;
    Ok(())
}

/// Reads what the system says of a process, also if there is no descriptor left, where there is [room](keep_room).
pub(crate) fn read_proc(process: &str, file: &str) -> io::Result<Vec<u8>> {
    let read = || fs::read(format!("/proc/{process}/{file}"));
    #[cfg(target_os = "linux")]
    {
        linux::with_room(read)
    }
    #[cfg(not(target_os = "linux"))]
    read()
}

/// Reaps the children that have ended, `but` for one.
pub(crate) fn reap_orphans(but: Pid) {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{WaitOptions, waitpid};

        let me = rustix::process::getpid();
        for process in linux::with_room(linux::processes).unwrap_or_default() {
            if process.parent == Some(me) && process.has_ended && process.pid != but {
                // A child's id is nobody else's until it has been reaped.
                let _ = waitpid(Some(process.pid), WaitOptions::NOHANG);
            }
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = but;
}

/// A group that has nobody in it but what descends from this process, so that it may be signalled as a whole.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct OwnGroup {
    pub(crate) id: Pid,
    pub(crate) session: Option<Pid>,
    pub(crate) shares_session: bool,
}

/// Those that there are now, `but` for some and those that they have begun; `None` where the system does not tell.
///
/// # Errors
/// If it does not tell now, as when there is no descriptor left.
pub(crate) fn relatives(but: &[Relative]) -> io::Result<Option<Vec<Relative>>> {
    Ok(look(but)?.map(|(relatives, _)| relatives))
}

/// The same, and their groups, with those of what has ended and has not been reaped: it keeps the group's id from others.
///
/// # Errors
/// As [`relatives`].
pub(crate) fn look(but: &[Relative]) -> io::Result<Option<(Vec<Relative>, HashSet<OwnGroup>)>> {
    #[cfg(target_os = "linux")]
    {
        if !proc_is_of_this() {
            return Ok(None);
        }
        let me = rustix::process::getpid();
        let (processes, own) = linux::with_room(|| Ok((linux::processes()?, linux::process(me)?)))?;
        let Some(own) = own else { return Ok(None) };
        let is_one = |it: &linux::Process| but.iter().all(|but| (but.pid, but.began) != (it.pid, it.began));
        let mut family = HashSet::from([me]);
        // A child may come before its parent, since ids are used again.
        loop {
            let known = family.len();
            for process in &processes {
                if process.parent.is_some_and(|parent| family.contains(&parent)) && is_one(process) {
                    family.insert(process.pid);
                }
            }
            if family.len() == known {
                break;
            }
        }
        family.remove(&me);
        // This process is one in its own group.
        let strangers = processes.iter().filter(|it| !family.contains(&it.pid));
        let strange: HashSet<Pid> = strangers.filter_map(|it| it.group).collect();
        // What goes to the group of process 1 goes to all there are.
        let is_own = |group: &Pid| *group != Pid::INIT && !strange.contains(group);
        let in_family = processes.iter().filter(|it| family.contains(&it.pid));
        let groups = in_family.filter_map(|it| {
            Some(OwnGroup {
                id: it.group.filter(is_own)?,
                session: it.session,
                shares_session: it.session == own.session,
            })
        });
        let groups = groups.collect();
        let relatives = processes
            .into_iter()
            .filter(|process| family.contains(&process.pid) && !process.has_ended)
            .map(|process| Relative {
                pid: process.pid,
                parent: process.parent,
                group: process.group,
                session: process.session,
                shares_group: process.group == own.group,
                shares_session: process.session == own.session,
                began: process.began,
            });
        Ok(Some((relatives.collect(), groups)))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = but;
        Ok(None)
    }
}

/// Puts each behind its parent, if that is among them: a child may come before, since ids are used again.
pub(crate) fn parents_first(mut rest: Vec<Relative>) -> Vec<Relative> {
    let mut ordered = Vec::with_capacity(rest.len());
    while !rest.is_empty() {
        let waiting: HashSet<Pid> = rest.iter().map(|it| it.pid).collect();
        let has_parent = |it: &Relative| it.parent.is_some_and(|parent| waiting.contains(&parent));
        let (children, first): (Vec<_>, Vec<_>) = rest.into_iter().partition(has_parent);
        // They were not seen at one moment: one may have the id that another one's parent had.
        let is_circle = first.is_empty();
        ordered.extend(first);
        if is_circle {
            ordered.extend(children);
            break;
        }
        rest = children;
    }
    ordered
}

/// Returns those that began below another `lockkit run` among them.
pub(crate) fn below_another_run(relatives: &[Relative]) -> Vec<Pid> {
    let own = program("self");
    // It passes CONT on. Another process of the same program, such as one that is about to become a command, does not.
    let is_run = |pid: &Pid| {
        let name = program(&pid.as_raw_nonzero().to_string());
        name.is_some() && name == own && handles(*pid, Signal::CONT)
    };
    let runs: Vec<Pid> = relatives.iter().map(|it| it.pid).filter(is_run).collect();
    let mut below: Vec<Pid> = Vec::new();
    loop {
        let known = below.len();
        for it in relatives {
            let is_below = |parent: Pid| runs.contains(&parent) || below.contains(&parent);
            if !below.contains(&it.pid) && it.parent.is_some_and(is_below) {
                below.push(it.pid);
            }
        }
        if below.len() == known {
            return below;
        }
    }
}

/// The name of a process's program, also if its file has been replaced since.
fn program(process: &str) -> Option<String> {
    let path = fs::read_link(format!("/proc/{process}/exe")).ok()?;
    let name = path.file_name()?.to_string_lossy();
    Some(name.trim_end_matches(" (deleted)").to_owned())
}

impl Relative {
    /// Returns whether the other is the same process, and not one that has its id by now.
    pub(crate) fn is(&self, other: &Self) -> bool {
        #[cfg(target_os = "linux")]
        let began_together = self.began == other.began;
        #[cfg(not(target_os = "linux"))]
        let began_together = true;
        self.pid == other.pid && began_together
    }

    /// Nothing happens if it has ended meanwhile, also if another process has its id by now.
    pub(crate) fn signal(&self, signal: Signal) {
        #[cfg(target_os = "linux")]
        {
            use rustix::process::{PidfdFlags, pidfd_open};

            self.signal_by(signal, |pid| pidfd_open(pid, PidfdFlags::empty()));
        }
        #[cfg(not(target_os = "linux"))]
        let _ = signal;
    }

    /// Sends a signal by a handle that `open` opens, or by the id where there are no handles.
    #[cfg(target_os = "linux")]
    fn signal_by(&self, signal: Signal, open: impl Fn(Pid) -> rustix::io::Result<OwnedFd>) {
        use rustix::{
            io::Errno,
            process::{kill_process, pidfd_send_signal},
        };

        // It can only fail for one that has gone, or that is not ours to end.
        let _ = linux::with_room(|| {
            let handle = match open(self.pid) {
                Ok(handle) => Some(handle),
                // The system has none (Linux before 5.3, gVisor), or a filter of system calls forbids them.
                Err(Errno::NOSYS | Errno::PERM) => None,
                Err(error) => return Err(error.into()),
            };
            // What the handle is of is what was seen if that began at the same time. It may have gone to another group since, and to a
            // session of its own.
            let is_it = |now: linux::Process| now.began == self.began && now.session == self.session;
            if !linux::process(self.pid)?.is_some_and(is_it) {
                return Ok(());
            }
            let sent = handle.map_or(Err(Errno::NOSYS), |handle| pidfd_send_signal(handle, signal));
            match sent {
                // It would have to end, be reaped and have its id used again since the look right above to hit a stranger: all ids come in
                // between. Not to signal it would let it outlive the lock.
                Err(Errno::NOSYS | Errno::PERM) => kill_process(self.pid, signal)?,
                sent => sent?,
            }
            Ok(())
        });
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        fs::{self, File},
        io,
        sync::{Mutex, PoisonError},
    };

    use rustix::{io::Errno, process::Pid};

    /// The descriptors that a look at all processes takes: that of a directory, and of a file. A signal takes as many.
    const ROOM: usize = 2;

    /// Descriptors that are kept for those looks.
    static KEPT: Mutex<Vec<File>> = Mutex::new(Vec::new());

    pub(super) fn keep_room() -> io::Result<()> {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        while kept.len() < ROOM {
            kept.push(File::open("/dev/null")?);
        }
        Ok(())
    }

    /// Does something that takes [room](ROOM), with what is kept if there is no other.
    pub(super) fn with_room<T>(what: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match what() {
            Err(error) if is_full(&error) => {}
            done => return done,
        }
        KEPT.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let done = what();
        // Others may have taken it. Whoever looks again tries again.
        let _ = keep_room();
        done
    }

    /// Returns whether there is no descriptor left.
    fn is_full(error: &io::Error) -> bool {
        let code = error.raw_os_error();
        [Errno::MFILE, Errno::NFILE]
            .iter()
            .any(|full| code == Some(full.raw_os_error()))
    }

    pub(super) struct Process {
        pub(super) pid: Pid,
        pub(super) parent: Option<Pid>,
        /// `None` if it is of another namespace, as is the session.
        pub(super) group: Option<Pid>,
        pub(super) session: Option<Pid>,
        /// In ticks since the system began.
        pub(super) began: u64,
        pub(super) has_ended: bool,
    }

    pub(super) fn processes() -> io::Result<Vec<Process>> {
        let entries = fs::read_dir("/proc")?;
        entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter_map(Pid::from_raw)
            .filter_map(|pid| process(pid).transpose())
            .collect()
    }

    /// `None` if there is none, or none in sight.
    pub(super) fn process(pid: Pid) -> io::Result<Option<Process>> {
        match fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())) {
            // The program's name may be no text: the system cuts a long one, also within a letter.
            Ok(stat) => Ok(parse(pid, &String::from_utf8_lossy(&stat))),
            Err(error) if is_full(&error) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Parses what the system says of a process. `None` if it is just being reaped: it has the group -1.
    fn parse(pid: Pid, stat: &str) -> Option<Process> {
        // The program's name, in parentheses before it, may have anything in it.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = fields.next()?;
        let mut id = || {
            let id: i32 = fields.next()?.parse().ok()?;
            // None in sight is 0.
            (id >= 0).then(|| Pid::from_raw(id))
        };
        let [parent, group, session] = [id()?, id()?, id()?];
        let threads: u32 = fields.nth(13)?.parse().ok()?;
        Some(Process {
            pid,
            parent,
            group,
            session,
            began: fields.nth(1)?.parse().ok()?,
            // Where the first thread has ended and others go on, it is a zombie with threads.
            has_ended: matches!(state, "X" | "x") || state == "Z" && threads <= 1,
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        const REST: &str = "0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 8128 0 0";

        /// Its parent, group, session and beginning, and whether it has ended.
        fn parsed(stat: &str) -> Option<([i32; 3], u64, bool)> {
            let Process {
                parent,
                group,
                session,
                began,
                has_ended,
                ..
            } = parse(Pid::INIT, &format!("{stat} {REST}"))?;
            let ids = [parent, group, session].map(|id| id.map_or(0, |id| id.as_raw_nonzero().get()));
            Some((ids, began, has_ended))
        }

        #[test]
        fn the_name_of_a_program_may_look_like_fields() {
            assert_eq!(parsed("7 (a) Z 1 2 (b) S 3 4 5"), Some(([3, 4, 5], 8128, false)));
            assert_eq!(parsed("7 (sh) Z 3 4 5"), Some(([3, 4, 5], 8128, true)));
        }

        #[test]
        fn a_process_whose_first_thread_has_ended_goes_on() {
            let process = |threads| {
                let rest = REST.replace("20 0 1 0 8128", &format!("20 0 {threads} 0 8128"));
                parse(Pid::INIT, &format!("7 (sh) Z 3 4 5 {rest}")).unwrap()
            };
            assert!(process(1).has_ended && !process(2).has_ended);
        }

        #[test]
        fn a_process_that_is_being_reaped_is_not_there() {
            assert_eq!(parsed("7 (sleep) X 0 -1 -1"), None);
            let of_another_namespace = parsed("7 (sh) S 0 0 0");
            assert_eq!(of_another_namespace, Some(([0, 0, 0], 8128, false)));
        }

        /// As far as the system says it in other ways.
        #[test]
        fn this_process_is_what_the_system_says_it_is() {
            let me = rustix::process::getpid();
            let own = process(me).unwrap().unwrap();
            assert_eq!(own.parent, rustix::process::getppid());
            assert_eq!(own.group, rustix::process::getpgid(None).ok());
            assert_eq!(own.session, rustix::process::getsid(None).ok());
            assert!(own.began > 0);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Each by its id and its parent's.
    fn ordered(all: &[(i32, i32)]) -> Vec<i32> {
        let relative = |&(pid, parent): &(i32, i32)| Relative {
            pid: Pid::from_raw(pid).unwrap(),
            parent: Pid::from_raw(parent),
            group: None,
            session: None,
            shares_group: true,
            shares_session: true,
            began: 0,
        };
        let ordered = parents_first(all.iter().map(relative).collect());
        ordered.iter().map(|it| it.pid.as_raw_nonzero().get()).collect()
    }

    #[test]
    fn a_child_that_is_listed_before_its_parent_comes_after_it() {
        assert_eq!(ordered(&[(3, 5), (4, 3), (5, 1), (6, 5)]), [5, 3, 6, 4]);
        assert_eq!(ordered(&[(2, 1), (3, 1)]), [2, 3]);
        assert_eq!(
            ordered(&[(2, 3), (3, 2)]),
            [2, 3],
            "ids were used again meanwhile"
        );
    }

    /// As in an old kernel, in gVisor, and below a filter that forbids handles. In a session of its own, it is left alone by other tests of
    /// this process, which may reap it.
    #[test]
    fn without_handles_a_process_is_signalled_by_its_id() {
        use std::io::{BufRead, BufReader};

        use rustix::io::Errno;

        // It ends by itself, so that the test fails and does not hang.
        let script = "trap 'echo TERM; exit' TERM; echo up; for i in $(seq 1000); do sleep 0.01; done";
        for error in [Errno::NOSYS, Errno::PERM] {
            let mut command = process::Command::new("setsid");
            command.args(["sh", "-c", script]).stdout(process::Stdio::piped());
            let mut child = command.spawn().unwrap();
            let pid = i32::try_from(child.id()).unwrap();
            let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
            assert_eq!(said.next().unwrap().unwrap(), "up");
            let all = relatives(&[]).unwrap().unwrap();
            let seen = all.iter().find(|it| it.pid.as_raw_nonzero().get() == pid);
            let seen = *seen.unwrap();
            let stranger = Relative {
                began: seen.began + 1,
                ..seen
            };
            stranger.signal_by(Signal::KILL, |_| Err(error));
            seen.signal_by(Signal::KILL, |_| Err(Errno::SRCH));
            seen.signal_by(Signal::TERM, |_| Err(error));
            assert_eq!(
                said.next().transpose().unwrap().as_deref(),
                Some("TERM"),
                "{error}"
            );
            let _ = child.wait();
        }
    }
}
