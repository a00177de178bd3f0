//! Another process that holds, waits, contends, stops, goes on or dies, because it was told to.
//!
//! A helper is the running program started once more. It reads one command per line from its standard input and
//! writes one line per answer, marked so that it is found among whatever else the program prints. It ends without
//! releasing anything when its input ends, so that none outlives the program that started it.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{self, BufRead, BufReader, Read as _, Seek as _, Write as _},
    num::NonZeroU32,
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::{ChildStdin, Command, Stdio},
    time::Duration,
};

use futures_util::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use lockkit_core::{
    AcquireOptions, BoxError, Candidate, DetachedHold, FenceGate, FencingToken, Lock, LockClient, LockGuard,
    Observer,
    spi::{Mode, chain},
};
use tokio::{
    runtime,
    sync::mpsc,
    time::{error::Elapsed, timeout},
};

use crate::{
    Harness,
    cases::contention::{Plan, contend},
    history::now,
    measure::{Client, Contender, Crowd, Subject, processor_time, read_hold, write_rush},
    process::Process,
    torture,
};

/// Set for helpers; the value is the URL, which may be empty.
const URL: &str = "LOCKKIT_CONFORMANCE_HELPER";
/// Begins each answer.
const MARK: &str = "lockkit-helper: ";
/// No answer takes longer, unless a dead holder has to be waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts this program as a helper.
#[derive(Clone, Debug)]
pub struct Launch {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Launch {
    /// This program with `arguments`, upon which it has to call [`main`].
    ///
    /// # Errors
    /// If the system does not tell where this program is.
    pub fn this_program<A: Into<OsString>>(arguments: impl IntoIterator<Item = A>) -> io::Result<Self> {
        Ok(Self {
            program: std::env::current_exe()?,
            arguments: arguments.into_iter().map(Into::into).collect(),
        })
    }

    /// The test `helper_process` that [`tests!`](crate::tests) generated in `module`.
    pub(crate) fn test_of(module: &str) -> Self {
        let test = match module.split_once("::") {
            Some((_crate, inner)) => format!("{inner}::helper_process"),
            None => "helper_process".to_owned(),
        };
        let arguments = ["--exact", &test, "--nocapture", "--test-threads=1"];
        Self {
            program: std::env::args_os().next().map(PathBuf::from).unwrap_or_default(),
            arguments: arguments.map(OsString::from).to_vec(),
        }
    }
}

/// Returns whether this process was started as a helper.
pub fn is_helper() -> bool {
    std::env::var_os(URL).is_some()
}

/// The URL that this process was given when it was started as a helper, which may be empty.
///
/// # Errors
/// If it was not.
pub fn url() -> Result<String, BoxError> {
    std::env::var(URL).map_err(|_| "only the conformance suite starts this".into())
}

/// Serves as a helper until the standard input ends, then exits without releasing anything. `connect` makes a client
/// of the server at a URL.
///
/// # Errors
/// If this process was not started as a helper, or has no runtime.
pub fn main<F, Fut>(connect: F) -> Result<(), BoxError>
where
    F: Fn(String) -> Fut,
    Fut: Future<Output = lockkit_core::Result<LockClient>>,
{
    let url = url()?;
    serve(Inside {
        connect,
        url,
        client: None,
        least: None,
        guards: HashMap::new(),
        crowd: None,
    })
}

/// Serves as a helper for a subject that is not a lockkit backend. It takes part in [`measure`](crate::measure) alone:
/// it contends, it holds, and it dies.
///
/// # Errors
/// If this process was not started as a helper, or has no runtime.
pub fn rival(subject: impl Subject) -> Result<(), BoxError> {
    url()?;
    serve(Outsider {
        subject,
        client: None,
        held: Vec::new(),
        crowd: None,
    })
}

/// Does what the commands say that come in.
trait Obey {
    async fn obey(&mut self, command: &str) -> Result<String, BoxError>;
}

fn serve(mut helper: impl Obey) -> Result<(), BoxError> {
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let (line, mut lines) = mpsc::channel(16);
    std::thread::spawn(move || {
        for command in io::stdin().lines().map_while(Result::ok) {
            if line.blocking_send(command).is_err() {
                return;
            }
        }
        // The parent process is gone.
        std::process::exit(0);
    });
    runtime.block_on(async {
        answer("ready");
        while let Some(command) = lines.recv().await {
            let reply = helper.obey(&command).await;
            answer(&reply.unwrap_or_else(|error| format!("error {}", chain(&*error))));
        }
    });
    Ok(())
}

/// Runs the generated test `helper_process`: serves as a helper if started as one, else tests helpers.
#[doc(hidden)]
pub fn as_test(harness: &impl Harness, module: &str) {
    let done = if is_helper() {
        main(|url| async move { harness.connect(&url).await })
    } else {
        self_test(&Launch::test_of(module))
    };
    if let Err(error) = done {
        panic!("{error}");
    }
}

/// A helper starts, answers, stands still while stopped, goes on, and is gone once killed.
fn self_test(launch: &Launch) -> Result<(), BoxError> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut helper = Helper::start(launch, None).await?;
        let expected = format!("pong {}", helper.process.id());
        let answered = helper.ask("ping").await?;
        if answered != expected {
            return Err(format!("expected `{expected}` from a helper, got `{answered}`").into());
        }
        if cfg!(unix) {
            helper.process.stop()?;
            helper.send("ping")?;
            if let Ok(answered) = timeout(Duration::from_millis(50), helper.reply()).await {
                return Err(format!("expected silence from a stopped helper, got {answered:?}").into());
            }
            helper.process.resume()?;
            helper.reply().await?;
        }
        let status = helper.process.kill()?;
        if status.success() {
            return Err("a killed helper ended in success".into());
        }
        Ok(())
    })
}

