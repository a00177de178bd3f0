//! The signals that `lockkit run` passes on.

use std::{future::poll_fn, io, sync::OnceLock, task::Poll, time::Duration};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    signal::unix::{self, SignalKind},
    task::yield_now,
    time::sleep,
};

use crate::{failure::Failure, family};

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

/// Signals that stop a process that does not handle them: by the terminal, or by whoever stops a job by hand.
pub(crate) const STOPPING: [Signal; 3] = [Signal::TSTP, Signal::TTIN, Signal::TTOU];

/// They come behind the [stops](STOPPING): see [`Signals::stop_here`].
const OTHERS: [Signal; 2] = [Signal::CONT, Signal::WINCH];

/// The time between a stop and what may take it back. A signal that continues this process, and comes while it is about to stop itself,
/// is lost to it; so it does that when nothing more is to be expected.
const SECOND_THOUGHTS: Duration = Duration::from_millis(50);

/// The signals that come to this process, from the moment on at which this is made.
pub(crate) struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
    /// Those that were ignored before.
    ignored: u64,
    /// CONT has come, and is the next one.
    continued: bool,
}

impl Signals {
    /// A signal that was ignored when this process started, as `nohup` has it, stays ignored: by the command too.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let ignored = ignored_at_start();
        let streams: io::Result<Vec<_>> = ENDING
            .into_iter()
            .chain(STOPPING)
            .chain(OTHERS)
            .filter(|signal| !is_in(ignored, *signal))
            .map(|signal| Ok((signal, unix::signal(SignalKind::from_raw(signal.as_raw()))?)))
            .collect();
        streams
            .map(|streams| Self {
                streams,
                ignored,
                continued: false,
            })
            .map_err(|error| Failure::because("cannot listen to signals", &error))
    }

    /// The next signal. Cancel safe.
    pub(crate) async fn next(&mut self) -> Signal {
        if std::mem::take(&mut self.continued) {
            return Signal::CONT;
        }
        poll_fn(|cx| {
            for (signal, stream) in &mut self.streams {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Returns those that have come so far.
    pub(crate) async fn so_far(&mut self) -> Vec<Signal> {
        // The runtime hears of them between two turns of this task.
        yield_now().await;
        poll_fn(|cx| {
            let streams = self.streams.iter_mut();
            let come =
                streams.filter_map(|(signal, stream)| stream.poll_recv(cx).is_ready().then_some(*signal));
            Poll::Ready(come.collect())
        })
        .await
    }

    /// Returns whether a signal was ignored when this was made.
    pub(crate) fn has_ignored(&self, signal: Signal) -> bool {
        is_in(self.ignored, signal)
    }

    /// Returns whether a signal that continues this process comes at about the same time as the one that stops it, which has come. It is
    /// the next one then, and nothing is to be stopped: which of the two was the first is not known, and who is stopped for good is worse off
    /// than who has to stop again.
    pub(crate) async fn is_taken_back(&mut self) -> bool {
        sleep(SECOND_THOUGHTS).await;
        self.has_continued().await
    }

    /// Stops this process until somebody continues it, unless a signal that does has come.
    pub(crate) async fn stop_now(&mut self) {
        if !self.has_continued().await {
            // It can only fail for a process that is not there.
            let _ = kill_process(rustix::process::getpid(), Signal::STOP);
        }
    }

    async fn has_continued(&mut self) -> bool {
        let come = poll_fn(|cx| {
            let mut continued = false;
            for (signal, stream) in &mut self.streams {
                // Stops that came meanwhile are answered by the same.
                if STOPPING.contains(signal) || *signal == Signal::CONT {
                    let has_come = stream.poll_recv(cx).is_ready();
                    continued |= has_come && *signal == Signal::CONT;
                }
            }
            Poll::Ready(continued)
        });
        self.continued |= come.await;
        self.continued
    }

    /// Stops this process, as the signal that it caught would have.
    async fn stop_here(&mut self) {
        if !self.is_taken_back().await {
            self.stop_now().await;
        }
    }

    /// The outcome of `task`, or the signal that tells this process to end before it is done.
    pub(crate) async fn unless_ended<T>(&mut self, task: impl Future<Output = T>) -> Result<T, Signal> {
        let mut task = std::pin::pin!(task);
        loop {
            let signal = tokio::select! {
                biased;
                signal = self.next() => signal,
                outcome = &mut task => return Ok(outcome),
            };
            if ENDING.contains(&signal) {
                return Err(signal);
            }
            if STOPPING.contains(&signal) {
                self.stop_here().await;
            }
        }
    }
}

/// From now on, a write beyond the limit on the size of files fails, which can be said, instead of ending this process. It
/// still ends the command, which gets none of this process's handlers. Within a runtime.
pub(crate) fn outlive_file_limit() -> io::Result<()> {
    if !is_in(ignored_at_start(), Signal::XFSZ) {
        // The handler stays when the stream is dropped.
        drop(unix::signal(SignalKind::from_raw(Signal::XFSZ.as_raw()))?);
    }
    Ok(())
}

fn is_in(mask: u64, signal: Signal) -> bool {
    mask >> (signal.as_raw() - 1) & 1 == 1
}

/// Returns whether this thread has blocked a signal.
pub(crate) fn is_blocked(signal: Signal) -> bool {
    is_in(mask(SELF, "SigBlk:"), signal)
}

/// Returns whether a process is known to have a handler for the signal.
pub(crate) fn handles(process: Pid, signal: Signal) -> bool {
    is_in(mask(&process.as_raw_nonzero().to_string(), "SigCgt:"), signal)
}

/// Returns whether a process is known to go on when that signal comes: it handles it, ignores it or has blocked it.
pub(crate) fn outlives(process: Pid, signal: Signal) -> bool {
    let process = process.as_raw_nonzero().to_string();
    let masks = ["SigCgt:", "SigIgn:", "SigBlk:"];
    masks.iter().any(|name| is_in(mask(&process, name), signal))
}

/// Notes which signals are ignored, before anything else takes descriptors: to ask takes one, and there may be few.
pub(crate) fn note_ignored() {
    ignored_at_start();
}

/// Returns the signals that were ignored when this was first asked.
fn ignored_at_start() -> u64 {
    static IGNORED: OnceLock<u64> = OnceLock::new();

    *IGNORED.get_or_init(|| mask(SELF, "SigIgn:"))
}

/// This thread, as the system calls it.
const SELF: &str = "thread-self";

/// One bit per signal, from the lowest. Where the system does not tell, none.
fn mask(process: &str, name: &str) -> u64 {
    let status = family::read_proc(process, "status").unwrap_or_default();
    // The name in it may be none.
    String::from_utf8_lossy(&status)
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_name_that_is_no_text_hides_no_signals() {
        // The system keeps 15 bytes of it.
        let named = thread::Builder::new().name("fourteen-bytesé".to_owned());
        let ignored = named.spawn(|| mask(SELF, "SigIgn:")).unwrap().join().unwrap();
        assert!(is_in(ignored, Signal::PIPE), "each program in Rust ignores it");
    }
}
