//! Runs the I/O of connections: in the future that waits for a reply, and in a task when no future does.
//!
//! If only a task ran a connection, each request would have to go to that task and back, which is most often another thread's. So
//! a future that waits for a reply polls the connection first, within its own poll and never beyond it. When the socket is
//! ready, the caller that polled last is woken, or the task if there is none. Nothing depends on that caller. If it is dropped,
//! it wakes the task. If it is leaked or starved, the task finds out at its next tick.

use std::{
    future::poll_fn,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::{FutureExt as _, task::AtomicWaker};
use lockkit_core::spi::Mutex;
use tokio::{
    sync::mpsc,
    task::unconstrained,
    time::{Instant, Sleep},
};

/// The time after which the task looks for callers that were woken and do not poll. One of them holds up others for that long at
/// most.
const TICK: Duration = Duration::from_millis(5);
/// The number of polls of a connection in one turn. A caller may have better things to do.
const ROUNDS: usize = 8;

/// Reads and writes a connection. Ends with it.
type IoFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs the I/O of connections. Its task ends when this is dropped and all connections have ended.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionIo {
    add: mpsc::UnboundedSender<Arc<SharedIo>>,
    waker: Arc<TaskWaker>,
}

impl ConnectionIo {
    /// Starts the task on the current runtime.
    pub(crate) fn start() -> Self {
        let (add, added) = mpsc::unbounded_channel();
        let waker = Arc::new(TaskWaker::default());
        let task = IoTask {
            added,
            waker: waker.clone(),
            connections: Vec::new(),
            tick: None,
        };
        // A busy connection must not use up the turn of the others.
        tokio::spawn(unconstrained(task.run()));
        Self { add, waker }
    }

    /// Returns how long connections have waited for the task to run them, all in all. It only grows.
    pub(crate) fn delay(&self) -> Duration {
        self.waker.delay.lock().all_in_all()
    }

    /// Has the connections have waited for so much longer.
    #[cfg(test)]
    pub(crate) fn add_delay(&self, delay: Duration) {
        self.waker.delay.lock().before += delay;
    }

    /// Runs this connection, too, until the handle is dropped.
    pub(crate) fn run(&self, io: impl Future<Output = ()> + Send + 'static) -> IoHandle {
        // A panic ends the connection. It must not reach the caller that happens to poll.
        let io = AssertUnwindSafe(io).catch_unwind().map(drop);
        let shared = Arc::new(SharedIo {
            state: AtomicU8::new(WOKEN),
            io: Mutex::new(Some(Box::pin(io))),
            caller: Mutex::new(None),
            tickets: AtomicU64::new(1),
            callers: AtomicUsize::new(0),
            task: self.waker.clone(),
        });
        if self.add.send(shared.clone()).is_err() {
            // The runtime is gone, and the connection with it: requests find it closed.
            shared.end();
        }
        IoHandle(shared)
    }
}

/// The I/O of one connection. Dropping the handle ends the connection.
#[derive(Debug)]
pub(crate) struct IoHandle(Arc<SharedIo>);

impl IoHandle {
    /// Ends the connection. There are no more replies.
    pub(crate) fn end(&self) {
        self.0.end();
    }

    /// Awaits a request on this connection, and runs the connection meanwhile.
    ///
    /// # Cancel safety
    /// That of the request.
    pub(crate) async fn drive<F: Future>(&self, mut request: Pin<&mut F>) -> F::Output {
        let mut caller = Caller::new(self);
        poll_fn(|cx| caller.poll(cx, |cx| request.as_mut().poll(cx))).await
    }
}

impl Drop for IoHandle {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A future that waits for a reply, and runs the connection meanwhile.
#[derive(Debug)]
pub(crate) struct Caller {
    shared: Arc<SharedIo>,
    ticket: u64,
}

impl Caller {
    pub(crate) fn new(handle: &IoHandle) -> Self {
        let shared = handle.0.clone();
        shared.callers.fetch_add(1, Ordering::AcqRel);
        let ticket = shared.tickets.fetch_add(1, Ordering::Relaxed);
        Self { shared, ticket }
    }

    /// Polls the request, and runs the connection. Several callers at a time leave the connection to the task, which writes
    /// their requests together.
    pub(crate) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut request: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let shared = &self.shared;
        let is_alone = shared.callers.load(Ordering::Acquire) == 1;
        let turn = if is_alone { shared.begin() } else { None };
        let Some(turn) = turn else {
            shared.leave_to_task(|_| true);
            return request(cx);
        };
        // A reply that comes in this turn needs to wake nobody.
        let polled = request(&mut Context::from_waker(Waker::noop()));
        if polled.is_ready() {
            return polled;
        }
        turn.run();
        let polled = request(cx);
        if polled.is_pending() {
            shared.wait(self.ticket, cx.waker());
        }
        polled
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let ticket = self.ticket;
        self.shared.callers.fetch_sub(1, Ordering::AcqRel);
        self.shared.leave_to_task(|caller| caller == ticket);
    }
}

/// Somebody polls the connection.
const POLLED: u8 = 1;
/// There is something to do.
const WOKEN: u8 = 2;
/// The connection has ended.
const ENDED: u8 = 4;

/// The I/O of one connection, shared by the task and the callers, of whom one polls it at a time.
struct SharedIo {
    state: AtomicU8,
    /// Belongs to the one that has set `POLLED`.
    io: Mutex<Option<IoFuture>>,
    /// The caller that polled last and waits. It is woken when there is something to do.
    caller: Mutex<Option<(u64, Waker)>>,
    tickets: AtomicU64,
    /// The number of callers.
    callers: AtomicUsize,
    task: Arc<TaskWaker>,
}

impl SharedIo {
    fn begin(self: &Arc<Self>) -> Option<Turn<'_>> {
        let before = self.state.fetch_or(POLLED, Ordering::AcqRel);
        (before & POLLED == 0).then(|| Turn(self))
    }

    /// Has this caller woken from now on, instead of another.
    fn wait(&self, ticket: u64, waker: &Waker) {
        let mut caller = self.caller.lock();
        let before = match &*caller {
            Some((same, its)) if *same == ticket && its.will_wake(waker) => None,
            _ => caller.replace((ticket, waker.clone())),
        };
        drop(caller);
        drop(before);
        self.task.note_use();
    }

    /// Has the task woken from now on, instead of the caller, if that is the one that is meant.
    fn leave_to_task(&self, is_meant: impl FnOnce(u64) -> bool) {
        let mut caller = self.caller.lock();
        let left = if caller.as_ref().is_some_and(|(ticket, _)| is_meant(*ticket)) {
            caller.take()
        } else {
            None
        };
        drop(caller);
        drop(left);
        // That caller may have just been woken.
        if self.state.load(Ordering::Acquire) == WOKEN {
            self.task.wake();
        }
    }

    fn end(self: &Arc<Self>) {
        self.state.fetch_or(ENDED, Ordering::AcqRel);
        // If somebody polls it, that one drops it.
        drop(self.begin());
        // The task may have nothing left to run.
        self.task.wake();
    }

    fn has_ended(&self) -> bool {
        self.state.load(Ordering::Acquire) & ENDED != 0
    }
}

