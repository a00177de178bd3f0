//! Tests of `measure`, with subjects whose costs are known.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_conformance::{
    Harness,
    helper::{self, Launch},
    measure::{
        Client, Contender, Contestant, Counter, Effort, Figure, Locks, Outcome, Processes, Role, Row,
        Scenario, Subject, contest,
    },
};
use lockkit_core::{AcquireOptions, BoxError, Lock, LockClient, LockGuard, MemoryBackend, Result, spi::Mode};
use tokio::runtime::{self, Runtime};

/// The least effort that there is: most of these tests are about turns and not about time.
const BRIEF: Effort = Effort {
    rounds: 3,
    stretch: Duration::from_millis(4),
    ..Effort::QUICK
};

fn measure(contestants: &mut [Contestant], scenarios: &[Scenario]) -> Vec<Row> {
    measure_with(&BRIEF, contestants, scenarios)
}

fn measure_with(effort: &Effort, contestants: &mut [Contestant], scenarios: &[Scenario]) -> Vec<Row> {
    runtime().block_on(contest(contestants, scenarios, effort, |_| ()))
}

fn runtime() -> Runtime {
    runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

#[derive(Debug, Default)]
struct Memory(MemoryBackend);

#[async_trait]
impl Harness for Memory {
    async fn client(&self) -> Result<LockClient> {
        Ok(LockClient::new(self.0.clone()))
    }
}

/// Takes so long to release, and notes whose turn it is.
#[derive(Clone)]
struct Known {
    name: &'static str,
    release: Duration,
    fails: bool,
    turns: Arc<Mutex<Vec<&'static str>>>,
}

impl Known {
    fn named(name: &'static str, turns: &Arc<Mutex<Vec<&'static str>>>) -> Self {
        Self {
            name,
            release: Duration::from_millis(1),
            fails: false,
            turns: turns.clone(),
        }
    }
}

fn broken_and_sound(turns: &Arc<Mutex<Vec<&'static str>>>) -> [Contestant; 2] {
    let mut broken = Known::named("broken", turns);
    broken.fails = true;
    let sound = Known::named("sound", turns);
    [("broken", broken), ("sound", sound)].map(|(name, known)| Contestant::new("x", name, Role::Peer, known))
}

impl Subject for Known {
    type Client = Self;

    async fn client(&self) -> std::result::Result<Self, BoxError> {
        Ok(self.clone())
    }

    async fn declines(&self, scenario: Scenario) -> std::result::Result<Option<String>, BoxError> {
        Ok((scenario == Scenario::Permits).then(|| "it has none".to_owned()))
    }
}

impl Client for Known {
    type Contender = Self;

    async fn contender(&self, _: &str, _: Mode) -> std::result::Result<Self, BoxError> {
        Ok(self.clone())
    }

    async fn withdraw(&self, _: &str, waits: Duration) -> std::result::Result<Duration, BoxError> {
        Ok(waits)
    }
}

impl Contender for Known {
    type Held = ();

    async fn acquire(&mut self) -> std::result::Result<(), BoxError> {
        let mut turns = self.turns.lock().unwrap();
        if turns.last() != Some(&self.name) {
            turns.push(self.name);
        }
        if self.fails {
            return Err("it has broken".into());
        }
        Ok(())
    }

    async fn release(&mut self, (): ()) -> std::result::Result<(), BoxError> {
        tokio::time::sleep(self.release).await;
        Ok(())
    }

    async fn try_acquire(&mut self) -> std::result::Result<Option<()>, BoxError> {
        tokio::time::sleep(self.release).await;
        Ok(None)
    }
}

#[test]
fn every_scenario_of_one_process_is_measured_in_all_its_figures() {
    let ours = Locks::new(Memory::default());
    let mut contestants = [Contestant::new("memory", "lockkit", Role::Ours, ours)];
    let rows = measure(&mut contestants, &Scenario::ALL);
    assert_eq!(rows.len(), Scenario::ALL.len());
    for (row, scenario) in rows.iter().zip(Scenario::ALL) {
        assert_eq!(row.scenario, scenario);
        if matches!(
            scenario,
            Scenario::Clients(_)
                | Scenario::Processes(_)
                | Scenario::Holding(_)
                | Scenario::Waiters(_)
                | Scenario::Held(_)
                | Scenario::Recovery
                | Scenario::Silence
        ) {
            let Outcome::Skipped(why) = &row.outcome else {
                panic!("without other processes: {row:?}");
            };
            assert!(
                why.contains("no other process") || why.contains("quick run") || why.contains("within it"),
                "{why}"
            );
            continue;
        }
        let trips = [Figure::AcquireTrips, Figure::ReleaseTrips, Figure::HandOffTrips];
        let figures = scenario.figures().iter().filter(|figure| !trips.contains(figure));
        for figure in figures {
            let rounds = if scenario == Scenario::Tasks(100) { 2 } else { 3 };
            assert_eq!(
                row.rounds(*figure).len(),
                rounds,
                "{scenario}, {figure:?}: {row:?}"
            );
            assert!(
                row.value(*figure).unwrap() > 0.0,
                "{scenario}, {figure:?}: {row:?}"
            );
        }
    }
}

/// An acquisition takes two round trips, a release one, and they are counted.
#[derive(Clone, Default)]
struct Counted {
    mutex: Arc<tokio::sync::Mutex<()>>,
    trips: Arc<AtomicU64>,
}

impl Subject for Counted {
    type Client = Self;

    async fn client(&self) -> std::result::Result<Self, BoxError> {
        Ok(self.clone())
    }

    fn round_trips(&self) -> Option<Counter> {
        let trips = self.trips.clone();
        Some(Arc::new(move || trips.load(Ordering::Relaxed)))
    }
}

impl Client for Counted {
    type Contender = Self;

    async fn contender(&self, _: &str, _: Mode) -> std::result::Result<Self, BoxError> {
        Ok(self.clone())
    }
}

impl Contender for Counted {
    type Held = tokio::sync::OwnedMutexGuard<()>;

    async fn acquire(&mut self) -> std::result::Result<Self::Held, BoxError> {
        self.trips.fetch_add(2, Ordering::Relaxed);
        let held = self.mutex.clone().lock_owned().await;
        // So that both see it and not the other's.
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(held)
    }

    async fn release(&mut self, held: Self::Held) -> std::result::Result<(), BoxError> {
        self.trips.fetch_add(1, Ordering::Relaxed);
        drop(held);
        Ok(())
    }
}

#[test]
fn round_trips_are_counted_per_acquisition_release_and_hand_off() {
    let mut contestants = [Contestant::new("x", "x", Role::Ours, Counted::default())];
    let rows = measure(&mut contestants, &[Scenario::Uncontended, Scenario::HandOff]);
    assert_eq!(rows[0].rounds(Figure::AcquireTrips), [2.0; 3]);
    assert_eq!(rows[0].rounds(Figure::ReleaseTrips), [1.0; 3]);
    // The waiter's earlier work does not count.
    assert_eq!(rows[1].rounds(Figure::HandOffTrips), [1.0; 3]);
}

#[test]
fn tries_and_withdrawals_are_timed_where_there_are_any() {
    let known = Known::named("known", &Arc::default());
    let mut contestants = [
        Contestant::new("x", "known", Role::Ours, known),
        Contestant::new("x", "cannot", Role::Peer, Counted::default()),
    ];
    let rows = measure(&mut contestants, &[Scenario::BusyTry, Scenario::Withdrawal]);
    let tried = rows[0].value(Figure::P50).unwrap();
    assert!((1e3..1e6).contains(&tried), "{tried} µs of 1 ms");
    assert_eq!(rows[1].outcome, Outcome::Failed("it cannot try".to_owned()));
    // It says that it takes as long as it has waited.
    let withdrawn = rows[2].value(Figure::P50).unwrap();
    assert!((withdrawn - 35e3).abs() < 1.0, "{withdrawn} µs of 35 ms");
    assert_eq!(rows[3].outcome, Outcome::Failed("it cannot withdraw".to_owned()));
}

/// Takes no time to acquire, in as many processes as there are.
struct Abroad;

impl Subject for Abroad {
    type Client = Known;

    async fn client(&self) -> std::result::Result<Known, BoxError> {
        Ok(Known::named("abroad", &Arc::default()))
    }

    fn processes(&self) -> std::result::Result<Processes, String> {
        let test = ["--exact", "measure::helper_of_this_module", "--nocapture"];
        let launch = Launch::this_program(test).map_err(|error| error.to_string())?;
        // Looked at twice in a round.
        let looks = AtomicU32::new(0);
        let clock = move || Ok(Duration::from_millis(100) * looks.fetch_add(1, Ordering::Relaxed));
        Ok(Processes::new(launch, "abroad").served_by(Arc::new(clock)))
    }
}

/// The helper as which this program runs itself again.
#[test]
fn helper_of_this_module() {
    if helper::is_helper() {
        helper::rival(Abroad).unwrap();
    }
}

#[test]
fn those_of_several_processes_are_told_by_what_they_use() {
    let mut contestants = [Contestant::new("x", "abroad", Role::Peer, Abroad)];
    let scenarios = [Scenario::Processes(4), Scenario::Holding(10)];
    let effort = Effort {
        rounds: 2,
        stretch: Duration::from_millis(50),
        ..BRIEF
    };
    let rows = measure_with(&effort, &mut contestants, &scenarios);
    for (row, rounds) in rows.iter().zip([2, 1]) {
        for figure in row.scenario.figures() {
            assert_eq!(row.rounds(*figure).len(), rounds, "{figure:?}: {row:?}");
        }
        let even = row.value(Figure::Fairness).unwrap();
        assert!(even > 0.5, "{even} of sixteen that are served alike");
        let (mean, longest) = (
            row.value(Figure::Mean).unwrap(),
            row.value(Figure::Longest).unwrap(),
        );
        assert!(mean <= longest, "{mean} of up to {longest}");
        assert!(row.value(Figure::ClientTime).unwrap() > 0.0);
    }
    // Each release takes 1 ms, and each hold 10 ms more: 16 locks are taken once at least in 50 ms and four times in
    // 200 ms, and no more often than that allows.
    let short = rows[0].value(Figure::ServerTime).unwrap();
    assert!((100e3 / (16.0 * 51.0)..=100e3 / 16.0).contains(&short), "{short}");
    let long = rows[1].value(Figure::ServerTime).unwrap();
    assert!((100e3 / (16.0 * 20.0)..=100e3 / 16.0).contains(&long), "{long}");
    let rate = rows[1].value(Figure::Rate).unwrap();
    assert!(rate <= 16.0 * 91.0, "{rate} of holds of 10 ms");
}

/// A client for each contender, so that each waits at the server.
#[derive(Clone)]
struct InLine(MemoryBackend);

impl Subject for InLine {
    type Client = Self;

    async fn client(&self) -> std::result::Result<Self, BoxError> {
        Ok(self.clone())
    }
}

impl Client for InLine {
    type Contender = Slow;

    async fn contender(&self, name: &str, _: Mode) -> std::result::Result<Slow, BoxError> {
        let lock = LockClient::new(self.0.clone()).lock(name)?;
        let wait = AcquireOptions::new().wait(Duration::from_secs(60));
        Ok(Slow(lock.with_options(wait)))
    }
}

/// Keeps the lock for 2 ms.
struct Slow(Lock);

impl Contender for Slow {
    type Held = LockGuard;

    async fn acquire(&mut self) -> std::result::Result<LockGuard, BoxError> {
        Ok(self.0.acquire().await?)
    }

    async fn release(&mut self, held: LockGuard) -> std::result::Result<(), BoxError> {
        tokio::time::sleep(Duration::from_millis(2)).await;
        Ok(held.release().await?)
    }
}

#[test]
fn a_line_of_waiters_is_timed_from_when_all_are_in_it() {
    let line = InLine(MemoryBackend::default());
    let mut contestants = [Contestant::new("memory", "a client each", Role::Ours, line)];
    // They come for 435 ms, and a stretch is 80 ms.
    let rows = measure(&mut contestants, &[Scenario::Waiters(200)]);
    let rate = rows[0].value(Figure::Rate).unwrap();
    assert!(rate > 0.0, "nobody, without the time that they take to come");
    assert!(rate <= 500.0, "{rate} per second of 2 ms each");
}

#[test]
fn contestants_take_turns_and_the_first_turn_does_not_count() {
    let turns = Arc::default();
    let mut contestants = ["a", "b", "c"].map(|name| {
        let known = Known::named(name, &turns);
        Contestant::new("x", name, Role::Peer, known)
    });
    let rows = measure(&mut contestants, &[Scenario::Uncontended]);
    assert_eq!(*turns.lock().unwrap(), ["a", "b", "c"].repeat(4));
    for row in &rows {
        assert_eq!(row.rounds(Figure::P50).len(), 3, "{row:?}");
    }
}

#[test]
fn each_pass_goes_through_all_scenarios_without_the_failed() {
    let turns = Arc::default();
    let mut contestants = broken_and_sound(&turns);
    let effort = Effort { passes: 2, ..BRIEF };
    let scenarios = [Scenario::Uncontended, Scenario::Tasks(2)];
    let mut order = Vec::new();
    let contest = contest(&mut contestants, &scenarios, &effort, |progress| {
        assert_eq!(
            progress.total, 32,
            "2 passes of 2 scenarios with 4 turns of 2 contestants"
        );
        if order.last() != Some(&progress.scenario) {
            order.push(progress.scenario);
        }
    });
    let rows = runtime().block_on(contest);
    assert_eq!(order, scenarios.repeat(2));
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[1].rounds(Figure::P50).len(), 6, "{:?}", rows[1]);
    assert_eq!(rows[3].rounds(Figure::Rate).len(), 6, "{:?}", rows[3]);
    for row in [&rows[0], &rows[2]] {
        assert_eq!(row.outcome, Outcome::Failed("it has broken".to_owned()));
    }
    let turns = turns.lock().unwrap();
    let failures = turns.iter().filter(|name| **name == "broken").count();
    assert_eq!(failures, 2, "once in each scenario, and not in the second pass");
}

