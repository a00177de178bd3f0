//! Other processes, which hold and contend, and what that takes of their machine.

use std::{io, time::Duration};

use lockkit_core::{BoxError, spi::Mode};

use super::{
    Counter,
    crowd::{PATIENCE, Share},
};
use crate::helper::{Helper, Launch, Request};

/// So many processes contend at most; with more clients than that, each has several.
const MOST_RIVALS: u32 = 4;

/// How other processes take a subject's locks: they are started as [helpers](crate::helper).
#[derive(Clone)]
pub struct Processes {
    launch: Launch,
    url: String,
    counted: Option<(String, Counter)>,
}

impl Processes {
    /// Started in this way, and told this URL.
    pub fn new(launch: Launch, url: impl Into<String>) -> Self {
        Self {
            launch,
            url: url.into(),
            counted: None,
        }
    }

    /// With a URL at which their traffic is counted: see [`Locks::counted`](super::Locks::counted).
    pub(super) fn counted(mut self, counted: Option<(String, Counter)>) -> Self {
        self.counted = counted;
        self
    }

    /// How much was sent to the counted URL.
    pub(super) fn packets(&self) -> Option<u64> {
        self.counted.as_ref().map(|(_, count)| count())
    }
}

/// Without the URL, which may hold a password.
impl std::fmt::Debug for Processes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Processes")
            .field("launch", &self.launch)
            .finish_non_exhaustive()
    }
}

/// A process that holds.
pub(super) struct Keeper(Helper);

/// What it has used so far.
pub(super) struct Usage {
    pub(super) processor: Duration,
    /// What is resident, in bytes, where the system tells.
    pub(super) memory: Option<u64>,
}

impl Keeper {
    pub(super) async fn start(processes: &Processes) -> io::Result<Self> {
        Helper::start(&processes.launch, Some(&processes.url))
            .await
            .map(Self)
    }

    /// One whose traffic is counted, where it can be.
    pub(super) async fn start_counted(processes: &Processes) -> io::Result<Self> {
        let counted = processes.counted.as_ref().map(|(url, _)| url);
        let url = counted.unwrap_or(&processes.url);
        Helper::start(&processes.launch, Some(url)).await.map(Self)
    }

    pub(super) async fn acquire(&mut self, ttl: Duration, name: &str) -> io::Result<()> {
        let request = Request {
            slot: "a",
            mode: Mode::Exclusive,
            ttl,
            name,
        };
        self.0.send(&format!("acquire {request}"))?;
        self.0.granted().await.map(drop)
    }

    pub(super) async fn hold(&mut self, locks: u32, ttl: Duration, name: &str) -> io::Result<()> {
        let ttl = ttl.as_millis();
        self.told(&format!("hold {locks} {ttl} {name}"), "held").await
    }

    pub(super) async fn close(&mut self) -> io::Result<()> {
        self.told("close", "closed").await
    }

    pub(super) async fn usage(&mut self) -> io::Result<Usage> {
        let answer = self.0.ask("usage").await?;
        let words: Vec<_> = answer.split(' ').collect();
        let usage = match words[..] {
            ["usage", nanos, memory] => nanos.parse().ok().map(|nanos| Usage {
                processor: Duration::from_nanos(nanos),
                memory: memory.parse().ok(),
            }),
            _ => None,
        };
        usage.ok_or_else(|| io::Error::other(format!("a helper answered `{answer}`")))
    }

    pub(super) fn kill(&mut self) -> io::Result<()> {
        self.0.process.kill().map(drop)
    }

    async fn told(&mut self, command: &str, done: &str) -> io::Result<()> {
        told(&mut self.0, command, done).await
    }
}

async fn told(helper: &mut Helper, command: &str, done: &str) -> io::Result<()> {
    match helper.ask(command).await? {
        answer if answer == done => Ok(()),
        other => Err(unlike(&other)),
    }
}

fn unlike(answer: &str) -> io::Error {
    io::Error::other(answer.trim_start_matches("error ").to_owned())
}

