//! Tokens rise and holds exclude each other, whatever happens: many requests from several processes, checked by their
//! records.
//!
//! The environment variable `LOCKKIT_SOAK` sets the number of requests per case: 3,000 by default.

use std::{
    io::{BufRead, BufReader, Write as _},
    net::SocketAddr,
    pin::pin,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::FutureExt;
use lockkit_conformance::{
    history::{Acquisition, History, Limits, at, now},
    process::Process,
};
use lockkit_core::{AcquireOptions, Error, FencingToken, Lock, LockGuard, spi::Mode as Hold};
use lockkit_mysql::{Mode, MySqlConfig};
use lockkit_testbed::{
    Clock, Proxy, eventually,
    mysql::{Flavour, MySql},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::servers::{
    Admin, MODES, client, config, connect, cycle, for_each_flavour, name, private, row, run, session_at,
    shared,
};

for_each_flavour! {
    tokens_rise_over_processes_and_cancels
    tokens_rise_over_crashes_of_the_server_and_of_holders
    holds_exclude_each_other_under_faults
    a_grant_that_is_read_late_outranks_nobody
    tokens_rise_though_a_life_begins_as_the_last_one_did
    tokens_rise_though_the_number_of_a_life_was_deleted
    tokens_rise_though_another_database_has_the_number
    tokens_rise_over_a_fail_over_to_a_clock_that_is_slow
    tokens_go_back_with_a_backup_that_is_brought_back
    the_fence_is_past_what_rows_have_forgotten
    tokens_rise_where_blocks_are_used_up
    the_maker_of_a_mapping_keeps_the_row
    the_maker_of_a_mapping_is_granted_by_it
    a_block_that_comes_late_outranks_nobody
    turns_cost_no_durable_write
    a_life_has_one_number_while_somebody_is_there
    clients_with_two_numbers_of_one_life_take_turns
    a_life_that_was_given_no_number_grants_nothing
    the_number_of_a_life_is_nobodys_guess
    more_rows_than_one_statement_raises_are_all_raised
}

const ORDER: &str = "LOCKKIT_MYSQL_SOAK";
const MARK: &str = "lockkit-soak: ";
const PROCESSES: u64 = 3;
const TASKS: u64 = 8;
const KEYS: u64 = 3;

fn requests() -> u64 {
    let wanted = std::env::var("LOCKKIT_SOAK").ok();
    wanted.map_or(3_000, |wanted| wanted.parse().expect("LOCKKIT_SOAK is a number"))
}

pub(crate) fn seed() -> u64 {
    let seed = std::env::var("LOCKKIT_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("replay with LOCKKIT_SEED={seed}");
    seed
}

/// The task of a worker process.
struct Order {
    addr: SocketAddr,
    mode: Mode,
    ttl: Duration,
    rounds: u64,
    seed: u64,
    who: u64,
    name: String,
}

impl Order {
    fn write(&self) -> String {
        let Self {
            addr,
            rounds,
            seed,
            who,
            name,
            ..
        } = self;
        let (mode, ttl) = (u8::from(self.mode == Mode::Lease), self.ttl.as_millis());
        format!("{addr} {mode} {ttl} {rounds} {seed} {who} {name}")
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        Some(Self {
            addr: words.next()?.parse().ok()?,
            mode: if words.next()? == "1" {
                Mode::Lease
            } else {
                Mode::ForUpdate
            },
            ttl: Duration::from_millis(words.next()?.parse().ok()?),
            rounds: words.next()?.parse().ok()?,
            seed: words.next()?.parse().ok()?,
            who: words.next()?.parse().ok()?,
            name: words.next()?.to_owned(),
        })
    }

    fn start(&self) -> Worker {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "tokens::works", "--nocapture", "--test-threads=1"])
            .env(ORDER, self.write())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = Process::spawn(&mut command).unwrap();
        let output = BufReader::new(process.child().stdout.take().unwrap());
        let records = std::thread::spawn(move || {
            let lines = output.lines().map_while(Result::ok);
            lines
                .filter_map(|line| Some(line.split_once(MARK)?.1.to_owned()))
                .collect()
        });
        Worker { process, records }
    }
}

struct Worker {
    process: Process,
    records: std::thread::JoinHandle<Vec<String>>,
}

impl Worker {
    /// Returns its records, once it has ended.
    fn records(mut self) -> Vec<Acquisition> {
        self.process.wait(Duration::from_secs(1_000)).unwrap();
        let records = self.records.join().unwrap();
        // The last line of a killed process may be incomplete.
        records.iter().filter_map(|line| line.parse().ok()).collect()
    }
}

/// Has a worker work. The worker runs this, too, and works.
#[test]
fn works() {
    let Ok(order) = std::env::var(ORDER) else {
        return run(Flavour::MariaDb, |flavour| async move {
            let order = Order {
                addr: shared(flavour).addr(),
                mode: Mode::ForUpdate,
                ttl: Duration::from_secs(5),
                rounds: 5,
                seed: 1,
                who: 0,
                name: name("works"),
            };
            let records = order.start().records();
            assert_eq!(records.len() as u64, TASKS * 5);
        });
    };
    let order = Arc::new(Order::read(&order).expect("an order"));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut config = config(order.addr);
        config.mode = order.mode;
        // The server may be down just then.
        let client = loop {
            match connect(config.clone()).await {
                Err(error) if error.is_transient() => sleep(Duration::from_millis(20)).await,
                connected => break connected.unwrap(),
            }
        };
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let (order, client) = (order.clone(), client.clone());
            tasks.spawn(async move {
                let mut rng = fastrand::Rng::with_seed(order.seed + order.who * 1_000 + task);
                for _ in 0..order.rounds {
                    let key = format!("{}/{}", order.name, rng.u64(0..KEYS));
                    let options = AcquireOptions::new().ttl(order.ttl);
                    let lock = client.lock(key).unwrap().with_options(options);
                    one_round(&lock, order.who * 100 + task, &mut rng, |record| {
                        let mut output = std::io::stdout().lock();
                        writeln!(output, "{MARK}{record}").unwrap();
                    })
                    .await;
                }
            });
        }
        tasks.join_all().await;
        // Dropped holds are released as well: a lease outlives its process.
        client.close(Duration::from_secs(20)).await.unwrap();
    });
}