/// A helper, seen from the process that started it. It is killed on drop.
#[derive(Debug)]
pub(crate) struct Helper {
    pub(crate) process: Process,
    commands: ChildStdin,
    answers: mpsc::Receiver<String>,
}

impl Helper {
    pub(crate) async fn start(launch: &Launch, url: Option<&str>) -> io::Result<Self> {
        let mut command = Command::new(&launch.program);
        command.args(&launch.arguments).env(URL, url.unwrap_or_default());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let mut process = Process::spawn(&mut command)?;
        let child = process.child();
        let (Some(commands), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("a helper without pipes"));
        };
        let (sender, answers) = mpsc::channel(1_024);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let Some(at) = line.find(MARK) else { continue };
                if sender.blocking_send(line[at + MARK.len()..].to_owned()).is_err() {
                    return;
                }
            }
        });
        let mut helper = Self {
            process,
            commands,
            answers,
        };
        match helper.reply().await?.as_str() {
            "ready" => Ok(helper),
            other => Err(io::Error::other(format!("a helper began with `{other}`"))),
        }
    }

    /// Its process and what it answers, for those who stop or kill the one while others hear the other.
    pub(crate) fn parts(self) -> (Process, ChildStdin, mpsc::Receiver<String>) {
        (self.process, self.commands, self.answers)
    }

    /// Gives a command without waiting for its answer.
    pub(crate) fn send(&mut self, command: &str) -> io::Result<()> {
        writeln!(self.commands, "{command}")?;
        self.commands.flush()
    }

    /// The next answer.
    pub(crate) async fn reply(&mut self) -> io::Result<String> {
        self.reply_within(PATIENCE).await
    }

    /// Waits for a reply that may take longer.
    pub(crate) async fn reply_within(&mut self, patience: Duration) -> io::Result<String> {
        let answer = timeout(patience, self.answers.recv()).await;
        let answer = answer
            .map_err(|_: Elapsed| io::Error::other(format!("a helper gave no answer within {patience:?}")))?;
        answer.ok_or_else(|| io::Error::other("a helper ended instead of answering"))
    }

    pub(crate) async fn ask(&mut self, command: &str) -> io::Result<String> {
        self.send(command)?;
        self.reply().await
    }

    /// Has it acquire, and returns the token and when it was granted.
    pub(crate) async fn hold(&mut self, request: &Request<'_>) -> io::Result<(u64, u64)> {
        self.hold_after(Duration::ZERO, request).await
    }

    /// Acquires a name that a dead holder may keep for up to `bound`.
    pub(crate) async fn hold_after(
        &mut self,
        bound: Duration,
        request: &Request<'_>,
    ) -> io::Result<(u64, u64)> {
        self.send(&format!("acquire {request}"))?;
        self.granted_within(PATIENCE + bound).await
    }

    /// Takes the answer to an `acquire` or `try` that has to be a grant.
    pub(crate) async fn granted(&mut self) -> io::Result<(u64, u64)> {
        self.granted_within(PATIENCE).await
    }

    async fn granted_within(&mut self, patience: Duration) -> io::Result<(u64, u64)> {
        let answer = self.reply_within(patience).await?;
        let words: Vec<_> = answer.split(' ').collect();
        match words[..] {
            ["granted", token, at] => token.parse().ok().zip(at.parse().ok()),
            _ => None,
        }
        .ok_or_else(|| io::Error::other(format!("expected a helper to be granted, got `{answer}`")))
    }
}