/// Processes with clients who all want the same lock.
pub(super) struct Rivals(Vec<Helper>);

impl Rivals {
    pub(super) async fn start(processes: &Processes, clients: u32, name: &str) -> io::Result<Self> {
        let mut rivals = Vec::new();
        for clients in divided(clients) {
            let mut rival = Helper::start(&processes.launch, Some(&processes.url)).await?;
            told(&mut rival, &format!("crowd {clients} {name}"), "gathered").await?;
            rivals.push(rival);
        }
        Ok(Self(rivals))
    }

    /// All of them, for so long. Answers with their grants per second, and how each client fared.
    pub(super) async fn rush(&mut self, stretch: Duration) -> Result<(f64, Vec<Share>), BoxError> {
        for rival in &mut self.0 {
            rival.send(&format!("rush {}", stretch.as_nanos()))?;
        }
        let (mut rate, mut all) = (0.0, Vec::new());
        for rival in &mut self.0 {
            // Each is at it for so long, and then waits for its last grant.
            let answer = rival.reply_within(stretch + PATIENCE * 2).await?;
            let (elapsed, shares) = read_rush(&answer).ok_or_else(|| unlike(&answer))?;
            rate += super::rounds::rate(&shares, elapsed);
            all.extend(shares);
        }
        Ok((rate, all))
    }

    pub(super) async fn close(self) -> io::Result<()> {
        for mut rival in self.0 {
            told(&mut rival, "close", "closed").await?;
        }
        Ok(())
    }
}

/// How many clients each process has.
fn divided(clients: u32) -> impl Iterator<Item = u32> {
    let many = clients.min(MOST_RIVALS);
    (0..many).map(move |index| clients / many + u32::from(index < clients % many))
}

/// What a helper answers after a rush: how long it took, then of each client how many grants within
/// that time, how many in all, and the longest wait;
/// all times in ns.
pub(crate) fn write_rush(elapsed: Duration, shares: &[Share]) -> String {
    let shares = shares
        .iter()
        .map(|share| format!(" {} {} {}", share.in_time, share.grants, share.longest.as_nanos()));
    format!("rushed {}{}", elapsed.as_nanos(), shares.collect::<String>())
}

fn read_rush(answer: &str) -> Option<(Duration, Vec<Share>)> {
    let numbers = answer.strip_prefix("rushed ")?.split(' ');
    let numbers: Vec<u64> = numbers.map(str::parse).collect::<Result<_, _>>().ok()?;
    let (elapsed, shares) = numbers.split_first()?;
    let shares = shares.chunks_exact(3).map(|share| Share {
        in_time: share[0],
        grants: share[1],
        longest: Duration::from_nanos(share[2]),
    });
    Some((Duration::from_nanos(*elapsed), shares.collect()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Share, divided, read_rush, write_rush};

    #[test]
    fn clients_are_divided_among_up_to_four_processes() {
        let processes = |clients| divided(clients).collect::<Vec<_>>();
        assert_eq!(processes(1), [1]);
        assert_eq!(processes(2), [1, 1]);
        assert_eq!(processes(16), [4; 4]);
        assert_eq!(processes(18), [5, 5, 4, 4]);
        assert_eq!(processes(100), [25; 4]);
    }

    #[test]
    fn what_a_helper_writes_of_a_rush_is_what_is_read() {
        let share = |in_time, grants, nanos| Share {
            in_time,
            grants,
            longest: Duration::from_nanos(nanos),
        };
        let shares = [share(6, 7, 1_500), share(0, 1, 3_000_000_000)];
        let written = write_rush(Duration::from_millis(40), &shares);
        let (elapsed, read) = read_rush(&written).unwrap();
        assert_eq!(elapsed, Duration::from_millis(40));
        assert_eq!(read, shares);
        for other in ["", "rushed", "rushed x", "error it has broken"] {
            assert!(read_rush(other).is_none(), "{other}");
        }
    }
}
