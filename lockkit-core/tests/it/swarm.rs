//! Many tasks, names and modes under random faults, cancels and drops, on paused time. Each schedule follows from its
//! seed: `LOCKKIT_SEED=<seed>` is the first one, and `LOCKKIT_SCHEDULES=1` runs it alone.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicI32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use fastrand::Rng;
use lockkit_core::{
    AcquireOptions, Error, HoldView, Instant, Lock, LockClient, LockGuard, MemoryBackend, memory::FaultPoint,
    spi::Mode,
};

use crate::{cancel::cancel_after, probe::Probe};

const MS: Duration = Duration::from_millis(1);
/// The tick on which tasks act, so that many events fall into the same instant.
const TICK: Duration = Duration::from_millis(10);
const OPERATIONS: [FaultPoint; 3] = [FaultPoint::Attempt, FaultPoint::Renew, FaultPoint::Release];
const NAMES: [&str; 3] = ["a", "b", "c"];
const PERMITS: u32 = 3;
/// The schedules that are played, or `LOCKKIT_SCHEDULES`.
const SCHEDULES: u64 = 400;
/// The time for which faults are set.
const TROUBLE_LASTS: Duration = Duration::from_secs(3);
/// The longest ttl of any task, and the longest time that one keeps a guard.
const LONGEST_TTL: Duration = Duration::from_secs(1);
const LONGEST_HOLD_TICKS: u32 = 150;
/// The longest that a lock may stand free while somebody waits for it, once faults have healed: a lease that has to end
/// first, an exchange that hangs, and the longest back-off.
const GRANTED_WITHIN: Duration = Duration::from_millis(1_000 + 500 + 1_250 + 100);

#[test]
fn schedules() {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse().expect("a number"))
    };
    let schedules = number("LOCKKIT_SCHEDULES").unwrap_or(SCHEDULES);
    let first = number("LOCKKIT_SEED").unwrap_or_else(|| fastrand::u64(..u64::MAX - schedules));
    let mut total = Tally::default();
    for seed in first..first + schedules {
        total.add(&run(seed));
    }
    if schedules < SCHEDULES {
        return;
    }
    // A swarm in which nothing happens would pass as well.
    assert!(
        total.granted > SCHEDULES
            && total.lost > SCHEDULES / 2
            && total.cancelled > SCHEDULES
            && total.waited > SCHEDULES,
        "vacuous: {total:?}"
    );
}

/// Prints the seed of a schedule in which an assertion fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "this schedule again: LOCKKIT_SEED={} LOCKKIT_SCHEDULES=1 cargo test -p lockkit-core swarm",
                self.0
            );
        }
    }
}

fn run(seed: u64) -> Tally {
    let _seed = Seed(seed);
    // The driver's jitter follows the seed too.
    fastrand::seed(seed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, swarm(seed))
}

#[derive(Debug, Default)]
struct Tally {
    granted: u64,
    waited: u64,
    lost: u64,
    cancelled: u64,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.granted += other.granted;
        self.waited += other.waited;
        self.lost += other.lost;
        self.cancelled += other.cancelled;
    }
}

/// The record that all tasks of a schedule keep, and check against.
#[derive(Default)]
struct Ledger {
    /// All holds, with their modes and tokens.
    holds: HashMap<&'static str, Vec<(Mode, u64, HoldView)>>,
    /// Holds that were seen lost.
    lost: Vec<HoldView>,
    /// The first tokens of grants that were revoked. Their holders find out within a bound; until then another may
    /// have been granted the lock beside them.
    revoked: HashSet<u64>,
    local_handoffs: u32,
    /// The time when a hold of this name last began or ended.
    last_event: HashMap<&'static str, Instant>,
    healed_at: Option<Instant>,
    tally: Tally,
}