#[test]
fn times_and_rates_are_those_of_the_subject() {
    let turns = Arc::default();
    let mut slow = Known::named("slow", &turns);
    // So slow that the other is faster on a busy machine, too.
    slow.release = Duration::from_millis(40);
    let fast = Known::named("fast", &turns);
    let mut contestants = [
        Contestant::new("x", "slow", Role::Ours, slow),
        Contestant::new("x", "fast", Role::Floor, fast),
    ];
    let effort = Effort {
        stretch: Duration::from_millis(250),
        ..BRIEF
    };
    let scenarios = [Scenario::Uncontended, Scenario::OwnNames(4), Scenario::Tasks(2)];
    let rows = measure_with(&effort, &mut contestants, &scenarios);
    let [slow, fast, slow_rate, fast_rate, slow_even, _] = &rows[..] else {
        panic!("{rows:?}")
    };
    let micros = slow.value(Figure::P50).unwrap();
    assert!(micros >= 40_000.0, "{micros} µs for a release of 40 ms");
    assert!(slow.value(Figure::P99).unwrap() >= micros);
    let ratio = slow.ratio(fast, Figure::P50).unwrap();
    assert!(ratio > 1.0, "{ratio} of 40 ms to 1 ms and a bit");
    let per_second = slow_rate.value(Figure::Rate).unwrap();
    assert!(per_second <= 4.0 * 25.0, "{per_second} of 4 × 25 per second");
    assert!(slow_rate.ratio(fast_rate, Figure::Rate).unwrap() < 1.0);
    let even = slow_even.value(Figure::Fairness).unwrap();
    assert!(even > 0.9, "{even} of two that are served alike");
}

