//! `lockkit run`: a command under a lock.

use std::{
    io::{self, IsTerminal},
    os::unix::process::ExitStatusExt,
    process::ExitStatus,
    time::Duration,
};

use lockkit::{AcquireOptions, Lock, LockClient, LockConfig, LockGuard, LockName, spi::chain};
use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::{Pid, Signal, kill_process, kill_process_group},
};
use tokio::{
    process::{Child, Command},
    time::Instant,
};

use crate::{
    args::Run,
    exec,
    failure::{FAILED, Failure, LOST, NOT_GRANTED, cannot_start, say},
    inspect::CLOSE_WITHIN,
    signals::{Signals, stop_here},
};

/// How long connecting may take also for whoever would not wait so long for the lock.
const CONNECT_AT_LEAST: Duration = Duration::from_secs(1);

/// Answers with the exit status.
pub(crate) async fn run(args: Run) -> Result<u8, Failure> {
    let mut signals = Signals::listen()?;
    let mut config = args.server.config()?;
    config.ttl = args.ttl.or(config.ttl);
    config.wait = args.wait.or(config.wait);
    config.label = args
        .label
        .clone()
        .or(config.label)
        .or_else(|| Some(default_label()));
    let ttl = config.ttl.unwrap_or(AcquireOptions::DEFAULT_TTL);

    let started = Instant::now();
    if let Some(wait) = config.wait {
        let connect_timeout = config
            .connect_timeout
            .unwrap_or(LockConfig::DEFAULT_CONNECT_TIMEOUT);
        config.connect_timeout = Some(connect_timeout.min(wait.max(CONNECT_AT_LEAST)));
    }
    let client = match signals.unless_ended(config.connect()).await {
        Ok(client) => client?,
        Err(signal) => return Ok(status_of_signal(signal)),
    };
    let wait = config.wait.map(|wait| wait.saturating_sub(started.elapsed()));
    let status = match signals.unless_ended(acquire(&client, &args, wait)).await {
        Ok(Ok(guard)) => run_under(guard, ttl, &args, &mut signals).await,
        Ok(Err(failure)) => Err(failure),
        Err(signal) => Ok(status_of_signal(signal)),
    };
    // What a release that was not confirmed leaves behind ends with its lease, and `run_under` has said so.
    let _ = client.close(CLOSE_WITHIN).await;
    status
}

async fn acquire(client: &LockClient, args: &Run, wait: Option<Duration>) -> Result<LockGuard, Failure> {
    let lock = lock(client, args)?;
    if !args.try_once {
        return Ok(match wait {
            Some(wait) => lock.acquire_timeout(wait).await?,
            None => lock.acquire().await?,
        });
    }
    let granted = lock.try_acquire().await?;
    granted.ok_or_else(|| Failure::new(NOT_GRANTED, format!("lock `{}` is taken", args.name)))
}

fn lock(client: &LockClient, args: &Run) -> lockkit::Result<Lock> {
    if let Some(permits) = args.permits {
        return client.semaphore(&args.name, permits);
    }
    let lock = client.lock(&args.name)?;
    Ok(if args.shared { lock.shared() } else { lock })
}

/// Runs the command, releases the lock as soon as it is done, and answers with the exit status.
async fn run_under(
    guard: LockGuard,
    ttl: Duration,
    args: &Run,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let mut command = exec::tied_to_this_process(&args.command)?;
    command
        .env("LOCKKIT_NAME", &args.name)
        .env("LOCKKIT_TOKEN", guard.token().to_string());
    let mut supervised = Supervised::spawn(&guard, ttl, command).await?;
    let ending = supervised.until_end(&guard, signals).await?;
    let released = guard.release().await;
    match (ending, released) {
        (Ending::Stopped(why), _) => Err(Failure::new(LOST, why)),
        (Ending::Exited(_), Err(error)) if error.is_lost() => Err(error.into()),
        (Ending::Exited(status), released) => {
            if let Err(error) = released {
                say(&chain(&error));
            }
            status_of(status)
        }
    }
}

/// A command that runs under a lock.
struct Supervised {
    child: Child,
    pid: Pid,
    /// Whether the command has a process group of its own, or shares this one because the terminal is in it.
    own_group: bool,
    name: LockName,
    ttl: Duration,
    /// The last thing done about a lease that goes unrenewed, and the end of that lease.
    done: Option<(Signal, Instant)>,
}

/// How a command came to its end.
enum Ending {
    Exited(ExitStatus),
    /// It had to be stopped because the lock was lost, or about to be.
    Stopped(String),
}

impl Supervised {
    async fn spawn(
        guard: &LockGuard,
        ttl: Duration,
        command: std::process::Command,
    ) -> Result<Self, Failure> {
        let own_group = !io::stdin().is_terminal();
        let mut command = Command::from(command);
        command.kill_on_drop(true);
        if own_group {
            command.process_group(0);
        }
        // Where a descriptor keeps the hold alive, the command gets it: should this process be killed, the operating
        // system frees the lock when the command has gone too, not before. Nothing else is spawned meanwhile.
        let inherited = guard.descriptor().await;
        if let Some(descriptor) = &inherited {
            fcntl_setfd(descriptor, FdFlags::empty()).map_err(|error| cannot_start(&error))?;
        }
        guard.check()?;
        let child = command.spawn().map_err(|error| cannot_start(&error))?;
        drop(inherited);
        let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let pid = pid.ok_or_else(|| Failure::new(FAILED, "the command has no process id"))?;
        Ok(Self {
            child,
            pid,
            own_group,
            name: guard.name().clone(),
            ttl,
            done: None,
        })
    }