/// An acquisition for a helper. It calls the guard `slot` from then on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) slot: &'a str,
    pub(crate) mode: Mode,
    pub(crate) ttl: Duration,
    pub(crate) name: &'a str,
}

impl std::fmt::Display for Request<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            slot,
            mode,
            ttl,
            name,
        } = self;
        write!(f, "{slot} {} {} {name}", mode_word(*mode), ttl.as_millis())
    }
}

pub(crate) fn mode_word(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".to_owned(),
        Mode::Shared => "shared".to_owned(),
        Mode::Permits(n) => n.to_string(),
    }
}

/// The helper's own side.
struct Inside<F> {
    connect: F,
    url: String,
    client: Option<LockClient>,
    guards: HashMap<String, LockGuard>,
    /// The `hold_at_least` of what it acquires from now on.
    least: Option<Duration>,
    crowd: Option<Crowd<LockClient>>,
}

impl<F, Fut> Obey for Inside<F>
where
    F: Fn(String) -> Fut,
    Fut: Future<Output = lockkit_core::Result<LockClient>>,
{
    async fn obey(&mut self, command: &str) -> Result<String, BoxError> {
        let words: Vec<_> = command.split(' ').collect();
        if self.client.is_none() && !matches!(words[0], "ping" | "crowd" | "rush" | "close" | "torture") {
            self.client = Some((self.connect)(self.url.clone()).await?);
        }
        match words[..] {
            ["crowd", clients, tasks, name] => {
                let clients = (0..clients.parse()?).map(|_: u32| (self.connect)(self.url.clone()));
                self.crowd = Some(Crowd::of(try_join_all(clients).await?, tasks.parse()?, name).await?);
                Ok("gathered".to_owned())
            }
            ["rush", stretch, hold] => rush(self.crowd.as_mut(), stretch, hold).await,
            ["hold", locks, ttl, name] => {
                self.hold(locks.parse()?, ttl, name).await?;
                Ok("held".to_owned())
            }
            ["usage"] => Ok(usage()),
            ["close"] => {
                // It closes with what it holds.
                if let Some(client) = self.client.take() {
                    client.close().await?;
                }
                self.guards.clear();
                if let Some(crowd) = self.crowd.take() {
                    crowd.close().await?;
                }
                Ok("closed".to_owned())
            }
            ["ping"] => Ok(format!("pong {}", std::process::id())),
            ["exit"] => std::process::exit(0),
            ["least", least] => Ok(self.note_least(least.parse()?)),
            ["acquire", slot, mode, ttl, name] => {
                let guard = self.lock(mode, ttl, name)?.acquire().await?;
                Ok(self.keep(slot, guard))
            }
            ["try", slot, mode, ttl, name] => match self.lock(mode, ttl, name)?.try_acquire().await? {
                Some(guard) => Ok(self.keep(slot, guard)),
                None => Ok("taken".to_owned()),
            },
            ["release", slot] => {
                let guard = self.guards.remove(slot).ok_or("no such guard")?;
                guard.release().await?;
                Ok("released".to_owned())
            }
            ["detach", slot] => {
                let guard = self.guards.remove(slot).ok_or("no such guard")?;
                Ok(format!("detached {}", guard.detach().await?.encode()))
            }
            ["adopt", slot, message] => {
                let client = self.client.as_ref().ok_or("no client")?;
                let guard = client.adopt(&mut DetachedHold::decode(message)?).await?;
                Ok(self.keep(slot, guard))
            }
            ["check", slot] => match self.guard(slot)?.check() {
                Ok(()) => Ok("held".to_owned()),
                Err(error) if error.is_lost() => Ok("lost".to_owned()),
                Err(error) => Err(error.into()),
            },
            ["lost", slot] => {
                timeout(PATIENCE, self.guard(slot)?.lost()).await?;
                Ok("lost".to_owned())
            }
            ["write", slot, path] => {
                let token = self.guard(slot)?.token();
                let admitted = fenced_write(Path::new(path), token)?;
                Ok(if admitted { "written" } else { "refused" }.to_owned())
            }
            ["contend", mode, ttl, rounds, workers, seed, who, name] => {
                let plan = Plan {
                    lock: self.lock(mode, ttl, name)?,
                    mode: parse_mode(mode)?,
                    rounds: rounds.parse()?,
                    workers: workers.parse()?,
                    seed: seed.parse()?,
                    who: who.parse()?,
                };
                for record in contend(plan).await? {
                    answer(&format!("record {record}"));
                }
                // Guards were dropped: whoever is told that this is done may end this process.
                if let Some(client) = self.client.take() {
                    client.close().await?;
                }
                Ok("done".to_owned())
            }
            ["elect", id, ttl, name] => {
                let client = self.client.as_ref().ok_or("no client")?;
                let ttl = Duration::from_millis(ttl.parse()?);
                let election = client.election(name)?.with_ttl(ttl);
                stand(election.candidate(id)?, election.observe());
                Ok("stands".to_owned())
            }
            ["torture", process, origin, path] => {
                let part = torture::read_part(process, origin, path)?;
                torture::help(part, &self.connect, answer).await;
                Ok("done".to_owned())
            }
            _ => Err(format!("not a command: `{command}`").into()),
        }
    }
}

