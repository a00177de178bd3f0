//! The metrics: what each of them is after acts that are known, and that the gauges are right whatever ends first.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};

use lockkit_core::{
    AcquireOptions, DistributedLockExt, FencingToken, Lock, LockClient, LockGuard, MemoryBackend, Revocation,
    memory::FaultPoint,
};
use metrics::{Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tokio::runtime::{Builder, Runtime};

use crate::cancel::cancel_after;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Keeps every metric. A key is its name and its labels but `backend`: `lockkit_hold_seconds{end=released}`.
#[derive(Default)]
struct Recorded {
    counters: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
    gauges: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
    histograms: Mutex<BTreeMap<String, Arc<Samples>>>,
}

#[derive(Default)]
struct Samples(Mutex<Vec<f64>>);

impl HistogramFn for Samples {
    fn record(&self, value: f64) {
        self.0.lock().unwrap().push(value);
    }
}

fn paused() -> Runtime {
    Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
}

impl Recorded {
    fn run(&self, test: impl Future<Output = ()>) {
        metrics::with_local_recorder(self, || paused().block_on(test));
    }

    fn counter(&self, key: &str) -> u64 {
        let counters = self.counters.lock().unwrap();
        let counter = counters
            .get(key)
            .unwrap_or_else(|| panic!("{key} of {:?}", counters.keys()));
        counter.load(Ordering::SeqCst)
    }

    fn gauge(&self, key: &str) -> f64 {
        let gauges = self.gauges.lock().unwrap();
        f64::from_bits(gauges[key].load(Ordering::SeqCst))
    }

    fn samples(&self, key: &str) -> Vec<f64> {
        self.histograms.lock().unwrap()[key].0.lock().unwrap().clone()
    }

    /// The number of samples of a histogram, whatever its labels.
    fn recorded(&self, name: &str) -> usize {
        let histograms = self.histograms.lock().unwrap();
        let of_it = histograms.iter().filter(|(key, _)| key.starts_with(name));
        of_it.map(|(_, samples)| samples.0.lock().unwrap().len()).sum()
    }

    fn acquisitions(&self, outcome: &str) -> u64 {
        self.counter(&format!("lockkit_acquisitions_total{{outcome={outcome}}}"))
    }

    fn losses(&self, reason: &str) -> u64 {
        self.counter(&format!("lockkit_losses_total{{reason={reason}}}"))
    }

    fn holds(&self) -> f64 {
        self.gauge("lockkit_holds")
    }

    fn waiters(&self) -> f64 {
        self.gauge("lockkit_waiters")
    }

    /// Nothing is under way and nothing is held; and each beginning has had one end.
    #[track_caller]
    fn is_settled(&self, case: &str) {
        assert_exactly(self.waiters(), 0.0, &format!("{case}: waiters"));
        assert_exactly(self.holds(), 0.0, &format!("{case}: holds"));
        let outcomes = ["granted", "handed_off", "timeout", "error", "cancelled"];
        let ended: u64 = outcomes.iter().map(|outcome| self.acquisitions(outcome)).sum();
        assert_eq!(
            self.recorded("lockkit_wait_seconds") as u64,
            ended,
            "{case}: waits"
        );
        let granted = self.acquisitions("granted") + self.acquisitions("handed_off");
        assert_eq!(
            self.recorded("lockkit_hold_seconds") as u64,
            granted,
            "{case}: ends of holds"
        );
    }
}

/// A count, which a float has exactly.
#[track_caller]
fn assert_exactly(value: f64, expected: f64, what: &str) {
    assert!(
        (value - expected).abs() < f64::EPSILON,
        "{what}: {value}, not {expected}"
    );
}

/// Times on paused time: a timer fires up to a millisecond late.
#[track_caller]
fn assert_seconds(samples: &[f64], expected: &[f64], what: &str) {
    let near = |(sample, expected): (&f64, &f64)| (0.0..0.003).contains(&(sample - expected + 0.000_1));
    let all = samples.len() == expected.len() && samples.iter().zip(expected).all(near);
    assert!(all, "{what}: {samples:?}, not {expected:?}");
}

impl Recorder for Recorded {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(
            self.counters
                .lock()
                .unwrap()
                .entry(shown(key))
                .or_default()
                .clone(),
        )
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.gauges.lock().unwrap().entry(shown(key)).or_default().clone())
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(
            self.histograms
                .lock()
                .unwrap()
                .entry(shown(key))
                .or_default()
                .clone(),
        )
    }
}

