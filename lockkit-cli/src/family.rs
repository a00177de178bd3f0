//! The processes that descend from this one, where the system tells.
//!
//! On Linux this process adopts what its command leaves behind, as init would: so nothing of it gets out of sight, and
//! what has ended is reaped although this process may be the only one there is to do so.

use std::io;

use rustix::process::{Pid, Signal};

/// A process that descends from this one, and has not ended.
#[derive(Debug)]
pub(crate) struct Relative {
    pub(crate) pid: Pid,
    pub(crate) group: Pid,
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

/// Those that there are now; `None` where the system does not tell.
///
/// # Errors
/// If it does not tell now, as when there is no descriptor left.
pub(crate) fn relatives() -> io::Result<Option<Vec<Relative>>> {
    #[cfg(target_os = "linux")]
    {
        let processes = linux::with_room(linux::processes)?;
        let mut family = std::collections::HashSet::from([rustix::process::getpid()]);
        // A child may come before its parent, since ids are used again.
        loop {
            let known = family.len();
            for process in &processes {
                if process.parent.is_some_and(|parent| family.contains(&parent)) {
                    family.insert(process.pid);
                }
            }
            if family.len() == known {
                break;
            }
        }
        family.remove(&rustix::process::getpid());
        let relatives = processes
            .into_iter()
            .filter(|process| family.contains(&process.pid) && !process.has_ended)
            .map(|process| Relative {
                pid: process.pid,
                group: process.group,
            });
        Ok(Some(relatives.collect()))
    }
    #[cfg(not(target_os = "linux"))]
    Ok(None)
}

impl Relative {
    /// Nothing happens if it has ended meanwhile, also if another process has its id by now.
    pub(crate) fn signal(&self, signal: Signal) {
        #[cfg(target_os = "linux")]
        {
            use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

            // It can only fail for one that has gone, or that is not ours to end.
            let _ = linux::with_room(|| {
                let handle = pidfd_open(self.pid, PidfdFlags::empty())?;
                // What the handle is of is still what was seen if that is still in the same group.
                if linux::process(self.pid)?.is_some_and(|now| now.group == self.group) {
                    pidfd_send_signal(handle, signal)?;
                }
                Ok(())
            });
        }
        #[cfg(not(target_os = "linux"))]
        let _ = signal;
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
        pub(super) group: Pid,
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
        match fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())) {
            Ok(stat) => Ok(parse(pid, &stat)),
            Err(error) if is_full(&error) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Parses what the system says of a process. `None` if its group is not in sight, which is of another namespace, or gone:
    /// a process that is just being reaped has the group -1.
    fn parse(pid: Pid, stat: &str) -> Option<Process> {
        // The program's name, in parentheses before it, may have anything in it.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = fields.next()?;
        let mut id = || {
            let id = fields.next()?.parse().ok()?;
            if id > 0 { Pid::from_raw(id) } else { None }
        };
        Some(Process {
            pid,
            parent: id(),
            group: id()?,
            has_ended: matches!(state, "Z" | "X" | "x"),
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn parsed(stat: &str) -> Option<(Option<i32>, i32, bool)> {
            let process = parse(Pid::INIT, stat)?;
            let raw = |pid: Pid| pid.as_raw_nonzero().get();
            Some((process.parent.map(raw), raw(process.group), process.has_ended))
        }

        #[test]
        fn the_name_of_a_program_may_look_like_fields() {
            let stat = "7 (a) Z 1 2 (b) S 3 4 5 0 -1 4194304";
            assert_eq!(parsed(stat), Some((Some(3), 4, false)));
            assert_eq!(parsed("7 (sh) Z 3 4 5 0 -1"), Some((Some(3), 4, true)));
        }

        #[test]
        fn a_process_that_is_being_reaped_is_not_there() {
            assert_eq!(parsed("7 (sleep) X 0 -1 -1 0 -1 4227084"), None);
            assert_eq!(parsed("7 (sh) S 0 0 0 0 -1"), None, "of another namespace");
        }
    }
}