impl<F> Inside<F> {
    /// Has what it acquires from now on be kept for so many ms.
    fn note_least(&mut self, least: u64) -> String {
        self.least = Some(Duration::from_millis(least));
        "noted".to_owned()
    }

    /// Takes so many locks, whose names begin with `name`.
    async fn hold(&mut self, locks: u32, ttl: &str, name: &str) -> Result<(), BoxError> {
        let locks = (0..locks).map(|index| {
            let slot = format!("{name}/{index}");
            self.lock("exclusive", ttl, &slot).map(|lock| (slot, lock))
        });
        let locks: Vec<_> = locks.collect::<Result<_, _>>()?;
        // As many at once as make use of the server, and few enough to be told what is wrong with the first.
        let mut acquiring = stream::iter(locks)
            .map(|(slot, lock)| async move { lock.acquire().await.map(|guard| (slot, guard)) })
            .buffer_unordered(64);
        while let Some((slot, guard)) = acquiring.try_next().await? {
            self.guards.insert(slot, guard);
        }
        Ok(())
    }

    fn lock(&self, mode: &str, ttl: &str, name: &str) -> Result<Lock, BoxError> {
        let client = self.client.as_ref().ok_or("no client")?;
        let ttl = Duration::from_millis(ttl.parse()?);
        let lock = match parse_mode(mode)? {
            Mode::Exclusive => client.lock(name)?,
            Mode::Shared => client.lock(name)?.shared(),
            Mode::Permits(n) => client.semaphore(name, n.get())?,
        };
        let mut options = AcquireOptions::new().ttl(ttl);
        options.hold_at_least = self.least;
        Ok(lock.with_options(options))
    }

    fn keep(&mut self, slot: &str, guard: LockGuard) -> String {
        let token = guard.token();
        self.guards.insert(slot.to_owned(), guard);
        format!("granted {token} {}", now())
    }

    fn guard(&self, slot: &str) -> Result<&LockGuard, BoxError> {
        Ok(self.guards.get(slot).ok_or("no such guard")?)
    }
}

/// Leads whenever it can and for as long as it can, observes who leads, and answers with what it says and sees.
fn stand(candidate: Candidate, mut observer: Observer) {
    /// Says that a term is over.
    struct Term(FencingToken);

    impl Drop for Term {
        fn drop(&mut self) {
            answer(&format!("ends {} {}", self.0, now()));
        }
    }

    tokio::spawn(async move {
        let leading = candidate.lead(|held| async move {
            let term = Term(held.token());
            answer(&format!("leads {} {}", term.0, now()));
            std::future::pending::<ControlFlow<()>>().await
        });
        if let Err(error) = leading.await {
            answer(&format!("error {}", chain(&error)));
        }
    });
    tokio::spawn(async move {
        loop {
            match observer.next().await {
                Ok(Some(leader)) => answer(&format!("saw {} {}", leader.token, leader.id)),
                Ok(None) => answer("saw 0 nobody"),
                Err(error) if error.is_transient() => {}
                Err(error) => return answer(&format!("error {}", chain(&error))),
            }
        }
    });
}