impl Ledger {
    fn granted(&mut self, name: &'static str, mode: Mode, guard: &LockGuard, waiting_since: Instant) {
        let now = Instant::now();
        let (token, held) = (guard.token().get(), guard.view());
        let before = self.holds.entry(name).or_default();
        let is_revoked = |mode: Mode, token: u64| {
            let block = match mode {
                Mode::Exclusive => u64::from(self.local_handoffs),
                _ => 0,
            };
            (token.saturating_sub(block)..=token).any(|first| self.revoked.contains(&first))
        };
        let revoked = is_revoked(mode, token);
        if held.is_held() && !revoked {
            let live = before
                .iter()
                .filter(|(mode, token, held)| held.is_held() && !is_revoked(*mode, *token));
            let (alike, others): (Vec<_>, Vec<_>) = live
                .filter(|(other, ..)| other.kind() == mode.kind())
                .partition(|(other, ..)| *other == mode);
            let fits = match mode {
                Mode::Exclusive => alike.is_empty() && others.is_empty(),
                Mode::Shared => others.is_empty(),
                Mode::Permits(most) => alike.len() < most.get() as usize,
            };
            assert!(
                fits,
                "{name}: {mode:?} with token {token} beside {alike:?} and {others:?}"
            );
        }
        for (other, earlier, _) in before.iter() {
            let conflict = mode == Mode::Exclusive || *other == Mode::Exclusive;
            // A write that a resource has to refuse has a lower token.
            if conflict && other.kind() == mode.kind() && !revoked {
                assert!(*earlier < token, "{name}: token {token} after {earlier}");
            }
            assert_ne!(*earlier, token, "{name}: a token twice");
        }
        before.push((mode, token, held));
        if let Some(healed) = self.healed_at {
            let last_event = self.last_event.get(name).copied().unwrap_or(healed);
            let free_since = healed.max(waiting_since).max(last_event);
            let stood_free = now - free_since;
            assert!(
                stood_free <= GRANTED_WITHIN,
                "{name} stood free for {stood_free:?}"
            );
        }
        self.last_event.insert(name, now);
        self.tally.granted += 1;
        self.tally.waited += u64::from(now > waiting_since);
    }

    fn ended(&mut self, name: &'static str, held: &HoldView) {
        self.last_event.insert(name, Instant::now());
        if held.check().is_err_and(|err| err.is_lost()) {
            self.lost.push(held.clone());
            self.tally.lost += 1;
        }
    }

    fn check_that_lost_is_latched(&self) {
        for held in &self.lost {
            assert!(
                !held.is_held() && held.check().is_err(),
                "lost became held again: {held:?}"
            );
        }
    }
}

async fn swarm(seed: u64) -> Tally {
    let mut rng = Rng::with_seed(seed);
    let probe = Probe::default();
    let ledger = Rc::new(RefCell::new(Ledger {
        local_handoffs: rng.u32(0..5),
        ..Ledger::default()
    }));
    let clients: Vec<_> = (0..rng.usize(1..4))
        .map(|_| LockClient::new(probe.clone()))
        .collect();
    let names = &NAMES[..rng.usize(1..=NAMES.len())];

    let tasks: Vec<_> = (0..rng.usize(2..14))
        .map(|_| tokio::task::spawn_local(worker(rng.fork(), clients.clone(), names, ledger.clone())))
        .collect();
    let observer = LockClient::new(probe.memory.clone());
    for _ in 0..rng.usize(0..4) {
        trouble(&mut rng, &probe.memory);
        for name in names.iter().filter(|_| rng.u8(0..4) == 0) {
            let state = observer.inspect(name).await.unwrap();
            ledger
                .borrow_mut()
                .revoked
                .extend(state.holders.iter().map(|holder| holder.token.get()));
            probe.memory.revoke(name);
        }
        let most = u64::try_from(TROUBLE_LASTS.as_millis()).unwrap() / 3;
        tokio::time::sleep(Duration::from_millis(rng.u64(1..most))).await;
    }
    heal(&probe.memory);
    ledger.borrow_mut().healed_at = Some(Instant::now());
    if rng.u8(..) < 25 {
        let _ = clients[0].close(10 * LONGEST_TTL).await;
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(600), task)
            .await
            .expect("somebody waits for ever")
            .unwrap();
    }

    let ledger = ledger.take();
    ledger.check_that_lost_is_latched();
    let Ledger {
        tally, holds, lost, ..
    } = ledger;
    // Views of a hold keep its client.
    drop((holds, lost));
    nothing_is_left(&probe, observer, clients).await;
    tally
}

