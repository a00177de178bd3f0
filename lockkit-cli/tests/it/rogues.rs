//! Servers that answer what no server answers, and the command as their client. It ends in time and says why in a line, takes no more than
//! a reply is worth, runs nothing, and keeps the password to itself.

use std::{fs, io, time::Duration};

use lockkit_conformance::stall::Stopwatch;
use lockkit_testbed::{Plays, Rogue, Wire};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::tool::{PATIENCE, lockkit};

mod etcd;
mod mysql;
mod postgres;
mod redis;
mod trickle;
mod zookeeper;

const PASSWORD: &str = "canary p%ss";
/// The password as it is in a URL.
const ENCODED: &str = "canary%20p%25ss";
/// The parameters of each URL.
const TIMEOUTS: &str = "connect_timeout=1s&op_timeout=1s";
/// The time beyond its time-outs in which a command starts and ends.
const SLACK: Duration = Duration::from_millis(500);
/// The words of what has taken too long.
const OUT_OF_TIME: &str = "no answer";
/// The most lines for one end of a command.
const MOST_LINES: usize = 4;
/// The most characters of a line that somebody is to read.
const LONGEST_LINE: usize = 1_000;

/// The time-outs that a command may use up.
#[derive(Clone, Copy)]
enum Within {
    /// That of connecting.
    Connecting,
    /// And that of an attempt, and of its withdrawal.
    Trying,
}

impl Within {
    fn limit(self) -> Duration {
        let time_outs = match self {
            Self::Connecting => 1,
            Self::Trying => 3,
        };
        Duration::from_secs(time_outs) + SLACK
    }
}

/// Runs `lockkit run --try` at this rogue. Returns what is wrong with its end, where `says` is a part of the line that it prints.
async fn fault(name: &str, rogue: &Rogue, url: &str, within: Within, says: &str) -> Option<String> {
    fault_of_run(name, rogue, &["--try"], url, within, says).await
}

/// Runs `lockkit run` with these options at this rogue. See [`fault`].
async fn fault_of_run(
    name: &str,
    rogue: &Rogue,
    options: &[&str],
    url: &str,
    within: Within,
    says: &str,
) -> Option<String> {
    let directory = TempDir::new().unwrap();
    let ran = directory.path().join("ran");
    let path = ran.display().to_string();
    let rest = ["--url", url, "job", "--", "touch", &path];
    let mut run = lockkit(&[&["run"], options, &rest[..]].concat());
    let clock = Stopwatch::start();
    let ended = match rogue.judge(PATIENCE, &mut run).await {
        Ok(ended) => ended,
        Err(fault) => return Some(format!("{name}: {fault}")),
    };
    let (took, said) = (clock.elapsed(), ended.complaint.trim_end());
    println!("{name}: {took:?}, {:?} bytes: {said}", ended.memory);
    let heard = String::from_utf8_lossy(&rogue.heard()).into_owned();
    // One by one: a warning, the attempts that failed, and the end.
    let is_in_lines = said.lines().count() <= MOST_LINES
        && said
            .split('\n')
            .all(|line| line.starts_with("lockkit: ") && !line.chars().any(char::is_control));
    // On a busy machine, the time may be over before so much has come.
    let is_about_time = says.ends_with("MiB") || says == OUT_OF_TIME;
    let is_long = said.lines().any(|line| line.chars().count() > LONGEST_LINE);
    let faults = [
        (
            !matches!(ended.status.code(), Some(124 | 125)),
            "it did not fail as it should",
        ),
        (
            fs::exists(&ran).unwrap(),
            "PROMISE BROKEN: it ran without the lock",
        ),
        (!ended.output.is_empty(), "it printed something"),
        (!is_in_lines, "it does not say so in lines"),
        (is_long, "it is too long to be read"),
        (
            !(said.contains(says) || is_about_time && said.contains(OUT_OF_TIME)),
            "it says something else",
        ),
        (said.contains("canary"), "it shows the password"),
        (
            heard.contains(PASSWORD) || heard.contains(ENCODED),
            "it gave away the password",
        ),
        (took > within.limit(), "it took too long"),
    ];
    let faults: Vec<_> = faults
        .into_iter()
        .filter(|(is_so, _)| *is_so)
        .map(|(_, what)| what)
        .collect();
    (!faults.is_empty()).then(|| {
        let status = ended.status;
        let said: String = said.chars().take(LONGEST_LINE).collect();
        format!("{name}: {} ({took:?}, {status}): {said}", faults.join(", "))
    })
}

/// Runs this on a runtime of its own.
fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(work)
}

fn judged(faults: &[String]) {
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Plays from the beginning.
async fn at_once(client: TcpStream) -> io::Result<Box<dyn Wire>> {
    Ok(Box::new(client))
}

async fn start(plays: Plays) -> Rogue {
    Rogue::start(plays, at_once).await.unwrap()
}
