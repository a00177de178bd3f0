//! The cost of a backend: the same scenarios for every backend, and for whatever it is compared with.
//!
//! A [`contest`] takes [`Contestant`]s through [`Scenario`]s. In each scenario they take turns, round by round, so that
//! whatever else the machine does meets all alike; figures are kept per round, so that two contestants can be compared
//! round by round.
//!
//! ```
//! use async_trait::async_trait;
//! use lockkit_conformance::{
//!     Harness,
//!     measure::{Contestant, Effort, Figure, Locks, Role, Scenario, contest},
//! };
//! use lockkit_core::{LockClient, MemoryBackend, Result};
//!
//! #[derive(Debug, Default)]
//! struct Memory(MemoryBackend);
//!
//! #[async_trait]
//! impl Harness for Memory {
//!     async fn client(&self) -> Result<LockClient> {
//!         Ok(LockClient::new(self.0.clone()))
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let ours = Locks::new(Memory::default());
//! let mut contestants = [Contestant::new("memory", "lockkit", Role::Ours, ours)];
//! let effort = Effort { rounds: 1, ..Effort::QUICK };
//! let rows = contest(&mut contestants, &[Scenario::Uncontended], &effort, |_| ()).await;
//! assert!(rows[0].value(Figure::P50).is_some());
//! # });
//! ```
//!
//! Something that is not a lockkit backend takes part as a [`Subject`] of its own.

mod contest;
mod crowd;
mod locks;
mod process;
mod rounds;
mod row;
mod scenario;

use std::time::Duration;

pub use contest::{Contestant, Effort, Progress, Role, Trial, contest};
pub(crate) use crowd::Crowd;
use lockkit_core::{BoxError, spi::Mode};
pub use locks::{Counter, Locks};
pub use process::{Clock, Processes};
pub(crate) use process::{processor_time, read_hold, write_rush};
pub use row::{Outcome, Row};
pub use scenario::{Figure, Scenario, UnknownScenario};

/// Something that locks.
pub trait Subject: Send + Sync + 'static {
    /// Its connection to whatever keeps the locks.
    type Client: Client;

    /// A new client, as another process would have.
    ///
    /// # Errors
    /// Whatever connecting reports.
    fn client(&self) -> impl Future<Output = Result<Self::Client, BoxError>> + Send;

    /// Returns why it takes no part in a scenario, if it does not.
    ///
    /// # Errors
    /// If that cannot be told.
    fn declines(&self, scenario: Scenario) -> impl Future<Output = Result<Option<String>, BoxError>> + Send {
        let _ = scenario;
        async { Ok(None) }
    }

    /// Returns the counter of the round trips that its clients make, where there is one.
    fn round_trips(&self) -> Option<Counter> {
        None
    }

    /// Returns the way in which other processes take its locks.
    ///
    /// # Errors
    /// Why there are none, which makes it skip the scenarios that need them.
    fn processes(&self) -> Result<Processes, String> {
        Err("it is measured in one process alone".to_owned())
    }
}

/// A client of a [`Subject`].
pub trait Client: Send + Sync + 'static {
    /// The contender for its locks.
    type Contender: Contender;

    /// Somebody who wants to hold `name` in this mode. Nothing is held yet.
    ///
    /// # Errors
    /// If there is no such mode, or no connection where each contender has its own.
    fn contender(
        &self,
        name: &str,
        mode: Mode,
    ) -> impl Future<Output = Result<Self::Contender, BoxError>> + Send;

    /// Waits so long for `name`, which somebody else holds, and withdraws. Returns the time from then until the server has confirmed
    /// that nothing of it is left. By default it fails: who cannot withdraw [declines](Subject::declines)
    /// [`Scenario::Withdrawal`].
    ///
    /// # Errors
    /// Any error ends the measurement.
    fn withdraw(
        &self,
        name: &str,
        waits: Duration,
    ) -> impl Future<Output = Result<Duration, BoxError>> + Send {
        let _ = (name, waits);
        async { Err("it cannot withdraw".into()) }
    }

    /// Lets go of the connection. By default by dropping the client.
    ///
    /// # Errors
    /// If something is left at the server.
    fn close(self) -> impl Future<Output = Result<(), BoxError>> + Send
    where
        Self: Sized,
    {
        async { Ok(()) }
    }
}

/// Somebody who takes a lock and gives it back, again and again.
pub trait Contender: Send + 'static {
    /// The value that it has while it holds.
    type Held: Send + 'static;

    /// Takes the lock, for as long as that takes.
    ///
    /// # Errors
    /// Any error ends the measurement.
    fn acquire(&mut self) -> impl Future<Output = Result<Self::Held, BoxError>> + Send;

    /// Gives it back, and returns when that is confirmed.
    ///
    /// # Errors
    /// Any error ends the measurement.
    fn release(&mut self, held: Self::Held) -> impl Future<Output = Result<(), BoxError>> + Send;

    /// Makes one attempt. Returns `None` if somebody else holds it. By default it fails: who cannot try
    /// [declines](Subject::declines) [`Scenario::BusyTry`].
    ///
    /// # Errors
    /// Any error ends the measurement.
    fn try_acquire(&mut self) -> impl Future<Output = Result<Option<Self::Held>, BoxError>> + Send {
        async { Err("it cannot try".into()) }
    }
}
