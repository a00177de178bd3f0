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

    /// Stops it as a debugger or a suspended machine would: it runs no more instructions until it is
    /// [resumed](Self::resume).
    ///
    /// # Errors
    /// If it has ended, or the system has no such signal.
    pub fn stop(&mut self) -> io::Result<()> {
        self.signal(Signal::Stop)
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
        use rustix::process::{Pid, Signal as Unix, kill_process};
        if let Some(status) = self.child.try_wait()? {
            return Err(io::Error::other(format!("the process has ended: {status}")));
        }
        let raw = i32::try_from(self.child.id()).map_err(io::Error::other)?;
        let pid = Pid::from_raw(raw).ok_or_else(|| io::Error::other("a child without a process id"))?;
        let signal = match signal {
            Signal::Stop => Unix::STOP,
            Signal::Continue => Unix::CONT,
            Signal::Terminate => Unix::TERM,
        };
        Ok(kill_process(pid, signal)?)
    }

    #[cfg(not(unix))]
    fn signal(&mut self, signal: Signal) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("this system has no signal to {signal:?} a process"),
        ))
    }
}

#[derive(Debug)]
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