    async fn until_end(&mut self, guard: &LockGuard, signals: &mut Signals) -> Result<Ending, Failure> {
        let mut lost = guard.lost();
        loop {
            let step = guard.valid_until().and_then(|end| self.next_step(end));
            tokio::select! {
                biased;
                reason = &mut lost => return self.kill(format!("lock `{}` was lost: {reason}", self.name)).await,
                status = self.child.wait() => return self.ended(status),
                (signal, end) = due(step) => {
                    // It may have been renewed in the meantime.
                    if guard.valid_until() == Some(end) {
                        self.signal(signal);
                        self.done = Some((signal, end));
                    }
                }
                signal = signals.next() => {
                    if let Err(error) = guard.check() {
                        return self.kill(chain(&error)).await;
                    }
                    self.pass_on(signal);
                }
            }
        }
    }

    async fn kill(&mut self, why: String) -> Result<Ending, Failure> {
        self.signal(Signal::KILL);
        let status = self.child.wait().await;
        self.ended(status)?;
        Ok(Ending::Stopped(why))
    }

    fn ended(&self, status: io::Result<ExitStatus>) -> Result<Ending, Failure> {
        let status = status.map_err(|error| Failure::because("cannot wait for the command", &error))?;
        Ok(match self.done {
            None => Ending::Exited(status),
            Some(_) => Ending::Stopped(format!(
                "lock `{}` could not be renewed, so its command was stopped before the lease ran out",
                self.name
            )),
        })
    }

    /// What has to be done, and when, if the lease is not renewed and ends at `end`: TERM a quarter of the ttl before,
    /// KILL shortly before.
    fn next_step(&self, end: Instant) -> Option<(Signal, Instant, Instant)> {
        let (signal, ahead) = match self.done {
            Some((Signal::KILL, of)) if of == end => return None,
            Some((_, of)) if of == end => (Signal::KILL, (self.ttl / 16).min(Duration::from_millis(500))),
            _ => (Signal::TERM, self.ttl / 4),
        };
        Some((signal, end.checked_sub(ahead)?, end))
    }

    fn pass_on(&self, signal: Signal) {
        let of_terminal = [Signal::INT, Signal::QUIT, Signal::TSTP, Signal::WINCH];
        // In a shared process group the terminal has sent these to the command already.
        if self.own_group || !of_terminal.contains(&signal) {
            self.signal(signal);
        }
        if signal == Signal::TSTP {
            stop_here();
        }
    }

    fn signal(&self, signal: Signal) {
        // Until it has been waited for, its id is nobody else's. What can fail is signalling a process of another user
        // (a set-user-ID command), which is not ours to end.
        let _ = if self.own_group {
            kill_process_group(self.pid, signal)
        } else {
            kill_process(self.pid, signal)
        };
    }
}

/// The step, once its time has come.
async fn due(step: Option<(Signal, Instant, Instant)>) -> (Signal, Instant) {
    let Some((signal, at, end)) = step else {
        return std::future::pending().await;
    };
    tokio::time::sleep_until(at).await;
    (signal, end)
}

fn status_of(status: ExitStatus) -> Result<u8, Failure> {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok())
        .ok_or_else(|| Failure::new(FAILED, format!("the command ended with {status}")))
}

fn status_of_signal(signal: Signal) -> u8 {
    u8::try_from(128 + signal.as_raw()).unwrap_or(FAILED)
}

/// `user@host:pid`, as much of it as can be found out and fits.
fn default_label() -> String {
    let user = ["USER", "LOGNAME"]
        .into_iter()
        .find_map(|variable| std::env::var(variable).ok())
        .unwrap_or_else(|| rustix::process::getuid().as_raw().to_string());
    let system = rustix::system::uname();
    let mut label = format!("{user}@{}", system.nodename().to_string_lossy());
    let pid = format!(":{}", std::process::id());
    while label.len() + pid.len() > AcquireOptions::MAX_LABEL_BYTES {
        label.pop();
    }
    label + &pid
}

#[cfg(test)]
mod tests {
    use lockkit::{MemoryBackend, Operation};

    use super::*;

    const TTL: Duration = Duration::from_secs(1);

    /// Runs the script under a lease that nothing renews; answers with how it ended, and how long before the lease.
    async fn unrenewed(script: &str) -> (Ending, Duration) {
        let memory = MemoryBackend::new();
        memory.delay(Operation::Renew, Duration::from_mins(1));
        let lock = LockClient::new(memory).lock("job").unwrap();
        let guard = lock.acquire_with(&AcquireOptions::new().ttl(TTL)).await.unwrap();
        let lease_ends = guard.valid_until().unwrap();
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script]);
        let mut supervised = Supervised::spawn(&guard, TTL, command).await.unwrap();
        let ending = supervised
            .until_end(&guard, &mut Signals::listen().unwrap())
            .await
            .unwrap();
        (ending, lease_ends.saturating_duration_since(Instant::now()))
    }

    #[tokio::test]
    async fn an_unrenewed_lease_sends_term_a_quarter_before_its_end() {
        let (ending, left) = unrenewed("trap 'exit 0' TERM; while :; do sleep 0.01; done").await;
        assert!(matches!(ending, Ending::Stopped(_)));
        assert!(left > TTL / 16 && left <= TTL / 4, "{left:?} before the end");
    }

    #[tokio::test]
    async fn and_kill_before_its_end_to_a_command_that_stays() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let script = format!(
            "trap 'echo TERM >> {}' TERM; while :; do sleep 0.01; done",
            log.display()
        );
        let (ending, left) = unrenewed(&script).await;
        assert!(matches!(ending, Ending::Stopped(_)));
        assert!(
            left > Duration::ZERO && left <= TTL / 16,
            "{left:?} before the end"
        );
        assert_eq!(
            std::fs::read_to_string(log).unwrap(),
            "TERM\n",
            "it had its chance, once"
        );
    }
}
