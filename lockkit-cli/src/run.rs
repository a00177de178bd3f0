//! `lockkit run`: a command under a lock.

use std::{
    collections::VecDeque,
    mem,
    os::unix::process::ExitStatusExt,
    panic,
    pin::pin,
    process::ExitStatus,
    sync::Arc,
    task::{Context, Waker},
    thread,
    time::Duration,
};

use lockkit::{
    AcquireOptions, Error, Lock, LockClient, LockConfig, LockGuard, LockName, LossReason, spi::chain,
};
use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::Signal,
};
use tokio::{
    runtime::{self, Handle},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};

use crate::{
    args::Run,
    child::{Before, Change, Child, Place},
    exec::{self, NotRun},
    failure::{self, FAILED, Failure, LOST, NOT_GRANTED, cannot_start, say},
    family,
    signals::{self, STOPPING, Signals},
    warnings,
};

/// The time that connecting may take, also if the caller would not wait so long for the lock.
const CONNECT_AT_LEAST: Duration = Duration::from_secs(1);
/// The pause before connecting is tried again, which doubles up to the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The reasons that are remembered, to be said once.
const MOST_REASONS: usize = 16;
/// The time that all that the command has started gets to be gone when it has been killed: far longer than that takes,
/// unless the system is stuck.
const KILLED_WITHIN: Duration = Duration::from_secs(5);
const STILL_THERE: &str = "some of what the command has started was killed and is still there";

/// The time that the server gets to take note that this client has gone: the way to one at the other end of the world and back. At the end
/// of a wait, the last question is part of it.
const LEAVE_WITHIN: Duration = Duration::from_millis(400);
/// The part of it that is kept for leaving.
const LEAVE_AT_LEAST: Duration = Duration::from_millis(100);
/// The time that a call of the client gets beyond the bound that it has itself.
const GRACE: Duration = Duration::from_secs(1);

/// The time that a command gets to stop when it was told to, if it does something before.
const STOPS_WITHIN: Duration = Duration::from_secs(5);

/// The time between two looks: at the end of a hold that was asked for, and at what is to be stopped.
const LOOK: Duration = Duration::from_millis(50);

/// Answers with the exit status.
pub(crate) fn run(args: Run) -> Result<u8, Failure> {
    signals::note_ignored();
    family::keep_room().map_err(|error| Failure::because("cannot start", &error))?;
    crate::can_begin()?;
    failure::say_without_waiting()?;
    warnings::show();
    leave_panics_to_the_client();
    // The client has threads of its own. Whatever keeps them busy or holds them up, such as a server that sends without end, the
    // main thread has the command, and ends it in time. There are two, so that one connection does not starve the others.
    let clients = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("client")
        .thread_stack_size(crate::STACK)
        .enable_all()
        .build()
        .map_err(|error| Failure::because("cannot start", &error))?;
    let status = crate::drive(run_beside(clients.handle().clone(), args));
    // Dropping it would wait for what cannot be stopped.
    clients.shutdown_background();
    status
}

/// From now on, a panic is shown on the main thread alone. The others are the client's and its libraries', of which some panic where there
/// is no descriptor left. The client takes each for an error, which is said as others are.
fn leave_panics_to_the_client() {
    let show = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if thread::current().name() == Some("main") {
            show(panic);
        }
    }));
}

async fn run_beside(handle: Handle, args: Run) -> Result<u8, Failure> {
    let mut signals = Signals::listen()?;
    // While there are descriptors to find that out.
    let ignores_children = signals.has_ignored(Signal::CHILD) && exec::can_ignore_children();
    let mut config = args.server.config_for(args.name())?;
    // With its parameters, such as a namespace, which the resolved one no longer has.
    let url = if args.no_inherit_url {
        String::new()
    } else {
        String::from(&*config.url)
    };
    config.ttl = args.ttl;
    config.wait = args.wait;
    config.max_hold = args.max_hold;
    config.label.clone_from(&args.label);
    config = config.resolved()?;
    config.label.get_or_insert_with(default_label);

    let op_timeout = config.op_timeout.unwrap_or(AcquireOptions::DEFAULT_OP_TIMEOUT);
    let clients = Clients { handle, op_timeout };
    let started = Instant::now();
    if let Some(wait) = config.wait {
        let connect_timeout = config
            .connect_timeout
            .unwrap_or(LockConfig::DEFAULT_CONNECT_TIMEOUT);
        config.connect_timeout = Some(connect_timeout.min(wait.max(CONNECT_AT_LEAST)));
    }
    let max_hold = config.max_hold;
    let wait = config.wait;
    let until = wait.map(|wait| started + wait);
    let connected = clients.connect(&config, until, args.try_once);
    let client = match signals.unless_ended(connected).await {
        Ok(client) => client?,
        Err(signal) => return Ok(status_of_signal(signal)),
    };
    let given = wait;
    let wait = wait.map(|wait| wait.saturating_sub(started.elapsed()));
    let args = Arc::new(args);
    let mut acquiring = JoinSet::new();
    let acquired = {
        let (client, args) = (client.clone(), Arc::clone(&args));
        clients.run_in(&mut acquiring, wait, "acquire", async move {
            acquire(&client, &args, wait, given).await.map(Unused::new)
        })
    };
    let acquired = async { acquired.await?.and_then(Unused::take) };
    let mut waited_until = until;
    let status = match signals.unless_ended(acquired).await {
        Ok(Ok(guard)) => {
            waited_until = None;
            let tied = exec::tied_to_this_process(&args.command, ignores_children, args.at_least.is_some());
            run_under(guard, &args, &url, tied, max_hold, &clients, &mut signals).await
        }
        Ok(Err(failure)) => Err(failure),
        Err(signal) => Ok(status_of_signal(signal)),
    };
    let leave_by = leave_by(waited_until, Instant::now());
    // What has been granted meanwhile is released before the client is closed.
    let _ = timeout_at(leave_by, acquiring.shutdown()).await;
    // The last word does not wait for a server that may be away.
    let status = status.unwrap_or_else(Failure::report);
    // What a release that was not confirmed leaves behind ends with its lease, and `run_under` has said so.
    let left = leave_by.saturating_duration_since(Instant::now());
    let close = clients.run(None, "close", async move { client.close(left).await });
    let _ = timeout_at(leave_by, close).await;
    Ok(status)
}

