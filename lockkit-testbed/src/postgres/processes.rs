//! The processes of a server: each connection has one, and each is the postmaster's child.

use std::{
    fs, io, thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A process as the system tells of it.
struct Status {
    state: u8,
    parent: u32,
}

fn status(pid: u32) -> Option<Status> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may have any character in it.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    Some(Status {
        state: *fields.next()?.as_bytes().first()?,
        parent: fields.next()?.parse().ok()?,
    })
}

/// The children of a process that are alive.
pub(super) fn children(parent: u32) -> io::Result<Vec<u32>> {
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(pids
        .filter(|pid| status(*pid).is_some_and(|status| status.parent == parent && status.state != b'Z'))
        .collect())
}

/// Signals processes; those that have ended meanwhile do not count. By handles, which no thread has: a signal to the id of a thread goes to
/// all of its process, which may be this one.
pub(super) fn signal(pids: &[u32], signal: Signal) -> io::Result<()> {
    for pid in pids {
        let pid = i32::try_from(*pid).ok().and_then(Pid::from_raw);
        let process = pidfd_open(pid.ok_or(io::ErrorKind::InvalidInput)?, PidfdFlags::empty());
        match process.and_then(|process| pidfd_send_signal(process, signal)) {
            Err(rustix::io::Errno::SRCH) => {}
            done => done?,
        }
    }
    Ok(())
}

/// Waits until none of them runs any more.
pub(super) fn wait_stopped(pids: &[u32]) -> io::Result<()> {
    wait("stop", pids, |status| matches!(status.state, b'T' | b't' | b'Z'))
}

/// Waits until all of them have ended.
pub(super) fn wait_ended(pids: &[u32]) -> io::Result<()> {
    wait("end", pids, |status| status.state == b'Z')
}

fn wait(what: &str, pids: &[u32], done: impl Fn(&Status) -> bool) -> io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !pids
        .iter()
        .all(|pid| status(*pid).is_none_or(|status| done(&status)))
    {
        if Instant::now() >= deadline {
            return Err(io::Error::other(format!("the server's processes do not {what}")));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