/// Acquires in a random way, holds, and ends the hold in a random way. Records a hold when it
/// begins, and again when it is over.
async fn one_round(lock: &Lock, who: u64, rng: &mut fastrand::Rng, report: impl FnOnce(&Acquisition)) {
    let mut record = Acquisition::asked(lock.name().as_str(), Hold::Exclusive, who, now());
    let pause = Duration::from_micros(rng.u64(0..3_000));
    let granted: Result<Option<LockGuard>, Error> = match rng.u8(0..10) {
        0..6 => lock.acquire_timeout(Duration::from_secs(20)).await.map(Some),
        6 => lock.try_acquire().await,
        7 => lock.acquire_timeout(pause).await.map(Some),
        _ => timeout(pause, lock.acquire())
            .await
            .map_or(Ok(None), |granted| granted.map(Some)),
    };
    match granted {
        Ok(Some(guard)) => {
            record.granted = Some((now(), guard.token().get()));
            hold(guard, &mut record, rng).await;
        }
        Ok(None) => record.gave_up = Some(now()),
        Err(error) if error.is_timeout() || error.is_transient() => record.gave_up = Some(now()),
        Err(error) => panic!("{error:?}"),
    }
    report(&record);
}

async fn hold(guard: LockGuard, record: &mut Acquisition, rng: &mut fastrand::Rng) {
    // Some for so long that the worker adopts them.
    let longest = if rng.u8(0..20) == 0 { 20_000 } else { 1_500 };
    let work = Duration::from_micros(rng.u64(0..longest));
    if timeout(work, guard.lost()).await.is_ok() {
        record.lost = Some(now());
        return;
    }
    record.until = guard.valid_until().map(at);
    record.released = Some(now());
    if rng.bool() {
        // The others see its outcome.
        let _ = guard.release().await;
    } else {
        drop(guard);
    }
}

async fn tokens_rise_over_processes_and_cancels(flavour: Flavour) {
    let seed = seed();
    for mode in MODES {
        let began = Instant::now();
        let (addr, name) = (shared(flavour).addr(), name("soak"));
        let rounds = requests().div_ceil(PROCESSES * TASKS);
        let workers: Vec<_> = (1..=PROCESSES)
            .map(|who| {
                let name = name.clone();
                let ttl = Duration::from_secs(10);
                Order {
                    addr,
                    mode,
                    ttl,
                    rounds,
                    seed,
                    who,
                    name,
                }
                .start()
            })
            .collect();
        let mut history = History::default();
        for worker in workers {
            let records = tokio::task::spawn_blocking(|| worker.records()).await.unwrap();
            assert_eq!(records.len() as u64, TASKS * rounds, "a worker ended early");
            history.acquisitions.extend(records);
        }
        let mut limits = Limits::default();
        limits.idle = Duration::from_secs(5);
        let summary = history
            .check(&limits)
            .unwrap_or_else(|violation| panic!("{violation}"));
        eprintln!("{flavour:?} {mode:?}: {summary:?} in {:?}", began.elapsed());
        assert!(
            summary.granted as u64 > requests() / 2,
            "a vacuous pass: {summary:?}"
        );
    }
}

