//! The state that all handles of a client share: its backend, its worker and its queues.

use std::{
    collections::HashMap,
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use crate::{
    AcquireOptions, Error, FencingToken, ListedLock, LockId, LockKind, LockName, LockState, LossReason,
    Result,
    driver::{lock_queue::LockQueue, moment::Clock, observe::Meters, timing, worker::Worker},
    name::Shown,
    spi::{Backend, BackendInfo, HolderWatch, Lister, Mode, chain, require_runtime},
    sync::Mutex,
};

const ANNOUNCE: &str = "announce";
/// A server that does not answer must not keep a leader from its work.
const ANNOUNCES_WITHIN: Duration = Duration::from_millis(250);

pub(crate) struct Core {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) info: BackendInfo,
    pub(crate) worker: Arc<Worker>,
    pub(crate) clock: Clock,
    /// The clock of every `max_hold`, which counts what is slept whatever the leases do.
    pub(crate) max_hold_clock: Clock,
    pub(crate) owners: OwnerStock,
    pub(crate) meters: Meters,
    /// The number of releases that were given up without a confirmation.
    pub(crate) unconfirmed: AtomicUsize,
    /// That number when the client was closed. Their leases are over, so closing need not report them.
    unconfirmed_before: AtomicUsize,
    queues: Mutex<HashMap<(LockName, Mode), Weak<LockQueue>>>,
    closed: AtomicBool,
    /// Notified when the client is closed, and when its runtime has ended.
    over: Notify,
}