fn shown(key: &Key) -> String {
    let mut text = key.name().to_owned();
    let mut before = '{';
    for label in key.labels().filter(|label| label.key() != "backend") {
        write!(text, "{before}{}={}", label.key(), label.value()).unwrap();
        before = ',';
    }
    if before == ',' {
        text.push('}');
    }
    text
}

fn client() -> (MemoryBackend, LockClient) {
    let backend = MemoryBackend::new();
    (backend.clone(), LockClient::new(backend))
}

fn poll_once(future: impl Future) {
    let future = std::pin::pin!(future);
    assert!(future.poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

#[test]
fn a_hand_off_counts_when_it_is_taken() {
    let recorded = Recorded::default();
    recorded.run(async {
        let lock = client().1.lock("a").unwrap();
        for cancelled in [true, false] {
            let first = lock.acquire().await.unwrap();
            let mut heir = Box::pin(lock.acquire());
            poll_once(heir.as_mut());
            first.release().await.unwrap();
            if cancelled {
                drop(heir);
                // It goes back to the server.
                tokio::time::sleep(SECOND).await;
            } else {
                heir.await.unwrap().release().await.unwrap();
            }
            assert_eq!(recorded.acquisitions("handed_off"), u64::from(!cancelled));
        }
    });
    assert_eq!(recorded.acquisitions("granted"), 2);
    assert_eq!(recorded.acquisitions("cancelled"), 1);
    recorded.is_settled("at the end");
}

#[test]
fn a_loss_counts_once_wherever_it_is_found() {
    let recorded = Recorded::default();
    recorded.run(async {
        let (backend, client) = client();
        let lock = client.lock("a").unwrap();
        for _ in 0..5 {
            let released = lock.acquire().await.unwrap();
            assert!(backend.revoke("a"));
            assert!(released.release().await.unwrap_err().is_lost());
            let dropped = lock.acquire().await.unwrap();
            assert!(backend.revoke("a"));
            drop(dropped);
            tokio::time::sleep(SECOND).await;
            let told = lock.acquire().await.unwrap();
            tokio::time::sleep(SECOND).await;
            assert!(backend.revoke("a"));
            told.lost().await;
            assert!(told.release().await.unwrap_err().is_lost());
            tokio::time::sleep(SECOND).await;
        }
        let options = AcquireOptions::new().ttl(SECOND).renew(false);
        let expired = lock.acquire_with(&options).await.unwrap();
        tokio::time::sleep(2 * SECOND).await;
        assert!(expired.release().await.unwrap_err().is_lost());
    });
    assert_eq!(recorded.losses("revoked"), 15);
    assert_eq!(recorded.losses("expired"), 1);
    assert_eq!(recorded.counter("lockkit_release_failures_total"), 0);
    recorded.is_settled("at the end");
}

#[test]
fn an_acquisition_counts_and_is_timed_by_its_outcome() {
    let recorded = Recorded::default();
    recorded.run(async {
        let (backend, client) = client();
        let lock = client.lock("a").unwrap();
        backend.delay(FaultPoint::Attempt, 100 * MS);
        let guard = lock.acquire().await.unwrap();
        assert_exactly(recorded.holds(), 1.0, "held");
        assert!(lock.acquire_timeout(2 * SECOND).await.unwrap_err().is_timeout());
        backend.fail_next(FaultPoint::Attempt, 1);
        lock.try_acquire().await.unwrap_err();
        let mut waiting = Box::pin(lock.acquire());
        poll_once(waiting.as_mut());
        assert_exactly(recorded.waiters(), 1.0, "it waits");
        tokio::time::sleep(3 * SECOND).await;
        drop(waiting);
        guard.release().await.unwrap();
    });
    for outcome in ["granted", "timeout", "error", "cancelled"] {
        assert_eq!(recorded.acquisitions(outcome), 1, "{outcome}");
    }
    assert_eq!(recorded.acquisitions("handed_off"), 0);
    for (outcome, took) in [
        ("granted", 0.1),
        ("timeout", 2.0),
        ("error", 0.0),
        ("cancelled", 3.0),
    ] {
        let key = format!("lockkit_wait_seconds{{outcome={outcome}}}");
        assert_seconds(&recorded.samples(&key), &[took], &key);
    }
    recorded.is_settled("at the end");
}

#[test]
fn holds_requests_and_renewals_are_timed() {
    let recorded = Recorded::default();
    recorded.run(async {
        let (backend, client) = client();
        let options = AcquireOptions::new().ttl(3 * SECOND).op_timeout(200 * MS);
        let lock = client.lock("a").unwrap().with_options(options);
        backend.delay(FaultPoint::Attempt, 10 * MS);
        backend.delay(FaultPoint::Renew, 20 * MS);
        backend.delay(FaultPoint::Release, 30 * MS);
        let guard = lock.acquire().await.unwrap();
        // The renewal after a second fails, and is tried again after a tenth of the lease.
        backend.fail_next(FaultPoint::Renew, 1);
        tokio::time::sleep(1_800 * MS).await;
        guard.renew().await.unwrap();
        let state = client.inspect("a").await.unwrap();
        let token = FencingToken::new(state.holders[0].token.get());
        guard.release().await.unwrap();
        // Of another one, no reply comes in time; and the one of its clean-up does.
        backend.delay(FaultPoint::Attempt, SECOND);
        lock.try_acquire().await.unwrap_err();
        backend.delay(FaultPoint::Attempt, Duration::ZERO);
        assert!(!client.revoke_by_force("a", token).await.unwrap());
        assert!(client.list("").unwrap().next().await.is_none());
        tokio::time::sleep(5 * SECOND).await;
    });
    let seconds = |key: &str, expected: &[f64]| assert_seconds(&recorded.samples(key), expected, key);
    let requests = |labels: &str, expected: &[f64]| {
        seconds(
            &format!("lockkit_request_seconds{{operation={labels}}}"),
            expected,
        );
    };
    seconds("lockkit_hold_seconds{end=released}", &[1.82]);
    // Between three and five quarters of that tenth, and the renewal.
    let renewals = recorded.samples("lockkit_renewal_seconds");
    assert!((0.24..0.4).contains(&renewals[0]), "{renewals:?}");
    assert_seconds(&renewals[1..], &[0.02], "the renewal by hand");
    requests("acquire,outcome=ok", &[0.01]);
    requests("acquire,outcome=unanswered", &[0.2]);
    requests("renew,outcome=error", &[0.0]);
    requests("renew,outcome=ok", &[0.02, 0.02]);
    requests("release,outcome=ok", &[0.03, 0.03]);
    requests("inspect,outcome=ok", &[0.0]);
    requests("revoke,outcome=ok", &[0.0]);
    // The memory backend has an empty page for each of its shards.
    let pages = recorded.recorded("lockkit_request_seconds{operation=list,outcome=ok}");
    assert!(pages > 0, "no page was counted");
    assert_eq!(recorded.recorded("lockkit_request_seconds"), 9 + pages);
    assert_eq!(recorded.counter("lockkit_renewal_failures_total"), 1);
    recorded.is_settled("at the end");
}

#[test]
fn a_hold_leaves_the_gauge_by_every_way_out() {
    let recorded = &Recorded::default();
    let held = |lock: Lock| async move {
        let before = recorded.holds();
        let guard = lock.acquire().await.unwrap();
        assert_exactly(recorded.holds(), before + 1.0, "held");
        guard
    };
    let ends = |end: &str| {
        recorded
            .samples(&format!("lockkit_hold_seconds{{end={end}}}"))
            .len()
    };
    recorded.run(async {
        let (backend, client) = client();
        let lock = client.lock("a").unwrap();
        // The handles are made by the first acquisition.
        lock.acquire().await.unwrap().release().await.unwrap();

        held(lock.clone()).await.release().await.unwrap();
        drop(held(lock.clone()).await);
        assert_exactly(recorded.holds(), 0.0, "dropped");
        // Views keep nothing held.
        let view = {
            let guard = held(lock.clone()).await;
            guard.view()
        };
        assert_exactly(recorded.holds(), 0.0, "viewed");
        drop(view);
        assert_eq!(ends("released"), 4);

        // Each of those who share, and each permit.
        let mut many: Vec<LockGuard> = Vec::new();
        for _ in 0..3 {
            many.push(held(client.lock("b").unwrap().shared()).await);
            many.push(held(client.semaphore("c", 3).unwrap()).await);
        }
        assert_exactly(recorded.holds(), 6.0, "held at once");
        drop(many);
        assert_exactly(recorded.holds(), 0.0, "dropped at once");

        let short = AcquireOptions::new().ttl(SECOND).renew(false);
        let expired = held(lock.with_options(short)).await;
        tokio::time::sleep(2 * SECOND).await;
        assert_exactly(recorded.holds(), 0.0, "expired, and nobody has looked");
        assert_eq!(ends("expired"), 1);
        drop(expired);

        let revoked = held(lock.clone()).await;
        tokio::time::sleep(SECOND).await;
        assert!(backend.revoke("a"));
        revoked.lost().await;
        assert_exactly(recorded.holds(), 0.0, "revoked");
        assert_eq!(ends("revoked"), 1);
        drop(revoked);

        let asked = held(lock.clone()).await;
        let token = asked.token();
        let keeper = async {
            asked.lost().await;
            assert_exactly(recorded.holds(), 0.0, "asked for");
            drop(asked);
        };
        let revoked = client.revoke("a", token, SECOND);
        assert_eq!(tokio::join!(revoked, keeper).0.unwrap(), Revocation::Confirmed);
        assert_eq!(ends("asked"), 1);
        assert_eq!(recorded.losses("asked"), 1);

        let limited = AcquireOptions::new().ttl(SECOND).max_hold(5 * SECOND);
        let limited = held(lock.with_options(limited)).await;
        tokio::time::sleep(10 * SECOND).await;
        assert_exactly(recorded.holds(), 0.0, "held for as long as it may be");
        assert_eq!(ends("max_hold"), 1);
        assert_eq!(recorded.losses("max_hold"), 1);
        drop(limited);

        let closed = held(lock.clone()).await;
        client.close(SECOND).await.unwrap();
        assert_exactly(recorded.holds(), 0.0, "closed");
        assert_eq!(ends("disconnected"), 1);
        drop(closed);
    });
    recorded.is_settled("after a close");

    // A runtime that ends takes its clients with it: the guard is still here, and so is a waiter.
    metrics::with_local_recorder(recorded, || {
        let first = paused();
        let lock = client().1.lock("a").unwrap();
        let guard = first.block_on(async { held(lock.clone()).await });
        let mut waiting = Box::pin(lock.acquire());
        first.block_on(async { poll_once(waiting.as_mut()) });
        assert_exactly(recorded.waiters(), 1.0, "it waits");
        drop(first);
        assert_exactly(recorded.holds(), 0.0, "its runtime has ended");
        assert_eq!(ends("disconnected"), 2);
        paused().block_on(waiting).unwrap_err();
        drop(guard);
    });
    recorded.is_settled("after the end of a runtime");
}

/// Every future is dropped after its 1st, 2nd, … last poll.
#[test]
fn gauges_are_right_whichever_await_is_the_last() {
    type Path = (
        &'static str,
        fn(World, u32) -> std::pin::Pin<Box<dyn Future<Output = bool>>>,
    );
    let paths: [Path; 6] = [
        ("acquire", |world, polls| {
            Box::pin(async move {
                world.backend.delay(FaultPoint::Attempt, 100 * MS);
                cancel_after(polls, world.lock.acquire()).await.is_some()
            })
        }),
        ("handed the hold", |world, polls| {
            Box::pin(async move {
                let guard = world.lock.acquire().await.unwrap();
                let waiting = cancel_after(polls, world.lock.acquire());
                let releasing = async {
                    tokio::time::sleep(10 * MS).await;
                    guard.release().await.unwrap();
                };
                tokio::join!(waiting, releasing).0.is_some()
            })
        }),
        ("waits for another client", |world, polls| {
            Box::pin(async move {
                let guard = world.their_lock.acquire().await.unwrap();
                let waiting = cancel_after(polls, world.lock.acquire());
                let releasing = async {
                    tokio::time::sleep(10 * MS).await;
                    guard.release().await.unwrap();
                };
                tokio::join!(waiting, releasing).0.is_some()
            })
        }),
        ("release", |world, polls| {
            Box::pin(async move {
                world.backend.delay(FaultPoint::Release, 50 * MS);
                let guard = world.lock.acquire().await.unwrap();
                cancel_after(polls, guard.release()).await.is_some()
            })
        }),
        ("renew", |world, polls| {
            Box::pin(async move {
                world.backend.delay(FaultPoint::Renew, 50 * MS);
                let guard = world.lock.acquire().await.unwrap();
                let renewed = cancel_after(polls, guard.renew()).await;
                renewed.is_some()
            })
        }),
        ("with_lock", |world, polls| {
            Box::pin(async move {
                world.backend.delay(FaultPoint::Attempt, 50 * MS);
                world.backend.delay(FaultPoint::Release, 50 * MS);
                let body = world.lock.with_lock(|_| tokio::time::sleep(10 * MS));
                cancel_after(polls, body).await.is_some()
            })
        }),
    ];
    for (name, path) in paths {
        let mut done = false;
        for polls in 1..100 {
            let case = format!("{name}, dropped after poll {polls}");
            let recorded = Recorded::default();
            recorded.run(async {
                done = path(World::new(), polls).await;
                // Longer than any lease: what is left behind would have ended, too, but for what is counted here.
                tokio::time::sleep(SECOND).await;
                recorded.is_settled(&case);
                let cancelled = recorded.acquisitions("cancelled");
                assert!(cancelled <= 1, "{case}: {cancelled} were cancelled");
                assert_eq!(
                    recorded.recorded("lockkit_hold_seconds{end=expired}"),
                    0,
                    "{case}"
                );
            });
            if done {
                assert!(polls > 1, "{name} never waited: it shows nothing");
                break;
            }
        }
        assert!(done, "{name} never came to an end");
    }
}

/// Two clients of one server.
struct World {
    backend: MemoryBackend,
    lock: Lock,
    their_lock: Lock,
}

impl World {
    fn new() -> Self {
        let backend = MemoryBackend::new();
        let lock = || LockClient::new(backend.clone()).lock("a").unwrap();
        Self {
            lock: lock(),
            their_lock: lock(),
            backend,
        }
    }
}

/// A program may install its recorder after it has made its clients.
#[test]
fn a_client_reports_to_the_recorder_of_its_first_acquisition() {
    let recorded = Recorded::default();
    let runtime = paused();
    let lock = runtime.block_on(async { client().1 }).lock("a").unwrap();
    metrics::with_local_recorder(&recorded, || {
        runtime.block_on(async { lock.acquire().await.unwrap().release().await.unwrap() });
    });
    assert_eq!(recorded.acquisitions("granted"), 1);
    assert_eq!(
        recorded.losses("revoked"),
        0,
        "a counter is there before its first event"
    );
    recorded.is_settled("at the end");
}