async fn tokens_rise_over_crashes_of_the_server_and_of_holders(flavour: Flavour) {
    let seed = seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    for mode in MODES {
        let clock = Clock::new().unwrap();
        let server = MySql::start_by(Some(&clock), flavour, &[]).unwrap();
        let (addr, name) = (server.addr(), name("crash"));
        let order = |who| {
            let (name, ttl) = (name.clone(), Duration::from_secs(1));
            let rounds = requests().div_ceil(PROCESSES * TASKS);
            Order {
                addr,
                mode,
                ttl,
                rounds,
                seed,
                who,
                name,
            }
        };
        let mut workers: Vec<_> = (1..=PROCESSES).map(|who| order(who).start()).collect();
        let mut records = Vec::new();
        let crashes = (requests() / 2_000).max(3);
        for round in 0..crashes {
            sleep(Duration::from_millis(400)).await;
            if round % 2 == 0 {
                server.process().kill().unwrap();
                if mode == Mode::ForUpdate {
                    // A lease would last for so much longer.
                    clock.back(Duration::from_secs(rng.u64(0..1_000))).unwrap();
                }
                server.start_again().unwrap();
            } else {
                // A holder or waiter dies at any moment, and another comes.
                let mut dead = workers.remove(0);
                dead.process.kill().unwrap();
                records.extend(dead.records());
                workers.push(order(10 + round).start());
            }
        }
        for worker in workers {
            records.extend(tokio::task::spawn_blocking(|| worker.records()).await.unwrap());
        }
        let mut tokens: Vec<_> = records
            .iter()
            .filter_map(|record| Some((record.lock.clone(), record.granted?.0, record.granted?.1)))
            .collect();
        tokens.sort();
        for pair in tokens.windows(2) {
            let [(lock, _, before), (same, _, after)] = pair else {
                continue;
            };
            assert!(
                lock != same || before < after,
                "{mode:?}: {after} after {before} on {lock}"
            );
        }
        assert!(
            tokens.len() as u64 > requests() / 3,
            "a vacuous pass: {}",
            tokens.len()
        );
        eprintln!(
            "{flavour:?} {mode:?}: {} grants over {crashes} crashes",
            tokens.len()
        );
    }
}

/// Three clients, each behind a proxy that misbehaves.
async fn holds_exclude_each_other_under_faults(flavour: Flavour) {
    const LASTS: Duration = Duration::from_secs(6);
    /// On a machine that is busy with other things it lasts for longer.
    const LASTS_AT_MOST: Duration = Duration::from_secs(40);
    const GRANTS: usize = 300;
    /// In nanoseconds.
    const TOLD_WITHIN: u64 = 50_000_000;
    /// A grant so long after a reset, in nanoseconds, was waited for over another connection.
    const ANEW: u64 = 900_000_000;
    let seed = seed();
    for mode in [Mode::ForUpdate, Mode::Lease] {
        let server = shared(flavour);
        let name = name("faults");
        let proxies: Vec<_> = (0..3).map(|_| Proxy::start(server.addr()).unwrap()).collect();
        let course = Course::default();
        let mut tasks = JoinSet::new();
        for (who, proxy) in proxies.iter().enumerate() {
            let mut config = config(proxy.addr());
            config.mode = mode;
            let client = connect(config).await.unwrap();
            let options = AcquireOptions::new()
                // The shortest that the server can count.
                .ttl(Duration::from_millis(if mode == Mode::Lease {
                    300
                } else {
                    1_000
                }))
                .op_timeout(Duration::from_millis(300))
                .local_handoffs(0);
            for task in 0..4 {
                let lock = client.lock(&name).unwrap().with_options(options.clone());
                let who = who as u64 * 100 + task;
                let rng = fastrand::Rng::with_seed(seed.wrapping_add(who));
                tasks.spawn(course.clone().work(lock, who, rng));
            }
        }
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut faults, mut hits) = (0, 0);
        // The clients whose connections were reset, and the times before and after.
        let mut resets: Vec<(u64, u64, u64)> = Vec::new();
        let began = Instant::now();
        while began.elapsed() < LASTS || (course.granted() < GRANTS && began.elapsed() < LASTS_AT_MOST) {
            sleep(Duration::from_millis(rng.u64(100..300))).await;
            let who = rng.usize(..3);
            let proxy = &proxies[who];
            faults += 1;
            hits += usize::from(course.busy.load(Ordering::Relaxed) > 0);
            let fault = match rng.u8(..8) {
                0..2 => {
                    let before = now();
                    proxy.reset();
                    resets.push((who as u64, before, now()));
                    continue;
                }
                2..4 => lockkit_testbed::Mode::DropReplies,
                4..6 => lockkit_testbed::Mode::Blackhole,
                _ => lockkit_testbed::Mode::Delay {
                    requests: Duration::from_millis(rng.u64(0..5)),
                    replies: Duration::from_millis(rng.u64(0..5)),
                },
            };
            proxy.set(fault);
            sleep(Duration::from_millis(rng.u64(10..150))).await;
            let before = now();
            proxy.set(lockkit_testbed::Mode::Pass);
            resets.push((who as u64, before, now()));
        }
        let healed = now();
        sleep(Duration::from_secs(1)).await;
        course.stop.store(true, Ordering::Relaxed);
        timeout(Duration::from_secs(30), tasks.join_all())
            .await
            .expect("everyone gets the lock in the end");
        let mut history = std::mem::take(&mut *course.history.lock().unwrap());
        if mode == Mode::ForUpdate {
            // A reset ends the hold at the server at once. Its holder is told soon after.
            for record in &mut history.acquisitions {
                let ends = [record.released, record.lost].into_iter().flatten().min();
                let granted = record.granted.map_or(0, |(at, _)| at);
                record.broken = resets
                    .iter()
                    .filter(|(who, _, after)| {
                        record.who / 100 == *who
                            && *after + TOLD_WITHIN >= record.asked
                            && *after + ANEW >= granted
                    })
                    .map(|(_, before, _)| *before)
                    .filter(|before| ends.is_none_or(|end| *before <= end))
                    .min();
            }
        }
        let mut limits = Limits::default();
        (limits.healed, limits.idle) = (healed, Duration::from_secs(8));
        let summary = history
            .check(&limits)
            .unwrap_or_else(|violation| panic!("{mode:?}: {violation}"));
        eprintln!(
            "{flavour:?} {mode:?}: {summary:?} in {:?}, {faults} faults, {hits} of which hit somebody",
            began.elapsed()
        );
        assert!(
            summary.granted >= GRANTS && hits * 10 >= faults * 9,
            "a vacuous pass: {summary:?}"
        );
    }
}

