//! Other processes, which hold and contend, and what that takes of their machine.

use std::{io, sync::Arc, time::Duration};

use lockkit_core::{BoxError, spi::Mode};

use super::{
    Counter,
    crowd::{Hold, PATIENCE, Rush, Share},
};
use crate::helper::{Helper, Launch, Request};

/// The most processes that contend; with more clients than that, each has several.
const MOST_RIVALS: u32 = 4;

/// The processes that take a subject's locks: they are started as [helpers](crate::helper).
#[derive(Clone)]
pub struct Processes {
    launch: Launch,
    url: String,
    counted: Option<(String, Counter)>,
    server: Option<Clock>,
}

/// Tells how much processor time something has used so far: see [`Processes::served_by`].
pub type Clock = Arc<dyn Fn() -> io::Result<Duration> + Send + Sync>;

impl Processes {
    /// Started in this way, and told this URL.
    pub fn new(launch: Launch, url: impl Into<String>) -> Self {
        Self {
            launch,
            url: url.into(),
            counted: None,
            server: None,
        }
    }

    /// Says how much processor time the server has used so far, which its process can tell where it is on this machine.
    pub fn served_by(mut self, server: Clock) -> Self {
        self.server = Some(server);
        self
    }

    /// Sets a URL at which their traffic is counted: see [`Locks::counted`](super::Locks::counted).
    pub(super) fn counted(mut self, counted: Option<(String, Counter)>) -> Self {
        self.counted = counted;
        self
    }

    /// Returns how much was sent to the counted URL.
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

/// The processor time and memory that a process has used so far.
pub(super) struct Usage {
    pub(super) processor: Duration,
    /// The resident memory, in bytes, where the system tells.
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