/// Returns when this process leaves the server, also if that has not taken note: soon, and if its user has waited for the lock, by the
/// time that is promised for the end of the wait.
fn leave_by(waited_until: Option<Instant>, now: Instant) -> Instant {
    let soon = now + LEAVE_WITHIN;
    waited_until.map_or(soon, |until| {
        (until + LEAVE_WITHIN).clamp(now + LEAVE_AT_LEAST, soon)
    })
}

/// The threads that the client lives on.
struct Clients {
    handle: Handle,
    /// The time that one exchange with the server may take.
    op_timeout: Duration,
}

impl Clients {
    /// Runs `task` there. It keeps the bound `within` by itself, unless those threads are kept busy; then this does. `task` ends
    /// when this is dropped.
    async fn run<T: Send + 'static>(
        &self,
        within: Option<Duration>,
        what: &str,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Failure> {
        self.run_in(&mut JoinSet::new(), within, what, task).await
    }

    /// Runs `task` there, as [`run`](Self::run), as the only one in `tasks`: it ends with them.
    async fn run_in<T: Send + 'static>(
        &self,
        tasks: &mut JoinSet<T>,
        within: Option<Duration>,
        what: &str,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Failure> {
        tasks.spawn_on(task, &self.handle);
        let done = async {
            match tasks.join_next().await {
                Some(Ok(done)) => Ok(done),
                Some(Err(error)) => Err(Failure::because(&format!("cannot {what}"), &error)),
                None => Err(Failure::new(FAILED, format!("cannot {what}"))),
            }
        };
        let Some(within) = within else { return done.await };
        timeout(within.saturating_add(GRACE), done).await.unwrap_or_else(|_| {
            let within = humantime::format_duration(within);
            Err(Failure::new(
                FAILED,
                format!("cannot {what}: the client does not answer within {within}, as if a server kept it busy"),
            ))
        })
    }

    /// Connects, and tries again until then while that may help, unless it is `once`.
    async fn connect(
        &self,
        config: &LockConfig,
        until: Option<Instant>,
        once: bool,
    ) -> Result<LockClient, Failure> {
        let mut failed = match self.connect_once(config).await? {
            Err(error) if !once && may_pass(&error, config) => error,
            connected => return Ok(connected?),
        };
        if until.is_some_and(|until| Instant::now() >= until) {
            return Err(failed.into());
        }
        let again = self.connect_again(config, &mut failed);
        let connected = match until {
            Some(until) => timeout_at(until, again).await.unwrap_or(Ok(None)),
            None => again.await,
        };
        connected?.ok_or_else(|| failed.into())
    }

    /// Says each reason once. Returns `None` if the last one is not worth another try.
    async fn connect_again(
        &self,
        config: &LockConfig,
        failed: &mut lockkit::Error,
    ) -> Result<Option<LockClient>, Failure> {
        let mut said = VecDeque::new();
        let mut pause = FIRST_PAUSE;
        while may_pass(failed, config) {
            let why = chain(failed);
            if !said.contains(&why) {
                say(&format!("cannot connect; trying again: {why}"));
                said.truncate(MOST_REASONS - 1);
                said.push_front(why);
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            match self.connect_once(config).await? {
                Ok(client) => return Ok(Some(client)),
                Err(error) => *failed = error,
            }
        }
        Ok(None)
    }

    async fn connect_once(&self, config: &LockConfig) -> Result<lockkit::Result<LockClient>, Failure> {
        let within = config
            .connect_timeout
            .unwrap_or(LockConfig::DEFAULT_CONNECT_TIMEOUT);
        let config = config.clone();
        let connect = async move { config.connect().await };
        self.run(Some(within), "connect", connect).await
    }

    /// Releases the lock. If the job `is_done`, the name stays taken for the time that it was asked to.
    async fn release(&self, guard: LockGuard, is_done: bool) -> Result<lockkit::Result<()>, Failure> {
        let release = async move {
            if is_done {
                guard.release().await
            } else {
                guard.release_early().await
            }
        };
        self.run(Some(self.op_timeout), "release", release).await
    }
}

/// A hold under which no command has begun. Dropped, as by a signal that comes with the grant, it is released early: nobody has done the
/// job, so that another may at once.
struct Unused {
    guard: Option<LockGuard>,
    clients: Handle,
}

impl Unused {
    /// On the client's threads.
    fn new(guard: LockGuard) -> Self {
        Self {
            guard: Some(guard),
            clients: Handle::current(),
        }
    }

    fn take(mut self) -> Result<LockGuard, Failure> {
        let guard = self.guard.take();
        guard.ok_or_else(|| Failure::new(FAILED, "the hold has been given up"))
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            let _on_the_client = self.clients.enter();
            // The client goes on with it, and waits for it when it is closed.
            let _ = pin!(guard.release_early()).poll(&mut Context::from_waker(Waker::noop()));
        }
    }
}

