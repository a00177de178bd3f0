//! The cost of metrics: an uncontended cycle on Redis, with the feature `metrics` and a recorder for Prometheus, beside the same
//! without the feature.
//!
//! `cargo bench -p lockkit-benches --bench metrics` builds itself a second time, with the feature. One process of each build is
//! connected to one private Redis server, and they take turns.
//!
//! `taskset -c 1` before it has them and the server on one processor. Else a cycle takes 45 or 190 µs, by whether its process happens to
//! share the server's, and that of one build may stay at the one and that of the other at the other.

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use lockkit::BoxError;
use lockkit_benches::processor::processor_time;
use lockkit_testbed::redis::{self, RedisServer};
use tokio::runtime::{Builder, Runtime};

/// The environment variable that makes a process a contestant. It has the URL.
const CONTESTANT: &str = "LOCKKIT_METRICS_URL";

const ROUNDS: usize = 400;
const CYCLES: u32 = 200;

fn main() -> Result<(), BoxError> {
    if let Ok(url) = env::var(CONTESTANT) {
        return contest(&url);
    }
    if cfg!(feature = "metrics") {
        return Err("run this without the feature `metrics`: it builds itself with it".into());
    }
    if let Some(why) = redis::missing() {
        println!("redis: skipped: {why}");
        return Ok(());
    }
    let server = RedisServer::plain()?;
    let mut without = Contestant::start(&env::current_exe()?, server.url())?;
    let mut with = Contestant::start(&built_with_metrics()?, server.url())?;
    let (mut off, mut on) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        // Whoever is second finds the server awake.
        if round % 2 == 0 {
            off.push(without.round()?);
            on.push(with.round()?);
        } else {
            on.push(with.round()?);
            off.push(without.round()?);
        }
    }
    let (off, on) = (Cycle::median(&off), Cycle::median(&on));
    let more = on.processor.saturating_sub(off.processor);
    println!(
        "{ROUNDS} rounds of {CYCLES} cycles, medians: {:.1?} without metrics, {:.1?} with them; the client's processor time {:.2?} and \
         {:.2?}: {:.1} % of a cycle more",
        off.time,
        on.time,
        off.processor,
        on.processor,
        100.0 * more.as_secs_f64() / off.time.as_secs_f64(),
    );
    Ok(())
}

/// The cost of one cycle. On a machine with little to do its time depends on how deeply processors sleep in it: the client's processor
/// time says what the client does.
#[derive(Clone, Copy)]
struct Cycle {
    time: Duration,
    processor: Duration,
}

impl Cycle {
    fn median(cycles: &[Self]) -> Self {
        let median = |part: fn(&Self) -> Duration| {
            let mut parts: Vec<_> = cycles.iter().map(part).collect();
            parts.sort();
            parts[parts.len() / 2]
        };
        Self {
            time: median(|cycle| cycle.time),
            processor: median(|cycle| cycle.processor),
        }
    }
}

/// Builds this bench with the feature, and returns where it is.
fn built_with_metrics() -> Result<PathBuf, BoxError> {
    let cargo = env::var_os("CARGO").ok_or("run this by `cargo bench`")?;
    let built = Command::new(cargo)
        .args([
            "bench",
            "--package",
            "lockkit-benches",
            "--bench",
            "metrics",
            "--features",
            "metrics",
        ])
        .args(["--no-run", "--message-format", "json"])
        .stderr(Stdio::inherit())
        .output()?;
    if !built.status.success() {
        return Err("it does not build with the feature `metrics`".into());
    }
    for line in built.stdout.as_slice().lines() {
        let message = serde_json::from_str::<serde_json::Value>(&line?)?;
        if message["target"]["name"] == "metrics" && message["target"]["kind"][0] == "bench" {
            return Ok(message["executable"]
                .as_str()
                .ok_or("no program was built")?
                .into());
        }
    }
    Err("cargo does not say what it has built".into())
}

/// A process that acquires and releases a lock that nobody else wants, a round at a time.
struct Contestant {
    process: Child,
    asks: ChildStdin,
    tells: BufReader<ChildStdout>,
}

impl Contestant {
    fn start(program: &Path, url: &str) -> Result<Self, BoxError> {
        let mut process = Command::new(program)
            .env(CONTESTANT, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let asks = process.stdin.take().ok_or("it has no input")?;
        let tells = BufReader::new(process.stdout.take().ok_or("it has no output")?);
        let mut contestant = Self { process, asks, tells };
        // Connects, and loads the scripts.
        contestant.round()?;
        Ok(contestant)
    }

    /// Returns the mean of the cycles of a round.
    fn round(&mut self) -> Result<Cycle, BoxError> {
        let before = processor_time(self.process.id())?;
        writeln!(self.asks)?;
        let mut told = String::new();
        self.tells.read_line(&mut told)?;
        Ok(Cycle {
            time: Duration::from_nanos(told.trim().parse()?),
            processor: processor_time(self.process.id())?.saturating_sub(before) / CYCLES,
        })
    }
}

impl Drop for Contestant {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Does a round for each line of its input, until that ends.
fn contest(url: &str) -> Result<(), BoxError> {
    #[cfg(feature = "metrics")]
    let prometheus = metrics_exporter_prometheus::PrometheusBuilder::new()
        .set_buckets(&[0.000_1, 0.000_25, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1.0])?
        .install_recorder()?;
    let runtime: Runtime = Builder::new_current_thread().enable_all().build()?;
    let lock = runtime
        .block_on(lockkit::connect(url))?
        .lock(format!("of {}", std::process::id()))?;
    for told in io::stdin().lock().lines() {
        told?;
        let began = Instant::now();
        runtime.block_on(async {
            for _ in 0..CYCLES {
                lock.acquire().await?.release().await?;
            }
            Ok::<_, lockkit::Error>(())
        })?;
        // What a program does every few seconds: its samples go into the buckets.
        #[cfg(feature = "metrics")]
        prometheus.run_upkeep();
        println!("{}", (began.elapsed() / CYCLES).as_nanos());
    }
    Ok(())
}