/// Other faults than before.
fn trouble(rng: &mut Rng, memory: &MemoryBackend) {
    for operation in OPERATIONS {
        match rng.u8(0..6) {
            0 => memory.fail_next(operation, rng.u32(1..6)),
            1 => memory.lose_replies(operation, rng.u32(1..4)),
            2 => memory.delay(operation, rng.u32(1..400) * MS),
            3 => memory.delay(operation, Duration::ZERO),
            _ => {}
        }
    }
}

fn heal(memory: &MemoryBackend) {
    for operation in OPERATIONS {
        memory.fail_next(operation, 0);
        memory.lose_replies(operation, 0);
        memory.delay(operation, Duration::ZERO);
    }
}

/// One task: acquires, holds and gives up, again and again, in every way there is.
async fn worker(
    mut rng: Rng,
    clients: Vec<LockClient>,
    names: &'static [&'static str],
    ledger: Rc<RefCell<Ledger>>,
) {
    let local_handoffs = ledger.borrow().local_handoffs;
    for _ in 0..rng.u32(2..8) {
        let client = rng.choice(&clients).unwrap();
        let name = *rng.choice(names).unwrap();
        let lock = some_lock(&mut rng, client, name)
            .with_options(some_options(&mut rng).local_handoffs(local_handoffs));
        let waiting_since = Instant::now();
        let guard = match acquire_or_cancel(&mut rng, &lock).await {
            Some(Ok(guard)) => guard,
            Some(Err(Error::Closed)) => return,
            Some(Err(err)) => {
                assert!(
                    lock.options().wait.is_some(),
                    "nothing but a grant ends this wait: {err}"
                );
                assert!(err.is_timeout() || err.is_transient(), "{err}");
                continue;
            }
            None => {
                ledger.borrow_mut().tally.cancelled += 1;
                continue;
            }
        };
        ledger
            .borrow_mut()
            .granted(name, lock.mode(), &guard, waiting_since);
        let held = guard.view();
        hold(&mut rng, &guard).await;
        give_up(&mut rng, guard, || ledger.borrow_mut().ended(name, &held)).await;
        ledger.borrow().check_that_lost_is_latched();
    }
}

/// Acquires; some acquisitions are dropped after a few polls, or at some time, woken or not.
async fn acquire_or_cancel(rng: &mut Rng, lock: &Lock) -> Option<Result<LockGuard, Error>> {
    match rng.u8(0..6) {
        0 => cancel_after(rng.u32(1..8), lock.acquire()).await,
        1 => {
            let at = rng.u32(1..LONGEST_HOLD_TICKS / 4) * TICK;
            tokio::select! {
                biased;
                () = tokio::time::sleep(at) => None,
                outcome = lock.acquire() => Some(outcome),
            }
        }
        _ => Some(lock.acquire().await),
    }
}

fn some_lock(rng: &mut Rng, client: &LockClient, name: &str) -> Lock {
    match rng.u8(0..6) {
        0 => client.semaphore(name, PERMITS).unwrap(),
        1 | 2 => client.lock(name).unwrap().shared(),
        _ => client.lock(name).unwrap(),
    }
}

fn some_options(rng: &mut Rng) -> AcquireOptions {
    let longest = u32::try_from(LONGEST_TTL.as_millis()).unwrap();
    let ttl = *rng.choice([20, 100, longest]).as_ref().unwrap();
    let mut options = AcquireOptions::new()
        .ttl(ttl * MS)
        .renew(rng.u8(0..4) > 0)
        .op_timeout(rng.u32(5..500) * MS);
    match rng.u8(0..8) {
        0 => options = options.wait(Duration::ZERO),
        1 | 2 => options = options.wait(rng.u32(1..1_000) * MS),
        _ => {}
    }
    options
}

async fn hold(rng: &mut Rng, guard: &LockGuard) {
    for _ in 0..rng.u32(0..3) {
        tokio::time::sleep(rng.u32(0..LONGEST_HOLD_TICKS / 2) * TICK).await;
        if rng.u8(0..3) == 0 {
            let polls = rng.u32(1..4);
            let renewed = cancel_after(polls, guard.renew()).await;
            assert!(!matches!(renewed, Some(Ok(()))) || guard.is_held());
        }
    }
}

