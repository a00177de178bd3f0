//! Each fault that costs an unprotected hold does cost it: one that did not happen would make every torture above pass.

mod faults;
mod left;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit::{AcquireOptions, LockClient, LockGuard};
use lockkit_conformance::torture::{Strike, Target};
use lockkit_torture::embedded::Files;

use crate::target;

const NAME: &str = "tools";

fn strike(fault: &str, place: u32) -> Strike {
    Strike {
        at: 0,
        fault: fault.to_owned(),
        place,
        lasts: 1_500,
    }
}

/// Returns whether `guard` is lost within `limit`.
async fn lost(guard: &LockGuard, limit: Duration) -> bool {
    tokio::time::timeout(limit, guard.lost()).await.is_ok()
}

async fn held(target: &Arc<dyn Target>, ttl: Duration) -> (LockClient, LockGuard) {
    let client = target.connect(&target.routes()[0]).await.expect("a client");
    let lock = client.lock(NAME).expect("a name");
    let guard = lock
        .acquire_with(&AcquireOptions::new().ttl(ttl))
        .await
        .expect("a hold");
    (client, guard)
}

fn run<F: Future>(test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(test)
}

/// Each of the faults ends a hold within `limit`, and healed, the target grants again.
fn each_costs_a_hold(name: &str, faults: &[(&str, u32)], ttl: Duration, limit: Duration) {
    let Some(target) = target(name) else { return };
    run(async {
        for (fault, place) in faults {
            let (_client, guard) = held(&target, ttl).await;
            let strike = strike(fault, *place);
            let began = Instant::now();
            tokio::task::block_in_place(|| target.strike(&strike, &[NAME.to_owned()])).expect("a strike");
            let told = lost(&guard, limit).await;
            tokio::task::block_in_place(|| target.heal(&strike)).expect("healed");
            assert!(told, "{name}: {fault} cost nothing within {:?}", began.elapsed());
            drop(guard);
        }
    });
}

#[test]
fn redis() {
    let faults = [
        ("cut", 0),
        ("silence", 0),
        ("refuse", 0),
        ("pause", 0),
        ("delete", 0),
        ("empty", 0),
        ("restart-empty", 0),
        ("clock", 0),
    ];
    each_costs_a_hold("redis", &faults, Duration::from_secs(1), Duration::from_mins(1));
}

#[test]
fn files() {
    let target = Arc::new(Files::new().expect("a directory"));
    let shared: Arc<dyn Target> = target.clone();
    run(async {
        let (_client, guard) = held(&shared, Duration::from_secs(1)).await;
        // Beside it are files that no hold depends on.
        let files = target.files().expect("its files");
        let lock = files.iter().position(|file| file.ends_with("tools.lock"));
        let place = u32::try_from(lock.expect("the lock's file")).expect("a few files");
        let strike = strike("delete", place);
        tokio::task::block_in_place(|| target.strike(&strike, &[NAME.to_owned()])).expect("a strike");
        assert!(lost(&guard, Duration::from_mins(1)).await, "it cost nothing");
        let (_client, _guard) = held(&shared, Duration::from_secs(1)).await;
    });
}

#[test]
fn mariadb() {
    let faults = [("reset", 0), ("restart", 0), ("pause", 0), ("cut", 0)];
    each_costs_a_hold("mariadb", &faults, Duration::from_secs(2), Duration::from_mins(1));
}

#[test]
fn zookeeper() {
    each_costs_a_hold(
        "zk",
        &[("cut", 0), ("pause", 0)],
        Duration::from_secs(2),
        Duration::from_mins(1),
    );
}

#[test]
fn postgres() {
    let faults = [
        ("reset", 0),
        ("restart", 0),
        ("pause", 0),
        ("cut", 0),
        ("crash", 0),
        ("failover", 0),
    ];
    each_costs_a_hold(
        "postgres",
        &faults,
        Duration::from_secs(2),
        Duration::from_mins(1),
    );
}

#[test]
fn etcd() {
    let faults = [("cut", 0), ("pause", 0), ("lease", 0), ("delete", 0)];
    each_costs_a_hold("etcd", &faults, Duration::from_secs(2), Duration::from_mins(1));
}
