//! A lockkit backend as a subject.

use std::{fmt, sync::Arc, time::Duration};

use lockkit_core::{
    AcquireOptions, BoxError, Lock, LockClient, LockGuard, LockName,
    spi::{ClaimRequest, Mode, OwnerId},
};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{Client, Clock, Contender, Processes, Scenario, Subject};
use crate::{Harness, helper::Launch};

/// Longer than any healthy server takes to confirm what is still under way.
const PATIENCE: Duration = Duration::from_secs(30);

/// Counts what goes to a server: see [`Locks::counted`] and [`Subject::round_trips`].
pub type Counter = Arc<dyn Fn() -> u64 + Send + Sync>;

/// The backend that a [`Harness`] reaches.
pub struct Locks {
    harness: Arc<dyn Harness>,
    launch: Option<Launch>,
    counted: Option<(String, Counter)>,
    server: Option<Clock>,
    round_trips: Option<Counter>,
}

impl Locks {
    /// The backend, without helper processes.
    pub fn new(harness: impl Harness) -> Self {
        Self {
            harness: Arc::new(harness),
            launch: None,
            counted: None,
            server: None,
            round_trips: None,
        }
    }

    /// Says how helper processes are started, which need the harness's [`url`](Harness::url) and
    /// [`connect`](Harness::connect).
    pub fn helpers(mut self, launch: Launch) -> Self {
        self.launch = Some(launch);
        self
    }

    /// Another URL of the same server, which the helper processes take whose traffic is looked at, and what counts the
    /// pieces that were sent there so far: a proxy can tell.
    pub fn counted(mut self, url: impl Into<String>, counter: Counter) -> Self {
        self.counted = Some((url.into(), counter));
        self
    }

    /// Says what counts the round trips of all clients, which a proxy can tell that is on the way to the server.
    pub fn counting_round_trips(mut self, counter: Counter) -> Self {
        self.round_trips = Some(counter);
        self
    }

    /// Says how much processor time the server has used so far.
    pub fn served_by(mut self, server: Clock) -> Self {
        self.server = Some(server);
        self
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks")
            .field("harness", &self.harness)
            .finish_non_exhaustive()
    }
}

impl Subject for Locks {
    type Client = LockClient;

    async fn client(&self) -> Result<LockClient, BoxError> {
        Ok(self.harness.client().await?)
    }

    async fn declines(&self, scenario: Scenario) -> Result<Option<String>, BoxError> {
        let needs_shared = matches!(scenario, Scenario::Shared(_));
        let needs_permits = scenario == Scenario::Permits;
        if matches!(scenario, Scenario::Waiters(_)) {
            return Ok(Some("most waiters of a client wait within it".to_owned()));
        }
        let needs_lease = scenario == Scenario::Silence;
        if !needs_shared && !needs_permits && !needs_lease {
            return Ok(None);
        }
        let client = self.harness.client().await?;
        let can = client.capabilities();
        client.close().await?;
        Ok(if needs_shared && !can.shared {
            Some("the backend has no shared mode".to_owned())
        } else if needs_permits && !can.permits {
            Some("the backend has no semaphores".to_owned())
        } else if needs_lease && !can.lease {
            Some("a hold lasts as long as its process".to_owned())
        } else {
            None
        })
    }

    fn round_trips(&self) -> Option<Counter> {
        self.round_trips.clone()
    }

    fn processes(&self) -> Result<Processes, String> {
        let url = self.harness.url().ok_or("no other process reaches it")?;
        let launch = self.launch.clone().ok_or("there are no helper processes")?;
        let mut processes = Processes::new(launch, url).counted(self.counted.clone());
        if let Some(server) = &self.server {
            processes = processes.served_by(server.clone());
        }
        Ok(processes)
    }
}

impl Client for LockClient {
    type Contender = Lock;

    async fn contender(&self, name: &str, mode: Mode) -> Result<Lock, BoxError> {
        let lock = match mode {
            Mode::Exclusive => self.lock(name)?,
            Mode::Shared => self.lock(name)?.shared(),
            Mode::Permits(permits) => self.semaphore(name, permits.get())?,
        };
        Ok(lock.with_options(AcquireOptions::new().wait(AcquireOptions::MAX_DURATION)))
    }

    /// Past the driver, which withdraws in the background.
    async fn withdraw(&self, name: &str, waits: Duration) -> Result<Duration, BoxError> {
        let (name, owner) = (LockName::new(name)?, OwnerId::new(fastrand::u128(..)));
        let request = ClaimRequest::new(name, Mode::Exclusive, AcquireOptions::DEFAULT_TTL, owner);
        let mut claim = self.__backend().claim(&request).await?;
        let until = Instant::now() + waits;
        let waiting = async {
            let granted = claim.attempt(waits).await?;
            if granted.is_none() {
                claim.notified().await;
            }
            Ok::<_, BoxError>(granted.is_some())
        };
        if let Ok(waited) = timeout_at(until, waiting).await
            && waited?
        {
            return Err("it was granted what somebody else holds".into());
        }
        sleep_until(until).await;
        let began = Instant::now();
        claim.release().await?;
        Ok(began.elapsed())
    }

    async fn close(self) -> Result<(), BoxError> {
        Ok(LockClient::close(&self, PATIENCE).await?)
    }
}

impl Contender for Lock {
    type Held = LockGuard;

    async fn acquire(&mut self) -> Result<LockGuard, BoxError> {
        Ok(Lock::acquire(self).await?)
    }

    async fn release(&mut self, held: LockGuard) -> Result<(), BoxError> {
        Ok(held.release().await?)
    }

    async fn try_acquire(&mut self) -> Result<Option<LockGuard>, BoxError> {
        Ok(Lock::try_acquire(self).await?)
    }
}
