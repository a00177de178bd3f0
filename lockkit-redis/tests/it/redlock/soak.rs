//! A soak: contenders on five masters, each client behind its own proxies, with a fault every other second. The history has
//! every property.

use std::sync::Arc;

use lockkit_conformance::history::Limits;
use lockkit_testbed::{Mode as Fault, Proxy, redis::Fsync};

use super::world::{World, connect};
use crate::{
    common::{MS, SECOND, no_server},
    workers::{TTL, Workers},
};

const CLIENTS: usize = 3;
const WORKERS: usize = 2;
/// The least number of acquisitions. An idle machine makes 20 a second.
const LEAST: usize = 800;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_soak_under_faults_has_no_overlap_and_no_token_goes_back() {
    if no_server() {
        return;
    }
    let world = World::built(5, |builder| {
        builder
            .append_only(Fsync::Always)
            // So that they come back as fast in the end as in the beginning.
            .directive("auto-aof-rewrite-min-size", &["1mb"])
    });
    let mut workers = Workers::new(&["a"]);
    let mut all = Vec::new();
    for _ in 0..CLIENTS {
        let (mut config, proxies) = world.behind_proxies();
        // They keep their grants, and are back before any of them expires.
        config.durable = true;
        workers.add(&connect(config).await.unwrap(), WORKERS);
        all.push(proxies);
    }
    workers
        .disturb(SECOND, LEAST, async |rng| fault(&world, &all, rng).await)
        .await;
    let history = workers.history().await;
    world.nothing_is_left("after the soak").await;

    let mut limits = Limits::default();
    // The longest fault, its detection, reconnecting, and the leases left at a minority.
    limits.idle = 3 * SECOND + 8 * SECOND + 2 * TTL;
    limits.detection = TTL + SECOND;
    workers.check(&history, &limits, LEAST);
}

/// Runs one fault from beginning to end, and returns its name.
async fn fault(world: &World, proxies: &[Arc<Vec<Proxy>>], rng: &mut fastrand::Rng) -> &'static str {
    // Usually a minority.
    let mut which: Vec<_> = (0..5).collect();
    rng.shuffle(&mut which);
    which.truncate(rng.usize(1..4));
    let client = &proxies[rng.usize(..proxies.len())];
    match rng.u8(..5) {
        0 => {
            for master in &which {
                world.masters[*master].kill().unwrap();
            }
            tokio::time::sleep(MS * rng.u32(..300)).await;
            for master in &which {
                world.masters[*master].start().unwrap();
            }
            "killed"
        }
        1 => {
            for master in &which {
                world.masters[*master].pause().unwrap();
            }
            // Sometimes for longer than a lease.
            let longest = if rng.u8(..4) == 0 { 2_500 } else { 500 };
            tokio::time::sleep(MS * rng.u32(..longest)).await;
            for master in &which {
                world.masters[*master].resume().unwrap();
            }
            "stopped"
        }
        2 => {
            for _ in 0..rng.u32(1..10) {
                client[rng.usize(..5)].reset();
                tokio::time::sleep(MS * rng.u32(..50)).await;
            }
            "reset"
        }
        fault => {
            let (mode, name) = if fault == 3 {
                (Fault::DropReplies, "replies lost")
            } else {
                (Fault::Blackhole, "cut off")
            };
            for master in &which {
                client[*master].set(mode);
            }
            tokio::time::sleep(MS * rng.u32(..1_500)).await;
            for master in &which {
                client[*master].set(Fault::Pass);
            }
            name
        }
    }
}
