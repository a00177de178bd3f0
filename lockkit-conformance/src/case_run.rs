//! One run of one case, and what cases are written with.

use std::{fmt, future::Future, panic::Location, pin::pin, sync::Arc, task::Poll, time::Duration};

use lockkit_core::{
    AcquireOptions, DowngradeError, Error, Lock, LockClient, LockGuard, LockKind, LockName, LockState,
    RunError,
    spi::{BackendInfo, Claim, ClaimRequest, Mode, OwnerId, chain},
};
use tokio::time::sleep;

use crate::{
    Harness,
    helper::{Helper, Launch, Request},
    history::{Limits, Property, Violation},
    stall::{Stopwatch, timeout},
};

/// The bound for "at once" on a busy machine, for things that ought to take microseconds or one round trip. Few cases promise that;
/// the others wait with [`PATIENCE`].
pub(crate) const PROMPT: Duration = Duration::from_secs(1);

/// What has not come within it never comes. It is far below a [`lasting`] lease, whose end would bring it, too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// No case takes longer than this; one that does hangs. What it waits for dead holders is not in it.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The most dead holders that a case waits for, one after the other.
pub(crate) const MOST_DEATHS: u32 = 3;

/// Ends the case as failed unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::case_run::failed(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;

/// A lease so long that only a release frees the lock.
pub(crate) fn lasting() -> AcquireOptions {
    AcquireOptions::new().ttl(LIMIT)
}

/// The end of a case.
pub(crate) type Outcome = Result<(), Stop>;

/// A reason for a case to end early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// It does not apply, and why.
    Skipped(String),
    /// A failure: what was expected, and what happened.
    Failed(String),
    /// A failure that no pause of the machine excuses.
    Broken(String),
}

impl Stop {
    /// No pause of the machine is an excuse for it.
    pub(crate) fn whatever_the_machine_did(self) -> Self {
        match self {
            Self::Failed(why) => Self::Broken(why),
            other => other,
        }
    }

    pub(crate) fn map_failure(self, text: impl FnOnce(String) -> String) -> Self {
        match self {
            Self::Skipped(why) => Self::Skipped(why),
            Self::Failed(why) => Self::Failed(text(why)),
            Self::Broken(why) => Self::Broken(text(why)),
        }
    }
}

/// Histories know which holds were over, and when.
impl From<Violation> for Stop {
    #[track_caller]
    fn from(violation: Violation) -> Self {
        let failure = failed(&violation);
        match violation.property {
            Property::Exclusion | Property::Tokens | Property::Fencing => failure.whatever_the_machine_did(),
            Property::Liveness | Property::Fifo | Property::Residue | Property::Notice => failure,
        }
    }
}

impl From<Error> for Stop {
    #[track_caller]
    fn from(error: Error) -> Self {
        failed(format!(
            "an operation that should have worked failed: {}",
            chain(&error)
        ))
    }
}

impl<T> From<RunError<T>> for Stop {
    #[track_caller]
    fn from(error: RunError<T>) -> Self {
        Error::from(error).into()
    }
}

impl<G> From<DowngradeError<G>> for Stop {
    #[track_caller]
    fn from(error: DowngradeError<G>) -> Self {
        Error::from(error).into()
    }
}

impl From<std::io::Error> for Stop {
    #[track_caller]
    fn from(error: std::io::Error) -> Self {
        failed(format!("the test machinery failed: {error}"))
    }
}

/// A failure, with the place in the suite that noticed it.
#[track_caller]
pub(crate) fn failed(what: impl fmt::Display) -> Stop {
    let here = Location::caller();
    Stop::Failed(format!("{what} ({}:{})", here.file(), here.line()))
}

/// One run of one case.
#[derive(Debug)]
pub(crate) struct CaseRun {
    pub(crate) harness: Arc<dyn Harness>,
    pub(crate) launch: Option<Launch>,
    pub(crate) case: &'static str,
    pub(crate) seed: u64,
    /// Keeps the names of this run apart from those of every other on the same server.
    pub(crate) run: u64,
}

impl CaseRun {
    pub(crate) async fn client(&self) -> Result<LockClient, Error> {
        self.harness.client().await
    }