/// Returns whether to try again may help. A name that no resolver knows is misspelt, whatever the client makes of it. Of several servers
/// the others may come.
fn may_pass(error: &lockkit::Error, config: &LockConfig) -> bool {
    const UNKNOWN_HOST: [&str; 4] = [
        "Name or service not known",
        "No address associated with hostname",
        "Name does not resolve",
        "nodename nor servname provided",
    ];
    let why = chain(error);
    let is_misspelt = UNKNOWN_HOST.iter().any(|unknown| why.contains(unknown));
    error.is_transient() && (!is_misspelt || config.url.contains(','))
}

/// `wait` is what connecting has left of the time that was `given`.
async fn acquire(
    client: &LockClient,
    args: &Run,
    wait: Option<Duration>,
    given: Option<Duration>,
) -> Result<LockGuard, Failure> {
    let lock = lock(client, args)?;
    if !args.try_once {
        let Some(wait) = wait else {
            return Ok(lock.acquire().await?);
        };
        // What the client would allow for its last question and for leaving the queue may be more than is promised.
        let most = wait.saturating_add(LEAVE_WITHIN.saturating_sub(LEAVE_AT_LEAST));
        let Ok(acquired) = timeout(most, lock.acquire_timeout(wait)).await else {
            let (backend, name) = (client.info().name, args.name());
            let why =
                format!("{backend}: acquire failed for lock `{name}`: no answer in time from the server");
            return Err(Failure::new(FAILED, why));
        };
        return acquired.map_err(|error| match error {
            Error::Timeout {
                backend,
                name,
                waited,
                ..
            } => Error::timeout(backend, name, given.unwrap_or(waited)).into(),
            error => error.into(),
        });
    }
    let granted = lock.try_acquire().await?;
    granted.ok_or_else(|| Failure::new(NOT_GRANTED, format!("lock `{}` is taken", args.name())))
}

fn lock(client: &LockClient, args: &Run) -> lockkit::Result<Lock> {
    let lock = match args.permits {
        Some(permits) => client.semaphore(args.name(), permits)?,
        None if args.shared => client.lock(args.name())?.shared(),
        None => client.lock(args.name())?,
    };
    let mut options = AcquireOptions::new();
    options.hold_at_least = args.at_least;
    Ok(lock.with_options(options))
}

/// Runs the command, which inherits this URL, releases the lock as soon as it is done, and answers with the exit status.
async fn run_under(
    guard: LockGuard,
    args: &Run,
    url: &str,
    tied: Result<(std::process::Command, NotRun), Failure>,
    max_hold: Option<Duration>,
    clients: &Clients,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let held_too_long = max_hold.map(|max_hold| (max_hold, Instant::now() + max_hold));
    let (mut command, not_run) = match tied {
        Ok(tied) => tied,
        Err(failure) => {
            // Nobody has done the job, so that another may at once.
            let _ = clients.release(guard, false).await;
            return Err(failure);
        }
    };
    command
        .env("LOCKKIT_NAME", args.name())
        .env("LOCKKIT_TOKEN", guard.token().to_string())
        // A command that uses lockkit without a URL of its own locks at the same server, or not at all: elsewhere it would exclude nobody.
        .env("LOCKKIT_URL", url);
    let place = Place::choose(args.foreground);
    // A client that is kept busy has no descriptor to give.
    let spawned = timeout(
        clients.op_timeout + GRACE,
        Supervised::spawn(&guard, place, command, signals),
    )
    .await;
    let spawned = spawned.map_err(|error| cannot_start(&error));
    let mut supervised = match spawned.and_then(|spawned| spawned) {
        Ok(supervised) => supervised,
        Err(failure) => {
            // Nobody has done the job, so that another may at once.
            let _ = clients.release(guard, false).await;
            return Err(failure);
        }
    };
    supervised.held_too_long = held_too_long;
    let ending = supervised.until_end(&guard, signals).await?;
    let not_run = not_run.why();
    if let Some(why) = &not_run {
        say(why);
    }
    let released = clients.release(guard, not_run.is_none()).await;
    match (ending, released) {
        (Ending::Stopped(_), _) => Ok(LOST),
        (_, Ok(Err(error))) if error.is_lost() => Err(error.into()),
        (Ending::Exited(status), released) => {
            match released {
                Ok(Ok(())) => {}
                Ok(Err(error)) => say(&chain(&error)),
                Err(failure) => _ = failure.report(),
            }
            status_of(status)
        }
    }
}

/// A command that runs under a lock.
struct Supervised {
    child: Child,
    name: LockName,
    /// The signals that came before there was a command to which the terminal could have sent them.
    early: Vec<Signal>,
    /// The end of a lease that goes unrenewed, once TERM was sent for it.
    told: Option<Instant>,
    /// The command was told to stop, and from the first time until the second this process follows if it does.
    follows: Option<(Instant, Instant)>,
    /// The time for which the lock may be held, and its end.
    held_too_long: Option<(Duration, Instant)>,
}

/// The end of a command.
enum Ending {
    Exited(ExitStatus),
    /// It had to be stopped because the lock was lost, or about to be, as has been said.
    Stopped(String),
}