/// Something else than a lockkit backend.
struct Outsider<S: Subject> {
    subject: S,
    client: Option<S::Client>,
    held: Vec<HeldBy<ContenderOf<S>>>,
    crowd: Option<Crowd<S::Client>>,
}

type ContenderOf<S> = <<S as Subject>::Client as Client>::Contender;
/// Somebody, and what that one has in hand.
type HeldBy<C> = (C, <C as Contender>::Held);

impl<S: Subject> Obey for Outsider<S> {
    async fn obey(&mut self, command: &str) -> Result<String, BoxError> {
        let words: Vec<_> = command.split(' ').collect();
        match words[..] {
            ["crowd", clients, tasks, name] => {
                let clients = (0..clients.parse()?).map(|_: u32| self.subject.client());
                self.crowd = Some(Crowd::of(try_join_all(clients).await?, tasks.parse()?, name).await?);
                Ok("gathered".to_owned())
            }
            ["rush", stretch, hold] => rush(self.crowd.as_mut(), stretch, hold).await,
            ["acquire", _, _, _, name] => {
                self.acquire(name).await?;
                // Without a token.
                Ok(format!("granted 0 {}", now()))
            }
            ["hold", locks, _, name] => {
                for index in 0..locks.parse::<u32>()? {
                    self.acquire(&format!("{name}/{index}")).await?;
                }
                Ok("held".to_owned())
            }
            ["usage"] => Ok(usage()),
            ["close"] => {
                for (mut contender, held) in self.held.drain(..) {
                    contender.release(held).await?;
                }
                if let Some(crowd) = self.crowd.take() {
                    crowd.close().await?;
                }
                Ok("closed".to_owned())
            }
            _ => Err(format!("not a command: `{command}`").into()),
        }
    }
}

impl<S: Subject> Outsider<S> {
    async fn acquire(&mut self, name: &str) -> Result<(), BoxError> {
        let client = match &mut self.client {
            Some(client) => client,
            none => none.insert(self.subject.client().await?),
        };
        let mut contender = client.contender(name, Mode::Exclusive).await?;
        let held = contender.acquire().await?;
        self.held.push((contender, held));
        Ok(())
    }
}

async fn rush<C: Client>(
    crowd: Option<&mut Crowd<C>>,
    stretch: &str,
    hold: &str,
) -> Result<String, BoxError> {
    let crowd = crowd.ok_or("there is no crowd")?;
    let hold = read_hold(hold).ok_or("it is not told how long to hold")?;
    let rush = crowd.rush(Duration::from_nanos(stretch.parse()?), hold).await?;
    Ok(write_rush(&rush))
}

/// Returns what this process has used: processor time in ns, and bytes of memory where the system tells.
fn usage() -> String {
    let processor = processor_time().map_or_else(|| "unknown".to_owned(), |time| time.as_nanos().to_string());
    let memory = resident().map_or_else(|| "unknown".to_owned(), |bytes| bytes.to_string());
    format!("usage {processor} {memory}")
}

/// Reads the resident memory from Linux, in bytes.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib * 1_024)
}

fn parse_mode(word: &str) -> Result<Mode, BoxError> {
    Ok(match word {
        "exclusive" => Mode::Exclusive,
        "shared" => Mode::Shared,
        permits => Mode::Permits(permits.parse::<NonZeroU32>()?),
    })
}

/// On a line of its own, since libtest begins one with the name of the test and does not end it.
fn answer(text: &str) {
    let mut output = io::stdout().lock();
    let written = writeln!(output, "\n{MARK}{text}").and_then(|()| output.flush());
    if written.is_err() {
        std::process::exit(0);
    }
}

/// Writes to a resource that several processes share and that checks fencing tokens: a file that holds the highest
/// token seen. Returns whether the resource took the write.
pub(crate) fn fenced_write(path: &Path, token: FencingToken) -> io::Result<bool> {
    let mut file: File = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    file.lock()?;
    let mut highest = String::new();
    file.read_to_string(&mut highest)?;
    let highest = if highest.is_empty() {
        0
    } else {
        highest.trim().parse().map_err(io::Error::other)?
    };
    if FenceGate::resume(FencingToken::new(highest))
        .admit(token)
        .is_err()
    {
        return Ok(false);
    }
    file.rewind()?;
    // Tokens that are taken only rise, so that a shorter text never follows a longer one.
    write!(file, "{token}")?;
    file.unlock()?;
    Ok(true)
}