impl Wake for SharedIo {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Whoever polls it sees the flag. If it was set before, somebody has been woken and will poll.
        if self.state.fetch_or(WOKEN, Ordering::AcqRel) != 0 {
            return;
        }
        let caller = self.caller.lock().take();
        match caller {
            Some((_, waker)) => waker.wake(),
            None => self.task.wake(),
        }
    }
}

impl std::fmt::Debug for SharedIo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedIo").finish_non_exhaustive()
    }
}

/// The right to poll a connection. Nobody else polls it before this is dropped.
struct Turn<'a>(&'a Arc<SharedIo>);

impl Turn<'_> {
    /// Polls the connection while there is something to do, up to [`ROUNDS`] times.
    fn run(&self) {
        let shared = self.0;
        for _ in 0..ROUNDS {
            if shared.state.fetch_and(!WOKEN, Ordering::AcqRel) & (WOKEN | ENDED) != WOKEN {
                return;
            }
            let waker = Waker::from(shared.clone());
            let mut io = shared.io.lock();
            let polled = match &mut *io {
                Some(io) => io.as_mut().poll(&mut Context::from_waker(&waker)),
                None => return,
            };
            drop(io);
            if polled.is_ready() {
                shared.state.fetch_or(ENDED, Ordering::AcqRel);
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let shared = self.0;
        self.run();
        let mut state = shared.state.load(Ordering::Acquire);
        loop {
            if state & ENDED != 0 {
                let io = shared.io.lock().take();
                drop(io);
            }
            let after = state & !POLLED;
            let given = shared
                .state
                .compare_exchange(state, after, Ordering::AcqRel, Ordering::Acquire);
            match given {
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        // The task does what came up since.
        if state & (WOKEN | ENDED) == WOKEN {
            shared.task.wake();
        }
    }
}

/// The time that the task was late: its thread had other tasks to run.
#[derive(Debug, Default)]
struct Delay {
    /// The time of the first wake-up that the task has not followed.
    since: Option<Instant>,
    before: Duration,
}

impl Delay {
    fn all_in_all(&self) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn ends(&mut self) {
        self.before = self.all_in_all();
        self.since = None;
    }
}

/// Wakes the task, and tells it whether to tick.
#[derive(Debug, Default)]
struct TaskWaker {
    task: AtomicWaker,
    delay: Mutex<Delay>,
    /// `ASLEEP`, `UNUSED` or `USED`.
    state: AtomicU8,
}

/// The task does not tick.
const ASLEEP: u8 = 0;
/// The task ticks, and no caller has waited since the last tick.
const UNUSED: u8 = 1;
/// The task ticks, and a caller has waited since the last tick.
const USED: u8 = 2;

impl TaskWaker {
    fn wake(&self) {
        self.delay.lock().since.get_or_insert_with(Instant::now);
        self.task.wake();
    }

    /// Notes that a caller waits.
    fn note_use(&self) {
        if self.state.load(Ordering::Acquire) != USED && self.state.swap(USED, Ordering::AcqRel) == ASLEEP {
            self.wake();
        }
    }

    /// Returns whether the task ticks again: a caller has waited since the last tick.
    fn ticks_on(&self) -> bool {
        let change = |from, to| {
            let changed = self
                .state
                .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
            changed.is_ok()
        };
        change(USED, UNUSED) || !change(UNUSED, ASLEEP)
    }

    fn is_awake(&self) -> bool {
        self.state.load(Ordering::Acquire) != ASLEEP
    }
}

struct IoTask {
    added: mpsc::UnboundedReceiver<Arc<SharedIo>>,
    waker: Arc<TaskWaker>,
    connections: Vec<Arc<SharedIo>>,
    tick: Option<Pin<Box<Sleep>>>,
}

impl IoTask {
    async fn run(mut self) {
        poll_fn(|cx| self.poll(cx)).await;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.task.register(cx.waker());
        self.waker.delay.lock().ends();
        let is_last = loop {
            match self.added.poll_recv(cx) {
                Poll::Ready(Some(connection)) => self.connections.push(connection),
                Poll::Ready(None) => break true,
                Poll::Pending => break false,
            }
        };
        self.poll_tick(cx);
        self.connections.retain(|connection| {
            if let Some(turn) = connection.begin() {
                turn.run();
            }
            !connection.has_ended()
        });
        if is_last && self.connections.is_empty() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Ticks while callers begin to wait. A caller that has waited for a tick or longer just waits: its reply comes to the task.
    fn poll_tick(&mut self, cx: &mut Context<'_>) {
        loop {
            match &mut self.tick {
                None if self.waker.is_awake() => self.tick = Some(Box::pin(tokio::time::sleep(TICK))),
                None => return,
                Some(tick) => {
                    if tick.as_mut().poll(cx).is_pending() {
                        return;
                    }
                    if self.waker.ticks_on() {
                        tick.as_mut().reset(Instant::now() + TICK);
                    } else {
                        self.tick = None;
                        for connection in &self.connections {
                            connection.leave_to_task(|_| true);
                        }
                    }
                }
            }
        }
    }
}

impl Drop for IoTask {
    /// Ends the connections. The runtime is gone.
    fn drop(&mut self) {
        self.added.close();
        while let Ok(connection) = self.added.try_recv() {
            self.connections.push(connection);
        }
        for connection in self.connections.drain(..) {
            connection.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, time::Duration};

    use tokio::{
        sync::{Notify, oneshot},
        task::yield_now,
    };

    use super::*;

    type Pings = mpsc::UnboundedSender<oneshot::Sender<()>>;

    /// A connection that answers each ping.
    fn echo() -> (impl Future<Output = ()>, Pings) {
        let (pings, mut pinged) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        let echoing = async move {
            while let Some(ping) = pinged.recv().await {
                let _ = ping.send(());
            }
        };
        (echoing, pings)
    }

    /// A connection that answers a ping when it may, and nothing before.
    fn late() -> (impl Future<Output = ()>, Pings, Arc<Notify>) {
        let (pings, mut pinged) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        let may = Arc::new(Notify::new());
        let let_go = may.clone();
        let echoing = async move {
            while let Some(ping) = pinged.recv().await {
                may.notified().await;
                let _ = ping.send(());
            }
        };
        (echoing, pings, let_go)
    }

    async fn answers(pings: &Pings) -> bool {
        let (ping, answer) = oneshot::channel();
        pings.send(ping).is_ok() && answer.await.is_ok()
    }

    /// Pings in a future that runs the connection.
    async fn answers_driven(connection: &IoHandle, pings: &Pings) -> bool {
        connection.drive(pin!(answers(pings))).await
    }

    /// Waits until the task has nothing to do.
    async fn idle() {
        for _ in 0..20 {
            yield_now().await;
        }
    }

    /// A caller that is polled now, and may never be again.
    fn caller_on(connection: &IoHandle) -> Caller {
        let mut caller = Caller::new(connection);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(caller.poll(&mut cx, |_| Poll::<()>::Pending).is_pending());
        caller
    }

    /// Returns how long it takes until something that comes in is dealt with.
    async fn takes(may: &Notify, meanwhile: impl FnOnce(), answer: oneshot::Receiver<()>) -> Duration {
        let since = Instant::now();
        may.notify_one();
        meanwhile();
        let answered = tokio::time::timeout(Duration::from_secs(60), answer).await;
        answered.expect("dealt with within a minute").unwrap();
        since.elapsed()
    }

    #[tokio::test]
    async fn the_task_runs_for_as_long_as_any_connection_is_kept() {
        let io = ConnectionIo::start();
        let task = Arc::downgrade(&io.waker);
        let ((first, to_first), (second, to_second)) = (echo(), echo());
        let kept = io.run(first);
        assert!(answers(&to_first).await);
        let dropped = io.run(second);
        assert!(answers(&to_second).await && answers(&to_first).await);
        drop(dropped);
        // The receiver is gone, and so is the future that had it.
        to_second.closed().await;
        assert!(answers(&to_first).await);
        drop(io);
        assert!(answers(&to_first).await, "no more are to come");
        drop(kept);
        to_first.closed().await;
        idle().await;
        assert!(task.upgrade().is_none(), "the task is left over");
    }

    #[tokio::test]
    async fn a_connection_that_ends_leaves_the_others() {
        let io = ConnectionIo::start();
        let ((first, to_first), (second, to_second)) = (echo(), echo());
        let (_ends, _kept) = (io.run(first), io.run(second));
        assert!(answers(&to_first).await);
        drop(to_first);
        assert!(answers(&to_second).await);
    }

    /// The task stands still, as its runtime does.
    #[tokio::test]
    async fn a_caller_runs_the_connection_itself() {
        let asleep = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let (echoing, pings) = echo();
        let (io, connection) = {
            let _there = asleep.enter();
            let io = ConnectionIo::start();
            let connection = io.run(echoing);
            (io, connection)
        };
        for _ in 0..3 {
            let answered = tokio::time::timeout(Duration::from_secs(10), answers_driven(&connection, &pings));
            assert_eq!(answered.await, Ok(true));
        }
        // Its runtime ends.
        asleep.shutdown_background();
        assert!(
            !answers_driven(&connection, &pings).await,
            "of a runtime that is gone"
        );
        let (late, pings) = echo();
        let connection = io.run(late);
        assert!(
            !answers_driven(&connection, &pings).await,
            "of a runtime that is gone"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_starved_caller_holds_up_others_for_a_tick_at_most() {
        let a_tick = Duration::ZERO..=TICK + Duration::from_millis(1);
        let io = ConnectionIo::start();
        for leaks in [false, true] {
            let (echoing, pings, may) = late();
            let connection = io.run(echoing);
            let (ping, answer) = oneshot::channel();
            pings.send(ping).unwrap();
            let starved = caller_on(&connection);
            let starved = if leaks {
                std::mem::forget(starved);
                None
            } else {
                Some(starved)
            };
            idle().await;
            let took = takes(&may, || {}, answer).await;
            assert!(a_tick.contains(&took), "{took:?}");
            drop(starved);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_starved_caller_does_not_hold_up_another_caller() {
        let io = ConnectionIo::start();
        let (echoing, pings) = echo();
        let connection = io.run(echoing);
        let _starved = caller_on(&connection);
        idle().await;
        let since = Instant::now();
        for _ in 0..3 {
            assert!(answers_driven(&connection, &pings).await);
        }
        assert!(since.elapsed().is_zero(), "{:?}", since.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_takes_over_from_a_caller_at_once() {
        let io = ConnectionIo::start();
        let (echoing, pings, may) = late();
        let connection = io.run(echoing);
        let ask = || {
            let (ping, answer) = oneshot::channel();
            pings.send(ping).unwrap();
            answer
        };
        // A caller that is dropped before it could be woken, and one that is dropped after.
        let answer = ask();
        drop(caller_on(&connection));
        idle().await;
        let took = takes(&may, || {}, answer).await;
        assert!(took.is_zero(), "{took:?}");
        let answer = ask();
        let caller = caller_on(&connection);
        idle().await;
        let took = takes(&may, || drop(caller), answer).await;
        assert!(took.is_zero(), "{took:?}");
        // A caller that has waited for long.
        let answer = ask();
        let _caller = caller_on(&connection);
        tokio::time::sleep(3 * TICK).await;
        let took = takes(&may, || {}, answer).await;
        assert!(took.is_zero(), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_does_at_once_what_a_caller_leaves_undone() {
        let io = ConnectionIo::start();
        let (ping, answer) = oneshot::channel();
        let connection = io.run(async move {
            for _ in 0..10 * ROUNDS {
                let mut is_over = false;
                poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    if std::mem::replace(&mut is_over, true) {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    }
                })
                .await;
            }
            let _ = ping.send(());
            std::future::pending::<()>().await;
        });
        let _caller = caller_on(&connection);
        let took = takes(&Notify::new(), || {}, answer).await;
        assert!(took.is_zero(), "{took:?}");
    }

    #[tokio::test]
    async fn nobody_polls_a_connection_that_is_being_polled() {
        let io = ConnectionIo::start();
        let (echoing, _pings) = echo();
        let connection = io.run(echoing);
        idle().await;
        let turn = connection.0.begin();
        assert!(turn.is_some());
        for _ in 0..2 {
            assert!(connection.0.begin().is_none(), "two poll it");
        }
        drop(turn);
        assert!(connection.0.begin().is_some());
    }

    #[tokio::test]
    async fn a_panic_ends_the_connection_and_nothing_else() {
        let io = ConnectionIo::start();
        let (pings, mut pinged) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        let panics = io.run(async move {
            pinged.recv().await;
            std::panic::resume_unwind(Box::new("in the library"));
        });
        let (echoing, to_other) = echo();
        let other = io.run(echoing);
        for _ in 0..2 {
            assert!(!answers_driven(&panics, &pings).await);
            assert!(answers_driven(&other, &to_other).await && answers(&to_other).await);
        }
    }

    /// Callers come and go, alone and together, on several threads. Each that stays gets its reply.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_caller_is_forgotten_among_those_that_come_and_go() {
        let seed =
            std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
        println!("LOCKKIT_SEED={seed}");
        let io = ConnectionIo::start();
        let (echoing, pings) = echo();
        let connection = Arc::new(io.run(echoing));
        let tasks: Vec<_> = (0..4)
            .map(|n| {
                let (connection, pings) = (connection.clone(), pings.clone());
                let mut rng = fastrand::Rng::with_seed(seed.wrapping_add(n));
                tokio::spawn(async move {
                    for _ in 0..5_000 {
                        match rng.u8(..8) {
                            0 => {
                                let mut gone = pin!(answers_driven(&connection, &pings));
                                assert_ne!(gone.as_mut().now_or_never(), Some(false));
                            }
                            1 => yield_now().await,
                            2 => assert!(answers(&pings).await),
                            _ => assert!(answers_driven(&connection, &pings).await),
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            let done = tokio::time::timeout(Duration::from_secs(60), task).await;
            done.unwrap_or_else(|_| panic!("seed {seed}: somebody waits for ever"))
                .unwrap();
        }
        let callers = connection.0.callers.load(Ordering::Relaxed);
        assert_eq!(callers, 0, "seed {seed}");
    }
}
