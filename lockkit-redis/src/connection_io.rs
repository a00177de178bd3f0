//! Connections are run by whoever waits for a reply, and by a task when nobody does.
//!
//! A connection that only a task runs costs its users the way to that task and back, which is most often another thread's.
//! So a future that waits for a reply polls the connection first, within its own poll and never beyond it. When the socket
//! is ready, the caller that polled it last is woken, and the task if there is none. Nothing depends on that caller: it may
//! be dropped, which wakes the task, or be leaked, or starved by its owner, and then the task finds out at its next tick.

use std::{
    future::poll_fn,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::{FutureExt as _, task::AtomicWaker};
use tokio::{
    sync::mpsc,
    task::unconstrained,
    time::{Instant, Sleep},
};

/// How often the task looks after callers that were woken; for so long, at most, one that does not poll holds up others.
const TICK: Duration = Duration::from_millis(5);
/// How often in a row a connection is polled by a caller that may have better things to do.
const ROUNDS: usize = 8;

/// What a connection does: it ends when the connection does.
type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs what connections do. Its task ends when this is gone and they are.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionIo {
    add: mpsc::UnboundedSender<Arc<Seat>>,
    watch: Arc<Watch>,
}

impl ConnectionIo {
    /// On the current runtime.
    pub(crate) fn start() -> Self {
        let (add, added) = mpsc::unbounded_channel();
        let watch = Arc::new(Watch::default());
        let running = Running {
            added,
            watch: watch.clone(),
            seats: Vec::new(),
            tick: None,
        };
        // What there is to do at one connection must not use up the turn of the others.
        tokio::spawn(unconstrained(running.run()));
        Self { add, watch }
    }

    /// Runs this one, too, for as long as what is returned is kept.
    pub(crate) fn run(&self, driver: impl Future<Output = ()> + Send + 'static) -> IoHandle {
        // A panic ends the connection, and is no matter of who happens to poll it.
        let driver = AssertUnwindSafe(driver).catch_unwind().map(drop);
        let seat = Arc::new(Seat {
            state: AtomicU8::new(WOKEN),
            driver: Mutex::new(Some(Box::pin(driver))),
            caller: Mutex::new(None),
            tickets: AtomicU64::new(1),
            callers: AtomicUsize::new(0),
            watch: self.watch.clone(),
        });
        if self.add.send(seat.clone()).is_err() {
            // The runtime is gone, and so is the connection: requests find it closed.
            seat.end();
        }
        IoHandle(seat)
    }
}

/// A connection that is run. Dropping this ends it.
#[derive(Debug)]
pub(crate) struct IoHandle(Arc<Seat>);

impl IoHandle {
    /// Ends the connection: there are no more replies.
    pub(crate) fn end(&self) {
        self.0.end();
    }

    /// What comes of a request on this connection, which is run meanwhile.
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

/// Somebody who waits for a reply, and polls it.
#[derive(Debug)]
pub(crate) struct Caller {
    seat: Arc<Seat>,
    ticket: u64,
}

impl Caller {
    pub(crate) fn new(driven: &IoHandle) -> Self {
        let seat = driven.0.clone();
        seat.callers.fetch_add(1, Ordering::AcqRel);
        let ticket = seat.tickets.fetch_add(1, Ordering::Relaxed);
        Self { seat, ticket }
    }

    /// Polls the request, and runs the connection. Several that wait at a time leave that to the task, which writes what
    /// they ask in one go.
    pub(crate) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut request: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let seat = &self.seat;
        let is_alone = seat.callers.load(Ordering::Acquire) == 1;
        let turn = if is_alone { seat.begin() } else { None };
        let Some(turn) = turn else {
            seat.leave_to_task(|_| true);
            return request(cx);
        };
        // A reply that comes in this turn is to wake nobody.
        let polled = request(&mut Context::from_waker(Waker::noop()));
        if polled.is_ready() {
            return polled;
        }
        turn.run();
        let polled = request(cx);
        if polled.is_pending() {
            seat.wait(self.ticket, cx.waker());
        }
        polled
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let ticket = self.ticket;
        self.seat.callers.fetch_sub(1, Ordering::AcqRel);
        self.seat.leave_to_task(|caller| caller == ticket);
    }
}

/// It is being polled.
const POLLED: u8 = 1;
/// There is something to do.
const WOKEN: u8 = 2;
/// There is no more.
const ENDED: u8 = 4;

/// A connection, and whose turn it is.
struct Seat {
    state: AtomicU8,
    /// For whoever has set `POLLED`.
    driver: Mutex<Option<Driver>>,
    /// Who polled it last and waits: it is woken when there is something to do.
    caller: Mutex<Option<(u64, Waker)>>,
    tickets: AtomicU64,
    /// How many callers there are.
    callers: AtomicUsize,
    watch: Arc<Watch>,
}

impl Seat {
    fn begin(self: &Arc<Self>) -> Option<Turn<'_>> {
        let before = self.state.fetch_or(POLLED, Ordering::AcqRel);
        (before & POLLED == 0).then(|| Turn(self))
    }

    fn driver(&self) -> MutexGuard<'_, Option<Driver>> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn caller(&self) -> MutexGuard<'_, Option<(u64, Waker)>> {
        self.caller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be woken from now on, in place of another.
    fn wait(&self, ticket: u64, waker: &Waker) {
        let mut caller = self.caller();
        let before = match &*caller {
            Some((same, its)) if *same == ticket && its.will_wake(waker) => None,
            _ => caller.replace((ticket, waker.clone())),
        };
        drop(caller);
        drop(before);
        self.watch.used();
    }

    /// The caller that is woken is not to be any more, if it is the one that is meant.
    fn leave_to_task(&self, is_meant: impl FnOnce(u64) -> bool) {
        let mut caller = self.caller();
        let left = if caller.as_ref().is_some_and(|(ticket, _)| is_meant(*ticket)) {
            caller.take()
        } else {
            None
        };
        drop(caller);
        drop(left);
        // Whoever has just been woken may have been that one.
        if self.state.load(Ordering::Acquire) == WOKEN {
            self.watch.task.wake();
        }
    }

    fn end(self: &Arc<Self>) {
        self.state.fetch_or(ENDED, Ordering::AcqRel);
        // Whoever polls it ends it.
        drop(self.begin());
        // The task has nothing left to run.
        self.watch.task.wake();
    }

    fn is_over(&self) -> bool {
        self.state.load(Ordering::Acquire) & ENDED != 0
    }
}

impl Wake for Seat {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Whoever polls it sees it, and whoever was woken before is still to do so.
        if self.state.fetch_or(WOKEN, Ordering::AcqRel) != 0 {
            return;
        }
        let caller = self.caller().take();
        match caller {
            Some((_, waker)) => waker.wake(),
            None => self.watch.task.wake(),
        }
    }
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seat").finish_non_exhaustive()
    }
}