/// A condition for an operation to go on: [`Core::is_open`] or [`Core::is_alive`]. Its error says why the operation ends.
pub(crate) type GoesOn = fn(&Core, &'static str) -> Result<()>;

impl Core {
    pub(crate) fn new(backend: impl Backend) -> Arc<Self> {
        let mut info = backend.info();
        // Far beyond any use, and near enough for the clock to count to.
        info.max_patience = info.max_patience.min(AcquireOptions::MAX_DURATION);
        info.fallback_poll = info.fallback_poll.min(AcquireOptions::MAX_DURATION);
        let clock = Clock::new(info.leases_stand_still || !info.capabilities.lease);
        Arc::new_cyclic(|core| Self {
            worker: Arc::new(Worker::new(core.clone(), info.name)),
            max_hold_clock: clock.counting_sleep(),
            clock,
            meters: Meters::new(info.name),
            info,
            backend: Box::new(backend),
            owners: OwnerStock::default(),
            unconfirmed: AtomicUsize::new(0),
            unconfirmed_before: AtomicUsize::new(0),
            queues: Mutex::default(),
            closed: AtomicBool::new(false),
            over: Notify::new(),
        })
    }

    /// Refuses options that are out of bounds or contradict each other, and those that this backend cannot keep.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`] or [`Error::Unsupported`], which names the option.
    pub(crate) fn check(&self, options: &AcquireOptions) -> Result<()> {
        options.validate()?;
        let BackendInfo {
            name, capabilities, ..
        } = &self.info;
        if options.hold_at_least.is_some() && !capabilities.detach {
            return Err(Error::unsupported(
                name,
                "hold_at_least, since its holds end with a session, a transaction or a process; keep the guard for that long",
            ));
        }
        if options.local_handoffs.is_some_and(|times| times > 0) && !capabilities.local_handoffs {
            let reason = format!("must be 0 on {name}, whose order across processes is strict");
            return Err(Error::invalid_option("local_handoffs", reason));
        }
        options.ttl.map_or(Ok(()), |ttl| self.check_ttl(ttl))
    }

    /// Refuses a ttl with which this backend's holds do not last.
    ///
    /// # Errors
    /// [`Error::InvalidOptions`], which names the least ttl.
    pub(crate) fn check_ttl(&self, ttl: Duration) -> Result<()> {
        let BackendInfo { name, least_ttl, .. } = &self.info;
        if ttl >= *least_ttl || !self.info.capabilities.lease {
            return Ok(());
        }
        let reason = format!(
            "{ttl:?} is below {least_ttl:?}, the least with which a hold on {name} lasts from one renewal to the next"
        );
        Err(Error::invalid_option("ttl", reason))
    }

    /// Returns the queue of this lock, which all its handles share.
    pub(crate) fn queue(self: &Arc<Self>, name: LockName, mode: Mode) -> Arc<LockQueue> {
        let mut queues = self.queues.lock();
        if let Some(queue) = queues.get(&(name.clone(), mode)).and_then(Weak::upgrade) {
            return queue;
        }
        let info = &self.info;
        let id = LockId::new(
            info.server.clone(),
            info.namespace.clone(),
            mode.kind(),
            name.clone(),
        );
        let queue = Arc::new(LockQueue::new(self.clone(), id, mode));
        queues.insert((name, mode), Arc::downgrade(&queue));
        queue
    }

    /// Forgets a queue whose last handle is gone, unless a new one has been made in the meantime.
    pub(crate) fn forget_queue(&self, id: &LockId, mode: Mode) {
        let key = (id.name().clone(), mode);
        let mut queues = self.queues.lock();
        if queues.get(&key).is_some_and(|queue| queue.strong_count() == 0) {
            queues.remove(&key);
        }
    }

    pub(crate) fn queues(&self) -> Vec<Arc<LockQueue>> {
        self.queues.lock().values().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Succeeds while this client takes requests.
    ///
    /// # Errors
    /// [`Error::Closed`], or as [`is_alive`](Self::is_alive).
    pub(crate) fn is_open(&self, operation: &'static str) -> Result<()> {
        if self.is_closed() {
            return Err(Error::Closed);
        }
        self.is_alive(operation)
    }

    /// Succeeds while the runtime that the client lives on goes on. A closed client still releases.
    ///
    /// # Errors
    /// [`Error::Backend`] once that runtime has ended.
    pub(crate) fn is_alive(&self, operation: &'static str) -> Result<()> {
        self.worker.lives(operation)
    }

    /// Resolves with the error of `goes_on` as soon as it has one.
    pub(crate) async fn over(&self, operation: &'static str, goes_on: GoesOn) -> Error {
        loop {
            let mut over = pin!(self.over.notified());
            over.as_mut().enable();
            if let Err(err) = goes_on(self, operation) {
                return err;
            }
            over.await;
        }
    }

    /// Bounds `work`: runs it until `limit()`, and for as long as it `goes_on`. Returns `None` at the limit.
    ///
    /// # Errors
    /// As [`require_runtime`], and the error of `goes_on`.
    pub(crate) async fn within<T>(
        &self,
        operation: &'static str,
        goes_on: GoesOn,
        limit: impl FnOnce() -> Instant,
        mut work: impl Future<Output = T> + Unpin,
    ) -> Result<Option<T>> {
        if let Poll::Ready(done) = timing::poll_once(&mut work).await {
            return Ok(Some(done));
        }
        require_runtime(self.info.name, operation)?;
        let limit = limit();
        // What it takes to wait is made only when there is need to wait.
        let waiting = async move {
            tokio::select! {
                biased;
                done = work => Ok(Some(done)),
                err = self.over(operation, goes_on) => Err(err),
                () = tokio::time::sleep_until(limit) => Ok(None),
            }
        };
        Box::pin(waiting).await
    }

    /// Makes an exchange with the server one whose metrics are made, and whose error has no secret that the server has repeated.
    pub(crate) fn request<T, F>(
        &self,
        operation: &'static str,
        exchange: F,
    ) -> impl Future<Output = Result<T>> + Unpin
    where
        F: Future<Output = Result<T>> + Unpin,
    {
        self.blanked(self.meters.request(operation, exchange))
    }

    /// Makes it one whose error has no secret.
    pub(crate) fn blanked<T, F>(&self, mut exchange: F) -> impl Future<Output = Result<T>> + Unpin
    where
        F: Future<Output = Result<T>> + Unpin,
    {
        poll_fn(move |cx| {
            let polled = Pin::new(&mut exchange).poll(cx);
            polled.map_err(|error| self.info.secrets.blanked(error))
        })
    }

    pub(crate) fn no_answer(&self, operation: &'static str) -> Error {
        Error::transient(self.info.name, operation, "no answer in time from the server")
    }

    pub(crate) async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        self.ask("inspect", name, self.backend.inspect(name, kind)).await
    }

    pub(crate) async fn revoke_by_force(
        &self,
        name: &LockName,
        kind: LockKind,
        token: FencingToken,
    ) -> Result<bool> {
        let ended = self
            .ask("revoke", name, self.backend.revoke_by_force(name, kind, token))
            .await?;
        if ended && kind == LockKind::Lock && name.is_of_election() {
            self.announce(name).await;
        }
        Ok(ended)
    }

    /// Has the backend wake an observer of the lock of this name; `None` if it wakes nobody.
    pub(crate) async fn watch(&self, name: &LockName) -> Result<Option<Box<dyn HolderWatch>>> {
        let watch = self.backend.watch(name, LockKind::Lock);
        self.ask("watch", name, watch).await
    }

    /// Has the backend wake the observers of the lock of this name. They look without it, too, so that a failure changes little.
    pub(crate) async fn announce(&self, name: &LockName) {
        let announcing = self.backend.announce(name, LockKind::Lock);
        let announcing = self.request(ANNOUNCE, announcing);
        let limit = || Instant::now() + ANNOUNCES_WITHIN;
        match self.within(ANNOUNCE, Self::is_alive, limit, announcing).await {
            Ok(Some(Ok(()))) => {}
            Ok(Some(Err(err))) | Err(err) => {
                tracing::debug!(lock = %Shown(name.as_str()), error = chain(&err), "observers were not told");
            }
            Ok(None) => tracing::debug!(lock = %Shown(name.as_str()), "observers may not have been told"),
        }
    }

    /// Does that in the worker, also if this future is dropped. Waits for it only where the worker has come to it in time: the
    /// runtime that the client lives on may stand still.
    pub(crate) async fn announce_by_worker(self: &Arc<Self>, name: &LockName) {
        let told = self.worker.announce(self.clone(), name.clone());
        let limit = || Instant::now() + ANNOUNCES_WITHIN;
        let _ = self.within(ANNOUNCE, Self::is_alive, limit, told).await;
    }

    /// Asks for the next page of a listing, and adds up the time that it `took`.
    ///
    /// The time counts in steps. One that ends late does not: whoever reads the list was away, and may be for as long as it likes, while
    /// nobody took the answer.
    pub(crate) async fn page(
        &self,
        lister: &mut dyn Lister,
        took: &mut Duration,
    ) -> Result<Option<Vec<ListedLock>>> {
        const OPERATION: &str = "list";
        const STEP: Duration = Duration::from_millis(500);

        self.is_open(OPERATION)?;
        let mut page = self.request(OPERATION, lister.page());
        loop {
            let began = Instant::now();
            let reply = self
                .within(OPERATION, Self::is_alive, || began + STEP, &mut page)
                .await?;
            let waited = began.elapsed();
            if waited < 2 * STEP {
                *took += waited;
            }
            if let Some(answered) = reply {
                return answered;
            }
            if *took >= AcquireOptions::DEFAULT_OP_TIMEOUT {
                return Err(self.no_answer(OPERATION));
            }
        }
    }

    pub(crate) async fn fence(&self) -> Result<FencingToken> {
        self.ask_server("fence", self.backend.fence()).await
    }

    pub(crate) async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        self.ask_server("raise", self.backend.raise_fence(above)).await
    }

    pub(crate) async fn ask<T>(
        &self,
        operation: &'static str,
        name: &LockName,
        question: impl Future<Output = Result<T>> + Unpin,
    ) -> Result<T> {
        let reply = self.ask_server(operation, question).await;
        reply.map_err(|err| err.for_lock(name))
    }

    /// Asks what is about no lock.
    async fn ask_server<T>(
        &self,
        operation: &'static str,
        question: impl Future<Output = Result<T>> + Unpin,
    ) -> Result<T> {
        self.is_open(operation)?;
        let limit = || Instant::now() + AcquireOptions::DEFAULT_OP_TIMEOUT;
        let question = self.request(operation, question);
        let reply = self.within(operation, Self::is_alive, limit, question).await?;
        reply.unwrap_or_else(|| Err(self.no_answer(operation)))
    }

    /// Closes the client: holds are lost, waiters turned away. Waits up to `timeout` for every release to be confirmed.
    pub(crate) async fn close(&self, timeout: Duration) -> Result<()> {
        let limit = Instant::now() + timeout.min(AcquireOptions::MAX_DURATION);
        self.close_by(limit, || limit).await
    }

    /// Closes the client once all releases have ended, each of which does by itself, at the latest when the lease of its hold is over.
    /// Ending the connections is one exchange with the server, and bounded as such.
    #[cfg(feature = "blocking")]
    pub(crate) async fn close_after_all(&self) -> Result<()> {
        let limit = Instant::now() + AcquireOptions::MAX_DURATION;
        let closes_by = || Instant::now() + AcquireOptions::DEFAULT_OP_TIMEOUT;
        self.close_by(limit, closes_by).await
    }

    /// Waits for every release until `limit`, and for the end of the connections until `closes_by`.
    async fn close_by(&self, limit: Instant, closes_by: impl FnOnce() -> Instant) -> Result<()> {
        const OPERATION: &str = "close";

        self.begin_close();
        self.is_alive(OPERATION)?;
        let idle = pin!(self.idle());
        let drained = self.within(OPERATION, Self::is_alive, || limit, idle).await?;
        self.is_alive(OPERATION)?;
        let unconfirmed = || {
            let cause = "releases are not confirmed; what is left ends with its lease or connection";
            Err(Error::transient(self.info.name, OPERATION, cause))
        };
        if drained.is_none() {
            // They go on, and need the connection.
            return unconfirmed();
        }
        let closing = self.blanked(self.backend.close());
        let closed = self.within(OPERATION, Self::is_alive, closes_by, closing).await?;
        let before = self.unconfirmed_before.load(Ordering::SeqCst);
        if self.unconfirmed.load(Ordering::SeqCst) > before {
            return unconfirmed();
        }
        closed.unwrap_or_else(|| Err(self.no_answer(OPERATION)))
    }

    pub(crate) fn begin_close(&self) {
        if !self.closed.swap(true, Ordering::SeqCst) {
            self.unconfirmed_before
                .store(self.unconfirmed.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        self.turn_away();
        for hold in self.queues().iter().flat_map(|queue| queue.holds()) {
            hold.cell.lose(LossReason::Disconnected);
        }
        self.worker.adopt_now();
    }

    /// Has everyone who waits see that this client serves nobody any more.
    pub(crate) fn turn_away(&self) {
        self.over.notify_waiters();
        for queue in self.queues() {
            queue.close();
        }
    }

    /// Resolves when nobody contends, nothing is held and no release is under way. Only for a closed client: none of that
    /// begins again there.
    async fn idle(&self) {
        // In this order: a queue that has become idle has left its traces with the worker before.
        for queue in self.queues() {
            self.worker.when(|| queue.is_idle()).await;
        }
        self.worker.when(|| self.worker.is_idle()).await;
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("server", &self.info.server)
            .finish_non_exhaustive()
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.worker.orphan();
    }
}

/// Owner ids: random bits from the operating system. They are fetched for several claims at once, since a call into the
/// kernel costs more than all else in an uncontended acquisition. A client does not survive a `fork`, so neither does
/// its stock.
#[derive(Default)]
pub(crate) struct OwnerStock {
    ids: Mutex<Vec<u128>>,
}

impl OwnerStock {
    const FETCHED_AT_ONCE: usize = 64;

    /// Moves at least one and at most `many` ids into `to`.
    pub(crate) fn draw(&self, backend: &'static str, many: usize, to: &mut Vec<u128>) -> Result<()> {
        let mut ids = self.ids.lock();
        if ids.is_empty() {
            let mut bytes = [0_u8; 16 * Self::FETCHED_AT_ONCE];
            getrandom::fill(&mut bytes)
                .map_err(|err| Error::permanent(backend, "acquire", format!("no random numbers: {err}")))?;
            let (fetched, _) = bytes.as_chunks::<16>();
            ids.extend(fetched.iter().map(|id| u128::from_ne_bytes(*id)));
        }
        let rest = ids.len().saturating_sub(many);
        // A queue that is used once keeps no room for more.
        to.reserve_exact(many);
        to.extend(ids.drain(rest..));
        Ok(())
    }
}