/// It is waited for, and would be another four beside the four that were in time.
#[test]
fn a_grant_after_the_time_is_over_is_no_part_of_the_rate() {
    let turns = Arc::default();
    let mut slow = Known::named("slow", &turns);
    slow.release = Duration::from_millis(50);
    let effort = Effort {
        stretch: Duration::from_millis(60),
        ..BRIEF
    };
    let mut contestants = [Contestant::new("x", "slow", Role::Ours, slow)];
    let rows = measure_with(&effort, &mut contestants, &[Scenario::OwnNames(4)]);
    let per_second = rows[0].value(Figure::Rate).unwrap();
    assert!(per_second <= 4.0 * 20.0, "{per_second} of 4 × 20 per second");
}

#[test]
fn a_contestant_that_fails_is_out_and_the_others_go_on() {
    let turns = Arc::default();
    let mut contestants = broken_and_sound(&turns);
    let rows = measure(&mut contestants, &[Scenario::Uncontended, Scenario::Permits]);
    assert_eq!(rows[0].outcome, Outcome::Failed("it has broken".to_owned()));
    assert_eq!(rows[1].rounds(Figure::P50).len(), 3, "{:?}", rows[1]);
    assert_eq!(rows[2].outcome, Outcome::Skipped("it has none".to_owned()));
    assert_eq!(*turns.lock().unwrap(), ["broken", "sound"], "no second turn");
}

