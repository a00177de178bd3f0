//! The cost of a list: its time and memory with many locks held, and the slowing of others meanwhile.

use std::{
    fmt, fs,
    io::{self, BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use lockkit::{AcquireOptions, BoxError, LockClient, LockGuard};
use tokio::task::JoinSet;

/// The environment variable that makes a process a lister. It has the URL.
const LISTER: &str = "LOCKKIT_LISTER_URL";

/// The prefix of the names that are held.
const PREFIX: &str = "listing/";

/// The number of acquisitions at once.
const AT_ONCE: usize = 64;

/// The time for which the cycle of another client is measured alone.
const ALONE: Duration = Duration::from_secs(2);

/// The figures of one server.
#[derive(Clone, Copy, Debug)]
pub struct Listing {
    /// The number of locks that were held and listed.
    pub held: usize,
    /// The time of a list, the median.
    pub takes: Duration,
    /// The number of lists.
    pub lists: usize,
    /// The memory of the listing process, in KiB: before its first list, and at its peak.
    pub memory: (u64, u64),
    /// The median of acquiring and releasing a lock by another client: alone, and while lists follow each other.
    pub cycle: (Duration, Duration),
}

impl Listing {
    /// Returns by how much a cycle is longer beside lists.
    pub fn ratio(&self) -> f64 {
        self.cycle.1.as_secs_f64() / self.cycle.0.as_secs_f64()
    }
}

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, peak) = self.memory;
        let (alone, beside) = self.cycle;
        write!(
            f,
            "{} held: a list takes {:.2?} ({} of them) and {} KiB beyond the {before} before it; an uncontended cycle takes \
             {alone:.1?} alone, {beside:.1?} beside lists: × {:.2}",
            self.held,
            self.takes,
            self.lists,
            peak.saturating_sub(before),
            self.ratio()
        )
    }
}

/// Returns the URL of the server to list, if this process is to be a lister.
pub fn told() -> Option<String> {
    std::env::var(LISTER).ok()
}

/// Lists until its input ends, and prints a line for each list.
///
/// # Errors
/// If a list fails, or does not show each lock once.
pub fn serve(url: &str) -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let client = lockkit::connect(url).await?;
        let before = memory("VmRSS:")?;
        for told in io::stdin().lock().lines() {
            told?;
            let (began, mut held) = (Instant::now(), 0_usize);
            let mut list = client.list(PREFIX)?;
            while let Some(lock) = list.next().await {
                lock?;
                held += 1;
            }
            let (took, peak) = (began.elapsed().as_micros(), memory("VmHWM:")?);
            println!("listed: {held} {took} {before} {peak}");
        }
        client.close(Duration::from_secs(5)).await?;
        Ok(())
    })
}

/// Returns a figure of this process's memory, in KiB.
fn memory(which: &str) -> Result<u64, BoxError> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(which));
    let figure = line.and_then(|line| line.split_whitespace().next());
    Ok(figure.ok_or("the system does not tell")?.parse()?)
}

