//! A child process that can be stopped, resumed and killed, and that never outlives its owner.

use std::{
    io,
    process::{Child, Command, ExitStatus},
    time::{Duration, Instant},
};

/// A child process. It is killed and reaped on drop, also when a test panics.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts `command`.
    ///
    /// # Errors
    /// If the system cannot start it.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        Ok(Self {
            child: command.spawn()?,
        })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The child as the standard library has it, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Stops it as a debugger or a suspended machine would (SIGSTOP): when this returns, none of its threads runs
    /// until it is [resumed](Self::resume).
    ///
    /// # Errors
    /// If it has ended, does not stop within 5 s, or the system has no such signal.
    pub fn stop(&mut self) -> io::Result<()> {
        self.signal(Signal::Stop)?;
        self.has_stopped()
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// If it has ended, or the system has no such signal.
    pub fn resume(&mut self) -> io::Result<()> {
        self.signal(Signal::Continue)
    }

    /// Asks it to end (SIGTERM).
    ///
    /// # Errors
    /// If it has ended, or the system has no such signal.
    pub fn terminate(&mut self) -> io::Result<()> {
        self.signal(Signal::Terminate)
    }

    /// Ends it at once (SIGKILL) and reaps it.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    /// Waits until it has ended; `None` if it still runs after `limit`.
    ///
    /// # Errors
    /// If the system cannot tell.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + limit;
        loop {
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() >= deadline {
                return Ok(ended);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A child that was not reaped keeps its id, so that the signal cannot hit a stranger.
    #[cfg(unix)]
    fn signal(&mut self, signal: Signal) -> io::Result<()> {
        use rustix::process::{Signal as Unix, kill_process};
        if let Some(status) = self.child.try_wait()? {
            return Err(io::Error::other(format!("the process has ended: {status}")));
        }
        let signal = match signal {
            Signal::Stop => Unix::STOP,
            Signal::Continue => Unix::CONT,
            Signal::Terminate => Unix::TERM,
        };
        Ok(kill_process(self.pid()?, signal)?)
    }

    /// Waits for the stop: the signal has been sent, but threads run on until the system gets to each.
    #[cfg(unix)]
    fn has_stopped(&self) -> io::Result<()> {
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        let deadline = Instant::now() + Duration::from_secs(5);
        // Stops alone are asked for: an exit is left to be reaped by `wait`.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        while waitid(WaitId::Pid(self.pid()?), options)?.is_none() {
            if Instant::now() >= deadline {
                return Err(io::Error::other(
                    "the process was told to stop and did not within 5 s",
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    #[cfg(unix)]
    fn pid(&self) -> io::Result<rustix::process::Pid> {
        let raw = i32::try_from(self.child.id()).map_err(io::Error::other)?;
        rustix::process::Pid::from_raw(raw).ok_or_else(|| io::Error::other("a child without a process id"))
    }

    #[cfg(not(unix))]
    fn has_stopped(&self) -> io::Result<()> {
        Ok(())
    }

    #[cfg(not(unix))]
    fn signal(&mut self, signal: Signal) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("this system has no signal to {signal:?} a process"),
        ))
    }
}

#[derive(Clone, Copy, Debug)]
enum Signal {
    Stop,
    Continue,
    Terminate,
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has ended and been reaped already.
        let _ = self.kill();
    }
}
