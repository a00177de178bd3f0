//! Another process that holds, and what that takes of its machine.

use std::{io, time::Duration};

use lockkit_core::spi::Mode;

use super::Counter;
use crate::helper::{Helper, Launch, Request};

/// How other processes take a subject's locks.
#[derive(Clone)]
pub struct Processes {
    pub(super) launch: Launch,
    pub(super) url: String,
    pub(super) packets: Option<Counter>,
}

impl Processes {
    pub(super) fn packets(&self) -> Option<u64> {
        self.packets.as_ref().map(|count| count())
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
        let answer = self.0.ask(command).await?;
        if answer == done {
            Ok(())
        } else {
            Err(io::Error::other(answer.trim_start_matches("error ").to_owned()))
        }
    }
}