impl Supervised {
    async fn spawn(
        guard: &LockGuard,
        place: Place,
        command: std::process::Command,
        signals: &mut Signals,
    ) -> Result<Self, Failure> {
        // Where a descriptor keeps the hold alive, the command gets it: should this process be killed, the operating
        // system frees the lock when the command has gone too, not before. Nothing else is spawned meanwhile.
        let inherited = guard.descriptor().await;
        if let Some(descriptor) = &inherited {
            fcntl_setfd(descriptor, FdFlags::empty()).map_err(|error| cannot_start(&error))?;
        }
        let before = Before::look().map_err(|error| cannot_start(&error))?;
        // After all that takes its time. What comes later may have come to the command, too: one that has a handler is not told.
        let early = signals.so_far().await;
        guard.check()?;
        let child = Child::spawn(before, command, place).map_err(|error| cannot_start(&error))?;
        Ok(Self {
            child,
            name: guard.name().clone(),
            early,
            told: None,
            follows: None,
            held_too_long: None,
        })
    }

    /// Nothing is left of the command when this is done, also if it fails, but for what a command that exited by itself leaves behind, and
    /// for what does not end in time, which is said.
    async fn until_end(&mut self, guard: &LockGuard, signals: &mut Signals) -> Result<Ending, Failure> {
        let ending = self.watch(guard, signals).await;
        let ending = match ending {
            Ok(Ending::Stopped(why)) => self.kill(why).await,
            ending => ending,
        };
        if ending.is_err() {
            self.child.signal(Signal::KILL);
            if !self.child.end_all(KILLED_WITHIN).await {
                say(STILL_THERE);
            }
        }
        ending
    }

    /// Waits until the command has exited, or is to be killed.
    async fn watch(&mut self, guard: &LockGuard, signals: &mut Signals) -> Result<Ending, Failure> {
        let mut lost = guard.lost();
        let mut exited = false;
        for signal in mem::take(&mut self.early) {
            self.child.signal(signal);
            self.follow(signal, signals).await;
        }
        for signal in signals.so_far().await {
            self.child.pass_on_early(signal);
            self.follow(signal, signals).await;
        }
        loop {
            let stops_from = self.follows.map(|(from, _)| from);
            tokio::select! {
                biased;
                reason = &mut lost => {
                    if reason == LossReason::Asked {
                        self.end_in_time(guard, signals).await?;
                    }
                    return Ok(Ending::Stopped(format!("lock `{}` was lost: {reason}", self.name)));
                }
                ended = async {
                    if exited {
                        self.child.others_gone().await;
                        return Ok(Change::Exited);
                    }
                    self.child.changed(stops_from).await
                } => {
                    if ended.map_err(|error| cannot_wait(&error))? == Change::Stopped {
                        self.stop(signals).await;
                        continue;
                    }
                    if exited {
                        return Ok(Ending::Stopped(self.why_unrenewed(guard)));
                    }
                    if self.told.is_none() {
                        return self.child.reap().map(Ending::Exited).map_err(|error| cannot_wait(&error));
                    }
                    // What it has started was told to end, too, and has as long for it.
                    exited = true;
                }
                end = due(guard, self.told, exited) => {
                    if self.told == Some(end) {
                        return Ok(Ending::Stopped(self.why_unrenewed(guard)));
                    }
                    self.child.signal(Signal::TERM);
                    self.told = Some(end);
                }
                signal = signals.next() => {
                    // Lost since it was asked above, it ends as its reason says: in the next turn, without this signal.
                    if guard.is_held() {
                        self.heed(signal, signals).await;
                    }
                }
            }
        }
    }

    /// Passes on a signal, and [follows](Self::follow).
    async fn heed(&mut self, signal: Signal, signals: &mut Signals) {
        self.child.pass_on(signal);
        self.follow(signal, signals).await;
    }

    /// If it is a signal that stops, this process [stops](Self::stop) as soon as the command has.
    async fn follow(&mut self, signal: Signal, signals: &mut Signals) {
        if signal == Signal::CONT {
            self.follows = None;
        }
        if STOPPING.contains(&signal) && !signals.is_taken_back().await {
            let now = Instant::now();
            self.follows = Some((now, now + STOPS_WITHIN));
        }
    }

    /// Stops this process, once the command is stopped: whoever watches over the lock does not stand still while the command goes on.
    /// Stops what the command has started, too, also if that ignores the signal that stopped the command.
    async fn stop(&mut self, signals: &mut Signals) {
        let Some((_, until)) = self.follows.take().filter(|(_, until)| Instant::now() < *until) else {
            return;
        };
        if self.child.stop() {
            return signals.stop_now().await;
        }
        let again = Instant::now() + LOOK;
        if again < until {
            self.follows = Some((again, until));
        } else {
            say("some of what the command has started does not stop, so lockkit goes on, too");
        }
    }

    fn why_unrenewed(&self, guard: &LockGuard) -> String {
        let (why, outcome) = match self.held_too_long {
            Some((max_hold, over)) if Instant::now() >= over => (
                format!(
                    "was held for its max_hold of {}",
                    humantime::format_duration(max_hold)
                ),
                "so its command was stopped before the lease ran out",
            ),
            // Whether the command ended because it was told to, nobody knows.
            _ if guard.is_held() && guard.valid_until() > self.told => (
                "could not be renewed for a while".to_owned(),
                "so its command was told to stop",
            ),
            _ => (
                "could not be renewed".to_owned(),
                "so its command was stopped before the lease ran out",
            ),
        };
        format!("lock `{}` {why}, {outcome}", self.name)
    }