#[test]
fn a_contestant_has_rows_where_it_enters_alone() {
    let turns = Arc::default();
    let known = |name| Contestant::new("x", name, Role::Peer, Known::named(name, &turns));
    let mut contestants = [
        known("some").only(|scenario| scenario == Scenario::Tasks(2)),
        known("all"),
    ];
    let scenarios = [Scenario::Uncontended, Scenario::Tasks(2)];
    let mut seen = Vec::new();
    let rows = runtime().block_on(contest(&mut contestants, &scenarios, &BRIEF, |progress| {
        seen.push((progress.done, progress.total));
    }));
    let of: Vec<_> = rows
        .iter()
        .map(|row| (row.scenario, row.contestant.as_str()))
        .collect();
    assert_eq!(
        of,
        [
            (Scenario::Uncontended, "all"),
            (Scenario::Tasks(2), "some"),
            (Scenario::Tasks(2), "all")
        ]
    );
    // One turn that does not count, and three that do.
    assert_eq!(seen, (0..12).map(|done| (done, 12)).collect::<Vec<_>>());
}

#[test]
fn whoever_has_no_turn_says_why() {
    let turns = Arc::default();
    let known = |name| Contestant::new("x", name, Role::Peer, Known::named(name, &turns));
    let mut contestants = [
        known("aside").sitting_out(|scenario| (scenario == Scenario::Uncontended).then_some("it is tired")),
        known("all"),
    ];
    let effort = Effort {
        slow_passes: 0,
        ..BRIEF
    };
    let scenarios = [Scenario::Uncontended, Scenario::Recovery];
    let rows = measure_with(&effort, &mut contestants, &scenarios);
    assert_eq!(rows[0].outcome, Outcome::Skipped("it is tired".to_owned()));
    assert_eq!(rows[1].rounds(Figure::P50).len(), 3);
    for row in &rows[2..] {
        assert_eq!(row.outcome, Outcome::Skipped("it had no turn".to_owned()));
    }
    assert_eq!(*turns.lock().unwrap(), ["all"]);
}