/// Holds so many locks at the server, and measures lists by another process and cycles by another client. `lister` starts this
/// program so that it [serves](serve).
///
/// # Errors
/// If the server or the lister fails, or a list is wrong.
pub async fn measure(url: &str, held: usize, lister: Command) -> Result<Listing, BoxError> {
    let holder = lockkit::connect(url).await?;
    let began = Instant::now();
    let guards = hold(&holder, held).await?;
    // It may take a minute, and so may a list.
    eprintln!("{held} locks are held after {:.1?}", began.elapsed());
    let other = lockkit::connect(url).await?;
    let alone = cycles(&other, || ALONE).await?;
    let mut lister = Lister::start(url, lister)?;
    let (ends, ended) = std::sync::mpsc::channel::<()>();
    let listing = std::thread::spawn(move || {
        let began = Instant::now();
        let mut lists = Vec::new();
        // One list may be over before the cycles have begun.
        while lists.len() < 3 || began.elapsed() < ALONE {
            lists.push(lister.list()?);
        }
        drop(ends);
        Ok::<_, BoxError>(lists)
    });
    let beside = cycles(&other, || match ended.try_recv() {
        Err(std::sync::mpsc::TryRecvError::Empty) => Duration::MAX,
        _ => Duration::ZERO,
    })
    .await?;
    let lists = listing
        .join()
        .map_err(|_| "the thread that lists has panicked")??;
    if let Some(wrong) = lists.iter().find(|list| list.held != held) {
        return Err(format!("{held} locks are held, {} are listed", wrong.held).into());
    }
    // Releasing them all is not what is measured. They end with their server.
    guards.into_iter().for_each(std::mem::forget);
    let (first, last) = (lists[0], lists[lists.len() - 1]);
    Ok(Listing {
        held,
        takes: median(lists.iter().map(|list| list.took)),
        lists: lists.len(),
        memory: (first.before, last.peak),
        cycle: (alone, beside),
    })
}

async fn hold(client: &LockClient, held: usize) -> Result<Vec<LockGuard>, BoxError> {
    let options = AcquireOptions::new()
        .ttl(Duration::from_secs(1_800))
        .label("the bench");
    let mut tasks = JoinSet::new();
    for first in 0..AT_ONCE {
        let (client, options) = (client.clone(), options.clone());
        tasks.spawn(async move {
            let mut guards = Vec::with_capacity(held / AT_ONCE + 1);
            for number in (first..held).step_by(AT_ONCE) {
                let lock = client.lock(format!("{PREFIX}{number}"))?;
                guards.push(lock.with_options(options.clone()).acquire().await?);
            }
            Ok::<_, lockkit::Error>(guards)
        });
    }
    let mut all = Vec::with_capacity(held);
    while let Some(guards) = tasks.join_next().await {
        all.extend(guards??);
    }
    Ok(all)
}

/// Acquires and releases for as long as `limit` is longer than it has taken. Returns the median.
async fn cycles(client: &LockClient, limit: impl Fn() -> Duration) -> Result<Duration, BoxError> {
    let lock = client.lock("beside lists")?;
    let started = Instant::now();
    let mut took = Vec::new();
    while started.elapsed() < limit() {
        let began = Instant::now();
        lock.acquire().await?.release().await?;
        took.push(began.elapsed());
    }
    if took.is_empty() {
        return Err("no cycle in that time".into());
    }
    Ok(median(took.into_iter()))
}

fn median(figures: impl Iterator<Item = Duration>) -> Duration {
    let mut figures: Vec<_> = figures.collect();
    figures.sort_unstable();
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

/// A process that lists. It is killed and reaped when this is dropped.
struct Lister {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

#[derive(Clone, Copy)]
struct List {
    held: usize,
    took: Duration,
    before: u64,
    peak: u64,
}

impl Lister {
    fn start(url: &str, mut program: Command) -> Result<Self, BoxError> {
        let mut child = program
            .env(LISTER, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("it has no output")?;
        Ok(Self {
            child,
            output: BufReader::new(output),
        })
    }

    fn list(&mut self) -> Result<List, BoxError> {
        let input = self.child.stdin.as_mut().ok_or("it has no input")?;
        writeln!(input, "list")?;
        input.flush()?;
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                return Err("the lister has ended".into());
            }
            // A test program prints lines of its own.
            let Some((_, figures)) = line.split_once("listed: ") else {
                continue;
            };
            let figures: Vec<u64> = figures
                .split_whitespace()
                .map(str::parse)
                .collect::<Result<_, _>>()?;
            let [held, took, before, peak] = figures[..] else {
                return Err(format!("the lister says {line}").into());
            };
            return Ok(List {
                held: usize::try_from(held)?,
                took: Duration::from_micros(took),
                before,
                peak,
            });
        }
    }
}

impl Drop for Lister {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