/// A turn at a connection. Nobody else polls it before this is dropped.
struct Turn<'a>(&'a Arc<Seat>);

impl Turn<'_> {
    /// Does what there is to do.
    fn run(&self) {
        let seat = self.0;
        for _ in 0..ROUNDS {
            if seat.state.fetch_and(!WOKEN, Ordering::AcqRel) & (WOKEN | ENDED) != WOKEN {
                return;
            }
            let waker = Waker::from(seat.clone());
            let mut driver = seat.driver();
            let polled = match &mut *driver {
                Some(driver) => driver.as_mut().poll(&mut Context::from_waker(&waker)),
                None => return,
            };
            drop(driver);
            if polled.is_ready() {
                seat.state.fetch_or(ENDED, Ordering::AcqRel);
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let seat = self.0;
        self.run();
        let mut state = seat.state.load(Ordering::Acquire);
        loop {
            if state & ENDED != 0 {
                let driver = seat.driver().take();
                drop(driver);
            }
            let after = state & !POLLED;
            let given = seat
                .state
                .compare_exchange(state, after, Ordering::AcqRel, Ordering::Acquire);
            match given {
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        // What came up since is the task's.
        if state & (WOKEN | ENDED) == WOKEN {
            seat.watch.task.wake();
        }
    }
}

/// What callers and the task know of each other.
#[derive(Debug, Default)]
struct Watch {
    task: AtomicWaker,
    /// Whether the task ticks, and whether a caller has waited since it did last.
    state: AtomicU8,
}

const ASLEEP: u8 = 0;
const UNUSED: u8 = 1;
const USED: u8 = 2;

impl Watch {
    fn used(&self) {
        if self.state.load(Ordering::Acquire) != USED && self.state.swap(USED, Ordering::AcqRel) == ASLEEP {
            self.task.wake();
        }
    }

    /// Whether there is to be another tick: a caller has waited since the last one.
    fn goes_on(&self) -> bool {
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

/// The task.
struct Running {
    added: mpsc::UnboundedReceiver<Arc<Seat>>,
    watch: Arc<Watch>,
    seats: Vec<Arc<Seat>>,
    tick: Option<Pin<Box<Sleep>>>,
}

impl Running {
    async fn run(mut self) {
        poll_fn(|cx| self.poll(cx)).await;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.watch.task.register(cx.waker());
        let is_last = loop {
            match self.added.poll_recv(cx) {
                Poll::Ready(Some(seat)) => self.seats.push(seat),
                Poll::Ready(None) => break true,
                Poll::Pending => break false,
            }
        };
        self.look(cx);
        self.seats.retain(|seat| {
            if let Some(turn) = seat.begin() {
                turn.run();
            }
            !seat.is_over()
        });
        if is_last && self.seats.is_empty() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Ticks while callers wait. Those who have done so for a tick or more are left to wait, and replies come to the task.
    fn look(&mut self, cx: &mut Context<'_>) {
        loop {
            match &mut self.tick {
                None if self.watch.is_awake() => self.tick = Some(Box::pin(tokio::time::sleep(TICK))),
                None => return,
                Some(tick) => {
                    if tick.as_mut().poll(cx).is_pending() {
                        return;
                    }
                    if self.watch.goes_on() {
                        tick.as_mut().reset(Instant::now() + TICK);
                    } else {
                        self.tick = None;
                        self.seats.iter().for_each(|seat| seat.leave_to_task(|_| true));
                    }
                }
            }
        }
    }
}

impl Drop for Running {
    /// The runtime is gone, and so are the connections.
    fn drop(&mut self) {
        self.added.close();
        while let Ok(seat) = self.added.try_recv() {
            self.seats.push(seat);
        }
        for seat in self.seats.drain(..) {
            seat.end();
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

    /// Answers each ping.
    fn echo() -> (impl Future<Output = ()>, Pings) {
        let (pings, mut pinged) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        let driver = async move {
            while let Some(ping) = pinged.recv().await {
                let _ = ping.send(());
            }
        };
        (driver, pings)
    }

    /// Answers a ping as soon as it is let, and nothing before.
    fn late() -> (impl Future<Output = ()>, Pings, Arc<Notify>) {
        let (pings, mut pinged) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        let may = Arc::new(Notify::new());
        let let_go = may.clone();
        let driver = async move {
            while let Some(ping) = pinged.recv().await {
                may.notified().await;
                let _ = ping.send(());
            }
        };
        (driver, pings, let_go)
    }

    async fn answers(pings: &Pings) -> bool {
        let (ping, answer) = oneshot::channel();
        pings.send(ping).is_ok() && answer.await.is_ok()
    }

    /// The same by one that runs the connection.
    async fn answers_driven(connection: &IoHandle, pings: &Pings) -> bool {
        connection.drive(pin!(answers(pings))).await
    }

    /// Leaves the task nothing to do.
    async fn settle() {
        for _ in 0..20 {
            yield_now().await;
        }
    }

    /// One that is polled now, and may never be again.
    fn caller_on(connection: &IoHandle) -> Caller {
        let mut caller = Caller::new(connection);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(caller.poll(&mut cx, |_| Poll::<()>::Pending).is_pending());
        caller
    }

    /// How long it takes from when something comes in until it is dealt with.
    async fn takes(may: &Notify, meanwhile: impl FnOnce(), answer: oneshot::Receiver<()>) -> Duration {
        let since = Instant::now();
        may.notify_one();
        meanwhile();
        let answered = tokio::time::timeout(Duration::from_secs(60), answer).await;
        answered.expect("dealt with within a minute").unwrap();
        since.elapsed()
    }

    #[tokio::test]
    async fn each_is_run_for_as_long_as_it_is_kept_and_the_task_for_as_long_as_any() {
        let drivers = ConnectionIo::start();
        let task = Arc::downgrade(&drivers.watch);
        let ((first, to_first), (second, to_second)) = (echo(), echo());
        let kept = drivers.run(first);
        assert!(answers(&to_first).await);
        let dropped = drivers.run(second);
        assert!(answers(&to_second).await && answers(&to_first).await);
        drop(dropped);
        // Its receiver is gone, so its driver is.
        to_second.closed().await;
        assert!(answers(&to_first).await);
        drop(drivers);
        assert!(answers(&to_first).await, "no more are to come");
        drop(kept);
        to_first.closed().await;
        settle().await;
        assert!(task.upgrade().is_none(), "the task is left over");
    }

    #[tokio::test]
    async fn one_that_ends_by_itself_leaves_the_others() {
        let drivers = ConnectionIo::start();
        let ((first, to_first), (second, to_second)) = (echo(), echo());
        let (_ends, _kept) = (drivers.run(first), drivers.run(second));
        assert!(answers(&to_first).await);
        drop(to_first);
        assert!(answers(&to_second).await);
    }

    /// Its task stands still, as its runtime does.
    #[tokio::test]
    async fn a_caller_runs_the_connection_itself() {
        let asleep = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let (driver, pings) = echo();
        let (drivers, connection) = {
            let _there = asleep.enter();
            let drivers = ConnectionIo::start();
            let connection = drivers.run(driver);
            (drivers, connection)
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
        let connection = drivers.run(late);
        assert!(
            !answers_driven(&connection, &pings).await,
            "of a runtime that is gone"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_starved_caller_holds_up_others_for_a_tick_at_most() {
        let a_tick = Duration::ZERO..=TICK + Duration::from_millis(1);
        let drivers = ConnectionIo::start();
        for leaks in [false, true] {
            let (driver, pings, may) = late();
            let connection = drivers.run(driver);
            let (ping, answer) = oneshot::channel();
            pings.send(ping).unwrap();
            let starved = caller_on(&connection);
            let starved = if leaks {
                std::mem::forget(starved);
                None
            } else {
                Some(starved)
            };
            settle().await;
            let took = takes(&may, || {}, answer).await;
            assert!(a_tick.contains(&took), "{took:?}");
            drop(starved);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_starved_caller_does_not_hold_up_another_caller() {
        let drivers = ConnectionIo::start();
        let (driver, pings) = echo();
        let connection = drivers.run(driver);
        let _starved = caller_on(&connection);
        settle().await;
        let since = Instant::now();
        for _ in 0..3 {
            assert!(answers_driven(&connection, &pings).await);
        }
        assert!(since.elapsed().is_zero(), "{:?}", since.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_caller_the_task_goes_on_at_once() {
        let drivers = ConnectionIo::start();
        let (driver, pings, may) = late();
        let connection = drivers.run(driver);
        let ask = || {
            let (ping, answer) = oneshot::channel();
            pings.send(ping).unwrap();
            answer
        };
        // One that is dropped before it could be woken, and one that is dropped since.
        let answer = ask();
        drop(caller_on(&connection));
        settle().await;
        let took = takes(&may, || {}, answer).await;
        assert!(took.is_zero(), "{took:?}");
        let answer = ask();
        let caller = caller_on(&connection);
        settle().await;
        let took = takes(&may, || drop(caller), answer).await;
        assert!(took.is_zero(), "{took:?}");
        // One that has waited for long.
        let answer = ask();
        let _caller = caller_on(&connection);
        tokio::time::sleep(3 * TICK).await;
        let took = takes(&may, || {}, answer).await;
        assert!(took.is_zero(), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_caller_leaves_undone_the_task_does_at_once() {
        let drivers = ConnectionIo::start();
        let (ping, answer) = oneshot::channel();
        let connection = drivers.run(async move {
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
    async fn who_finds_it_polled_leaves_it_to_whoever_polls_it() {
        let drivers = ConnectionIo::start();
        let (driver, _pings) = echo();
        let connection = drivers.run(driver);
        settle().await;
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
        let drivers = ConnectionIo::start();
        let (pings, mut pinged) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        let panics = drivers.run(async move {
            pinged.recv().await;
            std::panic::resume_unwind(Box::new("in the library"));
        });
        let (driver, to_other) = echo();
        let other = drivers.run(driver);
        for _ in 0..2 {
            assert!(!answers_driven(&panics, &pings).await);
            assert!(answers_driven(&other, &to_other).await && answers(&to_other).await);
        }
    }

    /// Callers come and go, alone and together, on several threads; each that stays is answered.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn nobody_is_forgotten_among_callers_that_come_and_go() {
        let seed = fastrand::u64(..);
        let drivers = ConnectionIo::start();
        let (driver, pings) = echo();
        let connection = Arc::new(drivers.run(driver));
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