    /// A lock name that no other run uses.
    pub(crate) fn name(&self, part: &str) -> String {
        format!("conformance/{:016x}/{}/{part}", self.run, self.case)
    }

    /// The short lease of the harness, for cases in which it lapses or losses are noticed by renewing it.
    pub(crate) fn short(&self) -> AcquireOptions {
        AcquireOptions::new().ttl(self.harness.ttl())
    }

    /// The lock `part` of a new client, with a [`lasting`] lease.
    pub(crate) async fn lock(&self, part: &str) -> Result<Lock, Error> {
        self.lock_of(&self.client().await?, part)
    }

    pub(crate) fn lock_of(&self, client: &LockClient, part: &str) -> Result<Lock, Error> {
        Ok(client.lock(self.name(part))?.with_options(lasting()))
    }

    /// Returns that lock with the [short](Self::short) lease.
    pub(crate) fn short_lock_of(&self, client: &LockClient, part: &str) -> Result<Lock, Error> {
        Ok(client.lock(self.name(part))?.with_options(self.short()))
    }

    pub(crate) fn semaphore_of(&self, client: &LockClient, part: &str, permits: u32) -> Result<Lock, Error> {
        Ok(client
            .semaphore(self.name(part), permits)?
            .with_options(lasting()))
    }

    /// A claim of its own on the lock `part`, past the driver.
    pub(crate) async fn claim(
        &self,
        client: &LockClient,
        part: &str,
        ttl: Duration,
    ) -> Result<Box<dyn Claim>, Error> {
        let owner = OwnerId::new(fastrand::u128(..));
        let name = LockName::new(self.name(part))?;
        let request = ClaimRequest::new(name, Mode::Exclusive, ttl, owner);
        client.__backend().claim(&request).await
    }

    pub(crate) async fn helper(&self) -> Result<Helper, Stop> {
        match (&self.launch, self.harness.url()) {
            (Some(launch), Some(url)) => Ok(Helper::start(launch, Some(&url)).await?),
            _ => Err(Stop::Skipped(
                "no helper process can reach this backend".to_owned(),
            )),
        }
    }

    pub(crate) fn freed_after_death(&self, client: &LockClient) -> Duration {
        self.harness.freed_after_death(client)
    }

    /// Returns that time on a machine that is as busy as this one: with three times what it takes to pass on a lock that `helper`
    /// releases. A release is no slower than a death, but for what a death has to wait for.
    pub(crate) async fn freed_after_death_here(
        &self,
        client: &LockClient,
        helper: &mut Helper,
    ) -> Result<Duration, Stop> {
        let (name, mut slowest) = (self.name("control"), Duration::ZERO);
        for _ in 0..3 {
            let request = Request {
                slot: "control",
                mode: Mode::Exclusive,
                ttl: LIMIT,
                name: &name,
            };
            helper.hold(&request).await?;
            let lock = self.lock_of(client, "control")?;
            let waiter = tokio::spawn(async move { lock.acquire().await });
            sleep(Duration::from_millis(50)).await;
            let watch = Stopwatch::start();
            helper.send("release control")?;
            let guard = within(PATIENCE, "the control is passed on", waiter)
                .await?
                .map_err(failed)??;
            slowest = slowest.max(watch.elapsed());
            let answer = helper.reply().await?;
            ensure!(answer == "released", "the control was not released: `{answer}`");
            guard.release().await?;
        }
        Ok(self.freed_after_death(client) + 3 * slowest)
    }

    pub(crate) fn detection(&self, info: &BackendInfo) -> Duration {
        self.harness.detection(info)
    }

    pub(crate) fn limits(&self, client: &LockClient) -> Limits {
        Limits {
            idle: self.harness.ttl() + client.info().fallback_poll + PROMPT,
            detection: self.detection(client.info()),
            ..Limits::default()
        }
    }

    /// Has the server drop the hold, or skips the case if nothing can.
    pub(crate) async fn break_hold(&self, client: &LockClient, part: &str) -> Result<(), Stop> {
        match self.harness.break_hold(&self.name(part)).await {
            Err(Error::Unsupported { what, .. }) if !client.capabilities().revoke_by_force => {
                Err(Stop::Skipped(format!("nothing can break a hold: {what}")))
            }
            other => Ok(other?),
        }
    }
}

