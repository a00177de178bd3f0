//! `spi::Claim`: sends blocking work to a worker thread, and resumes it after a future that waited for it was
//! dropped.

use std::{
    fs::File,
    ops::RangeInclusive,
    sync::{Arc, Weak},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Error, LossReason,
    spi::{Claim, Grant, Lease, Mode, Mutex, Renewal},
};
use tokio::{
    runtime::Handle,
    sync::oneshot,
    task::{AbortHandle, JoinHandle, spawn_blocking},
    time::{Instant, sleep, sleep_until},
};

use crate::{
    NAME,
    blocking_claim::{BlockingClaim, ClaimSpec},
    error::{FileError, Result},
    watch::Events,
};

/// The pauses between retries after an event: the first of these, then twice as long each time, up to the last. A
/// killed holder's descriptors are closed one after the other, and each event comes before the lock is free.
const BURST: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(512);

#[derive(Debug)]
pub(crate) struct FileClaim {
    spec: Arc<ClaimSpec>,
    /// The state, unless a worker has it.
    idle: Option<BlockingClaim>,
    /// The worker that has the state.
    worker: Option<Worker>,
    /// The file of the hold that was returned to the caller.
    held: Option<Arc<File>>,
    /// An event came since the last attempt or renewal began.
    woken: bool,
    burst: Burst,
}

/// A worker at work, and the slot to which it returns the state.
#[derive(Debug)]
struct Worker {
    task: JoinHandle<()>,
    done: oneshot::Receiver<()>,
    slot: ReturnSlot,
}

type ReturnSlot = Arc<Mutex<Option<Returned>>>;

/// The returned state, and the task that gives up a grant that nobody takes.
#[derive(Debug)]
struct Returned {
    state: BlockingClaim,
    expiry: Option<AbortHandle>,
}

/// The state in a worker's hands. It is returned also if the runtime never starts the work: it may be a hold, and
/// others must not be granted before its holder knows that it is lost.
struct Loan {
    state: Option<BlockingClaim>,
    slot: ReturnSlot,
    /// The time for which a grant waits for its claim. A claim that is no longer polled must not keep others out.
    expires_in: Duration,
    was_held: bool,
    /// Dropped to signal the end.
    done: Option<oneshot::Sender<()>>,
}

impl Drop for Loan {
    fn drop(&mut self) {
        let Some(state) = self.state.take().filter(|_| !std::thread::panicking()) else {
            return;
        };
        let is_granted = state.hold.is_some() && !self.was_held;
        let runtime = is_granted.then(|| Handle::try_current().ok()).flatten();
        let expiry = runtime.map(|runtime| {
            let expiry = expire(Arc::downgrade(&self.slot), self.expires_in);
            runtime.spawn(expiry).abort_handle()
        });
        *self.slot.lock() = Some(Returned { state, expiry });
        self.done = None;
    }
}

/// Gives up a grant that nobody has taken in time.
async fn expire(slot: Weak<Mutex<Option<Returned>>>, after: Duration) {
    sleep(after).await;
    let untaken = slot.upgrade().and_then(|slot| slot.lock().take());
    spawn_blocking(|| drop(untaken));
}

/// A waiter's position in [`BURST`].
#[derive(Debug)]
struct Burst {
    next: Duration,
    at: Option<Instant>,
}

impl FileClaim {
    pub(crate) fn new(spec: ClaimSpec) -> Self {
        Self {
            spec: Arc::new(spec),
            idle: None,
            worker: None,
            held: None,
            woken: false,
            burst: Burst::default(),
        }
    }

    /// Waits for the worker, if there is one, and returns the state.
    async fn state(&mut self) -> &mut BlockingClaim {
        if let Some(worker) = &mut self.worker {
            // A worker that panicked has dropped the state, which released everything.
            let _ = (&mut worker.done).await;
            let returned = worker.slot.lock().take();
            self.worker = None;
            self.idle = returned.map(|Returned { state, expiry }| {
                expiry.inspect(AbortHandle::abort);
                state
            });
        }
        self.idle
            .get_or_insert_with(|| BlockingClaim::new(Arc::clone(&self.spec)))
    }

    /// Does `work` on this thread. If the disk was slow recently, or the work has to wait, a worker thread does all
    /// of it.
    async fn run<T: Send + 'static>(
        &mut self,
        mut work: impl FnMut(&mut BlockingClaim) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        FileError::require_runtime()?;
        let pace = Arc::clone(&self.spec.pace);
        let state = self.state().await;
        if let Some(done) = pace.run_inline(|| {
            state.inline = true;
            let done = work(state);
            state.inline = false;
            done
        }) && !matches!(done, Err(FileError::NeedsWorker))
        {
            return done;
        }
        self.run_on_worker(work).await?
    }

    /// Does `work` on a worker thread, also if this future is dropped meanwhile.
    async fn run_on_worker<T: Send + 'static>(
        &mut self,
        mut work: impl FnMut(&mut BlockingClaim) -> T + Send + 'static,
    ) -> Result<T> {
        FileError::require_runtime()?;
        self.state().await;
        let state = self.idle.take().ok_or(FileError::WorkerDied)?;
        let (sender, mut result) = oneshot::channel();
        let (ends, done) = oneshot::channel();
        let slot = ReturnSlot::default();
        let mut loan = Loan {
            was_held: state.hold.is_some(),
            state: Some(state),
            slot: Arc::clone(&slot),
            expires_in: self.spec.request.ttl,
            done: Some(ends),
        };
        let task = spawn_blocking(move || {
            if let Some(state) = &mut loan.state {
                // Nobody receives it if the future was dropped.
                let _ = sender.send(work(state));
            }
            // The closure has to capture the loan as a whole.
            drop(loan);
        });
        self.worker = Some(Worker { task, done, slot });
        self.state().await;
        result.try_recv().map_err(|_| FileError::WorkerDied)
    }

    /// Takes the events so far, at the beginning of an attempt or a renewal. Returns whether there were any.
    fn take_events(&mut self) -> bool {
        let mut woken = std::mem::take(&mut self.woken);
        if let Some(state) = &mut self.idle {
            woken |= state.events.as_mut().is_some_and(Events::seen);
        }
        woken
    }

    /// Has a waiter write its heartbeat. Returns whether an attempt is worth while.
    async fn heartbeat(&mut self) -> bool {
        let Some(state) = &mut self.idle else {
            return true;
        };
        match self.spec.pace.run_inline(|| state.heartbeat()) {
            Some(worth_while) => worth_while,
            // After a failure, an attempt finds out why.
            None => self.run_on_worker(BlockingClaim::heartbeat).await.unwrap_or(true),
        }
    }
}