    /// Tells the command to end, and waits until it has, for as long as the lease of a hold that was asked for lasts. Nobody else is
    /// granted the lock meanwhile.
    async fn end_in_time(&mut self, guard: &LockGuard, signals: &mut Signals) -> Result<(), Failure> {
        self.child.signal(Signal::TERM);
        let mut over = pin!(due_when_asked(guard));
        loop {
            let stops_from = self.follows.map(|(from, _)| from);
            let changed = async {
                let change = self.child.changed(stops_from).await?;
                if change == Change::Exited {
                    self.child.others_gone().await;
                }
                Ok(change)
            };
            tokio::select! {
                biased;
                () = &mut over => return Ok(()),
                changed = changed => match changed.map_err(|error| cannot_wait(&error))? {
                    Change::Exited => return Ok(()),
                    Change::Stopped => self.stop(signals).await,
                },
                signal = signals.next() => self.heed(signal, signals).await,
            }
        }
    }

    /// Says why, and kills the command.
    async fn kill(&mut self, why: String) -> Result<Ending, Failure> {
        say(&why);
        let gone = self.child.end(KILLED_WITHIN).await;
        if !gone.map_err(|error| cannot_wait(&error))? {
            say(STILL_THERE);
        }
        Ok(Ending::Stopped(why))
    }
}

/// Resolves to the end of a lease that is not renewed, when it is time for TERM; or for KILL, if `told` says that TERM
/// was sent for this one. A lease may be far shorter than the ttl that was asked for, and healthy with less than a
/// quarter of it left; so nothing is done unless a renewal is failing. If the command has `exited` upon TERM, what it
/// has started is not spared by a renewal that succeeds after all: nobody would ever tell it again.
async fn due(guard: &LockGuard, told: Option<Instant>, exited: bool) -> Instant {
    if let (true, Some(end), Some(lease)) = (exited, told, guard.lease_length()) {
        sleep_until(end.checked_sub(before_kill(lease)).unwrap_or(end)).await;
        return end;
    }
    loop {
        let lease = guard.valid_until().zip(guard.lease_length());
        tokio::select! {
            _ = guard.renewal_failing() => {}
            // The client may be too busy to tell, and then there is no time for a TERM to be heeded.
            Some(end) = async {
                let (end, lease) = lease?;
                sleep_until(end.checked_sub(before_kill(lease) / 2).unwrap_or(end)).await;
                Some(end)
            } => {
                if guard.valid_until() != Some(end) {
                    continue;
                }
                if told != Some(end) {
                    return end;
                }
            }
        }
        let (Some(end), Some(lease)) = (guard.valid_until(), guard.lease_length()) else {
            return std::future::pending().await;
        };
        let ahead = if told == Some(end) {
            before_kill(lease)
        } else {
            lease / 5
        };
        sleep_until(end.checked_sub(ahead).unwrap_or(end)).await;
        // Otherwise it was renewed in the meantime.
        if guard.valid_until() == Some(end) {
            return end;
        }
    }
}

/// Resolves when it is time for KILL after a hold was asked for, and never where only this process can end it.
///
/// It looks again and again: the end may come nearer, as after the machine was suspended, and a hold without a lease gets one when its
/// `max_hold` is over.
async fn due_when_asked(guard: &LockGuard) {
    loop {
        if let Some(end) = guard.valid_until() {
            let ahead = before_kill(guard.lease_length().unwrap_or(Duration::MAX));
            if Instant::now() + ahead >= end {
                return;
            }
        }
        sleep(LOOK).await;
    }
}

/// Returns how long before the end of a lease KILL is sent.
fn before_kill(lease: Duration) -> Duration {
    (lease / 16).min(Duration::from_millis(500))
}

