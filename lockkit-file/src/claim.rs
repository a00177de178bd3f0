//! A claim, as the driver sees it: blocking work goes to a worker thread and is picked up again wherever the future
//! that waited for it was dropped.

use std::{
    fs::File,
    ops::RangeInclusive,
    sync::{Arc, Weak},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Error, LossReason,
    spi::{Claim, Grant, Lease, Mode, Renewal},
};
use tokio::{
    runtime::Handle,
    sync::oneshot,
    task::{AbortHandle, JoinHandle, spawn_blocking},
    time::{Instant, sleep, sleep_until},
};

use crate::{
    NAME,
    contender::{Contender, Spec},
    fault::{Fault, Result},
    mutex::Mutex,
    watch::Events,
};

/// When to try again after an event, unless another comes: after the first of these, after twice that, and so on until
/// the last has passed. A killed holder's descriptors are closed one after the other, and each tells of itself before
/// its lock is gone.
const BURST: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(512);

#[derive(Debug)]
pub(crate) struct FileClaim {
    spec: Arc<Spec>,
    /// The state, unless a worker has it.
    idle: Option<Contender>,
    /// The worker that has it.
    busy: Option<Busy>,
    /// The file of the hold that the caller knows of.
    held: Option<Arc<File>>,
    /// An event came since the last attempt or renewal began.
    woken: bool,
    burst: Burst,
}

/// A worker, and where it leaves the state when it is done.
#[derive(Debug)]
struct Busy {
    worker: JoinHandle<()>,
    done: oneshot::Receiver<()>,
    place: Place,
}

type Place = Arc<Mutex<Option<Left>>>;

/// The state that a worker has left, and what gives up a hold that nobody takes.
#[derive(Debug)]
struct Left {
    state: Contender,
    lapse: Option<AbortHandle>,
}

/// The state in a worker's hands. It is left behind also if the runtime never starts the work: it may be a hold, which
/// others must not get before its holder is told.
struct Borrowed {
    state: Option<Contender>,
    place: Place,
    /// The time for which a grant may wait for whoever asked for it. One that is not polled any more must not keep others out.
    lapses_in: Duration,
    was_held: bool,
    /// Tells of the end by being dropped.
    done: Option<oneshot::Sender<()>>,
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let Some(state) = self.state.take().filter(|_| !std::thread::panicking()) else {
            return;
        };
        let is_granted = state.hold.is_some() && !self.was_held;
        let runtime = is_granted.then(|| Handle::try_current().ok()).flatten();
        let lapse = runtime.map(|runtime| {
            let lapse = lapse(Arc::downgrade(&self.place), self.lapses_in);
            runtime.spawn(lapse).abort_handle()
        });
        *self.place.lock() = Some(Left { state, lapse });
        self.done = None;
    }
}

async fn lapse(place: Weak<Mutex<Option<Left>>>, after: Duration) {
    sleep(after).await;
    let untaken = place.upgrade().and_then(|place| place.lock().take());
    spawn_blocking(|| drop(untaken));
}

/// Where in [`BURST`] a waiter is.
#[derive(Debug)]
struct Burst {
    next: Duration,
    at: Option<Instant>,
}

impl FileClaim {
    pub(crate) fn new(spec: Spec) -> Self {
        Self {
            spec: Arc::new(spec),
            idle: None,
            busy: None,
            held: None,
            woken: false,
            burst: Burst::default(),
        }
    }

    /// Waits until no worker is busy.
    async fn settle(&mut self) -> &mut Contender {
        if let Some(busy) = &mut self.busy {
            // A worker that panicked has dropped the state, and so freed it all.
            let _ = (&mut busy.done).await;
            let left = busy.place.lock().take();
            self.busy = None;
            self.idle = left.map(|Left { state, lapse }| {
                lapse.inspect(AbortHandle::abort);
                state
            });
        }
        self.idle
            .get_or_insert_with(|| Contender::new(Arc::clone(&self.spec)))
    }