#[async_trait]
impl Claim for FileClaim {
    async fn attempt(&mut self, patience: Duration) -> lockkit_core::Result<Option<Grant>> {
        let waits = !patience.is_zero();
        if self.state().await.hold.is_none() {
            if self.take_events() || !waits {
                self.burst = Burst::default();
            }
            let since = Instant::now();
            let attempt =
                move |state: &mut BlockingClaim| state.attempt(waits, since).map(|()| state.hold.is_some());
            // Other modes create more files, or look at more.
            let tried = if self.spec.request.mode == Mode::Exclusive {
                self.run(attempt).await
            } else {
                self.run_on_worker(attempt).await.flatten()
            };
            let granted = tried.map_err(|error| error.into_error("acquire"))?;
            if granted && self.state().await.hold.is_none() {
                return Err(FileError::GrantExpired.into_error("acquire"));
            }
        }
        let Some(hold) = self.idle.as_ref().and_then(|state| state.hold.as_ref()) else {
            if self.idle.as_ref().is_some_and(|state| state.retry_soon) {
                self.burst.schedule();
            } else {
                self.burst = Burst::default();
            }
            return Ok(None);
        };
        self.held = Some(Arc::clone(hold.file()));
        Ok(Some(hold.grant.clone()))
    }

    async fn renew(&mut self) -> lockkit_core::Result<Renewal> {
        if self.state().await.hold.is_none() {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        }
        self.take_events();
        let since = Instant::now();
        let looked = self
            .run(|state| Ok((state.is_intact()?, state.is_revoked()?)))
            .await;
        Ok(match looked.map_err(|error| error.into_error("renew"))? {
            (false, _) => Renewal::Lost(LossReason::Revoked),
            (true, true) => Renewal::Asked,
            (true, false) => Renewal::Held(Lease::new(since, None)),
        })
    }

    async fn release(&mut self) -> lockkit_core::Result<()> {
        if self.idle.is_none() && self.worker.is_none() {
            return Ok(());
        }
        // The hold has to close the last descriptor.
        self.held = None;
        let release = |state: &mut BlockingClaim| {
            state.release();
            Ok(())
        };
        // Other modes delete files.
        let released = if self.spec.request.mode == Mode::Exclusive {
            self.run(release).await
        } else {
            self.run_on_worker(release).await.flatten()
        };
        released.map_err(|error| error.into_error("release"))?;
        self.woken = false;
        self.burst = Burst::default();
        let lost = self
            .idle
            .as_mut()
            .is_some_and(|state| std::mem::take(&mut state.lost));
        if lost {
            return Err(Error::lost(
                NAME,
                self.spec.request.name.clone(),
                LossReason::Revoked,
            ));
        }
        Ok(())
    }

    async fn notified(&mut self) {
        let holds = self.held.is_some();
        let poll = self.spec.poll;
        let granted = self.state().await.hold.is_some();
        if self.woken || (granted && !holds) {
            return;
        }
        if let Some(state) = self.idle.as_mut().filter(|_| holds)
            && state.watch_hold()
        {
            self.woken = true;
            return;
        }
        let next_poll = Instant::now() + poll;
        loop {
            let next_heartbeat = self.idle.as_ref().and_then(|state| state.next_heartbeat);
            let events = self.idle.as_mut().and_then(|state| state.events.as_mut());
            let event = async {
                match events {
                    Some(events) => {
                        events.next().await;
                        true
                    }
                    None if holds => std::future::pending().await,
                    None => {
                        sleep_until(next_poll).await;
                        false
                    }
                }
            };
            tokio::select! {
                happened = event => {
                    self.woken = happened;
                    return;
                }
                () = self.burst.due(), if !holds => return,
                () = sleep_until(next_heartbeat.unwrap_or(next_poll)), if !holds && next_heartbeat.is_some() => {}
            }
            if self.heartbeat().await {
                return;
            }
        }
    }

    fn descriptor(&self) -> Option<std::os::fd::OwnedFd> {
        self.held.as_ref()?.try_clone().ok().map(Into::into)
    }
}

impl Drop for FileClaim {
    fn drop(&mut self) {
        // Work that has not begun is dropped, and the state with it. Work that has begun ends by itself first.
        if let Some(worker) = &self.worker {
            worker.task.abort();
        }
    }
}

impl Default for Burst {
    fn default() -> Self {
        Self {
            next: *BURST.start(),
            at: None,
        }
    }
}

impl Burst {
    /// Schedules the next retry, after a failed attempt.
    fn schedule(&mut self) {
        self.at = BURST.contains(&self.next).then(|| Instant::now() + self.next);
        self.next = self.next.saturating_mul(2);
    }

    /// Resolves when it is time to retry.
    async fn due(&mut self) {
        match self.at {
            Some(at) => {
                sleep_until(at).await;
                self.at = None;
            }
            None => std::future::pending().await,
        }
    }
}