    pub(super) fn stop(&mut self) -> io::Result<()> {
        self.0.process.stop()
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
pub(super) struct Rivals {
    helpers: Vec<Helper>,
    server: Option<Clock>,
}

/// The result of a rush of all of them.
pub(super) struct Rushed {
    /// Grants per second.
    pub(super) rate: f64,
    /// The result of each client.
    pub(super) shares: Vec<Share>,
    /// The processor time of the server, and then of the clients, from the first acquisition to the last release.
    pub(super) server: Option<Duration>,
    pub(super) clients: Option<Duration>,
}

impl Rivals {
    /// Starts the clients, in up to four processes, a task each.
    pub(super) async fn clients(processes: &Processes, clients: u32, name: &str) -> io::Result<Self> {
        Self::start(processes, divided(clients).map(|clients| (clients, 1)), name).await
    }

    /// Starts four processes of one client each, with the tasks in each of them.
    pub(super) async fn tasks(processes: &Processes, tasks: u32, name: &str) -> io::Result<Self> {
        Self::start(processes, (0..MOST_RIVALS).map(|_| (1, tasks)), name).await
    }

    async fn start(
        processes: &Processes,
        crowds: impl Iterator<Item = (u32, u32)>,
        name: &str,
    ) -> io::Result<Self> {
        let mut helpers = Vec::new();
        for (clients, tasks) in crowds {
            let mut helper = Helper::start(&processes.launch, Some(&processes.url)).await?;
            told(
                &mut helper,
                &format!("crowd {clients} {tasks} {name}"),
                "gathered",
            )
            .await?;
            helpers.push(helper);
        }
        let server = processes.server.clone();
        Ok(Self { helpers, server })
    }

    /// All of them, for so long.
    pub(super) async fn rush(&mut self, stretch: Duration, hold: Hold) -> Result<Rushed, BoxError> {
        let server_time = || self.server.as_ref().map(|server| server()).transpose();
        let before = server_time()?;
        for helper in &mut self.helpers {
            helper.send(&format!("rush {} {}", stretch.as_nanos(), write_hold(hold)))?;
        }
        let mut rushed = Rushed {
            rate: 0.0,
            shares: Vec::new(),
            server: None,
            clients: Some(Duration::ZERO),
        };
        for helper in &mut self.helpers {
            // Each is at it for so long, and then waits for its last grant.
            let answer = helper.reply_within(stretch + PATIENCE * 2).await?;
            let rush = read_rush(&answer).ok_or_else(|| unlike(&answer))?;
            rushed.rate += super::rounds::rate(&rush.shares, rush.elapsed);
            let clients = rushed.clients.zip(rush.processor);
            rushed.clients = clients.map(|(all, one)| all + one);
            rushed.shares.extend(rush.shares);
        }
        let after = server_time()?;
        rushed.server = after
            .zip(before)
            .map(|(after, before)| after.saturating_sub(before));
        Ok(rushed)
    }

    pub(super) async fn close(self) -> io::Result<()> {
        for mut rival in self.helpers {
            told(&mut rival, "close", "closed").await?;
        }
        Ok(())
    }
}

/// Divides the clients among the processes.
fn divided(clients: u32) -> impl Iterator<Item = u32> {
    let many = clients.min(MOST_RIVALS);
    (0..many).map(move |index| clients / many + u32::from(index < clients % many))
}

/// Returns the processor time that this process has used, where the system tells.
pub(crate) fn processor_time() -> Option<Duration> {
    #[cfg(unix)]
    {
        use rustix::time::{ClockId, clock_gettime};
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Some(Duration::new(
            time.tv_sec.try_into().ok()?,
            time.tv_nsec.try_into().ok()?,
        ))
    }
    #[cfg(not(unix))]
    None
}

/// Writes for a helper how long to hold: in ns, where it is for a time.
fn write_hold(hold: Hold) -> String {
    match hold {
        Hold::Nothing => "nothing".to_owned(),
        Hold::AYield => "yield".to_owned(),
        Hold::For(time) => time.as_nanos().to_string(),
    }
}

pub(crate) fn read_hold(word: &str) -> Option<Hold> {
    match word {
        "nothing" => Some(Hold::Nothing),
        "yield" => Some(Hold::AYield),
        nanos => nanos.parse().ok().map(Duration::from_nanos).map(Hold::For),
    }
}

/// Writes a helper's reply after a rush: how long it took and how much processor time, then of each client how many
/// grants within that time, how many in all, the longest wait and all waits; all times in ns.
pub(crate) fn write_rush(rush: &Rush) -> String {
    let processor = rush
        .processor
        .map_or_else(|| UNKNOWN.to_owned(), |time| time.as_nanos().to_string());
    let shares = rush.shares.iter().map(|share| {
        let (longest, waited) = (share.longest.as_nanos(), share.waited.as_nanos());
        format!(" {} {} {longest} {waited}", share.in_time, share.grants)
    });
    format!(
        "rushed {} {processor}{}",
        rush.elapsed.as_nanos(),
        shares.collect::<String>()
    )
}

/// Stands for a figure that the system does not tell.
const UNKNOWN: &str = "unknown";

fn read_rush(answer: &str) -> Option<Rush> {
    let mut words = answer.strip_prefix("rushed ")?.split(' ');
    let nanos = |word: &str| word.parse().ok().map(Duration::from_nanos);
    let elapsed = nanos(words.next()?)?;
    let processor = match words.next()? {
        UNKNOWN => None,
        known => Some(nanos(known)?),
    };
    let numbers: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
    let shares = numbers.chunks_exact(4).map(|share| Share {
        in_time: share[0],
        grants: share[1],
        longest: Duration::from_nanos(share[2]),
        waited: Duration::from_nanos(share[3]),
    });
    Some(Rush {
        elapsed,
        processor,
        shares: shares.collect(),
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Hold, Rush, Share, divided, processor_time, read_hold, read_rush, write_hold, write_rush};

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
            waited: Duration::from_nanos(nanos * 2),
        };
        for processor in [None, Some(Duration::from_micros(17))] {
            let rush = Rush {
                elapsed: Duration::from_millis(40),
                processor,
                shares: vec![share(6, 7, 1_500), share(0, 1, 3_000_000_000)],
            };
            assert_eq!(read_rush(&write_rush(&rush)), Some(rush));
        }
        for other in [
            "",
            "rushed",
            "rushed x",
            "rushed 1",
            "rushed 1 x",
            "error it has broken",
        ] {
            assert!(read_rush(other).is_none(), "{other}");
        }
    }

    #[test]
    fn how_long_to_hold_is_read_as_it_was_written() {
        for hold in [Hold::Nothing, Hold::AYield, Hold::For(Duration::from_millis(10))] {
            assert_eq!(read_hold(&write_hold(hold)), Some(hold));
        }
        assert_eq!(read_hold("long"), None);
    }

    #[cfg(unix)]
    #[test]
    fn processor_time_grows_by_what_this_process_works() {
        let (began, before) = (Instant::now(), processor_time().unwrap());
        while processor_time().unwrap() < before + Duration::from_millis(20) {
            assert!(began.elapsed() < Duration::from_secs(20), "it stands still");
        }
    }
}