/// The state that the workers of one run share.
#[derive(Clone, Default)]
struct Course {
    history: Arc<Mutex<History>>,
    stop: Arc<AtomicBool>,
    busy: Arc<AtomicUsize>,
}

impl Course {
    /// The number of grants so far.
    fn granted(&self) -> usize {
        let history = self.history.lock().unwrap();
        let granted = history.acquisitions.iter().filter(|it| it.granted.is_some());
        granted.count()
    }

    /// Asks again and again.
    async fn work(self, lock: Lock, who: u64, mut rng: fastrand::Rng) {
        while !self.stop.load(Ordering::Relaxed) {
            self.busy.fetch_add(1, Ordering::Relaxed);
            one_round(&lock, who, &mut rng, |record| {
                self.history.lock().unwrap().acquisitions.push(record.clone());
            })
            .await;
            self.busy.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A task is granted the row, and reads that only after its session has ended and another task of its client holds.
async fn a_grant_that_is_read_late_outranks_nobody(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let proxy = Proxy::start(server.addr()).unwrap();
    let client = client(proxy.addr(), Mode::ForUpdate).await;
    for _ in 0..3 {
        cycle(&client, "a").await;
    }
    let lock = client.lock("a").unwrap();
    proxy.set(lockkit_testbed::Mode::Delay {
        requests: Duration::ZERO,
        replies: Duration::from_millis(300),
    });
    let mut late = pin!(lock.acquire());
    assert!(late.as_mut().now_or_never().is_none());
    let mut granted = Vec::new();
    eventually("the server has granted it", async || {
        granted = admin.transactions().await;
        !granted.is_empty()
    })
    .await;
    admin.run(&format!("KILL {}", granted[0])).await;
    proxy.set(lockkit_testbed::Mode::Pass);
    sleep(Duration::from_millis(300)).await;
    let mut rightful = None;
    eventually("the next holds", async || {
        rightful = lock.try_acquire().await.unwrap();
        rightful.is_some()
    })
    .await;
    let rightful = rightful.unwrap();
    if let Ok(zombie) = timeout(Duration::from_millis(500), late.as_mut()).await {
        let zombie = zombie.unwrap();
        panic!(
            "{:?} was granted to a session that had ended, beside {:?}, which is held: {}",
            zombie.token(),
            rightful.token(),
            rightful.is_held()
        );
    }
    assert!(rightful.is_held());
    let token = rightful.token();
    rightful.release().await.unwrap();
    let next = timeout(Duration::from_secs(20), late).await.unwrap().unwrap();
    assert!(next.token() > token);
}

/// Acquires and releases in turn, and returns the tokens.
async fn draw(locks: &[Lock]) -> Vec<u64> {
    let mut tokens = Vec::new();
    for lock in locks {
        let guard = lock.acquire().await.unwrap();
        tokens.push(guard.token().get());
        guard.release().await.unwrap();
    }
    tokens
}

fn rise(tokens: &[u64]) -> bool {
    tokens.is_sorted_by(|before, after| before < after)
}

async fn ticket(admin: &mut Admin) -> u64 {
    admin.value("SELECT UUID_SHORT()").await.parse().unwrap()
}

/// Kills the server and starts it again until its counter begins with the same second as the one that had `last`.
async fn begin_again(server: &MySql, clock: &Clock, last: u64) -> Admin {
    let began = Duration::from_secs(second(last) & 0xffff_ffff);
    for _ in 0..10 {
        server.process().kill().unwrap();
        clock.reset().unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        clock.back(now.saturating_sub(began)).unwrap();
        server.start_again().unwrap();
        let mut again = Admin::of(server).await;
        if second(ticket(&mut again).await) == second(last) {
            return again;
        }
    }
    panic!("it does not start in the same second, as it sees it");
}

/// The second with which the server's counter begins, and the server's id.
fn second(ticket: u64) -> u64 {
    ticket >> 24
}

/// The server's own counter begins with the second in which it starts.
async fn tokens_rise_though_a_life_begins_as_the_last_one_did(flavour: Flavour) {
    let clock = Clock::new().unwrap();
    let server = MySql::start_by(Some(&clock), flavour, &[]).unwrap();
    let lock = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    let mut tokens = draw(&vec![lock; 20]).await;
    let last = ticket(&mut Admin::of(&server).await).await;
    let mut admin = begin_again(&server, &clock, last).await;
    let lock = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    for _ in 0..20 {
        tokens.extend(draw(std::slice::from_ref(&lock)).await);
        assert!(rise(&tokens), "{tokens:?}");
    }
    assert!(
        ticket(&mut admin).await.abs_diff(last) < 500,
        "the tickets differ"
    );
}

/// A number that began anew at the clock would be below that of the mapping, whose life would pass for this one.
async fn tokens_rise_though_the_number_of_a_life_was_deleted(flavour: Flavour) {
    let clock = Clock::new().unwrap();
    let server = MySql::start_by(Some(&clock), flavour, &[]).unwrap();
    // The number is the clock's, and the next will be given sooner after the start.
    clock.forward(Duration::from_mins(1)).unwrap();
    let lock = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    let mut tokens = draw(&vec![lock; 20]).await;
    let mut admin = Admin::of(&server).await;
    let last = ticket(&mut admin).await;
    admin.run("DELETE FROM lockkit_fence").await;
    begin_again(&server, &clock, last).await;
    let lock = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    tokens.extend(draw(&vec![lock; 20]).await);
    assert!(rise(&tokens), "{tokens:?}");
}

/// A database and its copy count on from the same number if the clock is behind it. Each has its own tokens.
async fn tokens_rise_though_another_database_has_the_number(flavour: Flavour) {
    let clock = Clock::new().unwrap();
    let server = MySql::start_by(Some(&clock), flavour, &[]).unwrap();
    clock.forward(Duration::from_mins(1)).unwrap();
    let url = server.url();
    let url = format!("{}/twin", url.rsplit_once('/').unwrap().0);
    let twin = async || {
        connect(MySqlConfig::new(url.clone()))
            .await
            .unwrap()
            .lock("a")
            .unwrap()
    };
    let mut admin = Admin::of(&server).await;
    let last = ticket(&mut admin).await;
    cycle(&client(server.addr(), Mode::ForUpdate).await, "a").await;
    let number = admin
        .value("SELECT reserved FROM lockkit_fence WHERE name=''")
        .await;
    let make = format!(
        "CREATE DATABASE twin; GRANT ALL ON twin.* TO '{}'@'%'; USE twin",
        MySql::USER
    );
    admin.run(&make).await;
    admin.run(&lockkit_mysql::ddl(Mode::ForUpdate)).await;
    admin
        .run(&format!("INSERT INTO lockkit_fence VALUES ('', {number})"))
        .await;
    let mut admin = begin_again(&server, &clock, last).await;
    let mut tokens = draw(&vec![twin().await; 20]).await;
    let last = ticket(&mut admin).await;
    begin_again(&server, &clock, last).await;
    let first = client(server.addr(), Mode::ForUpdate).await;
    cycle(&first, "a").await;
    tokens.extend(draw(&vec![twin().await; 20]).await);
    assert!(rise(&tokens), "{tokens:?}");
}

/// The replica has the rows, and another clock.
async fn tokens_rise_over_a_fail_over_to_a_clock_that_is_slow(flavour: Flavour) {
    let clock = Clock::new().unwrap();
    let new = MySql::start_by(Some(&clock), flavour, &[]).unwrap();
    let old = private(flavour, &[]);
    clock.back(Duration::from_hours(1)).unwrap();
    let (mut from, mut to) = (Admin::of(&old).await, Admin::of(&new).await);
    let locks = |client: &lockkit_core::LockClient| {
        let lock = client.lock("a").unwrap();
        [
            lock.clone(),
            lock.clone().shared(),
            client.semaphore("s", 2).unwrap(),
            lock,
        ]
    };
    let mut before = Vec::new();
    for _ in 0..3 {
        before = draw(&locks(&client(old.addr(), Mode::ForUpdate).await)).await;
    }
    to.run(&lockkit_mysql::ddl(Mode::ForUpdate)).await;
    for table in ["lockkit_gate", "lockkit_permit", "lockkit_fence", "lockkit_map"] {
        for row in from.run(&format!("SELECT * FROM {table}")).await {
            to.run(&format!("INSERT INTO {table} VALUES ('{}')", row.join("', '")))
                .await;
        }
    }
    let after = draw(&locks(&client(new.addr(), Mode::ForUpdate).await)).await;
    for (before, after) in before.iter().zip(&after) {
        assert!(before < after, "{after} after {before}");
    }
}

/// Within a life of the server, an old mapping cannot be told from the current one.
async fn tokens_go_back_with_a_backup_that_is_brought_back(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let client = client(server.addr(), Mode::ForUpdate).await;
    let lock = client.lock("a").unwrap();
    let reading = lock.clone().shared();
    draw(std::slice::from_ref(&reading)).await;
    admin.run("CREATE TABLE fence AS SELECT * FROM lockkit_fence; CREATE TABLE map AS SELECT * FROM lockkit_map").await;
    // With more tokens per ticket: another block.
    let last = draw(&[lock]).await;
    for table in ["fence", "map"] {
        let restore =
            format!("DELETE FROM lockkit_{table}; INSERT INTO lockkit_{table} SELECT * FROM {table}");
        admin.run(&restore).await;
    }
    let past = format!("SELECT {} < UNIX_TIMESTAMP(NOW(6)) * 1000000", last[0]);
    eventually("the clock is past the tokens", async || {
        admin.value(&past).await == "1"
    })
    .await;
    let restored = draw(std::slice::from_ref(&reading)).await;
    assert!(restored[0] < last[0], "{restored:?} after {last:?}");
    // Without the mappings they begin at the clock.
    admin.run("DELETE FROM lockkit_map").await;
    let begun = draw(&[reading]).await;
    assert!(begun[0] > last[0], "{begun:?} after {last:?}");
}

/// A backup that is brought back does so, and a name whose rows were deleted. What comes next is granted by the clock.
async fn the_fence_is_past_what_rows_have_forgotten(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let rows = [
        (Mode::ForUpdate, &["lockkit_fence", "lockkit_map"][..]),
        (Mode::Lease, &["lockkit_lease"]),
    ];
    for (mode, tables) in rows {
        let client = client(server.addr(), mode).await;
        let lock = client.lock("a").unwrap();
        let last = draw(&[lock.clone(), lock.clone()]).await[1];
        for table in tables {
            admin.run(&format!("DELETE FROM {table} WHERE name<>x''")).await;
        }
        let past = format!("SELECT {last} < UNIX_TIMESTAMP(NOW(6)) * 1000000");
        eventually("the clock is past the tokens", async || {
            admin.value(&past).await == "1"
        })
        .await;
        let fence = client.fence().await.unwrap().get();
        assert!(fence >= last, "{mode:?}: {fence}, and {last} was granted");
        let next = draw(&[lock]).await[0];
        assert!(next > fence, "{mode:?}: {next}, and the fence was {fence}");
    }
}

async fn tokens_rise_where_blocks_are_used_up(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let one = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    let other = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    let mut tokens = Vec::new();
    for round in 0..6 {
        tokens.extend(draw(&[one.clone(), other.clone()]).await);
        let reading = one.clone().shared().acquire().await.unwrap();
        tokens.push(reading.token().get());
        let last = "SELECT last FROM lockkit_map WHERE name<>''";
        let before = admin.value(last).await;
        // Another client's, and more than there are in any block.
        admin.run("DO BENCHMARK(3000000, UUID_SHORT())").await;
        // Nobody waits for readers to make a mapping.
        for reader in [&one, &other, &other] {
            let reader = reader.clone().shared();
            let also = timeout(Duration::from_mins(1), reader.acquire()).await;
            let also = also.unwrap().unwrap();
            tokens.push(also.token().get());
            also.release().await.unwrap();
        }
        assert_ne!(
            admin.value(last).await,
            before,
            "the block was not used up in round {round}"
        );
        assert!(other.try_acquire().await.unwrap().is_none());
        reading.release().await.unwrap();
        assert!(rise(&tokens), "{tokens:?}");
    }
}

/// Clients in turn, and a block that is used up in each hold. A client that freed the row to reserve another would be passed over each
/// time, by the next waiter.
async fn the_maker_of_a_mapping_keeps_the_row(flavour: Flavour) {
    const GRANTS: usize = 20;
    let server = private(flavour, &[]);
    let grants = Arc::new([const { AtomicUsize::new(0) }; 4]);
    let mut tasks = JoinSet::new();
    for who in 0..grants.len() {
        let options = AcquireOptions::new().local_handoffs(MOST_HANDOFFS);
        let lock = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
        let lock = lock.with_options(options);
        let (mut admin, grants) = (Admin::of(&server).await, grants.clone());
        tasks.spawn(async move {
            while grants.iter().all(|count| count.load(Ordering::Relaxed) < GRANTS) {
                let guard = lock.acquire().await.unwrap();
                grants[who].fetch_add(1, Ordering::Relaxed);
                admin.run("DO BENCHMARK(5000, UUID_SHORT())").await;
                // The others wait.
                sleep(Duration::from_millis(50)).await;
                guard.release().await.unwrap();
            }
        });
    }
    timeout(Duration::from_mins(1), tasks.join_all()).await.unwrap();
    let least = grants.iter().map(|count| count.load(Ordering::Relaxed)).min();
    assert!(least >= Some(GRANTS / 4), "{grants:?}");
}

/// The number of tokens per ticket at which a block is for 1,024 tickets.
const MOST_HANDOFFS: u32 = 65_535;

/// Others use up each block before its maker could draw another ticket.
async fn the_maker_of_a_mapping_is_granted_by_it(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let client = client(server.addr(), Mode::ForUpdate).await;
    let lock = client.lock("a").unwrap();
    let locks = [lock.clone(), lock.shared(), client.semaphore("s", 2).unwrap()];
    let options = AcquireOptions::new().local_handoffs(MOST_HANDOFFS);
    let locks = locks.map(|lock| lock.with_options(options.clone()));
    draw(&locks).await;
    let mut others = Admin::of(&server).await;
    let id = others.value("SELECT CONNECTION_ID()").await;
    let bulk = tokio::spawn(async move { others.try_run("DO BENCHMARK(100000000000, UUID_SHORT())").await });
    let (mut tokens, mut all) = (Vec::new(), 0);
    for _ in 0..10 {
        let last = ticket(&mut admin).await;
        eventually("others draw", async || ticket(&mut admin).await > last + 2_000).await;
        let updates = "SHOW GLOBAL STATUS LIKE 'Com_update'";
        let before: u64 = admin.run(updates).await[0][1].parse().unwrap();
        tokens.push(draw(&locks).await);
        let after: u64 = admin.run(updates).await[0][1].parse().unwrap();
        // At most one of the counter and one of the mapping for each of them.
        let written = after - before;
        assert!(written <= 2 * locks.len() as u64, "{written} updates");
        all += written;
    }
    assert!(all >= 10, "blocks lasted: {all} updates");
    for which in 0..locks.len() {
        assert!(
            tokens.is_sorted_by(|before, after| before[which] < after[which]),
            "{tokens:?}"
        );
    }
    admin.run(&format!("KILL {id}")).await;
    assert!(bulk.await.unwrap().is_err());
}

/// A session is killed while its block is being reserved, and another client holds by the earlier mapping.
async fn a_block_that_comes_late_outranks_nobody(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let one = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    let other = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    draw(&[one.clone(), other.clone()]).await;
    let mut blocker = Admin::of(&server).await;
    let blocker_is = blocker.value("SELECT CONNECTION_ID()").await;
    let counter = format!("SELECT 1 FROM lockkit_fence WHERE name={} FOR UPDATE", row("a"));
    blocker.run(&format!("START TRANSACTION; {counter}")).await;
    let options = AcquireOptions::new().local_handoffs(MOST_HANDOFFS);
    let late = one.with_options(options);
    let mut late = pin!(tokio::spawn(async move { late.acquire().await }));
    let control_is = session_at(&mut admin, "UPDATE lockkit_fence").await;
    let mut holding = admin.transactions().await;
    holding.retain(|it| *it != blocker_is && *it != control_is);
    assert_eq!(holding.len(), 1);
    admin.run(&format!("KILL {}", holding[0])).await;
    let rightful = other.acquire().await.unwrap();
    blocker.run("ROLLBACK").await;
    let step = "SELECT step FROM lockkit_map WHERE name<>''";
    let wide = (MOST_HANDOFFS + 1).to_string();
    eventually("the block is there", async || admin.value(step).await == wide).await;
    if let Ok(zombie) = timeout(Duration::from_millis(500), late.as_mut()).await {
        let zombie = zombie.unwrap().unwrap();
        panic!("{:?} was granted beside {:?}", zombie.token(), rightful.token());
    }
    let token = rightful.token();
    rightful.release().await.unwrap();
    let next = timeout(Duration::from_secs(20), late).await.unwrap().unwrap();
    assert!(next.unwrap().token() > token);
}

async fn turns_cost_no_durable_write(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let mut locks = Vec::new();
    for number in 0..4 {
        let client = client(server.addr(), Mode::ForUpdate).await;
        let lock = client.lock("a").unwrap();
        locks.extend([
            lock.clone(),
            lock.shared(),
            client.lock(format!("own/{number}")).unwrap(),
        ]);
        locks.push(client.semaphore("s", 2).unwrap());
    }
    draw(&locks).await;
    // Commits, without rollbacks.
    let written = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Com_update', 'Com_commit')";
    let before = admin.run(written).await;
    let tasks: Vec<_> = locks
        .chunks(4)
        .map(<[Lock]>::to_vec)
        .map(|locks| {
            tokio::spawn(async move {
                for _ in 0..15 {
                    draw(&locks).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(admin.run(written).await, before);
}

async fn a_life_has_one_number_while_somebody_is_there(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let number = "SELECT reserved FROM lockkit_fence WHERE name=''";
    let one = client(server.addr(), Mode::ForUpdate).await;
    cycle(&one, "a").await;
    let first: u64 = admin.value(number).await.parse().unwrap();
    let other = client(server.addr(), Mode::ForUpdate).await;
    cycle(&other, "a").await;
    assert_eq!(admin.value(number).await, first.to_string());
    for client in [one, other] {
        client.close(Duration::from_secs(5)).await.unwrap();
    }
    eventually("nobody is there", async || admin.sessions().await.is_empty()).await;
    cycle(&client(server.addr(), Mode::ForUpdate).await, "a").await;
    assert!(admin.value(number).await.parse::<u64>().unwrap() > first);
}

/// The client that gave the first number has left, and another that knows it goes on with it.
async fn clients_with_two_numbers_of_one_life_take_turns(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let first = client(server.addr(), Mode::ForUpdate).await;
    cycle(&first, "b").await;
    let its_own = admin.sessions().await;
    let one = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    let mut tokens = draw(std::slice::from_ref(&one)).await;
    first.close(Duration::from_secs(5)).await.unwrap();
    eventually("it has left", async || {
        let sessions = admin.sessions().await;
        its_own.iter().all(|id| !sessions.contains(id))
    })
    .await;
    let number = "SELECT life FROM lockkit_map WHERE name<>''";
    let before = admin.value(number).await;
    let other = client(server.addr(), Mode::ForUpdate).await.lock("a").unwrap();
    for _ in 0..3 {
        for lock in [&one, &other, &one, &other] {
            tokens.extend(draw(std::slice::from_ref(lock)).await);
        }
        assert_ne!(admin.value(number).await, before);
        admin.run("DO BENCHMARK(200000, UUID_SHORT())").await;
    }
    // A block is valid for both.
    let updates = "SHOW GLOBAL STATUS LIKE 'Com_update'";
    let mut before: u64 = admin.run(updates).await[0][1].parse().unwrap();
    for round in 0..20 {
        for lock in [&one, &other] {
            tokens.extend(draw(std::slice::from_ref(lock)).await);
        }
        let after: u64 = admin.run(updates).await[0][1].parse().unwrap();
        assert!(after - before <= 2, "{} updates in round {round}", after - before);
        before = after;
        admin.run("DO BENCHMARK(300000, UUID_SHORT())").await;
    }
    tokens.extend(draw(&[one, other]).await);
    assert!(rise(&tokens), "{tokens:?}");
}

/// The row that numbers the lives is deleted as soon as it is made. A number that nobody gave would be below that of every mapping.
async fn a_life_that_was_given_no_number_grants_nothing(flavour: Flavour) {
    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let one = client(server.addr(), Mode::ForUpdate).await;
    cycle(&one, "a").await;
    one.close(Duration::from_secs(5)).await.unwrap();
    eventually("nobody is there", async || admin.sessions().await.is_empty()).await;
    admin
        .run(
            "DELETE FROM lockkit_fence; CREATE TRIGGER goes BEFORE INSERT ON lockkit_fence \
             FOR EACH ROW SET NEW.name=IF(NEW.name='', 'elsewhere', NEW.name)",
        )
        .await;
    let one = connect(config(server.addr())).await.unwrap();
    let refused = one.lock("a").unwrap().try_acquire().await.unwrap_err();
    assert!(refused.is_transient(), "{refused:?}");
    assert!(format!("{refused:?}").contains("no number"), "{refused:?}");
    admin.run("DROP TRIGGER goes").await;
    cycle(&client(server.addr(), Mode::ForUpdate).await, "a").await;
}

/// Whoever takes the lock of a life's number has the next life pass for that one. And two copies of a table do not count on to one number.
async fn the_number_of_a_life_is_nobodys_guess(flavour: Flavour) {
    const BEFORE: u64 = 1 << 60;

    let server = private(flavour, &[]);
    let mut admin = Admin::of(&server).await;
    let url = server.url();
    let (root, _) = url.rsplit_once('/').unwrap();
    let mut numbers = Vec::new();
    for copy in ["one", "other"] {
        let make = format!(
            "CREATE DATABASE {copy}; GRANT ALL ON {copy}.* TO '{}'@'%'; USE {copy}",
            MySql::USER
        );
        admin.run(&make).await;
        admin.run(&lockkit_mysql::ddl(Mode::ForUpdate)).await;
        admin
            .run(&format!("INSERT INTO lockkit_fence VALUES ('', {BEFORE})"))
            .await;
        let [client, beside] = [
            connect(MySqlConfig::new(format!("{root}/{copy}"))).await.unwrap(),
            connect(MySqlConfig::new(format!("{root}/{copy}"))).await.unwrap(),
        ];
        cycle(&client, "a").await;
        let read = "SELECT reserved FROM lockkit_fence WHERE name=''";
        let number: u64 = admin.value(read).await.parse().unwrap();
        assert!(number > BEFORE, "{number}");
        // All that goes into it, but what the tables alone have.
        for guess in [
            format!("LEFT(SHA2('{copy}', 256), 16), ':', {number}"),
            format!("LEFT(SHA2('{copy}/{number}', 256), 48)"),
            format!("LEFT(SHA2('{copy}/{number}/0', 256), 48)"),
        ] {
            let is_free = format!("SELECT IS_FREE_LOCK(CONCAT('lockkit-life:', {guess}))");
            assert_eq!(admin.value(&is_free).await, "1", "{guess}");
        }
        // It has one, by which others know the life.
        cycle(&beside, "a").await;
        assert_eq!(admin.value(read).await, number.to_string());
        numbers.push(number);
    }
    assert_ne!(numbers[0], numbers[1]);
}

/// One statement raises 500.
async fn more_rows_than_one_statement_raises_are_all_raised(flavour: Flavour) {
    const NAMES: usize = 510;

    let server = private(flavour, &[]);
    for mode in MODES {
        let (ours, theirs) = (
            client(server.addr(), mode).await,
            client(server.addr(), mode).await,
        );
        let use_all = async || {
            let names: Vec<_> = (0..NAMES).map(|index| format!("rows/{index}")).collect();
            let mut lowest = u64::MAX;
            for some in names.chunks(16) {
                let tokens = some.iter().map(async |name| {
                    let guard = ours.lock(name.as_str()).unwrap().acquire().await.unwrap();
                    let token = guard.token().get();
                    guard.release().await.unwrap();
                    token
                });
                let tokens = futures_util::future::join_all(tokens).await;
                lowest = tokens.into_iter().fold(lowest, u64::min);
            }
            lowest
        };
        use_all().await;
        let above = theirs.fence().await.unwrap().get() + 1_000_000_000;
        theirs.raise_fence(FencingToken::new(above)).await.unwrap();
        let lowest = use_all().await;
        assert!(
            lowest > above,
            "{mode:?}: {lowest} was granted after tokens were raised above {above}"
        );
    }
}