fn cannot_wait(error: &std::io::Error) -> Failure {
    Failure::because("cannot wait for the command", error)
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
    use std::sync::{Mutex, PoisonError};

    use lockkit::{MemoryBackend, memory::FaultPoint};
    use lockkit_testbed::Lateness;
    use tokio::signal::unix::{self, SignalKind};

    use super::*;

    const TTL: Duration = Duration::from_secs(8);

    /// The end of a command.
    struct Ended {
        ending: Ending,
        /// The time that was left of the lease when it was seen to have ended.
        left: Duration,
        /// The time that would have been left if the load of this machine had not delayed its end and the look at it: by five times what it
        /// delayed a thread that slept beside it, since a shell has to hear, to end and to be reaped, each in its turn.
        left_without_load: Duration,
    }

    impl Ended {
        fn was_stopped_between(&self, least: Duration, most: Duration) {
            assert!(matches!(self.ending, Ending::Stopped(_)));
            let (left, without_load) = (self.left, self.left_without_load);
            assert!(
                without_load > least && left <= most,
                "{left:?} before the end, {without_load:?} without the load of this machine: expected {least:?} to {most:?}"
            );
        }
    }

    /// A process runs one command. Here is one at a time.
    static ALONE: Mutex<()> = Mutex::new(());

    fn alone(test: impl Future<Output = ()>) {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(test);
    }

    /// Runs the script under a lease whose renewals do what `fail` says; answers with how it ended, and how long before
    /// the lease.
    async fn under(place: Place, script: &str, fail: impl FnOnce(&MemoryBackend)) -> Ended {
        under_a(TTL, place, script, fail).await
    }

    async fn under_a(ttl: Duration, place: Place, script: &str, fail: impl FnOnce(&MemoryBackend)) -> Ended {
        let beside = Lateness::watch();
        let memory = MemoryBackend::new();
        fail(&memory);
        let lock = LockClient::new(memory).lock("job").unwrap();
        let guard = lock.acquire_with(&AcquireOptions::new().ttl(ttl)).await.unwrap();
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script]);
        let mut signals = Signals::listen().unwrap();
        let spawned = Supervised::spawn(&guard, place, command, &mut signals).await;
        let mut supervised = spawned.unwrap();
        let ending = supervised.until_end(&guard, &mut signals).await.unwrap();
        let (lease_ends, now) = (guard.valid_until().unwrap(), Instant::now());
        Ended {
            ending,
            left: lease_ends.saturating_duration_since(now),
            left_without_load: (lease_ends + 5 * beside.most()).saturating_duration_since(now),
        }
    }

    /// With renewals that are never answered.
    async fn unrenewed(script: &str) -> Ended {
        let hang = |memory: &MemoryBackend| memory.delay(FaultPoint::Renew, Duration::from_mins(1));
        under(Place::Apart, script, hang).await
    }

    #[test]
    fn an_unrenewed_lease_sends_term_an_eighth_before_its_end() {
        alone(async {
            let ended = unrenewed("trap 'exit 0' TERM; while :; do sleep 0.01; done").await;
            ended.was_stopped_between(TTL / 16, TTL / 8);
        });
    }

    #[test]
    fn and_kill_before_its_end_to_a_command_that_stays() {
        alone(async {
            let dir = tempfile::tempdir().unwrap();
            let log = dir.path().join("log");
            let script = format!(
                "trap 'echo TERM >> {}' TERM; while :; do sleep 0.01; done",
                log.display()
            );
            let ended = unrenewed(&script).await;
            ended.was_stopped_between(Duration::ZERO, TTL / 16);
            assert_eq!(
                std::fs::read_to_string(log).unwrap(),
                "TERM\n",
                "it had its chance, once"
            );
        });
    }

    #[test]
    fn failed_renewals_send_term_a_fifth_before_the_end() {
        alone(async {
            let ended = under(
                Place::Apart,
                "trap 'exit 0' TERM; while :; do sleep 0.01; done",
                |memory| memory.fail_next(FaultPoint::Renew, u32::MAX),
            )
            .await;
            ended.was_stopped_between(TTL / 8, TTL / 5);
        });
    }

    /// The answer comes when less than a quarter of the lease is left, as it may on a healthy ZooKeeper.
    #[test]
    fn a_late_renewal_ends_nothing() {
        // What is left between the answer and the TERM is a tenth of it.
        const TTL: Duration = Duration::from_secs(20);

        alone(async {
            let late = |memory: &MemoryBackend| {
                memory.delay(FaultPoint::Renew, TTL * 45 / 100);
                let memory = memory.clone();
                tokio::spawn(async move {
                    // The first one is under way.
                    tokio::time::sleep(TTL / 2).await;
                    memory.delay(FaultPoint::Renew, Duration::ZERO);
                });
            };
            let ended = under_a(TTL, Place::Apart, "sleep 21", late).await;
            assert!(matches!(ended.ending, Ending::Exited(status) if status.success()));
        });
    }

    /// It does not heed the TERM upon which the command itself exits.
    async fn a_stubborn_child_is_gone(place: Place) {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let script = format!(
            "(trap '' TERM; exec sleep 60 >/dev/null 2>&1) & echo $! > {}; trap 'exit 0' TERM; while :; do sleep 0.01; done",
            pid.display()
        );
        let hang = |memory: &MemoryBackend| memory.delay(FaultPoint::Renew, Duration::from_mins(1));
        let ended = under(place, &script, hang).await;
        ended.was_stopped_between(Duration::ZERO, TTL);
        let pid = std::fs::read_to_string(pid).unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        assert!(
            stat.as_ref().map_or(true, |stat| stat.contains(") Z ")),
            "it is still there: {stat:?}"
        );
    }

    /// It was told to end, and ends; the lease goes on, and something of it stays.
    #[test]
    fn a_lease_that_recovers_gives_no_more_time() {
        alone(async {
            let dir = tempfile::tempdir().unwrap();
            let pid = dir.path().join("pid");
            let script = format!(
                "(trap '' TERM; exec sleep 60 >/dev/null 2>&1) & echo $! > {}; trap 'exit 0' TERM; while :; do sleep 0.01; done",
                pid.display()
            );
            let recover = |memory: &MemoryBackend| {
                memory.fail_next(FaultPoint::Renew, u32::MAX);
                let memory = memory.clone();
                tokio::spawn(async move {
                    // A fifth before the end it is told.
                    tokio::time::sleep(TTL * 4 / 5 + Duration::from_millis(300)).await;
                    memory.fail_next(FaultPoint::Renew, 0);
                });
            };
            let (began, beside) = (Instant::now(), Lateness::watch());
            let ended = tokio::time::timeout(TTL * 4, under(Place::Apart, &script, recover)).await;
            let took = began.elapsed();
            let most = TTL + 5 * beside.most();
            let pid = std::fs::read_to_string(pid).unwrap();
            let there = std::path::Path::new("/proc").join(pid.trim()).exists();
            assert!(
                ended.is_ok() && took < most && !there,
                "ended: {}, after {took:?}, and what it left is there: {there}",
                ended.is_ok()
            );
        });
    }

    /// As below `timeout`, which goes on when the command exits.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_group_of_its_own_gets_term_and_then_kill() {
        alone(async {
            for place in [Place::Apart, Place::Foreground { at_terminal: false }] {
                let dir = tempfile::tempdir().unwrap();
                let [pid, log] = ["pid", "log"].map(|file| dir.path().join(file));
                let worker = format!(
                    "trap 'echo TERM >{}' TERM; echo \\$\\$ >{}; while :; do sleep 0.01; done",
                    log.display(),
                    pid.display()
                );
                let script = format!(
                    "timeout 60 sh -c \"{worker}\" >/dev/null 2>&1 & trap 'exit 0' TERM; while :; do sleep 0.01; done"
                );
                let hang = |memory: &MemoryBackend| memory.delay(FaultPoint::Renew, Duration::from_mins(1));
                let ended = under(place, &script, hang).await;
                ended.was_stopped_between(Duration::ZERO, TTL / 16);
                assert_eq!(std::fs::read_to_string(log).unwrap(), "TERM\n", "{place:?}");
                let pid = std::fs::read_to_string(pid).unwrap();
                let there = std::path::Path::new("/proc").join(pid.trim()).exists();
                assert!(!there, "{place:?}");
            }
        });
    }

    /// It may have ended because it was told to, or by itself: nobody knows.
    #[test]
    fn a_command_that_was_told_to_end_is_stopped_whatever_follows() {
        // A renewal is tried again several times between TERM and KILL.
        const TTL: Duration = Duration::from_secs(12);

        alone(async {
            let recover = |memory: &MemoryBackend| {
                memory.fail_next(FaultPoint::Renew, u32::MAX);
                let memory = memory.clone();
                tokio::spawn(async move {
                    // A fifth before the end it is told.
                    tokio::time::sleep(TTL * 4 / 5 + Duration::from_millis(100)).await;
                    memory.fail_next(FaultPoint::Renew, 0);
                });
            };
            // Until after the end of the lease that it was told for.
            let ended = under_a(TTL, Place::Apart, "trap '' TERM; sleep 13", recover).await;
            let Ending::Stopped(why) = ended.ending else {
                panic!("it ended by itself");
            };
            assert_eq!(
                why,
                "lock `job` could not be renewed for a while, so its command was told to stop"
            );
        });
    }

    /// The terminal sends it to those who are there, and counts on lockkit for nobody else.
    #[test]
    fn a_signal_from_while_the_command_begins_reaches_it() {
        alone(async {
            let mut signals = Signals::listen().unwrap();
            if signals.has_ignored(Signal::INT) {
                return;
            }
            let mut heard = unix::signal(SignalKind::interrupt()).unwrap();
            let guard = MemoryBackend::new().guard("job").unwrap();
            let mut command = std::process::Command::new("sleep");
            command.arg("3");
            let place = Place::Foreground { at_terminal: true };
            let spawned = Supervised::spawn(&guard, place, command, &mut signals).await;
            let mut supervised = spawned.unwrap();
            rustix::process::kill_process(rustix::process::getpid(), Signal::INT).unwrap();
            heard.recv().await;
            let ending = supervised.until_end(&guard, &mut signals).await.unwrap();
            assert!(
                matches!(ending, Ending::Exited(status) if status.signal() == Some(Signal::INT.as_raw())),
                "it has not got it"
            );
        });
    }

    /// Which it has by the time at which lockkit has a processor again.
    #[test]
    fn a_signal_from_before_the_command_reaches_its_handler() {
        use std::io::{self, BufRead, BufReader};

        alone(async {
            let mut signals = Signals::listen().unwrap();
            if signals.has_ignored(Signal::INT) {
                return;
            }
            let mut heard = unix::signal(SignalKind::interrupt()).unwrap();
            let guard = MemoryBackend::new().guard("job").unwrap();
            rustix::process::kill_process(rustix::process::getpid(), Signal::INT).unwrap();
            heard.recv().await;
            let (reader, writer) = io::pipe().unwrap();
            let mut command = std::process::Command::new("sh");
            let script = "trap 'exit 7' INT; echo up; sleep 3 >/dev/null & wait";
            command.args(["-c", script]).stdout(writer);
            let place = Place::Foreground { at_terminal: true };
            let spawned = Supervised::spawn(&guard, place, command, &mut signals).await;
            let mut supervised = spawned.unwrap();
            let mut said = String::new();
            BufReader::new(reader).read_line(&mut said).unwrap();
            assert_eq!(said, "up\n");
            let ending = supervised.until_end(&guard, &mut signals).await.unwrap();
            assert!(
                matches!(ending, Ending::Exited(status) if status.code() == Some(7)),
                "it has not got it"
            );
        });
    }

    #[test]
    fn the_end_of_a_wait_is_part_of_the_time_to_leave() {
        let ms = Duration::from_millis;
        let now = Instant::now() + ms(10_000);
        assert_eq!(leave_by(None, now), now + ms(400));
        assert_eq!(
            leave_by(Some(now + ms(5_000)), now),
            now + ms(400),
            "it is not over"
        );
        assert_eq!(leave_by(Some(now - ms(150)), now), now + ms(250));
        assert_eq!(leave_by(Some(now - ms(5_000)), now), now + ms(100));
    }

    /// There may be many of them, and little of the lease.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_killed_waits_for_no_look_at_all_processes() {
        use std::{
            io::{self, Read},
            process::Stdio,
        };

        use rustix::process::{Pid, kill_process_group};

        alone(async {
            let mut crowd = std::process::Command::new("setsid")
                .args(["sh", "-c", "for i in $(seq 400); do sleep 60 & done; echo; wait"])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut is_there = [0];
            crowd.stdout.take().unwrap().read_exact(&mut is_there).unwrap();
            let mut measured = Vec::new();
            for place in [Place::Apart, Place::Foreground { at_terminal: false }] {
                let (mut look, mut death) = (Duration::MAX, Duration::MAX);
                for _ in 0..10 {
                    let clock = Instant::now();
                    family::relatives(&[]).unwrap();
                    look = look.min(clock.elapsed());

                    let (mut reader, writer) = io::pipe().unwrap();
                    let mut command = std::process::Command::new("sleep");
                    command.arg("60").stdout(writer);
                    let mut child = Child::spawn(Before::look().unwrap(), command, place).unwrap();
                    // What it writes to ends with it.
                    let died = thread::spawn(move || {
                        reader.read_to_end(&mut Vec::new()).unwrap();
                        Instant::now()
                    });
                    let clock = Instant::now();
                    child.signal(Signal::KILL);
                    death = death.min(died.join().unwrap() - clock);
                    child.exited().await.unwrap();
                    child.reap().unwrap();
                }
                measured.push((place, death, look));
            }
            kill_process_group(Pid::from_child(&crowd), Signal::KILL).unwrap();
            crowd.wait().unwrap();
            for (place, death, look) in measured {
                assert!(
                    death < look / 2,
                    "{place:?}: killed after {death:?}, a look takes {look:?}"
                );
            }
        });
    }

    /// Its id, and that of its group, may be a stranger's by then.
    #[cfg(target_os = "linux")]
    #[test]
    fn who_was_reaped_is_sent_nothing() {
        use std::{
            io::{self, BufRead, BufReader, Write},
            process::Stdio,
        };

        use rustix::process::{Pid, WaitOptions, kill_process, waitpid};

        alone(async {
            let mut stranger = std::process::Command::new("perl")
                .args(["-e", "$| = 1; while (<STDIN>) { setpgrp(0, $_); print }"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let (mut input, output) = (stranger.stdin.take().unwrap(), stranger.stdout.take().unwrap());
            let mut output = BufReader::new(output);
            let (reader, writer) = io::pipe().unwrap();
            let mut command = std::process::Command::new("sh");
            command.args(["-c", "echo $$; exec sleep 60"]).stdout(writer);
            let child = Child::spawn(Before::look().unwrap(), command, Place::Apart).unwrap();
            let mut id = String::new();
            BufReader::new(reader).read_line(&mut id).unwrap();
            let pid = Pid::from_raw(id.trim().parse().unwrap());
            let mut joins = |when: &str| {
                let mut answer = String::new();
                let asked = input.write_all(id.as_bytes());
                output.read_line(&mut answer).unwrap();
                assert!(asked.is_ok() && answer == id, "the stranger has ended {when}");
            };
            joins("before");
            kill_process(pid.unwrap(), Signal::KILL).unwrap();
            waitpid(pid, WaitOptions::empty()).unwrap();
            child.signal(Signal::TERM);
            joins("by a signal");
            drop(child);
            joins("by the end");
            stranger.kill().unwrap();
            stranger.wait().unwrap();
        });
    }

    /// Somebody else has reaped the command. The guard goes when that is known, and the lock is free.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_command_that_cannot_be_waited_for_leaves_nothing() {
        use std::io::{self, BufRead, BufReader};

        use rustix::process::{Pid, WaitOptions, kill_process, waitpid};

        alone(async {
            for place in [Place::Apart, Place::Foreground { at_terminal: false }] {
                let guard = MemoryBackend::new().guard("job").unwrap();
                let (reader, writer) = io::pipe().unwrap();
                let mut command = std::process::Command::new("sh");
                let script = "sleep 60 >/dev/null & echo $!; echo $$; exec sleep 60 >/dev/null";
                command.args(["-c", script]).stdout(writer);
                let mut signals = Signals::listen().unwrap();
                let spawned = Supervised::spawn(&guard, place, command, &mut signals).await;
                let mut supervised = spawned.unwrap();
                let mut lines = BufReader::new(reader).lines();
                let [started, command] = [(); 2].map(|()| lines.next().unwrap().unwrap());
                let command = Pid::from_raw(command.parse().unwrap());
                kill_process(command.unwrap(), Signal::KILL).unwrap();
                waitpid(command, WaitOptions::empty()).unwrap();
                let ending = supervised.until_end(&guard, &mut signals).await;
                assert!(ending.is_err(), "{place:?}");
                let stat = std::fs::read_to_string(format!("/proc/{started}/stat"));
                assert!(
                    stat.as_ref().map_or(true, |stat| stat.contains(") Z ")),
                    "{place:?}: it is still there: {stat:?}"
                );
            }
        });
    }

    /// Its parent has gone to a session of its own, and does not reap it.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_was_killed_and_not_reaped_is_gone() {
        alone(async {
            let dir = tempfile::tempdir().unwrap();
            let pid = dir.path().join("pid");
            let script = format!(
                "sh -c 'sleep 60 & echo $$ > {}; exec setsid sleep 60' >/dev/null 2>&1 & trap '' TERM; while :; do sleep 0.01; done",
                pid.display()
            );
            let ended = unrenewed(&script).await;
            let pid = std::fs::read_to_string(pid).unwrap().trim().parse().unwrap();
            rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::KILL)
                .unwrap();
            ended.was_stopped_between(Duration::ZERO, TTL);
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn nothing_of_a_group_outlives_the_lease() {
        alone(async {
            a_stubborn_child_is_gone(Place::Apart).await;
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn nothing_in_the_foreground_outlives_the_lease() {
        alone(async {
            a_stubborn_child_is_gone(Place::Foreground { at_terminal: false }).await;
        });
    }
}
