use std::{io, os::fd::OwnedFd, time::Duration};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::{io::unix::AsyncFd, time::Instant};

/// A timer that is exact to some tens of microseconds, where Tokio's own are to the next millisecond.
#[derive(Debug)]
pub(crate) struct Alarm(AsyncFd<OwnedFd>);

impl Alarm {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        #[expect(
            deprecated,
            reason = "its successor is unsafe, and asks for an owned descriptor, which this is"
        )]
        let timer = AsyncFd::new(timer)?;
        Ok(Self(timer))
    }

    /// Waits until `due`.
    ///
    /// # Cancel safety
    /// Dropped, it is as if it had not been called.
    pub(crate) async fn until(&self, due: Instant) -> io::Result<()> {
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            let once = Itimerspec {
                it_interval: timespec(Duration::ZERO)?,
                it_value: timespec(left)?,
            };
            timerfd_settime(self.0.get_ref(), TimerfdTimerFlags::empty(), &once)?;
            // What rang for an earlier call is found too early by the clock.
            self.0.readable().await?.clear_ready();
        }
    }
}

fn timespec(time: Duration) -> io::Result<Timespec> {
    Timespec::try_from(time).map_err(io::Error::other)
}
