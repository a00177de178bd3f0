//! The metrics' counters.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};

use lockkit_core::{AcquireOptions, LockClient, MemoryBackend};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

const SECOND: Duration = Duration::from_secs(1);

/// Counters by name and labels.
#[derive(Default)]
struct Counters(Mutex<HashMap<String, Arc<AtomicU64>>>);

impl Counters {
    fn run(&self, test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        metrics::with_local_recorder(self, || runtime.block_on(test));
    }

    fn get(&self, name: &str, label: &str) -> u64 {
        let counters = self.0.lock().unwrap();
        let counter = counters.get(&format!("{name} {label}"));
        counter.map_or(0, |counter| counter.load(Ordering::SeqCst))
    }
}

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let label = key.labels().find(|label| label.key() != "backend");
        let label = label.map_or("", |label| label.value());
        let mut counters = self.0.lock().unwrap();
        let counter = counters.entry(format!("{} {label}", key.name())).or_default();
        Counter::from_arc(counter.clone())
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn a_hand_off_counts_when_it_is_taken() {
    let counters = Counters::default();
    counters.run(async {
        let lock = LockClient::new(MemoryBackend::new()).lock("a").unwrap();
        for cancelled in [true, false] {
            let first = lock.acquire().await.unwrap();
            let mut heir = Box::pin(lock.acquire());
            assert!(
                heir.as_mut()
                    .poll(&mut Context::from_waker(Waker::noop()))
                    .is_pending()
            );
            first.release().await.unwrap();
            if cancelled {
                drop(heir);
                // It goes back to the server.
                tokio::time::sleep(SECOND).await;
            } else {
                heir.await.unwrap().release().await.unwrap();
            }
            let handed_off = counters.get("lockkit_acquisitions_total", "handed_off");
            assert_eq!(handed_off, u64::from(!cancelled));
        }
    });
    assert_eq!(counters.get("lockkit_acquisitions_total", "granted"), 2);
}

#[test]
fn a_loss_counts_once_wherever_it_is_found() {
    let counters = Counters::default();
    counters.run(async {
        let backend = MemoryBackend::new();
        let lock = LockClient::new(backend.clone()).lock("a").unwrap();
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
    assert_eq!(counters.get("lockkit_losses_total", "revoked"), 15);
    assert_eq!(counters.get("lockkit_losses_total", "expired"), 1);
    assert_eq!(counters.get("lockkit_release_failures_total", ""), 0);
}
