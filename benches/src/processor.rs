//! Processor time and wake-ups of other processes, by the kernel's own accounts.

use std::{fs, io, time::Duration};

use nix::{time::clock_getcpuclockid, unistd::Pid};

/// Returns the processor time of a process, all its threads together and to the nanosecond. `/proc` tells it in
/// hundredths of a second only: processes that are alike then step from one to the next together, and a second of
/// processor time appears that nobody has used.
///
/// # Errors
/// If there is no such process.
pub fn processor_time(process: u32) -> io::Result<Duration> {
    let process = Pid::from_raw(process.try_into().map_err(io::Error::other)?);
    Ok(clock_getcpuclockid(process)?.now()?.into())
}

/// Counts how often a process has waited and was woken, all its threads together. Unlike the time that it takes,
/// that is the same on a busy machine.
///
/// # Errors
/// If there is no such process, or no `/proc`.
pub fn wake_ups(process: u32) -> io::Result<u64> {
    let mut all = 0;
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let status = fs::read_to_string(thread?.path().join("status"))?;
        let number = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
            .and_then(|number| number.trim().parse::<u64>().ok());
        all += number.ok_or_else(|| io::Error::other("it is not told"))?;
    }
    Ok(all)
}