/// Awaits `work`, which has to end within `limit` of a machine that runs.
#[track_caller]
pub(crate) fn within<F: Future>(
    limit: Duration,
    what: &str,
    work: F,
) -> impl Future<Output = Result<F::Output, Stop>> {
    let late = failed(format!(
        "expected within {limit:?}, and still waited for then: {what}"
    ));
    async move { timeout(limit, work).await.map_err(|_| late) }
}

/// Acquires within `limit`.
#[track_caller]
pub(crate) fn granted_within(
    limit: Duration,
    what: &str,
    lock: &Lock,
) -> impl Future<Output = Result<LockGuard, Stop>> {
    let late = failed(format!("expected a grant within {limit:?}: {what}"));
    async move {
        match timeout(limit, lock.acquire()).await {
            Ok(granted) => Ok(granted?),
            Err(_) => Err(late),
        }
    }
}

/// Acquires within `limit` (with one attempt, if that is zero), and releases.
#[track_caller]
pub(crate) fn comes_free(limit: Duration, what: &str, lock: &Lock) -> impl Future<Output = Outcome> {
    let late = failed(format!("expected a grant within {limit:?}: {what}"));
    async move {
        let guard = if limit.is_zero() {
            lock.try_acquire().await?
        } else {
            timeout(limit, lock.acquire()).await.ok().transpose()?
        };
        Ok(guard.ok_or(late)?.release().await?)
    }
}

/// Acquires with one attempt.
#[track_caller]
pub(crate) fn granted_at_once(what: &str, lock: &Lock) -> impl Future<Output = Result<LockGuard, Stop>> {
    let taken = failed(format!("expected a grant from one try, got \"taken\": {what}"));
    async move { lock.try_acquire().await?.ok_or(taken) }
}

/// Tries once, and has to be told that the lock is taken.
#[track_caller]
pub(crate) fn taken(what: &str, lock: &Lock) -> impl Future<Output = Outcome> {
    let granted = failed(format!("expected \"taken\" from one try, got a grant: {what}"));
    async move {
        match lock.try_acquire().await? {
            None => Ok(()),
            Some(_guard) => Err(granted),
        }
    }
}

/// Returns what the server shows of a lock or semaphore.
pub(crate) async fn look(client: &LockClient, name: &str, kind: LockKind) -> Result<LockState, Error> {
    match kind {
        LockKind::Lock => client.inspect(name).await,
        LockKind::Semaphore => client.inspect_semaphore(name).await,
    }
}

/// Waits until the server shows no holder and no waiter.
pub(crate) async fn is_clean(
    limit: Duration,
    after: &str,
    client: &LockClient,
    name: &str,
    kind: LockKind,
) -> Outcome {
    let watch = Stopwatch::start();
    loop {
        let state = look(client, name, kind).await?;
        if state.is_free() && state.waiters.unwrap_or(0) == 0 {
            return Ok(());
        }
        ensure!(
            watch.elapsed() < limit,
            "{after}, and {limit:?} later the server still shows holders {:?} and waiters {:?} of {name}",
            state.holders,
            state.waiters
        );
        sleep(Duration::from_millis(2)).await;
    }
}

/// Asks again until `condition` answers `true`, for at most `limit`.
#[track_caller]
pub(crate) fn eventually<F, Fut>(
    limit: Duration,
    what: &str,
    mut condition: F,
) -> impl Future<Output = Outcome>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<bool, Stop>>,
{
    let late = failed(format!("not so within {limit:?}: {what}"));
    async move {
        let watch = Stopwatch::start();
        while !condition().await? {
            if watch.elapsed() >= limit {
                return Err(late);
            }
            sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }
}

/// Polls `work` at most `polls` times, then drops it; `None` if it was not ready by then.
pub(crate) async fn poll_at_most<F: Future>(polls: usize, work: F) -> Option<F::Output> {
    let mut work = pin!(work);
    let mut left = polls;
    std::future::poll_fn(|context| {
        left = left.saturating_sub(1);
        match work.as_mut().poll(context) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
