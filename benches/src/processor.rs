//! How much processor time other processes use, by the kernel's own accounts.

use std::{io, time::Duration};

use nix::{time::clock_getcpuclockid, unistd::Pid};

/// How long a process has been on a processor, all its threads together and to the nanosecond. `/proc` tells it in
/// hundredths of a second only: processes that are alike then step from one to the next together, and a second of
/// processor time appears that nobody has used.
///
/// # Errors
/// If there is no such process.
pub fn processor_time(process: u32) -> io::Result<Duration> {
    let process = Pid::from_raw(process.try_into().map_err(io::Error::other)?);
    Ok(clock_getcpuclockid(process)?.now()?.into())
}