#[test]
fn rounds_are_summed_up_by_medians() {
    let row = |values: &[f64]| Row {
        scenario: Scenario::Uncontended,
        backend: "x".to_owned(),
        contestant: "x".to_owned(),
        role: Role::Ours,
        outcome: Outcome::Measured([(Figure::P50, values.to_vec())].into()),
    };
    let odd = row(&[9.0, 1.0, 5.0, 3.0, 7.0]);
    assert_eq!(odd.value(Figure::P50), Some(5.0));
    assert_eq!(odd.spread(Figure::P50), Some(0.4), "from 3 to 7 around 5");
    assert_eq!(row(&[4.0, 2.0]).value(Figure::P50), Some(3.0));
    assert_eq!(row(&[4.0]).spread(Figure::P50), None);
    assert_eq!(odd.value(Figure::P99), None);
    let waits = Row {
        outcome: Outcome::Measured([(Figure::Longest, vec![4.0, 9.0, 5.0])].into()),
        ..odd.clone()
    };
    assert_eq!(waits.value(Figure::Longest), Some(9.0), "and no median");
    assert_eq!(waits.spread(Figure::Longest), None);
    // The third round was disturbed, and so were both in it.
    let (ours, floor) = (row(&[2.0, 2.2, 20.0]), row(&[1.0, 1.0, 10.0]));
    assert_eq!(ours.ratio(&floor, Figure::P50), Some(2.0));
}

#[test]
fn names_lead_back_to_their_scenarios() {
    for scenario in Scenario::ALL {
        assert_eq!(scenario.to_string().parse(), Ok(scenario));
    }
    let unknown = "tasks-3".parse::<Scenario>().unwrap_err();
    assert_eq!(unknown.to_string(), "there is no scenario `tasks-3`");
}

#[test]
fn figures_are_shown_with_three_digits() {
    for (figure, value, shown) in [
        (Figure::P50, 0.62, "0.62 µs"),
        (Figure::P50, 151.4, "151 µs"),
        (Figure::Longest, 4_060_000.0, "4.06 s"),
        (Figure::Rate, 1_697_026.0, "1,697,026"),
        (Figure::Rate, 72.81, "72.8"),
        (Figure::Processor, 0.001, "0"),
        (Figure::Fairness, 0.071, "0.07"),
    ] {
        assert_eq!(figure.show(value), shown);
    }
}