/// The hold has `ended` for others to see before anyone else could be granted it.
async fn give_up(rng: &mut Rng, guard: LockGuard, ended: impl FnOnce()) {
    match rng.u8(0..4) {
        0 => {
            ended();
            drop(guard);
        }
        1 => {
            ended();
            let polls = rng.u32(1..4);
            let _ = cancel_after(polls, guard.release()).await;
        }
        2 => {
            let _ = tokio::time::timeout(LONGEST_HOLD_TICKS * TICK, guard.lost()).await;
            ended();
            drop(guard);
        }
        _ => {
            ended();
            let _ = guard.release().await;
        }
    }
}

/// No hold, no waiter, no claim and no task outlives the handles.
async fn nothing_is_left(probe: &Probe, observer: LockClient, clients: Vec<LockClient>) {
    let give_up = Instant::now() + GRANTED_WITHIN;
    for name in NAMES {
        loop {
            let (lock, semaphore) = (
                observer.inspect(name).await.unwrap(),
                observer.inspect_semaphore(name).await.unwrap(),
            );
            if [&lock, &semaphore]
                .iter()
                .all(|state| state.is_free() && state.waiters == Some(0))
            {
                break;
            }
            assert!(Instant::now() < give_up, "left behind: {lock:?}, {semaphore:?}");
            tokio::time::sleep(MS).await;
        }
    }
    drop((clients, observer));
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    while tasks() > 0 || probe.counts.claims.load(Ordering::SeqCst) > 0 {
        assert!(
            Instant::now() < give_up + LONGEST_TTL,
            "{} tasks and {} claims are left",
            tasks(),
            probe.counts.claims.load(Ordering::SeqCst)
        );
        tokio::time::sleep(MS).await;
    }
    assert_eq!(Arc::strong_count(&probe.counts), 1, "a backend is never dropped");
}

/// Real races on several threads. Without faults, so that the tasks see nothing but exclusion.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_several_threads() {
    const TASKS: usize = 24;
    const ROUNDS: usize = 150;
    let seed = std::env::var("LOCKKIT_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    let _seed = Seed(seed);
    let mut rng = Rng::with_seed(seed);
    let probe = Probe::default();
    let clients: Vec<_> = (0..2).map(|_| LockClient::new(probe.clone())).collect();
    // Positive: shared holders; -1: an exclusive one.
    let inside = Arc::new(AtomicI32::new(0));
    let granted = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..TASKS {
        let mut rng = rng.fork();
        let lock = rng.choice(&clients).unwrap().lock("a").unwrap();
        let (inside, granted) = (inside.clone(), granted.clone());
        tasks.spawn(async move {
            for _ in 0..ROUNDS {
                let shared = rng.u8(0..4) == 0;
                let lock = if shared { lock.shared() } else { lock.clone() };
                let polls = if rng.bool() { rng.u32(1..4) } else { u32::MAX };
                let options = AcquireOptions::new().local_handoffs(rng.u32(0..3));
                let Some(guard) = cancel_after(polls, lock.acquire_with(&options)).await else {
                    continue;
                };
                let guard = guard.unwrap();
                let step = if shared { 1 } else { -1 };
                let before = inside.fetch_add(step, Ordering::SeqCst);
                assert!(
                    if shared { before >= 0 } else { before == 0 },
                    "{before} beside {step}"
                );
                if rng.bool() {
                    tokio::task::yield_now().await;
                }
                inside.fetch_sub(step, Ordering::SeqCst);
                granted.fetch_add(1, Ordering::SeqCst);
                match rng.u8(0..3) {
                    0 => drop(guard),
                    1 => drop(cancel_after(rng.u32(1..3), guard.release()).await),
                    _ => guard.release().await.unwrap(),
                }
            }
        });
    }
    let all = tokio::time::timeout(Duration::from_secs(60), async {
        while let Some(task) = tasks.join_next().await {
            task.unwrap();
        }
    });
    all.await.expect("somebody waits for ever");
    assert!(granted.load(Ordering::SeqCst) > TASKS * ROUNDS / 4);
    for client in &clients {
        client.close(Duration::from_secs(10)).await.unwrap();
    }
    assert_eq!(probe.counts.claims.load(Ordering::SeqCst), 0);
}