    /// Does `work` at once, unless the disk has been slow of late or it has to wait. Then a worker thread does all of it.
    async fn run<T: Send + 'static>(
        &mut self,
        mut work: impl FnMut(&mut Contender) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        Fault::unless_in_a_runtime()?;
        let pace = Arc::clone(&self.spec.pace);
        let state = self.settle().await;
        if let Some(done) = pace.at_once(|| {
            state.in_place = true;
            let done = work(state);
            state.in_place = false;
            done
        }) && !matches!(done, Err(Fault::Waits))
        {
            return done;
        }
        self.on_a_worker(work).await?
    }

    /// Does `work` on a worker thread. If this future is dropped, it is done all the same.
    async fn on_a_worker<T: Send + 'static>(
        &mut self,
        mut work: impl FnMut(&mut Contender) -> T + Send + 'static,
    ) -> Result<T> {
        Fault::unless_in_a_runtime()?;
        self.settle().await;
        let state = self.idle.take().ok_or(Fault::Worker)?;
        let (sender, mut answer) = oneshot::channel();
        let (ends, done) = oneshot::channel();
        let place = Place::default();
        let mut borrowed = Borrowed {
            was_held: state.hold.is_some(),
            state: Some(state),
            place: Arc::clone(&place),
            lapses_in: self.spec.request.ttl,
            done: Some(ends),
        };
        let worker = spawn_blocking(move || {
            if let Some(state) = &mut borrowed.state {
                // Nobody listens if the future was dropped.
                let _ = sender.send(work(state));
            }
            // As a whole, so that it is captured as a whole.
            drop(borrowed);
        });
        self.busy = Some(Busy { worker, done, place });
        self.settle().await;
        answer.try_recv().map_err(|_| Fault::Worker)
    }

    /// Takes note of events, at the beginning of an attempt or a renewal. Says whether there were any.
    fn take_events(&mut self) -> bool {
        let mut woken = std::mem::take(&mut self.woken);
        if let Some(state) = &mut self.idle {
            woken |= state.events.as_mut().is_some_and(Events::seen);
        }
        woken
    }

    /// Has a waiter show that it is alive. Says that it is worth while to try.
    async fn beat(&mut self) -> bool {
        let Some(state) = &mut self.idle else {
            return true;
        };
        match self.spec.pace.at_once(|| state.beat()) {
            Some(worth_while) => worth_while,
            // What goes wrong, an attempt finds out.
            None => self.on_a_worker(Contender::beat).await.unwrap_or(true),
        }
    }
}

#[async_trait]
impl Claim for FileClaim {
    async fn attempt(&mut self, patience: Duration) -> lockkit_core::Result<Option<Grant>> {
        let waits = !patience.is_zero();
        if self.settle().await.hold.is_none() {
            if self.take_events() || !waits {
                self.burst = Burst::default();
            }
            let since = Instant::now();
            let attempt =
                move |state: &mut Contender| state.attempt(waits, since).map(|()| state.hold.is_some());
            // Others make more files, or look at more of them.
            let tried = if self.spec.request.mode == Mode::Exclusive {
                self.run(attempt).await
            } else {
                self.on_a_worker(attempt).await.flatten()
            };
            let granted = tried.map_err(|fault| fault.during("acquire"))?;
            if granted && self.settle().await.hold.is_none() {
                return Err(Fault::Untaken.during("acquire"));
            }
        }
        let Some(hold) = self.idle.as_ref().and_then(|state| state.hold.as_ref()) else {
            if self.idle.as_ref().is_some_and(|state| state.is_stuck) {
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
        if self.settle().await.hold.is_none() {
            return Ok(Renewal::Lost(LossReason::Disconnected));
        }
        self.take_events();
        let since = Instant::now();
        let stands = self.run(|state| state.stands()).await;
        if stands.map_err(|fault| fault.during("renew"))? {
            Ok(Renewal::Held(Lease { since, length: None }))
        } else {
            Ok(Renewal::Lost(LossReason::Revoked))
        }
    }

    async fn release(&mut self) -> lockkit_core::Result<()> {
        if self.idle.is_none() && self.busy.is_none() {
            return Ok(());
        }
        // The last descriptor is to be closed with the hold.
        self.held = None;
        let release = |state: &mut Contender| {
            state.release();
            Ok(())
        };
        // Others delete files.
        let released = if self.spec.request.mode == Mode::Exclusive {
            self.run(release).await
        } else {
            self.on_a_worker(release).await.flatten()
        };
        released.map_err(|fault| fault.during("release"))?;
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
        let granted = self.settle().await.hold.is_some();
        if self.woken || (granted && !holds) {
            return;
        }
        if let Some(state) = self.idle.as_mut().filter(|_| holds)
            && state.watch_hold()
        {
            self.woken = true;
            return;
        }
        let unwatched = Instant::now() + poll;
        loop {
            let look_at = self.idle.as_ref().and_then(|state| state.look_at);
            let events = self.idle.as_mut().and_then(|state| state.events.as_mut());
            let event = async {
                match events {
                    Some(events) => {
                        events.next().await;
                        true
                    }
                    None if holds => std::future::pending().await,
                    None => {
                        sleep_until(unwatched).await;
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
                () = sleep_until(look_at.unwrap_or(unwatched)), if !holds && look_at.is_some() => {}
            }
            if self.beat().await {
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
        // Work that has not begun is dropped with the state in it; what has begun ends by itself and then is.
        if let Some(busy) = &self.busy {
            busy.worker.abort();
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
    /// After a failed attempt.
    fn schedule(&mut self) {
        self.at = BURST.contains(&self.next).then(|| Instant::now() + self.next);
        self.next = self.next.saturating_mul(2);
    }

    /// When it is time to try again.
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
